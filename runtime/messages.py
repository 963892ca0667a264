"""messages.py: what travels between processes: the record of an episode, and what workers say.

`Trajectory` is one episode, token by token; a `Group` is all answers to one prompt. Workers are
sent lists of groups; they return an `Answer` to each. `flaw` looks at what the workers of a pool
say before it is used.
Boundary: this file knows shapes and ranges, never what a token means.
Left out: pipes (pipes.py), processes, and who gets which work (processes.py).

Axes: T tokens of an episode, prompt included · M of them generated · K tokens that sampling kept
"""

import dataclasses
import os
import pickle
import zlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import accumulate, pairwise
from operator import attrgetter
from typing import NamedTuple

import numpy as np

from runtime.arena import Arena

NEVER = np.iinfo(np.int32).max  # the "oldest version" of an episode without generated tokens
LARGEST_REWARD = float(np.finfo(np.float32).max)
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
KINDS = [*map(np.dtype, ARRAYS.values())]
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
    worker: int = -1
    started: float = 0.0  # seconds on the machine's monotonic clock
    finished: float = 0.0
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

    @cached_property  # a complete episode does not change
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
    # (lengths, arrays, checksum): the arrays of all episodes end to end, as another process sent
    # them, with its checksum; None where they were made here, or have changed since
    laid: tuple | None = field(default=None, repr=False, compare=False)
    # (arena, offset): where another process can read them until the group is verified
    place: tuple | None = field(default=None, repr=False, compare=False)

    @property
    def oldest(self) -> int:
        """The smallest version among all generated tokens."""
        return min([t.oldest for t in self.trajectories], default=NEVER)

    @property
    def digest(self) -> int:
        """A checksum of all that training reads; failed episodes are not read."""
        read = [t for t in self.trajectories if not t.failed]
        whole = self.laid and len(read) == len(self.trajectories)
        *_, crc = self.laid if whole else lay_out(read)
        return zlib.crc32(repr([t.reward for t in read]).encode(), crc)

    @property
    def evidence(self) -> dict:
        """What the log keeps of a verified group, so that a replay can be compared with it."""
        return {
            "failed": {i: t.finish for i, t in enumerate(self.trajectories) if t.failed},
            "digest": self.digest,
            "swaps": [t.swaps for t in self.trajectories],
            "lengths": [len(t.tokens) for t in self.trajectories],
        }

    def __reduce__(self):
        """Pickled as a few long arrays: a third of the time that many short ones take."""
        if not self.trajectories:  # as it is issued
            return Group, (self.group_id, self.start, self.problem)
        return unpack_group, pack_group(self)


class Placed(NamedTuple):
    """A group on its way, whose arrays lie in an arena."""

    packed: tuple  # by `pack_group`, without them
    offset: int  # where they begin


class ToVerify(NamedTuple):
    """A group for a reward worker. It arrives as a `Group` with tokens and no other arrays; they
    are read from an arena, or travel along."""

    group: Group

    def __reduce__(self):
        *plain, lengths, tokens, crc = pack_group(self.group, arrays=1)
        if self.group.place:
            arena, offset = self.group.place
            return read_group, (Placed((*plain, lengths, crc), offset), arena.path)
        return unpack_group, (*plain, lengths, tokens, crc)


def place_group(group: Group, arena: Arena) -> Group | Placed:
    """Put a group's arrays into an arena; those that are not of their kind travel with it."""
    *plain, lengths, laid, crc = pack_group(group)
    if [array.dtype for array in laid] != KINDS:
        return group
    return Placed((*plain, lengths, crc), arena.append(laid))


def read_group(placed: Placed, arena: Arena | str) -> Group:
    """The inverse of `place_group`, from an arena or the path of one; ValueError when the arrays
    are not there, or damaged."""
    if isinstance(arena, str):
        arena = Arena(os.open(arena, os.O_RDONLY))
    *plain, lengths, crc = placed.packed
    laid = [np.empty(sum(own), kind) for own, kind in zip(lengths, KINDS, strict=False)]
    arena.read(laid, placed.offset)
    return unpack_group(*plain, lengths, laid, crc)


def apply_verdicts(group: Group, verdicts: Sequence) -> None:
    """Write (reward, turn rewards, error or None) into a group's trajectories, in order; a failed
    verification marks its trajectory, unless the environment had failed before."""
    for trajectory, (value, turn_rewards, error) in zip(group.trajectories, verdicts, strict=True):
        trajectory.reward, trajectory.turn_rewards = value, list(turn_rewards)
        if error and not trajectory.failed:
            trajectory.finish, _, trajectory.failure = error.partition(": ")


def apply_judgement(group: Group, judgement) -> None:
    """Write verdicts, and what a teacher said, into a group's trajectories."""
    group.place = None  # nobody reads there any more
    apply_verdicts(group, judgement.verdicts)
    for trajectory, logprobs in zip(group.trajectories, judgement.teacher, strict=False):
        trajectory.teacher, group.laid = logprobs, None


PLAIN = [
    f.name for f in dataclasses.fields(Trajectory) if f.name not in ARRAYS
]  # fields that are no arrays


plain_of, arrays_of = attrgetter(*PLAIN), attrgetter(*ARRAYS)


def pack_group(group: Group, arrays: int = len(ARRAYS)) -> tuple:
    """A group as it is pickled: plain data by position (two thirds of the time that it takes by
    name), and the first `arrays` arrays of its episodes, each laid end to end; the checksum is that
    of all."""
    rows = [plain_of(t) for t in group.trajectories]
    lengths, laid, crc = group.laid or lay_out(group.trajectories)
    return group.group_id, group.start, group.problem, rows, lengths[:arrays], laid[:arrays], crc


def lay_out(episodes: list[Trajectory]) -> tuple[list, list, int]:
    """The arrays of some episodes: how long each one's are, all laid end to end, their checksum."""
    own = [*zip(*map(arrays_of, episodes), strict=True)]
    lengths, laid = [[*map(len, each)] for each in own], [*map(np.concatenate, own)]
    return lengths, laid, checksum(laid)


def checksum(arrays: list[np.ndarray]) -> int:
    """Of some arrays as if they were one."""
    crc = 0
    for array in arrays:
        crc = zlib.crc32(array, crc)
    return crc


def unpack_group(group_id: int, start: int, problem: dict, rows, lengths, laid, crc) -> Group:
    """The inverse of `pack_group`; ValueError when arrays are damaged, or not as long as their
    episodes."""
    if [*map(sum, lengths)] != [*map(len, laid)] or any(n < 0 for own in lengths for n in own):
        raise ValueError(f"arrays of {[*map(len, laid)]} numbers, must be {lengths}")
    if len(laid) == len(ARRAYS) and checksum(laid) != crc:
        raise ValueError("arrays that are damaged: wrong checksum")
    pieces = [pieces_of(array, own) for array, own in zip(laid, lengths, strict=True)]
    episodes = [Trajectory(*row, *own) for row, *own in zip(rows, *pieces, strict=True)]
    group = Group(group_id, start, problem, episodes)
    if len(laid) == len(ARRAYS):
        group.laid = lengths, laid, crc
    return group


def pieces_of(array: np.ndarray, lengths: list[int]) -> list[np.ndarray]:
    """Pieces of an array; the last one is the rest: nothing that has arrived is overlooked."""
    return [array[start:stop] for start, stop in pairwise([0, *accumulate(lengths[:-1]), None])]


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
    group: Group | None = None  # what was generated; the pool puts in what was verified
    judgement: Judgement | None = None  # without one the group goes on to a reward worker
    events: Sequence[tuple] = ()  # (time, kind, group or -1, version, details) since the last one


class Call(NamedTuple):
    """From a generator to an environment outside: what does it say to the newest of these answers?
    Without answers: all episodes whose keys begin like this one are over."""

    key: tuple  # who asks (process id; once in the pool, its serial), group id, sample index
    problem: dict
    answers: tuple | None


class Result(NamedTuple):
    """An environment's answer to the call with this key and `turn` answers."""

    key: tuple
    turn: int
    observation: str | None = None
    reward: float = 0.0
    done: bool = False
    failure: str = ""


def pack_messages(messages: Sequence) -> bytes:
    """One delivery: a checksum, and what is said, pickled: groups for a worker; a worker's status
    and its answers. Deliveries travel between the processes of one run only: never unpack one that
    somebody else has written."""
    data = pickle.dumps(messages, pickle.HIGHEST_PROTOCOL)
    return zlib.crc32(data).to_bytes(4, "big") + data


def unpack_messages(delivery: bytes | memoryview) -> Sequence:
    """What a delivery says; ValueError when it is torn or damaged."""
    data = memoryview(delivery)[4:]
    if not data or zlib.crc32(data) != int.from_bytes(delivery[:4], "big"):
        raise ValueError(f"{len(delivery)} bytes that are torn or damaged: wrong checksum")
    return pickle.loads(data)


# -------------------------------------------------------------------------------- the validator


def flaw(answer, work: dict, *allowed) -> str | None:
    """What is wrong with a worker's answer, in words; None if it is sound.

    A worker that has gone wrong must not poison what is trained. `work`: what it was asked, groups
    by id, or for a `Result` calls by key; allowed: see `group_flaw`. May raise AttributeError,
    KeyError, TypeError or ValueError where a field is missing or of another kind.
    """
    if isinstance(answer, Call):
        return None  # an environment judges it
    if found := stray(answer, work):
        return found
    if isinstance(answer, Result):
        text = isinstance(answer.failure, str)
        return reward_flaw([answer.reward]) if text else f"failure {answer.failure!r:.80}"
    if answer.group:
        found = group_flaw(answer.group, *allowed)
        if found or answer.judgement is None:
            return found
    judged = (answer.group or work[answer.group_id]).trajectories
    found = verdict_flaw(answer.judgement.verdicts, judged)
    return found or teacher_flaw(answer.judgement.teacher, judged)


def stray(answer: Answer, work: dict) -> str | None:
    """Why this is no answer to what the worker was asked; None if it is one."""
    if isinstance(answer, Result):
        asked = work.get(answer.key)
        same = asked and len(asked.answers) == answer.turn
        return None if same else f"{answer.key}, turn {answer.turn}: it was not asked for that"
    if not isinstance(answer, Answer):
        return f"an answer of kind {type(answer).__name__}"
    if answer.group_id not in work:
        return f"group {answer.group_id}, which it does not have: a duplicate?"
    asked, group = work[answer.group_id], answer.group
    if group and asked.trajectories:
        return "a verdict that brings its own group"
    if group and (group.group_id, group.start) != (asked.group_id, asked.start):
        found = f"group {group.group_id}, start {group.start}"
        return f"{found}: must be {asked.group_id}, {asked.start}"
    return None


def group_flaw(
    group: Group,
    size: int,
    newest: int,  # the newest version that was published
    vocabulary: int,
    cut=False,  # whether sampling left tokens out
) -> str | None:
    """What is wrong with a generated group; None if it is sound. It looks at all episodes at once:
    that takes half the time."""
    episodes = group.trajectories
    samples = [t.sample_index for t in episodes]
    if samples != list(range(size)):
        return f"samples {samples}, must be 0 to {size - 1} in order"
    lengths, laid, *_ = group.laid or lay_out(episodes)
    generated, none = [t.generated for t in episodes], [0] * size
    kept = [int(t.kept_sizes.sum()) for t in episodes] if cut else none
    taught = generated if any(lengths[-1]) else none
    right = [lengths[0]] * 4 + [generated if cut else none, kept, taught]
    kinds = [array.dtype for array in laid]
    if lengths != right or kinds != KINDS:
        return f"arrays of {kinds} and lengths {lengths}, must be {ARRAYS} and {right}"
    tokens, mask, logprobs, versions, kept_sizes, kept, teacher = laid
    own, first = np.zeros_like(mask), 0  # where the policy's turns are
    for t, length in zip(episodes, lengths[0], strict=True):
        before = 1  # something must predict the first token
        for start, stop in t.turns:
            if not before <= start <= stop <= length:
                return f"a turn from {start} to {stop} in an episode of {length} tokens"
            own[first + start : first + stop], before = True, stop
        if len(t.turn_rewards) > len(t.turns):
            return "more rewards than turns"
        first += length
    if not np.array_equal(own, mask):
        return "a loss mask that is not the policy's turns"
    return (
        outside("token id", tokens, 0, vocabulary - 1)
        or outside("token id", kept, 0, vocabulary - 1)
        or outside("log-prob", logprobs, *LOGPROBS)
        or outside("log-prob of the teacher", teacher, *LOGPROBS)
        or outside("version", versions[mask], group.start, newest)
        or outside("version where nothing was generated", versions[~mask], -1, -1)
        or reward_flaw([reward for t in episodes for reward in t.turn_rewards])
        or (set_flaw(tokens[mask], kept_sizes, kept) if cut else None)
    )


def set_flaw(generated: np.ndarray, sizes: np.ndarray, kept: np.ndarray) -> str | None:
    """Refuses a generated token that is not, once, among those that it was sampled from."""
    every = np.arange(len(generated))
    place = every.repeat(sizes)  # [K]
    right = np.array_equal(place[generated[place] == kept], every)
    return None if right else "a token that is not, once, in the set that it was sampled from"


def outside(name: str, values: np.ndarray, low: float, high: float) -> str | None:
    """The first of some values that is not in a range, in words; NaN is in none."""
    if not len(values) or low <= values.min() and values.max() <= high:
        return None
    wrong = values[~((low <= values) & (values <= high))]
    return f"{name} {wrong[0]}, must be {low} to {high}"


def reward_flaw(rewards: list) -> str | None:
    """The first reward that is not finite in float32, in words."""
    wrong = [reward for reward in rewards if not abs(reward) <= LARGEST_REWARD]  # NaN is not
    return f"reward {wrong[0]}, must be finite in float32" if wrong else None


def verdict_flaw(verdicts: list, episodes: list[Trajectory]) -> str | None:
    """What is wrong with a verifier's verdicts on a group; None if they are sound."""
    if not episodes or len(verdicts) != len(episodes):
        return f"{len(verdicts)} verdicts on {len(episodes)} samples"
    if any(not isinstance(error, str | None) for *_, error in verdicts):
        return "an error that is no text"
    return reward_flaw([reward for value, turns, _ in verdicts for reward in (value, *turns)])


def teacher_flaw(said: Sequence, episodes: list[Trajectory]) -> str | None:
    """What is wrong with a teacher's log-probs of a group; None if they are sound, or not there."""
    if not said:
        return None
    kinds = [(own.dtype, len(own)) for own in said]
    right = [(np.dtype(np.float32), t.generated) for t in episodes]
    if kinds != right:
        return f"a teacher's log-probs of {kinds} tokens, must be {right}"
    return outside("log-prob of the teacher", np.concatenate(said), *LOGPROBS)
