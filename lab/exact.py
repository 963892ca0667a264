"""The exact laboratory: tasks so small that every response is enumerated.

A task has 64 responses, spelled as one token of 64 or as three tokens of 4. The true policy
gradient, the true KL and the best reward are finite sums here, so bias and variance of every
objective are exact numbers. Credit for turns is measured in exact_turns.py, what the pipeline does
to the data before an objective sees them in exact_pipeline.py. `bench_lab` (one thread, seconds)
measures everything; docs/lab.md reads the results.
Left out: optimizer state, clipping of the gradient norm, function approximation (the policy is a
table of logits), rewards that depend on time.

Staleness here: optimizer steps between the policy that sampled the trace and the one trained on it.
Axes: see estimators.py.
"""

from pathlib import Path

import numpy as np
import torch
from torch import Tensor

import losses
from lab.estimators import (
    KL_ESTIMATORS,
    SEED,
    STALENESS,
    EnumeratedTask,
    accuracy,
    chances_of,
    expected_reward,
    logprobs_of,
    opsm_mask,
    policies,
    response_gradients,
    true_gradient,
)
from lab.exact_pipeline import drop_part, swap_part
from lab.exact_stale import baseline_part, damper_part, preference_part
from lab.exact_turns import credit_part, critic_part, draw_credit
from lab.plots import save_result
from runtime.pictures import column, draw_panels

# Corrections that are not objectives of their own: they go before one.
CORRECTIONS = {"opsm": "decoupled_ppo", "sequence_is": "reinforce"}

# dpo needs pairs of responses: exact_stale.py
METHODS = (*(name for name in losses.OBJECTIVES if name != "dpo"), *CORRECTIONS)


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


def loss_of(method, new, old, advantages, staleness=0):
    """Loss of R responses by any of METHODS, and the share of tokens that were touched.

    Log-probs now and as recorded [R, T], advantages [R]. A token is touched if a correction
    clipped, capped or dropped it. One update a step: the proximal policy is the one of this forward
    pass. The mean is over R responses, as in J.
    """
    weighted = advantages[:, None].expand_as(new)
    if method == "sequence_is":  # the ratio of the whole response: unbiased at every staleness
        weighted = weighted * (new - old).detach().sum(1, keepdim=True).exp()
    now, then, weighted = (values.flatten() for values in (new, old, weighted))
    sequence = torch.arange(len(new)).repeat_interleave(new.shape[1])
    kept = torch.ones_like(sequence, dtype=torch.bool)
    if method == "opsm":
        kept = opsm_mask(then, now, weighted, sequence)
    age = torch.full_like(sequence, staleness)
    tokens = losses.Tokens(now, now.detach(), then, weighted * kept, sequence, age)
    loss, by = losses.policy_loss(CORRECTIONS.get(method, method), tokens, len(new))
    return loss, float((by["clipped"] | by["capped"] | ~kept).double().mean())


def examine(
    method: str,
    task: EnumeratedTask,
    theta: Tensor,
    behaviour: Tensor,
    staleness: int = 0,
):
    """The gradient of every response [R, D], and its `accuracy`; nothing is sampled.

    `ess`: the effective sample size of the token weights, as a share of the tokens. `touched`: see
    `loss_of`.
    """
    new = logprobs_of(theta, task).requires_grad_()
    old = logprobs_of(behaviour, task)
    advantages = task.rewards - expected_reward(behaviour, task)
    loss, touched = loss_of(method, new, old, advantages, staleness)
    slopes = -len(new) * torch.autograd.grad(loss, new)[0]  # [R, T]
    gradients = response_gradients(slopes, theta, task)
    chances = chances_of(old)
    facts = accuracy(gradients, chances, true_gradient(theta, task))
    weights = slopes / advantages[:, None]  # [R, T]
    squares = (chances @ weights.square()).mean().clamp_min(1e-300)
    ess = float((chances @ weights).mean() ** 2 / squares)
    return gradients, facts | {"ess": ess, "touched": touched}


def objectives_part(task: EnumeratedTask) -> dict:
    """Facts of `examine` for every method and staleness."""
    chain = policies(task)
    curves = {}
    for method in METHODS:
        found = [examine(method, task, theta, chain[0], s) for s, theta in enumerate(chain)]
        curves[method] = column(found, 1)
    return curves


def kl_part(task: EnumeratedTask) -> dict:
    """The KL estimators against KL(pi || pi_ref), pi_ref = step 0."""
    first, *chain = policies(task)
    older = [first, first, *chain]  # by two steps
    curves = {}
    for name in KL_ESTIMATORS:
        pairs = zip(chain, older, strict=False)
        curves[name] = [examine_kl(name, task, *pair, first) for pair in pairs]
    return curves


def true_kl(theta: Tensor, first: Tensor, task: EnumeratedTask) -> Tensor:
    """KL(theta || first): a sum over all responses."""
    logprobs = logprobs_of(theta, task)
    return chances_of(logprobs) @ (logprobs - logprobs_of(first, task)).sum(1)


def examine_kl(name, task: EnumeratedTask, theta: Tensor, older: Tensor, first: Tensor) -> dict:
    """Value and gradient of an estimator of the KL from `theta` to `first`.

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
    return {
        "kl": float(true_kl(theta, first, task)),
        "value": float(mean),
        "deviation": float((chances @ (values - mean) ** 2).sqrt()),
        "gradient_error": accuracy(gradients, chances, truth)["bias"],
    }


def draw(folder: Path, result: dict) -> None:
    """lab_objectives.png and lab_kl.png, one message each."""
    labels = {
        "bias": "bias / length of the true gradient",
        "ess": "effective sample size\n(share of tokens)",
        "spread": "standard deviation of one response\n/ length of the true gradient",
    }
    alike: dict[str, list] = {}  # what is the same at all ages is one line
    for name, facts in result["three tokens"].items():
        alike.setdefault(str(np.round(column(facts, "bias"), 6)), []).append(name)
    panels = []
    for key, label in labels.items():
        curves = {}
        for names in alike.values():
            values = column(result["three tokens"][names[0]], key)
            curves[", ".join(names)] = (None, STALENESS, values)
        panels.append((curves, {"xlabel": "staleness (optimizer steps)", "ylabel": label}))
    title = "Whole-response weights (sequence_is) have no bias; their price is variance"
    draw_panels(folder / "lab_objectives.png", title, panels, (9, 7))
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
        panels.append((curves, axis | {"xscale": "log", "yscale": "log"}))
    draw_panels(folder / "lab_kl.png", "k1 and k3: the value is right, the gradient wrong", panels)


def bench_lab(folder: Path) -> None:
    """Measure everything; lab.json and lab_*.png in `folder`."""
    torch.set_num_threads(1)
    result = {"seed": SEED}
    for name, task in TASKS.items():
        result[name] = objectives_part(task)
        result[f"kl, {name}"] = kl_part(task)
    result |= {"credit": credit_part(), "critic": critic_part()}
    result |= {"lengths": drop_part(), "swap": swap_part(enumerate_task(4, 4))}
    task = TASKS["three tokens"]
    result |= {"baselines": baseline_part(task), "dampers": damper_part(task)}
    result["preferences"] = preference_part(task)
    save_result(folder, "lab", result)
    draw(folder, result)
    draw_credit(folder, result)
