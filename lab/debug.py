"""debug.py: write a program for a tiny stack machine, and mend it when an example fails.

    python train_async.py --task lab/debug.py       # a task file may lie anywhere

    2>6 5>2 8>8? nd+ 5>2? ...

The prompt shows three examples, "2>6": from 2 the program must make 6. The answer is a program of
three instructions. Its stack begins with the input alone, and what lies on top at the end is the
output; all numbers are digits:

    d  push what is on top once more     +  take two from the top, push their sum modulo 10
    n  add 1 to what is on top           *  take two from the top, push their product modulo 10

The environment runs the program on all examples. Of the first one that fails it tells the input and
what the program gave: "5>3", or "5>!" when the stack was too short. Then the policy writes another
program, up to four in all.

The rules:
  * Ten different things can be done with three instructions, as x + 1, 2 x + 2 or (x + 1) x, those
    apart that leave the input as it is. Each is asked for as often as the others; any program that
    meets the examples is right.
  * Nothing is run but these four instructions, and there are no jumps: a run has three steps.
  * Held out is one in ten of the prompts, which are three examples in the order of their inputs.
    The ten things and all single examples occur in training: what generalises is to tell from three
    examples that were never together what is to be done, and to learn from what is told.

reward = (1, 3/4, 1/2, 1/4 for the first to fourth try) * (0.8 if all examples are met
         + 0.2 * the share of examples met, as far as it is more than in any earlier try)
"""

from itertools import product

from reward import Step, Task, TaskError
from tasks.problems import drawn, single_tokens

SIGNS, SIZE, EXAMPLES, TRIES = "dn+*", 3, 3, 4
ALL, SHARE = 0.8, 0.2
DIGITS = range(10)


def run(program, number):
    """The output of a program; None when the stack was too short."""
    stack = [number]
    for sign in program:
        top = stack.pop()
        if sign == "d":
            stack += top, top
        elif sign == "n":
            stack.append((top + 1) % 10)
        elif not stack:
            return None
        else:
            below = stack.pop()
            stack.append((below + top if sign == "+" else below * top) % 10)
    return stack[-1]


# what each program makes of each digit
OUTPUTS = {}
for program in map("".join, product(SIGNS, repeat=SIZE)):
    OUTPUTS[program] = tuple([run(program, number) for number in DIGITS])

# a program for each of the different things that programs do
DONE = {made: program for program, made in OUTPUTS.items()}
TARGETS = [DONE[made] for made in DONE if None not in made and made != (*DIGITS,)]


def propose(random):
    """(prompt, problem): examples of one of the targets."""
    program = TARGETS[random.integers(len(TARGETS))]
    asked = sorted(random.choice(len(DIGITS), size=EXAMPLES, replace=False).tolist())
    examples = [[number, OUTPUTS[program][number]] for number in asked]
    prompt = " ".join(f"{number}>{output}" for number, output in examples) + "? "
    return prompt, {"prompt": prompt, "examples": examples, "program": program}


def failing(problem, program):
    """The examples that a program does not meet: (input, what it gave) of each."""
    made = OUTPUTS.get(program, [None] * len(DIGITS))
    return [(asked, made[asked]) for asked, output in problem["examples"] if made[asked] != output]


def step(problem, answers):
    """Runs the newest program; what an earlier one has met is not paid again."""
    attempt, failed = len(answers), failing(problem, answers[-1])
    fewest = min((len(failing(problem, said)) for said in answers[:-1]), default=EXAMPLES)
    more = max(0, fewest - len(failed)) / EXAMPLES
    reward = (1 + TRIES - attempt) / TRIES * (ALL * (not failed) + SHARE * more)
    if not failed or attempt >= TRIES:
        return Step(None, reward, True)
    asked, made = failed[0]
    told = "!" if made is None else made
    return Step(f" {asked}>{told}? ", reward, False)


def solve(problem):
    """A program that does what the examples show."""
    return [problem["program"]]


def make(argument: str, seed: int, tokenizer) -> Task:
    """The task; `argument` is what follows the colon in --task, and there is none here."""
    if argument:
        raise TaskError("debug has no argument")
    examples = " ".join(["3>7"] * EXAMPLES)
    told = [tokenizer.encode(text) for text in (" 3>7? ", " 3>!? ")]
    return Task(
        reset=drawn(propose, "debug", seed),
        step=step,
        alphabet=single_tokens(tokenizer, SIGNS),
        max_prompt_tokens=len(tokenizer.encode(f"{examples}? ")),
        turn_tokens=SIZE,
        max_turns=TRIES,
        stop=frozenset(),  # a turn is three tokens, and needs no end
        observation_tokens=max(map(len, told)),
        eval_size=128,
        solved=0.2,  # at the fourth try 0.25; two of three examples at the first are worth 0.13
        steps=700,
        solve=solve,
    )
