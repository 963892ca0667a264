"""Sampling from the likeliest tokens only, by enumeration on small vocabularies: what is kept, what
is drawn, what travels, and what the learner makes of it."""

import dataclasses
import json
import math
import pickle
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from test_replay import replay, wander
from test_rollout import LETTERS, VOCAB, assert_same, environment, group_of, learners, make, play
from toys import group_from_parts, group_to_parts

import logprobs as logprobs_room
import train_async
import train_sync
from learner import make_learner
from logprobs import generated_logprobs, token_logprobs
from model import pack_tokens
from reward import capacity_of, make_task, task_of, verify_group
from rollout import Generator, generate, noise_keys, sample
from runtime import run as run_room
from runtime.checkpoint import completed_groups, load_tensors, to_tensors
from runtime.config import Config
from runtime.folder import read_lines
from runtime.messages import ARRAYS, Group, group_flaw
from runtime.models import make_model
from tasks.environment import make_environment
from tasks.exam import Host, evaluate, verify_alone

CUTS = [(0, 0.8), (5, 1.0), (5, 0.8), (1, 1.0), (0, 0.01), (40, 0.999)]
ALPHABET = torch.arange(LETTERS)


def naive_kept(logits: list[float], temperature: float, top_k: int, top_p: float) -> dict:
    """The distribution that is left: {place: probability}, likeliest first."""
    weights = [math.exp(x / temperature) for x in logits]
    order = sorted(range(len(weights)), key=lambda i: (-weights[i], i))[: top_k or None]
    total, kept = sum(weights[i] for i in order), {}
    for i in order:
        kept[i] = weights[i]
        if sum(kept.values()) / total >= top_p:
            break
    return {i: weight / sum(kept.values()) for i, weight in kept.items()}


def test_what_is_kept_is_that_of_a_plain_loop():
    chance = np.random.default_rng(0)
    for _ in range(300):
        size, temperature = int(chance.integers(1, 30)), float(chance.uniform(0.3, 3))
        top_k, top_p = int(chance.integers(0, 12)), float(chance.choice([1.0, chance.uniform()]))
        logits = torch.from_numpy(chance.normal(0, 2, (4, size))).float()
        uniform = torch.from_numpy(chance.uniform(0.001, 0.999, 4)).float()
        chosen, logprobs, *kept = sample(logits, uniform, temperature, top_k, top_p)
        assert bool(kept) == (top_k > 0 or top_p < 1)
        for b in range(4):
            wanted = naive_kept(logits[b].double().tolist(), temperature, top_k, top_p)
            if kept:
                assert kept[0][b].nonzero()[:, 0].tolist() == sorted(wanted)
            assert abs(float(logprobs[b]) - math.log(wanted[int(chosen[b])])) < 1e-5
            assert abs(naive_draw(wanted, float(uniform[b])) - int(chosen[b])) == 0


def naive_draw(kept: dict, number: float) -> int:
    """Inverse transform in order of the places."""
    for place in sorted(kept):
        number -= kept[place]
        if number < 0:
            break
    return place


@pytest.mark.parametrize("top_k, top_p", [(0, 0.7), (4, 1.0), (6, 0.9)])
def test_every_token_is_drawn_as_often_as_it_should_be(top_k, top_p):
    """By 100,000 evenly spaced numbers."""
    n, logits = 100_000, torch.tensor([0.3, 2.0, -1.0, 1.2, 1.1, -3.0, 0.9, 0.2])
    uniform = ((torch.arange(n).double() + 0.5) / n).float()
    chosen, _, _ = sample(logits.expand(n, 8), uniform, 0.8, top_k, top_p)
    kept = naive_kept(logits.double().tolist(), 0.8, top_k, top_p)
    wanted = torch.tensor([kept.get(i, 0.0) for i in range(8)])
    found = torch.bincount(chosen, minlength=8) / n
    assert 0 < len(kept) < 8 and float((found - wanted).abs().max()) < 1e-4
    assert (found[wanted == 0] == 0).all()


def test_of_equal_tokens_the_lower_one_is_kept():
    half = torch.tensor([0.5])
    for logits, cut, wanted in (
        ([1.0] * 6, (2, 1.0), [0, 1]),
        ([1.0] * 4, (0, 0.5), [0, 1]),  # half of the mass is reached, exactly
        ([1.0] * 4, (0, 0.51), [0, 1, 2]),
        ([0.0, 1.0, 0.0, 1.0, 0.0], (3, 1.0), [0, 1, 3]),
        ([0.0, 1.0], (99, 1.0), [0, 1]),
        ([7.0], (0, 0.01), [0]),
    ):
        _, _, kept = sample(torch.tensor([logits]), half, 1.0, *cut)
        assert kept[0].nonzero()[:, 0].tolist() == wanted


def test_without_a_cut_nothing_is_sorted(monkeypatch):
    monkeypatch.setattr(torch.Tensor, "sort", None)
    logits = torch.randn(5, 9)
    chosen, logprobs = sample(logits, torch.full((5,), 0.3), 0.7)
    wanted = torch.log_softmax(logits / 0.7, -1)
    assert torch.equal(logprobs, wanted[torch.arange(5), chosen])


# ------------------------------------------------------------------- generator and learner agree


def plain(t):
    """The episode without what was kept."""
    empty = np.empty(0, np.int32)
    return dataclasses.replace(t, kept_sizes=empty, kept=empty)


@pytest.mark.parametrize("cut", CUTS)
@pytest.mark.parametrize("temperature", [1.0, 0.6])
def test_the_learner_finds_the_generators_logprobs(cut, temperature):
    """Episodes of two turns; without the sets it finds others."""
    model = make()
    found = play([group_of(i) for i in range(3)], model, cut=cut, temperature=temperature)
    episodes = [found[i, s] for i in range(3) for s in range(4)]
    assert not any(found["by"].kept)  # nothing is left behind
    told = np.concatenate([t.logprobs[t.loss_mask] for t in episodes])
    right = learners(model, episodes, ALPHABET, temperature)
    wrong = learners(model, [plain(t) for t in episodes], ALPHABET, temperature)
    np.testing.assert_allclose(right, told, rtol=0, atol=1e-5)
    assert np.abs(wrong - told).max() > (1e-5 if cut == CUTS[-1] else 0.05)
    assert all((t.generated, t.kept.dtype) == (len(t.kept_sizes), np.int32) for t in episodes)
    assert cut[0] == 0 or max(t.kept_sizes.max() for t in episodes) <= cut[0]


def test_an_episode_keeps_the_same_alone_and_in_a_full_batch():
    model, env = make(), environment(turns=3, turn_tokens=9)
    full = play([group_of(i) for i in range(7)], model, env, cut=(5, 0.8))
    for i in (0, 4):
        alone = play([group_of(i)], model, env, cut=(5, 0.8))
        for s in range(4):
            assert_same(alone[i, s], full[i, s])
            assert np.array_equal(alone[i, s].kept, full[i, s].kept)
            assert np.array_equal(alone[i, s].kept_sizes, full[i, s].kept_sizes)


def test_episodes_that_end_in_trouble_have_their_sets():
    env = environment(lambda requests: ["env_error: no"] * len(requests), turns=2, stop=())
    env = dataclasses.replace(env, max_turns=2)
    found = play([group_of(1)], make(), env, cut=(3, 1.0))
    for s in range(4):
        t = found[1, s]
        assert t.failed and t.kept_sizes.tolist() == [3] * t.generated
        assert set(t.tokens[t.loss_mask]) <= set(t.kept)


def logprob_gradients(model, episodes, config=None):
    """Log-probs and entropies [M], and the gradient of a mixture of both [P]."""
    learner, config = SimpleNamespace(alphabet=ALPHABET, allowed=None), config or Config()
    model.flat_grad.zero_()
    batch = [(t, 0.0) for t in episodes]
    logprobs, entropy, _ = token_logprobs(model, batch, learner, config)
    weights = torch.linspace(-1, 1, len(logprobs))
    (weights @ logprobs + 0.3 * entropy.sum()).backward()
    return logprobs.detach(), entropy.detach(), model.flat_grad.clone()


def test_pieces_and_all_at_once_are_the_same(monkeypatch):
    model = make()
    found = play([group_of(i) for i in range(3)], model, cut=(5, 0.8))
    episodes = [found[i, s] for i in range(3) for s in range(4)]
    whole = logprob_gradients(model, episodes)
    assert all(torch.isfinite(x).all() for x in whole)
    for rows in (1, 7, 64):
        monkeypatch.setattr(logprobs_room, "PIECE", rows * LETTERS)
        for x, y in zip(logprob_gradients(model, episodes), whole, strict=True):
            assert float((x - y).norm() / y.norm()) < 1e-6


def test_the_entropy_is_that_of_the_kept_tokens():
    model = make()
    found = play([group_of(2)], model, size=1, cut=(5, 0.8))
    t = found[2, 0]
    _, entropy, _ = logprob_gradients(model, [t])
    with torch.no_grad():
        logits = model.logits(model(pack_tokens([t.tokens])), ALPHABET)
    ends = t.kept_sizes.cumsum()
    for i, at in enumerate(np.flatnonzero(t.loss_mask)):
        own = t.kept[ends[i] - t.kept_sizes[i] : ends[i]]
        p = torch.softmax(logits[at - 1][torch.from_numpy(own).long()], -1)
        assert abs(float(entropy[i]) + float((p * p.log()).sum())) < 1e-5


def test_the_policy_gradient_is_unbiased_with_the_sets_and_biased_without():
    """Every answer of two letters, weighted with its probability under the cut policy; against the
    gradient of the expected reward of this policy, its sets held fixed."""
    model, prompt, cut = make(init_std=0.2), [20, 25, 30], (5, 0.9)
    half = torch.tensor([0.5])

    def kept_after(tokens) -> list[int]:
        with torch.no_grad():
            logits = model.logits(model(pack_tokens([tokens])), ALPHABET)[-1:]
        (kept,) = sample(logits, half, 1.0, *cut)[2]
        return kept.nonzero()[:, 0].tolist()

    first, answers, sets = kept_after(prompt), [], []
    for a in first:
        second = kept_after([*prompt, a])
        answers += [(a, b) for b in second]
        sets += [(first, second) for _ in second]
    assert 10 < len(answers) <= 25
    rewards = torch.tensor([((3 * a + 5 * b) % 7) / 7 for a, b in answers])
    packed = pack_tokens([[*prompt, *answer] for answer in answers])
    rows = torch.arange(len(packed.tokens)).view(len(answers), -1)[:, len(prompt) :]

    def gradient_of(objective) -> torch.Tensor:
        model.flat_grad.zero_()
        objective.backward()
        return model.flat_grad.clone()

    logits = model.logits(model(packed), ALPHABET)[rows - 1]  # [R, 2, V]
    exact = []
    for i, (answer, both) in enumerate(zip(answers, sets, strict=True)):
        parts = [logits[i, t, both[t]].log_softmax(-1)[both[t].index(answer[t])] for t in (0, 1)]
        exact.append(sum(parts))
    chances = torch.stack(exact).exp()
    assert abs(float(chances.detach().sum()) - 1) < 1e-5
    wanted = gradient_of(chances @ rewards)
    chances = chances.detach()
    weights = chances * (rewards - chances @ rewards)

    flat_sets = [own for both in sets for own in both]
    sizes = torch.tensor([len(own) for own in flat_sets])
    kept = torch.tensor([token for own in flat_sets for token in own])
    errors = []
    for told in ((sizes, kept), ()):
        logprobs, *_ = generated_logprobs(model, packed, rows.flatten(), ALPHABET, 1.0, *told)
        found = gradient_of(weights @ logprobs.view(-1, 2).sum(1))
        errors.append(float((found - wanted).norm() / wanted.norm()))
    print(f"relative error with the sets {errors[0]:.1e}, without {errors[1]:.2f}")
    assert errors[0] < 1e-5 and errors[1] > 0.05


# ------------------------------------------------------------------------ what travels, and how


def cut_group() -> Group:
    """Two episodes of two turns, generated with a cut."""
    found = play([group_of(3)], make(), size=2, cut=(5, 0.8))
    group = pickle.loads(pickle.dumps(Group(3, 0, {}, [found[3, 0], found[3, 1]])))
    group.laid = None  # a test may change its episodes
    return group


def flaw_of(group: Group, cut=(5, 0.8)) -> str | None:
    """Where it is made, and where it arrives."""
    found = group_flaw(group, 2, 0, VOCAB, cut)
    assert group_flaw(pickle.loads(pickle.dumps(group)), 2, 0, VOCAB, cut) == found
    return found


def test_what_was_kept_arrives(tmp_path):
    """In a message, and through a checkpoint's file."""
    group = cut_group()
    torch.save({"completed": [to_tensors(group)]}, tmp_path / "state.pt")
    (stored,) = completed_groups(load_tensors(tmp_path / "state.pt"))
    for again in (pickle.loads(pickle.dumps(group)), stored):
        assert again.digest == group.digest and flaw_of(again) is None
        for t, other in zip(again.trajectories, group.trajectories, strict=True):
            for name in ARRAYS:
                assert np.array_equal(getattr(t, name), getattr(other, name))


def test_the_digest_covers_what_was_kept_and_is_as_before_without_it():
    for name in ("kept", "kept_sizes"):
        group = cut_group()
        before = group.digest
        getattr(group.trajectories[1], name)[0] += 1
        assert group.digest != before
    header, arrays = group_to_parts(cut_group())
    bare = {name: array for name, array in arrays.items() if not name.startswith("kept")}
    group = group_from_parts(header, bare)
    assert group.digest != cut_group().digest and group.trajectories[0].kept.size == 0


def change(name: str, place: int, amount: int):
    """Add to a number of the first episode's array."""

    def damage(group):
        getattr(group.trajectories[0], name)[place] += amount

    return damage


def move(group):
    """A set goes from the second episode's front to the first one's end: the totals are right."""
    first, second = group.trajectories
    n = second.kept_sizes[0]
    first.kept_sizes = np.append(first.kept_sizes, second.kept_sizes[:1])
    first.kept, second.kept = np.append(first.kept, second.kept[:n]), second.kept[n:]
    second.kept_sizes = second.kept_sizes[1:]


def empty_set(group):
    t = group.trajectories[0]
    t.kept, t.kept_sizes = t.kept[t.kept_sizes[0] :], np.append(np.int32([0]), t.kept_sizes[1:])


def other_token(group):
    """A token that was sampled becomes one that was not kept."""
    t = group.trajectories[0]
    t.tokens[np.flatnonzero(t.loss_mask)[0]] = LETTERS + 1


def twice(group):
    t = group.trajectories[0]
    t.kept[: t.kept_sizes[0]] = t.tokens[np.flatnonzero(t.loss_mask)[0]]


def setting(name: str, change):
    return lambda group: vars(group.trajectories[1]).update(
        {name: change(getattr(group.trajectories[1], name))}
    )


@pytest.mark.parametrize(
    "damage, words",
    [
        (change("kept", 0, VOCAB), "token id"),
        (change("kept", -1, -VOCAB), "token id -"),
        (change("kept_sizes", 0, 1), "arrays"),
        (change("kept_sizes", 0, -1), "arrays"),
        (setting("kept", lambda a: a[:-1]), "arrays"),
        (setting("kept", lambda a: np.append(a, a[:1])), "arrays"),
        (setting("kept", lambda a: a.astype(np.int64)), "arrays"),
        (setting("kept_sizes", lambda a: a.astype(np.float32)), "arrays"),
        (setting("kept_sizes", lambda a: a[:-1]), "arrays"),
        (lambda group: group.trajectories.__setitem__(0, plain(group.trajectories[0])), "arrays"),
        (move, "arrays"),
        (empty_set, "not, once, in the set"),
        (other_token, "not, once, in the set"),
        (twice, "not, once, in the set"),
    ],
)
def test_damaged_sets_are_refused(damage, words):
    group = cut_group()
    assert flaw_of(group) is None
    if damage is twice:
        assert group.trajectories[0].kept_sizes[0] > 1
    damage(group)
    assert words in flaw_of(group)
    assert words in flaw_of(pickle.loads(pickle.dumps(group)))


def test_a_negative_size_is_refused():
    """The totals are right. On arrival ValueError is a refusal, too."""
    group = cut_group()
    t = group.trajectories[0]
    t.kept_sizes[:2] = t.kept_sizes[:2].sum() + 9, -9
    with pytest.raises(ValueError, match="negative"):
        flaw_of(group)


def test_sets_swapped_between_two_tokens_are_refused():
    group = cut_group()
    t = group.trajectories[0]
    t.kept = np.roll(t.kept, 1)
    assert "not, once, in the set" in flaw_of(group)


def test_sets_that_must_not_be_there_or_must_are_named():
    group = cut_group()
    assert "arrays" in flaw_of(group, ())
    group.trajectories = [plain(t) for t in group.trajectories]
    assert flaw_of(group, ()) is None and "arrays" in flaw_of(group)


# --------------------------------------------------------------------------------- whole runs


@pytest.mark.parametrize("swap", ["keep", "recompute"])
def test_a_run_with_a_cut_is_replayed_to_the_same_weights(tmp_path, swap):
    wander(tmp_path / "run", 4, 2, swap=swap, top_p=0.9)
    replay(tmp_path / "run")


SMALL = {"groups_per_step": 4, "group_size": 4, "slots": 16, "steps": 6, "eval_every": 3}
SMALL |= {"top_p": 0.9, "top_k_sampling": 5, "reference_every": 2, "rollout_workers": 1}


def config_of(folder=None, **flags) -> Config:
    return dataclasses.replace(Config(), **{"out": str(folder or ""), **SMALL, **flags})


@pytest.fixture
def few_held_out_problems(monkeypatch):
    few = lambda config: dataclasses.replace(task_of(config), eval_size=8)  # noqa: E731
    monkeypatch.setattr(run_room, "task_of", few)


def summary_of(folder) -> dict:
    return json.loads((folder / "summary.json").read_text())


def test_staleness_zero_with_a_cut_is_bitwise_synchronous(tmp_path, few_held_out_problems):
    flags = {"max_staleness": 0, "eval_samples": 3}
    train_sync.train(config_of(tmp_path / "sync", **flags))
    train_async.train(config_of(tmp_path / "async", **flags))
    one, other = (summary_of(tmp_path / name) for name in ("async", "sync"))
    assert one["weights_sha256"] == other["weights_sha256"]
    assert one["eval"] == other["eval"]
    rows = read_lines(tmp_path / "sync" / "metrics.jsonl")
    assert all(abs(row["ratio_max"] - 1) < 1e-3 for row in rows if "ratio_max" in row)


def test_a_run_with_a_cut_goes_on_where_it_was(tmp_path, few_held_out_problems):
    flags = {"lr_end": 1.0, "eval_every": 6}
    train_sync.train(config_of(tmp_path / "whole", **flags))
    train_sync.train(config_of(tmp_path / "run", **{**flags, "steps": 3}))
    train_sync.train(dataclasses.replace(Config(), resume=str(tmp_path / "run"), steps=6))
    one, other = (summary_of(tmp_path / name) for name in ("whole", "run"))
    assert one["weights_sha256"] == other["weights_sha256"]


# --------------------------------------------------------------------------- sampled evaluation


def test_evaluation_is_greedy_or_the_mean_over_samples(tmp_path):
    config = config_of(eval_samples=5, temperature=0.9)
    task = dataclasses.replace(task_of(config), eval_size=12)
    learner = make_learner(config, task, make_model(config, task))
    host = Host(config, tmp_path / "log")
    found = evaluate(learner, config, task, host)
    assert found == evaluate(learner, config, task, host)
    greedy = evaluate(learner, dataclasses.replace(config, eval_samples=0), task, host)
    assert greedy == evaluate(learner, Config(), task, host) and greedy != found
    host.close()

    generator = Generator(
        learner.model,
        make_environment(config, task),
        slots=12,
        capacity=capacity_of(config, task),
        group_size=5,
        temperature=0.9,
        cut=(5, 0.9),
        seed=~config.seed,
    )
    groups = [Group(i, 0, task.reset(i, "eval")) for i in range(12)]
    verdicts = [verify_group(g, task, config) for g in generate(generator, groups)]
    rewards = [verdict.reward for own in verdicts for verdict in own]
    turns = [len(t.turns) for g in groups for t in g.trajectories]
    assert len(rewards) == 60 and len(set(rewards)) > 1
    assert found["reward"] == np.mean(rewards) and found["turns"] == np.mean(turns)
    assert found["solved"] == np.mean(np.array(rewards) >= task.solved)


def test_no_training_run_has_the_noise_of_an_evaluation():
    for seed in (0, 7, 2**31 - 1):
        evaluation = set(noise_keys(~seed, 3, 50))
        assert len(evaluation) == 50
        assert not evaluation & {key for s in (0, 7, 2**31 - 1) for key in noise_keys(s, 3, 50)}


HOSTILE = """
import os

from reward import Step, Task


def make(argument, seed, tokenizer):
    def step(problem, answers):
        if answers[-1] == "b":
            os._exit(3)
        return Step(None, 1.0, True)

    letters = (*tokenizer.encode("a"), *tokenizer.encode("b"), tokenizer.end)
    return Task(lambda index, split: {"prompt": "a"}, step, letters, 1, 2, eval_size=2)
"""


def test_an_episode_that_ends_the_examiners_child_costs_no_other(tmp_path):
    (tmp_path / "mine.py").write_text(HOSTILE)
    config = config_of(task=str(tmp_path / "mine.py"))
    task, group = make_task(config.task), Group(0, 0, {"prompt": "a"})
    found = play([group_of(0)], make(), size=3, cut=(3, 1.0))
    for i, text in enumerate("aba"):
        tokens = np.array([*task.tokenizer.encode("a"), *task.tokenizer.encode(text)], np.int32)
        t = dataclasses.replace(found[0, i], tokens=tokens, turns=[(1, 2)])
        group.trajectories.append(t)
    host = Host(config, tmp_path / "log")
    verify_alone([group], host)
    host.close()
    assert [t.reward for t in group.trajectories] == [1.0, 0.0, 1.0] and host.deaths == 1
    assert [t.finish for t in group.trajectories] == ["stop", "verifier_error", "stop"]
