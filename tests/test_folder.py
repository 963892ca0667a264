"""The run folder under attack: a fast part of tests/disk.py; what runtime/folder.py promises."""

import os
import random
import shutil
import time

import disk
import pytest

from runtime.checkpoint import load_checkpoint
from runtime.config import UserError
from runtime.folder import Log, own_folder, read_lines, scan, write_file


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    return disk.make_runs(tmp_path_factory.mktemp("runs"))


def test_a_run_goes_on_whatever_its_folder_has_suffered_or_says_why_not(runs, tmp_path):
    folder, sha256 = runs["sync"]
    for seed in range(4):
        place = tmp_path / f"{seed}"
        shutil.copytree(folder, place / "run")
        assert disk.damaged(place / "run", "sync", place / "output", sha256, random.Random(seed))


def test_a_torn_line_right_behind_a_checkpoint_is_dropped(runs, tmp_path):
    folder, sha256 = runs["async"]
    run, log = tmp_path / "run", tmp_path / "run" / "events.jsonl"
    shutil.copytree(folder, run)
    size, _ = load_checkpoint(run)["marks"]["events"]
    log.write_bytes(log.read_bytes()[:size] + b'{"t": 1.0, "kin')
    assert disk.go_on(["train_async.py", "--resume", str(run)], run, tmp_path / "output")
    disk.judge(run, "async", tmp_path / "output", sha256)


def test_a_strangers_folder_does_nothing_outside(tmp_path):
    """Nor do its words reach the terminal."""
    chosen = [("symlink", "events.jsonl"), ("mode", "\x1b[2J")]
    chosen += [("pickle", "checkpoints/step0000009.pt"), ("task", "evil.py")]
    ends, failures = disk.strangers(tmp_path / "strangers", chosen)
    assert not failures and sum(ends.values()) == 12


EXAM = """
import os
from dataclasses import replace
from tasks.guess import make as original

def make(argument, seed, tokenizer):
    task = original("", seed, tokenizer)
    return replace(task, reset=lambda i, split: task.reset(i, split) | {"split": split},
                   step=lambda problem, answers: os._exit(3) if problem["split"] == "eval"
                   else task.step(problem, answers))
"""


def test_a_task_that_ends_its_process_in_an_evaluation_is_named(tmp_path):
    (tmp_path / "mine.py").write_text(EXAM)
    run, task = tmp_path / "run", str(tmp_path / "mine.py")
    words = ["train_sync.py", *disk.FLAGS, "--task", task, "--out", str(run), "--set=restarts=1"]
    end = disk.attempt(words, run, tmp_path / "output")
    assert end.code == 1 and "died (exit code 3); 1 restarts are used up" in end.err


# -------------------------------------------------------------------------- files, logs, owners


@pytest.mark.parametrize("how", disk.LINES)
def test_a_damaged_line_is_named(tmp_path, how):
    Log(tmp_path / "metrics.jsonl").append([{"step": i} for i in range(4)])
    assert read_lines(tmp_path / "metrics.jsonl") == [{"step": i} for i in range(4)]

    class Choose(random.Random):
        def choice(self, among):
            return how if how in among else among[0]

    assert disk.damage_line(tmp_path, Choose(1)) == f"line {how}"
    with pytest.raises(UserError, match=r"metrics.jsonl, line \d: torn or changed"):
        list(scan(tmp_path / "metrics.jsonl"))


def test_a_full_disk_leaves_no_half_line(tmp_path, monkeypatch):
    log = Log(tmp_path / "events.jsonl")
    log.append([{"t": 1}])
    real = os.write

    def full(descriptor, data):
        monkeypatch.setattr(os, "write", lambda *_: (_ for _ in ()).throw(OSError(28, "full")))
        return real(descriptor, data[:5])

    monkeypatch.setattr(os, "write", full)
    with pytest.raises(OSError, match="events.jsonl"):
        log.append([{"t": 2}])
    monkeypatch.setattr(os, "write", real)
    log.append([{"t": 3}])
    assert read_lines(tmp_path / "events.jsonl") == [{"t": 1}, {"t": 3}]


def test_a_file_is_never_written_through_a_link(tmp_path):
    (tmp_path / "canary").write_bytes(b"alive")
    for name in ("file.partial", "file.json"):
        (tmp_path / name).symlink_to(tmp_path / "canary")
    write_file(tmp_path / "file.json", b"new")
    assert (tmp_path / "canary").read_bytes() == b"alive"
    assert (tmp_path / "file.json").read_bytes() == b"new"
    assert not (tmp_path / "file.partial").exists()


def test_a_folder_has_one_owner(tmp_path):
    here, there = os.pipe()
    child = os.fork()
    if not child:
        own_folder(tmp_path)
        os.write(there, b"x")
        time.sleep(60)
        os._exit(0)
    os.read(here, 1)
    with pytest.raises(UserError, match="must be writable, and in no other"):
        own_folder(tmp_path)
    os.kill(child, 9)
    os.waitpid(child, 0)
    own_folder(tmp_path)  # it goes with its process
