"""runtime/runlog.py: the run folder, and what a person and the disk get to see while a run goes on.

    config.json      every setting, and the machine
    metrics.jsonl    one line a step
    events.jsonl     one line an event: who did what, when, with which policy version
    samples.jsonl    some episodes as text

Left out: what is written when a run ends (report.py), and checkpoints (checkpoint.py).
"""

import contextlib
import dataclasses
import json
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
    if config.resume:
        run = Path(config.resume)
        record = read_json(run / "config.json")
        if record["mode"] != mode:
            raise UserError(f"--resume {run}: must be a run of train_{mode}.py")
        record["steps"] = config.steps
    else:
        task = Path(config.task.split(":")[0]).stem
        run = Path(config.out or f"runs/{task}-{mode}-{time.strftime('%m%d-%H%M%S')}")
        new_folder(run)
        record = {"mode": mode, **dataclasses.asdict(config), "machine": describe_machine()}
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
    data = to_lines(records).encode()
    with path.open("ab", buffering=0) as file:
        size = file.tell()
        try:
            while data:
                data = data[file.write(data) :]
        except OSError as error:
            file.truncate(size)
            raise OSError(error.errno, error.strerror, str(path)) from error


def read_lines(path: Path) -> list[dict]:
    """The records of a JSON-lines file, [] when it does not exist."""
    return [json.loads(s) for s in path.read_text().splitlines()] if path.is_file() else []


def forget_metrics(path: Path, version: int) -> float:
    """Drop the metrics of steps that will be done again; returns the seconds of the last one."""
    rows = [row for row in read_lines(path) if row["step"] <= version]
    replace_text(path, to_lines(rows))
    return max(row["t"] for row in rows)


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
