"""Metadata of an HDF5 file by address: pages, the superblock and the global heaps.

Nothing is read before its place is checked against the file's size. Standard library only.
"""

from __future__ import annotations

import os
import resource
import struct
from collections.abc import Iterable
from typing import Any

from ckptfs.errors import CorruptHeader
from ckptfs.formats.hdf5.messages import UNDEFINED, Unsupported
from ckptfs.native.prefetch import prefetch

SIGNATURE = b"\x89HDF\r\n\x1a\n"
MAX_BLOCK = 256 << 20
"""Largest single piece of metadata that is read, in bytes."""
_PAGE = 16 << 10
_MAX_PAGES = 256
_PAGES_AT_ONCE = 8
_MIN_TEXT = 1 << 20
_MAX_HEAPS = 4 << 20
"""Bytes of heaps that are remembered: texts of neighbouring datasets mostly lie in neighbouring heaps."""
_USUAL_HEAP = 4096
_USUAL_HEADER = 1024

_HEAP_OBJECT = struct.Struct("<H6xQ")


class MetadataFile:
    """An open file whose metadata are read through a bounded cache of pages. Addresses are relative to *base*."""

    def __init__(self, fd: int, path: str) -> None:
        self.fd, self.path = fd, path
        self.size = os.fstat(fd).st_size
        self.base = 0
        self.n_text = 0
        """Bytes of text that were read from heaps."""
        self.max_text = _MIN_TEXT + 4 * self.size
        self.types: dict[bytes, str] = {}
        """Names of datatypes by their messages."""
        self.decoded: dict[tuple[int, bytes], Any] = {}
        """Decoded messages by type and body."""
        self._pages: dict[int, bytes] = {}
        self._next = -1
        self._loads = self._waits = 0
        self._is_far = False
        self._heaps: dict[int, tuple[bytes, dict[int, tuple[int, int]]]] = {}
        self._heap_bytes = 0

    def read(self, address: int, n: int) -> bytes:
        """*n* bytes at *address*; `CorruptHeader` when they are not all inside the file."""
        start = self.base + address
        if n > MAX_BLOCK or start + n > self.size:
            raise CorruptHeader(self.path, f"metadata at byte {start} reaches past the end of the file")
        page, at = divmod(start, _PAGE)
        if at + n <= _PAGE:
            data = (self._pages.get(page) or self._load(page))[at : at + n]
        elif n <= _PAGE:
            data = (self._pages.get(page) or self._load(page))[at:]
            data += (self._pages.get(page + 1) or self._load(page + 1))[: n - len(data)]
        else:
            data = os.pread(self.fd, n, start)
        if len(data) != n:
            raise CorruptHeader(self.path, f"metadata at byte {start} cannot be read: the file became shorter")
        return data

    def _load(self, page: int) -> bytes:
        """Read a page; several, when the one before it was the last to be read."""
        n = _PAGES_AT_ONCE if page == self._next and not self._is_far else 1
        self._next = page + n
        if len(self._pages) + n > _MAX_PAGES:
            self._pages.clear()
        self._loads += 1
        data = os.pread(self.fd, n * _PAGE, page * _PAGE)
        for i in range(n):
            self._pages[page + i] = data[i * _PAGE : (i + 1) * _PAGE]
        return self._pages[page]

    def prefetch(self, addresses: Iterable[int]) -> None:
        """Prefetch the metadata at *addresses*, once most reads had to wait: on a network each waits on its own."""
        if not self._is_far:
            waits = resource.getrusage(resource.RUSAGE_THREAD).ru_nvcsw
            loads, waited, self._loads, self._waits = self._loads, waits - self._waits, 0, waits
            self._is_far = waited > loads // 2 > 0
        if self._is_far:
            starts = [self.base + address for address in addresses]
            pages = {start // _PAGE for start in starts} | {(start + _USUAL_HEADER) // _PAGE for start in starts}
            prefetch(self.fd, (page * _PAGE for page in pages if page not in self._pages), _PAGE)

    def heap_object(self, address: int, index: int) -> tuple[bytes, int, int]:
        """(heap, start, size) of an object in the global heap collection at *address*."""
        try:
            heap, objects = self._heaps[address]
        except KeyError:
            heap, objects = self._read_heap(address)
        try:
            start, n = objects[index]
        except KeyError:
            raise CorruptHeader(self.path, f"text {index} of the heap at byte {address} does not exist") from None
        return heap, start, n

    def heap_object_range(self, address: int, index: int) -> tuple[int, int]:
        """(offset in the file, size) of that object."""
        _, start, n = self.heap_object(address, index)
        return self.base + address + start, n

    def _read_heap(self, address: int) -> tuple[bytes, dict[int, tuple[int, int]]]:
        if self._heap_bytes > _MAX_HEAPS:
            self._heaps.clear()
            self._heap_bytes = 0
        heap = self._heaps[address] = self._parse_heap(address)
        self._heap_bytes += len(heap[0])
        return heap

    def _parse_heap(self, address: int) -> tuple[bytes, dict[int, tuple[int, int]]]:
        data = self.read(address, max(16, min(_USUAL_HEAP, self.size - self.base - address)))
        size = int.from_bytes(data[8:16], "little")
        if data[:4] != b"GCOL" or size < 16:
            raise CorruptHeader(self.path, f"no heap of texts at byte {address}")
        if size > len(data):
            data = self.read(address, size)
        found, at = {}, 16
        while at + 16 <= size:
            index, n = _HEAP_OBJECT.unpack_from(data, at)
            if index == 0 or at + 16 + n > size:
                break
            found[index] = at + 16, n
            at += 16 + n + -n % 8
        return data, found


def text_of(file: MetadataFile, n: int, address: int, index: int) -> str:
    """The variable-length text of a reference: *n* bytes of an object in a global heap."""
    if n == 0 or address in (0, UNDEFINED):
        return ""
    data, start, size = file.heap_object(address, index)
    stop = start + (n if n < size else size)
    file.n_text += stop - start
    if file.n_text > file.max_text:  # no two texts share bytes, but hard links name them again
        raise CorruptHeader(file.path, "its attributes use the same texts over and over")
    return data[start:stop].decode(errors="surrogateescape")


def open_superblock(file: MetadataFile) -> int:
    """Find the superblock, set ``file.base``, check the end-of-file address; the root group's header address."""
    at = 0
    while os.pread(file.fd, 8, at) != SIGNATURE:
        at = max(512, 2 * at)
        if at >= file.size:
            raise CorruptHeader(file.path, "no HDF5 superblock")
    data = os.pread(file.fd, 96, at).ljust(96, b"\0")
    version = data[8]
    if version in (0, 1):
        sizes, at_base = data[13:15], 24 if version == 0 else 28
        base, _, stop = struct.unpack_from("<QQQ", data, at_base)
        (root,) = struct.unpack_from("<Q", data, at_base + 40)
    elif version in (2, 3):
        sizes = data[9:11]
        base, _, stop, root = struct.unpack_from("<QQQQ", data, 12)
    else:
        raise CorruptHeader(file.path, f"HDF5 superblock version {version} is not known")
    if sizes != b"\x08\x08":
        raise Unsupported("addresses are not 8 bytes long")
    # A superblock behind a user block whose base was not adjusted counts from where it was found, as in libhdf5.
    file.base = at
    stop += at - base if at >= base else 0
    if file.size < stop:
        raise CorruptHeader(file.path, f"truncated: {file.size} of {stop} bytes. Copy the file again")
    return int(root)
