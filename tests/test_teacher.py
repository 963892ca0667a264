"""A teacher: what it is asked, what that does to a step, and teachers that do not fit."""

import dataclasses
import json
import pickle
import shutil

import numpy as np
import pytest
import torch
from model_folders import write_folder
from test_methods import FLAGS, judged_groups, stale_batch, trajectories_of

import train_async
import train_sync
from learner import micro_batch_loss
from methods import distillation
from methods.distillation import ask_teacher, distilled, teacher_of
from methods.episodes import policy_logprobs
from model import pack_tokens
from reward import task_of
from rollout import make_generator
from runtime.checkpoint import newest_weights
from runtime.config import Config, UserError, check
from runtime.folder import read_lines
from runtime.huggingface import export, stored_model
from runtime.judge import judge_of
from runtime.messages import Answer, Group, Judgement, apply_judgement, flaw
from runtime.models import make_model


@pytest.fixture(scope="module")
def taught(tmp_path_factory):
    """A run folder that can teach."""
    run = tmp_path_factory.mktemp("teacher") / "run"
    train_sync.train(Config(**FLAGS | {"steps": 2, "lr": 5e-3, "seed": 7}, out=str(run)))
    return run


def ask(config, groups):
    judge = judge_of(config, task_of(config))
    for group in groups:
        apply_judgement(group, judge(group))


def asked(taught, **flags):
    """(config, learner, groups) of a student whose episodes the teacher has seen."""
    config, learner, groups = stale_batch(steps=0, teacher=str(taught), **flags)
    ask(config, groups)
    return config, learner, groups


def test_the_teacher_is_asked_for_every_generated_token(taught):
    """Against one forward pass an episode, with the weights as the file has them."""
    config, learner, groups = asked(taught, temperature=0.7)
    model = make_model(config, task_of(config))
    model.flat.copy_(newest_weights(taught)["weights"])
    for t in trajectories_of(groups):
        logits = model.logits(model(pack_tokens([t.tokens.tolist()])), learner.alphabet)
        policy = torch.log_softmax(logits / 0.7, -1).detach()
        columns = [learner.alphabet.tolist().index(x) for x in t.tokens[t.loss_mask]]
        rows = np.flatnonzero(t.loss_mask) - 1
        np.testing.assert_allclose(t.teacher, policy[rows, columns], atol=1e-5)
        assert t.teacher.dtype == np.float32 and len(t.teacher) == t.generated


def test_a_failed_episode_is_nothing_to_a_teacher(taught, monkeypatch):
    """In a replay it has no tokens: the others must be packed without it, live and then."""
    config, _, groups = asked(taught)
    episodes, packs = groups[0].trajectories, []
    verdicts = [(0.0, (), "raised" if i == 1 else None) for i in range(len(episodes))]
    episodes[2].finish = "env_error"
    seen = lambda *args: packs.append(args[1]) or policy_logprobs(*args)  # noqa: E731
    monkeypatch.setattr(distillation, "policy_logprobs", seen)
    answers = ask_teacher(teacher_of(config, task_of(config)), episodes, verdicts)
    assert packs == [[episodes[0], episodes[3]]]
    assert [bool(x.any()) for x in answers] == [True, False, False, True]
    assert [len(x) for x in answers] == [t.generated for t in episodes]


def test_log_probs_of_a_teacher_travel_and_are_looked_at(taught):
    _, _, (group, *_) = asked(taught)
    again = pickle.loads(pickle.dumps(group))
    assert again.digest == group.digest
    again.trajectories[1].teacher[0] -= 1
    assert again.digest != group.digest, "a replay must notice another teacher"
    logprobs = [t.teacher for t in group.trajectories]
    spoiled = [x.copy() for x in logprobs]
    spoiled[0][0] = np.nan
    verdicts = [(0.0, (0.0,), None)] * len(logprobs)
    fresh = [dataclasses.replace(t, teacher=np.empty(0, np.float32)) for t in group.trajectories]
    fresh = Group(group.group_id, group.start, group.problem, fresh)
    cases = (logprobs, "None"), (spoiled, "the teacher nan")
    for spoken, words in cases:
        answer = Answer(group.group_id, judgement=Judgement(verdicts, 0.0, 0.0, spoken))
        assert words in str(flaw(answer, fresh, len(logprobs), 0, 512))


def test_the_expected_gradient_is_that_of_the_kl_to_the_teacher():
    """One token, all of them enumerated: on-policy, it descends KL(pi || teacher)."""
    logits = torch.randn(9, dtype=torch.float64, requires_grad=True)
    teacher = torch.log_softmax(torch.randn(9, dtype=torch.float64), -1)
    policy = torch.log_softmax(logits, -1)
    kl = (policy.exp() * (policy - teacher)).sum()
    (truth,) = torch.autograd.grad(kl, logits, retain_graph=True)
    advantages = distilled(teacher, policy)
    assert not advantages.requires_grad
    loss = -(policy.exp().detach() * advantages * policy).sum()
    torch.testing.assert_close(torch.autograd.grad(loss, logits)[0], truth)


def test_a_step_uses_what_the_teacher_said(taught):
    config, learner, groups = asked(taught, entropy=0.0, reference_every=0, objective="reinforce")
    samples, _ = learner.method.samples(learner, groups, config)
    assert all(all(factors) for _, factors in samples), "what has no advantage is not computed"
    count = sum(t.generated for t, _ in samples)
    loss, *_ = micro_batch_loss(learner, samples, False, count, config)
    policy = torch.cat(policy_logprobs(learner.model, [t for t, _ in samples], learner, config))
    teacher = torch.from_numpy(np.concatenate([t.teacher for t, _ in samples]))
    expected = -((teacher - policy) * policy).sum() / count
    assert float(loss.detach()) == pytest.approx(float(expected), rel=1e-4)


def test_a_student_becomes_its_teacher(taught, tmp_path):
    """KL(pi || teacher) goes down in a few steps, without siblings, and without any reward."""
    flags = {"group_size": 1, "groups_per_step": 64, "steps": 12, "entropy": 0.0}
    train_sync.train(Config(**FLAGS | flags, teacher=str(taught), out=str(tmp_path / "run")))
    config, learner, before = asked(taught)
    learner.model.flat.copy_(newest_weights(tmp_path / "run")["weights"])
    task = task_of(config)
    after = judged_groups(make_generator(config, task, learner.model), learner, task, config)
    ask(config, after)
    far = [
        np.mean([(t.logprobs[t.loss_mask] - t.teacher).mean() for t in trajectories_of(groups)])
        for groups in (before, after)
    ]
    assert far[1] < 0.3 * far[0], far


@pytest.mark.parametrize("reward_workers", [0, 1])
def test_a_run_whose_teacher_learns_on_replays(taught, tmp_path, reward_workers):
    """Workers ask the teacher, as it was when the run began."""
    teacher, run = tmp_path / "teacher", tmp_path / "run"
    shutil.copytree(taught, teacher)
    flags = FLAGS | {"steps": 3, "max_staleness": 1, "group_size": 1, "groups_per_step": 8}
    config = Config(**flags, teacher=str(teacher), out=str(run), reward_workers=reward_workers)
    train_async.train(config)
    assert all(row["grad_norm"] > 0 for row in read_lines(run / "metrics.jsonl")[1:])
    pinned = json.loads((run / "config.json").read_text())["teacher"]
    assert pinned == str(teacher / "checkpoints" / "step0000002.pt")
    train_sync.train(Config(resume=str(teacher), steps=3))
    train_async.train(Config(replay=str(run)))  # it compares every digest


def test_a_folder_of_weights_teaches_with_dense_attention(tmp_path):
    pytest.importorskip("tokenizers", reason="needs tokenizers: requirements-dev.txt")
    train_sync.train(
        Config(
            **FLAGS | {"positions": "rope", "qk_norm": "yes", "steps": 1}, out=str(tmp_path / "run")
        )
    )
    folder = tmp_path / "whole"
    export(*stored_model(tmp_path / "run"), folder)
    sparse = {"attention": "dsa", "scoring": "indexer", "chunk_size": 1, "top_k": 1}
    config = Config(**FLAGS | {"model": str(folder)} | sparse, teacher=str(folder))
    assert teacher_of(config, task_of(config)).model.config.attention == "dense"


@pytest.fixture(scope="module")
def folders(taught, tmp_path_factory):
    """What --teacher may name."""
    empty = tmp_path_factory.mktemp("empty")
    damaged, qwen = (tmp_path_factory.mktemp("folders") / name for name in ("damaged", "qwen"))
    shutil.copytree(taught, damaged)
    for path in (damaged / "checkpoints").glob("step*.pt"):
        path.write_bytes(path.read_bytes()[:-1])
    others = {"EMPTY": empty, "FILE": taught / "config.json", "QWEN": write_folder(qwen)}
    return others | {"RUN": taught, "DAMAGED": damaged}


@pytest.mark.parametrize(
    "teacher, flags, words",
    [
        ("nowhere", {}, "no such folder"),
        ("DAMAGED", {}, "checkpoint that is whole"),
        ("QWEN", {}, "it has another vocabulary"),
        ("RUN", {"task": "reverse:9"}, "positions for reverse:9"),
        ("RUN", {"task": "sort:2"}, "it has learned reverse:2, and not sort:2"),
        ("RUN", {"objective": "dpo"}, "with --objective dpo"),
        ("RUN", {"top_p": 0.9}, "with --teacher"),
    ],
)
def test_a_teacher_that_does_not_fit_costs_one_line(folders, tmp_path, teacher, flags, words):
    run, teacher = tmp_path / "run", str(folders.get(teacher, teacher))
    with pytest.raises(UserError) as error:
        train_sync.train(check(Config(**FLAGS | flags, teacher=teacher, out=str(run))))
    line = str(error.value)
    assert words in line and teacher in line and "\n" not in line and not run.exists(), line
