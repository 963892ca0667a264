"""runtime/report.py: what is said and written when a run has ended.

Left out: what is written while it goes on (runlog.py), and how pictures are drawn (lab/plots.py).
"""

import hashlib
import json
import shlex
from collections import Counter
from pathlib import Path

from torch import Tensor

from runtime.config import Config
from runtime.devices import describe_machine
from runtime.messages import Group
from runtime.runlog import RunLog, read_json, read_lines
from runtime.tokenizer import decode_bytes


def sha256_of(flat: Tensor) -> str:
    """Fingerprint of the weights: the sha256 of their bytes."""
    return hashlib.sha256(flat.detach().cpu().contiguous().numpy().tobytes()).hexdigest()


def facts_of(learner, config: Config, log: RunLog) -> dict:
    """What a summary needs to know beyond metrics.jsonl, in both trainers; closes the log."""
    return {
        "task": config.task,
        "seed": config.seed,
        "steps": learner.version,
        "stopped_early": learner.version < config.steps,
        "wall_s": round(log.close(), 2),
        "skipped_steps": learner.skipped,
        "weights_sha256": sha256_of(learner.model.flat),
    }


def summarise(run: Path, facts: dict) -> str:
    """Write summary.json from a run's metrics and `facts`, draw its pictures; returns the verdict.

    The verdict: before and after, what it took, where the files are; and what to do when the run
    was stopped early or has learned nothing.
    """
    rows = read_lines(run / "metrics.jsonl")
    steps = [row for row in rows if "seconds" in row]
    evaluations = [row["eval"] for row in rows if "eval" in row]
    before, after = evaluations[0], evaluations[-1]
    tokens, seconds = total(steps, "tokens"), total(steps, "seconds")
    ages = [row["staleness_max"] for row in steps]
    failures = Counter()
    for row in steps:
        failures.update(row["failures"])
    age = {
        "max": max(ages, default=0),
        "mean": total(steps, "staleness_mean") / max(1, len(steps)),
        "bound": facts.pop("staleness_bound"),
    }
    summary = {
        **facts,
        "eval_metric": "share of evaluation problems solved by greedy decoding",
        "eval_before": before["solved"],
        "eval_after": after["solved"],
        "eval": {"before": before, "after": after},
        "samples": total(steps, "samples"),
        "tokens_trained": int(tokens),
        "learner_tokens_per_s": round(tokens / max(seconds, 1e-9)),
        "reference_share": total(steps, "reference_share") / max(1, len(steps)),
        "staleness": age,
        "failures": dict(failures),
        "machine": describe_machine(),
    }
    (run / "summary.json").write_text(json.dumps(summary, indent=1))
    from bench import draw_run  # late: a worker never draws

    draw_run(run)
    return (
        f"solved {before['solved']:.0%} -> {after['solved']:.0%} of the evaluation problems, "
        f"reward {before['reward']:.2f} -> {after['reward']:.2f}, {after['turns']:.2f} turns\n"
        f"{summary['steps']} steps, {summary['samples']:,} episodes in {summary['wall_s']:.0f} s; "
        f"staleness mean {age['mean']:.2f}, max {age['max']} (bound {age['bound']})\n"
        f"{run}/ has reward.png, timeline.png, summary.json, metrics.jsonl, events.jsonl"
    ) + advice(run, summary, steps)


def total(steps: list[dict], name: str) -> float:
    """The sum of one metric over all steps."""
    return sum([row[name] for row in steps])


def advice(run: Path, summary: dict, steps: list[dict]) -> str:
    """Further lines: how a run that was stopped goes on, what to try when it has not learned."""
    config, text, last = read_json(run / "config.json"), "", steps[-10:]
    if summary["stopped_early"]:
        text += (
            f"\nstopped at step {summary['steps']} of {config['steps']}; go on with: "
            f"python train_{config['mode']}.py --resume {shlex.quote(str(run))}"
        )
    groups = total(last, "samples") / config["group_size"]
    if last and total(last, "dead_groups") >= groups and summary["eval_after"] < 1:
        text += (
            f"\nnothing was learned in the last {len(last)} steps: all answers to a prompt got the "
            "same reward, in every group.\ntry partial credit (jsonl: the verifier `similar`), "
            "fewer or shorter answers, --group-size, --temperature or --entropy larger"
        )
    return text


def show_episode(group: Group) -> str:
    """One line: the text of a group's first episode, its versions and its reward."""
    t = group.trajectories[0]
    text = decode_bytes(t.tokens.tolist()).decode(errors="replace")
    if len(text) > 100:
        text = f"{text[:60]} ... {text[-40:]}"
    versions = t.versions[t.loss_mask]
    span = f"{versions.min()}..{versions.max()}" if len(versions) else "-"
    return f"  group {t.group_id}  [{text!r}]  reward {t.reward:.2f}  versions {span}  {t.finish}"
