"""Several tasks in one run, groups whose samples failed, groups that teach nothing."""

import dataclasses

import numpy as np
import pytest

import train_async
import train_sync
from buffer import repaired, unfit
from lab.plots import load_result
from reward import TaskError, part_of, problem_of, task_of
from runtime.config import Config, UserError
from runtime.folder import read_lines
from runtime.messages import Group, Trajectory

SMALL = {"slots": 16, "group_size": 4, "groups_per_step": 8, "steps": 4, "eval_every": 4}


def config_of(**flags) -> Config:
    return dataclasses.replace(Config(), **{"task": "guess,reverse:3", **SMALL, **flags})


def group_of(*rewards) -> Group:
    """A group with these rewards; a text is the failure of a sample."""
    group = Group(0, 0, {})
    for i, reward in enumerate(rewards):
        t = Trajectory(0, i, 0)
        t.finish, t.reward = (reward, 0.0) if isinstance(reward, str) else ("stop", reward)
        group.trajectories.append(t)
    return group


def test_more_than_half_must_be_sound():
    assert unfit(group_of(1.0, 0.0, "env_timeout", 1.0)) is None
    assert unfit(group_of(1.0, 0.0, "env_timeout", "env_error")) == "env_timeout"
    assert unfit(group_of(1.0, "env_error", "env_timeout", "env_error")) == "env_error"
    assert unfit(group_of("env_error")) == "env_error"


def test_sound_samples_take_the_places_of_the_others():
    group = group_of(0.1, "env_timeout", 0.3, 0.4, "env_error")
    assert [t.reward for t in repaired(group)] == [0.1, 0.3, 0.4, 0.1, 0.3]
    whole = group_of(0.1, 0.2)
    assert repaired(whole) == whole.trajectories


def test_equal_rewards_are_dead_only_if_somebody_minds():
    dead = group_of(1.0, "env_error", 1.0, 1.0)
    assert unfit(dead) is None and unfit(dead, keep_dead=False) == "dead"
    assert unfit(group_of(1.0, 0.5, 1.0, 1.0), keep_dead=False) is None


def test_a_group_belongs_to_the_task_of_its_number():
    task = task_of(config_of(task="guess,reverse:3,sort:3", ratio="2,1,1"))
    assert task.shares == (4, 2, 2) and task.context == max(p.context for p in task.parts)
    assert [part_of(task, i).name for i in range(4)] == ["guess", "reverse:3", "sort:3", "guess"]
    assert problem_of(task, 7, "train") == task.parts[1].reset(2, "train")
    assert {*task.alphabet} == {token for part in task.parts for token in part.alphabet}


@pytest.mark.parametrize(
    "flags, words",
    [
        ({"ratio": "1,2,3"}, "--ratio 1,2,3: must be 2 whole numbers from 1 up"),
        ({"ratio": "1,0"}, "--ratio 1,0: must be 2 whole"),
        ({"ratio": "1,x"}, "--ratio 1,x: must be 2 whole"),
        ({"ratio": "2,1"}, "--groups-per-step 8: must be a multiple of 3 .*, such as 9"),
        ({"task": "guess", "ratio": "1"}, "--ratio 1: must be left out with one task"),
        ({"task": "guess,guess"}, "--task guess,guess: must name each task once"),
    ],
)
def test_what_is_no_mixture_is_refused_in_one_line(flags, words):
    with pytest.raises(UserError, match=words):
        task_of(config_of(**flags))


def test_a_task_that_does_not_fit_is_named():
    with pytest.raises(UserError, match="--context 8: .* task guess has"):
        train_sync.train(config_of(task="guess,reverse:9", context=8))
    with pytest.raises(TaskError, match="task 'nothing'"):
        task_of(config_of(task="nothing,guess"))


@pytest.mark.parametrize("eta", [0, 2])
def test_every_batch_has_its_share_of_every_task(tmp_path, eta):
    run = tmp_path / "run"
    flags = {"task": "guess,reverse:3,sort:3", "ratio": "2,1,1", "max_staleness": eta}
    train_async.train(config_of(out=str(run), **flags))
    for event in read_lines(run / "events.jsonl"):
        if event["kind"] == "train":
            kinds = np.bincount([group % 3 for group in event["groups"]])
            assert kinds.tolist() == [4, 2, 2]
    row = read_lines(run / "metrics.jsonl")[-1]
    assert [row["tasks"][name]["samples"] for name in ("guess", "reverse:3", "sort:3")] == [
        16,
        8,
        8,
    ]
    assert row["eval"]["tasks"].keys() == row["tasks"].keys()
    train_async.train(dataclasses.replace(Config(), replay=str(run)))
    if eta == 0:
        train_sync.train(config_of(out=str(tmp_path / "sync"), **flags))
        both = [load_result("summary", folder) for folder in (run, tmp_path / "sync")]
        assert both[0]["weights_sha256"] == both[1]["weights_sha256"]


@pytest.mark.parametrize("flags", [{"advantage": "gae"}, {"credit": "turn"}, {"keep_dead": "no"}])
def test_staleness_zero_is_synchronous_and_a_run_goes_on(tmp_path, flags):
    flags |= {"max_staleness": 0, "task": "guess", "checkpoint_every": 2}
    train_sync.train(config_of(out=str(tmp_path / "sync"), **flags))
    train_async.train(config_of(out=str(tmp_path / "async"), **flags))
    runs = [tmp_path / "sync", tmp_path / "async"]
    whole = [load_result("summary", run)["weights_sha256"] for run in runs]
    assert whole[0] == whole[1]
    (tmp_path / "sync" / "checkpoints" / "step0000004.pt").unlink()
    train_sync.train(dataclasses.replace(Config(), resume=str(tmp_path / "sync")))
    assert load_result("summary", tmp_path / "sync")["weights_sha256"] == whole[0]


def test_groups_that_teach_nothing_are_replaced(tmp_path):
    train_sync.train(config_of(task="guess", keep_dead="no", out=str(tmp_path / "run")))
    rows = read_lines(tmp_path / "run" / "metrics.jsonl")[1:]
    assert sum(row["discarded"].get("dead", 0) for row in rows) > 0
    assert all(row["dead_groups"] == 0 and row["samples"] == 32 for row in rows)
