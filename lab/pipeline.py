"""A simulated pipeline: who generates, verifies and trains when, and how long all of it takes.

It is a discrete-event simulation: an agenda of moments at which something changes, in order of
time. What decides is real: `Buffer` admits groups and picks batches, `pack` makes micro-batches,
and a group goes to the least busy worker, as in train_async.py. What takes time is not real:
`Costs` says how long each thing takes. Episodes have lengths that were recorded in real runs.
A simulation leaves events and metrics like those of a run, so one function measures both.

Synchronous training is the same pipeline with eta = 0: all devices generate, then all train.
Left out: where the costs come from (calibrate.py) and what a simulation is good for (simulate.py),
faults, environments that run beside generation, reward workers that are rollout workers too, and
networks, except for one all-reduce a step.
"""

import heapq
from collections import defaultdict, deque
from dataclasses import dataclass, field
from functools import partial
from itertools import count
from math import ceil
from types import SimpleNamespace
from typing import NamedTuple

import numpy as np

from buffer import Buffer, pack, staleness
from lab.plots import column
from runtime.config import Config
from runtime.messages import Group


@dataclass
class Costs:
    """Seconds of everything that takes time on one device, and the episodes of a task."""

    step: float = 0.0  # a decode step, however full
    step_slot: float = 0.0  # added for each slot: the batch has one static shape
    step_context: float = 0.0  # added for each slot and token of the longest running episode
    step_running: float = 0.0  # added for each slot that is busy
    episode: float = 0.0  # to begin an episode, and to hand it over
    refill: float = 0.0  # a forward pass over new prompts, or one that rebuilds caches
    prefill: float = 0.0  # added for each token of it
    delivery: float = 0.0  # from a finished group to the start of its verification
    score: float = 0.0  # the verification of a group
    handle: float = 0.0  # the learner takes in a group
    listen: float = 0.0  # a step is longer by this for each group that arrives meanwhile
    train: float = 0.0  # an optimizer step, whatever is in it
    micro_batch: float = 0.0  # added for each micro-batch
    train_token: float = 0.0  # added for each token of the episodes, prompts included
    reference_token: float = 0.0  # added for each token when the step runs the reference
    all_reduce: float = 0.0  # several learners join their gradients
    publish: float = 0.0  # new weights are written for the workers
    after: float = 0.0  # metrics and books after a step
    parent_group: float = 0.0  # the parent's, to issue a group, take it in, pass it on and note it
    parent_mb: float = 0.0  # added for each megabyte of it (parent.py)
    alone: float = 1.0  # factor on generation in the learner's own process (synchronous)
    # One row a group: version at its start, tokens of its prompt, tokens of each episode.
    groups: list[list[int]] = field(default_factory=list)


TOKEN_MB = 13e-6  # of a token that travels: its id, mask, log-prob and version


class PipelineLog(NamedTuple):
    """One run, real or simulated: its flags, its events by kind, and a row of metrics a step."""

    config: Config
    synchronous: bool  # the same devices generate and train, in turn
    events: dict[str, list[dict]]
    rows: list[dict]


class SimulatedWorker:
    """A rollout worker: what its slots hold, and how many decode steps until that changes."""

    def __init__(self, name: str, slots: int):
        self.name = name
        self.version = 0  # of its weights
        self.load = 0  # groups that it has and the learner has not taken in
        self.waiting: deque[tuple] = deque()  # (group, length) of samples without a slot
        self.samples: list = [None] * slots
        self.left = np.zeros(slots, np.int64)  # tokens still to generate
        self.cached = np.zeros(slots, np.int64)  # tokens in the cache
        self.woken = 0.0  # time of its last token boundary
        self.begin = 0.0  # when decoding began, after the refill
        self.pace = 0.0  # seconds a decode step
        self.steps = 0  # decode steps until the next change; 0: idle
        self.ticket = 0  # only the planned boundary with this number still counts
        self.prompts: dict[int, int] = {}  # group id -> version that computed its prompt

    @property
    def running(self) -> np.ndarray:
        """Which slots have an episode that goes on."""
        return self.left > 0

    def context(self) -> float:
        """Mean length of the longest running episode over the steps to come."""
        return self.cached[self.running].max() + (self.steps - 1) / 2


class Pipeline:
    """One simulation. Methods run at a moment of it: `now`, in seconds, is their last argument."""

    def __init__(self, config: Config, costs: Costs, seed: int = 0, synchronous: bool = False):
        self.config, self.costs, self.synchronous = config, costs, synchronous
        self.random = np.random.default_rng(seed)
        self.buffer = Buffer(config.groups_per_step, config.max_staleness, config.on_stale)
        self.workers = []
        for i in range(config.rollout_workers):
            self.workers.append(SimulatedWorker(f"rollout-{i}", config.slots))
        self.parent_free = 0.0  # when it has handled what has arrived: one group at a time
        self.verifiers = [0.0] * config.reward_workers  # heap: when each reward worker is free
        self.agenda = []  # heap of (time, order, what happens)
        self.order, self.group_ids = count(), count()
        self.version = 0
        self.busy = False  # the learner takes in groups or trains
        self.inbox = []  # verified groups that the learner has not taken in
        self.arrived = 0  # groups that arrived since the step began
        self.starts = [record[0] for record in costs.groups]
        self.events, self.rows = defaultdict(list), []

    def run(self) -> PipelineLog:
        """Simulate all steps."""
        self.admit(0.0)
        while self.version < self.config.steps:
            now, _, action = heapq.heappop(self.agenda)
            action(now)
        return PipelineLog(self.config, self.synchronous, self.events, self.rows)

    def plan(self, time, action, *arguments):
        """Put an action on the agenda."""
        heapq.heappush(self.agenda, (time, next(self.order), partial(action, *arguments)))

    def note(self, process, kind, t, **details):
        """Write an event into the log."""
        self.events[kind].append({"t": t, "process": process, "kind": kind, **details})

    # ------------------------------------------------------------------------------- generation

    def admit(self, now):
        """Admit as many groups as the deadlines allow; each goes to the least busy worker."""
        config, buffer = self.config, self.buffer
        wanted = (config.steps - self.version) * config.groups_per_step
        while len(buffer.outstanding) < wanted and buffer.may_admit(self.version):
            prompt, lengths = self.draw_group()
            worker = min(self.workers, key=lambda w: w.load)
            worker.load += 1
            problem = {"prompt": prompt, "worker": worker}
            group = Group(next(self.group_ids), self.version, problem)
            buffer.admit(group.group_id, self.version)
            worker.waiting.extend((group, length) for length in lengths)
        for worker in self.workers:
            if worker.waiting and not worker.left.all():
                self.wake(worker, now)

    def draw_group(self):
        """Tokens of a prompt and of its episodes: a recorded group of about this version."""
        total = len(self.starts)
        width = max(8, total // 20)
        near = np.searchsorted(self.starts, [self.version, self.version + 1]).mean()
        low = max(0, min(int(near) - width, total - 2 * width))
        drawn = self.random.integers(low, min(low + 2 * width, total))
        _, prompt, *lengths = self.costs.groups[drawn]
        assert len(lengths) == self.config.group_size, (lengths, self.config.group_size)
        return prompt, lengths

    def wake(self, worker, now):
        """Something is new for a worker: it looks at its next token boundary."""
        if not worker.steps:
            return self.boundary(worker, worker.ticket, now)
        done = max(1, ceil((now - worker.begin) / worker.pace))
        if done < worker.steps:
            worker.steps = done
            self.plan_boundary(worker)

    def plan_boundary(self, worker):
        """Plan the boundary after `worker.steps` steps, in place of the one planned before."""
        worker.ticket += 1
        stop = worker.begin + worker.steps * worker.pace
        self.plan(stop, self.boundary, worker, worker.ticket)

    def boundary(self, worker, ticket, now):
        """A token boundary at which something changes; decode from here to the next one."""
        if ticket != worker.ticket:
            return  # another boundary was planned since
        if worker.steps:
            self.finish(worker, now)
        costs = self.costs
        factor = costs.alone if self.synchronous else 1.0
        worker.woken, worker.begin = now, now + factor * self.refill(worker, now)
        running = worker.running
        worker.steps = int(min(worker.left[running], default=0))
        if worker.steps:
            slot = costs.step_slot + costs.step_context * worker.context()
            seconds = costs.step + self.config.slots * slot + costs.step_running * running.sum()
            worker.pace = factor * seconds
            self.plan_boundary(worker)

    def finish(self, worker, now):
        """The planned steps are done; episodes that have all their tokens leave their slots."""
        running, steps = worker.running, worker.steps
        amounts = {"steps": steps, "slot_steps": steps * int(running.sum())}
        amounts |= {"context": steps * worker.context(), "decode": steps * worker.pace}
        amounts["seconds"] = now - worker.woken
        self.note(worker.name, "generate", worker.woken, **amounts)
        worker.left[running] -= steps
        worker.cached[running] += steps
        for slot in np.flatnonzero(running & (worker.left == 0)):
            group, sample = worker.samples[slot]
            group.trajectories.append(sample)
            if len(group.trajectories) == self.config.group_size:
                self.note(worker.name, "finish", now, group=group.group_id)
                self.verify(group, now)

    def refill(self, worker, now):
        """Adopt new weights as `swap` says, then fill the free slots; returns the seconds."""
        costs, running, seconds = self.costs, worker.running, 0.0
        if worker.version < self.version:
            size = int(running.sum())
            if self.config.swap == "drain" and size:
                return 0.0  # nothing new starts until the running episodes are over
            worker.version = self.version
            self.note(worker.name, "swap", now, version=self.version, size=size)
            if self.config.swap == "recompute" and size:
                seconds += costs.refill + costs.prefill * worker.cached[running].sum()
        free = np.flatnonzero(~running)[: len(worker.waiting)]
        prompts = [self.start_sample(worker, slot, now) for slot in free]
        seconds += len(free) * costs.episode + sum(prompts) * costs.prefill
        return seconds + costs.refill * any(prompts)

    def start_sample(self, worker, slot, now):
        """Give a slot to the next sample; returns the prompt tokens to compute: once a group."""
        group, length = worker.waiting.popleft()
        prompt, number, version = group.problem["prompt"], group.group_id, worker.version
        worker.samples[slot] = (group, SimpleNamespace(oldest=version, tokens=length))
        worker.left[slot] = max(1, length - prompt)
        worker.cached[slot] = prompt
        computed = worker.prompts.get(number)
        worker.prompts[number] = version
        if computed is None:
            self.note(worker.name, "start", now, group=number, version=version, size=prompt)
        return 0 if computed == version else prompt

    # ------------------------------------------------------- verification and learning

    def verify(self, group, now):
        """Verify a group by the reward worker that is free first, once the parent has it."""
        if not self.config.reward_workers:
            return self.arrive(group, now)  # who trains verifies: see `work`
        if not self.synchronous:
            now = self.by_parent(group, now)
        begin = max(now + self.costs.delivery, self.verifiers[0])
        stop = begin + self.costs.score
        heapq.heapreplace(self.verifiers, stop)
        lengths = [t.tokens for t in group.trajectories]
        facts = {"group": group.group_id, "lengths": lengths, "seconds": stop - begin}
        self.note("reward-0", "score", begin, **facts)
        self.plan(stop, self.arrive, group)

    def by_parent(self, group, now):
        """When the parent is done with a group that has just been generated. It does so beside the
        learner's step, which a GPU computes."""
        costs, tokens = self.costs, sum(t.tokens for t in group.trajectories)
        seconds = costs.parent_group + costs.parent_mb * TOKEN_MB * tokens
        begin = max(now, self.parent_free)
        self.parent_free = begin + seconds
        self.note("parent", "handle", begin, group=group.group_id, seconds=seconds)
        return self.parent_free

    def arrive(self, group, now):
        """A verified group reaches the learner."""
        self.inbox.append(group)
        self.arrived += 1
        self.work(now)

    def work(self, now):
        """A learner that has nothing to do takes in what has arrived, or else trains."""
        if self.busy:
            return
        config, costs = self.config, self.costs
        # Without reward workers a synchronous learner verifies, once all groups are generated.
        enough = 1 if config.reward_workers else config.groups_per_step
        if len(self.inbox) < enough:
            return self.train(now)
        self.busy = True
        each = costs.handle if config.reward_workers else costs.score
        self.plan(now + len(self.inbox) * each, self.take_in, self.inbox)
        self.inbox = []

    def take_in(self, groups, now):
        """The groups are in the buffer now."""
        self.busy = False
        for group in groups:
            self.buffer.complete(group)
            group.problem["worker"].load -= 1
        self.train(now)
        self.work(now)

    def train(self, now):
        """Begin a step, if the buffer has a batch for it."""
        batch = self.buffer.next_batch(self.version)
        if self.buffer.dropped:
            self.buffer.dropped.clear()
            self.admit(now)
        if batch is None:
            return
        self.busy, self.arrived = True, 0
        config, costs, step = self.config, self.costs, self.version + 1
        samples = [t for group in batch for t in group.trajectories]
        lengths = [t.tokens for t in samples]
        tokens = sum(lengths)
        micro_batches = len(pack(lengths, config.token_budget, config.team_size))
        seconds = micro_batches * costs.micro_batch + tokens * costs.train_token
        if config.reference_every and step % config.reference_every == 0:
            seconds += tokens * costs.reference_token
        seconds = costs.train + seconds / config.team_size
        if config.team_size > 1:
            seconds += costs.all_reduce
        age = float(np.mean([staleness(t, self.version) for t in samples]))
        row = {"step": step, "sequence_tokens": tokens, "micro_batches": micro_batches}
        self.rows.append(row | {"staleness_mean": age})
        trained = [group.group_id for group in batch]
        self.note("learner", "train", now, version=self.version, groups=trained)
        self.plan(now + seconds, self.publish)

    def publish(self, now):
        """The step ends when it has taken in what arrived meanwhile; then weights go out."""
        if self.arrived:
            late = now + self.arrived * self.costs.listen
            self.arrived = 0
            return self.plan(late, self.publish)
        step = self.events["train"][-1]
        step["seconds"] = now - step["t"]
        seconds = self.costs.publish
        self.note("learner", "publish", now, version=self.version + 1, seconds=seconds)
        self.plan(now + seconds, self.adopt)

    def adopt(self, now):
        """The new weights are there; the learner goes on when its books are written."""
        self.version += 1
        for worker in self.workers:
            self.wake(worker, now)
        free = now + self.costs.after
        self.rows[-1]["t"] = free
        if not self.synchronous:
            self.admit(now)
        self.plan(free, self.go_on)

    def go_on(self, now):
        """The learner is free again."""
        self.busy = False
        self.admit(now)
        self.work(now)


def predict(config: Config, costs: Costs, seed=0, synchronous=False) -> dict[str, float]:
    """`pipeline_metrics` of a simulated run."""
    return pipeline_metrics(Pipeline(config, costs, seed, synchronous).run())


def end(event: dict) -> float:
    """The moment at which an event ends, in seconds."""
    return event["t"] + event["seconds"]


def pipeline_metrics(log: PipelineLog) -> dict[str, float]:
    """Tokens trained a second, idle share of all processes, and mean staleness in versions.

    The pipeline is full when these are measured: the first and last eta + 1 steps are left out.
    """
    config, trained = log.config, log.events["train"]
    first, last = 1 + config.max_staleness, config.steps - 1 - config.max_staleness
    begin, stop = end(trained[first - 1]), end(trained[last - 1])

    seconds, rows = stop - begin, log.rows[first:last]
    work = 0.0
    for kind, devices in (("generate", 1), ("train", config.team_size)):
        for event in log.events[kind]:
            inside = min(end(event), stop) - max(event["t"], begin)
            work += max(0.0, inside) * devices
    # In a synchronous run the devices that train are those that generate.
    devices = config.rollout_workers + config.team_size * (not log.synchronous)
    handled = [e["seconds"] for e in log.events["handle"] if begin <= e["t"] < stop]
    return {
        "tokens_per_s": sum(column(rows, "sequence_tokens")) / seconds,
        "idle": 1 - work / (seconds * devices),
        "staleness": float(np.mean(column(rows, "staleness_mean"))),
        "parent": sum(handled) / seconds,  # the share of the time in which it is busy
    }
