"""train_sync.py: reinforcement learning, one thing at a time: generate, verify, learn, repeat.

    python train_sync.py                     # guess a number, from random weights
    python train_sync.py --task reverse:6    # --help lists every flag

This is the honest baseline and the place to start reading: `main` is the whole algorithm in one
flat loop. `learner_step` and `evaluate` live here; `train_async.py` imports them and adds only
what asynchrony needs. Left out: processes, queues, staleness (here it is always 0).
"""

import copy
import dataclasses
import time
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

import bench
import common
import losses
import reward
from buffer import Group, Trajectory, apply_verdicts, pack
from common import Config, UserError
from model import GPT, PRESETS, ModelConfig, generated_logprobs, pack_tokens
from rollout import Environment, Generator, generate


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


# ------------------------------------------------------------------------------------- set-up


def make_task(config: Config) -> reward.Task:
    """The configured task; raises UserError in one line."""
    try:
        return reward.make_task(config.task, config.seed)
    except ValueError as error:
        raise UserError(str(error)) from error


def alphabet_of(task: reward.Task) -> np.ndarray:
    """Token ids the policy may emit [V]: the task's own, or all but padding."""
    everything = (i for i in range(reward.VOCAB_SIZE) if i != reward.PAD)
    return np.array(task.alphabet or list(everything), np.int64)


def capacity_of(config: Config, task: reward.Task) -> int:
    """Positions that an episode may fill; raises UserError when the task needs more."""
    if config.context and config.context < task.context:
        raise UserError(
            f"--context {config.context}: must be at least {task.context} for the longest prompt "
            f"({task.max_prompt_tokens} tokens) and its answer in task {config.task} (0: automatic)"
        )
    return config.context or task.context


def make_model(config: Config, task: reward.Task) -> GPT:
    """The policy with random weights, large enough for the task's episodes."""
    shape = {"vocab_size": reward.VOCAB_SIZE, **PRESETS[config.model]}
    for name in ("positions", "attention", "scoring", "chunk_size", "top_k"):
        shape[name] = getattr(config, name)
    return GPT(ModelConfig(**shape, context=capacity_of(config, task)), config.seed)


def make_learner(config: Config, task: reward.Task, device: str) -> Learner:
    """Model, optimizer, reference and damper at version 0."""
    model = make_model(config, task).on(device)
    # one tensor is all parameters: the optimizer is one vector operation
    flat = torch.nn.Parameter(model.flat)
    flat.grad = model.flat_grad
    optimizer = torch.optim.AdamW([flat], lr=config.lr, weight_decay=0.0)
    damper = losses.Damper(threshold=config.kl_threshold)
    alphabet = torch.from_numpy(alphabet_of(task)).to(device)
    reference = copy.deepcopy(model) if config.reference_every else None
    return Learner(model, optimizer, damper, alphabet, reference)


def make_environment(config: Config, task: reward.Task) -> Environment:
    """Join the task (text) to the generator (token ids)."""

    def respond(requests: list[tuple]) -> list[list[int] | None | str]:
        replies: list = []
        while len(replies) < len(requests):
            try:
                with reward.time_limit(config.reward_seconds):  # armed once for all of them
                    for problem, tokens, turns in requests[len(replies) :]:
                        answers = reward.split_answers(task, tokens, turns)
                        step = task.step(problem, answers)
                        replies.append(None if step.done else reward.encode(step.observation))
            except reward.OutOfTime:
                replies.append("env_timeout")
            except Exception:  # whatever a task's code raises is that episode's failure, no more
                replies.append("env_error")
        return replies

    return Environment(
        encode_prompt=lambda problem: reward.encode(problem["prompt"]),
        respond=respond,
        alphabet=alphabet_of(task),
        stop=task.stop,
        turn_tokens=task.turn_tokens,
        max_turns=task.max_turns,
        beside=task.beside,
        seconds=config.reward_seconds,
    )


def make_generator(config: Config, task: reward.Task, model: GPT, worker: int = 0) -> Generator:
    """The generator that a run uses for training episodes."""
    return Generator(
        model,
        make_environment(config, task),
        config.slots,
        capacity_of(config, task),
        config.group_size,
        config.seed,
        config.temperature,
        config.swap,
        worker,
    )


def new_groups(learner: Learner, task: reward.Task, count: int) -> list[Group]:
    """The next prompts; the cursor moves, so none is used twice."""
    ids = range(learner.next_group, learner.next_group + count)
    learner.next_group += count
    return [Group(i, learner.version, task.reset(i, "train")) for i in ids]


def score(group: Group, task: reward.Task, seconds: float) -> list[reward.Verdict]:
    """Verify every episode of a group under a time limit; the reward workers' whole job."""
    answers = [reward.split_answers(task, t.tokens, t.turns) for t in group.trajectories]
    return reward.score_group(task, group.problem, answers, seconds)


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
    by `count`, the number of generated tokens of the step. With several learners each one gets the
    whole batch and takes every L-th micro-batch; one all-reduce joins the gradients. A step whose
    loss or gradient is not finite is skipped and counted; three in a row stop the run (`check_step`).
    """
    begin, device = time.monotonic(), learner.model.flat.device
    trajectories = [t for g in groups for t in g.trajectories]
    advantages, dead = group_signal(groups, config.advantage)
    pairs = zip(trajectories, advantages.tolist(), strict=True)
    used = [(t, a) for t, a in pairs if not t.failed and t.loss_mask.any()]
    count = sum(int(t.loss_mask.sum()) for t, _ in used)
    lengths = [len(t.tokens) for t, _ in used]
    budget = min(config.token_budget, max(1, sum(lengths) // config.learners))
    every = config.reference_every
    measure = learner.reference is not None and learner.version % every == 0
    reference_seconds, parts, total_loss = 0.0, [], 0.0
    learner.model.flat_grad.zero_()

    for indices in pack(lengths, budget)[rank :: config.learners]:
        batch = [used[i][0] for i in indices]
        logprobs, entropy = token_logprobs(
            learner.model, batch, learner.alphabet, config.temperature
        )
        sizes = torch.tensor([int(t.loss_mask.sum()) for t in batch])
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
                reference, _ = token_logprobs(
                    learner.reference, batch, learner.alphabet, config.temperature
                )
            reference_seconds += time.monotonic() - start
            weight = config.reference_weight * losses.reference_scale(learner.damper)
            loss = loss + weight * losses.token_mean(losses.k3(logprobs, reference), mask, count)
        loss.backward()
        total_loss += float(loss.detach())
        parts.append(
            losses.diagnostics(logprobs, behaviour, mask, entropy.detach(), sums, reference)
        )

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
        "dead_groups": int(dead.sum()),
        "failures": dict(failures),
        "seconds": seconds,
        "reference_share": reference_seconds / seconds,
    }


def group_signal(groups: list[Group], kind: str) -> tuple[Tensor, Tensor]:
    """Advantages of all trajectories, laid end to end, and which groups teach nothing [G]."""
    rewards = torch.tensor([[t.reward for t in g.trajectories] for g in groups])  # [G, n]
    valid = torch.tensor([[not t.failed for t in g.trajectories] for g in groups])
    advantages, dead = losses.group_advantages(rewards, kind, valid)
    return advantages.flatten(), dead


def update_weights(learner: Learner, config: Config, loss: float, metrics: dict) -> dict:
    """Clip the gradient, step the optimizer, feed the damper; or skip a step that is not finite."""
    gradient = learner.model.flat_grad
    norm = float(gradient.norm())
    learner.version += 1
    if not np.isfinite(loss) or not np.isfinite(norm):
        learner.skipped += 1
        learner.skipped_in_row += 1
        return {"loss": loss, "grad_norm": norm, "lr": 0.0, "skipped": learner.skipped}
    learner.skipped_in_row = 0
    if norm > config.grad_clip > 0:
        gradient.mul_(config.grad_clip / norm)
    if "kl_reference" in metrics:
        learner.damper = losses.observe(learner.damper, metrics["kl_reference"])
    lr = config.lr * losses.lr_scale(learner.damper)
    learner.optimizer.param_groups[0]["lr"] = lr
    learner.optimizer.step()
    refresh = config.reference_refresh
    if learner.reference is not None and refresh and learner.version % refresh == 0:
        learner.reference.flat.copy_(learner.model.flat)
    return {
        "loss": loss,
        "grad_norm": norm,
        "lr": lr,
        "kl_window": losses.window_mean(learner.damper),
        "reference_weight": config.reference_weight * losses.reference_scale(learner.damper),
        "skipped": learner.skipped,
    }


def check_step(learner: Learner, groups: list[Group], metrics: dict, config: Config, run: Path):
    """Stop when three steps in a row were not finite or too many episodes failed."""
    if learner.skipped_in_row >= 3:
        torch.save([g.problem for g in groups], run / "bad_batch.pt")
        raise common.TrainingStopped(
            f"loss or gradient not finite three times in a row (loss {metrics['loss']}, gradient "
            f"norm {metrics['grad_norm']}); the batch is in {run / 'bad_batch.pt'}"
        )
    failed = sum(metrics["failures"].values())
    if failed > config.max_failures * metrics["samples"]:
        raise common.TrainingStopped(
            f"{failed} of {metrics['samples']} episodes failed ({metrics['failures']}), more than "
            f"--max-failures {config.max_failures}"
        )


# ----------------------------------------------------------------------------------- evaluation


def evaluate(learner: Learner, config: Config, task: reward.Task) -> dict:
    """Greedy answers to every held-out problem, by the weights as they are between two steps.

    It runs where the weights are changed, so it cannot race with training. Returns `solved`
    (share), `reward` (mean) and `turns` (mean).
    """
    slots = min(config.slots, task.eval_size)
    generator = Generator(
        learner.model,
        make_environment(config, task),
        slots,
        capacity_of(config, task),
        1,
        temperature=0.0,
    )
    problems = [Group(i, 0, task.reset(i, "eval")) for i in range(task.eval_size)]
    groups = generate(generator, problems)
    for group in groups:
        apply_verdicts(group, score(group, task, config.reward_seconds))
    episodes = [g.trajectories[0] for g in groups]
    return {
        "solved": float(np.mean([t.reward >= task.solved for t in episodes])),
        "reward": float(np.mean([t.reward for t in episodes])),
        "turns": float(np.mean([len(t.turns) for t in episodes])),
    }


def show_episode(group: Group) -> str:
    """One line: the text of a group's first episode, its versions and its reward."""
    t = group.trajectories[0]
    text = reward.decode_bytes(t.tokens.tolist()).decode(errors="replace")
    if len(text) > 100:
        text = text[:60] + " ... " + text[-40:]
    versions = t.versions[t.loss_mask]
    span = f"{versions.min()}..{versions.max()}" if len(versions) else "-"
    return f"  group {t.group_id}  [{text!r}]  reward {t.reward:.2f}  versions {span}  {t.finish}"


# ------------------------------------------------------------------------------ state on disk


def state_of(learner: Learner, in_flight=()) -> dict:
    """What a checkpoint holds. Sampling noise is counter-based: the cursor IS the RNG state."""
    return {
        "weights": learner.model.flat.detach().cpu(),
        "shape": learner.model.config.__dict__,
        "optimizer": learner.optimizer.state_dict(),
        "damper": losses.damper_to_dict(learner.damper),
        "reference": None if learner.reference is None else learner.reference.flat.cpu(),
        "version": learner.version,
        "next_group": learner.next_group,
        "in_flight": list(in_flight),  # group ids that were admitted and not trained yet
        "skipped": learner.skipped,
        "torch_rng": torch.get_rng_state(),
    }


def restore(learner: Learner, state: dict, config: Config) -> None:
    """Fill a learner from a checkpoint; raises UserError when the checkpoint does not fit."""
    shape = learner.model.config.__dict__
    for name, value in shape.items():
        if state["shape"].get(name) != value:
            raise UserError(
                f"--resume {config.resume}: must fit the model, but its {name} is "
                f"{state['shape'].get(name)} and this run's is {value}"
            )
    learner.model.flat.copy_(state["weights"])
    learner.optimizer.load_state_dict(state["optimizer"])
    learner.damper = losses.damper_from_dict(state["damper"])
    if learner.reference is not None and state["reference"] is not None:
        learner.reference.flat.copy_(state["reference"])
    learner.version, learner.next_group = state["version"], state["next_group"]
    learner.skipped = state["skipped"]
    torch.set_rng_state(state["torch_rng"])


# ------------------------------------------------------------------------------------ the loop


def after_step(learner, groups, metrics, config, task, run, watch, in_flight=(), **shown):
    """What follows every step in both trainers: checks, evaluation, samples, checkpoint, metrics."""
    check_step(learner, groups, metrics, config, run)
    version = learner.version
    if version % config.eval_every == 0 or version == config.steps:
        result = evaluate(learner, config, task)
        metrics["eval"] = result
        shown["eval"] = f"{result['solved']:.2f}"
    if version % config.samples_every == 0:
        watch.say("\n".join(show_episode(g) for g in groups[:3]))
        samples = [{"version": version, "text": show_episode(g)} for g in groups[:3]]
        common.append_lines(run / "samples.jsonl", samples)
    if version % config.checkpoint_every == 0:
        common.save_checkpoint(run, version, state_of(learner, in_flight))
        watch.event("learner", "checkpoint", version=version)
    watch.step({"step": version, **metrics}, reward=f"{metrics['reward']:.2f}", **shown)


def facts_of(learner: Learner, config: Config, watch: common.Watch) -> dict:
    """What a summary needs to know beyond metrics.jsonl, in both trainers."""
    return {
        "task": config.task,
        "seed": config.seed,
        "steps": learner.version,
        "stopped_early": learner.version < config.steps,
        "wall_s": round(watch.close(), 2),
        "skipped_steps": learner.skipped,
        "weights_sha256": common.sha256_of(learner.model.flat),
    }


def begin(config: Config, mode: str, device: str):
    """Task, run folder, learner (resumed or new), progress: the set-up of both trainers."""
    task = make_task(config)
    config = dataclasses.replace(config, steps=config.steps or task.steps)
    capacity_of(config, task)
    state = common.load_checkpoint(Path(config.resume)) if config.resume else None
    run = common.open_run(config, mode)
    learner = make_learner(config, task, device)
    if state:
        restore(learner, state, config)
    watch = common.Watch(run, config.steps, learner.version)
    if not state:
        result = evaluate(learner, config, task)
        common.append_lines(run / "metrics.jsonl", [{"t": 0.0, "step": 0, "eval": result}])
    return config, task, run, learner, watch, state


def train(config: Config) -> None:
    """The synchronous algorithm: all cores generate, then all cores train."""
    (device, *_), _ = common.pick_devices(config)
    common.set_threads(config, 1)
    config, task, run, learner, watch, _ = begin(config, "sync", device)
    generator = make_generator(config, task, learner.model)
    stop, busy = common.Stop(), {"generate": 0.0, "score": 0.0, "train": 0.0}

    while learner.version < config.steps and not stop.asked:
        clock = [time.monotonic()]
        generator.set_weights(learner.version, None)
        groups = generate(generator, new_groups(learner, task, config.groups_per_step))
        clock.append(time.monotonic())
        for group in groups:
            apply_verdicts(group, score(group, task, config.reward_seconds))
        clock.append(time.monotonic())
        metrics = learner_step(learner, groups, config)
        clock.append(time.monotonic())
        for i, phase in enumerate(busy):
            busy[phase] += clock[i + 1] - clock[i]
            process = "learner" if phase == "train" else "rollout-0"
            seconds = clock[i + 1] - clock[i]
            watch.event(process, phase, clock[i], seconds=seconds, version=learner.version - 1)
        metrics |= {"staleness_max": 0, "staleness_mean": 0.0}
        rate = int(metrics["tokens"] / (clock[1] - clock[0]))
        after_step(learner, groups, metrics, config, task, run, watch, generated=f"{rate}/s")

    common.save_checkpoint(run, learner.version, state_of(learner))
    wall = time.monotonic() - watch.start
    tokens = generator.counts["tokens"]
    facts = facts_of(learner, config, watch) | {
        "staleness_bound": 0,
        "tokens_generated": tokens,
        "rollout_tokens_per_s": round(tokens / max(busy["generate"], 1e-9)),
        "utilization": {"rollout": busy["generate"] / wall, "learner": busy["train"] / wall},
        "groups": {"admitted": learner.next_group, "trained": learner.next_group},
    }
    print(bench.summarise(run, facts))


if __name__ == "__main__":
    common.run_main(train, __doc__)
