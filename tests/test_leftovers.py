"""What a test has started ends with it, also where it fails."""

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
from conftest import environment

HERE = Path(__file__).parent
FAILS = """
import os, signal, subprocess, sys, time

def test_fails_while_its_processes_run():
    sleep = [sys.executable, "-c", "import time; time.sleep(600)"]
    subprocess.Popen(sleep)
    subprocess.Popen(sleep, start_new_session=True)  # as `setsid`
    subprocess.run(["sh", "-c", f"{sleep[0]} -c 'import time; time.sleep(600)' & exit 0"])
    if not os.fork():
        time.sleep(600)
    time.sleep(0.5)
    assert False

def test_goes_on_after_it():
    pass
"""


@pytest.mark.skipif(sys.platform != "linux", reason="looks into /proc")
def test_no_process_is_left_by_a_test_that_fails(tmp_path):
    (tmp_path / "test_it.py").write_text(FAILS)
    word = f"LEFT_BY_{os.getpid()}_{time.monotonic_ns()}"
    command = [sys.executable, "-m", "pytest", "-q", "-p", "conftest", "-p", "no:cacheprovider"]
    done = subprocess.run(
        [*command, str(tmp_path / "test_it.py"), f"--rootdir={tmp_path}"],
        env=os.environ | {"PYTHONPATH": f"{HERE}:{HERE.parent}", word: "1"},
        stdout=subprocess.PIPE,
        text=True,
        timeout=120,
    )
    assert "1 failed, 1 passed" in done.stdout, done.stdout
    assert not [
        path for path in Path("/proc").glob("[0-9]*") if word.encode() in environment(path.name)
    ]
