"""HDF5 object header messages decoded to plain values, with `struct` alone.

Covers what h5py writes by default, and close variants. Other valid HDF5 raises `Unsupported`, so that libhdf5 can read
it instead. Damaged input raises one of `DAMAGE`.
Source: "HDF5 File Format Specification Version 3.0", sections IV.A.2.a to IV.A.2.v.
"""

from __future__ import annotations

import struct
from typing import Any, TypeAlias

UNDEFINED = (1 << 64) - 1
"""The address of what was never allocated."""
MAX_RANK = 32
DAMAGE = (struct.error, IndexError, ValueError)

Layout: TypeAlias = tuple[Any, ...]
"""("contiguous", address or None, nbytes), ("compact", bytes), ("chunked", chunk shape, address of the B-tree, -1
for none)."""

_ATTRIBUTE = struct.Struct("<BBHHH")
_TYPE = struct.Struct("<BBBBI")
_SCALAR = (b"\1\0\0\0\0\0\0\0", b"\2\0\0\0")
"""The dataspace of a single value, in versions 1 and 2, as libhdf5 writes it: what nearly all attributes have."""
_IEEE = {2: (0, 16, 10, 5, 0, 10, 15), 4: (0, 32, 23, 8, 0, 23, 127), 8: (0, 64, 52, 11, 0, 52, 1023)}


class Unsupported(Exception):
    """Valid HDF5 that libhdf5 has to read."""


def dataspace(data: bytes) -> tuple[int, ...] | None:
    """Shape; () for a scalar, None for a null dataspace."""
    version, rank = data[0], data[1]
    if version not in (1, 2):
        raise Unsupported(f"dataspace version {version}")
    if version == 2 and data[3] == 2:
        return None
    if rank > MAX_RANK:
        raise ValueError(f"{rank} dimensions")
    return struct.unpack_from(f"<{rank}Q", data, 8 if version == 1 else 4)


def datatype(data: bytes, at: int = 0) -> tuple[str, int, int]:
    """(name, size in bytes, end of the message) of an element type.

    The name is numpy's (``<f4``, ``>i4``, ``|b1``, ``<c8``, ``|V1``, ``|S5``), ``str`` for variable-length text, or
    ``other``. A bool is an enum {FALSE=0, TRUE=1} over one byte, a complex a compound (r, i), as h5py writes them.
    """
    head, b0, b1, _, size = _TYPE.unpack_from(data, at)
    kind, version, body = head & 15, head >> 4, at + 8
    if kind == 0:
        fits = struct.unpack_from("<HH", data, body) == (0, 8 * size) and size in (1, 2, 4, 8)
        return (_order(b0 & 1, size) + ("i" if b0 & 8 else "u") + str(size) if fits else "other"), size, body + 4
    if kind == 1:
        fits = struct.unpack_from("<HHBBBBI", data, body) == _IEEE.get(size) and b0 & 0x40 == 0
        return (f"{_order(b0 & 1, size)}f{size}" if fits else "other"), size, body + 12
    if kind == 3:
        return f"|S{size}", size, body
    if kind == 5:
        return f"|V{size}", size, body + b0
    if kind == 6:
        return _compound(data, body, version, b0 | b1 << 8, size), size, len(data)
    if kind == 8:
        return _enum(data, body, version, b0 | b1 << 8), size, len(data)
    if kind == 9 and b0 & 15 == 1:
        return "str", size, datatype(data, body)[2]
    return "other", size, len(data)


def _order(big: int, size: int) -> str:
    return "|" if size == 1 else "<>"[big]


def _name(data: bytes, at: int, version: int) -> tuple[bytes, int]:
    """A member's name and where it ends; padded to 8 bytes before version 3."""
    stop = data.index(0, at)
    n = stop - at + 1
    return data[at:stop], at + (n if version >= 3 else n + -n % 8)


def _compound(data: bytes, at: int, version: int, n_members: int, size: int) -> str:
    if n_members != 2:
        return "other"
    members = []
    for _ in range(2):
        name, at = _name(data, at, version)
        width = 4 if version < 3 else (size.bit_length() + 7) // 8
        offset = int.from_bytes(data[at : at + width], "little")
        at += 32 if version == 1 else width
        member, _, at = datatype(data, at)
        members.append((name, offset, member))
    (_, _, first), (_, _, second) = members
    whole = members == [(b"r", 0, first), (b"i", size // 2, second)] and first == second
    return f"{first[0]}c{size}" if whole and first[1:] in (f"f{size // 2}",) else "other"


def _enum(data: bytes, at: int, version: int, n_members: int) -> str:
    base, size, at = datatype(data, at)
    if n_members != 2 or size != 1:
        return base
    first, at = _name(data, at, version)
    second, at = _name(data, at, version)
    return "|b1" if (first, second, data[at : at + 2]) == (b"FALSE", b"TRUE", b"\0\1") else base


def fill_value(kind: int, data: bytes) -> bytes | None:
    """The fill value's bytes; None when it is undefined or zero. *kind* 4 is the old message, 5 the new."""
    if kind == 4:
        at = 0
    elif data[0] == 3:
        if not data[1] & 0x20:
            return None
        at = 2
    else:
        if data[0] == 2 and not data[3]:
            return None
        at = 4
    (size,) = struct.unpack_from("<I", data, at)
    value = data[at + 4 : at + 4 + size]
    return value if value.strip(b"\0") else None


def layout(data: bytes) -> Layout:
    """Where the data are; only version 3, which the 1.6 to 1.14 libraries write by default."""
    version, kind = data[0], data[1]
    if version != 3:
        raise Unsupported(f"layout version {version}")
    if kind == 0:
        (size,) = struct.unpack_from("<H", data, 2)
        return "compact", data[4 : 4 + size]
    if kind == 1:
        address, size = struct.unpack_from("<QQ", data, 2)
        return "contiguous", None if address == UNDEFINED else address, size
    if kind == 2:
        n_dims, address = struct.unpack_from("<BQ", data, 2)
        dims = struct.unpack_from(f"<{n_dims}I", data, 11)
        return "chunked", dims[:-1], -1 if address == UNDEFINED else address
    raise Unsupported(f"layout class {kind}")


def filters(data: bytes) -> tuple[tuple[int, int, tuple[int, ...]], ...]:
    """(filter id, flags, client values) in the order in which they were applied on writing."""
    version, count = data[0], data[1]
    if version not in (1, 2):
        raise Unsupported(f"filter pipeline version {version}")
    at = 8 if version == 1 else 2
    found = []
    for _ in range(count):
        (number,) = struct.unpack_from("<H", data, at)
        n_name = 0
        if version == 1 or number >= 256:
            (n_name,) = struct.unpack_from("<H", data, at + 2)
            at += 2
        flags, n_values = struct.unpack_from("<HH", data, at + 2)
        at += 6 + n_name
        values = struct.unpack_from(f"<{n_values}I", data, at)
        at += 4 * (n_values + (n_values & 1 if version == 1 else 0))
        found.append((number, flags, values))
    return tuple(found)


def attribute_name(data: bytes) -> bytes:
    """The name alone, of an attribute message whose version may still be unknown."""
    at = 9 if data[0] == 3 else 8
    return data[at : at + (data[2] | data[3] << 8)].split(b"\0", 1)[0]


def attribute(data: bytes, types: dict[bytes, str]) -> tuple[str, str, tuple[int, ...] | None, int]:
    """(name, type name, shape, where the value starts). *types* remembers type messages already decoded."""
    version, flags, n_name, n_type, n_space = _ATTRIBUTE.unpack_from(data, 0)
    if version not in (1, 2, 3):
        raise Unsupported(f"attribute version {version}")
    if version > 1 and flags & 3:
        raise Unsupported("attribute with a shared type")
    at = 9 if version == 3 else 8
    pad = 8 if version == 1 else 1
    name = data[at : at + n_name].split(b"\0", 1)[0].decode(errors="surrogateescape")
    at += n_name + -n_name % pad
    raw = data[at : at + n_type]
    kind = types.get(raw)
    if kind is None:
        kind = types[raw] = datatype(raw)[0]
    at += n_type + -n_type % pad
    raw = data[at : at + n_space]
    shape = () if raw in _SCALAR else dataspace(raw)
    return name, kind, shape, at + n_space + -n_space % pad
