"""Byte ranges of a lazy tensor, and whole tensors as numpy arrays.

`read_into` is the door between files (byte ranges) and tensors (blocks): it cuts a range of the tensor's
C-order bytes into at most three rectangles - a partial first row, whole rows, a partial last row - and lets
the tensor write each straight into the caller's buffer.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import numpy.typing as npt

from ckptfs.formats.source import Tensor, n_cols, n_rows, nbytes
from ckptfs.formats.spans import read_elements


def read_into(tensor: Tensor, offset: int, out: memoryview) -> None:
    """Fill *out* with the bytes of *tensor* that start at *offset* (C order, little-endian).

    Any offset and length inside the tensor; elements cut by the edges of the range are evaluated aside.
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
        words = np.frombuffer(out[head : len(out) - tail], tensor.dtype.word)
        read_elements(tensor, first, words)


def _element(tensor: Tensor, index: int) -> memoryview:
    """The bytes of one element."""
    word = np.empty(1, tensor.dtype.word)
    read_elements(tensor, index, word)
    return memoryview(word.tobytes())


def to_numpy(tensor: Tensor, start: int = 0, stop: int | None = None) -> npt.NDArray[Any]:
    """Rows ``[start, stop)`` of the leading axis as a numpy array with the element's own type.

    The whole tensor by default; a 0-d tensor gives a 0-d array. bfloat16 and float8 come as ml_dtypes' types.
    """
    if not tensor.shape:
        shape: tuple[int, ...] = ()
    else:
        stop = n_rows(tensor.shape) if stop is None else stop
        shape = (stop - start, *tensor.shape[1:])
    out = _aligned(math.prod(shape), tensor.dtype.word).reshape(shape)
    if out.size:
        read_elements(tensor, start * n_cols(tensor.shape), out.reshape(-1))
    return out.view(tensor.dtype.numpy)


def _aligned(n: int, word: np.dtype[Any]) -> npt.NDArray[Any]:
    """*n* elements that begin with a cache line: whole lines are written a fifth faster than parts of them."""
    room = np.empty(n * word.itemsize + _LINE, np.uint8)
    start = -room.ctypes.data % _LINE
    return room[start : start + n * word.itemsize].view(word)


_LINE = 64


def to_bytes(tensor: Tensor) -> bytes:
    """All bytes of a tensor; for small tensors and tests."""
    out = bytearray(nbytes(tensor))
    read_into(tensor, 0, memoryview(out))
    return bytes(out)
