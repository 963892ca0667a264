"""What the pipeline does to the data before an objective sees them, against the truth.

Two choices of train_async.py. `--swap`: a real GPT with a real cache, of which every response is
enumerated, so that what each mode samples and records is known exactly. `--on-stale`: the real
Buffer in the simulated pipeline, with answers of which a few are very long. `bench_lab` of exact.py
runs both. Left out: what an objective makes of such data (exact.py), prompts that differ in
difficulty.

Axes: R responses · T tokens of a response, so responses are [R, T] and rewards [R].
"""

import copy
from itertools import product

import numpy as np
import torch

from cache import decode, make_cache, prefill
from lab.pipeline import Costs, Pipeline, end
from logprobs import generated_logprobs
from model import GPT, ModelConfig, pack_tokens
from runtime.config import Config

PROMPT, ALPHABET = [5, 6, 7, 5, 6, 4], torch.arange(4)

MODES = ("recompute", "keep", "drain")

STEPS = range(1, 9)  # optimizer steps between the old weights and the new ones


def learner_logprobs(model, responses):
    """Log-probs [R, T] in one forward pass, without any cache: what the learner computes."""
    sequences = [PROMPT + response for response in responses.tolist()]
    rows = torch.arange(sum(map(len, sequences))).view(len(sequences), -1)[:, len(PROMPT) :]
    packed = pack_tokens(sequences)
    return generated_logprobs(model, packed, rows.flatten(), ALPHABET, 1.0)[0].view(rows.shape)


def train_model(responses, rewards):
    """A tiny GPT (float64) after 0, 1, ... plain gradient steps on the enumerated objective."""
    config = ModelConfig(2, 16, 2, 1, 8, 32, vocab_size=8, context=16, init_std=0.3)
    model = GPT(config, seed=0).on("cpu", torch.float64)
    models = [copy.deepcopy(model)]
    for _ in STEPS:
        model.flat_grad.zero_()
        (-learner_logprobs(model, responses).sum(1).exp() @ rewards).backward()
        model.flat.sub_(0.02 * model.flat_grad)
        models.append(copy.deepcopy(model))
    return models


@torch.no_grad()
def swapped_logprobs(a, b, responses, boundary, mode):
    """Log-probs [R, T] as the generator records them when model b replaces a after some tokens.

    The same calls as in rollout.py. keep goes on with the keys and values of a (PipelineRL),
    recompute computes them again with b (AReaL), drain finishes with a.
    """
    count, start = len(responses), len(PROMPT) - 1  # decoding begins with the last prompt token
    slots = torch.arange(count)
    model, recorded = a, []
    known = torch.cat([torch.tensor(PROMPT).expand(count, -1), responses], 1)
    total = known.shape[1]
    cache = make_cache(a, count, total)
    prefill(a, cache, slots, known[:, :start].tolist())
    for cached in range(start, total - 1):
        if cached == start + boundary and mode != "drain":
            model = b
            if mode == "recompute":
                prefill(b, cache, slots, known[:, :cached].tolist())
        hidden = decode(model, cache, known[:, cached], torch.full((count,), cached))
        logprobs = torch.log_softmax(model.logits(hidden, ALPHABET), -1)
        recorded.append(logprobs.gather(1, known[:, cached + 1, None]))
    return torch.cat(recorded, 1)


def swap_part(task):
    """KL of what each mode samples after the swap, to the new weights b and to the old ones a.

    `whole_response_to_b` counts the tokens before the swap, too.
    """
    models = train_model(task.tokens, task.rewards)
    curves = {}
    with torch.no_grad():
        pure = [learner_logprobs(model, task.tokens) for model in models]
    for mode, boundary in product(MODES, range(1, task.tokens.shape[1])):
        rows = curves[f"{mode}, {boundary}"] = []
        for s in STEPS:
            recorded = swapped_logprobs(models[0], models[s], task.tokens, boundary, mode)
            chances = recorded.sum(1).exp()
            to_b = chances @ (recorded - pure[s])  # [T]
            to_a = chances @ (recorded - pure[0])
            kls = {"whole_response_to_b": to_b, "to_b": to_b[boundary:], "to_a": to_a[boundary:]}
            rows.append({name: float(kl.sum()) for name, kl in kls.items()})
    return curves


def drop_part(steps=375):
    """Lengths of what is admitted and of what is trained, by rule; time in decode steps.

    Eight answers a batch, staleness at most 2; a learner step takes as long as a median answer.
    Log-normal lengths, sigma 1, median 100.
    """
    lengths = np.ceil(100 * np.exp(np.random.default_rng(0).standard_normal(3000)))
    starts = np.linspace(0, steps, len(lengths))  # the simulation draws them by version
    groups = np.stack([starts, 0 * lengths, lengths], 1).astype(int).tolist()
    costs = Costs(step=1.0, train=100.0, groups=groups)
    sizes = {"steps": steps, "slots": 64, "groups_per_step": 8, "group_size": 1}
    curves = {}
    for rule in ("wait", "drop"):
        config = Config(**sizes, rollout_workers=1, on_stale=rule)
        events = Pipeline(config, costs).run().events
        length = {e["group"]: float(e["lengths"][0]) for e in events["score"]}
        trained = [length[group] for e in events["train"] for group in e["groups"]]
        facts = curves[rule] = {"time": end(events["train"][-1])}
        for name, values in {"admitted": [*length.values()], "trained": trained}.items():
            total = sum(values)
            facts[name] = {"answers": len(values), "tokens": total, "mean": total / len(values)}
    return curves
