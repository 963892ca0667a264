"""A task whose environment is outside, slow, and breaks by chance: `guess` with a state.

`path/to/slow.py:SECONDS,FAULTS`: a step takes SECONDS; FAULTS is yes or no. A state has a temporary
file.
"""

import os
import random
import signal
import tempfile
import time
from dataclasses import replace

from tasks.guess import make as guess

CHANCES = {"hang": 0.05, "raise": 0.05, "exit": 0.01, "fork": 0.01, "": 0.88}  # of each turn


def break_down(fault: str) -> None:
    if fault == "hang":  # as a call into C that never returns: no alarm interrupts it
        signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGALRM])
        time.sleep(10**6)
    if fault == "raise":
        raise ValueError("broken")
    if fault == "exit":
        os._exit(7)
    if fault == "fork":
        os.fork()


def open_state(problem):
    return {"problem": problem, "answers": [], "file": tempfile.mkstemp()[1]}


def close(state):
    """However the episode has ended."""
    os.unlink(state["file"])


def make(argument, seed, tokenizer):
    seconds, faults = argument.split(",")
    task = guess("", seed, tokenizer)

    def step(state, answer):
        """The reply of `guess`, late, and now and then something else."""
        time.sleep(float(seconds))
        state["answers"].append(answer)
        if faults == "yes":
            break_down(*random.choices([*CHANCES], CHANCES.values()))
        return task.step(state["problem"], state["answers"])

    return replace(task, step=step, open=open_state, close=close, outside=True)
