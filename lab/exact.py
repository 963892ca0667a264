"""The exact laboratory: tasks so small that every response is enumerated.

A task has 64 responses, spelled as one token of 64 or as three tokens of 4. The true policy
gradient, the true KL and the best reward are finite sums here, so bias and variance of every
objective are exact numbers; a sampled trace of responses is checked against them. What the pipeline
does to the data before an objective sees them is measured in exact_pipeline.py. `bench_lab` (one
thread, seconds) measures everything; docs/lab.md reads the results.
Left out: optimizer state, clipping of the gradient norm, function approximation (the policy is a
table of logits), rewards that depend on time.

Staleness here: optimizer steps between the policy that sampled the trace and the one trained on it.
Part:   what a part of the laboratory returns: its curves, and claims to check, each a tuple
        (name, values [R], their chances [R], truth, whether theory says that their mean is it)
Axes:   R responses · T tokens of a response · V vocabulary · P prefixes
        D = P V entries of the table of logits, which is `theta` [P, V]
"""

from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import one_hot
from tqdm import tqdm

import losses
from lab.estimators import KL_ESTIMATORS, opsm_mask
from lab.exact_pipeline import draw_pipeline, drop_part, swap_part
from lab.plots import LOGARITHMIC, column, draw_panels, print_table, save_result
from runtime.devices import describe_machine

STALENESS, STEP = range(9), 0.3  # gradient ascent on the enumerated objective, steps of one length

SEED, SAMPLES = 0, 100_000
CHECKED = (0, 2, 8)  # staleness at which a sampled trace is held against theory

# Corrections that are not objectives of their own: they go before one.
CORRECTIONS = {"opsm": "decoupled_ppo", "vtrace": "reinforce", "sequence_is": "reinforce"}

METHODS = (*losses.OBJECTIVES, *CORRECTIONS)


Part = tuple[dict, list[tuple]]


class EnumeratedTask(NamedTuple):
    """Every response of a task, in lexicographic order."""

    tokens: Tensor  # [R, T] int64
    prefix: Tensor  # [R, T] int64: row of theta that predicts each token
    rewards: Tensor  # [R] float64
    shape: tuple[int, int]  # (P, V) of theta


def enumerate_task(vocab: int, length: int) -> EnumeratedTask:
    """All V^T responses; a reward belongs to a number, so 64^1 and 4^3 have the same rewards."""
    number = torch.arange(vocab**length)
    place = vocab ** torch.arange(length - 1, -1, -1)  # what a digit is worth
    first_row = (vocab ** torch.arange(length) - 1) // (vocab - 1)  # of the prefixes of a length
    prefix = first_row + number[:, None] // (place * vocab)
    # Most of the reward is for a last digit that fits the first two: prefixes matter.
    a, b, c = (number // worth % 4 for worth in (16, 4, 1))
    rewards = 0.2 * (a == 2) + 0.2 * (b > a) + 0.6 * (c == (a + b) % 4)
    tokens = number[:, None] // place % vocab
    shape = (int(prefix.max()) + 1, vocab)
    return EnumeratedTask(tokens, prefix, rewards.double(), shape)


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
    theta = 0.5 * torch.randn(task.shape, generator=generator, dtype=torch.float64)
    chain = [theta]
    for _ in STALENESS[1:]:
        slope = true_gradient(theta, task).view(task.shape)
        theta = theta + STEP * slope / slope.norm()
        chain.append(theta)
    return chain


def prefix_values(theta: Tensor, task: EnumeratedTask) -> Tensor:
    """Expected reward [R, T] before each token is drawn: what a perfect critic says."""
    chances = chances_of(logprobs_of(theta, task))
    visits = one_hot(task.prefix).sum(1).double()  # [R, P]
    values = ((chances * task.rewards) @ visits) / (chances @ visits)
    return values[task.prefix]


def vtrace(log_ratio, values, rewards, cap=1.0):
    """V-trace targets v, weights rho and advantages r + v' - V, each [R, T]; reward at the end.

    log(pi / mu) [R, T], critic's values V [R, T], rewards [R]; no discount. Espeholt et al. 2018
    (IMPALA, arXiv 1802.01561) equation 1 and section 4.2; rho and c have the same cap here, which
    makes their recursion v = V + rho (r + v' - V).
    """
    weights = log_ratio.exp().clamp(max=cap)
    target = rewards
    targets = torch.empty_like(values)
    advantages = torch.empty_like(values)
    for t in reversed(range(values.shape[1])):
        advantages[:, t] = target - values[:, t]
        targets[:, t] = target = values[:, t] + weights[:, t] * advantages[:, t]
    return targets, weights, advantages


def loss_of(method, new, old, rewards, values):
    """Loss of R responses by any of METHODS, advantages [R, T], share of tokens that were touched.

    Log-probs now and as recorded [R, T], rewards [R], values of the behaviour policy [R, T].
    A token is touched if a correction clipped, capped or dropped it. One update a step: the
    proximal policy is the one of this forward pass. The mean is over R responses, as in J.
    """
    drift = (new - old).detach()
    ratio = drift.exp()
    advantages = (rewards - values[:, 0])[:, None]
    weights = torch.ones_like(ratio)
    capped = torch.zeros_like(ratio)
    if method == "sequence_is":  # the ratio of the whole response: unbiased at every staleness
        weights = ratio.prod(1, keepdim=True).expand(ratio.shape)
    elif method == "vtrace":
        _, weights, advantages = vtrace(drift, values, rewards)
        capped = weights < ratio
    now, then, weighted = new.flatten(), old.flatten(), (weights * advantages).flatten()
    sequence = torch.arange(len(new)).repeat_interleave(new.shape[1])
    kept = torch.ones_like(sequence, dtype=torch.bool)
    if method == "opsm":
        kept = opsm_mask(then, now, weighted, sequence)
    tokens = losses.Tokens(now, now.detach(), then, weighted, sequence)
    tokens = losses.Tokens(*[values[kept] for values in tokens])  # the others stay in the count
    loss, by = losses.policy_loss(CORRECTIONS.get(method, method), tokens, len(new))
    touched = by["clipped"].sum() + by["capped"].sum() + (~kept).sum() + capped.sum()
    return loss, advantages, float(touched) / len(kept)


def examine(method: str, task: EnumeratedTask, theta: Tensor, behaviour: Tensor):
    """The gradient of every response [R, D], and how good it is; nothing is sampled.

    In units of the length of the true gradient: `bias`, |expectation - truth|; `spread`, the
    standard deviation of one response; `share`, the expectation projected on the truth. `ess`: the
    effective sample size of the token weights, as a share of the tokens. `touched`: see `loss_of`.
    """
    new = logprobs_of(theta, task).requires_grad_()
    old = logprobs_of(behaviour, task)
    values = prefix_values(behaviour, task)
    loss, advantages, touched = loss_of(method, new, old, task.rewards, values)
    slopes = -len(new) * torch.autograd.grad(loss, new)[0]  # [R, T]
    gradients = response_gradients(slopes, theta, task)
    truth = true_gradient(theta, task)
    chances = chances_of(old)
    mean = chances @ gradients
    weights = slopes / advantages  # [R, T]
    token_chances = chances[:, None] / new.shape[1]
    squares = (token_chances * weights**2).sum().clamp_min(1e-300)
    facts = {
        "bias": (mean - truth).norm() / truth.norm(),
        "spread": (chances @ (gradients - mean).square().sum(1)).sqrt() / truth.norm(),
        "share": mean @ truth / truth.square().sum(),
        "ess": (token_chances * weights).sum() ** 2 / squares,
        "touched": touched,
    }
    return gradients, {name: float(value) for name, value in facts.items()}


def is_unbiased(method: str, length: int, staleness: int, touched: float) -> bool:
    """What theory says. On-policy there is nothing to correct. A ratio for the whole response
    corrects everything, a ratio per token one token, unless it is clipped, capped or dropped."""
    if staleness == 0 or method == "sequence_is":
        return True
    return length == 1 and touched == 0 and method != "reinforce"


def gradient_claim(name, gradients, chances, truth, unbiased):
    """The claim that gradients [R, D] have no error, in units of the length of the truth [D].

    The error is measured in the direction in which enumeration predicts it (a bias at right angles
    to the truth is a bias, too), or along the truth if it predicts none.
    """
    along = truth if unbiased else chances @ gradients - truth
    errors = (gradients - truth) @ along / along.norm() / truth.norm()
    return name, errors, chances, 0.0, unbiased


def verdict(claim: tuple) -> dict:
    """A claim against the mean of a sampled trace.

    It is `ok` if the mean is within 3 standard errors of the enumerated expectation, and within 3
    of the truth exactly if theory says unbiased; a bias below 6 standard errors is too small to
    show. Equal chances and seed give the same trace, so all objectives are judged on one.
    """
    name, values, chances, truth, unbiased = claim
    generator = torch.Generator().manual_seed(SEED)
    draws = values[torch.multinomial(chances, SAMPLES, True, generator=generator)]
    estimate = float(draws.mean())
    predicted = float(chances @ values)
    error = max(float(draws.std()) / SAMPLES**0.5, 1e-12)
    within = abs(estimate - truth) <= 3 * error
    hidden = not unbiased and abs(predicted - truth) < 6 * error
    agrees = abs(estimate - predicted) <= 3 * error
    return {
        "name": name,
        "estimate": estimate,
        "truth": truth,
        "se": error,
        "predicted": predicted,
        "within": within,
        "expected": "unbiased" if unbiased else "biased",
        "ok": agrees and (hidden or within == unbiased),
    }


def objectives_part(task: EnumeratedTask) -> Part:
    """Facts of `examine` for every method and staleness, and the claims that are checked."""
    length = task.tokens.shape[1]
    chain = policies(task)
    chances = chances_of(logprobs_of(chain[0], task))
    curves = {method: [] for method in METHODS}
    claims = []
    for method, rows in curves.items():
        for s, theta in enumerate(chain):
            gradients, facts = examine(method, task, theta, chain[0])
            rows.append(facts)
            if s in CHECKED:
                name = f"{method}, T = {length}, staleness {s}"
                truth = true_gradient(theta, task)
                unbiased = is_unbiased(method, length, s, facts["touched"])
                claims.append(gradient_claim(name, gradients, chances, truth, unbiased))
    return curves, claims


def advantages_part(task: EnumeratedTask) -> Part:
    """Length and direction of the gradient with group advantages, on-policy, over all R^3 groups.

    `share`: its projection on the truth; `cosine`: of the angle between them.
    """
    theta = policies(task)[2]
    curves = {}
    claims = []
    truth = true_gradient(theta, task)
    scores = response_gradients(torch.ones(task.tokens.shape).double(), theta, task)  # [R, D]
    projection = scores @ truth / truth.square().sum()  # [R]
    chances = chances_of(logprobs_of(theta, task))
    groups = torch.cartesian_prod(*[torch.arange(len(chances))] * 3)  # [R^3, 3]
    group_chances = chances[groups].prod(1)
    for kind in losses.ADVANTAGES:
        advantages, _ = losses.group_advantages(task.rewards[groups], kind)
        values = (advantages * projection[groups]).mean(1)
        # All members are alike: the first one's mean advantage, by its response, is enough.
        weighted = (group_chances * advantages[:, 0]).view(len(chances), -1)
        mean = weighted.sum(1) @ scores  # the first member changes slowest
        cosine = torch.cosine_similarity(mean, truth, dim=0)
        curves[kind] = {"share": float(group_chances @ values), "cosine": float(cosine)}
        name = f"advantage {kind}, groups of 3"
        claims.append((name, values, group_chances, 1.0, kind == "rloo"))
    return curves, claims


# What theory says: up to how many tokens the value, and the gradient, of an estimator is right.
KL_RIGHT = {"k1": (3, 0), "k2": (0, 1), "k3": (3, 0), "unbiased_k3": (1, 1)}


def kl_part(task: EnumeratedTask) -> Part:
    """The KL estimators against KL(pi || pi_ref), pi_ref = step 0; claims at the last step."""
    chain = policies(task)
    curves = {name: [] for name in KL_RIGHT}
    claims = []
    for name, rows in curves.items():
        for s in STALENESS[1:]:
            facts, pair = examine_kl(name, task, chain[s], chain[max(s - 2, 0)], chain[0])
            rows.append(facts)
        claims += pair
    return curves, claims


def true_kl(theta: Tensor, first: Tensor, task: EnumeratedTask) -> Tensor:
    """KL(theta || first): a sum over all responses."""
    logprobs = logprobs_of(theta, task)
    return chances_of(logprobs) @ (logprobs - logprobs_of(first, task)).sum(1)


def examine_kl(name, task: EnumeratedTask, theta: Tensor, older: Tensor, first: Tensor) -> Part:
    """Value and gradient of an estimator of the KL from `theta` to `first`, and a claim on each.

    k1, k2, k3 see samples of `theta`, unbiased_k3 those of `older`, a policy two steps older.
    """
    new = logprobs_of(theta, task).requires_grad_()
    tensors = [new, logprobs_of(first, task)]
    chances = chances_of(new.detach())
    if name == "unbiased_k3":
        tensors.append(logprobs_of(older, task))
        chances = chances_of(tensors[-1])
    values = KL_ESTIMATORS[name](*tensors).sum(1)  # [R]
    (slopes,) = torch.autograd.grad(values.sum(), new)
    gradients = response_gradients(slopes, theta, task)
    truth = torch.func.grad(true_kl)(theta, first, task).flatten()
    values = values.detach()
    mean = chances @ values
    facts = {
        "kl": float(true_kl(theta, first, task)),
        "value": float(mean),
        "deviation": float((chances @ (values - mean) ** 2).sqrt()),
        "gradient_error": float((chances @ gradients - truth).norm() / truth.norm()),
    }
    length = task.tokens.shape[1]
    value_right, slope_right = (length <= most for most in KL_RIGHT[name])
    label = f"{name}, T = {length}"
    value = (f"value of {label}", values, chances, facts["kl"], value_right)
    slope = gradient_claim(f"slope of {label}", gradients, chances, truth, slope_right)
    return facts, [value, slope]


def draw(folder: Path, result: dict) -> None:
    """lab_objectives.png and lab_kl.png, one message each."""
    labels = {
        "bias": "bias / length of the true gradient",
        "ess": "effective sample size\n(share of tokens)",
        "spread": "standard deviation of one response\n/ length of the true gradient",
    }
    own = result["three tokens"]
    panels = []
    for key, label in labels.items():
        curves = {name: (None, STALENESS, column(own[name], key)) for name in METHODS}
        panels.append((curves, {"xlabel": "staleness (optimizer steps)", "ylabel": label}))
    title = "Whole-response weights (sequence_is) have no bias; their price is variance"
    draw_panels(folder / "lab_objectives.png", title, panels, (7, 6))
    panels = []
    for spelling in TASKS:
        curves = {}
        for name, facts in result[f"kl, {spelling}"].items():
            errors = np.maximum(column(facts, "gradient_error"), 1e-4)
            curves[name] = (None, column(facts, "kl"), errors)
        axis = {
            "title": f"responses of {spelling}",
            "xlabel": "true KL to the reference (nats)",
            "ylabel": "bias / length of the true gradient\n(0 is drawn at 0.0001)",
            "ylim": (5e-5, 2),
        }
        panels.append((curves, axis | LOGARITHMIC))
    title = "k1 and k3 have the right value and a wrong gradient"
    draw_panels(folder / "lab_kl.png", title, panels)


def bench_lab(folder: Path) -> None:
    """Measure everything; lab.json and lab_*.png in `folder`, and the table of claims."""
    torch.set_num_threads(1)
    parts = [(name, objectives_part, task) for name, task in TASKS.items()]
    parts += [(f"kl, {name}", kl_part, task) for name, task in TASKS.items()]
    parts += [("advantages", advantages_part, TASKS["three tokens"])]
    parts += [("lengths", drop_part), ("swap", swap_part, enumerate_task(4, 4))]
    result = {"machine": describe_machine(), "seed": SEED, "samples": SAMPLES}
    verdicts = []
    for name, part, *task in tqdm(parts):
        result[name], claims = part(*task)
        verdicts += map(verdict, claims)
    result["verdicts"] = verdicts
    save_result(folder, "lab", result)
    draw(folder, result)
    draw_pipeline(folder, result)
    print_table(verdicts)
    print(f"{sum(row['ok'] for row in verdicts)} of {len(verdicts)} as theory says")
