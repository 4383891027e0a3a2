"""Ranges of a tensor's elements, in C order: what files are made of. Each read takes the fastest way that there is."""

from __future__ import annotations

import math
import os
import threading
from concurrent.futures import ThreadPoolExecutor, wait
from functools import lru_cache
from itertools import pairwise
from typing import Any, TypeGuard

import numpy as np
import numpy.typing as npt

from ckptfs.native import library
from ckptfs.native.program import Program
from ckptfs.native.scratch import borrow
from ckptfs.tensors.tensor import (
    Prepared,
    Programmed,
    ReadsRanges,
    ReadsTransposed,
    Tensor,
    n_cols,
    n_rows,
    nbytes,
)

PIECE = 8 << 20
"""Bytes evaluated at once when a whole tensor is read; bounds every node's scratch memory."""
WORKERS = min(4, len(os.sched_getaffinity(0)))
"""Threads that read one large range."""
MIN_SHARE = 2 << 20
"""Bytes of a range for which another thread pays; more than the kernel asks a mount for at a time."""
_LINE = 64
"""Bytes of a cache line."""


def read_elements(tensor: Tensor, start: int, out: npt.NDArray[Any]) -> None:
    """Elements ``[start, start + len(out))`` of *tensor* into *out*, a 1-d array of its `storage_dtype`.

    Several processors share a large range: reading is copying, done without Python's lock.
    """
    shares = _shares(tensor, start, out)
    if len(shares) < 2 or getattr(_thread, "shares", False):
        _read(tensor, start, out)
        return
    if isinstance(tensor, Prepared):  # once, not in each thread
        tensor.prepare()
    rest = [_pool().submit(_read_share, tensor, start + a, out[a:b]) for a, b in shares[1:]]
    try:
        _read_share(tensor, start, out[: shares[0][1]])
    finally:
        wait(rest)  # they write into *out*
    for share in rest:
        share.result()


def _shares(tensor: Tensor, start: int, out: npt.NDArray[Any]) -> list[tuple[int, int]]:
    """The threads' parts of a range: about equal, not too small, and cut between chunks where that is possible."""
    n = min(WORKERS, out.nbytes // MIN_SHARE)
    if n < 2:
        return []
    step = tensor.preferred_block[0] * n_cols(tensor.shape)
    edges = {0, len(out)}
    for i in range(1, n):
        even = i * len(out) // n
        between_chunks = (start + even) // step * step - start
        edges.add(between_chunks if between_chunks > even - len(out) // n else even)
    return list(pairwise(sorted(edge for edge in edges if edge >= 0)))


def _read_share(tensor: Tensor, start: int, out: npt.NDArray[Any]) -> None:
    _thread.shares = True  # nodes read their sources with `read_elements`, too
    try:
        _read(tensor, start, out)
    finally:
        _thread.shares = False


_thread = threading.local()


@lru_cache(maxsize=1)
def _pool() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(WORKERS - 1, "ckptfs-read")


os.register_at_fork(after_in_child=_pool.cache_clear)  # threads do not exist in a child


def _read(tensor: Tensor, start: int, out: npt.NDArray[Any]) -> None:
    if not _reads_ranges(tensor):
        read_blocks(tensor, start, out)
        return
    step = PIECE // out.itemsize
    for done in range(0, len(out), step):
        tensor.read_range(start + done, out[done : done + step])


def _reads_ranges(tensor: Tensor) -> TypeGuard[ReadsRanges]:
    """What isinstance says, which takes 4 to 7 µs: as long as reading a page. issubclass remembers its answer."""
    return issubclass(type(tensor), ReadsRanges)


def read_blocks(tensor: Tensor, start: int, out: npt.NDArray[Any]) -> None:
    """As `read_elements`, by `read_block` alone: a partial first row, whole rows, a partial last row."""
    cols = n_cols(tensor.shape)
    step = max(1, PIECE // (cols * tensor.dtype.itemsize))
    done = 0
    while done < len(out):
        row, col = divmod(start + done, cols)
        left = len(out) - done
        if col or left < cols:  # part of one row
            n = min(left, cols - col)
            tensor.read_block(row, col, out[done : done + n].reshape(1, n))
        else:
            n_whole = min(left // cols, step)
            n = n_whole * cols
            tensor.read_block(row, 0, out[done : done + n].reshape(n_whole, cols))
        done += n


def program_of(tensor: Tensor) -> Program | None:
    """The read program of a tensor's bytes, None where C cannot read them. May read chunk tables, and fail at that."""
    return tensor.program() if isinstance(tensor, Programmed) else None


def read_transposed(tensor: Tensor, row: int, col: int, out: npt.NDArray[Any]) -> None:
    """Fill ``out[c, r]`` with the elements ``(row + r, col + c)`` of the block view. *out* is a few MiB at most."""
    if isinstance(tensor, ReadsTransposed) and tensor.read_transposed(row, col, out):
        return
    with borrow(out.nbytes) as buffer:
        block = buffer.view(out.dtype).reshape(out.shape[1], out.shape[0])
        tensor.read_block(row, col, block)
        if library.can_transpose(out):
            library.transpose(block, out)
        else:
            out[...] = block.T


def read_into(tensor: Tensor, offset: int, out: memoryview) -> None:
    """Fill *out* with the bytes of *tensor* that start at *offset* (C order, little-endian).

    The range may cut its first and last element: these are read one by one.
    """
    size = tensor.dtype.itemsize
    start, stop = offset, offset + len(out)
    first, last = -(-start // size), stop // size
    if first > last:  # the range lies inside one element
        out[:] = _element(tensor, last)[start - last * size : stop - last * size]
        return
    head, tail = first * size - start, stop - last * size
    if head:
        out[:head] = _element(tensor, first - 1)[size - head :]
    if tail:
        out[len(out) - tail :] = _element(tensor, last)[:tail]
    if last > first:
        elements = np.frombuffer(out[head : len(out) - tail], tensor.dtype.storage_dtype)
        read_elements(tensor, first, elements)


def _element(tensor: Tensor, index: int) -> memoryview:
    """The bytes of one element."""
    element = np.empty(1, tensor.dtype.storage_dtype)
    read_elements(tensor, index, element)
    return memoryview(element.tobytes())


def to_numpy(tensor: Tensor, start: int = 0, stop: int | None = None) -> npt.NDArray[Any]:
    """Rows ``[start, stop)`` of the leading axis as a numpy array with the element's own type.

    The whole tensor by default; a 0-d tensor gives a 0-d array. bfloat16 and float8 come as ml_dtypes' types.
    """
    if not tensor.shape:
        shape: tuple[int, ...] = ()
    else:
        stop = n_rows(tensor.shape) if stop is None else stop
        shape = (stop - start, *tensor.shape[1:])
    out = _aligned(math.prod(shape), tensor.dtype.storage_dtype).reshape(shape)
    if out.size:
        read_elements(tensor, start * n_cols(tensor.shape), out.reshape(-1))
    return out.view(tensor.dtype.numpy)


def _aligned(n: int, storage_dtype: np.dtype[Any]) -> npt.NDArray[Any]:
    """*n* elements that begin with a cache line: whole lines are written a fifth faster than parts of them."""
    memory = np.empty(n * storage_dtype.itemsize + _LINE, np.uint8)
    start = -memory.ctypes.data % _LINE
    return memory[start : start + n * storage_dtype.itemsize].view(storage_dtype)


def to_bytes(tensor: Tensor) -> bytes:
    """All bytes of a tensor; for small tensors and tests."""
    out = bytearray(nbytes(tensor))
    read_into(tensor, 0, memoryview(out))
    return bytes(out)
