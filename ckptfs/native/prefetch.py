"""Hints to the kernel about what is going to be read: many small reads from a disk or a network at once, not in turn.

What is hinted arrives in the page cache; nothing here changes what is read. `src/prefetch.c` does the same for requests
that are answered in C, and knows when to.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from functools import lru_cache

USUAL_STEP = 128 << 10
"""Linux' default read-ahead."""
_MIN_STEP, _MAX_STEP = 16 << 10, 16 << 20


def step_of(fd: int) -> int:
    """Most bytes that one hint about this file is good for: the kernel cuts hints at the read-ahead of the device."""
    device = os.fstat(fd).st_dev
    return _step(os.major(device), os.minor(device))


@lru_cache(maxsize=64)
def _step(major: int, minor: int) -> int:
    number = f"{major}:{minor}"
    for path in (f"/sys/class/bdi/{number}/read_ahead_kb", f"/sys/dev/block/{number}/../queue/read_ahead_kb"):
        try:
            with open(path) as said:
                return min(max(int(said.read()) << 10, _MIN_STEP), _MAX_STEP)
        except (OSError, ValueError):  # not a file system that has one, or not in this container
            continue
    return USUAL_STEP


def hint(fd: int, places: Iterable[int], nbytes: int) -> None:
    """The *nbytes* at each of *places* are wanted soon. Places may be anywhere: this never fails."""
    for place in places:
        try:
            os.posix_fadvise(fd, place, nbytes, os.POSIX_FADV_WILLNEED)
        except (OSError, OverflowError):  # a file system without it, or a damaged file's address
            return
