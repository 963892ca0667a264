"""The training stages: who learns from which loss, what the indexer is taught, and the recipe.

Isolation is exact: zeros, not small numbers. The indexer's target is checked against Python loops,
and the masks that stand in for sparse attention against the sparse attention of dsa.py.
"""

import dataclasses
import itertools
import json
import math
import re

import numpy as np
import pytest
import torch

import pretrain
import reward
import train_sync
from lab import recipe
from lab.recipe import RecipeConfig, make_batch
from lab.tables import tables_of
from model import GPT, ModelConfig, attend_packed, dense_packed, pack_tokens
from pretrain import SparseConfig, indexer_loss, losses_of, parts_of, watched_attention
from rollout import Generator, generate, make_environment
from runtime import config as config_room
from runtime.checkpoint import load_checkpoint
from runtime.config import Config
from runtime.messages import Group
from runtime.terminal import run_main
from runtime.tokenizer import own_tokenizer

SMALL = RecipeConfig(chunk_size=2, top_k=4, tokens=128)  # attends to 8 keys: prompts of 16 to 128
SHAPES = pytest.mark.parametrize("chunk_size, top_k", [(1, 8), (2, 4), (4, 4)])


def make(chunk_size=2, top_k=4) -> GPT:
    """A small model, some way from its initialisation, so that nothing is uniform or zero."""
    model = recipe.make_recipe_model(RecipeConfig(chunk_size=chunk_size, top_k=top_k), 0)
    random = torch.Generator().manual_seed(1)
    model.flat += 0.1 * torch.randn(model.flat.shape, generator=random)
    return model


def gradients(model: GPT, loss: torch.Tensor) -> dict[str, list]:
    model.flat_grad.zero_()
    loss.backward()
    return {part: [p.grad.clone() for p in ps] for part, ps in parts_of(model).items()}


def weights(model: GPT) -> dict[str, list]:
    return {part: [p.detach().clone() for p in ps] for part, ps in parts_of(model).items()}


def same(before: list, after: list) -> list[bool]:
    return [torch.equal(a, b) for a, b in zip(before, after, strict=True)]


# -------------------------------------------------------------------------------------------- text


@pytest.mark.parametrize("length", [16, 64, 600])  # 600: keys of two numbers
def test_every_question_of_a_text_is_answered_by_its_table(length):
    task = reward.make_task(f"recall:{length}", 3)
    tokens, columns = recipe.make_text(task, 5)
    text = own_tokenizer().decode_bytes(tokens).decode()
    table, *questions = text.split("?")
    assert task.reset(5, "train")["prompt"].startswith(table)
    pairs = dict(pair.split("=") for pair in table.split(";")[:-1])
    assert len(questions) == max(1, len(pairs) // 2)
    for question in questions:
        key, value = question.removesuffix("<|end|>").split("=")
        assert pairs[key] == value
    answers = own_tokenizer().decode_bytes([tokens[column] for column in columns]).decode()
    assert answers == "".join(question.split("=")[1] for question in questions)


def test_a_batch_is_of_the_seed_and_never_of_the_exam():
    (one, *_), (two, *_) = make_batch(32, 0, 0, 128), make_batch(32, 1, 0, 128)
    assert one.shape == two.shape and not torch.equal(one, two)
    assert torch.equal(one, make_batch(32, 0, 0, 128)[0])
    exam, *_ = recipe.exam(32, 64)
    width = one.shape[1] // 2
    seen = {tuple(row[:width].tolist()) for row in make_batch(32, 0, 0, 10_000)[0]}
    assert not seen & {tuple(row[:width].tolist()) for row in exam}


# --------------------------------------------------------------------------------------- isolation


@SHAPES
@pytest.mark.parametrize("stage", ["warm-up", "sparse"])
def test_the_two_losses_do_not_meet(chunk_size, top_k, stage):
    model, batch = make(chunk_size, top_k), make_batch(64, 0, 0, 128)
    loss, kl, _ = losses_of(model, batch, stage)
    assert loss > 0 and kl > 0
    by_kl = gradients(model, kl)
    by_loss = gradients(model, losses_of(model, batch, stage)[0])
    for part in ("matrices", "others"):
        assert all(not g.any() for g in by_kl[part]), f"the KL reaches {part}"
        assert any(g.any() for g in by_loss[part])
    assert all(not g.any() for g in by_loss["indexer"]), "the answers' loss reaches the indexer"
    assert all(g.any() for g in by_kl["indexer"]), "a parameter of the indexer learns nothing"


def test_parts_are_all_parameters_once():
    model = make()
    parts = parts_of(model)
    assert sum(p.numel() for ps in parts.values() for p in ps) == len(model.flat)
    named = [p for name, p in model.named_parameters() if "indexer" in name]
    assert same(named, parts["indexer"]) and all(p.dim() == 2 for p in parts["matrices"])


@pytest.mark.parametrize("stage, moved", [("dense", 0), ("warm-up", 1), ("sparse", 2)])
def test_a_stage_moves_what_it_should_and_nothing_else(stage, moved):
    moves = [("matrices", "others"), ("indexer",), ("matrices", "others", "indexer")][moved]
    model = make()
    before = weights(model)
    pretrain.train_stage(model, SMALL, stage, 3, recipe.recall_batches(SMALL, 0, 0))
    after = weights(model)
    for part in before:
        kept = same(before[part], after[part])
        assert not any(kept) if part in moves else all(kept), f"{stage}: {part}"


def test_clipping_one_part_does_not_change_the_step_of_another():
    """The sparse stage's indexer learns bitwise the same, however large the other loss is."""
    twins, steps = [], []
    for scale in (1.0, 50.0):
        model = make()
        model.layers[-1].mlp_out.data *= scale  # behind every indexer: only the answers change
        optimizers = pretrain.make_optimizers(model, SMALL, "sparse")
        batch = make_batch(32, 0, 0, 128)
        steps.append(losses_of(model, batch, "sparse")[:2])
        pretrain.train_step(model, batch, "sparse", optimizers, 1.0)
        twins.append(weights(model)["indexer"])
    assert steps[0][0] != steps[1][0] and steps[0][1] == steps[1][1]
    assert all(same(*twins))


# --------------------------------------------------------------------------------- masks and target


@SHAPES
@pytest.mark.parametrize("sparse", [False, True])
def test_masked_attention_is_the_real_one(chunk_size, top_k, sparse):
    model, (tokens, *_) = make(chunk_size, top_k), make_batch(48, 0, 0, 300)
    (B, T), seen = tokens.shape, []
    packed = pack_tokens(list(tokens))
    attend = watched_attention(model.config, B, T, sparse, seen)
    ours = model.body(packed.tokens, packed.positions, attend)
    if sparse:
        real = attend_packed(model.config, packed)
        most = max(int((scores > -torch.inf).sum(1).max()) for scores, _ in seen)
        assert most == top_k - 1 < (T - 1) // chunk_size, "everything was selected"
    else:
        real = lambda layer, q, k, v, index: dense_packed(q, k, v, packed)  # noqa: E731
    theirs = model.body(packed.tokens, packed.positions, real)
    torch.testing.assert_close(ours, theirs, atol=1e-5, rtol=0)


@SHAPES
@pytest.mark.parametrize("sparse", [False, True])
def test_target_and_divergence_against_python_loops(chunk_size, top_k, sparse):
    """Two heads that share keys; softmax, sums and the KL one number at a time."""
    T, D, J, E = 21, 4, 2, 4
    config = make(chunk_size, top_k).config
    config = dataclasses.replace(config, heads=2, kv_heads=1, head_width=D)
    random = torch.Generator().manual_seed(2)
    q, k, v = (torch.randn(T, h, D, generator=random) for h in (2, 1, 1))
    index = [torch.randn(*s, generator=random) for s in ((T, J, E), (T, E), (T, J))]
    seen: list = []
    watched_attention(config, 1, T, sparse, seen)(0, q, k, v, index)
    scores, mass = seen[0]
    torch.testing.assert_close(mass.sum(-1), torch.ones(T))

    total, queries = 0.0, 0
    for t in range(T):
        own = t // chunk_size
        chosen = [c for c in range(own + 1) if c == own or scores[t, c] > -torch.inf]
        assert len(chosen) == min(own + 1, top_k if sparse else T)
        keys = [s for s in range(t + 1) if not sparse or s // chunk_size in chosen]
        target = [0.0] * (own + 1)
        for h in range(2):
            logits = {s: float(q[t, h] @ k[s, 0]) / math.sqrt(D) for s in keys}
            normal = sum(math.exp(x) for x in logits.values())
            for s, x in logits.items():
                target[s // chunk_size] += math.exp(x) / normal
        among = [c for c in range(own) if not sparse or c in chosen]
        if not among:
            continue
        normal = sum(target[c] for c in among)
        p = {c: target[c] / normal for c in among}
        assert math.isclose(sum(p.values()), 1, rel_tol=1e-6)
        believed = sum(math.exp(float(scores[t, c])) for c in among)
        q_of = {c: math.exp(float(scores[t, c])) / believed for c in among}
        total += sum(p[c] * math.log(p[c] / q_of[c]) for c in among)
        queries += 1
    ours = float(indexer_loss(scores, mass))
    assert math.isclose(ours, total / queries, rel_tol=1e-4)


def test_learning_lowers_the_divergence():
    model, config = make(), RecipeConfig(chunk_size=2, top_k=4, tokens=256)
    batch = make_batch(64, 0, 0, 256)
    before = losses_of(model, batch, "warm-up")[1]
    batches = recipe.recall_batches(config, 0, 0)
    pretrain.train_stage(model, config, "warm-up", 12, batches)
    assert losses_of(model, batch, "warm-up")[1] < 0.9 * before


# --------------------------------------------------------------------------------- a model of yours

ONCE = {"dense_steps": 1, "warmup_steps": 2, "sparse_steps": 2, "tokens": 128}


def own(folder, words=4000, **flags) -> SparseConfig:
    """Flags of a small run on a text of so many words; 8 of 64 keys are attended to."""
    text = folder / "text.txt"
    if not text.exists():
        random = np.random.default_rng(0)
        text.write_text(" ".join(random.choice(["the cat", "sat.", "on", "a mat\n"], size=words)))
    flags = {"text": str(text), "out": str(folder / "out.pt"), **ONCE, **flags}
    return SparseConfig(**{"length": 64, "chunk_size": 2, "top_k": 4, **flags})


def stored(config: SparseConfig) -> GPT:
    """The model in the file that a run has written."""
    weights = torch.load(config.out)
    model = GPT(ModelConfig(**weights["shape"]), None)
    model.flat.copy_(weights["weights"])
    return model


def test_the_dense_weights_are_those_of_the_model_and_the_indexer_is_of_the_seed(tmp_path):
    model, tokenizer = pretrain.sparse_model(own(tmp_path, index_heads=3, index_width=8))
    assert tokenizer is own_tokenizer() and model.config.indexed and model.config.context == 64
    shape = ("attention", "scoring", "index_heads", "index_width")
    plain = {name: getattr(ModelConfig, name) for name in shape}
    dense = GPT(dataclasses.replace(model.config, **plain), 0)
    names = dict(model.named_parameters())
    assert all(torch.equal(names[name], p) for name, p in dense.named_parameters())
    others = [pretrain.sparse_model(own(tmp_path, seed=seed))[0] for seed in (0, 0, 1)]
    one, same_seed, other_seed = (weights(twin)["indexer"] for twin in others)
    assert all(same(one, same_seed)) and not torch.equal(one[0], other_seed[0])


@pytest.mark.parametrize("of_task", [False, True])
def test_every_stage_of_a_model_of_yours_moves_what_it_should(tmp_path, capsys, of_task):
    source = {"text": "", "task": "guess"} if of_task else {}
    pretrain.train(own(tmp_path, **source, dense_steps=0, sparse_steps=0))
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[1] for line in lines] == ["dense", "warm-up", "sparse"]
    assert all(re.search(r"KL [\d.]+   loss: sparse [\d.]+, dense [\d.]+$", line) for line in lines)
    assert lines[1].split()[2:] == lines[2].split()[2:] != lines[0].split()[2:]
    warm = own(tmp_path)
    before, after = pretrain.sparse_model(warm)[0], stored(warm)
    moved = {part: same(ps, weights(after)[part]) for part, ps in weights(before).items()}
    assert all(moved["matrices"] + moved["others"]) and not any(moved["indexer"])
    whole = own(tmp_path, **source, out=str(tmp_path / "whole.pt"), dense_steps=0)
    pretrain.train(whole)
    moved = {part: same(ps, weights(stored(whole))[part]) for part, ps in weights(after).items()}
    assert not any(moved["matrices"] + moved["indexer"]) and not all(moved["others"])


def test_rl_goes_on_from_the_file_and_the_indexer_stays(tmp_path):
    config = own(tmp_path)
    pretrain.train(config)
    sizes = {"steps": 2, "groups_per_step": 4, "slots": 16, "group_size": 4, "eval_every": 2}
    how = Config(task="reverse:4", init=config.out, out=str(tmp_path / "run"), **sizes)
    train_sync.train(dataclasses.replace(how, attention="dsa", scoring="indexer"))
    learned = load_checkpoint(tmp_path / "run")["weights"]
    before, after = stored(config), stored(config)
    after.flat.copy_(learned)
    assert all(same(weights(before)["indexer"], weights(after)["indexer"]))
    assert not all(same(weights(before)["matrices"], weights(after)["matrices"]))


def test_the_loss_of_a_text_is_that_of_every_next_token(tmp_path, monkeypatch):
    """In one piece and in pieces of a few tokens, with gradients."""
    config = own(tmp_path)
    model, tokenizer = pretrain.sparse_model(config)
    learned, held_out = pretrain.read_text(config, tokenizer)
    assert learned + held_out == tokenizer.encode((tmp_path / "text.txt").read_text())
    batch = next(pretrain.row_batches(learned, config))
    rows = batch[0]
    assert rows.shape == (2, 64) and rows[0].tolist() in [
        learned[i : i + 64] for i in range(0, len(learned), 64)
    ]
    hidden = model(pack_tokens(list(rows))).view(2, 64, -1)
    logits = model.logits(hidden[:, :-1]).flatten(0, 1)
    expected = torch.nn.functional.cross_entropy(logits, rows[:, 1:].flatten())
    found = []
    for piece in (1 << 24, 512 * 7):
        monkeypatch.setattr(pretrain, "PIECE", piece)
        loss, kl, exact = losses_of(model, batch, "sparse")
        assert exact.shape == (2, 63)
        torch.testing.assert_close(loss, expected, atol=1e-5, rtol=0)
        found.append(
            torch.cat([g.flatten() for g in sum(gradients(model, loss + kl).values(), [])])
        )
    torch.testing.assert_close(*found, atol=1e-5, rtol=1e-4)


def test_episodes_are_what_rl_sees():
    task = reward.make_task("guess")
    tokens = list(itertools.islice(pretrain.episodes(task, "eval"), 60))
    said = own_tokenizer().decode_bytes(tokens).decode()
    assert re.match(r"guess( \d+[<>])* \d+guess", said), said
    task = reward.make_task("reverse:4")
    said = (
        own_tokenizer()
        .decode_bytes(list(itertools.islice(pretrain.episodes(task, "train"), 40)))
        .decode()
    )
    problem = task.reset(0, "train")
    assert said.startswith(problem["prompt"] + problem["answer"] + "<|end|>")


@pytest.mark.parametrize(
    "flags, said",
    [
        ({"words": 9, "length": 500}, "--length 500: must be at most"),
        ({"words": 1, "text": "", "task": ""}, "must be one of the two"),
        ({"text": "none.txt"}, "--text none.txt: must be a text file"),
        ({"text": __file__.replace(".py", ".bin")}, "must be a text file"),
        ({"text": "", "task": "gues"}, "task 'gues': allowed is one of"),
        ({"out": "no/such/folder/x.pt"}, "must be a new file in a folder that exists"),
        ({"top_k": 0}, "--top-k 0: must be at least 1"),
        ({"length": 200000}, "--length 200000: must be at least 2 and at most 131072"),
    ],
)
def test_a_mistake_costs_one_line(tmp_path, monkeypatch, capsys, flags, said):
    config = own(tmp_path, **flags)
    (tmp_path / "latin").write_bytes(b"caf\xe9 " * 1000)
    if ".bin" in config.text:
        config = dataclasses.replace(config, text=str(tmp_path / "latin"))
    argv = [f"{config_room.written(name)}={value}" for name, value in vars(config).items()]
    monkeypatch.setattr("sys.argv", ["pretrain.py", *argv])
    with pytest.raises(SystemExit) as stopped:
        run_main(pretrain.train, pretrain.__doc__, SparseConfig)
    line = capsys.readouterr().err
    assert stopped.value.code == 2 and line.count("\n") == 1 and said in line, line
    assert not (tmp_path / "out.pt").exists()


# -------------------------------------------------------------------------------------- the recipe


def test_accuracy_is_what_the_generator_answers():
    """The exam's answers are replaced by what the sparse generator says, greedily: all correct."""
    model, config = make(), Config(task="recall:64", slots=8, group_size=1, temperature=0.0)
    task = reward.make_task(config.task)
    generator = Generator(model, make_environment(config, task), config, task.context)
    said = generate(generator, [Group(i, 0, task.reset(i, "eval")) for i in range(8)])
    length = task.max_prompt_tokens + 3  # of answers that do not end early
    tokens = [g.trajectories[0].tokens.tolist() for g in said]
    tokens = torch.tensor([t for t in tokens if len(t) == length])
    _, columns, alphabet = recipe.exam(64, 1)
    assert len(tokens) >= 4 and recipe.accuracy(model, tokens, columns, alphabet, "dsa") == 1.0
    assert recipe.accuracy(model, tokens, columns, alphabet, "dense") < 1.0
    tokens[0, -2] = alphabet[(alphabet == tokens[0, -2]).int().argmax() - 1]  # one wrong digit
    wrong = recipe.accuracy(model, tokens, columns, alphabet, "dsa")
    assert wrong == pytest.approx(1 - 1 / len(tokens))


def test_the_whole_recipe_leaves_its_table(tmp_path, capsys):
    steps = dict(grow_steps=2, dense_steps=1, warmup_steps=1, sparse_steps=1)
    recipe.bench_recipe(tmp_path, RecipeConfig(top_k=8, tokens=64, problems=4, **steps))
    record = json.loads((tmp_path / "recipe.json").read_text())
    run = record["runs"][0]
    variants = "dense, random indexer, mean keys, warm-up only, full recipe, "
    variants += "dense, after it"
    assert ", ".join(run["accuracy"]) == variants
    assert all(set(row) == {"16", "32", "64", "128"} for row in run["accuracy"].values())
    assert record["machine"]["cores"] and record["settings"]["top_k"] == 8
    assert sum(line.startswith("| full recipe") for line in tables_of(tmp_path)) == 1
