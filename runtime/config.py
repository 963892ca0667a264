"""runtime/config.py: every setting of a run. Each field of `Config` is a flag, and nothing else is.

A field holds its default, its help text and the values that are allowed; the command line, its
`--help` and all checks are made from the fields. Left out: what needs the devices (devices.py) or
the task (setup.py) to be judged.
"""

import argparse
import errno
import math
import os
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, fields
from difflib import get_close_matches
from pathlib import Path
from textwrap import shorten
from typing import TextIO

if os.name == "nt":
    sys.exit("nanoGLM needs Linux (time limits and signals are POSIX); on Windows use WSL")

LONGEST_CONTEXT = 131072
SIZES = ("tiny", "small", "medium")  # PRESETS of model.py
OBJECTIVES = ("ppo", "decoupled_ppo", "a3po", "tis", "icepop", "double_sided", "cispo", "gspo")
OBJECTIVES += ("dpo", "reinforce")
ADVANTAGES = ("grpo", "mean", "rloo", "opob", "gae")
DAMPERS = ("kl", "ess", "gac", "brake", "none")
SWAPS = ("keep", "recompute", "drain")
DTYPES = ("float32", "bfloat16", "float8_e4m3fn")

# Flags that say nothing unless another one has this value ("": any).
ONLY_WITH = {
    "teacher_weight": ("teacher", ""),
    "dpo_beta": ("objective", "dpo"),
    "double_low": ("objective", "double_sided"),
    "double_high": ("objective", "double_sided"),
    "kl_threshold": ("damper", "kl"),
    "scoring": ("attention", "dsa"),
    "chunk_size": ("attention", "dsa"),
    "top_k": ("attention", "dsa"),
}

# what a plain --help shows
FIRST = "task steps seed out resume replay model attention max_staleness lr".split()


def complain(kind, error, trace) -> None:
    """Replaces Python's hook: Ctrl-C, before anything has begun, prints no traceback."""
    if kind is not KeyboardInterrupt:
        sys.__excepthook__(kind, error, trace)


sys.excepthook = complain


class UserError(ValueError):
    """A mistake of the user's: one line that names the value and what is allowed; exit code 2."""


def require(fits: bool, complaint: str) -> None:
    """UserError unless it fits."""
    if not fits:
        raise UserError(complaint)


def require_only(facts: dict, only: dict) -> None:
    """UserError for the first of the facts that has a value, and not its only one."""
    for name, value in facts.items():
        allowed = only.get(name, value)
        require(value in (None, allowed), f"{name} is {value!r:.80}, must be {allowed!r}")


@contextmanager
def blame(complaint: str, kinds=Exception) -> Iterator[None]:
    """What is raised inside is a mistake of the user's: the complaint, and what went wrong. Where
    strangers have written, that may be almost anything."""
    try:
        yield
    except kinds as error:
        wrong = repr(error) if isinstance(error, LookupError) else str(error)
        raise UserError(f"{complaint} ({shorten(wrong, 300)})") from error


class TrainingStopped(RuntimeError):
    """Training cannot go on; the message says why and what to look at; exit code 1."""


def flag(default, help, low=0, high=math.inf, choices=(), group=None):
    """One field: its default, its help text, the values that are allowed.

    The first flag of a group names it: it is a heading of --help-all.
    """
    facts = {"help": help, "allowed": (low, high, choices), "group": group}
    return field(default=default, metadata=facts)


def one_of(help, *choices):
    """A field with few values; the first is its default."""
    return flag(choices[0], help, choices=choices)


def flag_name(name: str) -> str:
    """A field as it is written on the command line."""
    return "--" + name.replace("_", "-")


@dataclass(frozen=True)
class Config:
    """Everything a run needs to know; `parse` fills it from the command line."""

    task: str = flag(
        "guess",
        "guess, reverse[:N], sort[:N], sum[:N], recall[:TOKENS], hops[:N[:RATE]], debug, "
        "jsonl:PATH or your own file.py[:ARGUMENT]; several with commas",
        group="what is learned",
    )
    ratio: str = flag("", "groups of each of several tasks in a step, such as 2,1,1 ('': alike)")
    steps: int = flag(0, "optimizer steps (0: as many as the task needs on a laptop)")
    seed: int = flag(0, "seed of weights, prompts and sampling noise", 0, 2**31 - 1)
    out: str = flag("", "run folder to write ('': runs/ and a name of task, mode and time)")
    resume: str = flag("", "run folder to go on with, from its newest checkpoint")
    replay: str = flag("", "run folder to execute again (train_async.py), to the same weights")
    init: str = flag("", "weights to start from: a run folder, or a file of pretrain.py")
    export: str = flag("", "folder to write at the end: the model for transformers")

    model: str = flag("tiny", "tiny, small, medium, or a folder of Qwen3 weights", group="model")
    lora: int = flag(0, "rank of the adapters that alone are trained (0: train all)", 0, 1024)
    dtype: str = one_of("what models compute in (weights: float32)", "float32", "bfloat16")
    context: int = flag(0, "tokens of the longest episode (0: automatic)", 0, LONGEST_CONTEXT)
    positions: str = one_of("position encoding", "learned", "rope")
    qk_norm: str = one_of("RMSNorm of queries and keys, as in Qwen3", "no", "yes")
    chat: str = one_of("prompts as a chat; answer: without thinking", "no", "think", "answer")
    attention: str = one_of("dense, or sparse (dsa)", "dense", "dsa")
    scoring: str = one_of("dsa: how chunks are scored", "mean", "indexer")
    chunk_size: int = flag(16, "dsa: keys in a chunk, a power of two", 1, 512)
    top_k: int = flag(8, "dsa: chunks that a query attends to", 1)
    kernels: str = one_of("attention: auto is triton on CUDA", "auto", "spec", "triton")

    slots: int = flag(
        128,
        "sequences that a worker decodes at once (0: as many as fit into free memory)",
        0,
        4096,
        group="generation",
    )
    group_size: int = flag(16, "answers to each prompt (1: gae or a teacher only)", 1, 1024)
    groups_per_step: int = flag(32, "prompts in a training batch", 1, 65536)
    temperature: float = flag(1.0, "temperature of sampling, and of the log-probs", 0.01, 100.0)
    top_p: float = flag(1.0, "sample from the likeliest tokens of this mass (1: all)", 0.01, 1.0)
    top_k_sampling: int = flag(0, "sample from so many of the likeliest tokens (0: all)")
    swap: str = one_of("caches at new weights; drain: running ones end first", *SWAPS)
    rollout_weights: str = one_of("precision of the weights that generate", *DTYPES)
    rollout_cache: str = one_of(
        "precision of cached keys and values (auto: as models compute)", "auto", "float8_e4m3fn"
    )

    max_staleness: int = flag(2, "oldest trained token, in versions", group="staleness")
    on_stale: str = one_of("wait: never exceed it; drop: discard", "wait", "drop")

    objective: str = flag("cispo", "see losses.py", choices=OBJECTIVES, group="objective")
    double_low: float = flag(0.3, "double_sided: drop a token with pi / mu <= 1 - this", 0, 1)
    double_high: float = flag(5.0, "double_sided: and one with pi / mu >= 1 + this", 0)
    dpo_beta: float = flag(0.1, "dpo: how near to the reference policy", 1e-6, 1e6)
    teacher: str = flag("", "policy to learn from: a run folder, or a folder of Qwen3 weights")
    teacher_weight: float = flag(1.0, "its share of an advantage (1: rewards say nothing)", 1e-3, 1)
    reward_model: str = flag("", "folder of reward_model.py, which judges in place of the task")
    damper: str = one_of("how a step is made smaller when data are stale (dampers.py)", *DAMPERS)
    advantage: str = one_of("inside a group, or (gae) by a critic", *ADVANTAGES)
    credit: str = one_of("what a turn is credited with", "episode", "turn")
    keep_dead: str = one_of("groups whose rewards are all equal; no: replace", "yes", "no")
    lr: float = flag(6e-4, "learning rate of AdamW at the first step", 0, 1.0)
    lr_end: float = flag(0.0, "share of it that is left at the last step (linear)", 0, 1.0)
    entropy: float = flag(0.02, "weight of the entropy bonus")
    grad_clip: float = flag(1.0, "largest norm of the gradient (0: no limit)")
    recompute: str = one_of("activations in the backward pass, to save memory", "no", "yes")
    token_budget: int = flag(4096, "most tokens in a micro-batch, padding included", 1)
    reference_weight: float = flag(0.001, "weight of the KL to the reference policy")
    reference_every: int = flag(5, "steps between measurements of that KL (0: no reference)")
    reference_refresh: int = flag(20, "steps between snapshots of the reference (0: keep first)")
    kl_threshold: float = flag(1.0, "kl: mean KL above which a step is damped (GLM-5: 0.15)")

    device: str = flag("auto", "auto, cpu, cuda or cuda:N", group="machines")
    cluster: str = flag("", "Ray cluster of the workers: local, or HOST:PORT ('': this machine)")
    threads: int = flag(1, "CPU threads of each process (0: share the cores out)")
    rollout_workers: int = flag(0, "processes that generate (0: what the devices suggest)", 0, 64)
    reward_workers: int = flag(1, "processes that verify (0: those that generate)", 0, 64)
    learners: int = flag(0, "processes that train, each its share of a batch (0: one)", 0, 64)

    reward_seconds: float = flag(2.0, "time limit of a verdict or a reply", 0.01, group="trouble")
    reward_memory: float = flag(1024.0, "MiB of memory that either may take", 1.0)
    max_failures: float = flag(0.5, "share of failed episodes in a step that stops the run", 0, 1)
    restarts: int = flag(3, "how often in an hour a dead worker is replaced; then the run stops")
    learner_seconds: float = flag(10.0, "seconds that learners wait for one of them", 1.0)
    silence: float = flag(20.0, "seconds without a sign of life until a worker is replaced", 1.0)
    stall: float = flag(300.0, "seconds without any progress until the run stops", 1.0)

    eval_every: int = flag(20, "steps between evaluations", 1, group="watching")
    eval_when: str = one_of("late: after training, on kept weights", "live", "late")
    eval_samples: int = flag(0, "sampled answers to each held-out problem (0: greedy)", 0, 1024)
    samples_every: int = flag(100, "steps between printed episodes", 1)
    checkpoint_every: int = flag(100, "steps between checkpoints", 1)

    @property
    def team_size(self) -> int:
        """How many processes train."""
        return self.learners or 1

    @property
    def published(self) -> str:
        """The dtype of published weights: the coarser of --dtype and --rollout-weights. Adapters
        travel in --dtype: a worker rounds what it makes of them."""
        coarsest = max(self.dtype, self.rollout_weights, key=DTYPES.index)
        return self.dtype if self.lora else coarsest

    @property
    def cut(self) -> tuple:
        """What sampling is cut to, top-k and top-p; () where every token may come."""
        cut = self.top_k_sampling, self.top_p
        return cut if cut != (0, 1) else ()


def check(config: Config) -> Config:
    """Return config, or raise UserError for the first value that is not allowed."""
    for f in fields(config):
        value, (low, high, choices) = getattr(config, f.name), f.metadata["allowed"]
        said = f"{flag_name(f.name)} {value!s:.80}: must be"
        kind = type(value) is f.type or (f.type, type(value)) == (float, int)
        require(kind, f"{said} of type {f.type.__name__}")
        require(not choices or value in choices, f"{said} one of {', '.join(choices)}")
        if f.type is not str:
            fits = low <= value <= high and value < math.inf
            most = f" and at most {high}" if math.isfinite(high) else ""
            require(fits, f"{said} at least {low}{most}")
    if hasattr(config, "chunk_size"):
        size = config.chunk_size
        require(size.bit_count() == 1, f"--chunk-size {size}: must be a power of two")
    if getattr(config, "model", "tiny") not in SIZES:
        needed = "must be tiny, small, medium or a folder of Qwen3 weights"
        there = "(config.json, *.safetensors, tokenizer.json)"
        whole = os.path.isfile(f"{config.model}/config.json")
        require(whole, f"--model {config.model}: {needed} {there}")
    if isinstance(config, Config):
        check_together(config)
    return config


def check_together(config: Config) -> None:
    """UserError for values of which each is allowed, and not all of them together."""
    if config.model not in SIZES:
        own = f"must be left out with --model {config.model}, which has its own"
        require(config.positions == "learned", f"--positions {config.positions}: {own}")
        require(config.qk_norm == "no", f"--qk-norm {config.qk_norm}: {own}")
    kind = "dpo" if config.objective == "dpo" else config.advantage
    if kind in ("gae", "opob", "dpo"):
        must = f"must be episode with {kind}"
        require(config.credit == "episode", f"--credit {config.credit}: {must}")
    if kind == "dpo":
        said = f"--advantage {config.advantage}: must be grpo with dpo, which has its own"
        require(config.advantage == "grpo", said)
        said = "--reference-every 0: must be at least 1 with dpo, which compares with the reference"
        require(config.reference_every, said)
    for name, (other, needed) in ONLY_WITH.items():
        given, found = getattr(config, name), getattr(config, other)
        fits = given == getattr(Config, name) or found and needed in ("", found)
        why = f"with {flag_name(other)} {found}" if found else f"without {flag_name(other)}"
        require(fits, f"{flag_name(name)} {given}: must be left out {why}")
    if config.teacher or kind == "gae":
        said = "must be yes with --teacher or gae: a group of equal rewards teaches something"
        require(config.keep_dead == "yes", f"--keep-dead no: {said}")
    if config.teacher:
        require(kind != "dpo", "--objective dpo: must be another one with --teacher")
        said = f"--top-p {config.top_p}, --top-k-sampling {config.top_k_sampling}"
        require(not config.cut, f"{said}: must be left out with --teacher")
    alone = config.teacher and config.teacher_weight == 1  # rewards say nothing
    if config.advantage != "gae" and not alone:
        n = config.group_size
        require(n > 1, f"--group-size {n}: must be at least 2 with {kind}")
    samples = config.groups_per_step * config.group_size
    said = f"--learners {config.learners}: must be at most the {samples} samples of a step"
    require(config.learners <= samples, said)
    least = 2 * config.reward_seconds
    said = f"--silence {config.silence}: must be at least {least} (2 time limits)"
    require(config.silence >= least, said)


def parse(description: str, argv: list[str], kind: type = Config) -> Config:
    """Read the command line into a checked Config, or another dataclass of flags.

    A mistake prints one line and exits with 2. --help shows the flags in FIRST, --help-all shows
    all; of another dataclass --help does.
    """
    parser = group = argparse.ArgumentParser(
        description=description,
        usage="%(prog)s [--flag value] ...",
        formatter_class=argparse.RawDescriptionHelpFormatter,  # docstrings keep their lines
        allow_abbrev=False,
    )
    parser.error = fail
    everything = kind is not Config or "--help-all" in argv
    if kind is Config:
        parser.add_argument("--help-all", action="help", help="show every flag and exit")
    for f in fields(kind):
        text, (*_, choices), heading = f.metadata.values()
        if heading:
            group = parser.add_argument_group(heading)
        shown = everything or f.name in FIRST
        group.add_argument(
            flag_name(f.name),
            type=f.type,
            default=f.default,
            metavar="|".join(choices) or f.type.__name__,
            help=f"{text} (default {f.default!r})" if shown else argparse.SUPPRESS,
        )
    values, unknown = parser.parse_known_args(argv)
    if unknown:
        near = get_close_matches(unknown[0], [flag_name(f.name) for f in fields(kind)], 1)
        fail(f"{unknown[0]:.80}: must be a flag (such as {(near or ['--help'])[0]})")
    try:
        return check(kind(**vars(values)))
    except UserError as error:
        fail(error)


def printable(text: str) -> str:
    """Text with every control character but the end of a line escaped: a terminal obeys others."""
    return "".join([c if c.isprintable() or c == "\n" else repr(c)[1:-1] for c in text])


def fail(error: Exception | str) -> None:
    """Print one line to stderr and end the process with exit code 2."""
    text = printable(" ".join(str(error).split()))
    sys.stderr.write(f"{Path(sys.argv[0]).name}: {text}\n")
    raise SystemExit(2)


def run_main(train: Callable[[Config], None], description: str, kind: type = Config) -> None:
    """Parse, train, and turn the user's mistakes into one line and exit code 2, trouble into 1.
    --help shows what the program is and how it is run, the first two paragraphs."""
    open_streams()
    config = parse("\n\n".join((description or "").split("\n\n")[:2]), sys.argv[1:], kind)
    try:
        require(sys.platform == "linux", f"{sys.platform}: must be linux, to train")
        train(config)
    except UserError as error:
        fail(error)
    except (TrainingStopped, OSError) as error:
        sys.stderr.write(f"\nstopped: {printable(str(error))}\n")
        raise SystemExit(1) from error


class Stream:
    """stdout or stderr. When nobody reads it any more, the run ends as with its terminal, by
    SIGUSR1 (runlog.py): nohup ignores SIGHUP."""

    def __init__(self, stream: TextIO):
        self.stream = stream

    def __getattr__(self, name: str):
        return getattr(self.stream, name)

    def write(self, text: str) -> None:
        self._do(self.stream.write, text)

    def flush(self) -> None:
        self._do(self.stream.flush)

    def _do(self, method: Callable, *arguments) -> None:
        try:
            method(*arguments)
        except OSError as error:
            if error.errno not in (errno.EPIPE, errno.EIO):
                raise
            os.dup2(os.open(os.devnull, os.O_WRONLY), self.stream.fileno())
            with suppress(OSError):  # the other stream may have a reader
                os.write(2, f"\nnobody reads {self.stream.name} any more".encode())
            signal.raise_signal(signal.SIGUSR1)


def open_streams() -> None:
    """A closed stdout or stderr swallows what is written; one that cannot print a character prints
    its number."""
    while os.open(os.devnull, os.O_RDWR) < 3:
        pass  # 1 or 2 was free: the next file would have been written to
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name) or open(os.devnull, "w")
        stream.reconfigure(errors="backslashreplace")
        setattr(sys, name, Stream(stream))
