"""Dampers: a step that is made smaller, or turned, when its data are stale.

What `kl` does with its window is examined in test_exercises.py.
"""

import json

import numpy as np
import pytest
import torch
from test_methods import FLAGS, stale_batch

import train_sync
from learner import learner_step, micro_batch_loss, tokens_of
from methods import dampers
from methods.dampers import DAMPERS, brake, gac, kl
from runtime import config as config_room
from runtime.config import Config
from runtime.folder import read_lines

CONFIG = Config(kl_threshold=0.15)


@pytest.mark.parametrize("name", DAMPERS)
def test_at_the_first_step_nothing_is_bent(name):
    gradient, metrics = torch.randn(50), {"ess_whole": 0.25}
    damped, scale = DAMPERS[name](gradient, {}, metrics, CONFIG)
    torch.testing.assert_close(damped, gradient, rtol=0, atol=0)
    assert scale == (0.5 if name == "ess" else 1.0), "ess takes the root, the others do not look"
    assert list(DAMPERS) == config_room.DAMPERS and Config().damper == "kl"


@pytest.mark.parametrize("turn", [-0.9, -0.05, 0.05, 0.4, 5.0])
def test_gac_leaves_that_much_likeness_and_no_more(turn):
    other, across = torch.randn(2, 1000, generator=torch.Generator().manual_seed(2)).double()
    across -= (across @ other) / (other @ other) * other  # at a right angle
    gradient, memory = across + turn * other, {"previous": other.clone()}
    damped, _ = gac(gradient, memory, {}, CONFIG)
    cosine = float(torch.cosine_similarity(gradient, other, dim=0))
    assert memory["cosine"] == pytest.approx(cosine)
    along = float(damped @ other / gradient.norm() / other.norm())
    assert along == pytest.approx(min(cosine, dampers.LIKENESS), abs=1e-9)
    torch.testing.assert_close(damped - (damped @ other) / (other @ other) * other, across)
    assert torch.equal(memory["previous"], gradient), "compared next time as it was"


def test_brake_is_between_half_and_one_and_a_half():
    gradient = torch.tensor([3.0, 4.0])
    for other, factor in [(gradient, 0.5), (-gradient, 1.5), (torch.tensor([4.0, -3.0]), 1.0)]:
        memory = {"velocity": other.clone()}
        damped, _ = brake(gradient, memory, {}, CONFIG)
        torch.testing.assert_close(damped, factor * gradient)
        torch.testing.assert_close(memory["velocity"], 0.7 * other + 0.3 * damped)


def test_the_window_is_held_against_the_threshold_of_the_run():
    memory, metrics = {}, {"kl_reference": 0.95}
    assert kl(None, memory, metrics, Config(kl_threshold=1.0))[1] == 1.0
    assert kl(None, memory, {}, CONFIG)[1] == 0.6, "the mean stays, where nothing was measured"
    assert memory == {"window": [0.95], "reference_factor": 2.0}


def test_the_reference_is_held_on_to_more_while_the_window_is_above():
    config, learner, groups = stale_batch(reference_every=1, reference_weight=0.5)
    samples, _ = learner.method.samples(learner, groups, config)
    count = sum(t.generated for t, _ in samples)
    assert tokens_of(learner, samples, torch.zeros(count)).age.tolist() == [3] * count
    losses = []
    for factor in (0.0, 1.0, 2.0):
        learner.damping["reference_factor"] = factor
        loss, parts, _ = micro_batch_loss(learner, samples, True, 100, config)
        losses.append(float(loss.detach()))
    kl = 0.5 * float(parts["kl_reference"].sum()) / 100
    assert np.diff(losses) == pytest.approx([kl, kl], rel=1e-3) and kl > 1e-4


@pytest.mark.parametrize("damper", ["gac", "brake", "ess"])
def test_two_learners_damp_as_one_does(damper):
    """The same batches, by one learner and by two that a replay plays: they bend alike."""
    seen = []
    for ranks in ((0,), (0, 1)):
        config, learner, groups = stale_batch(ranks=ranks, damper=damper, steps=4)
        metrics = learner_step(learner, groups, config)
        seen.append((learner.weights.detach(), metrics["cosine"], metrics["lr"]))
    torch.testing.assert_close(seen[0][0], seen[1][0], rtol=1e-3, atol=1e-4)
    assert seen[0][1:] == pytest.approx(seen[1][1:], rel=1e-3, abs=1e-5)
    assert (seen[0][1] == 0.0) == (damper == "ess")
    full = config.lr * (1 - 4 / config.steps)
    assert seen[0][2] < 0.99 * full if damper == "ess" else seen[0][2] == pytest.approx(full)


@pytest.mark.parametrize("damper", ["gac", "brake"])
def test_a_run_goes_on_bitwise(tmp_path, damper):
    """What the damper remembers is in the checkpoint."""
    flags, run = FLAGS | {"damper": damper, "steps": 4, "checkpoint_every": 2}, tmp_path / "run"
    train_sync.train(Config(**flags, out=str(run)))
    results = [run / name for name in ("summary.json", "metrics.jsonl")]
    whole = json.loads(results[0].read_text()), read_lines(results[1])
    (run / "checkpoints" / "step0000004.pt").unlink()
    train_sync.train(Config(resume=str(run)))
    again = json.loads(results[0].read_text()), read_lines(results[1])
    assert whole[0]["weights_sha256"] == again[0]["weights_sha256"]
    cosines = [[row["cosine"] for row in rows[1:]] for _, rows in (whole, again)]
    assert cosines[0] == cosines[1] and all(cosines[0][1:]), cosines
