"""books.py: what follows a training step: evaluation, samples, metrics, checks.

Left out: the end of a run (bench.py), what the numbers mean (learner.py, losses.py), and how lines
get to disk (runlog.py).
"""

from collections import Counter

from bench import batch_metrics, show_group
from buffer import unfit
from runtime.config import TrainingStopped
from runtime.messages import Group
from runtime.setup import Run, evaluate_now


def close_step(run: Run, groups: list[Group], metrics: dict) -> None:
    """A step is done: evaluate and show episodes where that is due, write its metrics, check it."""
    config, learner, log = run.config, run.learner, run.log
    version = learner.version
    metrics |= batch_metrics(run, groups, version - 1)
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
    check_step(run, groups, metrics)
    run.discarded.clear()
    run.verified.clear()


DEAD_SHARES = 3  # so many times the prompts of a step may be replaced because they teach nothing


def keep(run: Run, groups: list[Group]) -> list[Group]:
    """Those of some verified groups that may be trained; the others are discarded, and replaced by
    other prompts. TrainingStopped when too many samples fail.

    With --keep-dead no, what counts is the place of a prompt among those of its step: so the same
    ones are replaced whatever the order in which they land.
    """
    config, learner, kept = run.config, run.learner, []
    for group in groups:
        index, kind = divmod(group.group_id, len(learner.begun))
        late = index - learner.begun[kind] >= DEAD_SHARES * run.task.shares[kind]
        reason = unfit(group, keep_dead=late or config.keep_dead == "yes")
        if reason:
            run.discarded.append((group, reason))
        else:
            kept.append(group)
    run.verified += groups
    if len(run.verified) >= 4 * config.groups_per_step:  # there may never be another step
        check_failures(run, run.verified)
        run.verified.clear()
    return kept


def check_step(run: Run, groups: list[Group], metrics: dict) -> None:
    """Say what is wrong with a step; stop when three in a row were not finite, or too many episodes
    failed."""
    if in_row := run.learner.skipped_in_row:
        found = f"loss {metrics['loss']}, gradient norm {metrics['grad_norm']}"
        run.log.say(f"step {run.learner.version} changed no weights: {found}")
        if in_row >= 3:
            raise TrainingStopped(f"loss or gradient not finite {in_row} times in a row ({found})")
    check_failures(run, groups + [group for group, _ in run.discarded])


def check_failures(run: Run, groups: list[Group]) -> None:
    """Say what the first failed episode of a run died of; stop when too many did."""
    samples = [t for g in groups for t in g.trajectories]
    failed = [t for t in samples if t.failed]
    if failed and not run.log.failure:  # once a run: the first is the one to mend
        first = next((t for t in failed if t.failure), failed[0])
        run.log.failure = f"{first.finish}: {first.failure or 'no message'}"
        run.log.say(f"an episode failed, group {first.group_id}: {run.log.failure}")
    if len(failed) > run.config.max_failures * len(samples):
        kinds = dict(Counter(t.finish for t in failed))
        found = f"{len(failed)} of {len(samples)} episodes failed ({kinds})"
        allowed = f"more than --max-failures {run.config.max_failures}"
        raise TrainingStopped(f"{found}, {allowed}; the first: {run.log.failure}")
