"""runtime/replay.py: execute a finished asynchronous run again, from its event log.

    python train_async.py --replay runs/NAME       # must end at the same weights

Time and chance have decided who sampled what, which weights were there when each token was fed, and
which groups were trained in which order. The log holds that; everything else is computed again, by
one process, version by version: play every episode that this version had a part in, as far as it
fed it; then take the learner's step. Every finished episode is compared with the log, so is every
step.

Why it is exact: an episode depends on its prompt, its noise key and the weights at each position,
not on its neighbours (rollout.py). Why it never lacks a slot: a worker begins samples in the order
of issue, and those that go on when a version ends all had a slot in the run that is played.
Left out: failures, which may hang on the clock. They teach nothing; the log names them, and they
are not played again. Refused are runs that a reward model has judged, that went on with another
number of learners, or whose environments are outside.
"""

import copy
import dataclasses
from collections.abc import Iterator
from pathlib import Path

from tqdm import tqdm

from learner import Learner, learner_step, make_learner
from reward import Task, problem_of, task_of
from rollout import Generator, make_generator
from runtime.checkpoint import sha256_of
from runtime.config import Config, TrainingStopped, blame, require
from runtime.devices import take_place
from runtime.folder import read_json, read_lines
from runtime.judge import judge_of
from runtime.ledger import audit
from runtime.messages import NO_INTS, Group, Trajectory, apply_judgement
from runtime.models import make_model
from runtime.run import resumed


def replay(config: Config) -> None:
    """The whole run again; prints what is shown by it, or raises TrainingStopped."""
    config, sha256, steps, scores = recorded(config)
    for _ in played_again(config, sha256, steps, scores):
        pass
    episodes = f"{len(scores) * config.group_size:,} episodes"
    print(f"{len(steps)} steps and {episodes} again: all the same, weights {sha256[:16]}")


def recorded(config: Config) -> tuple:
    """What a run's folder tells: its configuration, the sha256 of its weights, its steps; and in
    the order of issue, of every group that was trained, its verdict and the worker that sampled it.

    Every event knows its `line` in the log. Raises UserError when the run cannot be played again.
    """
    run = Path(config.replay)
    config = resumed(config, "replay", "async")
    with blame(f"--replay {run}: must be finished and have a whole log"):
        sha256 = read_json(run / "summary.json")["weights_sha256"]
        audit(run)
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
    scores = {group_id: event for group_id, event in scores.items() if group_id in trained}
    return config, sha256, steps, scores


def played_again(config: Config, sha256: str, steps: list, scores: dict) -> Iterator[tuple]:
    """Play a run again; yields (learner, event of a step, its batch) before each of its steps.

    Who looks must change nothing. Raises TrainingStopped where something differs.
    """
    task = task_of(config)
    simple = not (task.outside or config.reward_model)
    simple &= {step["learners"] for step in steps} == {config.team_size}
    must = "with one number of learners, and a task that answers and judges here"
    require(simple, f"--replay {config.replay}: must be a run {must}")
    model = make_model(config, task).on(take_place(config, 0))
    learner = make_learner(config, task, model, tuple(range(config.team_size)))  # all of them
    generators = make_generators(config, task, learner, scores)
    judge, done = judge_of(config, task), {}  # done: group id -> group
    for step in tqdm(steps, unit="step", dynamic_ncols=True):
        finished = []
        for generator in generators:
            finished += play(generator, scores, learner)
        for group in sorted(finished, key=lambda group: scores[group.group_id]["line"]):
            event = scores[group.group_id]
            apply_judgement(group, judge(group))
            if group.digest != event["digest"]:
                raise differs(event, f"group {group.group_id}: a sample is another one")
            done[group.group_id] = group
        name = f"step {step['version']}"
        late = set(step["groups"]) - done.keys()
        if late:
            raise differs(step, f"{name}: groups {late} are not finished")
        batch = [done.pop(group_id) for group_id in step["groups"]]
        yield learner, step, batch
        # the learning rate falls towards the last step that was planned then: --resume may move it
        metrics = learner_step(learner, batch, dataclasses.replace(config, steps=step["of"]))
        for key in ("loss", "grad_norm"):
            if repr(metrics[key]) != repr(step[key]):  # as text, NaN is itself
                raise differs(step, f"{name}: {key} is {metrics[key]}, was {step[key]}")
    found = sha256_of(learner.weights)
    if found != sha256:
        raise TrainingStopped(f"every event is the same, but weights_sha256 is {found}")


def make_generators(config: Config, task: Task, learner: Learner, scores: dict) -> list[Generator]:
    """The generator of every worker, with the groups that it is to finish."""
    generators = {}
    for group_id, event in scores.items():
        worker, problem = event["worker"], problem_of(task, group_id, "train")
        group = Group(group_id, 0, problem)  # `play` sees to it when it begins
        if worker not in generators:
            generators[worker] = make_generator(config, task, copy.deepcopy(learner.model))
        generators[worker].groups[group_id] = group
        for i, reason in event.get("failed", {}).items():
            failed = Trajectory(group_id, int(i), 0, finish=reason, tokens=NO_INTS)
            group.trajectories.append(failed)
    return list(generators.values())


def play(generator: Generator, scores: dict, learner: Learner) -> list[Group]:
    """Play everything as far as the learner's version fed it; returns the finished groups."""
    version, until = learner.version, {}  # until: where newer weights came
    for group_id, group in generator.groups.items():
        over = {t.sample_index for t in group.trajectories}
        for i, swaps in enumerate(scores[group_id]["swaps"]):
            pairs = zip(swaps[::2], swaps[1::2], strict=True)  # positions and versions
            newer = [position for position, other in pairs if other > version]
            until[group_id, i] = min(newer, default=generator.capacity)
            if i not in over and swaps[1] == version:
                generator.waiting.append((group, i))  # it begins now
    generator.set_weights(version, learner.model.flat)
    while generator.step(until):
        pass
    return generator.take_finished()


def differs(event: dict, what: str) -> TrainingStopped:
    """The error that names the first event that differs."""
    line = f"events.jsonl, line {event['line']}"
    return TrainingStopped(f"{line}: the first event that differs is the {event['kind']} of {what}")
