"""prefixes.py: the beginnings that sequences have in common are computed once.

Equal beginnings have equal hidden states, forward and backward: it is exact. On one CPU thread,
forward and backward of groups of 16 take 33 ms instead of 42 in `guess`, 85 instead of 133 in
`sum`. Prompts of an evaluation share the head of a chat (`prefill` in cache.py).

Axes: N packed tokens, U distinct ones · B sequences · T cells of each in a grid · M tokens read
"""

import numpy as np
import torch
from torch import Tensor

from model import GPT, Packed, padded


def hidden_states(model: GPT, packed: Packed, rows: Tensor) -> Tensor:
    """model(packed, rows): the hidden states [M, d] of some tokens of a packed batch."""
    shared, wanted, copies = share_prefixes(packed, rows)
    return model(shared, wanted).index_select(0, copies)


def share_prefixes(packed: Packed, rows: Tensor) -> tuple:
    """Leave out of a packed batch what would be computed twice, and what nobody reads: what stands
    in a sequence after the last of its `rows` [M], the tokens whose hidden states are read.

    Returns another batch, with U distinct tokens, and sequences of which none is the beginning of
    another; wanted [R], those of the U that are read; and copies [M], with which `hidden[copies]`
    is what was asked for.
    """
    tensors = (packed.tokens, packed.grid, packed.cell[rows])
    tokens, grid, cells = (x.cpu().numpy() for x in tensors)
    B, T = grid.shape
    b, t = np.divmod(cells, T)  # [M] their sequences and places
    last = np.full((B, 1), -1)
    np.maximum.at(last[:, 0], b, t)
    T = padded(last.max() + 1)
    tree = np.where(np.arange(T) > last, -1, tokens[grid[:, :T]])  # [B, T] token ids

    # In sorted order, no sequence has a longer beginning in common with an earlier one than with
    # the one just before it. Any order of bytes will do: -1 is all ones, so the longer come first.
    order = sorted(range(B), key=lambda b: tree[b].tobytes())
    tree = tree[order]
    new = tree >= 0  # [B, T] tokens that the sequence before does not have
    new[1:] &= np.logical_or.accumulate(tree[1:] != tree[:-1], axis=1)
    numbers = new.cumsum().reshape(B, T) * new
    numbers = np.maximum.accumulate(numbers, axis=0) - 1  # [B, T] distinct token in each cell
    wanted, copies = np.unique(numbers[np.argsort(order)[b], t], return_inverse=True)

    kept = new.any(axis=1)  # the other sequences are beginnings of these
    arrays = (
        tree[new],
        new.nonzero()[1],
        np.where(tree < 0, -1, numbers)[kept],
        np.flatnonzero(new[kept]),
        wanted,
        copies,
    )
    *fields, wanted, copies = (torch.from_numpy(x).to(packed.tokens.device) for x in arrays)
    return Packed(*fields), wanted, copies
