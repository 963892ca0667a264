"""The run folder under attack: a fast part of tests/disk.py; what runtime/folder.py promises."""

import os
import random

import disk
import pytest

from runtime.config import UserError
from runtime.folder import Log, own_folder, read_lines, scan, write_file


@pytest.fixture(autouse=True)
def adopted():
    """Who is left behind by a test is a child of this process, while the test runs."""
    disk.adopt()
    yield
    disk.adopt(False)


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    return disk.make_runs(tmp_path_factory.mktemp("runs"))


@pytest.mark.parametrize("work", [disk.full_disk, disk.power_cut])
@pytest.mark.parametrize("seed", range(2))
def test_a_run_goes_on_after_a_full_disk_or_a_power_cut(runs, tmp_path, work, seed):
    folder, sha256 = runs["sync"]
    disk.shutil.copytree(folder, tmp_path / "run")
    work(tmp_path / "run", "sync", tmp_path / "said", sha256, random.Random(seed))


@pytest.mark.parametrize("seed", range(4))
def test_a_damaged_run_goes_on_or_says_why_not(runs, tmp_path, seed):
    folder, sha256 = runs["sync"]
    disk.shutil.copytree(folder, tmp_path / "run")
    disk.damaged(tmp_path / "run", "sync", tmp_path / "said", sha256, random.Random(seed))


def test_a_strangers_folder_does_nothing_outside(tmp_path):
    names = ("symlink events.jsonl", "hard link lock", "pickle", "task 'evil.py'")
    ends, failures = disk.strangers(tmp_path / "strangers", names)
    assert not failures and sum(ends.values()) == 12


@pytest.mark.parametrize("mode, bad", [("sync", "os._exit(3)"), ("async", list(disk.EXAMS)[0])])
def test_what_a_task_does_in_an_evaluation_is_named(tmp_path, mode, bad):
    end, left = disk.exam(tmp_path / "exam", mode, bad)
    assert disk.EXAMS[bad] in end.out + end.err and not left


@pytest.mark.parametrize("how", disk.LINES)
def test_a_damaged_line_is_named(tmp_path, how):
    Log(tmp_path / "metrics.jsonl").append([{"step": i} for i in range(4)])
    whole = read_lines(tmp_path / "metrics.jsonl")

    class Choose(random.Random):
        def choice(self, among):
            return how if how in among else among[0]

    assert disk.damage_line(tmp_path, Choose(1)) == f"line {how}"
    rows = []
    with pytest.raises(UserError, match=r"metrics.jsonl, line \d: torn or changed"):
        rows += [row for row, _ in scan(tmp_path / "metrics.jsonl")]
    assert whole == [{"step": i} for i in range(4)]


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
    child, (here, there) = 0, os.pipe()
    child = os.fork()
    if not child:
        lock = own_folder(tmp_path)
        os.write(there, b"x")
        disk.time.sleep(60)
        os._exit(lock is None)
    os.read(here, 1)
    with pytest.raises(UserError, match=f"must not be in use, but process {child}"):
        own_folder(tmp_path)
    os.kill(child, 9)
    os.waitpid(child, 0)
    own_folder(tmp_path)  # it goes with its process


def test_a_torn_line_right_behind_a_checkpoint_is_dropped(runs, tmp_path):
    folder, sha256 = runs["async"]
    run, log = tmp_path / "run", tmp_path / "run" / "events.jsonl"
    disk.shutil.copytree(folder, run)
    newest = sorted((run / "checkpoints").glob("*.pt"))[-1]
    size = disk.torch.load(newest, weights_only=True)["marks"]["events"][0]
    log.write_bytes(log.read_bytes()[:size] + b'{"t": 1.0, "kin')
    end = disk.attempt(["train_async.py", "--resume", str(run)], run, tmp_path / "said")
    assert end.code == 0, end.lines
    disk.judge(run, "async", tmp_path / "said", sha256)


def test_what_a_task_has_forked_does_not_outlive_a_run_that_fails(tmp_path):
    fork, fail = "if not os.fork(): time.sleep(1000)", "raise RuntimeError('boom')"
    end, left = disk.exam(tmp_path / "exam", "sync", fork, fail)
    assert "episodes failed" in end.err
    assert not left


def test_a_strangers_words_do_not_reach_the_terminal(tmp_path):
    _, failures = disk.strangers(tmp_path / "strangers", ["mode '\\x1b[2J'"])
    assert not failures
