"""The guided tour is true: its values are walked again, its code and experiments are the files'.

The experiments themselves take minutes: `python docs/tour.py` does them and writes the page.
"""

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent.parent / "docs"))

import tour
from walk import walk

import buffer


@pytest.fixture(scope="module")
def stations():
    return walk()


@pytest.fixture(scope="module")
def page() -> str:
    return tour.PAGE.read_text()


def test_the_page_is_true(page, stations):
    assert tour.check(page, stations) == []


def test_there_are_experiments_in_many_rooms_and_each_was_done(page):
    experiments = [tour.read_experiment(match) for match in tour.EXPERIMENT.finditer(page)]
    assert len(experiments) >= 8 and len({file for file, *_ in experiments}) >= 6
    for file, _, _, commands, output in experiments:
        done = [line[2:] for line in output.splitlines() if line.startswith("$ ")]
        assert done == commands, f"an experiment with {file} was not done: python docs/tour.py"


def test_the_followed_episode_is_worth_following(stations):
    """It sees a swap, is as old as it may be, and its group teaches something."""
    assert "staleness 4 - 2 = 2, at most 2" in stations["batch"][1]
    assert any("swaps [0, 2, 4, 3]" in line for line in stations["swap"])
    assert "all the same" in stations["replay"][0]


def test_the_followed_agents_are_worth_following(stations):
    """A tool fails, the group is repaired, and the two kinds of credit disagree about a turn."""
    assert any("env_error: ConnectionError" in line for line in stations["agent"])
    assert "discard the group: None; trained are [0, 1, 2, 3, 0]" in stations["agent"][-1]
    rows = {line[:12].strip(): line[12:].split() for line in stations["credit"]}
    assert float(rows["by episode"][1]) < 0 < float(rows["turn 2"][1])
    assert rows["turn 4"] == [".", ".", ".", "0.000", "."]
    assert rows["in the loss"][2:4] == [".", "."], "an observation has credit"


@pytest.mark.parametrize(
    "old, new, complaint",
    [
        ("staleness 4 - 2 = 2", "staleness 4 - 2 = 1", "batch: page: oldest token"),
        (" 2.190 ", " 2.290 ", "steps: page:"),
        ("[0, 1, 2, 3, 0]", "[0, 1, 2, 3, 1]", "agent: page: a reason"),
        ("turn 2         0.447", "turn 2         0.747", "credit: page: turn 2"),
        ('event("learner", kind', 'event("nobody", kind', "train_async.py has 0"),
        ("        for s in range(start", "        for v in range(start", "may_admit is not what"),
        ("](../runtime/replay.py)", "]", "runtime/replay.py is nowhere linked"),
        ("](../bench.py)", "](../bunch.py)", "bunch.py is linked, but is not there"),
    ],
)
def test_what_is_not_true_is_named(page, stations, old, new, complaint):
    assert old in page
    complaints = tour.check(page.replace(old, new), stations)
    assert any(complaint in line for line in complaints), complaints


@pytest.mark.parametrize(
    "a, b, equal",
    [
        ("loss 0.5001 of 3", "loss  0.5004 of 3", True),  # the last digits hang on the processor
        ("digest 0x12ab", "digest 0x34cd", True),
        ("loss 0.5001 of 3", "loss 0.5001 of 4", False),
        ("loss 0.50", "loss 0.53", False),
        ("loss 0.50", "loss 0.50 0.50", False),
        ("loss 0.50", "", False),
    ],
)
def test_lines_are_the_same_up_to_rounding(a, b, equal):
    assert tour.same(a, b) == equal


def test_a_walk_that_stops_says_where(monkeypatch):
    monkeypatch.setattr(buffer.Buffer, "next_batch", lambda *_: None)
    (said,) = tour.compare(walk(), [], tour.PAGE.read_text())
    assert said.startswith("the walk stops: AssertionError: the learner waits for ever")
