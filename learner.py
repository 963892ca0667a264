"""learner.py: what a training step does to the policy.

`naive_step` is the idea: one GRPO step on one group of answers, on padded tensors. `learner_step`
is the same for many groups at once, packed without padding, with any objective of losses.py; both
trainers call it. `Learner` is plain data: policy, AdamW's moments, reference, damper, counters.
Left out: set-up (runtime/run.py), what is saved (runtime/checkpoint.py), evaluation
(tasks/exam.py), processes.

Axes: G groups · n answers of a group · M generated tokens of a micro-batch (N in losses.py)
      T tokens, or turns · P parameters · V tokens of the task's alphabet (V' in model.py)
"""

import copy
import math
import time
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor, nn
from torch.optim.adamw import adamw

import dampers
import losses
from buffer import deal, pack, repaired
from critic import Critic, estimate_advantages, make_critic, update_critic
from logprobs import policy_logprobs, token_logprobs
from model import GPT, pack_tokens
from reward import Task, alphabet_of, problem_of
from runtime.config import Config
from runtime.messages import Group
from runtime.team import MOMENTS, Team, add_gradients, share_facts, share_weights, slice_of

SMALLEST_SPREAD = 0.1  # a critic's advantages are divided by the std of rewards, or this if larger


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


@dataclass
class Learner:
    """Everything that a step changes, and so everything that a checkpoint holds.

    `weights` [P] are the policy's in float32, with their gradient. A model that computes in float32
    has the same memory for its own; one in bfloat16 gets them rounded after every step.
    """

    model: GPT
    weights: nn.Parameter
    slices: list  # what this learner steps: (slice with its gradient, AdamW's step and moments)
    moments: tuple  # the names of what is remembered of every weight
    team: Team
    damper: dampers.Damper
    alphabet: Tensor  # int64 [V], token ids the policy may emit
    cursors: list  # the next prompt of each task
    begun: list  # where they were when this version began
    critic: Critic | None = None
    reference: GPT | None = None  # an older copy of the policy
    version: int = 0  # optimizer steps so far = version of the weights
    skipped: int = 0  # steps left out because loss or gradient was not finite
    skipped_in_row: int = 0


def make_learner(config: Config, task: Task, model: GPT, ranks: tuple = (0,)) -> Learner:
    """Moments, reference and damper of a model, at version 0. ranks: which of several learners
    this is (runtime/team.py)."""
    flat = nn.Parameter(model.flat.float())  # one tensor is all parameters: one vector operation
    model.on(flat.device, getattr(torch, config.dtype))
    flat.grad = model.flat_grad.float()  # the same memory in float32, as `flat`
    names, slices = MOMENTS + ("previous",) * (config.damper == "gac"), []
    for rank in ranks:
        own = slice_of(flat, rank, config.team_size)
        moments = {name: torch.zeros_like(own) for name in names}
        slices.append((own, {"step": own.new_zeros(()), **moments}))
    return Learner(
        model,
        flat,
        slices,
        names,
        team=Team(ranks, config.team_size),
        damper=dampers.Damper(config.kl_threshold if config.damper == "kl" else math.inf),
        alphabet=torch.from_numpy(alphabet_of(task)).to(flat.device),
        cursors=[0] * len(task.shares),
        begun=[0] * len(task.shares),
        critic=make_critic(config, model) if config.advantage == "gae" else None,
        reference=copy.deepcopy(model) if config.reference_every else None,
    )


def new_groups(learner: Learner, task: Task, count: int, kind: int = 0) -> list:
    """The next prompts of a task; its cursor moves, so none is used twice."""
    K, first = len(learner.cursors), learner.cursors[kind]
    learner.cursors[kind] += count
    ids = range(first * K + kind, (first + count) * K, K)
    return [Group(i, learner.version, problem_of(task, i, "train")) for i in ids]


# ----------------------------------------------------------------------------------------- a step


def learner_step(learner: Learner, groups: list, config: Config) -> dict:
    """One optimizer step on a batch of groups; returns the step's metrics.

    Gradients of all micro-batches add up to those of the whole step, because every loss is divided
    by `count`, the generated tokens of the step (failed episodes left out). Of several learners
    each gets the whole batch, computes its share of the micro-batches, and steps its slice of the
    weights (runtime/team.py). A step whose loss or gradient is not finite changes no weights, and
    counts as a version all the same; see `check_step` (runtime/books.py).
    """
    begin, team = time.monotonic(), learner.team
    samples, dead = samples_of(learner, groups, config)
    count = sum(t.generated for t, _ in samples)
    lengths = [len(t.tokens) for t, _ in samples]
    batches = pack(lengths, config.token_budget, team.size)
    shares = deal(batches, lengths, team.size, 6 * learner.model.config.width)
    every = config.reference_every  # steps from one look at the reference policy to the next
    measured = every > 0 and (learner.version + 1) % every == 0
    gradient = learner.weights.grad
    # a replay plays several learners, and adds up theirs; else `gradient` itself is the total
    total = torch.zeros_like(gradient) if len(team.ranks) > 1 else gradient
    facts = []  # of every micro-batch: its loss, diagnostics, a lesson for the critic

    for rank in team.ranks:
        gradient.zero_()
        for indices in shares[rank]:
            batch = [samples[i] for i in indices]
            loss, *others = micro_batch_loss(learner, batch, measured, count, config)
            loss.backward()
            gather_gradient(learner)
            facts.append((float(loss.detach()), *others))
        if total is not gradient:
            total += gradient

    gradient.copy_(total)
    if team.apart:
        add_gradients(team, learner.version, gradient)
    looks = [
        dampers.look(config.damper, own.grad, remembered) for own, remembered in learner.slices
    ]
    if team.apart:
        facts, looks = share_facts(team, learner.version, facts, looks)
    parts = [part for _, part, _ in facts]
    metrics = losses.merge_diagnostics(parts) if parts else {"tokens": 0}
    if parts and learner.version == 0:  # no token is stale yet
        metrics["mismatch"] = losses.mismatch(parts)
    loss = sum(loss for loss, _, _ in facts)
    metrics |= update_weights(learner, config, loss, dampers.together(looks), metrics)
    if learner.critic and parts:
        lessons = [lesson for *_, lesson in facts]
        metrics["critic_loss"] = update_critic(learner.critic, lessons)
    counts = {"micro_batches": len(batches), "dead_groups": int(dead.sum())}
    return metrics | counts | {"seconds": time.monotonic() - begin}


def samples_of(learner: Learner, groups: list, config: Config) -> tuple:
    """What a step learns from, (trajectory, the advantage of each of its turns), and which groups
    are dead [G]. With a critic: only the factor on its advantages, 1 / spread of all rewards."""
    if config.objective == "dpo":
        return preference_pairs(learner, groups, config)
    trajectories = [t for group in groups for t in repaired(group)]
    G = len(groups)
    rewards = torch.tensor([t.reward for t in trajectories]).float().view(G, -1)  # [G, n]
    turns = [len(t.turns) for t in trajectories]
    if config.advantage == "gae":
        factor = 1 / max(SMALLEST_SPREAD, float(rewards.std()))  # of a single one it is NaN
        advantages, dead = torch.full_like(rewards, factor), torch.zeros(G, dtype=torch.bool)
    elif config.advantage == "opob":
        weights = importance_weights(learner, trajectories, config)
        advantages, dead = losses.optimal_advantages(rewards, *weights)
    elif config.credit == "episode":
        advantages, dead = losses.group_advantages(rewards, config.advantage)
    else:
        own = [torch.tensor(t.turn_rewards) for t in trajectories]
        own.append(torch.zeros(max(turns)))  # this long, also where rewards are missing
        padded = nn.utils.rnn.pad_sequence(own, batch_first=True)[:-1]
        present = torch.arange(max(turns)) < torch.tensor(turns)[:, None]
        by_turn = (x.view(*rewards.shape, -1) for x in (padded, present))  # [G, n, T]
        advantages, dead = losses.turn_advantages(*by_turn, config.advantage)
    rows = advantages.reshape(len(turns), -1).expand(-1, max(turns)).tolist()
    credit = [row[:T] for row, T in zip(rows, turns, strict=True)]
    return [pair for pair in zip(trajectories, credit, strict=True) if pair[0].generated], dead


def importance_weights(learner: Learner, trajectories: list, config: Config) -> tuple:
    """pi / mu of whole answers, and about how long the gradients of their log-probs are, [G, n].

    Of the gradient with respect to the logits only the token's own entry is taken, 1 - pi: exact
    lengths would take a backward pass for every answer.
    """
    rows, seen = [], policy_logprobs(learner.model, trajectories, learner, config)
    for t, now in zip(trajectories, seen, strict=True):
        then = torch.from_numpy(t.logprobs[t.loss_mask])
        log = (now - then).sum().clamp(-losses.LOG_RATIO_LIMIT, losses.LOG_RATIO_LIMIT)
        rows.append([float(log.exp()), float((1 - now.exp()).norm())])
    return torch.tensor(rows).view(-1, config.group_size, 2).unbind(-1)


def preference_pairs(learner: Learner, groups: list, config: Config) -> tuple:
    """Online DPO's samples: the best and the worst answer of a group, and what pushes them apart.

    Divided by tokens later, as every loss is; so multiplied here: the loss is a mean over pairs.
    """
    pairs, dead = [], []
    for group in groups:
        sound = sorted([t for t in repaired(group) if t.generated], key=lambda t: -t.reward)
        dead.append(not sound or sound[0].reward == sound[-1].reward)
        pairs += [] if dead[-1] else [sound[0], sound[-1]]
    sums = []  # log-probs of whole answers, by the policy and by the reference
    for model in (learner.model, learner.reference):
        logprobs = policy_logprobs(model, pairs, learner, config)
        sums.append(torch.tensor([float(x.sum()) for x in logprobs]))
    gaps = sums[0] - sums[1]  # [2 pairs]
    margins = gaps[::2] - gaps[1::2]  # [pairs]
    push = losses.preference_advantages(margins, 0.1).T.flatten()  # [2 pairs]
    scale = sum(t.generated for t in pairs) / max(1, len(margins))
    credit = [[a * scale] * len(t.turns) for a, t in zip(push.tolist(), pairs, strict=True)]
    return list(zip(pairs, credit, strict=True)), torch.tensor(dead)


def tokens_of(learner: Learner, batch: list, config: Config) -> tuple:
    """What the objective sees of a micro-batch, its entropies [M], and a lesson for the critic.

    batch: trajectories with the advantages of their turns, see `samples_of`.
    """
    logprobs, entropy, hidden = token_logprobs(learner.model, batch, learner, config)
    sizes = torch.tensor([t.generated for t, _ in batch])
    sequence = torch.arange(len(batch)).repeat_interleave(sizes)  # [M]
    spans = torch.tensor([stop - start for t, _ in batch for start, stop in t.turns])
    credit = torch.tensor([a for _, turns in batch for a in turns])
    advantages, lesson = credit.repeat_interleave(spans), ()  # [M]
    if learner.critic:
        own, lesson = estimate_advantages(learner.critic, batch, hidden.detach())
        advantages = advantages * own
    if config.teacher:
        said = torch.from_numpy(np.concatenate([t.teacher for t, _ in batch]))
        advantages = losses.distilled(advantages, said, logprobs, 1.0)
    behaviour = torch.from_numpy(np.concatenate([t.logprobs[t.loss_mask] for t, _ in batch]))
    ages = np.concatenate([learner.version - t.versions[t.loss_mask] for t, _ in batch])
    known = behaviour, advantages, sequence, torch.from_numpy(ages)
    sampled = (x.to(logprobs.device) for x in known)
    # with one update a step, pi_p is the policy of this very forward pass: `logprobs.detach()`
    return losses.Tokens(logprobs, logprobs.detach(), *sampled), entropy, lesson


def constants_of(config: Config) -> losses.Constants:
    """The constants of the objectives, as configured."""
    return losses.PUBLISHED


def micro_batch_loss(
    learner: Learner,
    batch: list,
    measured: bool,
    count: int,
    config: Config,
):
    """This micro-batch's share of the step's loss, and of its diagnostics.

    batch: trajectories with their advantages; measured: look at the reference policy, too.
    """
    reference = None
    if measured:
        with torch.no_grad():
            reference, *_ = token_logprobs(learner.reference, batch, learner, config)  # [M]
    tokens, entropy, lesson = tokens_of(learner, batch, config)
    loss, touched = losses.policy_loss(config.objective, tokens, count, constants_of(config))
    loss = loss - config.entropy * losses.token_mean(entropy, count)
    if measured:
        # weighted with pi / mu: the samples may be stale
        kl = losses.unbiased_k3(tokens.logprobs, reference, tokens.behaviour)  # [M]
        weight = config.reference_weight * dampers.reference_scale(learner.damper)
        loss = loss + weight * losses.token_mean(kl, count)
    return loss, losses.diagnostics(tokens, entropy, touched, reference), lesson


def gather_gradient(learner: Learner):
    """Add a micro-batch's gradient to the step's, in float32, if the model computes in another."""
    if learner.model.flat.dtype != torch.float32:
        learner.weights.grad += learner.model.flat_grad
        learner.model.flat_grad.zero_()


def round_weights(learner: Learner):
    """Give the model its weights, rounded to its precision; float32 has the same memory."""
    learner.model.flat.copy_(learner.weights.detach())


def adamw_step(own: nn.Parameter, remembered: dict, lr: float):
    """A step of a slice of the weights [P] by AdamW (Loshchilov and Hutter, arXiv 1711.05101).

    torch's class calls the same; it would first import torch's compiler, which takes seconds.
    """
    # Less momentum than usual: staleness acts as momentum does (Mitliagkas et al. 2016, arXiv
    # 1605.09774). And gradient sizes of the last 100 steps: the usual 1000 are more than a run has.
    moments = [[remembered[name]] for name in MOMENTS]
    memory = [own], [own.grad], *moments, [], [remembered["step"]]
    switches = {"fused": True, "amsgrad": False, "maximize": False}
    adamw(*memory, lr=lr, beta1=0.7, beta2=0.99, weight_decay=0.0, eps=1e-8, **switches)


@torch.no_grad()
def update_weights(
    learner: Learner,
    config: Config,
    loss: float,
    whole: dampers.Look,  # at the whole gradient
    metrics: dict,
) -> dict:
    """Damp and clip the gradient, step the optimizer; or skip a step that is not finite."""
    finite, lr, cosine = math.isfinite(loss + whole.norm), 0.0, 0.0
    if finite and "kl_reference" in metrics:
        learner.damper = dampers.observe(learner.damper, metrics["kl_reference"])
    if finite and metrics["tokens"]:
        progress = min(1.0, learner.version / max(1, config.steps))
        lr = config.lr * (1 - progress)
        lr *= dampers.step_scale(config.damper, learner.damper, metrics)
        a, b, cosine, norm = dampers.damped_gradient(config.damper, whole)
        for own, remembered in learner.slices:
            dampers.apply_bend(config.damper, own.grad, remembered, a, b)
            if norm > 1.0:
                own.grad.mul_(1.0 / norm)
            adamw_step(own, remembered, lr)
        if learner.team.apart:
            share_weights(learner.team, learner.version, learner.weights.detach())
        round_weights(learner)
    learner.skipped_in_row = 0 if finite else learner.skipped_in_row + 1
    learner.skipped += not finite
    learner.version, learner.begun = learner.version + 1, list(learner.cursors)
    refresh = 20
    if learner.reference and refresh and learner.version % refresh == 0:
        learner.reference.flat.copy_(learner.model.flat)
    return {
        "loss": loss,
        "grad_norm": whole.norm,
        "lr": lr,
        "cosine": cosine,
        "kl_window": dampers.window_mean(learner.damper),
        "skipped": learner.skipped,
    }
