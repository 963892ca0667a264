"""A run that is broken on purpose ends as if nothing had happened, or says by name what did."""

import dataclasses
import json
import time
from types import SimpleNamespace

import faults
import pytest
from faults import fail_at, run_plan

import train_async
from buffer import Buffer
from learner import new_groups
from rollout import generate
from runtime.config import Config, TrainingStopped
from runtime.messages import Group, group_to_parts
from runtime.runlog import read_lines
from runtime.setup import make_generator, make_learner, make_task


def test_a_run_survives_what_befalls_it(tmp_path):
    plan = [
        fail_at("rollout", "send", "SIGKILL", after=12),
        fail_at("rollout", "send", "token", after=25),
        fail_at("reward", "send", "NaN reward", after=45),
        fail_at("learner", "train", "NaN gradient", after=9),
        fail_at("learner", "checkpoint", "full disk", after=11),
        fail_at("reward", "receive", "exception", after=60),
    ]
    result = run_plan(tmp_path / "run", plan, silence=20.0, rollout_workers=1)
    assert result["faults"] == plan  # every one has struck
    assert (result["lost"], result["duplicated"]) == (0, 0)
    stopped, finished = result["ends"]
    assert "File too large" in stopped and "step0000012.pt" in stopped and finished == "finished"
    (dead,) = result["noticed_after_s"]["dead"]
    assert dead < 10
    reasons = [n["reason"] for n in read_lines(tmp_path / "run/faults/noticed.jsonl")]
    assert reasons == [
        "died (exit code -9)",
        "sent a damaged message (token id 70000, must be 0 to 511)",
        "sent a damaged message (reward nan, must be finite)",
        "died (exit code 1: RuntimeError: injected)",
    ]


def test_random_plans_come_to_every_kind_of_fault():
    choose, deck, seen = faults.random.Random(0), [], set()
    for _ in range(16):
        plan = faults.random_plan(choose, deck, 8)
        fatal = [f for f in plan if f["role"] == "learner" and f["kind"] in faults.FATAL]
        assert len(plan) == 8 and len(fatal) <= 2
        seen |= {(f["role"], f["event"], f["kind"]) for f in plan}
    everything = {(*place, kind) for place, kinds in faults.KINDS.items() for kind in kinds}
    assert seen == everything
    with pytest.raises(AssertionError, match="learner log torn: must be one of"):
        fail_at("learner", "log", "torn")


class Here(SimpleNamespace):
    """What a Pool is to Flights, without processes."""

    def of(self, role):
        return [self.worker]

    def send(self, *message):
        pass


@pytest.fixture
def flights():
    status = {"status": {"tokens": 0}}
    worker = SimpleNamespace(name="rollout-0", status=status, said="group", log="log")
    return train_async.Flights(Here(worker=worker, relayed=set()))


def test_orders_go_to_the_least_busy_worker_in_one_message_each():
    first, second = (SimpleNamespace(name=f"rollout-{i}") for i in range(2))
    sent = []
    pool = SimpleNamespace(
        of=lambda role: [first, second],
        send=lambda worker, kind, header: sent.append((worker.name, kind, header["orders"])),
    )
    flights = train_async.Flights(pool)
    groups = [Group(i, 4, {"prompt": str(i)}) for i in range(4)]
    assert flights.issue(groups[:1]) == ["rollout-0"]
    assert flights.issue(groups[1:]) == ["rollout-1", "rollout-0", "rollout-1"]
    orders = [(i, 4, {"prompt": str(i)}) for i in range(4)]
    assert sent == [
        ("rollout-0", "orders", orders[:1]),
        ("rollout-0", "orders", orders[2:3]),
        ("rollout-1", "orders", [orders[1], orders[3]]),
    ]
    assert [flights.place(i) for i in range(5)] == ["with a worker"] * 4 + ["nowhere"]
    assert flights.issue([]) == [] and len(sent) == 3


def test_groups_that_nobody_asked_for_are_named(flights):
    worker, other = flights.pool.worker, SimpleNamespace(name="rollout-1")
    flights.issue([Group(3, 5, {})])
    assert flights.flaw(worker, {"group_id": 3, "start": 5}) is None
    assert flights.flaw(worker, {"group_id": 3, "start": 4}) == "start 4, must be 5"
    for who, group_id in ((other, 3), (worker, 2)):
        flaw = flights.flaw(who, {"group_id": group_id, "start": 5})
        assert flaw == f"group {group_id}, which it does not have: a duplicate?"
    flights.pool.relayed.add(3)
    assert "a duplicate?" in flights.flaw(worker, {"group_id": 3, "start": 5})


def test_a_run_that_stands_still_stops_by_itself(flights, monkeypatch):
    """Everybody says that they live, and nothing moves."""
    config, now, progress = Config(stall=60.0), [100.0], {}
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    flights.issue([Group(3, 5, {})])

    def after(seconds: float, version: int = 0, tokens: int = 0) -> None:
        now[0] += seconds
        flights.pool.worker.status["status"]["tokens"] = tokens
        train_async.check_progress(progress, version, flights, config)

    after(0)
    after(59)
    after(50, tokens=7)  # a long answer is progress
    after(50, tokens=7)
    after(50, tokens=7, version=1)
    after(59, tokens=7, version=1)
    with pytest.raises(TrainingStopped, match="60 s .--stall.; 1 groups .* {3: 'rollout-0'}"):
        after(2, tokens=7, version=1)


def test_a_group_that_killed_its_verifiers_counts_as_failed(flights):
    config = dataclasses.replace(Config(), group_size=2, slots=8)
    task = make_task(config)
    learner = make_learner(config, task, "cpu")
    (group,) = generate(make_generator(config, task, learner.model), new_groups(learner, task, 1))
    buffer, said = Buffer(1, 0), []
    buffer.admit(0, 0)
    flights.issue([group])
    watch = SimpleNamespace(event=lambda *a, **details: said.append(details))
    message = ("unanswered", flights.pool.worker, {"group_id": 0}, group_to_parts(group))
    train_async.handle(message, buffer, flights, 0, watch, {"begin": None, "tokens": 0})
    (done,) = buffer.next_batch(0)
    assert [t.finish for t in done.trajectories] == ["verifier_lost"] * 2
    assert said[-1]["failed"] == {0: "verifier_lost", 1: "verifier_lost"}
    assert json.dumps(said[-1])
