"""Damage run folders on purpose: bytes, lines and files, kills, strangers.

    python tests/disk.py FOLDER [DAMAGES] [KILLS]     # everything; prints how often which end came

This process has imported the trainers; every attempt is a child that it forks, with a command line
of its own, so that it takes a second and not five. A child watches itself: what it opens to write,
moves or removes outside its run folder, and what it runs, is noted and makes the attempt fail.
Used by tests/test_folder.py.
"""

import atexit
import contextlib
import json
import multiprocessing.context
import os
import random
import runpy
import shutil
import signal
import sys
import tempfile
import time
import traceback
import warnings
from collections import Counter
from dataclasses import dataclass
from itertools import product
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

import torch  # noqa: E402
from matplotlib.backends import backend_agg  # noqa: E402, F401 (a child needs a second less)

import train_async  # noqa: E402
import train_sync  # noqa: E402
from runtime import books  # noqa: E402
from runtime.config import UserError  # noqa: E402
from runtime.folder import read_lines, scan  # noqa: E402
from runtime.ledger import audit  # noqa: E402
from runtime.terminal import run_main  # noqa: E402

FLAGS = "--task guess --steps 4 --set=checkpoint_every=1 --eval-every 4".split()
FLAGS += "--groups-per-step 4 --group-size 4 --slots 16".split()
torch.optim.AdamW([torch.nn.Parameter(torch.zeros(1))])  # loads what makes folders of its own
tempfile.gettempdir()  # tries to write there, once
LOGS = ("metrics", "events", "samples")
ENDS = ("summary", "config")
WRITES = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND
CHANGES = ("os.rename", "os.remove", "os.mkdir", "os.rmdir", "os.truncate", "os.link", "os.symlink")


# ---------------------------------------------------------------------------------- one attempt


@dataclass
class End:
    """How a command ended: its exit code, what it printed, what it did outside its folder."""

    code: int
    out: str
    err: str
    outside: str

    @property
    def lines(self) -> list[str]:
        """What a person reads on stderr, without the progress bar."""
        lines = self.err.replace("\r", "\n").splitlines()
        return [line for line in lines if line.strip() and "step/s" not in line]

    @property
    def reasons(self) -> list[str]:
        """Those that do not speak of a checkpoint that was passed over."""
        return [line for line in self.lines if " is passed over: " not in line]


def watch(run: Path, note: int) -> None:
    """Note what this process changes outside its run folder, and every command but Python."""
    home = os.path.realpath(run)

    def outside(place) -> bool:
        if isinstance(place, int) or place is None:
            return False
        path = os.path.realpath(os.fsdecode(place))
        temporary = f"{tempfile.gettempdir()}/nanoglm-"  # of reward workers
        return not path.startswith((home, temporary, "/dev/null", "/proc/", "/dev/shm", "/memfd"))

    def hook(event: str, facts: tuple) -> None:
        bad = event == "open" and facts[2] and facts[2] & WRITES and outside(facts[0])
        at = f"/proc/self/fd/{facts[-1]}" if facts and facts[-1].__class__ is int else ""
        names = [f for f in facts[:2] if isinstance(f, str | Path)] if event in CHANGES else []
        bad |= any(outside(os.path.join(at if "-1" not in at else "", name)) for name in names)
        bad |= event == "os.system"
        bad |= event == "subprocess.Popen" and facts[0] not in (sys.executable, b"uname", "uname")
        if bad:
            os.write(note, f"{event} {facts!s:.200}\n".encode())

    sys.addaudithook(hook)


def run_command(words: list[str]) -> None:
    """What the shell would do: a trainer, or `runtime.ledger RUN`."""
    sys.argv, books.SAMPLES_EVERY = words, 2
    if words[0] == "runtime.ledger":
        runpy.run_module("runtime.ledger", run_name="__main__")
    else:
        train = train_sync.train if words[0] == "train_sync.py" else train_async.train
        run_main(train, "a trainer in a child")


def begin(words: list[str], run: Path, place: Path, before=lambda: None) -> int:
    """Fork a child that runs a command on a run folder; returns its process id."""
    place.mkdir(parents=True, exist_ok=True)
    child = os.fork()
    if child:
        return child
    code = 70
    atexit._clear()  # what this process would do at its end is not the child's business
    try:
        os.setsid()
        for number, name in ((1, "out"), (2, "err")):
            os.dup2(os.open(place / name, os.O_WRONLY | os.O_CREAT | os.O_TRUNC), number)
        sys.stdout = open(1, "w", closefd=False)
        sys.stderr = sys.__stderr__ = open(2, "w", closefd=False)
        note = os.open(place / "outside", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        os.chdir(place)
        # a worker is forked, too: it need not import torch again
        contexts = multiprocessing.context._concrete_contexts
        contexts["spawn"] = contexts["fork"]
        torch.set_num_threads(1)
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, signal.default_int_handler)
        warnings.simplefilter("default", UserWarning)
        warnings.showwarning = lambda *w: sys.stderr.write(warnings.formatwarning(*w[:4]))
        watch(run, note)
        before()
        run_command(words)
        code = 0
    except SystemExit as end:
        if isinstance(end.code, str):
            print(end.code, file=sys.stderr)
        code = end.code if isinstance(end.code, int) else int(end.code is not None)
    except BaseException:
        traceback.print_exc()
    finally:
        atexit._run_exitfuncs()
        with contextlib.suppress(OSError):
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(code)


def end_of(child: int, place: Path, seconds: float = 60.0) -> End:
    """Wait for a child; AssertionError when it hangs."""
    deadline, status = time.monotonic() + seconds, None
    while status is None:
        done, found = os.waitpid(child, os.WNOHANG)
        status = found if done else None
        if time.monotonic() > deadline:
            os.killpg(child, signal.SIGKILL)
            os.waitpid(child, 0)
            raise AssertionError(f"hangs: {(place / 'err').read_text()[-500:]}")
        time.sleep(0.002)
    paths = [place / name for name in ("out", "err", "outside")]  # none of one killed at once
    texts = [path.read_text(errors="replace") if path.exists() else "" for path in paths]
    return End(os.waitstatus_to_exitcode(status), *texts)


def attempt(words: list[str], run: Path, place: Path, before=lambda: None) -> End:
    """Run a command to its end; AssertionError for a traceback, a hang, or a deed outside."""
    end = end_of(begin(words, run, place, before), place)
    assert "Traceback" not in end.err + end.out, end.err[-1500:]
    assert not end.outside, f"it did outside its folder: {end.outside}"
    hidden = [c for c in end.out + end.err if ord(c) < 32 and c not in "\n\r"]
    assert not hidden, f"control characters reach the terminal: {hidden}"
    assert end.code in (0, 1, 2), f"exit code {end.code}: {end.err[-500:]}"
    return end


def tree_of(folder: Path) -> dict:
    """Every file below a folder with its bytes; the lock is left out, an owner writes its name."""
    files = (p for p in sorted(folder.rglob("*")) if p.name != "lock")
    return {str(p.relative_to(folder)): p.read_bytes() if p.is_file() else None for p in files}


def trainer(mode: str) -> str:
    return f"train_{mode}.py"


def judge(run: Path, mode: str, place: Path, sha256: str | None) -> None:
    """A finished run: its logs are whole, its books balance, its weights are what they must be."""
    for name in LOGS:
        list(scan(run / f"{name}.jsonl"))
    steps = [row["step"] for row in read_lines(run / "metrics.jsonl") if "seconds" in row]
    summary = json.loads((run / "summary.json").read_text())
    assert steps == list(range(1, summary["steps"] + 1)), f"steps in metrics.jsonl: {steps}"
    if mode == "sync":
        assert sha256 in (None, summary["weights_sha256"]), "it ends at other weights"
    else:
        totals = audit(run).totals()
        assert totals["in_flight"] == 0 and totals["admitted"] == totals["trained"], totals
        if sha256 is not None:
            end = attempt(["train_async.py", "--replay", str(run)], run, place / "replay")
            assert end.code == 0, f"replay: {end.err[-500:]}"


def make_runs(folder: Path) -> dict[str, tuple[Path, str]]:
    """For both trainers a run that was killed in step 4 or before, and the weights at its end."""
    found = {}
    for mode in ("sync", "async"):
        extra = ["--reward-workers=0", "--rollout-workers=1"] * (mode == "async")
        whole, killed = folder / f"{mode}-whole", folder / f"{mode}-killed"
        words = [trainer(mode), *FLAGS, *extra, "--out"]
        assert attempt([*words, str(whole)], whole, folder / "made").code == 0
        for _ in range(20):
            shutil.rmtree(killed, ignore_errors=True)
            child = begin([*words, str(killed)], killed, folder / "made")
            while not (killed / "checkpoints/step0000002.pt").exists():
                time.sleep(0.001)
            os.kill(child, signal.SIGKILL)
            end_of(child, folder / "made")
            if not (killed / "checkpoints/step0000004.pt").exists():
                break
        found[mode] = killed, json.loads((whole / "summary.json").read_text())["weights_sha256"]
    return found


# --------------------------------------------------------------------------------------- damages

LINES = ("torn", "zeros", "short", "doubled", "swapped", "removed", "changed")


def damage_line(run: Path, choose: random.Random) -> str:
    """One line of a log is torn, zeros, shortened, doubled, swapped, removed or changed."""
    path = run / f"{choose.choice(LOGS[:2])}.jsonl"
    lines = path.read_bytes().splitlines(keepends=True)
    i, how = choose.randrange(len(lines) - 1), choose.choice(LINES)
    line, other = lines[i], lines[i + 1]
    at = choose.randrange(1, len(line) - 1)
    lines[i : i + 2] = {
        "torn": [line[:at]],
        "zeros": [bytes(len(line)), other],
        "short": [line[:at] + b"\n", other],
        "doubled": [line, line, other],
        "swapped": [other, line],
        "removed": [other],
        "changed": [line[:at] + bytes([line[at] ^ 1]) + line[at + 1 :], other],
    }[how]
    path.write_bytes(b"".join(lines[: i + 1] if how == "torn" else lines))
    return f"line {how}"


def damage_tail(run: Path, choose: random.Random) -> str:
    """What a crash leaves behind the last whole line of a log."""
    with (run / f"{choose.choice(LOGS)}.jsonl").open("ab") as file:
        file.write(choose.choice((bytes(4096), b'{"t": 1.5, "ki', b"\n", os.urandom(99))))
    return "tail"


def damage_file(run: Path, choose: random.Random) -> str:
    """A file has other bits, is missing, empty or cut; or a folder is missing."""
    path = choose.choice(sorted(run.rglob("*")))
    if path.is_dir():
        shutil.rmtree(path)
        return f"no {path.name}/"
    how, data = choose.choice(("bits of", "bits of", "no", "empty", "cut")), path.read_bytes()
    path.unlink()
    if how == "bits of" and data:
        data = bytearray(data)
        for _ in range(choose.choice((1, 20))):
            data[choose.randrange(len(data))] ^= 1 << choose.randrange(8)
    if how != "no":
        path.write_bytes(data[: {"empty": 0, "cut": len(data) // 2}.get(how, len(data))])
    return f"{how} {path.suffix or path.name}"


TEXTS = (b"", b"{", b"[]", b"7", b"null", bytes(99), b"[" * 10**5, b"\xff\xfe{}", b"{}")
VALUES = (None, -1, 0, 1.5, 10**30, float("nan"), "", "\x1b[2J", [], {}, True, "../..", "guess", 5)


def damage_config(run: Path, choose: random.Random) -> str:
    """config.json is something else, or says something else."""
    path, how = run / "config.json", choose.choice(("text", "value", "value", "value", "key"))
    record = json.loads(path.read_text())
    name = choose.choice([name for name in record if name != "machine"])
    record[name] = choose.choice(VALUES)
    if how == "key":
        del record[name]
    path.write_bytes(choose.choice(TEXTS) if how == "text" else json.dumps(record).encode())
    return f"config {how}"


DAMAGES = (damage_line, damage_line, damage_tail, damage_file, damage_file, damage_config)


def settings(run: Path) -> dict | None:
    """What config.json says, without the machine."""
    try:
        return json.loads((run / "config.json").read_bytes()) | {"machine": None, "mode": None}
    except (OSError, ValueError, RecursionError, TypeError):
        return None


def damaged(run: Path, mode: str, place: Path, sha256: str, choose: random.Random) -> list:
    """Damage a run folder and resume it; what was done, and how it ended."""
    meant = settings(run)
    what = choose.choice(DAMAGES)(run, choose)
    same, before = settings(run) == meant, tree_of(run)
    end = attempt([trainer(mode), "--resume", str(run)], run, place)
    if end.code == 0:
        judge(run, mode, place, sha256 if same else None)
    else:
        assert len(end.reasons) == 1, end.lines
        assert end.code == 2 or not same, f"exit code {end.code}: {end.lines}"
        assert end.code == 1 or tree_of(run) == before, "it was refused, and changed"
    return [(what, f"exit {end.code}")]


def go_on(words: list[str], run: Path, place: Path) -> End | None:
    """Resume a run to its end; None when it has ended: it has a summary of all its steps."""
    end = attempt(words, run, place)
    if end.code == 2 and (run / "summary.json").exists():
        steps = [json.loads((run / f"{name}.json").read_text())["steps"] for name in ENDS]
        assert steps[0] == steps[1], end.lines
        return None
    assert end.code == 0, end.lines
    return end


def killed(run: Path, mode: str, place: Path, sha256: str, choose: random.Random) -> list:
    """`kill -9` of a parent at random moments, up to six times; then the run goes on to its end."""
    words, kills = [trainer(mode), "--resume", str(run)], 0
    for _ in range(6):
        child = begin(words, run, place)
        time.sleep(choose.uniform(0.0, 1.6))
        os.kill(child, signal.SIGKILL)
        if end_of(child, place).code != -signal.SIGKILL:
            break
        kills += 1
    go_on(words, run, place)
    judge(run, mode, place, sha256)
    return [(mode, "exit -9")] * kills + [(mode, "finished")]


def campaign(folder: Path, count: int, work=damaged, seed: int = 0) -> tuple[Counter, list[str]]:
    """So many copies of a run, each of which something is done to; how they ended, and what must
    not be."""
    runs, ends, failures = make_runs(folder), Counter(), []
    for number in range(count):
        mode, place = ("sync", "async")[number % 2], folder / f"{number}"
        run, sha256 = runs[mode]
        shutil.copytree(run, place / "run")
        try:
            how = random.Random(f"{seed} {number}")
            ends.update(work(place / "run", mode, place / "output", sha256, how))
        except (AssertionError, UserError, OSError, ValueError) as error:
            failures.append(f"{number} {mode} {work.__name__}: {error!s:.600}")
            continue
        shutil.rmtree(place)
    return ends, failures


# ------------------------------------------------------------------------------------- strangers

FILES = "config.json metrics.jsonl events.jsonl samples.jsonl config.partial summary.partial "
FILES += "reward.partial summary.json reward.png timeline.png lock logs logs/exam-reward-0.log "
FILES += "logs/rollout-0.log checkpoints checkpoints/step0000002.pt "
FILES += "checkpoints/step0000004.partial checkpoints/meeting"
READ = "config.json events.jsonl lock summary.json checkpoints/step0000003.pt"
WORDS = {  # what a stranger may write into config.json
    "task": ("evil.py", "../evil.py", "jsonl:/dev/zero", "\x1b]0;owned\x07", "guess\n\x1b[2J"),
    "init": ("../evil.pt", "/dev/zero", "\x1b[2J"),
    "out": ("../secret", "/tmp", "\x1b[2J"),
    "mode": ("\x1b[2J", "../secret"),
    "model": ("\x1b[31m", "../../secret"),
}


class Evil:
    """Unpickled freely, it leaves a mark beside the run folder."""

    def __init__(self, mark: Path):
        self.mark = str(mark)

    def __reduce__(self):
        return os.mkdir, (self.mark,)


def sparse(path: Path, victim: Path) -> None:
    """A file that is larger than any memory."""
    with path.open("wb") as file:
        file.truncate(1 << 40)


def pickled(path: Path, victim: Path) -> None:
    """A checkpoint with code in it."""
    torch.save({"version": 9, "x": Evil(victim / "ran")}, path)


INSTEAD = {  # of a file: what is put there, by its path and the victim's folder
    "symlink": lambda path, victim: path.symlink_to(victim / "canary"),
    "hard link": lambda path, victim: os.link(victim / "canary", path),
    "pipe": lambda path, victim: os.mkfifo(path),
    "device": lambda path, victim: path.symlink_to("/dev/zero"),
    "sparse": sparse,
    "pickle": pickled,
}
ATTACKS = [(how, name) for how in ("symlink", "hard link") for name in FILES.split()]
ATTACKS += [(how, name) for how in ("pipe", "device", "sparse") for name in READ.split()]
ATTACKS += [("pickle", "checkpoints/step0000009.pt")]
ATTACKS += [(flag, value) for flag, values in WORDS.items() for value in values]


def attack(run: Path, victim: Path, how: str, what: str) -> None:
    """Make a run folder hostile."""
    if how in WORDS:
        record = json.loads((run / "config.json").read_text())
        (run / "config.json").write_text(json.dumps(record | {how: what}))
        return
    path = run / what
    shutil.rmtree(path) if path.is_dir() else path.unlink(missing_ok=True)
    path.parent.mkdir(exist_ok=True)
    INSTEAD[how](path, victim)


def strangers(folder: Path, chosen=ATTACKS) -> tuple[Counter, list[str]]:
    """Hostile run folders: resumed, replayed, audited. Nothing outside is touched or run."""
    folder.mkdir(parents=True)
    killed, whole = make_runs(folder)["async"][0], folder / "async-whole"
    ends, failures = Counter(), []
    for (how, what), words in product(chosen, ("--resume", "--replay", "ledger")):
        place = folder / "attack"
        shutil.rmtree(place, ignore_errors=True)
        run, victim = place / "run", place / "victim"
        shutil.copytree(killed if words == "--resume" else whole, run)
        victim.mkdir()
        (victim / "canary").write_text("alive")
        mark = f"import os\nos.mkdir({str(victim / 'ran')!r})\n"
        for evil in (place / "evil.py", place / "output/evil.py", run / "evil.py"):
            evil.parent.mkdir(exist_ok=True)
            evil.write_text(mark)
        torch.save({"x": Evil(victim / "ran")}, place / "evil.pt")
        attack(run, victim, how, what)
        before = tree_of(victim)
        command = ["train_async.py", words] if words != "ledger" else ["runtime.ledger"]
        try:
            end = attempt([*command, str(run)], run, place / "output")
            assert tree_of(victim) == before, "it has changed what is outside"
            assert end.code in (0, 2) or words == "ledger", f"exit code {end.code}: {end.lines}"
            assert end.code == 0 or len(end.reasons) in (1, 2), end.lines
            ends[words, f"exit {end.code}"] += 1
        except AssertionError as error:
            failures.append(f"{how} {what!r} {words}: {error!s:.500}")
    return ends, failures


def everything(folder: Path, damages: int = 300, kills: int = 60) -> dict:
    """Damages, kills, strangers: what was tried how often, how it ended, and what must not be."""
    work = {
        "damaged": lambda place: campaign(place, damages),
        "killed": lambda place: campaign(place, kills, killed),
        "hostile": strangers,
    }
    result = {}
    for name, function in work.items():
        ends, wrong = function((folder / name).resolve())
        words = Counter()
        for (_, end), number in ends.items():
            words[end] += number
        text = ", ".join(f"{number} × {end}" for end, number in words.items())
        ends = {" / ".join(end): number for end, number in sorted(ends.items())}
        result[name] = {"ends": ends, "said": text, "wrong": wrong}
        print(f"{name} folders: {text}", *wrong, sep="\n", flush=True)
    return result


if __name__ == "__main__":
    everything(Path(sys.argv[1]), *map(int, sys.argv[2:]))
