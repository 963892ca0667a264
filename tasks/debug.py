"""debug.py: write a program for a tiny stack machine, and mend it when an example fails.

    3>7 5>1 8>7? d1+ 3>4? d+1+

The prompt shows three examples of what the program must make of its input; the answer is the
program, up to four instructions on a stack that begins with the input alone:

    1  push 1                     +  -  *  take two numbers from the top, push the
    d  push the top once more              sum, difference, product modulo 10

What lies on top at the end is the output. The environment runs the program on the examples, and
tells the first that fails with what the program gave: "3>4", or "3>!" when the stack was too short.
Then the policy tries again, up to four times.

The rules:
  * The target is one of all different things that a program can do, leaving out constants and the
    program that does nothing, each as often as the others. Nothing is run but these instructions,
    and there are no jumps, so a run has at most four steps.
  * Held out is one in ten of the prompts, three examples in their order. All targets occur in
    training: what generalises is to tell from new examples which of them it is.

reward = weight of the try * (0.4 * share of examples met that were never met before
                              + 0.6 when all are met), the weights are 1, 0.9, 0.8, 0.7
"""

from functools import cache, lru_cache, partial
from itertools import product

from reward import Step, Task, TaskError
from tasks.problems import draw_problem, random_of

SIGNS, LONGEST, EXAMPLES, TRIES = "d1+-*", 4, 3, 4
SHARE, ALL = 0.4, 0.6
DIGITS = range(10)


def run(program, number):
    """The output for an input; None when the stack was too short or a sign is no instruction."""
    stack = [number]
    for sign in program:
        if sign == "1":
            stack.append(1)
        elif sign == "d":
            stack.append(stack[-1])
        elif sign in "+-*" and len(stack) > 1:
            right, left = stack.pop(), stack.pop()
            found = {"+": left + right, "-": left - right, "*": left * right}[sign]
            stack.append(found % 10)
        else:
            return None
    return stack[-1]


@lru_cache(4096)  # all programs
def outputs(program):
    """What a program makes of each digit."""
    return tuple(run(program, number) for number in DIGITS)


@cache
def targets():
    """The shortest program for each different thing that programs do."""
    found = {tuple(DIGITS): ""}
    for size in range(LONGEST + 1):
        for signs in product(SIGNS, repeat=size):
            found.setdefault(outputs("".join(signs)), "".join(signs))
    return [p for made, p in found.items() if None not in made and len({*made}) > 1 and p]


def propose(random):
    """(prompt, problem): examples of one of the targets."""
    program = targets()[random.integers(len(targets()))]
    asked = random.choice(len(DIGITS), size=EXAMPLES, replace=False).tolist()
    examples = [[number, outputs(program)[number]] for number in asked]
    prompt = " ".join(f"{number}>{output}" for number, output in examples) + "? "
    return prompt, {"prompt": prompt, "examples": examples, "program": program}


def reset(seed, index, split):
    """A problem; one prompt in ten is held out."""
    return draw_problem(propose, random_of("debug", seed, index, split), split)["answer"]


def failures(problem, program):
    """(input, what the program gave) of the examples that it does not meet."""
    made = outputs(program) if len(program) <= LONGEST else (None,) * len(DIGITS)
    return [(asked, made[asked]) for asked, output in problem["examples"] if made[asked] != output]


def step(problem, answers):
    """Runs the newest program; what an earlier one has met is not paid again."""
    attempt, failed = len(answers), failures(problem, answers[-1])
    before = min((len(failures(problem, said)) for said in answers[:-1]), default=EXAMPLES)
    gain = max(0, before - len(failed)) / EXAMPLES
    reward = (1.1 - attempt / 10) * (SHARE * gain + ALL * (not failed))
    if not failed or attempt >= TRIES:
        return Step(None, reward, True)
    asked, made = failed[0]
    return Step(f" {asked}>{'!' if made is None else made}? ", reward, False)


def solve(problem):
    """The program that the examples were made with."""
    return [problem["program"]]


def make(argument: str, seed: int, tokenizer) -> Task:
    """The task; it has no argument."""
    if argument:
        raise TaskError("debug has no argument")
    signs = [token for sign in SIGNS for token in tokenizer.encode(sign)]
    prompt = len(tokenizer.encode(" ".join(["3>7"] * EXAMPLES) + "? "))
    return Task(
        reset=partial(reset, seed),
        step=step,
        alphabet=(*signs, tokenizer.end),
        max_prompt_tokens=prompt,
        turn_tokens=LONGEST + 1,
        max_turns=TRIES,
        observation_tokens=max(len(tokenizer.encode(said)) for said in (" 3>4? ", " 3>!? ")),
        eval_size=128,
        solved=0.5,
        steps=600,
        solve=solve,
    )
