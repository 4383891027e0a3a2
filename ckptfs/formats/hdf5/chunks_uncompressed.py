"""Plain chunks, which lie in the file as they are: found, read several at a time, copied to their places."""

from __future__ import annotations

import itertools
import math
import os
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from ckptfs.errors import CorruptChunk
from ckptfs.formats.hdf5 import filters
from ckptfs.formats.hdf5.btree import ChunkTable
from ckptfs.native import library
from ckptfs.native.scratch import scratch

if TYPE_CHECKING:
    from ckptfs.formats.hdf5.chunked import ChunkedTensor

BUFFER = 2 << 20
"""Bytes that are read before they are copied to their places."""
UNKNOWN, PLAIN, ENCODED, MISSING = range(4)
"""What is known of a chunk."""


@dataclass(frozen=True, slots=True)
class Plan:
    """The chunks of one tensor, ready to read."""

    table: ChunkTable
    data: npt.NDArray[np.int64]
    """Where a plain chunk's elements start."""
    states: bytearray
    """What is known of each chunk. Threads may find out the same thing twice."""
    only_lz4: bool
    """Whether all chunks went through the LZ4 filter and no other."""


def all_plain(tensor: ChunkedTensor, plan: Plan, first: int, count: int, step: int = 1) -> bool:
    """Whether *count* chunks from *first* on, each *step*-th, are plain; looks at those not looked at before."""
    chunks = slice(first, first + (count - 1) * step + 1, step)
    states = plan.states[chunks]
    if states.count(PLAIN) < count and UNKNOWN in states:
        _look(tensor, plan, chunks)
        states = plan.states[chunks]
    return states.count(PLAIN) == count


def _look(tensor: ChunkedTensor, plan: Plan, chunks: slice) -> None:
    if library.LIBRARY is None:
        for i in range(chunks.start, chunks.stop, chunks.step):
            if plan.states[i] == UNKNOWN:
                plan.states[i] = _look_at(tensor, plan, i)
        return
    nbytes = math.prod(tensor.chunk) * tensor.dtype.itemsize
    all_of_them = slice(chunks.start, chunks.stop)
    states = np.frombuffer(plan.states, np.uint8)[all_of_them]
    try:
        library.look(tensor.file.fd, plan.table.offsets[all_of_them], chunks.step, nbytes, states)
    except library.Truncated as e:
        raise truncated(tensor, e.offset) from None


def _look_at(tensor: ChunkedTensor, plan: Plan, i: int) -> int:
    """Whether a chunk that has the size of a plain one is plain."""
    head = os.pread(tensor.file.fd, filters.LZ4_HEAD, int(plan.table.offsets[i]))
    if len(head) < filters.LZ4_HEAD:
        raise truncated(tensor, int(plan.table.offsets[i]))
    return PLAIN if filters.is_plain(head, math.prod(tensor.chunk) * tensor.dtype.itemsize) else ENCODED


def read_pieces(tensor: ChunkedTensor, starts: list[int], nbytes: int, extents: list[int]) -> npt.NDArray[Any]:
    """Pieces of *nbytes* at each of *starts*, as an array (n pieces, *extents) that lives until the next call."""
    n, word = len(starts), tensor.dtype.storage_dtype
    gap = _common_gap(starts, nbytes)
    if gap:  # the writer laid the chunks one after the other: one read, headers and all
        buffer = scratch("chunks", (n - 1) * gap + nbytes)
        read_exactly(tensor, buffer.data, starts[0])
    else:
        gap = nbytes
        buffer = scratch("chunks", n * nbytes)
        view = buffer.data
        for i, start in enumerate(starts):
            read_exactly(tensor, view[i * nbytes : (i + 1) * nbytes], start)
    strides = [word.itemsize]
    for extent in reversed(extents[1:]):
        strides.append(strides[-1] * extent)
    pieces: npt.NDArray[Any] = np.ndarray((n, *extents), word, buffer, 0, (gap, *reversed(strides)))
    return pieces


def _common_gap(starts: list[int], nbytes: int) -> int:
    """Distance of pieces that follow each other evenly and closely, 0 for others."""
    if len(starts) == 1:
        return nbytes
    gap = starts[1] - starts[0]
    close = nbytes <= gap <= nbytes + nbytes // 4
    return gap if close and all(b - a == gap for a, b in itertools.pairwise(starts)) else 0


def copy(found: npt.NDArray[Any], out: npt.NDArray[Any], nbytes: int) -> None:
    """Copy; whole lines of *nbytes* as single items where both sides have them, which is up to a quarter faster."""
    if found.shape[-1] > 1 and found.strides[-1] == out.strides[-1] == found.itemsize:
        line = np.dtype((np.void, nbytes))
        found, out = found.view(line), out.view(line)
    out[...] = found


def read_exactly(tensor: ChunkedTensor, out: memoryview, offset: int) -> None:
    done = os.preadv(tensor.file.fd, [out], offset)
    while done < len(out):
        got = os.preadv(tensor.file.fd, [out[done:]], offset + done)
        if got == 0:
            raise truncated(tensor, offset + done)
        done += got


def truncated(tensor: ChunkedTensor, offset: int) -> CorruptChunk:
    what = "the file ends here: it became shorter after it was opened, or its index is damaged"
    return CorruptChunk(tensor.file.path, tensor.key, offset, what)


def fill_rows(tensor: ChunkedTensor, plan: Plan, row: int, first: int, out: npt.NDArray[Any]) -> bool:
    """Fill *out* (n_rows, n_cols) of a matrix, from *row* and column chunk *first* on; False when a chunk is not plain.

    The rows lie in one row of chunks; the columns end where a chunk or the matrix ends.
    """
    high, wide = tensor.chunk
    count = -(-out.shape[1] // wide)
    band, inside = divmod(row, high)
    at = band * plan.table.grid[1] + first
    if not all_plain(tensor, plan, at, count):
        return False
    if library.LIBRARY is not None and library.has_plain_rows(out):
        _gather(tensor, plan.data[at : at + count], inside, out)
        return True
    for i, pieces in _bands(tensor, plan.data[at : at + count], inside, len(out)):
        _place(pieces, out[:, i * wide : (i + len(pieces)) * wide])
    return True


def _gather(tensor: ChunkedTensor, offsets: npt.NDArray[np.int64], row: int, out: npt.NDArray[Any]) -> None:
    """Fill the rows of *out* from neighbouring chunks at *offsets*, whose row *row* is the first."""
    wide, line = tensor.chunk[1] * tensor.dtype.itemsize, out.shape[1] * out.itemsize
    try:
        library.gather(tensor.file.fd, offsets, row * wide, wide, line, 0, out.nbytes, out, out.strides[0])
    except library.Truncated as e:
        raise truncated(tensor, e.offset) from None


def _bands(
    tensor: ChunkedTensor, offsets: npt.NDArray[np.int64], row: int, n_rows: int
) -> Iterator[tuple[int, npt.NDArray[Any]]]:
    """The same rows of neighbouring chunks, as many chunks at a time as the buffer holds: (first, pieces)."""
    wide = tensor.chunk[1]
    nbytes = n_rows * wide * tensor.dtype.itemsize
    step = max(1, BUFFER // nbytes)
    starts = offsets + row * wide * tensor.dtype.itemsize
    for i in range(0, len(starts), step):
        yield i, read_pieces(tensor, starts[i : i + step].tolist(), nbytes, [n_rows, wide])


def _place(pieces: npt.NDArray[Any], out: npt.NDArray[Any]) -> None:
    """Put *pieces* (n, rows, wide) side by side into *out*; the last one may be cut."""
    n, rows, wide = pieces.shape
    whole = min(n, out.shape[1] // wide)
    if whole:
        places = out[:, : whole * wide].reshape(rows, whole, wide)
        copy(pieces[:whole].transpose(1, 0, 2), places, wide * pieces.itemsize)
    if whole < n:
        out[:, whole * wide :] = pieces[whole, :, : out.shape[1] - whole * wide]


def fill_span(tensor: ChunkedTensor, plan: Plan, start: int, out: npt.NDArray[Any]) -> bool:
    """Elements from *start* on of a matrix into *out*, 1-d; False when a chunk is not plain.

    The span touches at least two rows, all in one row of chunks. A request for bytes of a file seldom begins and ends
    with a row: here the cut first and last row are read together with the whole ones between them, for in a chunk each
    row lies behind the one before.
    """
    cols, wide = tensor.shape[1], tensor.chunk[1]
    row, head = divmod(start, cols)
    last, tail = divmod(start + len(out), cols)
    n_rows = last - row + (tail > 0)
    band, inside = divmod(row, tensor.chunk[0])
    count = plan.table.grid[1]
    if not all_plain(tensor, plan, band * count, count):
        return False
    first = int(head > 0)
    begin, end = (cols - head) * first, len(out) - tail
    whole = out[begin:end].reshape(-1, cols)
    for i, pieces in _bands(tensor, plan.data[band * count : (band + 1) * count], inside, n_rows):
        left, right = i * wide, min(cols, (i + len(pieces)) * wide)
        if len(whole):
            _place(pieces[:, first : first + len(whole)], whole[:, left:right])
        if head and right > head:
            line, a = pieces[:, 0].reshape(-1), max(left, head)
            out[a - head : right - head] = line[a - left : right - left]
        if left < tail:
            line, b = pieces[:, -1].reshape(-1), min(right, tail)
            out[end + left : end + b] = line[: b - left]
    return True


def fill_bands(tensor: ChunkedTensor, plan: Plan, start: int, out: npt.NDArray[Any]) -> bool:
    """As `fill_span`, across any rows of chunks; False also where that is left to `fill_span`. Needs `native`."""
    high, wide = tensor.chunk
    cols, size, count = tensor.shape[1], out.itemsize, plan.table.grid[1]
    first, last = start // (high * cols), (start + len(out) - 1) // (high * cols)
    if not all_plain(tensor, plan, first * count, (last - first + 1) * count):
        return False
    where = (count, high, wide * size, cols * size, start * size)
    try:
        library.gather_span(tensor.file.fd, plan.data, *where, out)
    except library.Truncated as e:
        raise truncated(tensor, e.offset) from None
    return True


def fill_transposed(tensor: ChunkedTensor, plan: Plan, row: int, col: int, out: npt.NDArray[Any]) -> bool:
    """``out[c, r]`` from the elements ``(row + r, col + c)``, whose columns lie in one column of chunks.

    False when a chunk is not plain. Needs `native`.
    """
    high, wide = tensor.chunk
    size = tensor.dtype.itemsize
    first, inside = divmod(row, high)
    count = -(-(inside + out.shape[1]) // high)
    step = plan.table.grid[1]
    at = first * step + col // wide
    if not all_plain(tensor, plan, at, count, step):
        return False
    starts = plan.data[at : at + (count - 1) * step + 1 : step]
    rows, cols = (inside, out.shape[1]), (col % wide, len(out))
    try:
        library.gather_transposed(tensor.file.fd, starts, (high, wide), size, rows, cols, out)
    except library.Truncated as e:
        raise truncated(tensor, e.offset) from None
    return True
