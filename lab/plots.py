"""plots.py: every picture of runs and measurements, and the files that measurements leave behind.

A measurement writes NAME.json and NAME.png into a folder: `save_result`, `draw_*(..., path)`.
Left out: the pictures of the laboratory, the recipe and the simulator, which stand beside them.
"""

import json
from pathlib import Path

import numpy as np

from runtime.runlog import read_json, read_lines

# colour-blind safe (Okabe & Ito, 2008)
BLUE, ORANGE, GREEN, PURPLE, GREY = "#0072B2", "#E69F00", "#009E73", "#CC79A7", "#999999"

# of curves: a colour, and dashes
STYLES = [c + dashes for dashes in ("-", "--", ":") for c in (BLUE, ORANGE, GREEN, PURPLE, GREY)]

RESULTS = Path(__file__).parent.parent / "results"


def save_result(folder: Path, name: str, result: dict) -> None:
    """Write a measurement; called after every run, so that Ctrl-C loses only the run under way."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / f"{name}.json").write_text(json.dumps(result, indent=1) + "\n")


def load_result(name: str, folder: Path = RESULTS) -> dict:
    """A recorded measurement."""
    return read_json(folder / f"{name}.json")


def spread(values: list[float]) -> dict:
    """Median and extremes of repeated measurements."""
    found = {"median": np.median(values), "min": min(values), "max": max(values)}
    return {name: round(float(value), 3) for name, value in found.items()}


def between(values: list[float], form: str) -> str:
    """Smallest to largest of some numbers, as text."""
    low, high = format(min(values), form), format(max(values), form)
    return low if low == high else f"{low} to {high}"


def markdown(head: list[str], rows: list[list[str]]) -> list[str]:
    """A table as lines of Markdown, its columns aligned for a screen."""
    widths = [max(map(len, column)) for column in zip(head, *rows, strict=True)]
    lines = [head, ["-" * width for width in widths], *rows]
    return [f"| {' | '.join(map(str.ljust, line, widths))} |" for line in lines]


def column(rows: list[dict], key: str) -> list:
    """One entry of each row."""
    return [row[key] for row in rows]


def print_table(rows: list[dict]) -> None:
    """Print rows with the same keys as a table."""
    cells = []
    for row in rows:
        cells.append([f"{v:.4g}" if isinstance(v, float) else str(v) for v in row.values()])
    print(*markdown(list(rows[0]), cells), sep="\n")


def canvas():
    """matplotlib.pyplot without a screen; imported late, because a worker never draws."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    return plt


def save_figure(figure, path: Path) -> None:
    """Write a picture and free its memory."""
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=120)
    canvas().close(figure)


# ------------------------------------------------------------------------------------ one run


def draw_run(run: Path) -> None:
    """reward.png and timeline.png of one run folder, from its metrics and events."""
    draw_reward(run, run / "reward.png")
    draw_timeline([run], run / "timeline.png")


def name_of(run: Path) -> str:
    """The task and the trainer of a run."""
    config = read_json(run / "config.json")
    return f"{config['task']}, {config['mode']}"


def draw_reward(run: Path, path: Path) -> None:
    """Reward and evaluation, and below them staleness, against wall-clock time."""
    rows = read_lines(run / "metrics.jsonl")
    steps = [row for row in rows if "reward" in row]
    evaluated = [row for row in rows if "eval" in row]
    if not steps:
        return
    t = column(steps, "t")
    solved = [row["eval"]["solved"] for row in evaluated]
    oldest = column(steps, "staleness_max")
    score = {
        "training reward (mean)": (BLUE, t, column(steps, "reward")),
        "evaluation: solved": (ORANGE + "o-", column(evaluated, "t"), solved),
    }
    staleness = {
        "mean": (GREEN, t, column(steps, "staleness_mean")),
        "oldest token": (PURPLE, t, oldest),
    }
    seconds = {"xlim": (0, t[-1]), "xlabel": "wall-clock time (s)"}
    above = {"ylabel": "score (1 = best)", "ylim": (-0.02, 1.05)}
    below = {"ylabel": "staleness (versions)", "ylim": (-0.1, 1.5 * max(1, *oldest))}
    panels = [(score, seconds | above), (staleness, seconds | below)]
    draw_panels(path, name_of(run), panels, (7, 5), columns=1)


def draw_timeline(runs: list[Path], path: Path, steps: int = 8) -> None:
    """A few learner steps in the middle of each run, on one time axis: who did what, when, and by
    which policy version. Runs that have not trained yet are left out."""
    rows = []
    bars = []  # (row, seconds from the left, event)
    width = 0.0
    for run in runs:
        spans = [event for event in read_lines(run / "events.jsonl") if "seconds" in event]
        trained = [event for event in spans if event["kind"] == "train"]
        middle = trained[max(0, (len(trained) - steps) // 2) :][:steps]
        if not middle:
            continue
        left = middle[0]["t"]
        width = max(width, middle[-1]["t"] + middle[-1]["seconds"] - left)
        processes = sorted({event["process"] for event in spans})
        for event in spans:
            row = len(rows) + processes.index(event["process"])
            bars.append((row, event["t"] - left, event))
        rows += [f"{name_of(run)}: {process}" for process in processes]
    if not rows:
        return
    figure, axis = canvas().subplots(figsize=(9, 0.9 + 0.36 * len(rows)), layout="constrained")
    for row, begin, event in bars:
        if begin < width and begin + event["seconds"] > 0:
            draw_bar(axis, row, begin, event, width)
    axis.set(
        xlim=(0, width),
        ylim=(len(rows) - 0.5, -0.5),
        xlabel="time (s); one colour a policy version, pink = verifying, blank = idle",
    )
    axis.set_yticks(range(len(rows)), rows)
    save_figure(figure, path)


def draw_bar(axis, row: int, begin: float, event: dict, width: float) -> None:
    """One span of work; what the learner trains has its version written on it."""
    shade = event.get("version", 0) % 8 / 7
    colour = canvas().get_cmap("cividis")(shade) if "version" in event else PURPLE
    bar = axis.barh(row, event["seconds"], left=begin, color=colour, height=0.7)
    if event["kind"] == "train" and event["seconds"] > 0.04 * width:
        axis.bar_label(
            bar,
            [f"v{event['version']}"],
            label_type="center",
            color="white" if shade < 0.5 else "black",
            fontsize=8,
            clip_on=True,
        )


# ------------------------------------------------------------------------------------- several runs


def draw_race(runs: list[dict], modes: list[str], targets: dict, path: Path) -> None:
    """Held-out score of each task against seconds, and against episodes."""
    tasks = list(dict.fromkeys(column(runs, "task")))
    panels = []
    for i, clock in enumerate(("wall-clock time (s)", "episodes trained")):
        for task in tasks:
            metric, goal = targets[task]
            curves = {}
            for mode, colour in zip(modes, (GREY, PURPLE, ORANGE, GREEN, BLUE), strict=False):
                own = [r["held"] for r in runs if (r["task"], r["mode"]) == (task, mode)]
                if own:
                    curves[mode] = (colour, *on_one_grid(own, i))
            longest = max(x[-1] for _, x, _ in curves.values())
            curves["to be reached"] = ("#000000:", [0, longest], [goal, goal])
            axis = {"title": task, "xlabel": clock, "ylabel": f"held-out: {metric}"}
            panels.append((curves, axis))
    draw_panels(path, "", panels, (4.5 * len(tasks), 6.4), columns=len(tasks))


def on_one_grid(held: list, i: int) -> tuple:
    """Scores of several runs, each rows of (seconds, episodes, score), as far as all of them go:
    a grid [G] of their seconds (i = 0) or episodes (1), and scores [runs, G]."""
    curves = [np.array(rows).T for rows in held]  # [3, evaluations]
    grid = np.linspace(0, min(curve[i, -1] for curve in curves), 100)
    return grid, [np.interp(grid, curve[i], curve[2]) for curve in curves]


def draw_panels(path: Path, title: str, panels: list, size=(7, 3.8), columns=2) -> None:
    """Write panels of (curves {label: (style, x, y)}, settings of the axis) into one picture.

    A style is a colour and dashes ("#0072B2--"), or None for the next of STYLES. Where y has a row
    for each seed, their median is drawn in a band from the lowest to the highest. Panels with the
    same labels share one legend: in the place that the last row leaves free, or in the first panel.
    """
    shape = (-(-len(panels) // columns), min(columns, len(panels)))
    figure, axes = canvas().subplots(*shape, figsize=size, squeeze=False, layout="constrained")
    for axis, (curves, settings) in zip(axes.flat, panels, strict=False):
        for i, (label, (style, x, y)) in enumerate(curves.items()):
            style = style or STYLES[i % len(STYLES)]
            colour = style[:7]
            seeds = np.atleast_2d(y)
            axis.plot(x, np.median(seeds, 0), style[7:] or "-", color=colour, label=label, ms=4)
            axis.fill_between(x, seeds.min(0), seeds.max(0), color=colour, alpha=0.15, lw=0)
        axis.set(**settings)
        axis.minorticks_off()  # on a logarithmic axis they would print over the others
        axis.grid(alpha=0.3)
        if curves.keys() != panels[0][0].keys():
            axis.legend(fontsize=8)
    legend = axes.flat[len(panels) % axes.size]
    legend.legend(*axes.flat[0].get_legend_handles_labels(), fontsize=8)
    if len(panels) < axes.size:
        legend.axis("off")
    figure.suptitle(title)
    save_figure(figure, path)
