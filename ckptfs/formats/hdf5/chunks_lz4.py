"""LZ4 chunks, decoded a grid row at a time: C does in one call what takes Python many.

Functions that return False, None or 0 leave the work to `chunked`: for chunks that are missing, damaged or went through
other filters.
"""

from __future__ import annotations

import math
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt

from ckptfs.formats.hdf5.chunk_table import ENCODED, ChunkPlan
from ckptfs.formats.hdf5.chunks_uncompressed import BUFFER
from ckptfs.native import library

MAX_KEPT = 16 << 20
"""Largest grid row that is kept decoded, in bytes."""

_Array = npt.NDArray[Any]


class _NotDecoded(Exception):
    """C cannot decode some chunk."""


def decoded_chunk(plan: ChunkPlan, i: int) -> _Array | None:
    """One chunk, of any shape; None where C cannot decode it."""
    if not _can_decompress(plan) or plan.states[i] != ENCODED or plan.chunk_nbytes > BUFFER:
        return None  # a large one would occupy twice its size in scratch memory for good
    out = np.empty((1, plan.chunk_nbytes), np.uint8)
    if not library.decompress(plan.file.fd, _tables(plan, i), 1, (1, plan.chunk_nbytes), (1, 1), out):
        return None
    tile: _Array = out.view(plan.dtype.storage_dtype).reshape(plan.chunk)
    return tile


def fill_rows(plan: ChunkPlan, row: int, first: int, out: _Array) -> int:
    """Fill *out* from the top as `chunks_uncompressed.fill_rows`, across grid rows; how many rows are done.

    Chunks that are wanted whole are decoded into place; a grid row of which some rows are wanted is kept.
    """
    if not (_can_decompress(plan) and library.has_contiguous_rows(out)):
        return 0
    chunk_rows = plan.chunk[0]
    grid_row, offset = divmod(row, chunk_rows)
    n_whole = len(out) if row + len(out) == plan.shape[0] else len(out) // chunk_rows * chunk_rows
    if offset == 0 and n_whole:
        return min(n_whole, chunk_rows * _decompress(plan, grid_row, first, out[:n_whole]))
    n = min(len(out), chunk_rows - offset)
    rows = _kept_rows(plan, grid_row, n) if out.shape[1] == plan.shape[1] else None
    if rows is None:
        return 0
    out[:n] = rows[offset : offset + n]
    return n


def fill_range(plan: ChunkPlan, start: int, out: _Array, wants_rest: bool) -> bool:
    """As `chunks_uncompressed.fill_range`, for any range in one grid row.

    *wants_rest*: the rest of the grid row is probably wanted, too. Otherwise a small part of a row returns False: it
    needs few of these chunks.
    """
    if not _can_decompress(plan):
        return False
    cols = plan.shape[1]
    grid_row, offset = divmod(start, plan.chunk[0] * cols)
    if offset == 0 and len(out) == _n_rows(plan, grid_row) * cols:
        return _decompress(plan, grid_row, 0, out.reshape(-1, cols)) == 1
    if not (wants_rest or 2 * len(out) >= cols or plan.cache.holds(_cache_key(plan, grid_row))):
        return False
    rows = _kept_rows(plan, grid_row, len(out) / cols)
    if rows is None:
        return False
    out[...] = rows.reshape(-1)[offset : offset + len(out)]
    return True


def fill_block(plan: ChunkPlan, row: int, col: int, out: _Array) -> bool:
    """Any block in one grid row, from a kept grid row; False where it needs few chunks, and none are kept.

    A request begins and ends with a part of a row, and other requests want the rest of it.
    """
    grid_row, offset = divmod(row, plan.chunk[0])
    cols, n = plan.shape[1], len(out)
    if not _can_decompress(plan) or offset + n > plan.chunk[0]:
        return False
    if not (2 * out.shape[1] >= cols or plan.cache.holds(_cache_key(plan, grid_row))):
        return False
    if plan.states[grid_row * plan.grid_cols + col // plan.chunk[1]] != ENCODED:
        return False  # uncompressed as far as is known: read in place
    rows = _kept_rows(plan, grid_row, out.size / cols)
    if rows is None:
        return False
    out[...] = rows[offset : offset + n, col : col + out.shape[1]]
    return True


def _can_decompress(plan: ChunkPlan) -> bool:
    return plan.only_lz4 and library.LIBRARY is not None


def _n_rows(plan: ChunkPlan, grid_row: int) -> int:
    """Rows of a grid row: the last one may be cut."""
    return min(plan.chunk[0], plan.shape[0] - grid_row * plan.chunk[0])


def _kept_rows(plan: ChunkPlan, grid_row: int, n_used: float) -> _Array | None:
    """All rows of a grid row, from the cache; *n_used* of them are going to be used."""
    shape = _n_rows(plan, grid_row), plan.shape[1]
    if math.prod(shape) * plan.dtype.itemsize > MAX_KEPT:
        return None
    try:
        make = partial(_decoded_rows, plan, grid_row, shape)
        return plan.cache.get(_cache_key(plan, grid_row), make, n_used / shape[0])
    except _NotDecoded:
        return None


def _cache_key(plan: ChunkPlan, grid_row: int) -> tuple[str, int, int]:
    return "h5 grid row", plan.serial, grid_row


def _decoded_rows(plan: ChunkPlan, grid_row: int, shape: tuple[int, int]) -> _Array:
    out: _Array = np.empty(shape, plan.dtype.storage_dtype)
    if _decompress(plan, grid_row, 0, out) < 1:
        raise _NotDecoded
    return out


def _decompress(plan: ChunkPlan, grid_row: int, first: int, out: _Array) -> int:
    """Fill *out* with whole grid rows, from the chunk *first* of each on; how many of them are done."""
    chunk_rows, chunk_cols = plan.chunk
    n_chunks = -(-len(out) // chunk_rows), -(-out.shape[1] // chunk_cols)
    tables = _tables(plan, grid_row * plan.grid_cols + first)
    return library.decompress(plan.file.fd, tables, plan.grid_cols, (chunk_rows, plan.chunk_row_nbytes), n_chunks, out)


def _tables(plan: ChunkPlan, i: int) -> tuple[_Array, ...]:
    """What `library.decompress` needs of the chunk *i* and those behind it."""
    return plan.starts[i:], plan.table.offsets[i:], plan.table.nbytes[i:], np.frombuffer(plan.states, np.uint8)[i:]
