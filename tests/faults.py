"""Break a run on purpose: who fails, at which event, in which way; used by tests/test_faults.py and
by `python bench.py faults`.

    plan = [fail_at("rollout", "send", "SIGKILL", after=17), fail_at("learner", "log", "full disk")]

A fault strikes once, at the first such event of group `after` or a later one (of version `after`
in a learner: "learner" is the one in the parent, "team" are the others). Nothing in the product
knows about it: the roles' functions are wrapped before a pool is started, and the learner's calls
are replaced in its process. As a script this file is a trainer with a plan, that of
$FAULTS/faults/plan.json: `FAULTS=FOLDER faults.py FLAGS ...`.
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
from learner import learner_step  # noqa: E402
from runtime import checkpoint, team, workers  # noqa: E402
from runtime import folder as run_folder  # noqa: E402
from runtime import mailbox as weight_mailbox  # noqa: E402
from runtime import run as run_room  # noqa: E402
from runtime.config import Config, TrainingStopped, words  # noqa: E402
from runtime.folder import read_lines  # noqa: E402
from runtime.ledger import audit  # noqa: E402
from runtime.messages import Answer, Group, Lost, Silent, ToVerify, pack, unpack  # noqa: E402
from runtime.pipes import Line  # noqa: E402
from runtime.terminal import run_main  # noqa: E402
from runtime.verifier import reward_worker  # noqa: E402

HURT = ("SIGKILL", "SIGSTOP", "exception", "slow")
POISON = ("length", "token", "log-prob", "version", "start", "turn", "duplicate")
KINDS = {
    ("rollout", "start"): ("SIGKILL", "exception", "slow"),
    ("rollout", "receive"): HURT,
    ("rollout", "send"): (*HURT, "torn", "half", *POISON),
    ("reward", "start"): ("SIGKILL", "exception", "slow"),
    ("reward", "receive"): HURT,
    ("reward", "send"): (*HURT, "torn", "half", "NaN reward", "missing verdict"),
    ("learner", "train"): (*HURT, "NaN gradient", "no tracker"),
    ("learner", "publish"): ("SIGKILL", "slow"),
    ("learner", "checkpoint"): ("SIGKILL", "full disk"),
    ("learner", "log"): ("SIGKILL", "full disk"),
}
TEAM_EVENTS = ("step", "meeting", "collective", "moments")
KINDS |= {("team", event): HURT for event in TEAM_EVENTS}
KINDS["team", "start"] = ("SIGKILL", "exception", "slow")
ROLES = ("rollout", "reward", "learner", "team")
FATAL = ("SIGKILL", "full disk", "exception")  # in the learner they end the run
STEPS, BATCH = 30, 4
FLAGS = {"steps": STEPS, "groups_per_step": BATCH, "group_size": 4, "slots": 16, "silence": 7.0}
FLAGS |= {
    "reward_seconds": 1.0,
    "eval_every": 1000,
    "checkpoint_every": 4,
    "restarts": 50,
}


def fail_at(role: str, event: str, kind: str, after: int = 0, share: float = 0.5) -> dict:
    """One fault; `share` of the bytes is written before a full disk or a kill in a checkpoint."""
    assert kind in KINDS[role, event], f"{role} {event} {kind}: must be one of {KINDS[role, event]}"
    return {"role": role, "event": event, "kind": kind, "after": after, "share": share}


class Plan:
    """The faults of one role that have not struck yet, over all processes and resumes."""

    def __init__(self, folder: str, role: str):
        self.marks = Path(folder) / "faults"
        plan = json.loads((self.marks / "plan.json").read_text())
        self.faults = [(i, fault) for i, fault in enumerate(plan) if fault["role"] == role]

    def due(self, event: str, now: int) -> dict | None:
        """The fault that strikes at this event, marked as such; None if there is none."""
        for i, fault in self.faults:
            if fault["event"] == event and now >= fault["after"]:
                try:
                    with (self.marks / f"{i}.json").open("x") as file:
                        json.dump({"t": time.monotonic(), "pid": os.getpid()}, file)
                    return fault
                except FileExistsError:
                    continue
        return None


def hurt(kind: str) -> None:
    """What a process can do to itself."""
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
        sent = []
        for message in messages:
            if isinstance(message, Answer) and (fault := self.plan.due("send", message.group_id)):
                message = self.strike(fault["kind"], message)
            sent.append(message)
        super().send(*sent)

    def strike(self, kind: str, message):
        """Spoil a message that is sent next, or send it in another way."""
        delivery = pickle.dumps(({}, [message]), 5)
        if kind == "torn":
            self.connection.send_bytes(delivery[:-7])
        elif kind == "half":
            start = struct.pack("!i", len(delivery)) + delivery[: len(delivery) // 2]
            os.write(self.connection.fileno(), start)
            hurt("SIGKILL")
        elif kind == "duplicate":
            super().send(message)
        hurt(kind)
        return poisoned(kind, message)

    def receive(self, seconds=0.0):
        messages = super().receive(seconds)
        for message in messages:
            if isinstance(message, Group | ToVerify):
                number = message.group_id if isinstance(message, Group) else message.packed[0]
                if fault := self.plan.due("receive", number):
                    hurt(fault["kind"])
        return messages


def poisoned(kind: str, message: Answer) -> Answer:
    """The message with one wrong thing in it."""
    if message.group is None:  # from a reward worker
        verdicts = message.judgement.verdicts
        if kind == "NaN reward":
            verdicts[0] = float("nan"), *verdicts[0][1:]
        elif kind == "missing verdict":
            verdicts.pop()
        return message
    group = unpack(message.group)
    episode = group.trajectories[0]
    first = episode.loss_mask.nonzero()[0][0]
    if kind == "length":
        episode.tokens = episode.tokens[:-1]
    elif kind == "turn":
        (start, stop), *others = episode.turns
        episode.turns = [(start, stop + 1), *others]
    elif kind == "start":
        group.start -= 1
    elif kind == "token":
        episode.tokens[first] = 70000
    elif kind == "log-prob":
        episode.logprobs[first] = float("nan")
    elif kind == "version":
        episode.versions[first] = group.start - 1
    return message._replace(group=pack(group))


def broken(folder: str, role: str, line: Line, *arguments) -> None:
    """What runs in a worker instead of its role's function."""
    plan = Plan(folder, role)
    fault = plan.due("start", 10**9)
    hurt(fault["kind"] if fault else "")
    work = reward_worker if role == "reward" else real_rollout_worker
    work(Breaking(line, plan), *arguments)


def die(*_, **__) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def break_team(folder: str, line: Line, *arguments) -> None:
    """What runs in a learner beside the parent's: its steps and meetings, with a plan.

    "meeting": as it comes to one; "collective": some milliseconds later, while it is in it.
    """
    plan, version = Plan(folder, "team"), [0]

    def strike(event: str) -> None:
        if fault := plan.due(event, version[0]):
            if event == "collective" and fault["kind"].startswith("SIG"):
                threading.Timer(fault["share"] * 0.004, hurt, [fault["kind"]]).start()
            else:
                hurt(fault["kind"])

    def step(learner, *others):
        version[0] = learner.version
        strike("step")
        real_step(learner, *others)

    def called(learner):
        strike("moments")
        real_moments(learner)

    @contextlib.contextmanager
    def together(team, name):
        strike("meeting")
        with real_meeting(team, name):
            strike("collective")
            yield

    real_step, real_moments, real_meeting = learner_step, workers.whole_moments, team.together
    workers.learner_step, workers.whole_moments, team.together = step, called, together
    if fault := plan.due("start", 10**9):
        hurt(fault["kind"])
    real_learner_worker(line, *arguments)


real_learner_worker, real_rollout_worker = workers.learner_worker, workers.rollout_worker


OFFSETS = (0.0, 0.0001, 0.25, 0.5, 0.75, 0.999, 1.0, "fsync", "replace", "after replace", "unlink")


def die_in_checkpoint(offset: float | str) -> None:
    """From now on this process is killed while it writes a checkpoint: after a share of the bytes,
    or instead of (or after) one of the calls that follow."""
    if offset == "fsync":
        os.fsync = die
    elif isinstance(offset, str):
        name = offset.split()[-1]
        real = getattr(Path, name)

        def called(path, *arguments, **options):
            of_checkpoint = path.parent.name == "checkpoints"
            if not of_checkpoint or (name == "unlink" and path.suffix == ".partial"):
                return real(path, *arguments, **options)
            if offset.startswith("after"):
                real(path, *arguments)
            die()

        setattr(Path, name, called)
    else:
        open_ = Path.open

        class Half:
            """A file that takes a share of the first thing that is written, and kills."""

            def __init__(self, file):
                self.file = file

            def __enter__(self):
                return self

            def __exit__(self, *error):
                pass

            def writelines(self, parts):
                self.file.write(bytes(parts[0])[: int(offset * len(parts[0]))])
                die()

        def half(path, mode="r", **options):
            writes = mode == "xb" and path.parent.name == "checkpoints"
            return Half(open_(path, mode, buffering=0)) if writes else open_(path, mode, **options)

        Path.open = half


def full_disk(path: Path, share: float) -> None:
    """No file of this process may grow beyond a size that is reached in the middle of what is
    written next: the kernel writes what fits, and refuses the rest."""
    size = int(share * 1_500_000) if path.is_dir() else path.stat().st_size + int(40 * share)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, resource.RLIM_INFINITY))


def break_learner(folder: str) -> None:
    """Replace what the parent calls by functions with a plan."""
    plan, version = Plan(folder, "learner"), [0]

    def before(room, name: str, event: str, strike) -> None:
        real = getattr(room, name)

        def called(*arguments, **options):
            if event == "train":
                version[0] = arguments[0].version
            if fault := plan.due(event, version[0]):
                strike(fault, *arguments)
            return real(*arguments, **options)

        setattr(room, name, called)

    def train(fault, learner, *_):
        if fault["kind"] == "SIGSTOP":  # and somebody says fg after a second
            subprocess.Popen(["sh", "-c", f"sleep 1; kill -CONT {os.getpid()}"])
        if fault["kind"] == "NaN gradient":
            learner.model.flat_grad[0] = float("nan")
        if fault["kind"] == "no tracker":
            os.kill(resource_tracker._resource_tracker._pid, signal.SIGKILL)
        hurt(fault["kind"])

    def write(fault, path, *_):
        if fault["kind"] == "full disk":
            full_disk(path, fault["share"])
        elif path.is_dir():
            die_in_checkpoint(OFFSETS[int(fault["share"] * len(OFFSETS))])
        else:
            die()

    before(learner, "gather_gradient", "train", train)  # in the middle of a step
    before(weight_mailbox.Mailbox, "publish", "publish", lambda fault, *_: hurt(fault["kind"]))
    before(checkpoint, "save_checkpoint", "checkpoint", write)
    before(run_folder.Log, "append", "log", lambda fault, log, *_: write(fault, log.path))


def note_losses(folder: str) -> None:
    """Write down when the parent notices that a worker is dead or silent."""
    real = train_async.handle

    def handle(run, worker, message):
        if isinstance(message, Lost | Silent):
            record = {"t": time.monotonic(), "pid": worker.process.pid, "name": worker.name}
            record |= {"kind": type(message).__name__, "reason": message.reason}
            with (Path(folder) / "faults" / "noticed.jsonl").open("a") as file:
                file.write(json.dumps(record) + "\n")
        return real(run, worker, message)

    train_async.handle = handle


def losses_noticed(folder: Path) -> list[dict]:
    """What `note_losses` has written down."""
    path = folder / "faults" / "noticed.jsonl"
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


# ------------------------------------------------------------------------------------- campaigns


def checkpoint_kills(folder: Path, rounds: int) -> dict:
    """A synchronous run that is killed in every checkpoint it writes, at every offset `rounds`
    times, and resumed each time; and one that is left alone."""
    steps, parts = rounds * len(OFFSETS) + 1, folder / "parts"
    flags = {**FLAGS, "reference_every": 2, "checkpoint_every": 1, "steps": steps}
    config = Config(**flags, out=str(folder / "whole"))
    quietly(train_sync.train, config)
    config = dataclasses.replace(config, out=str(parts))
    killed_at("after replace", lambda: train_sync.train(config))  # the first one, at version 0
    resume = Config(resume=str(parts))
    for offset in tqdm(OFFSETS * rounds, "kills in a checkpoint"):
        killed_at(offset, lambda: train_sync.train(resume))
    version = checkpoint.load_checkpoint(parts)["version"]
    quietly(train_sync.train, resume)
    summaries = [folder / name / "summary.json" for name in ("whole", "parts")]
    one, other = (json.loads(path.read_text())["weights_sha256"] for path in summaries)
    rows = [row["step"] for row in read_lines(parts / "metrics.jsonl")]
    assert rows == list(range(steps + 1)), rows
    return {
        "kills": rounds * len(OFFSETS),
        "offsets": list(OFFSETS),
        "steps": [version, steps],  # at the last kill, and at the end
        "bitwise_equal": one == other,
    }


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
    _, status = os.waitpid(child, 0)
    killed = os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGKILL
    assert killed, f"the child was not killed at {offset}: status {status}"


def campaign(folder: Path, faults: int, seed: int = 0, roles=ROLES):
    """Runs with 8 random faults each, until `faults` have struck; yields the result so far."""
    choose, deck, runs, failures = random.Random(seed), [], [], []
    progress = tqdm(total=faults, unit="fault")
    while sum(len(run["faults"]) for run in runs) < faults:
        plan = random_plan(choose, deck, 8, roles)
        flags = {"max_staleness": choose.choice((1, 2, 4)), "seed": len(runs)}
        flags |= {"swap": choose.choice(("keep", "recompute", "drain"))}
        flags |= {"rollout_workers": choose.choice((1, 2)), "reward_workers": choose.choice((1, 2))}
        flags |= {"learners": choose.choice((2, 2, 3)) if any_of("team", plan) else 1}
        place = folder / f"{len(runs) + len(failures)}"
        try:
            runs.append(run_plan(place, plan, **flags) | {"flags": flags})
            shutil.rmtree(place)
            progress.update(len(runs[-1]["faults"]))
        except (AssertionError, ValueError, TrainingStopped) as error:
            failures.append({"said": str(error), "plan": plan, "flags": flags})
            tqdm.write(f"FAILED: {error}; {flags}")
        yield told(runs) | {"failures": failures, "seed": seed, "runs": runs}
    progress.close()


def any_of(role: str, plan: list) -> bool:
    """Whether a plan has faults of a role."""
    return any(fault["role"] == role for fault in plan)


def told(runs: list[dict]) -> dict:
    """The figures of the runs that came to their end."""
    kinds = Counter(f"{f['role']}: {f['kind']}" for run in runs for f in run["faults"])
    waits = {
        kind: [t for run in runs for t in run["noticed_after_s"][kind]]
        for kind in ("dead", "stopped")
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
    plan, ends, aside = [], 0, []
    while len(plan) < faults:
        if not deck:
            deck += [
                (place, k) for place, kinds in KINDS.items() for k in kinds if place[0] in roles
            ]
            choose.shuffle(deck)
        (role, event), kind = deck.pop()
        fatal = role == "learner" and kind in FATAL
        if fatal and (ends := ends + 1) > 2:
            aside.append(((role, event), kind))
            continue
        last = STEPS - 4 if role in ("learner", "team") else (STEPS - 4) * BATCH
        plan.append(fail_at(role, event, kind, choose.randrange(last), choose.random()))
    deck += aside
    return plan


def run_plan(folder: Path, plan: list[dict], seconds: float = 200.0, **flags) -> dict:
    """Train with a plan and resume until the run is finished; what it took, and what was lost.

    Raises AssertionError when a run hangs, ends without saying why, or leaves something behind.
    """
    (folder / "faults").mkdir(parents=True)
    (folder / "faults" / "plan.json").write_text(json.dumps(plan))
    flags = {**FLAGS, **flags}
    run, ends, begin = folder / "run-0", [], time.monotonic()
    while not ends or ends[-1] != "finished":
        again = run.is_dir() and any((run / "checkpoints").glob("*.pt"))
        if run.is_dir() and not again:  # it had no checkpoint yet
            run = folder / f"run-{len(ends)}"
        where = {"resume": run} if again else {"out": run, **flags}
        options = words(where)
        command = [sys.executable, __file__, *options]
        here = {"start_new_session": True, "env": os.environ | {"FAULTS": str(folder)}}
        process = subprocess.Popen(command, stdout=-3, stderr=subprocess.PIPE, text=True, **here)
        try:
            _, err = process.communicate(timeout=seconds)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            raise AssertionError(f"{run} hangs: {plan}") from None
        ends.append(end_of(process.returncode, err.strip().splitlines()[-1]))
        assert group_is_gone(process.pid), f"{run} leaves processes behind: {plan}"
        assert len(ends) < 12, f"{run} does not finish: {ends}"
    return judged(run, folder, flags) | {"ends": ends, "seconds": time.monotonic() - begin}


def end_of(code: int, last: str) -> str:
    """How a run ended: "finished", "killed", or the error that it names."""
    if code == -signal.SIGKILL:
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


def judged(run: Path, folder: Path, flags: dict) -> dict:
    """What became of the prompts of a finished run, and how quickly losses were noticed."""
    events, ledger = read_lines(run / "events.jsonl"), audit(run)
    summary = json.loads((run / "summary.json").read_text())
    trained = [g for e in events if e["kind"] == "train" for g in e["groups"]]
    # a group that has cost two reward workers has failed, and another is in its place
    failed = {event["group"] for event in events if event.get("reason") == "verifier_lost"}
    wanted = {*range(flags["steps"] * flags["groups_per_step"] + len(failed))} - failed
    times = [row["t"] for row in read_lines(run / "metrics.jsonl")]
    marks = (folder / "faults").glob("[0-9]*.json")
    struck = {int(mark.stem): json.loads(mark.read_text()) for mark in marks}
    plan = json.loads((folder / "faults" / "plan.json").read_text())
    noticed = losses_noticed(folder)
    deaths = [plan[i] | mark for i, mark in struck.items() if plan[i]["role"] != "learner"]
    waits = {"dead": [], "stopped": []}
    for death in deaths:
        told = [n["t"] - death["t"] for n in noticed if n["pid"] == death["pid"]]
        after = [seconds for seconds in told if seconds >= 0]  # not that it was slow before
        if after and death["kind"] in ("SIGKILL", "half"):
            waits["dead"].append(min(after))
        elif after and death["kind"] == "SIGSTOP":
            waits["stopped"].append(min(after))
    totals = ledger.totals()
    replayed = True
    try:
        quietly(train_async.train, Config(replay=str(run)))
    except TrainingStopped as error:  # it names what came from outside, and nothing else
        replayed = str(error)
        nan = any(plan[i]["kind"] == "NaN gradient" for i in struck)
        assert nan and replayed.endswith("was nan"), replayed
    assert summary["staleness"]["max"] <= summary["staleness"]["bound"], summary["staleness"]
    assert totals["in_flight"] == 0, totals
    assert totals["admitted"] == totals["trained"] + len(failed), totals
    return {
        "faults": [plan[i] for i in sorted(struck)],
        "lost": len(wanted - set(trained)),
        "duplicated": len(trained) - len(set(trained)),
        "staleness": summary["staleness"],
        "requeued": totals["requeued"],
        "replayed": replayed,
        "no_progress_s": max(b - a for a, b in zip(times[1:], times[2:], strict=False)),
        "noticed_after_s": waits,
    }


def main() -> None:
    folder = os.environ["FAULTS"]
    workers.rollout_worker = functools.partial(broken, folder, "rollout")
    run_room.reward_worker = functools.partial(broken, folder, "reward")
    workers.learner_worker = functools.partial(break_team, folder)
    break_learner(folder)
    note_losses(folder)
    run_main(train_async.train, "a trainer with a plan")


if __name__ == "__main__":
    import faults  # a worker imports what it runs from a module

    faults.main()
