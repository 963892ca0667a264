"""guess.py: guess a number in 0..15 in at most 6 turns; the environment replies < or > or ?.

The example to copy for a task of your own. A task file has one function, `make(argument, seed,
tokenizer)`, which returns a `Task`. It runs by its path: `python train_sync.py --task
path/to/file.py`, or `--task path/to/file.py:argument`. The README has a complete one in twenty
lines, with one turn.

The rules:
  * `reset(index, split)` returns the same problem for the same index; tasks/problems.py helps with
    that (`drawn`, `in_turn`). Problems of "eval" should never be seen in "train" (here they
    are: there are only 16), and do not depend on the seed.
  * `step(problem, answers)` judges the newest of the answers so far, and remembers nothing: it is
    called again elsewhere, to verify the episode. Exceptions in it cost that episode only.
  * Give some reward for a part of the answer: what random weights never get right by chance, they
    cannot learn otherwise.
  * Sizes are in tokens (`python bench.py episode path/to/file.py` prints one); the alphabet is
    what the policy may emit, and the smaller it is, the sooner it is learned.
"""

from functools import partial

from reward import Step, Task, TaskError
from tasks.problems import in_turn, single_tokens

RANGE, TURNS = 16, 6
GUESSES = {f" {n}": n for n in range(RANGE)} | {f"{n}": n for n in range(RANGE)}


def reset(seed, index, split):
    """A secret. There are only 16, so none is held out: the evaluation is all of them."""
    return {"prompt": "guess", "secret": in_turn("guess", seed, index, split, RANGE)}


def step(problem, answers):
    """1 for the right number, less 0.1 for each turn; < when the secret is smaller."""
    turn, secret = len(answers), problem["secret"]
    guess = GUESSES.get(answers[-1])
    if guess == secret:
        return Step(None, 1 - turn / 10, True)
    if turn >= TURNS:
        return Step(None, 0.0, True)
    if guess is None:
        return Step("?", 0.0, False)
    return Step("<" if secret < guess else ">", 0.0, False)


def solve(problem):
    """The answers of binary search; 3.375 on average."""
    low, high, answers = 0, RANGE - 1, []
    while low <= high:
        middle = (low + high) // 2
        answers.append(f" {middle}")
        if problem["secret"] == middle:
            break
        if problem["secret"] < middle:
            high = middle - 1
        else:
            low = middle + 1
    return answers


def make(argument: str, seed: int, tokenizer) -> Task:
    """The task; `argument` is what follows the colon in --task, and there is none here."""
    if argument:
        raise TaskError("guess has no argument")
    return Task(
        reset=partial(reset, seed),
        step=step,
        alphabet=single_tokens(tokenizer, [f" {n}" for n in range(RANGE)]),
        max_prompt_tokens=1,
        turn_tokens=1,
        max_turns=TURNS,
        stop=frozenset(),  # a turn is one token, and needs no end
        observation_tokens=1,
        eval_size=RANGE,
        solved=1 - TURNS / 10,
        steps=350,
        solve=solve,
    )
