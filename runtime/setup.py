"""setup.py: from flags to a run: task, model, learner, generator, run folder, log.

Left out: what a step does (learner.py), what is asked of people (config.py).
"""

import dataclasses
import gc
import os
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import TextIO

import torch

import reward
from learner import Learner, evaluate, make_learner
from model import GPT, PRESETS, ModelConfig
from reward import task_of
from runtime.checkpoint import checkpoint, drop_what_follows, load_checkpoint, load_tensors, restore
from runtime.config import Config, UserError, check, flag_name
from runtime.devices import pick_devices, set_threads
from runtime.exam import Examiner
from runtime.folder import own_folder, read_json, refuse_links
from runtime.ledger import Ledger, read_books
from runtime.runlog import RunLog, Stop, make_subfolders, new_folder, write_config
from tasks import limits


@dataclass
class Run:
    """What both trainers work with."""

    config: Config
    task: reward.Task
    folder: Path
    lock: TextIO  # while it is open, the folder is this process's
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
    stop, state, ledger = Stop(), None, Ledger()
    if config.replay:
        raise UserError(f"--replay {config.replay}: must be left out in train_sync.py")
    if config.resume:
        folder = Path(config.resume)
        config, record = resumed(config)
        if record["mode"] != mode:
            raise UserError(f"--resume {folder}: must be a run of train_{mode}.py")
        lock = own_folder(folder)
        state = load_checkpoint(folder)
        if mode == "async":
            _, ledger = read_books(folder / "events.jsonl", state["marks"]["events"][0])
    learners, rollouts = pick_devices(config)
    set_threads(config, 1 if mode == "sync" else len(learners) + len(rollouts), learners[0])
    task = task_of(config)
    config = dataclasses.replace(config, steps=config.steps or task.steps)
    learner = make_learner(config, task, make_model(config, task, state).on(learners[0]))
    if state:
        restore(learner, state, config, ledger)
        dropped = drop_what_follows(folder, state)
        make_subfolders(folder)
        write_config(folder, record | {"steps": config.steps})
    gc.freeze()  # libraries and weights stay: to look them through again takes 8% of a step
    with nullcontext((folder, lock)) if state else new_folder(config, mode) as (folder, lock):
        examiner = Examiner(config, folder / "logs" / "evaluation.log")
        log = RunLog(folder, config.steps, state, config.stall)
        run = Run(config, task, folder, lock, learner, log, stop, examiner, ledger, state)
        if state:
            log.say(f"{folder} goes on at step {learner.version}; dropped: {dropped}")
            return run
        try:
            log.metrics({"step": 0, "eval": evaluate_now(run)}, at=0.0)
            checkpoint(learner, folder, log)  # so that a run can always be resumed
        except BaseException:
            log.close()  # the error is the last line on the screen
            raise
    return run


def evaluate_now(run: Run) -> dict:
    """Evaluate the learner; what has failed is said. The examiner looks at the clock itself."""
    run.log.rest()
    result = evaluate(run.learner, run.config, run.task, run.examiner)
    for kind, (count, words) in result["failures"].items():
        run.log.say(f"evaluation: {count} failed, {kind}: {words}")
    return result


def make_model(config: Config, task: reward.Task, stored: dict | None = None) -> GPT:
    """The policy, large enough for the task's episodes: random weights, or those of --init.

    stored: a checkpoint, which has the shape of --init and newer weights. Raises UserError.
    """
    context = reward.capacity_of(config, task)
    interpreted = os.environ.get("TRITON_INTERPRET") == "1"
    if config.kernels == "triton" and not (torch.cuda.is_available() or interpreted):
        raise UserError("--kernels triton: must have a CUDA device (or TRITON_INTERPRET=1, slow)")
    if not config.init:
        shape = {"vocab_size": task.tokenizer.size, "context": context, **PRESETS[config.model]}
        for name in ("positions", "attention", "scoring", "chunk_size", "top_k", "kernels"):
            shape[name] = getattr(config, name)
        return base_model(config, ModelConfig(**shape))
    try:
        stored = stored or load_tensors(Path(config.init))
        shape, weights = stored["shape"] | {"kernels": config.kernels}, stored["weights"]
        if shape["positions"] != "learned":
            shape["context"] = context
        # what a stranger calls a shape may be larger than any memory
        with limits.time_limit(60.0), limits.memory_limit(4096 + weights.nbytes / 2**18):
            model = GPT(ModelConfig(**shape), config.seed)
        if (weights.dtype, weights.shape) != (model.flat.dtype, model.flat.shape):
            raise ValueError(f"{weights.dtype} {list(weights.shape)} for its shape")
        if context > model.config.context:
            needed = f"{context} positions for task {config.task}"
            raise ValueError(f"{needed}, has {model.config.context}")
    except (Exception, limits.OutOfTime) as error:  # almost anything may stand in a file
        needed = f"must be a weights file of pretrain.py that fits ({error})"
        raise UserError(f"--init {config.init}: {needed}") from error
    model.flat.copy_(weights)
    return model


def base_model(config: Config, shape: ModelConfig) -> GPT:
    """A model of this shape before any training, on the CPU."""
    return GPT(shape, config.seed)


def worker_model(config: Config, shape: ModelConfig) -> GPT:
    """A model whose weights will come from the learner."""
    return GPT(shape, None, getattr(torch, config.dtype))


def resumed(config: Config, flag: str = "resume") -> tuple[Config, dict]:
    """The configuration of the run to resume (or to replay), and all that its config.json holds.

    Only --steps may change, and only to resume. A folder may come from somebody else: it runs code
    of a file only if the user names that file, too. Raises UserError.
    """
    folder = Path(getattr(config, flag))
    refuse_links(folder)
    try:
        stored = read_json(folder / "config.json")
        values = {f.name: stored.get(f.name, f.default) for f in dataclasses.fields(Config)}
        old = check(Config(**values))
        if stored.get("mode") not in ("sync", "async"):
            raise UserError(f"mode {stored.get('mode')!r}: must be sync or async")
    except UserError as error:
        needed = f"must be a run folder with a sound config.json ({error})"
        raise UserError(f"--{flag} {folder}: {needed}") from error
    free = {"resume", "steps"} if flag == "resume" else {flag}
    for f in dataclasses.fields(Config):
        given, had = getattr(config, f.name), values[f.name]
        if f.name not in free and given not in (f.default, had):
            said = f"{flag_name(f.name)} {given}"
            raise UserError(f"{said}: must be left out with --{flag} (the run has {had})")
    if reward.own_file(old.task) and config.task != old.task:
        raise UserError(f"--{flag} {folder}: must be given --task {old.task}, whose code it runs")
    changed = {flag: str(folder), "steps": config.steps or old.steps}
    return check(dataclasses.replace(old, **changed)), stored
