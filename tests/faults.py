"""Break a run on purpose: who fails, at which event, in which way; used by tests/test_faults.py and
by `python bench.py faults`.

    plan = [fail_at("rollout", "send", "SIGKILL", after=17), fail_at("learner", "log", "full disk")]

A fault strikes once, at the first such event of group `after` or a later one (of version `after`
in a learner: "learner" is the one in the parent, "team" are the others). Nothing in the product
knows about it: functions are wrapped in the process that they run in. As a script this file is a
trainer with a plan, that of $FAULTS/plan.json: `FAULTS=FOLDER faults.py FLAGS ...`.
"""

import contextlib
import dataclasses
import functools
import json
import os
import pickle
import random
import re
import resource
import shutil
import signal
import struct
import subprocess
import sys
import threading
import time
import traceback
from collections import Counter
from multiprocessing import resource_tracker
from pathlib import Path

from tqdm import tqdm

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

import learner  # noqa: E402
import train_async  # noqa: E402
import train_sync  # noqa: E402
from lab.plots import spread  # noqa: E402
from runtime import checkpoint, folder, mailbox, team, workers  # noqa: E402
from runtime import run as run_room  # noqa: E402
from runtime.config import Config, TrainingStopped, words  # noqa: E402
from runtime.ledger import audit  # noqa: E402
from runtime.messages import Answer, Group, Lost, Silent  # noqa: E402
from runtime.pipes import Line  # noqa: E402
from runtime.terminal import run_main  # noqa: E402
from runtime.verifier import reward_worker  # noqa: E402

HURT = ("SIGKILL", "SIGSTOP", "exception", "slow")
START = ("SIGKILL", "exception", "slow")  # nobody waits 120 s for one that stops as it starts
POISON = ("token", "log-prob", "version", "NaN reward", "missing verdict")  # more: test_pool.py
KINDS = {
    ("rollout", "start"): START,
    ("rollout", "receive"): HURT,
    ("rollout", "send"): (*HURT, "torn", "half", "duplicate", *POISON[:3]),
    ("reward", "start"): START,
    ("reward", "receive"): HURT,
    ("reward", "send"): (*HURT, "torn", "half", *POISON[3:]),
    ("learner", "train"): (*HURT, "NaN gradient", "no tracker"),
    ("learner", "publish"): ("SIGKILL", "slow"),
    ("learner", "checkpoint"): ("SIGKILL", "full disk"),
    ("learner", "log"): ("SIGKILL", "full disk"),
    ("team", "start"): START,
    ("team", "step"): HURT,
    ("team", "meeting"): HURT,  # as it comes to one
    ("team", "collective"): ("SIGKILL", "SIGSTOP"),  # some milliseconds later, while it is in it
}
ROLES = ("rollout", "reward", "learner", "team")
WORK = {"rollout": workers.rollout_worker, "team": workers.learner_worker, "reward": reward_worker}
FATAL = ("SIGKILL", "full disk", "exception")  # in the learner they end the run
STEPS, BATCH = 30, 4
FLAGS = {"steps": STEPS, "groups_per_step": BATCH, "group_size": 4, "slots": 16, "silence": 7.0}
FLAGS |= {"reward_seconds": 1.0, "eval_every": 1000, "checkpoint_every": 4, "restarts": 50}


def fail_at(role: str, event: str, kind: str, after: int = 0, share: float = 0.5) -> dict:
    """One fault; `share` of the bytes is written before a full disk or a kill in a checkpoint."""
    assert kind in KINDS[role, event], f"{role} {event} {kind}: must be one of {KINDS[role, event]}"
    return {"role": role, "event": event, "kind": kind, "after": after, "share": share}


# ------------------------------------------------------------------ inside the processes of a run


class Plan:
    """The faults of one role that have not struck yet, over all processes and resumes."""

    def __init__(self, place: str, role: str):
        self.place, self.now = Path(place), 0
        plan = json.loads((self.place / "plan.json").read_text())
        self.faults = [(i, fault) for i, fault in enumerate(plan) if fault["role"] == role]

    def due(self, event: str, now: int) -> dict | None:
        """The fault that strikes at this event, marked as such; None if there is none."""
        for i, fault in self.faults:
            if fault["event"] == event and now >= fault["after"]:
                with contextlib.suppress(FileExistsError):  # it has struck
                    with (self.place / f"{i}.json").open("x") as file:
                        json.dump({"t": time.monotonic(), "pid": os.getpid()}, file)
                    return fault

    def before(self, room, name: str, event: str, strike) -> None:
        """Replace room.name by a function that strikes first, with the fault and what it is given.
        The version is that of the newest argument that has one."""
        real = getattr(room, name)

        def called(*arguments, **options):
            self.now = getattr(arguments[0], "version", self.now)
            if fault := self.due(event, self.now):
                strike(fault, *arguments)
            return real(*arguments, **options)

        setattr(room, name, called)


def hurt(fault: dict | None, *_) -> None:
    """What a process can do to itself."""
    kind = fault and fault["kind"]
    if kind == "exception":
        raise RuntimeError("injected")
    if kind == "slow":
        time.sleep(1.5)
    elif kind in HURT:
        os.kill(os.getpid(), getattr(signal, kind))


class Breaking(Line):
    """A worker's end of its pipe, with a plan."""

    def __init__(self, line: Line, plan: Plan):
        self.__dict__.update(line.__dict__)
        self.plan = plan

    def send(self, *messages):
        for message in messages:
            fault = isinstance(message, Answer) and self.plan.due("send", message.group_id)
            super().send(self.spoiled(fault, message) if fault else message)
        if not messages:
            super().send()

    def spoiled(self, fault: dict, message: Answer) -> Answer:
        """What is sent in place of a message, if anything can be sent any more."""
        delivery = pickle.dumps(({}, [message]), 5)
        if fault["kind"] == "torn":
            self.connection.send_bytes(delivery[:-7])
        elif fault["kind"] == "half":
            start = struct.pack("!i", len(delivery)) + delivery[: len(delivery) // 2]
            os.write(self.connection.fileno(), start)
            die()
        elif fault["kind"] == "duplicate":
            super().send(message)
        hurt(fault)
        return poisoned(fault["kind"], message)

    def receive(self, seconds=0.0):
        messages = super().receive(seconds)
        for message in messages:
            if isinstance(message, Group):
                hurt(self.plan.due("receive", message.group_id))
        return messages


def poisoned(kind: str, message: Answer) -> Answer:
    """The message with one wrong thing in it."""
    if kind == "NaN reward":
        message.judgement.verdicts[0] = float("nan"), (), None
    if kind == "missing verdict":
        message.judgement.verdicts.pop()
    if kind not in POISON[:3]:
        return message
    group = message.group
    episode = group.trajectories[0]
    first = episode.loss_mask.nonzero()[0][0]
    if kind == "token":
        episode.tokens[first] = 70000
    if kind == "log-prob":
        episode.logprobs[first] = float("nan")
    if kind == "version":
        episode.versions[first] = group.start - 1
    return message


def broken(place: str, role: str, line: Line, *arguments) -> None:
    """What runs in a worker instead of its role's function."""
    plan = Plan(place, role)
    hurt(plan.due("start", 10**9))
    if role == "team":
        plan.before(workers, "learner_step", "step", hurt)
        plan.before(team, "together", "meeting", hurt)
        plan.before(team, "together", "collective", hurt_soon)
    WORK[role](line if role == "team" else Breaking(line, plan), *arguments)


def hurt_soon(fault: dict, *_) -> None:
    threading.Timer(fault["share"] * 0.004, hurt, [fault]).start()


def die(*_, **__) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


OFFSETS = (0.0, 0.0001, 0.25, 0.5, 0.75, 0.999, 1.0, "fsync", "replace", "after replace", "unlink")


def die_in_checkpoint(offset: float | str) -> None:
    """From now on this process is killed while it writes a checkpoint: after a share of its bytes,
    or instead of (or after) one of the calls that follow."""
    real, unlink = checkpoint.write_file, Path.unlink

    def write(path, data):
        match offset:
            case "fsync":
                os.fsync = die
            case "replace":
                Path.replace = die
            case "after replace":
                folder.sync_folder = die
            case "unlink":
                Path.unlink = lambda path, **how: (
                    die() if path.suffix == ".pt" else unlink(path, **how)
                )
            case _:
                full_at(int(offset * (len(data) - 1)), dies=True)
        real(path, data)

    checkpoint.write_file = write


def full_at(size: int, dies: bool = False) -> None:
    """No file of this process may grow beyond a size: the kernel writes what fits, and refuses the
    rest with an error, or kills whoever tries."""
    if dies:
        resource.setrlimit(resource.RLIMIT_CORE, (0, resource.RLIM_INFINITY))
        signal.signal(signal.SIGXFSZ, signal.SIG_DFL)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, resource.RLIM_INFINITY))


def break_parent(place: str) -> None:
    """Replace what the parent calls by functions with a plan, and note when it loses a worker."""
    plan, real = Plan(place, "learner"), train_async.handle

    def train(fault, learner):
        if fault["kind"] == "SIGSTOP":  # and somebody says fg after a second
            subprocess.Popen(["sh", "-c", f"sleep 1; kill -CONT {os.getpid()}"])
        elif fault["kind"] == "NaN gradient":
            learner.model.flat_grad[0] = float("nan")
        elif fault["kind"] == "no tracker":
            os.kill(resource_tracker._resource_tracker._pid, signal.SIGKILL)
        hurt(fault)

    def save(fault, *_):
        if fault["kind"] == "full disk":
            return full_at(int(fault["share"] * 1_500_000))
        die_in_checkpoint(OFFSETS[int(fault["share"] * len(OFFSETS))])

    def append(fault, log, *_):  # in the middle of a line
        full_at(log.mark[0] + int(40 * fault["share"]), dies=fault["kind"] == "SIGKILL")

    def handle(run, worker, message):
        if isinstance(message, Lost | Silent):
            note = {"t": time.monotonic(), "pid": worker.process.pid, "reason": message.reason}
            with (Path(place) / "noticed.jsonl").open("a") as file:
                file.write(json.dumps(note) + "\n")
        return real(run, worker, message)

    plan.before(learner, "gather_gradient", "train", train)  # in the middle of a step
    plan.before(mailbox.Mailbox, "publish", "publish", hurt)
    plan.before(run_room, "save_checkpoint", "checkpoint", save)
    plan.before(folder.Log, "append", "log", append)
    train_async.handle = handle


# ------------------------------------------------------------------------------------- campaigns


def checkpoint_kills(place: Path, rounds: int) -> dict:
    """A synchronous run that is killed in every checkpoint it writes, at every offset `rounds`
    times, and resumed each time; and one that is left alone."""
    steps, parts = rounds * len(OFFSETS) + 1, place / "parts"
    flags = {**FLAGS, "reference_every": 2, "checkpoint_every": 1, "steps": steps}
    config = Config(**flags, out=str(place / "whole"))
    quietly(train_sync.train, config)
    config = dataclasses.replace(config, out=str(parts))
    killed_at("after replace", lambda: train_sync.train(config))  # the first one, at version 0
    resume = Config(resume=str(parts))
    for offset in tqdm(OFFSETS * rounds, "kills in a checkpoint"):
        killed_at(offset, lambda: train_sync.train(resume))
    version = checkpoint.load_checkpoint(parts)["version"]
    quietly(train_sync.train, resume)
    one, other = (summary_of(place / name)["weights_sha256"] for name in ("whole", "parts"))
    rows = [row["step"] for row in folder.read_lines(parts / "metrics.jsonl")]
    assert rows == list(range(steps + 1)), rows
    return {
        "kills": rounds * len(OFFSETS),
        "offsets": list(OFFSETS),
        "steps": [version, steps],  # at the last kill, and at the end
        "bitwise_equal": one == other,
    }


def summary_of(run: Path) -> dict:
    return json.loads((run / "summary.json").read_text())


def quietly(function, *arguments) -> None:
    with open(os.devnull, "w") as nowhere, contextlib.redirect_stdout(nowhere):
        with contextlib.redirect_stderr(nowhere):
            function(*arguments)


def killed_at(offset: float | str, work) -> None:
    """Run `work` in a child that is killed while it writes a checkpoint."""
    child = os.fork()
    if child == 0:
        die_in_checkpoint(offset)
        try:
            quietly(work)
        except BaseException:  # the assertion below says that the child was not killed
            traceback.print_exc()
        finally:
            os._exit(0)
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    assert code in KILLED, f"the child was not killed at {offset}: exit code {code}"


KILLED = (-signal.SIGKILL, -signal.SIGXFSZ)


def campaign(place: Path, faults: int, seed: int = 0, roles=ROLES):
    """Runs with 8 random faults each, until `faults` have struck; yields the result so far."""
    choose, deck, runs, failures = random.Random(seed), [], [], []
    progress = tqdm(total=faults, unit="fault")
    while sum(len(run["faults"]) for run in runs) < faults:
        plan = random_plan(choose, deck, 8, roles)
        flags = {"max_staleness": choose.choice((1, 2, 4)), "seed": len(runs)}
        flags |= {"swap": choose.choice(("keep", "recompute", "drain"))}
        flags |= {"rollout_workers": choose.choice((1, 2)), "reward_workers": choose.choice((1, 2))}
        hurts_team = any(fault["role"] == "team" for fault in plan)
        flags |= {"learners": choose.choice((2, 2, 3)) if hurts_team else 1}
        here = place / f"{len(runs) + len(failures)}"
        try:
            runs.append(run_plan(here, plan, **flags) | {"flags": flags})
            shutil.rmtree(here)
            progress.update(len(runs[-1]["faults"]))
        except (AssertionError, ValueError, TrainingStopped) as error:
            failures.append({"said": str(error), "plan": plan, "flags": flags})
            tqdm.write(f"FAILED: {error}; {flags}")
        yield figures_of(runs) | {"failures": failures, "seed": seed, "runs": runs}
    progress.close()


def figures_of(runs: list[dict]) -> dict:
    """The figures of the runs that came to their end."""
    kinds = Counter(f"{f['role']}: {f['kind']}" for run in runs for f in run["faults"])
    waits = {
        name: [t for run in runs for t in run["noticed_after_s"][name]]
        for name in ("dead", "stopped")
    }
    return {
        "faults": sum(kinds.values()),
        "kinds": dict(sorted(kinds.items())),
        "lost": sum(run["lost"] for run in runs),
        "duplicated": sum(run["duplicated"] for run in runs),
        "ends": dict(Counter(end.split(":")[0] for run in runs for end in run["ends"])),
        "requeued": sum(run["requeued"] for run in runs),
        "no_progress_s": max((run["no_progress_s"] for run in runs), default=0.0),
        "noticed_after_s": {k: spread(v) | {"count": len(v)} for k, v in waits.items() if v},
    }


def random_plan(choose: random.Random, deck: list, faults: int, roles=ROLES) -> list[dict]:
    """Faults of every kind of some roles in turn; at most two that end the whole run."""
    plan, fatal, aside = [], 0, []
    while len(plan) < faults:
        if not deck:
            deck += [(*at, kind) for at, kinds in KINDS.items() for kind in kinds if at[0] in roles]
            choose.shuffle(deck)
        role, event, kind = deck.pop()
        if role == "learner" and kind in FATAL and (fatal := fatal + 1) > 2:
            aside.append((role, event, kind))
            continue
        last = STEPS - 4 if role in ("learner", "team") else (STEPS - 4) * BATCH
        plan.append(fail_at(role, event, kind, choose.randrange(last), choose.random()))
    deck += aside
    return plan


def run_plan(place: Path, plan: list[dict], seconds: float = 200.0, **flags) -> dict:
    """Train with a plan and resume until the run is finished; what it took, and what was lost.

    Raises AssertionError when a run hangs, ends without saying why, or leaves something behind.
    """
    place.mkdir(parents=True)
    (place / "plan.json").write_text(json.dumps(plan))
    flags = {**FLAGS, **flags}
    run, ends, begin = place / "run-0", [], time.monotonic()
    while not ends or ends[-1] != "finished":
        again = any((run / "checkpoints").glob("*.pt"))
        if run.is_dir() and not again:  # it had no checkpoint yet
            run = place / f"run-{len(ends)}"
        given = {"resume": run} if again else {"out": run, **flags}
        command = [sys.executable, __file__, *words(given)]
        here = {"start_new_session": True, "env": os.environ | {"FAULTS": str(place)}}
        process = subprocess.Popen(command, stdout=-3, stderr=subprocess.PIPE, text=True, **here)
        try:
            _, err = process.communicate(timeout=seconds)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            raise AssertionError(f"{run} hangs: {plan}") from None
        ends.append(end_of(process.returncode, err.strip().splitlines()[-1]))
        assert group_is_gone(process.pid), f"{run} leaves processes behind: {plan}"
        assert len(ends) < 12, f"{run} does not finish: {ends}"
    return judged(run, place, flags) | {"ends": ends, "seconds": time.monotonic() - begin}


def end_of(code: int, last: str) -> str:
    """How a run ended: "finished", "killed", or the error that it names."""
    if code in KILLED:
        return "killed"
    last = re.sub(r"^(\[rank\d+\]: ?)+", "", last)  # torch says so where learners have met
    named = ("stopped: ", "RuntimeError: injected")
    assert code == 0 or (code == 1 and last.startswith(named)), f"exit code {code}: {last}"
    return last if code else "finished"


def group_is_gone(group: int, seconds: float = 10.0) -> bool:
    """Whether no process of the group is left (Python's resource tracker is the last to go)."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        try:
            os.killpg(group, 0)
        except ProcessLookupError:
            return True
        time.sleep(0.05)
    return False


def judged(run: Path, place: Path, flags: dict) -> dict:
    """What became of the prompts of a finished run, and how quickly losses were noticed."""
    events, totals = folder.read_lines(run / "events.jsonl"), audit(run).totals()
    trained = [g for e in events if e["kind"] == "train" for g in e["groups"]]
    # a group that has cost two reward workers has failed, and another is in its place
    failed = {event["group"] for event in events if event.get("reason") == "verifier_lost"}
    wanted = {*range(flags["steps"] * flags["groups_per_step"] + len(failed))} - failed
    times = [row["t"] for row in folder.read_lines(run / "metrics.jsonl")]
    plan = json.loads((place / "plan.json").read_text())
    marks = {int(path.stem): json.loads(path.read_text()) for path in place.glob("[0-9]*.json")}
    struck = [plan[i] | marks[i] for i in sorted(marks)]
    waits = {"dead": [], "stopped": []}
    for fault in struck:
        told = [n["t"] - fault["t"] for n in losses_noticed(place) if n["pid"] == fault["pid"]]
        after = [seconds for seconds in told if seconds >= 0]  # not that it was slow before
        name = {"SIGKILL": "dead", "half": "dead", "SIGSTOP": "stopped"}.get(fault["kind"])
        if name and after and fault["role"] != "learner":
            waits[name].append(min(after))
    replayed = True
    try:
        quietly(train_async.train, Config(replay=str(run)))
    except TrainingStopped as error:  # it names what came from outside, and nothing else
        replayed = str(error)
        nan = any(fault["kind"] == "NaN gradient" for fault in struck)
        assert nan and replayed.endswith("was nan"), replayed
    staleness = summary_of(run)["staleness"]
    assert staleness["max"] <= staleness["bound"], staleness
    assert totals["in_flight"] == 0, totals
    assert totals["admitted"] == totals["trained"] + len(failed), totals
    return {
        "faults": [plan[i] for i in sorted(marks)],
        "lost": len(wanted - set(trained)),
        "duplicated": len(trained) - len(set(trained)),
        "staleness": staleness,
        "requeued": totals["requeued"],
        "replayed": replayed,
        "no_progress_s": max(b - a for a, b in zip(times[1:], times[2:], strict=False)),
        "noticed_after_s": waits,
    }


def losses_noticed(place: Path) -> list[dict]:
    """When the parent of a run has noticed that a worker was dead or silent, and of what."""
    path = place / "noticed.jsonl"
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def main() -> None:
    if place := os.environ.get("FAULTS"):
        workers.rollout_worker = functools.partial(broken, place, "rollout")
        workers.learner_worker = functools.partial(broken, place, "team")
        run_room.reward_worker = functools.partial(broken, place, "reward")
        break_parent(place)
    run_main(train_async.train, __doc__)


if __name__ == "__main__":
    import faults  # a worker imports what it runs from a module

    faults.main()
