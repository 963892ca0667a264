"""A run on the nodes of a Ray cluster: three nodes on one machine, which lose what can be lost."""

import dataclasses
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

import train_async
from runtime import cluster
from runtime.config import Config, UserError, words
from runtime.folder import read_lines
from runtime.ledger import audit

ray = pytest.importorskip("ray")
ROOT = Path(__file__).resolve().parent.parent
SMALL = {"groups_per_step": 4, "group_size": 4, "slots": 16, "eval_every": 1000}
SMALL |= {"checkpoint_every": 4, "restarts": 20, "rollout_workers": 2}
MEMORY = {"object_store_memory": 100 << 20}
# Ray starts no process before it has work
NO_SPARES = {"prestart_worker_first_driver": False, "enable_worker_prestart": False}


@pytest.fixture(scope="module")
def nodes():
    """Three nodes; the first one is the parent's."""
    from ray.cluster_utils import Cluster

    head = {"num_cpus": 2, "_system_config": NO_SPARES, **MEMORY}
    cluster = Cluster(initialize_head=True, head_node_args=head)
    for _ in range(2):
        cluster.add_node(num_cpus=2, **MEMORY)
    yield cluster
    ray.shutdown()
    cluster.shutdown()


def start(address: str, **flags) -> subprocess.Popen:
    """A run as a process of its own."""
    command = [sys.executable, "train_async.py", *words({"cluster": address} | flags)]
    return subprocess.Popen(command, cwd=ROOT, stdout=-3, stderr=subprocess.PIPE, text=True)


def steps_of(folder: Path) -> int:
    path = folder / "metrics.jsonl"
    return len(path.read_text().splitlines()) - 1 if path.exists() else -1


def wait_for_step(process, folder: Path, step: int) -> None:
    """Until the run has made so many steps; AssertionError: it hangs, or has ended."""
    deadline = time.monotonic() + 400
    while steps_of(folder) < step:
        assert process.poll() is None, process.stderr.read()[-2000:]
        if time.monotonic() > deadline:
            process.kill()
            raise AssertionError(f"no step {step}: {process.stderr.read()[-2000:]}")
        time.sleep(0.05)


def workers_on(address: str) -> list[int]:
    """Processes of a cluster that run a worker: Ray gives them a title; the process that has
    started them, the node's, is told the address of the cluster."""
    lines, parents = {}, {}
    for path in Path("/proc").glob("[0-9]*"):
        try:
            lines[int(path.name)] = (path / "cmdline").read_text()
            parents[int(path.name)] = int((path / "stat").read_text().rpartition(")")[2].split()[1])
        except OSError:
            continue
    titled = [pid for pid, line in lines.items() if line.startswith("ray::run_worker")]
    return [pid for pid in titled if address in lines.get(parents[pid], "")]


def test_whatever_is_lost_the_run_ends(nodes, tmp_path):
    """Workers, a node, and at last the driver."""
    folder = tmp_path / "run"
    process = start(nodes.address, out=folder, steps=3000, **SMALL)
    wait_for_step(process, folder, 4)
    for victim in workers_on(nodes.address)[:2]:
        os.kill(victim, signal.SIGKILL)
    wait_for_step(process, folder, steps_of(folder) + 8)
    victim = list(nodes.worker_nodes)[0]  # not the one that is added, which has no workers yet
    nodes.add_node(num_cpus=2, **MEMORY)
    nodes.remove_node(victim, allow_graceful=False)
    wait_for_step(process, folder, steps_of(folder) + 12)
    deadline = time.monotonic() + 200
    while len(workers_on(nodes.address)) != 3:  # its workers sit elsewhere
        assert time.monotonic() < deadline, workers_on(nodes.address)
        time.sleep(0.2)
    process.kill()
    process.wait()
    deadline = time.monotonic() + 100
    while workers_on(nodes.address):
        assert time.monotonic() < deadline, "workers outlive the driver"
        time.sleep(0.2)
    version = int(sorted((folder / "checkpoints").glob("*.pt"))[-1].stem.removeprefix("step"))
    process = start(nodes.address, resume=folder, steps=version + 6)
    assert process.wait(400) == 0, process.stderr.read()
    summary = json.loads((folder / "summary.json").read_text())
    assert summary["steps"] == version + 6 and summary["staleness"]["max"] <= 2
    ledger = audit(folder)
    assert ledger.totals()["trained"] == 4 * (version + 6) and not ledger.flying
    events = read_lines(folder / "events.jsonl")
    exits = [e for e in events if e["kind"] == "exit" and e["reason"] != "end"]
    assert len(exits) >= 2, exits  # the node may have cost none, or several
    train_async.train(dataclasses.replace(Config(), replay=str(folder)))


def test_two_learners_meet_on_a_cluster(nodes, tmp_path):
    folder = tmp_path / "run"
    process = start(nodes.address, out=folder, steps=3, learners=2, **SMALL)
    assert process.wait(400) == 0, process.stderr.read()
    steps = [e for e in read_lines(folder / "events.jsonl") if e["kind"] == "train"]
    assert [step["learners"] for step in steps] == [2, 2, 2]
    train_async.train(dataclasses.replace(Config(), replay=str(folder)))


def test_bad_input_is_one_line(nodes, tmp_path, monkeypatch):
    def refused(**flags) -> str:
        folder = tmp_path / "run"
        flags = {"cluster": nodes.address, "steps": 2, "out": str(folder)} | SMALL | flags
        with pytest.raises(UserError) as error:
            train_async.train(dataclasses.replace(Config(), **flags))
        assert not folder.exists()
        return str(error.value)

    assert "must be local, or HOST:PORT" in refused(cluster="somewhere")
    assert "that answers (" in refused(cluster="127.0.0.1:9")
    text = refused(rollout_workers=40)
    assert "must have 41 CPUs, for 40 rollout workers and 1 others; it has " in text
    assert "must have 2 GPUs, for 2 rollout workers" in refused(device="cuda")
    monkeypatch.setattr(cluster, "ray", None)
    assert 'must have Ray (pip install "ray==' in refused()
