"""run.py: a run is opened and ended here: folder, configuration, model, learner, logs, exit code.

`open_run` makes what both trainers work with, new or resumed; `open_async` adds the processes and
what they share. `end_run` closes with the summary, the pictures and the verdict (report.py).
Left out: what a step does (learner.py), what follows it (books.py), the flags (config.py).
"""

import contextlib
import gc
import os
import time
from collections.abc import Callable
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import TextIO

import torch
from tqdm import tqdm

from buffer import Buffer
from fast.eightbit import form_of
from learner import Learner, make_learner
from model import GPT
from reward import Task, own_files, problem_of, task_of
from runtime import workers
from runtime.advice import judge_of
from runtime.checkpoint import (
    checkpoint_path,
    completed_groups,
    drop_what_follows,
    load_checkpoint,
    named_files,
    restore,
    save_checkpoint,
    sha256_of,
    state_of,
)
from runtime.config import SIZES, AttemptLost, Config, check, require, written
from runtime.devices import own_gpus, pick_devices, quick_dtype, set_threads
from runtime.exam import evaluate
from runtime.folder import own_folder
from runtime.ledger import LOST, Ledger, read_books
from runtime.mailbox import Mailbox
from runtime.messages import Answer, Group, flaw
from runtime.models import make_model
from runtime.pipes import Worker, start_here
from runtime.pool import Pool
from runtime.report import busy_shares, summarise
from runtime.runlog import RunLog, Stop, new_folder, stored_config, write_config
from runtime.team import Begin, GatherMoments, join_team, leave_team
from runtime.terminal import printable
from runtime.verifier import exam_pool, reward_worker

# what train_sync.py needs: one process, one model
ONLY_SYNC = {"replay": ("",), "cluster": ("",), "rollout_weights": ("float32",), "learners": (0, 1)}
# flags that a run may have anew when it goes on
MAY_CHANGE = ("steps", "learners", "rollout_workers", "cluster")


@dataclass
class Run:
    """What both trainers work with."""

    config: Config
    task: Task
    folder: Path
    lock: TextIO  # while it is open, the folder is this process's
    learner: Learner
    log: RunLog
    stop: Stop
    exam: Pool  # of evaluations, and of what train_sync.py has outside
    judge: Callable
    ledger: Ledger
    state: dict | None  # the checkpoint with which it goes on
    buffer: Buffer
    verified: list[Group] = field(default_factory=list)  # since failures were counted last
    # those that were not to be trained, and why
    discarded: list[tuple[Group, str]] = field(default_factory=list)
    # the rest is of asynchronous runs
    mailbox: Mailbox = None
    pool: Pool = None
    interrupted: list[Group] = field(default_factory=list)  # to be issued again, after a resume
    training: list[int] = field(default_factory=list)  # groups of the step that is computed now
    lost: list[str] = field(default_factory=list)  # workers, and of what they died
    began: float = 0.0  # when the first group landed
    progress: tuple = (None, 0.0)  # what `check_progress` saw last, and when that changed

    @property
    def in_flight(self) -> list[int]:
        """Ids of all groups that are admitted and not trained: a checkpoint must not lose them."""
        return self.training + list(self.buffer.outstanding)


def open_run(config: Config, mode: str) -> Run:
    """Everything a trainer needs, new or resumed; the first evaluation and checkpoint of a new run.

    mode: "sync" or "async". Nothing on disk changes before everything was checked. UserError.
    """
    state, ledger, lock = None, Ledger(), None
    if config.resume:
        folder = Path(config.resume)
        config, record = resumed(config)
        require(record["mode"] == mode, f"--resume {folder}: must be a run of train_{mode}.py")
        lock = own_folder(folder)
        state = load_checkpoint(folder)
        if mode == "async":
            ledger = read_books(folder / "events.jsonl", state["marks"]["events"][0])
    config = resolved(config, mode, goes_on=bool(state))
    learners, rollouts = pick_devices(config)
    if config.dtype == "auto":
        config = replace(config, dtype=quick_dtype(learners[0]))
        print(f"--dtype auto: {config.dtype}, the quickest on {learners[0]}")
    set_threads(config, 1 if mode == "sync" else len(learners) + len(rollouts), learners[0])
    task = task_of(config)
    if mode == "sync" and own_files(config.task):
        task = replace(
            task, outside=True
        )  # what its code does to a process must not reach this one
    served = config.reward_workers or mode == "sync"
    must = f"--reward-workers 0: must be at least 1 for {config.task}, whose steps run there"
    require(served or not task.outside, must)
    config = replace(config, steps=config.steps or task.steps)
    judge = judge_of(config, task)
    learner = make_learner(config, task, make_model(config, task, state).on(learners[0]))
    if state:
        restore(learner, state, config, ledger)
    gc.freeze()  # libraries and weights stay: to look them through again takes 8% of a step
    gc.set_threshold(50_000)  # groups that arrive are no garbage: the parent takes 11% more of them
    files = {"files": named_files(config)}
    opened = contextlib.nullcontext((folder, lock)) if state else new_folder(config, mode, files)
    with opened as (folder, lock):
        if state:
            drop_what_follows(folder, state)
            changed = {name: getattr(config, name) for name in MAY_CHANGE}
            write_config(folder, record | changed | files)
        exam = exam_pool(config, task, folder / "logs")
        log = RunLog(folder, config, state)
        buffer = Buffer(config.groups_per_step, config.max_staleness, config.on_stale)
        run = Run(
            config, task, folder, lock, learner, log, Stop(), exam, judge, ledger, state, buffer
        )
        if state:
            rates = [config.lr * (1 - learner.version / x) for x in (record["steps"], config.steps)]
            words = "what came later is done again, the learning rate was {:.2g} and is {:.2g}"
            log.say(f"{folder} goes on at step {learner.version}; {words.format(*rates)}")
            return run
        try:
            log.metrics({"step": 0, "eval": evaluate_now(run)}, at=0.0)
            save(run)  # so that a run can always be resumed
        except BaseException:
            log.close()  # the error is the last line on the screen
            exam.close()
            raise
    return run


def resolved(config: Config, mode: str, goes_on: bool) -> Config:
    """The config with absolute paths, a fixed teacher and a cluster that answers."""
    names = ("teacher", "reward_model") + ("model",) * (config.model not in SIZES)
    paths = {name: getattr(config, name) for name in names}
    absolute = {name: os.path.abspath(path) for name, path in paths.items() if path}
    config = replace(config, **absolute)  # a run may go on from another folder
    if config.threads < 0:
        config = replace(config, threads=int(config.model in SIZES))
    if config.teacher and not goes_on:
        from methods.distillation import pinned  # the newest checkpoint that there is now

        config = pinned(config)
    if config.cluster:
        from runtime.cluster import open_cluster  # it takes a second, and needs Ray

        config = open_cluster(config)
    return config


def resumed(config: Config, flag: str = "resume") -> tuple[Config, dict]:
    """The configuration of the run to resume (or to replay), and all that its config.json holds.

    Only the flags in MAY_CHANGE may change, and only to resume. A folder may come from somebody
    else: it runs code of a file only if the user names that file, too. Raises UserError.
    """
    folder = Path(getattr(config, flag))
    old, stored = stored_config(folder, f"--{flag}")
    free = {"resume", *MAY_CHANGE} if flag == "resume" else {flag}
    free.add("changed_data")
    for f in fields(Config):
        given, had = getattr(config, f.name), getattr(old, f.name)
        must = f"{written(f.name, given)}: must be left out with --{flag} (the run has {had})"
        require(f.name in free or given in (f.default, had), must)
    known = config.task == old.task or not own_files(old.task)
    require(known, f"--{flag} {folder}: must be given --task {old.task}, whose code it runs")
    there = named_files(old)
    odd = [name for name, digest in stored.get("files", {}).items() if there.get(name) != digest]
    must = "must be as they were when the run began, or --changed-data yes"
    require(not odd or config.changed_data == "yes", f"{', '.join(odd)}: {must}")
    changed = {name: getattr(config, name) or getattr(old, name) for name in free}
    changed["cluster"] = config.cluster  # no folder makes anybody connect to a machine
    return check(replace(old, **changed)), stored


def evaluate_now(run: Run) -> dict:
    """Evaluate the learner; what has failed is said."""
    result = evaluate(run.learner, run.config, run.task, run.exam)
    for reason, (count, words) in result["failures"].items():
        run.log.say(f"evaluation: {count} failed, {': '.join(filter(None, (reason, words)))}")
    return result


def end_run(run: Run) -> None:
    """The evaluations that were put off (eval_when), then summary, pictures, verdict.

    Kept weights are in memory only: a run that was killed has lost these evaluations.
    """
    config, learner, log = run.config, run.learner, run.log
    facts = {
        "task": config.task,
        "seed": config.seed,
        "steps": learner.version,
        "stopped_early": learner.version < config.steps,
        "wall_s": round(log.close(), 2),
        "weights_sha256": sha256_of(learner.weights),
        "utilization": busy_shares(run),
        "staleness_bound": 0,
    }
    if run.pool:
        facts |= {"ledger": run.ledger.totals(), "workers_lost": run.lost}
        facts["staleness_bound"] = config.max_staleness
    for seconds, version, weights in tqdm(log.kept, "evaluations", disable=not log.kept):
        learner.model.flat.copy_(weights)
        log.metrics({"step": version, "eval": evaluate_now(run)}, at=seconds)
    run.exam.close()
    print(printable(summarise(run.folder, facts)))


def exit_code(run: Run) -> None:
    """A run that a signal has stopped says so to whoever has started it: 130 for Ctrl-C, 143 for
    SIGTERM."""
    if run.learner.version < run.config.steps:
        raise SystemExit(128 + run.stop.asked)


@contextlib.contextmanager
def open_sync(config: Config):
    """A run of train_sync.py; whatever goes wrong inside, what its last whole step has left is
    saved."""
    for name, allowed in ONLY_SYNC.items():
        given = written(name, value := getattr(config, name))
        require(value in allowed, f"{given}: must be {allowed[-1] or 'left out'} in train_sync.py")
    run = open_run(config, "sync")
    try:
        yield run
    except BaseException:
        run.learner.cursor = run.learner.begun
        save_what_is(run)
        raise
    finally:
        run.exam.close()


# ---------------------------------------------------------------------------- an asynchronous run


@contextlib.contextmanager
def open_async(config: Config):
    """An asynchronous run; what was in flight when it was interrupted is to be issued again.

    Whatever goes wrong inside, every process is ended, and a checkpoint is written if it can be.
    """
    run = open_run(config, "async")
    config, learner, log = run.config, run.learner, run.log
    run.mailbox = mailbox_of(config, learner.model)
    run.mailbox.publish(learner.version, learner.model.flat)
    run.pool = start_workers(run)
    if run.state:
        take_up(run, run.state)
    for worker in run.pool.workers.values():
        log_spawn(run, worker)
    try:
        if learner.team.size > 1:
            open_team(run)
        yield run
    except BaseException as error:
        if isinstance(error, AttemptLost):
            error.run = run.folder, config
        save_what_is(run)
        raise
    finally:
        run.pool.close()
        run.exam.close()
        leave_team()
        run.mailbox.close()
        for worker in run.pool.workers.values():
            log.event(worker.name, "exit", reason="end")
        log.flush()


def open_team(run: Run) -> None:
    """Wait until all learners are there; they begin with the newest checkpoint."""
    workers, config, learner = run.pool.of("learner"), run.config, run.learner
    while any(worker.last_word == "spawn" for worker in workers) and not run.pool.closing:
        time.sleep(0.05)
    meeting = run.folder.resolve() / "checkpoints" / "meeting"
    meeting.unlink(missing_ok=True)
    address = run.mailbox.meeting_address() if config.cluster else f"file://{meeting}"
    stored = checkpoint_path(run.folder, learner.version).read_bytes()[:-32]
    begin = Begin(address, own_gpus(config), stored)
    for worker in workers:
        run.pool.tell(worker, begin)
    join_team(learner.team, begin)


def send_batch(run: Run, batch: list[Group]) -> None:
    """The other learners get the batch that this one is about to train."""
    for worker in run.pool.of("learner"):
        run.pool.tell(worker, batch)


def save(run: Run) -> None:
    """A checkpoint; not of a step whose metrics could not be written: it is done again."""
    learner, log, version = run.learner, run.log, run.learner.version
    if log.written != version:
        return
    for worker in run.pool.of("learner") if learner.team.apart and version else ():
        run.pool.tell(worker, GatherMoments())
    state = state_of(learner, run.in_flight, run.buffer.completed.values())
    log.event("learner", "checkpoint", version=version, groups=run.in_flight)
    state |= {"marks": log.sync(), "seconds": log.now()}
    save_checkpoint(run.folder, version, state)


def take_up(run: Run, state: dict) -> None:
    """The groups of a checkpoint: complete ones wait to be trained, others begin again."""
    for group in completed_groups(state):
        run.buffer.restore(group)
    for group_id in sorted(set(state["in_flight"]) - run.buffer.completed.keys()):
        if run.ledger.states[group_id] != LOST:
            run.log.event("learner", "lost", group=group_id, reason="interrupted")
        run.buffer.admit(group_id, run.learner.version)
        problem = problem_of(run.task, group_id, "train")
        run.interrupted.append(Group(group_id, run.learner.version, problem))


def mailbox_of(config: Config, model: GPT):
    """Where published weights are put: memory of this machine, or of each node of a cluster."""
    form = form_of(model, config.published)
    if not config.cluster:
        return Mailbox(model.flat, form=form)
    from runtime.cluster import ClusterMailbox  # importing Ray takes a second

    return ClusterMailbox(form, config)


def start_workers(run: Run) -> Pool:
    """Spawn every process of the run."""
    config, shape = run.config, run.learner.model.config
    _, rollouts = pick_devices(config)
    judges = replace(config, threads=torch.get_num_threads())  # as many as a replay has
    roles = {
        "rollout": (workers.rollout_worker, len(rollouts), config, shape, run.mailbox.reader),
        "reward": (reward_worker, config.reward_workers, judges),
        "learner": (workers.learner_worker, config.team_size - 1, config, shape),
    }

    def wrong(answer: Answer, asked: Group) -> str | None:
        return flaw(answer, asked, config.group_size, run.mailbox.version, shape.vocab_size)

    return Pool(
        roles,
        config,
        logs=run.folder / "logs",
        flaw=wrong,
        start=run.mailbox.start if config.cluster else start_here,
    )


def log_spawn(run: Run, worker: Worker) -> None:
    """A worker was started; its end is an `exit`."""
    run.log.event(worker.name, "spawn", pid=worker.process.pid)


def save_what_is(run: Run) -> None:
    """A checkpoint of a run that cannot go on; several learners may not answer each other."""
    try:
        if run.learner.team.size == 1:
            save(run)
    finally:
        run.log.close()
