"""simulate.py: the model of pipeline.py, calibrated from real runs, scored, and asked.

    python simulate.py calibrate RUN [RUN ...]    # costs -> results/simulate-costs.json
    python simulate.py score RUN [RUN ...]        # predicted beside measured, for other runs
    python simulate.py advise --devices 16        # how many generate, how many train, which eta
    python simulate.py scale                      # over synchronous, 8 to 1024 devices, published

`score` asks of each run whether tokens a second and mean staleness are predicted within 10% (of one
version, where staleness is less), and the idle share within 10 points; runs with equal flags are
repetitions, and the mean of them counts. `scale` (ten minutes) takes two kinds of costs: those that
were calibrated here, and those that arithmetic gives for a language model on a GPU (`ASSUMED`),
because nobody published an event log.

Left out: the model itself (pipeline.py) and how its costs are found in a log (calibrate.py). Memory
is not modelled: every split fits. At 512 devices the learner that takes in every group, one after
the other, is what this code's own costs wait for.
"""

import dataclasses
import sys
from collections import defaultdict
from dataclasses import dataclass

import numpy as np
from tqdm import tqdm

from lab.calibrate import KEEP, calibrate, read_run
from lab.pipeline import Costs, Log, Setup, measure, predict
from lab.plots import BLUE, GREEN, GREY, ORANGE, RESULTS, canvas, load_result, save_result
from runtime.config import Config, UserError, fail, flag, parse
from runtime.devices import describe_machine


def score(logs: list[Log], known: dict[str, Costs]) -> list[dict]:
    """One row a setup: what was measured (the mean of runs with equal flags), what the model says
    (the mean of as many simulations), and how far they are apart."""
    rows, same = [], defaultdict(list)
    for log in logs:
        if log.name in costs_of(log.setup.task, known).runs:
            raise UserError(f"{log.name}: must be a run that the model was not calibrated on")
        same[str(log.setup)].append(log)
    for runs in same.values():
        setup, found = runs[0].setup, [measure(log) for log in runs]
        told = [predict(setup, known[setup.task], seed) for seed in range(len(runs))]
        mode = "sync" if setup.synchronous else f"eta {setup.eta} {setup.swap}"
        what = f"{setup.task} {setup.groups_per_step}x{setup.group_size} {mode}"
        row = {"setup": f"{what} {setup.rollout_workers}x{setup.slots} slots", "runs": len(runs)}
        for name in ("tokens_per_s", "rollout_idle", "learner_idle", "idle", "staleness"):
            for mark, values in (("", found), ("*", told)):
                row[name + mark] = round(float(np.mean([one[name] for one in values])), 3)
        errors = [abs(row[n + "*"] - row[n]) for n in ("tokens_per_s", "idle", "staleness")]
        scale = (row["tokens_per_s"], 1.0, max(1.0, row["staleness"]))
        row["within"] = all(e <= 0.1 * s for e, s in zip(errors, scale, strict=True))
        rows.append(row)
    return rows


def costs_of(task: str, known: dict[str, Costs]) -> Costs:
    """The costs of a task; raises UserError when it has none."""
    if task not in known:
        raise UserError(f"task {task}: must be one of {', '.join(known)} (calibrated)")
    return known[task]


def draw_score(rows: list[dict]) -> None:
    """Predicted against measured: a setup is right where its points lie on the diagonal."""
    plt = canvas()
    figure, axes = plt.subplots(1, 3, figsize=(9, 3.4), layout="constrained")
    panels = (("tokens_per_s", "tokens trained (1/s)"), ("idle", "idle share of all processes"))
    panels += (("staleness", "mean staleness (versions)"),)
    for axis, (name, title) in zip(axes, panels, strict=True):
        x, y = (np.array([row[key] for row in rows]) for key in (name, name + "*"))
        top = 1.15 * max(x.max(), y.max(), 0.1)
        line = np.array([0.0, top])
        width = 0.1 * (1.0 if name == "idle" else np.maximum(line, name == "staleness"))
        axis.fill_between(line, line - width, line + width, color=GREY, alpha=0.3, lw=0)
        axis.plot(line, line, color=GREY, lw=1)
        axis.plot(x, y, "o", color=BLUE, ms=5)
        axis.set(xlim=(0, top), ylim=(0, top), title=title, xlabel="measured", ylabel="predicted")
        axis.grid(alpha=0.3)
    right = sum(row["within"] for row in rows)
    figure.suptitle(
        f"{right} of {len(rows)} setups that were not calibrated on are within 10% (grey)"
    )
    figure.savefig(RESULTS / "simulate.png", dpi=120)
    plt.close(figure)


@dataclass(frozen=True)
class Question(Config):
    """What `advise` is asked: the flags of train_async.py, and how many devices there are."""

    devices: int = flag(8, "devices to divide; each runs one process", 2, 4096)


def synchronous(setup: Setup, costs: Costs, devices: int) -> dict:
    """The same devices one after the other: all of them generate, then all of them train."""
    roles = {"rollout_workers": devices, "learners": devices, "eta": 0, "steps": 7}
    costs = dataclasses.replace(costs, alone=1.0)  # several devices are several processes, too
    return predict(dataclasses.replace(setup, synchronous=True, **roles), costs)


def best_split(setup: Setup, costs: Costs, devices: int) -> dict:
    """The quickest split to the nearest eighth: `predict`, and how many devices have which role.

    Speed rises with the number of learners, then falls: look at both neighbours, go where it rises.
    """
    choices = sorted({min(max(1, devices * i // 8), devices - 1) for i in range(1, 8)})
    tried: dict[int, dict] = {}
    best, before = len(choices) // 3, -1
    while best != before:
        before = best
        for i in range(max(0, before - 1), min(len(choices), before + 2)):
            roles = {"rollout_workers": devices - choices[i], "learners": choices[i]}
            new = dataclasses.replace(setup, **roles, steps=2 * setup.eta + 8)
            tried[i] = tried.get(i) or roles | predict(new, costs)
        best = max(tried, key=lambda i: tried[i]["tokens_per_s"])
    return tried[best]


def advise(question: Question, known: dict[str, Costs]) -> str:
    """A table over eta, and one line: the smallest eta that gives almost all there is to gain."""
    names = ("task", "slots", "group_size", "groups_per_step", "swap", "on_stale", "reward_workers")
    setup = Setup(**{name: getattr(question, name) for name in names})
    costs, devices = costs_of(setup.task, known), question.devices
    base, rows = synchronous(setup, costs, devices)["tokens_per_s"], []
    for eta in (0, 1, 2, 4, 8):
        row = best_split(dataclasses.replace(setup, eta=eta), costs, devices)
        rows.append({"eta": eta, "over_sync": row["tokens_per_s"] / base, **row})
    good = max(row["over_sync"] for row in rows) * 0.97
    best = next(row for row in rows if row["over_sync"] >= good)
    text = f"--rollout-workers {best['rollout_workers']} --learners {best['learners']}"
    if good < 1 / 1.03:
        text = "train_sync.py, or"
    return f"{table(rows)}\n{setup.task} on {devices} devices: {text} --max-staleness {best['eta']}"


# One GPU with 3 TB/s and 1 PFLOP/s in bf16 (an H100 or H800), and a language model on it
ASSUMED = (
    "device: 3 TB/s, 1 PFLOP/s bf16, of which training and prefill reach 40%",
    "decode step: 4 ms + the weights once (2 bytes each) + every running cache once",
    "cache: 20 kB x sqrt(billions of parameters) a token; 256 slots a device",
    "training: 8 FLOPs a parameter and token (activations recomputed); any split of devices",
    "gradients: 2 bytes a parameter twice through 100 GB/s; publication 1 s",
    "answers: 16 to a prompt, 512 prompts a step, log-normal with sigma 0.6 between prompts and "
    "0.6 inside a group, mean about 6,000 tokens, at most 27,648; prompts of 512 tokens",
    "eta = 2, caches kept, nobody fails; a verification takes 0.1 s, and 16 run at once",
    "the baseline generates with continuous batching, then trains, on the same devices",
)


PUBLISHED = (  # what, source, devices, billions of parameters, their speed-up
    ("AReaL 1.5B, 16 nodes", "arXiv 2505.24298 [P]", 128, 1.5, "2.77x"),
    ("AReaL 7B, 24 nodes", "arXiv 2505.24298 [P]", 192, 7.0, "2.27x"),
    ("PipelineRL 7B, 128 H100", "arXiv 2509.19128 [P]", 128, 7.0, "about 2x"),
    ("ROLL Flash RLVR (128 GPUs, 7B assumed)", "arXiv 2510.11345 [P]", 128, 7.0, "2.24x"),
    ("device utilisation (128 GPUs, 7B assumed)", "article [S]", 128, 7.0, "52% -> 87%"),
)


def language_model(billions: float, seed: int = 0) -> Costs:
    """Costs of a language model on a GPU by arithmetic: see ASSUMED."""
    random, weights = np.random.default_rng(seed), 1e9 * billions
    prompts = 4200 * np.exp(0.6 * random.standard_normal((KEEP, 1)))
    answers = prompts * np.exp(0.6 * random.standard_normal((KEEP, 16)))
    lengths = 512 + np.clip(answers, 64, 27648).astype(int)
    cache = 2e4 * billions**0.5 * float((lengths**2).sum() / lengths.sum()) / 2
    return Costs(
        step=4e-3 + 2 * weights / 3e12,
        step_running=cache / 3e12,
        prefill=2 * weights / 4e14,
        score=0.1,
        train_token=8 * weights / 4e14,
        all_reduce=2 * 2 * weights / 1e11,
        publish=1.0,
        groups=[[0, 512, *row] for row in lengths.tolist()],
    )


def compare(setup: Setup, costs: Costs, devices: int) -> dict:
    """Asynchronous, with the best split, over synchronous on as many devices."""
    before, after = synchronous(setup, costs, devices), best_split(setup, costs, devices)
    gain = after["tokens_per_s"] / before["tokens_per_s"]
    return {
        "devices": devices,
        "learners": after["learners"],
        "speed_up": round(gain, 2),
        "utilisation": f"{1 - before['idle']:.0%} -> {1 - after['idle']:.0%}",
        "staleness": round(after["staleness"], 2),
    }


def scale(known: dict[str, Costs]) -> dict:
    """Speed-up from 8 to 1024 devices by two sets of costs, and beside what others published."""
    text = Setup("text", slots=256, groups_per_step=512, reward_workers=16)
    task, costs = next(iter(known.items()))
    own = Setup(task, groups_per_step=512, reward_workers=16)
    models, sizes = {b: language_model(b) for *_, b, _ in PUBLISHED}, (8, 32, 128, 512, 1024)
    plan = {(d, b) for _, _, d, b, _ in PUBLISHED} | {(d, 7.0) for d in sizes}
    found = {case: compare(text, models[case[1]], case[0]) for case in tqdm(sorted(plan))}
    names = ("what", "source", "devices", "billions", "published")
    published = [dict(zip(names, p, strict=True)) | found[p[2], p[3]] for p in PUBLISHED]
    curves = {"7B on GPUs, by arithmetic": [found[d, 7.0] for d in sizes]}
    curves[f"{own.task}, as calibrated"] = [compare(own, costs, d) for d in tqdm(sizes)]
    return {"assumed": ASSUMED, "published": published, "curves": curves}


def draw_scale(result: dict) -> None:
    """Predicted speed-up against the number of devices; published ones as points."""
    plt = canvas()
    figure, axis = plt.subplots(figsize=(7, 4), layout="constrained")
    for (name, rows), colour in zip(result["curves"].items(), (BLUE, GREEN), strict=True):
        x, y = ([row[key] for row in rows] for key in ("devices", "speed_up"))
        axis.plot(x, y, "o-", color=colour, label=f"predicted: {name}")
    for row in result["published"]:
        if "x" in row["published"]:
            y = float(row["published"].removeprefix("about ").rstrip("x"))
            axis.plot(row["devices"], y, "s", color=ORANGE, ms=6)
    axis.plot([], [], "s", color=ORANGE, label="published (AReaL, PipelineRL, ROLL Flash)")
    axis.axhline(1, color=GREY, lw=1)
    axis.set_xscale("log", base=2)
    ticks = [row["devices"] for row in rows]
    axis.set_xticks(ticks, ticks)
    axis.set(xlabel="devices", ylabel="speed-up over synchronous (x)", ylim=(0, None))
    axis.set_title("What asynchrony gains at one batch size: 512 prompts, 16 answers each")
    axis.legend()
    axis.grid(alpha=0.3)
    figure.savefig(RESULTS / "scale.png", dpi=120)
    plt.close(figure)


def table(rows: list[dict]) -> str:
    """Rows with the same keys as text, one line each."""

    def text(value) -> str:
        if not isinstance(value, float):
            return str(value)
        return format(value, ",.3g" if abs(value) < 100 else ",.0f")

    cells = [list(rows[0]), *([text(value) for value in row.values()] for row in rows)]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    lines = [[cell.rjust(w) for cell, w in zip(line, widths, strict=True)] for line in cells]
    return "\n".join("  ".join(line) for line in lines)


def load_costs() -> dict[str, Costs]:
    try:
        stored = load_result("simulate-costs")
    except FileNotFoundError:
        raise UserError("costs: must be measured first (simulate.py calibrate RUN)") from None
    for costs in stored.values():
        costs["groups"] = [[int(n) for n in record.split()] for record in costs["groups"]]
    return {task: Costs(**costs) for task, costs in stored.items()}


def save_costs(known: dict[str, Costs]) -> None:
    stored = {task: dataclasses.asdict(costs) for task, costs in known.items()}
    for costs in stored.values():
        costs["groups"] = [" ".join(map(str, record)) for record in costs["groups"]]
    save_result("simulate-costs", stored)


def main(arguments: list[str]) -> None:
    command, *rest = arguments or [""]
    if command == "calibrate" and rest:
        logs = [read_run(run) for run in rest]
        tasks = dict.fromkeys(log.setup.task for log in logs)
        known = {task: calibrate([g for g in logs if g.setup.task == task]) for task in tasks}
        save_costs(known)
        for task, costs in known.items():
            values = {k: v for k, v in dataclasses.asdict(costs).items() if isinstance(v, float)}
            times = [f"{values.pop(name):.3g} {name}" for name in ("beside", "alone")]
            print(table([{task: k, "microseconds": v * 1e6} for k, v in values.items()]))
            print(f"generation takes {', '.join(times)} times as long (pipeline.py)")
    elif command == "score" and rest:
        rows = score([read_run(run) for run in rest], load_costs())
        save_result("simulate", {"machine": describe_machine(), "runs": rows})
        draw_score(rows)
        print(table(rows), "\n*: predicted; idle: of workers and learners together")
    elif command == "advise":
        print(advise(parse(__doc__, rest, Question), load_costs()))
    elif command == "scale" and not rest:
        result = scale(load_costs())
        save_result("scale", result)
        draw_scale(result)
        print(table(result["published"]))
        print("assumed: " + "\n         ".join(ASSUMED))
        for name, rows in result["curves"].items():
            print(f"{name}\n{table(rows)}")
    else:
        usage = "calibrate RUN [RUN ...], score RUN [RUN ...], advise or scale"
        raise UserError(f"{' '.join(arguments)!r}: must be {usage}")


if __name__ == "__main__":
    try:
        main(sys.argv[1:])
    except UserError as error:
        fail(error)
