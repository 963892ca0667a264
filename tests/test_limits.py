"""What code that judges model output may cost, and that everything is put back after each limit."""

import contextlib
import json
import random
import resource
import signal
import sys
import threading
import time
from collections import Counter
from dataclasses import replace

import numpy as np
import pytest
from judge import guarded, verify

from reward import Step, make_task, verify_group
from rollout import make_environment
from runtime.config import Config
from runtime.messages import Group, Trajectory
from runtime.tokenizer import own_tokenizer
from tasks import limits

encode = own_tokenizer().encode
VERIFIERS = ("exact", "numeric", "numeric:parsable", "similar")


def test_guarded_serves_environments_too():
    assert guarded("env", 1.0, divmod, 7, 2) == ((3, 1), None)
    assert guarded("env", 0.05, time.sleep, 9) == (None, "env_timeout")
    result, reason = guarded("env", None, int, "x")
    assert result is None and reason.startswith("env_error: ValueError: ")


def test_an_error_is_described_in_one_line_without_a_place_of_ours():
    try:
        json.loads("{")
    except ValueError as error:
        assert limits.describe(error).startswith("JSONDecodeError: Expecting property name")
        assert "(test_limits" not in limits.describe(error)
    assert limits.describe(ValueError("two\nlines")) == "ValueError: two lines"
    assert len(limits.describe(ValueError("x" * 10**6))) < 300


def test_the_place_of_an_error_is_the_deepest_line_in_a_task_file():
    names = {"__name__": "tasks./home/me/mine.py", "json": json}
    source = "def outer(text):\n    return inner(text)\n\ndef inner(text):\n    json.loads(text)\n"
    exec(compile(source, "/home/me/mine.py", "exec"), names)
    _, reason = guarded("verifier", None, names["outer"], "{")
    assert reason.startswith("verifier_error: JSONDecodeError: ")
    assert reason.endswith(" (mine.py, line 5)")


@pytest.fixture
def alarm():
    """A handler of somebody else, which must be back after every limit."""
    calls = []
    before = signal.signal(signal.SIGALRM, lambda *_: calls.append(1))
    yield calls
    assert signal.getitimer(signal.ITIMER_REAL)[0] == 0
    signal.signal(signal.SIGALRM, before)


def test_time_limit_puts_handler_and_timer_back(alarm):
    mine = signal.getsignal(signal.SIGALRM)
    with pytest.raises(limits.OutOfTime), limits.time_limit(0.02):
        time.sleep(5)
    assert signal.getsignal(signal.SIGALRM) is mine
    signal.setitimer(signal.ITIMER_REAL, 50)
    with limits.time_limit(1):
        assert signal.getitimer(signal.ITIMER_REAL)[0] <= 1
    assert signal.getsignal(signal.SIGALRM) is mine
    assert 40 < signal.getitimer(signal.ITIMER_REAL)[0] <= 50
    signal.setitimer(signal.ITIMER_REAL, 0)
    with limits.time_limit(None), limits.time_limit(0):
        assert signal.getsignal(signal.SIGALRM) is mine
    assert not alarm


def test_time_limit_never_strikes_after_its_block(alarm):
    """Limits about as long as the work: either may win, and both ways all is tidy."""
    mine, outcomes = signal.getsignal(signal.SIGALRM), Counter()
    task, problem = make_task("guess"), {"prompt": "guess", "secret": 15}
    answers, rng = task.solve(problem), random.Random(2)
    for _ in range(4000):
        verdict = verify(task, problem, answers, rng.uniform(1e-6, 4e-5))
        outcomes[verdict.error] += 1
        assert signal.getsignal(signal.SIGALRM) is mine
    assert set(outcomes) <= {None, "verifier_timeout"} and not alarm
    assert len(outcomes) == 2, outcomes


@pytest.mark.parametrize("late", [True, False])
def test_threads_and_alarms_that_a_task_leaves_behind_are_ended(late):
    left, done = [], threading.Event()

    def listen():
        while not done.wait(0.01):
            pass

    ours = threading.Thread(target=listen, name=limits.OURS, daemon=True)  # a pool's

    def task():
        def forever():
            with contextlib.suppress(SystemExit):
                while True:
                    time.sleep(0.001)

        left.append(threading.Thread(target=forever, daemon=True))
        left[0].start()
        ours.start()
        signal.setitimer(signal.ITIMER_REAL, 0.2)
        signal.signal(signal.SIGALRM, lambda *_: left.append("struck"))
        time.sleep(0.1 if late else 0.0)

    guarded("verifier", 0.05 if late else 9.0, task)
    left[0].join(5.0)
    assert not left[0].is_alive()
    time.sleep(0.3)
    assert len(left) == 1 and ours.is_alive()
    done.set()


def hungry_step(problem, answers):
    bytearray(int(answers[-1]) * 2**20)
    return Step(None, 1.0, True)


def test_memory_is_limited_and_given_back():
    before = resource.getrlimit(resource.RLIMIT_AS)
    task = replace(make_task("reverse"), step=hungry_step)
    texts = ("1", "100000", "10", "3000", "2")  # MB; 400 may lie in memory that was kept
    verdicts = [verify(task, {}, [text], 5.0, memory=256.0) for text in texts]
    assert resource.getrlimit(resource.RLIMIT_AS) == before
    errors = [verdict.error and verdict.error.rstrip() for verdict in verdicts]
    assert errors == [None, "verifier_error: MemoryError:"] * 2 + [None]
    assert verify(task, {}, ["400"], 5.0).reward == 1.0  # without a limit


def test_an_environment_that_wants_too_much_costs_its_own_episode():
    config = Config(reward_memory=256.0)
    environment = make_environment(config, replace(make_task("guess"), step=hungry_step))
    asked = [({}, encode(text), [(0, len(encode(text)))], text) for text in ("1", "99999", "2")]
    first, second, third = environment.respond(asked)
    assert first.observation is third.observation is None and not first.failure + third.failure
    assert second.failure.startswith("env_error: MemoryError") and second.reward is None


def test_numbers_have_a_limit_whatever_the_environment_says():
    assert sys.get_int_max_str_digits() == 4300
    verdict = verify(replace(make_task("reverse"), step=integer_step), {}, ["9" * 5000])
    assert verdict.error.startswith("verifier_error: ValueError: Exceeds the limit")


def integer_step(problem, answers):
    return Step(None, float(int(answers[-1]) > 0), True)


NUMBERS = ("+9e+999999999999", "9e-999999999999", "9" * 10**5 + "/" + "7" * 10**5, "٣" * 1000)
HOSTILE = (
    *NUMBERS,
    *[opening * 10**5 + "1" for opening in "([{<"],
    "1," * 10**5 + "5",
    "".join(map(chr, range(32))),
    "<|end|><|pad|><|endoftext|>" * 1000,
    "\u202e\u0000\ufeff\u2212" * 1000,
    "((a+)+)+$" * 1000 + "!",
    "__import__('os').system('kill -9 1')",
    "%n%s{0.__class__}" * 1000,
    *["0x" + "f" * 10**6, "9" * 10**6, "1/" * 500_000, "1." * 500_000, "-" * 10**6, "a" * 10**6],
    *["[" * 10**6 + "]" * 10**6, '{"a":' * 10**5, " " * 10**6 + "1", "\x1b[2J\r\n\x7f"],
    *["1e999999999", "9**9**9**9", "44**19**35", "nan", "inf", "-0", ""],
)


@pytest.mark.parametrize("spec", ["guess", "reverse", "sum", "recall:64", *VERIFIERS])
def test_hostile_answers_change_nothing_but_the_reward(tmp_path, spec):
    """Strings that somebody's verifier would not survive."""
    if spec in VERIFIERS:
        (tmp_path / "d.jsonl").write_text(json.dumps({"prompt": "p", "answer": "35.5"}))
        spec = f"jsonl:{tmp_path / 'd.jsonl'}:{spec}"
    task, config = make_task(spec), Config(reward_seconds=5.0, reward_memory=512.0)
    environment, problem = make_environment(config, task), task.reset(0, "train")
    before = json.dumps(problem)
    for text in HOSTILE:
        with limits.memory_limit(config.reward_memory):
            verdict = verify(task, problem, [text], config.reward_seconds)
        assert verdict.error is None and 0 <= verdict.reward < 0.6, text[:60]
        tokens = encode(text[:20_000])
        (reply,) = environment.respond([(problem, tokens, [(0, len(tokens))], 0)])
        assert not reply.failure and len(reply.observation or []) <= 1, (text[:60], reply)
        assert json.dumps(problem) == before


@pytest.mark.parametrize(
    "said, late",
    [(["fine"] * 3, []), (["slow"] * 4, []), (["fine", "hang", "slow", "hang"], [1, 3])],
)
def test_every_episode_of_a_group_has_a_limit_of_its_own(said, late):
    def step(problem, answers):
        time.sleep({"fine": 0.0, "slow": 0.3, "hang": 300.0}[answers[-1].split()[0]])
        return Step(None, 1.0, True)

    group, beats = Group(0, 0, {}), []
    for i, text in enumerate(said):
        tokens = np.array(encode(f"{text} {i}"), np.int32)
        episode = Trajectory(0, i, 0, tokens=tokens, turns=[(0, len(tokens))])
        group.trajectories.append(episode)
    task = replace(make_task("reverse"), step=step)
    verdicts = verify_group(group, task, Config(reward_seconds=1.0), lambda: beats.append(1))
    assert [i for i, v in enumerate(verdicts) if v.error == "verifier_timeout"] == late
    assert [v.reward for v in verdicts] == [float(i not in late) for i in range(len(said))]
    assert bool(beats) == ("fine" not in said or bool(late))


def test_equal_answers_are_verified_once():
    """A policy that has learned says the same again and again, and a verifier is a function."""
    asked = []

    def step(problem, answers):
        asked.append(answers[-1])
        if answers[-1] == "2":
            raise ValueError("no")
        return Step(None, float(answers[-1]), True)

    group = Group(0, 0, {})
    for i, text in enumerate("121321"):
        tokens = np.array(encode(text), np.int32)
        episode = Trajectory(0, i, 0, tokens=tokens, turns=[(0, 1)])
        group.trajectories.append(episode)
    verdicts = verify_group(group, replace(make_task("reverse"), step=step), Config())
    assert asked == ["1", "2", "3"]
    assert [v.reward for v in verdicts] == [1.0, 0.0, 1.0, 3.0, 0.0, 1.0]
    failed = "verifier_error: ValueError: no"
    assert [v.error for v in verdicts] == [None, failed, None, None, failed, None]
