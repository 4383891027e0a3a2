"""A file system as on a network: ``python -m tests.mount.far FOLDER MOUNTPOINT LOG READ_AHEAD`` shows FOLDER's files.

Each request takes `SECONDS`, and leaves a line in LOG: file, offset, nbytes, when it began and when it ended.
"""

from __future__ import annotations

import os
import sys
import time
from dataclasses import dataclass
from pathlib import Path

from ckptfs.mount.daemon import mount_in_background
from ckptfs.mount.fuse import MountOptions
from ckptfs.vfs.tree import Entry, Folder, Leaf, Tree

SECONDS = 0.003


@dataclass(frozen=True)
class Request:
    """One line of the log. Offset and size in bytes, times in seconds."""

    file: str
    offset: int
    nbytes: int
    begin: float
    end: float


@dataclass(frozen=True)
class Passed:
    """A file of the folder, for the adapter: it wants a size and `read_into` alone."""

    fd: int
    name: str
    size: int
    log: int

    def read_into(self, offset: int, out: memoryview) -> int:
        begin = time.monotonic()
        time.sleep(SECONDS)
        done = os.preadv(self.fd, [out], offset)
        os.write(self.log, f"{self.name} {offset} {done} {begin} {time.monotonic()}\n".encode())
        return done


def requests(log: Path) -> list[Request]:
    """What was asked for so far, in the order of answers."""
    lines = [line.split() for line in log.read_text().splitlines()]
    return [Request(name, int(at), int(n), float(begin), float(end)) for name, at, n, begin, end in lines]


def at_once(found: list[Request]) -> int:
    """Most requests that were under way at the same time."""
    events = sorted([(r.begin, 1) for r in found] + [(r.end, -1) for r in found])
    now = most = 0
    for _, step in events:
        now += step
        most = max(most, now)
    return most


def main(folder: str, mountpoint: str, log: str, read_ahead: str) -> None:
    out = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    entries: dict[str, Entry] = {}
    for entry in os.scandir(folder):
        size = entry.stat().st_size
        passed = Passed(os.open(entry.path, os.O_RDONLY), entry.name, size, out)
        entries[entry.name] = Leaf(passed)  # type: ignore[arg-type]
    tree = Tree(Folder(lambda: entries), time.time_ns())
    mount_in_background(tree, mountpoint, MountOptions(threads=16, read_ahead=int(read_ahead)))


if __name__ == "__main__":
    main(*sys.argv[1:])
