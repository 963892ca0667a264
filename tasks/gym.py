"""gym.py: a hundred kinds of problem, from the package reasoning-gym, each a task.

    gym:NAME[:key=value,...]      gym:chain_sum:max_terms=2,min_digits=2,max_digits=2

NAME is a generator of https://github.com/open-thought/reasoning-gym, the keys are its own settings;
`tokens` (64) is the most tokens of an answer. Its own scorer is the reward, from 0 to 1. Problems
of training and those held out come from far seeds. A prompt that is twice as long as any of the
first is left out, and the next one is taken.
"""

import json
import os
import re
from functools import partial

from reward import Step, Task, TaskError

PROBLEMS = 10_000  # of a seed; then they come again. A generator draws from (seed + index)
LOOKED_AT = 16  # problems, to see how long prompts are
# these order a set of strings, which Python does in another way in every process
UNORDERED = "isomorphic_strings knight_swap list_functions polynomial_multiplication ransom_note"
UNORDERED += " word_ladder"  # of version 0.1.25
FORM = "\nGive the answer alone, without any other words."


def settings_of(text):
    """The settings in "key=value,..."; values are numbers, true, false, lists or text."""
    settings = {}
    for part in re.split(r",(?=\w+=)", text) if text else ():
        key, _, value = part.partition("=")
        try:
            settings[key] = json.loads(value)
        except ValueError:
            settings[key] = value
    return settings


def generators(name, seed, settings):
    """{split: its generator}; TaskError when there is none, or not with these settings."""
    try:
        from reasoning_gym.factory import DATASETS, create_dataset
    except ImportError:
        raise TaskError("needs a package: pip install reasoning-gym") from None
    if name not in DATASETS:
        raise TaskError(f"{name!r}: allowed is one of {', '.join(sorted(DATASETS))}")
    if name in UNORDERED.split() and not os.environ.get("PYTHONHASHSEED", "").isdigit():
        raise TaskError("set PYTHONHASHSEED=0, or it draws other problems in every process")
    seeds = {"train": PROBLEMS * (1 + seed), "eval": 0}
    how = {"size": PROBLEMS} | settings
    try:
        return {split: create_dataset(name, seed=seeds[split], **how) for split in seeds}
    except (AssertionError, TypeError, ValueError) as error:
        raise TaskError(f"{name} refuses {settings}: {error}") from None


def reset(data, encode, most, index, split):
    """A problem whose prompt is not too long; `index` finds it again."""
    for number in range(index, index + LOOKED_AT * 101, 101):
        entry = number % PROBLEMS
        prompt = data[split][entry]["question"] + FORM
        if len(encode(prompt)) <= most:
            return {"prompt": prompt, "entry": entry, "split": split}
    raise TaskError(f"no prompt of {LOOKED_AT} has at most {most} tokens")


def step(data, problem, answers):
    """What the generator's scorer says."""
    generator = data[problem["split"]]
    score = generator.score_answer(answers[-1].strip(), generator[problem["entry"]])
    return Step(None, float(score), True)


def solve(data, problem):
    """The answer that the generator names."""
    return [data[problem["split"]][problem["entry"]]["answer"] or "?"]


def make(argument: str, seed: int, tokenizer) -> Task:
    """`argument` is NAME[:key=value,...]."""
    name, _, text = argument.partition(":")
    settings = settings_of(text)
    tokens = settings.pop("tokens", 64)
    data = generators(name, seed, settings)
    first = [data["eval"][i]["question"] for i in range(LOOKED_AT)]  # the same for every seed
    most = 2 * max(len(tokenizer.encode(question + FORM)) for question in first)
    return Task(
        reset=partial(reset, data, tokenizer.encode, most),
        step=partial(step, data),
        alphabet=None,
        max_prompt_tokens=most,
        turn_tokens=tokens,
        eval_size=128,
        solve=partial(solve, data),
    )
