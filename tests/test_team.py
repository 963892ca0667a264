"""Several learners do what one does, each with a slice of the optimizer; any number goes on."""

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from learners import config_of, scored_batches

from buffer import deal
from learner import learner_step, make_learner
from reward import task_of
from runtime.checkpoint import completed_groups, to_tensors
from runtime.models import make_model
from runtime.team import Team, meeting

PROGRAM = Path(__file__).parent / "learners.py"


@pytest.fixture(scope="module")
def batches(tmp_path_factory):
    """A folder with 20 batches of scored groups, of 20 versions of the policy."""
    folder = tmp_path_factory.mktemp("batches")
    config = config_of()
    groups = scored_batches(config, 20)
    parts = [to_tensors(group) for group in groups]
    torch.save({"completed": parts}, folder / "batches.pt")
    return folder


def train(batches: Path, folder: Path, plan: list, advantage: str = "grpo") -> dict:
    """(learners, last version) after (learners, last version); returns the state at the end."""
    folder.mkdir()
    (folder / "batches.pt").symlink_to(batches / "batches.pt")
    first = 0
    for size, last in plan:
        team = []
        for rank in range(size):
            arguments = [rank, size, folder, first, last, advantage]
            team.append(subprocess.Popen([sys.executable, PROGRAM, *map(str, arguments)]))
        assert [process.wait(120) for process in team] == [0] * size
        first = last
    return torch.load(folder / f"state{first}.pt")


def difference(a: torch.Tensor, b: torch.Tensor) -> float:
    return float((a - b).norm() / b.norm())


def test_two_and_four_learners_end_at_the_weights_of_one(batches, tmp_path):
    one = train(batches, tmp_path / "1", [(1, 20)])
    for size in (2, 4):
        several = train(batches, tmp_path / str(size), [(size, 20)])
        print(size, difference(several["weights"], one["weights"]))
        assert difference(several["weights"], one["weights"]) < 1e-6
        for name in ("exp_avg", "exp_avg_sq"):
            assert difference(several["optimizer"][name], one["optimizer"][name]) < 1e-4
    changing = train(batches, tmp_path / "x", [(1, 5), (2, 10), (4, 15), (1, 20)])
    print("1 2 4 1", difference(changing["weights"], one["weights"]))
    assert difference(changing["weights"], one["weights"]) < 1e-6


@pytest.mark.parametrize("size, advantage", [(3, "grpo"), (2, "gae")])
def test_one_process_plays_them_all(batches, tmp_path, size, advantage):
    """Bitwise, and with a critic: so a run of several learners can be replayed."""
    several = train(batches, tmp_path / "run", [(size, 6)], advantage)
    config = config_of(size, advantage)
    task = task_of(config)
    learner = make_learner(config, task, make_model(config, task), tuple(range(size)))
    groups = completed_groups(torch.load(batches / "batches.pt"))
    for step in range(6):
        batch = groups[step * config.groups_per_step : (step + 1) * config.groups_per_step]
        learner_step(learner, batch, config)
    assert torch.equal(learner.weights.detach(), several["weights"])


def test_optimizer_memory_is_divided():
    config = config_of(4)
    task = task_of(config)
    model = make_model(config, task)
    sizes = [len(make_learner(config, task, model, (rank,)).slices[0][0]) for rank in range(4)]
    assert sum(sizes) == len(model.flat) and max(sizes) - min(sizes) <= 1


def test_a_meeting_out_of_order_is_named_and_not_waited_for():
    team = Team((1,), 2, last="gradients")
    with pytest.raises(
        AssertionError, match="learner 1 of 2, version 7: weights after 'gradients'"
    ):
        with meeting(team, 7, "weights"):
            pass
    with meeting(team, 7, "facts"):
        pass
    assert team.last == "facts"


def test_shares_cost_about_the_same():
    random = np.random.default_rng(0)
    lengths = (5 * random.pareto(1.3, 200)).clip(1, 60).astype(int).tolist()
    batches = [[i] for i in range(200)]
    shares = deal(batches, lengths, 4, linear=100.0)
    assert sorted(sum(shares, [])) == batches  # each once, in order
    costs = [sum(n + n * n / 100 for (i,) in share for n in [lengths[i]]) for share in shares]
    assert max(costs) < 1.02 * np.mean(costs)
    by_count = [sum(n + n * n / 100 for n in lengths[rank::4]) for rank in range(4)]
    assert max(by_count) > 1.1 * np.mean(by_count)
