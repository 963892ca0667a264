"""What methods/ put in place of advantages inside a group: critic, turns, optimal baseline, pairs.

`turn_advantages` and `skip_observation_gae` are compared with loops in test_exercises.py; dampers,
teachers and reward models have files of their own.
"""

import copy
import dataclasses

import numpy as np
import pytest
import torch
import torch.nn.functional as F

import losses
from learner import METHODS, GroupMethod, learner_step, make_learner, method_of, new_groups
from logprobs import token_logprobs
from losses import group_advantages
from methods import critic, preferences
from methods.baseline import importance_weights, optimal_baseline
from methods.turns import turn_advantages
from reward import task_of, verify_group
from rollout import generate, make_generator
from runtime.config import Config, UserError, check
from runtime.messages import Group, Judgement, Trajectory, apply_judgement
from runtime.models import make_model

FLAGS = {"task": "reverse:2", "groups_per_step": 4, "group_size": 4, "slots": 16, "steps": 50}
FLAGS |= {"eval_every": 1000, "lr": 3e-3}


def judged_groups(generator, learner, task, config) -> list[Group]:
    """New groups with episodes, and rewards that are all different."""
    groups = generate(generator, new_groups(learner, task, config.groups_per_step))
    for group in groups:
        apply_judgement(group, Judgement(verify_group(group, task, config), 0.0, 0.0))
        for t in group.trajectories:
            t.reward += 0.01 * t.sample_index
    return groups


def stale_batch(steps: int = 3, ranks: tuple = (0,), **flags) -> tuple:
    """(config, learner, groups): groups that a learner sampled before it took some steps on
    others."""
    config = check(Config(**FLAGS | flags, learners=len(ranks)))
    task = task_of(config)
    learner = make_learner(config, task, make_model(config, task), ranks)
    generator = make_generator(config, task, learner.model)
    first, *later = [judged_groups(generator, learner, task, config) for _ in range(steps + 1)]
    plain = dataclasses.replace(config, objective="cispo", advantage="grpo")
    method, learner.method = learner.method, GroupMethod(plain, learner.model)
    for groups in later:
        learner_step(learner, groups, plain)
    learner.method = method
    return config, learner, first


def trajectories_of(groups) -> list[Trajectory]:
    return [t for group in groups for t in group.trajectories]


def sums(learner, trajectories, config, model=None) -> torch.Tensor:
    """Log-probs of whole answers, with gradient."""
    model = model or learner.model
    parts = [token_logprobs(model, [(t, 0.0)], learner, config)[0] for t in trajectories]
    return torch.stack([logprobs.sum() for logprobs in parts])


def test_every_method_is_reached_by_its_setting():
    names = []
    for field, value, file in METHODS:
        config = dataclasses.replace(Config(), **{field: value or "a run"})
        names.append(type(method_of(config, make_model(config, task_of(Config())))).__module__)
        assert names[-1] == f"methods.{file}"
    assert len(set(names)) == len(METHODS)
    assert type(method_of(Config(), None)) is GroupMethod


@pytest.mark.parametrize(
    "flags, words",
    [
        ({"objective": "dpo", "credit": "turn"}, "--credit turn: must be 'episode' with"),
        ({"advantage": "opob", "credit": "turn"}, "--credit turn: must be 'episode' with"),
        ({"objective": "dpo", "advantage": "rloo"}, "--advantage rloo: must be 'grpo' with"),
        ({"objective": "dpo", "reference_every": 0}, "reference_every=0"),
        ({"damper": "brakes"}, "--damper brakes: must be one of kl, ess, gac, brake, none"),
    ],
)
def test_methods_that_do_not_fit_cost_one_line(flags, words):
    with pytest.raises(UserError) as error:
        check(Config(**flags))
    assert words in str(error.value)


@pytest.mark.parametrize("name", losses.ADVANTAGES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_credit_of_the_only_turn_or_of_a_late_reward_is_that_of_the_episode(name, dtype):
    random = torch.Generator().manual_seed(0)
    rewards = torch.randn(5, 4, generator=random, dtype=dtype)
    valid = torch.rand(5, 4, generator=random) < 0.7
    rewards[0] = 0.1  # dead
    expected, expected_dead = group_advantages(rewards, name, valid)
    for turns in (1, 3):
        late = torch.zeros(5, 4, turns, dtype=dtype)
        late[..., -1] = rewards
        advantages, dead = turn_advantages(late, valid[..., None].expand_as(late), name)
        assert torch.equal(advantages, expected[..., None].expand(-1, -1, turns))
        assert torch.equal(dead, expected_dead) and advantages.dtype == dtype


def episode(index: int, turn_rewards: list, turns=None, **fields) -> Trajectory:
    """An answer of two tokens a turn, with one token of the environment between turns."""
    spans = [(3 * i + 1, 3 * i + 3) for i in range(turns or len(turn_rewards))]
    reward = sum(turn_rewards)
    return Trajectory(0, index, 0, turns=spans, turn_rewards=turn_rewards, reward=reward, **fields)


def test_each_turn_is_paired_with_its_credit():
    """Also where answers have fewer turns, or rewards, than others, or have failed."""
    whole = [episode(0, [9.0, 1.0]), episode(1, [0.0, 1.0]), episode(2, [0.0])]
    failed = episode(3, [5.0, 5.0], finish="env_error")
    lacking = [episode(0, [1.0], turns=3), episode(1, [], turns=1), episode(2, [2.0]), failed]
    groups = [Group(0, 0, {}, [*whole, failed]), Group(1, 0, {}, lacking)]
    config = Config(credit="turn", advantage="mean", group_size=4)
    samples, dead = method_of(config, None).samples(None, groups, config)
    found = [credit for _, credit in samples]
    # returns of the first group: 10 and 1, 1 and 1, 0, and again 10 and 1
    assert found[:4] == [[4.75, 0.0], [-4.25, 0.0], [-5.25], [4.75, 0.0]]
    # of the second: 1, 0 and 0, then 0, 2, and again the first
    assert found[4:] == [[0.0] * 3, [-1.0], [1.0], [0.0] * 3]
    assert [t for t, _ in samples] == [*whole, whole[0], *lacking[:3], lacking[0]]
    assert dead.tolist() == [False, False]


@pytest.mark.filterwarnings("ignore:std")  # of a single answer
def test_a_token_is_worth_more_or_less_than_its_critic_thought():
    """Rewards come with the last token of a turn; an empty turn has none; LAMBDA is 1."""
    config, learner, _ = stale_batch(steps=0, advantage="gae")
    method, hidden = learner.method, torch.randn(7, 64, requires_grad=True)
    torch.nn.init.normal_(method.net[2].weight)
    answers = [episode(0, [1.0, 0.5]), episode(1, [2.0]), episode(2, [0.0])]
    answers[2].turns = [(1, 2), (3, 3)]  # one token, and none
    answers[2].turn_rewards = [0.25, 7.0]
    samples, dead = method.samples(learner, [Group(0, 0, {}, answers)], config)
    spread = np.std([t.reward for t in answers], ddof=1)
    assert [credit for _, credit in samples] == [pytest.approx([1 / spread] * n) for n in (2, 1, 2)]
    assert not dead.any(), "to a critic no group is dead"

    tokens = losses.Tokens(*[None] * 3, advantages=torch.full((7,), 2.0), sequence=None)
    advantages, (seen, targets) = method.advantages(samples, tokens, hidden)
    to_go = torch.tensor([1.5, 1.5, 0.5, 0.5, 2.0, 2.0, 0.25])
    values = method.net(hidden).detach()[:, 0]
    torch.testing.assert_close(advantages, 2.0 * (to_go - values))
    torch.testing.assert_close(targets, to_go)
    assert not (seen.requires_grad or advantages.requires_grad), "the policy is not taught by it"
    alone, _ = method.samples(learner, [Group(0, 0, {}, answers[:1])], config)
    assert alone[0][1] == pytest.approx([1 / critic.SMALLEST_SPREAD] * 2)


def test_a_critic_learns_with_every_step_and_goes_on_from_a_checkpoint():
    config, learner, groups = stale_batch(steps=0, advantage="gae", group_size=1, lr=0.0)
    errors = [learner_step(learner, groups, config)["critic_loss"] for _ in range(10)]
    assert errors[-1] < 0.7 * errors[0], errors
    state = copy.deepcopy(learner.method.state())
    restored = method_of(dataclasses.replace(config, seed=1), learner.model)
    restored.load(state)
    lesson = torch.randn(5, 64), torch.randn(5)
    results = []
    for method in (learner.method, restored):
        method.learn([lesson])
        results.append(torch.cat([p.detach().flatten() for p in method.net.parameters()]))
    assert torch.equal(*results)


def test_optimal_baseline_has_the_least_variance():
    """Against a search: no other baseline gives a smaller sum of squares of w |g| (R - b)."""
    draw = torch.Generator().manual_seed(0)
    rewards, ratios, norms = torch.rand(3, 4, 6, generator=draw, dtype=torch.float64)
    best = optimal_baseline(rewards, ratios, norms)  # [4, 1]

    def spread(baseline):
        return (ratios * norms * (rewards - baseline)).square().sum(1)

    for step in (-0.1, -1e-3, 1e-3, 0.1):
        assert (spread(best) < spread(best + step)).all()
    ones = torch.ones_like(rewards)
    for weights in ((ones, ones), (0 * ratios, norms)):  # alike, or none left
        torch.testing.assert_close(optimal_baseline(rewards, *weights), rewards.mean(1, True))


def test_answers_are_weighed_by_ratio_and_length_of_gradient():
    config, learner, groups = stale_batch(advantage="opob")
    trajectories = trajectories_of(groups)
    ratios, norms = importance_weights(learner, trajectories, config)
    assert ratios.shape == norms.shape == (4, 4)
    now = sums(learner, trajectories, config)
    then = torch.tensor([float(t.logprobs[t.loss_mask].sum()) for t in trajectories])
    torch.testing.assert_close(ratios.flatten(), (now - then).exp().detach(), rtol=1e-3, atol=1e-5)
    assert ratios.std() > 1e-3, "the samples are not stale"
    lengths = []  # the true ones, one backward pass an answer
    for value in now:
        learner.model.flat_grad.zero_()
        value.backward(retain_graph=True)
        lengths.append(float(learner.model.flat_grad.norm()))
    likeness = np.corrcoef(norms.flatten(), lengths)[0, 1]
    assert likeness > 0.5, likeness

    samples, dead = learner.method.samples(learner, groups, config)
    rewards = torch.tensor([t.reward for t in trajectories]).view(4, 4)
    w = (ratios * norms) ** 2
    centred = rewards - (w * rewards).sum(1, keepdim=True) / w.sum(1, keepdim=True)
    expected = centred / (rewards.std(1, keepdim=True) + losses.STD_EPSILON)
    credit = torch.tensor([credit for _, credit in samples]).view(4, 4)
    torch.testing.assert_close(credit, expected)
    assert not dead.any()


def test_a_step_of_online_dpo_has_the_gradient_of_its_loss(monkeypatch):
    """Against autograd through -log sigmoid(beta m) of best and worst, on a real model."""
    monkeypatch.setattr(preferences, "BETA", 3.0)  # so that sigmoid(-beta m) is not 1/2
    config, learner, groups = stale_batch(objective="dpo", entropy=0.0, reference_weight=0.0)
    pairs = [sorted(group.trajectories, key=lambda t: t.reward) for group in groups]
    best, worst = [pair[-1] for pair in pairs], [pair[0] for pair in pairs]

    def margins(model):
        both = [sums(learner, answers, config, model) for answers in (best, worst)]
        return both[0] - both[1]

    difference = margins(learner.model) - margins(learner.reference).detach()
    learner.model.flat_grad.zero_()
    (-F.logsigmoid(preferences.BETA * difference).mean()).backward()
    expected = learner.model.flat_grad.clone()
    samples, dead = learner.method.samples(learner, groups, config)
    assert len(samples) == 8 and not dead.any()
    monkeypatch.setattr("learner.update_weights", lambda *_: {})
    learner_step(learner, groups, config)
    torch.testing.assert_close(learner.weights.grad, expected, rtol=1e-3, atol=1e-6)


def test_groups_without_a_better_answer_teach_dpo_nothing():
    config, learner, groups = stale_batch(objective="dpo")
    for t in groups[1].trajectories:
        t.reward = 0.5
    for t in groups[2].trajectories[1:]:
        t.finish = "env_error"
    samples, dead = learner.method.samples(learner, groups, config)
    assert dead.tolist() == [False, True, True, False] and len(samples) == 4
    for t in trajectories_of(groups):
        t.reward = 0.0
    weights = learner.weights.detach().clone()
    assert learner_step(learner, groups, config)["tokens"] == 0
    assert torch.equal(learner.weights.detach(), weights)
