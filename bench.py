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


def draw_timeline(run: Path) -> None:
    pass
