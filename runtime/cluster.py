"""cluster.py: the workers of a run on the nodes of a Ray cluster (`--cluster local`, or HOST:PORT).

Ray finds room and starts processes. Everything above stays as on one machine: the same pool, the
same messages, the same worker code. A worker is a task of Ray, in the main thread of a process of
its own; it dials back to the parent, and what passes then is the pipe of pipes.py. New weights are
put into Ray's object store once; an actor knows the newest, and each node fetches it once.
A worker whose process, node or connection is lost is replaced like any other. What a task of the
run has forked on a node may outlive it: Ray kills the worker alone.
Left out: who gets which work (pool.py), learners' own meetings, which are torch's (team.py).
"""

import contextlib
import dataclasses
import os
import signal
import socket
import threading
import time
from functools import partial
from multiprocessing.connection import Client, Listener
from pathlib import Path

import torch
from torch import Tensor

from fast.eightbit import Form, pack
from runtime.config import Config, blame, require
from runtime.devices import cores
from runtime.pipes import Line

try:
    import ray
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy as On
except ImportError:
    ray = None

LOOK_SECONDS = 0.02  # between two looks of a worker for newer weights


# --------------------------------------------------------------------------------- on the nodes


def run_worker(name: str, function, number: int, arguments: list, address: tuple, key: bytes):
    """A worker's process: dial back to the parent, and do the work."""
    os.environ.pop("OMP_NUM_THREADS", None)  # Ray's: the configuration decides
    connection = Client(address, authkey=key)
    connection.send(name)
    with contextlib.suppress(SystemExit):  # the end of the run, which is no error to Ray
        function(Line(connection, number), *arguments)


class Newest:
    """An actor: the newest version, and a box with the reference to its weights."""

    newest = -1, None

    def publish(self, *newest) -> None:
        self.newest = newest

    def read(self) -> tuple:
        return self.newest


class RemoteMailbox:
    """What a `Mailbox` is to a rollout worker, where the weights come from another machine."""

    def __init__(self, actor, dtype: torch.dtype, like: Tensor):
        self.actor, self.dtype, self.device = actor, dtype, like.device
        self.newest, self.looked = (-1, None), 0.0

    @property
    def version(self) -> int:
        """The newest version, as far as a look now and then tells."""
        if time.monotonic() - self.looked > LOOK_SECONDS:
            self.newest = ray.get(self.actor.read.remote())
            self.looked = time.monotonic()
        return self.newest[0]

    def read(self) -> tuple[int, Tensor]:
        """That version, and a private copy of its weights, as they have travelled."""
        version, box = self.newest
        flat = torch.frombuffer(ray.get(box[0]).copy(), dtype=self.dtype)
        return version, flat.to(self.device)


# ------------------------------------------------------------------------------- in the parent


def open_cluster(config: Config) -> Config:
    """Connect to the cluster; returns a config that says how many rollout workers it gets.

    UserError: it cannot be reached, or has too little room. Its nodes must have the same torch,
    which nobody looks at, and the same Python: Ray refuses another one.
    """
    name = f"--cluster {config.cluster}"
    require(ray, f'{name}: must have Ray (pip install "ray==2.60.0")')  # the one that was tried
    ray.shutdown()  # of an earlier run of this process
    options, others = {}, config.team_size - 1 + config.reward_workers
    if config.cluster == "local":  # a new one, whatever else runs here
        # with room for successors, too
        options["num_cpus"] = 2 * max(cores(), config.rollout_workers + others + 1)
        options["include_dashboard"] = False
    else:
        host, _, port = config.cluster.rpartition(":")
        needed = f"{name}: must be local, or HOST:PORT of a cluster that answers"
        with blame(needed, (OSError, ValueError)):  # Ray would wait for minutes
            socket.create_connection((host, int(port)), timeout=5.0).close()
    term = signal.getsignal(signal.SIGTERM)
    with blame(f"{name}: must be a Ray cluster that answers", (ConnectionError, RuntimeError)):
        ray.init(config.cluster, log_to_driver=False, logging_level="error", **options)
    signal.signal(signal.SIGTERM, term)  # Ray takes it
    unit = unit_of(config)
    has = int(ray.cluster_resources().get(unit, 0))
    if config.cluster == "local" and unit == "CPU":
        has //= 2  # the other half is for successors
    if unit == "GPU":
        others -= config.reward_workers
    rollouts = config.rollout_workers or max(1, has - others)
    must = f"{name}: must have {rollouts + others} {unit}s, for {rollouts} rollout workers"
    require(rollouts + others <= has, f"{must} and {others} others; it has {has}")
    return dataclasses.replace(config, rollout_workers=rollouts)


def unit_of(config: Config) -> str:
    """What rollout workers and learners need one of."""
    gpus = config.device != "cpu" and ray.cluster_resources().get("GPU")
    return "GPU" if gpus or config.device.startswith("cuda") else "CPU"


class ClusterMailbox:
    """What a `Mailbox` is to a trainer; and it starts workers, for a pool."""

    def __init__(self, form: Form, config: Config):
        self.unit, self.form, self.version = unit_of(config), form, -1
        here = On(ray.get_runtime_context().get_node_id(), soft=False)  # it dies with the parent
        self.actor = ray.remote(num_cpus=0, scheduling_strategy=here)(Newest).remote()
        self.reader = partial(RemoteMailbox, self.actor, form.dtype)  # for rollout workers
        self.key = os.urandom(16)
        self.listener = Listener((ray.util.get_node_ip_address(), 0), authkey=self.key)
        self.remotes = {}  # name -> its newest process
        threading.Thread(target=self._accept, daemon=True).start()

    def publish(self, version: int, flat: Tensor) -> None:
        """Put weights [P] into the object store; it waits for no node and no reader."""
        packed = pack(flat.detach(), self.form).to("cpu")
        box = [ray.put(packed.view(torch.uint8).numpy())]
        self.version = version  # before anybody can read it: what they answer is compared with this
        ray.get(self.actor.publish.remote(version, box))

    def start(self, name: str, function, number: int, log: str, arguments: list) -> "Remote":
        """A worker where there is room; Ray looks for it, and nobody waits here."""
        gpus = int(self.unit == "GPU" and not name.startswith("reward"))
        options = {"max_calls": 1, "max_retries": 0, "scheduling_strategy": "SPREAD"}
        task = ray.remote(num_cpus=1 - gpus, num_gpus=gpus, **options)
        given = name, function, number, arguments, self.listener.address, self.key
        self.remotes[name] = Remote(name, log, task(run_worker).remote(*given))
        return self.remotes[name]

    def _accept(self) -> None:
        """A thread: workers dial back."""
        while self.key:
            # somebody without the key may dial, or one that dies at once
            with contextlib.suppress(Exception):
                connection = self.listener.accept()
                self.remotes[connection.recv()].connection = connection

    def meeting_address(self) -> str:
        """Where learners of several nodes find each other: a free port of this one."""
        with socket.socket() as free:
            free.bind(("", 0))
            return f"tcp://{ray.util.get_node_ip_address()}:{free.getsockname()[1]}"

    def close(self) -> None:
        """The end of the run, and of its time with the cluster."""
        self.key = None
        self.listener.close()
        ray.shutdown()


class Remote:
    """A worker on some node; to the pool it is a process."""

    def __init__(self, name: str, log: str, task):
        self.name, self.log, self.task = name, log, task
        self.exitcode = self.connection = None  # it has not dialled yet
        self.pid = 0  # of another machine: it says nothing here

    def kill(self) -> None:
        if self.exitcode is None:  # to cancel what has just ended can abort Ray, and this process
            with contextlib.suppress(Exception):  # it may be gone, and Ray, too
                ray.cancel(self.task, force=True)

    def join(self, timeout: float) -> None:
        """Wait for its end; what it died of goes into its log."""
        try:
            ray.get(self.task, timeout=timeout)
            self.exitcode = 0
        except ray.exceptions.GetTimeoutError:
            pass
        except Exception as error:  # its own, or Ray's
            self.exitcode = 1
            Path(self.log).write_text(f"{error}"[-10000:])
