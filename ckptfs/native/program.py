"""Bytes as trees of nodes that ``src/program.c`` reads without Python: the innermost loops of a mount, one level up.

A lazy tensor that only moves bytes may have a method ``node()`` that gives the node of its bytes in C order. Nodes are
made of what the tensor's own Python code reads by, so both give the same; what no node can say stays in Python.
"""

from __future__ import annotations

import ctypes
from array import array
from ctypes import c_int64, c_void_p
from typing import Any

import numpy as np
import numpy.typing as npt

from ckptfs.native import library
from ckptfs.native.prefetch import step_of

TEXT, STORED, TILES, PART, ORDER, JOIN, TURN = range(7)
MAX_TURNED = 4 << 20
"""Largest tile of a transposed matrix, in bytes."""


MIN_HINTED = 64 << 10
"""Smaller reads are those of random readers; as in ``src/prefetch.c``."""


class Program(ctypes.Structure):
    """The twin of ``node`` in ``src/program.c``, which says what the fields mean. *kept* is what they point to."""

    _fields_ = (
        ("kind", c_int64),
        ("fd", c_int64),
        ("text", c_void_p),
        ("starts", c_void_p),
        ("offsets", c_void_p),
        ("states", c_void_p),
        ("order", c_void_p),
        ("part", c_void_p),
        ("parts", c_void_p),
        ("shift", c_int64),
        ("n", c_int64),
        ("high", c_int64),
        ("wide", c_int64),
        ("cols", c_int64),
        ("nbytes", c_int64),
        ("step", c_int64),
        ("name", c_int64),
    )
    kept: Any

    @property
    def address(self) -> int:
        return ctypes.addressof(self)


def text(data: bytes) -> Program:
    """Literal bytes."""
    letters = np.frombuffer(data, np.uint8)
    return _node(TEXT, letters, text=letters.ctypes.data)


def stored(fd: int, offset: int) -> Program:
    """Bytes of a file from *offset* on."""
    return _node(STORED, None, fd=fd, shift=offset, step=step_of(fd))


def tiles(
    fd: int,
    starts: npt.NDArray[np.int64],
    offsets: npt.NDArray[np.int64],
    states: bytearray,
    grid: tuple[int, int],
    cols: int,
    count: int,
    serial: int,
) -> Program | None:
    """A matrix in plain chunks, *count* in a row of chunks.

    *starts*: where each chunk's elements begin; *offsets*: where it begins; *states*: what is known of it, written to
    when a chunk is looked at; *grid*: rows of a chunk and bytes of its row; *cols*: bytes of the matrix's row;
    *serial* names it among all. None where rows of chunks are too large for the scratch memory in C.
    """
    high, wide = grid
    if wide > library.SCRATCH:
        return None
    seen = np.frombuffer(states, np.uint8)
    arrays = np.ascontiguousarray(starts, np.int64), np.ascontiguousarray(offsets, np.int64), seen
    places = dict(zip(("starts", "offsets", "states"), (a.ctypes.data for a in arrays), strict=True))
    sizes = {"n": count, "shift": len(starts) // count, "high": high, "wide": wide, "cols": cols, "nbytes": high * wide}
    return _node(TILES, arrays, fd=fd, step=step_of(fd), name=serial, **sizes, **places)


def part(of: Program | None, shift: int) -> Program | None:
    """The bytes of *of* from *shift* on."""
    return None if of is None else _node(PART, of, part=of.address, shift=shift)


def ordered(
    of: Program | None, order: npt.NDArray[np.int64], starts: npt.NDArray[np.int64], cols: int
) -> Program | None:
    """Rows of *cols* bytes: row i is row ``order[i]`` of *of*.

    Rows move in blocks of one size: block b comes from as many neighbouring rows, from row ``starts[b]`` on.
    """
    if of is None:
        return None
    arrays = np.ascontiguousarray(order, np.int64), np.ascontiguousarray(starts, np.int64)
    places = dict(zip(("order", "offsets"), (a.ctypes.data for a in arrays), strict=True))
    return _node(ORDER, (of, arrays), part=of.address, n=len(order) // len(starts), cols=cols, **places)


def turned(of: Program | None, shape: tuple[int, int], size: int, high: int, serial: int) -> Program | None:
    """The transpose of the matrix *of*, whose *shape* is that of the transpose, with elements of *size* bytes.

    It is made in tiles of *high* rows; *serial* names the tensor among all. None for matrices that C cannot transpose.
    """
    rows, cols = shape
    if of is None or of.kind not in (TILES, JOIN) or not 0 < high * cols * size <= MAX_TURNED or not rows:
        return None
    sizes = {"n": rows, "high": high, "cols": cols * size, "wide": size, "nbytes": rows * size}
    return _node(TURN, of, part=of.address, shift=serial, **sizes)


def joined(nodes: list[Program | None], starts: tuple[int, ...]) -> Program | None:
    """Nodes end to end; *starts* has the position of each and the end. None when one of them is."""
    if None in nodes:
        return None
    join = Join(starts)
    for i, node in enumerate(nodes):
        assert node is not None
        join.give(i, node)
    return join.node


class Join:
    """Parts end to end that may be given one by one, while other threads read."""

    def __init__(self, starts: tuple[int, ...]) -> None:
        places, parts = array("q", starts), array("q", bytes(8 * (len(starts) - 1)))
        self._kept: list[Any] = [places, parts]
        # the address of an array without elements is none
        where = {"starts": places.buffer_info()[0], "parts": parts.buffer_info()[0]}
        self.node = _node(JOIN, self._kept, n=len(starts) - 1, **where)

    def give(self, i: int, node: Program) -> None:
        """Let C read part *i* from *node*."""
        assert library.LIBRARY is not None
        self._kept.append(node)
        library.LIBRARY.ckptfs_give_part(self.node.address, i, node.address)

    def read(self, start: int, out: memoryview) -> int:
        """How many bytes from *start* on are in *out* now: all, or those before a part that is left to Python."""
        assert library.LIBRARY is not None
        line = np.frombuffer(out, np.uint8)
        done: int = library.LIBRARY.ckptfs_read(self.node.address, start, len(out), line.ctypes.data)
        return done


def expect(node: Program) -> None:
    """Somebody is going to read *node* from its first byte on: the kernel hears of that if the source is far away."""
    assert library.LIBRARY is not None
    library.LIBRARY.ckptfs_expect(node.address, 0)


class hinted:  # noqa: N801 - reads as a function: ``with hinted(...):``
    """While the block runs, some of the chunks of *node* are read: the kernel hears of them and of those behind.

    *rows*: (start, nbytes) in bytes, row after row; or *columns*: (first, count) of columns of chunks. Needs `native`.
    """

    __slots__ = ("_ask", "_node", "_waits", "_where")

    def __init__(
        self, node: Program, *, rows: tuple[int, int] | None = None, columns: tuple[int, int] = (0, 0)
    ) -> None:
        assert library.LIBRARY is not None
        self._ask = library.LIBRARY.ckptfs_ahead_columns if rows is None else library.LIBRARY.ckptfs_ahead_rows
        self._node, self._where, self._waits = node, rows or columns, 0

    def __enter__(self) -> None:
        self._waits = self._ask(self._node.address, *self._where)

    def __exit__(self, *exc: object) -> None:
        assert library.LIBRARY is not None
        library.LIBRARY.ckptfs_waited(self._waits)


def _node(kind: int, kept: Any, **fields: Any) -> Program:
    node = Program(kind=kind, **fields)
    node.kept = kept
    return node
