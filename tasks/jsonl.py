r"""jsonl.py: your own lines {"prompt": "...", "answer": "..."}; "question" may stand for "prompt".

    jsonl:PATH[:exact|numeric[:parsable]|similar][:any][:TOKENS]

exact      reward 1 for the answer of the line, 0 for anything else; the default
numeric    reward 1 when an answer means the same number as the line. An answer means the first
           number behind its last "####" or "\boxed{" (up to the end of that line of text), or, if
           it has neither, its last number.
           Commas of thousands and "$" do not count, 1/2 is 0.5. Of a long answer the end is read
parsable   reward 0.1, and not 0, for a wrong number that stands behind "####" or "\boxed{"
similar    partial credit, 1 for the right answer and 0 for none: see `similarity`. What a model
           with random weights never gets right it can still learn so
any        the policy may emit every token; without it, those of the answers and the end
TOKENS     the most tokens of an answer, 1 to 16384; without it, as many as the longest one has.
           Give more, and `any`, to a policy that is to think aloud

So files in the form of GSM8K, {"question": "...", "answer": "... 24/2=<<24/2=12>>12\n#### 12"}, are
taken as they are:

    python train_async.py --task jsonl:train.jsonl:numeric:parsable:any:2048

Every tenth different prompt is held out, with all its copies. With fewer than ten there is nothing
to spare, and the evaluation is on the training lines.
"""

import json
import re
from difflib import SequenceMatcher
from fractions import Fraction
from functools import partial
from pathlib import Path

from reward import Step, Task, TaskError
from runtime.folder import open_plain
from tasks.problems import in_turn, whole_number

# A number is not preceded by a letter, digit, point, slash or exponent, nor followed by more of
# these: "1e999999999" and "2026/01/02" are no numbers, rather than the digits they end with.
NUMBER = re.compile(
    r"(?<![\w./])(?<![\d.][eE][-+])[-+]?(?:\\?\$)?(?:\d{1,3}(?:,\d{3})+|\d+|(?=\.\d))(?:\.\d+)?"
    r"(?:/\d+(?:\.\d+)?)?(?![.,/]?\d|[eE][-+]?\d)",
    re.ASCII,
)
USAGE = "jsonl:PATH[:exact|numeric[:parsable]|similar][:any][:TOKENS 1..16384]"
NUMBER_CHARACTERS = 64  # a longer number is wrong, whatever it says
CHARACTERS = 1024  # of an answer that are looked at, so that the work is bounded


def last_number(text, place=-1):
    """The last number in a text: integer, decimal or fraction, with or without thousands commas.

    None if there is none, if it is longer than NUMBER_CHARACTERS, or divided by zero. place: 0 for
    the first one.
    """
    text = text[-CHARACTERS:].replace("\u2212", "-")  # typographic minus; fractions in TeX:
    found = NUMBER.findall(re.sub(r"\\[dt]?frac\{(\d+)\}\{(\d+)\}", r"\1/\2", text))
    if not found or len(found[place]) > NUMBER_CHARACTERS:
        return None
    above, _, below = re.sub(r"[,$\\]", "", found[place]).partition("/")
    divisor = Fraction(below or 1)
    return Fraction(above) / divisor if divisor else None


def stated_number(text):
    r"""The first number behind the last "####" (GSM8K) or "\boxed{" (MATH), in the same line; None
    if there is none."""
    *before, behind = re.split(r"####|\\boxed\{", text[-CHARACTERS:])
    return last_number(behind.partition("\n")[0], 0) if before else None


def similarity(answer, expected):
    """The characters in common, in order, as a share of the longer text: 1 for the same, and
    padding costs. Beyond CHARACTERS nothing is in common, unless the texts are the same."""
    if answer == expected:
        return 1.0
    pair = SequenceMatcher(None, answer[:CHARACTERS], expected[:CHARACTERS], autojunk=False)
    common = sum(block.size for block in pair.get_matching_blocks())
    return common / max(len(answer), len(expected))


def meant_number(text):
    """The number that a text states, or else its last one."""
    stated = stated_number(text)
    return last_number(text) if stated is None else stated


def numeric(answer, expected, parsable=0.0):
    """1 when both texts mean the same number, `parsable` for a wrong number that is stated."""
    number = meant_number(answer)
    right = number is not None and number == meant_number(expected)
    return 1.0 if right else parsable * (stated_number(answer) is not None)


VERIFIERS = {
    "exact": str.__eq__,
    "numeric": numeric,
    "numeric:parsable": partial(numeric, parsable=0.1),
    "similar": similarity,
}


def read_row(line, verifier):
    """The problem in a line; TaskError says what is wrong with it."""
    try:
        row = json.loads(line)
    except (ValueError, RecursionError):  # not UTF-8, not JSON, or nested too deeply
        raise TaskError("not valid JSON") from None
    row = row if isinstance(row, dict) else {}
    problem = {"prompt": row.get("prompt", row.get("question")), "answer": row.get("answer")}
    for key, text in problem.items():
        if not isinstance(text, str) or not text.strip():
            raise TaskError(f"expected an object in which {key!r} is a string that is not empty")
    if "numeric" in verifier and meant_number(problem["answer"]) is None:
        raise TaskError("the verifier numeric needs a number in 'answer'")
    return problem


def read_rows(path, verifier):
    """The problems in a file; TaskError names the line."""
    try:
        with open_plain(Path(path)) as file:  # a device or a pipe may have no end
            lines = file.read().split(b"\n")
    except (OSError, ValueError) as error:  # ValueError: a zero byte in the path
        raise TaskError(f"cannot read {path!r} ({error}); allowed is {USAGE}") from None
    rows = []
    for number, line in enumerate(lines, 1):
        try:
            if line.strip():
                rows.append(read_row(line, verifier))
        except TaskError as error:
            raise TaskError(f"line {number}: {error}") from None
    if not rows:
        raise TaskError('expected lines {"prompt": "...", "answer": "..."}, has none')
    return rows


def reset(splits, seed, index, split):
    """A line of the file."""
    return dict(splits[split][in_turn("jsonl", seed, index, split, len(splits[split]))])


def step(verifier, problem, answers):
    """What the verifier says; white space around an answer does not count."""
    return Step(None, float(verifier(answers[-1].strip(), problem["answer"].strip())), True)


def make(argument: str, seed: int, tokenizer) -> Task:
    """`argument` is PATH[:exact|numeric[:parsable]|similar][:any][:TOKENS]."""
    path, verifier, everything, tokens = re.fullmatch(
        r"(.*?)(?::(exact|numeric(?::parsable)?|similar))?(?::(any))?(?::([0-9]+))?",
        argument,
        re.DOTALL,
    ).groups()
    verifier = verifier or "exact"
    most = whole_number(tokens, 1, 16384) if tokens else 0
    rows = read_rows(path, verifier)
    prompts = list(dict.fromkeys(row["prompt"] for row in rows))  # different ones, in order
    held_out = set(prompts[9::10])
    splits = {"train": [row for row in rows if row["prompt"] not in held_out]}
    splits["eval"] = [row for row in rows if row["prompt"] in held_out] or rows
    answers = [tokenizer.encode(row["answer"]) for row in rows]
    return Task(
        reset=partial(reset, splits, seed),
        step=partial(step, VERIFIERS[verifier]),
        alphabet=None if everything else (*sorted(set().union(*answers)), tokenizer.end),
        max_prompt_tokens=max(len(tokenizer.encode(prompt)) for prompt in prompts),
        turn_tokens=most or max(map(len, answers)) + 1,
        eval_size=min(256, len(splits["eval"])),
    )
