"""parent.py: how far one parent goes: groups and megabytes a second.

    python bench.py parent

The parent of train_async.py runs as it is: admission, pipes, validator, buffer, ledger, log, books.
Stand-ins are only what costs others their time: a step changes the version and no weights, nothing
is evaluated, and all workers are played by one process that answers at once (players.py). So all
that is left to wait for is the parent. Every case is a process of its own.
Left out: what a step of the learner costs, and pipes to other machines.
"""

import pickle
import time
from concurrent.futures import ProcessPoolExecutor
from contextlib import redirect_stderr, redirect_stdout
from itertools import product
from multiprocessing import Pipe, get_context
from pathlib import Path
from tempfile import TemporaryDirectory
from types import SimpleNamespace
from unittest import mock

import numpy as np
from tqdm import tqdm

import train_async
from lab.players import episodes, play
from lab.plots import column, print_table, save_result, spread
from runtime import flow, setup
from runtime.config import Config

TOKENS = {"short": 30, "long": 2000}  # an answer in `guess`, and of a model that reasons
# rollout workers, groups a step, steps
SIZES = ((1, 32, 60), (8, 32, 60), (64, 512, 12), (256, 512, 12))
JUDGES = 8  # a reward worker for so many rollout workers
WARM, ETA = 2, 2  # the first steps do not count, nor do the last ones, which admit nothing


def run_case(case: dict, folder: Path) -> dict:
    """One case in this process: what the parent has sustained, and its CPU time."""
    names = [f"rollout-{i}" for i in range(case["workers"])]
    names += [f"reward-{i}" for i in range(-(-case["workers"] // JUDGES))]
    sizes = {"steps": case["steps"], "groups_per_step": case["groups"], "max_staleness": ETA}
    sizes |= {"rollout_workers": case["workers"], "reward_workers": len(names) - case["workers"]}
    rare = dict.fromkeys(("samples_every", "checkpoint_every", "eval_every"), 10**6)
    config = Config(model="tiny", device="cpu", out=str(folder / "run"), **sizes, **rare)

    here, there = zip(*[Pipe() for _ in names], strict=True)
    ends = dict(zip(names, here, strict=True))
    lines = [(name.split("-")[0], pipe) for name, pipe in zip(names, there, strict=True)]
    episode = config.group_size, TOKENS[case["answers"]]
    players = get_context("spawn").Process(target=play, args=(lines, *episode), daemon=True)
    players.start()
    clock = ~players.pid << 3 | 2  # Linux: the CPU time of that process
    marks = []

    def start(name: str, *_) -> tuple:
        facts = {"name": name, "pid": players.pid, "exitcode": 0}
        return SimpleNamespace(**facts, kill=lambda: None, join=lambda seconds=0: None), ends[name]

    def step(learner, batch: list, config: Config) -> dict:
        """Stands for `learner_step`."""
        cpu = time.process_time(), time.clock_gettime(clock)
        marks.append(np.array([time.monotonic(), *cpu]))
        learner.version, learner.begun = learner.version + 1, list(learner.cursors)
        return {"loss": 0.0, "grad_norm": 0.0, "tokens": 1, "seconds": 1.0, "dead_groups": 0}

    evaluated = {"solved": 0.0, "reward": 0.0, "turns": 0.0, "failures": {}}
    with (
        (folder / "said").open("w") as said,
        redirect_stdout(said),
        redirect_stderr(said),
        mock.patch.object(train_async, "learner_step", step),
        mock.patch.object(flow, "start_here", start),
        mock.patch.object(setup, "evaluate", lambda *_: evaluated),
    ):
        train_async.train(config)

    last = case["steps"] - ETA - 2
    groups = case["groups"] * (last - WARM)
    seconds, cpu, played = marks[last] - marks[WARM]
    mb = len(pickle.dumps(episodes(0, {"prompt": "guess", "secret": 0}, *episode))) / 1e6
    return {
        "groups_per_s": groups / seconds,
        "mb_per_s": mb * groups / seconds,
        "cpu_ms": 1e3 * cpu / groups,  # of the parent, a group
        "players_busy": played / seconds,  # near 1: they were the limit
        "mb": mb,
    }


def bench_parent(folder: Path) -> None:
    """Rates of every case, in turn (A B C A B C)."""
    cases = []
    for (workers, groups, steps), answers in product(SIZES, TOKENS):
        case = {"workers": workers, "answers": answers, "groups": groups, "steps": steps}
        cases.append(case)
    rows, found = [], []
    for case in tqdm(cases * 2):
        found.append(measure(case))
        save_result(folder, "parent", {"cases": cases, "found": found})
    for i, case in enumerate(cases):
        own = found[i :: len(cases)]
        medians = {name: float(np.median(column(own, name))) for name in own[0]}
        rows.append(case | medians | {"rounds": spread(column(own, "groups_per_s"))})
    costs = [fit_costs(*pair) for pair in zip(rows[::2], rows[1::2], strict=True)]
    save_result(folder, "parent", {"rows": rows, "costs": costs})
    print_table([{name: x for name, x in row.items() if name != "rounds"} for row in rows])
    print_table(costs)


def measure(case: dict) -> dict:
    """A case in a process of its own."""
    with TemporaryDirectory() as folder, ProcessPoolExecutor(1, get_context("spawn")) as pool:
        return pool.submit(run_case, case, Path(folder)).result()


def fit_costs(short: dict, long: dict) -> dict:
    """Seconds of the parent for a group, and for a megabyte of it: the line through two cases."""
    seconds = [1 / row["groups_per_s"] for row in (short, long)]
    mb = (seconds[1] - seconds[0]) / (long["mb"] - short["mb"])
    return {"workers": short["workers"], "group_s": seconds[0] - mb * short["mb"], "mb_s": mb}
