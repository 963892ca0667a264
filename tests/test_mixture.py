"""Several tasks in one run, groups whose samples failed, groups that teach nothing."""

import dataclasses
from collections import Counter

import pytest

import train_async
import train_sync
from buffer import repaired, unfit
from methods.mixture import pattern_of
from reward import TaskError, advance, make_task, problem_of, task_of
from runtime.config import Config, UserError
from runtime.folder import read_json, read_lines
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
    assert [t.reward for t in repaired([group])] == [0.1, 0.3, 0.4, 0.1, 0.3]
    whole = group_of(0.1, 0.2)
    assert repaired([whole]) == whole.trajectories


def test_equal_rewards_are_dead_only_if_somebody_minds():
    dead = group_of(1.0, "env_error", 1.0, 1.0)
    assert unfit(dead) is None and unfit(dead, keep_dead=False) == "dead"
    assert unfit(group_of(1.0, 0.5, 1.0, 1.0), keep_dead=False) is None


def test_a_mixture_takes_turns_by_its_ratio():
    assert pattern_of([3, 1]) == [0, 0, 1, 0] and pattern_of([1, 1]) == [0, 1]
    task = task_of(config_of(task="guess,reverse:3,sort:3", ratio="2,1,1"))
    alone = {name: make_task(name) for name in ("guess", "reverse:3", "sort:3")}
    problems = [problem_of(task, i, "train") for i in range(40)]
    for name, share in {"guess": 2, "reverse:3": 1, "sort:3": 1}.items():
        ours = [p for p in problems if p["_task"] == name]
        assert len(ours) == 10 * share, "exact over whole patterns"
        for index, problem in enumerate(ours):  # none twice, none left out
            assert problem["prompt"] == alone[name].reset(index, "train")["prompt"]
            assert problem["max_turns"] == alone[name].max_turns
    held_out = [problem_of(task, i, "eval")["_task"] for i in range(task.eval_size)]
    assert [held_out.count(name) for name in alone] == [16, 256, 256]
    assert task.context == max(part.context for part in alone.values())
    assert {*task.alphabet} == {token for part in alone.values() for token in part.alphabet}


def test_a_problem_may_have_facts_of_any_name(tmp_path):
    (tmp_path / "mine.py").write_text("""
from dataclasses import replace
from reward import make_task
FACTS = {"ends": [3, 7], "task": "mine", "solved": False}
def make(argument, seed, tokenizer):
    task = make_task("reverse:3")
    def step(problem, answers):
        assert FACTS.items() <= problem.items()
        return task.step(problem, answers)
    return replace(task, reset=lambda i, split: task.reset(i, split) | FACTS, step=step)
""")
    task = task_of(config_of(task=f"guess,{tmp_path}/mine.py"))
    problem = problem_of(task, 1, "train")
    assert task.step(problem, task.solve(problem)).reward == 1.0


def test_a_mixture_with_a_task_that_has_states_keeps_both():
    task, states = task_of(config_of(task="guess,lab/debug.py")), {}
    for index in range(4):
        problem = problem_of(task, index, "train")
        answers = task.solve(problem)
        for turn in range(1, len(answers) + 1):
            step = advance(task, states, index, problem, answers[:turn])
        assert step.done and step.reward >= 0.5, problem


@pytest.mark.parametrize(
    "flags, words",
    [
        ({"ratio": "1,2,3"}, "--ratio 1,2,3: must be 2 whole numbers from 1 up"),
        ({"ratio": "1,0"}, "--ratio 1,0: must be 2 whole"),
        ({"ratio": "1,x"}, "--ratio 1,x: must be 2 whole"),
        ({"task": "guess", "ratio": "1"}, "--ratio 1: must be left out with one task"),
        ({"task": "guess,guess"}, "--task guess,guess: must name each task once"),
    ],
)
def test_what_is_no_mixture_is_refused_in_one_line(flags, words):
    with pytest.raises(UserError, match=words):
        task_of(config_of(**flags))


def test_a_task_that_does_not_fit_is_named():
    with pytest.raises(TaskError, match="task 'nothing'"):
        task_of(config_of(task="nothing,guess"))


@pytest.mark.parametrize("eta", [0, 2])
def test_every_task_has_its_share_and_its_score(tmp_path, eta):
    run = tmp_path / "run"
    flags = {"task": "guess,reverse:3,sort:3", "ratio": "2,1,1", "max_staleness": eta}
    train_async.train(config_of(out=str(run), **flags))
    rows = read_lines(run / "metrics.jsonl")
    assert set(rows[-1]["eval"]["tasks"]) == {"guess", "reverse:3", "sort:3"}
    steps = [e for e in read_lines(run / "events.jsonl") if e["kind"] == "train"]
    task = task_of(config_of(**flags))
    names = [problem_of(task, i, "train")["_task"] for event in steps for i in event["groups"]]
    shares = Counter(names)
    assert shares["guess"] == 2 * shares["sort:3"] == 2 * shares["reverse:3"]
    train_async.train(dataclasses.replace(Config(), replay=str(run)))
    if eta == 0:
        train_sync.train(config_of(out=str(tmp_path / "sync"), **flags))
        both = [read_json(folder / "summary.json") for folder in (run, tmp_path / "sync")]
        assert both[0]["weights_sha256"] == both[1]["weights_sha256"]


@pytest.mark.parametrize("flags", [{"advantage": "gae"}, {"credit": "turn"}, {"keep_dead": "no"}])
def test_staleness_zero_is_synchronous_and_a_run_goes_on(tmp_path, flags):
    flags |= {"max_staleness": 0, "task": "guess", "checkpoint_every": 2}
    train_sync.train(config_of(out=str(tmp_path / "sync"), **flags))
    train_async.train(config_of(out=str(tmp_path / "async"), **flags))
    runs = [tmp_path / "sync", tmp_path / "async"]
    whole = [read_json(run / "summary.json")["weights_sha256"] for run in runs]
    assert whole[0] == whole[1]
    (tmp_path / "sync" / "checkpoints" / "step0000004.pt").unlink()
    train_sync.train(dataclasses.replace(Config(), resume=str(tmp_path / "sync")))
    assert read_json(tmp_path / "sync" / "summary.json")["weights_sha256"] == whole[0]


def test_groups_that_teach_nothing_are_replaced(tmp_path):
    train_sync.train(config_of(task="guess", keep_dead="no", out=str(tmp_path / "run")))
    rows = read_lines(tmp_path / "run" / "metrics.jsonl")[1:]
    assert sum(row["discarded"].get("dead", 0) for row in rows) > 0
    assert all(row["dead_groups"] == 0 and row["samples"] == 32 for row in rows)
