"""hops.py: follow facts with a tool: hops:3 needs three calls, each with what the last one told.

    3 hops from 7:?7 4?4 1?1 8!8

The prompt names the first of ten keys; the facts, which key follows which, are behind the tool.
"?7" calls it with key 7, and it tells " 4"; "!8" is the answer, and ends the episode. A turn is two
tokens. hops:N has N hops (1 to 8), and in hops:N:RATE the tool fails at a share RATE of the turns
(0 to 0.5): it tells "~" instead of a fact, and the call must be made again.

The rules:
  * The facts are a ring through all ten keys, so that no key comes twice on the way.
  * There are 2 N turns for calls, and one more, in which only an answer counts. Every turn that is
    no answer costs one, whatever it says: a wrong key (its fact is told), a failed call, nonsense
    (the tool says "-").
  * Which turns fail is drawn beforehand, at most N of them, so every problem can be solved.
  * Held out is one in ten of the ways, the first key to the answer: no way of "eval" is ever walked
    in "train". What generalises is following; the prompt alone says nothing.

reward = 0.3 / N for each hop, when it is made for the first time, in order + 0.7 for the answer
"""

import re
from functools import partial

import numpy as np

from reward import Step, Task, TaskError
from tasks.problems import draw_problem, random_of, whole_number

KEYS = range(10)
CALLS = {f"?{key}": key for key in KEYS}
ANSWERS = {f"!{key}": key for key in KEYS}
HOPS, ANSWER, WASTED = 0.3, 0.7, 0.1


def propose(hops, rate, random):
    """(the way, problem): a ring of keys, and the turns in which the tool fails."""
    ring = random.permutation(len(KEYS)).tolist()
    facts = dict(zip(ring, ring[1:] + ring[:1], strict=True))
    failing = np.flatnonzero(random.random(2 * hops) < rate)[:hops] + 1
    return "".join(map(str, ring[: hops + 1])), {
        "prompt": f"{hops} hops from {ring[0]}: ",
        "hops": hops,
        "way": ring[: hops + 1],
        "facts": [facts[key] for key in KEYS],
        "failing": failing.tolist(),
    }


def reset(hops, rate, seed, index, split):
    """A problem; one way in ten is held out."""
    random = random_of("hops", seed, index, split)
    return draw_problem(partial(propose, hops, rate), random, split)["answer"]


def step(problem, answers):
    """Walks the way again, as far as the calls so far have come, and judges the newest turn."""
    hops, way, failing = problem["hops"], problem["way"], problem["failing"]
    done = 0
    for turn, said in enumerate(answers[:-1], start=1):
        if done < hops and CALLS.get(said) == way[done] and turn not in failing:
            done += 1
    turn, said = len(answers), answers[-1]
    if said in ANSWERS or turn > 2 * hops:
        wasted = turn - 1 - done - sum(failed < turn for failed in failing)
        right = ANSWERS.get(said) == way[hops]
        return Step(None, ANSWER - WASTED * wasted / hops if right else 0.0, True)
    if said not in CALLS:
        return Step(" - ", 0.0, False)
    if turn in failing:
        return Step(" ~ ", 0.0, False)
    right = done < hops and CALLS[said] == way[done]
    return Step(f" {problem['facts'][CALLS[said]]} ", HOPS / hops if right else 0.0, False)


def solve(problem):
    """The answers of one who calls again what has failed."""
    answers, done = [], 0
    while done < problem["hops"]:
        answers.append(f"?{problem['way'][done]}")
        done += len(answers) not in problem["failing"]
    return [*answers, f"!{problem['way'][-1]}"]


def make(argument: str, seed: int, tokenizer) -> Task:
    """`argument` is "3", or "3:0.05" with a tool that fails in one turn of twenty."""
    size, colon, rate = argument.partition(":")
    hops = whole_number(size or "3", 1, 8)
    if colon and not (re.fullmatch(r"0?\.[0-9]{1,6}|0", rate) and float(rate) <= 0.5):
        raise TaskError(f"{rate!r}: allowed is a number in 0..0.5")
    signs = [tokenizer.encode(sign) for sign in "?!0123456789"]
    if any(len(tokenizer.encode(text)) != 2 for text in (*CALLS, *ANSWERS)):
        raise TaskError("needs a vocabulary in which '?7' and '!7' are two tokens")
    return Task(
        reset=partial(reset, hops, float(rate or 0), seed),
        step=step,
        alphabet=tuple(token for sign in signs for token in sign),
        max_prompt_tokens=len(tokenizer.encode(f"{hops} hops from 7: ")),
        turn_tokens=2,
        max_turns=2 * hops + 1,
        stop=frozenset(),  # a turn is two tokens, and needs no end
        observation_tokens=max(len(tokenizer.encode(text)) for text in (" 7 ", " ~ ", " - ")),
        eval_size=128,
        solved=0.4,  # the answer alone is worth more, all the hops without it less
        steps=600,
        solve=solve,
    )
