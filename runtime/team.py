"""team.py: what the learners of a run do together, and in which order.

Every learner has all weights, and the whole gradient of its own micro-batches. AdamW's moments it
has for its slice of the weights only (ZeRO-1, arXiv 1910.02054), so L learners need 1/L of that
memory each. A step of all of them:

    gradients   every learner gets its slice of every gradient, and adds them up
    facts       every learner hears what the others have seen: diagnostics, norms of slices
    weights     every learner gives its slice of the new weights to the others

and between two steps, for a checkpoint:

    moments     every learner gives its moments to rank 0, which alone writes

Two processes that meet in different orders wait for each other for ever. So the order is one rule,
ORDER, and `Team` asserts it before every meeting. Every meeting has a time limit, and its error
names rank, version and meeting.
Sums are in the order of ranks, so a run and its replay agree bitwise.
Left out: which micro-batches a learner has (learner.py); messages between parent and workers.
"""

from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor, nn

from runtime.config import TrainingStopped

MOMENTS = ("exp_avg", "exp_avg_sq")  # of AdamW, for each weight
CALL = "moments"  # the message that calls a learner to that meeting
LIMIT_SECONDS = 60.0  # of a meeting
ORDER = {  # what may follow
    "": ("gradients", "moments"),  # all have come
    "gradients": ("facts",),
    "facts": ("weights", "gradients", "moments"),  # a step that is not finite changes no weights
    "weights": ("gradients", "moments"),
    "moments": ("gradients", "moments"),
}


@dataclass
class Team:
    """Which of `size` learners this process is; a replay is all of them, and meets nobody."""

    ranks: tuple = (0,)
    size: int = 1
    last: str | None = None  # meeting; None: they have not met at all
    others: list = field(default_factory=list)  # rank 0: where messages to them are put

    @property
    def apart(self) -> bool:
        """Whether there are others, in other processes."""
        return len(self.ranks) < self.size


@contextmanager
def named(team: Team, version: int, name: str):
    """What goes wrong inside is said with rank, version and meeting."""
    try:
        yield
    except RuntimeError as error:
        where, reason = f"learner {team.ranks[0]} of {team.size}", str(error).splitlines()[0]
        text = f"{where}, version {version}, {name}: the others did not come ({reason})"
        raise TrainingStopped(text) from error


@contextmanager
def meeting(team: Team, version: int, name: str):
    """One of ORDER; AssertionError for one that is out of it, which would wait for ever."""
    allowed = ORDER.get(team.last, ())
    where = f"learner {team.ranks[0]} of {team.size}, version {version}"
    assert name in allowed, f"{where}: {name} after {team.last!r}, must be one of {allowed}"
    team.last = name
    with named(team, version, name):
        yield


def join_team(team: Team, place: str, own_gpus: bool) -> None:
    """Meet the others, by a file or an address that all know. TrainingStopped: one did not come.

    NCCL where every learner has a GPU of its own, else gloo.
    """
    backend, limit = "nccl" if own_gpus else "gloo", timedelta(seconds=LIMIT_SECONDS)
    with named(team, 0, "the first meeting"):
        dist.init_process_group(backend, place, limit, team.size, team.ranks[0])
    team.last = ""


def leave_team(team: Team) -> None:
    """The end of all meetings."""
    if team.last is not None:
        dist.destroy_process_group()
        team.last = None


def slice_of(weights: nn.Parameter, rank: int, size: int) -> nn.Parameter:
    """A learner's slice of the weights [P], with its gradient, in the same memory."""
    own = nn.Parameter(weights.detach().tensor_split(size)[rank])
    own.grad = weights.grad.tensor_split(size)[rank]
    return own


def add_gradients(team: Team, version: int, gradient: Tensor) -> None:
    """Sum the gradients [P] of all learners; afterwards a learner's own slice holds the sum.

    It is a reduce-scatter, written as an exchange of slices and a sum in the order of ranks.
    """
    parts = gradient.tensor_split(team.size)
    own = parts[team.ranks[0]]
    found = own.new_empty(team.size, len(own))
    with meeting(team, version, "gradients"):
        sizes = [len(own)] * team.size, [len(part) for part in parts]
        dist.all_to_all_single(found.view(-1), gradient, *sizes)
    own.zero_()
    for other in found:
        own += other


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
            dist.broadcast(part, rank)


def gather_moments(team: Team, version: int, own: Tensor, total: int) -> Tensor | None:
    """The moments of all slices, [2, total], at rank 0; `own` are those of one, [2, n]."""
    parts = [part.contiguous() for part in own.new_empty(2, total).tensor_split(team.size, dim=1)]
    parts[team.ranks[0]] = own
    with meeting(team, version, "moments"):
        if team.ranks != (0,):
            dist.send(own, 0)
            return None
        for rank, part in enumerate(parts[1:], start=1):
            dist.recv(part, rank)
    return torch.cat(parts, dim=1)
