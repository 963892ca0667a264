"""parent.py: how far one parent goes: groups and megabytes a second, and what gives out first.

    python bench.py parent

The parent of train_async.py runs as it is: admission, pipes, validator, buffer, ledger, log, books.
Stand-ins are only what costs others their time: a step changes the version and no weights, nothing
is evaluated, and all workers are played by one process that answers at once (players.py). So all
that is left to wait for is the parent. Every case is a process of its own.
Left out: what a step of the learner costs, and pipes to other machines.
"""

import json
import subprocess
import sys
import threading
import time
from collections import Counter
from contextlib import ExitStack
from multiprocessing import Pipe, get_context
from multiprocessing.connection import Connection
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
from runtime.folder import Log, read_json
from runtime.ledger import Ledger
from runtime.messages import Group
from runtime.processes import Pool
from runtime.runlog import RunLog

ROOT = Path(__file__).parent.parent
TOKENS = {"short": 30, "long": 2000}  # an answer in `guess`, and of a model that reasons
# rollout workers, groups a step, steps with short and with long answers
SIZES = ((1, 32, 60, 30), (8, 32, 60, 30), (64, 512, 12, 10), (256, 512, 12, 10))
JUDGES = 8  # a reward worker for so many rollout workers
WARM, ETA = 2, 2  # the first steps do not count, nor do the last ones, which admit nothing

PARTS = {  # part: functions, where they are looked up
    "pipes": ((Connection, "recv_bytes"), (Connection, "send_bytes")),
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


class Spans:
    """CPU seconds of parts of the program, each without those inside of it, over all threads."""

    def __init__(self):
        self.own, self.all = threading.local(), []

    def timed(self, part: str, function):
        """The function, with its time added to a part."""

        def call(*arguments, **named):
            own = self.own
            if not hasattr(own, "spent"):
                own.spent, own.inside = Counter(dict.fromkeys(PARTS, 0.0)), 0.0
                self.all.append(own.spent)
            begin, outside, own.inside = time.thread_time(), own.inside, 0.0
            try:
                return function(*arguments, **named)
            finally:
                seconds = time.thread_time() - begin
                own.spent[part] += seconds - own.inside
                own.inside = outside + seconds

        return call

    def total(self) -> np.ndarray:
        """Seconds of every part."""
        seconds = [[own[part] for part in PARTS] for own in self.all]
        return np.array(seconds).reshape(-1, len(PARTS)).sum(axis=0)


def run_case(case: dict, folder: Path) -> dict:
    """One case in this process: what the parent has sustained, and for what it has needed CPUs."""
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
    marks, spans = [], Spans()

    def start(name: str, *_) -> tuple:
        facts = {"name": name, "pid": players.pid, "exitcode": 0}
        return SimpleNamespace(**facts, kill=lambda: None, join=lambda seconds=0: None), ends[name]

    def step(learner, batch: list, config: Config) -> dict:
        """Stands for `learner_step`."""
        cpu = time.process_time(), time.clock_gettime(clock)
        marks.append((time.monotonic(), *cpu, spans.total()))
        learner.version, learner.begun = learner.version + 1, list(learner.cursors)
        return {"loss": 0.0, "grad_norm": 0.0, "tokens": 1, "seconds": 1.0, "dead_groups": 0}

    evaluated = {"solved": 0.0, "reward": 0.0, "turns": 0.0, "failures": {}}
    changes = [
        (train_async, "learner_step", step),
        (flow, "start_here", start),
        (setup, "evaluate", lambda *_: evaluated),
    ]
    for part, places in PARTS.items() if case["spans"] else ():
        for owner, name in places:
            changes.append((owner, name, spans.timed(part, getattr(owner, name))))
    with ExitStack() as stack:
        for change in changes:
            stack.enter_context(mock.patch.object(*change))
        train_async.train(config)

    last = case["steps"] - ETA - 2
    groups = case["groups"] * (last - WARM)
    seconds, cpu, played, parts = (b - a for a, b in zip(marks[WARM], marks[last], strict=True))
    delivery = Player(*episode).answer("rollout", Group(0, 0, {"prompt": "guess", "secret": 0}))
    return {
        "groups_per_s": groups / seconds,
        "mb_per_s": len(delivery) / 1e6 * groups / seconds,
        "cpu_ms": 1e3 * cpu / groups,  # of the parent, a group
        "players_busy": played / seconds,  # near 1: they were the limit
        "mb": len(delivery) / 1e6,
        "parts_ms": dict(zip(PARTS, (1e3 * parts / groups).tolist(), strict=True)),
    }


def bench_parent(folder: Path, sizes=SIZES, rounds: int = 2) -> None:
    """Rates of every case, in turn (A B C A B C); then once more, where the CPU time goes."""
    cases = []
    for workers, groups, *steps in sizes:
        for answers, count in zip(TOKENS, steps, strict=True):
            case = {"workers": workers, "answers": answers, "groups": groups, "steps": count}
            cases.append(case)
    found = [[] for _ in cases]
    for turn in tqdm(range(rounds + 1), unit="round"):
        for case, own in zip(cases, found, strict=True):
            own.append(measure(case | {"spans": turn == rounds}))
    rows = [summary_of(case, *own) for case, own in zip(cases, found, strict=True)]
    costs = [fit_costs(*pair) for pair in zip(rows[::2], rows[1::2], strict=True)]
    save_result(folder, "parent", {"machine": describe_machine(), "rows": rows, "costs": costs})
    shown = ("workers", "answers", "groups_per_s", "mb_per_s", "cpu_ms", "players_busy", "most")
    print_table([{name: row[name] for name in shown} for row in rows])
    print_table(costs)


def measure(case: dict, root: Path = ROOT) -> dict:
    """A case in a process of its own; root: the project whose parent it is."""
    with TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "lab.parent", json.dumps(case), folder]
        done = subprocess.run(command, cwd=root, capture_output=True, text=True)
        if done.returncode:
            raise RuntimeError(f"{command}: exit code {done.returncode}\n{done.stderr[-2000:]}")
        return read_json(Path(folder) / "row.json")


def summary_of(case: dict, *turns: dict) -> dict:
    """Medians over the rounds; the last one has the parts."""
    *rounds, parted = turns
    row = {name: value for name, value in case.items() if name != "steps"}
    for name in ("groups_per_s", "mb_per_s", "cpu_ms", "players_busy"):
        row[name] = float(np.median(column(rounds, name)))
    row |= {"rounds": spread(column(rounds, "groups_per_s")), "mb": parted["mb"]}
    parts = sorted(parted["parts_ms"].items(), key=lambda pair: -pair[1])
    row["parts_ms"] = {part: round(milliseconds, 4) for part, milliseconds in parts}
    return row | {"most": ", ".join(part for part, _ in parts[:3])}


def fit_costs(short: dict, long: dict) -> dict:
    """Seconds of the parent for a group, and for a megabyte of it: the line through two cases."""
    seconds = [1 / row["groups_per_s"] for row in (short, long)]
    mb = (seconds[1] - seconds[0]) / (long["mb"] - short["mb"])
    return {"workers": short["workers"], "group_s": seconds[0] - mb * short["mb"], "mb_s": mb}


if __name__ == "__main__":  # the process of a case
    place = Path(sys.argv[2])
    (place / "row.json").write_text(json.dumps(run_case(json.loads(sys.argv[1]), place)))
