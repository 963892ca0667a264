"""cache.py: generation with the GPT: a cache of keys and values, prefill, one token per step.

A cache has a static batch of slots, one running sequence each. A rack has rows of one length: the
first (32 positions) has one for every slot; a sequence that outgrows its row moves to a rack with
longer ones (64, 128, ..., the capacity), about as many as were ever needed at once; racks never
shrink. So memory is about what sequences use, and not slots times capacity.
`prefill` writes whole sequences into their rows, `decode` feeds every slot one token.
A slot's numbers depend, bitwise on CPU, on its own tokens and on the static shapes only: not on its
neighbours, nor on how long they are.
Sparse attention keeps the mean key of every chunk, too: a step reads those means and what they
select, and not the whole context. It does not save memory: every row has the capacity. 8 bits do:
keys and values are rounded when they are written, and widened when they are read (`fitted`).
Left out: sampling, episodes, weight swaps (rollout.py).

Axes: B slots · n rows of a rack, T positions of each · L layers · K chunks of a slot
      Hq, Hkv heads · G = Hq / Hkv · D head width · E indexer width
"""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

import dsa
from model import (
    GPT,
    ModelConfig,
    attend_packed,
    pack_tokens,
    padded,
    sparse_kernels,
    use_triton,
)
from runtime.eightbit import FLOAT8, LARGEST

MIN_ROWS = 16  # fewest rows of a matrix product: below 8 the CPU library sums in another order
SHORT = 32  # positions of the shortest rows


@dataclass(eq=False)
class Rack:
    """Rows of one length, the first `used` in use; `slots` tells whose sequence lies in each
    (-1 where nobody's does)."""

    kv: Tensor  # [2, L, n, T, Hkv, D] keys and values
    slots: Tensor  # [n]
    used: int


@dataclass(eq=False)
class Cache:
    """Keys and values of a static batch of slots; a slot's positions 0 .. n-1 are valid."""

    racks: list  # by length; in the first, row b is slot b's for ever
    lengths: np.ndarray  # of their rows
    rack: np.ndarray  # [B] in which rack its sequence lies, and in which row
    row: np.ndarray  # [B]
    place: Tensor  # [B] this row's number, counted across racks
    scored: Tensor | None = None  # keys that selection scores (dsa): k, or [L, B, T, 1, E]
    means: Tensor | None = None  # mean keys of chunks (dsa): [L, B, K, Hkv, D] or [L, B, K, 1, E]
    tables: dsa.Tables | None = None  # where the chunks lie (dsa)


def kept_in(model: GPT, precision: str) -> torch.dtype:
    """The dtype of cached keys and values; "auto": what the model computes in."""
    return model.flat.dtype if precision == "auto" else getattr(torch, precision)


def make_cache(model: GPT, slots: int, capacity: int, precision: str = "auto") -> Cache:
    """An empty cache; capacity is rounded up to PAD_BLOCK. precision: see `kept_in`."""
    c, T = model.config, padded(capacity)
    like = model.flat.new_empty(0, dtype=kept_in(model, precision))
    sparse = c.attention == "dsa"
    lengths = [SHORT << i for i in range(16) if not sparse and SHORT << i <= T / 1.5] + [T]
    numbers, racks = torch.arange(slots, device=like.device), []
    for length in lengths:
        own = numbers[: 0 if racks else slots].clone()
        heads = (length, c.kv_heads) if sparse else (c.kv_heads, length)
        kv = like.new_zeros(2, c.layers, len(own), *heads, c.head_width)
        racks.append(Rack(kv if sparse else kv.transpose(3, 4), own, len(own)))
    none = np.zeros(slots, np.int64)
    cache = Cache(racks, np.array(lengths), none, np.arange(slots), numbers)
    if sparse:
        cache.tables = dsa.cache_tables(torch.zeros_like(numbers), T, c.chunk_size)
        cache.scored = racks[0].kv[0]
        if c.indexed:
            cache.scored = like.new_zeros(c.layers, slots, T, 1, c.index_width)
        cache.means = cache.scored  # single keys are their own means
        if c.chunk_size > 1:
            means = torch.zeros_like(cache.scored[:, :, : cache.tables.widest])
            cache.means = dsa.at_least_float32(means)
    return cache


# ------------------------------------------------------------------ a row for every sequence


def reserve(cache: Cache, needed: np.ndarray) -> bool:
    """Give every slot the shortest row that has `needed` [B] positions; a sequence that has grown
    moves with its keys. True when a rack got more rows: captured graphs know the old ones."""
    wanted = cache.lengths.searchsorted(needed)
    changed = np.flatnonzero(wanted != cache.rack).tolist()
    grown = False
    for b in changed:
        old, new, row = cache.racks[cache.rack[b]], cache.racks[wanted[b]], b
        if wanted[b]:
            row = new.used
            if row == len(new.slots):  # half as many rows again, and one
                more, grown = min(row // 2 + 1, len(wanted) - row), True
                longer = F.pad(new.kv.transpose(3, 4), (0,) * 7 + (more,))
                new.kv, new.slots = longer.transpose(3, 4), F.pad(new.slots, (0, more), value=-1)
            new.used += 1
            new.slots[row] = b
            copy_row(old, cache.row[b], new, row)
        if cache.rack[b]:  # the last row fills the gap: those in use stay together
            old.used -= 1
            gap, last = cache.row[b], int(old.slots[old.used])
            copy_row(old, old.used, old, gap)
            old.slots[gap], cache.row[last] = last, gap
            old.slots[old.used] = -1
        cache.rack[b], cache.row[b] = wanted[b], row
    if changed:
        before = np.cumsum([0] + [rows_to_read(rack) for rack in cache.racks])
        cache.place.copy_(torch.from_numpy(before[cache.rack] + cache.row))
    return grown


def copy_row(old: Rack, row, new: Rack, to):
    """Keys and values of a sequence, as many as fit."""
    known = old.kv[:, :, row, : new.kv.shape[3]]
    new.kv[:, :, to, : known.shape[2]] = known


def rows_to_read(rack: Rack) -> int:
    """Those in use; on a GPU all, because shapes are fixed in a captured graph."""
    return len(rack.slots) if rack.kv.is_cuda else rack.used


def fitted(x: Tensor, like: Tensor) -> Tensor:
    """Keys or values as the cache keeps them: in 8 bits, what is beyond 448 is 448.

    There is no scale: norms keep keys and values around 1, and a scale for each token and head
    would hardly bring log-probs closer to the learner's (docs/design.md has the numbers).
    """
    if like.dtype != FLOAT8:
        return x
    return x.clamp(-LARGEST, LARGEST).to(FLOAT8)


# ------------------------------------------------------------------------- whole sequences


def row_of(cache: Cache, slot, length) -> list:
    """What the cache holds of a slot's first tokens: keys, values, and for selection the keys that
    are scored and the means of at least their chunks; [L, length, ...] each."""
    rows = [*cache.racks[cache.rack[slot]].kv[:, :, cache.row[slot]]]
    rows += [x[:, slot] for x in (cache.scored, cache.means) if x is not None]
    return [x[:, :length] for x in rows]


def prefill_groups(
    model: GPT,
    cache: Cache,
    prompts,  # slot -> (group id, tokens)
    known,  # group id -> its prompt's keys and values so far
) -> None:
    """Fill slots whose prompts many share: a prompt is computed once a group, then copied."""
    first = {}  # group id -> the first of its slots, which computes the prompt
    for slot, (group, _) in prompts.items():
        if group not in known:
            first.setdefault(group, slot)
    prefill(model, cache, [*first.values()], [prompts[slot][1] for slot in first.values()])
    for slot, (group, tokens) in prompts.items():
        parts = row_of(cache, slot, len(tokens))
        if group not in known:
            known[group] = [x.clone() for x in parts]
        for part, ready in zip(parts, known[group], strict=True):
            part.copy_(ready)


@torch.inference_mode()
def prefill(
    model: GPT,
    cache: Cache,
    slots,  # [B] whole numbers
    sequences,  # B arrays or lists of token ids
) -> None:
    """Write keys and values of whole sequences into their rows, one sequence a slot.

    Only sequences whose grids have the same width go together: SDPA's order of summation changes
    with the width (from 200 tokens on, torch 2.13, CPU).
    """
    widths = {}  # width of the grid -> slots and their sequences
    for slot, sequence in zip(map(int, slots), sequences, strict=True):
        widths.setdefault(padded(len(sequence)), []).append((slot, sequence))
    for same in widths.values():
        _prefill_width(model, cache, *zip(*same, strict=True))


def _prefill_width(model: GPT, cache: Cache, slots, sequences):
    lengths = [len(s) for s in sequences]
    filler = [[0]] * (MIN_ROWS - sum(lengths))  # too few rows change the rounding
    packed = pack_tokens([*sequences, *filler], model.flat.device)
    attend_all = attend_packed(model.config, packed, cache.lengths[-1])
    rows = [row_of(cache, slot, n) for slot, n in zip(slots, lengths, strict=True)]

    def attend(layer, q, k, v, index):
        keys = [k, v] if index is None else [k, v, index[1][:, None]]
        own = zip(*(x[: sum(lengths)].split(lengths) for x in keys), strict=True)
        for parts, values in zip(rows, own, strict=True):
            for part, x in zip(parts, values, strict=False):
                part[layer] = fitted(x, part)
        if layer == model.config.layers - 1:  # nothing but its keys and values is read
            return q
        return attend_all(layer, q, k, v, index)

    model.body(packed.tokens, packed.positions, attend, rows=packed.cell[:0])
    if cache.tables is not None:  # chunks as far as the longest sequence fills them
        local = torch.arange(-(-max(lengths) // cache.tables.chunk_size), device=packed.cell.device)
        chunks = (cache.tables.first[[*slots], None] + local).flatten()
        for layer in range(model.config.layers):
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
):
    """One step: feed every slot its token at its position, return hidden states [B, d].

    Row b depends on slot b only, bitwise: matrix products always have all B rows, attention is
    computed for each slot apart, how many keys it reads depends on its own row, and masked keys add
    exact zeros.
    """
    c, reads, tables = model.config, [], None
    sparse = sparse_kernels(c, positions.device)
    if sparse is not None:
        tables = cache.tables._replace(q_pos=positions)
        tables = tables._replace(blocks=sparse.plan_blocks(tables))
    plan_dense, attend_dense = dense_kernels(c, cache.racks[0].kv)
    for rack in cache.racks:
        if n := rows_to_read(rack):
            slots = rack.slots[:n] if reads else ...  # of the first rack: every slot
            length = rack.kv.shape[3]
            # a sequence that has moved on still writes into its first row, which nobody reads
            at = positions[slots].clamp(max=length - 1)  # [n]
            place = (torch.arange(n, device=at.device), at)
            if reads:
                at = at.masked_fill(rack.slots[:n] < 0, -1)  # nobody's row
            plan = None if sparse else plan_dense(at, length, c.kv_heads)
            reads.append((rack, n, slots, place, plan))

    def attend(layer, q, k, v, index):
        outs = []
        for rack, n, slots, place, plan in reads:
            keys, values = rack.kv[:, layer, :n]
            keys[place] = fitted(k[slots], keys)
            values[place] = fitted(v[slots], values)
            if sparse is None:  # every query attends to the keys of its slot up to its own
                outs.append(attend_dense(q[slots], keys, values, plan))
        if outs:
            return outs[0] if len(outs) == 1 else torch.cat(outs).index_select(0, cache.place)
        # every query selects chunks of its slot by their means, and attends to those
        if index is not None:
            cache.scored[layer][reads[0][3]] = fitted(index[1][:, None], cache.scored)
        renew_means(cache, layer, tables.own)
        kept = *cache.racks[0].kv, cache.scored, cache.means
        k, v, scored, means = (x[layer].flatten(0, 1) for x in kept)  # [B * T, H, D or E]
        if index is not None:
            index = (index[0].contiguous(), scored[:, 0], index[2])
        return sparse.dsa_attention(q.contiguous(), k, v, tables, c.top_k, index, means)

    return model.body(tokens, positions, attend)


def dense_kernels(config: ModelConfig, kv: Tensor) -> tuple[Callable, Callable]:
    """A function that is called once a step, and one that attends with what it has returned."""
    if use_triton(config, kv.device) and kv.dtype != FLOAT8:
        from dsa_triton import WIDTHS, dense_decode, plan_dense

        if config.head_width in WIDTHS:
            return plan_dense, dense_decode
    return hide_future, attend_rows


def hide_future(positions: Tensor, length: int, *_) -> Tensor:
    """What is added to logits [n, length]: -inf after the positions [n]; -1 is taken for 0."""
    keys = torch.arange(length, device=positions.device)
    future = keys > positions.clamp(min=0)[:, None]
    return torch.where(future, -torch.inf, 0.0)


def attend_rows(
    q,  # [n, Hq, D]
    k,  # [n, T, Hkv, D]
    v,  # [n, T, Hkv, D]
    mask,  # [n, T] of 0 and -inf
):
    """One query a row on its cached keys -> [n, Hq, D].

    SDPA gets the G query heads of a key head where it expects queries: so they share its keys.
    """
    grouped = q.unflatten(1, (k.shape[2], -1))  # [n, Hkv, G, D]
    mask = mask[:, None, None].expand(-1, -1, grouped.shape[2], -1).to(q.dtype)
    k, v = (x.transpose(1, 2).to(q.dtype) for x in (k, v))  # [n, Hkv, T, D]
    return F.scaled_dot_product_attention(grouped, k, v, attn_mask=mask).flatten(1, 2)


# ------------------------------------------------------------------------------- for speed


def captures(config: ModelConfig) -> bool:
    """Whether a decode step can be a CUDA graph: dsa.py makes the host wait for the GPU."""
    return config.attention == "dense" or config.kernels != "spec"


def captured(
    step: Callable,  # inputs -> results
    inputs,  # tokens, positions, uniform numbers and tasks, [B] each
    graphs,  # the graph, its inputs and results; empty: none was captured yet
) -> tuple:
    """step(inputs), run as a CUDA graph.

    A step launches hundreds of kernels, which takes longer than to run them; a graph launches them
    all at once. On an H100 a step of `tiny` takes 0.19 ms instead of 1.09, of `medium` 0.94
    instead of 3.2.

    A graph repeats what was done with the same memory. So inputs are copied to a fixed place, and
    weights, output matrix and the places of rows may change in place only. When a rack gets more
    rows (`reserve`), a new graph is captured.
    """
    if not graphs:
        places = [value.clone() for value in inputs]
        step(places)  # what libraries set up at their first call cannot be captured
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            results = step(places)
        graphs[:] = graph, places, results
    graph, places, results = graphs
    for place, value in zip(places, inputs, strict=True):
        place.copy_(value)
    graph.replay()
    return results
