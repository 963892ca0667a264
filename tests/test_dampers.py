"""Dampers: a step that is made smaller, or turned, when its data are stale."""

import copy
import math

import pytest
import torch

from methods import dampers
from methods.dampers import DAMPERS, brake, gac, kl
from runtime import config as config_room
from runtime.config import Config

CONFIG = Config(kl_threshold=0.15)


def test_every_damper_is_offered():
    assert tuple(DAMPERS) == config_room.DAMPERS and Config().damper == "kl"


@pytest.mark.parametrize("name", DAMPERS)
def test_at_the_first_step_nothing_is_bent(name):
    gradient, metrics = torch.randn(50), {"ess_whole": 0.25}
    damped, scale = DAMPERS[name](gradient, {}, metrics, CONFIG)
    torch.testing.assert_close(damped, gradient, rtol=0, atol=0)
    assert scale == (0.5 if name == "ess" else 1.0), "ess takes the root, the others do not look"


@pytest.mark.parametrize("turn", [-0.9, -0.05, 0.05, 0.4, 5.0])
def test_gac_leaves_that_much_likeness_and_no_more(turn):
    other, own = torch.randn(2, 1000, generator=torch.Generator().manual_seed(2)).double()
    across = own - (own @ other) / (other @ other) * other  # at a right angle
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


def test_the_memory_goes_on_from_a_checkpoint():
    draw = torch.Generator().manual_seed(1)
    for damper in (gac, brake):
        memory, results = {}, []
        for gradient in torch.randn(3, 40, generator=draw):
            restored = copy.deepcopy(memory)
            results = [damper(gradient, m, {}, CONFIG)[0] for m in (memory, restored)]
        assert torch.equal(*results)


# ---- the KL window ----


def observed(values, memory=None, threshold=0.15) -> dict:
    memory = {} if memory is None else memory
    for value in values:
        kl(None, memory, {"kl_reference": value}, Config(kl_threshold=threshold))
    return memory


def scales(memory: dict, threshold=0.15) -> tuple:
    _, scale = kl(None, memory, {}, Config(kl_threshold=threshold))
    return scale, memory["reference_factor"]


OFF, ON = (1.0, 1.0), (0.6, 2.0)


def test_the_threshold_is_strict_and_not_moved_by_rounding():
    assert scales({}) == OFF, "nothing observed, nothing to damp"
    exactly = observed([0.15] * 1000)  # a running float sum of them exceeds 150
    assert scales(exactly) == OFF
    assert scales(observed([0.1501], exactly)) == ON
    assert scales(observed([0.1501])) == ON, "the mean of the values kept so far"
    assert scales(observed([0.9, 1.0], threshold=1.0), 1.0) == OFF


def test_the_mean_counts_and_not_the_last_value():
    assert scales(observed([0.0] * 9 + [1.0])) == OFF
    assert scales(observed([1.0] * 9 + [0.0])) == ON


def test_a_value_is_forgotten_after_a_thousand_others():
    memory = observed([0.2] * 1000)
    assert scales(memory) == ON
    assert scales(observed([0.0] * 249, memory)) == ON
    assert scales(observed([0.0], memory)) == OFF  # 750 of 1000 are left: the mean is 0.15 again
    observed([0.0] * 750, memory)
    assert dampers.window_mean(memory) == 0.0 and len(memory["window"]) == 1000


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_what_is_not_a_number_is_refused(value):
    with pytest.raises(AssertionError, match=str(value)):
        observed([value])
