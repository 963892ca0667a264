"""workers.py: what runs in the processes of an asynchronous run, beside the parent.

A rollout worker generates, a learner of rank 1 or more trains on its share of each batch. Each
talks to the parent through one `Line` (pipes.py). Rollout workers read the mailbox; learners meet
each other (team.py).
Left out: reward workers (verifier.py), who gets which work, and what happens when one of them dies
(pool.py).
"""

import atexit
import gc
import threading
import time

from fast.eightbit import form_of
from learner import learner_step, make_learner
from model import ModelConfig
from reward import task_of
from rollout import COUNTED, Generator, make_generator
from runtime.advice import advice_of, judge
from runtime.checkpoint import load_state, whole_moments
from runtime.config import Config
from runtime.devices import take_place
from runtime.huggingface import base_model
from runtime.mailbox import Mailbox
from runtime.messages import Answer, Group, pack, unpack
from runtime.pipes import Line
from runtime.team import Begin, GatherMoments, join_team


def rollout_worker(line: Line, config: Config, shape: ModelConfig, mailbox_place):
    """Generate what is asked for, with the newest weights that are in the mailbox."""
    device = take_place(config, config.team_size + line.worker)
    model = base_model(config, shape, stored=True).on(device)
    task = task_of(config)
    generator = make_generator(config, task, model, line.worker)
    advice = None if config.reward_workers else advice_of(config, task)
    generator.version = -1  # the first weights come from the mailbox, too
    form = form_of(model, config.published)
    if isinstance(mailbox_place, str):
        mailbox = Mailbox(model.flat, mailbox_place, form)
        atexit.register(mailbox.close)
    else:
        from runtime.cluster import RemoteMailbox  # importing Ray takes a second

        mailbox = RemoteMailbox(mailbox_place, model.flat, form)
    gc.freeze()  # as in open_run (run.py)
    active = False
    span = None  # of generation with one version: when it began, the version, counts before it
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
        if span and not (active and generator.version == span[1]):
            since, version, counts = span
            details = {name: before[name] - counts[name] for name in COUNTED}
            details["seconds"] = begin - since
            generator.events.append((since, "generate", -1, version, details))
            span = None
        if active:
            span = span or (begin, generator.version, before)
        line.status = {**generator.counts}
        answers = []
        for group in generator.take_finished():
            judgement = judge(group, task, config, advice, line.beat) if advice else None
            events = events_of(generator, group.group_id)
            answers.append(Answer(group.group_id, pack(group), judgement, events))
        if messages := [*generator.take_calls(), *answers]:
            line.send(*messages)
        line.beat()


def events_of(generator: Generator, group_id: int) -> list[tuple]:
    """Take a group's events, and those of no group, from a generator. They travel with the group's
    answer: so no group ever arrives without its events."""
    events, generator.events = generator.events, []
    taken = []
    for event in events:
        (taken if event[2] in (-1, group_id) else generator.events).append(event)
    return taken


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
                case Begin(_, _, state):
                    load_state(learner, state)
                    join_team(learner.team, message)
                case GatherMoments():
                    whole_moments(learner)
                case batch:
                    learner_step(learner, [*map(unpack, batch)], config)


def live(line: Line) -> None:
    """A thread that says "alive" also in a long step. A step that never ends is noticed by the
    other learners."""
    while True:
        line.beat()
        time.sleep(0.5)
