"""transport.py: worker processes, a private pipe to each, one queue object over all of them.

`Pool` spawns workers, watches them, restarts the dead ones and gives out their messages in order
of arrival. This file moves bytes and knows when a process has died.
Left out: what the messages mean, and how weights travel (weight_mailbox.py).

No lock and no queue is shared between workers, so `kill -9` of any of them can neither block nor
corrupt the others: its pipe closes, the rest goes on. Each pipe has two threads of the parent, one
that reads and one that writes: no worker ever waits for a busy learner, and one that stops in the
middle of a message holds up nobody else. What arrives is handled by one thread, `_drain`.
"""

import contextlib
import ctypes
import os
import select
import signal
import sys
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from multiprocessing import get_context
from multiprocessing.connection import Connection
from pathlib import Path
from queue import Empty, SimpleQueue

from runtime.messages import from_bytes, to_bytes

START_SECONDS = 120.0  # a new process may be silent this long: it imports and compiles


BEAT_SECONDS = 1.0  # a worker says at least this often that it is alive


HOLD_SECONDS = 0.005  # a finished group waits this long for others to travel with


NOTICE_SECONDS = 5.0, 9.0  # of silence, or without a first word: people are told which worker


class Line:
    """A worker's end of its pipe: numbered messages out, messages in, and a sign of life."""

    def __init__(self, connection: Connection, worker: int):
        self.connection, self.worker, self.sequence, self.last = connection, worker, 0, 0.0
        self.held, self.since = [], 0.0  # messages that are still here; since when the first is
        self.ready = select.poll()  # one for all time: connection.poll builds one at each call
        self.ready.register(connection.fileno(), select.POLLIN)

    def send(self, kind: str, header: dict | None = None, arrays=None, hold: bool = False) -> None:
        """Send a message, and all that are held; or hold it until `flush`."""
        self.sequence += 1
        head = {**(header or {}), "kind": kind, "worker": self.worker, "sequence": self.sequence}
        message = to_bytes(head, arrays)
        self.since = self.since if self.held else time.monotonic()
        self.held += [len(message).to_bytes(4, "big"), message]
        if not hold:
            self.flush()

    def flush(self, seconds: float = 0.0) -> None:
        """Deliver what is held for so long already, at once: a delivery wakes three threads of the
        parent, which takes longer than to read a message."""
        now = time.monotonic()
        if self.held and now - self.since >= seconds:
            data, self.held, self.last = b"".join(self.held), [], now
            try:
                self.connection.send_bytes(data)
            except OSError:
                raise SystemExit(0) from None  # the parent is gone

    def beat(self, header: dict | None = None) -> None:
        """Say "alive" if nothing was said for a while; call it in every loop."""
        if time.monotonic() - self.last > BEAT_SECONDS:
            self.send("beat", header)

    def receive(self, seconds: float = 0.0):
        """The next message as (header, arrays), or None after `seconds`; SystemExit at the end."""
        try:
            if not self.ready.poll(1000 * seconds):
                return None
            header, arrays = from_bytes(self.connection.recv_bytes())
        except (EOFError, OSError):
            raise SystemExit(0) from None  # the parent is gone
        if header["kind"] == "end":
            raise SystemExit(0)
        return header, arrays


def child_main(function, connection: Connection, worker: int, log: str, parent: int, arguments):
    """What runs first in every worker: die with the parent, leave Ctrl-C to it, log to a file."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG: with the spawning thread
        if os.getppid() != parent:  # it died before the line above
            raise SystemExit(0)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    descriptor = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)
    function(Line(connection, worker), *arguments)


@dataclass
class Worker:
    """One running process of a role, with its pipe and what the parent knows about it."""

    role: str
    number: int
    process: object
    connection: Connection
    log: str
    restarts: int
    spawned: float
    heard: float = 0.0  # time of its last message, 0 before the first
    said: str = "spawn"  # kind of its last message
    status: dict = field(default_factory=dict)  # header of its last beat
    outbox: SimpleQueue = field(default_factory=SimpleQueue)
    held: dict[int, tuple] = field(default_factory=dict)  # relayed to it and not answered yet
    gone: bool = False  # its loss has been reported
    noticed: float | None = None  # `heard` when its silence was reported

    @property
    def name(self) -> str:
        return f"{self.role}-{self.number}"


class WorkersFailed(RuntimeError):
    """A worker has used up its restart budget."""


@contextlib.contextmanager
def interrupts_blocked():
    """No SIGINT in this thread, nor in processes that it starts."""
    if not hasattr(signal, "pthread_sigmask"):
        yield
        return
    before = signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGINT])
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def post(worker: Worker) -> None:
    """A thread for each worker: only it ever blocks when that worker does not read its pipe."""
    with contextlib.suppress(OSError):  # the worker died: `listen` reports it
        while (data := worker.outbox.get()) is not None:
            worker.connection.send_bytes(data)


def listen(worker: Worker, inbox: SimpleQueue) -> None:
    """Another: only it ever blocks when that worker stops in the middle of a message."""
    with contextlib.suppress(EOFError, OSError):
        while True:
            data = worker.connection.recv_bytes()
            worker.heard = time.monotonic()
            inbox.put((worker, data))
    inbox.put((worker, None))  # the end of the pipe, after everything that was said


def messages_of(delivery: bytes) -> Iterator[bytes]:
    """What `Line.flush` has put together: each message behind its length."""
    stop = 0
    while stop < len(delivery):
        start, size = stop + 4, int.from_bytes(delivery[stop : stop + 4], "big")
        stop = start + size
        yield delivery[start:stop]


def last_words(worker: Worker, code: int) -> str:
    """The last line of a worker's log, which names the exception it died of (exit code 1)."""
    log = Path(worker.log)  # there is none yet if it died before it could begin
    text = log.read_text(errors="replace") if code == 1 and log.is_file() else ""
    lines = [line for line in text.split("\n") if line.strip()]
    return f": {lines[-1][:200]}" if lines else ""


class Pool:
    """Workers by role behind one queue: `receive` gives messages, deaths and restarts in order.

    roles: name -> (function(line, *arguments), [arguments of each worker]).
    relay: (from role, kind, to role): messages of that kind go straight to the least busy worker
    of the other role and are held until it answers with the same group id; should it die, another
    one gets them. Their headers come out of `receive` at once, the answer together with the
    original, or without one ("unanswered") when two workers have died of it. To None: they come out
    of `receive` themselves, with their arrays.
    flaw(worker, header, arrays, original): what is wrong with a message, or None; a worker that
    sends nonsense is replaced.
    """

    def __init__(
        self,
        roles: dict,
        logs: Path,
        restarts: int,
        silence: float,
        relay: tuple,
        flaw: Callable = lambda *message: None,
    ):
        self.flaw, self.deaths = flaw, Counter()  # group id -> workers that have died of it
        self.context = get_context("spawn")
        self.roles, self.logs, self.budget, self.silence = roles, logs, restarts, silence
        self.relay_from, self.relay_kind, self.relay_to = relay
        self.workers: dict[tuple[str, int], Worker] = {}
        self.relayed: set[int] = set()  # group ids on their way, or through the other role
        self.inbox: SimpleQueue = SimpleQueue()  # (worker, bytes) in order of arrival
        self.messages: deque = deque()
        self.news = threading.Condition()  # of this process only: never shared with a worker
        self.changing = threading.Lock()  # held while a worker is replaced: `close` waits for it
        self.closing = self.closed = False
        self.error: Exception | None = None  # what ended the draining thread
        for role, (_, arguments) in roles.items():
            for number in range(len(arguments)):
                self._spawn(role, number)
        self.thread = threading.Thread(target=self._drain, name="drain", daemon=True)
        self.thread.start()

    def of(self, role: str) -> list[Worker]:
        """The workers of a role, by number; what is sent to one that just died is lost with it."""
        return [w for (r, _), w in sorted(list(self.workers.items())) if r == role]

    def send(self, worker: Worker, kind: str, header: dict | None = None, arrays=None) -> None:
        """Queue a message; it never blocks, and one to a dead worker is lost with it."""
        worker.outbox.put(to_bytes({**(header or {}), "kind": kind}, arrays))

    def receive(self, seconds: float) -> list[tuple]:
        """Everything that arrived, waiting at most `seconds` for the first: (kind, worker, header,
        arrays) for messages, ("lost", worker, reason, None) for deaths, "silent" for those who may
        have died. Raises WorkersFailed."""
        with self.news:
            if not (self.messages or self.error):
                self.news.wait(seconds)
            arrived = list(self.messages)
            self.messages.clear()
        if self.error:
            raise RuntimeError("the thread that watches the workers has failed") from self.error
        for kind, worker, reason, _ in arrived:
            if kind == "failed":
                raise WorkersFailed(
                    f"{worker.name} {reason}; {self.budget} restarts are used up "
                    f"(last message: {worker.said}; log: {worker.log})"
                )
        return arrived

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
        with interrupts_blocked():  # and so they stay in the child: Ctrl-C is the parent's business
            process.start()
        there.close()
        worker = Worker(role, number, process, here, log, restarts, time.monotonic())
        threading.Thread(target=post, args=(worker,), daemon=True).start()
        threading.Thread(target=listen, args=(worker, self.inbox), daemon=True).start()
        self.workers[role, number] = worker
        return worker

    def _put(self, *message) -> None:
        with self.news:
            self.messages.append(message)
            self.news.notify()

    def _drain(self) -> None:
        """The thread: handle what arrives, notice every death and every silence, until `close`."""
        try:
            looked = awake = time.monotonic()
            while not self.closed:
                with contextlib.suppress(Empty):
                    worker, data = self.inbox.get(timeout=0.2)
                    for message in [None] if data is None else messages_of(data):
                        self._take(worker, message)
                now = time.monotonic()
                if now - looked > 2.0:  # this process was stopped itself (Ctrl-Z): it heard nobody
                    awake = now
                looked = now
                for worker in list(self.workers.values()):
                    silent = now - max(worker.heard or worker.spawned, awake)
                    if silent > NOTICE_SECONDS[not worker.heard] and worker.noticed != worker.heard:
                        worker.noticed = worker.heard
                        self._put("silent", worker, f"is silent for {silent:.0f} s", None)
                    if silent > (self.silence if worker.heard else START_SECONDS):
                        self._replace(worker, f"was silent for {silent:.0f} s")
        except Exception as error:  # `receive` raises it: nobody waits for a dead thread
            with self.news:
                self.error = error
                self.news.notify()

    def _take(self, worker: Worker, data: bytes | None) -> None:
        """Handle one message, or the end (None), of a worker."""
        if worker.gone:
            return
        if data is None:
            worker.process.join(1.0)
            code = worker.process.exitcode
            return self._replace(worker, f"died (exit code {code}{last_words(worker, code)})")
        try:
            header, arrays = from_bytes(data)
            held = worker.held.get(header.get("group_id"))
            flaw = self.flaw(worker, header, arrays, held)
        except (ValueError, KeyError, TypeError, IndexError) as error:
            flaw = f"{type(error).__name__}: {error}"
        if flaw:
            return self._replace(worker, f"sent a damaged message ({flaw})")
        worker.said = header["kind"]
        if header["kind"] == "beat":
            worker.status = header
        elif worker.role == self.relay_from and header["kind"] == self.relay_kind:
            self.relayed.add(header["group_id"])
            self._put(header["kind"], worker, header, None if self.relay_to else arrays)
            if self.relay_to:
                self._relay(header["group_id"], (data, header, arrays))
        elif worker.role != self.relay_to or "group_id" not in header:
            self._put(header["kind"], worker, header, arrays)
        elif held := worker.held.pop(header["group_id"], None):  # else: answered already
            self._put(header["kind"], worker, header, held[1:])

    def _relay(self, group_id: int, original: tuple) -> None:
        if not (workers := [w for w in self.of(self.relay_to) if not w.gone]):
            return  # the whole role has failed: `receive` is about to say so
        worker = min(workers, key=lambda w: len(w.held))
        worker.held[group_id] = original
        worker.outbox.put(original[0])

    def _replace(self, worker: Worker, reason: str) -> None:
        """Report a death once, start a successor while the budget lasts, hand on what it held."""
        with self.changing:
            if self.closing or worker.gone:
                return
            worker.gone = True
            worker.process.kill()
            worker.process.join(1.0)
            worker.outbox.put(None)
            if worker.restarts >= self.budget:
                return self._put("failed", worker, reason, None)
            self._spawn(worker.role, worker.number, worker.restarts + 1)
        for i, (group_id, original) in enumerate(worker.held.items()):
            self.deaths[group_id] += i == 0  # it was working on the first
            if self.deaths[group_id] < 2:
                self._relay(group_id, original)
            else:
                self._put("unanswered", worker, {"group_id": group_id}, original[1:])
        self._put("lost", worker, reason, None)

    def close(self, seconds: float = 2.0) -> None:
        """End every worker: ask, wait a moment, kill what is left."""
        with self.changing:
            self.closing = True  # from here on nobody is replaced
        workers = list(self.workers.values())
        for worker in workers:
            self.send(worker, "end")
            worker.outbox.put(None)
        deadline = time.monotonic() + seconds
        for worker in workers:
            worker.process.join(max(0.0, deadline - time.monotonic()))
            if worker.process.is_alive():
                worker.process.kill()
                worker.process.join()
        self.closed = True  # not before: workers die with the thread that has started them
        self.thread.join(seconds)
