"""setup.py: from flags to a run: task, model, learner, generator, run folder, log.

Left out: what a step does (learner.py), what is asked of people (config.py).
"""

import copy
import dataclasses
import gc
import json
import os
import signal
from dataclasses import dataclass
from pathlib import Path

import torch

import losses
import reward
from learner import Learner, evaluate
from model import GPT, PRESETS, ModelConfig
from rollout import Generator, make_environment
from runtime.checkpoint import checkpoint, load_checkpoint, restore
from runtime.config import Config, UserError, capacity_of, check, flag_name
from runtime.devices import pick_devices, set_threads
from runtime.runlog import RunLog, Stop, append_lines, cut_logs, open_run
from runtime.tokenizer import VOCAB_SIZE


@dataclass
class Run:
    """What both trainers work with."""

    config: Config
    task: reward.Task
    folder: Path
    learner: Learner
    log: RunLog
    stop: Stop
    state: dict | None  # the checkpoint with which it goes on


def open_training(config: Config, mode: str) -> Run:
    """Everything a trainer needs, new or resumed; the first evaluation and checkpoint of a new run.

    mode: "sync" or "async". Raises UserError.
    """
    stop, config = Stop(), resumed(config)
    learner_devices, rollout_devices = pick_devices(config)
    processes = 1 if mode == "sync" else len(learner_devices) + len(rollout_devices)
    set_threads(config, processes, learner_devices[0])
    task = task_of(config)
    config = dataclasses.replace(config, steps=config.steps or task.steps)
    state = load_checkpoint(Path(config.resume)) if config.resume else None
    learner, seconds = make_learner(config, task, learner_devices[0]), 0.0
    if state and state["version"] >= config.steps:
        done = f"must be more than the {state['version']} steps that the run has"
        raise UserError(f"--steps {config.steps}: {done}")
    folder = open_run(config, mode)
    if state:
        restore(learner, state, config)
        seconds = cut_logs(folder, learner.version, state["in_flight"])
    log = RunLog(folder, config.steps, learner.version, seconds)
    if not hasattr(signal, "setitimer"):
        log.say("this system has no timers: --reward-seconds cannot stop a slow environment")
    if not state:
        result = evaluate(learner, config, task)
        append_lines(folder / "metrics.jsonl", [{"t": 0.0, "step": 0, "eval": result}])
        checkpoint(learner, folder, log)  # so that a run can always be resumed
    gc.freeze()  # libraries and weights stay: to look them through again takes 8% of a step
    return Run(config, task, folder, learner, log, stop, state)


def task_of(config: Config) -> reward.Task:
    """The configured task; raises UserError in one line."""
    try:
        return reward.make_task(config.task, config.seed)
    except ValueError as error:
        raise UserError(str(error)) from error


def make_model(config: Config, task: reward.Task) -> GPT:
    """The policy, large enough for the task's episodes: random weights, or those of --init.

    Raises UserError.
    """
    context = capacity_of(config, task)
    how = {"kernels": config.kernels}
    interpreted = os.environ.get("TRITON_INTERPRET") == "1"
    if config.kernels == "triton" and not (torch.cuda.is_available() or interpreted):
        raise UserError("--kernels triton: must have a CUDA device (or TRITON_INTERPRET=1, slow)")
    if not config.init:
        shape = {"vocab_size": VOCAB_SIZE, "context": context, **PRESETS[config.model]}
        for name in ("positions", "attention", "scoring", "chunk_size", "top_k"):
            shape[name] = getattr(config, name)
        return GPT(ModelConfig(**shape | how), config.seed)
    try:
        stored = torch.load(config.init, weights_only=True)
        shape = stored["shape"]
    except Exception as error:  # on a file of another kind the loader raises almost anything
        raise UserError(f"--init {config.init}: must be a weights file of pretrain.py") from error
    if shape["positions"] != "learned":
        how["context"] = context
    elif context > shape["context"]:
        needed = f"{context} positions for task {config.task}, has {shape['context']}"
        raise UserError(f"--init {config.init}: must have {needed}")
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
    alphabet = torch.from_numpy(reward.alphabet_of(task)).to(device)
    reference = copy.deepcopy(model) if config.reference_every else None
    return Learner(model, optimizer, damper, alphabet, reference)


def make_generator(config: Config, task: reward.Task, model: GPT, worker: int = 0) -> Generator:
    """The generator that a run uses for training episodes."""
    return Generator(
        model,
        make_environment(config, task),
        slots=config.slots,
        capacity=capacity_of(config, task),
        group_size=config.group_size,
        seed=config.seed,
        temperature=config.temperature,
        swap=config.swap,
        worker=worker,
        weights=getattr(torch, config.rollout_weights),
        graphs=model.flat.is_cuda and model.config.attention == "dense",
    )


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
    stored, values = json.loads(path.read_text()), {}
    for f in dataclasses.fields(Config):
        value, values[f.name] = getattr(config, f.name), stored.get(f.name, f.default)
        free = f.name == flag or (flag, f.name) == ("resume", "steps")
        if not free and value not in (f.default, values[f.name]):
            said = f"{flag_name(f.name)} {value}"
            raise UserError(
                f"{said}: must be left out with --{flag} (the run has {values[f.name]})"
            )
    steps = config.steps or values["steps"]
    return check(Config(**values | {flag: folder, "steps": steps}))
