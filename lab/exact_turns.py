"""Credit for turns, against the truth: a task of two turns of which every group is enumerated.

The policy says one of three words. The environment answers well or badly: chance decides, and the
word how likely it is. The policy says another word, which earns 1 if the answer was good and the
word fits. The word 2 earns `pay` in the first turn, too; where the first turn `may_end` the
episode, the word 1 does. So a first word earns now, and decides what can be earned later.
`credit_part`: advantages inside groups of three. `critic_part`: a critic instead of a group.
Left out: samples of an older policy (exact.py), and training a critic.

Axes: R responses · D entries of the policy's table · C groups.
"""

from functools import partial
from itertools import product
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

import losses
from lab.estimators import (
    accuracy,
    chances_of,
    logprobs_of,
    mean_given,
    policies,
    response_gradients,
    true_gradient,
)
from runtime.pictures import column, draw_panels

CASES = {"two turns": False, "may end in turn 1": True}
CREDITS = ("turn", "episode")
PAYS = [i / 4 for i in range(-4, 5)]
LAMBDAS = (0.0, 0.25, 0.5, 0.75, 0.95, 1.0)
OBSERVED = 8  # tokens of an observation; the first one says whether it is good


class TurnTask(NamedTuple):
    """Every response of a task of two turns; the first four fields are an `EnumeratedTask`'s.

    After an end the second word is still enumerated, and counts for nothing.
    """

    tokens: Tensor  # int64 [R, 2]: the two words
    prefix: Tensor  # int64 [R, 2]
    rewards: Tensor  # [R]: the return times `luck`, so that J is the sum of pi(y) R(y)
    shape: tuple[int, int]
    turn_rewards: Tensor  # [R, 2]
    present: Tensor  # bool [R, 2]
    luck: Tensor  # [R]: chance that the environment answers so


def enumerate_turns(pay: float = 0.5, may_end: bool = False) -> TurnTask:
    """All words, answers and words: R = 3 x 2 x 3."""
    first, good, second = torch.cartesian_prod(*map(torch.arange, (3, 2, 3))).T
    present = torch.stack([first >= 0, (first != 1) | (not may_end)], 1)
    earned = torch.stack([pay * (first == 2), good * (second == (first + 1) % 3)], 1)
    earned = earned.double() * present
    well = (0.1 + 0.4 * first).double()
    luck = torch.where(good == 1, well, 1 - well)
    tokens = torch.stack([first, second], 1)
    prefix = torch.stack([0 * first, 1 + 2 * first + good], 1)
    return TurnTask(tokens, prefix, luck * earned.sum(1), (7, 3), earned, present, luck)


def group_gradients(theta: Tensor, task: TurnTask, credit: str, kind: str) -> tuple:
    """Gradient [C, D] of every group of three (the mean of its samples'), chances [C], truth."""
    scores = torch.func.jacrev(logprobs_of)(theta, task).flatten(2)  # [R, 2, D]
    scores = scores * task.present[:, :, None]
    chances = chances_of(logprobs_of(theta, task)) * task.luck  # [R]
    groups = torch.cartesian_prod(*[torch.arange(len(chances))] * 3)  # [C, 3]
    rewards, present = task.turn_rewards[groups], task.present[groups]  # [C, 3, 2]
    if credit == "episode":  # as if it were one turn
        rewards, present = rewards.sum(2, keepdim=True), present[:, :, :1]
    advantages, _ = losses.turn_advantages(rewards, present, kind)
    gradients = torch.einsum("cnt,cntd->cd", advantages.expand(-1, -1, 2), scores[groups]) / 3
    return gradients, chances[groups].prod(1), true_gradient(theta, task)


def credit_part() -> dict:
    """Both kinds of credit for each of `PAYS`, one policy, over all groups of three."""
    theta = policies(enumerate_turns())[2]
    curves = {}
    for (case, may_end), credit, kind in product(CASES.items(), CREDITS, losses.ADVANTAGES):
        rows = curves[f"{case}, {credit}, {kind}"] = []
        for pay in PAYS:
            found = group_gradients(theta, enumerate_turns(pay, may_end), credit, kind)
            rows.append(accuracy(*found))
    return curves


def critic_part() -> dict:
    """Generalized advantage estimates of one response, for each of `LAMBDAS`.

    The critic is `true` and knows what the policy will earn on average, or `blind` and knows the
    mean of each turn only. Observations are `skipped`, or `inside` the sum: there the critic's
    value of every token counts, and credit for what follows must pass all of them.
    """
    task = enumerate_turns()
    theta = policies(task)[2]
    chances = chances_of(logprobs_of(theta, task)) * task.luck
    truth = true_gradient(theta, task)
    nothing, answer = task.prefix.T
    known = {"true": (nothing, task.tokens[:, 0], answer), "blind": (nothing, nothing, nothing)}
    returns = task.turn_rewards.sum(1), *[task.turn_rewards[:, 1]] * 2  # from each of them on
    curves = {}
    for critic, way in product(known, ("skipped", "inside")):
        start, said, seen = map(partial(mean_given, chances), known[critic], returns)
        before = [start, said, *[seen] * OBSERVED] if way == "inside" else [start, seen]
        values = torch.stack(before, 1)  # [R, tokens]
        rewards = torch.zeros_like(values)
        rewards[:, [0, -1]] = task.turn_rewards
        batch = rewards.flatten(), values.flatten(), [len(before)] * len(values)
        rows = curves[f"{critic}, {way}"] = []
        for lam in LAMBDAS:
            advantages = losses.skip_observation_gae(*batch, lam).view_as(values)[:, [0, -1]]
            gradients = response_gradients(advantages, theta, task)
            rows.append(accuracy(gradients, chances, truth))
    return curves


def draw_credit(folder: Path, result: dict) -> None:
    """lab_credit.png: when credit for turns is quieter, and what a sum over observations costs."""
    curves = {}
    for case in CASES:
        rows = [result["credit"][f"{case}, {credit}, rloo"] for credit in CREDITS]
        ratio = np.divide(*[column(facts, "spread") for facts in rows])
        curves[case] = (None, PAYS, ratio**2)
    axis = {"xlabel": "reward of a word in turn 1 (negative: a price)"}
    axis["ylabel"] = "variance, credit for turns\n/ credit for the episode (rloo)"
    panels = [(curves, axis)]
    rows = result["critic"].items()
    curves = {name: (None, LAMBDAS, column(facts, "bias")) for name, facts in rows}
    axis = {"xlabel": "λ, by critic and observations"}
    panels.append((curves, axis | {"ylabel": "bias / length of the true gradient"}))
    title = "Credit by turn: less variance if turn 1 pays. Skipped observations: less bias"
    draw_panels(folder / "lab_credit.png", title, panels, (8.5, 4))
