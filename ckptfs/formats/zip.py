"""Zip archives of stored records, for reading (`read_directory`) and writing (`zip_file`).

The directory at the archive's end is read here and not by `zipfile`: every size and offset is checked against the
file first, 100,000 records take a fraction of a second, and no record is decompressed. Opening an archive checks no
CRC; `damaged_records` does.

A written archive is laid out before any data is read. Like torch's own, it aligns the data of each record to 64
bytes (padding in the extra field ``FB`` of the local header), has UTF-8 names, no dates, and always a zip64 end
record. Sizes and CRCs are in the local headers; there are no data descriptors.
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from ckptfs.errors import CorruptHeader, UsageError
from ckptfs.formats.extents import Body, ExtentFile, file_of
from ckptfs.formats.files import read_exactly
from ckptfs.formats.sealed import Sealed, combine
from ckptfs.tensors.source_file import SourceFile
from ckptfs.tensors.tensor import nbytes

ALIGNMENT = 64
"""The data of every record starts at a multiple of this (bytes): mapped tensors are aligned."""
MAX_RECORDS = 1_000_000
MAX_DIRECTORY = 256 << 20
"""Bytes of the central directory."""
_END = struct.Struct("<4s4H2LH")
_END64_LOCATOR = struct.Struct("<4sLQL")
_END64 = struct.Struct("<4sQ2H2L4Q")
_ENTRY = struct.Struct("<4s6H3L5H2L")
_LOCAL = struct.Struct("<4s5H3L2H")
_FULL = 0xFFFFFFFF
"""What a 32-bit field holds when the value is in the zip64 field."""
_UTF8 = 0x0800
_PIECE = 4 << 20

Content = Sequence[bytes | Sealed]
"""The data of one record, laid end to end. A tensor is `Sealed`: its CRC-32 is known before it is read."""


@dataclass(frozen=True, slots=True)
class Record:
    """One file in the archive, as the central directory describes it."""

    name: str
    offset: int
    """Position of its local header."""
    nbytes: int
    stored: bool
    """Neither compressed nor encrypted."""
    crc: int
    """CRC-32 of its data; nothing that reads a part of them can check it."""


@dataclass(frozen=True, slots=True)
class Archive:
    """A zip's directory. *end* is where it begins: all data is before it."""

    file: SourceFile
    records: dict[str, Record]
    end: int


def is_zip(head: bytes) -> bool:
    """Whether a file that starts with *head* is a zip archive."""
    return head.startswith((b"PK\x03\x04", b"PK\x05\x06"))


def read_directory(file: SourceFile) -> Archive:
    """The central directory of a zip archive, zip64 or not."""
    n, size, start, end = _find_directory(file)
    if start + size > end or n > MAX_RECORDS or size > MAX_DIRECTORY or n * _ENTRY.size > size:
        what = f"the zip directory ({n} records in {size} bytes at byte {start}) does not fit the file"
        raise CorruptHeader(file.path, what)
    data = read_exactly(file, start, size, "the zip directory")
    records: dict[str, Record] = {}
    at = 0
    for _ in range(n):
        record, at = _parse_entry(file, data, at, start)
        if record.name in records:
            raise CorruptHeader(file.path, f"the zip directory has {record.name[:200]!r} twice")
        records[record.name] = record
    return Archive(file, records, start)


def data_offset(archive: Archive, record: Record) -> int:
    """Position of a record's data, which must be before the directory and stored as it is."""
    file = archive.file
    name = record.name.encode()
    head = read_exactly(file, record.offset, _LOCAL.size + len(name), f"the zip header of {record.name}")
    magic, *_, n_name, n_extra = _LOCAL.unpack_from(head)
    if magic != b"PK\x03\x04" or n_name != len(name) or head[_LOCAL.size :] != name:
        raise CorruptHeader(file.path, f"no zip header of {record.name} at byte {record.offset}")
    start: int = record.offset + _LOCAL.size + n_name + n_extra
    if not record.stored:
        raise CorruptHeader(file.path, f"{record.name} is compressed or encrypted; only stored records can be read")
    if start + record.nbytes > archive.end:
        what = f"{record.nbytes} bytes at byte {start} go past the archive's data (which ends at {archive.end})"
        raise CorruptHeader(file.path, f"{record.name}: {what}")
    return start


def read_content(archive: Archive, name: str, limit: int) -> bytes:
    """The data of a record of at most *limit* bytes."""
    record = archive.records[name]
    if record.nbytes > limit:
        raise CorruptHeader(archive.file.path, f"{name} has {record.nbytes} bytes, more than {limit}")
    return read_exactly(archive.file, data_offset(archive, record), record.nbytes, name)


def read_text(archive: Archive, name: str) -> str | None:
    """A small record as text without the line's end; None when there is none."""
    if name not in archive.records:
        return None
    return read_content(archive, name, 100).decode("latin-1").strip()


def damaged_records(file: SourceFile) -> Iterator[tuple[Record, int]]:
    """(record, position of its data) of each record whose CRC-32 does not fit its data. Reads the whole archive.

    A CRC of 0 counts as none: torch leaves some out.
    """
    archive = read_directory(file)
    for record in archive.records.values():
        start = data_offset(archive, record)
        if record.crc and record.crc != _crc_of_range(file, start, record.nbytes):
            yield record, start


def zip_file(records: Iterable[tuple[str, Content]]) -> ExtentFile:
    """An archive of these (name, data), stored in this order. Reads no tensor data.

    Raises `UsageError` for a name that is not Unicode text or has more than 65,535 bytes.
    """
    bodies: list[Body] = []
    placed: list[Record] = []
    offset = 0
    for name, content in records:
        _check_name(name)
        record = Record(name, offset, sum(map(_size, content)), True, _crc_of_content(content))
        header = _local_header(record)
        placed.append(record)
        bodies += [header, *content]
        offset += len(header) + record.nbytes
    directory = b"".join(map(_directory_entry, placed))
    bodies.append(directory + _end_records(len(placed), len(directory), offset))
    return file_of(bodies)


def _find_directory(file: SourceFile) -> tuple[int, int, int, int]:
    """(records, size, offset) of the central directory, and where its end record begins."""
    tail_at = max(0, file.size - _END.size - 0xFFFF)
    tail = read_exactly(file, tail_at, file.size - tail_at, "the end of the archive")
    at = tail.rfind(b"PK\x05\x06")
    if at < 0 or at + _END.size > len(tail):
        raise CorruptHeader(file.path, "the zip directory is missing: the file is cut off or still being written")
    _, disk, first_disk, n_here, n, size, start, _ = _END.unpack_from(tail, at)
    end = tail_at + at
    if disk or first_disk or n_here != n:
        raise CorruptHeader(file.path, "the archive is split over several files; join them first")
    locator = end - _END64_LOCATOR.size
    if locator < 0:
        return n, size, start, end
    magic, _, end64, _ = _END64_LOCATOR.unpack(read_exactly(file, locator, _END64_LOCATOR.size, "the zip64 locator"))
    if magic != b"PK\x06\x07":
        return n, size, start, end
    magic, _, _, _, _, _, _, n64, size64, start64 = _END64.unpack(
        read_exactly(file, end64, _END64.size, "the zip64 end record")
    )
    short = ((n, n64, 0xFFFF), (size, size64, _FULL), (start, start64, _FULL))
    if magic != b"PK\x06\x06" or any(low not in (full, long) for low, long, full in short):
        raise CorruptHeader(file.path, "the archive's two end records contradict each other")
    return n64, size64, start64, min(end64, end)


def _parse_entry(file: SourceFile, data: bytes, at: int, end: int) -> tuple[Record, int]:
    """The record described at *at* of the central directory, and where the next one begins."""
    if at + _ENTRY.size > len(data):
        raise CorruptHeader(file.path, "the zip directory breaks off")
    magic, _, _, flags, method, _, _, crc, packed, nbytes, n_name, n_extra, n_comment, _, _, _, offset = (
        _ENTRY.unpack_from(data, at)
    )
    name_at = at + _ENTRY.size
    extra_at = name_at + n_name
    after = extra_at + n_extra + n_comment
    if magic != b"PK\x01\x02" or after > len(data):
        raise CorruptHeader(file.path, "the zip directory is damaged")
    try:
        name = data[name_at:extra_at].decode("utf-8")
        if _FULL in (nbytes, packed, offset):
            extra = data[extra_at : extra_at + n_extra]
            nbytes, packed, offset = _zip64(extra, nbytes, packed, offset)
    except (ValueError, struct.error) as error:
        raise CorruptHeader(file.path, f"the zip directory is damaged: {error}") from error
    if offset + _LOCAL.size > end or nbytes > end:
        raise CorruptHeader(file.path, f"{name[:200]}: {nbytes} bytes at byte {offset} are not inside the archive")
    return Record(name, offset, nbytes, method == 0 and packed == nbytes and not flags & 1, crc), after


def _zip64(extra: bytes, *values: int) -> list[int]:
    """*values*, where the saturated ones are replaced by those of the zip64 field (id 1), which has them in order."""
    at = 0
    while at + 4 <= len(extra):
        kind, n = struct.unpack_from("<2H", extra, at)
        if kind == 1:
            wide = iter(struct.unpack_from(f"<{sum(v == _FULL for v in values)}Q", extra[: at + 4 + n], at + 4))
            return [next(wide) if value == _FULL else value for value in values]
        at += 4 + n
    return list(values)


def _crc_of_range(file: SourceFile, start: int, n: int) -> int:
    crc = 0
    for at in range(start, start + n, _PIECE):
        crc = zlib.crc32(read_exactly(file, at, min(_PIECE, start + n - at), "a record"), crc)
    return crc


def _crc_of_content(content: Content) -> int:
    crc = 0
    for part in content:
        crc = zlib.crc32(part, crc) if isinstance(part, bytes) else combine(crc, part.crc, nbytes(part))
    return crc


def _check_name(name: str) -> None:
    try:
        fits = len(name.encode()) <= 0xFFFF
    except UnicodeEncodeError:
        fits = False
    if not fits:
        raise UsageError(f"{name!a:.200}: a zip archive cannot have a record of this name")


def _size(body: Body) -> int:
    return len(body) if isinstance(body, bytes) else nbytes(body)


def _local_header(record: Record) -> bytes:
    """The header before a record's data, padded so that the data is aligned."""
    name = record.name.encode()
    is_zip64 = record.nbytes >= _FULL
    extra = struct.pack("<2H2Q", 1, 16, record.nbytes, record.nbytes) if is_zip64 else b""
    pad = -(record.offset + _LOCAL.size + len(name) + len(extra) + 4) % ALIGNMENT
    extra += struct.pack("<2sH", b"FB", pad) + b"Z" * pad
    size = min(record.nbytes, _FULL)
    fields = (_version_needed(is_zip64), _UTF8, 0, 0, 0, record.crc, size, size, len(name), len(extra))
    return _LOCAL.pack(b"PK\x03\x04", *fields) + name + extra


def _directory_entry(record: Record) -> bytes:
    """The record in the central directory; sizes and offsets of 4 GiB and more are in the zip64 field."""
    name = record.name.encode()
    long = [record.nbytes, record.nbytes] if record.nbytes >= _FULL else []
    long += [record.offset] if record.offset >= _FULL else []
    extra = struct.pack(f"<2H{len(long)}Q", 1, 8 * len(long), *long) if long else b""
    size = min(record.nbytes, _FULL)
    fields = (0, _version_needed(bool(long)), _UTF8, 0, 0, 0, record.crc, size, size, len(name), len(extra))
    return _ENTRY.pack(b"PK\x01\x02", *fields, 0, 0, 0, 0, min(record.offset, _FULL)) + name + extra


def _version_needed(is_zip64: bool) -> int:
    """Version of the zip specification that a reader needs."""
    return 45 if is_zip64 else 20


def _end_records(n: int, size: int, offset: int) -> bytes:
    """The three end records of a central directory with *n* entries."""
    end64 = _END64.pack(b"PK\x06\x06", _END64.size - 12, 45, 45, 0, 0, n, n, size, offset)
    locator = _END64_LOCATOR.pack(b"PK\x06\x07", 0, offset + size, 1)
    short = min(n, 0xFFFF)
    return end64 + locator + _END.pack(b"PK\x05\x06", 0, 0, short, short, min(size, _FULL), min(offset, _FULL), 0)
