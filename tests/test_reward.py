"""Tests of reward.py by behaviour: tokenizer, tasks, verifiers, limits. No network, no processes.

The vocabulary file is a product of `build_vocabulary` below; to write it again:
`python -c "import tests.test_reward as t; t.VOCABULARY.write_bytes(t.build_vocabulary())"`
"""

import base64
import contextlib
import json
import pickle
import random
import subprocess
import sys
import time
from dataclasses import replace
from fractions import Fraction
from pathlib import Path

import numpy as np
import pytest

import reward
from reward import Step, last_number, make_task, verify
from runtime.tokenizer import (
    END,
    PAD,
    VOCAB_SIZE,
    decode_bytes,
    encode,
    load_tokenizer,
    tokenizer,
    tokenizer_hash,
)

VOCABULARY = Path(reward.__file__).with_name("vocab.tiktoken")
SPECS = ["guess", "reverse", "reverse:2", "sort", "sort:7", "sum", "sum:5", "recall", "recall:16"]

# In merge order (`_` is a space): byte-pair merges learned on English prose (docstrings, manuals)
# in which the words of the tasks were made frequent.
FRAGMENTS = """
_t _a re in _th er _s on es or _the _c en at ed _i _f _re _o al le _b _w ing se an ion st _m _p ess
_to ct _n _an th _is _d ver _in ro ort _e gu ar _of ent _h il am as un _sort verse od guess _reverse
_be ch et ur _st it _l ut _and ad ul ce _for ck qu um _v us om ect _wh is pt ith ap all lo est _con
_as _or pe im ot _ex ue _it ag _are ame ment _on id iv ic _with ex _pro _if ction _that _by cess el
ass res and _g ab bj ber ring _de ill ist ult bject ption _al _us ation _fi if urn umber api turn ri
con up alue rom ly _object ow port _return ore _call ol _will _from _not unction ode ter ack
"""


def build_vocabulary() -> bytes:
    tokens = [bytes([value]) for value in range(256)]
    tokens += [f" {number}".encode() for number in range(100)]
    tokens += [fragment.replace("_", " ").encode() for fragment in FRAGMENTS.split()]
    return b"".join(base64.b64encode(t) + b" %d\n" % rank for rank, t in enumerate(tokens))


# ---------------------------------------------------------------------------------- tokenizer


def test_the_vocabulary_file_is_the_one_described():
    assert VOCABULARY.read_bytes() == build_vocabulary(), "write it again, see the docstring"
    encoding = tokenizer()
    assert encoding.n_vocab == VOCAB_SIZE == 512
    assert encoding.encode("<|end|><|pad|>", allowed_special="all") == [END, PAD]


def test_every_token_can_be_reached_by_merging():
    ranks = tokenizer()._mergeable_ranks
    for token, rank in ranks.items():
        parts = [bytes([value]) for value in token]
        while len(parts) > 1:  # byte-pair merging, without tiktoken's look-up of whole pieces
            pairs = [ranks.get(a + b, 10**9) for a, b in zip(parts, parts[1:], strict=False)]
            best = min(range(len(pairs)), key=pairs.__getitem__)
            if pairs[best] == 10**9:
                break
            parts[best : best + 2] = [parts[best] + parts[best + 1]]
        assert parts == [token], f"{token} cannot be reached, merging stops at {parts}"
        if rank >= 256:
            assert encode(token.decode()) == [rank]


def test_numbers_words_and_signs_are_the_pieces_that_the_tasks_count_on():
    numbers = [encode(f" {n}") for n in range(100)]
    assert all(len(ids) == 1 for ids in numbers)
    assert encode("".join(f" {n}" for n in range(100))) == [ids[0] for ids in numbers]
    for text in ["guess", " reverse", " sort", "<", ">", "?", "=", "+", ";", *"0123456789"]:
        assert len(encode(text)) == 1, text
    for text, pieces in [
        ("42", ["4", "2"]),
        (" 123", [" ", "1", "2", "3"]),
        (" 12345", [" ", "1", "2", "3", "4", "5"]),
        (" 7;", [" 7", ";"]),
        ("a 12b", ["a", " 12", "b"]),
    ]:
        assert [decode_bytes([t]).decode() for t in encode(text)] == pieces


def test_round_trip_of_any_text():
    rng = random.Random(0)
    ranges = [(0, 32), (32, 127), (0x80, 0x250), (0x660, 0x66A), (0x2000, 0x2070), (0xE000, 0xE010)]
    ranges += [(0x10000, 0x10FFFF), (0x300, 0x370), (0x1F600, 0x1F650), (48, 58), (9, 14)]
    for _ in range(400):
        text = "".join(chr(rng.randrange(*rng.choice(ranges))) for _ in range(rng.randrange(60)))
        ids = encode(text)
        assert decode_bytes(ids) == text.encode(), "the pattern dropped something"
        assert all(0 <= t < END for t in ids)
    for text in ["<|end|>", "a<|pad|>b", "\x00\r\n\t \u3000\u2028", " " * 50, "ſ" * 40, "x" * 100]:
        assert decode_bytes(encode(text)) == text.encode()
        assert END not in encode(text) and PAD not in encode(text)


def test_round_trip_of_any_bytes_and_of_long_text():
    data = random.Random(1).randbytes(5000)
    table = {tokenizer().decode_single_token_bytes(t): t for t in range(END)}
    assert decode_bytes([table[bytes([value])] for value in data]) == data
    start = time.perf_counter()
    for text in ["a" * 300_000, "7" * 100_000, "é " * 50_000]:
        assert decode_bytes(encode(text)) == text.encode()
    assert time.perf_counter() - start < 3, "encoding is no longer linear in the length"


@pytest.mark.parametrize("token", [-1, VOCAB_SIZE, 10**9])
def test_unknown_token_ids_are_refused(token):
    with pytest.raises(ValueError, match=rf"token id {token} is not in 0\.\.511"):
        decode_bytes([5, token])


def test_the_hash_follows_the_content_and_nothing_is_cached(tmp_path):
    path = tmp_path / "v.tiktoken"
    path.write_bytes(build_vocabulary().replace(b"\n", b"\r\n"))
    first = load_tokenizer(path)
    assert tokenizer_hash(first) == tokenizer_hash(tokenizer())
    assert first.name.endswith(tokenizer_hash(first))
    assert len(tokenizer_hash(first)) == 64
    lines = build_vocabulary().splitlines(keepends=True)
    path.write_bytes(b"".join(lines[:-1]))
    second = load_tokenizer(path)
    assert second.n_vocab == 511, "the old vocabulary came back"
    path.write_bytes(b"".join([*lines[:-2], b"YWNr 508\n", b"dGVy 509\n"]))
    third = load_tokenizer(path)  # two tokens have changed places
    assert len({tokenizer_hash(encoding) for encoding in (first, second, third)}) == 3


@pytest.mark.parametrize(
    "damage, complaint",
    [
        (lambda lines: [], "all 256 bytes must be tokens, 0 is not"),
        (lambda lines: [*lines[:65], b"/////w== 65", *lines[66:]], "65 is not"),
        (lambda lines: [*lines[:300], *lines[301:]], "ranks must be 0, 1, 2"),
        (lambda lines: [*lines[:-1], lines[5].split()[0] + b" 509"], "every token different"),
        (lambda lines: [*lines[:7], b"!!! 7", *lines[8:]], "base64 rank"),
        (lambda lines: [*lines[:7], b"", *lines[8:]], "base64 rank"),
        (lambda lines: [*lines[:7], b"Bw== seven", *lines[8:]], "base64 rank"),
    ],
)
def test_a_damaged_vocabulary_is_refused_in_one_line(tmp_path, damage, complaint):
    path = tmp_path / "v.tiktoken"
    path.write_bytes(b"\n".join(damage(build_vocabulary().splitlines())))
    with pytest.raises(ValueError, match=complaint) as error:
        load_tokenizer(path)
    assert str(path) in str(error.value) and "\n" not in str(error.value)


def test_a_missing_vocabulary_is_named(tmp_path):
    with pytest.raises(ValueError, match="nowhere.tiktoken.*No such file"):
        load_tokenizer(tmp_path / "nowhere.tiktoken")


# ---------------------------------------------------------------------------------- protocol


@pytest.mark.parametrize("spec", SPECS)
@pytest.mark.parametrize("split", ["train", "eval"])
def test_reset_is_pure_and_a_problem_is_plain_data(spec, split):
    task, again = make_task(spec, seed=3), pickle.loads(pickle.dumps(make_task(spec, seed=3)))
    problems = [task.reset(i, split) for i in range(20)]
    assert problems == [again.reset(i, split) for i in reversed(range(20))][::-1]
    assert json.loads(json.dumps(problems)) == problems
    other = [make_task(spec, seed=4).reset(i, split) for i in range(20)]
    assert (other == problems) == (split == "eval"), "the seed must move training prompts only"


@pytest.mark.parametrize(
    "spec, problem",
    [
        ("guess", {"prompt": "guess", "secret": 2}),
        ("reverse", {"prompt": "2454 reverse", "answer": "4542"}),
        ("sort:7", {"prompt": "4000081 sort", "answer": "0000148"}),
        ("sum", {"prompt": "6+1=", "answer": "67"}),
        ("recall:16", {"prompt": " 23=29; 22=15;? 23=", "answer": "29"}),
    ],
)
def test_problems_stay_the_same_from_release_to_release(spec, problem):
    """The prompt cursor of an old checkpoint counts on it: change these lines knowingly."""
    assert make_task(spec).reset(100, "train") == problem


@pytest.mark.parametrize("spec", SPECS)
def test_every_episode_fits_into_the_sizes_that_the_task_states(spec):
    task = make_task(spec)
    assert task.name == spec and task.eval_size >= 16 and not task.beside
    longest = 0
    for index in range(150):
        for split in ("train", "eval"):
            problem = task.reset(index, split)
            total = len(encode(problem["prompt"]))
            assert 1 <= total <= task.max_prompt_tokens
            answers = reward.solve(problem)
            assert len(answers) <= task.max_turns
            for turn in range(1, len(answers) + 1):
                ids = encode(answers[turn - 1]) + [END] * bool(task.stop)
                assert len(ids) <= task.turn_tokens and set(ids) <= set(task.alphabet)
                step = task.step(problem, answers[:turn])
                assert step.done == (turn == len(answers)) == (step.observation is None)
                said = encode(step.observation or "")
                assert len(said) <= task.observation_tokens
                total += len(ids) + len(said)
            assert total <= task.context
            longest = max(longest, total)
    assert spec.startswith("sum") or longest == task.context - 2 * (spec == "guess")


@pytest.mark.parametrize("spec", ["reverse:2", "sort:2", "reverse:3", "sort", "sum:2", "sum"])
def test_held_out_prompts_never_appear_in_training(spec):
    task = make_task(spec)
    train = {task.reset(i, "train")["prompt"] for i in range(3000)}
    held = {task.reset(i, "eval")["prompt"] for i in range(300)}
    assert len(held) >= 5 and not train & held
    if spec[-2:] == ":2":  # all 100 prompts have been seen, so the split is complete
        assert len(train) + len(held) == 100 and 5 <= len(held) <= 20


# ---------------------------------------------------------------------------------- the tasks


def test_guess_by_binary_search_is_the_optimum():
    task = make_task("guess")
    turns = []
    for index in range(task.eval_size):
        problem = task.reset(index, "eval")
        assert problem["secret"] == index
        low, high, answers, step = 0, 15, [], Step(None, 0.0, False)
        while not step.done:  # a player that sees the replies only
            answers.append(f" {(low + high) // 2}")
            step = task.step(problem, answers)
            if step.observation == "<":
                high = (low + high) // 2 - 1
            else:
                low = (low + high) // 2 + 1
        assert answers == reward.solve(problem)
        assert step.reward == pytest.approx(1 - 0.1 * len(answers))
        assert verify(task, problem, answers).reward == step.reward
        turns.append(len(answers))
    assert np.mean(turns) == 3.375


def test_guess_replies_and_turns():
    task, problem = make_task("guess"), {"prompt": "guess", "secret": 9}
    assert task.alphabet == tuple(encode(f" {n}")[0] for n in range(16))
    assert (task.turn_tokens, task.max_turns, task.stop) == (1, 6, frozenset())
    assert task.step(problem, [" 12"]) == Step("<", 0.0, False)
    assert task.step(problem, [" 12", " 8"]) == Step(">", 0.0, False)
    assert task.step(problem, ["9"]) == Step(None, 0.9, True)
    for nonsense in ["", " 16", "-1", " 09", "nine", " 9 ", "٩", "\x00", "9" * 10**6]:
        assert task.step(problem, [" 1", nonsense]) == Step("?", 0.0, False)
    assert task.step(problem, ["?"] * 5 + [" 9"]) == Step(None, 1 - 0.6, True)
    assert task.step(problem, [" 1"] * 6) == Step(None, 0.0, True)


def test_guess_training_is_balanced_and_shuffled():
    task = make_task("guess")
    secrets = [task.reset(i, "train")["secret"] for i in range(320)]
    blocks = [tuple(secrets[i : i + 16]) for i in range(0, 320, 16)]
    assert all(sorted(block) == list(range(16)) for block in blocks)
    assert len(set(blocks)) == 20


@pytest.mark.parametrize("spec", ["reverse", "reverse:6", "sort", "sort:64", "sum", "sum:1024"])
def test_digit_tasks_ask_what_they_say(spec):
    task = make_task(spec)
    for index in range(30):
        problem = task.reset(index, "train")
        prompt, answer = problem["prompt"], problem["answer"]
        if spec.startswith("sum"):
            total, totals = 0, ""
            for term in prompt.removesuffix("=").split("+"):
                total = (total + int(term)) % 10
                totals += str(total)
            assert answer == totals
        else:
            digits, word = prompt.split()
            assert word == spec.partition(":")[0]
            assert len(digits) == int(spec.partition(":")[2] or 4)
            assert answer == (digits[::-1] if word == "reverse" else "".join(sorted(digits)))


@pytest.mark.parametrize("tokens", [16, 17, 100, 256, 502, 503, 507, 508, 4096, 16384])
def test_recall_fills_its_length_and_asks_for_a_pair_it_has(tokens):
    task = make_task(f"recall:{tokens}")
    asked_at = []
    for index in range(4):
        problem = task.reset(index, "train")
        length = len(encode(problem["prompt"]))
        assert length == task.max_prompt_tokens and tokens - 6 < length <= tokens
        table, _, question = problem["prompt"].partition("?")
        pairs = [pair.split("=") for pair in table.split(";")[:-1]]
        keys = [key for key, _ in pairs]
        assert len(set(keys)) == len(keys) >= 2, "a key that appears twice has two answers"
        assert dict(pairs)[question.removesuffix("=")] == problem["answer"]
        asked_at.append(keys.index(question.removesuffix("=")) / len(keys))
    assert len(set(asked_at)) > 1


@pytest.mark.parametrize(
    "answer, expected, value",
    [
        ("4301", "4301", 1.0),
        ("4310", "4301", 0.5),
        ("43", "4301", 0.5),
        ("43014301", "4301", 0.5),
        ("", "4301", 0.0),
        ("1034", "4301", 0.0),
        ("x", "4301", 0.0),
    ],
)
def test_reward_per_digit(answer, expected, value):
    step = make_task("reverse").step({"prompt": "1034 reverse", "answer": expected}, [answer])
    assert step == Step(None, value, True)


def test_sum_has_a_heavy_tail_of_response_lengths():
    task = make_task("sum")
    lengths = [len(task.reset(i, "train")["answer"]) + 1 for i in range(20_000)]
    assert np.percentile(lengths, 99) / np.median(lengths) >= 10  # asked for: 8
    assert 90 <= max(lengths) <= 97 and min(lengths) == 3
    held = [len(task.reset(i, "eval")["answer"]) + 1 for i in range(1000)]
    assert abs(np.mean(held) - np.mean(lengths)) < 1.0, "held-out sums have another distribution"


# ---------------------------------------------------------------------------------- jsonl


def write_jsonl(path: Path, rows: list) -> str:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def test_jsonl_splits_without_overlap_and_shows_every_line_once_per_epoch(tmp_path):
    rows = [{"prompt": f"q{i % 40}", "answer": f"a{i}", "note": "ignored"} for i in range(50)]
    task = make_task("jsonl:" + write_jsonl(tmp_path / "d.jsonl", rows))
    assert task.alphabet is None and task.eval_size == 5  # q9 and its copy, q19, q29, q39
    held = [task.reset(i, "eval") for i in range(5)]
    assert {p["prompt"] for p in held} == {"q9", "q19", "q29", "q39"}
    epochs = [[task.reset(i, "train")["answer"] for i in range(e, e + 45)] for e in (0, 45)]
    assert sorted(epochs[0]) == sorted(epochs[1]) and epochs[0] != epochs[1]
    assert set(epochs[0]) | {p["answer"] for p in held} == {row["answer"] for row in rows}
    assert len(set(epochs[0])) == 45
    task.reset(0, "eval")["answer"] = "spoilt by the caller"
    assert task.reset(0, "eval") == {"prompt": "q9", "answer": "a9"}
    clone = pickle.loads(pickle.dumps(task))
    assert clone.reset(7, "train") == task.reset(7, "train")


def test_jsonl_sizes_verifiers_and_blank_lines(tmp_path):
    path = tmp_path / "with: colon.jsonl"
    path.write_bytes(
        b'\xef\xbb\xbf{"prompt": "1+1=", "answer": " 2 "}\r\n\n  \n{"prompt":"z","answer":"12"}'
    )
    exact = make_task(f"jsonl:{path}")
    assert exact.eval_size == 2, "with fewer than ten prompts the evaluation is on all lines"
    assert exact.max_prompt_tokens == 4 and exact.turn_tokens == len(encode(" 2 ")) + 1
    problem = {"prompt": "1+1=", "answer": " 2 "}
    assert exact.reset(0, "eval") == problem
    assert exact.step(problem, ["\n2"]).reward == 1 and exact.step(problem, ["2.0"]).reward == 0
    numeric = make_task(f"jsonl:{path}:numeric:50")
    assert numeric.turn_tokens == 50 and numeric.context == 54
    assert numeric.step(problem, ["I say 3, no: 4/2."]).reward == 1
    assert numeric.step(problem, ["2, or 3"]).reward == 0
    assert numeric.step({"prompt": "p", "answer": "two"}, ["two"]).reward == 0, "no number at all"
    assert make_task(f"jsonl:{path}:exact").step(problem, ["4/2"]).reward == 0
    assert make_task(f"jsonl:{path}:9").turn_tokens == 9


@pytest.mark.parametrize(
    "line, complaint",
    [
        ("{", "not valid JSON"),
        ("[" * 100_000, "not valid JSON"),
        ("1" * 5000, "not valid JSON"),
        ("\udcff", "not valid JSON"),
        ("[1]", "'prompt' is a string"),
        ("null", "'prompt' is a string"),
        ('{"answer": "2"}', "'prompt' is a string"),
        ('{"prompt": "p"}', "'answer' is a string"),
        ('{"prompt": "p", "answer": 2}', "'answer' is a string"),
        ('{"prompt": "p", "answer": " "}', "'answer' is a string that is not empty"),
        ('{"prompt": "", "answer": "2"}', "'prompt' is a string that is not empty"),
        ('{"prompt": "p", "answer": "two"}', "needs a number in 'answer'"),
    ],
)
def test_a_malformed_line_is_named_by_its_number(tmp_path, line, complaint):
    path = tmp_path / "d.jsonl"
    text = '{"prompt": "p", "answer": "1"}\n\n' + line + '\n{"prompt": "q", "answer": "3"}\n'
    path.write_bytes(text.encode("utf-8", "surrogateescape"))
    with pytest.raises(ValueError) as error:
        make_task(f"jsonl:{path}:numeric")
    message = str(error.value)
    assert f"{str(path)!r}, line 3: " in message and complaint in message
    assert "\n" not in message and len(message) < 300


@pytest.mark.parametrize("content", [None, b"", b"\n \n\n"])
def test_a_missing_or_empty_jsonl_file_is_refused(tmp_path, content):
    path = tmp_path / "d.jsonl"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(
        ValueError, match="No such file" if content is None else "has none"
    ) as error:
        make_task(f"jsonl:{path}")
    assert str(path) in str(error.value) and "\n" not in str(error.value)
    with pytest.raises(ValueError, match="Is a directory"):
        make_task(f"jsonl:{tmp_path}")
    with pytest.raises(ValueError, match="cannot read 'a.x00b'"):
        make_task("jsonl:a\x00b")


@pytest.mark.parametrize(
    "text, value",
    [
        ("the answer is 42.", 42),
        ("#### 1,234,567.50", Fraction(2469135, 2)),
        ("x = -3", -3),
        ("x = \u22123", -3),
        ("x=+.5!", Fraction(1, 2)),
        ("first 5, then 3/4", Fraction(3, 4)),
        ("3.5/7", Fraction(1, 2)),
        ("5-3", 3),
        ("$12, 7%", 7),
        ("(3,4)", 4),
        ("12kg", 12),
        ("0" * 60 + "7", 7),
        ("7 " + "x" * 900, 7),
        ("9" * 64, int("9" * 64)),
        # no number at all
        ("", None),
        ("none", None),
        ("1/0", None),
        ("9" * 65, None),
        ("1e5", None),
        ("1e999999999", None),
        ("2.5E-999999999", None),
        ("1,000e9", None),
        ("2026/01/02", None),
        ("1.2.3", None),
        ("x7", None),
        ("٣", None),
        ("44**19**35", 35),
        ("7 " + "x" * 5000, None),
    ],
)
def test_last_number(text, value):
    assert last_number(text) == value


# ---------------------------------------------------------------------------------- hostile text

HOSTILE = [
    "1e999999999",
    "9**9**9**9",
    "44**19**35",
    "0x" + "f" * 10**6,
    "9" * 10**6,
    "1," + "234," * 250_000 + "567e5",
    "1/" * 500_000,
    "1." * 500_000,
    "-" * 10**6,
    "(" * 10**6,
    "[" * 10**6 + "]" * 10**6,
    '{"a":' * 10**5,
    "a" * 10**6,
    " " * 10**6 + "1",
    "\x00\x01\x07\x1b[2J\r\n\x7f",
    "\u202e\u200b\ufeff\ud800\U0010ffff",
    "<|end|>",
    "<|pad|><|end|>4301<|end|>",
    "__import__('os').abort()",
    "%s%n{0.__class__}",
    "nan",
    "inf",
    "-0",
    "",
]


def test_hostile_answers_change_nothing_but_the_reward(tmp_path):
    path = write_jsonl(tmp_path / "d.jsonl", [{"prompt": "p", "answer": "35.5"}])
    tasks = [make_task(spec) for spec in [*SPECS, f"jsonl:{path}", f"jsonl:{path}:numeric"]]
    start = time.perf_counter()
    for task in tasks:
        problem = task.reset(0, "train")
        before = json.dumps(problem)
        for text in HOSTILE:
            verdict = verify(task, problem, [text], seconds=5)
            assert verdict.error is None and 0 <= verdict.reward < 0.5, (task.name, text[:30])
        assert json.dumps(problem) == before
    assert time.perf_counter() - start < 2


def test_special_tokens_written_as_text_do_not_end_an_answer():
    task = make_task("reverse")
    tokens = np.array(encode("1034 reverse") + encode("4301<|end|>"), dtype=np.int32)
    assert END not in tokens
    assert reward.split_answers(task, tokens, [(5, len(tokens))]) == ["4301<|end|>"]


# ---------------------------------------------------------------------------------- verification


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


def failing_step(problem, answers):
    if answers[-1] == "raise":
        raise RuntimeError("several\nlines " + "x" * 1000)
    if answers[-1] == "recurse":
        return failing_step(problem, answers + ["recurse"])
    if answers[-1] == "sleep":
        time.sleep(30)
    while answers[-1] == "spin":
        with contextlib.suppress(Exception):
            sum(range(1000))
    if answers[-1] == "bare":
        with contextlib.suppress(BaseException):
            time.sleep(30)
        time.sleep(30)
    return {"fine": Step(None, 1.0, True), "nan": Step(None, float("nan"), True)}.get(answers[-1])


@pytest.mark.parametrize(
    "answer, error",
    [
        ("fine", None),
        ("raise", "verifier_error: RuntimeError: several lines xxx"),
        ("recurse", "verifier_error: RecursionError: "),
        ("nan", "verifier_error: ValueError: the reward nan of turn 1 is not finite"),
        ("something else", "verifier_error: TypeError: "),
        ("sleep", "verifier_timeout"),
        ("spin", "verifier_timeout"),
        ("bare", "verifier_timeout"),
    ],
)
def test_a_failing_verifier_costs_its_sample_only(answer, error):
    task = replace(make_task("reverse"), step=failing_step)
    start = time.perf_counter()
    verdicts = [verify(task, {}, [said], 0.1) for said in ("fine", answer, "fine")]
    assert time.perf_counter() - start < 2
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
    with pytest.raises(ValueError, match="token id -1"):
        reward.split_answers(jsonl, np.array([4, -1]), [(0, 2)])


# ---------------------------------------------------------------------------------- bad specs


@pytest.mark.parametrize(
    "spec, allowed",
    [
        ("", "allowed is one of guess, reverse[:2..64]"),
        ("gues", "jsonl:PATH[:exact|numeric][:TOKENS 1..16384]"),
        ("guess:3", "allowed is one of guess,"),
        ("a\nb", "recall[:16..16384]"),
        ("reverse:1", "reverse:N with N in 2..64"),
        ("reverse:65", "2..64"),
        ("reverse:", "2..64"),
        ("sort:-4", "2..64"),
        ("sort:4.0", "2..64"),
        ("sort:٤", "2..64"),
        ("sum:1e3", "2..1024"),
        ("sum:1025", "2..1024"),
        ("recall:15", "16..16384"),
        ("recall:99999999999999999999", "16..16384"),
        ("jsonl", "jsonl:PATH"),
        ("jsonl::numeric", "jsonl:PATH"),
        ("jsonl:x.jsonl:0", "TOKENS 1..16384"),
        ("jsonl:x.jsonl:numeric:16385", "TOKENS 1..16384"),
        ("jsonl:x.jsonl:numerc", "x.jsonl:numerc"),
    ],
)
def test_bad_specs_are_named_with_what_is_allowed(spec, allowed):
    with pytest.raises(ValueError) as error:
        make_task(spec)
    message = str(error.value)
    assert allowed in message and "\n" not in message
    assert repr(spec) in message or spec.startswith("jsonl:")


def test_bad_seed_and_split_are_refused():
    with pytest.raises(ValueError, match="seed -1: allowed is 0 or more"):
        make_task("guess", seed=-1)
    for spec in ("guess", "reverse"):
        with pytest.raises(ValueError):
            make_task(spec).reset(0, "test")


def test_the_sample_episodes(capsys):
    for spec in SPECS:
        reward.show_episode(make_task(spec))
        shown = capsys.readouterr().out
        assert spec in shown and "reward" in shown and max(map(len, shown.splitlines())) < 200


def test_the_command_line_refuses_in_one_line():
    command = [sys.executable, reward.__file__, "sum:3", "nonsense"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode == 2 and "reward 1.00" in done.stdout
    assert done.stderr.count("\n") == 1 and "'nonsense'" in done.stderr
