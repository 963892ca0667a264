"""The simulated pipeline (pipeline.py), asked what published systems should have gained.

`bench_scale` predicts what they have gained over synchronous training, from costs that arithmetic
gives for a language model on a GPU (`ASSUMED`): nobody has published an event log. It also says at
how many GPUs the parent becomes the limit.

Left out: memory: every split of the devices fits.
"""

from dataclasses import replace
from pathlib import Path

import numpy as np
from tqdm import tqdm

from lab.pipeline import Costs, predict
from lab.plots import print_table, save_result
from runtime.config import Config

KEEP = 500  # groups to draw from


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
    "one parent, on two cores of an Intel Xeon, beside the learner's step",
    "the baseline generates with continuous batching, then trains, on the same devices",
)

PUBLISHED = (  # what, source, devices, billions of parameters, their speed-up
    ("AReaL 1.5B, 16 nodes", "arXiv 2505.24298 [P]", 128, 1.5, "2.77x"),
    ("AReaL 7B, 24 nodes", "arXiv 2505.24298 [P]", 192, 7.0, "2.27x"),
    ("PipelineRL 7B, 128 H100", "arXiv 2509.19128 [P]", 128, 7.0, "about 2x"),
    ("ROLL Flash RLVR (128 GPUs, 7B assumed)", "arXiv 2510.11345 [P]", 128, 7.0, "2.24x"),
    ("device utilisation (128 GPUs, 7B assumed)", "article [S]", 128, 7.0, "52% -> 87%"),
)

PROMPTS = 512  # a step
ANSWER = 6000  # tokens, about, on the mean
# seconds of a group of the parent's time, and more for each megabyte of it (docs/scale.md)
PARENT = {"parent_group": 7.07e-4, "parent_mb": 8.78e-4}


def language_model(billions: float, answer: float = ANSWER) -> Costs:
    """Costs of a language model on a GPU by arithmetic: see ASSUMED. answer: its mean length."""
    random, weights = np.random.default_rng(0), 1e9 * billions
    prompts = 0.7 * answer * np.exp(0.6 * random.standard_normal((KEEP, 1)))
    answers = prompts * np.exp(0.6 * random.standard_normal((KEEP, 16)))
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
        **PARENT,
        groups=[[0, 512, *row] for row in lengths.tolist()],
    )


def compare(config: Config, costs: Costs, devices: int) -> dict:
    """Asynchronous training with the best split, over synchronous training on as many devices."""
    after = best_split(config, costs, devices)
    roles = {"rollout_workers": devices, "learners": devices, "max_staleness": 0}
    before = predict(replace(config, **roles, steps=7), costs, synchronous=True)
    return {
        "speed_up": round(after["tokens_per_s"] / before["tokens_per_s"], 2),
        "utilisation": f"{1 - before['idle']:.0%} -> {1 - after['idle']:.0%}",
    }


SCALE = {"steps": 12, "slots": 256, "reward_workers": 16, "reference_every": 0}


def bench_scale(folder: Path) -> None:
    """Predicted speed-ups of published systems, beside what they say themselves, and where one
    parent is not enough; scale.json."""
    config, published = Config(**SCALE, groups_per_step=PROMPTS), []
    for what, source, devices, billions, claim in tqdm(PUBLISHED):
        row = {"what": what, "source": source, "billions": billions, "published": claim}
        published.append(row | compare(config, language_model(billions), devices))
        save_result(folder, "scale", {"assumed": ASSUMED, "published": published, "parent": []})
    limits = [parent_limit(config, *case) for case in tqdm(LIMITS)]
    save_result(folder, "scale", {"assumed": ASSUMED, "published": published, "parent": limits})
    print("assumed:", *ASSUMED, sep="\n")
    print_table(limits)


LIMITS = ((0.5, 500), (0.5, ANSWER), (1.5, ANSWER), (7.0, ANSWER), (32.0, ANSWER))


def parent_limit(config: Config, billions: float, answer: float, devices: int = 128) -> dict:
    """From how many devices on one parent is the limit: as many times more than these as it is
    less than busy with them. So larger machines are to have larger batches, too."""
    costs = language_model(billions, answer)
    found = best_split(config, costs, devices)
    tokens = np.mean([sum(lengths) for _, _, *lengths in costs.groups])  # of a group
    row = {"billions": billions, "answer": answer, "devices": devices}
    row["groups_per_s"] = float(found["tokens_per_s"] / tokens)
    return row | {"parent_busy": found["parent"], "limit": round(devices / found["parent"])}
