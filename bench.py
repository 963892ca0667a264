"""bench.py: pictures of runs and benchmarks; every number in the README comes from here.

    python bench.py plot RUN [RUN ...]      # redraw a run's pictures, or compare several
    python bench.py generator               # decode speed, beside transformers if it is installed

Left out: training itself (the trainers are run as commands, exactly as a user would).
"""

import sys
from pathlib import Path

import matplotlib
import numpy as np

import common

matplotlib.use("Agg")
import matplotlib.pyplot as plt  # noqa: E402

# colour-blind safe (Okabe & Ito, 2008)
BLUE, ORANGE, GREEN, PURPLE, GREY = "#0072B2", "#E69F00", "#009E73", "#CC79A7", "#999999"


def draw_run(run: Path) -> None:
    """reward.png and timeline.png of one run folder, from its metrics and events."""
    draw_reward(run)
    draw_timeline(run)


def draw_reward(run: Path) -> None:
    """Reward, held-out score, staleness and learning rate against wall-clock time."""
    rows = common.read_lines(run / "metrics.jsonl")
    steps = [r for r in rows if "reward" in r]
    if not steps:
        return
    t = [r["t"] for r in steps]
    figure, (top, bottom) = plt.subplots(
        2, 1, figsize=(7, 5), sharex=True, height_ratios=[3, 1], layout="constrained"
    )
    top.plot(t, [r["reward"] for r in steps], color=BLUE, lw=1, label="training reward (mean)")
    held = [(r["t"], r["eval"]["solved"]) for r in rows if "eval" in r]
    top.plot(*zip(*held, strict=True), "o-", color=ORANGE, ms=4, label="held-out solved (greedy)")
    top.set_ylabel("score (1 = best)")
    top.set_ylim(-0.02, 1.05)
    top.legend(loc="lower right")
    top.set_title(f"{run.name}: reward while it learns")
    age = [r["staleness_mean"] for r in steps]
    bottom.plot(t, age, color=GREEN, lw=1, label="mean")
    bottom.plot(t, [r["staleness_max"] for r in steps], color=PURPLE, lw=1, label="oldest token")
    bottom.set_ylabel("staleness\n(versions)")
    bottom.set_xlabel("wall-clock time (s)")
    bottom.legend(loc="upper right", ncol=2, fontsize=8)
    for axis in (top, bottom):
        axis.grid(alpha=0.3)
    figure.savefig(run / "reward.png", dpi=120)
    plt.close(figure)


def draw_timeline(run: Path, steps: int = 8) -> None:
    """A Gantt picture of a few learner steps in the middle of a run: who did what, when, and by
    which policy version."""
    spans = [e for e in common.read_lines(run / "events.jsonl") if "seconds" in e]
    trained = [e for e in spans if e["kind"] == "train"]
    if not trained:
        return
    first = max(0, (len(trained) - steps) // 2)
    window = trained[first : first + steps]
    left, right = window[0]["t"], window[-1]["t"] + window[-1]["seconds"]
    low, high = window[0]["version"], window[-1]["version"]
    rows = sorted({e["process"] for e in spans})
    seen = [e for e in spans if e["t"] < right and e["t"] + e["seconds"] > left]
    figure, axis = plt.subplots(figsize=(8, 1.4 + 0.5 * len(rows)), layout="constrained")
    colours = plt.get_cmap("cividis", high - low + 3)
    norm = matplotlib.colors.BoundaryNorm(np.arange(low - 2, high + 2) - 0.5, colours.N)
    for e in seen:
        y, start = rows.index(e["process"]), max(e["t"], left)
        width = min(e["t"] + e["seconds"], right) - start
        colour = colours(norm(e["version"])) if "version" in e else GREY
        axis.barh(y, width * 1e3, left=(start - left) * 1e3, color=colour, height=0.7)
        if e["kind"] == "train" and width > 0.04 * (right - left):
            middle = (start - left + width / 2) * 1e3
            white = norm(e["version"]) < colours.N / 2
            axis.text(middle, y, f"v{e['version']}", ha="center", va="center", fontsize=8,
                      color="white" if white else "black")
    axis.set_yticks(range(len(rows)), rows)
    axis.invert_yaxis()
    axis.set_xlim(0, (right - left) * 1e3)
    axis.set_xlabel(f"time (ms) since {left:.1f} s after the start; blank = idle, grey = verifying")
    axis.set_title(f"{run.name}: {len(window)} learner steps")
    scale = matplotlib.cm.ScalarMappable(norm, colours)
    figure.colorbar(scale, ax=axis, label="policy version", ticks=range(low, high + 1, 2))
    figure.savefig(run / "timeline.png", dpi=120)
    plt.close(figure)


def main(arguments: list[str]) -> None:
    if len(arguments) >= 2 and arguments[0] == "plot":
        for run in arguments[1:]:
            draw_run(Path(run))
    else:
        common.fail(ValueError(f"{' '.join(arguments) or 'nothing'}: must be one of plot RUN..."))


if __name__ == "__main__":
    main(sys.argv[1:])
