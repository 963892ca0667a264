"""dsa_triton.py against naive oracles, three ways: interpreted on a CPU, compiled, on a GPU.

The interpreter must be chosen before Triton is imported and would stay chosen, so that the tests
of kernels run in a process of their own (`test_interpreter`), or here on a GPU, never both. Without
a GPU every kernel is still compiled for one (sm_90) by the real compiler.
"""

import inspect
import os
import re
import subprocess
import sys
import tempfile
from functools import partial

import numpy as np
import pytest
import torch
from test_dsa import (
    index_scores,
    masked_attention,
    mean_scores,
    naive_pick,
    naive_scores,
    random_index,
    random_selection,
    seen_rows,
)
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode

import dsa
from cache import decode, make_cache, prefill
from fast.graphs import Captured
from model import GPT, ModelConfig, pack_tokens

triton = pytest.importorskip("triton", reason="Triton is not installed")
import dsa_triton  # noqa: E402

DEVICE = "cpu" if dsa_triton.INTERPRETED else "cuda"
kernels = (lambda test: test) if dsa_triton.INTERPRETED else pytest.mark.gpu
compiler = pytest.mark.skipif(dsa_triton.INTERPRETED, reason="needs TRITON_INTERPRET unset")
NAN = float("nan")
DTYPES = [torch.float64, torch.float32, torch.float16, torch.bfloat16]
HALF = torch.float16 if dsa_triton.INTERPRETED else torch.bfloat16
ERROR = dict(zip(DTYPES, (1e-12, 1e-5, 2e-3, 2e-2), strict=True))


@pytest.fixture(autouse=True)
def setting(monkeypatch):
    torch.manual_seed(0)
    monkeypatch.setattr(dsa_triton, "LONG_CONTEXT", 0)
    if DEVICE == "cpu":  # the interpreter sorts element by element
        monkeypatch.setattr(dsa_triton, "SCORE_ROWS", 16)


def packed(*cu, chunk_size):
    return dsa.packed_tables(torch.tensor(cu, device=DEVICE), chunk_size)


def some_queries(tables, which: slice):
    """The tables of a prefill that continues: all keys, and only these queries."""
    return tables._replace(q_pos=tables.q_pos[which], first=tables.first[which])


def random_qkv(queries, keys, heads=(4, 2), width=16, dtype=torch.float32):
    shapes = ((queries, heads[0], width), (keys, heads[1], width), (keys, heads[1], width))
    return [torch.randn(shape).to(DEVICE, dtype) for shape in shapes]


def close(got, want, error):
    """Relative error of whole tensors, and their shapes."""
    assert got.shape == want.shape
    assert (got.double().cpu() - want.double().cpu()).norm() <= error * want.norm().cpu() + 1e-12


@compiler
def test_interpreter():
    """The tests of kernels in this file, interpreted on the CPU, in a process of their own."""
    if triton.__version__ < "3.7" and np.lib.NumpyVersion(np.__version__) >= "2.4.0":
        pytest.skip("the interpreter of Triton 3.6 cannot loop with numpy >= 2.4")
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-m", "not gpu", __file__]
    environment = os.environ | {"TRITON_INTERPRET": "1"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stdout
    assert int(re.search(r"(\d+) passed", done.stdout)[1]) >= 75, done.stdout


@kernels
@pytest.mark.skipif(DEVICE != "cpu", reason="on a GPU there is `bench.py gpu`")
def test_what_a_gpu_is_asked_first_launches_every_kernel(tmp_path, monkeypatch):
    """`bench.py gpu` in a rehearsal, float16 only: float32 is on disk already, and the first case,
    of which two forms follow."""
    from lab import gpu, plots

    first, *others = gpu.CASES
    known = [{"case": case, "dtype": "float32"} for case in gpu.CASES]
    known.append({"case": first, "dtype": "float16"})
    plots.save_result(tmp_path, "kernels", {"rows": known})
    launched, launch = set(), dsa_triton._launch

    def note(kernel, *arguments, **constants):
        launched.add(kernel.fn.__name__)
        launch(kernel, *arguments, **constants)

    monkeypatch.setattr(dsa_triton, "_launch", note)
    monkeypatch.setattr(dsa_triton, "LONG_CONTEXT", 0)
    gpu.kernels(tmp_path, small=True)
    source = inspect.getsource(dsa_triton)
    assert launched == set(re.findall(r"_launch\((_\w+),", source)) and len(launched) == 8
    rows = plots.load_result("kernels", tmp_path)["rows"][len(known) :]
    assert [row["case"] for row in rows] == others
    for row in rows:
        assert row["repeats bitwise"] and row.get("same lists", 1.0) == 1.0
        assert 0 < row["largest error"] < 4e-3, row


# Attention ----------------------------------------------------------------------------------------

FORWARD = [  # cu_seqlens, chunk size, Hq, Hkv, Hs, width, query block, dtype, S
    ([0, 1], 16, 1, 1, 1, 16, 1, torch.float64, 2),
    ([0, 1, 16, 32, 49], 16, 3, 1, 1, 16, 1, torch.float32, 3),
    ([0, 21, 70], 16, 4, 2, 2, 32, 8, torch.float32, 3),
    ([0, 21, 70], 16, 4, 2, 1, 32, 16, torch.float32, 3),
    ([0, 0, 5, 5, 38, 39], 16, 4, 1, 1, 32, 16, torch.float64, 2),
    ([0, 5, 70], 32, 2, 2, 2, 64, 16, HALF, 2),
    ([0, 17, 82], 64, 8, 1, 1, 64, 16, torch.float16, 2),
    ([0, 17, 31], 64, 3, 1, 1, 128, 1, HALF, 1),
    ([0, 257], 256, 1, 1, 1, 32, 128, torch.float16, 2),
    ([0, 5, 30], 1, 4, 2, 1, 16, 1, torch.float32, 7),
    ([0, 5, 40], 1, 16, 1, 1, 16, 1, torch.float16, 9),
    ([0, 21, 70], 16, 4, 2, 2, 32, 1, torch.float16, 3),
    ([0, 21, 70], 16, 4, 2, 1, 32, 1, torch.float16, 3),
    ([0, 7, 40], 8, 16, 1, 1, 16, 8, torch.float16, 3),
    ([0, 7, 40], 4, 4, 2, 2, 32, 2, HALF, 3),
]


@kernels
@pytest.mark.parametrize("case", FORWARD, ids=lambda case: f"chunk {case[1]}, block {case[6]}")
def test_forward_and_gradients_are_those_of_masked_dense_attention(case, monkeypatch):
    monkeypatch.setattr(dsa_triton, "PIECE_LANES", 64)  # several pieces of an inverse list
    cu, chunk_size, *heads, select_heads, width, query_block, dtype, many = case
    tables = dsa.packed_tables(torch.tensor(cu), chunk_size)
    sel = random_selection(tables, select_heads, many)
    sel[cu[-1] // 2 :: 11] = -1  # these see nothing
    sel = sel[dsa_triton.block_lead(tables, query_block)]
    empty = (sel < 0).all(-1).expand(-1, heads[1]).repeat_interleave(heads[0] // heads[1], 1)
    seen = seen_rows(sel.expand(-1, heads[1], -1), cu, chunk_size)
    seen = [[rows or [0] for rows in by_head] for by_head in seen]  # no softmax over nothing
    for kind in (dtype,) if DEVICE == "cpu" else DTYPES[1:]:
        inputs = [x.requires_grad_() for x in random_qkv(cu[-1], cu[-1], heads, width, kind)]
        exact = [x.detach().cpu().double().requires_grad_() for x in inputs]
        want = masked_attention(*exact, seen).masked_fill(empty[..., None], 0.0)
        weight = torch.randn_like(want)
        want_grads = torch.autograd.grad((want * weight).sum(), exact)
        given = sel.to(DEVICE), packed(*cu, chunk_size=chunk_size)
        got = dsa_triton.sparse_attention(*inputs, *given, query_block)
        assert got.dtype == kind
        grads = torch.autograd.grad((got * weight.to(got)).sum(), inputs)
        for a, b in zip((got, *grads), (want, *want_grads), strict=True):
            close(a, b, ERROR[kind])
        assert (got[empty] == 0).all() and (grads[0][empty] == 0).all()


@kernels
@pytest.mark.parametrize("chunk_size,many", [(1, 4), (4, 4), (2, 8), (16, 8)])
def test_lists_of_neighbours_are_united_where_that_halves_them(chunk_size, many, monkeypatch):
    monkeypatch.setattr(dsa_triton, "MARKS", 500)  # stripe by stripe
    length = 24 * max(chunk_size, many) + 3
    cu = [0, 2, 2, 3, length]
    lists = random_selection(dsa.packed_tables(torch.tensor(cu), chunk_size), 2, 3)
    lists[length // 2 :: 3] = lists[length // 2]  # some agree
    tables, lists = packed(*cu, chunk_size=chunk_size), lists.to(DEVICE).int()
    blocks = dsa_triton.plan_blocks(tables)
    together, rest = dsa_triton._united(lists, blocks, tables, many)
    found, ways = set(), set()
    rows, whose, unions = (x.tolist() for x in together)
    for block, by_head in enumerate(unions):
        for head, (start, size, last, count, _) in enumerate(by_head):
            if size:
                assert last == start and size <= many
                assert rows[block][head][:count] == sorted(set(rows[block][head][:count]))
                entries = zip(rows[block][head][:count], whose[block][head][:count], strict=True)
                new = [(start + n, head, row) for row, bits in entries for n in bits_of(bits)]
                ways.add("united")
                assert 2 * count <= len(new) and not found & set(new)
                found |= set(new)
    for query, by_head in enumerate(rest[2].tolist()):
        for head, line in enumerate(by_head):
            assert line == [query, line[1], *blocks[query, 2:].tolist()]
            if line[1]:
                ways.add("alone")
                new = {(query, head, row) for row in rest[0][query, head].tolist() if row >= 0}
                assert not found & new
                found |= new
    want = {
        (query, head, tables.row[chunk].item())
        for query, by_head in enumerate(lists.tolist())
        for head, chunks in enumerate(by_head)
        for chunk in chunks
        if chunk >= 0
    }
    assert found == want and ways == {"united", "alone"}


def bits_of(number: int) -> list:
    return [n for n in range(16) if number >> n & 1]


@kernels
@pytest.mark.skipif(DEVICE != "cpu", reason="float64 is for the interpreter")
@pytest.mark.parametrize("chunk_size,query_block", [(1, 1), (4, 1), (4, 2)])
def test_gradcheck(chunk_size, query_block, monkeypatch):
    monkeypatch.setattr(dsa_triton, "ATOMIC_BELOW", 4)
    n = chunk_size + 3  # a sequence of one token, and one of more than a chunk
    tables = packed(0, 1, n, chunk_size=chunk_size)
    q, k, v = (x.requires_grad_() for x in random_qkv(n, n, (2, 1), 16, torch.float64))
    sel = dsa.select_chunks(q, k, tables, 2)[dsa_triton.block_lead(tables, query_block)]

    def attend(*inputs):
        return dsa_triton.sparse_attention(*inputs, sel, tables, query_block)

    assert torch.autograd.gradcheck(attend, (q, k, v), fast_mode=True)


@kernels
@pytest.mark.parametrize("chunk_size,length", [(1, 9), (16, 17), (64, 63), (64, 65), (128, 20)])
def test_selecting_everything_is_dense_attention(chunk_size, length):
    tables, (q, k, v) = packed(0, length, chunk_size=chunk_size), random_qkv(length, length)
    got = dsa_triton.dsa_attention(q, k, v, tables, tables.widest, query_block=min(8, chunk_size))
    heads_first = (x.transpose(0, 1)[None] for x in (q, k, v))
    want = F.scaled_dot_product_attention(*heads_first, is_causal=True, enable_gqa=True)
    torch.testing.assert_close(got, want[0].transpose(0, 1), rtol=0, atol=5e-6)


@kernels
@pytest.mark.parametrize(
    "chunk_size,query_block,learned", [(1, 1, False), (16, 1, True), (16, 8, False), (16, 8, True)]
)
def test_future_tokens_and_other_sequences_change_nothing(chunk_size, query_block, learned):
    now, n = chunk_size + 5, chunk_size + 8  # the query at row `now` may see rows 3 ... now
    tables = packed(0, 3, n - 1, n, chunk_size=chunk_size)
    tensors = random_qkv(n, n, heads=(2, 1)) + random_index(n, width=16, dtype=torch.float32)
    tensors, same = [x.to(DEVICE) for x in tensors], slice(3, now + 1)

    def result(tensors, gradients):
        q, k, v, *index = tensors
        given = (q, k, tables, 2, index if learned else None, None, query_block)
        sel = dsa_triton.select_chunks(*given)
        inputs = [x.detach().requires_grad_() for x in (q, k, v)]
        out = dsa_triton.sparse_attention(*inputs, sel, tables, query_block)
        grads = torch.autograd.grad(out[same].sum(), inputs) if gradients else ()
        return sel[same], out[same].detach(), [x[same] for x in grads]

    def changed(value):
        other = [x.clone() for x in tensors]
        for x in other:
            x[now + 1 :] = value
            x[:3] = value
        return result(other, value == value)

    sel, out, grads = result(tensors, True)
    # 1e3: at logits of 1e13 a GPU's rounding, one operation for two, is larger than exp2 bears
    for value in (1e3, NAN) if query_block == 1 else (1e3,):
        got = changed(value)
        assert torch.equal(sel, got[0]) and torch.equal(out, got[1]), f"{value} leaked"
        for a, b in zip(got[2], grads, strict=False):  # sums in any order
            torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-5)


@kernels
def test_what_neighbours_look_at_changes_no_more_than_rounding():
    """Later neighbours decide whether a query is alone, and so how its sums are rounded."""
    chunk_size, n, now = 1, 43, 22
    tables = packed(0, n, chunk_size=chunk_size)
    tensors = random_qkv(n, n, (32, 2), dtype=torch.float16)
    want = dsa_triton.dsa_attention(*tensors, tables, 2)[: now + 1]
    for x in tensors:
        x[now + 1 :] = 100 * torch.randn_like(x[now + 1 :])
    got = dsa_triton.dsa_attention(*tensors, tables, 2)[: now + 1]
    torch.testing.assert_close(got, want, rtol=1e-3, atol=1e-3)


@kernels
@pytest.mark.parametrize(
    "chunk_size,query_block,dtype",
    [
        (1, 1, torch.float32),
        (16, 1, torch.float32),
        (16, 8, torch.float32),
        (1, 1, torch.float16),
        (16, 1, torch.float16),
    ],
)
def test_packed_is_bitwise_separate(chunk_size, query_block, dtype):
    n = chunk_size + 6
    cu = [0, 5, 5, n, n + 1]
    tensors = random_qkv(n + 1, n + 1, dtype=dtype)
    tables = packed(*cu, chunk_size=chunk_size)
    whole = dsa_triton.dsa_attention(*tensors, tables, 3, query_block=query_block)
    for a, b in ((0, 5), (5, n), (n, n + 1)):
        tables = packed(0, b - a, chunk_size=chunk_size)
        alone = (x[a:b].contiguous() for x in tensors)
        alone = dsa_triton.dsa_attention(*alone, tables, 3, query_block=query_block)
        assert torch.equal(whole[a:b], alone)


@kernels
@pytest.mark.parametrize(
    "chunk_size,learned,programs",
    [(1, True, 264), (16, False, 264), (16, True, 264), (16, True, 1)],
)
def test_decode_is_the_last_row_of_prefill(chunk_size, learned, programs, monkeypatch):
    monkeypatch.setattr(dsa_triton, "PROGRAMS", programs)
    lengths, capacity = [1, 0, 17, 16], 40  # the second slot is empty
    cache = [torch.full((4, capacity, *shape), NAN, device=DEVICE) for shape in ((2, 16),) * 2]
    cache.append(torch.full((4, capacity, 16), NAN, device=DEVICE))
    queries, want = [torch.zeros(4, 4, 16), torch.zeros(4, 3, 16), torch.zeros(4, 3)], []
    queries = [x.to(DEVICE) for x in queries]
    for slot, length in enumerate(lengths):
        if length == 0:
            want.append(torch.zeros(4, 16, device=DEVICE))
            continue
        q, k, v = random_qkv(length, length)
        index = [x.to(DEVICE) for x in random_index(length, width=16, dtype=torch.float32)]
        for row, x in zip(cache, (k, v, index[1]), strict=True):
            row[slot, :length] = x
        for row, x in zip(queries, (q, index[0], index[2]), strict=True):
            row[slot] = x[-1]
        tables = some_queries(packed(0, length, chunk_size=chunk_size), slice(-1, None))
        given = (index[0][-1:], index[1], index[2][-1:]) if learned else None
        want.append(dsa_triton.dsa_attention(q[-1:], k, v, tables, 3, given)[0])
    tables = dsa.cache_tables(torch.tensor(lengths, device=DEVICE), capacity, chunk_size)
    k, v, k_index = (x.flatten(0, 1) for x in cache)
    index = (queries[1], k_index, queries[2]) if learned else None
    with torch.no_grad():
        got = dsa_triton.dsa_attention(queries[0], k, v, tables, 3, index)
    torch.testing.assert_close(got, torch.stack(want), rtol=0, atol=1e-6)


@kernels
def test_gradients_through_a_cache_and_a_part_of_the_queries(monkeypatch):
    """Tables whose queries are few: lists split in unequal parts, a prefill that continues."""
    monkeypatch.setattr(dsa_triton, "PROGRAMS", 4)  # 2 parts of 5 tiles
    q, k, v = random_qkv(150, 150)
    k[141:], v[141:] = NAN, NAN  # not written yet
    for x in (q, k, v):
        x.requires_grad_()
    now = slice(140, 141)
    late = some_queries(packed(0, 150, chunk_size=16), now)
    cached = dsa.cache_tables(torch.tensor([141], device=DEVICE), 150, 16)
    results = []
    for tables in (late, cached):
        sel = dsa_triton.select_chunks(q[now], k, tables, 10)  # all chunks
        for module in (dsa, dsa_triton):
            out = module.sparse_attention(q[now], k, v, sel, tables)
            results.append((out, *torch.autograd.grad(out.square().sum(), (q, k, v))))
    assert all(x.isfinite().all() for x in results[0])
    for other in results[1:]:
        torch.testing.assert_close(results[0], other, rtol=1e-5, atol=1e-6)


def test_blocks_without_queries_see_what_their_chunk_does():
    """`_pick` makes room for no more than that."""
    tables = dsa.packed_tables(torch.tensor([0, 40, *range(41, 60)]), 16)
    blocks = dsa_triton.plan_blocks(tables, 4).view(-1, 4, 5)
    assert (blocks[..., 4] == blocks[:, :1, 4]).all()
    assert ((blocks[..., 3] == 0) == (blocks[..., 1] == 0)).all()


def test_inverse_lists_are_the_naive_ones_in_bounded_pieces():
    tables = dsa.packed_tables(torch.tensor([0, 37, 100]), 16)
    for heads, limit in ((1, 3), (2, 1), (2, 1000)):
        lists = random_selection(tables, heads, 3)
        order, pieces = dsa_triton._inverse(lists, tables, limit)
        found = {}
        for row, size, head, begin, end in pieces.tolist():
            assert 0 <= end - begin <= limit  # a kernel multiplies it, in 32 bits
            if end > begin:
                found.setdefault((head, row, size), []).extend(order[begin:end].tolist())
        want, rows = {}, [*tables.row.tolist(), tables.rows]
        for block, by_head in enumerate(lists.tolist()):
            for head, ids in enumerate(by_head):
                for chunk in (c for c in ids if c >= 0):
                    place = (head, rows[chunk], rows[chunk + 1] - rows[chunk])
                    want.setdefault(place, []).append(block)
        assert found == want


# Selection ----------------------------------------------------------------------------------------


TIES = [  # cu_seqlens, chunk size, top_k, longest list the kernel keeps
    ([0, 1], 16, 1, 64),
    ([0, 15, 31, 48], 4, 3, 64),
    ([0, 37, 100], 16, 2, 64),
    ([0, 21, 21, 70], 16, 9, 64),
    ([0, 7, 31], 1, 40, 64),
    ([0, 7, 40], 1, 5, 64),
    ([0, 7, 40], 1, 5, 3),  # longer lists than the first kernel keeps, and more
    ([0, 1, 2, 2, 40, 41], 1, 9, 3),
    ([0, 37, 100], 16, 5, 3),
    ([0, 7, 31], 1, 40, 3),  # all are kept
    ([0, 30, 50], 2, 6, 3),
]


def in_order(sel):
    """A selection with all but the first in order of ids, and -1 last."""
    rest = sel[..., 1:].masked_fill(sel[..., 1:] < 0, 1 << 40).sort(-1).values
    return torch.cat((sel[..., :1], rest.masked_fill(rest == 1 << 40, -1)), -1)


@kernels
@pytest.mark.parametrize("cu,chunk_size,top_k,streamed", TIES)
@pytest.mark.parametrize("learned", [False, True])
def test_selection_with_ties_is_the_naive_one(
    cu, chunk_size, top_k, streamed, learned, monkeypatch
):
    monkeypatch.setattr(dsa_triton, "STREAMED", streamed)
    for name, small in {"STRIPE": 32, "SCORED": 16, "READ": 16}.items():
        monkeypatch.setattr(dsa_triton, name, small)
    n, tables = cu[-1], packed(*cu, chunk_size=chunk_size)
    small = [torch.randint(-1, 2, shape).float() for shape in ((n, 4, 16), (n, 2, 16))]
    index = [torch.randint(-1, 2, shape).float() for shape in ((n, 2, 16), (n, 16), (n, 2))]
    q, k = small

    def score(t, rows):
        if learned:
            hits = index[0][t] @ index[1][rows].mean(0)
            return [sum(float(w * max(x, 0)) for w, x in zip(index[2][t], hits, strict=True))]
        return [float(q[t, 2 * h : 2 * h + 2].sum(0) @ k[rows, h].mean(0)) for h in (0, 1)]

    for dtype in (torch.float32,) if DEVICE == "cpu" else DTYPES[1:]:
        given = [x.to(DEVICE, dtype) for x in index] if learned else None
        given = (q.to(DEVICE, dtype), k.to(DEVICE, dtype), tables, top_k, given)
        sel = dsa_triton.select_chunks(*given)
        assert sel.dtype == torch.int64 and sel.shape[2] == min(top_k, tables.widest)
        long = sel.shape[2] > streamed + 1  # then the best of the past are in order of ids
        want = dsa.select_chunks(*given)
        assert torch.equal(sel, in_order(want) if long else want)
        scores = naive_scores(cu, chunk_size, score)
        for h in range(1 if learned else 2):
            one = {place: values[h] for place, values in scores.items()}
            for t, ids in enumerate(naive_pick(cu, chunk_size, one, top_k)):
                ids = ids[:1] + sorted(ids[1:]) if long else ids
                assert sel[t, h].tolist() == ids + [-1] * (sel.shape[2] - len(ids))
                assert len(ids) == len(set(ids))


@kernels
@pytest.mark.parametrize("chunk_size,query_block", [(1, 1), (4, 4), (8, 2)])
@pytest.mark.parametrize("learned", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, HALF])
def test_selection_of_random_scores_is_dsa_s_to_rounding(chunk_size, query_block, learned, dtype):
    """Rounding may swap chunks of nearly equal score: so compare the scores that were kept."""
    tables = packed(0, 0, 30, 47, chunk_size=chunk_size)
    q, k, _ = random_qkv(47, 47, dtype=dtype)
    index = [x.to(DEVICE, dtype) for x in random_index(47, width=32)]
    lead = dsa_triton.block_lead(tables, query_block)
    scores = index_scores(*index, tables) if learned else mean_scores(q, k, tables)
    scores = scores[lead]
    given = (q, k, tables, 3, index if learned else None, None, query_block)
    sel, want = dsa_triton.select_chunks(*given), dsa.select_chunks(*given[:5])[lead]
    assert torch.equal(sel[..., 0], want[..., 0]) and torch.equal(sel >= 0, want >= 0)
    kept = []
    for ids in (sel, want):
        local = (ids - tables.first[:, None, None]).clamp(min=0)
        kept.append(scores.gather(2, local).masked_fill(ids < 0, 0.0)[..., 1:])
    torch.testing.assert_close(*kept, rtol=1e-4, atol=1e-4)


@kernels
@pytest.mark.parametrize("chunk_size,top_k", [(1, 5), (4, 9), (4, 99), (16, 2)])
@pytest.mark.parametrize("learned", [False, True])
def test_a_decoder_selects_what_dsa_does_among_ties(chunk_size, top_k, learned, monkeypatch):
    for name, small in {"STRIPE": 3, "SCORED": 16, "READ": 16}.items():
        monkeypatch.setattr(dsa_triton, name, small)
    lengths = torch.tensor([0, 1, 65, 96, 50], device=DEVICE)
    sizes = ((5, 4, 16), (5, 96, 2, 16), (5, 2, 16), (5, 96, 16), (5, 2))
    q, k, *index = (torch.randint(-1, 2, size, device=DEVICE).float() for size in sizes)
    for slot, length in enumerate(lengths.tolist()):
        k[slot, length:], index[1][slot, length:] = NAN, NAN  # nobody has written there
    index[1] = index[1].flatten(0, 1)
    tables = dsa.cache_tables(lengths, 96, chunk_size)
    given = (q, k.flatten(0, 1), tables, top_k, index if learned else None)
    got, want = (module.select_chunks(*given) for module in (dsa_triton, dsa))
    assert torch.equal(got, in_order(want))


@kernels
@pytest.mark.parametrize("value", [float("inf"), -float("inf"), NAN, -0.0])
def test_special_scores_are_selected_as_in_dsa(value):
    tables = packed(0, 40, chunk_size=1)
    q, k, _ = random_qkv(40, 40, (1, 1))
    q[..., 1:], k[..., 1:] = 0, 0
    q[..., 0] = 1
    k[::3, 0, 0] = value
    k[1::3, 0, 0] = 0.0
    got, want = (module.select_chunks(q, k, tables, 8) for module in (dsa_triton, dsa))
    if value == value and abs(value) != float("inf"):
        assert torch.equal(got, want)
    for t, ids in enumerate(got[:, 0].tolist()):
        ids = [c for c in ids if c >= 0]
        assert ids[0] == t and len(set(ids)) == len(ids) == min(t + 1, 8) and max(ids) == t


MODEL = dict(width=32, heads=4, kv_heads=2, head_width=16, hidden=32, vocab_size=40, context=40)
KINDS = {"dense": dict(attention="dense")}
for scoring in ("mean", "indexer"):
    KINDS[scoring] = dict(attention="dsa", scoring=scoring, chunk_size=4, top_k=3)


@kernels
@pytest.mark.parametrize("kind", KINDS)
def test_a_model_computes_with_them_what_it_computes_without(kind):
    """Training forward and gradient, prefill and decode."""
    tokens, found = torch.arange(15) * 7 % 40, {}
    for how in ("spec", "triton"):
        model = GPT(ModelConfig(**MODEL, layers=1, **KINDS[kind], kernels=how)).on(DEVICE)
        hidden = model(pack_tokens([tokens[:5], tokens], DEVICE))
        hidden.square().sum().backward()
        cache = make_cache(model, 2, 32)
        prefill(model, cache, [1], [tokens[:14]])
        ids, positions = (torch.tensor([0, x], device=DEVICE) for x in (tokens[14], 14))
        step = decode(model, cache, ids, positions)[1]
        close(step, hidden[-1].detach(), 1e-5)
        found[how] = (hidden.detach(), model.flat_grad, step)
    for got, want in zip(found["triton"], found["spec"], strict=True):
        close(got, want, 1e-5)


class NeverWait(TorchDispatchMode):
    """Fails where a host would wait for its GPU, and no graph could be captured."""

    def __torch_dispatch__(self, call, types, args=(), kwargs=None):
        waits = ("_local_scalar_dense", "equal", "nonzero", "is_nonzero", "masked_select")
        assert call.overloadpacket.__name__ not in waits, f"{call} makes the host wait"
        return call(*args, **kwargs or {})


@kernels
@pytest.mark.parametrize("kind", KINDS)
def test_a_decode_step_asks_the_gpu_for_no_number_and_plans_once(kind, monkeypatch):
    model = GPT(ModelConfig(**MODEL, layers=3, **KINDS[kind], kernels="triton")).on(DEVICE)
    cache, plans = make_cache(model, 2, 40), []
    prefill(model, cache, [0, 1], [[1, 2, 3], [4]])
    tokens, positions = (torch.tensor(x, device=DEVICE) for x in ([4, 5], [3, 1]))
    name = "plan_dense" if kind == "dense" else "plan_blocks"
    make = getattr(dsa_triton, name)
    monkeypatch.setattr(dsa_triton, name, lambda *args: plans.append(0) or make(*args))
    with NeverWait():
        decode(model, cache, tokens, positions)
    assert len(plans) == 1
    model(pack_tokens([[1, 2, 3], [4]], DEVICE)).sum().backward()
    assert len(plans) == 1 + (kind != "dense"), "a plan serves all layers"


@kernels
@pytest.mark.parametrize("width,heads", [(16, (4, 2)), (32, (3, 1)), (64, (2, 2))])
@pytest.mark.parametrize("length,programs", [(48, 264), (160, 12), (128, 1)])
@pytest.mark.parametrize("dtype", [torch.float32, HALF])
def test_flash_decoding_is_dense_attention(width, heads, length, programs, dtype, monkeypatch):
    """Slots of any length, keys that are not written yet; and a slot knows nothing of others."""
    monkeypatch.setattr(dsa_triton, "PROGRAMS", programs)
    (query_heads, key_heads), n = heads, 4
    at = torch.tensor([0, length - 1, length // 2, -1], device=DEVICE)  # the last is nobody's
    q = torch.randn(n, query_heads + 2, width).to(DEVICE, dtype)[:, :-2]  # of a row with k and v
    kv = torch.randn(2, n, key_heads, length, width).to(DEVICE, dtype)
    for slot, position in enumerate(at.tolist()):
        kv[:, slot, :, position + 1 :] = NAN
    k, v = kv.transpose(2, 3)  # [n, T, Hkv, D], heads outside
    got = dsa_triton.dense_decode(q, k, v, dsa_triton.plan_dense(at, length, key_heads))
    assert got.dtype == dtype and (got[3] == 0).all()
    for slot, position in enumerate(at.tolist()[:3]):
        keys, values = (x[slot, : position + 1].transpose(0, 1).double() for x in (k, v))
        query = q[slot].double().unflatten(0, (key_heads, -1))
        want = F.scaled_dot_product_attention(query, keys, values).flatten(0, 1)
        close(got[slot], want, 4e-3 if dtype == HALF else 1e-5)
    other = dsa_triton.plan_dense(at.flip(0), length, key_heads)
    assert torch.equal(dsa_triton.dense_decode(q.flip(0), k.flip(0), v.flip(0), other)[3], got[0])


# Bad input ----------------------------------------------------------------------------------------


def attend(rows=6, query_block=1, top_k=1, index=None, means=None, tables=None, width=16, **given):
    """dsa_attention, or sparse_attention where `sel` is given, with good defaults."""
    tables = packed(0, 6, chunk_size=2) if tables is None else tables
    tensors = dict(zip("qkv", random_qkv(rows, 6, width=width), strict=True)) | given
    if "sel" in given:
        tensors["sel"] = given["sel"].to(DEVICE)
        return dsa_triton.sparse_attention(**tensors, tables=tables, query_block=query_block)
    return dsa_triton.dsa_attention(
        **tensors, tables=tables, top_k=top_k, index=index, means=means, query_block=query_block
    )


def zeros(*shape, dtype=torch.float32):
    return torch.zeros(shape, dtype=dtype, device=DEVICE)


def last_two_queries():
    return some_queries(packed(0, 6, chunk_size=2), slice(-2, None))


BAD = {
    "q rows": (lambda: attend(q=zeros(5, 4, 16)), r"q .*\[5, 4, 16\].* for 6 queries, 6 keys"),
    "k heads": (lambda: attend(k=zeros(6, 3, 16)), r"q .*4, 16\]\), k .*\[6, 3, 16\]"),
    "dtypes": (lambda: attend(v=zeros(6, 2, 16).double()), "one floating dtype.*float64"),
    "top_k": (lambda: attend(top_k=0), "top_k must be an integer >= 1, got 0"),
    "query_block": (lambda: attend(query_block=3), "query_block.*power of two.*got 3"),
    "query_block, few queries": (
        lambda: attend(rows=2, query_block=2, tables=last_two_queries()),
        "query_block must be 1 unless all keys",
    ),
    "width": (lambda: attend(width=24), r"q must have a head width of .*128.*, got \[6, 4, 24\]"),
    "strides q": (lambda: attend(q=zeros(4, 6, 16).transpose(0, 1)), "q must be contiguous"),
    "index width": (
        lambda: attend(index=(zeros(6, 3, 8), zeros(6, 8), zeros(6, 3))),
        "q_index must have a head width",
    ),
    "index strides": (
        lambda: attend(index=(zeros(6, 3, 16), zeros(16, 6).T, zeros(6, 3))),
        "k_index must be contiguous",
    ),
    "sel future": (lambda: attend(sel=torch.full((6, 1, 1), 1)), r"sel must hold.*\[\[1\],"),
    "sel not shared": (
        lambda: attend(sel=torch.tensor([0, -1, 1, 1, 2, 2])[:, None, None], query_block=2),
        "sel must be the same for all queries of a query_block of 2",
    ),
}


@kernels
@pytest.mark.parametrize("name", BAD)
def test_bad_input_is_named(name):
    call, message = BAD[name]
    with pytest.raises(AssertionError, match=message):
        call()


# The compiler -------------------------------------------------------------------------------------

KERNELS = {name: x for name, x in vars(dsa_triton).items() if isinstance(x, triton.JITFunction)}
ATTENDING = {"_forward", "_merge", "_backward_q", "_backward_kv", "_unite"}
SHAPES = {  # D, chunk size, query block, S, cached, indexer heads and width
    "per query, 128": (128, 64, 1, 16, False, None),
    "block of 8, 128": (128, 64, 8, 16, False, None),
    "tokens": (128, 1, 1, 64, False, (4, 64)),
    "2048 tokens": (128, 1, 1, 2048, False, (4, 64)),
    "decode": (128, 64, 1, 16, True, None),
    "decode, 2048 tokens": (128, 1, 1, 2048, True, (4, 64)),
}


def compile_for_hopper(kernel, *args, **constants) -> tuple[str, int, list]:
    """Compiles a launch for sm_90 without a GPU: registers and stack, bytes of shared memory, and
    (address, instruction)s."""
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    options = {
        name: constants.pop(name) for name in ("num_warps", "num_stages") if name in constants
    }
    names = {torch.bfloat16: "*bf16", torch.float32: "*fp32"}
    names |= {torch.int16: "*i16", torch.int32: "*i32", torch.int64: "*i64"}
    signature, divisible = {}, {}
    for place, (name, x) in enumerate(zip(kernel.arg_names, args, strict=False)):
        if isinstance(x, torch.Tensor) or (isinstance(x, int) and x % 16 == 0):
            divisible[(place,)] = [["tt.divisibility", 16]]
        kinds = {float: "fp32", int: "i32"}
        signature[name] = names[x.dtype] if isinstance(x, torch.Tensor) else kinds[type(x)]
    signature |= dict.fromkeys(constants, "constexpr")
    source = ASTSource(kernel, signature, constants, divisible)
    compiled = triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options)
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(compiled.asm["cubin"])
        file.flush()
        command = [triton.knobs.nvidia.cuobjdump.path, "-res-usage", "-sass", file.name]
        told = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    code = [(int(at, 16), text) for at, text in re.findall(r"/\*([0-9a-f]{4,})\*/\s+(.*?);", told)]
    return re.search(r"REG:\d+ STACK:\d+", told)[0], compiled.metadata.shared, code


def longest_loop(code: list) -> int:
    """Instructions in the longest loop, 0 if there is none: what a tile costs a warp to issue."""
    places, longest = {at: n for n, (at, _) in enumerate(code)}, 0
    for n, (_, text) in enumerate(code):
        if target := re.search(r"\bBRA\b.*?(0x[0-9a-f]+)", text):
            longest = max(longest, n - places.get(int(target[1], 16), n))
    return longest


@compiler
@pytest.mark.parametrize("name", SHAPES)
def test_kernels_compile_for_sm_90_and_spill_nothing(name, monkeypatch):
    """What dsa_attention and its backward would launch for 32 query heads, 2 key heads, bf16."""
    width, chunk_size, query_block, top_k, cached, indexer = SHAPES[name]
    length, launches = chunk_size * top_k + chunk_size, []
    monkeypatch.setattr(dsa_triton, "_check", lambda *args, **tensors: None)  # CPU tensors
    monkeypatch.setattr(
        dsa_triton, "_launch", lambda kernel, grid, *a, **c: launches.append((kernel, a, c))
    )
    cu, queries = torch.tensor([0, length]), 1 if cached else length
    tables = dsa.packed_tables(cu, chunk_size)
    if cached:
        tables = dsa.cache_tables(cu[1:], length, chunk_size)
    shapes = ((queries, 32, width), (length, 2, width), (length, 2, width))
    q, k, v = (torch.zeros(x, dtype=torch.bfloat16, requires_grad=True) for x in shapes)
    sel = dsa.select_chunks(q, k, tables, top_k)[dsa_triton.block_lead(tables, query_block)]
    index = None
    if indexer:
        shapes = ((queries, *indexer), (length, indexer[1]), (queries, indexer[0]))
        index = [torch.zeros(x, dtype=torch.bfloat16) for x in shapes]
    dsa_triton.select_chunks(q, k, tables, top_k, index, None, query_block)
    out = dsa_triton.sparse_attention(q, k, v, sel, tables, query_block)
    if not cached:
        out.sum().backward()
    want = {"_forward", "_merge"} if cached else ATTENDING - {"_merge"}
    want -= {"_backward_kv"} if chunk_size < dsa_triton.ATOMIC_BELOW else set()
    want -= {"_unite"} if cached or query_block > 1 else set()
    long = cached or top_k > dsa_triton.STREAMED + 1
    want |= {"_score", "_pick"} if long else {"_select"}
    assert {kernel.__name__ for kernel, _, _ in launches} == want
    compile_all(name, launches)


def compile_all(name: str, launches: list) -> None:
    """No launch spills, needs more shared memory than there is, or orders its atomic additions:
    that throws away the L1 cache with each."""
    for kernel, args, constants in launches:
        usage, shared, code = compile_for_hopper(kernel, *args, **constants)
        size = f"instructions {len(code)} in a loop {longest_loop(code)}"
        print(f"{name:16} {kernel.__name__:13} {usage} shared {shared} {size}")
        assert not any("CCTL" in text for _, text in code), f"{kernel.__name__} orders its atomics"
        assert usage.endswith("STACK:0"), f"{kernel.__name__} spills: {usage}"
        assert shared <= 227 * 1024, f"{kernel.__name__} needs {shared} bytes of shared memory"


@compiler
@pytest.mark.parametrize("width,heads", [(64, (32, 2)), (128, (32, 8)), (128, (8, 8))])
def test_flash_decoding_compiles_for_sm_90_and_spills_nothing(width, heads, monkeypatch):
    launches = []
    monkeypatch.setattr(
        dsa_triton, "_launch", lambda kernel, grid, *a, **c: launches.append((kernel, a, c))
    )
    kv = torch.zeros(2, 1, heads[1], 4096, width, dtype=torch.bfloat16)
    plan = dsa_triton.plan_dense(torch.tensor([4000]), 4096, heads[1])
    query = torch.zeros(1, heads[0], width, dtype=torch.bfloat16)
    dsa_triton.dense_decode(query, *kv.transpose(2, 3), plan)
    assert [kernel.__name__ for kernel, _, _ in launches] == ["_forward", "_merge"]
    compile_all(f"dense, {width}", launches)


# On a GPU, at size --------------------------------------------------------------------------------


@pytest.mark.gpu
@pytest.mark.parametrize("chunk_size,query_block,top_k", [(64, 8, 16), (64, 1, 16), (1, 1, 2048)])
@pytest.mark.parametrize("width", [64, 128])
def test_long_packs_are_dsa_s(chunk_size, query_block, top_k, width):
    """bfloat16, 32 query heads, 2 key heads: output and gradients against dsa.py in float32."""
    tables = packed(0, 1000, 1000, 5096, chunk_size=chunk_size)
    inputs = random_qkv(5096, 5096, (32, 2), width, torch.bfloat16)
    sel = dsa_triton.select_chunks(*inputs[:2], tables, top_k, None, None, query_block)
    results = []
    for module, dtype in ((dsa_triton, torch.bfloat16), (dsa, torch.float32)):
        given = [x.detach().to(dtype).requires_grad_() for x in inputs]
        how = {"query_block": query_block} if module is dsa_triton else {}
        out = module.sparse_attention(*given, sel, tables, **how)
        results.append((out, *torch.autograd.grad(out.float().square().sum(), given)))
    for got, want in zip(*results, strict=True):
        close(got, want.detach(), 2e-2)


@pytest.mark.gpu
def test_more_than_2_31_elements():
    """Row numbers times heads times width pass int32; the last rows must still be right."""
    if torch.cuda.get_device_properties(0).total_memory < 60 * 2**30:
        pytest.skip("needs 60 GB of GPU memory")
    n = 2**31 // (32 * 128) + 4096
    tables, last = packed(0, n - 3000, n, chunk_size=64), slice(n - 3000, n)
    q = torch.randn(n, 32, 128, device=DEVICE, dtype=torch.bfloat16, requires_grad=True)
    k, v = (torch.randn(n, 2, 128, device=DEVICE, dtype=torch.bfloat16) for _ in "kv")
    out = dsa_triton.dsa_attention(q, k.requires_grad_(), v.requires_grad_(), tables, 16)
    grads = torch.autograd.grad(out, (q, k, v), torch.ones_like(out))
    alone = [x[last].detach().clone().requires_grad_() for x in (q, k, v)]
    tables = packed(0, 3000, chunk_size=64)
    want = dsa_triton.dsa_attention(*alone, tables, 16)
    close(out[last], want.detach(), 2e-3)
    want_grads = torch.autograd.grad(want, alone, torch.ones_like(want))
    for a, b in zip(grads, want_grads, strict=True):
        close(a[last], b, 2e-3)


@pytest.mark.gpu
@pytest.mark.parametrize("kind", KINDS)
def test_one_captured_step_serves_all_lengths(kind):
    model = GPT(ModelConfig(**MODEL, layers=2, **KINDS[kind])).on(DEVICE)
    caches = [make_cache(model, 2, 40) for _ in "ab"]
    captured, step = Captured(), partial(decode, model, caches[1])
    for cache in caches:
        prefill(model, cache, [0, 1], [[1, 2, 3], [4]])
    for n in range(20):
        inputs = [torch.tensor(x, device=DEVICE) for x in ([4 + n, 5], [3 + n, 1 + n])]
        want = decode(model, caches[0], *inputs)
        got = captured(step, *inputs)
        torch.testing.assert_close(got, want, rtol=0, atol=1e-5)


@pytest.mark.gpu
@pytest.mark.parametrize("query_block", [1, 8])
def test_training_asks_the_gpu_for_no_number(query_block):
    tables, inputs = packed(0, 300, 1000, chunk_size=64), random_qkv(1000, 1000, (32, 2), 128)
    inputs = [x.bfloat16().requires_grad_() for x in inputs]
    try:
        for mode in ("default", "error"):  # first compiled, then watched
            torch.cuda.set_sync_debug_mode(mode)
            dsa_triton.dsa_attention(*inputs, tables, 16, query_block=query_block).sum().backward()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert all(x.grad.isfinite().all() for x in inputs)
