"""Checkpoints too large to be written with h5py: the same HDF5 structures, emitted directly.

h5py needs a time that is quadratic in the number of root attributes (one per key), and 140 GB of weights would not fit
on a disk. Here attributes are written one after the other, and all chunks of a tensor may lie at the same place: the
key set, shapes, chunk shapes and chunk tables are those of the real thing, the bytes behind them repeat.

Superblock 0, a symbol-table root group, object headers 1 with continuation blocks, texts in global heaps; after
"HDF5 File Format Specification Version 3.0", in the form that libhdf5 1.14 writes by default.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any, BinaryIO

import numpy as np

from benchmarks.state import FORMAT_VERSION, RELEASE, RTFX, TORCH, Stored, flatten, metadata_text, spec_text

UNDEFINED = (1 << 64) - 1
HEAP_NBYTES = 4096
ATTRIBUTES_PER_BLOCK = 18
"""Root attributes in one continuation block: 1504 attributes of a real file lie in 84 blocks."""
_LZ4 = 32004
_LZ4_NAME = b"HDF5 lz4 filter; see http://www.hdfgroup.org/services/contributions.html"


@dataclass(slots=True)
class Emitter:
    """A file that only grows; addresses are multiples of 8."""

    file: BinaryIO
    at: int = 0
    heap: list[bytes] = field(default_factory=list)
    heap_nbytes: int = 0
    references: list[tuple[bytearray, int, int, int]] = field(default_factory=list)
    """Places in messages that wait for the address of the open heap: (message, offset, text length, index)."""

    def put(self, data: bytes | memoryview) -> int:
        """Append; the address of *data*."""
        at = self.at
        self.file.write(data)
        self.file.write(bytes(-len(data) % 8))
        self.at += len(data) + -len(data) % 8
        return at

    def text(self, message: bytearray, offset: int, text: str) -> None:
        """Keep *text* in a global heap and, once that has an address, write the reference into *message*."""
        data = text.encode()
        n = 16 + len(data) + -len(data) % 8
        if self.heap and self.heap_nbytes + n > HEAP_NBYTES - 32:
            self.close_heap()
        self.heap.append(data)
        self.heap_nbytes += n
        self.references.append((message, offset, len(data), len(self.heap)))

    def close_heap(self) -> None:
        """Write the open heap and settle what refers to it."""
        if not self.heap:
            return
        objects = [_padded(struct.pack("<HHIQ", i, 1, 0, len(d)) + d) for i, d in enumerate(self.heap, 1)]
        body = b"".join(objects)
        size = max(HEAP_NBYTES, 16 + len(body) + 16)
        free = struct.pack("<HHIQ", 0, 0, 0, size - 16 - len(body))
        address = self.put((b"GCOL" + struct.pack("<B3xQ", 1, size) + body + free).ljust(size, b"\0"))
        for message, offset, n, index in self.references:
            struct.pack_into("<IQI", message, offset, n, address, index)
        self.heap, self.heap_nbytes, self.references = [], 0, []


def emit_checkpoint(path: str, state: dict[str, Any], chunks: dict[str, bytes]) -> int:
    """Write *state* to *path*; the number of keys.

    *chunks* has, by the start of a key, the bytes that fill the chunks of such tensors: ``b""`` for chunks that were
    never written, else a pattern that is repeated; all chunks of a tensor lie at one place in the file.
    """
    leaves = list(flatten(state))
    with open(path, "wb") as file:
        out = Emitter(file)
        out.put(bytes(96))
        datasets = _datasets(out, leaves, chunks)
        tree, heap = _group(out, datasets)
        root = _root_header(out, state, leaves, tree, heap)
        end = out.at
        file.seek(0)
        file.write(_superblock(root, tree, heap, end))
    return len(leaves)


def _superblock(root: int, tree: int, heap: int, end: int) -> bytes:
    head = b"\x89HDF\r\n\x1a\n" + bytes([0, 0, 0, 0, 0, 8, 8, 0]) + struct.pack("<HHI", 4, 16, 0)
    return head + struct.pack("<4Q", 0, UNDEFINED, end, UNDEFINED) + struct.pack("<QQI4xQQ", 0, root, 1, tree, heap)


def _root_header(out: Emitter, state: dict[str, Any], leaves: list[tuple[str, Any]], tree: int, heap: int) -> int:
    """The root's object header: its first block, then a chain of blocks with the attributes."""
    messages: list[tuple[int, bytes | bytearray]] = [
        _text_attribute(out, "__spec__", spec_text(state)),
        _attribute("__version__", FLOAT64, (), struct.pack("<d", FORMAT_VERSION)),
        _text_attribute(out, "__cstorch_version__", RELEASE),
        *(_text_attribute(out, f"{key}.__metadata__", metadata_text(key, leaf)) for key, leaf in leaves),
        _attribute("__SUCCESS__", BOOL, (), b"\1"),
    ]
    out.close_heap()
    blocks = [messages[i : i + ATTRIBUTES_PER_BLOCK] for i in range(0, len(messages), ATTRIBUTES_PER_BLOCK)]
    following: bytes = b""
    for block in reversed(blocks):  # each block ends with the address of the next
        body = b"".join(map(_message_of, block)) + following
        following = _message(0x10, struct.pack("<QQ", out.put(body), len(body)))
    first = _message(0x11, struct.pack("<QQ", tree, heap)) + following
    # The count has 16 bits in the format; readers go by the blocks.
    return _header(out, min(len(messages) + len(blocks) + 1, 0xFFFF), first)


def _datasets(out: Emitter, leaves: list[tuple[str, Any]], chunks: dict[str, bytes]) -> dict[str, int]:
    """Write all datasets; key to the address of the object header."""
    pending: dict[str, list[Any]] = {}
    for key, leaf in leaves:
        if isinstance(leaf, Stored):
            pattern = next((p for start, p in chunks.items() if key.startswith(start)), b"")
            pending[key] = _dataset_messages(out, leaf, pattern)
    out.close_heap()
    return {k: _header(out, len(found), b"".join(map(_message_of, found))) for k, found in pending.items()}


def _dataset_messages(out: Emitter, leaf: Stored, pattern: bytes) -> list[Any]:
    """(type, body) of each message of a dataset's header."""
    kind = {"int64": INT64, "float32": FLOAT32, "bfloat16": INT16}[leaf.dtype]
    size = leaf.nbytes // max(1, int(np.prod(leaf.shape)))
    head = [(0x01, _dataspace(leaf.shape)), (0x03, kind)]
    if not leaf.shape:
        layout = struct.pack("<BBQQ", 3, 1, out.put(bytes(size)), size)
        body = [(0x05, struct.pack("<4BI", 2, 2, 2, 1, 0)), (0x08, layout)]
    else:
        chunk = chunk_shape(leaf.shape, size)
        tree = _chunk_tree(out, leaf.shape, chunk, size, pattern) if pattern else UNDEFINED
        layout = struct.pack("<BBBQ", 3, 2, len(chunk) + 1, tree) + struct.pack(f"<{len(chunk) + 1}I", *chunk, size)
        body = [(0x05, struct.pack("<4BI", 2, 3, 2, 1, 0)), (0x0B, _filters()), (0x08, layout)]
    shapes = struct.pack(f"<{len(leaf.shape)}Q", *leaf.shape)
    attributes = [
        _attribute("__TORCH__", BOOL, (), b"\1"),
        _attribute("shapes", INT64 if leaf.shape else FLOAT64, (1, len(leaf.shape)), shapes),
        _text_attribute(out, "dtypes", f"torch.{leaf.dtype}", (1,)),
        _attribute("rtfx_dtypes", INT64, (1,), struct.pack("<q", RTFX[leaf.dtype])),
        _text_attribute(out, "__TYPE__", TORCH),
        _attribute("__NUMPY__", BOOL, (), b"\1"),
        _attribute("compressed", BOOL, (), b"\0"),
    ]
    return [*head, *body, *attributes]


def chunk_shape(shape: tuple[int, ...], size: int) -> tuple[int, ...]:
    """h5py's own choice of a chunk shape."""
    from h5py._hl.filters import guess_chunk

    found: tuple[int, ...] = guess_chunk(shape, None, size)
    return found


def _chunk_tree(out: Emitter, shape: tuple[int, ...], chunk: tuple[int, ...], size: int, pattern: bytes) -> int:
    """One chunk, and a B-tree that has it at every place of the grid; the address of the tree's root."""
    data = lz4_chunk(pattern, int(np.prod(chunk)) * size)
    where = out.put(data)
    grid = [-(-n // c) for n, c in zip(shape, chunk, strict=True)]
    offsets = np.indices(grid, np.uint64).reshape(len(grid), -1).T * np.array(chunk, np.uint64)
    keys = np.zeros(len(offsets) + 1, [("nbytes", "<u4"), ("mask", "<u4"), ("at", "<u8", (len(chunk) + 1,))])
    keys["nbytes"][:-1] = len(data)
    keys["at"][:-1, :-1] = offsets
    keys["at"][-1, :-1] = np.array(grid, np.uint64) * np.array(chunk, np.uint64)
    keys["at"][-1, -1] = size
    return _tree(out, 1, [keys[i].tobytes() for i in range(len(keys))], [where] * len(offsets), 64)


def lz4_chunk(pattern: bytes, nbytes: int) -> bytes:
    """A chunk of *nbytes* of repeated *pattern* as HDF5's LZ4 filter stores it."""
    import lz4.block

    data = (pattern * (nbytes // len(pattern) + 1))[:nbytes]
    packed = lz4.block.compress(data, store_size=False)
    packed = packed if len(packed) < nbytes else data
    return struct.pack(">QII", nbytes, nbytes, len(packed)) + packed


def _group(out: Emitter, members: dict[str, int]) -> tuple[int, int]:
    """A symbol table; the addresses of its B-tree and of its local heap."""
    names = sorted(members, key=str.encode)
    data, places = bytearray(8), []
    for name in names:
        places.append(len(data))
        data += _padded(name.encode() + b"\0")
    segment = out.put(bytes(data))
    heap = out.put(b"HEAP" + struct.pack("<B3x3Q", 0, len(data), 1, segment))
    nodes, keys = [], [bytes(8)]
    for i in range(0, len(names), 8):
        entries = [struct.pack("<QQ24x", places[j], members[names[j]]) for j in range(i, min(i + 8, len(names)))]
        nodes.append(out.put((b"SNOD" + struct.pack("<BxH", 1, len(entries)) + b"".join(entries)).ljust(328, b"\0")))
        keys.append(struct.pack("<Q", places[min(i + 8, len(names)) - 1]))
    return _tree(out, 0, keys, nodes, 32), heap


def _tree(out: Emitter, kind: int, keys: list[bytes], children: list[int], width: int) -> int:
    """A version 1 B-tree over *children*, between *keys*; the address of its root."""
    level = 0
    while True:
        spans = [(i, min(i + width, len(children))) for i in range(0, max(1, len(children)), width)]
        nbytes = 24 + 8 * width + len(keys[0]) * (width + 1)
        nbytes += -nbytes % 8
        first, above = out.at, []
        for i, (start, stop) in enumerate(spans):
            left = first + (i - 1) * nbytes if i else UNDEFINED
            right = first + (i + 1) * nbytes if i + 1 < len(spans) else UNDEFINED
            head = b"TREE" + struct.pack("<BBHQQ", kind, level, stop - start, left, right)
            pairs = b"".join(keys[j] + struct.pack("<Q", children[j]) for j in range(start, stop))
            above.append(out.put((head + pairs + keys[stop]).ljust(nbytes, b"\0")))
        if len(above) == 1:
            return above[0]
        keys = [keys[start] for start, _ in spans] + [keys[-1]]
        children, level = above, level + 1


def _header(out: Emitter, n_messages: int, block: bytes) -> int:
    return out.put(struct.pack("<BxHII4x", 1, n_messages, 1, len(block)) + block)


def _message_of(message: tuple[int, bytes | bytearray]) -> bytes:
    return _message(*message)


def _message(kind: int, body: bytes | bytearray) -> bytes:
    data = _padded(body)
    return struct.pack("<HHB3x", kind, len(data), 0) + data


def _attribute(name: str, kind: bytes, shape: tuple[int, ...], value: bytes) -> tuple[int, bytearray]:
    title, space = name.encode() + b"\0", _dataspace(shape)
    head = struct.pack("<BxHHH", 1, len(title), len(kind), len(space))
    return 0x0C, bytearray(head + _padded(title) + _padded(kind) + _padded(space) + value)


def _text_attribute(out: Emitter, name: str, text: str, shape: tuple[int, ...] = ()) -> tuple[int, bytearray]:
    kind, body = _attribute(name, TEXT, shape, bytes(16))
    out.text(body, len(body) - 16, text)
    return kind, body


def _dataspace(shape: Iterable[int]) -> bytes:
    dims = tuple(shape)
    return struct.pack("<BBB5x", 1, len(dims), 0) + struct.pack(f"<{len(dims)}Q", *dims)


def _filters() -> bytes:
    name = _padded(_LZ4_NAME + b"\0")
    return struct.pack("<BB6x", 1, 1) + struct.pack("<4H", _LZ4, len(name), 1, 1) + name + struct.pack("<II", 0, 0)


def _padded(data: bytes | bytearray) -> bytes:
    return bytes(data) + bytes(-len(data) % 8)


def _integer(size: int) -> bytes:
    return struct.pack("<4BIHH", 0x10, 8, 0, 0, size, 0, 8 * size)


INT16, INT64 = _integer(2), _integer(8)
FLOAT32 = struct.pack("<4BIHH4BI", 0x11, 0x20, 31, 0, 4, 0, 32, 23, 8, 0, 23, 127)
FLOAT64 = struct.pack("<4BIHH4BI", 0x11, 0x20, 63, 0, 8, 0, 64, 52, 11, 0, 52, 1023)
TEXT = struct.pack("<4BI", 0x19, 1, 1, 0, 16) + struct.pack("<4BI", 0x13, 0x10, 0, 0, 1)
BOOL = struct.pack("<4BI", 0x18, 2, 0, 0, 1) + _integer(1) + b"FALSE\0\0\0TRUE\0\0\0\0\0\1"
