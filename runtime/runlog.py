"""runtime/runlog.py."""

import dataclasses
import json
import signal
import time
from pathlib import Path

from tqdm import tqdm

from runtime.config import Config, UserError
from runtime.devices import describe_machine


def open_run(config: Config, mode: str) -> Path:
    """Create the run folder, or reopen the one to resume; raises UserError, overwrites nothing."""
    name = f"runs/{config.task.split(':')[0]}-{mode}-{time.strftime('%m%d-%H%M%S')}"
    folder = Path(config.resume or config.out or name)
    if config.resume:
        record = json.loads((folder / "config.json").read_text())
        if record["mode"] != mode:
            raise UserError(f"--resume {folder}: must be a run of train_{mode}.py")
        (folder / "config.json").write_text(json.dumps(record | {"steps": config.steps}, indent=1))
        return folder
    try:
        if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
            raise UserError(f"--out {folder}: must be new or an empty folder")
        (folder / "checkpoints").mkdir(parents=True, exist_ok=True)
        (folder / "logs").mkdir(exist_ok=True)
    except OSError as error:
        raise UserError(f"--out {folder}: must be writable ({error.strerror})") from error
    record = {"mode": mode, **dataclasses.asdict(config), "machine": describe_machine()}
    (folder / "config.json").write_text(json.dumps(record, indent=1))
    return folder


def append_lines(path: Path, records: list[dict]) -> None:
    """Append records as JSON lines: all of them, or none when the disk is full (OSError)."""
    with path.open("ab", buffering=0) as file:
        size, data = file.tell(), "".join(json.dumps(record) + "\n" for record in records).encode()
        try:
            while data:
                data = data[file.write(data) :]
        except OSError as error:
            file.truncate(size)
            raise OSError(error.errno, error.strerror, str(path)) from error


def read_lines(path: Path) -> list[dict]:
    """The records of a JSON-lines file, [] when it does not exist."""
    return [json.loads(s) for s in path.read_text().splitlines()] if path.is_file() else []


def forget_after(path: Path, version: int) -> float:
    """Drop the metrics of steps that will be done again; returns the seconds of the last one."""
    rows = [row for row in read_lines(path) if row["step"] <= version]
    partial = path.with_suffix(".partial")
    partial.unlink(missing_ok=True)
    append_lines(partial, rows)
    partial.replace(path)
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
    """What a person and the disk get to see of a run: a progress bar, and JSON lines."""

    def __init__(self, run: Path, steps: int, done: int = 0, seconds: float = 0.0):
        self.run, self.start = run, time.monotonic() - seconds
        self.bar = tqdm(total=steps, initial=done, unit="step", dynamic_ncols=True, smoothing=0.05)
        self.events, self.shown = [], {}
        self.kept: list[tuple] = []  # (seconds, version, weights) of evaluations that are to come

    def span(self, process: str, kind: str, begin: float, **details) -> float:
        """Note what lasted from `begin` until now; returns its seconds."""
        seconds = time.monotonic() - begin
        self.event(process, kind, begin, seconds=seconds, **details)
        return seconds

    def event(self, process: str, kind: str, at: float | None = None, **details) -> None:
        """Note one event; times are seconds since the run began."""
        at = (at or time.monotonic()) - self.start
        self.events.append({"t": round(at, 6), "process": process, "kind": kind, **details})

    def step(self, record: dict, **shown) -> None:
        """One step is done: write its metrics and everything that happened, move the bar."""
        self.shown |= shown
        record = {"t": round(time.monotonic() - self.start, 3), **record}
        append_lines(self.run / "metrics.jsonl", [record])
        self.flush()
        self.bar.set_postfix(self.shown, refresh=False)
        self.bar.update()

    def say(self, text: str) -> None:
        """Print above the progress bar."""
        self.bar.write(text)

    def flush(self) -> None:
        append_lines(self.run / "events.jsonl", self.events)
        self.events = []

    def close(self) -> float:
        """Write what is left; returns the seconds since the run began."""
        self.flush()
        self.bar.close()
        return time.monotonic() - self.start
