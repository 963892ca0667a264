"""bench.py: benchmarks; every number in the README comes from here.

    python bench.py plot RUN [RUN ...]      # redraw the pictures of runs
    python bench.py tasks                   # what the README promises of train_async.py
    python bench.py staleness               # every staleness bound with every swap mode
    python bench.py async [full | gpu]      # sync against async: 4 minutes, an hour
    python bench.py roles COMMIT            # both roles' speed, beside that of an older commit
    python bench.py simulate                # calibrate and score the simulator
    python bench.py objectives              # eight objectives under growing staleness
    python bench.py timeline RUN [RUN ...]  # who did what, runs above each other on one axis
    python bench.py replay                  # runs of 50 steps, executed again to the same weights
    python bench.py faults                  # 300 faults on purpose: what is lost (30 minutes)
    python bench.py generator               # decode speed beside transformers (pip install it)
    python bench.py compile                 # generation with and without torch.compile
    python bench.py decode                  # one token at 4k to 16k context, dense and sparse
    python bench.py dsa                     # sparse attention against dense (GPU when there is one)
    python bench.py readme                  # write results/*.json into the README's tables

Left out: training itself (the trainers are run as commands, exactly as a user would).
"""

import shutil
import subprocess
import sys
import tempfile
from itertools import product
from pathlib import Path

import numpy as np
from tqdm import tqdm

from lab.plots import (
    RESULTS,
    draw_comparison,
    draw_objectives,
    draw_run,
    draw_timeline,
    save_result,
)
from lab.races import ROOT, SYNC, bench_async, bench_roles, run_command
from lab.tables import fault_table, write_readme
from runtime.config import OBJECTIVES, fail
from runtime.devices import describe_machine
from runtime.runlog import read_lines


def bench_tasks() -> None:
    """train_async.py with default flags on each task, several seeds -> results/tasks.json, and the
    pictures of the first `guess` run."""
    seeds = {"guess": 5, "reverse": 3, "sort": 3}
    result = {"machine": describe_machine(), "tasks": {}}
    with tempfile.TemporaryDirectory() as place:
        plan = [(task, seed) for task, count in seeds.items() for seed in range(count)]
        for task, seed in tqdm(plan, unit="run"):
            folder = Path(place) / f"{task}-{seed}"
            summary = run_command("train_async.py", folder, task=task, seed=seed)
            row = {name: summary[name] for name in ("seed", "steps", "command_s", "samples")}
            row |= {name: summary[name] for name in ("staleness", "utilization", "groups")}
            row |= {when: summary["eval"][when] for when in ("before", "after")}
            result["tasks"].setdefault(task, []).append(row)
            tqdm.write(f"{task} {seed}: {row['after']} in {row['command_s']} s")
            if (task, seed) == ("guess", 0):
                RESULTS.mkdir(exist_ok=True)
                for picture in ("reward.png", "timeline.png"):
                    shutil.copy(folder / picture, RESULTS / f"guess_{picture}")
            save_result("tasks", result)


def bench_staleness() -> None:
    """Every bound and swap mode on the heavy-tailed `sum`: the oldest token that was trained, and
    that nothing was lost -> results/staleness.json."""
    result = {"machine": describe_machine(), "runs": []}
    plan = [(eta, swap) for eta in (0, 1, 2, 4, 8) for swap in ("keep", "recompute", "drain")]
    with tempfile.TemporaryDirectory() as place:
        for eta, swap in tqdm(plan, unit="run"):
            flags = {"task": "sum", "steps": 25, "groups_per_step": 8, "max_staleness": eta}
            folder = Path(place) / f"{eta}-{swap}"
            summary = run_command("train_async.py", folder, swap=swap, **flags)
            row = {"max_staleness": eta, "swap": swap, **summary["staleness"]}
            result["runs"].append(row | {"groups": summary["groups"], "steps": summary["steps"]})
            save_result("staleness", result)


def bench_objectives(steps: int = 150) -> None:
    """Every objective at growing staleness and with rollout weights rounded on purpose, and the
    damper on and off, on `reverse` with half the usual batch -> results/objectives.json, .png."""
    result = {"machine": describe_machine(), "steps": steps, "runs": []}
    plan = [(name, eta, 1.0, "float32") for name in OBJECTIVES for eta in (0, 4, 16)]
    plan += [(name, 4, 1.0, "float8_e4m3fn") for name in OBJECTIVES]
    plan += [("cispo", eta, at, "float32") for eta in (4, 16) for at in (0.0, 0.15, 1e9)]
    with tempfile.TemporaryDirectory() as place:
        for name, eta, threshold, weights in tqdm(plan, unit="run"):
            flags = {"task": "reverse", "steps": steps, "groups_per_step": 16, "eval_every": steps}
            how = {"objective": name, "max_staleness": eta, "kl_threshold": threshold}
            how["rollout_weights"] = weights
            flags, folder = flags | how, Path(place) / f"{name}-{eta}-{threshold}-{weights}"
            summary = run_command("train_async.py", folder, **flags)
            rows = [r for r in read_lines(folder / "metrics.jsonl") if "seconds" in r]
            row = how | {
                k: float(np.mean([r[k] for r in rows])) for k in ("ess", "kl_behaviour", "lr")
            }
            row |= {"solved": summary["eval_after"], "reward": summary["eval"]["after"]["reward"]}
            row |= {k: summary[k] for k in ("staleness", "reference_share")}
            result["runs"].append(row)
            tqdm.write(f"{name}, η = {eta}, {weights}: {row['reward']:.2f}")
            save_result("objectives", result)
    draw_objectives(result["runs"], RESULTS / "objectives.png")


CALIBRATION = {  # what the simulator learns its costs from ...
    "sum-8": {"task": "sum", "groups_per_step": 8},
    "sum-24": {"task": "sum", "groups_per_step": 24, "max_staleness": 4, "slots": 64},
    "sum-32": {"task": "sum", "groups_per_step": 32, "max_staleness": 0},
    "sum-sync": {"task": "sum", "groups_per_step": 16} | SYNC,
    "guess-12": {"task": "guess", "groups_per_step": 12, "slots": 64},
    "guess-32": {"task": "guess", "max_staleness": 4},
    "guess-16": {"task": "guess", "groups_per_step": 16, "max_staleness": 0},
    "guess-sync": {"task": "guess", "groups_per_step": 24} | SYNC,
}


HELD_OUT = {  # ... and what it has to predict
    "sum-1": {"task": "sum", "groups_per_step": 16, "max_staleness": 1, "slots": 64},
    "sum-drain": {"task": "sum", "groups_per_step": 8, "max_staleness": 3, "swap": "drain"},
    "sum-recompute": {"task": "sum", "groups_per_step": 16, "swap": "recompute"},
    "sum-0": {"task": "sum", "groups_per_step": 16, "max_staleness": 0},
    "sum-sync-24": {"task": "sum", "groups_per_step": 24} | SYNC,
    "guess-1": {"task": "guess", "groups_per_step": 32, "max_staleness": 1, "slots": 64},
    "guess-24": {"task": "guess", "groups_per_step": 24, "max_staleness": 4},
    "guess-0": {"task": "guess", "groups_per_step": 24, "max_staleness": 0},
    "guess-sync-16": {"task": "guess", "groups_per_step": 16} | SYNC,
}


def bench_simulate(rounds: int = 3) -> None:
    """Runs to calibrate the simulator on, and others to score it on -> results/simulate*.json. A
    machine has slow minutes: each run is repeated, and all of its repetitions count."""
    runs = CALIBRATION | HELD_OUT
    with tempfile.TemporaryDirectory() as place:
        for i, name in tqdm(list(product(range(rounds), runs)), unit="run"):
            flags = {"steps": 60, "eval_every": 1000, **runs[name]}
            folder = Path(place) / f"{name}.{i}"
            run_command(flags.pop("trainer", "train_async.py"), folder, **flags)
        for command, names in (("calibrate", CALIBRATION), ("score", HELD_OUT)):
            folders = [f"{place}/{name}.{i}" for name, i in product(names, range(rounds))]
            subprocess.run([sys.executable, "simulate.py", command, *folders], cwd=ROOT, check=True)


def bench_replay() -> None:
    """Every bound, swap mode and number of workers: 50 steps, then the same weights again from the
    event log -> results/replay.json."""
    result = {"machine": describe_machine(), "runs": []}
    plan = list(product((0, 1, 4), ("keep", "recompute", "drain"), (1, 2, 3)))
    with tempfile.TemporaryDirectory() as place:
        for eta, swap, workers in tqdm(plan, unit="run"):
            how = {"max_staleness": eta, "swap": swap, "rollout_workers": workers}
            folder = Path(place) / f"{eta}-{swap}-{workers}"
            flags = {"steps": 50, "groups_per_step": 8, "eval_every": 50} | how
            summary = run_command("train_async.py", folder, seed=len(result["runs"]), **flags)
            command = [sys.executable, "train_async.py", f"--replay={folder}"]
            done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
            row = {**how, "staleness": summary["staleness"], "same": done.returncode == 0}
            row |= {"episodes": summary["samples"], "weights_sha256": summary["weights_sha256"]}
            result["runs"].append(row | {"said": done.stdout.strip() or done.stderr[-500:]})
            save_result("replay", result)


def bench_faults(faults: int = 300) -> None:
    """A randomised campaign over all roles, and kills in checkpoints -> results/faults.json."""
    sys.path.insert(0, str(ROOT / "tests"))  # the injector is for tests only
    from faults import campaign, checkpoint_kills

    result = {"machine": describe_machine()}
    with tempfile.TemporaryDirectory() as place:
        result["checkpoint_kills"] = checkpoint_kills(Path(place) / "kills", rounds=5)
        for so_far in campaign(Path(place), faults):
            save_result("faults", result | so_far)
    print("\n".join(fault_table()))


def main(arguments: list[str]) -> None:
    import speed

    commands = {
        "generator": speed.bench_generator,
        "compile": speed.bench_compile,
        "decode": speed.bench_decode,
        "dsa": speed.bench_dsa,
        "objectives": bench_objectives,
        "simulate": bench_simulate,
        "replay": bench_replay,
        "faults": bench_faults,
        "tasks": bench_tasks,
        "staleness": bench_staleness,
        "readme": write_readme,
    }
    command, *runs = arguments or [""]
    if command == "plot" and runs:
        for run in runs:
            draw_run(Path(run))
        if len(runs) > 1:
            draw_comparison([Path(run) for run in runs], Path("comparison.png"))
    elif command == "timeline" and runs:
        draw_timeline([Path(run) for run in runs], Path("timeline.png"))
    elif command == "roles" and len(runs) in (1, 2) and all(n.isdigit() for n in runs[1:]):
        bench_roles(runs[0], *map(int, runs[1:]))
    elif command == "async" and runs in ([], ["full"], ["gpu"]):
        bench_async(*runs)
    elif command in commands and not runs:
        commands[command]()
    else:
        allowed = (
            f"{', '.join(commands)}, async [full | gpu], roles COMMIT [ROUNDS], plot RUN ... "
            "or timeline RUN ..."
        )
        fail(ValueError(f"{' '.join(arguments)!r}: must be {allowed}"))


if __name__ == "__main__":
    main(sys.argv[1:])
