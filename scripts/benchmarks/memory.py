"""Memory that is there when the page cache of a fresh mount wants it."""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import os
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import numpy.typing as npt

PAGE_REPORTING = Path("/sys/module/page_reporting/parameters")
"""There where the kernel can give free pages back to a hypervisor. It does so in passes, 2 s after some were freed."""
PASSES = PAGE_REPORTING / "passes"
"""How many passes there were, on kernels that count them."""
PASS_S = 2.2
"""Seconds in which other kernels have given back what was free before."""
LONGEST_WAIT_S = 5.0
"""For a pass that can be seen: one may have to end before the two seconds begin."""
ENOUGH_TO_FREE = 32 << 20
"""Bytes that let the two seconds begin; a little stays on lists of the processors."""
WORTH_WAITING = 64 << 20
"""Bytes; whether less is given back, and has to be got again, makes no difference."""
MADV_POPULATE_WRITE = 23
"""Since Linux 5.14; Python's mmap has no name for it."""


class HeldMemory(contextlib.AbstractContextManager["HeldMemory"]):
    """Memory that is really there. `settle` and `release` belong right before what is timed, and between them what
    brings a source into the page cache: some kernels take pages back that nobody used for seconds.

    A virtual machine gets a page from its host when it first writes to it, which takes several times as long as copying
    into it, and gives free pages back within two seconds. A read into the page cache of a fresh mount would pay for
    that, by chance, and the slower of two more often.
    """

    def __init__(self, nbytes: int) -> None:
        """Claim *nbytes*, or half of what is free."""
        free = os.sysconf("SC_AVPHYS_PAGES") * mmap.PAGESIZE
        self._memory = _claimed(max(1, min(nbytes, free // 2) // mmap.PAGESIZE) * mmap.PAGESIZE)

    def settle(self) -> None:
        """Wait until the kernel has given free memory back; what is freed now stays for two seconds."""
        if len(self._memory) < WORTH_WAITING or not PAGE_REPORTING.exists():
            return
        if not PASSES.exists():
            time.sleep(PASS_S)
            return
        before, end = PASSES.read_text(), time.monotonic() + LONGEST_WAIT_S
        while PASSES.read_text() == before and time.monotonic() < end:
            _claimed(ENOUGH_TO_FREE).close()
            time.sleep(0.02)

    def release(self) -> None:
        """Free it at once."""
        self._memory.close()

    def __exit__(self, *_: object) -> None:
        self._memory.close()


def _claimed(nbytes: int) -> mmap.mmap:
    """Private memory all of whose pages are there; the processors claim a part each, which is faster."""
    memory = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    parts = np.array_split(np.frombuffer(memory, np.uint8).reshape(-1, mmap.PAGESIZE), os.cpu_count() or 1)
    with ThreadPoolExecutor(len(parts)) as pool:
        list(pool.map(_populate, parts))
    return memory


def _populate(pages: npt.NDArray[np.uint8]) -> None:
    libc, start, nbytes = ctypes.CDLL(None), ctypes.c_void_p(pages.ctypes.data), ctypes.c_size_t(pages.nbytes)
    if libc.madvise(start, nbytes, MADV_POPULATE_WRITE):
        pages[:, 0] = 1
