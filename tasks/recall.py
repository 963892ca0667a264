"""recall.py: find a value in a table: recall:256 is a prompt of at most 256 tokens (16 to 16384).

" 37=51; 12=90;? 37=" -> "51". A task for long contexts and sparse attention: all but one pair is
of no use, and which one is asked at the very end.
"""

from functools import partial

from reward import Task
from tasks.digits import step
from tasks.problems import drawn, single_tokens, whole_number


def shape_of(tokens):
    """(pairs, tokens of a key): pairs "key=51;" and the question "?key=" fill up `tokens`."""
    width = 1 if (tokens - 3) // 5 <= 100 else 2  # a key of one number is easier to find
    return (tokens - width - 2) // (width + 4), width


def propose(tokens, random):
    """(prompt, answer): a table in which no key appears twice, and a question about one pair."""
    pairs, width = shape_of(tokens)
    keys = random.choice(100**width, size=pairs, replace=False).tolist()
    values = random.integers(100, size=pairs).tolist()
    asked = int(random.integers(pairs))
    names, table = [], ""
    for key, value in zip(keys, values, strict=True):
        name = f" {key}" if width == 1 else f" {key // 100} {key % 100}"
        names.append(name)
        table += f"{name}={value:02d};"
    return f"{table}?{names[asked]}=", f"{values[asked]:02d}"


def make(argument: str, seed: int, tokenizer) -> Task:
    """`argument` is the length of a prompt in tokens."""
    tokens = whole_number(argument or "256", 16, 16384)
    pairs, width = shape_of(tokens)
    return Task(
        reset=drawn(partial(propose, tokens), "recall", seed),
        step=step,  # the share of the two digits that are right
        alphabet=(*single_tokens(tokenizer, "0123456789"), tokenizer.end),
        max_prompt_tokens=pairs * (width + 4) + width + 2,
        turn_tokens=3,
        eval_size=64,
    )
