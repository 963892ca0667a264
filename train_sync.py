"""train_sync.py: reinforcement learning, one thing at a time: generate, verify, learn, repeat.

    python train_sync.py                     # guess a number, from random weights
    python train_sync.py --task reverse:6    # --help lists every flag

This is the honest baseline and the place to start reading: `main` is the whole algorithm in one
flat loop. `learner_step` and `evaluate` live here; `train_async.py` imports them and adds only
what asynchrony needs. Left out: set-up and checkpoints (learner.py), processes, queues, staleness
(here it is always 0).
"""

import dataclasses
import gc
import time
from collections import Counter
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from tqdm import tqdm

import common
import ledger
import losses
import report
import reward
from buffer import Group, Trajectory, apply_verdicts, pack
from checkpoint import checkpoint, load_checkpoint, restore
from common import Config
from learner import (
    Learner,
    capacity_of,
    check_step,
    facts_of,
    make_environment,
    make_generator,
    make_learner,
    make_task,
    new_groups,
    resumed,
    score,
    show_episode,
)
from model import GPT, generated_logprobs, pack_tokens
from rollout import COUNTED, Generator, generate

# --------------------------------------------------------------------------------------- a step


def token_logprobs(
    model: GPT, trajectories: list[Trajectory], alphabet: Tensor, temperature: float
):
    """Log-probs [M] and entropies [M] of the M generated tokens, in order of the trajectories."""
    packed = pack_tokens([t.tokens for t in trajectories], model.flat.device)
    mask = torch.from_numpy(np.concatenate([t.loss_mask for t in trajectories]))
    rows = mask.nonzero()[:, 0].to(model.flat.device)
    return generated_logprobs(model, packed, rows, alphabet, temperature)


def learner_step(learner: Learner, groups: list[Group], config: Config, rank: int = 0) -> dict:
    """One optimizer step on a batch of groups; returns the step's metrics.

    Gradients of all micro-batches add up to those of the whole step, because every loss is divided
    by `count`, the generated tokens of the step (failed episodes left out). With several learners
    each one gets the whole batch and takes every L-th micro-batch; one all-reduce joins the
    gradients. A step whose loss or gradient is not finite is skipped and counted; see `check_step`.
    """
    begin, device = time.monotonic(), learner.model.flat.device
    trajectories = [t for g in groups for t in g.trajectories]
    advantages, dead = group_signal(groups, config.advantage)
    pairs = zip(trajectories, advantages.tolist(), strict=True)
    used = [(t, a) for t, a in pairs if not t.failed and t.generated]
    count = sum(t.generated for t, _ in used)
    batches = pack([len(t.tokens) for t, _ in used], config.token_budget, config.learners)
    measure = learner.reference is not None and (learner.version + 1) % config.reference_every == 0
    reference_seconds, parts, total_loss = 0.0, [], 0.0
    sampled = (learner.alphabet, config.temperature)  # from what, and how
    learner.model.flat_grad.zero_()

    for indices in batches[rank :: config.learners]:
        batch = [used[i][0] for i in indices]
        logprobs, entropy = token_logprobs(learner.model, batch, *sampled)
        sizes = torch.tensor([t.generated for t in batch])
        sequence = torch.repeat_interleave(torch.arange(len(batch)), sizes).to(device)  # [M]
        advantage = torch.tensor([used[i][1] for i in indices]).to(device)[sequence]  # [M]
        behaviour = np.concatenate([t.logprobs[t.loss_mask] for t in batch])
        behaviour = torch.from_numpy(behaviour).to(device)  # [M]
        mask = torch.ones_like(sequence, dtype=torch.bool)
        # one update a step: the proximal policy is the one whose forward pass this is
        proximal = logprobs.detach()
        loss, sums = losses.OBJECTIVES[config.objective](
            logprobs, proximal, behaviour, advantage, mask, sequence, count, losses.Settings()
        )
        loss = loss - config.entropy * losses.token_mean(entropy, mask, count)
        reference = None
        if measure:
            start = time.monotonic()
            with torch.no_grad():
                reference, _ = token_logprobs(learner.reference, batch, *sampled)
            reference_seconds += time.monotonic() - start
            # weighted with pi / mu: the samples may be stale
            kl = losses.token_mean(losses.unbiased_k3(logprobs, reference, behaviour), mask, count)
            loss = loss + config.reference_weight * losses.reference_scale(learner.damper) * kl
        loss.backward()
        total_loss += float(loss.detach())
        parts += [losses.diagnostics(logprobs, behaviour, mask, entropy.detach(), sums, reference)]

    if config.learners > 1:
        dist.all_reduce(learner.model.flat_grad)
        shares: list = [None] * config.learners
        dist.all_gather_object(shares, [parts, total_loss])
        parts = [part for share, _ in shares for part in share]
        total_loss = sum(loss for _, loss in shares)
    metrics = losses.merge_diagnostics(parts) if parts else {"tokens": 0}
    metrics.update(update_weights(learner, config, total_loss, metrics))
    rewards = [t.reward for t in trajectories if not t.failed]
    failures = Counter(t.finish for t in trajectories if t.failed)
    seconds = time.monotonic() - begin
    return metrics | {
        "reward": float(np.mean(rewards)) if rewards else 0.0,
        "samples": len(trajectories),
        "sequence_tokens": sum(len(t.tokens) for t in trajectories),
        "micro_batches": len(batches),
        "dead_groups": int(dead.sum()),
        "failures": dict(failures),
        "seconds": seconds,
        "reference_share": reference_seconds / seconds,
    }


def group_signal(groups: list[Group], kind: str) -> tuple[Tensor, Tensor]:
    """Advantages of all trajectories, laid end to end, and which groups teach nothing [G]."""
    # [G, n], by way of an array, which takes a third of the time
    rewards = torch.from_numpy(np.float32([[t.reward for t in g.trajectories] for g in groups]))
    valid = torch.from_numpy(np.array([[not t.failed for t in g.trajectories] for g in groups]))
    advantages, dead = losses.group_advantages(rewards, kind, valid)
    return advantages.flatten(), dead


def update_weights(learner: Learner, config: Config, loss: float, metrics: dict) -> dict:
    """Clip the gradient, step the optimizer, feed the damper; or skip a step that is not finite."""
    gradient, scales = learner.model.flat_grad, losses.reference_scale(learner.damper)
    norm = float(gradient.norm())
    progress = min(1.0, learner.version / max(1, config.steps))
    finite = bool(np.isfinite(loss + norm))
    if finite and "kl_reference" in metrics:
        learner.damper = losses.observe(learner.damper, metrics["kl_reference"])
    lr = config.lr * (1 - progress * (1 - config.lr_end)) * losses.lr_scale(learner.damper)
    if finite and metrics["tokens"]:
        if norm > config.grad_clip > 0:
            gradient.mul_(config.grad_clip / norm)
        learner.optimizer.param_groups[0]["lr"] = lr
        learner.optimizer.step()
    learner.skipped_in_row = 0 if finite else learner.skipped_in_row + 1
    learner.skipped += not finite
    learner.version += 1
    refresh = config.reference_refresh
    if learner.reference is not None and refresh and learner.version % refresh == 0:
        learner.reference.flat.copy_(learner.model.flat)
    return {
        "loss": loss,
        "grad_norm": norm,
        "lr": lr,
        "kl_window": losses.window_mean(learner.damper),
        "reference_weight": config.reference_weight * scales,
        "skipped": learner.skipped,
    }


# ----------------------------------------------------------------------------------- evaluation


def evaluate(learner: Learner, config: Config, task: reward.Task) -> dict:
    """Greedy answers to every held-out problem, by the weights as they are between two steps.

    It runs where the weights are changed, so it cannot race with training. Returns `solved`
    (share), `reward` (mean) and `turns` (mean).
    """
    slots = min(config.slots, task.eval_size)
    environment, capacity = make_environment(config, task), capacity_of(config, task)
    generator = Generator(learner.model, environment, slots, capacity, 1, temperature=0.0)
    problems = [Group(i, 0, task.reset(i, "eval")) for i in range(task.eval_size)]
    groups = generate(generator, problems)
    for group in groups:
        apply_verdicts(group, score(group, task, config))
    episodes = [g.trajectories[0] for g in groups]
    return {
        "solved": float(np.mean([t.reward >= task.solved for t in episodes])),
        "reward": float(np.mean([t.reward for t in episodes])),
        "turns": float(np.mean([len(t.turns) for t in episodes])),
    }


# ------------------------------------------------------------------------------------ the loop


def after_step(learner, groups, metrics, config, task, run, watch, flying=((), ()), **shown):
    """What follows a step in both trainers: checks, evaluation, samples, checkpoint, metrics."""
    version = learner.version
    due = version % config.eval_every == 0 or version == config.steps
    if due and config.eval_when == "late":
        seconds = round(time.monotonic() - watch.start, 3)
        watch.kept.append((seconds, version, learner.model.flat.clone()))
    elif due:
        result = evaluate(learner, config, task)
        metrics["eval"] = result
        shown["eval"] = f"{result['solved']:.2f}"
    if version % config.samples_every == 0:
        watch.say("\n".join(show_episode(g) for g in groups[:3]))
        samples = [{"version": version, "text": show_episode(g)} for g in groups[:3]]
        common.append_lines(run / "samples.jsonl", samples)
    watch.step({"step": version, **metrics}, reward=f"{metrics['reward']:.2f}", **shown)
    if version % config.checkpoint_every == 0:  # last: what it resumes from must be complete
        checkpoint(learner, run, watch, *flying)
    check_step(learner, groups, metrics, config, run)


def evaluate_kept(learner, config: Config, task, run: Path, watch) -> None:
    """The evaluations that --eval-when late has put off, when nobody needs the learner any more.

    The weights are kept in memory only: a run that was killed has lost these evaluations.
    """
    for seconds, version, weights in tqdm(watch.kept, "evaluations", disable=not watch.kept):
        learner.model.flat.copy_(weights)
        row = {"t": seconds, "step": version, "eval": evaluate(learner, config, task)}
        common.append_lines(run / "metrics.jsonl", [row])


def open_training(config: Config, mode: str, device: str):
    """Task, run folder, learner (resumed or new), progress: the set-up of both trainers."""
    task = make_task(config)
    config = dataclasses.replace(config, steps=config.steps or task.steps)
    capacity_of(config, task)
    state = load_checkpoint(Path(config.resume)) if config.resume else None
    learner, seconds = make_learner(config, task, device), 0.0
    run = common.open_run(config, mode)
    if state:
        restore(learner, state, config)
        if learner.version >= config.steps:
            done = f"must be more than the {learner.version} steps that the run has"
            raise common.UserError(f"--steps {config.steps}: {done}")
        seconds = common.forget_after(run / "metrics.jsonl", learner.version)
        try:
            ledger.forget_after(run / "events.jsonl", learner.version, state["in_flight"])
        except ValueError as error:
            raise common.UserError(f"--resume {run}: {error}") from error
    watch = common.Watch(run, config.steps, learner.version, seconds)
    if not state:
        result = evaluate(learner, config, task)
        common.append_lines(run / "metrics.jsonl", [{"t": 0.0, "step": 0, "eval": result}])
        checkpoint(learner, run, watch)  # so that a run can always be resumed
    gc.freeze()  # libraries and weights stay: to look them through again takes 8% of a step
    return config, task, run, learner, watch, state


def train(config: Config) -> None:
    """The synchronous algorithm: generate, verify, learn, and nothing at the same time."""
    stop, busy = common.Stop(), {"rollout": 0.0, "learner": 0.0}
    config = resumed(config)
    for flag, only in {"learners": 1, "rollout-weights": "float32"}.items():
        if (value := getattr(config, flag.replace("-", "_"))) != only:  # one process, one model
            raise common.UserError(f"--{flag} {value}: must be {only} in train_sync.py")
    (device, *_), _ = common.pick_devices(config)
    common.set_threads(config, 1, device)
    config, task, run, learner, watch, _ = open_training(config, "sync", device)
    generator = make_generator(config, task, learner.model)

    try:
        while learner.version < config.steps and not stop.asked:
            begin, version, before = time.monotonic(), learner.version, dict(generator.counts)
            generator.set_weights(version, None)
            groups = generate(generator, new_groups(learner, task, config.groups_per_step))
            done = {name: generator.counts[name] - before[name] for name in COUNTED}
            generated = watch.span("rollout-0", "generate", begin, version=version, **done)
            begin = time.monotonic()
            for group in groups:
                apply_verdicts(group, score(group, task, config))
            watch.span("reward-0", "score", begin)
            begin = time.monotonic()
            metrics = learner_step(learner, groups, config)
            busy["learner"] += watch.span("learner", "train", begin, version=version)
            busy["rollout"] += generated
            metrics |= {"staleness_max": 0, "staleness_mean": 0.0}
            rates = {"generate": generated, "learn": metrics["seconds"]}
            rates = {role: f"{metrics['tokens'] / took:.0f}/s" for role, took in rates.items()}
            after_step(learner, groups, metrics, config, task, run, watch, **rates)
    finally:
        watch.bar.close()
        checkpoint(learner, run, watch)
    wall = time.monotonic() - watch.start
    tokens = generator.counts["tokens"]
    facts = facts_of(learner, config, watch) | {
        "staleness_bound": 0,
        "tokens_generated": tokens,
        "rollout_tokens_per_s": round(tokens / max(busy["rollout"], 1e-9)),
        "utilization": {role: seconds / wall for role, seconds in busy.items()},
        "groups": {"admitted": learner.next_group, "trained": learner.next_group, "in_flight": 0}
        | {"discarded": {}, "requeued": 0},
    }
    evaluate_kept(learner, config, task, run, watch)
    print(report.summarise(run, facts))


if __name__ == "__main__":
    common.run_main(train, __doc__)
