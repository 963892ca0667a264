"""The generator with toy environments: what an episode depends on, and on what it does not.

An episode is a function of its prompt, its noise key and the weights at each of its steps. That is
exact, bitwise, on CPU with one thread, for one number of slots: whatever the slot, the neighbours
or the order of arrival. For different numbers of slots from 8 up it holds on every machine tried,
because the CPU library then sums each row of a matrix product in the same order; below, it differs.
"""

import dataclasses
import gc
import weakref
from contextlib import nullcontext
from types import SimpleNamespace

import numpy as np
import pytest
import torch

import rollout
from cache import decode, make_cache, prefill
from fast import racks
from fast.graphs import Captured
from fast.racks import make_racks
from logprobs import token_logprobs
from model import GPT, ModelConfig
from reward import Step, make_task, task_of
from rollout import Generator, generate, make_generator, naive_generate, sample
from runtime.config import Config
from runtime.messages import Group, Result
from runtime.models import make_model
from runtime.noise import mix, noise_keys, uniforms
from runtime.tokenizer import own_tokenizer
from tasks.environment import Environment, Reply, make_environment

encode = own_tokenizer().encode
VOCAB, CONTEXT, LETTERS = 40, 64, 12  # the policy may emit ids 0 .. 11, and no others
SHAPE = dict(layers=2, width=16, heads=4, kv_heads=2, head_width=8, hidden=24)
SHAPE |= dict(vocab_size=VOCAB, init_std=0.3)
DSA = dict(attention="dsa", chunk_size=4, top_k=2)
KINDS = {
    "dense learned": {},
    "dense rope": dict(positions="rope", qk_norm=True),
    "dsa mean": DSA,
    "dsa indexer": DSA | dict(scoring="indexer", positions="rope", chunk_size=2, top_k=3),
}
kinds = pytest.mark.parametrize("kind", KINDS)
CAPTURED = [("dense learned", True), ("dense rope", True)]


def make(kind="dense learned", context=CONTEXT, **changes) -> GPT:
    return GPT(ModelConfig(**(SHAPE | KINDS[kind] | changes), context=context))


def environment(respond=None, turns=1, stop=(3,), turn_tokens=20, **more) -> Environment:
    """By default: `turns` turns; the observation echoes what was said, as ids from 30 up."""

    def echo(requests):
        replies = []
        for _, tokens, spans, *_ in requests:
            said = tokens[spans[-1][0] :]
            reply = [30 + int(said.sum()) % 7] * (1 + len(said) % 3)
            replies.append(None if len(spans) == turns else reply)
        return replies

    def talk(requests):
        return [as_reply(found) for found in (respond or echo)(requests)]

    prompt, alphabet = (lambda problem: problem["prompt"]), np.arange(LETTERS)
    return Environment(prompt, talk, alphabet, frozenset(stop), turn_tokens, **more)


def as_reply(found) -> Reply:
    """A reply from the observation, None where the episode is over, or a failure (str)."""
    if isinstance(found, Reply):
        return found
    return Reply(None, None, found) if isinstance(found, str) else Reply(found, None)


class Outside:
    """A pool with one environment: `late` calls (by prompt) are kept until they are let go."""

    def __init__(self, env: Environment, late=None):
        self.env, self.late, self.kept = env, late, []

    def ask(self, calls: list):
        self.kept += calls

    def receive(self, seconds: float) -> list:
        ready = [call for call in self.kept if call[0]["prompt"] != self.late]
        self.kept = [call for call in self.kept if call[0]["prompt"] == self.late]
        replies = [self.env.respond([call])[0] for call in ready]
        both = zip(ready, replies, strict=True)
        return [(None, Result(call[3], observation=reply)) for call, reply in both]


def outside(respond=None, **more) -> Environment:
    """The same, outside the generator."""
    return environment(respond, outside=True, read=lambda result: result.observation, **more)


def group_of(i: int, start=0, length: int | None = None) -> Group:
    """Group i, with a prompt of 1 to 20 tokens that depends on i alone."""
    random = np.random.default_rng(i)
    prompt = random.integers(VOCAB, size=length or random.integers(1, 21)).tolist()
    return Group(i, start, {"prompt": prompt})


PLACES = "capacity", "worker", "graphs"  # what is not in the configuration


def generator_of(model=None, env=None, *, slots=8, size=4, **more) -> Generator:
    """A generator for groups of `size` samples, by default with a small model and an echo."""
    places = {"capacity": CONTEXT} | {k: more.pop(k) for k in PLACES if k in more}
    config = Config(**({"slots": slots, "group_size": size} | more))
    return Generator(model or make(), env or environment(), config, **places)


def play(groups, model=None, env=None, slots=8, size=4, **more) -> dict:
    """Run groups to their end: {(group, sample): trajectory}, and the generator under "by"."""
    by = generator_of(model, env or environment(turns=2), slots=slots, size=size, **more)
    done = generate(by, groups, Outside(by.environment) if by.environment.outside else None)
    assert [g.group_id for g in done] == sorted(g.group_id for g in groups)
    assert all([t.sample_index for t in g.trajectories] == list(range(size)) for g in done)
    return {(t.group_id, t.sample_index): t for g in done for t in g.trajectories} | {"by": by}


def assert_same(a, b) -> None:
    """Bitwise the same episode, up to clocks and worker numbers."""
    for name in ("tokens", "loss_mask", "logprobs", "versions"):
        x, y = getattr(a, name), getattr(b, name)
        assert x.dtype == y.dtype and x.tobytes() == y.tobytes(), (name, x, y)
    assert (a.turns, a.finish, a.noise_key) == (b.turns, b.finish, b.noise_key)


def learners(model: GPT, trajectories: list, alphabet, temperature=1.0) -> np.ndarray:
    """The learner's log-probs of the generated tokens of these trajectories."""
    learner, config = (SimpleNamespace(alphabet=alphabet), Config(temperature=temperature))
    with torch.no_grad():
        found, *_ = token_logprobs(model, [(t, 0.0) for t in trajectories], learner, config)
    return found.cpu().numpy()


def recomputed(model: GPT, t, temperature=1.0) -> np.ndarray:
    """The learner's log-probs of a trajectory's generated tokens."""
    return learners(model, [t], torch.arange(LETTERS, device=model.flat.device), temperature)


def moved(model: GPT, amount=0.3) -> torch.Tensor:
    """Other weights [P] for the same model."""
    random = torch.Generator().manual_seed(7)
    return model.flat + amount * torch.randn(model.flat.shape, generator=random)


# -------------------------------------------------------------------------------- sampling noise


def unmix(x: int) -> int:
    """The inverse of `mix`."""
    x ^= x >> 16
    x = x * pow(0x846CA68B, -1, 2**32) % 2**32
    x ^= x >> 15 ^ x >> 30
    x = x * pow(0x7FEB352D, -1, 2**32) % 2**32
    return x ^ x >> 16


def test_the_hash_has_an_inverse_and_works_alike_on_ints_and_arrays():
    values = [0, 1, 2, 12345, 2**31 - 1, 2**31, 2**32 - 1]
    hashed = [mix(v) for v in values]
    assert [unmix(v) for v in hashed] == values
    assert mix(np.array(values)).tolist() == hashed
    flips = np.zeros((32, 32))
    for v in range(200):
        a = mix(v * 0x9E3779B9 % 2**32)
        for i in range(32):
            b = mix(v * 0x9E3779B9 % 2**32 ^ 1 << i)
            flips[i] += [(a ^ b) >> j & 1 for j in range(32)]
    assert 0.3 < flips.min() / 200 and flips.max() / 200 < 0.7  # each bit reaches each bit


def test_noise_lies_strictly_between_0_and_1_for_every_hash_value():
    """A 24-bit uniform would round up to 1 in float32."""
    for bits in (0xFFFFFFFF, 0xFFFFFF00, 0xFFFFFE00, 0x1FF, 0):
        noise = uniforms(np.array([unmix(bits)]), np.array([0]))
        assert noise.dtype == np.float32 and noise[0] == (bits >> 9) / 2**23 + 2.0**-24, hex(bits)
        assert 0 < noise[0] < 1


def test_no_number_selects_a_token_without_probability():
    """Not the last one, when rounding leaves the sum of all probabilities below 1."""
    numbers = uniforms(np.array([unmix(0), unmix(0xFFFFFFFF)]), np.array([0, 0]))
    for size in (3, 7, 50, 511):
        logits = torch.randn(400, size, generator=torch.Generator().manual_seed(size))
        logits[:, [0, -1]] = -200.0  # their probability is 0 in float32
        for number in numbers:
            chosen, logprobs = sample(logits, torch.full((400,), float(number)), 1.0)
            assert chosen.min() > 0 and chosen.max() < size - 1 and logprobs.min() > -50


def test_a_sum_that_is_rounded_in_parallel_selects_no_token_without_probability(monkeypatch):
    """On a GPU sums need not grow from token to token: here the search ends at the wrong one."""
    wrong = torch.tensor([[1], [0], [3]])
    monkeypatch.setattr(torch, "searchsorted", lambda *_, **__: wrong)
    logits = torch.tensor(
        [[0.5, -torch.inf, 1.0, 0.0], [-1e9, 0.0, 1.0, 2.0], [0.0, 0.0, 0.0, 1.0]]
    )
    chosen, logprobs = sample(logits, torch.full((3,), 0.5), 1.0)
    assert chosen.tolist() == [2, 3, 3] and logprobs.min() > -5


def test_noise_is_a_pure_function_and_differs_everywhere_else():
    keys = np.concatenate([noise_keys(0, g, 10) for g in range(20)])
    positions = np.arange(200) % 50
    noise = uniforms(keys, positions)
    assert noise.dtype == np.float32 and noise.shape == (200,)
    torch.rand(3)
    assert np.array_equal(noise, uniforms(keys, positions))
    order = np.random.default_rng(0).permutation(200)
    assert np.array_equal(noise[order], uniforms(keys[order], positions[order]))
    for row in (0, 77, 199):  # alone
        assert noise[row] == uniforms(keys[[row]], positions[[row]])[0]
    assert len(set(noise.tolist())) == 200
    names = [(s, g) for s in (0, 1, 2**31 - 1) for g in (0, 1, 2**32, 2**40 + 1)]
    found = [key for s, g in names for key in noise_keys(s, g, 2)]
    assert len(set(found)) == 2 * len(names) and all(0 <= key < 2**62 for key in found)


@pytest.mark.parametrize("what", ["seed", "group", "sample", "position"])
def test_samples_follow_the_softmax_along_every_counter(what):
    """Chi-square over 10,000 samples in which only one of the four counters changes."""
    n, temperature = 10_000, 1.7
    counter = {name: [3] * n for name in ("seed", "group", "sample", "position")}
    counter[what] = list(range(n))
    triples = zip(counter["seed"], counter["group"], counter["sample"], strict=True)
    last = n if what == "sample" else 4
    keys = np.array([noise_keys(seed, group, last)[i] for seed, group, i in triples])
    noise = uniforms(keys, np.array(counter["position"]))
    logits = torch.tensor([2.0, 0.0, 1.0, -1.0, -4.0, 1.5])
    chosen, logprobs = sample(logits.expand(n, 6), torch.from_numpy(noise), temperature)
    chance = torch.softmax(logits.double() / temperature, 0)
    found = torch.bincount(chosen, minlength=6)
    chi2 = float(((found - n * chance) ** 2 / (n * chance)).sum())
    assert chi2 < 35, f"{found.tolist()} against {(n * chance).tolist()}"  # p = 1e-6, 5 degrees
    torch.testing.assert_close(logprobs.double(), chance.log()[chosen], rtol=0, atol=1e-6)
    counts = np.histogram(noise, bins=50, range=(0, 1))[0]
    assert ((counts - n / 50) ** 2 / (n / 50)).sum() < 120  # p = 1e-7, 49 degrees
    pairs = np.histogram2d(noise[:-1], noise[1:], bins=10, range=((0, 1), (0, 1)))[0]
    assert ((pairs - n / 100) ** 2 / (n / 100)).sum() < 190  # neighbours along the counter, too


# ------------------------------------------------- an episode does not know who shares its batch


@kinds
@pytest.mark.parametrize("temperature", [1.0, 0.6, 0.0])
def test_the_naive_generator_says_the_same(kind, temperature):
    """One answer alone, everything computed again for each token: the same tokens."""
    model, env = make(kind), environment()
    found, lengths = play([group_of(i) for i in range(3)], model, env, temperature=temperature), []
    for i in range(3):
        for s in range(4):
            prompt, key, t = group_of(i).problem["prompt"], noise_keys(0, i, 4)[s], found[i, s]
            tokens, logprobs = naive_generate(model, prompt, env, key, temperature)
            assert t.tokens.tolist() == tokens
            np.testing.assert_allclose(t.logprobs[t.loss_mask], logprobs, rtol=0, atol=1e-5)
            lengths.append(len(logprobs))
    assert len(set(lengths)) > 1 or temperature == 0  # some ended by their stop token


@kinds
def test_an_episode_is_bitwise_the_same_alone_and_in_a_full_batch(kind):
    model, env = make(kind), environment(turns=3, turn_tokens=9)
    crowd = [group_of(i) for i in range(7)]
    full = play(crowd, model, env)  # 28 samples through 8 slots
    assert len({len(full[i, s].tokens) for i in range(7) for s in range(4)}) > 8
    for i in (0, 4):
        alone = play([group_of(i)], model, env)
        for s in range(4):
            assert_same(alone[i, s], full[i, s])
        assert_same(play([group_of(i)], model, env, size=1)[i, 0], full[i, 0])
    order = play([group_of(i) for i in (5, 2, 6, 0, 3, 1, 4)], model, env)
    for key in full.keys() - {"by"}:
        assert_same(order[key], full[key])


@kinds
def test_an_episode_is_bitwise_the_same_in_every_slot(kind):
    model, env = make(kind), environment(turn_tokens=20)
    alone = play([group_of(13)], model, env, slots=9, size=1)[13, 0]
    for before in (1, 5, 8):
        crowd = [group_of(100 + i) for i in range(before)] + [group_of(13)]
        generator = generator_of(model, env, slots=9, size=1)
        for group in crowd:
            generator.submit(group)
        generator.step()
        assert generator.batch[before].group.group_id == 13
        generate(generator, [])
        assert_same(crowd[-1].trajectories[0], alone)


@kinds
def test_an_episode_is_the_same_for_any_number_of_slots(kind):
    model, groups = make(kind), range(4)
    wanted = play([group_of(i) for i in groups], model)
    for slots in (3, 9, 16, 31):
        found = play([group_of(i) for i in groups], model, slots=slots)
        for key in wanted.keys() - {"by"}:
            assert_same(found[key], wanted[key])


@kinds
@pytest.mark.parametrize("temperature", [1.0, 0.6])
def test_logprobs_are_those_of_the_learner(kind, temperature):
    model = make(kind)
    found = play([group_of(i) for i in range(4)], model, temperature=temperature)
    for key in found.keys() - {"by"}:
        t = found[key]
        wanted = recomputed(model, t, temperature)
        np.testing.assert_allclose(t.logprobs[t.loss_mask], wanted, rtol=0, atol=1e-5)
        assert (np.abs(wanted - recomputed(model, t, 2.0)) > 1e-3).any()


# --------------------------------------------------------------------------- weights that change


def swap_after(steps: int, swap: str, groups, kind="dense learned", context=CONTEXT, **changes):
    """Play groups, one sample each, with new weights after so many steps; and both weights."""
    model, env = make(kind, context, **changes), environment(turns=2, turn_tokens=12, stop=())
    old, new = model.flat.clone(), moved(model)
    by = generator_of(model, env, size=1, capacity=context, swap=swap)
    for group in groups:
        by.submit(group)
    for _ in range(steps):
        by.step()
    by.set_weights(1, new)
    done = {g.group_id: g.trajectories[0] for g in generate(by, [])}
    assert by.version == 1 and [kind for _, kind, *_ in by.events].count("swap") == 1
    return done, old, new, model


@pytest.mark.parametrize("swap", ["keep", "recompute"])
def test_tokens_carry_the_version_that_sampled_them(swap):
    done, *_ = swap_after(5, swap, [group_of(i) for i in range(4)])
    for t in done.values():
        versions = t.versions[t.loss_mask]
        assert versions.tolist() == [0] * 5 + [1] * (len(versions) - 5) and len(versions) == 24
        assert (t.versions[~t.loss_mask] == -1).all()
        assert t.oldest == 0


@kinds
@pytest.mark.parametrize("swap", ["keep", "recompute"])
def test_a_swap_does_not_tie_an_episode_to_its_batch(kind, swap):
    done, *_ = swap_after(5, swap, [group_of(i) for i in range(6)], kind)
    for i in (1, 4):
        alone, *_ = swap_after(5, swap, [group_of(i)], kind)
        assert_same(alone[i], done[i])


@pytest.mark.parametrize("kind", ["dense learned", "dense rope", "dsa mean"])
@pytest.mark.parametrize("swap", ["keep", "recompute"])
@torch.inference_mode()
def test_a_swap_equals_decoding_by_hand(kind, swap):
    """Bitwise: `keep` goes on with the old weights' keys and values, `recompute` with new ones."""
    done, old, new, model = swap_after(5, swap, [group_of(3)], kind)
    t, prompt = done[3], group_of(3).problem["prompt"]
    model.flat.copy_(old)
    cache, keys = make_racks(model, 8, CONTEXT), torch.zeros(8, dtype=torch.int64)
    alone = np.arange(8) == 0
    cache.reserve(alone * len(prompt) + ~alone)
    prefill(model, cache, [0], [prompt[:-1]])
    keys[0] = noise_keys(0, 3, 4)[0]
    tokens, positions = torch.zeros(2, 8, dtype=torch.int64)
    for step, at in enumerate(range(len(prompt) - 1, len(t.tokens) - 1)):
        if step == 5:
            model.flat.copy_(new)
            if swap == "recompute":
                prefill(model, cache, [0], [t.tokens[:at]])
        tokens[0], positions[0] = int(t.tokens[at]), at
        cache.reserve(alone * (at + 1) + ~alone)
        hidden = decode(model, cache, tokens, positions)
        logits = hidden @ model.embed_tokens.weight[:LETTERS].t().contiguous()
        noise = torch.from_numpy(uniforms(keys.numpy(), positions.numpy() + 1))
        chosen, logprobs = sample(logits, noise, 1.0)
        if t.loss_mask[at + 1]:
            assert chosen[0] == t.tokens[at + 1] and float(logprobs[0]) == t.logprobs[at + 1]


def test_drain_finishes_what_runs_under_the_old_weights():
    model, env = make(), environment(stop=(), turn_tokens=6)
    by = generator_of(model, env, swap="drain")
    new, limits = moved(model), {0: 2, 1: 6, 2: 6}
    groups = [Group(i, 0, {"prompt": [5, i], "turn_tokens": n}) for i, n in limits.items()]
    for group in groups:  # 12 samples: the third group waits
        by.submit(group)
    by.step()
    by.set_weights(1, new)
    by.set_weights(2, new)  # the newest offer counts
    assert (by.version, by.newest) == (0, 2)
    for _ in range(5):  # the first group ends after one step: its slots stay empty
        assert by.step()
        assert by.version == 0 and len(by.waiting) == 4
    assert [g.group_id for g in by.take_finished()] == [0, 1]
    generate(by, [])
    for group, version in zip(groups, (0, 0, 2), strict=True):
        for t in group.trajectories:
            assert set(t.versions[t.loss_mask].tolist()) == {version}
    model.flat.copy_(new)
    again = play([Group(2, 0, groups[2].problem)], model, env)
    for t in groups[2].trajectories:
        assert t.tokens.tolist() == again[2, t.sample_index].tokens.tolist()


@pytest.mark.parametrize("swap", ["keep", "recompute", "drain"])
def test_no_group_begins_under_weights_older_than_its_start(swap):
    model = make()
    by = generator_of(model, size=2, swap=swap)
    groups = [group_of(0), group_of(1, start=2), group_of(2, start=2)]
    for group in groups:
        by.submit(group)
    for version in (0, 1):
        by.set_weights(version, moved(model))
        while by.step():
            pass
        assert by.busy and not any(by.batch) and len(by.waiting) == 4
        assert [g.group_id for g in by.take_finished()] == ([0] if version == 0 else [])
    by.set_weights(2, moved(model))
    done = generate(by, [])
    assert [g.group_id for g in done] == [1, 2]
    for group in groups:
        assert all(t.oldest >= group.start for t in group.trajectories)
    with pytest.raises(AssertionError, match="starts at version 3"):
        generate(by, [group_of(4, start=3)])  # would wait for ever
    with pytest.raises(AssertionError, match="version 1 after 2"):
        by.set_weights(1, model.flat)


def test_siblings_that_begin_after_a_swap_do_not_inherit_old_keys():
    model, env = make(), environment(stop=(), turn_tokens=6)
    new = moved(model)
    by = generator_of(model, env, size=12)
    by.submit(group_of(5, length=15))  # 12 samples: 8 begin now, 4 after the swap
    by.step()
    by.set_weights(1, new)
    (group,) = generate(by, [])
    fresh = make()
    fresh.flat.copy_(new)
    wanted = play([group_of(5, length=15)], fresh, env, size=12)
    for t in group.trajectories[8:]:
        assert set(t.versions[t.loss_mask].tolist()) == {1}
        assert t.logprobs.tobytes() == wanted[5, t.sample_index].logprobs.tobytes()


# ----------------------------------------------------------------------------------- environments


def test_observations_are_in_the_record_but_not_the_policys():
    found = play([group_of(i) for i in range(4)], env=environment(turns=4, turn_tokens=5))
    seen = 0
    for key in found.keys() - {"by"}:
        t, prompt = found[key], group_of(key[0]).problem["prompt"]
        assert t.tokens[: len(prompt)].tolist() == prompt and not t.failed
        assert (
            len(t.turns) == 4 and t.turns[0][0] == len(prompt) and t.turns[-1][1] == len(t.tokens)
        )
        mask = np.zeros(len(t.tokens), bool)
        for (start, stop), (after, _) in zip(
            t.turns, [*t.turns[1:], (len(t.tokens), 0)], strict=True
        ):
            mask[start:stop] = True
            said, echo = t.tokens[start:stop], t.tokens[stop:after].tolist()
            assert (said < LETTERS).all()
            if after < len(t.tokens):
                assert echo == [30 + int(said.sum()) % 7] * (1 + len(said) % 3)
                seen += len(echo)
        assert t.loss_mask.tolist() == mask.tolist()
        assert (t.versions == np.where(mask, 0, -1)).all()
        assert (t.logprobs[~mask] == 0).all() and (t.logprobs[mask] < 0).all()
    assert seen > 50


def test_turns_end_at_stop_tokens_and_at_their_limit():
    found = play([group_of(i) for i in range(8)], env=environment(stop=(3, 4), turn_tokens=6))
    limits = 0
    for key in found.keys() - {"by"}:
        ((start, stop),), tokens = found[key].turns, found[key].tokens.tolist()
        assert not {3, 4} & set(tokens[start : stop - 1])
        limits += stop - start == 6
        assert found[key].finish == ("stop" if tokens[-1] in (3, 4) else "length")
        assert tokens[-1] in (3, 4) if stop - start < 6 else stop - start == 6
    assert 3 < limits < 29  # both happened


def test_capacity_ends_an_episode():
    """Nothing is written beyond it; an observation that leaves no room to answer is not kept."""

    def talk(requests):
        return [[35, 36] for _ in requests]

    prompt = {"prompt": list(range(10))}
    for turn_tokens, total in ((100, 64), (1, 62), (51, 64), (52, 62), (53, 63), (54, 64)):
        env = environment(talk, stop=(), turn_tokens=turn_tokens)
        t = play([Group(0, 0, prompt)], env=env, size=1)[0, 0]
        assert t.finish == "length" and not t.failed
        assert len(t.tokens) == total == t.turns[-1][1], turn_tokens
        assert t.loss_mask[-1]
    done = play([Group(0, 0, prompt)], env=environment(stop=(), turn_tokens=54), size=1)[0, 0]
    assert (len(done.tokens), done.finish) == (64, "stop")  # its environment was content
    for length in (0, 64):
        with pytest.raises(AssertionError, match="must be 1 to 63"):
            play([Group(0, 0, {"prompt": [1] * length})])
    t = play([Group(0, 0, {"prompt": [1] * 63})], size=1)[0, 0]
    assert len(t.tokens) == 64
    with pytest.raises(AssertionError):  # more positions than the model has
        generator_of(capacity=CONTEXT + 1)


def test_a_problem_may_have_limits_of_its_own():
    """In place of the task's, for the length of its turns and their number."""
    groups = [Group(i, 0, {"prompt": [7, i], "turn_tokens": n}) for i, n in ((0, 2), (1, 20))]
    groups.append(Group(2, 0, {"prompt": [7], "max_turns": 1}))
    env = environment(turns=2, stop=(), turn_tokens=8)
    found = play([*groups, group_of(3, length=5)], env=env)
    assert [found[i, 0].loss_mask.sum() for i in range(4)] == [4, 40, 8, 16]
    assert [len(found[i, 0].turns) for i in range(4)] == [2, 2, 1, 2]


def test_after_the_last_turn_nobody_is_asked():
    asked = []

    def talk(requests):
        asked.extend(len(turns) for _, _, turns, _ in requests)
        return [[35] for _ in requests]

    limits = {"turn_tokens": 3, "max_turns": 3, "stop": ()}
    found = play([group_of(i) for i in range(3)], env=environment(talk, **limits))
    for key in found.keys() - {"by"}:
        assert len(found[key].turns) == 3 and found[key].finish == "stop"
        assert found[key].turns[-1][1] == len(found[key].tokens)
    assert sorted(asked) == [1] * 12 + [2] * 12


@pytest.mark.parametrize("where", [environment, outside])
def test_a_failing_environment_marks_its_episode_and_others_go_on(where):
    plain = environment(turns=3, turn_tokens=5)

    def fragile(requests):
        replies = plain.respond(requests)
        for i, (problem, _, turns, _) in enumerate(requests):
            if problem["prompt"] == group_of(1).problem["prompt"] and len(turns) == 2:
                replies[i] = "env_error: KeyError: 'a: b' (mine.py, line 7)"
        return replies

    env = where(fragile, turn_tokens=5)
    found, wanted = (play([group_of(i) for i in range(4)], env=e) for e in (env, plain))
    for key in wanted.keys() - {"by"}:
        if key[0] != 1:
            assert_same(found[key], wanted[key])
            continue
        t, n = found[key], len(found[key].tokens)
        assert t.finish == "env_error" and t.failed and len(t.turns) == 2
        assert t.failure == "KeyError: 'a: b' (mine.py, line 7)"
        assert t.tokens.tolist() == wanted[key].tokens[:n].tolist()


def test_a_slow_environment_stops_nobody_else():
    plain = environment(turns=3, turn_tokens=5)
    env = outside(plain.respond, turn_tokens=5)
    groups = [group_of(0, length=4)] + [group_of(i) for i in range(1, 5)]
    host = Outside(env, late=groups[0].problem["prompt"])
    by = generator_of(env=env)
    for group in groups:
        by.submit(group)
    others: list[Group] = []
    while len(others) < 4:  # 16 episodes pass by the 4 that wait
        by.step()
        host.ask(by.take_calls())
        for _, result in host.receive(0.0):
            by.hear(result.key, result)
        others += by.take_finished()
    assert 0 not in [g.group_id for g in others] and by.counts["steps"] >= 16 * 3 // 4
    waiting = [slot for slot in by.batch if slot]
    assert len(waiting) == 4 and [*by.asked.values()] == waiting
    assert not by.step() and by.busy  # nothing to decode
    host.late = None
    others += generate(by, [], host)
    groups = [group_of(0, length=4)] + [group_of(i) for i in range(1, 5)]
    wanted = play(groups, env=plain)
    for group in others:
        for t in group.trajectories:
            assert_same(t, wanted[t.group_id, t.sample_index])


def test_rewards_are_taken_when_the_turn_happens():
    """The last turn of an environment that is asked only between turns has none yet."""
    rewards = iter(range(100))

    def talk(requests):
        return [Reply([35], float(next(rewards))) for _ in requests]

    env = environment(talk, turn_tokens=3, max_turns=3, stop=())
    found = play([group_of(0)], env=env, size=1)
    assert found[0, 0].turn_rewards == [0.0, 1.0] and len(found[0, 0].turns) == 3
    env = environment(talk, turn_tokens=3, max_turns=3, stop=(), judges_all=True)
    assert play([group_of(0)], env=env, size=1)[0, 0].turn_rewards == [2.0, 3.0, 4.0]


def test_an_episode_that_ends_without_the_environments_word_is_closed():
    over = []

    def close(key):
        over.append(key)
        return ["a call"]

    asked = environment(lambda requests: [[35]] * len(requests), turn_tokens=3, stop=(), over=close)
    found = play([group_of(0)], env=dataclasses.replace(asked, max_turns=3))
    assert sorted(over) == [(0, i) for i in range(4)] and found["by"].take_calls() == ["a call"] * 4
    assert found["by"].take_calls() == []
    over.clear()
    said = environment(turns=2, over=close)  # this one says when
    play([group_of(0)], env=said)
    assert over == []


def talking(task, secrets=range(1, 4)):
    """Play `guess` with a changed `step`, one group a secret; {secret: its trajectory}."""
    config = Config(slots=8, group_size=1)
    generator = make_generator(config, task, make_model(config, task))
    groups = [Group(i, 0, task.reset(i, "train") | {"secret": i}) for i in secrets]
    return {g.group_id: g.trajectories[0] for g in generate(generator, groups)}


@pytest.mark.parametrize("longer", [False, True])
def test_an_observation_longer_than_declared_is_a_failure_that_names_both(longer):
    """Else an episode could be longer than its slot, and would be cut without a word."""
    base = make_task("guess")
    said = "1234, 5678"
    n = len(encode(said))
    task = dataclasses.replace(
        base, step=lambda problem, answers: Step(said, 0.0, False), observation_tokens=n - longer
    )
    for t in talking(task).values():
        if longer:
            assert (t.finish, len(t.turns)) == ("env_error", 1) and t.failed
            assert f"has {n} tokens, observation_tokens declares {n - 1}" in t.failure
            assert t.failure.startswith(f"ValueError: observation {said[:40]!r}")
        else:
            assert t.finish in ("stop", "length") and len(t.turns) > 1


def test_an_observation_that_is_no_text_costs_its_episode():
    lone = "\ud83d"  # half a character
    said = Step(lone, 0.0, False)
    task = dataclasses.replace(make_task("guess"), step=lambda problem, answers: said)
    reply = make_environment(Config(), task).read(Result((0, 0), *said))
    assert reply.observation is None and reply.failure.startswith("env_error: ValueError")
    assert all(t.finish == "env_error" for t in talking(task).values())


def test_tokens_are_never_made_into_text_and_back():
    """Prompt and observation are spelt byte by byte: a tokenizer would merge them."""
    spelt = list(b"reverse the number")
    assert encode(bytes(spelt).decode()) != spelt
    requests_seen = []

    def respond(requests):
        requests_seen.extend((tokens, list(turns)) for _, tokens, turns, _ in requests)
        return [None if len(turns) == 2 else spelt for _, _, turns, _ in requests]

    config = ModelConfig(**(SHAPE | {"vocab_size": 512}), context=CONTEXT)
    env = environment(respond, turn_tokens=4)
    env.alphabet = np.array(list(b" ther"))  # what is generated would be merged, too
    found = play([Group(0, 0, {"prompt": spelt})], GPT(config), env, size=8)
    for s in range(8):
        t = found[0, s]
        assert t.tokens.dtype == np.int32
        assert t.tokens[:18].tolist() == t.tokens[22:40].tolist() == spelt
        assert t.turns == [(18, 22), (40, 44)] and len(t.tokens) == 44
        for stop in (22, 44):
            assert any(np.array_equal(tokens, t.tokens[:stop]) for tokens, _ in requests_seen)
        assert np.isin(t.tokens[t.loss_mask], env.alphabet).all()
    assert len(requests_seen) == 16


# ------------------------------------------------------------------------------------- scheduling


def test_prompts_of_an_evaluation_are_computed_together(monkeypatch):
    found = []
    monkeypatch.setattr(racks, "prefill", lambda *a: (found.append(a[2:]), prefill(*a)))
    play([group_of(0, length=7), group_of(1, length=9)], size=1, temperature=0.0)
    slots, sequences, together = found[0]
    assert slots == [0, 1] and [*map(len, sequences)] == [6, 8] and together >= 2


@kinds
def test_a_group_computes_its_prompt_once(kind, monkeypatch):
    """And its samples are as if each had computed it for itself."""
    computed: list[list[int]] = []

    def counted(model, cache, slots, sequences):
        computed.extend(list(s) for s in sequences)
        prefill(model, cache, slots, sequences)

    monkeypatch.setattr(racks, "prefill", counted)
    lengths = {0: 7, 1: 1, 2: 20}
    groups = [[group_of(i, length=n) for i, n in lengths.items()] for _ in range(2)]
    once = [groups[0][i].problem["prompt"][:-1] for i in (0, 2)]  # a single token is just decoded
    shared = play(groups[0], make(kind), size=6)
    assert computed == once
    assert not shared["by"].prompts, "kept for ever"
    together = rollout.prefill_groups

    def one_by_one(model, cache, prompts, known, config):
        for slot, prompt in prompts.items():
            known.clear()
            together(model, cache, {slot: prompt}, known, config)

    monkeypatch.setattr(rollout, "prefill_groups", one_by_one)
    own = play(groups[1], make(kind), size=6)
    assert computed == once + [once[0]] * 6 + [once[1]] * 6
    for key in own.keys() - {"by"}:
        assert_same(own[key], shared[key])


def test_a_free_slot_is_filled_at_once():
    """With 20 samples on 8 slots no step decodes fewer than it could."""
    by = generator_of(env=environment(turn_tokens=30))
    groups = [group_of(i) for i in range(5)]
    for group in groups:
        by.submit(group)
    lengths, steps = [], 0
    while by.busy:
        left, before = 20 - sum(len(g.trajectories) for g in groups), by.counts["slot_steps"]
        assert by.step()
        assert by.counts["slot_steps"] - before == min(8, left)
        steps += 1
    lengths = [int(t.loss_mask.sum()) for g in groups for t in g.trajectories]
    assert len(set(lengths)) > 5  # they ended at different times
    assert by.counts["tokens"] == by.counts["slot_steps"] == sum(lengths)
    assert by.counts["steps"] == steps < 20 / 8 * max(lengths)
    assert not by.step()
    assert len(by.take_finished()) == 5 and by.take_finished() == []


def test_the_cache_costs_what_sequences_use_and_not_slots_times_capacity():
    """Task `sum`, whose longest episodes are many times longer than most."""
    config = Config(task="sum", slots=64)
    task = task_of(config)
    generator = make_generator(config, task, make_model(config, task))
    generate(generator, [Group(i, 0, task.reset(i, "train")) for i in range(32)])
    racks = generator.cache.racks
    positions = sum(len(rack.slots) * rack.kv.shape[3] for rack in racks)
    assert racks[-1].kv.shape[3] == 304 and len(racks[1].slots) > 3
    assert positions < 0.35 * 64 * 304


@kinds
def test_a_prompt_may_be_fed_token_by_token(kind, monkeypatch):
    """As captured steps do it on a GPU: no prefill, and the same episodes."""
    groups, model = [group_of(i) for i in range(6)], make(kind)
    wanted = play(groups, model)
    by = generator_of(model, environment(turns=2))
    by.longest_fed = 10  # some of these prompts are longer
    prefilled = []
    monkeypatch.setattr(racks, "prefill", lambda *a: (prefilled.extend(a[3]), prefill(*a)))
    lengths = [len(group_of(i).problem["prompt"]) for i in range(6)]
    for group in generate(by, [group_of(i) for i in range(6)]):
        for t in group.trajectories:
            other = wanted[group.group_id, t.sample_index]
            np.testing.assert_array_equal(t.tokens, other.tokens)
            np.testing.assert_allclose(t.logprobs, other.logprobs, rtol=0, atol=1e-5)
            assert t.swaps[0] == (0 if lengths[group.group_id] <= 10 else t.turns[0][0] - 1)
    assert sorted(map(len, prefilled)) == sorted(n - 1 for n in lengths if n > 10)


class FakeGraph:
    """A CUDA graph on a CPU: what was captured is computed again with the same memory."""

    def replay(self):
        with torch.no_grad():
            for result, new in zip(self.captured.results, self.again(), strict=True):
                if result is not None:
                    result.copy_(new)


def test_captured_steps_give_the_same_episodes(monkeypatch):
    """Inputs are copied, and a step is captured once."""
    made = []

    def call(self, step, *inputs, plain=Captured.__call__):
        FakeGraph.captured, FakeGraph.again = self, lambda _: step(*self.inputs)
        return plain(self, step, *inputs)

    monkeypatch.setattr(Captured, "__call__", call)
    monkeypatch.setattr(torch.cuda, "CUDAGraph", lambda: made.append(FakeGraph()) or made[-1])
    monkeypatch.setattr(torch.cuda, "graph", lambda graph: nullcontext())
    monkeypatch.setattr(rollout, "make_racks", make_cache)  # as on a GPU
    wanted = play([group_of(i) for i in range(6)])
    by = generator_of(make(), environment(turns=2), graphs=True)
    by.longest_fed = 0
    done = generate(by, [group_of(i) for i in range(6)])
    assert len(made) == 1
    for group in done:
        for t in group.trajectories:
            assert_same(t, wanted[t.key])
    # in a cycle it would stay until Python looks for those: gigabytes, at every evaluation
    gone = weakref.ref(by)
    FakeGraph.captured = FakeGraph.again = None
    gc.collect()
    gc.disable()
    del by
    gc.enable()
    assert gone() is None


@pytest.mark.gpu
@pytest.mark.parametrize("kind, graphs", [(kind, False) for kind in KINDS] + CAPTURED)
def test_on_a_gpu_the_logprobs_are_still_the_learners(kind, graphs):
    model = make(kind, head_width=16).on("cuda")
    by = generator_of(model, environment(turns=2), graphs=graphs)
    generate(by, [group_of(i) for i in range(4)])
    by.set_weights(1, torch.randn_like(model.flat) * 0.3)  # captured graphs must see these
    for group in generate(by, [group_of(i, 1) for i in range(4, 8)]):
        for t in group.trajectories:
            wanted = t.logprobs[t.loss_mask]
            np.testing.assert_allclose(recomputed(model, t), wanted, rtol=0, atol=1e-4)


def test_logits_are_the_same_in_every_row():
    """Of a product with 11 columns a library sums some rows in another order."""
    model, env = make(), dataclasses.replace(environment(), alphabet=np.arange(11))
    generator = generator_of(model, env, slots=9, size=1)
    rows = len(generator.batch)
    assert (rows, len(generator.padded)) == (12, 16)
    hidden = torch.randn(rows, model.config.width, generator=torch.Generator().manual_seed(0))
    order = torch.tensor([3, 8, 0, 5, 11, 1, 7, 2, 9, 6, 10, 4])
    logits, others = (model.logits(x, generator.padded) for x in (hidden, hidden[order]))
    assert torch.equal(logits[order], others)
