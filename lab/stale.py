"""stale.py: what to do about stale data: objectives and dampers on data of a known age.

    python bench.py staleness-methods    # every objective and damper, at four ages, and 8 bits

A run here is synchronous, but its generator is always `lag` versions behind: every token is exactly
so old, nothing depends on the clock, and two runs at once do not disturb each other. In a real
asynchronous run the age varies, and is mostly below its bound.
Left out: time (races.py). The plan of all runs is `plan_of`.
"""

import copy
import dataclasses
from collections import defaultdict, deque
from concurrent.futures import ProcessPoolExecutor
from itertools import product
from multiprocessing import get_context
from pathlib import Path

import numpy as np
import torch
from tqdm import tqdm

from lab.plots import grouped, save_result, table
from learner import Learner, learner_step, make_learner, new_groups
from reward import Task, problem_of, task_of, verify_group
from rollout import Generator, generate, make_generator
from runtime.config import DAMPERS, OBJECTIVES, Config
from runtime.devices import cores
from runtime.messages import Group, Judgement, apply_judgement
from runtime.models import make_model

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
seeds that were fixed, and not looked at, before. A `--damper` (`kl`: the window at 0.15) or
`--advantage opob` is compared with the same objective without it, by five seeds. Of a hundred
comparisons of equals, about one is wrong."""
BASELINES = ("cispo", "reinforce")
# Half of a 99% interval, in standard errors, by the number of seeds (Student 1908). A bootstrap of
# five means is too sure: it finds a difference in one of ten comparisons of equals.
STUDENT = {2: 63.66, 3: 9.925, 4: 5.841, 5: 4.604, 6: 4.032, 10: 3.250, 20: 2.861}


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

    while learner.version < config.steps and learner.skipped < 3:
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
        apply_judgement(group, Judgement(verify_group(group, task, config), 0.0, 0.0))
    return groups


def held_out(learner: Learner, task: Task, config: Config) -> float:
    """Mean reward of greedy answers to problems that are not trained."""
    greedy = dataclasses.replace(config, temperature=0.0, group_size=1, rollout_weights="float32")
    generator = make_generator(greedy, task, learner.model)
    groups = [Group(i, 0, problem_of(task, i, "eval")) for i in range(HELD_OUT)]
    groups = judged(generator, groups, task, config)
    return float(np.mean([t.reward for group in groups for t in group.trajectories]))


def run_all(plan: list[dict], folder: Path, name: str) -> None:
    """The runs of a plan, one on each core; saved after each run."""
    result = {"alike": ALIKE, "runs": []}
    with ProcessPoolExecutor(cores(), get_context("spawn")) as pool:
        for row in tqdm(pool.map(run_row, plan), total=len(plan), unit="run"):
            result["runs"].append(row)
            save_result(folder, name, result)


def run_row(row: dict) -> dict:
    """A row of a plan, and what came of its run."""
    return row | lagged_run(task=row["task"], seed=row["seed"], **row["flags"])


# ---- which methods help ----


def arms(partners) -> dict[str, dict]:
    """{name: flags} of every method: objectives alone, and some of them with what goes beside."""
    methods = {name: {"objective": name} for name in OBJECTIVES}
    for name, (fix, flags) in product(partners, FIXES.items()):
        if (name, fix) != ("dpo", "opob"):  # a preference has no baseline
            methods[f"{name} + {fix}"] = {"objective": name} | flags
    return methods


def plan_of() -> list[dict]:
    """Every run of `bench_staleness_methods`, in the order in which they begin."""
    plan = []
    for (name, given), task in product(CONDITIONS.items(), TASKS):
        methods = arms(OBJECTIVES if name in STALE else BASELINES)
        seeds = [*range(SEEDS[name]), *(FRESH_SEEDS if name in STALE else ())]
        for seed, (arm, flags) in product(seeds, methods.items()):
            if seed not in FRESH_SEEDS or " + " not in arm:
                row = {"arm": arm, "condition": name, "task": task, "seed": seed}
                plan.append(row | {"flags": flags | given})
    return plan


def bench_staleness_methods(folder: Path) -> None:
    """Objectives and dampers on stale data; methods.json."""
    run_all(plan_of(), folder, "methods")


def areas(runs: list[dict], arm: str, conditions) -> dict[tuple, float]:
    """(task, seed) -> mean held-out reward over the run, of one arm. Runs of one seed begin alike
    in all conditions, so they are one draw: their mean."""
    draws = defaultdict(list)
    for run in runs:
        if run["arm"] == arm and run["condition"] in conditions:
            draws[run["task"], run["seed"]].append(run["area"])
    return {draw: float(np.mean(each)) for draw, each in draws.items()}


def compared(runs: list[dict], arm: str, conditions=STALE) -> tuple:
    """Whether an arm "helps", "hurts" or "cannot be told" from what it is compared with, on the
    same tasks and seeds; the mean difference, and its 99% interval. An objective is compared with
    no correction, by fresh seeds where there are any; what goes beside one with that objective
    alone."""
    objective, _, remedy = arm.partition(" + ")
    alone = areas(runs, objective if remedy else "reinforce", conditions)
    with_it = areas(runs, arm, conditions)
    fresh = [draw for draw in with_it if draw[1] in FRESH_SEEDS]
    gaps = np.array([with_it[draw] - alone[draw] for draw in fresh or with_it])
    half = STUDENT[len(gaps)] * gaps.std(ddof=1) / len(gaps) ** 0.5
    mean, low, high = gaps.mean(), gaps.mean() - half, gaps.mean() + half
    word = "helps" if low > 0 else "hurts" if high < 0 else "cannot be told"
    return word, mean, low, high


def split_arms(runs: list[dict]) -> tuple[list[str], list[str]]:
    """The objectives that correct something; the remedies beside an objective."""
    beside = [arm for arm in grouped(runs, "arm") if " + " in arm]
    return [arm for arm in grouped(runs, "arm") if arm not in ("reinforce", *beside)], beside


def gain(runs: list[dict], arm: str, conditions=STALE) -> str:
    """What an arm is worth, in words and figures."""
    word, mean, low, high = compared(runs, arm, conditions)
    return f"{word}, {mean:+.3f} ({low:+.3f} to {high:+.3f})"


def method_lines(result: dict) -> list[str]:
    """The reward of every arm, what objectives are worth on stale data, and what goes beside."""
    runs, lines, worth = result["runs"], [CELLS], []
    alone, beside = split_arms(runs)
    everywhere = ["reinforce", *grouped(grouped(runs, "condition")["8-bit"], "arm")]
    for task, rows in grouped(runs, "task").items():
        cells = []
        for arm, name in product(dict.fromkeys(everywhere), CONDITIONS):
            scores = list(areas(rows, arm, [name]).values())
            cells.append((arm, name, f"{np.mean(scores):.3f} ± {np.std(scores, ddof=1):.3f}"))
        lines += ["", *table(f"`{task}`", cells)]
        worth += [(arm, f"`{task}`, η = 4 and 16", gain(rows, arm)) for arm in alone]
    worth += [(arm, "8-bit, both", gain(runs, arm, ["8-bit"])) for arm in alone]
    lines += ["", f"{READING}\n", *table("against `reinforce`", worth)]
    for task, rows in grouped(runs, "task").items():
        cells = [(*arm.split(" + "), gain(rows, arm)) for arm in beside]
        lines += ["", *table(f"`{task}`, η = 4 and 16: beside", cells)]
    return lines
