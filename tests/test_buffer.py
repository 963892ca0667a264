"""buffer.py against naive oracles: every small case, thousands of random schedules; broken rules
must fail.

The oracle knows nothing of N(<=s). It keeps a plain list of groups and thinks in deadlines: oldest
first, the i-th group can be trained at version v + i // B at the latest, which must be no later
than its start + eta. Staleness is read from the tokens.
"""

import dataclasses
import itertools
import random
from collections import Counter
from dataclasses import dataclass, field
from functools import lru_cache

import numpy as np
import pytest

import buffer as buffer_room
from buffer import Buffer, may_admit, may_leave_behind, staleness
from fast.batches import pack
from runtime.messages import Group, Trajectory


def trajectory(group_id: int, versions: list[int], sample: int = 0, prompt: int = 2) -> Trajectory:
    """An episode with a prompt (version -1, not trained) and one token for each version."""
    stamps = np.array([-1] * prompt + versions, np.int32)
    return Trajectory(
        group_id,
        sample,
        noise_key=0,
        tokens=np.zeros(len(stamps), np.int32),
        loss_mask=stamps >= 0,
        logprobs=np.zeros(len(stamps), np.float32),
        versions=stamps,
        turns=[(prompt, len(stamps))],
    )


# ------------------------------------------------------- the rule against all that can happen


@lru_cache(None)
def can_be_trained(starts: tuple, version: int, eta: int, B: int) -> bool:
    """Whether some choice of batches, of up to B groups a version, meets all deadlines."""
    if not starts:
        return True
    if min(starts) + eta < version:
        return False
    size = min(B, len(starts))
    for chosen in set(itertools.combinations(starts, size)):
        left = list(starts)
        for start in chosen:
            left.remove(start)
        if can_be_trained(tuple(left), version + 1, eta, B):
            return True
    return False


def small_cases():
    """(starts, version, eta, B) of all small sets of outstanding groups."""
    version = 5
    for eta, B in itertools.product((0, 1, 2), (1, 2)):
        for count in range((eta + 1) * B + 2):
            possible = range(version - eta, version + 1)
            for starts in itertools.combinations_with_replacement(possible, count):
                yield starts, version, eta, B


def test_a_group_is_admitted_exactly_when_all_can_be_trained_in_time():
    seen = {True: 0, False: 0}
    for starts, version, eta, B in small_cases():
        if not can_be_trained(starts, version, eta, B):
            continue  # admission has not let it come to this
        for start in range(version - eta, version + 1):
            wanted = can_be_trained(tuple(sorted([*starts, start])), version, eta, B)
            assert may_admit(list(starts), start, version, eta, B) is wanted, (starts, start)
            seen[wanted] += 1
    assert min(seen.values()) > 50, seen


def test_what_stays_behind_is_exactly_what_later_batches_can_still_train():
    seen = {True: 0, False: 0}
    for starts, version, eta, B in small_cases():
        wanted = can_be_trained(starts, version + 1, eta, B)
        assert may_leave_behind(list(starts), version, eta, B) is wanted, (starts, version, eta, B)
        seen[wanted] += 1
    assert min(seen.values()) > 20, seen


# ------------------------------------------------------------------------------------- the driver


class Violation(Exception):
    """The driver saw the buffer break its promise (not an AssertionError of buffer.py itself)."""


def must(condition: bool, *what) -> None:
    if not condition:
        raise Violation(*what)


@dataclass
class Flight:
    """The oracle's view of one outstanding group: the versions of each sample's tokens."""

    group_id: int
    start: int
    samples: list[list[int]]
    straggler: bool
    order: int = -1  # of completion; -1: still being generated

    def staleness(self, version: int) -> int:
        oldest = 10**9
        for sample in self.samples:
            for token in sample:
                oldest = min(oldest, token)
        return version - oldest


@dataclass
class Driver:
    """Drives a buffer through one random schedule; every answer is compared with the oracle's."""

    buffer: Buffer
    random: random.Random
    formula: bool = True  # False: judge outcomes only, not the admission formula
    version: int = 0
    flights: list[Flight] = field(default_factory=list)  # in order of admission
    admitted: int = 0
    trained: int = 0
    requeued: int = 0
    discarded: dict = field(default_factory=dict)
    ages: set = field(default_factory=set)

    def __post_init__(self):
        self.B, self.eta = self.buffer.groups_per_step, self.buffer.eta
        self.wait, self.clock = self.buffer.on_stale == "wait", 0

    # ------------------------------------------------------------------------------ the oracle

    def on_time(self, flights: list[Flight], version: int) -> bool:
        """Trained oldest first, B at each version from `version` on: is every deadline met?"""
        starts = sorted(f.start for f in flights)
        return all(version + i // self.B <= s + self.eta for i, s in enumerate(starts))

    def formula_holds(self) -> bool:
        """DESIGN section 4, word for word: N(<=s') + 1 <= (s' + eta - v + 1) B for s' >= s = v."""
        for s in range(self.version, self.version + self.eta + 2):
            count = len([f for f in self.flights if f.start <= s])
            if not count + 1 <= (s + self.eta - self.version + 1) * self.B:
                return False
        return True

    def expected(self) -> list[int] | None:
        """The batch that must come out: earliest completed first, else oldest first, else none."""
        done = sorted((f for f in self.flights if f.order >= 0), key=lambda f: f.order)
        if len(done) < self.B:
            return None
        for order in (done, sorted(done, key=lambda f: (f.start, f.order))):
            chosen = {f.group_id for f in order[: self.B]}
            left = [f for f in self.flights if f.group_id not in chosen]
            if not self.wait or self.on_time(left, self.version + 1):
                return sorted(chosen)
        return None

    def check(self) -> None:
        told = Counter(reason for _, reason in self.buffer.dropped)
        must(told == self.discarded, "discarded", told, self.discarded)
        gone = self.trained + sum(self.discarded.values())
        must(self.admitted == gone + len(self.flights), "conservation", gone)
        in_flight = {f.group_id: f.start for f in self.flights}
        must(self.buffer.outstanding == in_flight, "in flight", in_flight)
        if self.wait:
            must(self.on_time(self.flights, self.version), "a deadline cannot be met any more")

    # ------------------------------------------------------------------------------ the moves

    def admit(self) -> bool:
        allowed = self.buffer.may_admit(self.version)
        if self.formula:
            must(allowed == self.formula_holds(), "admission", self.version, len(self.flights))
        if allowed:
            self.buffer.admit(self.admitted, self.version)
            samples = [[self.version] for _ in range(self.random.randint(1, 2))]
            straggler = self.random.random() < 0.1
            self.flights.append(Flight(self.admitted, self.version, samples, straggler))
            self.admitted += 1
        return allowed

    def generate(self, flight: Flight) -> None:
        """A few tokens, by a worker whose weights may lag behind the learner's."""
        for sample in flight.samples:
            for _ in range(self.random.randint(0, 2)):
                sample.append(self.random.randint(sample[-1], self.version))

    def complete(self, flight: Flight) -> None:
        parts = [trajectory(flight.group_id, v, i) for i, v in enumerate(flight.samples)]
        group = Group(flight.group_id, flight.start, {}, parts)
        must(self.buffer.complete(group) is True, "a finished group was refused")
        must(self.buffer.complete(group) is False, "a duplicate was taken")
        flight.order = self.clock = self.clock + 1

    def requeue(self, flight: Flight) -> None:
        """Its worker died: everything it had generated is lost."""
        self.buffer.requeue(flight.group_id, self.version)
        flight.start, flight.samples = self.version, [[self.version]]
        self.requeued += 1

    def discard(self, flight: Flight) -> None:
        self.buffer.discard(flight.group_id, "failed")
        self.discarded["failed"] = self.discarded.get("failed", 0) + 1
        self.flights.remove(flight)

    def step(self) -> bool:
        """Ask for a batch; only a batch moves the version."""
        if not self.wait:
            for f in [f for f in self.flights if f.order >= 0]:
                if f.staleness(self.version) > self.eta:
                    self.flights.remove(f)
                    self.discarded["stale"] = self.discarded.get("stale", 0) + 1
        expected = self.expected()
        batch = self.buffer.next_batch(self.version)
        ids = None if batch is None else [g.group_id for g in batch]
        flights = {f.group_id: f for f in self.flights}
        for group_id in ids or []:
            must(group_id in flights, "trained twice, or never admitted", group_id)
            age = flights[group_id].staleness(self.version)
            must(0 <= age <= self.eta, "staleness", age, self.eta)
            self.ages.add(age)
        must(ids == expected, "another batch was due", ids, expected)
        if ids is None:
            return False
        self.flights = [f for f in self.flights if f.group_id not in ids]
        self.trained += len(ids)
        self.version += 1
        return True

    def drain(self) -> None:
        """No deadlock: once all that is outstanding has completed, there is a batch."""
        for f in [f for f in self.flights if f.order < 0]:
            self.complete(f)
        if not self.step():  # in drop mode this has discarded what is too old
            must(len(self.flights) < self.B, "deadlock: all is complete, nothing may be trained")
            while len(self.flights) < self.B:
                must(self.admit(), "deadlock: too few groups, and none may be admitted")
                self.complete(self.flights[-1])
            must(self.step(), "deadlock: a full batch of new groups is not trained")

    def run(self, moves: int) -> None:
        """`moves` random moves; each schedule has its own mixture of them."""
        weights = [self.random.choice([0, 1, 3, 6]) for _ in range(3)]
        kinds = self.random.choices(
            ["admit", "finish", "step", "lose", "discard", "drain"],
            [6 + weights[0], 6 + weights[1], 6 + weights[2], 1, 0.5, 0.3],
            k=moves,
        )
        for kind in kinds:
            running = [f for f in self.flights if f.order < 0]
            quick = [f for f in running if not f.straggler] or running
            if kind == "admit":
                for _ in range(self.random.randint(1, 3 * self.B)):
                    if not self.admit():
                        break
            elif kind == "finish" and quick:
                for f in self.random.sample(quick, self.random.randint(1, len(quick))):
                    self.generate(f)
                    self.complete(f)
            elif kind == "step":
                self.step()
            elif kind == "lose" and running:
                self.requeue(self.random.choice(running))
            elif kind == "discard" and self.flights:
                self.discard(self.random.choice(self.flights))
            elif kind == "drain":
                self.drain()
            self.check()
        self.drain()
        self.check()


def drive(seed: int, make=Buffer, on_stale: str = "wait", **options) -> Driver:
    """One random schedule, determined by its seed."""
    chance = random.Random(seed)
    eta, size = chance.choice([0, 1, 2, 4, 8]), min(chance.randint(1, 8), chance.randint(1, 8))
    driver = Driver(make(size, eta, on_stale), chance, **options)
    driver.run(chance.randint(10, 40))
    return driver


# ------------------------------------------------------------------------------------- properties


def test_random_schedules_wait():
    """No group later than eta, none dropped, no deadlock, nothing lost: 2000 schedules."""
    drivers = [drive(seed) for seed in range(2000)]
    for d in drivers:
        assert max(d.ages) <= d.eta and "stale" not in d.discarded
    # the schedules reach what they are meant to reach
    for eta in (0, 1, 2, 4, 8):
        assert max(max(d.ages) for d in drivers if d.eta == eta) == eta
    assert sum(d.requeued for d in drivers) > 500
    assert sum(sum(d.discarded.values()) for d in drivers) > 300
    assert sum(d.version for d in drivers) > 6000


def test_random_schedules_drop():
    """GLM-5's rule: discards exactly what exceeds eta, counts it, trains nothing older."""
    drivers = [drive(seed, on_stale="drop") for seed in range(1000)]
    assert all(max(d.ages) <= d.eta for d in drivers)
    assert sum(d.discarded.get("stale", 0) for d in drivers) > 100


# -------------------------------------------------------- the property has teeth: broken buffers


def test_the_buffer_asserts_the_theorem_itself(monkeypatch):
    """Without a driver: a batch with a token that is too old never leaves a real Buffer."""
    monkeypatch.setattr(buffer_room, "may_leave_behind", lambda *_: True)
    buffer = Buffer(1, 1)
    buffer.admit(0, 0)
    buffer.complete(Group(0, 0, {}, [trajectory(0, [2, 3]), trajectory(0, [0, 3], sample=1)]))
    with pytest.raises(AssertionError, match="staleness 3 > 1"):
        buffer.next_batch(3)


# ------------------------------------------------------------------------------ single behaviours


def test_staleness_counts_from_the_oldest_generated_token():
    t = trajectory(0, [5, 3, 7])
    assert t.oldest == 3 and staleness(t, 9) == 6
    group = Group(0, 0, {}, [trajectory(0, [5]), t, trajectory(0, [4])])
    assert group.oldest == 3 and staleness(group, 9) == 6  # that of its oldest sample
    assert (t.versions[:2] == -1).all()  # the prompt is older than anything, and does not count
    mask = t.loss_mask.copy()
    mask[3] = False  # an environment token in between does not count either
    other = dataclasses.replace(t, loss_mask=mask)
    assert other.oldest == 5 and staleness(other, 9) == 4
    nothing = dataclasses.replace(t, loss_mask=np.zeros_like(mask))
    assert staleness(nothing, 9) == 0  # nothing generated: nothing to be stale


def test_synchronous_when_eta_is_zero():
    buffer = Buffer(3, 0)
    for i in range(3):
        buffer.admit(i, 0)
    assert not buffer.may_admit(0)
    for i in (2, 0):
        assert buffer.complete(Group(i, 0, {}, [trajectory(i, [0])]))
        assert buffer.next_batch(0) is None
    buffer.complete(Group(1, 0, {}, [trajectory(1, [0])]))
    assert [g.group_id for g in buffer.next_batch(0)] == [0, 1, 2]  # sorted: same sums as sync
    assert buffer.may_admit(1) and buffer.outstanding == {} and buffer.next_batch(1) is None


def test_earliest_completed_first_unless_a_deadline_is_at_stake():
    buffer = Buffer(1, 1)
    buffer.admit(0, 0)
    buffer.admit(1, 0)
    buffer.complete(Group(1, 0, {}, [trajectory(1, [0])]))
    assert [g.group_id for g in buffer.next_batch(0)] == [1]  # 0 can still be trained at 1
    buffer.admit(2, 1)
    buffer.complete(Group(2, 1, {}, [trajectory(2, [1])]))
    assert buffer.next_batch(1) is None  # 0 must be trained at 1: wait for it
    buffer.complete(Group(0, 0, {}, [trajectory(0, [0])]))
    assert [g.group_id for g in buffer.next_batch(1)] == [0]  # 2 was there earlier
    assert [g.group_id for g in buffer.next_batch(2)] == [2]


def test_groups_that_are_not_taken():
    buffer = Buffer(1, 2)
    group = Group(0, 0, {}, [trajectory(0, [0])])
    assert buffer.complete(group) is False  # never admitted
    buffer.admit(0, 0)
    buffer.requeue(0, 1)
    assert buffer.complete(group) is False  # a copy from before the requeue
    fresh = Group(0, 1, {}, [trajectory(0, [1, 2])])
    assert buffer.complete(fresh) is True
    assert buffer.complete(fresh) is False  # here already
    assert buffer.next_batch(2) == [fresh]
    assert buffer.complete(fresh) is False  # trained already
    buffer.admit(1, 2)
    buffer.discard(1, "verifier_error")
    assert buffer.complete(Group(1, 2, {}, [trajectory(1, [2])])) is False
    assert buffer.outstanding == {} and buffer.dropped == [(1, "verifier_error")]
    buffer = Buffer(1, 0)
    buffer.admit(0, 3)
    with pytest.raises(AssertionError, match="group 1 at version 3 breaks a deadline"):
        buffer.admit(1, 3)
    with pytest.raises(AssertionError, match="token of version 2 < start 3"):
        buffer.complete(Group(0, 3, {}, [trajectory(0, [3, 2])]))


# ---------------------------------------------------------------------------------------- packing


def test_pack_random():
    chance = random.Random(0)
    for _ in range(500):
        lengths = [chance.randint(0, 40) for _ in range(chance.randint(0, 30))]
        budget = chance.randint(1, 60)
        batches = pack(lengths, budget)
        assert sorted(i for b in batches for i in b) == list(range(len(lengths)))
        assert all(batches)
        for b in batches:
            assert len(b) * max(lengths[i] for i in b) <= budget or len(b) == 1  # with padding
        assert batches == pack(list(lengths), budget)


def test_pack_examples():
    assert pack([], 10) == []
    assert pack([4, 4, 4], 8) == [[0, 1], [2]]  # exactly full; equal lengths keep their order
    assert pack([3, 99, 5, 2], 15) == [[3, 0, 2], [1]]  # too long: alone
    assert pack([3, 99, 5, 2], 14) == [[3, 0], [2], [1]]  # three of them would be 5 wide
    assert pack([99, 98], 10) == [[1], [0]]
    assert pack([4, 4, 4], 99, learners=2) == [[0], [1], [2]]  # six at most: half of them
