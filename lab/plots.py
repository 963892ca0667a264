"""plots.py: every picture of runs and measurements, and the files that measurements leave behind.

A measurement writes NAME.json and NAME.png into a folder: `save_result`, `draw_*(..., path)`.
Left out: pictures of one measurement only, which stand beside it.
"""

import json
import re
from collections import defaultdict
from collections.abc import Iterable
from pathlib import Path

import numpy as np

from runtime.config import require, written
from runtime.devices import describe_machine
from runtime.folder import read_json, read_lines
from runtime.pictures import (
    SHADES,
    column,
    draw_panels,
    name_of,
    new_figure,
    save_figure,
    score_curves,
)
from runtime.runlog import stored_config
from runtime.terminal import printable

RESULTS = Path(__file__).parent.parent / "results"


def save_result(folder: Path, name: str, result: dict) -> None:
    """Write a measurement, and of which machine; called after every run, so that Ctrl-C loses only
    the run under way."""
    folder.mkdir(parents=True, exist_ok=True)
    text = json.dumps({"machine": describe_machine()} | result, indent=1) + "\n"
    text = re.sub(r"\[[-+.,\de\s]+\]", lambda row: " ".join(row[0].split()), text)  # numbers
    (folder / f"{name}.json").write_text(text)


def go_on(folder: Path, name: str, begin: dict) -> dict:
    """What a measurement that was cut short has left in its folder, else `begin`."""
    path = folder / f"{name}.json"
    return read_json(path) if path.exists() else begin


def load_result(name: str, folder: Path = RESULTS) -> dict:
    """A recorded measurement."""
    return read_json(folder / f"{name}.json")


def spread(values: list[float]) -> dict:
    """Median and extremes of repeated measurements."""
    median, low, high = np.quantile(values, [0.5, 0, 1]).round(3).tolist()
    return {"median": median, "min": low, "max": high}


def spread_text(found: dict, form: str = ".2f") -> str:
    """A spread as text."""
    return median_text([*found.values()], form)


def between(values: list[float], form: str) -> str:
    """Smallest to largest of some numbers, as text."""
    ends = [format(value, form) for value in (min(values), max(values))]
    return " to ".join(dict.fromkeys(ends))


def median_text(values: list[float], form: str) -> str:
    """Median, lowest and highest, as text."""
    return f"{np.median(values):{form}} ({between(values, form)})"


def markdown(head: list[str], rows: Iterable) -> list[str]:
    """A table as lines of Markdown, its columns aligned for a screen."""
    columns = []
    for cells in zip(head, *rows, strict=True):
        texts = [str(cell) for cell in cells]
        width = max(map(len, texts))
        columns.append([text.ljust(width) for text in (texts[0], "-" * width, *texts[1:])])
    return [f"| {' | '.join(line)} |" for line in zip(*columns, strict=True)]


def print_table(rows: list[dict]) -> None:
    """Print rows with the same keys as a table."""
    cells = []
    for row in rows:
        cells.append([f"{x:.4g}" if isinstance(x, float) else x for x in row.values()])
    print(*markdown(list(rows[0]), cells), sep="\n")


# ------------------------------------------------------------------------------------ one run


def compare(runs: list[str]) -> str:
    """Lay the curves of several runs over each other, step by step, each named by the flags in
    which they differ; returns where the picture is."""
    require(len(runs) > 1, f"compare {' '.join(runs)}: must be given two run folders, or more")
    configs = [vars(stored_config(Path(run), "compare")[0]) for run in runs]
    differ = [name for name in configs[0] if len({config[name] for config in configs}) > 1]
    panels = defaultdict(dict)
    for run, config in zip(runs, configs, strict=True):
        flags = [f"{written(name)} {config[name]}" for name in differ if name != "out"]
        label = printable(", ".join([Path(run).name, *flags]))
        curves = score_curves(read_lines(Path(run) / "metrics.jsonl"))
        for title, (rows, scores) in curves.items():
            panels[title][label] = (None, column(rows, "step"), scores)
    shown = [(own, {"xlabel": "step", "ylabel": title}) for title, own in panels.items()]
    path = Path(runs[-1]) / "compare.png"
    draw_panels(path, "", shown, (8, 3 * len(shown)), columns=1)
    return f"written: {path}"


def draw_both(synchronous: Path, asynchronous: Path, path: Path) -> None:
    """A second in the middle of two runs of a task, one above the other: who works when."""
    figure = new_figure((10, 5.2))
    figure.patch.set_facecolor("white")  # a page may be dark
    for axis, run in zip(figure.subplots(2, sharex=True), (synchronous, asynchronous), strict=True):
        spans = [event for event in read_lines(run / "events.jsonl") if "seconds" in event]
        spans = [event for event in spans if event["kind"] in ROWS]
        trained = [event for event in spans if event["kind"] == "train"]
        left = trained[len(trained) // 2]["t"]
        busy = dict.fromkeys(ROWS, 0.0)
        for event in spans:
            begin, end = event["t"] - left, event["t"] - left + event["seconds"]
            begin, end = max(0.0, begin), min(1.0, end)
            if begin < end:
                busy[event["kind"]] += end - begin
                place, colour = (begin, end - begin), SHADES[event["version"] % 8]
                axis.broken_barh([place], (ROWS[event["kind"]], 0.8), color=colour, ec="white")
        idle = [f"{name}\n(idle {max(0, 1 - busy[kind]):.0%})" for kind, name in NAMES.items()]
        axis.set_yticks([0.4, 1.4], idle, fontsize=15)
        axis.set_title(name_of(run).replace(", ", ": ") + "hronous", fontsize=17, loc="left")
        axis.set(xlim=(0, 1), ylim=(-0.2, 2.7 if run == asynchronous else 2.0))
        axis.tick_params(labelsize=14)
        axis.spines[["top", "right"]].set_visible(False)
    # of the last panel: the change of version that is nearest to the middle
    changes = [e["t"] - left for e in spans if e["kind"] == "generate"]
    middle = min(changes, key=lambda seconds: abs(seconds - 0.5))
    words = "new weights arrive in the middle of an answer"
    arrow = {"arrowprops": {"arrowstyle": "->"}, "ha": "center", "fontsize": 14}
    axis.annotate(words, (middle, 1.8), (middle, 2.3), **arrow)
    words = "seconds; a colour is a version of the policy, dark to light, then dark again"
    axis.set_xlabel(words, fontsize=13)
    save_figure(figure, path)


ROWS = {"train": 0.0, "generate": 1.0}
NAMES = {"train": "training", "generate": "generating"}
