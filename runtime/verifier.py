"""verifier.py: the reward worker: it judges groups, and is the environment of slow or unsafe tasks.

It needs no torch, so it starts two seconds sooner. It does one thing after another: more at a time
takes more of them. A task that hangs in C is killed with it (pool.py).
Left out: what a task is, and its time limits (reward.py), who gets which work (pool.py).
"""

import gc
import os
import random
import tempfile
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np

from reward import Task, advance, ask, forget, own_files, task_of
from runtime.config import Config
from runtime.judge import judge_of
from runtime.messages import Answer, Call, Result, flaw
from runtime.pipes import Line
from runtime.pool import Pool


def reward_worker(line: Line, config: Config):
    """Verify one group after the other, and answer calls of environments. It leads a group of
    processes: what a task forks ends with it."""
    if config.teacher or config.reward_model or own_files(config.task):  # it may need torch
        import torch

        torch.set_num_threads(abs(config.threads) or 1)
    os.setpgid(0, 0)
    here = os.getpid()
    folder = tempfile.mkdtemp(prefix="nanoglm-")  # of the task's files; the parent removes it
    os.environ["TMPDIR"] = tempfile.tempdir = line.status["folder"] = folder
    task = task_of(config)
    judge, states = judge_of(config, task), {}  # states: of episodes, by key of their calls
    gc.freeze()
    line.beat()
    try:
        while True:
            for work in line.receive(0.5):
                if not isinstance(work, Call):
                    answer = Answer(work.group_id, judgement=judge(work, line.beat))
                elif work.answers is not None:
                    answer = reply(work, task, config, states)
                else:
                    answer = None
                    close_states(work.key, task, config, states)
                if os.getpid() != here:  # the task has forked, and this is the copy
                    os._exit(0)
                if answer:
                    line.send(answer)
            line.beat()
    finally:
        close_states((), task, config, states)


def reply(call: Call, task: Task, config: Config, states: dict) -> Result:
    """What an environment says to the newest answer. A state that is not there is made again from
    all answers; the random numbers of a call depend on episode and turn alone."""
    turn, (_, *episode) = len(call.answers), call.key
    random.seed(f"{tuple(episode)} {turn}")
    np.random.seed((*episode, turn))
    talk = partial(advance, task, states, call.key, call.problem)
    ((step, failure),) = ask("env", talk, [call.answers], config)
    observation, reward, done = step or (None, 0.0, True)
    if done:
        close_states(call.key, task, config, states)
    return Result(call.key, observation, reward, done, failure or "")


def close_states(prefix: tuple, task: Task, config: Config, states: dict) -> None:
    """All episodes are over whose key begins so."""
    keys = [key for key in states if key[: len(prefix)] == prefix]
    ask("env", partial(forget, task, states), keys, config)


# ------------------------------------------------------------------------------- in the parent


def exam_pool(config: Config, task: Task, logs: Path) -> Pool:
    """A pool with one reward worker, or as many as are configured for an environment outside; an
    exam is judged by the task, and nobody learns from it."""
    count = max(1, config.reward_workers) if task.outside else 1
    plain = replace(config, teacher="", reward_model="", overlong="keep")
    return Pool(
        {"reward": (reward_worker, count, plain)},
        plain,
        logs=logs,
        flaw=lambda answer, asked: flaw(answer, asked, 1, 0, 0),
        prefix="exam-",
    )
