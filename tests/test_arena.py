"""Arrays of groups go by shared memory: they arrive as they were, and nothing is left behind."""

import copy
import os
import pickle
import resource
import time
from multiprocessing import Pipe
from pathlib import Path

import numpy as np
import pytest
import toys
from toys import episodes, pool_of, started, wait_for

from runtime.arena import FULL, Arena
from runtime.config import TrainingStopped
from runtime.messages import (
    ARRAYS,
    Group,
    ToVerify,
    apply_judgement,
    group_flaw,
    place_group,
    read_group,
)
from runtime.pipes import Port, announce
from runtime.processes import Lost

LONG = 800_000  # tokens of an episode: a group fills an arena


@pytest.fixture
def pool(tmp_path):
    made = pool_of({"maker": (toys.toy, 2), "reward": (toys.toy, 1)}, tmp_path)
    started(made)
    yield made
    made.close()


def a_group(number: int = 7, tokens: int = 9, **problem) -> Group:
    return Group(number, 5, {"do": "generate", "tokens": tokens, **problem})


def whole(number: int = 7, tokens: int = 9) -> Group:
    """As a worker has made it."""
    group = a_group(number, tokens)
    group.trajectories = episodes(group, tokens)
    return group


def check(group: Group) -> None:
    """Its arrays are those of the worker."""
    tokens = group.problem["tokens"]
    for t, own in zip(group.trajectories, episodes(group, tokens), strict=True):
        for name, kind in ARRAYS.items():
            array = getattr(t, name)
            assert np.array_equal(array, getattr(own, name)) and array.dtype == kind, name
            assert array.flags.writeable and array.flags.aligned
    assert group.digest == whole(group.group_id, tokens).digest


def open_arenas() -> int:
    """Descriptors of this process that are arenas."""
    found = 0
    for link in Path("/proc/self/fd").iterdir():
        try:
            found += "nanoglm-arrays" in os.readlink(link)
        except FileNotFoundError:  # that of the folder itself
            continue
    return found


def read_all(pool, count: int) -> list:
    """So many verdicts and losses."""
    wait_for(lambda: sum(is_end(message) for _, message in pool.news) == count)
    return [message for _, message in pool.receive(0.0) if is_end(message)]


def is_end(message) -> bool:
    return isinstance(message, Lost) or getattr(message, "judgement", None) is not None


def test_groups_lie_one_behind_the_other():
    """What was read does not change any more, and its memory goes with the last who has it."""
    before, arena = open_arenas(), Arena()
    placed = [pickle.loads(pickle.dumps(place_group(whole(n, n), arena))) for n in range(5)]
    for number in (3, 0, 4, 1, 2):
        group = read_group(placed[number], arena)
        assert group.group_id == number
        check(group)
        group.place = arena, placed[number].offset
        verified = pickle.loads(pickle.dumps(ToVerify(group)))  # opens it by its path
        for t, own in zip(verified.trajectories, group.trajectories, strict=True):
            assert np.array_equal(t.tokens, own.tokens) and t.logprobs is None
    os.ftruncate(arena.descriptor, 0)
    check(group)
    with pytest.raises(ValueError, match="0 bytes of arrays at"):
        read_group(placed[1], arena)
    assert open_arenas() == before + 1
    del arena
    group.place = None
    assert open_arenas() == before


def test_damaged_arrays_are_refused():
    """One bit wrong, anywhere."""
    arena = Arena()
    place_group(whole(1), arena)
    placed = place_group(whole(2), arena)
    for i in range(8 * placed.offset, 8 * arena.end):
        (byte,) = os.pread(arena.descriptor, 1, i // 8)
        os.pwrite(arena.descriptor, bytes([byte ^ 1 << i % 8]), i // 8)
        with pytest.raises(ValueError, match="damaged: wrong checksum"):
            read_group(placed, arena)
        os.pwrite(arena.descriptor, bytes([byte]), i // 8)
    assert read_group(placed, arena).digest == whole(2).digest


def test_arrays_of_another_kind_travel_with_the_group_and_are_refused():
    group = whole()
    group.trajectories[1].tokens = group.trajectories[1].tokens.astype(np.int64)
    there = pickle.loads(pickle.dumps(place_group(group, Arena())))
    assert isinstance(there, Group) and "arrays of" in group_flaw(there, 2, 6, 512)


def test_an_arena_without_room_says_so(monkeypatch):
    monkeypatch.setattr(os, "pwritev", lambda *_: 10)
    with pytest.raises(OSError, match="0 MB of shared memory"):
        place_group(whole(), Arena())


def test_groups_reach_the_parent_and_its_verifiers(pool):
    """Short ones share an arena, long ones have their own; what is verified lies nowhere."""
    before = open_arenas()
    groups = [a_group(n, LONG if n % 5 == 0 else n + 1) for n in range(20)]
    sent = [copy.deepcopy(group) for group in groups]
    pool.issue("maker", groups)
    answers = read_all(pool, 20)
    assert {answer.group_id for answer in answers} == {group.group_id for group in sent}
    for answer in answers:
        check(answer.group)
        told = [value for value, *_ in answer.judgement.verdicts]
        assert told == [t.tokens.sum() for t in answer.group.trajectories]
        apply_judgement(answer.group, answer.judgement)  # now it may go
    assert open_arenas() - before <= 2  # the newest of each maker: a long one fills it
    largest = max(len(pickle.dumps(group)) for group in [answer.group for answer in answers])
    for worker in pool.of("maker"):
        assert os.fstat(worker.port.arena.descriptor).st_size <= FULL + largest < 2 * largest


def test_the_arrays_of_a_delivery_lie_in_one_arena(pool):
    """Also where the first group has filled it."""
    pool.issue("maker", [a_group(n, LONG if n == 4 else 5, batch=True) for n in range(8)])
    answers = read_all(pool, 8)
    for answer in answers:
        check(answer.group)


def test_a_default_for_sockets_is_not_one_for_pipes(pool):
    """A task may set one in a worker."""
    (name,) = pool.issue("maker", [a_group(1, impatient=True)])
    maker = pool.workers[name]
    wait_for(lambda: "blocking" in maker.status)
    assert maker.status["blocking"]


def test_too_many_open_files_are_named(monkeypatch):
    """And not taken for a worker that sends nonsense."""
    here, there = Pipe()
    port, arena = Port(here), Arena()
    limit = resource.getrlimit(resource.RLIMIT_NOFILE)
    announce(arena, there)
    resource.setrlimit(resource.RLIMIT_NOFILE, (port.fileno(), limit[1]))
    try:
        with pytest.raises(TrainingStopped, match="too many open files"):
            port.read()
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limit)


def test_what_this_process_cannot_do_is_no_workers_fault(pool, monkeypatch):
    def read(port):
        raise TrainingStopped("too many open files")

    monkeypatch.setattr(Port, "read", read)
    deadline = time.monotonic() + 30.0
    with pytest.raises(TrainingStopped, match="too many open files"):
        while time.monotonic() < deadline:
            assert not any(isinstance(said, Lost) for _, said in pool.receive(0.1))


def test_a_group_outlives_its_maker_and_its_first_judge(pool, tmp_path):
    """Its maker is dead before it is verified, then the judge dies; the tokens are still there."""
    until = tmp_path / "now"
    pool.issue("maker", [a_group(1, 1000, leave=True, until=str(until))])
    (lost,) = read_all(pool, 1)
    assert isinstance(lost, Lost) and not lost.groups
    (judge,) = pool.of("reward")
    wait_for(lambda: 1 in judge.work)
    judge.process.kill()
    (lost,) = read_all(pool, 1)
    assert [group.group_id for group in lost.groups] == [1]
    until.touch()
    pool.issue("reward", lost.groups)
    (answer,) = read_all(pool, 1)
    check(answer.group)
    told = [value for value, *_ in answer.judgement.verdicts]
    assert told == [t.tokens.sum() for t in answer.group.trajectories]


def test_a_worker_that_says_a_wrong_place_is_replaced(pool):
    pool.issue("maker", [a_group(2, do="elsewhere")])
    (lost,) = read_all(pool, 1)
    assert "sent a damaged message (ValueError: 0 bytes of arrays at 0" in lost.reason
    assert [group.group_id for group in lost.groups] == [2]
    pool.issue("maker", [a_group(2)])
    (answer,) = read_all(pool, 1)
    check(answer.group)


def test_wrong_kinds_come_through_the_pipe(pool):
    """They are for the validator, which the toys do not have."""
    pool.issue("maker", [a_group(3, spoilt=True)])
    (answer,) = read_all(pool, 1)
    assert answer.group.trajectories[0].logprobs.dtype == np.float64  # one array for all episodes
