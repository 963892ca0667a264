"""report.py: the end of a run, for people: summary.json, pictures, the verdict on the screen.

Left out: what was evaluated when (run.py), what is drawn (pictures.py).
"""

import shlex
from pathlib import Path

from runtime.folder import read_json, read_lines, write_json
from runtime.ledger import table
from runtime.pictures import draw_run


def summarise(run: Path, facts: dict) -> str:
    """Write summary.json from a run's metrics and `facts`, draw its pictures; returns the verdict.

    The verdict: before and after, what it took, where the files are; and what to do when the run
    was stopped early or has learned nothing.
    """
    rows = read_lines(run / "metrics.jsonl")
    steps = [row for row in rows if "seconds" in row]
    evaluations = [row["eval"] for row in rows if "eval" in row]
    age = {
        "max": max([row["staleness_max"] for row in steps], default=0),
        "mean": mean(steps, "staleness_mean"),
        "bound": facts.pop("staleness_bound"),
    }
    summary = {
        **facts,
        "eval": {"before": evaluations[0], "after": evaluations[-1]},
        "samples": total(steps, "samples"),
        "staleness": age,
        "mismatch": steps[0].get("mismatch") if steps else None,
    }
    write_json(run / "summary.json", summary)
    lines = verdict(run, summary, steps)
    try:
        draw_run(run)
    except Exception as error:
        lines.append(f"no pictures: {error!r:.200}")
    return "\n".join(lines)


def total(steps: list[dict], name: str) -> float:
    """The sum of one metric over all steps."""
    return sum([row[name] for row in steps])


def mean(steps: list[dict], name: str) -> float:
    """Its mean; 0 when there are no steps."""
    return total(steps, name) / max(1, len(steps))


def verdict(run: Path, summary: dict, steps: list[dict]) -> list[str]:
    """Lines that say what a run has reached, what it took, and where its files are; how it goes on
    when it was stopped, and what to try when it has not learned."""
    before, after, age = *summary["eval"].values(), summary["staleness"]
    lines = [
        f"solved {before['solved']:.0%} -> {after['solved']:.0%} of the evaluation problems, "
        f"reward {before['reward']:.2f} -> {after['reward']:.2f}, {after['turns']:.2f} turns each",
        f"{summary['steps']} steps, {summary['samples']:,} episodes in {summary['wall_s']:.0f} s; "
        f"staleness mean {age['mean']:.2f}, max {age['max']} (bound {age['bound']})",
        f"{run}/ has reward.png, timeline.png, summary.json, metrics.jsonl, events.jsonl",
    ]
    for name, task in after.get("tasks", {}).items():  # where there are several
        was = before["tasks"][name]["solved"]
        lines.append(f"  {name}: solved {was:.0%} -> {task['solved']:.0%}")
    if "ledger" in summary:
        lines.append(table(summary["ledger"]))
    config, last = read_json(run / "config.json"), steps[-10:]
    if summary["stopped_early"]:
        words = shlex.join(["--resume", str(run), "--task", config["task"]])
        stopped = f"stopped at step {summary['steps']} of {config['steps']}"
        lines.append(f"{stopped}; go on with: python train_{config['mode']}.py {words}")
    if (cut := mean(last, "cut")) > 0.2:
        said = f"in the last {len(last)} steps the limit of tokens has cut {cut:.0%} of the answers"
        lines.append(f"{said}: try a larger one (jsonl: TOKENS)")
    groups, dead = total(last, "samples") / config["group_size"], total(last, "dead_groups")
    if not config.get("teacher") and dead > 0.85 * groups and after["solved"] <= 0.5:
        lines += [
            f"little to learn from: in {dead:.0f} of {groups:.0f} groups of the last {len(last)} "
            "steps all answers got the same reward.",
            "try partial credit (jsonl: the verifier `similar`), shorter problems, "
            "--group-size, --temperature or --entropy larger",
        ]
    return lines
