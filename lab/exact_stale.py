"""What dampers, the optimal baseline and preferences make of stale data, against the truth.

The enumerated task and the chain of policies are those of exact.py, whose `bench_lab` runs this.
Left out: objectives (exact.py), AdamW between a gradient and a step.

Axes: R responses · D entries of the policy · S staleness
"""

import math
from collections import defaultdict

import torch
from torch import Tensor

import losses
from dampers import naive_brake, naive_gac
from lab.estimators import (
    STALENESS,
    EnumeratedTask,
    accuracy,
    chances_of,
    expected_reward,
    logprobs_of,
    policies,
    response_gradients,
    true_gradient,
)

BATCH = 256  # responses, where a step is asked how noisy it is
BETA = 0.1  # the default of --dpo-beta


def scores_of(theta: Tensor, task: EnumeratedTask) -> Tensor:
    """Gradients [R, D] of the log-probs of whole responses."""
    return response_gradients(torch.ones_like(logprobs_of(theta, task)), theta, task)


# ---- a baseline for stale samples ----


def baseline_part(task: EnumeratedTask) -> dict:
    """Spread of w (R - b) grad log pi, by baseline and staleness. w is the ratio of the whole
    response, so no baseline has a bias.

    `mean` of the rewards; `optimal`, from the true lengths of the gradients; `near`, from the
    lengths that a training step takes for them (learner.py, `importance_weights`).
    """
    chain, found = policies(task), defaultdict(list)
    for theta in chain:
        new, old = logprobs_of(theta, task), logprobs_of(chain[0], task)
        chances, ratios = chances_of(old), (new - old).sum(1).exp()  # [R]
        scores = scores_of(theta, task)
        lengths = {"optimal": scores.norm(dim=1), "near": (1 - new.exp()).norm(dim=1)}
        baselines = {"mean": expected_reward(chain[0], task)}
        for name, norms in lengths.items():
            # as many of each response as its chance says: the square of a weight has the chance
            group = [x[None] for x in (task.rewards, ratios * chances.sqrt(), norms)]
            baselines[name] = losses.optimal_baseline(*group)
        for name, baseline in baselines.items():
            gains = ratios * (task.rewards - baseline)
            gradients = gains.view(-1, 1) * scores
            found[name].append(accuracy(gradients, chances, true_gradient(theta, task)))
    return found


# ---- dampers of the whole step ----


def damper_part(task: EnumeratedTask) -> dict:
    """What dampers make of the expected gradient of `cispo`, when all data are so many steps old;
    by damper, for each staleness below 8.

    `noise` is that of a batch of BATCH responses. `cosine` of the step's gradient and that of the
    step before: in expectation, and as two such batches show it.
    """
    chain, found = policies(task), defaultdict(list)
    truth = true_gradient(chain[8], task)
    for lag in STALENESS[:-1]:
        gradients, chances, ess = cispo_gradients(task, chain[8], chain[8 - lag])
        before, others, _ = cispo_gradients(task, chain[7], chain[7 - lag])
        step, before = chances @ gradients, others @ before  # [D]
        damped = {
            "none": gradients,
            "ess": ess.sqrt() * gradients,
            "gac": gradients - step + naive_gac(step, before),
            "brake": gradients * naive_brake(step, before).norm() / step.norm(),
        }
        for name, changed in damped.items():
            facts = accuracy(changed, chances, truth)
            noise = facts["spread"] / math.sqrt(BATCH)
            found[name].append({"bias": facts["bias"], "share": facts["share"], "noise": noise})
        cosine = float(torch.cosine_similarity(step, before, dim=0))
        signal = float(step.norm() / truth.norm()) ** 2
        noise = found["none"][-1]["noise"] ** 2  # the two are about as noisy
        seen = cosine * signal / (signal + noise)
        found["likeness"].append({"cosine": cosine, "cosine_of_batches": seen})
    return found


def cispo_gradients(task: EnumeratedTask, theta: Tensor, behaviour: Tensor) -> tuple:
    """Of every response: the gradient of `cispo` [R, D] and the chance in samples of `behaviour`
    [R]; and the effective sample size of whole responses."""
    new, old = logprobs_of(theta, task), logprobs_of(behaviour, task)
    chances = chances_of(old)
    weights = (new - old).exp().clamp(max=1 + losses.PUBLISHED.cispo_high)  # [R, T]
    advantages = task.rewards - expected_reward(behaviour, task)
    gradients = response_gradients(weights * advantages[:, None], theta, task)
    ratios = (new - old).sum(1).exp()
    return gradients, chances, (chances @ ratios) ** 2 / (chances @ ratios.square())


# ---- preferences ----


def preference_part(task: EnumeratedTask) -> dict:
    """Groups of two stale responses: online DPO, and `reinforce` with the mean as baseline; all
    pairs are enumerated.

    `cosine` of the expectation and the true gradient, and `noise`, the standard deviation of one
    pair over the length of the expectation. (DPO climbs another hill: its length means nothing.)
    """
    chain, found = policies(task), {"dpo": [], "reinforce": []}
    first = logprobs_of(chain[0], task)
    better, worse = torch.cartesian_prod(*[torch.arange(len(first))] * 2).T
    gap = task.rewards[better] - task.rewards[worse]  # [R R]
    chances = chances_of(first)[better] * chances_of(first)[worse]
    for theta in chain:
        scores = scores_of(theta, task)
        moved = (logprobs_of(theta, task) - first).sum(1)  # the reference is where it began
        push, _ = losses.preference_advantages(moved[better] - moved[worse], BETA)
        for name, weight in {"dpo": push, "reinforce": gap / 2}.items():
            weight = 2 * weight * (gap > 0)  # each pair stands there once, not twice
            gradients = weight[:, None] * (scores[better] - scores[worse])
            mean = chances @ gradients
            cosine = torch.cosine_similarity(mean, true_gradient(theta, task), dim=0)
            noise = accuracy(gradients, chances, mean)["spread"]
            found[name].append({"cosine": float(cosine), "noise": noise})
    return found
