"""digits.py: three tasks on rows of digits, with one answer and reward for each right digit.

reverse:4    "1034 reverse" -> "4301"; 2 to 64 digits
sort:4       "1034 sort" -> "0134"; 2 to 64 digits
sum:96       "3+5+9+2=" -> "3879", the running totals modulo 10; the number of terms has a
             heavy tail, cut at the argument (2 to 1024)
"""

from functools import partial

from reward import Step, Task
from tasks.problems import drawn, single_tokens, whole_number


def step(problem, answers):
    """The share of digits that are right.

    Partial credit makes this learnable from random weights: all or nothing would be nothing for
    whole groups. Dividing by the longer length makes padding an answer useless.
    """
    answer = answers[-1]
    expected = problem["answer"]
    matches = sum(a == b for a, b in zip(answer, expected, strict=False))
    return Step(None, matches / max(len(answer), len(expected)), True)


def as_text(digits):
    """Digits as one string."""
    return "".join(map(str, digits))


def propose_reverse(size, random):
    """(prompt, answer): a row of `size` digits, and the same backwards."""
    row = as_text(random.integers(10, size=size).tolist())
    return f"{row} reverse", row[::-1]


def propose_sort(size, random):
    """(prompt, answer): a row of `size` digits, and the same in order."""
    row = random.integers(10, size=size).tolist()
    return f"{as_text(row)} sort", as_text(sorted(row))


def propose_sum(size, random):
    """(prompt, answer): up to `size` terms, and their running totals.

    Lengths follow a Pareto law with exponent 1.3, from 2 up: half of the replies have at most 4
    tokens, one in a hundred has 46 or more. Such a tail is what asynchrony is for.
    """
    uniform = random.uniform((2 / (size + 1)) ** 1.3, 1.0)
    terms = min(size, int(2 * uniform ** (-1 / 1.3)))
    numbers = random.integers(10, size=terms)
    totals = numbers.cumsum() % 10
    prompt = "+".join(map(str, numbers.tolist())) + "="
    return prompt, as_text(totals.tolist())


KINDS = {  # how a problem is made, default size, largest size
    "reverse": (propose_reverse, 4, 64),
    "sort": (propose_sort, 4, 64),
    "sum": (propose_sum, 96, 1024),
}


def make(argument: str, seed: int, tokenizer) -> Task:
    """`argument` is "reverse", "reverse:6", "sort:6", "sum:8" and so on."""
    kind, _, size = argument.partition(":")
    propose, default, most = KINDS[kind]
    size = whole_number(size, 2, most) if size else default
    return Task(
        reset=drawn(partial(propose, size), kind, seed),
        step=step,
        alphabet=(*single_tokens(tokenizer, "0123456789"), tokenizer.end),
        max_prompt_tokens=2 * size if kind == "sum" else size + len(tokenizer.encode(f" {kind}")),
        turn_tokens=size + 1,
    )
