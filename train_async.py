"""train_async.py: the same learner, with generation, verification and training all at once.

    python train_async.py                        # guess a number, from random weights
    python train_async.py --max-staleness 0      # bitwise the synchronous algorithm
    python train_async.py --swap recompute       # --help lists every flag

`learner_step` comes from train_sync.py: what is learned does not change, only when. This file adds
what asynchrony needs: rollout and reward workers in their own processes, admission, weights that
are published while episodes run, and groups that are issued again when a worker dies.

Groups travel: admit -> rollout worker -> reward worker -> buffer -> learner; weights travel back
through the mailbox. The learner lives in the parent process, so nothing lies between a batch and
the weights that it changes.
"""

import atexit
import time
from datetime import timedelta
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist

import common
import report
import train_sync
from buffer import Buffer, Group, apply_verdicts, group_from_parts, group_to_parts, staleness
from common import Config
from learner import (
    checkpoint,
    facts_of,
    make_generator,
    make_learner,
    make_model,
    make_task,
    new_groups,
    restore,
    resumed,
)
from ledger import AGAIN, BUFFER, WORKER, Ledger, read_log, table
from replay import replay, replayable
from reward import split_answers, verify
from train_sync import after_step, learner_step
from transport import Line, Mailbox, Pool, Worker, WorkersFailed

# ------------------------------------------------------------------------------------ the workers


def rollout_worker(line: Line, config: Config, device: str, mailbox_name: str, processes: int):
    """Generate what is asked for, with the newest weights that are in the mailbox."""
    common.set_threads(config, processes)
    task = make_task(config)
    model = make_model(config, task).on(device)
    generator = make_generator(config, task, model, line.worker)
    generator.version = -1  # the first weights come from the mailbox, too
    born, span = time.monotonic(), None
    mailbox = Mailbox(model.flat.numel(), mailbox_name)
    atexit.register(mailbox.close)

    while True:
        message = line.receive(0.0 if generator.busy else 0.02)
        while message:
            header, _ = message
            generator.submit(Group(header["group_id"], header["start"], header["problem"]))
            message = line.receive()
        if mailbox.version > generator.newest:
            version, flat = mailbox.read()
            generator.set_weights(version, torch.from_numpy(flat))
        active = generator.step()
        if span and (not active or generator.version != span[1]):
            seconds = time.monotonic() - span[0]
            generator.events.append((span[0], "generate", -1, span[1], seconds))
            span = None
        if active:
            span = span or (time.monotonic(), generator.version)
        else:
            time.sleep(0.0005)
        finished = generator.take_finished()
        status = {**generator.counts, "alive": time.monotonic() - born}
        if finished:  # what happened goes first: nobody hears of a group that never began
            line.send("events", {"events": generator.events, "status": status})
            generator.events = []
        for group in finished:
            line.send("group", *group_to_parts(group))
        if not finished:
            line.beat({"status": status})


def reward_worker(line: Line, config: Config):
    """Verify one group after the other; each episode has its own time limit."""
    task = make_task(config)
    while True:
        message = line.receive(0.5)
        if message:
            group, begin, verdicts = group_from_parts(*message), time.monotonic(), []
            for t in group.trajectories:
                answers = split_answers(task, t.tokens, t.turns)
                verdicts.append(verify(task, group.problem, answers, config.reward_seconds))
                line.beat()
            spent = {"began": begin, "seconds": time.monotonic() - begin}
            line.send("scores", {"group_id": group.group_id, "verdicts": verdicts, **spent})
        line.beat()


def learner_worker(line: Line, config: Config, rank: int, device: str, run: str, processes: int):
    """Learner `rank` of several: the same steps on its share of every batch's micro-batches."""
    common.set_threads(config, processes)
    learner = make_learner(config, make_task(config), device)
    if config.resume:
        restore(learner, common.load_checkpoint(Path(config.resume)), config)
    join_learners(config, rank, run)
    batch: list[Group] = []
    while True:
        message = line.receive(0.5)
        line.beat()
        if message:
            batch.append(group_from_parts(*message))
        if len(batch) == config.groups_per_step:
            learner_step(learner, batch, config, rank)
            batch = []


def meeting_point(run: str | Path) -> Path:
    """The file through which the learners of a run find each other."""
    return Path(run).resolve() / "checkpoints" / "meeting"


def join_learners(config: Config, rank: int, run: str) -> None:
    """Meet the other learners; gradients are summed with gloo, on CPU and GPU alike."""
    meeting = f"file://{meeting_point(run)}"
    wait = timedelta(seconds=60)
    dist.init_process_group("gloo", meeting, wait, config.learners, rank)


# ------------------------------------------------------------------------------------- the parent


def start_workers(config: Config, run: Path, devices: tuple, mailbox: Mailbox) -> Pool:
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
    relay = ("rollout", "group", "reward")
    return Pool(roles, run / "logs", config.restarts, config.silence, relay)


class Flights:
    """Which rollout worker has which group; hands groups to the least busy one."""

    def __init__(self, pool: Pool):
        self.pool, self.groups, self.where = pool, {}, {}
        self.dead: list[Worker] = []  # workers whose groups were issued again

    def issue(self, group: Group) -> str:
        """Send a group to the rollout worker with the fewest; returns the worker's name."""
        workers = self.pool.of("rollout")
        load = [sum(w is worker for w in self.where.values()) for worker in workers]
        worker = workers[int(np.argmin(load))]
        self.groups[group.group_id], self.where[group.group_id] = group, worker
        order = {"group_id": group.group_id, "start": group.start, "problem": group.problem}
        self.pool.send(worker, "order", order)
        return worker.name

    def landed(self, group_id: int) -> None:
        self.groups.pop(group_id, None)
        self.where.pop(group_id, None)
        self.pool.relayed.discard(group_id)

    def lost_with(self, worker: Worker) -> list[Group]:
        """Groups that a dead worker had not finished."""
        ids = [g for g, w in self.where.items() if w is worker and g not in self.pool.relayed]
        return [self.groups[g] for g in ids]

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
    ledger.balance(places | dict.fromkeys(again, AGAIN))


def log_spawn(watch, worker: Worker) -> None:
    """A worker was started; its end is an `exit`."""
    watch.event(worker.name, "spawn", worker.spawned, pid=worker.process.pid)


def handle(message: tuple, buffer: Buffer, flights: Flights, version: int, watch, totals: dict):
    """What one message of a worker changes."""
    kind, worker, header, original = message
    if kind == "scores":
        group_header, arrays = original
        group = group_from_parts(group_header, arrays)
        apply_verdicts(group, header["verdicts"])
        if not buffer.complete(group):
            return  # a copy from before its group was issued again
        flights.landed(group.group_id)
        totals["begin"] = totals["begin"] or time.monotonic()
        totals["tokens"] += sum(int(t.loss_mask.sum()) for t in group.trajectories)
        details = {"group": group.group_id, "seconds": header["seconds"], **replayable(group)}
        watch.event(worker.name, "score", header["began"], **details)
    elif kind == "events":
        totals["status"][worker.name] = header["status"]
        for at, what, group_id, at_version, size in header["events"]:
            amount = {"seconds": size} if what == "generate" else {"size": size}
            watch.event(worker.name, what, at, group=group_id, version=at_version, **amount)
    elif kind == "lost":
        reason = header
        watch.say(f"{worker.name} {reason}: restarted (log: {worker.log})")
        watch.event(worker.name, "exit", reason=reason)
        log_spawn(watch, flights.pool.workers[worker.role, worker.number])
        totals["lost"].append(f"{worker.name} {reason}")
        if worker.role == "learner":
            raise common.TrainingStopped(f"{worker.name} {reason}: resume from the checkpoint")
        for group in flights.lost_with(worker):
            watch.event(worker.name, "lost", group=group.group_id, reason=reason)
            buffer.requeue(group.group_id, version)
            group.start = version
            name, details = flights.issue(group), {"group": group.group_id, "version": version}
            watch.event("learner", "requeue", **details, worker=name)
        flights.dead.append(worker)


def admit(learner, buffer, flights, again: list[int], config, task, watch) -> None:
    """Issue new prompts as long as every deadline holds, and no more than the run will train."""
    while True:
        left = (config.steps - learner.version) * config.groups_per_step - len(buffer.outstanding)
        if left <= 0 or not buffer.may_admit(learner.version):
            return
        kind = "requeue" if again else "admit"
        if again:  # groups that were in flight when the run was interrupted
            group_id = again.pop(0)
            group = Group(group_id, learner.version, task.reset(group_id, "train"))
        else:
            (group,) = new_groups(learner, task, 1)
        buffer.admit(group.group_id, learner.version)
        name = flights.issue(group)
        details = {"group": group.group_id, "version": learner.version, "worker": name}
        watch.event("learner", kind, **details)


def train(config: Config) -> None:
    """The asynchronous algorithm: one loop that admits, collects, trains and publishes."""
    if config.replay:
        return replay(config)
    stop, config = common.Stop(), resumed(config)
    devices = common.pick_devices(config)
    common.set_threads(config, sum(map(len, devices)))
    config, task, run, learner, watch, state = train_sync.open_training(
        config, "async", devices[0][0]
    )
    try:
        mailbox = Mailbox(learner.model.flat.numel())
    except OSError as error:  # too little shared memory
        raise common.UserError(f"--model {config.model}: {error.strerror}") from error
    mailbox.publish(learner.version, learner.model.flat.cpu().numpy())
    buffer = Buffer(config.groups_per_step, config.max_staleness, config.on_stale)
    totals = {"tokens": 0, "status": {}, "lost": [], "train": 0.0, "begin": None}
    ledger, again = Ledger(), list(state["in_flight"]) if state else []
    if state:
        read_log(run / "events.jsonl", ledger.note)
        for group_id in sorted(g for g in ledger.flying if ledger.states[g] != "lost"):
            watch.event("learner", "lost", group=group_id, reason="interrupted")
    pool = start_workers(config, run, devices, mailbox)
    flights, batch = Flights(pool), None
    for worker in pool.workers.values():
        log_spawn(watch, worker)
    try:
        if config.learners > 1:
            join_learners(config, 0, str(run))
        while learner.version < config.steps and not stop.asked:
            admit(learner, buffer, flights, again, config, task, watch)
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
            details |= {name: metrics[name] for name in ("loss", "grad_norm")}
            watch.span("learner", "train", begin, **details)
            mailbox.publish(learner.version, learner.model.flat.cpu().numpy())
            watch.event("learner", "publish", version=learner.version)
            admit(learner, buffer, flights, again, config, task, watch)  # before anything slow

            ages = [staleness(t, version) for g in batch for t in g.trajectories]
            metrics |= {"staleness_max": max(ages), "staleness_mean": float(np.mean(ages))}
            generated = totals["tokens"] / (time.monotonic() - totals["begin"])
            shown = {
                "age": f"{metrics['staleness_mean']:.1f}<={config.max_staleness}",
                "generate": f"{generated:.0f}/s",
                "learn": f"{metrics['tokens'] / metrics['seconds']:.0f}/s",
            }
            settle(ledger, watch, buffer, flights, again)
            in_flight = again + list(buffer.outstanding)
            after_step(learner, batch, metrics, config, task, run, watch, in_flight, **shown)
            totals["train"] += metrics["seconds"]
        settle(ledger, watch, buffer, flights, again)
    except RuntimeError as error:  # a role is used up, or another learner left an all-reduce
        if config.learners == 1 and not isinstance(error, WorkersFailed):
            raise
        raise common.TrainingStopped(str(error)) from error
    finally:
        try:
            checkpoint(learner, run, watch, again + list(buffer.outstanding))
        finally:
            pool.close()
            for worker in pool.workers.values():
                watch.event(worker.name, "exit", reason="end", code=worker.process.exitcode)
            watch.flush()
            mailbox.close()
    finish(run, learner, config, watch, ledger.totals(), totals)


def finish(run, learner, config, watch, groups: dict, totals) -> None:
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
    print(report.summarise(run, facts))
    print(table(groups))


if __name__ == "__main__":
    common.run_main(train, __doc__)
