"""stale.py: what to do about stale data: objectives and dampers on data of a known age.

    python bench.py staleness-methods    # every objective and damper, at four ages, and 8 bits
    python bench.py attempts             # how often one must try until a run converges

A run here is synchronous, but its generator is always `lag` versions behind: every token is exactly
so old, nothing depends on the clock, and two runs at once do not disturb each other. In a real
asynchronous run the age varies, and is mostly below its bound.
Left out: time (races.py). The plan of all runs is `plan_of`.
"""

import copy
import dataclasses
from collections import defaultdict, deque
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from itertools import product
from multiprocessing import get_context
from pathlib import Path

import numpy as np
import torch
from tqdm import tqdm

from lab.plots import markdown, save_result, spread, spread_text
from lab.speed import in_turn
from learner import Learner, learner_step, make_learner, new_groups
from reward import Task, problem_of, task_of, verify_group
from rollout import Generator, generate, make_generator
from runtime.config import DAMPERS, OBJECTIVES, Config
from runtime.devices import cores
from runtime.messages import Group, apply_verdicts
from runtime.models import make_model
from runtime.pictures import BLUE, GREY, ORANGE, grouped, new_figure, save_figure

HELD_OUT, POINTS = 128, 6  # problems; how often in a run they are asked
ALIKE = {"groups_per_step": 16, "slots": 256, "steps": 80, "lr": 1.2e-3}
TASKS = ("reverse:4", "guess")
CONDITIONS = {f"η = {lag}": {"lag": lag} for lag in (0, 2, 4, 16)}
CONDITIONS |= {"8-bit": {"rollout_weights": "float8_e4m3fn"}}
SEEDS = {"η = 0": 3, "η = 2": 3, "η = 4": 5, "η = 16": 5, "8-bit": 3}
# At η = 4 and 16, of an objective alone: what was seen with the first seeds was asked again, with
# seeds that were fixed and not looked at before. These decide.
FRESH_SEEDS = range(10, 20)
STALE = ("η = 4", "η = 16")  # where a method must show what it is worth
FIXES = {damper: {"damper": damper} for damper in DAMPERS if damper != "none"}
FIXES["kl"]["kl_threshold"] = 0.15  # that of articles about GLM-5
FIXES["opob"] = {"advantage": "opob"}
CELLS = """\
Mean of six held-out rewards of a run, ± their standard deviation over seeds: 3, and 15 at η = 4 and
16. 8-bit: fresh data, weights of the generator in float8."""
READING = """\
What a method gains, and in brackets the 99% interval of Student's t over seeds: where 0 is inside,
it cannot be told from chance. An objective is held against none (`reinforce`), on old data by ten
seeds that were fixed, and not looked at, before; what goes beside one against that objective alone,
by five: a `--damper` (`kl`: the window at 0.15), or `--advantage opob`. Of a hundred comparisons of
equals, about one is wrong."""
BASELINES = ("cispo", "reinforce")
# Half of a 99% interval, in standard errors, by the number of seeds (Student 1908). A bootstrap of
# five means is too sure: it finds a difference in one of ten comparisons of equals.
STUDENT = {2: 63.66, 3: 9.925, 4: 5.841, 5: 4.604, 6: 4.032, 10: 3.250, 20: 2.861}

# The edge of collapse: each rate is 0.6 of the next, which is what the window makes of it.
LAG, RATES = 4, (0.00259, 0.00432, 0.0072, 0.012, 0.02)
TRIES, CONVERGED = 20, 0.75


def lagged_run(lag: int = 0, **flags) -> dict:
    """Train on data that are `lag` versions old: the held-out score at the end, and its mean over
    POINTS moments of the run."""
    torch.set_num_threads(1)
    config = Config(**ALIKE | {"damper": "none"} | flags)
    task = task_of(config)
    learner = make_learner(config, task, make_model(config, task))
    behind = make_generator(config, task, copy.deepcopy(learner.model))
    published = deque([(0, learner.model.flat.clone())], maxlen=lag + 1)
    scores = []

    while learner.version < config.steps and learner.skipped_in_row < 3:
        behind.set_weights(*published[0])  # the oldest that is kept
        groups = new_groups(learner, task, config.groups_per_step)
        for group in groups:
            group.start = behind.newest
        learner_step(learner, judged(behind, groups, task, config), config)
        published.append((learner.version, learner.model.flat.clone()))
        if learner.version * POINTS % config.steps < POINTS:  # another part of the run is over
            scores.append(held_out(learner, task, config))
    while len(scores) < POINTS:  # it was given up
        scores.append(held_out(learner, task, config))
    return {"final": scores[-1], "area": float(np.mean(scores))}


def judged(generator: Generator, groups: list[Group], task: Task, config: Config) -> list[Group]:
    """Groups with their episodes, and rewards for these."""
    groups = generate(generator, groups)
    for group in groups:
        apply_verdicts(group, verify_group(group, task, config))
    return groups


def held_out(learner: Learner, task: Task, config: Config) -> float:
    """Mean reward of greedy answers to problems that are not trained."""
    greedy = dataclasses.replace(config, temperature=0.0, group_size=1, rollout_weights="float32")
    generator = make_generator(greedy, task, learner.model)
    groups = [Group(i, 0, problem_of(task, i, "eval")) for i in range(HELD_OUT)]
    groups = judged(generator, groups, task, config)
    return float(np.mean([t.reward for group in groups for t in group.trajectories]))


def run_all(plan: list[dict], folder: Path, name: str) -> dict:
    """The runs of a plan, one on each core; the measurement, which is saved after each run."""
    result = {"alike": ALIKE, "runs": []}
    with ProcessPoolExecutor(cores(), get_context("spawn")) as pool:
        for row in tqdm(pool.map(run_row, plan), total=len(plan), unit="run"):
            result["runs"].append(row)
            save_result(folder, name, result)
    return result


def run_row(row: dict) -> dict:
    """A row of a plan, and what came of its run."""
    return row | lagged_run(task=row["task"], seed=row["seed"], **row["flags"])


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
        seeds = [*range(SEEDS[name]), *(FRESH_SEEDS if name in STALE else ())]
        for seed, (arm, flags) in product(seeds, own.items()):
            if seed not in FRESH_SEEDS or " + " not in arm:
                row = {"arm": arm, "condition": name, "task": task, "seed": seed}
                plan.append(row | {"flags": flags | given})
    return plan


def bench_staleness_methods(folder: Path) -> None:
    """Objectives and dampers on stale data; methods.json and methods.png."""
    result = run_all(plan_of(), folder, "methods")
    draw_methods(result["runs"], folder / "methods.png")


def areas(runs: list[dict], arm: str, conditions) -> dict[tuple, float]:
    """(task, seed) -> mean held-out reward over the run, of one arm. Runs of one seed begin alike
    in all conditions, so they are one draw: their mean."""
    found = defaultdict(list)
    for run in runs:
        if run["arm"] == arm and run["condition"] in conditions:
            found[run["task"], run["seed"]].append(run["area"])
    return {draw: float(np.mean(each)) for draw, each in found.items()}


def compared(runs: list[dict], arm: str, conditions=STALE) -> tuple:
    """Whether an arm "helps", "hurts" or "cannot be told" from what it is compared with, on the
    same tasks and seeds; the mean difference, and its 99% interval. An objective is compared with
    no correction, by fresh seeds where there are any; what goes beside one with that objective
    alone."""
    objective, _, remedy = arm.partition(" + ")
    alone = areas(runs, objective if remedy else "reinforce", conditions)
    own = areas(runs, arm, conditions)
    fresh = [draw for draw in own if draw[1] in FRESH_SEEDS]
    gaps = np.array([own[draw] - alone[draw] for draw in fresh or own])
    half = STUDENT[len(gaps)] * gaps.std(ddof=1) / len(gaps) ** 0.5
    mean, low, high = gaps.mean(), gaps.mean() - half, gaps.mean() + half
    word = "helps" if low > 0 else "hurts" if high < 0 else "cannot be told"
    return word, mean, low, high


def split_arms(runs: list[dict]) -> tuple[list[str], list[str]]:
    """The objectives that correct something; the remedies beside an objective."""
    names = [arm for arm in grouped(runs, "arm") if arm != "reinforce"]
    return [a for a in names if " + " not in a], [a for a in names if " + " in a]


def gain(runs: list[dict], arm: str, conditions=STALE) -> str:
    """What an arm is worth, in words and figures."""
    word, mean, low, high = compared(runs, arm, conditions)
    return f"{word}, {mean:+.3f} ({low:+.3f} to {high:+.3f})"


def method_lines(result: dict) -> list[str]:
    """The reward of every arm, what objectives are worth on stale data, and what goes beside."""
    runs, lines = result["runs"], [CELLS]
    alone, beside = split_arms(runs)
    tasks, everywhere = grouped(runs, "task"), grouped(runs, "condition")["8-bit"]
    for task, own in tasks.items():
        rows = []
        for arm in dict.fromkeys(["reinforce", *grouped(everywhere, "arm")]):
            cells = [list(areas(own, arm, [name]).values()) for name in CONDITIONS]
            rows.append([arm, *(f"{np.mean(x):.3f} ± {np.std(x, ddof=1):.3f}" for x in cells)])
        lines += ["", *markdown([f"`{task}`", *CONDITIONS], rows)]
    rows = []
    for arm in alone:
        rows.append([arm, *(gain(own, arm) for own in tasks.values()), gain(runs, arm, ["8-bit"])])
    head = ["against `reinforce`", *(f"`{task}`, η = 4 and 16" for task in tasks), "8-bit, both"]
    lines += ["", f"{READING}\n", *markdown(head, rows)]
    for task, own in tasks.items():
        rows = []
        for name in OBJECTIVES:
            pairs = [f"{name} + {fix}" for fix in FIXES]
            rows.append([name, *(gain(own, pair) if pair in beside else "" for pair in pairs)])
        lines += ["", *markdown([f"`{task}`, η = 4 and 16: beside", *FIXES], rows)]
    return lines


def method_claim(result: dict) -> str:
    """Which objectives help on both tasks; and in how many cases (of both tasks) what goes beside
    an objective helps, and hurts."""
    alone, beside = split_arms(result["runs"])
    tasks, words = grouped(result["runs"], "task").values(), {}
    for arm in [*alone, *beside]:
        words[arm] = [compared(own, arm)[0] for own in tasks]
    best = [f"`{arm}`" for arm in alone if words[arm] == ["helps", "helps"]]
    cases = sum((words[arm] for arm in beside), [])
    told = f"{cases.count('helps')} and hurts in {cases.count('hurts')} of {len(cases)} cases"
    return f"{', '.join(best)} help on both tasks; what goes beside an objective helps in {told}"


def draw_methods(runs: list[dict], path: Path) -> None:
    """Above, what each objective gains on data that are 4 and 16 versions old; below, what each
    remedy beside it gains."""
    names, beside = split_arms(runs)
    names.sort(key=lambda arm: compared(runs, arm)[1])
    figure = new_figure((11, 9))
    above, below = figure.subplots(2, len(TASKS), sharey="row")
    colours = {"helps": BLUE, "hurts": ORANGE, "cannot be told": GREY}
    for (task, own), bars, grid in zip(grouped(runs, "task").items(), above, below, strict=True):
        for y, arm in enumerate(names):
            word, mean, low, high = compared(own, arm)
            bars.plot([low, mean, high], [y] * 3, "o-", color=colours[word], lw=3, markevery=[1])
        bars.axvline(0, color="black", linewidth=0.8)
        bars.set_title(f"{task}: an objective, against reinforce")
        bars.set_xlabel("gain in mean held-out reward (99% interval)")
        bars.set_yticks(range(len(names)), names)
        for (y, name), (x, fix) in product(enumerate(OBJECTIVES), enumerate(FIXES)):
            if f"{name} + {fix}" in beside:
                word, mean, *_ = compared(own, f"{name} + {fix}")
                box = {"facecolor": colours[word], "alpha": 0.5, "edgecolor": "none"}
                grid.text(x, y, f"{mean:+.2f}", ha="center", va="center", bbox=box)
        grid.set_title("what goes beside it, against it alone")
        grid.set(xlim=(-0.5, len(FIXES) - 0.5), ylim=(len(OBJECTIVES) - 0.5, -0.5))
        grid.set_xticks(range(len(FIXES)), FIXES)
        grid.set_yticks(range(len(OBJECTIVES)), OBJECTIVES)
    figure.suptitle("Data 4 and 16 versions old: blue helps, orange hurts, grey cannot be told")
    save_figure(figure, path)


# ---- how often one must try ----


def bench_attempts(folder: Path) -> None:
    """Runs at the edge of collapse, without a damper and with each; attempts.json."""
    plan = []
    for lr, damper, seed in product(RATES, DAMPERS[::-1], range(TRIES)):
        flags = {"lag": LAG, "lr": lr, "damper": damper} | FIXES.get(damper, {})
        plan.append({"task": TASKS[0], "seed": seed, "damper": damper, "flags": flags})
    result = run_all(plan, folder, "attempts")
    save_result(folder, "attempts", result | {"overhead": window_overhead()})


def window_overhead() -> dict:
    """Seconds of a learner's step with the KL to a reference, measured every 5 steps as by default,
    over those of a step without; the two in turn, the same batch."""
    torch.set_num_threads(1)
    config = Config(task="guess")
    task = task_of(config)
    pair = []
    for every in (config.reference_every, 0):
        own = dataclasses.replace(config, reference_every=every)
        pair.append((own, make_learner(own, task, make_model(own, task))))
    learner = pair[0][1]
    generator = make_generator(config, task, copy.deepcopy(learner.model))
    prompts = new_groups(learner, task, config.groups_per_step)
    groups = judged(generator, prompts, task, config)

    def steps(own, learner):
        for _ in range(config.reference_every):
            learner_step(learner, groups, own)

    seconds = in_turn({i: partial(steps, *one) for i, one in enumerate(pair)}, rounds=12)
    return spread(np.divide(seconds[0], seconds[1]))


def finals_of(result: dict) -> dict[tuple, list]:
    """(learning rate, damper) -> the rewards at the end of its runs."""
    found = defaultdict(list)
    for run in result["runs"]:
        found[run["flags"]["lr"], run["damper"]].append(run["final"])
    return found


def converged(finals: list[float]) -> int:
    """How many runs have converged."""
    return sum(final >= CONVERGED for final in finals)


def attempt_claim(result: dict) -> str:
    """How many runs converge at the largest rate, with the effective sample size and without."""
    ess, none = (finals_of(result)[RATES[-1], damper] for damper in ("ess", "none"))
    said = f"{converged(ess)} of {len(ess)} runs (none: {converged(none)} of {len(none)})"
    return f"at too large a learning rate `ess` saves {said}"


def attempt_lines(result: dict) -> list[str]:
    """Of every learning rate: how many of the runs converged, and how often one must try."""
    text = f"""\
`reverse:4`, data {LAG} versions old, {TRIES} seeds: how often one must try
until a run converges (held-out reward at least {CONVERGED}); in brackets quartiles of
the reward. A step of the learner takes {spread_text(result["overhead"])} times as long with the KL
that the window needs.
"""
    rows = defaultdict(list)
    for (lr, _), finals in finals_of(result).items():
        good = converged(finals)
        tries = f"{len(finals) / good:.1f}" if good else "never"
        low, high = np.quantile(finals, [0.25, 0.75])
        rows[lr].append(f"{tries} ({low:.2f} to {high:.2f})")
    head = ["learning rate, and `--damper`", *grouped(result["runs"], "damper")]
    return [text, *markdown(head, ([lr, *cells] for lr, cells in rows.items()))]
