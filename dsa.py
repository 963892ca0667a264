"""Sparse attention in plain PyTorch: the readable specification of nanoGLM's "DSA".

Three things are called DSA. Two of them are this file, with one code path and one knob:
  * DeepSeek Sparse Attention (DeepSeek-V3.2-Exp, GLM-5: arXiv 2602.15763): a learned "lightning
    indexer" scores single tokens and every query attends to the best 2048: `chunk_size=1`.
  * Dual-Stage Attention: stage 1 scores chunks of 512 keys and keeps 8, stage 2 is ordinary
    attention inside the kept chunks: `chunk_size=512, top_k=8`. On GPUs 64 is the fast middle.
  * Divergence-Suppressed Alignment is no attention at all: see the KL-window damper in losses.py.

Three steps: score the chunks of a query's past (`mean_scores` or `index_scores`), select the best
(`top_chunks`), attend to what was selected (`sparse_attention`); `dsa_attention` does all three.
Two rules hold for every chunk size. Only chunks ENTIRELY in the past compete, so no future token
leaks through pooling. A query's own chunk is always selected, and counts as one of the `top_k`
(GLM-5 has no such rule; at `chunk_size=1` it forces no more than the query's own token).

Tables describe packed training, prefill and cached decode alike, so the attention knows neither
batches nor caches: it follows rows and positions. What selection saves is compute and bytes read;
it saves no KV capacity.

Left out: kernels (dsa_triton.py), the indexer's training stages (pretrain.py), low-precision keys.

Legend   N queries   M key rows        Hq query heads     Hkv key heads    G = Hq / Hkv
         B slots     C keys per chunk  K most chunks of one sequence (`widest`)    NC all chunks
         S selected chunks per query   D head width       J indexer heads   E indexer head width
         Hs = Hkv or 1: heads that select for themselves  n, c: queries, chunks of one part
"""

from collections.abc import Callable, Iterator
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

QUERY_BLOCK = 256  # queries scored at once
GATHER_ELEMENTS = 1 << 19  # attention gathers keys for as many queries at once as fit in this
DTYPES = {torch.float64, torch.float32, torch.bfloat16, torch.float16}
Index = tuple[Tensor, Tensor, Tensor]  # what an Indexer returns: q_index, k_index, weights
Span = tuple[int, int, int, int]  # queries start ... stop - 1, chunks low ... high - 1
MaybeTensor = Tensor | None


class Tables(NamedTuple):
    """Where chunks and queries lie; tensors are int64, positions count inside a sequence.

    The chunks of one sequence have consecutive ids: `first` + local id. Key rows with `pos` >
    `q_pos` are never read, so they may hold anything, even NaN.
    """

    chunk_size: int  # C
    widest: int  # K, columns of the scores
    rows: int  # M
    row: Tensor  # [NC] first key row of the chunk
    pos: Tensor  # [NC] position of the chunk's first key
    len: Tensor  # [NC] key rows the chunk has (in a cache: filled or not)
    q_pos: Tensor  # [N] position of the query; -1: an empty slot, which sees nothing
    first: Tensor  # [N] id of the first chunk of the query's sequence
    past: Tensor  # [N] number of candidates = local id of the query's own chunk; -1: empty slot
    spans: tuple[Span, ...]  # what to score together; (): a cache, every query has its own chunks


def packed_tables(cu_seqlens: Tensor, chunk_size: int) -> Tables:
    """Tables for sequences packed one after the other, where query n is key row n.

    cu_seqlens: integer [sequences + 1], 0 first, never decreasing, the number of tokens last;
    the tables lie on its device. Chunks start anew with every sequence.
    Raises ValueError for other edges or a chunk size that is no power of two in 1..512.
    """
    edges = _integers("cu_seqlens", cu_seqlens, chunk_size).cpu()
    lengths = edges.diff()
    good = len(lengths) and edges[0] == 0 and edges[-1] > 0 and (lengths >= 0).all()
    _require(good, f"cu_seqlens must start at 0, never decrease and end > 0, got {edges.tolist()}")

    chunks = (lengths + chunk_size - 1) // chunk_size  # [sequences]
    before = chunks.cumsum(0) - chunks  # [sequences] chunks of earlier sequences
    owner = torch.repeat_interleave(chunks)  # [NC] sequence of a chunk
    pos = (torch.arange(len(owner)) - before[owner]) * chunk_size
    size = (lengths[owner] - pos).clamp(max=chunk_size)
    sequence = torch.repeat_interleave(lengths)  # [N] sequence of a query
    q_pos = torch.arange(len(sequence)) - edges[sequence]
    first, past = before[sequence], q_pos // chunk_size

    starts = torch.arange(0, len(q_pos), QUERY_BLOCK)
    stops = (starts + QUERY_BLOCK).clamp(max=len(q_pos))
    highs = (first + past)[stops - 1] + 1  # no later chunk is a candidate for the block
    spans = zip(*(x.tolist() for x in (starts, stops, first[starts], highs)), strict=True)
    columns = (edges[owner] + pos, pos, size, q_pos, first, past)
    columns = (column.to(cu_seqlens.device) for column in columns)
    return Tables(chunk_size, int(chunks.max()), len(q_pos), *columns, tuple(spans))


def cache_tables(lengths: Tensor, capacity: int, chunk_size: int) -> Tables:
    """Tables for cached decode: one query per slot, at the slot's newest key.

    lengths: integer [B], keys in each slot with the newest one, 0 for an empty slot. The cache
    [B, capacity, Hkv, D] is passed to attention as [B * capacity, Hkv, D]. All shapes depend on B
    and capacity alone: nothing in a slot can change the arithmetic of another.
    Raises ValueError for lengths outside 0..capacity or a bad chunk size.
    """
    lengths = _integers("lengths", lengths, chunk_size)
    _require(isinstance(capacity, int) and capacity >= 1, f"capacity must be >= 1, got {capacity}")
    slots = torch.arange(len(lengths), device=lengths.device)
    pos = torch.arange(0, capacity, chunk_size, device=lengths.device)  # [K]
    row = (slots[:, None] * capacity + pos).flatten()  # [B * K] slot by slot
    size = (capacity - pos).clamp(max=chunk_size)
    chunks = (row, pos.repeat(len(slots)), size.repeat(len(slots)))
    queries = (lengths, slots * len(pos), lengths)  # advance() fills in q_pos and past
    rows = len(slots) * capacity
    return advance(Tables(chunk_size, len(pos), rows, *chunks, *queries, ()), lengths)


def advance(tables: Tables, lengths: Tensor) -> Tables:
    """Moves cache tables to new lengths, integer [B], without building the chunks again."""
    lengths = _integers("lengths", lengths, tables.chunk_size)
    capacity = tables.rows // max(1, len(tables.first))
    good = not tables.spans and lengths.shape == tables.first.shape and len(lengths)
    good = good and ((lengths >= 0) & (lengths <= capacity)).all()
    _require(good, f"lengths must be in 0..{capacity}, one per slot, got {lengths.tolist()}")
    q_pos = lengths - 1
    return tables._replace(q_pos=q_pos, past=q_pos.div(tables.chunk_size, rounding_mode="floor"))


def chunk_means(k: Tensor, tables: Tables, chunks: MaybeTensor = None) -> Tensor:
    """Mean key of every chunk, or of the given ones.

    k [M, H, D], chunks int64 [c] -> [c or NC, H, D] (half precision: float32). Means of complete
    chunks never change: a decoder keeps them (`update_means`) and does not read its cache again.
    """
    chunks = slice(None) if chunks is None else chunks
    row, size = tables.row[chunks], tables.len[chunks, None]
    offset = torch.arange(tables.chunk_size, device=k.device)
    rows = row[:, None] + torch.minimum(offset, size - 1)  # [c, C]
    keys = k.index_select(0, rows.flatten()).unflatten(0, rows.shape)  # [c, C, H, D]
    keys = keys.to(_work(k)).masked_fill((offset >= size)[..., None, None], 0)
    return keys.sum(1) / size[..., None]


def update_means(means: Tensor, k: Tensor, tables: Tables) -> None:
    """Refreshes in place the mean of each query's own chunk: call it once per decoded token.

    means [NC, H, D] as from `chunk_means`, k [M, H, D] with the new keys written. The mean of a
    half-filled chunk is meaningless and harmless: only complete chunks are ever candidates.
    """
    own = tables.first + tables.past.clamp(min=0)
    means[own] = chunk_means(k, tables, own)


def mean_scores(q: Tensor, k: Tensor, tables: Tables, means: MaybeTensor = None) -> Tensor:
    """Scores without parameters: the group's summed query times the mean key of a chunk.

    q [N, Hq, D], k [M, Hkv, D], means as from `chunk_means` (default: computed) -> [N, Hkv, K]
    by local chunk id, -inf where the chunk is no candidate. Mean-pooled keys are MoBA's gate
    (arXiv 2502.13189), one selection per group of query heads is NSA's (arXiv 2502.11089); the
    plain sum over the group, a G times cheaper product, is ours.
    Raises ValueError for shapes, dtypes or devices that do not fit.
    """
    _check_tensors(q, k, tables)
    means = chunk_means(k, tables) if means is None else means
    q_group = q.to(_work(q)).unflatten(1, (k.shape[1], -1)).sum(2)  # [N, Hkv, D]

    def score(part, keys: Tensor) -> Tensor:
        return torch.einsum("...qhd,...chd->...qhc", q_group[part], keys)

    return _local_scores(score, means, tables)


def index_scores(
    q_index: Tensor, k_index: Tensor, weights: Tensor, tables: Tables, means: MaybeTensor = None
) -> Tensor:
    """Lightning indexer I[t, s] = sum_j w[t, j] * ReLU(q[t, j] . k[s]) (DeepSeek-V3.2-Exp report).

    q_index [N, J, E], k_index [M, E], weights [N, J], means [NC, 1, E] as from
    `chunk_means(k_index[:, None], tables)` -> [N, 1, K], one score for all heads, differentiable.
    For C > 1, s is a chunk and k[s] the mean of its keys: ours, C times cheaper than scoring
    tokens, with the same parameters, and the KL to a chunk's attention mass can train it.
    Raises ValueError for shapes, dtypes or devices that do not fit.
    """
    _check_tensors(q_index, k_index[..., None, :], tables, weights)
    fits = weights.shape == q_index.shape[:2]
    _require(fits, f"weights must be {list(q_index.shape[:2])}, got {list(weights.shape)}")
    means = chunk_means(k_index[:, None], tables) if means is None else means
    q_index, weights = q_index.to(_work(q_index)), weights.to(_work(weights))

    def score(part, keys: Tensor) -> Tensor:
        hits = torch.einsum("...qje,...ce->...qjc", q_index[part], keys.squeeze(-2)).relu()
        return torch.einsum("...qjc,...qj->...qc", hits, weights[part])[..., None, :]

    return _local_scores(score, means, tables)


def _local_scores(score: Callable, means: Tensor, tables: Tables) -> Tensor:
    """Scores every query against its own sequence; score(part of the queries, keys [.., c, H, D])
    -> [.., queries, heads, c]. Nothing N x NC is ever held."""
    _require(len(means) == len(tables.row), f"means must have {len(tables.row)} rows")
    local = torch.arange(tables.widest, device=means.device)
    if tables.spans:
        parts = []
        for start, stop, low, high in tables.spans:
            scores = score(slice(start, stop), means[low:high])  # [queries, heads, high - low]
            # Neighbours of other sequences shared the product; now columns become local ids.
            column = tables.first[start:stop, None] - low + local
            column = column.clamp(max=high - low - 1)[:, None].expand(-1, scores.shape[1], -1)
            parts.append(scores.gather(-1, column))
        scores = torch.cat(parts)
    else:  # a cache: slot b owns chunks b * K ... b * K + K - 1
        scores = score((slice(None), None), means.unflatten(0, (-1, tables.widest))).squeeze(1)
    return scores.masked_fill((local >= tables.past[:, None])[:, None], float("-inf"))


@torch.no_grad()
def top_chunks(scores: Tensor, tables: Tables, top_k: int) -> tuple[Tensor, Tensor]:
    """Selects each query's own chunk, then the best of its past, deterministically.

    scores [N, Hs, K] by local chunk id -> sel int64 [N, Hs, min(top_k, K)] and count int64
    [N, Hs]: unique GLOBAL ids, own chunk first, then by score descending, ties to the lowest id,
    -1 after `count` of them. Scores are compared as float32, with 0.0 = -0.0; only candidates
    are looked at, whatever the other scores say.
    Raises ValueError for top_k < 1 or scores of another shape.
    """
    _require(type(top_k) is int and top_k >= 1, f"top_k must be an integer >= 1, got {top_k!r}")
    n, width = len(tables.q_pos), tables.widest
    fits = scores.dim() == 3 and len(scores) == n and scores.shape[2] == width
    _require(fits, f"scores must be [{n}, heads, {width}], got {list(scores.shape)}")
    past = tables.past[:, None, None]
    local = torch.arange(width, device=scores.device)

    # One int64 per chunk: the float's order in the high half, the id, reversed, in the low half.
    # No two are equal, so topk, whose order among ties is undocumented, is exact here. A stable
    # sort gives the same and takes 4 to 10 times as long for 16k chunks on a CPU.
    bits = (scores.float() + 0.0).view(torch.int32)
    order = torch.where(bits < 0, bits ^ 0x7FFFFFFF, bits).long()
    key = (order << 32) + (0xFFFFFFFF - local)
    limits = torch.iinfo(torch.int64)
    key = key.masked_fill(local > past, limits.min).masked_fill(local == past, limits.max)

    best = key.topk(min(top_k, width), dim=-1).indices  # [N, Hs, S]
    count = (past + 1).clamp(max=top_k).expand(-1, scores.shape[1], -1)  # [N, Hs, 1]
    chosen = torch.arange(best.shape[2], device=best.device) < count
    return torch.where(chosen, best + tables.first[:, None, None], -1), count[..., 0]


@torch.no_grad()
def select_chunks(
    q: Tensor, k: Tensor, tables: Tables, top_k: int, index: Index | None = None, means=None
) -> tuple[Tensor, Tensor]:
    """Scores and selects block by block: memory linear in N, where all scores are N x K.

    Scores are `index_scores(*index)`, or `mean_scores` when index is None; `means` as there.
    Returns (sel, count) of `top_chunks`. Selection has no gradient.
    """
    if means is None:
        means = chunk_means(k if index is None else index[1][:, None], tables)
    sels, counts = [], []
    for part, block in _query_blocks(tables):
        if index is None:
            scores = mean_scores(q[part], k, block, means)
        else:
            scores = index_scores(index[0][part], index[1], index[2][part], block, means)
        sel, count = top_chunks(scores, block, top_k)
        sels.append(sel)
        counts.append(count)
    return torch.cat(sels), torch.cat(counts)


def _query_blocks(tables: Tables) -> Iterator[tuple[slice, Tables]]:
    if not tables.spans:
        yield slice(None), tables
    for start, stop, low, high in tables.spans:
        part = slice(start, stop)
        queries = (tables.q_pos[part], tables.first[part], tables.past[part])
        yield part, Tables(*tables[:6], *queries, ((0, stop - start, low, high),))


def sparse_attention(
    q: Tensor, k: Tensor, v: Tensor, sel: Tensor, tables: Tables, scale: float | None = None
) -> Tensor:
    """Softmax attention of every query to the keys of its selected chunks at `pos` <= `q_pos`.

    q [N, Hq, D], k and v [M, Hkv, D] of one dtype (float64, float32, bfloat16, float16),
    sel int64 [N, Hkv or 1, S] of global chunk ids, -1 = none -> [N, Hq, D]; a query that sees
    nothing gets 0. scale defaults to D ** -0.5. Only selected keys are read, a block of queries
    at a time; the backward pass gathers them again rather than keep S * C keys per query.
    Raises ValueError for a duplicate or foreign chunk id and for inputs that do not fit.
    """
    _check_tensors(q, k, tables, v)
    _require(v.shape == k.shape, f"v must be {list(k.shape)} as k is, got {list(v.shape)}")
    _check_selection(sel, tables, k.shape[1])
    return _GatheredAttention.apply(q, k, v, sel, tables, scale or q.shape[-1] ** -0.5)


class _GatheredAttention(torch.autograd.Function):
    """Autograd would save every gathered key and add a full-size gradient of k per block."""

    @staticmethod
    def forward(ctx, q, k, v, sel, tables, scale):
        ctx.save_for_backward(q, k, v, sel)
        ctx.tables, ctx.scale = tables, scale
        out = torch.empty_like(q)
        for part, rows, hidden in _gather_blocks(k, sel, tables):
            out[part] = _attend(q[part], _gather(k, rows), _gather(v, rows), hidden, scale)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx, grad):
        q, k, v, sel = ctx.saved_tensors
        dq = torch.empty_like(q)
        dk, dv = (torch.zeros_like(x, dtype=_work(x)).flatten(0, 1) for x in (k, v))
        for part, rows, hidden in _gather_blocks(k, sel, ctx.tables):
            inputs = (q[part].to(_work(q)), _gather(k, rows), _gather(v, rows))
            inputs = tuple(x.detach().requires_grad_() for x in inputs)
            with torch.enable_grad():
                out = _attend(*inputs, hidden, ctx.scale)
            dq[part], dkeys, dvalues = torch.autograd.grad(out, inputs, grad[part].to(out.dtype))
            dk.index_add_(0, rows.flatten(), dkeys.flatten(0, 2))
            dv.index_add_(0, rows.flatten(), dvalues.flatten(0, 2))
        return dq, dk.view(k.shape).to(k.dtype), dv.view(v.shape).to(v.dtype), None, None, None


def _gather_blocks(k: Tensor, sel: Tensor, tables: Tables) -> Iterator[tuple[slice, Tensor, Tensor]]:
    """Yields queries, their rows [n, Hkv, S * C] in k.flatten(0, 1), hidden [n, Hs, 1, S * C]."""
    head = torch.arange(k.shape[1], device=k.device)[:, None]
    offset = torch.arange(tables.chunk_size, device=k.device)
    size = GATHER_ELEMENTS // (k[0].numel() * sel.shape[-1] * tables.chunk_size)
    for part in (slice(i, i + max(1, size)) for i in range(0, len(sel), max(1, size))):
        chunk = sel[part, ..., None].clamp(min=0)  # [n, Hs, S, 1]
        q_pos = tables.q_pos[part, None, None, None]
        visible = (sel[part, ..., None] >= 0) & (offset < tables.len[chunk])
        visible = visible & (tables.pos[chunk] + offset <= q_pos)  # [n, Hs, S, C]
        # What is hidden is not read: its lanes get the first key of the query's own chunk, which
        # every query may see. So stale cache rows cannot turn a probability 0 * NaN into NaN.
        own = tables.row[tables.first[part] + tables.past[part].clamp(min=0)]
        rows = torch.where(visible, tables.row[chunk] + offset, own[:, None, None, None])
        yield part, rows.flatten(2) * len(head) + head, ~visible.flatten(2)[:, :, None]


def _gather(x: Tensor, rows: Tensor) -> Tensor:  # [M, Hkv, D], [n, Hkv, S * C]
    x = x.flatten(0, 1).index_select(0, rows.flatten())
    return x.to(_work(x)).unflatten(0, rows.shape)  # [n, Hkv, S * C, D]


def _attend(q: Tensor, keys: Tensor, values: Tensor, hidden: Tensor, scale: float) -> Tensor:
    q = q.to(_work(q)).unflatten(1, (keys.shape[1], -1)) * scale  # [n, Hkv, G, D]
    logits = (q @ keys.mT).masked_fill(hidden, torch.finfo(keys.dtype).min)
    out = logits.softmax(-1) @ values  # [n, Hkv, G, D]
    return out.masked_fill(hidden.all(-1, keepdim=True), 0).flatten(1, 2)


def dsa_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    tables: Tables,
    top_k: int,
    scores: MaybeTensor = None,
    index: Index | None = None,
    means: MaybeTensor = None,
    scale: float | None = None,
) -> Tensor:
    """Score, select and attend: q [N, Hq, D], k and v [M, Hkv, D] -> [N, Hq, D].

    The scores are `scores` [N, Hkv or 1, K] when given, else the indexer's for `index`
    (q_index, k_index, weights), else those of mean-pooled keys; `means` are ready-made
    `chunk_means` of the keys scored. While top_k covers all chunks this is dense attention.
    """
    if scores is None:
        sel, _ = select_chunks(q, k, tables, top_k, index, means)
    else:
        sel, _ = top_chunks(scores, tables, top_k)
    return sparse_attention(q, k, v, sel, tables, scale)


def rotate(x: Tensor, positions: Tensor, base: float = 10000.0) -> Tensor:
    """Rotary embedding over the whole last axis, halves (not neighbours) paired.

    x [N, H, R], positions [N] -> [N, H, R]. DeepSeek-V3.2-Exp's README warns that its indexer
    needs this layout, unlike its attention.
    """
    half = x.shape[-1] // 2
    rates = base ** (-torch.arange(half, device=x.device, dtype=torch.float32) / half)
    angle = positions[:, None, None] * rates  # [N, 1, R / 2]
    cos, sin = angle.cos().to(x.dtype), angle.sin().to(x.dtype)
    left, right = x.chunk(2, dim=-1)
    return torch.cat([left * cos - right * sin, right * cos + left * sin], dim=-1)


class Indexer(nn.Module):
    """The lightning indexer's parameters: J query heads, one shared key head, J weights.

    width: of the hidden state; rotary: how many of the E channels carry the position, even, 0 =
    none, default E / 2 (DeepSeek-V3.2-Exp: 64 of 128); rotate(x [N, H, R], positions [N]) turns
    them. Frozen in RL; that its input is detached in training is the trainer's task.
    """

    def __init__(self, width: int, heads=4, head_width=32, rotary=None, rotate=rotate):
        super().__init__()
        rotary = head_width // 4 * 2 if rotary is None else rotary
        good = min(width, heads, head_width) >= 1 and 0 <= rotary <= head_width and rotary % 2 == 0
        _require(good, "width, heads, head_width must be >= 1, rotary even in 0..head_width")
        self.heads, self.rotary, self.rotate = heads, rotary, rotate
        self.query = nn.Linear(width, heads * head_width, bias=False)
        self.key = nn.Linear(width, head_width, bias=False)
        self.key_norm = nn.LayerNorm(head_width, eps=1e-6)
        self.weight = nn.Linear(width, heads, bias=False)
        self.scale = (heads * head_width) ** -0.5  # J^-1/2 for the sum, E^-1/2 for the product

    def forward(self, hidden: Tensor, positions: Tensor) -> Index:
        """hidden [N, width], positions [N] -> q_index [N, J, E], k_index [N, E], weights [N, J]."""
        q = self.query(hidden).unflatten(-1, (self.heads, -1))  # [N, J, E]
        k = self.key_norm(self.key(hidden))[:, None]  # [N, 1, E]
        if self.rotary:
            still, both = self.rotary, torch.cat([q, k], dim=1)  # [N, J + 1, E]
            turned = self.rotate(both[..., :still], positions)
            q, k = torch.cat([turned, both[..., still:]], dim=-1).split([self.heads, 1], dim=1)
        return q, k[:, 0], self.weight(hidden) * self.scale


def _work(x: Tensor) -> torch.dtype:  # half precision is stored and gathered, never computed in
    return torch.float64 if x.dtype == torch.float64 else torch.float32


def _require(condition: object, message: str) -> None:
    if not condition:
        raise ValueError(message)


def _integers(name: str, values: Tensor, chunk_size: int) -> Tensor:
    power = type(chunk_size) is int and 1 <= chunk_size <= 512 and chunk_size.bit_count() == 1
    _require(power, f"chunk_size must be a power of two from 1 to 512, got {chunk_size!r}")
    good = isinstance(values, Tensor) and values.dtype in (torch.int32, torch.int64)
    _require(good and values.dim() == 1, f"{name} must be a 1-D int32 or int64 tensor")
    return values.long()


def _check_tensors(q: Tensor, k: Tensor, tables: Tables, *others: Tensor) -> None:
    """Queries [N, Hq, D] and keys [M, Hkv, D] must fit each other and the tables."""
    n, m, every = len(tables.q_pos), tables.rows, (q, k, *others)
    _require(q.dim() == 3 and len(q) == n, f"q must be [{n}, heads, width], got {list(q.shape)}")
    fits = k.dim() == 3 and len(k) == m and k.shape[2] == q.shape[2]
    _require(fits, f"k must be [{m}, heads, {q.shape[2]}], got {list(k.shape)}")
    fits = k.shape[1] > 0 and q.shape[1] % k.shape[1] == 0
    _require(fits, f"q heads must be a multiple of k heads, got {q.shape[1]} and {k.shape[1]}")
    dtypes = {x.dtype for x in every}
    good = len(dtypes) == 1 and dtypes <= DTYPES
    _require(good, f"dtype must be one of {DTYPES} for all tensors, got {dtypes}")
    devices = {x.device for x in (*every, tables.row)}
    _require(len(devices) == 1, f"device must be the tables' for all tensors, got {devices}")


def _check_selection(sel: Tensor, tables: Tables, heads: int) -> None:
    """A duplicate would count twice, a foreign id would mix sequences: never compute with them."""
    n, device = len(tables.q_pos), tables.row.device
    fits = sel.dim() == 3 and len(sel) == n and sel.shape[1] in (1, heads) and sel.shape[2] > 0
    fits = fits and sel.dtype == torch.int64 and sel.device == device
    found = f"{sel.dtype} {list(sel.shape)} on {sel.device}"
    _require(fits, f"sel must be int64 [{n}, {heads} or 1, chunks] on {device}, got {found}")
    low = tables.first[:, None, None]
    foreign = ((sel < low) | (sel > low + tables.past[:, None, None])) & (sel != -1)
    order = sel.sort(-1).values
    twice = (order[..., 1:] == order[..., :-1]) & (order[..., 1:] >= 0)
    for bad, wanted in ((foreign, "ids of the query's own past or -1"), (twice, "unique ids")):
        if bad.any():
            query, head = bad.any(-1).nonzero()[0].tolist()
            ids = sel[query, head].tolist()
            raise ValueError(f"sel must hold {wanted}; query {query}, head {head} has {ids}")
