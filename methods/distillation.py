"""methods/distillation.py: `--teacher`: another policy says how likely each generated token was.

On-policy distillation, as GLM-5's between its stages (arXiv 2602.15763): the student generates; a
token is worth log(pi_teacher / pi), whatever the rewards are. One answer to a prompt is enough.
Reward workers ask the teacher (runtime/judge.py); its log-probs travel with the trajectory.
Left out: several teachers in one run.
"""

from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from buffer import repaired
from learner import GroupMethod, pairs_of
from losses import log_ratio
from methods.episodes import policy_logprobs
from model import GPT
from reward import Task, alphabet_of, specs_of
from runtime.checkpoint import checkpoint_path, newest_weights
from runtime.config import Config, blame, require
from runtime.models import make_model, model_of
from runtime.runlog import stored_config
from runtime.tokenizer import same_words, tokenizer_of
from tasks import limits


class Distillation(GroupMethod):
    """Rewards say nothing, the teacher all."""

    def samples(self, learner, groups: list, config: Config) -> tuple:
        """All answers, also of groups whose rewards are equal: no group is dead."""
        trajectories = repaired(groups)
        alike = torch.ones(len(trajectories), 1)  # `advantages` puts the teacher's in place
        return pairs_of(trajectories, alike), torch.zeros(len(groups)) > 0

    def advantages(self, batch: list, tokens, hidden: Tensor) -> tuple:
        teacher = torch.from_numpy(np.concatenate([t.teacher for t, _ in batch]))
        return distilled(teacher, tokens.logprobs), ()


def distilled(teacher: Tensor, logprobs: Tensor) -> Tensor:
    """Advantages [N] by a teacher: log(pi_teacher / pi) of each token, without gradient.

    This descends KL(pi || teacher) as a policy gradient that looks at one token at a time. The
    ratio is cut like all log-ratios.
    """
    return log_ratio(teacher.to(logprobs), logprobs).detach()


class Teacher(NamedTuple):
    """A model, and what a student may emit."""

    model: GPT
    alphabet: Tensor
    config: Config


def teacher_of(config: Config, task: Task) -> Teacher:
    """The configured teacher, on the CPU; UserError when it does not fit."""
    place = Path(config.teacher)
    needed = "must be a run folder, or a Hugging Face folder, that fits the student"
    with blame(f"--teacher {place}: {needed}", (Exception, limits.OutOfTime)):
        run = place.parents[1] if place.parent.name == "checkpoints" else place
        require(run.is_dir(), "there is no such folder")
        if (run / "checkpoints").is_dir():
            other, _ = stored_config(run, "--teacher")
            known, asked = ({x.split(":")[0] for x in specs_of(c.task)} for c in (other, config))
            require(asked <= known, f"it has learned {other.task}, and not {config.task}")
            model = model_of(newest_weights(place), config, task)
        else:
            other = replace(
                config, model=str(place), init="", lora=0, attention="dense", scoring="mean"
            )
            model = make_model(other, task)
        require(same_words(tokenizer_of(other), task.tokenizer), "it has another vocabulary")
    model.flat.requires_grad_(False)
    return Teacher(model, torch.from_numpy(alphabet_of(task)), config)


def pinned(config: Config) -> Config:
    """The config; a run as teacher becomes the checkpoint that is its newest now. So it teaches the
    same when the teacher learns on, until that has three newer ones and removes it."""
    place = Path(config.teacher)
    if not (place / "checkpoints").is_dir():
        return config
    with blame(f"--teacher {place}: must be a run folder with a checkpoint"):
        path = checkpoint_path(place, newest_weights(place)["version"])
    return replace(config, teacher=str(path))


def ask_teacher(teacher: Teacher, episodes: list, verdicts: list) -> list[np.ndarray]:
    """The teacher's log-probs of what was generated in each episode of a group, float32 [M]; 0 in
    failed ones, which it does not see: a replay lacks them, and rounding depends on what is packed
    together."""
    sound = [t for t, v in zip(episodes, verdicts, strict=True) if not (t.failed or v[-1])]
    seen = policy_logprobs(teacher.model, sound, teacher, teacher.config)
    logprobs = {t.sample_index: np.zeros(t.generated, np.float32) for t in episodes}
    logprobs |= {t.sample_index: x.numpy() for t, x in zip(sound, seen, strict=True)}
    return list(logprobs.values())


METHOD = Distillation
