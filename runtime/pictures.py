"""pictures.py: the pictures of a run: reward.png and timeline.png.

Left out: pictures of measurements (lab/plots.py), which draw some things as they are drawn here.
"""

import io
import os
from pathlib import Path

from runtime.folder import read_json, read_lines, write_file
from runtime.terminal import printable

# of curves: blue, orange, green, purple, grey, colour-blind safe (Okabe & Ito, 2008)
COLOURS = "#0072B2 #E69F00 #009E73 #CC79A7 #999999".split()
# of policy versions, in turn; all are bright enough for black ink
SHADES = "#8fb8de #f4c98a #8fd3bd #e3b5cf #cccccc #b7d7f2 #f0e68c #c6b7e2".split()


def draw_run(run: Path) -> None:
    """reward.png and timeline.png of one run folder, from its metrics and events.

    reward.png: reward and evaluation, and below them staleness, against wall-clock time.
    """
    rows = read_lines(run / "metrics.jsonl")
    steps = [row for row in rows if "seconds" in row]
    if not steps:
        return
    names = ("staleness_mean", "staleness_max")
    ages = {name: (steps, [row[name] for row in steps]) for name in names}
    figure = new_figure((7, 5))
    above, below = figure.subplots(2, sharex=True)
    for axis, curves in ((above, score_curves(rows)), (below, ages)):
        for label, (points, values) in curves.items():
            axis.plot([row["t"] for row in points], values, label=label)
        axis.grid(alpha=0.3)
        axis.legend()
    above.set(ylabel="score (1 = best)", ylim=(-0.02, 1.05))
    below.set(xlabel="wall-clock time (s)", ylabel="versions")
    figure.suptitle(name_of(run))
    save_figure(figure, run / "reward.png")
    draw_timeline([run], run / "timeline.png")


def score_curves(rows: list[dict]) -> dict[str, tuple]:
    """{label: (rows of metrics.jsonl, values)}: training reward, held-out score of each task."""
    exams, steps = ([row for row in rows if name in row] for name in ("eval", "reward"))
    curves = {"training reward": (steps, [row["reward"] for row in steps])}
    for task in exams[0]["eval"].get("tasks", [""]):
        results = [row["eval"]["tasks"][task] if task else row["eval"] for row in exams]
        curves[f"{task} held-out, solved".strip()] = exams, [one["solved"] for one in results]
    return curves


def draw_timeline(runs: list[Path], path: Path, steps: int = 8) -> None:
    """A few learner steps in the middle of each run, on one time axis: who did what, when, and by
    which policy version. Runs that have not trained yet are left out."""
    bars, ends = [], {}  # row, seconds from the left, seconds, version; row -> where its run ends
    for run in runs:
        spans = [event for event in read_lines(run / "events.jsonl") if "seconds" in event]
        trained = [event for event in spans if event["kind"] == "train"]
        middle = trained[max(0, (len(trained) - steps) // 2) :][:steps]
        if not middle:
            continue
        left, right = middle[0]["t"], middle[-1]["t"] + middle[-1]["seconds"]
        for event in sorted(spans, key=lambda event: event["process"]):
            begin, seconds = event["t"], event["seconds"]
            if begin < right and left < begin + seconds:
                row = printable(f"{name_of(run)}: {event['process']}")
                ends[row] = right - left
                bars.append((row, begin - left, seconds, event.get("version")))
    if not bars:
        return
    figure, width = new_figure((9, 0.9 + 0.36 * len(ends))), max(ends.values())
    axis = figure.subplots()
    axis.barh([*ends], [*ends.values()], color="#f3f3f3", height=0.7)
    for row, begin, seconds, version in bars:
        colour = "black" if version is None else SHADES[version % len(SHADES)]
        axis.barh(row, seconds, left=begin, color=colour, height=0.7)
        if seconds > 0.03 * width and version is not None:  # there is room for its number
            middle = begin + seconds / 2
            axis.text(middle, row, version, ha="center", va="center", clip_on=True)
    axis.set(xlim=(0, width))
    axis.set_xlabel("time (s); number and colour: policy version; black: verifying; pale: idle")
    axis.invert_yaxis()
    save_figure(figure, path)


def name_of(run: Path) -> str:
    """The task and the trainer of a run."""
    config = read_json(run / "config.json")
    return printable(f"{config['task']}, {config['mode']}")


def new_figure(size: tuple):
    """An empty picture; matplotlib is imported late, because a worker never draws."""
    os.environ["MPLBACKEND"] = "agg"  # a notebook names one of its own
    from matplotlib import cycler, rcParams
    from matplotlib.figure import Figure

    rcParams["text.parse_math"] = False  # a $ in the name of a task is a $
    rcParams["axes.prop_cycle"] = cycler(linestyle=["-", "--", ":"]) * cycler(color=COLOURS)
    return Figure(figsize=size, dpi=120, layout="constrained")


def save_figure(figure, path: Path) -> None:
    """Write a picture."""
    picture = io.BytesIO()
    figure.savefig(picture)
    write_file(path, picture.getvalue())
