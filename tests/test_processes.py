"""transport.py with real processes: killed, stopped, talking nonsense, and left behind by a parent.

Spawn imports this module in every worker, and with the mailbox torch.
"""

import os
import signal
import struct
import subprocess
import sys
import threading
import time
from multiprocessing import Pipe, active_children
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from runtime import processes as transport
from runtime.mailbox import Mailbox
from runtime.messages import from_bytes
from runtime.processes import Line, Pool, WorkersFailed, last_words, messages_of

SHM = Path("/dev/shm")
ROOT = Path(__file__).resolve().parent.parent
PATIENCE = 60.0  # a machine under load may start processes slowly; nothing here is about speed

posix = pytest.mark.skipif(not hasattr(os, "kill") or os.name != "posix", reason="needs signals")
linux = pytest.mark.skipif(sys.platform != "linux", reason="PR_SET_PDEATHSIG and /dev/shm")


def test_held_messages_travel_together_and_in_order():
    here, there = Pipe()
    line = Line(there, 3)
    for n in range(3):
        line.send("group", {"n": n}, {"x": np.arange(n)}, hold=True)
    line.flush(60.0)  # they have not been held for a minute
    assert not here.poll()
    line.flush()
    delivery = here.recv_bytes()
    found = [from_bytes(message) for message in messages_of(delivery)]
    assert [(header["n"], header["sequence"]) for header, _ in found] == [(0, 1), (1, 2), (2, 3)]
    assert [arrays["x"].tolist() for _, arrays in found] == [[], [0], [0, 1]]
    line.flush()
    assert not here.poll()
    line.send("group", {"n": 3}, hold=True)
    line.last -= 60.0  # a beat is due: what is held goes with it
    line.beat()
    kinds = [from_bytes(message)[0]["kind"] for message in messages_of(here.recv_bytes())]
    assert kinds == ["group", "beat"]
    *_, last = messages_of(delivery[:-1])
    with pytest.raises(ValueError, match="torn"):
        from_bytes(last)


# ------------------------------------------------------------------------ what the workers run


def echo(line, *extra):
    """Answers every message; some of them make it misbehave."""
    blocked = signal.SIGINT in signal.pthread_sigmask(signal.SIG_BLOCK, [])
    line.send("hello", {"pid": os.getpid(), "extra": extra, "blocked": blocked})
    while True:
        line.beat()
        message = line.receive(0.1)
        if message is None:
            continue
        header, arrays = message
        kind = header["kind"]
        if kind == "echo":
            line.send("echo", {"n": header["n"]}, arrays)
        elif kind == "flood":
            for n in range(header["n"]):
                line.send("drop", {"n": n}, {"x": np.full(250_000, n, np.float32)})
        elif kind == "garbage":
            line.connection.send_bytes(b"this is no message")
        elif kind == "headless":
            line.send(None)
        elif kind == "stop in the middle":
            os.write(line.connection.fileno(), struct.pack("!i", 1000) + b"the first bytes of 1000")
            os.kill(os.getpid(), signal.SIGSTOP)
        elif kind == "return":
            return


def short_lived(line):
    line.send("hello", {"pid": os.getpid()})
    print("a last word")
    sys.stdout.flush()
    os._exit(3)


def mute(line):
    time.sleep(600)


def maker(line):
    """The first half of a relay: makes as many groups as it is told to."""
    while True:
        line.beat()
        if message := line.receive(0.1):
            for i in message[0]["ids"]:
                x = np.full(i, i, np.int32)
                line.send("group", {"group_id": i, "note": f"made {i}"}, {"x": x})


def judge(line, release: str):
    """The second half: keeps what it gets until a file exists, then answers everything, twice."""
    line.send("hello", {"pid": os.getpid()})
    kept = []
    while True:
        line.beat()
        if message := line.receive(0.05):
            kept.append(message)
        if os.path.exists(release):
            for header, arrays in kept:
                answer = {"group_id": header["group_id"], "total": int(arrays["x"].sum())}
                line.send("scores", answer)
                line.send("scores", answer)
            kept = []


def mortal(line):
    """The second half of a relay, which dies of group 7."""
    while True:
        line.beat()
        if message := line.receive(0.1):
            if message[0]["group_id"] == 7:
                raise ValueError("seven")
            line.send("scores", {"group_id": message[0]["group_id"]})


# ---------------------------------------------------------------------------------------- helpers


@pytest.fixture
def make_pool(tmp_path):
    """Pools that are closed at the end of the test, leaving nothing behind."""
    pools = []

    def make(roles, restarts=2, silence=60.0, relay=("", "", "")) -> Pool:
        pools.append(Pool(roles, tmp_path, restarts, silence, relay))
        return pools[-1]

    yield make
    for pool in pools:
        pool.close()
        assert not pool.thread.is_alive()
    assert active_children() == []


def gather(pool: Pool, enough, seconds: float = PATIENCE) -> list[tuple]:
    """Everything that `receive` gives until `enough(messages)`."""
    got, deadline = [], time.monotonic() + seconds
    while not enough(got):
        assert time.monotonic() < deadline, f"not enough in {seconds} s: {got}"
        got += pool.receive(0.2)
    return got


def of_kind(messages: list[tuple], kind: str) -> list[tuple]:
    return [m for m in messages if m[0] == kind]


def hello(pool: Pool, count: int) -> dict[str, int]:
    """Wait until `count` workers have started: name -> pid."""
    got = gather(pool, lambda got: len(of_kind(got, "hello")) == count)
    return {worker.name: header["pid"] for _, worker, header, _ in got}


def ask(pool: Pool, worker, n: int) -> None:
    """The worker answers, with the same number and the same bits."""
    x = np.arange(n, dtype=np.float32)
    pool.send(worker, "echo", {"n": n}, {"x": x})
    ((kind, who, header, arrays),) = gather(pool, len)
    assert (kind, who, header["n"]) == ("echo", worker, n)
    assert arrays["x"].tobytes() == x.tobytes()


def state(pid: int) -> str:
    """One letter: R or S for a process that lives, T stopped, Z dead; none when it is gone."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        if sys.platform == "linux":
            return ""
    ps = subprocess.run(["ps", "-o", "state=", "-p", str(pid)], capture_output=True, text=True)
    return ps.stdout.strip()[:1]


def alive(pid: int) -> bool:
    return state(pid) not in ("", "Z", "X")


def eventually(condition, seconds: float = 10.0) -> bool:
    deadline = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.02)
    return True


# ------------------------------------------------------------------------------------------- pool


@posix
def test_killed_worker_is_reported_once_and_replaced(make_pool, tmp_path):
    pool = make_pool({"echo": (echo, [("a",), ("b",)])})
    pids = hello(pool, 2)
    first, second = pool.of("echo")
    os.kill(pids["echo-1"], signal.SIGINT)  # Ctrl-C is the parent's business: no harm done
    ask(pool, first, 3)
    ask(pool, second, 4)

    pool.send(first, "echo", {"n": 5})  # its last words are not lost
    before = gather(pool, len)
    os.kill(pids["echo-0"], signal.SIGKILL)
    begin = time.monotonic()
    got = gather(pool, lambda got: of_kind(got, "lost"))
    assert time.monotonic() - begin < 10
    assert [m[0] for m in before] == ["echo"]
    ((_, lost, reason, nothing),) = of_kind(got, "lost")
    assert lost is first and lost.name == "echo-0" and nothing is None
    assert reason == "died (exit code -9)"

    got += gather(pool, lambda new: of_kind(got + new, "hello"))
    ((_, successor, header, _),) = of_kind(got, "hello")
    assert successor is pool.of("echo")[0] is not first and successor.name == "echo-0"
    assert header["pid"] != pids["echo-0"] and header["extra"] == ("a",)  # the same arguments
    assert header["blocked"]  # no Ctrl-C reaches a worker, even while it is still importing
    assert signal.SIGINT not in signal.pthread_sigmask(signal.SIG_BLOCK, [])  # but this process
    ask(pool, successor, 6)
    assert pool.of("echo")[1] is second and second.process.pid == pids["echo-1"]
    ask(pool, second, 7)
    pool.send(first, "echo", {"n": 8})  # to a dead worker: lost, and no harm done
    assert pool.receive(0.5) == []  # reported once
    assert Path(successor.log) == tmp_path / "echo-0.log" and Path(successor.log).exists()


def test_restart_budget(make_pool):
    pool = make_pool({"short": (short_lived, [()])}, restarts=1)
    with pytest.raises(WorkersFailed) as failure:
        gather(pool, lambda got: False)
    text = str(failure.value)
    log = pool.of("short")[0].log
    assert "short-0 died (exit code 3)" in text and "1 restarts are used up" in text
    assert "last message: hello" in text and log in text
    assert Path(log).read_text() == "a last word\n" * 2  # started twice, and never again
    pool.send(pool.of("short")[0], "echo", {"n": 1})  # the caller may not know yet


def test_a_worker_that_dies_before_it_has_a_log_is_reported_too(tmp_path):
    """In an import of its main module, say: the thread that reports it must not fail, too."""
    worker = SimpleNamespace(log=str(tmp_path / "echo-0.log"))
    assert last_words(worker, 1) == ""
    Path(worker.log).write_text("somewhere\nValueError: seven\n\n")
    assert last_words(worker, 1) == ": ValueError: seven" and last_words(worker, -9) == ""


def test_returning_is_dying(make_pool):
    pool = make_pool({"echo": (echo, [()])}, restarts=0)
    hello(pool, 1)
    pool.send(pool.of("echo")[0], "return")
    with pytest.raises(WorkersFailed, match=r"echo-0 died \(exit code 0\)"):
        gather(pool, lambda got: False)


def test_worker_that_never_speaks(make_pool, monkeypatch):
    monkeypatch.setattr(transport, "START_SECONDS", 1.0)
    pool = make_pool({"mute": (mute, [()])}, restarts=0, silence=60.0)
    with pytest.raises(WorkersFailed, match="mute-0 was silent for .*last message: spawn"):
        gather(pool, lambda got: False, 10.0)


@posix
def test_silent_workers_are_noticed_and_block_nobody(make_pool, monkeypatch):
    """One is stopped while it waits, one in the middle of a message; a third goes on."""
    monkeypatch.setattr(transport, "NOTICE_SECONDS", (1.2, 60.0))
    pool = make_pool({"echo": (echo, [(), (), ()])}, silence=2.0)
    pids = hello(pool, 3)
    first, second, third = pool.of("echo")
    begin = time.monotonic()
    os.kill(pids["echo-0"], signal.SIGSTOP)
    pool.send(second, "stop in the middle")
    assert eventually(lambda: state(pids["echo-0"]) == state(pids["echo-1"]) == "T")
    for worker in (first, second):
        for _ in range(40):  # 40 MB that it does not read
            pool.send(worker, "echo", {"n": 0}, {"x": np.zeros(250_000, np.float32)})
    assert time.monotonic() - begin < 10
    ask(pool, third, 1)  # their neighbour is heard all the same
    got = gather(pool, lambda got: len(of_kind(got, "lost")) == len(of_kind(got, "hello")) == 2)
    lost = {worker.name: (worker, reason) for _, worker, reason, _ in of_kind(got, "lost")}
    assert lost["echo-0"][0] is first and lost["echo-1"][0] is second
    assert all("was silent for" in reason for _, reason in lost.values())
    noticed = [worker.name for _, worker, _, _ in of_kind(got, "silent")]
    assert sorted(noticed) == ["echo-0", "echo-1"]  # before they were replaced, and once
    assert not alive(pids["echo-0"]) and not alive(pids["echo-1"])
    for worker in pool.of("echo"):
        ask(pool, worker, 2)
    assert pool.of("echo")[2] is third and third.process.pid == pids["echo-2"]


@posix
def test_silence_of_this_process_is_nobody_elses(make_pool, monkeypatch):
    """After Ctrl-Z and fg the clock has jumped: the workers get the chance to speak again."""
    offset = [0.0]
    clock = SimpleNamespace(monotonic=lambda: time.monotonic() + offset[0])
    monkeypatch.setattr(transport, "time", clock)
    pool = make_pool({"echo": (echo, [()])}, restarts=0, silence=20.0)
    hello(pool, 1)
    offset[0] = 1000.0
    assert pool.receive(0.5) == []
    ask(pool, pool.of("echo")[0], 1)


def test_damaged_message(make_pool):
    pool = make_pool({"echo": (echo, [(), ()])})
    hello(pool, 2)
    first, second = pool.of("echo")
    pool.send(first, "garbage")
    pool.send(first, "echo", {"n": 1})  # what it says after that is not believed
    got = gather(pool, lambda got: of_kind(got, "lost") and of_kind(got, "hello"))
    assert not of_kind(got, "echo")
    ((_, lost, reason, _),) = of_kind(got, "lost")
    assert lost is first and "damaged message" in reason and "checksum" in reason
    ask(pool, pool.of("echo")[0], 2)
    ask(pool, second, 3)


def test_many_messages_in_order(make_pool):
    """The parent is busy: the workers' messages wait here, not in the workers."""
    pool = make_pool({"echo": (echo, [(), ()])})
    hello(pool, 2)
    for worker in pool.of("echo"):
        pool.send(worker, "flood", {"n": 20})  # 20 MB each
        pool.send(worker, "echo", {"n": 99})
    assert eventually(lambda: len(pool.messages) == 42, PATIENCE)  # without any `receive`
    got = pool.receive(0.0)
    for worker in pool.of("echo"):
        mine = [m for m in got if m[1] is worker]
        assert [m[2]["n"] for m in mine] == [*range(20), 99]
        assert [m[2]["worker"] for m in mine] == [worker.number] * 21
        numbers = [m[2]["sequence"] for m in mine]  # beats have their numbers, too
        assert numbers == sorted(set(numbers))
        assert all((m[3]["x"] == m[2]["n"]).all() for m in mine[:-1])


def test_failure_of_the_watching_thread_is_not_silent(make_pool, monkeypatch):
    pool = make_pool({"echo": (echo, [()])})

    def broken(worker, data):
        raise KeyError("group_id")

    hello(pool, 1)
    monkeypatch.setattr(pool, "_take", broken)
    pool.send(pool.of("echo")[0], "echo", {"n": 1})
    with pytest.raises(RuntimeError, match="thread that watches") as failure:
        gather(pool, lambda got: False)
    assert isinstance(failure.value.__cause__, KeyError)


# ------------------------------------------------------------------------------------------ relay


@posix
def test_relay_survives_the_death_of_its_target(make_pool, tmp_path):
    """Six groups go from the maker to two judges; one judge dies while it holds three of them."""
    release = tmp_path / "release"
    roles = {"maker": (maker, [()]), "judge": (judge, [(str(release),)] * 2)}
    pool = make_pool(roles, relay=("maker", "group", "judge"))
    pids = hello(pool, 2)
    victim, other = pool.of("judge")
    pool.send(pool.of("maker")[0], "make", {"ids": [1, 2, 3, 4, 5, 6]})
    assert eventually(lambda: len(pool.relayed) == 6, PATIENCE)
    assert eventually(lambda: len(victim.held) == len(other.held) == 3)  # the least busy gets it
    heads = pool.receive(0.2)  # what is relayed comes out with its answer; now only who sent what
    assert [(m[0], m[2]["group_id"], m[3]) for m in heads] == [
        ("group", i + 1, None) for i in range(6)
    ]

    os.kill(pids["judge-0"], signal.SIGKILL)
    got = gather(pool, lambda got: of_kind(got, "lost") and of_kind(got, "hello"))
    assert [m[1] for m in of_kind(got, "lost")] == [victim] and not of_kind(got, "scores")
    assert sum(len(w.held) for w in pool.of("judge")) == 6
    release.touch()
    got = gather(pool, lambda got: len(got) == 6)
    assert sorted(m[2]["group_id"] for m in got) == [1, 2, 3, 4, 5, 6]
    for kind, worker, header, (original, arrays) in got:
        i = header["group_id"]
        assert kind == "scores" and worker in pool.of("judge")
        assert header["total"] == i * i
        assert original["kind"] == "group" and original["note"] == f"made {i}"
        assert arrays["x"].tolist() == [i] * i
    assert pool.receive(0.5) == []  # each judge answers twice; once is enough
    assert not any(w.held for w in pool.of("judge"))


def test_a_group_that_kills_two_workers_is_given_back_without_an_answer(make_pool):
    roles = {"maker": (maker, [()]), "mortal": (mortal, [()])}
    pool = make_pool(roles, restarts=5, relay=("maker", "group", "mortal"))
    pool.send(pool.of("maker")[0], "make", {"ids": [6, 7, 8]})
    got = gather(pool, lambda got: len(of_kind(got, "scores")) == 2 and of_kind(got, "unanswered"))
    assert sorted(header["group_id"] for _, _, header, _ in of_kind(got, "scores")) == [6, 8]
    ((_, _, header, original),) = of_kind(got, "unanswered")
    assert header == {"group_id": 7} and len(original[1]["x"]) == 7
    reasons = [reason for _, _, reason, _ in of_kind(got, "lost")]
    assert reasons == ["died (exit code 1: ValueError: seven)"] * 2


def test_without_a_second_half_the_first_one_speaks_to_the_parent(make_pool):
    pool = make_pool({"maker": (maker, [()])}, relay=("maker", "group", None))
    pool.send(pool.of("maker")[0], "make", {"ids": [4, 5]})
    got = gather(pool, lambda got: len(got) == 2)
    assert [(m[0], m[2]["group_id"], len(m[3]["x"])) for m in got] == [
        ("group", 4, 4),
        ("group", 5, 5),
    ]
    assert pool.relayed == {4, 5}  # until they land they are on their way: nobody issues them again


def test_a_message_with_a_flaw_costs_its_worker(make_pool, tmp_path):
    def flaw(worker, header, arrays, held):
        if header["kind"] == "echo":
            return f"number {header['n']}" if header["n"] == 13 else {}[header["n"]]

    pool = Pool({"echo": (echo, [()])}, tmp_path, 5, 60.0, ("", "", ""), flaw)
    try:
        for n, words in ((13, "number 13"), (4, "KeyError: 4")):
            hello(pool, 1)
            pool.send(pool.of("echo")[0], "echo", {"n": n})
            got = gather(pool, lambda got: of_kind(got, "lost"))
            assert got[-1][2] == f"sent a damaged message ({words})"
            assert not of_kind(got, "echo")
    finally:
        pool.close()


# ---------------------------------------------------------------------------------------- the end


@linux
def test_close_leaves_nothing(make_pool):
    shared, threads = set(SHM.iterdir()), threading.active_count()
    mailbox = Mailbox(1000)
    (name,) = set(SHM.iterdir()) - shared
    pool = make_pool({"echo": (echo, [(), (), ()])})
    pids = hello(pool, 3)
    os.kill(pids["echo-0"], signal.SIGKILL)
    gather(pool, lambda got: of_kind(got, "lost") and of_kind(got, "hello"))
    restarted, stopped, talking = pool.of("echo")
    os.kill(stopped.process.pid, signal.SIGSTOP)
    pool.send(stopped, "echo", {"n": 0}, {"x": np.zeros(10**6)})
    pool.send(talking, "flood", {"n": 10})
    begin = time.monotonic()
    pool.close()
    mailbox.close()
    assert time.monotonic() - begin < 10
    assert active_children() == []
    assert not any(alive(w.process.pid) for w in (restarted, stopped, talking))
    # who was asked to end did so itself: a restarted worker, too, and one that was just sending
    assert [w.process.exitcode for w in (restarted, stopped, talking)] == [0, -9, 0]
    assert not name.exists() and set(SHM.iterdir()) <= shared
    assert eventually(lambda: threading.active_count() <= threads)
    pool.close()  # a second time does no harm


def parent_script(folder: str) -> None:
    """A parent with a mailbox, two workers, and a third that has been restarted."""
    mailbox = Mailbox(1000)
    mailbox.publish(0, torch.zeros(1000))
    pool = Pool({"echo": (echo, [()] * 3)}, Path(folder), 1, 60.0, ("", "", ""))
    pids = hello(pool, 3)
    os.kill(pids["echo-2"], signal.SIGKILL)
    gather(pool, lambda got: of_kind(got, "lost") and of_kind(got, "hello"))
    workers = [w.process.pid for w in pool.of("echo")]
    print(mailbox.memory.name.lstrip("/"), *workers, flush=True)
    time.sleep(600)


@linux
def test_killed_parent_takes_its_children_along(tmp_path):
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    parent = subprocess.Popen(
        [sys.executable, __file__, str(tmp_path)],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,  # the resource tracker says what it cleans up
        env=environment,
        text=True,
    )
    try:
        name, *pids = parent.stdout.readline().split()
        assert len(pids) == 3 and all(alive(int(pid)) for pid in pids)
        assert (SHM / name).exists()
    finally:
        parent.kill()
        parent.wait()
        parent.stdout.close()
    assert eventually(lambda: not any(alive(int(pid)) for pid in pids))
    assert eventually(lambda: not (SHM / name).exists())


if __name__ == "__main__":
    parent_script(sys.argv[1])
