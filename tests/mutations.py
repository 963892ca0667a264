"""Typical wrong solutions of the exercises, and the words by which their test must name them."""

import hashlib
import io
import math
import os
from pathlib import Path

import numpy as np
import torch

from cache import prefill
from losses import group_advantages

WRONG = []


def wrong(name: str, hint: str):
    """Register a wrong solution of an exercise, with what its test must say about it."""

    def register(function):
        WRONG.append((name, function, hint))
        return function

    return register


@wrong("ex06", "your mean counts padding")
def divides_by_all_tokens(values, mask, count):
    return values.masked_fill(~mask, 0.0).sum() / len(values)


@wrong("ex06", "your denominator is the micro-batch's own")
def mean_of_the_micro_batch(values, mask, count):
    return values[mask].mean()


@wrong("ex06", "outside the mask reached the mean")
def multiplies_by_the_mask(values, mask, count):
    return (values * mask).sum() / count


@wrong("ex06", "must refuse values [4, 1], mask [4]")
def broadcasts(values, mask, count):
    return torch.where(mask, values, 0.0).sum() / max(count, 1)


@wrong("ex11", "prompt tokens have version -1")
def oldest_of_all_tokens(versions, loss_mask, version):
    return int(version - versions.min())


@wrong("ex11", "OLDEST")
def newest_token(versions, loss_mask, version):
    return int(max(0, version - versions[loss_mask].max(initial=-1)))


@wrong("ex11", "off by one")
def off_by_one(versions, loss_mask, version):
    found = versions[loss_mask]
    return max(0, version + 1 - int(found.min())) if len(found) else 0


@wrong("ex11", "the oldest token need not be the first")
def first_token(versions, loss_mask, version):
    found = versions[loss_mask]
    return max(0, version - int(found[0])) if len(found) else 0


@wrong("ex11", "not in the mask")
def trusts_the_versions(versions, loss_mask, version):
    found = versions[versions >= 0]
    return max(0, version - int(found.min())) if len(found) else 0


@wrong("ex11", "never negative")
def negative(versions, loss_mask, version):
    found = versions[loss_mask]
    return version - int(found.min()) if len(found) else 0


# ---- ex01 ----


def masked_attention(q, k, v, visible, scale=None, spread=False):
    """Dense attention under a mask [N, N], with the mistakes that ask for it."""
    repeat = q.shape[1] // k.shape[1]
    k, v = (x.repeat(1, repeat, 1) if spread else x.repeat_interleave(repeat, 1) for x in (k, v))
    scores = torch.einsum("nhd,mhd->hnm", q, k) * (q.shape[2] ** -0.5 if scale is None else scale)
    chance = scores.masked_fill(~visible, -math.inf).softmax(-1)
    return torch.einsum("hnm,mhd->nhd", chance, v)


def sequence_of(lengths):
    return torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths))


def block_causal(lengths):
    owner = sequence_of(lengths)
    return (owner[:, None] == owner).tril()


@wrong("ex01", "sees the future")
def no_triangle(q, k, v, lengths):
    owner = sequence_of(lengths)
    return masked_attention(q, k, v, owner[:, None] == owner)


@wrong("ex01", "sees other sequences")
def one_triangle(q, k, v, lengths):
    return masked_attention(q, k, v, torch.ones(len(q), len(q), dtype=torch.bool).tril())


@wrong("ex01", "not divided by sqrt(D)")
def unscaled(q, k, v, lengths):
    return masked_attention(q, k, v, block_causal(lengths), scale=1.0)


@wrong("ex01", "query head h must read key head h // G")
def heads_in_turn(q, k, v, lengths):
    return masked_attention(q, k, v, block_causal(lengths), spread=True)


# ---- ex02 ----


def scored(hits, keep):
    n = len(hits)
    return hits.masked_fill(~torch.ones(n, n, dtype=torch.bool).tril(keep), -math.inf)


@wrong("ex02", "ReLU belongs to each head's product")
def relu_of_the_sum(q_index, k_index, weights):
    return scored(torch.einsum("tje,se,tj->ts", q_index, k_index, weights).relu(), -1)


@wrong("ex02", "ReLU is missing")
def without_relu(q_index, k_index, weights):
    return scored(torch.einsum("tje,se,tj->ts", q_index, k_index, weights), -1)


@wrong("ex02", "the own token needs no score")
def scores_itself(q_index, k_index, weights):
    hits = torch.einsum("tje,se->tjs", q_index, k_index).relu()
    return scored(torch.einsum("tjs,tj->ts", hits, weights), 0)


@wrong("ex02", "future must be -inf")
def scores_the_future(q_index, k_index, weights):
    hits = torch.einsum("tje,se->tjs", q_index, k_index).relu()
    return torch.einsum("tjs,tj->ts", hits, weights)


@wrong("ex02", "must have the dtype of q")
def answers_in_double(q_index, k_index, weights):
    hits = torch.einsum("tje,se->tjs", q_index, k_index).relu()
    return scored(torch.einsum("tjs,tj->ts", hits, weights), -1).double()


# ---- ex03 ----


def ranked(scores, past, top_k, order, own=True, future=False):
    """Own chunk, candidates in an `order`, -1: with the mistakes that ask for it."""
    local, width = torch.arange(scores.shape[1]), min(top_k, scores.shape[1])
    hidden = local >= past[:, None] if not future else local == past[:, None]
    scores = scores.masked_fill(hidden, -math.inf)
    found = order(scores)
    found = torch.where(scores.gather(1, found) == -math.inf, -1, found)
    return torch.cat([past[:, None], found], 1)[:, :width] if own else found[:, :width]


@wrong("ex03", "torch.topk promises no order")
def trusts_topk(scores, past, top_k):
    return ranked(scores, past, top_k, lambda x: x.topk(x.shape[1]).indices)


@wrong("ex03", "ties must go to the lowest id")
def sorts_upwards_and_flips(scores, past, top_k):
    return ranked(scores, past, top_k, lambda x: x.sort(stable=True).indices.flip(1))


@wrong("ex03", "own chunk")
def forgets_its_own(scores, past, top_k):
    return ranked(
        scores, past, top_k, lambda x: x.sort(stable=True, descending=True).indices, False
    )


@wrong("ex03", "is the future of a query")
def selects_the_future(scores, past, top_k):
    return ranked(
        scores, past, top_k, lambda x: x.sort(stable=True, descending=True).indices, future=True
    )


@wrong("ex03", "argument 1 was changed in place")
def hides_in_place(scores, past, top_k):
    scores.masked_fill_(torch.arange(scores.shape[1]) >= past[:, None], -math.inf)
    return ranked(scores, past, top_k, lambda x: x.sort(stable=True, descending=True).indices)


@wrong("ex03", "must be sorted by score")
def sorted_by_id(scores, past, top_k):
    found = ranked(scores, past, top_k, lambda x: x.sort(stable=True, descending=True).indices)
    rest = found[:, 1:].masked_fill(found[:, 1:] < 0, 1 << 30).sort().values
    return torch.cat([found[:, :1], torch.where(rest == 1 << 30, -1, rest)], 1)


@wrong("ex03", "differ in the last bit")
def breaks_ties_with_the_id(scores, past, top_k):
    def order(x):
        return (x - 1e-6 * torch.arange(x.shape[1])).sort(stable=True, descending=True).indices

    return ranked(scores, past, top_k, order)


# ---- ex04 ----


def chunk_mask(selected, n, chunk_size):
    """Which rows are in the selected chunks of a query, bool [N, N]."""
    return (selected[:, :, None] == torch.arange(n) // chunk_size).any(1)


@wrong("ex04", "later keys of its own chunk")
def own_chunk_unmasked(q, k, v, selected, chunk_size):
    return masked_attention(q, k, v, chunk_mask(selected, len(q), chunk_size))


@wrong("ex04", "-1 means no chunk: row -1 is the last one")
def reads_minus_one(q, k, v, selected, chunk_size):
    n, heads, width = q.shape
    rows = (selected[:, :, None] * chunk_size + torch.arange(chunk_size)).flatten(1)  # [N, S * C]
    hidden = rows > torch.arange(n)[:, None]
    keys, values = (x[rows.clamp(max=n - 1)] for x in (k, v))
    scores = torch.einsum("nhd,nmhd->nhm", q, keys) * width**-0.5
    chance = scores.masked_fill(hidden[:, None], -math.inf).softmax(-1)
    return torch.einsum("nhm,nmhd->nhd", chance, values)


@wrong("ex04", "must get 0: softmax gave NaN")
def softmax_of_nothing(q, k, v, selected, chunk_size):
    return masked_attention(q, k, v, chunk_mask(selected, len(q), chunk_size).tril())


@wrong("ex04", "not a mean of values")
def mean_of_nothing(q, k, v, selected, chunk_size):
    visible = chunk_mask(selected, len(q), chunk_size).tril()
    visible |= ~visible.any(1, keepdim=True)
    return masked_attention(q, k, v, visible)


@wrong("ex04", "0 * NaN is NaN")
def multiplies_what_is_hidden(q, k, v, selected, chunk_size):
    visible = chunk_mask(selected, len(q), chunk_size).tril()
    empty = ~visible.any(1)
    out = masked_attention(q, k, v, visible | empty[:, None])
    return out.masked_fill(empty[:, None, None], 0.0)


# ---- ex05 ----


def advantages(rewards, kind, valid, spread=1, dead=None, drop=True):
    """Advantages with a std over m - `spread`, or other groups called dead, if asked for."""
    valid = torch.ones_like(rewards, dtype=torch.bool) if valid is None else valid
    clean, size = rewards.masked_fill(~valid, 0.0), valid.sum(1, keepdim=True)
    size = size if drop else torch.full_like(size, rewards.shape[1])
    centred = (clean - clean.sum(1, keepdim=True) / size).masked_fill(~valid, 0.0)
    std = (centred.square().sum(1, keepdim=True) / (size - spread).clamp(min=1)).sqrt()
    dead = std[:, 0] == 0 if dead is None else dead(clean, valid)
    if kind == "grpo":
        centred = centred / (std + 1e-6)
    elif kind == "rloo":
        centred = centred * size / (size - 1).clamp(min=1)
    return centred.masked_fill(dead[:, None], 0.0), dead


def equal_rewards(rewards, valid):
    top = rewards.masked_fill(~valid, -math.inf).amax(1)
    return (top == rewards.masked_fill(~valid, math.inf).amin(1)) | (valid.sum(1) < 2)


@wrong("ex05", "m - 1 in its denominator")
def population_std(rewards, kind, valid=None):
    return advantages(rewards, kind, valid, spread=0, dead=equal_rewards)


@wrong("ex05", "your mean counts answers that are not valid")
def counts_failures(rewards, kind, valid=None):
    return advantages(rewards, kind, valid, dead=equal_rewards, drop=False)


@wrong("ex05", "compare them exactly")
def dead_if_the_std_is_zero(rewards, kind, valid=None):
    return advantages(rewards, kind, valid)


@wrong("ex05", "mean of the OTHERS")
def rloo_with_itself(rewards, kind, valid=None):
    return advantages(rewards, "mean" if kind == "rloo" else kind, valid, dead=equal_rewards)


@wrong("ex05", "a product keeps NaN")
def multiplies_by_valid(rewards, kind, valid=None):
    valid = torch.ones_like(rewards, dtype=torch.bool) if valid is None else valid
    return advantages(rewards * valid, kind, torch.ones_like(valid), dead=equal_rewards)


@wrong("ex05", "n stands where m belongs")
def std_over_everybody(rewards, kind, valid=None):
    valid = torch.ones_like(rewards, dtype=torch.bool) if valid is None else valid
    values, dead = advantages(rewards, kind, valid, dead=equal_rewards)
    size, everybody = valid.sum(1, keepdim=True), rewards.shape[1]
    if kind == "grpo":  # but for 1e-6 beside the std
        values = values * ((everybody - 1) / (size - 1).clamp(min=1)).sqrt()
    return values, dead


@wrong("ex05", "no tolerance")
def dead_within_a_tolerance(rewards, kind, valid=None):
    def nearly_equal(rewards, valid):
        top = rewards.masked_fill(~valid, -math.inf).amax(1)
        low = rewards.masked_fill(~valid, math.inf).amin(1)
        return (top - low < 1e-5) | (valid.sum(1) < 2)

    return advantages(rewards, kind, valid, dead=nearly_equal)


@wrong("ex05", "decided whether its group is dead")
def smallest_of_all(rewards, kind, valid=None):
    def equal(clean, valid):
        return (clean.masked_fill(~valid, -math.inf).amax(1) == rewards.amin(1)) | (
            valid.sum(1) < 2
        )

    return advantages(rewards, kind, valid, dead=equal)


@wrong("ex05", "without a valid answer is dead")
def nobody_is_alive(rewards, kind, valid=None):
    def equal(rewards, valid):
        return equal_rewards(rewards, valid) & (valid.sum(1) > 0)

    return advantages(rewards, kind, valid, dead=equal)


# ---- ex07 ----


def corrected(pi, prox, mu, a, mask, count, low, high, weigh, over=None, detach=True, pick=None):
    """Decoupled PPO with a weight and a ratio of one's own."""
    pi, prox, mu, a = (x[mask] for x in (pi, prox, mu, a))
    if detach:
        prox, mu = prox.detach(), mu.detach()
    ratio = (pi - (mu if over == "mu" else prox)).exp()
    bound = ratio.clamp(1 - low, 1 + high) * a
    gain = (pick or torch.minimum)(ratio * a, bound)
    return -(weigh((prox - mu).exp()) * gain).sum() / count


@wrong("ex07", "the weight is not truncated")
def untruncated(pi, prox, mu, a, mask, count, low, high, cap):
    return corrected(pi, prox, mu, a, mask, count, low, high, lambda w: w)


@wrong("ex07", "the weight is upside down")
def upside_down(pi, prox, mu, a, mask, count, low, high, cap):
    return corrected(pi, prox, mu, a, mask, count, low, high, lambda w: (1 / w).clamp(max=cap))


@wrong("ex07", "the weight is missing")
def correction_missing(pi, prox, mu, a, mask, count, low, high, cap):
    return corrected(pi, prox, mu, a, mask, count, low, high, torch.ones_like)


@wrong("ex07", "corrects twice")
def ratio_to_the_behaviour(pi, prox, mu, a, mask, count, low, high, cap):
    return corrected(pi, prox, mu, a, mask, count, low, high, lambda w: w.clamp(max=cap), "mu")


@wrong("ex07", "this is PPO with pi / mu")
def plain_ppo(pi, prox, mu, a, mask, count, low, high, cap):
    return corrected(pi, prox, mu, a, mask, count, low, high, torch.ones_like, "mu")


@wrong("ex07", "is pessimistic")
def only_clips(pi, prox, mu, a, mask, count, low, high, cap):
    def second(free, bound):
        return bound

    return corrected(
        pi, prox, mu, a, mask, count, low, high, lambda w: w.clamp(max=cap), pick=second
    )


@wrong("ex07", "a gradient flows through `proximal`")
def learns_its_weight(pi, prox, mu, a, mask, count, low, high, cap):
    return corrected(
        pi, prox, mu, a, mask, count, low, high, lambda w: w.clamp(max=cap), detach=False
    )


# ---- ex08 ----


def two_sided(pi, mu, a, mask, count, weigh, detach=True):
    pi, mu, a = (x[mask] for x in (pi, mu, a))
    ratio = (pi - mu).clamp(-20, 20).exp()
    ratio = ratio.detach() if detach else ratio
    return -(weigh(ratio, a) * a * pi).sum() / count


@wrong("ex08", "f(rho) is a constant")
def learns_its_ratio(pi, mu, a, mask, count, low, high):
    def kept(r, a):
        return torch.where((r > 1 - low) & (r < 1 + high), r, 0.0)

    return two_sided(pi, mu, a, mask, count, kept, detach=False)


@wrong("ex08", "either sign of A")
def ppo_keeps_half(pi, mu, a, mask, count, low, high):
    def kept(r, a):
        return torch.where((a > 0) & (r >= 1 + high) | (a < 0) & (r <= 1 - low), 0.0, r)

    return two_sided(pi, mu, a, mask, count, kept)


@wrong("ex08", "clipping the weight")
def clips_as_cispo(pi, mu, a, mask, count, low, high):
    return two_sided(pi, mu, a, mask, count, lambda r, a: r.clamp(1 - low, 1 + high))


@wrong("ex08", "both sides are strict")
def keeps_the_edges(pi, mu, a, mask, count, low, high):
    def kept(r, a):
        return torch.where((r >= 1 - low) & (r <= 1 + high), r, 0.0)

    return two_sided(pi, mu, a, mask, count, kept)


@wrong("ex08", "the gradient is right, the value is not")
def differentiates_the_ratio(pi, mu, a, mask, count, low, high):
    pi, mu, a = (x[mask] for x in (pi, mu, a))
    ratio = (pi - mu).clamp(-20, 20).exp()
    kept = torch.where((ratio > 1 - low) & (ratio < 1 + high), ratio, 0.0)
    return -(kept * a).sum() / count


@wrong("ex08", "exp overflows")
def overflows(pi, mu, a, mask, count, low, high):
    pi, mu, a = (x[mask] for x in (pi, mu, a))
    ratio = (pi - mu).detach().exp()
    return -(ratio * ((ratio > 1 - low) & (ratio < 1 + high)) * a * pi).sum() / count


# ---- ex09 ----


def damped(window, kl, above):
    assert math.isfinite(kl), kl
    window = [*window, kl][-1000:]
    return window, *((0.6, 2.0) if above(window) else (1.0, 1.0))


@wrong("ex09", "one spike was enough")
def judges_the_last(window, kl):
    return damped(window, kl, lambda window: window[-1] > 0.15)


@wrong("ex09", "math.fsum does not")
def sums_with_rounding(window, kl):
    def above(window):
        total = 0.0
        for value in window:
            total += value
        return total / len(window) > 0.15

    return damped(window, kl, above)


@wrong("ex09", "a mean of exactly 0.15 is not above")
def at_the_threshold(window, kl):
    return damped(window, kl, lambda window: math.fsum(window) / len(window) >= 0.15)


@wrong("ex09", "comes first")
def swaps_the_scales(window, kl):
    window, *scales = damped(window, kl, lambda window: math.fsum(window) / len(window) > 0.15)
    return window, *scales[::-1]


@wrong("ex09", "not 1000 slots")
def divides_by_a_thousand(window, kl):
    return damped(window, kl, lambda window: math.fsum(window) / 1000 > 0.15)


@wrong("ex09", "the window must forget")
def never_forgets(window, kl):
    assert math.isfinite(kl), kl
    window = [*window, kl]
    on = math.fsum(window) / len(window) > 0.15
    return window, 0.6 if on else 1.0, 2.0 if on else 1.0


@wrong("ex09", "nan must be refused")
def takes_everything(window, kl):
    window = [*window, kl][-1000:]
    on = not math.isnan(kl) and math.fsum(window) / len(window) > 0.15
    return window, 0.6 if on else 1.0, 2.0 if on else 1.0


@wrong("ex09", "argument 1 was changed in place")
def appends(window, kl):
    window.append(kl)
    return damped(window[:-1], kl, lambda window: math.fsum(window) / len(window) > 0.15)


# ---- ex10 ----


def scrambled(x):
    """A 64-bit hash (the finaliser of SplitMix64) of an integer array, as numbers in (0, 1)."""
    x = x.astype(np.uint64) + np.uint64(0x9E3779B97F4A7C15)
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    x = x ^ (x >> np.uint64(31))
    return ((x >> np.uint64(41)).astype(np.float64) + 0.5) / 2**23


def inverse(logits, uniform, temperature, told=None, sharp=1.0):
    """Inverse transform sampling; `told` is the temperature of the log-probs."""
    rows = torch.arange(len(logits))
    if temperature == 0:
        chosen = logits.argmax(-1)
        return chosen, logits.log_softmax(-1)[rows, chosen]
    cumulative = (logits / (temperature * sharp)).softmax(-1).cumsum(-1)
    level = torch.from_numpy(np.asarray(uniform)).float()[:, None] * cumulative[:, -1:]
    chosen = torch.searchsorted(cumulative, level, right=True)[:, 0]
    return chosen, (logits / (told or temperature)).log_softmax(-1)[rows, chosen]


@wrong("ex10", "a generator with a state")
def global_generator(logits, keys, positions, temperature):
    return inverse(logits, torch.rand(len(keys)).numpy(), temperature)


@wrong("ex10", "its place in the batch")
def seeded_batch(logits, keys, positions, temperature):
    noise = np.random.default_rng(int(positions.sum() + keys.sum()) % 2**32)
    return inverse(logits, noise.random(len(keys)), temperature)


@wrong("ex10", "share their noise")
def hash_of_the_sum(logits, keys, positions, temperature):
    return inverse(logits, scrambled(keys + positions), temperature)


@wrong("ex10", "the temperature is missing")
def ignores_the_temperature(logits, keys, positions, temperature):
    mixed = scrambled((scrambled(keys) * 2**62).astype(np.int64) + positions)
    return inverse(logits, mixed, temperature, sharp=1 / max(temperature, 1e-9))


@wrong("ex10", "with its temperature")
def tells_other_logprobs(logits, keys, positions, temperature):
    mixed = scrambled((scrambled(keys) * 2**62).astype(np.int64) + positions)
    return inverse(logits, mixed, temperature, told=1.0)


@wrong("ex10", "a key has 62 bits")
def half_of_the_key(logits, keys, positions, temperature):
    mixed = scrambled((scrambled(keys & 0xFFFFFFFF) * 2**62).astype(np.int64) + positions)
    return inverse(logits, mixed, temperature)


@wrong("ex10", "only every 16th can come")
def noise_of_twelve_bits(logits, keys, positions, temperature):
    mixed = scrambled((scrambled(keys) * 2**62).astype(np.int64) + positions)
    return inverse(logits, (np.floor(mixed * 4096) + 0.5) / 4096, temperature)


@wrong("ex10", "too few bits")
def noise_of_a_byte(logits, keys, positions, temperature):
    mixed = scrambled((scrambled(keys) * 2**62).astype(np.int64) + positions)
    return inverse(logits, (np.floor(mixed * 256) + 0.5) / 256, temperature)


# ---- ex12 ----


@wrong("ex12", "off by one")
def admits_one_more(starts, version, start, groups_per_step, max_staleness):
    return all(
        sum(x <= s for x in starts) <= (s + max_staleness - version + 1) * groups_per_step
        for s in range(start, version + 1)
    )


@wrong("ex12", "of some s > start")
def looks_at_its_own_deadline(starts, version, start, groups_per_step, max_staleness):
    room = (start + max_staleness - version + 1) * groups_per_step
    return sum(x <= start for x in starts) + 1 <= room


@wrong("ex12", "refuses a group that still meets every deadline")
def keeps_one_batch(starts, version, start, groups_per_step, max_staleness):
    return len(starts) < groups_per_step


# ---- ex13 ----


def on_time(behind, version, size, eta):
    spans = range(version - eta, version + 1)
    return all(sum(x <= s for x in behind) <= (s + eta - version) * size for s in spans)


def first_that_fits(completed, running, version, size, eta, orders, fits=on_time):
    for order in orders:
        chosen = order[:size]
        behind = running + [start for i, start in completed if (i, start) not in chosen]
        if len(chosen) == size and fits(behind, version, size, eta):
            return sorted(i for i, _ in chosen)
    return None


@wrong("ex13", "do not starve it")
def trains_what_is_ready(completed, running, version, groups_per_step, max_staleness):
    """The rule of dropping, too: whoever is slow comes too late, again and again."""
    fresh = [entry for entry in completed if version - entry[1] <= max_staleness]
    due = sorted(fresh, key=lambda entry: entry[1])
    late = [fresh] if not due or version - due[0][1] < max_staleness else [due]
    args = (fresh, [], version, groups_per_step, max_staleness, late)
    return first_that_fits(*args, fits=lambda *_: True)


@wrong("ex13", "it must be trained")
def never_the_oldest_first(completed, running, version, groups_per_step, max_staleness):
    return first_that_fits(completed, running, version, groups_per_step, max_staleness, [completed])


@wrong("ex13", "the group that completed first comes first")
def by_id(completed, running, version, groups_per_step, max_staleness):
    orders = [sorted(completed), sorted(completed, key=lambda entry: entry[1])]
    return first_that_fits(completed, running, version, groups_per_step, max_staleness, orders)


@wrong("ex13", "can be trained by the next step")
def one_step_too_careful(completed, running, version, groups_per_step, max_staleness):
    def fits(behind, version, size, eta):
        return on_time(behind, version + 1, size, eta)

    orders = [completed, sorted(completed, key=lambda entry: entry[1])]
    args = (completed, running, version, groups_per_step, max_staleness, orders)
    return first_that_fits(*args, fits)


@wrong("ex13", "of equal starts the one that completed first")
def oldest_by_id(completed, running, version, groups_per_step, max_staleness):
    orders = [completed, sorted(completed, key=lambda entry: entry[::-1])]
    return first_that_fits(completed, running, version, groups_per_step, max_staleness, orders)


@wrong("ex13", "would miss its deadline")
def forgets_the_newest(completed, running, version, groups_per_step, max_staleness):
    def fits(behind, version, size, eta):
        spans = range(version - eta, version)
        return all(sum(x <= s for x in behind) <= (s + eta - version) * size for s in spans)

    orders = [completed, sorted(completed, key=lambda entry: entry[1])]
    args = (completed, running, version, groups_per_step, max_staleness, orders)
    return first_that_fits(*args, fits)


# ---- ex14 ----


def resumed(in_flight, completed, following, version, size, eta, keep_start=True, wait=True):
    outstanding = dict(completed) if keep_start else dict.fromkeys(completed, version)
    again = [i for i in in_flight if i not in completed]
    room = (eta + 1) * size - len(outstanding)
    outstanding |= dict.fromkeys(again[:room], version)
    while len(outstanding) < (eta + 1) * size:
        outstanding[following] = version
        following += 1
    return outstanding, again[room:] if wait else [], following


@wrong("ex14", "prompts lost on resume")
def goes_on_at_the_cursor(in_flight, completed, next_group, version, groups_per_step, eta):
    return resumed(list(completed), completed, next_group, version, groups_per_step, eta)


@wrong("ex14", "prompts lost on resume")
def forgets_who_waits(in_flight, completed, next_group, version, groups_per_step, eta):
    return resumed(in_flight, completed, next_group, version, groups_per_step, eta, wait=False)


@wrong("ex14", "so the staleness bound would be broken")
def completed_start_anew(in_flight, completed, next_group, version, groups_per_step, eta):
    return resumed(in_flight, completed, next_group, version, groups_per_step, eta, False)


@wrong("ex14", "at most")
def issues_all_at_once(in_flight, completed, next_group, version, groups_per_step, eta):
    again = [i for i in in_flight if i not in completed]
    return completed | dict.fromkeys(again, version), [], next_group


@wrong("ex14", "the prompt cursor must be")
def begins_with_the_first_prompt(in_flight, completed, next_group, version, groups_per_step, eta):
    return resumed(in_flight, completed, 0, version, groups_per_step, eta)


# ---- ex15 ----


def rebuild(model, cache, tokens, counts, running):
    slots = [b for b, busy in enumerate(running) if busy and counts[b] > 0]
    if slots:
        prefill(model, cache, torch.tensor(slots), [tokens[b, : counts[b]] for b in slots])


@wrong("ex15", "stale keys")
def keeps_the_cache(model, cache, flat, tokens, cached, running):
    model.flat.copy_(flat)


@wrong("ex15", "stale keys")
def rebuilds_too_early(model, cache, flat, tokens, cached, running):
    rebuild(model, cache, tokens, cached, running)
    model.flat.copy_(flat)


@wrong("ex15", "the newest key of slot")
def one_key_short(model, cache, flat, tokens, cached, running):
    model.flat.copy_(flat)
    rebuild(model, cache, tokens, cached - 1, running)


@wrong("ex15", "not fed yet")
def one_key_more(model, cache, flat, tokens, cached, running):
    model.flat.copy_(flat)
    rebuild(model, cache, tokens, cached + 1, running)


@wrong("ex15", "an empty slot must be left alone")
def rebuilds_every_slot(model, cache, flat, tokens, cached, running):
    model.flat.copy_(flat)
    rebuild(model, cache, tokens, cached, np.ones_like(running))


@wrong("ex15", "in place")
def another_tensor(model, cache, flat, tokens, cached, running):
    model.flat = flat.clone()
    rebuild(model, cache, tokens, cached, running)


# ---- ex16 ----


def written(folder, step, state, keep, write, early=False):
    path = folder / "checkpoints" / f"step{step:07d}.pt"
    memory = io.BytesIO()
    torch.save(state, memory)
    data = memory.getvalue() + hashlib.sha256(memory.getvalue()).digest()

    def sweep(left):
        for old in sorted(path.parent.glob("step*.pt"))[:-left]:
            old.unlink()

    if early:
        sweep(keep - 1)
    write(path, data)
    sweep(keep)
    return path


def straight(path, data):
    path.write_bytes(data)


def renamed(path: Path, data: bytes):
    path.with_suffix(".new").write_bytes(data)
    path.with_suffix(".new").replace(path)


def synced(path: Path, data: bytes):
    with path.with_suffix(".new").open("wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
    path.with_suffix(".new").replace(path)


@wrong("ex16", "the newest checkpoint is torn")
def writes_in_place(folder, step, state, keep=3):
    return written(folder, step, state, keep, straight)


@wrong("ex16", "renamed before it was flushed")
def never_flushes(folder, step, state, keep=3):
    return written(folder, step, state, keep, renamed)


@wrong("ex16", "then file.flush()")
def flushes_half(folder, step, state, keep=3):
    def write(path, data):
        with path.with_suffix(".new").open("wb") as file:
            file.write(data[:-32])
            file.write(data[-32:])  # stays in Python's buffer
            os.fsync(file.fileno())
        path.with_suffix(".new").replace(path)

    return written(folder, step, state, keep, write)


@wrong("ex16", "those of the highest steps")
def keeps_the_last_written(folder, step, state, keep=3):
    path = written(folder, step, state, 10**6, synced)
    by_time = sorted(path.parent.glob("step*.pt"), key=lambda p: p.stat().st_mtime_ns)
    for old in by_time[:-keep]:
        old.unlink()
    return path


@wrong("ex16", "deleted before the new one was whole")
def deletes_first(folder, step, state, keep=3):
    return written(folder, step, state, keep, renamed, early=True)


@wrong("ex16", "and then its sha256 digest")
def without_a_digest(folder, step, state, keep=3):
    return written(folder, step, state, keep, lambda path, data: renamed(path, data[:-32]))


@wrong("ex16", "an obstacle")
def refuses_leftovers(folder, step, state, keep=3):
    def write(path, data):
        try:
            with path.with_suffix(".new").open("xb") as file:
                file.write(data)
            path.with_suffix(".new").replace(path)
        except FileExistsError:
            pass

    return written(folder, step, state, keep, write)


# ---- ex17, ex18: made without Triton where the mistake is one of numbers ----


@wrong("ex17", "round the grid up")
def grid_rounded_down(x, y):
    result, rows = x.new_zeros(len(x), dtype=torch.float32), len(x) // 16 * 16
    result[:rows] = (x[:rows].float() * y[:rows].float()).sum(1)
    return result


@wrong("ex17", "products and sums must be in float32")
def sums_in_half(x, y):
    return (x * y).sum(1).float()


def walk(
    q,
    k,
    v,
    chunks,
    size,
    position,
    shrink=True,
    safe=True,
    scale=None,
    future=False,
    first=-math.inf,
):
    """Chunk by chunk with a running maximum, and the mistakes that ask for it."""
    scale = q.shape[1] ** -0.5 if scale is None else scale
    begin = first if safe else 0.0
    top = torch.full((len(q), 1), begin, device=q.device)
    total, out = torch.zeros_like(top), torch.zeros_like(q)
    for chunk in chunks[chunks >= 0].tolist():
        rows = torch.arange(chunk * size, chunk * size + size, device=q.device)
        scores = q @ k[rows].T * scale
        scores = scores if future else scores.masked_fill(rows > position, -math.inf)
        new = torch.maximum(top, scores.amax(1, keepdim=True)) if safe else top
        decay = (top - new).exp()
        chance = (scores - new).exp()
        total = total * decay + chance.sum(1, keepdim=True)
        out = out * (decay if shrink else 1.0) + chance @ v[rows]
        top = new
    return out / total


@wrong("ex18", "keys behind its position")
def sees_the_future(q, k, v, chunks, chunk_size, position):
    return walk(q, k, v, chunks, chunk_size, position, future=True)


@wrong("ex18", "subtract the running maximum")
def without_a_maximum(q, k, v, chunks, chunk_size, position):
    return walk(q, k, v, chunks, chunk_size, position, safe=False)


@wrong("ex18", "the running maximum begins at -inf")
def maximum_of_at_least_zero(q, k, v, chunks, chunk_size, position):
    chunks = torch.where(chunks * chunk_size > position, -1, chunks)
    return walk(q, k, v, chunks, chunk_size, position, first=0.0)


@wrong("ex18", "the key at `position` itself is visible")
def hides_the_query(q, k, v, chunks, chunk_size, position):
    return walk(q, k, v, chunks, chunk_size, position - 1)


@wrong("ex18", "must shrink what was summed before")
def forgets_to_shrink(q, k, v, chunks, chunk_size, position):
    return walk(q, k, v, chunks, chunk_size, position, shrink=False)


@wrong("ex18", "the maximum is -inf")
def starts_at_minus_infinity(q, k, v, chunks, chunk_size, position):
    return walk(q, k, v, chunks, chunk_size, position)  # right, until nothing of a tile is visible


@wrong("ex18", "-1 means no chunk")
def reads_chunk_zero(q, k, v, chunks, chunk_size, position):
    return walk(q, k, v, chunks.clamp(min=0), chunk_size, position)


@wrong("ex18", "not divided by sqrt(D)")
def unscaled_scores(q, k, v, chunks, chunk_size, position):
    return walk(q, k, v, chunks, chunk_size, position, scale=1.0)


# ---- ex19 ----


def by_turn(rewards, present, kind, returns=None, rivals=None):
    """Turn-level advantages from returns of one's own, and rivals that ask for a mistake."""
    rewards = rewards.masked_fill(~present, 0.0).double()
    returns = rewards.flip(2).cumsum(2).flip(2) if returns is None else returns(rewards)
    rivals = present if rivals is None else rivals
    columns = range(present.shape[2])
    found = [group_advantages(returns[..., t].float(), kind, rivals[..., t]) for t in columns]
    values, dead = (torch.stack(part, -1) for part in zip(*found, strict=True))
    return values.masked_fill(~present, 0.0), dead.all(-1)


@wrong("ex19", "never with another turn")
def compares_different_turns(turn_rewards, present, kind):
    returns = turn_rewards.masked_fill(~present, 0.0).double().flip(2).cumsum(2).flip(2).float()
    values, dead = group_advantages(returns.flatten(1), kind, present.flatten(1))
    return values.view(present.shape), dead


@wrong("ex19", "rewards of past turns are counted")
def credits_the_episode(turn_rewards, present, kind):
    def total(rewards):
        return rewards.sum(2, keepdim=True).expand_as(rewards)

    return by_turn(turn_rewards, present, kind, total)


@wrong("ex19", "the sum runs the wrong way")
def sums_from_the_front(turn_rewards, present, kind):
    return by_turn(turn_rewards, present, kind, lambda rewards: rewards.cumsum(2))


@wrong("ex19", "only the turn's own reward")
def sees_one_turn(turn_rewards, present, kind):
    return by_turn(turn_rewards, present, kind, lambda rewards: rewards)


@wrong("ex19", "an episode that is over is no rival")
def missing_turns_count_as_zero(turn_rewards, present, kind):
    return by_turn(turn_rewards, present, kind, rivals=torch.ones_like(present))


@wrong("ex19", "a turn that an answer does not have must get 0")
def credits_missing_turns(turn_rewards, present, kind):
    values, dead = by_turn(turn_rewards, present, kind)
    return values.masked_fill(~present, -1.0), dead


@wrong("ex19", "is not there is counted")
def trusts_the_rewards(turn_rewards, present, kind):
    returns = turn_rewards.double().flip(2).cumsum(2).flip(2)
    return by_turn(turn_rewards, present, kind, lambda _: returns)


@wrong("ex19", "0 * NaN is NaN")
def multiplies_by_present(turn_rewards, present, kind):
    returns = (turn_rewards * present).double().flip(2).cumsum(2).flip(2)
    return by_turn(turn_rewards, present, kind, lambda _: returns)


@wrong("ex19", "add up in float64")
def adds_up_in_float32(turn_rewards, present, kind):
    def summed(rewards):
        found = [rewards[..., -1].float()]
        for t in reversed(range(rewards.shape[2] - 1)):
            found.append(found[-1] + rewards[..., t].float())
        return torch.stack(found[::-1], -1)

    return by_turn(turn_rewards, present, kind, summed)


@wrong("ex19", "equal rewards of the episodes do not decide that")
def dead_by_episode(turn_rewards, present, kind):
    values, _ = by_turn(turn_rewards, present, kind)
    total = turn_rewards.masked_fill(~present, 0.0).double().sum(2).float()
    dead = group_advantages(total, kind)[1]
    return values.masked_fill(dead[:, None, None], 0.0), dead


# ---- ex20 ----


def sound_of(failures):
    return [i for i, failure in enumerate(failures) if failure is None]


def reason_of(failures):
    reasons = [failure for failure in failures if failure]
    return max(reasons, key=reasons.count)  # of equals the first


def filled(failures, places, enough=None):
    """`places(sound, n)` where enough answers are sound."""
    sound, n = sound_of(failures), len(failures)
    fits = 2 * len(sound) > n if enough is None else enough(len(sound), n)
    return places(sound, n) if fits else reason_of(failures)


def in_turn(sound, n):
    return (sound * n)[:n]


@wrong("ex20", "must neither be trained nor be repeated")
def trains_failures(failures):
    return filled(failures, lambda sound, n: list(range(n)))


@wrong("ex20", "must neither be trained nor be repeated")
def repeats_anybody(failures):
    return filled(failures, lambda sound, n: [*sound, *range(n)][:n])


@wrong("ex20", "exactly half is not MORE than half")
def repairs_at_half(failures):
    return filled(failures, in_turn, lambda sound, n: sound and 2 * sound >= n)


@wrong("ex20", "must keep them")
def shrinks_the_group(failures):
    return filled(failures, lambda sound, n: sound)


@wrong("ex20", "not one of them only")
def repeats_the_first(failures):
    return filled(failures, lambda sound, n: sound + sound[:1] * (n - len(sound)))


@wrong("ex20", "more than half are sound, so the group is repaired")
def discards_at_one_failure(failures):
    return filled(failures, in_turn, lambda sound, n: sound == n)


@wrong("ex20", "a run could not be done again")
def repeats_by_chance(failures):
    return filled(
        failures, lambda sound, n: sound + np.random.choice(sound, n - len(sound)).tolist()
    )


@wrong("ex20", "the failure that most of them had")
def names_the_first_failure(failures):
    found = filled(failures, in_turn)
    return next(filter(None, failures)) if isinstance(found, str) else found


@wrong("ex20", "all sound ones in order, then again")
def fills_the_gaps(failures):
    def in_place(sound, n):
        others = iter(in_turn(sound, n))
        return [i if i in sound else next(others) for i in range(n)]

    return filled(failures, in_place)


# ---- ex21 ----


def walked_back(rewards, values, mask, lengths, gamma, lam, known=None, worth=None, link=None):
    """GAE from behind over the tokens of the mask; known(j, k): whether what follows j, token k or
    nothing, counts; worth(j, k): the value that follows; link(j, k): the share of A_k."""
    known = known or (lambda j, k: k is not None)
    worth = worth or (lambda j, k: values[k])
    link = link or (lambda j, k: gamma * lam)
    found, stop = torch.zeros_like(values).detach(), len(values)
    with torch.no_grad():
        for length in reversed(lengths):
            k = None
            for j in reversed(range(stop - length, stop)):
                if mask[j]:
                    found[j] = rewards[j] - values[j]
                    if known(j, k):
                        found[j] += gamma * worth(j, k)
                    if k is not None:
                        found[j] += link(j, k) * found[k]
                    k = j
            stop -= length
    return found


@wrong("ex21", "the next token is the next GENERATED one")
def walks_through_observations(rewards, values, mask, lengths, gamma, lam):
    rewards = rewards.masked_fill(~mask, 0.0)
    found = walked_back(rewards, values, torch.ones_like(mask), lengths, gamma, lam)
    return found.masked_fill(~mask, 0.0)


@wrong("ex21", "bootstraps from an observation's value")
def believes_observations(rewards, values, mask, lengths, gamma, lam):
    ends = set(np.cumsum(lengths).tolist())
    args = rewards, values, mask, lengths, gamma, lam
    known, worth = lambda j, k: j + 1 not in ends, lambda j, k: values[j + 1]
    return walked_back(*args, known=known, worth=worth)


@wrong("ex21", "discounts over observation tokens")
def decays_over_observations(rewards, values, mask, lengths, gamma, lam):
    args = rewards, values, mask, lengths, gamma, lam
    return walked_back(*args, link=lambda j, k: (gamma * lam) ** (k - j))


@wrong("ex21", "lambda and gamma are mixed up")
def mixes_up_lambda_and_gamma(rewards, values, mask, lengths, gamma, lam):
    return walked_back(rewards, values, mask, lengths, lam, gamma)


@wrong("ex21", "it is gamma * lam")
def forgets_gamma(rewards, values, mask, lengths, gamma, lam):
    return walked_back(rewards, values, mask, lengths, gamma, lam, link=lambda j, k: lam)


@wrong("ex21", "the terminal is missing")
def has_no_terminal(rewards, values, mask, lengths, gamma, lam):
    args = rewards, values, mask, lengths, gamma, lam
    here = {"known": lambda j, k: True, "worth": lambda j, k: values[j if k is None else k]}
    return walked_back(*args, **here)


@wrong("ex21", "the next sequence is not what follows")
def runs_into_the_next_sequence(rewards, values, mask, lengths, gamma, lam):
    return walked_back(rewards, values, mask, [len(mask)], gamma, lam)


@wrong("ex21", "an episode ends with every turn")
def ends_with_every_turn(rewards, values, mask, lengths, gamma, lam):
    args = rewards, values, mask, lengths, gamma, lam
    return walked_back(
        *args, known=lambda j, k: k == j + 1, link=lambda j, k: gamma * lam * (k == j + 1)
    )


@wrong("ex21", "carry credit")
def credits_observations(rewards, values, mask, lengths, gamma, lam):
    found, later = walked_back(rewards, values, mask, lengths, gamma, lam), 0.0
    for j in reversed(range(len(mask))):
        later = float(found[j]) if mask[j] else later
        found[j] = later
    return found


@wrong("ex21", "outside the mask reached the result")
def multiplies_by_the_mask_at_last(rewards, values, mask, lengths, gamma, lam):
    found = walked_back(rewards, values, mask, lengths, gamma, lam)
    return torch.where(mask, found, values.detach()) * mask


@wrong("ex21", "please its critic")
def learns_through_the_values(rewards, values, mask, lengths, gamma, lam):
    found = walked_back(rewards, values, mask, lengths, gamma, lam)
    return found + (values - values.detach()).where(mask, 0.0)


# ---- ex22 ----


def misses(r, step, here):
    """The ranks that keep rank r from passing `step`; here: where everybody stands."""
    kind, about, *members = step
    if kind == "meet":
        return [other for other in members[0] if here.get(other) != step]
    answer = ("receive" if kind == "send" else "send", r)
    return [] if here.get(about) == answer else [about]


def everybody(others):
    return others


def reached(waits, r, follow=everybody):
    """To whom the ways from rank r lead; follow: which of the missing ranks it looks at."""
    found, todo = set(), [r]
    while todo:
        new = set(follow(waits.get(todo.pop(), (0, []))[1])) - found
        found |= new
        todo += new
    return found


def in_circle(waits, follow=everybody):
    return [r for r in waits if r in reached(waits, r, follow)]


def waited(programs, blocks=misses, missing=misses, circle=in_circle, rounds=100):
    """The right answer, but for the parts that are given."""
    at = [0] * len(programs)
    for _ in range(rounds):
        here = {r: p[at[r]] for r, p in enumerate(programs) if at[r] < len(p)}
        for r, step in here.items():
            at[r] += not blocks(r, step, here)
    here = {r: p[at[r]] for r, p in enumerate(programs) if at[r] < len(p)}
    waits = {r: (at[r], missing(r, step, here)) for r, step in here.items()}
    return (waits, circle(waits)) if waits else None


@wrong("ex22", "not the place in the list")
def compares_place_by_place(programs):
    for i in range(max(map(len, programs))):
        here = {r: program[i] for r, program in enumerate(programs) if i < len(program)}
        waits = {r: (i, misses(r, step, here)) for r, step in here.items()}
        waits = {r: wait for r, wait in waits.items() if wait[1]}
        if waits:
            return waits, in_circle(waits)
    return None


@wrong("ex22", "look again until nothing moves")
def looks_at_every_rank_once(programs):
    at = [0] * len(programs)

    def standing():
        return {r: p[at[r]] for r, p in enumerate(programs) if at[r] < len(p)}

    for r in range(len(programs)):
        while r in standing() and not misses(r, standing()[r], standing()):
            kind, about, *members = standing()[r]
            for member in members[0] if kind == "meet" else (r, about):
                at[member] += 1
    waits = {r: (at[r], misses(r, step, standing())) for r, step in standing().items()}
    return (waits, in_circle(waits)) if waits else None


@wrong("ex22", "not a fixed number of times")
def looks_once_for_every_rank(programs):
    return waited(programs, rounds=len(programs))


@wrong("ex22", "counting them is not enough")
def counts_meetings(programs):
    steps = [sorted(step for step in program if step[0] == "meet") for program in programs]
    alike = all(
        steps[r].count(step) == steps[other].count(step)
        for r in range(len(programs))
        for step in steps[r]
        for other in step[2]
    )
    return None if alike else waited(programs)


@wrong("ex22", "two names are two meetings")
def meets_whatever_the_name(programs):
    def blocks(r, step, here):
        return misses(r, nameless(step), {q: nameless(other) for q, other in here.items()})

    def nameless(step):
        return ("meet", "", step[2]) if step[0] == "meet" else step

    return waited(programs, blocks)


@wrong("ex22", "the same name with other ranks is another meeting")
def meets_by_name_alone(programs):
    def blocks(r, step, here):
        if step[0] != "meet":
            return misses(r, step, here)
        return [other for other in step[2] if here.get(other, ())[:2] != step[:2]]

    return waited(programs, blocks)


@wrong("ex22", "does not stand at this one")
def remembers_who_came(programs):
    came = set()

    def blocks(r, step, here):
        came.update((other, there) for other, there in here.items())
        if step[0] != "meet":
            return misses(r, step, here)
        return [other for other in step[2] if (other, step) not in came]

    return waited(programs, blocks)


@wrong("ex22", "who has ended comes to no meeting")
def asks_only_who_is_there(programs):
    def blocks(r, step, here):
        return [other for other in misses(r, step, here) if other in here]

    return waited(programs, blocks)


@wrong("ex22", "without a circle")
def believes_in_circles_only(programs):
    found = waited(programs)
    return found if found and found[1] else None


@wrong("ex22", "there is no buffer")
def sends_do_not_wait(programs):
    sent = set()

    def blocks(r, step, here):
        if step[0] == "send":
            sent.add((r, step[1]))
            return []
        if step[0] == "receive":
            return [] if (step[1], r) in sent else [step[1]]
        return misses(r, step, here)

    return waited(programs, blocks)


@wrong("ex22", "a receive names its sender")
def receives_from_anybody(programs):
    def blocks(r, step, here):
        other = here.get(step[1], ("",))
        if step[0] == "send" and other[0] == "receive":
            return []
        if step[0] == "receive":
            return [] if ("send", r) in here.values() else [step[1]]
        return misses(r, step, here)

    return waited(programs, blocks)


@wrong("ex22", "two of three are not enough")
def passes_with_a_majority(programs):
    def blocks(r, step, here):
        found = misses(r, step, here)
        return found if step[0] != "meet" or 2 * len(found) >= len(step[2]) else []

    return waited(programs, blocks)


@wrong("ex22", "it is not missing")
def lists_all_the_others(programs):
    def missing(r, step, here):
        return [q for q in step[2] if q != r] if step[0] == "meet" else misses(r, step, here)

    return waited(programs, missing=missing)


@wrong("ex22", "rank 0 waits for rank 1, too")
def misses_only_who_waits(programs):
    def missing(r, step, here):
        return [other for other in misses(r, step, here) if other in here]

    return waited(programs, missing=missing)


@wrong("ex22", "a circle may be longer than two")
def knows_pairs_only(programs):
    def circle(waits):
        return [r for r in waits if any(r in waits.get(q, (0, []))[1] for q in waits[r][1])]

    return waited(programs, circle=circle)


@wrong("ex22", "there may be more than one circle")
def stops_at_the_first_circle(programs):
    def circle(waits):
        found = in_circle(waits)
        return [r for r in found if r in reached(waits, found[0])]

    return waited(programs, circle=circle)


@wrong("ex22", "follow all missing ranks")
def follows_the_first_missing(programs):
    return waited(programs, circle=lambda waits: in_circle(waits, lambda others: others[:1]))


@wrong("ex22", "follow all missing ranks")
def follows_the_last_missing(programs):
    return waited(programs, circle=lambda waits: in_circle(waits, lambda others: others[-1:]))


@wrong("ex22", "to wait is not to be in the circle")
def puts_all_who_wait_in_the_circle(programs):
    return waited(programs, circle=list)


@wrong("ex22", "circle is ascending")
def lists_the_last_of_the_circle_first(programs):
    return waited(programs, circle=lambda waits: in_circle(waits)[::-1])


@wrong("ex22", "circle is a list, empty if there is none")
def has_none_for_an_empty_circle(programs):
    return waited(programs, circle=lambda waits: in_circle(waits) or None)


@wrong("ex22", "your function itself goes round for ever")
def walks_until_it_is_back(programs):
    def back(waits, r):
        here = r
        while here in waits:
            here = waits[here][1][0]
            if here == r:
                return True
        return False

    return waited(programs, circle=lambda waits: [r for r in waits if back(waits, r)])


@wrong("ex22", "the first step of a program is 0")
def counts_from_one(programs):
    found = waited(programs)
    return found and ({r: (i + 1, others) for r, (i, others) in found[0].items()}, found[1])


@wrong("ex22", "was changed in place")
def empties_the_programs(programs):
    found = waited(programs)
    for r, program in enumerate(programs):
        del program[: found[0].get(r, (len(program),))[0] if found else None]
    return found
