"""What code that judges model output may cost, and that everything is put back after each limit."""

import random
import signal
import threading
import time
from collections import Counter

import pytest

import limits
import reward
from reward import make_task, verify


def test_guarded_serves_environments_too():
    assert limits.guarded("env", 1.0, divmod, 7, 2) == ((3, 1), None)
    assert limits.guarded("env", 0.05, time.sleep, 9) == (None, "env_timeout")
    result, reason = limits.guarded("env", None, int, "x")
    assert result is None and reason.startswith("env_error: ValueError: ")


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
    answers, rng = reward.solve(problem), random.Random(2)
    for _ in range(4000):
        verdict = verify(task, problem, answers, rng.uniform(1e-6, 4e-5))
        outcomes[verdict.error] += 1
        assert signal.getsignal(signal.SIGALRM) is mine
    assert set(outcomes) <= {None, "verifier_timeout"} and not alarm
    assert len(outcomes) == 2, outcomes


def test_other_threads_run_without_a_limit():
    verdicts = []

    def work():
        task = make_task("reverse")
        problem = task.reset(0, "train")
        verdicts.append(verify(task, problem, reward.solve(problem), 0.5))

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert verdicts == [(1.0, (1.0,), None)]
