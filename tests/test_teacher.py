"""A teacher: what it is asked, what that does to advantages, and teachers that do not fit."""

import dataclasses
import json
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from qwen3 import write_folder

import train_async
import train_sync
from learner import make_learner, micro_batch_loss, new_groups
from logprobs import policy_logprobs
from methods import distillation as room
from methods.distillation import ask_teacher, distilled, teacher_of
from model import pack_tokens
from reward import task_of, verify_group
from rollout import generate, make_generator
from runtime.checkpoint import newest_weights
from runtime.config import Config, UserError, check
from runtime.folder import read_lines
from runtime.huggingface import export, stored_model
from runtime.messages import Answer, Group, Judgement, apply_judgement, flaw, pack, unpack
from runtime.models import make_model

ROOT = Path(__file__).parent.parent
FLAGS = {"task": "reverse:2", "groups_per_step": 4, "group_size": 4, "slots": 8, "eval_every": 1000}


@pytest.fixture(scope="module")
def taught(tmp_path_factory):
    """A run folder that can teach."""
    run = tmp_path_factory.mktemp("teacher") / "run"
    train_sync.train(Config(**FLAGS | {"steps": 2, "lr": 5e-3, "seed": 7}, out=str(run)))
    return run


def taught_by(teacher, groups):
    """Write what the teacher says into the groups."""
    for group in groups:
        sound = [(0.0, (), None)] * len(group.trajectories)
        found = ask_teacher(teacher, group.trajectories, sound)
        for t, said in zip(group.trajectories, found, strict=True):
            t.teacher = said


def asked(taught, **flags):
    """(config, learner, groups) of a student whose episodes the teacher has seen."""
    config = check(Config(**FLAGS | flags, teacher=str(taught)))
    task = task_of(config)
    learner = make_learner(config, task, make_model(config, task))
    generator = make_generator(config, task, learner.model)
    groups = generate(generator, new_groups(learner, task, config.groups_per_step))
    for group in groups:
        apply_judgement(group, Judgement(verify_group(group, task, config), 0.0, 0.0))
    taught_by(teacher_of(config, task), groups)
    return config, learner, groups


def test_the_teacher_is_asked_for_every_generated_token(taught):
    """Against one forward pass an episode, with the weights as the file has them."""
    config, learner, groups = asked(taught, temperature=0.7)
    stored = newest_weights(taught)
    model = make_model(config, task_of(config))
    model.flat.copy_(stored["weights"])
    for t in [t for group in groups for t in group.trajectories]:
        logits = model.logits(model(pack_tokens([t.tokens.tolist()])), learner.alphabet)
        policy = torch.log_softmax(logits / 0.7, -1)
        places = [learner.alphabet.tolist().index(x) for x in t.tokens[t.loss_mask]]
        rows = np.flatnonzero(t.loss_mask) - 1
        np.testing.assert_allclose(t.teacher, policy[rows, places].detach(), atol=1e-5)
        assert t.teacher.dtype == np.float32 and len(t.teacher) == t.generated


def test_the_expected_gradient_is_that_of_the_kl_to_the_teacher():
    """One token, all of them enumerated: on-policy, it descends KL(pi || teacher)."""
    logits = torch.randn(9, dtype=torch.float64, requires_grad=True)
    teacher = torch.log_softmax(torch.randn(9, dtype=torch.float64), -1)
    own = torch.log_softmax(logits, -1)
    (truth,) = torch.autograd.grad((own.exp() * (own - teacher)).sum(), logits, retain_graph=True)
    advantages = distilled(teacher, own)
    assert not advantages.requires_grad
    (found,) = torch.autograd.grad(-(own.exp().detach() * advantages * own).sum(), logits)
    torch.testing.assert_close(found, truth)


def test_a_step_uses_what_the_teacher_said(taught):
    config, learner, groups = asked(taught, entropy=0.0, reference_every=0, objective="reinforce")
    samples, _ = learner.method.samples(learner, groups, config)
    count = sum(t.generated for t, _ in samples)
    loss, *_ = micro_batch_loss(learner, samples, False, count, config)
    now = policy_logprobs(learner.model, [t for t, _ in samples], learner, config)
    own, said = torch.cat(now), torch.from_numpy(np.concatenate([t.teacher for t, _ in samples]))
    expected = -((said - own) * own).sum() / count
    assert float(loss.detach()) == pytest.approx(float(expected), rel=1e-4)
    for t, _ in samples:
        t.teacher = t.teacher + np.float32(1.0)
    moved, *_ = micro_batch_loss(learner, samples, False, count, config)
    assert float((moved - loss).detach()) == pytest.approx(-float(own.mean()), rel=1e-3)


def test_log_probs_of_a_teacher_travel_and_are_looked_at(taught):
    config, _, groups = asked(taught)
    group, size = groups[0], config.group_size
    again = unpack(pack(group))
    assert again.digest == group.digest
    again.trajectories[1].teacher[0] -= 1
    assert again.digest != group.digest, "a replay must notice another teacher"
    said = [t.teacher for t in group.trajectories]
    fresh = Group(group.group_id, group.start, group.problem, group.trajectories)
    verdicts = [(0.0, (0.0,), None)] * size
    for change, words in {
        "none": None,
        "short": "teacher's log-probs of",
        "NaN": "log-prob of the teacher nan",
    }.items():
        spoiled = [x.copy() for x in said]
        if change == "short":
            spoiled.pop()
        elif change == "NaN":
            spoiled[0][0] = np.nan
        answer = Answer(group.group_id, judgement=Judgement(verdicts, 0.0, 0.0, spoiled))
        found = flaw(answer, fresh, size, 0, 512)
        assert found is None if words is None else words in found, (change, found)
    blank = [dataclasses.replace(t, teacher=np.empty(0, np.float32)) for t in group.trajectories]
    fresh.trajectories = blank
    apply_judgement(fresh, Judgement(verdicts, 0.0, 0.0, said))
    assert all(np.array_equal(t.teacher, own) for t, own in zip(blank, said, strict=True))


@pytest.mark.parametrize("reward_workers", [0, 1])
def test_an_asynchronous_run_with_a_teacher_replays(taught, tmp_path, reward_workers):
    """One answer to a prompt; the teacher's log-probs come from the workers."""
    flags = FLAGS | {"group_size": 1, "groups_per_step": 8, "steps": 6, "slots": 16}
    run = tmp_path / "run"
    config = check(
        Config(**flags, teacher=str(taught), out=str(run), reward_workers=reward_workers)
    )
    train_async.train(config)
    rows = read_lines(run / "metrics.jsonl")
    assert all(row["grad_norm"] > 0 for row in rows if "grad_norm" in row)
    train_async.train(Config(replay=str(run)))  # it compares every digest


def test_a_student_becomes_its_teacher(taught, tmp_path):
    """KL(pi || teacher) goes down in a few steps, without any reward."""
    flags = FLAGS | {
        "group_size": 1,
        "groups_per_step": 64,
        "steps": 12,
        "lr": 3e-3,
        "entropy": 0.0,
    }
    run = tmp_path / "run"
    train_sync.train(Config(**flags, teacher=str(taught), out=str(run)))
    far = []
    for folder in (None, run):
        config, learner, groups = asked(taught)
        if folder:
            learner.model.flat.copy_(newest_weights(folder)["weights"])
            generator = make_generator(config, task_of(config), learner.model)
            groups = generate(generator, new_groups(learner, task_of(config), 4))
            taught_by(teacher_of(config, task_of(config)), groups)
        every = [t for group in groups for t in group.trajectories]
        far.append(np.mean([(t.logprobs[t.loss_mask] - t.teacher).mean() for t in every]))
    assert far[1] < 0.3 * far[0], far


def test_a_failed_episode_is_nothing_to_a_teacher(taught):
    """In a replay it has no tokens: the others must be packed without it, live and then."""
    config, _, groups = asked(taught)
    teacher, packs = teacher_of(config, task_of(config)), []
    episodes = groups[0].trajectories
    verdicts = [(0.0, (), "raised" if i == 1 else None) for i in range(len(episodes))]
    episodes[2].finish = "env_error"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            room, "policy_logprobs", lambda *args: packs.append(args[1]) or policy_logprobs(*args)
        )
        found = ask_teacher(teacher, episodes, verdicts)
    assert packs == [[episodes[0], episodes[3]]]
    assert not found[1].any() and not found[2].any() and found[0].any()
    assert [len(said) for said in found] == [t.generated for t in episodes]


def test_a_teacher_that_learns_on_teaches_what_it_did(taught, tmp_path):
    teacher, run = tmp_path / "teacher", tmp_path / "run"
    shutil.copytree(taught, teacher)
    flags = FLAGS | {"steps": 2, "max_staleness": 1}
    train_async.train(Config(**flags, teacher=str(teacher), out=str(run)))
    pinned = json.loads((run / "config.json").read_text())["teacher"]
    assert pinned == str(teacher / "checkpoints" / "step0000002.pt")
    train_sync.train(Config(resume=str(teacher), steps=3))
    train_async.train(Config(replay=str(run)))  # the same log-probs again


def test_a_teacher_has_learned_the_task(taught):
    config = Config(**FLAGS | {"task": "sort:2"}, teacher=str(taught))
    with pytest.raises(UserError, match="it has learned reverse:2, and not sort:2"):
        teacher_of(config, task_of(config))


def test_a_folder_of_weights_teaches_with_dense_attention(taught, tmp_path):
    folder = str(tmp_path / "whole")
    run = {"positions": "rope", "qk_norm": "yes", "steps": 1}
    train_sync.train(Config(**FLAGS | run, out=str(tmp_path / "run")))
    export(*stored_model(tmp_path / "run"), tmp_path / "whole")
    sparse = {"attention": "dsa", "scoring": "indexer", "chunk_size": 1, "top_k": 1}
    config = Config(**FLAGS | {"model": folder} | sparse, teacher=folder)
    teacher = teacher_of(config, task_of(config))
    assert teacher.model.config.attention == "dense"


def test_weights_to_start_from_may_be_a_run(taught, tmp_path):
    config = Config(**FLAGS, init=str(taught))
    model = make_model(config, task_of(config))
    assert torch.equal(model.flat, newest_weights(taught)["weights"])


@pytest.mark.parametrize(
    "flags, words",
    [
        (["--teacher", "nowhere"], ["--teacher", "nowhere", "no such folder"]),
        (["--teacher", "README.md"], ["README.md", "no such folder"]),
        (["--teacher", "docs"], ["docs", "run folder"]),
        (["--teacher", "RUN", "--objective", "dpo"], ["--teacher", "with --objective dpo"]),
        (["--teacher", "RUN", "--top-p", "0.9"], ["--top-p 0.9", "--teacher"]),
        (["--teacher", "RUN", "--task", "reverse:9"], ["RUN", "positions for task reverse:9"]),
        (["--teacher", "RUN", "--task", "sort:2"], ["RUN", "it has learned reverse:2"]),
        (["--teacher", "RUN", "--keep-dead", "no"], ["--keep-dead no", "--teacher"]),
    ],
)
def test_a_teacher_that_does_not_fit_costs_one_line(taught, tmp_path, flags, words):
    spoken = [word.replace("RUN", str(taught)) for word in flags]
    command = [sys.executable, "train_sync.py", "--out", str(tmp_path / "run"), *spoken]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 2 and done.stderr.count("\n") == 1, done.stderr
    for word in words:
        assert word.replace("RUN", str(taught)) in done.stderr, (word, done.stderr)
    assert not (tmp_path / "run").exists()


def test_a_teacher_of_another_vocabulary_is_refused(taught, tmp_path):
    folder = write_folder(tmp_path / "qwen")
    config = Config(**FLAGS, teacher=str(folder))
    with pytest.raises(UserError, match="another vocabulary"):
        teacher_of(config, task_of(config))


def test_a_run_without_a_whole_checkpoint_does_not_teach(taught, tmp_path):
    run = tmp_path / "run"
    shutil.copytree(taught, run)
    for path in (run / "checkpoints").glob("step*.pt"):
        path.write_bytes(path.read_bytes()[:-1])
    config = Config(**FLAGS, teacher=str(run))
    with pytest.raises(UserError, match="checkpoint that is whole"):
        teacher_of(config, task_of(config))
    assert json.loads((run / "config.json").read_text())["mode"] == "sync"
