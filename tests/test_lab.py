"""The laboratory against identities that hold exactly when every response is enumerated."""

import itertools
import math

import pytest
import torch

import losses
from lab import exact as lab
from lab import exact_pipeline
from lab.plots import RESULTS, load_result

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


def wrong(claims):
    """Verdicts that are not as theory says."""
    return [row for row in (lab.verdict(claim) for claim in claims) if not row["ok"]]


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


def test_ascent_raises_the_reward_towards_the_optimum():
    values = [lab.expected_reward(theta, TASKS[3]) for theta in CHAINS[3]]
    assert values == sorted(values) and values[-1] < float(TASKS[3].rewards.max())


@pytest.mark.parametrize("length", [1, 3])
@pytest.mark.parametrize("method", lab.METHODS)
def test_every_method_is_unbiased_exactly_where_theory_says(method, length):
    for s in lab.STALENESS:
        facts = examine(method, length, s)
        if lab.is_unbiased(method, length, s, facts["touched"]):
            assert facts["bias"] < 1e-9, (method, length, s)
        else:
            assert facts["bias"] > 0.01, (method, length, s)


@pytest.mark.parametrize("length", [1, 3])
@pytest.mark.parametrize("method", lab.METHODS)
def test_the_gradient_of_a_sampled_trace_is_the_mean_over_its_responses(method, length):
    task, theta, behaviour = TASKS[length], CHAINS[length][8].clone(), CHAINS[length][0]
    old, values = lab.logprobs_of(behaviour, task), lab.prefix_values(behaviour, task)
    draw = torch.Generator().manual_seed(0)
    trace = torch.multinomial(old.sum(1).exp(), 1000, True, generator=draw)
    new = lab.logprobs_of(theta.requires_grad_(), task)[trace]
    loss, *_ = lab.loss_of(method, new, old[trace], task.rewards[trace], values[trace])
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


@pytest.mark.parametrize("staleness", [1, 4, 8])
def test_whole_response_weights_are_noisier(staleness):
    spread = examine("sequence_is", 3, staleness)["spread"]
    assert spread > examine("decoupled_ppo", 3, staleness)["spread"]


def test_a_ratio_per_token_corrects_one_token_at_a_time():
    biases = [examine("decoupled_ppo", 3, s)["bias"] for s in lab.STALENESS]
    assert biases == sorted(biases) and biases[8] > 0.3
    # it is the gradient of the surrogate in which only one token changes hands (CPI, TRPO)
    task, theta, behaviour = TASKS[3], CHAINS[3][8].clone().requires_grad_(), CHAINS[3][0]
    old, values = lab.logprobs_of(behaviour, task), lab.prefix_values(behaviour, task)
    ratio = (lab.logprobs_of(theta, task) - old).exp()
    gain = old.sum(1).exp() @ (ratio * (task.rewards - values[:, 0])[:, None]).sum(1)
    surrogate = torch.autograd.grad(gain, theta)[0].flatten()
    assert torch.allclose(surrogate, mean_gradient("decoupled_ppo", 3, 8), atol=1e-10)


@pytest.mark.parametrize("method", ["tis", "icepop", "double_sided", "ppo", "gspo", "vtrace"])
def test_caps_and_clips_lose_part_of_the_gradient(method):
    facts = examine(method, 1, 8)
    assert facts["touched"] > 0 and facts["bias"] > 0.05 and facts["share"] < 1


def test_truncation_buys_variance_and_effective_samples():
    tis, plain = examine("tis", 1, 8), examine("decoupled_ppo", 1, 8)
    assert tis["spread"] < plain["spread"] and tis["ess"] > plain["ess"]


@pytest.mark.parametrize("critic", [0, 3])
def test_vtrace_without_caps_is_plain_importance_weighting(critic):
    task, theta = TASKS[3], CHAINS[3][8]
    new, old = lab.logprobs_of(theta, task), lab.logprobs_of(CHAINS[3][0], task)
    values = torch.zeros_like(new)
    targets, rho, advantages = lab.vtrace(new - old, values, task.rewards, math.inf)
    ratio = (new - old).exp()
    suffix = ratio.flip(1).cumprod(1).flip(1)  # [R, T] product of this and all later ratios
    assert torch.allclose(targets, suffix * task.rewards[:, None], atol=1e-12)
    assert torch.allclose(rho * advantages, targets, atol=1e-12)
    # whatever the critic says, the first target estimates the value of the new policy
    values = lab.prefix_values(CHAINS[3][critic], task)
    targets, *_ = lab.vtrace(new - old, values, task.rewards, math.inf)
    value = lab.expected_reward(theta, task)
    assert math.isclose(float(old.sum(1).exp() @ targets[:, 0]), value, abs_tol=1e-10)


def test_vtrace_against_the_recursion_of_the_paper():
    """v_s = V(s) + delta_s + c_s (v_{s+1} - V(s+1)), delta_s = rho_s (r_s + V(s+1) - V(s))."""
    ratio, values, reward = [2.0, 0.5, 0.7], [0.3, 0.4, -0.2], 1.0
    tensors = [torch.tensor([x], dtype=torch.float64) for x in (ratio, values)]
    targets, rho, advantages = lab.vtrace(tensors[0].log(), tensors[1], torch.tensor([reward]))
    V, v, earned = [*values, 0.0], [0.0] * 4, [0.0, 0.0, reward]  # worth nothing behind the end
    for s in (2, 1, 0):
        cut = min(1.0, ratio[s])
        v[s] = V[s] + cut * (earned[s] + V[s + 1] - V[s]) + cut * (v[s + 1] - V[s + 1])
        assert math.isclose(float(targets[0, s]), v[s])
        assert math.isclose(float(rho[0, s]), cut)
        assert math.isclose(float(advantages[0, s]), earned[s] + v[s + 1] - V[s])


def test_effective_sample_size_agrees_with_the_diagnostic():
    task, theta = TASKS[1], CHAINS[1][8]
    old = lab.logprobs_of(CHAINS[1][0], task)
    draw = torch.Generator().manual_seed(0)
    trace = torch.multinomial(old.sum(1).exp(), 50_000, True, generator=draw)
    ratio = (lab.logprobs_of(theta, task) - old)[trace, 0]
    weights = ratio.exp()
    sampled = float(weights.sum() ** 2 / weights.square().sum()) / len(ratio)
    assert math.isclose(sampled, examine("decoupled_ppo", 1, 8)["ess"], rel_tol=0.03)


def test_group_advantages():
    curves, claims = lab.advantages_part(TASKS[3])
    assert math.isclose(curves["rloo"]["share"], 1.0, abs_tol=1e-10)
    assert math.isclose(curves["mean"]["share"], 2 / 3, abs_tol=1e-10)  # (n - 1) / n
    assert curves["grpo"]["cosine"] < 0.9999  # dividing by the spread changes the direction
    assert wrong(claims) == []


def test_kl_estimators():
    one, three = (lab.kl_part(TASKS[length]) for length in (1, 3))
    for curves, claims in (one, three):
        for fact in curves["k1"] + curves["k3"]:
            assert math.isclose(fact["value"], fact["kl"], abs_tol=1e-10)
        assert all(f["value"] > f["kl"] for f in curves["k2"])
        assert wrong(claims) == []
    assert all(math.isclose(f["gradient_error"], 1, abs_tol=1e-9) for f in one[0]["k1"])
    for name in ("k2", "unbiased_k3"):
        assert all(f["gradient_error"] < 1e-9 for f in one[0][name])
        assert all(f["gradient_error"] > 1e-4 for f in three[0][name])
    assert all(f["gradient_error"] > 1e-4 for f in one[0]["k3"])


def test_the_gradient_of_k3_is_that_of_the_forward_kl():
    task, theta = TASKS[1], CHAINS[1][5].clone().requires_grad_()
    new, reference = lab.logprobs_of(theta, task), lab.logprobs_of(CHAINS[1][0], task)
    forward = reference.sum(1).exp() @ (reference - new).sum(1)
    estimate = new.detach().sum(1).exp() @ losses.k3(new, reference).sum(1)
    pair = [torch.autograd.grad(x, theta, retain_graph=True)[0] for x in (forward, estimate)]
    assert torch.allclose(*pair, atol=1e-12)


def test_swap_modes():
    curves, claims = exact_pipeline.swap_part(lab.enumerate_task(4, 4))
    for boundary in (1, 2, 3):
        keep, recompute, drain = (
            curves[f"{mode}, {boundary}"] for mode in ("keep", "recompute", "drain")
        )
        assert all(abs(f["to_b"]) < 1e-10 for f in recompute)
        assert all(abs(f["to_a"]) < 1e-10 for f in drain)
        assert all(f["to_b"] > 1e-6 and f["to_a"] > 1e-6 for f in keep)
        assert all(k["to_b"] < d["to_b"] for k, d in zip(keep, drain, strict=True))
    assert wrong(claims) == []


def test_dropping_loses_long_answers_and_waiting_does_not():
    curves, claims = exact_pipeline.drop_part(100)
    (all_of_them, waited), (admitted, kept) = (
        [curves[rule][name] for name in ("admitted", "trained")] for rule in ("wait", "drop")
    )
    assert waited["answers"] == kept["answers"] == 800  # of as many steps
    assert all_of_them["answers"] == 800 < admitted["answers"]
    assert waited["mean"] == all_of_them["mean"]
    assert kept["mean"] < 0.8 * admitted["mean"]
    assert wrong(claims) == []


@pytest.mark.parametrize("spelling", lab.TASKS)
def test_sampled_traces_agree_with_theory(spelling):
    _, claims = lab.objectives_part(lab.TASKS[spelling])
    assert len(claims) == 3 * len(lab.METHODS) and wrong(claims) == []


@pytest.mark.parametrize("flaw", ["sign", "denominator", "weight"])
def test_a_wrong_objective_is_found(flaw, monkeypatch):
    right = losses.OBJECTIVES["decoupled_ppo"]

    def broken(t, constants):
        if flaw == "sign":
            t = t._replace(advantages=-t.advantages)
        elif flaw == "weight":
            t = t._replace(behaviour=t.proximal)  # it is 1
        gain, clipped, capped = right(t, constants)
        return gain / 1.1 if flaw == "denominator" else gain, clipped, capped

    monkeypatch.setitem(losses.OBJECTIVES, "decoupled_ppo", broken)
    _, claims = lab.objectives_part(TASKS[1])
    found = {row["name"].split(",")[0] for row in wrong(claims)}
    assert {"decoupled_ppo"} <= found <= {"decoupled_ppo", "opsm"}  # opsm is built on it


def test_results_are_those_that_the_page_quotes():
    result = load_result("lab")
    assert result["samples"] == 100_000 and all(row["ok"] for row in result["verdicts"])
    page = (RESULTS.parent / "docs" / "lab.md").read_text()
    assert f"all {len(result['verdicts'])} comparisons" in page
    for name in lab.METHODS:
        two, eight = (result["three tokens"][name][s] for s in (2, 8))
        numbers = f"| {two['bias']:.2f} | {eight['bias']:.2f} | {eight['spread']:.1f} "
        assert f"{numbers}| {eight['ess']:.2f} |" in page, name


def test_the_laboratory_still_gives_the_recorded_numbers(tmp_path, capsys):
    recorded = load_result("lab")
    lab.bench_lab(tmp_path)
    found = load_result("lab", tmp_path)
    assert found.keys() == recorded.keys()
    for name in found.keys() - {"machine"}:
        assert_close(found[name], recorded[name], name)
    pictures = {path.name for path in tmp_path.glob("*.png")}
    assert pictures == {f"lab_{name}.png" for name in ("objectives", "kl", "swap", "drop")}
    table = capsys.readouterr().out
    assert "decoupled_ppo, T = 3, staleness 8" in table and "90 of 90 as theory says" in table


def assert_close(ours, theirs, where):
    """Equal up to rounding, through dictionaries and lists."""
    if isinstance(theirs, dict):
        assert ours.keys() == theirs.keys(), where
        for key in theirs:
            assert_close(ours[key], theirs[key], f"{where}: {key}")
    elif isinstance(theirs, list):
        for i, pair in enumerate(zip(ours, theirs, strict=True)):
            assert_close(*pair, f"{where}[{i}]")
    elif isinstance(theirs, float):
        assert math.isclose(ours, theirs, rel_tol=1e-6, abs_tol=1e-6), (where, ours, theirs)
    else:
        assert ours == theirs, where
