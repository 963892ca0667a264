"""pipes.py: a worker's process, what the parent knows about it, and the pipe between them.

What passes is one list of messages after another, pickled: between processes of one run only. A
worker dies with the thread of the parent that has started it.
Left out: who has which work, and what follows when a worker is gone (pool.py).
"""

import ctypes
import itertools
import os
import pickle
import signal
import time
from dataclasses import dataclass, field
from multiprocessing import Pipe, get_context
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path

import __main__

BEAT_SECONDS = 1.0  # a worker that has said nothing for longer says that it is alive


class Line:
    """A worker's end of its pipe: work in, answers out, and a sign of life."""

    def __init__(self, connection: Connection, worker: int):
        self.connection, self.worker, self.last = connection, worker, 0.0
        self.status = {}  # what it tells of itself with every delivery

    def send(self, *answers) -> None:
        """Send answers as one delivery."""
        self.last = time.monotonic()
        try:
            self.connection.send_bytes(pickle.dumps((self.status, answers), 5))
        except ConnectionError:
            raise SystemExit(0) from None  # the parent is gone

    def beat(self) -> None:
        """Say "alive" if nothing was said for a while; call it in every loop."""
        if time.monotonic() - self.last > BEAT_SECONDS:
            self.send()

    def receive(self, seconds: float) -> list:
        """What the parent has sent next; nothing after `seconds`; SystemExit at the end."""
        try:
            if not self.connection.poll(seconds):
                return []
            return pickle.loads(self.connection.recv_bytes())
        except (EOFError, OSError):
            raise SystemExit(0) from None


def child_main(function, connection: Connection, number: int, log: str, parent: int, arguments):
    """What runs first in every worker: die with the parent, leave Ctrl-C to it, log to a file."""
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG: of the thread that started it
    if os.getppid() != parent:  # it died before the line above
        os._exit(0)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    descriptor = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    for stream in (1, 2):
        os.dup2(descriptor, stream)
    function(Line(connection, number), *arguments)


def start_here(name: str, function, number: int, log: str, arguments: list) -> BaseProcess:
    """A process of this machine, with this end of its pipe; it dies with the thread that calls. The
    function must be one of a module, which the process imports."""
    here, there = Pipe()
    given = (function, there, number, log, os.getpid(), arguments)
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
    process.connection = here
    return process


@dataclass(eq=False)
class Worker:
    """One running process of a role, with its pipe and what the parent knows about it."""

    role: str
    number: int
    process: object
    log: str
    heard: float  # time of its last delivery, or of its start
    serial: int = field(default_factory=itertools.count().__next__)  # nobody else has had it
    last_word: str = "spawn"  # what its last delivery was about
    status: dict = field(default_factory=dict)  # as it told last
    # what it was sent and has not answered, in order: by group id, or by key of a call
    work: dict = field(default_factory=dict)
    outbox: list = field(default_factory=list)  # messages that are not sent yet
    inbox: bytearray = field(default_factory=bytearray)  # the beginning of a delivery
    noticed: float = 0.0  # `heard` when its silence was reported
    answered: bool = False

    @property
    def name(self) -> str:
        return self.process.name

    @property
    def connection(self) -> Connection | None:
        """To its process; None: that has not begun yet, on another machine."""
        return self.process.connection

    def read(self) -> list:
        """The deliveries that are here as a whole; EOFError at the end. It does not wait for the
        rest of one, which may never come (the length in 4 bytes is Connection's)."""
        arrived = os.read(self.connection.fileno(), 1 << 16)
        if not arrived:
            raise EOFError
        self.inbox += arrived
        deliveries = []
        while len(self.inbox) >= (end := 4 + int.from_bytes(self.inbox[:4])):
            deliveries.append(pickle.loads(self.inbox[4:end]))
            del self.inbox[:end]
        return deliveries

    def last_words(self) -> str:
        """Its exit code; with code 1 the last line of its log, which names the exception it died
        of."""
        self.process.join(1.0)
        code, log = self.process.exitcode, Path(self.log)
        # there is no log yet if it died before it could begin
        text = log.read_text(errors="replace").strip() if log.is_file() else ""
        last = text.rpartition("\n")[2][:200]
        return f"exit code {code}: {last}" if last and code == 1 else f"exit code {code}"
