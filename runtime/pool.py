"""pool.py: worker processes, a private pipe to each, who has which work, and what follows a loss.

`Pool` spawns workers of several roles, issues groups to them, and gives out in order what happens:
answers, losses, silences. Training, evaluation and the synchronous trainer use the same class.
Whatever is out with a worker stands in its `work` until it is answered or the worker is gone: then
groups of a rollout worker come back in `Lost`; what a reward worker has not answered, another one
is asked. A call that hangs, or ends the process, has failed; a group may cost two workers.
Left out: what the answers mean (train_async.py), what runs in a worker (workers.py).

No lock and no queue is shared between processes, so `kill -9` of a worker can neither block nor
corrupt the others. One thread reads what workers send; another sees to lost workers, and kills one
that stops in the middle of a message: until then nobody else is read, and no other silence counts.
"""

import atexit
import itertools
import os
import pickle
import shutil
import signal
import threading
import time
from collections import Counter, deque
from contextlib import suppress
from multiprocessing.connection import wait
from pathlib import Path
from queue import Empty, SimpleQueue

from runtime.config import AttemptLost, TrainingStopped
from runtime.messages import (
    Answer,
    Call,
    Group,
    Judgement,
    Lost,
    Result,
    Silent,
    pack,
    unpack,
)
from runtime.pipes import Worker, last_words, start_here

START_SECONDS = 120.0  # a new process may be silent this long: it imports, and Triton compiles
REFILL_SECONDS = 3600.0  # a restart is forgotten after so long: a run may last for days
NOTICE_SECONDS = 5.0, 9.0  # of silence, or without a first word: people are told which worker
AT_ONCE = 2  # groups that a reward worker has: one that it judges, one that waits beside it


class Pool:
    """Workers by role: "rollout", "reward" and "learner".

    roles: name -> function, number of workers, and arguments: each runs function(line, *arguments).
    A group that comes back without a judgement goes on to the reward workers, at once.
    silence: seconds without a sign of life, of each role. flaw(answer, group): what is wrong with
    an answer, or None; a worker that sends nonsense is replaced.
    start(name, function, number, log, arguments): a new process (name, pid, exitcode, kill, join)
    with the `connection` to it.
    """

    def __init__(
        self,
        roles: dict,
        *,
        logs: Path,
        restarts: int,
        silence: dict,
        flaw,
        start=start_here,
        prefix="",  # of the workers' names
    ):
        self.roles, self.logs, self.restarts, self.silence = roles, logs, restarts, silence
        self.flaw, self.start, self.prefix = flaw, start, prefix
        # Guards all that follows: of this process only, never shared with a worker.
        self.books = threading.Condition(threading.RLock())
        self.workers = {}  # name -> Worker
        self.waiting = deque()  # (group, packed) that no reward worker has yet
        self.news = []  # (worker, message): what `receive` will give out
        self.deaths, self.times = Counter(), {}  # by group: reward workers; by name: when
        self.serials = itertools.count()
        self.losses = SimpleQueue()  # (worker, reason or None)
        self.talking = {}  # thread -> the worker that it reads or sends to: it may have to wait
        self.closing = False
        for role, (_, count, *_) in roles.items():
            for number in range(count):
                self._spawn(role, number)
        loops = self._read, self._watch
        self.threads = [threading.Thread(target=self._guard, args=(x,), daemon=True) for x in loops]
        for thread in self.threads:
            thread.start()
        atexit.register(self.close)  # however the run ends

    # ----------------------------------------------------------------------------- for the trainer

    def of(self, role: str) -> list[Worker]:
        """The workers of a role, by number."""
        return [worker for worker in [*self.workers.values()] if worker.role == role]

    def issue(self, groups: list[Group]) -> list[str]:
        """Give each group to the least busy rollout worker; returns the name of each one's."""
        names = []
        with self.books:
            for group in groups:
                worker = min(self.of("rollout"), key=lambda worker: len(worker.work))
                worker.work[group.group_id] = group
                worker.outbox.append(group)
                names.append(worker.name)
        self._send()
        return names

    def verify(self, groups: list[Group]) -> None:
        """Have groups judged: an `Answer` to each will come."""
        with self.books:
            self.waiting.extend((group, pack(group)) for group in groups)
        self._send()

    def ask(self, calls: list[Call]) -> None:
        """Send calls of a generator in this process: a `Result` to each will come."""
        with self.books:
            for call in calls:
                self._ask(call)
        self._send()

    def tell(self, worker: Worker, message) -> None:
        """Send a message that nobody answers."""
        with self.books:
            worker.outbox.append(message)
        self._send()

    def out(self) -> dict[int, str]:
        """Every group that is out, or in a message that `receive` has not given out yet, with the
        name of its worker."""
        with self.books:
            names = {group.group_id: "reward" for group, _ in self.waiting}
            for worker in self.workers.values():
                names |= dict.fromkeys(
                    [key for key in worker.work if type(key) is int], worker.name
                )
            for worker, message in self.news:
                groups = getattr(message, "groups", [getattr(message, "group", None)])
                names |= {group.group_id: worker.name for group in groups if group}
            return names

    def receive(self, seconds: float) -> list[tuple[Worker, object]]:
        """Everything that happened, waiting at most `seconds` for the first: (worker, message),
        where a message is an `Answer`, `Result`, `Lost` or `Silent`. TrainingStopped when a worker
        is lost and the restarts are used up, AttemptLost when it is a learner."""
        with self.books:
            idle = not self.news and self.books.wait(seconds)
        if idle:
            time.sleep(0.001)  # what comes together is given out together
        with self.books:
            arrived, self.news = self.news, []
        for _, message in arrived:
            if isinstance(message, Exception):
                raise message
        return arrived

    def close(self) -> None:
        """End every worker: close its pipe, wait a moment, kill what is left."""
        with self.books:  # not in the middle of a replacement
            if self.closing:
                return
            self.closing = True  # from here on nobody is replaced
        self.threads[0].join(2.0)
        for worker in self.workers.values():
            if worker.connection:
                worker.connection.close()
        deadline = time.monotonic() + 2.0
        for worker in self.workers.values():
            worker.process.join(max(0.0, deadline - time.monotonic()))
            self._end(worker)
        self.threads[1].join(2.0)  # not before: workers die with the thread that started them

    # ------------------------------------------------------------------------ inside: what is sent

    def _send(self) -> None:
        """Give waiting groups to reward workers, and send all that was posted: without the books,
        so that a worker that does not read holds up its sender alone."""
        with self.books:
            for worker in self.of("reward"):
                while self.waiting and sum(type(key) is int for key in worker.work) < AT_ONCE:
                    group, packed = self.waiting.popleft()
                    worker.work[group.group_id] = group
                    worker.outbox.append(packed)
            ready = [w for w in self.workers.values() if w.outbox and w.connection]
            outbox = [(worker, worker.outbox) for worker in ready]
            for worker in ready:
                worker.outbox = []
        thread = threading.get_ident()
        for worker, messages in outbox:
            self.talking[thread] = worker
            with suppress(OSError), worker.lock:  # it is gone: the reader notices
                worker.connection.send_bytes(pickle.dumps(messages, 5))
        self.talking.pop(thread, None)

    def _ask(self, call: Call) -> None:
        """A call goes to the reward worker that has the episode's state, or will have it; the end
        of all episodes of a generator goes to every one."""
        workers = self.of("reward")
        if call.key:
            workers = [workers[sum(call.key) % len(workers)]]
        for worker in workers:
            if call.answers is not None:
                worker.work[call.asker, *call.key] = call
            worker.outbox.append(call)

    # -------------------------------------------------------------------- inside: what is received

    def _guard(self, loop) -> None:
        """A thread of the pool: when it fails, `receive` says so."""
        try:
            loop()
        except Exception as error:
            self._put(None, error)

    def _put(self, worker: Worker | None, message) -> None:
        """Give out a message; if it is an error, `receive` raises it."""
        with self.books:
            self.news.append((worker, message))
            self.books.notify()

    def _read(self) -> None:
        """The thread that takes what workers send. It replaces nobody: messages would wait."""
        while not self.closing:
            with self.books:
                workers = [w for w in self.workers.values() if w.connection and not w.lost]
                pipes = {worker.connection: worker for worker in workers}
            self._send()  # to a worker that had not begun, too
            for connection in wait([*pipes], 0.1):
                worker, reason = pipes[connection], None
                self.talking[threading.get_ident()] = worker
                try:
                    status, answers = pickle.loads(connection.recv_bytes())
                    worker.heard, worker.last_word = time.monotonic(), "alive"
                    worker.status.update(status)
                    for answer in answers:
                        self._take(worker, answer)
                    self._send()
                except (EOFError, OSError):
                    worker.lost = True
                except Exception as error:  # bytes that are no messages raise almost anything
                    worker.lost, reason = True, f"sent nonsense ({type(error).__name__}: {error})"
                self.talking.pop(threading.get_ident(), None)
                if worker.lost:
                    self.losses.put((worker, reason))

    def _take(self, worker: Worker, answer: Answer | Call | Result) -> None:
        """What is answered is not out with this worker any more; ValueError for nonsense."""
        with self.books:
            if isinstance(answer, Call):
                return self._ask(answer._replace(asker=worker.serial))
            result = isinstance(answer, Result)
            key = (answer.asker, *answer.key) if result else answer.group_id
            asked = worker.work.get(key)
            if asked is None:
                raise ValueError(f"an answer to {key}, which it does not have")
            if not result and (wrong := self.flaw(answer, asked)):
                raise ValueError(wrong)
            group = unpack(answer.group) if not result and answer.group else asked
            del worker.work[key]
            worker.answered, worker.last_word = True, f"answer to {key}"
            if result:
                return self._tell(answer)
            if answer.judgement is None:
                self.waiting.append((group, answer.group))
            self._put(worker, answer._replace(group=group))

    def _tell(self, result: Result) -> None:
        """A result goes to whoever has asked, if that still lives."""
        if result.asker < 0:
            self._put(None, result)
        for worker in self.of("rollout"):
            if worker.serial == result.asker:
                worker.outbox.append(result)

    # ---------------------------------------------------------------------- inside: who is replaced

    def _spawn(self, role: str, number: int) -> None:
        """Start a worker, in the place of the one that had its name."""
        function, _, *arguments = self.roles[role]
        name = f"{self.prefix}{role}-{number}"
        log = str(self.logs / f"{name}.log")
        process = self.start(name, function, number, log, arguments)
        serial, now = next(self.serials), time.monotonic()
        self.workers[name] = Worker(role, number, process, log, serial, now)

    def _watch(self) -> None:
        """The thread that notices every silence, and replaces whoever is lost, until `close`."""
        looked = time.monotonic()
        while not self.closing:
            with suppress(Empty):
                self._replace(*self.losses.get(timeout=0.2))
                self._send()
            now, talking = time.monotonic(), [*self.talking.values()]
            stopped, looked = now - looked > 2.0, now  # with Ctrl-Z: it heard nobody
            for worker in [*self.workers.values()]:
                if stopped or talking and worker not in talking:
                    worker.heard = now
                silent, new = now - worker.heard, worker.last_word == "spawn"
                if silent > NOTICE_SECONDS[new] and worker.noticed != worker.heard:
                    worker.noticed = worker.heard
                    words = "is still starting, after" if new else "is silent for"
                    self._put(worker, Silent(f"{words} {silent:.0f} s"))
                if silent > (START_SECONDS if new else self.silence[worker.role]):
                    self._replace(worker, f"was silent for {silent:.0f} s")
                    self._send()

    def _replace(self, worker: Worker, reason: str | None) -> None:
        """Report a loss once, and start a successor while the budget lasts; no reason: it died."""
        with self.books:  # in one go: no group is nowhere meanwhile
            if self.closing or self.workers[worker.name] is not worker:
                return
            if reason is None:
                worker.process.join(1.0)
                reason = f"died ({last_words(worker)})"
            self._end(worker)
            work, worker.work, worker.lost = [*worker.work.values()], {}, True
            if worker.role == "learner":
                return self._put(worker, AttemptLost(f"{worker.name} {reason}"))
            if not self._may_restart(worker):
                last = f"(last: {worker.last_word}; log: {worker.log})"
                text = f"{worker.name} {reason}; {self.restarts} restarts are used up {last}"
                return self._put(worker, TrainingStopped(text))
            self._spawn(worker.role, worker.number)
            if worker.role == "rollout":
                self._put(worker, Lost(reason, work))
                return self._ask(Call((), {}, None, worker.serial))  # its episodes are over
            self._put(worker, Lost(reason, []))
            for item in work:
                self._again(worker, item, reason, guilty=item is work[0])  # it was at the first

    def _again(self, worker: Worker, item: Group | Call, reason: str, guilty: bool) -> None:
        """Ask another reward worker what a lost one has not answered. A call that was guilty of it
        has failed, so has a group that has cost two workers."""
        if isinstance(item, Call):
            if not guilty:
                return self._ask(item)
            return self._tell(Result(item.key, failure=f"env_error: {reason}", asker=item.asker))
        self.deaths[item.group_id] += guilty
        if self.deaths[item.group_id] < 2:
            return self.waiting.append((item, pack(item)))
        verdicts = [(0.0, (), f"verifier_lost: {reason}")] * len(item.trajectories)
        self._put(worker, Answer(item.group_id, item, Judgement(verdicts, time.time(), 0.0)))

    def _may_restart(self, worker: Worker) -> bool:
        """Whether the budget allows one more restart; it is noted, and forgotten in time. A reward
        worker that has worked is lost by what it was asked: that has failed, and is counted."""
        now = time.monotonic()
        recent = [t for t in self.times.get(worker.name, ()) if now - t < REFILL_SECONDS]
        free = worker.role == "reward" and worker.answered
        self.times[worker.name] = recent if free else [*recent, now]
        return free or len(recent) < self.restarts

    def _end(self, worker: Worker) -> None:
        """Kill a worker; a reward worker with all that its task has forked, and their files."""
        if worker.role == "reward" and self.start is start_here:
            with suppress(ProcessLookupError):
                os.killpg(worker.process.pid, signal.SIGKILL)
        worker.process.kill()
        worker.process.join(2.0)
        if folder := worker.status.get("folder"):
            shutil.rmtree(folder, ignore_errors=True)
