"""Read programs: trees that say where the bytes of a tensor or file come from; `src/program.c` runs them in C.

A lazy tensor that only moves bytes may have a method ``program()`` (`ckptfs.tensors.tensor.Programmed`). Programs use
the same tables as the tensor's Python code, so both give the same bytes. Reads that programs cannot express fall back
to Python. Functions that build a program return None where C cannot run it, and take None for a source without one.
"""

from __future__ import annotations

import ctypes
from array import array
from ctypes import c_int64, c_void_p
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from ckptfs.native import library
from ckptfs.native.prefetch import max_request

LITERAL, FILE, CHUNKS, SLICE, GATHER_ROWS, CONCAT, TRANSPOSE = range(7)
MAX_TILE = 4 << 20
"""Largest tile of a transposed matrix, in bytes."""
MIN_PREFETCHED = 64 << 10
"""Smaller reads are random and get no prefetch; as in ``src/prefetch.c``."""
_POINTERS = frozenset({"literal", "starts", "offsets", "states", "order", "source", "sources"})

_Int64s = npt.NDArray[np.int64]


class Program(ctypes.Structure):
    """The twin of ``program`` in ``src/program.h``, which says what the fields mean."""

    _fields_ = tuple(
        (name, c_void_p if name in _POINTERS else c_int64)
        for name in (
            *("kind", "fd", "literal", "starts", "offsets", "states", "order", "source", "sources", "offset"),
            *("n_sources", "grid_rows", "grid_cols", "chunk_rows", "chunk_row_nbytes", "chunk_nbytes", "row_nbytes"),
            *("block_rows", "n_rows", "tile_rows", "itemsize", "source_row_nbytes", "serial", "prefetch_nbytes"),
        )
    )
    kept: Any
    """Owns the memory that the pointers point to."""

    @property
    def address(self) -> int:
        return ctypes.addressof(self)


class OpenFile(Protocol):
    """A file to read from. A program keeps it: its descriptor stays valid as long as a program refers to it."""

    @property
    def fd(self) -> int: ...


@dataclass(frozen=True, slots=True)
class ChunkGrid:
    """A matrix in chunks, as C reads it."""

    starts: _Int64s
    """Where the elements of each chunk begin in the file."""
    offsets: _Int64s
    """Where each chunk begins, -1 for one that was never written."""
    states: bytearray
    """State of each chunk; written to when a chunk's header is read."""
    columns: int
    """Chunks side by side."""
    chunk_rows: int
    chunk_row_nbytes: int
    row_nbytes: int
    """Bytes of the matrix's row."""


def literal(data: bytes) -> Program:
    """These bytes."""
    values = np.frombuffer(data, np.uint8)
    return _program(LITERAL, values, literal=values.ctypes.data)


def file_bytes(file: OpenFile, offset: int) -> Program:
    """The bytes of a file from *offset* on."""
    return _program(FILE, file, fd=file.fd, offset=offset, prefetch_nbytes=max_request(file.fd))


def chunks(file: OpenFile, grid: ChunkGrid, serial: int) -> Program | None:
    """A matrix in uncompressed chunks. *serial* identifies it in this process.

    None where a chunk's row is too large for the scratch memory in C.
    """
    if grid.chunk_row_nbytes > library.SCRATCH:
        return None
    starts, offsets = np.ascontiguousarray(grid.starts, np.int64), np.ascontiguousarray(grid.offsets, np.int64)
    states = np.frombuffer(grid.states, np.uint8)
    return _program(
        CHUNKS,
        (file, starts, offsets, states),
        fd=file.fd,
        starts=starts.ctypes.data,
        offsets=offsets.ctypes.data,
        states=states.ctypes.data,
        grid_rows=len(starts) // grid.columns,
        grid_cols=grid.columns,
        chunk_rows=grid.chunk_rows,
        chunk_row_nbytes=grid.chunk_row_nbytes,
        chunk_nbytes=grid.chunk_rows * grid.chunk_row_nbytes,
        row_nbytes=grid.row_nbytes,
        serial=serial,
        prefetch_nbytes=max_request(file.fd),
    )


def slice_of(source: Program | None, offset: int) -> Program | None:
    """The bytes of *source* from *offset* on."""
    return None if source is None else _program(SLICE, source, source=source.address, offset=offset)


def gather_rows(source: Program | None, order: _Int64s, block_starts: _Int64s, row_nbytes: int) -> Program | None:
    """Rows of *row_nbytes*: row i is row ``order[i]`` of *source*.

    Rows move in blocks of one size: block b comes from as many neighbouring rows, from row ``block_starts[b]`` on.
    """
    if source is None:
        return None
    order, starts = np.ascontiguousarray(order, np.int64), np.ascontiguousarray(block_starts, np.int64)
    return _program(
        GATHER_ROWS,
        (source, order, starts),
        source=source.address,
        order=order.ctypes.data,
        offsets=starts.ctypes.data,
        block_rows=len(order) // len(starts),
        row_nbytes=row_nbytes,
    )


def transpose(
    source: Program | None, shape: tuple[int, int], itemsize: int, tile_rows: int, serial: int
) -> Program | None:
    """The transpose of the matrix *source*; *shape* is that of the transpose.

    It is made in tiles of *tile_rows* whole rows. *serial* identifies the tensor in this process. None for matrices
    that C cannot transpose.
    """
    rows, cols = shape
    if source is None or source.kind not in (CHUNKS, CONCAT) or not rows:
        return None
    if not 0 < tile_rows * cols * itemsize <= MAX_TILE:
        return None
    return _program(
        TRANSPOSE,
        source,
        source=source.address,
        n_rows=rows,
        tile_rows=tile_rows,
        itemsize=itemsize,
        row_nbytes=cols * itemsize,
        source_row_nbytes=rows * itemsize,
        serial=serial,
    )


def concat(sources: list[Program | None], starts: tuple[int, ...]) -> Program | None:
    """Sources end to end; *starts* has the position of each, and the end."""
    if None in sources:
        return None
    joined = ConcatProgram(starts)
    for i, source in enumerate(sources):
        assert source is not None
        joined.set_source(i, source)
    return joined.program


class ConcatProgram:
    """Sources end to end that are set one by one, while other threads read."""

    def __init__(self, starts: tuple[int, ...]) -> None:
        positions, sources = array("q", starts), array("q", bytes(8 * (len(starts) - 1)))
        self._kept: list[Any] = [positions, sources]
        # an array without elements has no address
        addresses = {"starts": positions.buffer_info()[0], "sources": sources.buffer_info()[0]}
        self.program = _program(CONCAT, self._kept, n_sources=len(starts) - 1, **addresses)

    def set_source(self, i: int, source: Program) -> None:
        """Let C read part *i* from *source*."""
        assert library.LIBRARY is not None
        self._kept.append(source)
        library.LIBRARY.ckptfs_set_source(self.program.address, i, source.address)

    def read(self, start: int, out: memoryview) -> int:
        """How many bytes from *start* on are in *out* now: all, or those before a part that Python reads."""
        assert library.LIBRARY is not None
        target = np.frombuffer(out, np.uint8)
        done: int = library.LIBRARY.ckptfs_read(self.program.address, start, len(out), target.ctypes.data)
        return done


def prefetch_start(source: Program) -> None:
    """Prefetch the beginning of *source*, which is going to be read, if recent reads had to wait."""
    assert library.LIBRARY is not None
    library.LIBRARY.ckptfs_prefetch_start(source.address, 0)


class prefetching:  # noqa: N801 - reads as a function: ``with prefetching(...):``
    """While the block runs, some of the chunks of *source* are read: the kernel prefetches them and those behind them.

    *rows*: (start, nbytes) in bytes, row after row; or *columns*: (first, count) of columns of chunks. Needs C.
    """

    __slots__ = ("_prefetch", "_range", "_source", "_waits")

    def __init__(
        self, source: Program, *, rows: tuple[int, int] | None = None, columns: tuple[int, int] = (0, 0)
    ) -> None:
        c = library.LIBRARY
        assert c is not None
        self._prefetch = c.ckptfs_prefetch_columns if rows is None else c.ckptfs_prefetch_rows
        self._source, self._range, self._waits = source, rows or columns, 0

    def __enter__(self) -> None:
        self._waits = self._prefetch(self._source.address, *self._range)

    def __exit__(self, *exc: object) -> None:
        assert library.LIBRARY is not None
        library.LIBRARY.ckptfs_prefetch_done(self._waits)


def _program(kind: int, kept: Any, **fields: Any) -> Program:
    made = Program(kind=kind, **fields)
    made.kept = kept
    return made
