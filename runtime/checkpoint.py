"""runtime/checkpoint.py: a run on disk, so that it can go on as if nothing had happened.

A checkpoint holds the learner, the next prompt's number, the groups that wait to be trained, the
ids of those that are still being made (these are issued again), and how far the logs went. Sampling
noise is a hash of counters, so no generator has a state to save.
What it relies on is on disk before it is: first the logs, then the file, then its name. A run goes
on with the newest one that is whole and whose logs are, too.
"""

import hashlib
import io
import math
import os
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor

from learner import Learner, round_weights
from runtime.config import Config, TrainingStopped, UserError, blame, require
from runtime.folder import check_log, open_plain, refuse_links, write_file
from runtime.ledger import Ledger
from runtime.messages import Group, group_flaw, pack_group, unpack_group, verdict_flaw
from runtime.runlog import LOGS, RunLog
from runtime.team import CALL, ORDER, gather_moments, share_state
from runtime.terminal import printable

COUNTERS = ("version", "cursors", "begun", "skipped", "skipped_in_row")  # of a learner


def sha256_of(flat: Tensor) -> str:
    """Fingerprint of the weights: the sha256 of their bytes."""
    return hashlib.sha256(flat.detach().cpu().contiguous().numpy()).hexdigest()


def checkpoint_path(folder: Path, step: int) -> Path:
    """Its file: names are in the order of steps."""
    return folder / "checkpoints" / f"step{step:07d}.pt"


def save_checkpoint(folder: Path, step: int, state: dict, keep: int = 3) -> Path:
    """Write a checkpoint that is whole or not there, and remove all but the last `keep`.

    The file is what torch.save writes, and then the sha256 of that. Raises OSError.
    """
    path, memory = checkpoint_path(folder, step), io.BytesIO()
    torch.save(state, memory)
    data = memory.getvalue()  # no copy; a view of it in a traceback would crash Python 3.12.1
    write_file(path, data, hashlib.sha256(data).digest())
    for old in sorted(path.parent.glob("step*.pt"))[:-keep]:
        old.unlink()
    return path


def load_tensors(path: Path, digest: bool = False) -> dict:
    """What torch.save has written, tensors and plain data; UserError for anything else.

    digest: its sha256 stands behind it.
    """
    memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    with open_plain(path, most=memory // 3) as file:  # the file, its tensors, the model
        data = file.read()
    if digest:
        data, told = data[:-32], data[-32:]
        require(hashlib.sha256(data).digest() == told, f"{path}: is damaged (wrong sha256)")
    with blame(f"{path}: must hold a dict of tensors and plain data, saved by torch"):
        return {**torch.load(io.BytesIO(data), map_location="cpu", weights_only=True)}


def load_checkpoint(folder: Path, logs: Sequence = LOGS) -> dict:
    """The newest checkpoint of a run folder that is whole, and whose logs are; UserError when there
    is none. What is wrong with newer ones is said on stderr."""
    wrong = "there is none"
    for path in sorted((folder / "checkpoints").glob("step*.pt"), reverse=True):
        try:
            state = load_tensors(path, digest=True)
            for name in logs:
                check_log(folder / f"{name}.jsonl", state["marks"][name])
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


def drop_what_follows(folder: Path, state: dict) -> None:
    """Remove what came after a checkpoint: it is done again. (Opening the logs cuts them; a summary
    is of a run that has ended.)"""
    for path in (folder / "checkpoints").glob("step*"):
        if path.suffix == ".partial" or path > checkpoint_path(folder, state["version"]):
            path.unlink()
    (folder / "summary.json").unlink(missing_ok=True)


def checkpoint(learner: Learner, run: Path, log: RunLog, in_flight=(), completed=()) -> None:
    """Save a checkpoint: ids of all groups in flight, and those of them that are complete.

    Not of a step whose metrics could not be written: it is done again.
    """
    if log.written != learner.version:
        return
    state = state_of(learner, whole_moments(learner), in_flight, completed)
    log.event("learner", "checkpoint", version=learner.version, groups=state["in_flight"])
    state |= {"marks": log.sync(), "seconds": log.now()}
    save_checkpoint(run, learner.version, state)


def state_of(learner: Learner, optimizer: dict, in_flight=(), completed=()) -> dict:
    """What a checkpoint holds of the training: tensors and plain data. optimizer: its moments."""
    reference, critic = learner.reference, learner.critic
    return {
        "base": sha256_of(learner.model.frozen[::4099].float()),  # enough to know it by
        "shape": vars(learner.model.config),
        "weights": learner.weights.detach().cpu(),
        "optimizer": optimizer,
        "window": list(learner.damper.window),
        "reference": reference and reference.flat.cpu(),
        "in_flight": list(in_flight),  # group ids that were admitted and not trained yet
        "completed": [*map(to_tensors, completed)],
        "critic": critic
        and {"net": critic.net.state_dict(), "moments": critic.optimizer.state_dict()["state"]},
        **{name: getattr(learner, name) for name in COUNTERS},
    }


def whole_moments(learner: Learner) -> dict[str, Tensor] | None:
    """What AdamW remembers of all weights [P]. Of several learners each has a slice: the parent
    calls the others, and gets theirs; these return None."""
    team, states = learner.team, [remembered for _, remembered in learner.slices]
    if team.size == 1:
        return states[0]
    names = learner.moments
    whole = torch.stack([torch.cat([state[name] for state in states]) for name in names])
    if team.apart and learner.version == 0:
        whole = whole.new_zeros(len(names), len(learner.weights))
    elif team.apart:
        if CALL not in ORDER.get(team.last, ()):
            raise TrainingStopped(f"the learners are apart since {team.last or 'the beginning'}")
        for send in team.others:
            send([CALL])
        whole = gather_moments(team, learner.version, whole, len(learner.weights))
    if whole is not None:
        return {"step": states[0]["step"], **dict(zip(names, whole.cpu(), strict=True))}


def to_tensors(group: Group) -> tuple:
    """A group as it is pickled, with tensors in place of arrays."""
    anew = replace(group, laid=None)  # empty arrays that came may share memory
    *plain, laid, crc = pack_group(anew)
    return *plain, [*map(torch.from_numpy, laid)], crc


def completed_groups(state: dict) -> list[Group]:
    """The groups of a checkpoint that wait to be trained, in order of completion."""
    groups = []
    for *plain, laid, crc in state["completed"]:
        groups.append(unpack_group(*plain, [tensor.numpy() for tensor in laid], crc))
    return groups


def restore(learner: Learner, state: dict, config: Config, ledger: Ledger) -> None:
    """Fill a learner from a checkpoint; UserError when that does not fit it, or the ledger."""
    with blame(f"--resume {config.resume}: its checkpoint must fit the run"):
        check_fit(learner, state, config)
        flying = set(state["in_flight"])
        require(ledger.flying == flying, "events.jsonl has other groups in flight")
        done = [group.group_id for group in completed_groups(state)]
        scored = {group for group in flying if ledger.states[group] == "scored"}
        known = len(scored.intersection(done)) == len(done)  # each once
        require(known, f"events.jsonl has other groups scored than {done}")
    set_state(learner, state)
    # a run that has all its steps, but no summary, has still to be ended
    least = learner.version + Path(config.resume, "summary.json").exists()
    needed = f"must be more than the {learner.version} steps that the run has"
    require(config.steps >= least, f"--steps {config.steps}: {needed}")


def set_state(learner: Learner, state: dict) -> None:
    """Fill a learner from a checkpoint that fits; of several learners each takes its slice."""
    learner.weights.detach().copy_(state["weights"])
    if learner.reference:
        learner.reference.flat.copy_(state["reference"])
    whole = [state["optimizer"][name].tensor_split(learner.team.size) for name in learner.moments]
    own = [[parts[rank] for parts in whole] for rank in learner.team.ranks]
    set_facts(learner, state, state["optimizer"]["step"], own)


def set_facts(learner: Learner, state: dict, step: Tensor, own: list) -> None:
    """Everything but weights and reference; own: the moments of each of its slices."""
    round_weights(learner)
    for (_, remembered), found in zip(learner.slices, own, strict=True):
        remembered["step"].copy_(step)
        for name, moment in zip(learner.moments, found, strict=True):
            remembered[name].copy_(moment)
    learner.damper = replace(learner.damper, window=tuple(state["window"]))
    if learner.critic:
        net, optimizer = learner.critic.net, learner.critic.optimizer
        net.load_state_dict(state["critic"]["net"])
        optimizer.load_state_dict(optimizer.state_dict() | {"state": state["critic"]["moments"]})
    for name in COUNTERS:
        setattr(learner, name, state[name])


def share(learner: Learner, state: dict | None = None) -> None:
    """The meeting "state": all learners get what rank 0 has. It alone has a state, and is filled
    from it already; the others read no checkpoint."""
    team, tensors = learner.team, [learner.weights.detach()]
    if learner.reference:
        tensors.append(learner.reference.flat)
    part, remembered = learner.slices[0]
    step = remembered["step"]
    facts = [state and {name: state[name] for name in ("window", "critic", *COUNTERS)}]
    own = learner.weights.new_empty(len(learner.moments), len(part))
    whole = state and torch.stack([state["optimizer"][name] for name in learner.moments])
    facts, own = share_state(team, learner.version, facts, [*tensors, step], own, whole)
    set_facts(learner, facts, step, [own])


def check_fit(learner: Learner, state: dict, config: Config) -> None:
    """UserError for a checkpoint that is not of the kind that this learner would write."""
    weight = torch.empty_like(learner.weights, device="meta")
    whole = {"step": weight.new_empty(()), **dict.fromkeys(learner.moments, weight)}
    ours = state_of(learner, whole) | {"seconds": 0.0, "marks": dict.fromkeys(LOGS, (0, 0))}
    theirs = flattened(state)
    for name, kind in flattened(ours).items():
        found = theirs.get(name)
        require(found == kind, f"its {name} is {found} and this run's is {kind}")
    math.fsum(state["window"])  # numbers
    for name in ("cursors", "begun"):  # one of each task
        found, K = state[name], len(learner.cursors)
        sound = len(found) == K and all(type(n) is int and n >= 0 for n in found)
        require(sound, f"its {name} are {found!r:.80}, must be {K} whole numbers")
    for group in completed_groups(state):
        words = ours["shape"]["vocab_size"]
        flaw = group_flaw(group, config.group_size, state["version"], words, config.cut)
        verdicts = [(t.reward, t.turn_rewards, t.failure) for t in group.trajectories]
        flaw = flaw or verdict_flaw(verdicts, group.trajectories)
        require(not flaw, f"completed group {group.group_id} has {flaw}")


def flattened(state: dict, path: str = "") -> dict[str, str]:
    """name -> type of everything in a checkpoint; for a tensor its dtype and size, too, and for
    what stands under "shape" its value."""
    found = {}
    for name, value in state.items():
        if isinstance(value, dict):
            found |= flattened(value, f"{path}{name} ")
        elif isinstance(value, Tensor):
            found[path + name] = f"{value.dtype} {list(value.shape)}"
        else:
            exact = path == "shape " or name == "base"
            found[path + name] = repr(value) if exact else type(value).__name__
    return found
