"""Learners that die, stop or do not come: all begin again, as if nothing had been."""

import contextlib
import dataclasses
import json
import os
import signal
import threading
import time
from pathlib import Path

import pytest
from faults import fail_at, run_plan

import train_async
from runtime.checkpoint import load_checkpoint, whole_moments
from runtime.config import Config, TrainingStopped, UserError, check
from runtime.folder import read_lines
from runtime.ledger import audit
from runtime.processes import REFILL_SECONDS, Pool
from runtime.team import Team

SMALL = {"groups_per_step": 4, "group_size": 4, "slots": 16, "eval_every": 1000}
SMALL |= {"rollout_workers": 1, "checkpoint_every": 4, "restarts": 50}


def config_of(folder: Path, **flags) -> Config:
    return dataclasses.replace(Config(), out=str(folder), **SMALL | flags)


def summary_of(folder: Path) -> dict:
    return json.loads((folder / "summary.json").read_text())


def test_a_team_that_is_hurt_ends_as_if_nothing_had_been(tmp_path):
    """At staleness 0, with three learners: bitwise the weights of a run that nobody has hurt."""
    plan = [
        fail_at("team", "step", "SIGKILL", after=2),
        fail_at("team", "collective", "SIGKILL", after=5),
        fail_at("team", "moments", "SIGKILL", after=8),
        fail_at("team", "start", "exception", after=9),  # of a successor
        fail_at("team", "meeting", "SIGSTOP"),  # the very first one
    ]
    flags = {"learners": 3, "rollout_workers": 1, "steps": 14, "max_staleness": 0}
    hurt = run_plan(tmp_path / "hurt", plan, **flags)
    assert hurt["faults"] == plan and hurt["ends"] == ["finished"]
    assert (hurt["lost"], hurt["duplicated"], hurt["requeued"]) == (0, 0, 0)
    assert hurt["replayed"] is True
    assert hurt["noticed_after_s"]["dead"] and hurt["noticed_after_s"]["stopped"]
    folder = tmp_path / "hurt" / "run-0"
    again = [e for e in read_lines(folder / "events.jsonl") if e["kind"] == "again"]
    assert len(again) >= 4 and all(e["same"] for e in again)
    assert all(0 <= e["steps"] <= 4 for e in again), again  # since the checkpoint
    whole = run_plan(tmp_path / "whole", [], **flags)
    assert whole["faults"] == []
    sums = [summary_of(tmp_path / name / "run-0")["weights_sha256"] for name in ("hurt", "whole")]
    assert sums[0] == sums[1]


def test_a_run_goes_on_with_another_number_of_learners(tmp_path):
    """1, 2, 3, 1 learners; a replay knows which step had how many."""
    folder = tmp_path / "run"
    train_async.train(config_of(folder, steps=3))
    for steps, learners in ((6, 2), (9, 3), (10, 0), (12, 1)):  # 0: as many as before
        train_async.train(
            dataclasses.replace(Config(), resume=str(folder), steps=steps, learners=learners)
        )
    sizes = [e["learners"] for e in read_lines(folder / "events.jsonl") if e["kind"] == "train"]
    assert sizes == [1] * 3 + [2] * 3 + [3] * 4 + [1] * 2
    assert audit(folder).totals()["in_flight"] == 0
    train_async.train(dataclasses.replace(Config(), replay=str(folder)))  # or TrainingStopped


def test_learners_that_die_too_often_stop_the_run_with_their_names(tmp_path):
    folder = tmp_path / "run"

    def kill():
        killed = set()
        while len(killed) < 2:
            time.sleep(0.2)
            events = []
            with contextlib.suppress(UserError):  # a line is being written
                events = read_lines(folder / "events.jsonl")
            spawned = [e for e in events if e["kind"] == "spawn" and "learner-" in e["process"]]
            spawned = {event["pid"] for event in spawned}
            for pid in spawned - killed:
                os.kill(pid, signal.SIGKILL)
                killed.add(pid)

    threading.Thread(target=kill, daemon=True).start()
    with pytest.raises(TrainingStopped, match="1 restarts of the learners are used up"):
        train_async.train(config_of(folder, steps=3000, learners=2, restarts=1))
    assert load_checkpoint(folder)["version"] >= 0


def test_restarts_are_forgotten_in_time(monkeypatch):
    pool, now = Pool.__new__(Pool), [0.0]
    pool.budget, pool.restarted = 2, {}
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    allowed = []
    for now[0] in (0.0, 1.0, 2.0, REFILL_SECONDS + 1.5, REFILL_SECONDS + 1.6):
        allowed.append(pool._may_restart("reward-0"))
    assert allowed == [True, True, False, True, False]
    assert pool._may_restart("reward-1")


def test_moments_that_are_elsewhere_are_never_written_as_zeros(tmp_path):
    """After a resume, before the learners have met, there is nothing to make a checkpoint of."""
    from learner import make_learner
    from reward import task_of
    from runtime.models import make_model

    config = config_of(tmp_path, learners=2)
    task = task_of(config)
    learner = make_learner(config, task, make_model(config, task))
    assert learner.team == Team((0,), 2) and learner.team.last is None
    assert whole_moments(learner)["exp_avg"].abs().sum() == 0  # of a new run
    learner.version = 7
    with pytest.raises(TrainingStopped, match="the learners are apart since the beginning"):
        whole_moments(learner)


def test_no_more_learners_than_samples():
    check(config_of(Path("nowhere"), learners=16))
    with pytest.raises(UserError, match="--learners 17: must be at most the 16 samples of a step"):
        check(config_of(Path("nowhere"), learners=17))
