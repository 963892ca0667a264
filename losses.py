"""losses.py: the objectives of the learner: advantages, policy losses, KL, diagnostics.

Pure functions on packed tokens. Left out: models, optimizers, batching; what is done to a step as a
whole when its data are stale (methods/dampers.py), what one method alone needs (methods/).
Call `policy_loss("tis", tokens, count)` for every micro-batch of a step; losses and statistics of
the micro-batches add up. What the policy did not generate is not here: learner.py leaves it out.

Axes:      G groups, n samples of a group, N generated tokens of one micro-batch, laid end to end,
           S sequences in it.
Policies:  mu = behaviour (it generated the token), pi_p = proximal (recomputed at the start of
           the step), pi = the one being trained, pi_ref = reference.
           w = pi_p / mu,  r = pi / pi_p,  rho = pi / mu,  A = advantage.
"""

import math
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

# Log-ratios are cut at this size before exp: e^20 is far beyond every cap below, while its square
# still fits float32. A ratio beyond it has no gradient.
LOG_RATIO_LIMIT = 20.0


@dataclass(frozen=True)
class Constants:
    """Constants of the objectives, each with its source."""

    eps_low: float = 0.2  # PPO clip, lower side: GLM-5 (arXiv 2602.15763) section 3.2
    eps_high: float = 0.28  # PPO clip, upper side: the same; "clip-higher" of DAPO (2503.14476)
    tis_cap: float = 2.0  # truncated importance sampling: the default of slime's --tis-clip
    icepop_beta: float = 2.0  # GLM-5 section 3.2: w is kept in [1/2, 2]
    double_low: float = 0.3  # SAO (2607.07508), reasoning; GLM-5 gives no number for its agents
    double_high: float = 5.0  # likewise; coding agents there: 0.8 and 3.0
    cispo_low: float = 1.0  # MiniMax-M1 (2506.13585): no lower bound, hence 1 - 1 = 0
    cispo_high: float = 3.0  # so rho <= 4, Tinker's default; MiniMax-M1 gives no number
    gspo_low: float = 3e-4  # GSPO (2507.18071), experiments: clips of a sequence-level ratio
    gspo_high: float = 4e-4  # likewise


PUBLISHED = Constants()


class Tokens(NamedTuple):
    """What an objective sees of one micro-batch."""

    logprobs: Tensor  # [N], the only one that a gradient flows into
    proximal: Tensor  # [N]; needed by the decoupled objectives only
    behaviour: Tensor  # [N]
    advantages: Tensor  # [N]
    sequence: Tensor  # int64 [N], 0 <= sequence < S
    age: Tensor | None = None  # int64 [N], staleness of each token; needed by `a3po` only


# ---- building blocks ----


def token_mean(values: Tensor, count: float) -> Tensor:
    """Sum over the generated tokens of this micro-batch, divided by those of the WHOLE step.

    values [N], count > 0 -> scalar. So micro-batches add up to the mean of the step, however it
    was packed. Dividing by N would not.
    """
    assert count > 0, f"count is the number of generated tokens of the step, got {count}"
    return values.sum() / count


def sequence_mean(values, sequence) -> Tensor:
    """For each token the mean over the tokens of its sequence: values [N] -> [N]."""
    zeros = torch.zeros_like(values)  # N is at least S, and known without asking the device
    totals = zeros.index_add(0, sequence, values)
    tokens = zeros.index_add(0, sequence, torch.ones_like(values))
    return (totals / tokens)[sequence]


def log_ratio(new, old) -> Tensor:
    """log(new / old) [N], cut to +-LOG_RATIO_LIMIT; `old` is detached."""
    return (new - old.detach()).clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)


def _clip(
    ratio,
    advantages,
    low,
    high,
):
    """PPO's pessimistic gain min(ratio A, clip(ratio) A), and where no gradient is left; [N] each.

    Schulman et al. 2017 (arXiv 1707.06347) equation 7, with two sides as in DAPO.
    """
    free = ratio * advantages
    bound = ratio.clamp(1.0 - low, 1.0 + high) * advantages
    return torch.minimum(free, bound), bound < free


# ---- objectives ----
# Each is a function of the tokens `t` and the constants `c`: the gain of every token [N], and which
# tokens were clipped and which capped (bool [N], or False for none). The titles tell the loss.


def reinforce(t, c):
    """-A log pi: no correction at all, right only when pi = mu (Williams 1992)."""
    return t.advantages * t.logprobs, False, False


def ppo(t, c):
    """-min(rho A, clip(rho) A): classic PPO, whose trust region stands around the stale mu.

    Schulman et al. 2017 (arXiv 1707.06347) equation 7. The naive one: AReaL (arXiv 2505.24298)
    shows that it falls behind even at small staleness.
    """
    ratio = log_ratio(t.logprobs, t.behaviour).exp()
    return *_clip(ratio, t.advantages, c.eps_low, c.eps_high), False


def _decoupled(t, c):
    """w = pi_p / mu, PPO's gain with the trust region around pi_p, and where it is clipped.

    The weight is detached: it corrects for who sampled and is not to be optimised. This project
    makes one update a step, with pi_p the policy of that very forward pass: r is 1, and the clip is
    idle. It matters with several updates a step.
    """
    weight = log_ratio(t.proximal.detach(), t.behaviour).exp()
    ratio = log_ratio(t.logprobs, t.proximal).exp()
    return weight, *_clip(ratio, t.advantages, c.eps_low, c.eps_high)


def decoupled_ppo(t, c):
    """-w min(r A, clip(r) A): the trust region stands around pi_p; the weight is unbounded.

    AReaL (arXiv 2505.24298), after Hilton et al. 2021 (arXiv 2110.00641).
    """
    weight, gain, clipped = _decoupled(t, c)
    return weight * gain, clipped, False


def a3po(t, c):
    """decoupled PPO whose pi_p is not computed: it lies between mu and pi, nearer to pi the staler
    the token is.

    A-3PO (arXiv 2512.06547): log pi_p = log mu + (d - 1) / d (log pi - log mu) for a token that is
    d versions old, as if pi_p were the policy one version ago. At d = 0, mu, pi_p and pi are equal.
    So w = rho^(1 - 1/d), r = rho^(1/d), and unlike in `decoupled_ppo` the clip is not idle.
    """
    share = 1 - 1 / t.age.clamp_min(1).to(t.logprobs)
    between = t.behaviour + share * (t.logprobs.detach() - t.behaviour)
    return decoupled_ppo(t._replace(proximal=between), c)


def tis(t, c):
    """-min(w, cap) min(r A, clip(r) A): truncated importance sampling, biased but bounded.

    Truncation as in Ionides 2008, per token as in slime (`--use-tis`).
    """
    weight, gain, clipped = _decoupled(t, c)
    return weight.clamp(0.0, c.tis_cap) * gain, clipped, weight > c.tis_cap


def icepop(t, c):
    """-pop(w) min(r A, clip(r) A), pop(w) = w if 1/beta <= w <= beta else 0 (both inclusive).

    GLM-5 (arXiv 2602.15763) equation 1.
    """
    weight, gain, clipped = _decoupled(t, c)
    dropped = (weight < 1.0 / c.icepop_beta) | (weight > c.icepop_beta)
    return weight.masked_fill(dropped, 0.0) * gain, clipped | dropped, False


def double_sided(t, c):
    """-f(rho) A log pi, f(rho) = rho if 1 - low < rho < 1 + high else 0 (both strict), detached.

    GLM-5 (arXiv 2602.15763) equations 3 to 5, for its agents. No pi_p is needed, and a token
    outside teaches nothing whatever the sign of A; PPO's min would keep half of them.
    """
    ratio = log_ratio(t.logprobs.detach(), t.behaviour).exp()
    outside = (ratio <= 1.0 - c.double_low) | (ratio >= 1.0 + c.double_high)
    weight = ratio.masked_fill(outside, 0.0)
    return weight * t.advantages * t.logprobs, outside, False


def cispo(t, c):
    """-clip(rho) A log pi, the weight detached: it is cut, and no token is silenced.

    MiniMax-M1 (arXiv 2506.13585) equations 4 and 5.
    """
    ratio = log_ratio(t.logprobs.detach(), t.behaviour).exp()
    weight = ratio.clamp(1.0 - c.cispo_low, 1.0 + c.cispo_high)
    return weight * t.advantages * t.logprobs, False, weight != ratio


def gspo(t, c):
    """-min(s A, clip(s) A), s = exp(mean log rho of the sequence): clipped as a whole.

    GSPO (arXiv 2507.18071) in its token form: the value is s, the gradient that of the token's
    own pi. It equals the sequence form where A is constant on a sequence, and is right elsewhere.
    A sequence must lie whole in one micro-batch; long ones weigh more, because of `count`.
    """
    per_token = log_ratio(t.logprobs, t.behaviour)
    own = per_token - per_token.detach()  # value 0, gradient of the token's own log-prob
    ratio = (sequence_mean(per_token.detach(), t.sequence) + own).exp()
    return *_clip(ratio, t.advantages, c.gspo_low, c.gspo_high), False


# A new one gets its name in runtime/config.py, too, which must not import torch, and its oracle in
# tests/test_losses.py.
OBJECTIVES = {  # what is done about tokens that are off-policy:
    "ppo": ppo,  # clipped around mu
    "decoupled_ppo": decoupled_ppo,  # weighted by w, clipped around pi_p
    "a3po": a3po,  # the same, with a pi_p that is not computed
    "tis": tis,  # decoupled_ppo, w cut
    "icepop": icepop,  # the same, dropped where w is far from 1
    "double_sided": double_sided,  # weighted by rho, dropped where rho is far from 1
    "cispo": cispo,  # weighted by rho, cut; never dropped
    "gspo": gspo,  # clipped around mu, the whole sequence at once
    # nothing; the best and the worst answer of a group are trained, with an A that makes this the
    # gradient of -log sigmoid(beta m): online DPO (2402.04792, 2410.18252); methods/preferences.py
    "dpo": reinforce,
    "reinforce": reinforce,  # nothing
}


def policy_loss(
    objective: str,
    t: Tokens,
    count: float,
    c: Constants = PUBLISHED,
) -> tuple:
    """The loss by one of OBJECTIVES, a scalar, and which tokens were `clipped`, `capped`: bool [N].

    `count`: see `token_mean`. AssertionError when the tensors differ in shape.
    """
    shapes = {tuple(values.shape) for values in t if values is not None}
    # One advantage per sequence would broadcast over its tokens, silently and wrongly.
    assert len(shapes) == 1, f"tensors of different shape: {shapes}"
    gain, clipped, capped = OBJECTIVES[objective](t, c)
    none = torch.zeros_like(gain, dtype=torch.bool)
    touched = {
        "clipped": none | clipped,
        "capped": none | capped,
    }
    return -token_mean(gain, count), touched


# ---- advantages ----


def grpo(rewards, valid):
    """(R - mean) / std, the sample std (DeepSeekMath, arXiv 2402.03300)."""
    difference = centred(rewards, valid)
    others = (valid.sum(1, keepdim=True) - 1).clamp_min(1)  # [G, 1]
    std = (difference.square().sum(1, keepdim=True) / others).sqrt()  # [G, 1]
    return difference / (std + STD_EPSILON)


def centred(rewards, valid):
    """R - mean (Dr. GRPO, arXiv 2503.20783; GLM-5's agents)."""
    size = valid.sum(1, keepdim=True)  # [G, 1]
    difference = rewards - rewards.sum(1, keepdim=True) / size.clamp_min(1)
    return difference.masked_fill(~valid, 0.0)


def rloo(rewards, valid):
    """R - mean of the others (arXiv 2402.14740), which is (R - mean) n / (n - 1)."""
    size = valid.sum(1, keepdim=True)  # [G, 1]
    return centred(rewards, valid) * size / (size - 1).clamp_min(1)


STD_EPSILON = 1e-6  # only against division by a tiny spread: equal rewards are dead groups anyway
# rewards float [G, n], 0 where they are not valid, valid bool [G, n] -> advantages [G, n]. These
# names, too, stand in runtime/config.py, and so do those of DAMPERS (methods/dampers.py). `gae` and
# `opob` are methods of their own: METHODS in learner.py.
ADVANTAGES = {"grpo": grpo, "mean": centred, "rloo": rloo}


def group_advantages(rewards, name: str, valid=None) -> tuple:
    """Rewards relative to their group: float [G, n] -> (advantages [G, n], dead bool [G]).

    name: one of ADVANTAGES. `valid` bool [G, n], by default all: a sample that is not (it
    has no such turn: methods/turns.py) counts nowhere and gets 0. A group with fewer than two
    valid samples or with equal rewards is dead: exactly 0 everywhere. AssertionError for a valid
    reward that is not finite.
    """
    valid = torch.ones_like(rewards, dtype=torch.bool) if valid is None else valid
    rewards = rewards.masked_fill(~valid, 0.0)  # a product with `valid` would keep NaN
    assert torch.isfinite(rewards).all(), f"rewards must be finite, got {rewards.tolist()}"
    advantages = ADVANTAGES[name](rewards, valid)
    # Compared exactly: the std of equal floats need not come out as 0.
    best = rewards.masked_fill(~valid, -math.inf).amax(1, keepdim=True)  # [G, 1]
    dead = ((rewards == best) | ~valid).all(1)  # a single one, too
    return advantages.masked_fill(dead[:, None], 0.0), dead


# ---- KL to the reference: x = pi_ref / pi (Schulman, "Approximating KL Divergence", 2020) ----


def k3(sampled_by, other) -> Tensor:
    """x - 1 - log x [N], x = other / sampled_by: estimates KL(sampled_by || other) from samples of
    the first, without bias, with low variance, never negative; flat beyond x = e^20."""
    log_x = (other - sampled_by).clamp(max=LOG_RATIO_LIMIT)
    # Near x = 1 the difference loses every digit and can turn negative: there the Taylor series.
    series = log_x.square() / 2 * (1 + log_x / 3 * (1 + log_x / 4 * (1 + log_x / 5)))
    return torch.where(log_x.abs() < 1e-2, series, torch.expm1(log_x) - log_x)


def unbiased_k3(logprobs, reference, behaviour) -> Tensor:
    """(pi / mu) k3 [N]: k3 for samples of mu, unbiased in its value and in its gradient.

    DeepSeek-V3.2 (arXiv 2512.02556), "Unbiased KL Estimate". The ratio is NOT detached: its
    gradient is the part that k3 alone misses. It corrects the choice of the token; that mu chose
    the tokens before it stays uncorrected.
    """
    return log_ratio(logprobs, behaviour).exp() * k3(logprobs, reference)


# ---- diagnostics ----


@torch.no_grad()
def diagnostics(
    t: Tokens,
    entropy: Tensor,
    touched: dict,
    reference=None,
) -> dict:
    """What one micro-batch adds to the step's diagnostics, for `merge_diagnostics`: float64 [N].

    entropy and reference [N]; `touched` is what `policy_loss` returned. `kl_behaviour`: k3 of
    samples of mu, so it estimates KL(mu || pi). `kl_reference` is weighted with pi / mu: on stale
    samples k3 alone is far too large.
    """
    logs = log_ratio(t.logprobs, t.behaviour).double()
    whole = torch.zeros_like(logs).index_add(0, t.sequence, logs)[: int(t.sequence.max()) + 1]
    values = {
        "ratio": logs.exp(),  # rho; it will be squared
        "whole": whole.clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT).exp(),  # of each sequence [S]
        "kl_behaviour": k3(t.behaviour, t.logprobs),
        "entropy": entropy.detach(),
        **touched,
    }
    if reference is not None:
        values["kl_reference"] = unbiased_k3(t.logprobs, reference, t.behaviour)
    return {name: each.double().cpu() for name, each in values.items()}


def merge_diagnostics(parts: list) -> dict:
    """The step's numbers, from all of its micro-batches.

    -> `ratio_max`; `ess_whole`, the effective sample size (sum w)^2 / sum w^2 (Kish 1965)
    of the ratios w of whole sequences, as a share of their number; all other keys as means per
    generated token.
    """
    values = {name: torch.cat([part[name] for part in parts]) for name in parts[0]}
    ratio = values.pop("ratio")
    whole = values.pop("whole")
    means = {name: float(each.mean()) for name, each in values.items()}
    return means | {
        "ratio_max": float(ratio.max()),
        "ess_whole": float(whole.sum() ** 2 / whole.square().sum() / len(whole)),
    }


def mismatch(parts: list) -> dict:
    """How far apart two log-probs of a token are, the generator's and the learner's. With the same
    weights it is what rounding makes of them."""
    gaps = torch.cat([part["ratio"] for part in parts]).log().abs()
    return {"mean": float(gaps.mean()), "max": float(gaps.max())}
