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
Left out: failures, which may hang on the clock. They teach nothing; the log names them.
"""

import dataclasses
from collections import defaultdict
from operator import itemgetter
from pathlib import Path

from tqdm import tqdm

from learner import Learner, learner_step
from reward import Task, verify_group
from rollout import Generator
from runtime.checkpoint import sha256_of
from runtime.config import Config, TrainingStopped, UserError
from runtime.devices import pick_devices, set_threads
from runtime.ledger import audit
from runtime.messages import Group, Trajectory, apply_verdicts
from runtime.runlog import read_json, read_lines
from runtime.setup import make_generator, make_learner, make_model, resumed, task_of

NO_END = 2**30  # tokens


def replayable(group: Group) -> dict:
    """What the log keeps of a verified group."""
    return {
        "failed": {i: t.finish for i, t in enumerate(group.trajectories) if t.failed},
        "digest": group.digest,
        "swaps": [t.swaps for t in group.trajectories],
    }


def replay(config: Config) -> None:
    """The whole run again; prints what is shown by it, or raises TrainingStopped."""
    config, summary = recorded(config)
    steps, scores = read_script(Path(config.replay))
    task = task_of(config)
    learners, generators = pick_devices(config)
    device = learners[0]
    set_threads(config, len(learners) + len(generators), device)
    if device != "cpu":
        print("on a GPU only the episodes before the first step are promised to be the same")
    learner = make_learner(config, task, device)
    trained = []
    for step in steps:
        trained += [scores[group_id] for group_id in step["groups"]]
    parts = make_parts(config, task, learner, trained)
    done = {}  # group id -> group
    for step in tqdm(steps, unit="step", dynamic_ncols=True):
        finished = {}
        for part in parts:
            finished |= part.play(learner)
        for group_id in sorted(finished, key=lambda group_id: scores[group_id]["line"]):
            group = finished[group_id]
            apply_verdicts(group, verify_group(group, task, config))
            compare(group, scores[group_id])
        done |= finished
        train(learner, step, done, config)
    sha256 = sha256_of(learner.model.flat)
    if sha256 != summary["weights_sha256"]:
        raise TrainingStopped(f"every event is the same, but weights_sha256 is {sha256}")
    episodes = f"{len(trained) * config.group_size:,} episodes"
    print(f"{len(steps)} steps and {episodes} again: all the same, weights {sha256[:16]}")


# ---------------------------------------------------------------------------- what the log tells


def recorded(config: Config) -> tuple[Config, dict]:
    """Configuration and summary of the run to replay; raises UserError when that cannot be."""
    run, name = Path(config.replay), f"--replay {config.replay}"
    config = resumed(config, "replay")
    mode = read_json(run / "config.json")["mode"]
    if mode != "async" or config.learners > 1:
        raise UserError(f"{name}: must be a run of train_async.py with one learner")
    try:
        summary = read_json(run / "summary.json")
        _, ledger = audit(run)
    except (OSError, ValueError) as error:
        raise UserError(f"{name}: must be finished and have a whole log ({error})") from error
    if summary["steps"] != ledger.steps:
        raise UserError(f"{name}: must be finished, its log goes on after its summary")
    return config, summary


def read_script(run: Path) -> tuple[list[dict], dict[int, dict]]:
    """The steps in order; and of every group its verdict, with the worker that sampled it and its
    place in the order of issue. Every event knows its `line` in the log."""
    steps, issued, scores = [], {}, {}
    for line, event in enumerate(read_lines(run / "events.jsonl"), start=1):
        event["line"], group = line, event.get("group")
        if event["kind"] in ("admit", "requeue"):
            issued[group] = {"worker": event["worker"], "issued": line}  # the last time counts
        elif event["kind"] == "score":
            scores[group] = event | issued[group]
        elif event["kind"] == "train":
            steps.append(event)
    return steps, scores


# ------------------------------------------------------------------------------ playing it again


class Part:
    """What one rollout worker did: its generator, and its samples in the order of issue.

    A sample is (group id, index). Its swaps are pairs (position, version): from this position on,
    its tokens were fed by this version.
    """

    def __init__(self, generator: Generator, scores: list[dict], task: Task):
        self.generator = generator
        self.swaps = {}  # of every sample
        self.begin = defaultdict(list)  # version -> samples that begin with it
        for event in sorted(scores, key=itemgetter("issued")):
            group_id, swaps = event["group"], event["swaps"]
            group = Group(group_id, swaps[0][1], task.reset(group_id, "train"))
            generator.groups[group_id] = group
            for i, flat in enumerate(swaps):
                self.swaps[group_id, i] = list(zip(flat[::2], flat[1::2], strict=True))
                self.begin[flat[1]].append((group, i))

    def play(self, learner: Learner) -> dict[int, Group]:
        """Play everything as far as the learner's version fed it; returns the finished groups."""
        generator, version = self.generator, learner.version
        flat = learner.model.flat
        if generator.model is learner.model:
            flat = None  # they are its own
        generator.set_weights(version, flat)
        generator.waiting.extend(self.begin[version])
        while True:
            for b, episode in enumerate(generator.episodes):
                if episode:
                    generator.running[b] = generator.cached[b] < self.end(episode, version)
            if not generator.step():
                left = len(generator.waiting)
                assert not left, f"version {version}: no slot for {left} samples"
                return {group.group_id: group for group in generator.take_finished()}

    def end(self, episode: Trajectory, version: int) -> int:
        """The position from which on newer weights fed this episode."""
        swaps = self.swaps[episode.group_id, episode.sample_index]
        return min([position for position, newer in swaps if newer > version], default=NO_END)


def make_parts(config: Config, task: Task, learner: Learner, scores: list[dict]) -> list[Part]:
    """One part for each worker that sampled something."""
    # environments are asked in turn, not beside generation
    task = dataclasses.replace(task, beside=False)
    model, parts, workers = learner.model, [], defaultdict(list)
    for event in scores:
        workers[event["worker"]].append(event)
    for own in workers.values():
        if config.rollout_weights != "float32":  # rounded, so it needs its own
            model = make_model(config, task).on(model.flat.device)
        generator = make_generator(config, task, model)
        parts.append(Part(generator, own, task))
    return parts


def compare(group: Group, event: dict) -> None:
    """Mark the samples that failed; raise TrainingStopped when others are not what the log says."""
    for i, reason in event.get("failed", {}).items():
        group.trajectories[int(i)].finish = reason
    if group.digest != event["digest"]:
        raise TrainingStopped(f"{first(event)} of group {group.group_id}: a sample is another one")


def train(learner: Learner, step: dict, done: dict, config: Config) -> None:
    """Train the groups of one step, in the log's order, and compare."""
    what, batch = f"{first(step)} of step {step['version']}", []
    for group_id in step["groups"]:
        if group_id not in done:
            raise TrainingStopped(f"{what}: group {group_id} is not finished")
        batch.append(done.pop(group_id))
    # the learning rate falls towards the last step that was planned then: --resume may move it
    metrics = learner_step(learner, batch, dataclasses.replace(config, steps=step["of"]))
    for name in ("loss", "grad_norm"):
        if repr(metrics[name]) != repr(step[name]):  # as text, NaN is itself
            raise TrainingStopped(f"{what}: {name} is {metrics[name]}, was {step[name]}")


def first(event: dict) -> str:
    where = f"events.jsonl, line {event['line']}"
    return f"{where}: the first event that differs is the {event['kind']}"
