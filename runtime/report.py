"""runtime/report.py."""

import json
from collections import Counter
from pathlib import Path

import numpy as np

from learner import Learner
from runtime.checkpoint import sha256_of
from runtime.config import Config
from runtime.devices import describe_machine
from runtime.messages import Group
from runtime.runlog import RunLog, read_lines
from runtime.tokenizer import decode_bytes

# colour-blind safe (Okabe & Ito, 2008)
BLUE, ORANGE, GREEN, PURPLE, GREY = "#0072B2", "#E69F00", "#009E73", "#CC79A7", "#999999"


def summarise(run: Path, facts: dict) -> str:
    """Write summary.json from a run's metrics and `facts`, draw its pictures; returns the verdict.

    The verdict has three lines: before and after, what it took, where the files are.
    """
    rows = read_lines(run / "metrics.jsonl")
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
        "machine": describe_machine(),
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


def show_episode(group: Group) -> str:
    """One line: the text of a group's first episode, its versions and its reward."""
    t = group.trajectories[0]
    text = decode_bytes(t.tokens.tolist()).decode(errors="replace")
    if len(text) > 100:
        text = text[:60] + " ... " + text[-40:]
    versions = t.versions[t.loss_mask]
    span = f"{versions.min()}..{versions.max()}" if len(versions) else "-"
    return f"  group {t.group_id}  [{text!r}]  reward {t.reward:.2f}  versions {span}  {t.finish}"


def facts_of(learner: Learner, config: Config, watch: RunLog) -> dict:
    """What a summary needs to know beyond metrics.jsonl, in both trainers."""
    return {
        "task": config.task,
        "seed": config.seed,
        "steps": learner.version,
        "stopped_early": learner.version < config.steps,
        "wall_s": round(watch.close(), 2),
        "skipped_steps": learner.skipped,
        "weights_sha256": sha256_of(learner.model.flat),
    }
