"""limits.py: what code that judges model output may cost: time, memory, digits of a number.

A verifier or an environment reads what a policy has written, and a policy that learns finds every
string that makes it slow. Beyond a limit an episode fails, with a reason to count by; nothing else
does. Left out: code that never returns from one call into C. Its worker falls silent, is replaced
(transport.py), and the group it died of is not tried a third time.
"""

import contextlib
import os
import signal
import sys
import threading
from collections.abc import Callable
from functools import cache

if sys.platform == "linux":
    import resource


DIGITS = 4300  # of an integer that is read from text, or written: more take quadratic time


sys.set_int_max_str_digits(DIGITS)  # Python's own limit, whatever the environment says


class OutOfTime(BaseException):
    """A time limit has passed; not an Exception, so that a verifier does not swallow it."""


@contextlib.contextmanager
def time_limit(seconds: float | None):
    """Raises OutOfTime inside its block after `seconds`; None or 0 means no limit.

    It interrupts Python code, not one long call into C. Signals reach only a process's main
    thread: in other threads, and where there is no SIGALRM, there is no limit.
    """
    main = threading.current_thread() is threading.main_thread()
    if not (seconds and main and hasattr(signal, "setitimer")):
        yield
        return
    armed = True

    def expire(signum, frame):
        if armed:  # an alarm that arrives after the block has ended must not hit what follows
            raise OutOfTime

    handler, timer = signal.signal(signal.SIGALRM, expire), signal.getitimer(signal.ITIMER_REAL)
    try:
        try:
            # Again and again, for code that swallowed the first one in a bare `except`.
            signal.setitimer(signal.ITIMER_REAL, seconds, seconds + 0.1)
            yield
        finally:
            armed = False
    finally:  # a second one: the alarm may strike on the way into the first
        signal.setitimer(signal.ITIMER_REAL, *timer)
        signal.signal(signal.SIGALRM, handler)


@contextlib.contextmanager
def memory_limit(mebibytes: float):
    """Inside its block the process can grow by so much; then Python raises MemoryError.

    Linux only, and only in a process's main thread: the limit is one of the whole process.
    """
    main = threading.current_thread() is threading.main_thread()
    if not (main and sys.platform == "linux"):
        yield
        return
    pages = int(os.pread(_sizes(os.getpid()), 64, 0).split()[0])
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    limit = pages * resource.getpagesize() + int(mebibytes * 2**20)
    if hard != resource.RLIM_INFINITY:
        limit = min(limit, hard)
    resource.setrlimit(resource.RLIMIT_AS, (limit, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, (soft, hard))


@cache
def _sizes(process: int) -> int:
    """The open file of a process's sizes: read at every token boundary, so it is opened once."""
    return os.open(f"/proc/{process}/statm", os.O_RDONLY)


def guarded(who: str, seconds: float | None, function: Callable, *args) -> tuple:
    """(function(*args), None), or (None, reason) when it raises or exceeds the time limit.

    The reason is one line, "WHO_timeout" or "WHO_error: Type: message"; what stands before its
    first colon is a name to count by.
    """
    try:
        with time_limit(seconds) if seconds else contextlib.nullcontext():  # which is quicker
            return function(*args), None
    except OutOfTime:
        return None, f"{who}_timeout"
    except Exception as error:
        message = " ".join(str(error).split())[:200]
        return None, f"{who}_error: {type(error).__name__}: {message}"
