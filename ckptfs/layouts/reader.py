"""An open file: the bytes of its `File`, by C code where that can say them, by Python where not."""

from __future__ import annotations

import logging

from ckptfs import nodes
from ckptfs.errors import CkptfsError
from ckptfs.formats.spans import node_of
from ckptfs.layouts.extent import Body, File
from ckptfs.nodes import Node

log = logging.getLogger(__name__)

MOST_NODES = 10_000
"""Bodies of one open file that get a node, at half a KiB each; the others are read by Python."""
LARGE = 2 << 20
"""Requests above it (bytes) go to Python, which shares them among threads; the kernel's are smaller."""


class Reader:
    """*file*, opened. Needs `native`; without it, a `File` reads as well. Any thread may read."""

    __slots__ = ("_asked", "_file", "_join", "_n_nodes", "address")

    def __init__(self, file: File) -> None:
        self._file = file
        self._join = nodes.Join(file.starts)
        self._asked = bytearray(len(file.bodies))
        self._n_nodes = 0
        self.address = self._join.node.address
        """Of the node in memory, by which ``ckptfs_fuse_read`` knows the file."""

    def read_into(self, offset: int, out: memoryview) -> int:
        """As `File.read_into`."""
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
            node = _node_of(self._file.bodies[i]) if self._n_nodes < MOST_NODES else None
            if node is not None:
                self._n_nodes += 1
                self._join.give(i, node)
                return 0
        return self._file.read_into(offset, out[: self._file.starts[i + 1] - offset])


def _node_of(body: Body) -> Node | None:
    if isinstance(body, bytes):
        return nodes.text(body)
    try:
        return node_of(body)
    except (CkptfsError, OSError) as error:
        log.debug("left to Python: %s", error)  # reading it there says the same to the reader
        return None
