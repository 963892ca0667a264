"""What a run makes of its data, against the truth: credit for turns, swaps, dropping.

`credit_part`: a task of two turns. The policy says one of three words. The
environment answers well or badly: chance decides, and the word how likely it is. The policy says
another word, which earns 1 if the answer was good and the word fits. The word 2 earns `pay` in the
first turn, too; where the first turn `may_end` the episode, the word 1 does. So a first word earns
now, and decides what can be earned later.
`swap_part`: a real GPT with a real cache, of which every response is enumerated.
`drop_part`: the real Buffer in a simulated pipeline, with answers of which a few are very long.
`bench_lab` (one thread, seconds) measures this and exact.py; docs/lab.md reads the results.
Left out: samples of an older policy (exact.py), critics, prompts that differ in difficulty.

Axes: R responses · T tokens of a response · D entries of the policy's table · C groups
"""

import copy
from collections import deque
from itertools import product
from pathlib import Path
from types import SimpleNamespace
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from buffer import Buffer
from cache import decode, make_cache, prefill
from lab.exact import (
    SEED,
    TASKS,
    EnumeratedTask,
    accuracy,
    chances_of,
    enumerate_task,
    logprobs_of,
    objectives_part,
    policies,
    true_gradient,
)
from lab.plots import save_result
from logprobs import generated_logprobs
from methods.turns import turn_advantages
from model import GPT, ModelConfig, pack_tokens
from runtime.config import SWAPS
from runtime.messages import Group

CASES = {"two turns": False, "may end in turn 1": True}
CREDITS, ESTIMATORS = ("turn", "episode"), ("grpo", "mean", "rloo")
PAYS = [i / 4 for i in range(-4, 5)]
TRAIN = 100  # ticks of a learner step, as long as a median answer


# --------------------------------------------------------------------------- credit for turns


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


def group_gradients(theta: Tensor, task: TurnTask, credit: str, estimator: str) -> tuple:
    """Gradient [C, D] of every group of three (the mean of its samples'), chances [C], truth."""
    scores = torch.func.jacrev(logprobs_of)(theta, task).flatten(2)  # [R, 2, D]
    scores = scores * task.present[:, :, None]
    chances = chances_of(logprobs_of(theta, task)) * task.luck  # [R]
    groups = torch.cartesian_prod(*[torch.arange(len(chances))] * 3)  # [C, 3]
    rewards, present = task.turn_rewards[groups], task.present[groups]  # [C, 3, 2]
    if credit == "episode":  # as if it were one turn
        rewards, present = rewards.sum(2, keepdim=True), present[:, :, :1]
    advantages, _ = turn_advantages(rewards, present, estimator)
    gradients = torch.einsum("cnt,cntd->cd", advantages.expand(-1, -1, 2), scores[groups]) / 3
    return gradients, chances[groups].prod(1), true_gradient(theta, task)


def credit_part() -> dict:
    """Both ways of credit for each of `PAYS`, one policy, over all groups of three."""
    theta, curves = policies(enumerate_turns())[2], {}
    for (case, may_end), credit, estimator in product(CASES.items(), CREDITS, ESTIMATORS):
        rows = curves[f"{case}, {credit}, {estimator}"] = []
        for pay in PAYS:
            task = enumerate_turns(pay, may_end)
            rows.append(accuracy(*group_gradients(theta, task, credit, estimator)))
    return curves


# ------------------------------------------------------------------------------- swaps of weights

PROMPT, ALPHABET = [5, 6, 7, 5, 6, 4], torch.arange(4)
STEPS = range(1, 9)  # optimizer steps between the old weights and the new ones


def learner_logprobs(model: GPT, responses: Tensor) -> Tensor:
    """Log-probs [R, T] in one forward pass, without any cache: what the learner computes."""
    sequences = [PROMPT + response for response in responses.tolist()]
    rows = torch.arange(sum(map(len, sequences))).view(len(sequences), -1)[:, len(PROMPT) :]
    packed = pack_tokens(sequences)
    return generated_logprobs(model, packed, rows.flatten(), ALPHABET, 1.0)[0].view(rows.shape)


def train_model(task: EnumeratedTask) -> list[GPT]:
    """A tiny GPT (float64) after 0, 1, ... plain gradient steps on the enumerated objective."""
    config = ModelConfig(2, 16, 2, 1, 8, 32, vocab_size=8, context=16, init_std=0.3)
    model = GPT(config, seed=0).on("cpu", torch.float64)
    models = [copy.deepcopy(model)]
    for _ in STEPS:
        model.flat_grad.zero_()
        (-chances_of(learner_logprobs(model, task.tokens)) @ task.rewards).backward()
        model.flat.sub_(0.02 * model.flat_grad)
        models.append(copy.deepcopy(model))
    return models


@torch.no_grad()
def swapped_logprobs(a: GPT, b: GPT, responses: Tensor, boundary: int, swap: str) -> Tensor:
    """Log-probs [R, T] as the generator records them when model b replaces a after some tokens.

    The same calls as in rollout.py. keep goes on with the keys and values of a (PipelineRL),
    recompute computes them again with b (AReaL), drain finishes with a.
    """
    count, start = len(responses), len(PROMPT) - 1  # decoding begins with the last prompt token
    slots, model, recorded = torch.arange(count), a, []
    known = torch.cat([torch.tensor(PROMPT).expand(count, -1), responses], 1)
    cache = make_cache(a, count, known.shape[1])
    prefill(a, cache, slots, known[:, :start].tolist(), together=count)
    for cached in range(start, known.shape[1] - 1):
        if cached == start + boundary and swap != "drain":
            model = b
            if swap == "recompute":
                prefill(b, cache, slots, known[:, :cached].tolist(), together=count)
        hidden = decode(model, cache, known[:, cached], torch.full((count,), cached))
        logprobs = torch.log_softmax(model.logits(hidden, ALPHABET), -1)
        recorded.append(logprobs.gather(1, known[:, cached + 1, None]))
    return torch.cat(recorded, 1)


def swap_part(task: EnumeratedTask) -> dict:
    """KL of what each mode samples after the swap, to the new weights b and to the old ones a.

    `whole_response_to_b` counts the tokens before the swap, too.
    """
    models, curves = train_model(task), {}
    with torch.no_grad():
        pure = [learner_logprobs(model, task.tokens) for model in models]
    for swap, boundary in product(SWAPS, range(1, task.tokens.shape[1])):
        rows = curves[f"{swap}, {boundary}"] = []
        for s in STEPS:
            recorded = swapped_logprobs(models[0], models[s], task.tokens, boundary, swap)
            to_b, to_a = (chances_of(recorded) @ (recorded - pure[i]) for i in (s, 0))  # [T]
            kls = {"whole_response_to_b": to_b, "to_b": to_b[boundary:], "to_a": to_a[boundary:]}
            rows.append({name: float(kl.sum()) for name, kl in kls.items()})
    return curves


# ------------------------------------------------------------------------- what is too old is lost


def simulated(rule: str, answers: list[int], steps: int) -> tuple:
    """Groups of one answer each pass through the real Buffer; in a tick every slot makes a token.

    Returns the lengths of what was admitted, of what was trained, and the ticks that it took.
    """
    buffer, admitted, trained = Buffer(8, 2, rule), [], []
    waiting, slots, version = deque(), [None] * 64, 0  # of a slot: its group, and when it is done
    now = busy_until = 0
    while True:
        if now >= busy_until:  # publish, admit, learn
            version = len(trained) // 8
            if version == steps:
                return admitted, trained, now
            while len(buffer.outstanding) < 8 * (steps - version) and buffer.may_admit(version):
                buffer.admit(len(admitted), version)
                waiting.append(Group(len(admitted), version, {}))
                admitted.append(answers[len(admitted)])
            if batch := buffer.next_batch(version):
                trained += [admitted[group.group_id] for group in batch]
                busy_until = now + TRAIN
        for i, slot in enumerate(slots):
            if not slot and waiting:
                group = waiting.popleft()
                group.trajectories = [SimpleNamespace(oldest=version)]
                slots[i] = group, now + admitted[group.group_id]
        now += 1
        for i, slot in enumerate(slots):
            if slot and slot[1] <= now:
                buffer.complete(slot[0])
                slots[i] = None


def drop_part(steps: int = 375) -> dict:
    """Lengths of what is admitted and of what is trained, by rule; time in decode steps.

    Eight answers a batch, staleness at most 2; a learner step takes as long as a median answer.
    Log-normal lengths, sigma 1, median 100.
    """
    answers = np.ceil(TRAIN * np.exp(np.random.default_rng(0).standard_normal(5000)))
    curves = {}
    for rule in ("wait", "drop"):
        *both, time = simulated(rule, answers.tolist(), steps)
        facts = curves[rule] = {"time": time}
        for name, values in zip(("admitted", "trained"), both, strict=True):
            total = sum(values)
            facts[name] = {"answers": len(values), "tokens": total, "mean": total / len(values)}
    return curves


def bench_lab(folder: Path) -> None:
    """Measure everything; lab.json in `folder`. (Its pictures were drawn once: nothing moves.)"""
    torch.set_num_threads(1)
    result = {"seed": SEED}
    result |= {name: objectives_part(task) for name, task in TASKS.items()}
    result |= {"credit": credit_part(), "lengths": drop_part()}
    result["swap"] = swap_part(enumerate_task(4, 4))
    save_result(folder, "lab", result)
