"""runtime/runlog.py: what a person and the disk get to see while a run goes on.

    config.json      every setting, the machine
    metrics.jsonl    one line a step
    events.jsonl     one line an event: who did what, when, with which policy version
    samples.jsonl    some episodes as text

Left out: how a run ends (run.py), checkpoints (checkpoint.py), how files are
written (folder.py).
"""

import os
import signal
import time
from contextlib import contextmanager, suppress
from dataclasses import asdict, fields
from pathlib import Path

from tqdm import tqdm

from runtime.config import Config, blame, check, require
from runtime.devices import describe_machine
from runtime.folder import Log, own_folder, read_json, refuse_links, sync_folder, write_json
from runtime.terminal import printable

LOGS = ("metrics", "events", "samples")


def new_folder(config: Config, mode: str) -> Path:
    """Make a run folder and lock it; UserError where something is already there.

    mode: "sync" or "async".
    """
    name = f"{Path(config.task.split(':')[0]).stem}-{mode}-{time.strftime('%m%d-%H%M%S')}"
    run = Path(config.out or f"runs/{name}")
    with blame(f"--out {run}: must be writable", OSError):
        run.mkdir(parents=True, exist_ok=True)
        require(not any(run.iterdir()), f"--out {run}: must be new or an empty folder")
        own_folder(run)
    return run


def stored_config(run: Path, flag: str) -> tuple[Config, str]:
    """The configuration and the mode of a run folder; UserError."""
    refuse_links(run)
    with blame(f"{flag} {run}: must be a run folder with a sound config.json"):
        stored = read_json(run / "config.json")
        values = {f.name: stored.get(f.name, f.default) for f in fields(Config)}
        return check(Config(**values)), stored["mode"]


def write_config(run: Path, config: Config, mode: str) -> None:
    """Every setting, the machine; and the folders for what follows."""
    for name in ("checkpoints", "logs"):
        (run / name).mkdir(exist_ok=True)
    facts = {"mode": mode, "machine": describe_machine()}
    write_json(run / "config.json", asdict(config) | facts)


STOPPING = b"\nstopping: a checkpoint comes first (once more: at once, without one)\n"
ENDED = b"\nended at once: steps behind the last checkpoint are lost\n"


class Stop:
    """Ctrl-C, or another signal that ends processes, sets a number that the loops look at; a second
    one ends the process at once, as `kill -9` would. Terminals that close may say so twice."""

    def __init__(self):
        self.asked = 0
        for name in "INT TERM HUP QUIT".split():
            number = signal.Signals[f"SIG{name}"]
            if signal.getsignal(number) is not signal.SIG_IGN:  # nohup wants no SIGHUP
                signal.signal(number, self)

    def __call__(self, number, frame):
        if number == signal.SIGHUP and self.asked:
            return
        with suppress(OSError):  # nobody may be there to read it
            os.write(2, ENDED if self.asked else STOPPING)
        if self.asked:
            os._exit(128 + number)
        self.asked = number


class RunLog:
    """A progress bar for a person; metrics and events, as JSON lines, for the disk."""

    def __init__(self, run: Path, config: Config, state: dict | None):
        """state: the checkpoint of a run that is resumed; what the logs hold behind it is cut."""
        done = state or {"version": 0, "seconds": 0.0, "marks": {}}
        # the newest step with metrics
        self.run, self.written = run, done["version"] if state else -1
        self.logs = {n: Log(run / f"{n}.jsonl", *done["marks"].get(n, ())) for n in LOGS}
        self.start = time.time() - done["seconds"]
        self.bar = tqdm(
            total=config.steps, initial=done["version"], unit="step", dynamic_ncols=True
        )
        self.events = []  # not on disk yet
        self.failure = ""  # what the first failed episode died of
        self.kept = []  # (seconds, version, weights) of evaluations that are to come

    def now(self) -> float:
        """Seconds since the run began."""
        return round(time.time() - self.start, 3)

    @contextmanager
    def timed(self, process: str, kind: str, **details):
        """Note what lasts as long as its block; the block may add to the details."""
        begin = time.time()
        yield details
        self.event(process, kind, begin, seconds=time.time() - begin, **details)

    def event(self, process: str, kind: str, at: float | None = None, **details) -> None:
        """Note one event; `at` is on the wall clock, in the log it is seconds of the run."""
        seconds = (at or time.time()) - self.start
        self.events.append({"t": round(seconds, 6), "process": process, "kind": kind, **details})

    def take(self, process: str, events: list) -> None:
        """Note what a generator has seen: (time, kind, group or -1, version, details) each."""
        for at, kind, group_id, version, details in events:
            self.event(process, kind, at, **details, group=group_id, version=version)

    def step(self, record: dict) -> None:
        """One step is done: write its metrics and everything that happened, move the bar."""
        self.metrics(record)
        self.written = record["step"]
        self.flush()
        shown = f"reward {record['reward']:.2f}, staleness {record['staleness_mean']:.1f}"
        self.bar.set_postfix_str(shown, refresh=False)
        self.bar.update()

    def metrics(self, record: dict) -> None:
        """Write a line of metrics, as of now or of the record's own `t`."""
        self.logs["metrics"].append([{"t": self.now(), **record}])

    def say(self, text: str) -> None:
        """Print above the progress bar."""
        self.bar.write(printable(text))

    def flush(self) -> None:
        """Write the events so far."""
        self.logs["events"].append(self.events)
        self.events = []

    def sync(self) -> dict:
        """Put all logs on disk; returns how far each of them goes, for a checkpoint."""
        self.flush()
        marks = {name: log.sync() for name, log in self.logs.items()}
        sync_folder(self.run)
        return marks

    def close(self) -> float:
        """The loop is over: nothing is drawn below it; returns the seconds since the run began."""
        self.bar.close()
        return self.now()
