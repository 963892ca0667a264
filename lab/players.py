"""players.py: one process that plays all workers of a run, for parent.py.

It answers at once, each group in a delivery of its own, with episodes of real size that were made
and laid end to end before.
Left out: anything that a worker computes.
"""

import selectors
import time
from dataclasses import replace
from multiprocessing.connection import Connection

import numpy as np

from runtime.messages import Answer, Group, Judgement, Trajectory, lay_out
from runtime.pipes import Line

PROMPT = 8  # tokens


def episodes(start: int, problem: dict, size: int, tokens: int) -> Group:
    """A group as a generator would answer it, of about so many tokens each; its number is 0."""
    random, group = np.random.default_rng(0), Group(0, start, problem)
    for sample in range(size):
        total = PROMPT + int(random.integers(tokens // 2, 3 * tokens // 2))
        mask = np.arange(total) >= PROMPT
        episode = Trajectory(
            0,
            sample,
            noise_key=int(random.integers(2**62)),
            turns=[(PROMPT, total)],
            tokens=random.integers(0, 8, total, np.int32),
            loss_mask=mask,
            logprobs=np.where(mask, -random.random(total), 0.0).astype(np.float32),
            versions=np.where(mask, start, -1).astype(np.int32),
        )
        group.trajectories.append(episode)
    return group


class Player:
    """Plays one worker."""

    def __init__(self, role: str, pipe: Connection, size: int, tokens: int):
        self.role, self.size, self.tokens, self.made = role, size, tokens, {}
        self.line = Line(pipe, 0, arenas=True)
        self.line.status = {"busy": 1.0, "alive": 1.0}

    def answer(self, asked: Group) -> None:
        """Answer to one group at once."""
        number, start, now = asked.group_id, asked.start, time.monotonic()
        if self.role == "reward":
            verdicts = [(sample % 2, [sample % 2], None) for sample in range(self.size)]
            return self.line.send(Answer(number, judgement=Judgement(verdicts, now, 0.001)))
        if start not in self.made:
            group = episodes(start, asked.problem, self.size, self.tokens)
            self.made[start] = replace(group, laid=lay_out(group.trajectories))
        events = [(now, kind, number, start, {"size": 8}) for kind in ("start", "finish")]
        group = replace(self.made[start], group_id=number)
        self.line.send(Answer(number, group, events=events))


def play(lines: list, size: int, tokens: int) -> None:
    """The process: it ends with the parent. lines: role and pipe of each worker."""
    players = [Player(*line, size, tokens) for line in lines]
    selector = selectors.DefaultSelector()
    for player in players:
        selector.register(player.line.connection, selectors.EVENT_READ, player)
    while True:
        for player in players:
            player.line.beat()
        for key, _ in selector.select(0.2):
            for asked in key.data.line.receive(0.0):
                key.data.answer(asked)
