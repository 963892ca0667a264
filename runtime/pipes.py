"""pipes.py: a worker's process, and the two ends of the pipe between it and the parent.

`Line` is the worker's end, which may wait, `Port` the parent's, which never does: one thread of the
parent looks after all of them. What passes is one delivery after another, packed by messages.py; an
empty one announces the memory in which the arrays of the next ones lie (arena.py). A worker dies
with the thread of the parent that has started it.
Left out: who has which work, and what follows when a worker is gone (processes.py).
"""

import contextlib
import ctypes
import os
import signal
import socket
import struct
import sys
import threading
import time
from collections import deque
from multiprocessing import Pipe, get_context
from multiprocessing.connection import Connection

import numpy as np

import __main__
from runtime.arena import FULL, Arena
from runtime.config import TrainingStopped
from runtime.messages import pack_messages, place_group, unpack_messages

END = b""  # a delivery: the last one
# what stands before a delivery, as in a `Connection`: its length, or -1 and the length
LENGTH, LONG, BODY = "!i", "!Q", ""
# for recvmsg: room for one descriptor, and flags
ONE_DESCRIPTOR = socket.CMSG_LEN(4), socket.MSG_CMSG_CLOEXEC
BEAT_SECONDS = 1.0  # a worker that has said nothing for longer says that it is alive


def die_with(parent: int, how=signal.SIGKILL) -> None:
    """Get this signal when the thread that has started this process ends."""
    ctypes.CDLL(None).prctl(1, how)  # PR_SET_PDEATHSIG: with the spawning thread
    if os.getppid() != parent:  # it died before the line above
        os._exit(0)


def next_delivery(connection: Connection) -> bytes:
    """The next delivery; END when the other side is gone, too."""
    with contextlib.suppress(EOFError, OSError):
        return connection.recv_bytes()
    return END


# ------------------------------------------------------------------------------ the worker's side


class Line:
    """A worker's end of its pipe: groups in, answers out, and a sign of life. arenas: whether the
    arrays of groups go by shared memory: to a parent on this machine."""

    def __init__(self, connection: Connection, worker: int, arenas: bool = False):
        self.connection, self.worker, self.last = connection, worker, 0.0
        self.arenas, self.arena = arenas, None
        self.status = {}  # what it tells of itself with every delivery

    def send(self, *answers) -> None:
        """Send answers as one delivery."""
        if self.arena and self.arena.end > FULL:
            self.arena = None  # not later: the arrays of a delivery lie in one arena
        self.last = time.monotonic()
        try:
            status = {**self.status, "clock": self.last}
            self.connection.send_bytes(pack_messages((status, [*map(self._place, answers)])))
        except ConnectionError:
            raise SystemExit(0) from None  # the parent is gone

    def _place(self, answer):
        """The answer, with its group's arrays in the arena, if there are any."""
        group = getattr(answer, "group", None)
        if not (self.arenas and group and group.trajectories):
            return answer
        if self.arena is None:
            self.arena = Arena()
            announce(self.arena, self.connection)
        return answer._replace(group=place_group(group, self.arena))

    def beat(self) -> None:
        """Say "alive" if nothing was said for a while; call it in every loop."""
        if time.monotonic() - self.last > BEAT_SECONDS:
            self.send()

    def receive(self, seconds: float) -> list:
        """What the parent has sent next; nothing after `seconds`; SystemExit at the end."""
        if not self.connection.poll(seconds):
            return []
        if delivery := next_delivery(self.connection):
            return unpack_messages(delivery)
        raise SystemExit(0)


def announce(arena: Arena, connection: Connection) -> None:
    """Send an arena to the parent: an empty delivery has its descriptor."""
    with socket.socket(fileno=os.dup(connection.fileno())) as own:
        own.setblocking(True)  # a task may have set a default timeout, which would be the pipe's
        socket.send_fds(own, [struct.pack(LENGTH, 0)], [arena.descriptor])


def child_main(function, ends: tuple, log: str, parent: int, arguments: list):
    """What runs first in every worker: die with the parent, leave Ctrl-C to it, log to a file."""
    die_with(parent)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    descriptor = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)
    function(Line(*ends), *arguments)


# ------------------------------------------------------------------------------ the parent's side


class Port:
    """The parent's end of a pipe. Nothing here waits: what has come in part is kept until the rest
    comes, what was not taken until it is. Any thread may send, one may read."""

    def __init__(self, connection: Connection):
        with connection:
            self.socket = socket.socket(fileno=os.dup(connection.fileno()))
        self.socket.setblocking(False)
        self.lock = threading.Lock()
        self.unsent = deque()  # what the worker has not taken yet
        self.arena = None  # the worker's newest
        self._expect(LENGTH, 4)

    def fileno(self) -> int:
        return self.socket.fileno()

    def send(self, delivery: bytes) -> bool:
        """Put a delivery behind those that wait; returns what `flush` does. True, too, where some
        wait already: whoever sent the first of them was told to flush again."""
        size = len(delivery)
        head = struct.pack("!i", size) if size < 1 << 31 else struct.pack("!iQ", -1, size)
        with self.lock:
            first = not self.unsent
            self.unsent.append(memoryview(head + delivery))
        return not first or self.flush()

    def flush(self) -> bool:
        """Write as much as the worker takes now; False: it will take the rest when it has read."""
        with self.lock:
            try:
                while self.unsent:
                    rest = self.unsent[0][self.socket.send(self.unsent[0]) :]
                    self.unsent[0] = rest
                    if not rest:
                        self.unsent.popleft()
            except BlockingIOError:
                return False
            except OSError:  # the worker is gone: whoever reads notices
                self.unsent.clear()
            return True

    def read(self) -> memoryview | None:
        """The next delivery, an empty one where an arena was announced; None: it is not whole yet.
        EOFError: the worker is gone; ValueError: what it sends is no delivery; TrainingStopped:
        this process cannot open an arena."""
        while True:
            while self.missing:
                try:
                    found = self.socket.recvmsg_into([self.missing], *ONE_DESCRIPTOR)
                except BlockingIOError:
                    return None
                except OSError:
                    raise EOFError from None
                count, ancillary, flags, _ = found
                if not count:
                    raise EOFError
                if flags & socket.MSG_CTRUNC:
                    raise TrainingStopped("too many open files (ulimit -n)")
                for *_, descriptor in ancillary:
                    self.arena = Arena(int.from_bytes(descriptor, sys.byteorder))
                self.missing = self.missing[count:]
            kind, whole = self.kind, self.whole
            if kind == BODY:
                self._expect(LENGTH, 4)
                return whole
            (size,) = struct.unpack(kind, whole)
            self._expect(*((LONG, 8) if (kind, size) == (LENGTH, -1) else (BODY, size)))

    def _expect(self, kind: str, size: int) -> None:
        """What comes next, and how many bytes it has."""
        self.kind, self.whole = kind, memoryview(np.empty(size, np.uint8))
        self.missing = self.whole  # the part that is not here yet

    @property
    def closed(self) -> bool:
        return self.fileno() < 0

    def close(self) -> None:
        with self.lock:
            self.socket.close()


def start_here(name: str, function, number: int, log: str, arguments: list, arenas=True) -> tuple:
    """A process of this machine, and this end of its pipe; it dies with the thread that calls. The
    function must be one of a module, which the process imports."""
    here, there = Pipe()
    given = (function, (there, number, arenas), log, os.getpid(), arguments)
    process = get_context("spawn").Process(None, child_main, name, given, daemon=True)
    # Ctrl-C is the parent's business: the child starts with SIGINT blocked, and it stays so
    unblocked = signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGINT])
    # Without this it would first import the program that runs here, and torch with that.
    program = vars(__main__).pop("__file__", None)
    try:
        process.start()
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, unblocked)
        if program:
            __main__.__file__ = program
    there.close()
    return process, here
