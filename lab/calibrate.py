"""Costs of the simulated pipeline (pipeline.py), found in the event logs of real runs.

Least squares explain, over many spans of generation and many optimizer steps:

    decoding  by the decode steps, slots, context and busy slots of a span
    refills   the rest of the span, by the episodes and prompts that began in it
    training  by the micro-batches and tokens of a step, and by what arrived meanwhile

Everything else is a mean: verification, delivery, publication, what lies between two steps. The
groups of the logs are what a simulation draws the lengths of its episodes from.

Calibrate on runs of one task with one rollout worker. They should differ in slots and in groups a
step; one should have eta = 0, and one be of train_sync.py: what does not vary cannot be told apart.
Left out: first spans and first steps, which warm up, and processes that share a core.
"""

from collections import defaultdict
from dataclasses import replace
from itertools import pairwise
from math import ceil
from operator import itemgetter
from pathlib import Path

import numpy as np

from lab.pipeline import Costs, Pipeline, PipelineLog, end
from lab.plots import column, steps_of
from runtime.folder import read_lines
from runtime.runlog import stored_config

DECODE = ("step", "step_slot", "step_context", "step_running")

REFILL = ("episode", "refill", "prefill")

TRAIN = ("train", "micro_batch", "train_token", "reference_token", "listen")

KEEP = 500  # groups of a task: enough to draw from


def read_run(folder: Path) -> PipelineLog:
    """The log in a run folder."""
    config, stored = stored_config(folder, "--out")
    rows = steps_of(folder)
    events = defaultdict(list)
    for event in read_lines(folder / "events.jsonl"):
        events[event["kind"]].append(event)
    synchronous = stored["mode"] == "sync"
    if synchronous:  # the trainer itself verifies, too
        config = replace(config, max_staleness=0, reward_workers=0)
    return PipelineLog(config, synchronous, events, rows)


def fit(rows: list[tuple[list, float]]) -> list[float]:
    """Seconds (>= 0) for one unit of each amount, which best explain rows of (amounts, seconds).

    Amounts are scaled to one size, so that what the runs cannot tell apart (slots, if all runs have
    the same number) gets equal shares. An amount whose seconds come out negative is left out.
    """
    amounts, seconds = (np.array(part, float) for part in zip(*rows, strict=True))
    scale = np.sqrt((amounts**2).mean(0))
    scale[scale == 0] = 1.0
    used = amounts.any(0)
    while True:
        # What is not used is zero everywhere: least squares of the smallest norm give it nothing.
        found = np.linalg.lstsq(amounts * used / scale, seconds, rcond=0.02)[0]
        if (found >= 0).all():
            return (found / scale).tolist()
        used &= found > 0


def calibrate(logs: list[PipelineLog]) -> Costs:
    """The costs that explain these logs of one task.

    Logs of synchronous runs tell how long a step is when nothing arrives, and how much quicker (or
    slower) generation is in the learner's process; everything else is read from the others.
    """
    others = [log for log in logs if not log.synchronous]
    pauses = [pauses_of(log) for log in others]
    found = {name: float(np.mean(sum(column(pauses, name), []))) for name in pauses[0]}
    found |= zip(DECODE, fit(sum(map(decode_rows, others), [])), strict=True)
    found |= zip(REFILL, fit(sum(map(refill_rows, others), [])), strict=True)
    found |= zip(TRAIN, fit(sum(map(train_rows, logs), [])), strict=True)
    found["all_reduce"] = 2 * found["publish"]  # assumed: gradients come in and go out
    groups = sorted(sum(map(groups_of, others), []), key=itemgetter(0))
    costs = Costs(groups=groups[:: ceil(len(groups) / KEEP)], **found)
    ratios = []
    for log in logs:
        if log.synchronous:
            simulated = Pipeline(log.config, costs, synchronous=True).run()
            ratios.append(token_seconds(log) / token_seconds(simulated))
    return replace(costs, alone=float(np.mean(ratios)))


def token_seconds(log):
    """Seconds of generation for each token."""
    spans = log.events["generate"][1:]
    return sum(column(spans, "seconds")) / sum(column(spans, "slot_steps"))


def groups_of(log):
    """`Costs.groups` of one run."""
    start = {e["group"]: [e["version"], e["size"]] for e in log.events["start"]}
    return [start[e["group"]] + e["lengths"] for e in log.events["score"]]


def decode_rows(log):
    """(amounts of `DECODE`, seconds) of each span but the first."""
    slots, rows = log.config.slots, []
    for e in log.events["generate"][1:]:
        amounts = [e["steps"], e["steps"] * slots, e["context"] * slots, e["slot_steps"]]
        rows.append((amounts, e["decode"]))
    return rows


def refill_rows(log):
    """(amounts of `REFILL`, seconds) of each span but the first."""
    rows = []
    for e in log.events["generate"][1:]:
        new = [start for start in log.events["start"] if e["t"] <= start["t"] < end(e)]
        # Groups that begin at one token boundary share a forward pass.
        gaps = np.diff(sorted(column(new, "t")), prepend=-np.inf)
        passes = int((gaps > 0.5 * e["seconds"] / e["steps"]).sum())
        amounts = [len(new) * log.config.group_size, passes, sum(column(new, "size"))]
        rows.append((amounts, e["seconds"] - e["decode"]))
    return rows


def train_rows(log):
    """(amounts of `TRAIN`, seconds) of each step but the first."""
    rows = []
    every = log.config.reference_every
    for event, row in zip(log.events["train"][1:], log.rows[1:], strict=True):
        tokens = row["sequence_tokens"]
        reference = tokens if every and row["step"] % every == 0 else 0
        arrived = verified(log, event["t"], end(event))
        rows.append(([1, row["micro_batches"], tokens, reference, arrived], event["seconds"]))
    return rows


def verified(log, begin, stop):
    """How many groups were verified between two moments."""
    return sum(begin < end(e) < stop for e in log.events["score"])


def pauses_of(log):
    """{name of a cost: seconds, each time} of what is neither generation nor an optimizer step."""
    scored, published = log.events["score"], log.events["publish"]
    finish = {e["group"]: e["t"] for e in log.events["finish"]}
    ended = zip(published, log.rows, strict=True)
    return {
        "score": column(scored, "seconds"),
        "delivery": [e["t"] - finish[e["group"]] for e in scored],
        "publish": column(published, "seconds"),
        "after": [row["t"] - end(e) for e, row in ended if "eval" not in row],
        "handle": [handle_seconds(log)],
    }


def handle_seconds(log):
    """Seconds in which the learner takes in a group: it does so before it begins the next step."""
    verdict = {e["group"]: end(e) for e in log.events["score"]}
    waited, taken = 0.0, 0
    for row, (before, event) in zip(log.rows, pairwise(log.events["train"]), strict=False):
        last = max(verdict[group] for group in event["groups"])
        waited += event["t"] - max(last, row["t"])
        # A learner that waited for the last group had taken in the others.
        taken += 1 if last > row["t"] else verified(log, before["t"], event["t"])
    return waited / taken
