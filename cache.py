"""cache.py: generation with the GPT: a cache of keys and values, prefill, one token per step.

A cache has a static batch of slots, one running sequence each. `prefill` writes whole sequences
into their rows, `decode` feeds every slot one token.
A slot's numbers depend, bitwise on CPU, on its own tokens and on the static shapes only: not on its
neighbours, nor on how long they are. (Prompts that are prefilled together are an exception.)
Sparse attention keeps the mean key of every chunk, too: a step reads those means and what they
select, and not the whole context. It does not save memory: every row has the capacity.
Left out: sampling, episodes, weight swaps (rollout.py); rows that grow (fast/racks.py).

Axes: B slots · T positions of each · L layers · K chunks of a slot
      Hq, Hkv heads · G = Hq / Hkv · D head width · E indexer width
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

import dsa
from fast.kernels import dense_kernels, sparse_kernels
from fast.prefixes import share_prefixes
from model import GPT, ModelConfig, attend_packed, pack_tokens, padded

# A decode step has a multiple of so many rows, a prefill no fewer: else a CPU library (MKL on AVX2)
# sums the last ones in another order than the first.
ROWS = 12


@dataclass(eq=False)
class Cache:
    """Keys and values of a static batch of slots; a slot's positions 0 .. n-1 are valid."""

    kv: Tensor  # [2, L, B, T, Hkv, D] keys and values
    capacity: int
    scored: Tensor | None = None  # keys that selection scores (dsa): k, or [L, B, T, 1, E]
    means: Tensor | None = None  # mean keys of chunks (dsa): [L, B, K, Hkv, D] or [L, B, K, 1, E]
    tables: dsa.Tables | None = None  # where the chunks lie (dsa)

    def row(self, slot: int, length: int) -> list:
        """What there is of a slot's first tokens, [L, length, ...] each: keys, values, and for
        selection the keys that are scored and the means of at least their chunks."""
        parts = [*self.kv[:, :, slot]]
        parts += [x[:, slot] for x in (self.scored, self.means) if x is not None]
        return [x[:, :length] for x in parts]

    def reserve(self, lengths):
        """Make room for sequences of these lengths [B]. Here every row has the capacity."""

    def attention(self, config: ModelConfig, positions: Tensor) -> Callable:
        """How a step writes the newest key of every slot, and attends: for `GPT.body`."""
        if self.tables is not None:
            return attend_sparse(self, config, positions)
        return attend_rows(self.kv, config, positions)


def make_cache(model: GPT, slots: int, capacity: int) -> Cache:
    """An empty cache; capacity is rounded up to PAD_BLOCK."""
    c = model.config
    T = padded(capacity)
    if c.attention == "dense":
        return Cache(empty_rows(model, slots, T), T)
    kv = model.flat.new_zeros(2, c.layers, slots, T, c.kv_heads, c.head_width)
    lengths = torch.zeros(slots, dtype=torch.int64, device=kv.device)
    tables = dsa.cache_tables(lengths, T, c.chunk_size)
    scored = kv.new_zeros(c.layers, slots, T, 1, c.index_width) if c.indexed else kv[0]
    means = scored  # single keys are their own means
    if c.chunk_size > 1:
        means = dsa.at_least_float32(torch.zeros_like(scored[:, :, : tables.widest]))
    return Cache(kv, T, scored, means, tables)


def empty_rows(model: GPT, rows: int, length: int) -> Tensor:
    """Rows for dense attention, which reads the keys of one head after the other."""
    c = model.config
    kv = model.flat.new_zeros(2, c.layers, rows, c.kv_heads, length, c.head_width)
    return kv.transpose(3, 4)


# ------------------------------------------------------------------------- whole sequences


@torch.inference_mode()
def prefill(
    model: GPT,
    cache: Cache,
    slots: list,  # [B] whole numbers
    sequences: list,  # B arrays or lists of token ids
    together=1,
) -> None:
    """Write keys and values of whole sequences into their rows, `together` of them in one forward
    pass. By default one: SDPA's order of summation changes with the width of a batch (from 200
    tokens on, torch 2.13, CPU)."""
    for i in range(0, len(slots), together):
        pack = slice(i, i + together)
        _prefill_pack(model, cache, slots[pack], sequences[pack])


def _prefill_pack(model: GPT, cache: Cache, slots, sequences):
    lengths = [*map(len, sequences)]
    last = model.config.layers - 1
    filler = [[0]] * (ROWS - sum(lengths))
    packed = pack_tokens([*sequences, *filler], model.flat.device)
    places = torch.arange(sum(lengths), device=packed.cell.device)  # of tokens among those computed
    if len(sequences) > 1:  # what they begin with in common is computed once
        packed, distinct, copies = share_prefixes(packed, places)
        places = distinct[copies]
    attend_all = attend_packed(model.config, packed, cache.capacity)
    rows = [*map(cache.row, slots, lengths)]

    def attend(layer, q, k, v, index):
        new = (k, v) if index is None else (k, v, index[1][:, None])  # [N, ...] each
        pieces = [x[places].split(lengths) for x in new]  # without the filler
        for row, *fed in zip(rows, *pieces, strict=True):
            for part, piece in zip(row, fed, strict=False):  # the means are made below
                part[layer] = piece
        # of the last layer nothing but its keys and values is read
        return q if layer == last else attend_all(layer, q, k, v, index)

    model.body(packed.tokens, packed.positions, attend, rows=packed.cell[:0])
    if cache.tables is None:
        return
    for slot, n in zip(slots, lengths, strict=True):
        first = slot * cache.tables.widest
        chunks = torch.arange(-(-n // cache.tables.chunk_size), device=packed.cell.device) + first
        for layer in range(last + 1):
            renew_means(cache, layer, chunks)


def renew_means(cache: Cache, layer, chunks):
    """Compute the mean keys of chunks again, after some of their keys have changed (dsa)."""
    scored, means = (x[layer].flatten(0, 1) for x in (cache.scored, cache.means))
    means[chunks] = dsa.chunk_means(scored, cache.tables, chunks).to(means.dtype)


# ------------------------------------------------------------------------ one token a slot


@torch.no_grad()
def decode(
    model: GPT,
    cache: Cache,
    tokens,  # [B]
    positions,  # [B]
) -> Tensor:
    """One step: feed every slot its token at its position, return hidden states [B, d].

    Row b depends on slot b only, bitwise: matrix products always have all B rows, attention is
    computed for each slot apart, how many keys it reads depends on its own row, and masked keys add
    exact zeros.
    """
    return model.body(tokens, positions, cache.attention(model.config, positions))


def attend_rows(
    kv,  # [2, L, n, T, Hkv, D]
    config: ModelConfig,
    positions,  # [n] of the newest token of each row
) -> Callable:
    """Dense attention of one query a row to its keys up to its own: a function of (layer, q, k, v)
    of the newest tokens -> [n, Hq, D]; an index is not looked at."""
    plan_step, attend_step = dense_kernels(config, kv.device) or (hide_future, attend_masked)
    plan = plan_step(positions, kv.shape[3], config.kv_heads)
    newest = torch.arange(len(positions), device=positions.device), positions

    def attend(layer, q, k, v, index=None):
        keys, values = kv[:, layer]
        keys[newest], values[newest] = k, v
        return attend_step(q, keys, values, plan)

    return attend


def hide_future(positions: Tensor, length: int, *_) -> Tensor:
    """What is added to logits [n, length]: -inf after the positions [n]."""
    keys = torch.arange(length, device=positions.device)
    future = keys > positions[:, None]
    return torch.where(future, -torch.inf, 0.0)


def attend_masked(
    q,  # [n, Hq, D]
    k,  # [n, T, Hkv, D]
    v,  # [n, T, Hkv, D]
    mask,  # [n, T] of 0 and -inf
) -> Tensor:
    """One query a row on its cached keys -> [n, Hq, D].

    SDPA gets the G query heads of a key head where it expects queries: so they share its keys.
    """
    grouped = q.unflatten(1, (k.shape[2], -1))  # [n, Hkv, G, D]
    mask = mask[:, None, None].expand(-1, -1, grouped.shape[2], -1).to(q.dtype)
    k = k.transpose(1, 2)  # [n, Hkv, T, D]
    v = v.transpose(1, 2)
    return F.scaled_dot_product_attention(grouped, k, v, attn_mask=mask).flatten(1, 2)


def attend_sparse(cache: Cache, config: ModelConfig, positions: Tensor) -> Callable:
    """Every query selects chunks of its slot by their means, and attends to those."""
    sparse = sparse_kernels(config, positions.device)
    tables = cache.tables._replace(q_pos=positions)  # nothing else changes from step to step
    tables = tables._replace(blocks=sparse.plan_blocks(tables))
    newest = torch.arange(len(positions), device=positions.device), positions
    own = tables.own

    def attend(layer, q, k, v, index):
        keys, values = cache.kv[:, layer]
        keys[newest], values[newest] = k, v
        if index is not None:
            cache.scored[layer][newest] = index[1][:, None]
        renew_means(cache, layer, own)
        scored, means = (x[layer].flatten(0, 1) for x in (cache.scored, cache.means))
        if index is not None:
            index = (index[0].contiguous(), scored[:, 0], index[2])
        keys = keys.flatten(0, 1)  # [B * T, Hkv, D]
        values = values.flatten(0, 1)
        return sparse.dsa_attention(
            q.contiguous(), keys, values, tables, config.top_k, index, means
        )

    return attend
