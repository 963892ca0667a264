"""setup.py: from flags to a run: task, model, learner, generator, run folder, log.

Left out: what a step does (learner.py), what is asked of people (config.py).
"""

import copy
import dataclasses
import gc
import os
import signal
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

import torch

import losses
import reward
from learner import Learner, evaluate
from model import GPT, PRESETS, ModelConfig
from runtime import limits
from runtime.checkpoint import (
    checkpoint,
    drop_what_follows,
    load_checkpoint,
    load_tensors,
    misfit,
    restore,
)
from runtime.config import Config, UserError, capacity_of, check, flag_name
from runtime.devices import pick_devices, set_threads
from runtime.exam import Examiner
from runtime.folder import own_folder, read_json, refuse_links
from runtime.ledger import Ledger, read_books
from runtime.runlog import RunLog, Stop, make_subfolders, new_folder, write_config
from runtime.tokenizer import VOCAB_SIZE


@dataclass
class Run:
    """What both trainers work with."""

    config: Config
    task: reward.Task
    folder: Path
    lock: BinaryIO  # while it is open, the folder is this process's
    learner: Learner
    log: RunLog
    stop: Stop
    examiner: Examiner
    ledger: Ledger
    state: dict | None  # the checkpoint with which it goes on


def open_training(config: Config, mode: str) -> Run:
    """Everything a trainer needs, new or resumed; the first evaluation and checkpoint of a new run.

    mode: "sync" or "async". Nothing on disk changes before everything was checked. UserError.
    """
    stop = Stop()
    if config.replay:
        raise UserError(f"--replay {config.replay}: must be left out in train_sync.py")
    if config.resume:
        run = reopen(config, mode, stop)
    else:
        task, learner_device = prepare(config, mode)
        config = dataclasses.replace(config, steps=config.steps or task.steps)
        learner = make_learner(config, task, learner_device)
        with new_folder(config, mode) as (folder, lock):
            examiner = Examiner(config, folder / "logs" / "evaluation.log")
            log = RunLog(folder, config.steps, stall=config.stall)
            run = Run(config, task, folder, lock, learner, log, stop, examiner, Ledger(), None)
            log.metrics({"step": 0, "eval": evaluate_now(run)}, at=0.0)
            checkpoint(learner, folder, log)  # so that a run can always be resumed
    if not hasattr(signal, "setitimer"):
        run.log.say("this system has no timers: --reward-seconds cannot stop a slow environment")
    gc.freeze()  # libraries and weights stay: to look them through again takes 8% of a step
    return run


def reopen(config: Config, mode: str, stop: Stop) -> Run:
    """A run that goes on, from the newest point at which checkpoint and logs agree."""
    folder = Path(config.resume)
    config, record = resumed(config)
    if record["mode"] != mode:
        raise UserError(f"--resume {folder}: must be a run of train_{mode}.py")
    lock = own_folder(folder)
    task, learner_device = prepare(config, mode)
    state = load_checkpoint(folder)
    learner = make_learner(config, task, learner_device, state)
    restore(learner, state, config)
    if learner.version >= config.steps:
        done = f"must be more than the {learner.version} steps that the run has"
        raise UserError(f"--steps {config.steps}: {done}")
    ledger = Ledger()
    if mode == "async":
        _, ledger = read_books(folder / "events.jsonl", state["marks"]["events"][0])
    if ledger.flying != set(state["in_flight"]):
        raise UserError(f"--resume {folder}: its checkpoint and events.jsonl have other groups")
    make_subfolders(folder)
    said = drop_what_follows(folder, state)
    write_config(folder, record | {"steps": config.steps})
    log = RunLog(folder, config.steps, state, config.stall)
    log.say(f"{folder} {said}")
    examiner = Examiner(config, folder / "logs" / "evaluation.log")
    return Run(config, task, folder, lock, learner, log, stop, examiner, ledger, state)


def prepare(config: Config, mode: str) -> tuple[reward.Task, str]:
    """The task, and the device of the learner in this process; its share of the cores is set."""
    learners, rollouts = pick_devices(config)
    set_threads(config, 1 if mode == "sync" else len(learners) + len(rollouts), learners[0])
    return task_of(config), learners[0]


def evaluate_now(run: Run) -> dict:
    """Evaluate the learner; what has failed is said. The examiner looks at the clock itself."""
    run.log.rest()
    result = evaluate(run.learner, run.config, run.task, run.examiner)
    for kind, (count, words) in result["failures"].items():
        run.log.say(f"evaluation: {count} of {run.task.eval_size} failed, {kind}: {words}")
    return result


def task_of(config: Config) -> reward.Task:
    """The configured task; raises UserError in one line."""
    try:
        return reward.make_task(config.task, config.seed)
    except ValueError as error:
        raise UserError(str(error)) from error


def make_model(config: Config, task: reward.Task, stored: dict | None = None) -> GPT:
    """The policy, large enough for the task's episodes: random weights, or those of --init.

    stored: a checkpoint, which has the shape of --init and newer weights. Raises UserError.
    """
    context = capacity_of(config, task)
    interpreted = os.environ.get("TRITON_INTERPRET") == "1"
    if config.kernels == "triton" and not (torch.cuda.is_available() or interpreted):
        raise UserError("--kernels triton: must have a CUDA device (or TRITON_INTERPRET=1, slow)")
    if not config.init:
        shape = {"vocab_size": VOCAB_SIZE, "context": context, **PRESETS[config.model]}
        for name in ("positions", "attention", "scoring", "chunk_size", "top_k", "kernels"):
            shape[name] = getattr(config, name)
        return GPT(ModelConfig(**shape), config.seed)
    name = f"--init {config.init}"
    try:
        stored = stored or load_tensors(Path(config.init))
        how = {"kernels": config.kernels}
        if stored["shape"]["positions"] != "learned":
            how["context"] = context
        # what a stranger calls a shape may be larger than any memory
        with limits.time_limit(60.0), limits.memory_limit(4096 + stored["weights"].nbytes / 2**18):
            model = GPT(ModelConfig(**stored["shape"] | how), config.seed)
        if wrong := misfit(model.flat, stored["weights"], "its weights"):
            raise ValueError(wrong)
    except (Exception, limits.OutOfTime) as error:  # almost anything may stand in a file
        reason = f"must be a weights file of pretrain.py ({error})"
        raise UserError(f"{name}: {reason}") from error
    if context > model.config.context:
        needed = f"{context} positions for task {config.task}, has {model.config.context}"
        raise UserError(f"{name}: must have {needed}")
    model.flat.copy_(stored["weights"])
    return model


def make_learner(config: Config, task: reward.Task, device: str, stored=None) -> Learner:
    """Model, optimizer, reference and damper at version 0; `stored` as for `make_model`."""
    model = make_model(config, task, stored).on(device)
    # one tensor is all parameters: the optimizer is one vector operation
    flat = torch.nn.Parameter(model.flat)
    flat.grad = model.flat_grad
    # Less momentum than usual: staleness acts as momentum does (Mitliagkas et al. 2016, arXiv
    # 1605.09774). And gradient sizes of the last 100 steps: the usual 1000 are more than a run has.
    optimizer = torch.optim.AdamW([flat], config.lr, (0.7, 0.99), weight_decay=0.0, fused=True)
    zeros = {"exp_avg": torch.zeros_like(flat), "exp_avg_sq": torch.zeros_like(flat)}
    optimizer.state[flat] = {"step": flat.new_zeros(())} | zeros  # there from the beginning
    damper = losses.Damper(threshold=config.kl_threshold)
    alphabet = torch.from_numpy(reward.alphabet_of(task)).to(device)
    reference = copy.deepcopy(model) if config.reference_every else None
    return Learner(model, optimizer, damper, alphabet, reference)


def resumed(config: Config, flag: str = "resume") -> tuple[Config, dict]:
    """The configuration of the run to resume (or to replay), and all that its config.json holds.

    Only --steps may change, and only to resume. A folder may come from somebody else: it runs code
    of a file only if the user names that file, too. Raises UserError.
    """
    folder = getattr(config, flag)
    path = Path(folder) / "config.json"
    if not path.is_file():
        raise UserError(f"--{flag} {folder}: must be a run folder (with config.json in it)")
    refuse_links(Path(folder))
    stored, values = read_json(path), {}
    for f in dataclasses.fields(Config):
        value, values[f.name] = getattr(config, f.name), stored.get(f.name, f.default)
        free = f.name == flag or (flag, f.name) == ("resume", "steps")
        if not free and value not in (f.default, values[f.name]):
            said = f"{flag_name(f.name)} {value}"
            raise UserError(
                f"{said}: must be left out with --{flag} (the run has {values[f.name]})"
            )
    try:
        old = check(Config(**values))
        if stored.get("mode") not in ("sync", "async"):
            raise UserError(f"mode {stored.get('mode')!r}: must be sync or async")
    except UserError as error:
        raise UserError(f"{path}: {error}") from error
    if reward.own_file(old.task) and config.task != old.task:
        raise UserError(f"--{flag} {folder}: must be given --task {old.task}, whose code it runs")
    steps = config.steps or old.steps
    return check(dataclasses.replace(old, **{flag: folder}, steps=steps)), stored
