"""Chunked datasets as lazy tensors.

Real checkpoints hold LZ4 chunks whose one block is not compressed. Such a chunk is read in place: only the rows that
are asked for, several chunks into one buffer, then one strided copy. All other chunks are decoded once, into the cache.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt

from ckptfs.errors import CorruptChunk
from ckptfs.formats.hdf5 import chunks_lz4, chunks_uncompressed
from ckptfs.formats.hdf5 import filters as h5_filters
from ckptfs.formats.hdf5.chunk_table import (
    MISSING,
    UNCOMPRESSED,
    ChunkPlan,
    ChunkTable,
    Filters,
    decoded_nbytes,
    initial_states,
)
from ckptfs.formats.hdf5.decoder import Decoder
from ckptfs.formats.hdf5.index import object_path
from ckptfs.native import library, program
from ckptfs.native.program import Program
from ckptfs.native.scratch import scratch
from ckptfs.tensors.cache import TileCache
from ckptfs.tensors.dtypes import DType
from ckptfs.tensors.ranges import read_blocks
from ckptfs.tensors.source_file import SourceFile
from ckptfs.tensors.tensor import Elements, Shape, n_cols

MAX_DECODED = 256 << 20
"""Largest chunk that is decoded, in bytes."""
Range = tuple[int, int]
"""(start, stop) on one axis."""

_Array = npt.NDArray[Any]


class _OfOpenFile:
    """A read: refused when the file is closed, also where the cache could answer, and when it is closed meanwhile."""

    __slots__ = ("_file",)

    def __init__(self, file: SourceFile) -> None:
        self._file = file

    def __enter__(self) -> None:
        self._file.fail_if_closed()

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is not None and issubclass(kind, OSError):
            self._file.fail_if_closed()


@dataclass(slots=True)
class ChunkedTensor:
    """A tensor in chunks. The chunk table is read with the first element."""

    dtype: DType
    shape: Shape
    file: SourceFile
    key: str
    chunk: Shape
    filters: Filters
    fill: bytes
    """One element's bytes, for chunks that were never written."""
    load: Callable[[], ChunkTable]
    cache: TileCache
    decoder: Decoder
    """For filters that `filters.decode` does not know."""
    serial: int = field(default_factory=itertools.count().__next__)
    """Identifies the tensor in the cache; an id() or a descriptor may be used again."""
    _plan: ChunkPlan | None = None
    _program: Program | None = None

    @property
    def preferred_block(self) -> tuple[int, int]:
        """Rows of a chunk, and its neighbouring columns: those of the last axes, as far as it spans them wholly."""
        n = 1
        for extent, size in zip(reversed(self.shape[1:]), reversed(self.chunk[1:]), strict=True):
            n *= min(extent, size)
            if size < extent:
                break
        return min(self.chunk[0], max(1, self.shape[0])), max(1, n)

    def read_block(self, row: int, col: int, out: Elements) -> None:
        """As `Tensor.read_block`. Raises `MissingCodec` for a filter that is not installed."""
        if out.size == 0:
            return
        plan = self._plan or self._make_plan()
        cols = n_cols(self.shape)
        n = out.size if 2 * out.shape[1] > cols else 0
        with _OfOpenFile(self.file), self._prefetching(row * cols + col, n):
            if self._is_tiled and col % self.chunk[1] == 0 and (col + out.shape[1]) % self.chunk[1] in (0, self._rest):
                self._read_whole_columns(plan, row, col, out)
            elif not (self._is_tiled and chunks_lz4.fill_block(plan, row, col, out)):
                self._read_boxes(plan, row, col, out)

    def read_range(self, start: int, out: _Array) -> None:
        if not self._is_tiled:
            read_blocks(self, start, out)
            return
        plan = self._plan or self._make_plan()
        with _OfOpenFile(self.file), self._prefetching(start, out.size):
            self._read_range(plan, start, out)

    def _read_range(self, plan: ChunkPlan, start: int, out: _Array) -> None:
        cols, done = self.shape[1], 0
        several_rows = start // cols < (start + len(out) - 1) // cols  # a part of one row needs few of its chunks
        if several_rows and library.LIBRARY is not None and chunks_uncompressed.fill_range_in_c(plan, start, out):
            return
        # a reader of the whole tensor begins and ends with a part of a row, too
        wants_rest = several_rows or start == 0 or start + len(out) == self.shape[0] * cols
        grid_row_size = self.chunk[0] * cols
        while done < len(out):
            n = min(len(out) - done, grid_row_size - (start + done) % grid_row_size)
            part = out[done : done + n]
            one_row = (start + done) // cols == (start + done + n - 1) // cols
            is_done = not one_row and chunks_uncompressed.fill_range(plan, start + done, part)
            if not is_done and not chunks_lz4.fill_range(plan, start + done, part, wants_rest):
                read_blocks(self, start + done, part)
            done += n

    def read_transposed(self, row: int, col: int, out: Elements) -> bool:
        """False where some of the chunks are not uncompressed, or without C."""
        if not (self._is_tiled and library.can_transpose(out)):
            return False
        plan = self._plan or self._make_plan()
        chunk_cols, done = self.chunk[1], 0
        with _OfOpenFile(self.file), self._prefetching_columns(col, len(out)):
            while done < len(out):
                n = min(len(out) - done, chunk_cols - (col + done) % chunk_cols)
                if not chunks_uncompressed.fill_transposed(plan, row, col + done, out[done : done + n]):
                    return False
                done += n
            return True

    def program(self) -> Program | None:
        """Of matrices, and of vectors, whose chunks lie side by side in one row."""
        if len(self.shape) not in (1, 2) or 0 in self.shape:
            return None
        plan, itemsize = self._plan or self._make_plan(), self.dtype.itemsize
        chunk_rows, chunk_cols = self.chunk if len(self.shape) == 2 else (1, self.chunk[0])
        sizes = plan.grid_cols, chunk_rows, chunk_cols * itemsize, self.shape[-1] * itemsize
        grid = program.ChunkGrid(plan.starts, plan.table.offsets, plan.states, *sizes)
        return program.chunks(self.file, grid, self.serial)

    def prepare(self) -> None:
        if self._plan is None:
            self._make_plan()

    def _prefetching(self, start: int, n: int) -> AbstractContextManager[None]:
        """Entered while *n* elements from *start* on are read."""
        nbytes = n * self.dtype.itemsize
        source = self._prefetch_program() if nbytes >= program.MIN_PREFETCHED else None
        if source is None:
            return nullcontext()
        return program.prefetching(source, rows=(start * self.dtype.itemsize, nbytes))

    def _prefetching_columns(self, col: int, n: int) -> AbstractContextManager[None]:
        """Entered while all of *n* columns from *col* on are read, though not in one call."""
        first, last = col // self.chunk[1], (col + n - 1) // self.chunk[1]
        source = self._prefetch_program()
        return program.prefetching(source, columns=(first, last - first + 1)) if source else nullcontext()

    def _prefetch_program(self) -> Program | None:
        """The program by which C knows where the chunks are."""
        if self._program is None and library.LIBRARY is not None:
            self._program = self.program()
        return self._program

    @property
    def _is_tiled(self) -> bool:
        """Whether it is a matrix in chunks of ordinary size, as real ones are: there are faster ways for these."""
        return len(self.shape) == 2 and decoded_nbytes(self.chunk, self.dtype) <= chunks_uncompressed.BUFFER

    @property
    def _rest(self) -> int:
        """Columns in the last chunk of a grid row, 0 when it is full."""
        return self.shape[1] % self.chunk[1]

    def _read_whole_columns(self, plan: ChunkPlan, row: int, col: int, out: Elements) -> None:
        """A block of a matrix whose columns begin and end where chunks do."""
        first, done = col // self.chunk[1], 0
        while done < len(out):
            n = min(len(out) - done, self.chunk[0] - (row + done) % self.chunk[0])
            part = out[done : done + n]
            if not chunks_uncompressed.fill_rows(plan, row + done, first, part):
                n_decoded = chunks_lz4.fill_rows(plan, row + done, first, out[done:])
                if n_decoded:
                    n = n_decoded
                else:
                    self._read_boxes(plan, row + done, col, part)
            done += n

    def _read_boxes(self, plan: ChunkPlan, row: int, col: int, out: Elements) -> None:
        """Any block of a tensor of any shape."""
        rows = row, row + len(out)
        if len(self.shape) == 1:
            _read_box(self, plan, (rows,), out[:, 0])
            return
        done = 0
        for box in boxes(self.shape[1:], col, col + out.shape[1]):
            extents = [stop - start for start, stop in box]
            n = math.prod(extents)
            # splitting an axis never copies, whatever the strides are
            _read_box(self, plan, (rows, *box), out[:, done : done + n].reshape(len(out), *extents))
            done += n

    def _make_plan(self) -> ChunkPlan:
        """Without a lock: two threads may make the same plan, and a child process waits for no thread of its parent."""
        try:
            table, nbytes = self.load(), decoded_nbytes(self.chunk, self.dtype)
        finally:
            self.file.check()  # a file that was written to may have any table, or one that only looks damaged
        states, starts, only_lz4 = initial_states(table, self.filters, nbytes)
        self._plan = plan = ChunkPlan(
            file=self.file,
            key=self.key,
            dtype=self.dtype,
            shape=self.shape,
            chunk=self.chunk,
            chunk_nbytes=nbytes,
            table=table,
            starts=starts,
            states=states,
            only_lz4=only_lz4,
            cache=self.cache,
            serial=self.serial,
        )
        return plan


def boxes(sizes: Sequence[int], start: int, stop: int) -> Iterator[tuple[Range, ...]]:
    """Elements ``[start, stop)`` in C order of an array of shape *sizes*, as boxes in the same order."""
    if len(sizes) == 1:
        yield ((start, stop),)
        return
    inner = math.prod(sizes[1:])
    (first, head), (last, tail) = divmod(start, inner), divmod(stop, inner)
    if first == last:
        yield from (((first, first + 1), *box) for box in boxes(sizes[1:], head, tail))
        return
    if head:
        yield from (((first, first + 1), *box) for box in boxes(sizes[1:], head, inner))
        first += 1
    if last > first:
        yield ((first, last), *((0, n) for n in sizes[1:]))
    if tail:
        yield from (((last, last + 1), *box) for box in boxes(sizes[1:], 0, tail))


def _read_box(tensor: ChunkedTensor, plan: ChunkPlan, box: Sequence[Range], out: _Array) -> None:
    """Fill *out*, whose shape is the box's, from chunks that are neighbours on the last axis at a time."""
    grid = plan.table.grid
    leading = [list(_cells(*extent, size)) for extent, size in zip(box[:-1], tensor.chunk[:-1], strict=True)]
    neighbours = list(_neighbours(*box[-1], tensor.chunk[-1]))
    for cell in itertools.product(*leading):
        first = 0
        for (index, _, _), n in zip(cell, grid[:-1], strict=True):
            first = first * n + index
        part = out[tuple(target for _, _, target in cell)]
        inside = [extent for _, extent, _ in cell]
        for index, count, extent, target in neighbours:
            _read_chunks(tensor, plan, first * grid[-1] + index, count, [*inside, extent], part[..., target])


def _cells(start: int, stop: int, size: int) -> Iterator[tuple[int, Range, slice]]:
    """(chunk index, range inside the chunk, part of the output) for each chunk of ``[start, stop)`` on one axis."""
    for index in range(start // size, (stop - 1) // size + 1):
        a, b = max(start, index * size), min(stop, (index + 1) * size)
        yield index, (a - index * size, b - index * size), slice(a - start, b - start)


def _neighbours(start: int, stop: int, size: int) -> Iterator[tuple[int, int, Range, slice]]:
    """As `_cells` on the last axis, whole chunks together: (first chunk, count, range inside, part of the output)."""
    first, last = -(-start // size), stop // size
    if first >= last:
        yield from ((index, 1, extent, target) for index, extent, target in _cells(start, stop, size))
        return
    if start < first * size:
        yield first - 1, 1, (size - (first * size - start), size), slice(0, first * size - start)
    yield first, last - first, (0, size), slice(first * size - start, last * size - start)
    if last * size < stop:
        yield last, 1, (0, stop - last * size), slice(last * size - start, stop - start)


def _read_chunks(
    tensor: ChunkedTensor, plan: ChunkPlan, first: int, count: int, inside: list[Range], out: _Array
) -> None:
    """Fill *out* with the same part *inside* of *count* chunks that are neighbours on the last axis."""
    states = plan.states
    if chunks_uncompressed.all_uncompressed(plan, first, count):
        _read_uncompressed(plan, plan.starts[first : first + count], inside, out)
        return
    width, size = inside[-1][1] - inside[-1][0], math.prod(tensor.chunk)
    for i in range(first, first + count):
        part = out[..., (i - first) * width : (i - first + 1) * width]
        if states[i] == UNCOMPRESSED:
            _read_uncompressed(plan, plan.starts[i : i + 1], inside, part)
        elif states[i] == MISSING:
            part[...] = np.frombuffer(tensor.fill, tensor.dtype.storage_dtype)[0]
        else:
            tile = tensor.cache.get(("h5", tensor.serial, i), partial(_decode, tensor, plan, i), part.size / size)
            part[...] = tile[tuple(slice(*extent) for extent in inside)]


def _read_uncompressed(plan: ChunkPlan, starts: npt.NDArray[np.int64], inside: list[Range], out: _Array) -> None:
    """Read the part *inside* of uncompressed chunks whose elements begin at *starts*, and copy it into *out*."""
    itemsize, chunk = plan.dtype.itemsize, plan.chunk
    axis = next((i for i, (a, b) in enumerate(inside) if b - a > 1), len(chunk) - 1)
    # what is read has no gaps: one index before *axis*, a range of it, and all of the axes behind
    read = [*inside[: axis + 1], *((0, n) for n in chunk[axis + 1 :])]
    extents = [b - a for a, b in read]
    nbytes = math.prod(extents) * itemsize
    if nbytes > chunks_uncompressed.BUFFER:
        _read_halves(plan, starts, inside, axis, out)
        return
    skip = 0
    for (a, _), n in zip(read, chunk, strict=True):
        skip = skip * n + a
    cut = (slice(None), *(slice(a - c, b - c) for (a, b), (c, _) in zip(inside, read, strict=True)))
    width = inside[-1][1] - inside[-1][0]
    target = out.reshape(*out.shape[:-1], len(starts), width)
    step = max(1, chunks_uncompressed.BUFFER // nbytes)
    for i in range(0, len(starts), step):
        offsets = (starts[i : i + step] + skip * itemsize).tolist()
        found = chunks_uncompressed.read_pieces(plan, offsets, nbytes, extents)[cut]
        chunks_uncompressed.copy(np.moveaxis(found, 0, -2), target[..., i : i + step, :], width * itemsize)


def _read_halves(plan: ChunkPlan, starts: npt.NDArray[np.int64], inside: list[Range], axis: int, out: _Array) -> None:
    """Parts of very large chunks, piece by piece."""
    if len(starts) > 1:
        width = out.shape[-1] // len(starts)
        for i in range(len(starts)):
            _read_uncompressed(plan, starts[i : i + 1], inside, out[..., i * width : (i + 1) * width])
        return
    a, b = inside[axis]
    middle = (a + b) // 2
    for start, stop in (a, middle), (middle, b):
        target = [slice(None)] * axis + [slice(start - a, stop - a)]
        _read_uncompressed(plan, starts, [*inside[:axis], (start, stop), *inside[axis + 1 :]], out[tuple(target)])


def _decode(tensor: ChunkedTensor, plan: ChunkPlan, i: int) -> _Array:
    """One chunk with its filters undone, as an array of the chunk's shape."""
    decoded = chunks_lz4.decoded_chunk(plan, i)
    if decoded is not None:
        return decoded
    nbytes = plan.chunk_nbytes
    offset, stored = int(plan.table.offsets[i]), int(plan.table.nbytes[i])
    if nbytes > MAX_DECODED or offset + stored > tensor.file.size or stored > 8 * nbytes + 4096:
        what = f"chunk {i} of {nbytes} bytes ({stored} stored) is too large, or lies outside of the file"
        raise CorruptChunk(tensor.file.path, tensor.key, offset, what)
    try:
        data = _decoded_bytes(tensor, plan, i, nbytes)
    except ValueError as error:
        raise CorruptChunk(tensor.file.path, tensor.key, offset, f"chunk {i}: {error}") from error
    tile: _Array = data.view(tensor.dtype.storage_dtype).reshape(tensor.chunk)
    return tile


def _decoded_bytes(tensor: ChunkedTensor, plan: ChunkPlan, i: int, nbytes: int) -> npt.NDArray[np.uint8]:
    """The bytes of one chunk, in memory of their own; ValueError when the stored ones are damaged."""
    mask = int(plan.table.masks[i])
    if not h5_filters.are_known(tensor.filters, mask):
        cell = np.unravel_index(i, plan.table.grid)
        start = tuple(int(index) * size for index, size in zip(cell, tensor.chunk, strict=True))
        used = tuple(number for bit, (number, _) in enumerate(tensor.filters) if not mask >> bit & 1)
        return tensor.decoder.chunk(object_path(tensor.key), start, tensor.chunk, used, nbytes)
    stored = scratch("encoded", int(plan.table.nbytes[i]))
    plan.read_exactly(stored.data, int(plan.table.offsets[i]))
    data = h5_filters.decode(stored, tensor.filters, mask, nbytes)
    return data.copy() if np.may_share_memory(data, stored) else data
