"""weight_mailbox.py: the newest weights in shared memory, for any number of readers.

Python's resource tracker removes the memory of a run that was killed. Who kills the tracker, too
(`kill -9` of a whole process group), leaves it behind, and the next run sweeps it away.
Left out: when to publish (train_async.py) and when to read (workers.py).
"""

import contextlib
import errno
import os
import secrets
import sys
from multiprocessing.shared_memory import SharedMemory
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

if sys.platform == "linux":
    import fcntl


SHARED, PREFIX = Path("/dev/shm"), "nanoglm-"


class Mailbox:
    """The newest weights [P] in shared memory: two buffers, each stamped before and after writing.

    One process publishes, any number read; a reader never sees a mixture of two versions. A reader
    that is overtaken (two publications during its copy) simply reads again. Versions only grow.
    `device`: where this process has its weights; the other side need not know.
    """

    def __init__(self, count: int, name: str | None = None, device: str = "cpu"):
        size = 64 + 2 * 4 * count
        self.owner, self.lock, self.device = name is None, None, device
        if self.owner:
            sweep()
            check_room(size)
            name = f"{PREFIX}{os.getpid()}-{secrets.token_hex(4)}"
        self.memory = SharedMemory(name, create=self.owner, size=size)
        if self.owner and sys.platform == "linux":
            self.lock = os.open(SHARED / name, os.O_RDWR)
            fcntl.flock(self.lock, fcntl.LOCK_EX)  # held as long as this process lives
        # newest version, begin and end of writing of side 0 and side 1, side of the newest version
        self.stamps = np.frombuffer(self.memory.buf, np.int64, 6)
        flats = np.frombuffer(self.memory.buf, np.float32, 2 * count, 64)
        self.buffers = flats.reshape(2, count)
        if device != "cpu":  # a GPU copies to and from it directly: 40 MB in 0.8 ms, not in 46
            register = torch.cuda.cudart().cudaHostRegister
            register(self.buffers.ctypes.data, self.buffers.nbytes, 1)  # 1: for every device
        if self.owner:
            self.stamps[:] = -1, -1, -1, -1, -1, 0

    @property
    def version(self) -> int:
        """The newest published version, -1 before the first."""
        return int(self.stamps[0])

    def publish(self, version: int, flat: Tensor) -> None:
        """Write float32 weights [P] into the buffer that readers are not sent to, then switch."""
        assert version > self.version, f"version {version} published after {self.version}"
        assert flat.shape == self.buffers[0].shape, (flat.shape, self.buffers.shape)
        side = 1 - int(self.stamps[5])
        self.stamps[1 + side] = version
        if flat.is_cuda:
            torch.from_numpy(self.buffers[side]).copy_(flat)
        else:
            self.buffers[side] = flat.numpy()
        self.stamps[3 + side] = version
        self.stamps[5] = side
        self.stamps[0] = version

    def read(self) -> tuple[int, Tensor]:
        """The newest version and a private copy of its weights; -1 and zeros before the first."""
        while True:
            version, side = self.version, int(self.stamps[5])
            if self.device == "cpu":
                copy = torch.from_numpy(self.buffers[side].copy())
            else:
                copy = torch.from_numpy(self.buffers[side]).to(self.device)
            if self.stamps[1 + side] == version == self.stamps[3 + side]:
                return version, copy

    def close(self) -> None:
        """Let go of the memory; the owner also removes it."""
        if self.device != "cpu":
            torch.cuda.cudart().cudaHostUnregister(self.buffers.ctypes.data)
        self.stamps = self.buffers = None
        self.memory.close()
        if self.owner:
            self.memory.unlink()
        if self.lock is not None:
            os.close(self.lock)


def check_room(size: int) -> None:
    """Shared memory is granted without looking; writing more than there is kills the process."""
    if sys.platform == "linux":
        disk = os.statvfs(SHARED)
        if (free := disk.f_bavail * disk.f_frsize) < size:
            text = f"weights need {size >> 20} MB of shared memory, /dev/shm has {free >> 20} MB"
            raise OSError(errno.ENOSPC, f"{text} (in a container: docker run --shm-size)")


def sweep() -> None:
    """Remove the memory of runs whose owner has died: nobody holds its lock any more."""
    for path in SHARED.glob(PREFIX + "*") if sys.platform == "linux" else ():
        with contextlib.suppress(OSError):  # it is in use, somebody else's, or gone already
            descriptor = os.open(path, os.O_RDWR)
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                path.unlink()
            finally:
                os.close(descriptor)
