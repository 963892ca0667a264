"""Checkpoints: whole or refused by name, whenever the writing is killed; nothing is forgotten."""

import copy
import os
from dataclasses import replace

import numpy as np
import pytest
import torch
from faults import OFFSETS, checkpoint_kills, killed_at

from learner import learner_step, make_learner, new_groups
from reward import task_of, verify_group
from rollout import generate, make_generator
from runtime import run as run_room
from runtime.checkpoint import (
    load_checkpoint,
    load_state,
    load_tensors,
    save_checkpoint,
    state_of,
)
from runtime.config import Config, UserError
from runtime.folder import read_lines
from runtime.messages import Group, Judgement, Trajectory, apply_judgement
from runtime.models import make_model
from runtime.runlog import LOGS

SMALL = {"groups_per_step": 2, "group_size": 2, "slots": 8, "eval_every": 100}


def state(value: float) -> dict:
    marks = dict.fromkeys(LOGS, (0, 0))
    return {"weights": torch.full((5,), value), "marks": marks}


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "checkpoints").mkdir()
    for name in LOGS:
        (tmp_path / f"{name}.jsonl").touch()
    return tmp_path


def names(folder) -> list[str]:
    return sorted(p.name for p in (folder / "checkpoints").iterdir())


def test_the_newest_is_loaded_and_the_last_ones_are_kept(folder):
    for step in range(1, 6):
        save_checkpoint(folder, step, state(step))
    assert names(folder) == [f"step{step:07d}.pt" for step in (3, 4, 5)]
    assert load_checkpoint(folder)["weights"].tolist() == [5.0] * 5


def test_a_user_can_load_one_with_torch(folder):
    path = save_checkpoint(folder, 1, state(7.0))
    assert torch.load(path, weights_only=True)["weights"].tolist() == [7.0] * 5


def test_a_damaged_one_is_named_and_the_one_before_is_used(folder, capsys):
    with pytest.raises(UserError, match="must hold a checkpoint"):
        load_checkpoint(folder)
    save_checkpoint(folder, 1, state(1.0))
    path = save_checkpoint(folder, 2, state(2.0))
    whole = path.read_bytes()
    at = whole.index(torch.full((5,), 2.0).numpy().tobytes())
    flipped = bytearray(whole)
    flipped[at] ^= 1  # torch.load does not see it
    cut = [whole[:n] for n in (0, 1, 32, len(whole) // 2, len(whole) - 1)]
    for damaged in (bytes(flipped), *cut, bytes(len(whole))):
        path.write_bytes(damaged)
        assert load_checkpoint(folder)["weights"].tolist() == [1.0] * 5
        assert f"{path} is passed over: {path}: must hold a dict" in capsys.readouterr().err
    path.write_bytes(whole)
    assert load_checkpoint(folder)["weights"].tolist() == [2.0] * 5
    for old in (1, 2):
        (folder / f"checkpoints/step000000{old}.pt").write_bytes(b"nothing")
    with pytest.raises(UserError, match="must hold a checkpoint that is whole"):
        load_checkpoint(folder)


@pytest.mark.parametrize("offset", OFFSETS)
def test_kill_at_any_offset_leaves_a_whole_checkpoint(folder, offset):
    for step in (1, 2, 3):
        save_checkpoint(folder, step, state(step))
    killed_at(offset, lambda: save_checkpoint(folder, 4, state(4.0)))
    done = offset in ("after replace", "unlink")
    assert load_checkpoint(folder)["weights"].tolist() == [4.0 if done else 3.0] * 5
    save_checkpoint(folder, 4, state(4.0))  # what a killed one has left is no obstacle
    assert names(folder) == [f"step{step:07d}.pt" for step in (2, 3, 4)]


def test_a_run_killed_in_every_checkpoint_ends_bitwise_the_same(tmp_path):
    assert checkpoint_kills(tmp_path, 1)["bitwise_equal"]


@pytest.fixture
def trained():
    """A config, a learner, and three verified groups of it, as they come from workers."""
    config = Config(task="guess", **SMALL)
    task = task_of(config)
    learner = make_learner(config, task, make_model(config, task))
    groups = generate(make_generator(config, task, learner.model), new_groups(learner, task, 3))
    for group in groups:
        apply_judgement(group, Judgement(verify_group(group, task, config), 0.0, 0.0))
    return config, learner, groups


@pytest.mark.parametrize("size", [1, 2, 3])
def test_any_number_of_learners_goes_on_from_a_checkpoint_of_any(trained, size):
    """With the same moments, to the last bit; the step that follows differs by rounding alone."""
    config, learner, groups = trained
    two, other = (replace(config, learners=n, steps=9) for n in (2, size))
    for group in groups:  # or there may be nothing to learn
        group.trajectories[0].reward = 1.0
    weights = []
    for setting in (two, other):
        task, ranks = task_of(config), tuple(range(setting.team_size))
        team = make_learner(setting, task, make_model(config, task), ranks)
        if setting is two:
            learner_step(team, groups[:2], two)
            stored = copy.deepcopy(state_of(team))
        load_state(team, stored)
        assert torch.equal(team.weights, stored["weights"]) and team.version == 1
        assert all(torch.equal(x, stored["moments"][name]) for name, x in team.moments.items())
        assert team.moments["step"] == 1
        learner_step(team, groups[1:], setting)
        weights.append(team.weights.detach())
    assert not torch.equal(weights[0], stored["weights"])
    torch.testing.assert_close(*weights, rtol=0, atol=1e-5)


def test_the_first_checkpoint_has_the_weights_once(trained, folder):
    """Moments are zeros then, and the reference is the policy; all come back."""
    (config, learner, groups), task = trained, task_of(trained[0])
    groups[0].trajectories[0].reward = 1.0  # or there may be nothing to learn
    for times in (1, 4):
        path = save_checkpoint(folder, learner.version, state_of(learner))
        assert times <= path.stat().st_size / learner.weights.nbytes < times + 0.5
        other = make_learner(config, task, make_model(replace(config, seed=5), task))
        load_state(other, load_tensors(path))
        assert torch.equal(other.weights, learner.weights)
        assert torch.equal(other.reference.flat, learner.reference.flat)
        assert torch.equal(learner.weights, learner.reference.flat) == (times == 1)
        learner_step(learner, groups, config)


def digest_after(**changes) -> int:
    """Of a group of two samples, when the second one is changed."""
    arrays = {"tokens": np.int32([1, 2]), "loss_mask": np.array([False, True])}
    arrays |= {"logprobs": np.float32([0.0, -0.5]), "versions": np.int32([-1, 3])}
    first, second = (Trajectory(5, i, 0, **arrays, turns=[(1, 2)]) for i in range(2))
    return Group(5, 0, {}, [first, replace(second, **changes)]).digest


def test_a_digest_covers_everything_that_training_reads():
    changes = {
        "tokens": np.int32([1, 3]),
        "loss_mask": np.array([True, True]),
        "logprobs": np.float32([0.0, -0.25]),
        "versions": np.int32([-1, 4]),
        "reward": 0.5,
        "turn_rewards": [0.5],
        "finish": "env_error",
    }
    digests = {digest_after(**{name: value}) for name, value in changes.items()}
    assert len(digests | {digest_after()}) == 1 + len(changes)
    # and nothing else: what has failed teaches nothing
    assert digest_after(**changes) == digest_after(finish="env_error")
    assert digest_after(failure="x", swaps=[0, 3]) == digest_after()


def test_the_event_of_a_checkpoint_is_on_disk_before_its_file(tmp_path, monkeypatch):
    """Killed in between, the log has an event too many; the other way round it could not be cut."""
    events = []
    save = lambda run, *_: events.extend(read_lines(run / "events.jsonl"))  # noqa: E731
    monkeypatch.setattr(run_room, "save_checkpoint", save)
    config = Config(task="guess", out=str(tmp_path / "run"), **SMALL)
    with pytest.raises(SystemExit), run_room.running(config, "sync") as run:
        run_room.begin_run(run)
    (event,) = events
    assert (event["kind"], event["version"]) == ("checkpoint", 0)


def test_full_disk_costs_one_line_and_leaves_no_half_file(folder, monkeypatch):
    save_checkpoint(folder, 1, state(1.0))

    def full(descriptor):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="No space left on device.*step0000002.pt"):
        save_checkpoint(folder, 2, state(2.0))
    assert names(folder) == ["step0000001.pt"]
    assert load_checkpoint(folder)["weights"].tolist() == [1.0] * 5
