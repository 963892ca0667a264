"""nano.py, the whole system in one file: it learns, it is what the real files are, and it ends."""

import argparse
import ast
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

import dsa
import losses
import model
import nano

ROOT = Path(__file__).parent.parent
SOURCE = (ROOT / "nano.py").read_text()


def arguments(**more) -> argparse.Namespace:
    plain = {"seed": 0, "sparse": False, "steps": 80, "eta": 2, "devices": ["cpu"]}
    return argparse.Namespace(**plain | more)


def trained(way, monkeypatch, **more) -> tuple:
    """A whole run: its last score, and how old the oldest token of each step was."""
    args, log = arguments(**more), argparse.Namespace(spans=[], scores=[])
    ages, train = [], nano.train

    def noting(learner, answers, *others):
        ages.append(learner.version - int(answers[2].min()))
        train(learner, answers, *others)

    monkeypatch.setattr(nano, "train", noting)
    way(args, log)
    return log.scores[-1][1], ages


@pytest.mark.parametrize("way, seed", [(nano.train_sync, 0), (nano.train_async, 1)])
def test_it_learns(way, seed, monkeypatch):
    score, ages = trained(way, monkeypatch, seed=seed)
    assert score >= 0.9 and len(ages) == 80
    assert 0 <= max(ages) <= (2 if way is nano.train_async else 0)


@pytest.mark.parametrize("sparse, steps", [(False, 30), (True, 15)])
def test_no_token_is_older_than_eta(sparse, steps, monkeypatch):
    _, ages = trained(nano.train_async, monkeypatch, steps=steps, eta=1, sparse=sparse)
    assert len(ages) == steps and max(ages) == 1


def test_a_batch_that_is_too_old_is_an_error(monkeypatch):
    """What the theorem excludes: here the answers are said to be of another version."""
    monkeypatch.setattr(nano.np, "concatenate", lambda arrays: arrays[0] * 0 - 7)
    with pytest.raises(AssertionError, match="a token is 7 versions old, at most 2"):
        nano.train_async(arguments(steps=1), argparse.Namespace(spans=[], scores=[]))


@pytest.mark.parametrize("sparse", [False, True])
def test_its_attention_is_that_of_dsa(sparse):
    torch.manual_seed(0)
    q, k, v = torch.randn(3, 2, 4, 9, 16)  # [B, H, T, D] each
    found = nano.attention(q, k, v, sparse).transpose(1, 2)
    chunks = nano.TOP_K if sparse else 5
    for b in range(2):
        rows = (x[b].transpose(0, 1) for x in (q, k, v))
        wanted = dsa.naive_attention(*rows, nano.CHUNK, chunks)
        torch.testing.assert_close(found[b], wanted, rtol=0, atol=1e-6)


def test_its_log_probs_are_those_of_the_model():
    mine = nano.GPT(arguments())
    shape = dict(layers=nano.LAYERS, width=nano.WIDTH, heads=nano.HEADS, kv_heads=nano.HEADS)
    shape |= dict(head_width=nano.WIDTH // nano.HEADS, hidden=nano.HIDDEN, vocab_size=nano.V)
    real = model.GPT(model.ModelConfig(**shape, context=nano.PROMPT + nano.DIGITS))
    names = {"embed": "embed_tokens.weight", "places": "embed_positions.weight"}
    weights = dict(real.named_parameters())
    for name, value in mine.named_parameters():
        weights[names.get(name, name)].data.copy_(value.data)
    tokens = nano.prompts(range(3))
    for row, found in zip(tokens, mine(tokens), strict=True):
        wanted = real.logits(model.naive_forward(real, row)).log_softmax(-1)
        torch.testing.assert_close(found, wanted, rtol=0, atol=1e-5)


def test_its_advantages_and_loss_are_those_of_losses():
    torch.manual_seed(0)
    rewards = torch.rand(3, 8)
    wanted, _ = losses.group_advantages(rewards, "grpo")
    torch.testing.assert_close(nano.group_advantages(rewards), wanted)
    logprobs = (-3 * torch.rand(6, 4)).requires_grad_()
    behaviour, advantages = -3 * torch.rand(6, 4), torch.randn(6, 4)
    found = nano.policy_loss(logprobs, behaviour, advantages)
    (gradient,) = torch.autograd.grad(found, logprobs)
    flat = [x.flatten() for x in (logprobs, behaviour, advantages)]
    tokens = losses.Tokens(flat[0], None, *flat[1:], torch.zeros(24, dtype=torch.long))
    wanted, facts = losses.policy_loss("cispo", tokens, 24)
    assert facts["capped"].any() and not facts["capped"].all()
    torch.testing.assert_close(found, wanted)
    torch.testing.assert_close(gradient, torch.autograd.grad(wanted, logprobs)[0])


@pytest.mark.parametrize("kl, rate", [(0.9, 1.0), (1.1, 0.6)])
def test_far_from_the_reference_it_learns_more_slowly(kl, rate):
    learner = nano.Learner(arguments())
    learner.window.extend([kl] * 1000)
    answers = nano.generate(learner.model, nano.prompts([0] * nano.ANSWERS), 0)
    learner.step(*answers[:2])
    assert learner.optimizer.param_groups[0]["lr"] == rate * nano.LEARNING_RATE
    assert len(learner.window) == 1000 and learner.version == 1


def test_weights_of_two_versions_are_not_taken():
    """The learner writes while they are read: they are read again."""
    old, new = (nano.GPT(arguments(seed=seed)) for seed in (0, 1))
    mailbox = nano.Mailbox(old)
    mailbox.begun.fill_(3)  # a write begins
    mailbox.ended.fill_(2)  # of the write before

    class Flat:
        reads = 0

        def clone(self):
            Flat.reads += 1
            if Flat.reads == 2:  # now it has ended
                mailbox.flat = torch.nn.utils.parameters_to_vector(new.parameters()).detach()
                mailbox.ended.fill_(3)
            return torch.zeros(sum(p.numel() for p in old.parameters()))

    mailbox.flat = Flat()
    assert mailbox.adopt(old, 1) == 3 and Flat.reads == 2
    assert all(torch.equal(a, b) for a, b in zip(old.parameters(), new.parameters(), strict=True))
    assert mailbox.adopt(old, 3) == 3


@pytest.mark.skipif(sys.platform != "linux", reason="looks into /proc")
def test_ctrl_c_leaves_no_process():
    command = [sys.executable, "nano.py", "--steps=100000"]
    process = subprocess.Popen(
        command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, start_new_session=True
    )
    assert process.stdout.readline() == b"asynchronous\n"
    assert process.stdout.readline().startswith(b"step  10")
    os.killpg(process.pid, signal.SIGINT)
    out, _ = process.communicate(timeout=30)
    assert out.endswith(b"stopped\n") and b"Traceback" not in out, out
    deadline = time.monotonic() + 10
    with pytest.raises(ProcessLookupError):
        while time.monotonic() < deadline:
            os.killpg(process.pid, 0)


def test_it_imports_nothing_of_the_project():
    found = set()
    for node in ast.walk(ast.parse(SOURCE)):
        if isinstance(node, ast.Import):
            found |= {alias.name.partition(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            found.add(node.module.partition(".")[0])
    assert found - set(sys.stdlib_module_names) == {"numpy", "torch", "matplotlib"}
