"""run.py: a run is opened and ended here: folder, configuration, model, learner, logs, exit code.

`open_run` makes what both trainers work with, new or resumed; `running` adds the processes, and is
there when something goes wrong. `end_run` writes summary, pictures and verdict (report.py).
Left out: what a step does (learner.py), what follows it (books.py), the flags (config.py).
"""

import contextlib
import gc
import os
import time
from collections.abc import Callable
from dataclasses import dataclass, field, fields, replace
from pathlib import Path

import torch
from tqdm import tqdm

from buffer import Buffer
from fast.eightbit import form_of
from learner import Learner, make_learner
from reward import Task, own_files, problem_of, task_of
from runtime import workers
from runtime.checkpoint import (
    checkpoint_path,
    load_checkpoint,
    restore,
    save_checkpoint,
    sha256_of,
    state_of,
)
from runtime.config import SIZES, AttemptLost, Config, check, require, written
from runtime.devices import own_gpus, pick_devices, quick_dtype, set_threads, take_place
from runtime.exam import evaluate
from runtime.folder import own_folder
from runtime.judge import judge_of
from runtime.ledger import Ledger, read_books
from runtime.mailbox import Mailbox
from runtime.messages import Group, flaw
from runtime.models import make_model
from runtime.pipes import Worker, start_here
from runtime.pool import Pool
from runtime.report import summarise
from runtime.runlog import RunLog, Stop, new_folder, stored_config, write_config
from runtime.team import Begin, join_team, leave_team
from runtime.terminal import printable
from runtime.verifier import exam_pool, reward_worker

# flags that train_sync.py does not have: it is one process with one model
ONLY_ASYNC = ("replay", "cluster", "rollout_weights", "learners")
# flags that a run may have anew when it goes on, or is played again
FREE = {
    "resume": ("resume", "steps", "learners", "rollout_workers", "cluster"),
    "replay": ("replay",),
}


@dataclass
class Run:
    """What both trainers work with."""

    config: Config
    task: Task
    folder: Path
    learner: Learner
    log: RunLog
    stop: Stop
    exam: Pool  # for evaluations, and for environments that train_sync.py has outside
    judge: Callable
    ledger: Ledger
    state: dict | None  # the checkpoint with which it goes on
    buffer: Buffer
    verified: list = field(default_factory=list)  # groups, since failures were counted last
    discarded: list = field(default_factory=list)  # (group that is not to be trained, and why)
    # the rest is of asynchronous runs
    mailbox: Mailbox = None
    pool: Pool = None


def open_run(config: Config, mode: str) -> Run:
    """Everything a trainer needs, new or resumed.

    mode: "sync" or "async". Nothing on disk changes before everything was checked. UserError.
    """
    stop, state, ledger = Stop(), None, Ledger()
    is_sync = mode == "sync"
    if config.resume:
        folder = Path(config.resume)
        config = resumed(config, mode=mode)
        own_folder(folder)
        state = load_checkpoint(folder)
        if not is_sync:
            ledger = read_books(folder / "events.jsonl", state["marks"]["events"])
    for name in ONLY_ASYNC if is_sync else ():
        value = getattr(config, name)
        must = f"{written(name, value)}: must be left out in train_sync.py"
        require(value == getattr(Config, name), must)
    for name in ("init", "teacher", "reward_model") + ("model",) * (config.model not in SIZES):
        if path := getattr(config, name):  # a run may go on from another folder
            config = replace(config, **{name: os.path.abspath(path)})
    if config.threads < 0:
        config = replace(config, threads=int(config.model in SIZES))
    if config.cluster:
        from runtime.cluster import open_cluster  # it takes a second, and needs Ray

        config = open_cluster(config)
    device = take_place(config, 0)
    if config.dtype == "auto":
        config = replace(config, dtype=quick_dtype(device))
        print(f"--dtype auto: {config.dtype}, the quickest on {device}")
    if config.teacher:
        from methods.distillation import pinned  # the newest checkpoint that there is now

        config = pinned(config)
    task = task_of(config)
    if is_sync:
        set_threads(config, 1, device)
        # what its code does to a process must not reach this one
        task = replace(task, outside=task.outside or bool(own_files(config.task)))
    must = f"--reward-workers 0: must be at least 1 for {config.task}, whose steps run there"
    require(config.reward_workers or is_sync or not task.outside, must)
    config = replace(config, steps=config.steps or task.steps)
    judge = judge_of(config, task)
    learner = make_learner(config, task, make_model(config, task, state).on(device))
    if state:
        restore(learner, state, config)
    gc.freeze()  # libraries and weights stay: to look them through again takes 8% of a step
    gc.set_threshold(50_000)  # groups that arrive are no garbage: the parent takes 11% more of them
    if state:
        for path in (folder / "checkpoints").glob("step*"):
            if path > checkpoint_path(folder, learner.version):
                path.unlink()  # it is done again, as are the ends of the logs
        (folder / "summary.json").unlink(missing_ok=True)
    else:
        folder = new_folder(config, mode)
    write_config(folder, config, mode)
    exam = exam_pool(config, task, folder / "logs")
    log = RunLog(folder, config, state)
    if state:
        log.say(f"{folder} goes on at step {learner.version}; what came later is done again")
    buffer = Buffer(config.groups_per_step, config.max_staleness, config.on_stale)
    return Run(config, task, folder, learner, log, stop, exam, judge, ledger, state, buffer)


def resumed(config: Config, flag: str = "resume", mode: str = "sync") -> Config:
    """The configuration of the run to resume (or to replay).

    Only the flags in FREE may change. A folder may come from somebody else: it runs code of a file
    only if the user names that file, too. Raises UserError.
    """
    folder = Path(getattr(config, flag))
    old, trained = stored_config(folder, f"--{flag}")
    require(trained == mode, f"--{flag} {folder}: must be a run of train_{mode}.py")
    for f in fields(Config):
        given, had = getattr(config, f.name), getattr(old, f.name)
        must = f"{written(f.name, given)}: must be left out with --{flag} (the run has {had})"
        require(f.name in FREE[flag] or given in (f.default, had), must)
    known = config.task == old.task or not own_files(old.task)
    require(known, f"--{flag} {folder}: must be given --task {old.task}, whose code it runs")
    changed = {name: getattr(config, name) or getattr(old, name) for name in FREE[flag]}
    changed["cluster"] = config.cluster  # no folder makes anybody connect to a machine
    return check(replace(old, **changed))


def evaluate_now(run: Run) -> dict:
    """Evaluate the learner; what has failed is said."""
    result = evaluate(run.learner, run.config, run.task, run.exam)
    for reason, words in result["failures"].items():
        run.log.say(f"an evaluation failed: {reason}: {words}")
    return result


def begin_run(run: Run) -> None:
    """The first evaluation, and a checkpoint, so that a run can always be resumed. Then several
    learners meet."""
    if not run.state:
        run.log.metrics({"t": 0.0, "step": 0, "eval": evaluate_now(run)})
        run.log.written = 0
        save(run)
    if run.learner.team.size > 1:
        open_team(run)


def end_run(run: Run) -> None:
    """The evaluations that were put off (eval_when), then summary, pictures, verdict.

    Kept weights are in memory only: a run that was killed has lost all but the last of these.
    """
    config, learner, log = run.config, run.learner, run.log
    facts = {
        "steps": learner.version,
        "stopped_early": learner.version < config.steps,
        "wall_s": log.close(),
        "weights_sha256": sha256_of(learner.weights),
        "staleness_bound": config.max_staleness if run.pool else 0,
    }
    if run.pool:
        facts["ledger"] = run.ledger.totals()
    log.written = -1  # what is on disk stays: the weights of a kept evaluation are older
    if config.eval_when == "late" and learner.version == config.steps and not log.kept:
        log.kept.append((facts["wall_s"], learner.version, learner.model.flat.clone()))
    for seconds, version, weights in tqdm(log.kept, "evaluations", disable=not log.kept):
        learner.model.flat.copy_(weights)
        log.metrics({"t": seconds, "step": version, "eval": evaluate_now(run)})
    run.exam.close()
    print(printable(summarise(run.folder, facts)))


@contextlib.contextmanager
def running(config: Config, mode: str):
    """A run of train_sync.py or train_async.py (mode: "sync" or "async").

    Whatever goes wrong inside, every process is ended, and a checkpoint of the last whole step is
    written if it can be. A run that a signal has stopped ends the program with 128 + its number.
    """
    run = open_run(config, mode)
    learner, log = run.learner, run.log
    if mode == "async":
        start_workers(run)
    try:
        yield run
    except BaseException as error:
        error.run = run.folder, run.config  # AttemptLost: where the next attempt begins
        if mode == "sync":
            learner.cursor = learner.begun  # what has been generated for the next step is lost
        try:
            save(run)
        except Exception as failed:
            log.say(f"no checkpoint could be written: {failed}")
        finally:
            log.close()  # the error is the last line on the screen
        if isinstance(error, AttemptLost) and run.stop.asked:  # its signal has reached a learner
            raise SystemExit(128 + run.stop.asked) from error
        raise
    finally:
        run.exam.close()
        if mode == "async":
            run.pool.close()
            leave_team()
            run.mailbox.close()
            for worker in run.pool.workers.values():
                log.event(worker.name, "exit", reason="end")
            log.flush()
    if learner.version < run.config.steps:
        raise SystemExit(128 + run.stop.asked)


# ---------------------------------------------------------------------------- an asynchronous run


def open_team(run: Run) -> None:
    """The other learners get what a checkpoint holds; when all have it, they meet."""
    workers, config, learner = run.pool.of("learner"), run.config, run.learner
    state = run.state or state_of(learner)
    for worker in workers:
        run.pool.tell(worker, state)
    while not all("loaded" in worker.status for worker in workers):
        if any(isinstance(message, Exception) for _, message in run.pool.news):
            run.pool.receive(0.0)  # raises it
        time.sleep(0.05)
    meeting = run.folder.resolve() / "checkpoints" / "meeting"
    meeting.unlink(missing_ok=True)
    address = run.mailbox.meeting_address() if config.cluster else f"file://{meeting}"
    begin = Begin(address, own_gpus(config), config.silence)
    for worker in workers:
        run.pool.tell(worker, begin)
    join_team(learner.team, begin)


def save(run: Run) -> None:
    """A checkpoint; not of a step whose metrics could not be written: it is done again."""
    learner, log, version = run.learner, run.log, run.learner.version
    if log.written != version:
        return
    log.event("learner", "checkpoint", version=version)
    state = state_of(learner) | {"marks": log.sync(), "seconds": log.now()}
    save_checkpoint(run.folder, version, state)


def take_up(run: Run) -> list[Group]:
    """What was under way in a run that goes on begins again, also what waited to be trained."""
    groups, version = [], run.learner.version
    for group_id in sorted(run.ledger.flying):
        run.buffer.admit(group_id, version)
        groups.append(Group(group_id, version, problem_of(run.task, group_id, "train")))
    return groups


def start_workers(run: Run) -> None:
    """Publish the first weights, and start every process."""
    config, model = run.config, run.learner.model
    form, start = form_of(model, config.published), start_here
    if config.cluster:
        from runtime.cluster import ClusterMailbox  # importing Ray takes a second

        run.mailbox = ClusterMailbox(form, config)
        start = run.mailbox.start
    else:
        run.mailbox = Mailbox(model.flat, form=form)
    run.mailbox.publish(run.learner.version, model.flat)
    _, rollouts = pick_devices(config)
    judges = replace(config, threads=torch.get_num_threads())  # as many as a replay has
    open_mailbox = run.mailbox.reader
    roles = {
        "rollout": (workers.rollout_worker, len(rollouts), config, model.config, open_mailbox),
        "reward": (reward_worker, config.reward_workers, judges),
        "learner": (workers.learner_worker, config.team_size - 1, config, model.config),
    }

    run.pool = Pool(
        roles,
        config,
        logs=run.folder / "logs",
        flaw=lambda answer, asked: flaw(
            answer, asked, config.group_size, run.mailbox.version, model.config.vocab_size
        ),
        start=start,
    )
    for worker in run.pool.workers.values():
        log_spawn(run, worker)


def log_spawn(run: Run, worker: Worker) -> None:
    """A worker was started; its end is an `exit`."""
    run.log.event(worker.name, "spawn", pid=worker.process.pid)
