"""cache.py: prefill and decode give the packed forward's numbers, bitwise in any company."""

import numpy as np
import pytest
import torch
from test_model import KINDS, hidden_of, kinds, make, sentences

import dsa
from cache import decode, make_cache, prefill
from fast.racks import make_racks, prefill_groups
from runtime.config import Config


def needed(slots: int, lengths: dict) -> np.ndarray:
    """What `reserve` wants: positions of these slots, 1 for all others."""
    return np.array([lengths.get(b, 1) for b in range(slots)])


def parts_of(cache) -> list:
    """Every tensor of a cache that holds keys or values."""
    found = [rack.kv for rack in getattr(cache, "racks", [cache])]
    return found + [x for x in (cache.scored, cache.means) if x is not None]


def bytes_of(cache) -> tuple[int, int]:
    """What keys and values take, and what slots times capacity would."""
    position = cache.racks[0].kv[:, :, :1, :1].nbytes
    now = sum(len(rack.slots) * rack.kv.shape[3] for rack in cache.racks)
    return position * now, position * len(cache.rack) * cache.capacity


@pytest.mark.parametrize("together", [1, 2])
@pytest.mark.parametrize("kind", ["dense learned", "dense rope", *[k for k in KINDS if "dsa" in k]])
def test_prefill_and_decode_give_the_hidden_states_of_the_packed_forward(kind, together):
    model, sequences, slots = make(kind), sentences((30, 9, 20)), [6, 0, 3]
    wanted = hidden_of(model, sequences)
    cache = make_racks(model, 9, 40)
    cache.reserve(np.full(9, 40))  # every rack has its rows
    for part in parts_of(cache):
        part.fill_(7.0)  # left behind by an earlier episode: must not be seen
    prefixes = [13, 1, 16]
    cache.reserve(needed(9, dict(zip(slots, prefixes, strict=True))))
    begins = [s[:n] for s, n in zip(sequences, prefixes, strict=True)]
    prefill(model, cache, slots, begins, together)
    fed, worst = list(prefixes), 0.0
    while any(n < len(s) for n, s in zip(fed, sequences, strict=True)):
        tokens = torch.zeros(9, dtype=torch.int64)  # idle slots feed token 0 at position 0
        positions = torch.zeros(9, dtype=torch.int64)
        active = [i for i, s in enumerate(sequences) if fed[i] < len(s)]
        for i in active:
            tokens[slots[i]], positions[slots[i]] = sequences[i][fed[i]], fed[i]
        cache.reserve(needed(9, {slots[i]: fed[i] + 1 for i in active}))
        hidden = decode(model, cache, tokens, positions)
        for i in active:
            error = (hidden[slots[i]] - wanted[i][fed[i]]).abs().max()
            worst, fed[i] = max(worst, float(error)), fed[i] + 1
    assert worst <= 1e-5


@pytest.mark.parametrize("length", [20, 100])
def test_racks_give_what_a_plain_cache_gives(length):
    """To rounding: a plain row is longer, and its sums are split in another way."""
    model, (tokens,) = make("dense rope", context=200), sentences((length,))
    found = []
    for make_one in (make_cache, make_racks):
        cache, positions = make_one(model, 8, 200), np.zeros(8, np.int64)
        ids = torch.zeros(8, dtype=torch.int64)
        for at, token in enumerate(tokens):
            ids[3], positions[3] = int(token), at
            cache.reserve(positions + 1)
            hidden = decode(model, cache, ids, torch.from_numpy(positions))
        found.append(hidden[3])
    torch.testing.assert_close(*found, rtol=0, atol=1e-5)


@kinds
def test_decode_is_bitwise_independent_of_slot_and_neighbours(kind):
    model, (tokens, *others) = make(kind), sentences((24, 60, 45, 33, 60))

    def run(slot: int, neighbours: dict[int, list[int]]) -> list[torch.Tensor]:
        cache = make_racks(model, 12, 80)
        rows = {slot: tokens, **neighbours}
        starts = {b: 5 if b == slot else 30 for b in rows}
        cache.reserve(needed(12, starts))
        prefill(model, cache, list(rows), [s[: starts[b]] for b, s in rows.items()])
        found = []
        for step in range(len(tokens) - 5):
            ids, positions = torch.zeros(2, 12, dtype=torch.int64)
            for b, s in rows.items():
                positions[b] = min(starts[b] + step, len(s) - 1)
                ids[b] = s[positions[b]]
            cache.reserve(needed(12, {b: int(positions[b]) + 1 for b in rows}))
            found.append(decode(model, cache, ids, positions)[slot].clone())
        return found

    alone = run(0, {})
    for slot, free in ((0, (1, 2, 3, 4)), (5, (0, 1, 2, 8)), (11, (7, 0, 3, 5))):
        company = run(slot, dict(zip(free, others, strict=True)))
        assert all(map(torch.equal, alone, company)), f"slot {slot}"


@pytest.mark.parametrize("heads, kv_heads", [(4, 4), (4, 2), (5, 1), (8, 1)])
def test_decode_is_bitwise_independent_of_the_neighbours_lengths(heads, kv_heads):
    """Neither how many keys they read, nor how many of them read as many, must change a sum: MKL
    halves some lengths and not others."""
    model = make(heads=heads, kv_heads=kv_heads, head_width=16, layers=1, context=600)
    random = torch.Generator().manual_seed(1)
    tokens = torch.arange(8)
    for own in (10, 31, 32, 95, 127, 150, 190, 200, 255, 300, 383, 384, 500, 599):
        keys = torch.randn(2, 1, own + 1, kv_heads, 16, generator=random)
        cache, wanted = make_racks(model, 8, 600), None
        for longest in range(0, 600, 24):
            few = torch.randint(longest + 1, (8,), generator=random)
            for others in (torch.full((8,), longest), few):
                positions = others.index_fill(0, torch.tensor([5]), own)
                cache.reserve(positions.numpy() + 1)
                for part, values in zip(cache.row(5, own + 1), keys, strict=True):
                    part.copy_(values)
                found = decode(model, cache, tokens, positions)[5]
                wanted = found if wanted is None else wanted
                assert torch.equal(found, wanted), f"{own} keys beside {positions.tolist()}"


def test_prefill_of_a_few_tokens_fits_a_short_context():
    """Filler rows must not run over the model's last position (task guess has 12)."""
    model = make(context=6)
    cache = make_cache(model, 8, 6)
    k = cache.kv[0]
    assert k.shape == (2, 8, 16, 2, 8)  # capacity is rounded up to PAD_BLOCK
    prefill(model, cache, [3], [[1, 2, 3]])
    assert k[:, 3, :3].all() and not k[:, 3, 3:].any()
    assert not k[:, [0, 1, 2, 4, 5, 6, 7]].any(), "filler reached a slot"


def test_sequences_keep_what_they_have_when_they_and_others_move():
    """Sequences begin, grow and end in any order; each writes its own number into its row."""
    model, random = make(context=600), np.random.default_rng(0)
    cache, name, grown = make_racks(model, 12, 600), 0, 0
    assert [rack.kv.shape[3] for rack in cache.racks] == [32, 64, 128, 256, 608]
    lengths, names = np.zeros(12, np.int64), np.zeros(12)
    for _ in range(400):
        before = lengths.copy()
        lengths = lengths + (lengths > 0) * random.integers(1, 40, 12)
        lengths[(random.random(12) < 0.02) | (lengths > 600)] = 0
        begun = (lengths == 0) & (random.random(12) < 0.3)
        lengths[begun] = random.integers(1, 60, begun.sum())
        tensors = [rack.kv.data_ptr() for rack in cache.racks]
        cache.reserve(np.maximum(lengths, 1))
        grown += tensors != [rack.kv.data_ptr() for rack in cache.racks]
        for b in np.flatnonzero(lengths):
            k, v = cache.row(b, lengths[b])
            assert k.shape[1] == lengths[b]
            if begun[b]:
                name += 1
                names[b] = name
            else:
                had = k[:, : before[b]], v[:, : before[b]]
                assert (had[0] == names[b]).all() and (had[1] == -names[b]).all()
            k.fill_(names[b])
            v.fill_(-names[b])
        used = [rack.used for rack in cache.racks]
        assert used[1:] == [int((cache.rack == i).sum()) for i in range(1, 5)]
        places = cache.place.tolist()
        assert len({*places}) == 12 and max(places) < sum(used)
    assert grown > 5 and name > 50
    cache.reserve(np.ones(12))
    assert [rack.used for rack in cache.racks] == [12, 0, 0, 0, 0]


def test_a_sequence_that_ended_leaves_its_row_to_others():
    """A new one in its slot begins in a short row: what it reads hangs on its own length only."""
    cache = make_racks(make(context=600), 8, 600)
    cache.reserve(needed(8, {3: 500}))
    assert cache.rack[3] == 4
    cache.reserve(needed(8, {3: 20, 5: 500}))
    assert cache.rack[3] == 0
    assert cache.rack[5] == 4 and len(cache.racks[4].slots) == 1
    small, full = bytes_of(cache)
    assert full == 8 * 608 * 2 * 2 * 2 * 8 * 4 and small == full * (8 * 32 + 608) / (8 * 608)


@kinds
def test_prompts_that_go_together_share_their_beginning(kind, monkeypatch):
    """It goes through the model once, and every row is as if its prompt had come alone."""
    model, (one, other, alone) = make(kind), sentences((23, 20, 5))
    prompts = [one, [*one[:17], *other], one[:9], alone]  # the third has nothing of its own
    apart, together = make_cache(model, 4, 40), make_cache(model, 4, 40)
    prefill(model, apart, [*range(4)], prompts)
    body, fed = model.body, []

    def counted(tokens, *rest, **how):
        fed.append(len(tokens))
        return body(tokens, *rest, **how)

    monkeypatch.setattr(model, "body", counted)
    prefill(model, together, [*range(4)], prompts, together=4)
    assert fed == [23 + 20 + 5]
    for a, b in zip(parts_of(apart), parts_of(together), strict=True):
        assert a.any()
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("kind", ["dsa mean", "dsa indexer"])
def test_kept_means_are_those_of_the_keys(kind):
    """After prefill, decode and a copied prefix: every complete chunk, whoever wrote it."""
    model, (tokens, other) = make(kind, chunk_size=4), sentences((23, 30))
    cache, ids = make_cache(model, 8, 40), torch.zeros(8, dtype=torch.int64)
    prefill(model, cache, [5], [other])
    known = {}
    prefill_groups(model, cache, {2: (7, tokens[:10])}, known, Config())
    prefill_groups(model, cache, {3: (7, tokens[:10])}, known, Config())  # a copy of slot 2
    positions = ids.clone()
    for at in range(10, 23):
        for slot in (2, 3):
            ids[slot], positions[slot] = tokens[at], at
        hidden = decode(model, cache, ids, positions)
        assert torch.equal(hidden[2], hidden[3]), f"the copied slot differs at {at}"
    for layer in range(model.config.layers):
        wanted = dsa.chunk_means(cache.scored[layer].flatten(0, 1), cache.tables)
        wanted = wanted.view_as(cache.means[layer])
        for slot, keys in ((2, 23), (3, 23), (5, 30)):
            complete = keys // 4
            found = cache.means[layer, slot, :complete]
            assert found.any() and torch.equal(found, wanted[slot, :complete]), (layer, slot)


@pytest.mark.parametrize("kind", ["dsa mean", "dsa indexer"])
def test_sparse_decode_reads_no_key_that_was_not_selected(kind):
    """Unselected values may hold anything, even NaN: they are gathered by nobody."""
    model, (tokens,) = make(kind, chunk_size=4, top_k=2), sentences((37,))
    clean = make_cache(model, 8, 40)
    prefill(model, clean, [1], [tokens[:36]])
    k, v = clean.kv
    ids, positions = torch.zeros(2, 8, dtype=torch.int64)
    ids[1], positions[1] = tokens[36], 36
    picked, attend = [], dsa.sparse_attention

    def spy(q, k, v, sel, *rest, **options):
        picked.append(sel[1])
        return attend(q, k, v, sel, *rest, **options)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(dsa, "sparse_attention", spy)
        wanted = decode(model, clean, ids, positions)[1]
    for layer, sel in enumerate(picked):
        kept = {int(c) - clean.tables.widest for c in sel.flatten() if c >= 0}  # local ids
        assert len(kept) < 9
        for chunk in set(range(10)) - kept:
            v[layer, 1, 4 * chunk : 4 * chunk + 4] = float("nan")
            k[layer, 1, 4 * chunk : 4 * chunk + 4] = float("nan")
    assert torch.equal(decode(model, clean, ids, positions)[1], wanted)
