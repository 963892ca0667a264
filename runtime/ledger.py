"""runtime/ledger.py: the books of a run, which show that no group of answers was lost or doubled.

    python -m runtime.ledger runs/NAME     # the sums; or the first event that cannot be, exit 1

`events.jsonl` has one line an event: `t` (seconds since the run began), `process`, `kind`, and what
belongs to it (`group`, `version`, `worker`, `reason`, ...). `Ledger` reads the events one after the
other, and follows every group through its life:

    with a worker -> in the buffer -> trained, or discarded for a reason
    from the first two also -> with another one: its worker died, or the run was interrupted

Conservation: admitted = trained + discarded + in flight, after every event.
The log says where each group must be, the trainer's data say where it is: `balance` compares them.
Left out: who writes the events (train_async.py).
"""

import sys
from collections import Counter
from pathlib import Path

from runtime.config import UserError, blame, require
from runtime.folder import read_json, refuse_links, scan
from runtime.terminal import fail

WORKER, BUFFER = "with a worker", "in the buffer"
# kind of event -> the states in which it may find a group, and the state in which it leaves it
MOVES = {
    "admit": (("unknown",), WORKER),
    "score": ((WORKER,), BUFFER),
    "train": ((BUFFER,), "trained"),
    "discard": ((WORKER, BUFFER), "discarded"),
    "requeue": ((WORKER, BUFFER), WORKER),  # from the buffer only when a run is resumed
}


class Ledger:
    """What the events so far say about every group."""

    def __init__(self):
        self.events = 0
        self.states = {}  # group id -> state, of every group ever admitted
        self.flying = set()  # the ids of those neither trained nor discarded
        self.counts = Counter()  # kind of event -> groups it happened to
        self.reasons = Counter()  # reason -> groups discarded for it
        self.steps = 0

    def note(self, event: dict) -> None:
        """Take one event; ValueError, naming the group, when it cannot follow the others."""
        self.events += 1
        kind = event["kind"]
        if kind not in MOVES:
            return
        allowed, after = MOVES[kind]
        for group in event["groups"] if kind == "train" else [event["group"]]:
            before = self.states.get(group, "unknown")
            if before not in allowed:
                raise ValueError(f"group {group}: {kind} finds it {before}, not {allowed[-1]}")
            self.states[group] = after
            self.counts[kind] += 1
            if after in (WORKER, BUFFER):
                self.flying.add(group)
            else:
                self.flying.remove(group)
        if kind == "discard":
            self.reasons[event["reason"]] += 1
        if kind == "train":
            if event["version"] != self.steps:
                raise ValueError(f"step {event['version']} is trained where {self.steps} is due")
            self.steps += 1

    def balance(self, places: dict[int, str]) -> None:
        """Compare with the trainer's data (group id -> WORKER or BUFFER); ValueError names one."""
        for group in sorted(self.flying | places.keys()):
            state, place = self.states.get(group, "unknown"), places.get(group, "nowhere")
            if place != state:
                raise ValueError(
                    f"group {group}: {state} by the event log; the trainer has it {place}"
                )

    def totals(self) -> dict:
        """Counts of groups, for summary.json."""
        return {
            "admitted": self.counts["admit"],
            "trained": self.counts["train"],
            "requeued": self.counts["requeue"],
            "discarded": dict(self.reasons),
            "in_flight": len(self.flying),
        }


def table(totals: dict) -> str:
    """One line: what became of every group that was admitted."""
    ends = {"trained": totals["trained"], **totals["discarded"], "in flight": totals["in_flight"]}
    numbers = " + ".join(f"{count:,} {name}" for name, count in ends.items())
    again = f"issued again {totals['requeued']:,} times"
    return f"{totals['admitted']:,} groups admitted = {numbers}; {again}"


def read_books(path: Path, mark: tuple[int, int] | None = None) -> Ledger:
    """The books by the events in a log (as far as a mark); UserError names the first line that was
    changed, or whose event cannot be."""
    ledger = Ledger()
    for event in scan(path, mark):
        with blame(f"{path}, line {ledger.events + 1}: must follow from those before"):
            ledger.note(event)
    return ledger


def audit(run: Path) -> Ledger:
    """The books by the log of a run folder, from its first line to its last, checked against its
    summary; UserError says what cannot be."""
    refuse_links(run)
    mode = read_json(run / "config.json").get("mode")
    require(mode == "async", f"{run}: must be a run of train_async.py")
    ledger = read_books(run / "events.jsonl")
    if (run / "summary.json").is_file():
        summary, sums = read_json(run / "summary.json"), ledger.totals()
        same = (ledger.steps, sums) == (summary.get("steps"), summary.get("ledger"))
        require(same, f"{run}/summary.json: must have {ledger.steps} steps, and {sums}")
    return ledger


if __name__ == "__main__":
    folder = Path(sys.argv[-1])
    if not folder.is_dir():
        fail("usage: python -m runtime.ledger RUN, which must be a run folder")
    try:
        books = audit(folder)
    except UserError as problem:
        fail(problem, 1)
    print(table(books.totals()))
    print(f"{books.events:,} events in {books.steps:,} steps: every one fits")
