"""methods/baseline.py: `--advantage opob`: the baseline with which stale answers have the least
variance, in place of the group's mean.

Axes: G groups · n answers of a group
"""

import torch
from torch import Tensor

from buffer import repaired
from learner import GroupMethod, pairs_of
from losses import LOG_RATIO_LIMIT, STD_EPSILON, group_advantages
from methods.episodes import policy_logprobs


class OptimalBaseline(GroupMethod):
    """Advantages inside a group, with the optimal baseline."""

    def samples(self, learner, groups: list, config) -> tuple:
        trajectories = repaired(groups)
        rewards = torch.tensor([t.reward for t in trajectories]).float().view(len(groups), -1)
        ratios, norms = importance_weights(learner, trajectories, config)
        advantages, dead = optimal_advantages(rewards, ratios, norms)
        return pairs_of(trajectories, advantages.view(-1, 1)), dead


def importance_weights(learner, trajectories: list, config) -> tuple:
    """pi / mu of whole answers, and about how long the gradients of their log-probs are, [G, n].

    Of the gradient with respect to the logits only the token's own entry is taken, 1 - pi: exact
    lengths would take a backward pass for every answer.
    """
    rows, seen = [], policy_logprobs(learner.model, trajectories, learner, config)
    for t, now in zip(trajectories, seen, strict=True):
        then = torch.from_numpy(t.logprobs[t.loss_mask])
        log = (now - then).sum().clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)
        rows.append([float(log.exp()), float((1 - now.exp()).norm())])
    return torch.tensor(rows).view(-1, config.group_size, 2).unbind(-1)


def optimal_baseline(rewards: Tensor, ratios: Tensor, norms: Tensor) -> Tensor:
    """The baseline [G, 1] with which stale samples of a group have the least variance; all [G, n].

    VCPO (arXiv 2602.17616): b = sum w^2 |g|^2 R / sum w^2 |g|^2, with w = pi / mu of the whole
    answer and |g| the norm of the gradient of its log-prob. On-policy, with equal norms, it is the
    mean. Also where all weights are 0.
    """
    weights = (ratios * norms).square()
    weights = torch.where(weights.sum(1, keepdim=True) > 0, weights, 1.0)
    return (weights * rewards).sum(1, keepdim=True) / weights.sum(1, keepdim=True)


def optimal_advantages(rewards: Tensor, ratios: Tensor, norms: Tensor) -> tuple:
    """As `grpo`, with the optimal baseline in place of the mean: (advantages [G, n], dead [G])."""
    advantages, dead = group_advantages(rewards, "grpo")
    lower = rewards.mean(1, keepdim=True) - optimal_baseline(rewards, ratios, norms)  # [G, 1]
    advantages = advantages + lower / (rewards.std(1, keepdim=True) + STD_EPSILON)
    return advantages.masked_fill(dead[:, None], 0.0), dead


METHOD = OptimalBaseline
