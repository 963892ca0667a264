"""report.py: the end of a run, for people: summary.json, pictures, the verdict on the screen.

Left out: what was evaluated when (run.py), what is drawn (pictures.py).
"""

import shlex
import time
from collections import Counter
from pathlib import Path

from reward import own_files
from runtime.folder import read_json, read_lines, write_json
from runtime.ledger import table
from runtime.pictures import draw_run


def busy_shares(run) -> dict:
    """The share of the time in which the learner, and a rollout worker, had something to do."""
    seconds = time.time() - (run.began or run.log.start)
    busy = [run.log.seconds["generate"] / seconds]  # of a synchronous run
    if run.pool:
        busy = [w.status["busy"] / w.status["alive"] for w in run.pool.of("rollout") if w.status]
    learner = run.log.seconds["train"] / seconds
    return {"rollout": sum(busy) / max(1, len(busy)), "learner": learner}


def summarise(run: Path, facts: dict) -> str:
    """Write summary.json from a run's metrics and `facts`, draw its pictures; returns the verdict.

    The verdict: before and after, what it took, where the files are; and what to do when the run
    was stopped early or has learned nothing.
    """
    rows = read_lines(run / "metrics.jsonl")
    steps = [row for row in rows if "seconds" in row]
    evaluations = [row["eval"] for row in rows if "eval" in row]
    before, after, tokens = evaluations[0], evaluations[-1], total(steps, "tokens")
    age = {
        "max": max([row["staleness_max"] for row in steps], default=0),
        "mean": total(steps, "staleness_mean") / max(1, len(steps)),
        "bound": facts.pop("staleness_bound"),
    }
    summary = {
        **facts,
        "eval": {"before": before, "after": after},
        "samples": total(steps, "samples"),
        "tokens_trained": tokens,
        "staleness": age,
        "mismatch": steps[0].get("mismatch") if steps else None,
        "cut": total(steps, "cut") / max(1, len(steps)),
        "answer_tokens": total(steps, "answer_tokens") / max(1, len(steps)),
        "failures": counted(steps, "failures"),
        "discarded": counted(steps, "discarded"),
    }
    write_json(run / "summary.json", summary)
    lines = [*verdict(run, summary), *advice(run, summary, steps)]
    try:
        draw_run(run)
    except Exception as error:
        lines.append(f"no pictures: {error!r:.200}")
    return "\n".join(lines)


def verdict(run: Path, summary: dict) -> list[str]:
    """Lines that say what a run has reached, what it took, and where its files are."""
    before, after, age = *summary["eval"].values(), summary["staleness"]
    lines = [
        f"solved {before['solved']:.0%} -> {after['solved']:.0%} of the evaluation problems, "
        f"reward {before['reward']:.2f} -> {after['reward']:.2f}, {after['turns']:.2f} turns each",
        f"{summary['steps']} steps, {summary['samples']:,} episodes in {summary['wall_s']:.0f} s; "
        f"staleness mean {age['mean']:.2f}, max {age['max']} (bound {age['bound']})",
        f"answers of {summary['answer_tokens']:.1f} tokens in the mean, "
        f"{summary['cut']:.0%} cut by the limit",
        f"{run}/ has reward.png, timeline.png, summary.json, metrics.jsonl, events.jsonl",
    ]
    for name, task in after.get("tasks", {}).items():  # where there are several
        lines.append(
            f"  {name}: solved {before['tasks'][name]['solved']:.0%} -> {task['solved']:.0%}"
        )
    if "ledger" in summary:
        lines.append(table(summary["ledger"]))
    return lines


def total(steps: list[dict], name: str) -> float:
    """The sum of one metric over all steps."""
    return sum([row[name] for row in steps])


def counted(steps: list[dict], name: str) -> dict:
    """{reason: how often} of one metric that counts, over all steps."""
    return dict(sum((Counter(row[name]) for row in steps), Counter()))


def advice(run: Path, summary: dict, steps: list[dict]) -> list[str]:
    """Further lines: how a run that was stopped goes on, what to try when it has not learned."""
    config, lines, last = read_json(run / "config.json"), [], steps[-10:]
    solved = summary["eval"]["after"]["solved"]
    if summary["stopped_early"]:
        words = ["python", f"train_{config['mode']}.py", "--resume", str(run)]
        if own_files(config["task"]):
            words += ["--task", config["task"]]
        stopped = f"stopped at step {summary['steps']} of {config['steps']}"
        lines.append(f"{stopped}; go on with: {shlex.join(words)}")
    if summary["cut"] > 0.2:
        lines.append("many answers were cut: a longer limit (jsonl: TOKENS), or --overlong drop")
    groups, dead = total(last, "samples") / config["group_size"], total(last, "dead_groups")
    if not config.get("teacher") and dead > 0.85 * groups and solved <= 0.5:
        lines += [
            f"little to learn from: in {dead:.0f} of {groups:.0f} groups of the last {len(last)} "
            "steps all answers got the same reward.",
            "try partial credit (jsonl: the verifier `similar`), fewer or shorter answers, "
            "--group-size, --temperature or --entropy larger",
        ]
    return lines
