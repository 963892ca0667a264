"""races.py: synchronous against asynchronous training, as whole runs to the same score.

    python bench.py                       # the best synchronous mode against the asynchronous one
    python bench.py race --seeds 5        # five seeds

Every run is started as a user would start it. What asynchrony gains depends on the work, so there
are three regimes, and the table says of each what could be gained at most.
Left out: other measurements of whole runs (campaigns.py), and of parts (speed.py).
"""

import math
import re
import shutil
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

import numpy as np
from tqdm import tqdm

from lab.plots import RESULTS, between, column, draw_panels, grouped, save_result, steps_of, table
from runtime.config import flag, words
from runtime.folder import read_json, read_lines
from runtime.pictures import draw_timeline

ROOT = RESULTS.parent
sys.path.append(str(ROOT / "tests"))  # faults on purpose and random folders are for tests only
SYNC = {"trainer": "train_sync.py"}
MODES = {  # name -> how it is run; on two cores, one device is one core
    "sync, one core": SYNC,
    "sync, two threads": SYNC | {"threads": 2},
    "async, η = 2": {"max_staleness": 2},
    "async, η = 4": {"max_staleness": 4},
}
# one core was raced, too, and is slower, but where a second thread would only take the cores from
# the environments
ONE_CORE, BASELINE = "sync, one core", "sync, two threads"
# chosen before the runs, from others
JUDGED = {"guess": "async, η = 2", "sum": "async, η = 4", "slow": "async, η = 4"}
REGIMES = {
    "guess": "short answers",
    "sum": "long answers of unequal length",
    "slow": "an environment of 50 ms a turn",
    "long": "long answers of a model with 0.6B parameters",
}
# Scores to reach on held-out problems. `sum` climbs so slowly from 0.35 on that the seed decides
# when it is at 0.4. `slow` is `guess` with a slow environment, and only its speed is looked at.
TARGETS = {"guess": ("solved", 0.9), "sum": ("reward", 0.3)}
TARGETS |= dict.fromkeys(("slow", "long"), ("solved", math.inf))

# What differs from the defaults, in every mode alike. Two cores have no room for a third process:
# who generates verifies. Evaluations wait until training is over, so that no clock has them.
# Half the usual batch, with which every mode is quicker.
ALIKE = {"reward_workers": 0, "eval_when": "late", "eval_every": 10, "groups_per_step": 16}
FLAGS = {"guess": ALIKE | {"steps": 240, "slots": 256}, "sum": ALIKE | {"steps": 120, "slots": 64}}
FLAGS["slow"] = ALIKE | {"steps": 30, "groups_per_step": 4, "group_size": 8, "slots": 96}
FLAGS["slow"] |= {"task": ROOT / "tests/slow.py:0.05,no", "reward_workers": 8}
READING = """\
What a synchronous step spends its time on. Waiting: slots are empty because only the longest
answers are still being written, or all wait for the environment. If nothing waited, and generating
and training were done at once without slowing each other, it would gain what stands under "at
most". The rest is the best synchronous run on the same devices against the asynchronous one:
medians over the seeds; in brackets the gain, and from the lowest to the highest of the same seed.
"Reached": how many seeds came to the score.
"""
SECONDS = 180  # `python bench.py` begins no further seed after that: it takes 5 minutes at most


@dataclass(frozen=True)
class RaceConfig:
    """How often the modes race."""

    seeds: int = flag(3, "runs of each mode", 1)


# --------------------------------------------------------------------------------- running trainers


def run_command(trainer: str, run: Path, **flags) -> dict:
    """Run a trainer as a user does; its summary, with `command_s`: start of the process to end."""
    command = [sys.executable, trainer, f"--out={run.resolve()}", *words(flags)]
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
        shutil.rmtree(run, ignore_errors=True)  # of an attempt that was cut
        summary = run_command(run=run, **{"trainer": "train_async.py"} | alike | flags)
        try:
            yield name, run, summary
        finally:  # checkpoints are the larger part of a run, and nobody resumes it
            if not keep:
                shutil.rmtree(run / "checkpoints")


def race_plan(seed: int) -> dict[str, dict]:
    """{task, mode, seed: flags} of the runs with one seed."""
    plan = {}
    for task in JUDGED:
        best = ONE_CORE if task == "slow" else BASELINE
        for mode in (best, JUDGED[task]):
            flags = {"task": task, "seed": seed} | FLAGS[task] | MODES[mode]
            plan[f"{task}, {mode}, seed {seed}"] = flags
    return plan


def bench_race(folder: Path, config: RaceConfig) -> None:
    """Episodes a second, and time to the same held-out score, in three regimes; seed after seed, so
    that slow minutes hit all modes alike."""
    result, begin, shown = {"runs": []}, time.monotonic(), []
    for seed in range(config.seeds):
        if config == RaceConfig() and time.monotonic() - begin >= SECONDS:
            break
        for name, run, summary in run_each(race_plan(seed), folder):
            task, _, mode = name.rpartition(", seed")[0].partition(", ")
            row = {"task": task, "mode": mode, "seed": seed} | speed_of(run, summary, task)
            result["runs"].append(row)
            save_result(folder, "race", result)
            if seed == 0 and task == "sum" and mode in (BASELINE, JUDGED[task]):
                shown.append(run)
    draw_race(result["runs"], folder / "race.png")
    draw_timeline(shown, folder / "timeline.png")
    print("Few seeds give a first look: `--seeds 5` takes 8 minutes.")


def draw_race(runs: list[dict], path: Path) -> None:
    """The held-out scores against time, of the first seed."""
    panels = []
    for task, rows in grouped(runs, "task").items():
        curves = {}
        for mode, same in grouped(rows, "mode").items():
            seconds, _, scores = zip(*same[0]["held"], strict=True)
            curves[mode] = seconds, scores
        axis = {"title": f"{task}:\n{REGIMES[task]}", "xlabel": "seconds"}
        panels.append((curves, axis | {"ylabel": f"held out: {TARGETS[task][0]}"}))
    draw_panels(path, "Held-out scores against time", panels, (11, 3.6), columns=3)


# ----------------------------------------------------------------------------- what a run has done


def exams_of(run: Path, metric: str) -> list:
    """[seconds, episodes, score] of each evaluation of a run, also of those that came late."""
    trained, exams = {0: 0}, []
    for row in read_lines(run / "metrics.jsonl"):
        if "samples" in row:
            trained[row["step"]] = trained[row["step"] - 1] + row["samples"]
        if "eval" in row:
            exams.append([row["t"], trained[row["step"]], row["eval"][metric]])
    return exams


def speed_of(run: Path, summary: dict, task: str) -> dict:
    """What a run says about speed. Its evaluations must be late: they take no time.

    The clock starts when the first episode does (asynchronously that is before the first
    evaluation, which then counts), and the target is reached on a straight line between two
    evaluations. Episodes a second count from step η + 1 on: those before may have been ready.
    """
    settings, events = read_json(run / "config.json"), read_lines(run / "events.jsonl")
    steps = steps_of(run)[settings.get("max_staleness", 0) :]
    zero = next(event["t"] for event in events if event["kind"] == "generate")
    metric, goal = TARGETS[task]
    held = [[max(0.0, t - zero), *others] for t, *others in exams_of(run, metric)]
    target_s, target_samples = crossing(held, goal)
    busy, slots = Counter(), settings.get("slots")
    for event in events:
        if event["kind"] in ("generate", "train") and "seconds" in event:
            busy[event["kind"]] += event["seconds"]
        if "slot_steps" in event:  # of a step of all slots, what the busy ones take
            busy["useful"] += event["decode"] * event["slot_steps"] / event["steps"] / slots
    return {
        "busy_s": busy,
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


# --------------------------------------------------------------------------------------- the table


def reached(runs: list[dict], key: str) -> list[float]:
    """When each run has reached its score; inf where it has not."""
    return [math.inf if value is None else value for value in column(runs, key)]


def baseline(runs: list[dict]) -> list[dict]:
    """Of the runs of a task, those of the quickest synchronous mode that has all seeds: one lucky
    run is no baseline."""
    modes = [rows for mode, rows in grouped(runs, "mode").items() if mode.startswith("sync")]
    most = max(map(len, modes))
    full = [rows for rows in modes if len(rows) == most]
    return max(full, key=lambda rows: np.median(column(rows, "samples_per_s")))


def ratios(above: list[float], below: list[float]) -> tuple[float, list[float]]:
    """The ratio of the medians, and that of each seed; 1 where neither has come to the score."""
    pairs = [(np.median(above), np.median(below)), *zip(above, below, strict=False)]
    first, *others = [1.0 if a == b else a / b if b < math.inf else 0.0 for a, b in pairs]
    return float(first), others


def gain(runs: list[dict], mode: str, form: str = "{:.2f}× ({})") -> str:
    """How many times the episodes a second of the baseline, and from seed to seed."""
    judged = column(grouped(runs, "mode")[mode], "samples_per_s")
    faster, each = ratios(judged, column(baseline(runs), "samples_per_s"))
    return form.format(faster, between(each, ".2f"))


def shares_of(runs: list[dict]) -> list[float]:
    """What runs spend their time on: generating, waiting, training."""
    shares = []
    for busy in [row["busy_s"] for row in runs if "busy_s" in row]:
        parts = [busy["useful"], busy["generate"] - busy["useful"], busy["train"]]
        shares.append(np.divide(parts, sum(parts)))
    return np.median(shares, axis=0).tolist() if shares else []


def race_cells(runs: list[dict]) -> Iterator[tuple]:
    """Of every regime: what a synchronous step spends its time on, and what asynchrony gains."""
    for task, rows in grouped(runs, "task").items():
        before, (metric, goal) = baseline(rows), TARGETS[task]
        for mode, judged in grouped(rows, "mode").items():
            if mode.startswith("sync"):
                continue
            name = f"{REGIMES[task]}: `{task}`, {mode}, {len(judged)} seeds"
            shares = shares_of(before)
            words = ["{:.0%} generating", "{:.0%} waiting", "{:.0%} training"]
            texts = [word.format(share) for word, share in zip(words, shares, strict=False)]
            yield name, "a synchronous step", ", ".join(texts)
            yield name, "at most", f"{1 / max(shares[0], shares[2]):.2f}×" if shares else ""
            pair = (before, judged)
            rates = [f"{np.median(column(x, 'samples_per_s')):,.0f}" for x in pair]
            yield name, "episodes/s", " -> ".join(rates) + gain(rows, mode, " ({:.2f}×, {})")
            if goal < math.inf:
                times = [reached(x, "target_s") for x in pair]
                quicker, each = ratios(*times)
                texts = " -> ".join(f"{np.median(x):.1f}" for x in times)
                texts += f" ({quicker:.2f}×, {between(each, '.2f')})"
                yield name, "seconds to the score", f"{metric} {goal}: {texts}"
                came = [str(sum(t < math.inf for t in x)) for x in times]
                yield name, "reached", ", ".join(came)


def race_lines(result: dict) -> list[str]:
    """The table of a race, and how to read it."""
    return [READING, *table("", race_cells(result["runs"]))]
