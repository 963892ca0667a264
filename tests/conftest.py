"""Shared by all tests: one thread (bitwise comparisons, two cores), and gpu tests that skip."""

import os
import signal

import pytest
import torch


def pytest_configure(config):
    torch.set_num_threads(1)


def pytest_collection_modifyitems(items):
    items.sort(key=lambda item: item.name == "test_interpreter")  # the last to be looked at
    if torch.cuda.is_available():
        return
    skip = pytest.mark.skip(reason="needs a CUDA device")
    for item in items:
        if item.get_closest_marker("gpu"):
            item.add_marker(skip)


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
