"""Shared by all tests: one thread (bitwise comparisons, two cores), and gpu tests that skip."""

import signal

import pytest
import torch


def pytest_configure(config):
    torch.set_num_threads(1)


def pytest_collection_modifyitems(items):
    if torch.cuda.is_available():
        return
    skip = pytest.mark.skip(reason="needs a CUDA device")
    for item in items:
        if item.get_closest_marker("gpu"):
            item.add_marker(skip)


@pytest.fixture(autouse=True)
def handlers():
    """A trainer takes over Ctrl-C; give it back after each test."""
    saved = [(n, signal.getsignal(n)) for n in (signal.SIGINT, signal.SIGTERM)]
    yield
    for number, handler in saved:
        signal.signal(number, handler)
