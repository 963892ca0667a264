"""What stale data are worth: the race of methods (lab/stale.py)."""

import json

import numpy as np
import pytest

import train_sync
from lab import stale
from learner import learner_step
from runtime.config import Config

FLAGS = {"task": "reverse:2", "groups_per_step": 4, "group_size": 4, "slots": 16, "steps": 50}
FLAGS |= {"eval_every": 1000, "lr": 3e-3}


@pytest.mark.parametrize("lag", [0, 3])
def test_data_are_exactly_so_old(lag, monkeypatch):
    ages, steps = [], []
    real = learner_step

    def seen(learner, groups, config):
        for group in groups:
            for t in group.trajectories:
                ages.append(
                    (learner.version, set((learner.version - t.versions[t.loss_mask]).tolist()))
                )
        steps.append(real(learner, groups, config))
        return steps[-1]

    monkeypatch.setattr(stale, "learner_step", seen)
    exams = iter(range(100))
    monkeypatch.setattr(stale, "held_out", lambda *_: next(exams))
    small = {"task": "reverse:2", "groups_per_step": 2, "group_size": 2, "slots": 4, "steps": 6}
    result = stale.lagged_run(lag=lag, **small)
    assert {(version, *age) for version, age in ages} == {(v, min(v, lag)) for v in range(6)}
    assert result == {"final": 5, "area": 2.5} and len(steps) == 6
    assert (np.mean([row["ess_whole"] for row in steps]) > 1 - 1e-6) == (lag == 0)


def test_without_lag_it_is_the_synchronous_trainer(tmp_path, monkeypatch):
    small = FLAGS | {"steps": 4, "damper": "kl", "kl_threshold": 1.0}
    train_sync.train(Config(**small, out=str(tmp_path / "run")))
    rows = [json.loads(x) for x in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    norms = [row["grad_norm"] for row in rows if "grad_norm" in row]
    found = []

    def seen(*arguments):
        found.append(learner_step(*arguments))

    monkeypatch.setattr(stale, "learner_step", seen)
    stale.lagged_run(**small)
    assert [row["grad_norm"] for row in found] == pytest.approx(norms, rel=1e-12)


def made_up(gain: float, noise: float) -> list[dict]:
    """Runs in which "cispo" is so much better than "reinforce"."""
    random, rows = np.random.default_rng(0), []
    for task in stale.TASKS:
        for seed in range(5):
            for arm in ("reinforce", "cispo"):
                area = 0.5 + gain * (arm == "cispo") + noise * random.standard_normal()
                row = {"arm": arm, "task": task, "seed": seed, "area": area, "flags": {}}
                rows += [row | {"condition": name} for name in stale.CONDITIONS]
    return rows


def test_fresh_seeds_decide_where_there_are_any():
    """What was seen in the first five is not counted once more."""
    runs = made_up(0.3, 0.01)
    for row in list(runs):
        for fresh in (10, 15):
            area = (
                0.5
                + 0.001 * row["seed"]
                + (0.01 if fresh == 10 else -0.01) * (row["arm"] == "cispo")
            )
            runs.append(row | {"seed": row["seed"] + fresh, "area": area})
    word, mean, *_ = stale.compared(runs, "cispo")
    assert word == "cannot be told" and mean == pytest.approx(0.0, abs=1e-9)
    assert stale.compared(made_up(0.3, 0.01), "cispo")[0] == "helps"


@pytest.mark.parametrize(
    "gain, noise, word",
    [(0.2, 0.01, "helps"), (-0.2, 0.01, "hurts"), (0.01, 0.1, "cannot be told")],
)
def test_a_verdict_is_what_the_numbers_allow(gain, noise, word):
    runs = made_up(gain, noise)
    said, mean, low, high = stale.compared(runs, "cispo")
    assert low < mean < high and said == word
    lines = stale.method_lines({"runs": runs})
    assert any(line.startswith("| cispo") and word in line for line in lines)
