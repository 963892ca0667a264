"""The exercises' tests have teeth: every stub fails its test, and so do typical wrong solutions.

A stub fails with exactly its NotImplementedError; a wrong solution with an AssertionError that
names the mistake. Those of kernels run interpreted, in a process of their own.
"""

import inspect
import os
import re
import subprocess
import sys
from pathlib import Path

import adapters
import pytest
import torch
from test_exercises import EXERCISES, MISTAKES, check

from exercises import stubs

ROOT = Path(__file__).parent.parent
KERNELS = ("ex17", "ex18")
WRONG = [
    pytest.param(name, wrong, hint, marks=getattr(pytest.mark, name), id=f"{name} {hint[:50]}")
    for name, mistakes in MISTAKES.items()
    for hint, wrong in mistakes.items()
]


@pytest.mark.parametrize("name", EXERCISES)
def test_the_stub_fails_with_its_own_error(name):
    with pytest.raises(NotImplementedError, match=f"^{name}: "):
        check(name, getattr(stubs, adapters.NAMES[name]))


@pytest.mark.parametrize("name, wrong, hint", WRONG)
def test_a_typical_wrong_solution_is_caught_by_name(name, wrong, hint):
    with pytest.raises(AssertionError, match=re.escape(hint)):
        check(name, wrong)


@pytest.mark.parametrize("name", EXERCISES)
def test_the_stub_has_the_signature_of_the_projects_function(name):
    stub, own = getattr(stubs, adapters.NAMES[name]), adapters.project(name)
    described = [
        {p.name: p.default for p in inspect.signature(function).parameters.values()}
        for function in (stub, own)
    ]
    assert described[0] == described[1] and list(described[0]) == list(described[1])


def test_every_exercise_has_a_wrong_solution_a_stub_and_a_place_in_the_readme():
    text = (ROOT / "exercises/README.md").read_text()
    assert set(MISTAKES) == set(adapters.NAMES)
    defined = [name for name, _ in inspect.getmembers(stubs, inspect.isfunction)]
    assert sorted(defined) == sorted(adapters.NAMES.values())
    for name, function in adapters.NAMES.items():
        assert re.search(rf"^## {name} .*`{function}`", text, re.MULTILINE), name
        assert re.search(rf"^\| {name} \|", text, re.MULTILINE), f"{name} is not in the ladder"


def test_the_readme_names_the_projects_solutions_where_they_are():
    """Read as "`one`, `two` and `three` in `file.py`"."""
    text, found = (ROOT / "exercises/README.md").read_text(), 0
    for names, path in re.findall(r"((?:`[\w.]+`(?:,| and)?\s)+)in\s`([\w/]+\.py)`", text):
        source = (ROOT / path).read_text()
        for name in re.findall(r"`(?:\w+\.)?(\w+)`", names):
            assert re.search(rf"^ *(def|class) {name}\b", source, re.MULTILINE), (name, path)
            found += 1
    assert found > len(adapters.NAMES)


@pytest.mark.ex17
@pytest.mark.ex18
def test_kernels_interpreted():
    """Both kernel exercises, their stubs and their wrong solutions, in one child process."""
    if os.environ.get("TRITON_INTERPRET") == "1" or torch.cuda.is_available():
        pytest.skip("the kernel exercises run in this very process")
    pytest.importorskip("triton", reason="Triton is not installed")
    here = Path(__file__).parent
    files = [str(here / "test_exercises.py"), str(here / "test_stubs.py")]
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-rs", "-m", "ex17 or ex18", *files]
    environment = os.environ | {"TRITON_INTERPRET": "1"}
    done = subprocess.run(
        command, env=environment, cwd=ROOT, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stdout + done.stderr
    if "the interpreter of Triton 3.6" in done.stdout:
        pytest.skip("the interpreter of Triton 3.6 cannot loop with numpy >= 2.4")
    passed = int(re.search(r"(\d+) passed", done.stdout)[1])
    wrong = sum(len(MISTAKES[name]) for name in KERNELS)
    assert passed == 3 * len(KERNELS) + wrong, done.stdout
