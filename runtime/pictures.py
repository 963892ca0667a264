"""pictures.py: the pictures of a run: reward.png and timeline.png.

Left out: pictures of measurements (lab/plots.py), which draw some things as they are drawn here.
"""

import io
import os
from pathlib import Path

from runtime.folder import read_json, read_lines, write_file
from runtime.terminal import printable

# colour-blind safe (Okabe & Ito, 2008)
BLUE, ORANGE, GREEN, PURPLE, GREY = "#0072B2", "#E69F00", "#009E73", "#CC79A7", "#999999"
# of curves: a colour, and dashes
STYLES = [c + dashes for dashes in ("-", "--", ":") for c in (BLUE, ORANGE, GREEN, PURPLE, GREY)]
# of policy versions, in turn; all are bright enough for black ink
SHADES = "#8fb8de #f4c98a #8fd3bd #e3b5cf #cccccc #b7d7f2 #f0e68c #c6b7e2".split()


def draw_run(run: Path) -> None:
    """reward.png and timeline.png of one run folder, from its metrics and events."""
    draw_reward(run)
    draw_timeline([run], run / "timeline.png")


def draw_reward(run: Path) -> None:
    """reward.png: reward and evaluation, and below them staleness, against wall-clock time."""
    rows = read_lines(run / "metrics.jsonl")
    curves = score_curves(rows)
    steps = [row for row in rows if "seconds" in row]
    if not steps:
        return
    figure = new_figure((7, 5))
    above, below = figure.subplots(2, sharex=True)
    for style, (label, (points, values)) in zip(STYLES, curves.items(), strict=False):
        times = [row["t"] for row in points]
        above.plot(times, values, style[7:], color=style[:7], label=label)
    times = [row["t"] for row in steps]
    below.plot(times, [row["staleness_mean"] for row in steps], color=GREEN, label="mean")
    below.plot(times, [row["staleness_max"] for row in steps], color=PURPLE, label="oldest token")
    above.set(ylabel="score (1 = best)", ylim=(-0.02, 1.05))
    below.set(xlabel="wall-clock time (s)", ylabel="staleness (versions)")
    for axis in (above, below):
        axis.grid(alpha=0.3)
        axis.legend()
    figure.suptitle(name_of(run), parse_math=False)
    save_figure(figure, run / "reward.png")


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
    names, bars, width = [], [], 0.0  # bars: row, seconds from the left, seconds, version
    for run in runs:
        spans = [event for event in read_lines(run / "events.jsonl") if "seconds" in event]
        trained = [event for event in spans if event["kind"] == "train"]
        middle = trained[max(0, (len(trained) - steps) // 2) :][:steps]
        if not middle:
            continue
        left, last = middle[0]["t"], middle[-1]
        width = max(width, last["t"] + last["seconds"] - left)
        processes = sorted({event["process"] for event in spans})
        for event in spans:
            row = len(names) + processes.index(event["process"])
            bars.append((row, event["t"] - left, event["seconds"], event.get("version")))
        names += [printable(f"{name_of(run)}: {process}") for process in processes]
    if not names:
        return
    figure = new_figure((9, 0.9 + 0.36 * len(names)))
    axis = figure.subplots()
    for row, begin, seconds, version in bars:
        left, right = max(0.0, begin), min(width, begin + seconds)
        if left < right:
            colour = PURPLE if version is None else SHADES[version % len(SHADES)]
            axis.barh(row, right - left, left=left, color=colour, height=0.7)
        if right - left > 0.03 * width and version is not None:  # there is room for its number
            axis.text((left + right) / 2, row, version, ha="center", va="center")
    axis.set(xlim=(0, width), ylim=(len(names) - 0.5, -0.5))
    axis.set_xlabel("time (s); number and colour: policy version; pink: verifying; blank: idle")
    axis.set_yticks(range(len(names)), names, parse_math=False)
    save_figure(figure, path)


def name_of(run: Path) -> str:
    """The task and the trainer of a run."""
    config = read_json(run / "config.json")
    return printable(f"{config['task']}, {config['mode']}")


def new_figure(size: tuple):
    """An empty picture; matplotlib is imported late, because a worker never draws."""
    os.environ["MPLBACKEND"] = "agg"  # a notebook names one of its own
    from matplotlib.figure import Figure

    return Figure(figsize=size, dpi=120, layout="constrained")


def save_figure(figure, path: Path) -> None:
    """Write a picture."""
    picture = io.BytesIO()
    figure.savefig(picture, format=path.suffix[1:])
    write_file(path, picture.getvalue())
