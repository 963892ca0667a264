"""The exercises' tests: they guard the project, and with IMPL=exercises.mine they judge a learner.

`check_exNN(impl)` is what an exercise asks of an implementation; what it says when an assertion
fails names the likely mistake. Each is run on the function that adapters.py fetches; test_stubs.py
runs it on the stub and on typical wrong solutions. Oracles are loops, or in float64.

PYTEST_DONT_REWRITE: of a failure a learner reads the message, and no page of tensors below it.
"""

import copy
import functools
import hashlib
import io
import itertools
import math
import os
import random
import signal
import statistics

import adapters
import numpy as np
import pytest
import torch
from torch import Tensor

NAN = float("nan")


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=generator(seed))


def near(got: Tensor, want: Tensor, tolerance: float) -> bool:
    """Whether all differences are small; infinities must agree, NaN agrees with nothing."""
    got, want = got.detach().double().cpu(), want.detach().double().cpu()
    return bool(torch.isclose(got, want, rtol=tolerance, atol=tolerance).all())


def expect(what: str, got, want: Tensor, mistakes: dict[str, Tensor] | None = None, tolerance=1e-4):
    """`got` must be `want`; where it is the result of a known mistake instead, that is named."""
    assert isinstance(got, Tensor), f"{what}: must be a tensor, is a {type(got).__name__}"
    shapes = f"{what}: must have shape {list(want.shape)}, has {list(got.shape)}"
    assert got.shape == want.shape, shapes
    if near(got, want, tolerance):
        return
    for hint, wrong in (mistakes or {}).items():
        if near(got, wrong, tolerance):
            raise AssertionError(f"{what}: {hint}")
    assert not got.isnan().any(), f"{what}: {int(got.isnan().sum())} values are NaN"
    worst = (got.detach().double().cpu() - want.double().cpu()).abs().nan_to_num(0.0).max()
    raise AssertionError(f"{what}: wrong by up to {float(worst):.3g}")


def same(before, after) -> bool:
    """Whether an argument is what it was; NaN is equal to NaN."""
    if isinstance(before, Tensor):
        before, after = before.detach().cpu().numpy(), after.detach().cpu().numpy()
    if isinstance(before, np.ndarray):
        return np.array_equal(before, after, equal_nan=before.dtype.kind == "f")
    return before is after or before == after


def pure(check):
    """The check of an exercise whose function must leave its arguments alone: it watches them."""

    @functools.wraps(check)
    def watching(function, *rest):
        def call(*arguments):
            before = [
                x.detach().clone() if isinstance(x, Tensor) else copy.deepcopy(x) for x in arguments
            ]
            result = function(*arguments)
            for i, (old, now) in enumerate(zip(before, arguments, strict=True), 1):
                assert same(old, now), f"argument {i} was changed in place: others still need it"
            return result

        return check(call, *rest)

    return watching


def gradient(loss: Tensor, inputs: Tensor) -> Tensor:
    """The gradient of a loss, 0 where there is none."""
    if not loss.requires_grad:
        return torch.zeros_like(inputs)
    (found,) = torch.autograd.grad(loss, inputs, allow_unused=True, retain_graph=True)
    return torch.zeros_like(inputs) if found is None else found


# ---------------------------------------------------------------------------- ex01 causal attention


def naive_attention(q, k, v, seen, scale=None, key_head=None) -> Tensor:
    """Attention by loops: token n attends to rows seen(n), head h reads key head h // G."""
    group = q.shape[1] // k.shape[1]
    scale, out = q.shape[2] ** -0.5 if scale is None else scale, torch.zeros_like(q).double()
    for n, h in itertools.product(range(len(q)), range(q.shape[1])):
        rows, head = seen(n), h // group if key_head is None else key_head(h)
        if rows:
            chance = (k[rows, head].double() @ q[n, h].double() * scale).softmax(0)
            out[n, h] = chance @ v[rows, head].double()
    return out


@pure
def check_ex01(causal_attention):
    lengths = [5, 1, 8]
    first = [0] * 5 + [5] + [6] * 8  # of each token's sequence
    q, k, v = normal(14, 4, 16, seed=1), normal(14, 2, 16, seed=2), normal(14, 2, 16, seed=3)
    out = causal_attention(q, k, v, lengths)
    naive = {
        "right": naive_attention(q, k, v, lambda n: list(range(first[n], n + 1))),
        "a token sees the future of its sequence": naive_attention(
            q, k, v, lambda n: [m for m in range(14) if first[m] == first[n]]
        ),
        "a token sees other sequences: packed rows need more than one causal triangle": (
            naive_attention(q, k, v, lambda n: list(range(n + 1)))
        ),
        "a token does not see itself": naive_attention(q, k, v, lambda n: list(range(first[n], n))),
        "the scores are not divided by sqrt(D)": naive_attention(
            q, k, v, lambda n: list(range(first[n], n + 1)), 1.0
        ),
        "query head h must read key head h // G: neighbours share one, not every Hkv-th": (
            naive_attention(
                q, k, v, lambda n: list(range(first[n], n + 1)), key_head=lambda h: h % 2
            )
        ),
    }
    want = naive.pop("right")
    expect("causal attention", out, want, naive)
    assert out.dtype == q.dtype, f"the result must have the dtype of q, has {out.dtype}"


@pytest.mark.ex01
def test_ex01():
    check_ex01(adapters.get("ex01"))


# -------------------------------------------------------------------------------- ex02 index score


@pure
def check_ex02(index_scores):
    n, heads = 9, 3
    q, k, w = normal(n, heads, 8, seed=1), normal(n, 8, seed=2), normal(n, heads, seed=3)
    want = torch.full((n, n), -math.inf, dtype=torch.float64)
    early, bare = want.clone(), want.clone()
    for t, s in itertools.product(range(n), range(n)):
        products = [(float(q[t, j] @ k[s]), float(w[t, j])) for j in range(heads)]
        if s < t:
            want[t, s] = sum(weight * max(0.0, product) for product, weight in products)
            early[t, s] = max(0.0, sum(weight * product for product, weight in products))
            bare[t, s] = sum(weight * product for product, weight in products)
    got = index_scores(q, k, w)
    assert isinstance(got, Tensor) and got.shape == (n, n), "the scores must be a tensor [N, N]"
    own = torch.eye(n, dtype=torch.bool)
    future = torch.ones(n, n, dtype=torch.bool).triu(1)
    assert (got[future] == -math.inf).all(), "a score of the future must be -inf: s > t"
    assert (got[own] == -math.inf).all(), "the own token needs no score: -inf for s = t, too"
    mistakes = {
        "ReLU belongs to each head's product, before the weighted sum over heads": early,
        "ReLU is missing: without it all heads are one": bare,
    }
    expect("index scores", got, want, mistakes)
    assert got.dtype == q.dtype, f"the scores must have the dtype of q, have {got.dtype}"


@pytest.mark.ex02
def test_ex02():
    check_ex02(adapters.get("ex02"))


# ------------------------------------------------------------------------ ex03 deterministic top-k


@pure
def check_ex03(select):
    chance = random.Random(0)
    sizes = (12, 12, 4), (5, 5, 9), (6, 1, 1), (40, 300, 16)
    for close, (queries, width, top_k) in itertools.product((False, True), sizes):
        past = [chance.randrange(width) for _ in range(queries)]
        values = [0.0, -0.0, 0.0, 0.0, 1.0, 2.0, -1.0]  # ReLU leaves many zeros: ties
        values += [1.0 + 2**-23, 2.0 - 2**-23] * close  # and no ties: neighbours in float32
        scores = [[chance.choice(values) for _ in range(width)] for _ in range(queries)]
        for row, own in zip(scores, past, strict=True):
            row[own:] = [chance.choice([9.0, -9.0]) for _ in row[own:]]  # mean nothing
        got = select(torch.tensor(scores), torch.tensor(past), top_k)
        shape = [queries, min(top_k, width)]
        assert list(got.shape) == shape, f"must have shape {shape}, has {list(got.shape)}"
        assert got.dtype == torch.int64, f"chunk ids must be int64, are {got.dtype}"
        for row, own, found in zip(scores, past, got.tolist(), strict=True):
            ranked = sorted(range(own), key=lambda c: (-row[c], c))
            want = [own, *ranked][: len(found)]
            kept = [c for c in found if c >= 0]
            assert found[0] == own, f"the query's own chunk {own} must come first, got {found}"
            assert max(kept) <= own, f"chunk {max(kept)} is the future of a query in chunk {own}"
            assert len(set(kept)) == len(kept), f"a chunk is selected twice: {found}"
            many = f"{len(want)} chunks fit (the own one is one of top_k), got {len(kept)}: {found}"
            assert len(kept) == len(want) and found[: len(want)] == kept, many
            best, chosen = [row[c] for c in want[1:]], [row[c] for c in kept[1:]]
            bits = "scores that differ in the last bit are no tie: compare the scores themselves"
            assert best == chosen or not close, f"{bits}; got {chosen}, not {best}"
            assert sorted(best) == sorted(chosen), f"not the highest scores: {chosen}, not {best}"
            assert best == chosen, f"selected chunks must be sorted by score, got {chosen}"
            ties = f"ties must go to the lowest id: {found[: len(want)]}, not {want}"
            assert kept == want, f"{ties}; torch.topk promises no order among equals"


@pytest.mark.ex03
def test_ex03():
    check_ex03(adapters.get("ex03"))


# ------------------------------------------------------------------- ex04 sparse attention = dense


@pure
def check_ex04(sparse_attention):
    n, size = 14, 4  # the last chunk has two rows
    q, k, v = (normal(n, 2, 16, seed=seed) for seed in (1, 2, 3))

    def rows(selected, hidden=True):  # what query t sees, from a table of chunk ids
        def seen(t):
            found = [c * size + i for c in selected[t].tolist() if c >= 0 for i in range(size)]
            return [m for m in found if m < n and (m <= t or not hidden)]

        return seen

    past = torch.arange(n)[:, None] // size
    everything = torch.arange(4).repeat(n, 1)
    everything = torch.where(everything <= past, everything, -1)
    want = naive_attention(q, k, v, lambda t: list(range(t + 1)))
    with_future = naive_attention(q, k, v, rows(everything, hidden=False))

    def reading(instead):  # rows that are read when -1 is taken for a chunk, some of them twice
        def seen(t):
            chunks = [instead if c < 0 else c for c in everything[t].tolist()]
            return [m for c in chunks for m in range(c * size, c * size + size) if m <= t]

        return seen

    mistakes = {
        "a query sees later keys of its own chunk": with_future,
        "-1 means no chunk: row -1 is the last one": naive_attention(q, k, v, reading(-1)),
        "-1 means no chunk, and is not chunk 0": naive_attention(q, k, v, reading(0)),
    }
    got = sparse_attention(q, k, v, everything, size)
    expect("everything selected, which is dense attention", got, want, mistakes)
    assert got.dtype == q.dtype, f"the result must have the dtype of q, has {got.dtype}"
    # some of it, -1 in the middle, and queries that see nothing
    chance = random.Random(0)
    some = torch.full((n, 3), -1)
    for t in range(n):
        for place in range(3):
            chunk = chance.randrange(-1, t // size + 1)
            some[t, place] = -1 if chunk in some[t] else chunk
    some[5], some[9] = -1, -1
    got = sparse_attention(q, k, v, some, size)
    alone = got[[5, 9]]
    assert not alone.isnan().any(), "a query that selects nothing must get 0: softmax gave NaN"
    assert (alone == 0).all(), "a query that selects nothing must get 0, not a mean of values"
    expect("a selection", got, naive_attention(q, k, v, rows(some)))
    # the last row is in the future of all queries but one, and of its own chunk's first row
    want = naive_attention(q, k, v, rows(everything))
    k[13], v[13] = NAN, NAN
    got = sparse_attention(q, k, v, everything, size)[:13]
    what = "NaN in rows of a query's future (0 * NaN is NaN)"
    assert not got.isnan().any(), f"{what}: it reached the result"
    expect(what, got, want[:13])


@pytest.mark.ex04
def test_ex04():
    check_ex04(adapters.get("ex04"))


# --------------------------------------------------------------------------- ex05 group advantages


@pure
def check_ex05(group_advantages):
    rewards = torch.tensor([[1.0, 0.0, 0.25, 0.5], [2.0, 4.0, -1.0, 3.0]])
    got, dead = group_advantages(rewards, "grpo")
    assert dead.dtype == torch.bool and dead.tolist() == [False, False], "dead: bool [G]"
    for kind in ("grpo", "mean", "rloo"):
        want, population = torch.zeros(2, 4), torch.zeros(2, 4)
        for g, row in enumerate(rewards.tolist()):
            for i, reward in enumerate(row):
                others = row[:i] + row[i + 1 :]
                centre = statistics.mean(others if kind == "rloo" else row)
                scale = statistics.stdev(row) + 1e-6 if kind == "grpo" else 1.0
                want[g, i] = (reward - centre) / scale
                population[g, i] = (reward - centre) / (statistics.pstdev(row) + 1e-6)
        mistakes = {"the std must have m - 1 in its denominator": population}
        if kind == "rloo":
            centred = rewards - rewards.mean(1, keepdim=True)
            mistakes = {"the baseline of an answer is the mean of the OTHERS": centred}
        expect(f"advantages {kind!r}", group_advantages(rewards, kind)[0], want, mistakes)
    # a failed environment has no reward: it moves no mean and gets nothing
    rewards = torch.tensor([[1.0, NAN, 0.0, 0.5]])
    valid = torch.tensor([[True, False, True, True]])
    got, dead = group_advantages(rewards, "mean", valid)
    assert not got.isnan().any(), (
        "an answer that is not valid reached the others (a product keeps NaN)"
    )
    assert got[0, 1] == 0, "an answer that is not valid must get advantage 0"
    zeros = torch.tensor([[1.0 - 0.375, 0, -0.375, 0.5 - 0.375]])
    hint = "your mean counts answers that are not valid"
    expect("one failure in the group", got, torch.tensor([[0.5, 0, -0.5, 0]]), {hint: zeros})
    for kind, want, of_all in (  # where n = 4 stands for m = 3: the std, and m / (m - 1)
        ("grpo", 0.5 / (0.5 + 1e-6), 0.5 / ((0.5 / 3) ** 0.5 + 1e-6)),
        ("rloo", 0.5 * 3 / 2, 0.5 * 4 / 3),
    ):
        want, of_all = (torch.tensor([[x, 0.0, -x, 0.0]]) for x in (want, of_all))
        hint = "n stands where m belongs: count the VALID answers of the group"
        got = group_advantages(rewards, kind, valid)[0]
        expect(f"one failure in the group, {kind!r}", got, want, {hint: of_all})
    nearly = torch.tensor([[1.0, 1.0 + 2**-20, 1.0]])
    got, dead = group_advantages(nearly, "mean")
    assert not dead.any() and (got != 0).all(), "rewards that are nearly equal differ: no tolerance"
    # dead groups: one valid answer, or equal rewards, whatever rounding makes of their mean
    rewards = torch.tensor(
        [[0.1] * 7, [0.7] * 7, [5.0] + [NAN] * 6, [0.3] * 6 + [9.0], [0.3] * 6 + [-9.0], [NAN] * 7]
    )
    valid = torch.ones(6, 7, dtype=torch.bool)
    valid[2, 1:], valid[3:5, 6], valid[5] = False, False, False
    for kind in ("grpo", "mean", "rloo"):
        got, dead = group_advantages(rewards, kind, valid)
        assert not got.isnan().any(), "a dead group must get 0, not 0 / 0"
        equal = "equal rewards are a dead group: compare them exactly, a computed std is rarely 0"
        assert dead[5], "a group without a valid answer is dead"
        others = "the reward of an answer that is not valid decided whether its group is dead"
        assert dead[0] and dead[1], f"{equal}; dead is {dead.tolist()}"
        assert dead[3] and dead[4], others
        assert dead.all(), f"{equal}; dead is {dead.tolist()}"
        assert (got == 0).all(), f"a dead group must teach exactly nothing, got {got.tolist()}"


@pytest.mark.ex05
def test_ex05():
    check_ex05(adapters.get("ex05"))


# -------------------------------------------------------------- ex06 masked mean, its denominator


@pure
def check_ex06(token_mean):
    lengths, prompts = (7, 3, 12, 5), (4, 2, 3, 4)  # tokens of a sequence, and of its prompt
    masks = [torch.arange(n) >= p for n, p in zip(lengths, prompts, strict=True)]
    parts = [normal(n, seed=i) + 3.0 for i, n in enumerate(lengths)]
    count = int(sum(mask.sum() for mask in masks))
    want = torch.cat(parts)[torch.cat(masks)].mean()
    for packing in ([[0, 1, 2, 3]], [[0, 2], [1, 3]], [[0], [1], [2], [3]]):
        batches = [
            (torch.cat([parts[i] for i in b]), torch.cat([masks[i] for i in b])) for b in packing
        ]
        got = sum(token_mean(values, mask, count) for values, mask in batches)
        own = sum(values[mask].mean() for values, mask in batches)
        mistakes = {
            "your mean counts padding and prompts: only the mask is in the denominator": sum(
                values[mask].sum() / len(values) for values, mask in batches
            ),
            "your mean sums over prompts, too": sum(values.sum() for values, _ in batches) / count,
            "your denominator is the micro-batch's own number of tokens: shares must add up to "
            "the step's mean, however it is packed": own,
            "your denominator is the mean of the micro-batches' means": own / len(batches),
        }
        expect(f"{len(batches)} micro-batches", got, want, mistakes)
    for junk in (NAN, math.inf):
        values = torch.tensor([junk, 2.0, 4.0, junk], requires_grad=True)
        mask = torch.tensor([False, True, True, False])
        got = token_mean(values, mask, 4)
        finite = f"{junk} outside the mask reached the mean: 0 * {junk} is NaN, select instead"
        assert torch.isfinite(got), finite
        expect("a mean beside junk", got, torch.tensor(1.5))
        slope = gradient(got, values)
        assert not slope.isnan().any(), f"{junk} outside the mask reached the gradient"
        expect("the gradient", slope, torch.tensor([0.0, 0.25, 0.25, 0.0]))
    for values, mask, size in (
        (normal(4, 1), torch.ones(4, dtype=torch.bool), 4),
        (normal(4), torch.ones(4, dtype=torch.bool), 0),
    ):
        try:
            token_mean(values, mask, size)
        except AssertionError:
            continue
        shapes = f"values {list(values.shape)}, mask {list(mask.shape)}, count {size}"
        raise AssertionError(f"must refuse {shapes}: broadcasting or a count of 0 would be silent")


@pytest.mark.ex06
def test_ex06():
    check_ex06(adapters.get("ex06"))


# ------------------------------------------------------------- ex07, ex08 corrections of the policy


def tokens_of(ratios: list[tuple[float, ...]]) -> tuple[list[Tensor], Tensor]:
    """Log-probs (rows of ratios to mu, mu) with a prompt of NaN in between, and the mask."""
    places = len(ratios) + 2
    mask = torch.ones(places, dtype=torch.bool)
    mask[0], mask[places // 2] = False, False
    behaviour = torch.full((places,), NAN)
    behaviour[mask] = -1.0 - normal(len(ratios)).abs()
    columns = []
    for column in zip(*ratios, strict=True):
        values = torch.full((places,), NAN)
        values[mask] = behaviour[mask] + torch.tensor(column).log()
        columns.append(values)
    return [*columns, behaviour], mask


@pure
def check_ex07(tis):
    pairs = list(itertools.product((0.5, 0.95, 1.0, 1.2, 2.0), (0.3, 1.0, 1.9, 5.0)))  # r, w
    pairs *= 2
    (logprobs, proximal, behaviour), mask = tokens_of([(r * w, w) for r, w in pairs])
    advantages = torch.full_like(logprobs, NAN)
    signs = torch.tensor([1.5] * 20 + [-0.5] * 20)
    advantages[mask] = signs
    logprobs.requires_grad_(), proximal.requires_grad_(), behaviour.requires_grad_()

    def slopes(weight, free=None, pessimistic=True) -> Tensor:
        """d loss / d log pi of every token, from the formula."""
        found = []
        for (r, w), a in zip(pairs, signs.tolist(), strict=True):
            ratio = free(r, w) if free else r
            cut = min(max(ratio, 0.8), 1.28)
            stopped = cut * a < ratio * a if pessimistic else cut != ratio
            found.append(0.0 if stopped else -weight(w) * ratio * a / 50)
        result = torch.zeros(len(mask))
        result[mask] = torch.tensor(found)
        return result

    def value(weight) -> Tensor:
        gains = (
            weight(w) * min(r * a, min(max(r, 0.8), 1.28) * a)
            for (r, w), a in zip(pairs, signs.tolist(), strict=True)
        )
        return torch.tensor(-sum(gains) / 50)

    def capped(w):
        return min(w, 2.0)

    arguments = (logprobs, proximal, behaviour, advantages, mask, 50.0, 0.2, 0.28, 2.0)
    loss = tis(*arguments)
    mistakes = {
        "the weight is not truncated at `cap`": slopes(lambda w: w),
        "the weight is upside down: w = pi_p / mu": slopes(lambda w: min(1 / w, 2.0)),
        "the weight is dropped above the cap: truncated means min(w, cap)": slopes(
            lambda w: w if w <= 2.0 else 0.0
        ),
        "the weight is missing": slopes(lambda w: 1.0),
        "the ratio of the clip is r = pi / pi_p: with pi / mu it corrects twice": slopes(
            capped, lambda r, w: r * w
        ),
        "this is PPO with pi / mu: the clip stands around pi_p, min(w, cap) is a factor": slopes(
            lambda w: 1.0, lambda r, w: r * w
        ),
        "min(r A, clip(r) A) is pessimistic: where clipping makes it better, nothing is clipped": (
            slopes(capped, pessimistic=False)
        ),
        "the sign: this is a loss, to be minimised": -slopes(capped),
        "the denominator must be `count`": slopes(capped) * 50 / int(mask.sum()),
    }
    assert torch.isfinite(loss), "NaN outside the mask reached the loss"
    slope = gradient(loss, logprobs)
    assert not slope.isnan().any(), "NaN outside the mask reached the gradient"
    expect("the gradient in logprobs", slope, slopes(capped), mistakes)
    expect("the loss", loss, value(capped))
    for name, tensor in (("proximal", proximal), ("behaviour", behaviour)):
        leak = f"a gradient flows through `{name}`: the weight and the old policy are constants"
        assert (gradient(loss, tensor).nan_to_num(1.0)[mask] == 0).all(), leak
    # in training, pi_p is often the very tensor pi
    twin = logprobs.detach().clone().requires_grad_()
    slope = gradient(tis(twin, twin, *arguments[2:]), twin)
    want = torch.zeros(len(mask))
    want[mask] = torch.tensor(
        [-min(r * w, 2.0) * a / 50 for (r, w), a in zip(pairs, signs.tolist(), strict=True)]
    )
    expect("pi_p given as pi itself (one update a step)", slope, want)


@pytest.mark.ex07
def test_ex07():
    check_ex07(adapters.get("ex07"))


@pure
def check_ex08(double_sided):
    low, high = 0.25, 0.5  # exact in binary, and so are the edges 0.75 and 1.5
    ratios = [0.5, 0.7, 0.8, 1.0, 1.2, 1.45, 1.6, 4.0] * 2
    (logprobs, behaviour), mask = tokens_of([(r,) for r in ratios])
    advantages = torch.full_like(logprobs, NAN)
    signs = torch.tensor([2.0] * 8 + [-1.0] * 8)
    advantages[mask] = signs
    logprobs.requires_grad_()

    def spread(values) -> Tensor:
        result = torch.zeros(len(mask))
        result[mask] = torch.tensor(values)
        return result

    def slopes(weight, extra=lambda r, log: 0.0) -> Tensor:
        logs = logprobs.detach()[mask].tolist()
        parts = zip(ratios, signs.tolist(), logs, strict=True)
        return spread([-(weight(r, a) + extra(r, log)) * a / 20 for r, a, log in parts])

    def inside(r, a=None):
        return r if 0.75 < r < 1.5 else 0.0

    def clipped(r, a):  # PPO's min lets the gradient through where clipping would help
        return 0.0 if (a > 0 and r > 1.5) or (a < 0 and r < 0.75) else r

    loss = double_sided(logprobs, behaviour, advantages, mask, 20.0, low, high)
    mistakes = {
        "f(rho) is a constant: detach it, or its own gradient adds rho * A * log pi": slopes(
            inside, lambda r, log: inside(r) * log
        ),
        "outside, f is 0 for either sign of A; PPO's min keeps half of these tokens": slopes(
            clipped
        ),
        "outside, f is 0: clipping the weight (as CISPO does) lets every token teach": slopes(
            lambda r, a: min(max(r, 0.75), 1.5)
        ),
        "the weight is missing: inside, f(rho) = rho": slopes(lambda r, a: float(bool(inside(r)))),
        "the sign: this is a loss, to be minimised": -slopes(inside),
        "the denominator must be `count`": slopes(inside) * 20 / 16,
    }
    assert torch.isfinite(loss), "NaN outside the mask reached the loss"
    slope = gradient(loss, logprobs)
    assert not slope.isnan().any(), "NaN outside the mask reached the gradient"
    expect("the gradient in logprobs", slope, slopes(inside), mistakes)
    logs = logprobs.detach()[mask]
    weights = torch.tensor([inside(r) for r in ratios]) * signs
    log = "the gradient is right, the value is not: the loss is f(rho) * A * log pi, f a constant"
    expect("the loss", loss, -(weights * logs).sum() / 20, {log: -weights.sum() / 20})
    # at the edges: just outside, just inside, and rho = 1 exactly where one side has no width
    mask, four = torch.ones(4, dtype=torch.bool), torch.ones(4)
    edges = torch.tensor([0.75, 1.5, 0.75, 1.5]).log()
    cases = [("just outside", edges * 1.0001, low, high, 0.0)]
    cases += [("just inside", edges * 0.9999, low, high, 1.0)]
    cases += [("rho = 1 with low = 0: both sides are strict", edges * 0, 0.0, high, 0.0)]
    cases += [("rho = 1 with high = 0: both sides are strict", edges * 0, low, 0.0, 0.0)]
    for what, logs, *sides, kept in cases:
        leaf = logs.clone().requires_grad_()
        slope = gradient(double_sided(leaf, torch.zeros(4), four, mask, 4.0, *sides), leaf)
        expect(f"tokens that teach, {what}", (slope != 0).float(), four * kept)
    far = torch.tensor([-300.0, -1.0, -200.0, -1.0], requires_grad=True)
    loss = double_sided(far, far.detach().flip(0), torch.ones(4), mask, 4.0, low, high)
    slope = gradient(loss, far)
    what = "log-ratios of 200 or 300: exp overflows, and inf * 0 is NaN"
    assert torch.isfinite(loss) and torch.isfinite(slope).all(), what


@pytest.mark.ex08
def test_ex08():
    check_ex08(adapters.get("ex08"))


# -------------------------------------------------------------------------- ex09 KL-window damper


@pure
def check_ex09(damp):
    on, off = (0.6, 2.0), (1.0, 1.0)

    def feed(values, window=()):
        window, scales = list(window), off
        for value in values:
            window, *scales = damp(window, value)
        return window, tuple(scales)

    window, scales = feed([0.1, 0.2])
    assert window == [0.1, 0.2], f"the window must hold the values, newest last, got {window}"
    assert feed([0.1])[1] == off, f"the scales for a mean of 0.1 must be {off}, {feed([0.1])[1]}"
    first = feed([0.2])[1]
    assert first != on[::-1], "the learning rate's scale comes first, the reference's second"
    assert first != off, "the mean counts the values kept so far, not 1000 slots"
    assert first == on, f"the scales for a mean of 0.2 must be {on}, got {first}"
    assert feed([0.15])[1] == off, "strictly above: a mean of exactly 0.15 is not above 0.15"
    last = "the mean of the window decides, and not its last value"
    assert feed([0.0] * 9 + [1.0])[1] == off, f"{last}: one spike was enough"
    assert feed([1.0] * 9 + [0.0])[1] == on, f"{last}: one quiet step was enough"
    window, scales = feed([0.15], [0.15] * 999)
    rounded = "a float sum of a thousand 0.15 exceeds 150: math.fsum does not"
    assert scales == off, rounded
    window, scales = feed([0.0], [1e6] + [0.0] * 999)
    forgets = "only the 1000 newest values count: the window must forget"
    assert len(window) == 1000, f"{forgets}, and hold 1000 of 1001 values, not {len(window)}"
    assert scales == off, f"{forgets} its oldest value"
    once = "the scale is a factor on the BASE learning rate: 0.6, however long it lasts"
    assert feed([0.5] * 5)[1] == on, f"{once}; got {feed([0.5] * 5)[1]}"
    for value in (NAN, math.inf, -math.inf):
        try:
            damp([0.1], value)
        except AssertionError:
            continue
        raise AssertionError(f"{value} must be refused: it would stay in the mean for 1000 steps")


@pytest.mark.ex09
def test_ex09():
    check_ex09(adapters.get("ex09"))


# -------------------------------------------------------------------- ex10 counter-based sampling


@pure
def check_ex10(draw):
    chance = np.random.default_rng(0)
    keys = chance.integers(0, 2**62, 300, dtype=np.int64)
    positions = chance.integers(0, 5000, 300, dtype=np.int64)
    logits = normal(300, 16)
    chosen, logprobs = draw(logits, keys, positions, 1.0)
    assert chosen.dtype == torch.int64 and chosen.shape == (300,), "chosen must be int64 [B]"
    assert logprobs.dtype == torch.float32 and logprobs.shape == (300,), "log-probs: float32 [B]"
    again = draw(logits, keys, positions, 1.0)[0]
    state = "the same arguments gave other tokens: there is a generator with a state in it"
    assert again.equal(chosen), state
    torch.manual_seed(1), np.random.seed(1), random.seed(1)
    assert draw(logits, keys, positions, 1.0)[0].equal(chosen), state
    back = draw(logits.flip(0), keys[::-1].copy(), positions[::-1].copy(), 1.0)[0].flip(0)
    company = "a row's token depends on its place in the batch or its neighbours"
    assert back.equal(chosen), company
    for b in (0, 17, 299):
        alone = draw(logits[b : b + 1], keys[b : b + 1], positions[b : b + 1], 1.0)[0]
        assert alone[0] == chosen[b], f"{company}: alone, row {b} gives another one"

    # frequencies, over keys and over positions; temperature 2
    n, row = 20_000, torch.tensor([0.0, 1.0, 2.0, -1.0, 0.5])
    many, ones = np.arange(n, dtype=np.int64), np.ones(n, dtype=np.int64)
    cold = row.softmax(0)
    want = (row / 2).softmax(0)
    sigma = (want * (1 - want) / n).sqrt()
    for what, k, p in (("over keys", many, 7 * ones), ("over positions", 12345 * ones, many)):
        tokens = draw(row.repeat(n, 1), k, p, 2.0)[0]
        found = torch.bincount(tokens, minlength=5) / n
        missing = "the temperature is missing: frequencies are softmax(logits)"
        assert not ((found - cold).abs() < 5 * sigma).all(), missing
        shown = (
            f"{[round(x, 3) for x in found.tolist()]}, not {[round(x, 3) for x in want.tolist()]}"
        )
        assert ((found - want).abs() < 5 * sigma).all(), f"frequencies {what} are {shown}"

    # independence: flat logits of 16 tokens agree in 1 of 16 places
    flat = torch.zeros(4000, 16)
    k, p = many[:4000] % 63 + 1000, many[:4000] // 63 + 1

    def agree(dk, dp):
        first, second = draw(flat, k, p, 1.0)[0], draw(flat, k + dk, p + dp, 1.0)[0]
        return float((first == second).float().mean())

    for dk, dp in ((1, 0), (0, 1), (1, -1), (1, 1)):
        hint = f"(key, position) and (key + {dk}, position + {dp}) share their noise"
        assert agree(dk, dp) < 0.11, f"{hint}: mix the key before the position joins it"

    upper = "keys that differ in their upper bits only share their noise: a key has 62 bits"
    for bit in (31, 32, 40, 60):
        assert agree(1 << bit, 0) < 0.11, f"{upper}, bit {bit} changes nothing"
    rare = torch.tensor([0.0015, 0.9985]).log().repeat(n, 1)
    found = int((draw(rare, many, ones, 1.0)[0] == 0).sum())
    bits = f"a token of probability 0.0015 came {found} times in {n}, not about {0.0015 * n:.0f}"
    assert abs(found - 0.0015 * n) < 5 * (0.0015 * n) ** 0.5, f"{bits}: your noise has too few bits"

    flat, k, p = torch.zeros(64, 2**16), many[:64] + 5000, ones[:64]
    places = len(set((draw(flat, k, p, 1.0)[0] % 16).tolist()))
    grid = "of 65,536 equal tokens only every 16th can come: your noise has too few bits"
    assert places > 4, grid

    # what the learner is told
    chosen, logprobs = draw(logits, keys, positions, 2.0)
    rows = torch.arange(300)
    want = (logits / 2).log_softmax(-1)[rows, chosen]
    plain = logits.log_softmax(-1)[rows, chosen]
    hint = "they must be of the distribution that was sampled from, with its temperature"
    expect("the log-probs", logprobs, want, {hint: plain})
    chosen, logprobs = draw(logits, keys, positions, 0.0)
    assert chosen.equal(logits.argmax(-1)), "temperature 0 must choose the most likely token"
    expect("log-probs at temperature 0", logprobs, logits.log_softmax(-1).amax(-1))


@pytest.mark.ex10
def test_ex10():
    check_ex10(adapters.get("ex10"))


# ------------------------------------------------------------------ ex11 staleness from the oldest


@pure
def check_ex11(staleness):
    def of(versions, version, mask=None):
        versions = np.array(versions, np.int32)
        mask = versions >= 0 if mask is None else np.array(mask, bool)
        return staleness(versions, mask, version)

    got = of([-1, -1, 5, 5, 7], 9)
    assert got != 10, "prompt tokens have version -1 and do not count: look at the mask"
    assert got != 2, "staleness counts from the OLDEST token of a trajectory, not the newest"
    assert got not in (3, 5), "off by one: it is version - oldest version"
    assert got == 4, f"versions 5, 5, 7 at version 9 must give 4, got {got}"
    assert of([-1, -1, 4, 4], 4) == 0, "off by one: tokens of the learner's version are fresh, 0"
    assert of([-1, 7, 3, 5], 8) == 5, "the oldest token need not be the first: take the minimum"
    masked = of([-1, 6, 2, 6], 8, [False, True, False, True])
    assert masked == 2, f"a token that is not in the mask does not count, got {masked}, not 2"
    assert of([-1, 6, 6], 5) == 0, "never negative: the worker may have newer weights"
    assert of([-1, -1], 5) == 0, "nothing was generated: nothing is stale"
    assert isinstance(got, int), f"must be an int (it goes into JSON), is a {type(got).__name__}"


@pytest.mark.ex11
def test_ex11():
    check_ex11(adapters.get("ex11"))


# ------------------------------------------------------- ex12, ex13 admission and deadline batching


class Schedule:
    """A random run of admission and batching, judged by what happens to the groups only."""

    def __init__(self, may_admit, next_batch, seed: int):
        self.may_admit, self.next_batch, self.chance = may_admit, next_batch, random.Random(seed)
        self.B, self.eta = self.chance.randint(1, 4), self.chance.choice([0, 1, 2, 4])
        self.version = self.admitted = self.trained = 0
        self.running: dict[int, int] = {}  # id -> start
        self.completed: list[tuple[int, int]] = []

    def admit(self):
        while self.admitted - self.trained < 50:
            starts = [*self.running.values(), *(start for _, start in self.completed)]
            if not self.may_admit(starts, self.version, self.version, self.B, self.eta):
                return
            self.running[self.admitted] = self.version
            self.admitted += 1
        raise AssertionError("admission: there is no limit, 50 groups are outstanding")

    def finish(self, group_id: int):
        self.completed.append((group_id, self.running.pop(group_id)))

    def train(self) -> bool:
        given = (list(self.completed), list(self.running.values()), self.version, self.B, self.eta)
        batch = self.next_batch(*given)
        if batch is None:
            return False
        starts = dict(self.completed)
        known = len(batch) == self.B and set(batch) <= set(starts) and batch == sorted(set(batch))
        assert known, f"a batch must be {self.B} ids of complete groups, ascending; got {batch}"
        worst = max(self.version - starts[group_id] for group_id in batch)
        late = f"staleness {worst} exceeds {self.eta}: deadlines were not looked at in time"
        assert worst <= self.eta, late
        self.completed = [entry for entry in self.completed if entry[0] not in batch]
        self.trained, self.version = self.trained + self.B, self.version + 1
        return True

    def run(self, moves: int = 30):
        for _ in range(moves):
            self.admit()
            hard = min(self.running, default=-1)  # the oldest is slow: an easy prompt overtakes it
            quick = [g for g in self.running if g != hard or self.chance.random() < 0.15]
            for group_id in self.chance.sample(quick, self.chance.randint(0, len(quick))):
                self.finish(group_id)
            self.train()
        for _ in range(self.eta + 2):  # all that is outstanding completes: training must go on
            self.admit()
            for group_id in list(self.running):
                self.finish(group_id)
            stuck = "deadlock: every group is complete, and no batch can be trained in time"
            more = "more was admitted than there are places before a deadline (off by one?)"
            assert self.train(), f"{stuck}, or you wait for nobody; {more}"


@pure
def check_ex12(may_admit):
    chance = random.Random(1)
    seen = set()
    for _ in range(600):
        B, eta = chance.randint(1, 4), chance.choice([0, 1, 2, 4])
        version = chance.randint(eta, eta + 5)
        earliest = version - eta
        starts = [
            chance.randint(earliest, version) for _ in range(chance.randint(0, (eta + 1) * B))
        ]
        start = chance.choice([version, chance.randint(earliest, version)])
        bounds = {
            s: (sum(x <= s for x in starts) + 1, (s + eta - version + 1) * B)
            for s in range(start, version + 1)
        }
        want = all(n <= room for n, room in bounds.values())
        got = may_admit(list(starts), version, start, B, eta)
        assert isinstance(got, bool), f"must be a bool, is a {type(got).__name__}"
        case = f"starts {sorted(starts)}, version {version}, start {start}, B {B}, eta {eta}"
        seen.add((want, start == version))
        if got and not want:
            n, room = next(x for x in bounds.values() if x[0] > x[1])
            assert n != room + 1, f"off by one: the new group itself counts, too; {case}"
            raise AssertionError(f"admits what breaks a deadline of some s > start; {case}")
        assert got == want, f"refuses a group that still meets every deadline: {case}"
    assert len(seen) == 4, seen
    for seed in range(150):  # what it is for: nothing is late, nothing is stuck
        Schedule(may_admit, adapters.project("ex13"), seed).run()


@pytest.mark.ex12
def test_ex12():
    check_ex12(adapters.get("ex12"))


@pure
def check_ex13(next_batch):
    assert next_batch([(3, 0)], [], 0, 2, 1) is None, "fewer than B complete groups: None"
    spare = next_batch([(9, 5)], [5], 5, 1, 1)
    assert spare == [9], f"the group that is running can be trained by the next step, got {spare}"
    got = next_batch([(9, 5), (4, 5)], [], 5, 1, 1)
    assert got == [9], f"the group that completed first comes first, got {got}"
    hard = next_batch([(9, 5), (4, 3)], [], 5, 1, 2)
    assert hard == [4], f"group 4 started at 3 and is due now: it must be trained, got {hard}"
    slow = next_batch([(9, 5)], [4], 5, 1, 1)
    waits = "a group that is still running and due now needs this place: wait, do not starve it"
    assert slow is None, f"{waits}; got {slow}"
    equal = next_batch([(7, 5), (9, 3), (4, 3)], [], 5, 1, 3)
    assert equal == [9], f"of equal starts the one that completed first: [9], got {equal}"
    for seed in range(150):
        Schedule(adapters.project("ex12"), next_batch, seed).run()
    chance = random.Random(2)
    for _ in range(400):
        B, eta = chance.randint(1, 3), chance.choice([0, 1, 2, 4])
        version = eta + chance.randint(0, 3)
        starts = [
            chance.randint(version - eta, version)
            for _ in range(chance.randint(0, B * (eta + 1) + 1))  # one more than admission allows
        ]
        cut = chance.randint(0, len(starts))
        ids = chance.sample(range(100), len(starts))
        completed, running = list(zip(ids, starts, strict=True))[:cut], starts[cut:]

        def meets(chosen, left=completed, running=running, version=version, eta=eta, B=B):
            behind = running + [start for group_id, start in left if group_id not in chosen]
            return all(
                sum(x <= s for x in behind) <= (s + eta - version) * B
                for s in range(version - eta, version + 1)
            )

        orders = [completed, sorted(completed, key=lambda entry: entry[1])]
        picks = [sorted(group_id for group_id, _ in order[:B]) for order in orders]
        fitting = [pick for pick in picks if len(pick) == B and meets(pick)]
        want = fitting[0] if fitting else None
        got = next_batch(list(completed), list(running), version, B, eta)
        case = f"completed {completed}, running {running}, version {version}, B {B}, eta {eta}"
        if got is not None and got != sorted(got):
            raise AssertionError(
                f"the ids must be ascending (equal sums everywhere): {got}; {case}"
            )
        if want is None and got is not None:
            raise AssertionError(f"what stays behind would miss its deadline: {case}")
        if got is None and want is not None:
            hint = "waits although a batch may be trained"
            raise AssertionError(f"{hint} (the oldest start first, if need be): {case}")
        assert got == want, f"must train {want}, got {got}: {case}"


@pytest.mark.ex13
def test_ex13():
    check_ex13(adapters.get("ex13"))


# ----------------------------------------------------------------------------------- ex14 resume


@pure
def check_ex14(resume):
    cases = [
        ([3, 4, 5, 6, 7], {6: 8}, 8, 9, 1, 2),  # more were issued before than may be now
        ([4, 5, 6, 7], {5: 2, 7: 3}, 8, 3, 2, 1),
        ([10, 3, 11, 12], {11: 4}, 13, 5, 2, 2),
        ([], {}, 0, 0, 3, 0),
        ([1, 2], {1: 1, 2: 1}, 3, 2, 1, 1),
    ]
    for in_flight, completed, cursor, version, B, eta in cases:
        outstanding, waiting, following = resume(
            list(in_flight), dict(completed), cursor, version, B, eta
        )
        case = f"in flight {in_flight}, completed {completed}, next {cursor}, version {version}"
        lost = sorted(set(in_flight) - set(outstanding) - set(waiting))
        long = "they were in flight, the long ones first of all, and must be made again or wait"
        assert not lost, f"prompts lost on resume: {lost}; {long}; {case}"
        twice = sorted(set(outstanding) & set(waiting))
        assert not twice, f"groups {twice} are outstanding and waiting: they would be trained twice"
        for group_id, start in completed.items():
            got = outstanding.get(group_id)
            bound = f"its tokens are of version {start}, so the staleness bound would be broken"
            assert got == start, (
                f"complete group {group_id} must keep its start, got {got}: {bound}"
            )
        for group_id in set(in_flight) & set(outstanding) - set(completed):
            begins = f"group {group_id} is made again by today's weights: it starts at {version}"
            assert outstanding[group_id] == version, f"{begins}, got {outstanding[group_id]}"
        room = (eta + 1) * B
        assert len(outstanding) <= room, f"{len(outstanding)} outstanding, at most {room}: {case}"
        again = [g for g in in_flight if g not in completed]
        count = min(len(again), room - len(completed))
        order = f"made again must be {again[:count]}, in order, and wait {again[count:]}: {case}"
        made = [g for g in outstanding if g in in_flight and g not in completed]
        shown = f"{order}; {made} are made again, {waiting} wait"
        assert waiting == again[count:] and made == again[:count], shown
        fresh = sorted(g for g in outstanding if g not in in_flight)
        want = list(range(cursor, cursor + room - len(completed) - count))
        assert fresh == want, f"new prompts must be {want}, got {fresh}: {case}"
        new = {outstanding[g] for g in fresh} - {version}
        assert not new, f"new prompts start at version {version}, got {new}"
        moved = cursor + len(want)
        assert following == moved, f"the prompt cursor must be {moved}, got {following}: {case}"


@pytest.mark.ex14
def test_ex14():
    check_ex14(adapters.get("ex14"))


# ------------------------------------------------------------------------------- ex15 weight swap


def check_ex15(swap_weights):
    from cache import decode, make_cache, prefill
    from model import GPT, ModelConfig

    shape = dict(layers=2, width=16, heads=4, kv_heads=2, head_width=8, hidden=24)
    shape |= dict(vocab_size=40, context=32, init_std=0.4)
    old, new = GPT(ModelConfig(**shape), seed=1), GPT(ModelConfig(**shape), seed=2)
    flat, before = new.flat.clone(), old.flat.clone()
    tokens = torch.randint(40, (4, 32), generator=generator()).numpy().astype(np.int32)
    cached, running = np.array([9, 5, 0, 17], np.int64), np.array([True, False, True, True])
    cache, slots = make_cache(old, 4, 32), [0, 1, 3]
    prefill(old, cache, torch.tensor(slots), [tokens[b, : cached[b]] for b in slots])
    idle = cache.kv[:, :, 1].clone()
    where = old.flat.data_ptr()
    swap_weights(old, cache, flat, tokens, cached, running)
    place = "write into model.flat in place: the parameters are views of it"
    assert old.flat.data_ptr() == where and old.layers[0].qkv.equal(new.layers[0].qkv), place
    assert old.flat.equal(flat), "the model does not have the new weights"
    assert flat.equal(new.flat), "the new weights themselves were changed"
    reference = GPT(ModelConfig(**shape), seed=3)
    made = {}
    for name, weights in (("new", flat), ("old", before)):
        reference.flat.copy_(weights)
        made[name] = make_cache(reference, 4, 32)
        prefill(
            reference, made[name], torch.tensor([0, 3]), [tokens[b, : cached[b]] for b in (0, 3)]
        )
    (k, v), (new_k, new_v) = cache.kv, made["new"].kv
    for b in (0, 3):
        n = cached[b]
        newest = f"the newest key of slot {b} (token cached[b] - 1 was fed, too)"
        for what, at in ((f"keys of slot {b}", slice(n - 1)), (newest, slice(n - 1, n))):
            hint = "stale keys: they are still those of the old weights"
            old_keys = {hint: made["old"].kv[0, :, b, at]}
            expect(what, k[:, b, at], new_k[:, b, at], old_keys)
        expect(f"values of slot {b}", v[:, b, :n], new_v[:, b, :n])
        beyond = f"slot {b} has keys of tokens that were not fed yet"
        assert (k[:, b, n:] == 0).all(), beyond
    untouched = cache.kv[:, :, 1].equal(idle)
    assert untouched, "an empty slot must be left alone"
    following = torch.from_numpy(tokens[np.arange(4), cached]).long(), torch.from_numpy(cached)
    hidden = [decode(*pair, *following)[[0, 3]] for pair in ((old, cache), (new, made["new"]))]
    expect("the next step's hidden states", *hidden)
    # nobody is running: nothing to rebuild
    swap_weights(old, cache, before, tokens, cached, np.zeros(4, bool))
    assert old.flat.equal(before), "weights must be adopted when no slot is running, too"


@pytest.mark.ex15
def test_ex15():
    check_ex15(adapters.get("ex15"))


# -------------------------------------------------------------------------- ex16 atomic checkpoint


def read(path) -> dict | None:
    """The state in a checkpoint file, or None when it is not whole."""
    data = path.read_bytes()
    if hashlib.sha256(data[:-32]).digest() != data[-32:]:
        return None
    return torch.load(io.BytesIO(data[:-32]), weights_only=True)


def killed_after(size: int, work) -> None:
    """Run `work` in a child that the kernel kills when a file grows beyond `size` bytes."""
    import resource

    child = os.fork()
    if child == 0:
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        resource.setrlimit(resource.RLIMIT_FSIZE, (size, size))
        signal.signal(signal.SIGXFSZ, signal.SIG_DFL)
        try:
            work()
        finally:
            os._exit(0)
    os.waitpid(child, 0)


def recorded(work) -> list[tuple[str, int, int]]:
    """(what, which file, its bytes) of every flush and renaming that `work` does, in order."""
    found, real = [], {name: getattr(os, name) for name in ("fsync", "replace", "rename")}

    def fsync(file):
        facts = os.stat(file if isinstance(file, int) else file.fileno())
        found.append(("fsync", facts.st_ino, facts.st_size))
        return real["fsync"](file)

    def moved(name):
        def move(source, target, **rest):
            facts = os.stat(source)
            found.append(("rename", facts.st_ino, facts.st_size))
            return real[name](source, target, **rest)

        return move

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "fsync", fsync)
        patch.setattr(os, "replace", moved("replace"))
        patch.setattr(os, "rename", moved("rename"))
        work()
    return found


def check_ex16(save_checkpoint, folder):
    place = folder / "checkpoints"
    place.mkdir()

    def state(value):
        return {"weights": torch.full((5000,), float(value)), "step": value}

    def names():
        return sorted(path.name for path in place.glob("step*.pt"))

    def value(name):
        found = read(place / name) if (place / name).exists() else None
        return None if found is None else found["step"]

    path = save_checkpoint(folder, 1, state(1))
    assert path == place / "step0000001.pt", f"the path must be step0000001.pt, got {path}"
    digest = "the file must be what torch.save writes and then its sha256 digest, 32 bytes"
    assert value("step0000001.pt") == 1, digest
    for step in (2, 3, 4):
        save_checkpoint(folder, step, state(step))
    newest = "only the `keep` newest must be left, those of the highest steps"
    assert names() == [f"step000000{step}.pt" for step in (2, 3, 4)], f"{newest}: {names()}"
    for size in (0, 1000, 15000, 20010):
        killed_after(size, lambda: save_checkpoint(folder, 5, state(5)))
        torn = f"killed after {size} bytes, the newest checkpoint is torn: write under another name"
        assert value(names()[-1]) is not None, torn
        kept = "old checkpoints were deleted before the new one was whole"
        assert names() == [f"step000000{step}.pt" for step in (2, 3, 4)], f"{kept}: {names()}"
    killed_after(1000, lambda: save_checkpoint(folder, 4, state(44)))
    again = "a checkpoint that was whole is torn: a step is written again after a resume"
    assert value("step0000004.pt") == 4, again
    events = recorded(lambda: save_checkpoint(folder, 5, state(5)))
    assert value("step0000005.pt") == 5, "what a killed process left behind is an obstacle"
    renames = [event for event in events if event[0] == "rename"]
    assert renames, "a name must appear at once: rename a file that is whole (Path.replace)"
    flushed = "renamed before it was flushed (os.fsync): after a power cut the file may be empty"
    _, file, size = renames[-1]
    synced = [
        s for what, f, s in events[: events.index(renames[-1])] if (what, f) == ("fsync", file)
    ]
    assert synced, flushed
    empty = f"os.fsync saw {synced[-1]} of {size} bytes: write all, digest and all; "
    empty += "then file.flush(), for Python has a buffer, too; then os.fsync"
    assert synced[-1] == size, empty
    assert names() == [f"step000000{step}.pt" for step in (3, 4, 5)], f"{newest}: {names()}"
    save_checkpoint(folder, 3, state(3))  # again, after a resume: now it is the last one written
    save_checkpoint(folder, 6, state(6))
    assert names() == [f"step000000{step}.pt" for step in (4, 5, 6)], f"{newest}: {names()}"
    save_checkpoint(folder, 6, state(6), keep=1)
    assert names() == ["step0000006.pt"], f"{newest}: {names()} for keep=1"


@pytest.mark.ex16
def test_ex16(tmp_path):
    check_ex16(adapters.get("ex16"), tmp_path)


# ------------------------------------------------------------------------------ ex17, ex18 kernels


def kernel_device() -> str:
    """Where kernels run in this process: on a GPU, or interpreted; otherwise the test skips."""
    pytest.importorskip("triton", reason="Triton is not installed")
    import triton

    import dsa_triton

    if not dsa_triton.INTERPRETED:
        if not torch.cuda.is_available():
            pytest.skip("kernels are interpreted in a process of their own: TRITON_INTERPRET=1")
        return "cuda"
    if triton.__version__ < "3.7" and np.lib.NumpyVersion(np.__version__) >= "2.4.0":
        pytest.skip("the interpreter of Triton 3.6 cannot loop with numpy >= 2.4")
    return "cpu"


def check_ex17(row_dots):
    device = kernel_device()
    for n, width, dtype in (
        (64, 16, torch.float32),
        (70, 32, torch.float32),
        (3, 64, torch.float16),
    ):
        # slices of something larger: a load without a mask reads junk and does not crash
        x, y = (normal(n + 256, width, seed=seed).to(device, dtype) * 4 for seed in (1, 2))
        x, y = x[:n], y[:n]
        want = (x.double() * y.double()).sum(1)
        got = row_dots(x, y)
        assert got.dtype == torch.float32, f"the result must be float32, is {got.dtype}"
        assert got.shape == (n,), f"the result must have shape [{n}], has {list(got.shape)}"
        whole = n // 16 * 16
        if not near(got, want, 1e-4) and near(got[:whole], want[:whole], 1e-4) and whole:
            raise AssertionError(f"the last rows of {n} are missing: round the grid up, and mask")
        half = f"{dtype}: products and sums must be in float32, so convert what was loaded"
        mistakes = {half: (x * y).sum(1)} if dtype == torch.float16 else {}
        if dtype == torch.float16:
            assert near(got, want, 1e-4) or not near(got, want, 2e-2), half
        expect(f"row dots of {n} rows of {width}, {dtype}", got, want, mistakes)


def check_ex18(sparse_tile):
    device = kernel_device()

    def attention(q, k, v, rows):
        scores = q.double() @ k[rows].double().T * q.shape[1] ** -0.5
        return scores.softmax(1) @ v[rows].double()

    def summed(q, k, v, tiles, kept):  # tile by tile, where what is `kept` does not shrink
        q, k, v = q.double(), k.double(), v.double()
        top, total, out = q.new_full((16, 1), -math.inf), q.new_zeros(16, 1), torch.zeros_like(q)
        for rows in tiles:
            scores = q @ k[rows].T * q.shape[1] ** -0.5
            new = torch.maximum(top, scores.amax(1, keepdim=True))
            shrink, chance, top = (top - new).exp(), (scores - new).exp(), new
            total = total * (1 if "total" in kept else shrink) + chance.sum(1, keepdim=True)
            out = out * (1 if "output" in kept else shrink) + chance @ v[rows]
        return out / total

    cases = [(16, 3, [0], 40, 1.0), (32, 5, [4, 1, -1, 2], 70, 1.0), (16, 4, [3, 0, 1], 63, 60.0)]
    cases += [(16, 3, [-1, 2, 0], 40, 1.0), (16, 4, [3, 1], 20, 1.0)]  # nothing visible at first
    cases += [(16, 3, [1, 0], 40, -60.0)]  # all scores are far below zero
    for width, chunks, listed, position, size in cases:
        q = (normal(16, width, seed=1) * size).to(device)
        # a chunk of junk on both sides: who reads chunk -1 finds it, and does not crash
        around = [normal(chunks * 16 + 32, width, seed=seed).to(device) for seed in (2, 3)]
        if size < 0:
            q, around[0] = torch.full_like(q, 12.0), around[0] * 0.1 - 5.0
        if size > 1:  # the first chunk scores high: what was summed before must shrink
            around[0][16:32] += 3 * q[:1] / size
        k, v = (x[16:-16] for x in around)
        every = [c * 16 + i for c in listed if c >= 0 for i in range(16)]
        rows = [m for m in every if m <= position]
        got = sparse_tile(q, k, v, torch.tensor(listed, device=device), 16, position)
        want = attention(q, k, v, rows)
        nan = "NaN or infinity: subtract the running maximum before exp"
        if listed[0] < 0 or listed[0] * 16 > position:
            nan = "NaN: before the first visible key the maximum is -inf, and -inf - (-inf) is NaN"
        elif size < 0:
            nan = "NaN: all scores may be far below zero, so the running maximum begins at -inf"
        assert torch.isfinite(got).all(), nan
        mistakes = {
            "a query sees keys behind its position": attention(q, k, v, every),
            "the key at `position` itself is visible": attention(
                q, k, v, [m for m in rows if m < position]
            ),
            "-1 means no chunk, and is not chunk 0": attention(
                q, k, v, rows + list(range(16)) * listed.count(-1)
            ),
            "-1 means no chunk: its rows lie before the first key": attention(
                q, *around, [m + 16 for m in rows] + list(range(16)) * listed.count(-1)
            ),
            "the scores are not divided by sqrt(D)": attention(q * width**0.5, k, v, rows),
        }
        online = "a new maximum must shrink what was summed before, the output as well as the total"
        tiles = [[m for m in rows if m // 16 == c] for c in listed]
        for kept in ("output", "total", "output and total"):
            wrong = summed(q, k, v, [tile for tile in tiles if tile], kept)
            mistakes[f"{online}: the {kept} did not"] = wrong
        expect(f"{len(listed)} chunks of 16, head width {width}", got, want, mistakes, 1e-3)


@pytest.mark.ex17
def test_ex17():
    check_ex17(adapters.get("ex17"))


@pytest.mark.ex18
def test_ex18():
    check_ex18(adapters.get("ex18"))


# ----------------------------------------------------------------------- ex19 turn-level advantages


def turns_compared(rewards, present, kind, counted=None, rivals=None, absent=0.0) -> Tensor:
    """Advantages of turns by loops; counted(t): turns whose rewards turn t gets; rivals(g, i, t):
    (answer, turn) with which it is compared, itself among them."""
    G, n, T = rewards.shape
    counted = counted or (lambda t: range(t, T))
    there = present.tolist()
    rivals = rivals or (lambda g, i, t: [(k, t) for k in range(n) if there[g][k][t]])
    result = torch.zeros(G, n, T, dtype=torch.float64)

    def earned(g, i, t):
        own = [float(rewards[g, i, u]) * (1 if there[g][i][u] else absent) for u in counted(t)]
        return round(math.fsum(own), 6)

    for g, i, t in itertools.product(range(G), range(n), range(T)):
        all_of_them = [earned(g, *rival) for rival in rivals(g, i, t)]
        if not there[g][i][t] or len(set(all_of_them)) < 2:
            continue
        own, others = earned(g, i, t), list(all_of_them)
        others.remove(own)
        base = statistics.mean(others if kind == "rloo" else all_of_them)
        scale = statistics.stdev(all_of_them) + 1e-6 if kind == "grpo" else 1.0
        result[g, i, t] = (own - base) / scale
    return result


@pure
def check_ex19(turn_advantages):
    junk = 9.0  # the reward of a turn that is not there means nothing
    rewards = torch.tensor(
        [
            [[0.1, 0.2, 0.7], [0.1, 0.0, 0.5], [0.0, 0.3, 0.0], [0.25, junk, junk]],
            [[0.3, 0.0, 1.0], [0.0, junk, junk], [0.2, 0.1, junk], [0.0, 0.5, 0.25]],
        ]
    )
    present = rewards != junk
    G, n, T = rewards.shape
    turns = list(itertools.product(range(n), range(T)))
    for kind in ("mean", "rloo", "grpo"):
        args = rewards, present, kind
        mistakes = {
            "a turn is compared with the same turn of the others, never with another turn": (
                turns_compared(
                    *args, rivals=lambda g, i, t: [x for x in turns if present[g][x[0]][x[1]]]
                )
            ),
            "rewards of past turns are counted: a turn cannot have caused what came before it": (
                turns_compared(*args, counted=lambda t: range(T))
            ),
            "the sum runs the wrong way: a return is this turn and the LATER ones": turns_compared(
                *args, counted=lambda t: range(t + 1)
            ),
            "only the turn's own reward is counted: what it made possible comes later": (
                turns_compared(*args, counted=lambda t: [t])
            ),
            "the turn's own reward is missing in its return": turns_compared(
                *args, counted=lambda t: range(t + 1, T)
            ),
            "a turn that an answer does not have is counted as one with return 0: an episode that "
            "is over is no rival": turns_compared(
                *args, rivals=lambda g, i, t: [(k, t) for k in range(n)]
            ),
            "the reward of a turn that is not there is counted": turns_compared(*args, absent=1.0),
        }
        got, dead = turn_advantages(rewards, present, kind)
        shape = f"advantages must have shape {[G, n, T]}, have {list(got.shape)}"
        assert got.shape == rewards.shape, shape
        own = got.masked_fill(~present, 0.0)
        expect(f"advantages of turns, {kind!r}", own, turns_compared(*args), mistakes)
        assert (got[~present] == 0).all(), "a turn that an answer does not have must get 0"
        assert dead.dtype == torch.bool and dead.tolist() == [False, False], "dead: bool [G]"
    reached = "NaN where there is no turn reached the others: 0 * NaN is NaN"
    try:
        got = turn_advantages(rewards.masked_fill(~present, NAN), present, "mean")[0]
    except AssertionError as error:  # of the project's group_advantages: it refuses NaN
        raise AssertionError(f"{reached}; {error}") from error
    assert not got.isnan().any(), reached
    expect("NaN where there is no turn", got, turns_compared(rewards, present, "mean"))
    # who is alone in a turn; equal returns that were added up in another way; who is dead
    rewards = torch.tensor(
        [
            [[1.0, 0.0, 0.5], [0.0, 1.0, 0.0], [0.0, 1.0, 0.0]],  # alone in turn 3
            [[0.1, 0.5, 0.1], [0.7, 0.0, 0.0], [0.7, 0.0, 0.0]],  # in float32, 0.70000005 and 0.7
            [[1.0, 0.0, 0.0], [0.0, 1.0, 0.0], [0.0, 0.0, 1.0]],
            [[0.5, 0.5, 0.0], [0.5, 0.5, 0.0], [0.5, 0.5, 0.0]],
        ]
    )
    present = torch.ones_like(rewards).bool()
    present[0, 1:, 2] = present[1, 1:, 1:] = False
    got, dead = turn_advantages(rewards, present, "mean")
    assert (got[0, 0, 2] == 0).all(), "who is alone in a turn has no rival there, and gets 0"
    equal = "0.1 + 0.5 + 0.1 and 0.7 are equal returns: add up in float64, then round to float32"
    assert (got[1, :, 0] == 0).all() and dead[1], f"{equal}; got {got[1, :, 0].tolist()}"
    total = "a group is dead if EVERY turn is: equal rewards of the episodes do not decide that"
    assert not dead[2] and got[2].any(), total
    assert not dead[0], "a group is dead if EVERY turn is, not if one of them is"
    assert dead[3] and not got[3].any(), "a group whose turns are all alike is dead, and gets 0"


@pytest.mark.ex19
def test_ex19():
    check_ex19(adapters.get("ex19"))


# ------------------------------------------------------------------------------- ex20 group repair


@pure
def check_ex20(repair):
    large = [None] * 5 + ["env_error"] * 3
    again = {repr(repair(large)) for _ in range(20)}
    assert len(again) == 1, f"{large}: not the same twice, so a run could not be done again"
    whys = None, "env_timeout", "env_error"
    groups = [group for n in range(1, 6) for group in itertools.product(whys, repeat=n)]
    for group in groups:
        failures, n = list(group), len(group)
        sound = [i for i, why in enumerate(group) if why is None]
        got = repair(failures)
        if 2 * len(sound) > n:
            said = f"{failures}: more than half are sound, so the group is repaired; got {got!r}"
            assert isinstance(got, list), said
            size = f"{failures}: the group has {n} places, and must keep them; got {got}"
            assert len(got) == n, f"{size}: every prompt has the same weight"
            wrong = [i for i in got if failures[i]]
            assert not wrong, (
                f"{failures}: answer {wrong and wrong[0]} has failed: it has no reward, and must "
                f"neither be trained nor be repeated; got {got}"
            )
            missing = [i for i in sound if i not in got]
            assert not missing, f"{failures}: sound answer {missing and missing[0]} is lost: {got}"
            times = [got.count(i) for i in sound]
            assert max(times) - min(times) < 2, (
                f"{failures}: the sound ones are repeated in turn, not one of them only; got {got}"
            )
            want = [sound[i % len(sound)] for i in range(n)]
            assert got == want, f"{failures}: must be {want}, all sound ones in order, then again"
            continue
        half = "; exactly half is not MORE than half" if 2 * len(sound) == n else ""
        half = f"{failures}: must be discarded with a reason, got {got!r}{half}"
        assert isinstance(got, str), half
        counts = [failures.count(why) for why in failures if why]
        common = [why for why in failures if why and failures.count(why) == max(counts)]
        most = f"{failures}: the reason is the failure that most of them had, got {got!r}"
        assert got in common, most
        assert got == common[0], f"{failures}: of equally many the one that comes first, not {got}"


@pytest.mark.ex20
def test_ex20():
    check_ex20(adapters.get("ex20"))


# ------------------------------------------------------------------------ ex21 skip-observation GAE


def gae_by_loops(rewards, values, mask, lengths, gamma, lam, worth=None, keep=None, reset=True):
    """A from behind. worth(j, k): the value that follows token j, whose next generated token is k
    (None: there is none); keep(j, k): the share of A_k that A_j gets."""
    worth = worth or (lambda j, k: 0.0 if k is None else float(values[k]))
    keep = keep or (lambda j, k: gamma * lam)
    result, stop, k, later = torch.zeros(len(values), dtype=torch.float64), len(values), None, 0.0
    for length in reversed(lengths):
        if reset:
            k, later = None, 0.0
        for j in reversed(range(stop - length, stop)):
            if mask[j]:
                delta = float(rewards[j]) + gamma * worth(j, k) - float(values[j])
                later = delta + (keep(j, k) * later if k is not None else 0.0)
                result[j], k = later, j
        stop -= length
    return result


@pure
def check_ex21(skip_observation_gae):
    # p: prompt, a: generated, o: observation
    sequences = ["ppaaooaao", "ppp", "paaaoooaa", "paa"]
    lengths = [len(sequence) for sequence in sequences]
    mask = torch.tensor([letter == "a" for letter in "".join(sequences)])
    N = len(mask)
    rewards = (normal(N, seed=1) * mask).round(decimals=1)
    values = normal(N, seed=2)
    gamma, lam = 0.9, 0.7
    args = rewards, values, mask, lengths
    ends = list(itertools.accumulate(lengths))

    def beside(j, k):  # the value of the next token, whatever it is
        return 0.0 if j + 1 in ends else float(values[j + 1])

    def own_turn(j, k):
        return k == j + 1

    everywhere = gae_by_loops(rewards, values, torch.ones(N), lengths, gamma, lam)
    right = gae_by_loops(*args, gamma, lam)
    walks = "walks through the observations: bootstraps from their values and decays over them"
    mistakes = {
        f"your estimate {walks}; the next token is the next GENERATED one": everywhere * mask,
        "the estimate bootstraps from an observation's value: nobody chose that token": (
            gae_by_loops(*args, gamma, lam, worth=beside)
        ),
        "the estimate discounts over observation tokens: one factor gamma * lam from a generated "
        "token to the next, however many lie between": gae_by_loops(
            *args, gamma, lam, keep=lambda j, k: (gamma * lam) ** (k - j)
        ),
        "lambda and gamma are mixed up": gae_by_loops(*args, lam, gamma),
        "gamma is missing in front of A_j+1: it is gamma * lam": gae_by_loops(
            *args, gamma, lam, keep=lambda j, k: lam
        ),
        "gamma is missing in front of V_j+1": gae_by_loops(
            rewards, values, mask, lengths, 1.0, lam, keep=lambda j, k: gamma * lam
        ),
        "the next sequence is not what follows: behind the last token V and A are 0": gae_by_loops(
            *args, gamma, lam, reset=False
        ),
        "the terminal is missing: behind the last token of a sequence V is 0, not its own value": (
            gae_by_loops(*args, gamma, lam, worth=lambda j, k: float(values[j if k is None else k]))
        ),
        "an episode ends with every turn: credit must pass to the turns before, too": gae_by_loops(
            *args,
            gamma,
            lam,
            worth=lambda j, k: float(values[k]) if own_turn(j, k) else 0.0,
            keep=lambda j, k: gamma * lam * own_turn(j, k),
        ),
        "these are returns, A + V: V is not subtracted": right + values * mask,
    }
    got = skip_observation_gae(*args, gamma, lam)
    shape = f"advantages must have shape [{N}], have {list(got.shape)}"
    assert got.shape == values.shape, shape
    expect("advantages of generated tokens", got.masked_fill(~mask, 0.0), right, mistakes)
    carried = int((got[~mask] != 0).sum())
    assert not carried, f"{carried} tokens that the policy did not generate carry credit: must be 0"
    for letter in (NAN, math.inf):
        junk = [x.masked_fill(~mask, letter) for x in (rewards, values)]
        got = skip_observation_gae(*junk, mask, lengths, gamma, lam)
        reached = f"{letter} outside the mask reached the result: 0 * {letter} is NaN"
        assert torch.isfinite(got).all(), reached
        expect(f"{letter} outside the mask", got, right)
    values.requires_grad_()
    got = skip_observation_gae(rewards, values, mask, lengths, gamma, 1.0)
    expect("lambda 1", got, gae_by_loops(rewards, values.detach(), mask, lengths, gamma, 1.0))
    assert not got.requires_grad, "no gradient: the policy must not be taught to please its critic"


@pytest.mark.ex21
def test_ex21():
    check_ex21(adapters.get("ex21"))


CHECKS = {name: globals()[f"check_{name}"] for name in adapters.NAMES}
