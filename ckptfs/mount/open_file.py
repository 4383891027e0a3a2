"""An open file: the bytes of its `ExtentFile`, by C code where that can say them, by Python where not.

Before C can say a tensor's bytes, the table of its chunks has to be read. For a reader that comes from the tensor
before, that is done ahead, by a thread, so that it need not wait for each tensor.
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
from ckptfs.tensors.ranges import node_of

log = logging.getLogger(__name__)

MAX_NODES = 10_000
"""Bodies of one open file that get a node, at half a KiB each; the others are read by Python."""
LARGE = 2 << 20
"""Requests above it (bytes) go to Python, which shares them among threads; the kernel's are smaller."""
LEAD = 32 << 20
"""Bytes behind a tensor whose beginning was asked for, in which others are got ready; at least the next one is."""
MAX_AHEAD = 16
"""Bodies behind a tensor among which the others are looked for."""
MIN_AHEAD = 128 << 10
"""Bytes of a tensor for which that pays: smaller ones have few chunks."""


class Reader:
    """*file*, opened. Needs `native`; without it, a `ExtentFile` reads as well. Any thread may read."""

    __slots__ = ("_ahead", "_asked", "_file", "_join", "_n_nodes", "_seen", "address")

    def __init__(self, file: ExtentFile) -> None:
        self._file = file
        self._join = program.Join(file.starts)
        self._asked = bytearray(len(file.bodies))
        self._n_nodes = 0
        self._ahead: dict[int, Future[Program | None]] = {}
        self._seen = 0  # bodies before it are not got ready any more
        self.address = self._join.node.address
        """Of the node in memory, by which ``ckptfs_fuse_read`` knows the file."""

    def read_into(self, offset: int, out: memoryview) -> int:
        """As `ExtentFile.read_into`."""
        if len(out) > LARGE:
            return self._file.read_into(offset, out)
        n = max(0, min(len(out), self._file.size - offset))
        done = 0
        while done < n:
            done += self._join.read(offset + done, out[done:n])
            if done < n:
                done += self._read_body(offset + done, out[done:n])
        return n

    def _read_body(self, offset: int, out: memoryview) -> int:
        """Read in Python up to the end of a body, unless it just got a node; how many bytes that were."""
        i = self._file.body_at(offset)
        if not self._asked[i]:
            self._asked[i] = 1
            node = self._node(i) if self._n_nodes < MAX_NODES else None
            if offset == self._file.starts[i]:
                self._get_ready_behind(i)
            if node is not None:
                self._n_nodes += 1
                self._join.give(i, node)
                return 0
        return self._file.read_into(offset, out[: self._file.starts[i + 1] - offset])

    def _node(self, i: int) -> Program | None:
        begun = self._ahead.pop(i, None)
        return _node_of(self._file.bodies[i]) if begun is None or begun.cancel() else begun.result()

    def _get_ready_behind(self, i: int) -> None:
        """Begin with the nodes of tensors behind body *i*, of which somebody reads the first byte."""
        bodies, starts = self._file.bodies, self._file.starts
        for j in range(max(i + 1, self._seen), min(i + 1 + MAX_AHEAD, len(bodies))):
            if self._ahead and starts[j] > starts[i + 1] + LEAD:
                return
            self._seen = j + 1
            if starts[j + 1] - starts[j] >= MIN_AHEAD and not self._asked[j] and not isinstance(bodies[j], bytes):
                self._ahead[j] = _pool().submit(_expected_node_of, bodies[j])


@lru_cache(maxsize=1)
def _pool() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(1, "ckptfs-ahead")


os.register_at_fork(after_in_child=_pool.cache_clear)  # threads do not live on in a child


def _expected_node_of(body: Body) -> Program | None:
    node = _node_of(body)
    if node is not None:
        program.expect(node)
    return node


def _node_of(body: Body) -> Program | None:
    if isinstance(body, bytes):
        return program.text(body)
    try:
        return node_of(body)
    except (CkptfsError, OSError) as error:
        log.debug("left to Python: %s", error)  # reading it there says the same to the reader
        return None
