"""Runs on three Ray nodes of this machine that lose what can be lost: `python bench.py cluster`.

Each run is a process, the driver. At random steps the process of a worker or of its actor is killed
or stopped, so is a keeper of weights; a node is removed and another one added; the driver itself is
killed and resumed. `judged` (faults.py) says what became of every prompt.
"""

import json
import os
import random
import signal
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path

from faults import judged
from tqdm import tqdm

from runtime.config import words

ROOT = Path(__file__).resolve().parent.parent
MEMORY = {"object_store_memory": 100 << 20}
KINDS = ("worker", "actor", "actor stopped", "keeper", "node", "driver")
FLAGS = {"groups_per_step": 4, "group_size": 4, "slots": 16, "eval_every": 1000, "restarts": 50}
FLAGS |= {"checkpoint_every": 4, "rollout_workers": 4, "reward_workers": 2, "silence": 10.0}
FLAGS |= {"steps": 400, "reward_seconds": 1.0}


def new_cluster():
    """Three nodes; the first one is the driver's."""
    from ray.cluster_utils import Cluster

    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 4, **MEMORY})
    for _ in range(2):
        cluster.add_node(num_cpus=4, **MEMORY)
    return cluster


def start(address: str, **flags) -> subprocess.Popen:
    """A run as a process of its own."""
    flags |= {"cluster": address}
    options = words(flags)
    command = [sys.executable, "train_async.py", *options]
    return subprocess.Popen(command, cwd=ROOT, stdout=-3, stderr=subprocess.PIPE, text=True)


def steps_of(folder: Path) -> int:
    """How many steps a run has made."""
    path = folder / "metrics.jsonl"
    return len(path.read_text().splitlines()) - 1 if path.exists() else -1


def wait_for_step(process, folder: Path, step: int, seconds: float = 90.0) -> None:
    """Until the run has made so many steps; AssertionError: it hangs, or has ended."""
    deadline = time.monotonic() + seconds
    while steps_of(folder) < step:
        assert process.poll() is None, process.stderr.read()[-2000:]
        if time.monotonic() > deadline:
            process.kill()
            raise AssertionError(f"no step {step}: {process.stderr.read()[-2000:]}")
        time.sleep(0.05)


def actors(kind: str, address: str) -> dict[int, list[int]]:
    """The processes of actors of a cluster, with their children. Ray gives them a title; the
    process that has started them, the node's, is told the address of the cluster."""
    lines, parents = {}, {}
    for path in Path("/proc").glob("[0-9]*"):
        try:
            lines[int(path.name)] = (path / "cmdline").read_text()
            parents[int(path.name)] = int((path / "stat").read_text().rpartition(")")[2].split()[1])
        except OSError:
            continue
    found = [pid for pid, line in lines.items() if line.startswith(f"ray::{kind}")]
    found = [pid for pid in found if address in lines.get(parents[pid], "")]
    return {pid: [child for child, parent in parents.items() if parent == pid] for pid in found}


def everybody(address: str) -> dict[int, list[int]]:
    """All of them."""
    return actors("Seat", address) | actors("Keeper", address)


def gone(pids) -> None:
    """Within a moment these processes have ended."""
    deadline = time.monotonic() + 20
    while left := {pid for pid in pids if Path(f"/proc/{pid}").exists()}:
        assert time.monotonic() < deadline, left
        time.sleep(0.2)


def strike(kind: str, cluster, choose: random.Random) -> None:
    """One loss, but that of the driver."""
    if kind == "node":
        victim = choose.choice(list(cluster.worker_nodes))  # not the one that is added
        cluster.add_node(num_cpus=4, **MEMORY)
        cluster.remove_node(victim, allow_graceful=False)
        return
    found = actors("Keeper" if kind == "keeper" else "Seat", cluster.address)
    pids = list(found) if kind != "worker" else sum(found.values(), [])
    number = signal.SIGSTOP if kind == "actor stopped" else signal.SIGKILL
    os.kill(choose.choice(pids), number)


def run_once(cluster, folder: Path, plan: list, choose: random.Random, **flags) -> dict:
    """A run with a loss every few steps, and again after the loss of its driver."""
    flags, begin, seconds = {**FLAGS, **flags}, time.monotonic(), []
    (folder / "faults").mkdir(parents=True)
    (folder / "faults" / "plan.json").write_text("[]")
    process = start(cluster.address, out=folder / "run", **flags)
    for kind in plan:
        wait_for_step(process, folder / "run", steps_of(folder / "run") + choose.randrange(5, 15))
        left, before, struck = everybody(cluster.address), 0, time.monotonic()
        if kind == "driver":
            process.kill()
            process.communicate()
            gone({*left, *sum(left.values(), [])})
            process = start(cluster.address, resume=folder / "run")
        else:
            strike(kind, cluster, choose)
        before = steps_of(folder / "run")
        wait_for_step(process, folder / "run", before + 3)
        seconds.append([kind, round(time.monotonic() - struck, 2)])
    _, said = process.communicate(timeout=300)
    assert process.returncode == 0, said[-2000:]
    gone(everybody(cluster.address))
    result = judged(folder / "run", folder, flags)
    names = ("lost", "duplicated", "staleness", "requeued", "replayed")
    solved = json.loads((folder / "run" / "summary.json").read_text())["eval"]["after"]["solved"]
    found = {"solved": solved, "losses": seconds, "seconds": time.monotonic() - begin}
    return {name: result[name] for name in names} | found


def losses_of_a_cluster(folder: Path, losses: int, seed: int = 0):
    """Runs with 6 losses each, of every kind in turn, until there were enough; yields the result
    so far."""
    choose, runs, failures = random.Random(seed), [], []
    progress = tqdm(total=losses, unit="loss")
    while sum(len(run["losses"]) for run in runs) < losses and len(failures) < 5:
        cluster = new_cluster()
        plan = choose.sample(KINDS, len(KINDS))
        try:
            place = folder / f"{len(runs) + len(failures)}"
            runs.append(run_once(cluster, place, plan, choose, seed=len(runs)))
            progress.update(len(plan))
        except (AssertionError, ValueError, subprocess.TimeoutExpired) as error:
            failures.append({"said": str(error), "plan": plan})
            tqdm.write(f"FAILED: {error}; {plan}")
        finally:
            cluster.shutdown()
        kinds = Counter(kind for run in runs for kind, _ in run["losses"])
        facts = {
            name: sum(run[name] for run in runs) for name in ("lost", "duplicated", "requeued")
        }
        yield {"losses": kinds.total(), "kinds": kinds, **facts, "failures": failures, "runs": runs}
    progress.close()
