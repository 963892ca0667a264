"""The losses against oracles that share nothing with them: Python loops over floats.

The oracle of an objective takes the log-probs twice: `moving`, which gradients see, and `frozen`,
which stands in the detached factors; finite differences move only the first.
Advantages inside a group are compared with loops in test_exercises.py.
"""

import itertools
import json
import math
import statistics
from types import SimpleNamespace

import pytest
import torch

import losses
from losses import OBJECTIVES, Constants, Tokens, k3, policy_loss, unbiased_k3

NAN = float("nan")
# Tighter caps, and wider clips for GSPO, so that random batches fall on both sides of each.
CONSTANTS = Constants(gspo_low=0.05, gspo_high=0.06, cispo_high=0.3, tis_cap=1.3)
LENGTHS = (5, 1, 4, 7, 3, 6)  # generated tokens of each sequence
ALL = range(6)


def make_batch(seed=0, sequences=ALL, dtype=torch.float64):
    """Some sequences of a step, packed as the learner sees them."""
    sizes, tokens = torch.tensor(LENGTHS), torch.arange(sum(LENGTHS))
    which = torch.arange(len(LENGTHS)).repeat_interleave(sizes)  # each token's sequence
    random = torch.Generator().manual_seed(seed)
    draw = torch.randn(4, len(tokens), generator=random, dtype=torch.float64)
    behaviour = -1.5 + 0.5 * draw[0]
    proximal = behaviour + 0.35 * draw[1]
    logprobs = proximal + 0.35 * draw[2] + 0.3 * draw[3][which]  # a whole sequence drifts, too
    advantages = (-1.0) ** which * (0.5 + 0.25 * which)
    rows = torch.cat([tokens[which == i] for i in sequences])
    floats = [x[rows].to(dtype) for x in (logprobs, proximal, behaviour, advantages)]
    sequence = torch.arange(len(sequences)).repeat_interleave(sizes[[*sequences]])
    age = (which + tokens)[rows] % 5  # it changes in a sequence
    return SimpleNamespace(**Tokens(*floats, sequence, age)._asdict(), count=len(tokens))


def on_policy_batch():
    batch = make_batch()
    batch.proximal = batch.behaviour = batch.logprobs.clone()
    return batch


def tokens_of(batch, **changes):
    """The batch as an objective takes it."""
    return Tokens(**{name: getattr(batch, name) for name in Tokens._fields} | changes)


def run(name, batch, constants=CONSTANTS):
    """Loss, gradient with respect to the log-probs (none reaches the older policies), which tokens
    were touched."""
    names = [x for x in ("logprobs", "proximal", "behaviour") if getattr(batch, x) is not None]
    leaves = {x: getattr(batch, x).clone().requires_grad_() for x in names}
    loss, touched = policy_loss(name, tokens_of(batch, **leaves), batch.count, constants)
    gradient, *others = torch.autograd.grad(loss, [*leaves.values()], allow_unused=True)
    assert loss.shape == () and all(x is None for x in others), others
    assert not any(which.requires_grad for which in touched.values())
    return loss.detach(), gradient, touched


# ---- the oracle ----


def clip(value, low, high):
    return min(max(value, 1 - low), 1 + high)


def oracle_token(name, moving, frozen, proximal, behaviour, advantage, s, age=0):
    """(gain, clipped, capped) of one token, written from the papers' formulas."""
    if name == "a3po":  # AReaL's form: alpha = (v_p - v_mu) / (v - v_mu), with v_p one before v
        alpha = (age - 1) / age if age else 0.0
        name, proximal = "decoupled_ppo", alpha * frozen + (1 - alpha) * behaviour
    w, r = math.exp(proximal - behaviour), math.exp(moving - proximal)
    rho, rho_frozen = math.exp(moving - behaviour), math.exp(frozen - behaviour)
    cut = min(r * advantage, clip(r, s.eps_low, s.eps_high) * advantage)
    cut_active = cut < r * advantage
    if name in ("reinforce", "dpo"):
        return advantage * moving, False, False
    if name == "ppo":
        gain = min(rho * advantage, clip(rho, s.eps_low, s.eps_high) * advantage)
        return gain, gain < rho * advantage, False
    if name == "decoupled_ppo":
        return w * cut, cut_active, False
    if name == "tis":
        return min(w, s.tis_cap) * cut, cut_active, w > s.tis_cap
    if name == "icepop":
        inside = 1 / s.icepop_beta <= w <= s.icepop_beta
        return (w * cut if inside else 0.0), cut_active or not inside, False
    if name == "double_sided":
        inside = 1 - s.double_low < rho_frozen < 1 + s.double_high
        return (rho_frozen * advantage * moving if inside else 0.0), not inside, False
    if name == "cispo":
        weight = clip(rho_frozen, s.cispo_low, s.cispo_high)
        return weight * advantage * moving, False, weight != rho_frozen
    raise AssertionError(name)


def oracle(name, batch, moving, frozen, s=CONSTANTS):
    """(loss, clipped, capped) by loops over sequences and tokens; lists of floats in."""
    sequence = batch.sequence.tolist()
    proximal, behaviour = batch.proximal.tolist(), batch.behaviour.tolist()
    advantages, ages = batch.advantages.tolist(), batch.age.tolist()
    total, clipped, capped = 0.0, 0, 0
    for index in sorted(set(sequence)):
        tokens = [t for t in range(len(sequence)) if sequence[t] == index]
        if name == "gspo":  # the sequence form of the paper, not the token form of losses.py
            ratio = math.exp(sum(moving[t] - behaviour[t] for t in tokens) / len(tokens))
            advantage = advantages[tokens[0]]
            gain = min(ratio * advantage, clip(ratio, s.gspo_low, s.gspo_high) * advantage)
            total += len(tokens) * gain
            clipped += len(tokens) * (gain < ratio * advantage)
            continue
        for t in tokens:
            gain, is_clipped, is_capped = oracle_token(
                name, moving[t], frozen[t], proximal[t], behaviour[t], advantages[t], s, ages[t]
            )
            total, clipped, capped = total + gain, clipped + is_clipped, capped + is_capped
    return -total / batch.count, clipped, capped


def oracle_gradient(name, batch, step=1e-6):
    """Central differences of the oracle; the detached factors stay where they were."""
    frozen, gradient = batch.logprobs.tolist(), []
    for t in range(len(frozen)):
        up, down = list(frozen), list(frozen)
        up[t], down[t] = up[t] + step, down[t] - step
        above, below = oracle(name, batch, up, frozen)[0], oracle(name, batch, down, frozen)[0]
        gradient.append((above - below) / (2 * step))
    return torch.tensor(gradient, dtype=torch.float64)


# ---- objectives ----


@pytest.mark.parametrize("name", OBJECTIVES)
@pytest.mark.parametrize("seed", [0, 1])
def test_objective_and_gradient_against_loops_and_finite_differences(name, seed):
    batch = make_batch(seed)
    loss, gradient, touched = run(name, batch)
    values = batch.logprobs.tolist()
    expected, clipped, capped = oracle(name, batch, values, values)
    assert loss.item() == pytest.approx(expected, rel=1e-12)
    torch.testing.assert_close(gradient, oracle_gradient(name, batch), rtol=1e-6, atol=1e-8)
    assert (int(touched["clipped"].sum()), int(touched["capped"].sum())) == (clipped, capped)
    if name not in ("reinforce", "dpo", "cispo"):
        assert 0 < clipped < batch.count, "the batch does not reach both branches"
    if name in ("tis", "cispo"):
        assert 0 < capped < batch.count, "the batch does not reach both branches"


@pytest.mark.parametrize("name", OBJECTIVES)
def test_on_policy_every_objective_has_the_reinforce_gradient(name):
    batch = on_policy_batch()
    if name == "gspo":  # of a sequence, and yet the advantages of its tokens stay apart
        batch.advantages = torch.linspace(-1, 1, batch.count, dtype=torch.float64)
    _, gradient, touched = run(name, batch, Constants())
    torch.testing.assert_close(gradient, -batch.advantages / batch.count, rtol=1e-12, atol=0)
    assert int(touched["clipped"].sum()) == int(touched["capped"].sum()) == 0


@pytest.mark.parametrize("name", OBJECTIVES)
def test_packing_changes_nothing(name):
    """Losses, gradients and counts of micro-batches add up to those of the step."""
    whole_loss, whole_gradient, whole_touched = run(name, make_batch())
    packings = [[4, 1], [0, 5, 2, 3]]  # unequal parts, another order
    parts = [run(name, make_batch(sequences=chosen)) for chosen in packings]
    torch.testing.assert_close(sum(part[0] for part in parts), whole_loss, rtol=1e-12, atol=0)
    gradients = {}
    for chosen, (_, gradient, _) in zip(packings, parts, strict=True):
        spans = gradient.split([LENGTHS[i] for i in chosen])
        gradients |= dict(zip(chosen, spans, strict=True))
    joined = torch.cat([gradients[i] for i in ALL])
    torch.testing.assert_close(joined, whole_gradient, rtol=1e-12, atol=1e-15)
    for key, value in whole_touched.items():
        assert sum(int(part[2][key].sum()) for part in parts) == int(value.sum())


@pytest.mark.parametrize("name", OBJECTIVES)
def test_extreme_ratios_stay_finite_in_float32(name):
    for gap in (-500.0, 500.0):
        batch = make_batch(dtype=torch.float32)
        batch.logprobs = batch.behaviour + gap
        loss, gradient, _ = run(name, batch)
        assert torch.isfinite(loss) and torch.isfinite(gradient).all()


BEYOND = 1 + 1e-9  # the smallest step over a bound that is looked at


@pytest.mark.parametrize(
    "name, pi, proximal, advantage, slope, touched",  # pi and pi_p as ratios to mu
    [
        # a step is silenced where it has gone too far in the direction of A; 0.2 and 0.28
        ("ppo", 1.279, 1, 1, -1.279, ""),
        ("ppo", 1.281, 1, 1, 0, "clipped"),
        ("ppo", 1.281, 1, -1, 1.281, ""),
        ("ppo", 0.801, 1, -1, 0.801, ""),
        ("ppo", 0.799, 1, -1, 0, "clipped"),
        ("ppo", 0.799, 1, 1, -0.799, ""),
        # pi = pi_p is far from mu: nothing has moved in this step, yet the naive one is silent
        ("ppo", 1.6, 1.6, 1, 0, "clipped"),
        ("decoupled_ppo", 1.6, 1.6, 1, -1.6, ""),
        # the weight is unbounded, truncated, or dropped; the bounds of the last are inclusive
        ("decoupled_ppo", 5, 5, 1, -5, ""),
        ("tis", 5, 5, 1, -2, "capped"),
        ("tis", 1.5, 1.5, 1, -1.5, ""),
        ("tis", 0.1, 0.1, 1, -0.1, ""),
        ("icepop", 2, 2, 1, -2, ""),
        ("icepop", 2 * BEYOND, 2 * BEYOND, 1, 0, "clipped"),
        ("icepop", 0.5, 0.5, 1, -0.5, ""),
        ("icepop", 0.5 / BEYOND, 0.5 / BEYOND, 1, 0, "clipped"),
        # outside of both sides nothing teaches, whatever the sign of A; 0.3 and 5
        ("double_sided", 0.701, 1, -1, 0.701, ""),
        ("double_sided", 0.699, 1, 1, 0, "clipped"),
        ("double_sided", 5.99, 1, 1, -5.99, ""),
        ("double_sided", 6.01, 1, -1, 0, "clipped"),
        # the weight is cut at 4, never the token; there is no lower bound
        ("cispo", 10, 1, -1, 4, "capped"),
        ("cispo", 0.01, 1, -1, 0.01, ""),
    ],
)
def test_single_tokens_with_the_published_constants(name, pi, proximal, advantage, slope, touched):
    numbers = [[math.log(pi)], [math.log(proximal)], [0.0], [advantage]]
    values = [torch.tensor(x, dtype=torch.float64) for x in numbers]
    zero = torch.tensor([0])
    batch = SimpleNamespace(**Tokens(*values, zero, zero + 1)._asdict(), count=1)
    _, gradient, marks = run(name, batch, Constants())
    assert gradient.item() == pytest.approx(slope)
    assert "".join(key for key, which in marks.items() if which.any()) == touched


def test_gspo_uses_one_ratio_per_sequence():
    """Ratios e^+1 and e^-1 cancel in the sequence: nothing is clipped, and both tokens weigh 1."""
    logprobs = torch.tensor([1.0, -1.0, 0.5], dtype=torch.float64)
    zeros, ones = torch.zeros_like(logprobs), torch.ones_like(logprobs)
    tokens = Tokens(logprobs, None, zeros, ones, torch.tensor([0, 0, 1]))
    _, gradient, touched = run("gspo", SimpleNamespace(**tokens._asdict(), count=3))
    assert gradient.tolist() == pytest.approx([-1 / 3, -1 / 3, 0.0])
    assert touched["clipped"].tolist() == [False, False, True]


# ---- KL estimators: exact expectations over a distribution of five outcomes ----


def categorical(seed):
    random = torch.Generator().manual_seed(seed)
    return torch.randn(5, generator=random, dtype=torch.float64)


def exact_kl(p_logits, q_logits):
    p, q = p_logits.log_softmax(0), q_logits.log_softmax(0)
    return (p.exp() * (p - q)).sum()


def expected(estimator, sampler):
    """E_sampler[estimator] and its gradient in the policy's logits, the samples held fixed."""
    policy = categorical(1).requires_grad_()
    value = (sampler.softmax(0) * estimator(policy.log_softmax(0))).sum()
    return value.item(), torch.autograd.grad(value, policy)[0]


def test_kl_estimators_are_unbiased_where_they_should_be():
    """k3 has the right value on-policy, and the gradient of the reverse KL; from samples of another
    policy only the corrected one is right, in its value and in its gradient."""
    policy, reference, behaviour = categorical(1).requires_grad_(), categorical(2), categorical(3)
    ref, mu = reference.log_softmax(0), behaviour.log_softmax(0)
    truth, backwards = exact_kl(policy, reference), exact_kl(reference, policy)
    (slope,) = torch.autograd.grad(truth, policy)
    (backward_slope,) = torch.autograd.grad(backwards, policy)
    truth = truth.item()

    value, gradient = expected(lambda pi: k3(pi, ref), categorical(1))
    assert value == pytest.approx(truth, rel=1e-12)
    torch.testing.assert_close(gradient, backward_slope, rtol=1e-10, atol=1e-12)
    value, _ = expected(lambda pi: k3(pi, ref), behaviour)
    assert value != pytest.approx(truth, rel=0.01)
    value, gradient = expected(lambda pi: unbiased_k3(pi, ref, mu), behaviour)
    assert value == pytest.approx(truth, rel=1e-12)
    torch.testing.assert_close(gradient, slope, rtol=1e-10, atol=1e-12)


def test_k3_is_never_negative_and_keeps_its_digits():
    gaps = torch.cat([-torch.logspace(-9, 1.2, 200), torch.zeros(1), torch.logspace(-9, 1.2, 200)])
    value = k3(torch.zeros_like(gaps), gaps)
    assert value.dtype == torch.float32 and (value >= 0).all()
    for gap, got in zip(gaps.tolist(), value.tolist(), strict=True):
        # Far from 0 the plain formula in double; near 0 its series, where double loses it as well.
        exact = math.exp(gap) - 1 - gap if abs(gap) > 1e-3 else gap**2 / 2 + gap**3 / 6
        assert got == pytest.approx(exact, rel=1e-4, abs=1e-37), gap
    # and it survives hopeless ratios
    logprobs = torch.tensor([-300.0, -1.0], requires_grad=True)
    value = k3(logprobs, torch.tensor([-1.0, -300.0]))
    value.sum().backward()
    assert torch.isfinite(value).all() and torch.isfinite(logprobs.grad).all()
    assert value[1].item() == pytest.approx(299.0 - 1.0)  # pi >> pi_ref is a real and large penalty


# ---- diagnostics ----


def micro_diagnostics(batch):
    entropy = batch.behaviour.abs().requires_grad_()
    tokens = tokens_of(batch, logprobs=batch.logprobs.clone().requires_grad_())
    _, _, touched = run("tis", batch)
    return losses.diagnostics(tokens, entropy, touched, batch.proximal - 0.1)


def test_merged_diagnostics_against_loops_over_the_whole_step():
    batch = make_batch(seed=5)
    parts = [micro_diagnostics(make_batch(5, sequences=s)) for s in ([0, 3, 5], [2, 4], [1])]
    assert not any(value.requires_grad for part in parts for value in part.values())
    logprobs, behaviour = batch.logprobs.tolist(), batch.behaviour.tolist()
    reference = (batch.proximal - 0.1).tolist()
    logs = [new - old for new, old in zip(logprobs, behaviour, strict=True)]
    ratios = [math.exp(x) for x in logs]
    ends = [0, *itertools.accumulate(LENGTHS)]
    whole = [math.exp(sum(logs[a:b])) for a, b in itertools.pairwise(ends)]
    gaps = [ref - new for ref, new in zip(reference, logprobs, strict=True)]
    _, clipped, capped = oracle("tis", batch, logprobs, logprobs)
    n = batch.count
    expected = {
        "ratio_max": max(ratios),
        "ess_whole": sum(whole) ** 2 / sum(x * x for x in whole) / len(whole),
        "kl_behaviour": sum(x - 1 - math.log(x) for x in ratios) / n,
        # weighted with pi / mu: the samples are those of mu
        "kl_reference": sum(r * (math.exp(x) - 1 - x) for r, x in zip(ratios, gaps, strict=True))
        / n,
        "entropy": statistics.mean(map(abs, behaviour)),
        "clipped": clipped / n,
        "capped": capped / n,
    }
    merged = losses.merge_diagnostics(parts)
    assert merged == pytest.approx(expected, rel=1e-9)
    assert json.loads(json.dumps(merged)) == merged
