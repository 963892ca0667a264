"""cache.py: generation with the GPT: a cache of keys and values, prefill, one token per step.

A cache has a static batch of slots, one running sequence each. Sequences lie in racks: every slot
has a row of 32 positions, and a sequence that outgrows its row moves to a rack with longer rows
(128, 512, ..., the capacity), of which there are as many as were ever needed at once. So memory is
about what sequences use, and not slots times capacity. `prefill` writes whole sequences into their
rows; `decode` feeds every slot one token. Both write by `remember`.
A slot's numbers depend, bitwise on CPU, on its own tokens and on the static shapes only: not on its
neighbours, nor on how long they are.
Sparse attention keeps the mean key of every chunk, too: a step reads those means and what they
select, and not the whole context. It does not save memory: every row has the capacity.
Left out: sampling, episodes, weight swaps (rollout.py).

Axes: B slots · n rows of a rack, T positions of each · L layers · K chunks of a slot
      Hq, Hkv heads · G = Hq / Hkv · D head width · E indexer width
"""

from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

import dsa
from model import GPT, attend_packed, pack_tokens, padded, sparse_kernels

MIN_ROWS = 16  # fewest rows of a matrix product: below 8 the CPU library sums in another order
SHORT = 32  # positions of the shortest rows


@dataclass(eq=False)
class Rack:
    """Rows of one length; `slots` tells whose sequence lies in each (0 where nobody's does)."""

    k: Tensor  # [L, n, T, Hkv, D]
    v: Tensor  # [L, n, T, Hkv, D]
    slots: Tensor  # [n]
    free: list[int] = field(default_factory=list)


@dataclass(eq=False)
class Cache:
    """Keys and values of a static batch of slots; a slot's positions 0 .. n-1 are valid."""

    racks: list[Rack]  # by length; in the first, row b is slot b's for ever
    rack: np.ndarray  # [B] in which rack its sequence lies, and in which row
    row: np.ndarray  # [B]
    place: Tensor  # [B] the number of this row, through all racks
    scored: Tensor | None = None  # keys that selection scores (dsa): k, or [L, B, T, 1, E]
    means: Tensor | None = None  # mean keys of chunks (dsa): [L, B, K, Hkv, D] or [L, B, K, 1, E]
    tables: dsa.Tables | None = None  # where the chunks lie (dsa)


def make_cache(model: GPT, slots: int, capacity: int) -> Cache:
    """An empty cache; capacity is rounded up to PAD_BLOCK."""
    c, T = model.config, padded(capacity)
    sparse = sparse_kernels(c, model.flat.device) is not None
    lengths = [SHORT * 4**i for i in range(9) if not sparse and SHORT * 4**i <= T / 2] + [T]
    number = torch.arange(slots, device=model.flat.device)
    racks = [make_rack(model, n=0, T=length, slots=number[:0]) for length in lengths]
    racks[0] = make_rack(model, n=slots, T=lengths[0], slots=number)
    cache = Cache(racks, np.zeros(slots, np.int64), np.arange(slots), number.clone())
    if sparse:
        k = cache.scored = racks[0].k
        if c.indexed:
            cache.scored = k.new_zeros(c.layers, slots, T, 1, c.index_width)
        cache.tables = dsa.cache_tables(torch.zeros_like(number), T, c.chunk_size)
        cache.means = cache.scored  # single keys are their own means
        if c.chunk_size > 1:
            cache.means = torch.zeros_like(cache.scored[:, :, : cache.tables.widest])
    return cache


def make_rack(model: GPT, n: int, T: int, slots: Tensor) -> Rack:
    """Empty rows. Dense attention reads whole heads, so there a head's keys lie together; sparse
    attention gathers positions, so there a position's heads do. The axes are the same in both."""
    c, like = model.config, model.flat
    if sparse_kernels(c, like.device) is None:
        k, v = like.new_zeros(2, c.layers, n, c.kv_heads, T, c.head_width).transpose(3, 4)
    else:
        k, v = like.new_zeros(2, c.layers, n, T, c.kv_heads, c.head_width)
    return Rack(k, v, slots)


# ------------------------------------------------------------------ a row for every sequence


def reserve(cache: Cache, lengths: np.ndarray) -> bool:
    """Give every slot the shortest row for `lengths` [B] positions; a sequence that has grown moves
    with its keys. True when a rack got more rows: captured graphs know the old ones."""
    wanted = np.searchsorted([rack.k.shape[2] for rack in cache.racks], lengths)
    changed, grown = np.flatnonzero(wanted != cache.rack), False
    for b in changed.tolist():
        old, new = cache.racks[cache.rack[b]], cache.racks[wanted[b]]
        row = b
        if wanted[b]:
            if not new.free:
                add_rows(new)
                grown = True
            row = new.free.pop()
            new.slots[row] = b
            T = min(old.k.shape[2], new.k.shape[2])
            for there, here in ((new.k, old.k), (new.v, old.v)):
                there[:, row, :T] = here[:, cache.row[b], :T]
        if cache.rack[b]:
            old.free.append(int(cache.row[b]))
            old.slots[cache.row[b]] = 0
        cache.rack[b], cache.row[b] = wanted[b], row
    if len(changed):
        before = np.cumsum([0] + [len(rack.slots) for rack in cache.racks])
        cache.place.copy_(torch.from_numpy(before[cache.rack] + cache.row))
    return grown


def add_rows(rack: Rack) -> None:
    """Half as many rows again, and one."""
    n = len(rack.slots)
    more = n // 2 + 1

    def longer(x: Tensor) -> Tensor:  # [L, n, T, Hkv, D], in the same order of memory
        x = x.transpose(2, 3)
        return torch.cat([x, x.new_zeros(len(x), more, *x.shape[2:])], 1).transpose(2, 3)

    rack.k = longer(rack.k)
    rack.v = longer(rack.v)
    rack.slots = torch.cat([rack.slots, rack.slots.new_zeros(more)])
    rack.free += range(n, n + more)


def cache_bytes(cache: Cache) -> tuple[int, int]:
    """What keys and values take now, and what slots times capacity would."""
    position = 2 * cache.racks[0].k[:, :1, :1].nbytes
    now = sum(len(rack.slots) * rack.k.shape[2] for rack in cache.racks)
    return position * now, position * len(cache.rack) * cache.racks[-1].k.shape[2]


def remember(
    cache: Cache,
    layer: int,
    places: list,  # for each rack that is written: its number, rows, positions, which of the N
    chunks: Tensor | None,  # ids of the chunks in which they lie (dsa)
    keys: tuple,  # k and v [N, Hkv, D]; the indexer's queries, keys [N, E] and weights, or None
) -> None:
    """Put the keys and values of tokens in their places."""
    k, v, index = keys
    for number, rows, positions, tokens in places:
        rack = cache.racks[number]
        rack.k[layer][rows, positions] = k[tokens]
        rack.v[layer][rows, positions] = v[tokens]
        if index is not None:
            cache.scored[layer][rows, positions] = index[1][tokens, None]
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
    prefill(model, cache, [*first.values()], [prompts[slot][1] for slot in first.values()])
    for slot, (group, tokens) in prompts.items():
        rack, row = cache.racks[cache.rack[slot]], cache.row[slot]
        # what the slot holds of its first tokens (means: at least of their chunks)
        rows = [rack.k[:, row], rack.v[:, row]]
        rows += [x[:, slot] for x in (cache.scored, cache.means) if x is not None]
        parts = [x[:, : len(tokens)] for x in rows]
        if group not in known:
            known[group] = [x.clone() for x in parts]
        for part, ready in zip(parts, known[group], strict=True):
            part.copy_(ready)


@torch.inference_mode()
def prefill(
    model: GPT,
    cache: Cache,
    slots: list,  # [B]
    sequences: list,  # B arrays or lists of token ids
) -> None:
    """Write keys and values of whole sequences into their rows, one sequence a slot.

    Only sequences whose grids have the same width go together: SDPA's order of summation changes
    with the width (from 200 tokens on, torch 2.13, CPU).
    """
    widths = {}  # width of the grid -> slots and their sequences
    for slot, sequence in zip(slots, sequences, strict=True):
        widths.setdefault(padded(len(sequence)), []).append((slot, sequence))
    for same in widths.values():
        _prefill_width(model, cache, *zip(*same, strict=True))


def _prefill_width(model: GPT, cache: Cache, slots: tuple, sequences: tuple) -> None:
    lengths = [len(s) for s in sequences]
    N = sum(lengths)
    filler = [[0]] * (MIN_ROWS - N)  # too few rows change the rounding
    packed = pack_tokens([*sequences, *filler], model.flat.device)
    owner, places = np.repeat(slots, lengths), []  # [N] slots
    for number in sorted({*cache.rack[owner].tolist()}):
        own = torch.from_numpy(np.flatnonzero(cache.rack[owner] == number)).to(packed.tokens.device)
        rows = torch.from_numpy(cache.row[owner]).to(own.device)[own]
        places.append((number, rows, packed.positions[own], own))
    chunks = None
    if cache.tables is not None:  # as far as the longest sequence fills them
        local = torch.arange(-(-max(lengths) // cache.tables.chunk_size), device=own.device)
        chunks = (cache.tables.first[[*slots], None] + local).flatten()
    attend_all = attend_packed(model.config, packed, cache.racks[-1].k.shape[2])

    def attend(layer, q, *keys):
        remember(cache, layer, places, chunks, keys)
        if layer == model.config.layers - 1:  # nothing but its keys and values is read
            return q
        return attend_all(layer, q, *keys)

    model.body(packed.tokens, packed.positions, attend, rows=packed.cell[:0])


# ------------------------------------------------------------------------ one token a slot


@torch.no_grad()
def decode(
    model: GPT,
    cache: Cache,
    tokens: Tensor,  # [B]
    positions: Tensor,  # [B]
) -> Tensor:
    """One step: feed every slot its token at its position, return hidden states [B, d].

    Row b depends on slot b only, bitwise: shapes are static, how many keys a slot reads depends on
    its own row, and masked keys add exact zeros.
    """
    c, everybody = model.config, slice(None)
    places, masks, chunks = [], [], None
    for number, rack in enumerate(cache.racks):
        if n := len(rack.slots):
            T = rack.k.shape[2]
            at = positions if number == 0 else positions[rack.slots]
            tokens_of = everybody if number == 0 else rack.slots
            rows = torch.arange(n, device=at.device)
            # who has moved on writes into a row that nobody reads
            places.append((number, rows, at.clamp(max=T - 1), tokens_of))
            future = torch.arange(T, device=at.device) > at[:, None]  # [n, T]
            masks.append(model.flat.new_zeros(future.shape).masked_fill_(future, -torch.inf))
    if cache.tables is not None:  # every query selects chunks of its slot by their means
        tables = dsa.advance(cache.tables, positions + 1)
        chunks = tables.own
        dsa_attention = sparse_kernels(c, positions.device)

    def attend(layer, q, *keys):
        remember(cache, layer, places, chunks, keys)
        if cache.tables is None:  # every query attends to the keys of its slot up to its own
            outs = []
            for (number, _, _, tokens_of), mask in zip(places, masks, strict=True):
                rack = cache.racks[number]
                outs.append(attend_rows(q[tokens_of], rack.k[layer], rack.v[layer], mask))
            return outs[0] if len(outs) == 1 else torch.cat(outs).index_select(0, cache.place)
        k, v, scored, means = (
            x[layer].flatten(0, 1)  # [B * T, H, D or E]
            for x in (cache.racks[0].k, cache.racks[0].v, cache.scored, cache.means)
        )
        index = keys[-1]
        if index is not None:
            index = (index[0].contiguous(), scored[:, 0], index[2])
        return dsa_attention(q.contiguous(), k, v, tables, c.top_k, index, means)

    return model.body(tokens, positions, attend)


def attend_rows(
    q: Tensor,  # [n, Hq, D]
    k: Tensor,  # [n, T, Hkv, D]
    v: Tensor,  # [n, T, Hkv, D]
    mask: Tensor,  # [n, T] of 0 and -inf
) -> Tensor:
    """One query a row on its cached keys -> [n, Hq, D].

    SDPA gets the G query heads of a group where it expects queries: so they share their keys.
    """
    grouped = q.unflatten(1, (k.shape[2], -1))  # [n, Hkv, G, D]
    mask = mask[:, None, None].expand(-1, -1, grouped.shape[2], -1)
    k = k.transpose(1, 2)  # [n, Hkv, T, D]
    v = v.transpose(1, 2)
    return F.scaled_dot_product_attention(grouped, k, v, attn_mask=mask).flatten(1, 2)


# ------------------------------------------------------------------------------- for speed


def captured(
    step: Callable,  # inputs -> results
    inputs: list,  # tokens, positions and uniform numbers, [B] each
    graphs: list,  # the graph, its inputs and results; empty: none was captured yet
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
