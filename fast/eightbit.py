"""eightbit.py: what weights are rounded to on their way to a generator, and in 8 bits above all.

It saves transport: 127,536 bytes and not 479,488 for `guess`. For a trained `guess` the scales
halve the mean mismatch with the learner's log-probs (0.0028, without them 0.0068).
A float8_e4m3fn has 4 significant bits from 2^-6 to 448, and fewer below, where many weights of a
trained model are. So every output channel of a matrix is divided by a scale of its own first, so
that its largest weight is 448 (`naive_rounded`). Vectors, such as those of norms, stay as they are.
One function, `take`, decides what a generator computes with: in a worker, which gets weights
packed; in a replay and with adapters, where they come as they are.
Left out: products of 8-bit numbers. Weights are opened again to what the model computes in.

Axes: P weights of a model, flat
"""

import math
from typing import NamedTuple

import torch
from torch import Tensor

FLOAT8 = torch.float8_e4m3fn
LARGEST = torch.finfo(FLOAT8).max  # 448
SMALLEST = torch.finfo(torch.float32).tiny  # of the scales: smaller ones lose digits


# ------------------------------------------------------------------------------ the naive form


def naive_rounded(matrix: Tensor, summed: int) -> Tensor:
    """A matrix in 8 bits and back; `summed`: the axis that a product with it sums over."""
    rounded = []
    for channel in matrix.unbind(1 - summed):
        scale = channel.abs().max() / LARGEST
        scale = scale.masked_fill(scale < SMALLEST, 1.0)  # nothing but zeros, for any purpose
        codes = (channel / scale).to(FLOAT8)
        rounded.append(codes.float() * scale)
    return torch.stack(rounded, 1 - summed)


# ------------------------------------------------------------------------ all weights of a model


class Part(NamedTuple):
    """One parameter among the flat weights: a matrix, or a vector, which stays exact."""

    shape: tuple[int, ...]
    summed: int | None  # the axis that a product with the matrix sums over; None: a vector

    @property
    def floats(self) -> int:
        """How many float32 it takes: the scales of its channels, or all of a vector."""
        return self.shape[0 if self.summed is None else 1 - self.summed]


class Form(NamedTuple):
    """How weights [P] lie in memory: in one precision, or in 8 bits as `pack` writes them."""

    dtype: torch.dtype
    size: int  # in elements of this dtype
    parts: tuple[Part, ...] = ()  # in 8 bits: what the weights consist of, in order


def form_of(model, precision: str) -> Form:
    """The form that rounds `model.flat` to a precision, such as "float8_e4m3fn".

    Weights of torch's own modules are [out, in], all other matrices [in, out] (model.py).
    """
    dtype = getattr(torch, precision)
    if dtype != FLOAT8:
        return Form(dtype, len(model.flat))
    parts, size = [], 0
    for name, p in model.named_parameters():
        if model.trains(name):  # else it is no part of flat
            matrix = p.dim() == 2
            part = Part(tuple(p.shape), int(name.endswith(".weight")) if matrix else None)
            parts.append(part)
            size += 4 * part.floats + (p.numel() if matrix else 0)
    return Form(torch.uint8, size, tuple(parts))


def pack(flat: Tensor, form: Form) -> Tensor:
    """Weights [P] -> [form.size] of form.dtype.

    In 8 bits first comes what is float32, part by part, and then all matrices. A channel with a
    weight that is not finite becomes NaN.
    """
    if not form.parts:
        return flat.to(form.dtype)
    floats, codes = [], []
    for part, weights in zip(form.parts, split(flat, form), strict=True):
        weights = weights.float().view(part.shape)
        if part.summed is None:
            floats.append(weights)
            continue
        scale = weights.abs().amax(part.summed, keepdim=True) / LARGEST
        scale = scale.masked_fill(scale < SMALLEST, 1.0)  # zeros stay zeros
        codes.append((weights / scale).to(FLOAT8).flatten())
        floats.append(scale.flatten())
    return torch.cat([x.view(torch.uint8) for x in floats + codes])


def unpack(into: Tensor, packed: Tensor, form: Form) -> None:
    """Weights [P] from what `pack` has made of them in 8 bits."""
    counts = [part.floats for part in form.parts]
    floats, codes = packed.tensor_split([4 * sum(counts)])
    floats, codes = floats.view(torch.float32).split(counts), codes.view(FLOAT8)
    for part, weights, values in zip(form.parts, split(into, form), floats, strict=True):
        if part.summed is not None:
            own, codes = codes.tensor_split([len(weights)])
            values = (own.view(part.shape).float() * values.unsqueeze(part.summed)).flatten()
        weights.copy_(values)


def take(into: Tensor, offered: Tensor, form: Form) -> None:
    """Weights [P] become what is offered, exact or packed already, in the precision of `form`; what
    is offered in no finer one is not rounded again."""
    if form.dtype.itemsize < offered.itemsize:
        offered = pack(offered, form)
    if offered.dtype == torch.uint8:
        unpack(into, offered, form)
    else:
        into.copy_(offered)


def split(flat: Tensor, form: Form) -> tuple:
    """The flat weights, parameter by parameter."""
    return flat.split([math.prod(part.shape) for part in form.parts])
