"""Uncompressed chunks, whose elements are stored as they are: read several at a time, then copied into place.

The functions that fill an output return False where a chunk is not uncompressed; the caller then takes another way.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import numpy as np
import numpy.typing as npt

from ckptfs.formats.hdf5 import filters
from ckptfs.formats.hdf5.chunk_table import ENCODED, UNCOMPRESSED, UNKNOWN, ChunkPlan
from ckptfs.native import library
from ckptfs.native.scratch import scratch

BUFFER = 2 << 20
"""Bytes that are read before they are copied into place."""

_Array = npt.NDArray[Any]


def all_uncompressed(plan: ChunkPlan, first: int, count: int, step: int = 1) -> bool:
    """Whether *count* chunks from *first* on, each *step*-th, are uncompressed; reads the heads of unknown ones."""
    chunks = slice(first, first + (count - 1) * step + 1, step)
    states = plan.states[chunks]
    if states.count(UNCOMPRESSED) < count and UNKNOWN in states:
        _classify(plan, chunks)
        states = plan.states[chunks]
    return states.count(UNCOMPRESSED) == count


def _classify(plan: ChunkPlan, chunks: slice) -> None:
    """Find the state of those *chunks* that are unknown."""
    if library.LIBRARY is None:
        for i in range(chunks.start, chunks.stop, chunks.step):
            if plan.states[i] == UNKNOWN:
                plan.states[i] = _state_of(plan, i)
        return
    neighbours = slice(chunks.start, chunks.stop)
    states = np.frombuffer(plan.states, np.uint8)[neighbours]
    try:
        library.classify_chunks(plan.file.fd, plan.table.offsets[neighbours], chunks.step, plan.chunk_nbytes, states)
    except library.Truncated as e:
        raise plan.truncated(e.offset) from None


def _state_of(plan: ChunkPlan, i: int) -> int:
    """The state of an LZ4 chunk that has the size of an uncompressed one."""
    head = plan.file.read(filters.LZ4_HEAD, int(plan.table.offsets[i]))
    if len(head) < filters.LZ4_HEAD:
        raise plan.truncated(int(plan.table.offsets[i]))
    return UNCOMPRESSED if filters.is_uncompressed(head, plan.chunk_nbytes) else ENCODED


def read_pieces(plan: ChunkPlan, starts: list[int], nbytes: int, extents: list[int]) -> _Array:
    """Pieces of *nbytes* at each of *starts*, as an array (n pieces, *extents) that lives until the next call."""
    n, storage_dtype = len(starts), plan.dtype.storage_dtype
    gap = _common_gap(starts, nbytes)
    if gap:  # the writer stored the chunks one after the other: one read, headers and all
        buffer = scratch("chunks", (n - 1) * gap + nbytes)
        plan.read_exactly(buffer.data, starts[0])
    else:
        gap = nbytes
        buffer = scratch("chunks", n * nbytes)
        view = buffer.data
        for i, start in enumerate(starts):
            plan.read_exactly(view[i * nbytes : (i + 1) * nbytes], start)
    strides = [storage_dtype.itemsize]
    for extent in reversed(extents[1:]):
        strides.append(strides[-1] * extent)
    pieces: _Array = np.ndarray((n, *extents), storage_dtype, buffer, 0, (gap, *reversed(strides)))
    return pieces


def _common_gap(starts: list[int], nbytes: int) -> int:
    """Distance of pieces that follow each other evenly and closely, 0 for others."""
    if len(starts) == 1:
        return nbytes
    gap = starts[1] - starts[0]
    close = nbytes <= gap <= nbytes + nbytes // 4
    return gap if close and all(b - a == gap for a, b in itertools.pairwise(starts)) else 0


def copy(found: _Array, out: _Array, nbytes: int) -> None:
    """Copy; rows of *nbytes* as single items where both sides are contiguous, which is up to a quarter faster."""
    if found.shape[-1] > 1 and found.strides[-1] == out.strides[-1] == found.itemsize:
        row = np.dtype((np.void, nbytes))
        found, out = found.view(row), out.view(row)
    out[...] = found


def fill_rows(plan: ChunkPlan, row: int, first: int, out: _Array) -> bool:
    """Fill *out* (n_rows, n_cols) of a matrix, from *row* and column chunk *first* on.

    The rows lie in one grid row; the columns end where a chunk or the matrix ends.
    """
    chunk_rows, chunk_cols = plan.chunk
    count = -(-out.shape[1] // chunk_cols)
    grid_row, offset = divmod(row, chunk_rows)
    at = grid_row * plan.grid_cols + first
    if not all_uncompressed(plan, at, count):
        return False
    if library.LIBRARY is not None and library.has_contiguous_rows(out):
        _gather(plan, plan.starts[at : at + count], offset, out)
        return True
    for i, pieces in _read_rows(plan, plan.starts[at : at + count], offset, len(out)):
        _put_side_by_side(pieces, out[:, i * chunk_cols : (i + len(pieces)) * chunk_cols])
    return True


def _gather(plan: ChunkPlan, starts: npt.NDArray[np.int64], row: int, out: _Array) -> None:
    """Fill the rows of *out* from neighbouring chunks at *starts*, whose row *row* is the first."""
    chunk_row_nbytes, row_nbytes = plan.chunk_row_nbytes, out.shape[1] * out.itemsize
    sizes = row * chunk_row_nbytes, chunk_row_nbytes, row_nbytes, 0, out.nbytes
    try:
        library.gather(plan.file.fd, starts, *sizes, out, out.strides[0])
    except library.Truncated as e:
        raise plan.truncated(e.offset) from None


def _read_rows(plan: ChunkPlan, starts: npt.NDArray[np.int64], row: int, n_rows: int) -> Iterator[tuple[int, _Array]]:
    """The same rows of neighbouring chunks, as many chunks at a time as the buffer holds: (first, pieces)."""
    nbytes = n_rows * plan.chunk_row_nbytes
    step = max(1, BUFFER // nbytes)
    starts = starts + row * plan.chunk_row_nbytes
    for i in range(0, len(starts), step):
        yield i, read_pieces(plan, starts[i : i + step].tolist(), nbytes, [n_rows, plan.chunk[1]])


def _put_side_by_side(pieces: _Array, out: _Array) -> None:
    """Put *pieces* (n, rows, cols) side by side into *out*; the last one may be cut."""
    n, rows, cols = pieces.shape
    n_whole = min(n, out.shape[1] // cols)
    if n_whole:
        target = out[:, : n_whole * cols].reshape(rows, n_whole, cols)
        copy(pieces[:n_whole].transpose(1, 0, 2), target, cols * pieces.itemsize)
    if n_whole < n:
        out[:, n_whole * cols :] = pieces[n_whole, :, : out.shape[1] - n_whole * cols]


def fill_range(plan: ChunkPlan, start: int, out: _Array) -> bool:
    """Elements from *start* on of a matrix into *out*, 1-d: at least two rows, or parts of them, in one grid row.

    A request for bytes of a file seldom begins and ends with a row. The cut first and last row are read together with
    the whole ones between them, because rows of a chunk are neighbours in the file.
    """
    cols, chunk_cols = plan.shape[1], plan.chunk[1]
    row, head = divmod(start, cols)
    last, tail = divmod(start + len(out), cols)
    grid_row, offset = divmod(row, plan.chunk[0])
    at, count = grid_row * plan.grid_cols, plan.grid_cols
    if not all_uncompressed(plan, at, count):
        return False
    first = int(head > 0)
    begin, end = (cols - head) * first, len(out) - tail
    whole = out[begin:end].reshape(-1, cols)
    for i, pieces in _read_rows(plan, plan.starts[at : at + count], offset, last - row + (tail > 0)):
        left, right = i * chunk_cols, min(cols, (i + len(pieces)) * chunk_cols)
        if len(whole):
            _put_side_by_side(pieces[:, first : first + len(whole)], whole[:, left:right])
        if head and right > head:
            values, a = pieces[:, 0].reshape(-1), max(left, head)
            out[a - head : right - head] = values[a - left : right - left]
        if left < tail:
            values, b = pieces[:, -1].reshape(-1), min(right, tail)
            out[end + left : end + b] = values[: b - left]
    return True


def fill_range_in_c(plan: ChunkPlan, start: int, out: _Array) -> bool:
    """As `fill_range`, for any range of a matrix. Needs C."""
    chunk_rows, row_nbytes = plan.chunk[0], plan.shape[1] * out.itemsize
    grid_row_size = chunk_rows * plan.shape[1]
    first, last = start // grid_row_size, (start + len(out) - 1) // grid_row_size
    if not all_uncompressed(plan, first * plan.grid_cols, (last - first + 1) * plan.grid_cols):
        return False
    sizes = plan.grid_cols, chunk_rows, plan.chunk_row_nbytes, row_nbytes, start * out.itemsize
    try:
        library.gather_range(plan.file.fd, plan.starts, *sizes, out)
    except library.Truncated as e:
        raise plan.truncated(e.offset) from None
    return True


def fill_transposed(plan: ChunkPlan, row: int, col: int, out: _Array) -> bool:
    """``out[c, r]`` from the elements ``(row + r, col + c)``, whose columns lie in one column of chunks. Needs C."""
    chunk_rows, chunk_cols = plan.chunk
    first, offset = divmod(row, chunk_rows)
    count, step = -(-(offset + out.shape[1]) // chunk_rows), plan.grid_cols
    at = first * step + col // chunk_cols
    if not all_uncompressed(plan, at, count, step):
        return False
    starts = plan.starts[at : at + (count - 1) * step + 1 : step]
    rows, cols = (offset, out.shape[1]), (col % chunk_cols, len(out))
    try:
        library.gather_transposed(plan.file.fd, starts, (chunk_rows, chunk_cols), out.itemsize, rows, cols, out)
    except library.Truncated as e:
        raise plan.truncated(e.offset) from None
    return True
