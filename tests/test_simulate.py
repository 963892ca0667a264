"""The model of the pipeline: it schedules as the trainer does, and it finds its own costs again."""

import dataclasses
import json

import numpy as np
import pytest

from lab import plots, simulate
from lab.calibrate import calibrate, fit, read_run
from lab.pipeline import Costs, Log, Pipeline, Setup, measure, predict
from lab.plots import load_result
from lab.simulate import Question, advise, score
from runtime import report
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
    evaluation=0.1,
    beside=1.3,
    groups=GROUPS,
)
TOY = Setup("toy", steps=24, slots=32, group_size=8, groups_per_step=8, eta=2, eval_every=10)
TOY.token_budget = 700  # about three micro-batches a step


def run(seed: int = 0, **changes) -> Log:
    return Pipeline(dataclasses.replace(TOY, **changes), KNOWN, seed).run()


def write(log: Log, folder) -> str:
    """A simulated log as a run folder."""
    folder.mkdir()
    setup = log.setup
    config = dataclasses.asdict(setup) | {"max_staleness": setup.eta}
    config |= {"mode": "sync" if setup.synchronous else "async"}
    (folder / "config.json").write_text(json.dumps(config))
    events = sorted((e for kind in log.events.values() for e in kind), key=lambda e: e["t"])
    rows = [row | {"seconds": 1.0} for row in log.rows]
    for name, records in (("events", events), ("metrics", rows)):
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(r) + "\n" for r in records))
    return str(folder)


# ------------------------------------------------------------------------------------ the pipeline


@pytest.mark.parametrize("swap", ["keep", "recompute", "drain"])
@pytest.mark.parametrize("eta", [0, 1, 4])
def test_every_group_is_trained_and_none_too_late(swap, eta):
    log = run(swap=swap, eta=eta)
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


def test_a_single_group_takes_what_the_costs_say():
    costs = Costs(step=1.0, step_slot=0.1, step_running=0.01, step_context=0.001, refill=5.0)
    costs.groups = [[0, 10, 14, 12]]
    setup = Setup("one", steps=4, slots=4, group_size=2, groups_per_step=1, eta=0)
    log = Pipeline(setup, costs).run()
    # two steps with both, contexts 10 and 11, then two with one, contexts 12 and 13; four slots
    seconds = 5.0 + 4 * (1.0 + 4 * 0.1) + 6 * 0.01 + 4 * 0.001 * (10 + 11 + 12 + 13)
    assert log.events["generate"][0]["seconds"] == pytest.approx(seconds)
    assert log.events["generate"][0]["slot_steps"] == 6


def test_generation_is_slower_while_a_step_is_computed():
    costs = Costs(step=1.0, train=4.0, beside=2.0, groups=[[0, 2, 8]])
    setup = Setup("one", steps=6, slots=1, group_size=1, groups_per_step=1, eta=1)
    first = Pipeline(setup, costs).run().events["generate"][0]
    # One episode in 6 s; then a step of 4 s begins, which the worker notices at its next token
    # boundary: one more token in 1 s, two in 2 s each, and new weights.
    assert (first["steps"], first["seconds"], first["decode"]) == (9, 11.0, 11.0)


def test_verdicts_take_the_time_of_whoever_generates_when_nobody_else_gives_them():
    costs = Costs(step=1.0, score=3.0, handle=0.5, train=2.0, groups=[[0, 2, 6, 6]])
    setup = Setup("one", steps=6, slots=2, group_size=2, groups_per_step=1, eta=0)
    apart, here = (
        Pipeline(dataclasses.replace(setup, reward_workers=n), costs).run() for n in (1, 0)
    )
    for log, judge in ((apart, "reward-0"), (here, "rollout-0")):
        assert [e["t"] for e in log.events["train"][:2]] == [7.5, 17.0]  # 4 + 3 + 0.5, and 2 + 7.5
        assert [e["process"] for e in log.events["score"]] == [judge] * 6
    busy = dataclasses.replace(setup, eta=4, steps=40)
    apart, here = (predict(dataclasses.replace(busy, reward_workers=n), costs) for n in (1, 0))
    assert here["tokens_per_s"] == pytest.approx(12 / 7, rel=0.05)  # 4 and 3 s a step
    assert apart["tokens_per_s"] == pytest.approx(12 / 4, rel=0.05)  # generation takes 4 s


def test_weights_arrive_in_the_middle_of_episodes_unless_they_are_drained():
    assert max(e["size"] for e in run(swap="keep").events["swap"]) > 0
    assert max(e["size"] for e in run(swap="drain").events["swap"]) == 0


def test_synchronous_devices_generate_or_train():
    log = run(synchronous=True, eta=0, rollout_workers=4, learners=4)
    steps = [(e["t"], e["t"] + e["seconds"]) for e in log.events["train"]]
    for e in log.events["generate"]:
        assert all(e["t"] + e["seconds"] <= a + 1e-9 or e["t"] >= b - 1e-9 for a, b in steps)
    assert 0 < measure(log)["idle"] < 1


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
    found = [predict(dataclasses.replace(TOY, eta=eta, steps=30), KNOWN) for eta in (0, 1, 4)]
    assert [f["staleness"] for f in found] == sorted(f["staleness"] for f in found)
    assert found[0]["staleness"] == 0
    assert found[1]["tokens_per_s"] > 1.2 * found[0]["tokens_per_s"]


def test_dropping_discards_and_goes_on():
    log = run(on_stale="drop", eta=1, steps=12)
    assert len(log.rows) == 12


# ------------------------------------------------------------------------------------- calibration


def test_fit_finds_costs_and_leaves_out_what_comes_out_negative():
    matrix = RANDOM.uniform(0, 100, (50, 3)) * [1, 10, 0.1]
    assert fit(matrix, matrix @ [3.0, 0.2, 50.0]) == pytest.approx([3.0, 0.2, 50.0])
    assert fit(matrix, matrix @ [3.0, -0.01, 50.0])[1] == 0.0
    twins = np.stack([matrix[:, 0], matrix[:, 0], 0 * matrix[:, 0]], 1)
    assert fit(twins, 4.0 * matrix[:, 0]) == pytest.approx([2.0, 2.0, 0.0])


@pytest.mark.parametrize("judges", [1, 0])
def test_calibrated_on_its_own_logs_it_predicts_others(tmp_path, judges):
    basis = ({"slots": 16}, {"slots": 64, "groups_per_step": 16, "eta": 4})
    logs = [run(7, **changes, steps=40, reward_workers=judges) for changes in basis]
    folders = [write(log, tmp_path / f"basis{i}") for i, log in enumerate(logs)]
    costs = calibrate([read_run(folder) for folder in folders])
    assert costs.evaluation == pytest.approx(0.1, rel=0.01)
    names = ("step", "step_running", "refill", "handle", "listen", "train", "beside", "score")
    for name in (*names, "micro_batch", "train_token"):
        assert getattr(costs, name) == pytest.approx(getattr(KNOWN, name), rel=0.03), name
    others = [{"eta": 1}, {"swap": "drain", "eta": 3}, {"eta": 0}, {"groups_per_step": 12}]
    others += [{"swap": "recompute", "slots": 24}]
    others += [{"synchronous": True, "eta": 0}]
    others = [run(3, steps=60, reward_workers=judges, **changes) for changes in others]
    others = [read_run(write(log, tmp_path / f"o{i}")) for i, log in enumerate(others)]
    rows = score(others, {"toy": costs})
    assert all(row["within"] for row in rows), rows
    with pytest.raises(simulate.UserError, match="not calibrated on"):
        score([read_run(folders[0])], {"toy": costs})


def test_costs_survive_the_file(tmp_path, monkeypatch):
    monkeypatch.setattr(plots, "RESULTS", tmp_path)
    simulate.save_costs({"toy": KNOWN})
    assert simulate.load_costs() == {"toy": KNOWN}


# ----------------------------------------------------------------------------------- the commands


@pytest.mark.parametrize(
    "arguments, message",
    [
        (["calibrate"], "must be calibrate RUN"),
        (["score", "/nowhere"], "must be a run folder"),
        (["advise"], "must be measured first"),
        (["guess"], "must be calibrate RUN"),
    ],
)
def test_mistakes_cost_one_line(arguments, message, tmp_path, monkeypatch):
    monkeypatch.setattr(plots, "RESULTS", tmp_path)
    monkeypatch.setattr(simulate, "load_result", load_result)
    with pytest.raises(simulate.UserError, match=message):
        if arguments[0] == "score":
            simulate.save_costs({"toy": KNOWN})
        simulate.main(arguments)


def test_a_run_of_an_older_version_costs_one_line(tmp_path):
    folder = write(run(steps=20), tmp_path / "old")
    metrics = tmp_path / "old" / "metrics.jsonl"
    rows = [json.loads(line) for line in metrics.read_text().splitlines()]
    for row in rows:
        row.pop("micro_batches")
    metrics.write_text("".join(json.dumps(row) + "\n" for row in rows))
    with pytest.raises(simulate.UserError, match="must be a run of this version"):
        simulate.main(["calibrate", folder])


def test_the_whole_way_by_commands(tmp_path, monkeypatch, capsys):
    for room in (report, simulate):
        monkeypatch.setattr(room, "RESULTS", tmp_path)
    one, two = (write(run(i, eta=i, steps=20), tmp_path / f"run{i}") for i in (1, 2))
    simulate.main(["calibrate", one])
    assert "train_token" in capsys.readouterr().out
    simulate.main(["score", two])
    assert json.loads((tmp_path / "simulate.json").read_text())["runs"][0]["runs"] == 1
    assert (tmp_path / "simulate.png").stat().st_size > 10_000
    simulate.main(["advise", "--devices=3", "--task=toy", "--groups-per-step=4", "--group-size=8"])
    assert "--max-staleness" in capsys.readouterr().out


def test_advice_divides_all_devices():
    question = Question(task="toy", devices=4, group_size=8, groups_per_step=4, slots=16)
    text = advise(question, {"toy": KNOWN})
    words = text.split()
    workers, learners = (
        int(words[words.index(f"--{n}") + 1]) for n in ("rollout-workers", "learners")
    )
    assert workers + learners == 4


def test_costs_of_a_language_model_grow_with_it():
    small, large = (simulate.language_model(b) for b in (1.5, 7.0))
    for name in ("step", "step_running", "train_token", "all_reduce"):
        assert getattr(large, name) > getattr(small, name)
    lengths = [n - 512 for _, _, *lengths in large.groups for n in lengths]
    assert 5000 < np.mean(lengths) < 7000 and max(lengths) <= 27648
