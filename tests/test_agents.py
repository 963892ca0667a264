"""The tasks with tools, hops and debug: what is paid, what is told, and what is held out."""

import json
import random
from pathlib import Path

import pytest
from judge import verify

from lab import debug
from reward import Step, TaskError, make_task, problem_of
from runtime.tokenizer import own_tokenizer
from tasks import hops

encode = own_tokenizer().encode
DEBUG = str(Path(debug.__file__))
SPECS = ["hops", "hops:1", "hops:3:0.05", "hops:8:0.5", DEBUG]
NONSENSE = ["", "?", "!", "77", "?!", "!?", "? 7", "?７", "\ufffd\ufffd", "\ud800", "?7" * 10**5]
NONSENSE += ["d+", "d+nn", "+++", "1+1", "\x00\x00\x00", "__import__('os')", "d" * 10**6]


def fact_of(key: int) -> str:
    return f" {(key + 1) % 10} "


FACTS = {f"?{key}": fact_of(key) for key in range(10)}
WAY = {"prompt": "2 hops from 4: ", "facts": FACTS, "way": ["?4", "?5", "!6"], "failing": []}
HOP = 0.3 / 2


def play(task, problem, answers):
    """(observations, rewards) of an episode that ends with the last of the answers."""
    steps = [task.step(problem, answers[: turn + 1]) for turn in range(len(answers))]
    assert [step.done for step in steps] == [False] * (len(steps) - 1) + [True]
    verdict = verify(task, problem, answers)
    assert verdict.error is None and verdict.turn_rewards == tuple(s.reward for s in steps)
    return [step.observation for step in steps], [step.reward for step in steps]


@pytest.mark.parametrize("spec", SPECS)
def test_problems_are_pure_plain_and_solved_by_solve(spec):
    task, again, other = make_task(spec, 3), make_task(spec, 3), make_task(spec, 4)
    for split in ("train", "eval"):
        problems = [problem_of(task, index, split) for index in range(200)]
        assert problems == [again.reset(i, split) for i in reversed(range(200))][::-1]
        assert json.loads(json.dumps(problems)) == problems
        same = problems == [other.reset(i, split) for i in range(200)]
        assert same == (split == "eval"), "the seed must move training problems only"
        for problem in problems:
            answers = task.solve(problem)
            told, rewards = play(task, problem, answers)
            assert sum(rewards) == pytest.approx(1.0)
            size = len(encode(problem["prompt"])) + sum(len(encode(x)) for x in told if x)
            for answer in answers:
                ids = encode(answer)
                assert len(ids) == task.turn_tokens and {*ids} <= {*task.alphabet}
                size += len(ids)
            assert size <= task.context and len(answers) <= task.max_turns
    assert task.eval_size == 128


@pytest.mark.parametrize("spec", SPECS)
def test_solved_means_that_the_end_was_right_and_no_play_raises_or_pays_more(spec):
    """Random turns, right ones among them: what is told fits, and nobody is paid more than 1."""
    task, chance, ends = make_task(spec), random.Random(0), set()
    pool = ["".join(chance.choices("dn+*", k=3)) for _ in range(20)]
    pool += [f"{sign}{key}" for sign in "??!" for key in range(10)]
    for index in range(300):
        problem = task.reset(index, "train")
        before, best, answers, total = json.dumps(problem), task.solve(problem), [], 0.0
        step = Step(None, 0.0, False)
        while not step.done:
            answers.append(chance.choice([*best, *best, chance.choice(pool), *NONSENSE[:9]]))
            step = task.step(problem, answers)
            total += step.reward
            assert (step.observation is None) == step.done
            assert len(encode(step.observation or "")) <= task.observation_tokens
        assert len(answers) <= task.max_turns and 0 <= total <= 1 + 1e-9
        right = answers[-1] == best[-1]
        if spec == DEBUG:
            right = not debug.failing(problem, answers[-1])
        assert (total >= task.solved) == right, (problem, answers, total)
        assert json.dumps(problem) == before
        ends.add(right)
    assert ends == {True, False}


@pytest.mark.parametrize("spec", SPECS)
def test_nonsense_is_answered_and_worth_nothing(spec):
    task = make_task(spec)
    problem = task.reset(0, "train")
    for text in NONSENSE:
        assert task.step(problem, [text])[1:] == (0.0, False), text[:20]
        verdict = verify(task, problem, [text] * task.max_turns, seconds=5)
        assert (verdict.reward, verdict.error) == (0.0, None)


@pytest.mark.parametrize("spec", ["hops:", "hops:0", "hops:9", "hops:x", "hops:3:", "hops::0.1"])
def test_bad_sizes_are_refused(spec):
    with pytest.raises(TaskError) as error:
        make_task(spec)
    assert "\n" not in str(error.value) and "allowed is" in str(error.value)


@pytest.mark.parametrize("rate", ["0.6", "1", "-0.1", "nan", "1e-3", ".", "0.1:2", "0." + "1" * 99])
def test_bad_rates_are_refused(rate):
    with pytest.raises(TaskError, match="allowed is a number in 0..0.5"):
        make_task(f"hops:3:{rate}")


def test_hops_by_hand():
    task = make_task("hops:2")
    assert play(task, WAY, ["?4", "?5", "!6"]) == ([" 5 ", " 6 ", None], [HOP, HOP, 0.7])
    assert play(task, WAY, ["?4", "?5", "!5"]) == ([" 5 ", " 6 ", None], [HOP, HOP, 0.0])
    assert play(task, WAY, ["!6"]) == ([None], [0.7])  # by luck: no turn was wasted
    assert play(task, WAY, ["!4"]) == ([None], [0.0])


def test_hops_pays_a_call_once_and_only_in_order():
    task = make_task("hops:2")
    told, rewards = play(task, WAY, ["?4", "?4", "?4", "?5", "!6"])
    assert told == [" 5 ", " 5 ", " 5 ", " 6 ", None]
    assert rewards == [HOP, 0.0, 0.0, HOP, pytest.approx(0.7 - 2 * 0.05)]
    told, rewards = play(task, WAY, ["?5", "?6", "?4", "??", "!6"])  # too early, beyond, right
    assert told == [" 6 ", " 7 ", " 5 ", " - ", None]
    assert rewards == [0.0, 0.0, HOP, 0.0, pytest.approx(0.7 - 3 * 0.05)]


def test_hops_ends_after_its_budget():
    task = make_task("hops:2")
    assert task.max_turns == 5
    for last in ("?5", "xx", ""):
        told, rewards = play(task, WAY, ["?4", "?9", "xx", "?5", last])
        assert told == [" 5 ", " 0 ", " - ", " 6 ", None] and rewards[-1] == 0.0


def test_a_failing_tool_tells_nothing_and_its_failures_cost_nothing():
    task, problem = make_task("hops:2:0.5"), WAY | {"failing": [1, 3]}
    told, rewards = play(task, problem, ["?4", "?4", "?5", "?5", "!6"])
    assert told == [" ~ ", " 5 ", " ~ ", " 6 ", None]
    assert rewards == [0.0, HOP, 0.0, HOP, 0.7]
    told, rewards = play(task, problem, ["?4", "?5", "?4", "?4", "!6"])
    assert told == [" ~ ", " 6 ", " ~ ", " 5 ", None]
    assert rewards == [0.0, 0.0, 0.0, HOP, pytest.approx(0.7 - 0.05)]
    assert task.solve(problem) == ["?4", "?4", "?5", "?5", "!6"]
    # nonsense costs its turn, also where the tool would have failed
    assert play(task, problem, ["??", "?4", "?5", "?5", "!6"])[1][-1] == pytest.approx(0.7 - 0.05)


@pytest.mark.parametrize("spec, rate", [("hops:8", 0), ("hops:8:0.05", 0.05), ("hops:8:0.4", 0.4)])
def test_the_tool_fails_at_its_rate_and_never_too_often(spec, rate):
    task = make_task(spec)
    failing = [task.reset(index, "train")["failing"] for index in range(500)]
    assert all(len(turns) <= 8 and all(1 <= turn <= 16 for turn in turns) for turns in failing)
    assert sum(map(len, failing)) / (500 * 16) == pytest.approx(rate, rel=0.15)


@pytest.mark.parametrize("spec", ["hops:1", "hops:2", "hops", "hops:8"])
def test_ways_are_rings_and_held_out(spec):
    task, seen = make_task(spec), {}
    for split, count in (("train", 3000), ("eval", 300)):
        problems = [task.reset(index, split) for index in range(count)]
        seen[split] = {tuple(problem["way"]) for problem in problems}
        for problem in problems[:50]:
            facts, way = problem["facts"], problem["way"]
            assert problem["prompt"].endswith(f"from {way[0][1]}: ")
            told = [facts[call].strip() for call in way[:-1]]
            assert told == [call[1] for call in way[1:]] and len({*told, way[0][1]}) == len(way)
            key, keys = 0, set()
            while key not in keys:
                keys.add(key)
                key = int(facts[f"?{key}"])
            assert keys == {*hops.KEYS}
    assert len(seen["eval"]) >= 5 and not seen["train"] & seen["eval"]


@pytest.mark.parametrize(
    "program, number, output",
    [
        ("ddn", 9, 0),
        ("d+n", 3, 7),
        ("nd+", 3, 8),
        ("d*n", 4, 7),
        ("dn*", 4, 0),
        ("nd*", 4, 5),
        ("dd+", 6, 2),  # below the top the rest stays as it was
        ("+dd", 3, None),
        ("d++", 3, None),
        ("n*n", 3, None),
    ],
)
def test_the_stack_machine_by_hand(program, number, output):
    assert debug.run(program, number) == output


def test_there_are_ten_things_to_do_and_none_is_trivial():
    x = range(10)
    wanted = [[n + k for n in x] for k in (1, 2, 3)]
    wanted += [[2 * n for n in x], [2 * n + 1 for n in x], [2 * n + 2 for n in x]]
    wanted += [[n * n for n in x], [n * n + 1 for n in x], [n * n + n for n in x]]
    wanted += [[(n + 1) ** 2 for n in x]]
    wanted = [[n % 10 for n in row] for row in wanted]
    assert sorted(list(debug.OUTPUTS[program]) for program in debug.TARGETS) == sorted(wanted)


PROBLEM = {"prompt": "2>6 5>2 8>8? ", "examples": [[2, 6], [5, 2], [8, 8]], "program": "nd+"}


def test_debug_by_hand():
    task = make_task(DEBUG)
    assert play(task, PROBLEM, ["nd+"]) == ([None], [1.0])
    told, rewards = play(task, PROBLEM, ["+++", "d*n", "nnd", "nd+"])
    assert told == [" 2>!? ", " 2>5? ", " 2>4? ", None]
    assert rewards == [0.0, 0.0, 0.0, 0.25]
    told, rewards = play(task, PROBLEM, ["dn*", "nnn", "d+d", "nd"])
    assert told == [" 5>0? ", " 2>5? ", " 2>4? ", None]
    assert rewards == [pytest.approx(0.2 / 3), 0.0, 0.0, 0.0]


def test_debug_pays_progress_once():
    task = make_task(DEBUG)
    told, rewards = play(task, PROBLEM, ["dn*", "dn*", "ddn", "nd+"])  # one, again, none, all
    assert told == [" 5>0? ", " 5>0? ", " 2>3? ", None]
    assert rewards[:3] == [pytest.approx(0.2 / 3), 0.0, 0.0]
    assert rewards[3] == pytest.approx((0.8 + 0.2 * 2 / 3) / 4)
    assert sum(rewards) < sum(play(task, PROBLEM, ["ddn", "dn*", "nd+"])[1]) < 1.0


def test_debug_tells_the_first_example_that_fails():
    task = make_task(DEBUG)
    for index in range(100):
        problem = task.reset(index, "train")
        for program in ("ddn", "d*d", "d++"):
            step = task.step(problem, [program])
            failed = [n for n, output in problem["examples"] if debug.run(program, n) != output]
            assert step.done == (not failed)
            if failed:
                made = debug.run(program, failed[0])
                assert step.observation == f" {failed[0]}>{'!' if made is None else made}? "


def test_debug_holds_out_prompts_and_no_single_example():
    task, seen = make_task(DEBUG), {}
    for split, count in (("train", 4000), ("eval", 1000)):
        problems = [task.reset(index, split) for index in range(count)]
        for problem in problems[:100]:
            pairs = [f"{number}>{output}" for number, output in problem["examples"]]
            assert problem["prompt"] == " ".join(pairs) + "? " and pairs == sorted(pairs)
        seen[split] = {problem["prompt"] for problem in problems}
        seen[split, "pairs"] = {pair for prompt in seen[split] for pair in prompt[:-2].split()}
    assert len(seen["eval"]) > 90 and not seen["train"] & seen["eval"]
    assert seen["eval", "pairs"] <= seen["train", "pairs"]
