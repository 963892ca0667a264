"""reward.py: the protocol of tasks, and verification: from the text of an episode to its rewards.

A task is two pure functions. `reset(index, split)` gives a problem, plain JSON data with a
"prompt". `step(problem, answers)` judges the newest answer, given all answers so far. A task may
keep a state instead (a tool's session, a sandbox): `open(problem)`, `step(state, answer)`,
`close(state)`. A state is no more than a memory of the answers so far: where it is lost, it is made
again from them. So a prompt cursor is one integer, and an episode can be judged from its text.

A turn is rewarded when it happens. What nobody has judged then (the only answer of most tasks) is
verified at the end (`verify_group`).

A task's file has one function, `make(argument, seed, tokenizer) -> Task`, in tasks/ or anywhere
else: `--task path/to/file.py` or `--task path/to/file.py:argument` needs no change here.
Copy tasks/guess.py. What a task writes and reads is text; token ids appear only as sizes and
alphabet, in the vocabulary of the run: `tokenizer.encode(text)`, `tokenizer.end`.
Never give model output to `eval`, to an unbounded number parser or to a regular expression that
backtracks.
Left out: several tasks in one (methods/mixture.py), learned rewards (methods/reward_model.py),
processes (runtime/verifier.py).

`python bench.py episode [SPEC ...]` prints a sample episode of each task.
"""

import importlib
import json
import math
import pickle
import re
import runpy
import sys
from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from functools import lru_cache, partial
from pathlib import Path
from typing import NamedTuple

import numpy as np

from runtime.config import LONGEST_CONTEXT, Config, UserError, require
from runtime.tokenizer import Tokenizer, own_tokenizer, tokenizer_of
from tasks import limits

LARGEST_REWARD = 1e9  # so that sums, and squares of a whole group, are finite in float32


class Step(NamedTuple):
    """What the environment says to an answer."""

    observation: str | None  # text to append, after the last turn nobody reads it; None when done
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
    step: Callable  # (problem, answers so far, the newest last) -> Step; with `open`, see there
    alphabet: tuple | None  # token ids the policy may emit; None: all that are text
    max_prompt_tokens: int
    turn_tokens: int  # most tokens the policy may generate in a turn, its stop token included
    max_turns: int = 1  # `step` of the last one is called when the episode is verified
    # token ids that end a turn (None: the tokenizer's); empty: each turn has `turn_tokens` tokens
    stop: frozenset | None = None
    observation_tokens: int = 0  # most tokens of one observation; needed with several turns
    eval_size: int = 256  # held out: reset(0 .. eval_size - 1, "eval"), the same for every seed
    solved: float = 1.0  # an episode with this reward or more counts as solved
    steps: int = 300  # optimizer steps that a small model needs to learn it; default of --steps
    open: Callable | None = None  # problem -> a state; then `step` is (state, answer) -> Step
    close: Callable = lambda state: None  # however the episode has ended
    outside: bool = False  # slow or unsafe: its steps run in a reward worker
    solve: Callable = lambda problem: [problem.get("answer", "?")]  # best answers, for samples
    name: str = ""  # the spec; `make_task` writes it
    tokenizer: Tokenizer | None = None  # of the run; `check_task` writes it
    longest: int = 0  # tokens that every episode fits into; 0: as many as its sizes allow

    @property
    def context(self) -> int:
        """The number of tokens that every episode fits into."""
        if self.longest:
            return self.longest
        turn = self.turn_tokens + self.observation_tokens
        return self.max_prompt_tokens + self.max_turns * turn - self.observation_tokens


# ---- from a spec to a task ----


# the name in a spec -> its file in tasks/
TASKS = dict.fromkeys(("reverse", "sort", "sum"), "digits")
TASKS |= {name: name for name in ("guess", "recall", "hops", "add", "jsonl", "gym")}


USAGE = """guess, reverse[:2..64], sort[:2..64], sum[:2..1024], recall[:16..16384], \
hops[:1..8[:0..0.5]], add[:1..9], \
jsonl:PATH[:exact|numeric[:parsable]|similar][:any][:TOKENS 1..16384], \
gym:NAME[:key=value,...], path/to/file.py[:ARGUMENT]"""


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
    """The configured task, or several in one, in the vocabulary of the model; UserError."""
    tokenizer = tokenizer_of(config)
    tasks = [make_task(spec, config.seed, tokenizer) for spec in specs_of(config.task)]
    if len(tasks) == 1:
        require(not config.ratio, f"--ratio {config.ratio}: must be left out with one task")
        return tasks[0]
    return importlib.import_module("methods.mixture").mixture_of(tasks, config.ratio)


def specs_of(text: str) -> list:
    """The specs in a comma-separated list; a path may have commas of its own."""
    names = "|".join(TASKS)
    return re.split(rf",(?=(?:{names})(?:[:,]|$)|[^,]+\.py(?:[:,]|$))", text)


def own_file(spec: str) -> re.Match | None:
    """(1) the file, (2) the argument of a spec that names a file; None for other specs."""
    name = spec.partition(":")[0]
    return None if name in TASKS else re.fullmatch(r"(.+?\.py)(?::(.+))?", spec, re.DOTALL)


def own_files(text: str) -> bool:
    """Whether one of the tasks in a list is a file."""
    return any(own_file(spec) for spec in specs_of(text))


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
    sys.path.append(str(path.parent))  # it may import what lies beside it
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
        value = getattr(task, field.name)
        least = int(field.name not in ("observation_tokens", "longest"))
        if field.type is int and (type(value) is not int or value < least):
            raise TaskError(f"{field.name} {value!r}: allowed is a whole number from {least} up")
    chat = len(tokenizer.encode_prompt(""))
    chat += bool(chat)  # a prompt's first characters may merge with those before it in another way
    task = replace(task, tokenizer=tokenizer, max_prompt_tokens=task.max_prompt_tokens + chat)
    if task.context > LONGEST_CONTEXT:
        raise TaskError(f"an episode of {task.context} tokens: allowed are {LONGEST_CONTEXT}")
    ids = set(alphabet_of(task).tolist())
    if not ids or len(ids & {*tokenizer.alphabet}) < len(alphabet_of(task)):
        raise TaskError(
            f"alphabet {task.alphabet!r:.80}: "
            f"allowed are different ids in 0..{tokenizer.alphabet[-1]}"
        )
    usual = frozenset(tokenizer.stop)
    stop = usual & ids or usual if task.stop is None else frozenset(task.stop)
    if not stop <= ids:
        raise TaskError(f"stop {set(stop)}: must be in the alphabet, or no answer can end")
    task = replace(task, stop=stop)
    for split in ("train", "eval"):
        problem_of(task, 0, split)
    return task


def problem_of(task: Task, group_id: int, split: str) -> dict:
    """The problem of a group; TaskError, in one line, for one that cannot be used."""
    where = f"reset({group_id}, {split!r})"
    try:
        problem = task.reset(group_id, split)
        json.dumps(problem), pickle.dumps(problem)  # plain data, which travels between processes
    except (Exception, SystemExit) as error:
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


# ---- an episode: turns, and verification at its end ----


def advance(task: Task, states: dict, key, problem: dict, answers) -> Step:
    """What the environment says to the newest answer. `states` has the states of episodes by key,
    each with the number of answers that it has seen; one that is missing is made again."""
    if task.open is None:
        return checked(task.step(problem, list(answers)))
    if key in states and states[key][1] >= len(answers):  # it has seen more: it begins anew
        forget(task, states, key)
    # a step that raises leaves a state that nobody knows: it is not kept
    state, seen = states.pop(key) if key in states else (task.open(problem), 0)
    try:
        for answer in answers[seen:]:
            step = checked(task.step(state, answer))
    except BaseException:
        task.close(state)
        raise
    states[key] = state, len(answers)
    return step


def forget(task: Task, states: dict, key) -> None:
    """An episode is over: close its state."""
    if key in states:
        task.close(states.pop(key)[0])


def checked(step) -> Step:
    """What a task has returned; TypeError or ValueError for what cannot be."""
    if not isinstance(step, Step):
        raise TypeError(f"step returned {step!r:.80}, must be a reward.Step")
    if not abs(float(step.reward)) <= LARGEST_REWARD:  # NaN is not
        raise ValueError(f"the reward {step.reward} is not between -1e9 and 1e9")
    if not step.done and not isinstance(step.observation, str):
        raise TypeError(f"the observation {step.observation!r:.80} must be a str")
    return step


def complete(task: Task, problem: dict, episode: tuple) -> tuple:
    """The rewards of all turns. episode: its answers, and the rewards of the first turns."""
    answers, rewards = episode
    states: dict = {}
    try:
        for turn in range(len(rewards) + 1, len(answers) + 1):
            step = advance(task, states, None, problem, answers[:turn])
            rewards += (float(step.reward),)
            if step.done and turn < len(answers):
                raise ValueError(f"{len(answers)} answers, but the episode ended after {turn}")
        return rewards
    finally:
        forget(task, states, None)


def verify_group(
    group,
    task: Task,
    config,
    alive: Callable = lambda: None,
) -> list:
    """Verdicts on the episodes of a group (runtime/messages.py). A turn that has its reward is not
    judged again, and a failed episode is not judged at all."""
    episodes = []
    for t in group.trajectories:
        answers = () if t.failed else tuple(split_answers(task, t.tokens, t.turns))
        episodes.append((answers, () if t.failed else tuple(t.turn_rewards)))
    return verify(task, group.problem, episodes, config, alive)


def verify(
    task: Task,
    problem: dict,
    episodes: list,  # of each: the answers, and the rewards of the first turns
    config,
    alive: Callable = lambda: None,
) -> list:
    """Judge what is left of episodes, each within the limits of `config` (see `ask`); nothing in
    the answers can raise.

    An episode that was cut off before its end keeps the rewards of the turns it had. Equal answers
    are verified once: `step` is a pure function.
    """
    different = list(dict.fromkeys(episodes))
    found = ask("verifier", partial(complete, task, problem), different, config, alive)
    verdicts = {}
    for episode, (rewards, error) in zip(different, found, strict=True):
        rewards = rewards or (0.0,) * len(episode[0])
        verdicts[episode] = Verdict(float(sum(rewards)), rewards, error)
    return [verdicts[episode] for episode in episodes]


def ask(
    who: str,
    function: Callable,  # of a request
    requests: list,
    config,
    alive: Callable = lambda: None,
    patience=math.inf,  # after so many timeouts the others are not asked any more
) -> list:
    """(result, None) for each request, or (None, why it failed): "WHO_timeout", "WHO_error: ...".
    Each may take the whole limit; `alive` tells that this process lives, after each time limit."""
    found = []
    late = None, f"{who}_timeout"
    while len(found) < len(requests):
        if found.count(late) == patience:
            return found + [late] * (len(requests) - len(found))
        first = len(found)
        try:
            # One alarm for all: to set one for each costs 8% of the episodes a second of `guess`.
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


# ---- from tokens to text ----


def split_answers(task: Task, tokens, turns) -> list:
    """The text of each turn (start, stop) in a trajectory's tokens, without its stop token.

    Bytes that are not UTF-8 become U+FFFD; almost any error for a token id outside the vocabulary.
    """
    ids = np.asarray(tokens).tolist()
    return [_text(tuple(ids[start:stop]), task.stop, task.tokenizer) for start, stop in turns]


@lru_cache(4096)  # earlier turns are read again at every later one
def _text(tokens, stop, tokenizer):
    ended = tokens and tokens[-1] in stop
    said = tokenizer.decode_bytes(tokens[:-1] if ended else tokens)
    return said.decode("utf-8", errors="replace")
