"""judge.py: who judges a group: the task, or a reward model; and a teacher, who is asked, too.

A reward model (`--reward-model`) gives the reward in place of the task. A teacher (`--teacher`)
says how likely each generated token was. Both are read-only, so every reward worker has its own, in
float32. They are imported where they are made: a worker without them needs no torch, and starts two
seconds sooner.
Left out: what the learner makes of it (learner.py, methods/distillation.py).
"""

import time
from collections.abc import Callable

from reward import Task, verify_group
from runtime.config import Config
from runtime.messages import Group, Judgement


def judge_of(config: Config, task: Task) -> Callable:
    """Who judges by the configured task, teacher and reward model: group -> `Judgement`. UserError
    for what does not fit."""
    teacher = reward_model = None
    if config.teacher:
        from methods.distillation import ask_teacher, teacher_of

        teacher = teacher_of(config, task)
    if config.reward_model:
        from methods.reward_model import serve_newest, verdicts_by

        reward_model = serve_newest(config, task, None)

    def judge(group: Group, alive: Callable = lambda: None) -> Judgement:
        """Verify a group, or score it, and ask the teacher; and say how long that took."""
        nonlocal reward_model
        began, said, version = time.time(), (), 0
        if reward_model:
            reward_model = serve_newest(config, task, reward_model)
            verdicts, version = verdicts_by(reward_model, group), reward_model.version
        else:
            verdicts = verify_group(group, task, config, alive)
        # DAPO (arXiv 2503.14476) leaves such an answer out of the loss; here it has failed
        if config.overlong == "drop":
            both = zip(group.trajectories, verdicts, strict=True)
            verdicts = [(0.0, (), "overlong") if t.finish == "length" else v for t, v in both]
        if teacher:
            said = ask_teacher(teacher, group.trajectories, verdicts)
        return Judgement(verdicts, began, time.time() - began, said, version)

    return judge
