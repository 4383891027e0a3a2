"""Files as readers see them: opened once, read at offsets; and tensors that lie in them as plain elements.

No memory maps: a file that shrinks while it is mounted must give an error, not SIGBUS.
"""

from __future__ import annotations

import json
import math
import os
import stat
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from ckptfs import nodes
from ckptfs.cache import scratch
from ckptfs.dtypes import DType
from ckptfs.errors import CorruptChunk, CorruptHeader, SourceError, UsageError
from ckptfs.formats.source import Shape, Words, n_cols
from ckptfs.nodes import Node

MAX_JSON_VALUES = 3_000_000
"""Containers and commas in one JSON text. Three bytes can ask for a hundred in memory; a header of 100,000 tensors
has a million."""
PIECE = 4 << 20
"""Bytes of scratch memory that one read uses at most (about)."""
GAP = 16 << 10
"""Bytes that are cheaper to read and throw away than another system call."""
MAX_NDIM = 32
"""numpy 1's limit; no tensor has more."""
MAX_NBYTES = 1 << 62
"""Views may repeat elements (stride 0), so a tensor can be larger than its file, but not than an off_t."""


@dataclass(frozen=True, slots=True)
class OpenFile:
    """A regular file, open for reading."""

    path: str
    fd: int
    size: int
    mtime_ns: int


def open_file(path: str | os.PathLike[str]) -> OpenFile:
    """Open a regular file; `UsageError` when it is not there, `SourceError` when it cannot be read."""
    name = os.fspath(path)
    try:
        # O_NONBLOCK: a named pipe must not hang us before fstat can tell what it is
        fd = os.open(name, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    except FileNotFoundError as error:
        raise UsageError(f"{name}: no such file or folder") from error
    except (OSError, ValueError) as error:  # ValueError: a NUL in the name
        raise SourceError(name, f"cannot be opened: {getattr(error, 'strerror', None) or error}") from error
    status = os.fstat(fd)
    if not stat.S_ISREG(status.st_mode):
        os.close(fd)
        raise SourceError(name, "is not a regular file")
    return OpenFile(name, fd, status.st_size, status.st_mtime_ns)


def read_exactly(file: OpenFile, offset: int, n: int, what: str) -> bytes:
    """*n* bytes from *offset* on; `CorruptHeader` naming *what* when the file does not have them.

    The size is checked against the file's before anything is allocated.
    """
    if offset < 0 or n < 0 or offset + n > file.size:
        raise CorruptHeader(file.path, f"{what} ({n} bytes at byte {offset}) lies past the end ({file.size} bytes)")
    data = bytearray(n)
    done = 0
    while done < n:
        got = os.preadv(file.fd, [memoryview(data)[done:]], offset + done)
        if got == 0:
            raise CorruptHeader(file.path, f"the file became shorter while {what} was read; open it again")
        done += got
    return bytes(data)


def json_object(data: bytes, path: str, what: str) -> dict[str, Any]:
    """The JSON object in *data*; `CorruptHeader` when it is none, or when a name stands in it twice."""
    if sum(data.count(mark) for mark in (b"{", b"[", b",")) > MAX_JSON_VALUES:
        raise CorruptHeader(path, f"{what} has more than {MAX_JSON_VALUES} values")
    try:
        value = json.loads(data.decode("utf-8"), object_pairs_hook=_unique)
    except (ValueError, RecursionError) as error:  # ValueError has UnicodeDecodeError and JSONDecodeError below it
        raise CorruptHeader(path, f"{what} is no valid JSON: {error}") from error
    if not isinstance(value, dict):
        raise CorruptHeader(path, f"{what} is no JSON object")
    return value


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        seen: set[str] = set()
        twice = next(name for name, _ in pairs if name in seen or seen.add(name))  # type: ignore[func-returns-value]
        raise ValueError(f"{twice[:200]!r} stands in it twice")
    return found


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
    """Whether the elements lie one after the other. Strides of axes of length 1 mean nothing."""
    return 0 in shape or all(
        n == 1 or have == want for n, have, want in zip(shape, strides, c_strides(shape), strict=True)
    )


@dataclass(frozen=True, slots=True)
class FileTensor:
    """A tensor whose elements lie in a file as they are: a `source.Tensor`.

    The maker has checked that every element lies inside the file; a file that shrank since gives `CorruptChunk`.
    """

    dtype: DType
    shape: Shape
    fd: int
    offset: int
    """Byte position of the first element."""
    strides: Shape | None
    """In elements, none negative; None for C order."""
    path: str
    """The file and the key are for error messages."""
    key: str

    @property
    def grain(self) -> tuple[int, int]:
        """One row by 16 KiB of columns; a column-major matrix the other way round."""
        n = GAP // self.dtype.itemsize
        if self.strides is not None and _column_major(self):
            return max(1, min(self.shape[0], n)), 1
        return 1, max(1, min(n_cols(self.shape), n))

    def read_block(self, row: int, col: int, out: Words) -> None:
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

    def node(self) -> Node | None:
        """As `nodes` says: of a tensor in C order."""
        return nodes.stored(self.fd, self.offset) if self.strides is None else None


def _column_major(tensor: FileTensor) -> bool:
    return tensor.strides is not None and len(tensor.shape) == 2 and tensor.strides[0] == 1


def _read_lines(tensor: FileTensor, start: int, pitch: int, out: Words) -> None:
    """Fill *out* (n_lines, width): each line is contiguous in the file, *pitch* bytes after the one before."""
    n, width = out.shape
    size = tensor.dtype.itemsize
    nbytes = width * size
    if (n == 1 or pitch == nbytes) and out.flags.c_contiguous:
        _fill(tensor, start, out)
    elif pitch - nbytes > GAP or nbytes > PIECE:
        for i in range(n):
            _read_line(tensor, start + i * pitch, out[i])
    else:
        step = max(1, PIECE // pitch) if pitch else n
        for i in range(0, n, step):
            part = out[i : i + step]
            span = scratch("raw", (len(part) - 1) * pitch + nbytes)
            _fill(tensor, start + i * pitch, span)
            part[...] = np.ndarray(part.shape, part.dtype, span, strides=(pitch, size))


def _read_line(tensor: FileTensor, start: int, line: npt.NDArray[Any]) -> None:
    """Fill *line*, 1-d with any stride, with neighbouring elements."""
    if line.flags.c_contiguous:
        _fill(tensor, start, line)
        return
    size = tensor.dtype.itemsize
    step = PIECE // size
    for i in range(0, len(line), step):
        part = line[i : i + step]
        span = scratch("raw", len(part) * size)
        _fill(tensor, start + i * size, span)
        part[...] = span.view(part.dtype)


def _gather(tensor: FileTensor, row: int, col: int, out: Words) -> None:
    """Any strides: read the span that the block touches, or halve the block until that span is small."""
    assert tensor.strides is not None
    n, width = out.shape
    size = tensor.dtype.itemsize
    if width > PIECE // 8:  # bounds the index arrays below
        _gather(tensor, row, col, out[:, : width // 2])
        _gather(tensor, row, col + width // 2, out[:, width // 2 :])
        return
    places = _inner_places(tensor, col, width)
    low, high = int(places.min()), int(places.max())
    down = (n - 1) * tensor.strides[0]
    if (down + high - low + 1) * size <= PIECE or n * width == 1:
        span = scratch("raw", (down + high - low + 1) * size)
        _fill(tensor, tensor.offset + (row * tensor.strides[0] + low) * size, span)
        words = span.view(tensor.dtype.word)
        for i in range(n):
            out[i] = words[places - low + i * tensor.strides[0]]
    elif width == 1 or (n > 1 and down > high - low):
        _gather(tensor, row, col, out[: n // 2])
        _gather(tensor, row + n // 2, col, out[n // 2 :])
    else:
        _gather(tensor, row, col, out[:, : width // 2])
        _gather(tensor, row, col + width // 2, out[:, width // 2 :])


def _inner_places(tensor: FileTensor, col: int, width: int) -> npt.NDArray[np.int64]:
    """Where columns ``[col, col + width)`` lie in a row: elements after the row's first."""
    assert tensor.strides is not None
    left = np.arange(col, col + width)
    places = np.zeros(width, np.int64)
    for n, stride in zip(reversed(tensor.shape[1:]), reversed(tensor.strides[1:]), strict=True):
        left, index = np.divmod(left, n)
        places += index * stride
    return places


def _fill(tensor: FileTensor, offset: int, out: npt.NDArray[Any]) -> None:
    """Fill a contiguous array with the file's bytes from *offset* on."""
    done = os.preadv(tensor.fd, [out.data], offset)
    if done == out.nbytes:
        return
    rest = out.reshape(-1).view(np.uint8).data
    while done < len(rest):  # a signal, or 2 GiB at once
        got = os.preadv(tensor.fd, [rest[done:]], offset + done)
        if got == 0:
            what = "the file ends here: it became shorter after it was opened"
            raise CorruptChunk(tensor.path, tensor.key, offset + done, what)
        done += got


def checked_shape(shape: object, itemsize: int) -> Shape:
    """*shape* as a tuple of sizes; ValueError when it is none, or when the tensor could not exist."""
    if not isinstance(shape, (list, tuple)) or len(shape) > MAX_NDIM:
        raise ValueError(f"its shape is no list of at most {MAX_NDIM} sizes")
    if any(type(n) is not int or n < 0 for n in shape):
        raise ValueError("its shape has something else than sizes")
    if math.prod(n for n in shape if n) * itemsize > MAX_NBYTES:
        raise ValueError("its shape has more than 2**62 bytes")
    return tuple(shape)


def config_beside(path: str) -> Mapping[str, Any] | None:
    """The Hugging Face ``config.json`` in the folder of *path*; None when there is none."""
    name = os.path.join(os.path.dirname(path), "config.json")
    return read_json(name, 16 << 20, "the model config") if os.path.isfile(name) else None


def read_json(path: str, limit: int, what: str) -> dict[str, Any]:
    """The JSON object in a small file of at most *limit* bytes."""
    file = open_file(path)
    try:
        if file.size > limit:
            raise CorruptHeader(path, f"{what} has {file.size} bytes, more than {limit}")
        return json_object(read_exactly(file, 0, file.size, what), path, what)
    finally:
        os.close(file.fd)
