"""CRC-32 of data that has not been read yet: records of a zip archive whose checksum is known ahead.

The headers of a zip hold the CRC-32 of every record, before and after the data. Opening an archive must not read the
whole model for them, and with zeros ``unzip -t`` and Python's zipfile call the archive damaged. But any data followed
by its own CRC-32 (little-endian) has the CRC-32 `RESIDUE`, and zeros after that change it in a known way. So a
`Sealed` record ends with the CRC of its data, and the headers are constants.

Only those 4 bytes depend on all the data. A program that copies or checks a file reads them last, when the CRC of
everything before is already known (`Parts`). A program that reads them alone waits for one pass over the record.
"""

from __future__ import annotations

import threading
import zlib
from bisect import bisect_right
from dataclasses import dataclass, field
from functools import lru_cache

from ckptfs.native.scratch import borrow
from ckptfs.tensors.dtypes import DTYPES, DType
from ckptfs.tensors.ranges import read_into
from ckptfs.tensors.tensor import Elements, Shape, Tensor, nbytes

CRC32 = 0xEDB88320
"""The polynomial of zip, Ethernet and zlib."""
CRC32C = 0x82F63B78
"""Castagnoli's, of TensorFlow's files."""
RESIDUE = 0x2144DF1C
"""CRC-32 of any bytes followed by their CRC-32."""
FAR = 1 << 20
"""Records from this size on (bytes) keep a distance from what follows them."""
DISTANCE = 8192
"""Zeros after the checksum of such a record. Opening an archive reads the next header, the end, and the pages around
them; none of these may hold a checksum that costs a pass over a large tensor."""

_PIECE = 1 << 20
_MAX_PARTS = 256
_lock = threading.Lock()  # held for a few microseconds, by all tensors: 100,000 locks would take more memory


@dataclass(slots=True)
class Parts:
    """CRC-32 of those parts [start, stop) of some bytes that have been seen; neighbours are joined.

    Holds about `_MAX_PARTS` parts; what random reads see beyond that is forgotten. A part at 0 or next to a known one
    is always kept, so reading the first gap again and again comes to an end.
    """

    polynomial: int = CRC32
    """In the order of bits of `combine`."""
    _parts: list[tuple[int, int, int]] = field(default_factory=list)
    """(start, stop, CRC-32), in order, with gaps between them."""

    def gap(self, start: int, stop: int) -> tuple[int, int] | None:
        """The first part of [start, stop) that has not been seen."""
        with _lock:
            for first, last, _ in self._parts:
                if start >= stop or first > start:
                    stop = min(first, stop)
                    break
                start = max(start, last)
        return (start, stop) if start < stop else None

    def add(self, start: int, stop: int, crc: int) -> None:
        """Record the CRC-32 of [start, stop); ignored where another thread has already seen a part of it."""
        with _lock:
            parts = self._parts
            i = bisect_right(parts, (start, stop, crc))
            before = parts[i - 1] if i else (-1, -1, 0)
            after = parts[i] if i < len(parts) else (stop + 1, stop + 1, 0)
            if before[1] > start or after[0] < stop:
                return
            low, high = i, i
            if before[1] == start:
                low, start, crc = i - 1, before[0], combine(before[2], crc, stop - start, self.polynomial)
            if after[0] == stop:
                high, stop, crc = i + 1, after[1], combine(crc, after[2], after[1] - stop, self.polynomial)
            if low < high or not start or len(parts) < _MAX_PARTS:
                parts[low:high] = [(start, stop, crc)]

    def whole(self, stop: int) -> int | None:
        """The CRC-32 of [0, stop); None while parts are missing."""
        with _lock:
            first = self._parts[0] if self._parts else (0, 0, 0)
        return first[2] if first[:2] == (0, stop) else None


@dataclass(frozen=True, slots=True, eq=False)
class Sealed:
    """The bytes of *tensor*, their CRC-32, and zeros up to a multiple of the element size: a uint8 tensor.

    Bytes from `FAR` on are followed by `DISTANCE` zeros more. Not for empty tensors, whose CRC-32 is known.
    """

    tensor: Tensor
    shape: Shape = field(init=False)
    _parts: Parts = field(default_factory=Parts, init=False, repr=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "shape", (sealed_nbytes(self.tensor),))

    @property
    def dtype(self) -> DType:
        return DTYPES["uint8"]

    @property
    def preferred_block(self) -> tuple[int, int]:
        return (1, 1)

    @property
    def crc(self) -> int:
        """CRC-32 of the whole record; reads nothing."""
        return zlib.crc32(bytes(self.shape[0] - nbytes(self.tensor) - 4), RESIDUE)

    def read_block(self, row: int, col: int, out: Elements) -> None:
        if out.flags.c_contiguous:
            self._read(row, out.reshape(-1).data)
            return
        with borrow(out.size) as buffer:
            self._read(row, buffer.data)
            out[...] = buffer.reshape(out.shape)

    def _read(self, start: int, out: memoryview) -> None:
        size = nbytes(self.tensor)
        n = max(0, min(start + len(out), size) - start)
        if n:
            read_into(self.tensor, start, out[:n])
            self._note(start, out[:n])
        if n < len(out):
            at = start + n - size
            seal = self._crc_of_data().to_bytes(4, "little")[at:] if at < 4 else b""
            tail = seal[: len(out) - n]
            out[n:] = tail + bytes(len(out) - n - len(tail))

    def _note(self, start: int, data: memoryview) -> None:
        """Record the CRC-32 of what was read for the first time."""
        at, stop = start, start + len(data)
        while (gap := self._parts.gap(at, stop)) is not None:
            self._parts.add(*gap, zlib.crc32(data[gap[0] - start : gap[1] - start]))
            at = gap[1]

    def _crc_of_data(self) -> int:
        """CRC-32 of the data; reads the parts that nobody has read yet."""
        size = nbytes(self.tensor)
        while (crc := self._parts.whole(size)) is None:
            gap = self._parts.gap(0, size)
            if gap is None:  # another thread was faster
                continue
            start, stop = gap[0], min(gap[1], gap[0] + _PIECE)
            with borrow(stop - start) as buffer:
                read_into(self.tensor, start, buffer.data)
                self._parts.add(start, stop, zlib.crc32(buffer.data))
        return crc


def sealed_nbytes(tensor: Tensor) -> int:
    """Size of the `Sealed` *tensor*, a multiple of its element size; 0 for an empty one."""
    size = nbytes(tensor)
    if not size:
        return 0
    extra = 4 + (DISTANCE if size >= FAR else 0)
    return size + extra + -extra % tensor.dtype.itemsize


def combine(first: int, second: int, n: int, polynomial: int = CRC32) -> int:
    """CRC of two runs of bytes together, from the CRC of each; the second has *n* bytes (zlib's algorithm)."""
    return _times(_shift(n, polynomial), first, polynomial) ^ second if first else second


@lru_cache(maxsize=1024)
def _shift(n: int, polynomial: int) -> int:
    """x to the power of 8n modulo *polynomial*: what *n* bytes behind some bytes do to the CRC of those."""
    power, square = 1 << 31, 1 << 23  # x^0 and x^8: the highest bit is the lowest power
    while n:
        if n & 1:
            power = _times(square, power, polynomial)
        square = _times(square, square, polynomial)
        n >>= 1
    return power


def _times(a: int, b: int, polynomial: int) -> int:
    """Product of two polynomials over GF(2) modulo *polynomial*, whose highest bit is the lowest power."""
    product = 0
    for bit in range(31, -1, -1):
        if a >> bit & 1:
            product ^= b
        b = b >> 1 ^ (polynomial if b & 1 else 0)
    return product
