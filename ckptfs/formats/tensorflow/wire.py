"""Varints and the wire format of protocol buffers, as far as an index needs them."""

from __future__ import annotations

import struct
from collections.abc import Iterator

from ckptfs.errors import CorruptHeader

_VARINT, _FIXED64, _BYTES, _FIXED32 = 0, 1, 2, 5
_MAX_VARINT = 10


class Wire:
    """Bytes that are read from front to back; `CorruptHeader`, naming *what* they are, past their end."""

    __slots__ = ("_at", "_data", "_path", "_what")

    def __init__(self, data: bytes, path: str, what: str) -> None:
        self._data, self._path, self._what, self._at = data, path, what, 0

    @property
    def where(self) -> tuple[str, str]:
        """The file, and what the bytes are."""
        return self._path, self._what

    @property
    def left(self) -> int:
        return len(self._data) - self._at

    def take(self, n: int) -> bytes:
        """The next *n* bytes."""
        if n > self.left:
            raise CorruptHeader(self._path, f"{self._what} ends too early")
        self._at += n
        return self._data[self._at - n : self._at]

    def varint(self) -> int:
        """The next number, of 64 bits at most."""
        number = 0
        for i in range(_MAX_VARINT):
            byte = self.take(1)[0]
            number |= (byte & 0x7F) << 7 * i
            if byte < 0x80:
                return number & (1 << 64) - 1
        raise CorruptHeader(self._path, f"{self._what} has a number without an end")

    def fields(self) -> Iterator[tuple[int, int | bytes]]:
        """(number, value) of each field of the message that the rest is: an integer, or bytes."""
        while self.left:
            tag = self.varint()
            kind = tag & 7
            if kind == _VARINT:
                yield tag >> 3, self.varint()
            elif kind == _BYTES:
                yield tag >> 3, self.take(self.varint())
            elif kind == _FIXED32:
                yield tag >> 3, struct.unpack("<I", self.take(4))[0]
            elif kind == _FIXED64:
                yield tag >> 3, struct.unpack("<Q", self.take(8))[0]
            else:
                raise CorruptHeader(self._path, f"{self._what} has a field of the unknown kind {kind}")


def varint(number: int) -> bytes:
    """*number*, which is not negative, in seven bits a byte, the lowest first."""
    data = bytearray()
    while number > 0x7F:
        data.append(number & 0x7F | 0x80)
        number >>= 7
    data.append(number)
    return bytes(data)


def number_field(number: int, value: int) -> bytes:
    """A field with an integer; nothing for 0, which is the value of an absent field."""
    return varint(number << 3 | _VARINT) + varint(value) if value else b""


def bytes_field(number: int, value: bytes) -> bytes:
    """A field with bytes or a message."""
    return varint(number << 3 | _BYTES) + varint(len(value)) + value


def fixed32_field(number: int, value: int) -> bytes:
    """A field with an integer of four bytes, also for 0."""
    return varint(number << 3 | _FIXED32) + struct.pack("<I", value)
