"""What the processes of test_processes.py run. Nothing here imports torch: they start at once.

As a script this file is a parent with workers: `toys.py FOLDER`.
"""

import os
import signal
import socket
import struct
import sys
import time
from pathlib import Path

import numpy as np
from runtime.arena import Arena
from runtime.processes import Pool

from runtime import pipes
from runtime.messages import (
    ARRAYS,
    PLAIN,
    Answer,
    Group,
    Judgement,
    Trajectory,
    lay_out,
    pack_messages,
    pieces_of,
    place_group,
    plain_of,
    stray,
)
from runtime.pipes import Line, announce


def group_to_parts(group: Group) -> tuple[dict, dict[str, np.ndarray]]:
    """A group as plain data with names, to be spoiled, and the arrays laid end to end."""
    lengths, laid, _ = lay_out(group.trajectories)
    header = {name: getattr(group, name) for name in ("group_id", "start", "problem")}
    header["fields"] = [dict(zip(PLAIN, plain_of(t), strict=True)) for t in group.trajectories]
    header["lengths"] = dict(zip(ARRAYS, lengths, strict=False))  # none of no episodes
    return header, dict(zip(ARRAYS, laid, strict=False))


def group_from_parts(header: dict, arrays: dict[str, np.ndarray]) -> Group:
    """The inverse of `group_to_parts`."""
    episodes = [Trajectory(**plain) for plain in header["fields"]]
    for name, array in arrays.items():
        pieces = pieces_of(array, header["lengths"][name])
        for trajectory, piece in zip(episodes, pieces, strict=False):
            setattr(trajectory, name, piece)
    return Group(header["group_id"], header["start"], header["problem"], episodes)


def answer_with(group: Group) -> Answer:
    return Answer(group.group_id, group, Judgement([], 0.0, 0.0))


def episodes(group: Group, tokens: int) -> list[Trajectory]:
    """Two episodes with anything in all of their arrays."""
    chance = np.random.default_rng(group.group_id)
    arrays = [
        {name: chance.integers(0, 2, tokens + i).astype(kind) for name, kind in ARRAYS.items()}
        for i in range(2)
    ]
    return [Trajectory(group.group_id, i, 0, **own) for i, own in enumerate(arrays)]


def toy(line: Line, *extra) -> None:
    """Does to each group what its problem says: answer, mostly."""
    pipes.BEAT_SECONDS = 0.1
    blocked = signal.SIGINT in signal.pthread_sigmask(signal.SIG_BLOCK, [])
    line.status = {"pid": os.getpid(), "extra": extra, "blocked": blocked}
    line.send()
    while True:
        line.beat()
        for group in line.receive(0.05):
            do(line, group, group.problem.get("do", "answer"))


def do(line: Line, group: Group, what: str) -> None:
    answer = answer_with(group)
    delivery = pack_messages(({}, [] if group.trajectories else [answer]))
    if what == "answer":
        line.send(answer)
    elif what == "answer twice":
        line.send(answer, answer)
    elif what == "answer for another":
        line.send(answer_with(Group(99, group.start, {})))
    elif what == "answer of another start":
        group.start -= 1
        line.send(answer)
    elif what == "judge":
        line.send(answer._replace(group=None))
    elif what == "make":  # and another role goes on
        group.problem["do"] = group.problem.get("then", "judge")
        line.send(answer._replace(judgement=None))
    elif what == "generate":
        group.problem["do"] = "count"
        if group.problem.get("impatient"):
            socket.setdefaulttimeout(0.5)
        group.trajectories = episodes(group, group.problem["tokens"])
        if group.problem.get("spoilt"):
            group.trajectories[1].logprobs = group.trajectories[1].logprobs.astype(np.float64)
        answer = answer._replace(judgement=None)
        if group.problem.get("batch"):  # four in a delivery
            line.kept = [*getattr(line, "kept", ()), answer]
            if len(line.kept) == 4:
                line.send(*line.kept)
            return
        line.send(answer)
        if group.problem.get("impatient"):
            line.status["blocking"] = os.get_blocking(line.connection.fileno())
            line.send()
        if group.problem.get("leave"):
            os.kill(os.getpid(), signal.SIGKILL)
    elif what == "count":  # what was generated, from its tokens
        while "until" in group.problem and not Path(group.problem["until"]).exists():
            time.sleep(0.02)
        verdicts = [(float(t.tokens.sum()), (), None) for t in group.trajectories]
        line.send(Answer(group.group_id, judgement=Judgement(verdicts, 0.0, 0.0)))
    elif what == "elsewhere":  # arrays where there is nothing
        group.trajectories = episodes(group, 9)
        placed = place_group(group, Arena())
        announce(Arena(), line.connection)
        line.arenas = False
        line.send(answer._replace(group=placed))
    elif what == "garbage":
        line.connection.send_bytes(b"this is no message")
    elif what == "torn":
        line.connection.send_bytes(delivery[:-7])
    elif what == "half":
        os.write(line.connection.fileno(), struct.pack("!i", len(delivery)) + delivery[:9])
        os.kill(os.getpid(), signal.SIGKILL)
    elif what == "stop in the middle":
        os.write(line.connection.fileno(), struct.pack("!i", 1000) + b"the first bytes of 1000")
        os.kill(os.getpid(), signal.SIGSTOP)
    elif what == "no list":
        line.connection.send_bytes(pack_messages(7))
    elif what == "no status":
        line.connection.send_bytes(pack_messages((7, [])))
    elif what == "nothing":
        line.send(None)
    elif what == "wait":
        while not Path(group.problem["until"]).exists():
            line.beat()
            time.sleep(0.02)
        line.send(answer)
    elif what == "raise":
        raise ValueError("seven")
    elif what == "return":
        raise SystemExit(0)


def short_lived(line: Line) -> None:
    line.send()
    print("a last word")
    sys.stdout.flush()
    os._exit(3)


def mute(line: Line) -> None:
    time.sleep(600)


def pool_of(roles: dict, logs: Path, restarts: int = 2, silence: float = 60.0) -> Pool:
    """A pool to whose workers a group is sound unless its problem has a flaw."""

    def flaw(answer, work: dict) -> str | None:
        problem = answer.group.problem if answer.group else {}
        # AttributeError where the flaw is a text
        return stray(answer, work) or problem.get("flaw", {}).get(1)

    return Pool(roles, logs=logs, restarts=restarts, silence=silence, flaw=flaw)


def wait_for(condition, seconds: float = 60.0):
    """What `condition` returns as soon as it is true."""
    deadline = time.monotonic() + seconds
    while not (found := condition()):
        assert time.monotonic() < deadline, f"not within {seconds} s"
        time.sleep(0.01)
    return found


def started(pool: Pool) -> dict[str, int]:
    """Wait until every worker has spoken: name -> pid."""
    workers = list(pool.workers.values())
    return {w.name: wait_for(lambda w=w: w.status.get("pid")) for w in workers}


if __name__ == "__main__":
    import toys  # a worker imports what it runs from a module

    parent = pool_of({"toy": (toys.toy, 3)}, Path(sys.argv[1]), restarts=1)
    os.kill(started(parent)["toy-2"], signal.SIGKILL)  # a worker that was restarted dies, too
    wait_for(lambda: parent.receive(0.1))
    print(*started(parent).values(), flush=True)
    time.sleep(600)
