"""cache.py: generation with the GPT: a cache of keys and values, prefill, one token per step.

A cache is a static batch of slots, one running sequence each. `prefill` writes whole sequences
into slots; `decode` feeds every slot one token: `decode_dense`, or `decode_sparse` (dsa.py).
A slot's numbers depend, bitwise on CPU, on its own tokens and on the static shapes only: not on its
neighbours, nor on how long they are.
Sparse attention keeps the mean key of every chunk, too: a step reads those means and what they
select, and not the whole context. It does not save the memory of the cache itself.
Left out: sampling, episodes, weight swaps (rollout.py), CUDA graphs (runtime/shortcuts.py).

Axes: B slots · T positions of a slot · L layers · K chunks of a slot · Hq, Hkv heads · G = Hq / Hkv
      D head width · E indexer width
"""

import bisect
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

import dsa
from model import GPT, attend_packed, pack_tokens, sparse_kernels
from runtime.shortcuts import key_lengths, padded

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
    T = padded(capacity)
    if sparse_kernels(c, like.device) is None:
        k, v = like.new_zeros(2, c.layers, slots, c.kv_heads, T, c.head_width).transpose(3, 4)
        return Cache(k, v, None, None, None)
    k, v = like.new_zeros(2, c.layers, slots, T, c.kv_heads, c.head_width)
    index = like.new_zeros(c.layers, slots, T, c.index_width) if c.indexed else None
    empty = torch.zeros(slots, dtype=torch.int64, device=like.device)
    tables = dsa.cache_tables(empty, T, c.chunk_size)
    cache = Cache(k, v, index, None, tables)
    if c.chunk_size == 1:  # single keys are their own means
        return cache
    like = scored_keys(cache)[:, :, : tables.widest]
    return cache._replace(means=torch.zeros_like(like))


def scored_keys(cache: Cache) -> Tensor:
    """The keys that selection scores: attention's [L, B, T, Hkv, D] or the indexer's [.., 1, E]."""
    return cache.k if cache.index is None else cache.index[..., None, :]


# ------------------------------------------------------------------------- whole sequences


def read_prefix(cache: Cache, slot: int, keys: int) -> list[Tensor]:
    """Copies of what a slot holds of its first `keys` tokens (means: at least of their chunks)."""
    return [x[:, slot, :keys].clone() for x in cache[:4] if x is not None]


def write_prefix(cache: Cache, slot: int, parts: list[Tensor]) -> None:
    """Give a slot what `read_prefix` has read from another."""
    tensors = [x for x in cache[:4] if x is not None]
    for x, part in zip(tensors, parts, strict=True):
        x[:, slot, : part.shape[1]] = part


def prefill_groups(model: GPT, cache: Cache, prompts: dict, known: dict) -> None:
    """Fill slots whose prompts many share: a prompt is computed once a group, then copied.

    prompts: slot -> (group id, tokens); known: group id -> its prompt's keys and values so far.
    """
    first = {}  # group id -> the slot that computes its prompt
    for slot, (group, _) in prompts.items():
        if group not in known:
            first.setdefault(group, slot)
    if first:
        slots = torch.tensor(list(first.values()), device=cache.k.device)
        prefill(model, cache, slots, [prompts[slot][1] for slot in first.values()])
    for group, slot in first.items():
        known[group] = read_prefix(cache, slot, len(prompts[slot][1]))
    for slot, (group, _) in prompts.items():
        if slot != first.get(group):
            write_prefix(cache, slot, known[group])


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
    widths: dict[int, list[int]] = {}
    for i, sequence in enumerate(sequences):
        widths.setdefault(padded(len(sequence)), []).append(i)
    for same in widths.values():
        _prefill_width(model, cache, slots[same], [sequences[i] for i in same])


def _prefill_width(model: GPT, cache: Cache, slots: Tensor, sequences: list) -> None:
    lengths = torch.tensor([len(s) for s in sequences])
    N = int(lengths.sum())
    filler = [[0]] * (MIN_ROWS - N)  # too few rows change the rounding
    packed = pack_tokens([*sequences, *filler], model.flat.device)
    row_slots = torch.repeat_interleave(slots, lengths.to(slots.device))  # [N]
    place = (row_slots, packed.positions[:N])
    attend_all = attend_packed(model.config, packed, cache.k.shape[2])
    last = model.config.layers - 1

    def attend(layer, q, k, v, index):
        cache.k[layer][place] = k[:N]
        cache.v[layer][place] = v[:N]
        if index is not None:
            cache.index[layer][place] = index[1][:N]
        if cache.means is not None:
            store_means(cache, layer, slots, int(lengths.max()))
        # no row of the last layer is read, beyond its keys and values
        return q if layer == last else attend_all(layer, q, k, v, index)

    model.body(packed.tokens, packed.positions, attend, rows=slots[:0])


def store_means(cache: Cache, layer: int, slots: Tensor, longest: int) -> None:
    """Mean keys of the chunks of these slots [B], as far as the longest sequence fills them."""
    chunks = torch.arange(-(-longest // cache.tables.chunk_size), device=slots.device)
    chunks = (slots[:, None] * cache.tables.widest + chunks).flatten()
    keys = scored_keys(cache)[layer].flatten(0, 1)
    cache.means[layer].flatten(0, 1)[chunks] = dsa.chunk_means(keys, cache.tables, chunks)


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
    if cache.tables is None:
        return decode_dense(model, cache, tokens, positions, longest)
    return decode_sparse(model, cache, tokens, positions)


def decode_dense(
    model: GPT,
    cache: Cache,
    tokens: Tensor,  # [B]
    positions: Tensor,  # [B]
    longest: int,
) -> Tensor:
    """Every query attends to the keys of its slot at positions up to its own."""
    place = (torch.arange(len(tokens), device=tokens.device), positions)
    T = keys_to_read(model, cache, longest)
    future = torch.arange(T, device=tokens.device) > positions[:, None]  # [B, T]
    mask = model.flat.new_zeros(future.shape).masked_fill_(future, -torch.inf)

    def attend(layer, q, k, v, index):
        keys, values = cache.k[layer], cache.v[layer]  # [B, T, Hkv, D]
        keys[place] = k
        values[place] = v
        return attend_slots(q, keys[:, :T], values[:, :T], mask)

    return model.body(tokens, positions, attend)


def decode_sparse(
    model: GPT,
    cache: Cache,
    tokens: Tensor,  # [B]
    positions: Tensor,  # [B]
) -> Tensor:
    """Every query selects chunks of its slot by their mean keys, and attends to those."""
    place = (torch.arange(len(tokens), device=tokens.device), positions)
    dsa_attention = sparse_kernels(model.config, tokens.device)
    tables = dsa.advance(cache.tables, positions + 1)

    def attend(layer, q, k, v, index):
        keys, values = cache.k[layer], cache.v[layer]  # [B, T, Hkv, D]
        keys[place] = k
        values[place] = v
        if index is not None:
            q_index, k_index, weights = index
            cache.index[layer][place] = k_index
            index = (q_index.contiguous(), cache.index[layer].flatten(0, 1), weights)
        means = scored = scored_keys(cache)[layer].flatten(0, 1)
        if cache.means is not None:
            means = cache.means[layer].flatten(0, 1)
            dsa.update_means(means, scored, tables)
        k = keys.flatten(0, 1)  # [B * T, Hkv, D]
        v = values.flatten(0, 1)
        return dsa_attention(q.contiguous(), k, v, tables, model.config.top_k, index, means)

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
    c, capacity = model.config, cache.k.shape[2]
    if cache.k.is_cuda:
        return min(padded(longest + 1), capacity)
    heads = (c.heads, c.kv_heads)
    lengths = key_lengths(attend_slots, heads, c.head_width, capacity, cache.k.dtype)
    return lengths[bisect.bisect_left(lengths, longest + 1)]
