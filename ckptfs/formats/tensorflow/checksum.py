"""CRC-32C as TensorFlow's files have it, and tensors whose CRC-32C is noted while they are read.

A checksum of data is computed once, whoever reads: what the readers of a data file have seen needs no second pass for
the index, and a second reader of the index waits for the first one.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

import numpy as np
import numpy.typing as npt

from ckptfs.errors import CorruptChunk, MissingCodec
from ckptfs.formats.sealed import CRC32C, Parts
from ckptfs.native.scratch import borrow
from ckptfs.tensors.dtypes import DType
from ckptfs.tensors.ranges import read_elements, read_into
from ckptfs.tensors.tensor import Elements, Shape, Tensor, n_cols, nbytes

SMALL = 4 << 20
"""Variables up to this size (bytes) are checked before any of their elements is handed out."""
_PIECE = 4 << 20
_MASK = 0xA282EAD8
Buffer = bytes | memoryview


def have_crc32c() -> bool:
    """Whether the library is installed that computes CRC-32C."""
    return _library() is not None


def need_crc32c(path: object) -> None:
    """Raise `MissingCodec` where the library is not installed."""
    if not have_crc32c():
        what = "TensorFlow checkpoints need the package crc32c: pip install 'ckptfs[tensorflow]'"
        raise MissingCodec(path, what)


def crc32c(data: Buffer, crc: int = 0) -> int:
    """CRC-32C of *data* behind data whose CRC-32C is *crc*."""
    library = _library()
    if library is None:
        need_crc32c("crc32c")
    assert library is not None
    return library(data, crc)


def masked(crc: int) -> int:
    """As TensorFlow stores it: a CRC of data that hold a CRC would say little."""
    return ((crc >> 15 | crc << 17) + _MASK) & 0xFFFFFFFF


@lru_cache(maxsize=1)
def _library() -> Callable[[Buffer, int], int] | None:
    try:
        from crc32c import crc32c as compute
    except ImportError:
        return None
    found: Callable[[Buffer, int], int] = compute
    return found


@dataclass(frozen=True, slots=True, eq=False)
class Summed:
    """*source*, whose CRC-32C is noted as it is read."""

    source: Tensor
    _parts: Parts = field(default_factory=lambda: Parts(CRC32C), init=False, repr=False)
    _turn: threading.Lock = field(default_factory=threading.Lock, init=False, repr=False)

    @property
    def dtype(self) -> DType:
        return self.source.dtype

    @property
    def shape(self) -> Shape:
        return self.source.shape

    @property
    def preferred_block(self) -> tuple[int, int]:
        return self.source.preferred_block

    def read_block(self, row: int, col: int, out: Elements) -> None:
        self.source.read_block(row, col, out)
        cols = n_cols(self.shape)
        if out.size and out.flags.c_contiguous and (len(out) == 1 or out.shape[1] == cols):
            self._note(row * cols + col, out)

    def read_range(self, start: int, out: npt.NDArray[Any]) -> None:
        read_elements(self.source, start, out)
        self._note(start, out)

    @property
    def known(self) -> int | None:
        """The CRC-32C; None while there are elements that nobody has read."""
        return self._parts.whole(nbytes(self))

    def crc(self) -> int:
        """The CRC-32C; reads what nobody has read yet. Another thread that asks meanwhile waits for this one."""
        size = nbytes(self)
        with self._turn:
            while (crc := self.known) is None:
                gap = self._parts.gap(0, size)
                if gap is None:  # a reader of the data was faster
                    continue
                start, stop = gap[0], min(gap[1], gap[0] + _PIECE)
                with borrow(stop - start) as buffer:
                    read_into(self.source, start, buffer.data)
                    self._parts.add(start, stop, crc32c(buffer.data))
        return crc

    def _note(self, first: int, out: npt.NDArray[Any]) -> None:
        """Record the CRC-32C of the elements from *first* on, where they were read for the first time."""
        data = out.reshape(-1).view(np.uint8).data
        start = at = first * self.dtype.itemsize
        while (gap := self._parts.gap(at, start + len(data))) is not None:
            self._parts.add(*gap, crc32c(data[gap[0] - start : gap[1] - start]))
            at = gap[1]


@dataclass(frozen=True, slots=True, eq=False)
class Checked:
    """A variable that is read only while its data have the CRC-32C that the index says.

    One of up to `SMALL` bytes is checked as a whole before its first element is read. A larger one is checked when
    all of it has been read in some order: the read that completes it fails, and each read after that.
    """

    summed: Summed
    crc: int
    """Masked, as the index has it."""
    path: str
    key: str
    offset: int
    """Byte position of the data in *path*, for error messages."""

    @property
    def dtype(self) -> DType:
        return self.summed.dtype

    @property
    def shape(self) -> Shape:
        return self.summed.shape

    @property
    def preferred_block(self) -> tuple[int, int]:
        return (1, 1)

    def read_block(self, row: int, col: int, out: Elements) -> None:
        self._before()
        self.summed.read_block(row, col, out)
        self._after()

    def read_range(self, start: int, out: npt.NDArray[Any]) -> None:
        self._before()
        self.summed.read_range(start, out)
        self._after()

    def _before(self) -> None:
        if nbytes(self.summed) <= SMALL:
            self.summed.crc()
        self._after()

    def _after(self) -> None:
        crc = self.summed.known
        if crc is not None and masked(crc) != self.crc:
            what = "its checksum is wrong: the data have changed. Take another copy of the checkpoint"
            raise CorruptChunk(self.path, self.key, self.offset, what)
