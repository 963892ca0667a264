"""The simulated pipeline: it schedules as the trainer does, and takes what its costs say."""

import dataclasses

import numpy as np
import pytest

from lab import simulate
from lab.plots import load_result
from lab.simulate import Costs, predict
from lab.tables import tables_of
from runtime.config import Config

RANDOM = np.random.default_rng(0)
GROUPS = [[int(n), *(int(n) + RANDOM.geometric(0.12, 8)).tolist()] for n in range(5, 12)] * 5
KNOWN = Costs(0.001, step=2e-3, step_running=2e-5, prefill=1e-5, score=5e-4, train=8e-3)
KNOWN = dataclasses.replace(KNOWN, train_token=5e-5, publish=1e-3, groups=GROUPS)
TOY = Config(task="toy", steps=24, slots=32, group_size=8, groups_per_step=8, rollout_workers=1)


def run(costs: Costs = KNOWN, **changes) -> tuple:
    return simulate.simulate(dataclasses.replace(TOY, **changes), costs)


@pytest.mark.parametrize("eta", [0, 1, 4])
@pytest.mark.parametrize("workers", [1, 3])
def test_every_group_is_trained_and_none_too_late(eta, workers):
    steps, lengths = run(max_staleness=eta, rollout_workers=workers)
    assert len(steps) == TOY.steps
    trained = [group for step in steps for group in step["groups"]]
    assert sorted(trained) == list(range(TOY.steps * TOY.groups_per_step)) == list(lengths)
    assert max(step["staleness"] for step in steps) <= eta  # Buffer checks the oldest
    for step in steps:
        assert step["tokens"] == sum(sum(lengths[group]) for group in step["groups"])
    ends = [step["begin"] + step["seconds"] for step in steps]
    assert all(end <= step["begin"] for end, step in zip(ends, steps[1:], strict=False))
    assert run(max_staleness=eta, rollout_workers=workers)[0] == steps


def test_a_single_group_takes_what_the_costs_say():
    costs = Costs(0.01, step=1.0, step_running=0.1, prefill=0.5, score=3.0, train=2.0, publish=1.0)
    costs.groups = [[10, 14, 12]]
    steps, _ = run(costs, steps=3, group_size=2, groups_per_step=1, max_staleness=0)
    # the prompt once, two tokens with both, two with one, a verdict
    first = 10 * 0.5 + 2 * 1.2 + 2 * 1.1 + 3.0
    assert steps[0]["begin"] == pytest.approx(first, abs=0.1)
    assert steps[1]["begin"] - steps[0]["begin"] == pytest.approx(first + 2.0 + 1.0, abs=0.1)
    assert steps[1]["generated"] == pytest.approx(2 * (first - 3.0), abs=0.1)


def test_staleness_and_speed_grow_with_eta():
    steps = {"steps": 30}
    found = [
        predict(dataclasses.replace(TOY, max_staleness=eta, **steps), KNOWN) for eta in (0, 1, 4)
    ]
    ages = [facts["staleness"] for facts in found]
    assert ages == sorted(ages) and ages[0] == 0
    assert found[1]["tokens_per_s"] > 1.2 * found[0]["tokens_per_s"]
    assert all(0 < facts["idle"] < 1 for facts in found)


def test_synchronous_devices_generate_or_train():
    config = dataclasses.replace(TOY, max_staleness=0, rollout_workers=4, learners=4)
    alone, together = (predict(config, KNOWN, synchronous) for synchronous in (False, True))
    assert alone["tokens_per_s"] == together["tokens_per_s"]
    assert 1 - together["idle"] == pytest.approx(2 * (1 - alone["idle"]))


def test_dropping_discards_and_goes_on():
    steps, lengths = run(on_stale="drop", max_staleness=1, steps=12)
    assert len(steps) == 12 and len(lengths) >= 12 * TOY.groups_per_step


def test_scale_compares_devices(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(simulate, "PUBLISHED", [("a run", "a paper", 8, 1.5, "about 2x")])
    monkeypatch.setattr(simulate, "language_model", lambda billions: KNOWN)
    monkeypatch.setitem(simulate.SCALE, "groups_per_step", 16)
    simulate.bench_scale(tmp_path)
    (row,) = load_result("scale", tmp_path)["published"]
    assert row["published"] == "about 2x" and 0.5 < row["speed_up"] < 4
    assert any("a run" in line and "about 2x" in line for line in tables_of(tmp_path))
    assert "assumed:" in capsys.readouterr().out


def test_the_best_split_is_the_best_of_all():
    config, tried = dataclasses.replace(TOY, steps=12), []
    for learners in range(1, 8):
        roles = {"rollout_workers": 8 - learners, "learners": learners}
        tried.append(predict(dataclasses.replace(config, **roles), KNOWN)["tokens_per_s"])
    best = simulate.best_split(config, KNOWN, 8)
    assert best["learners"] + best["rollout_workers"] == 8
    assert best["tokens_per_s"] == max(tried)
