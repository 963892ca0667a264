"""The books balance on every honest log, and no line can be taken out of one or doubled unseen."""

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from buffer import Buffer
from runtime.folder import Log
from runtime.ledger import BUFFER, WORKER, Ledger, audit, table
from runtime.messages import Group

ROOT = Path(__file__).parent.parent


def life(group: int, *kinds: str, **details) -> list[dict]:
    return [{"kind": kind, "group": group, **details} for kind in kinds]


def honest_log(seed: int, steps: int = 12, batch: int = 3, eta: int = 2) -> list[dict]:
    """Events of a whole run on a random schedule: losses, discards, stragglers, `steps` steps."""
    choose, buffer, log = np.random.default_rng(seed), Buffer(batch, eta), []
    version, newest, states = 0, 0, {}

    def note(group, kind, state, **details):
        states[group] = state
        log.extend(life(group, kind, **details))

    while version < steps:
        left = (steps - version) * batch - len(buffer.outstanding)
        while left > 0 and buffer.may_admit(version):
            buffer.admit(newest, version)
            note(newest, "admit", WORKER)
            newest, left = newest + 1, left - 1
        for group in [g for g in buffer.outstanding if choose.random() < 0.4]:
            fate = choose.random()
            if states[group] == WORKER and fate < 0.1:
                buffer.requeue(group, version)
                note(group, "requeue", WORKER)
            elif fate < 0.13:
                buffer.discard(group, str(choose.choice(["stale", "failed"])))
                note(group, "discard", "discarded", reason=buffer.dropped[-1][1])
            elif states[group] == WORKER:
                note(group, "score", BUFFER)
                buffer.complete(Group(group, buffer.outstanding[group], {}))
        if trained := buffer.next_batch(version):
            ids = [g.group_id for g in trained]
            log.append({"kind": "train", "version": version, "groups": ids})
            version += 1
            log.append({"kind": "publish", "version": version})
    for group in list(buffer.outstanding):
        buffer.discard(group, "end")
        note(group, "discard", "discarded", reason="end")
    return log


def books_of(log: list[dict]) -> Ledger:
    ledger = Ledger()
    for event in log:
        ledger.note(event)
    return ledger


def write_run(folder: Path, log: list[dict], totals: dict | None = None, steps: int = 12) -> Path:
    folder.mkdir(exist_ok=True)
    Log(folder / "events.jsonl").append(log)
    (folder / "config.json").write_text('{"mode": "async"}')
    if totals:
        summary = {"steps": steps, "ledger": totals}
        (folder / "summary.json").write_text(json.dumps(summary))
    return folder


@pytest.mark.parametrize("seed", range(20))
def test_an_honest_log_balances(seed):
    log, ledger = honest_log(seed), Ledger()
    for event in log:
        ledger.note(event)
        ledger.balance({g: ledger.states[g] for g in ledger.flying})
    totals = ledger.totals()
    assert totals["trained"] == 36 and totals["in_flight"] == 0 and ledger.steps == 12
    assert totals["admitted"] == 36 + sum(totals["discarded"].values())
    assert totals["requeued"] == sum(event["kind"] == "requeue" for event in log)


def test_no_line_can_be_left_out_or_doubled_unseen(tmp_path):
    """Mutation: whichever event of a group's life is dropped or repeated, the audit fails. (How far
    a group had come that is issued again or discarded next does not count.)"""
    log = honest_log(3)
    totals, kinds = books_of(log).totals(), {event["kind"] for event in log}
    assert kinds == {"admit", "score", "train", "discard", "requeue", "publish"}
    assert audit(write_run(tmp_path, log, totals)).events == len(log)
    for i, event in enumerate(log):
        if event["kind"] == "publish":  # moves no group
            continue
        later = [e["kind"] for e in log[i + 1 :] if e.get("group", -1) == event.get("group")]
        moot = event["kind"] != "admit" and later and later[0] in ("requeue", "discard")
        for broken in (log[: i + 1] + log[i:], log[:i] + log[i + 1 :])[: 1 if moot else 2]:
            with pytest.raises(ValueError):
                audit(write_run(tmp_path, broken, totals))


@pytest.mark.parametrize(
    "log, message",
    [
        (life(7, "score"), "group 7: score finds it unknown, not with a worker"),
        (life(7, "admit", "admit"), "group 7: admit finds it with a worker, not unknown"),
        (life(7, "requeue"), "group 7: requeue finds it unknown, not in the buffer"),
        (life(7, "admit", "discard", "requeue", reason="stale"), "requeue finds it discarded"),
        ([{"kind": "train", "version": 1, "groups": []}], "step 1 is trained where 0 is due"),
    ],
)
def test_a_move_that_cannot_be_names_the_group_and_both_states(log, message):
    with pytest.raises(ValueError, match=message):
        books_of(log)


@pytest.mark.parametrize(
    "places, message",
    [
        ({1: BUFFER, 2: WORKER, 3: WORKER}, None),
        ({1: BUFFER, 3: WORKER}, "group 2: with a worker by the event log; .* nowhere"),
        ({1: WORKER, 2: WORKER, 3: WORKER}, "group 1: in the buffer by the event log"),
        ({1: BUFFER, 2: WORKER, 3: WORKER, 4: WORKER}, "group 4: unknown by the event log"),
        ({0: BUFFER, 1: BUFFER, 2: WORKER, 3: WORKER}, "group 0: trained by the event log"),
    ],
)
def test_two_books_that_differ_name_the_group(places, message):
    ledger = books_of(
        [
            *life(0, "admit", "score"),
            *life(1, "admit", "score"),
            *life(2, "admit"),
            *life(3, "admit", "score", "requeue"),
            {"kind": "train", "version": 0, "groups": [0]},
        ]
    )
    if message is None:
        return ledger.balance(places)
    with pytest.raises(ValueError, match=message):
        ledger.balance(places)


def test_the_command_prints_the_table_or_the_first_event_that_does_not_fit(tmp_path):
    log = honest_log(0)
    totals, train = books_of(log).totals(), first_of(log, "train")
    group = log[train]["groups"][0]
    score = log.index({"kind": "score", "group": group})
    good = command(write_run(tmp_path, log, totals))
    assert good.returncode == 0 and good.stderr == "", good.stderr
    assert table(totals) in good.stdout and "every one fits" in good.stdout
    for broken, steps, words in (
        (log[:score] + log[score + 1 :], 12, f"group {group}: "),
        (
            [*log[:train], log[train] | {"version": 7}, *log[train + 1 :]],
            12,
            f"line {train + 1}: must follow",
        ),
        ([*log[:2], {"t": 0.0}, *log[2:]], 12, "line 3: must follow from those before ('kind')"),
        (log[: len(log) // 2], 12, "summary.json"),
        (log, 5, "summary.json"),  # a run that goes on has no summary
    ):
        bad = command(write_run(tmp_path, broken, totals, steps))
        assert bad.returncode == 1 and words in bad.stderr, bad.stderr
        assert "Traceback" not in bad.stderr
    (tmp_path / "config.json").write_text('{"mode": "sync"}')
    assert "must be a run of train_async.py" in command(tmp_path).stderr
    usage = command()
    assert usage.returncode == 2 and "usage: python -m runtime.ledger" in usage.stderr


def first_of(log: list[dict], kind: str) -> int:
    return next(i for i, event in enumerate(log) if event["kind"] == kind)


def command(*arguments) -> subprocess.CompletedProcess:
    """-O: a check of data is no assertion."""
    words = [sys.executable, "-O", "-m", "runtime.ledger", *arguments]
    return subprocess.run(words, cwd=ROOT, capture_output=True, text=True)


def test_the_sums_are_one_line():
    totals = {"admitted": 1234, "trained": 1200, "requeued": 2, "in_flight": 4}
    assert table(totals | {"discarded": {"stale": 30}}) == (
        "1,234 groups admitted = 1,200 trained + 30 stale + 4 in flight; issued again 2 times"
    )
