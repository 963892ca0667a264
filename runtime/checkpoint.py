"""runtime/checkpoint.py: a run on disk, so that it can go on as if nothing had happened.

A checkpoint holds the learner, the next prompt's number, the groups that wait to be trained, and
the ids of those that are still being made: these are issued again. Sampling noise is a hash of
counters, so no generator has a state to save. A file is written under a temporary name, flushed and
renamed: `kill -9` at any moment leaves the checkpoint before.
Left out: metrics and events of steps that are done again (runlog.cut_logs).
"""

import contextlib
import dataclasses
import hashlib
import io
import os
import sys
from pathlib import Path

import torch

import losses
from learner import Learner
from runtime.config import Config, UserError
from runtime.messages import Group, group_from_parts, group_to_parts
from runtime.runlog import RunLog


def sha256_of(flat: torch.Tensor) -> str:
    """Fingerprint of the weights: the sha256 of their bytes."""
    return hashlib.sha256(flat.detach().cpu().contiguous().numpy().tobytes()).hexdigest()


def save_checkpoint(folder: Path, step: int, state: dict, keep: int = 3) -> Path:
    """Write a checkpoint that is whole or not there, and remove all but the last `keep`.

    The file is what torch.save writes, and then the sha256 of that. Raises OSError.
    """
    path = folder / "checkpoints" / f"step{step:07d}.pt"
    partial, memory = path.with_suffix(".partial"), io.BytesIO()
    torch.save(state, memory)
    data = memory.getbuffer()
    try:
        with partial.open("wb") as file:
            file.write(data)
            file.write(hashlib.sha256(data).digest())
            file.flush()
            os.fsync(file.fileno())
    except OSError as error:  # the disk is full: give back what was taken
        partial.unlink(missing_ok=True)
        error.filename = str(path)
        raise
    partial.replace(path)
    with contextlib.suppress(OSError):  # flush the name, too; not every system can do this
        directory = os.open(path.parent, os.O_RDONLY)
        os.fsync(directory)
        os.close(directory)
    for old in sorted(path.parent.glob("step*.pt"))[:-keep]:
        old.unlink()
    return path


def load_checkpoint(folder: Path) -> dict:
    """The newest checkpoint of a run folder that is whole; UserError when there is none.

    A damaged one is named on stderr, and the one before is used.
    """
    for path in sorted((folder / "checkpoints").glob("step*.pt"), reverse=True):
        data = path.read_bytes()
        state, digest = data[:-32], data[-32:]
        if hashlib.sha256(state).digest() == digest:
            return torch.load(io.BytesIO(state), map_location="cpu", weights_only=True)
        sys.stderr.write(f"{path} is damaged (wrong sha256): refused\n")
    raise UserError(f"--resume {folder}: must hold a checkpoint that is whole (checkpoints/*.pt)")


def checkpoint(learner: Learner, run: Path, log: RunLog, in_flight=(), completed=()) -> None:
    """Save a checkpoint: ids of all groups in flight, and those of them that are complete.

    Its event is on disk before its file is: runlog.cut_logs looks for it.
    """
    log.event("learner", "checkpoint", version=learner.version, groups=list(in_flight))
    log.flush()
    save_checkpoint(run, learner.version, state_of(learner, in_flight, completed))


def state_of(learner: Learner, in_flight=(), completed=()) -> dict:
    """What a checkpoint holds: tensors and plain data, which torch loads with weights_only."""
    reference = learner.reference
    return {
        "weights": learner.model.flat.detach().cpu(),
        "shape": vars(learner.model.config),
        "optimizer": learner.optimizer.state_dict(),
        "damper": dataclasses.asdict(learner.damper),
        "reference": None if reference is None else reference.flat.cpu(),
        "version": learner.version,
        "next_group": learner.next_group,
        "in_flight": list(in_flight),  # group ids that were admitted and not trained yet
        "completed": [to_tensors(*group_to_parts(group)) for group in completed],
        "skipped": [learner.skipped, learner.skipped_in_row],
    }


def to_tensors(header: dict, arrays: dict) -> tuple[dict, dict]:
    return header, {name: torch.from_numpy(array) for name, array in arrays.items()}


def completed_groups(state: dict) -> list[Group]:
    """The groups of a checkpoint that wait to be trained, in order of completion."""
    groups = []
    for header, tensors in state["completed"]:
        arrays = {name: tensor.numpy() for name, tensor in tensors.items()}
        groups.append(group_from_parts(header, arrays))
    return groups


def restore(learner: Learner, state: dict, config: Config) -> None:
    """Fill a learner from a checkpoint; raises UserError when the checkpoint does not fit."""
    for name, ours in vars(learner.model.config).items():
        theirs = state["shape"].get(name)
        if theirs != ours:
            raise UserError(
                f"--resume {config.resume}: must fit the model, but its {name} is {theirs} "
                f"and this run's is {ours}"
            )
    learner.model.flat.copy_(state["weights"])
    learner.optimizer.load_state_dict(state["optimizer"])
    learner.damper = losses.Damper(**state["damper"])
    if learner.reference is not None:
        learner.reference.flat.copy_(state["reference"])
    learner.version, learner.next_group = state["version"], state["next_group"]
    learner.skipped, learner.skipped_in_row = state["skipped"]
