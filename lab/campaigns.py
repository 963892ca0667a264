"""campaigns.py: what the project promises of whole runs, measured.

`python bench.py tasks`, `staleness`, `objectives`, `replay` and `faults` run these.
Left out: synchronous against asynchronous (races.py).
"""

import subprocess
import sys
from itertools import product
from pathlib import Path

import numpy as np

from lab.plots import draw_reward, draw_timeline, save_result
from lab.races import ROOT, run_each
from runtime.config import OBJECTIVES
from runtime.devices import describe_machine
from runtime.runlog import read_lines

SWAPS = ("keep", "recompute", "drain")


def bench_tasks(folder: Path) -> None:
    """train_async.py with default flags on each task, several seeds."""
    result, plan = {"machine": describe_machine(), "tasks": {}}, {}
    for task, count in {"guess": 5, "reverse": 3, "sort": 3}.items():
        plan |= {f"{task}, seed {seed}": {"task": task, "seed": seed} for seed in range(count)}
    for name, run, summary in run_each(plan, folder):
        kept = ("seed", "steps", "command_s", "samples", "staleness")
        row = {key: summary[key] for key in kept} | summary["eval"]
        row["groups"] = summary["ledger"]
        result["tasks"].setdefault(plan[name]["task"], []).append(row)
        save_result(folder, "tasks", result)
        if name == "guess, seed 0":
            draw_reward(run, folder / "guess_reward.png")
            draw_timeline([run], folder / "guess_timeline.png")


def bench_staleness(folder: Path) -> None:
    """Every bound and swap mode on the heavy-tailed `sum`: the oldest token that was trained, and
    that nothing was lost."""
    result, plan = {"machine": describe_machine(), "runs": []}, {}
    for eta, swap in product((0, 1, 2, 4, 8), SWAPS):
        plan[f"bound {eta}, {swap}"] = {"max_staleness": eta, "swap": swap}
    alike = {"task": "sum", "steps": 25, "groups_per_step": 8}
    for name, _, summary in run_each(plan, folder, **alike):
        row = plan[name] | summary["staleness"] | {"groups": summary["ledger"]}
        result["runs"].append(row)
        save_result(folder, "staleness", result)


def bench_objectives(folder: Path, steps: int = 150) -> None:
    """Every objective at growing staleness and with rollout weights rounded on purpose, and the
    damper on and off, on `reverse` with half the usual batch."""
    arms = [(name, eta, 1.0, "float32") for name in OBJECTIVES for eta in (0, 4, 16)]
    arms += [(name, 4, 1.0, "float8_e4m3fn") for name in OBJECTIVES]
    arms += [("cispo", eta, at, "float32") for eta in (4, 16) for at in (0.0, 0.15, 1e9)]
    fields = ("objective", "max_staleness", "kl_threshold", "rollout_weights")
    plan = {" ".join(map(str, arm)): dict(zip(fields, arm, strict=True)) for arm in arms}
    alike = {"task": "reverse", "steps": steps, "groups_per_step": 16, "eval_every": steps}
    result = {"machine": describe_machine(), "steps": steps, "runs": []}
    for name, run, summary in run_each(plan, folder, **alike):
        rows = [row for row in read_lines(run / "metrics.jsonl") if "seconds" in row]
        row = plan[name] | {key: summary[key] for key in ("staleness", "reference_share")}
        row["reward"] = summary["eval"]["after"]["reward"]
        row["ess"] = float(np.mean([row["ess"] for row in rows]))
        result["runs"].append(row)
        save_result(folder, "objectives", result)


def bench_replay(folder: Path) -> None:
    """Every bound, swap mode and number of workers: 50 steps, then the same weights again from the
    event log alone."""
    result, plan = {"machine": describe_machine(), "runs": []}, {}
    for eta, swap, workers in product((0, 1, 4), SWAPS, (1, 2, 3)):
        how = {"max_staleness": eta, "swap": swap, "rollout_workers": workers, "seed": len(plan)}
        plan[f"bound {eta}, {swap}, {workers} workers"] = how
    alike = {"steps": 50, "groups_per_step": 8, "eval_every": 50}
    for name, run, summary in run_each(plan, folder, **alike):
        command = [sys.executable, "train_async.py", f"--replay={run.resolve()}"]
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
        kept = {key: summary[key] for key in ("staleness", "samples", "weights_sha256")}
        said = done.stdout.strip() or done.stderr[-500:]
        result["runs"].append(plan[name] | kept | {"same": done.returncode == 0, "said": said})
        save_result(folder, "replay", result)


def bench_faults(folder: Path, faults: int = 300) -> None:
    """A randomised campaign of faults over all roles, and kills in the middle of checkpoints."""
    from lab.tables import fault_rows

    sys.path.insert(0, str(ROOT / "tests"))  # faults on purpose are for tests only
    from faults import campaign, checkpoint_kills

    result = {"machine": describe_machine()}
    result["checkpoint_kills"] = checkpoint_kills(folder / "kills", rounds=5)
    for so_far in campaign(folder, faults):
        result |= so_far
        save_result(folder, "faults", result)
    for name, value in fault_rows(result):
        print(f"{name}: {value}")
