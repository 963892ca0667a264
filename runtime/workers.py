"""workers.py: what runs in the processes of an asynchronous run, beside the learner.

A rollout worker generates, a reward worker verifies, a learner of rank 1 or more trains on its
share of each batch. Each talks to the parent through one `Line` (transport.py), and has nothing
else in common with the others but the mailbox.
Left out: who gets which work, and what happens when one of them dies (train_async.py).
"""

import atexit
import gc
import time
from datetime import timedelta
from pathlib import Path

import torch.distributed as dist

from learner import learner_step
from reward import judge
from rollout import COUNTED
from runtime.checkpoint import load_checkpoint, restore
from runtime.config import Config
from runtime.devices import set_threads
from runtime.mailbox import Mailbox
from runtime.messages import Group, group_from_parts, group_to_parts
from runtime.processes import HOLD_SECONDS, Line
from runtime.setup import make_generator, make_learner, make_model, make_task


def rollout_worker(line: Line, config: Config, device: str, mailbox_name: str, processes: int):
    """Generate what is asked for, with the newest weights that are in the mailbox."""
    set_threads(config, processes, device)
    task = make_task(config)
    model = make_model(config, task).on(device)
    generator = make_generator(config, task, model, line.worker)
    generator.version = -1  # the first weights come from the mailbox, too
    born, span = time.monotonic(), None
    mailbox = Mailbox(model.flat.numel(), mailbox_name, device)
    atexit.register(mailbox.close)
    gc.freeze()  # as in train_sync.py
    line.beat()

    while True:
        message = line.receive(0.0 if generator.busy or span else 0.02)  # no span while it waits
        while message:
            for order in message[0]["orders"]:
                generator.submit(Group(*order))
            message = line.receive()
        if mailbox.version > generator.newest:
            generator.set_weights(*mailbox.read())
        begin, before = time.monotonic(), dict(generator.counts)
        active = generator.step()
        if span and (not active or generator.version != span[1]):
            done = {name: before[name] - span[2][name] for name in COUNTED}
            done["seconds"] = begin - span[0]
            generator.events.append((span[0], "generate", -1, span[1], done))
            span = None
        if active:
            span = span or (begin, generator.version, before)
        else:
            time.sleep(0.0005)
        finished = generator.take_finished()
        status = {**generator.counts, "alive": time.monotonic() - born}
        for group in finished:  # with the first one goes what has happened since the last
            header, arrays = group_to_parts(group)
            news = {"events": generator.events, "status": status}
            if not config.reward_workers:
                news["verdict"] = judge(group, task, config, line.beat)
            line.send("group", header | news, arrays, hold=True)
            generator.events = []
        line.flush(HOLD_SECONDS if active else 0.0)
        if not finished:
            line.beat({"status": status})


def reward_worker(line: Line, config: Config):
    """Verify one group after the other; each episode has its own time limit."""
    task = make_task(config)
    gc.freeze()
    line.beat()
    while True:
        message = line.receive(0.5)
        if message:
            group = group_from_parts(*message)
            verdict = judge(group, task, config, line.beat)
            line.send("scores", {"group_id": group.group_id, **verdict})
        line.beat()


def learner_worker(line: Line, config: Config, rank: int, device: str, run: str, processes: int):
    """Learner `rank` of several: the same steps on its share of every batch's micro-batches."""
    set_threads(config, processes, device)
    learner = make_learner(config, make_task(config), device)
    if config.resume:
        restore(learner, load_checkpoint(Path(config.resume)), config)
    join_learners(config, rank, run)
    gc.freeze()
    batch: list[Group] = []
    while True:
        message = line.receive(0.5)
        line.beat()
        if message:
            batch.append(group_from_parts(*message))
        if len(batch) == config.groups_per_step:
            learner_step(learner, batch, config, rank)
            batch = []


def meeting_point(run: str | Path) -> Path:
    """The file through which the learners of a run find each other."""
    return Path(run).resolve() / "checkpoints" / "meeting"


def join_learners(config: Config, rank: int, run: str) -> None:
    """Meet the other learners; gradients are summed with gloo, on CPU and GPU alike."""
    meeting = f"file://{meeting_point(run)}"
    wait = timedelta(seconds=60)
    dist.init_process_group("gloo", meeting, wait, config.learners, rank)
