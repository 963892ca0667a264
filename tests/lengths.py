"""lengths.py: a task to measure speed with, `--task tests/lengths.py:2048`.

Nothing is to be learned. The lengths of answers are log-normal, as those of a model that thinks:
half are below an eighth of the argument, which cuts the longest. A prompt has 64 tokens or less,
and a reward is a coin toss.
"""

import zlib
from functools import partial

from reward import Step, Task
from tasks.problems import random_of, whole_number


def reset(most, seed, index, split):
    """A problem whose answer is of just so many tokens: no token ends it."""
    random = random_of("lengths", seed, index, split)
    length = random.lognormal(mean=0.0, sigma=1.0) * most / 8
    return {"prompt": f"{index:032}", "turn_tokens": int(min(most, length + 1))}


def step(problem, answers):
    """0 or 1, by a checksum of the answer."""
    return Step(None, float(zlib.crc32(answers[-1].encode()) % 2), True)


def make(argument: str, seed: int, tokenizer) -> Task:
    """`argument` is the most tokens of an answer."""
    most = whole_number(argument or "2048", 1, 16384)
    return Task(
        reset=partial(reset, most, seed),
        step=step,
        alphabet=None,
        max_prompt_tokens=64,
        turn_tokens=most,
        stop=frozenset(),
        eval_size=1,
    )
