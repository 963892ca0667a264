"""problems.py: for tasks: a problem from its index, and which of them are held out.

Nothing is remembered between two problems: each is a function of (task, seed, index, split).
"""

import re
import zlib
from collections.abc import Callable, Iterable
from functools import lru_cache

import numpy as np

from reward import TaskError
from runtime.tokenizer import Tokenizer

SPLITS = ("train", "eval")


def random_of(name: str, seed: int, index: int, split: str) -> np.random.Generator:
    """The random numbers of one problem. The seed moves training only: all runs share one exam."""
    seed = seed if split == "train" else 0
    return np.random.default_rng((zlib.crc32(name.encode()), SPLITS.index(split), index, seed))


def draw_problem(propose: Callable, random: np.random.Generator, split: str) -> dict:
    """The first (prompt, answer) that `propose(random)` gives and whose prompt is of this split. An
    answer that is a dict is the whole problem, and the prompt only what is held out by.

    A hash of the prompt holds out one in ten, so that no evaluated prompt is ever trained.
    TaskError when there are too few different prompts for both splits.
    """
    for _ in range(1000):
        prompt, answer = propose(random)
        held_out = zlib.crc32(prompt.encode()) % 10 == 1  # 1 is fair (10.0%) to the shortest sums
        if held_out == (split == "eval"):
            return answer if isinstance(answer, dict) else {"prompt": prompt, "answer": answer}
    raise TaskError(f"none of 1000 prompts such as {prompt!r:.80} belongs to split {split!r}")


def drawn(propose: Callable, name: str, seed: int) -> Callable:
    """The `reset` of a task whose problems are drawn; one in ten is held out."""
    return lambda index, split: draw_problem(propose, random_of(name, seed, index, split), split)


@lru_cache(64)
def _shuffled(size: int, *draw) -> list[int]:
    return random_of(*draw).permutation(size).tolist()


def in_turn(name: str, seed: int, index: int, split: str, size: int) -> int:
    """Which of `size` problems: each once an epoch, shuffled in training, in order otherwise."""
    epoch, place = divmod(index, size)
    return place if split == "eval" else _shuffled(size, name, seed, epoch, split)[place]


def whole_number(text: str, least: int, most: int) -> int:
    """The number that an argument says; TaskError unless it lies in least..most."""
    if not re.fullmatch("[0-9]{1,9}", text) or not least <= int(text) <= most:
        raise TaskError(f"{text!r}: allowed is a number in {least}..{most}")
    return int(text)


def single_tokens(tokenizer: Tokenizer, texts: Iterable[str]) -> tuple[int, ...]:
    """The token of each text; TaskError where the vocabulary needs several for one of them."""
    found = [tokenizer.encode(text) for text in texts]
    if max(map(len, found)) > 1:
        raise TaskError(f"needs a vocabulary that has each of {[*texts]} as one token")
    return tuple(token for (token,) in found)
