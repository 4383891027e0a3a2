"""The layout of ``torch.save``: a zip archive of stored records, every offset and byte of it fixed in advance.

=======================================  ======================================================================
record                                   content
=======================================  ======================================================================
``<prefix>/data.pkl``                    the state dict (`picklestream`)
``<prefix>/byteorder``                   ``little``
``<prefix>/data/<n>``                    storage n: the tensor, 4 bytes of CRC-32, zeros (`checksum.Sealed`)
``<prefix>/version``                     ``3``
``<prefix>/.data/serialization_id``      40 digits, always the same
=======================================  ======================================================================

As in torch's own files, data start at multiples of 64 bytes (padding in the extra field ``FB`` of a local header),
names are UTF-8, dates are zero, and a zip64 end record is always there. Unlike those, sizes and CRCs stand in the
local headers already and there are no data descriptors. A tensor is the beginning of its storage, which has a few
bytes more: torch refuses records that are longer than their storage. The record ``.format_version`` is left out, for
with it torch may compute offsets that hold for its own writer only.
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Sequence
from dataclasses import dataclass

from ckptfs.formats.extents import Body, ExtentFile, file_of
from ckptfs.formats.nested import Value
from ckptfs.formats.torch.pickler import pickle_state
from ckptfs.formats.torch.sealed import Sealed, sealed_nbytes
from ckptfs.tensors.tensor import nbytes

ALIGNMENT = 64
"""Data of every record start at a multiple of this, as torch's do: mapped tensors are aligned."""
SERIALIZATION_ID = b"0" * 40

_LOCAL = struct.Struct("<4s5H3L2H")
_ENTRY = struct.Struct("<4s6H3L5H2L")
_END64 = struct.Struct("<4sQ2H2L4Q")
_END64_LOCATOR = struct.Struct("<4sLQL")
_END = struct.Struct("<4s4H2LH")
_UTF8 = 0x0800
_FULL = 0xFFFFFFFF


@dataclass(frozen=True, slots=True)
class _Record:
    """One file in the archive; *offset* is where its local header begins."""

    name: bytes
    size: int
    crc: int
    offset: int


def torch_file(state: Value, *, prefix: str = "archive") -> ExtentFile:
    """A file for ``torch.load`` that holds *state*: nested containers as of `state.nested_state`.

    Tensors are contiguous; the same tensor object in two places shares one storage. Reads no tensor data.
    """
    pickle, tensors = pickle_state(state, sealed_nbytes)
    named: list[tuple[str, Body]] = [
        ("data.pkl", pickle),
        ("byteorder", b"little"),
        *((f"data/{i}", Sealed(tensor) if nbytes(tensor) else b"") for i, tensor in enumerate(tensors)),
        ("version", b"3\n"),
        (".data/serialization_id", SERIALIZATION_ID),
    ]
    return _archive([(f"{prefix}/{name}".encode(), body) for name, body in named])


def _archive(named: Sequence[tuple[bytes, Body]]) -> ExtentFile:
    bodies: list[Body] = []
    records: list[_Record] = []
    offset = 0
    for name, body in named:
        record = _Record(name, _size(body), _crc(body), offset)
        header = _local_header(record)
        records.append(record)
        bodies += [header, body]
        offset += len(header) + record.size
    directory = b"".join(map(_entry, records))
    bodies.append(directory + _end(len(records), len(directory), offset))
    return file_of(bodies)


def _size(body: Body) -> int:
    return len(body) if isinstance(body, bytes) else nbytes(body)


def _crc(body: Body) -> int:
    if isinstance(body, bytes):
        return zlib.crc32(body)
    assert isinstance(body, Sealed)
    return body.crc


def _local_header(record: _Record) -> bytes:
    """The header before a record's data, padded so that these are aligned."""
    wide = record.size >= _FULL
    extra = struct.pack("<2H2Q", 1, 16, record.size, record.size) if wide else b""
    pad = -(record.offset + _LOCAL.size + len(record.name) + len(extra) + 4) % ALIGNMENT
    extra += struct.pack("<2sH", b"FB", pad) + b"Z" * pad
    size = min(record.size, _FULL)
    fields = (_version(wide), _UTF8, 0, 0, 0, record.crc, size, size, len(record.name), len(extra))
    return _LOCAL.pack(b"PK\x03\x04", *fields) + record.name + extra


def _entry(record: _Record) -> bytes:
    """The record in the central directory; sizes and offsets of 4 GiB and more stand in the zip64 field."""
    wide = [record.size, record.size] if record.size >= _FULL else []
    wide += [record.offset] if record.offset >= _FULL else []
    extra = struct.pack(f"<2H{len(wide)}Q", 1, 8 * len(wide), *wide) if wide else b""
    size = min(record.size, _FULL)
    fields = (0, _version(bool(wide)), _UTF8, 0, 0, 0, record.crc, size, size, len(record.name), len(extra))
    return _ENTRY.pack(b"PK\x01\x02", *fields, 0, 0, 0, 0, min(record.offset, _FULL)) + record.name + extra


def _version(wide: bool) -> int:
    """Version of the zip specification that is needed to read it."""
    return 45 if wide else 20


def _end(n: int, size: int, offset: int) -> bytes:
    """The three end records of a central directory with *n* entries."""
    end64 = _END64.pack(b"PK\x06\x06", _END64.size - 12, 45, 45, 0, 0, n, n, size, offset)
    locator = _END64_LOCATOR.pack(b"PK\x06\x07", 0, offset + size, 1)
    short = min(n, 0xFFFF)
    return end64 + locator + _END.pack(b"PK\x05\x06", 0, 0, short, short, min(size, _FULL), min(offset, _FULL), 0)
