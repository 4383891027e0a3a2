"""What the index of a TensorFlow checkpoint says, and the names of its files.

=============================  ===============================================================================
file                           content
=============================  ===============================================================================
``P.index``                    a sorted table: the key "" has the header, a variable's name its entry
``P.data-00000-of-00002``      the data of variables: C order, little-endian, without gaps
``checkpoint``                 text: ``model_checkpoint_path: "P"``, the newest checkpoint of the folder
=============================  ===============================================================================

Header: 1 number of data files, 2 byte order (0: little), 3 version {1 producer}. Entry: 1 element type, 2 shape
{2 axis {1 size}}, 3 data file, 4 offset, 5 size, 6 masked CRC-32C, 7 slice {1 axis {1 start, 2 length}}. Zeros are
absent. A variable in slices has its whole shape and no data; each slice has an entry of its own under `slice_key`.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Sequence
from dataclasses import dataclass

from ckptfs.errors import CorruptHeader, UnknownFormat
from ckptfs.formats.tensorflow.checksum import crc32c, masked
from ckptfs.formats.tensorflow.wire import Wire, bytes_field, fixed32_field, number_field, varint
from ckptfs.tensors.dtypes import DTYPES
from ckptfs.tensors.tensor import Shape

NUMBERS = {
    "float32": 1,
    "float64": 2,
    "int32": 3,
    "uint8": 4,
    "int16": 5,
    "int8": 6,
    "complex64": 8,
    "int64": 9,
    "bool": 10,
    "bfloat16": 14,
    "uint16": 17,
    "complex128": 18,
    "float16": 19,
    "uint32": 22,
    "uint64": 23,
    "float8_e5m2": 24,
    "float8_e4m3fn": 25,
}
"""TensorFlow's number of each element type."""
BY_NUMBER = {number: DTYPES[name] for name, number in NUMBERS.items()}
STRING = 7
OTHERS = {11: "qint8", 12: "quint8", 13: "qint32", 15: "qint16", 16: "quint16", 20: "resource", 21: "variant"}
"""Element types that cannot be shown."""
FULL = -1
"""The length of a slice that has all of an axis."""
MAX_SHARDS = 100_000
_MAX_AXES = 254

Slice = tuple[tuple[int, int], ...]
"""(start, length) of each axis."""


@dataclass(frozen=True, slots=True)
class Header:
    """The entry under the key ""."""

    n_shards: int
    big_endian: bool


@dataclass(frozen=True, slots=True)
class BundleEntry:
    """What the index says of one variable or slice."""

    dtype: int
    shape: tuple[int, ...]
    shard: int
    offset: int
    nbytes: int
    crc: int
    slices: tuple[Slice, ...] = ()


def data_name(prefix: str, shard: int, n_shards: int) -> str:
    """The name of a data file."""
    return f"{prefix}.data-{shard:05d}-of-{n_shards:05d}"


def index_name(prefix: str) -> str:
    return f"{prefix}.index"


def parse_header(data: bytes, path: str) -> Header:
    """The header; refuses checkpoints of the first format, whose files are sorted tables, too."""
    found = dict(Wire(data, path, "the header of the index").fields())
    if any(type(found.get(number, 0)) is not int for number in (1, 2)):
        what = "is a TensorFlow checkpoint of version 1; save it again with tf.compat.v1.train.Saver, version V2"
        raise UnknownFormat(path, what)
    n_shards, order = _number(found.get(1)), _number(found.get(2))
    if not 0 < n_shards <= MAX_SHARDS:
        raise CorruptHeader(path, f"the index says that there are {n_shards} data files")
    return Header(n_shards, order != 0)


def header_bytes(n_shards: int) -> bytes:
    """The header as TensorFlow writes it: little-endian, version 1."""
    return number_field(1, n_shards) + bytes_field(3, number_field(1, 1))


def parse_entry(data: bytes, path: str, key: str) -> BundleEntry:
    """The entry of one variable; `CorruptHeader` for what it cannot say."""
    what = f"{key:.200}: its entry"
    numbers = dict.fromkeys((1, 3, 4, 5, 6), 0)
    shape: tuple[int, ...] = ()
    slices: list[Slice] = []
    for number, value in Wire(data, path, what).fields():
        if number == 2:
            shape = _shape(_message(value, path, what))
        elif number == 7:
            slices.append(_slice(_message(value, path, what)))
        elif number in numbers and isinstance(value, int):
            numbers[number] = _signed(value)
    if min(numbers.values()) < 0:
        raise CorruptHeader(path, f"{what} has a negative number")
    return BundleEntry(numbers[1], shape, numbers[3], numbers[4], numbers[5], numbers[6], tuple(slices))


def entry_head(dtype: int, shape: Shape, shard: int, offset: int, nbytes: int) -> bytes:
    """The entry of one variable, without its checksum, which is the last field."""
    sizes = b"".join(bytes_field(2, number_field(1, n)) for n in shape)
    numbers = number_field(3, shard) + number_field(4, offset) + number_field(5, nbytes)
    return number_field(1, dtype) + bytes_field(2, sizes) + numbers


def checksum_field(crc: int) -> bytes:
    """The last field of an entry, of five bytes; *crc* is masked."""
    return fixed32_field(6, crc)


def slice_key(name: bytes, extents: Slice) -> bytes:
    """The key of one slice of the variable *name*, so encoded that keys sort as names and numbers do."""
    escaped = name.replace(b"\xff", b"\xff\x00").replace(b"\0", b"\0\xff")
    axes = b"".join(_ordered(start) + _ordered(length) for start, length in extents)
    n = len(extents)
    return b"\0" + escaped + b"\0\1" + (bytes([1, n]) if n else b"\0") + axes


def slice_name(key: bytes) -> bytes:
    """The name of the variable that a slice's key begins with; for messages."""
    return key[1:].partition(b"\0\1")[0].replace(b"\0\xff", b"\0").replace(b"\xff\x00", b"\xff")


def string_bytes(values: Sequence[bytes]) -> tuple[bytes, int]:
    """(data, masked CRC-32C) of a string variable: lengths, their own checksum, then the strings."""
    lengths = b"".join(varint(len(value)) for value in values)
    crc = _crc_of_lengths([len(value) for value in values])
    check = struct.pack("<I", masked(crc))
    text = b"".join(values)
    return lengths + check + text, masked(crc32c(text, crc32c(check, crc)))


def parse_strings(data: bytes, shape: Shape, crc: int, path: str, key: str) -> list[bytes]:
    """The strings of a variable; `CorruptHeader` where a length or one of both checksums is wrong."""
    wire = Wire(data, path, f"{key:.200}: its data")
    lengths = [wire.varint() for _ in range(math.prod(shape))]
    values_crc, check = _crc_of_lengths(lengths), wire.take(4)
    values = [wire.take(n) for n in lengths]
    total = crc32c(b"".join(values), crc32c(check, values_crc))
    if wire.left or struct.pack("<I", masked(values_crc)) != check or masked(total) != crc:
        raise CorruptHeader(path, f"{key:.200}: its checksum is wrong: the data have changed")
    return values


def _crc_of_lengths(lengths: Sequence[int]) -> int:
    """Each length counts as an integer of four bytes, from 2**32 on of eight."""
    crc = 0
    for n in lengths:
        crc = crc32c(n.to_bytes(4 if n < 1 << 32 else 8, "little"), crc)
    return crc


def _ordered(number: int) -> bytes:
    """A signed integer in one to ten bytes that sort as the integers do: the first bits say how many follow."""
    size = (number if number >= 0 else ~number).bit_length() // 7 + 1
    if size == 1:
        return bytes([0x80 ^ number & 0xFF])
    head = (0xFFFF << 16 - size & 0xFFFF).to_bytes(2, "big")
    data = bytearray(number.to_bytes(size, "big", signed=True))
    data[0] ^= head[0]
    data[1] ^= head[1]
    return bytes(data)


def _shape(wire: Wire) -> tuple[int, ...]:
    sizes = []
    for number, value in wire.fields():
        if number == 2:
            fields = dict(_message(value, *wire.where).fields())
            sizes.append(_signed(_number(fields.get(1))))
        elif number == 3 and value:
            raise CorruptHeader(wire.where[0], f"{wire.where[1]} has no shape")
    return tuple(sizes)


def _slice(wire: Wire) -> Slice:
    axes = []
    for number, value in wire.fields():
        if number == 1:
            fields = dict(_message(value, *wire.where).fields())
            axes.append((_signed(_number(fields.get(1))), _signed(_number(fields.get(2, FULL & (1 << 64) - 1)))))
    return tuple(axes[:_MAX_AXES])


def _message(value: int | bytes, path: str, what: str) -> Wire:
    if isinstance(value, int):
        raise CorruptHeader(path, f"{what} has a number where a message belongs")
    return Wire(value, path, what)


def _number(value: int | bytes | None) -> int:
    return value if isinstance(value, int) else 0


def _signed(number: int) -> int:
    return number - (1 << 64) if number >> 63 else number
