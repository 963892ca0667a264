"""books.py: what follows a training step: evaluation, samples, metrics, checkpoint, checks.

Left out: the end of a run (bench.py), what the numbers mean (learner.py, losses.py), and how lines
get to disk (runlog.py).
"""

from bench import batch_metrics, show_group
from runtime.checkpoint import checkpoint
from runtime.config import TrainingStopped
from runtime.messages import Group
from runtime.setup import Run, evaluate_now


def close_step(run: Run, groups: list[Group], metrics: dict, in_flight=(), completed=()) -> None:
    """A step is done: evaluate and show episodes where that is due, write its metrics, save.

    in_flight: ids of all groups that are not trained yet; completed: those of them that are ready.
    """
    config, learner, log = run.config, run.learner, run.log
    version = learner.version
    metrics |= batch_metrics(groups, version - 1)
    shown = {"reward": f"{metrics['reward']:.2f}", "age": f"{metrics['staleness_mean']:.1f}"}
    shown["learn"] = f"{metrics['tokens'] / metrics['seconds']:.0f}/s"
    due = version % config.eval_every == 0 or version == config.steps
    if due and config.eval_when == "late":
        log.kept.append((log.now(), version, learner.model.flat.clone()))
    elif due:
        metrics["eval"] = evaluate_now(run)
        shown["eval"] = f"{metrics['eval']['solved']:.2f}"
    if version % config.samples_every == 0:
        texts = [show_group(group, run.task) for group in groups[:3]]
        log.say("\n".join(texts))
        log.logs["samples"].append([{"version": version, "text": text} for text in texts])
    log.step({"step": version, **metrics}, **shown)
    if version % config.checkpoint_every == 0:  # after the metrics: it resumes from them, too
        checkpoint(learner, run.folder, log, in_flight, completed)
    check_step(run, groups, metrics)


def check_step(run: Run, groups: list[Group], metrics: dict) -> None:
    """Say what is wrong with a step; stop when three in a row were not finite, or too many episodes
    failed."""
    if in_row := run.learner.skipped_in_row:
        found = f"loss {metrics['loss']}, gradient norm {metrics['grad_norm']}"
        run.log.say(f"step {run.learner.version} changed no weights: {found}")
        if in_row >= 3:
            raise TrainingStopped(f"loss or gradient not finite {in_row} times in a row ({found})")
    failed = [t for g in groups for t in g.trajectories if t.failed]
    if failed and not run.log.failure:  # once a run: the first is the one to mend
        first = next((t for t in failed if t.failure), failed[0])
        run.log.failure = f"{first.finish}: {first.failure or 'no message'}"
        run.log.say(f"an episode failed, group {first.group_id}: {run.log.failure}")
    if len(failed) > run.config.max_failures * metrics["samples"]:
        found = f"{len(failed)} of {metrics['samples']} episodes failed ({metrics['failures']})"
        allowed = f"more than --max-failures {run.config.max_failures}"
        raise TrainingStopped(f"{found}, {allowed}; the first: {run.log.failure}")
