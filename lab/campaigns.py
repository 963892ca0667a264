"""campaigns.py: what the project promises of whole runs: plans as data, and one runner.

`python bench.py tasks`, `staleness`, `agents`, `replay`, `smollm2`, `faults`, `disk` run these. A
plan is {label: flags}; what a run's summary says becomes a row of NAME.json.
Left out: synchronous against asynchronous (races.py).
"""

import shutil
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product
from pathlib import Path

from lab.plots import draw_panels, save_result
from lab.races import ROOT, crossing, exams_of, run_each
from lab.speed import DEVICE
from runtime.config import SWAPS, flag
from runtime.folder import read_lines
from runtime.huggingface import export, stored_model
from runtime.pictures import draw_timeline

SUMMARY = ("steps", "samples", "staleness", "ledger", "eval", "command_s")


def campaign(
    folder: Path, name: str, plan: dict[str, dict], keep=False, **alike
) -> Iterator[tuple]:
    """Run trainers, {label: flags}, one after the other; each becomes a row of NAME.json.

    Yields the label, the row, which is the run's flags and what its summary says, and the run
    folder. What the caller adds to the row is saved. keep: the checkpoints stay.
    """
    result = {**alike, "runs": []}
    for label, run, summary in run_each(plan, folder, keep, **alike):
        row = plan[label] | {key: summary.get(key) for key in SUMMARY}
        result["runs"].append(row)
        yield label, row, run
        save_result(folder, name, result)


def bench_tasks(folder: Path) -> None:
    """train_async.py with default flags on each task, several seeds."""
    plan = {}
    for task, seeds in {"guess": 5, "reverse": 3, "sort": 3}.items():
        plan |= {f"{task}, {seed}": {"task": task, "seed": seed} for seed in range(seeds)}
    for label, _, run in campaign(folder, "tasks", plan):
        if label == "guess, 0":
            draw_timeline([run], folder / "guess_timeline.png")


def bench_staleness(folder: Path) -> None:
    """Every bound and swap mode on the heavy-tailed `sum`: the oldest token that was trained, and
    that nothing was lost."""
    plan = {}
    for eta, swap in product((0, 1, 2, 4, 8), SWAPS):
        plan[f"{eta}, {swap}"] = {"max_staleness": eta, "swap": swap}
    alike = {"task": "sum", "steps": 25, "groups_per_step": 8}
    list(campaign(folder, "staleness", plan, **alike))  # a summary says it all


# ------------------------------------------------------------------------- tasks with turns

AGENTS = ("hops:3", "hops:3:0.05", "lab/debug.py")  # second: a tool that fails in 5% of the turns
GOALS = {"hops:3": 0.95, "hops:3:0.05": 0.95, "lab/debug.py": 0.8, "guess": 0.9}  # held out, solved
TURNS = {"credit": "turn"}
CRITIC = {"advantage": "gae", "group_size": 1, "groups_per_step": 512}  # as many episodes a step
PARTS = ("guess", "reverse:6", "hops:3")
MIXED = {"task": ",".join(PARTS), "ratio": "2,1,1"}  # as many groups of hops:3 as alone
# {arm: flags}; an arm's name begins with its task
ARMS = {task: {} for task in (*AGENTS, *PARTS)} | {"mixture": MIXED}
ARMS |= {"hops:3, credit by turn": TURNS, "lab/debug.py, credit by turn": TURNS}
ARMS |= {"guess, critic": CRITIC, "hops:3, critic": CRITIC}


def agent_plan() -> dict[str, dict]:
    """{name: flags}: seed after seed, so that slow minutes hit all arms alike."""
    plan = {}
    for seed, (arm, flags) in product(range(5), ARMS.items()):
        plan[f"{arm}, seed {seed}"] = {"task": arm.partition(",")[0], "seed": seed} | flags
    return plan


def bench_agents(folder: Path) -> None:
    """Every arm: solved before and after, seconds, and episodes to the goal of the task."""
    for label, row, run in campaign(folder, "agents", agent_plan()):
        row["arm"] = label.rpartition(", seed ")[0]
        if goal := GOALS.get(row["task"]):
            row["goal_s"], row["goal_samples"] = crossing(exams_of(run, "solved"), goal)


# --------------------------------------------------------------------- replay, faults and disks


def bench_replay(folder: Path) -> None:
    """Every bound, swap mode and number of workers: 50 steps, then the same weights again from the
    event log alone."""
    plan = {}
    for eta, swap, workers in product((0, 1, 4), SWAPS, (1, 2, 3)):
        flags = {"max_staleness": eta, "swap": swap, "rollout_workers": workers}
        plan[f"{eta}, {swap}, {workers}"] = flags | {"seed": len(plan)}
    alike = {"steps": 50, "groups_per_step": 8, "eval_every": 50}
    for _, row, run in campaign(folder, "replay", plan, **alike):
        command = [sys.executable, "train_async.py", f"--replay={run.resolve()}"]
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
        row["same"] = done.returncode == 0
        row["said"] = done.stdout.strip() or done.stderr[-500:]


def bench_disk(folder: Path) -> None:
    """Run folders that are damaged, killed or hostile: each goes on, or is refused in one line."""
    from disk import everything

    save_result(folder, "disk", everything(folder))


def bench_faults(folder: Path) -> None:
    """A randomised campaign of faults over all roles, and kills in the middle of checkpoints."""
    import faults

    result = {"checkpoint_kills": faults.checkpoint_kills(folder / "kills", rounds=5)}
    for so_far in faults.campaign(folder, faults=300):
        save_result(folder, "faults", result | so_far)


SMOLLM2 = {"chat": "yes", "dtype": "auto", "lr": 3e-5, "entropy": 0.0, "steps": 30}
SMOLLM2 |= {"groups_per_step": 16, "group_size": 8, "keep_dead": "no", "eval_every": 10}
BOTH = {"sync": {"trainer": "train_sync.py"}, "async, η = 2": {"max_staleness": 2}}
# half of the answers have 21 tokens or fewer, some 128: generation takes most of the time
LONG = {"task": "gym:simple_equations:tokens=128", "steps": 8, "groups_per_step": 4}
LONG |= {"eval_every": 8, "eval_when": "late", "keep_dead": "yes"}  # nothing but training counts
ARMS_SMOLLM2 = BOTH | {f"{arm}, up to 128 tokens": BOTH[arm] | LONG for arm in BOTH}


@dataclass(frozen=True)
class Smollm2Config:
    """Which folder learns, and how often."""

    folder: str = flag(
        "smollm2", "as `python -m runtime.huggingface smollm2 FOLDER` has written it"
    )
    seeds: int = flag(3, "runs of each way", 1)


def bench_smollm2(folder: Path, config: Smollm2Config) -> None:
    """Published weights learn sums of two numbers; what was trained is given to transformers. Then
    both trainers on longer answers, for their seconds a step alone."""
    from folder_run import same_answers

    plan, curves = {}, {}
    for seed, (arm, flags) in product(range(config.seeds), ARMS_SMOLLM2.items()):
        if arm in BOTH or seed == 0:
            plan[f"{arm}, {seed}"] = flags | {"seed": seed}
    alike = SMOLLM2 | {"model": str(Path(config.folder).resolve()), "task": "add"}
    for label, row, run in campaign(folder, f"smollm2-{DEVICE}", plan, keep=True, **alike):
        arm, _, seed = label.rpartition(", ")
        seconds, _, solved = zip(*exams_of(run, "solved"), strict=True)
        times = [line["t"] for line in read_lines(run / "metrics.jsonl") if "seconds" in line]
        row |= {"arm": arm, "before": solved[0], "solved": solved[-1]}
        row |= {"minutes": row["command_s"] / 60}
        times = times[2:]  # from step η + 1 on: episodes of those before may have been ready
        row |= {"step_s": (times[-1] - times[0]) / (len(times) - 1)}
        if arm in BOTH and seed == "0":
            curves[arm] = seconds, solved
        if arm in BOTH and DEVICE == "cpu":  # a lent GPU's minutes are worth more
            export(*stored_model(run), folder / f"{run.name}-out")
            row["same_answers"] = same_answers(folder / f"{run.name}-out", "add")
            shutil.rmtree(folder / f"{run.name}-out")
        shutil.rmtree(run / "checkpoints")
    axis = {"xlabel": "seconds; a dot every 10 steps", "ylabel": "held out, solved"}
    picture = folder / f"smollm2-{DEVICE}.png"
    draw_panels(picture, "SmolLM2-135M learns sums", [(curves, axis)], columns=1)
