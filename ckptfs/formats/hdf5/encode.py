"""The HDF5 structures that a Cerebras checkpoint is made of, as bytes.

They are those of the real writer (h5py's defaults): superblock 0, symbol-table groups, object headers 1, text in
global heaps. No checksums, nothing that depends on tensor data. Source: "HDF5 File Format Specification Version 3.0".
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from ckptfs.formats.hdf5.superblock import SIGNATURE
from ckptfs.tensors.dtypes import DType

UNDEFINED = (1 << 64) - 1
"""The address of what was never allocated."""
SUPERBLOCK_BYTES = 96
MAX_ATTRIBUTE = 65_000
"""Bytes of an attribute's name and value; a message ends at 64 KiB."""
_MAX_COUNT = 0xFFFF
_LEAF_ENTRIES = 8
_NODE_CHILDREN = 32
_HEAP_BLOCK = 64 << 10
_MIN_HEAP_BLOCK = 4096  # libhdf5 refuses smaller ones
_CONTINUATION = 64 << 10

Link = tuple[bytes, int, tuple[int, int] | None]
"""(name, address of the object header, (B-tree, local heap) of a group or None)."""


def superblock(size: int, root: int, tree: int, heap: int) -> bytes:
    """Version 0: *size* of the file, address of the *root* group's header, its B-tree and local heap."""
    head = SIGNATURE + bytes(5) + b"\x08\x08\0"
    head += struct.pack("<HHI", _LEAF_ENTRIES // 2, _NODE_CHILDREN // 2, 0)
    head += struct.pack("<QQQQ", 0, UNDEFINED, size, UNDEFINED)
    return head + struct.pack("<QQIIQQ", 0, root, 1, 0, tree, heap)


def message(kind: int, body: bytes, *, constant: bool = False) -> bytes:
    """One message of an object header of version 1."""
    return struct.pack("<HHB3x", kind, len(body) + -len(body) % 8, constant) + _padded(body)


def object_header(body: bytes, n_messages: int) -> bytes:
    """The header's first block. *n_messages* counts those of continuation blocks as well.

    The field has 16 bits; libhdf5 reads the messages that are there, whatever it says.
    """
    return struct.pack("<BxHII4x", 1, min(n_messages, _MAX_COUNT), 1, len(body)) + body


def continued_header(first: bytes, messages: Sequence[bytes], at: int) -> tuple[bytes, int]:
    """(bytes, address of the header): *first* in an object header at the end, *messages* in blocks before it, at *at*.

    One block of hundreds of KiB would be read again for each dataset that libhdf5 opens, so blocks are bounded.
    """
    data = bytearray()
    blocks = []
    for block in _blocks(messages):
        blocks.append(message(0x10, struct.pack("<QQ", at + len(data), len(block))))
        data += block
    address = at + len(data)
    data += object_header(first + b"".join(blocks), 1 + len(blocks) + len(messages))
    return bytes(data), address


def _blocks(messages: Sequence[bytes]) -> Iterable[bytes]:
    block = bytearray()
    for one in messages:
        if block and len(block) + len(one) > _CONTINUATION:
            yield bytes(block)
            block.clear()
        block += one
    if block:
        yield bytes(block)


def dataspace(shape: Sequence[int]) -> bytes:
    """Version 1, with the maximal sizes equal to the present ones; a scalar for ()."""
    sizes = struct.pack(f"<{len(shape)}Q", *shape)
    return struct.pack("<BBB5x", 1, len(shape), 1 if shape else 0) + sizes * 2


def datatype(dtype: DType) -> bytes:
    """The element type in which the real writer stores *dtype*: bfloat16 as int16, bool as an enum over int8."""
    kind, size = dtype.hdf5[1], dtype.itemsize
    if kind == "b":
        return BOOL
    if kind in "iu":
        return struct.pack("<BBxxIHH", 0x10, 0x08 if kind == "i" else 0, size, 0, 8 * size)
    if kind == "f":
        return _float(size)
    members = b"".join(
        name.ljust(8, b"\0") + struct.pack("<I28x", at) + _float(size // 2)
        for name, at in ((b"r", 0), (b"i", size // 2))
    )
    return struct.pack("<BHxI", 0x16, 2, size) + members


FILL_CONTIGUOUS = b"\2\2\2\1\0\0\0\0"
"""Fill value message: allocated late, written if set, zero."""
FILL_CHUNKED = b"\2\3\2\1\0\0\0\0"
"""The same, allocated chunk by chunk."""
_LZ4_NAME = b"HDF5 lz4 filter; see http://www.hdfgroup.org/services/contributions.html".ljust(80, b"\0")
LZ4_FILTER = struct.pack("<BB6xHHHH", 1, 1, 32004, len(_LZ4_NAME), 1, 1) + _LZ4_NAME + bytes(8)
"""Filter pipeline: LZ4, optional, with the client value 0 (one block a chunk)."""
BOOL = bytes.fromhex("1802000001000000 1008000001000000 00000800") + b"FALSE\0\0\0TRUE\0\0\0\0\0\1"
INT64 = struct.pack("<BBxxIHH", 0x10, 0x08, 8, 0, 64)
TEXT = bytes.fromhex("1901010010000000 1000000001000000 00000800")
"""Variable-length UTF-8 text."""


def _float(size: int) -> bytes:
    exponent = {2: 5, 4: 8, 8: 11}[size]
    mantissa = 8 * size - 1 - exponent
    head = struct.pack("<BBBxI", 0x11, 0x20, 8 * size - 1, size)
    return head + struct.pack("<HHBBBBI", 0, 8 * size, mantissa, exponent, 0, mantissa, (1 << (exponent - 1)) - 1)


FLOAT64 = _float(8)


def attribute(name: bytes, kind: bytes, shape: Sequence[int], value: bytes) -> bytes:
    """The message of an attribute (version 1); *name* and *value* together are at most `MAX_ATTRIBUTE` bytes."""
    space = dataspace(shape)
    head = struct.pack("<BxHHH", 1, len(name) + 1, len(kind), len(space))
    return message(0x0C, head + _padded(name + b"\0") + _padded(kind) + space + value)


def _padded(data: bytes) -> bytes:
    return data + bytes(-len(data) % 8)


@dataclass(slots=True)
class TextHeap:
    """Global heap collections that start at *address* (bytes) and grow by `add`.

    No object is shared: a program that deletes or rewrites an attribute frees its text.
    """

    address: int
    _done: list[bytes] = field(default_factory=list)
    _block: bytearray = field(default_factory=lambda: bytearray(16))
    _count: int = 0

    def add(self, text: str) -> bytes:
        """The 16 bytes that stand for *text* in an attribute."""
        data = text.encode()
        if not data:
            return bytes(16)
        room = 16 + len(data) + -len(data) % 8
        if self._count and (len(self._block) + room > _HEAP_BLOCK or self._count == _MAX_COUNT):
            self._close()
        self._count += 1
        self._block += struct.pack("<HH4xQ", self._count, 1, len(data)) + _padded(data)
        return struct.pack("<IQI", len(data), self.address, self._count)

    def finish(self) -> list[bytes]:
        """All collections; nothing can be added any more."""
        if self._count:
            self._close()
        return self._done

    def _close(self) -> None:
        free = _MIN_HEAP_BLOCK - len(self._block)
        if free >= 16:
            self._block += struct.pack("<HH4xQ", 0, 0, free)
        self._block += bytes(max(0, _MIN_HEAP_BLOCK - len(self._block)))
        self._block[:16] = struct.pack("<4sB3xQ", b"GCOL", 1, len(self._block))
        self._done.append(bytes(self._block))
        self.address += len(self._block)
        self._block, self._count = bytearray(16), 0


def group(links: Sequence[Link], at: int) -> tuple[bytes, int, int]:
    """(bytes, address of the B-tree, of the local heap) of a symbol-table group laid at *at*.

    *links* are sorted by name (bytes): libhdf5 finds names by bisection.
    """
    offsets, names = [0], bytearray(8)
    for name, _, _ in links:
        offsets.append(len(names))
        names += _padded(name + b"\0")
    data = bytearray(struct.pack("<4s4xQQQ", b"HEAP", len(names), 1, at + 32) + names)
    level: list[tuple[int, int]] = []  # (address, number of the last link below)
    for start in range(0, len(links), _LEAF_ENTRIES):
        stop = min(start + _LEAF_ENTRIES, len(links))
        level.append((at + len(data), stop))
        data += _symbol_node(links[start:stop], offsets[start + 1 : stop + 1])
    depth = 0
    while True:
        first, firsts = 0, at + len(data)
        groups = [level[i : i + _NODE_CHILDREN] for i in range(0, len(level), _NODE_CHILDREN)] or [[]]
        above = []
        for i, children in enumerate(groups):
            above.append((at + len(data), children[-1][1] if children else 0))
            keys = [offsets[first], *(offsets[last] for _, last in children)]
            data += _tree_node(depth, firsts, i, len(groups), keys, [where for where, _ in children])
            first = above[-1][1]
        level, depth = above, depth + 1
        if len(level) == 1:
            return bytes(data), level[0][0], at


def _symbol_node(links: Sequence[Link], offsets: Sequence[int]) -> bytes:
    entries = (
        struct.pack("<QQI4xQQ", offset, where, 1 if cached else 0, *(cached or (0, 0)))
        for (_, where, cached), offset in zip(links, offsets, strict=True)
    )
    node = struct.pack("<4sBxH", b"SNOD", 1, len(links)) + b"".join(entries)
    return node.ljust(8 + 40 * _LEAF_ENTRIES, b"\0")


_TREE_NODE = 24 + 8 * _NODE_CHILDREN + 8 * (_NODE_CHILDREN + 1)


def _tree_node(depth: int, firsts: int, i: int, n: int, keys: Sequence[int], children: Sequence[int]) -> bytes:
    """Node *i* of the *n* nodes of one level, which start at the address *firsts*."""
    left = firsts + (i - 1) * _TREE_NODE if i else UNDEFINED
    right = firsts + (i + 1) * _TREE_NODE if i + 1 < n else UNDEFINED
    body = b"".join(struct.pack("<QQ", key, child) for key, child in zip(keys, children, strict=False))
    node = struct.pack("<4sBBHQQ", b"TREE", 0, depth, len(children), left, right) + body
    return (node + struct.pack("<Q", keys[-1])).ljust(_TREE_NODE, b"\0")
