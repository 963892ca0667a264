"""Nucleus sampling on small vocabularies, by enumeration: what is kept, drawn, and sent,
and what the learner makes of it."""

import dataclasses
import json
import math
import pickle
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from test_replay import replay, wander
from test_rollout import LETTERS, assert_same, environment, group_of, learners, make, play

import logprobs as logprobs_room
import train_async
import train_sync
from logprobs import generated_logprobs, token_logprobs
from methods.sampling import nucleus
from model import pack_tokens
from reward import task_of
from rollout import sample
from runtime import run as run_room
from runtime.config import Config
from runtime.folder import read_lines
from runtime.messages import ARRAYS, Group

ALPHABET = torch.arange(LETTERS)


def cut_sample(logits, uniform, temperature: float, top_p: float) -> tuple:
    """What the generator does: indices, log-probs, and what was kept."""
    kept = nucleus(logits / temperature, top_p)
    return *sample(logits.masked_fill(~kept, -torch.inf), uniform, temperature), kept


def naive_kept(logits: list[float], temperature: float, top_p: float) -> dict:
    """The distribution that is left: {place: probability}, likeliest first."""
    weights = [math.exp(x / temperature) for x in logits]
    kept = {}
    for i in sorted(range(len(weights)), key=lambda i: (-weights[i], i)):
        kept[i] = weights[i]
        if sum(kept.values()) / sum(weights) >= top_p:
            break
    return {i: weight / sum(kept.values()) for i, weight in kept.items()}


def naive_draw(kept: dict, number: float) -> int:
    """Inverse transform in order of the places."""
    for place in sorted(kept):
        number -= kept[place]
        if number < 0:
            break
    return place


def test_what_is_kept_is_that_of_a_plain_loop():
    chance = np.random.default_rng(0)
    for _ in range(300):
        size, temperature = int(chance.integers(1, 30)), float(chance.uniform(0.3, 3))
        top_p = float(chance.uniform())
        logits = torch.from_numpy(chance.normal(0, 2, (4, size))).float()
        uniform = torch.from_numpy(chance.uniform(0.001, 0.999, 4)).float()
        chosen, logprobs, kept = cut_sample(logits, uniform, temperature, top_p)
        for b in range(4):
            wanted = naive_kept(logits[b].double().tolist(), temperature, top_p)
            assert kept[b].nonzero()[:, 0].tolist() == sorted(wanted)
            assert abs(float(logprobs[b]) - math.log(wanted[int(chosen[b])])) < 1e-5
            assert naive_draw(wanted, float(uniform[b])) == int(chosen[b])


@pytest.mark.parametrize(
    "logits, top_p, wanted",
    [
        ([1.0] * 4, 0.5, [0, 1]),  # half of the mass is reached, exactly
        ([1.0] * 4, 0.51, [0, 1, 2]),
        ([0.0, 1.0, 0.0, 1.0, 0.0], 0.8, [0, 1, 2, 3]),
        ([7.0], 0.01, [0]),
    ],
)
def test_of_equal_tokens_the_lower_one_is_kept(logits, top_p, wanted):
    assert nucleus(torch.tensor([logits]), top_p)[0].nonzero()[:, 0].tolist() == wanted


# ------------------------------------------------------------------- generator and learner agree


def plain(t):
    """The episode without what was kept."""
    empty = np.empty(0, np.int32)
    return dataclasses.replace(t, kept_sizes=empty, kept=empty)


@pytest.mark.parametrize("top_p", [0.8, 0.01, 0.999])
@pytest.mark.parametrize("temperature", [1.0, 0.6])
def test_the_learner_finds_the_generators_logprobs(top_p, temperature):
    """Episodes of two turns; without the sets it finds others."""
    model = make()
    found = play([group_of(i) for i in range(3)], model, top_p=top_p, temperature=temperature)
    episodes = [found[i, s] for i in range(3) for s in range(4)]
    assert not found["by"].kept.sets  # nothing is left behind
    told = np.concatenate([t.logprobs[t.loss_mask] for t in episodes])
    right = learners(model, episodes, ALPHABET, temperature)
    wrong = learners(model, [plain(t) for t in episodes], ALPHABET, temperature)
    np.testing.assert_allclose(right, told, rtol=0, atol=1e-5)
    assert np.abs(wrong - told).max() > (1e-5 if top_p == 0.999 else 0.05)
    assert all((t.generated, t.kept.dtype) == (len(t.kept_sizes), np.int32) for t in episodes)


def test_an_episode_keeps_the_same_alone_and_in_a_full_batch():
    model, env = make(), environment(turns=3, turn_tokens=9)
    full = play([group_of(i) for i in range(7)], model, env, top_p=0.8)
    alone = play([group_of(4)], model, env, top_p=0.8)
    for s in range(4):
        assert_same(alone[4, s], full[4, s])
        assert np.array_equal(alone[4, s].kept, full[4, s].kept)
        assert np.array_equal(alone[4, s].kept_sizes, full[4, s].kept_sizes)


def logprob_gradients(model, episodes, config=None):
    """Log-probs and entropies [M], and the gradient of a mixture of both [P]."""
    learner, config = SimpleNamespace(alphabet=ALPHABET), config or Config()
    model.flat_grad.zero_()
    batch = [(t, 0.0) for t in episodes]
    logprobs, entropy, _ = token_logprobs(model, batch, learner, config)
    weights = torch.linspace(-1, 1, len(logprobs))
    (weights @ logprobs + 0.3 * entropy.sum()).backward()
    return logprobs.detach(), entropy.detach(), model.flat_grad.clone()


def test_pieces_and_all_at_once_are_the_same(monkeypatch):
    model = make()
    found = play([group_of(i) for i in range(3)], model, top_p=0.8)
    episodes = [found[i, s] for i in range(3) for s in range(4)]
    whole = logprob_gradients(model, episodes)
    assert all(torch.isfinite(x).all() for x in whole)
    for rows in (1, 7, 64):
        monkeypatch.setattr(logprobs_room, "PIECE", rows * LETTERS)
        for x, y in zip(logprob_gradients(model, episodes), whole, strict=True):
            assert float((x - y).norm() / y.norm()) < 1e-6


def test_the_entropy_is_that_of_the_kept_tokens():
    model = make()
    found = play([group_of(2)], model, size=1, top_p=0.8)
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
    model, prompt = make(init_std=0.2), [20, 25, 30]

    def kept_after(tokens) -> list[int]:
        with torch.no_grad():
            logits = model.logits(model(pack_tokens([tokens])), ALPHABET)[-1:]
        return nucleus(logits, 0.6)[0].nonzero()[:, 0].tolist()

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
    found = play([group_of(3)], make(), size=2, top_p=0.8)
    return Group(3, 0, {}, [found[3, 0], found[3, 1]])  # a test may change its episodes


def test_what_was_kept_arrives():
    group = cut_group()
    again = pickle.loads(pickle.dumps(group))
    assert again.digest == group.digest
    for t, other in zip(again.trajectories, group.trajectories, strict=True):
        for name in ARRAYS:
            assert np.array_equal(getattr(t, name), getattr(other, name))


# --------------------------------------------------------------------------------- whole runs


def test_a_run_with_a_cut_is_replayed_to_the_same_weights(tmp_path):
    wander(tmp_path / "run", 4, 2, swap="recompute", top_p=0.9)
    replay(tmp_path / "run")


SMALL = {"groups_per_step": 4, "group_size": 4, "slots": 16, "steps": 6, "eval_every": 6}
SMALL |= {"top_p": 0.9, "reference_every": 2, "rollout_workers": 1}


def weights_of(folder) -> str:
    return json.loads((folder / "summary.json").read_text())["weights_sha256"]


def test_staleness_zero_with_a_cut_is_bitwise_synchronous(tmp_path, monkeypatch):
    few = lambda config: dataclasses.replace(task_of(config), eval_size=8)  # noqa: E731
    monkeypatch.setattr(run_room, "task_of", few)
    config = dataclasses.replace(Config(), **SMALL, max_staleness=0)
    train_sync.train(dataclasses.replace(config, out=str(tmp_path / "sync")))
    train_async.train(dataclasses.replace(config, out=str(tmp_path / "async")))
    assert weights_of(tmp_path / "sync") == weights_of(tmp_path / "async")
    rows = read_lines(tmp_path / "sync" / "metrics.jsonl")
    assert all(abs(row["ratio_max"] - 1) < 1e-3 for row in rows if "ratio_max" in row)
