"""What computes less exactly, in less memory or with fewer weights: against the plain form."""

import copy
import json

import pytest
import torch
from test_model import sentences
from test_rollout import CONTEXT, LETTERS, environment, generator_of, group_of

import learner as learner_room
import logprobs as logprobs_room
import train_sync
from learner import make_learner
from logprobs import generated_logprobs
from methods.lora import merged
from model import GPT, ModelConfig, pack_tokens
from reward import make_task
from rollout import generate
from runtime.config import Config
from train_sync import train

SHAPE = dict(layers=2, width=32, heads=4, kv_heads=2, head_width=8, hidden=48, vocab_size=40)


def batch_of(vocabulary: int, seed: int = 0):
    """Random sequences, and the rows of all their tokens but the first."""
    random = torch.Generator().manual_seed(seed)
    found = [torch.randint(vocabulary, (n,), generator=random).tolist() for n in (30, 9, 22, 30)]
    packed = pack_tokens(found)
    return packed, (packed.positions > 0).nonzero()[:, 0]


def gradients(model: GPT, packed, rows, alphabet):
    """Log-probs, entropies and the gradient of a sum that weighs all of them differently."""
    model.flat_grad.zero_()
    logprobs, entropy, _ = generated_logprobs(model, packed, rows, alphabet, 0.7)
    weights = torch.linspace(-1, 1, len(rows))
    (logprobs @ weights + 0.3 * (entropy @ weights.flip(0))).backward()
    return logprobs.detach(), entropy.detach(), model.flat_grad.clone()


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("words", [11, 3000])
def test_log_probs_in_pieces_are_those_of_the_plain_form(words, tied, monkeypatch):
    shape = SHAPE | dict(vocab_size=3000, context=64, tied=tied)
    model = GPT(ModelConfig(**shape), seed=1)
    packed, rows = batch_of(words)
    alphabet = torch.randperm(3000, generator=torch.Generator().manual_seed(1))[:words]
    packed = packed._replace(tokens=alphabet[packed.tokens])
    whole = gradients(model, packed, rows, alphabet)
    monkeypatch.setattr(logprobs_room, "PIECE", 7 * words)  # 7 tokens at a time
    pieces = gradients(model, packed, rows, alphabet)
    for a, b in zip(whole, pieces, strict=True):
        assert float((a - b).norm()) <= 3e-6 * float(a.norm())  # other products, other rounding


def test_no_piece_is_larger_than_allowed(monkeypatch):
    """Neither forward nor backward ever has more than PIECE logits at once."""
    model = GPT(ModelConfig(**(SHAPE | dict(vocab_size=3000, context=64))), seed=1)
    packed, rows = batch_of(3000)
    monkeypatch.setattr(logprobs_room, "PIECE", 5 * 3000)
    sizes, plain = [], GPT.logits
    monkeypatch.setattr(
        GPT, "logits", lambda *a: sizes.append((out := plain(*a)).numel()) or out, raising=True
    )
    gradients(model, packed, rows, torch.arange(3000))
    assert max(sizes) <= 5 * 3000
    assert len(sizes) == 2 * -(-len(rows) // 5)  # each once forward, and again backward


def adapted(seed: int = 0, **more) -> GPT:
    """A model with adapters that have learned something."""
    shape = dict(vocab_size=40, context=CONTEXT, positions="rope", qk_norm=True, init_std=0.3)
    model = GPT(ModelConfig(**(SHAPE | shape | {"lora": 4} | more)), seed)
    random = torch.Generator().manual_seed(seed + 1)
    model.flat += 0.1 * torch.randn(model.flat.shape, generator=random)
    return model


def test_adapters_add_nothing_at_first_and_only_they_are_trained():
    shape = SHAPE | dict(context=CONTEXT)
    plain, model = GPT(ModelConfig(**shape), 3), GPT(ModelConfig(**shape, lora=4), 3)
    packed = pack_tokens(sentences())
    model.frozen.copy_(plain.flat)
    assert torch.equal(model(packed), plain(packed))
    names = [name for name, p in model.named_parameters() if p.requires_grad]
    assert len(names) == 2 * 4 * 2 and all(name.endswith(("_a", "_b")) for name in names)
    assert sum(p.numel() for p in model.parameters() if p.requires_grad) == len(model.flat)
    frozen = model.frozen.clone()
    model.flat_grad.zero_()
    model(packed).square().sum().backward()
    assert model.flat_grad.any() and torch.equal(model.frozen, frozen)


def test_merged_is_the_same_policy():
    model = adapted()
    packed = pack_tokens(sentences())
    with torch.no_grad():
        wanted, plain = model(packed), merged(model)(packed)
    torch.testing.assert_close(plain, wanted, rtol=0, atol=2e-5)
    without = merged(model)
    without.flat.copy_(model.frozen)
    assert float((without(packed) - wanted).detach().abs().max()) > 1e-2, "the adapters do nothing"


def test_a_generator_adds_adapters_up_once_a_version():
    """Its log-probs are the learner's, before and after it has adopted other adapters."""
    model = adapted()
    learners = copy.deepcopy(model)  # the learner goes on while the generator has the old ones
    env = environment(stop=(), turn_tokens=12)
    generator = generator_of(model, env)
    assert generator.model.config.lora == 0 and generator.policy is model
    for version in (0, 1):
        if version:
            learners.flat.add_(0.05 * torch.randn_like(learners.flat))
            generator.set_weights(1, learners.flat.clone())
        groups = [group_of(10 * version + i, start=version) for i in range(2)]
        for group in generate(generator, groups):
            for t in group.trajectories:
                packed = pack_tokens([t.tokens])
                rows = torch.from_numpy(t.loss_mask.nonzero()[0])
                found = generated_logprobs(learners, packed, rows, torch.arange(LETTERS), 1.0)[0]
                behaviour = torch.from_numpy(t.logprobs[t.loss_mask])
                torch.testing.assert_close(found, behaviour, rtol=0, atol=1e-5)


def test_in_bfloat16_adapters_stay_apart():
    """Merged, small updates would be rounded away: the generator must have the learner's policy."""
    model = adapted().on("cpu", torch.bfloat16)
    model.flat.mul_(0.2)  # rounded away, in good part, in weights that they are added to
    env = environment(stop=(), turn_tokens=12)
    generator = generator_of(model, env)
    assert generator.model is model
    without = copy.deepcopy(model)
    without.flat.zero_()
    gaps = {"learner": [], "without": []}
    for group in generate(generator, [group_of(i) for i in range(3)]):
        for t in group.trajectories:
            packed = pack_tokens([t.tokens])
            rows = torch.from_numpy(t.loss_mask.nonzero()[0])
            for name, policy in (("learner", model), ("without", without)):
                with torch.no_grad():
                    found = generated_logprobs(policy, packed, rows, torch.arange(LETTERS), 1.0)[0]
                gaps[name] += (found - torch.from_numpy(t.logprobs[t.loss_mask])).abs().tolist()
    mean = {name: sum(values) / len(values) for name, values in gaps.items()}
    assert mean["learner"] < mean["without"] / 4, mean


def test_bfloat16_keeps_float32_weights_and_gradients():
    """Steps far below the precision of bfloat16 must add up."""
    config = Config(dtype="bfloat16", lr=1e-5, steps=10**6)
    task = make_task("guess")
    learner = make_learner(config, task, GPT(ModelConfig(**SHAPE, positions="rope"), 1))
    assert learner.model.flat.dtype == torch.bfloat16
    assert learner.weights.dtype == learner.weights.grad.dtype == torch.float32
    before = learner.weights.detach().clone()
    for _ in range(20):
        learner.weights.grad.fill_(0.01)
        learner_room.update_weights(learner, config, 0.0, {"tokens": 1})
        assert float(learner.weights.grad.norm()) == pytest.approx(1.0, rel=1e-4)
    moved = before - learner.weights.detach()
    torch.testing.assert_close(moved, torch.full_like(moved, 20e-5), rtol=0.05, atol=1e-6)
    assert torch.equal(learner.model.flat, learner.weights.detach().bfloat16())


def test_gradients_of_micro_batches_add_up_in_float32():
    config = Config(dtype="bfloat16")
    learner = make_learner(config, make_task("guess"), GPT(ModelConfig(**SHAPE), 1))
    learner.weights.grad.zero_()
    learner.model.flat_grad.fill_(1.0)
    learner_room.gather_gradient(learner)
    for _ in range(100):  # in bfloat16, 1 + 1/512 is 1
        learner.model.flat_grad.fill_(1 / 512)
        learner_room.gather_gradient(learner)
    assert (learner.weights.grad == 1 + 100 / 512).all() and not learner.model.flat_grad.any()


@pytest.mark.parametrize("dtype, most", [("float32", 1e-5), ("bfloat16", 0.5)])
def test_a_run_says_how_far_generator_and_learner_are_apart(dtype, most, tmp_path):
    """How far bfloat16 takes them apart is the processor's business; on some it is nothing."""
    run = tmp_path / "run"
    flags = {"task": "sum:16", "groups_per_step": 8, "steps": 1, "positions": "rope"}
    train(Config(dtype=dtype, out=str(run), **flags))
    found = json.loads((run / "summary.json").read_text())["mismatch"]
    assert 0 <= found["mean"] <= found["max"] <= most


def test_the_mismatch_of_a_run_is_that_of_its_log_probs(tmp_path, monkeypatch):
    """A generator that notes log-probs a quarter off is found out, exactly."""
    honest = train_sync.generate

    def dishonest(*arguments):
        groups = honest(*arguments)
        for group in groups:
            for t in group.trajectories:
                t.logprobs[t.loss_mask] -= 0.25
        return groups

    monkeypatch.setattr(train_sync, "generate", dishonest)
    run = tmp_path / "run"
    train(Config(task="sum", steps=1, out=str(run)))
    found = json.loads((run / "summary.json").read_text())["mismatch"]
    for name in ("mean", "max"):
        assert found[name] == pytest.approx(0.25, abs=1e-3), found


@pytest.mark.parametrize("more", [{"chunk_size": 4}, {"chunk_size": 1, "scoring": "indexer"}])
def test_bfloat16_with_sparse_attention(more, tmp_path):
    run = tmp_path / "run"
    sparse = {"task": "recall:64", "attention": "dsa", "top_k": 4, "positions": "rope", **more}
    sizes = {"group_size": 4, "groups_per_step": 4, "slots": 16, "steps": 2, "eval_every": 100}
    train(Config(**sparse, **sizes, dtype="bfloat16", out=str(run)))
    assert json.loads((run / "summary.json").read_text())["mismatch"]["mean"] < 0.01


def test_an_untied_matrix_gets_its_own_gradient():
    tied, untied = (GPT(ModelConfig(**SHAPE, tied=tied), 2) for tied in (True, False))
    assert len(untied.flat) == len(tied.flat) + 40 * 32
    packed, rows = batch_of(40)
    gradients(untied, packed, rows, torch.arange(40))
    assert untied.output.weight.grad.any() and untied.embed_tokens.weight.grad.any()
