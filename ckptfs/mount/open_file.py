"""An open file: C reads the bytes of its `ExtentFile` as far as it can, Python reads the rest.

Before C can read a tensor, the table of its chunks has to be read. When a reader begins a tensor, a thread prepares the
programs of the next ones, so that a sequential reader does not wait at each tensor.
"""

from __future__ import annotations

import logging
import os
from concurrent.futures import Future, ThreadPoolExecutor
from functools import lru_cache

from ckptfs.errors import CkptfsError
from ckptfs.formats.extents import Body, ExtentFile
from ckptfs.native import program
from ckptfs.native.program import Program
from ckptfs.tensors.ranges import program_of

log = logging.getLogger(__name__)

MAX_PROGRAMS = 10_000
"""Bodies of one open file that get a program, at half a KiB each; Python reads the others."""
MAX_REQUEST = 2 << 20
"""Larger requests (bytes) go to Python, which shares them among threads; the kernel's are smaller."""
PREPARED_NBYTES = 32 << 20
"""Bytes behind a tensor that a reader begins, in which others are prepared; at least the next one is."""
PREPARED_BODIES = 16
"""Bodies behind a tensor among which the others are looked for."""
MIN_PREPARED = 128 << 10
"""Bytes of a tensor for which that pays: smaller ones have few chunks."""


class Reader:
    """*file*, opened. Needs C; without it, an `ExtentFile` reads as well. Any thread may read."""

    __slots__ = ("_asked", "_concat", "_file", "_n_programs", "_next", "_prepared", "address")

    def __init__(self, file: ExtentFile) -> None:
        self._file = file
        self._concat = program.ConcatProgram(file.starts)
        self._asked = bytearray(len(file.bodies))
        self._n_programs = 0
        self._prepared: dict[int, Future[Program | None]] = {}
        self._next = 0  # bodies before it are not prepared any more
        self.address = self._concat.program.address
        """Of the program in memory, by which ``ckptfs_fuse_read`` knows the file."""

    def read_into(self, offset: int, out: memoryview) -> int:
        """As `ExtentFile.read_into`."""
        if len(out) > MAX_REQUEST:
            return self._file.read_into(offset, out)
        n = max(0, min(len(out), self._file.size - offset))
        done = 0
        while done < n:
            done += self._concat.read(offset + done, out[done:n])
            if done < n:
                done += self._read_body(offset + done, out[done:n])
        return n

    def _read_body(self, offset: int, out: memoryview) -> int:
        """Read in Python up to the end of a body, unless it just got a program; how many bytes that were."""
        i = self._file.body_at(offset)
        if not self._asked[i]:
            self._asked[i] = 1
            made = self._program(i) if self._n_programs < MAX_PROGRAMS else None
            if offset == self._file.starts[i]:
                self._prepare_behind(i)
            if made is not None:
                self._n_programs += 1
                self._concat.set_source(i, made)
                return 0
        return self._file.read_into(offset, out[: self._file.starts[i + 1] - offset])

    def _program(self, i: int) -> Program | None:
        prepared = self._prepared.pop(i, None)
        return _program_of(self._file.bodies[i]) if prepared is None or prepared.cancel() else prepared.result()

    def _prepare_behind(self, i: int) -> None:
        """Begin to make the programs of tensors behind body *i*, whose first byte is being read."""
        bodies, starts = self._file.bodies, self._file.starts
        for j in range(max(i + 1, self._next), min(i + 1 + PREPARED_BODIES, len(bodies))):
            if self._prepared and starts[j] > starts[i + 1] + PREPARED_NBYTES:
                return
            self._next = j + 1
            if starts[j + 1] - starts[j] >= MIN_PREPARED and not self._asked[j] and not isinstance(bodies[j], bytes):
                self._prepared[j] = _pool().submit(_prefetched_program_of, bodies[j])


@lru_cache(maxsize=1)
def _pool() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(1, "ckptfs-prepare")


os.register_at_fork(after_in_child=_pool.cache_clear)  # threads do not exist in a child


def _prefetched_program_of(body: Body) -> Program | None:
    made = _program_of(body)
    if made is not None:
        program.prefetch_start(made)
    return made


def _program_of(body: Body) -> Program | None:
    if isinstance(body, bytes):
        return program.literal(body)
    try:
        return program_of(body)
    except (CkptfsError, OSError) as error:
        log.debug("left to Python: %s", error)  # reading it there raises the same error for the reader
        return None
