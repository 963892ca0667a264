"""Shared by all tests: one thread (bitwise comparisons, two cores), tests that skip where no CUDA
device is, and an end for every process that a test has started.

With IMPL set (exercises/README.md), a learner's file is judged: only the exercises are collected.
"""

import importlib.util
import itertools
import os
import signal
import tempfile
import time
from contextlib import suppress
from multiprocessing import resource_tracker
from pathlib import Path

import pytest
import torch

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT)
for number in SIGNALS:  # a script's background ignores SIGINT, nohup SIGHUP: children would, too
    if signal.getsignal(number) is signal.SIG_IGN:
        ours = signal.default_int_handler if number == signal.SIGINT else lambda *_: None
        signal.signal(number, ours)  # a handler is not inherited

if not os.access(Path.home(), os.W_OK):  # where Triton keeps what it has compiled
    os.environ.setdefault("TRITON_CACHE_DIR", tempfile.mkdtemp(prefix="triton-"))

IMPL = os.environ.get("IMPL")
LONG = (  # the longest tests: they begin first, two of them in each process
    "test_interpreter",
    "test_kill_9_of_the_whole_run_then_ctrl_c_then_the_end",
    "test_a_run_survives_what_befalls_it",
    "test_staleness_is_bounded_and_nothing_is_lost",
    "test_every_child_may_be_killed",
    "test_staleness_zero_is_bitwise_the_synchronous_algorithm",
    "test_late_evaluations_say_the_same_about_the_same_moments",
)
if IMPL and not torch.cuda.is_available():  # a learner's kernels, seen directly and not in a child
    os.environ.setdefault("TRITON_INTERPRET", "1")


@pytest.hookimpl(tryfirst=True)
def pytest_cmdline_main(config):
    """The whole suite runs on two cores at once, where pytest-xdist is installed."""
    whole = config.args_source is pytest.Config.ArgsSource.TESTPATHS and not IMPL
    whole = whole and "PYTEST_XDIST_WORKER" not in os.environ  # or each of the two would have two
    if whole and config.pluginmanager.hasplugin("xdist") and config.option.numprocesses is None:
        if not (config.option.usepdb or config.option.collectonly):
            config.option.numprocesses = 2
            config.option.maxschedchunk = 2  # tests are handed out two at a time, long ones, too


def pytest_configure(config):
    torch.set_num_threads(1)
    if config.option.markexpr != "gpu" and not IMPL:  # bitwise comparisons are of the CPU
        os.environ["CUDA_VISIBLE_DEVICES"] = ""
    config.mark = add_mark("session")
    if os.environ.get("TRITON_INTERPRET") == "1" and importlib.util.find_spec("triton"):
        quick = importlib.import_module("quick_interpreter")
        quick.install()


def pytest_unconfigure(config):
    end_all(config.mark)


def pytest_ignore_collect(collection_path):
    if IMPL and collection_path.suffix == ".py" and collection_path.name != "test_exercises.py":
        return True


def pytest_collection_modifyitems(items):
    rank = {name: place for place, name in enumerate(LONG)}
    # A process that has used Ray cannot become a run, as in tests of folders: these come before it.
    for place, stem in enumerate(("test_folder", "test_cluster"), len(LONG)):
        rank |= {item.originalname: place for item in items if item.path.stem == stem}
    items.sort(key=lambda item: rank.get(item.originalname, len(LONG) + 2))
    if not torch.cuda.is_available():
        for item in items:
            if item.get_closest_marker("gpu"):
                item.add_marker(pytest.mark.skip(reason="needs a CUDA device, and -m gpu"))


@pytest.fixture(autouse=True)
def gpu_memory():
    """Several processes may share a GPU: what a test has used goes back at once."""
    yield
    if torch.cuda.is_initialized():
        torch.cuda.empty_cache()


@pytest.fixture(autouse=True)
def one_thread():
    """A trainer sets the threads of its process: give them back before each test."""
    torch.set_num_threads(1)


@pytest.fixture(autouse=True)
def handlers():
    """A trainer takes over Ctrl-C; give it back after each test."""
    saved = [(n, signal.getsignal(n)) for n in SIGNALS]
    yield
    for number, handler in saved:
        signal.signal(number, handler)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item):
    report = yield
    item.failed = report.failed or getattr(item, "failed", False)
    return report


@pytest.fixture(autouse=True)
def processes(request):
    """Whatever a failing test has started ends with it, also what has left its session or lost its
    parent: children inherit a mark in their environment. Forks of this process are its children."""
    outer, older = os.environ[MARK], children()
    mark = add_mark(f"test {next(COUNT)}")
    yield
    os.environ[MARK] = outer
    if request.node.failed:
        end_all(mark, older)


MARK, COUNT = "NANOGLM_STARTED_BY", itertools.count()


def add_mark(name: str) -> str:
    """Children from now on carry this mark, beside those that this process has inherited."""
    os.environ[MARK] = mark = f"{os.environ.get(MARK, '')}{os.getpid()} {name};"
    return mark


def children() -> set[int]:
    """Direct children of this process that live."""
    found = Path("/proc/self/task").glob("*/children")
    return {int(pid) for path in found for pid in path.read_text().split() if environment(pid)}


def environment(pid: str | int) -> bytes:
    """Of a process as it was started; of another user's nothing, nor of one that has ended."""
    with suppress(OSError):
        return Path(f"/proc/{pid}/environ").read_bytes()
    return b""


def end_all(mark: str, older: set[int] | None = None) -> None:
    """Kill every process with this mark, and the children of this process that are not `older`.
    Whoever has started them may wait for them still."""
    kept = {os.getpid(), resource_tracker._resource_tracker._pid}  # serves later tests, too
    deadline = time.monotonic() + 10
    while left := (marked(mark) | (set() if older is None else children() - older)) - kept:
        assert time.monotonic() < deadline, f"{left} do not end"
        for pid in left:
            with suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.01)


def marked(mark: str) -> set[int]:
    """Processes that live and have this mark in their environment."""
    pids = {int(path.name) for path in Path("/proc").glob("[0-9]*")}
    return {pid for pid in pids if f"{MARK}={mark}".encode() in environment(pid)}
