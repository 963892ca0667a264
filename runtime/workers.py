"""workers.py: what runs in the processes of an asynchronous run, beside the parent.

A rollout worker generates, a learner of rank 1 or more trains on its share of each batch. Each
talks to the parent through one `Line` (pipes.py). Rollout workers read the mailbox; learners meet
each other (team.py).
Left out: reward workers (verifier.py), who gets which work, and what happens when one of them dies
(pool.py).
"""

import gc
import threading
import time

from learner import learner_step, make_learner
from model import ModelConfig
from reward import task_of
from rollout import COUNTED, make_generator
from runtime.checkpoint import load_state
from runtime.config import Config
from runtime.devices import take_place
from runtime.huggingface import base_model
from runtime.judge import judge_of
from runtime.messages import Answer, Group
from runtime.pipes import Line
from runtime.team import Begin, join_team


def rollout_worker(line: Line, config: Config, shape: ModelConfig, open_mailbox):
    """Generate what is asked for, with the newest weights that are in the mailbox.

    open_mailbox(weights): the mailbox, whose weights go to where these are.
    """
    device = take_place(config, config.team_size + line.worker)
    model = base_model(config, shape, stored=True).on(device)
    task = task_of(config)
    generator = make_generator(config, task, model)
    judge = None if config.reward_workers else judge_of(config, task)
    generator.version = -1  # the first weights come from the mailbox, too
    mailbox = open_mailbox(model.flat)
    gc.freeze()  # as in open_run (run.py)
    active = False
    span = None  # of generation with one version: when it began, the version, counts before it
    if device == "cpu":  # a GPU's first step may compile for long: no sign of life before it
        line.beat()

    while True:
        for work in line.receive(0.0 if active else 0.0005 if generator.busy else 0.02):
            if isinstance(work, Group):
                generator.submit(work)
            else:
                generator.hear(work.key, work)
        if mailbox.version > generator.newest:
            generator.set_weights(*mailbox.read())
        begin, before = time.time(), generator.counts.copy()
        active = generator.step()
        # a span ends when nothing is generated, or when the version changes
        if span and not (active and generator.version == span[1]):
            since, version, counts = span
            details = {name: before[name] - counts[name] for name in COUNTED}
            details["seconds"] = begin - since
            generator.events.append((since, "generate", -1, version, details))
            span = None
        if active:
            span = span or (begin, generator.version, before)
        messages = generator.take_calls()
        for group in generator.take_finished():
            # events travel with answers: so no group ever arrives without its own
            events, generator.events = generator.events, []
            judgement = judge(group, line.beat) if judge else None
            messages.append(Answer(group.group_id, group, judgement, events))
        if messages:
            line.send(*messages)
        line.beat()


def learner_worker(line: Line, config: Config, shape: ModelConfig):
    """One learner of several: the same steps on its share of every batch's micro-batches."""
    rank = 1 + line.worker
    model = base_model(config, shape, stored=True).on(take_place(config, rank))
    learner = make_learner(config, task_of(config), model, (rank,))
    gc.freeze()
    threading.Thread(target=live, args=(line,), daemon=True).start()
    while True:
        for message in line.receive(0.5):
            match message:
                case dict():  # what a checkpoint holds
                    load_state(learner, message)
                    line.status = {"loaded": True}  # `live` tells it
                case Begin():
                    join_team(learner.team, message)
                case batch:
                    learner_step(learner, batch, config)


def live(line: Line) -> None:
    """A thread that says "alive" also in a long step. A step that never ends is noticed by the
    other learners."""
    while True:
        line.beat()
        time.sleep(0.5)
