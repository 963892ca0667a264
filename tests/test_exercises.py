"""The exercises' tests: they guard the project, and with IMPL=exercises.mine they judge a learner.

`check_exNN(function)` is what an exercise asks. MISTAKES[exercise] has typical wrong solutions,
each under the hint that names it: a result that is wrong, and theirs, is met with that hint.
test_stubs.py holds every one of them against its hint. Oracles are loops, or in float64.

PYTEST_DONT_REWRITE: of a failure a learner reads the message, and no page of tensors below it.
"""

import copy
import itertools
import math
import random
import statistics

import adapters
import numpy as np
import pytest
import torch
from torch import Tensor

from cache import decode, make_cache, prefill
from model import GPT, ModelConfig
from rollout import uniforms

NAN, INF = float("nan"), float("inf")
MISTAKES: dict[str, dict] = {}  # exercise -> hint -> a wrong solution


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def alike(got, want, tolerance: float = 1e-4) -> bool:
    """Tensors to rounding, where NaN agrees with nothing; all else exactly."""
    if not isinstance(got, Tensor) or not isinstance(want, Tensor):
        return type(got) is type(want) and got == want
    got, want = got.detach().double().cpu(), want.detach().double().cpu()
    return got.shape == want.shape and torch.allclose(got, want, rtol=tolerance, atol=tolerance)


def judge(exercise: str, what: str, function, run, want: Tensor, tolerance: float = 1e-4) -> None:
    """run(function) must be `want`; where it is run(wrong) of a known mistake, that is named."""
    got = run(function)
    assert isinstance(got, Tensor), f"{what}: must be a tensor, is a {type(got).__name__}"
    shapes = f"{what}: must have shape {list(want.shape)}, has {list(got.shape)}"
    assert got.shape == want.shape, shapes
    assert got.dtype == want.dtype, f"{what}: must be {want.dtype}, is {got.dtype}"
    if alike(got, want, tolerance):
        return
    for hint, wrong in MISTAKES[exercise].items():
        assert not alike(got, run(wrong), tolerance), f"{what}: {hint}"
    assert not got.isnan().any(), f"{what}: {int(got.isnan().sum())} values are NaN"
    worst = (got.detach().double() - want.double()).abs().nan_to_num(0.0).max()
    raise AssertionError(f"{what}: wrong by up to {float(worst):.3g}")


def judge_cases(exercise: str, function, right, cases: list[tuple]) -> None:
    """As `judge`, for functions of plain data: `right` in every case. A mistake is named that gives
    the same wherever the result is wrong."""
    pairs = [(function(*copy.deepcopy(case)), right(*case)) for case in cases]
    bad = [i for i, (got, want) in enumerate(pairs) if not alike(got, want)]
    if bad:
        got, want = pairs[bad[0]]
        shown = f"arguments {cases[bad[0]]}: must be {want!r}, got {got!r}"
        for hint, wrong in MISTAKES[exercise].items():
            same = all(alike(pairs[i][0], wrong(*copy.deepcopy(cases[i]))) for i in bad)
            assert not same, f"{hint}; {shown}"
        raise AssertionError(shown)


def refused(function, *arguments) -> bool:
    try:
        function(*arguments)
    except AssertionError:
        return True
    return False


def unchanged(before, after) -> bool:
    """Whether an argument is what it was; NaN is equal to NaN."""
    if isinstance(before, Tensor):
        before, after = before.detach().numpy(), after.detach().numpy()
    if isinstance(before, np.ndarray):
        return np.array_equal(before, after, equal_nan=before.dtype.kind == "f")
    return before is after or before == after


def watched(function):
    """The function, which must leave its arguments alone."""

    def call(*arguments):
        before = [x.detach().clone() if isinstance(x, Tensor) else copy.copy(x) for x in arguments]
        result = function(*arguments)
        for i, (old, now) in enumerate(zip(before, arguments, strict=True), 1):
            assert unchanged(old, now), f"argument {i} was changed in place: others still need it"
        return result

    return call


def gradient(loss: Tensor, inputs: Tensor) -> Tensor:
    """The gradient of a loss, 0 where there is none."""
    if not loss.requires_grad:
        return torch.zeros_like(inputs)
    (slope,) = torch.autograd.grad(loss, inputs, allow_unused=True, retain_graph=True)
    return torch.zeros_like(inputs) if slope is None else slope


# ---------------------------------------------------------------------------- ex01 causal attention


def naive_attention(q, k, v, seen, scale=None, key_head=None) -> Tensor:
    """Attention by loops: token n attends to rows seen(n), head h reads key head h // G."""
    group = q.shape[1] // k.shape[1]
    scale, out = q.shape[2] ** -0.5 if scale is None else scale, torch.zeros_like(q).double()
    for n, h in itertools.product(range(len(q)), range(q.shape[1])):
        rows, head = seen(n), key_head(h) if key_head else h // group
        if rows:
            chance = (k[rows, head].double() @ q[n, h].double() * scale).softmax(0)
            out[n, h] = chance @ v[rows, head].double()
    return out.to(q.dtype)


def packed(seen=lambda m, n, first: m <= n and first[m] == first[n], **how):
    """causal_attention; seen(m, n, first): whether token n attends to m, `first` begins a row's
    sequence."""

    def attend(q, k, v, lengths):
        first = [sum(lengths[:i]) for i, n in enumerate(lengths) for _ in range(n)]
        rows = range(len(q))
        return naive_attention(q, k, v, lambda n: [m for m in rows if seen(m, n, first)], **how)

    return attend


MISTAKES["ex01"] = {
    "a token sees the future of its sequence": packed(lambda m, n, first: first[m] == first[n]),
    "a token sees other sequences: packed rows need more than one causal triangle": packed(
        lambda m, n, first: m <= n
    ),
    "the scores are not divided by sqrt(D)": packed(scale=1.0),
    "query head h must read key head h // G: neighbours share one": packed(
        key_head=lambda h: h % 2
    ),
}


def check_ex01(causal_attention):
    args = (
        normal(14, 4, 16, seed=1),
        normal(14, 2, 16, seed=2),
        normal(14, 2, 16, seed=3),
        [5, 1, 8],
    )
    want = packed()(*args)
    judge("ex01", "causal attention", causal_attention, lambda f: f(*args), want)


# -------------------------------------------------------------------------------- ex02 index score


def indexer(inner=lambda x: max(0.0, x), outer=lambda x: x, hidden=lambda t, s: s >= t):
    """index_scores by loops; `inner` is for a head's product, `outer` for the weighted sum."""

    def scores(q, k, w):
        result = torch.full((len(k), len(k)), -INF)
        for t, s in itertools.product(range(len(k)), repeat=2):
            if not hidden(t, s):
                heads = zip(w[t].tolist(), (q[t] @ k[s]).tolist(), strict=True)
                result[t, s] = outer(sum(weight * inner(x) for weight, x in heads))
        return result

    return scores


MISTAKES["ex02"] = {
    "a score of the future must be -inf: s > t": indexer(hidden=lambda t, s: False),
    "the own token needs no score: -inf for s = t, too": indexer(hidden=lambda t, s: s > t),
    "ReLU belongs to each head's product, before the weighted sum over heads": indexer(
        lambda x: x, lambda x: max(0.0, x)
    ),
    "ReLU is missing: without it all heads are one": indexer(lambda x: x),
}


def check_ex02(index_scores):
    args = normal(9, 3, 8, seed=1), normal(9, 8, seed=2), normal(9, 3, seed=3)
    judge("ex02", "index scores", index_scores, lambda f: f(*args), indexer()(*args))


# ------------------------------------------------------------------------ ex03 deterministic top-k


def ranking(order, future=False):
    """select, with candidates in an `order`."""

    def select(scores, past, top_k):
        local, past = torch.arange(scores.shape[1]), past[:, None]
        scores = scores.masked_fill(local == past if future else local >= past, -INF)
        ids = order(scores)
        ids = torch.where(scores.gather(1, ids) == -INF, -1, ids)
        return torch.cat([past, ids], 1)[:, : min(top_k, scores.shape[1])]

    return select


def stable(scores):
    return scores.sort(descending=True, stable=True).indices


MISTAKES["ex03"] = {
    "torch.topk promises no order among equals": ranking(lambda x: x.topk(x.shape[1]).indices),
    "is the future of a query": ranking(stable, future=True),
    "scores that differ in the last bit are no tie": ranking(lambda x: stable(x.round(decimals=3))),
}


def check_ex03(select):
    chance = random.Random(0)
    sizes = (12, 12, 4), (5, 5, 9), (6, 1, 1), (40, 300, 16)
    for close, (queries, width, top_k) in itertools.product((False, True), sizes):
        past = [chance.randrange(width) for _ in range(queries)]
        values = [0.0, -0.0, 0.0, 0.0, 1.0, 2.0, -1.0]  # ReLU leaves many zeros: ties
        values += [1.0 + 2**-23, 2.0 - 2**-23] * close  # and no ties: neighbours in float32
        scores = [[chance.choice(values) for _ in range(width)] for _ in range(queries)]
        for row, start in zip(scores, past, strict=True):
            row[start:] = [chance.choice([9.0, -9.0]) for _ in row[start:]]  # mean nothing
        got = select(torch.tensor(scores), torch.tensor(past), top_k)
        shape = [queries, min(top_k, width)]
        assert list(got.shape) == shape, f"must have shape {shape}, has {list(got.shape)}"
        assert got.dtype == torch.int64, f"chunk ids must be int64, are {got.dtype}"
        for row, start, ids in zip(scores, past, got.tolist(), strict=True):
            want = [start, *sorted(range(start), key=lambda c: (-row[c], c))][: len(ids)]
            kept = [c for c in ids if c >= 0]
            assert ids[0] == start, f"the query's own chunk {start} must come first, got {ids}"
            future = f"chunk {max(kept)} is the future of a query in chunk {start}"
            assert max(kept) <= start, future
            many = f"{len(want)} chunks fit (the own one is one of top_k), then -1; got {ids}"
            assert len(set(kept)) == len(want) and ids[: len(want)] == kept, many
            best, chosen = [row[c] for c in want[1:]], [row[c] for c in kept[1:]]
            bits = "scores that differ in the last bit are no tie: compare the scores themselves"
            assert best == chosen or not close, f"{bits}; got {chosen}, not {best}"
            assert best == chosen, f"not the highest scores in their order: {chosen}, not {best}"
            ties = f"ties must go to the lowest id: {kept}, not {want}"
            assert kept == want, f"{ties}; torch.topk promises no order among equals"


# ------------------------------------------------------------------- ex04 sparse attention = dense


def chunked(none=None, future=False, clean=True):
    """sparse_attention by loops; `none`: the chunk that -1 is taken for; not `clean`: what is
    hidden takes part with weight 0."""

    def attend(q, k, v, selected, size):
        def seen(t):
            ids = [none if c < 0 else c for c in selected[t].tolist() if c >= 0 or none is not None]
            rows = [c * size + i for c in ids for i in range(size)]
            return [m for m in rows if m < len(q) and (m <= t or future)]

        out = naive_attention(q, k, v, seen)
        return out if clean else out + 0 * v.sum(0, keepdim=True)

    return attend


MISTAKES["ex04"] = {
    "a query sees later keys of its own chunk": chunked(future=True),
    "-1 means no chunk: row -1 is the last one": chunked(none=-1),
    "-1 means no chunk, and is not chunk 0": chunked(none=0),
    "NaN in rows of a query's future (0 * NaN is NaN) reached the result": chunked(clean=False),
}


def check_ex04(sparse_attention):
    n, size = 14, 4  # the last chunk has two rows
    q, k, v = (normal(n, 2, 16, seed=seed) for seed in (1, 2, 3))
    everything = torch.arange(4).repeat(n, 1)
    everything = torch.where(everything <= torch.arange(n)[:, None] // size, everything, -1)
    want = naive_attention(q, k, v, lambda t: list(range(t + 1)))
    what = "everything selected, which is dense attention"
    judge("ex04", what, sparse_attention, lambda f: f(q, k, v, everything, size), want)
    # some of it, -1 in the middle, and queries that see nothing
    chance, some = random.Random(0), torch.full((n, 3), -1)
    for t, column in itertools.product(range(n), range(3)):
        chunk = chance.randrange(-1, t // size + 1)
        some[t, column] = -1 if chunk in some[t] else chunk
    some[5], some[9] = -1, -1
    alone = sparse_attention(q, k, v, some, size)[[5, 9]]
    assert (alone == 0).all(), "a query that selects nothing must get 0: no NaN, no mean of values"
    want = chunked()(q, k, v, some, size)
    judge("ex04", "a selection", sparse_attention, lambda f: f(q, k, v, some, size), want)
    # the last row is in the future of all queries but one, and of its own chunk's first row
    want = chunked()(q, k, v, everything, size)[:13]
    k[13], v[13] = NAN, NAN
    got = sparse_attention(q, k, v, everything, size)[:13]
    assert alike(got, want), "NaN in rows of a query's future (0 * NaN is NaN) reached the result"


# --------------------------------------------------------------------------- ex05 group advantages


def grouped(std=statistics.stdev, others=True, failed=None, differ=lambda x: min(x) < max(x)):
    """group_advantages by loops; failed: the reward that a failure counts with."""

    def advantages(rewards, name, valid=None):
        result, dead = torch.zeros_like(rewards), []
        valid = torch.ones_like(rewards, dtype=torch.bool) if valid is None else valid
        for g, (row, fine) in enumerate(zip(rewards.tolist(), valid.tolist(), strict=True)):
            sound = [i for i, good in enumerate(fine) if good]
            counted = [row[i] if fine[i] else failed for i in range(len(row))]
            counted = [x for x in counted if x is not None]
            dead.append(len(sound) < 2 or not differ([row[i] for i in sound]))
            for i in [] if dead[-1] else sound:
                base, scale = statistics.mean(counted), 1.0
                if name == "rloo" and others:
                    base = (sum(counted) - row[i]) / (len(counted) - 1)
                if name == "grpo":
                    scale = std(counted) + 1e-6
                result[g, i] = (row[i] - base) / scale
        return result, torch.tensor(dead)

    return advantages


MISTAKES["ex05"] = {
    "the std must have m - 1 in its denominator": grouped(std=statistics.pstdev),
    "the baseline of an answer is the mean of the OTHERS": grouped(others=False),
    "your mean counts answers that are not valid": grouped(failed=0.0),
    "equal rewards are a dead group: compare them exactly, a computed std is rarely 0": grouped(
        differ=lambda x: bool((torch.tensor(x) - torch.tensor(x).sum() / len(x)).any())
    ),
}


def check_ex05(group_advantages):
    plain = torch.tensor([[1.0, 0.0, 0.25, 0.5], [2.0, 4.0, -1.0, 3.0]])
    holes = torch.tensor([[1.0, NAN, 0.0, 0.5], [NAN, 0.25, 1.0, NAN]])
    for name, rewards in itertools.product(("grpo", "mean", "rloo"), (plain, holes)):
        args = rewards, name, ~rewards.isnan()
        what = f"advantages {name!r}" + " with failures" * bool(rewards.isnan().any())
        want, _ = grouped()(*args)
        judge("ex05", what, group_advantages, lambda f, args=args: f(*args)[0], want)
    got, dead = group_advantages(torch.tensor([[1.0, 1.0 + 2**-20, 1.0]]), "mean")
    assert dead.dtype == torch.bool, "dead: bool [G]"
    assert not dead.any() and got.all(), "rewards that are nearly equal differ: no tolerance"
    # dead groups: one valid answer, or equal rewards, whatever rounding makes of their mean
    rewards = torch.tensor(
        [[0.1] * 7, [0.7] * 7, [0.3] * 6 + [9.0], [0.3] * 6 + [-9.0], [5.0] + [NAN] * 6, [NAN] * 7]
    )
    valid = torch.ones(6, 7, dtype=torch.bool)
    valid[2:4, 6], valid[4, 1:], valid[5] = False, False, False
    for name in ("grpo", "mean", "rloo"):
        got, dead = group_advantages(rewards, name, valid)
        equal = "equal rewards are a dead group: compare them exactly, a computed std is rarely 0"
        assert dead[0] and dead[1], f"{equal}; dead is {dead.tolist()}"
        others = "the reward of an answer that is not valid decided whether its group is dead"
        assert dead[2] and dead[3], others
        assert dead.all(), "a group with fewer than two valid answers is dead"
        assert (got == 0).all(), f"a dead group must teach exactly nothing, got {got.tolist()}"


# -------------------------------------------------------------- ex06 masked mean, its denominator

MISTAKES["ex06"] = {
    "your mean counts padding and prompts: only the mask is in the denominator": (
        lambda values, mask, count: values[mask].sum() / len(values)
    ),
    "your denominator is the micro-batch's own number of tokens: shares must add up": (
        lambda values, mask, count: values[mask].mean()
    ),
    "outside the mask reached the mean": lambda values, mask, count: (values * mask).sum() / count,
    "must refuse": lambda values, mask, count: torch.where(mask, values, 0.0).sum() / max(count, 1),
}


def check_ex06(token_mean):
    lengths, prompts = (7, 3, 12, 5), (4, 2, 3, 4)  # tokens of a sequence, and of its prompt
    masks = [torch.arange(n) >= p for n, p in zip(lengths, prompts, strict=True)]
    parts = [normal(n, seed=i) + 3.0 for i, n in enumerate(lengths)]
    want, count = torch.cat(parts)[torch.cat(masks)].mean(), int(torch.cat(masks).sum())
    for packing in ([[0, 1, 2, 3]], [[0, 2], [1, 3]], [[0], [1], [2], [3]]):
        batches = [[torch.cat([x[i] for i in b]) for x in (parts, masks)] for b in packing]

        def total(f, batches=batches):
            return sum(f(*batch, count) for batch in batches)

        judge("ex06", f"{len(batches)} micro-batches", token_mean, total, want)
    mask, wanted = torch.tensor([False, True, True, False]), torch.tensor([0.0, 0.25, 0.25, 0.0])
    for junk in (NAN, INF):
        values = torch.tensor([junk, 2.0, 4.0, junk], requires_grad=True)
        got = token_mean(values, mask, 4)
        reached = f"{junk} outside the mask reached the mean: 0 * {junk} is NaN, select instead"
        assert alike(got, torch.tensor(1.5)), reached
        slope = f"{junk} outside the mask reached the gradient, or it is not 1 / count"
        assert alike(gradient(got, values), wanted), slope
    for values, count in ((normal(4, 1), 4), (normal(4), 0)):
        shapes = f"values {list(values.shape)}, mask [4], count {count}"
        loud = f"must refuse {shapes}: broadcasting or a count of 0 would be silent"
        assert refused(token_mean, values, torch.ones(4, dtype=torch.bool), count), loud


# ------------------------------------------------------------- ex07, ex08 corrections of the policy


def decoupled(weight=lambda w, cap: w.clamp(max=cap), around="proximal", gain=torch.minimum):
    """tis, with a weight, a policy around which it clips, and a choice between free and clipped."""

    def loss(logprobs, proximal, behaviour, a, mask, count, low, high, cap):
        pi, prox, mu, a = (x[mask] for x in (logprobs, proximal, behaviour, a))
        ratio = (pi - (mu if around == "behaviour" else prox).detach()).exp()
        bound = ratio.clamp(1 - low, 1 + high) * a
        return -(weight((prox - mu).exp().detach(), cap) * gain(ratio * a, bound)).sum() / count

    return loss


MISTAKES["ex07"] = {
    "the weight is not truncated at `cap`": decoupled(lambda w, cap: w),
    "the weight is upside down: w = pi_p / mu": decoupled(lambda w, cap: (1 / w).clamp(max=cap)),
    "the ratio of the clip is r = pi / pi_p: with pi / mu it corrects twice": decoupled(
        around="behaviour"
    ),
    "min(r A, clip(r) A) is pessimistic: where clipping makes it better, nothing is clipped": (
        decoupled(gain=lambda free, bound: bound)
    ),
}


def beside_prompts(*columns) -> list[Tensor]:
    """Values of tokens, with places of NaN before and between them; the mask comes last."""
    n = len(columns[0])
    mask = torch.ones(n + 2, dtype=torch.bool)
    mask[0], mask[n // 2 + 1] = False, False
    spread = [torch.full((n + 2,), NAN).masked_scatter(mask, torch.tensor(x)) for x in columns]
    return [*spread, mask]


def check_ex07(tis):
    grid = itertools.product((0.5, 0.95, 1.0, 1.2, 2.0), (0.3, 1.0, 1.9, 5.0), (1.5, -0.5))
    r, w, a = zip(*grid, strict=True)
    mu = (-1.0 - normal(len(r)).abs()).tolist()
    prox = [m + math.log(x) for m, x in zip(mu, w, strict=True)]
    pi = [p + math.log(x) for p, x in zip(prox, r, strict=True)]
    pi, prox, mu, advantages, mask = beside_prompts(pi, prox, mu, a)
    leaves = [x.requires_grad_() for x in (pi, prox, mu)]
    rest = advantages, mask, 50.0, 0.2, 0.28, 2.0
    slopes, total = [], 0.0
    for ratio, weight, gain in zip(r, w, a, strict=True):
        cut = min(max(ratio, 0.8), 1.28)
        total -= min(weight, 2.0) * min(ratio * gain, cut * gain) / 50
        slopes.append(0.0 if cut * gain < ratio * gain else -min(weight, 2.0) * ratio * gain / 50)
    want = torch.zeros(len(mask)).masked_scatter(mask, torch.tensor(slopes))
    loss = tis(*leaves, *rest)
    assert torch.isfinite(loss), "NaN outside the mask reached the loss"
    assert not gradient(loss, pi).isnan().any(), "NaN outside the mask reached the gradient"
    judge("ex07", "the gradient", tis, lambda f: gradient(f(*leaves, *rest), pi), want)
    judge("ex07", "the loss", tis, lambda f: f(*leaves, *rest), torch.tensor(total))
    for name, tensor in (("proximal", prox), ("behaviour", mu)):
        leak = f"a gradient flows through `{name}`: the weight and the old policy are constants"
        assert (gradient(loss, tensor).nan_to_num(1.0)[mask] == 0).all(), leak
    twin = pi.detach().clone().requires_grad_()  # in training, pi_p is often the very tensor pi
    slopes = [-min(x * y, 2.0) * z / 50 for x, y, z in zip(r, w, a, strict=True)]
    want = torch.zeros(len(mask)).masked_scatter(mask, torch.tensor(slopes))
    what = "pi_p given as pi itself (one update a step)"
    judge("ex07", what, tis, lambda f: gradient(f(twin, twin, mu, *rest), twin), want)


def sided(keep=lambda rho, a, low, high: (rho > 1 - low) & (rho < 1 + high), weigh=None):
    """double_sided; keep: the tokens that teach; weigh(rho, pi): what they add to the loss."""

    def loss(logprobs, behaviour, a, mask, count, low, high):
        pi, mu, a = (x[mask] for x in (logprobs, behaviour, a))
        rho = (pi - mu).clamp(max=80.0).exp()
        kept = keep(rho, a, low, high)
        each = (weigh or (lambda rho, pi: rho.detach() * pi))(torch.where(kept, rho, 0.0), pi)
        return -(each * a).sum() / count

    return loss


def overflowing(logprobs, behaviour, a, mask, count, low, high):
    pi, mu, a = (x[mask] for x in (logprobs, behaviour, a))
    rho = (pi - mu).detach().exp()
    return -(rho * ((rho > 1 - low) & (rho < 1 + high)) * a * pi).sum() / count


MISTAKES["ex08"] = {
    "f(rho) is a constant: detach it, or its own gradient adds rho * A * log pi": sided(
        weigh=lambda rho, pi: rho * pi
    ),
    "outside, f is 0 for either sign of A; PPO's min keeps half of these tokens": sided(
        lambda rho, a, low, high: torch.where(a > 0, rho < 1 + high, rho > 1 - low)
    ),
    "the gradient is right, the value is not: the loss is f(rho) * A * log pi": sided(
        weigh=lambda rho, pi: rho
    ),
    "exp overflows, and inf * 0 is NaN": overflowing,
}


def check_ex08(double_sided):
    low, high = 0.25, 0.5  # exact in binary, and so are the edges 0.75 and 1.5
    ratios, signs = [0.5, 0.7, 0.8, 1.0, 1.2, 1.45, 1.6, 4.0] * 2, [2.0] * 8 + [-1.0] * 8
    mu = (-1.0 - normal(16).abs()).tolist()
    pi = [m + math.log(r) for m, r in zip(mu, ratios, strict=True)]
    logprobs, behaviour, advantages, mask = beside_prompts(pi, mu, signs)
    rest = behaviour, advantages, mask, 20.0, low, high
    logprobs.requires_grad_()
    taught = [-(r if 0.75 < r < 1.5 else 0.0) * a / 20 for r, a in zip(ratios, signs, strict=True)]
    want = torch.zeros(len(mask)).masked_scatter(mask, torch.tensor(taught))
    loss = double_sided(logprobs, *rest)
    assert torch.isfinite(loss), "NaN outside the mask reached the loss"

    def run(f):
        return gradient(f(logprobs, *rest), logprobs)

    assert not run(double_sided).isnan().any(), "NaN outside the mask reached the gradient"
    judge("ex08", "the gradient in logprobs", double_sided, run, want)
    total = torch.tensor(sum(x * p for x, p in zip(taught, pi, strict=True)))
    judge("ex08", "the loss", double_sided, lambda f: f(logprobs, *rest), total)
    # just outside, just inside, and rho = 1 exactly where one side has no width
    mask, four = torch.ones(4, dtype=torch.bool), torch.ones(4)
    edges = torch.tensor([0.75, 1.5, 0.75, 1.5]).log()
    cases = [("just outside", edges * 1.0001, low, high, 0.0)]
    cases += [("just inside", edges * 0.9999, low, high, 1.0)]
    cases += [("rho = 1, low = 0: both sides are strict", edges * 0, 0.0, high, 0.0)]
    cases += [("rho = 1, high = 0: both sides are strict", edges * 0, low, 0.0, 0.0)]
    for what, logs, *sides, kept in cases:
        leaf = logs.clone().requires_grad_()
        slope = gradient(double_sided(leaf, torch.zeros(4), four, mask, 4.0, *sides), leaf)
        assert ((slope != 0).float() == kept).all(), f"tokens that teach, {what}: {slope.tolist()}"
    far = torch.tensor([-300.0, -1.0, -200.0, -1.0], requires_grad=True)
    loss = double_sided(far, far.detach().flip(0), four, mask, 4.0, low, high)
    what = "log-ratios of 200 or 300: exp overflows, and inf * 0 is NaN"
    assert torch.isfinite(loss) and torch.isfinite(gradient(loss, far)).all(), what


# -------------------------------------------------------------------------- ex09 KL-window damper


def damping(decide=lambda kept: math.fsum(kept) / len(kept) > 0.15, size=1000):
    def damp(window, kl):
        assert math.isfinite(kl), kl
        kept = [*window, kl][-size:]
        return (kept, 0.6, 2.0) if decide(kept) else (kept, 1.0, 1.0)

    return damp


MISTAKES["ex09"] = {
    "a float sum of a thousand 0.15 exceeds 150: math.fsum does not": damping(
        lambda x: sum(x) / len(x) > 0.15
    ),
    "the mean of the window decides, and not its last value": damping(lambda x: x[-1] > 0.15),
    "only the 1000 newest values count: the window must forget": damping(size=10**6),
    "nan must be refused": lambda window, kl: damping()(window, 0.0 if math.isnan(kl) else kl),
}


def check_ex09(damp):
    cases = [([], 0.1), ([0.1], 0.2), ([], 0.2), ([], 0.15), ([0.0] * 9, 1.0), ([1.0] * 9, 0.0)]
    cases += [([0.15] * 999, 0.15), ([1e6] + [0.0] * 999, 0.0), ([0.5] * 4, 0.5), ([0.1] * 7, 2.0)]
    judge_cases("ex09", damp, damping(), cases)
    for value in (NAN, INF, -INF):
        stays = f"{value} must be refused: it would stay in the mean for 1000 steps"
        assert refused(damp, [0.1], value), stays


# -------------------------------------------------------------------- ex10 counter-based sampling


def drawing(noise=uniforms, told=None):
    """draw by inverse transform; `told`: the temperature of the log-probs."""

    def draw(logits, keys, positions, temperature):
        rows = torch.arange(len(logits))
        if temperature == 0:
            chosen = logits.argmax(-1)
            return chosen, logits.log_softmax(-1)[rows, chosen]
        heap = (logits / temperature).softmax(-1).cumsum(-1)
        level = torch.as_tensor(noise(keys, positions)).float()[:, None] * heap[:, -1:]
        chosen = torch.searchsorted(heap, level, right=True)[:, 0]
        return chosen, (logits / (told or temperature)).log_softmax(-1)[rows, chosen]

    return draw


MISTAKES["ex10"] = {
    "there is a generator with a state in it": drawing(lambda keys, at: torch.rand(len(keys))),
    "a row's token depends on its place in the batch or its neighbours": drawing(
        lambda keys, at: uniforms(np.arange(len(keys)), at)
    ),
    "mix the key before the position joins it": drawing(
        lambda keys, at: uniforms(keys + at, np.zeros_like(at))
    ),
    "they must be of the distribution that was sampled from, with its temperature": drawing(
        told=1.0
    ),
}


def check_ex10(draw):
    chance = np.random.default_rng(0)
    keys = chance.integers(0, 2**62, 300, dtype=np.int64)
    positions = chance.integers(0, 5000, 300, dtype=np.int64)
    logits, rows = normal(300, 16), torch.arange(300)
    chosen, logprobs = draw(logits, keys, positions, 1.0)
    assert chosen.dtype == torch.int64 and chosen.shape == (300,), "chosen must be int64 [B]"
    assert logprobs.dtype == torch.float32 and logprobs.shape == (300,), "log-probs: float32 [B]"
    state = "the same arguments gave other tokens: there is a generator with a state in it"
    assert draw(logits, keys, positions, 1.0)[0].equal(chosen), state
    torch.manual_seed(1), np.random.seed(1), random.seed(1)
    assert draw(logits, keys, positions, 1.0)[0].equal(chosen), state
    company = "a row's token depends on its place in the batch or its neighbours"
    back = draw(logits.flip(0), keys[::-1].copy(), positions[::-1].copy(), 1.0)[0].flip(0)
    assert back.equal(chosen), company
    for b in (0, 17, 299):
        one = slice(b, b + 1)
        assert draw(logits[one], keys[one], positions[one], 1.0)[0] == chosen[b], company
    # frequencies, over keys and over positions; temperature 2
    n, row = 20_000, torch.tensor([0.0, 1.0, 2.0, -1.0, 0.5])
    many, ones = np.arange(n, dtype=np.int64), np.ones(n, dtype=np.int64)
    want = (row / 2).softmax(0)
    for what, k, p in (("over keys", many, 7 * ones), ("over positions", 12345 * ones, many)):
        share = torch.bincount(draw(row.repeat(n, 1), k, p, 2.0)[0], minlength=5) / n
        shown = f"frequencies {what} are {share.tolist()}, not softmax(logits / temperature)"
        assert ((share - want).abs() < 5 * (want * (1 - want) / n).sqrt()).all(), shown
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
    for bit in (31, 40, 60):
        assert agree(1 << bit, 0) < 0.11, f"{upper}, bit {bit} changes nothing"
    # what the learner is told
    chosen, logprobs = draw(logits, keys, positions, 2.0)
    hint = "they must be of the distribution that was sampled from, with its temperature"
    same = alike(logprobs, (logits / 2).log_softmax(-1)[rows, chosen])
    assert same, f"the log-probs are wrong: {hint}"
    chosen, logprobs = draw(logits, keys, positions, 0.0)
    assert chosen.equal(logits.argmax(-1)), "temperature 0 must choose the most likely token"
    cold = "log-probs at temperature 0 are those of softmax(logits)"
    assert alike(logprobs, logits.log_softmax(-1).amax(-1)), cold


# ------------------------------------------------------------------ ex11 staleness from the oldest


def aged(pick=min, masked=True, more=0):
    def staleness(versions, mask, version):
        counted = [int(v) for v, m in zip(versions, mask, strict=True) if m or not masked]
        return max(0, version - pick(counted) + more) if counted else 0

    return staleness


MISTAKES["ex11"] = {
    "staleness counts from the OLDEST token of a trajectory, not the newest": aged(max),
    "the oldest token need not be the first: take the minimum": aged(lambda versions: versions[0]),
    "prompt tokens have version -1 and do not count: look at the mask": aged(masked=False),
    "off by one: it is version - oldest version": aged(more=1),
}


def check_ex11(staleness):
    cases = [([-1, -1, 5, 5, 7], 9), ([-1, -1, 4, 4], 4), ([-1, 6, 3, 7], 8), ([-1, 6, 6], 5)]
    cases = [(np.array(x, np.int32), np.array(x) >= 0, version) for x, version in cases]
    cases += [(np.array([-1, 6, 2, 6], np.int32), np.array([False, True, False, True]), 8)]
    cases += [(np.array([-1, -1], np.int32), np.zeros(2, bool), 5)]
    judge_cases("ex11", staleness, aged(), cases)


# ------------------------------------------------------- ex12, ex13 admission and deadline batching


def schedule(may_admit, next_batch, seed: int) -> None:
    """A random run of admission and batching, judged by what happens to the groups only."""
    chance = random.Random(seed)
    B, eta = chance.randint(1, 4), chance.choice([0, 1, 2, 4])
    running, completed, version, admitted = {}, [], 0, 0
    for move in range(30 + eta + 2):
        ready = [start for _, start in completed]
        while may_admit([*running.values(), *ready], version, version, B, eta):
            assert admitted < 500, "admission: there is no limit, 500 groups were admitted"
            running[admitted], admitted = version, admitted + 1
        hard = min(running, default=-1)  # the oldest is slow: an easy prompt overtakes it
        last = move >= 30  # all that is outstanding completes: training must go on
        for group_id in chance.sample(list(running), len(running)):
            if last or chance.random() < (0.1 if group_id == hard else 0.5):
                completed.append((group_id, running.pop(group_id)))
        batch = next_batch(list(completed), list(running.values()), version, B, eta)
        stuck = "deadlock: every group is complete, and no batch can be trained in time"
        assert batch or not last, f"{stuck}; was more admitted than there are places (off by one?)"
        if batch:
            starts = dict(completed)
            ids = f"a batch must be {B} ids of complete groups, ascending; got {batch}"
            assert len(set(batch)) == B and set(batch) <= set(starts), ids
            worst = max(version - starts[group_id] for group_id in batch)
            assert worst <= eta, f"staleness {worst} exceeds {eta}: deadlines were not looked at"
            completed = [entry for entry in completed if entry[0] not in batch]
            version += 1


def admitting(new=1, last=lambda start, version: version):
    def may_admit(starts, version, start, B, eta):
        return all(
            sum(x <= s for x in starts) + new <= (s + eta - version + 1) * B
            for s in range(start, last(start, version) + 1)
        )

    return may_admit


MISTAKES["ex12"] = {
    "off by one: the new group itself counts, too": admitting(new=0),
    "admits what breaks a deadline of some s > start": admitting(last=lambda start, version: start),
    "refuses a group that still meets every deadline": (
        lambda starts, version, start, B, eta: len(starts) < B
    ),
}


def check_ex12(may_admit):
    chance, cases = random.Random(1), []
    for _ in range(600):
        B, eta = chance.randint(1, 4), chance.choice([0, 1, 2, 4])
        version = chance.randint(eta, eta + 5)
        count, earliest = chance.randint(0, (eta + 1) * B), version - eta
        starts = [chance.randint(earliest, version) for _ in range(count)]
        cases.append((starts, version, chance.randint(earliest, version), B, eta))
    judge_cases("ex12", may_admit, admitting(), cases)
    for seed in range(150):  # what it is for: nothing is late, nothing is stuck
        schedule(may_admit, adapters.project("ex13"), seed)


def in_time(behind, version, B, eta):
    spans = range(version - eta, version + 1)
    return all(sum(x <= s for x in behind) <= (s + eta - version) * B for s in spans)


def batching(second=lambda entry: entry[1], fits=in_time, arrange=sorted, waits=True):
    """next_batch: by completion, else by start; without `waits` it ignores who is running."""

    def next_batch(completed, running, version, B, eta):
        for order in (completed, sorted(completed, key=second)):
            batch = order[:B]
            behind = [start for entry in completed if entry not in batch for start in entry[1:]]
            if len(batch) == B and fits(behind + running * waits, version, B, eta):
                return arrange(group_id for group_id, _ in batch)
        return None

    return next_batch


MISTAKES["ex13"] = {
    "waits although a batch may be trained (the oldest start first, if need be)": batching(
        lambda entry: 0
    ),
    "what stays behind would miss its deadline": batching(fits=lambda *_: True),
    "a group that is still running and due now needs this place: wait": batching(waits=False),
    "the ids must be ascending (equal sums everywhere)": batching(arrange=list),
}


def check_ex13(next_batch):
    chance = random.Random(2)
    cases = [([(3, 0)], [], 0, 2, 1), ([(7, 5), (9, 3), (4, 3)], [], 5, 1, 3)]
    for _ in range(400):
        B, eta = chance.randint(1, 3), chance.choice([0, 1, 2, 4])
        version = eta + chance.randint(0, 3)
        count = chance.randint(0, B * (eta + 1) + 1)  # one more than admission allows
        starts = [chance.randint(version - eta, version) for _ in range(count)]
        cut, ids = chance.randint(0, count), chance.sample(range(100), count)
        cases.append((list(zip(ids, starts, strict=True))[:cut], starts[cut:], version, B, eta))
    judge_cases("ex13", next_batch, batching(), cases)
    for seed in range(150):
        schedule(adapters.project("ex12"), next_batch, seed)


# ----------------------------------------------------------------------------------- ex14 resume


def resuming(keep=True, again=True, bounded=True):
    def resume(in_flight, completed, next_group, version, B, eta):
        outstanding = {g: start if keep else version for g, start in completed.items()}
        waiting = [g for g in in_flight if g not in completed] if again else []
        while waiting and (len(outstanding) < (eta + 1) * B or not bounded):
            outstanding[waiting.pop(0)] = version
        while len(outstanding) < (eta + 1) * B and not waiting:
            outstanding[next_group], next_group = version, next_group + 1
        return outstanding, waiting, next_group

    return resume


MISTAKES["ex14"] = {
    "prompts lost on resume: they were in flight, and must be made again or wait": resuming(
        again=False
    ),
    "a complete group must keep its start: its tokens are that old": resuming(keep=False),
    "at most (eta + 1) * B groups may be outstanding: the rest waits": resuming(bounded=False),
}


def check_ex14(resume):
    cases = [
        ([3, 4, 5, 6, 7], {6: 8}, 8, 9, 1, 2),  # more were issued before than may be now
        ([4, 5, 6, 7], {5: 2, 7: 3}, 8, 3, 2, 1),
        ([10, 3, 11, 12], {11: 4}, 13, 5, 2, 2),
        ([], {}, 0, 0, 3, 0),
        ([1, 2], {1: 1, 2: 1}, 3, 2, 1, 1),
    ]
    judge_cases("ex14", resume, resuming(), cases)


# ------------------------------------------------------------------------------- ex15 weight swap


def rebuilding(adopt_first=True, more=0):
    def swap(model, cache, flat, tokens, cached, running):
        if adopt_first:
            model.flat.copy_(flat)
        if slots := np.flatnonzero(running & (cached > 0)).tolist():
            sequences = [tokens[b, : cached[b] + more] for b in slots]
            prefill(model, cache, slots, sequences)
        model.flat.copy_(flat)

    return swap


MISTAKES["ex15"] = {
    "stale keys: they are still those of the old weights": rebuilding(adopt_first=False),
    "has keys of tokens that were not fed yet": rebuilding(more=1),
    "the model does not have the new weights": lambda model, cache, flat, *rest: None,
}


def check_ex15(swap_weights):
    shape = dict(layers=2, width=16, heads=4, kv_heads=2, head_width=8, hidden=24)
    shape |= dict(vocab_size=40, context=32, init_std=0.4)
    model, old, new = (GPT(ModelConfig(**shape), seed=seed) for seed in (1, 1, 2))
    flat = new.flat.clone()
    tokens = torch.randint(40, (4, 32), generator=torch.Generator().manual_seed(0)).int().numpy()
    cached, running = np.array([9, 5, 0, 17]), np.array([True, False, True, True])
    slots = [0, 1, 3]
    caches = [make_cache(model, 4, 32) for _ in range(3)]
    for owner, cache in zip((model, old, new), caches, strict=True):
        prefill(owner, cache, slots, [tokens[b, : cached[b]] for b in slots])
    got, stale, fresh = caches
    idle, where = got.kv[:, :, 1].clone(), model.flat.data_ptr()
    swap_weights(model, got, flat, tokens, cached, running)
    assert model.flat.equal(flat), "the model does not have the new weights"
    inside = "write into model.flat in place: the parameters are views of it"
    assert model.flat.data_ptr() == where, inside
    assert flat.equal(new.flat), "the new weights themselves were changed"
    for b in (0, 3):
        n, hint = cached[b], "stale keys: they are still those of the old weights"
        assert not alike(got.kv[:, :, b, : n - 1], stale.kv[:, :, b, : n - 1]), hint
        newest = f"stale keys: the newest of slot {b} (token cached[b] - 1 was fed, too)"
        assert not alike(got.kv[:, :, b, n - 1], stale.kv[:, :, b, n - 1]), newest
        beyond = f"slot {b} has keys of tokens that were not fed yet"
        assert (got.kv[:, :, b, n:] == 0).all(), beyond
        wrong = f"keys or values of slot {b} are wrong"
        assert alike(got.kv[:, :, b, :n], fresh.kv[:, :, b, :n]), wrong
    assert got.kv[:, :, 1].equal(idle), "an empty slot must be left alone"
    following = torch.from_numpy(tokens[np.arange(4), cached]).long(), torch.from_numpy(cached)
    hidden = [decode(*pair, *following)[[0, 3]] for pair in ((model, got), (new, fresh))]
    assert alike(*hidden), "the next step's hidden states are wrong"
    # nobody is running: nothing to rebuild
    swap_weights(model, got, old.flat, tokens, cached, np.zeros(4, bool))
    assert model.flat.equal(old.flat), "weights must be adopted when no slot is running, too"


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


def dots_of_whole_blocks(x, y):
    whole = torch.arange(len(x), device=x.device) < len(x) // 16 * 16
    return (x.float() * y.float()).sum(1) * whole


MISTAKES["ex17"] = {
    "the last rows are missing: round the grid up, and mask": dots_of_whole_blocks,
    "products and sums must be in float32, so convert what was loaded": (
        lambda x, y: (x * y).sum(1).float()
    ),
}


def check_ex17(row_dots):
    device = kernel_device()
    for n, width, dtype in ((64, 16, "float32"), (70, 32, "float32"), (3, 64, "float16")):
        # slices of something larger: a load without a mask reads junk and does not crash
        x, y = (
            normal(n + 256, width, seed=seed).to(device, getattr(torch, dtype)) for seed in (1, 2)
        )
        x, y = 4 * x[:n], 4 * y[:n]
        want = (x.double() * y.double()).sum(1).float()
        what = f"row dots of {n} rows of {width}, {dtype}"
        judge("ex17", what, row_dots, lambda f, x=x, y=y: f(x, y), want)


def walking(shrink=True, safe=True, first=-INF, future=False):
    """sparse_tile, chunk by chunk with a running maximum."""

    def tile(q, k, v, chunks, size, position):
        top = torch.full((len(q), 1), first if safe else 0.0, device=q.device)
        total, out = torch.zeros_like(top), torch.zeros_like(q)
        for chunk in chunks[chunks >= 0].tolist():
            rows = torch.arange(chunk * size, chunk * size + size, device=q.device)
            scores = q @ k[rows].T * q.shape[1] ** -0.5
            scores = scores if future else scores.masked_fill(rows > position, -INF)
            new = torch.maximum(top, scores.amax(1, keepdim=True)) if safe else top
            base = new.masked_fill(new == -INF, 0.0)
            decay, chance = (top - base).exp(), (scores - base).exp()
            total = total * decay + chance.sum(1, keepdim=True)
            out = out * (decay if shrink else 1.0) + chance @ v[rows]
            top = new
        return out / total

    return tile


MISTAKES["ex18"] = {
    "a query sees keys behind its position": walking(future=True),
    "a new maximum must shrink what was summed before, the output as well": walking(shrink=False),
    "NaN or infinity: subtract the running maximum before exp": walking(safe=False),
    "all scores may be far below zero, so the running maximum begins at -inf": walking(first=0.0),
}


def check_ex18(sparse_tile):
    device = kernel_device()
    cases = [(16, 3, [0], 40, 1.0), (32, 5, [4, 1, -1, 2], 70, 1.0), (16, 4, [3, 0, 1], 63, 60.0)]
    cases += [(16, 3, [-1, 2, 0], 40, 1.0), (16, 4, [3, 1], 20, 1.0)]  # nothing visible at first
    cases += [(16, 3, [1, 0], 40, -60.0)]  # all scores are far below zero
    for width, chunks, listed, position, size in cases:
        q = normal(16, width, seed=1) * size
        # a chunk of junk on both sides: who reads chunk -1 does not crash
        k, v = (normal(chunks * 16 + 32, width, seed=seed)[16:-16] for seed in (2, 3))
        if size < 0:
            q, k = torch.full_like(q, 12.0), k * 0.1 - 5.0
        if size > 1:  # the first chunk scores high: what was summed before must shrink
            k[:16] += 3 * q[:1] / size
        rows = [c * 16 + i for c in listed if c >= 0 for i in range(16) if c * 16 + i <= position]
        scores = q.double() @ k[rows].double().T * width**-0.5
        want = (scores.softmax(1) @ v[rows].double()).float()
        args = *(x.to(device) for x in (q, k, v, torch.tensor(listed))), 16, position
        nan = "NaN or infinity: subtract the running maximum before exp"
        if listed[0] < 0 or listed[0] * 16 > position:
            nan = "NaN: before the first visible key the maximum is -inf, and -inf - (-inf) is NaN"
        elif size < 0:
            nan = "NaN: all scores may be far below zero, so the running maximum begins at -inf"
        assert torch.isfinite(sparse_tile(*args)).all(), nan
        what = f"chunks {listed} of 16, position {position}, head width {width}"
        judge("ex18", what, sparse_tile, lambda f, args=args: f(*args), want, 1e-3)


# ----------------------------------------------------------------------- ex19 turn-level advantages


def by_turns(earned=lambda t, T: range(t, T), rival_turns=lambda t, T: [t], absent=False):
    """turn_advantages by loops; earned: turns whose rewards turn t gets; rival_turns: turns with
    which t is compared; absent: whether a turn that is not there is a rival with return 0."""

    def advantages(rewards, present, name):
        (G, n, T), result = rewards.shape, torch.zeros_like(rewards)
        there, values = present.tolist(), rewards.masked_fill(~present, 0.0).tolist()

        def worth(g, i, t):
            return round(math.fsum(values[g][i][u] for u in earned(t, T)), 6)

        for g, i, t in itertools.product(range(G), range(n), range(T)):
            others = itertools.product(range(n), rival_turns(t, T))
            rivals = [worth(g, j, u) for j, u in others if there[g][j][u] or absent]
            if not there[g][i][t] or len(set(rivals)) < 2:
                continue
            mine, base = worth(g, i, t), statistics.mean(rivals)
            if name == "rloo":
                base = (sum(rivals) - mine) / (len(rivals) - 1)
            scale = statistics.stdev(rivals) + 1e-6 if name == "grpo" else 1.0
            result[g, i, t] = (mine - base) / scale
        return result, ~result.flatten(1).any(1)

    return advantages


MISTAKES["ex19"] = {
    "a turn is compared with the same turn of the others, never with another turn": by_turns(
        rival_turns=lambda t, T: range(T)
    ),
    "rewards of past turns are counted: a turn cannot have caused what came before it": by_turns(
        lambda t, T: range(T)
    ),
    "the sum runs the wrong way: a return is this turn and the LATER ones": by_turns(
        lambda t, T: range(t + 1)
    ),
    "an episode that is over is no rival": by_turns(absent=True),
}


def check_ex19(turn_advantages):
    rewards = torch.tensor(
        [
            [[0.1, 0.2, 0.7], [0.1, 0.0, 0.5], [0.0, 0.3, 0.0], [0.25, NAN, NAN]],
            [[0.3, 0.0, 1.0], [0.0, NAN, NAN], [0.2, 0.1, NAN], [0.0, 0.5, 0.25]],
        ]
    )
    for name, junk in itertools.product(("mean", "rloo", "grpo"), (9.0, NAN)):
        present = ~rewards.isnan()
        args = rewards.nan_to_num(junk), present, name
        what = f"advantages of turns, {name!r}, {junk} where there is no turn"
        judge("ex19", what, turn_advantages, lambda f, args=args: f(*args)[0], by_turns()(*args)[0])
        dead = turn_advantages(*args)[1]
        assert dead.dtype == torch.bool and dead.tolist() == [False, False], "dead: bool [G]"
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
    total = "a group is dead if EVERY turn is: neither one of them nor the episodes decide that"
    assert dead.tolist() == [False, True, False, True] and got[2].any(), total
    assert not got[3].any(), "a group whose turns are all alike gets 0"


# ------------------------------------------------------------------------------- ex20 group repair


def repairing(enough=lambda sound, n: 2 * sound > n, places=None):
    places = places or (lambda sound, n: [sound[i % len(sound)] for i in range(n)])

    def repair(failures):
        sound = [i for i, failure in enumerate(failures) if failure is None]
        if enough(len(sound), len(failures)):
            return places(sound, len(failures))
        reasons = [failure for failure in failures if failure]
        return max(reasons, key=reasons.count)  # of equals the first

    return repair


MISTAKES["ex20"] = {
    "a failed answer has no reward: it must neither be trained nor be repeated": repairing(
        places=lambda sound, n: list(range(n))
    ),
    "the group must keep its size: every prompt has the same weight": repairing(
        places=lambda sound, n: sound
    ),
    "the sound ones are repeated in turn, not one of them only": repairing(
        places=lambda sound, n: sound + sound[:1] * (n - len(sound))
    ),
    "exactly half is not MORE than half": repairing(lambda sound, n: sound and 2 * sound >= n),
}


def check_ex20(repair):
    large = [None] * 5 + ["env_error"] * 3
    again = f"{large}: not the same twice, so a run could not be done again"
    assert all(repair(large) == repair(large) for _ in range(20)), again
    whys = None, "env_timeout", "env_error"
    groups = [list(group) for n in range(1, 6) for group in itertools.product(whys, repeat=n)]
    judge_cases("ex20", repair, repairing(), [(group,) for group in groups])


# ------------------------------------------------------------------------ ex21 skip-observation GAE


def estimating(
    follows=lambda values, j, k: 0.0 if k is None else values[k],
    share=lambda gamma, lam, j, k: gamma * lam,
    ends=True,
    walk=False,
):
    """skip_observation_gae from behind; k: the next generated token after j, or None. follows: the
    value of what comes; share: how much of A_k A_j gets; ends: whether sequences end; walk:
    through observations, too."""

    def estimate(rewards, values, mask, lengths, gamma, lam):
        rewards, worth = rewards.tolist(), values.tolist()
        result, stop, k = torch.zeros(len(worth)), len(worth), None
        for length in reversed(lengths):
            k = None if ends else k
            for j in reversed(range(stop - length, stop)):
                if mask[j] or walk:
                    carried = 0.0 if k is None else share(gamma, lam, j, k) * float(result[k])
                    result[j] = rewards[j] + gamma * follows(worth, j, k) - worth[j] + carried
                    k = j
            stop -= length
        return torch.where(mask, result, 0.0)

    return estimate


MISTAKES["ex21"] = {
    "your estimate walks through the observations: the next token is the next GENERATED one": (
        estimating(walk=True)
    ),
    "one factor gamma * lam from a generated token to the next, however many lie between": (
        estimating(share=lambda gamma, lam, j, k: (gamma * lam) ** (k - j))
    ),
    "lambda and gamma are mixed up": lambda rewards, values, mask, lengths, gamma, lam: (
        estimating()(rewards, values, mask, lengths, lam, gamma)
    ),
    "the next sequence is not what follows: behind the last token V and A are 0": estimating(
        ends=False
    ),
    "the terminal is missing: behind the last token of a sequence V is 0": estimating(
        lambda values, j, k: values[j if k is None else k]
    ),
}


def check_ex21(skip_observation_gae):
    sequences = ["ppaaooaao", "ppp", "paaaoooaa", "paa"]  # prompt, generated (a), observation
    lengths, mask = (
        [len(x) for x in sequences],
        torch.tensor([x == "a" for x in "".join(sequences)]),
    )
    rewards, values = (
        (normal(len(mask), seed=1) * mask).round(decimals=1),
        normal(len(mask), seed=2),
    )
    for junk, gamma, lam in ((None, 0.9, 0.7), (NAN, 0.9, 0.7), (INF, 0.9, 0.7), (None, 0.9, 1.0)):
        pair = rewards, values
        if junk is not None:
            pair = [x.masked_fill(~mask, junk) for x in pair]
        args = *pair, mask, lengths, gamma, lam
        what = f"advantages, {junk or 'anything'} outside the mask"
        want = estimating()(rewards, values, mask, lengths, gamma, lam)
        judge("ex21", what, skip_observation_gae, lambda f, args=args: f(*args), want)
    values.requires_grad_()
    got = skip_observation_gae(rewards, values, mask, lengths, gamma, lam)
    assert not got.requires_grad, "no gradient: the policy must not be taught to please its critic"


CHECKS = {name: globals()[f"check_{name}"] for name in adapters.NAMES}
EXERCISES = [pytest.param(name, marks=getattr(pytest.mark, name)) for name in CHECKS]


def check(name: str, function) -> None:
    """Examine a function; all but those that write leave their arguments alone."""
    CHECKS[name](function if name in ("ex15", "ex17", "ex18") else watched(function))


@pytest.mark.parametrize("name", EXERCISES)
def test_exercise(name):
    check(name, adapters.get(name))
