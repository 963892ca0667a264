"""estimators.py: estimators that only the laboratory compares; training uses those of losses.py.

Axes and tensors as in losses.py: log-probs and advantages [N], sequence int64 [N].
"""

from torch import Tensor

from losses import k3, log_ratio, sequence_mean, unbiased_k3

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
