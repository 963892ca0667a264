"""flow.py: the frame and the books of an asynchronous run: processes, ledger, progress, end.

Left out: what is done in which order, and what happens when a worker dies (train_async.py).
"""

import contextlib
import shutil
import time
from collections import Counter
from dataclasses import dataclass, field

import numpy as np

from buffer import Buffer, staleness
from runtime import workers
from runtime.books import close_step
from runtime.checkpoint import checkpoint, completed_groups
from runtime.config import Config, TrainingStopped, UserError
from runtime.devices import pick_devices
from runtime.ledger import BUFFER, TO_REISSUE, WORKER
from runtime.mailbox import Mailbox
from runtime.messages import Group, flaw
from runtime.processes import Pool, Worker, WorkersFailed
from runtime.setup import Run, open_training
from runtime.tokenizer import VOCAB_SIZE


@dataclass
class AsyncRun(Run):
    """What an asynchronous run has besides."""

    mailbox: Mailbox
    buffer: Buffer
    pool: Pool | None = None
    interrupted: list[int] = field(default_factory=list)  # groups to issue again, after a resume
    training: list[int] = field(default_factory=list)  # groups of the step that is computed now
    deaths: Counter = field(default_factory=Counter)  # group -> verifiers that died of it
    lost: list[str] = field(default_factory=list)  # workers, and of what they died
    begun: float = 0.0  # when the first group landed
    progress: tuple = (None, 0.0)  # what `check_progress` saw last, and when that changed

    @property
    def in_flight(self) -> list[int]:
        """Ids of all groups that are admitted and not trained: a checkpoint must not lose them."""
        return self.training + self.interrupted + list(self.buffer.outstanding)


@contextlib.contextmanager
def open_async(config: Config):
    """An AsyncRun; what was in flight when a run was interrupted is to be issued again.

    Whatever goes wrong inside, a checkpoint is written and every process is ended.
    """
    start = open_training(config, "async")
    config, learner, log, state = start.config, start.learner, start.log, start.state
    buffer = Buffer(config.groups_per_step, config.max_staleness, config.on_stale)
    try:
        mailbox = Mailbox(learner.model.flat.numel(), device=str(learner.model.flat.device))
        run = AsyncRun(**vars(start), mailbox=mailbox, buffer=buffer)
        mailbox.publish(learner.version, learner.model.flat)
        run.pool = start_workers(run)
    except OSError as error:  # too little shared memory, too many processes
        if not state:
            shutil.rmtree(start.folder)
        raise UserError(f"--model {config.model}: {error.strerror}") from error
    if state:
        for group in completed_groups(state):
            buffer.restore(group)
        run.interrupted = [group for group in state["in_flight"] if group not in buffer.completed]
        for group in sorted(run.interrupted):
            if run.ledger.states[group] != "lost":
                log.event("learner", "lost", group=group, reason="interrupted")
    for worker in run.pool.workers.values():
        log_spawn(run, worker)
    try:
        if config.learners > 1:
            workers.join_learners(config, 0, str(run.folder))
        yield run
    except BaseException as error:
        save(run)
        # a role is used up, or another learner has left an all-reduce
        left = isinstance(error, RuntimeError) and config.learners > 1
        if left or isinstance(error, WorkersFailed):
            raise TrainingStopped(str(error)) from error
        raise
    finally:
        run.pool.close()
        mailbox.close()
        for worker in run.pool.workers.values():
            log.event(worker.name, "exit", reason="end", code=worker.process.exitcode)
        log.flush()


def start_workers(run: AsyncRun) -> Pool:
    """Spawn every process of the run; what rollout workers finish goes on to the reward workers."""
    config, folder, shape = run.config, run.folder, run.learner.model.config
    learners, rollouts = pick_devices(config)
    processes = len(learners) + len(rollouts)
    orders = {"rollout": [], "reward": [(config,)] * config.reward_workers, "learner": []}
    for device in rollouts:
        orders["rollout"].append((config, shape, device, run.mailbox.place, processes))
    for rank, device in enumerate(learners[1:], start=1):
        orders["learner"].append((config, shape, device, str(folder), processes, rank))
    workers.meeting_point(folder).unlink(missing_ok=True)  # of a run that is resumed
    roles = {role: (getattr(workers, f"{role}_worker"), orders[role]) for role in orders}

    def found(message, work: dict) -> str | None:
        allowed = {"newest": run.mailbox.version, "vocabulary": VOCAB_SIZE}
        return flaw(message, work, group_size=config.group_size, **allowed)

    then = {"rollout": "reward"} if config.reward_workers else {}
    limits = {"restarts": config.restarts, "silence": config.silence}
    return Pool(roles, logs=folder / "logs", then=then, flaw=found, **limits)


def log_spawn(run: AsyncRun, worker: Worker) -> None:
    """A worker was started; its end is an `exit`."""
    run.log.event(worker.name, "spawn", worker.spawned, pid=worker.process.pid)


def settle(run: AsyncRun) -> None:
    """Read what happened into the ledger, write it to disk, and compare with what the trainer has:
    an error names the first group that is not where it must be."""
    for event in run.log.events:
        run.ledger.note(event)
    run.log.flush()
    out = run.pool.out()
    places = {group: WORKER for group in run.buffer.outstanding if group in out}
    places |= dict.fromkeys(run.buffer.completed, BUFFER)
    run.ledger.balance(places | dict.fromkeys(run.interrupted, TO_REISSUE))


def log_discards(run: AsyncRun) -> None:
    """Groups that were too old, with --on-stale drop."""
    for group, reason in run.buffer.dropped:
        facts = {"group": group, "reason": reason, "version": run.learner.version}
        run.log.event("learner", "discard", **facts)
    run.buffer.dropped.clear()


def close_async_step(run: AsyncRun, batch: list[Group], version: int, metrics: dict) -> None:
    """The books of a step that has trained `version`, and what the progress bar shows."""
    settle(run)
    ages = [staleness(t, version) for group in batch for t in group.trajectories]
    metrics |= {"staleness_max": max(ages), "staleness_mean": float(np.mean(ages))}
    shown = f"{metrics['staleness_mean']:.1f}<={run.config.max_staleness}"
    close_step(run, batch, metrics, run.in_flight, run.buffer.completed.values(), age=shown)


def save(run: AsyncRun) -> None:
    """A checkpoint of a run that ends."""
    run.log.close()
    completed = run.buffer.completed.values()
    checkpoint(run.learner, run.folder, run.log, run.in_flight, completed)


def facts_of_flow(run: AsyncRun) -> dict:
    """What only an asynchronous run can say about itself, for its summary."""
    seconds = time.monotonic() - (run.begun or run.log.start)
    told = [worker.status for worker in run.pool.of("rollout") if worker.status]
    busy = [status["busy"] / status["alive"] for status in told]
    return {
        "staleness_bound": run.config.max_staleness,
        "utilization": {
            "rollout": sum(busy) / max(1, len(busy)),
            "learner": run.log.seconds["train"] / seconds,
        },
        "ledger": run.ledger.totals(),
        "workers_lost": run.lost,
    }
