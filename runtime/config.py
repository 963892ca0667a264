"""runtime/config.py: every setting of a run, a field of `Config` each.

A field holds its default, its help text, the values that are allowed and what it goes with; the
command line, its `--help` and all checks are made from the fields. What has one sensible value is a
constant: no flag of its own, `--set NAME=VALUE` changes it.
Left out: what needs the devices (devices.py) or the task (run.py) to be judged.
"""

import argparse
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, fields
from functools import partial
from textwrap import shorten

if sys.platform != "linux":
    sys.exit("nanoGLM needs Linux (on Windows: WSL)")

LONGEST_CONTEXT = 131072
SIZES = ("tiny", "small", "medium")  # PRESETS of model.py
OBJECTIVES = "ppo decoupled_ppo a3po tis icepop double_sided cispo gspo dpo reinforce".split()
IN_GROUP = ("grpo", "mean", "rloo")  # ADVANTAGES of losses.py
ADVANTAGES = (*IN_GROUP, "opob", "gae")
DAMPERS = "kl ess gac brake none".split()
SWAPS = ("keep", "recompute", "drain")
DTYPES = ("float32", "bfloat16", "float8_e4m3fn")

# what a plain --help shows
FIRST = "task steps seed out resume replay model attention max_staleness lr".split()


class UserError(ValueError):
    """A mistake of the user's: one line that names the value and what is allowed; exit code 2."""


class TrainingStopped(RuntimeError):
    """Training cannot go on; the message says why and what to look at; exit code 1."""


class AttemptLost(TrainingStopped):
    """This process cannot go on; a new one may, from the newest checkpoint of its run."""

    run = None  # folder and configuration


def require(fits: bool, complaint: str) -> None:
    """UserError unless it fits."""
    if not fits:
        raise UserError(complaint)


@contextmanager
def blame(complaint: str, errors=Exception) -> Iterator[None]:
    """What is raised inside is a mistake of the user's: the complaint, and what went wrong. Where
    strangers have written, that may be almost anything."""
    try:
        yield
    except errors as error:
        raise UserError(f"{complaint} ({shorten(str(error), 300)})") from error


LARGE = 10**9  # no number is larger


def flag(
    default,
    help,
    low=0,
    high=LARGE,
    choices=(),
    group=None,
    only_with=(),
    flag=True,
):
    """One field: its default, its help text, the values that are allowed.

    The first flag of a group names it: it is a heading of --help-all. only_with: another field ->
    the values that it must have, or this one stays at its default ("": it is not given).
    """
    return field(default=default, metadata=locals())  # all of these are facts about it


def one_of(help, *choices, **facts):
    """A field with few values; the first is its default."""
    return flag(choices[0], help, choices=choices, **facts)


# fields without a flag: `--set NAME=VALUE`
constant, constant_of = partial(flag, flag=False), partial(one_of, flag=False)

NOT_DPO = {"objective": tuple(name for name in OBJECTIVES if name != "dpo")}
SPARSE = {"attention": ("dsa",)}
NO_TEACHER = {"teacher": ("",)}
BY_TURN = NOT_DPO | NO_TEACHER | {"advantage": IN_GROUP}  # what --credit turn goes with


@dataclass(frozen=True)
class Config:
    """Everything a run needs to know; `parse` fills it from the command line."""

    task: str = flag(
        "guess",
        "guess, reverse[:N], sort[:N], sum[:N], recall[:TOKENS], hops[:N[:RATE]], "
        "add[:N], jsonl:PATH, gym:NAME or your own file.py[:ARGUMENT]; several with commas",
        group="what is learned",
    )
    ratio: str = flag("", "shares of several tasks, such as 2,1,1 ('': alike)")
    steps: int = flag(0, "optimizer steps (0: as many as the task needs on a laptop)")
    seed: int = flag(0, "seed of weights, prompts and sampling noise", 0, 2**31 - 1)
    out: str = flag("", "run folder to write ('': runs/ and a name of task, mode and time)")
    resume: str = flag("", "run folder to go on with, from its newest checkpoint")
    replay: str = flag("", "run folder to execute again (train_async.py), to the same weights")
    init: str = flag("", "weights and shape to start from: a run folder, or a file of pretrain.py")

    model: str = flag("tiny", "tiny, small, medium, or a Hugging Face folder", group="model")
    lora: int = flag(0, "rank of the adapters that alone are trained (0: train all)", 0, 1024)
    dtype: str = one_of(
        "what models compute in; auto: bfloat16 where the processor has instructions for it",
        "float32",
        "bfloat16",
        "auto",
    )
    positions: str = one_of("encoding", "learned", "rope", only_with={"model": SIZES})
    chat: str = one_of("the folder's chat template, for tasks with one turn", "no", "yes")
    system: str = flag("", "what a chat begins with", only_with={"chat": ("yes",)})
    attention: str = one_of("dense, or sparse (dsa)", "dense", "dsa")
    chunk_size: int = flag(16, "keys in a chunk, a power of two", 1, 512, only_with=SPARSE)
    top_k: int = flag(8, "chunks that a query attends to", 1, only_with=SPARSE)

    slots: int = flag(
        128,
        "sequences that a worker decodes at once",
        1,
        4096,
        group="generation",
    )
    group_size: int = flag(16, "answers to each prompt (1: gae or a teacher only)", 1, 1024)
    groups_per_step: int = flag(32, "prompts in a training batch", 1, 65536)
    temperature: float = flag(1.0, "temperature of sampling, and of the log-probs", 0.01, 100.0)
    swap: str = one_of(
        "what becomes of keys and values when weights change; drain: running episodes end first",
        *SWAPS,
    )
    rollout_weights: str = one_of("precision of the weights that generate", *DTYPES)

    max_staleness: int = flag(2, "oldest trained token, in versions", group="staleness")

    objective: str = flag("cispo", "see losses.py", choices=OBJECTIVES, group="objective")
    advantage: str = one_of(
        "inside a group, or (gae) by a critic", *ADVANTAGES, only_with=NOT_DPO | NO_TEACHER
    )
    credit: str = one_of("what a turn is credited with", "episode", "turn", only_with=BY_TURN)
    damper: str = one_of("how a step is made smaller when data are stale", *DAMPERS)
    kl_threshold: float = flag(
        1.0, "mean KL that damps a step (GLM-5, it is said: 0.15)", only_with={"damper": ("kl",)}
    )
    reference_weight: float = flag(0.001, "weight of the KL to the reference policy")
    teacher: str = flag(
        "", "policy to learn from: a run folder, or a Hugging Face folder", only_with=NOT_DPO
    )
    reward_model: str = flag("", "folder of methods/reward_model.py, which judges for the task")
    keep_dead: str = one_of(
        "groups whose rewards are all equal; no: replace, up to 3 steps' worth",
        "yes",
        "no",
        only_with=NO_TEACHER | {"advantage": ADVANTAGES[:-1], "credit": ("episode",)},
    )
    overlong: str = one_of("answers cut by the token limit; drop: count as failed", "keep", "drop")
    lr: float = flag(6e-4, "learning rate of AdamW at the first step, falling to 0", 0, 1.0)
    entropy: float = flag(0.02, "weight of the entropy bonus")
    token_budget: int = flag(4096, "most tokens in a micro-batch, padding included", 1)

    device: str = flag("auto", "auto, cpu, cuda or cuda:N", group="machines")
    cluster: str = flag("", "Ray cluster of the workers: local, or HOST:PORT ('': this machine)")
    rollout_workers: int = flag(0, "processes that generate (0: what the devices suggest)", 0, 64)
    reward_workers: int = flag(1, "processes that verify (0: those that generate)", 0, 64)
    learners: int = flag(0, "processes that train, each its share of a batch (0: one)", 0, 64)

    eval_every: int = flag(20, "steps between evaluations", 1, group="watching")

    scoring: str = constant_of("of chunks", "mean", "indexer", only_with=SPARSE)
    qk_norm: str = constant_of(
        "RMSNorm of queries and keys", "no", "yes", only_with={"model": SIZES}
    )
    think: str = constant_of("in a chat", "no", "yes", only_with={"chat": ("yes",)})
    top_p: float = constant(1.0, "mass of the likeliest tokens", 0.01, 1.0, only_with=NO_TEACHER)
    threads: int = constant(
        -1,
        "CPU threads of each process (0: share the cores out; -1: 1, with a folder for --model 0)",
        -1,
    )
    on_stale: str = constant_of("drop: discard what is too old", "wait", "drop")
    reference_every: int = constant(
        5, "steps between looks at the reference (0: it has none)", only_with=NOT_DPO
    )
    eval_when: str = constant_of("late: on kept weights, at the end", "live", "late")
    checkpoint_every: int = constant(100, "steps between checkpoints", 1)
    reward_seconds: float = constant(2.0, "time limit of a verdict or a reply", 0.01)
    reward_memory: float = constant(1024.0, "MiB that a verdict or a reply may take", 1.0)
    max_failures: float = constant(0.5, "share of failed episodes that stops the run", 0, 1)
    restarts: int = constant(3, "of a worker in an hour; then the run stops")
    silence: float = constant(
        20.0, "seconds without a sign of life of a worker, or that learners wait", 1.0
    )

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


# name -> type
CONSTANTS = {f.name: f.type for f in fields(Config) if not f.metadata["flag"]}


def written(name: str, value: object = "") -> str:
    """A field as it stands on the command line."""
    if name in CONSTANTS:
        return f"--set={name}={value}".rstrip("=")
    return f"--{name.replace('_', '-')} {value!s:.80}".rstrip()


def words(changes: dict) -> list[str]:
    """The command line that sets these fields."""
    return [f"{written(name)}={value}" for name, value in changes.items()]


def check(config: Config) -> Config:
    """Return config, or raise UserError for the first value that is not allowed."""
    for f in fields(config):
        value, choices = getattr(config, f.name), f.metadata["choices"]
        must = f"{written(f.name, value)}: must be"
        right = type(value) is f.type or (f.type, type(value)) == (float, int)
        require(right, f"{must} of type {f.type.__name__}")
        require(not choices or value in choices, f"{must} one of {', '.join(choices)}")
        if f.type is not str:
            low, high = f.metadata["low"], f.metadata["high"]
            require(low <= value <= high, f"{must} at least {low} and at most {high}")
        for other, values in dict(f.metadata["only_with"]).items():
            beside = getattr(config, other)
            needed = repr(f.default) if f.default else "left out"
            fits = value == f.default or beside in values
            require(fits, f"{must} {needed} with {written(other, beside)}")
    size = getattr(config, "chunk_size", 1)
    require(size.bit_count() == 1, f"--chunk-size {size}: must be a power of two")
    if isinstance(config, Config):
        check_together(config)
    return config


def check_together(config: Config) -> None:
    """UserError for what is allowed alone, and not with the rest."""
    known = config.model in SIZES or os.path.isfile(f"{config.model}/config.json")
    folder = "a Hugging Face folder (config.json, *.safetensors, tokenizer.json)"
    require(known, f"--model {config.model}: must be tiny, small, medium or {folder}")
    must = f"--group-size {config.group_size}: must be at least 2 with {config.advantage}"
    # a teacher and a critic need no siblings
    require(config.group_size > 1 or config.teacher or config.advantage == "gae", must)
    least = 2 * config.reward_seconds
    must = f"--set=silence={config.silence}: must be at least {least} (2 time limits)"
    require(config.silence >= least, must)


def parse(description: str, argv: list[str], program: type = Config) -> Config:
    """Read the command line into a checked Config, or another dataclass of flags; UserError.

    --help shows the flags in FIRST, --help-all shows all; of another dataclass --help does.
    """
    parser = group = argparse.ArgumentParser(
        description=description,
        usage="%(prog)s [--flag value] ...",
        formatter_class=argparse.RawDescriptionHelpFormatter,  # docstrings keep their lines
        allow_abbrev=False,
    )
    parser.error = lambda text: require(False, text)
    everything = program is not Config or "--help-all" in argv
    if program is Config:
        parser.add_argument("--help-all", action="help", help="show every flag and exit")
    constants = []
    for f in fields(program):
        text = f"{f.metadata['help']} (default {f.default!r})"
        if not f.metadata["flag"]:
            constants.append(f"{f.name}: {text}")
            continue
        if f.metadata["group"]:
            group = parser.add_argument_group(f.metadata["group"])
        group.add_argument(
            written(f.name),
            type=f.type,
            default=f.default,
            metavar="|".join(f.metadata["choices"]) or f.type.__name__,
            help=text if everything or f.name in FIRST else argparse.SUPPRESS,
        )
    text = f"a constant, one of {'; '.join(constants)}" if everything else argparse.SUPPRESS
    if constants:
        group.add_argument("--set", action="append", default=[], metavar="NAME=VALUE", help=text)
    values, unknown = parser.parse_known_args(argv)
    require(not unknown, f"{' '.join(unknown):.80}: must be a flag (--help-all lists them)")
    values = vars(values)
    for text in values.pop("set", ()):
        name, _, value = text.partition("=")
        require(name in CONSTANTS, f"--set {text:.80}: must be one of {', '.join(CONSTANTS)}")
        with blame(f"--set {text:.80}: must be of type {CONSTANTS[name].__name__}", ValueError):
            values[name] = CONSTANTS[name](value)
    return check(program(**values))
