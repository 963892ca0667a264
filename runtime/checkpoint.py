"""runtime/checkpoint.py: a run on disk, so that it can go on as if nothing had happened.

A checkpoint holds the learner, the next prompt's number, and how far the logs went. The log of
events tells which groups were under way: these are issued again. Sampling noise is a hash of
counters, so no generator has a state to save.
What it relies on is on disk before it is: first the logs, then the file, then its name. A run goes
on with the newest one that is whole and whose logs are, too.
"""

import hashlib
import io
import sys
import zipfile
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

from learner import Learner, round_weights
from runtime.config import Config, UserError, blame, require
from runtime.folder import open_plain, refuse_links, scan, write_file
from runtime.runlog import LOGS
from runtime.terminal import printable

COUNTERS = ("version", "cursor", "begun", "skipped")  # of a learner


def sha256_of(flat: Tensor) -> str:
    """Fingerprint of the weights: the sha256 of their bytes."""
    return hashlib.sha256(flat.numpy(force=True)).hexdigest()


def checkpoint_path(folder: Path, step: int) -> Path:
    """Its file: names are in the order of steps."""
    return folder / "checkpoints" / f"step{step:07d}.pt"


def save_checkpoint(folder: Path, step: int, state: dict) -> Path:
    """Write a checkpoint that is whole or not there, and remove all but the last three. OSError."""
    path, memory = checkpoint_path(folder, step), io.BytesIO()
    torch.save(state, memory)
    write_file(path, memory.getvalue())
    for old in sorted(path.parent.glob("step*.pt"))[:-3]:
        old.unlink()
    return path


def load_tensors(path: Path) -> dict:
    """What torch.save has written, tensors and plain data; UserError for anything else, and for
    what is damaged: a zip has a checksum of each of its parts, which torch does not look at."""
    with blame(f"{path}: must hold a dict of tensors and plain data, saved by torch"):
        with open_plain(path) as file:
            damaged = zipfile.ZipFile(file).testzip()
            require(damaged is None, f"it is damaged: {damaged}")
            file.seek(0)
            # weights_only: no code
            return {**torch.load(file, map_location="cpu", weights_only=True)}


def load_checkpoint(folder: Path, logs: Sequence = LOGS) -> dict:
    """The newest checkpoint of a run folder that is whole, and whose logs are; UserError when there
    is none. What is wrong with newer ones is said on stderr."""
    wrong = "there is none"
    for path in sorted((folder / "checkpoints").glob("step*.pt"), reverse=True):
        try:
            state = load_tensors(path)
            for name in logs:
                for _ in scan(folder / f"{name}.jsonl", state["marks"][name]):
                    pass
            return state
        except (UserError, LookupError, TypeError) as error:  # of odd marks
            wrong = str(error)
            sys.stderr.write(printable(f"{path} is passed over: {wrong}\n"))
    raise UserError(f"{folder}: must hold a checkpoint that is whole, as its logs are ({wrong})")


def newest_weights(place: Path) -> dict:
    """Shape and weights of a model: of a file (of pretrain.py, or a checkpoint), or of the newest
    checkpoint of a run folder that is whole; UserError."""
    if place.is_dir():
        refuse_links(place)
    state = load_checkpoint(place, logs=()) if place.is_dir() else load_tensors(place)
    require(
        not state["shape"].get("lora"),
        f"{place}: has adapters only; export it first (python -m runtime.huggingface)",
    )
    return state


def state_of(learner: Learner) -> dict:
    """What a checkpoint holds of the training: tensors and plain data."""
    weights, reference = learner.weights.detach(), learner.reference
    moments = learner.moments if learner.version else {}  # zeros are not stored
    return {
        "shape": vars(learner.model.config),
        "weights": weights.cpu(),
        "moments": {name: x.cpu() for name, x in moments.items()},
        "damping": learner.damping,
        # the first one is the policy, and where tensors share memory, that is stored once
        "reference": reference and (reference.flat if learner.version else weights).cpu(),
        "method": learner.method.state(),
        **{name: getattr(learner, name) for name in COUNTERS},
    }


def load_state(learner: Learner, state: dict) -> None:
    """Fill a learner from a checkpoint; almost any error for one that does not fit."""
    learner.weights.detach().copy_(state["weights"])
    round_weights(learner)
    if learner.reference:
        learner.reference.flat.copy_(state["reference"])
    for name, x in state["moments"].items():
        learner.moments[name].copy_(x)
    learner.damping = {
        name: x.to(learner.weights.device) if isinstance(x, Tensor) else x
        for name, x in state["damping"].items()
    }
    learner.method.load(state["method"])
    for name in COUNTERS:
        setattr(learner, name, state[name])


def restore(learner: Learner, state: dict, config: Config) -> None:
    """Fill a learner from a checkpoint; UserError when that does not fit it."""
    with blame(f"--resume {config.resume}: its checkpoint must fit the run"):
        odd = vars(learner.model.config).items() - state["shape"].items()
        require(not odd, f"its shape must have {dict(odd)}")
        load_state(learner, state)
        require(bool(learner.weights.isfinite().all()), "its weights are not finite")
    # a run that has all its steps, but no summary, has still to be ended
    least = learner.version + Path(config.resume, "summary.json").exists()
    needed = f"must be more than the {learner.version} steps that the run has"
    require(config.steps >= least, f"--steps {config.steps}: {needed}")
