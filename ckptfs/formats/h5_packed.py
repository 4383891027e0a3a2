"""Chunks that LZ4 made smaller, decoded a row of chunks at a time: `native.unpack` does in one call what is many here.

Everything here may say no, and leaves to `h5_chunks` what is missing, damaged or went through other filters.
"""

from __future__ import annotations

import math
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from ckptfs import native
from ckptfs.formats.h5_plain import ENCODED, Plan

if TYPE_CHECKING:
    from ckptfs.formats.h5_chunks import ChunkedTensor

MOST_KEPT = 16 << 20
"""Largest row of chunks that is kept decoded, in bytes."""


class _NotAll(Exception):
    """Some chunk needs more than C can do."""


def chunk(tensor: ChunkedTensor, plan: Plan, i: int) -> npt.NDArray[Any] | None:
    """One chunk, of any shape; None where that is left to others."""
    nbytes = math.prod(tensor.chunk) * tensor.dtype.itemsize
    if not _can_unpack(plan) or plan.states[i] != ENCODED or nbytes > MOST_KEPT:
        return None
    out = np.empty((1, nbytes), np.uint8)
    if not native.unpack(tensor.file.fd, _from(plan, i), 1, (1, nbytes), (1, 1), out):
        return None
    tile: npt.NDArray[Any] = out.view(tensor.dtype.word).reshape(tensor.chunk)
    return tile


def fill_rows(tensor: ChunkedTensor, plan: Plan, row: int, first: int, out: npt.NDArray[Any]) -> int:
    """Fill *out* from the top as `h5_plain.fill_rows` does, across rows of chunks; how many rows are done.

    Chunks of which all is wanted are decoded where they belong; a row of chunks of which some rows are wanted is kept.
    """
    if not (_can_unpack(plan) and native.has_plain_rows(out)):
        return 0
    high = tensor.chunk[0]
    band, inside = divmod(row, high)
    whole = len(out) if row + len(out) == tensor.shape[0] else len(out) // high * high
    if inside == 0 and whole:
        return min(whole, high * _unpack(tensor, plan, band, first, out[:whole]))
    n = min(len(out), high - inside)
    rows = _kept(tensor, plan, band, n) if n > 1 and out.shape[1] == tensor.shape[1] else None
    if rows is None:
        return 0
    out[:n] = rows[inside : inside + n]
    return n


def fill_span(tensor: ChunkedTensor, plan: Plan, start: int, out: npt.NDArray[Any]) -> bool:
    """As `h5_plain.fill_span`, for any span in one row of chunks; False where that is left to others."""
    if not _can_unpack(plan):
        return False
    cols = tensor.shape[1]
    band, inside = divmod(start, tensor.chunk[0] * cols)
    if inside == 0 and len(out) == _n_rows(tensor, band) * cols:
        return _unpack(tensor, plan, band, 0, out.reshape(-1, cols)) == 1
    rows = _kept(tensor, plan, band, len(out) / cols)
    if rows is None:
        return False
    out[...] = rows.reshape(-1)[inside : inside + len(out)]
    return True


def _can_unpack(plan: Plan) -> bool:
    return plan.only_lz4 and native.LIBRARY is not None


def _n_rows(tensor: ChunkedTensor, band: int) -> int:
    """Rows of a row of chunks: the last one may be cut."""
    return min(tensor.chunk[0], tensor.shape[0] - band * tensor.chunk[0])


def _kept(tensor: ChunkedTensor, plan: Plan, band: int, n_rows: float) -> npt.NDArray[Any] | None:
    """All rows of a row of chunks, from the cache; *n_rows* of them are going to be used."""
    shape = _n_rows(tensor, band), tensor.shape[1]
    if math.prod(shape) * tensor.dtype.itemsize > MOST_KEPT:
        return None
    try:
        make = partial(_band, tensor, plan, band, shape)
        return tensor.cache.get(("h5 band", tensor.serial, band), make, n_rows / shape[0])
    except _NotAll:
        return None


def _band(tensor: ChunkedTensor, plan: Plan, band: int, shape: tuple[int, int]) -> npt.NDArray[Any]:
    out: npt.NDArray[Any] = np.empty(shape, tensor.dtype.word)
    if _unpack(tensor, plan, band, 0, out) < 1:
        raise _NotAll
    return out


def _unpack(tensor: ChunkedTensor, plan: Plan, band: int, first: int, out: npt.NDArray[Any]) -> int:
    """Fill *out* with all rows of rows of chunks, from the chunk *first* of each on; how many of these are done."""
    high, wide = tensor.chunk
    grid, size = plan.table.grid[1], tensor.dtype.itemsize
    tiles = -(-len(out) // high), -(-out.shape[1] // wide)
    return native.unpack(tensor.file.fd, _from(plan, band * grid + first), grid, (high, wide * size), tiles, out)


def _from(plan: Plan, i: int) -> tuple[npt.NDArray[Any], ...]:
    """What is known of the chunk *i* and those behind it."""
    return plan.data[i:], plan.table.offsets[i:], plan.table.nbytes[i:], np.frombuffer(plan.states, np.uint8)[i:]
