"""A run on the nodes of a Ray cluster: three nodes on one machine, which lose what can be lost."""

import dataclasses
import json
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

import train_async
from runtime.config import Config, UserError
from runtime.folder import read_lines
from runtime.ledger import audit

ray = pytest.importorskip("ray")
ROOT = Path(__file__).resolve().parent.parent
SMALL = {"groups_per_step": 4, "group_size": 4, "slots": 16, "eval_every": 1000}
SMALL |= {"checkpoint_every": 4, "restarts": 20, "rollout_workers": 2}


@pytest.fixture(scope="module")
def nodes():
    """Three nodes; the first one is the parent's."""
    from ray.cluster_utils import Cluster

    memory = {"object_store_memory": 100 << 20}
    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 2, **memory})
    for _ in range(2):
        cluster.add_node(num_cpus=3, **memory)
    yield cluster
    ray.shutdown()
    cluster.shutdown()


def config_of(nodes, folder: Path, **flags) -> Config:
    flags = SMALL | flags
    return dataclasses.replace(Config(), cluster=nodes.address, out=str(folder), **flags)


def checked(folder: Path, steps: int) -> list[dict]:
    """Its events; the run has all its steps, the ledger balances, a replay ends at its weights."""
    summary = json.loads((folder / "summary.json").read_text())
    assert summary["steps"] == steps and summary["staleness"]["max"] <= 2
    _, ledger = audit(folder)
    assert ledger.totals()["trained"] == 4 * steps and not ledger.flying
    train_async.train(dataclasses.replace(Config(), replay=str(folder)))
    return read_lines(folder / "events.jsonl")


def when(folder: Path, step: int, then) -> threading.Thread:
    """Do something once a run has made so many steps."""

    def wait():
        path = folder / "metrics.jsonl"
        while not path.exists() or len(path.read_text().splitlines()) <= step:
            time.sleep(0.05)
        then()

    thread = threading.Thread(target=wait, daemon=True)
    thread.start()
    return thread


def pids_of(what: str) -> list[int]:
    """Processes whose title has this in it: Ray gives its actors one."""
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            if what in path.read_text():
                found.append(int(path.parent.name))
        except OSError:
            continue
    return found


def test_seats_keepers_and_nodes_may_be_lost(nodes, tmp_path):
    """And one is added; two learners, who meet over TCP."""
    folder, added = tmp_path / "run", []
    (victim,) = list(nodes.worker_nodes)[:1]

    def kill_seat():
        os.kill(pids_of("ray::Seat")[0], signal.SIGKILL)

    def kill_keeper():
        os.kill(pids_of("ray::Keeper")[0], signal.SIGKILL)

    def lose_node():
        added.append(nodes.add_node(num_cpus=3, object_store_memory=100 << 20))
        nodes.remove_node(victim, allow_graceful=False)

    threads = [when(folder, 4, kill_seat), when(folder, 12, kill_keeper)]
    threads.append(when(folder, 20, lose_node))
    train_async.train(config_of(nodes, folder, steps=200, learners=2))
    for thread in threads:
        thread.join(5)
    events = checked(folder, 200)
    exits = [e for e in events if e["kind"] == "exit" and e["reason"] != "end"]
    assert len(exits) >= 3, exits
    assert pids_of("ray::Seat") == pids_of("ray::Keeper") == []


def test_a_driver_that_is_killed_leaves_nothing_and_is_resumed(nodes, tmp_path):
    folder = tmp_path / "run"
    flags = [f"--{name.replace('_', '-')}={value}" for name, value in SMALL.items()]
    command = [sys.executable, "train_async.py", f"--out={folder}", "--steps=3000", *flags]
    command.append(f"--cluster={nodes.address}")
    process = subprocess.Popen(command, cwd=ROOT, stdout=-3, stderr=-3)
    when(folder, 6, process.kill).join(60)
    assert process.wait(10) == -signal.SIGKILL
    deadline = time.monotonic() + 20
    while pids_of("ray::Seat") or pids_of("ray::Keeper") or pids_of("multiprocessing.spawn"):
        assert time.monotonic() < deadline
        time.sleep(0.2)
    version = int(sorted((folder / "checkpoints").glob("*.pt"))[-1].stem.removeprefix("step"))
    flags = {"resume": str(folder), "steps": version + 5, "cluster": nodes.address}
    train_async.train(dataclasses.replace(Config(), **flags))
    checked(folder, version + 5)


def test_bad_input_is_one_line(nodes, tmp_path, monkeypatch):
    from runtime import cluster

    def said(**flags) -> str:
        folder = tmp_path / "run"
        begin = time.monotonic()
        with pytest.raises(UserError) as error:
            train_async.train(config_of(nodes, folder, **flags))
        assert not folder.exists() and time.monotonic() - begin < 40
        print(error.value)
        return str(error.value)

    assert "must be local, or HOST:PORT" in said(cluster="somewhere")
    assert "that answers (" in said(cluster="127.0.0.1:9")
    assert "must have 41 CPUs, for 40 rollout workers and 1 others; it has 8" in said(
        rollout_workers=40
    )
    assert "must have 2 GPUs, for 2 rollout workers" in said(device="cuda")
    assert "MB for two versions, has 100" in said(model="medium", task="sum", dtype="float32")
    real = cluster.facts_of_code
    monkeypatch.setattr(cluster, "facts_of_code", lambda root: real(root) | {"torch": "1.0"})
    assert "must have torch 1.0, has 2." in said()
    monkeypatch.undo()
    monkeypatch.setattr(cluster, "ray", None)
    assert 'must have Ray (pip install "ray==' in said()
