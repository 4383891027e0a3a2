"""Chunks that LZ4 made smaller, decoded a row of chunks at a time: `native.unpack` does in one call what is many here.

Everything here may say no, and leaves to `h5_chunks` what is missing, damaged or went through other filters.
"""

from __future__ import annotations

import math
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from ckptfs.formats.hdf5.chunks_uncompressed import BUFFER, ENCODED, Plan
from ckptfs.native import library

if TYPE_CHECKING:
    from ckptfs.formats.hdf5.chunked import ChunkedTensor

MAX_KEPT = 16 << 20
"""Largest row of chunks that is kept decoded, in bytes."""


class _NotAll(Exception):
    """Some chunk needs more than C can do."""


def chunk(tensor: ChunkedTensor, plan: Plan, i: int) -> npt.NDArray[Any] | None:
    """One chunk, of any shape; None where that is left to others."""
    nbytes = math.prod(tensor.chunk) * tensor.dtype.itemsize
    if not _can_unpack(plan) or plan.states[i] != ENCODED or nbytes > BUFFER:
        return None  # it would take scratch memory of twice that, for good
    out = np.empty((1, nbytes), np.uint8)
    if not library.unpack(tensor.file.fd, _from(plan, i), 1, (1, nbytes), (1, 1), out):
        return None
    tile: npt.NDArray[Any] = out.view(tensor.dtype.storage_dtype).reshape(tensor.chunk)
    return tile


def fill_rows(tensor: ChunkedTensor, plan: Plan, row: int, first: int, out: npt.NDArray[Any]) -> int:
    """Fill *out* from the top as `h5_plain.fill_rows` does, across rows of chunks; how many rows are done.

    Chunks of which all is wanted are decoded where they belong; a row of chunks of which some rows are wanted is kept.
    """
    if not (_can_unpack(plan) and library.has_plain_rows(out)):
        return 0
    high = tensor.chunk[0]
    band, inside = divmod(row, high)
    whole = len(out) if row + len(out) == tensor.shape[0] else len(out) // high * high
    if inside == 0 and whole:
        return min(whole, high * _unpack(tensor, plan, band, first, out[:whole]))
    n = min(len(out), high - inside)
    rows = _kept(tensor, plan, band, n) if out.shape[1] == tensor.shape[1] else None
    if rows is None:
        return 0
    out[:n] = rows[inside : inside + n]
    return n


def fill_span(tensor: ChunkedTensor, plan: Plan, start: int, out: npt.NDArray[Any], together: bool) -> bool:
    """As `h5_plain.fill_span`, for any span in one row of chunks; False where that is left to others.

    *together*: the rest of the row of chunks is probably wanted, too. Otherwise a small part of a row is left to
    others: it needs few of these chunks.
    """
    if not _can_unpack(plan):
        return False
    cols = tensor.shape[1]
    band, inside = divmod(start, tensor.chunk[0] * cols)
    if inside == 0 and len(out) == _n_rows(tensor, band) * cols:
        return _unpack(tensor, plan, band, 0, out.reshape(-1, cols)) == 1
    if not (together or 2 * len(out) >= cols or tensor.cache.holds(_key(tensor, band))):
        return False
    rows = _kept(tensor, plan, band, len(out) / cols)
    if rows is None:
        return False
    out[...] = rows.reshape(-1)[inside : inside + len(out)]
    return True


def fill_part(tensor: ChunkedTensor, plan: Plan, row: int, col: int, out: npt.NDArray[Any]) -> bool:
    """Any block in one row of chunks, from those that are kept; False where few of its chunks are needed, and are not.

    A request begins and ends with a part of a row, and others want the rest of it.
    """
    band, inside = divmod(row, tensor.chunk[0])
    cols, n = tensor.shape[1], len(out)
    if not _can_unpack(plan) or inside + n > tensor.chunk[0]:
        return False
    if not (2 * out.shape[1] >= cols or tensor.cache.holds(_key(tensor, band))):
        return False
    if plan.states[band * plan.table.grid[1] + col // tensor.chunk[1]] != ENCODED:
        return False  # plain as far as is known: read in place
    rows = _kept(tensor, plan, band, out.size / cols)
    if rows is None:
        return False
    out[...] = rows[inside : inside + n, col : col + out.shape[1]]
    return True


def _can_unpack(plan: Plan) -> bool:
    return plan.only_lz4 and library.LIBRARY is not None


def _n_rows(tensor: ChunkedTensor, band: int) -> int:
    """Rows of a row of chunks: the last one may be cut."""
    return min(tensor.chunk[0], tensor.shape[0] - band * tensor.chunk[0])


def _kept(tensor: ChunkedTensor, plan: Plan, band: int, n_rows: float) -> npt.NDArray[Any] | None:
    """All rows of a row of chunks, from the cache; *n_rows* of them are going to be used."""
    shape = _n_rows(tensor, band), tensor.shape[1]
    if math.prod(shape) * tensor.dtype.itemsize > MAX_KEPT:
        return None
    try:
        make = partial(_band, tensor, plan, band, shape)
        return tensor.cache.get(_key(tensor, band), make, n_rows / shape[0])
    except _NotAll:
        return None


def _key(tensor: ChunkedTensor, band: int) -> tuple[str, int, int]:
    return "h5 band", tensor.serial, band


def _band(tensor: ChunkedTensor, plan: Plan, band: int, shape: tuple[int, int]) -> npt.NDArray[Any]:
    out: npt.NDArray[Any] = np.empty(shape, tensor.dtype.storage_dtype)
    if _unpack(tensor, plan, band, 0, out) < 1:
        raise _NotAll
    return out


def _unpack(tensor: ChunkedTensor, plan: Plan, band: int, first: int, out: npt.NDArray[Any]) -> int:
    """Fill *out* with all rows of rows of chunks, from the chunk *first* of each on; how many of these are done."""
    high, wide = tensor.chunk
    grid, size = plan.table.grid[1], tensor.dtype.itemsize
    tiles = -(-len(out) // high), -(-out.shape[1] // wide)
    return library.unpack(tensor.file.fd, _from(plan, band * grid + first), grid, (high, wide * size), tiles, out)


def _from(plan: Plan, i: int) -> tuple[npt.NDArray[Any], ...]:
    """What is known of the chunk *i* and those behind it."""
    return plan.data[i:], plan.table.offsets[i:], plan.table.nbytes[i:], np.frombuffer(plan.states, np.uint8)[i:]
