"""pipeline.py: a discrete-event model of the pipeline: who does what when, and how long it takes.

What decides is real: `Buffer` (buffer.py) admits and batches, and groups go to the least busy
worker, as in train_async.py. What takes time is not: a worker jumps from one change of its slots
to the next, a learner from one step to the next, and `Costs` says how long that is. Episodes keep
the lengths that they have in the logs, group by group, and as the policy learns. A simulation
leaves a log of the kind that a run does, so that one function measures both.

Synchronous training is the same pipeline with eta = 0, where every device generates and then every
device trains. Left out: where the costs come from and what all of this is good for (simulate.py),
faults, environments that run beside generation, and networks but for one all-reduce a step.
"""

import heapq
from collections import defaultdict, deque
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from itertools import count
from math import ceil
from types import SimpleNamespace

import numpy as np

from buffer import Buffer, staleness
from learner import pack
from runtime.messages import Group


@dataclass
class Costs:
    """Seconds of everything that takes time, on one device, and the episodes of a task."""

    runs: list[str] = field(default_factory=list)  # what it was calibrated on
    step: float = 0.0  # a decode step, with or without anything in it
    step_slot: float = 0.0  # ... and each slot: the batch has one static shape
    step_context: float = 0.0  # ... and each slot for each token of the longest running episode
    step_running: float = 0.0  # ... and each slot that is busy
    episode: float = 0.0  # begin an episode, and hand it over
    refill: float = 0.0  # a forward pass over new prompts, or to rebuild caches
    prefill: float = 0.0  # ... and each token of it
    delivery: float = 0.0  # a finished group until its verification begins
    score: float = 0.0  # the verification of a group
    handle: float = 0.0  # the learner takes in a group
    listen: float = 0.0  # ... and what a step is longer for each that arrives in its course
    train: float = 0.0  # an optimizer step, whatever is in it
    micro_batch: float = 0.0  # ... and each micro-batch
    train_token: float = 0.0  # ... and each token of the episodes, prompts included
    reference_token: float = 0.0  # ... and each token, in a step that runs the reference
    all_reduce: float = 0.0  # ... and joining the gradients, when there are several learners
    publish: float = 0.0
    after: float = 0.0  # metrics and books after a step
    beside: float = 1.0  # generation takes this times as long while a step is computed
    alone: float = 1.0  # ... and in the learner's process
    evaluation: float = 0.0
    # groups in order: version at their start, tokens of the prompt, tokens of each episode
    groups: list[list[int]] = field(default_factory=list)


@dataclass
class Setup:
    """What may be chosen: the flags of train_async.py that decide how fast it is."""

    task: str
    steps: int = 32
    slots: int = 128
    group_size: int = 16
    groups_per_step: int = 32
    eta: int = 2
    swap: str = "keep"
    on_stale: str = "wait"
    rollout_workers: int = 1
    reward_workers: int = 1
    learners: int = 1
    eval_every: int = 0  # 0: never
    reference_every: int = 0
    token_budget: int = 4096  # of a micro-batch
    synchronous: bool = False  # the same devices generate and train, in turn


@dataclass
class Log:
    """One run, real or simulated: its setup, its events by kind, and its metrics row by row."""

    name: str
    setup: Setup
    events: dict[str, list[dict]]
    rows: list[dict]


class Worker:
    """A rollout worker: its slots now, and the steps until the next change of them."""

    def __init__(self, name: str, slots: int):
        self.name, self.version, self.load = name, 0, 0  # load: groups that it was given
        self.waiting: deque[tuple] = deque()  # (group, length) of samples that have no slot yet
        self.samples: list = [None] * slots
        self.left, self.at = np.zeros((2, slots), np.int64)  # tokens to come, tokens in the cache
        self.begin, self.pace, self.steps, self.stamp = 0.0, 0.0, 0, 0
        self.prompts: dict[int, int] = {}  # group -> version that computed its prompt
        self.span: dict | None = None


class Pipeline:
    """Everything that happens, in order of time; methods end with the time at which they run."""

    def __init__(self, setup: Setup, costs: Costs, seed: int = 0):
        self.setup, self.costs, self.random = setup, costs, np.random.default_rng(seed)
        self.buffer = Buffer(setup.groups_per_step, setup.eta, setup.on_stale)
        self.workers = [Worker(f"rollout-{i}", setup.slots) for i in range(setup.rollout_workers)]
        # when each reward worker is free; without any, whoever generates verifies
        self.verifiers = [0.0] * (0 if setup.synchronous else setup.reward_workers)
        self.agenda, self.order, self.version = [], count(), 0
        self.working = self.training = False  # the learner: busy with anything, with a step
        self.inbox: list[Group] = []  # verified, and not yet seen by the learner
        self.arrived = 0  # groups, in the course of a step
        self.where: dict[int, Worker] = {}
        self.starts = np.array([record[0] for record in costs.groups])
        self.log = Log("simulated", setup, defaultdict(list), [])

    def run(self) -> Log:
        self.admit(0.0)
        while self.version < self.setup.steps:
            now, _, action = heapq.heappop(self.agenda)
            action(now)
        events = self.log.events
        events["generate"] = [e for e in events["generate"] if "seconds" in e]  # not those cut off
        return self.log

    def plan(self, time: float, action: Callable, *arguments) -> None:
        heapq.heappush(self.agenda, (time, next(self.order), partial(action, *arguments)))

    def note(self, process: str, kind: str, t: float, **details) -> dict:
        self.log.events[kind].append({"t": t, "process": process, "kind": kind, **details})
        return self.log.events[kind][-1]

    # ------------------------------------------------------------------------------- generation

    def admit(self, now: float) -> None:
        """As train_async.py: as many groups as the deadlines allow, to the least busy worker."""
        setup, buffer = self.setup, self.buffer
        while (self.setup.steps - self.version) * setup.groups_per_step > len(buffer.outstanding):
            if not buffer.may_admit(self.version):
                break
            prompt, lengths = self.draw()
            group = Group(buffer.counts["admitted"], self.version, {"prompt": prompt})
            buffer.admit(group.group_id, self.version)
            worker = min(self.workers, key=lambda w: w.load)
            worker.load, self.where[group.group_id] = worker.load + 1, worker
            worker.waiting.extend((group, length) for length in lengths)
        for worker in self.workers:
            if worker.waiting and not worker.left.all():
                self.wake(worker, now)

    def draw(self) -> tuple[int, list[int]]:
        """A group of the logs that began at about this version: its prompt, its lengths."""
        records, total = self.costs.groups, len(self.costs.groups)
        width = max(8, total // 20)
        near = np.searchsorted(self.starts, [self.version, self.version + 1]).mean()
        low = max(0, min(int(near) - width, total - 2 * width))
        _, prompt, *lengths = records[self.random.integers(low, min(low + 2 * width, total))]
        if len(lengths) != self.setup.group_size:
            lengths = self.random.choice(lengths, self.setup.group_size).tolist()
        return prompt, lengths

    def wake(self, worker: Worker, now: float) -> None:
        """Something is new for a worker: it looks at its next token boundary."""
        if not worker.steps:
            return self.boundary(worker, worker.stamp, now)
        done = min(max(1, ceil((now - worker.begin) / worker.pace)), worker.steps)
        if done < worker.steps:
            worker.steps, worker.stamp = done, worker.stamp + 1
            self.plan(worker.begin + done * worker.pace, self.boundary, worker, worker.stamp)

    def boundary(self, worker: Worker, stamp: int, now: float) -> None:
        """A token boundary at which something changes; decode from there to the next one."""
        if stamp != worker.stamp:
            return  # somebody woke it before
        judged, extra = self.finish(worker, now), self.refill(worker, now)
        setup, costs = self.setup, self.costs
        running = worker.left > 0
        if worker.span and (worker.version != worker.span["version"] or not running.any()):
            worker.span["seconds"], worker.span = now - worker.span["t"], None
        worker.stamp, worker.steps = worker.stamp + 1, 0
        if not running.any():
            return
        worker.steps = int(worker.left[running].min())
        none = {"version": worker.version, "steps": 0, "slot_steps": 0, "context": 0, "decode": 0.0}
        worker.span = worker.span or self.note(worker.name, "generate", now, **none)
        context = worker.at[running].max() + (worker.steps - 1) / 2
        slot = costs.step_slot + costs.step_context * context
        pace = costs.step + setup.slots * slot + costs.step_running * running.sum()
        times = costs.alone if setup.synchronous else costs.beside if self.training else 1.0
        worker.pace, worker.begin = pace * times, now + judged + extra * times
        self.plan(worker.begin + worker.steps * worker.pace, self.boundary, worker, worker.stamp)

    def finish(self, worker: Worker, now: float) -> float:
        """The steps are done: episodes that have all their tokens leave, groups that are whole;
        returns the seconds in which the worker verifies those."""
        seconds = 0.0
        if not worker.steps:
            return seconds
        running, span, steps = worker.left > 0, worker.span, worker.steps
        span["steps"] += steps
        span["slot_steps"] += steps * int(running.sum())
        span["context"] += steps * (worker.at[running].max() + (steps - 1) / 2)
        span["decode"] += steps * worker.pace
        worker.left[running] -= steps
        worker.at[running] += steps
        for b in np.flatnonzero(running & (worker.left == 0)):
            group, sample = worker.samples[b]
            group.trajectories.append(sample)
            if len(group.trajectories) == self.setup.group_size:
                self.note(worker.name, "finish", now, group=group.group_id)
                seconds += self.verify(worker, group, now + seconds)
        return seconds

    def refill(self, worker: Worker, now: float) -> float:
        """Adopt weights, as `swap` says, then fill the free slots; returns the seconds it takes."""
        costs, running, seconds = self.costs, worker.left > 0, 0.0
        if worker.version < self.version and not (self.setup.swap == "drain" and running.any()):
            size, worker.version = int(running.sum()), self.version
            self.note(worker.name, "swap", now, version=self.version, size=size)
            if self.setup.swap == "recompute" and size:
                seconds += costs.refill + costs.prefill * worker.at[running].sum()
        if worker.version < self.version:
            return seconds
        free = np.flatnonzero(~running)[: len(worker.waiting)]
        prompts = [self.begin(worker, b, now) for b in free]
        seconds += len(free) * costs.episode + sum(prompts) * costs.prefill
        return seconds + costs.refill * any(prompts)

    def begin(self, worker: Worker, slot: int, now: float) -> int:
        """Give a slot to the next sample; returns the prompt tokens to compute: once a group."""
        group, length = worker.waiting.popleft()
        prompt = group.problem["prompt"]
        sample = SimpleNamespace(oldest=worker.version, tokens=length)
        worker.samples[slot] = (group, sample)
        worker.left[slot], worker.at[slot] = max(1, length - prompt), prompt
        if group.group_id not in worker.prompts:
            details = {"group": group.group_id, "version": worker.version, "size": prompt}
            self.note(worker.name, "start", now, **details)
        if worker.prompts.get(group.group_id) == worker.version:
            return 0
        worker.prompts[group.group_id] = worker.version
        return prompt

    # --------------------------------------------------------------------------------- learning

    def verify(self, worker: Worker, group: Group, now: float) -> float:
        """By a reward worker, where there are any; returns the seconds that the rollout worker
        itself takes for it."""
        if self.setup.synchronous:
            self.arrive(group, now)  # see `look`
            return 0.0
        judge, begin, score = worker.name, now, self.costs.score
        if self.verifiers:
            judge, begin = "reward-0", max(now + self.costs.delivery, self.verifiers[0])
            heapq.heapreplace(self.verifiers, begin + score)
        lengths = [t.tokens for t in group.trajectories]
        self.note(judge, "score", begin, group=group.group_id, lengths=lengths, seconds=score)
        self.plan(begin + score, self.arrive, group)
        return 0.0 if self.verifiers else score

    def arrive(self, group: Group, now: float) -> None:
        self.inbox.append(group)
        self.arrived += 1
        self.look(now)

    def look(self, now: float) -> None:
        """A learner with nothing to do takes in what has arrived; or it trains, if it can."""
        enough = self.setup.groups_per_step if self.setup.synchronous else 1
        if self.working:
            return
        if len(self.inbox) >= enough:
            self.working, groups, self.inbox = True, self.inbox, []
            each = self.costs.score if self.setup.synchronous else self.costs.handle
            self.plan(now + len(groups) * each, self.take, groups)
        else:
            self.train(now)

    def take(self, groups: list[Group], now: float) -> None:
        self.working = False
        for group in groups:
            self.buffer.complete(group)
            self.where.pop(group.group_id).load -= 1
        self.train(now)
        if not self.working:
            self.look(now)

    def train(self, now: float) -> None:
        """One step, if the buffer has a batch for it."""
        batch = self.buffer.next_batch(self.version)
        if self.buffer.dropped:
            self.buffer.dropped.clear()
            self.admit(now)
        if batch is None:
            return
        setup, costs, self.working, self.arrived = self.setup, self.costs, True, 0
        samples = [t for group in batch for t in group.trajectories]
        tokens, step = sum(t.tokens for t in samples), self.version + 1
        reference = bool(setup.reference_every) and step % setup.reference_every == 0
        batches = len(pack([t.tokens for t in samples], setup.token_budget, setup.learners))
        work = costs.train_token + costs.reference_token * reference
        work = (batches * costs.micro_batch + tokens * work) / setup.learners
        seconds = costs.train + work + costs.all_reduce * (setup.learners > 1)
        row = {"step": step, "sequence_tokens": tokens, "micro_batches": batches}
        row["staleness_mean"] = float(np.mean([staleness(t, self.version) for t in samples]))
        event = {"version": self.version, "groups": [g.group_id for g in batch]}
        event = self.note("learner", "train", now, seconds=seconds, **event)
        self.plan(now + seconds, self.publish, row, event)
        self.training = True
        for worker in self.workers:
            self.wake(worker, now)

    def publish(self, row: dict, event: dict, now: float) -> None:
        """The computation is over; the step ends when what arrived in its course is taken in."""
        if self.arrived:
            late, self.arrived = now + self.arrived * self.costs.listen, 0
            return self.plan(late, self.publish, row, event)
        event["seconds"] = now - event["t"]
        self.note("learner", "publish", now, version=row["step"], seconds=self.costs.publish)
        self.plan(now + self.costs.publish, self.adopt, row)

    def adopt(self, row: dict, now: float) -> None:
        """Every worker may have the new weights; the learner goes on when its books are written."""
        setup, self.version, self.training = self.setup, row["step"], False
        for worker in self.workers:
            self.wake(worker, now)
        free = now + self.costs.after
        if setup.eval_every and (row["step"] % setup.eval_every == 0 or row["step"] == setup.steps):
            row["eval"], free = {}, free + self.costs.evaluation
        self.log.rows.append(row | {"t": free})
        if not setup.synchronous:
            self.admit(now)
        self.plan(free, self.go_on)

    def go_on(self, now: float) -> None:
        self.working = False
        self.admit(now)
        self.look(now)


def predict(setup: Setup, costs: Costs, seed: int = 0) -> dict[str, float]:
    """What `measure` finds in a simulated run."""
    return measure(Pipeline(setup, costs, seed).run())


def end(event: dict) -> float:
    return event["t"] + event["seconds"]


def overlap(spans: list[dict], begin: float, stop: float) -> float:
    """Seconds that spans have between `begin` and `stop`."""
    return sum(max(0.0, min(end(e), stop) - max(e["t"], begin)) for e in spans)


def measure(log: Log) -> dict[str, float]:
    """Tokens trained per second, idle shares (of rollout workers, learner, all devices) and mean
    staleness in versions, while the pipeline is full: the first and last eta + 1 steps are out."""
    setup, trained = log.setup, log.events["train"]
    first, last = 1 + setup.eta, setup.steps - 1 - setup.eta
    begin, stop = end(trained[first - 1]), end(trained[last - 1])
    rows, seconds = log.rows[first:last], stop - begin
    rollout = overlap(log.events["generate"], begin, stop) / (seconds * setup.rollout_workers)
    learner = overlap(trained, begin, stop) / seconds
    busy = rollout * setup.rollout_workers + learner * setup.learners
    # in a synchronous run the learners' devices are those that have generated
    devices = setup.rollout_workers + setup.learners * (not setup.synchronous)
    return {
        "tokens_per_s": sum(row["sequence_tokens"] for row in rows) / seconds,
        "rollout_idle": 1 - rollout,
        "learner_idle": 1 - learner,
        "idle": 1 - busy / devices,
        "staleness": float(np.mean([row["staleness_mean"] for row in rows])),
    }
