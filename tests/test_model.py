"""The GPT against one written with Python loops, against its naive form, and in other shapes.

The loops know the model by its Qwen3 weight names only, so a wrong name, shape or split
of a fused matrix shows up as a wrong number. Bitwise claims hold on CPU with one thread.
"""

import copy
import math
import random
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from model_folders import named_weights

from fast.fused import compiled
from fast.prefixes import share_prefixes
from logprobs import chosen
from model import GPT, PRESETS, ModelConfig, naive_forward, pack_tokens, split_heads

ROOT = str(Path(__file__).parent.parent)
SHAPE = dict(layers=2, width=16, heads=4, kv_heads=2, head_width=8, hidden=24)
SHAPE |= dict(vocab_size=40, context=64, init_std=0.4)  # large weights: no mistake drowns
ROPE = dict(positions="rope", qk_norm=True)
DSA = dict(attention="dsa", chunk_size=4, top_k=2)
KINDS = {
    "dense learned": {},
    "dense rope": ROPE,
    "dense, a key head per query head": dict(kv_heads=4, positions="rope"),
    "dsa mean": DSA,
    "dsa mean rope": DSA | ROPE,
    "dsa indexer": DSA | ROPE | dict(scoring="indexer", chunk_size=2, top_k=3),
}
kinds = pytest.mark.parametrize("kind", KINDS)
LENGTHS = (21, 1, 34, 16)


def make(kind="dense learned", seed=0, dtype=torch.float32, **changes) -> GPT:
    """A tiny model whose norms are not all ones, as they would be after training."""
    model = GPT(ModelConfig(**(SHAPE | KINDS[kind] | changes)), seed)
    random = torch.Generator().manual_seed(99)
    for p in model.parameters():
        if p.dim() == 1:
            p.data += 0.3 * torch.randn(p.shape, generator=random)
    if dtype != torch.float32:
        model.flatten("cpu", dtype)
    return model


def sentences(lengths: Sequence[int] = LENGTHS, seed=0, vocab=40) -> list[list[int]]:
    random = torch.Generator().manual_seed(seed)
    return [torch.randint(vocab, (n,), generator=random).tolist() for n in lengths]


def hidden_of(model: GPT, sequences: list[list[int]]) -> list[torch.Tensor]:
    """Hidden states of each sequence, from one packed forward."""
    with torch.no_grad():
        return list(model(pack_tokens(sequences)).split([len(s) for s in sequences]))


def is_view(part: torch.Tensor, whole: torch.Tensor) -> bool:
    inside = part.untyped_storage().data_ptr() == whole.untyped_storage().data_ptr()
    dense = part.is_contiguous() or part.t().is_contiguous() or part.stride(0) == 1
    return inside and part.dtype == whole.dtype and dense


def assert_flat(model: GPT) -> None:
    """Every parameter lies in `flat`, every gradient in `flat_grad`, one behind the other."""
    start, gradient = 0, model.flat_grad
    for name, p in model.named_parameters():
        assert is_view(p.data, model.flat) and p.data.storage_offset() == start, name
        assert is_view(p.grad, gradient) and p.grad.storage_offset() == start, name
        start += p.numel()
    assert model.flat.shape == model.flat_grad.shape == (start,)


# ------------------------------------------------------------------------------ the forward pass


def loop_norm(x, weight, eps=1e-6):
    return x / math.sqrt(float((x * x).mean()) + eps) * weight


def loop_rotate(x, position, base):
    """Rotate pairs (i, i + D/2) of one head by position * base^(-2i/D), one pair at a time."""
    half, out = len(x) // 2, x.clone()
    for i in range(half):
        angle = position * base ** (-2 * i / len(x))
        cos, sin = math.cos(angle), math.sin(angle)
        out[i] = x[i] * cos - x[i + half] * sin
        out[i + half] = x[i + half] * cos + x[i] * sin
    return out


def loop_forward(model: GPT, tokens: list[int]) -> torch.Tensor:
    """Hidden states [T, d] of one sequence: token by token, head by head, explicit softmax."""
    c, w = model.config, {name: view.double() for name, view in named_weights(model).items()}
    xs = [w["model.embed_tokens.weight"][t] for t in tokens]
    if c.positions == "learned":
        xs = [x + w["model.embed_positions.weight"][t] for t, x in enumerate(xs)]
    for layer in range(c.layers):
        at, attention = f"model.layers.{layer}.", f"model.layers.{layer}.self_attn."
        keys, values, news = [], [], []
        for t, x in enumerate(xs):
            y = loop_norm(x, w[at + "input_layernorm.weight"])
            heads = {}
            for part in "qkv":
                heads[part] = list((w[f"{attention}{part}_proj.weight"] @ y).split(c.head_width))
                if part != "v" and c.qk_norm:
                    gain = w[f"{attention}{part}_norm.weight"]
                    heads[part] = [loop_norm(head, gain) for head in heads[part]]
                if part != "v" and c.positions == "rope":
                    heads[part] = [loop_rotate(head, t, c.rope_base) for head in heads[part]]
            keys.append(heads["k"])
            values.append(heads["v"])
            mixed = []
            for h, query in enumerate(heads["q"]):
                shared = h // (c.heads // c.kv_heads)
                scores = [float(query @ k[shared]) / math.sqrt(c.head_width) for k in keys]
                powers = [math.exp(score - max(scores)) for score in scores]
                pairs = zip(powers, values, strict=True)
                mixed.append(sum(p / sum(powers) * v[shared] for p, v in pairs))
            x = x + w[attention + "o_proj.weight"] @ torch.cat(mixed)
            y = loop_norm(x, w[at + "post_attention_layernorm.weight"])
            gate, up = (w[f"{at}mlp.{part}_proj.weight"] @ y for part in ("gate", "up"))
            news.append(x + w[at + "mlp.down_proj.weight"] @ (gate / (1 + (-gate).exp()) * up))
        xs = news
    return torch.stack([loop_norm(x, w["model.norm.weight"]) for x in xs])


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind.startswith("dense")])
def test_forward_agrees_with_loops_and_with_the_naive_form(kind):
    model = make(kind, dtype=torch.float64, rope_base=100.0)
    sequences = sentences((9, 4, 17))
    for hidden, tokens in zip(hidden_of(model, sequences), sequences, strict=True):
        wanted = loop_forward(model, tokens)
        error = 2e-6 if model.config.positions == "rope" else 1e-12  # its table is float32
        torch.testing.assert_close(hidden, wanted, rtol=0, atol=error)
        naive = naive_forward(model, torch.tensor(tokens))
        torch.testing.assert_close(hidden, naive, rtol=0, atol=1e-12)


def test_sparse_attention_is_dense_while_everything_fits_and_not_beyond():
    (tokens,) = sentences((32,))
    for kind in ("dsa mean", "dsa mean rope", "dsa indexer"):
        wide = make(kind, dtype=torch.float64, top_k=32)
        wanted = loop_forward(wide, tokens)
        torch.testing.assert_close(hidden_of(wide, [tokens])[0], wanted, rtol=0, atol=2e-6)
        narrow = make(kind, dtype=torch.float64, chunk_size=4, top_k=2)
        narrow.flat.copy_(wide.flat)
        found = hidden_of(narrow, [tokens])[0]
        assert torch.allclose(found[:8], wanted[:8], atol=2e-6)  # two chunks of four fit
        assert not torch.allclose(found[8:], wanted[8:], atol=1e-2), kind


@kinds
def test_packed_forward_equals_separate_forwards(kind):
    model, sequences = make(kind), sentences()
    for alone, packed in zip(sequences, hidden_of(model, sequences), strict=True):
        torch.testing.assert_close(hidden_of(model, [alone])[0], packed, rtol=0, atol=1e-5)
    shuffled = hidden_of(model, sequences[::-1])[::-1]
    for a, b in zip(shuffled, hidden_of(model, sequences), strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=1e-5)


@kinds
def test_the_future_changes_nothing_and_neither_do_neighbours(kind):
    model, sequences = make(kind), sentences()
    before = hidden_of(model, sequences)
    for t in (0, 7, 17, 33):
        changed = [list(s) for s in sequences]
        changed[2][t] = (changed[2][t] + 1) % 40
        after = hidden_of(model, changed)
        for i in (0, 1, 3):
            assert torch.equal(before[i], after[i]), f"token {t} of sequence 2 changed sequence {i}"
        assert torch.equal(before[2][:t], after[2][:t]), f"token {t} changed its past"
        assert not torch.allclose(before[2][t], after[2][t]), f"token {t} does not matter"


def branching(seed=0) -> list[list[int]]:
    """Groups of answers to a few prompts; some are equal, some are the beginning of others."""
    chance = random.Random(seed)
    prompts = [[chance.randrange(3) for _ in range(chance.randint(1, 9))] for _ in range(4)]
    answers = [p + [chance.randrange(2) for _ in range(chance.randint(0, 12))] for p in prompts * 5]
    answers += [answers[0], answers[1][:1], [7]]
    chance.shuffle(answers)
    return answers


def rows_of(packed) -> list[list[int]]:
    """For each sequence, its tokens' numbers (places in `packed.tokens`)."""
    return [row[row >= 0].tolist() for row in packed.grid]


def test_shared_prefixes_are_the_nodes_of_the_prefix_tree():
    for seed in range(20):
        sequences = branching(seed)
        beginnings = [tuple(s[: t + 1]) for s in sequences for t in range(len(s))]
        packed = pack_tokens(sequences)
        shared, wanted, copies = share_prefixes(packed, torch.arange(len(packed.tokens)))
        numbers = wanted[copies].tolist()
        node = dict(zip(beginnings, numbers, strict=True))
        count = len(shared.tokens)
        assert [node[x] for x in beginnings] == numbers, "two numbers for one beginning"
        assert len(set(numbers)) == len(node) == count < len(beginnings)
        assert wanted.tolist() == list(range(count))
        kept = [tuple(shared.tokens[row].tolist()) for row in rows_of(shared)]
        begun = {x[:-1] for x in beginnings}
        assert sorted(kept) == sorted({tuple(s) for s in sequences} - begun)
        for tokens, row in zip(kept, rows_of(shared), strict=True):
            assert row == [node[tokens[: t + 1]] for t in range(len(tokens))]
            assert shared.positions[row].tolist() == list(range(len(row)))
        assert shared.grid.flatten()[shared.cell].tolist() == list(range(count))
    different = pack_tokens([[1, 2], [2, 1], [3]])
    shared, wanted, copies = share_prefixes(different, torch.arange(5))
    assert len(shared.grid) == 3 and sorted(wanted[copies].tolist()) == list(range(5))


@kinds
@pytest.mark.parametrize("wanted", [1.0, 0.3, 0.02])
def test_what_is_shared_is_computed_once_and_changes_nothing(kind, wanted):
    model, sequences = make(kind, dtype=torch.float64), branching()
    packed, found, seen = pack_tokens(sequences), [], []
    for module in (model.embed_tokens, model.norm):  # what goes in at the bottom, what comes out
        module.register_forward_pre_hook(lambda module, inputs: seen.append(len(inputs[0])))
    some = torch.rand(len(packed.tokens), generator=torch.Generator().manual_seed(0)) < wanted
    rows = some.nonzero()[:, 0].flip(0)  # in any order
    weights = torch.randn(len(rows), SHAPE["width"], dtype=torch.float64)
    for share in (False, True):
        model.flat_grad.zero_()
        if share:
            shared, read, copies = share_prefixes(packed, rows)
            hidden = model(shared, read)[copies]
        else:
            hidden = model(packed)[rows]
        (hidden * weights).sum().backward()
        found += [(hidden.detach(), model.flat_grad.clone())]
    torch.testing.assert_close(found[1], found[0], rtol=1e-9, atol=1e-9)
    ends = set(rows.tolist())
    begun = {  # every beginning of a sequence, by where it ends
        (b, t): tuple(s[: t + 1]) for b, s in enumerate(sequences) for t in range(len(s))
    }
    places = list(begun)  # in the order of the packed tokens
    needed = {begun[b, t] for end in ends for b, last in [places[end]] for t in range(last + 1)}
    assert seen == [len(places)] * 2 + [len(needed), len({begun[places[end]] for end in ends})]
    assert seen[2] < 0.8 * seen[0]


def test_logits_use_the_tied_embeddings():
    model, (tokens,) = make(), sentences((6,))
    assert not any("lm_head" in name for name, _ in model.named_parameters())
    hidden = hidden_of(model, [tokens])[0]
    whole = model.logits(hidden)
    table = named_weights(model)["model.embed_tokens.weight"]
    torch.testing.assert_close(whole, hidden @ table.T)
    some = torch.tensor([3, 39, 0])
    torch.testing.assert_close(model.logits(hidden, some), whole[:, some])
    unused = next(t for t in range(40) if t not in tokens)
    table[unused] += 1.0  # as an output only
    changed = (model.logits(hidden_of(model, [tokens])[0]) != whole).any(0).nonzero()
    assert changed.flatten().tolist() == [unused]


# ------------------------------------------------------------------- one tensor for all weights


def loss_of(model: GPT, sequences: list[list[int]]) -> torch.Tensor:
    """Mean cross-entropy of the next token."""
    packed = pack_tokens(sequences)
    rows = (packed.positions[1:] > 0).nonzero()[:, 0]  # all but the last of each sequence
    return F.cross_entropy(model.logits(model(packed)[rows]), packed.tokens[rows + 1])


@kinds
def test_parameters_and_gradients_are_views_through_everything(kind):
    model = make(kind)
    assert_flat(model)
    flat = model.flat
    assert model.on("cpu") is model and model.flat is flat  # an optimizer holds on to it
    model.flatten("cpu", torch.float32)
    assert_flat(model)
    assert torch.equal(model.flat, flat)
    loss_of(model, sentences()).backward()
    assert_flat(model)
    first = model.flat_grad.clone()
    assert first.any()
    loss_of(model, sentences()).backward()  # gradients add up
    torch.testing.assert_close(model.flat_grad, 2 * first)
    model.flatten("cpu", torch.float64)
    assert_flat(model)
    assert model.flat.dtype == torch.float64


def test_flat_gradient_is_the_slope_of_the_loss():
    """Central differences in float64 along random directions of the flat tensor."""
    for kind in ("dense learned", "dense rope"):
        model, sequences = make(kind, dtype=torch.float64), sentences((9, 5))
        loss_of(model, sequences).backward()
        for seed in range(3):
            random = torch.Generator().manual_seed(seed)
            direction = torch.randn(model.flat.shape, generator=random, dtype=torch.float64)
            direction /= direction.norm()
            losses = []
            for sign in (1, -1):
                model.flat.add_(direction, alpha=sign * 1e-5)
                losses.append(loss_of(model, sequences).item())
                model.flat.add_(direction, alpha=-sign * 1e-5)
            slope = (losses[0] - losses[1]) / 2e-5
            assert slope == pytest.approx(float(model.flat_grad @ direction), rel=1e-5)


def test_the_language_model_loss_leaves_the_indexer_alone():
    model = make("dsa indexer")
    loss_of(model, sentences()).backward()
    assert model.flat_grad.any()  # all gradients are its views
    for name, p in model.named_parameters():
        assert p.grad.any() == ("indexer" not in name), name


# -------------------------------------------------------------------------- names, sizes, seeds


def count(c: ModelConfig) -> int:
    """Parameters of a dense model with learned positions, by arithmetic."""
    attention = c.width * c.head_width * (2 * c.heads + 2 * c.kv_heads)
    layer = attention + 3 * c.width * c.hidden + 2 * c.width
    return (c.vocab_size + c.context) * c.width + c.layers * layer + c.width


def test_presets_have_their_advertised_sizes():
    sizes = {name: count(ModelConfig(**shape)) for name, shape in PRESETS.items()}
    for name in ("tiny", "small"):
        assert GPT(ModelConfig(**PRESETS[name])).flat.numel() == sizes[name]
    assert 0.09e6 < sizes["tiny"] < 0.15e6
    assert 0.9e6 < sizes["small"] < 1.2e6
    assert 9e6 < sizes["medium"] < 11e6
    assert list(sizes) == ["tiny", "small", "medium"]


def test_weights_are_a_function_of_the_seed():
    for kind in KINDS:
        torch.manual_seed(1)
        one = make(kind, seed=5)
        torch.manual_seed(2)  # no other source of chance
        assert torch.equal(one.flat, make(kind, seed=5).flat)
        assert not torch.equal(one.flat, make(kind, seed=6).flat)
    for name, p in GPT(ModelConfig(**PRESETS["small"])).named_parameters():
        scale = (2 * 4) ** -0.5 if name.endswith("_out") else 1.0  # four layers
        assert p.dim() == 1 or float(p.detach().std()) == pytest.approx(0.08 * scale, rel=0.05), (
            name
        )


def test_nobody_waits_for_torchs_compiler():
    """Every process of a run builds a model, learners step it; importing the compiler takes longer
    than torch."""
    code = "import sys; from learner import *; from reward import task_of; c = Config(task='guess')"
    code += "; from runtime.models import make_model as make; t = task_of(c)"
    code += "; own = make_learner(c, t, make(c, t)); adamw_step(own.weights, own.moments, 0.1)"
    code += "; print('torch._dynamo' in sys.modules)"
    said = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert said.stdout == "False\n", said.stderr


def test_freed_memory_is_used_again():
    """Tensors that are made again lie in pages that the process has already. These are larger than
    what glibc would keep by itself (32 MiB). In a process of its own: where a heap cannot grow,
    because something lies above it, all is new."""
    code = """
import resource, torch
from fast.memory import keep_memory
keep_memory()
for _ in range(10):
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    del [torch.ones(1 << 24) for _ in range(2)][:]  # 32,768 pages
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""
    command = [sys.executable, "-c", code]
    assert int(subprocess.run(command, cwd=ROOT, capture_output=True, text=True).stdout) < 10_000


@pytest.mark.gpu
@kinds
def test_on_a_gpu_it_computes_the_same(kind):
    model, sequences = make(kind, head_width=16), sentences()  # the least for kernels
    wanted = torch.cat(hidden_of(model, sequences))
    twin = copy.deepcopy(model).on("cuda")
    assert_flat(twin)
    flat = twin.flat
    assert twin.on("cuda").flat is flat, "moved twice: the optimizer lost its tensor"
    with torch.no_grad():
        found = twin(pack_tokens(sequences, "cuda")).cpu()
    torch.testing.assert_close(found, wanted, rtol=0, atol=1e-4)


@pytest.mark.gpu
@pytest.mark.parametrize("normed", [True, False])
def test_fused_operations_compute_the_same(normed):
    """Forward and backward, for lengths and layers that come after compiling, too."""
    by, config = compiled(split_heads), ModelConfig(1, 64, 4, 2, 16, 64, qk_norm=normed)
    for n in (7, 12, 40):
        sizes = (n, 8, 16), (16,), (16,), (n, 1, 16), (n, 1, 16)
        qkv, a, b, *rope = (torch.randn(size, device="cuda") for size in sizes)
        inputs = [x.requires_grad_() for x in ((qkv, a, b) if normed else (qkv,))]
        results = []
        for split in (by, split_heads):
            out = split(qkv, a, b, tuple(rope), config)
            results.append([*out, *torch.autograd.grad(sum(x.sin().sum() for x in out), inputs)])
        for found, wanted in zip(*results, strict=True):
            torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-4)
        logits, targets = torch.randn(n, 9000, device="cuda"), torch.arange(n, device="cuda")
        pairs = (f(logits, targets, 0.7) for f in (compiled(chosen), chosen))
        for found, wanted in zip(*pairs, strict=True):
            torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-4)
