"""Objectives of the learner: advantages, policy losses, KL estimators and the KL-window damper.

Small pure functions on packed tokens. Left out: models, optimizers, batching and everything that
remembers; the one thing with a memory, the damper, is a plain record that its caller keeps.
How to use them: `OBJECTIVES["tis"](logprobs, proximal, behaviour, advantages, mask, sequence,
count, Settings())` for every micro-batch of a step; the losses and the statistics add up.

Axes:      G groups, n samples of a group, N tokens of one micro-batch of packed sequences,
           S sequences packed there, V vocabulary.
Policies:  mu = behaviour (it generated the token), pi_p = proximal (recomputed at the start of
           the step), pi = the one being trained, pi_ref = reference.
           w = pi_p / mu,  r = pi / pi_p,  rho = pi / mu.
Tensors:   log-probs and advantages float32 [N]; mask bool [N], True where the policy generated;
           sequence int64 [N], 0 <= sequence < S <= N. Values outside the mask are never used.
"""

import math
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace

import torch
from torch import Tensor

# Log-ratios are cut at this size before exp: e^20 is far beyond every cap below, while its square
# still fits float32. The gradient beyond it is zero.
LOG_RATIO_LIMIT = 20.0


@dataclass(frozen=True)
class Settings:
    """Constants of the objectives, each with its source."""

    eps_low: float = 0.2  # PPO clip, lower side: GLM-5 (arXiv 2602.15763) section 3.2
    eps_high: float = 0.28  # PPO clip, upper side: the same; "clip-higher" of DAPO (2503.14476)
    tis_cap: float = 2.0  # truncated importance sampling: the default of slime's --tis-clip
    icepop_beta: float = 2.0  # GLM-5 section 3.2: w is kept in [1/2, 2]
    double_low: float = 0.2  # GLM-5 gives no number for its agents: that of its section 3.2
    double_high: float = 0.28  # likewise
    cispo_low: float = 1.0  # MiniMax-M1 (2506.13585): no lower bound, hence 1 - 1 = 0
    cispo_high: float = 3.0  # so rho <= 4, Tinker's default; MiniMax-M1 gives no number
    gspo_low: float = 3e-4  # GSPO (2507.18071), experiments: clips of a sequence-level ratio
    gspo_high: float = 4e-4  # likewise
    opsm_delta: float = 1e-4  # slime's --opsm-delta (TRL suggests 0.5); V3.2 gives no number


def _masked(values: Tensor, mask: Tensor) -> Tensor:
    """`values` with exactly 0 (and no gradient) outside the mask, whatever stands there."""
    # Broadcasting one advantage per sequence over tokens would be silent and wrong.
    assert values.shape == mask.shape, f"shape {tuple(values.shape)}, mask {tuple(mask.shape)}"
    return values.masked_fill(~mask, 0.0)  # [N]; a product with the mask would keep NaN


def token_mean(values: Tensor, mask: Tensor, count: float) -> Tensor:
    """Sum over the generated tokens of this micro-batch divided by those of the WHOLE step.

    values [N], mask bool [N], count > 0 -> scalar. Micro-batches then add up to the step's mean,
    whatever the packing; dividing by `mask.sum()` would not, `len(mask)` would count prompts.
    """
    assert count > 0, f"count is the number of generated tokens of the step, got {count}"
    return _masked(values, mask).sum() / count


def sequence_mean(values: Tensor, mask: Tensor, sequence: Tensor) -> Tensor:
    """Mean over the generated tokens of a token's own sequence: values [N] -> [N]."""
    zeros = torch.zeros_like(values)  # [N] bounds S without asking the device for a maximum
    totals = zeros.index_add(0, sequence, _masked(values, mask))
    tokens = zeros.index_add(0, sequence, mask.to(values.dtype))
    return (totals / tokens.clamp_min(1.0))[sequence]


def log_ratio(new: Tensor, old: Tensor, mask: Tensor) -> Tensor:
    """log(new / old) [N], cut to +-LOG_RATIO_LIMIT and 0 outside the mask; `old` is detached."""
    difference = _masked(new, mask) - _masked(old.detach(), mask)
    return difference.clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)


def _proximal_weight(name: str, proximal: Tensor | None, behaviour: Tensor, mask: Tensor) -> Tensor:
    """w = pi_p / mu [N], detached: it corrects for who sampled and is not to be optimised."""
    if proximal is None:
        raise ValueError(f"objective {name!r} needs the proximal log-probs, got None")
    return log_ratio(proximal.detach(), behaviour, mask).exp()


def _clipped_surrogate(
    ratio: Tensor, advantages: Tensor, low: float, high: float
) -> tuple[Tensor, Tensor]:
    """PPO's pessimistic min(ratio A, clip(ratio) A) [N], and bool [N]: where no gradient is left.

    Schulman et al. 2017 (arXiv 1707.06347) equation 7, with two sides as in DAPO.
    """
    free = ratio * advantages
    bound = ratio.clamp(1.0 - low, 1.0 + high) * advantages
    return torch.minimum(free, bound), bound < free


def _result(
    gain: Tensor, mask: Tensor, count: float, clipped: Tensor, capped: Tensor
) -> tuple[Tensor, dict[str, Tensor]]:
    """What every objective returns: the loss, and how many tokens its correction touched."""
    sums = {"clipped": (clipped & mask).sum(), "capped": (capped & mask).sum()}
    return -token_mean(gain, mask, count), sums


def reinforce(logprobs, proximal, behaviour, advantages, mask, sequence, count, settings):
    """-A log pi: no correction at all, right only when pi = mu (Williams 1992)."""
    gain = _masked(advantages, mask) * _masked(logprobs, mask)
    nowhere = torch.zeros_like(mask)
    return _result(gain, mask, count, nowhere, nowhere)


def ppo(logprobs, proximal, behaviour, advantages, mask, sequence, count, settings):
    """-min(rho A, clip(rho) A): classic PPO, whose trust region stands around the stale mu.

    Schulman et al. 2017 (arXiv 1707.06347) equation 7. AReaL (arXiv 2505.24298) shows that it
    falls behind even at small staleness; here as the naive arm.
    """
    ratio = log_ratio(logprobs, behaviour, mask).exp()
    gain, clipped = _clipped_surrogate(
        ratio, _masked(advantages, mask), settings.eps_low, settings.eps_high
    )
    return _result(gain, mask, count, clipped, torch.zeros_like(mask))


def _weighted_ppo(weight, capped, logprobs, proximal, advantages, mask, count, settings):
    """-weight min(r A, clip(r) A): the trust region stands around pi_p, the weight corrects mu."""
    ratio = log_ratio(logprobs, proximal, mask).exp()
    gain, clipped = _clipped_surrogate(
        ratio, _masked(advantages, mask), settings.eps_low, settings.eps_high
    )
    return _result(weight * gain, mask, count, clipped | (weight == 0.0), capped)


def decoupled_ppo(logprobs, proximal, behaviour, advantages, mask, sequence, count, settings):
    """-w min(r A, clip(r) A): decoupled PPO, the weight unbounded.

    AReaL (arXiv 2505.24298), after Hilton et al. 2021 (arXiv 2110.00641).
    """
    weight = _proximal_weight("decoupled_ppo", proximal, behaviour, mask)
    capped = torch.zeros_like(mask)
    return _weighted_ppo(weight, capped, logprobs, proximal, advantages, mask, count, settings)


def tis(logprobs, proximal, behaviour, advantages, mask, sequence, count, settings):
    """-min(w, cap) min(r A, clip(r) A): truncated importance sampling, biased but bounded.

    Truncation as in Ionides 2008, per token as in slime (`--use-tis`); constants in Settings.
    """
    weight = _proximal_weight("tis", proximal, behaviour, mask)
    capped = weight > settings.tis_cap
    weight = weight.clamp(0.0, settings.tis_cap)
    return _weighted_ppo(weight, capped, logprobs, proximal, advantages, mask, count, settings)


def icepop(logprobs, proximal, behaviour, advantages, mask, sequence, count, settings):
    """-pop(w) min(r A, clip(r) A), pop(w) = w if 1/beta <= w <= beta else 0 (both inclusive).

    GLM-5 (arXiv 2602.15763) equation 1.
    """
    weight = _proximal_weight("icepop", proximal, behaviour, mask)
    kept = (weight >= 1.0 / settings.icepop_beta) & (weight <= settings.icepop_beta)
    weight = weight.masked_fill(~kept, 0.0)
    capped = torch.zeros_like(mask)
    return _weighted_ppo(weight, capped, logprobs, proximal, advantages, mask, count, settings)


def double_sided(logprobs, proximal, behaviour, advantages, mask, sequence, count, settings):
    """-f(rho) A log pi, f(rho) = rho if 1 - low < rho < 1 + high else 0 (both strict), detached.

    GLM-5 (arXiv 2602.15763) equations 3 to 5, its agents: no pi_p is needed, and a token outside
    teaches nothing whatever the sign of A, where PPO's min would keep half of them.
    """
    ratio = log_ratio(logprobs.detach(), behaviour, mask).exp()
    inside = (ratio > 1.0 - settings.double_low) & (ratio < 1.0 + settings.double_high)
    weight = ratio.masked_fill(~inside, 0.0)
    gain = weight * _masked(advantages, mask) * _masked(logprobs, mask)
    return _result(gain, mask, count, ~inside, torch.zeros_like(mask))


def cispo(logprobs, proximal, behaviour, advantages, mask, sequence, count, settings):
    """-clip(rho) A log pi, the weight detached: it is cut, and no token is silenced.

    MiniMax-M1 (arXiv 2506.13585) equations 4 and 5.
    """
    ratio = log_ratio(logprobs.detach(), behaviour, mask).exp()
    weight = ratio.clamp(1.0 - settings.cispo_low, 1.0 + settings.cispo_high)
    gain = weight * _masked(advantages, mask) * _masked(logprobs, mask)
    return _result(gain, mask, count, torch.zeros_like(mask), weight != ratio)


def gspo(logprobs, proximal, behaviour, advantages, mask, sequence, count, settings):
    """-min(s A, clip(s) A), s = exp(mean log rho over the sequence): kept or cut as a whole.

    GSPO (arXiv 2507.18071), its token-level form: the value of s with the gradient of a token's
    own pi, equal to the sequence form when A is constant on a sequence and right when it is not.
    Sequences are weighted by their length, for the denominator of all objectives is `count`. A
    sequence must lie whole in one micro-batch.
    """
    per_token = log_ratio(logprobs, behaviour, mask)
    own = per_token - per_token.detach()  # value 0, gradient of the token's own log-prob
    ratio = (sequence_mean(per_token.detach(), mask, sequence) + own).exp()
    gain, clipped = _clipped_surrogate(
        ratio, _masked(advantages, mask), settings.gspo_low, settings.gspo_high
    )
    return _result(gain, mask, count, clipped, torch.zeros_like(mask))


OBJECTIVES: dict[str, Callable] = {
    objective.__name__: objective
    for objective in (ppo, decoupled_ppo, tis, icepop, double_sided, cispo, gspo, reinforce)
}


# These correct with pi_p / mu. With one update a step pi_p is the policy of that very forward pass.
NEEDS_PROXIMAL = frozenset({"decoupled_ppo", "tis", "icepop"})


def opsm_mask(
    behaviour: Tensor,
    logprobs: Tensor,
    advantages: Tensor,
    mask: Tensor,
    sequence: Tensor,
    delta: float,
) -> Tensor:
    """Tokens to keep, bool [N]: `mask` without the sequences that are bad news AND off-policy.

    A sequence goes iff A < 0 and the mean of log(mu / pi) over its tokens is > delta: DeepSeek-
    V3.2 (arXiv 2512.02556) equation 9. Give the result to an objective as its mask, and leave
    `count` alone: what was dropped stays in the denominator, as in the paper.
    """
    drift = sequence_mean(-log_ratio(logprobs.detach(), behaviour, mask), mask, sequence)  # [N]
    return mask & ~((advantages < 0) & (drift > delta))


ADVANTAGES = ("grpo", "mean", "rloo")


STD_EPSILON = 1e-6  # only against division by a tiny spread: equal rewards are dead groups anyway


def group_advantages(
    rewards: Tensor, kind: str, valid: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Rewards relative to their group: float [G, n] -> (advantages [G, n], dead bool [G]).

    `grpo`: (R - mean) / std, the sample std (DeepSeekMath, arXiv 2402.03300). `mean`: R - mean
    (Dr. GRPO, arXiv 2503.20783; GLM-5's agents). `rloo`: R - mean of the others (arXiv 2402.14740).
    Samples that are not `valid` (environment errors) count nowhere and get 0. A group with fewer
    than two valid samples or with equal rewards is dead: exactly 0, so it teaches nothing.
    ValueError for an unknown kind; AssertionError for a valid reward that is not finite.
    """
    if kind not in ADVANTAGES:
        raise ValueError(f"unknown advantage {kind!r}; allowed: {', '.join(ADVANTAGES)}")
    valid = torch.ones_like(rewards, dtype=torch.bool) if valid is None else valid
    rewards = _masked(rewards, valid)
    assert torch.isfinite(rewards).all(), f"rewards must be finite, got {rewards.tolist()}"
    size = valid.sum(1, keepdim=True)  # [G, 1]
    others = (size - 1).clamp_min(1)  # [G, 1]
    centred = _masked(rewards - rewards.sum(1, keepdim=True) / size.clamp_min(1), valid)
    # Compared exactly: the std of equal floats need not come out as 0.
    highest = rewards.masked_fill(~valid, -math.inf).amax(1)  # [G]
    lowest = rewards.masked_fill(~valid, math.inf).amin(1)  # [G]
    dead = (size[:, 0] < 2) | (highest == lowest)
    if kind == "grpo":
        std = (centred.square().sum(1, keepdim=True) / others).sqrt()  # [G, 1]
        centred = centred / (std + STD_EPSILON)
    elif kind == "rloo":
        centred = centred * size / others  # R - mean of others = (R - mean) n / (n - 1)
    return centred.masked_fill(dead[:, None], 0.0), dead


def k1(logprobs: Tensor, reference: Tensor) -> Tensor:
    """-log x [N]: unbiased, of either sign, high variance."""
    return logprobs - reference


def k2(logprobs: Tensor, reference: Tensor) -> Tensor:
    """(log x)^2 / 2 [N]: biased, low variance, never negative."""
    return (reference - logprobs).square() / 2


def k3(logprobs: Tensor, reference: Tensor) -> Tensor:
    """x - 1 - log x [N]: unbiased, low variance, never negative; flat beyond x = e^20."""
    log_x = (reference - logprobs).clamp(max=LOG_RATIO_LIMIT)
    # Near x = 1 the difference loses every digit and can turn negative: there the Taylor series.
    series = log_x.square() / 2 * (1 + log_x / 3 * (1 + log_x / 4 * (1 + log_x / 5)))
    return torch.where(log_x.abs() < 1e-2, series, torch.expm1(log_x) - log_x)


def unbiased_k3(logprobs: Tensor, reference: Tensor, behaviour: Tensor) -> Tensor:
    """(pi / mu) k3 [N]: given what precedes a token, unbiased from samples of mu for the KL of that
    token's distribution, and so is its gradient; that mu sampled the prefix stays uncorrected.

    DeepSeek-V3.2 (arXiv 2512.02556), "Unbiased KL Estimate". The ratio is NOT detached: its
    gradient is the part that k3 alone misses.
    """
    ratio = (logprobs - behaviour.detach()).clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT).exp()
    return ratio * k3(logprobs, reference)


def entropy_from_logits(logits: Tensor) -> Tensor:
    """Entropy in nats of every token's distribution: [N, V] -> [N], with gradient.

    Logits of -inf (a top-p mask) have probability 0 and count as 0, in the gradient too.
    """
    logprobs = torch.log_softmax(logits, dim=-1)  # [N, V]
    finite = logprobs.masked_fill(logprobs == -math.inf, 0.0)  # 0 * -inf would be NaN
    return -(logprobs.exp() * finite).sum(-1)


def effective_sample_size(log_weights: Tensor, mask: Tensor) -> Tensor:
    """(sum w)^2 / sum w^2 over the mask (Kish 1965): log w [N] -> scalar in [1, tokens], or 0."""
    logs = log_weights.detach().masked_fill(~mask, -math.inf)
    peak = logs.max().clamp_min(torch.finfo(logs.dtype).min)  # finite for an empty mask too
    weights = (logs - peak).exp()  # the largest is 1, so that neither sum leaves the range
    return weights.sum().square() / weights.square().sum().clamp_min(1.0)


@torch.no_grad()
def diagnostics(
    logprobs: Tensor,
    behaviour: Tensor,
    mask: Tensor,
    entropy: Tensor,
    sums: dict[str, Tensor],
    reference: Tensor | None = None,
) -> dict[str, Tensor]:
    """What one micro-batch contributes to the step's diagnostics, for `merge_diagnostics`.

    Tensors [N]; `sums` is what the objective returned. -> detached scalars: sums over tokens, but
    `ratio_max` and `ratio_min`. KL to mu is k3 of samples of mu, so it estimates KL(mu || pi); KL
    to the reference is weighted with pi / mu: on stale samples k3 alone is far too large.
    """
    ratio = log_ratio(logprobs, behaviour, mask).double().exp()  # [N], double: sums of squares
    result = {
        "tokens": mask.sum(),
        "kl_behaviour": _masked(k3(behaviour, logprobs), mask).double().sum(),
        "entropy": _masked(entropy, mask).double().sum(),
        "weight": _masked(ratio, mask).sum(),
        "weight_squared": _masked(ratio, mask).square().sum(),
        "ratio_max": ratio.masked_fill(~mask, -math.inf).max(),
        "ratio_min": ratio.masked_fill(~mask, math.inf).min(),
    }
    if reference is not None:
        result["kl_reference"] = (
            _masked(unbiased_k3(logprobs, reference, behaviour), mask).double().sum()
        )
    return result | sums


def merge_diagnostics(parts: list[dict[str, Tensor]]) -> dict[str, float]:
    """Step-level numbers from ALL micro-batches, the last one has no say of its own.

    -> `tokens`; `ratio_max`, `ratio_min`; `ess`, the effective sample size as a fraction of the
    tokens; all other keys as means per generated token (`clipped`, `capped`: fractions).
    AssertionError when the parts have different keys or the step has no generated token.
    """
    assert parts and all(part.keys() == parts[0].keys() for part in parts), "parts differ in keys"
    extremes = {"ratio_max": max, "ratio_min": min}
    merged = {key: extremes.get(key, sum)(float(part[key]) for part in parts) for key in parts[0]}
    tokens = merged["tokens"]
    assert tokens > 0, "no generated token in this step"
    weight, squared = merged.pop("weight"), merged.pop("weight_squared")
    means = {key: merged[key] / tokens for key in merged.keys() - extremes.keys() - {"tokens"}}
    return merged | means | {"ess": weight**2 / squared / tokens}


# ---- the KL-window damper ----
# "Divergence-Suppressed Alignment": keep the last 1000 KL values; while their mean is above 0.15,
# learn more slowly and hold on to the reference more. Window, threshold and 0.6 come from
# secondary articles, no primary source is known, and none says by how much the reference term is
# raised: doubling is this project's choice.
REFERENCE_FACTOR = 2.0


@dataclass(frozen=True)
class Damper:
    """State of the damper: plain numbers, the newest KL value last in `window`."""

    threshold: float = 0.15  # compared with the mean of the window, strictly
    lr_factor: float = 0.6
    reference_factor: float = REFERENCE_FACTOR
    size: int = 1000
    window: tuple[float, ...] = ()


def observe(damper: Damper, kl: float) -> Damper:
    """The damper after one more KL value; AssertionError, naming it, if it is not finite."""
    # One NaN in the window would switch the damper off for the next 1000 steps.
    assert math.isfinite(kl), f"the KL value must be finite, got {kl}"
    return replace(damper, window=(*damper.window, float(kl))[-damper.size :])


def window_mean(damper: Damper) -> float:
    """Mean of the values kept so far (0 before the first), summed without rounding."""
    return math.fsum(damper.window) / max(1, len(damper.window))


def lr_scale(damper: Damper) -> float:
    """Factor on the base learning rate: `lr_factor` while the mean is above the threshold."""
    return damper.lr_factor if window_mean(damper) > damper.threshold else 1.0


def reference_scale(damper: Damper) -> float:
    """Factor on the reference coefficient: raised exactly when `lr_scale` is lowered."""
    return damper.reference_factor if window_mean(damper) > damper.threshold else 1.0


def damper_to_dict(damper: Damper) -> dict:
    """For a checkpoint or JSON: numbers and one list."""
    return asdict(damper) | {"window": list(damper.window)}


def damper_from_dict(state: dict) -> Damper:
    """The inverse of `damper_to_dict`; TypeError for an unknown key."""
    return Damper(**(state | {"window": tuple(state["window"])}))
