"""dsa.py against naive oracles: Python loops, Python sort, masked dense attention in float64."""

import math

import numpy as np
import pytest
import torch
from torch.nn import functional as F

import dsa
from methods.indexer import Indexer

PACKS = [[0, 1], [0, 15], [0, 16], [0, 17], [0, 37, 100], [0, 0, 5, 5, 38, 39]]
NAN, INF = float("nan"), float("inf")


@pytest.fixture(autouse=True)
def seed():
    torch.manual_seed(0)


def edges(*values):
    return torch.tensor(values)


def random_qkv(queries, keys, heads=4, kv_heads=2, width=8, dtype=torch.float64):
    shapes = ((queries, heads, width), (keys, kv_heads, width), (keys, kv_heads, width))
    return [torch.randn(shape, dtype=dtype) for shape in shapes]


def random_index(n, heads=3, width=8, dtype=torch.float64):
    shapes = ((n, heads, width), (n, width), (n, heads))
    return [torch.randn(shape, dtype=dtype) for shape in shapes]


def naive_chunks(cu, chunk_size):
    """[(sequence start, key rows of a chunk), ...] in the order of global chunk ids."""
    chunks = []
    for start, stop in zip(cu, cu[1:], strict=False):
        for row in range(start, stop, chunk_size):
            chunks.append((start, list(range(row, min(row + chunk_size, stop)))))
    return chunks


def naive_scores(cu, chunk_size, score):
    """{(query row, chunk id): score(query row, key rows)} for chunks entirely in the past."""
    return {
        (t, c): score(t, rows)
        for start, stop in zip(cu, cu[1:], strict=False)
        for t in range(start, stop)
        for c, (owner, rows) in enumerate(naive_chunks(cu, chunk_size))
        if owner == start and max(rows) < t and len(rows) == chunk_size and t not in rows
    }


def naive_pick(cu, chunk_size, scores, top_k):
    """For each query: its own chunk, then the best past ones, ties to the lowest id."""
    chunks, picks = naive_chunks(cu, chunk_size), []
    for t in range(cu[-1]):
        own = next(c for c, (_, rows) in enumerate(chunks) if t in rows)
        past = [(-np.float32(s), c) for (query, c), s in scores.items() if query == t]
        picks.append([own, *(c for _, c in sorted(past))][:top_k])
    return picks


def masked_attention(q, k, v, seen):
    """Dense attention in float64 under a mask; seen[t][head] = the key rows query t may see."""
    q, k, v = (x.double() for x in (q, k, v))
    group = q.shape[1] // k.shape[1]
    mask = torch.full((len(q), k.shape[1], len(k)), -INF, dtype=torch.float64)
    for t, heads in enumerate(seen):
        for h, rows in enumerate(heads):
            mask[t, h, rows] = 0.0
    k, v, mask = (x.repeat_interleave(group, dim=1) for x in (k, v, mask))
    logits = torch.einsum("thd,shd->ths", q, k) / math.sqrt(q.shape[-1]) + mask
    return torch.einsum("ths,shd->thd", logits.softmax(-1), v)


def mean_scores(q, k, tables):
    return dsa.mean_scores(q, dsa.chunk_means(k, tables), tables)


def index_scores(q_index, k_index, weights, tables):
    means = dsa.chunk_means(k_index[:, None], tables)
    return dsa.index_scores(q_index, means, weights, tables)


def seen_rows(sel, cu, chunk_size):
    """What masked_attention wants, from a selection in global ids."""
    chunks = naive_chunks(cu, chunk_size)
    return [
        [[row for c in ids if c >= 0 for row in chunks[c][1] if row <= t] for ids in heads]
        for t, heads in enumerate(sel.tolist())
    ]


def random_selection(tables, heads, width):
    """Any visible chunks in any order, the own chunk not always among them, -1 between."""
    sel = torch.full((len(tables.q_pos), heads, width), -1)
    for t, (first, past) in enumerate(zip(tables.first, tables.past, strict=True)):
        for h in range(heads):
            ids = first + torch.randperm(int(past) + 1)[:width]
            sel[t, h, torch.randperm(width)[: len(ids)]] = ids
    return sel


# The naive form -----------------------------------------------------------------------------------


@pytest.mark.parametrize("chunk_size, top_k", [(1, 1), (1, 5), (4, 3), (8, 100)])
@pytest.mark.parametrize("learned", [False, True])
def test_attention_is_its_naive_form_sequence_by_sequence(chunk_size, top_k, learned):
    cu = [0, 37, 37, 55, 56]
    q, k, v = (x.round() for x in random_qkv(56, 56))  # so that scores are exact, and often equal
    index = [x.round() for x in random_index(56)] if learned else None
    tables = dsa.packed_tables(edges(*cu), chunk_size)
    got = dsa.dsa_attention(q, k, v, tables, top_k, index)
    for a, b in zip(cu, cu[1:], strict=False):
        own = index and [x[a:b] for x in index]
        want = dsa.naive_attention(q[a:b], k[a:b], v[a:b], chunk_size, top_k, own)
        torch.testing.assert_close(got[a:b], want)


# Tables -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("cu", PACKS)
@pytest.mark.parametrize("chunk_size", [1, 4, 16, 512])
def test_packed_tables_are_the_naive_chunks(cu, chunk_size):
    tables, chunks = dsa.packed_tables(edges(*cu), chunk_size), naive_chunks(cu, chunk_size)
    rows = [*tables.row.tolist(), tables.rows]
    found = [list(range(a, b)) for a, b in zip(rows, rows[1:], strict=False)]
    assert found == [chunk for _, chunk in chunks]
    for t in range(cu[-1]):
        own = int(tables.first[t] + tables.past[t])
        assert t in chunks[own][1] and chunks[own][0] + int(tables.q_pos[t]) == t
        assert chunks[int(tables.first[t])][1][0] == chunks[own][0]
    assert tables.widest == max(-(-(b - a) // chunk_size) for a, b in zip(cu, cu[1:], strict=False))


def test_cache_tables_place_slots_and_queries_move():
    tables = dsa.cache_tables(edges(0, 1, 9, 10), capacity=10, chunk_size=4)
    assert tables.row.tolist() == [s * 10 + c for s in range(4) for c in (0, 4, 8)]
    assert tables.q_pos.tolist() == [-1, 0, 8, 9] and tables.past.tolist() == [-1, 0, 2, 2]
    assert tables.first.tolist() == [0, 3, 6, 9]
    moved = tables._replace(q_pos=edges(10, 4, 5, 0) - 1)
    assert moved.blocks is None
    for a, b in zip(moved[:-1], dsa.cache_tables(edges(10, 4, 5, 0), 10, 4)[:-1], strict=True):
        assert torch.equal(torch.as_tensor(a), torch.as_tensor(b))


# Scores -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("cu", PACKS)
@pytest.mark.parametrize("chunk_size", [1, 16])
def test_scores_are_the_naive_scores_of_past_chunks(cu, chunk_size):
    tables = dsa.packed_tables(edges(*cu), chunk_size)
    q, k, _ = random_qkv(cu[-1], cu[-1])
    q_index, k_index, weights = random_index(cu[-1])

    def mean(t, rows):
        return [sum(float(q[t, 2 * h + g] @ k[rows, h].mean(0)) for g in (0, 1)) for h in (0, 1)]

    def lightning(t, rows):
        key = k_index[rows].mean(0)
        return [
            sum(float(w * max(x @ key, 0)) for w, x in zip(weights[t], q_index[t], strict=True))
        ]

    for got, score, heads in (
        (mean_scores(q, k, tables), mean, 2),
        (index_scores(q_index, k_index, weights, tables), lightning, 1),
    ):
        want = torch.full((cu[-1], heads, tables.widest), -INF, dtype=torch.float64)
        for (t, c), values in naive_scores(cu, chunk_size, score).items():
            want[t, :, c - int(tables.first[t])] = torch.tensor(values)
        assert got.shape == want.shape
        assert torch.equal(got.isinf(), want.isinf()), "wrong set of candidate chunks"
        torch.testing.assert_close(got, want)


# Selection ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("cu", PACKS)
@pytest.mark.parametrize("chunk_size", [1, 4])
@pytest.mark.parametrize("top_k", [1, 3, 200])
def test_selection_is_sorted_unique_and_ties_go_to_the_lowest_id(cu, chunk_size, top_k):
    tables = dsa.packed_tables(edges(*cu), chunk_size)
    values = torch.tensor([-INF, -1.5, -0.0, 0.0, 0.0, 2.0, 1e-40, -1e-40, INF])
    scores = values[torch.randint(len(values), (cu[-1], 2, tables.widest))]  # ties everywhere
    sel = dsa.top_chunks(scores, tables, top_k)
    assert sel.shape == (cu[-1], 2, min(top_k, tables.widest)) and sel.dtype == torch.int64
    for h in (0, 1):
        first = tables.first.tolist()
        past = naive_scores(cu, chunk_size, lambda t, rows: None)
        past = {(t, c): float(scores[t, h, c - first[t]]) for t, c in past}
        for t, ids in enumerate(naive_pick(cu, chunk_size, past, top_k)):
            assert sel[t, h].tolist() == ids + [-1] * (sel.shape[2] - len(ids))
            assert len(ids) == len(set(ids))


def test_scores_of_future_chunks_cannot_be_selected_whatever_they_are():
    tables = dsa.packed_tables(edges(0, 37, 100), 4)
    scores = torch.randn(100, 1, tables.widest)
    sel = dsa.top_chunks(scores, tables, 3)
    hidden = torch.arange(tables.widest) >= tables.past[:, None, None]
    for value in (INF, -INF, NAN, -NAN, 1e9):
        again = dsa.top_chunks(scores.masked_fill(hidden, value), tables, 3)
        assert torch.equal(sel, again)
    own = tables.first + tables.past
    for value in (INF, NAN):  # nor can any candidate push out the own chunk
        sel = dsa.top_chunks(torch.full_like(scores, value), tables, 1)
        assert torch.equal(sel[:, 0, 0], own)


@pytest.mark.parametrize("chunk_size", [1, 16])
@pytest.mark.parametrize("learned", [False, True])
def test_select_chunks_by_blocks_is_select_at_once(chunk_size, learned, monkeypatch):
    cu = edges(0, 37, 37, 100, 101)
    q, k, v = random_qkv(101, 101)
    index = random_index(101) if learned else None
    tables = dsa.packed_tables(cu, chunk_size)
    scores = index_scores(*index, tables) if learned else mean_scores(q, k, tables)
    want = dsa.top_chunks(scores, tables, 4)
    monkeypatch.setattr(dsa, "QUERY_BLOCK", 7)  # blocks that begin inside tiles and sequences
    assert torch.equal(dsa.select_chunks(q, k, tables, 4, index), want)
    attended = dsa.sparse_attention(q, k, v, want, tables)
    assert torch.equal(dsa.dsa_attention(q, k, v, tables, 4, index=index), attended)


# Attention ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("cu", PACKS)
@pytest.mark.parametrize("chunk_size", [1, 16])
@pytest.mark.parametrize("heads", [(1, 1), (4, 2), (6, 1)])
def test_forward_and_gradients_are_those_of_masked_dense_attention(cu, chunk_size, heads):
    tables = dsa.packed_tables(edges(*cu), chunk_size)
    q, k, v = (x.requires_grad_() for x in random_qkv(cu[-1], cu[-1], *heads))
    for sel_heads in {1, heads[1]}:
        sel = random_selection(tables, sel_heads, 3)
        if sel_heads < heads[1]:
            seen = seen_rows(sel.expand(-1, heads[1], -1), cu, chunk_size)
        else:
            seen = seen_rows(sel, cu, chunk_size)
        want = masked_attention(q, k, v, seen)
        weight = torch.randn_like(want)
        want_grads = torch.autograd.grad((want * weight).sum(), (q, k, v))
        tolerance = {torch.float64: 1e-12, torch.float32: 1e-5, torch.bfloat16: 2e-2}
        for dtype, error in tolerance.items():
            inputs = [x.detach().to(dtype).requires_grad_() for x in (q, k, v)]
            got = dsa.sparse_attention(*inputs, sel, tables)
            assert got.dtype == dtype and got.shape == want.shape
            grads = torch.autograd.grad((got * weight.to(dtype)).sum(), inputs)
            for a, b in zip((got, *grads), (want, *want_grads), strict=True):
                assert (a.double() - b).norm() <= error * b.norm() + 1e-12, f"{dtype}"


def test_gradcheck(monkeypatch):
    monkeypatch.setattr(dsa, "GATHER_ELEMENTS", 200)  # several blocks
    tables = dsa.packed_tables(edges(0, 3, 12), 4)
    q, k, v = (x.requires_grad_() for x in random_qkv(12, 12, width=3))
    sel = random_selection(tables, 2, 2)
    sel[5] = -1  # sees nothing: output and gradients 0
    assert torch.autograd.gradcheck(lambda *x: dsa.sparse_attention(*x, sel, tables), (q, k, v))
    out = dsa.sparse_attention(q, k, v, sel, tables)
    assert (out[5] == 0).all()
    assert (torch.autograd.grad(out.sum(), q)[0][5] == 0).all()


def test_blocks_change_no_bit_of_the_output(monkeypatch):
    tables = dsa.packed_tables(edges(0, 37, 100), 4)
    q, k, v = (x.requires_grad_() for x in random_qkv(100, 100, width=16, dtype=torch.float32))
    results = []
    for gather in (1 << 30, 5000, 1):
        monkeypatch.setattr(dsa, "GATHER_ELEMENTS", gather)
        out = dsa.dsa_attention(q, k, v, tables, 3)
        results.append((out, *torch.autograd.grad(out.square().sum(), (q, k, v))))
    for other in results[1:]:
        assert torch.equal(results[0][0], other[0])
        # gradients are sums over blocks: equal to rounding
        torch.testing.assert_close(results[0], other, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("chunk_size", [1, 16, 64, 512])
@pytest.mark.parametrize("length", [1, 15, 63, 64, 65])
def test_selecting_everything_is_dense_attention(chunk_size, length):
    tables = dsa.packed_tables(edges(0, length), chunk_size)
    for dtype, error in ((torch.float64, 1e-13), (torch.float32, 2e-6)):
        q, k, v = random_qkv(length, length, dtype=dtype)
        got = dsa.dsa_attention(q, k, v, tables, top_k=tables.widest)
        heads_first = (x.transpose(0, 1)[None] for x in (q, k, v))
        want = F.scaled_dot_product_attention(*heads_first, is_causal=True, enable_gqa=True)
        torch.testing.assert_close(got, want[0].transpose(0, 1), rtol=0, atol=error)


@pytest.mark.parametrize("chunk_size", [1, 4, 16])
@pytest.mark.parametrize("learned", [False, True])
def test_future_tokens_and_other_sequences_change_nothing(chunk_size, learned):
    cu, now = [0, 30, 75, 90], 61  # the query at row 61 may see rows 30 ... 61
    tables = dsa.packed_tables(edges(*cu), chunk_size)
    tensors = [*random_qkv(90, 90, dtype=torch.float32), *random_index(90, dtype=torch.float32)]

    def result(tensors):
        q, k, v, *index = tensors
        index = index if learned else None
        sel = dsa.select_chunks(q, k, tables, 3, index)
        return sel[30 : now + 1], dsa.sparse_attention(q, k, v, sel, tables)[30 : now + 1]

    sel, out = result(tensors)
    for value in (0.0, 1e6, NAN):
        other = [x.clone() for x in tensors]
        for x in other:
            x[now + 1 :] = value
            x[:30] = value
        got = result(other)
        assert torch.equal(sel, got[0]) and torch.equal(out, got[1]), f"{value} leaked"


def everything(start, stop, cu, tensors, chunk_size, capacity):
    """Scores and outputs, without and with an indexer, of rows start ... stop - 1 packed as cu."""
    tables = dsa.packed_tables(edges(*cu), chunk_size, capacity)
    q, k, v, *index = (x[start:stop] for x in tensors)
    yield mean_scores(q, k, tables)
    yield index_scores(*index, tables)
    yield dsa.dsa_attention(q, k, v, tables, 3)
    yield dsa.dsa_attention(q, k, v, tables, 3, index=index)


@pytest.mark.parametrize("chunk_size", [1, 4, 8, 16])
@pytest.mark.parametrize("width", [8, 20, 32, 64])
def test_packed_is_bitwise_separate_with_a_fixed_capacity(chunk_size, width):
    for _ in range(3):
        cu = [0, *torch.tensor([*torch.randint(1, 60, (4,)), 13]).cumsum(0).tolist()]
        tensors = random_qkv(cu[-1], cu[-1], width=width, dtype=torch.float32)
        tensors += random_index(cu[-1], width=width, dtype=torch.float32)
        packed = everything(0, cu[-1], cu, tensors, chunk_size, 64)
        alone = (
            everything(a, b, [0, b - a], tensors, chunk_size, 64)
            for a, b in zip(cu, cu[1:], strict=False)
        )
        for got, *want in zip(packed, *alone, strict=True):
            assert torch.equal(got, torch.cat(want))


# Cached decode ------------------------------------------------------------------------------------


def decode_all(q, k, v, index, capacity, chunk_size, top_k, learned):
    """Feeds sequences [B][T, ...] token by token through caches full of NaN -> [B][T, Hq, D]."""
    slots, (kv_heads, width) = len(q), k[0].shape[1:]
    keys = torch.full((slots, capacity, kv_heads, width), NAN)
    values, index_keys = keys.clone(), torch.full((slots, capacity, 1, width), NAN)
    lengths = torch.zeros(slots, dtype=torch.int64)
    tables = dsa.cache_tables(lengths, capacity, chunk_size)
    scored = index_keys if learned else keys
    means = dsa.chunk_means(scored.flatten(0, 1), tables)
    outs = [[] for _ in range(slots)]
    for t in range(max(len(x) for x in q)):
        live = [b for b in range(slots) if t < len(q[b])]
        for b in live:
            keys[b, t], values[b, t], index_keys[b, t, 0] = k[b][t], v[b][t], index[b][1][t]
        lengths = torch.tensor([t + 1 if b in live else 0 for b in range(slots)])
        tables = tables._replace(q_pos=lengths - 1)
        means[tables.own] = dsa.chunk_means(scored.flatten(0, 1), tables, tables.own)
        query = torch.stack([q[b][min(t, len(q[b]) - 1)] for b in range(slots)])
        triple = [torch.stack([x[i][min(t, len(x[i]) - 1)] for x in index]) for i in (0, 2)]
        triple = (triple[0], index_keys.flatten(0, 2), triple[1]) if learned else None
        flat = (keys.flatten(0, 1), values.flatten(0, 1))
        out = dsa.dsa_attention(query, *flat, tables, top_k, index=triple, means=means)
        for b in range(slots):
            if b in live:
                outs[b].append(out[b])
            else:
                assert (out[b] == 0).all(), "an empty slot must give 0"
    return [torch.stack(rows) for rows in outs]


@pytest.mark.parametrize("chunk_size", [1, 4, 16])
@pytest.mark.parametrize("learned", [False, True])
def test_decode_equals_prefill_at_every_step(chunk_size, learned):
    lengths, capacity, top_k = [1, 33, 17], 36, 3
    sequences = [random_qkv(n, n, dtype=torch.float32) for n in lengths]
    index = [random_index(n, dtype=torch.float32) for n in lengths]
    q, k, v = zip(*sequences, strict=True)
    got = decode_all(q, k, v, index, capacity, chunk_size, top_k, learned)
    for b, n in enumerate(lengths):
        tables = dsa.packed_tables(edges(0, n), chunk_size)
        own = index[b] if learned else None
        want = dsa.dsa_attention(q[b], k[b], v[b], tables, top_k, index=own)
        torch.testing.assert_close(got[b], want, rtol=0, atol=1e-5)


def test_decode_is_bitwise_the_same_in_any_slot_with_any_neighbours():
    for trial in range(60):
        slots, chunk_size = (1, 3, 8, 16)[trial % 4], (1, 4, 16)[trial % 3]
        capacity, width = (40, 64)[trial % 2], (8, 32, 20)[trial % 3]
        kv_heads = 1 + trial % 2
        same_q, same_k, same_v = random_qkv(1, capacity, 4, kv_heads, width, torch.float32)
        same_index = random_index(capacity, 3, width, torch.float32)
        length, results = int(torch.randint(1, capacity + 1, ())), [[], []]
        for slot in {0, slots // 2, slots - 1, int(torch.randint(slots, ()))}:
            for scale in (1.0, 1e4, NAN):
                shapes = (slots, slots * capacity, 4, kv_heads, width, torch.float32)
                q, k, v = (x * scale for x in random_qkv(*shapes))
                index = [x * scale for x in random_index(slots * capacity, 3, width, torch.float32)]
                index = [index[0][:slots], index[1], index[2][:slots]]
                lengths = torch.randint(0, capacity + 1, (slots,))
                rows = slice(slot * capacity, slot * capacity + length)  # behind: neighbours' noise
                lengths[slot], q[slot] = length, same_q[0]
                k[rows], v[rows] = same_k[:length], same_v[:length]
                index[0][slot], index[2][slot] = same_index[0][0], same_index[2][0]
                index[1][rows] = same_index[1][:length]
                tables = dsa.cache_tables(lengths, capacity, chunk_size)
                for kind, triple in enumerate((None, index)):
                    out = dsa.dsa_attention(q, k, v, tables, 3, index=triple)
                    results[kind].append(out[slot])
        for kind in results:
            assert not kind[0].isnan().any()
            assert all(torch.equal(kind[0], other) for other in kind), f"trial {trial}"


def test_kept_means_are_bitwise_the_means_of_the_whole_cache():
    k = torch.randn(3 * 40, 2, 8)
    tables = dsa.cache_tables(edges(1, 1, 1), 40, 8)
    whole = dsa.chunk_means(k, tables)
    means = torch.full_like(whole, NAN)
    for t in range(40):
        tables = tables._replace(q_pos=edges(t, min(t, 16), -1))
        means[tables.own] = dsa.chunk_means(k, tables, tables.own)
    assert torch.equal(means[:5], whole[:5]) and torch.equal(means[5:7], whole[5:7])
    packed = dsa.packed_tables(edges(0, 40), 8)
    assert torch.equal(dsa.chunk_means(k[:40], packed), whole[:5])


# Gradients of scores, the indexer, bad input ------------------------------------------------------


@pytest.mark.parametrize("chunk_size", [1, 4])
def test_index_scores_have_gradients_and_selection_has_none(chunk_size):
    tables = dsa.packed_tables(edges(0, 5, 18), chunk_size)
    index = [x.requires_grad_() for x in random_index(18, width=4)]

    def finite(*index):
        scores = index_scores(*index, tables)
        return scores[scores.isfinite()]

    assert torch.autograd.gradcheck(finite, index)
    q, k, v = (x.requires_grad_() for x in random_qkv(18, 18))
    scores = index_scores(*index, tables)
    sel = dsa.top_chunks(scores, tables, 2)
    assert not sel.requires_grad
    out = dsa.dsa_attention(q, k, v, tables, 2, index)
    grads = torch.autograd.grad(out.sum(), (*index, q, k, v), allow_unused=True)
    assert all(g is None for g in grads[:3]), "the loss of the output reached the indexer"
    assert all(g.abs().sum() > 0 for g in grads[3:])
    sel = dsa.select_chunks(q, k, tables, 2)
    fixed = torch.autograd.grad(dsa.sparse_attention(q, k, v, sel, tables).sum(), (q, k, v))
    chosen = torch.autograd.grad(dsa.dsa_attention(q, k, v, tables, 2).sum(), (q, k, v))
    assert all(torch.equal(a, b) for a, b in zip(fixed, chosen, strict=True))


def test_indexer_is_the_formula_and_its_rotation_is_relative():
    indexer = Indexer(12, heads=3, head_width=8).double()
    hidden, positions = torch.randn(5, 12, dtype=torch.float64), torch.arange(5)
    q, k, w = indexer(hidden, positions)
    assert q.shape == (5, 3, 8) and k.shape == (5, 8) and w.shape == (5, 3)
    torch.testing.assert_close(w, hidden @ indexer.weight.weight.T / math.sqrt(3 * 8))
    still = F.layer_norm(hidden @ indexer.key.weight.T, (8,), eps=1e-6)
    torch.testing.assert_close(k[:, 4:], still[:, 4:])  # channels without position
    torch.testing.assert_close(k[0], still[0])  # position 0 turns nothing
    assert (k[1:, :4] != still[1:, :4]).all()
    angle = 3 * 10000.0 ** (-1 / 2)  # position 3, second of two frequencies: channels 1 and 3
    turned = still[3, 1] * math.cos(angle) - still[3, 3] * math.sin(angle)
    torch.testing.assert_close(k[3, 1], turned, rtol=1e-6, atol=1e-6)
    far = indexer(hidden, positions + 1000)
    torch.testing.assert_close(q[4] @ k[1], far[0][4] @ far[1][1], rtol=1e-4, atol=1e-4)
    tables = dsa.packed_tables(edges(0, 5), 1)
    index_scores(q, k, w, tables)[4, 0, :4].sum().backward()
    assert all(p.grad.abs().sum() > 0 for p in indexer.parameters())


def select(means):
    """select_chunks of random tensors."""
    tables, (q, k, _) = dsa.packed_tables(edges(0, 6), 2), random_qkv(6, 6)
    return dsa.select_chunks(q, k, tables, 2, random_index(6), means)


BAD = {
    "chunk_size 0": (lambda: dsa.packed_tables(edges(0, 4), 0), "chunk_size.*1 to 512.*got 0"),
    "chunk_size 24": (lambda: dsa.cache_tables(edges(1), 8, 24), "chunk_size.*power.*got 24"),
    "cu falls": (lambda: dsa.packed_tables(edges(0, 5, 4), 2), r"cu_seqlens.*\[0, 5, 4\]"),
    "capacity": (lambda: dsa.packed_tables(edges(0, 4, 9), 2, 3), "capacity.*>= 5, got 3"),
    "means": (lambda: select(means=torch.zeros(4, 1, 8).double()), "4 means of 3 chunks"),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_input_is_named(name):
    call, message = BAD[name]
    library = (AttributeError, RuntimeError, IndexError)  # Python or torch may notice it first
    with pytest.raises((AssertionError, *library), match=message):
        call()
