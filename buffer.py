"""buffer.py: when a group may be trained, so that no token is ever older than `max_staleness`; and
which groups are fit to be trained at all.

`may_admit` and `may_leave_behind` are the whole rule, as arithmetic; `Buffer` keeps the groups and
asks them. Boundary: it never looks at what a token means. Left out: threads, clocks, I/O, and
what became of every group: runtime/ledger.py keeps that, and is compared with this at every step.

The theorem. A group that started at version s must be trained at version s + eta at the latest:
that is its deadline (eta = max_staleness). A step trains B groups. So, at the learner's version v,
what is due by a deadline must fit into the batches that are left before it. N(<=s) counts the
outstanding groups (admitted, not yet trained or discarded) that started at s or before:
  admission  of a group with start s:  N(<=s') + 1 <= (s' + eta - v + 1) B   for s <= s' <= v
  batching   at version v leaves behind: N(<=s') <= (s' + eta - v) B       for v-eta <= s' <= v
With s' = v - eta, batching leaves nothing behind that is due now. And no worker begins a group
with older weights than its start (`_refill` in rollout.py), so no token is late. If every group
completes sooner or later, none is dropped. docs/design.md has the proof.

Example: B = 2, eta = 1, v = 5. Groups that started at 4 must be trained now: 2 at most. With those
that started at 5, 4 may be outstanding: this batch and the next.
"""

from bisect import bisect_right
from collections import Counter

from runtime.messages import Group, Trajectory


def may_admit(
    starts,
    start,
    version,
    eta,
    B,
) -> bool:
    """Whether a group that starts at `start` may be added; `starts` of those that are outstanding,
    ascending. A run always adds at `version`; the theorem also holds for an earlier start."""
    return all(
        # those that are due at version s + eta, and batches until then, this version's included
        bisect_right(starts, s) + 1 <= (s + eta - version + 1) * B
        for s in range(start, version + 1)
    )


def may_leave_behind(starts, version, eta, B) -> bool:
    """Whether groups with these starts, ascending, may wait while a batch is trained."""
    return all(
        bisect_right(starts, s) <= (s + eta - version) * B  # without this version's batch
        for s in range(version - eta, version + 1)
    )


def staleness(record: Trajectory | Group, version: int) -> int:
    """Versions between the oldest generated token and the version that trains it (>= 0)."""
    return max(0, version - record.oldest)


class Buffer:
    """Outstanding groups, in order, with the two rules of the theorem; no threads, no clocks.

    on_stale="wait" uses the rules above and never drops; "drop" is GLM-5's rule (arXiv 2602.15763):
    train whatever is complete, discard a group that is older than eta (it favours quick answers).
    """

    def __init__(self, groups_per_step: int, max_staleness: int, on_stale: str = "wait"):
        assert groups_per_step >= 1 and max_staleness >= 0, (groups_per_step, max_staleness)
        self.groups_per_step = groups_per_step
        self.eta = max_staleness
        self.on_stale = on_stale
        self.outstanding = {}  # group id -> start version, in order of admission
        self.completed = {}  # group id -> Group, in order of completion
        self.dropped = []  # group id and reason, until somebody logs them

    def starts(self, without=()) -> list:
        """Where the outstanding groups started, ascending; without some of them."""
        return sorted([self.outstanding[i] for i in self.outstanding.keys() - without])

    def may_admit(self, version: int) -> bool:
        """Whether one more group, started now, still meets every deadline."""
        return may_admit(self.starts(), version, version, self.eta, self.groups_per_step)

    def admit(self, group_id: int, version: int):
        """Fix a group's start version; the caller asked `may_admit` before."""
        assert group_id not in self.outstanding, f"group {group_id} is admitted already"
        assert self.may_admit(version), f"group {group_id} at version {version} breaks a deadline"
        self.outstanding[group_id] = version

    def requeue(self, group_id: int, version: int):
        """A lost group starts again, at today's version: its deadline only moves away."""
        assert group_id in self.outstanding, f"group {group_id} is not outstanding"
        assert group_id not in self.completed, f"group {group_id} is complete: nothing was lost"
        assert version >= self.outstanding[group_id], f"group {group_id} cannot start in the past"
        self.outstanding[group_id] = version

    def complete(self, group: Group) -> bool:
        """Take a verified group; False for one that is unknown, already here (a duplicate), or a
        copy from before a requeue: the group that counts is still being made."""
        start = self.outstanding.get(group.group_id)
        if start is None or group.group_id in self.completed or group.start < start:
            return False

        assert group.oldest >= start, (
            f"group {group.group_id}: token of version {group.oldest} < start {start}"
        )
        self.completed[group.group_id] = group
        return True

    def discard(self, group_id: int, reason: str):
        """Take an outstanding group out without training it, for a reason."""
        del self.outstanding[group_id]
        self.completed.pop(group_id, None)
        self.dropped.append((group_id, reason))

    def next_batch(self, version: int) -> list[Group] | None:
        """B completed groups to train at `version`, sorted by id, or None: wait for stragglers.

        Earliest completed first; if that leaves a deadline unmet, oldest start first.
        """
        B = self.groups_per_step
        if self.on_stale == "drop":
            for group in list(self.completed.values()):
                if staleness(group, version) > self.eta:
                    self.discard(group.group_id, "stale")
        if len(self.completed) < B:
            return None
        by_start = sorted(self.completed, key=self.outstanding.get)  # stable
        for order in (list(self.completed), by_start):
            left = self.starts(without=order[:B])
            if self.on_stale == "drop" or may_leave_behind(left, version, self.eta, B):
                return self.take(order[:B], version)
        return None

    def take(self, chosen: list, version: int) -> list[Group]:
        """Remove a batch; the theorem is asserted on the tokens themselves, not on bookkeeping."""
        batch = [self.completed.pop(group_id) for group_id in sorted(chosen)]
        for group in batch:
            del self.outstanding[group.group_id]
            age = staleness(group, version)
            assert age <= self.eta, f"group {group.group_id}: staleness {age} > {self.eta}"
        return batch


# ---- a batch ----


def unfit(group: Group, keep_dead: bool = True) -> str | None:
    """Why a group should not be trained; None if it may.

    A failure of the environment is no reward: if half of the samples or more have failed, the
    group is discarded, for the failure that most of them had (GLM-5, arXiv 2602.15763). Without
    `keep_dead`, so is one in which all rewards are equal: it teaches nothing (DAPO's dynamic
    sampling, arXiv 2503.14476).
    """
    failed = [t.finish for t in group.trajectories if t.failed]
    if 2 * len(failed) >= len(group.trajectories):
        return Counter(failed).most_common(1)[0][0]
    rewards = {t.reward for t in group.trajectories if not t.failed}
    return "dead" if len(rewards) == 1 and not keep_dead else None


def repaired(groups: list[Group]) -> list[Trajectory]:
    """What groups are trained with: sound samples are repeated in place of those that failed, so
    that every prompt has the same weight (GLM-5, the same place). Copies count in the mean of a
    group, also as "the others" of rloo."""
    trajectories = []
    for group in groups:
        sound = [t for t in group.trajectories if not t.failed]
        trajectories += [sound[i % len(sound)] for i in range(len(group.trajectories))]
    return trajectories
