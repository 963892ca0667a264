"""train_async.py: the same learner, with generation, verification and training all at once.

    python train_async.py                        # guess a number, from random weights
    python train_async.py --max-staleness 0      # bitwise the synchronous algorithm
    python train_async.py --swap recompute       # --help lists every flag

`learner_step` comes from train_sync.py: what is learned does not change, only when. This file adds
what asynchrony needs: rollout and reward workers in their own processes, admission, weights that
are published while episodes run, and groups that are issued again when a worker dies.
With `--reward-workers 0` a rollout worker verifies what it has generated: quicker where there are
two cores and the verifier is quick; a slow one holds generation up.

Groups travel: admit -> rollout worker -> reward worker -> buffer -> learner; weights travel back
through the mailbox. The learner lives in the parent process, so nothing lies between a batch and
the weights that it changes.
"""

import time
from pathlib import Path

import numpy as np

from buffer import Buffer, staleness
from learner import learner_step, new_groups
from runtime.checkpoint import checkpoint, completed_groups
from runtime.config import Config, TrainingStopped, UserError, run_main
from runtime.devices import pick_devices, set_threads
from runtime.ledger import BUFFER, TO_REISSUE, WORKER, Ledger, read_log, table
from runtime.mailbox import Mailbox
from runtime.messages import (
    Group,
    apply_verdicts,
    group_flaw,
    group_from_parts,
    group_to_parts,
    verdict_flaw,
)
from runtime.processes import Pool, Worker, WorkersFailed
from runtime.replay import replay, replayable
from runtime.report import facts_of, summarise
from runtime.runlog import Stop
from runtime.setup import open_training, resumed
from runtime.tokenizer import VOCAB_SIZE
from runtime.workers import (
    join_learners,
    learner_worker,
    meeting_point,
    reward_worker,
    rollout_worker,
)
from train_sync import after_step, evaluate_kept


def start_workers(config: Config, run: Path, devices: tuple, mailbox: Mailbox, flights) -> Pool:
    """Spawn every process of the run; the reward workers are fed by the rollout workers."""
    learner_devices, rollout_devices = devices
    cores = len(learner_devices) + len(rollout_devices)
    roles = {
        "rollout": (
            rollout_worker,
            [(config, device, mailbox.memory.name, cores) for device in rollout_devices],
        ),
        "reward": (reward_worker, [(config,)] * config.reward_workers),
    }
    if config.learners > 1:
        meeting_point(run).unlink(missing_ok=True)  # of a run that is resumed
        others = enumerate(learner_devices[1:], start=1)
        arguments = [(config, rank, device, str(run), cores) for rank, device in others]
        roles["learner"] = (learner_worker, arguments)

    def flaw(worker: Worker, header: dict, arrays: dict, original: tuple | None) -> str | None:
        if header["kind"] == "group":
            allowed = config.group_size, mailbox.version, VOCAB_SIZE
            flaw = flights.flaw(worker, header) or group_flaw(header, arrays, *allowed)
            judged = None if config.reward_workers else header["verdict"]
        else:
            flaw, judged = None, header if original else None
        return flaw or (judged and verdict_flaw(judged["verdicts"], config.group_size))

    relay = ("rollout", "group", "reward" if config.reward_workers else None)
    return Pool(roles, run / "logs", config.restarts, config.silence, relay, flaw)


class Flights:
    """Which rollout worker has which group; hands groups to the least busy one."""

    def __init__(self, pool: Pool | None = None):
        self.pool, self.groups, self.where = pool, {}, {}
        self.dead: list[Worker] = []  # workers whose groups were issued again

    def issue(self, groups: list[Group]) -> list[str]:
        """Send each group to the rollout worker with the fewest, in one message a worker; returns
        the name of the worker of each."""
        workers = self.pool.of("rollout")
        loads = [sum(w is one for w in self.where.values()) for one in workers]
        orders: list[list[tuple]] = [[] for _ in workers]
        for group in groups:
            least = loads.index(min(loads))
            loads[least] += 1
            orders[least].append((group.group_id, group.start, group.problem))
            self.groups[group.group_id], self.where[group.group_id] = group, workers[least]
        for worker, some in zip(workers, orders, strict=True):
            if some:
                self.pool.send(worker, "orders", {"orders": some})
        return [self.where[group.group_id].name for group in groups]

    def landed(self, group_id: int) -> None:
        self.groups.pop(group_id, None)
        self.where.pop(group_id, None)
        self.pool.relayed.discard(group_id)

    def lost_with(self, worker: Worker) -> list[Group]:
        """Groups that a dead worker had not finished."""
        ids = [g for g, w in self.where.items() if w is worker and g not in self.pool.relayed]
        return [self.groups[g] for g in ids]

    def flaw(self, worker: Worker, header: dict) -> str | None:
        """Why a group is none that this worker was asked for; None if it is one."""
        group_id = header["group_id"]
        if self.where.get(group_id) is not worker or group_id in self.pool.relayed:
            return f"group {group_id}, which it does not have: a duplicate?"
        if header["start"] != self.groups[group_id].start:
            return f"start {header['start']}, must be {self.groups[group_id].start}"
        return None

    def place(self, group_id: int) -> str:
        """Where a group is that has not landed, in the words of ledger.py."""
        worker = self.where.get(group_id)
        if any(worker is w for w in self.dead) and group_id not in self.pool.relayed:
            return "with a dead worker"
        return WORKER if worker else "nowhere"


def settle(ledger: Ledger, watch, buffer: Buffer, flights: Flights, again: list[int]) -> None:
    """Read what happened into the ledger, write it to disk, and compare with what the trainer has:
    AssertionError names the first group that is not where it must be."""
    for event in watch.events:
        ledger.note(event)
    watch.flush()
    places = {g: BUFFER if g in buffer.completed else flights.place(g) for g in buffer.outstanding}
    ledger.balance(places | dict.fromkeys(again, TO_REISSUE))


def log_spawn(watch, worker: Worker) -> None:
    """A worker was started; its end is an `exit`."""
    watch.event(worker.name, "spawn", worker.spawned, pid=worker.process.pid)


def land(group: Group, verdict: dict, judged_by: str, buffer, flights, watch, totals) -> None:
    """A group is generated and verified: it may be trained."""
    apply_verdicts(group, verdict["verdicts"])
    if not buffer.complete(group):
        return  # a copy from before its group was issued again
    flights.landed(group.group_id)
    totals["begin"] = totals["begin"] or time.monotonic()
    totals["tokens"] += sum(t.generated for t in group.trajectories)
    details = {"group": group.group_id, "seconds": verdict["seconds"], **replayable(group)}
    details["lengths"] = [len(t.tokens) for t in group.trajectories]
    watch.event(judged_by, "score", verdict["began"], **details)


def handle(message: tuple, buffer: Buffer, flights: Flights, version: int, watch, totals: dict):
    """What one message of a worker changes."""
    kind, worker, header, original = message
    if kind in ("scores", "unanswered"):
        group = group_from_parts(*original)
        if kind == "unanswered":  # two reward workers have died of it: it is not tried again
            lost = [(0.0, (), "verifier_lost")] * len(group.trajectories)
            header |= {"verdicts": lost, "began": time.monotonic(), "seconds": 0.0}
        land(group, header, worker.name, buffer, flights, watch, totals)
    elif kind == "group":  # generated; what has happened since the last came with it
        totals["status"][worker.name] = header["status"]
        for at, what, group_id, at_version, size in header["events"]:
            amount = size if what == "generate" else {"size": size}
            watch.event(worker.name, what, at, group=group_id, version=at_version, **amount)
        if verdict := header.get("verdict"):  # verified, too
            group = group_from_parts(header, original)
            land(group, verdict, worker.name, buffer, flights, watch, totals)
    elif kind == "silent":
        watch.say(f"{worker.name} {header} (last message: {worker.said}; log: {worker.log})")
    elif kind == "lost":
        reason, facts = header, f"last message: {worker.said}; log: {worker.log}"
        watch.say(f"{worker.name} {reason}: restarted ({facts})")
        watch.event(worker.name, "exit", reason=reason)
        log_spawn(watch, flights.pool.workers[worker.role, worker.number])
        totals["lost"].append(f"{worker.name} {reason}")
        if worker.role == "learner":
            raise TrainingStopped(f"{worker.name} {reason}: resume from the checkpoint")
        for group in (lost := flights.lost_with(worker)):
            watch.event(worker.name, "lost", group=group.group_id, reason=reason)
            buffer.requeue(group.group_id, version)
            group.start = version
        for group, name in zip(lost, flights.issue(lost), strict=True):
            watch.event("learner", "requeue", group=group.group_id, version=version, worker=name)
        flights.dead.append(worker)


def admit(learner, buffer, flights, again: list[int], config, task, watch) -> None:
    """Issue new prompts as long as every deadline holds, and no more than the run will train."""
    groups, kinds, version = [], [], learner.version
    wanted = (config.steps - version) * config.groups_per_step
    while len(buffer.outstanding) < wanted and buffer.may_admit(version):
        kinds.append("requeue" if again else "admit")
        if again:  # groups that were in flight when the run was interrupted
            group_id = again.pop(0)
            groups.append(Group(group_id, version, task.reset(group_id, "train")))
        else:
            groups += new_groups(learner, task, 1)
        buffer.admit(groups[-1].group_id, version)
    for group, kind, name in zip(groups, kinds, flights.issue(groups), strict=True):
        watch.event("learner", kind, group=group.group_id, version=version, worker=name)


def check_progress(progress: dict, version: int, flights: Flights, config: Config) -> None:
    """Raise TrainingStopped when workers say that they live, but nothing has moved for too long."""
    workers, now = flights.pool.of("rollout"), time.monotonic()
    tokens = [w.status.get("status", {}).get("tokens", 0) for w in workers]
    signs = (version, len(flights.where), len(flights.pool.relayed), tokens)
    if progress.get("signs") != signs:
        progress |= {"signs": signs, "at": now}
    elif now - progress["at"] > config.stall:
        where = {g: w.name for g, w in list(flights.where.items())[:5]}
        raise TrainingStopped(
            f"no step, no verdict and no token for {config.stall:.0f} s (--stall); "
            f"{len(flights.where)} groups are on their way, the first {where}"
        )


def train(config: Config) -> None:
    """The asynchronous algorithm: one loop that admits, collects, trains and publishes."""
    if config.replay:
        return replay(config)
    stop, config = Stop(), resumed(config)
    devices = pick_devices(config)
    set_threads(config, sum(map(len, devices)), devices[0][0])
    config, task, run, learner, watch, state = open_training(config, "async", devices[0][0])
    try:
        mailbox = Mailbox(learner.model.flat.numel(), device=devices[0][0])
    except OSError as error:  # too little shared memory
        raise UserError(f"--model {config.model}: {error.strerror}") from error
    mailbox.publish(learner.version, learner.model.flat)
    buffer = Buffer(config.groups_per_step, config.max_staleness, config.on_stale)
    totals = {"tokens": 0, "status": {}, "lost": [], "train": 0.0, "begin": None}
    ledger, again = Ledger(), list(state["in_flight"]) if state else []
    if state:
        read_log(run / "events.jsonl", ledger.note)
        for group in completed_groups(state):
            buffer.restore(group)
        again = [g for g in again if g not in buffer.completed]
        for group_id in sorted(g for g in again if ledger.states[g] != "lost"):
            watch.event("learner", "lost", group=group_id, reason="interrupted")
    flights, batch, progress = Flights(), None, {}
    pool = flights.pool = start_workers(config, run, devices, mailbox, flights)
    for worker in pool.workers.values():
        log_spawn(watch, worker)
    try:
        if config.learners > 1:
            join_learners(config, 0, str(run))
        while learner.version < config.steps and not stop.asked:
            admit(learner, buffer, flights, again, config, task, watch)
            check_progress(progress, learner.version, flights, config)
            messages = pool.receive(0.0 if batch else 0.2)  # wait for workers, but never for ever
            for message in messages:
                handle(message, buffer, flights, learner.version, watch, totals)
            if any(kind == "lost" for kind, *_ in messages):
                settle(ledger, watch, buffer, flights, again)
            batch = buffer.next_batch(learner.version)
            for group, reason in buffer.dropped:
                watch.event(
                    "learner", "discard", group=group, reason=reason, version=learner.version
                )
            buffer.dropped.clear()
            if batch is None:
                continue
            begin, version = time.monotonic(), learner.version
            for worker in pool.of("learner"):
                for group in batch:
                    pool.send(worker, "batch", *group_to_parts(group))
            ids = [group.group_id for group in batch]
            again = ids + again  # until they are trained: a checkpoint must not lose them
            metrics = learner_step(learner, batch, config)
            again = again[len(ids) :]
            left = len(buffer.outstanding) + len(again)
            details = {"version": version, "groups": ids, "in_flight": left, "of": config.steps}
            details |= {name: metrics[name] for name in ("loss", "grad_norm", "sequence_tokens")}
            watch.span("learner", "train", begin, **details)
            begin = time.monotonic()
            mailbox.publish(learner.version, learner.model.flat)
            watch.span("learner", "publish", begin, version=learner.version)
            admit(learner, buffer, flights, again, config, task, watch)  # before anything slow

            ages = [staleness(t, version) for g in batch for t in g.trajectories]
            metrics |= {"staleness_max": max(ages), "staleness_mean": float(np.mean(ages))}
            generated = totals["tokens"] / (time.monotonic() - (totals["begin"] or watch.start))
            shown = {
                "age": f"{metrics['staleness_mean']:.1f}<={config.max_staleness}",
                "generate": f"{generated:.0f}/s",
                "learn": f"{metrics['tokens'] / metrics['seconds']:.0f}/s",
            }
            settle(ledger, watch, buffer, flights, again)
            flying = (again + list(buffer.outstanding), buffer.completed.values())
            after_step(learner, batch, metrics, config, task, run, watch, flying, **shown)
            totals["train"] += metrics["seconds"]
        settle(ledger, watch, buffer, flights, again)
    except RuntimeError as error:  # a role is used up, or another learner left an all-reduce
        if config.learners == 1 and not isinstance(error, WorkersFailed):
            raise
        raise TrainingStopped(str(error)) from error
    finally:
        watch.bar.close()
        try:
            flying = again + list(buffer.outstanding)
            checkpoint(learner, run, watch, flying, buffer.completed.values())
        finally:
            pool.close()
            mailbox.close()
            for worker in pool.workers.values():
                watch.event(worker.name, "exit", reason="end", code=worker.process.exitcode)
            watch.flush()
    finish(run, learner, config, task, watch, ledger.totals(), totals)


def finish(run, learner, config, task, watch, groups: dict, totals) -> None:
    """Write the summary: what only an asynchronous run can say about itself."""
    seconds = time.monotonic() - (totals["begin"] or watch.start)
    busy = [s["busy"] / s["alive"] for s in totals["status"].values()]
    rate = [s["tokens"] / max(s["busy"], 1e-9) for s in totals["status"].values()]
    facts = facts_of(learner, config, watch) | {
        "staleness_bound": config.max_staleness,
        "tokens_generated": totals["tokens"],
        "rollout_tokens_per_s": round(sum(rate)),
        "utilization": {
            "rollout": float(np.mean(busy or [0.0])),
            "learner": totals["train"] / seconds,
        },
        "groups": {name: count for name, count in groups.items() if name != "lost"},
        "ledger": groups,
        "workers_lost": totals["lost"],
    }
    evaluate_kept(learner, config, task, run, watch)
    print(summarise(run, facts))
    print(table(groups))


if __name__ == "__main__":
    run_main(train, __doc__)
