"""A run on the nodes of a Ray cluster: three nodes on one machine, which lose what can be lost."""

import dataclasses
import json
import os
import signal
import threading
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
from cluster_faults import actors, everybody, gone, start, steps_of, wait_for_step
from toys import short_lived

import train_async
from runtime import cluster
from runtime.config import Config, UserError
from runtime.folder import read_lines
from runtime.ledger import audit
from runtime.pipes import start_here

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
    flags = {"cluster": nodes.address, "steps": 2} | SMALL | flags
    return dataclasses.replace(Config(), out=str(folder), **flags)


def checked(folder: Path, steps: int) -> list[dict]:
    """Its events; the run has all its steps, the ledger balances, a replay ends at its weights."""
    summary = json.loads((folder / "summary.json").read_text())
    assert summary["steps"] == steps and summary["staleness"]["max"] <= 2
    ledger = audit(folder)
    assert ledger.totals()["trained"] == 4 * steps and not ledger.flying
    train_async.train(dataclasses.replace(Config(), replay=str(folder)))
    return read_lines(folder / "events.jsonl")


class Deaf:
    """Ray, when no node answers."""

    exceptions = ray.exceptions

    def remote(self, **_):
        return lambda function: self

    def options(self, **_):
        return SimpleNamespace(remote=lambda root: None)

    def get(self, *_, **__):
        raise ray.exceptions.RayTaskError("facts_of_code", "", ValueError())


class Actor:
    """A worker on a node, for a `ray` whose `get` calls what it is given."""

    def __init__(self):
        self.said = [[b"hello"], [(3, b"ValueError: seven")]]

    def __getattr__(self, name: str):
        return SimpleNamespace(remote=lambda *what: lambda: self.answer(name))

    def answer(self, name: str):
        if name == "take":
            time.sleep(0.3)
            return self.said.pop(0)
        return {"node": "n", "begin": 17}.get(name)


def test_a_worker_that_dies_on_a_node_ends_its_pipe_at_once(tmp_path, monkeypatch):
    """Although a thread waits at the same end of it for what the worker shall be told."""
    alike = SimpleNamespace(get=lambda call: call(), kill=lambda actor: None)
    monkeypatch.setattr(cluster, "ray", alike)
    before = threading.active_count()
    mailboxes = SimpleNamespace(on=lambda node: "there")
    worker = cluster.Remote(Actor(), mailboxes, str(tmp_path / "log"), ("toy-0", None, 0, []))
    assert worker.connection.recv_bytes() == b"hello"
    assert worker.connection.poll(10.0)  # something has happened to it:
    with pytest.raises(EOFError):
        worker.connection.recv_bytes()
    assert worker.exitcode == 3 and (tmp_path / "log").read_text() == "ValueError: seven"
    deadline = time.monotonic() + 10.0
    while threading.active_count() > before:
        assert time.monotonic() < deadline, "a thread is left"
        time.sleep(0.01)


@pytest.mark.parametrize("leaves", [True, False])
def test_a_node_that_leaves_while_it_is_asked_is_no_mistake(leaves, monkeypatch):
    node = {"NodeID": "ab" * 28, "NodeManagerAddress": "192.0.2.7"}
    states = [[node], [node], [] if leaves else [node]]
    monkeypatch.setattr(cluster, "alive", lambda: states.pop(0) if len(states) > 1 else states[0])
    monkeypatch.setattr(cluster, "GONE_SECONDS", 0.6)
    monkeypatch.setattr(cluster, "ray", Deaf())
    if leaves:
        cluster.compare_nodes("--cluster here")
    else:
        with pytest.raises(UserError, match="node 192.0.2.7 .* must have code"):
            cluster.compare_nodes("--cluster here")


def test_whatever_is_lost_the_run_ends(nodes, tmp_path):
    """Seats, workers, a keeper, a node, and at last the driver; two learners meet over TCP."""
    folder = tmp_path / "run"
    process = start(nodes.address, out=folder, steps=3000, learners=2, **SMALL)
    wait_for_step(process, folder, 4)
    seats = actors("Seat", nodes.address)
    os.kill(list(seats)[0], signal.SIGKILL)
    os.kill(list(seats.values())[1][0], signal.SIGKILL)
    wait_for_step(process, folder, 12)
    os.kill(list(actors("Keeper", nodes.address))[0], signal.SIGKILL)
    wait_for_step(process, folder, 20)
    victim = list(nodes.worker_nodes)[0]  # not the one that is added, which has no workers yet
    nodes.add_node(num_cpus=3, object_store_memory=100 << 20)
    nodes.remove_node(victim, allow_graceful=False)
    before = steps_of(folder)
    wait_for_step(process, folder, before + 40)  # its workers sit elsewhere
    left = everybody(nodes.address)
    left = {*left, *sum(left.values(), [])}
    assert len(left) >= 10  # four workers beside their seats, two keepers
    process.kill()
    process.wait()
    gone(left)
    version = int(sorted((folder / "checkpoints").glob("*.pt"))[-1].stem.removeprefix("step"))
    process = start(nodes.address, resume=folder, steps=version + 60)
    wait_for_step(process, folder, version + 8, seconds=180.0)
    os.kill(list(actors("Seat", nodes.address))[0], signal.SIGKILL)
    assert process.wait(120) == 0, process.stderr.read()
    events = checked(folder, version + 60)
    exits = [e for e in events if e["kind"] == "exit" and e["reason"] != "end"]
    assert len(exits) >= 4, exits  # the keeper and the node may have cost none, or several
    gone(everybody(nodes.address))


def test_bad_input_is_one_line(nodes, tmp_path, monkeypatch):
    """Said by a process that has had workers of its own before."""
    process, _ = start_here("toy-0", short_lived, 0, str(tmp_path / "log"), [])
    process.join()
    alive = cluster.alive

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
    with monkeypatch.context() as patch:
        patch.setattr(cluster.torch, "__version__", "1.0")  # of this process alone
        assert "must have torch 1.0, has 2." in said()
    # from here on these two are known to pass, and take seconds
    monkeypatch.setattr(cluster, "trial", lambda address: "")
    monkeypatch.setattr(cluster, "compare_nodes", lambda name: None)
    assert "must have 41 CPUs, for 40 rollout workers and 1 others; it has 8" in said(
        rollout_workers=40
    )
    assert "must have 2 GPUs, for 2 rollout workers" in said(device="cuda")
    with monkeypatch.context() as patch:
        small = {"Resources": {"CPU": 2, "object_store_memory": 1000}}
        patch.setattr(cluster, "alive", lambda: [node | small for node in alive()])
        assert "must have 1.0 MB for two versions, has 0.0" in said()
    monkeypatch.setattr(cluster, "ray", None)
    assert 'must have Ray (pip install "ray==' in said()
