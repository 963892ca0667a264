"""players.py: one process that plays all workers of a run, for parent.py.

It answers at once, each group in a delivery of its own, with episodes of real size. They were
packed before: only the number of the group is put in, so an answer costs next to nothing.
Left out: anything that a worker computes.
"""

import selectors
import struct
import time
from contextlib import suppress

import numpy as np

from runtime.messages import Answer, Group, Judgement, Trajectory, pack_messages, seal, unpack_messages
from runtime.pipes import BEAT_SECONDS, next_delivery

MARK = 0x5EED1DEA  # stands for the number of a group in what was packed before
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
    """Answers to what workers are asked; packed once for each version at which groups start."""

    def __init__(self, size: int, tokens: int):
        self.size, self.tokens, self.packed = size, tokens, {}

    def answer(self, role: str, asked: Group) -> bytes:
        """A delivery with the answer to one group."""
        key = role, asked.start
        if key not in self.packed:
            message = {"busy": 1.0, "alive": 1.0}, [self.example(role, asked)]
            self.packed[key] = pack_messages(message)[8:]
        number = struct.pack("<i", asked.group_id)
        data = self.packed[key].replace(struct.pack("<i", MARK), number)
        return seal(data) + data

    def example(self, role: str, asked: Group) -> Answer:
        """What a worker would answer; MARK is the number of the group."""
        now = time.monotonic()
        if role == "reward":
            verdicts = [(sample % 2, [sample % 2], None) for sample in range(self.size)]
            return Answer(MARK, judgement=Judgement(verdicts, now, 0.001))
        group = episodes(asked.start, asked.problem, self.size, self.tokens)
        events = [(now, kind, MARK, asked.start, {"size": 8}) for kind in ("start", "finish")]
        return Answer(MARK, group, events=events)


def play(lines: list, size: int, tokens: int) -> None:
    """The process: it ends with the parent. lines: role and pipe of each worker."""
    player, selector, said = Player(size, tokens), selectors.DefaultSelector(), 0.0
    for role, pipe in lines:
        selector.register(pipe, selectors.EVENT_READ, role)
    while selector.get_map():
        if time.monotonic() - said > BEAT_SECONDS:  # every worker lives
            said = time.monotonic()
            for _, pipe in lines:
                with suppress(OSError):
                    pipe.send_bytes(pack_messages(({}, ())))
        for key, _ in selector.select(0.2):
            if delivery := next_delivery(key.fileobj):
                for asked in unpack_messages(delivery):
                    with suppress(OSError):
                        key.fileobj.send_bytes(player.answer(key.data, asked))
            else:
                selector.unregister(key.fileobj)
