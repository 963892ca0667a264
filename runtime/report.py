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
    from bench import draw_run

    draw_run(run)
    return (
        f"solved {before['solved']:.0%} -> {after['solved']:.0%} of the evaluation problems, "
        f"reward {before['reward']:.2f} -> {after['reward']:.2f}, {after['turns']:.2f} turns\n"
        f"{summary['steps']} steps, {summary['samples']:,} episodes in {summary['wall_s']:.0f} s; "
        f"staleness mean {age['mean']:.2f}, max {age['max']} (bound {age['bound']})\n"
        f"{run}/ has reward.png, timeline.png, summary.json, metrics.jsonl, events.jsonl"
    )


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
