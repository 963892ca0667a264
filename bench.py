"""bench.py: benchmarks; every number in the README comes from here.

    python bench.py plot RUN [RUN ...]      # redraw the pictures of runs
    python bench.py tasks                   # what the README promises of train_async.py
    python bench.py staleness               # every staleness bound with every swap mode
    python bench.py async [full]            # sync against async: 5 minutes, or two hours
    python bench.py roles COMMIT            # both roles' speed, beside that of an older commit
    python bench.py simulate                # calibrate and score the simulator
    python bench.py objectives              # eight objectives under growing staleness
    python bench.py timeline RUN [RUN ...]  # who did what, runs above each other on one axis
    python bench.py replay                  # runs of 50 steps, executed again to the same weights
    python bench.py faults                  # 300 faults on purpose: what is lost (30 minutes)
    python bench.py generator               # decode speed beside transformers (pip install it)
    python bench.py decode                  # one token at 4k to 16k context, dense and sparse
    python bench.py dsa                     # sparse attention against dense (GPU when there is one)
    python bench.py readme                  # write results/*.json into the README's tables

Left out: training itself (the trainers are run as commands, exactly as a user would).
"""

import json
import math
import shutil
import subprocess
import sys
import tempfile
import time
from itertools import product
from pathlib import Path

import numpy as np
from tqdm import tqdm

import common
import report
from report import RESULTS, load_result, save_result

ROOT = Path(__file__).parent

# -------------------------------------------------------------------------- whole training runs


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


def bench_tasks() -> None:
    """train_async.py with default flags on each task, several seeds -> results/tasks.json, and the
    pictures of the first `guess` run."""
    seeds = {"guess": 5, "reverse": 3, "sort": 3}
    result = {"machine": common.describe_machine(), "tasks": {}}
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
    result = {"machine": common.describe_machine(), "runs": []}
    plan = [(eta, swap) for eta in (0, 1, 2, 4, 8) for swap in ("keep", "recompute", "drain")]
    with tempfile.TemporaryDirectory() as place:
        for eta, swap in tqdm(plan, unit="run"):
            flags = {"task": "sum", "steps": 25, "groups_per_step": 8, "max_staleness": eta}
            folder = Path(place) / f"{eta}-{swap}"
            summary = run_command("train_async.py", folder, swap=swap, **flags)
            row = {"max_staleness": eta, "swap": swap, **summary["staleness"]}
            result["runs"].append(row | {"groups": summary["groups"], "steps": summary["steps"]})
            save_result("staleness", result)


SYNC = {"trainer": "train_sync.py"}
ALL = "sync, all generate, then all train"
MODES = {  # name -> how it is run; on two cores, one device is one core
    "sync, one core": SYNC,
    "sync, two threads": SYNC | {"threads": 2},
    ALL: {"max_staleness": 0, "rollout_workers": 2, "learners": 2},
    "one step ahead": {"max_staleness": 1, "swap": "drain"},
    "async, η = 1": {"max_staleness": 1},
    "async, η = 2": {"max_staleness": 2},
    "async, η = 4": {"max_staleness": 4},
    "async, η = 8": {"max_staleness": 8},
    "async, η = 4, drain": {"max_staleness": 4, "swap": "drain"},
    "async, η = 4, recompute": {"max_staleness": 4, "swap": "recompute"},
}
SPLIT = {  # what each change of mode gains in episodes a second, from synchronous on
    "overlap": "one step ahead",
    "no straggler tail": "async, η = 4, drain",
    "swaps in flight": "async, η = 4",
}
TARGETS = {"guess": ("solved", 0.9), "sum": ("reward", 0.8)}  # held-out score to reach
HEADLINE = ["sync, two threads", ALL, "async, η = 2", "async, η = 4", "async, η = 8"]


def bench_async(kind: str = "quick") -> None:
    """Synchronous, one step ahead, asynchronous: wall-clock time to the same held-out score, on
    `guess` and the heavy-tailed `sum` -> results/async.json and .png.

    quick: two seeds of three modes, one task; full: five seeds of the headline modes and three of
    the others. What is measured already is not measured again: delete the file to start over.
    """
    full = kind == "full"
    names, tasks = (MODES, TARGETS) if full else (HEADLINE[:3], ["guess"])
    seeds = {name: (5 if name in HEADLINE else 3) if full else 2 for name in names}
    plan = [(t, name, i) for i in range(5) for t in tasks for name in names if i < seeds[name]]
    path = RESULTS / ("async.json" if full else "async-quick.json")
    new = {"machine": common.describe_machine(), "runs": []}
    result = json.loads(path.read_text()) if path.is_file() else new
    done = {(r["task"], r["mode"], r["seed"]) for r in result["runs"]}
    with tempfile.TemporaryDirectory() as place:
        for task, name, seed in tqdm([p for p in plan if p not in done], unit="run"):
            flags = {"task": task, "seed": seed, "eval_every": 20, **MODES[name]}
            folder = Path(place) / f"{task}-{list(MODES).index(name)}-{seed}"
            summary = run_command(flags.pop("trainer", "train_async.py"), folder, **flags)
            row = {"task": task, "mode": name, "seed": seed} | speed_of(folder, summary, task)
            result["runs"].append(row)
            tqdm.write(f"{task}, {name}, seed {seed}: {row['target_s']} s to the target")
            save_result(path.stem, result)
    report.draw_async(result["runs"], HEADLINE, TARGETS, RESULTS / f"{path.stem}.png")
    print("\n".join(async_table(result["runs"])))


def speed_of(folder: Path, summary: dict, task: str) -> dict:
    """What a run says about speed. The clock starts when the first episode does, and the target is
    reached on a straight line between two evaluations; a role is busy while it decodes or trains
    and publishes, evaluations left out, from first to last step."""
    rows, events = (common.read_lines(folder / f"{n}.jsonl") for n in ("metrics", "events"))
    spans = {k: [e for e in events if e["kind"] == k] for k in ("generate", "train", "publish")}
    steps, metric, goal = [r for r in rows if "seconds" in r], *TARGETS[task]
    zero, begin = spans["generate"][0]["t"], steps[0]["t"]
    trained = [e["t"] + e["seconds"] for e in spans["train"]]
    seconds = steps[-1]["t"] - begin
    judged = [r["t"] - end for r, end in zip(steps[1:], trained[1:], strict=True) if "eval" in r]
    held = [
        [max(0.0, r["t"] - zero), r["step"] * steps[0]["samples"], r["eval"][metric]]
        for r in rows
        if "eval" in r
    ]
    workers = len({e["process"] for e in spans["generate"]})
    busy = {
        role: sum(e["seconds"] for k in kinds for e in spans[k] if e["t"] >= begin)
        for role, kinds in {"rollout": ["generate"], "learner": ["train", "publish"]}.items()
    }
    return {
        **dict(zip(("target_s", "target_samples"), crossing(held, goal), strict=True)),
        "final": held[-1][2],
        "samples_per_s": (len(steps) - 1) * steps[0]["samples"] / (seconds - sum(judged)),
        "busy_rollout": busy["rollout"] / (seconds * workers),
        "busy_learner": busy["learner"] / (seconds - sum(judged)),
        "staleness": summary["staleness"]["mean"],
        "command_s": summary["command_s"],
        "held": held,
    }


def crossing(held: list, goal: float) -> tuple:
    """Seconds and samples at which (seconds, samples, score) reach a goal; None if they never do."""
    for (t, n, value), (later, more, better) in zip(held, held[1:], strict=False):
        if better >= goal:
            share = max(0.0, (goal - value) / max(better - value, 1e-9))
            return t + share * (later - t), n + share * (more - n)
    return None, None


def async_table(runs: list[dict]) -> list[str]:
    """Every mode beside the best synchronous one: medians over the seeds, with their extremes."""
    lines = []
    for task in dict.fromkeys(r["task"] for r in runs):
        of = {m: [r for r in runs if (r["task"], r["mode"]) == (task, m)] for m in MODES}
        of = {mode: own for mode, own in of.items() if own}

        def median(mode: str, key: str, of: dict = of) -> float:
            return float(np.median([r[key] or math.inf for r in of[mode]]))

        best = min((m for m in of if m.startswith("sync")), key=lambda m: median(m, "target_s"))
        metric, goal = TARGETS[task]
        lines += [
            "",
            f"| `{task}`: to a held-out {metric} of {goal} | seconds | × best sync | samples | "
            "episodes/s | busy: rollout, learner | staleness | final |",
            "|---|---|---|---|---|---|---|---|",
        ]
        for mode, own in of.items():
            seconds = [r["target_s"] or math.inf for r in own]
            cells = [
                f"{np.median(seconds):.1f} ({min(seconds):.1f} to {max(seconds):.1f})",
                f"{median(best, 'target_s') / np.median(seconds):.2f}",
                f"{median(mode, 'target_samples'):,.0f}",
                f"{median(mode, 'samples_per_s'):,.0f}",
                f"{median(mode, 'busy_rollout'):.0%}, {median(mode, 'busy_learner'):.0%}",
                f"{np.median([r['staleness'] for r in own]):.2f}",
                between([r["final"] for r in own], ".2f"),
            ]
            lines.append(f"| {mode}{' (best sync)' * (mode == best)} | {' | '.join(cells)} |")
        if all(mode in of for mode in SPLIT.values()):
            rates = [median(mode, "samples_per_s") for mode in (best, *SPLIT.values())]
            gains = zip(SPLIT, rates, rates[1:], strict=False)
            parts = " × ".join(f"{name} {new / old:.2f}" for name, old, new in gains)
            what = f"{SPLIT['swaps in flight']} over {best}: {rates[-1] / rates[0]:.2f}"
            lines += ["", f"Episodes a second, {what} = {parts}."]
    return lines


def bench_roles(commit: str, rounds: int = 5) -> None:
    """Generator and learner alone, and whole runs, in this tree and in that of an older commit, in
    turn -> results/roles.json. What is compared: tokens a second of the roles, episodes of runs."""
    result = {"machine": common.describe_machine(), "before": commit, "tasks": {}}
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
            steps = [r for r in common.read_lines(folder / "metrics.jsonl") if "seconds" in r][20:]
            episodes = sum(r["samples"] for r in steps[1:]) / (steps[-1]["t"] - steps[0]["t"])
            values = found["tokens_per_s"] | {"asynchronous run": episodes}
            for role, value in values.items():
                rates.setdefault((task, role), {}).setdefault(name, []).append(value)
            profiles[f"{task}, {name}"] = found["learner_profile"]
    for (task, role), both in rates.items():
        ratios = [new / old for old, new in zip(both["before"], both["after"], strict=True)]
        row = {name: report.spread(values) for name, values in both.items()}
        result["tasks"].setdefault(task, {})[role] = row | {"ratio": report.spread(ratios)}
        print(f"{task}, {role}: {np.median(ratios):.2f}x ({min(ratios):.2f} to {max(ratios):.2f})")
    save_result("roles", result | {"learner_profile": profiles})


def bench_objectives(steps: int = 150) -> None:
    """Every objective at growing staleness, and the damper on and off, on `reverse` with half the
    usual batch -> results/objectives.json and .png."""
    result = {"machine": common.describe_machine(), "steps": steps, "runs": []}
    plan = [(name, eta, 0.15) for name in common.OBJECTIVES for eta in (0, 4, 16)]
    plan += [("cispo", eta, threshold) for eta in (4, 16) for threshold in (0.0, 1e9)]
    with tempfile.TemporaryDirectory() as place:
        for name, eta, threshold in tqdm(plan, unit="run"):
            flags = {"task": "reverse", "steps": steps, "groups_per_step": 16, "eval_every": steps}
            flags |= {"objective": name, "max_staleness": eta, "kl_threshold": threshold}
            folder = Path(place) / f"{name}-{eta}-{threshold}"
            summary = run_command("train_async.py", folder, **flags)
            rows = [r for r in common.read_lines(folder / "metrics.jsonl") if "seconds" in r]
            row = {"objective": name, "max_staleness": eta, "kl_threshold": threshold}
            row |= {k: float(np.mean([r[k] for r in rows])) for k in ("ess", "kl_behaviour", "lr")}
            row |= {"solved": summary["eval_after"], "reward": summary["eval"]["after"]["reward"]}
            row |= {k: summary[k] for k in ("staleness", "reference_share")}
            result["runs"].append(row)
            tqdm.write(f"{name}, η = {eta}: {row['reward']:.2f}")
            save_result("objectives", result)
    report.draw_objectives(result["runs"], RESULTS / "objectives.png")


CALIBRATION = {  # what the simulator learns its costs from ...
    "sum-8": {"task": "sum", "groups_per_step": 8},
    "sum-24": {"task": "sum", "groups_per_step": 24, "max_staleness": 4, "slots": 64},
    "sum-sync": {"task": "sum", "groups_per_step": 16} | SYNC,
    "guess-12": {"task": "guess", "groups_per_step": 12, "slots": 64},
    "guess-32": {"task": "guess", "max_staleness": 4},
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


def bench_simulate() -> None:
    """Runs to calibrate the simulator on, and others to score it on -> results/simulate*.json."""
    with tempfile.TemporaryDirectory() as place:
        for name, how in tqdm((CALIBRATION | HELD_OUT).items(), unit="run"):
            flags = {"steps": 60, "eval_every": 1000, **how}
            run_command(flags.pop("trainer", "train_async.py"), Path(place) / name, **flags)
        for command, runs in (("calibrate", CALIBRATION), ("score", HELD_OUT)):
            folders = [str(Path(place) / name) for name in runs]
            subprocess.run([sys.executable, "simulate.py", command, *folders], cwd=ROOT, check=True)


def bench_replay() -> None:
    """Every bound, swap mode and number of workers: 50 steps, then the same weights again from the
    event log -> results/replay.json."""
    result = {"machine": common.describe_machine(), "runs": []}
    plan = list(product((0, 1, 4), ("keep", "recompute", "drain"), (1, 2, 3)))
    with tempfile.TemporaryDirectory() as place:
        for eta, swap, workers in tqdm(plan, unit="run"):
            how = {"max_staleness": eta, "swap": swap, "rollout_workers": workers}
            folder = Path(place) / f"{eta}-{swap}-{workers}"
            flags = {
                "steps": 50,
                "groups_per_step": 8,
                "eval_every": 50,
                "seed": len(result["runs"]),
            }
            summary = run_command("train_async.py", folder, **how, **flags)
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

    result = {"machine": common.describe_machine()}
    with tempfile.TemporaryDirectory() as place:
        result["checkpoint_kills"] = checkpoint_kills(Path(place) / "kills", rounds=5)
        for so_far in campaign(Path(place), faults):
            save_result("faults", result | so_far)
    print("\n".join(fault_table()))


def readme_tables() -> str:
    """The measured part of the README, from results/*.json; a test compares the two."""
    tasks, speed, bounds = (load_result(name) for name in ("tasks", "generator", "staleness"))
    machine = tasks["machine"]
    lines = [
        f"Machine: {machine['cores']} cores of {machine['cpu']}, Python {machine['python']}, "
        f"torch {machine['torch']}. `solved`: the number was found within 6 guesses; in the other "
        "tasks, a held-out problem was answered without a single mistake. Answers are greedy.",
        "",
        "| `train_async.py`, default flags | solved before | solved after | turns | seconds |",
        "|---|---|---|---|---|",
    ]
    for task, rows in tasks["tasks"].items():
        runs = f"`--task {task}`, {len(rows)} seeds, {rows[0]['steps']} steps"
        columns = [
            between([r["before"]["solved"] for r in rows], ".0%"),
            between([r["after"]["solved"] for r in rows], ".1%"),
            between([r["after"]["turns"] for r in rows], ".2f"),
            between([r["command_s"] for r in rows], ".0f"),
        ]
        lines.append(f"| {runs} | {' | '.join(columns)} |")
    worst = {
        eta: max(r["max"] for r in bounds["runs"] if r["max_staleness"] == eta)
        for eta in sorted({r["max_staleness"] for r in bounds["runs"]})
    }
    lost = sum(r["groups"]["admitted"] - r["groups"]["trained"] for r in bounds["runs"])
    oldest = ", ".join(f"{worst[eta]} (bound {eta})" for eta in worst)
    lines += [
        "",
        f"Oldest token ever trained, in versions, over all three swap modes: {oldest}; "
        f"{lost} of {sum(r['groups']['admitted'] for r in bounds['runs'])} groups lost or dropped.",
        "",
        f"| decode on one CPU thread, {speed['parameters'] / 1e6:.2f}M parameters, "
        f"{speed['slots']} slots | tokens/s | transformers {speed['transformers']} | ratio |",
        "|---|---|---|---|",
    ]
    for name, row in speed["workloads"].items():
        ours, theirs = (row["tokens_per_s"][who]["median"] for who in ("nanoglm", "transformers"))
        ratio = row["ratio"]
        lines.append(
            f"| {name} | {ours:,.0f} | {theirs:,.0f} | "
            f"**{ratio['median']:.2f}×** ({ratio['min']:.2f} to {ratio['max']:.2f}) |"
        )
    return "\n".join(lines + fault_table() + sparse_tables())


def fault_table() -> list[str]:
    """The measured part of the README on faults and replay."""
    result, runs = load_result("faults"), load_result("replay")["runs"]
    dead, stopped = (result["noticed_after_s"][kind] for kind in ("dead", "stopped"))
    kills, same = result["checkpoint_kills"], sum(run["same"] for run in runs)
    hangs = sum("hangs" in failure["said"] for failure in result["failures"])
    ends = result["ends"]
    cells = {
        f"faults injected, in {len(result['runs'])} runs of all roles": result["faults"],
        "runs that hung, or ended without naming an error": f"{hangs}, {len(result['failures'])}",
        "groups lost, trained twice": f"{result['lost']}, {result['duplicated']}",
        "runs killed or stopped with an error by name, and resumed": (
            f"{ends.get('killed', 0)}, {sum(ends.values()) - ends['finished'] - ends['killed']}"
        ),
        "groups made again": result["requeued"],
        "until a dead worker is named (s)": f"{dead['median']:.2f}, at most {dead['max']:.2f}",
        "until a stopped worker is named (s)": (
            f"{stopped['median']:.1f}, at most {stopped['max']:.1f}"
        ),
        "longest time without a step (s)": f"{result['no_progress_s']:.1f}",
        "kills in the middle of a checkpoint": kills["kills"],
        "… resumed each time, weights at the end as without": "yes"
        if kills["bitwise_equal"]
        else "NO",
        "runs of 50 steps replayed to the same weights": f"{same} of {len(runs)}",
    }
    rows = [f"| {name} | {value} |" for name, value in cells.items()]
    return ["", "| `python bench.py faults` and `replay` | |", "|---|---|", *rows]


def sparse_tables() -> list[str]:
    """The measured part of the README on sparse attention: the recipe, and decoding."""
    recipe, speed = load_result("recipe"), load_result("decode-cpu")
    rows, settings = speed["rows"], recipe["settings"]
    attended, minutes = settings["chunk_size"] * settings["top_k"], recipe["wall_s"] / 60
    heads = "".join(f" {r['length']:,} |" for r in rows)
    lines = [
        f"\n`python recipe.py --seeds {settings['seeds']}` ({minutes:.0f} minutes): every variant "
        f"but the first attends to {attended} keys. From 4× on, random < warm-up only < full "
        f"{recipe['shown']['random < warm-up only < full']}.\n\n{recipe['table']}\n",
        f"| decode, tokens/s on one CPU thread, {speed['slots']} slots, context of |" + heads,
        "|---" * (len(rows) + 1) + "|",
    ]
    for name in rows[0]["tokens_per_s"]:
        cells = []
        for row in rows:
            ratio = "" if name == "dense" else f" ({row['over_dense'][name]['median']:.1f}×)"
            cells.append(f"{row['tokens_per_s'][name]['median']:,.0f}{ratio}")
        lines.append(f"| {name} | {' | '.join(cells)} |")
    peaks = ", ".join(f"{r['prefill_peak_mib']:.0f} MiB at {r['length']:,}" for r in rows)
    return [*lines, "", f"Peak memory of a sparse prefill of one sequence: {peaks}."]


def between(values: list[float], form: str) -> str:
    """Smallest to largest of some numbers, as text."""
    low, high = (format(f(values), form) for f in (min, max))
    return low if low == high else f"{low} to {high}"


def write_readme() -> None:
    """Put the measured tables between the README's markers."""
    readme = ROOT / "README.md"
    head, _, rest = readme.read_text().partition("<!-- measured -->\n")
    _, _, tail = rest.partition("<!-- end -->\n")
    readme.write_text(f"{head}<!-- measured -->\n{readme_tables()}\n<!-- end -->\n{tail}")


def main(arguments: list[str]) -> None:
    import speed

    commands = {
        "generator": speed.bench_generator,
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
            report.draw_run(Path(run))
        if len(runs) > 1:
            report.draw_comparison([Path(run) for run in runs], Path("comparison.png"))
    elif command == "timeline" and runs:
        report.draw_timeline([Path(run) for run in runs], Path("timeline.png"))
    elif command == "roles" and len(runs) == 1:
        bench_roles(*runs)
    elif command == "async" and runs in ([], ["full"]):
        bench_async(*runs)
    elif command in commands and not runs:
        commands[command]()
    else:
        allowed = (
            f"{', '.join(commands)}, async [full], roles COMMIT, plot RUN ... or timeline RUN ..."
        )
        common.fail(ValueError(f"{' '.join(arguments)!r}: must be {allowed}"))


if __name__ == "__main__":
    main(sys.argv[1:])
