"""compare.py: synchronous against asynchronous training, measured as whole runs.

`bench_async` is `python bench.py async`: every mode of MODES is run as a user would run it, several
seeds each, to the same held-out score; its table says what each mode gains over the best
synchronous one, and how much of that is overlap, the straggler tail and swaps in flight.
`bench_roles` is `python bench.py roles COMMIT`: the same code before and after a change.

Left out: what is measured inside one process (speed.py), and the simulator's runs (bench.py).
"""

import json
import math
import subprocess
import sys
import tempfile
import time
from itertools import pairwise, product
from pathlib import Path
from statistics import geometric_mean

import numpy as np
from tqdm import tqdm

from lab.plots import RESULTS, between, draw_async, save_result, spread
from runtime.config import fail
from runtime.devices import describe_machine
from runtime.runlog import read_lines

ROOT = Path(__file__).parent.parent


def run_command(trainer: str, folder: Path, tree: Path = ROOT, **flags) -> dict:
    """Run a trainer as a user does; its summary, with `command_s`: start of the process to end."""
    options = [f"--{name.replace('_', '-')}={value}" for name, value in flags.items()]
    command = [sys.executable, trainer, f"--out={folder}", *options]
    start = time.perf_counter()
    done = subprocess.run(command, cwd=tree, capture_output=True, text=True)
    seconds = time.perf_counter() - start
    if done.returncode:
        raise RuntimeError(
            f"{' '.join(command)}: exit code {done.returncode}\n{done.stderr[-2000:]}"
        )
    return {**json.loads((folder / "summary.json").read_text()), "command_s": round(seconds, 1)}


SYNC = {"trainer": "train_sync.py"}


MODES = {  # name -> how it is run; on two cores, one device is one core
    "sync, one core": SYNC,
    "sync, two threads": SYNC | {"threads": 2},
    "sync, all generate, then all train": {"max_staleness": 0, "rollout_workers": 2, "learners": 2},
    "one step ahead": {"max_staleness": 1, "swap": "drain"},
    "async, η = 1": {"max_staleness": 1},
    "async, η = 2": {"max_staleness": 2},
    "async, η = 2, recompute": {"max_staleness": 2, "swap": "recompute"},
    "async, η = 4": {"max_staleness": 4},
    "async, η = 8": {"max_staleness": 8},
    "async, η = 4, drain": {"max_staleness": 4, "swap": "drain"},
    "async, η = 4, recompute": {"max_staleness": 4, "swap": "recompute"},
}


GPU_MODES = {"sync, one GPU": SYNC, "async, η = 2": MODES["async, η = 2"]}


SPLIT = {  # what each change of mode gains in episodes a second, from synchronous on
    "overlap": "one step ahead",
    "no straggler tail": "async, η = 4, drain",
    "swaps in flight": "async, η = 4",
}


# Held-out score to reach, on the slope of the curve: from 0.35 on `sum` climbs so slowly that the
# seed decides when it is at 0.4.
TARGETS = {"guess": ("solved", 0.9), "sum": ("reward", 0.3)}


# What differs from the defaults, in every mode alike. Two cores have no room for a third process:
# who generates verifies, as in synchronous training. Evaluations wait until training is over,
# so that neither side's clock has them, and no rollout worker gains time by them. Half the batch,
# with which every mode is quicker; for `sum` half the slots, too, which suits both sides.
ALIKE = {"reward_workers": 0, "eval_when": "late", "eval_every": 10, "groups_per_step": 16}


# The episodes of `guess` are so short that a compiled step is quicker, in synchronous modes, too.
FLAGS = {
    "guess": ALIKE | {"steps": 240, "compile": "decode"},
    "sum": ALIKE | {"steps": 120, "slots": 64},
}


HEADLINE = [*list(MODES)[:2], "async, η = 1", "async, η = 2", "async, η = 2, recompute"]


# In `guess`, a slot for every episode of a batch is quickest: chosen by episodes a second, not by
# the time to the score.
BEST = {("guess", mode): {"slots": 256} for mode in HEADLINE}


# On a GPU, a larger model, in every mode alike; Adam's learning rate goes down as the width goes up
# (Yang et al. 2021, arXiv 2203.03466).
GPU = {"model": "medium", "lr": 6e-4 * 64 / 320, "token_budget": 65536, "slots": 256}


GPU |= {"compile": "decode", "steps": 60, "reward_workers": 1}


# By which each task is judged: chosen before these runs, from others. The best of several modes
# would flatter, as seeds differ much.
JUDGED = {"guess": ["async, η = 2"], "sum": ["async, η = 4"]}


SEEDS = {"guess": 24, "sum": 5}  # of what is judged and what it is compared with


def bench_async(kind: str = "quick") -> None:
    """Synchronous, one step ahead, asynchronous: wall-clock time to the same held-out score, on
    `guess` and the heavy-tailed `sum` -> results/async.json and .png.

    quick: two seeds of two modes, one task; full: `seeds`; gpu: three seeds of two modes with a
    larger model. What is measured already is not measured again: delete the file to start over.
    """
    shown, few = [*HEADLINE[:2], *JUDGED["guess"], *JUDGED["sum"]], [HEADLINE[1], HEADLINE[3]]
    names, tasks, shown, file = {
        "quick": (few, ["guess"], few, "async-quick"),
        "full": (MODES, TARGETS, shown, "async"),
        "gpu": (GPU_MODES, TARGETS, list(GPU_MODES), "async-cuda"),
    }[kind]
    path, new = RESULTS / f"{file}.json", {"machine": describe_machine(), "runs": []}
    if kind == "gpu" and not new["machine"]["gpus"]:
        fail(ValueError("async gpu: this machine has no CUDA device"))
    count = {"quick": 2, "gpu": 3}
    most = {(t, n): count.get(kind) or seeds(t, n) for t in tasks for n in names}
    plan = [(*both, i) for i in range(max(most.values())) for both in most if i < most[both]]
    result = json.loads(path.read_text()) if path.is_file() else new
    done = {(r["task"], r["mode"], r["seed"]) for r in result["runs"]}
    with tempfile.TemporaryDirectory() as place:
        for task, name, seed in tqdm([p for p in plan if p not in done], unit="run"):
            flags = {"task": task, "seed": seed, **FLAGS[task], **(MODES | GPU_MODES)[name]}
            flags |= GPU if kind == "gpu" else BEST.get((task, name), {})
            folder = Path(place) / f"{len(result['runs'])}"
            summary = run_command(flags.pop("trainer", "train_async.py"), folder, **flags)
            row = {"task": task, "mode": name, "seed": seed, "cpu": new["machine"]["cpu"]}
            row |= speed_of(folder, summary, task)
            result["runs"].append(row)
            tqdm.write(f"{task}, {name}, seed {seed}: {row['target_s']} s to the target")
            save_result(path.stem, result)
    draw_async(result["runs"], shown, TARGETS, RESULTS / f"{path.stem}.png")
    print("\n".join(async_table(result["runs"])))


def seeds(task: str, mode: str) -> int:
    """How many runs of a mode the full measurement has."""
    decides = mode.startswith("sync") or mode in (*HEADLINE[2:4], *JUDGED[task])
    return SEEDS[task] if decides else 3


def speed_of(folder: Path, summary: dict, task: str) -> dict:
    """What a run says about speed. The clock starts when the first episode does, and the target is
    reached on a straight line between two evaluations; a role is busy while it decodes or trains
    and publishes, from first to last step. Evaluations must be late: they take no time."""
    rows, events = (read_lines(folder / f"{n}.jsonl") for n in ("metrics", "events"))
    spans = {k: [e for e in events if e["kind"] == k] for k in ("generate", "train", "publish")}
    steps, metric, goal = [r for r in rows if "seconds" in r], *TARGETS[task]
    zero, begin = spans["generate"][0]["t"], steps[0]["t"]
    seconds = steps[-1]["t"] - begin
    size, evaluated = steps[0]["samples"], [r for r in rows if "eval" in r]
    held = [[max(0.0, r["t"] - zero), r["step"] * size, r["eval"][metric]] for r in evaluated]
    workers = len({e["process"] for e in spans["generate"]})
    busy = {
        role: sum(e["seconds"] for k in kinds for e in spans[k] if e["t"] >= begin)
        for role, kinds in {"rollout": ["generate"], "learner": ["train", "publish"]}.items()
    }
    return {
        **dict(zip(("target_s", "target_samples"), crossing(held, goal), strict=True)),
        "final": held[-1][2],
        "samples_per_s": (len(steps) - 1) * size / seconds,
        "busy_rollout": busy["rollout"] / (seconds * workers),
        "busy_learner": busy["learner"] / seconds,
        "staleness": summary["staleness"]["mean"],
        "command_s": summary["command_s"],
        "held": held,
    }


def crossing(held: list, goal: float) -> tuple:
    """Seconds and samples at which (seconds, samples, score) reach a goal, or None twice."""
    for (t, n, value), (later, more, better) in zip(held, held[1:], strict=False):
        if better >= goal:
            share = max(0.0, (goal - value) / max(better - value, 1e-9))
            return t + share * (later - t), n + share * (more - n)
    return None, None


def medians(runs: list[dict], task: str) -> tuple[str, dict[str, dict]]:
    """(the best synchronous mode, {mode: medians over its seeds}); inf: the score was not reached.

    Beside the medians: `seeds`, its run of each seed; `gain`, median time to the score of the best
    synchronous mode over that of this one, and `gains`, between which it lies.
    """
    found: dict[str, dict] = {}
    for mode in sorted(GPU_MODES | MODES, key=lambda mode: not mode.startswith("sync")):
        own = [r for r in runs if (r["task"], r["mode"]) == (task, mode)]
        own = [{k: math.inf if v is None else v for k, v in r.items()} for r in own]
        if own:
            keys = [k for k in own[0] if k not in ("task", "mode", "seed", "cpu", "held")]
            found[mode] = {k: float(np.median([r[k] for r in own])) for k in keys}
            found[mode]["seeds"] = {r["seed"]: r for r in own}
    best = min((m for m in found if m.startswith("sync")), key=lambda m: found[m]["target_s"])
    for mode, row in found.items():
        times = [[r["target_s"] for r in found[m]["seeds"].values()] for m in (best, mode)]
        row["gain"], *row["gains"] = ratio_of_medians(*times)
    return best, found


def ratio_of_medians(ours: list[float], theirs: list[float], rounds: int = 2000) -> list[float]:
    """The ratio (1 where neither has reached the score), and between which values it lies in 90% of
    the cases when as many runs are drawn from the measured ones (bootstrap; Efron 1979)."""
    random = np.random.default_rng(0)
    drawn = [[x, *random.choice(x, (rounds, len(x)))] for x in (ours, theirs)]
    above, below = (np.median(rows, axis=1) for rows in drawn)
    reached = np.isfinite(np.minimum(above, below))
    ratios = np.divide(above, below, out=np.ones(rounds + 1), where=reached)
    return [ratios[0], *np.quantile(ratios[1:], [0.05, 0.95], method="nearest")]


def rate_gain(found: dict, mode: str, other: str) -> float:
    """Episodes a second over those of another mode, seed by seed: runs of a seed follow each other,
    so a machine that is slower for a while is slower for both. The geometric mean over the seeds,
    so that gains of several changes multiply to that of all."""
    ours, theirs = found[mode]["seeds"], found[other]["seeds"]
    both = [seed for seed in ours if seed in theirs]
    return geometric_mean(ours[i]["samples_per_s"] / theirs[i]["samples_per_s"] for i in both)


def async_table(runs: list[dict]) -> list[str]:
    """Every mode beside the best synchronous one: medians over the seeds, with their extremes."""
    lines = []
    for task in dict.fromkeys(r["task"] for r in runs):
        (best, found), (metric, goal) = medians(runs, task), TARGETS[task]
        lines += [
            "",
            f"| `{task}`: to a held-out {metric} of {goal} | seconds | × best sync | samples | "
            "episodes/s | busy: rollout, learner | staleness | final |",
            "|---|---|---|---|---|---|---|---|",
        ]
        for mode, row in found.items():
            seconds, finals = ([r[k] for r in row["seeds"].values()] for k in ("target_s", "final"))
            cells = [
                f"{row['target_s']:.1f} ({min(seconds):.1f} to {max(seconds):.1f})",
                f"{row['gain']:.2f} ({between(row['gains'], '.2f')})",
                f"{row['target_samples']:,.0f}",
                f"{row['samples_per_s']:,.0f}",
                f"{row['busy_rollout']:.0%}, {row['busy_learner']:.0%}",
                f"{row['staleness']:.2f}",
                f"{row['final']:.2f} ({between(finals, '.2f')})",
            ]
            name = f"{mode}{' (best sync)' * (mode == best)}, {len(seconds)} seeds"
            lines.append(f"| {name} | {' | '.join(cells)} |")
        if all(mode in found for mode in SPLIT.values()):
            steps = [best, *SPLIT.values()]
            gains = [rate_gain(found, new, old) for old, new in pairwise(steps)]
            parts = " × ".join(f"{n} {gain:.2f}" for n, gain in zip(SPLIT, gains, strict=True))
            whole = f"{steps[-1]} over {best}: {rate_gain(found, steps[-1], best):.2f}"
            lines += ["", f"Episodes a second, {whole} = {parts}."]
    return lines


def bench_roles(commit: str, rounds: int = 5) -> None:
    """Generator and learner alone, and whole runs, in this tree and in that of an older commit, in
    turn -> results/roles.json. What is compared: tokens a second of the roles, episodes of runs."""
    result = {"machine": describe_machine(), "before": commit, "tasks": {}}
    rates, profiles = {}, {}
    with tempfile.TemporaryDirectory() as place:
        subprocess.run(["git", "clone", "-q", ROOT, f"{place}/old"], check=True)
        subprocess.run(["git", "checkout", "-q", commit], cwd=f"{place}/old", check=True)
        trees = {"before": Path(place) / "old", "after": ROOT}
        plan = product(range(rounds), ("guess", "sum", "reverse"), trees)
        for i, task, name in tqdm(list(plan), unit="run"):
            command = [sys.executable, "-", task]
            probe = (ROOT / "tests" / "probe.py").read_text()
            how = {"cwd": trees[name], "input": probe, "text": True, "check": True}
            found = json.loads(subprocess.run(command, stdout=subprocess.PIPE, **how).stdout)
            folder = Path(place) / f"{task}-{name}-{i}"
            run_command("train_async.py", folder, trees[name], task=task, steps=60, eval_every=1000)
            steps = [r for r in read_lines(folder / "metrics.jsonl") if "seconds" in r][20:]
            episodes = sum(r["samples"] for r in steps[1:]) / (steps[-1]["t"] - steps[0]["t"])
            values = found["tokens_per_s"] | {"asynchronous run": episodes}
            for role, value in values.items():
                rates.setdefault((task, role), {}).setdefault(name, []).append(value)
            profiles[f"{task}, {name}"] = found["learner_profile"]
    for (task, role), both in rates.items():
        ratios = [new / old for old, new in zip(both["before"], both["after"], strict=True)]
        row = {name: spread(values) for name, values in both.items()}
        result["tasks"].setdefault(task, {})[role] = row | {"ratio": spread(ratios)}
        print(f"{task}, {role}: {np.median(ratios):.2f}x ({min(ratios):.2f} to {max(ratios):.2f})")
    save_result("roles", result | {"learner_profile": profiles})
