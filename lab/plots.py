"""plots.py: what a measurement leaves behind: JSON, tables of Markdown, pictures.

A measurement writes NAME.json and NAME.png into a folder: `save_result`, `draw_panels`.
Left out: pictures of one run (runtime/pictures.py).
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
from runtime.pictures import new_figure, save_figure, score_curves
from runtime.runlog import stored_config
from runtime.terminal import printable

RESULTS = Path(__file__).parent.parent / "results"


# ------------------------------------------------------------------------------ rows, and numbers


def save_result(folder: Path, name: str, result: dict) -> None:
    """Write a measurement, and of which machine; called after every run, so that Ctrl-C loses only
    the run under way."""
    folder.mkdir(parents=True, exist_ok=True)
    text = json.dumps({"machine": describe_machine()} | result, indent=1) + "\n"
    text = re.sub(r"\[[-+.,\de\s]+\]", lambda row: " ".join(row[0].split()), text)  # numbers
    (folder / f"{name}.json").write_text(text)


def load_result(name: str, folder: Path = RESULTS) -> dict:
    """A recorded measurement."""
    return read_json(folder / f"{name}.json")


def go_on(folder: Path, name: str, begin: dict) -> dict:
    """What a measurement that was cut short has left in its folder, else `begin`."""
    return load_result(name, folder) if (folder / f"{name}.json").exists() else begin


def steps_of(run: Path) -> list[dict]:
    """The steps in metrics.jsonl of a run folder, without the evaluations that came late."""
    return [row for row in read_lines(run / "metrics.jsonl") if "seconds" in row]


def column(rows: list[dict], key: str) -> list:
    """One entry of each row."""
    return [row[key] for row in rows]


def grouped(rows: list[dict], key: str) -> dict:
    """The rows of each value of a key, in the order in which they come."""
    groups = defaultdict(list)
    for row in rows:
        groups[row[key]].append(row)
    return dict(groups)


def spread(values: list[float]) -> dict:
    """Median and extremes of repeated measurements."""
    median, low, high = np.quantile(values, [0.5, 0, 1]).round(3).tolist()
    return {"median": median, "min": low, "max": high}


# ------------------------------------------------------------------------------------------ tables


def between(values: list, form: str) -> str:
    """Smallest to largest, as text."""
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


def table(corner: str, cells: Iterable[tuple]) -> list[str]:
    """A table of (row, column, text), in the order in which rows and columns come first."""
    rows = defaultdict(dict)
    for row, name, text in cells:
        rows[row][name] = text
    names = dict.fromkeys(name for texts in rows.values() for name in texts)
    lines = [[row, *(texts.get(name, "") for name in names)] for row, texts in rows.items()]
    return markdown([corner, *names], lines)


# ---------------------------------------------------------------------------------------- pictures


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
            panels[title][label] = (column(rows, "step"), scores)
    shown = [(curves, {"xlabel": "step", "ylabel": title}) for title, curves in panels.items()]
    path = Path(runs[-1]) / "compare.png"
    draw_panels(path, "", shown, (8, 3 * len(shown)), columns=1)
    return f"written: {path}"


def draw_panels(path: Path, title: str, panels: list, size=(7, 3.8), columns=2) -> None:
    """Write panels of (curves {label: (x, y)}, settings of the axis) into one picture."""
    figure = new_figure(size)
    axes = figure.subplots(-(-len(panels) // columns), min(columns, len(panels)), squeeze=False)
    for axis, (curves, settings) in zip(axes.flat, panels, strict=False):
        for label, (x, y) in curves.items():
            axis.plot(x, y, label=label, marker="." if len(x) < 20 else "")
        axis.set(**settings)
        axis.minorticks_off()  # on a logarithmic axis they would print over the others
        axis.grid(alpha=0.3)
        axis.legend(fontsize=8)
    figure.suptitle(title)
    save_figure(figure, path)
