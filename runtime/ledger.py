"""ledger.py: the event log of a run, and the books that show that nothing was lost.

    python ledger.py runs/NAME       # a table, or the first event that does not fit and exit code 1

`events.jsonl` has one line an event: `t` (seconds since the run began), `process`, `kind`, and what
belongs to it (`group`, `version`, `worker`, `reason`, ...). Lines stand in the order in which the
learner's process took note of them; `t` says when they happened. `Ledger` reads them one after the
other and follows every group through its life:

    admitted -> started -> finished -> scored -> trained, or discarded for a reason
    any of the first four -> lost (its worker died, or the run was interrupted) -> admitted again

Conservation: admitted = trained + discarded + in flight, after every event. The log says what must
be where; the trainer's own books (buffer.py, train_async.py) say what is where; `balance` compares
the two. Left out: how events come about, and what a token means.
"""

import json
import sys
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path

# kind of event -> the states in which it may find a group, and the one in which it leaves it
ALIVE = ("admitted", "started", "finished", "scored")


MOVES = {
    "admit": (("unknown",), "admitted"),
    "start": (("admitted",), "started"),
    "finish": (("started",), "finished"),
    "score": (("finished",), "scored"),
    "train": (("scored",), "trained"),
    "discard": (ALIVE, "discarded"),
    "lost": (ALIVE, "lost"),
    "requeue": (("lost",), "admitted"),
}


# state of a group in flight -> where the trainer must have it
WORKER, BUFFER, AGAIN = "with a worker", "in the buffer", "to be issued again"


PLACES = {"admitted": WORKER, "started": WORKER, "finished": WORKER}


PLACES |= {"scored": BUFFER, "lost": AGAIN}


@dataclass
class Ledger:
    """What the events so far say about every group."""

    states: dict[int, str] = field(default_factory=dict)  # of every group that was admitted
    flying: set[int] = field(default_factory=set)  # those neither trained nor discarded
    counts: Counter = field(default_factory=Counter)  # groups by what happened to them
    reasons: Counter = field(default_factory=Counter)  # discarded groups, by reason
    steps: int = 0

    def note(self, event: dict) -> None:
        """Take one event; AssertionError, naming the group, when it cannot follow the others."""
        kind = event["kind"]
        if kind not in MOVES:
            return
        before, after = MOVES[kind]
        for group in event.get("groups", [event["group"]] if "group" in event else []):
            state = self.states.get(group, "unknown")
            assert state in before, f"group {group}: {kind} finds it {state}, not {before[-1]}"
            self.states[group] = after
            self.counts[kind] += 1
            if after in PLACES:
                self.flying.add(group)
            else:
                self.flying.remove(group)
        if kind == "discard":
            self.reasons[event["reason"]] += 1
        if kind == "train":
            version, due, self.steps = event["version"], self.steps, self.steps + 1
            assert version == due, f"step {version} is trained where {due} is due"

    def balance(self, places: dict[int, str]) -> None:
        """Compare with the trainer's books, group -> place; AssertionError names a group."""
        counts, gone = self.counts, self.counts["train"] + self.counts["discard"]
        assert counts["admit"] == gone + len(self.flying), self.totals()
        for group in sorted(self.flying | places.keys()):
            state, place = self.states.get(group, "unknown"), places.get(group, "nowhere")
            must = PLACES.get(state, "nowhere")
            assert place == must, (
                f"group {group}: {state} in the event log, so {must}; the trainer has it {place}"
            )

    def totals(self) -> dict:
        """Counts of groups, for summary.json."""
        names = {"admitted": "admit", "trained": "train", "lost": "lost", "requeued": "requeue"}
        named = {name: self.counts[kind] for name, kind in names.items()}
        return {**named, "discarded": dict(self.reasons), "in_flight": len(self.flying)}


def table(totals: dict) -> str:
    """Two lines: what became of every group that was admitted."""
    cells = {"groups admitted": totals["admitted"], "= trained": totals["trained"]}
    cells |= {f"+ {reason}": count for reason, count in totals["discarded"].items()}
    cells["+ in flight"] = totals["in_flight"]
    cells["lost and issued again"] = totals["requeued"]
    head = "   ".join(cells)
    return head + "\n" + "   ".join(f"{n:{len(name)},}" for name, n in cells.items())


def read_log(path: Path, use: Callable[[dict], None]) -> int:
    """Give every event of a log to `use`; ValueError names the line at which that fails. Returns
    the number of lines."""
    number = 0
    with path.open() as file:
        for number, line in enumerate(file, start=1):
            try:
                use(json.loads(line))
            except (AssertionError, ValueError, KeyError) as error:
                raise ValueError(f"{path}, line {number}: {error!s}\n  {line.strip()}") from error
    return number


def forget_events(path: Path, version: int, groups: list[int]) -> None:
    """Cut a log after the checkpoint with which a run goes on: what came later is done again.

    A checkpoint is known by its version and by the groups that were in flight: a run that is
    stopped twice at one version has two. Its event is on disk before its file is, so it is there; a
    line that `kill -9` has torn can only come later.
    """
    lines = path.read_text().splitlines()
    for last in reversed(range(len(lines))):
        if '"checkpoint"' in lines[last]:
            event = json.loads(lines[last])
            if (event["version"], event["groups"]) == (version, groups):
                break
    else:
        raise ValueError(f"{path.name} must hold the event of the checkpoint at {version} steps")
    partial = path.with_suffix(".partial")
    partial.write_text("\n".join(lines[: last + 1]) + "\n")
    partial.replace(path)


def audit(run: Path) -> tuple[int, Ledger]:
    """Check the log of a run folder again: number of events, and the books; ValueError says which
    event does not fit."""
    ledger = Ledger()

    def check(event: dict) -> None:
        ledger.note(event)
        here = len(ledger.flying)
        there = event.get("in_flight", here)  # with every step: what the trainer counted
        assert here == there, f"{here} groups are in flight by the log, {there} by the trainer"

    number = read_log(run / "events.jsonl", check)
    summary = run / "summary.json"
    told = json.loads(summary.read_text()) if summary.is_file() else {"steps": -1}
    if told["steps"] >= ledger.steps:  # otherwise the run was resumed, and has not ended since
        totals = {"steps": ledger.steps, **ledger.totals()}
        for name, value in {"steps": told["steps"], **told.get("ledger", {})}.items():
            if totals[name] != value:
                raise ValueError(f"the log ends with {totals[name]} {name}, summary.json: {value}")
    return number, ledger


def script(run: Path) -> tuple[list[dict], dict[int, dict]]:
    """What a replay has to do: the steps in order, and for every group its verdict, with the worker
    that sampled it and its place in the order of issue. Every event knows its `line`."""
    steps, issued, scores = [], {}, {}

    def use(event: dict) -> None:
        event["line"] = next(lines)
        if event["kind"] in ("admit", "requeue"):
            issued[event["group"]] = event  # the last time counts
        elif event["kind"] == "score":
            order = issued[event["group"]]
            scores[event["group"]] = event | {"worker": order["worker"], "issued": order["line"]}
        elif event["kind"] == "train":
            steps.append(event)

    lines = count(1)
    read_log(run / "events.jsonl", use)
    return steps, scores


if __name__ == "__main__":
    try:
        lines, books = audit(Path(sys.argv[1] if len(sys.argv) > 1 else "."))
    except (OSError, ValueError) as problem:
        sys.exit(f"ledger.py: {problem}")
    print(f"{table(books.totals())}\n{lines:,} events in {books.steps:,} steps: every one fits")
