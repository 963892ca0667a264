"""sessions.py: what runs a task's code outside the generator: verifiers, and slow or unsafe
environments.

A reward worker verifies groups. For an environment that is `outside` it forks a process for every
episode, a session: it has the state, a folder for temporary files, and a group of processes of its
own. A session that hangs (even in C), ends its process or forks costs one attempt. All are slow at
the same time. A state is a memory of the answers so far, so a session that is gone is made again
from the next call. Evaluations ask quick tasks here, too: they share one session.
Nothing stays behind: a session that is over closes its state, its forks are killed, its folder is
removed. When a reward worker is gone itself, in whatever way, its caretaker does that.
Left out: who is asked (processes.py, tasks/exam.py). macOS has no /proc: a session that hangs in C
outlives a worker that was killed.
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
from collections.abc import Callable
from dataclasses import dataclass, field
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
            line.status = dict(sessions.counts)
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


@dataclass
class Session:
    """The process of one episode, or of all episodes of quick tasks."""

    process: int
    pipe: Connection
    folder: Path
    calls: list = field(default_factory=list)  # what it is asked now, one after the other,
    said: list = field(default_factory=list)  # and has answered of that
    waiting: list = field(default_factory=list)  # what it will be asked then
    deadline: float = math.inf  # of the next answer, or of its end


class Sessions:
    """The sessions of a reward worker, by key of the episode; for quick tasks: who asks."""

    def __init__(self, task: Task, config: Config, line: Connection):
        self.task, self.config, self.line = task, config, line
        self.patience = config.reward_seconds + GRACE_SECONDS
        self.open: dict[tuple, Session] = {}
        self.ending: list[Session] = []  # over, and closing their states
        self.found: list[Result] = []
        self.counts = Counter(opened=0, closed=0, killed=0)
        self.folder = self.lifeline = None  # made with the first session

    def take(self, call: Call) -> None:
        """Ask an episode's session; without answers, the episodes whose keys begin like this are
        over."""
        key = self._place(call.key)
        if call.answers is not None:
            try:
                session = self.open.get(key) or self._start(key)
            except OSError as error:  # no more processes, pipes or folders
                return self._fail(call, f"env_error: {error}")
            session.waiting.append(call)
        elif key == call.key:
            for key in [key for key in self.open if key[: len(call.key)] == call.key]:
                self._end(key)
        elif key in self.open:  # one of several in a session
            self.open[key].waiting.append(call)

    def results(self, seconds: float) -> list[Result]:
        """What the sessions have said; waits for that, or for a delivery to the worker."""
        for key in list(self.open):
            self._ask(key)
        sessions, now = [*self.open.values(), *self.ending], time.monotonic()
        seconds = min([seconds, *[session.deadline - now for session in sessions]])
        ready = {*wait([self.line, *[s.pipe for s in sessions]], max(0.0, seconds))}
        for key, session in list(self.open.items()):
            if session.pipe in ready:
                try:
                    while session.pipe.poll():
                        session.said.append(session.pipe.recv())
                        session.deadline = time.monotonic() + self.patience
                except (EOFError, OSError):
                    self._lost(key, "env_error: it ended its process (exit code {})")
            elif time.monotonic() > session.deadline:
                self._lost(key, "env_timeout: it hung in a call that no alarm interrupts")
            if session.said and len(session.said) == len(session.calls):
                said, session.calls, session.said = session.said, [], []
                session.deadline = math.inf
                self.found += filter(None, said)
                if said[-1] and said[-1].key == key and (said[-1].done or said[-1].failure):
                    self._end(key)
        self._bury(ready)
        found, self.found = self.found, []
        return found

    def close(self) -> None:
        """End all of them."""
        for key in list(self.open):
            self._end(key)
        while self.ending:
            self._bury({*wait([session.pipe for session in self.ending], 0.1)})

    def _place(self, key: tuple) -> tuple:
        """The key of an episode's session."""
        own = len(key) == 1 or part_of(self.task, key[1]).outside
        return key if own else key[:1]

    def _ask(self, key: tuple) -> None:
        """Send a session what waits for it, if it has nothing to do."""
        session = self.open[key]
        if session.waiting and not session.calls:
            session.calls, session.waiting = session.waiting, []
            session.deadline = time.monotonic() + self.patience
            try:
                session.pipe.send(session.calls)
            except OSError:  # it died between two turns, which its pipe will tell
                session.calls, session.waiting = [], session.calls

    def _lost(self, key: tuple, reason: str) -> None:
        """A session is gone, or has to go: what it was at has failed, what waits goes on."""
        session = self.open.pop(key)
        code = self._drop(session)
        self.found += filter(None, session.said)
        left = session.calls[len(session.said) :]
        for call in [call for call in left[:1] if call.answers is not None]:
            self._fail(call, reason.format(code))
        for call in left[1:] + session.waiting:
            self.take(call)
        session.said = []

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
                for other in (*self.open.values(), *self.ending):
                    other.pipe.close()
                here.close()
                self.line.close()
                serve_episodes(there, self.task, self.config, folder)
            finally:
                os._exit(0)
        there.close()
        with contextlib.suppress(OSError):  # here, too: it may not have come so far yet
            os.setpgid(process, process)
        self.counts["opened"] += 1
        self.open[key] = Session(process, here, folder)
        return self.open[key]

    def _end(self, key: tuple) -> None:
        """Let it close its state; it has a moment for that."""
        session = self.open.pop(key)
        with contextlib.suppress(OSError):
            session.pipe.send(None)
        session.deadline = time.monotonic() + self.patience
        self.ending.append(session)

    def _bury(self, ready: set) -> None:
        """Drop the sessions that have closed their states, or are late with it."""
        for session in list(self.ending):
            closed, gone = False, time.monotonic() > session.deadline
            if session.pipe in ready:
                try:
                    closed = session.pipe.recv() == "closed"
                except (EOFError, OSError):
                    gone = True
            if closed or gone:
                self.ending.remove(session)
                self._drop(session, closed)

    def _drop(self, session: Session, closed: bool = False) -> int:
        """A session is gone, or has to go, with its forks and its folder; returns its exit code."""
        self.counts["closed" if closed else "killed"] += 1
        session.pipe.close()
        patience = min(session.deadline, time.monotonic() + 0.1)
        done, status = os.waitpid(session.process, os.WNOHANG)
        while not done and time.monotonic() < patience:  # it exits by itself, with a code
            time.sleep(0.001)
            done, status = os.waitpid(session.process, os.WNOHANG)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(session.process, signal.SIGKILL)
        if not done:
            _, status = os.waitpid(session.process, 0)
        shutil.rmtree(session.folder, ignore_errors=True)
        return os.waitstatus_to_exitcode(status)


# ------------------------------------------------------------------------------- in a session


def serve_episodes(pipe: Connection, task: Task, config: Config, folder: Path) -> None:
    """What runs in a session: answer every call, until the episode or the worker is over."""
    here, states = os.getpid(), {}
    os.environ["TMPDIR"] = tempfile.tempdir = str(folder)  # temporary files go into its folder

    def end(*_):
        raise SystemExit

    def talk(call):
        turn = len(call.answers)
        random.seed(f"{call.key[1:]} {turn}")  # its random numbers depend on the turn alone
        np.random.seed((*call.key[1:], turn))
        return advance(part_of(task, call.key[1]), states, call.key, call.problem, call.answers)

    def close(key):
        return forget(part_of(task, key[1]), states, key)

    signal.signal(signal.SIGTERM, end)
    with contextlib.suppress(EOFError, OSError, SystemExit):
        while calls := pipe.recv():
            for call in calls:
                result = None
                if call.answers is not None:
                    ((step, failure),) = ask("env", talk, [call], config)
                    said = step or (None, 0.0, True)
                    result = Result(call.key, len(call.answers), *said, failure or "")
                if os.getpid() != here:  # the task has forked, and this is the copy
                    os._exit(0)
                pipe.send(result)
                if result is None or result.done:
                    ask("env", close, [call.key], config)
    for key in list(states):
        ask("env", close, [key], config)
    with contextlib.suppress(OSError):
        if os.getpid() == here:
            pipe.send("closed")


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
    """All processes of a session (in the sense of POSIX) but zombies; nothing without /proc."""
    found = set()
    for name in os.listdir("/proc") if os.path.isdir("/proc") else ():
        with contextlib.suppress(OSError, ValueError):
            if os.getsid(int(name)) == leader:
                state = Path("/proc", name, "stat").read_text().rpartition(")")[2].split()[0]
                found |= {int(name)} if state != "Z" else set()
    return found
