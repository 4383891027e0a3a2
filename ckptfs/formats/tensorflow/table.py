"""The sorted table that an index is: LevelDB's format, read and written.

=====================  =======================================================================================
part                   content
=====================  =======================================================================================
data blocks            entries in the order of their keys
metaindex block        empty
index block            for each data block: its last key (or a later one) and its handle
footer, 48 bytes       handles of the metaindex and the index block, zeros, ``57 fb 80 8b 24 75 47 db``
=====================  =======================================================================================

A handle is two varints: offset and size. A block is its entries, the positions of those that stand alone (u32 each),
their number (u32), a byte for the compression (0: none), and the masked CRC-32C of all that (u32). An entry is three
varints (bytes shared with the key before, other bytes of the key, bytes of the value), the rest of the key, the value.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np

from ckptfs.errors import CorruptHeader, MissingCodec
from ckptfs.formats.extents import ExtentFile, file_of
from ckptfs.formats.files import read_exactly
from ckptfs.formats.tensorflow.checksum import Summed, crc32c, masked
from ckptfs.formats.tensorflow.wire import Wire, varint
from ckptfs.tensors.dtypes import DTYPES, DType
from ckptfs.tensors.source_file import SourceFile
from ckptfs.tensors.tensor import Elements, Shape

MAGIC = bytes.fromhex("57fb808b247547db")
FOOTER_NBYTES = 48
MAX_TABLE = 256 << 20
"""Bytes of an index; 100,000 variables take about 8 MB."""
MAX_ENTRIES = 1_000_000
MAX_KEY = 16 << 10
MAX_KEYS_NBYTES = 256 << 20
"""Bytes of all keys: a key may repeat the one before in two bytes."""
BLOCK = 4096
"""Bytes after which a new block begins. Small ones: a reader waits for the checksums of one block's variables."""
_TRAILER = 5
_RESTART = 16


def is_table(file: SourceFile) -> bool:
    """Whether *file* ends as a sorted table does."""
    if file.size < FOOTER_NBYTES:
        return False
    return read_exactly(file, file.size - len(MAGIC), len(MAGIC), "the end of the file") == MAGIC


def read_table(file: SourceFile) -> Iterator[tuple[bytes, bytes]]:
    """(key, value) of each entry. Raises `CorruptHeader` for what is damaged, `MissingCodec` for compressed blocks."""
    if file.size > MAX_TABLE:
        raise CorruptHeader(file.path, f"the index has {file.size} bytes, more than {MAX_TABLE}")
    footer = Wire(read_exactly(file, file.size - FOOTER_NBYTES, FOOTER_NBYTES, "the footer"), file.path, "the footer")
    for _ in range(2):
        footer.varint()  # the metaindex block says nothing
    handle = footer.varint(), footer.varint()
    n, n_keys, last = 0, 0, None
    for _, value in _entries(file, handle):
        wire = Wire(value, file.path, "the handle of a block")
        for key, entry in _entries(file, (wire.varint(), wire.varint())):
            n, n_keys = n + 1, n_keys + len(key)
            if n > MAX_ENTRIES or n_keys > MAX_KEYS_NBYTES:
                raise CorruptHeader(file.path, f"the index has more than {MAX_ENTRIES} variables, or endless names")
            if last is not None and key <= last:
                raise CorruptHeader(file.path, f"the index is not in order: {key!r:.100} follows {last!r:.100}")
            last = key
            yield key, entry


def _entries(file: SourceFile, handle: tuple[int, int]) -> Iterator[tuple[bytes, bytes]]:
    data = _block(file, *handle)
    if len(data) < 4 or (n := struct.unpack_from("<I", data, len(data) - 4)[0]) * 4 + 4 > len(data):
        raise CorruptHeader(file.path, f"the block at byte {handle[0]} has no restart points")
    wire = Wire(data[: len(data) - 4 - 4 * n], file.path, f"the block at byte {handle[0]}")
    key = b""
    while wire.left:
        shared, rest, size = wire.varint(), wire.varint(), wire.varint()
        if shared > len(key) or shared + rest > MAX_KEY:
            raise CorruptHeader(file.path, f"a name in the block at byte {handle[0]} is longer than it can be")
        key = key[:shared] + wire.take(rest)
        yield key, wire.take(size)


def _block(file: SourceFile, offset: int, size: int) -> bytes:
    data = read_exactly(file, offset, size + _TRAILER, f"the index block at byte {offset}")
    if masked(crc32c(data[:-4])) != struct.unpack("<I", data[-4:])[0]:
        what = f"the index is damaged: the checksum of its block at byte {offset} is wrong"
        raise CorruptHeader(file.path, f"{what}. Take another copy of the checkpoint")
    if data[size]:
        what = f"the index is compressed (type {data[size]}), which TensorFlow 2 does not write; save it anew there"
        raise MissingCodec(file.path, what)
    return data[:size]


@dataclass(frozen=True, slots=True)
class Entry:
    """An entry to write: *value* ends with the masked CRC-32C of *summed*, where there is one."""

    key: bytes
    value: bytes
    summed: Summed | None = None


def table_file(entries: Sequence[Entry]) -> ExtentFile:
    """The table of *entries*, which are in order. Their checksums are computed when their block is read."""
    bodies, handles, at = [], [], 0
    for part in _parts(entries):
        block = IndexBlock(*_encoded(part))
        bodies.append(block)
        handles.append(Entry(part[-1].key, varint(at) + varint(block.shape[0] - _TRAILER)))
        at += block.shape[0]
    rest, footer = b"", b""
    for block_of in ([], handles):
        data = _sealed(_encoded(block_of)[0])
        footer += varint(at + len(rest)) + varint(len(data) - _TRAILER)
        rest += data
    return file_of([*bodies, rest + footer.ljust(FOOTER_NBYTES - len(MAGIC), b"\0") + MAGIC])


def _parts(entries: Sequence[Entry]) -> Iterator[list[Entry]]:
    part: list[Entry] = []
    size = 0
    for entry in entries:
        part.append(entry)
        size += len(entry.key) + len(entry.value)
        if size >= BLOCK:
            yield part
            part, size = [], 0
    if part:
        yield part


def _encoded(entries: Sequence[Entry]) -> tuple[bytes, tuple[tuple[int, Summed], ...]]:
    """(block without its trailer, where checksums stand in it)."""
    data, restarts, sums, last = bytearray(), [], [], b""
    for i, entry in enumerate(entries):
        shared = 0
        if i % _RESTART:
            shared = next((j for j, (a, b) in enumerate(zip(last, entry.key, strict=False)) if a != b), len(last))
        else:
            restarts.append(len(data))
        data += varint(shared) + varint(len(entry.key) - shared) + varint(len(entry.value))
        data += entry.key[shared:] + entry.value
        if entry.summed is not None:
            sums.append((len(data) - 4, entry.summed))
        last = entry.key
    restarts = restarts or [0]
    return bytes(data) + struct.pack(f"<{len(restarts) + 1}I", *restarts, len(restarts)), tuple(sums)


def _sealed(block: bytes) -> bytes:
    data = block + b"\0"
    return data + struct.pack("<I", masked(crc32c(data)))


@dataclass(frozen=True, slots=True, eq=False)
class IndexBlock:
    """The bytes of a block: a uint8 tensor. Reading it waits for the checksums of its variables, and no others."""

    data: bytes
    sums: tuple[tuple[int, Summed], ...]
    _made: list[bytes] = field(default_factory=list, init=False, repr=False)

    @property
    def dtype(self) -> DType:
        return DTYPES["uint8"]

    @property
    def shape(self) -> Shape:
        return (len(self.data) + _TRAILER,)

    @property
    def preferred_block(self) -> tuple[int, int]:
        return (1, 1)

    def read_block(self, row: int, col: int, out: Elements) -> None:
        if not self._made:
            data = bytearray(self.data)
            for at, summed in self.sums:
                struct.pack_into("<I", data, at, masked(summed.crc()))
            self._made.append(_sealed(bytes(data)))
        out[:, 0] = np.frombuffer(self._made[0], np.uint8)[row : row + len(out)]
