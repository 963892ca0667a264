"""A task whose environment is outside, slow, and breaks by chance: `guess` with a state.

`path/to/slow.py:SECONDS,FAULTS[,FOLDER]`: a step takes SECONDS; FAULTS is yes or no; a state has a
temporary file and, in FOLDER, a mark that `close` removes.
"""

import os
import random
import signal
import tempfile
import time
from dataclasses import replace
from functools import partial
from pathlib import Path

from tasks.guess import make as guess

FAULTS = {"hang": 0.05, "raise": 0.05, "exit": 0.01, "fork": 0.01}  # in so many of the turns


def hang():
    """As a call into C that never returns: no alarm interrupts it."""
    signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGALRM])
    time.sleep(10**6)


def break_down(kind):
    """One fault."""
    if kind == "hang":
        hang()
    elif kind == "raise":
        raise ValueError("broken")
    elif kind == "exit":
        os._exit(7)
    elif kind == "fork":
        os.fork()


def open_state(folder, problem):
    """Answers so far, a temporary file, a mark."""
    file = tempfile.NamedTemporaryFile(delete=False)
    mark = Path(folder, f"{os.getpid()}.open") if folder else None
    if mark:
        mark.touch()
    return {"problem": problem, "answers": [], "file": file, "mark": mark}


def step(task, seconds, faults, folder, state, answer):
    """The reply of `guess`, late, and now and then something else."""
    time.sleep(seconds)
    state["answers"].append(answer)
    kinds = list(FAULTS) if faults == "yes" else []
    for kind in (
        [faults]
        if faults in FAULTS
        else random.choices(
            [*kinds, "none"], [*[FAULTS[kind] for kind in kinds], 1 - sum(map(FAULTS.get, kinds))]
        )
    ):
        if folder and kind != "none":
            with Path(folder, "faults").open("a") as log:
                log.write(kind + "\n")
        break_down(kind)
    return task.step(state["problem"], state["answers"])


def close(state):
    """However the episode has ended."""
    os.unlink(state["file"].name)
    if state["mark"]:
        state["mark"].unlink()


def make(argument, seed, tokenizer):
    seconds, faults, folder = (argument + ",,").split(",")[:3]
    task = guess("", seed, tokenizer)
    talk = partial(step, task, float(seconds), faults, folder)
    return replace(task, step=talk, open=partial(open_state, folder), close=close, outside=True)
