"""The tasks by behaviour: the protocol, problems, verifiers, own tasks, and what is refused."""

import gzip
import json
import subprocess
import sys
from fractions import Fraction
from pathlib import Path

import numpy as np
import pytest
from judge import verify

import bench
import reward
from reward import Step, make_task, problem_of
from runtime.tokenizer import END, PAD, own_tokenizer
from tasks import limits
from tasks.numbers import meant_number, only_number, stated_number

encode = own_tokenizer().encode
SPECS = ["guess", "reverse", "reverse:2", "sort", "sort:7", "sum", "sum:5", "recall", "recall:16"]


# ---------------------------------------------------------------------------------- protocol


@pytest.mark.parametrize("spec", SPECS)
@pytest.mark.parametrize("split", ["train", "eval"])
def test_reset_is_pure_and_a_problem_is_plain_data(spec, split):
    task, again = make_task(spec, seed=3), make_task(spec, seed=3)  # as in another process
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
    assert task.name == spec and task.eval_size >= 16 and not task.outside
    longest = 0
    for index in range(150):
        for split in ("train", "eval"):
            problem = task.reset(index, split)
            total = len(encode(problem["prompt"]))
            assert 1 <= total <= task.max_prompt_tokens
            answers = task.solve(problem)
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
        assert answers == task.solve(problem)
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
    lengths = [len(task.reset(i, "train")["answer"]) + 1 for i in range(5000)]
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
    assert task.eval_size == 5  # q9 and its copy, q19, q29, q39
    held = [task.reset(i, "eval") for i in range(5)]
    assert {p["prompt"] for p in held} == {"q9", "q19", "q29", "q39"}
    epochs = [[task.reset(i, "train")["answer"] for i in range(e, e + 45)] for e in (0, 45)]
    assert sorted(epochs[0]) == sorted(epochs[1]) and epochs[0] != epochs[1]
    assert set(epochs[0]) | {p["answer"] for p in held} == {row["answer"] for row in rows}
    assert len(set(epochs[0])) == 45
    task.reset(0, "eval")["answer"] = "spoilt by the caller"
    assert task.reset(0, "eval") == {"prompt": "q9", "answer": "a9"}


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
    path.write_bytes(b'\xef\xbb\xbf[{"prompt": "1+1=", "answer": " 2 "}]')
    assert make_task(f"jsonl:{path}").reset(0, "eval") == problem


@pytest.mark.parametrize(
    "answer, expected, value",
    [
        ("12", "12", 1.0),
        (" 12\n", "12 ", 1.0),  # white space around it does not count
        ("", "12", 0.0),
        ("1", "12", 0.5),
        ("112", "12", 2 / 3),
        ("0123456789" * 100, "12", 0.002),
        ("\ud800", "12", 0.0),
        ("x" * 3000, "x" * 3000, 1.0),
        ("12" * 10**6, "12", 1e-6),
    ],
)
def test_similar_gives_partial_credit_and_padding_costs(tmp_path, answer, expected, value):
    path = write_jsonl(tmp_path / "d.jsonl", [{"prompt": "7+5=", "answer": expected}])
    task = make_task(f"jsonl:{path}:similar")
    step = task.step(task.reset(0, "train"), [answer])
    assert step == Step(None, pytest.approx(value), True)


def test_jsonl_takes_its_alphabet_from_the_answers(tmp_path):
    rows = [{"prompt": f"{a}+{b}=", "answer": str(a + b)} for a in range(9) for b in range(9)]
    path = write_jsonl(tmp_path / "d.jsonl", rows)
    digits = (*sorted(encode("0123456789")), END)
    for fields in ("", ":exact", ":similar", ":similar:9"):
        assert make_task(f"jsonl:{path}{fields}").alphabet == digits
    for fields in (":any", ":numeric:any", ":similar:any:9", ":any:9"):
        task = make_task(f"jsonl:{path}{fields}")
        assert task.alphabet is None and list(reward.alphabet_of(task)) == list(range(PAD))
    assert make_task(f"jsonl:{path}:similar:any:9").turn_tokens == 9
    assert verify(task, rows[0], ["0"]).reward == 1


@pytest.mark.parametrize(
    "line, complaint",
    [
        ("{", "not valid JSON"),
        ("[" * 100_000, "not valid JSON"),
        ("[1]", 'expected {"prompt": "...", "answer": "..."}'),
        ('{"prompt": "p"}', "expected {"),
        ('{"prompt": "p", "answer": " "}', "expected {"),
        ('{"prompt": "p", "answer": true}', "expected {"),
        ('{"prompt": [{"role": "system", "content": "s"}], "answer": "1"}', "tasks/jsonl.py"),
        ('{"prompt": "p", "answer": "two"}', "the answer 'two' cannot earn 1 by numeric"),
        ('{"question": "p", "answer": "####"}', "the answer '####' cannot earn 1"),
        ('{"question": "p", "answer": "[2, 5)"}', "the answer '[2, 5)' cannot earn 1"),
        ('{"prompt": "half \\ud83d", "answer": "1"}', "surrogates not allowed"),
        ("\udcff", "not UTF-8"),
    ],
)
def test_a_malformed_line_is_named_by_its_number(tmp_path, line, complaint):
    path = tmp_path / "d.jsonl"
    text = '{"prompt": "p", "answer": "1"}\n\n' + line + '\n{"prompt": "q", "answer": "3"}\n'
    path.write_bytes(text.encode("utf-8", "surrogateescape"))
    with pytest.raises(ValueError) as error:
        make_task(f"jsonl:{path}:numeric")
    message = str(error.value)
    assert f"{str(path)}:numeric': line 3: " in message and complaint in message
    assert "\n" not in message and len(message) < 300


def test_data_as_people_have_it(tmp_path):
    user, reply = {"role": "user", "content": "q"}, {"role": "assistant", "content": "7"}
    rows = [{"question": "q", "answer": 7}, {"problem": "q", "solution": "7"}]
    rows += [{"prompt": "q", "ground_truth": 7}, {"prompt": [user], "answer": "7"}]
    rows.append({"messages": [user, reply]})
    zero = write_jsonl(tmp_path / "zero.jsonl", [{"prompt": "q", "answer": 0}])
    assert make_task(f"jsonl:{zero}:numeric").reset(0, "eval")["answer"] == "0"
    lines = "\n".join(map(json.dumps, rows)).encode()
    files = {"d.jsonl": lines, "d.json": json.dumps(rows, indent=1).encode()}
    for name, data in (files | {"d.jsonl.gz": gzip.compress(lines)}).items():
        (tmp_path / name).write_bytes(data)
        task = make_task(f"jsonl:{tmp_path / name}:numeric")
        seen = [task.reset(i, "eval") for i in range(5)]
        assert seen == [{"prompt": "q", "answer": "7"}] * 5


def test_letters_with_accents_are_the_same_however_they_are_composed(tmp_path):
    path = write_jsonl(tmp_path / "d.jsonl", [{"prompt": "coffee", "answer": "cafe\u0301"}])
    for verifier in ("exact", "similar"):
        task = make_task(f"jsonl:{path}:{verifier}")
        for said in ("caf\u00e9", "cafe\u0301"):
            assert task.step(task.reset(0, "eval"), [said]).reward == 1


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
    with pytest.raises(ValueError, match="must be a plain file"):
        make_task(f"jsonl:{tmp_path}")
    with pytest.raises(ValueError, match="cannot read 'a.x00b'"):
        make_task("jsonl:a\x00b")


GSM8K = """Natalia sold 48/2 = <<48/2=24>>24 clips in May.
She sold 48+24 = <<48+24=72>>72 clips altogether.
#### 72"""


@pytest.mark.parametrize(
    "text, value",
    [
        ("the answer is 42.", 42),
        ("#### 1,234,567.50", Fraction(2469135, 2)),
        ("x = -3", -3),
        ("x = \u22123", -3),
        ("first 5, then 3/4", Fraction(3, 4)),
        ("3.5/7", Fraction(1, 2)),
        ("5-3", 3),
        ("7 " + "x" * 900, 7),
        ("9" * 64, int("9" * 64)),
        # no number at all
        ("", None),
        ("1/0", None),
        ("9" * 65, None),
        ("1e5", 100_000),
        ("2.5E-999999999", None),
        ("2026/01/02", None),
        ("x7", None),
        ("٣", None),
        ("a loss of -$1,250.50", Fraction(-2501, 2)),
        (r"\(-\$5\)", -5),
        (r"\frac{3}{4}", Fraction(3, 4)),
        (r"-\dfrac{3}{0}", None),
        ("44**19**35", 35),
        ("7 " + "x" * 5000, None),
    ],
)
def test_the_last_number_of_a_text(text, value):
    assert meant_number(text) == value


@pytest.mark.parametrize(
    "text, value",
    [
        (r"\boxed{55{,}000}", 55_000),
        (r"so $55\,000$ of them", 55_000),
        ("1\u202f234\u2009567 or 1\u00a0000", 1000),
        ("1\u202f234\u2009567", 1_234_567),
        (r"\boxed{2\frac{1}{2}}", Fraction(5, 2)),
        (r"x = -2 \frac12", Fraction(-5, 2)),
        (r"\boxed{\frac{-1}{2}}", Fraction(-1, 2)),
        (r"\dfrac{3,000}{2}", 1500),
        ("#### - 5", -5),
        ("7 - 5", 5),
        ("\\boxed{42%}", 42),
        ("４２", 42),
        ("The answer is:\n- 42", 42),
        ("x = \u20115", -5),
        (r"\boxed{10,\!236}", 10_236),
        (r"1 - \frac12", Fraction(1, 2)),
        ("10² is not 102", 102),
        ("#### 3. Conclusion\nThe answer is 42.", 42),
        ("#### Step 2: add\n5*8=40. So the total is **40**.", 40),
        ("#### 42\n" + "It is right. " * 200, 42),
        (r"\boxed{42}" + " It is not 7." * 200, 42),
    ],
)
def test_numbers_as_people_and_models_write_them(text, value):
    assert meant_number(text) == value


@pytest.mark.parametrize(
    "text, value",
    [
        ("72", 72),
        ("$1,234.50", Fraction(2469, 2)),
        ("$.50", Fraction(1, 2)),
        ("10²", None),
        ("- 5", -5),
        ("1.5e3", 1500),
        ("42%", 42),
        (GSM8K, 72),
        (r"So it is $\boxed{2\frac{1}{2}}$.", Fraction(5, 2)),
        ("The answer is 72", None),
        ("#### 72 clips", None),
        (r"\boxed{\frac{\sqrt{3}}{2}}", None),
        (r"\boxed{x^2+3x}", None),
        (r"\boxed{[2, 5)}", None),
        ("10-5", None),
    ],
)
def test_a_right_answer_is_nothing_but_one_number(text, value):
    assert only_number(text) == value


@pytest.mark.parametrize(
    "text, stated, meant",
    [
        (GSM8K, 72, 72),
        (GSM8K + " clips (24 in May)", 72, 72),
        (GSM8K + "\n\nQuestion: 5 more?", 72, 72),
        (GSM8K + " is wrong\n#### 73", 73, 73),
        (GSM8K.partition("####")[0], None, 72),  # no mark: the last number
        ("#### 1,234,567", 1234567, 1234567),
        ("####-$70,000.00", -70000, -70000),
        ("#### \u221218", -18, -18),
        ("#### **$18.50** a day", Fraction(37, 2), Fraction(37, 2)),
        ("#### <<3*4=12>>", 3, 3),  # no number is to stand between
        ("#### none\n5", None, 5),
        ("#### 1/0, or 5", None, 5),
        (r"So $x = \boxed{42}$, for all 3.", 42, 42),
        (r"\boxed{1} and 2, no: \boxed{\$1,000 \text{ for } 2}", 1000, 1000),
        (r"\boxed{\frac{1}{2}}", Fraction(1, 2), Fraction(1, 2)),
        (r"#### 4, that is \boxed{5}", 5, 5),
        ("\\boxed{\n9}", None, 9),
        ("#### 4" + " x" * 520, 4, 4),
        ("#### " * 10**6, None, None),
        ("\\boxed{" * 10**6 + "3", 3, 3),
        ("#### " + "9" * 5000, None, None),
        ("#### " + "1," * 10**6, None, 1),
    ],
)
def test_the_number_that_an_answer_means(text, stated, meant):
    with limits.time_limit(30.0):  # it is linear in the length
        assert (stated_number(text), meant_number(text)) == (stated, meant)


def test_lines_in_the_form_of_gsm8k_are_taken_as_they_are(tmp_path):
    rows = [{"question": f"How many are {i}?", "answer": GSM8K} for i in range(20)]
    path = write_jsonl(tmp_path / "train.jsonl", rows)
    plain = make_task(f"jsonl:{path}:numeric")
    task = make_task(f"jsonl:{path}:numeric:parsable:any:2048")
    assert task.turn_tokens == 2048 and task.alphabet is None and task.eval_size == 2
    problem = task.reset(0, "eval")
    assert problem == {"prompt": "How many are 9?", "answer": GSM8K}
    assert verify(task, problem, task.solve(problem)).reward == 1
    for answer, value in {
        "72": 1.0,
        "#### 72.0": 1.0,
        "#### 71\n72": 0.1,  # what is stated counts
        "#### 71": 0.1,
        r"\boxed{71}": 0.1,
        "71": 0.0,
        "####": 0.0,
        "#### seventy-two": 0.0,
        "": 0.0,
        "72 " * 10**5 + "#### 71": 0.1,
    }.items():
        assert task.step(problem, [answer]) == Step(None, value, True), answer
        assert plain.step(problem, [answer]).reward == (value == 1), answer


# ---------------------------------------------------------------------------------- own tasks

ALPHABET = "(*letters, tokenizer.end)"
OWN = """from reward import Step, Task
from tasks.problems import draw_problem, random_of


def propose(random):
    word = "".join(random.choice(list("abc"), size=4))
    return f"{word} >", word[::-1]


def step(problem, answers):
    hits = [a == b for a, b in zip(answers[-1], problem["answer"])]
    return Step(None, sum(hits) / max(4, len(answers[-1])), True)


def make(argument, seed, tokenizer):
    def reset(index, split):
        return draw_problem(propose, random_of("backwards", seed, index, split), split)

    letters = tokenizer.encode("a") + tokenizer.encode("b") + tokenizer.encode("c")
    return Task(reset, step, (*letters, tokenizer.end), max_prompt_tokens=8, turn_tokens=5)
"""


def own_task(folder: Path, *changes: tuple[str, str], name: str = "mine.py") -> str:
    """A task file as an author would write it, with something changed; returns its path."""
    text = OWN
    for old, new in changes:
        assert old in text, old
        text = text.replace(old, new)
    (folder / name).write_text(text)
    return str(folder / name)


def test_a_task_of_ones_own_needs_no_other_file(tmp_path):
    spec = own_task(tmp_path)
    task, other_process = make_task(spec, seed=3), make_task(spec, seed=3)
    assert task.name == spec
    problems = [task.reset(i, "train") for i in range(50)]
    assert problems == [other_process.reset(i, "train") for i in range(50)]
    held_out = {task.reset(i, "eval")["prompt"] for i in range(50)}
    assert not held_out & {problem["prompt"] for problem in problems}
    right = problems[0]["answer"]
    assert verify(task, problems[0], [right]) == (1.0, (1.0,), None)
    assert verify(task, problems[0], [right[:2]]).reward == 0.5
    assert verify(task, problems[0], ["x" * 40]).reward == 0.0


def test_a_task_may_import_what_lies_beside_it(tmp_path):
    (tmp_path / "lies_beside_it.py").write_text("LONGEST = 5\n")
    change = ("turn_tokens=5", "turn_tokens=__import__('lies_beside_it').LONGEST")
    assert make_task(own_task(tmp_path, change)).turn_tokens == 5


def test_the_path_may_be_relative_and_an_argument_may_follow(tmp_path, monkeypatch):
    sized = ("    def reset", "    global size\n    size = int(argument or 4)\n\n    def reset")
    own_task(tmp_path, ("size=4", "size=size"), sized)
    monkeypatch.chdir(tmp_path)
    for spec, size in (("mine.py", 4), ("mine.py:5", 5), ("./mine.py:6", 6)):
        assert len(make_task(spec).reset(0, "train")["answer"]) == size
    with pytest.raises(ValueError, match="'mine.py:': allowed is one of"):
        make_task("mine.py:")


def test_too_few_different_prompts_to_hold_out_are_named(tmp_path):
    with pytest.raises(ValueError, match="none of 1000 prompts such as 'cccc >' belongs to split"):
        make_task(own_task(tmp_path, ('list("abc")', 'list("c")')))


ROW = '__import__("collections").namedtuple("Row", "a")(1)'  # JSON can, another process cannot


@pytest.mark.parametrize(
    "old, new, complaint",
    [
        ("def step", "def step(:", "SyntaxError: invalid syntax (mine.py, line 10)"),
        ("def make", "def mako", "must define make(argument, seed, tokenizer)"),
        ("def propose", "x = 1 / 0\ndef propose", "ZeroDivisionError: division by zero (mine.py"),
        ("word[::-1]", "wort[::-1]", "NameError: name 'wort' is not defined (mine.py, line 7)"),
        ("return Task(reset", "Task(reset", "make must return a reward.Task, not None"),
        (ALPHABET, "(*letters, 600)", "600): allowed are different ids in 0..510"),
        (ALPHABET, "letters", "stop {510}: must be in the alphabet"),
        ("turn_tokens=5", "turn_tokens=0", "turn_tokens 0: allowed is a whole number from 1 up"),
        ("max_prompt_tokens=8", "max_prompt_tokens=2", "max_prompt_tokens must be 6, is 2"),
        ("return draw", "return None and draw", "reset(0, 'train') returned None, must be a dict"),
        ("return draw", '{"train": 1}[split]\n        return draw', "'eval' (mine.py, line 17)"),
        ("return draw", 'return {"prompt": "a", "b": {1}} or draw', "not JSON serializable"),
        ("return draw", f'return {{"prompt": "a", "b": {ROW}}} or draw', "Can't pickle <class"),
    ],
)  # fmt: skip
def test_the_mistakes_of_its_author_are_shown_in_one_line(tmp_path, old, new, complaint):
    spec = own_task(tmp_path, (old, new))
    with pytest.raises(ValueError) as error:
        make_task(spec)
    message = str(error.value)
    assert message.startswith(f"task {spec!r}: ") and complaint in message
    assert "\n" not in message and len(message) < 500


def test_a_missing_file_and_a_folder_are_named(tmp_path):
    (tmp_path / "folder.py").mkdir()
    for name in ("none.py", "folder.py"):
        with pytest.raises(ValueError, match=name) as error:
            make_task(str(tmp_path / name))
        assert "\n" not in str(error.value)


def test_a_failing_step_is_named_with_its_line(tmp_path):
    changes = ("hits = [", "hits = statistics.mean(len(answers) - 1) if answers[-1] else [")
    task = make_task(own_task(tmp_path, changes, ("from reward", "import statistics\nfrom reward")))
    problem = task.reset(0, "train")
    error = "verifier_error: TypeError: 'int' object is not iterable (mine.py, line 12)"
    assert verify(task, problem, ["a"]).error == error  # not the line in statistics.py
    assert verify(task, problem, [""]).error is None


def test_a_step_that_returns_something_else_is_named(tmp_path):
    task = make_task(own_task(tmp_path, ("return Step(None,", "Step(None,")))
    verdict = verify(task, task.reset(0, "train"), ["a"])
    assert verdict.error == "verifier_error: TypeError: step returned None, must be a reward.Step"


# ---------------------------------------------------------------------------------- bad specs


@pytest.mark.parametrize(
    "spec, allowed",
    [
        ("gues", "jsonl:PATH[:exact|numeric[:parsable]|similar][:any][:TOKENS 1..16384]"),
        ("guess:3", "guess has no argument"),
        ("reverse:1", "'1': allowed is a number in 2..64"),
        ("sort:٤", "2..64"),
        ("sum:1025", "2..1024"),
        ("recall:99999999999999999999", "16..16384"),
        ("jsonl::numeric", "jsonl:PATH"),
        ("jsonl:x.jsonl:0", "1..16384"),
        ("jsonl:x.jsonl:similar:parsable", "cannot read 'x.jsonl:similar:parsable'"),
        ("jsonl:x.jsonl:numerc", "cannot read 'x.jsonl:numerc'"),
        (
            "jsonl:x.jsonl:numerc",
            "jsonl:PATH[:exact|numeric[:parsable]|similar][:any][:TOKENS 1..16384]",
        ),
    ],
)
def test_bad_specs_are_named_with_what_is_allowed(spec, allowed):
    with pytest.raises(ValueError) as error:
        make_task(spec)
    message = str(error.value)
    assert allowed in message and "\n" not in message
    assert repr(spec) in message


def test_bad_seed_and_split_are_refused():
    with pytest.raises(ValueError, match="task 'guess': .*non-negative"):
        make_task("guess", seed=-1)
    for spec in ("guess", "reverse"):
        with pytest.raises(ValueError):
            make_task(spec).reset(0, "test")


def test_the_command_line_refuses_in_one_line():
    outside = Path(__file__).parent / "slow.py:0,no"
    command = [sys.executable, bench.__file__, "episode", "sum:3", outside, "nonsense"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode == 2 and done.stdout.count("done=True") == 2
    assert done.stderr.count("\n") == 1 and "'nonsense'" in done.stderr


def test_the_task_in_the_readme_is_complete(tmp_path):
    """Its twenty lines run as they stand, and a right answer is worth 1."""
    page = (Path(__file__).parent.parent / "README.md").read_text()
    code = page.split("## A task of your own")[1].split("```python\n")[1].split("```")[0]
    path = tmp_path / "backwards.py"
    path.write_text(code)
    task = make_task(str(path))
    for split in ("train", "eval"):
        problem = problem_of(task, 3, split)
        assert verify(task, problem, [problem["answer"]]).reward == 1.0
        assert verify(task, problem, [problem["answer"] * 2]).reward == 0.5
    assert len(code.strip().splitlines()) <= 20
