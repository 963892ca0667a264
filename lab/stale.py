"""stale.py: what to do about stale data: objectives and dampers on data of a known age.

    python bench.py staleness-methods    # every objective and damper, at four ages, and 8 bits
    python bench.py attempts             # how often one must try until a run converges

A run here is synchronous, but its generator is always `lag` versions behind: every token is exactly
so old, nothing depends on the clock, and two runs at once do not disturb each other. In a real
asynchronous run the age varies, and is mostly below its bound.
Left out: time (races.py). The rows of a plan are fixed before its first run: `plan_of`.
"""

import copy
import dataclasses
import math
import time
from collections import deque
from concurrent.futures import ProcessPoolExecutor, as_completed
from itertools import product
from multiprocessing import get_context
from pathlib import Path

import numpy as np
import torch
from tqdm import tqdm

from lab.plots import BLUE, GREY, ORANGE, markdown, new_figure, save_figure, save_result, spread
from learner import learner_step, make_learner, new_groups
from reward import problem_of, task_of, verify_group
from rollout import generate, make_generator
from runtime.config import DAMPERS, OBJECTIVES, Config
from runtime.devices import cores, describe_machine
from runtime.messages import Group, apply_verdicts
from runtime.models import make_model

HELD_OUT = 128  # problems
ALIKE = {"groups_per_step": 16, "slots": 256, "steps": 80, "lr": 1.2e-3}
TASKS = ("reverse:4", "guess")
CONDITIONS = {"η = 0": {}, "η = 2": {"lag": 2}, "η = 4": {"lag": 4}, "η = 16": {"lag": 16}}
CONDITIONS |= {"8-bit": {"rollout_weights": "float8_e4m3fn"}}
SEEDS = {"η = 0": 3, "η = 2": 3, "η = 4": 5, "η = 16": 5, "8-bit": 3}
MORE_SEEDS = 10  # at η = 4 and 16, of an objective alone
STALE = ("η = 4", "η = 16")  # where a method must show what it is worth
WINDOW = {"damper": "kl", "kl_threshold": 0.15}  # the threshold of articles about GLM-5
FIXES = {"kl": WINDOW, "ess": {"damper": "ess"}, "gac": {"damper": "gac"}}
FIXES |= {"brake": {"damper": "brake"}, "opob": {"advantage": "opob"}}
READING = """\
What a method gains, and in brackets the 99% interval of Student's t over seeds: where 0 is inside,
it cannot be told from chance. An objective is held against none (`reinforce`), what goes beside one
against that objective alone: a `--damper` (`kl`: the window at 0.15), or `--advantage opob`. Of a
hundred comparisons of equals, about one is wrong."""
BASELINES = ("cispo", "reinforce")
# Half of a 99% interval, in standard errors, by the number of seeds (Student 1908). A bootstrap of
# five means is too sure: it finds a difference in one of ten comparisons of equals.
STUDENT = {2: 63.66, 3: 9.925, 4: 5.841, 5: 4.604, 6: 4.032, 10: 3.250, 20: 2.861}

# The edge of collapse: each rate is 0.6 of the next, which is what the window makes of it.
EDGE = {"task": "reverse:4", "steps": 80, "lag": 4}
RATES, TRIES, CONVERGED = (0.00259, 0.00432, 0.0072, 0.012, 0.02), 20, 0.75


def lagged_run(lag: int = 0, points: int = 6, **flags) -> dict:
    """Train on data that are `lag` versions old; what was reached on held-out problems, `points`
    times in a run, and what the steps were like."""
    torch.set_num_threads(1)
    config = Config(**ALIKE | {"damper": "none"} | flags)
    task = task_of(config)
    learner = make_learner(config, task, make_model(config, task))
    behind = make_generator(config, task, copy.deepcopy(learner.model))
    greedy = dataclasses.replace(config, temperature=0.0, group_size=1, rollout_weights="float32")
    judge = make_generator(greedy, task, copy.deepcopy(learner.model))
    published = deque([(0, learner.model.flat.clone())], maxlen=lag + 1)
    curve, rows = [held_out(judge, learner, task, config)], []

    while learner.version < config.steps:
        behind.set_weights(*published[0])  # the oldest that is kept
        groups = new_groups(learner, task, config.groups_per_step)
        for group in groups:
            group.start = behind.newest
        groups = generate(behind, groups)
        for group in groups:
            apply_verdicts(group, verify_group(group, task, config))
        rows.append(learner_step(learner, groups, config))
        if learner.skipped_in_row >= 3:
            break
        published.append((learner.version, learner.model.flat.clone()))
        if (
            learner.version * points // config.steps
            > (learner.version - 1) * points // config.steps
        ):
            curve.append(held_out(judge, learner, task, config))

    return {
        "final": curve[-1],
        "area": float(np.mean(curve[1:] + curve[-1:] * (points + 1 - len(curve)))),
        "curve": [round(x, 4) for x in curve],
        "steps": learner.version,
        **{name: mean_of(rows, name) for name in ("ess", "ess_whole", "cosine", "grad_norm")},
        "damped": float(np.mean([row["lr"] for row in rows])) / config.lr * 2,  # of a linear fall
    }


def mean_of(rows: list[dict], name: str) -> float:
    """The mean of one metric over the steps that have it."""
    values = [row[name] for row in rows if math.isfinite(row.get(name, math.nan))]
    return float(np.mean(values or [math.nan]))


def held_out(judge, learner, task, config: Config) -> float:
    """Mean reward of greedy answers to problems that are not trained."""
    judge.set_weights(learner.version, learner.model.flat)
    problems = [problem_of(task, i, "eval") for i in range(HELD_OUT)]
    groups = generate(judge, [Group(i, learner.version, p) for i, p in enumerate(problems)])
    for group in groups:
        apply_verdicts(group, verify_group(group, task, config))
    return float(np.mean([t.reward for group in groups for t in group.trajectories]))


def run_all(
    plan: list[dict],
    folder: Path,
    name: str,
    alike: dict,
) -> list[dict]:
    """The runs of a plan, one on each core, each with what came of it. They are saved as they come,
    in the order of the plan."""
    result = {"machine": describe_machine(), "alike": alike}
    rows = [None] * len(plan)
    with ProcessPoolExecutor(cores(), get_context("spawn")) as pool:
        futures = {}
        for i, row in enumerate(plan):
            flags = alike | {"task": row["task"], "seed": row["seed"]} | row["flags"]
            futures[pool.submit(lagged_run, **flags)] = i
        for done in tqdm(as_completed(futures), total=len(plan), unit="run"):
            i = futures[done]
            rows[i] = plan[i] | done.result()
            finished = [row for row in rows if row]
            if len(finished) % 10 == 0 or len(finished) == len(plan):
                save_result(folder, name, result | {"runs": finished})
    return rows


# ---- which methods help ----


def arms(partners) -> dict[str, dict]:
    """{name: flags} of every method: objectives alone, and some of them with what goes beside."""
    found = {name: {"objective": name} for name in OBJECTIVES}
    tight = {"double_low": 0.2, "double_high": 0.28}
    found["double_sided, 0.2/0.28"] = found["double_sided"] | tight
    for name, (fix, flags) in product(partners, FIXES.items()):
        if (name, fix) != ("dpo", "opob"):  # a preference has no baseline
            found[f"{name} + {fix}"] = {"objective": name} | flags
    return found


def plan_of() -> list[dict]:
    """Every run of `bench_staleness_methods`, in the order in which they begin."""
    plan = []
    for (name, given), task in product(CONDITIONS.items(), TASKS):
        own = arms(OBJECTIVES if name in STALE else BASELINES)
        seeds = MORE_SEEDS if name in STALE else SEEDS[name]
        for seed, (arm, flags) in product(range(seeds), own.items()):
            if seed < SEEDS[name] or " + " not in arm:
                row = {"arm": arm, "condition": name, "task": task, "seed": seed}
                plan.append(row | {"flags": flags | given})
    return plan


def bench_staleness_methods(folder: Path) -> None:
    """Objectives and dampers on stale data; methods.json and methods.png."""
    runs = run_all(plan_of(), folder, "methods", ALIKE)
    print(*method_lines({"runs": runs}), sep="\n")
    draw_methods(runs, folder / "methods.png")


def areas(runs: list[dict], arm: str, conditions) -> dict:
    """(condition, task, seed) -> mean held-out reward over the run, of one arm."""
    found = {}
    for run in runs:
        if run["arm"] == arm and run["condition"] in conditions:
            found[run["condition"], run["task"], run["seed"]] = run["area"]
    return found


def compared(runs: list[dict], arm: str, conditions, against: str) -> tuple:
    """How much better an arm is than another on the same tasks and seeds: the mean difference, and
    its 99% interval. Runs of one seed begin alike in all conditions, so they are one draw."""
    own, other = (areas(runs, name, conditions) for name in (arm, against))
    gaps: dict[tuple, list] = {}
    for condition, *draw in own.keys() & other.keys():
        key = (condition, *draw)
        gaps.setdefault(tuple(draw), []).append(own[key] - other[key])
    means = np.array([np.mean(each) for each in gaps.values()])
    half = STUDENT[len(means)] * means.std(ddof=1) / len(means) ** 0.5
    return float(means.mean()), float(means.mean() - half), float(means.mean() + half)


def verdict(low: float, high: float) -> str:
    """In words, what an interval says."""
    return "helps" if low > 0 else "hurts" if high < 0 else "cannot be told"


def baseline_of(arm: str) -> str:
    """What an arm is compared with: no correction; a damper with its objective alone."""
    return arm.partition(" + ")[0] if " + " in arm else "reinforce"


def of(runs: list[dict], task: str) -> list[dict]:
    """The runs of a task."""
    return [run for run in runs if run["task"] == task]


def split_arms(runs: list[dict]) -> tuple[list[str], list[str]]:
    """The objectives that correct something; the remedies beside an objective."""
    names = list(dict.fromkeys(run["arm"] for run in runs if run["arm"] != "reinforce"))
    return [a for a in names if " + " not in a], [a for a in names if " + " in a]


def gain(runs: list[dict], arm: str, conditions=STALE) -> str:
    """What an arm is worth, in words and figures."""
    mean, low, high = compared(runs, arm, conditions, baseline_of(arm))
    return f"{verdict(low, high)}, {mean:+.3f} ({low:+.3f} to {high:+.3f})"


def method_lines(result: dict) -> list[str]:
    """The reward of every arm, what objectives are worth on stale data, and what goes beside."""
    runs, lines = result["runs"], ["Mean held-out reward over a run, and its spread over seeds."]
    alone, beside = split_arms(runs)
    everywhere = {run["arm"] for run in runs if run["condition"] == "8-bit"}
    for task in TASKS:
        rows = []
        for arm in ["reinforce", *alone, *(arm for arm in beside if arm in everywhere)]:
            cells = [list(areas(of(runs, task), arm, [name]).values()) for name in CONDITIONS]
            rows.append(
                [arm, *(f"{np.mean(each):.3f} ± {np.std(each, ddof=1):.3f}" for each in cells)]
            )
        lines += ["", *markdown([f"`{task}`", *CONDITIONS], rows)]
    rows = []
    for arm in alone:
        rows.append([arm, *(gain(of(runs, t), arm) for t in TASKS), gain(runs, arm, ["8-bit"])])
    head = ["against `reinforce`", *(f"`{task}`, η = 4 and 16" for task in TASKS), "8-bit, both"]
    lines += ["", f"{READING}\n", *markdown(head, rows)]
    for task in TASKS:
        rows = []
        for name in OBJECTIVES:
            pairs = [f"{name} + {fix}" for fix in FIXES]
            cells = [gain(of(runs, task), pair) if pair in beside else "" for pair in pairs]
            rows.append([name, *cells])
        lines += ["", *markdown([f"`{task}`, η = 4 and 16: beside", *FIXES], rows)]
    return lines


def method_claim(result: dict) -> str:
    """Which objectives help on both tasks, and on one, best first; and beside how many objectives
    (of both tasks) each remedy helps, and hurts."""
    runs, words, said = result["runs"], {}, []
    alone, beside = split_arms(runs)
    for arm in [*alone, *beside]:
        found = [compared(of(runs, task), arm, STALE, baseline_of(arm)) for task in TASKS]
        words[arm] = [verdict(*interval) for _, *interval in found]
    kinds = {"both tasks": (2, 0), "one": (1, 0), "one and hurt on the other": (1, 1)}
    for where, counts in kinds.items():
        found = {arm: (words[arm].count("helps"), words[arm].count("hurts")) for arm in alone}
        names = [f"`{arm}`" for arm in alone if found[arm] == counts]
        said.append(f"{', '.join(names) or 'none'} help on {where}")
    for fix in FIXES:
        each = [word for arm in beside if arm.endswith(fix) for word in words[arm]]
        said.append(f"`{fix}` {each.count('helps')}, {each.count('hurts')} of {len(each)}")
    said[3] = f"beside them, cases in which a remedy helps, hurts: {said[3]}"
    return "; ".join(said)


def draw_methods(runs: list[dict], path: Path) -> None:
    """Above, what each objective gains on data that are 4 and 16 versions old; below, what each
    remedy beside it gains."""
    names, beside = split_arms(runs)
    names.sort(key=lambda arm: compared(runs, arm, STALE, "reinforce")[0])
    figure = new_figure((11, 9))
    above, below = figure.subplots(2, len(TASKS), sharey="row")
    colours = {"helps": BLUE, "hurts": ORANGE, "cannot be told": GREY}
    for task, bars, grid in zip(TASKS, above, below, strict=True):
        own = of(runs, task)
        for y, arm in enumerate(names):
            mean, low, high = compared(own, arm, STALE, "reinforce")
            colour = colours[verdict(low, high)]
            bars.plot([low, high], [y, y], color=colour, linewidth=3)
            bars.plot([mean], [y], "o", color=colour, markersize=7)
        bars.axvline(0, color="black", linewidth=0.8)
        bars.set_title(f"{task}: an objective, against reinforce")
        bars.set_yticks(range(len(names)), names)
        for (y, name), (x, fix) in product(enumerate(OBJECTIVES), enumerate(FIXES)):
            if f"{name} + {fix}" in beside:
                mean, low, high = compared(own, f"{name} + {fix}", STALE, name)
                box = {"facecolor": colours[verdict(low, high)], "alpha": 0.5, "edgecolor": "none"}
                grid.text(x, y, f"{mean:+.2f}", ha="center", va="center", bbox=box)
        grid.set_title("what goes beside it, against it alone")
        grid.set_xticks(range(len(FIXES)), FIXES)
        grid.set_xlim(-0.5, len(FIXES) - 0.5)
        grid.set_yticks(range(len(OBJECTIVES)), OBJECTIVES)
        grid.set_ylim(len(OBJECTIVES) - 0.5, -0.5)
    figure.suptitle("Data 4 and 16 versions old: blue helps, orange hurts, grey cannot be told")
    save_figure(figure, path)


# ---- how often one must try ----


def bench_attempts(folder: Path) -> None:
    """Runs at the edge of collapse, without a damper and with each; attempts.json and .png."""
    plan = []
    for lr, damper, seed in product(RATES, DAMPERS[::-1], range(TRIES)):
        flags = {"lr": lr, **(WINDOW if damper == "kl" else {"damper": damper})}
        plan.append({"task": EDGE["task"], "seed": seed, "damper": damper, "flags": flags})
    runs = run_all(plan, folder, "attempts", ALIKE | EDGE)
    result = {"machine": describe_machine(), "alike": ALIKE | EDGE, "runs": runs}
    result["overhead"] = window_overhead()
    save_result(folder, "attempts", result)
    print(*attempt_lines(result), sep="\n")


def window_overhead(rounds: int = 12) -> dict:
    """Seconds of a learner's step with the KL to a reference, measured every 5 steps as by default,
    over those of a step without; the two in turn, the same batch."""
    torch.set_num_threads(1)
    config = Config(task="guess")
    task = task_of(config)
    pair = []
    for every in (config.reference_every, 0):
        own = dataclasses.replace(config, reference_every=every)
        pair.append((own, make_learner(own, task, make_model(own, task))))
    generator = make_generator(config, task, copy.deepcopy(pair[0][1].model))
    groups = generate(generator, new_groups(pair[0][1], task, config.groups_per_step))
    for group in groups:
        apply_verdicts(group, verify_group(group, task, config))
    ratios = []
    for _ in range(rounds):
        seconds = []
        for own, learner in pair:
            begin = time.perf_counter()
            for _ in range(config.reference_every):
                learner_step(learner, groups, own)
            seconds.append(time.perf_counter() - begin)
        ratios.append(seconds[0] / seconds[1])
    return spread(ratios)


def attempt_claim(result: dict) -> str:
    """How many runs converge at the largest rate, with the effective sample size and without."""
    own = [run for run in result["runs"] if run["flags"]["lr"] == RATES[-1]]
    good = {}
    for damper in ("ess", "none"):
        finals = [run["final"] for run in own if run["damper"] == damper]
        good[damper] = f"{sum(final >= CONVERGED for final in finals)} of {len(finals)}"
    return f"at too large a learning rate `ess` saves {good['ess']} runs (none: {good['none']})"


def attempt_lines(result: dict) -> list[str]:
    """Of every learning rate: how many of the runs converged, and how often one must try."""
    cost = result["overhead"]
    spent = f"{cost['median']:.2f} ({cost['min']:.2f} to {cost['max']:.2f})"
    lines = [
        f"`reverse:4`, data {EDGE['lag']} versions old, {TRIES} seeds: how often one must try",
        f"until a run converges (held-out reward at least {CONVERGED}); in brackets quartiles of",
        f"the reward. A step of the learner takes {spent} times as long with the KL",
        "that the window needs.\n",
    ]
    rows, dampers = [], list(dict.fromkeys(run["damper"] for run in result["runs"]))
    for lr in dict.fromkeys(run["flags"]["lr"] for run in result["runs"]):
        cells = []
        for damper in dampers:
            own = [run for run in result["runs"] if run["damper"] == damper]
            finals = [run["final"] for run in own if run["flags"]["lr"] == lr]
            good = sum(final >= CONVERGED for final in finals)
            tries = f"{len(finals) / good:.1f}" if good else "never"
            low, high = np.quantile(finals, [0.25, 0.75])
            cells.append(f"{tries} ({low:.2f} to {high:.2f})")
        rows.append([f"{lr:g}", *cells])
    return [*lines, *markdown(["learning rate, and `--damper`", *dampers], rows)]
