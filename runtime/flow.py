"""flow.py: set-up, ledger and end of an asynchronous run.

Left out: what is done in which order, and what happens when a worker dies (train_async.py).
"""

import contextlib
import shutil
from collections import Counter
from dataclasses import dataclass, field, replace

import torch

from buffer import Buffer
from model import GPT
from reward import problem_of
from runtime import sessions, workers
from runtime.checkpoint import checkpoint, completed_groups
from runtime.config import Config, TrainingStopped, UserError
from runtime.devices import pick_devices
from runtime.eightbit import form_of
from runtime.ledger import BUFFER, WORKER
from runtime.mailbox import Mailbox
from runtime.messages import Answer, Group, flaw
from runtime.pipes import start_here
from runtime.processes import Pool, Worker
from runtime.setup import Run, open_training
from runtime.team import leave_team


@dataclass
class AsyncRun(Run):
    """What an asynchronous run has besides."""

    mailbox: Mailbox
    buffer: Buffer
    pool: Pool | None = None
    interrupted: list[Group] = field(default_factory=list)  # to be issued again, after a resume
    training: list[int] = field(default_factory=list)  # groups of the step that is computed now
    since: list[tuple] = field(default_factory=list)  # see `note_step` (runtime/learners.py)
    meetings: int = 0  # how often the learners have met anew
    deaths: Counter = field(default_factory=Counter)  # group -> verifiers that died of it
    lost: list[str] = field(default_factory=list)  # workers, and of what they died
    sessions: Counter = field(default_factory=Counter)  # of reward workers that were lost
    began: float = 0.0  # when the first group landed
    progress: tuple = (None, 0.0)  # what `check_progress` saw last, and when that changed

    def meeting_place(self) -> str:
        """Where the learners of a run find each other, this time."""
        if self.config.cluster:
            return self.mailbox.meeting_address()
        self.meetings += 1
        path = self.folder.resolve() / "checkpoints" / f"meeting-{self.meetings}"
        path.unlink(missing_ok=True)
        return f"file://{path}"

    @property
    def in_flight(self) -> list[int]:
        """Ids of all groups that are admitted and not trained: a checkpoint must not lose them."""
        return self.training + list(self.buffer.outstanding)


@contextlib.contextmanager
def open_async(config: Config):
    """An AsyncRun; what was in flight when a run was interrupted is to be issued again.

    Whatever goes wrong inside, every process is ended, and a checkpoint is written if it can be.
    """
    start = open_training(config, "async")
    config, learner, log, state = start.config, start.learner, start.log, start.state
    buffer = Buffer(start.task.shares, config.max_staleness, config.on_stale)
    try:
        mailbox = mailbox_of(config, learner.model)
        mailbox.publish(learner.version, learner.model.flat)
        run = AsyncRun(**vars(start), mailbox=mailbox, buffer=buffer)
        run.pool = start_workers(run)
    except OSError as error:  # too little shared memory, too many processes
        if not state:
            shutil.rmtree(start.folder)
        where = f"--cluster {config.cluster}" if config.cluster else f"--model {config.model}"
        raise UserError(f"{where}: {error.strerror}") from error
    if state:
        for group in completed_groups(state):
            buffer.restore(group)
        for group in sorted(set(state["in_flight"]) - buffer.completed.keys()):
            if run.ledger.states[group] != "lost":
                log.event("learner", "lost", group=group, reason="interrupted")
            buffer.admit(group, learner.version)
            problem = problem_of(run.task, group, "train")
            run.interrupted.append(Group(group, learner.version, problem))
    for worker in run.pool.workers.values():
        log_spawn(run, worker)
    try:
        yield run
    except BaseException:
        save_what_is(run)
        raise
    finally:
        run.pool.close()
        leave_team(learner.team)
        mailbox.close()
        for worker in run.pool.workers.values():
            log.event(worker.name, "exit", reason="end")
        log.flush()


def mailbox_of(config: Config, model: GPT):
    """Where published weights are put: memory of this machine, or of each node of a cluster."""
    form = form_of(model, config.published)
    if not config.cluster:
        return Mailbox(model.flat, form=form)
    from runtime.cluster import Mailboxes  # importing Ray takes a second

    return Mailboxes(form, config)


def start_workers(run: AsyncRun) -> Pool:
    """Spawn every process of the run."""
    config, shape = run.config, run.learner.model.config
    _, rollouts = pick_devices(config)
    judges = replace(config, threads=torch.get_num_threads())  # as many as a replay has
    roles = {
        "rollout": (workers.rollout_worker, len(rollouts), config, shape, run.mailbox.place),
        "reward": (sessions.reward_worker, config.reward_workers, judges),
        "learner": (workers.learner_worker, config.team_size - 1, config, shape),
    }

    def examine(answer: Answer, work: dict) -> str | None:
        allowed = run.mailbox.version, shape.vocab_size, config.cut
        return flaw(answer, work, config.group_size, *allowed)

    return Pool(
        roles,
        logs=run.folder / "logs",
        restarts=config.restarts,
        silence=config.silence,
        flaw=examine,
        start=run.mailbox.start if config.cluster else start_here,
    )


def log_spawn(run: AsyncRun, worker: Worker) -> None:
    """A worker was started; its end is an `exit`."""
    run.log.event(worker.name, "spawn", pid=worker.process.pid)


def settle(run: AsyncRun) -> None:
    """Read what happened into the ledger, write it to disk, and compare with what the trainer has:
    an error names the first group that is not where it must be."""
    for event in run.log.events:
        run.ledger.note(event)
    run.log.flush()
    places = dict.fromkeys(run.buffer.outstanding.keys() & run.pool.out().keys(), WORKER)
    run.ledger.balance(places | dict.fromkeys(run.buffer.completed, BUFFER))


def log_discards(run: AsyncRun) -> None:
    """Groups that were taken out untrained, and why."""
    version = run.learner.version
    for group, reason in run.buffer.dropped:
        run.log.event("learner", "discard", group=group, reason=reason, version=version)
    run.buffer.dropped.clear()


def save_what_is(run: AsyncRun) -> None:
    """A checkpoint of a run that cannot go on; not if its learners do not answer each other."""
    run.log.close()
    try:
        checkpoint(run.learner, run.folder, run.log, run.in_flight, run.buffer.completed.values())
    except TrainingStopped as error:
        run.log.say(f"no checkpoint of the last steps: {error}")
