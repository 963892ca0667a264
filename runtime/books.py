"""books.py: what follows a training step: evaluation, samples, metrics, checks.

Left out: the end of a run (report.py), what the numbers mean (learner.py, losses.py), and how lines
get to disk (runlog.py).
"""

from collections import Counter
from statistics import fmean

from buffer import staleness, unfit
from reward import Task
from runtime.config import TrainingStopped
from runtime.ledger import BUFFER, WORKER
from runtime.messages import Group
from runtime.run import Run, evaluate_now

DEAD_STEPS = 3  # prompts of so many steps may be replaced because they teach nothing
SAMPLES_EVERY = 30  # steps between printed episodes


def keep(run: Run, groups: list[Group]) -> list[Group]:
    """Those of some verified groups that may be trained; the others are discarded, and replaced by
    other prompts. TrainingStopped when too many samples fail.

    With --keep-dead no, dead groups are replaced. So that this ends, a dead group is trained after
    all if its number is DEAD_STEPS steps' worth of prompts, or more, beyond this step's first.
    """
    config, kept = run.config, []
    for group in groups:
        enough = group.group_id - run.learner.begun >= DEAD_STEPS * config.groups_per_step
        if reason := unfit(group, keep_dead=enough or config.keep_dead == "yes"):
            run.discarded.append((group, reason))
        else:
            kept.append(group)
    run.verified += groups
    if len(run.verified) >= config.groups_per_step:
        check_failures(run)
    return kept


def close_step(run: Run, groups: list[Group], metrics: dict) -> None:
    """A step is done: evaluate and show episodes where that is due, and write its metrics.

    Says when a step was not finite, and stops when three in a row were not.
    """
    config, learner, log = run.config, run.learner, run.log
    version = learner.version
    metrics |= batch_metrics(run, groups, version - 1)
    due = version % config.eval_every == 0 or version == config.steps
    if due and config.eval_when == "late":
        log.kept.append((log.now(), version, learner.model.flat.clone()))
    elif due:
        metrics["eval"] = evaluate_now(run)
        log.bar.set_description(f"solved {metrics['eval']['solved']:.0%}", refresh=False)
    if version % SAMPLES_EVERY == 0:
        text = show_group(groups[0], run.task)
        log.say(text)
        log.logs["samples"].append([{"version": version, "text": text}])
    log.step({"step": version, **metrics})
    run.discarded.clear()
    if learner.skipped:
        text = f"loss {metrics['loss']}, gradient norm {metrics['grad_norm']}"
        log.say(f"step {version} changed no weights: {text}")
        if learner.skipped >= 3:
            raise TrainingStopped(f"loss or gradient not finite 3 times in a row ({text})")


def settle(run: Run) -> None:
    """Read what happened into the ledger, write it to disk, and compare with what the trainer has:
    an error names the first group that is not where it must be."""
    for event in run.log.events:
        run.ledger.note(event)
    run.log.flush()
    places = dict.fromkeys(run.buffer.outstanding.keys() & run.pool.out.keys(), WORKER)
    run.ledger.balance(places | dict.fromkeys(run.buffer.completed, BUFFER))


def log_discards(run: Run) -> None:
    """Groups that were taken out untrained, and why."""
    version = run.learner.version
    for group, reason in run.buffer.dropped:
        run.log.event("learner", "discard", group=group, reason=reason, version=version)
    run.buffer.dropped.clear()


def batch_metrics(run: Run, groups: list[Group], version: int) -> dict:
    """What can be said of a batch that has trained `version` without a look at the policy, and of
    the groups that were discarded since the last one."""
    trajectories = [t for group in groups for t in group.trajectories]
    rewards = [t.reward for t in trajectories if not t.failed]
    ages = [staleness(t, version) for t in trajectories]
    discarded = [t for group, _ in run.discarded for t in group.trajectories]
    return {
        "reward": fmean(rewards or [0.0]),
        "samples": len(trajectories),
        "cut": fmean(t.finish in ("length", "overlong") for t in trajectories),
        "answer_tokens": fmean(t.generated for t in trajectories),
        "failures": dict(Counter(t.finish for t in trajectories + discarded if t.failed)),
        "discarded": dict(Counter(reason for _, reason in run.discarded)),
        "staleness_max": max(ages),
        "staleness_mean": fmean(ages),
    }


def show_group(group: Group, task: Task) -> str:
    """One line: the text of a group's first episode, its versions and its reward."""
    t = group.trajectories[0]
    text = task.tokenizer.decode_bytes(t.tokens.tolist()).decode(errors="replace")
    if len(text) > 100:
        text = f"{text[:60]} ... {text[-40:]}"
    facts = f"reward {t.reward:.2f}  versions {t.swaps[1::2]}  {t.finish}"
    return f"  group {t.group_id}  [{text!r}]  {facts}"


def check_failures(run: Run) -> None:
    """Say what the first failed episode of a run died of; stop when too many of a step's did."""
    samples = [t for group in run.verified for t in group.trajectories]
    failed = [t for t in samples if t.failed]
    if failed and not run.log.failure:  # once a run: the first is the one to mend
        first = failed[0]
        run.log.failure = f"{first.finish}: {first.failure or 'no message'}"
        run.log.say(f"an episode failed, group {first.group_id}: {run.log.failure}")
    if len(failed) > run.config.max_failures * len(samples):
        reasons = dict(Counter(t.finish for t in failed))
        text = f"{len(failed)} of {len(samples)} episodes failed ({reasons})"
        allowed = f"more than {run.config.max_failures} of them (--set max_failures)"
        raise TrainingStopped(f"{text}, {allowed}; the first: {run.log.failure}")
    run.verified.clear()
