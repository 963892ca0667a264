"""exam.py: how good a policy is, with the task's code in a process of its own.

`evaluate` runs where the weights are changed, so it cannot race with training. A task that hangs in
C, forks or ends its process must not do so there: a `Host` has one reward worker as a child, with
whom alone it talks. The synchronous trainer has its environments outside there, too. A child that
is late or gone costs the group that it verified, and is replaced.
"""

import atexit
import contextlib
import os
import signal
import subprocess
import sys
import time
from collections import Counter
from dataclasses import replace
from multiprocessing import Pipe
from pathlib import Path

import numpy as np

from buffer import by_task
from reward import Task, Verdict, capacity_of, problem_of
from rollout import Generator, generate
from runtime.config import Config, TrainingStopped
from runtime.messages import (
    Answer,
    Group,
    Judgement,
    apply_verdicts,
    pack_messages,
    unpack_messages,
)
from tasks.environment import make_environment

START_SECONDS = 60.0  # a child imports, and makes the task
GRACE_SECONDS = 2.0  # beyond the task's own limits; it says that it lives every 1.5 s


class Host:
    """One reward worker, as a child; it is started when it is needed."""

    def __init__(self, config: Config, log: Path):
        # an exam is judged by the task, and nobody learns from it
        self.config, self.log = replace(config, teacher="", reward_model=""), log
        self.deaths = 0  # of children, in this evaluation
        self.status, self.sessions = {}, Counter()  # of this child, and of those before
        self.work: dict = {}  # what the child has not answered yet, the oldest first
        self.process = None
        self.answered = 0.0  # when
        self.deadline = 0.0  # of the next word from the child
        atexit.register(self.close)  # however the run ends

    def start(self) -> None:
        """Start a child, and give it what the last one had."""
        self.pipe, there = Pipe()
        code = f"import sys; sys.path[:] = {sys.path}; from runtime.sessions import serve; serve()"
        with self.log.open("ab") as log, there:
            streams = {"stdin": there, "stdout": log, "stderr": log}
            command = [sys.executable, "-c", code]
            self.process = subprocess.Popen(command, start_new_session=True, **streams)
        self.deadline = time.monotonic() + START_SECONDS
        self.pipe.send((os.getpid(), self.config))
        self.pipe.send_bytes(pack_messages(list(self.work.values())))

    def close(self) -> int | None:
        """End the child, and whatever it has forked; returns its exit code."""
        if not self.process:
            return None
        self.sessions.update(self.status)
        self.status = {}
        self.pipe.close()  # it closes its sessions, and ends
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(0.0 if self.work else GRACE_SECONDS)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        process, self.process = self.process, None
        return process.wait()

    def send(self, messages: list) -> None:
        """Give the child groups to verify, and calls of environments."""
        if not self.work:
            self.answered = time.monotonic()
        for message in messages:
            if isinstance(message, Group):
                self.work[message.group_id] = message
            elif message.answers is not None:
                self.work[message.key] = message
        if messages and self.process:  # or else `receive` starts one, which gets all of them
            with contextlib.suppress(OSError):  # it is gone: `receive` will see
                self.pipe.send_bytes(pack_messages(messages))

    def receive(self, seconds: float) -> list:
        """What was answered, and what has failed; nothing after `seconds`. TrainingStopped when too
        many children are lost, or the task has not answered for too long."""
        if not self.work:
            return []
        if not self.process:
            self.start()
        try:
            there = self.pipe.poll(seconds)
            now = time.monotonic()
            if now - self.answered > self.config.stall:
                waited = f"{now - self.answered:.0f} s"
                raise TrainingStopped(f"evaluation: no answer of the task for {waited}")
            if not there:
                if now > self.deadline:
                    raise TimeoutError
                return []
            self.status, answers = unpack_messages(self.pipe.recv_bytes())
            self.deadline = now + 2 * self.config.reward_seconds + GRACE_SECONDS
        except (EOFError, OSError) as error:  # TimeoutError is an OSError, too
            answers = self.lost(error)
        for answer in answers:
            self.work.pop(answer.group_id if isinstance(answer, Answer) else answer.key, None)
        if answers:
            self.answered = time.monotonic()
        return answers

    def lost(self, error: Exception) -> list:
        """The child is lost; returns what has failed by that: the group that it was verifying."""
        code = self.close()
        reason = f"error: it ended its process (exit code {code})"
        if isinstance(error, TimeoutError):
            reason = "timeout: it hung in a call that no alarm interrupts"
        self.deaths += 1
        if self.deaths > self.config.restarts:
            text = f"evaluation: the task has lost {self.deaths} processes, the last by {reason}"
            raise TrainingStopped(f"{text} (--restarts {self.config.restarts}; log: {self.log})")
        groups = [group for group in self.work.values() if isinstance(group, Group)]
        verdict, answers = Verdict(0.0, (), f"verifier_{reason}"), []
        for group in groups[:1]:
            judgement = Judgement([verdict] * len(group.trajectories), began=0.0, seconds=0.0)
            answers.append(Answer(group.group_id, judgement=judgement))
        return answers


def evaluate(learner, config: Config, task: Task, host: Host) -> dict:
    """Answers to every held-out problem, by the weights as they are between two steps: a greedy
    one, or with --eval-samples several, sampled as in training but with other noise.

    Returns `solved` (share), `reward` (mean) and `turns` (mean); a failed episode counts as a
    reward of 0, and `failures` tells how many there are of each kind, with the words of the first.
    Of several tasks it is the mean of what `tasks` has of each.
    """
    host.deaths = 0  # a budget for each evaluation
    several, parts = 0, task.parts or (task,)
    K = len(parts)
    ids = [i * K + kind for kind, part in enumerate(parts) for i in range(part.eval_size)]
    generator = Generator(
        learner.model,
        make_environment(config, task, outside=True),
        slots=min(config.slots, len(ids)),
        capacity=capacity_of(config, task),
        group_size=several or 1,
        seed=~config.seed,  # below 0: that of no run
        temperature=config.temperature if several else 0.0,
    )
    groups = [Group(i, 0, problem_of(task, i, "eval")) for i in ids]
    groups = generate(generator, groups, host)
    verify_alone(groups, host, K)
    results = {}
    for part, own in zip(parts, by_task(groups, task.shares), strict=True):
        results[part.name] = result_of(part, [t for group in own for t in group.trajectories])
    if not task.parts:
        return results[task.name]
    mean, failures = {}, {}
    for key in ("solved", "reward", "turns"):
        mean[key] = float(np.mean([result[key] for result in results.values()]))
    for result in results.values():
        failures |= result["failures"]
    return mean | {"failures": failures, "tasks": results}


def verify_alone(groups: list[Group], host: Host, K: int = 1) -> None:
    """Verify each sample alone, so that one that ends the child costs no other; K: of tasks."""
    single = {}
    for group in groups:
        for t in group.trajectories:
            number = len(single) * K + group.group_id % K
            single[number] = replace(group, group_id=number, trajectories=[t])
    host.send(list(single.values()))
    while host.work:
        for answer in host.receive(0.5):
            apply_verdicts(single[answer.group_id], answer.judgement.verdicts)


def result_of(task: Task, episodes: list) -> dict:
    """What one task's part of an evaluation says."""
    rewards = np.array([0.0 if t.failed else t.reward for t in episodes])
    failures = {}
    for t in episodes:
        if t.failed:
            count, first = failures.get(t.finish, (0, t.failure))
            failures[t.finish] = count + 1, first
    return {
        "solved": float(np.mean(rewards >= task.solved)),
        "reward": float(np.mean(rewards)),
        "turns": float(np.mean([len(t.turns) for t in episodes])),
        "failures": failures,
    }
