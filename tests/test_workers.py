"""What runs in a rollout worker's process, here without one: what it says of its own time."""

import dataclasses

import pytest

from runtime import workers
from runtime.config import Config
from runtime.mailbox import Mailbox
from runtime.setup import make_learner, make_task


class Script:
    """A line that hands out one group, and ends the worker when it waits for more."""

    worker = 0

    def __init__(self, groups: list[dict]):
        self.groups, self.held, self.sent = groups, [], []

    def receive(self, seconds: float = 0.0):
        if self.groups:
            return self.groups.pop(), {}
        if self.sent and seconds:
            raise SystemExit
        return None

    def send(self, kind, header, arrays, hold=False):
        self.held.append(kind)

    def flush(self, seconds=0.0):
        if not seconds:  # whoever waits for work holds nothing back
            self.sent, self.held = self.sent + self.held, []

    def beat(self, header=None):
        pass


def test_a_rollout_worker_that_waits_has_told_all_of_its_generation_and_no_more(monkeypatch):
    """The span ends before it waits for work, and has the first token boundary in it."""
    config = dataclasses.replace(Config(), task="reverse", slots=4, group_size=4)
    task, made, make = make_task(config), [], workers.make_generator
    monkeypatch.setattr(workers.gc, "freeze", lambda: None)
    monkeypatch.setattr(workers, "set_threads", lambda *_: None)
    monkeypatch.setattr(workers, "make_generator", lambda *a: made.append(make(*a)) or made[0])
    flat = make_learner(config, task, "cpu").model.flat
    mailbox = Mailbox(flat.numel())
    mailbox.publish(0, flat)
    monkeypatch.setattr(workers, "Mailbox", lambda *_: mailbox)
    monkeypatch.setattr(workers.atexit, "register", lambda _: None)
    line = Script([{"orders": [(3, 0, task.reset(3, "train"))]}])
    with pytest.raises(SystemExit):
        workers.rollout_worker(line, config, "cpu", "", 1)
    mailbox.close()
    (span,) = [event for event in made[0].events if event[1] == "generate"]
    assert line.sent == ["group"]
    assert {name: span[4][name] for name in workers.COUNTED} == {
        name: made[0].counts[name] for name in workers.COUNTED
    }
    assert span[4]["decode"] < span[4]["seconds"]
