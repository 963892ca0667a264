"""runtime/runlog.py: the run folder, and what a person and the disk get to see while a run goes on.

    config.json      every setting, and the machine
    metrics.jsonl    one line a step
    events.jsonl     one line an event: who did what, when, with which policy version
    samples.jsonl    some episodes as text

Left out: what is said when a run ends (bench.py), and checkpoints (checkpoint.py).
"""

import contextlib
import dataclasses
import json
import os
import signal
import time
from collections import Counter
from pathlib import Path

from tqdm import tqdm

from runtime.config import Config, UserError
from runtime.devices import describe_machine


def open_run(config: Config, mode: str) -> Path:
    """Create the run folder, or reopen the one to resume; raises UserError, overwrites nothing.

    mode: "sync" or "async".
    """
    name = f"{Path(config.task.split(':')[0]).stem}-{mode}-{time.strftime('%m%d-%H%M%S')}"
    run = Path(config.resume or config.out or f"runs/{name}")
    if not config.resume:
        new_folder(run)
        record = {"mode": mode, **dataclasses.asdict(config), "machine": describe_machine()}
    else:
        record = read_json(run / "config.json") | {"steps": config.steps}
        if record["mode"] != mode:
            raise UserError(f"--resume {run}: must be a run of train_{mode}.py")
    replace_text(run / "config.json", json.dumps(record, indent=1))
    return run


def new_folder(run: Path) -> None:
    """Make an empty run folder; raises UserError where something is already there."""
    try:
        run.mkdir(parents=True, exist_ok=True)
        if any(run.iterdir()):
            raise UserError(f"--out {run}: must be new or an empty folder")
        for name in ("checkpoints", "logs"):
            (run / name).mkdir()
    except OSError as error:
        raise UserError(f"--out {run}: must be writable ({error.strerror})") from error


def read_json(path: Path) -> dict:
    return json.loads(path.read_text())


def replace_text(path: Path, text: str) -> None:
    """Write a file in one move: whoever is killed here leaves the old text or the new one."""
    partial = path.with_suffix(".partial")
    partial.write_text(text)
    partial.replace(path)


def to_lines(records: list[dict]) -> str:
    """Records as JSON lines."""
    return "".join([json.dumps(record) + "\n" for record in records])


def append_lines(path: Path, records: list[dict]) -> None:
    """Append records as JSON lines: all of them, or none when the disk is full (OSError)."""
    size = path.stat().st_size if path.exists() else 0
    try:
        with path.open("a") as file:
            file.write(to_lines(records))
    except OSError as error:
        os.truncate(path, size)
        error.filename = str(path)
        raise


def read_lines(path: Path) -> list[dict]:
    """The records of a JSON-lines file, [] when it does not exist."""
    return [json.loads(s) for s in path.read_text().splitlines()] if path.is_file() else []


def cut_logs(run: Path, version: int, groups: list[int]) -> float:
    """Cut both logs behind the checkpoint with which a run goes on: what came later is done again.

    A checkpoint is known by its version and by the groups in flight: a run that is stopped twice at
    one version has two. Its event is on disk before its file is, so it is in the log, and a line
    that `kill -9` has torn comes later. Returns the seconds of the last metrics; raises UserError.
    """
    lines = (run / "events.jsonl").read_text().splitlines(keepends=True)
    event = {"kind": "checkpoint", "version": version, "groups": groups}
    end = json.dumps(event).removeprefix("{") + "\n"
    while lines and not lines[-1].endswith(end):
        lines.pop()
    if not lines:
        text = f"must have the event of the checkpoint at {version} steps in its events.jsonl"
        raise UserError(f"--resume {run}: {text}")
    rows = [row for row in read_lines(run / "metrics.jsonl") if row["step"] <= version]
    replace_text(run / "events.jsonl", "".join(lines))
    replace_text(run / "metrics.jsonl", to_lines(rows))
    return max([row["t"] for row in rows])


class Stop:
    """Ctrl-C sets a flag that the loops look at; a second one ends the process at once."""

    def __init__(self):
        self.asked = False
        signal.signal(signal.SIGINT, self)
        signal.signal(signal.SIGTERM, self)

    def __call__(self, number, frame):
        if self.asked:
            raise KeyboardInterrupt
        self.asked = True


class RunLog:
    """A progress bar for a person; metrics and events, as JSON lines, for the disk."""

    def __init__(self, run: Path, steps: int, done: int = 0, seconds: float = 0.0):
        """done, seconds: steps and time of a run that is resumed."""
        self.run = run
        self.start = time.monotonic() - seconds
        self.bar = tqdm(total=steps, initial=done, unit="step", dynamic_ncols=True)
        self.events = []  # not on disk yet
        self.shown = {}  # beside the bar
        self.seconds = Counter()  # of all spans, by kind
        self.failure = ""  # what the first failed episode died of
        self.kept = []  # (seconds, version, weights) of evaluations that are to come

    def now(self) -> float:
        """Seconds since the run began."""
        return time.monotonic() - self.start

    @contextlib.contextmanager
    def timed(self, process: str, kind: str, **details):
        """Note what lasts as long as its block; the block may add to the details."""
        begin = time.monotonic()
        yield details
        seconds = time.monotonic() - begin
        self.seconds[kind] += seconds
        self.event(process, kind, begin, seconds=seconds, **details)

    def event(self, process: str, kind: str, at: float | None = None, **details) -> None:
        """Note one event; `at` is on the monotonic clock, in the log it is seconds of the run."""
        seconds = (at or time.monotonic()) - self.start
        self.events.append({"t": round(seconds, 6), "process": process, "kind": kind, **details})

    def step(self, record: dict, **shown) -> None:
        """One step is done: write its metrics and everything that happened, move the bar."""
        append_lines(self.run / "metrics.jsonl", [{"t": round(self.now(), 3), **record}])
        self.flush()
        self.shown |= shown
        self.bar.set_postfix(self.shown, refresh=False)
        self.bar.update()

    def say(self, text: str) -> None:
        """Print above the progress bar."""
        self.bar.write(text)

    def flush(self) -> None:
        """Write the events so far."""
        append_lines(self.run / "events.jsonl", self.events)
        self.events = []

    def close(self) -> float:
        """Write what is left; returns the seconds since the run began."""
        self.flush()
        self.bar.close()
        return self.now()
