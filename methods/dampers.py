"""methods/dampers.py: what becomes of a step as a whole when its data are stale.

Stale gradients point where the policy was. `--damper` names one of DAMPERS:

    kl      a smaller learning rate while the policy is far from its reference
    ess     a smaller learning rate when few samples carry the weight of all
    gac     of a gradient like the one before, the part that repeats is taken out
    brake   a shorter gradient when it points where the last ones went
    none    nothing

Each is a function of the gradient of the step [P], what it remembers (a dict that is saved with the
run), the step's metrics and the configuration. It returns the gradient to step with, and a factor
on the learning rate. Several learners all have the whole gradient, and the same memory.

Axes: P parameters
"""

import math

import torch
from torch import Tensor

from runtime.config import Config

WINDOW = 1000  # kl: so many values are kept, one of every `reference_every` steps
LR_FACTOR = 0.6  # kl: on the learning rate, while their mean is above the threshold
REFERENCE_FACTOR = 2.0  # kl: on the weight of the reference, meanwhile
LIKENESS = 0.1  # gac: so much of |g| may lie along the last one; the abstract gives no number
BRAKING = 0.5  # brake: rho of the paper; beyond 1 a gradient could be turned round
MOMENTUM = 0.7  # brake: of the gradients before; AdamW's here


def kl(gradient: Tensor, memory: dict, metrics: dict, config: Config) -> tuple:
    """ "Divergence-Suppressed Alignment": while the mean of the last KL values is above
    `--kl-threshold`, learn more slowly and hold on to the reference more.

    Window, 0.15 and 0.6 come from secondary articles, no primary source is known, and none says by
    how much the reference term is raised: doubling is this project's choice. AssertionError for a
    value that is not finite: one NaN would switch the window off for the next 1000 values.
    """
    window = memory.setdefault("window", [])
    if "kl_reference" in metrics:
        assert math.isfinite(value := metrics["kl_reference"]), f"the KL value is {value}"
        window.append(value)
        del window[:-WINDOW]
    above = window_mean(memory) > config.kl_threshold
    memory["reference_factor"] = REFERENCE_FACTOR if above else 1.0
    return gradient, LR_FACTOR if above else 1.0


def window_mean(memory: dict) -> float:
    """Mean of the KL values that are kept (0 before the first), summed without rounding."""
    window = memory.get("window", [])
    return math.fsum(window) / max(1, len(window))


def ess(gradient: Tensor, memory: dict, metrics: dict, config: Config) -> tuple:
    """The root of the effective sample size of the answers, as a share of their number, scales the
    learning rate (VCPO, arXiv 2602.17616: the root for optimizers like AdamW). With --entropy 0
    answers with advantage 0 mostly do not count."""
    return gradient, math.sqrt(metrics["ess_whole"])


def gac(gradient: Tensor, memory: dict, metrics: dict, config: Config) -> tuple:
    """What is more than LIKENESS along the last gradient is taken out (GAC, arXiv 2603.01501)."""
    previous = memory.get("previous", torch.zeros_like(gradient))
    memory["previous"] = gradient.clone()
    cosine = cosine_of(gradient, previous, memory)
    along = gradient.norm() * previous / previous.norm().clamp_min(1e-30)  # as long as g
    return gradient - (cosine - LIKENESS).clamp_min(0) * along, 1.0


def brake(gradient: Tensor, memory: dict, metrics: dict, config: Config) -> tuple:
    """Adaptive braking (arXiv 2007.01397): g (1 - rho cos(g, v)); longer where they disagree."""
    velocity = memory.setdefault("velocity", torch.zeros_like(gradient))
    damped = gradient * (1 - BRAKING * cosine_of(gradient, velocity, memory))
    velocity.lerp_(damped, 1 - MOMENTUM)
    return damped, 1.0


def cosine_of(gradient: Tensor, other: Tensor, memory: dict) -> Tensor:
    """The cosine of two vectors; it is remembered for the step's metrics."""
    cosine = torch.cosine_similarity(gradient, other, dim=0)
    memory["cosine"] = float(cosine)
    return cosine


def none(gradient: Tensor, memory: dict, metrics: dict, config: Config) -> tuple:
    """Every step is taken as it is."""
    return gradient, 1.0


DAMPERS = {"kl": kl, "ess": ess, "gac": gac, "brake": brake, "none": none}
