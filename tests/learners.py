"""A team of learners, each in a process, that trains on the batches in a file.

`python tests/learners.py RANK LEARNERS FOLDER FIRST LAST ADVANTAGE`: see tests/test_team.py.
"""

import atexit
import copy
import dataclasses
import os
import sys
from pathlib import Path

import torch
import torch.distributed as dist

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from learner import learner_step, make_learner, new_groups  # noqa: E402
from reward import task_of, verify_group  # noqa: E402
from rollout import generate, make_generator  # noqa: E402
from runtime.checkpoint import (  # noqa: E402
    completed_groups,
    restore,
    share,
    state_of,
    whole_moments,
)
from runtime.config import Config  # noqa: E402
from runtime.ledger import Ledger  # noqa: E402
from runtime.messages import apply_verdicts  # noqa: E402
from runtime.models import make_model  # noqa: E402
from runtime.runlog import LOGS  # noqa: E402
from runtime.team import join_team  # noqa: E402


def config_of(size: int = 1, advantage: str = "grpo") -> Config:
    """Small micro-batches, so that there are some for everybody."""
    small = {"token_budget": 48, "steps": 20, "groups_per_step": 4, "group_size": 8}
    return dataclasses.replace(Config(), learners=size, advantage=advantage, **small)


def scored_batches(config: Config, count: int) -> list:
    """The groups of so many steps of a run on policy."""
    task = task_of(config)
    learner = make_learner(config, task, make_model(config, task))
    generator, found = make_generator(config, task, copy.deepcopy(learner.model)), []
    for version in range(count):
        generator.set_weights(version, learner.model.flat)
        groups = generate(generator, new_groups(learner, task, config.groups_per_step))
        for group in groups:
            apply_verdicts(group, verify_group(group, task, config))
        learner_step(learner, groups, config)
        found += groups
    return found


def train(rank: int, size: int, folder: Path, first: int, last: int, advantage: str) -> None:
    """Go on from the state at version `first` to version `last`; rank 0 writes what is then."""
    torch.set_num_threads(1)
    config = config_of(size, advantage)
    task = task_of(config)
    learner = make_learner(config, task, make_model(config, task), (rank,))
    state = None
    if rank == 0:  # the others get what it has
        state = state_of(learner, whole_moments(learner))
        if first:
            state = torch.load(folder / f"state{first}.pt")
            restore(learner, state, config, Ledger())
    if size > 1:
        join_team(learner.team, f"file://{folder}/meeting{first}-{size}", False, limit=60.0)
        share(learner, state)
    B, groups = config.groups_per_step, completed_groups(torch.load(folder / "batches.pt"))
    for step in range(first, last):
        metrics = learner_step(learner, groups[step * B : (step + 1) * B], config)
    assert metrics["micro_batches"] > 4, metrics
    if rank == 0 and size > 1:
        sent = [[] for _ in range(size - 1)]
        learner.team.others = [own.append for own in sent]
    state = state_of(learner, whole_moments(learner) or {})
    if rank == 0:
        assert size == 1 or all(len(own) == 1 for own in sent)
        state |= {"seconds": 0.0, "marks": dict.fromkeys(LOGS, (0, 0))}
        torch.save(state, folder / f"state{last}.pt")


def has_left() -> None:
    """When Python ends: a team that still is one can abort its process (pytorch PR 179291)."""
    if dist.is_initialized():
        os._exit(3)


if __name__ == "__main__":
    atexit.register(has_left)  # what is registered later comes first
    rank, size, folder, first, last, advantage = sys.argv[1:]
    train(int(rank), int(size), Path(folder), int(first), int(last), advantage)
