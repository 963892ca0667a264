"""The README says what results/*.json say, and pictures are drawn from a run folder alone."""

import json
import math
from pathlib import Path

import pytest

import bench
from lab import races as compare
from lab import tables
from lab.plots import load_result
from runtime.devices import describe_machine
from runtime.report import draw_run, summarise
from runtime.runlog import append_lines

README = (Path(__file__).parent.parent / "README.md").read_text()


def test_the_readme_has_the_measured_numbers():
    _, _, rest = README.partition("<!-- measured -->\n")
    measured, _, _ = rest.partition("\n<!-- end -->")
    assert measured == tables.readme_tables(), "run: python bench.py readme"


def test_the_first_paragraph_says_how_many_seeds_found_everything():
    solved = [row["after"]["solved"] for row in load_result("tasks")["tasks"]["guess"]]
    fewest = round(16 * min(solved))
    assert f"all 16 numbers for {solved.count(1.0)} of {len(solved)} seeds" in README
    assert min(solved) == 1.0 or f"\n{fewest} of them for the fifth" in README


def test_every_picture_in_the_readme_exists():
    pictures = [line.split("](")[1].rstrip(")") for line in README.splitlines() if "![" in line]
    assert 3 <= len(pictures) <= 7
    for picture in pictures:
        assert (bench.RESULTS.parent / picture).stat().st_size > 10_000


def test_every_file_in_the_reading_order_exists():
    named = [line.split("`")[1] for line in README.splitlines() if line.startswith("| `")]
    rooms = {name for name in named if name.endswith(".py")}
    assert rooms == {p.name for p in bench.RESULTS.parent.glob("*.py")}


def test_measured_runs_kept_their_promises():
    tasks = load_result("tasks")["tasks"]
    for rows in tasks.values():
        for row in rows:
            assert row["staleness"]["max"] <= row["staleness"]["bound"]
            assert row["groups"]["admitted"] == row["groups"]["trained"]
    for row in load_result("staleness")["runs"]:
        assert row["max"] <= row["bound"] == row["max_staleness"]


def test_faults_and_replays_kept_their_promises():
    faults, replays = load_result("faults"), load_result("replay")["runs"]
    assert faults["faults"] >= 300 and faults["failures"] == []
    assert faults["lost"] == faults["duplicated"] == 0
    assert all(run["staleness"]["max"] <= run["staleness"]["bound"] for run in faults["runs"])
    assert faults["checkpoint_kills"]["kills"] >= 50 and faults["checkpoint_kills"]["bitwise_equal"]
    dead, stopped = (faults["noticed_after_s"][kind] for kind in ("dead", "stopped"))
    assert dead["median"] <= 1 and dead["max"] <= 10 and stopped["max"] <= 10
    assert len(replays) == 27 and all(run["same"] for run in replays)


def test_the_recipe_kept_its_promises():
    recipe = load_result("recipe")
    strict, shown = recipe["shown"]["random < warm-up only < full"], recipe["shown"]
    assert strict == "in 9 of 9 (seed, length)"
    assert shown["never the other way round"] and shown["full within 1 point of dense at 8x"]
    assert len(recipe["runs"]) == 3  # two of them at a time
    assert all(sum(run["seconds"].values()) <= 900 for run in recipe["runs"])


def run_folder(folder: Path, events: list[dict], rows: list[dict]) -> Path:
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps({"task": "guess", "mode": "async"}))
    append_lines(folder / "events.jsonl", events)
    append_lines(folder / "metrics.jsonl", rows)
    return folder


def test_pictures_come_from_the_run_folder_alone(tmp_path):
    events, rows = [], [{"t": 0.0, "step": 0, "eval": {"solved": 0.1}}]
    for step in range(12):
        span = {"t": float(step), "seconds": 0.8, "version": step}
        events.append({"process": "learner", "kind": "train", **span})
        events.append({"process": "rollout-0", "kind": "generate", **span})
        events.append({"process": "reward-0", "kind": "score", "t": step + 0.5, "seconds": 0.01})
        rows.append({"t": step + 1.0, "step": step + 1, "reward": step / 12} | AGES)
    rows[-1]["eval"] = {"solved": 0.9}
    draw_run(run_folder(tmp_path / "run", events, rows))
    for name in ("reward.png", "timeline.png"):
        assert (tmp_path / "run" / name).read_bytes().startswith(b"\x89PNG")


AGES = {"staleness_mean": 1.0, "staleness_max": 2, "seconds": 0.8, "samples": 4, "tokens": 9}
AGES["failures"] = {"env_error": 1}


def test_the_summary_counts_all_steps(tmp_path):
    rows = [{"t": 0.0, "step": 0, "eval": {"solved": 0.1, "reward": 0.2, "turns": 5.0}}]
    for step in range(1, 4):
        rows.append({"t": float(step), "step": step, "reward": 0.5, "reference_share": 0.1} | AGES)
    rows[-1] |= {"eval": {"solved": 0.9, "reward": 0.6, "turns": 3.5}, "staleness_max": 3}
    folder = run_folder(tmp_path / "run", [], rows)
    text = summarise(folder, {"staleness_bound": 4, "steps": 3, "wall_s": 3.0})
    summary = json.loads((folder / "summary.json").read_text())
    assert (summary["eval_before"], summary["eval_after"]) == (0.1, 0.9)
    assert (summary["samples"], summary["tokens_trained"]) == (12, 27)
    assert summary["learner_tokens_per_s"] == round(27 / 2.4)
    assert summary["failures"] == {"env_error": 3}
    assert summary["staleness"] == {"max": 3, "mean": 1.0, "bound": 4}
    assert "solved 10% -> 90%" in text and text.count("\n") == 2


def test_unknown_bench(capsys):
    with pytest.raises(SystemExit) as stop:
        bench.main(["speed"])
    assert stop.value.code == 2 and "generator" in capsys.readouterr().err


def test_the_speed_of_a_run_whose_evaluations_came_late(tmp_path):
    events, rows = [], [{"t": 0.0, "step": 0, "eval": {"solved": 0.1}}]
    for step, at in enumerate((3.0, 4.0, 5.0, 7.0), start=1):
        for process in ("rollout-0", "rollout-1"):
            span = {"process": process, "kind": "generate", "t": at - 1.0, "seconds": 0.7}
            events.append(span)
        events.append({"process": "learner", "kind": "train", "t": at, "seconds": 0.5})
        events.append({"process": "learner", "kind": "publish", "t": at + 0.5, "seconds": 0.1})
        rows.append({**AGES, "t": at + 0.6, "step": step, "reward": 0.5})
    for step, score in ((3, 0.95), (4, 0.97)):  # at the end of the file, at the time of the step
        rows.append({"t": rows[step]["t"], "step": step, "eval": {"solved": score}})
    folder = run_folder(tmp_path / "run", events, rows)
    speed = compare.speed_of(folder, {"staleness": {"mean": 1.5}, "command_s": 9.0}, "guess")
    share = (0.9 - 0.1) / (0.95 - 0.1)  # of the way between two evaluations
    assert speed["target_s"] == pytest.approx(share * (5.6 - 2.0))  # since the first episode began
    assert speed["target_samples"] == pytest.approx(share * 12)
    assert (speed["final"], speed["staleness"]) == (0.97, 1.5)
    assert compare.crossing(speed["held"], 0.99) == (None, None)
    assert speed["samples_per_s"] == pytest.approx(3 * 4 / 4.0)
    assert speed["busy_learner"] == pytest.approx(3 * 0.6 / 4.0)
    assert speed["busy_rollout"] == pytest.approx(2 * 2 * 0.7 / (2 * 4.0))


def run(mode: str, seed: int, seconds: float, rate: float) -> dict:
    row = {"task": "guess", "mode": mode, "seed": seed, "cpu": "x", "target_s": seconds}
    row |= {"target_samples": 1000, "final": 0.99, "samples_per_s": rate, "staleness": 1.0}
    return row | {"busy_rollout": 0.9, "busy_learner": 0.8}


def test_claims_quote_the_results(monkeypatch, tmp_path):
    rates = {"sync, one core": 50, "sync, two threads": 80}
    rates |= {"async, η = 4, drain": 90, "async, η = 4": 120, "async, η = 8": 400}
    rates |= dict.fromkeys(sum(compare.JUDGED.values(), []), 120)  # not the quickest
    runs = [
        run(mode, i, 1000 / rate + i, rate) | {"task": task}
        for task in ("guess", "sum")
        for mode, rate in rates.items()
        for i in range(3)
    ]
    real, made_up = load_result, {"async": {"runs": runs}}
    monkeypatch.setattr(tables, "load_result", lambda name: made_up.get(name) or real(name))
    for name in ("async", "scale"):
        (tmp_path / f"{name}.json").touch()
    monkeypatch.setattr(tables, "RESULTS", tmp_path)
    text = "\n".join(tables.claims())
    gain = "`guess` 1.45× at η = 2 (90% interval 1.21 to 1.74; medians of 3 seeds, "
    assert f"{gain}9.3 s against 13.5 s)" in text
    assert "`sum` 1.45× at η = 4 (" in text and "`sum` 1.50×" in text and "1.33×, 1.33×" in text
    predicted = real("scale")["published"][0]
    assert f"{predicted['published']}, here {predicted['speed_up']}x" in text
    assert len({line.count("|") for line in text.splitlines() if line}) == 1  # whole rows
    (tmp_path / "async.json").unlink()
    assert tables.claims() == []  # what was not measured yet is not claimed


def test_the_ratio_of_medians_and_between_which_it_lies():
    assert compare.ratio_of_medians([10.0] * 5, [5.0] * 5) == [2.0, 2.0, 2.0]
    ours, theirs, never = [8.0, 9.0, 10.0, 11.0, 12.0], [4.0, 5.0, 5.0, 5.0, 6.0], [math.inf] * 3
    gain, low, high = compare.ratio_of_medians(ours, theirs)
    assert 1.5 < low < gain == 2.0 < high < 3.0
    gain, low, high = compare.ratio_of_medians(ours, theirs[:2] + never)  # mostly never there
    assert gain == low == 0.0 < 1.5 < high
    assert compare.ratio_of_medians(never, never)[0] == 1.0
    assert compare.ratio_of_medians(never, theirs)[0] == math.inf


def test_the_table_compares_with_the_best_synchronous_mode():
    modes = {
        "sync, one core": 30,
        "sync, two threads": 20,
        **dict.fromkeys(compare.SPLIT.values(), 10),
    }
    runs = [run(m, i, s + i, 100 / s) for m, s in modes.items() for i in range(3)]
    runs[-1]["target_s"] = None  # never got there
    lines = compare.async_table(runs)
    text = "\n".join(lines)
    assert (
        "| sync, two threads (best sync), 3 seeds | 21.0 (20.0 to 22.0) | 1.00 (0.91 to 1.10)"
        in text
    )
    assert "| async, η = 4, 3 seeds | 11.0 (10.0 to inf) | 1.91 (0.00 to 2.20) |" in text
    assert lines[-1].endswith(
        "2.00 = overlap 2.00 × no straggler tail 1.00 × swaps in flight 1.00."
    )


def test_sparse_attention_is_compared_with_the_quickest_dense_one():
    cost = {"dense A": 8.0, "dense B": 6.0, tables.ALONE: 3.0, tables.TOGETHER: 1.5}
    costs = {name: {"ms": {"median": ms}} for name, ms in cost.items()}
    assert tables.kernel_gain(costs, tables.ALONE) == (3.0, 2.0)
    assert tables.kernel_gain(costs, tables.TOGETHER) == (1.5, 4.0)


def test_without_a_gpu_its_benchmark_says_so(monkeypatch, capsys):
    machine = describe_machine() | {"gpus": []}
    monkeypatch.setattr(compare, "describe_machine", lambda: machine)
    with pytest.raises(SystemExit) as stopped:
        bench.main(["async", "gpu"])
    assert stopped.value.code == 2 and "no CUDA device" in capsys.readouterr().err
