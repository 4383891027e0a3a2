"""Prefetch requests to the kernel: many small reads from a disk or a network then run at once instead of in turn.

The kernel reads prefetched data into the page cache; nothing here changes what a reader gets. `src/prefetch.c` does the
same for requests that C answers, and decides when prefetching pays.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from functools import lru_cache

DEFAULT_READ_AHEAD = 128 << 10
"""Linux' default, in bytes."""
_MIN_REQUEST, _MAX_REQUEST = 16 << 10, 16 << 20


def max_request(fd: int) -> int:
    """Bytes of the largest useful prefetch request for a file: the kernel cuts it at the device's read-ahead."""
    device = os.fstat(fd).st_dev
    return _read_ahead(os.major(device), os.minor(device))


@lru_cache(maxsize=64)
def _read_ahead(major: int, minor: int) -> int:
    number = f"{major}:{minor}"
    for path in (f"/sys/class/bdi/{number}/read_ahead_kb", f"/sys/dev/block/{number}/../queue/read_ahead_kb"):
        try:
            with open(path) as file:
                return min(max(int(file.read()) << 10, _MIN_REQUEST), _MAX_REQUEST)
        except (OSError, ValueError):  # the file system has none, or it is not visible in this container
            continue
    return DEFAULT_READ_AHEAD


def prefetch(fd: int, offsets: Iterable[int], nbytes: int) -> None:
    """Ask the kernel to read *nbytes* at each of *offsets* soon. Never fails: offsets may lie outside of the file."""
    for offset in offsets:
        try:
            os.posix_fadvise(fd, offset, nbytes, os.POSIX_FADV_WILLNEED)
        except (OSError, OverflowError):  # a file system without it, or a damaged file's address
            return
