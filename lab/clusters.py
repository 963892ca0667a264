"""clusters.py: what Ray costs beside the transport of one machine, and what a cluster survives.

`python bench.py cluster` runs it: a message there and back, and a version of the weights from
`publish` until a worker has read it, by pipes and shared memory and by Ray on the same machine;
then runs on three nodes of this machine that lose workers, nodes and drivers
(tests/cluster_faults.py).
Left out: a network. What passes between two machines costs what that network costs.
"""

import tempfile
import time
from itertools import product
from pathlib import Path

import numpy as np
import torch
from tqdm import tqdm

from lab.plots import save_result, spread
from runtime.config import Config
from runtime.mailbox import Mailbox
from runtime.pipes import Line, start_here

SIZES, ROUNDS = {"0.4 MB": 400_000, "40 MB": 40_000_000, "1.2 GB": 1_200_000_000}, 3


def answer(line: Line, place: str, size: int) -> None:
    """A worker that sends back what it is sent, and says which version of the weights it has."""
    mailbox, last = Mailbox(torch.empty(size // 4), place), -1
    while True:
        if line.connection.poll(0.0005):
            delivery = line.connection.recv_bytes()
            if not delivery:
                raise SystemExit(0)
            line.connection.send_bytes(delivery)
        elif mailbox.version > last:
            last, _ = mailbox.read()
            line.connection.send_bytes(str(last).encode())


def timed(connection, mailbox, flat: torch.Tensor) -> dict:
    """Milliseconds of a message there and back, of a publication, and until its reader has it."""
    assert connection.recv_bytes() == b"0"  # the first version
    message, rows = bytes(flat.nbytes), []
    for version in range(1, 1 + ROUNDS):
        begin = time.perf_counter()
        connection.send_bytes(message)
        assert len(connection.recv_bytes()) == len(message)
        back = time.perf_counter()
        mailbox.publish(version, flat)
        published = time.perf_counter()
        assert connection.recv_bytes() == str(version).encode()
        adopted = time.perf_counter()
        rows.append([back - begin, published - back, adopted - back])
    names = ("message_ms", "publish_ms", "adopted_ms")
    return dict(zip(names, map(spread, 1e3 * np.transpose(rows)), strict=True))


def cost(size: int, ray: bool) -> dict:
    """Both, of so many bytes; ray: a local cluster, and not pipes and shared memory."""
    flat = torch.zeros(size // 4)
    if ray:
        from fast.eightbit import Form
        from runtime.cluster import Mailboxes, open_cluster

        config = Config(cluster="local", reward_workers=0, rollout_workers=1)
        open_cluster(config)
        mailbox = Mailboxes(Form(flat.dtype, len(flat)), config)
        start = mailbox.start
    else:
        mailbox, start = Mailbox(flat), start_here
    mailbox.publish(0, flat)
    with tempfile.TemporaryDirectory() as folder:
        arguments = [mailbox.place, size]
        process, connection = start("worker-0", answer, 0, f"{folder}/log", arguments)
        found = timed(connection, mailbox, flat)
        connection.send_bytes(b"")
        connection.close()
        process.kill()
        mailbox.close()
    return found


def bench_cluster(folder: Path) -> None:
    """Costs, and losses; cluster.json in `folder`."""
    from cluster_faults import losses_of_a_cluster  # in tests/: see races.py

    result = {"costs": []}
    for (name, size), ray in tqdm(list(product(SIZES.items(), (False, True))), "costs"):
        row = {"size": name, "by": "Ray" if ray else "pipe"} | cost(size, ray)
        result["costs"].append(row)
        save_result(folder, "cluster", result)
    for so_far in losses_of_a_cluster(folder / "losses", losses=30):
        save_result(folder, "cluster", result | {"losses": so_far})
