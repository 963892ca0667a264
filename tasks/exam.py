"""exam.py: how good a policy is, with the task's code in a process of its own.

`evaluate` runs where the weights are changed, so it cannot race with training. A task that hangs in
C, forks or ends its process must not do so there: an `Examiner` asks a child, one request after the
other. A child that is late or gone costs that request, and is replaced.
Left out: training, where rollout and reward workers run the task (processes.py).
"""

import atexit
import contextlib
import os
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import TimeoutError as Late
from dataclasses import replace
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from pathlib import Path

import numpy as np

import reward
from reward import Task, Verdict
from runtime.config import Config, TrainingStopped
from runtime.messages import Group, apply_verdicts
from runtime.processes import die_with
from tasks import limits

START_SECONDS = 60.0  # a child imports, and makes the task
GRACE_SECONDS = 1.0  # beyond the task's own limits, which stop Python code but not C


class Examiner:
    """Asks a child process for replies and verdicts; it is started when it is needed."""

    def __init__(self, config: Config, log: Path):
        self.config, self.log = config, log
        self.deaths = 0  # of children, in this evaluation
        self.waited = 0.0  # seconds since the task was in time
        self.process = None
        atexit.register(self.close)  # however the run ends

    def start(self) -> None:
        """Start a child, and wait until it is ready."""
        self.pipe, there = Pipe()
        code = f"import sys; sys.path[:] = {sys.path}; from tasks.exam import serve; serve()"
        with self.log.open("ab") as log, there:
            streams = {"stdin": there, "stdout": log, "stderr": log}
            command = [sys.executable, "-c", code]
            self.process = subprocess.Popen(command, start_new_session=True, **streams)
        self.pipe.send((os.getpid(), self.config))
        self.receive(START_SECONDS)

    def close(self) -> None:
        """End the child, and whatever it has forked."""
        if self.process:
            os.killpg(self.process.pid, signal.SIGKILL)
            self.exit_code = self.process.wait()
            self.pipe.close()
        self.process = None

    def respond(self, requests: list[tuple]) -> list:
        """What `reward.respond` says to each request."""
        return self.ask("env", requests)

    def verify(self, group: Group) -> list[Verdict]:
        """What `reward.verify_group` says of a group; asked of each episode alone, so that one that
        ends the child costs no other."""
        found = self.ask("verifier", [replace(group, trajectories=[t]) for t in group.trajectories])
        return [Verdict(0.0, (), x) if isinstance(x, str) else x for x in found]

    def ask(self, who: str, requests: list) -> list:
        """An answer to each request, or the reason (str) why there is none.

        TrainingStopped when too many children are lost, or the task has not answered for too long.
        """
        answers: list = []
        patience = 2 * self.config.reward_seconds + GRACE_SECONDS
        while len(answers) < len(requests):
            try:
                if not self.process:
                    self.start()
                self.pipe.send((who, requests[len(answers) :]))
                while len(answers) < len(requests):
                    answers.append(self.receive(patience))
            except (EOFError, OSError) as error:  # TimeoutError is an OSError, too
                answers.append(f"{who}_{self.lost(error)}")
        return answers

    def receive(self, seconds: float):
        """The child's next message; TimeoutError when there is none in time, and TrainingStopped
        when for --stall seconds none was."""
        begin = time.monotonic()
        in_time = self.pipe.poll(seconds)
        took = time.monotonic() - begin
        self.waited = 0.0 if took < self.config.reward_seconds else self.waited + took
        if self.waited > self.config.stall:
            raise TrainingStopped(f"evaluation: no answer of the task for {self.waited:.0f} s")
        if not in_time:
            raise TimeoutError
        return self.pipe.recv()

    def lost(self, error: Exception) -> str:
        """The child is lost; returns what the request died of. TrainingStopped when the budget is
        used up."""
        self.close()
        reason = f"error: it ended its process (exit code {self.exit_code})"
        if isinstance(error, TimeoutError):
            reason = "timeout: it hung in a call that no alarm interrupts"
        self.deaths += 1
        if self.deaths > self.config.restarts:
            text = f"evaluation: the task has lost {self.deaths} processes, the last by {reason}"
            raise TrainingStopped(f"{text} (--restarts {self.config.restarts}; log: {self.log})")
        return reason


def evaluate(learner, config: Config, task: Task, examiner: Examiner) -> dict:
    """Answers to every held-out problem, by the weights as they are between two steps: a greedy
    one, or with --eval-samples several, sampled as in training but with other noise.

    Returns `solved` (share), `reward` (mean) and `turns` (mean); a failed episode counts as a
    reward of 0, and `failures` tells how many there are of each kind, with the words of the first.
    """
    from rollout import Generator, generate  # here: a child needs no torch

    examiner.deaths = 0  # a budget for each evaluation
    environment = reward.make_environment(config, task)
    several = config.eval_samples
    generator = Generator(
        learner.model,
        replace(environment, respond=examiner.respond, beside=False),
        slots=min(config.slots, task.eval_size),
        capacity=reward.capacity_of(config, task),
        group_size=several or 1,
        seed=~config.seed,  # below 0: that of no run
        temperature=config.temperature if several else 0.0,
        cut=config.cut if several else (),
    )
    groups = [Group(i, 0, reward.problem_of(task, i, "eval")) for i in range(task.eval_size)]
    for group in generate(generator, groups):
        apply_verdicts(group, examiner.verify(group))
    episodes = [t for group in groups for t in group.trajectories]
    rewards = np.array([0.0 if t.failed else t.reward for t in episodes])
    failed = [t for t in episodes if t.failed]
    first = {t.finish: t.failure for t in reversed(failed)}
    counts = Counter(t.finish for t in failed)
    return {
        "solved": float(np.mean(rewards >= task.solved)),
        "reward": float(np.mean(rewards)),
        "turns": float(np.mean([len(t.turns) for t in episodes])),
        "failures": {finish: (count, first[finish]) for finish, count in counts.items()},
    }


# ------------------------------------------------------------------------------------- the child


def serve() -> None:
    """What runs in the child: answer every request, until the parent is gone."""
    pipe, here = Connection(os.dup(0)), os.getpid()
    os.close(0)
    parent, config = pipe.recv()
    die_with(parent)
    task = reward.task_of(config)
    pipe.send("ready")
    with contextlib.suppress(EOFError, OSError):  # the parent is gone
        while True:
            for answer in answers_to(task, config, *pipe.recv()):
                if os.getpid() != here:  # the task has forked, and this is the copy
                    os._exit(0)
                pipe.send(answer)


def answers_to(task: Task, config: Config, who: str, requests: list) -> Iterator:
    """The task's answers, one by one; slow environments (`beside`) think at the same time."""
    if who == "verifier":
        for group in requests:
            yield reward.verify_group(group, task, config)[0]
    elif task.beside:
        for future in [limits.in_thread(reward.respond, task, config, [r]) for r in requests]:
            try:
                yield future.result(config.reward_seconds)[0]
            except Late:
                yield "env_timeout"
    else:
        for request in requests:
            yield reward.respond(task, config, [request])[0]
