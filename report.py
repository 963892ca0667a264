"""report.py: what a run leaves for people: summary.json, a verdict of three lines, two pictures.

Everything is read from the run folder, so that pictures can be drawn again later (`python bench.py
plot RUN`). Left out: benchmarks, which compare runs (bench.py).
"""

import json
from collections import Counter
from pathlib import Path

import numpy as np

import common

RESULTS = Path(__file__).parent / "results"
# colour-blind safe (Okabe & Ito, 2008)
BLUE, ORANGE, GREEN, PURPLE, GREY = "#0072B2", "#E69F00", "#009E73", "#CC79A7", "#999999"


def summarise(run: Path, facts: dict) -> str:
    """Write summary.json from a run's metrics and `facts`, draw its pictures; returns the verdict.

    The verdict has three lines: before and after, what it took, where the files are.
    """
    rows = common.read_lines(run / "metrics.jsonl")
    before, *_, after = [row["eval"] for row in rows if "eval" in row] * 2
    steps = [row for row in rows if "seconds" in row]
    total = {key: sum(row[key] for row in steps) for key in ("samples", "tokens", "seconds")}
    age = {
        "max": max((row["staleness_max"] for row in steps), default=0),
        "mean": float(np.mean([row["staleness_mean"] for row in steps] or [0.0])),
        "bound": facts.pop("staleness_bound"),
    }
    summary = {
        **facts,
        "eval_metric": "share of evaluation problems solved by greedy decoding",
        "eval_before": before["solved"],
        "eval_after": after["solved"],
        "eval": {"before": before, "after": after},
        "samples": total["samples"],
        "tokens_trained": int(total["tokens"]),
        "learner_tokens_per_s": round(total["tokens"] / max(total["seconds"], 1e-9)),
        "reference_share": float(np.mean([row["reference_share"] for row in steps] or [0.0])),
        "staleness": age,
        "failures": dict(sum((Counter(row["failures"]) for row in steps), Counter())),
        "machine": common.describe_machine(),
    }
    (run / "summary.json").write_text(json.dumps(summary, indent=1))
    draw_run(run)
    return (
        f"solved {before['solved']:.0%} -> {after['solved']:.0%} of the evaluation problems, "
        f"reward {before['reward']:.2f} -> {after['reward']:.2f}, {after['turns']:.2f} turns\n"
        f"{summary['steps']} steps, {summary['samples']:,} episodes in {summary['wall_s']:.0f} s; "
        f"staleness mean {age['mean']:.2f}, max {age['max']} (bound {age['bound']})\n"
        f"{run}/ has reward.png, timeline.png, summary.json, metrics.jsonl, events.jsonl"
    )


def draw_run(run: Path) -> None:
    """reward.png and timeline.png of one run folder, from its metrics and events."""
    draw_reward(run)
    draw_timeline(run)


def canvas():
    """matplotlib.pyplot without a screen; imported late, because a worker never draws."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    return plt


def draw_reward(run: Path) -> None:
    """Reward, held-out score and staleness against wall-clock time."""
    plt = canvas()
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
    top.plot(
        *zip(*held, strict=True), "o-", color=ORANGE, ms=4, label="evaluation: solved (greedy)"
    )
    top.set_ylabel("score (1 = best)")
    top.set_ylim(-0.02, 1.05)
    top.legend(loc="lower right")
    config = json.loads((run / "config.json").read_text())
    top.set_title(f"{config['task']}, {config['mode']}: it learns while it generates")
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


def draw_timeline(run: Path, steps: int = 8) -> None:
    """A Gantt picture of a few learner steps in the middle of a run: who did what, when, and by
    which policy version."""
    spans = [e for e in common.read_lines(run / "events.jsonl") if "seconds" in e]
    trained = [e for e in spans if e["kind"] == "train"]
    if not trained:
        return
    plt = canvas()
    first = max(0, (len(trained) - steps) // 2)
    window = trained[first : first + steps]
    left, right = window[0]["t"], window[-1]["t"] + window[-1]["seconds"]
    low, high = window[0]["version"], window[-1]["version"]
    rows = sorted({e["process"] for e in spans})
    seen = [e for e in spans if e["t"] < right and e["t"] + e["seconds"] > left]
    figure, axis = plt.subplots(figsize=(8, 1.4 + 0.5 * len(rows)), layout="constrained")
    colours = plt.get_cmap("cividis", high - low + 3)
    norm = plt.matplotlib.colors.BoundaryNorm(np.arange(low - 2, high + 2) - 0.5, colours.N)
    for e in seen:
        y, start = rows.index(e["process"]), max(e["t"], left)
        width = min(e["t"] + e["seconds"], right) - start
        colour = colours(norm(e["version"])) if "version" in e else GREY
        axis.barh(y, width * 1e3, left=(start - left) * 1e3, color=colour, height=0.7)
        if e["kind"] == "train" and width > 0.04 * (right - left):
            middle = (start - left + width / 2) * 1e3
            white = norm(e["version"]) < colours.N / 2
            axis.text(
                middle,
                y,
                f"v{e['version']}",
                ha="center",
                va="center",
                fontsize=8,
                color="white" if white else "black",
            )
    axis.set_yticks(range(len(rows)), rows)
    axis.invert_yaxis()
    axis.set_xlim(0, (right - left) * 1e3)
    axis.set_xlabel(f"time (ms) since {left:.1f} s after the start; blank = idle, grey = verifying")
    config = json.loads((run / "config.json").read_text())
    axis.set_title(f"{config['task']}, {config['mode']}: who works, and with which policy version")
    scale = plt.cm.ScalarMappable(norm, colours)
    figure.colorbar(scale, ax=axis, label="policy version", ticks=range(low, high + 1, 2))
    figure.savefig(run / "timeline.png", dpi=120)
    plt.close(figure)


# ----------------------------------------------------------------------------------- measurements


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
