"""messages.py: what travels between processes: the record of an episode, and what workers say.

`Trajectory` is one episode, token by token; a `Group` is all answers to one prompt. `flaw` looks at
what a worker has sent before anybody uses it.
Boundary: this file knows shapes and ranges, never what a token means.
Left out: pipes (pipes.py), processes, and who gets which work (pool.py).

Axes: T tokens of an episode, prompt included · M of them generated · K tokens that sampling kept
"""

import zlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from operator import attrgetter
from typing import NamedTuple

import numpy as np

NEVER = np.iinfo(np.int32).max  # the "oldest version" of an episode without generated tokens
LARGEST_SUM = 1e38  # of the rewards of an episode; reward.py has that of one turn
LOGPROBS = -1e30, 1e-3  # never NaN, never above 0 but for rounding
ARRAYS = {
    "tokens": np.int32,
    "loss_mask": np.bool_,
    "logprobs": np.float32,
    "versions": np.int32,
    "kept_sizes": np.int32,  # empty where sampling is not cut, as is the next one
    "kept": np.int32,
    "teacher": np.float32,  # empty where there is none
}
arrays_of = attrgetter(*ARRAYS)
NO_INTS, NO_FLOATS = np.empty(0, np.int32), np.empty(0, np.float32)


@dataclass
class Trajectory:
    """One episode, token by token: the record that travels. It has no arrays while it is made."""

    group_id: int
    sample_index: int
    noise_key: int  # decides its sampling noise, position by position (rollout.py)
    # start and stop of each of the policy's turns
    turns: list[tuple[int, int]] = field(default_factory=list)
    finish: str = "stop"  # stop, length, env_error, env_timeout, verifier_error, ...
    failure: str = ""  # of a failed episode: the message, the file and the line, for people
    reward: float = 0.0
    turn_rewards: list[float] = field(default_factory=list)
    swaps: list[int] = field(default_factory=list)  # pairs: from this position on, this version
    # int32 [T]: prompt, generated and environment tokens, never re-tokenised
    tokens: np.ndarray = None
    loss_mask: np.ndarray = None  # bool [T]: True where the policy generated
    logprobs: np.ndarray = None  # float32 [T]: behaviour log-probs, exactly as sampled; 0 elsewhere
    versions: np.ndarray = None  # int32 [T]: policy version that produced the token; -1 elsewhere
    # int32 [M]: from how many tokens each one was sampled; [0] where sampling is not cut
    kept_sizes: np.ndarray = field(default_factory=lambda: NO_INTS)
    # int32 [K]: which ones, laid end to end
    kept: np.ndarray = field(default_factory=lambda: NO_INTS)
    # float32 [M]: a teacher's log-probs of what was generated
    teacher: np.ndarray = field(default_factory=lambda: NO_FLOATS)

    @property
    def key(self) -> tuple[int, int]:
        """Which episode it is."""
        return self.group_id, self.sample_index

    @property
    def failed(self) -> bool:
        """True when the environment or the verifier failed: no reward can be read from it."""
        return self.finish not in ("stop", "length")

    @property
    def generated(self) -> int:
        """How many tokens the policy generated."""
        return sum([stop - start for start, stop in self.turns])

    @property
    def oldest(self) -> int:
        """The smallest version among its generated tokens: staleness counts from here."""
        return int(self.versions[self.loss_mask].min(initial=NEVER))


@dataclass
class Group:
    """All answers to one prompt; `start`: the version that admitted it, or issued it again."""

    group_id: int
    start: int
    problem: dict
    trajectories: list[Trajectory] = field(default_factory=list)

    @property
    def oldest(self) -> int:
        """The smallest version among all generated tokens."""
        return min([t.oldest for t in self.trajectories], default=NEVER)

    @property
    def digest(self) -> int:
        """A checksum of all that training reads; failed episodes are not read."""
        crc = 0
        for t in self.trajectories:
            if not t.failed:
                for data in (*arrays_of(t), repr((t.reward, t.turn_rewards)).encode()):
                    crc = zlib.crc32(data, crc)
        return crc

    @property
    def evidence(self) -> dict:
        """What the log keeps of a verified group, so that a replay can be compared with it."""
        return {
            "failed": {i: t.finish for i, t in enumerate(self.trajectories) if t.failed},
            "digest": self.digest,
            "swaps": [t.swaps for t in self.trajectories],
            "lengths": [len(t.tokens) for t in self.trajectories],
        }


# ------------------------------------------------------------------------------------- messages


class Judgement(NamedTuple):
    """Verdicts on a group, when it began, and the seconds that it took; where there is a teacher,
    its log-probs of each episode; and which version of a reward model has judged (0: the task)."""

    verdicts: list[tuple]
    began: float
    seconds: float
    teacher: Sequence[np.ndarray] = ()
    reward_model: int = 0


class Answer(NamedTuple):
    """From a worker: it has generated a group, or verified one, or both."""

    group_id: int
    group: Group | None = None  # what was generated, or (the pool puts it in) was to be judged
    judgement: Judgement | None = None  # without one the group goes on to a reward worker
    events: Sequence[tuple] = ()  # (time, kind, group or -1, version, details) since the last one


class Call(NamedTuple):
    """From a generator to an environment outside: what does it say to the newest of these answers?
    Without answers: the episode is over."""

    key: tuple  # group id, sample index; the pool puts in front of them who asks: a serial, or -1
    problem: dict
    answers: tuple | None


class Result(NamedTuple):
    """An environment's answer to the call with this key."""

    key: tuple
    observation: str | None = None
    reward: float = 0.0
    done: bool = False
    failure: str = ""


class Lost(NamedTuple):
    """A worker has died, or was killed because it was silent or sent nonsense; a successor has its
    name."""

    reason: str
    groups: list[Group]  # that it was to generate


class Silent(NamedTuple):
    """A worker has said nothing for a while: perhaps it has died."""

    reason: str


def apply_judgement(group: Group, judgement: Judgement) -> None:
    """Write verdicts (reward, turn rewards, error or None), and what a teacher said, into a group's
    trajectories; a failed verification marks its own, unless the environment had failed before."""
    for t, (reward, turn_rewards, error) in zip(
        group.trajectories, judgement.verdicts, strict=True
    ):
        t.reward, t.turn_rewards = reward, list(turn_rewards)
        if error and not t.failed:
            t.finish, _, t.failure = error.partition(": ")
    for t, logprobs in zip(group.trajectories, judgement.teacher, strict=False):
        t.teacher = logprobs


# -------------------------------------------------------------------------------- the validator


def flaw(answer: Answer, asked: Group, size: int, newest: int, vocabulary: int) -> str | None:
    """What is wrong with a worker's answer, in words; None if it is sound: a worker that has gone
    wrong must not poison what is trained. Any exception means the same: a field is missing or odd.

    asked: what it was to do; newest: the newest version that was published; vocabulary: ids are
    below it. Arrays of all episodes are looked at at once, in half the time.
    """
    ranges = []  # name, values, the least and the largest that may be
    if group := answer.group:
        if (group.group_id, group.start) != (asked.group_id, asked.start):
            wanted = f"{asked.group_id}, {asked.start}"
            return f"group {group.group_id}, start {group.start}: must be {wanted}"
        if [t.sample_index for t in group.trajectories] != [*range(size)]:
            return f"{len(group.trajectories)} samples, must be 0 to {size - 1} in order"
        columns = [*zip(*map(arrays_of, group.trajectories), strict=True)]
        lengths = [[*map(len, column)] for column in columns[:4]]
        arrays = [*map(np.concatenate, columns)]
        types = [array.dtype for array in arrays]
        if types != [*ARRAYS.values()] or lengths[1:] != lengths[:1] * 3:
            return f"arrays of {types} and lengths {lengths}"
        tokens, mask, logprobs, versions, *_ = arrays
        ranges.append(("token id", tokens, 0, vocabulary - 1))
        ranges.append(("log-prob", logprobs, *LOGPROBS))
        ranges.append(("version", versions[mask], asked.start, newest))
    if answer.judgement:
        verdicts, judged = answer.judgement.verdicts, len(asked.trajectories) or size
        if len(verdicts) != judged:
            return f"{len(verdicts)} verdicts on {judged} samples"
        rewards = [reward for value, turns, _ in verdicts for reward in (value, *turns)]
        ranges.append(("reward", np.array(rewards), -LARGEST_SUM, LARGEST_SUM))
        teacher = np.concatenate([NO_FLOATS, *answer.judgement.teacher])
        ranges.append(("log-prob of the teacher", teacher, *LOGPROBS))
    for name, values, low, high in ranges:
        wrong = values[~((low <= values) & (values <= high))]  # NaN is in no range
        if len(wrong):
            return f"{name} {wrong[0]}, must be {low} to {high}"
    return None
