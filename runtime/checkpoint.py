"""checkpoint.py: a run on disk, so that it can go on as if nothing had happened.

A checkpoint holds the learner, the prompt cursor, the completed groups of the buffer and the ids of
the groups that are still being made: those are issued again. Sampling noise is a hash of counters,
so there is no generator state to save. A file is written under a temporary name, flushed and
renamed; `kill -9` at any moment leaves the checkpoint before.
Left out: metrics and events of the steps that are done again (common.py and ledger.py cut them).
"""

import contextlib
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
    """Write a checkpoint under a temporary name, flush it, rename it: never a half-written one.

    The file is what torch.save writes, and then the sha256 of that (32 bytes). Raises OSError.
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
        raise OSError(error.errno, error.strerror, str(path)) from error
    partial.replace(path)
    with contextlib.suppress(OSError):  # the name is safe, too; not every system can do this
        directory = os.open(path.parent, os.O_RDONLY)
        os.fsync(directory)
        os.close(directory)
    for old in sorted(path.parent.glob("step*.pt"))[:-keep]:
        old.unlink()
    return path


def load_checkpoint(folder: Path) -> dict:
    """The newest checkpoint of a run folder that is whole; a damaged one is named on stderr, and
    the one before is used. Raises UserError when there is none."""
    for path in sorted((folder / "checkpoints").glob("step*.pt"), reverse=True):
        data = path.read_bytes()
        if hashlib.sha256(data[:-32]).digest() == data[-32:]:
            return torch.load(io.BytesIO(data[:-32]), map_location="cpu", weights_only=True)
        sys.stderr.write(f"{path} is damaged (wrong sha256): refused\n")
    raise UserError(f"--resume {folder}: must hold a checkpoint that is whole (checkpoints/*.pt)")


def state_of(learner: Learner, in_flight=(), completed=()) -> dict:
    """What a checkpoint holds. Sampling noise is counter-based: the cursor IS the RNG state."""
    groups = [group_to_parts(group) for group in completed]
    return {
        "weights": learner.model.flat.detach().cpu(),
        "shape": learner.model.config.__dict__,
        "optimizer": learner.optimizer.state_dict(),
        "damper": losses.damper_to_dict(learner.damper),
        "reference": None if learner.reference is None else learner.reference.flat.cpu(),
        "version": learner.version,
        "next_group": learner.next_group,
        "in_flight": list(in_flight),  # group ids that were admitted and not trained yet
        "completed": [  # tensors: they load with weights_only
            (head, {n: torch.from_numpy(a) for n, a in parts.items()}) for head, parts in groups
        ],
        "skipped": [learner.skipped, learner.skipped_in_row],
        "torch_rng": torch.get_rng_state(),
    }


def checkpoint(learner: Learner, run: Path, watch: RunLog, in_flight=(), completed=()) -> None:
    """Save a checkpoint: ids of all groups in flight, and those of them that are complete.

    Its event is on disk before its file is: see ledger.forget_after.
    """
    watch.event("learner", "checkpoint", version=learner.version, groups=list(in_flight))
    watch.flush()
    save_checkpoint(run, learner.version, state_of(learner, in_flight, completed))


def restore(learner: Learner, state: dict, config: Config) -> None:
    """Fill a learner from a checkpoint; raises UserError when the checkpoint does not fit."""
    shape = learner.model.config.__dict__
    for name, value in shape.items():
        if state["shape"].get(name) != value:
            raise UserError(
                f"--resume {config.resume}: must fit the model, but its {name} is "
                f"{state['shape'].get(name)} and this run's is {value}"
            )
    learner.model.flat.copy_(state["weights"])
    learner.optimizer.load_state_dict(state["optimizer"])
    learner.damper = losses.damper_from_dict(state["damper"])
    if learner.reference is not None and state["reference"] is not None:
        learner.reference.flat.copy_(state["reference"])
    learner.version, learner.next_group = state["version"], state["next_group"]
    learner.skipped, learner.skipped_in_row = state["skipped"]
    torch.set_rng_state(state["torch_rng"])


def completed_groups(state: dict) -> list[Group]:
    """The groups of a checkpoint that wait to be trained, in order of completion."""
    groups = [
        (head, {n: a.numpy() for n, a in parts.items()}) for head, parts in state["completed"]
    ]
    return [group_from_parts(*group) for group in groups]
