"""cluster.py: the workers of a run on the nodes of a Ray cluster (`--cluster local`, or HOST:PORT).

Ray places, connects, and tells who is dead. Everything above stays as on one machine: the same
pool, the same messages, the same worker code. A worker is an actor, its `Seat`, that starts the
worker's process beside itself and carries deliveries between it and the parent. A `Keeper` on every
node has the node's mailbox: the parent puts a version into Ray's object store once, Ray brings it
to each node once, and the workers of a node read it from the shared memory of their keeper.
When a seat dies, its worker dies with it; when a keeper dies, the workers of its node are replaced.
Left out: who gets which work (processes.py), learners' own meetings, which are torch's (team.py).
"""

import contextlib
import dataclasses
import errno
import hashlib
import os
import platform
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import warnings
from multiprocessing import Pipe
from pathlib import Path
from queue import SimpleQueue

import torch
from torch import Tensor

from fast.eightbit import Form, pack
from runtime.config import Config, require
from runtime.devices import cores
from runtime.mailbox import Mailbox
from runtime.pipes import END, next_delivery, start_here

try:
    import ray
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy as On
except ImportError:
    ray = None

VERSION = "2.60.0"  # the one that was tried
ROOT = Path(__file__).resolve().parent.parent
KEPT = "the mailbox of the node"  # stands for its place among the arguments of a worker
ANSWER_SECONDS = 15.0  # so long a cluster may take to answer at the beginning
GONE_SECONDS = 30.0  # ... and to notice that a node has left


# --------------------------------------------------------------------------------- on the nodes


class Seat:
    """An actor: one worker's process on the actor's node, and what it says."""

    def __init__(self):
        self.said = SimpleQueue()
        os.environ.pop("OMP_NUM_THREADS", None)  # Ray's: --threads decides

    def node(self) -> str:
        return ray.get_runtime_context().get_node_id()

    def begin(self, *what) -> int:
        """Start the process; returns its id. what: name, function, number, arguments."""
        started = SimpleQueue()
        threading.Thread(target=self._run, args=(started, *what), daemon=True).start()
        return started.get()

    def _run(self, started: SimpleQueue, name: str, function, number: int, arguments: list) -> None:
        """A thread that lives as long as the process, which would die with it."""
        with tempfile.TemporaryFile() as log:  # it has no name: nothing is left behind
            place = f"/proc/{os.getpid()}/fd/{log.fileno()}"
            process, self.connection = start_here(
                name, function, number, place, arguments, arenas=False
            )
            started.put(process.pid)
            while delivery := next_delivery(self.connection):
                self.said.put(delivery)
            process.join()
            self.said.put((process.exitcode, log.read()[-10000:]))

    def put(self, delivery: bytes) -> None:
        """For the process; blocks while it does not read."""
        self.connection.send_bytes(delivery)

    def take(self) -> list:
        """What the process has said, at least one delivery; at its end: exit code and log."""
        found = [self.said.get()]
        while not self.said.empty():
            found.append(self.said.get())
        return found


class Keeper:
    """An actor: the newest weights in the shared memory of its node."""

    def __init__(self, form: Form):
        warnings.filterwarnings("ignore", message="The given buffer is not writable")
        self.form = form._replace(parts=())  # what comes is packed already
        self.mailbox = Mailbox(torch.empty(0), form=self.form)

    def place(self) -> str:
        return self.mailbox.place

    def publish(self, version: int, box: list) -> None:
        """box: the reference to the weights; they are read where Ray has them, without a copy."""
        if version > self.mailbox.version:
            self.mailbox.publish(version, torch.frombuffer(ray.get(box[0]), dtype=self.form.dtype))


def facts_of_code(root: str) -> dict:
    """What must be the same on all nodes."""
    digest = hashlib.sha256()
    for path in sorted(Path(root).rglob("*.py")):
        if not {"runs", "tests", "exercises"} & {*path.relative_to(root).parts}:
            digest.update(path.read_bytes())
    versions = {"Python": platform.python_version(), "torch": torch.__version__.split("+")[0]}
    return {"code": f"{digest.hexdigest()[:12]} in {root}", **versions}


# ------------------------------------------------------------------------------- in the parent


def open_cluster(config: Config) -> Config:
    """Connect to the cluster; returns a config that says how many rollout workers it gets.
    UserError: it cannot be reached, has too little room, or its nodes are not alike."""
    name = f"--cluster {config.cluster}"
    require(ray, f'{name}: must have Ray (pip install "ray=={VERSION}")')
    ray.shutdown()  # of an earlier run of this process
    if config.cluster == "local":
        rollouts = config.rollout_workers or max(1, cores() - config.team_size)
        config = dataclasses.replace(config, rollout_workers=rollouts)
        wanted = rollouts + config.team_size + config.reward_workers
        # a new one, whatever else runs here; with room for successors, too
        connect(address="local", num_cpus=2 * wanted, include_dashboard=False)
    else:
        wrong = trial(config.cluster)
        needed = f"{name}: must be local, or HOST:PORT of a cluster that answers"
        require(not wrong, f"{needed} ({wrong:.200})")
        connect(address=config.cluster)
    compare_nodes(name)
    return with_room(config, name)


def trial(address: str) -> str:
    """What keeps a process from joining the cluster; '' if nothing does. Another process tries: Ray
    itself waits for minutes where something else listens, and may end who waits."""
    code = "import sys, ray; ray.init(sys.argv[1], log_to_driver=False, logging_level='error')"
    command = [sys.executable, "-c", code, address]
    try:
        subprocess.run(command, check=True, capture_output=True, timeout=ANSWER_SECONDS)
    except subprocess.TimeoutExpired:
        return f"no answer in {ANSWER_SECONDS:.0f} s"
    except subprocess.CalledProcessError as error:
        return error.stderr.decode(errors="replace").strip().rpartition("\n")[2]
    return ""


def connect(**options) -> None:
    """Join the cluster as its driver. Signal handlers stay as they are: Ray would take SIGTERM."""
    handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    ray.init(log_to_driver=False, logging_level="error", **options)
    for number, handler in handlers.items():
        signal.signal(number, handler)


def compare_nodes(name: str) -> None:
    """UserError that names the first node whose code or libraries are not this process's."""
    here, look = facts_of_code(str(ROOT)), ray.remote(num_cpus=0)(facts_of_code)
    nodes = alive()
    places = [On(node["NodeID"], soft=False) for node in nodes]
    found = [look.options(scheduling_strategy=place).remote(str(ROOT)) for place in places]
    for node, there in zip(nodes, found, strict=True):
        try:
            facts = ray.get(there, timeout=60)
        except ray.exceptions.RayError as error:
            if is_gone(node):
                continue
            facts = {"code": f"none that it can read ({type(error).__name__})"}
        where = f"node {node['NodeManagerAddress']} ({node['NodeID'][:8]})"
        for what, value in facts.items():
            said = f"{name}: {where} must have {what} {here[what]}, has {value}"
            require(value == here[what], said)


def is_gone(node: dict) -> bool:
    """Whether a node that cannot be asked has left; Ray notices that after some seconds."""
    deadline = time.monotonic() + GONE_SECONDS
    while node["NodeID"] in [other["NodeID"] for other in alive()]:
        if time.monotonic() > deadline:
            return False
        time.sleep(0.5)
    return True


def alive() -> list[dict]:
    """The nodes of the cluster."""
    return [node for node in ray.nodes() if node["Alive"]]


def with_room(config: Config, name: str) -> Config:
    """UserError when the cluster has too few CPUs or GPUs for the workers that are asked for."""
    kind = kind_of(config)
    has, others = int(ray.cluster_resources().get(kind, 0)), config.team_size - 1
    if kind == "CPU":
        others += config.reward_workers
    rollouts = config.rollout_workers or max(1, has - others)
    needed = f"{name}: must have {rollouts + others} {kind}s, for {rollouts} rollout workers"
    require(rollouts + others <= has, f"{needed} and {others} others; it has {has}")
    return dataclasses.replace(config, rollout_workers=rollouts)


def kind_of(config: Config) -> str:
    """What rollout workers and learners need one of."""
    gpus = config.device != "cpu" and ray.cluster_resources().get("GPU")
    return "GPU" if gpus or config.device.startswith("cuda") else "CPU"


class Mailboxes:
    """What a `Mailbox` is to a trainer, where every node has its own."""

    place = KEPT

    def __init__(self, form: Form, config: Config):
        """Every node that may have workers gets a mailbox for such weights; OSError names the one
        that has no room."""
        self.kind, self.form = kind_of(config), form
        self.news, self.version, self.box = threading.Condition(), -1, None
        self.keepers = {}  # node -> keeper
        self.closed, self.workers, self.threads = False, [], []
        self.nbytes = form.size * form.dtype.itemsize  # of one version
        for node in alive():
            has = node["Resources"].get("object_store_memory", 0)
            said = f"node {node['NodeManagerAddress']} must have {2e-6 * self.nbytes:.1f} MB "
            if has < 2 * self.nbytes:
                raise OSError(errno.ENOMEM, f"{said}for two versions, has {1e-6 * has:.1f}")
            if node["Resources"].get(self.kind):
                try:
                    self.on(node["NodeID"])
                except ray.exceptions.RayError as error:
                    raise OSError(errno.ENOMEM, f"{said}of shared memory ({error})") from error

    def publish(self, version: int, flat: Tensor) -> None:
        """Put weights [P] into the object store; it waits for no node and no reader."""
        assert version > self.version, f"version {version} published after {self.version}"
        packed = pack(flat.detach(), self.form).to("cpu")
        box = [ray.put(packed.view(torch.uint8).numpy())]
        with self.news:
            self.version, self.box = version, box
            self.news.notify_all()

    def on(self, node: str) -> str:
        """The place of a node's mailbox; a new node gets a keeper."""
        with self.news:
            if node not in self.keepers:
                keeper = ray.remote(num_cpus=0, max_concurrency=2)(Keeper)
                keeper = keeper.options(scheduling_strategy=On(node, soft=False))
                self.keepers[node] = keeper.remote(self.form)
                self.threads.append(threading.Thread(target=self._feed, args=(node,), daemon=True))
                self.threads[-1].start()
            keeper = self.keepers[node]
        return ray.get(keeper.place.remote())

    def _feed(self, node: str) -> None:
        """A thread for each keeper: sends it the newest version, and leaves out what it has missed;
        every second it sends again, to see whether the keeper lives."""
        keeper, version = self.keepers[node], -1
        try:
            while not self.closed:
                with self.news:
                    if self.version == version:
                        self.news.wait(1.0)
                    version, box = self.version, self.box
                ray.get(keeper.publish.remote(version, box))
        except Exception as error:  # its workers would go on with old weights
            with self.news:
                self.keepers.pop(node)
                orphans = [worker for worker in self.workers if worker.node == node]
            if self.closed:
                return
            sys.stderr.write(f"the keeper of node {node[:8]} is lost: {error!r:.200}\n")
            for worker in orphans:
                worker.kill()

    def start(self, name: str, function, number: int, log: str, arguments: list) -> tuple:
        """A worker where there is room, for a pool; Ray looks for it, and nobody waits here."""
        gpu = self.kind == "GPU" and not name.startswith("reward")
        needs = {"num_cpus": 0 if gpu else 1, "num_gpus": 1 if gpu else 0}
        seat = ray.remote(max_concurrency=4, scheduling_strategy="SPREAD", **needs)(Seat)
        worker = Remote(seat.remote(), self, log, (name, function, number, arguments))
        self.workers.append(worker)
        return worker, worker.connection

    def meeting_address(self) -> str:
        """Where learners of several nodes find each other: a free port of this one."""
        with socket.socket() as free:
            free.bind(("", 0))
            return f"tcp://{ray.util.get_node_ip_address()}:{free.getsockname()[1]}"

    def close(self) -> None:
        """The end of the run, and of its time with the cluster."""
        with self.news:
            self.closed = True
            self.news.notify_all()
        for worker in self.workers:
            worker.join(5.0)
        for thread in self.threads:  # Ray does not bear a thread that asks while it shuts down
            thread.join(5.0)
        for keeper in list(self.keepers.values()):
            ray.kill(keeper)
        ray.shutdown()


class Remote:
    """A worker on some node; to the pool it is a process. Two threads carry its deliveries."""

    def __init__(self, actor, mailboxes: Mailboxes, log: str, what: tuple):
        self.actor, self.mailboxes, self.log, self.what = actor, mailboxes, log, what
        self.name, self.node, self.pid, self.exitcode = what[0], "", 0, None
        self.begun, self.ended = threading.Event(), threading.Event()
        self.connection, self.pipe = Pipe()  # the pool's end, and this one
        for function in (self._hear, self._tell):
            threading.Thread(target=function, daemon=True).start()

    def kill(self) -> None:
        with contextlib.suppress(Exception):  # it may be gone, and Ray, too
            ray.kill(self.actor)

    def join(self, timeout: float | None = None) -> None:
        self.ended.wait(timeout)

    def _hear(self) -> None:
        """A thread: what the worker says, until it, its seat or its node is gone."""
        try:
            self.node = ray.get(self.actor.node.remote())
            *what, arguments = self.what
            place = self.mailboxes.on(self.node)
            arguments = [place if argument == KEPT else argument for argument in arguments]
            self.pid = ray.get(self.actor.begin.remote(*what, arguments))
            self.begun.set()
            while self.exitcode is None:
                for said in ray.get(self.actor.take.remote()):
                    if isinstance(said, tuple):
                        self.exitcode, text = said
                    else:
                        self.pipe.send_bytes(said)
        except Exception as error:
            self.exitcode, text = -signal.SIGKILL, f"{type(error).__name__}: {error}".encode()
        with contextlib.suppress(OSError):  # a full disk
            Path(self.log).write_bytes(text)
        self.kill()
        self.ended.set()
        self.begun.set()
        # The other thread reads this pipe: to close it here would end neither it nor the pipe.
        with contextlib.suppress(OSError), socket.socket(fileno=os.dup(self.pipe.fileno())) as end:
            end.shutdown(socket.SHUT_RDWR)

    def _tell(self) -> None:
        """A thread: what is said to the worker; it waits while that does not read."""
        self.begun.wait()
        going = True
        with contextlib.suppress(Exception):  # the thread above notices
            while going and not self.ended.is_set():
                delivery = next_delivery(self.pipe)
                going = delivery != END
                ray.get(self.actor.put.remote(delivery))
        self.ended.wait()
        self.pipe.close()
