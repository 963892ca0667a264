"""processes.py: worker processes, a private pipe to each, and who has which work.

`Pool` spawns workers of several roles, issues groups to the least busy one of a role, and gives out
in order what happens: answers, deaths, silences. A group is out with one worker until that worker
answers (it lands) or is gone (it is lost, and comes back in `Lost`).
Left out: what the answers mean, and what to do with a lost group (train_async.py).

No lock and no queue is shared between processes, so `kill -9` of a worker can neither block nor
corrupt the others: its pipe closes, the rest goes on. One thread of the parent carries all
messages, whenever a pipe has or takes some bytes: no worker ever waits for a busy learner, and one
that stops in the middle of a message holds up nobody else. A second thread sees to lost workers.
Arrays of generated groups do not pass the pipes, but lie in shared memory (arena.py).
"""

import contextlib
import itertools
import math
import resource
import selectors
import threading
import time
from dataclasses import dataclass, field
from multiprocessing import Pipe
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import NamedTuple

from runtime.config import TrainingStopped
from runtime.messages import (
    Answer,
    Call,
    Group,
    Placed,
    Result,
    ToVerify,
    pack_messages,
    read_group,
    unpack_messages,
)
from runtime.pipes import END, Port, start_here

START_SECONDS = 120.0  # a new process may be silent this long: it imports, and Triton compiles
TEAM, TEAM_SILENCE = "learner", 8.0  # the role whose workers `renew` replaces, all at once
REFILL_SECONDS = 3600.0  # a restart is forgotten after so long: a run may last for days
NOTICE_SECONDS = 5.0, 9.0  # of silence, or without a first word: people are told which worker


@dataclass(eq=False)
class Worker:
    """One running process of a role, with its pipe and what the parent knows about it."""

    role: str
    number: int
    process: object
    port: Port
    log: str
    serial: int  # no other worker of the pool has had it
    heard: float  # time of its last delivery, or of its start
    said: str = "spawn"  # what its last delivery was about
    status: dict = field(default_factory=dict)  # as it told last
    work: dict[int, Group] = field(default_factory=dict)  # groups that are out with it, by id
    calls: dict[tuple, Call] = field(default_factory=dict)  # of environments, by key
    behind: float = math.inf  # add it to times of its clock to get those of this process
    noticed: float = 0.0  # `heard` when its silence was reported
    gone: str = ""  # what it died of, until `renew`

    @property
    def name(self) -> str:
        return self.process.name


class Lost(NamedTuple):
    """A worker has died, or was killed because it was silent or sent nonsense; a successor has its
    name."""

    reason: str
    groups: list[Group]  # were out with it


class Silent(NamedTuple):
    """A worker has said nothing for a while: perhaps it has died."""

    reason: str


def last_words(worker: Worker) -> str:
    """Its exit code; with code 1 the last line of its log, which names the exception it died of."""
    said, log = f"exit code {worker.process.exitcode}", Path(worker.log)
    # there is no log yet if it died before it could begin
    text = log.read_text(errors="replace").strip() if log.is_file() else ""
    last = text.rpartition("\n")[2][:200]
    return f"{said}: {last}" if last and worker.process.exitcode == 1 else said


class Pool:
    """Workers by role behind one queue.

    roles: name -> function, number of workers, and arguments: each runs function(line, *arguments).
    A group that comes back without a judgement goes to the role "reward" next, at once, without
    waiting for the learner.
    flaw(answer, work): what is wrong with an answer of a worker that has this work, or None; a
    worker that sends nonsense is replaced.
    start(name, function, number, log, arguments): a new process (name, pid, exitcode, kill, join)
    and a `Connection` to it.
    """

    def __init__(
        self, roles: dict, *, logs: Path, restarts: int, silence: float, flaw, start=start_here
    ):
        _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))  # four files a worker, or more
        self.roles, self.logs, self.budget, self.silence = roles, logs, restarts, silence
        self.flaw, self.start = flaw, start
        self.losses = SimpleQueue()  # (worker, reason or None)
        self.news = []  # (worker, message): what `receive` will give out
        # Guards news, workers and their work: of this process only, never shared with a worker.
        self.books = threading.Condition()
        self.closing = self.closed = False
        self.restarted, self.serials = {}, itertools.count()  # name -> times
        self.workers = {}  # name -> Worker
        self.ear, self.bell = Pipe(duplex=False)  # see `_ring`
        for role, (_, count, *_) in roles.items():
            for number in range(count):
                self._spawn(role, number)
        self.threads = [
            threading.Thread(target=self._guard, args=(loop,), daemon=True)
            for loop in (self._carry, self._watch)
        ]
        for thread in self.threads:
            thread.start()

    # ----------------------------------------------------------------------------- for the trainer

    def of(self, role: str) -> list[Worker]:
        """The workers of a role, by number; what is sent to one that just died is lost with it."""
        return [worker for worker in self.workers.values() if worker.role == role]

    def send(self, worker: Worker, messages: list) -> None:
        """Queue groups, calls or results for a worker; it never blocks."""
        if not worker.port.send(pack_messages(messages)):
            self._ring(worker)

    def issue(self, role: str, groups: list[Group]) -> list[str]:
        """Give each group to the least busy worker of a role, in one delivery a worker; returns the
        name of the worker of each."""
        names, orders = [], {}  # orders: worker -> its groups
        with self.books:
            workers = self.of(role)
            for group in groups:
                worker = min(workers, key=lambda worker: len(worker.work))
                worker.work[group.group_id] = group
                orders.setdefault(worker, []).append(group)
                names.append(worker.name)
            for worker, own in orders.items():
                self.send(worker, [ToVerify(group) for group in own] if role == "reward" else own)
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
        where a message is an `Answer`, `Lost` or `Silent`. TrainingStopped when a worker is lost,
        and the restarts are used up."""
        with self.books:
            if not self.news:
                self.books.wait(seconds)
            arrived, self.news = self.news, []
        for _, message in arrived:
            if isinstance(message, Exception):
                raise message
        return arrived

    def renew(self, role: str, error: str) -> None:
        """Replace all workers of a role that cannot do without each other, because of an error;
        those that are `gone` say of what. TrainingStopped: that was too often."""
        deadline = time.monotonic() + 1.0
        while time.monotonic() < deadline and not any(worker.gone for worker in self.of(role)):
            time.sleep(0.05)  # the watch may not have seen it yet
        with self.books:
            if not self._may_restart(role):
                gone = {worker.name: worker.gone for worker in self.of(role) if worker.gone}
                text = f"{error}; {self.budget} restarts of the {role}s are used up {gone or ''}"
                raise TrainingStopped(text)
            for worker in self.of(role):
                worker.process.kill()
            for worker in self.of(role):
                worker.process.join(1.0)
                self._spawn(role, worker.number)

    def close(self) -> None:
        """End every worker: ask, wait a moment, kill what is left."""
        with self.books:  # not in the middle of a replacement
            self.closing = True  # from here on nobody is replaced
        for worker in self.workers.values():
            if not worker.port.send(END):
                self._ring(worker)
        deadline = time.monotonic() + 2.0
        for worker in self.workers.values():
            worker.process.join(max(0.0, deadline - time.monotonic()))
            worker.process.kill()
            worker.process.join(2.0)
        self.closed = True  # not before: workers die with the thread that has started them
        for thread in self.threads:
            thread.join(2.0)
        for worker in self.workers.values():
            worker.port.close()

    # -------------------------------------------------------------------------- inside, by threads

    def _spawn(self, role: str, number: int) -> None:
        """Start a worker, in the place of the one that had its name."""
        function, _, *arguments = self.roles[role]
        name = f"{role}-{number}"
        log = str(self.logs / f"{name}.log")
        process, connection = self.start(name, function, number, log, arguments)
        serial, now = next(self.serials), time.monotonic()
        worker = Worker(role, number, process, Port(connection), log, serial, now)
        self.workers[name] = worker
        self._ring(worker)

    def _put(self, worker: Worker | None, message) -> None:
        """Give out a message; if it is an error, `receive` raises it, and nobody waits for more."""
        with self.books:
            self.news.append((worker, message))
            self.books.notify()

    def _guard(self, loop) -> None:
        """A thread of the pool: when it fails, `receive` says so."""
        try:
            loop()
        except Exception as error:
            self._put(None, error)

    def _ring(self, worker: Worker) -> None:
        """Have `_carry` look at a worker's pipe: it is new, or has not taken all that was sent."""
        self.bell.send(worker.name)

    def _carry(self) -> None:
        """The thread that carries messages: take what workers send, and send what they had no room
        for. It replaces nobody: messages would have to wait for that."""
        read, write = selectors.EVENT_READ, selectors.EVENT_WRITE
        with selectors.DefaultSelector() as pipes:
            pipes.register(self.ear, read)
            while not self.closed:
                for key, ready in pipes.select(0.2):
                    if key.fileobj is self.ear:
                        worker = self.workers[self.ear.recv()]
                        if not worker.port.closed:
                            known = worker.port in pipes.get_map()
                            change = pipes.modify if known else pipes.register
                            change(worker.port, read | write, worker)
                        continue
                    worker = key.data
                    if ready & write and worker.port.flush():
                        pipes.modify(worker.port, read, worker)
                    if ready & read and not self._hear(worker):
                        pipes.unregister(worker.port)
                        worker.port.close()

    def _hear(self, worker: Worker) -> bool:
        """Take a delivery, if it is whole; False: there will be no more, the worker is gone, or has
        sent nonsense."""
        try:
            if delivery := worker.port.read():
                worker.heard = time.monotonic()
                self._take(worker, *unpack_messages(delivery))
            return True
        except EOFError:
            reason = None
        except TrainingStopped as error:  # it is not the worker's fault
            self._put(worker, error)
            return False
        except Exception as error:  # bytes that are no messages raise almost anything
            reason = f"sent a damaged message ({type(error).__name__}: {error})"
        self.losses.put((worker, reason))
        return False

    def _take(self, worker: Worker, status: dict, answers: list[Answer]) -> None:
        """One delivery: the groups that are answered are not out with this worker any more."""
        worker.status, worker.said = {**worker.status, **status}, "alive"
        # A lag contains the time on the way: the least one is nearest to the clocks' difference.
        lag = worker.heard - worker.status.pop("clock", worker.heard)
        worker.behind = 0.0 if self.start is start_here else min(worker.behind, lag)
        for answer in answers:
            # before the lock: a look at megabytes lets other threads run, and they may want it, too
            if isinstance(placed := getattr(answer, "group", None), Placed):
                answer = answer._replace(group=read_group(placed, worker.port.arena))
                answer.group.place = worker.port.arena, placed.offset
            work = worker.calls if isinstance(answer, Result) else worker.work
            if flaw := self.flaw(answer, work):
                raise ValueError(flaw)
            with self.books:
                match answer:
                    case Call(key):  # process ids of two machines may be the same
                        self._ask(answer._replace(key=(worker.serial, *key[1:])))
                    case Result(key):
                        del worker.calls[key]
                        self._tell(answer)
                    case Answer(group_id, group, judgement):
                        worker.said = f"group {group_id}"
                        asked = worker.work[group_id]  # KeyError: it is lost meanwhile
                        group = group or asked
                        if judgement is None:
                            self.issue("reward", [group])
                        del worker.work[group_id]
                        self._put(worker, answer._replace(group=group))

    def _ask(self, call: Call) -> None:
        """A call goes to the reward worker that has the episode's session, or will have it; the end
        of all episodes of a generator goes to every one."""
        workers = self.of("reward")
        if call.answers is not None and call.key[0] not in [w.serial for w in self.of("rollout")]:
            return  # whoever has asked is gone: nobody would end its session
        if len(call.key) > 1:
            workers = [workers[sum(call.key[1:]) % len(workers)]]
        for worker in workers:
            if call.answers is not None:
                worker.calls[call.key] = call
            self.send(worker, [call])

    def _tell(self, result: Result) -> None:
        """A result goes to the generator that has called, if it still lives."""
        for worker in self.of("rollout"):
            if worker.serial == result.key[0]:
                self.send(worker, [result])

    def _watch(self) -> None:
        """The thread that notices every silence, and replaces whoever is lost, until `close`."""
        looked = time.monotonic()
        while not self.closed:
            with contextlib.suppress(Empty):
                self._replace(*self.losses.get(timeout=0.2))
            now = time.monotonic()
            stopped, looked = now - looked > 2.0, now  # with Ctrl-Z: it heard nobody
            for worker in self.workers.values():
                if stopped:
                    worker.heard = now
                silent, new = now - worker.heard, worker.said == "spawn"
                if silent > NOTICE_SECONDS[new] and worker.noticed != worker.heard:
                    worker.noticed = worker.heard
                    said = "is still starting, after" if new else "is silent for"
                    self._put(worker, Silent(f"{said} {silent:.0f} s"))
                limit = min(self.silence, TEAM_SILENCE) if worker.role == TEAM else self.silence
                if silent > (START_SECONDS if new else limit):
                    self._replace(worker, f"was silent for {silent:.0f} s")

    def _replace(self, worker: Worker, reason: str | None) -> None:
        """Report a loss once, and start a successor while the budget lasts; no reason: it died."""
        with self.books:  # in one go: no group is nowhere meanwhile
            if self.closing or worker.gone or self.workers[worker.name] is not worker:
                return
            if reason is None:
                worker.process.join(1.0)
                reason = f"died ({last_words(worker)})"
            worker.process.kill()
            worker.process.join(1.0)
            if worker.role == TEAM:
                worker.gone = reason
                return
            if not self._may_restart(worker.name):
                last = f"(last: {worker.said}; log: {worker.log})"
                text = f"{worker.name} {reason}; {self.budget} restarts are used up {last}"
                return self._put(worker, TrainingStopped(text))
            self._spawn(worker.role, worker.number)
            groups, calls = [*worker.work.values()], [*worker.calls.values()]
            worker.work, worker.calls = {}, {}
            for call in calls:  # sessions are made again
                self._ask(call)
            if worker.role == "rollout":
                self._ask(Call((worker.serial,), {}, None))
            self._put(worker, Lost(reason, groups))

    def _may_restart(self, name: str) -> bool:
        """Whether the budget allows one more restart; it is noted, and forgotten in time."""
        now = time.monotonic()
        recent = [t for t in self.restarted.get(name, ()) if now - t < REFILL_SECONDS]
        self.restarted[name] = [*recent, now]
        return len(recent) < self.budget
