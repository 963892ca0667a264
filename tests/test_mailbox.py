"""The mailbox of the weights: never a mixture of two versions, and never left behind."""

import errno
import os
import subprocess
import sys
import time
from multiprocessing import get_context
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from test_model import make

from fast.eightbit import form_of, pack, take
from runtime.config import Config
from runtime.mailbox import Mailbox

ROOT = Path(__file__).resolve().parent.parent
PATIENCE = 60.0  # a machine under load may start processes slowly; nothing here is about speed


def eventually(condition, seconds: float) -> bool:
    deadline = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.02)
    return True


def publish_for_ever(name: str, count: int):
    mailbox = Mailbox(torch.empty(count), name)
    for version in range(1, 2**24):
        mailbox.publish(version, torch.full((count,), float(version)))


def read_later(name: str, connection):
    connection.send("here")
    connection.recv()
    mailbox = Mailbox(torch.empty(1000), name)
    connection.send(mailbox.read()[0])
    mailbox.close()


@pytest.fixture
def mailbox():
    box = Mailbox(torch.empty(1000))
    yield box
    box.close()


def weights(version: int) -> torch.Tensor:
    return torch.full((1000,), float(version))


class Interrupted:
    """Stands in for the two buffers: something happens in the middle of every copy or write."""

    def __init__(self, buffers, between):
        self.buffers, self.between, self.shape = buffers, between, buffers.shape

    def __getitem__(self, side):
        shape = self.buffers[side].shape
        return SimpleNamespace(to=lambda *_, copy: self.copy(side), shape=shape)

    def copy(self, side):
        first = self.buffers[side][:500].clone()
        self.between()
        return torch.cat([first, self.buffers[side][500:]])

    def __setitem__(self, side, flat):
        self.buffers[side][:500] = flat[:500]
        self.between()
        self.buffers[side][500:] = flat[500:]


def overtaken(mailbox: Mailbox, publications: int) -> Mailbox:
    """A reader during whose first copy the writer publishes several times."""
    reader, left = Mailbox(torch.empty(1000), mailbox.place), [publications]

    def publish():
        for _ in range(left[0]):
            mailbox.publish(mailbox.version + 1, weights(mailbox.version + 1))
        left[0] = 0

    reader.buffers = Interrupted(reader.buffers, publish)
    return reader


@pytest.mark.parametrize("publications", [0, 1, 2, 3, 4])
def test_overtaken_reader_reads_again(mailbox, publications):
    mailbox.publish(0, weights(0))
    reader = overtaken(mailbox, publications)
    version, flat = reader.read()
    assert (flat == version).all()
    assert version == (publications if publications > 1 else 0)
    reader.close()


@pytest.mark.parametrize("step", [1, 2, 3, 7])
def test_reader_in_the_middle_of_a_publication(mailbox, step):
    """It gets the version before, whole, whatever the distance between versions."""
    reader, seen, copies = Mailbox(torch.empty(1000), mailbox.place), [], [0]

    def counted():
        copies[0] += 1
        assert copies[0] < 100, "the reader waits for a writer that waits for it"

    def read():
        version, flat = reader.read()
        assert (flat == version).all()
        assert reader.version == version
        seen.append(version)

    reader.buffers = Interrupted(reader.buffers, counted)
    mailbox.publish(3, weights(3))
    for version in range(3 + step, 3 + 6 * step, step):
        mailbox.buffers, plain = Interrupted(mailbox.buffers, read), mailbox.buffers
        mailbox.publish(version, weights(version))
        mailbox.buffers = plain
        read()
        assert seen == [version - step, version]
        seen.clear()
    reader.close()


def test_mailbox_before_the_first_version(mailbox):
    reader = Mailbox(torch.empty(1000), mailbox.place)
    assert reader.version == -1
    version, flat = reader.read()
    assert version == -1 and (flat == 0).all()
    mailbox.publish(41, weights(41))  # a resumed run does not begin at 0
    version, flat = reader.read()
    assert reader.version == version == 41 and (flat == 41).all()
    flat[:] = 0  # a private copy
    assert (reader.read()[1] == 41).all()
    reader.close()
    assert mailbox.read()[0] == 41  # only the owner removes the memory


def test_mailbox_refuses(mailbox, monkeypatch):
    mailbox.publish(5, weights(5))
    for version in (5, 4, -1):
        with pytest.raises(AssertionError, match=f"version {version} published after 5"):
            mailbox.publish(version, weights(version))
    for shape in ((1,), (999,), (1000, 1)):  # nothing is broadcast
        with pytest.raises(AssertionError):
            mailbox.publish(6, torch.zeros(shape))
    version, flat = mailbox.read()
    assert version == 5 and (flat == 5).all()
    full = OSError(errno.ENOSPC, "No space left on device")

    def refuse(*_):
        raise full

    monkeypatch.setattr(os, "posix_fallocate", refuse)  # better than SIGBUS in the middle of a run
    with pytest.raises(OSError, match="7 MB of shared memory: No space left"):
        Mailbox(torch.empty(1_000_000))
    Mailbox(torch.empty(1000), mailbox.place).close()  # who only attaches needs no room


def test_no_torn_read_from_another_process():
    """A process publishes as fast as it can; every read is of one version, and versions grow."""
    count = 60_000
    mailbox = Mailbox(torch.empty(count))
    writer = get_context("spawn").Process(
        target=publish_for_ever, args=(mailbox.place, count), daemon=True
    )
    writer.start()
    try:
        assert eventually(lambda: mailbox.version > 0, PATIENCE)
        seen, begin = [0], time.monotonic()
        while time.monotonic() < begin + 0.8 or (len(set(seen)) < 50 and writer.is_alive()):
            before = mailbox.version
            version, flat = mailbox.read()
            assert (flat == version).all(), f"a mixture: {set(flat)}"
            assert max(before, seen[-1]) <= version <= mailbox.version
            seen.append(version)
            assert time.monotonic() < begin + PATIENCE
        assert len(set(seen)) >= 50
    finally:
        writer.kill()
        writer.join()
        mailbox.close()


@pytest.mark.skipif(sys.platform != "linux", reason="memfd")
def test_memory_goes_with_its_owner_however_that_ends():
    """kill -9 of an owner: nothing is left on disk, and readers keep what they have."""
    code = "import runtime.mailbox as w, time, torch; m = w.Mailbox(torch.empty(1000)); "
    code += "m.publish(3, torch.full((1000,), 3.0)); print(m.place, flush=True); time.sleep(600)"
    process = subprocess.Popen(
        [sys.executable, "-c", code], cwd=ROOT, stdout=subprocess.PIPE, text=True
    )
    place = process.stdout.readline().strip()
    reader = Mailbox(torch.empty(1000), place)
    process.kill()
    process.communicate()
    assert not os.path.exists(place)
    version, flat = reader.read()
    assert version == 3 and (flat == 3).all()
    reader.close()


@pytest.mark.gpu
@pytest.mark.parametrize(
    "writes, reads", [("cuda:0", "cuda:0"), ("cuda:0", "cpu"), ("cpu", "cuda:0")]
)
def test_on_a_gpu_weights_travel_through_registered_memory(writes, reads):
    mailbox = Mailbox(torch.empty(1000, device=writes))
    reader = Mailbox(torch.empty(1000, device=reads), mailbox.place)
    for box, device in ((mailbox, writes), (reader, reads)):
        assert box.buffers.is_pinned() or device == "cpu"
    for version in (1, 2, 5):
        mailbox.publish(version, weights(version).to(writes))
        found, flat = reader.read()
        assert flat.device == torch.device(reads) and found == version
        assert (flat == version).all()
    reader.close()
    mailbox.close()


@pytest.mark.parametrize("dtype, share", [("bfloat16", 2), ("float8_e4m3fn", 4)])
def test_weights_may_be_rounded_on_the_way(dtype, share):
    """A run whose workers generate with rounded weights sends no more bytes than these have."""
    model = make()
    exact, form = model.flat, form_of(model, dtype)
    mailbox = Mailbox(exact, form=form)
    reader = Mailbox(exact, mailbox.place, form)
    scales = mailbox.buffers[0].nbytes - exact.nbytes // share
    assert 0 <= scales < exact.nbytes // 8 and (scales > 0) == (share == 4)
    mailbox.publish(3, exact)
    version, found = reader.read()
    assert version == 3 and torch.equal(found, pack(exact, form))
    take(model.flat, found, form)
    error = (model.flat - make().flat).abs().max() / make().flat.abs().max()
    assert 0 < error < 2.0 ** (-8 if share == 2 else -4)
    reader.close()
    mailbox.close()


def test_what_is_rounded_on_the_way_is_what_generates():
    for flags, published in (
        ({}, "float32"),
        ({"rollout_weights": "bfloat16"}, "bfloat16"),
        ({"rollout_weights": "float8_e4m3fn", "dtype": "bfloat16"}, "float8_e4m3fn"),
        ({"dtype": "bfloat16"}, "bfloat16"),  # float32 is no coarser
        ({"rollout_weights": "bfloat16", "lora": 4}, "float32"),  # rounded when it is merged
    ):
        assert Config(**flags).published == published, flags
