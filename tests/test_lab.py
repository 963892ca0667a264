"""The laboratory against identities that hold exactly when every response is enumerated."""

import itertools
import math

import numpy as np
import pytest
import torch

from lab import exact as lab
from lab import exact_runs as runs
from lab.plots import load_result
from methods.baseline import optimal_baseline

TASKS = {1: lab.TASKS["one token"], 3: lab.TASKS["three tokens"]}
CHAINS = {length: lab.policies(task) for length, task in TASKS.items()}


def truth(length, staleness):
    return lab.true_gradient(CHAINS[length][staleness], TASKS[length])


def examine(method, length, staleness):
    return lab.examine(method, TASKS[length], CHAINS[length][staleness], CHAINS[length][0])[1]


def mean_gradient(method, length, staleness):
    task, chain = TASKS[length], CHAINS[length]
    gradients, _ = lab.examine(method, task, chain[staleness], chain[0])
    return lab.logprobs_of(chain[0], task).sum(1).exp() @ gradients


def advantages_of(length):
    """Rewards without their mean under the policy that sampled."""
    task, behaviour = TASKS[length], CHAINS[length][0]
    return task.rewards - lab.expected_reward(behaviour, task)


def is_unbiased(method: str, length: int, staleness: int, touched: float) -> bool:
    """What theory says. On-policy there is nothing to correct. A ratio for the whole response
    corrects everything, a ratio per token one token, unless it is clipped, capped or dropped."""
    whole = staleness == 0 or method == "sequence_is"
    return whole or (length == 1 and touched == 0 and method != "reinforce")


def test_a_task_has_every_response_once():
    task = TASKS[3]
    assert len(set(map(tuple, task.tokens.tolist()))) == 64
    assert int(task.prefix.max()) + 1 == task.shape[0] == 21
    assert torch.equal(task.rewards, TASKS[1].rewards)
    chances = lab.logprobs_of(CHAINS[3][4], task).sum(1).exp()
    assert math.isclose(float(chances.sum()), 1.0, abs_tol=1e-12)


def test_true_gradient_is_the_slope_of_the_objective():
    theta, task = CHAINS[3][2], TASKS[3]
    step = torch.randn(task.shape, generator=torch.Generator().manual_seed(1)).double()
    ends = [lab.expected_reward(theta + 1e-5 * sign * step, task) for sign in (1, -1)]
    slope = float(truth(3, 2) @ step.flatten())
    assert math.isclose((ends[0] - ends[1]) / 2e-5, slope, rel_tol=1e-6)


@pytest.mark.parametrize("length", [1, 3])
@pytest.mark.parametrize("method", lab.METHODS)
def test_every_method_is_unbiased_exactly_where_theory_says(method, length):
    for s in lab.STALENESS:
        facts = examine(method, length, s)
        if is_unbiased(method, length, s, facts["touched"]):
            assert facts["bias"] < 1e-9, (method, length, s)
        else:
            assert facts["bias"] > 0.01, (method, length, s)


@pytest.mark.parametrize("length", [1, 3])
@pytest.mark.parametrize("method", lab.METHODS)
def test_the_gradient_of_a_sampled_trace_is_the_mean_over_its_responses(method, length):
    task, theta, behaviour = TASKS[length], CHAINS[length][8].clone(), CHAINS[length][0]
    old, advantages = lab.logprobs_of(behaviour, task), advantages_of(length)
    draw = torch.Generator().manual_seed(0)
    trace = torch.multinomial(old.sum(1).exp(), 1000, True, generator=draw)
    new = lab.logprobs_of(theta.requires_grad_(), task)[trace]
    loss, _ = lab.loss_of(method, new, old[trace], advantages[trace])
    sampled = -torch.autograd.grad(loss, theta)[0].flatten()
    gradients, _ = lab.examine(method, task, theta.detach(), behaviour)
    assert torch.allclose(sampled, gradients[trace].mean(0), atol=1e-9)


def test_gradients_of_responses_by_the_formula_of_the_softmax():
    """d log pi(token) / d logits = one-hot minus softmax, in the row of the prefix."""
    theta, task = CHAINS[3][2], TASKS[3]
    slopes = torch.randn(64, 3, generator=torch.Generator().manual_seed(0)).double()
    expected = torch.zeros(64, *task.shape).double()
    for r, t in itertools.product(range(64), range(3)):
        row, token = task.prefix[r, t], task.tokens[r, t]
        expected[r, row] -= slopes[r, t] * theta[row].softmax(-1)
        expected[r, row, token] += slopes[r, t]
    found = lab.response_gradients(slopes, theta, task)
    assert torch.allclose(found, expected.flatten(1), atol=1e-12)


def test_a_ratio_per_token_corrects_one_token_at_a_time():
    biases = [examine("decoupled_ppo", 3, s)["bias"] for s in lab.STALENESS]
    assert biases == sorted(biases) and biases[8] > 0.3
    # it is the gradient of the surrogate in which only one token changes hands (CPI, TRPO)
    task, theta, behaviour = TASKS[3], CHAINS[3][8].clone().requires_grad_(), CHAINS[3][0]
    old = lab.logprobs_of(behaviour, task)
    ratio = (lab.logprobs_of(theta, task) - old).exp()
    gain = old.sum(1).exp() @ (ratio * advantages_of(3)[:, None]).sum(1)
    surrogate = torch.autograd.grad(gain, theta)[0].flatten()
    assert torch.allclose(surrogate, mean_gradient("decoupled_ppo", 3, 8), atol=1e-10)


# ---- credit for turns ----

THETA = lab.policies(runs.enumerate_turns())[2]


def words_and_chances(may_end):
    """Every episode of the task once more, by loops: words and answer, chance, rewards."""
    for first, good, second in itertools.product(range(3), range(2), range(3)):
        prefix = 1 + 2 * first + good
        chance = THETA.softmax(1)[0, first] * (0.1 + 0.4 * first if good else 0.9 - 0.4 * first)
        now = 0.5 if first == 2 else 0.0
        if may_end and first == 1:
            if (good, second) == (0, 0):  # nothing follows
                yield [(0, first)], float(THETA.softmax(1)[0, first]), [now]
            continue
        later = 1.0 if good and second == (first + 1) % 3 else 0.0
        chance = float(chance * THETA.softmax(1)[prefix, second])
        yield [(0, first), (prefix, second)], chance, [now, later]


def slope(row, word):
    """d log pi(word) / d logits, in the row of its prefix."""
    found = torch.zeros(7, 3).double()
    found[row] -= THETA[row].softmax(0)
    found[row, word] += 1
    return found.flatten()


def test_true_gradient_with_turns_by_loops():
    for may_end in (False, True):
        episodes = list(words_and_chances(may_end))
        assert math.isclose(sum(chance for _, chance, _ in episodes), 1.0)
        expected = sum(
            chance * sum(rewards) * slope(*word)
            for words, chance, rewards in episodes
            for word in words
        )
        found = lab.true_gradient(THETA, runs.enumerate_turns(may_end=may_end))
        assert torch.allclose(found, expected, atol=1e-12)


@pytest.mark.parametrize("may_end", [False, True])
@pytest.mark.parametrize("credit", runs.CREDITS)
def test_expected_gradient_of_groups_by_loops(may_end, credit):
    """`rloo`: every return minus the mean of the others that have the turn."""
    episodes = list(words_and_chances(may_end))
    expected = torch.zeros(21).double()
    for group in itertools.product(episodes, repeat=3):
        chance = math.prod(chance for _, chance, _ in group)
        words, _, rewards = group[0]  # all members are alike
        for t, word in enumerate(words):
            start, others = (t if credit == "turn" else 0), group[1:]
            if credit == "turn":
                others = [other for other in others if len(other[2]) > t]
            if others:
                base = sum(sum(other[2][start:]) for other in others) / len(others)
                expected += chance * (sum(rewards[start:]) - base) * slope(*word)
    task = runs.enumerate_turns(may_end=may_end)
    gradients, chances, _ = runs.group_gradients(THETA, task, credit, "rloo")
    assert torch.allclose(chances @ gradients, expected, atol=1e-12)


def test_credit_for_turns_and_for_the_episode():
    curves = runs.credit_part()
    unpaid, paid = runs.PAYS.index(0), runs.PAYS.index(0.5)
    for case, credit in itertools.product(runs.CASES, runs.CREDITS):
        mean, rloo, grpo = (curves[f"{case}, {credit}, {k}"] for k in ("mean", "rloo", "grpo"))
        if (case, credit) == ("may end in turn 1", "turn"):
            assert all(facts["bias"] > 0.01 for facts in rloo)
        else:
            assert all(facts["bias"] < 1e-9 for facts in rloo)
            assert all(math.isclose(facts["share"], 2 / 3) for facts in mean)  # (n - 1) / n
            assert all(math.isclose(facts["cosine"], 1) for facts in mean)
        assert grpo[paid]["bias"] > 0.1 and grpo[paid]["cosine"] < 0.9999
    for kind in runs.ESTIMATORS:
        turn, episode = (curves[f"two turns, {credit}, {kind}"] for credit in runs.CREDITS)
        assert turn[unpaid] == pytest.approx(episode[unpaid])  # nothing was earned before
        assert turn[paid]["spread"] < 0.95 * episode[paid]["spread"]
    turn, episode = (curves[f"may end in turn 1, {credit}, rloo"] for credit in runs.CREDITS)
    assert turn[unpaid]["spread"] > episode[unpaid]["spread"]  # fewer to compare with


def test_swap_modes():
    curves = load_result("lab")["swap"]  # the laboratory test makes them again
    for boundary in (1, 2, 3):
        keep, recompute, drain = (
            curves[f"{mode}, {boundary}"] for mode in ("keep", "recompute", "drain")
        )
        assert all(abs(f["to_b"]) < 1e-10 for f in recompute)
        assert all(abs(f["to_a"]) < 1e-10 for f in drain)
        assert all(f["to_b"] > 1e-6 and f["to_a"] > 1e-6 for f in keep)
        assert all(k["to_b"] < d["to_b"] for k, d in zip(keep, drain, strict=True))


def test_dropping_loses_long_answers_and_waiting_does_not():
    curves = runs.drop_part(100)
    (all_of_them, waited), (admitted, kept) = (
        [curves[rule][name] for name in ("admitted", "trained")] for rule in ("wait", "drop")
    )
    assert waited["answers"] == kept["answers"] == 800  # of as many steps
    assert all_of_them["answers"] == 800 < admitted["answers"]
    assert waited["mean"] == all_of_them["mean"]
    assert kept["mean"] < 0.8 * admitted["mean"]


@pytest.mark.parametrize("staleness", [0, 4, 8])
def test_no_baseline_has_a_bias_and_the_optimal_one_the_least_spread(staleness):
    """Against a search over baselines, for samples weighted by the ratio of the whole response."""
    task, theta = TASKS[3], CHAINS[3][staleness]
    new, old = (lab.logprobs_of(x, task) for x in (theta, CHAINS[3][0]))
    chances, ratios = lab.chances_of(old), (new - old).sum(1).exp()
    scores = lab.response_gradients(torch.ones_like(new), theta, task)

    def facts(baseline):
        gradients = (ratios * (task.rewards - baseline)).view(-1, 1) * scores
        return lab.accuracy(gradients, chances, truth(3, staleness))

    # as many of each response as its chance says: the square of a weight has the chance
    group = [x[None] for x in (task.rewards, ratios * chances.sqrt(), scores.norm(dim=1))]
    best = facts(optimal_baseline(*group))
    assert best["bias"] < 1e-9
    for baseline in np.linspace(-0.5, 1.0, 31):
        other = facts(baseline)
        assert other["bias"] < 1e-9 and best["spread"] <= other["spread"] + 1e-9


def test_the_laboratory_still_gives_the_recorded_numbers(tmp_path):
    recorded = load_result("lab")
    runs.bench_lab(tmp_path)
    found = load_result("lab", tmp_path)
    assert found.keys() == recorded.keys()
    for name in found.keys() - {"machine"}:
        assert_close(found[name], recorded[name], name)


def assert_close(ours, theirs, where):
    """Equal up to rounding, which training multiplies; through dictionaries and lists."""
    if isinstance(theirs, dict):
        assert ours.keys() == theirs.keys(), where
        for key in theirs:
            assert_close(ours[key], theirs[key], f"{where}: {key}")
    elif isinstance(theirs, list):
        for i, pair in enumerate(zip(ours, theirs, strict=True)):
            assert_close(*pair, f"{where}[{i}]")
    elif isinstance(theirs, float):
        assert math.isclose(ours, theirs, rel_tol=1e-3, abs_tol=1e-5), (where, ours, theirs)
    else:
        assert ours == theirs, where
