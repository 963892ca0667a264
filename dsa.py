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
batches nor caches: it follows rows and positions. A query's numbers depend, bitwise, on its own
sequence and on the shapes only. What selection saves is compute and bytes read, not KV capacity.

Left out: kernels (dsa_triton.py), the indexer's training stages (pretrain.py), low-precision keys.

Legend   N queries   M key rows        Hq query heads     Hkv key heads    G = Hq / Hkv
         B slots     C keys per chunk  K most chunks of one sequence (`widest`)    NC all chunks
         S selected chunks per query   D head width       J indexer heads   E indexer head width
         Hs = Hkv or 1: heads that select for themselves  n, c, t: queries, chunks, tiles of a part
"""

from collections.abc import Callable, Iterator
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

QUERY_BLOCK = 256  # queries scored at once ...


TILE = 16  # ... in tiles of neighbours of one sequence, which share the keys they are scored with


GATHER_ELEMENTS = 1 << 19  # attention gathers keys for as many queries at once as fit in this


KEEP_ELEMENTS = 1 << 23  # up to here a backward pass finds gathered keys, beyond it gathers again


DTYPES = {torch.float64, torch.float32, torch.bfloat16, torch.float16}


class Tables(NamedTuple):
    """Where chunks and queries lie; tensors are int64, positions count inside a sequence.

    The chunks of one sequence have consecutive ids: `first` + local id. Key rows with `pos` >
    `q_pos` are never read, so they may hold anything, even NaN.
    """

    chunk_size: int  # C
    widest: int  # K, columns of the scores
    rows: int  # M
    cached: bool  # every query has K chunks of its own, query by query
    row: Tensor  # [NC] first key row of the chunk
    pos: Tensor  # [NC] position of the chunk's first key
    len: Tensor  # [NC] key rows the chunk has (in a cache: filled or not)
    q_pos: Tensor  # [N] position of the query; -1: an empty slot, which sees nothing
    first: Tensor  # [N] id of the first chunk of the query's sequence
    past: Tensor  # [N] number of candidates = local id of the query's own chunk; -1: empty slot


def packed_tables(cu_seqlens: Tensor, chunk_size: int, capacity: int | None = None) -> Tables:
    """Tables for sequences packed one after the other, where query n is key row n.

    cu_seqlens: integer [sequences + 1], 0 first, never decreasing, the number of tokens last;
    the tables lie on its device. Chunks start anew with every sequence. Shapes are made for
    sequences of `capacity` tokens, by default the longest here; with a fixed capacity a sequence's
    result is bitwise the same whatever it is packed with, as a generator's prefill wants it.
    Raises ValueError for other edges, a longer sequence, or a chunk size not a power of two <= 512.
    """
    edges = _integers("cu_seqlens", cu_seqlens, chunk_size)
    lengths = edges.diff()
    fits = edges[0] == 0 and edges[-1] > 0 and (lengths >= 0).all()
    _require(fits, f"cu_seqlens must start at 0, never decrease and end > 0, got {edges.tolist()}")
    chunks = (lengths + chunk_size - 1) // chunk_size  # [sequences]
    before = chunks.cumsum(0) - chunks  # [sequences] chunks of earlier sequences
    owner = torch.repeat_interleave(chunks)  # [NC] sequence of a chunk
    pos = (torch.arange(len(owner), device=edges.device) - before[owner]) * chunk_size
    size = (lengths[owner] - pos).clamp(max=chunk_size)
    sequence = torch.repeat_interleave(lengths)  # [N] sequence of a query
    q_pos = torch.arange(len(sequence), device=edges.device) - edges[sequence]
    columns = (edges[owner] + pos, pos, size, q_pos, before[sequence], q_pos // chunk_size)
    widest = int(chunks.max()) if capacity is None else -(-capacity // chunk_size)
    _require(widest >= chunks.max(), f"capacity must be >= {int(lengths.max())}, got {capacity}")
    return Tables(chunk_size, widest, len(q_pos), False, *columns)


def cache_tables(lengths: Tensor, capacity: int, chunk_size: int) -> Tables:
    """Tables for cached decode: one query per slot, at the slot's newest key.

    lengths: integer [B], keys in each slot with the newest one, 0 for an empty slot. The cache
    [B, capacity, Hkv, D] is passed to attention as [B * capacity, Hkv, D]. All shapes depend on B
    and capacity alone: nothing in a slot can change the arithmetic of another.
    Raises ValueError for lengths outside 0..capacity or a bad chunk size.
    """
    lengths = _integers("lengths", lengths, chunk_size)
    _require(type(capacity) is int and capacity >= 1, f"capacity must be >= 1, got {capacity!r}")
    slots, widest = torch.arange(len(lengths), device=lengths.device), -(-capacity // chunk_size)
    pos = torch.arange(0, capacity, chunk_size, device=lengths.device).repeat(len(slots))
    row = pos + slots.repeat_interleave(widest) * capacity  # [B * K] slot by slot
    columns = (row, pos, (capacity - pos).clamp(max=chunk_size), lengths, slots * widest, lengths)
    return advance(Tables(chunk_size, widest, len(slots) * capacity, True, *columns), lengths)


def advance(tables: Tables, lengths: Tensor) -> Tables:
    """Moves cache tables to new lengths, integer [B], without building the chunks again."""
    lengths = _integers("lengths", lengths, tables.chunk_size)
    capacity = tables.rows // len(tables.first)
    fits = tables.cached and len(lengths) == len(tables.first)
    fits = fits and lengths.clamp(0, capacity).equal(lengths)
    _require(fits, f"lengths must be 0..{capacity} for each cache slot, got {lengths.tolist()}")
    q_pos = lengths - 1
    return tables._replace(q_pos=q_pos, past=q_pos.div(tables.chunk_size, rounding_mode="floor"))


def chunk_means(k: Tensor, tables: Tables, chunks=...) -> Tensor:
    """Mean key of every chunk, or of the `chunks` given.

    k [M, H, D], chunks int64 [c] -> [c or NC, H, D] (half precision: float32). Means of complete
    chunks never change: a decoder keeps them (`update_means`) and does not read its cache again.
    At C = 1 the keys are their own means and need no copy.
    """
    row, size = tables.row[chunks], tables.len[chunks, None]
    offset = torch.arange(tables.chunk_size, device=k.device)
    rows = row[:, None] + torch.minimum(offset, size - 1)  # [c, C]
    keys = _gather(k, rows)  # [c, C, H, D]
    return keys.masked_fill((offset >= size)[..., None, None], 0).sum(1) / size[..., None]


def update_means(means: Tensor, k: Tensor, tables: Tables) -> None:
    """Refreshes in place the mean of each query's own chunk: call it once per decoded token.

    means [NC, H, D] as from `chunk_means`, k [M, H, D] with the new keys written. The mean of a
    half-filled chunk is meaningless and harmless: only complete chunks are ever candidates.
    """
    own = tables.first + tables.past.clamp(min=0)
    means[own] = chunk_means(k, tables, own)


def mean_scores(q: Tensor, k: Tensor, tables: Tables, means: Tensor | None = None) -> Tensor:
    """Scores without parameters: the group's summed query times the mean key of a chunk.

    q [N, Hq, D], k [M, Hkv, D], means as from `chunk_means` (default: computed) -> [N, Hkv, K]
    by local chunk id, -inf where the chunk is no candidate. Mean-pooled keys are MoBA's gate
    (arXiv 2502.13189), one selection per group of query heads is NSA's (arXiv 2502.11089); the
    plain sum over the group, a G times cheaper product, is ours.
    Raises ValueError for shapes, dtypes or devices that do not fit.
    """
    _check_tensors(q, k, tables)
    means = chunk_means(k, tables) if means is None else means
    group = _work(q).unflatten(1, (k.shape[1], -1)).sum(2)  # [N, Hkv, D]

    def score(keys, group):  # always contiguous: other strides, other rounding
        group, keys = (x.transpose(1, 2).contiguous() for x in (group, keys))  # [t, Hkv, .., D]
        return (group @ keys.mT).transpose(1, 2)

    return _local_scores(score, means, tables, group)


def index_scores(
    q_index: Tensor, k_index: Tensor, weights: Tensor, tables: Tables, means: Tensor | None = None
) -> Tensor:
    """Lightning indexer I[t, s] = sum_j w[t, j] * ReLU(q[t, j] . k[s]) (DeepSeek-V3.2-Exp report).

    q_index [N, J, E], k_index [M, E], weights [N, J], means [NC, 1, E] as from
    `chunk_means(k_index[:, None], tables)` -> [N, 1, K], one score for all heads, differentiable.
    For C > 1, s is a chunk and k[s] the mean of its keys: ours, C times cheaper than scoring
    tokens, with the same parameters, and the KL to a chunk's attention mass can train it.
    Raises ValueError for shapes, dtypes or devices that do not fit.
    """
    _check_tensors(q_index, k_index[..., None, :], tables, weights)
    _require(weights.shape == q_index.shape[:2], f"weights must be {list(q_index.shape[:2])}")
    means = chunk_means(k_index[:, None], tables) if means is None else means

    def score(keys, q, w):
        hits = torch.einsum("tqje,tce->tqjc", q, keys.squeeze(2)).relu()
        return torch.einsum("tqjc,tqj->tqc", hits, w)[:, :, None]

    return _local_scores(score, means, tables, _work(q_index), _work(weights))


def _local_scores(score: Callable, means: Tensor, tables: Tables, *queries: Tensor) -> Tensor:
    """Scores every query with the chunks of its own sequence, as one product per tile of queries:
    score(keys [t, K, H, D], queries [t, TILE, ...]) -> [t, TILE, Hs, K]. The place of a query in
    its tile is given by its position, so its score does not depend on what else is packed."""
    _require(len(means) == len(tables.row), f"means must have {len(tables.row)} rows")
    local, parts = torch.arange(tables.widest, device=means.device), []
    for part, block in _blocks(tables):
        if tables.cached:  # slot b owns chunks b * K ... b * K + K - 1 and is a tile of one query
            by_slot = means.unflatten(0, (-1, tables.widest))
            scores = score(by_slot, *(x[:, None] for x in queries)).squeeze(1)
        else:
            opens = block.q_pos % TILE == 0
            opens[0] = True  # a block may begin inside a tile
            cell = (opens.cumsum(0) - 1) * TILE + block.q_pos % TILE  # [n] place in all tiles
            chunks = (block.first[opens, None] + local).clamp(max=len(means) - 1)  # [t, K]
            rows = cell.new_zeros(len(chunks), TILE)  # unused places compute in vain
            rows.view(-1)[cell] = torch.arange(len(cell), device=cell.device)
            scores = score(_gather(means, chunks), *(_gather(x[part], rows) for x in queries))
            scores = scores.flatten(0, 1).index_select(0, cell)
        parts.append(scores.masked_fill(local >= block.past[:, None, None], float("-inf")))
    return torch.cat(parts)  # [N, Hs, K]


def _blocks(tables: Tables, step: int = 0) -> Iterator[tuple[slice, Tables]]:
    """Splits the queries; without a step so that scores stay small, where a cache is one block."""
    step = step or (len(tables.q_pos) if tables.cached else QUERY_BLOCK)
    for part in (slice(start, start + step) for start in range(0, len(tables.q_pos), step)):
        yield part, Tables(*tables[:7], *(column[part] for column in tables[7:]))


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
    key = key.masked_fill(local > past, -(1 << 63)).masked_fill(local == past, (1 << 63) - 1)

    best = key.topk(min(top_k, width), dim=-1).indices  # [N, Hs, S]
    count = (past + 1).clamp(max=top_k).expand(-1, scores.shape[1], -1)  # [N, Hs, 1]
    chosen = torch.arange(best.shape[2], device=best.device) < count
    return torch.where(chosen, best + tables.first[:, None, None], -1), count[..., 0]


@torch.no_grad()
def select_chunks(q, k, tables: Tables, top_k: int, index=None, means=None, query_block=1) -> tuple:
    """Scores and selects block by block: memory linear in N, where all scores are N x K.

    Scores are `index_scores(*index)`, or `mean_scores` when index is None; `means` as there.
    Returns (sel, count) of `top_chunks`. Selection has no gradient. `query_block` neighbours
    share what the first of them selects (packed only, at most C: so they share their own chunk).
    Nothing later than the first query is looked at; kernels then score less and fill their tiles.
    """
    lead = _lead(tables, query_block)
    q, k, *weights = (q, k) if index is None else index
    score = mean_scores if index is None else index_scores
    means = chunk_means(k if index is None else k[:, None], tables) if means is None else means
    picks = []
    for part, block in _blocks(tables):
        scores = score(q[part], k, *(w[part] for w in weights), block, means)
        picks.append(top_chunks(scores, block, top_k))
    return tuple(torch.cat(column)[lead] for column in zip(*picks, strict=True))


def sparse_attention(q, k, v, sel: Tensor, tables: Tables, scale=None, query_block=1) -> Tensor:
    """Softmax attention of every query to the keys of its selected chunks at `pos` <= `q_pos`.

    q [N, Hq, D], k and v [M, Hkv, D] of one dtype (float64, float32, bfloat16, float16),
    sel int64 [N, Hkv or 1, S] of global chunk ids, -1 = none -> [N, Hq, D]; a query that sees
    nothing gets 0. scale defaults to D ** -0.5. Only selected keys are read, a block of queries
    at a time. With gradients and many keys (KEEP_ELEMENTS) the backward pass gathers again
    rather than keep S * C keys per query: linear memory for 1.4 times the time.
    Raises ValueError for a duplicate or foreign chunk id, for lists that are not shared in a
    `query_block`, and for inputs that do not fit.
    """
    _check_tensors(q, k, tables, v)
    _require(v.shape == k.shape, f"v must be {list(k.shape)} as k is, got {list(v.shape)}")
    _check_selection(sel, tables, k.shape[1])
    shared = query_block == 1 or sel.equal(sel[_lead(tables, query_block)])
    _require(shared, f"sel must be the same for all queries of a query_block of {query_block}")
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    gathered = k[0].numel() * sel.shape[2] * tables.chunk_size  # per query
    again = torch.is_grad_enabled() and len(q) * gathered > KEEP_ELEMENTS
    attend = partial(checkpoint, _attend, use_reentrant=False) if again else _attend
    blocks = _blocks(tables, max(1, GATHER_ELEMENTS // gathered))
    return torch.cat([attend(q[part], k, v, sel[part], block, scale) for part, block in blocks])


def _attend(q, k, v, sel, tables: Tables, scale: float) -> Tensor:
    offset = torch.arange(tables.chunk_size, device=q.device)
    chunk = sel.clamp(min=0)[..., None]  # [n, Hs, S, 1]
    visible = tables.pos[chunk] + offset <= tables.q_pos[:, None, None, None]  # [n, Hs, S, C]
    visible &= (sel >= 0)[..., None]
    # What is hidden is not read: its lanes get the first key of the query's own chunk, which
    # every query may see. So stale cache rows cannot turn a probability 0 * NaN into NaN.
    own = tables.row[tables.first + tables.past.clamp(min=0)]
    rows = torch.where(visible, tables.row[chunk] + offset, own[:, None, None, None]).flatten(2)
    rows = rows * k.shape[1] + torch.arange(k.shape[1], device=k.device)[:, None]  # [n, Hkv, S * C]
    keys, values = (_gather(x.flatten(0, 1), rows) for x in (k, v))  # [.., S * C, D]
    hidden = ~visible.flatten(2)[:, :, None]  # [n, Hs, 1, S * C]
    logits = _work(q).unflatten(1, (k.shape[1], -1)) * scale @ keys.mT  # [n, Hkv, G, S * C]
    chance = logits.masked_fill(hidden, torch.finfo(logits.dtype).min).softmax(-1)
    out = (chance @ values).masked_fill(hidden.all(-1, keepdim=True), 0)
    return out.flatten(1, 2).to(q.dtype)


def dsa_attention(q, k, v, tables: Tables, top_k: int, index=None, means=None, query_block=1):
    """Score, select and attend: q [N, Hq, D], k and v [M, Hkv, D] -> [N, Hq, D].

    The scores are the indexer's for `index` (q_index, k_index, weights), else those of mean-pooled
    keys; `means` are ready-made `chunk_means` of the keys scored; a `query_block` shares its
    selection. While top_k covers all chunks this is dense attention.
    """
    sel, _ = select_chunks(q, k, tables, top_k, index, means, query_block)
    return sparse_attention(q, k, v, sel, tables, query_block=query_block)


def _lead(tables: Tables, query_block: int) -> Tensor:  # [N] row of the first query of the block
    most = 1 if tables.cached else tables.chunk_size
    fits = type(query_block) is int and 1 <= query_block <= most and query_block.bit_count() == 1
    _require(fits, f"query_block must be a power of two from 1 to {most}, got {query_block!r}")
    return torch.arange(len(tables.q_pos), device=tables.row.device) - tables.q_pos % query_block


def rotate(x: Tensor, positions: Tensor, base: float = 10000.0) -> Tensor:
    """Rotary embedding over the whole last axis, halves (not neighbours) paired.

    x [N, H, R], positions [N] -> [N, H, R]. DeepSeek-V3.2-Exp's README warns that its indexer
    needs this layout, unlike its attention.
    """
    left, right = x.chunk(2, dim=-1)
    step = torch.arange(left.shape[-1], device=x.device, dtype=torch.float32) / left.shape[-1]
    angle = positions[:, None, None] * base**-step  # [N, 1, R / 2]
    cos, sin = angle.cos().to(x.dtype), angle.sin().to(x.dtype)
    return torch.cat([left * cos - right * sin, right * cos + left * sin], dim=-1)


class Indexer(nn.Module):
    """The lightning indexer's parameters: J query heads, one shared key head, J weights.

    width: of the hidden state; rotary: how many of the E channels carry the position, even, 0 =
    none, default E / 2 (DeepSeek-V3.2-Exp: 64 of 128); rotate(x [N, H, R], positions [N]) turns
    them. Frozen in RL; that its input is detached in training is the trainer's task.
    """

    def __init__(self, width: int, heads=4, head_width=32, rotary=None, rotate=rotate):
        super().__init__()
        self.heads, self.rotate = heads, rotate
        self.rotary = head_width // 4 * 2 if rotary is None else rotary
        self.query = nn.Linear(width, heads * head_width, bias=False)
        self.key = nn.Linear(width, head_width, bias=False)
        self.key_norm = nn.LayerNorm(head_width, eps=1e-6)
        self.weight = nn.Linear(width, heads, bias=False)

    def forward(self, hidden: Tensor, positions: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """hidden [N, width], positions [N] -> q_index [N, J, E], k_index [N, E], weights [N, J].

        The weights are scaled by J^-1/2 (a sum over heads) and E^-1/2 (a product of width E).
        """
        q = self.query(hidden).unflatten(-1, (self.heads, -1))  # [N, J, E]
        both = torch.cat([q, self.key_norm(self.key(hidden))[:, None]], dim=1)  # [N, J + 1, E]
        if self.rotary:
            turned = self.rotate(both[..., : self.rotary], positions)
            both = torch.cat([turned, both[..., self.rotary :]], dim=-1)
        return both[:, :-1], both[:, -1], self.weight(hidden) * self.query.out_features**-0.5


def _work(x: Tensor) -> Tensor:  # half precision is stored and gathered, never computed in
    return x.float() if x.dtype in (torch.bfloat16, torch.float16) else x


def _gather(x: Tensor, rows: Tensor) -> Tensor:  # index_select: x[rows] is 2 to 9 times slower
    return _work(x.index_select(0, rows.flatten())).unflatten(0, rows.shape)


def _require(condition: object, message: str) -> None:
    if not condition:
        raise ValueError(message)


def _integers(name: str, values: Tensor, chunk_size: int) -> Tensor:
    power = type(chunk_size) is int and 1 <= chunk_size <= 512 and chunk_size.bit_count() == 1
    _require(power, f"chunk_size must be a power of two from 1 to 512, got {chunk_size!r}")
    good = isinstance(values, Tensor) and values.dtype in (torch.int32, torch.int64)
    good = good and values.dim() == 1 and len(values) > 0
    _require(good, f"{name} must be a 1-D int32 or int64 tensor that is not empty")
    return values.long()


def _check_tensors(q: Tensor, k: Tensor, tables: Tables, *others: Tensor) -> None:
    """Queries [N, Hq, D] and keys [M, Hkv, D] must fit each other and the tables."""
    n, m, every = len(tables.q_pos), tables.rows, (q, k, *others)
    _require(q.dim() == 3 and len(q) == n, f"q must be [{n}, heads, width], got {list(q.shape)}")
    fits = k.dim() == 3 and len(k) == m and k.shape[2] == q.shape[2] and k.shape[1] > 0
    fits = fits and q.shape[1] % k.shape[1] == 0
    _require(fits, f"k must be [{m}, divisor of {q.shape[1]}, {q.shape[2]}], got {list(k.shape)}")
    dtypes, devices = {x.dtype for x in every}, {x.device for x in (*every, tables.row)}
    _require(len(dtypes) == 1 and dtypes <= DTYPES, f"dtype must be one of {DTYPES}, got {dtypes}")
    _require(len(devices) == 1, f"device must be the tables' for all tensors, got {devices}")


def _check_selection(sel: Tensor, tables: Tables, heads: int) -> None:
    """A duplicate would count twice, a foreign id would mix sequences: never compute with them."""
    n, kind = len(tables.q_pos), (sel.dtype, sel.device, sel.dim())
    fits = kind == (torch.int64, tables.row.device, 3) and sel.shape[:2] in ((n, 1), (n, heads))
    _require(fits and sel.numel(), f"sel must be int64 [{n}, {heads} or 1, S], got {sel.shape}")
    low, order = tables.first[:, None, None], sel.sort(-1).values
    foreign = (order != -1) & ((order < low) | (order > low + tables.past[:, None, None]))
    foreign[..., 1:] |= (order[..., 1:] == order[..., :-1]) & (order[..., 1:] >= 0)
    wrong = foreign.any(-1).nonzero().tolist()[:1]  # the first [query, head]
    ids = [sel[query, head].tolist() for query, head in wrong]
    _require(not wrong, f"sel must hold unique ids a query may see, or -1; {wrong} has {ids}")
