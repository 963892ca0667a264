"""limits.py: what a task's code may cost when it reads model output: time, memory, long numbers.

A verifier or an environment reads what a policy has written, and a policy that learns finds every
string that makes it slow. Beyond a limit the episode fails, with a reason to count by; nothing
else does. Left out: code that never returns from one call into C. A reward worker or a rollout
worker that hangs in it falls silent and is replaced (runtime/pool.py). train_sync.py runs the steps
of built-in tasks itself: there nobody would notice.
"""

import contextlib
import ctypes
import os
import resource
import signal
import sys
import threading
import traceback
from functools import cache
from pathlib import Path

end_thread = ctypes.pythonapi.PyThreadState_SetAsyncExc  # when it runs Python code the next time
OURS = "pool"  # the name of threads that are no task's

# Of an integer that is read from text, or written: more take quadratic time. This is Python's own
# limit, whatever the environment says.
sys.set_int_max_str_digits(4300)


class OutOfTime(BaseException):
    """A time limit has passed; not an Exception, so that a verifier does not swallow it."""


def in_main_thread() -> bool:
    """Signals reach the main thread only, and a limit on memory is one of the whole process."""
    return threading.current_thread() is threading.main_thread()


@contextlib.contextmanager
def time_limit(seconds: float | None):
    """Raises OutOfTime inside its block after `seconds`; None or 0 means no limit.

    It interrupts Python code, not one long call into C. Threads that its block has left behind are
    ended, too. There is no limit in threads other than the main one.
    """
    if not (seconds and in_main_thread()):
        yield
        return
    armed, threads = True, {*threading.enumerate()}

    def expire(signum, frame):
        if armed:  # an alarm that arrives after the block has ended must not hit what follows
            raise OutOfTime

    handler = signal.signal(signal.SIGALRM, expire)
    timer = signal.getitimer(signal.ITIMER_REAL)
    try:
        try:
            # It strikes repeatedly, for code that swallowed the first one in a bare `except`.
            signal.setitimer(signal.ITIMER_REAL, seconds, seconds + 0.1)
            yield
        finally:
            armed = False
            for thread in {*threading.enumerate()} - threads:
                if thread.name != OURS:
                    end_thread(ctypes.c_ulong(thread.ident), ctypes.py_object(SystemExit))
    finally:  # two of them: the alarm may strike on the way into the first
        signal.setitimer(signal.ITIMER_REAL, *timer)
        signal.signal(signal.SIGALRM, handler)


@contextlib.contextmanager
def memory_limit(mebibytes: float):
    """Inside its block the process can grow by so much; then Python raises MemoryError.

    Linux only, and only in a process's main thread.
    """
    if not (in_main_thread() and sys.platform == "linux"):
        yield
        return
    pages = int(os.pread(sizes(os.getpid()), 64, 0).split()[0])
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
def sizes(process: int) -> int:
    """The open file of a process's sizes: it is read at every token boundary."""
    return os.open(f"/proc/{process}/statm", os.O_RDONLY)


def describe(error: BaseException) -> str:
    """One line, "Type: message (file, line N)": where in its own file a task has failed.

    That is the deepest frame in a module of tasks/ or in a file that --task has named; both are
    modules called "tasks.". An error that passed through neither has no place.
    """
    message = " ".join(str(error).split())[:200]
    place = ""
    for frame, line in traceback.walk_tb(error.__traceback__):
        name = frame.f_globals.get("__name__", "")
        if name.startswith("tasks.") and name != __name__:
            place = f" ({Path(frame.f_code.co_filename).name}, line {line})"
    return f"{type(error).__name__}: {message}{place}"
