"""The training stages: who learns from which loss, what the indexer is taught, and the recipe.

Isolation is exact: zeros, not small numbers. The indexer's target is checked against Python loops,
and the masks that stand in for sparse attention against the sparse attention of dsa.py.
"""

import dataclasses
import json
import math

import pytest
import torch

import pretrain
import reward
from lab import recipe
from model import GPT, attend_packed, dense_packed, pack_tokens
from pretrain import RecipeConfig, indexer_loss, losses_of, make_batch, parts_of, watched_attention
from rollout import Generator, generate, make_environment
from runtime.config import Config, UserError, parse
from runtime.messages import Group
from runtime.tokenizer import own_tokenizer

SMALL = RecipeConfig(chunk_size=2, top_k=4, tokens=128)  # attends to 8 keys: prompts of 16 to 128
SHAPES = pytest.mark.parametrize("chunk_size, top_k", [(1, 8), (2, 4), (4, 4)])


def make(chunk_size=2, top_k=4) -> GPT:
    """A small model, some way from its initialisation, so that nothing is uniform or zero."""
    model = pretrain.make_recipe_model(RecipeConfig(chunk_size=chunk_size, top_k=top_k), 0)
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
    tokens, columns = pretrain.make_text(task, 5)
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
    exam, *_ = pretrain.exam(32, 64)
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
    pretrain.train_stage(model, SMALL, 0, stage, 3, 0)
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
        steps.append(
            pretrain.train_step(model, make_batch(32, 0, 0, 128), "sparse", optimizers, 1.0)
        )
        twins.append(weights(model)["indexer"])
    assert steps[0]["loss"] != steps[1]["loss"] and steps[0]["kl"] == steps[1]["kl"]
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


def test_an_indexer_that_scores_the_logarithm_of_the_mass_has_no_loss():
    scores, mass = torch.full((3, 4), -torch.inf), torch.zeros(3, 4)
    mass[1, :2], scores[1, 0] = torch.tensor([0.3, 0.7]), 2.0  # one candidate, and the own chunk
    mass[2] = torch.tensor([0.1, 0.2, 0.3, 0.4])
    scores[2, :3] = mass[2, :3].log() + 5
    assert indexer_loss(scores, mass).abs() < 1e-6
    scores[2, 0] += 1
    assert indexer_loss(scores, mass) > 0.01


def test_learning_lowers_the_divergence():
    model, config = make(), RecipeConfig(chunk_size=2, top_k=4, tokens=256)
    batch = make_batch(64, 0, 0, 256)
    before = losses_of(model, batch, "warm-up")[1]
    pretrain.train_stage(model, config, 0, "warm-up", 12, 0)
    assert losses_of(model, batch, "warm-up")[1] < 0.9 * before


# -------------------------------------------------------------------------------------- the recipe


def test_accuracy_is_what_the_generator_answers():
    """The exam's answers are replaced by what the sparse generator says, greedily: all correct."""
    model, config = make(), Config(task="recall:64")
    task = reward.make_task(config.task)
    sizes = dict(slots=8, capacity=task.context, group_size=1)
    generator = Generator(model, make_environment(config, task), **sizes, temperature=0)
    said = generate(generator, [Group(i, 0, task.reset(i, "eval")) for i in range(8)])
    length = task.max_prompt_tokens + 3  # of answers that do not end early
    tokens = [g.trajectories[0].tokens.tolist() for g in said]
    tokens = torch.tensor([t for t in tokens if len(t) == length])
    _, columns, alphabet = pretrain.exam(64, 1)
    assert len(tokens) >= 4 and pretrain.accuracy(model, tokens, columns, alphabet, "dsa") == 1.0
    assert pretrain.accuracy(model, tokens, columns, alphabet, "dense") < 1.0
    tokens[0, -2] = alphabet[(alphabet == tokens[0, -2]).int().argmax() - 1]  # one wrong digit
    wrong = pretrain.accuracy(model, tokens, columns, alphabet, "dsa")
    assert wrong == pytest.approx(1 - 1 / len(tokens))


def test_the_whole_recipe_leaves_its_files(tmp_path, capsys):
    steps = dict(grow_steps=2, dense_steps=1, warmup_steps=1, sparse_steps=1, rl_steps=1)
    recipe.bench_recipe(tmp_path, RecipeConfig(top_k=8, tokens=64, problems=4, **steps))
    record = json.loads((tmp_path / "recipe.json").read_text())
    run = record["runs"][0]
    variants = "dense, random indexer, mean keys, warm-up only, full recipe, after RL"
    assert ", ".join(run["accuracy"]) == variants
    assert all(set(row) == {"16", "32", "64", "128"} for row in run["accuracy"].values())
    assert record["machine"]["cores"] and record["settings"]["top_k"] == 8
    assert record["table"] in capsys.readouterr().out
    stored = {
        s: torch.load(next(tmp_path.rglob(f"{s}.pt"))) for s in ("dense", "warm-up", "sparse")
    }
    shape, model = stored["sparse"]["shape"], make(1, 8)
    assert shape == model.config.__dict__
    names = [name for name, p in model.named_parameters() for _ in range(p.numel())]
    indexer = torch.tensor(["indexer" in name for name in names])
    moved = stored["dense"]["weights"] != stored["warm-up"]["weights"]
    assert moved[indexer].any() and not moved[~indexer].any()


def test_the_verdict_looks_at_every_seed():
    lengths = [16, 32, 64, 128]

    def run(**changed) -> dict:  # as recipe.py's, with one value put in place of a good one
        good = {"dense": 1.0, "random indexer": 0.0, "warm-up only": 0.5, "full recipe": 0.99}
        rows = {variant: dict.fromkeys(lengths, value) for variant, value in good.items()}
        rows |= {variant: rows[variant] | row for variant, row in changed.items()}
        return {"accuracy": rows}

    def held(*runs: dict) -> list:
        strict, *others = recipe.verdict(list(runs), lengths).values()
        return [int(strict.split()[1]), *others]

    assert held(run(), run()) == [6, True, True]
    assert held(run(**{"warm-up only": {16: 1.0}})) == [3, True, True]  # 2 times: not asked for
    assert held(run(), run(**{"warm-up only": {128: 0.99}})) == [5, True, True]  # a tie
    assert held(run(), run(**{"warm-up only": {128: 0.995}})) == [5, False, True]
    assert held(run(**{"random indexer": {32: 0.5}}), run()) == [5, False, True]
    assert held(run(), run(**{"full recipe": {64: 0.98}})) == [6, True, False]


def test_too_few_keys_are_refused(tmp_path):
    with pytest.raises(UserError, match="--top-k 4: must attend to at least 8 keys"):
        recipe.bench_recipe(tmp_path, RecipeConfig(top_k=4))


@pytest.mark.parametrize(
    "flags, said",
    [
        (["--top-k", "0"], "--top-k 0: must be at least 1"),
        (["--chunk-size", "3"], "--chunk-size 3: must be a power of two"),
        (["--seeds", "none"], "--seeds"),
        (["--depth", "9"], "--depth"),
    ],
)
def test_a_wrong_flag_costs_one_line(flags, said, capsys):
    with pytest.raises(SystemExit) as stopped:
        parse(recipe.__doc__, flags, RecipeConfig)
    line = capsys.readouterr().err
    assert stopped.value.code == 2 and line.count("\n") == 1 and said in line
