"""advice.py: who judges a group: the task, or a reward model; and a teacher, who is asked, too.

A reward model (`--reward-model`, reward_model.py) gives the reward in place of the task. A teacher
(`--teacher`, teacher.py) says how likely each generated token was. Both are read-only, so every
reward worker has its own, in float32. They are imported where they are made: a worker without them
needs no torch, and starts two seconds sooner.
Left out: what the learner makes of it (learner.py).
"""

import time
from collections.abc import Callable
from dataclasses import dataclass

from reward import Task, verify_group
from runtime.config import Config
from runtime.messages import Group, Judgement


@dataclass
class Advice:
    """What a reward worker has besides the task; None where it is not configured."""

    teacher: object = None  # a Teacher
    served: object = None  # a RewardModel


def advice_of(config: Config, task: Task) -> Advice:
    """The configured teacher and reward model; UserError for what does not fit."""
    advice = Advice()
    if config.teacher:
        from runtime.teacher import teacher_of

        advice.teacher = teacher_of(config, task)
    renew(advice, config, task)
    return advice


def renew(advice: Advice, config: Config, task: Task) -> None:
    """Serve the newest reward model of the configured folder."""
    if config.reward_model:
        from reward_model import serve_newest

        advice.served = serve_newest(config, task, advice.served)


def judge(
    group: Group,
    task: Task,
    config: Config,
    advice: Advice,
    alive: Callable = lambda: None,
) -> Judgement:
    """Verify a group, or score it, and ask the teacher; and say how long that took."""
    began, said, version = time.monotonic(), (), 0
    if advice.served:
        from reward_model import verdicts_by

        verdicts, version = verdicts_by(advice.served, group), advice.served.version
    else:
        verdicts = verify_group(group, task, config, alive)
    if advice.teacher:
        from runtime.teacher import ask_teacher

        said = ask_teacher(advice.teacher, group.trajectories, verdicts)
    return Judgement(verdicts, began, time.monotonic() - began, said, version)
