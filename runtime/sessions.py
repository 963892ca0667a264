"""sessions.py: what runs a task's code outside the generator: verifiers, and slow or unsafe
environments.

A reward worker verifies groups. For an environment that is `outside` it forks a process for every
episode, a session: it has the state, a folder for temporary files, and a group of processes of its
own. A session that hangs (even in C), ends its process or forks costs one attempt. Slow ones run at
the same time. A state is a memory of the answers so far, so a session that is gone is made again
from the next call. Evaluations ask quick tasks here, too: all their episodes share one session.
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
from collections import Counter
from dataclasses import dataclass, field
from multiprocessing import Pipe
from multiprocessing.connection import Connection, wait
from pathlib import Path

import numpy as np

from reward import Task, advance, ask, forget, own_files, part_of, task_of
from runtime.advice import advice_of, judge, renew
from runtime.config import Config
from runtime.messages import Answer, Call, Result
from runtime.pipes import Line, die_with

GRACE_SECONDS = 1.0  # beyond the task's own limits, which stop Python code but not C


def reward_worker(line: Line, config: Config):
    """Verify one group after the other, and keep the sessions of environments meanwhile."""
    if config.teacher or config.reward_model or own_files(config.task):  # it may need torch
        import torch

        torch.set_num_threads(config.threads or 1)
    task = task_of(config)
    advice = advice_of(config, task)
    gc.freeze()
    sessions = Sessions(task, config, line.connection)
    try:
        while True:
            results = sessions.results(0.5)
            if results or line.status != sessions.counts:
                line.status = dict(sessions.counts)
                line.send(*results)
            line.beat()
            for work in line.receive(0.0):
                if isinstance(work, Call):
                    sessions.take(work)
                else:
                    renew(advice, config, task)
                    judgement = judge(work, task, config, advice, line.beat)
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
    """The process of one episode, or of all episodes of quick tasks."""

    key: tuple  # of the episode, or of who asks; () when it is over, and closing its states
    process: int
    pipe: Connection
    folder: Path
    calls: list = field(default_factory=list)  # what it is asked now, one after the other,
    said: list = field(default_factory=list)  # what it has answered of that
    waiting: list = field(default_factory=list)  # and what it will be asked then
    deadline: float = math.inf  # of the next answer, or of its end


class Sessions:
    """The sessions of a reward worker."""

    def __init__(self, task: Task, config: Config, line: Connection):
        self.task, self.config = task, config
        self.lines = [line]  # `results` waits for a delivery, too
        self.patience = config.reward_seconds + GRACE_SECONDS
        self.all: list[Session] = []
        self.found: list[Result] = []
        self.counts = Counter(opened=0, closed=0)
        self.folder = self.lifeline = None  # made with the first session

    def take(self, call: Call) -> None:
        """Ask an episode's session; without answers, the episodes whose keys begin like this are
        over."""
        own = len(call.key) == 1 or part_of(self.task, call.key[1]).outside
        key, over = call.key if own else call.key[:1], call.answers is None
        if own and over:
            for session in self.all:
                if session.key[: len(key)] == key:
                    self._end(session)
            return
        session = next((session for session in self.all if session.key == key), None)
        if over and not session:
            return
        try:
            session = session or self._start(key)
            session.waiting.append(call)
        except OSError as error:  # no more processes, pipes or folders
            self._fail(call, f"env_error: {error}")

    def results(self, seconds: float) -> list[Result]:
        """What the sessions have said; waits for that, or for a delivery to the worker."""
        for session in self.all:
            self._ask(session)
        now, pipes = time.monotonic(), [session.pipe for session in self.all]
        seconds = min([seconds, *[session.deadline - now for session in self.all]])
        ready = wait([*self.lines, *pipes], max(0.0, seconds))
        for session in list(self.all):
            try:
                if session.pipe in ready:
                    self._hear(session)
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

    def _ask(self, session: Session) -> None:
        """Send what waits, if there is nothing to do."""
        if session.waiting and not session.calls:
            session.deadline = time.monotonic() + self.patience
            with contextlib.suppress(OSError):  # it died between two turns, as its pipe will tell
                session.pipe.send(session.waiting)
                session.calls, session.waiting = session.waiting, []

    def _hear(self, session: Session) -> None:
        """What a session says: to a call, or (None) that it has closed its state. Answers to what
        was asked together are passed on together: an evaluation takes a sixth of the time so."""
        while session.pipe.poll():
            said = session.pipe.recv()
            if said is None:
                self.counts["closed"] += 1
                return self._drop(session)
            session.said.append(said)
            session.deadline = time.monotonic() + self.patience
        if session.calls and len(session.said) == len(session.calls):
            self.found += [said for said in session.said if said.turn]
            last, session.calls, session.said = session.said[-1], [], []
            session.deadline = math.inf
            if last.key == session.key and (last.done or last.failure):
                self._end(session)

    def _fail(self, call: Call, reason: str) -> None:
        if call.answers is not None:
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
                serve_episodes(there, self.task, self.config, folder)
            finally:
                os._exit(0)
        there.close()
        with contextlib.suppress(OSError):  # here, too: it may not have come so far yet
            os.setpgid(process, process)
        self.counts["opened"] += 1
        self.all.append(Session(key, process, here, folder))
        return self.all[-1]

    def _end(self, session: Session) -> None:
        """Let it close its state; it has a moment for that."""
        session.key, session.calls, session.waiting = (), [], []
        with contextlib.suppress(OSError):
            session.pipe.send(None)
        session.deadline = time.monotonic() + self.patience

    def _drop(self, session: Session, reason: str = "") -> None:
        """A session is gone, or has to go, with its forks and its folder. What it was at has failed
        for this reason, or because its process has ended; what waits goes on."""
        self.all.remove(session)
        session.pipe.close()
        patience, ended = time.monotonic() + 0.1, os.WEXITED | os.WNOHANG | os.WNOWAIT
        while time.monotonic() < patience and not os.waitid(os.P_PID, session.process, ended):
            time.sleep(0.001)  # it exits by itself, with a code
        with contextlib.suppress(ProcessLookupError):
            os.killpg(session.process, signal.SIGKILL)
        _, status = os.waitpid(session.process, 0)
        shutil.rmtree(session.folder, ignore_errors=True)
        if session.calls:
            self.found += [said for said in session.said if said.turn]
            asked, *others = session.calls[len(session.said) :]
            code = os.waitstatus_to_exitcode(status)
            self._fail(asked, reason or f"env_error: it ended its process (exit code {code})")
            session.waiting = others + session.waiting
        for call in session.waiting:
            self.take(call)


# ------------------------------------------------------------------------------- in a session


def serve_episodes(pipe: Connection, task: Task, config: Config, folder: Path) -> None:
    """What runs in a session: answer every call, until the episode or the worker is over."""
    here, states = os.getpid(), {}
    os.environ["TMPDIR"] = tempfile.tempdir = str(folder)  # temporary files go into its folder

    def end(*_):
        raise SystemExit

    def talk(call):
        turn = len(call.answers)
        random.seed(f"{call.key[1:]} {turn}")  # its random numbers depend on episode and turn alone
        np.random.seed((*call.key[1:], turn))
        return advance(part_of(task, call.key[1]), states, call.key, call.problem, call.answers)

    def close(key):
        return forget(part_of(task, key[1]), states, key)

    signal.signal(signal.SIGTERM, end)
    with contextlib.suppress(EOFError, OSError, SystemExit):
        while calls := pipe.recv():
            for call in calls:
                result = Result(call.key, 0, done=True)  # this episode is over
                if call.answers is not None:
                    ((step, failure),) = ask("env", talk, [call], config)
                    said = step or (None, 0.0, True)
                    result = Result(call.key, len(call.answers), *said, failure or "")
                if os.getpid() != here:  # the task has forked, and this is the copy
                    os._exit(0)
                pipe.send(result)
                if result.done:
                    ask("env", close, [call.key], config)
    ask("env", close, list(states), config)
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
    for path in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError, ValueError):  # it has ended
            # bytes: names of processes, which stand before this, may be anything
            state, _, _, session, *_ = path.read_bytes().rpartition(b")")[2].split()
            if int(session) == leader and state != b"Z":
                found.add(int(path.parent.name))
    return found
