"""The chunks of a dataset: their grid, where each is stored, and what is known of it.

Chunks form a grid. A *grid row* is a row of that grid: the chunks side by side that hold the same rows of a matrix.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from ckptfs.errors import CorruptChunk
from ckptfs.formats.hdf5.filters import LZ4, LZ4_HEAD
from ckptfs.tensors.cache import TileCache
from ckptfs.tensors.dtypes import DType
from ckptfs.tensors.source_file import SourceFile
from ckptfs.tensors.tensor import Shape

UNKNOWN, UNCOMPRESSED, ENCODED, MISSING = range(4)
"""States of a chunk: an LZ4 chunk of the size of an uncompressed one, whose head was not read yet; elements stored as
they are; filters to undo; never written. As in ``native/src/native.h``."""
Filters: TypeAlias = tuple[tuple[int, tuple[int, ...]], ...]
"""(filter id, client values) in the order of writing."""


@dataclass(frozen=True, slots=True)
class ChunkTable:
    """Chunks in the C order of the chunk grid."""

    grid: Shape
    offsets: npt.NDArray[np.int64]
    """Position in the file; -1 for a chunk that was never written."""
    nbytes: npt.NDArray[np.int64]
    """Stored size."""
    masks: npt.NDArray[np.uint32]
    """Bit i: filter i was skipped."""


def chunk_grid(shape: Shape, chunk: Shape) -> Shape:
    """Number of chunks along each axis."""
    return tuple(-(-n // c) for n, c in zip(shape, chunk, strict=True))


@dataclass(frozen=True, slots=True)
class ChunkPlan:
    """The chunks of one tensor, ready to read."""

    file: SourceFile
    key: str
    """For error messages."""
    dtype: DType
    shape: Shape
    chunk: Shape
    """Shape of a chunk."""
    chunk_nbytes: int
    """Size of a decoded chunk."""
    table: ChunkTable
    starts: npt.NDArray[np.int64]
    """Where the elements of an uncompressed chunk start in the file."""
    states: bytearray
    """State of each chunk. Two threads may classify the same chunk."""
    only_lz4: bool
    """Whether all chunks went through the LZ4 filter and no other."""
    cache: TileCache
    serial: int
    """Identifies the tensor in the cache."""

    @property
    def chunk_row_nbytes(self) -> int:
        """Bytes of a chunk's row, of a matrix."""
        return self.chunk[1] * self.dtype.itemsize

    @property
    def grid_cols(self) -> int:
        """Chunks side by side on the last axis."""
        return self.table.grid[-1]

    def read_exactly(self, out: memoryview, offset: int) -> None:
        """Fill *out* with the file's bytes from *offset* on; `CorruptChunk` where the file ends."""
        done = self.file.read_into(out, offset)
        while done < len(out):
            n = self.file.read_into(out[done:], offset + done)
            if n == 0:
                raise self.truncated(offset + done)
            done += n

    def truncated(self, offset: int) -> CorruptChunk:
        """The error for a file that ends at *offset*, inside a chunk."""
        what = "the file ends here: it became shorter after it was opened, or its index is damaged"
        return CorruptChunk(self.file.path, self.key, offset, what)


def initial_states(table: ChunkTable, filters: Filters, nbytes: int) -> tuple[bytearray, npt.NDArray[np.int64], bool]:
    """(states, starts, only_lz4) of a `ChunkPlan`, from what *table* says of chunks that have *nbytes* decoded."""
    every = (1 << len(filters)) - 1
    unfiltered = (table.masks & every == every) & (table.nbytes == nbytes)
    is_lz4 = [number for number, _ in filters] == [LZ4]
    states = np.full(len(table.offsets), ENCODED, np.uint8)
    if is_lz4:
        states[(table.masks & 1 == 0) & (table.nbytes == nbytes + LZ4_HEAD)] = UNKNOWN
    states[unfiltered] = UNCOMPRESSED
    states[table.offsets < 0] = MISSING
    starts = table.offsets + np.where(unfiltered, 0, LZ4_HEAD)
    return bytearray(states), starts, bool(is_lz4 and not table.masks.any())


def decoded_nbytes(chunk: Shape, dtype: DType) -> int:
    """Size of a decoded chunk."""
    return math.prod(chunk) * dtype.itemsize
