"""calibrate.py: what the event logs of real runs say about the costs of pipeline.py.

`calibrate` reads spans and pauses, and finds by least squares how long everything takes:

    generate  how many steps, slots and busy slots a span had, which episodes it began: seconds of
              each, and how much longer they are while a step is computed beside them
    train     how many micro-batches and tokens a step had, and whether the reference ran
    the rest  means: verification, delivery, publication, evaluation, what lies between two steps

The episodes of the log, group by group, are what a simulation draws its lengths from. Calibrate on
runs of one task with different numbers of slots and of groups a step, one of them with eta = 0 and
one of train_sync.py: what does not vary cannot be told apart. Left out: first spans and first
steps, which warm up, and processes that share a core: but for `beside`, each has its own.
"""

import json
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import fields
from math import ceil
from operator import itemgetter
from pathlib import Path

import numpy as np

from lab.pipeline import Costs, Log, Pipeline, Setup, end, overlap
from runtime.config import UserError
from runtime.runlog import read_lines

DECODE = ("step", "step_slot", "step_context", "step_running")


REFILL = ("episode", "refill", "prefill")


TRAIN = ("train", "micro_batch", "train_token", "reference_token", "listen")


BESIDE = np.linspace(1.0, 2.0, 41)  # what `beside` may be


KEEP = 500  # groups: enough to draw from


def read_run(folder: str) -> Log:
    """The log of a run folder; raises UserError when there is none, or none that is long enough."""
    path = Path(folder)
    if not ((path / "config.json").is_file() and (path / "events.jsonl").is_file()):
        raise UserError(f"{folder}: must be a run folder (with config.json and events.jsonl)")
    config, events = json.loads((path / "config.json").read_text()), defaultdict(list)
    for event in read_lines(path / "events.jsonl"):
        events[event["kind"]].append(event)
    rows = [row for row in read_lines(path / "metrics.jsonl") if "seconds" in row]
    names = {f.name for f in fields(Setup)}
    setup = Setup(**{name: value for name, value in config.items() if name in names})
    setup.eta, setup.synchronous = config["max_staleness"], config["mode"] == "sync"
    setup.eta = 0 if setup.synchronous else setup.eta
    setup.steps = len(events["train"])
    setup.rollout_workers = len({e["process"] for e in events["generate"]})
    if setup.steps < 2 * setup.eta + 4 or len(rows) != setup.steps:
        raise UserError(f"{folder}: must be a whole run of {2 * setup.eta + 4} steps or more")
    if "micro_batches" not in rows[0]:
        raise UserError(f"{folder}: must be a run of this version (metrics have no micro_batches)")
    return Log(path.resolve().name, setup, dict(events), rows)


def fit(columns: list, seconds: list[float]) -> np.ndarray:
    """Seconds >= 0 for one unit of each column [n, columns] that best explain `seconds` [n].

    Columns are scaled to one size, so that what the runs cannot tell apart (slots, when all runs
    have as many) is shared out evenly. What comes out negative is left out.
    """
    matrix = np.array(columns, float)
    scale = np.sqrt((matrix**2).mean(0))
    costs, left = np.zeros(len(scale)), scale > 0
    while left.any():
        costs[:] = 0.0
        costs[left] = np.linalg.lstsq(matrix[:, left] / scale[left], seconds, rcond=0.02)[0]
        if (costs >= 0).all():
            break
        left &= costs > 0
    return costs / np.where(scale > 0, scale, 1.0)


def fit_generation(rows: list[tuple]) -> tuple[float, np.ndarray]:
    """(`beside`, costs of `DECODE` and `REFILL` [7]) that explain rows of `span_rows` best."""
    share, *parts = (np.array(column) for column in zip(*rows, strict=True))

    def explain(beside: float) -> tuple:
        speed, error, costs = 1 - (1 - 1 / beside) * share, 0.0, []  # 1: with no step beside it
        for seconds, amounts in zip(parts[::2], parts[1::2], strict=True):
            costs.append(fit(amounts, seconds * speed))
            error += float(np.square(amounts @ costs[-1] / speed - seconds).sum())
        return error, float(beside), np.concatenate(costs)

    return min(map(explain, BESIDE), key=itemgetter(0))[1:]


def calibrate(logs: list[Log]) -> Costs:
    """Costs that explain these logs of one task; raises UserError when none of them says which
    groups it had.

    Logs of synchronous runs do not: they tell how quick a step is in which nothing arrives, and how
    much quicker generation is where the learner lives, without messages.
    """
    costs, pauses = Costs([log.name for log in logs]), defaultdict(list)
    spans, trained = [], []
    alone = [log for log in logs if log.setup.synchronous]
    for log in logs:
        trained += train_rows(log)
        if not log.setup.synchronous:
            groups = groups_of(log)
            spans += span_rows(log, groups)
            costs.groups += [[g["version"], g["size"], *g["lengths"]] for g in groups]
            for name, seconds in pauses_of(log, groups):
                pauses[name].append(seconds)
    if not spans:
        raise UserError("calibrate: must have a run of train_async.py, too")
    for name, seconds in pauses.items():
        setattr(costs, name, float(np.mean(seconds)))
    costs.beside, found = fit_generation(spans)
    seconds, amounts = zip(*trained, strict=True)
    for names, values in ((DECODE + REFILL, found), (TRAIN, fit(amounts, seconds))):
        for name, value in zip(names, values, strict=True):
            setattr(costs, name, float(value))
    costs.all_reduce = 2 * costs.publish  # assumed: what goes out must have come in
    costs.groups = sorted(costs.groups, key=lambda r: r[0])[:: ceil(len(costs.groups) / KEEP)]
    told = [pace(Pipeline(log.setup, costs).run()) for log in alone]
    costs.alone = float(np.mean([pace(log) / t for log, t in zip(alone, told, strict=True)] or 1.0))
    return costs


def pace(log: Log) -> float:
    """Seconds of generation for each token."""
    spans = log.events["generate"][1:]
    return sum(e["seconds"] for e in spans) / sum(e["slot_steps"] for e in spans)


def groups_of(log: Log) -> list[dict]:
    """Every group: start and finish events and verdict as one record, in order of the verdicts."""
    begun = {e["group"]: e for e in log.events["start"]}
    ended = {e["group"]: e["t"] for e in log.events["finish"]}
    return [
        {**e, **begun[e["group"]], "end": ended[e["group"]]}
        | {"asked": e["t"], "verdict": end(e), "seconds": e["seconds"]}
        for e in log.events["score"]
    ]


def span_rows(log: Log, groups: list[dict]) -> list[tuple]:
    """For each span of generation but a worker's first: the share of it in which a step was
    computed, seconds of decoding and how much there is of each of `DECODE`, and the same for the
    rest of the span and `REFILL`."""
    rows, size = [], log.setup.group_size
    for process in sorted({e["process"] for e in log.events["generate"]}):
        mine = [g for g in groups if g["process"] == process]
        begin, prompt = np.array([[g["t"], g["size"]] for g in mine]).T
        swaps = [e for e in log.events.get("swap", []) if e["process"] == process]
        spans = [e for e in log.events["generate"] if e["process"] == process]
        verdicts = [e for e in log.events.get("score", []) if e["process"] == process]
        for e in spans[1:]:
            new = (begin >= e["t"]) & (begin < end(e))
            # groups that begin at one token boundary share a forward pass
            apart = np.diff(np.sort(begin[new])) > 0.5 * e["seconds"] / e["steps"]
            refills, prefill = int(new.any()) + int(apart.sum()), float(prompt[new].sum())
            if log.setup.swap == "recompute":
                sizes = [s["size"] for s in swaps if e["t"] <= s["t"] < end(e)]
                refills, prefill = refills + len(sizes), prefill + sum(sizes) * rebuilt(groups)
            slots, beside = log.setup.slots, overlap(log.events["train"], e["t"], end(e))
            decode = [e["steps"], e["steps"] * slots, e["context"] * slots, e["slot_steps"]]
            refill = [int(new.sum()) * size, refills, prefill]
            rest = e["seconds"] - e["decode"] - overlap(verdicts, e["t"], end(e))
            rows.append((beside / e["seconds"], e["decode"], decode, rest, refill))
    return rows


def rebuilt(groups: list[dict]) -> float:
    """Tokens of an episode that a swap computes again: at a moment at which it runs, on average."""
    prompt, length = np.array([[g["size"], n - g["size"]] for g in groups for n in g["lengths"]]).T
    return float(length @ (prompt + length / 2) / length.sum())


def train_rows(log: Log) -> list[tuple]:
    """For each step but the first, which warms up: seconds, and how much of each of `TRAIN`."""
    rows, every = [], log.setup.reference_every
    verdicts = np.array([end(e) for e in log.events["score"]])
    for event, row in zip(log.events["train"][1:], log.rows[1:], strict=True):
        tokens = row["sequence_tokens"]
        reference = tokens if every and row["step"] % every == 0 else 0
        arrived = ((verdicts > event["t"]) & (verdicts < end(event))).sum()
        rows.append((event["seconds"], [1, row["micro_batches"], tokens, reference, arrived]))
    return rows


def pauses_of(log: Log, groups: list[dict]) -> Iterator[tuple[str, float]]:
    """(name of a cost, seconds) for everything that is neither generation nor a step."""
    verdicts = np.array([g["verdict"] for g in groups])
    done = {g["group"]: g["verdict"] for g in groups}
    steps = list(zip(log.events["train"], log.events["publish"], log.rows, strict=True))
    after = float(np.mean([row["t"] - end(p) for _, p, row in steps if "eval" not in row] or 0.0))
    yield "after", after
    for g in groups:
        yield "score", g["seconds"]
        yield "delivery", g["asked"] - g["end"]
    for _, published, row in steps:
        yield "publish", published["seconds"]
        if "eval" in row:
            yield "evaluation", max(0.0, row["t"] - end(published) - after)
    waited, taken = 0.0, 0
    for (before, _, row), (event, _, _) in zip(steps, steps[1:], strict=False):
        last = max(done[i] for i in event["groups"])
        waited += event["t"] - max(last, row["t"])
        # while the learner waited it had nothing to take in but the last group
        late = last > row["t"]
        taken += 1 if late else ((verdicts > before["t"]) & (verdicts < event["t"])).sum()
    yield "handle", waited / taken
