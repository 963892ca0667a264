"""folder.py: the files of a run folder: a power cut tears none, and a stranger's do no harm.

A file is written under another name, flushed, and moved into its place. A log only grows, and each
of its lines ends with a checksum of the log up to there: so a line that was torn, changed, taken
out, doubled or moved is known by its number. What somebody else has put into a folder is data: a
link, a pipe or a device in it is refused by name, so nothing is read or written through it.
Left out: what the files mean (runlog.py, checkpoint.py).
"""

import fcntl
import json
import math
import os
import stat
import zlib
from collections.abc import Iterable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import BinaryIO

from runtime.config import blame, require

LONGEST = 1 << 27  # bytes of a JSON file, or of a line of a log


def own_folder(folder: Path) -> None:
    """Lock a run folder for as long as this process lives; UserError when another one has it.

    The lock goes with the process, however that ends, and children do not have it (a POSIX record
    lock; also on NFS, if its server has locks).
    """
    with blame(f"{folder}: must be writable, and in no other process's use", OSError):
        lock = os.open(folder / "lock", os.O_RDWR | os.O_CREAT, 0o666)  # never closed
        fcntl.lockf(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)


def refuse_links(folder: Path) -> None:
    """UserError for the first thing in a folder that is neither a folder nor a file of its own."""
    for path in folder.rglob("*"):
        with suppress(FileNotFoundError):  # its owner is at work
            facts = path.lstat()
            plain = stat.S_ISREG(facts.st_mode) and facts.st_nlink == 1
            said = f"{path}: must be a plain file, is a link, a pipe or a device"
            require(plain or stat.S_ISDIR(facts.st_mode), said)


def open_plain(path: Path, most: float = math.inf) -> BinaryIO:
    """Open a file to read; UserError unless it is a plain one of at most so many bytes."""
    with blame(f"{path}: must be a file that can be read", OSError):
        size = path.stat().st_size
        require(path.is_file(), f"{path}: must be a plain file")
        require(size <= most, f"{path}: must have at most {most:,} bytes")
        return path.open("rb")


def read_json(path: Path) -> dict:
    """The object in a file of at most LONGEST bytes; UserError for anything else."""
    with open_plain(path, LONGEST) as file:
        return to_record(file.read(), path)


def to_record(text: bytes, place: Path | str) -> dict:
    """The JSON object that a text is; UserError, with its place, for anything else."""
    with blame(f"{place}: must be JSON"):
        record = json.loads(text)
    require(isinstance(record, dict), f"{place}: must be a JSON object, is {text[:40]!r}")
    return record


def write_json(path: Path, record: dict) -> None:
    """Write a record as people read it."""
    write_file(path, json.dumps(record, indent=1).encode())


def write_file(path: Path, data: bytes) -> None:
    """Write a file in one move: whoever is killed here leaves the old one or the new one.

    It is on disk, and so is its name, when this returns. OSError, naming the file, when the disk
    is full: nothing is left behind.
    """
    partial = path.with_suffix(".partial")
    try:
        partial.unlink(missing_ok=True)  # somebody was killed, or it is a link to somewhere
        with partial.open("xb") as file:  # x: never through a link
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        partial.replace(path)
    except OSError as error:
        partial.unlink(missing_ok=True)
        error.filename = str(path)
        raise
    sync_folder(path.parent)


def sync_folder(folder: Path) -> None:
    """Flush the names in a folder."""
    descriptor = os.open(folder, os.O_RDONLY)
    os.fsync(descriptor)
    os.close(descriptor)


# ------------------------------------------------------------------------------------------- logs


class Log:
    """A file of JSON lines that only grows; `mark` is (bytes, checksum) of what it holds."""

    def __init__(self, path: Path, size: int = 0, checksum: int = 0):
        """Go on behind a mark: what stands there is cut off."""
        self.path, self.mark = path, (size, checksum)
        self.descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o666)
        os.ftruncate(self.descriptor, size)

    def append(self, records: Iterable[dict]) -> None:
        """Write records, each a line: all of them, or none when the disk is full (OSError)."""
        size, checksum = self.mark
        data = bytearray()
        for record in records:
            text = json.dumps(record)[:-1].encode()
            checksum = zlib.crc32(text, checksum)
            data += text + b', "crc": %d}\n' % checksum
        mark = (size + len(data), checksum)
        try:
            while data:
                data = data[os.write(self.descriptor, data) :]
        except OSError as error:
            os.ftruncate(self.descriptor, size)
            error.filename = str(self.path)
            raise
        self.mark = mark

    def sync(self) -> tuple[int, int]:
        """Put it on disk; returns the mark."""
        os.fsync(self.descriptor)
        return self.mark


def scan(path: Path, mark: tuple[int, int] | None = None) -> Iterator[dict]:
    """The records of a log, or of what it had at a mark; UserError names the first line that is not
    as it was written, and a log that has never had this mark."""
    size, checksum = 0, 0
    with open_plain(path) as file:
        lines = iter(lambda: file.readline(LONGEST), b"")
        for number, line in enumerate(lines, start=1):
            if mark and size >= mark[0]:
                break
            text, _, told = line.rpartition(b', "crc": ')
            size, checksum = size + len(line), zlib.crc32(text, checksum)
            place = f"{path}, line {number}"
            require(told == b"%d}\n" % checksum, f"{place}: torn or changed (wrong checksum)")
            yield to_record(text + b"}", place)
    require(mark in (None, (size, checksum)), f"{path}: must be whole up to {mark}")


def read_lines(path: Path) -> list[dict]:
    """The records of a log, [] when there is none."""
    return list(scan(path)) if path.exists() else []
