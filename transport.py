"""transport.py: worker processes, a private pipe to each, one queue object over all of them.

`Pool` spawns workers, watches them, restarts the dead ones and gives out their messages in order
of arrival; `Mailbox` is the double-buffered shared memory through which weights travel.
Left out: what the messages mean. This file moves bytes and knows when a process has died.

No lock and no queue is shared between workers, so `kill -9` of any of them can neither block nor
corrupt the others: its pipe closes, its sentinel fires, the rest goes on. A thread of the parent
drains every pipe all the time, so no worker ever waits for a busy learner.
"""

import contextlib
import ctypes
import os
import signal
import sys
import threading
import time
from collections import deque
from dataclasses import dataclass, field
from multiprocessing import get_context
from multiprocessing.connection import Connection, wait
from multiprocessing.shared_memory import SharedMemory
from pathlib import Path
from queue import SimpleQueue

import numpy as np

from buffer import from_bytes, to_bytes

START_SECONDS = 120.0  # a new process may be silent this long: it imports and compiles
BEAT_SECONDS = 1.0  # a worker says at least this often that it is alive


# ------------------------------------------------------------------------------- weight mailbox


class Mailbox:
    """The newest weights [P] in shared memory: two buffers, each stamped before and after writing.

    One process publishes, any number read; a reader never sees a mixture of two versions. A reader
    that is overtaken (two publications during its copy) simply reads again.
    """

    def __init__(self, count: int, name: str | None = None):
        size = 64 + 2 * 4 * count
        self.memory = SharedMemory(name, create=name is None, size=size)
        self.stamps = np.frombuffer(self.memory.buf, np.int64, 8)  # newest, begin 0/1, end 0/1
        flats = np.frombuffer(self.memory.buf, np.float32, 2 * count, 64)
        self.buffers = flats.reshape(2, count)
        self.owner = name is None
        if self.owner:
            self.stamps[:] = -1

    @property
    def version(self) -> int:
        """The newest published version, -1 before the first."""
        return int(self.stamps[0])

    def publish(self, version: int, flat: np.ndarray) -> None:
        """Write float32 weights [P] into the buffer that readers are not sent to, then switch."""
        side = version % 2
        self.stamps[1 + side] = version
        self.buffers[side] = flat
        self.stamps[3 + side] = version
        self.stamps[0] = version

    def read(self) -> tuple[int, np.ndarray]:
        """The newest version and a private copy of its weights."""
        while True:
            version = self.version
            side = version % 2
            copy = self.buffers[side].copy()
            if self.stamps[1 + side] == version == self.stamps[3 + side]:
                return version, copy

    def close(self) -> None:
        """Let go of the memory; the owner also removes it."""
        self.stamps = self.buffers = None
        self.memory.close()
        if self.owner:
            self.memory.unlink()


# ------------------------------------------------------------------------------ the worker's side


class Line:
    """A worker's end of its pipe: numbered messages out, messages in, and a sign of life."""

    def __init__(self, connection: Connection, worker: int):
        self.connection, self.worker, self.sequence, self.last = connection, worker, 0, 0.0

    def send(self, kind: str, header: dict | None = None, arrays: dict | None = None) -> None:
        self.sequence += 1
        self.last = time.monotonic()
        head = {**(header or {}), "kind": kind, "worker": self.worker, "sequence": self.sequence}
        self.connection.send_bytes(to_bytes(head, arrays))

    def beat(self, header: dict | None = None) -> None:
        """Say "alive" if nothing was said for a while; call it in every loop."""
        if time.monotonic() - self.last > BEAT_SECONDS:
            self.send("beat", header)

    def receive(self, seconds: float = 0.0):
        """The next message as (header, arrays), or None after `seconds`; SystemExit at the end."""
        try:
            if not self.connection.poll(seconds):
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
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG
        if os.getppid() != parent:  # it died before the line above
            raise SystemExit(0)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    descriptor = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)
    function(Line(connection, worker), *arguments)


# ------------------------------------------------------------------------------ the parent's side


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

    @property
    def name(self) -> str:
        return f"{self.role}-{self.number}"


class WorkersFailed(RuntimeError):
    """A role has used up its restart budget."""


def post(worker: Worker) -> None:
    """A thread for each worker: only it ever blocks when that worker does not read its pipe."""
    with contextlib.suppress(OSError):  # the worker died: the draining thread reports it
        while (data := worker.outbox.get()) is not None:
            worker.connection.send_bytes(data)


class Pool:
    """Workers by role behind one queue: `receive` gives messages, deaths and restarts in order.

    roles: name -> (function(line, *arguments), [arguments of each worker]).
    relay: (from role, kind, to role): messages of that kind go straight to the least busy worker
    of the other role and are held until it answers with the same group id; should it die, another
    one gets them. The answer comes out of `receive` together with the original.
    """

    def __init__(self, roles: dict, logs: Path, restarts: int, silence: float, relay: tuple):
        self.context = get_context("spawn")
        self.roles, self.logs, self.budget, self.silence = roles, logs, restarts, silence
        self.relay_from, self.relay_kind, self.relay_to = relay
        self.workers: dict[tuple[str, int], Worker] = {}
        self.relayed: set[int] = set()  # group ids on their way through the other role
        self.messages: deque = deque()
        self.news = threading.Condition()  # of this process only: never shared with a worker
        self.closing = False
        for role, (_, arguments) in roles.items():
            for number in range(len(arguments)):
                self._spawn(role, number)
        self.thread = threading.Thread(target=self._drain, name="drain", daemon=True)
        self.thread.start()

    def of(self, role: str) -> list[Worker]:
        """The workers of a role that are running now, by number."""
        return [w for (r, _), w in sorted(list(self.workers.items())) if r == role]

    def send(self, worker: Worker, kind: str, header: dict | None = None, arrays=None) -> None:
        """Queue a message; it never blocks, and one to a dead worker is lost with it."""
        worker.outbox.put(to_bytes({**(header or {}), "kind": kind}, arrays))

    def receive(self, seconds: float) -> list[tuple]:
        """Everything that arrived, waiting at most `seconds` for the first: (kind, worker, header,
        arrays) for messages, ("lost", worker, reason, None) for deaths. Raises WorkersFailed."""
        with self.news:
            if not self.messages:
                self.news.wait(seconds)
            arrived = list(self.messages)
            self.messages.clear()
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
        process.start()
        there.close()
        worker = Worker(role, number, process, here, log, restarts, time.monotonic())
        threading.Thread(target=post, args=(worker,), daemon=True).start()
        self.workers[role, number] = worker
        return worker

    def _put(self, *message) -> None:
        with self.news:
            self.messages.append(message)
            self.news.notify()

    def _drain(self) -> None:
        """The thread: read every pipe, notice every death and every silence, until `close`."""
        while not self.closing:
            workers = list(self.workers.values())
            handles = {w.connection: w for w in workers} | {w.process.sentinel: w for w in workers}
            ready = wait(list(handles), timeout=0.2)
            for worker in {id(handles[r]): handles[r] for r in ready}.values():
                if worker.connection in ready:
                    self._read(worker)
                else:  # only the sentinel fired: its pipe has been read to the end
                    self._replace(worker, f"died (exit code {worker.process.exitcode})")
            now = time.monotonic()
            for worker in workers:
                silent = now - (worker.heard or worker.spawned)
                if silent > (self.silence if worker.heard else START_SECONDS):
                    self._replace(worker, f"was silent for {silent:.0f} s")

    def _read(self, worker: Worker) -> None:
        try:
            data = worker.connection.recv_bytes()
            header, arrays = from_bytes(data)
        except (EOFError, OSError):
            worker.process.join(1.0)
            return self._replace(worker, f"died (exit code {worker.process.exitcode})")
        except ValueError as error:
            return self._replace(worker, f"sent a damaged message ({error})")
        worker.heard, worker.said = time.monotonic(), header["kind"]
        if header["kind"] == "beat":
            worker.status = header
        elif worker.role == self.relay_from and header["kind"] == self.relay_kind:
            self.relayed.add(header["group_id"])
            self._relay(header["group_id"], (data, header, arrays))
        elif worker.role == self.relay_to and header.get("group_id") in worker.held:
            _, *original = worker.held.pop(header["group_id"])
            self._put(header["kind"], worker, header, original)
        else:
            self._put(header["kind"], worker, header, arrays)

    def _relay(self, group_id: int, original: tuple) -> None:
        if not (workers := self.of(self.relay_to)):
            return  # the whole role has failed: `receive` is about to say so
        worker = min(workers, key=lambda w: len(w.held))
        worker.held[group_id] = original
        worker.outbox.put(original[0])

    def _replace(self, worker: Worker, reason: str) -> None:
        """Report a death once, start a successor while the budget lasts, hand on what it held."""
        if self.closing or self.workers.get((worker.role, worker.number)) is not worker:
            return
        worker.process.kill()
        worker.outbox.put(None)
        del self.workers[worker.role, worker.number]
        if worker.restarts >= self.budget:
            return self._put("failed", worker, reason, None)
        self._spawn(worker.role, worker.number, worker.restarts + 1)
        for group_id, original in worker.held.items():
            self._relay(group_id, original)
        self._put("lost", worker, reason, None)

    def close(self, seconds: float = 2.0) -> None:
        """End every worker: ask, wait a moment, kill what is left."""
        self.closing = True
        self.thread.join(seconds)
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
