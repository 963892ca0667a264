"""sessions.py: what runs a task's code outside the generator: verifiers, and slow or unsafe
environments.

A reward worker verifies groups. For an environment that is `outside` it forks a process for every
episode, a session: it has the state, a folder for temporary files, and a group of processes of its
own. A session that hangs (even in C), ends its process or forks costs one attempt. All are slow at
the same time. A state is a memory of the answers so far, so a session that is gone is made again
from the next call.
Nothing stays behind: a session that is over closes its state, its forks are killed, its folder is
removed. When a reward worker is gone itself, in whatever way, its caretaker does that.
Left out: who is asked (processes.py, tasks/exam.py).
"""

import contextlib
import gc
import math
import os
import random
import shutil
import signal
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from multiprocessing import Pipe
from multiprocessing.connection import Connection, wait
from pathlib import Path

import numpy as np

from reward import Task, advance, ask, forget, part_of, task_of, verify_group
from runtime.config import Config
from runtime.messages import Answer, Call, Group, Judgement, Result
from runtime.processes import Line, die_with

GRACE_SECONDS = 1.0  # beyond the task's own limits, which stop Python code but not C


def judge(group: Group, task: Task, config: Config, alive: Callable) -> Judgement:
    """Verify a group, and say how long that took."""
    began = time.monotonic()
    verdicts = verify_group(group, task, config, alive)
    return Judgement(verdicts, began, time.monotonic() - began)


def reward_worker(line: Line, config: Config):
    """Verify one group after the other, and keep the sessions of environments meanwhile."""
    task = task_of(config)
    gc.freeze()
    sessions = Sessions(task, config, line.connection)
    try:
        while True:
            line.beat()
            if results := sessions.results(0.5):
                line.send(*results)
            for work in line.receive(0.0):
                if isinstance(work, Call):
                    sessions.take(work)
                else:
                    judgement = judge(work, task, config, line.beat)
                    line.send(Answer(work.group_id, judgement=judgement))
    finally:
        sessions.close()


def serve() -> None:
    """What runs in the child of a `Host`: a reward worker, until the parent is gone."""
    pipe = Connection(os.dup(0))
    os.close(0)
    parent, config = pipe.recv()
    die_with(parent)
    reward_worker(Line(pipe, 0), config)


# ------------------------------------------------------------------------------- in the worker


@dataclass(eq=False)
class Session:
    """One episode's process."""

    key: tuple  # of the episode; () when it is over, and the session is closing its state
    process: int
    pipe: Connection
    folder: Path
    call: Call | None = None  # what it is asked now
    deadline: float = math.inf  # of that, or of its end


class Sessions:
    """The sessions of a reward worker."""

    def __init__(self, task: Task, config: Config, line: Connection):
        self.task, self.config = task, config
        self.lines = [line]  # `results` waits for a delivery, too
        self.patience = config.reward_seconds + GRACE_SECONDS
        self.all: list[Session] = []
        self.found: list[Result] = []
        self.folder = self.lifeline = None  # made with the first session

    def take(self, call: Call) -> None:
        """Ask an episode's session; or, without answers, end those whose keys begin like this."""
        if call.answers is None:
            for session in self.all:
                if session.key[: len(call.key)] == call.key:
                    self._end(session)
            return
        session = next((session for session in self.all if session.key == call.key), None)
        try:
            session = session or self._start(call.key)
            session.pipe.send(call)
        except BrokenPipeError:  # it died between two turns
            self._drop(session)
            self.take(call)
        except OSError as error:  # no more processes, pipes or folders
            self._fail(call, f"env_error: {error}")
        else:
            session.call, session.deadline = call, time.monotonic() + self.patience

    def results(self, seconds: float) -> list[Result]:
        """What the sessions have said; waits for that, or for a delivery to the worker."""
        now, pipes = time.monotonic(), [session.pipe for session in self.all]
        seconds = min([seconds, *[session.deadline - now for session in self.all]])
        ready = wait([*self.lines, *pipes], max(0.0, seconds))
        for session in list(self.all):
            try:
                if session.pipe in ready:
                    self._hear(session, session.pipe.recv())
                elif time.monotonic() > session.deadline:
                    os.kill(session.process, signal.SIGKILL)
                    hung = "env_timeout: it hung in a call that no alarm interrupts"
                    self._drop(session, hung)
            except (EOFError, OSError):
                self._drop(session)
        found, self.found = self.found, []
        return found

    def close(self) -> None:
        """End all of them."""
        self.lines = []
        for session in self.all:
            self._end(session)
        while self.all:
            self.results(0.1)

    def _hear(self, session: Session, said: Result | None) -> None:
        """What a session says: to a call, or (None) that it has closed its state."""
        if said is None:
            self._drop(session)
        elif session.call:
            session.call, session.deadline = None, math.inf
            self.found.append(said)
            if said.done or said.failure:
                self._end(session)

    def _fail(self, call: Call, reason: str) -> None:
        self.found.append(Result(call.key, len(call.answers), failure=reason))

    def _start(self, key: tuple) -> Session:
        """Fork an episode's process."""
        if self.lifeline is None:
            self.folder = Path(tempfile.mkdtemp(prefix="nanoglm-"))
            self.lifeline = start_caretaker(self.folder)
        folder = Path(tempfile.mkdtemp(dir=self.folder))
        here, there = Pipe()
        worker, process = os.getpid(), os.fork()
        if process == 0:
            try:
                die_with(worker, signal.SIGTERM)
                os.setpgid(0, 0)
                os.close(self.lifeline)  # or else nobody would see the end of the worker
                for pipe in (here, *self.lines, *[session.pipe for session in self.all]):
                    pipe.close()
                serve_episode(there, part_of(self.task, key[1]), self.config, key, folder)
            finally:
                os._exit(0)
        there.close()
        with contextlib.suppress(OSError):  # here, too: it may not have come so far yet
            os.setpgid(process, process)
        self.all.append(Session(key, process, here, folder))
        return self.all[-1]

    def _end(self, session: Session) -> None:
        """Let it close its state; it has a moment for that."""
        session.key, session.call = (), None
        with contextlib.suppress(OSError):
            session.pipe.send(None)
        session.deadline = time.monotonic() + self.patience

    def _drop(self, session: Session, reason: str = "") -> None:
        """A session is gone, or has to go, with its forks and its folder. What it was asked has
        failed for this reason, or because its process has ended."""
        self.all.remove(session)
        session.pipe.close()
        patience, ended = time.monotonic() + 0.1, os.WEXITED | os.WNOHANG | os.WNOWAIT
        while time.monotonic() < patience and not os.waitid(os.P_PID, session.process, ended):
            time.sleep(0.001)  # it exits by itself, with a code
        with contextlib.suppress(ProcessLookupError):
            os.killpg(session.process, signal.SIGKILL)
        _, status = os.waitpid(session.process, 0)
        shutil.rmtree(session.folder, ignore_errors=True)
        if session.call:
            code = os.waitstatus_to_exitcode(status)
            died = f"env_error: it ended its process (exit code {code})"
            self._fail(session.call, reason or died)


# ------------------------------------------------------------------------------- in a session


def serve_episode(pipe: Connection, task: Task, config: Config, key: tuple, folder: Path) -> None:
    """What runs in a session: answer every call, until the episode or the worker is over."""
    here, states = os.getpid(), {}
    # temporary files go into its folder; its random numbers depend on the episode alone
    os.environ["TMPDIR"] = tempfile.tempdir = str(folder)
    random.seed(repr(key[1:]))
    np.random.seed(key[1:])

    def end(*_):
        raise SystemExit

    def talk(call):
        return advance(task, states, key, call.problem, call.answers)

    signal.signal(signal.SIGTERM, end)
    with contextlib.suppress(EOFError, OSError, SystemExit):
        while call := pipe.recv():
            ((step, failure),) = ask("env", talk, [call], config)
            if os.getpid() != here:  # the task has forked, and this is the copy
                os._exit(0)
            said = step or (None, 0.0, True)
            pipe.send(Result(key, len(call.answers), *said, failure or ""))
    ask("env", partial(forget, task, states), [key], config)
    with contextlib.suppress(OSError):
        if os.getpid() == here:
            pipe.send(None)  # it is closed


# ------------------------------------------------------------------------------ the caretaker


def start_caretaker(folder: Path) -> int:
    """Fork a process that waits until this one is gone, in whatever way, and ends what it has left:
    sessions that do not end by themselves, and their files. Returns what keeps it waiting."""
    with contextlib.suppress(PermissionError):  # it leads one already
        os.setsid()
    leader, (read, write) = os.getpid(), os.pipe()
    if caretaker := os.fork():
        os.setpgid(caretaker, caretaker)  # at once: who kills this process may kill its group
        os.close(read)
        return write
    try:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        os.closerange(3, read)
        os.closerange(read + 1, 4096)
        os.read(read, 1)
        deadline = time.monotonic() + GRACE_SECONDS
        while left := processes_of(leader) - {os.getpid()}:
            for process in left if time.monotonic() > deadline else ():
                with contextlib.suppress(ProcessLookupError):
                    os.kill(process, signal.SIGKILL)
            time.sleep(0.02)
        while folder.exists():
            shutil.rmtree(folder, ignore_errors=True)
    finally:
        os._exit(0)


def processes_of(leader: int) -> set[int]:
    """All processes of a session (in the sense of POSIX) but zombies."""
    found = set()
    for name in os.listdir("/proc"):
        with contextlib.suppress(OSError, ValueError):
            if os.getsid(int(name)) == leader:
                state = Path("/proc", name, "stat").read_text().rpartition(")")[2].split()[0]
                found |= {int(name)} if state != "Z" else set()
    return found
