"""runtime/config.py."""

import argparse
import dataclasses
import math
import os
import shutil
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

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
