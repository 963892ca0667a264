"""One door to every measurement: what it says, where it writes, and what the tables make of it."""

import importlib
import inspect
import json
import math
import re
from pathlib import Path

import pytest
from conftest import children

import bench
from lab import gpu, plots, races, speed, tables
from lab.plots import RESULTS, load_result, save_result
from model import GPT, PRESETS, ModelConfig
from runtime.config import Config, UserError
from runtime.folder import Log
from runtime.pictures import draw_run, draw_timeline

ROOT = RESULTS.parent
PICTURES = ("reward.png", "timeline.png")
ROW = {"staleness_mean": 1.0, "staleness_max": 2, "seconds": 0.8, "samples": 4, "tokens": 9}


# -------------------------------------------------------------------------------- recorded results


def test_the_page_of_tables_says_what_the_results_say():
    assert tables.PAGE.read_text() == tables.measured_page(), "run: python bench.py tables"


def test_every_picture_in_the_texts_exists():
    for page in (ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))):
        for picture in re.findall(r"!\[[^]]*\]\(([^)]*)\)", page.read_text()):
            assert (page.parent / picture).stat().st_size > 10_000, f"{page.name}: {picture}"


def test_measured_runs_kept_their_promises():
    bounded = load_result("staleness")["runs"]
    for row in load_result("tasks")["runs"] + bounded:
        assert row["staleness"]["max"] <= row["staleness"]["bound"]
        assert row["ledger"]["admitted"] == row["ledger"]["trained"]
    assert all(row["staleness"]["bound"] == row["max_staleness"] for row in bounded)


def test_no_run_folder_was_lost_or_did_harm():
    found = load_result("disk")
    assert all(found[kind]["wrong"] == [] for kind in ("damaged", "killed", "hostile"))
    assert sum(found["damaged"]["ends"].values()) >= 300
    killed = found["killed"]["ends"]
    assert sum(n for end, n in killed.items() if end.endswith("exit -9")) >= 100


def test_faults_and_replays_kept_their_promises():
    faults, replays = load_result("faults"), load_result("replay")["runs"]
    assert faults["faults"] >= 300 and faults["failures"] == []
    assert faults["lost"] == faults["duplicated"] == 0
    assert all(run["staleness"]["max"] <= run["staleness"]["bound"] for run in faults["runs"])
    assert faults["checkpoint_kills"]["kills"] >= 50 and faults["checkpoint_kills"]["bitwise_equal"]
    dead, stopped = (faults["noticed_after_s"][kind] for kind in ("dead", "stopped"))
    assert dead["median"] <= 1 and stopped["median"] <= 10
    assert len(replays) == 27 and all(run["same"] for run in replays)


# ----------------------------------------------------------------------------------------- the door


def refused(arguments: list[str], capsys) -> str:
    """The one line that a mistake costs."""
    with pytest.raises(SystemExit) as stopped:
        bench.main(arguments)
    line = capsys.readouterr().err
    assert stopped.value.code == 2 and line.count("\n") == 1
    return line


def test_the_help_lists_every_measurement_with_its_minutes_and_files(capsys):
    bench.main(["--help"])
    lines = capsys.readouterr().out.splitlines()
    for name, (_, minutes, files, _) in bench.MEASUREMENTS.items():
        assert [
            line for line in lines if line.split()[:2] == [name, str(minutes)] and files in line
        ]


def test_every_measurement_is_a_function_that_gets_its_folder():
    for name, (module, *_) in bench.MEASUREMENTS.items():
        room, called = importlib.import_module(f"lab.{module}"), name.replace("-", "_")
        function = getattr(room, f"bench_{called}")
        first, *others = inspect.signature(function).parameters.values()
        assert first.name == "folder", name
        needed = [p.name for p in others if p.default is p.empty]
        assert needed == ["config"] * ("config" in function.__annotations__), name


def test_mistakes_cost_one_line(capsys):
    with pytest.raises(SystemExit) as stopped:
        bench.main(["speed"])
    said = capsys.readouterr()
    assert stopped.value.code == 2 and not said.out and "'speed': must be" in said.err
    assert "--quick" in refused(["staleness", "--quick"], capsys)
    assert "--seeds 0: must be at least 1" in refused(["race", "--seeds", "0"], capsys)


def test_only_record_writes_results(monkeypatch, tmp_path, capsys):
    def measurement(folder: Path) -> None:
        run = {"staleness": {"bound": 2, "max": 1}}
        save_result(folder, "staleness", {"runs": [run]})
        (folder / "sum-0").mkdir()  # a run's own folder stays where it is

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("lab.campaigns.bench_staleness", measurement)
    monkeypatch.setattr(tables, "RESULTS", tmp_path / "results")
    (tmp_path / "results").mkdir()
    bench.main(["staleness"])
    (folder,) = (tmp_path / "runs").iterdir()
    assert f"written: runs/{folder.name}/" in capsys.readouterr().out
    assert folder.name.startswith("staleness-") and (folder / "staleness.json").is_file()
    assert not list((tmp_path / "results").iterdir())
    bench.measure("staleness", ["--record"], Path("runs/again"))
    assert [p.name for p in (tmp_path / "results").iterdir()] == ["staleness.json"]
    assert {p.name for p in tmp_path.iterdir()} == {"runs", "results"}


# ---------------------------------------------------------------------------------------- pictures


def run_folder(folder: Path, events: list[dict], rows: list[dict]) -> Path:
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps({"task": "guess", "mode": "async"}))
    Log(folder / "events.jsonl").append(events)
    Log(folder / "metrics.jsonl").append(rows)
    return folder


def trained_folder(folder: Path) -> Path:
    events, rows = [], [{"t": 0.0, "step": 0, "eval": {"solved": 0.1}}]
    for step in range(12):
        span = {"t": float(step), "seconds": 0.8, "version": step}
        events.append({"process": "learner", "kind": "train", **span})
        events.append({"process": "rollout-0", "kind": "generate", **span})
        events.append({"process": "reward-0", "kind": "score", "t": step + 0.5, "seconds": 0.01})
        rows.append({"t": step + 1.0, "step": step + 1, "reward": step / 12} | ROW)
    rows[-1]["eval"] = {"solved": 0.9}
    return run_folder(folder, events, rows)


def test_pictures_come_from_the_run_folder_alone(tmp_path):
    runs = [trained_folder(tmp_path / name) for name in ("one", "two")]
    draw_run(runs[0])
    draw_timeline(runs, tmp_path / "both.png")
    made = [*(runs[0] / name for name in PICTURES), tmp_path / "both.png"]
    assert all(picture.read_bytes().startswith(b"\x89PNG") for picture in made)


def test_curves_of_runs_are_named_by_the_flags_that_differ(tmp_path, monkeypatch, capsys):
    runs, drawn = [trained_folder(tmp_path / name) for name in ("one", "two")], []
    config = {"task": "guess", "mode": "sync", "lr": 0.006, "out": "elsewhere"}
    (runs[1] / "config.json").write_text(json.dumps(config))
    draw = plots.draw_panels
    monkeypatch.setattr(plots, "draw_panels", lambda *a, **k: drawn.append(a) or draw(*a, **k))
    bench.main(["compare", *map(str, runs)])
    picture = runs[1] / "compare.png"
    assert str(picture) in capsys.readouterr().out
    assert picture.read_bytes().startswith(b"\x89PNG")
    ((_, _, panels, *_),) = drawn
    assert [axis["ylabel"] for _, axis in panels] == ["training reward", "held-out, solved"]
    for curves, _ in panels:
        assert [*curves] == [f"one, --lr {Config.lr}", "two, --lr 0.006"]
    assert panels[1][0]["two, --lr 0.006"] == ([0, 12], [0.1, 0.9])
    assert "two run folders" in refused(["compare", str(runs[0])], capsys)
    assert "must be a run folder" in refused(["compare", str(runs[0]), str(tmp_path)], capsys)


def test_a_run_that_never_trained_draws_nothing(tmp_path):
    rows = [{"t": 0.0, "step": 0, "eval": {"solved": 0.1}}]
    draw_run(run_folder(tmp_path / "run", [], rows))
    assert not list((tmp_path / "run").glob("*.png"))


# --------------------------------------------------------------------------------------- the race


@pytest.mark.parametrize("seconds, runs", [(11.0, 18), (25.0, 12), (31.0, 6)])
def test_the_race_without_flags_ends_in_time(seconds, runs, monkeypatch, tmp_path, capsys):
    clock = [0.0]

    def run_command(trainer: str, run: Path, **flags) -> dict:
        trained_folder(run)
        (run / "checkpoints").mkdir()
        clock[0] += seconds
        return {}

    monkeypatch.setattr(races, "run_command", run_command)
    monkeypatch.setattr(races.time, "monotonic", lambda: clock[0])
    monkeypatch.setattr(races, "speed_of", lambda run, summary, task: measured(10.0, 50.0))
    races.bench_race(tmp_path, races.RaceConfig())
    assert len(load_result("race", tmp_path)["runs"]) == runs
    assert {p.name for p in tmp_path.glob("*.png")} == {"race.png", "timeline.png"}
    assert not list(tmp_path.rglob("checkpoints"))
    assert any("short answers" in line for line in tables.tables_of(tmp_path))


def measured(seconds: float, rate: float) -> dict:
    """What `speed_of` says of a run."""
    row = {"target_s": seconds, "target_samples": 1000, "final": 0.99, "samples_per_s": rate}
    return row | {"staleness": 1.0, "held": [[0.0, 0, 0.1], [9.0, 900, 0.99]]}


def raced(mode: str, seed: int, seconds: float, rate: float, task: str = "guess") -> dict:
    return {"task": task, "mode": mode, "seed": seed, **measured(seconds, rate)}


def test_the_speed_of_a_run_whose_evaluations_came_late(tmp_path):
    events, rows = [], [{"t": 0.0, "step": 0, "eval": {"solved": 0.1}}]
    for step, at in enumerate((3.0, 4.0, 5.0, 7.0), start=1):
        for process in ("rollout-0", "rollout-1"):
            events.append({"process": process, "kind": "generate", "t": at - 1.0, "seconds": 0.7})
        rows.append({**ROW, "t": at + 0.6, "step": step, "reward": 0.5})
    for step, score in ((3, 0.95), (4, 0.97)):  # at the end of the file, at the time of the step
        rows.append({"t": rows[step]["t"], "step": step, "eval": {"solved": score}})
    folder = run_folder(tmp_path / "run", events, rows)
    speed = races.speed_of(folder, {"staleness": {"mean": 1.5}}, "guess")
    share = (0.9 - 0.1) / (0.95 - 0.1)  # of the way between two evaluations
    assert speed["target_s"] == pytest.approx(share * (5.6 - 2.0))  # since the first episode began
    assert speed["target_samples"] == pytest.approx(share * 12)
    assert (speed["final"], speed["staleness"]) == (0.97, 1.5)
    assert races.crossing(speed["held"], 0.99) == (None, None)
    assert speed["samples_per_s"] == pytest.approx(3 * 4 / 4.0)
    (folder / "config.json").write_text('{"max_staleness": 1}')  # the second batch may be ready
    slow = races.speed_of(folder, {"staleness": {"mean": 0.0}}, "slow")
    assert slow["target_s"] is None and slow["samples_per_s"] == pytest.approx(2 * 4 / 3.0)


def test_a_ratio_of_medians_and_that_of_each_seed():
    never = math.inf
    assert races.ratios([10.0, 12.0, 8.0], [5.0, 4.0, 8.0]) == (2.0, [2.0, 3.0, 1.0])
    assert races.ratios([10.0, never], [never, never]) == (1.0, [0.0, 1.0])
    assert races.ratios([never], [5.0]) == (never, [never])


def test_the_table_compares_with_the_best_synchronous_mode():
    modes = {"sync, one core": 30, "sync, two threads": 20, "async, η = 4": 10}
    runs = [raced(m, i, s + i, 100 / s) for m, s in modes.items() for i in range(3)]
    for run in runs:
        run["busy_s"] = {"generate": 3.0, "train": 1.0, "useful": 2.0}
    runs[-1]["target_s"] = None  # never got there
    runs.append(raced("sync, lucky", 0, 5, 20))  # one run is no baseline for three
    assert {row["mode"] for row in races.baseline(runs)} == {"sync, two threads"}
    *_, row = races.race_lines({"runs": runs})
    cells = [cell.strip() for cell in row.split("|")[1:-1]]
    assert cells == [
        "short answers: `guess`, async, η = 4, 3 seeds",
        "50% generating, 25% waiting, 25% training",
        "2.00×",
        "5 -> 10 (2.00×, 2.00)",
        "solved 0.9: 21.0 -> 11.0 (1.91×, 0.00 to 2.00)",
        "3, 2",
    ]


# ---------------------------------------------------------------------------------- speed of parts


@pytest.mark.parametrize("how", [{}, {"attention": "dsa", "chunk_size": 4, "top_k": 2}])
def test_the_speed_of_a_decoded_token(how):
    model = GPT(ModelConfig(**PRESETS["tiny"], context=32, positions="rope", **how))
    step, cache = speed.decode_step(model, 4, 32)
    assert speed.seconds_of(step) > 0
    c = model.config
    assert cache.kv.numel() == 2 * c.layers * 4 * 32 * c.kv_heads * c.head_width


def test_what_a_part_needs_is_said_in_one_line(monkeypatch, capsys):
    monkeypatch.setattr(speed, "CUDA", False)
    assert "with a CUDA device" in refused(["dsa"], capsys)


# -------------------------------------------------------------------------------------- the tables


# ------------------------------------------------------------------------------------- one GPU


def test_what_a_gpu_is_asked_needs_one(monkeypatch, tmp_path):
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    with pytest.raises(UserError, match="gpu: must be run on a machine with a CUDA device"):
        gpu.bench_gpu(tmp_path, gpu.GpuConfig())


def test_parts_fail_alone_and_what_is_done_is_not_done_again(monkeypatch, tmp_path):
    asked, ends = [], {"dsa": "failed: no memory"}

    def run_part(name, folder, limit, small):
        asked.append((name, limit))
        return ends.pop(name, "done")

    monkeypatch.setattr(gpu, "run_part", run_part)
    gpu.bench_gpu(tmp_path, gpu.GpuConfig(rehearse="yes"))
    assert [name for name, _ in asked] == list(gpu.PARTS)
    assert sum(limit for limit, *_ in gpu.PARTS.values()) <= 12 * 60
    lines = tables.tables_of(tmp_path)
    assert any("failed: no memory" in line for line in lines)
    asked.clear()
    gpu.bench_gpu(tmp_path, gpu.GpuConfig(rehearse="yes"))
    assert [name for name, _ in asked] == ["dsa"]
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    with pytest.raises(UserError, match="must be new, or a folder of this machine's GPU"):
        gpu.bench_gpu(tmp_path, gpu.GpuConfig())


def test_a_part_is_cut_off_or_says_why_it_failed(tmp_path):
    before = children()
    assert gpu.run_part("model", tmp_path, 1.0, True).startswith("cut off after 1 s")
    assert children() == before
    assert "--part all of it: must be" in gpu.run_part("all of it", tmp_path, 60.0, True)


def test_a_part_goes_on_where_it_was_cut_off(tmp_path):
    """Rows of before stay as they are; the page has both."""
    row = {"what": "decode, 2 slots, 64 tokens", "ms": 7.0, "of what memory allows": 0.5}
    save_result(tmp_path, "qwen", {"size": "1M", "dtype": "float32", "rows": [row]})
    assert gpu.run_part("model", tmp_path, 120.0, True) == "done"
    first, learner = load_result("qwen", tmp_path)["rows"]
    assert first == row and learner["what"] == "learner" and learner["tokens/s"] > 0
    page = (tmp_path / "tables.md").read_text()
    assert "2 slots, 64 tokens" in page and "learner" in page
