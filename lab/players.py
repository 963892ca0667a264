"""players.py: one process that plays all workers of a run, for parent.py.

It answers at once, each group in a delivery of its own, with episodes of real size. They were
packed before: only the number of the group is put in, so an answer costs next to nothing.
Left out: anything that a worker computes.
"""

import selectors
import struct
import time
import zlib
from multiprocessing.connection import Connection

import numpy as np

from runtime.arena import FULL, Arena
from runtime.messages import (
    Answer,
    Group,
    Judgement,
    Trajectory,
    lay_out,
    pack_messages,
    place_group,
)
from runtime.pipes import BEAT_SECONDS, Line, announce

# stand for the number of a group, and for the place of its arrays, in what was packed before
MARK, OFFSET = 0x5EED1DEA, 0x5EED1DEB
PROMPT = 8  # tokens


def episodes(start: int, problem: dict, size: int, tokens: int) -> Group:
    """A group as a generator would answer it, of about so many tokens each; MARK is its number."""
    random, group = np.random.default_rng(0), Group(MARK, start, problem)
    for sample in range(size):
        total = PROMPT + int(random.integers(tokens // 2, 3 * tokens // 2))
        mask = np.arange(total) >= PROMPT
        episode = Trajectory(
            MARK,
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
    """Answers of one worker to what it is asked; packed once for each version at which groups
    start."""

    def __init__(self, role: str, pipe: Connection, size: int, tokens: int):
        self.role, self.size, self.tokens = role, size, tokens
        self.line, self.arena, self.packed = Line(pipe, 0), None, {}

    def answer(self, asked: Group) -> None:
        """Send the answer to one group; arrays of a generated one go into the arena."""
        if asked.start not in self.packed:
            self.packed[asked.start] = self.pack(asked)
        data, arrays = self.packed[asked.start]
        data = data.replace(struct.pack("<i", MARK), struct.pack("<i", asked.group_id))
        if arrays:
            if not self.arena or self.arena.end > FULL:
                self.arena = Arena()
                announce(self.arena, self.line.connection)
            offset = self.arena.append(arrays)
            data = data.replace(struct.pack("<i", OFFSET), struct.pack("<i", offset))
        self.line.connection.send_bytes(zlib.crc32(data).to_bytes(4, "big") + data)

    def pack(self, asked: Group) -> tuple:
        """What a worker would answer, packed, and the arrays of its group."""
        now, arrays = time.monotonic(), None
        if self.role == "reward":
            verdicts = [(sample % 2, [sample % 2], None) for sample in range(self.size)]
            answer = Answer(MARK, judgement=Judgement(verdicts, now, 0.001))
        else:
            events = [(now, kind, MARK, asked.start, {"size": 8}) for kind in ("start", "finish")]
            group = episodes(asked.start, asked.problem, self.size, self.tokens)
            _, arrays, _ = lay_out(group.trajectories)
            answer = Answer(
                MARK, place_group(group, Arena())._replace(offset=OFFSET), events=events
            )
        return pack_messages(({"busy": 1.0, "alive": 1.0}, [answer]))[4:], arrays


def play(lines: list, size: int, tokens: int) -> None:
    """The process: it ends with the parent. lines: role and pipe of each worker."""
    players = [Player(*line, size, tokens) for line in lines]
    selector, said = selectors.DefaultSelector(), 0.0
    for player in players:
        selector.register(player.line.connection, selectors.EVENT_READ, player)
    while True:
        if time.monotonic() - said > BEAT_SECONDS:  # every worker lives
            said = time.monotonic()
            for player in players:
                player.line.send()
        for key, _ in selector.select(0.2):
            for asked in key.data.line.receive(0.0):
                key.data.answer(asked)
