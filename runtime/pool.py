"""pool.py: worker processes, a private pipe to each, who has which work, and what follows a loss.

`Pool` spawns workers of several roles, issues groups to them, and gives out in order what happens:
answers, losses, silences. Training, evaluation and the synchronous trainer use the same class.
Whatever is out with a worker stands in its `work` until it is answered or the worker is gone. Then
groups of a rollout worker come back in `Lost`, and what a reward worker has not answered goes to
another one. A call that has cost a worker has failed; a group has failed when it has cost two.
Left out: what the answers mean (train_async.py), what runs in a worker (workers.py).

No lock and no queue is shared between processes, so `kill -9` of a worker can neither block nor
corrupt the others. One thread reads what workers send, never waits for one of them alone, and
replaces whoever is lost or silent. Each worker has a thread that sends, which may wait for it.
"""

import atexit
import os
import pickle
import shutil
import signal
import threading
import time
from collections import Counter, defaultdict, deque
from contextlib import suppress
from multiprocessing.connection import wait
from pathlib import Path

from runtime.config import AttemptLost, Config, TrainingStopped
from runtime.messages import Answer, Call, Group, Judgement, Lost, Result, Silent
from runtime.pipes import Worker, start_here
from tasks import limits

START_SECONDS = 120.0  # a new process may be silent this long: it imports, and Triton compiles
REFILL_SECONDS = 3600.0  # a restart is forgotten after so long: a run may last for days
NOTICE_SECONDS = 9.0  # of silence: people are told which worker
AT_ONCE = 2  # groups that a reward worker has: one that it judges, one that waits beside it


class Pool:
    """Workers by role: "rollout", "reward" and "learner".

    roles: name -> function, number of workers, and arguments: each runs function(line, *arguments).
    A group that comes back without a judgement goes on to the reward workers, at once.
    flaw(answer, group): what is wrong with an answer, or None; a worker that sends nonsense is
    replaced.
    start(name, function, number, log, arguments): a new process (name, pid, exitcode, kill, join)
    with the `connection` to it.
    """

    def __init__(
        self,
        roles: dict,
        config: Config,
        *,
        logs: Path,
        flaw,
        start=start_here,
        prefix="",  # of the workers' names
    ):
        self.roles, self.config, self.logs, self.flaw = roles, config, logs, flaw
        self.start, self.prefix = start, prefix
        # Lock and alarm for all that follows: of this process only, never shared with a worker.
        self.changed = threading.Condition(threading.RLock())
        self.workers = {}  # name -> Worker
        self.waiting = deque()  # groups that no reward worker has yet
        # group id -> the name of who got it last, until `receive` returns its verdict or its loss
        self.out = {}
        self.news = []  # (worker, message): what `receive` will give out
        # by group: reward workers that it has cost; by name: when a worker was replaced
        self.deaths, self.times = Counter(), defaultdict(list)
        self.closing = False
        for role, (_, count, *_) in roles.items():
            for number in range(count):
                self._spawn(role, number)
        self.reader = self._thread(self._read)
        atexit.register(self.close)  # however the run ends

    # ----------------------------------------------------------------------------- for the trainer

    def of(self, role: str) -> list[Worker]:
        """The workers of a role, by number."""
        return [worker for worker in [*self.workers.values()] if worker.role == role]

    def issue(self, groups: list[Group]) -> list[str]:
        """Give each group to the least busy rollout worker; returns the name of each one's."""
        with self.changed:
            for group in groups:
                worker = min(self.of("rollout"), key=lambda worker: len(worker.work))
                self._give(worker, group)
            return [self.out[group.group_id] for group in groups]

    def verify(self, groups: list[Group]) -> None:
        """Have groups judged: an `Answer` to each will come."""
        with self.changed:
            self.waiting.extend(groups)
            self.changed.notify_all()

    def ask(self, calls: list[Call]) -> None:
        """Send calls of a generator in this process: a `Result` to each will come."""
        for call in calls:
            self._route_call(call._replace(key=(-1, *call.key)))

    def tell(self, worker: Worker, message) -> None:
        """Send a message."""
        with self.changed:
            worker.outbox.append(message)
            self.changed.notify_all()

    def receive(self, seconds: float) -> list[tuple[Worker, object]]:
        """Everything that happened, waiting at most `seconds` for the first: (worker, message),
        where a message is an `Answer`, `Result`, `Lost` or `Silent`. TrainingStopped when a worker
        is lost and the restarts are used up, AttemptLost when it is a learner."""
        with self.changed:
            self.changed.wait_for(lambda: self.news, seconds)
            arrived, self.news = self.news, []
        for _, message in arrived:
            match message:
                case Exception():
                    raise message
                case Answer(group_id, _, Judgement()):
                    self.out.pop(group_id, None)
                case Lost(_, groups):
                    for group in groups:
                        del self.out[group.group_id]
        return arrived

    def close(self) -> None:
        """End every worker: close its pipe, wait a moment, kill what is left."""
        self.closing = True
        self.reader.join()  # a sender may be blocked, and ends with this process

    # ------------------------------------------------------------------------ inside: the threads

    def _give(self, worker: Worker, group: Group) -> None:
        """A group is out with a worker from here on."""
        worker.work[group.group_id] = group
        self.out[group.group_id] = worker.name
        self.tell(worker, group)

    def _thread(self, loop, *given) -> threading.Thread:
        """Start a thread of the pool."""
        thread = threading.Thread(target=loop, name=limits.OURS, args=given, daemon=True)
        thread.start()
        return thread

    def _send(self, worker: Worker) -> None:
        """The thread that sends one worker what was posted, as long as it has its place; a reward
        worker takes waiting groups."""
        while True:
            with self.changed:
                if self.closing or self.workers[worker.name] is not worker:
                    return
                groups = sum(type(key) is int for key in worker.work)  # calls have other keys
                if worker.role == "reward" and self.waiting and groups < AT_ONCE:
                    self._give(worker, self.waiting.popleft())
                letters = worker.outbox if worker.connection else []  # None: not begun elsewhere
                if not letters:
                    self.changed.wait(0.1)
                    continue
                worker.outbox = []
            data = pickle.dumps(letters, 5)
            with suppress(OSError, TypeError):  # it is gone, its pipe closed: the reader notices
                worker.connection.send_bytes(data)

    def _read(self) -> None:
        """The thread that takes what workers send, and replaces whoever is lost, until `close`.
        Successors die with it, so it is the one that ends all workers, too."""
        looked = time.monotonic()
        try:
            while not self.closing:
                workers = [*self.workers.values()]
                ready = wait([w.connection for w in workers if w.connection], 0.1)
                now = time.monotonic()
                stopped, looked = now - looked > 2.0, now  # with Ctrl-Z: it heard nobody
                for worker in workers:
                    if stopped:
                        worker.heard = now
                    reason = self._hear(worker) if worker.connection in ready else None
                    if reason := reason or self._silence(worker, now - worker.heard):
                        self._replace(worker, reason)
        except Exception as error:
            self._put(None, error)  # first: what others fail by when they are ended is no reason
            while not self.closing:
                time.sleep(0.05)
        finally:
            deadline = time.monotonic() + 2.0
            for worker in self.workers.values():
                if worker.connection:
                    worker.connection.close()
            for worker in self.workers.values():
                worker.process.join(max(0.0, deadline - time.monotonic()))
                self._end(worker)

    # -------------------------------------------------------------------- inside: what is received

    def _put(self, worker: Worker | None, message) -> None:
        """Give out a message; if it is an error, `receive` raises it."""
        with self.changed:
            self.news.append((worker, message))
            self.changed.notify_all()

    def _hear(self, worker: Worker) -> str | None:
        """Take what a worker has sent; returns what it is lost by."""
        try:
            for status, answers in worker.read():
                worker.heard, worker.last_word = time.monotonic(), "alive"
                worker.status |= status
                for answer in answers:
                    self._take(worker, answer)
        except (EOFError, OSError):
            return f"died ({worker.last_words()})"
        except Exception as error:  # bytes that are no messages raise almost anything
            return f"sent nonsense ({type(error).__name__}: {error})"

    def _take(self, worker: Worker, answer: Answer | Call | Result) -> None:
        """What is answered is not out with this worker any more; ValueError for nonsense."""
        with self.changed:
            if isinstance(answer, Call):
                return self._route_call(answer._replace(key=(worker.serial, *answer.key)))
            result = isinstance(answer, Result)
            key = answer.key if result else answer.group_id
            asked = worker.work.get(key)
            if asked is None:
                raise ValueError(f"an answer to {key}, which it does not have")
            if not result and (wrong := self.flaw(answer, asked)):
                raise ValueError(wrong)
            del worker.work[key]
            self.deaths.pop(key, None)  # evaluations have the same numbers again
            worker.answered, worker.last_word = True, f"answer to {key}"
            if result:
                return self._route_result(answer)
            answer = answer._replace(group=answer.group or asked)
            if answer.judgement is None:
                self.waiting.append(answer.group)
            self._put(worker, answer)

    def _route_call(self, call: Call) -> None:
        """A call goes to the reward worker that has the episode's state, or will have it; the end
        of all episodes of a generator goes to every one."""
        with self.changed:
            workers, (_, *episode) = self.of("reward"), call.key
            if episode:
                workers = [workers[sum(episode) % len(workers)]]
            for worker in workers:
                if call.answers is not None:
                    worker.work[call.key] = call
                self.tell(worker, call)

    def _route_result(self, result: Result) -> None:
        """A result goes to whoever has asked, if that still lives."""
        asker, *key = result.key
        result = result._replace(key=tuple(key))
        if asker < 0:
            self._put(None, result)
        for worker in self.of("rollout"):
            if worker.serial == asker:
                self.tell(worker, result)

    # ---------------------------------------------------------------------- inside: who is replaced

    def _spawn(self, role: str, number: int) -> None:
        """Start a worker, in the place of the one that had its name."""
        function, _, *arguments = self.roles[role]
        name = f"{self.prefix}{role}-{number}"
        log = str(self.logs / f"{name}.log")
        process = self.start(name, function, number, log, arguments)
        worker = self.workers[name] = Worker(role, number, process, log, time.monotonic())
        self._thread(self._send, worker)

    def _silence(self, worker: Worker, seconds: float) -> str | None:
        """Tell of a silence, once; returns that it is too long. A reward worker is heard after
        every time limit; who asks a model may need longer."""
        config, new = self.config, worker.last_word == "spawn"
        limit = START_SECONDS if new else config.silence
        if worker.role == "reward" and not (new or config.teacher or config.reward_model):
            limit = min(limit, 2 * config.reward_seconds + 2)
        if seconds > NOTICE_SECONDS and worker.noticed != worker.heard:
            worker.noticed = worker.heard
            self._put(worker, Silent(f"is silent for {seconds:.0f} s"))
        if seconds > limit:
            return f"was silent for {seconds:.0f} s"

    def _replace(self, worker: Worker, reason: str) -> None:
        """Report a loss, and start a successor while the budget lasts. If a reward worker had
        answered before, what it was asked is to blame (`_again`), and no restart is counted."""
        with self.changed:  # in one go: nobody is given work meanwhile
            self._end(worker)
            if worker.role == "learner":
                raise AttemptLost(f"{worker.name} {reason}")
            now = time.monotonic()
            times = [t for t in self.times[worker.name] if now - t < REFILL_SECONDS]
            if worker.role != "reward" or not worker.answered:
                times.append(now)
            if len(times) > self.config.restarts:
                used = f"{self.config.restarts} restarts are used up"
                last = f"(last: {worker.last_word}; log: {worker.log})"
                raise TrainingStopped(f"{worker.name} {reason}; {used} {last}")
            self.times[worker.name] = times
            self._spawn(worker.role, worker.number)
            work = [*worker.work.values()]
            if worker.role == "rollout":
                self._route_call(Call((worker.serial,), {}, None))  # its episodes are over
                return self._put(worker, Lost(reason, work))
            self._put(worker, Lost(reason, []))
            for item in work:
                self._again(worker, item, reason, guilty=item is work[0])  # it works in order

    def _again(self, worker: Worker, item: Group | Call, reason: str, guilty: bool) -> None:
        """Ask another reward worker what a lost one has not answered. A call that is to blame for
        the loss has failed; so has a group, but only when it has cost two workers."""
        if isinstance(item, Call):
            if guilty:
                return self._route_result(Result(item.key, failure=f"env_error: {reason}"))
            return self._route_call(item)
        self.deaths[item.group_id] += guilty
        if self.deaths[item.group_id] < 2:
            return self.waiting.append(item)
        del self.deaths[item.group_id]
        verdicts = [(0.0, (), f"verifier_lost: {reason}")] * len(item.trajectories)
        self._put(worker, Answer(item.group_id, item, Judgement(verdicts, time.time(), 0.0)))

    def _end(self, worker: Worker) -> None:
        """Kill a worker; a reward worker with all that its task has forked, and their files."""
        if worker.role == "reward" and self.start is start_here:
            with suppress(ProcessLookupError):
                os.killpg(worker.process.pid, signal.SIGKILL)
        worker.process.kill()
        worker.process.join(2.0)
        if folder := worker.status.get("folder"):
            shutil.rmtree(folder, ignore_errors=True)
