"""The asynchronous trainer: equal to the synchronous one where it must be, within its staleness
bound, and alive after kill -9, Ctrl-C and resume.

What a pool does when workers die is in test_pool.py.
"""

import dataclasses
import json
import multiprocessing
import os
import re
import signal
import subprocess
import sys
import threading
import time
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace

import pytest

import train_async
import train_sync
from buffer import Buffer
from reward import TaskError, task_of
from runtime.checkpoint import load_checkpoint
from runtime.config import AttemptLost, Config, TrainingStopped, UserError, words
from runtime.folder import read_lines
from runtime.ledger import audit, read_books
from runtime.terminal import begin_again

ROOT = Path(__file__).parent.parent
TRACKER = "multiprocessing.resource_tracker"
SMALL = {"groups_per_step": 4, "group_size": 4, "slots": 16, "steps": 12, "eval_every": 1000}
posix = pytest.mark.skipif(os.name != "posix", reason="needs signals")
linux = pytest.mark.skipif(sys.platform != "linux", reason="looks into /proc")


@pytest.fixture(autouse=True)
def nobody_is_left():
    """A trainer ends every process that it started."""
    yield
    assert multiprocessing.active_children() == []


def config_of(folder, **flags) -> Config:
    return dataclasses.replace(Config(), **{"out": str(folder), **SMALL, **flags})


def summary_of(folder) -> dict:
    return json.loads((folder / "summary.json").read_text())


def events_of(folder, kind: str) -> list[dict]:
    return [event for event in read_lines(folder / "events.jsonl") if event["kind"] == kind]


def trained_groups(folder) -> list[int]:
    return [group for event in events_of(folder, "train") for group in event["groups"]]


def balanced(folder) -> dict:
    """Check a run's log again, without the trainer; returns its totals."""
    ledger = audit(folder)
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


def start(folder: Path, *flags: str) -> subprocess.Popen:
    """A run as somebody starts it, in a process group of its own."""
    small = words(SMALL)
    command = [sys.executable, "train_async.py", "--out", str(folder), *small, *flags]
    if "--resume" in flags:
        command = [sys.executable, "train_async.py", *flags]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    return subprocess.Popen(command, cwd=ROOT, start_new_session=True, **pipes)


def wait_for_step(folder: Path, step: int, process: subprocess.Popen) -> None:
    deadline = time.monotonic() + 120
    while not any(row["step"] >= step for row in lines_so_far(folder / "metrics.jsonl")):
        assert process.poll() is None and time.monotonic() < deadline, process.communicate()
        time.sleep(0.02)


def lines_so_far(path: Path) -> list[dict]:
    """Of a log that somebody may be writing to, or that a resumed run is cutting."""
    with suppress(UserError):
        return read_lines(path)
    return []


def test_staleness_zero_is_bitwise_the_synchronous_algorithm(tmp_path):
    flags = {"steps": 20, "max_staleness": 0, "rollout_workers": 1, "eval_every": 10}
    train_async.train(config_of(tmp_path / "async", **flags))
    train_sync.train(config_of(tmp_path / "sync", **flags))
    one, other = (summary_of(tmp_path / name) for name in ("async", "sync"))
    assert one["weights_sha256"] == other["weights_sha256"]
    assert one["steps"] == 20 and one["staleness"] == {"max": 0, "mean": 0.0, "bound": 0}
    assert one["eval"] == other["eval"]
    for name in ("async", "sync"):  # and every number of a step is explained
        keys = {key for row in read_lines(tmp_path / name / "metrics.jsonl") for key in row}
        assert keys <= explained_metrics(), keys - explained_metrics()


def explained_metrics() -> set[str]:
    """The keys in the table of docs/reliability.md."""
    page = (Path(train_async.__file__).parent / "docs" / "reliability.md").read_text()
    rows = page.partition("## A line of metrics.jsonl")[2].partition("\n## ")[0].splitlines()
    return {
        key for row in rows if row[:1] == "|" for key in re.findall(r"`(\w+)`", row.split("|")[1])
    }


def kill_when(folder: Path, name: str, steps: int) -> threading.Thread:
    """A thread that kills the worker `name` once `steps` steps are done."""

    def wait_and_kill():
        while len(lines_so_far(folder / "metrics.jsonl")) <= steps:
            time.sleep(0.02)
        (victim,) = (p for p in multiprocessing.active_children() if p.name == name)
        os.kill(victim.pid, signal.SIGKILL)

    thread = threading.Thread(target=wait_and_kill, daemon=True)
    thread.start()
    return thread


@posix
@pytest.mark.parametrize(
    "swap, eta, flags, victim",
    [
        ("keep", 1, {"rollout_workers": 2, "learners": 2}, None),
        ("recompute", 4, {"task": "sum:16", "reward_workers": 2, "rollout_workers": 1}, "reward-0"),
        ("drain", 2, {"on_stale": "drop", "task": "sum:32"}, None),
        ("keep", 2, {"reward_workers": 0, "task": "guess", "rollout_workers": 1}, "rollout-0"),
    ],
)
def test_staleness_is_bounded_and_nothing_is_lost(tmp_path, swap, eta, flags, victim):
    """Also when a worker is killed: it is named, and its groups are issued again."""
    folder, steps = tmp_path / "run", 16 if victim else 8
    if victim:
        thread = kill_when(folder, victim, 3)
    train_async.train(config_of(folder, swap=swap, max_staleness=eta, steps=steps, **flags))
    summary, groups = summary_of(folder), balanced(folder)
    assert summary["steps"] == steps and summary["staleness"]["bound"] == eta
    assert summary["staleness"]["max"] <= eta
    discarded = sum(groups["discarded"].values())
    assert groups["trained"] == 4 * steps and groups["in_flight"] == 0
    assert groups["admitted"] == groups["trained"] + discarded
    assert discarded == 0 or flags.get("on_stale") == "drop"
    trained = trained_groups(folder)
    assert len(trained) == len(set(trained)) == 4 * steps  # each prompt at most once
    kinds = kinds_of(folder)
    wanted = "admit start swap finish score train publish checkpoint spawn exit generate".split()
    assert set(kinds) - {"discard", "requeue"} == set(wanted)
    workers = set.union(*kinds.values()) - {"learner"}
    judges = "rollout" if flags.get("reward_workers") == 0 else "reward"
    assert kinds["spawn"] == kinds["exit"] == workers >= {"rollout-0"}
    assert all(name.startswith(judges) for name in kinds["score"])
    if eta > 1:  # it really was asynchronous
        assert summary["staleness"]["mean"] > 0
    assert losses_of(folder) == ([f"{victim} died (exit code -9)"] if victim else [])
    assert len(events_of(folder, "spawn")) == len(kinds["spawn"]) + bool(victim)
    assert (groups["requeued"] > 0) == bool(victim and victim.startswith("rollout"))
    if victim:
        thread.join(1)
    replayed(folder)


def losses_of(folder: Path) -> list[str]:
    """Workers that a run has lost, and of what they died."""
    exits = events_of(folder, "exit")
    return [f"{e['process']} {e['reason']}" for e in exits if e["reason"] != "end"]


def flying(folder: Path, state: dict) -> set[int]:
    """The groups that were under way at a checkpoint."""
    return read_books(folder / "events.jsonl", state["marks"]["events"]).flying


def group_is_gone(group: int, seconds: float) -> bool:
    """Whether all processes of a group have ended, within a time limit."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        with suppress(ProcessLookupError):
            os.killpg(group, 0)
            time.sleep(0.05)
            continue
        return True
    return False


def children_of(pid: int) -> dict[int, str]:
    """Every child of a process, the resource tracker included, with its command line."""
    found = {}
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            parent = path.read_text().rpartition(")")[2].split()[1]
            if int(parent) == pid:
                found[int(path.parent.name)] = (path.parent / "cmdline").read_text()
        except OSError:  # it has just ended
            continue
    return found


@linux
def test_every_child_may_be_killed(tmp_path):
    """All at once: the run makes every step, says whom it has lost, writes its summary, exits 0."""
    folder = tmp_path / "run"
    process = start(folder, "--steps=16", "--rollout-workers=1")
    wait_for_step(folder, 3, process)
    children = children_of(process.pid)
    assert len(children) == 4, children  # a process for each role, the exam's, the tracker
    assert sum(TRACKER in line for line in children.values()) == 1
    maps = [Path(f"/proc/{pid}/maps").read_text() for pid in children]
    assert sum("libtorch" in text for text in maps) == 1  # who only verifies starts without torch
    for pid in children:
        os.kill(pid, signal.SIGKILL)
    out, err = process.communicate(timeout=120)
    assert process.returncode == 0, err
    summary = summary_of(folder)
    assert summary["steps"] == 16 and not summary["stopped_early"]
    lost = ["reward-0", "rollout-0"]
    assert sorted(losses_of(folder)) == [f"{name} died (exit code -9)" for name in lost]
    assert sorted(trained_groups(folder)) == list(range(64))
    assert balanced(folder)["in_flight"] == 0
    assert group_is_gone(process.pid, 10)


@linux
def test_kill_9_of_the_whole_run_then_ctrl_c_then_the_end(tmp_path):
    """What was done after the last checkpoint is done again, and written down once; what was in
    flight is issued again."""
    folder = tmp_path / "run"
    process = start(folder, "--steps=100000", "--set=checkpoint_every=5", "--max-staleness=4")
    wait_for_step(folder, 9, process)
    process.kill()
    process.communicate()
    assert group_is_gone(process.pid, 10)
    with (folder / "events.jsonl").open("a") as file:
        file.write('{"t": 1.0, "kind": "sw')  # a line that was being written
    killed = load_checkpoint(folder)
    assert killed["version"] % 5 == 0 and flying(folder, killed)

    process = start(folder, "--resume", str(folder))
    wait_for_step(folder, killed["version"] + 6, process)
    for pid, line in children_of(process.pid).items():
        if TRACKER in line:  # from here on no process is started, which would start it anew
            os.kill(pid, signal.SIGKILL)
    os.killpg(process.pid, signal.SIGINT)  # as a terminal does it: to every process of the group
    out, err = process.communicate(timeout=100)  # 5 s on a quiet machine
    assert process.returncode == 130, err
    assert group_is_gone(process.pid, 30)
    assert "Traceback" not in err and "steps," in out
    assert err.count("stopping: a checkpoint comes first") == 1
    assert f"go on with: python train_async.py --resume {folder}" in out
    stopped = load_checkpoint(folder)
    assert stopped["version"] >= killed["version"] + 6 and flying(folder, stopped)
    assert summary_of(folder)["stopped_early"]
    assert balanced(folder)["in_flight"] == len(flying(folder, stopped))

    steps = stopped["version"] + 6
    train_async.train(dataclasses.replace(Config(), resume=str(folder), steps=steps))
    assert sorted(trained_groups(folder)) == list(range(4 * steps))
    totals, states = balanced(folder), (killed, stopped)  # of all parts
    assert totals["requeued"] == sum(len(flying(folder, state)) for state in states)
    assert totals["admitted"] == totals["trained"] == 4 * steps and totals["in_flight"] == 0
    assert summary_of(folder)["staleness"]["max"] <= summary_of(folder)["staleness"]["bound"] == 4
    replayed(folder)

    # killed between the last checkpoint and the summary, in the middle of a line
    (folder / "summary.json").unlink()
    for name, (size, _) in load_checkpoint(folder)["marks"].items():
        path = folder / f"{name}.jsonl"
        path.write_bytes(path.read_bytes()[:size] + b'{"t": 1')
    train_async.train(dataclasses.replace(Config(), resume=str(folder)))
    assert summary_of(folder)["steps"] == steps
    replayed(folder)


@linux
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_a_signal_ends_a_run_with_its_code_and_a_checkpoint(tmp_path, number):
    process = start(tmp_path / "run", "--steps=100000", "--max-staleness=1")
    wait_for_step(tmp_path / "run", 2, process)
    process.send_signal(number)
    out, err = process.communicate(timeout=100)
    assert process.returncode == 128 + number and "Traceback" not in err
    assert f"go on with: python train_async.py --resume {tmp_path / 'run'}" in out
    assert load_checkpoint(tmp_path / "run")["version"] == summary_of(tmp_path / "run")["steps"]


@linux
def test_any_number_of_ctrl_c_ends_without_a_traceback(tmp_path):
    process = start(tmp_path / "run", "--steps=100000")
    wait_for_step(tmp_path / "run", 2, process)
    for _ in range(5):
        os.killpg(process.pid, signal.SIGINT)
        time.sleep(0.02)
    _, err = process.communicate(timeout=100)
    assert process.returncode == 130 and "Traceback" not in err
    assert group_is_gone(process.pid, 30)
    assert load_checkpoint(tmp_path / "run"), "a whole one is there"


@linux
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
def test_a_learner_that_is_lost_ends_the_attempt_and_the_next_one_goes_on(tmp_path, number):
    """Killed, or stopped so that the others wait for it. With eta = 0 the weights are those of an
    undisturbed run."""
    flags = ["--steps=9", "--learners=2", "--max-staleness=0", "--set=checkpoint_every=2"]
    flags += ["--set=silence=5", "--rollout-workers=1"]
    folder = tmp_path / "run"
    process = start(folder, *flags)
    wait_for_step(folder, 5, process)
    os.kill(pid_of(folder, "learner-0"), number)
    out, err = process.communicate(timeout=150)
    assert process.returncode == 0, err
    assert "begins again (attempt 2) from the newest checkpoint" in err
    assert balanced(folder)["trained"] == 36 and summary_of(folder)["steps"] == 9
    replayed(folder)
    if number == signal.SIGSTOP:  # what follows is the same
        return
    undisturbed = start(tmp_path / "other", *flags)
    assert undisturbed.wait(timeout=120) == 0, undisturbed.communicate()
    hashes = [summary_of(tmp_path / name)["weights_sha256"] for name in ("run", "other")]
    assert hashes[0] == hashes[1]


def test_attempts_are_used_up(tmp_path, monkeypatch, capsys):
    """What starts a new attempt says so, with the flags of a resume; then it stops, exit code 1."""
    calls, error = [], AttemptLost("learner-0 died")
    error.run = tmp_path / "run", config_of(tmp_path / "run", restarts=1, task="sum")
    monkeypatch.setattr(os, "execv", lambda path, words: calls.append(words))
    monkeypatch.setattr(sys, "argv", ["train_async.py", "--out", "x"])
    monkeypatch.setenv("NANOGLM_ATTEMPT", "0")
    begin_again(error)
    (command,) = calls
    assert command[2:] == [f"--resume={tmp_path / 'run'}", "--task=sum", "--cluster="]
    with pytest.raises(SystemExit) as stop:
        begin_again(error)
    assert stop.value.code == 1 and len(calls) == 1
    assert "learner-0 died; stopped: --set restarts=1 are used up" in capsys.readouterr().err


BREAKS = """
from dataclasses import replace
from tasks.guess import make as guess

def make(argument, seed, tokenizer):
    def step(problem, answers):
        {}
        return task.step(problem, answers)

    task = guess("", seed, tokenizer)
    return replace(task, step=step)
"""


def test_a_task_that_failed_is_mended_and_its_groups_begin_again(tmp_path):
    spec = tmp_path / "mine.py"
    spec.write_text(BREAKS.format("raise ValueError"))
    with pytest.raises(TrainingStopped, match="4 of 4 episodes failed"):
        train_async.train(config_of(tmp_path / "run", task=str(spec), groups_per_step=1, steps=3))
    spec.write_text(BREAKS.format("pass"))
    again = {"resume": str(tmp_path / "run"), "task": str(spec)}
    train_async.train(dataclasses.replace(Config(), **again))
    assert balanced(tmp_path / "run")["trained"] == 3


def test_a_prompt_that_cannot_be_made_is_nowhere():
    logged, config = [], config_of("")
    five = [{"prompt": "a"}] * 5
    task = dataclasses.replace(task_of(config), reset=lambda i, split: five[i])
    run = SimpleNamespace(config=config, task=task)
    run.learner = SimpleNamespace(version=0, cursor=0)
    run.buffer = Buffer(4, 1)
    run.pool = SimpleNamespace(issue=lambda groups: ["rollout-0"] * len(groups))
    run.log = SimpleNamespace(event=lambda *_, group, **others: logged.append(group))
    with pytest.raises(TaskError, match="IndexError"):
        train_async.admit(run)
    assert logged == [*run.buffer.outstanding] == [0, 1, 2, 3, 4] and run.learner.cursor == 5


def pid_of(folder: Path, name: str) -> int:
    """The process of a worker, as the log tells."""
    return [event["pid"] for event in events_of(folder, "spawn") if event["process"] == name][-1]
