"""runtime/shortcuts.py: what is done for speed or for equal bits, apart from what is computed.

  share_prefixes  computes what packed sequences have in common once
  key_lengths     says how much of a cache attention may leave out, bitwise
  captured        repeats a step as one CUDA graph

The story calls these functions and can be read without them. They import nothing of it.

Axes: M rows that are read · U distinct tokens · R distinct rows · B sequences · T cells of each
"""

import functools
from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor

PAD_BLOCK = 16  # attention over 13 tokens takes longer than over 16, a register of AVX-512


def padded(length: int) -> int:
    """The length, rounded up to a multiple of PAD_BLOCK."""
    return -(-length // PAD_BLOCK) * PAD_BLOCK


def share_prefixes(packed, rows: Tensor) -> tuple:
    """Leaves out of a packed batch what would be computed twice, and what nobody reads.

    Answers to one prompt begin alike, and equal beginnings have equal hidden states: they are
    computed once. `rows` [M] are the tokens whose hidden states are read; nobody attends to what
    stands in a sequence behind the last of them.

    packed: what `model.pack_tokens` returns. Returns another one, with U distinct tokens, and
    sequences of which none is the beginning of another; wanted [R], those of the U that are read;
    and copies [M], with which `hidden[copies]` is what was asked for.

    On one CPU thread, forward and backward of groups of 16 take 33 ms instead of 42 in `guess`, 85
    instead of 133 in `sum`.
    """
    B, T = packed.shape
    cells, tokens, rows = (x.cpu().numpy() for x in (packed.cell_of_row, packed.tokens, rows))
    b, t = np.divmod(cells[rows], T)  # [M] their sequences and places
    last = np.full((B, 1), -1)
    np.maximum.at(last[:, 0], b, t)
    grid = np.full((B, T), -1)
    grid.flat[cells] = tokens
    grid[np.arange(T) > last] = -1

    # In sorted order, no sequence has a longer beginning in common with an earlier one than with
    # the one just before it. Any order of bytes will do: -1 is all ones, so the longer come first.
    order = sorted(range(B), key=lambda b: grid[b].tobytes())
    grid = grid[order]
    new = grid >= 0  # [B, T] tokens that the sequence before does not have
    new[1:] &= np.logical_or.accumulate(grid[1:] != grid[:-1], axis=1)
    numbers = new.cumsum().reshape(B, T) * new
    numbers = np.maximum.accumulate(numbers, axis=0) - 1  # [B, T] distinct token in each cell
    wanted, copies = np.unique(numbers[np.argsort(order)[b], t], return_inverse=True)

    kept = new.any(axis=1)  # the other sequences are beginnings of these
    real = grid[kept] >= 0
    lengths = real.sum(axis=1)
    width = padded(lengths.max())
    arrays = (
        grid[new],
        new.nonzero()[1],
        numbers[kept][real],
        np.flatnonzero(new[kept][real]),
        np.flatnonzero(real[:, :width]),
        np.append(0, lengths.cumsum()),
        wanted,
        copies,
    )
    *fields, wanted, copies = (torch.from_numpy(x).to(packed.tokens.device) for x in arrays)
    return type(packed)(*fields, shape=(len(real), width)), wanted, copies


@functools.cache
def key_lengths(attend: Callable, heads: tuple, width: int, capacity: int, dtype) -> list[int]:
    """Lengths, ascending, to which a step on CPU may cut its cache without changing a bit.

    attend(q [1, Hq, D], k and v [1, T, Hkv, D], mask [1, T]); heads (Hq, Hkv); width D.

    An episode must be bitwise the same whatever its neighbours are, and the longest neighbour
    decides how many keys are read. But the order in which a library sums depends on that number
    and on the processor (MKL halves sums over 208 values and more on AVX2, over 400 and more on
    AVX-512). So this processor is asked, with random numbers and in some milliseconds: which
    lengths give what the whole cache gives, with the rest masked?

    What it is for is equal bits. Reading fewer keys gains speed, too: in `sum`, whose cache has 304
    positions, a step that reads 16 to 48 of them takes 1.9 to 2.5 times less than one that reads
    them all.
    """
    generator = torch.Generator().manual_seed(0)
    q = torch.randn(1, heads[0], width, generator=generator, dtype=dtype)
    k, v = torch.randn(2, 1, heads[1], capacity, width, generator=generator, dtype=dtype)
    k, v = k.transpose(1, 2), v.transpose(1, 2)  # as they lie in the cache

    def result(length: int, visible: int) -> Tensor:
        mask = torch.zeros(1, length, dtype=dtype)
        mask[:, visible:] = -torch.inf
        return attend(q, k[:, :length], v[:, :length], mask)

    lengths = range(PAD_BLOCK, capacity, PAD_BLOCK)
    lengths = [n for n in lengths if n <= 512 or n % 512 == 0]  # fewer questions
    same = [n for n in lengths if result(n, n).equal(result(capacity, n))]
    return [*same, capacity]


def captured(step: Callable) -> Callable:
    """A function with the call of step(model, cache, head, inputs, ...), run as CUDA graphs.

    inputs: tokens, positions and uniform numbers, [B] each, and the longest position (int).

    A step launches hundreds of kernels, which takes longer than to run them; a graph launches them
    all at once. On an H100 a step of `tiny` takes 0.19 ms instead of 1.09, of `medium` 0.94
    instead of 3.2.

    A graph repeats what was done with the same memory. So inputs are copied to a fixed place,
    weights and head may change in place only, and the number of keys read is fixed: there is a
    graph for each power of two from 16.
    """
    graphs: dict[int, tuple] = {}  # longest position -> a graph, its inputs and its results

    def replay(model, cache, head, inputs, *options):
        *values, longest = inputs
        longest = max(16, 2 ** int(longest).bit_length()) - 1
        if longest not in graphs:
            places = [value.clone() for value in values]
            arguments = (model, cache, head, (*places, longest), *options)
            step(*arguments)  # what libraries set up at their first call cannot be captured
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                results = step(*arguments)
            graphs[longest] = graph, places, results
        graph, places, results = graphs[longest]
        for place, value in zip(places, values, strict=True):
            place.copy_(value)
        graph.replay()
        return results

    return replay
