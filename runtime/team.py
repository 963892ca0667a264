"""team.py: what several learners do together.

Every learner has all weights and AdamW's moments, and the gradient of its own micro-batches. In a
step of all of them:

    add_gradients   every learner gets the sum of all gradients, in the order of ranks
    share_facts     every learner hears what the others have seen: losses, diagnostics, lessons

Then each makes the same step with the same numbers. Rank 0 is the parent. It sends the others the
state with which they begin, and every batch. One that keeps the others waiting for too long ends
the attempt (AttemptLost): the parent starts itself again from a checkpoint (terminal.py).
Sums are in the order of ranks, so a run and its replay, which is all learners in one process, agree
bitwise.
"""

import atexit
import os
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import NamedTuple

import torch.distributed as dist
from torch import Tensor

from runtime.config import AttemptLost


class Begin(NamedTuple):
    """The message that brings a learner into the team."""

    address: str  # a file or a port, by which they find each other
    own_gpus: bool
    seconds: float  # that learners wait for one of them


@dataclass
class Team:
    """Which of `size` learners this process is; a replay is all of them, and meets nobody."""

    ranks: tuple = (0,)
    size: int = 1
    wire: str | None = "cpu"  # the device from which tensors travel; None: their own

    @property
    def apart(self) -> bool:
        """Whether there are others, in other processes."""
        return len(self.ranks) < self.size


@contextmanager
def together(team: Team, name: str):
    """What goes wrong inside ends the attempt: AttemptLost, with rank and name."""
    try:
        yield
    except RuntimeError as error:
        reason = str(error).splitlines()[0]
        raise AttemptLost(f"learner {team.ranks[0]}, {name}: not all came ({reason})") from error


def join_team(team: Team, begin: Begin) -> None:
    """Meet the others. NCCL where every learner has a GPU of its own; else gloo, through the memory
    of the CPU."""
    os.environ["TORCH_NCCL_BLOCKING_WAIT"] = "1"  # its time limit is an error, not the end
    backend, team.wire = ("nccl", None) if begin.own_gpus else ("gloo", "cpu")
    atexit.register(leave_team)  # threads of gloo that outlive Python can abort the process
    with together(team, "the first meeting"):
        limit = timedelta(seconds=begin.seconds)
        dist.init_process_group(backend, begin.address, limit, team.size, team.ranks[0])


def leave_team() -> None:
    """The end of all meetings."""
    if dist.is_initialized():
        dist.destroy_process_group()


def add_gradients(team: Team, total: Tensor, gradients: list[Tensor]) -> None:
    """Fill `total` [P] with the sum of all learners' gradients; gradients: of each learner that
    this process is. Each gets those of all, and adds them up in the order of ranks."""
    if team.size == 1:
        return  # it is the total
    if team.apart:
        sent = gradients[0].to(team.wire)
        gradients = [*sent.new_empty(team.size, len(sent))]
        with together(team, "gradients"):
            dist.all_gather(gradients, sent)
    total.zero_()
    for gradient in gradients:
        total += gradient.to(total.device)


def share_facts(team: Team, facts: list) -> list:
    """Lists of plain data and tensors of the CPU: those of all learners end to end, by rank."""
    if not team.apart:
        return facts
    shares = [None] * team.size
    with together(team, "facts"):
        dist.all_gather_object(shares, facts)
    return sum(shares, [])
