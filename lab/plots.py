"""lab/plots.py."""

import json
from pathlib import Path

import numpy as np

from runtime.runlog import read_lines

# colour-blind safe (Okabe & Ito, 2008)
BLUE, ORANGE, GREEN, PURPLE, GREY = "#0072B2", "#E69F00", "#009E73", "#CC79A7", "#999999"

RESULTS = Path(__file__).parent.parent / "results"


def draw_comparison(runs: list[Path], path: Path) -> None:
    """Training reward of several runs against wall-clock time and against samples."""
    plt = canvas()
    figure, axes = plt.subplots(1, 2, figsize=(9, 3.8), sharey=True, layout="constrained")
    for run in runs:
        rows = [r for r in read_lines(run / "metrics.jsonl") if "reward" in r]
        reward = smooth([r["reward"] for r in rows])
        axes[0].plot([r["t"] for r in rows], reward, label=run.name)
        axes[1].plot(np.cumsum([r["samples"] for r in rows]) / 1e3, reward, label=run.name)
    axes[0].set(xlabel="wall-clock time (s)", ylabel="training reward (mean of 10 steps)")
    axes[1].set(xlabel="samples (thousand episodes)")
    for axis in axes:
        axis.grid(alpha=0.3)
    axes[1].legend(fontsize=8)
    figure.savefig(path, dpi=120)
    plt.close(figure)


def draw_async(runs: list[dict], modes: list[str], targets: dict, path: Path) -> None:
    """Held-out score of each task against wall-clock time, and against samples: the median, and a
    band over the seeds."""
    plt = canvas()
    tasks = list(dict.fromkeys(r["task"] for r in runs))
    modes = [mode for mode in modes if mode in {r["mode"] for r in runs}]
    size = (4.5 * len(tasks), 6.4)
    figure, axes = plt.subplots(2, len(tasks), figsize=size, squeeze=False, layout="constrained")
    colours = dict(zip(modes, (GREY, PURPLE, ORANGE, GREEN, BLUE), strict=False))
    clocks = (1, "wall-clock time (s)"), (1000, "episodes trained (thousands)")
    for column, (unit, name) in enumerate(clocks):
        for axis, task in zip(axes[column], tasks, strict=True):
            for mode in modes:
                own = [
                    np.array(r["held"]).T for r in runs if (r["task"], r["mode"]) == (task, mode)
                ]
                grid = np.linspace(0, min(held[column, -1] for held in own), 100)
                curves = np.array([np.interp(grid, held[column], held[2]) for held in own])
                axis.plot(grid / unit, np.median(curves, 0), color=colours[mode], label=mode)
                low, high = curves.min(0), curves.max(0)
                axis.fill_between(grid / unit, low, high, color=colours[mode], alpha=0.15, lw=0)
            metric, goal = targets[task]
            axis.axhline(goal, color="black", lw=0.8, ls=":")
            axis.set(xlabel=name, ylabel=f"held-out: {metric}", title=task if column == 0 else None)
            axis.grid(alpha=0.3)
    axes[0][0].legend(fontsize=8, loc="lower right")
    figure.savefig(path, dpi=120)
    plt.close(figure)


def draw_objectives(runs: list[dict], path: Path) -> None:
    """Held-out reward and effective sample size of each objective, by staleness."""
    plt = canvas()
    cases = {
        f"η = {r['max_staleness']}" + ", 8-bit rollouts" * (r["rollout_weights"] != "float32"): r
        for r in runs
    }
    runs = [r for r in runs if r["kl_threshold"] == 1.0]
    names = list(dict.fromkeys(r["objective"] for r in runs))
    figure, axes = plt.subplots(1, 2, figsize=(7, 4.6), sharey=True, layout="constrained")
    colours = (GREY, BLUE, ORANGE, GREEN)
    titles = {"reward": "held-out reward", "ess": "effective sample size (share of tokens)"}
    for axis, (key, label) in zip(axes, titles.items(), strict=True):
        for i, (case, one) in enumerate(cases.items()):
            like = [(k, one[k]) for k in ("max_staleness", "rollout_weights")]
            own = {r["objective"]: r[key] for r in runs if all(r[k] == v for k, v in like)}
            places = np.arange(len(names)) + 0.21 * (i - 1.5)
            axis.barh(places, [own[n] for n in names], 0.2, color=colours[i], label=case)
        axis.set(xlabel=label, xlim=(0, 1.02))
        axis.grid(axis="x", alpha=0.3)
    axes[0].set_yticks(range(len(names)), names)
    axes[0].invert_yaxis()
    figure.legend(*axes[1].get_legend_handles_labels(), loc="outside lower center", ncols=4)
    figure.suptitle("What staleness costs each objective")
    figure.savefig(path, dpi=120)
    plt.close(figure)


def draw_panels(name: str, title: str, panels: list[tuple[dict, dict]], size=(7, 3.8)) -> None:
    """results/NAME.png: panels of (curves {label: (style, x, y)}, settings of the axis), two a row.

    A style is a colour and dashes ("#0072B2--"). The legend stands in the place that the last row
    leaves free, or else in the first panel.
    """
    plt = canvas()
    shape = (-(-len(panels) // 2), min(2, len(panels)))
    figure, axes = plt.subplots(*shape, figsize=size, squeeze=False, layout="constrained")
    for axis, (curves, settings) in zip(axes.flat, panels, strict=False):
        for label, (style, x, y) in curves.items():
            axis.plot(x, y, style[7:] or "-", color=style[:7], label=label, lw=2)
        axis.set(**settings)
        axis.grid(alpha=0.3)
    legend = axes.flat[len(panels) % axes.size]
    legend.legend(*axes.flat[0].get_legend_handles_labels(), loc="best")
    if len(panels) < axes.size:
        legend.axis("off")
    figure.suptitle(title)
    figure.savefig(RESULTS / f"{name}.png", dpi=120)
    plt.close(figure)


def smooth(values: list[float], width: int = 10) -> np.ndarray:
    """The mean of each value and those before it, `width` in all."""
    sums = np.cumsum(np.pad(values, (1, 0)))
    ends = np.arange(1, len(values) + 1)
    starts = np.maximum(0, ends - width)
    return (sums[ends] - sums[starts]) / (ends - starts)


def between(values: list[float], form: str) -> str:
    """Smallest to largest of some numbers, as text."""
    low, high = (format(f(values), form) for f in (min, max))
    return low if low == high else f"{low} to {high}"


def spread(values: list[float]) -> dict:
    """Median and extremes of repeated measurements."""
    return {
        k: round(float(f(values)), 3)
        for k, f in (("median", np.median), ("min", min), ("max", max))
    }


def save_result(name: str, result: dict) -> None:
    RESULTS.mkdir(exist_ok=True)
    (RESULTS / f"{name}.json").write_text(json.dumps(result, indent=1) + "\n")


def load_result(name: str) -> dict:
    return json.loads((RESULTS / f"{name}.json").read_text())


def draw_run(run: Path) -> None:
    """reward.png and timeline.png of one run folder, from its metrics and events."""
    draw_reward(run)
    draw_timeline([run], run / "timeline.png")


def canvas():
    """matplotlib.pyplot without a screen; imported late, because a worker never draws."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    return plt


def draw_reward(run: Path) -> None:
    """Reward, held-out score and staleness against wall-clock time."""
    plt = canvas()
    rows = read_lines(run / "metrics.jsonl")
    steps = [r for r in rows if "reward" in r]
    if not steps:
        return
    t = [r["t"] for r in steps]
    figure, (top, bottom) = plt.subplots(
        2, 1, figsize=(7, 5), sharex=True, height_ratios=[3, 1], layout="constrained"
    )
    top.plot(t, [r["reward"] for r in steps], color=BLUE, lw=1, label="training reward (mean)")
    held = [(r["t"], r["eval"]["solved"]) for r in rows if "eval" in r]
    top.plot(
        *zip(*held, strict=True), "o-", color=ORANGE, ms=4, label="evaluation: solved (greedy)"
    )
    top.set_ylabel("score (1 = best)")
    top.set_ylim(-0.02, 1.05)
    top.legend(loc="lower right")
    config = json.loads((run / "config.json").read_text())
    top.set_title(f"{config['task']}, {config['mode']}: reward and evaluation")
    age = [r["staleness_mean"] for r in steps]
    bottom.plot(t, age, color=GREEN, lw=1, label="mean")
    bottom.plot(t, [r["staleness_max"] for r in steps], color=PURPLE, lw=1, label="oldest token")
    bottom.set_ylabel("staleness\n(versions)")
    bottom.set_xlabel("wall-clock time (s)")
    bottom.set_ylim(-0.1, 1.5 * max(1, max(r["staleness_max"] for r in steps)))
    bottom.legend(loc="upper right", ncol=2, fontsize=8)
    for axis in (top, bottom):
        axis.grid(alpha=0.3)
    figure.savefig(run / "reward.png", dpi=120)
    plt.close(figure)


def draw_timeline(runs: list[Path], path: Path, steps: int = 8) -> None:
    """A Gantt picture of a few learner steps in the middle of each run, on one time axis: who did
    what, when, and by which policy version."""
    spans = {run: [e for e in read_lines(run / "events.jsonl") if "seconds" in e] for run in runs}
    trained = {run: [e for e in spans[run] if e["kind"] == "train"] for run in runs}
    if not all(trained.values()):
        return
    plt = canvas()
    rows = {run: sorted({e["process"] for e in spans[run]}) for run in runs}
    windows = {}
    for run, steps_of in trained.items():
        first = max(0, (len(steps_of) - steps) // 2)
        windows[run] = steps_of[first : first + steps]
    width = max(w[-1]["t"] + w[-1]["seconds"] - w[0]["t"] for w in windows.values())
    heights = [0.5 * len(rows[run]) + 0.5 for run in runs]
    figure, axes = plt.subplots(
        len(runs),
        1,
        figsize=(8, 0.9 + sum(heights)),
        height_ratios=heights,
        sharex=True,
        squeeze=False,
        layout="constrained",
    )
    for axis, run in zip(axes[:, 0], runs, strict=True):
        left = windows[run][0]["t"]
        shown = [e["version"] for e in trained[run] if left <= e["t"] < left + width]
        low, high = shown[0], shown[-1]
        colours = plt.get_cmap("cividis", high - low + 3)
        norm = plt.matplotlib.colors.BoundaryNorm(np.arange(low - 2, high + 2) - 0.5, colours.N)
        for e in spans[run]:
            start, end = max(e["t"], left), min(e["t"] + e["seconds"], left + width)
            if end <= start:
                continue
            y = rows[run].index(e["process"])
            colour = colours(norm(e["version"])) if "version" in e else GREY
            axis.barh(y, 1e3 * (end - start), left=1e3 * (start - left), color=colour, height=0.7)
            if e["kind"] == "train" and end - start > 0.04 * width:
                white = norm(e["version"]) < colours.N / 2
                axis.text(
                    1e3 * ((start + end) / 2 - left),
                    y,
                    f"v{e['version']}",
                    ha="center",
                    va="center",
                    fontsize=8,
                    color="white" if white else "black",
                )
        axis.set_yticks(range(len(rows[run])), rows[run])
        axis.invert_yaxis()
        axis.set_xlim(0, 1e3 * width)
        config = json.loads((run / "config.json").read_text())
        axis.set_title(
            f"{run.name} ({config['task']}, {config['mode']}): who works, with which policy version"
        )
        scale = plt.cm.ScalarMappable(norm, colours)
        figure.colorbar(scale, ax=axis, label="policy version", ticks=range(low, high + 1, 2))
    axes[-1, 0].set_xlabel("time (ms); blank = idle, grey = verifying")
    figure.savefig(path, dpi=120)
    plt.close(figure)
