"""arena.py: where the arrays of a group lie while it goes from process to process.

A pipe copies everything on the way in and on the way out, and packing copies it once more. Half of
that work would be the parent's. So a rollout worker appends its arrays to an arena, memory without
a name (Linux: memfd), and says where they are. The parent reads them into memory of its own: what
it has looked at can no longer change. A reward worker reads the tokens where they lie.
Nothing is written twice, and nothing is given back: a full arena is followed by a new one, and its
memory goes when the last process has closed it, however that one ends.
Left out: groups that go to other learners or other machines: they are packed whole (messages.py).
"""

import errno
import os
from collections.abc import Sequence

import numpy as np

FULL = 1 << 24  # bytes; no delivery begins in an arena that has more


class Arena:
    """Memory to which one process appends, and which others read."""

    def __init__(self, descriptor: int | None = None):
        """New memory, or that of a descriptor; it is closed with this object."""
        self.descriptor = os.memfd_create("nanoglm-arrays") if descriptor is None else descriptor
        self.path = f"/proc/{os.getpid()}/fd/{self.descriptor}"  # for other processes
        self.end = 0  # where its one writer goes on

    def append(self, arrays: Sequence[np.ndarray]) -> int:
        """Write arrays one behind the other; returns where they begin. OSError: no room."""
        offset, size = self.end, bytes_of(arrays)
        if os.pwritev(self.descriptor, arrays, offset) < size:
            raise OSError(errno.ENOSPC, f"arrays need {size >> 20} MB of shared memory")
        self.end += size
        return offset

    def read(self, arrays: Sequence[np.ndarray], offset: int) -> None:
        """Fill arrays with what begins there; ValueError: that is not enough."""
        found, size = os.preadv(self.descriptor, arrays, offset), bytes_of(arrays)
        if found < size:
            raise ValueError(f"{found} bytes of arrays at {offset}, must be {size}")

    def __del__(self):
        os.close(self.descriptor)


def bytes_of(arrays: Sequence[np.ndarray]) -> int:
    return sum([array.nbytes for array in arrays])
