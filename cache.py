"""cache.py: generation with the GPT: a cache of keys and values, prefill, one token per step.

A cache is a static batch of slots, one running sequence each. `prefill` writes whole sequences
into slots; `decode` feeds every slot one token. Both write into it by `remember`.
A slot's numbers depend, bitwise on CPU, on its own tokens and on the static shapes only: not on its
neighbours, nor on how long they are.
Sparse attention keeps the mean key of every chunk, too: a step reads those means and what they
select, and not the whole context. It does not save the memory of the cache itself.
Left out: sampling, episodes, weight swaps (rollout.py).

Axes: B slots · T positions of a slot · L layers · K chunks of a slot · Hq, Hkv heads · G = Hq / Hkv
      D head width · E indexer width
"""

import functools
from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

import dsa
from model import GPT, PAD_BLOCK, attend_packed, pack_tokens, padded, sparse_kernels

MIN_ROWS = 16  # fewest rows of a matrix product: below 8 the CPU library sums in another order


class Cache(NamedTuple):
    """Keys and values of a static batch of slots; a slot's rows 0 .. position-1 are valid."""

    k: Tensor  # [L, B, T, Hkv, D]
    v: Tensor  # [L, B, T, Hkv, D]
    scored: Tensor | None  # keys that selection scores (dsa): k, or the indexer's [L, B, T, 1, E]
    means: Tensor | None  # mean keys of chunks (dsa): [L, B, K, Hkv, D] or [L, B, K, 1, E]
    tables: dsa.Tables | None  # where the chunks lie (dsa)


def make_cache(model: GPT, slots: int, capacity: int) -> Cache:
    """An empty cache; capacity is rounded up to PAD_BLOCK.

    Dense attention reads whole heads, so there a head's keys lie together in memory; sparse
    attention gathers rows, so there a row's heads do. The axes are the same in both.
    """
    c, like = model.config, model.flat
    T = padded(capacity)
    if sparse_kernels(c, like.device) is None:
        k, v = like.new_zeros(2, c.layers, slots, c.kv_heads, T, c.head_width).transpose(3, 4)
        return Cache(k, v, None, None, None)
    k, v = like.new_zeros(2, c.layers, slots, T, c.kv_heads, c.head_width)
    scored = like.new_zeros(c.layers, slots, T, 1, c.index_width) if c.indexed else k
    empty = torch.zeros(slots, device=like.device).long()
    tables = dsa.cache_tables(empty, T, c.chunk_size)
    # single keys are their own means
    means = torch.zeros_like(scored[:, :, : tables.widest]) if c.chunk_size > 1 else scored
    return Cache(k, v, scored, means, tables)


def remember(
    cache: Cache,
    layer: int,
    place: tuple,  # slots [N], positions [N]
    chunks: Tensor | None,  # ids of the chunks in which they lie (dsa)
    keys: tuple,  # k and v [N or more, Hkv, D], the indexer's queries, keys [N or more, E], weights
) -> None:
    """Put the keys and values of N tokens in their places; rows behind the first N are filler."""
    N = len(place[0])
    k, v, index = keys
    cache.k[layer][place] = k[:N]
    cache.v[layer][place] = v[:N]
    if index is not None:
        cache.scored[layer][place] = index[1][:N, None]
    if chunks is not None:
        scored, means = (x[layer].flatten(0, 1) for x in (cache.scored, cache.means))
        means[chunks] = dsa.chunk_means(scored, cache.tables, chunks)


# ------------------------------------------------------------------------- whole sequences


def prefill_groups(
    model: GPT,
    cache: Cache,
    prompts: dict,  # slot -> (group id, tokens)
    known: dict,  # group id -> its prompt's keys and values so far
) -> None:
    """Fill slots whose prompts many share: a prompt is computed once a group, then copied."""
    first = {}  # group id -> the first of its slots, which computes the prompt
    for slot, (group, _) in prompts.items():
        if group not in known:
            first.setdefault(group, slot)
    slots = torch.tensor([*first.values()], device=cache.k.device)
    prefill(model, cache, slots, [prompts[slot][1] for slot in first.values()])
    for slot, (group, tokens) in prompts.items():
        # what the slot holds of its first tokens (means: at least of their chunks)
        parts = [x[:, slot, : len(tokens)] for x in cache[:4] if x is not None]
        if group not in known:
            known[group] = [x.clone() for x in parts]
        for part, ready in zip(parts, known[group], strict=True):
            part.copy_(ready)


@torch.inference_mode()
def prefill(
    model: GPT,
    cache: Cache,
    slots: Tensor,  # [B]
    sequences: list,  # B arrays or lists of token ids
) -> None:
    """Write keys and values of whole sequences into their cache slots, one sequence a slot.

    Only sequences whose grids have the same width go together: SDPA's order of summation changes
    with the width (from 200 tokens on, torch 2.13, CPU).
    """
    places = {}  # width of the grid -> places in `sequences`
    for i, sequence in enumerate(sequences):
        places.setdefault(padded(len(sequence)), []).append(i)
    for same in places.values():
        _prefill_width(model, cache, slots[same], [sequences[i] for i in same])


def _prefill_width(model: GPT, cache: Cache, slots: Tensor, sequences: list) -> None:
    lengths = [len(s) for s in sequences]
    N = sum(lengths)
    filler = [[0]] * (MIN_ROWS - N)  # too few rows change the rounding
    packed = pack_tokens([*sequences, *filler], model.flat.device)
    counts = torch.tensor(lengths, device=slots.device)
    place = (torch.repeat_interleave(slots, counts), packed.positions[:N])
    chunks = None
    if cache.tables is not None:  # as far as the longest sequence fills them
        local = torch.arange(-(-max(lengths) // cache.tables.chunk_size), device=slots.device)
        chunks = (cache.tables.first[slots, None] + local).flatten()
    attend_all = attend_packed(model.config, packed, cache.k.shape[2])

    def attend(layer, q, *keys):
        remember(cache, layer, place, chunks, keys)
        if layer == model.config.layers - 1:  # nothing but its keys and values is read
            return q
        return attend_all(layer, q, *keys)

    model.body(packed.tokens, packed.positions, attend, rows=slots[:0])


# ------------------------------------------------------------------------ one token a slot


@torch.no_grad()
def decode(
    model: GPT,
    cache: Cache,
    tokens: Tensor,  # [B]
    positions: Tensor,  # [B]
    longest: int,  # largest position among slots that matter
) -> Tensor:
    """One step: feed every slot its token at its position, return hidden states [B, d].

    Dense attention reads no key behind `longest`. Row b depends on slot b only, bitwise: shapes are
    static and masked keys add exact zeros.
    """
    c = model.config
    place = (torch.arange(len(tokens), device=tokens.device), positions)
    if cache.tables is None:  # every query attends to the keys of its slot up to its own
        chunks = None
        T = keys_to_read(model, cache, longest)
        future = torch.arange(T, device=positions.device) > positions[:, None]  # [B, T]
        mask = model.flat.new_zeros(future.shape).masked_fill_(future, -torch.inf)
    else:  # every query selects chunks of its slot by their means, and attends to those
        tables = dsa.advance(cache.tables, positions + 1)
        chunks = tables.own
        dsa_attention = sparse_kernels(c, positions.device)

    def attend(layer, q, *keys):
        remember(cache, layer, place, chunks, keys)
        if cache.tables is None:
            return attend_slots(q, cache.k[layer, :, :T], cache.v[layer, :, :T], mask)
        k, v, scored, means = (x[layer].flatten(0, 1) for x in cache[:4])  # [B * T, H, D or E]
        index = keys[-1]
        if index is not None:
            index = (index[0].contiguous(), scored[:, 0], index[2])
        return dsa_attention(q.contiguous(), k, v, tables, c.top_k, index, means)

    return model.body(tokens, positions, attend)


def attend_slots(
    q: Tensor,  # [B, Hq, D]
    k: Tensor,  # [B, T, Hkv, D]
    v: Tensor,  # [B, T, Hkv, D]
    mask: Tensor,  # [B, T] of 0 and -inf
) -> Tensor:
    """One query a slot on its cached keys -> [B, Hq, D].

    SDPA gets the G query heads of a group where it expects queries: so they share their keys.
    """
    grouped = q.unflatten(1, (k.shape[2], -1))  # [B, Hkv, G, D]
    mask = mask[:, None, None].expand(-1, -1, grouped.shape[2], -1)
    k = k.transpose(1, 2)  # [B, Hkv, T, D]
    v = v.transpose(1, 2)
    return F.scaled_dot_product_attention(grouped, k, v, attn_mask=mask).flatten(1, 2)


def keys_to_read(model: GPT, cache: Cache, longest: int) -> int:
    """How many keys of each slot a dense step reads, so that every slot's result is bitwise what
    the whole cache gives (on a GPU: as many as there are, rounded up)."""
    capacity = cache.k.shape[2]
    if cache.k.is_cuda:
        return min(padded(longest + 1), capacity)
    c = model.config
    lengths = key_lengths(
        heads=c.heads,
        kv_heads=c.kv_heads,
        width=c.head_width,
        capacity=capacity,
        dtype=cache.k.dtype,
    )
    return next(n for n in lengths if n > longest)


# ------------------------------------------------------------------ for equal bits, and for speed


@functools.cache
def key_lengths(
    heads: int,
    kv_heads: int,
    width: int,
    capacity: int,
    dtype: torch.dtype,
) -> list[int]:
    """Lengths, ascending, to which a step on CPU may cut its cache without changing a bit.

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
    q = torch.randn(1, heads, width, generator=generator, dtype=dtype)
    k, v = torch.randn(2, 1, kv_heads, capacity, width, generator=generator, dtype=dtype)
    k = k.transpose(1, 2)  # as they lie in the cache
    v = v.transpose(1, 2)

    def result(length: int, visible: int) -> Tensor:
        mask = torch.zeros(1, length, dtype=dtype)
        mask[:, visible:] = -torch.inf
        return attend_slots(q, k[:, :length], v[:, :length], mask)

    lengths = range(PAD_BLOCK, capacity, PAD_BLOCK)
    lengths = [n for n in lengths if n <= 512 or n % 512 == 0]  # fewer questions
    same = [n for n in lengths if result(n, n).equal(result(capacity, n))]
    return [*same, capacity]


def captured(
    step: Callable,  # inputs -> results
    inputs: tuple,  # tokens, positions and uniform numbers, [B] each, and the longest position
    graphs: dict,  # longest position -> a graph, its inputs and results: those captured so far
) -> tuple:
    """step(inputs), run as a CUDA graph.

    A step launches hundreds of kernels, which takes longer than to run them; a graph launches them
    all at once. On an H100 a step of `tiny` takes 0.19 ms instead of 1.09, of `medium` 0.94
    instead of 3.2.

    A graph repeats what was done with the same memory. So inputs are copied to a fixed place,
    weights and output matrix may change in place only, and the number of keys read is fixed: there
    is a graph for each power of two from 16.
    """
    *values, longest = inputs
    longest = max(16, 2 ** int(longest).bit_length()) - 1
    if longest not in graphs:
        places = [value.clone() for value in values]
        step((*places, longest))  # what libraries set up at their first call cannot be captured
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            results = step((*places, longest))
        graphs[longest] = graph, places, results
    graph, places, results = graphs[longest]
    for place, value in zip(places, values, strict=True):
        place.copy_(value)
    graph.replay()
    return results
