"""processes.py: worker processes, a private pipe to each, and who has which work.

`Pool` spawns workers of several roles, issues groups to the least busy one of a role, and gives out
in order what happens: messages, deaths, silences. A group is out with one worker until that worker
answers with it (it lands) or is gone (it is lost, and comes back in `Lost`).
Left out: what the messages mean, and what to do with a lost group (train_async.py).

No lock and no queue is shared between processes, so `kill -9` of a worker can neither block nor
corrupt the others: its pipe closes, the rest goes on. Each pipe has two threads of the parent, one
that reads and one that writes: no worker ever waits for a busy learner, and one that stops in the
middle of a message holds up nobody else. One more thread looks at what arrives.
"""

import contextlib
import os
import select
import signal
import threading
import time
from dataclasses import dataclass, field
from multiprocessing import get_context
from multiprocessing.connection import Connection
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import NamedTuple

from runtime.limits import die_with
from runtime.messages import Beat, Group, Orders, pack_messages, unpack_messages

START_SECONDS = 120.0  # a new process may be silent this long: it imports, and Triton compiles
END = b""  # a delivery: the last one
BEAT_SECONDS = 1.0  # a worker says at least this often that it is alive
NOTICE_SECONDS = 5.0, 9.0  # of silence, or without a first word: people are told which worker


# ------------------------------------------------------------------------------ the worker's side


class Line:
    """A worker's end of its pipe: messages out, messages in, and a sign of life."""

    def __init__(self, connection: Connection, worker: int):
        self.connection, self.worker, self.last = connection, worker, 0.0
        self.incoming = select.poll()  # made once: `connection.poll` makes one at every call
        self.incoming.register(connection, select.POLLIN)

    def send(self, *messages) -> None:
        """Send messages as one delivery: it wakes two threads of the parent, so that many at once
        cost less than one by one."""
        self.last = time.monotonic()
        try:
            self.connection.send_bytes(pack_messages(messages))
        except OSError:
            raise SystemExit(0) from None  # the parent is gone

    def beat(self, status=None) -> None:
        """Say "alive" if nothing was said for a while; call it in every loop."""
        if time.monotonic() - self.last > BEAT_SECONDS:
            self.send(Beat(status or {}))

    def receive(self, seconds: float = 0.0):
        """The next message, or None after `seconds`; SystemExit at the end."""
        if not self.incoming.poll(1000 * seconds):
            return None
        delivery = END
        with contextlib.suppress(EOFError, OSError):  # the parent is gone
            delivery = self.connection.recv_bytes()
        if delivery == END:
            raise SystemExit(0)
        return unpack_messages(delivery)[0]


def child_main(function, connection: Connection, worker: int, log: str, parent: int, arguments):
    """What runs first in every worker: die with the parent, leave Ctrl-C to it, log to a file."""
    die_with(parent)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    descriptor = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)
    function(Line(connection, worker), *arguments)


# ------------------------------------------------------------------------------ the parent's side


@dataclass(eq=False)
class Worker:
    """One running process of a role, with its pipe and what the parent knows about it."""

    role: str
    number: int
    process: object
    connection: Connection
    log: str
    restarts: int
    spawned: float
    heard: float = 0.0  # time of its last delivery, 0 before the first
    said: str = "spawn"  # kind of its last message
    status: dict = field(default_factory=dict)  # as it told last
    outbox: SimpleQueue = field(default_factory=SimpleQueue)
    work: dict[int, Group] = field(default_factory=dict)  # groups that are out with it, by id
    gone: bool = False  # its loss has been reported
    noticed: float | None = None  # `heard` when its silence was reported

    @property
    def name(self) -> str:
        return f"{self.role}-{self.number}"


class Lost(NamedTuple):
    """A worker has died, or was killed because it was silent or sent nonsense; a successor has its
    name."""

    reason: str
    groups: list[Group]  # were out with it


class Silent(NamedTuple):
    """A worker has said nothing for a while: perhaps it has died."""

    reason: str


class WorkersFailed(RuntimeError):
    """A worker has used up its restart budget."""


def post(worker: Worker) -> None:
    """A thread for each worker: only it ever blocks when that worker does not read its pipe."""
    with worker.connection:  # closed when `listen` has ended
        while (delivery := worker.outbox.get()) is not None:
            with contextlib.suppress(OSError):  # the worker died: `listen` reports it
                worker.connection.send_bytes(delivery)


def listen(worker: Worker, inbox: SimpleQueue) -> None:
    """A thread for each worker: hand on every delivery, and END when its pipe has ended."""
    with contextlib.suppress(EOFError, OSError):
        while True:
            delivery = worker.connection.recv_bytes()
            worker.heard = time.monotonic()
            inbox.put((worker, delivery))
    worker.outbox.put(None)
    inbox.put((worker, END))


def last_words(worker: Worker) -> str:
    """Its exit code; with code 1 the last line of its log, which names the exception it died of."""
    code, log = worker.process.exitcode, Path(worker.log)
    # there is no log yet if it died before it could begin
    text = log.read_text(errors="replace") if code == 1 and log.is_file() else ""
    lines = [line for line in text.split("\n") if line.strip()]
    return f"exit code {code}" + (f": {lines[-1][:200]}" if lines else "")


class Pool:
    """Workers by role behind one queue.

    roles: name -> (function(line, *arguments), [arguments of each worker]).
    then: role -> the role to which its groups go next, at once, without waiting for the learner.
    flaw(message, work): what is wrong with a message of a worker that has this work, or None; a
    worker that sends nonsense is replaced.
    """

    def __init__(self, roles: dict, *, logs: Path, restarts: int, silence: float, then, flaw):
        self.roles, self.logs, self.budget, self.silence = roles, logs, restarts, silence
        self.then, self.flaw = then, flaw
        self.context = get_context("spawn")
        self.workers = {}  # (role, number) -> Worker
        self.inbox = SimpleQueue()  # (worker, delivery) in order of arrival
        self.news = []  # (worker, message): what `receive` will give out
        # Guards news and all work: of this process only, never shared with a worker.
        self.books = threading.Condition(threading.RLock())
        self.changing = threading.Lock()  # held while a worker is replaced: `close` waits for it
        self.closing = self.closed = False
        self.error = None  # what `receive` raises: there is no going on
        for role, (_, arguments) in roles.items():
            for number in range(len(arguments)):
                self.workers[role, number] = self._spawn(role, number)
        self.thread = threading.Thread(target=self._watch, name="watch", daemon=True)
        self.thread.start()

    # ----------------------------------------------------------------------------- for the trainer

    def of(self, role: str) -> list[Worker]:
        """The workers of a role, by number; what is sent to one that just died is lost with it."""
        return [worker for worker in self.workers.values() if worker.role == role]

    def send(self, worker: Worker, message) -> None:
        """Queue a message; it never blocks."""
        worker.outbox.put(pack_messages([message]))

    def issue(self, role: str, groups: list[Group]) -> list[str]:
        """Give each group to the least busy worker of a role, in one message a worker; returns the
        name of the worker of each."""
        names, orders = [], {}  # orders: worker -> its groups
        with self.books:
            for group in groups:
                worker = min(self.of(role), key=lambda worker: len(worker.work))
                worker.work[group.group_id] = group
                orders.setdefault(worker, []).append(group)
                names.append(worker.name)
            for worker, own in orders.items():
                self.send(worker, Orders(own))
        return names

    def out(self) -> dict[int, str]:
        """Every group that is out, or in a message that `receive` has not given out yet, with the
        name of its worker."""
        with self.books:
            found = {g: w.name for w in self.workers.values() for g in w.work}
            for worker, message in self.news:
                groups = getattr(message, "groups", [getattr(message, "group", None)])
                found |= {group.group_id: worker.name for group in groups if group}
            return found

    def receive(self, seconds: float) -> list[tuple[Worker, object]]:
        """Everything that happened, waiting at most `seconds` for the first: (worker, message),
        where a message is one of the worker's, `Lost` or `Silent`. Raises WorkersFailed."""
        with self.books:
            if not (self.news or self.error):
                self.books.wait(seconds)
            arrived, self.news = self.news, []
        if self.error:
            raise self.error
        return arrived

    def close(self, seconds: float = 2.0) -> None:
        """End every worker: ask, wait a moment, kill what is left."""
        with self.changing:
            self.closing = True  # from here on nobody is replaced
        for worker in self.workers.values():
            worker.outbox.put(END)
        deadline = time.monotonic() + seconds
        for worker in self.workers.values():
            worker.process.join(max(0.0, deadline - time.monotonic()))
            if worker.process.is_alive():
                worker.process.kill()
                worker.process.join()
        self.closed = True  # not before: workers die with the thread that has started them
        self.thread.join(seconds)

    # -------------------------------------------------------------------------- inside, by threads

    def _spawn(self, role: str, number: int, restarts: int = 0) -> Worker:
        function, arguments = self.roles[role]
        here, there = self.context.Pipe()
        log = str(self.logs / f"{role}-{number}.log")
        process = self.context.Process(
            target=child_main,
            args=(function, there, number, log, os.getpid(), arguments[number]),
            name=f"{role}-{number}",
            daemon=True,
        )
        # Ctrl-C is the parent's business: the child starts with SIGINT blocked, and it stays so
        unblocked = signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGINT])
        try:
            process.start()
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, unblocked)
        there.close()
        worker = Worker(role, number, process, here, log, restarts, spawned=time.monotonic())
        for function, *rest in ((post,), (listen, self.inbox)):
            threading.Thread(target=function, args=(worker, *rest), daemon=True).start()
        return worker

    def _put(self, worker: Worker, message) -> None:
        with self.books:
            self.news.append((worker, message))
            self.books.notify()

    def _watch(self) -> None:
        """The thread: look at what arrives, notice every death and every silence, until `close`."""
        try:
            looked = awake = time.monotonic()
            while not self.closed:
                with contextlib.suppress(Empty):
                    self._take(*self.inbox.get(timeout=0.2))
                now = time.monotonic()
                if now - looked > 2.0:  # this process was stopped itself (Ctrl-Z): it heard nobody
                    awake = now
                looked = now
                for worker in self.workers.values():
                    silent = now - max(worker.heard or worker.spawned, awake)
                    if silent > NOTICE_SECONDS[not worker.heard] and worker.noticed != worker.heard:
                        worker.noticed = worker.heard
                        self._put(worker, Silent(f"is silent for {silent:.0f} s"))
                    if silent > (self.silence if worker.heard else START_SECONDS):
                        self._replace(worker, f"was silent for {silent:.0f} s")
        except Exception as error:
            failed = RuntimeError("the thread that watches the workers has failed")
            failed.__cause__ = error
            self._fail(failed)

    def _fail(self, error: Exception) -> None:
        """Nobody waits for what will not come: `receive` raises the error."""
        with self.books:
            self.error = error
            self.books.notify()

    def _take(self, worker: Worker, delivery: bytes) -> None:
        """Look at one delivery of a worker, which may be its last."""
        if worker.gone:
            return
        if delivery == END:
            worker.process.join(1.0)
            return self._replace(worker, f"died ({last_words(worker)})")
        try:
            for message in unpack_messages(delivery):
                if flaw := self.flaw(message, worker.work):
                    raise ValueError(flaw)
                self._hand_on(worker, message)
        except Exception as error:  # bytes that are no messages raise almost anything
            found = f"{type(error).__name__}: {error}"
            self._replace(worker, f"sent a damaged message ({found})")

    def _hand_on(self, worker: Worker, message) -> None:
        """A sound message: a group is not out with this worker any more, and goes on."""
        worker.said = type(message).__name__
        worker.status = getattr(message, "status", None) or worker.status
        if isinstance(message, Beat):
            return
        with self.books:
            group = worker.work.pop(message.group_id)
            if message.group is None:  # a verdict
                message = message._replace(group=group)
            if worker.role in self.then:
                self.issue(self.then[worker.role], [message.group])
            self._put(worker, message)

    def _replace(self, worker: Worker, reason: str) -> None:
        """Report a loss once, and start a successor while the budget lasts."""
        with self.changing:
            if self.closing or worker.gone:
                return
            worker.gone = True
            worker.process.kill()
            worker.process.join(1.0)
            if worker.restarts >= self.budget:
                return self._fail(
                    WorkersFailed(
                        f"{worker.name} {reason}; {self.budget} restarts are used up "
                        f"(last message: {worker.said}; log: {worker.log})"
                    )
                )
            successor = self._spawn(worker.role, worker.number, worker.restarts + 1)
            with self.books:  # in one go: no group is nowhere meanwhile
                self.workers[worker.role, worker.number] = successor
                groups, worker.work = list(worker.work.values()), {}
                self._put(worker, Lost(reason, groups))
