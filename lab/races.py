"""races.py: synchronous against asynchronous training, as whole runs to the same score.

    python bench.py                       # the best synchronous mode against the asynchronous one
    python bench.py race --seeds 5        # the same, as it was recorded
    python bench.py race --modes gpu      # a larger model on one GPU that both roles share

Every run is started as a user would start it. The table says what a mode gains over the best
synchronous one.
Left out: other measurements of whole runs (campaigns.py), and of parts (speed.py).
"""

import math
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

import numpy as np
import torch
from tqdm import tqdm

from lab.plots import (
    RESULTS,
    between,
    column,
    draw_panels,
    draw_timeline,
    grouped,
    markdown,
    median_text,
    save_result,
    steps_of,
)
from runtime.config import flag, one_of, require
from runtime.folder import read_json, read_lines

ROOT = RESULTS.parent
sys.path.append(str(ROOT / "tests"))  # faults on purpose and random folders are for tests only
SYNC = {"trainer": "train_sync.py"}
MODES = {  # name -> how it is run; on two cores, one device is one core
    "sync, one core": SYNC,
    "sync, two threads": SYNC | {"threads": 2},
    "sync, one GPU": SYNC,
    "async, η = 2": {"max_staleness": 2},
    "async, η = 4": {"max_staleness": 4},
}
GPU_MODES = ("sync, one GPU", "async, η = 2")
BASELINE = "sync, two threads"  # one core is raced, too, once: the better one is compared with
JUDGED = {"guess": "async, η = 2", "sum": "async, η = 4"}  # chosen before the runs, from others
# Scores to reach on held-out problems. `sum` climbs so slowly from 0.35 on that the seed decides
# when it is at 0.4.
TARGETS = {"guess": ("solved", 0.9), "sum": ("reward", 0.3)}

# What differs from the defaults, in every mode alike. Two cores have no room for a third process:
# who generates verifies. Evaluations wait until training is over, so that no clock has them.
# Half the usual batch, with which every mode is quicker.
ALIKE = {"reward_workers": 0, "eval_when": "late", "eval_every": 10, "groups_per_step": 16}
FLAGS = {"guess": ALIKE | {"steps": 240, "slots": 256}, "sum": ALIKE | {"steps": 120, "slots": 64}}
# On a GPU, a larger model; Adam's learning rate goes down as the width goes up (Yang et al. 2021,
# arXiv 2203.03466).
GPU_FLAGS = {"model": "medium", "lr": 6e-4 * 64 / 320, "token_budget": 65536}
GPU_FLAGS |= {"steps": 60, "slots": 256, "reward_workers": 1}
READING = """\
Medians over the seeds, and from lowest to highest. × best sync: the median time of the best
synchronous mode to the score, over that of this one; in brackets its 90% bootstrap interval over
seeds: with 1 inside, it may be chance. A run that ended below the score took infinitely long."""
MEASURED = ("target_s", "target_samples", "final", "samples_per_s", "staleness")
SECONDS = 180  # `python bench.py` begins no further seed after that: it takes 5 minutes at most


@dataclass(frozen=True)
class RaceConfig:
    """Which modes race, and how often."""

    modes: str = one_of("on two cores, or on a GPU", "best", "gpu")
    seeds: int = flag(3, "runs of each mode", 1)


def run_command(trainer: str, run: Path, **flags) -> dict:
    """Run a trainer as a user does; its summary, with `command_s`: start of the process to end."""
    options = [f"--{name.replace('_', '-')}={value}" for name, value in flags.items()]
    command = [sys.executable, trainer, f"--out={run.resolve()}", *options]
    begin = time.perf_counter()
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    seconds = round(time.perf_counter() - begin, 1)
    if done.returncode:
        raise RuntimeError(f"{command}: exit code {done.returncode}\n{done.stderr[-2000:]}")
    return read_json(run / "summary.json") | {"command_s": seconds}


def run_each(plan: dict, folder: Path, keep: bool = False, **alike) -> Iterator[tuple]:
    """Run {name: flags} one after the other under a bar that says what runs now; yields name, run
    folder and summary. `alike`: flags of all; among the flags, `trainer` is the script. keep: the
    checkpoints stay."""
    bar = tqdm(plan.items(), unit="run")
    for name, flags in bar:
        bar.set_description(name)
        run = folder / "-".join(re.findall("[a-z0-9.]+", name))
        summary = run_command(run=run, **{"trainer": "train_async.py"} | alike | flags)
        try:
            yield name, run, summary
        finally:  # checkpoints are the larger part of a run, and nobody resumes it
            if not keep:
                shutil.rmtree(run / "checkpoints")


def race_plan(seed: int, gpu: bool) -> dict[str, dict]:
    """{task, mode, seed: flags} of the runs with one seed."""
    plan = {}
    for task in TARGETS:
        best = [BASELINE, JUDGED[task], *["sync, one core"] * (seed == 0)]
        for mode in GPU_MODES if gpu else best:
            flags = {"task": task, "seed": seed} | FLAGS[task] | MODES[mode]
            plan[f"{task}, {mode}, seed {seed}"] = flags | (GPU_FLAGS if gpu else {})
    return plan


def bench_race(folder: Path, config: RaceConfig) -> None:
    """Time to the same held-out score, on `guess` and on the heavy-tailed `sum`; seed after seed,
    so that slow minutes hit all modes alike."""
    result, gpu = {"runs": []}, config.modes == "gpu"
    said = "--modes gpu: must be run on a machine with a CUDA device"
    require(torch.cuda.is_available() or not gpu, said)
    file = "async-cuda" if gpu else "race"
    begin = time.monotonic()
    first = []  # the two runs of a task that the timeline shows
    for seed in range(config.seeds):
        if config == RaceConfig() and time.monotonic() - begin >= SECONDS:
            break
        for name, run, summary in run_each(race_plan(seed, gpu), folder):
            task, _, mode = name.rpartition(", seed")[0].partition(", ")
            row = {"task": task, "mode": mode, "seed": seed} | speed_of(run, summary, task)
            result["runs"].append(row)
            save_result(folder, file, result)
            if seed == 0 and mode in (BASELINE, JUDGED[task]):
                first.append(run)
    draw_race(result["runs"], folder / f"{file}.png")
    if not gpu:
        draw_timeline(first, folder / "timeline.png")
        print("Few seeds give a first look: `--seeds 5` is what was recorded.")


def draw_race(runs: list[dict], path: Path) -> None:
    """Held-out score of each task against seconds (median at each evaluation), and episodes."""
    tasks, panels = grouped(runs, "task"), []
    for i, clock in enumerate(("wall-clock time (s)", "episodes trained")):
        for task, own in tasks.items():
            metric, goal = TARGETS[task]
            curves = {}
            for mode, same in grouped(own, "mode").items():
                held = np.array(column(same, "held"))  # [seeds, evaluations, 3]
                curves[mode] = (None, np.median(held[:, :, i], 0), held[:, :, 2])
            longest = max(x[-1] for _, x, _ in curves.values())
            curves["to be reached"] = ("#000000:", [0, longest], [goal] * 2)
            axis = {"title": task, "xlabel": clock, "ylabel": f"held-out: {metric}"}
            panels.append((curves, axis))
    draw_panels(path, "", panels, (4.5 * len(tasks), 6.4), columns=len(tasks))


def exams_of(run: Path, metric: str) -> list:
    """[seconds, episodes, score] of each evaluation of a run, also of those that came late."""
    trained, found = {0: 0}, []
    for row in read_lines(run / "metrics.jsonl"):
        if "samples" in row:
            trained[row["step"]] = trained[row["step"] - 1] + row["samples"]
        if "eval" in row:
            found.append([row["t"], trained[row["step"]], row["eval"][metric]])
    return found


def speed_of(run: Path, summary: dict, task: str) -> dict:
    """What a run says about speed. Its evaluations must be late: they take no time.

    The clock starts when the first episode does, and the target is reached on a straight line
    between two evaluations.
    """
    events = read_lines(run / "events.jsonl")
    zero = next(event["t"] for event in events if event["kind"] == "generate")
    steps = steps_of(run)
    metric, goal = TARGETS[task]
    held = [[max(0.0, t - zero), *others] for t, *others in exams_of(run, metric)]
    target_s, target_samples = crossing(held, goal)
    return {
        "target_s": target_s,
        "target_samples": target_samples,
        "final": held[-1][2],
        "samples_per_s": sum(column(steps[1:], "samples")) / (steps[-1]["t"] - steps[0]["t"]),
        "staleness": summary["staleness"]["mean"],
        "held": held,
    }


def crossing(held: list, goal: float) -> tuple:
    """Seconds and episodes at which (seconds, episodes, score) reach a goal, or None twice."""
    for (t, n, score), (later, more, better) in pairwise(held):
        if better >= goal:
            share = max(0.0, (goal - score) / max(better - score, 1e-9))
            return t + share * (later - t), n + share * (more - n)
    return None, None


def reached(runs: list[dict], key: str) -> list[float]:
    """When each run has reached its score; inf where it has not."""
    return [math.inf if value is None else value for value in column(runs, key)]


def modes_of(runs: list[dict]) -> tuple[str, dict[str, dict]]:
    """Of the runs of a task (the best synchronous mode of those with all seeds, {mode: facts}).

    The facts: MEASURED of all seeds; `median`, of the seconds to the score; `gain`, that of the
    best synchronous mode over that of this one, and `gains`, between which it lies.
    """
    found = {}
    for mode, own in grouped(runs, "mode").items():
        found[mode] = {key: reached(own, key) for key in MEASURED}
        found[mode]["median"] = np.median(found[mode]["target_s"])
    most = max(len(row["target_s"]) for row in found.values())  # one lucky run is no baseline
    synchronous = [m for m in found if m.startswith("sync") and len(found[m]["target_s"]) == most]
    best = min(synchronous, key=lambda mode: found[mode]["median"])
    for row in found.values():
        row["gain"], *row["gains"] = ratio_of_medians(found[best]["target_s"], row["target_s"])
    return best, found


def ratio_of_medians(above: list[float], below: list[float], rounds: int = 2000) -> list[float]:
    """The ratio (1 where neither has reached the score), and between which values it lies in 90% of
    the cases when as many runs are drawn from the measured ones (bootstrap; Efron 1979)."""
    random = np.random.default_rng(0)
    drawn = []
    for seconds in (above, below):
        again = random.choice(seconds, (rounds, len(seconds)))
        drawn.append(np.median([seconds, *again], axis=1))  # the first is what was measured
    reached = np.isfinite(drawn).any(axis=0)
    ratios = np.divide(*drawn, out=np.ones(rounds + 1), where=reached)
    return [ratios[0], *np.quantile(ratios[1:], [0.05, 0.95], method="nearest")]


def interval(best: dict, row: dict) -> str:
    """Between which values a gain lies, as text; nothing where there are fewer than three seeds."""
    few = min(len(best["target_s"]), len(row["target_s"])) < 3
    return "" if few else f" ({between(row['gains'], '.2f')})"


def race_lines(result: dict) -> list[str]:
    """Every mode beside the best synchronous one: medians over the seeds, with their extremes."""
    lines = [READING]
    for task, own in grouped(result["runs"], "task").items():
        best, found = modes_of(own)
        metric, goal = TARGETS[task]
        head = [f"`{task}`: to a held-out {metric} of {goal}", "seconds", "× best sync (90%)"]
        head += ["episodes", "episodes/s", "staleness", "final"]
        rows = []
        for mode, row in found.items():
            cells = [
                f"{mode}{' (best sync)' * (mode == best)}, seeds: {len(row['target_s'])}",
                median_text(row["target_s"], ".1f"),
                f"{row['gain']:.2f}{interval(found[best], row)}",
                f"{np.median(row['target_samples']):,.0f}",
                f"{np.median(row['samples_per_s']):,.0f}",
                f"{np.median(row['staleness']):.2f}",
                median_text(row["final"], ".2f"),
            ]
            rows.append(cells)
        lines += ["", *markdown(head, rows)]
    return lines
