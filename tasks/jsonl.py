r"""jsonl.py: your own problems: lines {"prompt": "...", "answer": "..."}, or a JSON array of them.

    jsonl:PATH[:exact|numeric[:parsable]|similar][:any][:TOKENS]        PATH may end in .gz

"question" and "problem" may stand for "prompt", "solution" and "ground_truth" for "answer", which
may be a number. A chat may stand for the prompt if it is one turn of the user's; "messages" are
that turn and the answer. What all lines have in common before it is --system.

exact      reward 1 for the answer of the line, 0 for anything else; the default
numeric    reward 1 when an answer means the same number as the line (tasks/numbers.py)
parsable   reward 0.1, and not 0, for a wrong number that stands behind "####" or "\boxed{"
similar    partial credit, 1 for the right answer and 0 for none: see `similarity`. What a model
           with random weights never gets right it can still learn so
any        the policy may emit every token; without it, those of the answers and the end
TOKENS     the most tokens of an answer, 1 to 16384; without it, as many as the longest one has.
           Give more, and `any`, to a policy that is to think aloud

For `numeric` an answer of the file must be nothing but one number, alone or behind a mark. Files in
the form of GSM8K, {"question": "...", "answer": "... 24/2=<<24/2=12>>12\n#### 12"}, are taken as
they are:

    python train_async.py --task jsonl:train.jsonl:numeric:parsable:any:2048

Every tenth different prompt is held out, with all its copies. With fewer than ten there is nothing
to spare, and the evaluation is on the training lines.
"""

import gzip
import json
import re
from difflib import SequenceMatcher
from functools import partial
from pathlib import Path
from unicodedata import normalize

from reward import Step, Task, TaskError
from runtime.folder import open_plain
from tasks.numbers import CHARACTERS, numeric
from tasks.problems import in_turn, whole_number

USAGE = "jsonl:PATH[:exact|numeric[:parsable]|similar][:any][:TOKENS 1..16384]"
NAMES = ("prompt", "question", "problem"), ("answer", "solution", "ground_truth")
FORMS = '{"prompt": "...", "answer": "..."}'


def similarity(answer, expected):
    """The characters in common, in order, as a share of the longer text: 1 for the same, and
    padding costs. Beyond CHARACTERS nothing is in common, unless the texts are the same."""
    if answer == expected:
        return 1.0
    pair = SequenceMatcher(None, answer[:CHARACTERS], expected[:CHARACTERS], autojunk=False)
    common = sum(block.size for block in pair.get_matching_blocks())
    return common / max(len(answer), len(expected))


VERIFIERS = {
    "exact": str.__eq__,
    "numeric": numeric,
    "numeric:parsable": partial(numeric, parsable=0.1),
    "similar": similarity,
}


def read_row(line, verifier, tokenizer):
    """The problem in a line; TaskError or UnicodeError says what is wrong with it."""
    try:
        row = json.loads(line.decode("utf-8-sig"))
    except UnicodeDecodeError:
        raise TaskError("not UTF-8") from None
    except (ValueError, RecursionError):  # RecursionError: nested too deeply
        raise TaskError("not valid JSON") from None
    row = row if isinstance(row, dict) else {}
    prompt, answer = (next((row[x] for x in names if x in row), None) for names in NAMES)
    match row.get("messages", prompt):
        case [{"role": "user", "content": prompt}, {"role": "assistant", "content": answer}]:
            pass
        case [{"role": "user", "content": prompt}]:
            pass
    answer = str(answer) if type(answer) in (int, float) else answer
    for text in (prompt, answer):
        if not isinstance(text, str) or not text.strip():
            raise TaskError(f"expected {FORMS}, see tasks/jsonl.py")
    prompt.encode()  # half a character cannot be
    problem, said = {"prompt": prompt, "answer": answer}, tokenizer.encode(answer)
    said = tokenizer.decode_bytes(said).decode(errors="replace")
    if step(VERIFIERS[verifier], problem, [said]).reward < 1:
        raise TaskError(f"the answer {answer!r:.60} cannot earn 1 by {verifier}")
    return problem


def read_rows(path, verifier, tokenizer):
    """The problems in a file; TaskError names the line."""
    try:
        with open_plain(Path(path)) as file:  # a device or a pipe may have no end
            data = file.read()
        data = gzip.decompress(data) if path.endswith(".gz") else data
        data = data.removeprefix(b"\xef\xbb\xbf")  # of UTF-8, as some editors write it
        lines = data.split(b"\n")
        if data.lstrip()[:1] == b"[":
            lines = [json.dumps(row).encode() for row in json.loads(data)]
    except (OSError, EOFError, ValueError) as error:  # ValueError: a zero byte in the path
        raise TaskError(f"cannot read {path!r} ({error}); allowed is {USAGE}") from None
    rows = []
    for number, line in enumerate(lines, 1):
        try:
            if line.strip():
                rows.append(read_row(line, verifier, tokenizer))
        except (TaskError, UnicodeError) as error:
            raise TaskError(f"line {number}: {error}") from None
    if not rows:
        raise TaskError(f"expected lines {FORMS}, has none")
    return rows


def reset(splits, seed, index, split):
    """A line of the file."""
    return dict(splits[split][in_turn("jsonl", seed, index, split, len(splits[split]))])


def step(verifier, problem, answers):
    """What the verifier says; white space around an answer does not count, nor how its letters with
    accents are composed."""
    texts = (normalize("NFC", text.strip()) for text in (answers[-1], problem["answer"]))
    return Step(None, float(verifier(*texts)), True)


def make(argument: str, seed: int, tokenizer) -> Task:
    """`argument` is PATH[:exact|numeric[:parsable]|similar][:any][:TOKENS]."""
    path, verifier, everything, tokens = re.fullmatch(
        r"(.*?)(?::(exact|numeric(?::parsable)?|similar))?(?::(any))?(?::([0-9]+))?",
        argument,
        re.DOTALL,
    ).groups()
    most = whole_number(tokens, 1, 16384) if tokens else 0
    rows = read_rows(path, verifier or "exact", tokenizer)
    prompts = list(dict.fromkeys(row["prompt"] for row in rows))  # different ones, in order
    held_out = set(prompts[9::10])
    splits = {"train": [row for row in rows if row["prompt"] not in held_out]}
    splits["eval"] = [row for row in rows if row["prompt"] in held_out] or rows
    answers = [tokenizer.encode(row["answer"]) for row in rows]
    return Task(
        reset=partial(reset, splits, seed),
        step=partial(step, VERIFIERS[verifier or "exact"]),
        alphabet=None if everything else (*sorted(set().union(*answers)), tokenizer.end),
        max_prompt_tokens=max(len(tokenizer.encode(prompt)) for prompt in prompts),
        turn_tokens=most or max(map(len, answers)) + 1,
        eval_size=min(256, len(splits["eval"])),
    )
