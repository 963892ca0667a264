"""Tasks of the package reasoning-gym: its scorer pays, other problems are held out."""

import pytest

from reward import TaskError, make_task, problem_of
from tasks.gym import settings_of

pytest.importorskip("reasoning_gym", reason="pip install reasoning-gym")
NAMES = ["chain_sum", "basic_arithmetic", "count_primes", "spell_backward", "maze", "acre"]


@pytest.mark.parametrize("name", NAMES)
def test_its_scorer_pays_the_right_answer_and_problems_are_the_same_again(name):
    task, again = (make_task(f"gym:{name}", seed=3) for _ in range(2))
    for split in ("train", "eval"):
        for index in (0, 7, 12_345):
            problem = problem_of(task, index, split)
            assert problem == problem_of(again, index, split)
            assert task.step(problem, task.solve(problem)).reward == pytest.approx(1.0)
            assert again.step(problem, ["nothing of that kind"]).reward < 0.5


def test_settings_reach_the_generator_and_the_seed_moves_training_only():
    spec = "gym:chain_sum:min_terms=2,max_terms=2,min_digits=1,max_digits=9,tokens=12"
    one, other = make_task(spec, seed=0), make_task(spec, seed=1)
    assert one.turn_tokens == 12 and one.alphabet is None
    prompts = {
        split: [one.reset(i, split)["prompt"] for i in range(100)] for split in ("train", "eval")
    }
    assert all(prompt.count("+") + prompt.count(" - ") == 1 for prompt in prompts["train"])
    assert prompts["eval"] == [other.reset(i, "eval")["prompt"] for i in range(100)]
    assert prompts["train"] != [other.reset(i, "train")["prompt"] for i in range(100)]
    assert prompts["train"] != prompts["eval"]
    assert one.max_prompt_tokens == other.max_prompt_tokens
    assert settings_of('a=["+","-"],b=1,c=x y') == {"a": ["+", "-"], "b": 1, "c": "x y"}


def test_problems_that_depend_on_the_order_of_a_set_need_one_order_in_all_processes(monkeypatch):
    monkeypatch.delenv("PYTHONHASHSEED", raising=False)
    with pytest.raises(TaskError, match="set PYTHONHASHSEED=0"):
        make_task("gym:word_ladder")
    monkeypatch.setenv("PYTHONHASHSEED", "0")
    assert make_task("gym:word_ladder").eval_size == 128


@pytest.mark.parametrize(
    "spec, words",
    [
        ("gym:no_such", "'no_such': allowed is one of .*chain_sum"),
        ("gym:chain_sum:colour=3", "chain_sum refuses {'colour': 3}"),
        ("gym:chain_sum:min_terms=9,max_terms=2", "chain_sum refuses"),
        ("gym:", "allowed is one of"),
    ],
)
def test_mistakes_cost_one_line(spec, words):
    with pytest.raises(TaskError, match=words):
        make_task(spec)
