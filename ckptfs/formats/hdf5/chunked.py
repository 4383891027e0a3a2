"""Chunked datasets as lazy tensors.

Real checkpoints hold LZ4 chunks whose one block is a plain copy. Such a chunk is read in place: only the rows that are
asked for, several chunks into one buffer, then one strided copy. All other chunks are decoded once, into the cache.
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
from ckptfs.formats.files import SourceFile
from ckptfs.formats.hdf5 import chunks_lz4, chunks_uncompressed
from ckptfs.formats.hdf5 import filters as h5_filters
from ckptfs.formats.hdf5.btree import ChunkTable
from ckptfs.formats.hdf5.chunks_uncompressed import ENCODED, MISSING, PLAIN, UNKNOWN, Plan
from ckptfs.formats.hdf5.decoder import Decoder
from ckptfs.formats.hdf5.index import object_path
from ckptfs.native import library, program
from ckptfs.native.program import Program
from ckptfs.native.scratch import scratch
from ckptfs.tensors.cache import TileCache
from ckptfs.tensors.dtypes import DType
from ckptfs.tensors.ranges import read_blocks
from ckptfs.tensors.tensor import Elements, Shape, n_cols

MAX_DECODED = 256 << 20
"""Largest chunk that is decoded, in bytes."""
Filters = tuple[tuple[int, tuple[int, ...]], ...]
Span = tuple[int, int]


@dataclass(slots=True)
class ChunkedTensor:
    """A tensor in chunks: a `source.Tensor`. The chunk table is made on the first read."""

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
    """For the filters that `h5_filters` does not know."""
    serial: int = field(default_factory=itertools.count().__next__)
    """Names the tensor in the cache; an id() or a descriptor may come back."""
    _plan: Plan | None = None
    _node: Program | None = None

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
        """As `source.Tensor` says. Raises `MissingCodec` for a filter that is not installed."""
        if out.size == 0:
            return
        plan = self._plan or self._make_plan()
        cols = n_cols(self.shape)
        with self._hinted(row * cols + col, out.size if 2 * out.shape[1] > cols else 0):
            if self._is_tiled and col % self.chunk[1] == 0 and (col + out.shape[1]) % self.chunk[1] in (0, self._rest):
                self._read_tiles(plan, row, col, out)
            elif not (self._is_tiled and chunks_lz4.fill_part(self, plan, row, col, out)):
                self._read_boxes(plan, row, col, out)

    def read_span(self, start: int, out: npt.NDArray[Any]) -> None:
        """Elements from *start* on, in C order, into the 1-d array *out*."""
        if not self._is_tiled:
            read_blocks(self, start, out)
            return
        plan = self._plan or self._make_plan()
        with self._hinted(start, out.size):
            self._read_span(plan, start, out)

    def _read_span(self, plan: Plan, start: int, out: npt.NDArray[Any]) -> None:
        cols, done = self.shape[1], 0
        several = start // cols < (start + len(out) - 1) // cols  # a part of one row needs few of the row's chunks
        if several and library.LIBRARY is not None and chunks_uncompressed.fill_bands(self, plan, start, out):
            return
        # a reader of the whole tensor begins and ends with such a part, too
        together = several or start == 0 or start + len(out) == self.shape[0] * cols
        band = self.chunk[0] * cols
        while done < len(out):
            n = min(len(out) - done, band - (start + done) % band)
            part = out[done : done + n]
            one_row = (start + done) // cols == (start + done + n - 1) // cols
            plain = not one_row and chunks_uncompressed.fill_span(self, plan, start + done, part)
            if not plain and not chunks_lz4.fill_span(self, plan, start + done, part, together):
                read_blocks(self, start + done, part)
            done += n

    def read_transposed(self, row: int, col: int, out: Elements) -> bool:
        """As in `spans`; False when the chunks it lies in are not all plain, or there is no fast way."""
        if not (self._is_tiled and library.can_transpose(out)):
            return False
        plan = self._plan or self._make_plan()
        wide, done = self.chunk[1], 0
        with self._hinted_columns(col, len(out)):
            while done < len(out):
                n = min(len(out) - done, wide - (col + done) % wide)
                if not chunks_uncompressed.fill_transposed(self, plan, row, col + done, out[done : done + n]):
                    return False
                done += n
            return True

    def node(self) -> Program | None:
        """As `nodes` says: of matrices, and of vectors, whose chunks lie side by side in one row."""
        if len(self.shape) not in (1, 2) or 0 in self.shape:
            return None
        plan, size = self._plan or self._make_plan(), self.dtype.itemsize
        high, wide = self.chunk if len(self.shape) == 2 else (1, self.chunk[0])
        places = plan.data, plan.table.offsets, plan.states
        sizes = (high, wide * size), self.shape[-1] * size, plan.table.grid[-1]
        return program.tiles(self.file.fd, *places, *sizes, self.serial)

    def _hinted(self, start: int, n: int) -> AbstractContextManager[None]:
        """While *n* elements from *start* on are read."""
        nbytes = n * self.dtype.itemsize
        node = self._hints if nbytes >= program.MIN_HINTED else None
        return program.hinted(node, rows=(start * self.dtype.itemsize, nbytes)) if node else nullcontext()

    def _hinted_columns(self, col: int, n: int) -> AbstractContextManager[None]:
        """While all of *n* columns from *col* on are read, though not in one call."""
        first, last = col // self.chunk[1], (col + n - 1) // self.chunk[1]
        node = self._hints
        return program.hinted(node, columns=(first, last - first + 1)) if node else nullcontext()

    @property
    def _hints(self) -> Program | None:
        """By which the kernel is told what is going to be read."""
        if self._node is None and library.LIBRARY is not None:
            self._node = self.node()
        return self._node

    @property
    def _is_tiled(self) -> bool:
        """Whether it is a matrix in chunks of ordinary size, as real ones are: these have ways of their own."""
        return len(self.shape) == 2 and math.prod(self.chunk) * self.dtype.itemsize <= chunks_uncompressed.BUFFER

    @property
    def _rest(self) -> int:
        """Columns in the last chunk of a row of chunks, 0 when it is full."""
        return self.shape[1] % self.chunk[1]

    def _read_tiles(self, plan: Plan, row: int, col: int, out: Elements) -> None:
        """A block of a matrix whose columns begin and end where chunks do."""
        first, done = col // self.chunk[1], 0
        while done < len(out):
            n = min(len(out) - done, self.chunk[0] - (row + done) % self.chunk[0])
            part = out[done : done + n]
            if not chunks_uncompressed.fill_rows(self, plan, row + done, first, part):
                several = chunks_lz4.fill_rows(self, plan, row + done, first, out[done:])
                if several:
                    n = several
                else:
                    self._read_boxes(plan, row + done, col, part)
            done += n

    def _read_boxes(self, plan: Plan, row: int, col: int, out: Elements) -> None:
        """Any block of a tensor of any shape."""
        rows = row, row + len(out)
        if len(self.shape) == 1:
            _gather(self, plan, (rows,), out[:, 0])
            return
        at = 0
        for box in boxes(self.shape[1:], col, col + out.shape[1]):
            extents = [stop - start for start, stop in box]
            n = math.prod(extents)
            # splitting an axis never copies, whatever the strides are
            _gather(self, plan, (rows, *box), out[:, at : at + n].reshape(len(out), *extents))
            at += n

    def prepare(self) -> None:
        """Read the chunk table, unless it is there."""
        if self._plan is None:
            self._make_plan()

    def _make_plan(self) -> Plan:
        """Without a lock: two threads may make the same plan, and a child process waits for no thread of its parent."""
        plan = self._plan = _plan(self)
        return plan


def boxes(dims: Sequence[int], start: int, stop: int) -> Iterator[tuple[Span, ...]]:
    """Elements ``[start, stop)`` in C order of an array of shape *dims*, as boxes in the same order."""
    if len(dims) == 1:
        yield ((start, stop),)
        return
    inner = math.prod(dims[1:])
    (first, head), (last, tail) = divmod(start, inner), divmod(stop, inner)
    if first == last:
        yield from (((first, first + 1), *box) for box in boxes(dims[1:], head, tail))
        return
    if head:
        yield from (((first, first + 1), *box) for box in boxes(dims[1:], head, inner))
        first += 1
    if last > first:
        yield ((first, last), *((0, n) for n in dims[1:]))
    if tail:
        yield from (((last, last + 1), *box) for box in boxes(dims[1:], 0, tail))


def _plan(tensor: ChunkedTensor) -> Plan:
    table = tensor.load()
    n = math.prod(tensor.chunk) * tensor.dtype.itemsize
    every = (1 << len(tensor.filters)) - 1
    unfiltered = (table.masks & every == every) & (table.nbytes == n)
    head = np.where(unfiltered, 0, h5_filters.LZ4_HEAD)
    states = np.full(len(table.offsets), ENCODED, np.uint8)
    lz4 = [number for number, _ in tensor.filters] == [h5_filters.LZ4]
    if lz4:
        states[(table.masks & 1 == 0) & (table.nbytes == n + h5_filters.LZ4_HEAD)] = UNKNOWN
    states[unfiltered] = PLAIN
    states[table.offsets < 0] = MISSING
    return Plan(table, table.offsets + head, bytearray(states), lz4 and not table.masks.any())


def _gather(tensor: ChunkedTensor, plan: Plan, box: Sequence[Span], out: npt.NDArray[Any]) -> None:
    """Fill *out*, whose shape is the box's, chunk row by chunk row."""
    grid = plan.table.grid
    lead = [list(_cells(*span, size)) for span, size in zip(box[:-1], tensor.chunk[:-1], strict=True)]
    runs = list(_runs(*box[-1], tensor.chunk[-1]))
    for cell in itertools.product(*lead):
        first = 0
        for (index, _, _), n in zip(cell, grid[:-1], strict=True):
            first = first * n + index
        part = out[tuple(place for _, _, place in cell)]
        inside = [span for _, span, _ in cell]
        for index, count, span, place in runs:
            _read_run(tensor, plan, first * grid[-1] + index, count, [*inside, span], part[..., place])


def _cells(start: int, stop: int, size: int) -> Iterator[tuple[int, Span, slice]]:
    """(chunk index, span inside the chunk, place in the result) for each chunk of ``[start, stop)`` on one axis."""
    for index in range(start // size, (stop - 1) // size + 1):
        a, b = max(start, index * size), min(stop, (index + 1) * size)
        yield index, (a - index * size, b - index * size), slice(a - start, b - start)


def _runs(start: int, stop: int, size: int) -> Iterator[tuple[int, int, Span, slice]]:
    """As `_cells` on the last axis, with whole chunks in one run: (first chunk, count, span inside, place)."""
    first, last = -(-start // size), stop // size
    if first >= last:
        yield from ((index, 1, span, place) for index, span, place in _cells(start, stop, size))
        return
    if start < first * size:
        yield first - 1, 1, (size - (first * size - start), size), slice(0, first * size - start)
    yield first, last - first, (0, size), slice(first * size - start, last * size - start)
    if last * size < stop:
        yield last, 1, (0, stop - last * size), slice(last * size - start, stop - start)


def _read_run(
    tensor: ChunkedTensor, plan: Plan, first: int, count: int, inside: list[Span], out: npt.NDArray[Any]
) -> None:
    """Fill *out* with the same part *inside* of *count* chunks that are neighbours on the last axis."""
    states = plan.states
    if chunks_uncompressed.all_plain(tensor, plan, first, count):
        _read_plain(tensor, plan.data[first : first + count], inside, out)
        return
    width, size = inside[-1][1] - inside[-1][0], math.prod(tensor.chunk)
    for i in range(first, first + count):
        part = out[..., (i - first) * width : (i - first + 1) * width]
        if states[i] == PLAIN:
            _read_plain(tensor, plan.data[i : i + 1], inside, part)
        elif states[i] == MISSING:
            part[...] = np.frombuffer(tensor.fill, tensor.dtype.storage_dtype)[0]
        else:
            tile = tensor.cache.get(("h5", tensor.serial, i), partial(_decode, tensor, plan, i), part.size / size)
            part[...] = tile[tuple(slice(*span) for span in inside)]


def _read_plain(
    tensor: ChunkedTensor, offsets: npt.NDArray[np.int64], inside: list[Span], out: npt.NDArray[Any]
) -> None:
    """Read the part *inside* of plain chunks whose elements start at *offsets*, and copy it to its places in *out*."""
    size, chunk = tensor.dtype.itemsize, tensor.chunk
    axis = next((i for i, (a, b) in enumerate(inside) if b - a > 1), len(chunk) - 1)
    # what is read has no gaps: one index before *axis*, a span of it, and all of the axes behind
    read = [*inside[: axis + 1], *((0, n) for n in chunk[axis + 1 :])]
    extents = [b - a for a, b in read]
    nbytes = math.prod(extents) * size
    if nbytes > chunks_uncompressed.BUFFER:
        _read_halves(tensor, offsets, inside, axis, out)
        return
    start = 0
    for (a, _), n in zip(read, chunk, strict=True):
        start = start * n + a
    cut = (slice(None), *(slice(a - c, b - c) for (a, b), (c, _) in zip(inside, read, strict=True)))
    width = inside[-1][1] - inside[-1][0]
    places = out.reshape(*out.shape[:-1], len(offsets), width)
    step = max(1, chunks_uncompressed.BUFFER // nbytes)
    for i in range(0, len(offsets), step):
        starts = (offsets[i : i + step] + start * size).tolist()
        found = chunks_uncompressed.read_pieces(tensor, starts, nbytes, extents)[cut]
        chunks_uncompressed.copy(np.moveaxis(found, 0, -2), places[..., i : i + step, :], width * size)


def _read_halves(
    tensor: ChunkedTensor, offsets: npt.NDArray[np.int64], inside: list[Span], axis: int, out: npt.NDArray[Any]
) -> None:
    """Parts of very large chunks, piece by piece."""
    if len(offsets) > 1:
        width = out.shape[-1] // len(offsets)
        for i in range(len(offsets)):
            _read_plain(tensor, offsets[i : i + 1], inside, out[..., i * width : (i + 1) * width])
        return
    a, b = inside[axis]
    middle = (a + b) // 2
    for start, stop in (a, middle), (middle, b):
        place = [slice(None)] * axis + [slice(start - a, stop - a)]
        _read_plain(tensor, offsets, [*inside[:axis], (start, stop), *inside[axis + 1 :]], out[tuple(place)])


def _decode(tensor: ChunkedTensor, plan: Plan, i: int) -> npt.NDArray[Any]:
    """One chunk with its filters undone, as an array of the chunk's shape."""
    packed = chunks_lz4.chunk(tensor, plan, i)
    if packed is not None:
        return packed
    nbytes = math.prod(tensor.chunk) * tensor.dtype.itemsize
    offset, stored = int(plan.table.offsets[i]), int(plan.table.nbytes[i])
    if nbytes > MAX_DECODED or offset + stored > tensor.file.size or stored > 8 * nbytes + 4096:
        what = f"chunk {i} of {nbytes} bytes ({stored} stored) is too large, or lies outside of the file"
        raise CorruptChunk(tensor.file.path, tensor.key, offset, what)
    try:
        data = _decoded(tensor, plan, i, nbytes)
    except ValueError as error:
        raise CorruptChunk(tensor.file.path, tensor.key, offset, f"chunk {i}: {error}") from error
    tile: npt.NDArray[Any] = data.view(tensor.dtype.storage_dtype).reshape(tensor.chunk)
    return tile


def _decoded(tensor: ChunkedTensor, plan: Plan, i: int, nbytes: int) -> npt.NDArray[np.uint8]:
    """The bytes of one chunk, in memory of their own; ValueError when the stored ones are damaged."""
    mask = int(plan.table.masks[i])
    if not h5_filters.are_known(tensor.filters, mask):
        cell = np.unravel_index(i, plan.table.grid)
        start = tuple(int(index) * size for index, size in zip(cell, tensor.chunk, strict=True))
        used = tuple(number for bit, (number, _) in enumerate(tensor.filters) if not mask >> bit & 1)
        return tensor.decoder.chunk(object_path(tensor.key), start, tensor.chunk, used, nbytes)
    raw = scratch("encoded", int(plan.table.nbytes[i]))
    chunks_uncompressed.read_exactly(tensor, raw.data, int(plan.table.offsets[i]))
    data = h5_filters.decode(raw, tensor.filters, mask, nbytes)
    return data.copy() if np.may_share_memory(data, raw) else data
