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

import common
import train_async
import train_sync

ROOT = Path(__file__).parent.parent
SMALL = {"groups_per_step": 4, "group_size": 4, "slots": 16, "steps": 12, "eval_every": 6}


@pytest.fixture(autouse=True)
def nobody_is_left():
    """A trainer ends every process that it started."""
    yield
    assert multiprocessing.active_children() == []


def config_of(folder, **flags) -> common.Config:
    return dataclasses.replace(common.Config(), **{"out": str(folder), **SMALL, **flags})


def summary_of(folder) -> dict:
    return json.loads((folder / "summary.json").read_text())


def trained_groups(folder) -> list[int]:
    events = common.read_lines(folder / "events.jsonl")
    return [g for e in events if e["kind"] == "train" for g in e["groups"]]


def test_staleness_zero_is_bitwise_the_synchronous_algorithm(tmp_path):
    flags = {"steps": 20, "max_staleness": 0, "rollout_workers": 1}
    train_async.train(config_of(tmp_path / "async", **flags))
    train_sync.train(config_of(tmp_path / "sync", **flags))
    one, other = (summary_of(tmp_path / name) for name in ("async", "sync"))
    assert one["weights_sha256"] == other["weights_sha256"]
    assert one["steps"] == 20 and one["staleness"] == {"max": 0, "mean": 0.0, "bound": 0}
    assert one["eval"] == other["eval"]


@pytest.mark.parametrize(
    "swap, eta, flags",
    [
        ("keep", 1, {}),
        ("recompute", 4, {"task": "sum:16", "reward_workers": 2}),
        ("drain", 2, {"rollout_workers": 2}),
        ("keep", 1, {"on_stale": "drop", "task": "sum:32"}),
        ("keep", 2, {"learners": 2, "rollout_workers": 1}),
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
    if eta > 1:  # it really was asynchronous
        assert summary["staleness"]["mean"] > 0


def kill_when(folder: Path, name: str, steps: int) -> threading.Thread:
    """A thread that kills the worker `name` once `steps` steps are done."""

    def wait_and_kill():
        while len(common.read_lines(folder / "metrics.jsonl")) <= steps:
            time.sleep(0.02)
        (victim,) = (p for p in multiprocessing.active_children() if p.name == name)
        os.kill(victim.pid, signal.SIGKILL)

    thread = threading.Thread(target=wait_and_kill, daemon=True)
    thread.start()
    return thread


@pytest.mark.parametrize("name", ["rollout-0", "reward-0"])
def test_kill_9_is_named_and_survived(tmp_path, capsys, name):
    folder = tmp_path / "run"
    thread = kill_when(folder, name, 3)
    train_async.train(config_of(folder, steps=40))
    thread.join(1)
    summary = summary_of(folder)
    assert summary["steps"] == 40 and summary["groups"]["trained"] == 160
    assert summary["workers_lost"] == [f"{name} died (exit code -9)"]
    assert summary["staleness"]["max"] <= summary["staleness"]["bound"]
    trained = trained_groups(folder)
    assert sorted(trained) == list(range(160))  # each prompt exactly once


def test_a_worker_that_dies_again_and_again_stops_the_run_with_a_checkpoint(tmp_path):
    folder = tmp_path / "run"
    thread = kill_when(folder, "rollout-0", 3)
    with pytest.raises(common.TrainingStopped, match="rollout-0 died .exit code -9.*rollout-0.log"):
        train_async.train(config_of(folder, steps=100_000, restarts=0))
    thread.join(1)
    assert common.load_checkpoint(folder)["version"] >= 3


def group_is_gone(group: int, seconds: float) -> bool:
    """Whether no process of the group is left (Python's resource tracker is the last to go)."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        try:
            os.killpg(group, 0)
        except ProcessLookupError:
            return True
        time.sleep(0.05)
    return False


def test_ctrl_c_ends_with_a_checkpoint_and_resume_loses_nothing(tmp_path):
    folder = tmp_path / "run"
    flags = [f"--{k.replace('_', '-')}={v}" for k, v in SMALL.items() if k != "steps"]
    command = [sys.executable, "train_async.py", "--out", str(folder), "--steps=100000", *flags]
    process = subprocess.Popen(
        command, cwd=ROOT, start_new_session=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )
    deadline = time.monotonic() + 60
    while len(common.read_lines(folder / "metrics.jsonl")) < 8:
        assert process.poll() is None and time.monotonic() < deadline, process.communicate()
        time.sleep(0.05)
    asked = time.monotonic()
    os.killpg(process.pid, signal.SIGINT)  # as a terminal does it: to every process of the group
    out, err = process.communicate(timeout=30)
    assert time.monotonic() - asked < 15  # 5 s on a quiet machine
    assert process.returncode == 0, err
    assert group_is_gone(process.pid, 5)
    assert b"Traceback" not in err and b"steps," in out
    state = common.load_checkpoint(folder)
    assert state["version"] >= 7 and state["in_flight"]
    assert summary_of(folder)["stopped_early"]

    steps = state["version"] + 10
    resume = dataclasses.replace(common.Config(), resume=str(folder), steps=steps)
    train_async.train(resume)
    assert sorted(trained_groups(folder)) == list(range(4 * steps))
    assert summary_of(folder)["staleness"]["max"] <= summary_of(folder)["staleness"]["bound"]
