"""estimators.py: how expectations are enumerated, and estimators that only the laboratory compares.

The first half is what the exact files share: a task is all of its responses, a policy a table of
logits, and the truth a finite sum. The second half: training uses estimators of losses.py.

Axes:   R responses · T tokens of a response · V vocabulary · P prefixes
        D = P V entries of the table of logits, which is `theta` [P, V]
        In the second half axes and tensors are those of losses.py: log-probs, advantages [N].
"""

from typing import NamedTuple

import torch
from torch import Tensor

from losses import k3, log_ratio, sequence_mean, unbiased_k3

SEED = 0

STALENESS, STEP = range(9), 0.3  # gradient ascent on the enumerated objective, steps of one length


class EnumeratedTask(NamedTuple):
    """Every response of a task, in lexicographic order."""

    tokens: Tensor  # [R, T] int64
    prefix: Tensor  # [R, T] int64: row of theta that predicts each token
    rewards: Tensor  # [R] float64
    shape: tuple[int, int]  # (P, V) of theta


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
    theta = 0.5 * torch.randn(task.shape, generator=generator, dtype=torch.float64)
    chain = [theta]
    for _ in STALENESS[1:]:
        slope = true_gradient(theta, task).view(task.shape)
        theta = theta + STEP * slope / slope.norm()
        chain.append(theta)
    return chain


def mean_given(chances: Tensor, known: Tensor, values: Tensor) -> Tensor:
    """For each response the mean of values [R] over all in which the same is known, int64 [R]."""
    return (torch.bincount(known, chances * values) / torch.bincount(known, chances))[known]


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


# ---- estimators ----

OPSM_DELTA = 1e-4  # slime's --opsm-delta (TRL suggests 0.5); DeepSeek-V3.2 gives no number


def k1(logprobs: Tensor, reference: Tensor) -> Tensor:
    """-log x [N], x = pi_ref / pi: unbiased, of either sign, high variance."""
    return logprobs - reference


def k2(logprobs: Tensor, reference: Tensor) -> Tensor:
    """(log x)^2 / 2 [N]: biased, low variance, never negative."""
    return (reference - logprobs).square() / 2


KL_ESTIMATORS = {"k1": k1, "k2": k2, "k3": k3, "unbiased_k3": unbiased_k3}


def opsm_mask(
    behaviour: Tensor,
    logprobs: Tensor,
    advantages: Tensor,
    sequence: Tensor,
    delta: float = OPSM_DELTA,
) -> Tensor:
    """Tokens to keep, bool [N]: all but those of sequences that are bad news AND off-policy.

    A sequence goes iff A < 0 and the mean of log(mu / pi) over its tokens is > delta: DeepSeek-
    V3.2 (arXiv 2512.02556) equation 9. Give an objective only what is kept, and leave `count`
    alone: what was dropped stays in the denominator, as in the paper.
    """
    drift = sequence_mean(-log_ratio(logprobs.detach(), behaviour), sequence)  # [N]
    return ~((advantages < 0) & (drift > delta))
