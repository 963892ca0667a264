"""The plan of a workshop is true: its commands run, its changes fit nano.py, its names exist.

The figures on the page are of long runs, and of one machine: no test expects them.
"""

import argparse
import os
import re
import shlex
import subprocess
import sys
import types
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PAGE = (ROOT / "docs/workshop.md").read_text()
SOURCE = (ROOT / "nano.py").read_text()
COMMANDS = "".join(re.findall(r"^```sh\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL)).splitlines()
RUNS = [line for line in COMMANDS if re.match(r"(\w+=\S* )*(python|pytest) ", line)]
DIFFERENT = {re.sub(r"OMP_\w+=1 | --(steps|eta) \d+| ex\d+", "", line): line for line in RUNS}
CHANGES = re.findall(r"`([^`\n]+)` → `([^`\n]+)`", PAGE)
SPANS = set(re.findall(r"`([^`\n]+)`", re.sub(r"^```.*?^```$", "", PAGE, flags=re.M | re.S)))
TRAINER = "--steps 2 --groups-per-step 4 --group-size 4 --slots 16 --out run"
SHORTER = {"nano.py": "--steps 10", "train_sync.py": TRAINER, "train_async.py": TRAINER}
TOO_OLD = "a token is 3 versions old, at most 2"


def run(script: Path | str, arguments: list[str], folder: Path, **variables: str):
    """A command of the page, one thread in each process: threads of a busy machine wait long."""
    environment = os.environ | {"OMP_NUM_THREADS": "1"} | variables
    command = [sys.executable, *([script] if isinstance(script, Path) else ["-m", script])]
    return subprocess.run(
        [*command, *arguments],
        cwd=folder,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=100,
    )


def changed(old: str, new: str) -> str:
    assert SOURCE.count(old) == 1, f"nano.py has {SOURCE.count(old)} of: {old}"
    return SOURCE.replace(old, new)


@pytest.mark.parametrize("line", DIFFERENT.values())
def test_commands_run(line, tmp_path):
    words = shlex.split(line)
    variables = dict(word.split("=", 1) for word in words if re.match(r"[A-Z_]+=", word))
    program, *arguments = words[len(variables) :]
    if program == "pytest":  # exercises: the stub fails with its own error, and with no other
        (name,) = re.findall(r"-m (ex\d\d)", line)
        assert variables == {"IMPL": "exercises.mine"}
        arguments += ["-p", "no:cacheprovider"]
        done = run("pytest", arguments, ROOT, IMPL="exercises.stubs")
        assert done.returncode == 1 and "1 failed" in done.stdout, done.stdout
        assert f"E       NotImplementedError: {name}: " in done.stdout, done.stdout
        return
    script, *arguments = arguments
    arguments += SHORTER[script].split()
    done = run(ROOT / script, arguments, tmp_path, **variables)
    assert done.returncode == 0, done.stdout
    if script == "nano.py":
        assert "step  10 " in done.stdout, done.stdout
        assert (tmp_path / "nano.png").exists() == ("--race" in arguments)


@pytest.mark.parametrize("old, new", CHANGES)
def test_a_changed_nano_still_runs(old, new):
    module = types.ModuleType("changed")
    exec(compile(changed(old, new), "nano.py", "exec"), vars(module))
    sparse = old.startswith("TOP_K")
    args = argparse.Namespace(seed=0, sparse=sparse, steps=1, eta=2, devices=["cpu"])
    log = argparse.Namespace(spans=[], scores=[])
    module.train_sync(args, log)
    assert [span[0] for span in log.spans] == ["generating", "training"]


def test_a_broken_promise_stops_the_run(tmp_path):
    """The other one on the page stops it only where generation is ahead of learning."""
    ((old, new),) = [
        change for change in CHANGES if change[0].startswith("mailbox.publish(learner")
    ]
    (tmp_path / "nano.py").write_text(changed(old, new))
    done = run(tmp_path / "nano.py", ["--steps", "10"], tmp_path)
    assert TOO_OLD in SPANS and done.returncode == 1
    assert f"AssertionError: {TOO_OLD}" in done.stdout, done.stdout
