"""mailbox.py: the newest weights in shared memory, for any number of readers.

The memory has no name on disk (Linux: memfd), so nothing can be left behind: it goes when the last
process that has it is gone, however that one ends. Other processes open it by way of /proc.
Left out: when to publish (train_async.py) and when to read (workers.py).

Axes: P parameters
"""

import mmap
import os
from functools import partial

import numpy as np
import torch
from torch import Tensor

from fast.eightbit import Form, pack

HEADER = 64  # bytes before the buffers


class Mailbox:
    """The newest weights [P] in shared memory: two buffers, each stamped before and after writing.

    One process publishes, any number read; a reader never sees a mixture of two versions. A reader
    that is overtaken (two publications during its copy) simply reads again. Versions only grow.
    """

    def __init__(self, like: Tensor, place: str | None = None, form: Form | None = None):
        """Own new memory for so many weights, or open the memory of another process at `place`;
        this process has its weights where `like` is. form: how they travel, by default exactly."""
        self.form = form = form or Form(torch.float32, len(like))
        self.device, size = str(like.device), HEADER + 2 * form.size * form.dtype.itemsize
        self.descriptor = os.open(place, os.O_RDWR) if place else reserve(size)
        self.place = place or f"/proc/{os.getpid()}/fd/{self.descriptor}"
        self.reader = partial(Mailbox, place=self.place, form=form)  # for other processes
        memory = mmap.mmap(self.descriptor, size)
        # versions of which writing has begun in buffer 0 and 1, and of which it has ended there
        self.stamps = np.frombuffer(memory, np.int64, 4).reshape(2, 2)
        self.buffers = torch.frombuffer(memory, dtype=form.dtype, offset=HEADER).view(2, -1)
        if not place:
            self.stamps[:] = -1
        if self.device != "cpu":  # a GPU copies to and from it directly: 40 MB in 0.8 ms, not in 46
            whole = self.buffers.data_ptr(), self.buffers.nbytes
            # 1: for every device
            torch.cuda.check_error(torch.cuda.cudart().cudaHostRegister(*whole, 1))

    @property
    def version(self) -> int:
        """The newest published version, -1 before the first."""
        return int(self.stamps[1].max())

    def publish(self, version: int, flat: Tensor) -> None:
        """Write weights [P] into the buffer that has the older ones."""
        assert version > self.version, f"version {version} published after {self.version}"
        packed = pack(flat, self.form)
        assert packed.shape == self.buffers.shape[1:], (packed.shape, self.buffers.shape)
        begun, ended = self.stamps
        side = 1 - ended.argmax()
        begun[side] = version
        self.buffers[side] = packed
        ended[side] = version

    def read(self) -> tuple[int, Tensor]:
        """The newest version and a private copy of its weights, as they have travelled; -1 and
        zeros before the first."""
        begun, ended = self.stamps
        while True:
            side = ended.argmax()
            version = int(ended[side])
            copy = self.buffers[side].to(self.device, copy=True)
            if begun[side] == version == ended[side]:
                return version, copy

    def close(self) -> None:
        """Let go of the memory."""
        if self.device != "cpu":
            torch.cuda.cudart().cudaHostUnregister(self.buffers.data_ptr())
        os.close(self.descriptor)


def reserve(size: int) -> int:
    """The descriptor of new memory, of zeros.

    OSError when there is too little: granted without looking, it would kill whoever writes to it.
    """
    descriptor = os.memfd_create("nanoglm-weights")
    try:
        os.posix_fallocate(descriptor, 0, size)
    except OSError as error:
        text = f"weights need {size >> 20} MB of shared memory: {error.strerror}"
        raise OSError(error.errno, text) from error
    return descriptor
