"""environment.py: how a generator, which knows token ids, talks with a task, which knows text.

Left out: what a task is (reward.py), processes (runtime/workers.py).
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import numpy as np

from reward import Task, advance, alphabet_of, ask, forget, split_answers
from runtime.config import Config
from runtime.messages import Call, Result


class Reply(NamedTuple):
    """What becomes of an episode after a turn."""

    observation: list | None  # token ids to append; None: the episode is over
    reward: float | None  # of the turn; None: to be judged at the end
    failure: str = ""  # "env_error: ...", "env_timeout": it is marked with that, and counted


@dataclass
class Environment:
    """How the generator talks to a task.

    respond([(problem, tokens, turns, key), ...]) -> a `Reply` to each request, at once; key: (group
    id, sample index). An environment that is `outside` is sent `call(request)` instead, and while
    the generator goes on, an answer comes that `read(answer)` makes a reply of.
    """

    encode_prompt: Callable  # problem -> its prompt's token ids
    respond: Callable
    alphabet: np.ndarray  # int64 [V], the token ids that the policy may emit
    stop: frozenset  # token ids that end a turn
    turn_tokens: int  # most tokens in a turn; a problem may carry its own "turn_tokens"
    max_turns: int = 2**30  # after so many the episode is over
    judges_all: bool = False  # it is asked after the last turn, too
    outside: bool = False
    call: Callable = lambda request: request
    read: Callable = lambda answer: answer
    over: Callable = lambda key: []  # an episode has ended without its word: calls to be sent


def make_environment(config: Config, task: Task, outside: bool = False) -> Environment:
    """Join a task (text) to the generator (token ids). outside: ask nothing in this process."""
    states: dict = {}

    def over(key) -> list:
        if task.outside or outside:
            return [Call(key, {}, None)]
        ask("env", partial(forget, task, states), [key] if key in states else [], config)
        return []

    return Environment(
        encode_prompt=lambda problem: task.tokenizer.encode_prompt(problem["prompt"]),
        respond=partial(respond, task, config, states),
        alphabet=alphabet_of(task),
        stop=task.stop,
        turn_tokens=task.turn_tokens,
        max_turns=task.max_turns,
        judges_all=task.outside or task.open is not None,
        outside=task.outside or outside,
        call=partial(call_of, task),
        read=partial(reply_of, task),
        over=over,
    )


def respond(task: Task, config: Config, states: dict, requests: list) -> list:
    """The task's replies to all turns that ended at one token boundary."""

    def talk(request):
        problem, tokens, turns, key = request
        step = advance(task, states, key, problem, split_answers(task, tokens, turns))
        if step.done:
            forget(task, states, key)
        return reply_of(task, Result(key, *step))

    found = ask("env", talk, requests, config, patience=3)
    return [reply or Reply(None, None, reason) for reply, reason in found]


def call_of(task: Task, request: tuple) -> Call:
    """A request as a message to another process."""
    problem, tokens, turns, key = request
    return Call(key, problem, tuple(split_answers(task, tokens, turns)))


def reply_of(task: Task, result: Result) -> Reply:
    """An environment's answer in token ids, or the failure that it cannot be read."""
    if result.failure or result.done:
        return Reply(None, result.reward, result.failure)
    text = result.observation
    try:
        observation = task.tokenizer.encode(text)
    except ValueError as error:  # half a character cannot be
        return Reply(None, None, f"env_error: ValueError: observation {text[:40]!r}: {error}")
    if len(observation) <= task.observation_tokens:
        return Reply(observation, result.reward)
    most = f"{len(observation)} tokens, observation_tokens declares {task.observation_tokens}"
    return Reply(None, None, f"env_error: ValueError: observation {text[:40]!r} has {most}")
