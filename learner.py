"""learner.py: what is trained, and how the rooms are joined: set-up from flags.

`Learner` is plain data: policy, optimizer, reference, damper, counters. The functions here build
it, its task and its generator from a `Config`. Left out: what a step does to it (train_sync.py),
how it is saved (checkpoint.py) and everything about processes (train_async.py).
"""

import contextlib
import copy
import dataclasses
import json
import os
import time
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

import limits
import losses
import reward
from buffer import Group, group_to_parts
from common import Config, TrainingStopped, UserError, Watch, check, sha256_of
from model import GPT, PRESETS, ModelConfig
from rollout import Environment, Generator

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"


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


# ---------------------------------------------------------------------------------------- set-up


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
    if task.context > 131072:
        raise UserError(f"--task {config.task}: must fit into 131072 tokens, needs {task.context}")
    return config.context or task.context


def make_model(config: Config, task: reward.Task) -> GPT:
    """The policy, large enough for the task's episodes: random weights, or those of --init.

    Raises UserError.
    """
    context = capacity_of(config, task)
    how = {"kernels": config.kernels, "dense_below": config.dense_below}
    if config.kernels == "triton" and not (torch.cuda.is_available() or INTERPRETED):
        raise UserError(
            "--kernels triton: must have a CUDA device, or TRITON_INTERPRET=1 to try it"
        )
    if not config.init:
        shape = {"vocab_size": reward.VOCAB_SIZE, **PRESETS[config.model]}
        for name in ("positions", "attention", "scoring", "chunk_size", "top_k"):
            shape[name] = getattr(config, name)
        return GPT(ModelConfig(**shape | how, context=context), config.seed)
    try:
        stored = torch.load(config.init, weights_only=True)
        shape = stored["shape"]
    except Exception as error:  # on a file of another kind the loader raises almost anything
        raise UserError(f"--init {config.init}: must be a weights file of pretrain.py") from error
    learned = shape["positions"] == "learned"
    if learned and context > shape["context"]:
        raise UserError(
            f"--init {config.init}: must have {context} positions for task {config.task}, has "
            f"{shape['context']}"
        )
    how["context"] = shape["context"] if learned else context
    model = GPT(ModelConfig(**shape | how), config.seed)
    model.flat.copy_(stored["weights"])
    return model


def make_learner(config: Config, task: reward.Task, device: str) -> Learner:
    """Model, optimizer, reference and damper at version 0."""
    model = make_model(config, task).on(device)
    # one tensor is all parameters: the optimizer is one vector operation
    flat = torch.nn.Parameter(model.flat)
    flat.grad = model.flat_grad
    # Less momentum than usual: staleness acts as momentum does (Mitliagkas et al. 2016, arXiv
    # 1605.09774). And gradient sizes of the last 100 steps: the usual 1000 are more than a run has.
    optimizer = torch.optim.AdamW([flat], config.lr, (0.7, 0.99), weight_decay=0.0, fused=True)
    damper = losses.Damper(threshold=config.kl_threshold)
    alphabet = torch.from_numpy(alphabet_of(task)).to(device)
    reference = copy.deepcopy(model) if config.reference_every else None
    return Learner(model, optimizer, damper, alphabet, reference)


def make_environment(config: Config, task: reward.Task) -> Environment:
    """Join the task (text) to the generator (token ids)."""

    limit, memory = config.reward_seconds, config.reward_memory

    def respond(requests: list[tuple]) -> list[list[int] | None | str]:
        replies: list = []
        while len(replies) < len(requests):
            begin = time.monotonic()
            if replies.count("env_timeout") == 3:  # no more patience at this token boundary
                return replies + ["env_timeout"] * (len(requests) - len(replies))
            try:
                # once for all of them: that is quicker
                with limits.memory_limit(memory), limits.time_limit(limit):
                    for problem, tokens, turns in requests[len(replies) :]:
                        begin = time.monotonic()
                        answers = reward.split_answers(task, tokens, turns)
                        step = task.step(problem, answers)
                        replies.append(None if step.done else reward.encode(step.observation))
            except limits.OutOfTime:  # whoever used little of the limit is asked again
                if time.monotonic() - begin > 0.5 * limit:
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
    sizes = config.slots, capacity_of(config, task), config.group_size
    weights, dense = getattr(torch, config.rollout_weights), model.config.attention == "dense"
    graphs = config.compile == "auto" and model.flat.is_cuda and dense  # on a GPU they always pay
    compiled = graphs or config.compile == "decode"
    how = config.seed, config.temperature, config.swap, worker, weights, compiled
    return Generator(model, make_environment(config, task), *sizes, *how)


def new_groups(learner: Learner, task: reward.Task, count: int) -> list[Group]:
    """The next prompts; the cursor moves, so none is used twice."""
    ids = range(learner.next_group, learner.next_group + count)
    learner.next_group += count
    return [Group(i, learner.version, task.reset(i, "train")) for i in ids]


def score(group: Group, task: reward.Task, config: Config, after=lambda: None) -> list:
    """Verify every episode of a group, each within its limits; the reward workers' whole job.

    `after` is called before each verdict that has a limit to itself.
    """
    texts = [tuple(reward.split_answers(task, t.tokens, t.turns)) for t in group.trajectories]
    verdicts, seconds, known = [], config.reward_seconds, {}
    with limits.memory_limit(config.reward_memory):
        # One alarm for all of them, which is quicker: most groups need far less than one limit.
        with contextlib.suppress(limits.OutOfTime), limits.time_limit(seconds):
            for answers in texts:
                if answers not in known:  # a verifier is a function: the same has the same verdict
                    known[answers] = reward.verify(task, group.problem, answers, None)
                if known[answers].error == "verifier_timeout":
                    break
                verdicts.append(known[answers])
        for answers in texts[len(verdicts) :]:  # out of time: the rest one by one
            after()
            verdicts.append(reward.verify(task, group.problem, answers, seconds))
    return verdicts


def judge(group: Group, task: reward.Task, config: Config, after=lambda: None) -> dict:
    """The verdicts of `score`, when it began, and the seconds that it took."""
    began, verdicts = time.monotonic(), score(group, task, config, after)
    return {"verdicts": verdicts, "began": began, "seconds": time.monotonic() - began}


# ----------------------------------------------------------------------------- to resume, to replay


def resumed(config: Config, flag: str = "resume") -> Config:
    """The configuration of the run to resume (or to replay), or `config` itself when there is none.

    Only --steps may change, and only to resume. Raises UserError.
    """
    folder = getattr(config, flag)
    if config.replay and flag == "resume":
        raise UserError(f"--replay {config.replay}: must be left out in train_sync.py")
    if not folder:
        return config
    path = Path(folder) / "config.json"
    if not path.is_file():
        raise UserError(f"--{flag} {folder}: must be a run folder (with config.json in it)")
    stored = json.loads(path.read_text())
    for f in dataclasses.fields(Config):
        value, old = getattr(config, f.name), stored.setdefault(f.name, f.default)
        free = f.name == flag or (flag, f.name) == ("resume", "steps")
        if not free and value not in (f.default, old):
            name = "--" + f.name.replace("_", "-")
            raise UserError(f"{name} {value}: must be left out with --{flag} (the run has {old})")
    values = {f.name: stored[f.name] for f in dataclasses.fields(Config)}
    return check(Config(**values | {flag: folder, "steps": config.steps or stored["steps"]}))


# -------------------------------------------------------------------------------------- reports


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


def show_episode(group: Group) -> str:
    """One line: the text of a group's first episode, its versions and its reward."""
    t = group.trajectories[0]
    text = reward.decode_bytes(t.tokens.tolist()).decode(errors="replace")
    if len(text) > 100:
        text = text[:60] + " ... " + text[-40:]
    versions = t.versions[t.loss_mask]
    span = f"{versions.min()}..{versions.max()}" if len(versions) else "-"
    return f"  group {t.group_id}  [{text!r}]  reward {t.reward:.2f}  versions {span}  {t.finish}"


def facts_of(learner: Learner, config: Config, watch: Watch) -> dict:
    """What a summary needs to know beyond metrics.jsonl, in both trainers."""
    return {
        "task": config.task,
        "seed": config.seed,
        "steps": learner.version,
        "stopped_early": learner.version < config.steps,
        "wall_s": round(watch.close(), 2),
        "skipped_steps": learner.skipped,
        "weights_sha256": sha256_of(learner.model.flat),
    }
