"""Who waits for whom: the exercise's traces, and the order in which learners meet (ex22)."""

import re
from ast import literal_eval
from pathlib import Path

import pytest
from adapters import where_they_wait

from runtime.team import ORDER, Team, meeting

README = Path(__file__).parent.parent / "exercises/README.md"
RANKS, BEGIN = (0, 1, 2), "the first meeting"
pytestmark = pytest.mark.ex22


def written(step: str) -> tuple:
    """`send(2)` or `gather(01)`, as a step."""
    name, ranks = re.fullmatch(r"(\w+)\((\d+)\)", step).groups()
    if name in ("send", "receive"):
        return name, int(ranks)
    return "meet", name, tuple(map(int, ranks))


def test_the_readmes_traces_have_the_readmes_answers():
    text = README.read_text().split("## ex22")[1]
    programs = {}
    for name, rank, steps in re.findall(r"^    ([A-Z ])  (\d)  (.*)$", text, re.MULTILINE):
        if name != " ":
            programs[name] = []
        assert int(rank) == len(list(programs.values())[-1])
        list(programs.values())[-1].append([written(step) for step in steps.split()])
    answers = dict(re.findall(r"^- \*\*([A-Z])\.\*\*[^`]*`([^`]*)`", text, re.MULTILINE))
    assert list(programs) == list(answers) == list("ABCD")
    for name, program in programs.items():
        assert where_they_wait(program) == literal_eval(answers[name]), name


def sequences(length: int) -> list[tuple]:
    """All sequences of meetings that ORDER allows, up to `length`, from when all have come."""
    found = [()]
    for sequence in found:
        if len(sequence) < length:
            found += [(*sequence, name) for name in ORDER[sequence[-1] if sequence else BEGIN]]
    return found


def programs_of(*sequences: tuple) -> list[list[tuple]]:
    return [[("meet", name, RANKS) for name in sequence] for sequence in sequences]


def complaint(sequence: tuple) -> str | None:
    """What `meeting` says on rank 1 on the way through a sequence; None: nothing."""
    team = Team((1,), len(RANKS), last=BEGIN)
    for version, name in enumerate(sequence):
        try:
            with meeting(team, version, name):
                pass
        except AssertionError as error:
            return str(error)
    return None


def test_learners_that_meet_in_one_order_never_wait():
    for sequence in sequences(7):
        assert where_they_wait(programs_of(*[sequence] * 3)) is None, sequence
        assert complaint(sequence) is None, sequence


def test_a_meeting_that_one_rank_leaves_out_is_found_and_named():
    """By the search always. By ORDER before anyone waits, unless the meeting is one that a step may
    leave out; those two are decided by what all have heard, and a time limit stands behind."""
    noticed, unnoticed = set(), set()
    for sequence in sequences(7):
        for i, name in enumerate(sequence):
            left = sequence[:i] + sequence[i + 1 :]
            waits, circle = where_they_wait(programs_of(sequence, left, sequence))
            assert waits[0][1] == waits[2][1] == [1], "both others wait for rank 1"
            place = waits[0][0]
            assert left[:place] == sequence[:place] and left[place:][:1] != (sequence[place],)
            assert circle == ([0, 1, 2] if place < len(left) else []), "or rank 1 has ended"
            if i < len(left):  # something follows: rank 1 comes to that instead
                said = complaint(left)
                (unnoticed if said is None else noticed).add(name)
                after = repr(sequence[i - 1] if i else BEGIN)
                where = f"learner 1 of 3, version {i}: {sequence[i + 1]} after {after}, must be"
                assert said is None or said.startswith(where), said
    assert unnoticed == {"weights", "moments"}
    assert noticed == set(ORDER) - unnoticed - {None, BEGIN}
