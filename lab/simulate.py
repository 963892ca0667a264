"""The simulated pipeline (pipeline.py), calibrated on real runs, checked on others, and asked.

`bench_simulate` calibrates the costs on the runs of `CALIBRATION`, then predicts the runs of
`HELD_OUT`. A prediction is right if tokens a second and mean staleness are within 10% (of one
version, where staleness is less) and the idle share of all processes is within 10 points.

`bench_scale` predicts what published systems have gained over synchronous training, from costs
that arithmetic gives for a language model on a GPU (`ASSUMED`): nobody has published an event log.
It also says at how many GPUs the parent becomes the limit.

Left out: how costs are found in a log (calibrate.py), and memory: every split of the devices fits.
"""

import tempfile
from collections import defaultdict
from dataclasses import replace
from pathlib import Path

import numpy as np
from tqdm import tqdm

from lab.calibrate import KEEP, calibrate, read_run
from lab.pipeline import Costs, PipelineLog, pipeline_metrics, predict
from lab.plots import column, print_table, save_result
from lab.races import run_each
from runtime.config import Config

COMPARED = {"tokens_per_s": 0.0, "idle": 1.0, "staleness": 1.0}  # within 10% of this, or of more

# Runs as a user would start them, without the dashes: what the costs are learned from ...
CALIBRATION = (
    "train_async.py task=sum groups_per_step=8",
    "train_async.py task=sum groups_per_step=24 max_staleness=4 slots=64",
    "train_async.py task=sum groups_per_step=32 max_staleness=0",
    "train_sync.py task=sum groups_per_step=16",
    "train_async.py task=guess groups_per_step=12 slots=64",
    "train_async.py task=guess groups_per_step=32 max_staleness=4",
    "train_async.py task=guess groups_per_step=16 max_staleness=0",
    "train_sync.py task=guess groups_per_step=24",
)

HELD_OUT = (  # ... and what has to be predicted
    "train_async.py task=sum groups_per_step=16 max_staleness=1 slots=64",
    "train_async.py task=sum groups_per_step=8 max_staleness=3 swap=drain",
    "train_async.py task=sum groups_per_step=16 swap=recompute",
    "train_async.py task=sum groups_per_step=16 max_staleness=0",
    "train_sync.py task=sum groups_per_step=24",
    "train_async.py task=guess groups_per_step=32 max_staleness=1 slots=64",
    "train_async.py task=guess groups_per_step=24 max_staleness=4",
    "train_async.py task=guess groups_per_step=24 max_staleness=0",
    "train_sync.py task=guess groups_per_step=16",
)


def bench_simulate(folder: Path, rounds: int = 3) -> None:
    """Calibrate and check the simulation; simulate.json in `folder`.

    A machine has slow minutes, so each run is repeated, and all of its repetitions count.
    """
    plan = {}
    for i in range(rounds):
        for command in CALIBRATION + HELD_OUT:
            trainer, *flags = command.split()
            plan[f"{command} {i}"] = {"trainer": trainer} | dict(f.split("=") for f in flags)
    alike = {"steps": 60, "eval_every": 1000, "rollout_workers": 1, "reward_workers": 1}
    logs = defaultdict(list)
    with tempfile.TemporaryDirectory() as place:
        for name, run, _ in run_each(plan, Path(place), **alike):
            logs[name.rpartition(" ")[0]].append(read_run(run))
    known = {}
    for task in ("sum", "guess"):
        basis = [logs[command] for command in CALIBRATION if f"task={task}" in command]
        known[task] = calibrate(sum(basis, []))
    rows = [held_out_row(command, logs[command], known) for command in HELD_OUT]
    costs = {task: vars(found) for task, found in known.items()}
    save_result(folder, "simulate", {"runs": rows, "costs": costs})
    print_table(rows)
    print("*: predicted; idle: share of all processes")


def held_out_row(command: str, logs: list[PipelineLog], known: dict[str, Costs]) -> dict:
    """Runs of a command beside as many simulations: the means of both, and the verdict."""
    measured = [pipeline_metrics(log) for log in logs]
    predicted = []
    for seed, log in enumerate(logs):
        costs = known[log.config.task]
        predicted.append(predict(log.config, costs, seed, log.synchronous))
    row = {"setup": command, "runs": len(logs), "within": True}
    for name, least in COMPARED.items():
        found = float(np.mean(column(measured, name)))
        said = float(np.mean(column(predicted, name)))
        row |= {name: round(found, 3), f"{name}*": round(said, 3)}
        row["within"] &= abs(said - found) <= 0.1 * max(least, found)
    return row


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
