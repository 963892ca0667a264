"""workers.py: what runs in the processes of an asynchronous run, beside the learner.

A rollout worker generates, a reward worker verifies, a learner of rank 1 or more trains on its
share of each batch. Each talks to the parent through one `Line` (processes.py), and has nothing
else in common with the others but the mailbox.
Left out: who gets which work, and what happens when one of them dies (train_async.py).
"""

import atexit
import gc
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path

import torch.distributed as dist

from learner import learner_step, make_learner
from model import GPT, ModelConfig
from reward import Task, verify_group
from rollout import COUNTED, make_generator
from runtime import devices
from runtime.checkpoint import load_checkpoint, restore
from runtime.config import Config
from runtime.mailbox import Mailbox
from runtime.messages import Generated, Group, Judgement, Verified
from runtime.processes import Line
from runtime.setup import task_of

# A finished group waits this long for others to travel with: 1.05 times the episodes a second.
TOGETHER_SECONDS = 0.005


def judge(group: Group, task: Task, config: Config, alive: Callable) -> Judgement:
    """Verify a group, and say how long that took."""
    began = time.monotonic()
    verdicts = verify_group(group, task, config, alive)
    return Judgement(verdicts, began, time.monotonic() - began)


def generated(span: tuple, end: float, counts: dict) -> tuple:
    """The event of a span of generation with one version of the weights."""
    begin, version, before = span
    details = {name: counts[name] - before[name] for name in COUNTED}
    return begin, "generate", -1, version, details | {"seconds": end - begin}


def rollout_worker(
    line: Line,
    config: Config,
    shape: ModelConfig,
    device: str,
    mailbox_name: str,
    processes: int,
):
    """Generate what is asked for, with the newest weights that are in the mailbox."""
    devices.set_threads(config, processes, device)
    task = task_of(config)
    model = GPT(shape, config.seed).on(device)
    generator = make_generator(config, task, model, line.worker)
    generator.version = -1  # the first weights come from the mailbox, too
    mailbox = Mailbox(model.flat.numel(), mailbox_name, device)
    atexit.register(mailbox.close)
    gc.freeze()  # as in open_training (setup.py)
    born, finished, since, span = time.monotonic(), [], 0.0, None
    line.beat()

    while True:
        message = line.receive(0.0 if generator.busy or finished else 0.02)
        while message:
            for group in message.groups:
                generator.submit(group)
            message = line.receive()
        if mailbox.version > generator.newest:
            generator.set_weights(*mailbox.read())
        begin, before = time.monotonic(), generator.counts.copy()
        active = generator.step()
        if span and not (active and generator.version == span[1]):
            generator.events.append(generated(span, begin, before))
            span = None
        if active:
            span = span or (begin, generator.version, before)
        else:
            time.sleep(0.0005)
        status = {**generator.counts, "alive": time.monotonic() - born}
        for group in generator.take_finished():
            judgement = None if config.reward_workers else judge(group, task, config, line.beat)
            since = since if finished else time.monotonic()
            events, generator.events = generator.events, []
            finished.append(Generated(group, events, status, judgement))
        if finished and (not active or time.monotonic() - since >= TOGETHER_SECONDS):
            line.send(*finished)
            finished = []
        line.beat(status)


def reward_worker(line: Line, config: Config):
    """Verify one group after the other; each episode has its own time limit."""
    task = task_of(config)
    gc.freeze()
    while True:
        line.beat()
        if message := line.receive(0.5):
            for group in message.groups:
                line.send(Verified(group.group_id, judge(group, task, config, line.beat)))


def learner_worker(
    line: Line,
    config: Config,
    shape: ModelConfig,
    device: str,
    run: str,
    processes: int,
    rank: int,
):
    """Learner `rank` of several: the same steps on its share of every batch's micro-batches."""
    devices.set_threads(config, processes, device)
    learner = make_learner(config, task_of(config), GPT(shape, config.seed).on(device))
    restore(learner, load_checkpoint(Path(run)), config)
    join_learners(config, rank, run)
    gc.freeze()
    while True:
        line.beat()
        if message := line.receive(0.5):
            learner_step(learner, message.groups, config, rank)


def meeting_point(run: str | Path) -> Path:
    """The file through which the learners of a run find each other."""
    return Path(run).resolve() / "checkpoints" / "meeting"


def join_learners(config: Config, rank: int, run: str) -> None:
    """Meet the other learners; gradients are summed with gloo, on CPU and GPU alike."""
    meeting = f"file://{meeting_point(run)}"
    dist.init_process_group("gloo", meeting, timedelta(seconds=60), config.learners, rank)
