"""parent.py: how far one parent goes: groups and megabytes a second, and what gives out first.

    python bench.py parent

The parent of train_async.py runs as it is: admission, pipes, validator, buffer, ledger, log, books.
Stand-ins are only what costs others their time: a step changes the version and no weights, nothing
is evaluated, and all workers are played by one process that answers at once (players.py). So all
that is left to wait for is the parent. Every case is a process of its own.
Left out: what a step of the learner costs, and pipes to other machines.
"""

import threading
import time
from collections import Counter
from concurrent.futures import ProcessPoolExecutor
from contextlib import ExitStack, redirect_stderr, redirect_stdout
from functools import partial
from itertools import product
from multiprocessing import get_context
from pathlib import Path
from tempfile import TemporaryDirectory
from types import SimpleNamespace
from unittest import mock

import numpy as np
from tqdm import tqdm

import train_async
from buffer import Buffer
from lab.players import Player, play
from lab.plots import column, print_table, save_result, spread
from runtime import books, flow, processes, setup
from runtime.config import Config
from runtime.devices import describe_machine
from runtime.folder import Log
from runtime.ledger import Ledger
from runtime.messages import Group
from runtime.pipes import Inlet, private_pipe
from runtime.processes import Pool
from runtime.runlog import RunLog

TOKENS = {"short": 30, "long": 2000}  # an answer in `guess`, and of a model that reasons
# rollout workers, groups a step, steps
SIZES = ((1, 32, 60), (8, 32, 60), (64, 512, 12), (256, 512, 12))
RATES = ("groups_per_s", "mb_per_s", "cpu_ms", "players_busy")
JUDGES = 8  # a reward worker for so many rollout workers
WARM, ETA = 2, 2  # the first steps do not count, nor do the last ones, which admit nothing

PARTS = {  # part: functions, where they are looked up
    "pipes": ((Inlet, "recv_bytes"), (Inlet, "send_bytes")),
    "unpack": ((processes, "unpack_messages"),),
    "pack": ((processes, "pack_messages"),),
    "validate": ((flow, "flaw"),),
    "issue": ((Pool, "issue"), (Pool, "_take"), (Pool, "receive")),
    "admit": ((train_async, "admit"),),
    "batch": ((Buffer, "next_batch"),),
    "land": ((train_async, "land"),),
    "settle": ((Ledger, "note"), (Ledger, "balance"), (Pool, "out")),
    "log": ((RunLog, "event"), (Log, "append")),
    "metrics": ((books, "batch_metrics"),),
}


INSIDE = threading.local()  # seconds of the parts inside of the one that runs, in each thread


def timed(part: str, function, spent: Counter):
    """The function, with its CPU time added to a part, without that of the parts inside of it."""

    def call(*arguments, **named):
        begin, outside, INSIDE.seconds = time.thread_time(), getattr(INSIDE, "seconds", 0.0), 0.0
        try:
            return function(*arguments, **named)
        finally:
            seconds = time.thread_time() - begin
            spent[part] += seconds - INSIDE.seconds
            INSIDE.seconds = outside + seconds

    return call


def run_case(case: dict, folder: Path) -> dict:
    """One case in this process: what the parent has sustained, and for what it has needed CPUs."""
    names = [f"rollout-{i}" for i in range(case["workers"])]
    names += [f"reward-{i}" for i in range(-(-case["workers"] // JUDGES))]
    sizes = {"steps": case["steps"], "groups_per_step": case["groups"], "max_staleness": ETA}
    sizes |= {"rollout_workers": case["workers"], "reward_workers": len(names) - case["workers"]}
    rare = dict.fromkeys(("samples_every", "checkpoint_every", "eval_every"), 10**6)
    config = Config(model="tiny", device="cpu", out=str(folder / "run"), **sizes, **rare)

    here, there = zip(*[private_pipe() for _ in names], strict=True)
    ends = dict(zip(names, here, strict=True))
    lines = [(name.split("-")[0], pipe) for name, pipe in zip(names, there, strict=True)]
    episode = config.group_size, TOKENS[case["answers"]]
    players = get_context("spawn").Process(target=play, args=(lines, *episode), daemon=True)
    players.start()
    clock = ~players.pid << 3 | 2  # Linux: the CPU time of that process
    marks, spent = [], Counter(dict.fromkeys(PARTS, 0.0))

    def start(name: str, *_) -> tuple:
        facts = {"name": name, "pid": players.pid, "exitcode": 0}
        return SimpleNamespace(**facts, kill=lambda: None, join=lambda seconds=0: None), ends[name]

    def step(learner, batch: list, config: Config) -> dict:
        """Stands for `learner_step`."""
        cpu = time.process_time(), time.clock_gettime(clock)
        marks.append(np.array([time.monotonic(), *cpu, *spent.values()]))
        learner.version, learner.begun = learner.version + 1, list(learner.cursors)
        return {"loss": 0.0, "grad_norm": 0.0, "tokens": 1, "seconds": 1.0, "dead_groups": 0}

    evaluated = {"solved": 0.0, "reward": 0.0, "turns": 0.0, "failures": {}}
    changes = [
        (train_async, "learner_step", step),
        (flow, "Pool", partial(Pool, start=start)),
        (setup, "evaluate", lambda *_: evaluated),
    ]
    for part, places in PARTS.items() if case["spans"] else ():
        for owner, name in places:
            changes.append((owner, name, timed(part, getattr(owner, name), spent)))
    with ExitStack() as stack, (folder / "said").open("w") as said:
        stack.enter_context(redirect_stdout(said))
        stack.enter_context(redirect_stderr(said))
        for change in changes:
            stack.enter_context(mock.patch.object(*change))
        train_async.train(config)

    last = case["steps"] - ETA - 2
    groups = case["groups"] * (last - WARM)
    seconds, cpu, played, *parts = marks[last] - marks[WARM]
    delivery = Player(*episode).answer("rollout", Group(0, 0, {"prompt": "guess", "secret": 0}))
    mb = len(delivery) / 1e6
    return {
        "groups_per_s": groups / seconds,
        "mb_per_s": mb * groups / seconds,
        "cpu_ms": 1e3 * cpu / groups,  # of the parent, a group
        "players_busy": played / seconds,  # near 1: they were the limit
        "mb": mb,
        "parts_ms": {part: 1e3 * cpu / groups for part, cpu in zip(PARTS, parts, strict=True)},
    }


def bench_parent(folder: Path, rounds: int = 2) -> None:
    """Rates of every case, in turn (A B C A B C); then once more, where the CPU time goes."""
    cases, turns, rows = [], [], []
    for (workers, groups, steps), answers in product(SIZES, TOKENS):
        case = {"workers": workers, "answers": answers, "groups": groups, "steps": steps}
        cases.append(case)
    for turn in tqdm(range(rounds + 1), unit="round"):
        turns.append([measure(case | {"spans": turn == rounds}) for case in cases])
    for case, *found, parted in zip(cases, *turns, strict=True):
        row = {name: case[name] for name in ("workers", "answers", "groups")}
        for name in RATES:
            row[name] = float(np.median(column(found, name)))
        parts = Counter(parted["parts_ms"]).most_common()
        row |= {"rounds": spread(column(found, "groups_per_s")), "mb": parted["mb"]}
        rows.append(row | {"parts_ms": dict(parts), "most": ", ".join(dict(parts[:3]))})
    costs = [fit_costs(*pair) for pair in zip(rows[::2], rows[1::2], strict=True)]
    save_result(folder, "parent", {"machine": describe_machine(), "rows": rows, "costs": costs})
    shown = ("workers", "answers", *RATES, "most")
    print_table([{name: row[name] for name in shown} for row in rows])
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
