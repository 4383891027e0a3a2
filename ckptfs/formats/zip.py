"""Zip archives of stored records, as ``torch.save`` writes them.

The directory at the archive's end is read here and not by `zipfile`: every size and offset is checked against the
file first, 100,000 records take a fraction of a second, and no record is ever decompressed. CRCs are not checked,
as torch does not either.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass

from ckptfs.errors import CorruptHeader
from ckptfs.formats.files import SourceFile, read_exactly

MAX_RECORDS = 1_000_000
MAX_DIRECTORY = 256 << 20
"""Bytes of the central directory."""
_END = struct.Struct("<4s4H2LH")
_END64_LOCATOR = struct.Struct("<4sLQL")
_END64 = struct.Struct("<4sQ2H2L4Q")
_ENTRY = struct.Struct("<4s6H3L5H2L")
_LOCAL = struct.Struct("<4s5H3L2H")
_FULL = 0xFFFFFFFF


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
    """A zip's directory. *end* is where it begins: all data lies before."""

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
        record, at = _entry(file, data, at, start)
        if record.name in records:
            raise CorruptHeader(file.path, f"the zip directory has {record.name[:200]!r} twice")
        records[record.name] = record
    return Archive(file, records, start)


def data_offset(archive: Archive, record: Record) -> int:
    """Position of a record's data, which is checked to lie before the directory and to be stored as it is."""
    file = archive.file
    name = record.name.encode()
    head = read_exactly(file, record.offset, _LOCAL.size + len(name), f"the zip header of {record.name}")
    magic, *_, n_name, n_extra = _LOCAL.unpack_from(head)
    if magic != b"PK\x03\x04" or n_name != len(name) or head[_LOCAL.size :] != name:
        raise CorruptHeader(file.path, f"no zip header of {record.name} at byte {record.offset}")
    start: int = record.offset + _LOCAL.size + n_name + n_extra
    if not record.stored:
        raise CorruptHeader(file.path, f"{record.name} is compressed or encrypted, which torch never does")
    if start + record.nbytes > archive.end:
        what = f"{record.nbytes} bytes at byte {start} reach past the archive's data (which ends at {archive.end})"
        raise CorruptHeader(file.path, f"{record.name}: {what}")
    return start


def _find_directory(file: SourceFile) -> tuple[int, int, int, int]:
    """(records, size, offset) of the central directory, and where the end record that says so begins."""
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


def _entry(file: SourceFile, data: bytes, at: int, end: int) -> tuple[Record, int]:
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
        raise CorruptHeader(file.path, f"{name[:200]}: {nbytes} bytes at byte {offset} do not lie in the archive")
    return Record(name, offset, nbytes, method == 0 and packed == nbytes and not flags & 1, crc), after


def _zip64(extra: bytes, *values: int) -> list[int]:
    """The values with those that are saturated taken from the zip64 field (id 1), where they stand in order."""
    at = 0
    while at + 4 <= len(extra):
        kind, n = struct.unpack_from("<2H", extra, at)
        if kind == 1:
            wide = iter(struct.unpack_from(f"<{sum(v == _FULL for v in values)}Q", extra[: at + 4 + n], at + 4))
            return [next(wide) if value == _FULL else value for value in values]
        at += 4 + n
    return list(values)


def read_content(archive: Archive, name: str, limit: int) -> bytes:
    record = archive.records[name]
    if record.nbytes > limit:
        raise CorruptHeader(archive.file.path, f"{name} has {record.nbytes} bytes, more than {limit}")
    return read_exactly(archive.file, data_offset(archive, record), record.nbytes, name)


def read_text(archive: Archive, name: str) -> str | None:
    """A small record as text without the line's end; None when there is none."""
    if name not in archive.records:
        return None
    return read_content(archive, name, 100).decode("latin-1").strip()
