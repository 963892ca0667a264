"""tiles.py: queries of sparse attention are scored in tiles of neighbours, which share their keys.

On one CPU thread this selects 2 to 5 times as fast as query by query (2,048 to 8,192 tokens in
chunks of 16; 1.4 times in sequences of 64 tokens).
The result of a query does not depend, bitwise, on what else is packed.
Left out: how a query is scored, and what is selected (dsa.py).

Axes: N queries · t tiles of n queries · NC chunks · K most chunks of one sequence
      H heads of the keys that are scored · Hs heads that select · D width
"""

from collections.abc import Callable

import torch
from torch import Tensor

TILE = 16  # neighbours that are scored together


def at_least_float32(x):
    """Lower precision is stored and gathered, never computed in."""
    return x if x.dtype.itemsize >= 4 else x.float()


def gather(x, rows):
    """x[rows] in float32 or better; by index_select, which is 2 to 9 times as fast."""
    x = x.index_select(0, rows.flatten())
    return at_least_float32(x).unflatten(0, rows.shape)


def numbers(count: int, like: Tensor):
    """0, 1, .. count - 1, where another tensor is."""
    return torch.arange(count, device=like.device)


def by_tiles(
    score: Callable,  # keys [t, K, H, D], what belongs to queries [t, n, ...] -> [t, n, Hs, K]
    means,  # [NC, H, D]
    tables,  # dsa.Tables
    *of_queries,  # [N, ...]
) -> Tensor:
    """Scores [N, Hs, K], -inf where a chunk is not past.

    A tile is n queries that are scored with the same K keys, those of their sequence's chunks.
    """
    assert len(means) == len(tables.row), f"{len(means)} means of {len(tables.row)} chunks"
    if tables.cached:  # a slot is a tile of one query, and its chunks lie together
        keys = at_least_float32(means).unflatten(0, (-1, tables.widest))
        cell = numbers(len(keys), means)
        rows = cell[:, None]
    else:
        chunks, rows, cell = _tiles(tables)
        keys = gather(means, chunks.clamp(max=len(means) - 1))
    scores = score(keys, *(gather(x, rows) for x in of_queries))
    scores = scores.flatten(0, 1).index_select(0, cell)
    future = numbers(tables.widest, means) >= tables.past[:, None, None]
    return scores.masked_fill(future, -torch.inf)


def _tiles(tables) -> tuple:
    """The chunks [t, K] and the queries [t, n] of each tile, and the cell of each query [N].

    Sequences a and b of 6 and 3 queries, in tiles of 4 (here of TILE), cells counted row by row:
        a0 a1 a2 a3
        a4 a5 .  .
        b0 b1 b2 .
    The position of a query gives its column, so that its score does not depend, bitwise, on what
    else is packed. Cells without a query compute in vain.
    """
    column = tables.q_pos % TILE
    opens = column == 0
    opens[0] = True  # a block of queries may begin inside a tile
    cell = (opens.cumsum(0) - 1) * TILE + column
    chunks = tables.first[opens, None] + numbers(tables.widest, cell)
    rows = cell.new_zeros(len(chunks), TILE)
    rows.view(-1)[cell] = numbers(len(cell), cell)
    return chunks, rows, cell


def blocks_of(tables, step: int):
    """Splits the queries: yields slices of `step` queries with their tables."""
    for start in range(0, len(tables.q_pos), step):
        part = slice(start, start + step)
        yield part, tables._replace(q_pos=tables.q_pos[part], first=tables.first[part])


def sortable(scores, ids) -> Tensor:
    """One int64 for each score: the float's order in the high half, its id, reversed, in the low
    half. No two are equal, so topk, whose order among ties is undocumented, is exact. A stable sort
    gives the same and takes 4 to 10 times as long for 16k chunks on a CPU."""
    bits = (scores.float() + 0.0).view(torch.int32)
    order = torch.where(bits < 0, bits ^ 0x7FFFFFFF, bits).long()
    return (order << 32) + (0xFFFFFFFF - ids)
