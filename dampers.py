"""dampers.py: what becomes of a step when its data are stale: a smaller step, or another direction.

Stale gradients point where the policy was. A damper looks at the step as a whole, after the
objective (losses.py) has weighed its tokens. `--damper` names one of four, or none:

    kl      a smaller learning rate while the policy is far from its reference
    ess     a smaller learning rate when few samples carry the weight of all
    gac     of a gradient like the one before, the part that repeats is taken out
    brake   a shorter gradient when it points where the momentum already goes

The first two scale the learning rate, the others the gradient: with u the gradient of the last step
(gac) or AdamW's momentum (brake), the damped gradient is a g + b u. So what several learners must
tell each other is three numbers each. Left out: when a step is taken (learner.py).

Axes: P parameters, of one learner's slice or of all
"""

import math
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import Tensor

LIKENESS = 0.1  # gac: so much of |g| may lie along u; the abstract gives no number
BRAKING = 0.5  # brake: rho of the paper; beyond 1 a gradient could be turned round
BESIDE = {"gac": "previous", "brake": "exp_avg"}  # which of the tensors beside the weights is u


# ---- two dampers in vectors, as their papers tell them ----


def naive_gac(gradient, previous) -> Tensor:
    """GAC (arXiv 2603.01501): what is more than LIKENESS along the last gradient is taken out."""
    cosine = torch.cosine_similarity(gradient, previous, dim=0)
    along = gradient.norm() * previous / previous.norm()  # as long as g, in the other's direction
    return gradient - (cosine - LIKENESS).clamp_min(0) * along


def naive_brake(gradient, velocity) -> Tensor:
    """Adaptive braking (arXiv 2007.01397): g (1 - rho cos(g, v)); longer where they disagree."""
    return gradient * (1 - BRAKING * torch.cosine_similarity(gradient, velocity, dim=0))


# ---- the same for gradients in slices ----


class Look(NamedTuple):
    """What a learner sees of its slice of the gradient: |g|, g u and |u|."""

    norm: float
    product: float = 0.0
    beside: float = 0.0


def look(kind: str, gradient: Tensor, remembered: dict) -> Look:
    """Look at a slice [P] of the gradient, and at what AdamW (or GAC) remembers beside it."""
    if kind not in BESIDE:
        return Look(float(gradient.norm()))
    other = remembered[BESIDE[kind]]
    return Look(float(gradient.norm()), float(gradient @ other), float(other.norm()))


def together(looks: list) -> Look:
    """The look at the whole gradient, from the looks at its slices."""
    norms, products, others = zip(*looks, strict=True)
    return Look(math.hypot(*norms), math.fsum(products), math.hypot(*others))


def damped_gradient(kind: str, whole: Look) -> tuple:
    """(a, b, cosine, norm): the damped gradient a g + b u, the cosine of g and u, and how long the
    damped gradient is."""
    size = whole.norm * whole.beside
    cosine = whole.product / size if size > 0 else 0.0
    a, b = 1.0, 0.0
    if kind == "gac" and cosine > LIKENESS:
        b = (LIKENESS - cosine) * whole.norm / whole.beside
    elif kind == "brake":
        a = 1 - BRAKING * cosine
    if (a, b) == (1.0, 0.0):
        return a, b, cosine, whole.norm
    square = a * a * whole.norm**2 + 2 * a * b * whole.product + b * b * whole.beside**2
    return a, b, cosine, math.sqrt(max(0.0, square))


def apply_bend(
    kind: str,
    gradient: Tensor,
    remembered: dict,
    a: float,
    b: float,
) -> None:
    """Bend a slice [P] of the gradient in place; GAC remembers it as it was."""
    if kind not in BESIDE:
        return
    before = gradient.clone() if kind == "gac" else None
    gradient.mul_(a)
    if b:
        gradient.add_(remembered[BESIDE[kind]], alpha=b)
    if kind == "gac":
        remembered["previous"].copy_(before)


def step_scale(kind: str, damper, metrics: dict) -> float:
    """Factor on the learning rate of a step.

    ess: the root of the effective sample size of the answers of the step, as a share of their
    number (VCPO, arXiv 2602.17616: the root for optimizers like AdamW).
    """
    return math.sqrt(metrics["ess_whole"]) if kind == "ess" else lr_scale(damper)


# ---- the KL window ----
# "Divergence-Suppressed Alignment": keep the last 1000 KL values (one is measured every
# `--reference-every` steps); while their mean is above `--kl-threshold` (default 1.0),
# learn more slowly and hold on to the reference more. Window, 0.15 and 0.6 come from
# secondary articles, no primary source is known, and none says by how much the reference term is
# raised: doubling is this project's choice.


@dataclass(frozen=True)
class Damper:
    """State of the KL window alone: plain numbers, the newest KL value last in `window`."""

    threshold: float = 0.15  # compared with the mean of the window, strictly
    lr_factor: float = 0.6
    reference_factor: float = 2.0
    size: int = 1000
    window: tuple = ()


def observe(damper, kl: float) -> Damper:
    """The damper after one more KL value; AssertionError, naming it, if it is not finite."""
    # One NaN in the window would switch the damper off for the next 1000 values.
    assert math.isfinite(kl), f"the KL value must be finite, got {kl}"
    return replace(damper, window=(*damper.window, kl)[-damper.size :])


def window_mean(damper) -> float:
    """Mean of the values kept so far (0 before the first), summed without rounding."""
    return math.fsum(damper.window) / max(1, len(damper.window))


def lr_scale(damper) -> float:
    """Factor on the base learning rate: `lr_factor` while the mean is above the threshold."""
    return damper.lr_factor if window_mean(damper) > damper.threshold else 1.0


def reference_scale(damper) -> float:
    """Factor on the reference coefficient, raised while `lr_scale` is lowered. In the step that
    crosses the threshold they differ: its loss comes before its KL is observed."""
    return damper.reference_factor if window_mean(damper) > damper.threshold else 1.0
