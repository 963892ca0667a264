"""setup.py: from flags to a run: task, model, learner, run folder, log, first evaluation.

Left out: what a step does (learner.py), the flags themselves (config.py).
"""

import gc
import os
from contextlib import nullcontext
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import TextIO

import torch

import dsa
from cache import kept_in
from learner import Learner, make_learner
from model import GPT, PRESETS, padded, sparse_kernels
from reward import Task, capacity_of, own_files, task_of
from runtime.advice import Advice, advice_of
from runtime.checkpoint import (
    checkpoint,
    drop_what_follows,
    load_checkpoint,
    restore,
)
from runtime.config import Config, check, flag_name, require
from runtime.devices import free_memory, pick_devices, set_threads
from runtime.folder import own_folder
from runtime.huggingface import open_export
from runtime.ledger import Ledger, read_books
from runtime.messages import Group
from runtime.models import make_model
from runtime.runlog import RunLog, Stop, new_folder, stored_config, write_config
from runtime.teacher import pinned
from tasks.exam import Host, evaluate

# flags that a run may have anew when it goes on
MAY_CHANGE = ("steps", "export", "learners", "rollout_workers", "cluster")


@dataclass
class Run:
    """What both trainers work with."""

    config: Config
    task: Task
    folder: Path
    lock: TextIO  # while it is open, the folder is this process's
    learner: Learner
    log: RunLog
    stop: Stop
    host: Host  # of evaluations, and of what train_sync.py has outside
    advice: Advice
    ledger: Ledger
    state: dict | None  # the checkpoint with which it goes on
    verified: list[Group]  # since failures were counted last
    discarded: list[tuple[Group, str]]  # those that were not to be trained, and why


def open_training(config: Config, mode: str) -> Run:
    """Everything a trainer needs, new or resumed; the first evaluation and checkpoint of a new run.

    mode: "sync" or "async". Nothing on disk changes before everything was checked. UserError.
    """
    stop, state, ledger = Stop(), None, Ledger()
    require(not config.replay, f"--replay {config.replay}: must be left out in train_sync.py")
    if config.resume:
        folder = Path(config.resume)
        config, record = resumed(config)
        require(record["mode"] == mode, f"--resume {folder}: must be a run of train_{mode}.py")
        lock = own_folder(folder)
        state = load_checkpoint(folder)
        if mode == "async":
            ledger = read_books(folder / "events.jsonl", state["marks"]["events"][0])
    places = ("teacher", "reward_model") + ("model",) * (config.model not in PRESETS)
    for name in places:  # a run may go on from another place
        if place := getattr(config, name):
            config = replace(config, **{name: os.path.abspath(place)})
    config = config if state else pinned(config)
    if config.cluster:
        require(mode == "async", f"--cluster {config.cluster}: must be left out in train_sync.py")
        from runtime.cluster import open_cluster  # it takes a second, and needs Ray

        config = open_cluster(config)
    learners, rollouts = pick_devices(config)
    set_threads(config, 1 if mode == "sync" else len(learners) + len(rollouts), learners[0])
    task = task_of(config)
    outside = [part.name for part in task.parts or (task,) if part.outside]
    said = f"--reward-workers 0: must be at least 1 for {outside}, whose steps run there"
    require(config.reward_workers or not outside or mode == "sync", said)
    config = replace(config, steps=config.steps or task.steps)
    advice = advice_of(config, task)
    model = make_model(config, task, state)
    kernels = sparse_kernels(model.config, torch.device(rollouts[0]))
    said = f"--rollout-cache {config.rollout_cache}: must be auto with kernels in Triton"
    require(config.rollout_cache == "auto" or kernels in (None, dsa), said)
    learner = make_learner(config, task, model.on(learners[0]))
    if config.slots == 0:
        places = rollouts if mode == "async" else learners
        slots = fitting_slots(config, task, learner.model, places)
        config = replace(config, slots=slots)
    if state:
        restore(learner, state, config, ledger)
    gc.freeze()  # libraries and weights stay: to look them through again takes 8% of a step
    gc.set_threshold(50_000)  # groups that arrive are no garbage: the parent takes 11% more of them
    with nullcontext((folder, lock)) if state else new_folder(config, mode) as (folder, lock):
        if config.export:
            open_export(Path(config.export), model.config)  # it is not --out, either
        if state:
            drop_what_follows(folder, state)
            changed = {name: getattr(config, name) for name in MAY_CHANGE}
            write_config(folder, record | changed)
        host = Host(config, folder / "logs" / "evaluation.log")
        log = RunLog(folder, config, state)
        run = Run(
            config, task, folder, lock, learner, log, stop, host, advice, ledger, state, [], []
        )
        if state:
            log.say(f"{folder} goes on at step {learner.version}; what came later is done again")
            return run
        try:
            log.metrics({"step": 0, "eval": evaluate_now(run)}, at=0.0)
            checkpoint(learner, folder, log)  # so that a run can always be resumed
        except BaseException:
            log.close()  # the error is the last line on the screen
            raise
    return run


def fitting_slots(config: Config, task: Task, model: GPT, places: list[str]) -> int:
    """How many sequences of the longest kind fit into the memory that is free, for each worker;
    said on the screen. Half of it is left to activations. UserError when none fits."""
    c, device = model.config, places[0]
    length = padded(capacity_of(config, task))
    # on its way to the longest row, a sequence may have had one of each shorter length: 2 in all
    kept = kept_in(model, config.rollout_cache).itemsize
    size = 4 * c.layers * c.kv_heads * c.head_width * length * kept
    weights = model.flat.nbytes + 2 * model.frozen.nbytes  # with adapters merged ones, too
    free = free_memory(device) // places.count(device) - weights
    count = int(0.5 * free / size)
    in_flight = (config.max_staleness + 1) * config.groups_per_step * config.group_size
    slots = min(count, 4096, -(-in_flight // len(places)))
    facts = f"a sequence of {length:,} tokens takes {size / 2**20:,.1f} MiB of {device}"
    require(count > 0, f"--slots 0: must have free memory, but {facts} ({free >> 20:,} are free)")
    print(f"--slots 0: {slots} sequences at once ({facts}, {count} would fit)")
    return slots


def evaluate_now(run: Run) -> dict:
    """Evaluate the learner; what has failed is said. The host looks at the clock itself."""
    run.log.rest()
    result = evaluate(run.learner, run.config, run.task, run.host)
    for kind, (count, words) in result["failures"].items():
        run.log.say(f"evaluation: {count} failed, {': '.join(filter(None, (kind, words)))}")
    return result


def resumed(config: Config, flag: str = "resume") -> tuple[Config, dict]:
    """The configuration of the run to resume (or to replay), and all that its config.json holds.

    Only the flags in MAY_CHANGE may change, and only to resume. A folder may come from somebody
    else: it runs code of a file only if the user names that file, too. Raises UserError.
    """
    folder = Path(getattr(config, flag))
    old, stored = stored_config(folder, f"--{flag}")
    free = {"resume", *MAY_CHANGE} if flag == "resume" else {flag}
    for f in fields(Config):
        given, had = getattr(config, f.name), getattr(old, f.name)
        said = f"{flag_name(f.name)} {given}: must be left out with --{flag} (the run has {had})"
        require(f.name in free or given in (f.default, had), said)
    known = config.task == old.task or not own_files(old.task)
    require(known, f"--{flag} {folder}: must be given --task {old.task}, whose code it runs")
    changed = {name: getattr(config, name) or getattr(old, name) for name in free}
    # no folder makes anybody connect to a machine, or write elsewhere
    changed |= {name: getattr(config, name) for name in ("cluster", "export")}
    return check(replace(old, **changed)), stored
