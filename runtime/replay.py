"""replay.py: execute a finished asynchronous run again, from its event log, to the same weights.

    python train_async.py --replay runs/NAME

The log says who sampled what, which weights were there when each token was fed, and which groups
were trained in which order. That is all that time and chance have decided; everything else is
computed again. One process does it, version by version: the episodes that a version had a part in
are played as far as it fed them and stop there; then the learner takes its step. Every finished
episode is compared with the log, and so is every step.

Why it is exact: an episode depends on its prompt, its seed and the weights at each position, not on
its neighbours (rollout.py). Why it never gets stuck: a worker begins episodes in the order of issue
and had a slot for each of those that outlive a version.
Left out: verdicts that hung on the clock. Failed episodes teach nothing; the log names them.
"""

import dataclasses
import json
from pathlib import Path

from torch import Tensor
from tqdm import tqdm

from learner import Learner, learner_step
from reward import score
from rollout import Generator
from runtime.checkpoint import sha256_of
from runtime.config import Config, TrainingStopped, UserError
from runtime.devices import pick_devices, set_threads
from runtime.ledger import audit, script
from runtime.messages import Group, apply_verdicts
from runtime.setup import make_generator, make_learner, make_model, make_task, resumed

FOREVER = 2**30  # tokens


def replayable(group: Group) -> dict:
    """What the log keeps of a verified group."""
    failed = {i: t.finish for i, t in enumerate(group.trajectories) if t.failed}
    kept = {"failed": failed} if failed else {}
    return kept | {"digest": group.digest, "swaps": [t.swaps for t in group.trajectories]}


def recorded(config: Config) -> tuple[Config, dict]:
    """Configuration and summary of the run to replay; raises UserError when that cannot be."""
    run, name = Path(config.replay), f"--replay {config.replay}"
    config = resumed(config, "replay")
    if json.loads((run / "config.json").read_text())["mode"] != "async" or config.learners > 1:
        raise UserError(f"{name}: must be a run of train_async.py with one learner")
    try:
        summary, (_, ledger) = json.loads((run / "summary.json").read_text()), audit(run)
    except (OSError, ValueError) as error:
        raise UserError(f"{name}: must be finished and have a whole log ({error})") from error
    if summary["steps"] != ledger.steps:
        raise UserError(f"{name}: must be finished, its log goes on after its summary")
    return config, summary


class Part:
    """What one rollout worker did: its generator, and its samples in the order of issue."""

    def __init__(self, generator: Generator, scores: list[dict], task):
        self.generator = generator
        self.begin: dict[int, list] = {}  # version -> samples that begin with it
        self.pairs: dict[tuple[int, int], list] = {}  # sample -> (tokens fed, version), in order
        for event in sorted(scores, key=lambda event: event["issued"]):
            problem = task.reset(event["group"], "train")
            group = Group(event["group"], event["swaps"][0][1], problem)
            for i, swaps in enumerate(event["swaps"]):
                pairs = list(zip(swaps[::2], swaps[1::2], strict=True))
                self.pairs[event["group"], i] = pairs
                self.begin.setdefault(pairs[0][1], []).append((group, i))

    def play(self, version: int, flat: Tensor | None) -> list[Group]:
        """Play everything as far as this version fed it; returns the groups that are finished.

        flat: the weights, or None when the generator's model is the learner's own."""
        by = self.generator
        by.set_weights(version, flat)
        by.waiting.extend(self.begin.pop(version, []))
        while True:
            for b, episode in enumerate(by.episodes):
                if episode is not None:
                    pairs = self.pairs[episode.group.group_id, episode.sample_index]
                    until = next((fed for fed, newer in pairs if newer > version), FOREVER)
                    by.running[b] = by.fed[b] < until
            if not by.step():
                assert not by.waiting, f"version {version}: no slot for {len(by.waiting)} samples"
                return by.take_finished()


def compare(group: Group, event: dict) -> None:
    """Mark the samples that failed; raise TrainingStopped when others are not what the log says."""
    for i, reason in event.get("failed", {}).items():
        group.trajectories[int(i)].finish = reason
    if group.digest != event["digest"]:
        differs("score", event, f"of group {group.group_id}: a sample is another one")


def differs(kind: str, event: dict, text: str) -> None:
    raise TrainingStopped(
        f"events.jsonl, line {event['line']}: the first event that differs is the {kind} {text}"
    )


def step_again(learner: Learner, event: dict, done: dict[int, Group], config: Config) -> None:
    """Train the groups of one step, in the log's order, and compare."""
    missing = [g for g in event["groups"] if g not in done]
    step = f"of step {event['version']}"
    if missing:
        differs("train", event, f"{step}: group {missing[0]} is not finished")
    batch = [done.pop(g) for g in event["groups"]]
    # the learning rate falls towards the last step that was planned then: --resume may move it
    metrics = learner_step(learner, batch, dataclasses.replace(config, steps=event["of"]))
    for name in ("loss", "grad_norm"):
        if repr(metrics[name]) != repr(event[name]):
            differs("train", event, f"{step}: {name} is {metrics[name]}, was {event[name]}")


def replay(config: Config) -> None:
    """The whole run again; prints what is shown by it."""
    run = Path(config.replay)
    config, summary = recorded(config)
    devices, task = pick_devices(config), make_task(config)
    set_threads(config, sum(map(len, devices)), devices[0][0])
    if devices[0][0] != "cpu":
        print(
            "on a GPU, sums of gradients depend on the order of atomic additions: the episodes "
            "before the first learner step are promised to be the same, and nothing after it"
        )
    learner = make_learner(config, task, devices[0][0])
    steps, scores = script(run)
    trained = [scores[g] for step in steps for g in step["groups"]]
    aside = dataclasses.replace(task, beside=False)  # environments are asked in turn
    parts, rounded = [], config.rollout_weights != "float32"
    for worker in sorted({event["worker"] for event in trained}):
        own = [event for event in trained if event["worker"] == worker]
        model = make_model(config, task).on(devices[0][0]) if rounded else learner.model
        generator = make_generator(config, aside, model)
        parts.append(Part(generator, own, task))
    done: dict[int, Group] = {}
    for event in tqdm(steps, unit="step", dynamic_ncols=True):
        flat = learner.model.flat if rounded else None
        finished = [group for part in parts for group in part.play(learner.version, flat)]
        for group in sorted(finished, key=lambda g: scores[g.group_id]["line"]):
            apply_verdicts(group, score(group, task, config))
            compare(group, scores[group.group_id])
            done[group.group_id] = group
        step_again(learner, event, done, config)
    sha256 = sha256_of(learner.model.flat)
    if sha256 != summary["weights_sha256"]:
        raise TrainingStopped(f"every event is the same, but weights_sha256 is {sha256}")
    episodes = sum(len(event["swaps"]) for event in trained)
    print(
        f"{len(steps)} steps and {episodes:,} episodes again: all the same, weights {sha256[:16]}"
    )
