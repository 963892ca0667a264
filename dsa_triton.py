"""Sparse attention as Triton kernels: dsa.py's functions, with the same names, for GPUs.

dsa.py is the specification and says what is computed; this file says how it is computed fast.
A program owns one block of `query_block` neighbouring queries and one key head: BQ * G query
heads ("lanes") that share a list of chunks, and BN keys of that list at a time. Tensor cores
want 64 rows: a tile of scores is [BM, BN] where the lanes fill them and [BN, BM], keys first,
where they do not. Softmax is online and in base 2; sums are in float32.

With BQ = 1 (every query selects for itself) the G lanes, say 16, do little with the keys they read.
But neighbours select much the same: in a model that has learned text, the lists of 8 hold 1.8 times
as many different chunks as one (docs/measured.md). So in half precision, in sequences of
1,024 keys and more, they read the union of their lists together; bits tell who sees what, and the
result stays that of each query's own list. Where a union would not halve what is read, they stay
alone. On an H200, at 128k tokens and unions of 2.3 lists, forward was 1.4 times as fast, with
backward 1.2 times.

  _select       scores the past of a block and keeps the best chunks in registers as int64 (the
                float's order, the id reversed), tile by tile: scores are never stored
  _score        for longer lists (GLM-5's 2048 single tokens), and in decode, where many programs
                share the chunks of a slot: stores the scores of a stripe of blocks, as integers in
                the same order, and
  _pick         finds the last one that is kept, by four histograms of 8 bits each
  _unite        makes one list of neighbours' lists, by marking the chunks of their past
  _forward      walks over a block's list; in decode, several programs share a list, and
  _merge        adds up what they found. With a list of all chunks it is flash decoding for dense
                attention (`dense_decode`): how long a list is, a program reads from the GPU, so
                one captured graph serves all lengths
  _backward_q   dQ, and sum(out * grad) for the next one; for chunks of less than 16 keys dK and dV
                too, by atomic additions
  _backward_kv  dK and dV of a chunk from its inverse list, the blocks that selected it, made by
                one sort without asking the GPU for a number; pieces of a list are added up
                atomically (in any order), because a popular chunk may be in every list

What limits speed: a list is read for BQ * G query heads only, so the L2 cache is the limit until
BQ * G is about 64 to 128; then tensor cores and instructions are (docs/design.md counts them).
Scoring by means takes 1 / (2 C G) of the operations of dense attention, but in float32 (three TF32
products).
Forward, dQ and selection are bitwise repeatable; dK and dV, atomic sums, to rounding. In half
precision a query's rounding depends on up to 15 neighbours, later ones, too: they decide whether it
is alone.

Runs on CUDA, or, to be tested, on a CPU when TRITON_INTERPRET=1 is set before Triton is imported:
there bfloat16 is refused, and float64 is allowed. Triton 3.6 to 3.9; the interpreter of 3.6 needs
numpy < 2.4. A NaN or infinity may reach earlier queries only in its query_block, or among the up to
16 of its sequence that read together.

Legend   as in dsa.py, and   BQ queries of a block (query_block)   NB blocks   P pieces
         HS heads of lists   HB heads of block lines (1: the same for all)
         BM lanes, BN keys of a tile         BR blocks, BC chunks, BS kept in a tile of selection
"""

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor

import dsa
from dsa import Tables

LOG2E = tl.constexpr(1.4426950408889634)
LOWEST = tl.constexpr(-(1 << 63))  # below every packed score
FAR = tl.constexpr((1 << 31) - (1 << 16))  # a row, or a chunk, behind all others
WIDTHS = (16, 32, 64, 128)  # head widths; others would pad the tiles
STREAMED = 64  # longest list `_select` keeps in registers (at D = 128, above 32, it spills a bit)
ATOMIC_BELOW = 16  # chunk size under which dK and dV are scattered from the dQ kernel
SCORE_ROWS = 64  # blocks that are scored together
PIECE_LANES = 8192  # most lanes in a piece of an inverse list
PROGRAMS = 2112  # decode splits its lists to have so many: 16 for each multiprocessor of an H200
SPLITS = 256  # ... but never a list in more than these
STRIPE = 512  # blocks whose scores are stored at once, for lists of more than STREAMED + 1
SCORED, READ = 128, 2048  # chunks that are scored, and read again, in a tile
UNITED = 16  # most neighbours whose lists become one ...
LONG_CONTEXT = 1024  # ... in sequences of so many keys; below, launches cost more
MARKS = 1 << 26  # chunks that are marked at once: 256 MiB


@triton.jit
def _dot(a, b):  # never TF32: float32 means float32
    return tl.dot(a, b, input_precision="ieee")


@triton.jit
def _scores(keys, queries, KEY: tl.constexpr):
    """All products of keys [BN, D] and queries [BM, D]; KEY is the axis of the keys."""
    return _dot(keys, tl.trans(queries)) if KEY == 0 else _dot(queries, tl.trans(keys))


@triton.jit
def _sums(weights, keys, KEY: tl.constexpr):
    """Keys [BN, D] summed with weights: [D, BM], queries last, for KEY = 0, else [BM, D]."""
    return _dot(tl.trans(keys), weights) if KEY == 0 else _dot(weights, keys)


@triton.jit
def _lanes(
    blocks, block, member, head, HKV: tl.constexpr, G: tl.constexpr, ONE: tl.constexpr,
):  # fmt: skip
    """What the lanes are: member = query * G + query head of a block, a line of `blocks`.

    Returns the rows of [N * Hq], whether they exist, and the last key row that each sees (-1:
    none). ONE: all blocks are single queries, in order, and live (not so, if unions have some of
    them): masks cost nothing.
    """
    query, start = member // G, tl.load(blocks + 5 * block)
    live = query < tl.load(blocks + 5 * block + 1)
    if ONE:
        query, start, live = 0 * member, block, tl.full(member.shape, True, tl.int1)
    at = (start + query).to(tl.int64) * (HKV * G) + head * G + member % G
    return at, live, tl.where(live, tl.load(blocks + 5 * block + 2) + query, -1)


@triton.jit
def _tile(
    k, v, rows, whose, tile, head, last, nth, S,
    HKV: tl.constexpr, C: tl.constexpr, D: tl.constexpr, BN: tl.constexpr, KEY: tl.constexpr,
    UNION: tl.constexpr,
):  # fmt: skip
    """A tile of a list: where its keys lie, whether the furthest query may see them [BN, 1] (others
    are loaded as 0); keys and values [BN, D]; whether each query sees each key, [BN, BM], or
    [BM, BN] for KEY = 1. nth: which query of its block each lane is."""
    offset, slot = tile * BN % C + tl.arange(0, BN), tile * BN // C
    if C < BN:  # several chunks; else a piece of one: one scalar
        offset = tl.arange(0, BN) % C
        slot += tl.arange(0, BN) // C
    row = tl.load(rows + slot, mask=slot < S, other=-1)
    at = tl.where(row < 0, FAR, row) + offset
    visible = tl.expand_dims(at, 1 - KEY) <= tl.expand_dims(last, KEY)
    if UNION:  # of a list that neighbours share, `whose` tells who has selected what
        bits = tl.load(whose + slot, mask=slot < S, other=0).to(tl.int32) + 0 * offset
        visible &= (tl.expand_dims(bits, 1 - KEY) >> tl.expand_dims(nth, KEY)) & 1 == 1
    place = (at.to(tl.int64) * HKV + head)[:, None] * D + tl.arange(0, D)[None, :]
    seen = (at <= tl.max(last, 0))[:, None]
    key = tl.load(k + place, mask=seen, other=0.0)
    return place, seen, key, tl.load(v + place, mask=seen, other=0.0), visible


@triton.jit
def _tile_count(blocks, block, last, S, C: tl.constexpr, BN: tl.constexpr):
    """Tiles of a block's list, of S chunks or those its line tells, if fewer; 0: it sees none."""
    listed = tl.minimum(tl.load(blocks + 5 * block + 3), S)
    return tl.where(tl.max(last, 0) >= 0, tl.cdiv(listed * C, BN), 0)


@triton.jit
def _forward(
    q, k, v, rows, whose, blocks, out, lse, S, ALL,
    HKV: tl.constexpr, HS: tl.constexpr, HB: tl.constexpr, G: tl.constexpr, C: tl.constexpr,
    D: tl.constexpr, PARTS: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, KEY: tl.constexpr,
    UNION: tl.constexpr,
):  # fmt: skip
    """out [splits, N * Hq, D] and log2-sum-exp2 [splits, N * Hq]: each split has its share of the
    tiles of a list. rows and whose [NB, HS, S], blocks [NB, HB, 5]."""
    block, head, split = tl.program_id(0) // PARTS, tl.program_id(1), tl.program_id(2)
    member = tl.program_id(0) % PARTS * BM + tl.arange(0, BM)
    rows += (block.to(tl.int64) * HS + head % HS) * S
    whose += (block.to(tl.int64) * HS + head % HS) * S
    block = block * HB + head % HB
    at, live, last = _lanes(blocks, block, member, head, HKV, G, False)
    line = at[:, None] * D + tl.arange(0, D)[None, :]
    query = tl.load(q + line, mask=live[:, None], other=0.0)  # [BM, D]
    top = tl.full([BM], float("-inf"), lse.dtype.element_ty)
    total = tl.zeros([BM], lse.dtype.element_ty)
    acc = tl.zeros([D, BM] if KEY == 0 else [BM, D], lse.dtype.element_ty)
    SCALE: tl.constexpr = D**-0.5 * LOG2E
    tiles = _tile_count(blocks, block, last, S, C, BN)
    share = tl.cdiv(tiles, tl.num_programs(2))
    for tile in range(split * share, tl.minimum(split * share + share, tiles)):
        place, seen, key, value, visible = _tile(
            k, v, rows, whose, tile, head, last, member // G, S, HKV, C, D, BN, KEY, UNION
        )
        score = tl.where(visible, _scores(key, query, KEY), float("-inf"))
        new = tl.maximum(top, tl.max(score, KEY) * SCALE)
        base = tl.where(new == float("-inf"), 0.0, new)  # nothing seen yet: no inf - inf
        chance = tl.exp2(score * SCALE - tl.expand_dims(base, KEY))  # one operation and exp2
        decay = tl.exp2(top - base)
        total = total * decay + tl.sum(chance, KEY)
        acc = acc * tl.expand_dims(decay, KEY) + _sums(chance.to(value.dtype), value, KEY)
        top = new
    safe = tl.where(total == 0, 1.0, total)
    acc = acc / tl.expand_dims(safe, KEY)
    acc = tl.trans(acc) if KEY == 0 else acc
    part = split.to(tl.int64) * ALL
    tl.store(lse + part + at, top + tl.log2(safe), mask=live)  # -inf: saw nothing, and out is 0
    tl.store(out + part * D + line, acc.to(out.dtype.element_ty), mask=live[:, None])


@triton.jit
def _unite(
    lists, first_row, marks, rows, whose, unions, alone, START, S, K, WIDTH,
    HS: tl.constexpr, BQ: tl.constexpr, BS: tl.constexpr, BC: tl.constexpr,
):  # fmt: skip
    """Unites the lists [N, HS, S] of each group of up to BQ neighbours: key rows in order of ids,
    and a bit for each neighbour that has listed them, [groups, HS, WIDTH]; how many, into the line
    of `unions` [groups, HS, 5]. Where they are more than half of all entries, the group's size
    there becomes 0; elsewhere those of its queries in `alone` [N, HS, 5] do. marks: zeros
    [stripe, HS, K]."""
    block, head = START + tl.program_id(0), tl.program_id(1)
    line = block.to(tl.int64) * HS + head
    start, size = tl.load(unions + line * 5).to(tl.int64), tl.load(unions + line * 5 + 1)
    own = alone + (start * HS + head) * 5
    low = tl.load(own + 4, mask=size > 0, other=0)
    high = low + tl.load(own + (size - 1) * HS * 5 + 3, mask=size > 0, other=0)
    marks += (tl.program_id(0).to(tl.int64) * HS + head) * K
    every, count = 0, 0
    for tile in range(0, size * S, BS):
        entry = tile + tl.arange(0, BS)
        at = lists + ((start + entry // S) * HS + head) * S + entry % S
        chunk = tl.load(at, mask=entry < size * S, other=-1)
        tl.atomic_or(marks + chunk - low, 1 << entry // S, mask=chunk >= 0, sem="relaxed")
        every += tl.sum((chunk >= 0).to(tl.int32), 0)
    tl.debug_barrier()
    for tile in range(low, high, BC):
        chunk = tile + tl.arange(0, BC)
        mark = tl.load(marks + chunk - low, mask=chunk < high, other=0, cache_modifier=".cg")
        marked = (mark != 0).to(tl.int32)
        to = count + tl.cumsum(marked, 0) - 1
        kept = (marked > 0) & (to < WIDTH)
        row = tl.load(first_row + chunk, mask=kept, other=0)
        tl.store(rows + line * WIDTH + to, row.to(tl.int32), mask=kept)
        tl.store(whose + line * WIDTH + to, mark.to(tl.int16), mask=kept)
        count += tl.sum(marked, 0)
    tl.store(unions + line * 5 + 3, count)
    tl.store(unions + line * 5 + 1, 0, mask=2 * count > every)
    member = tl.arange(0, BQ)
    tl.store(own + member * HS * 5 + 1, 0 * member, mask=(member < size) & (2 * count <= every))


@triton.jit
def _merge(parts, part_lse, out, lse, ALL, SPLITS, D: tl.constexpr, BS: tl.constexpr):
    """Partial outputs [splits, ALL, D] and their log-sums -> out [ALL, D], lse [ALL]."""
    row, d, split = tl.program_id(0), tl.arange(0, D), tl.arange(0, BS)
    at = split.to(tl.int64) * ALL + row
    logs = tl.load(part_lse + at, mask=split < SPLITS, other=float("-inf"))
    top = tl.max(logs, 0)
    weight = tl.exp2(logs - tl.where(top == float("-inf"), 0.0, top))
    total = tl.sum(weight, 0)
    safe = tl.where(total == 0, 1.0, total)
    part = tl.load(parts + at[:, None] * D + d[None, :], mask=(split < SPLITS)[:, None], other=0.0)
    result = tl.sum(part * (weight / safe)[:, None], 0)
    tl.store(out + row.to(tl.int64) * D + d, result.to(out.dtype.element_ty))
    tl.store(lse + row, top + tl.log2(safe))


@triton.jit
def _backward_q(
    q, k, v, out, grad, rows, whose, blocks, lse, delta, dq, dk, dv, S,
    HKV: tl.constexpr, HS: tl.constexpr, HB: tl.constexpr, G: tl.constexpr, C: tl.constexpr,
    D: tl.constexpr, PARTS: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, KEY: tl.constexpr,
    UNION: tl.constexpr, SCATTER: tl.constexpr,
):  # fmt: skip
    """dq and delta, sum(out * grad), as `_forward` walks, with the probabilities made again from
    lse; SCATTER: dk, dv too."""
    block, head = tl.program_id(0) // PARTS, tl.program_id(1)
    member = tl.program_id(0) % PARTS * BM + tl.arange(0, BM)
    rows += (block.to(tl.int64) * HS + head % HS) * S
    whose += (block.to(tl.int64) * HS + head % HS) * S
    block = block * HB + head % HB
    at, live, last = _lanes(blocks, block, member, head, HKV, G, False)
    line = at[:, None] * D + tl.arange(0, D)[None, :]
    query = tl.load(q + line, mask=live[:, None], other=0.0)  # [BM, D]
    slope = tl.load(grad + line, mask=live[:, None], other=0.0)
    log = tl.load(lse + at, mask=live, other=0.0)
    result = tl.load(out + line, mask=live[:, None], other=0.0).to(log.dtype)
    shift = tl.sum(result * slope, 1)
    tl.store(delta + at, shift, mask=live)
    acc = tl.zeros([D, BM] if KEY == 0 else [BM, D], lse.dtype.element_ty)
    for tile in range(0, _tile_count(blocks, block, last, S, C, BN)):
        place, seen, key, value, visible = _tile(
            k, v, rows, whose, tile, head, last, member // G, S, HKV, C, D, BN, KEY, UNION
        )
        chance = tl.exp2(_scores(key, query, KEY) * (D**-0.5 * LOG2E) - tl.expand_dims(log, KEY))
        chance = tl.where(visible, chance, 0.0)
        slide = chance * (_scores(value, slope, KEY) - tl.expand_dims(shift, KEY))
        slide, chance = slide.to(key.dtype), chance.to(key.dtype)
        acc += _sums(slide, key, KEY)
        if SCATTER:
            if KEY == 1:
                slide, chance = tl.trans(slide), tl.trans(chance)
            tl.atomic_add(dk + place, _dot(slide, query) * D**-0.5, mask=seen, sem="relaxed")
            tl.atomic_add(dv + place, _dot(chance, slope), mask=seen, sem="relaxed")
    acc = tl.trans(acc) if KEY == 0 else acc
    tl.store(dq + line, (acc * D**-0.5).to(dq.dtype.element_ty), mask=live[:, None])


@triton.jit
def _backward_kv(
    q, k, v, grad, order, pieces, blocks, lse, delta, dk, dv,
    HKV: tl.constexpr, G: tl.constexpr, C: tl.constexpr, D: tl.constexpr, BQ: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr,
):  # fmt: skip
    """Adds to dk, dv what the blocks order[begin:end] of a piece give BN keys of its chunk."""
    LANES: tl.constexpr = BQ * G  # of a block
    piece = pieces + tl.program_id(0) * 5
    first, size, head = tl.load(piece), tl.load(piece + 1), tl.load(piece + 2) + tl.program_id(2)
    begin, end = tl.load(piece + 3), tl.load(piece + 4)
    lanes = (end - begin) * LANES
    if lanes > 0:
        d = tl.arange(0, D)
        offset = tl.program_id(1) * BN + tl.arange(0, BN)
        row, exists = first + offset, (offset < size)[:, None]
        place = (row.to(tl.int64) * HKV + head)[:, None] * D + d[None, :]
        key = tl.load(k + place, mask=exists, other=0.0)  # [BN, D]
        value = tl.load(v + place, mask=exists, other=0.0)
        sum_k = tl.zeros([BN, D], lse.dtype.element_ty)
        sum_v = tl.zeros([BN, D], lse.dtype.element_ty)
        for step in range(0, lanes, BM):
            lane = step + tl.arange(0, BM)
            if LANES % BM == 0:  # all of one block
                block, member = step // LANES, step % LANES + tl.arange(0, BM)
            else:  # those behind the end are the last one again
                listed = tl.minimum(lane, lanes - 1)
                block, member = listed // LANES, listed % LANES
            block = tl.load(order + begin + block)
            at, live, last = _lanes(blocks, block, member, head, HKV, G, BQ == 1)
            seen = row[:, None] <= tl.where(lane < lanes, last, -1)[None, :]
            line = at[:, None] * D + d[None, :]
            query = tl.load(q + line, mask=live[:, None], other=0.0)  # [BM, D]
            slope = tl.load(grad + line, mask=live[:, None], other=0.0)
            log = tl.load(lse + at, mask=live, other=0.0)
            shift = tl.load(delta + at, mask=live, other=0.0)
            chance = tl.exp2(_dot(key, tl.trans(query)) * (D**-0.5 * LOG2E) - log[None, :])
            chance = tl.where(seen, chance, 0.0)  # [BN, BM]
            sum_v += _dot(chance.to(key.dtype), slope)
            slide = chance * (_dot(value, tl.trans(slope)) - shift[None, :])
            slide = tl.where(chance == 0, 0.0, slide)  # what is not seen may hold NaN
            sum_k += _dot(slide.to(key.dtype), query)
        tl.atomic_add(dk + place, sum_k * D**-0.5, mask=exists, sem="relaxed")
        tl.atomic_add(dv + place, sum_v, mask=exists, sem="relaxed")


@triton.jit
def _past_of(blocks, block, NB):
    """Of blocks: their first query, the first chunk of its past, and how many (-1: sees none)."""
    line, listed = blocks + 5 * block, block < NB
    lead = tl.load(line, mask=listed, other=0).to(tl.int64)
    begin = tl.load(line + 4, mask=listed, other=0)
    return lead, begin, tl.load(line + 3, mask=listed, other=0) - 1


@triton.jit
def _range_of(begin, count):
    """The lowest chunk that any of these blocks may see, and the one behind all."""
    return tl.min(tl.where(count > 0, begin, FAR), 0), tl.max(begin + count, 0)


@triton.jit
def _ordered(
    q, keys, weights, lead, live, head, chunk, stop,
    HS: tl.constexpr, G: tl.constexpr, D: tl.constexpr, LEARNED: tl.constexpr,
):  # fmt: skip
    """Scores of chunks, those before `stop`, as int32 [BR, BC] in the same order."""
    d = tl.arange(0, D)
    wide: tl.constexpr = weights.dtype.element_ty
    key = keys + (chunk.to(tl.int64) * HS + head)[None, :] * D + d[:, None]
    key = tl.load(key, mask=(chunk < stop)[None, :], other=0.0)  # [D, BC]
    place = ((lead * HS + head) * G)[:, None] * D + d[None, :]
    score = tl.zeros([place.shape[0], key.shape[1]], wide)
    for g in range(G):
        part = tl.load(q + place + g * D, mask=live[:, None], other=0.0)
        if place.shape[0] == 1:  # a decoder's query, which has no neighbours to share keys with
            hit = tl.sum(tl.trans(part).to(wide) * key.to(wide), 0)[None, :]
        else:
            hit = tl.dot(part, key, input_precision="tf32x3").to(wide)
        if LEARNED:
            weight = tl.load(weights + lead * G + g, mask=live, other=0.0)
            hit = tl.maximum(hit, 0.0) * weight[:, None]
        score += hit
    score = score.to(tl.float32)
    bits = tl.where(score == 0, 0.0, score).to(tl.int32, bitcast=True)
    return tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits)


@triton.jit
def _select(
    q, keys, weights, blocks, sel, NB, S,
    HS: tl.constexpr, G: tl.constexpr, D: tl.constexpr, LEARNED: tl.constexpr, BR: tl.constexpr,
    BC: tl.constexpr, BS: tl.constexpr,
):  # fmt: skip
    """sel [NB, HS, S] of each block's first query: its own chunk, then the best of its past."""
    block, head = tl.program_id(0) * BR + tl.arange(0, BR), tl.program_id(1)
    lead, begin, count = _past_of(blocks, block, NB)
    best = tl.full([BR, BS], LOWEST, tl.int64)  # ascending
    low, stop = _range_of(begin, count)
    for tile in range(low, stop, BC):
        chunk = tile + tl.arange(0, BC)
        bits = _ordered(q, keys, weights, lead, count > 0, head, chunk, stop, HS, G, D, LEARNED)
        packed = (bits.to(tl.int64) << 32) + (0xFFFFFFFF - chunk.to(tl.int64))[None, :]
        inside = (chunk[None, :] >= begin[:, None]) & (chunk[None, :] < (begin + count)[:, None])
        packed = tl.where(inside, packed, LOWEST)
        if tl.max(tl.max(packed, 1) > tl.min(best, 1), 0):  # most tiles of a long past: no
            best = tl.bitonic_merge(tl.maximum(best, tl.topk(packed, BS)))
    slot = BS - tl.arange(0, BS)
    ids = tl.where(best == LOWEST, -1, 0xFFFFFFFF - (best & 0xFFFFFFFF))
    listed = block < NB
    sel += ((block.to(tl.int64) * HS + head) * S)[:, None]
    tl.store(sel + slot[None, :], ids.to(tl.int32), mask=listed[:, None] & (slot < S)[None, :])
    tl.store(sel, tl.where(count >= 0, begin + count, -1)[:, None], mask=listed[:, None])


@triton.jit
def _score(
    q, keys, weights, blocks, scores, START, NB, K,
    HS: tl.constexpr, G: tl.constexpr, D: tl.constexpr, LEARNED: tl.constexpr, BR: tl.constexpr,
    BC: tl.constexpr,
):  # fmt: skip
    """scores int32 [stripe, HS, K] of the blocks from START on; column 0 is the lowest chunk that
    any of BR blocks may see."""
    row, head = tl.program_id(0) * BR + tl.arange(0, BR), tl.program_id(2)
    lead, begin, count = _past_of(blocks, START + row, NB)
    low, stop = _range_of(begin, count)
    at = tl.program_id(1) * BC + tl.arange(0, BC)
    if tl.program_id(1) * BC < stop - low:  # one tile of all that these blocks score
        bits = _ordered(q, keys, weights, lead, count > 0, head, low + at, stop, HS, G, D, LEARNED)
        line = scores + ((row.to(tl.int64) * HS + head) * K)[:, None]
        tl.store(line + at[None, :], bits)


@triton.jit
def _read(scores, tile, begin, count, BC: tl.constexpr):
    """A tile of a block's scores: columns, unsigned integers in the same order, whether it may see
    them."""
    at = tile + tl.arange(0, BC)
    score = tl.load(scores + at).to(tl.uint32, bitcast=True) ^ 0x80000000
    return at, score, (at >= begin) & (at < begin + count)


@triton.jit
def _pick(
    blocks, scores, sel, START, NB, K, S, HS: tl.constexpr, BR: tl.constexpr, BC: tl.constexpr,
):  # fmt: skip
    """sel [NB, HS, S] of one block: its own chunk, then the best of its past in order of ids."""
    row, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    _, begin, count = _past_of(blocks, START + row // BR * BR + tl.arange(0, BR), NB)
    low, stop = _range_of(begin, count)
    _, begin, count = _past_of(blocks, START + row, NB)
    scores += (row * HS + head) * K
    sel += ((START + row) * HS + head) * S
    if START + row < NB:
        tl.store(sel, tl.where(count >= 0, begin + count, -1))
    begin -= low
    first = begin // BC * BC
    want = tl.minimum(tl.maximum(count, 0), S - 1)
    left, last = want, want.to(tl.uint32) * 0  # so many of the scores that begin like `last`
    if count > want:
        for shift in tl.static_range(24, -1, -8):  # the next 8 bits of the last that is kept
            found = tl.zeros([256], tl.int32)
            for tile in range(first, begin + count, BC):
                at, score, alike = _read(scores, tile, begin, count, BC)
                if shift < 24:
                    alike &= (score >> (shift + 8)) == last
                # only few scores have the first 24 bits of the last one that is kept
                some = True if shift > 0 else tl.max(alike.to(tl.int32), 0) > 0
                if some:
                    digit = ((score >> shift) & 255).to(tl.int32)
                    found += tl.histogram(digit, 256, mask=alike)
            above = tl.cumsum(found, 0, reverse=True)
            kept = tl.sum((above >= left).to(tl.int32), 0) - 1
            left -= tl.sum(tl.where(tl.arange(0, 256) > kept, found, 0), 0)
            last = (last << 8) + kept.to(tl.uint32)
    taken, equal = want * 0, want * 0
    for tile in range(first, begin + count, BC):
        at, score, within = _read(scores, tile, begin, count, BC)
        same = within & (score == last)
        more = within & (score > last)
        both = more.to(tl.int32) + (same.to(tl.int32) << 16)  # two sums in one
        sums = tl.cumsum(both, 0)
        ties = equal + (sums >> 16)  # the lowest ids are kept
        to = taken + (sums & 0xFFFF) + tl.minimum(ties, left)
        tl.store(sel + to, low + at, mask=more | (same & (ties <= left)))
        taken += tl.sum(both, 0) & 0xFFFF
        equal += tl.sum(both, 0) >> 16


def _sizes(tables: Tables) -> Tensor:  # [NC] key rows of each chunk
    return F.pad(tables.row, (0, 1), value=tables.rows).diff()


def plan_blocks(tables: Tables, query_block: int = 1) -> Tensor:
    """int32 [NB, 5]: first query row, queries, key row of the first query (-1: it sees nothing),
    how many chunks they may see, and the first of them. Blocks without queries see none. (Where a
    list is a union, or all that a slot has, its length stands in place of "how many".)

    It is a plan: made once, it serves all layers, as `tables._replace(blocks=...)`. Blocks lie in
    chunks, so the chunks tell them, with as many as a full chunk has in each: some are empty, but
    their number is known without asking the device.
    """
    if query_block == 1:
        last = tables.row[tables.own] + tables.q_pos % tables.chunk_size
        last = last.masked_fill(tables.past < 0, -1)
        start = torch.arange(len(last), device=last.device)
        columns = (start, torch.ones_like(last), last, tables.past + 1, tables.first)
    else:
        place = torch.arange(0, tables.chunk_size, query_block, device=tables.row.device)
        start = tables.row[:, None] + place
        size = (_sizes(tables)[:, None] - place).clamp(0, query_block)
        # a chunk's first row speaks for all its blocks: those without queries may lie behind it
        lead = tables.row.clamp(max=tables.rows - 1)[:, None].expand_as(start)
        seen = (tables.past[lead] + 1) * (size > 0)
        columns = (start, size, start, seen, tables.first[lead])
    return torch.stack(columns, dim=-1).int().flatten(0, -2)


def _inverse(lists: Tensor, tables: Tables, limit: int) -> tuple[Tensor, Tensor]:
    """The blocks that selected each chunk, in pieces of at most `limit` of them.

    lists [NB, Hs, S] -> order int32 [NB * Hs * S], blocks by head and chunk; pieces int32 [P, 5]:
    first key row, key rows, head, begin and end in `order`. P is an upper bound, the last pieces
    are empty: nothing is copied to the host.
    """
    assert lists.numel() < 1 << 31, f"lists must have fewer than 2**31 ids, got {lists.numel()}"
    (_, heads, width), many = lists.shape, len(tables.row)
    device, total = lists.device, heads * many
    key = lists + torch.arange(0, total, many, dtype=torch.int32, device=device)[:, None]
    key, order = torch.where(lists < 0, total, key).int().flatten().sort(stable=True)
    edges = torch.searchsorted(key, torch.arange(total + 1, dtype=torch.int32, device=device))
    needed = (edges.diff() + limit - 1) // limit  # [Hs * NC] pieces
    last = needed.cumsum(0)
    piece = torch.arange(len(order) // limit + total, device=device)
    owner = torch.searchsorted(last, piece, right=True).clamp(max=total - 1)
    begin = edges[owner] + (piece - last[owner] + needed[owner]) * limit
    # those of empty pieces are far behind the end
    begin, end = (torch.minimum(x, edges[owner + 1]) for x in (begin, begin + limit))
    chunk = owner % many
    pieces = (tables.row[chunk], _sizes(tables)[chunk], owner // many, begin, end)
    return (order // (heads * width)).int(), torch.stack(pieces, dim=-1).int()


INTERPRETED = not isinstance(_forward, triton.JITFunction)


def _launch(kernel, grid: tuple, *args, **constants) -> None:
    with torch.cuda.device_of(args[0]):
        kernel[grid](*args, **constants)


def _tiles(q: Tensor, k: Tensor, chunk_size: int, query_block: int) -> tuple[dict, dict]:
    """Constants of `_forward` and `_backward_q`, and those of `_backward_kv`.

    Chosen by what the compiler says for sm_90, not by timing: nothing spills at D <= 128, K and V
    have two buffers or more (of three stages, one may go to the row numbers). KEY: see `_scores`.
    """
    group, half = q.shape[1] // k.shape[1], q.element_size() == 2
    common = {"HKV": k.shape[1], "G": group, "C": chunk_size, "D": q.shape[2]}
    common |= {"num_stages": 3 if half else 1}
    lanes = min(128, max(16, triton.next_power_of_2(query_block * group))) if half else 16
    walk = {"BM": lanes, "BN": 64 if half else 32, "KEY": int(lanes >= 64)}
    walk |= {"PARTS": triton.cdiv(query_block * group, lanes)}
    walk |= {"num_warps": 8 if lanes == 128 else 4}
    inverse = {"BQ": query_block, "BM": 32 if half else 16, "BN": min(walk["BN"], chunk_size)}
    return common | walk, common | inverse | {"num_warps": 4}


def _walk(q, k, v, lists, chunk_size, query_block=1, split=False, found=None) -> tuple:
    """Launches `_forward` on lists (`rows`, `whose`, `blocks`, as from `_alone`) into `found`: out
    as q, log2-sum-exp2 [N * Hq]. split: several programs share a list."""
    rows, _, blocks = lists
    walk = _tiles(q, k, chunk_size, query_block)[0] | _shape(lists)
    every, exact = q.shape[:2].numel(), torch.promote_types(q.dtype, torch.float32)
    out, lse = found or (torch.empty_like(q), q.new_empty(every, dtype=exact))
    grid, splits = (len(blocks) * walk["PARTS"], k.shape[1]), 1
    if split:
        tiles = triton.cdiv(rows.shape[2] * chunk_size, walk["BN"])
        splits = min(tiles, SPLITS, max(1, PROGRAMS // (grid[0] * grid[1])))
        if q.shape[2] < 128 and q.element_size() == 2:  # small tiles: more of them under way
            walk |= {"num_stages": 4, "num_warps": 2}
    parts = (out, lse)
    if splits > 1:
        parts = (q.new_empty(splits, *q.shape, dtype=exact), lse.new_empty(splits, every))
    inputs = (q, k, v, *lists, *parts, rows.shape[2], every)
    _launch(_forward, (*grid, splits), *inputs, **walk)
    if splits > 1:
        merge = {"D": q.shape[2], "BS": triton.next_power_of_2(splits)}
        _launch(_merge, (every,), *parts, out, lse, every, splits, **merge)
    return out, lse


def _shape(lists: tuple) -> dict:
    """What the lists that are walked over are like, as constants of `_forward`, `_backward_q`."""
    rows, whose, blocks = lists
    return {"HS": rows.shape[1], "HB": blocks.shape[1], "UNION": whose is not rows}


def _alone(lists: Tensor, blocks: Tensor, tables: Tables) -> tuple:
    """Lists of chunks [NB, Hs, S] as int32 lists of key rows; `rows` in place of `whose` means that
    they are no unions."""
    rows = lists.contiguous()  # a chunk of one key is its row
    if tables.chunk_size > 1:
        rows = tables.row[lists].masked_fill(lists < 0, -1).int().contiguous()
    return rows, rows, blocks[:, None]


def neighbours(q, k, tables: Tables, query_block: int) -> int:
    """How many queries, each with a list of its own, read together; 1 in float32, in short
    contexts, in decode, with a query_block, or where keys have no query."""
    whole = len(q) == tables.rows and not tables.cached
    short = tables.widest * tables.chunk_size < LONG_CONTEXT
    if not whole or short or query_block > 1 or q.element_size() != 2:
        return 1
    return 1 << (max(1, min(UNITED, 128 // (q.shape[1] // k.shape[1]))).bit_length() - 1)


def _united(lists: Tensor, blocks: Tensor, tables: Tables, many: int) -> tuple:
    """Lists of groups of `many` neighbours as one, and the single lists: each query is live in one
    of the two."""
    _, heads, width = lists.shape
    most = many * width // 2  # a longer union is not read
    # groups begin anew with every sequence; `groups` is an upper bound, the last ones are empty
    groups = tables.rows // many + tables.sequences
    number = (tables.q_pos % many == 0).cumsum(0)
    starts = torch.searchsorted(number, torch.arange(1, groups + 2, device=lists.device))
    begin = starts[:-1]
    unions = torch.stack([begin, starts.diff(), begin, 0 * begin, 0 * begin], dim=-1).int()
    unions = unions[:, None].repeat(1, heads, 1)
    rows = lists.new_full((groups, heads, most), -1)
    whose = torch.zeros_like(rows, dtype=torch.int16)
    rest, _, blocks = _alone(lists, blocks, tables)
    blocks = blocks.repeat(1, heads, 1)
    stripe = max(1, MARKS // (heads * tables.widest))
    sizes = {"HS": heads, "BQ": many, "BS": min(READ, triton.next_power_of_2(many * width))}
    sizes |= {"BC": min(READ, triton.next_power_of_2(tables.widest))}
    for start in range(0, groups, stripe):
        grid = (min(stripe, groups - start), heads)
        marks = lists.new_zeros(*grid, tables.widest)
        inputs = (lists, tables.row, marks, rows, whose, unions, blocks)
        _launch(_unite, grid, *inputs, start, width, tables.widest, most, **sizes)
    return (rows, whose, unions), (rest, rest, blocks)


def _passes(q, k, lists, blocks, tables, query_block) -> list:
    """What `_forward` and `_backward_q` walk over, pass by pass: lists, and queries of a block."""
    many = neighbours(q, k, tables, query_block)
    if many == 1:
        return [(_alone(lists, blocks, tables), query_block)]
    together, alone = _united(lists.contiguous(), blocks, tables, many)
    return [(together, many), (alone, 1)]


class _Attention(torch.autograd.Function):
    """Attention of blocks to the chunks in their lists; backward makes the probabilities again."""

    @staticmethod
    def forward(ctx, q, k, v, lists, blocks, tables, query_block):
        found = None
        for given, queries in _passes(q, k, lists, blocks, tables, query_block):
            found = _walk(q, k, v, given, tables.chunk_size, queries, tables.cached, found)
        ctx.save_for_backward(q, k, v, *found, lists, blocks)
        ctx.plan = tables, query_block
        return found[0]

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, grad):
        q, k, v, out, lse, lists, blocks = ctx.saved_tensors
        tables, query_block = ctx.plan
        grad, delta, dq = grad.contiguous(), torch.empty_like(lse), torch.empty_like(q)
        dk, dv = (torch.zeros_like(x, dtype=lse.dtype) for x in (k, v))
        scatter = tables.chunk_size < ATOMIC_BELOW
        for given, queries in _passes(q, k, lists, blocks, tables, query_block):
            walk = _tiles(q, k, tables.chunk_size, queries)[0] | _shape(given)
            programs = (len(given[2]) * walk["PARTS"], k.shape[1])
            inputs = (q, k, v, out, grad, *given, lse, delta, dq, dk, dv, given[0].shape[2])
            _launch(_backward_q, programs, *inputs, **walk, SCATTER=scatter)
        if not scatter:
            inverse = _tiles(q, k, tables.chunk_size, query_block)[1]
            limit = max(1, PIECE_LANES // (inverse["BQ"] * inverse["G"]))
            order, pieces = _inverse(lists, tables, limit)
            grid = (len(pieces), inverse["C"] // inverse["BN"], k.shape[1] // lists.shape[1])
            inputs = (q, k, v, grad, order, pieces, blocks, lse, delta, dk, dv)
            _launch(_backward_kv, grid, *inputs, **inverse)
        return dq, dk.to(k.dtype), dv.to(v.dtype), None, None, None, None


def block_lead(tables: Tables, query_block: int) -> Tensor:
    """[N] row of the first query of each query's block. A block shares its own chunk, and a
    decoder's queries share nothing."""
    return torch.arange(len(tables.q_pos), device=tables.row.device) - tables.q_pos % query_block


def _check_kind(name: str, x: Tensor) -> None:  # the interpreter's bfloat16 arithmetic is wrong
    refused, where = (torch.bfloat16, "in") if INTERPRETED else (torch.float64, "outside")
    assert x.dtype != refused, f"dtype must not be {refused}, as {name} is, {where} the interpreter"


def _check(tables: Tables, query_block: int, **tensors: Tensor) -> None:
    """What the kernels ask of tensors, beyond what dsa.py does."""
    most = 1 if tables.cached else tables.chunk_size
    power = query_block.bit_count() == 1 and 1 <= query_block <= most
    assert power, f"query_block must be a power of two from 1 to {most}, got {query_block}"
    whole = query_block == 1 or len(tables.q_pos) == tables.rows
    assert whole, f"query_block must be 1 unless all keys have a query, got {query_block}"
    for name, x in tensors.items():
        here = f"cuda, or cpu with TRITON_INTERPRET=1: {name} is on {x.device}"
        assert x.device.type == ("cpu" if INTERPRETED else "cuda"), f"device must be {here}"
        _check_kind(name, x)
        assert x.is_contiguous(), f"{name} must be contiguous, got strides {x.stride()}"
        fits = x.shape[-1] in WIDTHS or name == "weights"
        assert fits, f"{name} must have a head width of {WIDTHS}, got {list(x.shape)}"


def check_tensors(
    tables: Tables,
    q,  # [N, Hq, D]
    k,  # [M, Hkv, D]
    *others: Tensor,
) -> None:
    """Queries and keys must fit the tables and each other, and all tensors in dtype and device."""
    N, Hq, D = q.shape
    M, Hkv, width = k.shape
    fits = (N, M, D) == (len(tables.q_pos), tables.rows, width) and Hq % Hkv == 0
    assert fits, f"q {q.shape}, k {k.shape} for {len(tables.q_pos)} queries, {tables.rows} keys"
    forms = {(x.dtype, x.device) for x in (q, k, *others)}
    same = forms == {(q.dtype, tables.row.device)} and q.is_floating_point()
    assert same, f"one floating dtype, on {tables.row.device}, got {forms}"


def _check_attention(q, k, v, tables: Tables, query_block: int) -> None:
    check_tensors(tables, q, k, v)
    assert v.shape == k.shape, f"v must be {k.shape}, got {v.shape}"
    _check(tables, query_block, q=q, k=k, v=v)


def sparse_attention(q, k, v, sel: Tensor, tables: Tables, query_block=1) -> Tensor:
    """Softmax attention of every query to the keys of its selected chunks at `pos` <= `q_pos`.

    q [N, Hq, D], k and v [M, Hkv, D] contiguous and of one dtype (float32, bfloat16, float16;
    float64 in the interpreter), D of WIDTHS, sel int64 [N, Hkv or 1, S] of global chunk ids, -1 =
    none -> [N, Hq, D]; a query that sees nothing gets 0. Gradients for q, k, v; dK and dV are
    summed in float32. Lists are read from high ids to low ones. To check `sel` the host waits for
    the GPU; `dsa_attention`, whose lists are its own, does not.
    """
    _check_attention(q, k, v, tables, query_block)
    check_selection(tables, sel, k.shape[1])
    shared = query_block == 1 or sel.equal(sel[block_lead(tables, query_block)])
    assert shared, f"sel must be the same for all queries of a query_block of {query_block}"
    blocks = plan_blocks(tables, query_block)
    lists = sel[blocks[:, 0].clamp(max=len(sel) - 1)]  # an empty block's list is not used
    lists = lists.int().sort(-1, descending=True).values  # gaps come last
    return _Attention.apply(q, k, v, lists, blocks, tables, query_block)


@torch.no_grad()
def select_chunks(q, k, tables: Tables, top_k: int, index=None, means=None, query_block=1):
    """Scores and selects the chunks of every query's past: dsa.select_chunks, scores never stored.

    q [N, Hq, D], k [M, Hkv, D], index = (q_index [N, J, E], k_index [M, E], weights [N, J]) or
    None, means as from `dsa.chunk_means` -> int64 [N, Hkv or 1, S]. `query_block` neighbours share
    what the first of them selects: nothing later is looked at. Equal scores give dsa.py's ids;
    scores may differ from dsa.py's in their last bits.
    Lists of more than STREAMED + 1 chunks (GLM-5's 2048 tokens), and all lists of a decoder, are in
    order of ids behind the own chunk; the scores of STRIPE blocks are stored at once.
    """
    check_tensors(tables, q, k)
    _check(tables, query_block, q=q, k=k)
    blocks = plan_blocks(tables, query_block)
    lists = _lists(q, k, tables, top_k, index, means, query_block, blocks).long()
    if query_block == 1:
        return lists
    place = tables.q_pos % tables.chunk_size // query_block
    return lists[tables.own * (tables.chunk_size // query_block) + place]


def _lists(q, k, tables, top_k, index, means, query_block, blocks) -> Tensor:  # [NB, Hs, S]
    assert type(top_k) is int and top_k >= 1, f"top_k must be an integer >= 1, got {top_k}"
    weights, width, learned = q, min(top_k, tables.widest), index is not None
    if learned:
        q, k, weights = index
        check_tensors(tables, q, k[:, None], weights)
        assert weights.shape == q.shape[:2], f"weights must be {q.shape[:2]}, got {weights.shape}"
        _check(tables, query_block, q_index=q, k_index=k, weights=weights)
    k = k[:, None] if learned else k
    assert means is None or tables.cached, "means must be left out but in decode"
    heads = k.shape[1]
    if means is None:
        means = k if tables.chunk_size == 1 else dsa.chunk_means(k, tables)
    if not learned:
        exact = torch.promote_types(q.dtype, torch.float32)
        q = q.unflatten(1, (heads, -1)).sum(2, dtype=exact)  # the summed query of a group
        weights = q  # only their dtype is looked at
    kind = torch.promote_types(q.dtype, means.dtype)
    shape = {"HS": heads, "G": q.shape[1] // heads, "D": q.shape[2], "LEARNED": learned}
    rows = 1 if tables.cached else SCORE_ROWS  # slots have no chunks in common
    shape |= {"BR": rows, "num_warps": 4, "num_stages": 1}
    inputs = (q.to(kind), means.to(kind), dsa.at_least_float32(weights), blocks)
    many = len(blocks)
    sel = torch.full((many, heads, width), -1, dtype=torch.int32, device=q.device)
    if width <= STREAMED + 1 and not tables.cached:
        kept = triton.next_power_of_2(max(2, width - 1))
        shape |= {"BC": max(32, kept), "BS": kept}
        grid = (triton.cdiv(many, SCORE_ROWS), heads)
        _launch(_select, grid, *inputs, sel, many, width, **shape)
        return sel
    # neighbours score all of the longest sequence, and what begins among them
    groups = triton.cdiv(min(many, STRIPE), rows)
    room = triton.cdiv(tables.widest + rows, READ) * READ
    scores = sel.new_empty(groups * rows, heads, room)
    shape |= {"num_warps": 8, "BC": SCORED}
    pick = {"HS": heads, "BR": rows, "BC": READ}
    for start in range(0, many, len(scores)):
        if width < tables.widest:  # otherwise all are kept, whatever they score
            grid = (groups, room // SCORED, heads)
            _launch(_score, grid, *inputs, scores, start, many, room, **shape)
        grid = (min(len(scores), many - start), heads)
        _launch(_pick, grid, blocks, scores, sel, start, many, room, width, **pick)
    return sel


def dsa_attention(q, k, v, tables: Tables, top_k: int, index=None, means=None, query_block=1):
    """Score, select and attend: q [N, Hq, D], k and v [M, Hkv, D] -> [N, Hq, D].

    Arguments, dtypes and checks as for `select_chunks` and `sparse_attention`; no host
    synchronisation. Nothing is kept for a backward pass that cannot come.
    """
    _check_attention(q, k, v, tables, query_block)
    blocks = plan_blocks(tables, query_block) if tables.blocks is None else tables.blocks
    with torch.no_grad():
        lists = _lists(q, k, tables, top_k, index, means, query_block, blocks)
    return _Attention.apply(q, k, v, lists, blocks, tables, query_block)


# ---- flash decoding


def plan_dense(positions: Tensor, length: int, heads: int) -> tuple:
    """What `dense_decode` must know of n slots at int64 `positions` [n], once for all layers: key
    rows in tiles of at most 64, and blocks; each key head of a slot is a sequence of its own."""
    tile = min(64, length & -length)
    past = (positions // tile).repeat_interleave(heads)
    first = torch.arange(len(past), device=past.device)
    local = torch.arange(length // tile, device=past.device)
    rows = first[:, None] * length + local * tile
    rows = rows.masked_fill(local > past[:, None], -1)[:, None]  # [n * Hkv, 1, tiles]
    last = first * length + positions.repeat_interleave(heads)
    columns = (first, torch.ones_like(past), last, past + 1, first)
    rows = rows.int()
    return (rows, rows, torch.stack(columns, dim=-1).int()[:, None]), tile


@torch.no_grad()
def dense_decode(q: Tensor, k: Tensor, v: Tensor, plan: tuple) -> Tensor:
    """One query a slot on all its cached keys up to its own (Flash-Decoding, Dao et al. 2023).

    q [n, Hq, D], k and v [n, T, Hkv, D] whose heads lie outside T, plan as from `plan_dense` ->
    [n, Hq, D]. No host synchronisation, and one shape for all lengths. AssertionError as above.
    """
    n, length, heads, width = k.shape
    flat = [x.transpose(1, 2).contiguous().view(-1, 1, width) for x in (k, v)]
    assert flat[0].data_ptr() == k.data_ptr(), "the heads of k must lie outside its positions"
    _check_kind("q", q)
    # contiguous: with one key head q may be a part of rows that hold keys and values, too
    rows = q.contiguous().view(n * heads, -1, width)
    return _walk(rows, *flat, *plan, split=True)[0].view(q.shape)


def check_selection(
    tables: Tables,
    sel,  # [N, heads or 1, S]
    heads: int,
) -> None:
    """A duplicate would count twice, a foreign id would mix sequences: never compute with them."""
    n = len(tables.q_pos)
    fits = sel.dtype == torch.int64 and sel.numel() and sel.shape[:-1] in ((n, 1), (n, heads))
    assert fits, f"sel must be int64 [{n}, {heads} or 1, S], got {sel.dtype} {sel.shape}"
    ids = sel.sort(-1).values
    local = ids - tables.first[:, None, None]
    wrong = (local < 0) | (local > tables.past[:, None, None])
    wrong[..., 1:] |= ids.diff() == 0
    wrong = (wrong & (ids != -1)).any(-1)  # [N, Hs]
    assert not wrong.any(), f"sel must hold unique ids that a query may see, or -1: {sel[wrong]}"
