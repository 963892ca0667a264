"""Configuration, run folders and checkpoints: what a user can get wrong, in one line each."""

import dataclasses
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import losses
from runtime import devices
from runtime.config import (
    FIRST,
    IN_GROUP,
    OBJECTIVES,
    Config,
    UserError,
    parse,
    words,
    written,
)
from runtime.devices import pick_devices, set_threads
from runtime.folder import read_lines
from runtime.run import resumed
from runtime.runlog import new_folder, write_config
from runtime.terminal import fail, run_main


def refused(capsys, monkeypatch, *argv) -> str:
    """The one line that a wrong command line prints; asserts exit code 2."""
    monkeypatch.setattr(sys, "argv", ["train.py", *argv])
    monkeypatch.setattr("runtime.terminal.open_streams", lambda: None)
    with pytest.raises(SystemExit) as stop:
        run_main(lambda config: None, "test")
    assert stop.value.code == 2
    out, err = capsys.readouterr()
    assert out == "" and err.count("\n") == 1 and "Traceback" not in err
    return err


@pytest.mark.parametrize(
    "argv, parts",
    [
        (["--speed", "9"], ["--speed", "must be a flag (--help-all"]),
        (["--max-stale", "9"], ["--max-stale 9: must be a flag"]),  # a typo is not a flag
        (["--steps", "-1"], ["--steps", "-1", "at least 0"]),
        (["--set", "quiet=1"], ["--set quiet=1", "must be one of scoring"]),
        (["--lr"], ["--lr", "expected one argument"]),
        (["--credit", "turn", "--advantage", "gae"], ["--credit turn", "with --advantage gae"]),
        (["--advantage", "gae", "--teacher", "RUN"], ["--advantage gae", "with --teacher RUN"]),
        (["--keep-dead", "no", "--teacher", "RUN"], ["--keep-dead no", "with --teacher RUN"]),
        (["--keep-dead", "no", "--credit", "turn"], ["--keep-dead no", "with --credit turn"]),
        (["--group-size", "1"], ["--group-size", "1", "at least 2"]),
        (["--lr", "nan"], ["--lr", "nan"]),
        (["--top-k", "3"], ["--top-k 3: must be 8 with --attention dense"]),
        (["--swap", "hot"], ["--swap", "hot", "keep", "recompute", "drain"]),
        (["--objective", "vpg"], ["--objective", "vpg", "decoupled_ppo"]),
        (["--attention=dsa", "--chunk-size", "24"], ["--chunk-size", "24", "power of two"]),
        (["--set", "silence=1"], ["--set=silence=1.0", "at least 4"]),
    ],
)
def test_wrong_flags_cost_one_line(capsys, monkeypatch, argv, parts):
    line = refused(capsys, monkeypatch, *argv)
    for word in parts:
        assert word in line


def test_settings_as_a_command_line_are_read_as_they_were():
    changes = {"silence": 9.0, "lr": 0.01, "task": "sort:5", "scoring": "indexer"}
    changes |= {"attention": "dsa", "max_staleness": 4}
    assert parse("test", words(changes)) == dataclasses.replace(Config(), **changes)


def help_of(capsys, flag: str, kind: type = Config) -> str:
    with pytest.raises(SystemExit) as stop:
        parse("what the program does", [flag], kind)
    assert stop.value.code == 0
    return capsys.readouterr().out


def flags_in(text: str) -> set[str]:
    return set(re.findall(r"^  (--[a-z-]+) ", text, re.MULTILINE)) - {"--help-all"}


def test_help_shows_the_ten_flags_that_people_use_first(capsys):
    text = help_of(capsys, "--help")
    assert flags_in(text) == {written(name) for name in FIRST} and len(FIRST) == 10
    assert "what the program does" in text and "--help-all" in text
    assert "default 'guess'" in text
    assert "tiny, small, medium, or a Hugging Face folder" in " ".join(text.split())


def test_help_all_shows_every_flag_in_its_group(capsys):
    text = help_of(capsys, "--help-all")
    flags = {written(f.name) for f in dataclasses.fields(Config) if f.metadata["flag"]}
    assert flags_in(text) == flags | {"--set"} and len(flags) <= 45
    assert all(f.metadata["help"] for f in dataclasses.fields(Config))
    headings = re.findall(r"^(\S.*):$", text, re.MULTILINE)
    groups = "what is learned, model, generation, staleness, objective, machines, watching"
    assert headings == ["options", *groups.split(", ")]
    staleness = text[text.index("\nstaleness:") : text.index("\nobjective:")]
    assert flags_in(staleness) == {"--max-staleness"}


def test_objectives_on_the_command_line_are_those_of_losses():
    assert set(OBJECTIVES) == set(losses.OBJECTIVES)
    assert set(losses.ADVANTAGES) == set(IN_GROUP)


def test_devices_are_split(monkeypatch):
    def split(gpus, cores=2, **flags):
        monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)
        monkeypatch.setattr(devices, "cores", lambda: cores)
        return pick_devices(dataclasses.replace(Config(), **flags))

    assert split(0) == (["cpu"], ["cpu"])
    assert split(0, cores=8) == (["cpu"], ["cpu"] * 7)
    assert split(0, cores=8, learners=2, rollout_workers=3) == (["cpu"] * 2, ["cpu"] * 3)
    assert split(1) == (["cuda:0"], ["cuda:0"])  # one GPU is shared
    assert split(4) == (["cuda:0"], ["cuda:1", "cuda:2", "cuda:3"])
    assert split(4, learners=2) == (["cuda:0", "cuda:1"], ["cuda:2", "cuda:3"])
    assert split(4, device="cpu") == (["cpu"], ["cpu"])
    assert split(4, device="cuda:2") == (["cuda:2"], ["cuda:2"])
    for name in "gpu cuda:x cpu:1 cuda: cuda:-1 cuda".split():
        with pytest.raises(UserError, match=f"--device {name}: must be .* has 0 CUDA devices"):
            split(0, device=name)
    with pytest.raises(UserError, match="has 2 CUDA devices"):
        split(2, device="cuda:2")


def test_a_process_computes_on_the_gpu_that_it_was_given(monkeypatch):
    """What is captured or launched goes to the current device, whatever the tensors' own."""
    chosen = []
    monkeypatch.setattr(torch, "set_num_threads", lambda n: None)
    monkeypatch.setattr(torch.cuda, "set_device", chosen.append)
    set_threads(Config(), 2, "cpu")
    set_threads(Config(), 2, "cuda:1")
    assert chosen == ["cuda:1"]


def made(mode: str = "sync", **flags) -> Path:
    """A run folder by these flags."""
    config = dataclasses.replace(Config(), **flags)
    run = new_folder(config, mode)
    write_config(run, config, mode)
    return run


def test_run_folder_is_never_overwritten(tmp_path):
    full = tmp_path / "full"
    full.mkdir()
    (full / "thesis.txt").write_text("precious")
    with pytest.raises(UserError, match="must be new or an empty folder"):
        made(out=str(full))
    assert [p.name for p in full.iterdir()] == ["thesis.txt"]
    with pytest.raises(UserError, match="must be writable"):
        made(out=str(full / "thesis.txt" / "run"))
    run = made(out=str(tmp_path / "a/b"))
    record = json.loads((run / "config.json").read_text())
    assert record["mode"] == "sync" and record["machine"]["torch"] == torch.__version__


def test_a_run_that_nobody_reads_any_more_ends_with_a_checkpoint(tmp_path):
    """As when it is piped into `head`."""
    command = [sys.executable, "train_sync.py", "--steps=100000", f"--out={tmp_path / 'run'}"]
    command += ["--groups-per-step=4", "--group-size=4", "--slots=16", "--eval-every=100000"]
    here = {"cwd": Path(__file__).parent.parent, "stdout": subprocess.DEVNULL}
    process = subprocess.Popen(command, **here, stderr=subprocess.PIPE)
    metrics = tmp_path / "run" / "metrics.jsonl"
    while not metrics.exists() or metrics.read_bytes().count(b"\n") < 4:
        assert process.poll() is None
        os.read(process.stderr.fileno(), 1 << 16)
    process.stderr.close()
    assert process.wait(timeout=60) not in (0, None)
    newest = sorted((tmp_path / "run" / "checkpoints").iterdir())[-1]
    steps = [row["step"] for row in read_lines(metrics)]
    assert newest.name == f"step{steps[-1]:07d}.pt" and steps[-1] >= 3


def test_only_steps_may_change_on_resume(tmp_path):
    run = made(out=str(tmp_path / "run"), lr=0.01, steps=5)
    config = resumed(dataclasses.replace(Config(), resume=str(run), steps=9))
    assert (config.lr, config.steps) == (0.01, 9)
    with pytest.raises(UserError, match="--lr 0.2: must be left out with --resume"):
        resumed(dataclasses.replace(Config(), resume=str(run), lr=0.2))
    with pytest.raises(UserError, match="must be a run folder"):
        resumed(dataclasses.replace(Config(), resume=str(tmp_path)))


def test_a_setting_that_no_longer_exists_is_ignored_on_resume(tmp_path):
    run = made(out=str(tmp_path / "run"), steps=5)
    path = run / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"compile": "decode"}))
    assert resumed(dataclasses.replace(Config(), resume=str(run))).steps == 5


@pytest.mark.parametrize("text", ["", "[]", "{", '{"mode": "sync", "steps": "many"}', "{}"])
def test_a_damaged_config_costs_one_line(tmp_path, text):
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(UserError, match="config.json") as found:
        resumed(dataclasses.replace(Config(), resume=str(tmp_path)))
    assert "must be" in str(found.value)


def test_what_a_terminal_would_obey_is_shown_as_numbers(capsys):
    with pytest.raises(SystemExit):
        fail("task '\x1b[2J\x07evil': no\nsecond line")
    assert capsys.readouterr().err == "task '\\x1b[2J\\x07evil': no second line\n"
