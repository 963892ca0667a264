"""The pool: whatever a worker does or suffers, nothing is lost, and nobody is left."""

import dataclasses
import multiprocessing
import os
import pickle
import signal
import time
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from reward import make_task
from runtime import pool as room
from runtime.config import AttemptLost, Config, TrainingStopped
from runtime.messages import Answer, Call, Group, Judgement, Lost, Result, Silent, Trajectory, flaw
from runtime.pipes import Line, Worker
from runtime.pool import Pool
from runtime.tokenizer import own_tokenizer
from runtime.verifier import reward_worker

ROOT = Path(__file__).resolve().parent.parent
PATIENCE = 60.0  # a machine under load may start processes slowly; nothing here is about speed


@pytest.fixture(autouse=True)
def nobody_is_left():
    yield
    assert multiprocessing.active_children() == []


def group_of(group_id: int, answers=("x",), finish="stop") -> Group:
    """A generated group; its answers are text."""
    encode = own_tokenizer().encode
    group = Group(group_id, 0, {"prompt": "?", "answer": "x"})
    for i, text in enumerate(answers):
        tokens = np.int32([5, *encode(text)])
        mask = np.arange(len(tokens)) > 0
        t = Trajectory(group_id, i, 7, turns=[(1, len(tokens))], finish=finish, tokens=tokens)
        t.loss_mask, t.versions = mask, np.where(mask, 0, -1).astype(np.int32)
        t.logprobs = np.where(mask, -0.5, 0).astype(np.float32)
        group.trajectories.append(t)
    return group


# ------------------------------------------------------------------------------------ the workers


def toy(line: Line, behaviour: str = ""):
    """Answers groups: what it does to group 3 depends."""
    line.beat()
    while True:
        for group in line.receive(0.05):
            name = group.problem.get("do", behaviour)
            if name == "die":
                os.kill(os.getpid(), signal.SIGKILL)
            if name == "hang":
                signal.pause()
            if name == "stop in a message":
                os.write(line.connection.fileno(), (1000).to_bytes(4, "big") + b"half")
                signal.pause()
            if name == "nonsense":
                line.connection.send_bytes(b"nonsense")
            if name == "twice":
                line.send(answer_of(group))
            if name == "a future version":
                answer = answer_of(group)
                answer.group.trajectories[0].versions[1:] = 9
                line.send(answer)
            line.send(answer_of(group))
        line.beat()


def judgement(n=1) -> Judgement:
    return Judgement([(1.0, (1.0,), None)] * n, time.time(), 0.0)


def answer_of(group: Group) -> Answer:
    made = dataclasses.replace(group_of(group.group_id), start=group.start)
    return Answer(group.group_id, made, judgement())


def wrong(answer, asked):
    return flaw(answer, asked, len(asked.trajectories) or 1, 3, 512)


def pool_of(tmp_path, roles: dict, silence=1.6, restarts=3) -> Pool:
    config = Config(restarts=restarts, silence=silence)
    return Pool(roles, config, logs=tmp_path, flaw=wrong)


@pytest.fixture
def rollouts(tmp_path):
    pool = pool_of(tmp_path, {"rollout": (toy, 2)})
    yield pool
    pool.close()


def drain(pool: Pool, count: int) -> list:
    """Messages until so many groups or results have landed."""
    messages, deadline = [], time.monotonic() + PATIENCE
    while sum(isinstance(m, Answer | Result) for _, m in messages) < count:
        assert time.monotonic() < deadline, messages
        messages += pool.receive(0.5)
    return messages


def landed(messages: list) -> list[int]:
    return sorted(m.group_id for _, m in messages if isinstance(m, Answer))


def issued(pool: Pool, ids, **facts) -> None:
    pool.issue([Group(i, 0, {"prompt": "?", **facts}) for i in ids])


# ------------------------------------------------------------------------------------------ pools


def test_groups_land_once_and_are_out_until_then(rollouts):
    issued(rollouts, range(40))
    assert set(rollouts.out) == set(range(40))
    messages = drain(rollouts, 40)
    assert landed(messages) == list(range(40)) and rollouts.out == {}
    assert {worker.name for worker, _ in messages} == {"rollout-0", "rollout-1"}


@pytest.mark.parametrize(
    "what, reason",
    [
        ("die", "died (exit code -9)"),
        ("stop in a message", "was silent for"),
        ("nonsense", "sent nonsense"),
        ("twice", "sent nonsense (ValueError: an answer to 3, which it does not have)"),
        ("a future version", "sent nonsense (ValueError: version 9, must be 0 to 3)"),
    ],
)
def test_a_worker_that_goes_wrong_is_replaced_and_its_groups_come_back(rollouts, what, reason):
    """The other one goes on meanwhile, also while nobody can be read."""
    issued(rollouts, [3], do=what)
    issued(rollouts, range(10, 20))
    messages, deadline = [], time.monotonic() + PATIENCE
    while not any(isinstance(m, Lost) for _, m in messages):
        assert time.monotonic() < deadline
        messages += rollouts.receive(0.5)
    (lost,) = [m for _, m in messages if isinstance(m, Lost)]
    assert reason in lost.reason
    again = {group.group_id for group in lost.groups}
    assert {*landed(messages)} | again >= {3} or what == "twice"
    issued(rollouts, again)
    messages += drain(rollouts, 11 - len({*landed(messages)} - again))
    assert {*landed(messages)} == {3, *range(10, 20)}


def test_restarts_are_used_up_and_refill(tmp_path, monkeypatch):
    pool = pool_of(tmp_path, {"rollout": (toy, 1, "die")}, restarts=2)
    monkeypatch.setattr(room, "REFILL_SECONDS", 0.0)
    with pytest.raises(TrainingStopped, match="rollout-0 died .*; 2 restarts are used up"):
        for number in range(4):
            issued(pool, [number])
            while not any(isinstance(m, Lost) for _, m in pool.receive(0.5)):
                pass
            if number == 1:
                monkeypatch.undo()
    assert number == 3
    pool.close()


def test_a_lost_learner_ends_the_attempt(tmp_path):
    pool = pool_of(tmp_path, {"learner": (toy, 1)})
    os.kill(pool.workers["learner-0"].process.pid, signal.SIGKILL)
    with pytest.raises(AttemptLost, match="learner-0 died"):
        while True:
            pool.receive(0.5)
    pool.close()


def test_silence_is_told_before_it_is_punished(tmp_path, monkeypatch):
    monkeypatch.setattr(room, "NOTICE_SECONDS", 1.0)
    pool = pool_of(tmp_path, {"rollout": (toy, 1)}, silence=60.0)
    issued(pool, [3], do="hang")
    while not (messages := pool.receive(0.5)) or not isinstance(messages[0][1], Silent):
        pass
    assert messages[0][1].reason == "is silent for 1 s"
    pool.close()


def test_a_worker_that_cannot_start_says_why(tmp_path):
    pool = pool_of(tmp_path, {"rollout": (refuse, 1)}, restarts=0)
    with pytest.raises(TrainingStopped, match="died .exit code 1: ValueError: no such model"):
        while True:
            pool.receive(0.5)
    pool.close()


def refuse(line: Line):
    raise ValueError("no such model")


def test_workers_die_with_their_parent(tmp_path):
    """Also when it is killed."""
    parent = multiprocessing.get_context("spawn").Process(target=hold, args=(str(tmp_path),))
    parent.start()
    path, deadline = tmp_path / "pids", time.monotonic() + PATIENCE
    while not path.exists() or not path.read_text().endswith("."):
        assert time.monotonic() < deadline
        time.sleep(0.05)
    pids = [int(x) for x in path.read_text()[:-1].split()]
    parent.kill()
    parent.join()
    while any(Path(f"/proc/{pid}/stat").exists() for pid in pids):
        assert time.monotonic() < deadline
        time.sleep(0.05)


def hold(folder: str):
    pool = pool_of(Path(folder), {"rollout": (toy, 2)})
    pids = [worker.process.pid for worker in pool.workers.values()]
    Path(folder, "pids").write_text(" ".join(map(str, pids)) + ".")
    time.sleep(PATIENCE)


# --------------------------------------------------------------------------------- reward workers

TASK = """
import os, signal, subprocess, tempfile, time
from reward import Step, Task

def make(argument, seed, tokenizer):
    def open_state(problem):
        return {"sum": 0}

    def step(state, answer):
        if answer == "hang":
            signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGALRM])
            time.sleep(1000)
        if answer == "exit":
            os._exit(3)
        if answer == "raise":
            raise RuntimeError("no such tool")
        if answer == "fork":
            child = subprocess.Popen(["sleep", "1000"])
            return Step(str(child.pid), 0.0, False)
        if answer == "file":
            return Step(tempfile.mkstemp()[1], 0.0, False)
        state["sum"] += int(answer)
        return Step(f"{state['sum']} {os.getpid()}", float(state["sum"]), state["sum"] > 9)

    def reset(index, split):
        return {"prompt": "?"}

    return Task(reset, step, None, 8, 8, max_turns=4, observation_tokens=60, open=open_state,
                outside=True)
"""


@pytest.fixture
def judges(tmp_path):
    """A pool with a reward worker of the task above."""
    (tmp_path / "mine.py").write_text(TASK)
    config = Config(task=str(tmp_path / "mine.py"), reward_seconds=0.5)
    pool = pool_of(tmp_path, {"reward": (reward_worker, 1, config)})
    yield pool
    pool.close()


def told(pool: Pool, *answers: str, sample=0) -> Result:
    """The reply to the last of some answers."""
    pool.ask([Call((1, sample), {"prompt": "?"}, answers)])
    ((_, result),) = [x for x in drain(pool, 1) if isinstance(x[1], Result)]
    assert result.key == (1, sample)
    return result


def test_a_state_that_is_not_there_is_made_again(judges):
    first = told(judges, "1")
    assert first.observation.startswith("1 ") and not first.done
    second = told(judges, "1", "4")
    assert second.observation.split()[0] == "5" and second.reward == 5.0
    os.kill(judges.workers["reward-0"].process.pid, signal.SIGKILL)
    while not any(isinstance(message, Lost) for _, message in judges.receive(0.5)):
        pass
    third = told(judges, "1", "4", "2")
    pids = [result.observation.split()[1] for result in (first, second, third)]
    assert third.observation.split()[0] == "7" and pids[0] == pids[1] != pids[2]
    assert told(judges, "3").reward == 3.0  # it begins again: the state of before is not it
    judges.ask([Call((1, 0), {}, None)])  # it is over
    assert told(judges, "1", "4", "6").done


def test_a_call_that_hangs_or_ends_the_process_costs_itself_alone(judges):
    """Others that its worker had are asked again of the next one; nothing is used up."""
    for number, (bad, failure) in enumerate(
        [("hang", "env_error: was silent"), *[("exit", "env_error: died")] * 4]
    ):
        calls = [Call((1, 0), {"prompt": "?"}, (bad,)), Call((1, 1), {"prompt": "?"}, ("2",))]
        judges.ask(calls)
        results = {m.key[1]: m for _, m in drain(judges, 2) if isinstance(m, Result)}
        assert results[0].failure.startswith(failure) and results[0].observation is None, number
        assert results[1].observation.startswith("2 ") and not results[1].failure
    assert told(judges, "raise").failure.startswith("env_error: RuntimeError: no such tool (mine")


def test_forks_and_files_of_a_task_go_with_its_worker(judges):
    child, file = int(told(judges, "fork").observation), told(judges, "file", sample=1).observation
    assert Path(file).exists() and Path(f"/proc/{child}").exists()
    told(judges, "hang", sample=2)  # it is replaced
    deadline = time.monotonic() + PATIENCE
    while Path(file).exists() or alive(child):
        assert time.monotonic() < deadline
        time.sleep(0.05)
    file = told(judges, "file", sample=3).observation
    judges.close()
    assert not Path(file).exists()


def alive(pid: int) -> bool:
    """Neither gone nor a zombie."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


JUDGE = """
import os, signal, time
from reward import Step, Task

def make(argument, seed, tokenizer):
    def step(problem, answers):
        if answers[-1] == "exit":
            os._exit(3)
        if answers[-1] == "slow":
            time.sleep(1000)
        if answers[-1] == "fork":
            os.fork()
        return Step(None, float(len(answers[-1])), True)

    return Task(lambda index, split: {"prompt": "?"}, step, None, 8, 8)
"""


def test_a_group_that_costs_two_verifiers_has_failed_and_others_have_not(tmp_path):
    (tmp_path / "mine.py").write_text(JUDGE)
    config = Config(task=str(tmp_path / "mine.py"), reward_seconds=0.3)
    pool = pool_of(tmp_path, {"reward": (reward_worker, 1, config)}, silence=20.0)
    texts = {0: "a", 1: "exit", 2: "fork", 3: "slow", 4: "ccc"}
    pool.verify([group_of(i, [text, "zz"]) for i, text in texts.items()])
    messages = drain(pool, 5)
    assert landed(messages) == [*texts]  # a copy of a worker says nothing
    verdicts = {m.group_id: m.judgement.verdicts for _, m in messages if isinstance(m, Answer)}
    rewards = {i: [value for value, _, _ in rows] for i, rows in verdicts.items()}
    assert (rewards[0], rewards[2], rewards[4]) == ([1.0, 2.0], [4.0, 2.0], [3.0, 2.0])
    assert [error for *_, error in verdicts[1]] == ["verifier_lost: died (exit code 3)"] * 2
    assert [error for *_, error in verdicts[3]] == ["verifier_timeout", None]
    assert len([m for _, m in messages if isinstance(m, Lost)]) == 2
    assert not pool.deaths  # in the next evaluation these are other groups
    pool.close()


def test_a_verifier_that_hangs_and_reads_nothing_blocks_nobody(tmp_path):
    """Its pipe is full: who sends to it waits, until it is killed."""
    source = JUDGE.replace("time.sleep(1000)", "signal.pthread_sigmask(0, [14]); time.sleep(1000)")
    (tmp_path / "mine.py").write_text(source)
    config = Config(task=str(tmp_path / "mine.py"), reward_seconds=0.3)
    roles = {"reward": (reward_worker, 1, config), "rollout": (toy, 1)}
    pool = pool_of(tmp_path, roles, silence=2.0)
    groups = [group_of(100 + i, [text]) for i, text in enumerate(["slow", "a", "bb"])]
    for group in groups:
        (t,) = group.trajectories
        for name in ("tokens", "loss_mask", "logprobs", "versions"):
            array = getattr(t, name)
            setattr(t, name, np.concatenate([np.repeat(array[:1], 300_000), array[1:]]))
        t.turns = [(300_000, len(t.tokens))]
    pool.verify(groups)
    issued(pool, range(5))
    messages = drain(pool, 8)
    verdicts = {m.group_id: m.judgement.verdicts for _, m in messages if isinstance(m, Answer)}
    assert [*verdicts[100]][0][2].startswith("verifier_lost: was silent")
    assert (verdicts[101][0][0], verdicts[102][0][0]) == (1.0, 2.0)
    assert {worker.name for worker, m in messages if isinstance(m, Lost)} == {"reward-0"}
    pool.close()


def test_a_reward_worker_needs_no_torch(tmp_path):
    pool = pool_of(tmp_path, {"reward": (reward_worker, 1, Config())}, silence=20.0)
    task = make_task("guess")
    group = group_of(0, [" 3"])
    group.problem = task.reset(0, "train")
    pool.verify([group])
    drain(pool, 1)
    loaded = Path(f"/proc/{pool.workers['reward-0'].process.pid}/maps").read_text()
    pool.close()
    assert "numpy" in loaded and "libtorch" not in loaded


# -------------------------------------------------------------------------------------- messages


def test_a_group_that_has_travelled_is_the_same():
    group = group_of(4, ["hello", "", "x"])
    twin = pickle.loads(pickle.dumps(group, 5))
    assert twin.digest == group.digest and twin.evidence == group.evidence
    for one, other in zip(group.trajectories, twin.trajectories, strict=True):
        for name, value in vars(one).items():
            np.testing.assert_array_equal(value, getattr(other, name))


def changed(**values):
    return lambda group: vars(group.trajectories[1]).update(values)


def at(name: str, index: int, value):
    return lambda group: getattr(group.trajectories[1], name).__setitem__(index, value)


FLAWS = {
    "sample missing": (lambda group: group.trajectories.pop(), "1 samples, must be 0 to 1"),
    "another group": (lambda group: vars(group).update(group_id=5), "must be 4, 0"),
    "another start": (lambda group: vars(group).update(start=1), "must be 4, 0"),
    "another kind": (changed(tokens=np.float64([1, 2])), "arrays of"),
    "too short": (changed(versions=np.int32([0])), "arrays of"),
    "unknown id": (at("tokens", 1, 512), "token id 512, must be 0 to 511"),
    "NaN": (at("logprobs", 1, np.nan), "log-prob nan"),
    "positive": (at("logprobs", 1, 0.5), "log-prob 0.5"),
    "future": (at("versions", 1, 4), "version 4, must be 0 to 3"),
}


@pytest.mark.parametrize("name", FLAWS)
def test_what_a_worker_says_is_judged(name):
    change, words = FLAWS[name]
    group, asked = group_of(4, ["x", "y"]), Group(4, 0, {})
    assert flaw(Answer(4, group, judgement(2)), asked, 2, 3, 512) is None
    change(group)
    assert words in flaw(Answer(4, group, judgement(2)), asked, 2, 3, 512)


def test_verdicts_are_judged():
    group, good = group_of(4, ["x", "y"]), (1.0, (), None)
    for verdicts, words in (
        ([good], "1 verdicts on 2 samples"),
        ([(float("nan"), (), None), good], "reward nan"),
        ([(1.0, (1e39,), None), good], "reward 1e+39"),
    ):
        assert words in flaw(Answer(4, None, Judgement(verdicts, 0.0, 0.0)), group, 2, 3, 512)


def test_what_waits_for_a_worker_on_another_machine_is_sent_when_it_dials(tmp_path):
    """Its process has no connection yet."""
    here, there = multiprocessing.Pipe()
    pool = pool_of(tmp_path, {})
    process = SimpleNamespace(name="rollout-0", connection=None, kill=int, join=lambda seconds: 0)
    worker = Worker("rollout", 0, process, "log", time.monotonic())
    pool.workers["rollout-0"] = worker
    pool._thread(pool._send, worker)
    issued(pool, [1])
    process.connection = here
    assert there.poll(PATIENCE) and pickle.loads(there.recv_bytes())[0].group_id == 1
    pool.close()
