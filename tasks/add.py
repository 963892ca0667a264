"""add.py: sums for models that speak: add:2 has two numbers of two digits (1 to 9 digits).

"What is 38 + 57? Answer with the number only." -> "95"
"""

from functools import partial

from reward import Step, Task
from tasks.numbers import numeric
from tasks.problems import drawn, whole_number

FORM = "What is {} + {}? Answer with the number only."


def propose(digits, random):
    """(prompt, answer): two numbers of so many digits, and their sum."""
    a, b = random.integers(10 ** (digits - 1), 10**digits, size=2).tolist()
    return FORM.format(a, b), str(a + b)


def step(problem, answers):
    """1 when the answer means the right number (tasks/numbers.py)."""
    return Step(None, numeric(answers[-1], problem["answer"]), True)


def make(argument: str, seed: int, tokenizer) -> Task:
    """`argument` is how many digits the numbers have."""
    digits = whole_number(argument or "2", 1, 9)
    return Task(
        reset=drawn(partial(propose, digits), "add", seed),
        step=step,
        alphabet=None,
        # a token a digit is the most
        max_prompt_tokens=len(tokenizer.encode(FORM.format("", ""))) + 2 * digits + 2,
        turn_tokens=12,
        eval_size=128,
    )
