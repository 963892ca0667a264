"""The model of the pipeline: it schedules as the trainer does, and it finds its own costs again."""

import dataclasses
import json
from pathlib import Path

import numpy as np
import pytest

from lab import simulate
from lab.pipeline import Costs, Pipeline, PipelineLog, pipeline_metrics, predict
from lab.plots import load_result
from lab.tables import tables_of
from runtime.config import Config
from runtime.folder import Log
from runtime.ledger import Ledger

RANDOM = np.random.default_rng(0)
GROUPS = [
    [version, int(prompt), *(int(prompt) + RANDOM.geometric(0.12, 8)).tolist()]
    for version in range(20)
    for prompt in RANDOM.integers(5, 12, 8)
]
KNOWN = Costs(
    step=2e-3,
    step_slot=1e-5,
    step_running=2e-5,
    refill=2e-3,
    delivery=1e-3,
    score=5e-4,
    handle=1e-3,
    train=8e-3,
    micro_batch=4e-3,
    train_token=5e-5,
    publish=1e-3,
    after=5e-3,
    listen=5e-4,
    alone=1.2,
    groups=GROUPS,
)
# about three micro-batches a step
TOY = Config(task="toy", steps=24, slots=32, group_size=8, groups_per_step=8, token_budget=700)
TOY = dataclasses.replace(TOY, rollout_workers=1, reference_every=0)
# train_sync.py: who trains verifies
SYNCHRONOUS = {"synchronous": True, "max_staleness": 0, "reward_workers": 0}


def run(seed: int = 0, synchronous: bool = False, **changes) -> PipelineLog:
    return Pipeline(dataclasses.replace(TOY, **changes), KNOWN, seed, synchronous).run()


def write(log: PipelineLog, folder) -> Path:
    """A simulated log as a run folder."""
    folder.mkdir()
    flags = dataclasses.asdict(log.config) | {"mode": "sync" if log.synchronous else "async"}
    flags["reward_workers"] = 1  # train_sync.py records the flag, too, but starts none
    (folder / "config.json").write_text(json.dumps(flags))
    events = sorted((e for kind in log.events.values() for e in kind), key=lambda e: e["t"])
    rows = [row | {"seconds": 1.0} for row in log.rows]
    Log(folder / "events.jsonl").append(events)
    Log(folder / "metrics.jsonl").append(rows)
    return folder


# ------------------------------------------------------------------------------------ the pipeline


@pytest.mark.parametrize("swap", ["keep", "recompute", "drain"])
@pytest.mark.parametrize("eta", [0, 1, 4])
def test_every_group_is_trained_and_none_too_late(swap, eta):
    log = run(swap=swap, max_staleness=eta)
    assert [e["version"] for e in log.events["train"]] == list(range(TOY.steps))
    trained = [g for e in log.events["train"] for g in e["groups"]]
    assert sorted(trained) == list(range(TOY.steps * TOY.groups_per_step))  # Buffer checks eta
    assert len(log.events["start"]) == len(log.events["finish"]) == len(trained)
    assert max(row["staleness_mean"] for row in log.rows) <= eta


def test_one_seed_one_log():
    one, two, other = (run(seed, rollout_workers=2) for seed in (1, 1, 2))
    assert one.events == two.events and one.rows == two.rows
    assert one.events != other.events


def test_its_log_passes_the_ledger():
    log = run()
    admits = [{"t": -1.0, "kind": "admit", "group": e["group"]} for e in log.events["start"]]
    order = {kind: i for i, kind in enumerate(("admit", "start", "finish", "score", "train"))}
    events = [e for kind in order for e in log.events[kind]] + admits
    books = Ledger()
    for event in sorted(events, key=lambda e: (e["t"], order[e["kind"]])):
        books.note(event)
    assert books.counts["train"] == len(admits) and not books.flying


def test_a_worker_never_generates_two_things_at_once():
    log = run(rollout_workers=2)
    for process in ("rollout-0", "rollout-1"):
        spans = sorted(
            (e["t"], e["seconds"]) for e in log.events["generate"] if e["process"] == process
        )
        assert all(
            t + s <= later + 1e-9 for (t, s), (later, _) in zip(spans, spans[1:], strict=False)
        )
    lengths = {e["group"]: e["lengths"] for e in log.events["score"]}
    prompts = {e["group"]: e["size"] for e in log.events["start"]}
    tokens = sum(sum(n) - len(n) * prompts[g] for g, n in lengths.items())
    assert sum(e["slot_steps"] for e in log.events["generate"]) == tokens


# one prompt a step, one worker, no reference
ONE = dataclasses.replace(TOY, task="one", groups_per_step=1, max_staleness=0)


def test_a_single_group_takes_what_the_costs_say():
    costs = Costs(step=1.0, step_slot=0.1, step_running=0.01, step_context=0.001, refill=5.0)
    costs.groups = [[0, 10, 14, 12]]
    log = Pipeline(dataclasses.replace(ONE, steps=4, slots=4, group_size=2), costs).run()
    # two steps with both, contexts 10 and 11, then two with one, contexts 12 and 13; four slots
    both, one = log.events["generate"][:2]
    seconds = 5.0 + 4 * (1.0 + 4 * 0.1) + 6 * 0.01 + 4 * 0.001 * (10 + 11 + 12 + 13)
    assert both["seconds"] + one["seconds"] == pytest.approx(seconds)
    assert both["decode"] + one["decode"] == pytest.approx(seconds - 5.0)
    assert (both["slot_steps"], one["slot_steps"]) == (4, 2)


def test_verdicts_take_the_time_of_the_reward_workers():
    costs = Costs(step=1.0, score=3.0, handle=0.5, train=2.0, groups=[[0, 2, 6, 6]])
    config = dataclasses.replace(ONE, steps=40, slots=2, group_size=2)
    first = Pipeline(config, costs).run().events
    assert [e["t"] for e in first["train"][:2]] == [7.5, 17.0]  # 4 + 3 + 0.5, and 2 + 7.5
    costs.score = 8.0  # longer than generation, which takes 4 s
    config = dataclasses.replace(config, max_staleness=4)
    for workers, seconds in ((1, 8), (2, 4)):
        found = predict(dataclasses.replace(config, reward_workers=workers), costs)
        assert found["tokens_per_s"] == pytest.approx(12 / seconds, rel=0.05)


@pytest.mark.parametrize("workers, begin", [(0, 28), (1, 28), (2, 16), (4, 10), (8, 7)])
def test_a_synchronous_run_verifies_with_as_many_workers_as_it_has(workers, begin):
    costs = Costs(step=1.0, score=3.0, train=2.0, groups=[[0, 2, 6, 6]])
    config = dataclasses.replace(ONE, steps=2, slots=16, group_size=2, groups_per_step=8)
    config = dataclasses.replace(config, reward_workers=workers)  # 0: who trains verifies
    events = Pipeline(config, costs, synchronous=True).run().events
    assert events["train"][0]["t"] == begin  # 8 groups take 4 s, and then 3 s for each verdict


def test_weights_arrive_in_the_middle_of_episodes_unless_they_are_drained():
    assert max(e["size"] for e in run(swap="keep").events["swap"]) > 0
    assert max(e["size"] for e in run(swap="drain").events["swap"]) == 0


def test_synchronous_devices_generate_or_train():
    log = run(**SYNCHRONOUS, rollout_workers=4, learners=4)
    steps = [(e["t"], e["t"] + e["seconds"]) for e in log.events["train"]]
    for e in log.events["generate"]:
        assert all(e["t"] + e["seconds"] <= a + 1e-9 or e["t"] >= b - 1e-9 for a, b in steps)
    assert 0 < pipeline_metrics(log)["idle"] < 1


def test_a_step_is_longer_for_every_group_that_arrives_in_its_course():
    log = run()
    verdicts = [e["t"] + e["seconds"] for e in log.events["score"]]
    work = 0
    for event, row in zip(log.events["train"], log.rows, strict=True):
        stop = event["t"] + event["seconds"]
        late = sum(event["t"] < t < stop for t in verdicts)
        seconds = 8e-3 + 4e-3 * row["micro_batches"] + 5e-5 * row["sequence_tokens"]
        seconds += 5e-4 * late
        assert event["seconds"] == pytest.approx(seconds, abs=2 * 5e-4)  # one more on the way
        work += late
    assert work > TOY.steps


def test_staleness_and_speed_grow_with_eta():
    found = [
        predict(dataclasses.replace(TOY, max_staleness=eta, steps=30), KNOWN) for eta in (0, 1, 4)
    ]
    assert [f["staleness"] for f in found] == sorted(f["staleness"] for f in found)
    assert found[0]["staleness"] == 0
    assert found[1]["tokens_per_s"] > 1.2 * found[0]["tokens_per_s"]


def test_dropping_discards_and_goes_on():
    log = run(on_stale="drop", max_staleness=1, steps=12)
    assert len(log.rows) == 12


def test_scale_compares_devices(tmp_path, monkeypatch, capsys):
    groups = [[version, prompt, *n, *n] for version, prompt, *n in KNOWN.groups]  # of 16
    costs = dataclasses.replace(KNOWN, groups=groups, parent_group=1e-4)
    monkeypatch.setattr(simulate, "PUBLISHED", [("a run", "a paper", 8, 1.5, "about 2x")])
    monkeypatch.setattr(simulate, "language_model", lambda billions, answer=0: costs)
    monkeypatch.setattr(simulate, "LIMITS", [(1.5, 6000)])
    monkeypatch.setattr(simulate, "PROMPTS", 16)
    simulate.bench_scale(tmp_path)
    result = load_result("scale", tmp_path)
    (row,) = result["published"]
    assert row["published"] == "about 2x" and 0.5 < row["speed_up"] < 4
    (limit,) = result["parent"]  # more devices than the 128 that leave the parent idle at times
    assert 0 < limit["parent_busy"] < 1 and limit["limit"] > limit["devices"]
    assert "| a run  | about 2x  |" in "\n".join(tables_of(tmp_path))
    assert "assumed:" in capsys.readouterr().out


def test_the_best_split_is_the_best_of_all():
    config, tried = dataclasses.replace(TOY, steps=12), []
    for learners in range(1, 8):
        roles = {"rollout_workers": 8 - learners, "learners": learners}
        tried.append(predict(dataclasses.replace(config, **roles), KNOWN)["tokens_per_s"])
    best = simulate.best_split(config, KNOWN, 8)
    assert best["learners"] + best["rollout_workers"] == 8
    assert best["tokens_per_s"] == max(tried)


def test_costs_of_a_language_model_grow_with_it():
    small, large = (simulate.language_model(b) for b in (1.5, 7.0))
    for name in ("step", "step_running", "train_token", "all_reduce"):
        assert getattr(large, name) > getattr(small, name)
    lengths = [n - 512 for _, _, *lengths in large.groups for n in lengths]
    assert 5000 < np.mean(lengths) < 7000 and max(lengths) <= 27648
