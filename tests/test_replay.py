"""A run is executed again from its log, bitwise, whatever its workers did and whenever they did it;
and a log that was changed by one number is caught at that number.

Here "workers" are generators in this process, driven by a random schedule: who decodes when, who
adopts which version at which token, who dies. tests/test_train_async.py replays runs of real ones.
"""

import copy
import dataclasses
import json
import random
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

import train_async
import train_sync
from learner import learner_step
from reward import task_of, verify_group
from rollout import make_generator
from runtime.books import log_discards, settle
from runtime.checkpoint import sha256_of
from runtime.config import Config, TrainingStopped, UserError
from runtime.folder import Log, read_lines
from runtime.messages import Answer, Group, Judgement, Lost
from runtime.models import make_model
from runtime.run import evaluate_now, open_run

FLAGS = {"groups_per_step": 3, "group_size": 3, "slots": 8, "steps": 8, "max_staleness": 4}
FLAGS |= {"eval_every": 1000, "reference_every": 2, "reward_seconds": 10.0, "silence": 20.0}


class Workers:
    """What train_async's functions need of a Pool: generators behind it, and no processes."""

    def __init__(self, config, task, count: int):
        self.config, self.task = config, task
        self.workers, self.generators = {}, {}
        for number in range(count):
            self.spawn(number)

    def spawn(self, number: int):
        """A new worker under this number."""
        name, process = f"rollout-{number}", SimpleNamespace(pid=0)
        worker = SimpleNamespace(name=name, role="rollout", number=number, process=process, work={})
        worker.log, worker.last_word = "nowhere", "alive"
        model = make_model(self.config, self.task)
        self.generators[name] = make_generator(self.config, self.task, model)
        self.generators[name].version = -1
        self.workers[name] = worker

    def of(self, role: str) -> list:
        return list(self.workers.values())

    def issue(self, groups: list[Group]) -> list[str]:
        names = []
        for group in groups:
            worker = min(self.of("rollout"), key=lambda worker: len(worker.work))
            worker.work[group.group_id] = group
            self.generators[worker.name].submit(copy.deepcopy(group))
            names.append(worker.name)
        return names

    @property
    def out(self) -> dict[int, str]:
        return {group: worker.name for worker in self.of("rollout") for group in worker.work}


def wander(folder: Path, seed: int, workers: int, out_of_time: float = 0.0, **flags) -> dict:
    """Train on a random schedule; returns the summary. The log is written by train_async's code.

    `out_of_time` is the share of verdicts that came too late.
    """
    config = dataclasses.replace(Config(), out=str(folder), seed=seed, **FLAGS | flags)
    choose = random.Random(seed)
    run = open_run(config, "async")
    run.log.metrics({"t": 0.0, "step": 0, "eval": evaluate_now(run)})
    run.pool = pool = Workers(config, run.task, workers)
    config, learner, buffer, lives = run.config, run.learner, run.buffer, 2

    def decode(generator) -> None:
        """A few token boundaries; perhaps newer weights before one of them."""
        for _ in range(choose.choice((0, 0, 1, 2, 5))):
            newer = learner.version > generator.newest
            if newer and (generator.version < 0 or choose.random() < 0.3):
                generator.set_weights(learner.version, learner.model.flat.clone())
            generator.step()

    def judgement_of(group: Group) -> Judgement:
        verdicts = [
            (0.0, (), "verifier_timeout") if choose.random() < out_of_time else verdict
            for verdict in verify_group(group, run.task, config)
        ]
        return Judgement(verdicts, time.time(), 0.0)

    def step(batch: list[Group]) -> None:
        facts = {"version": learner.version, "groups": [group.group_id for group in batch]}
        with run.log.timed("learner", "train", **facts) as event:
            metrics = learner_step(learner, batch, config)
            event |= {"of": config.steps, "learners": 1}
            event |= {name: metrics[name] for name in ("loss", "grad_norm")}
        settle(run)

    while learner.version < config.steps:
        train_async.admit(run)
        for worker in pool.of("rollout"):
            generator = pool.generators[worker.name]
            decode(generator)
            train_async.handle(run, worker, Answer(0, events=generator.events))
            generator.events = []
            for group in generator.take_finished():
                verified = Answer(group.group_id, group, judgement_of(group))
                del worker.work[group.group_id]
                train_async.handle(run, worker, verified)
            if lives and generator.busy and learner.version > 1 and choose.random() < 0.1:
                lives -= 1
                pool.spawn(worker.number)
                lost = Lost("died", list(worker.work.values()))
                train_async.handle(run, worker, lost)
                break
        batch = buffer.next_batch(learner.version)
        log_discards(run)
        if batch:
            step(batch)
    run.log.close()
    run.exam.close()
    summary = {"steps": config.steps, "weights_sha256": sha256_of(learner.model.flat)}
    summary["ledger"] = run.ledger.totals()
    (run.folder / "summary.json").write_text(json.dumps(summary))
    return summary


def replay(folder: Path, **flags) -> None:
    train_async.train(dataclasses.replace(Config(), replay=str(folder), **flags))


def scores_of(folder: Path) -> list[dict]:
    return [e for e in read_lines(folder / "events.jsonl") if e["kind"] == "score"]


def rewrite(folder: Path, line: int, change) -> None:
    """Change one event of a log, counted from 1, as somebody does who knows the checksums."""
    path = folder / "events.jsonl"
    events = read_lines(path)
    change(events[line - 1])
    Log(path).append(events)


def differs(folder: Path, message: str) -> None:
    with pytest.raises(TrainingStopped, match=message):
        replay(folder)


@pytest.mark.parametrize("workers", [1, 3])
@pytest.mark.parametrize("swap", ["keep", "recompute", "drain"])
def test_a_run_ends_at_the_same_weights_again(tmp_path, capsys, swap, workers):
    summary = wander(tmp_path / "run", 10 * workers, workers, swap=swap, steps=12)
    capsys.readouterr()
    replay(tmp_path / "run")
    said = (
        f"12 steps and 108 episodes again: all the same, weights {summary['weights_sha256'][:16]}"
    )
    assert said in capsys.readouterr().out
    swaps = [pairs for event in scores_of(tmp_path / "run") for pairs in event["swaps"]]
    crossed = [pairs for pairs in swaps if len(pairs) > 2]  # episodes that saw several versions
    assert len(crossed) > 20 if swap != "drain" else not crossed
    assert swap == "drain" or max(map(len, swaps)) > 4
    assert summary["ledger"]["requeued"] > 0  # a worker died, and its groups were issued again


@pytest.mark.parametrize(
    "swap, flags",
    [
        ("keep", {"task": "sum:16", "on_stale": "drop", "max_staleness": 1}),
        ("recompute", {"attention": "dsa", "chunk_size": 4, "top_k": 2, "positions": "rope"}),
        ("recompute", {"rollout_weights": "float8_e4m3fn", "steps": 6}),
        ("keep", {"attention": "dsa", "chunk_size": 1, "scoring": "indexer", "steps": 6}),
    ],
)
def test_other_tasks_and_models_end_at_the_same_weights_again(tmp_path, swap, flags):
    summary = wander(tmp_path / "run", 5, 2, swap=swap, **flags)
    assert ("on_stale" in flags) == bool(summary["ledger"]["discarded"])
    replay(tmp_path / "run")


@pytest.mark.parametrize("swap", ["keep", "recompute"])
def test_what_the_clock_decided_is_taken_from_the_log(tmp_path, swap):
    """Verdicts out of time."""
    wander(tmp_path / "run", 7, 2, swap=swap, out_of_time=0.2, max_failures=1.0)
    scores = scores_of(tmp_path / "run")
    assert 5 < sum(len(event.get("failed", {})) for event in scores) < 60
    replay(tmp_path / "run")
    event = next(event for event in scores if event["failed"])
    line = 1 + read_lines(tmp_path / "run" / "events.jsonl").index(event)
    rewrite(tmp_path / "run", line, lambda event: event.pop("failed"))
    differs(tmp_path / "run", f"line {line}: .* the score of group {event['group']}: a sample")


def test_the_first_event_that_differs_is_named(tmp_path):
    """Mutations of a log: each is found, at its own line."""
    wander(tmp_path / "run", 3, 2)
    path = tmp_path / "run" / "events.jsonl"
    log, whole = read_lines(path), path.read_text()
    trained = {g for event in log if event["kind"] == "train" for g in event["groups"]}

    def mutate(line, change, message):
        path.write_text(whole)
        rewrite(tmp_path / "run", line, change)
        differs(tmp_path / "run", message)

    scores = [i for i, e in enumerate(log, 1) if e["kind"] == "score" and e["group"] in trained]
    for line in scores[:: len(scores) // 4]:
        group = log[line - 1]["group"]

        def digest(event):
            event["digest"] += 1

        text = f"line {line}: the first event that differs is the score of group {group}: a sample"
        mutate(line, digest, text)
    steps = [i for i, event in enumerate(log, 1) if event["kind"] == "train"]
    for name, line in (("loss", steps[0]), ("grad_norm", steps[-1])):
        text = f"line {line}: .* is the train of step {steps.index(line)}: {name} is"
        mutate(line, lambda event, name=name: event.update({name: 0.125}), text)
    # one token earlier, or one version later
    line, i = next(
        (line, i)
        for line in scores
        for i, pairs in enumerate(log[line - 1]["swaps"])
        if len(pairs) > 2 and pairs[2] > pairs[0] + 2
    )
    text = f"line {line}: .* the score of group {log[line - 1]['group']}: a sample is another one"

    def earlier(event):
        event["swaps"][i][2] -= 1

    def later(event):
        event["swaps"][i][1] += 1

    mutate(line, earlier, text)
    mutate(line, later, "the first event that differs")
    path.write_text(whole)
    replay(tmp_path / "run")


def test_a_replay_knows_which_weights_filled_the_cache(tmp_path):
    """The same log, replayed with rebuilt caches: other log-probs, and it shows."""
    wander(tmp_path / "run", 3, 1, swap="keep")
    path = tmp_path / "run" / "config.json"
    path.write_text(path.read_text().replace('"swap": "keep"', '"swap": "recompute"'))
    differs(tmp_path / "run", "the first event that differs is the score")


def test_other_weights_at_the_end_are_no_success(tmp_path):
    wander(tmp_path / "run", 4, 1, steps=2)
    path = tmp_path / "run" / "summary.json"
    path.write_text(path.read_text().replace('"weights_sha256": "', '"weights_sha256": "0'))
    differs(tmp_path / "run", "every event is the same, but weights_sha256 is")


def test_what_cannot_be_replayed_is_said_in_one_line(tmp_path, monkeypatch):
    wander(tmp_path / "run", 4, 1, steps=2)

    def refused(message, folder=tmp_path / "run", **flags):
        with pytest.raises(UserError, match=message):
            replay(folder, **flags)

    refused("--replay .*nowhere: must be a run folder", tmp_path / "nowhere")
    refused("--steps 5: must be left out with --replay .the run has 2.", steps=5)
    refused("--swap drain: must be left out with --replay", swap="drain")
    with pytest.raises(UserError, match="--replay here: must be left out in train_sync"):
        train_sync.train(dataclasses.replace(Config(), replay="here"))
    events, config, summary = (
        tmp_path / "run" / name for name in ("events.jsonl", "config.json", "summary.json")
    )
    with monkeypatch.context() as patch:
        outside = dataclasses.replace(task_of(Config()), outside=True)
        patch.setattr("runtime.replay.task_of", lambda config: outside)
        refused(
            "must be a run with one number of learners, and a task that answers and judges here"
        )
    text = config.read_text()
    config.write_text(text.replace('"mode": "async"', '"mode": "sync"'))
    refused("must be a run of train_async.py")
    config.write_text(text)
    lines = events.read_text().splitlines(keepends=True)
    events.write_text("".join(lines[: len(lines) // 2]))
    refused("must be finished and have a whole log")
    events.write_text("".join(lines))
    summary.unlink()
    refused("must be finished and have a whole log")
