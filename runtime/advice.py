"""advice.py: who judges a group: the task, or a reward model; and a teacher, who is asked, too.

A reward model (`--reward-model`) gives the reward in place of the task. A teacher (`--teacher`)
says how likely each generated token was. Both are read-only, so every reward worker has its own, in
float32. They are imported where they are made: a worker without them needs no torch, and starts two
seconds sooner.
Left out: what the learner makes of it (learner.py, methods/distillation.py).
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
    reward_model: object = None  # a RewardModel, the newest of its folder


def advice_of(config: Config, task: Task) -> Advice:
    """The configured teacher and reward model; UserError for what does not fit."""
    advice = Advice()
    if config.teacher:
        from methods.distillation import teacher_of

        advice.teacher = teacher_of(config, task)
    if config.reward_model:
        from methods.reward_model import serve_newest

        advice.reward_model = serve_newest(config, task, None)
    return advice


def judge(
    group: Group,
    task: Task,
    config: Config,
    advice: Advice,
    alive: Callable = lambda: None,
) -> Judgement:
    """Verify a group, or score it, and ask the teacher; and say how long that took."""
    began, teacher, version = time.time(), (), 0
    if config.reward_model:
        from methods.reward_model import serve_newest, verdicts_by

        advice.reward_model = serve_newest(config, task, advice.reward_model)
        verdicts, version = verdicts_by(advice.reward_model, group), advice.reward_model.version
    else:
        verdicts = verify_group(group, task, config, alive)
    if config.overlong == "drop":  # DAPO's overlong filtering (arXiv 2503.14476)
        both = zip(group.trajectories, verdicts, strict=True)
        verdicts = [(0.0, (), "overlong") if t.finish == "length" else v for t, v in both]
    if advice.teacher:
        from methods.distillation import ask_teacher

        teacher = ask_teacher(advice.teacher, group.trajectories, verdicts)
    return Judgement(verdicts, began, time.time() - began, teacher, version)
