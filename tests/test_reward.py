"""Verification: from tokens to text, from text to verdicts, whatever a model has written."""

import contextlib
import time
from dataclasses import replace

import numpy as np
import pytest
from judge import verify

import reward
from reward import Step, make_task
from runtime.tokenizer import END, own_tokenizer

encode, decode_bytes = own_tokenizer().encode, own_tokenizer().decode_bytes


def test_special_tokens_written_as_text_do_not_end_an_answer():
    task = make_task("reverse")
    tokens = np.array(encode("1034 reverse") + encode("4301<|end|>"), dtype=np.int32)
    assert END not in tokens
    assert reward.split_answers(task, tokens, [(5, len(tokens))]) == ["4301<|end|>"]


def test_verify_sums_turn_rewards_and_keeps_those_of_a_cut_episode():
    def step(problem, answers):
        return Step("go on", 0.25 * len(answers), len(answers) == 3)

    task = replace(make_task("guess"), step=step)
    assert verify(task, {}, ["a", "b", "c"]) == (1.5, (0.25, 0.5, 0.75), None)
    assert verify(task, {}, ["a", "b"]) == (0.75, (0.25, 0.5), None)
    assert verify(task, {}, []) == (0.0, (), None)
    verdict = verify(task, {}, ["a"] * 5)
    assert verdict.reward == 0 and verdict.turn_rewards == (0.0,) * 5
    assert verdict.error == "verifier_error: ValueError: 5 answers, but the episode ended after 3"
    large = replace(task, step=lambda problem, answers: Step("go on", 1e9, False))
    assert verify(large, {}, ["a"] * 6) == (6e9, (1e9,) * 6, None)


def failing_step(problem, answers):
    if answers[-1] == "raise":
        raise RuntimeError("several\nlines " + "x" * 1000)
    if answers[-1] == "recurse":
        return failing_step(problem, [*answers, "recurse"])
    if answers[-1] == "sleep":
        time.sleep(30)
    while answers[-1] == "spin":
        with contextlib.suppress(Exception):
            sum(range(1000))
    if answers[-1] == "bare":
        with contextlib.suppress(BaseException):
            time.sleep(30)
        time.sleep(30)
    rewards = {"fine": 1.0, "nan": float("nan"), "text": "good"}
    return Step(None, rewards[answers[-1]], True) if answers[-1] in rewards else None


@pytest.mark.parametrize(
    "answer, error",
    [
        ("fine", None),
        ("raise", "verifier_error: RuntimeError: several lines xxx"),
        ("recurse", "verifier_error: RecursionError: "),
        ("nan", "verifier_error: ValueError: the reward nan is not between"),
        ("text", "verifier_error: ValueError: could not convert string to float: 'good'"),
        ("something else", "verifier_error: TypeError: "),
        ("sleep", "verifier_timeout"),
        ("spin", "verifier_timeout"),
        ("bare", "verifier_timeout"),
    ],
)
def test_a_failing_verifier_costs_its_sample_only(answer, error):
    task = replace(make_task("reverse"), step=failing_step)
    verdicts = [verify(task, {}, [said], 0.5) for said in ("fine", answer, "fine")]
    assert verdicts[0] == verdicts[2] == (1.0, (1.0,), None)
    if error:
        assert verdicts[1][:2] == (0.0, (0.0,)) and verdicts[1].error.startswith(error)
        assert "\n" not in verdicts[1].error and len(verdicts[1].error) < 300
        assert verdicts[1].error.partition(":")[0] in ("verifier_error", "verifier_timeout")


def test_control_c_passes_through_a_verifier():
    def step(problem, answers):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        verify(replace(make_task("reverse"), step=step), {}, ["1"])


def test_split_answers_reads_turns_of_a_trajectory():
    guess, jsonl = make_task("guess"), replace(make_task("reverse"), alphabet=None)
    tokens = encode("guess 7< 3> 5")
    turns = [(1, 2), (3, 4), (5, 6)]
    for array in (tokens, np.array(tokens, dtype=np.int32)):
        assert reward.split_answers(guess, array, turns) == [" 7", " 3", " 5"]
        assert reward.split_answers(guess, array, np.array(turns)) == [" 7", " 3", " 5"]
    tokens = [*encode("1034 reverse"), *encode("43"), END]
    assert reward.split_answers(jsonl, tokens, [(5, 8)]) == ["43"]
    assert reward.split_answers(jsonl, tokens, [(5, 7), (7, 8), (8, 8)]) == ["43", "", ""]
    broken = [t for t in range(256) if decode_bytes([t]) == b"\xff"]
    assert reward.split_answers(jsonl, broken + encode("é")[:1], [(0, 2)]) == ["\ufffd\ufffd"]
