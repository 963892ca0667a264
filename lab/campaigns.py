"""campaigns.py: what the project promises of whole runs, measured.

`python bench.py tasks`, `staleness`, `replay`, `faults` and `disk` run these.
Left out: synchronous against asynchronous (races.py).
"""

import math
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from itertools import product
from pathlib import Path

from lab.plots import save_result
from lab.races import ROOT, run_each
from runtime.config import SWAPS
from runtime.pictures import column, draw_timeline

SUMMARY = ("steps", "samples", "staleness", "ledger", "eval", "tasks")
SUMMARY += ("sessions", "utilization", "command_s")


def campaign_runs(folder: Path, name: str, plan: dict[str, dict], **alike) -> Iterator[tuple]:
    """Run trainers, {label: flags}, one after the other; each becomes a row of NAME.json.

    Yields the label, the row, which is the run's flags and what its summary says, and the run
    folder. What the caller adds to the row is saved.
    """
    result = {**alike, "runs": []}
    for label, run, summary in run_each(plan, folder, **alike):
        row = plan[label] | {key: summary[key] for key in SUMMARY}
        result["runs"].append(row)
        yield label, row, run
        save_result(folder, name, result)


def bench_tasks(folder: Path) -> None:
    """train_async.py with default flags on each task, several seeds."""
    plan = {}
    for task, count in {"guess": 5, "reverse": 3, "sort": 3}.items():
        plan |= {f"{task}, {seed}": {"task": task, "seed": seed} for seed in range(count)}
    for label, _, run in campaign_runs(folder, "tasks", plan):
        if label == "guess, 0":
            draw_timeline([run], folder / "guess_timeline.png")


def bench_staleness(folder: Path) -> None:
    """Every bound and swap mode on the heavy-tailed `sum`: the oldest token that was trained, and
    that nothing was lost."""
    plan = {}
    for eta, swap in product((0, 1, 2, 4, 8), SWAPS):
        plan[f"{eta}, {swap}"] = {"max_staleness": eta, "swap": swap}
    alike = {"task": "sum", "steps": 25, "groups_per_step": 8}
    list(campaign_runs(folder, "staleness", plan, **alike))  # a summary says it all


def bench_replay(folder: Path) -> None:
    """Every bound, swap mode and number of workers: 50 steps, then the same weights again from the
    event log alone."""
    plan = {}
    for eta, swap, workers in product((0, 1, 4), SWAPS, (1, 2, 3)):
        flags = {"max_staleness": eta, "swap": swap, "rollout_workers": workers}
        plan[f"{eta}, {swap}, {workers}"] = flags | {"seed": len(plan)}
    alike = {"steps": 50, "groups_per_step": 8, "eval_every": 50}
    for _, row, run in campaign_runs(folder, "replay", plan, **alike):
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
    from faults import campaign, checkpoint_kills

    result = {"checkpoint_kills": checkpoint_kills(folder / "kills", rounds=5)}
    for so_far in campaign(folder, faults=300):
        result |= so_far
        save_result(folder, "faults", result)


def fault_facts(result: dict) -> dict:
    """What a campaign of faults has shown."""
    waits, kinds = result["noticed_after_s"], ("dead", "stopped", "learners again")
    none = {"median": math.nan, "max": math.nan}  # there was no such fault
    dead, silent, again = (waits.get(kind, none) for kind in kinds)
    kills, ends = result["checkpoint_kills"], Counter(result["ends"])
    hangs = sum("hangs" in said for said in column(result["failures"], "said"))
    by_name = sum(ends.values()) - ends["finished"] - ends["killed"]
    return {
        f"faults injected, in {len(result['runs'])} runs of all roles": result["faults"],
        "runs that hung, or ended without naming an error": f"{hangs}, {len(result['failures'])}",
        "groups lost, trained twice": f"{result['lost']}, {result['duplicated']}",
        "runs killed, or stopped with an error by name": f"{ends['killed']}, {by_name}",
        "groups made again": result["requeued"],
        "until a dead worker is named (s)": f"{dead['median']:.2f}, at most {dead['max']:.2f}",
        "until a silent one is": f"{silent['median']:.1f}, at most {silent['max']:.1f}",
        "until all learners are there again": f"{again['median']:.1f}, at most {again['max']:.1f}",
        "longest time without a step (s)": f"{result['no_progress_s']:.1f}",
        "kills in the middle of a checkpoint": kills["kills"],
        "weights at the end as without kills": "yes" if kills["bitwise_equal"] else "NO",
    }
