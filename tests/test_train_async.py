"""The asynchronous trainer, with real processes: equal to the synchronous one where it must be,
within its staleness bound, and alive after kill -9, Ctrl-C and resume."""

import dataclasses
import json
import multiprocessing
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
import torch
from faults import group_is_gone

import train_async
import train_sync
from buffer import Buffer
from runtime import checkpoint
from runtime.checkpoint import completed_groups, load_checkpoint
from runtime.config import Config, TrainingStopped
from runtime.ledger import audit
from runtime.runlog import read_lines

ROOT = Path(__file__).parent.parent
SMALL = {"groups_per_step": 4, "group_size": 4, "slots": 16, "steps": 12, "eval_every": 6}


@pytest.fixture(autouse=True)
def nobody_is_left():
    """A trainer ends every process that it started."""
    yield
    assert multiprocessing.active_children() == []


def config_of(folder, **flags) -> Config:
    return dataclasses.replace(Config(), **{"out": str(folder), **SMALL, **flags})


def summary_of(folder) -> dict:
    return json.loads((folder / "summary.json").read_text())


def trained_groups(folder) -> list[int]:
    events = read_lines(folder / "events.jsonl")
    return [g for e in events if e["kind"] == "train" for g in e["groups"]]


def balanced(folder) -> dict:
    """Check a run's log again, without the trainer; returns its totals."""
    _, ledger = audit(folder)
    assert ledger.totals() == summary_of(folder)["ledger"]
    return ledger.totals()


def replayed(folder) -> None:
    """Execute a run again; an event or final weights that differ raise TrainingStopped."""
    train_async.train(dataclasses.replace(Config(), replay=str(folder)))


def kinds_of(folder) -> dict[str, set[str]]:
    """Kinds of events in a run's log, with the processes that they happened to."""
    kinds: dict[str, set[str]] = {}
    for event in read_lines(folder / "events.jsonl"):
        kinds.setdefault(event["kind"], set()).add(event["process"])
    return kinds


@pytest.mark.parametrize("compile", ["no", pytest.param("decode", marks=pytest.mark.compiles)])
def test_staleness_zero_is_bitwise_the_synchronous_algorithm(tmp_path, compile):
    torch.compiler.reset()
    flags = {"steps": 20, "max_staleness": 0, "rollout_workers": 1, "compile": compile}
    train_async.train(config_of(tmp_path / "async", **flags))
    train_sync.train(config_of(tmp_path / "sync", **flags))
    one, other = (summary_of(tmp_path / name) for name in ("async", "sync"))
    assert one["weights_sha256"] == other["weights_sha256"]
    assert one["steps"] == 20 and one["staleness"] == {"max": 0, "mean": 0.0, "bound": 0}
    assert one["eval"] == other["eval"]


@pytest.mark.parametrize(
    "swap, eta, flags",
    [
        ("keep", 1, {"rollout_workers": 3}),
        ("recompute", 4, {"task": "sum:16", "reward_workers": 2, "rollout_workers": 1}),
        ("drain", 2, {"rollout_workers": 2}),
        ("keep", 1, {"on_stale": "drop", "task": "sum:32"}),
        ("keep", 2, {"learners": 2, "rollout_workers": 1}),
        ("keep", 2, {"reward_workers": 0, "task": "guess", "rollout_workers": 2}),
    ],
)
def test_staleness_is_bounded_and_nothing_is_lost(tmp_path, swap, eta, flags):
    train_async.train(config_of(tmp_path / "run", swap=swap, max_staleness=eta, **flags))
    summary = summary_of(tmp_path / "run")
    groups = summary["groups"]
    assert summary["steps"] == 12 and summary["staleness"]["bound"] == eta
    assert summary["staleness"]["max"] <= eta
    discarded = sum(groups["discarded"].values())
    assert groups["trained"] == 48 and groups["in_flight"] == 0
    assert groups["admitted"] == groups["trained"] + discarded
    assert discarded == 0 or flags.get("on_stale") == "drop"
    trained = trained_groups(tmp_path / "run")
    assert len(trained) == len(set(trained)) == 48
    assert balanced(tmp_path / "run")["discarded"] == groups["discarded"]
    kinds = kinds_of(tmp_path / "run")
    wanted = "admit start swap finish score train publish checkpoint spawn exit generate".split()
    assert set(kinds) - {"discard"} == set(wanted)
    workers = set.union(*kinds.values()) - {"learner"}
    judges = "rollout" if flags.get("reward_workers") == 0 else "reward"
    assert kinds["spawn"] == kinds["exit"] == workers >= {"rollout-0"}
    assert all(name.startswith(judges) for name in kinds["score"])
    if eta > 1:  # it really was asynchronous
        assert summary["staleness"]["mean"] > 0
    if flags.get("learners", 1) == 1:
        replayed(tmp_path / "run")


def kill_when(folder: Path, name: str, steps: int) -> threading.Thread:
    """A thread that kills the worker `name` once `steps` steps are done."""

    def wait_and_kill():
        while len(read_lines(folder / "metrics.jsonl")) <= steps:
            time.sleep(0.02)
        (victim,) = (p for p in multiprocessing.active_children() if p.name == name)
        os.kill(victim.pid, signal.SIGKILL)

    thread = threading.Thread(target=wait_and_kill, daemon=True)
    thread.start()
    return thread


@pytest.mark.parametrize("name, judges", [("rollout-0", 1), ("reward-0", 1), ("rollout-0", 0)])
def test_kill_9_is_named_and_survived(tmp_path, capsys, name, judges):
    folder = tmp_path / "run"
    thread = kill_when(folder, name, 3)
    train_async.train(config_of(folder, steps=40, reward_workers=judges))
    thread.join(1)
    summary = summary_of(folder)
    assert summary["steps"] == 40 and summary["groups"]["trained"] == 160
    assert summary["workers_lost"] == [f"{name} died (exit code -9)"]
    assert summary["staleness"]["max"] <= summary["staleness"]["bound"]
    trained = trained_groups(folder)
    assert sorted(trained) == list(range(160))  # each prompt exactly once
    totals, kinds = balanced(folder), kinds_of(folder)
    assert totals["lost"] == totals["requeued"] == summary["groups"]["requeued"]
    assert (totals["lost"] > 0) == (name == "rollout-0") == ("requeue" in kinds)
    spawned = [e for e in read_lines(folder / "events.jsonl") if e["kind"] == "spawn"]
    assert len(spawned) == 1 + len(kinds["spawn"])
    replayed(folder)


def test_a_group_that_vanishes_is_named_at_the_next_step(tmp_path, monkeypatch):
    """Mutation: one group is dropped from the buffer, and nobody says so."""
    complete = Buffer.complete

    def forgetful(self, group):
        if group.group_id == 9:
            del self.outstanding[9]
            self.counts["admitted"] -= 1  # the buffer's own sum still comes out right
            return True
        return complete(self, group)

    monkeypatch.setattr(Buffer, "complete", forgetful)
    with pytest.raises(AssertionError, match="group 9: scored .* in the buffer; .* it nowhere"):
        train_async.train(config_of(tmp_path / "run", steps=40))


def test_a_group_that_is_not_issued_again_is_named(tmp_path, monkeypatch):
    """Mutation: of the groups that a dead worker had, the first is left where it was."""
    folder, lost_with = tmp_path / "run", train_async.Flights.lost_with
    monkeypatch.setattr(train_async.Flights, "lost_with", lambda *a: lost_with(*a)[1:])
    thread = kill_when(folder, "rollout-0", 3)
    with pytest.raises(AssertionError, match="group .* with a worker; .* with a dead worker"):
        train_async.train(config_of(folder, steps=100_000))
    thread.join(1)


def test_a_worker_that_dies_again_and_again_stops_the_run_with_a_checkpoint(tmp_path):
    folder = tmp_path / "run"
    thread = kill_when(folder, "rollout-0", 3)
    with pytest.raises(TrainingStopped, match="rollout-0 died .exit code -9.*rollout-0.log"):
        train_async.train(config_of(folder, steps=100_000, restarts=0))
    thread.join(1)
    assert load_checkpoint(folder)["version"] >= 3


def test_ctrl_c_ends_with_a_checkpoint_and_resume_loses_nothing(tmp_path):
    folder = tmp_path / "run"
    flags = [f"--{k.replace('_', '-')}={v}" for k, v in SMALL.items() if k != "steps"]
    command = [sys.executable, "train_async.py", "--out", str(folder), "--steps=100000", *flags]
    process = subprocess.Popen(
        command, cwd=ROOT, start_new_session=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )
    deadline = time.monotonic() + 60
    while len(read_lines(folder / "metrics.jsonl")) < 8:
        assert process.poll() is None and time.monotonic() < deadline, process.communicate()
        time.sleep(0.05)
    asked = time.monotonic()
    os.killpg(process.pid, signal.SIGINT)  # as a terminal does it: to every process of the group
    out, err = process.communicate(timeout=30)
    assert time.monotonic() - asked < 15  # 5 s on a quiet machine
    assert process.returncode == 0, err
    assert group_is_gone(process.pid, 5)
    assert b"Traceback" not in err and b"steps," in out
    state = load_checkpoint(folder)
    assert state["version"] >= 7 and state["in_flight"]
    assert summary_of(folder)["stopped_early"]
    assert balanced(folder)["in_flight"] == len(state["in_flight"])

    steps = state["version"] + 10
    resume = dataclasses.replace(Config(), resume=str(folder), steps=steps)
    train_async.train(resume)
    assert sorted(trained_groups(folder)) == list(range(4 * steps))
    totals = balanced(folder)  # of both parts
    kept = [int(group.group_id) for group in completed_groups(state)]
    assert set(kept) <= set(state["in_flight"])
    assert totals["lost"] == totals["requeued"] == len(state["in_flight"]) - len(kept)
    assert totals["admitted"] == totals["trained"] == 4 * steps and totals["in_flight"] == 0
    replayed(folder)
    assert summary_of(folder)["staleness"]["max"] <= summary_of(folder)["staleness"]["bound"]


def test_groups_that_were_complete_are_not_made_again(tmp_path, monkeypatch):
    folder, keep_all = tmp_path / "run", (1000,)
    monkeypatch.setattr(checkpoint.save_checkpoint, "__defaults__", keep_all)
    config = config_of(folder, steps=20, max_staleness=4, checkpoint_every=1, lr=1e-3)
    train_async.train(config)
    paths = sorted((folder / "checkpoints").glob("*.pt"))
    while not load_checkpoint(folder)["completed"]:  # as if it had been killed after that one
        paths.pop().unlink()
    state = load_checkpoint(folder)
    kept = [group.group_id for group in completed_groups(state)]
    train_async.train(dataclasses.replace(Config(), resume=str(folder), steps=20))
    events = read_lines(folder / "events.jsonl")
    scored = [e["group"] for e in events if e["kind"] == "score"]
    assert all(scored.count(group) == 1 for group in kept)
    assert sorted(trained_groups(folder)) == list(range(80))
    totals = balanced(folder)
    assert totals["lost"] == totals["requeued"] == len(state["in_flight"]) - len(kept)
    assert summary_of(folder)["staleness"]["max"] <= 4
    replayed(folder)


def test_a_log_goes_on_after_kill_9_of_the_whole_run(tmp_path):
    """What was done after the last checkpoint is done again, and written down once."""
    folder = tmp_path / "run"
    flags = [f"--{k.replace('_', '-')}={v}" for k, v in SMALL.items() if k != "steps"]
    command = [sys.executable, "train_async.py", "--out", str(folder), "--steps=100000", *flags]
    process = subprocess.Popen(
        [*command, "--checkpoint-every=5"], cwd=ROOT, start_new_session=True, stderr=-3, stdout=-3
    )
    deadline = time.monotonic() + 60
    while len(read_lines(folder / "metrics.jsonl")) < 9:
        assert process.poll() is None and time.monotonic() < deadline
        time.sleep(0.02)
    process.kill()
    process.wait()
    assert group_is_gone(process.pid, 10)
    with (folder / "events.jsonl").open("a") as file:
        file.write('{"t": 1.0, "kind": "sw')  # a line that was being written
    state = load_checkpoint(folder)
    assert state["version"] % 5 == 0 and state["in_flight"]
    train_async.train(dataclasses.replace(Config(), resume=str(folder), steps=state["version"] + 6))
    assert balanced(folder)["trained"] == 4 * (state["version"] + 6)
    assert sorted(trained_groups(folder)) == list(range(4 * (state["version"] + 6)))
    replayed(folder)
