"""train_async.py: the same learner, with generation, verification and training all at once.

    python train_async.py                        # guess a number, from random weights
    python train_async.py --max-staleness 0      # bitwise the synchronous algorithm
    python train_async.py --swap recompute       # --help lists the flags

`learner_step` is the one of train_sync.py: what is learned does not change, only when. This file
adds what asynchrony needs: rollout and reward workers in their own processes, admission, weights
that are published while episodes run, and groups that are issued again when a worker dies.

Groups travel: admit -> rollout worker -> reward worker -> buffer -> learner; weights travel back
through the mailbox. The learner lives in the parent process, so nothing lies between a batch and
the weights that it changes. With `--reward-workers 0` a rollout worker verifies what it has
generated: quicker where there are two cores and the verifier is quick.
"""

import contextlib
import time
from collections import Counter
from dataclasses import dataclass, field

import numpy as np

from buffer import Buffer, staleness
from learner import learner_step, new_groups
from runtime.books import close_step, finish
from runtime.checkpoint import checkpoint, completed_groups
from runtime.config import Config, TrainingStopped, UserError, run_main
from runtime.devices import pick_devices
from runtime.ledger import BUFFER, TO_REISSUE, WORKER, Ledger, read_log, table
from runtime.mailbox import Mailbox
from runtime.messages import Generated, Group, Judgement, Orders, Verified, apply_verdicts, flaw
from runtime.processes import Lost, Pool, Silent, Worker, WorkersFailed
from runtime.replay import replay, replayable
from runtime.setup import Run, open_training
from runtime.tokenizer import VOCAB_SIZE
from runtime.workers import (
    join_learners,
    learner_worker,
    meeting_point,
    reward_worker,
    rollout_worker,
)


@dataclass
class Flow:
    """What an asynchronous run has besides its learner."""

    mailbox: Mailbox
    buffer: Buffer
    pool: Pool
    ledger: Ledger = field(default_factory=Ledger)
    interrupted: list[int] = field(default_factory=list)  # groups to issue again, after a resume
    training: list[int] = field(default_factory=list)  # groups of the step that is computed now
    deaths: Counter = field(default_factory=Counter)  # group -> verifiers that died of it
    lost: list[str] = field(default_factory=list)  # workers, and of what they died
    status: dict = field(default_factory=dict)  # of each rollout worker, as it told last
    tokens: int = 0  # generated
    begun: float = 0.0  # when the first group landed
    progress: tuple = ()  # what `check_progress` saw last, and when it changed

    @property
    def in_flight(self) -> list[int]:
        """Ids of all groups that are admitted and not trained: a checkpoint must not lose them."""
        return self.training + self.interrupted + list(self.buffer.outstanding)


def train(config: Config) -> None:
    """The asynchronous algorithm: one loop that admits, collects, trains and publishes."""
    if config.replay:
        return replay(config)
    run = open_training(config, "async")
    config, learner, log, batch = run.config, run.learner, run.log, None
    with open_flow(run) as flow:
        while learner.version < config.steps and not run.stop.asked:
            admit(run, flow)
            check_progress(run, flow)
            for worker, message in flow.pool.receive(seconds=0.0 if batch else 0.2):
                handle(run, flow, worker, message)
            batch = flow.buffer.next_batch(learner.version)  # none older than eta; or wait
            log_discards(run, flow)
            if batch is None:
                continue
            version, flow.training = learner.version, [group.group_id for group in batch]
            for worker in flow.pool.of("learner"):
                flow.pool.send(worker, Orders(batch))
            with log.timed("learner", "train", version=version, groups=flow.training) as event:
                metrics = learner_step(learner, batch, config)
                event |= {name: metrics[name] for name in ("loss", "grad_norm")}
                flow.training = []
                event |= {"in_flight": len(flow.in_flight), "of": config.steps}
            with log.timed("learner", "publish", version=learner.version):
                flow.mailbox.publish(learner.version, learner.model.flat)
            admit(run, flow)  # before anything slow
            metrics |= ages_of(batch, version)
            settle(run, flow)
            close(run, flow, batch, metrics)
        settle(run, flow)
        save(run, flow)
        finish(run, facts_of_flow(run, flow))  # before anything is torn down
    print(table(flow.ledger.totals()))


# -------------------------------------------------------------------------------- work, out and in


def admit(run: Run, flow: Flow) -> None:
    """Issue prompts as long as every deadline holds, and no more than the run will train."""
    config, version, new, again = run.config, run.learner.version, [], []
    wanted = (config.steps - version) * config.groups_per_step
    while len(flow.buffer.outstanding) < wanted and flow.buffer.may_admit(version):
        if flow.interrupted:
            group_id = flow.interrupted.pop(0)
            again.append(Group(group_id, version, run.task.reset(group_id, "train")))
        else:
            new += new_groups(run.learner, run.task, 1)
        flow.buffer.admit((new or again)[-1].group_id, version)
    issue(run, flow, "requeue", again)
    issue(run, flow, "admit", new)


def issue(run: Run, flow: Flow, kind: str, groups: list[Group]) -> None:
    """Send groups to the rollout workers, and log who has which."""
    names = flow.pool.issue("rollout", groups)
    for group, name in zip(groups, names, strict=True):
        facts = {"group": group.group_id, "version": group.start, "worker": name}
        run.log.event("learner", kind, **facts)


def handle(run: Run, flow: Flow, worker: Worker, message) -> None:
    """What one message of a worker, or its death, changes."""
    match message:
        case Generated(group, events, status, judgement):
            flow.status[worker.name] = status
            for at, kind, group_id, version, details in events:
                facts = {"group": group_id, "version": version, **details}
                run.log.event(worker.name, kind, at, **facts)
            if judgement:  # verified, too
                land(run, flow, group, judgement, worker.name)
        case Verified(group, judgement):
            land(run, flow, group, judgement, worker.name)
        case Silent(reason):
            run.log.say(f"{worker.name} {reason} (last: {worker.said}; log: {worker.log})")
        case Lost(reason, groups, _):
            bury(run, flow, worker, reason)
            if worker.role == "learner":
                raise TrainingStopped(f"{worker.name} {reason}: resume from the checkpoint")
            again = generate_again if worker.role == "rollout" else verify_again
            again(run, flow, worker, reason, groups)
            settle(run, flow)


def land(run: Run, flow: Flow, group: Group, judgement: Judgement, judged_by: str) -> None:
    """A group is generated and verified: it may be trained."""
    apply_verdicts(group, judgement.verdicts)
    if not flow.buffer.complete(group):
        return  # a copy from before its group was issued again
    flow.begun = flow.begun or time.monotonic()
    flow.tokens += sum(t.generated for t in group.trajectories)
    facts = {"group": group.group_id, "seconds": judgement.seconds, **replayable(group)}
    facts["lengths"] = [len(t.tokens) for t in group.trajectories]
    run.log.event(judged_by, "score", judgement.began, **facts)


def bury(run: Run, flow: Flow, worker: Worker, reason: str) -> None:
    """A worker is gone, and a successor has its name."""
    run.log.say(f"{worker.name} {reason}: restarted (last: {worker.said}; log: {worker.log})")
    run.log.event(worker.name, "exit", reason=reason)
    log_spawn(run, flow.pool.workers[worker.role, worker.number])
    flow.lost.append(f"{worker.name} {reason}")


def generate_again(run: Run, flow: Flow, worker: Worker, reason: str, groups: list[Group]) -> None:
    """Groups that a rollout worker had not finished begin anew, with today's weights."""
    for group in groups:
        run.log.event(worker.name, "lost", group=group.group_id, reason=reason)
        flow.buffer.requeue(group.group_id, run.learner.version)
        group.start = run.learner.version
    issue(run, flow, "requeue", groups)


def verify_again(run: Run, flow: Flow, worker: Worker, reason: str, groups: list[Group]) -> None:
    """Groups that a reward worker had go to another; one of which two have died has failed."""
    flow.deaths.update(group.group_id for group in groups[:1])  # it was working on the first
    for group in groups:
        if flow.deaths[group.group_id] < 2:
            flow.pool.issue("reward", [group])
        else:
            verdicts = [(0.0, (), f"verifier_lost: {reason}")] * len(group.trajectories)
            land(run, flow, group, Judgement(verdicts, time.monotonic(), 0.0), worker.name)


# ------------------------------------------------------------------------------------------- books


def settle(run: Run, flow: Flow) -> None:
    """Read what happened into the ledger, write it to disk, and compare with what the trainer has:
    an error names the first group that is not where it must be."""
    for event in run.log.events:
        flow.ledger.note(event)
    run.log.flush()
    out = flow.pool.out()
    places = {group: WORKER for group in flow.buffer.outstanding if group in out}
    places |= dict.fromkeys(flow.buffer.completed, BUFFER) | dict.fromkeys(flow.interrupted, TO_REISSUE)
    flow.ledger.balance(places)


def check_progress(run: Run, flow: Flow) -> None:
    """Raise TrainingStopped when workers say that they live, but nothing has moved for too long."""
    out, now = flow.pool.out(), time.monotonic()
    tokens = [worker.status.get("tokens", 0) for worker in flow.pool.of("rollout")]
    signs = run.learner.version, sorted(out.items()), tokens
    if not flow.progress or flow.progress[0] != signs:
        flow.progress = signs, now
    elif now - flow.progress[1] > run.config.stall:
        raise TrainingStopped(
            f"no step, no verdict and no token for {run.config.stall:.0f} s (--stall); "
            f"{len(out)} groups are on their way, the first {dict(list(out.items())[:5])}"
        )


def log_discards(run: Run, flow: Flow) -> None:
    for group, reason in flow.buffer.dropped:
        facts = {"group": group, "reason": reason, "version": run.learner.version}
        run.log.event("learner", "discard", **facts)
    flow.buffer.dropped.clear()


def log_spawn(run: Run, worker: Worker) -> None:
    """A worker was started; its end is an `exit`."""
    run.log.event(worker.name, "spawn", worker.spawned, pid=worker.process.pid)


def ages_of(batch: list[Group], version: int) -> dict:
    """Staleness of a batch's episodes, in versions."""
    ages = [staleness(t, version) for group in batch for t in group.trajectories]
    return {"staleness_max": max(ages), "staleness_mean": float(np.mean(ages))}


def close(run: Run, flow: Flow, batch: list[Group], metrics: dict) -> None:
    """The books of a step, and what the progress bar shows."""
    generated = flow.tokens / (time.monotonic() - flow.begun)
    close_step(
        run,
        batch,
        metrics,
        in_flight=flow.in_flight,
        completed=flow.buffer.completed.values(),
        age=f"{metrics['staleness_mean']:.1f}<={run.config.max_staleness}",
        generate=f"{generated:.0f}/s",
        learn=f"{metrics['tokens'] / metrics['seconds']:.0f}/s",
    )


def save(run: Run, flow: Flow) -> None:
    run.log.bar.close()
    completed = flow.buffer.completed.values()
    checkpoint(run.learner, run.folder, run.log, flow.in_flight, completed)


def facts_of_flow(run: Run, flow: Flow) -> dict:
    """What only an asynchronous run can say about itself, for its summary."""
    seconds, groups = time.monotonic() - (flow.begun or run.log.start), flow.ledger.totals()
    status = list(flow.status.values())
    busy = [s["busy"] / s["alive"] for s in status] or [0.0]
    rates = [s["tokens"] / max(s["busy"], 1e-9) for s in status]
    return {
        "staleness_bound": run.config.max_staleness,
        "tokens_generated": flow.tokens,
        "rollout_tokens_per_s": round(sum(rates)),
        "utilization": {
            "rollout": float(np.mean(busy)),
            "learner": run.log.seconds["train"] / seconds,
        },
        "groups": {name: count for name, count in groups.items() if name != "lost"},
        "ledger": groups,
        "workers_lost": flow.lost,
    }


# ------------------------------------------------------------------------------- beginning and end


@contextlib.contextmanager
def open_flow(run: Run):
    """Mailbox, buffer and processes; what was in flight when a run was interrupted is issued again.

    Whatever goes wrong inside, a checkpoint is written and every process is ended.
    """
    config, learner, state = run.config, run.learner, run.state
    device = str(learner.model.flat.device)
    try:
        mailbox = Mailbox(learner.model.flat.numel(), device=device)
    except OSError as error:  # too little shared memory
        raise UserError(f"--model {config.model}: {error.strerror}") from error
    mailbox.publish(learner.version, learner.model.flat)
    buffer = Buffer(config.groups_per_step, config.max_staleness, config.on_stale)
    flow = Flow(mailbox, buffer, pool=None)
    if state:
        read_log(run.folder / "events.jsonl", flow.ledger.note)
        for group in completed_groups(state):
            buffer.restore(group)
        flow.interrupted = [g for g in state["in_flight"] if g not in buffer.completed]
        for group_id in sorted(flow.interrupted):
            if flow.ledger.states[group_id] != "lost":
                run.log.event("learner", "lost", group=group_id, reason="interrupted")
    flow.pool = start_workers(run, mailbox)
    for worker in flow.pool.workers.values():
        log_spawn(run, worker)
    try:
        if config.learners > 1:
            join_learners(config, 0, str(run.folder))
        yield flow
    except BaseException as error:
        save(run, flow)
        # a role is used up, or another learner has left an all-reduce
        if isinstance(error, WorkersFailed) or (
            isinstance(error, RuntimeError) and config.learners > 1
        ):
            raise TrainingStopped(str(error)) from error
        raise
    finally:
        flow.pool.close()
        mailbox.close()
        for worker in flow.pool.workers.values():
            run.log.event(worker.name, "exit", reason="end", code=worker.process.exitcode)
        run.log.flush()


def start_workers(run: Run, mailbox: Mailbox) -> Pool:
    """Spawn every process of the run; what rollout workers finish goes on to the reward workers."""
    config, folder = run.config, run.folder
    learner_devices, rollout_devices = pick_devices(config)
    cores = len(learner_devices) + len(rollout_devices)
    rollouts = [(config, device, mailbox.memory.name, cores) for device in rollout_devices]
    roles = {"rollout": (rollout_worker, rollouts)}
    roles["reward"] = reward_worker, [(config,)] * config.reward_workers
    if config.learners > 1:
        meeting_point(folder).unlink(missing_ok=True)  # of a run that is resumed
        others = enumerate(learner_devices[1:], start=1)
        arguments = [(config, rank, device, str(folder), cores) for rank, device in others]
        roles["learner"] = learner_worker, arguments

    def found(message) -> str | None:
        allowed = {"newest": mailbox.version, "vocabulary": VOCAB_SIZE}
        return flaw(message, group_size=config.group_size, **allowed)

    return Pool(
        roles,
        logs=folder / "logs",
        restarts=config.restarts,
        silence=config.silence,
        then={"rollout": "reward"} if config.reward_workers else {},
        flaw=found,
    )


if __name__ == "__main__":
    run_main(train, __doc__)
