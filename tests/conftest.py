"""Shared by all tests: one thread (bitwise comparisons, two cores), and tests that skip where a
device or a compiler is missing.

With IMPL set (exercises/README.md), a learner's file is judged: only the exercises are collected.
"""

import os
import shutil
import signal

import pytest
import torch

IMPL = os.environ.get("IMPL")
if IMPL and not torch.cuda.is_available():  # a learner's kernels, seen directly and not in a child
    os.environ.setdefault("TRITON_INTERPRET", "1")


def pytest_configure(config):
    torch.set_num_threads(1)


def pytest_ignore_collect(collection_path):
    if IMPL and collection_path.suffix == ".py" and collection_path.name != "test_exercises.py":
        return True


def pytest_collection_modifyitems(items):
    items.sort(key=lambda item: item.name == "test_interpreter")  # the last to be looked at
    needs = {  # marker -> (whether it is there, what it is)
        "gpu": (torch.cuda.is_available(), "a CUDA device"),
        "compiles": (shutil.which(os.environ.get("CXX", "g++")), "a C++ compiler"),
    }
    for marker, (there, what) in needs.items():
        for item in items:
            if not there and item.get_closest_marker(marker):
                item.add_marker(pytest.mark.skip(reason=f"needs {what}"))


def pytest_collection_finish(session):
    """Interpreted kernels take a minute and a process of their own: beside all other tests."""
    for item in session.items:
        wanted = item.name == "test_interpreter" and not session.config.option.collectonly
        if wanted and os.environ.get("TRITON_INTERPRET") != "1":  # this may be that process itself
            session.config.interpreted = item.module.interpreted()


@pytest.fixture(autouse=True)
def handlers():
    """A trainer takes over Ctrl-C; give it back after each test."""
    saved = [(n, signal.getsignal(n)) for n in (signal.SIGINT, signal.SIGTERM)]
    yield
    for number, handler in saved:
        signal.signal(number, handler)
