"""What a run says when it has ended: sums over all steps, how to go on, what to try."""

import json
from pathlib import Path

import numpy as np
import pytest

from reward import make_task
from runtime.books import show_group
from runtime.folder import Log
from runtime.messages import Group, Trajectory
from runtime.report import summarise
from runtime.tokenizer import own_tokenizer

encode = own_tokenizer().encode
FACTS = {"staleness_bound": 4, "stopped_early": False, "wall_s": 3.0}
CONFIG = {"task": "guess", "mode": "async", "steps": 20, "group_size": 2}
ROW = {"staleness_mean": 1.0, "staleness_max": 2, "seconds": 0.8, "samples": 4, "tokens": 9}
ROW |= {"failures": {"env_error": 1}, "discarded": {}, "cut": 0.1, "answer_tokens": 3.0}


@pytest.fixture(autouse=True)
def without_pictures(monkeypatch):
    monkeypatch.setattr("runtime.report.draw_run", lambda run: None)


def verdict_of(folder: Path, dead: list[int], solved: float = 0.5, **facts) -> str:
    """The verdict on a run with two groups a step, `dead[i]` of which were dead in step i."""
    rows = [{"t": 0.0, "step": 0, "eval": {"solved": 0.1, "reward": 0.2, "turns": 5.0}}]
    for step, count in enumerate(dead, start=1):
        rows.append(ROW | {"t": float(step), "step": step, "dead_groups": count})
    rows[-1] |= {"eval": {"solved": solved, "reward": 0.6, "turns": 3.5}, "staleness_max": 3}
    folder.mkdir()
    Log(folder / "metrics.jsonl").append(rows)
    (folder / "config.json").write_text(json.dumps(CONFIG))
    return summarise(folder, FACTS | {"steps": len(dead)} | facts)


def test_the_summary_counts_all_steps(tmp_path):
    text = verdict_of(tmp_path / "run", [1, 1, 1], solved=0.9)
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert [exam["solved"] for exam in summary["eval"].values()] == [0.1, 0.9]
    assert summary["samples"] == 12
    assert summary["staleness"] == {"max": 3, "mean": 1.0, "bound": 4}
    assert "solved 10% -> 90%" in text and text.count("\n") == 2


def test_a_run_without_a_single_step_has_a_summary_too(tmp_path):
    text = verdict_of(tmp_path / "run", [], solved=0.1, steps=0, stopped_early=True)
    assert "0 steps, 0 episodes" in text and "stopped at step 0 of 20" in text


def test_a_run_that_was_stopped_says_how_it_goes_on(tmp_path):
    run = tmp_path / "my run"
    text = verdict_of(run, [1] * 12, stopped_early=True)
    assert text.splitlines()[3:] == [
        f"stopped at step 12 of 20; go on with: python train_async.py --resume '{run}' --task guess"
    ]


def test_a_run_in_which_nearly_every_group_was_dead_says_what_to_try(tmp_path):
    text = verdict_of(tmp_path / "a", [0] * 5 + [2] * 10)
    said = text.splitlines()[3:]
    assert said[0].startswith("little to learn from: in 20 of 20 groups of the last 10 steps")
    for word in ("partial credit", "similar", "shorter", "--group-size", "--temperature"):
        assert word in said[1]
    assert "little to learn from" in verdict_of(tmp_path / "b", [2, 2])  # a short run
    for name, dead, solved in (
        ("c", [2] * 5 + [1] * 5 + [2] * 5, 0.5),  # a quarter has taught something
        ("d", [2] * 10, 1.0),  # there is nothing left to learn
        ("e", [2] * 10 + [0] * 10, 0.5),  # long ago
    ):
        assert "little to learn from" not in verdict_of(tmp_path / name, dead, solved)


def test_an_episode_is_shown_in_one_line():
    def shown(text: str) -> str:
        tokens = np.int32(encode(text))
        t = Trajectory(7, 0, 1, tokens=tokens, turns=[(0, len(tokens))], reward=0.5)
        t.swaps = [0, 7, 2, 8]
        return show_group(Group(7, 0, {}, [t]), make_task("guess"))

    text = "  group 7  ['guess\\n12']  reward 0.50  versions [7, 8]  stop"
    assert shown("guess\n12") == text
    assert "x" * 60 + " ... " + "x" * 40 in shown("x" * 1000)
