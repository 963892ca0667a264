"""dsa.py: sparse attention in plain PyTorch, the readable specification of nanoGLM's "DSA".

Three things are called DSA. Two of them are this file, with one code path; `chunk_size` decides:
  * DeepSeek Sparse Attention (DeepSeek-V3.2-Exp, GLM-5: arXiv 2602.15763): a learned "lightning
    indexer" scores single tokens, and every query attends to the best 2048: `chunk_size=1`.
  * Dual-Stage Attention: stage 1 scores chunks of 512 keys and keeps 8, stage 2 is ordinary
    attention inside the kept chunks: `chunk_size=512, top_k=8`. On GPUs 64 is a fast compromise.
  * Divergence-Suppressed Alignment is no attention at all: see the KL window in methods/dampers.py.

Two rules hold for every chunk size. Only chunks ENTIRELY in the past compete, so no future token
leaks through a mean. A query's own chunk is always selected, and counts as one of the `top_k`
(GLM-5 has no such rule; at `chunk_size=1` it forces no more than the query's own token).

`naive_attention` is all of it for one sequence. The rest computes the same for many queries: score
(`mean_scores`, `index_scores`), select (`top_chunks`), attend (`sparse_attention`). `Tables` say
where chunks and queries lie, so packed training, prefill and cached decode are one code path.
A query's numbers depend, bitwise, on its own sequence and on the shapes only. What selection saves
is compute and bytes read, not the memory of a cache.
Left out: neighbours that are scored together (fast/tiles.py), kernels (dsa_triton.py), the
indexer's parameters (methods/indexer.py) and its training (pretrain.py), low-precision keys.

Legend   N queries   M key rows        Hq query heads     Hkv key heads    G = Hq / Hkv
         B slots     C keys per chunk  K most chunks of one sequence (`widest`)    NC all chunks
         S selected chunks per query   D head width       J indexer heads   E indexer head width
         Hs = Hkv or 1: heads that select for themselves  n, c, t: queries, chunks, tiles of a part
"""

from typing import NamedTuple

import torch
from torch import Tensor

from fast.tiles import at_least_float32, blocks_of, by_tiles, gather, numbers, sortable

QUERY_BLOCK = 256  # so many queries are scored at once
GATHER_ELEMENTS = 1 << 19  # attention gathers so many elements of keys at once


# ---------------------------------------------------------------------------- the naive form


def naive_attention(
    q,  # [T, Hq, D]
    k,  # [T, Hkv, D]
    v,  # [T, Hkv, D]
    chunk_size: int,
    top_k: int,
    index=None,  # q_index [T, J, E], k_index [T, E], weights [T, J]
) -> Tensor:
    """Sparse attention of ONE sequence, query by query -> [T, Hq, D].

    Chunks are scored by the indexer if there is an index, else by the summed queries of a group.
    """
    keys = k if index is None else index[1]
    means = torch.stack([chunk.mean(0) for chunk in keys.split(chunk_size)])  # [chunks, ...]
    group = q.unflatten(1, (k.shape[1], -1))  # [T, Hkv, G, D], query heads that share a key head
    out = torch.empty_like(group)
    for t in range(len(q)):
        own = t // chunk_size  # the query's own chunk; all before it are in the past
        for h in range(k.shape[1]):
            if index is None:
                scores = means[:own, h] @ group[t, h].sum(0)
            else:
                q_index, _, weights = index
                scores = weights[t] @ (q_index[t] @ means[:own].T).relu()
            best = scores.argsort(descending=True, stable=True)  # ties: the lowest id first
            selected = [own, *best.tolist()][:top_k]
            seen = [s for s in range(t + 1) if s // chunk_size in selected]
            logits = group[t, h] @ k[seen, h].T / q.shape[2] ** 0.5
            out[t, h] = logits.softmax(-1) @ v[seen, h]
    return out.flatten(1, 2)


# ----------------------------------------------------------- tables: where chunks and queries lie


class Tables(NamedTuple):
    """Where chunks and queries lie; tensors are int64, positions count inside a sequence.

    The chunks of one sequence have consecutive ids, `first` + local id, and lie one after the
    other. If there are as many queries as key rows, query n is key row n. Keys after a query's
    `q_pos` are never read: they may hold anything, even NaN (not so for the kernels that let
    neighbours read together, see dsa_triton.py).
    """

    chunk_size: int  # C
    widest: int  # K, columns of the scores
    rows: int  # M
    sequences: int
    cached: bool  # one query a slot, and every slot has K chunks
    row: Tensor  # [NC] first key row of the chunk
    q_pos: Tensor  # [N] position of the query; -1: an empty slot, which sees nothing
    first: Tensor  # [N] id of the first chunk of the query's sequence
    blocks: Tensor | None = None  # the kernels' plan (dsa_triton.py), made once for all layers

    @property
    def past(self) -> Tensor:
        """[N] chunks entirely in a query's past = local id of its own; -1: an empty slot."""
        return self.q_pos // self.chunk_size

    @property
    def own(self) -> Tensor:
        """[N] id of the query's own chunk; of an empty slot, of its first."""
        return self.first + self.past.clamp(min=0)


def packed_tables(
    edges: Tensor,  # cu_seqlens
    chunk_size: int,
    capacity=None,
) -> Tables:
    """Tables for sequences packed one after the other, where query n is key row n.

    edges: int64 [sequences + 1], 0 first, never decreasing, the number of tokens last;
    the tables lie on its device. Chunks start anew with every sequence. Shapes are made for
    sequences of `capacity` tokens, by default the longest here; with a fixed capacity a sequence's
    result is bitwise the same whatever it is packed with, as a generator's prefill wants it.
    """
    power = chunk_size.bit_count() == 1 and 1 <= chunk_size <= 512
    assert power, f"chunk_size must be a power of two from 1 to 512, got {chunk_size}"
    lengths = edges.diff()
    rising = edges[0] == 0 < edges[-1] and (lengths >= 0).all()
    assert rising, f"cu_seqlens must start at 0, never decrease and end > 0, got {edges.tolist()}"
    longest = lengths.max().item()
    capacity = capacity or longest
    assert capacity >= longest, f"capacity must be >= {longest}, got {capacity}"
    sequence = torch.repeat_interleave(lengths)  # [N] sequence of a query
    q_pos = numbers(len(sequence), edges) - edges[sequence]
    opens = q_pos % chunk_size == 0  # [N] whether a chunk begins here
    return Tables(
        chunk_size=chunk_size,
        widest=-(-capacity // chunk_size),
        rows=len(q_pos),
        sequences=len(lengths),
        cached=False,
        row=opens.nonzero()[:, 0],
        q_pos=q_pos,
        first=opens.cumsum(0) - 1 - q_pos // chunk_size,
    )


def cache_tables(
    lengths,  # int64 [B], keys in each slot with the newest one, 0: an empty slot
    capacity: int,
    chunk_size: int,
) -> Tables:
    """Tables for cached decode: one query per slot, at the slot's newest key.

    The cache [B, capacity, Hkv, D] is passed to attention as [B * capacity, Hkv, D]. All shapes
    depend on B and capacity alone: nothing in a slot can change the arithmetic of another.
    """
    edges = numbers(len(lengths) + 1, lengths) * capacity
    full = packed_tables(edges, chunk_size)  # as if all slots were full
    first = full.first[::capacity].clone()  # a view would keep a number for every key
    return full._replace(cached=True, first=first, q_pos=lengths - 1)


def plan_blocks(tables: Tables) -> None:
    """Nothing: only the kernels have a plan (dsa_triton.py)."""


def chunk_means(
    k,  # [M, H, D]
    tables: Tables,
    chunks=...,  # int64 [c]
) -> Tensor:
    """Mean key of every chunk, or of the `chunks` given -> [NC or c, H, D] (float32 or better).

    Means of complete chunks never change: a decoder keeps them, refreshes those of the queries'
    `own` chunks, and does not read its cache again. The mean of a chunk that is short or half
    filled is meaningless and harmless: only complete chunks are ever candidates. At C = 1 the keys
    are their own means and need no copy.
    """
    rows = tables.row[chunks, None] + numbers(tables.chunk_size, k)  # [c, C]
    return gather(k, rows.clamp(max=len(k) - 1)).mean(1)


# ---------------------------------------------------------------------------------- score


def mean_scores(
    q,  # [N, Hq, D]
    means,  # [NC, Hkv, D] of the keys
    tables: Tables,
) -> Tensor:
    """Scores without parameters: the group's summed query times the mean key of a chunk.

    -> [N, Hkv, K] by local chunk id, -inf where the chunk is no candidate. Mean-pooled keys are
    MoBA's gate (arXiv 2502.13189), one selection per group of query heads is NSA's (arXiv
    2502.11089); the plain sum over the group, a G times cheaper product, is ours.
    """

    def score(keys, group):  # [t, K, Hkv, D], [t, n, Hkv, D]
        # always contiguous: other strides, other rounding
        keys = keys.transpose(1, 2).contiguous()  # [t, Hkv, K, D]
        group = group.transpose(1, 2).contiguous()  # [t, Hkv, n, D]
        return (group @ keys.mT).transpose(1, 2)  # [t, n, Hkv, K]

    group = at_least_float32(q).unflatten(1, (means.shape[1], -1)).sum(2)  # [N, Hkv, D]
    return by_tiles(score, means, tables, group)


def index_scores(
    q_index,  # [N, J, E]
    means,  # [NC, 1, E] of the indexer's keys
    weights,  # [N, J]
    tables: Tables,
) -> Tensor:
    """Lightning indexer I[t, s] = sum_j w[t, j] * ReLU(q[t, j] . k[s]) (DeepSeek-V3.2-Exp report).

    -> [N, 1, K], one score for all heads, differentiable. For C > 1, s is a chunk and k[s] the mean
    of its keys: ours, C times cheaper than scoring tokens, with the same parameters, and the KL to
    a chunk's attention mass can train it.
    """
    shape = q_index.shape[:2]
    assert weights.shape == shape, f"weights must be {shape}, got {weights.shape}"

    def score(keys, q_index, weights):  # [t, K, 1, E], [t, n, J, E], [t, n, J]
        hits = torch.einsum("tnje,tke->tnjk", q_index, keys.squeeze(2)).relu()
        return torch.einsum("tnjk,tnj->tnk", hits, weights)[:, :, None]  # [t, n, 1, K]

    return by_tiles(score, means, tables, q_index, weights)


# --------------------------------------------------------------------------------- select


@torch.no_grad()
def top_chunks(
    scores,  # [N, Hs, K] by local chunk id
    tables: Tables,
    top_k: int,
) -> Tensor:
    """Selects each query's own chunk, then the best of its past, deterministically.

    -> int64 [N, Hs, min(top_k, K)]: unique GLOBAL ids, the own chunk first, then by score
    descending, ties to the lowest id, and -1 where there are no more. Scores are compared as
    float32, with 0.0 = -0.0; only candidates are looked at, whatever the other scores say.
    """
    width = tables.widest
    past = tables.past[:, None, None]
    local = numbers(width, scores)
    key = sortable(scores, local)
    key = key.masked_fill(local > past, -(1 << 63))
    key = key.masked_fill(local == past, (1 << 63) - 1)  # its own chunk has local id `past`

    count = min(top_k, width)
    best = key.topk(count, dim=-1).indices  # [N, Hs, S]
    ids = best + tables.first[:, None, None]
    return ids.masked_fill(local[:count] > past, -1)


@torch.no_grad()
def select_chunks(
    q,  # [N, Hq, D]
    k,  # [M, Hkv, D]
    tables: Tables,
    top_k: int,
    index=None,  # q_index [N, J, E], k_index [M, E], weights [N, J]
    means=None,  # ready-made `chunk_means` of the keys that are scored
) -> Tensor:
    """Scores and selects block by block: memory linear in N, where all scores are N x K.

    Scores are those of `index_scores` if there is an index, else of `mean_scores`. Returns what
    `top_chunks` does. Selection has no gradient.
    """
    if index is not None:
        q, k, weights = index
        k = k[:, None]  # one key head
    if means is None:
        means = chunk_means(k, tables)
    picks = []
    for part, block in blocks_of(tables, len(q) if tables.cached else QUERY_BLOCK):
        if index is None:
            scores = mean_scores(q[part], means, block)
        else:
            scores = index_scores(q[part], means, weights[part], block)
        picks.append(top_chunks(scores, block, top_k))
    return torch.cat(picks)


# --------------------------------------------------------------------------------- attend


def sparse_attention(
    q,  # [N, Hq, D], float64, float32, bfloat16 or float16
    k,  # [M, Hkv, D] of the same dtype
    v,  # [M, Hkv, D] of the same dtype
    sel,  # int64 [N, Hkv or 1, S], global chunk ids, -1: none
    tables: Tables,
) -> Tensor:
    """Softmax attention of every query to the keys of its selected chunks up to its own.

    -> [N, Hq, D]; a query that sees nothing gets 0. Only selected keys are read, a block of queries
    at a time. With gradients, S * C keys and values per query are kept for the backward pass.
    """
    gathered = k[0].numel() * sel.shape[2] * tables.chunk_size  # elements of a query's keys
    heads = numbers(k.shape[1], k)
    offset = numbers(tables.chunk_size, k)
    scale = q.shape[2] ** -0.5
    outs = []
    for part, block in blocks_of(tables, max(1, GATHER_ELEMENTS // gathered)):
        chunk = sel[part][..., None]  # [n, Hs, S, 1]; -1 is the last one here, and hidden
        first, newest, own = (
            x[:, None, None, None] for x in (block.first, block.q_pos, tables.row[block.own])
        )
        position = (chunk - first) * tables.chunk_size + offset  # in its sequence
        hidden = (chunk < 0) | (position > newest)  # [n, Hs, S, C]
        # What is hidden is not read: in its place stands the first key of the query's own chunk,
        # which all may see. So stale cache rows cannot turn a probability 0 * NaN into NaN.
        rows = torch.where(hidden, own, tables.row[chunk] + offset).flatten(2)
        rows = rows * len(heads) + heads[:, None]  # [n, Hkv, S * C] rows of [M * Hkv, D]
        keys = gather(k.flatten(0, 1), rows)  # [n, Hkv, S * C, D]
        values = gather(v.flatten(0, 1), rows)
        hidden = hidden.flatten(2)[:, :, None]  # [n, Hs, 1, S * C]
        queries = at_least_float32(q[part]).unflatten(1, (len(heads), -1))  # [n, Hkv, G, D]
        logits = queries * scale @ keys.mT  # [n, Hkv, G, S * C]
        weights = logits.masked_fill(hidden, torch.finfo(logits.dtype).min).softmax(-1)
        out = (weights @ values).masked_fill(hidden.all(-1, keepdim=True), 0)
        outs.append(out.flatten(1, 2).to(q.dtype))
    return torch.cat(outs)


def dsa_attention(
    q,  # [N, Hq, D]
    k,  # [M, Hkv, D]
    v,  # [M, Hkv, D]
    tables: Tables,
    top_k: int,
    index=None,
    means=None,
) -> Tensor:
    """Score, select and attend -> [N, Hq, D].

    `index` and `means` as for `select_chunks`. While top_k covers all chunks this is dense
    attention.
    """
    sel = select_chunks(q, k, tables, top_k, index, means)
    return sparse_attention(q, k, v, sel, tables)
