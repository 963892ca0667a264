"""What runs in a worker's process, here without one: what it says, and of its own time."""

import dataclasses
from collections import Counter
from multiprocessing import Pipe
from types import SimpleNamespace

import pytest

from learner import make_learner, new_groups
from reward import task_of
from rollout import generate, make_generator
from runtime import sessions, workers
from runtime.config import Config
from runtime.mailbox import Mailbox
from runtime.messages import Answer, Group
from runtime.models import make_model

CONFIG = dataclasses.replace(Config(), task="reverse", slots=4, group_size=4)


class Script:
    """A line that hands out groups one by one, and ends the worker when it waits for more."""

    worker, over = 0, False

    def __init__(self, *groups: Group):
        self.groups, self.sent, self.status = list(groups), [], {}

    def receive(self, seconds: float = 0.0):
        if self.groups:
            return [self.groups.pop(0)]
        if self.sent and self.over:
            raise SystemExit
        self.over = bool(self.sent)  # once more: it may end what it has begun
        return []

    def send(self, *messages):
        self.sent += messages

    def beat(self):
        pass


@pytest.fixture(autouse=True)
def no_settings(monkeypatch):
    """What a process does to itself would last longer than a test."""
    monkeypatch.setattr(workers.gc, "freeze", lambda: None)
    monkeypatch.setattr(workers, "take_place", lambda *_: "cpu")
    monkeypatch.setattr(workers.atexit, "register", lambda _: None)


def run(monkeypatch, config: Config, line: Script):
    """A rollout worker with random weights, until it waits; returns its generator."""
    made, make = [], workers.make_generator
    monkeypatch.setattr(workers, "make_generator", lambda *a: made.append(make(*a)) or made[0])
    model = make_model(config, task_of(config))
    flat = model.flat
    mailbox = Mailbox(flat)
    mailbox.publish(0, flat)
    monkeypatch.setattr(workers, "Mailbox", lambda *_: mailbox)
    with pytest.raises(SystemExit):
        workers.rollout_worker(line, config, model.config, "")
    mailbox.close()
    return made[0]


def test_a_rollout_worker_that_waits_has_told_all_of_its_generation_and_no_more(monkeypatch):
    """The span ends before it waits for work, and has the first token boundary in it."""
    line = Script(Group(3, 0, task_of(CONFIG).reset(3, "train")))
    generator = run(monkeypatch, CONFIG, line)
    (span,) = [event for event in generator.events if event[1] == "generate"]
    (message,) = line.sent
    assert isinstance(message, Answer) and message.judgement is None
    assert {name: span[4][name] for name in workers.COUNTED} == {
        name: generator.counts[name] for name in workers.COUNTED
    }
    assert span[4]["decode"] < span[4]["seconds"]


def test_answers_do_not_wait_for_the_end_of_calls(monkeypatch):
    """Where every step has a call to an environment outside, answers leave with the calls."""

    class Calling:
        counts, version, newest, busy, events, steps = Counter(), 0, 0, True, [], 0

        def set_weights(self, *_): ...

        def step(self):
            self.steps += 1
            return True

        def take_finished(self):
            return [Group(3, 0, {})] if self.steps == 1 else []

        def take_calls(self):
            if self.steps > 50:
                raise SystemExit
            return [f"call {self.steps}"]

    line = Script()
    line.receive = lambda seconds: []
    monkeypatch.setattr(workers, "make_generator", lambda *_: Calling())
    monkeypatch.setattr(workers, "Mailbox", lambda *_: SimpleNamespace(version=-1, close=None))
    with pytest.raises(SystemExit):
        workers.rollout_worker(line, CONFIG, make_model(CONFIG, task_of(CONFIG)).config, "")
    assert [message for message in line.sent[:2] if isinstance(message, Answer)]


def test_who_generates_verifies_where_there_is_nobody_else(monkeypatch):
    config = dataclasses.replace(CONFIG, reward_workers=0)
    line = Script(Group(3, 0, task_of(config).reset(3, "train")))
    run(monkeypatch, config, line)
    (message,) = line.sent
    assert len(message.judgement.verdicts) == 4 and message.judgement.seconds > 0


def test_a_reward_worker_sends_verdicts_and_no_episodes():
    task = task_of(CONFIG)
    learner = make_learner(CONFIG, task, make_model(CONFIG, task))
    (group,) = generate(make_generator(CONFIG, task, learner.model), new_groups(learner, task, 1))
    line = Script(group)
    line.connection, there = Pipe()
    with pytest.raises(SystemExit), there:
        sessions.reward_worker(line, CONFIG)
    (message,) = line.sent
    assert isinstance(message, Answer) and len(message.judgement.verdicts) == 4
    assert message.group_id == group.group_id and message.group is None


def test_a_group_brings_its_own_events_and_leaves_others_theirs():
    """Of two groups that finish at once, either may arrive alone: a campaign of faults had a worker
    send one of them first, and the ledger saw it judged before it was finished."""
    events = [(0.0, "start", 4), (0.1, "start", 5), (0.2, "generate", -1), (0.3, "finish", 5)]
    generator = SimpleNamespace(events=[*events, (0.3, "finish", 4)])
    own = workers.events_of(generator, 5)
    assert own == [events[1], events[2], events[3]]
    assert generator.events == [events[0], (0.3, "finish", 4)]
    assert workers.events_of(generator, 4) == [events[0], (0.3, "finish", 4)]
    assert generator.events == []
