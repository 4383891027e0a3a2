"""Tensors whose elements are stored in a file as they are.

Files are not memory-mapped: a file that shrinks while it is mounted must give an error, not SIGBUS.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from ckptfs.errors import CorruptChunk
from ckptfs.native import program
from ckptfs.native.program import Program
from ckptfs.native.scratch import scratch
from ckptfs.tensors.dtypes import DType
from ckptfs.tensors.source_file import SourceFile
from ckptfs.tensors.tensor import Elements, Shape, n_cols

PIECE = 4 << 20
"""Bytes of scratch memory that one read uses at most (about)."""
MAX_GAP = 16 << 10
"""Bytes that are cheaper to read and throw away than another system call."""


def extent(shape: Sequence[int], strides: Sequence[int]) -> int:
    """Elements from the first to the last one that a view touches; 0 for an empty one. Strides are >= 0."""
    if 0 in shape:
        return 0
    return 1 + sum((n - 1) * stride for n, stride in zip(shape, strides, strict=True))


def c_strides(shape: Sequence[int]) -> Shape:
    """Strides in elements of a tensor of that shape in C order."""
    strides = []
    step = 1
    for n in reversed(shape):
        strides.append(step)
        step *= n
    return tuple(reversed(strides))


def in_c_order(shape: Sequence[int], strides: Sequence[int]) -> bool:
    """Whether the elements are contiguous in C order. Strides of axes of length 1 mean nothing."""
    return 0 in shape or all(
        n == 1 or have == want for n, have, want in zip(shape, strides, c_strides(shape), strict=True)
    )


@dataclass(frozen=True, slots=True)
class FileTensor:
    """A tensor whose elements are stored in a file as they are.

    Whoever makes it checks that every element lies inside the file; a file that shrank since gives `CorruptChunk`.
    """

    dtype: DType
    shape: Shape
    file: SourceFile
    offset: int
    """Byte position of the first element."""
    strides: Shape | None
    """In elements, none negative; None for C order."""
    key: str
    """For error messages."""

    @property
    def preferred_block(self) -> tuple[int, int]:
        """One row by 16 KiB of columns; a column-major matrix the other way round."""
        n = MAX_GAP // self.dtype.itemsize
        if self.strides is not None and _column_major(self):
            return max(1, min(self.shape[0], n)), 1
        return 1, max(1, min(n_cols(self.shape), n))

    def read_block(self, row: int, col: int, out: Elements) -> None:
        """A block of whole rows of a tensor in C order is one ``preadv`` into *out* when *out* is contiguous."""
        if out.size == 0:
            return
        size = self.dtype.itemsize
        cols = n_cols(self.shape)
        if self.strides is None:
            _read_lines(self, self.offset + (row * cols + col) * size, cols * size, out)
        elif in_c_order(self.shape[1:], self.strides[1:]):
            _read_lines(self, self.offset + (row * self.strides[0] + col) * size, self.strides[0] * size, out)
        elif _column_major(self):
            start = self.offset + (row + col * self.strides[1]) * size
            _read_lines(self, start, self.strides[1] * size, out.T)
        else:
            _gather(self, row, col, out)

    def program(self) -> Program | None:
        return program.file_bytes(self.file, self.offset) if self.strides is None else None


def _column_major(tensor: FileTensor) -> bool:
    return tensor.strides is not None and len(tensor.shape) == 2 and tensor.strides[0] == 1


def _read_lines(tensor: FileTensor, start: int, pitch: int, out: Elements) -> None:
    """Fill *out* (n_lines, width): each line is contiguous in the file, *pitch* bytes after the one before."""
    n, width = out.shape
    size = tensor.dtype.itemsize
    nbytes = width * size
    if (n == 1 or pitch == nbytes) and out.flags.c_contiguous:
        _fill(tensor, start, out)
    elif pitch - nbytes > MAX_GAP or nbytes > PIECE:
        for i in range(n):
            _read_line(tensor, start + i * pitch, out[i])
    else:
        step = max(1, PIECE // pitch) if pitch else n
        for i in range(0, n, step):
            part = out[i : i + step]
            buffer = scratch("raw", (len(part) - 1) * pitch + nbytes)
            _fill(tensor, start + i * pitch, buffer)
            part[...] = np.ndarray(part.shape, part.dtype, buffer, strides=(pitch, size))


def _read_line(tensor: FileTensor, start: int, line: npt.NDArray[Any]) -> None:
    """Fill *line*, 1-d with any stride, with neighbouring elements."""
    if line.flags.c_contiguous:
        _fill(tensor, start, line)
        return
    size = tensor.dtype.itemsize
    step = PIECE // size
    for i in range(0, len(line), step):
        part = line[i : i + step]
        buffer = scratch("raw", len(part) * size)
        _fill(tensor, start + i * size, buffer)
        part[...] = buffer.view(part.dtype)


def _gather(tensor: FileTensor, row: int, col: int, out: Elements) -> None:
    """Any strides: read the range that the block touches, or halve the block until that range is small."""
    assert tensor.strides is not None
    n, width = out.shape
    size = tensor.dtype.itemsize
    if width > PIECE // 8:  # bounds the index arrays below
        _gather(tensor, row, col, out[:, : width // 2])
        _gather(tensor, row, col + width // 2, out[:, width // 2 :])
        return
    offsets = _column_offsets(tensor, col, width)
    low, high = int(offsets.min()), int(offsets.max())
    down = (n - 1) * tensor.strides[0]
    if (down + high - low + 1) * size <= PIECE or n * width == 1:
        buffer = scratch("raw", (down + high - low + 1) * size)
        _fill(tensor, tensor.offset + (row * tensor.strides[0] + low) * size, buffer)
        elements = buffer.view(tensor.dtype.storage_dtype)
        for i in range(n):
            out[i] = elements[offsets - low + i * tensor.strides[0]]
    elif width == 1 or (n > 1 and down > high - low):
        _gather(tensor, row, col, out[: n // 2])
        _gather(tensor, row + n // 2, col, out[n // 2 :])
    else:
        _gather(tensor, row, col, out[:, : width // 2])
        _gather(tensor, row, col + width // 2, out[:, width // 2 :])


def _column_offsets(tensor: FileTensor, col: int, width: int) -> npt.NDArray[np.int64]:
    """Where columns ``[col, col + width)`` are stored: elements after the row's first."""
    assert tensor.strides is not None
    left = np.arange(col, col + width)
    offsets = np.zeros(width, np.int64)
    for n, stride in zip(reversed(tensor.shape[1:]), reversed(tensor.strides[1:]), strict=True):
        left, index = np.divmod(left, n)
        offsets += index * stride
    return offsets


def _fill(tensor: FileTensor, offset: int, out: npt.NDArray[Any]) -> None:
    """Fill a contiguous array with the file's bytes from *offset* on."""
    done = tensor.file.read_into(out.data, offset)
    if done == out.nbytes:
        return
    rest = out.reshape(-1).view(np.uint8).data
    while done < len(rest):  # a signal, or 2 GiB at once
        got = tensor.file.read_into(rest[done:], offset + done)
        if got == 0:
            what = "the file ends here: it became shorter after it was opened"
            raise CorruptChunk(tensor.file.path, tensor.key, offset + done, what)
        done += got
