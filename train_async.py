"""train_async.py: the same learner, with generation, verification and training all at once.

    python train_async.py                        # guess a number, from random weights
    python train_async.py --max-staleness 0      # bit by bit the weights of train_sync.py
    python train_async.py --swap recompute       # --help-all lists all flags

`learner_step` is the one of train_sync.py: what is learned does not change, only when. This file
adds what asynchrony needs: rollout and reward workers in their own processes, admission, weights
that are published while episodes run, and groups that are issued again when a worker dies.
With --max-staleness 0 exactly the groups of one version are outstanding, and a batch is in the
order of their numbers: so both trainers train the same batches (docs/design.md, "bit by bit").
Left out: how processes are kept (runtime/pool.py), set-up and end (runtime/run.py), ledger and
metrics (runtime/books.py).

Groups travel: admit -> rollout worker -> reward worker -> buffer -> learner; weights travel back
through the mailbox. The learner lives in the parent process, so nothing lies between a batch and
the weights that it changes. With `--reward-workers 0` a rollout worker verifies what it has
generated: quicker where there are two cores and the verifier is quick.
"""

from learner import learner_step, new_groups
from runtime.books import close_step, keep, log_discards, settle
from runtime.config import Config
from runtime.messages import Answer, Group, Judgement, Lost, Silent, apply_judgement
from runtime.pipes import Worker
from runtime.replay import replay
from runtime.run import Run, begin_run, end_run, log_spawn, running, save, take_up
from runtime.terminal import run_main


def train(config: Config) -> None:
    """The asynchronous algorithm: one loop that admits, collects, trains and publishes."""
    if config.replay:
        return replay(config)
    with running(config, "async") as run:
        config, learner, log = run.config, run.learner, run.log
        batch = None
        issue(run, "requeue", take_up(run))  # of a run that goes on
        admit(run)
        settle(run)
        begin_run(run)  # workers generate meanwhile
        while learner.version < config.steps and not run.stop.asked:
            admit(run)  # as long as every deadline still holds
            collect(run, 0.0 if batch else 0.2)  # finished groups, verdicts, deaths
            batch = run.buffer.next_batch(learner.version)  # none too old; None: wait
            log_discards(run)
            if batch is None:
                continue
            metrics = learn(run, batch)
            with log.timed("learner", "publish", version=learner.version):
                run.mailbox.publish(learner.version, learner.model.flat)
            admit(run)  # before anything slow
            settle(run)
            close_step(run, batch, metrics)
            if learner.version % config.checkpoint_every == 0:
                save(run)
        settle(run)
        log.close()
        save(run)
        end_run(run)  # before anything is torn down


def learn(run: Run, batch: list) -> dict:
    """A step of all learners on a batch; what the log says of it is enough to replay it."""
    learner = run.learner
    groups = [group.group_id for group in batch]
    with run.log.timed("learner", "train", version=learner.version, groups=groups) as event:
        for worker in run.pool.of("learner"):
            run.pool.tell(worker, batch)
        metrics = learner_step(learner, batch, run.config)
        event |= {name: metrics[name] for name in ("loss", "grad_norm")}
        event |= {"of": run.config.steps, "learners": learner.team.size}
    return metrics


def admit(run: Run) -> None:
    """Issue prompts as long as every deadline holds, and no more than the run will train."""
    groups = []
    version = run.learner.version
    wanted = (run.config.steps - version) * run.config.groups_per_step
    try:
        while len(run.buffer.outstanding) < wanted and run.buffer.may_admit(version):
            groups += new_groups(run.learner, run.task, 1)
            run.buffer.admit(groups[-1].group_id, version)
    finally:  # if a prompt cannot be made, those before it are issued
        issue(run, "admit", groups)


def issue(run: Run, event: str, groups: list) -> None:
    """Send groups to the rollout workers, and log who has which."""
    for group, name in zip(groups, run.pool.issue(groups), strict=True):
        run.log.event("learner", event, group=group.group_id, version=group.start, worker=name)


def collect(run: Run, seconds: float) -> None:
    """Handle everything that has happened, waiting at most `seconds` for the first."""
    arrived = run.pool.receive(seconds)
    for worker, message in arrived:
        handle(run, worker, message)
    if any(isinstance(message, Lost) for _, message in arrived):
        settle(run)  # once the groups of all of them are issued again


def handle(run: Run, worker: Worker, message) -> None:
    """What one message of a worker, or its death, changes."""
    last = f"(last: {worker.last_word}; log: {worker.log})"
    match message:
        case Answer(_, group, judgement, events):
            run.log.take(worker.name, events)
            if judgement:  # else the pool has sent it on to a reward worker
                land(run, group, judgement, worker.name)
        case Silent(reason):
            run.log.say(f"{worker.name} {reason} {last}")
        case Lost(reason, groups):
            run.log.say(f"{worker.name} {reason}: restarted {last}")
            run.log.event(worker.name, "exit", reason=reason)
            log_spawn(run, run.pool.workers[worker.name])
            generate_again(run, groups)


def land(run: Run, group: Group, judgement: Judgement, judged_by: str) -> None:
    """A group is generated and verified: it may be trained."""
    apply_judgement(group, judgement)
    if not run.buffer.complete(group):
        return  # a copy from before its group was issued again
    run.log.event(
        judged_by,
        "score",
        judgement.began,
        group=group.group_id,
        seconds=judgement.seconds,
        reward_model=judgement.reward_model,
        **group.evidence,
    )
    if not keep(run, [group]):
        run.buffer.discard(group.group_id, run.discarded[-1][1])
        log_discards(run)


def generate_again(run: Run, groups: list) -> None:
    """Groups that a rollout worker had not finished begin anew, with today's weights."""
    for group in groups:
        run.buffer.requeue(group.group_id, run.learner.version)
        group.start = run.learner.version
    issue(run, "requeue", groups)


if __name__ == "__main__":
    run_main(train, __doc__)
