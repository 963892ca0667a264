"""lab_pipeline.py: what the pipeline does to the data, before any objective sees them.

Two choices of train_async.py against the truth. `--swap`: a real GPT with a real cache, of which
every response is enumerated, so that what each mode samples and records is known exactly.
`--on-stale`: the real Buffer in the discrete-event pipeline, with answers whose lengths have a
heavy tail. `python lab.py` runs both and writes them to results/lab.json. Left out: what an
objective makes of such data (lab.py), prompts that differ in difficulty.

Axes: R responses · T tokens of a response. Claims are those of lab.py.
"""

import copy
from itertools import product

import numpy as np
import torch
from torch import Tensor

import losses
from cache import decode, make_cache, prefill
from lab.pipeline import Costs, Pipeline, Setup, end
from lab.plots import BLUE, GREY, ORANGE, draw_panels
from model import GPT, ModelConfig, generated_logprobs, pack_tokens

PROMPT, LETTERS = [5, 6, 7, 5, 6, 4], torch.arange(4)


MODES = {"recompute": BLUE, "keep": ORANGE, "drain": GREY}


STEPS = range(1, 9)  # between the weights before a swap and behind it


LENGTHS = {
    ("wait", "trained"): BLUE,
    ("drop", "trained"): ORANGE,
    ("drop", "admitted"): GREY + "--",
}


SHARES = np.geomspace(1, 0.001, 100)  # of answers that are at least so long


def learner_logprobs(model: GPT, responses: Tensor) -> Tensor:
    """Log-probs [R, T] in one forward pass, without any cache: what the learner computes."""
    sequences = [PROMPT + response for response in responses.tolist()]
    rows = torch.arange(sum(map(len, sequences))).view(len(sequences), -1)[:, len(PROMPT) :]
    packed = pack_tokens(sequences)
    return generated_logprobs(model, packed, rows.flatten(), LETTERS, 1.0)[0].view(rows.shape)


def train_model(responses: Tensor, rewards: Tensor, seed: int) -> list[GPT]:
    """A tiny GPT (float64) after 0, 1, ... plain gradient steps on the enumerated objective."""
    config = ModelConfig(2, 16, 2, 1, 8, 32, vocab_size=8, context=16, init_std=0.3)
    model = GPT(config, seed).double()
    model.flatten()
    models = [copy.deepcopy(model)]
    for _ in STEPS:
        model.flat_grad.zero_()
        (-learner_logprobs(model, responses).sum(1).exp() @ rewards).backward()
        model.flat.sub_(0.02 * model.flat_grad)
        models.append(copy.deepcopy(model))
    return models


@torch.no_grad()
def swapped_logprobs(a: GPT, b: GPT, responses: Tensor, boundary: int, mode: str) -> Tensor:
    """Log-probs [R, T] as the generator records them when b replaces a after `boundary` tokens.

    The same calls as rollout.py: keep goes on with a's keys and values, recompute rebuilds them
    with b, drain finishes with a (PipelineRL, AReaL, and neither; see README).
    """
    count, start = len(responses), len(PROMPT) - 1  # the last prompt token is fed by decode
    slots, model, recorded = torch.arange(count), a, []
    known = torch.cat([torch.tensor(PROMPT).expand(count, -1), responses], 1)
    cache = make_cache(a, count, known.shape[1])
    prefill(a, cache, slots, known[:, :start].tolist())
    for t, fed in enumerate(range(start, known.shape[1] - 1)):
        if t == boundary and mode != "drain":
            model = b
            if mode == "recompute":
                prefill(b, cache, slots, known[:, :fed].tolist())
        hidden = decode(model, cache, known[:, fed], torch.full((count,), fed), fed)
        logprobs = torch.log_softmax(model.logits(hidden, LETTERS), -1)
        recorded.append(logprobs.gather(1, responses[:, t : t + 1]))
    return torch.cat(recorded, 1)


def swap_part(task, seed: int) -> tuple[dict, list[tuple]]:
    """KL of what each mode samples behind the boundary to pure b and to pure a; of the whole
    response to b. The claims are about a swap after two tokens, at the largest distance."""
    models = train_model(task.tokens, task.rewards, seed)
    curves, claims = {}, []
    with torch.no_grad():
        pure = [learner_logprobs(model, task.tokens) for model in models]
    for mode, boundary in product(MODES, range(1, task.tokens.shape[1])):
        curves[f"{mode}, {boundary}"] = []
        for s in STEPS:
            recorded = swapped_logprobs(models[0], models[s], task.tokens, boundary, mode)
            ratios = {"whole_response_to_b": recorded - pure[s]}
            ratios["to_b"] = ratios["whole_response_to_b"][:, boundary:]
            ratios["to_a"] = (recorded - pure[0])[:, boundary:]
            chance = recorded.sum(1).exp()
            facts = {k: float(chance @ log_ratio.sum(1)) for k, log_ratio in ratios.items()}
            curves[f"{mode}, {boundary}"].append(facts)
        if boundary == 2:
            values = losses.k3(recorded[:, boundary:], pure[s][:, boundary:]).sum(1)
            claims.append((f"KL({mode} || new weights), k3", values, chance, facts["to_b"], True))
    return curves, claims


def drop_part(seed: int, steps: int = 375) -> tuple[dict, list[tuple]]:
    """Lengths of what is admitted and of what is trained, by rule; time in decode steps.

    Eight answers a batch, staleness at most 2; a learner step takes as long as a median answer.
    Log-normal lengths, sigma 1, median 100.
    """
    lengths = np.ceil(100 * np.exp(np.random.default_rng(seed).standard_normal(3000)))
    starts = np.linspace(0, steps, len(lengths))  # the pipeline draws them by version
    groups = np.stack([starts, 0 * lengths, lengths], 1).astype(int).tolist()
    costs = Costs(step=1.0, train=100.0, groups=groups)
    curves, claims = {}, []
    for rule in ("wait", "drop"):
        setup = Setup("tail", steps, 64, group_size=1, groups_per_step=8, eta=2, on_stale=rule)
        events = Pipeline(setup, costs, seed).run().events
        length = {e["group"]: float(e["lengths"][0]) for e in events["score"]}
        trained = [length[group] for e in events["train"] for group in e["groups"]]
        curves[rule] = {"time": end(events["train"][-1])}
        for name, values in (("admitted", [*length.values()]), ("trained", trained)):
            facts = dict(answers=len(values), tokens=sum(values), mean=sum(values) / len(values))
            curves[rule][name] = facts | {"at_least": np.quantile(values, 1 - SHARES).tolist()}
        kept, truth = torch.tensor(trained).double(), curves[rule]["admitted"]["mean"]
        chance = torch.full_like(kept, 1 / len(kept))
        claims.append((f"length trained, {rule}", kept, chance, truth, rule == "wait"))
    return curves, claims


def draw(result: dict) -> None:
    """lab_swap.png and lab_drop.png, one message each."""
    kl = {mode: [max(f["to_b"], 1e-6) for f in result["swap"][f"{mode}, 2"]] for mode in MODES}
    curves = {mode: (colour, STEPS, kl[mode]) for mode, colour in MODES.items()}
    words = dict(xlabel="optimizer steps between old and new weights", yscale="log")
    words["ylabel"] = "KL(sampled || new weights), last 2 tokens\n(nats; 0 is drawn at 0.000001)"
    title = "A kept cache costs a little, draining much more, recomputing nothing"
    draw_panels("lab_swap", title, [(curves, words)])
    curves = {}
    for (rule, name), style in LENGTHS.items():
        facts = result["lengths"][rule][name]
        curves[f"{name} ({rule}): mean {facts['mean']:.0f}"] = (style, facts["at_least"], SHARES)
    words = dict(xlabel="length of an answer (tokens)", xscale="log", yscale="log")
    words["ylabel"] = "share at least as long"
    title = "Dropping stale work removes the long answers; waiting keeps them"
    draw_panels("lab_drop", title, [(curves, words)])
