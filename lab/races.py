"""races.py: synchronous against asynchronous training, as whole runs to the same score.

    python bench.py                       # the best synchronous mode against the asynchronous one
    python bench.py race --seeds 5        # the same, as it was recorded
    python bench.py race --modes gpu      # a larger model on one GPU that both roles share

Every run is started as a user would start it. What asynchrony gains depends on the work, so there
are three regimes, and the table says of each what could be gained at most.
Left out: other measurements of whole runs (campaigns.py), and of parts (speed.py).
"""

import math
import re
import shutil
import subprocess
import sys
import textwrap
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

import numpy as np
import torch
from tqdm import tqdm

from lab.plots import RESULTS, between, draw_both, markdown, save_result
from runtime.config import flag, one_of, require, words
from runtime.folder import read_json, read_lines
from runtime.pictures import (
    BLUE,
    GREEN,
    GREY,
    ORANGE,
    column,
    grouped,
    new_figure,
    save_figure,
    steps_of,
)

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
COLOURS = (ORANGE, BLUE, GREEN)  # of modes, in the order of the plan
GPU_MODES = ("sync, one GPU", "async, η = 2")
# one core is raced, too, once: the better one is compared with
ONE_CORE, BASELINE = "sync, one core", "sync, two threads"
# chosen before the runs, from others
JUDGED = {"guess": "async, η = 2", "sum": "async, η = 4", "slow": "async, η = 4"}
REGIMES = {
    "guess": "short answers",
    "sum": "long answers of unequal length",
    "slow": "an environment that takes 50 ms a turn",
}
# Scores to reach on held-out problems. `sum` climbs so slowly from 0.35 on that the seed decides
# when it is at 0.4. `slow` is `guess` with a slow environment, and only its speed is looked at.
TARGETS = {"guess": ("solved", 0.9), "sum": ("reward", 0.3), "slow": ("solved", None)}

# What differs from the defaults, in every mode alike. Two cores have no room for a third process:
# who generates verifies. Evaluations wait until training is over, so that no clock has them.
# Half the usual batch, with which every mode is quicker.
ALIKE = {"reward_workers": 0, "eval_when": "late", "eval_every": 10, "groups_per_step": 16}
FLAGS = {"guess": ALIKE | {"steps": 240, "slots": 256}, "sum": ALIKE | {"steps": 120, "slots": 64}}
FLAGS["slow"] = ALIKE | {"steps": 30, "groups_per_step": 4, "group_size": 8, "slots": 96}
FLAGS["slow"] |= {"task": ROOT / "tests/slow.py:0.05,no", "reward_workers": 1}
# On a GPU, a larger model; Adam's learning rate goes down as the width goes up (Yang et al. 2021,
# arXiv 2203.03466).
GPU_FLAGS = {"model": "medium", "lr": 6e-4 * 64 / 320, "token_budget": 65536}
GPU_FLAGS |= {"steps": 60, "slots": 256, "reward_workers": 1}
SHARES = ("generating", "waiting", "training")
READING = """\
What a synchronous step spends its time on. Waiting: slots are empty because only the longest
answers are still being written, or all wait for the environment. If nothing waited, and generating
and training were done at once without slowing each other, it would gain what stands under "at
most". The rest is the best synchronous run on the same two cores against the asynchronous one:
medians over the seeds; in brackets the gain, and from the lowest to the highest of the same seed.
"Reached": how many seeds came to the score.
"""
MEASURED = ("target_s", "samples_per_s", "staleness")
SECONDS = 180  # `python bench.py` begins no further seed after that: it takes 5 minutes at most


@dataclass(frozen=True)
class RaceConfig:
    """Which modes race, and how often."""

    modes: str = one_of("on two cores, or on a GPU", "best", "gpu")
    seeds: int = flag(3, "runs of each mode", 1)


def run_command(trainer: str, run: Path, **flags) -> dict:
    """Run a trainer as a user does; its summary, with `command_s`: start of the process to end."""
    options = words(flags)
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
    for task in ("guess", "sum") if gpu else TARGETS:
        best = [BASELINE, JUDGED[task], *[ONE_CORE] * (seed == 0)]
        if task == "slow":  # a second thread would only take the cores from the environments
            best = [ONE_CORE, JUDGED[task]]
        for mode in GPU_MODES if gpu else best:
            flags = {"task": task, "seed": seed} | FLAGS[task] | MODES[mode]
            plan[f"{task}, {mode}, seed {seed}"] = flags | (GPU_FLAGS if gpu else {})
    return plan


def bench_race(folder: Path, config: RaceConfig) -> None:
    """Episodes a second, and time to the same held-out score, in three regimes; seed after seed, so
    that slow minutes hit all modes alike."""
    result, gpu = {"runs": []}, config.modes == "gpu"
    said = "--modes gpu: must be run on a machine with a CUDA device"
    require(torch.cuda.is_available() or not gpu, said)
    file = "async-cuda" if gpu else "race"
    begin = time.monotonic()
    first = []  # the two runs that the timeline shows
    for seed in range(config.seeds):
        if config == RaceConfig() and time.monotonic() - begin >= SECONDS:
            break
        for name, run, summary in run_each(race_plan(seed, gpu), folder):
            task, _, mode = name.rpartition(", seed")[0].partition(", ")
            row = {"task": task, "mode": mode, "seed": seed} | speed_of(run, summary, task)
            result["runs"].append(row)
            save_result(folder, file, result)
            if seed == 0 and task == "sum" and mode in (BASELINE, JUDGED[task]):
                first.append(run)
    draw_race(result["runs"], folder / f"{file}.png")
    if not gpu:
        draw_both(*first, folder / "timeline.png")
        print("Few seeds give a first look: `--seeds 5` is what was recorded.")


def draw_race(runs: list[dict], path: Path) -> None:
    """What each regime gains and could gain at most, and the held-out scores against time."""
    tasks = grouped(runs, "task")
    figure = new_figure((11, 4.2))
    gains, *curves = figure.subplots(1, 1 + sum(TARGETS[task][1] is not None for task in tasks))
    labels = []
    for row, (task, own) in enumerate(tasks.items()):
        best, found = modes_of(own)
        judged = list(found)[1]
        gains.barh(row, found[best]["limit"], color="none", edgecolor=GREY, ls="--")
        gains.barh(row, found[judged]["faster"], color=BLUE, height=0.4)
        text = f"{found[judged]['faster']:.2f}× of at most {found[best]['limit']:.1f}×"
        gains.text(0.1, row + 0.3, text, va="center", fontsize=9)
        labels.append(f"{REGIMES[task]}\n(`{task}`)")
    gains.set_yticks(range(len(labels)), [textwrap.fill(label, 22) for label in labels])
    gains.axvline(1, color="black", lw=1)
    gains.set(title="asynchronous over synchronous", ylim=(len(labels) - 0.5, -0.5))
    gains.set(xlim=(0, 4), xlabel="times the episodes a second; dashed: at most")
    timed = [task for task in tasks if TARGETS[task][1] is not None]
    for axis, task in zip(curves, timed, strict=True):
        metric, goal = TARGETS[task]
        for (mode, same), colour in zip(
            grouped(tasks[task], "mode").items(), COLOURS, strict=False
        ):
            for i, held in enumerate(column(same, "held")):
                seconds, _, scores = zip(*held, strict=True)
                axis.plot(seconds, scores, color=colour, label=mode if i == 0 else None)
        came = sum(row["target_s"] is not None for row in tasks[task])
        axis.axhline(goal, color="black", ls=":")
        axis.set(
            title=f"`{task}`: {came} of {len(tasks[task])} runs reach {goal}", xlabel="seconds"
        )
        axis.set_ylabel(f"held out: {metric}")
        axis.legend()
    save_figure(figure, path)


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
    target_s, target_samples = (None, None) if goal is None else crossing(held, goal)
    seconds, slots = Counter(), read_json(run / "config.json").get("slots")
    for event in events:
        if event["kind"] in ("generate", "train") and "seconds" in event:
            seconds[event["kind"]] += event["seconds"]
        if "slot_steps" in event:  # of a step of all slots, what the busy ones take
            seconds["useful"] += event["decode"] * event["slot_steps"] / event["steps"] / slots
    return {
        "busy_s": seconds,
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
    """Of the runs of a task (the quickest synchronous mode of those with all seeds, {mode: facts}).

    The facts: MEASURED of all seeds, `median` of the seconds to the score; of episodes a second,
    `faster` than the best synchronous mode, and for each seed; of seconds, `gain` and `gains`;
    `limit`, what could be gained over this mode at most.
    """
    found = {}
    for mode, own in grouped(runs, "mode").items():
        found[mode] = {key: reached(own, key) for key in MEASURED}
        found[mode]["median"] = np.median(found[mode]["target_s"])
        shares = []  # of generating, waiting, training
        for s in [row["busy_s"] for row in own if "busy_s" in row]:
            parts = [s["useful"], s["generate"] - s["useful"], s["train"]]
            shares.append(np.divide(parts, sum(parts)))
        found[mode]["shares"] = np.median(shares, axis=0).tolist() if shares else []
        found[mode]["limit"] = 1 / max(*found[mode]["shares"][::2], 1e-9) if shares else 1.0
    most = max(len(row["target_s"]) for row in found.values())  # one lucky run is no baseline
    synchronous = [m for m in found if m.startswith("sync") and len(found[m]["target_s"]) == most]
    best = min(
        synchronous, key=lambda m: (found[m]["median"], -np.median(found[m]["samples_per_s"]))
    )
    for row in found.values():
        row["gain"], row["gains"] = ratios(found[best]["target_s"], row["target_s"])
        row["faster"], row["each"] = ratios(row["samples_per_s"], found[best]["samples_per_s"])
    return best, found


def ratios(above: list[float], below: list[float]) -> tuple[float, list[float]]:
    """The ratio of the medians, and that of each seed; 1 where neither has come to the score."""
    pairs = [(np.median(above), np.median(below)), *zip(above, below, strict=False)]
    first, *others = [1.0 if a == b else a / b if b < math.inf else 0.0 for a, b in pairs]
    return float(first), others


def race_lines(result: dict) -> list[str]:
    """Every regime: what a synchronous step spends its time on, and what asynchrony gains."""
    head, rows = ["", "a synchronous step", "at most", "episodes/s"], []
    for task, own in grouped(result["runs"], "task").items():
        best, found = modes_of(own)
        for mode, row in found.items():
            if mode.startswith("sync"):
                continue
            metric, goal = TARGETS[task]
            before, known = found[best], found[best]["shares"]
            rates = [f"{np.median(x['samples_per_s']):,.0f}" for x in (before, row)]
            cells = [
                f"{REGIMES[task]}: `{task}`, {mode}, {len(row['each'])} seeds",
                ", ".join(map("{:.0%} {}".format, known, SHARES)),
                f"{before['limit']:.2f}×" if known else "",
                f"{' -> '.join(rates)} ({row['faster']:.2f}×, {between(row['each'], '.2f')})",
            ]
            if goal is None:
                rows.append([*cells, "", ""])
                continue
            seconds = [f"{x['median']:.1f}" for x in (before, row)]
            came = [sum(t < math.inf for t in x["target_s"]) for x in (before, row)]
            text = f"{' -> '.join(seconds)} ({row['gain']:.2f}×, {between(row['gains'], '.2f')})"
            rows.append([*cells, f"{metric} {goal}: {text}", f"{came[0]}, {came[1]}"])
    return [READING, *markdown([*head, "seconds to the score", "reached"], rows)]
