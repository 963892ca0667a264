"""A simulated pipeline: who generates, verifies and trains when, and how long all of it takes.

It is a discrete-event simulation: an agenda of moments at which something changes, in order of
time. What decides is real: `Buffer` admits groups and picks batches, `pack` makes micro-batches,
and a group goes to the least busy worker, as in train_async.py. What takes time is not real:
`Costs` says how long each thing takes. Episodes have lengths that were recorded in real runs.
A simulation leaves events and metrics like those of a run, so one function measures both.

Synchronous training is the same pipeline with eta = 0: all devices generate, then all train.
Left out: where the costs come from, and what a simulation is good for (simulate.py),
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
from runtime.config import Config
from runtime.messages import Group
from runtime.pictures import column


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
    parent_mb: float = 0.0  # added for each megabyte of it
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
    """One simulation. Its methods run at a moment of it: `now`, in seconds."""

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
        self.now = 0.0
        self.learner = self.learn()
        self.idle = True  # the learner waits for a group
        self.inbox = []  # verified groups that the learner has not taken in
        self.arrived = 0  # groups that arrived since the step began
        self.starts = [record[0] for record in costs.groups]
        self.events, self.rows = defaultdict(list), []

    def run(self) -> PipelineLog:
        """Simulate all steps."""
        self.go_on()
        self.admit()
        while self.version < self.config.steps:
            self.now, _, action = heapq.heappop(self.agenda)
            action()
        return PipelineLog(self.config, self.synchronous, self.events, self.rows)

    def plan(self, time, action, *arguments):
        """Put an action on the agenda."""
        heapq.heappush(self.agenda, (time, next(self.order), partial(action, *arguments)))

    def note(self, process, kind, t, **details):
        """Write an event into the log; returns it."""
        event = {"t": t, "process": process, "kind": kind, **details}
        self.events[kind].append(event)
        return event

    # ------------------------------------------------------------------------------- generation

    def admit(self):
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
                self.wake(worker)

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

    def wake(self, worker):
        """Something is new for a worker: it looks at its next token boundary."""
        if not worker.steps:
            return self.boundary(worker, worker.ticket)
        done = max(1, ceil((self.now - worker.begin) / worker.pace))
        if done < worker.steps:
            worker.steps = done
            self.plan_boundary(worker)

    def plan_boundary(self, worker):
        """Plan the boundary after `worker.steps` steps, in place of the one planned before."""
        worker.ticket += 1
        stop = worker.begin + worker.steps * worker.pace
        self.plan(stop, self.boundary, worker, worker.ticket)

    def boundary(self, worker, ticket):
        """A token boundary at which something changes; decode from here to the next one."""
        if ticket != worker.ticket:
            return  # another boundary was planned since
        if worker.steps:
            self.finish(worker)
        costs = self.costs
        factor = costs.alone if self.synchronous else 1.0
        worker.woken = self.now
        worker.begin = self.now + factor * self.refill(worker)
        running = worker.running
        worker.steps = int(min(worker.left[running], default=0))
        if worker.steps:
            slot = costs.step_slot + costs.step_context * worker.context()
            seconds = costs.step + self.config.slots * slot + costs.step_running * running.sum()
            worker.pace = factor * seconds
            self.plan_boundary(worker)

    def finish(self, worker):
        """The planned steps are done; episodes that have all their tokens leave their slots."""
        running, steps = worker.running, worker.steps
        amounts = {"steps": steps, "slot_steps": steps * int(running.sum())}
        amounts |= {"context": steps * worker.context(), "decode": steps * worker.pace}
        amounts["seconds"] = self.now - worker.woken
        self.note(worker.name, "generate", worker.woken, **amounts)
        worker.left[running] -= steps
        worker.cached[running] += steps
        for slot in np.flatnonzero(running & (worker.left == 0)):
            group, sample = worker.samples[slot]
            group.trajectories.append(sample)
            if len(group.trajectories) == self.config.group_size:
                self.note(worker.name, "finish", self.now, group=group.group_id)
                self.verify(group)

    def refill(self, worker):
        """Adopt new weights as `swap` says, then fill the free slots; returns the seconds."""
        costs, running, seconds = self.costs, worker.running, 0.0
        if worker.version < self.version:
            size = int(running.sum())
            if self.config.swap == "drain" and size:
                return 0.0  # nothing new starts until the running episodes are over
            worker.version = self.version
            self.note(worker.name, "swap", self.now, version=self.version, size=size)
            if self.config.swap == "recompute" and size:
                seconds += costs.refill + costs.prefill * worker.cached[running].sum()
        free = np.flatnonzero(~running)[: len(worker.waiting)]
        prompts = [self.start_sample(worker, slot) for slot in free]
        seconds += len(free) * costs.episode + sum(prompts) * costs.prefill
        return seconds + costs.refill * any(prompts)

    def start_sample(self, worker, slot):
        """Give a slot to the next sample; returns the prompt tokens to compute: once a group."""
        group, length = worker.waiting.popleft()
        prompt, number, version = group.problem["prompt"], group.group_id, worker.version
        worker.samples[slot] = (group, SimpleNamespace(oldest=version, tokens=length))
        worker.left[slot] = max(1, length - prompt)
        worker.cached[slot] = prompt
        computed = worker.prompts.get(number)
        worker.prompts[number] = version
        if computed is None:
            facts = {"group": number, "version": version, "size": prompt}
            self.note(worker.name, "start", self.now, **facts)
        return 0 if computed == version else prompt

    # ------------------------------------------------------- verification and learning

    def verify(self, group):
        """Verify a group by the reward worker that is free first, once the parent has it."""
        if not self.config.reward_workers:
            return self.arrive(group)  # who trains verifies: see `learn`
        ready = self.now if self.synchronous else self.by_parent(group)
        begin = max(ready + self.costs.delivery, self.verifiers[0])
        stop = begin + self.costs.score
        heapq.heapreplace(self.verifiers, stop)
        lengths = [t.tokens for t in group.trajectories]
        facts = {"group": group.group_id, "lengths": lengths, "seconds": stop - begin}
        self.note("reward-0", "score", begin, **facts)
        self.plan(stop, self.arrive, group)

    def by_parent(self, group):
        """When the parent is done with a group that has just been generated. It does so beside the
        learner's step, which a GPU computes."""
        costs, tokens = self.costs, sum(t.tokens for t in group.trajectories)
        seconds = costs.parent_group + costs.parent_mb * TOKEN_MB * tokens
        begin = max(self.now, self.parent_free)
        self.parent_free = begin + seconds
        self.note("parent", "handle", begin, group=group.group_id, seconds=seconds)
        return self.parent_free

    def arrive(self, group):
        """A verified group reaches the learner."""
        self.inbox.append(group)
        self.arrived += 1
        if self.idle:
            self.go_on()

    def go_on(self):
        """The learner goes on, until something takes time, or it has nothing to do."""
        seconds = next(self.learner)
        self.idle = seconds is None
        if not self.idle:
            self.plan(self.now + seconds, self.go_on)

    def learn(self):
        """The learner's loop: take in what has arrived, train, publish. Yields the seconds that
        something takes, or None to wait for a group."""
        config, costs, buffer = self.config, self.costs, self.buffer
        # Without reward workers a synchronous learner verifies, once all groups are generated.
        enough = 1 if config.reward_workers else config.groups_per_step
        each = costs.handle if config.reward_workers else costs.score
        while True:
            if len(self.inbox) >= enough:
                groups, self.inbox = self.inbox, []
                yield len(groups) * each
                for group in groups:
                    buffer.complete(group)
                    group.problem["worker"].load -= 1
            batch = buffer.next_batch(self.version)
            if buffer.dropped:
                buffer.dropped.clear()
                self.admit()
            if batch is None:
                if len(self.inbox) < enough:
                    yield None
                continue
            self.arrived = 0
            trained = [group.group_id for group in batch]
            step = self.note("learner", "train", self.now, version=self.version, groups=trained)
            yield self.train(batch)
            while self.arrived:  # the step ends when it has taken in what arrived meanwhile
                late, self.arrived = self.arrived * costs.listen, 0
                yield late
            step["seconds"] = self.now - step["t"]
            facts = {"version": self.version + 1, "seconds": costs.publish}
            self.note("learner", "publish", self.now, **facts)
            yield costs.publish
            self.version += 1
            for worker in self.workers:
                self.wake(worker)
            self.rows[-1]["t"] = self.now + costs.after
            if not self.synchronous:
                self.admit()
            yield costs.after
            self.admit()

    def train(self, batch):
        """A row of metrics for a step; returns its seconds."""
        config, costs, number = self.config, self.costs, self.version + 1
        samples = [t for group in batch for t in group.trajectories]
        lengths = [t.tokens for t in samples]
        tokens = sum(lengths)
        micro_batches = len(pack(lengths, config.token_budget, config.team_size))
        age = float(np.mean([staleness(t, self.version) for t in samples]))
        row = {"step": number, "sequence_tokens": tokens, "micro_batches": micro_batches}
        self.rows.append(row | {"staleness_mean": age})
        seconds = micro_batches * costs.micro_batch + tokens * costs.train_token
        if config.reference_every and number % config.reference_every == 0:
            seconds += tokens * costs.reference_token
        seconds = costs.train + seconds / config.team_size
        return seconds if config.team_size == 1 else seconds + costs.all_reduce


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
