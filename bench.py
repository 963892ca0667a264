"""bench.py: one door to every measurement.

    python bench.py                    # sync against async on two tasks, in 5 minutes
    python bench.py NAME [flags]       # a measurement of this list; NAME --help has its flags
    python bench.py NAME --record      # the same, and its files are copied to results/
    python bench.py episode [TASK ...] # a sample episode of each task, or of your own file
    python bench.py compare RUN RUN    # the curves of runs over each other: compare.png
    python bench.py look RUN           # execute a run again, for a page to look into: look.html
    python bench.py tables             # write docs/measured.md from results/*.json

A measurement writes into a new folder, runs/NAME-MMDD-HHMMSS/, and nowhere else.
"""
# Trainers come here, too: `batch_metrics` is what a step says of its batch, `finish` lets a run say
# what it was.
# Left out: the measurements themselves (lab/), and training: trainers are run as commands.

import importlib
import shlex
import shutil
import sys
import time
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from tqdm import tqdm

from buffer import by_task, staleness
from reward import TASKS, Task, make_task, own_files
from runtime.checkpoint import sha256_of
from runtime.config import Config, TrainingStopped, UserError, fail, parse, printable
from runtime.folder import read_json, read_lines, write_json
from runtime.huggingface import export
from runtime.messages import Group
from runtime.setup import Run, evaluate_now

MEASUREMENTS = {  # name: (room of lab/, minutes on two cores, files, what is measured)
    "race": ("races", 5, "race.json .png, timeline.png", "sync against async (--seeds 5: 8)"),
    "tasks": ("campaigns", 7, "tasks.json, guess_timeline.png", "three tasks with default flags"),
    "agents": ("agents", 80, "agents.json", "tasks with turns: credit, critic, several tasks"),
    "staleness": ("campaigns", 3, "staleness.json", "oldest token trained, every bound and swap"),
    "staleness-methods": ("stale", 100, "methods.json .png", "60 methods to learn from stale data"),
    "attempts": ("stale", 20, "attempts.json", "how often one must try at the edge of collapse"),
    "distil": ("distil", 8, "distil.json", "a lost skill comes back from a teacher"),
    "judge": ("distil", 8, "judge.json", "a reward model in place of the task"),
    "replay": ("campaigns", 10, "replay.json", "runs repeated to the same weights"),
    "cluster": ("clusters", 15, "cluster.json", "what Ray costs, and what a cluster survives"),
    "faults": ("campaigns", 30, "faults.json", "300 faults on purpose: what is lost"),
    "disk": ("campaigns", 15, "disk.json", "run folders damaged, killed or hostile"),
    "folder": ("qwen", 5, "folder.json", "a folder of Qwen3's form learns, and is given back"),
    "qwen": ("qwen", 1, "qwen.json", "a Qwen3 of random weights: how fast (--size 0.6B: a GPU)"),
    "gpu": ("gpu", 9, "*.json, tables.md", "on one GPU: all that it can be asked, in 9 minutes"),
    "decode": ("speed", 3, "decode-cpu or -cuda.json", "a token at long context"),
    "memory": ("memory", 1, "memory.json", "bytes of 128k tokens: dense, sparse, in 8 bits"),
    "dsa": ("speed", 3, "dsa-cuda.json", "attention kernels, dense and sparse (GPU)"),
    "recipe": ("recipe", 5, "recipe.json", "how a model becomes sparse (--seeds 3: 11)"),
    "lab": ("exact", 1, "lab.json, lab_*.png", "exact bias and variance of objectives"),
    "scale": ("simulate", 6, "scale.json", "the simulator beside published systems"),
}


@dataclass(frozen=True)
class NoFlags:
    """A measurement without flags of its own."""


def batch_metrics(run, groups: list[Group], version: int) -> dict:
    """What can be said of a batch that has trained `version` without a look at the policy, of each
    task where there are several; and of the groups that were discarded since the last one."""
    trajectories = [t for group in groups for t in group.trajectories]
    ages = [staleness(t, version) for t in trajectories]
    discarded = [t for group, _ in run.discarded for t in group.trajectories]
    metrics = {
        **episode_metrics(trajectories),
        "failures": dict(Counter(t.finish for t in trajectories + discarded if t.failed)),
        "discarded": dict(Counter(reason for _, reason in run.discarded)),
        "staleness_max": max(ages),
        "staleness_mean": float(np.mean(ages)),
    }
    if run.task.parts:
        metrics["tasks"] = {
            part.name: episode_metrics([t for g in own for t in g.trajectories])
            for part, own in zip(run.task.parts, by_task(groups, run.task.shares), strict=True)
        }
    return metrics


def episode_metrics(trajectories: list) -> dict:
    """Mean reward, and sizes, of some episodes."""
    rewards = [t.reward for t in trajectories if not t.failed]
    return {
        "reward": float(np.mean(rewards or [0.0])),
        "samples": len(trajectories),
        "failed": len(trajectories) - len(rewards),
        "sequence_tokens": sum(len(t.tokens) for t in trajectories),
    }


def asynchronous_facts(run) -> dict:
    """What only an asynchronous run can say about itself, for its summary."""
    seconds = time.monotonic() - (run.began or run.log.start)
    busy = [w.status["busy"] / w.status["alive"] for w in run.pool.of("rollout") if w.status]
    learner = run.log.seconds["train"] / seconds
    return {
        "staleness_bound": run.config.max_staleness,
        "utilization": {"rollout": sum(busy) / max(1, len(busy)), "learner": learner},
        "published_bytes": run.mailbox.nbytes,
        "ledger": run.ledger.totals(),
        "workers_lost": run.lost,
        "sessions": sum([Counter(w.status) for w in run.pool.of("reward")], run.sessions),
    }


def finish(run: Run, facts: dict) -> None:
    """The evaluations that --eval-when late has put off, then summary, pictures and verdict.

    facts: what a summary needs to know of the trainer. Kept weights are in memory only: a run that
    was killed has lost these evaluations.
    """
    config, learner, log = run.config, run.learner, run.log
    facts = {
        "published_bytes": learner.model.flat.nbytes,
        **facts,
        "task": config.task,
        "seed": config.seed,
        "steps": learner.version,
        "stopped_early": learner.version < config.steps,
        "wall_s": round(log.close(), 2),
        "weights_sha256": sha256_of(learner.weights),
        # two moments of AdamW, in each learner
        "optimizer_bytes": 2 * sum(part.nbytes for part, _ in learner.slices),
    }
    for seconds, version, weights in tqdm(log.kept, "evaluations", disable=not log.kept):
        learner.model.flat.copy_(weights)
        log.metrics({"step": version, "eval": evaluate_now(run)}, at=seconds)
    run.host.close()
    opened = facts.get("sessions", Counter()) + run.host.sessions  # of environments
    facts["sessions"] = {name: opened[name] for name in ("opened", "closed")}
    print(printable(summarise(run.folder, facts)))
    if config.export and not facts["stopped_early"]:
        print(printable(export(learner.model, config, Path(config.export))))


def exit_code(run: Run) -> None:
    """A run that a signal has stopped says so to whoever has started it: 130 for Ctrl-C, 143 for
    SIGTERM."""
    if run.learner.version < run.config.steps:
        raise SystemExit(128 + run.stop.asked)


def summarise(run: Path, facts: dict) -> str:
    """Write summary.json from a run's metrics and `facts`, draw its pictures; returns the verdict.

    The verdict: before and after, what it took, where the files are; and what to do when the run
    was stopped early or has learned nothing.
    """
    from lab.plots import draw_run

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
        "learner_tokens_per_s": round(tokens / max(total(steps, "seconds"), 1e-9)),
        "staleness": age,
        "mismatch": steps[0].get("mismatch") if steps else None,
        "failures": counted(steps, "failures"),
        "discarded": counted(steps, "discarded"),
        "tasks": by_name(steps, before, after),
    }
    write_json(run / "summary.json", summary)
    draw_run(run)
    return "\n".join([*verdict(run, summary), *advice(run, summary, steps)])


def verdict(run: Path, summary: dict) -> list[str]:
    """Lines that say what a run has reached, what it took, and where its files are."""
    before, after, age = *summary["eval"].values(), summary["staleness"]
    lines = [
        f"solved {before['solved']:.0%} -> {after['solved']:.0%} of the evaluation problems, "
        f"reward {before['reward']:.2f} -> {after['reward']:.2f}, {after['turns']:.2f} turns each",
        f"{summary['steps']} steps, {summary['samples']:,} episodes in {summary['wall_s']:.0f} s; "
        f"staleness mean {age['mean']:.2f}, max {age['max']} (bound {age['bound']})",
        f"{run}/ has reward.png, timeline.png, summary.json, metrics.jsonl, events.jsonl",
    ]
    for name, own in summary["tasks"].items():
        gain = " -> ".join(f"{evaluated['solved']:.0%}" for evaluated in own["eval"].values())
        said = f"{own['samples']:,} episodes, {own['failed']} failed"
        lines.append(f"  {name}: solved {gain}, {said}")
    if summary["discarded"]:
        lines.append(f"groups discarded and replaced: {summary['discarded']}")
    return lines


def by_name(steps: list[dict], before: dict, after: dict) -> dict:
    """Of several tasks: what was trained of each, and its evaluations."""
    found = {}
    for name in after.get("tasks", ()):
        own = [row["tasks"][name] for row in steps]
        found[name] = {
            "samples": total(own, "samples"),
            "failed": total(own, "failed"),
            "eval": {"before": before["tasks"][name], "after": after["tasks"][name]},
        }
    return found


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
        if config.get("export"):
            words += ["--export", config["export"]]
        stopped = f"stopped at step {summary['steps']} of {config['steps']}"
        lines.append(f"{stopped}; go on with: {shlex.join(words)}")
    groups, dead = total(last, "samples") / config["group_size"], total(last, "dead_groups")
    if not config.get("teacher") and dead > 0.85 * groups and solved <= 0.5:
        lines += [
            f"little to learn from: in {dead:.0f} of {groups:.0f} groups of the last {len(last)} "
            "steps all answers got the same reward.",
            "try partial credit (jsonl: the verifier `similar`), fewer or shorter answers, "
            "--group-size, --temperature or --entropy larger",
        ]
    return lines


def show_group(group: Group, task: Task) -> str:
    """One line: the text of a group's first episode, its versions and its reward."""
    t = group.trajectories[0]
    text = task.tokenizer.decode_bytes(t.tokens.tolist()).decode(errors="replace")
    if len(text) > 100:
        text = f"{text[:60]} ... {text[-40:]}"
    versions = t.versions[t.loss_mask]
    span = f"{versions.min()}..{versions.max()}" if len(versions) else "-"
    return f"  group {t.group_id}  [{text!r}]  reward {t.reward:.2f}  versions {span}  {t.finish}"


def show_episode(task: Task) -> None:
    """Print a problem, and the environment's replies to its best answers."""
    problem = task.reset(0, "train")
    print(f"\n{task.name}: at most {task.context} tokens, {task.eval_size} problems held out")
    print(f"  prompt  {problem['prompt']!r:.150}")
    answers = task.solve(problem)
    for turn, answer in enumerate(answers, 1):
        print(f"  answer  {answer!r:.80} -> {task.step(problem, answers[:turn])}")


def describe() -> str:
    """The help text: every measurement with its minutes and what it writes."""
    lines = [__doc__, "measurement        minutes  what is measured, and the files it leaves"]
    for name, (_, minutes, files, what) in MEASUREMENTS.items():
        lines.append(f"{name:17}  {minutes:7}  {what}: {files}")
    return "\n".join(lines)


def measure(name: str, arguments: list[str], folder: Path) -> None:
    """Run one measurement; with --record among the arguments its files are copied to results/."""
    from lab.tables import RESULTS, tables_of

    module, minutes, files, what = MEASUREMENTS[name]
    room = importlib.import_module(f"lab.{module}")  # only this one: others need other packages
    text = f"{what}; about {minutes} minutes on two cores\n\n  --record  copy {files} to results/"
    flags = [word for word in arguments if word != "--record"]
    function = getattr(room, f"bench_{name.replace('-', '_')}")
    kind = function.__annotations__.get("config", NoFlags)
    config = parse(text, flags, kind)
    folder = Path(getattr(config, "out", "") or folder)
    function(folder) if kind is NoFlags else function(folder, config)
    if "--record" in arguments:  # before the tables, in case that they cannot be made
        for file in (*folder.glob("*.json"), *folder.glob("*.png")):
            shutil.copy(file, RESULTS)
            print(f"recorded: results/{file.name}")
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "tables.md").write_text("\n".join(lines := tables_of(folder)) + "\n")
    print(*lines, f"\nwritten: {folder}/", sep="\n")


def replay(config: Config) -> None:
    """`train_async.py --replay RUN`: is the run what its log says?"""
    from lab.replay import replay

    replay(config)


def main(arguments: list[str]) -> None:
    """The command line; a mistake costs one line and exit code 2."""
    name, *rest = arguments or ["race"]
    try:
        if name in ("-h", "--help"):
            print(describe())
        elif name in MEASUREMENTS:
            folder = f"{name if arguments else 'bench'}-{time.strftime('%m%d-%H%M%S')}"
            measure(name, rest, Path("runs") / folder)
        elif name == "episode":
            for spec in rest or list(TASKS)[:-1]:  # jsonl needs a file
                show_episode(make_task(spec))
        elif name == "compare":
            from lab.plots import compare

            print(printable(compare(rest)))
        elif name == "look":
            from lab.look import look

            print(printable(look(rest)))
        elif name == "tables" and not rest:
            from lab.tables import write_tables

            print(f"written: {write_tables()}")
        else:
            names = [*MEASUREMENTS, "episode", "compare", "look", "tables"]
            raise UserError(f"{name!r}: must be {', '.join(names)} (--help says what they are)")
    except UserError as error:
        fail(error)
    except TrainingStopped as error:
        raise SystemExit(f"stopped: {printable(str(error))}") from error
    except KeyboardInterrupt:
        raise SystemExit(130) from None


if __name__ == "__main__":
    main(sys.argv[1:])
