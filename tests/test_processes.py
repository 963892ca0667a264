"""processes.py with real processes: killed, stopped, talking nonsense, and left behind by a parent.

What the workers run is in toys.py. Most tests share one pool: it must survive each of them.
"""

import os
import signal
import subprocess
import sys
import threading
import time
from multiprocessing import Pipe, active_children
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from toys import answer_with, mute, pool_of, short_lived, started, toy, wait_for

import __main__
from runtime import processes
from runtime.config import TrainingStopped
from runtime.messages import Answer, Call, Group, unpack_messages
from runtime.pipes import Line, start_here
from runtime.processes import Lost, Pool, Silent, last_words

ROOT = Path(__file__).resolve().parent.parent

posix = pytest.mark.skipif(os.name != "posix", reason="needs signals")
linux = pytest.mark.skipif(sys.platform != "linux", reason="PR_SET_PDEATHSIG")


# ---------------------------------------------------------------------------------------- helpers


@pytest.fixture(scope="module")
def shared(tmp_path_factory):
    folder = tmp_path_factory.mktemp("logs")
    roles = {"maker": (toy, 2, "a"), "reward": (toy, 2)}
    pool = pool_of(roles, folder, restarts=100)
    yield pool
    pool.close()
    assert not any(thread.is_alive() for thread in pool.threads)


@pytest.fixture
def pool(shared):
    """The pool that the tests share, with nothing on its way."""
    started(shared)
    shared.receive(0.0)
    yield shared
    started(shared)
    assert shared.receive(0.0) == [] and shared.out() == {}


@pytest.fixture
def make_pool(tmp_path):
    """Pools of one's own, closed at the end of the test."""
    pools = []

    def make(*arguments, **options) -> Pool:
        pools.append(pool_of(*arguments, logs=tmp_path, **options))
        return pools[-1]

    yield make
    for pool in pools:
        pool.close()
        assert not any(thread.is_alive() for thread in pool.threads)


def group(number: int, do: str = "answer", **problem) -> Group:
    return Group(number, 5, {"do": do, **problem})


def issue_to(pool: Pool, worker, *groups: Group) -> None:
    """Issue to this worker, whoever is least busy."""
    with pool.books:
        worker.work |= {g.group_id: g for g in groups}
        pool.send(worker, list(groups))


def gather(pool: Pool, enough, seconds: float = 60.0) -> list[tuple]:
    """Everything that `receive` gives until `enough(messages)`."""
    got, deadline = [], time.monotonic() + seconds
    while not enough(got):
        assert time.monotonic() < deadline, f"not enough in {seconds} s: {got}"
        got += pool.receive(0.1)
    return got


def of_kind(got: list[tuple], kind: type) -> list[tuple]:
    return [(worker, message) for worker, message in got if isinstance(message, kind)]


def ask(pool: Pool, worker, number: int = 1) -> None:
    """The worker answers, with the same number and the same bits."""
    x = np.arange(number, dtype=np.float32)
    issue_to(pool, worker, group(number, x=x))
    ((who, answer),) = gather(pool, len)
    assert who is worker and isinstance(answer, Answer) and answer.group.group_id == number
    assert answer.group.problem["x"].tobytes() == x.tobytes()


def loss_of(pool: Pool, worker) -> Lost:
    """The next thing that happens is that this worker is lost."""
    ((who, message),) = gather(pool, len)
    assert who is worker and isinstance(message, Lost), (who.name, message)
    return message


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


# ------------------------------------------------------------------------------------------- line


def test_messages_travel_together_and_in_order():
    here, there = Pipe()
    line = Line(there, 3)
    line.status = {"n": 1}
    line.send(*(answer_with(group(n)) for n in range(3)))
    delivery = here.recv_bytes()
    status, answers = unpack_messages(delivery)
    assert status == {"n": 1, "clock": line.last} and [
        answer.group.group_id for answer in answers
    ] == [0, 1, 2]
    with pytest.raises(ValueError, match="torn or damaged"):
        unpack_messages(delivery[:-1])
    line.beat()
    assert not here.poll()  # it has just spoken
    line.last -= 60.0
    line.beat()
    assert unpack_messages(here.recv_bytes()) == ({"n": 1, "clock": line.last}, [])
    assert line.receive(0.0) == []
    here.close()
    with pytest.raises(SystemExit):  # the parent is gone
        line.receive(60.0)


# ------------------------------------------------------------------------------------------- pool


def test_clocks_of_other_machines_are_set_to_this_one():
    """By the delivery that took least long; those of this machine have one clock."""
    pool = Pool.__new__(Pool)
    worker = SimpleNamespace(status={}, behind=float("inf"), heard=0.0)
    for pool.start, expected in ((None, 95.0), (processes.start_here, 0.0)):
        worker.behind = float("inf")
        for worker.heard, told in ((100.0, 4.9), (101.0, 6.0), (102.0, 6.5)):
            pool._take(worker, {"clock": told}, [])
        assert worker.behind == expected and worker.status == {}


@posix
def test_killed_worker_is_reported_once_and_replaced(pool):
    pids = started(pool)
    first, second = pool.of("maker")
    os.kill(pids["maker-1"], signal.SIGINT)  # Ctrl-C is the parent's business: no harm done
    ask(pool, first, 3)
    ask(pool, second, 4)

    issue_to(pool, first, group(5))  # its last words are not lost
    wait_for(lambda: pool.news)
    os.kill(pids["maker-0"], signal.SIGKILL)
    got = gather(pool, lambda got: of_kind(got, Lost))
    assert [type(message) for _, message in got] == [Answer, Lost]
    lost, message = got[-1]
    assert lost is first and lost.name == "maker-0"
    assert message == Lost("died (exit code -9)", [])

    successor = pool.of("maker")[0]
    assert successor is not first and successor.name == "maker-0"
    assert started(pool)["maker-0"] != pids["maker-0"]
    assert successor.status["extra"] == ("a",)  # the same arguments
    assert successor.status["blocked"]  # no Ctrl-C reaches it, even while it is still importing
    assert signal.SIGINT not in signal.pthread_sigmask(signal.SIG_BLOCK, [])  # but this process
    ask(pool, successor, 6)
    assert pool.of("maker")[1] is second and second.process.pid == pids["maker-1"]
    ask(pool, second, 7)
    pool.send(first, [group(8)])  # to a dead worker: lost, and no harm done
    assert pool.receive(0.3) == []  # reported once
    assert Path(successor.log) == pool.logs / "maker-0.log" and Path(successor.log).exists()


def test_groups_go_to_the_least_busy_worker_in_one_message_each(pool, monkeypatch, tmp_path):
    sent, send = [], pool.send
    monkeypatch.setattr(pool, "send", lambda *what: sent.append(what) or send(*what))
    groups = [group(i, "wait", until=tmp_path / "now") for i in range(4)]
    assert pool.issue("maker", groups[:1]) == ["maker-0"]
    assert pool.issue("maker", groups[1:]) == ["maker-1", "maker-0", "maker-1"]
    first, second = pool.of("maker")
    assert sent == [
        (first, groups[:1]),
        (second, [groups[1], groups[3]]),
        (first, groups[2:3]),
    ]
    assert pool.out() == {0: "maker-0", 2: "maker-0", 1: "maker-1", 3: "maker-1"}
    assert pool.issue("maker", []) == [] and len(sent) == 3
    (tmp_path / "now").touch()
    wait_for(lambda: len(pool.news) == 4)
    assert not first.work and sorted(pool.out()) == [0, 1, 2, 3]  # nobody has received them yet
    gather(pool, lambda got: len(got) == 4)
    assert pool.out() == {}


@posix
def test_silent_workers_are_noticed_and_block_nobody(pool, monkeypatch):
    """One is stopped while it waits, one in the middle of a message; the others go on."""
    pids = started(pool)
    first, second, third, _ = *pool.of("maker"), *pool.of("reward")
    monkeypatch.setattr(processes, "NOTICE_SECONDS", (1.2, 60.0))
    monkeypatch.setattr(pool, "silence", 2.0)
    begin = time.monotonic()
    os.kill(pids["maker-0"], signal.SIGSTOP)
    issue_to(pool, second, group(0, "stop in the middle"))
    wait_for(lambda: state(pids["maker-0"]) == state(pids["maker-1"]) == "T")
    x = np.zeros(250_000, np.float32)
    for worker in (first, second):
        issue_to(pool, worker, *(group(n, x=x) for n in range(40)))  # 40 MB that it does not read
    assert time.monotonic() - begin < 10
    ask(pool, third)  # their neighbour is heard all the same
    got = gather(pool, lambda got: len(of_kind(got, Lost)) == 2)
    lost = {worker.name: (worker, message) for worker, message in of_kind(got, Lost)}
    assert lost["maker-0"][0] is first and lost["maker-1"][0] is second
    assert all("was silent for" in message.reason for _, message in lost.values())
    assert all(len(message.groups) == 40 for _, message in lost.values())
    noticed = [worker.name for worker, _ in of_kind(got, Silent)]
    assert sorted(noticed) == ["maker-0", "maker-1"]  # before they were replaced, and once
    assert not alive(pids["maker-0"]) and not alive(pids["maker-1"])
    monkeypatch.undo()
    for worker in pool.of("maker"):
        ask(pool, worker, 2)
    assert started(pool)["reward-0"] == pids["reward-0"]


@pytest.mark.parametrize(
    "problem, reason",
    [
        ({"do": "garbage"}, "sent a damaged message (ValueError: 18 bytes that are torn"),
        ({"do": "torn"}, "sent a damaged message (ValueError: "),
        ({"do": "half"}, "died (exit code -9)"),
        ({"do": "no list"}, "sent a damaged message (TypeError: "),
        ({"do": "no status"}, "sent a damaged message (TypeError: "),
        ({"do": "nothing"}, "sent a damaged message (AttributeError: "),
        (
            {"do": "answer twice"},
            "sent a damaged message (ValueError: group 1, which it does not",
        ),
        (
            {"do": "answer for another"},
            "sent a damaged message (ValueError: group 99, which",
        ),
        (
            {"do": "answer of another start"},
            "sent a damaged message (ValueError: group 1, start 4: must be 1, 5",
        ),
        ({"flaw": {1: "too long"}}, "sent a damaged message (ValueError: too long)"),
        ({"flaw": "poison"}, "sent a damaged message (AttributeError: "),
        ({"do": "raise"}, "died (exit code 1: ValueError: seven)"),
    ],
)
def test_nonsense_costs_a_worker_its_place(pool, problem, reason):
    worker, other = pool.of("maker")
    issue_to(pool, worker, Group(1, 5, problem), group(2))  # the second is not believed any more
    got = gather(pool, lambda got: of_kind(got, Lost))
    answers = [message.group.group_id for _, message in of_kind(got, Answer)]
    ((lost, message),) = of_kind(got, Lost)
    assert lost is worker and message.reason.startswith(reason), message
    twice = problem.get("do") == "answer twice"  # the first was in order
    assert answers == [1] * twice
    assert [g.group_id for g in message.groups] == [1, 2][twice:]
    ask(pool, other)


def test_many_messages_in_order(pool):
    """The parent is busy: the workers' messages wait here, not in the workers."""
    workers, x = pool.of("maker"), np.zeros(250_000, np.float32)
    for worker in workers:
        first = 100 * worker.number
        issue_to(pool, worker, *(group(first + n, x=x) for n in range(20)))  # 20 MB each
    wait_for(lambda: len(pool.news) == 40)  # without any `receive`
    got = pool.receive(0.0)
    for worker in workers:
        mine = [message.group.group_id for who, message in got if who is worker]
        assert mine == list(range(100 * worker.number, 100 * worker.number + 20))


def test_groups_that_are_lost_are_never_nowhere(pool):
    """Whoever asks while a successor takes its place finds them, too."""
    seen = []

    class Watched(dict):
        def __setitem__(self, key, successor):
            super().__setitem__(key, successor)
            asking = threading.Thread(target=lambda: seen.append(sorted(pool.out())))
            asking.start()
            asking.join(0.3)

    pool.workers = Watched(pool.workers)
    worker = pool.of("maker")[0]
    issue_to(pool, worker, group(1, "raise"), group(2))
    wait_for(lambda: seen and pool.news)
    assert seen == [[1, 2]] and sorted(pool.out()) == [1, 2]
    assert [g.group_id for g in loss_of(pool, worker).groups] == [1, 2]
    pool.workers = dict(pool.workers)


# ------------------------------------------------------------------------------- from role to role


def test_what_one_role_has_made_goes_to_the_next_at_once(pool):
    pool.issue("maker", [group(i, "make") for i in range(6)])
    wait_for(lambda: len(pool.news) == 12)  # nobody has received what the makers have made
    got = [(message.group.group_id, worker.role) for worker, message in pool.receive(0.0)]
    assert sorted(got) == [(i, role) for i in range(6) for role in ("maker", "reward")]


def test_where_nobody_can_verify_a_group_must_be(make_pool):
    """A worker that forgets to loses its place, and the group is not lost."""
    pool = make_pool({"toy": (toy, 1)})
    worker = pool.of("toy")[0]
    issue_to(pool, worker, group(1, "make"))
    lost = loss_of(pool, worker)
    assert lost.reason.startswith("sent a damaged message (ValueError: min() ")
    assert [g.group_id for g in lost.groups] == [1]


def test_what_a_dead_judge_had_is_reported_and_may_be_issued_again(pool, tmp_path):
    until = tmp_path / "now"  # makers answer at once, judges wait
    facts = {"then": "wait", "until": until}
    pool.issue("maker", [group(i, "make", x=np.full(i, i), **facts) for i in range(6)])
    victim, other = pool.of("reward")
    wait_for(lambda: len(victim.work) == len(other.work) == 3)  # the least busy gets it
    assert [worker.role for worker, _ in pool.receive(0.0)] == ["maker"] * 6  # who made what
    assert all(name.startswith("reward") for name in pool.out().values())
    os.kill(victim.process.pid, signal.SIGKILL)
    lost = loss_of(pool, victim)
    assert len(lost.groups) == 3 and len(other.work) == 3
    assert pool.issue("reward", lost.groups) == [victim.name] * 3  # the successor, it is idle
    until.touch()
    got = gather(pool, lambda got: len(got) == 6)
    for worker, message in got:
        i = message.group.group_id
        assert worker.role == "reward" and message.group.problem["x"].tolist() == [i] * i
    assert sorted(message.group.group_id for _, message in got) == list(range(6))


def test_a_verdict_comes_with_the_group_that_was_sent(pool):
    sent = group(3, "judge")
    issue_to(pool, pool.of("reward")[0], sent)
    ((_, message),) = gather(pool, len)
    assert message == answer_with(sent) and message.group is sent


# ------------------------------------------------------------------------------- pools of their own


def test_restart_budget(make_pool):
    pool = make_pool({"short": (short_lived, 1)}, restarts=1)
    with pytest.raises(TrainingStopped) as failure:
        gather(pool, lambda got: False)
    text, worker = str(failure.value), pool.of("short")[0]
    assert "short-0 died (exit code 3)" in text and "1 restarts are used up" in text
    assert "last: alive" in text and worker.log in text
    assert Path(worker.log).read_text() == "a last word\n" * 2  # started twice, and never again
    pool.send(worker, [])  # the caller may not know yet


def test_returning_is_dying_and_never_speaking_is_too(make_pool, monkeypatch):
    monkeypatch.setattr(processes, "START_SECONDS", 2.0)
    pool = make_pool({"toy": (toy, 1)}, restarts=0)
    issue_to(pool, pool.of("toy")[0], group(1, "return"))
    with pytest.raises(TrainingStopped, match=r"toy-0 died \(exit code 0\)"):
        gather(pool, lambda got: False)
    pool = make_pool({"mute": (mute, 1)}, restarts=0)
    with pytest.raises(TrainingStopped, match="mute-0 was silent for .*last: spawn"):
        gather(pool, lambda got: False)


def test_a_process_does_not_begin_with_the_program_of_its_parent(tmp_path, monkeypatch):
    """Which stays what it was."""
    monkeypatch.setattr(__main__, "__file__", "nowhere.py", raising=False)
    process, _ = start_here("toy-0", short_lived, 0, str(tmp_path / "log"), [])
    process.join()
    assert process.exitcode == 3 and __main__.__file__ == "nowhere.py"


def test_a_worker_that_dies_before_it_has_a_log_is_reported_too(tmp_path):
    """While it imports, say: the thread that reports it must not fail, too."""
    process = SimpleNamespace(exitcode=1)
    worker = SimpleNamespace(process=process, log=str(tmp_path / "toy-0.log"))
    assert last_words(worker) == "exit code 1"
    Path(worker.log).write_text("somewhere\nValueError: seven\n\n")
    assert last_words(worker) == "exit code 1: ValueError: seven"
    process.exitcode = -9
    assert last_words(worker) == "exit code -9"


@posix
def test_silence_of_this_process_is_nobody_elses(make_pool, monkeypatch):
    """After Ctrl-Z and fg the clock has jumped: the workers get the chance to speak again."""
    offset = [0.0]
    clock = SimpleNamespace(monotonic=lambda: time.monotonic() + offset[0])
    monkeypatch.setattr(processes, "time", clock)
    pool = make_pool({"toy": (toy, 1)}, restarts=0, silence=20.0)
    started(pool)
    offset[0] = 1000.0
    assert pool.receive(0.5) == []
    ask(pool, pool.of("toy")[0])


def test_failure_of_the_watching_thread_is_not_silent(make_pool, monkeypatch):
    monkeypatch.setattr(Pool, "_replace", lambda pool, worker, reason: {}["group"])
    pool = make_pool({})
    pool.losses.put((None, "died"))
    with pytest.raises(KeyError, match="group"):
        gather(pool, lambda got: False)


def test_a_call_of_a_generator_that_is_gone_goes_to_nobody(make_pool):
    """Nobody would end its session."""
    pool = make_pool({"rollout": (toy, 1), "reward": (toy, 1)})
    started(pool)
    (rollout,), (reward,) = pool.of("rollout"), pool.of("reward")
    sent = []
    pool.send = lambda worker, messages: sent.append((worker, messages))
    calls = [Call((serial, 5, 0), {}, ()) for serial in (rollout.serial, rollout.serial + 99)]
    for call in calls:
        pool._ask(call)
    assert sent == [(reward, calls[:1])] and [*reward.calls.values()] == calls[:1]
    del pool.send
    reward.calls.clear()


# ---------------------------------------------------------------------------------------- the end


@linux
def test_close_leaves_nothing(make_pool):
    threads, children = threading.active_count(), set(active_children())
    pool = make_pool({"toy": (toy, 3)})
    os.kill(started(pool)["toy-0"], signal.SIGKILL)
    loss_of(pool, pool.of("toy")[0])
    started(pool)
    restarted, stopped, talking = pool.of("toy")
    os.kill(stopped.process.pid, signal.SIGSTOP)
    issue_to(pool, stopped, group(1, x=np.zeros(10**6)))
    issue_to(pool, talking, *(group(n, x=np.zeros(10**5)) for n in range(10)))
    begin = time.monotonic()
    pool.close()
    assert time.monotonic() - begin < 10
    assert set(active_children()) <= children
    assert not any(alive(w.process.pid) for w in (restarted, stopped, talking))
    # who was asked to end did so itself: a restarted worker, too, and one that was just sending
    assert [w.process.exitcode for w in (restarted, stopped, talking)] == [0, -9, 0]
    wait_for(lambda: threading.active_count() <= threads)
    pool.close()  # a second time does no harm


@linux
def test_killed_parent_takes_its_children_along(tmp_path):
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    command = [sys.executable, str(ROOT / "tests" / "toys.py"), str(tmp_path)]
    parent = subprocess.Popen(command, stdout=subprocess.PIPE, env=environment, text=True)
    try:
        pids = [int(pid) for pid in parent.stdout.readline().split()]
        assert len(pids) == 3 and all(map(alive, pids))
    finally:
        parent.kill()
        parent.wait()
        parent.stdout.close()
    wait_for(lambda: not any(map(alive, pids)))
