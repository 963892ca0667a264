"""team.py: what the learners of a run do together, and in which order.

Every learner has all weights, and the whole gradient of its own micro-batches. AdamW's moments it
has for its slice of the weights only (ZeRO-1, arXiv 1910.02054), so L learners need 1/L of that
memory each. A step of all of them:

    gradients   every learner gets its slice of every gradient, and adds them up
    facts       every learner hears what the others have seen: diagnostics, norms of slices
    weights     every learner gives its slice of the new weights to the others

and between two steps, at the beginning and for a checkpoint:

    state       every learner gets what rank 0 has: weights, its slice of the moments, counters
    moments     every learner gives its moments to rank 0, which alone reads and writes checkpoints

Two processes that meet in different orders wait for each other for ever. So the order is one rule,
ORDER, and `meeting` asserts it each time. A meeting has a time limit; its error, `Parted`, names
rank, version and meeting. A team that has parted never meets again: all begin anew (learners.py).
Sums are in the order of ranks, so a run and its replay agree bitwise.
Left out: which micro-batches a learner has (learner.py); messages between parent and workers.
"""

import atexit
import os
import time
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import timedelta
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

from runtime.config import TrainingStopped

MOMENTS = ("exp_avg", "exp_avg_sq")  # of AdamW, for each weight
LEARNER_SECONDS = 10.0  # that learners wait for one of them
CALL = "moments"  # the message that calls a learner to that meeting
ORDER = {  # what may follow
    None: ("the first meeting",),
    "the first meeting": ("state",),  # all have come
    "state": ("gradients", "moments"),
    "gradients": ("facts",),
    "facts": ("weights", "gradients", "moments"),  # a step that is not finite changes no weights
    "weights": ("gradients", "moments"),
    "moments": ("gradients", "moments"),
}


class Parted(TrainingStopped):
    """One of the learners did not come to a meeting."""


class Begin(NamedTuple):
    """The message that calls a learner to the first meeting: a file or an address, and by what
    they meet there (`join_team`). The parent decides: a learner may see other GPUs than it does."""

    place: str
    own_gpus: bool


@dataclass
class Team:
    """Which of `size` learners this process is; a replay is all of them, and meets nobody."""

    ranks: tuple = (0,)
    size: int = 1
    last: str | None = None  # meeting; None: they have not met at all
    wire: str | None = "cpu"  # the device from which tensors travel; None: their own
    others: list = field(default_factory=list)  # rank 0: what sends messages to each
    seconds: float = 0.0  # in meetings so far, waiting included

    @property
    def apart(self) -> bool:
        """Whether there are others, in other processes."""
        return len(self.ranks) < self.size


@contextmanager
def meeting(team: Team, version: int, name: str):
    """One of ORDER; AssertionError for one that is out of it, which would wait for ever. Parted:
    what goes wrong inside is said with rank, version and meeting."""
    allowed = ORDER[team.last]
    where = f"learner {team.ranks[0]} of {team.size}, version {version}"
    assert name in allowed, f"{where}: {name} after {team.last!r}, must be one of {allowed}"
    team.last, begin = name, time.monotonic()
    try:
        yield
    except RuntimeError as error:
        reason = str(error).splitlines()[0]
        raise Parted(f"{where}, {name}: the others did not come ({reason})") from error
    team.seconds += time.monotonic() - begin


def join_team(team: Team, place: str, own_gpus: bool, limit: float) -> None:
    """Meet the others at a place that all know; Parted: one did not come. limit: the seconds that a
    meeting may take.

    NCCL where every learner has a GPU of its own; else gloo, through the memory of the CPU.
    """
    os.environ["TORCH_NCCL_BLOCKING_WAIT"] = "1"  # its time limit is an error, not the end
    backend, team.wire = ("nccl", None) if own_gpus else ("gloo", "cpu")
    # torch names a group by how many there were: after one that failed, no newcomer would find it
    dist.distributed_c10d._world.group_count = 0
    atexit.register(leave_team, team)  # threads of gloo that outlive Python can abort the process
    with meeting(team, 0, "the first meeting"):
        seconds = timedelta(seconds=limit)
        dist.init_process_group(backend, place, seconds, team.size, team.ranks[0])


def leave_team(team: Team) -> None:
    """The end of all meetings."""
    if dist.is_initialized():
        dist.destroy_process_group()
    team.last = None


def slice_of(weights: nn.Parameter, rank: int, size: int) -> nn.Parameter:
    """A learner's slice of the weights [P], with its gradient, in the same memory."""
    own = nn.Parameter(weights.detach().tensor_split(size)[rank])
    own.grad = weights.grad.tensor_split(size)[rank]
    return own


def share_state(team: Team, version: int, facts: list, tensors: list, own: Tensor, whole) -> tuple:
    """Give rank 0's plain data and tensors to all, the tensors in place. Returns the data and the
    learner's own slice [k, n] of the moments `whole` [k, P]; others than rank 0 give None."""
    with meeting(team, version, "state"):
        dist.broadcast_object_list(facts, 0)
        for tensor in tensors:
            broadcast(team, tensor, 0)
        if team.ranks != (0,):
            found = own.to(team.wire)
            dist.recv(found, 0)
            return facts[0], found
        whole = whole.to(own.device if team.wire is None else team.wire)
        first, *others = (part.contiguous() for part in whole.tensor_split(team.size, dim=1))
        for rank, part in enumerate(others, start=1):
            dist.send(part, rank)
        return facts[0], first


def broadcast(team: Team, tensor: Tensor, rank: int) -> None:
    """The tensor of one rank reaches all others, in place; inside a meeting."""
    sent = tensor.to(team.wire)  # the same memory, if it is there already
    dist.broadcast(sent, rank)
    tensor.copy_(sent)


def add_gradients(team: Team, version: int, gradient: Tensor) -> None:
    """Sum the gradients [P] of all learners; afterwards a learner's own slice holds the sum.

    It is a reduce-scatter, written as an exchange of slices and a sum in the order of ranks.
    """
    own, sent = gradient.tensor_split(team.size)[team.ranks[0]], gradient.to(team.wire)
    found = sent.new_empty(team.size, len(own))
    with meeting(team, version, "gradients"):
        sizes = [len(own)] * team.size, [len(part) for part in sent.tensor_split(team.size)]
        dist.all_to_all_single(found.view(-1), sent, *sizes)
    own.zero_()
    for other in found:
        own += other.to(own.device)


def share_facts(team: Team, version: int, *facts: list) -> tuple:
    """Lists of plain data: those of all learners end to end, by rank."""
    shares = [None] * team.size
    with meeting(team, version, "facts"):
        dist.all_gather_object(shares, facts)
    return tuple(sum(own, []) for own in zip(*shares, strict=True))


def share_weights(team: Team, version: int, weights: Tensor) -> None:
    """Every learner's slice of the weights [P] goes to all others."""
    with meeting(team, version, "weights"):
        for rank, part in enumerate(weights.tensor_split(team.size)):
            broadcast(team, part, rank)


def gather_moments(team: Team, version: int, own: Tensor, total: int) -> Tensor | None:
    """The moments of all slices, [k, total], at rank 0; `own` are those of one, [k, n]."""
    sent = own.to(team.wire)
    whole = sent.new_empty(len(own), total)
    parts = [part.contiguous() for part in whole.tensor_split(team.size, dim=1)]
    parts[team.ranks[0]] = sent
    with meeting(team, version, "moments"):
        if team.ranks != (0,):
            dist.send(sent, 0)
            return None
        for rank, part in enumerate(parts[1:], start=1):
            dist.recv(part, rank)
    return torch.cat(parts, dim=1)
