"""reward.py - the tasks: prompts, environments, verifiers, and the tokenizer they speak through.

A task is two pure functions. `reset(index, split)` gives a problem (plain JSON data with a
`prompt`); `step(problem, answers)` judges the newest answer, given all answers so far. Nothing is
remembered between calls: a prompt cursor is one integer, and a reward worker can play a finished
episode again from its text alone, with the same verdict.

    guess            a number in 0..15; the environment replies < or >; 6 turns
    reverse:4        "1034 reverse" -> "4301"; 2 to 64 digits
    sort:4           "1034 sort" -> "0134"; 2 to 64 digits
    sum:96           "3+5+9+2=" -> "3879", the running totals modulo 10; the number of terms has
                     a heavy tail, cut at the parameter (2 to 1024)
    recall:256       " 37=51; 12=90;? 37=" -> "51"; a prompt of so many tokens (16 to 16384)
    jsonl:PATH:exact:TOKENS    your own lines {"prompt": "...", "answer": "..."}; the verifier is
                     exact or numeric; TOKENS is the most an answer may have
What follows the name may be left out: the values above are the defaults, and for `jsonl` exact
and the length of the longest answer (give more if the policy is to think aloud).

Left out: tools, sandboxes, learned reward models, limits on memory (no verifier here needs one).
Model output is never given to `eval`, to an unbounded number parser or to a backtracking regex.

Boundary: this file knows text and token ids, never tensors of the model.
Run: `python reward.py` prints a sample episode of each task; `python reward.py sum:8` of that one.
"""

import contextlib
import json
import re
import sys
import time
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import lru_cache, partial
from math import isfinite
from pathlib import Path
from typing import NamedTuple

import numpy as np

from runtime import limits
from runtime.config import Config
from runtime.limits import guarded
from runtime.messages import Group
from runtime.tokenizer import END, decode_bytes, encode

Answers = Sequence[str]  # the policy's turns so far, the newest last


class Step(NamedTuple):
    """What the environment says to an answer."""

    observation: str | None  # text to append; None when done
    reward: float
    done: bool


class Verdict(NamedTuple):
    """A judged episode; with an error ("verifier_timeout", "verifier_error: ...") all rewards 0."""

    reward: float  # the sum of the turn rewards
    turn_rewards: tuple[float, ...]  # one per answer
    error: str | None


@dataclass(frozen=True)
class Task:
    """A task as plain data and two pure functions; it can be pickled and sent to a worker."""

    name: str  # the spec that `make_task` was given
    reset: Callable[[int, str], dict]  # (index, "train" | "eval") -> problem with a "prompt"
    step: Callable[[dict, Answers], Step]
    alphabet: tuple[int, ...] | None  # ids the policy may emit; None: all but PAD
    max_prompt_tokens: int
    turn_tokens: int  # most tokens the policy may generate in a turn, its stop token included
    max_turns: int = 1
    stop: frozenset[int] = frozenset({END})  # ends a turn; empty: turns of just `turn_tokens`
    observation_tokens: int = 0  # most tokens of one observation
    eval_size: int = 256  # held out: reset(0 .. eval_size - 1, "eval"), the same for every seed
    solved: float = 1.0  # an episode with this reward or more counts as solved
    steps: int = 300  # optimizer steps that a small model needs to learn it; default of --steps
    beside: bool = False  # True: steps are slow, run them in a thread beside generation

    @property
    def context(self) -> int:
        """The number of tokens that every episode fits into."""
        turn = self.turn_tokens + self.observation_tokens
        return self.max_prompt_tokens + self.max_turns * turn - self.observation_tokens


SPLITS = ("train", "eval")


def _random(kind: str, seed: int, index: int, split: str) -> np.random.Generator:
    # The seed moves the training prompts only: runs with different seeds share one examination.
    key = (zlib.crc32(kind.encode()), SPLITS.index(split), index, seed if split == "train" else 0)
    return np.random.default_rng(key)


def _draw(kind: str, seed: int, propose: Callable, index: int, split: str) -> dict:
    random = _random(kind, seed, index, split)
    while True:
        prompt, answer = propose(random)
        # One prompt in ten is held out. Remainder 1, as it is fair (10.0%) to the shortest sums.
        if (zlib.crc32(prompt.encode()) % 10 == 1) == (split == "eval"):
            return {"prompt": prompt, "answer": answer}


def _in_turn(kind: str, seed: int, size: int, index: int, split: str) -> int:
    """Which of `size` problems: each once per epoch, shuffled in training, in order otherwise."""
    epoch, place = divmod(index, size)
    return place if split == "eval" else _epoch(kind, seed, epoch, size, split)[place]


@lru_cache(64)
def _epoch(kind: str, seed: int, epoch: int, size: int, split: str) -> list[int]:
    return _random(kind, seed, epoch, split).permutation(size).tolist()


GUESS_RANGE, GUESS_TURNS = 16, 6


_GUESSES = {f"{space}{n}": n for n in range(GUESS_RANGE) for space in (" ", "")}


def _guess_reset(seed: int, index: int, split: str) -> dict:
    # 16 secrets leave nothing to hold out: the evaluation is all of them.
    return {"prompt": "guess", "secret": _in_turn("guess", seed, GUESS_RANGE, index, split)}


def _guess_step(problem: dict, answers: Answers) -> Step:
    turn, guess, secret = len(answers), _GUESSES.get(answers[-1]), problem["secret"]
    if guess == secret:
        return Step(None, 1 - turn / 10, True)
    if turn >= GUESS_TURNS:
        return Step(None, 0.0, True)
    return Step("?" if guess is None else "<" if secret < guess else ">", 0.0, False)


def _digits_step(problem: dict, answers: Answers) -> Step:
    # Partial credit is what makes these learnable from random weights: an exact-only reward is
    # zero for whole groups. Dividing by the longer length makes padding an answer useless.
    answer, expected = answers[-1], problem["answer"]
    matches = sum(a == b for a, b in zip(answer, expected, strict=False))
    return Step(None, matches / max(len(answer), len(expected)), True)


def _row(kind: str, digits: int, random: np.random.Generator) -> tuple[str, str]:
    row = "".join(map(str, random.integers(10, size=digits).tolist()))
    return f"{row} {kind}", row[::-1] if kind == "reverse" else "".join(sorted(row))


def _sum(terms: int, random: np.random.Generator) -> tuple[str, str]:
    # Lengths follow a Pareto law (exponent 1.3, from 2 up, cut at `terms`): half of the replies
    # have at most 4 tokens, one in a hundred 46 or more. Such a tail is what asynchrony is for.
    uniform = random.uniform((2 / (terms + 1)) ** 1.3, 1.0)
    numbers = random.integers(10, size=min(terms, int(2 * uniform ** (-1 / 1.3))))
    totals = numbers.cumsum() % 10
    return "+".join(map(str, numbers.tolist())) + "=", "".join(map(str, totals.tolist()))


def _recall_shape(tokens: int) -> tuple[int, int]:
    """(pairs, tokens of a key): pairs "key=51;" and the question "?key=" fill up `tokens`."""
    width = 1 if (tokens - 3) // 5 <= 100 else 2  # a key of one number is easier to find
    return (tokens - width - 2) // (width + 4), width


def _recall(tokens: int, random: np.random.Generator) -> tuple[str, str]:
    pairs, width = _recall_shape(tokens)
    keys = random.choice(100**width, size=pairs, replace=False).tolist()
    names = [f" {key}" if width == 1 else f" {key // 100} {key % 100}" for key in keys]
    values = [f"{value:02d}" for value in random.integers(100, size=pairs).tolist()]
    asked = int(random.integers(pairs))
    table = "".join(f"{name}={value};" for name, value in zip(names, values, strict=True))
    return f"{table}?{names[asked]}=", values[asked]


# A number is not preceded by a letter, digit, point, slash or exponent, nor followed by more of
# these: "1e999999999" and "2026/01/02" are no numbers, rather than the digits they end with.
_NUMBER = re.compile(
    r"(?<![\w./])(?<![\d.][eE][-+])[-+]?(?:\d{1,3}(?:,\d{3})+|\d+|(?=\.\d))(?:\.\d+)?"
    r"(?:/\d+(?:\.\d+)?)?(?![.,/]?\d|[eE][-+]?\d)",
    re.ASCII,
)


NUMBER_CHARACTERS = 64  # a longer number is wrong, whatever it says


TAIL_CHARACTERS = 1024  # numbers are looked for in the end of an answer only: bounded work


def last_number(text: str) -> Fraction | None:
    """The last number in a text: integer, decimal or fraction, with or without thousands commas.

    None if there is none, if it is longer than NUMBER_CHARACTERS, or divided by zero.
    """
    found = _NUMBER.findall(text[-TAIL_CHARACTERS:].replace("\u2212", "-"))  # typographic minus
    if not found or len(found[-1]) > NUMBER_CHARACTERS:
        return None
    above, _, below = found[-1].replace(",", "").partition("/")
    divisor = Fraction(below or 1)
    return Fraction(above) / divisor if divisor else None


def _exact_step(problem: dict, answers: Answers) -> Step:
    return Step(None, float(answers[-1].strip() == problem["answer"].strip()), True)


def _numeric_step(problem: dict, answers: Answers) -> Step:
    number = last_number(answers[-1])
    return Step(None, float(number is not None and number == last_number(problem["answer"])), True)


def _jsonl_row(line: bytes, numeric: bool) -> dict:
    try:
        row = json.loads(line)
    except (ValueError, RecursionError):  # not UTF-8, not JSON, or nested too deeply
        raise ValueError("not valid JSON") from None
    for key in ("prompt", "answer"):
        text = row.get(key) if isinstance(row, dict) else None
        if not isinstance(text, str) or not text.strip():
            raise ValueError(f"expected an object in which {key!r} is a string that is not empty")
    if numeric and last_number(row["answer"]) is None:
        raise ValueError("the verifier numeric needs a number in 'answer'")
    return {"prompt": row["prompt"], "answer": row["answer"]}


def _read_jsonl(path: str, numeric: bool) -> list[dict]:
    try:
        lines = Path(path).read_bytes().split(b"\n")
    except (OSError, ValueError) as error:  # ValueError: a zero byte in the path
        raise ValueError(f"cannot read {path!r} ({error}); allowed is {JSONL_USAGE}") from None
    rows = []
    for number, line in enumerate(lines, 1):
        try:
            rows += [_jsonl_row(line, numeric)] if line.strip() else []
        except ValueError as error:
            raise ValueError(f"{path!r}, line {number}: {error}") from None
    if not rows:
        raise ValueError(f'{path!r}: expected lines {{"prompt": "...", "answer": "..."}}, has none')
    return rows


def _jsonl_reset(rows: dict[str, list[dict]], seed: int, index: int, split: str) -> dict:
    return dict(rows[split][_in_turn("jsonl", seed, len(rows[split]), index, split)])


LIMITS = {"reverse": (2, 64), "sort": (2, 64), "sum": (2, 1024), "recall": (16, 16384)}


DEFAULTS = {"reverse": 4, "sort": 4, "sum": 96, "recall": 256}


JSONL_USAGE = "jsonl:PATH[:exact|numeric][:TOKENS 1..16384]"


_SIZED = [f"{name}[:{least}..{most}]" for name, (least, most) in LIMITS.items()]


USAGE = ", ".join(["guess", *_SIZED, JSONL_USAGE])


def make_task(spec: str, seed: int = 0) -> Task:
    """The task that a spec such as "guess", "reverse:6" or "jsonl:PATH:numeric" describes.

    `seed` decides the training prompts. Raises ValueError, in one line that names the value and
    what is allowed, for a bad spec or a file that cannot be used.
    """
    kind, _, rest = spec.partition(":")
    if seed < 0:
        raise ValueError(f"seed {seed}: allowed is 0 or more")
    if spec == "guess":
        return _guess_task(seed)
    if kind == "jsonl":
        parts = re.fullmatch(r"(.*?)(:exact|:numeric)?(?::([0-9]{1,9}))?", rest, re.DOTALL)
        path, verifier, tokens = parts.groups()
        if not path or not 1 <= int(tokens or 1) <= 16384:
            raise ValueError(f"task {spec!r}: allowed is {JSONL_USAGE}")
        return _jsonl_task(spec, path, verifier == ":numeric", int(tokens or 0), seed)
    if kind not in LIMITS:
        raise ValueError(f"task {spec!r}: allowed is one of {USAGE}")
    least, most = LIMITS[kind]
    rest = rest if spec != kind else str(DEFAULTS[kind])
    size = int(rest) if re.fullmatch("[0-9]{1,9}", rest) else -1
    if not least <= size <= most:
        raise ValueError(f"task {spec!r}: allowed is {kind}, or {kind}:N with N in {least}..{most}")
    return _digits_task(spec, kind, size, seed)


def _guess_task(seed: int) -> Task:
    numbers = tuple(encode("".join(f" {n}" for n in range(GUESS_RANGE))))
    shape = {"max_turns": GUESS_TURNS, "observation_tokens": 1, "eval_size": GUESS_RANGE}
    goal = {"solved": 1 - GUESS_TURNS / 10, "steps": 350}
    reset = partial(_guess_reset, seed)
    return Task("guess", reset, _guess_step, numbers, 1, 1, stop=frozenset(), **shape, **goal)


def _digits_task(spec: str, kind: str, size: int, seed: int) -> Task:
    if kind == "sum":
        propose, prompt, answer = partial(_sum, size), 2 * size, size
    elif kind == "recall":
        pairs, width = _recall_shape(size)
        propose, prompt, answer = partial(_recall, size), pairs * (width + 4) + width + 2, 2
    else:
        propose, prompt, answer = partial(_row, kind, size), size + 1, size
    alphabet = (*encode("0123456789"), END)
    reset, held_out = partial(_draw, kind, seed, propose), 64 if kind == "recall" else 256
    return Task(spec, reset, _digits_step, alphabet, prompt, answer + 1, eval_size=held_out)


def _jsonl_task(spec: str, path: str, numeric: bool, tokens: int, seed: int) -> Task:
    rows = _read_jsonl(path, numeric)
    # Every tenth different prompt is held out, with all its copies. With fewer than ten there is
    # nothing to spare, and the evaluation is on the training lines.
    order = {prompt: i for i, prompt in enumerate(dict.fromkeys(row["prompt"] for row in rows))}
    train = [row for row in rows if order[row["prompt"]] % 10 != 9]
    held = [row for row in rows if order[row["prompt"]] % 10 == 9]
    splits = {"train": train, "eval": held or rows}
    prompt, answer = (max(len(encode(row[key])) for row in rows) for key in ("prompt", "answer"))
    reset, step = partial(_jsonl_reset, splits, seed), _numeric_step if numeric else _exact_step
    eval_size = min(256, len(splits["eval"]))
    return Task(spec, reset, step, None, prompt, tokens or answer + 1, eval_size=eval_size)


def _replay(task: Task, problem: dict, answers: Answers) -> tuple[float, ...]:
    rewards, done, step = [], False, task.step
    for turn in range(1, len(answers) + 1):
        if done:
            raise ValueError(f"{len(answers)} answers, but the episode ended after {turn - 1}")
        _, reward, done = step(problem, answers[:turn])
        if not isfinite(reward):
            raise ValueError(f"the reward {reward} of turn {turn} is not finite")
        rewards.append(float(reward))
    return tuple(rewards)


def verify(task: Task, problem: dict, answers: Answers, seconds: float | None = 1.0) -> Verdict:
    """Plays an episode again from its text and judges it; raises nothing because of the answers.

    An episode that was cut off before its end keeps the rewards of the turns it had.
    """
    rewards, error = guarded("verifier", seconds, _replay, task, problem, answers)
    if error:
        return Verdict(0.0, (0.0,) * len(answers), error)
    return Verdict(sum(rewards), rewards, None)


def split_answers(task: Task, tokens: Sequence[int], turns: Sequence[tuple]) -> list[str]:
    """The text of each turn (start, stop) in a trajectory's tokens, without its stop token.

    Bytes that are not UTF-8 become U+FFFD; ValueError for a token id outside the vocabulary.
    """
    everything, end = np.asarray(tokens).tolist(), task.stop
    return [_answer(tuple(everything[start:stop]), end) for start, stop in turns]


@lru_cache(4096)  # the turns before the newest one are read again and again
def _answer(tokens: tuple[int, ...], stop: frozenset[int]) -> str:
    said = tokens[:-1] if tokens and tokens[-1] in stop else tokens
    return decode_bytes(said).decode("utf-8", errors="replace")


def solve(problem: dict) -> list[str]:
    """A best possible list of answers: for warm starts, tests and the sample episodes below."""
    if "answer" in problem:
        return [problem["answer"]]
    low, high, answers = 0, GUESS_RANGE - 1, []
    while low <= high:  # binary search
        middle = (low + high) // 2
        answers.append(f" {middle}")
        low = low if problem["secret"] < middle else middle + 1
        high = high if problem["secret"] > middle else middle - 1
    return answers


def show_episode(task: Task) -> None:
    """Prints a problem with a good and a useless answer; | separates the tokens of the prompt."""
    problem = task.reset(0, "train")
    pieces = [decode_bytes([t]).decode(errors="replace") for t in encode(problem["prompt"])]
    shown = "|".join(pieces if len(pieces) <= 24 else [*pieces[:12], " ... ", *pieces[-4:]])
    print(f"\n{task.name}: at most {task.context} tokens, {task.eval_size} problems held out")
    print(f"  prompt  {shown!r}")
    for answers in (solve(problem), ["0"] * task.max_turns):
        for turn in range(1, len(answers) + 1):
            said, reward, done = task.step(problem, answers[:turn])
            print(f"  answer  {answers[turn - 1]!r:12}", f"reward {reward:.2f}" if done else said)


if __name__ == "__main__":
    try:
        for spec in sys.argv[1:] or ("guess", *DEFAULTS):
            show_episode(make_task(spec))
    except ValueError as complaint:
        print(f"reward.py: {complaint}", file=sys.stderr)
        sys.exit(2)


def score(group: Group, task: Task, config: Config, after=lambda: None) -> list:
    """Verify every episode of a group, each within its limits; the reward workers' whole job.

    `after` is called before each verdict that has a limit to itself.
    """
    texts = [tuple(split_answers(task, t.tokens, t.turns)) for t in group.trajectories]
    verdicts, seconds, known = [], config.reward_seconds, {}
    with limits.memory_limit(config.reward_memory):
        # One alarm for all of them, which is quicker: most groups need far less than one limit.
        with contextlib.suppress(limits.OutOfTime), limits.time_limit(seconds):
            for answers in texts:
                if answers not in known:  # a verifier is a function: the same has the same verdict
                    known[answers] = verify(task, group.problem, answers, None)
                if known[answers].error == "verifier_timeout":
                    break
                verdicts.append(known[answers])
        for answers in texts[len(verdicts) :]:  # out of time: the rest one by one
            after()
            verdicts.append(verify(task, group.problem, answers, seconds))
    return verdicts


def judge(group: Group, task: Task, config: Config, after=lambda: None) -> dict:
    """The verdicts of `score`, when it began, and the seconds that it took."""
    began, verdicts = time.monotonic(), score(group, task, config, after)
    return {"verdicts": verdicts, "began": began, "seconds": time.monotonic() - began}
