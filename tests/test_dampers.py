"""Dampers: a step that is made smaller, or turned, when its data are stale."""

import json
import math
from dataclasses import asdict, replace

import pytest
import torch

import dampers
from dampers import Damper, observe
from runtime.config import DAMPERS, Config

NAN = float("nan")


# ---- gradients in slices against vectors ----


def slices(kind, gradient, other, parts):
    """The damped gradient, computed by so many learners with a slice each; and what is said."""
    pieces = []
    for own, beside in zip(gradient.tensor_split(parts), other.tensor_split(parts), strict=True):
        pieces.append((own.clone(), {"exp_avg": beside.clone(), "previous": beside.clone()}))
    whole = dampers.together([dampers.look(kind, *piece) for piece in pieces])
    a, b, cosine, norm = dampers.damped_gradient(kind, whole)
    for own, remembered in pieces:
        dampers.apply_bend(kind, own, remembered, a, b)
    return torch.cat([own for own, _ in pieces]), cosine, norm, [kept for _, kept in pieces]


@pytest.mark.parametrize("kind", ["gac", "brake"])
@pytest.mark.parametrize("parts", [1, 3])
@pytest.mark.parametrize("turn", [-0.9, -0.05, 0.05, 0.4, 5.0])
def test_slices_bend_as_the_whole_vector_does(kind, parts, turn):
    draw = torch.Generator().manual_seed(1)
    other, own = torch.randn(2, 1000, generator=draw, dtype=torch.float64)
    gradient = own + turn * other
    naive = {"gac": dampers.naive_gac, "brake": dampers.naive_brake}[kind]
    found, cosine, norm, kept = slices(kind, gradient, other, parts)
    torch.testing.assert_close(found, naive(gradient, other), rtol=1e-9, atol=1e-12)
    assert cosine == pytest.approx(float(torch.cosine_similarity(gradient, other, dim=0)))
    assert norm == pytest.approx(float(found.norm()), rel=1e-9)
    if kind == "gac":
        last = torch.cat([remembered["previous"] for remembered in kept])
        assert torch.equal(last, gradient), "the next step is compared with the gradient as it was"


def test_gac_leaves_that_much_likeness_and_no_more():
    draw = torch.Generator().manual_seed(2)
    other, own = torch.randn(2, 1000, generator=draw, dtype=torch.float64)
    gradient = own - (own @ other) / (other @ other) * other  # at a right angle
    for turn, left in [(3.0, None), (0.0, gradient)]:
        bent = dampers.naive_gac(gradient + turn * other, other)
        across = bent - (bent @ other) / (other @ other) * other
        torch.testing.assert_close(across, gradient), "what does not repeat must stay"
        along = float(bent @ other / (gradient + turn * other).norm() / other.norm())
        assert along == pytest.approx(dampers.LIKENESS if left is None else 0.0, abs=1e-9)


def test_brake_is_between_half_and_one_and_a_half():
    gradient = torch.tensor([3.0, 4.0])
    for other, factor in [(gradient, 0.5), (-gradient, 1.5), (torch.tensor([4.0, -3.0]), 1.0)]:
        torch.testing.assert_close(dampers.naive_brake(gradient, other), factor * gradient)


@pytest.mark.parametrize("kind", DAMPERS)
def test_at_the_first_step_nothing_is_bent(kind):
    gradient = torch.randn(50)
    found, cosine, norm, _ = slices(kind, gradient, torch.zeros(50), 2)
    assert torch.equal(found, gradient) and cosine == 0.0
    assert norm == pytest.approx(float(gradient.norm()))


@pytest.mark.parametrize("kind", ["kl", "ess", "none"])
def test_the_others_leave_the_gradient_alone(kind):
    gradient, other = torch.randn(2, 50)
    found, *_ = slices(kind, gradient, other, 2)
    assert torch.equal(found, gradient)


# ---- the learning rate ----


def test_ess_takes_the_root_and_the_others_do_not_look():
    full = Damper(window=(4.0,) * 10)
    for kind, factor in {"ess": 0.5, "kl": 0.6, "none": 1.0, "gac": 1.0, "brake": 1.0}.items():
        threshold = Damper().threshold if kind == "kl" else math.inf  # as make_learner sets it
        own = replace(full, threshold=threshold)
        assert dampers.step_scale(kind, own, {"ess_whole": 0.25}) == factor, kind


def test_every_damper_is_offered():
    assert set(DAMPERS) == {"kl", "ess", "none", *dampers.BESIDE}
    assert Config().damper == "kl"


# ---- the KL window ----


def observed(values, damper=None):
    damper = Damper() if damper is None else damper
    for value in values:
        damper = observe(damper, value)
    return damper


def scales(damper):
    return dampers.lr_scale(damper), dampers.reference_scale(damper)


OFF, ON = (1.0, 1.0), (0.6, 2.0)


def test_damper_threshold_is_strict_and_not_moved_by_rounding():
    assert scales(Damper()) == OFF, "nothing observed, nothing to damp"
    # A running float sum of a thousand 0.15 exceeds 150.
    exactly = observed([0.15] * 1000)
    assert scales(exactly) == OFF
    assert scales(observe(exactly, 0.1501)) == ON
    assert scales(observed([0.1501])) == ON, "the mean of the values kept so far"


def test_damper_judges_the_mean_and_not_the_last_value():
    assert scales(observed([0.0] * 9 + [1.0])) == OFF
    assert scales(observed([1.0] * 9 + [0.0])) == ON


def test_damper_forgets_after_a_thousand_values():
    damper = observed([0.2] * 1000)
    assert scales(damper) == ON
    damper = observed([0.0] * 249, damper)
    assert scales(damper) == ON
    damper = observe(damper, 0.0)  # 750 of 1000 are left: the mean is 0.15 again
    assert scales(damper) == OFF
    damper = observed([0.0] * 750, damper)
    assert dampers.window_mean(damper) == 0.0 and len(damper.window) == 1000
    spike = observed([1e6] + [0.0] * 999)
    assert scales(spike) == ON and scales(observe(spike, 0.0)) == OFF


def test_damper_settings_are_used():
    damper = Damper(threshold=1.0, lr_factor=0.5, reference_factor=3.0, size=2)
    assert scales(observed([0.9, 1.0], damper)) == OFF
    assert scales(observed([9.0, 0.0, 1.1, 1.1], damper)) == (0.5, 3.0)


@pytest.mark.parametrize("value", [NAN, math.inf, -math.inf])
def test_damper_refuses_what_is_not_a_number(value):
    with pytest.raises(AssertionError, match=str(value)):
        observe(Damper(), value)


def test_damper_is_a_value_and_survives_a_checkpoint():
    before = observed([0.1, 0.3], Damper(size=3))
    after = observe(before, torch.tensor(0.5).item())
    assert before.window == (0.1, 0.3) and after.window == (0.1, 0.3, 0.5)
    restored = Damper(**json.loads(json.dumps(asdict(after))))  # the window comes back as a list
    # Resumed and uninterrupted runs stay the same, the forgetting included.
    assert observed([0.7, 0.0], restored) == observed([0.7, 0.0], after)
    assert replace(restored, window=()) == Damper(size=3)
