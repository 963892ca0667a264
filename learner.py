"""learner.py: what is trained, and how the rooms are joined: set-up from flags.

`Learner` is plain data: policy, optimizer, reference, damper, counters. The functions here build
it, its task and its generator from a `Config`. Left out: what a step does to it (train_sync.py),
how it is saved (checkpoint.py) and everything about processes (train_async.py).
"""

import time
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

import losses
from model import GPT, generated_logprobs, pack_tokens
from reward import Task, score
from rollout import Generator, capacity_of, generate, make_environment
from runtime.config import Config, TrainingStopped
from runtime.messages import Group, Trajectory, apply_verdicts, group_to_parts


@dataclass
class Learner:
    """Everything that a step changes, and so everything that a checkpoint holds."""

    model: GPT
    optimizer: torch.optim.Optimizer
    damper: losses.Damper
    alphabet: Tensor  # int64 [V], token ids the policy may emit
    reference: GPT | None = None  # an older copy of the policy
    version: int = 0  # optimizer steps so far = version of the weights
    next_group: int = 0  # prompt cursor: the next group id
    skipped: int = 0  # steps left out because loss or gradient was not finite
    skipped_in_row: int = 0


def pack(lengths: list[int], token_budget: int, learners: int = 1) -> list[list[int]]:
    """Split sequences into micro-batches of at most `token_budget` tokens; returns their indices.

    What counts is the padded grid of attention, as wide as the longest sequence: sorted by length,
    neighbours waste little of it. A sequence longer than the budget gets a micro-batch of its own.
    Several learners share them: none is larger than an equal share of all tokens.
    """
    if learners > 1:
        token_budget = min(token_budget, max(1, sum(lengths) // learners))
    batches: list[list[int]] = []
    for i in sorted(range(len(lengths)), key=lambda i: lengths[i]):  # stable: deterministic
        if not batches or (len(batches[-1]) + 1) * lengths[i] > token_budget:
            batches.append([])
        batches[-1].append(i)
    return batches


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


def evaluate(learner: Learner, config: Config, task: Task) -> dict:
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


def new_groups(learner: Learner, task: Task, count: int) -> list[Group]:
    """The next prompts; the cursor moves, so none is used twice."""
    ids = range(learner.next_group, learner.next_group + count)
    learner.next_group += count
    return [Group(i, learner.version, task.reset(i, "train")) for i in ids]


def check_step(learner: Learner, groups: list[Group], metrics: dict, config: Config, run: Path):
    """Stop when three steps in a row were not finite or too many episodes failed."""
    if learner.skipped_in_row >= 3:
        torch.save([group_to_parts(g) for g in groups], run / "bad_batch.pt")
        raise TrainingStopped(
            f"loss or gradient not finite three times in a row (loss {metrics['loss']}, gradient "
            f"norm {metrics['grad_norm']}); the batch is in {run / 'bad_batch.pt'}"
        )
    failed = sum(metrics["failures"].values())
    if failed > config.max_failures * metrics["samples"]:
        raise TrainingStopped(
            f"{failed} of {metrics['samples']} episodes failed ({metrics['failures']}), more than "
            f"--max-failures {config.max_failures}"
        )
