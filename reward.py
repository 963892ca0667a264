"""reward.py: the protocol of tasks, and verification: from the text of an episode to its rewards.

A task is two pure functions. `reset(index, split)` gives a problem, plain JSON data with a
"prompt". `step(problem, answers)` judges the newest answer, given all answers so far. Nothing is
remembered between calls. So a prompt cursor is one integer, and a reward worker can play a
finished episode again from its text alone, with the same verdict.

Every file in tasks/ has one function `make(argument, seed, tokenizer) -> Task`, and so has a file
of your own: `--task path/to/file.py` or `--task path/to/file.py:argument` needs no change here.
Copy tasks/guess.py. What a task writes and reads is text; token ids appear only as sizes and
alphabet, in the vocabulary of the run: `tokenizer.encode(text)`, `tokenizer.end`.
Left out: tools, sandboxes, learned reward models. Never give model output to `eval`, to an
unbounded number parser or to a regular expression that backtracks.

`python bench.py episode [SPEC ...]` prints a sample episode of each task.
"""

import importlib
import json
import math
import re
import runpy
from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from functools import lru_cache, partial
from pathlib import Path
from typing import NamedTuple

import numpy as np

from runtime.config import LONGEST_CONTEXT, Config, UserError
from runtime.messages import LARGEST_REWARD
from runtime.tokenizer import Tokenizer, own_tokenizer, tokenizer_of
from tasks import limits


class Step(NamedTuple):
    """What the environment says to an answer."""

    observation: str | None  # text to append; None when done
    reward: float
    done: bool


class Verdict(NamedTuple):
    """A judged episode; with an error ("verifier_timeout", "verifier_error: ...") all rewards 0."""

    reward: float  # the sum of the turn rewards
    turn_rewards: tuple  # one per answer
    error: str | None


class TaskError(UserError):
    """A mistake in a task or in its argument, told in one line."""


@dataclass(frozen=True)
class Task:
    """What is learned: two pure functions and the sizes that they keep to."""

    reset: Callable  # (index, "train" | "eval") -> problem with a "prompt"
    step: Callable  # (problem, answers so far, the newest last) -> Step
    alphabet: tuple | None  # token ids the policy may emit; None: all that are text
    max_prompt_tokens: int
    turn_tokens: int  # most tokens the policy may generate in a turn, its stop token included
    max_turns: int = 1
    stop: frozenset | None = None  # ends a turn (None: the tokenizer's); empty: full turns
    observation_tokens: int = 0  # most tokens of one observation
    eval_size: int = 256  # held out: reset(0 .. eval_size - 1, "eval"), the same for every seed
    solved: float = 1.0  # an episode with this reward or more counts as solved
    steps: int = 300  # optimizer steps that a small model needs to learn it; default of --steps
    beside: bool = False  # True: steps are slow, run them in a thread beside generation
    solve: Callable = lambda problem: [problem.get("answer", "?")]  # best answers, for samples
    name: str = ""  # the spec; `make_task` writes it, and
    tokenizer: Tokenizer | None = None  # the vocabulary of the run

    @property
    def context(self) -> int:
        """The number of tokens that every episode fits into."""
        turn = self.turn_tokens + self.observation_tokens
        return self.max_prompt_tokens + self.max_turns * turn - self.observation_tokens


# ---- from a spec to a task ----


TASKS = {  # the name in a spec -> its file in tasks/
    "guess": "guess",
    "reverse": "digits",
    "sort": "digits",
    "sum": "digits",
    "recall": "recall",
    "hops": "hops",
    "debug": "debug",
    "jsonl": "jsonl",
}


USAGE = """guess, reverse[:2..64], sort[:2..64], sum[:2..1024], recall[:16..16384], \
hops[:1..8[:0..0.5]], debug, \
jsonl:PATH[:exact|numeric[:parsable]|similar][:any][:TOKENS 1..16384], path/to/file.py[:ARGUMENT]"""


def make_task(spec: str, seed: int = 0, tokenizer: Tokenizer | None = None) -> Task:
    """The task that a spec such as "guess", "reverse:6" or "path/to/file.py:argument" names.

    `seed` decides the training prompts. TaskError, in one line, for a bad spec and for mistakes
    in a task's file, with their place.
    """
    tokenizer = tokenizer or own_tokenizer()
    try:
        make, argument = _find(spec)
        task = check_task(make(argument, seed, tokenizer), tokenizer)
    except (Exception, SystemExit) as error:
        reason = error if isinstance(error, TaskError) else limits.describe(error)
        raise TaskError(f"task {spec!r}: {reason}") from error
    return replace(task, name=spec)


def task_of(config: Config) -> Task:
    """The configured task, in the vocabulary of the configured model; UserError."""
    return make_task(config.task, config.seed, tokenizer_of(config))


def own_file(spec: str) -> re.Match | None:
    """(1) the file, (2) the argument of a spec that names a file; None for other specs."""
    name = spec.partition(":")[0]
    return None if name in TASKS else re.fullmatch(r"(.+?\.py)(?::(.+))?", spec, re.DOTALL)


def _find(spec: str) -> tuple:
    """The function `make` that a spec names, and its argument."""
    name, colon, argument = spec.partition(":")
    if name in TASKS and bool(colon) == bool(argument):
        file = TASKS[name]  # digits.py has several tasks, so it is told which
        return importlib.import_module(f"tasks.{file}").make, argument if file == name else spec
    own = own_file(spec)
    if not own:
        raise TaskError(f"allowed is one of {USAGE}")
    path = Path(own[1]).resolve()
    names = runpy.run_path(str(path), run_name=f"tasks.{path}")  # see limits.describe
    if "make" not in names:
        raise TaskError("must define make(argument, seed, tokenizer)")
    return names["make"], own[2] or ""


def check_task(task: Task, tokenizer: Tokenizer) -> Task:
    """The task in this vocabulary; TaskError for the first thing that cannot be. Calls `reset` once
    for each split."""
    if not isinstance(task, Task):
        raise TaskError(f"make must return a reward.Task, not {task!r:.80}")
    for field in fields(Task):
        value, least = getattr(task, field.name), int(field.name != "observation_tokens")
        if field.type is int and (type(value) is not int or value < least):
            raise TaskError(f"{field.name} {value!r}: allowed is a whole number from {least} up")
    chat = len(tokenizer.encode_prompt(""))
    chat += bool(chat)  # a prompt's first characters may merge with those before it in another way
    task = replace(task, tokenizer=tokenizer, max_prompt_tokens=task.max_prompt_tokens + chat)
    ids = set(alphabet_of(task).tolist())
    if not ids or len(ids & {*tokenizer.alphabet}) < len(alphabet_of(task)):
        raise TaskError(
            f"alphabet {task.alphabet!r:.80}: "
            f"allowed are different ids in 0..{tokenizer.alphabet[-1]}"
        )
    stop = task.stop
    if stop is None:
        stop = frozenset(tokenizer.stop)
        stop = stop & ids or stop
    if not stop <= ids:
        raise TaskError(f"stop {set(stop)}: must be in the alphabet, or no answer can end")
    task = replace(task, stop=stop)
    for split in ("train", "eval"):
        problem_of(task, 0, split)
    return task


def problem_of(task: Task, index: int, split: str) -> dict:
    """Problem `index` of a task; TaskError, in one line, for one that cannot be used."""
    where = f"reset({index}, {split!r})"
    try:
        problem = task.reset(index, split)
        json.dumps(problem)  # it travels between processes and into checkpoints
    except Exception as error:
        raise TaskError(f"{where}: {limits.describe(error)}") from error
    prompt = problem.get("prompt") if isinstance(problem, dict) else None
    if not prompt or not isinstance(prompt, str):
        raise TaskError(
            f"{where} returned {problem!r:.80}, "
            "must be a dict with a 'prompt', a str that is not empty"
        )
    size = len(task.tokenizer.encode_prompt(prompt))
    if size > task.max_prompt_tokens:
        raise TaskError(f"{where}: max_prompt_tokens must be {size}, is {task.max_prompt_tokens}")
    return problem


def alphabet_of(task: Task) -> np.ndarray:
    """Token ids the policy may emit, int64 [V]: the task's own, or all that are text."""
    ids = task.tokenizer.alphabet if task.alphabet is None else task.alphabet
    return np.array(ids, np.int64)


def capacity_of(config: Config, task: Task) -> int:
    """Positions that an episode of a task may fill; raises UserError when it needs more."""
    capacity = config.context or task.context
    if not task.context <= capacity <= LONGEST_CONTEXT:
        raise UserError(
            f"--context {capacity}: must be at least {task.context} (the longest prompt of task "
            f"{config.task} has {task.max_prompt_tokens} tokens) and at most {LONGEST_CONTEXT}"
        )
    return capacity


# ---- verification ----


def _replay(task, problem, answers):
    rewards, done = [], False
    for turn in range(1, len(answers) + 1):
        if done:
            raise ValueError(f"{len(answers)} answers, but the episode ended after {turn - 1}")
        step = task.step(problem, answers[:turn])
        if not isinstance(step, Step):
            raise TypeError(f"step returned {step!r:.80}, must be a reward.Step")
        if not abs(step.reward) <= LARGEST_REWARD:  # NaN is not
            raise ValueError(f"the reward {step.reward} of turn {turn} is not finite in float32")
        rewards.append(float(step.reward))
        done = step.done
    return tuple(rewards)


def verify_group(
    group,
    task: Task,
    config,
    alive: Callable = lambda: None,
) -> list:
    """Verify every episode of a group (runtime/messages.py): see `verify`."""
    episodes = [tuple(split_answers(task, t.tokens, t.turns)) for t in group.trajectories]
    return verify(task, group.problem, episodes, config, alive)


def verify(
    task: Task,
    problem: dict,
    episodes: list,  # the answers of each
    config,
    alive: Callable = lambda: None,
) -> list:
    """Play episodes again from their text and judge them, each within the limits of `config` (see
    `ask`); nothing in the answers can raise.

    An episode that was cut off before its end keeps the rewards of the turns it had. Equal answers
    are verified once: `step` is a pure function.
    """
    different = list(dict.fromkeys(episodes))
    found = ask("verifier", partial(_replay, task, problem), different, config, alive)
    verdicts = {}
    for answers, (rewards, error) in zip(different, found, strict=True):
        rewards = rewards or (0.0,) * len(answers)
        verdicts[answers] = Verdict(sum(rewards), rewards, error)
    return [verdicts[answers] for answers in episodes]


def ask(
    who: str,
    function: Callable,  # of a request
    requests: list,
    config,
    alive: Callable = lambda: None,
    patience=math.inf,  # after so many timeouts the others are not asked any more
) -> list:
    """(result, None) for each request, or (None, why it failed): "WHO_timeout", "WHO_error: ...".
    Each may take as long as one limit; `alive` is called when that time has passed."""
    found = []
    late = None, f"{who}_timeout"
    while len(found) < len(requests):
        if found.count(late) == patience:
            return found + [late] * (len(requests) - len(found))
        first = len(found)
        try:
            # One limit for all: to arm one for each costs 8% of the episodes a second of `guess`.
            with limits.memory_limit(config.reward_memory):
                with limits.time_limit(config.reward_seconds):
                    for request in requests[first:]:
                        found.append((function(request), None))
        except limits.OutOfTime:
            alive()
            if len(found) == first:  # it had the whole limit; any other is asked again
                found.append(late)
        except (Exception, SystemExit) as error:  # what a task raises is that episode's failure
            found.append((None, f"{who}_error: {limits.describe(error)}"))
    return found


# ---- the talk of a generator with a task ----


@dataclass
class Environment:
    """How the generator talks to a task.

    respond([(problem, tokens, turns), ...]) -> for each request the observation's token ids, None
    when the episode is over, or the reason (str) why the environment failed ("env_error: ...",
    "env_timeout"): that episode is marked with it, counted, and generation goes on.
    """

    encode_prompt: Callable  # problem -> its prompt's token ids
    respond: Callable
    alphabet: np.ndarray  # int64 [V], the token ids that the policy may emit
    stop: frozenset  # token ids that end a turn
    turn_tokens: int  # most tokens in a turn; a problem may carry its own "turn_tokens"
    max_turns: int = 2**30  # after so many the episode is over, and nobody is asked
    beside: bool = False  # run `respond` in a thread, beside generation
    seconds: float = 2.0  # limit of an environment turn that runs beside


def make_environment(config: Config, task: Task) -> Environment:
    """Join a task (text) to the generator (token ids)."""
    return Environment(
        encode_prompt=lambda problem: task.tokenizer.encode_prompt(problem["prompt"]),
        respond=partial(respond, task, config),
        alphabet=alphabet_of(task),
        stop=task.stop,
        turn_tokens=task.turn_tokens,
        max_turns=task.max_turns,
        beside=task.beside,
        seconds=config.reward_seconds,
    )


def respond(task: Task, config: Config, requests: list) -> list:
    """The task's replies to all turns that ended at one token boundary: see `Environment`."""
    found = ask("env", lambda request: reply(task, *request), requests, config, patience=3)
    return [reason or observation for observation, reason in found]


def reply(task: Task, problem: dict, tokens, turns) -> list | None:
    """Token ids of the observation, None when the episode is over; whatever `step` raises."""
    step = task.step(problem, split_answers(task, tokens, turns))
    if step.done:
        return None
    observation = task.tokenizer.encode(step.observation)
    if len(observation) > task.observation_tokens:
        raise ValueError(
            f"observation {step.observation[:40]!r} has {len(observation)} tokens, "
            f"observation_tokens declares {task.observation_tokens}"
        )
    return observation


def split_answers(task: Task, tokens, turns) -> list:
    """The text of each turn (start, stop) in a trajectory's tokens, without its stop token.

    Bytes that are not UTF-8 become U+FFFD; ValueError for a token id outside the vocabulary.
    """
    ids = np.asarray(tokens).tolist()
    return [_text(tuple(ids[start:stop]), task.stop, task.tokenizer) for start, stop in turns]


@lru_cache(4096)  # earlier turns are read again at every later one
def _text(tokens, stop, tokenizer):
    ended = tokens and tokens[-1] in stop
    said = tokenizer.decode_bytes(tokens[:-1] if ended else tokens)
    return said.decode("utf-8", errors="replace")
