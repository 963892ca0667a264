"""The losses against oracles that share nothing with them: Python loops over floats.

The oracle of an objective takes the log-probs twice: `moving`, which gradients see, and `frozen`,
which stands in the detached factors; finite differences move only the first.
"""

import itertools
import json
import math
import statistics
from types import SimpleNamespace

import pytest
import torch

import losses
from losses import (
    OBJECTIVES,
    Constants,
    Tokens,
    group_advantages,
    k3,
    policy_loss,
    unbiased_k3,
)
from methods import baseline, preferences
from methods.critic import skip_observation_gae
from methods.turns import turn_advantages

NAN = float("nan")
# Tighter caps, and wider clips for GSPO, so that random batches fall on both sides of each.
CONSTANTS = Constants(gspo_low=0.05, gspo_high=0.06, cispo_high=0.3, tis_cap=1.3)
LENGTHS = (5, 1, 4, 7, 3, 6)  # generated tokens of each sequence
ALL = range(6)


def make_batch(seed=0, noise=0.35, sequences=ALL, dtype=torch.float64):
    """Packed sequences as the learner sees them; all randomness depends on the sequence alone."""
    columns = {key: [] for key in ("logprobs", "proximal", "behaviour", "advantages")}
    sequence, age = [], []
    for index, original in enumerate(sequences):
        random = torch.Generator().manual_seed(1000 * seed + original)
        length = LENGTHS[original]
        drift = 0.3 * torch.randn(1, generator=random, dtype=torch.float64)  # of a whole sequence
        draw = torch.randn(3, length, generator=random, dtype=torch.float64)
        base = -1.5 + 0.5 * draw[0]
        proximal = base + noise * draw[1]
        values = {
            "behaviour": base,
            "proximal": proximal,
            "logprobs": proximal + noise * draw[2] + drift,
            "advantages": torch.full((length,), (-1.0) ** original * (0.5 + 0.25 * original)),
        }
        for key, value in values.items():
            columns[key] += value.tolist()
        sequence += [index] * length
        age += [(original + place) % 5 for place in range(length)]  # it changes in a sequence
    tensors = {key: torch.tensor(value, dtype=dtype) for key, value in columns.items()}
    whole = {"sequence": torch.tensor(sequence), "age": torch.tensor(age)}
    return SimpleNamespace(**tensors, **whole, count=sum(LENGTHS))


def tokens_of(batch, **changes):
    """The batch as an objective takes it."""
    values = {name: getattr(batch, name, None) for name in Tokens._fields}
    return Tokens(**values | changes)


def run(name, batch, constants=CONSTANTS):
    """Loss, gradient with respect to the log-probs, which tokens were touched."""
    logprobs = batch.logprobs.clone().requires_grad_()
    tokens = tokens_of(batch, logprobs=logprobs)
    loss, touched = policy_loss(name, tokens, batch.count, constants)
    (gradient,) = torch.autograd.grad(loss, logprobs)
    return loss.detach(), gradient, touched


def single(name, logprob, proximal, behaviour, advantage, constants=Constants()):  # noqa: B008
    """(loss, gradient, clipped, capped) of one token alone, with the project's constants."""
    batch = SimpleNamespace(
        logprobs=torch.tensor([logprob], dtype=torch.float64),
        proximal=torch.tensor([proximal], dtype=torch.float64),
        behaviour=torch.tensor([behaviour], dtype=torch.float64),
        advantages=torch.tensor([advantage], dtype=torch.float64),
        sequence=torch.tensor([0]),
        age=torch.tensor([1]),
        count=1,
    )
    loss, gradient, touched = run(name, batch, constants)
    return loss.item(), gradient.item(), int(touched["clipped"].sum()), int(touched["capped"].sum())


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
    assert gradient.shape == batch.logprobs.shape
    torch.testing.assert_close(gradient, oracle_gradient(name, batch), rtol=1e-6, atol=1e-8)
    assert (int(touched["clipped"].sum()), int(touched["capped"].sum())) == (clipped, capped)
    if name in ("ppo", "decoupled_ppo", "a3po", "tis", "icepop", "double_sided", "gspo"):
        assert 0 < clipped < batch.count, "the batch does not reach both branches"
    if name in ("tis", "cispo"):
        assert 0 < capped < batch.count, "the batch does not reach both branches"


@pytest.mark.parametrize("name", OBJECTIVES)
def test_on_policy_every_objective_has_the_reinforce_gradient(name):
    batch = make_batch()
    batch.proximal = batch.behaviour = batch.logprobs.clone()
    _, gradient, touched = run(name, batch, Constants())
    torch.testing.assert_close(gradient, -batch.advantages / batch.count, rtol=1e-12, atol=0)
    assert int(touched["clipped"].sum()) == int(touched["capped"].sum()) == 0


def test_gspo_keeps_per_token_advantages_apart():
    batch = make_batch()
    batch.proximal = batch.behaviour = batch.logprobs.clone()
    batch.advantages = torch.linspace(-1, 1, batch.count, dtype=torch.float64)
    _, gradient, _ = run("gspo", batch)
    torch.testing.assert_close(gradient, -batch.advantages / batch.count, rtol=1e-12, atol=0)


@pytest.mark.parametrize("name", OBJECTIVES)
def test_packing_changes_nothing(name):
    whole_loss, whole_gradient, whole_sums = run(name, make_batch())
    packings = [[4, 1], [0, 5, 2, 3]]  # unequal parts, another order
    parts = [run(name, make_batch(sequences=chosen)) for chosen in packings]
    torch.testing.assert_close(sum(part[0] for part in parts), whole_loss, rtol=1e-12, atol=0)
    gradients = {}
    for chosen, (_, gradient, _) in zip(packings, parts, strict=True):
        spans = gradient.split([LENGTHS[i] for i in chosen])
        gradients |= dict(zip(chosen, spans, strict=True))
    joined = torch.cat([gradients[i] for i in ALL])
    torch.testing.assert_close(joined, whole_gradient, rtol=1e-12, atol=1e-15)
    for key, value in whole_sums.items():
        assert sum(int(part[2][key].sum()) for part in parts) == int(value.sum())


@pytest.mark.parametrize("name", OBJECTIVES)
def test_the_denominator_is_what_the_caller_says(name):
    batch = make_batch()
    loss, _, _ = run(name, batch)
    batch.count *= 2  # not what this micro-batch holds
    torch.testing.assert_close(run(name, batch)[0], loss / 2, rtol=1e-12, atol=0)


@pytest.mark.parametrize("name", OBJECTIVES)
def test_gradient_flows_through_logprobs_only(name):
    batch = make_batch()
    batch.proximal.requires_grad_()
    batch.behaviour.requires_grad_()
    logprobs = batch.logprobs.clone().requires_grad_()
    tokens = tokens_of(batch, logprobs=logprobs)
    loss, touched = policy_loss(name, tokens, batch.count, CONSTANTS)
    loss.backward()
    assert loss.shape == () and logprobs.grad is not None
    assert batch.proximal.grad is None and batch.behaviour.grad is None
    assert not any(value.requires_grad for value in touched.values())


@pytest.mark.parametrize("name", ["ppo", "double_sided", "cispo", "gspo", "reinforce"])
def test_these_objectives_need_no_proximal_policy(name):
    batch = make_batch()
    batch.proximal = None
    assert torch.isfinite(run(name, batch)[0])


def test_every_objective_is_offered_under_its_name():
    assert set(OBJECTIVES) == {
        *("ppo", "decoupled_ppo", "a3po", "tis", "icepop", "double_sided", "cispo", "gspo"),
        *("dpo", "reinforce"),
    }
    assert all(OBJECTIVES[name] is getattr(losses, name) for name in OBJECTIVES)


def test_a3po_lies_between_the_trust_regions():
    """One version old, pi_p is mu, as in PPO; very old, it is pi, as in decoupled PPO with one
    update a step."""
    batch = make_batch()
    batch.age = torch.ones_like(batch.age)
    torch.testing.assert_close(run("a3po", batch)[1], run("ppo", batch)[1])
    batch.age, batch.proximal = torch.full_like(batch.age, 10**9), batch.logprobs.clone()
    torch.testing.assert_close(run("a3po", batch)[1], run("decoupled_ppo", batch)[1])


def test_preference_advantages_make_the_gradient_of_dpo():
    """Against autograd through -log sigmoid(beta m), on answers of different lengths."""
    beta, P = 0.3, 2
    batch = make_batch(sequences=[0, 1, 2, 3])  # best, worst, best, worst
    logprobs, reference = batch.logprobs.clone().requires_grad_(), batch.behaviour
    lengths = [LENGTHS[i] for i in range(4)]
    sums = torch.stack([x.sum() for x in (logprobs - reference).split(lengths)])
    margins = sums[0::2] - sums[1::2]
    loss = -torch.nn.functional.logsigmoid(beta * margins).mean()
    (expected,) = torch.autograd.grad(loss, logprobs)
    push = preferences.preference_advantages(margins.detach(), beta)  # [2, P]
    by_answer = push.T.flatten() * batch.count / P
    batch.advantages = by_answer[batch.sequence].double()
    torch.testing.assert_close(run("dpo", batch)[1], expected, rtol=1e-12, atol=0)


def test_optimal_baseline_has_the_least_variance():
    """Against a search: no other baseline gives a smaller sum of squares of w |g| (R - b)."""
    draw = torch.Generator().manual_seed(0)
    rewards, ratios, norms = torch.rand(3, 4, 6, generator=draw, dtype=torch.float64)
    best = baseline.optimal_baseline(rewards, ratios, norms)  # [4, 1]

    def spread(baseline):
        return (ratios * norms * (rewards - baseline)).square().sum(1)

    for step in (-0.1, -1e-3, 1e-3, 0.1):
        assert (spread(best) < spread(best + step)).all()
    same = torch.ones_like(rewards)
    torch.testing.assert_close(
        baseline.optimal_baseline(rewards, same, same), rewards.mean(1, True)
    )
    nothing = baseline.optimal_baseline(rewards, ratios * 0, norms)
    torch.testing.assert_close(nothing, rewards.mean(1, True))


@pytest.mark.parametrize("name", OBJECTIVES)
def test_extreme_ratios_stay_finite_in_float32(name):
    for gap in (-500.0, 500.0):
        batch = make_batch(dtype=torch.float32)
        batch.logprobs = batch.behaviour + gap
        loss, gradient, _ = run(name, batch)
        assert torch.isfinite(loss) and torch.isfinite(gradient).all()


@pytest.mark.parametrize("ratio", [0.5, 6.5])
@pytest.mark.parametrize("advantage", [-1.0, 1.0])
def test_ppo_silences_two_of_four_cases_and_double_sided_all(ratio, advantage):
    logprob = math.log(ratio)
    # Only a step that already went too far in the direction of A is silenced.
    silent = (ratio - 1) * advantage > 0
    for name in ("ppo", "decoupled_ppo"):
        _, gradient, clipped, _ = single(name, logprob, 0.0, 0.0, advantage)
        assert gradient == pytest.approx(0.0 if silent else -ratio * advantage)
        assert clipped == int(silent)
    _, gradient, clipped, _ = single("double_sided", logprob, 0.0, 0.0, advantage)
    assert (gradient, clipped) == (0.0, 1)


def test_constants_are_those_of_the_papers():
    s = Constants()
    assert (s.eps_low, s.eps_high, s.icepop_beta, s.tis_cap) == (0.2, 0.28, 2.0, 2.0)
    # On both sides of each of PPO's bounds: 1 + 0.28 for good news, 1 - 0.2 for bad news.
    assert [single("ppo", math.log(x), 0.0, 0.0, 1.0)[2] for x in (1.279, 1.281)] == [0, 1]
    assert [single("ppo", math.log(x), 0.0, 0.0, -1.0)[2] for x in (0.801, 0.799)] == [0, 1]


def test_ppo_clips_around_the_behaviour_and_decoupled_around_the_proximal():
    # pi = pi_p is far from mu: nothing moved in this step, yet the naive objective is silent.
    assert single("ppo", 0.5, 0.5, 0.0, 1.0)[1] == 0.0
    assert single("decoupled_ppo", 0.5, 0.5, 0.0, 1.0)[1] == pytest.approx(-math.exp(0.5))


def test_weights_unbounded_truncated_or_dropped():
    for weight, truncated, popped in [(5.0, 2.0, 0.0), (1.5, 1.5, 1.5), (0.1, 0.1, 0.0)]:
        case = (math.log(weight), math.log(weight), 0.0, 1.0)
        assert single("decoupled_ppo", *case)[1] == pytest.approx(-weight)
        assert single("tis", *case)[1] == pytest.approx(-truncated)
        assert single("tis", *case)[2:] == (0, int(weight > 2))
        assert single("icepop", *case)[1] == pytest.approx(-popped)
        assert single("icepop", *case)[2:] == (int(popped == 0), 0)


def test_icepop_bounds_are_inclusive():
    log2 = math.log(2.0)
    assert torch.tensor(log2, dtype=torch.float64).exp() == 2.0, "the test stands on the bound"
    for name_of_bound, w in [("upper", log2), ("lower", -log2)]:
        assert single("icepop", w, w, 0.0, 1.0)[1] == pytest.approx(-math.exp(w)), name_of_bound
        beyond = w * (1 + 1e-9)
        assert single("icepop", beyond, beyond, 0.0, 1.0)[1] == 0.0, name_of_bound


def test_double_sided_bounds_are_strict():
    # 1 - 0 and 1 + 0 are exact, so rho = 1 stands on the bound.
    for constants in (Constants(double_low=0.0), Constants(double_high=0.0)):
        assert single("double_sided", -1.0, 0.0, -1.0, 1.0, constants)[1:3] == (0.0, 1)
    assert single("double_sided", -1.0, 0.0, -1.0 - 1e-9, 1.0, Constants(double_low=0.0))[1] != 0
    assert single("double_sided", -1.0, 0.0, -1.0 + 1e-9, 1.0, Constants(double_high=0.0))[1] != 0


def test_cispo_cuts_the_weight_and_never_the_token():
    cases = [(10.0, 4.0, 1), (1.1, 1.1, 0), (0.01, 0.01, 0)]  # no lower bound by default
    for ratio, weight, capped in cases:
        result = single("cispo", math.log(ratio), 0.0, 0.0, -1.0)
        assert result[1] == pytest.approx(weight)
        assert result[2:] == (0, capped)


def test_gspo_uses_one_ratio_per_sequence():
    # Ratios e^+1 and e^-1 cancel in the sequence: nothing is clipped, and both tokens weigh 1.
    batch = SimpleNamespace(
        logprobs=torch.tensor([1.0, -1.0, 0.5], dtype=torch.float64),
        proximal=None,
        behaviour=torch.zeros(3, dtype=torch.float64),
        advantages=torch.ones(3, dtype=torch.float64),
        sequence=torch.tensor([0, 0, 1]),
        count=3,
    )
    _, gradient, touched = run("gspo", batch)
    third = 1 / 3
    assert gradient.tolist() == pytest.approx([-third, -third, 0.0])
    assert int(touched["clipped"].sum()) == 1


def test_count_and_shapes_are_checked():
    assert losses.token_mean(torch.ones(3), 6) == 0.5
    with pytest.raises(AssertionError, match="got 0"):
        losses.token_mean(torch.ones(3), 0)
    for name, column in itertools.product(OBJECTIVES, Tokens._fields):
        batch = make_batch()
        setattr(batch, column, getattr(batch, column)[-1:])  # would broadcast
        with pytest.raises(AssertionError, match="shape"):
            run(name, batch)


def test_sums_count_every_token():
    # Every ratio is 1; here 1 itself is clipped or capped.
    batch = make_batch()
    batch.proximal = batch.behaviour = batch.logprobs.clone()
    for name, key, constants in [
        ("double_sided", "clipped", Constants(double_low=0.0)),
        ("tis", "capped", Constants(tis_cap=0.5)),
    ]:
        assert int(run(name, batch, constants)[2][key].sum()) == batch.count


# ---- advantages ----

REWARDS = [
    [1.0, 0.0, 0.25, 0.5],
    [0.1, 0.1, 0.1, 0.1],  # dead: all equal, though the mean of four 0.1 may be rounded
    [0.7, NAN, 0.2, -3.0],  # one environment error
    [5.0, NAN, NAN, NAN],  # dead: a single valid sample
    [NAN, NAN, NAN, NAN],  # dead: none
    [0.3, 0.3, 9.0, 0.3],  # dead: the only different reward is not valid
    [-0.3, -0.3, 9.0, -0.3],  # the same below 0
]
VALID = [
    [True] * 4,
    [True] * 4,
    [True, False, True, True],
    [True, False, False, False],
    [False] * 4,
    [True, True, False, True],
    [True, True, False, True],
]


def oracle_advantages(kind):
    result, dead = [], []
    for rewards, valid in zip(REWARDS, VALID, strict=True):
        chosen = [r for r, v in zip(rewards, valid, strict=True) if v]
        dead.append(len(chosen) < 2 or len(set(chosen)) == 1)
        row = []
        for i, (reward, is_valid) in enumerate(zip(rewards, valid, strict=True)):
            if dead[-1] or not is_valid:
                row.append(0.0)
            elif kind == "rloo":
                others = [r for j, r in enumerate(rewards) if valid[j] and j != i]
                row.append(reward - statistics.mean(others))
            else:
                scale = statistics.stdev(chosen) + losses.STD_EPSILON if kind == "grpo" else 1.0
                row.append((reward - statistics.mean(chosen)) / scale)
        result.append(row)
    return result, dead


@pytest.mark.parametrize("kind", losses.ADVANTAGES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_advantages_against_loops(kind, dtype):
    rewards = torch.tensor(REWARDS, dtype=dtype)
    advantages, dead = group_advantages(rewards, kind, torch.tensor(VALID))
    expected, expected_dead = oracle_advantages(kind)
    assert dead.tolist() == expected_dead == [False, True, False, True, True, True, True]
    assert advantages.dtype == dtype
    tolerance = 1e-12 if dtype == torch.float64 else 1e-5
    torch.testing.assert_close(
        advantages, torch.tensor(expected, dtype=dtype), rtol=tolerance, atol=tolerance
    )
    assert (advantages[dead] == 0).all(), "a dead group must teach exactly nothing"
    assert (advantages[~torch.tensor(VALID)] == 0).all()


@pytest.mark.parametrize("kind", losses.ADVANTAGES)
def test_equal_rewards_are_dead_whatever_rounding_does(kind):
    for size in (2, 3, 7, 10):
        for value in (0.1, 0.7, 1 / 3, 1e6 + 0.1):
            rewards = torch.full((1, size), value, dtype=torch.float32)
            advantages, dead = group_advantages(rewards, kind)
            assert dead.tolist() == [True] and (advantages == 0).all()


def test_advantages_default_to_all_valid_and_leave_rewards_alone():
    rewards = torch.tensor([[1.0, 0.0, 0.5]])
    before = rewards.clone()
    with_default = group_advantages(rewards, "mean")[0]
    assert with_default.tolist() == [[0.5, -0.5, 0.0]]
    assert torch.equal(rewards, before)


def test_advantages_refuse_unknown_kinds_and_nan():
    with pytest.raises(AssertionError, match="'gae'.*grpo, mean, rloo"):
        group_advantages(torch.zeros(1, 2), "gae")
    with pytest.raises(AssertionError, match="finite"):
        group_advantages(torch.tensor([[NAN, 1.0]]), "grpo")


# ---- credit for turns ----


def random_turns(seed, groups=6, size=4, turns=3, dtype=torch.float64):
    """Rewards of a few values, so that many are equal; a sample has its first turns, or none."""
    random = torch.Generator().manual_seed(seed)
    rewards = torch.randint(-2, 3, (groups, size, turns), generator=random).to(dtype) / 4
    reached = torch.randint(0, turns + 1, (groups, size, 1), generator=random)
    present = torch.arange(turns) < reached
    return rewards.masked_fill(~present, NAN), present


def oracle_turns(rewards, present, kind):
    """Turn by turn, by loops: who has it, what comes from there on, and how the others did."""
    result, dead = torch.zeros_like(rewards), []
    groups, size, turns = rewards.shape
    for g in range(groups):
        teaches = False
        for t in range(turns):
            own = [i for i in range(size) if present[g, i, t]]
            later = [[u for u in range(t, turns) if present[g, i, u]] for i in own]
            returns = [
                sum(float(rewards[g, i, u]) for u in every)
                for i, every in zip(own, later, strict=True)
            ]
            if len(set(returns)) < 2:
                continue
            teaches = True
            for k, i in enumerate(own):
                others = returns[:k] + returns[k + 1 :]
                base = statistics.mean(others if kind == "rloo" else returns)
                scale = statistics.stdev(returns) + losses.STD_EPSILON if kind == "grpo" else 1.0
                result[g, i, t] = (returns[k] - base) / scale
        dead.append(not teaches)
    return result, dead


@pytest.mark.parametrize("kind", losses.ADVANTAGES)
@pytest.mark.parametrize("shape", [(6, 4, 3), (5, 2, 4), (3, 1, 3), (4, 5, 1)])
def test_turn_advantages_against_loops(kind, shape):
    seen = set()
    for seed in range(5):
        rewards, present = random_turns(seed, *shape)
        advantages, dead = turn_advantages(rewards, present, kind)
        expected, expected_dead = oracle_turns(rewards, present, kind)
        torch.testing.assert_close(advantages, expected, rtol=1e-12, atol=1e-12)
        assert dead.tolist() == expected_dead and dead.shape == shape[:1]
        assert (advantages[~present] == 0).all() and (advantages[dead] == 0).all()
        seen |= set(expected_dead)
    assert seen == ({True} if shape[1] == 1 else {True, False})  # one sample teaches nothing


@pytest.mark.parametrize("kind", losses.ADVANTAGES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_with_one_turn_they_are_the_advantages_of_the_group(kind, dtype):
    rewards, valid = torch.tensor(REWARDS, dtype=dtype), torch.tensor(VALID)
    expected, expected_dead = group_advantages(rewards, kind, valid)
    advantages, dead = turn_advantages(rewards[:, :, None], valid[:, :, None], kind)
    assert torch.equal(advantages[:, :, 0], expected) and torch.equal(dead, expected_dead)
    assert advantages.dtype == dtype


@pytest.mark.parametrize("kind", losses.ADVANTAGES)
def test_reward_at_the_end_alone_is_the_credit_of_the_episode(kind):
    last = torch.randn(5, 4, generator=torch.Generator().manual_seed(0))
    rewards = torch.stack([torch.zeros_like(last), torch.zeros_like(last), last], 2)
    advantages, dead = turn_advantages(rewards, torch.ones_like(rewards).bool(), kind)
    expected, expected_dead = group_advantages(last, kind)
    assert torch.equal(advantages, expected[:, :, None].expand(-1, -1, 3))
    assert torch.equal(dead, expected_dead)


def test_a_turn_that_one_sample_reached_teaches_nothing_and_the_others_do():
    rewards = torch.tensor([[[1.0, 5.0], [0.0, NAN], [0.5, NAN]]])
    present = torch.tensor([[[True, True], [True, False], [True, False]]])
    advantages, dead = turn_advantages(rewards, present, "mean")
    assert advantages[0, :, 1].tolist() == [0.0, 0.0, 0.0] and dead.tolist() == [False]
    first = group_advantages(torch.tensor([[6.0, 0.0, 0.5]]), "mean")[0]
    assert torch.equal(advantages[:, :, 0], first)  # the lonely turn counts in what led to it


def test_what_was_earned_before_is_no_news():
    rewards = torch.tensor([[[9.0, 1.0], [0.0, 1.0]]])
    advantages, _ = turn_advantages(rewards, torch.ones_like(rewards).bool(), "rloo")
    assert advantages.tolist() == [[[9.0, 0.0], [-9.0, 0.0]]]


@pytest.mark.parametrize("kind", losses.ADVANTAGES)
def test_equal_returns_are_equal_however_they_were_earned(kind):
    rewards = torch.tensor([[[0.1, 0.2], [0.3, 0.0], [0.0, 0.3], [0.2, 0.1]]])  # float32
    advantages, dead = turn_advantages(rewards, torch.ones_like(rewards).bool(), kind)
    assert (advantages[:, :, 0] == 0).all() and dead.tolist() == [False]
    rewards = torch.full((1, 4, 3), 0.1)
    advantages, dead = turn_advantages(rewards, torch.ones_like(rewards).bool(), kind)
    assert dead.tolist() == [True] and (advantages == 0).all()


def test_turn_advantages_refuse_unknown_kinds_and_rewards_that_are_no_numbers():
    rewards = torch.tensor([[[0.0, 1.0], [NAN, 1.0]]])
    present = torch.ones_like(rewards).bool()
    with pytest.raises(AssertionError, match="'gae'"):
        turn_advantages(rewards.nan_to_num(), present, "gae")
    with pytest.raises(AssertionError, match="finite"):
        turn_advantages(rewards, present, "mean")
    present[0, 1, 0] = False  # the same NaN, where there is no turn
    advantages, _ = turn_advantages(rewards, present, "mean")
    assert advantages.tolist() == [[[0.0, 0.0], [0.0, 0.0]]] and math.isnan(rewards[0, 1, 0])


# ---- skip-observation GAE ----

GAE_LENGTHS = [4, 1, 0, 6, 2]


def gae_batch(seed=0, dtype=torch.float64):
    random = torch.Generator().manual_seed(seed)
    return torch.randn(2, sum(GAE_LENGTHS), generator=random, dtype=dtype)


def sequences_of(*columns):
    return zip(*(column.split(GAE_LENGTHS) for column in columns), strict=True)


@pytest.mark.parametrize("lam", [0.0, 0.3, 0.95, 1.0])
@pytest.mark.parametrize("gamma", [1.0, 0.9])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_gae_is_the_discounted_sum_of_errors(lam, gamma, dtype):
    rewards, values = gae_batch(dtype=dtype)
    found = skip_observation_gae(rewards, values, GAE_LENGTHS, lam, gamma)
    assert found.dtype == dtype and found.shape == rewards.shape
    expected = []
    for r, v in sequences_of(rewards.double(), values.double()):
        v = [*v.tolist(), 0.0]
        errors = [r[j] + gamma * v[j + 1] - v[j] for j in range(len(r))]
        for j in range(len(r)):
            expected.append(sum((gamma * lam) ** k * e for k, e in enumerate(errors[j:])))
    tolerance = 1e-12 if dtype == torch.float64 else 1e-5
    expected = torch.tensor(expected, dtype=dtype)
    torch.testing.assert_close(found, expected, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("seed", range(3))
def test_gae_at_its_two_ends(seed):
    rewards, values = gae_batch(seed)
    whole = skip_observation_gae(rewards, values, GAE_LENGTHS, 1.0)
    to_go = [r.flip(0).cumsum(0).flip(0) for r in rewards.split(GAE_LENGTHS)]
    torch.testing.assert_close(whole, torch.cat(to_go) - values)  # return-to-go minus value
    short = skip_observation_gae(rewards, values, GAE_LENGTHS, 0.0)
    following = [torch.cat([v[1:], v.new_zeros(min(1, len(v)))]) for v in values.split(GAE_LENGTHS)]
    torch.testing.assert_close(short, rewards + torch.cat(following) - values)  # TD error


def test_gae_knows_no_neighbours():
    rewards, values = gae_batch()
    found = skip_observation_gae(rewards, values, GAE_LENGTHS, 0.9)
    alone = [skip_observation_gae(r, v, [len(r)], 0.9) for r, v in sequences_of(rewards, values)]
    assert torch.equal(found, torch.cat(alone))


def test_gae_has_no_gradient_and_refuses_lengths_that_do_not_fit():
    rewards, values = gae_batch()
    assert not skip_observation_gae(
        rewards, values.requires_grad_(), GAE_LENGTHS, 0.9
    ).requires_grad
    assert skip_observation_gae(rewards[:0], values[:0], [], 0.9).shape == (0,)
    for bad in ((rewards[1:], values, GAE_LENGTHS), (rewards, values, GAE_LENGTHS[1:])):
        with pytest.raises(AssertionError):
            skip_observation_gae(*bad, 0.9)


# ---- KL estimators: exact expectations over a distribution of five outcomes ----


def categorical(seed):
    random = torch.Generator().manual_seed(seed)
    return torch.randn(5, generator=random, dtype=torch.float64)


def exact_kl(p_logits, q_logits):
    p, q = p_logits.log_softmax(0), q_logits.log_softmax(0)
    return sum(p[i].exp() * (p[i] - q[i]) for i in range(len(p)))


def test_kl_estimators_are_unbiased_where_they_should_be():
    policy, reference, behaviour = categorical(1), categorical(2), categorical(3)
    pi, ref, mu = (x.log_softmax(0) for x in (policy, reference, behaviour))
    truth = float(exact_kl(policy, reference))
    assert float((pi.exp() * (pi - ref)).sum()) == pytest.approx(truth, rel=1e-12)
    assert float((pi.exp() * k3(pi, ref)).sum()) == pytest.approx(truth, rel=1e-12)
    biased = float((pi.exp() * ((pi - ref) ** 2 / 2)).sum())
    assert biased != pytest.approx(truth, rel=0.01) and biased > 0
    # From samples of another policy only the corrected one is right.
    off_policy = float((mu.exp() * k3(pi, ref)).sum())
    assert off_policy != pytest.approx(truth, rel=0.01)
    corrected = float((mu.exp() * unbiased_k3(pi, ref, mu)).sum())
    assert corrected == pytest.approx(truth, rel=1e-12)


def expected_gradient(estimator, sampler_logits):
    """Gradient in the policy's logits of E_sampler[estimator], the samples held fixed."""
    policy = categorical(1).requires_grad_()
    value = (sampler_logits.softmax(0) * estimator(policy.log_softmax(0))).sum()
    return torch.autograd.grad(value, policy)[0]


def test_kl_estimators_have_the_gradients_that_the_docstring_says():
    ref, behaviour = categorical(2).log_softmax(0), categorical(3)
    policy = categorical(1).requires_grad_()
    forward = torch.autograd.grad(exact_kl(policy, categorical(2)), policy)[0]
    backward = torch.autograd.grad(exact_kl(categorical(2), policy), policy)[0]
    on_policy = categorical(1)

    def close(estimator, sampler, expected):
        got = expected_gradient(estimator, sampler)
        torch.testing.assert_close(got, expected, rtol=1e-10, atol=1e-12)

    close(lambda pi: pi - ref, on_policy, torch.zeros(5, dtype=torch.float64))
    close(lambda pi: (pi - ref) ** 2 / 2, on_policy, forward)
    close(lambda pi: k3(pi, ref), on_policy, backward)
    mu = behaviour.log_softmax(0)
    close(lambda pi: unbiased_k3(pi, ref, mu), behaviour, forward)


def test_k3_is_never_negative_and_keeps_its_digits():
    gaps = torch.cat([-torch.logspace(-9, 1.2, 200), torch.zeros(1), torch.logspace(-9, 1.2, 200)])
    value = k3(torch.zeros_like(gaps), gaps)
    assert value.dtype == torch.float32 and (value >= 0).all()
    for gap, got in zip(gaps.tolist(), value.tolist(), strict=True):
        # Far from 0 the plain formula in double; near 0 its series, where double loses it as well.
        exact = math.exp(gap) - 1 - gap if abs(gap) > 1e-3 else gap**2 / 2 + gap**3 / 6
        assert got == pytest.approx(exact, rel=1e-4, abs=1e-37), gap


def test_k3_survives_hopeless_ratios():
    logprobs = torch.tensor([-300.0, -1.0], requires_grad=True)
    value = k3(logprobs, torch.tensor([-1.0, -300.0]))
    value.sum().backward()
    assert torch.isfinite(value).all() and torch.isfinite(logprobs.grad).all()
    assert value[1].item() == pytest.approx(299.0 - 1.0)  # pi >> pi_ref is a real and large penalty


# ---- diagnostics ----


def micro_diagnostics(batch, objective="tis"):
    reference = batch.proximal - 0.1
    entropy = batch.behaviour.abs().requires_grad_()
    _, _, touched = run(objective, batch)
    tokens = tokens_of(batch, logprobs=batch.logprobs.clone().requires_grad_())
    return losses.diagnostics(tokens, entropy, touched, reference)


def split(values):
    """The values of each sequence."""
    ends = [0, *itertools.accumulate(LENGTHS)]
    return [values[start:stop] for start, stop in itertools.pairwise(ends)]


def test_merged_diagnostics_against_loops_over_the_whole_step():
    batch = make_batch(seed=5)
    parts = [micro_diagnostics(make_batch(5, sequences=s)) for s in ([0, 3, 5], [2, 4], [1])]
    assert not any(value.requires_grad for part in parts for value in part.values())
    tokens = range(batch.count)
    logprobs, behaviour = batch.logprobs.tolist(), batch.behaviour.tolist()
    reference = (batch.proximal - 0.1).tolist()
    ratios = [math.exp(logprobs[t] - behaviour[t]) for t in tokens]
    whole = [math.exp(sum(math.log(x) for x in own)) for own in split(ratios)]
    n = len(tokens)
    _, clipped, capped = oracle("tis", batch, logprobs, logprobs)
    expected = {
        "tokens": n,
        "ratio_max": max(ratios),
        "ratio_min": min(ratios),
        "ess": sum(ratios) ** 2 / sum(x * x for x in ratios) / n,
        "ess_whole": sum(whole) ** 2 / sum(x * x for x in whole) / len(whole),
        "kl_behaviour": sum(x - 1 - math.log(x) for x in ratios) / n,
        "kl_reference": statistics.mean(  # weighted with pi / mu: the samples are those of mu
            ratio * (math.exp(reference[t] - logprobs[t]) - 1 - (reference[t] - logprobs[t]))
            for t, ratio in zip(tokens, ratios, strict=True)
        ),
        "entropy": statistics.mean(abs(behaviour[t]) for t in tokens),
        "clipped": clipped / n,
        "capped": capped / n,
    }
    merged = losses.merge_diagnostics(parts)
    assert all(type(value) in (float, int) for value in merged.values())
    assert merged == pytest.approx(expected, rel=1e-9)
    assert merged == pytest.approx(losses.merge_diagnostics([micro_diagnostics(batch)]), rel=1e-12)
    json.dumps(merged)


def test_ratio_extremes_may_lie_on_one_side_of_1():
    batch = make_batch()
    for gap, key in [(-0.5, "ratio_max"), (0.5, "ratio_min")]:
        batch.logprobs = batch.behaviour + gap
        merged = losses.merge_diagnostics([micro_diagnostics(batch)])
        assert merged[key] == pytest.approx(math.exp(gap))


def test_merging_refuses_nothing_and_different_parts():
    part = micro_diagnostics(make_batch())
    other = {key: value for key, value in part.items() if key != "kl_reference"}
    for parts in ([], [part, other]):
        with pytest.raises(AssertionError, match="keys"):
            losses.merge_diagnostics(parts)
    assert "kl_reference" not in losses.merge_diagnostics([other])
