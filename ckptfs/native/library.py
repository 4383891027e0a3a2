"""The C loops of ``native/src``, where a compiler was there at installation.

Without them numpy does the same work in more calls. ``CKPTFS_PURE_PYTHON=1`` in the environment turns them off.
"""

from __future__ import annotations

import ctypes
import importlib.util
import os
from ctypes import c_double, c_int, c_int64, c_void_p
from functools import lru_cache
from typing import Any

import numpy as np
import numpy.typing as npt

from ckptfs.native.scratch import scratch

INTERFACE = 12
"""Version of the C functions' signatures; a library of another version is not used."""
SCRATCH = 1 << 18
"""Bytes that are read before they are copied into place: they stay in the second-level cache."""
MIN_STREAMED = 4 << 20
"""Bytes of a read from which on C writes past the caches; as in ``src/kernels.c``."""
STREAMED_SCRATCH = 1 << 20
"""`SCRATCH` of such reads, which leave the cache to it: longer pieces, and longer rows of the result."""
_LINE = 64
"""Bytes of a cache line, which C needs in addition."""
LZ4_OVERHEAD = 1 << 16
"""Bytes that an LZ4 chunk may have beyond its decoded size and a 128th of it: heads of blocks."""
BFLOAT16_STEPS = ("multiply", "divide", "add")
_Array = npt.NDArray[Any]
_Pair = tuple[int, int]
_SIGNATURES: dict[str, tuple[Any, ...]] = {
    "ckptfs_interface": (),
    "ckptfs_read": (c_void_p, c_int64, c_int64, c_void_p),
    "ckptfs_set_source": (c_void_p, c_int64, c_void_p),
    "ckptfs_set_fallback": (c_void_p, c_int64, c_int64),
    "ckptfs_start_spare_threads": (c_void_p, c_int, c_void_p, c_void_p, c_int64),
    "ckptfs_stop_spare_threads": (),
    "ckptfs_set_tile_budget": (c_int64,),
    "ckptfs_prefetch_done": (c_int64,),
    "ckptfs_prefetch_rows": (c_void_p, c_int64, c_int64),
    "ckptfs_prefetch_columns": (c_void_p, c_int64, c_int64),
    "ckptfs_prefetch_start": (c_void_p, c_int64),
    "ckptfs_gather": (c_int, c_void_p, *[c_int64] * 6, c_void_p, c_int64, c_void_p, c_int64),
    "ckptfs_gather_range": (c_int, c_void_p, *[c_int64] * 6, c_void_p, c_void_p, c_int64),
    "ckptfs_gather_transposed": (c_int, c_void_p, *[c_int64] * 9, c_void_p, c_int64, c_void_p, c_int64),
    "ckptfs_classify_chunks": (c_int, c_void_p, c_int64, c_int64, c_int64, c_void_p),
    "ckptfs_transpose": (c_void_p, c_int64, c_void_p, *[c_int64] * 4),
    "ckptfs_decompress": (c_void_p, c_int, *[c_void_p] * 4, *[c_int64] * 7, c_void_p, c_int64, c_void_p, c_int64),
    "ckptfs_bfloat16": (c_void_p, c_int64, c_int64, c_double),
}


def _load() -> ctypes.CDLL | None:
    found = None if os.environ.get("CKPTFS_PURE_PYTHON") else importlib.util.find_spec("ckptfs._native")
    if found is None or found.origin is None:
        return None
    try:
        library = ctypes.CDLL(found.origin)
        for name, arguments in _SIGNATURES.items():
            function = getattr(library, name)
            function.argtypes, function.restype = arguments, c_int64
        return library if library.ckptfs_interface() == INTERFACE else None
    except (OSError, AttributeError):  # built for another machine, or from another version of the source
        return None


LIBRARY = _load()


class Truncated(Exception):
    """The file ends at *offset*, before the end of the read."""

    def __init__(self, offset: int) -> None:
        super().__init__(offset)
        self.offset = offset


def gather(
    fd: int,
    starts: _Array,
    skip: int,
    chunk_row_nbytes: int,
    row_nbytes: int,
    head: int,
    nbytes: int,
    out: _Array,
    pitch: int,
) -> None:
    """Bytes ``[head, head + nbytes)`` of rows that lie across neighbouring chunks, into *out*, rows *pitch* apart.

    *starts* (int64) says where each chunk's elements begin; *skip* bytes of each come before the first row. Raises
    `Truncated` and OSError.
    """
    assert LIBRARY is not None
    sizes = (skip, len(starts), chunk_row_nbytes, row_nbytes, head, nbytes)
    memory = _scratch(chunk_row_nbytes, nbytes)
    _check(LIBRARY.ckptfs_gather(fd, starts.ctypes.data, *sizes, out.ctypes.data, pitch, *memory))


def gather_range(
    fd: int,
    starts: _Array,
    grid_cols: int,
    chunk_rows: int,
    chunk_row_nbytes: int,
    row_nbytes: int,
    start: int,
    out: _Array,
) -> None:
    """Fill *out* with the bytes of a matrix in C order, from byte *start* on.

    *starts* has all its chunks, *grid_cols* side by side. Raises as `gather`.
    """
    assert LIBRARY is not None
    sizes = (grid_cols, chunk_rows, chunk_row_nbytes, row_nbytes, start, out.nbytes)
    memory = _scratch(chunk_row_nbytes, out.nbytes)
    _check(LIBRARY.ckptfs_gather_range(fd, starts.ctypes.data, *sizes, out.ctypes.data, *memory))


def gather_transposed(
    fd: int, starts: _Array, chunk: _Pair, itemsize: int, rows: _Pair, cols: _Pair, out: _Array
) -> None:
    """The part *rows* x *cols* (start, count) of chunks one below the other into ``out[col][row]``.

    *starts* (int64, at any distance) says where each chunk's elements begin. *chunk* is its shape. Raises as `gather`.
    """
    assert LIBRARY is not None
    chunk_row_nbytes = chunk[1] * itemsize
    sizes = (starts.strides[0] // 8, len(starts), chunk[0], chunk_row_nbytes, itemsize, *rows, *cols)
    memory = _scratch(chunk_row_nbytes)
    _check(LIBRARY.ckptfs_gather_transposed(fd, starts.ctypes.data, *sizes, out.ctypes.data, out.strides[0], *memory))


def _scratch(chunk_row_nbytes: int, nbytes: int = 0) -> tuple[int, int]:
    """Address and size of scratch memory for pieces of chunks, to read *nbytes* of the matrix; a cache line follows it.

    It belongs to this thread until the next call.
    """
    size = STREAMED_SCRATCH if nbytes > MIN_STREAMED else SCRATCH
    buffer = scratch("native", max(size, chunk_row_nbytes) + _LINE)
    return buffer.ctypes.data, buffer.nbytes - _LINE


def classify_chunks(fd: int, offsets: _Array, step: int, nbytes: int, states: _Array) -> None:
    """Read the heads of every *step*-th LZ4 chunk whose state (uint8) is 0: set it to 1 (uncompressed) or 2.

    The chunks start at *offsets* (int64), have the size of uncompressed ones, and *nbytes* when decoded. Raises as
    `gather`.
    """
    assert LIBRARY is not None
    places = offsets.ctypes.data, len(offsets)
    _check(LIBRARY.ckptfs_classify_chunks(fd, *places, step, nbytes, states.ctypes.data))


@lru_cache(maxsize=1)
def lz4() -> int | None:
    """Address of ``LZ4_decompress_safe`` in the lz4 package; None where the package does not export it."""
    try:
        import lz4.block

        library = ctypes.CDLL(lz4.block._block.__file__)
        return ctypes.cast(library.LZ4_decompress_safe, c_void_p).value
    except (ImportError, OSError, AttributeError):
        return None


def decompress(fd: int, chunks: tuple[_Array, ...], grid_cols: int, chunk: _Pair, n_chunks: _Pair, out: _Array) -> int:
    """Fill the matrix *out* from chunks that went through LZ4 alone; how many rows of chunks are done.

    *chunks* has, of the first chunk and those behind it, where its elements start, where it begins, its stored size
    (all int64) and its state (uint8). *grid_cols* is the distance from a chunk to the one below it. *chunk*: rows, and
    bytes of a row; *n_chunks*: down and across. Stops at a row with a chunk that is missing, damaged or truncated; does
    nothing without `lz4`.
    """
    assert LIBRARY is not None
    decoder = lz4()
    if decoder is None:
        return 0
    nbytes = chunk[0] * chunk[1]
    buffer = scratch("native", 2 * nbytes + nbytes // 128 + LZ4_OVERHEAD)
    tables = [part.ctypes.data for part in chunks]
    sizes = (grid_cols, *n_chunks, *chunk, out.shape[0], out.shape[1] * out.itemsize)
    target = out.ctypes.data, out.strides[0]
    done: int = LIBRARY.ckptfs_decompress(decoder, fd, *tables, *sizes, *target, buffer.ctypes.data, buffer.nbytes)
    return done


def transpose(found: _Array, out: _Array) -> None:
    """``out[...] = found.T`` for matrices of 1, 2, 4 or 8 byte elements whose rows are contiguous."""
    assert LIBRARY is not None
    rows, cols = found.shape
    pitches = found.ctypes.data, found.strides[0], out.ctypes.data, out.strides[0]
    LIBRARY.ckptfs_transpose(*pitches, rows, cols, found.itemsize)


def bfloat16(words: _Array, kind: str, scalar: float) -> None:
    """``multiply``, ``divide`` or ``add`` *scalar* in place, in float32, rounded to even. *words* is contiguous."""
    assert LIBRARY is not None
    LIBRARY.ckptfs_bfloat16(words.ctypes.data, words.size, BFLOAT16_STEPS.index(kind), scalar)


def _check(result: int) -> None:
    if result > 0:
        raise Truncated(result - 1)
    if result < 0:
        raise OSError(-result, os.strerror(-result))


def can_transpose(out: _Array) -> bool:
    """Whether `transpose` can fill *out*."""
    return LIBRARY is not None and out.itemsize in (1, 2, 4, 8) and has_contiguous_rows(out)


def has_contiguous_rows(array: npt.NDArray[np.generic]) -> bool:
    """Whether the elements of each row of a matrix are neighbours in memory, so that C may fill it."""
    return array.strides[-1] == array.itemsize or array.shape[-1] == 1
