"""runtime/setup.py."""

import copy
import dataclasses
import gc
import json
import os
from pathlib import Path

import torch

import losses
import reward
from learner import Learner, evaluate
from model import GPT, PRESETS, ModelConfig
from reward import Task
from rollout import Generator, alphabet_of, capacity_of, make_environment
from runtime import ledger
from runtime.checkpoint import checkpoint, load_checkpoint, restore
from runtime.config import Config, UserError, check
from runtime.runlog import RunLog, append_lines, forget_metrics, open_run
from runtime.tokenizer import VOCAB_SIZE


def open_training(config: Config, mode: str, device: str):
    """Task, run folder, learner (resumed or new), progress: the set-up of both trainers."""
    task = make_task(config)
    config = dataclasses.replace(config, steps=config.steps or task.steps)
    capacity_of(config, task)
    state = load_checkpoint(Path(config.resume)) if config.resume else None
    learner, seconds = make_learner(config, task, device), 0.0
    run = open_run(config, mode)
    if state:
        restore(learner, state, config)
        if learner.version >= config.steps:
            done = f"must be more than the {learner.version} steps that the run has"
            raise UserError(f"--steps {config.steps}: {done}")
        seconds = forget_metrics(run / "metrics.jsonl", learner.version)
        try:
            ledger.forget_events(run / "events.jsonl", learner.version, state["in_flight"])
        except ValueError as error:
            raise UserError(f"--resume {run}: {error}") from error
    watch = RunLog(run, config.steps, learner.version, seconds)
    if not state:
        result = evaluate(learner, config, task)
        append_lines(run / "metrics.jsonl", [{"t": 0.0, "step": 0, "eval": result}])
        checkpoint(learner, run, watch)  # so that a run can always be resumed
    gc.freeze()  # libraries and weights stay: to look them through again takes 8% of a step
    return config, task, run, learner, watch, state


INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"


def make_task(config: Config) -> Task:
    """The configured task; raises UserError in one line."""
    try:
        return reward.make_task(config.task, config.seed)
    except ValueError as error:
        raise UserError(str(error)) from error


def make_model(config: Config, task: Task) -> GPT:
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
        shape = {"vocab_size": VOCAB_SIZE, **PRESETS[config.model]}
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


def make_learner(config: Config, task: Task, device: str) -> Learner:
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


def make_generator(config: Config, task: Task, model: GPT, worker: int = 0) -> Generator:
    """The generator that a run uses for training episodes."""
    sizes = config.slots, capacity_of(config, task), config.group_size
    weights, dense = getattr(torch, config.rollout_weights), model.config.attention == "dense"
    compiled = model.flat.is_cuda and dense  # CUDA graphs: on a GPU they always pay
    how = config.seed, config.temperature, config.swap, worker, weights, compiled
    return Generator(model, make_environment(config, task), *sizes, *how)


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
