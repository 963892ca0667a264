"""The exercises' tests have teeth: every stub fails its test, and so do typical wrong solutions.

A stub fails with exactly its NotImplementedError; a wrong solution with an AssertionError that
names the mistake. Those of kernels run interpreted, in a process of their own.
"""

import hashlib
import inspect
import io
import math
import os
import re
import subprocess
import sys
from pathlib import Path

import adapters
import numpy as np
import pytest
import torch
from test_exercises import CHECKS

from exercises import stubs
from losses import group_advantages

ROOT = Path(__file__).parent.parent
WRONG_SOLUTIONS = []  # exercise, function, words by which its test must name it


def wrong(name: str, hint: str):
    """Register a wrong solution of an exercise."""

    def register(function):
        WRONG_SOLUTIONS.append((name, function, hint))
        return function

    return register


def masked_attention(q, k, v, visible, scale=None, spread=False):
    """Dense attention under a mask [N, N], with the mistakes that ask for it."""
    repeat = q.shape[1] // k.shape[1]
    k, v = (x.repeat(1, repeat, 1) if spread else x.repeat_interleave(repeat, 1) for x in (k, v))
    scores = torch.einsum("nhd,mhd->hnm", q, k) * (q.shape[2] ** -0.5 if scale is None else scale)
    chance = scores.masked_fill(~visible, -math.inf).softmax(-1)
    return torch.einsum("hnm,mhd->nhd", chance, v)


def ranked(scores, past, top_k, order, own=True, future=False):
    """Own chunk, candidates in an `order`, -1: with the mistakes that ask for it."""
    local, width = torch.arange(scores.shape[1]), min(top_k, scores.shape[1])
    hidden = local >= past[:, None] if not future else local == past[:, None]
    scores = scores.masked_fill(hidden, -math.inf)
    found = order(scores)
    found = torch.where(scores.gather(1, found) == -math.inf, -1, found)
    return torch.cat([past[:, None], found], 1)[:, :width] if own else found[:, :width]


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


def corrected(pi, prox, mu, a, mask, count, low, high, weigh, over=None, detach=True, pick=None):
    """Decoupled PPO with a weight and a ratio of one's own."""
    pi, prox, mu, a = (x[mask] for x in (pi, prox, mu, a))
    if detach:
        prox, mu = prox.detach(), mu.detach()
    ratio = (pi - (mu if over == "mu" else prox)).exp()
    bound = ratio.clamp(1 - low, 1 + high) * a
    gain = (pick or torch.minimum)(ratio * a, bound)
    return -(weigh((prox - mu).exp()) * gain).sum() / count


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


def straight(path, data):
    path.write_bytes(data)


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


def filled(failures, places, enough=None):
    """`places(sound, n)` where enough answers are sound."""
    sound, n = sound_of(failures), len(failures)
    fits = 2 * len(sound) > n if enough is None else enough(len(sound), n)
    return places(sound, n) if fits else reason_of(failures)


def reason_of(failures):
    reasons = [failure for failure in failures if failure]
    return max(reasons, key=reasons.count)  # of equals the first


def sound_of(failures):
    return [i for i, failure in enumerate(failures) if failure is None]


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


@wrong("ex01", "sees other sequences")
def one_triangle(q, k, v, lengths):
    return masked_attention(q, k, v, torch.ones(len(q), len(q), dtype=torch.bool).tril())


@wrong("ex02", "future must be -inf")
def scores_the_future(q_index, k_index, weights):
    hits = torch.einsum("tje,se->tjs", q_index, k_index).relu()
    return torch.einsum("tjs,tj->ts", hits, weights)


@wrong("ex03", "torch.topk promises no order")
def trusts_topk(scores, past, top_k):
    return ranked(scores, past, top_k, lambda x: x.topk(x.shape[1]).indices)


@wrong("ex04", "-1 means no chunk: row -1 is the last one")
def reads_minus_one(q, k, v, selected, chunk_size):
    n, heads, width = q.shape
    rows = (selected[:, :, None] * chunk_size + torch.arange(chunk_size)).flatten(1)  # [N, S * C]
    hidden = rows > torch.arange(n)[:, None]
    keys, values = (x[rows.clamp(max=n - 1)] for x in (k, v))
    scores = torch.einsum("nhd,nmhd->nhm", q, keys) * width**-0.5
    chance = scores.masked_fill(hidden[:, None], -math.inf).softmax(-1)
    return torch.einsum("nhm,nmhd->nhd", chance, values)


@wrong("ex05", "compare them exactly")
def dead_if_the_std_is_zero(rewards, kind, valid=None):
    return advantages(rewards, kind, valid)


@wrong("ex06", "must refuse values [4, 1], mask [4]")
def broadcasts(values, mask, count):
    return torch.where(mask, values, 0.0).sum() / max(count, 1)


@wrong("ex06", "outside the mask reached the mean")
def multiplies_by_the_mask(values, mask, count):
    return (values * mask).sum() / count


@wrong("ex07", "the weight is not truncated")
def untruncated(pi, prox, mu, a, mask, count, low, high, cap):
    return corrected(pi, prox, mu, a, mask, count, low, high, lambda w: w)


@wrong("ex08", "exp overflows")
def overflows(pi, mu, a, mask, count, low, high):
    pi, mu, a = (x[mask] for x in (pi, mu, a))
    ratio = (pi - mu).detach().exp()
    return -(ratio * ((ratio > 1 - low) & (ratio < 1 + high)) * a * pi).sum() / count


@wrong("ex08", "the gradient is right, the value is not")
def differentiates_the_ratio(pi, mu, a, mask, count, low, high):
    pi, mu, a = (x[mask] for x in (pi, mu, a))
    ratio = (pi - mu).clamp(-20, 20).exp()
    kept = torch.where((ratio > 1 - low) & (ratio < 1 + high), ratio, 0.0)
    return -(kept * a).sum() / count


@wrong("ex09", "nan must be refused")
def takes_everything(window, kl):
    window = [*window, kl][-1000:]
    on = not math.isnan(kl) and math.fsum(window) / len(window) > 0.15
    return window, 0.6 if on else 1.0, 2.0 if on else 1.0


@wrong("ex09", "the window must forget")
def never_forgets(window, kl):
    assert math.isfinite(kl), kl
    window = [*window, kl]
    on = math.fsum(window) / len(window) > 0.15
    return window, 0.6 if on else 1.0, 2.0 if on else 1.0


@wrong("ex10", "a generator with a state")
def global_generator(logits, keys, positions, temperature):
    return inverse(logits, torch.rand(len(keys)).numpy(), temperature)


@wrong("ex11", "OLDEST")
def newest_token(versions, loss_mask, version):
    return int(max(0, version - versions[loss_mask].max(initial=-1)))


@wrong("ex11", "prompt tokens have version -1")
def oldest_of_all_tokens(versions, loss_mask, version):
    return int(version - versions.min())


@wrong("ex12", "refuses a group that still meets every deadline")
def keeps_one_batch(starts, version, start, groups_per_step, max_staleness):
    return len(starts) < groups_per_step


@wrong("ex12", "of some s > start")
def looks_at_its_own_deadline(starts, version, start, groups_per_step, max_staleness):
    room = (start + max_staleness - version + 1) * groups_per_step
    return sum(x <= start for x in starts) + 1 <= room


@wrong("ex13", "it must be trained")
def never_the_oldest_first(completed, running, version, groups_per_step, max_staleness):
    return first_that_fits(completed, running, version, groups_per_step, max_staleness, [completed])


@wrong("ex14", "at most")
def issues_all_at_once(in_flight, completed, next_group, version, groups_per_step, eta):
    again = [i for i in in_flight if i not in completed]
    return completed | dict.fromkeys(again, version), [], next_group


@wrong("ex15", "stale keys")
def keeps_the_cache(model, cache, flat, tokens, cached, running):
    model.flat.copy_(flat)


@wrong("ex16", "the newest checkpoint is torn")
def writes_in_place(folder, step, state, keep=3):
    return written(folder, step, state, keep, straight)


@wrong("ex17", "products and sums must be in float32")
def sums_in_half(x, y):
    return (x * y).sum(1).float()


@wrong("ex17", "round the grid up")
def grid_rounded_down(x, y):
    result, rows = x.new_zeros(len(x), dtype=torch.float32), len(x) // 16 * 16
    result[:rows] = (x[:rows].float() * y[:rows].float()).sum(1)
    return result


@wrong("ex18", "keys behind its position")
def sees_the_future(q, k, v, chunks, chunk_size, position):
    return walk(q, k, v, chunks, chunk_size, position, future=True)


@wrong("ex19", "never with another turn")
def compares_different_turns(turn_rewards, present, kind):
    returns = turn_rewards.masked_fill(~present, 0.0).double().flip(2).cumsum(2).flip(2).float()
    values, dead = group_advantages(returns.flatten(1), kind, present.flatten(1))
    return values.view(present.shape), dead


@wrong("ex20", "must neither be trained nor be repeated")
def trains_failures(failures):
    return filled(failures, lambda sound, n: list(range(n)))


@wrong("ex21", "lambda and gamma are mixed up")
def mixes_up_lambda_and_gamma(rewards, values, mask, lengths, gamma, lam):
    return walked_back(rewards, values, mask, lengths, lam, gamma)


KERNELS = ("ex17", "ex18")
EXERCISES = [pytest.param(name, marks=getattr(pytest.mark, name)) for name in adapters.NAMES]
WRONG = [
    pytest.param(name, wrong, hint, marks=getattr(pytest.mark, name), id=f"{name} {wrong.__name__}")
    for name, wrong, hint in WRONG_SOLUTIONS
]


def check(name: str, implementation, tmp_path: Path) -> None:
    """Run an exercise's check; those of kernels skip where none can run."""
    needs_folder = len(inspect.signature(CHECKS[name]).parameters) > 1
    CHECKS[name](implementation, *[tmp_path] * needs_folder)


@pytest.mark.parametrize("name", EXERCISES)
def test_the_stub_fails_with_its_own_error(name, tmp_path):
    stub = getattr(stubs, adapters.NAMES[name])
    with pytest.raises(NotImplementedError, match=f"^{name}: "):
        check(name, stub, tmp_path)


@pytest.mark.parametrize("name, wrong, hint", WRONG)
def test_a_typical_wrong_solution_is_caught_by_name(name, wrong, hint, tmp_path):
    with pytest.raises(AssertionError, match=re.escape(hint)):
        check(name, wrong, tmp_path)


@pytest.mark.parametrize("name", EXERCISES)
def test_the_stub_has_the_signature_of_the_projects_function(name):
    stub, own = getattr(stubs, adapters.NAMES[name]), adapters.project(name)
    described = [
        {p.name: p.default for p in inspect.signature(function).parameters.values()}
        for function in (stub, own)
    ]
    assert described[0] == described[1] and list(described[0]) == list(described[1])


def test_every_exercise_has_a_wrong_solution_a_stub_and_a_place_in_the_readme():
    text = (ROOT / "exercises/README.md").read_text()
    assert {name for name, _, _ in WRONG_SOLUTIONS} == set(adapters.NAMES)
    defined = [name for name, _ in inspect.getmembers(stubs, inspect.isfunction)]
    assert sorted(defined) == sorted(adapters.NAMES.values())
    for name, function in adapters.NAMES.items():
        assert re.search(rf"^## {name} .*`{function}`", text, re.MULTILINE), name
        assert re.search(rf"^\| {name} \|", text, re.MULTILINE), f"{name} is not in the ladder"


def test_the_readme_names_the_projects_solutions_where_they_are():
    """Read as "`one`, `two` and `three` in `file.py`"."""
    text, found = (ROOT / "exercises/README.md").read_text(), 0
    for names, path in re.findall(r"((?:`[\w.]+`(?:,| and)?\s)+)in\s`([\w/]+\.py)`", text):
        source = (ROOT / path).read_text()
        for name in re.findall(r"`(?:\w+\.)?(\w+)`", names):
            assert re.search(rf"^ *(def|class) {name}\b", source, re.MULTILINE), (name, path)
            found += 1
    assert found > len(adapters.NAMES)


@pytest.mark.ex17
@pytest.mark.ex18
def test_kernels_interpreted():
    """Both kernel exercises, their stubs and their wrong solutions, in one child process."""
    import torch

    if os.environ.get("TRITON_INTERPRET") == "1" or torch.cuda.is_available():
        pytest.skip("the kernel exercises run in this very process")
    pytest.importorskip("triton", reason="Triton is not installed")
    here = Path(__file__).parent
    files = [str(here / "test_exercises.py"), str(here / "test_stubs.py")]
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-rs", "-m", "ex17 or ex18", *files]
    environment = os.environ | {"TRITON_INTERPRET": "1"}
    done = subprocess.run(
        command, env=environment, cwd=ROOT, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stdout + done.stderr
    if "the interpreter of Triton 3.6" in done.stdout:
        pytest.skip("the interpreter of Triton 3.6 cannot loop with numpy >= 2.4")
    passed = int(re.search(r"(\d+) passed", done.stdout)[1])
    wrong = sum(name in KERNELS for name, _, _ in WRONG_SOLUTIONS)
    assert passed == 3 * len(KERNELS) + wrong, done.stdout
