"""cache.py: prefill and decode give the packed forward's numbers, bitwise in any company."""

import pytest
import torch
from test_model import KINDS, hidden_of, kinds, make, sentences

import dsa
from cache import decode, make_cache, prefill, prefill_groups


@pytest.mark.parametrize("kind", ["dense learned", "dense rope", *[k for k in KINDS if "dsa" in k]])
def test_prefill_and_decode_give_the_hidden_states_of_the_packed_forward(kind):
    model, sequences, slots = make(kind), sentences((30, 9, 20)), [6, 0, 3]
    wanted = hidden_of(model, sequences)
    cache = make_cache(model, 9, 40)
    for part in cache[:4]:
        if part is not None:
            part.fill_(7.0)  # left behind by an earlier episode: must not be seen
    prefixes = [13, 1, 16]
    prefill(
        model,
        cache,
        torch.tensor(slots),
        [s[:n] for s, n in zip(sequences, prefixes, strict=True)],
    )
    fed, worst = list(prefixes), 0.0
    while any(n < len(s) for n, s in zip(fed, sequences, strict=True)):
        tokens = torch.zeros(9, dtype=torch.int64)  # idle slots feed token 0 at position 0
        positions = torch.zeros(9, dtype=torch.int64)
        active = [i for i, s in enumerate(sequences) if fed[i] < len(s)]
        for i in active:
            tokens[slots[i]], positions[slots[i]] = sequences[i][fed[i]], fed[i]
        hidden = decode(model, cache, tokens, positions, max(fed[i] for i in active))
        for i in active:
            error = (hidden[slots[i]] - wanted[i][fed[i]]).abs().max()
            worst, fed[i] = max(worst, float(error)), fed[i] + 1
    assert worst <= 1e-5


@kinds
def test_decode_is_bitwise_independent_of_slot_and_neighbours(kind):
    model, (tokens, *others) = make(kind), sentences((24, 60, 45, 33, 60))

    def run(slot: int, neighbours: dict[int, list[int]]) -> list[torch.Tensor]:
        cache = make_cache(model, 9, 64)
        rows = {slot: tokens, **neighbours}
        starts = {b: 5 if b == slot else 30 for b in rows}
        prefill(model, cache, torch.tensor(list(rows)), [s[: starts[b]] for b, s in rows.items()])
        found = []
        for step in range(len(tokens) - 5):
            ids, positions = torch.zeros(2, 9, dtype=torch.int64)
            for b, s in rows.items():
                positions[b] = min(starts[b] + step, len(s) - 1)
                ids[b] = s[positions[b]]
            longest = int(positions.max())
            found.append(decode(model, cache, ids, positions, longest)[slot].clone())
        return found

    alone = run(0, {})
    for slot, free in ((0, (1, 2, 3, 4)), (5, (0, 1, 2, 8)), (8, (7, 0, 3, 5))):
        company = run(slot, dict(zip(free, others, strict=True)))
        assert all(map(torch.equal, alone, company)), f"slot {slot}"


@pytest.mark.parametrize("heads, kv_heads", [(4, 4), (4, 2), (5, 1), (8, 1)])
def test_decode_is_bitwise_independent_of_the_longest_neighbour(heads, kv_heads):
    """How many keys are looked at must not change a sum: MKL halves some lengths and not others."""
    model = make(heads=heads, kv_heads=kv_heads, head_width=16, layers=1, context=600)
    random = torch.Generator().manual_seed(1)
    tokens = torch.arange(8)
    for own in (10, 127, 150, 190, 200, 255, 300, 383, 500):
        cache = make_cache(model, 8, 600)
        cache.k.normal_(generator=random)
        cache.v.normal_(generator=random)
        wanted = None
        for longest in range(own, 600, 24):
            positions = torch.full((8,), longest).index_fill(0, torch.tensor([5]), own)
            found = decode(model, cache, tokens, positions, longest)[5]
            wanted = found if wanted is None else wanted
            assert torch.equal(found, wanted), f"{own} keys beside {longest}"


@pytest.mark.parametrize("kind", ["dense rope", "dsa mean rope", "dsa indexer"])
def test_prefill_is_bitwise_independent_of_what_else_is_in_the_call(kind):
    """From 200 tokens on SDPA sums in another order when the padded grid is wider, and sparse
    attention when there are more chunks to score, unless it is told the capacity."""
    shape = dict(context=272, head_width=32, chunk_size=1, top_k=8)
    model, lengths = make(kind, **shape), (3, 200, 250, 16, 224, 7, 272)
    sequences = sentences(lengths)
    together, alone = make_cache(model, 8, 272), make_cache(model, 8, 272)
    prefill(model, together, torch.arange(7), sequences)
    for slot, sequence in enumerate(sequences):
        prefill(model, alone, torch.tensor([slot]), [sequence])
        for a, b in zip(together[:3], alone[:3], strict=True):
            if a is not None:
                n = len(sequence)
                assert b[:, slot, :n].any()
                assert torch.equal(a[:, slot, :n], b[:, slot, :n]), f"length {n}"


def test_prefill_of_a_few_tokens_fits_a_short_context():
    """Filler rows must not run over the model's last position (task guess has 12)."""
    model = make(context=6)
    cache = make_cache(model, 8, 6)
    assert cache.k.shape == (2, 8, 16, 2, 8)  # capacity is rounded up to PAD_BLOCK
    prefill(model, cache, torch.tensor([3]), [[1, 2, 3]])
    assert cache.k[:, 3, :3].all() and not cache.k[:, 3, 3:].any()
    assert not cache.k[:, [0, 1, 2, 4, 5, 6, 7]].any(), "filler reached a slot"


@pytest.mark.parametrize("kind", ["dsa mean", "dsa indexer"])
def test_kept_means_are_those_of_the_keys(kind):
    """After prefill, decode and a copied prefix: every complete chunk, whoever wrote it."""
    model, (tokens, other) = make(kind, chunk_size=4), sentences((23, 30))
    cache, ids = make_cache(model, 8, 40), torch.zeros(8, dtype=torch.int64)
    prefill(model, cache, torch.tensor([5]), [other])
    known = {}
    prefill_groups(model, cache, {2: (7, tokens[:10])}, known)
    prefill_groups(model, cache, {3: (7, tokens[:10])}, known)  # a copy of slot 2
    positions = ids.clone()
    for at in range(10, 23):
        for slot in (2, 3):
            ids[slot], positions[slot] = tokens[at], at
        hidden = decode(model, cache, ids, positions, 23)
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
    prefill(model, clean, torch.tensor([1]), [tokens[:36]])
    ids, positions = torch.zeros(2, 8, dtype=torch.int64)
    ids[1], positions[1] = tokens[36], 36
    picked, attend = [], dsa.sparse_attention

    def spy(q, k, v, sel, *rest, **options):
        picked.append(sel[1])
        return attend(q, k, v, sel, *rest, **options)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(dsa, "sparse_attention", spy)
        wanted = decode(model, clean, ids, positions, 36)[1]
    for layer, sel in enumerate(picked):
        kept = {int(c) - clean.tables.widest for c in sel.flatten() if c >= 0}  # local ids
        assert len(kept) < 9
        for chunk in set(range(10)) - kept:
            clean.v[layer, 1, 4 * chunk : 4 * chunk + 4] = float("nan")
            clean.k[layer, 1, 4 * chunk : 4 * chunk + 4] = float("nan")
    assert torch.equal(decode(model, clean, ids, positions, 36)[1], wanted)
