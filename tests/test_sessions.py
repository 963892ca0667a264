"""Environments outside: a process for every episode; what goes wrong costs one attempt."""

import dataclasses
import os
import signal
import subprocess
import sys
import time
from multiprocessing import Pipe
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from toys import wait_for

import train_async
import train_sync
from lab.plots import load_result
from runtime import sessions
from runtime.config import Config, UserError, words
from runtime.messages import Call
from tasks.exam import Host

SLOW = Path(__file__).parent / "slow.py"
SMALL = {"slots": 16, "group_size": 4, "groups_per_step": 4, "steps": 3, "eval_every": 100}


def config_of(task: str, **flags) -> Config:
    return dataclasses.replace(Config(), task=task, **{"reward_seconds": 20.0, **flags})


def left_by(tag: str) -> list[int]:
    """Processes that have this in their environment."""
    found = []
    for path in Path("/proc").glob("[0-9]*/environ"):
        try:
            state = path.with_name("stat").read_text().rpartition(")")[2].split()[0]
            if tag.encode() in path.read_bytes() and state != "Z":
                found.append(int(path.parent.name))
        except OSError:
            pass
    return found


@pytest.mark.parametrize("threads,expected", [(1, 1), (0, 1), (3, 3)])
def test_a_reward_worker_has_the_threads_that_it_was_given(threads, expected):
    """A reward model on all cores takes them from everybody else."""

    class Begun(Exception):
        pass

    def beat():
        raise Begun

    own = Path(__file__).parent / "slow.py"  # it may need torch
    before = torch.get_num_threads()
    torch.set_num_threads(before + 1)
    here, _there = Pipe()
    line = SimpleNamespace(connection=here, status={}, beat=beat, send=lambda *_: None)
    try:
        with pytest.raises(Begun):
            sessions.reward_worker(line, config_of(f"{own}:0,no", threads=threads))
        assert torch.get_num_threads() == expected
    finally:
        torch.set_num_threads(before)


@pytest.fixture
def host_of(tmp_path, monkeypatch):
    """A host of the slow task; afterwards nothing is left of it."""
    tag, hosts = f"SESSIONS_TEST={os.getpid()}-{time.monotonic_ns()}", []
    monkeypatch.setenv(*tag.split("="))
    monkeypatch.setenv("TMPDIR", str(tmp_path / "tmp"))
    (tmp_path / "tmp").mkdir()
    (tmp_path / "states").mkdir()

    def make(faults: str) -> Host:
        limit = 0.5 if faults == "hang" else 20.0
        config = config_of(f"{SLOW}:0,{faults},{tmp_path}/states", reward_seconds=limit)
        hosts.append(Host(config, tmp_path / "log"))
        return hosts[-1]

    yield make
    for host in hosts:
        host.close()
    wait_for(lambda: not left_by(tag))
    wait_for(lambda: not list((tmp_path / "tmp").iterdir()))


def ask(host: Host, *answers: str, key=(1, 2, 3), secret=5) -> object:
    host.send([Call(key, {"prompt": "guess", "secret": secret}, answers)])
    while not (found := host.receive(0.5)):
        pass
    return found[0]


def test_a_session_keeps_its_state_and_closes_it(host_of, tmp_path):
    host = host_of("no")
    first, second = ask(host, " 7"), ask(host, " 7", " 3")
    assert (first.turn, first.observation, first.done) == (1, "<", False)
    assert (second.turn, second.observation) == (2, ">")
    assert len(list((tmp_path / "states").glob("*.open"))) == 1
    last = ask(host, " 7", " 3", " 5")
    assert last.done and last.reward == pytest.approx(0.7) and not last.failure
    wait_for(lambda: not list((tmp_path / "states").glob("*.open")))


def test_a_state_that_is_lost_is_made_again_from_the_answers(host_of):
    host = host_of("no")
    assert ask(host, " 7").observation == "<"
    os.kill(host.process.pid, signal.SIGKILL)
    assert ask(host, " 7", " 3").observation == ">"
    assert host.deaths == 1


def test_the_end_of_an_episode_closes_its_state(host_of, tmp_path):
    host = host_of("no")
    ask(host, " 7"), ask(host, " 7", key=(1, 2, 4)), ask(host, " 7", key=(9, 2, 4))
    host.send([Call((1, 2, 3), {}, None)])
    wait_for(lambda: len(list((tmp_path / "states").glob("*.open"))) == 2)
    host.send([Call((1,), {}, None)])  # all of a generator
    wait_for(lambda: len(list((tmp_path / "states").glob("*.open"))) == 1)


@pytest.mark.parametrize(
    "fault, failure",
    [
        ("hang", "env_timeout: it hung in a call that no alarm interrupts"),
        ("raise", "env_error: ValueError: broken (slow.py, line "),
        ("exit", "env_error: it ended its process (exit code 7)"),
        ("fork", ""),
    ],
)
def test_a_fault_costs_one_attempt(host_of, fault, failure):
    host = host_of(fault)
    bad = ask(host, " 7")
    assert bad.failure.startswith(failure) and bool(bad.failure) == bool(failure)
    again = ask(host, " 7", key=(1, 2, 9))  # the worker is the same one
    assert again.failure.startswith(failure) and host.deaths == 0


QUICK = """
import os, signal, time
from dataclasses import replace
from reward import Step
from tasks.guess import make as guess

def step(state, answer):
    state.append(answer)
    if answer == "hang":
        signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGALRM])
        time.sleep(10**6)
    if answer == "exit":
        os._exit(7)
    return Step(f"{os.getpid()} {len(state)}", 0.0, answer == "last")

def closed(state):
    with open("PLACE", "a") as file:
        file.write("closed")

def make(argument, seed, tokenizer):
    task = guess("", seed, tokenizer)
    return replace(task, step=step, open=lambda problem: [], close=closed)
"""


def test_quick_tasks_share_a_session_and_a_fault_costs_one_episode(tmp_path):
    place = tmp_path / "closed"
    (tmp_path / "quick.py").write_text(QUICK.replace("PLACE", str(place)))
    host = Host(config_of(str(tmp_path / "quick.py"), reward_seconds=2.0), tmp_path / "log")
    try:
        answers = ["a", "hang", "b", "exit", "c"]
        host.send([Call((1, i, 0), {}, (said,)) for i, said in enumerate(answers)])
        found = {}
        while len(found) < len(answers):
            found |= {result.key[1]: result for result in host.receive(0.5)}
        assert "hung" in found[1].failure and "exit code 7" in found[3].failure
        assert not any(found[i].failure for i in (0, 2, 4)) and host.deaths == 0
        process = found[4].observation.split()[0]
        again = ask(host, "c", "d", key=(1, 4, 0)), ask(host, "a", "b", key=(1, 0, 0))
        # the state of the first was lost with its session, and is made again
        assert [result.observation for result in again] == [f"{process} 2"] * 2
        assert ask(host, "c", "d", "last", key=(1, 4, 0)).done
        wait_for(lambda: place.exists() and place.read_text() == "closed")
        host.send([Call((1, 0, 0), {}, None)])  # cut off: its state is closed, too
        wait_for(lambda: place.read_text() == "closed" * 2)
    finally:
        host.close()


def test_what_a_killed_worker_leaves_is_cleaned_up(host_of, tmp_path):
    host = host_of("hang")
    host.send([Call((1, 2, 3), {"prompt": "guess", "secret": 5}, (" 7",))])
    host.receive(0.1)
    wait_for(lambda: (tmp_path / "states" / "faults").exists())
    os.kill(host.process.pid, signal.SIGKILL)  # the rest is checked by the fixture


def test_a_process_of_any_name_is_seen():
    """Names are bytes: one that is no text must not end the caretaker."""
    code = "import ctypes; ctypes.CDLL(None).prctl(15, b'\\xff', 0, 0, 0); print(); input()"
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    with subprocess.Popen([sys.executable, "-c", code], start_new_session=True, **pipes) as odd:
        odd.stdout.readline()
        assert b"(\xff)" in Path(f"/proc/{odd.pid}/stat").read_bytes()
        assert sessions.processes_of(odd.pid) == {odd.pid}
        odd.kill()


def test_staleness_zero_with_sessions_is_bitwise_synchronous(tmp_path):
    found = []
    trainers = [(train_sync, f"{SLOW}:0,no"), (train_async, f"{SLOW}:0,no"), (train_sync, "guess")]
    for i, (trainer, task) in enumerate(trainers):
        flags = SMALL | {"max_staleness": 0, "out": str(tmp_path / f"run{i}")}
        trainer.train(config_of(task, **flags))
        found.append(load_result("summary", tmp_path / f"run{i}")["weights_sha256"])
    assert len(set(found)) == 1


def test_a_run_with_faults_ends_and_replays(tmp_path):
    tag = f"SESSIONS_RUN={os.getpid()}-{time.monotonic_ns()}"
    states, run = tmp_path / "states", tmp_path / "run"
    states.mkdir()
    task = f"{SLOW}:0.01,yes,{states}"
    flags = words(SMALL)
    flags += ["--reward-seconds=0.5", "--max-failures=1", "--silence=5", f"--task={task}"]
    name, value = tag.split("=")
    command = [sys.executable, "train_async.py", *flags, f"--out={run}"]
    done = subprocess.run(
        command, env={**os.environ, name: value}, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr[-2000:]
    wait_for(lambda: not left_by(tag))
    ledger = load_result("summary", run)["ledger"]
    discarded = sum(ledger["discarded"].values())
    assert ledger["trained"] == 12 and ledger["in_flight"] == 0
    assert ledger["admitted"] == 12 + discarded and ledger["lost"] == 0
    faults = (states / "faults").read_text().split()
    assert len(faults) > 5 and "raise" in faults
    sessions = load_result("summary", run)["sessions"]
    assert sessions["opened"] >= 12 * 4 and 0 < sessions["closed"] < sessions["opened"]
    train_async.train(dataclasses.replace(Config(), replay=str(run), task=task))


def test_without_reward_workers_there_is_no_outside(tmp_path):
    flags = {"reward_workers": 0, "steps": 1, "out": str(tmp_path / "run")}
    with pytest.raises(UserError, match="--reward-workers 0: must be at least 1 for .*slow.py"):
        train_async.train(config_of(f"{SLOW}:0,no", **flags))
    assert not (tmp_path / "run").exists()
