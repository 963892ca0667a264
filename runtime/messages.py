"""runtime/messages.py."""

import dataclasses
import math
import pickle
import zlib
from dataclasses import dataclass, field
from functools import cached_property
from itertools import accumulate, chain, islice, starmap
from operator import attrgetter

import numpy as np

NEVER = np.iinfo(np.int32).max  # a version that is older than none


@dataclass
class Trajectory:
    """One episode, token by token: the record that travels (T tokens, prompt included)."""

    group_id: int
    sample_index: int
    seed: int  # key of its sampling noise
    tokens: np.ndarray  # int32 [T]; prompt, generated and environment tokens, never re-tokenised
    loss_mask: np.ndarray  # bool [T]; True where the policy generated
    logprobs: np.ndarray  # float32 [T]; behaviour log-probs, exactly as sampled; 0 elsewhere
    versions: np.ndarray  # int32 [T]; policy version that produced the token; -1 elsewhere
    turns: list[tuple[int, int]]  # spans of the policy's turns
    finish: str = "stop"  # stop, length, env_error, env_timeout, verifier_error, ...
    reward: float = 0.0
    turn_rewards: list[float] = field(default_factory=list)
    worker: int = -1
    started: float = 0.0  # seconds on the machine's monotonic clock
    finished: float = 0.0
    swaps: list[int] = field(default_factory=list)  # a, v, b, w: tokens from a on fed by v, b by w

    @property
    def failed(self) -> bool:
        """True when the environment or the verifier failed: no reward can be read from it."""
        return self.finish not in ("stop", "length")

    # Neither changes once the episode is complete, so its tokens are looked through once.
    @cached_property
    def generated(self) -> int:
        """How many tokens the policy generated."""
        return sum([stop - start for start, stop in self.turns])

    @cached_property
    def oldest(self) -> int:
        """The smallest version among its generated tokens: staleness counts from here."""
        return oldest_versions(self.loss_mask, self.versions, [0])[0] if len(self.tokens) else NEVER


def oldest_versions(loss_mask: np.ndarray, versions: np.ndarray, starts: list[int]) -> list[int]:
    """The smallest version among the generated tokens of each episode, NEVER where there are none.

    Episodes lie end to end (bool and int32 [N]) and begin at `starts`; none may be empty.
    """
    return np.minimum.reduceat(np.where(loss_mask, versions, NEVER), starts).tolist()


@dataclass
class Group:
    """All answers to one prompt; `start` is the version at which it was admitted."""

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
        """A checksum of all that training reads, so without the episodes that have failed."""
        read = [t for t in self.trajectories if not t.failed]
        crc = zlib.crc32(repr([t.reward for t in read]).encode())
        for name in ARRAYS:
            crc = zlib.crc32(b"".join([getattr(t, name) for t in read]), crc)
        return crc


def apply_verdicts(group: Group, verdicts: list[tuple]) -> None:
    """Write (reward, turn rewards, error or None) into a group's trajectories, in order; a failed
    verification marks its trajectory, unless the environment had failed before."""
    for trajectory, (value, turn_rewards, error) in zip(group.trajectories, verdicts, strict=True):
        trajectory.reward, trajectory.turn_rewards = value, list(turn_rewards)
        if error and not trajectory.failed:
            trajectory.finish = error.split(":")[0]


ARRAYS = {"tokens": np.int32, "loss_mask": np.bool_, "logprobs": np.float32, "versions": np.int32}


def to_bytes(header: dict, arrays: dict[str, np.ndarray] | None = None) -> bytes:
    """A message: checksum of all that follows, size of the header, header, the arrays' bytes.

    The header is pickled, which takes less than half the time that JSON does. Messages travel
    between the processes of one run only: never read one that somebody else has written.
    """
    arrays = arrays or {}
    shapes = [(name, a.dtype.str, a.shape) for name, a in arrays.items()]
    head = pickle.dumps((header, shapes), pickle.HIGHEST_PROTOCOL)
    data = b"".join([len(head).to_bytes(4, "big"), head, *(a.tobytes() for a in arrays.values())])
    return zlib.crc32(data).to_bytes(4, "big") + data


def from_bytes(message: bytes) -> tuple[dict, dict[str, np.ndarray]]:
    """Header and arrays of a message; raises ValueError when it is torn or damaged."""
    if zlib.crc32(memoryview(message)[4:]) != int.from_bytes(message[:4], "big"):
        raise ValueError(f"message of {len(message)} bytes is torn or damaged: wrong checksum")
    start, arrays = 8 + int.from_bytes(message[4:8], "big"), {}
    try:
        header, shapes = pickle.loads(message[8:start])
    except Exception as error:  # on other bytes it raises almost anything
        raise ValueError(f"message of {len(message)} bytes without a header") from error
    for name, dtype, shape in shapes:
        array = np.frombuffer(message, dtype, math.prod(shape), start).reshape(shape)
        arrays[name] = array.copy()  # aligned, and may be written to
        start += array.nbytes
    return header, arrays


APART = {*ARRAYS, "group_id", "turns"}  # travel as arrays, or once for the whole group


FIELDS = [f.name for f in dataclasses.fields(Trajectory) if f.name not in APART]


fields_of = attrgetter(*FIELDS)


def group_to_parts(group: Group) -> tuple[dict, dict[str, np.ndarray]]:
    """A group as plain fields and arrays of all its tokens, and turns, laid end to end.

    Fields travel as columns, {name: [value of each trajectory]}: what repeats no name is read in
    half the time, and the interpreter that reads it has a learner to run.
    """
    episodes = group.trajectories
    columns = zip(*map(fields_of, episodes), strict=True) if episodes else [()] * len(FIELDS)
    header = {"group_id": group.group_id, "start": group.start, "problem": group.problem}
    header |= {"columns": dict(zip(FIELDS, columns, strict=True))}
    header |= {"lengths": [len(t.tokens) for t in episodes]}
    header |= {"turns": [len(t.turns) for t in episodes]}
    bounds = chain.from_iterable(chain.from_iterable(t.turns for t in episodes))
    arrays = {"turns": np.fromiter(bounds, np.int32).reshape(-1, 2)}
    for name, kind in ARRAYS.items():
        arrays[name] = np.concatenate([getattr(t, name) for t in episodes] or [np.empty(0, kind)])
    return header, arrays


def group_from_parts(header: dict, arrays: dict[str, np.ndarray]) -> Group:
    """The inverse of `group_to_parts`."""
    lengths, turns = header["lengths"], list(map(tuple, arrays["turns"].tolist()))
    ids, places = [header["group_id"]] * len(lengths), spans(lengths)
    sample_index, seed, *rest = (header["columns"][name] for name in FIELDS)
    pieces = (map(arrays[name].__getitem__, places) for name in ARRAYS)
    own = map(turns.__getitem__, spans(header["turns"]))
    # by position, and without a loop of our own: that is quicker
    rows = zip(ids, sample_index, seed, *pieces, own, *rest, strict=True)
    episodes = list(starmap(Trajectory, rows))
    if episodes and min(lengths):  # for all of them at once, which is quicker
        starts, mask = [place.start for place in places], arrays["loss_mask"]
        oldest = oldest_versions(mask, arrays["versions"], starts)
        generated = np.add.reduceat(mask, starts, dtype=np.int64).tolist()
        for episode, *facts in zip(episodes, oldest, generated, strict=True):
            episode.oldest, episode.generated = facts
    return Group(header["group_id"], header["start"], header["problem"], episodes)


def spans(sizes: list[int]) -> list[slice]:
    """Where things of these sizes lie that are laid end to end."""
    stops = list(accumulate(sizes))
    return list(map(slice, [0, *stops], stops))


def group_flaw(header: dict, arrays: dict, size: int, newest: int, vocabulary: int) -> str | None:
    """What is wrong with a group as `group_to_parts` sends it, in words; None if it is sound.

    A worker that has gone wrong must not poison what is trained. `size` is the group size, `newest`
    the newest version that was published. Raises KeyError, TypeError or ValueError when fields are
    missing or of another kind.
    """
    columns, lengths, counts = header["columns"], header["lengths"], header["turns"]
    for name, numbers in {"lengths": lengths, "turns": counts}.items():
        if len(numbers) != size or any(type(n) is not int or n < 0 for n in numbers):
            return f"{name} {numbers}, must be {size} integers from 0 up"
    found = {name: (array.dtype, array.shape) for name, array in arrays.items()}
    right = {name: (np.dtype(kind), (sum(lengths),)) for name, kind in ARRAYS.items()}
    right["turns"] = (np.dtype(np.int32), (sum(counts), 2))
    if found != right:
        return f"arrays {found}, must be {right}"
    if list(columns["sample_index"]) != list(range(size)):
        return f"samples {columns['sample_index']}, must be 0 to {size - 1} in order"
    if wrong := [name for name in FIELDS if len(columns[name]) != size]:
        return f"{len(columns[wrong[0]])} values of {wrong[0]}, must be {size}"
    tokens, mask, logprobs, versions = (arrays[name] for name in ARRAYS)
    turns, generated, start = iter(arrays["turns"].tolist()), bytearray(len(mask)), 0
    for length, count in zip(lengths, counts, strict=True):
        for first, last in islice(turns, count):
            if not 0 <= first <= last <= length:
                return f"a turn from {first} to {last} in an episode of {length} tokens"
            generated[start + first : start + last] = b"\1" * (last - first)
        start += length
    if generated != mask.tobytes():
        return "a loss mask that is not the policy's turns"
    checks = (
        ("token id", tokens, 0, vocabulary - 1),
        ("log-prob", logprobs, -1e30, 1e-3),  # never NaN, never above 0 but for rounding
        ("version", versions[mask], header["start"], newest),
        ("version where nothing was generated", versions[~mask], -1, -1),
    )
    for name, values, low, high in checks:
        if len(values) and not (low <= values.min() and values.max() <= high):  # NaN: neither
            wrong = values[~((values >= low) & (values <= high))]
            return f"{name} {wrong[0]}, must be {low} to {high}"
    return None


def verdict_flaw(verdicts: list, size: int) -> str | None:
    """What is wrong with a reward worker's verdicts on a group; None if they are sound."""
    if len(verdicts) != size:
        return f"{len(verdicts)} verdicts on {size} samples"
    wrong = [v for v, turns, _ in verdicts if not all(map(math.isfinite, [v, *turns]))]
    return f"reward {wrong[0]}, must be finite" if wrong else None
