"""common.py: what every command shares: configuration, run folder, checkpoints, devices.

One dataclass is the whole configuration: its fields become the flags (with hyphens), their help
texts and their limits; a wrong value costs one line and exit code 2, never a traceback.
Left out: everything about models, tasks and training.
"""

import argparse
import dataclasses
import hashlib
import json
import math
import os
import platform
import shutil
import signal
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import torch
from tqdm import tqdm

OBJECTIVES = ("ppo", "decoupled_ppo", "tis", "icepop", "double_sided", "cispo", "gspo", "reinforce")


class UserError(ValueError):
    """A mistake of the user's: one line that names the value and what is allowed; exit code 2."""


class TrainingStopped(RuntimeError):
    """Training cannot go on; the message says why and what to look at; exit code 1."""


def flag(default, help, low=None, high=None, choices=None):
    """One field of `Config`: its default, its help text and what values are allowed."""
    return field(default=default, metadata=dict(help=help, low=low, high=high, choices=choices))


@dataclass(frozen=True)
class Config:
    """Everything a run needs to know; `parse` fills it from the command line."""

    # what is learned
    task: str = flag("guess", "guess, reverse[:N], sort[:N], sum, recall[:TOKENS] or jsonl:PATH")
    steps: int = flag(0, "optimizer steps (0: as many as the task needs on a laptop)", 0)
    seed: int = flag(0, "of weights, prompts and sampling noise", 0, 2**31 - 1)
    out: str = flag("", "run folder (default: runs/ and a name made of task, mode and time)")
    resume: str = flag("", "run folder to go on with, from its newest checkpoint")
    replay: str = flag("", "run folder to execute again: train_async.py ends at the same weights")
    init: str = flag("", "weights to start from (pretrain.py); the model has the shape they have")
    # the model
    model: str = flag("tiny", "preset", choices=("tiny", "small", "medium", "gpt2"))
    positions: str = flag("learned", "position encoding", choices=("learned", "rope"))
    attention: str = flag("dense", "dense or sparse", choices=("dense", "dsa"))
    scoring: str = flag("mean", "dsa: how chunks are scored", choices=("mean", "indexer"))
    chunk_size: int = flag(16, "dsa: keys in a chunk, a power of two", 1, 512)
    top_k: int = flag(8, "dsa: chunks a query attends to", 1)
    kernels: str = flag("auto", "dsa: auto is triton on CUDA", choices=("auto", "spec", "triton"))
    dense_below: int = flag(0, "dsa: a model with less context attends densely (bench.py dsa)", 0)
    # machines
    device: str = flag("auto", "auto, cpu, cuda or cuda:N")
    threads: int = flag(1, "CPU threads of each process (0: share the cores out)", 0, 1024)
    rollout_workers: int = flag(0, "processes that generate (0: what the devices suggest)", 0, 64)
    reward_workers: int = flag(1, "processes that verify (0: those that generate)", 0, 64)
    learners: int = flag(1, "processes that train, each on its share of a batch", 1, 64)
    context: int = flag(0, "positions of the model (0: as many as the task needs)", 0, 131072)
    # generation
    slots: int = flag(128, "sequences a generator decodes at once", 1, 4096)
    group_size: int = flag(16, "answers to one prompt", 2, 1024)
    groups_per_step: int = flag(32, "prompts in a training batch", 1, 65536)
    temperature: float = flag(1.0, "of sampling, and of the log-probs", 0.01, 100.0)
    compile: str = flag(
        "auto", "steps: decode; auto: only CUDA graphs", choices=("auto", "no", "decode")
    )
    swap: str = flag("keep", "running caches at a swap", choices=("keep", "recompute", "drain"))
    rollout_weights: str = flag(
        "float32", "of rollouts: a mismatch", choices=("float32", "bfloat16", "float8_e4m3fn")
    )
    # staleness
    max_staleness: int = flag(2, "oldest experience that may be trained, in versions", 0, 1024)
    on_stale: str = flag("wait", "wait: never exceed it; drop: discard", choices=("wait", "drop"))
    # the objective
    objective: str = flag("cispo", "policy objective (losses.py)", choices=OBJECTIVES)
    advantage: str = flag("grpo", "advantage inside a group", choices=("grpo", "mean", "rloo"))
    lr: float = flag(6e-4, "learning rate of AdamW at the first step", 0.0, 1.0)
    lr_end: float = flag(0.0, "share of it that is left at the last step (linear)", 0.0, 1.0)
    entropy: float = flag(0.02, "weight of the entropy bonus", 0.0, 10.0)
    grad_clip: float = flag(1.0, "largest gradient norm", 0.0)
    token_budget: int = flag(4096, "most tokens in a micro-batch, padding included", 1)
    reference_weight: float = flag(0.001, "weight of the KL to the reference policy", 0.0)
    reference_every: int = flag(5, "steps between reference passes (0: no reference)", 0)
    reference_refresh: int = flag(20, "steps between snapshots of the reference (0: keep first)", 0)
    kl_threshold: float = flag(1.0, "mean KL above which the damper acts (GLM-5: 0.15)", 0.0)
    # watching
    eval_every: int = flag(20, "steps between held-out evaluations", 1)
    eval_when: str = flag("live", "late: after training, on kept weights", choices=("live", "late"))
    samples_every: int = flag(100, "steps between printed episodes", 1)
    checkpoint_every: int = flag(100, "steps between checkpoints", 1)
    # trouble
    reward_seconds: float = flag(2.0, "time limit of one verification or environment turn", 0.01)
    reward_memory: float = flag(1024.0, "MiB that one of these may need more than before", 1.0)
    max_failures: float = flag(0.5, "share of failed episodes in a step that stops the run", 0, 1)
    restarts: int = flag(3, "how often a dead worker is replaced before the run stops", 0)
    silence: float = flag(20.0, "seconds without a sign of life until a worker is replaced", 1.0)
    stall: float = flag(300.0, "seconds without any progress until the run stops", 1.0)


def check(config: Config) -> Config:
    """Return config, or raise UserError for the first value that is not allowed."""
    for f in dataclasses.fields(config):
        value, limits = getattr(config, f.name), f.metadata
        name = "--" + f.name.replace("_", "-")
        if limits["choices"] and value not in limits["choices"]:
            raise UserError(f"{name} {value}: must be one of {', '.join(limits['choices'])}")
        if f.type in (int, float):
            low, high = limits["low"], limits["high"]
            high = math.inf if high is None else high
            if not (math.isfinite(value) and low <= value <= high):
                at_most = f" and at most {high}" if high < math.inf else ""
                raise UserError(f"{name} {value}: must be at least {low}{at_most}")
    chunk_size = getattr(config, "chunk_size", 1)
    if chunk_size & (chunk_size - 1):
        raise UserError(f"--chunk-size {chunk_size}: must be a power of two, 1 to 512")
    compiler = shutil.which(os.environ.get("CXX", "g++"))  # the one that torch looks for
    if getattr(config, "compile", "no") == "decode" and not (
        compiler and config.attention == "dense"
    ):
        needs = "--attention dense and a C++ compiler (g++, or what CXX names)"
        raise UserError(f"--compile {config.compile}: must have {needs}")
    if isinstance(config, Config) and config.silence < 2 * config.reward_seconds:
        least = f"{2 * config.reward_seconds} (2 time limits)"
        raise UserError(f"--silence {config.silence}: must be at least {least}")
    return config


def parse(description: str, argv: list[str] | None = None, kind: type = Config) -> Config:
    """Read the command line into a checked Config, or another dataclass of flags; a mistake prints
    one line and exits with 2."""
    raw = argparse.RawDescriptionHelpFormatter  # docstrings keep their lines
    parser = argparse.ArgumentParser(description=description, formatter_class=raw)
    parser.allow_abbrev, parser.error = False, lambda message: fail(UserError(message))
    for f in dataclasses.fields(kind):
        choices = f" [{', '.join(f.metadata['choices'])}]" if f.metadata["choices"] else ""
        text = f"{f.metadata['help']}{choices} ({f.default})"
        name = "--" + f.name.replace("_", "-")
        parser.add_argument(name, type=f.type, default=f.default, help=text)
    try:
        return check(kind(**vars(parser.parse_args(argv))))
    except UserError as error:
        fail(error)


def fail(error: Exception) -> None:
    """Print one line to stderr and end the process with exit code 2."""
    sys.stderr.write(f"{Path(sys.argv[0]).name}: {' '.join(str(error).split())}\n")
    raise SystemExit(2)


# ---------------------------------------------------------------------------------------- devices


def pick_devices(config: Config) -> tuple[list[str], list[str]]:
    """Devices of the learners and of the rollout workers, one entry a process.

    CPU: the learners and as many rollout workers as cores are left. One GPU: shared. Several
    GPUs: learners take the first ones, rollout workers the others. Raises UserError.
    """
    gpus = torch.cuda.device_count()
    name = config.device
    if name == "auto":
        name = "cuda" if gpus else "cpu"
    index = name.removeprefix("cuda:")
    if name not in ("cpu", "cuda") and not (name.startswith("cuda:") and index.isdigit()):
        raise UserError(f"--device {config.device}: must be auto, cpu, cuda or cuda:N")
    if name != "cpu" and (gpus == 0 or (index.isdigit() and int(index) >= gpus)):
        raise UserError(f"--device {config.device}: this machine has {gpus} CUDA devices")
    learners = config.learners
    if name == "cpu":
        return ["cpu"] * learners, ["cpu"] * (config.rollout_workers or max(1, cores() - learners))
    if name != "cuda" or gpus == 1:
        one = name if name != "cuda" else "cuda:0"
        return [one] * learners, [one] * (config.rollout_workers or 1)
    training = [f"cuda:{i % gpus}" for i in range(learners)]
    rest = [f"cuda:{i}" for i in range(min(learners, gpus - 1), gpus)]
    workers = config.rollout_workers or len(rest)
    return training, [rest[i % len(rest)] for i in range(workers)]


def cores() -> int:
    """CPU cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()


def set_threads(config: Config, processes: int, device: str = "cpu") -> None:
    """Give this process its share of the cores, and its GPU."""
    torch.set_num_threads(config.threads or max(1, cores() // processes))
    if device != "cpu":
        torch.cuda.set_device(device)


# ------------------------------------------------------------------------------------- run folder


def open_run(config: Config, mode: str) -> Path:
    """Create the run folder, or reopen the one to resume; raises UserError, overwrites nothing."""
    name = f"runs/{config.task.split(':')[0]}-{mode}-{time.strftime('%m%d-%H%M%S')}"
    folder = Path(config.resume or config.out or name)
    if config.resume:
        record = json.loads((folder / "config.json").read_text())
        if record["mode"] != mode:
            raise UserError(f"--resume {folder}: must be a run of train_{mode}.py")
        (folder / "config.json").write_text(json.dumps(record | {"steps": config.steps}, indent=1))
        return folder
    try:
        if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
            raise UserError(f"--out {folder}: must be new or an empty folder")
        (folder / "checkpoints").mkdir(parents=True, exist_ok=True)
        (folder / "logs").mkdir(exist_ok=True)
    except OSError as error:
        raise UserError(f"--out {folder}: must be writable ({error.strerror})") from error
    record = {"mode": mode, **dataclasses.asdict(config), "machine": describe_machine()}
    (folder / "config.json").write_text(json.dumps(record, indent=1))
    return folder


def describe_machine() -> dict:
    """Versions and hardware, for the record of every measurement."""
    cpu = platform.processor() or platform.machine()
    if Path("/proc/cpuinfo").is_file():
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        cpu = next((s.split(":", 1)[1].strip() for s in lines if s.startswith("model name")), cpu)
    return {
        "cpu": f"{cpu} ({torch.backends.cpu.get_cpu_capability()})",
        "cores": cores(),
        "gpus": [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())],
        "system": platform.platform(),
        "python": platform.python_version(),
        "torch": torch.__version__,
    }


def append_lines(path: Path, records: list[dict]) -> None:
    """Append records as JSON lines: all of them, or none when the disk is full (OSError)."""
    with path.open("ab", buffering=0) as file:
        size, data = file.tell(), "".join(json.dumps(record) + "\n" for record in records).encode()
        try:
            while data:
                data = data[file.write(data) :]
        except OSError as error:
            file.truncate(size)
            raise OSError(error.errno, error.strerror, str(path)) from error


def read_lines(path: Path) -> list[dict]:
    """The records of a JSON-lines file, [] when it does not exist."""
    return [json.loads(s) for s in path.read_text().splitlines()] if path.is_file() else []


def forget_after(path: Path, version: int) -> float:
    """Drop the metrics of steps that will be done again; returns the seconds of the last one."""
    rows = [row for row in read_lines(path) if row["step"] <= version]
    partial = path.with_suffix(".partial")
    partial.unlink(missing_ok=True)
    append_lines(partial, rows)
    partial.replace(path)
    return max(row["t"] for row in rows)


def sha256_of(flat: torch.Tensor) -> str:
    """Fingerprint of the weights: the sha256 of their bytes."""
    return hashlib.sha256(flat.detach().cpu().contiguous().numpy().tobytes()).hexdigest()


# ---------------------------------------------------------------------------------------- watching


class Stop:
    """Ctrl-C sets a flag that the loops look at; a second one ends the process at once."""

    def __init__(self):
        self.asked = False
        signal.signal(signal.SIGINT, self)
        signal.signal(signal.SIGTERM, self)

    def __call__(self, number, frame):
        if self.asked:
            raise KeyboardInterrupt
        self.asked = True


class Watch:
    """What a person and the disk get to see of a run: a progress bar, and JSON lines."""

    def __init__(self, run: Path, steps: int, done: int = 0, seconds: float = 0.0):
        self.run, self.start = run, time.monotonic() - seconds
        self.bar = tqdm(total=steps, initial=done, unit="step", dynamic_ncols=True, smoothing=0.05)
        self.events, self.shown = [], {}
        self.kept: list[tuple] = []  # (seconds, version, weights) of evaluations that are to come

    def span(self, process: str, kind: str, begin: float, **details) -> float:
        """Note what lasted from `begin` until now; returns its seconds."""
        seconds = time.monotonic() - begin
        self.event(process, kind, begin, seconds=seconds, **details)
        return seconds

    def event(self, process: str, kind: str, at: float | None = None, **details) -> None:
        """Note one event; times are seconds since the run began."""
        at = (at or time.monotonic()) - self.start
        self.events.append({"t": round(at, 6), "process": process, "kind": kind, **details})

    def step(self, record: dict, **shown) -> None:
        """One step is done: write its metrics and everything that happened, move the bar."""
        self.shown |= shown
        record = {"t": round(time.monotonic() - self.start, 3), **record}
        append_lines(self.run / "metrics.jsonl", [record])
        self.flush()
        self.bar.set_postfix(self.shown, refresh=False)
        self.bar.update()

    def say(self, text: str) -> None:
        """Print above the progress bar."""
        self.bar.write(text)

    def flush(self) -> None:
        append_lines(self.run / "events.jsonl", self.events)
        self.events = []

    def close(self) -> float:
        """Write what is left; returns the seconds since the run began."""
        self.flush()
        self.bar.close()
        return time.monotonic() - self.start


def run_main(train: Callable[[Config], None], description: str, kind: type = Config) -> None:
    """Parse, train, and turn the user's mistakes into one line and exit code 2."""
    config = parse(description, kind=kind)
    try:
        train(config)
    except UserError as error:
        fail(error)
    except (TrainingStopped, KeyboardInterrupt, OSError) as error:
        sys.stderr.write(f"\nstopped: {error or 'Ctrl-C'}\n")
        raise SystemExit(1) from error
