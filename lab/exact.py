"""The exact laboratory: tasks so small that every response is enumerated.

A task has 64 responses, spelled as one token of 64 or as three tokens of 4. The true policy
gradient and the best reward are finite sums here, so bias and variance of every objective are exact
numbers. What a run does to its data, and `bench_lab`, which measures everything: exact_runs.py.
Left out: optimizer state, clipping of the gradient norm, function approximation (the policy is a
table of logits), rewards that depend on time.

Staleness here: optimizer steps between the policy that sampled the trace and the one trained on it.
Axes:   R responses · T tokens of a response · V vocabulary · P prefixes
        D = P V entries of the table of logits, which is `theta` [P, V]
        N tokens in any order, as in losses.py
"""

from collections import defaultdict
from typing import NamedTuple

import torch
from torch import Tensor

import losses

SEED = 0
STALENESS, STEP = range(9), 0.3  # gradient ascent on the enumerated objective, steps of one length

# dpo needs pairs of responses; sequence_is is `reinforce` with the ratio of the whole response
METHODS = (*(name for name in losses.OBJECTIVES if name != "dpo"), "sequence_is")


# ---------------------------------------------------------------------------- everything as a sum


class EnumeratedTask(NamedTuple):
    """Every response of a task, in lexicographic order."""

    tokens: Tensor  # [R, T] int64
    prefix: Tensor  # [R, T] int64: row of theta that predicts each token
    rewards: Tensor  # [R] float64
    shape: tuple[int, int]  # (P, V) of theta


def enumerate_task(vocab: int, length: int) -> EnumeratedTask:
    """All V^T responses; a reward belongs to a number, so 64^1 and 4^3 have the same rewards."""
    number = torch.arange(vocab**length)
    worth = vocab ** torch.arange(length - 1, -1, -1)  # of each digit
    first_row = (vocab ** torch.arange(length) - 1) // (vocab - 1)  # of the prefixes of a length
    prefix = first_row + number[:, None] // (worth * vocab)
    # Most of the reward is for a last digit that fits the first two: prefixes matter.
    a, b, c = (number // worth % 4 for worth in (16, 4, 1))
    rewards = 0.2 * (a == 2) + 0.2 * (b > a) + 0.6 * (c == (a + b) % 4)
    tokens = number[:, None] // worth % vocab
    return EnumeratedTask(tokens, prefix, rewards.double(), (int(prefix.max()) + 1, vocab))


TASKS = {"one token": enumerate_task(64, 1), "three tokens": enumerate_task(4, 3)}


def logprobs_of(theta: Tensor, task: EnumeratedTask) -> Tensor:
    """Log-probs [R, T] of every token of every response under the table theta [P, V]."""
    return torch.log_softmax(theta, -1)[task.prefix, task.tokens]


def chances_of(logprobs: Tensor) -> Tensor:
    """Probabilities [R] of responses from the log-probs [R, T] of their tokens."""
    return logprobs.sum(1).exp()


def expected_reward(theta: Tensor, task: EnumeratedTask) -> Tensor:
    """J = sum over all responses of pi(y) R(y)."""
    return chances_of(logprobs_of(theta, task)) @ task.rewards


def true_gradient(theta: Tensor, task: EnumeratedTask) -> Tensor:
    """The gradient of J [D]; nothing is estimated."""
    return torch.func.grad(expected_reward)(theta, task).flatten()


def response_gradients(slopes: Tensor, theta: Tensor, task: EnumeratedTask) -> Tensor:
    """Gradients [R, D] of the gain of each response, from its slopes d gain / d log pi [R, T]."""
    scores = torch.func.jacrev(logprobs_of)(theta, task)  # [R, T, P, V]
    return torch.einsum("rt,rtd->rd", slopes, scores.flatten(2))


def policies(task: EnumeratedTask) -> list[Tensor]:
    """The policy after 0, 1, ... 8 steps of exact gradient ascent: theta [P, V] each."""
    generator = torch.Generator().manual_seed(SEED)
    chain = [0.5 * torch.randn(task.shape, generator=generator, dtype=torch.float64)]
    for _ in STALENESS[1:]:
        slope = true_gradient(chain[-1], task).view(task.shape)
        chain.append(chain[-1] + STEP * slope / slope.norm())
    return chain


def accuracy(gradients: Tensor, chances: Tensor, truth: Tensor) -> dict:
    """How good gradients [R, D] of these chances [R] are, in units of the length of the truth [D].

    `bias`, |expectation - truth|; `spread`, the standard deviation of one of them; `share`, the
    expectation projected on the truth; `cosine` of the angle between the two.
    """
    mean = chances @ gradients
    facts = {
        "bias": (mean - truth).norm() / truth.norm(),
        "spread": (chances @ (gradients - mean).square().sum(1)).sqrt() / truth.norm(),
        "share": mean @ truth / truth.square().sum(),
        "cosine": torch.cosine_similarity(mean, truth, dim=0),
    }
    return {name: float(value) for name, value in facts.items()}


# -------------------------------------------------------------------------------------- objectives


def loss_of(method: str, new: Tensor, old: Tensor, advantages: Tensor, staleness=0) -> tuple:
    """Loss of R responses by any of METHODS, and the share of tokens that were touched.

    Log-probs now and as recorded [R, T], advantages [R]. A token is touched if a correction
    clipped or capped it. One update a step: the proximal policy is the one of this forward
    pass. The mean is over R responses, as in J.
    """
    weighted = advantages[:, None].expand_as(new)
    if method == "sequence_is":  # the ratio of the whole response: unbiased at every staleness
        weighted = weighted * (new - old).detach().sum(1, keepdim=True).exp()
    now, then, weighted = (values.flatten() for values in (new, old, weighted))
    sequence = torch.arange(len(new)).repeat_interleave(new.shape[1])
    age = torch.full_like(sequence, staleness)
    tokens = losses.Tokens(now, now.detach(), then, weighted, sequence, age)
    objective = "reinforce" if method == "sequence_is" else method
    loss, by = losses.policy_loss(objective, tokens, len(new))
    return loss, float((by["clipped"] | by["capped"]).double().mean())


def examine(method: str, task: EnumeratedTask, theta, behaviour, staleness: int = 0) -> tuple:
    """The gradient of every response [R, D], and its `accuracy`; nothing is sampled.

    `ess`: the effective sample size of the token weights, as a share of the tokens. `touched`: see
    `loss_of`.
    """
    new = logprobs_of(theta, task).requires_grad_()
    old = logprobs_of(behaviour, task)
    advantages = task.rewards - expected_reward(behaviour, task)
    loss, touched = loss_of(method, new, old, advantages, staleness)
    slopes = -len(new) * torch.autograd.grad(loss, new)[0]  # [R, T]
    gradients, chances = response_gradients(slopes, theta, task), chances_of(old)
    weights = slopes / advantages[:, None]  # [R, T]
    squares = (chances @ weights.square()).mean().clamp_min(1e-300)
    ess = float((chances @ weights).mean() ** 2 / squares)
    facts = accuracy(gradients, chances, true_gradient(theta, task))
    return gradients, facts | {"ess": ess, "touched": touched}


def objectives_part(task: EnumeratedTask) -> dict:
    """Facts of `examine` for every method and staleness."""
    first, curves = policies(task)[0], defaultdict(list)
    for method in METHODS:
        for s, theta in enumerate(policies(task)):
            curves[method].append(examine(method, task, theta, first, s)[1])
    return curves
