"""The synchronous trainer: one step, one loop, checkpoints, and everything that can go wrong."""

import dataclasses
import json
import math
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from model_folders import named_weights

import learner as learner_room
import losses
import reward
import rollout
import train_async
import train_sync
from learner import learner_step, make_learner, naive_step
from logprobs import token_logprobs
from model import GPT, PRESETS, ModelConfig
from reward import task_of
from rollout import generate
from runtime import devices, runlog
from runtime import run as run_room
from runtime.books import batch_metrics
from runtime.checkpoint import load_checkpoint
from runtime.config import AttemptLost, Config, TrainingStopped, UserError, words
from runtime.exam import evaluate
from runtime.folder import read_lines
from runtime.messages import Group, Judgement, apply_judgement
from runtime.models import make_model
from runtime.terminal import run_main
from runtime.tokenizer import own_tokenizer
from runtime.verifier import exam_pool

encode = own_tokenizer().encode
SMALL = {"groups_per_step": 4, "group_size": 4, "slots": 16, "steps": 6, "eval_every": 3}


@pytest.fixture(autouse=True)
def few_held_out_problems(monkeypatch):
    """Evaluations are not what most of these tests look at: 8 problems, and not 256."""
    monkeypatch.setattr(
        run_room, "task_of", lambda config: dataclasses.replace(task_of(config), eval_size=8)
    )


def config_of(folder=None, **flags) -> Config:
    return dataclasses.replace(Config(), **{"out": str(folder or ""), **SMALL, **flags})


def batch_of(config, task=None):
    """A learner and one scored batch."""
    task = task or task_of(config)
    learner = make_learner(config, task, make_model(config, task))
    generator = rollout.make_generator(config, task, learner.model)
    prompts = learner_room.new_groups(learner, task, config.groups_per_step)
    groups = generate(generator, prompts, None)
    for group in groups:
        apply_judgement(group, Judgement(reward.verify_group(group, task, config), 0.0, 0.0))
    return learner, groups, task


def rows_of(folder) -> list[dict]:
    return read_lines(folder / "metrics.jsonl")


def test_a_run_leaves_everything_behind(tmp_path, capsys):
    train_sync.train(config_of(tmp_path / "run"))
    summary = json.loads((tmp_path / "run/summary.json").read_text())
    assert summary["steps"] == 6 and summary["samples"] == 6 * 16
    assert summary["staleness"] == {"max": 0, "mean": 0.0, "bound": 0}
    for name in ("reward.png", "timeline.png", "config.json", "metrics.jsonl", "events.jsonl"):
        assert (tmp_path / "run" / name).stat().st_size > 0, name
    assert capsys.readouterr().out.count("\n") == 3  # the verdict
    assert [r["step"] for r in rows_of(tmp_path / "run")] == list(range(7))


@pytest.mark.parametrize("trainer", [train_sync, train_async])
def test_late_evaluations_say_the_same_about_the_same_moments(tmp_path, trainer):
    held, weights = {}, {}
    flags = {"max_staleness": 0, "rollout_workers": 1, "reward_workers": 0}
    for when in ("live", "late"):
        run = tmp_path / when
        trainer.train(config_of(run, eval_when=when, **flags))
        rows = rows_of(run)
        held[when] = [(r["step"], r["eval"]) for r in rows if "eval" in r]
        weights[when] = load_checkpoint(run)["weights"]
        assert json.loads((run / "summary.json").read_text())["eval"]["after"] == rows[-1]["eval"]
    assert [step for step, _ in held["live"]] == [0, 3, 6]
    assert held["late"] == held["live"] and torch.equal(*weights.values())
    ended = {r["step"]: r["t"] for r in rows if "seconds" in r}
    late = {r["step"]: r["t"] for r in rows if "eval" in r and r["step"]}
    assert ended.keys() == set(range(1, 7))
    assert late.keys() == {3, 6}  # dated when their step was done, not when they were made
    assert all(ended[step - 1] <= t <= ended[step] for step, t in late.items())


def test_a_run_with_late_evaluations_goes_on(tmp_path):
    run = tmp_path / "run"
    train_sync.train(config_of(run, eval_when="late", eval_every=2, steps=3, checkpoint_every=3))
    seconds = rows_of(run)[3]["t"]
    train_sync.train(dataclasses.replace(Config(), resume=str(run), steps=5))
    rows = rows_of(run)
    assert [r["step"] for r in rows if "eval" in r] == [0, 4, 5]  # behind the checkpoint: cut
    assert [r["step"] for r in rows if "seconds" in r] == [1, 2, 3, 4, 5]
    assert next(r["t"] for r in rows if r["step"] == 4) > seconds
    (run / "summary.json").unlink()  # as if it had been killed in its last evaluations
    train_sync.train(dataclasses.replace(Config(), resume=str(run)))
    assert [r["step"] for r in rows_of(run) if "eval" in r] == [0, 5]


def test_interrupted_and_resumed_is_bitwise_the_same(tmp_path):
    run = tmp_path / "run"
    train_sync.train(config_of(run, checkpoint_every=3))
    whole = load_checkpoint(run)
    (run / "checkpoints/step0000006.pt").unlink()  # as if it had been killed after step 3
    resume = dataclasses.replace(Config(), resume=str(run))
    train_sync.train(resume)
    again = load_checkpoint(run)
    assert torch.equal(whole["weights"], again["weights"]) and again["version"] == 6
    assert whole["cursor"] == again["cursor"] == 24
    assert torch.equal(whole["reference"], again["reference"])
    steps = [r["step"] for r in rows_of(run)]
    assert steps == list(range(7))  # three of them were done twice and count once


@pytest.mark.parametrize("positions, fits", [("learned", False), ("rope", True)])
def test_init_starts_from_given_weights_and_their_shape(tmp_path, positions, fits):
    shape = dict(PRESETS["tiny"], vocab_size=own_tokenizer().size, context=9, positions=positions)
    model = GPT(ModelConfig(**shape, attention="dsa", scoring="indexer", top_k=2), seed=5)
    path = tmp_path / "weights.pt"
    torch.save({"shape": model.config.__dict__, "weights": model.flat}, path)
    flags = {"init": str(path), "task": "reverse:4", "steps": 2}  # it needs 10 positions
    if not fits:
        with pytest.raises(UserError, match=r"--init .*: must be .*10 positions .* has 9"):
            train_sync.train(config_of(tmp_path / "run", **flags))
        return
    config = config_of(tmp_path / "run", **flags)
    start = make_model(config, task_of(config))
    assert torch.equal(start.flat, model.flat) and start.config.attention == "dsa"
    train_sync.train(config)
    start.flat.copy_(load_checkpoint(tmp_path / "run")["weights"])
    frozen, moved = named_weights(model), named_weights(start)
    for name, weight in moved.items():  # an indexer is frozen in RL: no gradient reaches it
        assert torch.equal(weight, frozen[name]) == (".indexer." in name), name
    train_sync.train(dataclasses.replace(Config(), resume=str(tmp_path / "run"), steps=3))


@pytest.mark.parametrize("trainer", [train_sync, train_async])
def test_a_step_whose_metrics_could_not_be_written_is_done_again(tmp_path, monkeypatch, trainer):
    run, metrics = tmp_path / "run", runlog.RunLog.metrics

    def full(log, record):
        if record["step"] == 3:
            monkeypatch.setattr(runlog.RunLog, "metrics", metrics)
            raise OSError(28, "No space left on device")
        metrics(log, record)

    monkeypatch.setattr(runlog.RunLog, "metrics", full)
    flags = {"rollout_workers": 1, "reward_workers": 0, "steps": 3}
    with pytest.raises(OSError, match="No space left"):
        trainer.train(config_of(run, **flags))
    trainer.train(dataclasses.replace(Config(), resume=str(run)))
    assert [row["step"] for row in rows_of(run)] == [0, 1, 2, 3]


def test_resume_never_overwrites_a_finished_run(tmp_path):
    run = tmp_path / "run"
    train_sync.train(config_of(run, steps=2))
    before = (run / "summary.json").read_text()
    resume = dataclasses.replace(Config(), resume=str(run))
    with pytest.raises(UserError, match="--steps 2: must be more than the 2 steps"):
        train_sync.train(resume)
    assert (run / "summary.json").read_text() == before
    train_sync.train(dataclasses.replace(resume, steps=4))
    assert json.loads((run / "config.json").read_text())["steps"] == 4
    (run / "summary.json").unlink()  # killed just before it
    train_sync.train(resume)
    assert json.loads((run / "summary.json").read_text())["steps"] == 4
    times = [r["t"] for r in rows_of(run)]
    assert times == sorted(times)  # the clock goes on where it stopped


def test_reference_is_not_measured_against_itself(tmp_path, monkeypatch):
    monkeypatch.setattr(learner_room, "RENEW_REFERENCE", 2)
    flags = {"reference_every": 2, "steps": 6, "lr": 0.01}
    train_sync.train(config_of(tmp_path / "run", task="reverse", **flags))
    measured = [r["kl_reference"] for r in rows_of(tmp_path / "run")[1:] if "kl_reference" in r]
    assert len(measured) == 3 and min(measured) > 1e-6


def test_slow_environments_cost_only_their_own_episodes():
    base = reward.make_task("guess")

    def step(problem, answers):
        if problem["secret"] == 3:
            time.sleep(100)
        return base.step(problem, answers)

    task = dataclasses.replace(base, step=step)
    environment = rollout.make_environment(config_of(reward_seconds=0.5), task)
    tokens = np.array([*encode("guess"), *encode(" 7")])
    requests = [({"secret": s}, tokens, [(1, 2)], i) for i, s in enumerate((1, 3, 9, 3, 7))]
    replies = environment.respond(requests)
    assert [replies[i].failure for i in (1, 3)] == ["env_timeout"] * 2
    said = [(replies[i].observation, replies[i].reward) for i in (0, 2, 4)]
    assert said == [(encode("<"), 0.0), (encode(">"), 0.0), (None, 0.9)]


def test_one_learner_only():
    with pytest.raises(UserError, match="--learners 2: must be left out in train_sync.py"):
        train_sync.train(config_of(learners=2))
    message = "--rollout-weights bfloat16: must be left out in train_sync.py"
    with pytest.raises(UserError, match=message):
        train_sync.train(config_of(rollout_weights="bfloat16"))


def test_the_learning_rate_falls_to_zero(tmp_path):
    train_sync.train(config_of(tmp_path / "run", lr=0.01, reference_every=0))
    rates = [r["lr"] for r in rows_of(tmp_path / "run")[1:]]
    assert rates == pytest.approx([0.01 * (1 - i / 6) for i in range(6)])


def test_same_weights_give_the_same_logprobs():
    for attention in ("dense", "dsa"):
        config = config_of(task="sum:8", attention=attention, chunk_size=4, top_k=2)
        learner, groups, _ = batch_of(config)
        for group in groups:
            for t in group.trajectories:
                found, *_ = token_logprobs(learner.model, [(t, 0.0)], learner, config)
                sampled = torch.from_numpy(t.logprobs[t.loss_mask])
                assert (found - sampled).abs().max() <= 1e-5, attention


def test_what_the_policy_did_not_generate_does_not_count():
    """Prompts and replies are read by the model, and nothing that was noted beside them."""
    config = config_of(task="guess", reference_every=1)
    metrics, gradients = [], []
    for junk in (0.0, float("nan")):
        learner, groups, _ = batch_of(config)
        for t in [t for group in groups for t in group.trajectories]:
            t.logprobs[~t.loss_mask] = junk
        metrics.append(learner_step(learner, groups, config))
        gradients.append(learner.model.flat_grad.clone())
        metrics[-1].pop("seconds")
    assert metrics[0] == metrics[1] and torch.equal(*gradients)
    assert metrics[0]["tokens"] == sum(t.generated for g in groups for t in g.trajectories)


@pytest.mark.parametrize("task", ["guess", "reverse:3"])
@pytest.mark.parametrize("stale", [False, True])
def test_the_naive_step_is_the_same(task, stale, monkeypatch):
    """One group of several turns and lengths: the same loss, gradient and weights."""
    monkeypatch.setattr(learner_room, "GRADIENT_NORM", math.inf)
    flags = {"objective": "cispo", "advantage": "grpo", "entropy": 0.0, "reference_every": 0}
    flags |= {"token_budget": 60, "group_size": 8}
    config = config_of(task=task, groups_per_step=1, **flags)
    learner, (group,), _ = batch_of(config)
    task = task_of(config)
    other = make_learner(config, task, make_model(config, task))
    answers, width = group.trajectories, max(len(t.tokens) for t in group.trajectories)
    for i, t in enumerate(answers):
        t.reward = float(i % 3)
        if stale:  # some weights are cut, at 4
            t.logprobs[t.loss_mask] -= np.float32(0.5 * i)

    def padded(name):
        rows = [getattr(t, name) for t in answers]
        rows = [np.pad(row, (0, width - len(row))) for row in rows]
        return torch.from_numpy(np.stack(rows))

    tokens, mask = padded("tokens").long(), padded("loss_mask")
    rewards = torch.tensor([t.reward for t in answers])
    arguments = tokens, mask, padded("logprobs"), rewards, other.alphabet
    adamw = {"betas": (0.7, 0.99), "weight_decay": 0.0, "fused": True}  # as in `adamw_step`
    optimizer = torch.optim.AdamW([other.weights], config.lr, **adamw)
    for _ in range(2):
        metrics = learner_step(learner, [group], config)
        optimizer.param_groups[0]["lr"] = metrics["lr"]
        loss = naive_step(other.model, optimizer, *arguments)
    assert metrics["micro_batches"] > 1 and mask.sum() == metrics["tokens"]
    assert float(loss) == pytest.approx(metrics["loss"], abs=1e-5)
    gradients = learner.model.flat_grad, other.model.flat_grad
    assert gradients[0].norm() > 1e-3
    torch.testing.assert_close(*gradients, rtol=0, atol=1e-5)
    weights = learner.model.flat, other.model.flat
    torch.testing.assert_close(*weights, rtol=0, atol=1e-5)


def test_what_has_no_gradient_is_not_computed():
    """The same step, with an entropy bonus of nothing, computes all of it."""
    ends = []
    for every, entropy in ((0, 0.0), (0, 1e-30), (1, 0.0), (1, 1e-30)):
        more = {"reference_every": every, "groups_per_step": 8, "token_budget": 400}
        config = config_of(task="sum", entropy=entropy, **more)
        learner, groups, _ = batch_of(config)
        learner.version = 1
        for t in groups[0].trajectories + groups[3].trajectories:
            t.reward = 0.5
        metrics = learner_step(learner, groups, config)
        names = ("tokens", "dead_groups", "micro_batches")
        ends.append((learner.weights.detach(), *[metrics[name] for name in names]))
    torch.testing.assert_close(ends[0][0], ends[1][0], rtol=0, atol=1e-5)  # Adam enlarges rounding
    assert ends[0][1:3] == ends[1][1:3] and ends[0][2] >= 2
    assert ends[0][3] < ends[1][3]
    assert ends[2][3] == ends[3][3], "all of it has a gradient of the reference"


def test_metrics_speak_of_all_micro_batches():
    config = config_of(task="reverse", token_budget=30)
    learner, groups, _ = batch_of(config)
    run = SimpleNamespace(discarded=[])
    metrics = learner_step(learner, groups, config) | batch_metrics(run, groups, 0)
    everything = [t for g in groups for t in g.trajectories]
    assert metrics["tokens"] == sum(int(t.loss_mask.sum()) for t in everything)
    assert metrics["reward"] == pytest.approx(np.mean([t.reward for t in everything]))
    at_once = dataclasses.replace(config, token_budget=10**6, entropy=0.5)
    whole = learner_step(batch_of(at_once)[0], groups, at_once)
    assert metrics["micro_batches"] > whole["micro_batches"] == 1
    assert metrics["entropy"] == pytest.approx(whole["entropy"], rel=1e-5)
    bonus = (0.5 - config.entropy) * whole["entropy"]
    assert metrics["loss"] - whole["loss"] == pytest.approx(bonus, abs=1e-5)


def test_reference_follows_the_policy_and_feeds_the_damper(monkeypatch):
    monkeypatch.setattr(learner_room, "RENEW_REFERENCE", 2)
    config = config_of(task="reverse", reference_every=1, lr=0.01)
    learner, groups, _ = batch_of(config)
    learner_step(learner, groups, config)
    assert not torch.equal(learner.reference.flat, learner.model.flat)
    learner_step(learner, groups, config)  # version 2: a snapshot is taken
    assert torch.equal(learner.reference.flat, learner.model.flat)
    embedding = learner.reference.embed_tokens.weight
    assert torch.equal(embedding, learner.model.embed_tokens.weight)
    assert learner.damping["window"][0] == pytest.approx(0.0, abs=1e-6)
    assert learner.damping["window"][1] > 1e-6


def test_steps_that_are_not_finite_are_skipped_then_stop_the_run(tmp_path, monkeypatch):
    def broken(tokens, constants):
        gain, clipped, capped = losses.reinforce(tokens, constants)
        return gain * float("nan"), clipped, capped

    monkeypatch.setitem(losses.OBJECTIVES, "reinforce", broken)
    config = config_of(tmp_path / "run", objective="reinforce")
    learner, groups, _ = batch_of(config)
    weights = learner.model.flat.clone()
    metrics = learner_step(learner, groups, config)
    assert metrics["skipped"] == 1 and torch.equal(weights, learner.model.flat)
    assert learner.version == 1  # the batch is used up
    with pytest.raises(TrainingStopped, match="not finite 3 times in a row"):
        train_sync.train(config)
    assert all("reward" in r for r in rows_of(tmp_path / "run")[1:])


def failing(bad_share: int):
    """reverse, with a verifier that raises for every `bad_share`-th secret."""
    task = reward.make_task("reverse:3")

    def step(problem, answers):
        if int(problem["answer"]) % bad_share == 0:
            raise RuntimeError("verifier is broken")
        return task.step(problem, answers)

    return dataclasses.replace(task, step=step)


OWN = """
from dataclasses import replace

from tasks.{base} import make as original


def make(argument, seed, tokenizer):
    task = original(argument, seed, tokenizer)

    def step(problem, answers):
        if {when}:
            raise RuntimeError("no such tool: 7")
        return task.step(problem, answers)

    return replace(task, step=step)
"""


@pytest.mark.parametrize(
    "base, argument, when, finish",
    [
        ("digits", ":sort:3", "problem['answer'][0] in '02'", "env_error"),
        ("guess", "", "len(answers) == 2 and problem['secret'] % 4 == 0", "env_error"),
    ],
)
def test_the_first_failing_call_is_shown_with_its_place(
    tmp_path, capsys, base, argument, when, finish
):
    """Once a run, while it goes on: what the task raised, and the file and line to mend."""
    spec = tmp_path / "mine.py"
    spec.write_text(OWN.format(base=base, when=when))
    flags = {"max_failures": 1.0, "steps": 3, "eval_every": 9}
    train_sync.train(config_of(tmp_path / "run", task=f"{spec}{argument}", **flags))
    said = capsys.readouterr()
    place = f"{finish}: RuntimeError: no such tool: 7 (mine.py, line 12)"
    shown = [line for line in (said.out + said.err).splitlines() if "an episode failed" in line]
    assert len(shown) == 1 and re.search(r"an episode failed, group \d+: ", shown[0])
    assert place in shown[0]
    rows = rows_of(tmp_path / "run")[1:]
    failures = [r["failures"].get(finish, 0) for r in rows]
    assert len(failures) == 3 and sum(failures) > 1  # all counted, one shown
    assert {name for r in rows for name in r["failures"]} == {finish}


def test_too_many_failures_stop_the_run_and_say_why(tmp_path, monkeypatch):
    monkeypatch.setattr(run_room, "task_of", lambda config: failing(1))
    stopped = (
        "16 of 16 episodes failed.*verifier_error.*--set max_failures.*the first: verifier_error"
    )
    with pytest.raises(TrainingStopped, match=stopped + ": RuntimeError: verifier is broken"):
        train_sync.train(config_of(tmp_path / "run"))


def test_evaluation_changes_nothing(tmp_path):
    config = config_of(task="guess")
    task = task_of(config)
    learner = make_learner(config, task, make_model(config, task))
    weights, state = learner.model.flat.clone(), torch.get_rng_state()
    pool = exam_pool(config, task, tmp_path)
    first = evaluate(learner, config, task, pool)
    assert first == evaluate(learner, config, task, pool)
    pool.close()
    assert torch.equal(weights, learner.model.flat) and torch.equal(state, torch.get_rng_state())
    greedy = dataclasses.replace(config, group_size=1, temperature=0.0)
    generator = rollout.make_generator(greedy, task, learner.model)
    held = generate(generator, [Group(i, 0, task.reset(i, "eval")) for i in range(task.eval_size)])
    rewards = [reward.verify_group(group, task, config)[0].reward for group in held]
    assert first["reward"] == pytest.approx(np.mean(rewards)) and 0 < np.mean(rewards) < 1
    assert first["solved"] == np.mean([x >= task.solved for x in rewards])


@pytest.mark.parametrize(
    "flags, parts",
    [
        ({"task": "chess"}, ["chess", "guess", "reverse"]),
        ({"task": "jsonl:nowhere.jsonl"}, ["nowhere.jsonl"]),
        ({"task": "recall:999999"}, ["recall:999999", "16384"]),
        ({"device": "tpu"}, ["--device tpu"]),
        ({"init": "nowhere.pt"}, ["--init", "nowhere.pt", "weights file"]),
        ({"init": "requirements.txt"}, ["requirements.txt", "weights file"]),
    ],
)
def test_what_the_user_gets_wrong(tmp_path, monkeypatch, capsys, flags, parts):
    argv = words(flags)
    monkeypatch.setattr(sys, "argv", ["train_sync.py", "--out", str(tmp_path / "run"), *argv])
    with pytest.raises(SystemExit) as stop:
        run_main(train_sync.train, "test")
    line = capsys.readouterr().err
    assert stop.value.code == 2 and line.count("\n") == 1
    for word in parts:
        assert word in line
    assert not (tmp_path / "run").exists()


def test_a_checkpoint_that_does_not_fit_is_refused(tmp_path):
    train_sync.train(config_of(tmp_path / "run", steps=1))
    path = tmp_path / "run/config.json"
    path.write_text(path.read_text().replace('"positions": "learned"', '"positions": "rope"'))
    resume = dataclasses.replace(Config(), resume=str(tmp_path / "run"), steps=2)
    before = sorted(p.name for p in (tmp_path / "run/checkpoints").iterdir())
    with pytest.raises(UserError, match="its shape must have {'positions': 'rope'}"):
        train_sync.train(resume)
    assert before == sorted(p.name for p in (tmp_path / "run/checkpoints").iterdir())


GRADED = """
from reward import Step, Task


def make(argument, seed, tokenizer):
    def reset(index, split):
        return {"prompt": "a"}

    def step(problem, answers):
        return Step(None, REWARD, True)

    letters = tokenizer.encode("a") + tokenizer.encode("b")
    return Task(reset, step, (*letters, tokenizer.end), 1, 2, eval_size=2)
"""


def own_task(folder, value: str = "float(len(answers[-1]))") -> str:
    path = folder / "mine.py"
    path.write_text(GRADED.replace("REWARD", value))
    return str(path)


def test_a_run_folder_runs_no_code_that_the_user_has_not_named(tmp_path):
    task = own_task(tmp_path)
    train_sync.train(config_of(tmp_path / "run", task=task, steps=1))
    resume = dataclasses.replace(Config(), resume=str(tmp_path / "run"), steps=2)
    with pytest.raises(UserError, match=f"must be given --task {task}, whose code it runs"):
        train_sync.train(resume)
    train_sync.train(dataclasses.replace(resume, task=task))
    assert rows_of(tmp_path / "run")[-1]["step"] == 2


def test_what_a_tasks_code_does_to_its_process_does_not_reach_the_trainer(tmp_path):
    """It runs in a reward worker: the weights are those of a task that does nothing of the kind."""
    weights = []
    harm = ("torch.set_grad_enabled(False)", "os.chdir('/')", "os.umask(0o777)", "random.seed(0)")
    for number, what in enumerate(("None", *harm, "torch.set_default_dtype(torch.float64)")):
        value = f"({what}, float(len(answers[-1])))[1]"
        task = own_task(tmp_path, value).replace("mine.py", f"{number}.py")
        code = "import os, random, torch\n" + (tmp_path / "mine.py").read_text()
        (tmp_path / f"{number}.py").write_text(code)
        run = tmp_path / str(number)
        train_sync.train(config_of(run, task=task, steps=2))
        weights.append(load_checkpoint(run)["weights"])
    assert all(torch.equal(weights[0], other) for other in weights[1:])


def test_a_reward_that_is_too_large_fails_its_episode_only(tmp_path, capsys):
    task = own_task(tmp_path, "1e38 if answers[-1] == 'a' else 0.0")
    train_sync.train(config_of(tmp_path / "run", task=task, steps=2, max_failures=1.0))
    rows = [row for row in rows_of(tmp_path / "run") if "failures" in row]
    assert all(row["failures"].keys() == {"env_error"} for row in rows) and len(rows) == 2
    assert "1e+38 is not between -1e9 and 1e9" in capsys.readouterr().out


def test_answers_that_were_cut_are_counted_and_can_be_left_out(tmp_path, capsys):
    for overlong, reasons in (("keep", set()), ("drop", {"overlong"})):
        run = tmp_path / overlong
        flags = {"task": "reverse:2", "overlong": overlong, "max_failures": 1.0}
        train_sync.train(config_of(run, **flags, steps=2))
        rows = [row for row in rows_of(run) if "cut" in row]
        assert all(0.2 < row["cut"] < 1 and 1 < row["answer_tokens"] < 3 for row in rows)
        assert {name for row in rows for name in row["failures"]} == reasons
    assert "of the answers: try a larger one" in capsys.readouterr().out


def test_a_run_outlives_its_pictures(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr("runtime.report.draw_run", lambda run: 1 / 0)
    train_sync.train(config_of(tmp_path / "run", steps=1))
    assert "no pictures: ZeroDivisionError" in capsys.readouterr().out
    code = "from runtime.pictures import new_figure; new_figure((1, 1))"
    environment = os.environ | {"MPLBACKEND": "module://a_notebook"}
    subprocess.run(
        [sys.executable, "-c", code], cwd=Path(__file__).parent.parent, env=environment, check=True
    )


def test_a_step_that_was_not_made_uses_up_no_prompts(tmp_path, monkeypatch):
    run = tmp_path / "run"

    def fail(generator, groups, host):
        if groups[0].start == 3:
            raise OSError("the disk is full")
        return generate(generator, groups, host)

    with monkeypatch.context() as patch:
        patch.setattr(train_sync, "generate", fail)
        with pytest.raises(OSError, match="the disk is full"):
            train_sync.train(config_of(run))
    assert load_checkpoint(run)["cursor"] == 3 * SMALL["groups_per_step"]
    train_sync.train(config_of(tmp_path / "whole"))
    train_sync.train(dataclasses.replace(Config(), resume=str(run)))
    ends = [load_checkpoint(tmp_path / name)["weights"] for name in ("run", "whole")]
    assert torch.equal(*ends)


def test_a_checkpoint_that_cannot_be_written_hides_no_error(tmp_path, monkeypatch, capsys):
    def full(*_):
        raise OSError("the disk is full")

    def lose(*_):
        monkeypatch.setattr("runtime.run.save_checkpoint", full)
        raise AttemptLost("learner-1 died")

    monkeypatch.setattr(train_sync, "learner_step", lose)
    with pytest.raises(AttemptLost, match="learner-1 died"):
        train_sync.train(config_of(tmp_path / "run"))
    assert "no checkpoint could be written: the disk is full" in capsys.readouterr().out


def test_a_signal_that_also_ends_a_learner_stops_the_run(tmp_path, monkeypatch):
    def lose(*_):  # as schedulers send it, to every process
        os.kill(os.getpid(), signal.SIGTERM)
        raise AttemptLost("learner-0 died")

    monkeypatch.setattr(train_sync, "learner_step", lose)
    with pytest.raises(SystemExit, match="143"):
        train_sync.train(config_of(tmp_path / "run"))


@pytest.mark.parametrize(
    "flags, dtype", [("sse2 avx512_bf16 amx_tile", "bfloat16"), ("avx2", "float32")]
)
def test_dtype_auto_is_what_the_processor_has_instructions_for(tmp_path, monkeypatch, flags, dtype):
    cpuinfo = tmp_path / "cpuinfo"
    cpuinfo.write_text(f"model name\t: x\nflags\t: {flags} sse\n")
    monkeypatch.setattr(devices, "CPUINFO", cpuinfo)
    config = config_of(tmp_path / "run", dtype="auto", steps=1)
    train_sync.train(config)
    assert json.loads((tmp_path / "run/config.json").read_text())["dtype"] == dtype
