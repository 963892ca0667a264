"""simulate.py: a simulated pipeline, asked what published systems should have gained.

A discrete-event simulation: an agenda of moments at which something changes, in order of time. What
decides is real: `Buffer` admits groups and picks batches, and a group goes to the least busy worker.
What takes time is not: `Costs` says how long each thing takes. Synchronous training is the same
pipeline with eta = 0 in which all devices generate, then all train.

`python bench.py scale` predicts what published systems have gained, from costs that arithmetic
gives for a language model on a GPU (`ASSUMED`): nobody has published an event log.
Left out: faults, slow environments, the parent's time, swaps that rebuild or drain the cache, and
networks, except for one all-reduce a step; memory: every split of the devices fits.
"""

import heapq
from collections import defaultdict, deque
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import count, cycle
from math import ceil
from pathlib import Path
from types import SimpleNamespace

import numpy as np
from tqdm import tqdm

from buffer import Buffer, staleness
from lab.plots import column, save_result
from runtime.config import Config
from runtime.messages import Group


@dataclass
class Costs:
    """Seconds of everything that takes time on one device, and the episodes of a task."""

    step: float = 0.0  # a decode step, however full
    step_running: float = 0.0  # added for each slot that is busy
    prefill: float = 0.0  # of a token of a prompt
    score: float = 0.0  # the verification of a group
    train: float = 0.0  # an optimizer step, whatever is in it
    train_token: float = 0.0  # added for each token of the episodes, prompts included
    all_reduce: float = 0.0  # several learners join their gradients
    publish: float = 0.0  # new weights are written for the workers
    # a group: tokens of its prompt, tokens of each whole episode; again from the first at the end
    groups: list[list[int]] = field(default_factory=list)


class SimulatedWorker:
    """A rollout worker: what its slots hold, and when that changes."""

    def __init__(self, slots: int):
        self.load = 0  # groups that it has and the learner has not taken in
        self.waiting: deque[tuple] = deque()  # (group, tokens) of samples without a slot
        self.samples: list = [None] * slots
        self.left = np.zeros(slots, np.int64)  # tokens still to generate
        self.begin = 0.0  # when decoding began, after the prompts
        self.pace = 0.0  # seconds a decode step
        self.steps = 0  # decode steps until the next change; 0: idle
        self.ticket = 0  # only the planned boundary with this number still counts


class Pipeline:
    """One simulation. Its methods run at a moment of it: `now`, in seconds."""

    def __init__(self, config: Config, costs: Costs, synchronous: bool = False):
        self.config, self.costs, self.synchronous = config, costs, synchronous
        self.buffer = Buffer(config.groups_per_step, config.max_staleness, config.on_stale)
        self.workers = [SimulatedWorker(config.slots) for _ in range(config.rollout_workers)]
        self.verifiers = [0.0] * config.reward_workers  # heap: when each reward worker is free
        self.agenda, self.order = [], count()  # heap of (time, order, what happens)
        self.group_ids, self.groups = count(), cycle(costs.groups)
        self.version, self.now, self.idle = 0, 0.0, False  # idle: the learner waits for a group
        self.learner = self.learn()
        self.lengths = {}  # group id -> tokens of its episodes
        self.generating, self.steps = [], []  # what they did, in order

    def run(self) -> "Pipeline":
        """Simulate all steps; returns the pipeline with its records."""
        self.go_on()
        while self.version < self.config.steps:
            self.now, _, action = heapq.heappop(self.agenda)
            action()
        return self

    def plan(self, time, action, *arguments):
        """Put an action on the agenda."""
        heapq.heappush(self.agenda, (time, next(self.order), partial(action, *arguments)))

    # --------------------------------------------------------------------------- generation

    def admit(self):
        """Admit as many groups as the deadlines allow; each goes to the least busy worker."""
        wanted = (self.config.steps - self.version) * self.config.groups_per_step
        while len(self.buffer.outstanding) < wanted and self.buffer.may_admit(self.version):
            prompt, *lengths = next(self.groups)
            worker = min(self.workers, key=lambda worker: worker.load)
            worker.load += 1
            problem = {"prompt": prompt, "worker": worker, "computed": None}
            group = Group(next(self.group_ids), self.version, problem)
            self.lengths[group.group_id] = lengths
            self.buffer.admit(group.group_id, self.version)
            worker.waiting.extend((group, tokens) for tokens in lengths)
        for worker in self.workers:
            if worker.waiting and not worker.left.all():
                self.wake(worker)

    def wake(self, worker):
        """There is work for a free slot: the worker looks at its next token boundary."""
        if not worker.steps:
            return self.boundary(worker, worker.ticket)
        worker.steps = min(worker.steps, max(1, ceil((self.now - worker.begin) / worker.pace)))
        self.plan_boundary(worker)

    def plan_boundary(self, worker):
        """Plan the boundary after `worker.steps` steps, in place of the one planned before."""
        worker.ticket += 1
        stop = worker.begin + worker.steps * worker.pace
        self.plan(stop, self.boundary, worker, worker.ticket)

    def boundary(self, worker, ticket):
        """A token boundary: full episodes leave, waiting samples begin; decode to the next one."""
        if ticket != worker.ticket:
            return
        if worker.steps:
            self.advance(worker)
        free = np.flatnonzero(worker.left == 0)[: len(worker.waiting)]
        prompts = [self.start_sample(worker, slot) for slot in free]
        begin, running = self.now, worker.left[worker.left > 0]
        worker.begin = begin + sum(prompts) * self.costs.prefill
        worker.steps = int(min(running, default=0))
        if worker.steps:
            worker.pace = self.costs.step + self.costs.step_running * len(running)
            self.plan_boundary(worker)
        if worker.begin > begin:
            self.generating.append((begin, worker.begin))

    def start_sample(self, worker, slot):
        """Give a slot to the next sample; returns the prompt tokens to compute: once a group and
        version."""
        group, tokens = worker.waiting.popleft()
        prompt, computed = group.problem["prompt"], group.problem["computed"]
        worker.samples[slot] = (group, SimpleNamespace(oldest=self.version, tokens=tokens))
        worker.left[slot] = max(1, tokens - prompt)
        group.problem["computed"] = self.version
        return 0 if computed == self.version else prompt

    def advance(self, worker):
        """The planned steps are done; episodes that have all their tokens leave their slots."""
        running = worker.left > 0
        self.generating.append((worker.begin, self.now))
        worker.left[running] -= worker.steps
        for slot in np.flatnonzero(running & (worker.left == 0)):
            group, sample = worker.samples[slot]
            group.trajectories.append(sample)
            if len(group.trajectories) == len(self.lengths[group.group_id]):
                done = max(self.now, self.verifiers[0]) + self.costs.score
                heapq.heapreplace(self.verifiers, done)
                self.plan(done, self.arrive, group)

    # ----------------------------------------------------------------------------- learning

    def arrive(self, group):
        """A verified group reaches the learner."""
        self.buffer.complete(group)
        group.problem["worker"].load -= 1
        if self.idle:
            self.go_on()

    def go_on(self):
        """The learner goes on, until something takes time, or it has nothing to do."""
        seconds = next(self.learner)
        self.idle = seconds is None
        if not self.idle:
            self.plan(self.now + seconds, self.go_on)

    def learn(self):
        """The learner's loop. Yields the seconds of what it does, or None to wait for a group."""
        while True:
            self.admit()
            batch = self.buffer.next_batch(self.version)
            if self.buffer.dropped:
                self.buffer.dropped.clear()
                self.admit()
            if batch is None:
                yield None
                continue
            step = self.step_of(batch)
            self.steps.append(step)
            yield step["end"] - self.now
            yield self.costs.publish
            self.version += 1

    def step_of(self, batch: list[Group]) -> dict:
        """A training step: its groups, tokens, mean staleness, begin and end."""
        costs, learners = self.costs, self.config.team_size
        samples = [sample for group in batch for sample in group.trajectories]
        tokens = sum(sample.tokens for sample in samples)
        seconds = costs.train + tokens * costs.train_token / learners
        seconds += costs.all_reduce * (learners > 1)
        age = np.mean([staleness(sample, self.version) for sample in samples])
        row = {"groups": [group.group_id for group in batch], "tokens": tokens}
        return row | {"staleness": float(age), "begin": self.now, "end": self.now + seconds}


def predict(config: Config, costs: Costs, synchronous: bool = False) -> dict[str, float]:
    """Tokens trained a second, idle share of all devices, mean staleness; measured while the
    pipeline is full: without the first and last eta + 1 steps."""
    pipeline = Pipeline(config, costs, synchronous).run()
    first, last = 1 + config.max_staleness, config.steps - 1 - config.max_staleness
    begin, stop = (pipeline.steps[i - 1]["end"] for i in (first, last))
    rows = pipeline.steps[first:last]
    learners = config.team_size
    spans = [(*span, 1) for span in pipeline.generating]
    spans += [(row["begin"], row["end"], learners) for row in pipeline.steps]
    work = sum(max(0.0, min(b, stop) - max(a, begin)) * devices for a, b, devices in spans)
    # in a synchronous run the devices that train are those that generate
    devices = config.rollout_workers + learners * (not synchronous)
    return {
        "tokens_per_s": sum(column(rows, "tokens")) / (stop - begin),
        "idle": 1 - work / ((stop - begin) * devices),
        "staleness": float(np.mean(column(rows, "staleness"))),
    }


# ------------------------------------------------------------------------------ published systems

# One GPU with 3 TB/s and 1 PFLOP/s in bf16 (an H100 or H800), and a language model on it.
ASSUMED = (
    "device: 3 TB/s, 1 PFLOP/s bf16, of which training and prefill reach 40%",
    "decode step: 4 ms + the weights once (2 bytes each) + every running cache once",
    "cache: 20 kB x sqrt(billions of parameters) a token; 256 slots a device",
    "training: 8 FLOPs a parameter and token (activations recomputed); any split of devices",
    "gradients: 2 bytes a parameter twice through 100 GB/s; publication 1 s",
    "answers: 16 to a prompt, 512 prompts a step, log-normal with sigma 0.6 between prompts and "
    "0.6 inside a group, mean about 6,000 tokens, at most 27,648; prompts of 512 tokens",
    "eta = 2, caches kept, nobody fails; a verification takes 0.1 s, and 16 run at once",
    "the baseline generates with continuous batching, then trains, on the same devices",
)
PUBLISHED = (  # what, source, devices, billions of parameters, their speed-up
    ("AReaL 1.5B, 16 nodes", "arXiv 2505.24298 [P]", 128, 1.5, "2.77x"),
    ("AReaL 7B, 24 nodes", "arXiv 2505.24298 [P]", 192, 7.0, "2.27x"),
    ("PipelineRL 7B, 128 H100", "arXiv 2509.19128 [P]", 128, 7.0, "about 2x"),
    ("ROLL Flash RLVR (128 GPUs, 7B assumed)", "arXiv 2510.11345 [P]", 128, 7.0, "2.24x"),
    ("device utilisation (128 GPUs, 7B assumed)", "article [S]", 128, 7.0, "52% -> 87%"),
)
SCALE = {"steps": 12, "slots": 256, "reward_workers": 16, "groups_per_step": 512}


def language_model(billions: float) -> Costs:
    """Costs of a language model on a GPU by arithmetic: see ASSUMED."""
    random, weights = np.random.default_rng(0), 1e9 * billions
    prompts = 4200 * np.exp(0.6 * random.standard_normal((500, 1)))
    answers = prompts * np.exp(0.6 * random.standard_normal((500, 16)))
    lengths = 512 + np.clip(answers, 64, 27648).astype(int)
    cache = 2e4 * billions**0.5 * float((lengths**2).sum() / lengths.sum()) / 2
    return Costs(
        step=4e-3 + 2 * weights / 3e12,
        step_running=cache / 3e12,
        prefill=2 * weights / 4e14,
        score=0.1,
        train_token=8 * weights / 4e14,
        all_reduce=2 * 2 * weights / 1e11,
        publish=1.0,
        groups=[[512, *row] for row in lengths.tolist()],
    )


def best_split(config: Config, costs: Costs, devices: int) -> dict:
    """`predict` for the quickest split of the devices in eighths.

    Speed rises with the number of learners, then falls: the search ends where it falls.
    """
    best = {"tokens_per_s": 0.0}
    for learners in sorted({max(1, devices * eighths // 8) for eighths in range(1, 8)}):
        roles = {"rollout_workers": devices - learners, "learners": learners}
        row = roles | predict(replace(config, **roles), costs)
        if row["tokens_per_s"] < best["tokens_per_s"]:
            break
        best = row
    return best


def bench_scale(folder: Path) -> None:
    """Predicted speed-ups of published systems, beside what they say themselves; scale.json."""
    config, result = Config(**SCALE), {"assumed": ASSUMED, "published": []}
    for what, source, devices, billions, claim in tqdm(PUBLISHED):
        costs = language_model(billions)
        after = best_split(config, costs, devices)
        roles = {"rollout_workers": devices, "learners": devices, "max_staleness": 0, "steps": 7}
        before = predict(replace(config, **roles), costs, synchronous=True)
        row = {"what": what, "source": source, "billions": billions, "published": claim}
        row["speed_up"] = round(after["tokens_per_s"] / before["tokens_per_s"], 2)
        row["utilisation"] = f"{1 - before['idle']:.0%} -> {1 - after['idle']:.0%}"
        result["published"].append(row)
        save_result(folder, "scale", result)
    print("assumed:", *ASSUMED, sep="\n")
