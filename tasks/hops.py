"""hops.py: follow facts with a tool: hops:3 needs three calls, each with what the last one told.

    3 hops from 7: ?7 4 ?4 1 ?1 8 !8

The prompt names the first of ten keys. The facts, which key follows which, are behind the tool:
"?7" calls it with key 7, and it tells " 4 "; "!8" is the answer, and ends the episode. A turn is
two tokens. hops:N has N hops (1 to 8). In hops:N:RATE the tool fails in a share RATE of the turns
(0 to 0.5): it tells " ~ " instead of a fact, and the call must be made again.

The rules:
  * The facts are a ring through all ten keys, so no key comes twice on the way.
  * There are 2 N turns for calls, N of them to spare, and one more in which only an answer counts.
    A wrong key (its fact is told), a call that fails and nonsense (" - " is told) cost a turn each.
  * Which turns fail is drawn beforehand, at most N of them, so every problem can be solved.
  * Held out is one in ten of the ways, the keys from the first to the answer: no way of "eval" is
    walked in "train". All single facts occur there; what generalises is to follow them.

reward = 0.3 / N for each hop, once and in order + for the right answer 0.7, less 0.1 / N for each
         turn before it that was no hop, failures of the tool left out
"""

import re
from functools import partial

import numpy as np

from reward import Step, Task, TaskError
from tasks.problems import drawn, single_tokens, whole_number

KEYS = range(10)
ANSWERS = [f"!{key}" for key in KEYS]
HOPS, ANSWER, WASTED = 0.3, 0.7, 0.1  # all hops, the right answer, N turns to no use


def propose(hops, rate, random):
    """(the way, problem): facts, what leads to the answer, and in which turns the tool fails."""
    ring = random.permutation(len(KEYS)).tolist()
    after = ring[1:] + ring[:1]
    facts = {f"?{key}": f" {value} " for key, value in zip(ring, after, strict=True)}
    calls = [f"?{key}" for key in ring[:hops]]
    failing = np.flatnonzero(random.random(2 * hops) < rate)[:hops] + 1
    return "".join(map(str, ring[: hops + 1])), {
        "prompt": f"{hops} hops from {ring[0]}: ",
        "facts": facts,
        "way": [*calls, f"!{ring[hops]}"],
        "failing": failing.tolist(),
    }


def hops_made(problem, answers):
    """How many hops these turns have made, in order."""
    made = 0
    for turn, said in enumerate(answers, start=1):
        if said in problem["facts"] and turn not in problem["failing"]:
            made += said == problem["way"][made]
    return made


def step(problem, answers):
    """Goes the way again, as far as the earlier turns have come, and judges the newest."""
    way, failing = problem["way"], problem["failing"]
    hops, turn, said = len(way) - 1, len(answers), answers[-1]
    made = hops_made(problem, answers[:-1])
    if said in ANSWERS or turn > 2 * hops:
        # nonsense costs its turn, whatever the tool would have done
        failed = sum(answers[n - 1] in problem["facts"] for n in failing if n < turn)
        wasted = turn - 1 - made - failed
        worth = ANSWER - WASTED * wasted / hops
        return Step(None, worth if said == way[-1] else 0.0, True)
    if said not in problem["facts"]:
        return Step(" - ", 0.0, False)
    if turn in failing:
        return Step(" ~ ", 0.0, False)
    right = said == way[made]
    return Step(problem["facts"][said], HOPS / hops if right else 0.0, False)


def solve(problem):
    """The answers of one who calls again what has failed."""
    answers = []
    for call in problem["way"][:-1]:
        while len(answers) + 1 in problem["failing"]:
            answers.append(call)
        answers.append(call)
    return [*answers, problem["way"][-1]]


def make(argument: str, seed: int, tokenizer) -> Task:
    """`argument` is "3", or "3:0.05" with a tool that fails in one turn of twenty."""
    size, colon, rate = (argument or "3").partition(":")
    hops = whole_number(size, 1, 8)
    if colon and not (re.fullmatch(r"0?\.[0-9]{1,6}|0", rate) and float(rate) <= 0.5):
        raise TaskError(f"{rate!r}: allowed is a number in 0..0.5")
    told = [tokenizer.encode(text) for text in (" 7 ", " ~ ", " - ")]
    return Task(
        reset=drawn(partial(propose, hops, float(rate or 0)), "hops", seed),
        step=step,
        alphabet=single_tokens(tokenizer, "?!0123456789"),
        max_prompt_tokens=len(tokenizer.encode(f"{hops} hops from 7: ")),
        turn_tokens=2,
        max_turns=2 * hops + 1,
        stop=frozenset(),  # a turn is two tokens, and needs no end
        observation_tokens=max(map(len, told)),
        eval_size=128,
        solved=0.4,  # the right answer is worth at least 0.5, all hops without it 0.3
        steps=500,
        solve=solve,
    )
