"""runtime/checkpoint.py: a run on disk, so that it can go on as if nothing had happened.

A checkpoint holds the learner, the next prompt's number, the groups that wait to be trained, the
ids of those that are still being made (these are issued again), and how far the logs went. Sampling
noise is a hash of counters, so no generator has a state to save.
What it relies on is on disk before it is: first the logs, then the file, then its name. A run goes
on with the newest one that is whole and whose logs are, too.
"""

import hashlib
import io
import itertools
import sys
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

from learner import Learner, round_weights
from reward import specs_of
from runtime.config import SIZES, Config, UserError, blame, require
from runtime.folder import open_plain, refuse_links, scan, write_file
from runtime.ledger import Ledger
from runtime.messages import ARRAYS, Group, Trajectory
from runtime.runlog import LOGS
from runtime.team import gather_moments
from runtime.terminal import printable

COUNTERS = ("version", "cursor", "begun", "skipped")  # of a learner
MOMENTS = ("exp_avg", "exp_avg_sq")  # of AdamW, for each weight


def sha256_of(flat: Tensor) -> str:
    """Fingerprint of the weights: the sha256 of their bytes."""
    return hashlib.sha256(flat.detach().cpu().contiguous().numpy()).hexdigest()


def named_files(config: Config) -> dict[str, str]:
    """Size and sha256 of every file that the flags name, and of those in a folder that they name
    (of a run its checkpoints); of a file above 64 MiB the sha256 of 64 pieces.

    A model is one of them: a run of adapters (--lora) has no copy of what they adapt.
    """
    paths = []
    for spec in specs_of(config.task):  # a path may have colons
        words = spec.removeprefix("jsonl:").split(":")
        paths += [Path(":".join(words[:end])) for end in range(1, len(words) + 1)]
    for name in (config.init, config.teacher, config.reward_model, config.model):
        if name not in ("", *SIZES):
            inside = Path(name, "checkpoints").glob("*.pt"), Path(name).glob("[!.]*.*")
            paths += [Path(name), *itertools.chain(*inside)]
    digests = {}
    for path in filter(Path.is_file, paths):
        size, digest = path.stat().st_size, hashlib.sha256()
        with path.open("rb") as file:
            for place in range(0, size, max(1 << 20, size >> 6)):
                file.seek(place)
                digest.update(file.read(1 << 20))
        digests[str(path)] = f"{size} {digest.hexdigest()}"
    return digests


def checkpoint_path(folder: Path, step: int) -> Path:
    """Its file: names are in the order of steps."""
    return folder / "checkpoints" / f"step{step:07d}.pt"


def save_checkpoint(folder: Path, step: int, state: dict) -> Path:
    """Write a checkpoint that is whole or not there, and remove all but the last three.

    The file is what torch.save writes, and then the sha256 of that. Raises OSError.
    """
    path, memory = checkpoint_path(folder, step), io.BytesIO()
    torch.save(state, memory)
    data = memory.getvalue()  # no copy; a view of it in a traceback would crash Python 3.12.1
    write_file(path, data, hashlib.sha256(data).digest())
    for old in sorted(path.parent.glob("step*.pt"))[:-3]:
        old.unlink()
    return path


def load_tensors(path: Path, digest: bool = False) -> dict:
    """What torch.save has written, tensors and plain data; UserError for anything else.

    digest: its sha256 stands behind it.
    """
    with blame(f"{path}: must hold a dict of tensors and plain data, saved by torch"):
        with open_plain(path) as file:
            data = file.read()
        if digest:
            whole = hashlib.sha256(data[:-32]).digest() == data[-32:]
            require(whole, "it is damaged: wrong sha256")
        # weights_only: no code
        return {**torch.load(io.BytesIO(data), map_location="cpu", weights_only=True)}


def load_checkpoint(folder: Path, logs: Sequence = LOGS) -> dict:
    """The newest checkpoint of a run folder that is whole, and whose logs are; UserError when there
    is none. What is wrong with newer ones is said on stderr."""
    wrong = "there is none"
    for path in sorted((folder / "checkpoints").glob("step*.pt"), reverse=True):
        try:
            state = load_tensors(path, digest=True)
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


def state_of(learner: Learner, in_flight=(), completed=()) -> dict:
    """What a checkpoint holds of the training: tensors and plain data.

    in_flight: ids of groups that were admitted and not trained; completed: those of them that wait.
    """
    reference = learner.reference
    return {
        "shape": vars(learner.model.config),
        "weights": learner.weights.detach().cpu(),
        "moments": whole_moments(learner),
        "adamw_step": float(learner.slices[0][1]["step"]),
        "damping": learner.damping,
        "reference": reference and reference.flat.cpu(),
        "method": learner.method.state(),
        "in_flight": list(in_flight),
        "completed": [*map(to_tensors, completed)],
        **{name: getattr(learner, name) for name in COUNTERS},
    }


def whole_moments(learner: Learner) -> Tensor | None:
    """AdamW's MOMENTS of all weights [2, P]. Of several learners each has a slice: rank 0 gathers
    them, the others return None."""
    if learner.version == 0:  # zeros, of which one is stored
        return torch.zeros(()).expand(len(MOMENTS), len(learner.weights))
    slices = [torch.stack([own[name] for name in MOMENTS]) for _, own in learner.slices]
    whole = torch.cat(slices, dim=1).cpu()
    return gather_moments(learner.team, whole) if learner.team.apart else whole


def load_state(learner: Learner, state: dict) -> None:
    """Fill a learner from a checkpoint; of several learners each takes its slice of the moments.
    Almost any error for one that does not fit."""
    learner.weights.detach().copy_(state["weights"])
    round_weights(learner)
    if learner.reference:
        learner.reference.flat.copy_(state["reference"])
    shares = state["moments"].tensor_split(learner.team.size, dim=1)
    for rank, (_, own) in zip(learner.team.ranks, learner.slices, strict=True):
        own["step"].fill_(state["adamw_step"])
        for name, stored in zip(MOMENTS, shares[rank], strict=True):
            own[name].copy_(stored)
    device, damping = learner.weights.device, state["damping"]
    learner.damping = {
        name: x.to(device) if isinstance(x, Tensor) else x for name, x in damping.items()
    }
    learner.method.load(state["method"])
    for name in COUNTERS:
        setattr(learner, name, state[name])


def converted(episode: dict, convert) -> dict:
    """The fields of an episode, with something else in place of its arrays."""
    return episode | {name: convert(episode[name]) for name in ARRAYS}


def to_tensors(group: Group) -> dict:
    """A group as plain data, with tensors in place of arrays."""
    episodes = [converted(vars(t), torch.tensor) for t in group.trajectories]
    return vars(group) | {"trajectories": episodes}


def completed_groups(state: dict) -> list[Group]:
    """The groups of a checkpoint that wait to be trained, in order of completion."""
    groups = [Group(**stored) for stored in state["completed"]]
    for group in groups:
        episodes = [converted(row, Tensor.numpy) for row in group.trajectories]
        group.trajectories = [Trajectory(**row) for row in episodes]
    return groups


def restore(learner: Learner, state: dict, config: Config, ledger: Ledger) -> None:
    """Fill a learner from a checkpoint; UserError when that does not fit it, or the ledger."""
    with blame(f"--resume {config.resume}: its checkpoint must fit the run"):
        odd = vars(learner.model.config).items() - state["shape"].items()
        require(not odd, f"its shape must have {dict(odd)}")
        load_state(learner, state)
        require(bool(learner.weights.isfinite().all()), "its weights are not finite")
        flying = set(state["in_flight"])
        require(ledger.flying == flying, "events.jsonl has other groups in flight")
        strange = {group.group_id for group in completed_groups(state)} - flying
        require(not strange, f"its groups {strange} are not in flight")
    # a run that has all its steps, but no summary, has still to be ended
    least = learner.version + Path(config.resume, "summary.json").exists()
    needed = f"must be more than the {learner.version} steps that the run has"
    require(config.steps >= least, f"--steps {config.steps}: {needed}")
