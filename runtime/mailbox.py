"""runtime/mailbox.py: the newest weights in shared memory, for any number of readers.

Who removes the memory: its owner, in `close`. If the owner was killed, Python's resource tracker.
If the tracker was killed, too, the next run (`sweep`).
Left out: when to publish (train_async.py) and when to read (workers.py).

Axes: P parameters
"""

import contextlib
import errno
import os
import secrets
import sys
from multiprocessing import resource_tracker
from multiprocessing.shared_memory import SharedMemory
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

if sys.platform == "linux":
    import fcntl

SHARED, PREFIX = Path("/dev/shm"), "nanoglm-"

# The stamps: the newest version; begin of writing, of buffer 0 and 1; end of writing, of buffer 0
# and 1; the buffer of the newest version.
NEWEST, BEGUN, ENDED, SIDE, STAMPS = 0, 1, 3, 5, 6
HEADER = 64  # bytes before the buffers


class Mailbox:
    """The newest weights [P] in shared memory: two buffers, each stamped before and after writing.

    One process publishes, any number read; a reader never sees a mixture of two versions. A reader
    that is overtaken (two publications during its copy) simply reads again. Versions only grow.
    `device`: where this process has its weights; the other side need not know.
    """

    def __init__(self, count: int, name: str | None = None, device: str = "cpu"):
        """Own new memory for `count` weights, or open the memory `name` of another process."""
        self.owner, self.lock, self.device = name is None, None, device
        if self.owner:
            self.memory = create(HEADER + 2 * 4 * count)
            if sys.platform == "linux":  # held as long as this process lives: see sweep
                self.lock = os.open(SHARED / self.memory.name, os.O_RDWR)
                fcntl.flock(self.lock, fcntl.LOCK_EX)
        else:
            self.memory = attach(name)
        self.stamps = np.frombuffer(self.memory.buf, np.int64, STAMPS)
        self.buffers = np.frombuffer(self.memory.buf, np.float32, 2 * count, HEADER)
        self.buffers = self.buffers.reshape(2, count)
        if self.owner:
            self.stamps[:SIDE] = -1
        if device != "cpu":  # a GPU copies to and from it directly: 40 MB in 0.8 ms, not in 46
            register = torch.cuda.cudart().cudaHostRegister
            register(self.buffers.ctypes.data, self.buffers.nbytes, 1)  # 1: for every device

    @property
    def version(self) -> int:
        """The newest published version, -1 before the first."""
        return int(self.stamps[NEWEST])

    def publish(self, version: int, flat: Tensor) -> None:
        """Write float32 weights [P] into the buffer that readers are not sent to, then switch."""
        assert version > self.version, f"version {version} published after {self.version}"
        assert flat.shape == self.buffers[0].shape, (flat.shape, self.buffers.shape)
        side = 1 - int(self.stamps[SIDE])
        self.stamps[BEGUN + side] = version
        if flat.is_cuda:
            torch.from_numpy(self.buffers[side]).copy_(flat)
        else:
            self.buffers[side] = flat.numpy()
        self.stamps[ENDED + side] = version
        self.stamps[SIDE] = side
        self.stamps[NEWEST] = version

    def read(self) -> tuple[int, Tensor]:
        """The newest version and a private copy of its weights; -1 and zeros before the first."""
        while True:
            version, side = self.version, int(self.stamps[SIDE])
            if self.device == "cpu":
                copy = torch.from_numpy(self.buffers[side].copy())
            else:
                copy = torch.from_numpy(self.buffers[side]).to(self.device)
            if self.stamps[BEGUN + side] == version == self.stamps[ENDED + side]:
                return version, copy

    def close(self) -> None:
        """Let go of the memory; the owner also removes it."""
        if self.device != "cpu":
            torch.cuda.cudart().cudaHostUnregister(self.buffers.ctypes.data)
        self.stamps = self.buffers = None  # nobody may look into it when it is closed
        self.memory.close()
        if self.owner:
            remove(self.memory)
        if self.lock is not None:
            os.close(self.lock)


def create(size: int) -> SharedMemory:
    """New shared memory, of zeros; OSError when there is too little of it."""
    sweep()
    if sys.platform == "linux":
        # It is granted without looking, and writing more than there is kills the process.
        disk = os.statvfs(SHARED)
        if (free := disk.f_bavail * disk.f_frsize) < size:
            text = f"weights need {size >> 20} MB of shared memory, /dev/shm has {free >> 20} MB"
            raise OSError(errno.ENOSPC, f"{text} (in a container: docker run --shm-size)")
    name = f"{PREFIX}{os.getpid()}-{secrets.token_hex(4)}"
    return SharedMemory(name, create=True, size=size)


def attach(name: str) -> SharedMemory:
    """Open shared memory without telling the resource tracker.

    A reader may have a tracker of its own (when that of the run was killed). If it knew the memory,
    it would remove it as soon as the reader ends. Python 3.13 has `track=False` for this.
    """
    register = resource_tracker.register
    resource_tracker.register = lambda *_: None
    try:
        return SharedMemory(name)
    finally:
        resource_tracker.register = register


def remove(memory: SharedMemory) -> None:
    """Remove shared memory, whatever has become of the resource tracker."""
    # A tracker that was killed is started anew here, and must know the name to forget it.
    resource_tracker.register(f"/{memory.name}", "shared_memory")
    with contextlib.suppress(FileNotFoundError):  # somebody has removed it: just as well
        memory.unlink()


def sweep() -> None:
    """Remove the memory of runs whose owner has died: nobody holds its lock any more."""
    for path in SHARED.glob(PREFIX + "*"):  # nothing where memory is no file
        with contextlib.suppress(OSError):  # it is in use, somebody else's, or gone already
            descriptor = os.open(path, os.O_RDWR)
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                path.unlink()
            finally:
                os.close(descriptor)
