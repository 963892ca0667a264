"""pictures.py: the pictures of a run: reward.png and timeline.png, and what other pictures share.

Left out: pictures of measurements (lab/).
"""

import io
from pathlib import Path

import numpy as np

from runtime.folder import read_json, read_lines, write_file
from runtime.terminal import printable

# colour-blind safe (Okabe & Ito, 2008)
BLUE = "#0072B2"
ORANGE = "#E69F00"
GREEN = "#009E73"
PURPLE = "#CC79A7"
GREY = "#999999"

# of curves: a colour, and dashes
STYLES = [c + dashes for dashes in ("-", "--", ":") for c in (BLUE, ORANGE, GREEN, PURPLE, GREY)]

# of eight policy versions, dark to light (the map cividis of matplotlib)
SHADES = "#00224e #213b6e #4c556c #6c6e72 #8e8978 #b1a570 #d9c55c #fee838".split()


def draw_run(run: Path) -> None:
    """reward.png and timeline.png of one run folder, from its metrics and events."""
    draw_reward(run)
    draw_timeline([run], run / "timeline.png")


def name_of(run: Path) -> str:
    """The task and the trainer of a run."""
    config = read_json(run / "config.json")
    return printable(f"{config['task']}, {config['mode']}")


def steps_of(run: Path) -> list[dict]:
    """The steps in metrics.jsonl of a run folder; evaluations that came late are left out."""
    return [row for row in read_lines(run / "metrics.jsonl") if "seconds" in row]


def score_curves(rows: list[dict]) -> dict[str, tuple]:
    """{label: (rows of metrics.jsonl, values)}: training reward and held-out score of each task."""
    steps = [row for row in rows if "reward" in row]
    exams = [row for row in rows if "eval" in row]
    curves = {}
    for task in exams[0]["eval"].get("tasks", [""]):
        rewards = [(row["tasks"][task] if task else row)["reward"] for row in steps]
        solved = [(row["tasks"][task] if task else row)["solved"] for row in column(exams, "eval")]
        curves[f"{task} training reward".strip()] = (steps, rewards)
        curves[f"{task} held-out, solved".strip()] = (exams, solved)
    return curves


def draw_reward(run: Path) -> None:
    """reward.png: reward and evaluation, and below them staleness, against wall-clock time."""
    rows = read_lines(run / "metrics.jsonl")
    steps = steps_of(run)
    if not steps:
        return
    scores = {}
    for label, (own, values) in score_curves(rows).items():
        scores[label] = (None, column(own, "t"), values)
    t, oldest = column(steps, "t"), column(steps, "staleness_max")
    ages = {
        "mean": (GREEN, t, column(steps, "staleness_mean")),
        "oldest token": (PURPLE, t, oldest),
    }
    time = (0, 1.02 * max(column(rows, "t")))
    above = {"ylabel": "score (1 = best)", "ylim": (-0.02, 1.05), "xlim": time}
    below = {"xlabel": "wall-clock time (s)", "ylabel": "staleness (versions)", "xlim": time}
    below["ylim"] = (-0.1, 1.5 * max(1, *oldest))
    judge = ", by the reward model" * bool(read_json(run / "config.json").get("reward_model"))
    panels = [(scores, above), (ages, below)]
    draw_panels(run / "reward.png", name_of(run) + judge, panels, (7, 5), columns=1)


def draw_timeline(runs: list[Path], path: Path, steps: int = 8) -> None:
    """A few learner steps in the middle of each run, on one time axis: who did what, when, and by
    which policy version. Runs that have not trained yet are left out."""
    rows, bars, width = [], [], 0.0  # bars: row, seconds from the left, seconds, version
    for run in runs:
        spans = [event for event in read_lines(run / "events.jsonl") if "seconds" in event]
        trained = [event for event in spans if event["kind"] == "train"]
        middle = trained[max(0, (len(trained) - steps) // 2) :][:steps]
        if not middle:
            continue
        left, last = middle[0]["t"], middle[-1]
        width = max(width, last["t"] + last["seconds"] - left)
        processes = sorted(grouped(spans, "process"))
        for event in spans:
            row = len(rows) + processes.index(event["process"])
            bars.append((row, event["t"] - left, event["seconds"], event.get("version", "")))
        rows += [printable(f"{name_of(run)}: {process}") for process in processes]
    if not rows:
        return
    figure = new_figure((9, 0.9 + 0.36 * len(rows)))
    axis = figure.subplots()
    for row, begin, seconds, version in bars:
        left, right = max(0.0, begin), min(width, begin + seconds)
        if left < right:
            colour = PURPLE if version == "" else SHADES[version % 8]
            axis.barh(row, right - left, left=left, color=colour, height=0.7)
        if right - left > 0.03 * width:  # there is room for its number
            ink = "white" if colour in SHADES[:4] else "black"
            axis.text((left + right) / 2, row, version, ha="center", va="center", color=ink)
    axis.set(xlim=(0, width), ylim=(len(rows) - 0.5, -0.5))
    axis.set_xlabel("time (s); number and colour: policy version; pink: verifying; blank: idle")
    axis.set_yticks(range(len(rows)), rows, parse_math=False)
    save_figure(figure, path)


def draw_panels(path: Path, title: str, panels: list, size=(7, 3.8), columns=2) -> None:
    """Write panels of (curves {label: (style, x, y)}, settings of the axis) into one picture.

    A style is a colour and dashes ("#0072B2--"), or None for the next of STYLES. Where y has a row
    for each seed, their median is drawn in a band from the lowest to the highest. Panels with the
    same labels share one legend: in the place that the last row leaves free, or in the first panel.
    """
    shape = (-(-len(panels) // columns), min(columns, len(panels)))
    figure = new_figure(size)
    axes = figure.subplots(*shape, squeeze=False)
    for axis, (curves, settings) in zip(axes.flat, panels, strict=False):
        for i, (label, (style, x, y)) in enumerate(curves.items()):
            style = style or STYLES[i % len(STYLES)]
            colour = style[:7]
            seeds = np.atleast_2d(y)
            median = np.median(seeds, 0)
            axis.plot(x, median, style[7:] or "-", color=colour, label=label, ms=4)
            axis.fill_between(x, seeds.min(0), seeds.max(0), color=colour, alpha=0.15, lw=0)
        axis.set(**settings)
        axis.minorticks_off()  # on a logarithmic axis they would print over the others
        axis.grid(alpha=0.3)
        if curves.keys() != panels[0][0].keys():
            axis.legend(fontsize=10)
    legend = axes.flat[len(panels) % axes.size]
    legend.legend(*axes.flat[0].get_legend_handles_labels(), fontsize=10)
    if len(panels) < axes.size:
        legend.axis("off")
    figure.suptitle(title, parse_math=False)
    save_figure(figure, path)


def new_figure(size: tuple):
    """An empty picture; matplotlib is imported late, because a worker never draws."""
    from matplotlib.figure import Figure

    return Figure(figsize=size, dpi=120, layout="constrained")


def save_figure(figure, path: Path) -> None:
    """Write a picture."""
    picture = io.BytesIO()
    figure.savefig(picture, format=path.suffix[1:])
    write_file(path, picture.getvalue())


def column(rows: list[dict], key: str) -> list:
    """One entry of each row."""
    return [row[key] for row in rows]


def grouped(rows: list[dict], key: str) -> dict:
    """The rows of each value of a key, in the order in which they come."""
    found = {}
    for row in rows:
        found.setdefault(row[key], []).append(row)
    return found
