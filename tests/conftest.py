"""Shared by all tests: one thread (bitwise comparisons, two cores), and gpu tests that skip."""

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
