"""simulate.py: a simulated pipeline, asked what published systems should have gained.

A loop over the ticks of a clock. What decides is real: `Buffer` admits groups and picks batches.
What takes time is not: `Costs` says how long each thing takes. Synchronous training is the same
pipeline with eta = 0 in which all devices generate, then all train.

`python bench.py scale` predicts what published systems have gained, from costs that arithmetic
gives for a language model on a GPU (`ASSUMED`): nobody has published an event log.
Left out: faults, slow environments, the parent's time, swaps that rebuild or drain the cache,
networks (but for one all-reduce a step), and memory: every split of the devices fits.

Axes: W workers · S slots of each
"""

from collections import deque
from dataclasses import dataclass, field, replace
from itertools import count, cycle
from pathlib import Path
from types import SimpleNamespace

import numpy as np
from tqdm import tqdm

from buffer import Buffer, staleness
from lab.plots import column, save_result
from runtime.config import Config
from runtime.messages import Group


@dataclass
class Costs:
    """Seconds of everything that takes time on one device, and the episodes of a task."""

    tick: float = 1.0  # of the simulated clock
    step: float = 0.0  # a decode step, however full
    step_running: float = 0.0  # added for each slot that is busy
    prefill: float = 0.0  # of a token of a group's prompt
    score: float = 0.0  # the verification of a group; there are reward workers enough
    train: float = 0.0  # an optimizer step, whatever is in it
    train_token: float = 0.0  # added for each token of the episodes, prompts included
    all_reduce: float = 0.0  # several learners join their gradients
    publish: float = 0.0  # new weights are written for the workers
    # a group: tokens of its prompt, tokens of each whole episode; again from the first at the end
    groups: list[list[int]] = field(default_factory=list)


def simulate(config: Config, costs: Costs) -> tuple[list[dict], dict[int, list]]:
    """A row for each training step, and of every admitted group the tokens of its episodes."""
    buffer = Buffer(config.groups_per_step, config.max_staleness, config.on_stale)
    left = np.zeros((config.rollout_workers, config.slots))  # [W, S] tokens still to generate
    sample_of = {}  # (worker, slot) -> (group, sample)
    debt = np.zeros(len(left))  # [W] seconds of prompts that are still to be computed
    lengths, steps = {}, []  # group id -> tokens of its episodes; trained steps
    load = np.zeros(len(left), int)  # [W] groups of each worker
    waiting = [deque() for _ in left]  # of each worker, samples without a slot
    verifying = []  # (when it is done, group)
    ids, groups = count(), cycle(costs.groups)
    version, now, busy_until, generated = 0, 0.0, 0.0, 0.0

    while True:
        # verify
        for done, group in [pair for pair in verifying if pair[0] <= now]:
            buffer.complete(group)
            load[group.problem["worker"]] -= 1
            verifying.remove((done, group))
        if now >= busy_until:  # publish, admit, learn
            version = len(steps)
            if version == config.steps:
                return steps, lengths
            wanted = (config.steps - version) * config.groups_per_step
            while len(buffer.outstanding) < wanted and buffer.may_admit(version):
                prompt, *tokens = next(groups)
                worker = int(load.argmin())
                load[worker] += 1
                group = Group(next(ids), version, {"worker": worker, "prompt": prompt})
                lengths[group.group_id] = tokens
                buffer.admit(group.group_id, version)
                waiting[worker].extend((group, n, prompt * (i == 0)) for i, n in enumerate(tokens))
            if batch := buffer.next_batch(version):
                steps.append(train(batch, version, config, costs))
                steps[-1] |= {"begin": now, "generated": generated}
                busy_until = now + steps[-1]["seconds"] + costs.publish
            buffer.dropped.clear()
        # generate
        for worker, queue in enumerate(waiting):
            for slot in np.flatnonzero(left[worker] == 0)[: len(queue)] if queue else ():
                group, tokens, prompt = queue.popleft()
                sample_of[worker, slot] = (group, SimpleNamespace(oldest=version, tokens=tokens))
                left[worker, slot] = max(1, tokens - group.problem["prompt"])
                debt[worker] += prompt * costs.prefill
        running = (left > 0).sum(1)  # [W]
        seconds = (costs.tick - debt).clip(0)
        debt = (debt - costs.tick).clip(0)
        pace = costs.step + costs.step_running * running  # [W] seconds a token
        busy = left > 0
        left -= busy * (seconds / pace)[:, None]
        generated += costs.tick * (running > 0).sum()
        now += costs.tick
        for place in zip(*np.nonzero(busy & (left < 1e-6)), strict=True):
            group, sample = sample_of.pop(place)
            left[place] = 0.0
            group.trajectories.append(sample)
            if len(group.trajectories) == len(lengths[group.group_id]):
                verifying.append((now + costs.score, group))


def train(batch: list[Group], version: int, config: Config, costs: Costs) -> dict:
    """What a step trains, and how long it takes."""
    samples = [sample for group in batch for sample in group.trajectories]
    tokens, learners = sum(sample.tokens for sample in samples), config.team_size
    seconds = costs.train + tokens * costs.train_token / learners
    return {
        "groups": [group.group_id for group in batch],
        "tokens": tokens,
        "staleness": float(np.mean([staleness(sample, version) for sample in samples])),
        "seconds": seconds + costs.all_reduce * (learners > 1),
    }


def predict(config: Config, costs: Costs, synchronous: bool = False) -> dict[str, float]:
    """Tokens trained a second, idle share of all devices, mean staleness; measured while the
    pipeline is full: without the first and last eta + 1 steps."""
    steps, _ = simulate(config, costs)
    first, last = 1 + config.max_staleness, config.steps - 1 - config.max_staleness
    begin, stop, rows = steps[first], steps[last], steps[first:last]
    seconds, learners = stop["begin"] - begin["begin"], config.team_size
    work = stop["generated"] - begin["generated"] + learners * sum(column(rows, "seconds"))
    # in a synchronous run the devices that train are those that generate
    devices = config.rollout_workers + learners * (not synchronous)
    return {
        "tokens_per_s": sum(column(rows, "tokens")) / seconds,
        "idle": float(1 - work / (seconds * devices)),
        "staleness": float(np.mean(column(rows, "staleness"))),
    }


# ------------------------------------------------------------------------------ published systems

# One GPU with 3 TB/s and 1 PFLOP/s in bf16 (an H100 or H800), and a language model on it.
ASSUMED = (
    "device: 3 TB/s, 1 PFLOP/s bf16, of which training and prefill reach 40%",
    "decode step: 4 ms + the weights once (2 bytes each) + every running cache once",
    "cache: 20 kB x sqrt(billions of parameters) a token; 256 slots a device",
    "training: 8 FLOPs a parameter and token (activations recomputed); any split of devices",
    "gradients: 2 bytes a parameter twice through 100 GB/s; publication 1 s",
    "answers: 16 to a prompt, 512 prompts a step, log-normal with sigma 0.6 between prompts and "
    "0.6 inside a group, mean about 6,000 tokens, at most 27,648; prompts of 512 tokens",
    "eta = 2, caches kept, nobody fails; a verification takes 0.1 s, and 16 run at once",
    "the baseline generates with continuous batching, then trains, on the same devices",
)
PUBLISHED = (  # what, source, devices, billions of parameters, their speed-up
    ("AReaL 1.5B, 16 nodes", "arXiv 2505.24298 [P]", 128, 1.5, "2.77x"),
    ("AReaL 7B, 24 nodes", "arXiv 2505.24298 [P]", 192, 7.0, "2.27x"),
    ("PipelineRL 7B, 128 H100", "arXiv 2509.19128 [P]", 128, 7.0, "about 2x"),
    ("ROLL Flash RLVR (128 GPUs, 7B assumed)", "arXiv 2510.11345 [P]", 128, 7.0, "2.24x"),
    ("device utilisation (128 GPUs, 7B assumed)", "article [S]", 128, 7.0, "52% -> 87%"),
)
SCALE = {"steps": 12, "slots": 256, "reward_workers": 16, "groups_per_step": 512}


def language_model(billions: float) -> Costs:
    """Costs of a language model on a GPU by arithmetic: see ASSUMED."""
    random, weights = np.random.default_rng(0), 1e9 * billions
    prompts = 4200 * np.exp(0.6 * random.standard_normal((500, 1)))
    answers = prompts * np.exp(0.6 * random.standard_normal((500, 16)))
    lengths = 512 + np.clip(answers, 64, 27648).astype(int)
    cache = 2e4 * billions**0.5 * float((lengths**2).sum() / lengths.sum()) / 2
    return Costs(
        step=4e-3 + 2 * weights / 3e12,
        step_running=cache / 3e12,
        prefill=2 * weights / 4e14,
        score=0.1,
        train_token=8 * weights / 4e14,
        all_reduce=2 * 2 * weights / 1e11,
        publish=1.0,
        groups=[[512, *row] for row in lengths.tolist()],
    )


def best_split(config: Config, costs: Costs, devices: int) -> dict:
    """`predict` for the quickest split of the devices in eighths.

    Speed rises with the number of learners, then falls: the search ends where it falls.
    """
    best = {"tokens_per_s": 0.0}
    for learners in sorted({max(1, devices * eighths // 8) for eighths in range(1, 8)}):
        roles = {"rollout_workers": devices - learners, "learners": learners}
        row = roles | predict(replace(config, **roles), costs)
        if row["tokens_per_s"] < best["tokens_per_s"]:
            break
        best = row
    return best


def bench_scale(folder: Path) -> None:
    """Predicted speed-ups of published systems, beside what they say themselves; scale.json."""
    config, result = Config(**SCALE), {"assumed": ASSUMED, "published": []}
    for what, source, devices, billions, claim in tqdm(PUBLISHED):
        costs = language_model(billions)
        after = best_split(config, costs, devices)
        roles = {"rollout_workers": devices, "learners": devices, "max_staleness": 0, "steps": 7}
        before = predict(replace(config, **roles), costs, synchronous=True)
        row = {"what": what, "source": source, "billions": billions, "published": claim}
        row["speed_up"] = round(after["tokens_per_s"] / before["tokens_per_s"], 2)
        row["utilisation"] = f"{1 - before['idle']:.0%} -> {1 - after['idle']:.0%}"
        result["published"].append(row)
        save_result(folder, "scale", result)
    print("assumed:", *ASSUMED, sep="\n")
