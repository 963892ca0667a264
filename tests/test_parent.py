"""The parent's quick forms against plain ones: sorted starts, a group's validator."""

import copy
import pickle
import random

import numpy as np

from buffer import Starts
from runtime.messages import Group, ToVerify, Trajectory, group_flaw

SIZE, NEWEST, VOCABULARY = 3, 9, 50


def sound_group(chance: random.Random) -> Group:
    """Three episodes of one or two turns, started at version 4."""
    group = Group(7, 4, {"prompt": "p"})
    for sample in range(SIZE):
        T = chance.randrange(6, 12)
        cut = chance.randrange(3, T)
        t = Trajectory(7, sample, 1, turns=[(2, cut - 1), (cut, T)], turn_rewards=[0.5])
        t.loss_mask = np.zeros(T, bool)
        for start, stop in t.turns:
            t.loss_mask[start:stop] = True
        t.tokens = np.array([chance.randrange(VOCABULARY) for _ in range(T)], np.int32)
        t.logprobs = np.where(t.loss_mask, -chance.random(), 0.0).astype(np.float32)
        t.versions = np.where(t.loss_mask, chance.randint(4, NEWEST), -1).astype(np.int32)
        group.trajectories.append(t)
    return group


def spoil(group: Group, chance: random.Random) -> None:
    """Change one thing, which may or may not matter."""
    t = chance.choice(group.trajectories)
    name = chance.choice(["tokens", "loss_mask", "logprobs", "versions", "turns", "other"])
    if name == "turns":
        start, stop = t.turns[-1]
        t.turns[-1] = (start + chance.randint(-2, 2), stop + chance.randint(-1, 1))
    elif name == "other":
        t.sample_index += chance.randint(0, 1)
        t.turn_rewards = chance.choice([[0.5] * 3, [float("nan")], [1e39], [0.1]])
    elif chance.random() < 0.2:
        setattr(t, name, getattr(t, name)[:-1])
    elif chance.random() < 0.1:
        setattr(t, name, getattr(t, name).astype(np.float64))
    else:
        wrong = {"tokens": [-1, 50, 49], "loss_mask": [True, False], "versions": [-2, -1, 3, 4, 10]}
        wrong["logprobs"] = [float("nan"), 0.5, -np.inf, -1.0]
        getattr(t, name)[chance.randrange(len(t.tokens))] = chance.choice(wrong[name])


def is_sound(group: Group) -> bool:
    """What the validator must refuse, said token by token."""
    for number, t in enumerate(group.trajectories):
        arrays = [t.tokens, t.loss_mask, t.logprobs, t.versions]
        if [array.dtype for array in arrays] != [np.int32, np.bool_, np.float32, np.int32]:
            return False
        if t.sample_index != number or len({len(array) for array in arrays}) != 1:
            return False
        places = [place for start, stop in t.turns for place in range(start, stop)]
        ends = [1, *[end for turn in t.turns for end in turn], len(t.tokens)]
        if ends != sorted(ends) or len(t.turn_rewards) > len(t.turns):
            return False
        if any(not abs(reward) <= float(np.finfo(np.float32).max) for reward in t.turn_rewards):
            return False
        for i, (token, own, logprob, version) in enumerate(zip(*arrays, strict=True)):
            allowed = range(group.start, NEWEST + 1) if i in places else [-1]
            right = 0 <= token < VOCABULARY and own == (i in places) and version in allowed
            if not (right and -1e30 <= logprob <= 1e-3):
                return False
    return True


def test_the_validator_refuses_what_is_not_sound_and_nothing_else():
    chance, refused = random.Random(0), 0
    for _ in range(3000):
        group = sound_group(chance)
        assert group_flaw(copy.deepcopy(group), SIZE, NEWEST, VOCABULARY) is None
        spoil(group, chance)
        flaw = group_flaw(group, SIZE, NEWEST, VOCABULARY)
        assert is_sound(group) == (flaw is None), flaw
        refused += flaw is not None
    assert 1000 < refused < 2700


def test_starts_stay_sorted():
    chance, starts, plain = random.Random(0), Starts(2), {}
    for _ in range(3000):
        group = chance.randrange(40)
        if group in plain and chance.random() < 0.5:
            del starts[group], plain[group]
        else:
            starts[group] = plain[group] = chance.randrange(10)
        assert dict(starts) == plain
        for task in (0, 1):
            assert starts.sorted[task] == sorted(s for g, s in plain.items() if g % 2 == task)


def test_a_group_travels_whole_and_to_a_verifier_with_its_tokens():
    group = sound_group(random.Random(1))
    there = pickle.loads(pickle.dumps(copy.deepcopy(group)))
    assert there.digest == group.digest and there.problem == group.problem
    verified = pickle.loads(pickle.dumps(ToVerify(group)))
    for t, own in zip(verified.trajectories, group.trajectories, strict=True):
        assert np.array_equal(t.tokens, own.tokens) and t.turns == own.turns
