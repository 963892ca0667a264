"""learner.py: what a training step does to the policy.

`naive_step` is the idea: one GRPO step on one group of answers, on padded tensors. `learner_step`
is the same for many groups at once, packed without padding, with any objective of losses.py; both
trainers call it. `Learner` is plain data: policy, AdamW's moments, reference, counters. What a step
learns from is a method: `GroupMethod` here, advantages inside a group; others are in methods/.
Left out: set-up (runtime/run.py), what is saved (runtime/checkpoint.py), evaluation
(runtime/exam.py), processes, micro-batches (fast/batches.py).

Axes: G groups · n answers of a group · M generated tokens of a micro-batch (N in losses.py)
      T tokens · P parameters · V tokens of the task's alphabet (V' in model.py)
"""

import copy
import importlib
import math
import time
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor, nn

import losses
from buffer import repaired
from fast.adamw import adamw_moments, adamw_step
from fast.batches import deal, pack
from logprobs import token_logprobs
from methods.dampers import DAMPERS, window_mean
from model import GPT, pack_tokens
from reward import Task, alphabet_of, problem_of
from runtime.config import Config
from runtime.messages import Group
from runtime.team import Team, add_gradients, share_facts

GRADIENT_NORM = 1.0  # a longer gradient is cut to this
RENEW_REFERENCE = 20  # from one snapshot of the reference policy to the next


def naive_step(
    model: GPT,
    optimizer,
    tokens,
    mask,
    behaviour,
    rewards,
    alphabet,
) -> Tensor:
    """The idea: one step on one group, with GRPO's advantages and CISPO's weight; returns the loss.

    tokens int64 [n, T], padded at the end; mask bool [n, T], True where the policy generated;
    behaviour [n, T], log-probs as sampled; rewards [n]; alphabet [V].
    """
    advantages = (rewards - rewards.mean()) / (rewards.std() + 1e-6)  # [n]
    hidden = model(pack_tokens(list(tokens))).view(*tokens.shape, -1)  # [n, T, d]
    policy = torch.log_softmax(model.logits(hidden[:, :-1], alphabet), dim=-1)  # [n, T - 1, V]
    which = (tokens[:, 1:, None] == alphabet).int().argmax(-1, keepdim=True)  # in the alphabet
    logprobs = policy.gather(-1, which)[..., 0]  # [n, T - 1], of the tokens that follow
    weight = (logprobs.detach() - behaviour[:, 1:]).exp().clamp(max=4.0)  # pi / mu, cut
    gain = weight * advantages[:, None] * logprobs  # [n, T - 1]
    generated = mask[:, 1:]
    loss = -gain[generated].sum() / generated.sum()
    model.flat_grad.zero_()
    loss.backward()
    optimizer.step()
    return loss.detach()


# ------------------------------------------------------------------------ what a step learns from


class GroupMethod:
    """Advantages inside a group (GRPO); a method of methods/ replaces what it does otherwise."""

    def __init__(self, config: Config, model: GPT):
        """Nothing to remember."""

    def samples(self, learner, groups: list, config: Config) -> tuple:
        """What a step learns from: pairs of a trajectory and the advantages of its turns (where all
        are 0, it may be left out), and which groups are dead, bool [G]."""
        trajectories = repaired(groups)
        rewards = torch.tensor([t.reward for t in trajectories]).float().view(len(groups), -1)
        advantages, dead = losses.group_advantages(rewards, config.advantage)
        return pairs_of(trajectories, advantages.view(-1, 1)), dead

    def advantages(self, batch: list, tokens: losses.Tokens, hidden: Tensor) -> tuple:
        """Of a micro-batch: the advantage of every token [M], and a lesson for `learn`. hidden
        [M, d]: the hidden state that predicts each token."""
        return tokens.advantages, ()

    def learn(self, lessons: list) -> dict:
        """After the step: learn from the lessons of its micro-batches; returns metrics."""
        return {}

    def state(self) -> dict | None:
        """What a checkpoint must hold, and what `load` takes."""

    def load(self, state: dict | None) -> None:
        """Go on from a checkpoint."""


# a field of the configuration, its value (None: any that is given), and the file in methods/; the
# first row that fits counts
METHODS = (
    ("objective", "dpo", "preferences"),
    ("teacher", None, "distillation"),
    ("advantage", "gae", "critic"),
    ("advantage", "opob", "baseline"),
    ("credit", "turn", "turns"),
)


def method_of(config: Config, model: GPT) -> GroupMethod:
    """The configured method."""
    for field, value, file in METHODS:
        given = getattr(config, field)
        if given == value or (value is None and given):
            return importlib.import_module(f"methods.{file}").METHOD(config, model)
    return GroupMethod(config, model)


def pairs_of(trajectories: list, advantages: Tensor) -> list:
    """Each trajectory with the advantages of its turns, from [N, 1] or [N, turns]; without those in
    which nothing was generated."""
    pairs = zip(trajectories, advantages.tolist(), strict=True)
    return [(t, (row * len(t.turns))[: len(t.turns)]) for t, row in pairs if t.generated]


# -------------------------------------------------------------------------------- the learner


@dataclass
class Learner:
    """Everything that a step changes: a checkpoint holds all of it.

    `weights` [P] are the policy's in float32, with their gradient. A model that computes in float32
    has the same memory for its own; one in bfloat16 gets them rounded after every step.
    """

    model: GPT
    weights: nn.Parameter
    moments: dict  # what AdamW remembers
    team: Team
    method: GroupMethod
    alphabet: Tensor  # int64 [V], token ids the policy may emit
    reference: GPT | None  # an older copy of the policy
    damping: dict  # what the damper remembers
    cursor: int = 0  # the next prompt
    begun: int = 0  # `cursor` when this version began
    version: int = 0  # optimizer steps so far = version of the weights
    skipped: int = 0  # steps in a row that changed nothing: loss or gradient was not finite


def make_learner(config: Config, task: Task, model: GPT, ranks: tuple = (0,)) -> Learner:
    """Moments, reference and method of a model, at version 0. ranks: which of several learners
    this is (runtime/team.py)."""
    flat = nn.Parameter(model.flat.float())  # one tensor is all parameters: one vector operation
    model.on(flat.device, getattr(torch, config.dtype))
    flat.grad = model.flat_grad.float()  # the same memory in float32, as `flat`
    return Learner(
        model,
        flat,
        moments=adamw_moments(flat),
        team=Team(ranks, config.team_size),
        method=method_of(config, model),
        alphabet=torch.from_numpy(alphabet_of(task)).to(flat.device),
        reference=copy.deepcopy(model) if config.reference_every else None,
        damping={},
    )


def new_groups(learner: Learner, task: Task, count: int) -> list[Group]:
    """The next prompts; the cursor moves, so none is used twice."""
    ids = range(learner.cursor, learner.cursor + count)
    groups = [Group(i, learner.version, problem_of(task, i, "train")) for i in ids]
    learner.cursor += count
    return groups


# ----------------------------------------------------------------------------------------- a step


def learner_step(learner: Learner, groups: list, config: Config) -> dict:
    """One optimizer step on a batch of groups; returns the step's metrics.

    Gradients of all micro-batches add up to those of the whole step, because every loss is divided
    by `count`, the generated tokens of all samples (a failed episode is none). A sample whose
    advantages are 0 is not computed where neither entropy bonus nor reference gives it a gradient:
    that halves a step of SmolLM2; diagnostics are then means over the samples that are left. Of
    several learners each gets the whole batch, computes its share of the micro-batches, and steps
    by the sum of all gradients (runtime/team.py). A step whose loss or gradient is not finite
    changes nothing, and counts as a version all the same; see `close_step` (runtime/books.py).
    """
    begin = time.monotonic()
    team = learner.team
    every = config.reference_every  # steps from one look at the reference policy to the next
    measured = every > 0 and (learner.version + 1) % every == 0
    samples, dead = learner.method.samples(learner, groups, config)
    count = sum(t.generated for t, _ in samples)
    if learner.version and not (measured or config.entropy):
        samples = [(t, advantages) for t, advantages in samples if any(advantages)]
    lengths = [len(t.tokens) for t, _ in samples]
    batches = pack(lengths, config.token_budget, team.size)
    shares = deal(batches, lengths, team.size, 6 * learner.model.config.width)
    gradients, facts = [], []  # of each rank in this process: one, in a replay all

    for rank in team.ranks:
        learner.weights.grad.zero_()
        for indices in shares[rank]:
            batch = [samples[i] for i in indices]
            loss, *others = micro_batch_loss(learner, batch, measured, count, config)
            loss.backward()
            gather_gradient(learner)
            facts.append((float(loss.detach()), *others))
        gradient = learner.weights.grad
        gradients.append(gradient.clone() if len(team.ranks) > 1 else gradient)

    add_gradients(team, learner.weights.grad, gradients)
    facts = share_facts(team, facts)
    parts = [part for _, part, _ in facts]
    metrics = losses.merge_diagnostics(parts) | {"tokens": count} if parts else {"tokens": 0}
    if parts and learner.version == 0:  # no token is stale yet
        metrics["mismatch"] = losses.mismatch(parts)
    metrics |= update_weights(learner, config, sum(loss for loss, *_ in facts), metrics)
    if parts and not learner.skipped:
        metrics |= learner.method.learn([lesson for *_, lesson in facts])
    return metrics | {
        "micro_batches": len(batches),
        "dead_groups": int(dead.sum()),
        "seconds": time.monotonic() - begin,
    }


def micro_batch_loss(
    learner: Learner,
    batch: list,
    measured: bool,
    count: int,
    config: Config,
) -> tuple:
    """This micro-batch's share of the step's loss, of its diagnostics, and a lesson for the method.

    batch: trajectories with the advantages of their turns; measured: look at the reference policy,
    too.
    """
    reference = None
    if measured:
        with torch.no_grad():
            reference, *_ = token_logprobs(learner.reference, batch, learner, config)  # [M]
    logprobs, entropy, hidden = token_logprobs(learner.model, batch, learner, config)
    tokens = tokens_of(learner, batch, logprobs)
    advantages, lesson = learner.method.advantages(batch, tokens, hidden)
    tokens = tokens._replace(advantages=advantages)
    loss, touched = losses.policy_loss(config.objective, tokens, count)
    if config.entropy:  # of a large vocabulary a gradient by zero takes a seventh of the step
        loss = loss - config.entropy * losses.token_mean(entropy, count)
    if measured:
        # weighted with pi / mu: the samples may be stale
        kl = losses.unbiased_k3(logprobs, reference, tokens.behaviour)  # [M]
        weight = config.reference_weight * learner.damping.get("reference_factor", 1.0)
        loss = loss + weight * losses.token_mean(kl, count)
    return loss, losses.diagnostics(tokens, entropy, touched, reference), lesson


def tokens_of(learner: Learner, batch: list, logprobs: Tensor) -> losses.Tokens:
    """What the objective sees of a micro-batch; logprobs [M] by the policy."""
    sizes = torch.tensor([t.generated for t, _ in batch])
    sequence = torch.arange(len(batch)).repeat_interleave(sizes)  # [M]
    spans = torch.tensor([stop - start for t, _ in batch for start, stop in t.turns])
    credit = torch.tensor([a for _, advantages in batch for a in advantages])
    behaviour = torch.from_numpy(np.concatenate([t.logprobs[t.loss_mask] for t, _ in batch]))
    ages = np.concatenate([learner.version - t.versions[t.loss_mask] for t, _ in batch])
    known = behaviour, credit.repeat_interleave(spans), sequence, torch.from_numpy(ages)
    sampled = (x.to(logprobs.device) for x in known)
    # with one update a step, pi_p is the policy of this very forward pass: `logprobs.detach()`
    return losses.Tokens(logprobs, logprobs.detach(), *sampled)


def gather_gradient(learner: Learner):
    """Add a micro-batch's gradient to the step's, in float32, if the model computes in another."""
    if learner.model.flat.dtype != torch.float32:
        learner.weights.grad += learner.model.flat_grad
        learner.model.flat_grad.zero_()


def round_weights(learner: Learner):
    """Give the model its weights, rounded to its precision; float32 has the same memory."""
    learner.model.flat.copy_(learner.weights.detach())


@torch.no_grad()
def update_weights(learner: Learner, config: Config, loss: float, metrics: dict) -> dict:
    """Damp and clip the gradient, step the optimizer; or skip a step that is not finite."""
    gradient = learner.weights.grad
    lr = 0.0
    norm = float(gradient.norm())
    finite = math.isfinite(loss + norm)
    if finite and metrics["tokens"]:
        damper = DAMPERS[config.damper]
        damped, scale = damper(gradient, learner.damping, metrics, config)
        lr = scale * config.lr * (1 - min(1.0, learner.version / max(1, config.steps)))
        gradient.copy_(damped)
        if (size := float(gradient.norm())) > GRADIENT_NORM:
            gradient.mul_(GRADIENT_NORM / size)
        adamw_step(learner.weights, learner.moments, lr)
        round_weights(learner)
    learner.skipped = 0 if finite else learner.skipped + 1
    learner.version += 1
    learner.begun = learner.cursor
    if learner.reference and learner.version % RENEW_REFERENCE == 0:
        learner.reference.flat.copy_(learner.model.flat)
    return {
        "loss": loss,
        "grad_norm": norm,
        "lr": lr,
        "cosine": learner.damping.get("cosine", 0.0),
        "kl_window": window_mean(learner.damping),
        "skipped": learner.skipped,
    }
