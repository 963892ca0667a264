"""runtime/replay.py: execute a finished asynchronous run again, from its event log.

    python train_async.py --replay runs/NAME       # must end at the same weights

Time and chance have decided who sampled what, which weights were there when each token was fed, and
which groups were trained in which order. The log holds that; everything else is computed again, by
one process, version by version: play every episode that this version had a part in, as far as it
fed it; then take the learner's step. Every finished episode is compared with the log, so is every
step.

Why it is exact: an episode depends on its prompt, its noise key and the weights at each position,
not on its neighbours (rollout.py). Why it never gets stuck: a worker begins samples in the order of
issue, and it had a slot for each of those that outlive a version.
Left out: failures, which may hang on the clock. They teach nothing; the log names them, and they
are not played again. Refused are runs that a reward model has judged, that went on with another
number of learners, or whose environments are outside.
"""

import copy
import dataclasses
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

import numpy as np
from tqdm import tqdm

from learner import Learner, learner_step, make_learner
from reward import Task, problem_of, task_of
from rollout import Generator, make_generator
from runtime.advice import judge_of
from runtime.checkpoint import sha256_of
from runtime.config import Config, TrainingStopped, blame, require
from runtime.devices import take_place
from runtime.folder import read_json, read_lines
from runtime.ledger import audit
from runtime.messages import ARRAYS, Group, Trajectory, apply_judgement
from runtime.models import make_model
from runtime.run import resumed


def replay(config: Config) -> None:
    """The whole run again; prints what is shown by it, or raises TrainingStopped."""
    config, summary = recorded(config)
    steps, scores = read_script(Path(config.replay))
    for _ in played_again(config, summary, steps, scores):
        pass
    episodes = f"{len(scores) * config.group_size:,} episodes"
    sha256 = summary["weights_sha256"]
    print(f"{len(steps)} steps and {episodes} again: all the same, weights {sha256[:16]}")


def played_again(config: Config, summary: dict, steps: list, scores: dict) -> Iterator[tuple]:
    """Play a run again; yields (learner, event of a step, its batch) before each of its steps.

    Who looks must change nothing. Raises TrainingStopped where something differs.
    """
    task, device = task_of(config), take_place(config, 0)
    sizes = {step["learners"] for step in steps}
    if device != "cpu":
        print("on a GPU only the episodes before the first step are promised to be the same")
    model = make_model(config, task).on(device)
    learner = make_learner(config, task, model, tuple(range(config.team_size)))  # all of them
    generators, begin = make_generators(config, task, learner, scores)
    judge, done = judge_of(config, task), {}  # done: group id -> group
    simple = not (task.outside or config.reward_model) and sizes == {config.team_size}
    must = "with one number of learners, and a task that answers and judges here"
    require(simple, f"--replay {config.replay}: must be a run {must}")
    for step in tqdm(steps, unit="step", dynamic_ncols=True):
        finished = []
        for worker, generator in generators.items():
            generator.waiting.extend(begin[worker, learner.version])
            finished += play(generator, scores, learner)
        for group in sorted(finished, key=lambda group: scores[group.group_id]["line"]):
            event = scores[group.group_id]
            apply_judgement(group, judge(group))
            if group.digest != event["digest"]:
                raise differs(event, f"group {group.group_id}: a sample is another one")
            done[group.group_id] = group
        batch = take_batch(step, done)
        yield learner, step, batch
        train(learner, step, batch, config)
    sha256 = sha256_of(learner.weights)
    if sha256 != summary["weights_sha256"]:
        raise TrainingStopped(f"every event is the same, but weights_sha256 is {sha256}")


# ---------------------------------------------------------------------------- what the log tells


def recorded(config: Config) -> tuple[Config, dict]:
    """Configuration and summary of the run to replay; raises UserError when that cannot be."""
    run, name = Path(config.replay), f"--replay {config.replay}"
    config, record = resumed(config, "replay")
    require(record["mode"] == "async", f"{name}: must be a run of train_async.py")
    with blame(f"{name}: must be finished and have a whole log"):
        summary = read_json(run / "summary.json")
        audit(run)
    return config, summary


def read_script(run: Path) -> tuple[list[dict], dict[int, dict]]:
    """The steps; and in the order of issue, of every group that was trained, its verdict and the
    worker that sampled it. Every event knows its `line` in the log."""
    steps, scores = [], {}
    for line, event in enumerate(read_lines(run / "events.jsonl"), start=1):
        event["line"] = line
        match event["kind"]:
            case "admit" | "requeue":
                scores.pop(event["group"], None)  # the last time counts
                scores[event["group"]] = {"worker": event["worker"]}
            case "score":
                scores[event["group"]] |= event
            case "train":
                steps.append(event)
    trained = {group_id for step in steps for group_id in step["groups"]}
    return steps, {group_id: event for group_id, event in scores.items() if group_id in trained}


# ------------------------------------------------------------------------------ playing it again


def make_generators(config: Config, task: Task, learner: Learner, scores: dict) -> tuple:
    """The generator of every worker; and (worker, version) -> the samples that begin there."""
    generators, begin = {}, defaultdict(list)
    for group_id, event in scores.items():
        worker, swaps = event["worker"], event["swaps"]
        if worker not in generators:
            generators[worker] = make_generator(config, task, copy.deepcopy(learner.model))
        group = Group(group_id, swaps[0][1], problem_of(task, group_id, "train"))
        generators[worker].groups[group_id] = group
        for i, pairs in enumerate(swaps):
            if reason := event.get("failed", {}).get(str(i)):
                none = {name: np.empty(0, kind) for name, kind in ARRAYS.items()}
                group.trajectories.append(Trajectory(group_id, i, 0, finish=reason, **none))
            else:
                begin[worker, pairs[1]].append((group, i))
    return generators, begin


def play(generator: Generator, scores: dict, learner: Learner) -> list[Group]:
    """Play everything as far as the learner's version fed it; returns the finished groups."""
    version, until = learner.version, {}  # until: where newer weights came
    for group_id in generator.groups:
        for sample_index, swaps in enumerate(scores[group_id]["swaps"]):
            pairs = zip(swaps[::2], swaps[1::2], strict=True)  # positions and versions
            newer = [position for position, other in pairs if other > version]
            until[group_id, sample_index] = min(newer, default=generator.capacity)
    generator.set_weights(version, learner.model.flat)
    while generator.step(until):
        pass
    left = len(generator.waiting)
    assert not left, f"version {version}: no slot for {left} samples"
    return generator.take_finished()


def take_batch(step: dict, done: dict) -> list[Group]:
    """The groups of one step, in the log's order."""
    late = [group_id for group_id in step["groups"] if group_id not in done]
    if late:
        raise differs(step, f"step {step['version']}: groups {late} are not finished")
    return [done.pop(group_id) for group_id in step["groups"]]


def train(learner: Learner, step: dict, batch: list[Group], config: Config) -> None:
    """Train the groups of one step, and compare."""
    # the learning rate falls towards the last step that was planned then: --resume may move it
    metrics = learner_step(learner, batch, dataclasses.replace(config, steps=step["of"]))
    for key in ("loss", "grad_norm"):
        if repr(metrics[key]) != repr(step[key]):  # as text, NaN is itself
            name = f"step {step['version']}"
            raise differs(step, f"{name}: {key} is {metrics[key]}, was {step[key]}")


def differs(event: dict, what: str) -> TrainingStopped:
    """The error that names the first event that differs."""
    first = f"the first event that differs is the {event['kind']} of {what}"
    return TrainingStopped(f"events.jsonl, line {event['line']}: {first}")
