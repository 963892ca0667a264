"""cache.py: generation with the GPT: a cache of keys and values, prefill, one token per step.

A cache is a static batch of slots, one running sequence each. `prefill` writes whole sequences
into slots; `decode` feeds every slot one token. A slot's numbers depend, bitwise on CPU, on its own
tokens and on the static shapes only: not on its neighbours, not on how long they are.
Sparse attention (`dsa.py`) keeps the mean key of every chunk, too, so that a step reads those means
and what they select, and not the whole context. What it does not save is the cache itself.
`captured` makes one CUDA graph of a step.
Left out: sampling, episodes, weight swaps (rollout.py).

Axes: B slots · T positions of a slot · L layers · K chunks of a slot · Hq, Hkv heads · G = Hq / Hkv
      D head width · E indexer width
"""

import bisect
import functools
from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

import dsa
from model import GPT, PAD_BLOCK, attend_packed, pack_tokens, sparse_kernels

MIN_ROWS = 16  # fewest rows of a matrix product: below 8 the CPU library sums in another order


class Cache(NamedTuple):
    """Keys and values of a static batch of slots; a slot's rows 0 .. position-1 are valid."""

    k: Tensor  # [L, B, T, Hkv, D]
    v: Tensor  # [L, B, T, Hkv, D]
    index: Tensor | None  # [L, B, T, E], the indexer's keys (dsa with scoring="indexer")
    means: Tensor | None  # [L, B, K, Hkv, D] or [L, B, K, 1, E], mean keys (dsa with chunks)
    tables: dsa.Tables | None  # where the chunks lie (dsa)


def make_cache(model: GPT, slots: int, capacity: int) -> Cache:
    """An empty cache; capacity is rounded up to PAD_BLOCK.

    Dense attention reads whole heads, so there a head's keys lie together in memory; sparse
    attention gathers rows, so there a row's heads do. The axes are the same in both.
    """
    c, like = model.config, model.flat
    capacity = -(-capacity // PAD_BLOCK) * PAD_BLOCK
    if sparse_kernels(c, like.device) is None:
        k, v = like.new_zeros(2, c.layers, slots, c.kv_heads, capacity, c.head_width)
        return Cache(k.transpose(2, 3), v.transpose(2, 3), None, None, None)
    k, v = like.new_zeros(2, c.layers, slots, capacity, c.kv_heads, c.head_width)
    index = like.new_zeros(c.layers, slots, capacity, c.index_width) if c.indexed else None
    empty = torch.zeros(slots, dtype=torch.int64, device=like.device)
    tables = dsa.cache_tables(empty, capacity, c.chunk_size)
    scored, means = k if index is None else index[..., None, :], None
    if c.chunk_size > 1:
        means = torch.zeros_like(scored[:, :, : tables.widest])
    return Cache(k, v, index, means, tables)


def scored_keys(cache: Cache, layer: int) -> Tensor:
    """The keys that selection scores, row by row [B * T, H, D]: the indexer's, or attention's."""
    keys = cache.k[layer] if cache.index is None else cache.index[layer][..., None, :]
    return keys.flatten(0, 1)


def read_prefix(cache: Cache, slot: int, keys: int) -> list[Tensor]:
    """Copies of what a slot holds of its first `keys` tokens."""
    rows = (x[:, slot, :keys].clone() for x in cache[:3] if x is not None)
    if cache.means is None:
        return list(rows)
    return [*rows, cache.means[:, slot, : -(-keys // cache.tables.chunk_size)].clone()]


def write_prefix(cache: Cache, slot: int, parts: list[Tensor]) -> None:
    """Give a slot what `read_prefix` has read from another."""
    for x, part in zip((x for x in cache[:4] if x is not None), parts, strict=True):
        x[:, slot, : part.shape[1]] = part


@torch.inference_mode()
def prefill(model: GPT, cache: Cache, slots: Tensor, sequences: list) -> None:
    """Write keys and values of whole sequences into their cache slots [B] (one sequence a slot).

    Only sequences that fill a grid of the same width go together: SDPA's order of summation
    changes with the width (from 200 tokens on, torch 2.13, CPU).
    """
    widths: dict[int, list[int]] = {}
    for i, sequence in enumerate(sequences):
        widths.setdefault(-(-len(sequence) // PAD_BLOCK), []).append(i)
    for same in widths.values():
        _prefill_width(model, cache, slots[same], [sequences[i] for i in same])


def _prefill_width(model: GPT, cache: Cache, slots: Tensor, sequences: list) -> None:
    lengths = torch.tensor([len(s) for s in sequences])
    real = int(lengths.sum())
    filler = [[0]] * (MIN_ROWS - real)  # too few rows change the rounding
    packed = pack_tokens([*sequences, *filler], model.flat.device)
    rows = torch.repeat_interleave(slots, lengths.to(slots.device))
    columns = packed.positions[:real]
    inner = attend_packed(model.config, packed, cache.k.shape[2])
    if cache.means is not None:  # chunks of these slots, as far as they are filled
        local = torch.arange(-(-int(lengths.max()) // cache.tables.chunk_size), device=slots.device)
        chunks = (slots[:, None] * cache.tables.widest + local).flatten()

    def attend_and_store(layer: int) -> Callable:
        def attend(q, k, v, index):
            cache.k[layer, rows, columns] = k[:real]
            cache.v[layer, rows, columns] = v[:real]
            if index is not None:
                cache.index[layer, rows, columns] = index[1][:real]
            if cache.means is not None:
                means = dsa.chunk_means(scored_keys(cache, layer), cache.tables, chunks)
                cache.means[layer].flatten(0, 1)[chunks] = means
            return None if layer == last else inner(q, k, v, index)

        return attend

    last = model.config.layers - 1  # what it computes beyond keys and values nobody reads
    attends = [attend_and_store(layer) for layer in range(last + 1)]
    model.body(packed.tokens, packed.positions, attends)


def attend_slots(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
    """One query a slot on its cached keys: q [B, Hq, D], k and v [B, T, Hkv, D], mask [B, T] of
    0 and -inf -> [B, Hq, D]. The G query heads of a group stand where SDPA expects queries: so they
    share their keys. When compiled, attention is products and sums, which fuse with what surrounds
    them, as a call of SDPA does not."""
    grouped = q.reshape(len(q), k.shape[2], -1, q.shape[2])  # [B, Hkv, G, D]
    if torch.compiler.is_compiling():
        keys, values = k.transpose(1, 2)[:, :, None], v.transpose(1, 2)[:, :, None]
        scores = (grouped[..., None, :] * keys).sum(-1) * q.shape[2] ** -0.5
        weights = torch.softmax(scores + mask[:, None, None], -1)  # [B, Hkv, G, T]
        return (weights[..., None] * values).sum(-2).reshape(q.shape)
    mask = mask[:, None, None].expand(-1, -1, grouped.shape[2], -1)
    out = F.scaled_dot_product_attention(
        grouped, k.transpose(1, 2), v.transpose(1, 2), attn_mask=mask
    )
    return out.reshape(q.shape)


@functools.cache
def key_lengths(heads: int, kv_heads: int, head_width: int, capacity: int, dtype) -> list[int]:
    """Lengths, ascending, that decode on CPU may cut a dense cache to: attention over the first T
    keys gives bitwise what it gives when the rest of the capacity is there and masked.

    In which order a library sums depends on the length and the processor (MKL halves sums over 208
    values and more on AVX2, over 400 and more on AVX-512), so this processor is asked, with random
    numbers. It takes some milliseconds; a slot's result then never depends on its neighbours'
    lengths.
    """
    generator = torch.Generator().manual_seed(0)
    q = torch.randn(1, heads, head_width, generator=generator, dtype=dtype)
    k, v = torch.randn(2, 1, kv_heads, capacity, head_width, generator=generator, dtype=dtype)
    k, v = k.transpose(1, 2), v.transpose(1, 2)  # as they lie in the cache

    def attend(T: int, visible: int) -> Tensor:
        mask = torch.zeros(1, T, dtype=dtype)
        mask[:, visible:] = -torch.inf
        return attend_slots(q, k[:, :T], v[:, :T], mask)

    short, long = range(PAD_BLOCK, min(capacity, 512) + 1, PAD_BLOCK), range(512, capacity, 512)
    lengths = sorted({*short, *long} - {capacity})
    return [T for T in lengths if attend(T, T).equal(attend(capacity, T))] + [capacity]


@torch.no_grad()
def decode(model: GPT, cache: Cache, tokens: Tensor, positions: Tensor, longest: int) -> Tensor:
    """One step for every slot: feed tokens [B] at positions [B], return hidden states [B, d].

    `longest` is the largest position among slots that matter; keys behind it are not read. Row b
    depends on slot b only, bitwise: the batch has one static shape and masked keys add exact zeros.
    Compiled, it always reads the whole capacity: each length would be a graph of its own.
    """
    c, slots = model.config, torch.arange(len(tokens), device=tokens.device)
    sparse = sparse_kernels(c, tokens.device)
    if sparse is None:
        T, compiled = cache.k[0].shape[1], torch.compiler.is_compiling()
        if not compiled:
            T = min(-(-(longest + 1) // PAD_BLOCK) * PAD_BLOCK, T)
        if not compiled and not tokens.is_cuda:
            shape = c.heads, c.kv_heads, c.head_width, cache.k[0].shape[1]
            lengths = key_lengths(*shape, cache.k[0].dtype)
            T = lengths[bisect.bisect_left(lengths, T)]
        hidden_keys = torch.arange(T, device=tokens.device) > positions[:, None]  # [B, T]
        mask = model.flat.new_zeros(hidden_keys.shape).masked_fill_(hidden_keys, -torch.inf)
    else:
        tables = dsa.advance(cache.tables, positions + 1)

    def attend_cached(layer: int) -> Callable:
        keys, values = cache.k[layer], cache.v[layer]  # [B, T, Hkv, D]

        def attend(q, k, v, index):
            keys[slots, positions], values[slots, positions] = k, v
            if sparse is None:
                return attend_slots(q, keys[:, :T], values[:, :T], mask)
            if index is not None:
                cache.index[layer][slots, positions] = index[1]
                index = (index[0], cache.index[layer].flatten(0, 1), index[2])
            means = scored = scored_keys(cache, layer)  # single keys are their own means
            if cache.means is not None:
                means = cache.means[layer].flatten(0, 1)
                dsa.update_means(means, scored, tables)
            keys_flat, values_flat = keys.flatten(0, 1), values.flatten(0, 1)
            return sparse(q, keys_flat, values_flat, tables, c.top_k, index, means)

        return attend

    return model.body(tokens, positions, [attend_cached(layer) for layer in range(c.layers)])


def captured(step: Callable, slots: int) -> Callable:
    """step(model, cache, head, (tokens, positions, uniform, longest), ...) as CUDA graphs.

    A token costs hundreds of kernels, and launching them one by one takes longer than they run; a
    graph launches them all at once. It repeats what was done with the same memory: so inputs are
    copied to a fixed place, weights and head may only change in place, and attention reads a number
    of keys that is fixed: there is a graph for each power of two from 16.
    """
    kinds = (torch.int64, torch.int64, torch.float32)  # tokens, positions, uniform
    fixed = [torch.zeros(slots, dtype=kind, device="cuda") for kind in kinds]  # [B]
    graphs: dict[int, tuple] = {}  # longest position -> (graph, where its results are)

    def replay(model, cache, head, fed, *how):
        *inputs, longest = fed
        for place, values in zip(fixed, inputs, strict=True):
            place.copy_(values)
        longest = max(16, 2 ** int(longest).bit_length()) - 1
        if longest not in graphs:
            arguments = (model, cache, head, (*fixed, longest), *how)
            step(*arguments)  # what libraries set up at their first call cannot be captured
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                graphs[longest] = graph, step(*arguments)
        graph, results = graphs[longest]
        graph.replay()
        return results

    return replay
