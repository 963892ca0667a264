"""The asynchronous trainer: equal to the synchronous one where it must be, within its staleness
bound, and alive after kill -9, Ctrl-C and resume.

Runs with real processes first; then what the trainer does when workers die, without processes.
"""

import copy
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
from faults import group_is_gone
from runtime.processes import Lost

import train_async
import train_sync
from buffer import Buffer
from rollout import generate, make_generator
from runtime import run as run_room
from runtime.advice import judge
from runtime.checkpoint import completed_groups, load_checkpoint
from runtime.config import Config, TrainingStopped, UserError, words
from runtime.folder import read_lines
from runtime.ledger import audit
from runtime.messages import Answer

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


# ---------------------------------------------------------------------------------- real processes


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
        ("keep", 1, {"rollout_workers": 2}, None),
        ("recompute", 4, {"task": "sum:16", "reward_workers": 2, "rollout_workers": 1}, "reward-0"),
        ("drain", 2, {"on_stale": "drop", "task": "sum:32"}, None),
        ("keep", 2, {"learners": 2, "rollout_workers": 1}, None),
        ("keep", 2, {"reward_workers": 0, "task": "guess", "rollout_workers": 1}, "rollout-0"),
    ],
)
def test_staleness_is_bounded_and_nothing_is_lost(tmp_path, swap, eta, flags, victim):
    """Also when a worker is killed: it is named, and its groups are issued again."""
    folder, steps = tmp_path / "run", 24 if victim else 12
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
    assert set(kinds) - {"discard", "lost", "requeue"} == set(wanted)
    workers = set.union(*kinds.values()) - {"learner"}
    judges = "rollout" if flags.get("reward_workers") == 0 else "reward"
    assert kinds["spawn"] == kinds["exit"] == workers >= {"rollout-0"}
    assert all(name.startswith(judges) for name in kinds["score"])
    if eta > 1:  # it really was asynchronous
        assert summary["staleness"]["mean"] > 0
    assert summary["workers_lost"] == ([f"{victim} died (exit code -9)"] if victim else [])
    assert len(events_of(folder, "spawn")) == len(kinds["spawn"]) + bool(victim)
    assert groups["lost"] == groups["requeued"]
    assert (groups["lost"] > 0) == bool(victim and victim.startswith("rollout"))
    if victim:
        thread.join(1)
    replayed(folder)


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
    process = start(folder, "--steps=16", "--rollout-workers=1", "--recompute=yes")
    wait_for_step(folder, 3, process)
    children = children_of(process.pid)
    assert len(children) == 4, children  # a process for each role, the examiner's, the tracker
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
    assert sorted(summary["workers_lost"]) == [f"{name} died (exit code -9)" for name in lost]
    assert sorted(trained_groups(folder)) == list(range(64))
    assert balanced(folder)["in_flight"] == 0
    assert group_is_gone(process.pid, 10)


@linux
def test_kill_9_of_the_whole_run_then_ctrl_c_then_the_end(tmp_path):
    """What was done after the last checkpoint is done again, and written down once; what was in
    flight is issued again, and what was complete is not made again."""
    folder = tmp_path / "run"
    process = start(folder, "--steps=100000", "--checkpoint-every=5", "--max-staleness=4")
    wait_for_step(folder, 9, process)
    process.kill()
    process.communicate()
    assert group_is_gone(process.pid, 10)
    with (folder / "events.jsonl").open("a") as file:
        file.write('{"t": 1.0, "kind": "sw')  # a line that was being written
    killed = load_checkpoint(folder)
    assert killed["version"] % 5 == 0 and killed["in_flight"]

    process = start(folder, "--resume", str(folder))
    wait_for_step(folder, killed["version"] + 6, process)
    for pid, line in children_of(process.pid).items():
        if TRACKER in line:  # from here on no process is started, which would start it anew
            os.kill(pid, signal.SIGKILL)
    os.killpg(process.pid, signal.SIGINT)  # as a terminal does it: to every process of the group
    out, err = process.communicate(timeout=60)  # 5 s on a quiet machine
    assert process.returncode == 130, err
    assert group_is_gone(process.pid, 5)
    assert "Traceback" not in err and "steps," in out
    assert err.count("stopping: a checkpoint comes first") == 1
    assert f"go on with: python train_async.py --resume {folder}" in out
    stopped = load_checkpoint(folder)
    assert stopped["version"] >= killed["version"] + 6 and stopped["in_flight"]
    assert summary_of(folder)["stopped_early"]
    assert balanced(folder)["in_flight"] == len(stopped["in_flight"])

    steps = stopped["version"] + 6
    train_async.train(dataclasses.replace(Config(), resume=str(folder), steps=steps))
    assert sorted(trained_groups(folder)) == list(range(4 * steps))
    totals, states = balanced(folder), (killed, stopped)  # of all parts
    kept = [[group.group_id for group in completed_groups(state)] for state in states]
    again = [set(state["in_flight"]) - set(own) for state, own in zip(states, kept, strict=True)]
    assert totals["lost"] == totals["requeued"] == sum(map(len, again))
    assert totals["admitted"] == totals["trained"] == 4 * steps and totals["in_flight"] == 0
    scored = [event["group"] for event in events_of(folder, "score")]
    assert len(scored) == len(set(scored)) == 4 * steps
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


# ------------------------------------------------------------------------------- without processes


class PoolHere:
    """What a Pool is to the trainer, in this process: at each `receive` a rollout worker generates
    all that was issued to it, and a reward worker verifies all that was generated before."""

    def __init__(self, run, happens: dict):
        """happens: number of the `receive` -> names of workers that are lost in it, or an error."""
        self.run, self.happens, self.calls = run, happens, 0
        self.generator = make_generator(run.config, run.task, copy.deepcopy(run.learner.model))
        names = [("reward", 0), ("rollout", 0), ("rollout", 1)]
        self.workers = {f"{role}-{n}": self.worker(role, n) for role, n in names}

    def worker(self, role: str, number: int) -> SimpleNamespace:
        process = SimpleNamespace(pid=1, exitcode=0)
        facts = {"process": process, "work": {}, "status": {}}
        facts |= {"role": role, "number": number, "name": f"{role}-{number}"}
        return SimpleNamespace(**facts, said="alive", log="its log", behind=0.0)

    def of(self, role: str) -> list:
        return [worker for worker in self.workers.values() if worker.role == role]

    def send(self, worker, message) -> None:
        pass

    def issue(self, role: str, groups: list) -> list[str]:
        names = []
        for group in groups:
            worker = min(self.of(role), key=lambda worker: len(worker.work))
            worker.work[group.group_id] = group
            names.append(worker.name)
        return names

    def out(self) -> dict[int, str]:
        return {group: worker.name for worker in self.workers.values() for group in worker.work}

    def receive(self, seconds: float) -> list:
        self.calls += 1
        happens, got = self.happens.get(self.calls, ()), []
        if isinstance(happens, Exception):
            raise happens
        for worker in self.workers.values():
            groups, worker.work = list(worker.work.values()), {}
            if worker.name in happens:
                got.append((worker, Lost("died", groups)))
            elif worker.role == "reward":
                got += [(worker, Answer(g.group_id, g, self.judge(g))) for g in groups]
            elif groups:
                got += [(worker, message) for message in self.generate(groups)]
        return got

    def judge(self, group):
        return judge(group, self.run.task, self.run.config, self.run.advice)

    def generate(self, groups: list) -> list[Answer]:
        if self.run.mailbox.version > self.generator.newest or not self.generator.counts["steps"]:
            self.generator.set_weights(*self.run.mailbox.read())
        done = generate(self.generator, groups)
        self.issue("reward", done)
        events, self.generator.events = self.generator.events, []
        for worker in self.of("rollout"):
            worker.status = {**self.generator.counts, "alive": 1.0}
        return [Answer(g.group_id, g, events=events if g is done[0] else []) for g in done]

    def close(self) -> None:
        path = self.run.folder / "summary.json"
        self.summary_was_there = path.is_file()


@pytest.fixture
def train_here(tmp_path, monkeypatch):
    """Train with a PoolHere, which is returned with the folder of the run."""

    def train(happens: dict, **flags):
        pools, folder = [], tmp_path / "run"
        monkeypatch.setattr(
            run_room, "start_workers", lambda run: pools.append(PoolHere(run, happens)) or pools[0]
        )
        try:
            train_async.train(config_of(folder, **flags))
        finally:
            *_, row = read_lines(folder / "metrics.jsonl")  # however it ended
            assert load_checkpoint(folder)["version"] == row["step"]
        return pools[0], folder

    return train


def test_the_summary_is_written_before_anything_is_torn_down(train_here):
    pool, folder = train_here({})
    assert pool.summary_was_there and summary_of(folder)["ledger"]["trained"] == 48
    replayed(folder)


def test_workers_that_are_lost_at_once_lose_nothing(train_here):
    """And with them in one `receive`: groups that were generated, groups that were verified."""
    happens = {5: ["rollout-0", "rollout-1"], 7: ["rollout-1", "reward-0"], 10: ["rollout-0"]}
    pool, folder = train_here(happens)
    assert len(summary_of(folder)["workers_lost"]) == 5
    assert sorted(trained_groups(folder)) == list(range(48))
    totals = balanced(folder)
    assert totals["lost"] == totals["requeued"] > 0
    replayed(folder)


def test_a_group_of_which_two_verifiers_have_died_counts_as_failed(train_here):
    pool, folder = train_here({2: ["reward-0"], 3: ["reward-0"]}, max_failures=1)
    failed = [event["failed"] for event in events_of(folder, "score") if event.get("failed")]
    assert failed == [{str(sample): "verifier_lost" for sample in range(4)}]
    assert summary_of(folder)["failures"] == {"verifier_lost": 4}
    (gone,) = set(range(49)) - set(trained_groups(folder))  # another prompt is in its place
    assert summary_of(folder)["discarded"] == {"verifier_lost": 1}
    (event,) = events_of(folder, "discard")
    assert (event["group"], event["reason"]) == (gone, "verifier_lost")
    balanced(folder)
    replayed(folder)


def test_a_role_that_is_used_up_stops_the_run_with_a_checkpoint(train_here):
    with pytest.raises(TrainingStopped, match="rollout-0 died; 0 restarts are used up"):
        train_here({8: TrainingStopped("rollout-0 died; 0 restarts are used up")})


def test_a_mistake_of_the_watching_thread_ends_with_a_checkpoint_too(train_here):
    with pytest.raises(RuntimeError, match="the thread that watches"):
        train_here({8: RuntimeError("the thread that watches the workers has failed")})


def test_a_group_that_vanishes_is_named_at_the_next_step(train_here, monkeypatch):
    """Mutation: one group is dropped from the buffer, and nobody says so."""
    complete = Buffer.complete

    def forgetful(self, group):
        if group.group_id == 9:
            del self.outstanding[9]
            return True
        return complete(self, group)

    monkeypatch.setattr(Buffer, "complete", forgetful)
    with pytest.raises(ValueError, match="group 9: scored .* in the buffer; .* it nowhere"):
        train_here({})


@pytest.mark.parametrize("role", ["rollout", "reward"])
def test_a_group_that_is_not_issued_again_is_named(train_here, monkeypatch, role):
    """Mutation: of the groups that a dead worker had, the first is left where it was."""
    name = {"rollout": "generate_again", "reward": "verify_again"}[role]
    real = getattr(train_async, name)
    monkeypatch.setattr(train_async, name, lambda *a: real(*a[:-1], a[-1][1:]))
    with pytest.raises(ValueError, match="group .* with a worker; .* it nowhere"):
        train_here({5: [f"{role}-0"]})


def test_a_run_that_stands_still_stops_by_itself(monkeypatch):
    """Everybody says that they live, and nothing moves."""
    now, worker = [100.0], SimpleNamespace(status={})
    pool = SimpleNamespace(of=lambda role: [worker], out=lambda: {3: "rollout-0"})
    run = SimpleNamespace(pool=pool, config=Config(stall=60.0), progress=(None, 0.0))
    run.learner = SimpleNamespace(version=0)
    monkeypatch.setattr(time, "monotonic", lambda: now[0])

    def after(seconds: float, version: int = 0, tokens: int = 0) -> None:
        now[0] += seconds
        worker.status, run.learner.version = {"tokens": tokens}, version
        train_async.check_progress(run)

    after(0)
    after(59)
    after(50, tokens=7)  # a long answer is progress
    after(50, tokens=7)
    after(50, tokens=7, version=1)
    after(59, tokens=7, version=1)
    with pytest.raises(TrainingStopped, match="60 s .--stall.; 1 groups .* {3: 'rollout-0'}"):
        after(2, tokens=7, version=1)


@linux
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_a_signal_ends_a_run_with_its_code_and_a_checkpoint(tmp_path, number):
    process = start(tmp_path / "run", "--steps=100000", "--max-staleness=1")
    wait_for_step(tmp_path / "run", 2, process)
    process.send_signal(number)
    out, err = process.communicate(timeout=30)
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
    _, err = process.communicate(timeout=30)
    assert process.returncode == 130 and "Traceback" not in err
    assert group_is_gone(process.pid, 5)
    assert load_checkpoint(tmp_path / "run")["version"] >= 0
