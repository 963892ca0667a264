"""campaigns.py: what the project promises of whole runs, measured.

`python bench.py tasks`, `staleness`, `replay`, `faults` and `disk` run these.
Left out: synchronous against asynchronous (races.py).
"""

import subprocess
import sys
from collections.abc import Iterator
from itertools import product
from pathlib import Path

from lab.plots import draw_timeline, new_result, save_result
from lab.races import ROOT, run_each
from runtime.config import SWAPS

SUMMARY = ("steps", "staleness", "ledger", "eval", "command_s")


def campaign_runs(folder: Path, name: str, plan: list[dict], **alike) -> Iterator[tuple]:
    """Run trainers with these flags, one after the other; each becomes a row of NAME.json.

    Yields the row, which is the run's flags and what its summary says, and the run folder. What the
    caller adds to the row is saved.
    """
    named = {", ".join(map(str, flags.values())): flags for flags in plan}
    result = new_result(**alike)
    for label, run, summary in run_each(named, folder, **alike):
        row = named[label] | {key: summary[key] for key in SUMMARY}
        result["runs"].append(row)
        yield row, run
        save_result(folder, name, result)


def bench_tasks(folder: Path) -> None:
    """train_async.py with default flags on each task, several seeds."""
    plan = []
    for task, count in {"guess": 5, "reverse": 3, "sort": 3}.items():
        plan += [{"task": task, "seed": seed} for seed in range(count)]
    for row, run in campaign_runs(folder, "tasks", plan):
        if (row["task"], row["seed"]) == ("guess", 0):
            draw_timeline([run], folder / "guess_timeline.png")


def bench_staleness(folder: Path) -> None:
    """Every bound and swap mode on the heavy-tailed `sum`: the oldest token that was trained, and
    that nothing was lost."""
    pairs = product((0, 1, 2, 4, 8), SWAPS)
    plan = [{"max_staleness": eta, "swap": swap} for eta, swap in pairs]
    alike = {"task": "sum", "steps": 25, "groups_per_step": 8}
    for _ in campaign_runs(folder, "staleness", plan, **alike):
        pass  # a summary says it all


def bench_replay(folder: Path) -> None:
    """Every bound, swap mode and number of workers: 50 steps, then the same weights again from the
    event log alone."""
    plan = []
    for eta, swap, workers in product((0, 1, 4), SWAPS, (1, 2, 3)):
        flags = {"max_staleness": eta, "swap": swap, "rollout_workers": workers}
        plan.append(flags | {"seed": len(plan)})
    alike = {"steps": 50, "groups_per_step": 8, "eval_every": 50}
    for row, run in campaign_runs(folder, "replay", plan, **alike):
        command = [sys.executable, "train_async.py", f"--replay={run.resolve()}"]
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
        row["same"] = done.returncode == 0
        row["said"] = done.stdout.strip() or done.stderr[-500:]


def bench_disk(folder: Path) -> None:
    """Run folders that are damaged, killed or hostile: each goes on, or is refused in one line."""
    from disk import everything

    save_result(folder, "disk", new_result() | everything(folder))


def bench_faults(folder: Path, faults: int = 300) -> None:
    """A randomised campaign of faults over all roles, and kills in the middle of checkpoints."""
    from faults import campaign, checkpoint_kills

    from lab.tables import fault_facts

    result = new_result()
    result["checkpoint_kills"] = checkpoint_kills(folder / "kills", rounds=5)
    for so_far in campaign(folder, faults):
        result |= so_far
        save_result(folder, "faults", result)
    for name, value in fault_facts(result).items():
        print(f"{name}: {value}")
