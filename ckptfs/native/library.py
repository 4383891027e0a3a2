"""The C loops of ``native/src``, where a compiler was there at installation.

Without them numpy does the same work in more calls. ``CKPTFS_PURE_PYTHON=1`` in the environment does without.
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

INTERFACE = 11
"""Number of the C functions' signatures, which the library must have, too."""
SCRATCH = 1 << 18
"""Bytes that are read before they are copied to their places: they stay in the second-level cache."""
STREAM = 4 << 20
"""Bytes of a read from which on C writes past the caches."""
STREAMED_SCRATCH = 1 << 20
"""As `SCRATCH` for those, which leave the cache to it: longer pieces, and longer rows of the result."""
_LINE = 64
"""Bytes of a line of the processor's caches, which C wants besides."""
PACKED_ROOM = 1 << 16
"""Bytes that an LZ4 chunk may have beyond its decoded size and a 128th of it: heads of blocks."""
BFLOAT16_STEPS = ("multiply", "divide", "add")
_Array = npt.NDArray[Any]
_Pair = tuple[int, int]
_SIGNATURES: dict[str, tuple[Any, ...]] = {
    "ckptfs_interface": (),
    "ckptfs_read": (c_void_p, c_int64, c_int64, c_void_p),
    "ckptfs_give_part": (c_void_p, c_int64, c_void_p),
    "ckptfs_serve": (c_void_p, c_int64, c_int64),
    "ckptfs_help": (c_void_p, c_int, c_void_p, c_void_p, c_int64),
    "ckptfs_end_help": (),
    "ckptfs_keep_tiles": (c_int64,),
    "ckptfs_waited": (c_int64,),
    "ckptfs_ahead_rows": (c_void_p, c_int64, c_int64),
    "ckptfs_ahead_columns": (c_void_p, c_int64, c_int64),
    "ckptfs_expect": (c_void_p, c_int64),
    "ckptfs_gather": (c_int, c_void_p, *[c_int64] * 6, c_void_p, c_int64, c_void_p, c_int64),
    "ckptfs_gather_span": (c_int, c_void_p, *[c_int64] * 6, c_void_p, c_void_p, c_int64),
    "ckptfs_look": (c_int, c_void_p, c_int64, c_int64, c_int64, c_void_p),
    "ckptfs_gather_transposed": (c_int, c_void_p, *[c_int64] * 9, c_void_p, c_int64, c_void_p, c_int64),
    "ckptfs_transpose": (c_void_p, c_int64, c_void_p, *[c_int64] * 4),
    "ckptfs_unpack": (c_void_p, c_int, *[c_void_p] * 4, *[c_int64] * 7, c_void_p, c_int64, c_void_p, c_int64),
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
    """The file ends at *offset*, before what was wanted."""

    def __init__(self, offset: int) -> None:
        super().__init__(offset)
        self.offset = offset


def _room(wide: int, nbytes: int = 0) -> tuple[int, int]:
    """Address and size of scratch memory for pieces of chunks whose rows have *wide* bytes, to read *nbytes* of the
    matrix; behind it lies a line more.

    It is this thread's until the next call.
    """
    buffer = scratch("native", max(STREAMED_SCRATCH if nbytes > STREAM else SCRATCH, wide) + _LINE)
    return buffer.ctypes.data, buffer.nbytes - _LINE


def gather(
    fd: int, starts: _Array, skip: int, wide: int, cols: int, head: int, nbytes: int, out: _Array, pitch: int
) -> None:
    """Bytes ``[head, head + nbytes)`` of rows that lie across neighbouring chunks, into *out*, rows *pitch* apart.

    *starts* (int64) says where each chunk's elements begin; *skip* bytes of each come before the first row. Rows of a
    chunk have *wide* bytes, rows of the matrix *cols* bytes. Raises `Truncated` and OSError.
    """
    assert LIBRARY is not None
    at, line = starts.ctypes.data, out.ctypes.data
    sizes = (skip, len(starts), wide, cols, head, nbytes)
    _check(LIBRARY.ckptfs_gather(fd, at, *sizes, line, pitch, *_room(wide, nbytes)))


def gather_span(fd: int, starts: _Array, count: int, high: int, wide: int, cols: int, start: int, out: _Array) -> None:
    """As many bytes of a matrix as *out* has, from byte *start* on, in C order.

    *starts* has all its chunks, *count* in a row of chunks, each of *high* rows. The rest as in `gather`.
    """
    assert LIBRARY is not None
    at, line = starts.ctypes.data, out.ctypes.data
    sizes = (count, high, wide, cols, start, out.nbytes)
    _check(LIBRARY.ckptfs_gather_span(fd, at, *sizes, line, *_room(wide, out.nbytes)))


def gather_transposed(
    fd: int,
    starts: _Array,
    chunk: tuple[int, int],
    size: int,
    rows: tuple[int, int],
    cols: tuple[int, int],
    out: _Array,
) -> None:
    """The part *rows* x *cols* (start, count) of chunks one below the other into ``out[col][row]``; elements of *size*.

    *starts* (int64, at any distance) says where each chunk's elements begin. Raises `Truncated` and OSError.
    """
    assert LIBRARY is not None
    wide = chunk[1] * size
    at, line = starts.ctypes.data, out.ctypes.data
    where = (starts.strides[0] // 8, len(starts), chunk[0], wide, size, *rows, *cols)
    _check(LIBRARY.ckptfs_gather_transposed(fd, at, *where, line, out.strides[0], *_room(wide)))


def look(fd: int, offsets: _Array, step: int, nbytes: int, states: _Array) -> None:
    """Write into every *step*-th of *states* (uint8) that is 0 whether its LZ4 chunk is plain (1) or not (2).

    The chunks start at *offsets* (int64), have the size of plain ones, and *nbytes* when decoded. Raises as `gather`.
    """
    assert LIBRARY is not None
    _check(LIBRARY.ckptfs_look(fd, offsets.ctypes.data, len(offsets), step, nbytes, states.ctypes.data))


@lru_cache(maxsize=1)
def lz4() -> int | None:
    """Address of ``LZ4_decompress_safe``, which the lz4 package brings; None where it does not show it."""
    try:
        import lz4.block

        library = ctypes.CDLL(lz4.block._block.__file__)
        return ctypes.cast(library.LZ4_decompress_safe, c_void_p).value
    except (ImportError, OSError, AttributeError):
        return None


def unpack(fd: int, chunks: tuple[_Array, ...], grid: int, chunk: _Pair, tiles: _Pair, out: _Array) -> int:
    """Fill the matrix *out* from *tiles* (rows of chunks, chunks in each) that went through LZ4 alone.

    *chunks* says of the first of them and of those behind it where their elements start, where they begin (int64),
    how many bytes they have there (int64) and what is known of them (uint8); *grid* is the distance of one to the one
    below. *chunk*: its rows, and bytes of its row. Returns how many rows of chunks are done: not those from one on that
    has a chunk which is missing, damaged or cut, and none without `lz4`.
    """
    assert LIBRARY is not None
    decoder = lz4()
    if decoder is None:
        return 0
    nbytes = chunk[0] * chunk[1]
    buffer = scratch("native", 2 * nbytes + nbytes // 128 + PACKED_ROOM)
    places = [part.ctypes.data for part in chunks]
    sizes = (grid, *tiles, *chunk, out.shape[0], out.shape[1] * out.itemsize)
    to, room = out.ctypes.data, buffer.ctypes.data
    done: int = LIBRARY.ckptfs_unpack(decoder, fd, *places, *sizes, to, out.strides[0], room, buffer.nbytes)
    return done


def transpose(found: _Array, out: _Array) -> None:
    """``out[...] = found.T`` for matrices of 1, 2, 4 or 8 byte elements whose rows have no gaps inside."""
    assert LIBRARY is not None
    rows, cols = found.shape
    at, line = found.ctypes.data, out.ctypes.data
    LIBRARY.ckptfs_transpose(at, found.strides[0], line, out.strides[0], rows, cols, found.itemsize)


def bfloat16(words: _Array, kind: str, scalar: float) -> None:
    """``multiply``, ``divide`` or ``add`` *scalar* in place, in float32, rounded to even. *words* has no gaps."""
    assert LIBRARY is not None
    LIBRARY.ckptfs_bfloat16(words.ctypes.data, words.size, BFLOAT16_STEPS.index(kind), scalar)


def _check(result: int) -> None:
    if result > 0:
        raise Truncated(result - 1)
    if result < 0:
        raise OSError(-result, os.strerror(-result))


def can_transpose(out: _Array) -> bool:
    """Whether `transpose` can fill *out*."""
    return LIBRARY is not None and out.itemsize in (1, 2, 4, 8) and has_plain_rows(out)


def has_plain_rows(array: npt.NDArray[np.generic]) -> bool:
    """Whether the elements of each row of a matrix lie side by side, so that C may fill it."""
    return array.strides[-1] == array.itemsize or array.shape[-1] == 1
