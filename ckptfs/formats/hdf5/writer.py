"""New HDF5 files: datasets in groups, with attributes.

::

    superblock          96 bytes
    text                global heaps: the values of text attributes
    dataset headers     one a dataset, with its attributes
    groups              names of the datasets (local heap, symbol nodes, B-tree), nested ones first
    root header         attributes of the file, in blocks of 64 KiB
    data                datasets one after the other, in their order

`hdf5_file` lays data out whole and unfiltered (layout class contiguous): every size and offset is known before data
is read. `write_lz4_chunks` writes LZ4 chunks, whose sizes depend on their data: from front to back, after a gap for
the structures, each dataset's B-tree after its chunks, and the structures last. A file that was not finished has no
superblock.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache

from ckptfs.formats.extents import Body, ExtentFile, file_of
from ckptfs.formats.hdf5 import encode
from ckptfs.formats.hdf5.chunk_writer import Chunk, chunk_shape, chunk_tree, encoded_chunks
from ckptfs.tensors.dtypes import DType
from ckptfs.tensors.ranges import to_bytes
from ckptfs.tensors.tensor import Shape, Tensor, n_elements, nbytes

MAX_ATTRIBUTE_NAME = encode.MAX_ATTRIBUTE - 16
"""Bytes of the name of a text attribute."""
_PAGE = 4096
_LARGE = 64 << 10
"""Datasets of so many bytes start at a page, smaller ones at a multiple of 64."""

Path = tuple[bytes, ...]
"""The groups of a dataset, and its name."""
Write = Callable[[int, bytes], object]
"""Puts bytes at an offset of the file."""


@dataclass(frozen=True, slots=True)
class Attribute:
    """An attribute; *type* is an encoded element type, a text *value* lies in the heap."""

    name: bytes
    type: bytes
    shape: tuple[int, ...]
    value: bytes | str


@dataclass(frozen=True, slots=True, eq=False)
class DatasetKind:
    """What many datasets have in common. Compared by identity: use one object for all of them."""

    dtype: DType
    shape: Shape
    attributes: tuple[Attribute, ...]


@dataclass(frozen=True, slots=True)
class Dataset:
    """A dataset to write; *kind* has the dtype and shape of *tensor*."""

    path: Path
    tensor: Tensor
    kind: DatasetKind


def text_attribute(name: bytes, value: str, shape: tuple[int, ...] = ()) -> Attribute:
    """One text, a scalar or of a *shape* with one element."""
    return Attribute(name, encode.TEXT, shape, value)


def flag_attribute(name: bytes, value: bool) -> Attribute:
    """A boolean as h5py stores it: an enum."""
    return Attribute(name, encode.BOOL, (), b"\1" if value else b"\0")


def float_attribute(name: bytes, values: Sequence[float], shape: tuple[int, ...] = ()) -> Attribute:
    """Numbers as float64."""
    return Attribute(name, encode.FLOAT64, shape, struct.pack(f"<{len(values)}d", *values))


def int_attribute(name: bytes, values: Sequence[int], shape: tuple[int, ...] = ()) -> Attribute:
    """Numbers as int64."""
    return Attribute(name, encode.INT64, shape, struct.pack(f"<{len(values)}q", *values))


@dataclass(frozen=True, slots=True)
class Plan:
    """The structures of one file, complete but for the addresses of the data and the file's size."""

    tensors: list[Tensor]
    """Those of the datasets, in order."""
    end: int
    """Bytes of all structures: the data may start here."""
    _heap: list[bytes]
    _headers: _DatasetHeaders
    _groups: bytes
    _root: bytes
    _addresses: tuple[int, int, int]

    def structures(self, offsets: Iterable[int], size: int) -> list[bytes]:
        """Their bytes: *offsets* has the address of each tensor's data or B-tree, *size* is that of the whole file."""
        self._headers.place(offsets)
        first = encode.superblock(size, *self._addresses)
        return [first, *self._heap, bytes(self._headers.data), self._groups, self._root]


def plan_file(datasets: Sequence[Dataset], attributes: Iterable[Attribute], *, lz4: bool = False) -> Plan:
    """The structures of a file with these *datasets* and *attributes*; with *lz4*, those that have axes are chunked.

    Paths are distinct, and none is the beginning of another.
    """
    texts = encode.TextHeap(encode.SUPERBLOCK_BYTES)
    messages = [_attribute_message(attribute, texts) for attribute in attributes]
    headers = _DatasetHeaders(texts)
    for dataset in datasets:
        headers.add(dataset.kind, lz4)
    heap = texts.finish()
    at = encode.SUPERBLOCK_BYTES + sum(map(len, heap))
    addresses = {dataset.path: at + start for dataset, start in zip(datasets, headers.starts, strict=True)}
    groups, tree, names = _groups(addresses, at + len(headers.data))
    at += len(headers.data) + len(groups)
    root, address = encode.continued_header(_symbol_table_message(tree, names), messages, at)
    tensors = [dataset.tensor for dataset in datasets]
    return Plan(tensors, at + len(root), heap, headers, groups, root, (address, tree, names))


def hdf5_file(plan: Plan) -> ExtentFile:
    """The file of *plan*, which was made without LZ4."""
    offsets, size = _offsets(plan.tensors, plan.end)
    return file_of([*plan.structures(offsets, size), *_data(plan.end, offsets, plan.tensors)])


def write_lz4_chunks(plan: Plan, write: Write, *, progress: Callable[[int], object] | None = None) -> None:
    """Write the file of *plan*, which was made with LZ4; *progress* gets the decoded bytes of each tensor."""
    at = plan.end
    addresses = []
    for tensor in plan.tensors:
        address, at = _write_tensor(tensor, write, at)
        addresses.append(address)
        if progress is not None:
            progress(nbytes(tensor))
    offset = 0
    for part in plan.structures(addresses, at):
        write(offset, part)
        offset += len(part)


def _write_tensor(tensor: Tensor, write: Write, at: int) -> tuple[int, int]:
    """(address for its layout message, end) of the data written at *at*."""
    if not nbytes(tensor):
        return encode.UNDEFINED, at
    if not tensor.shape:
        write(at, to_bytes(tensor))
        return at, at + tensor.dtype.itemsize
    chunk = chunk_shape(tensor.shape, tensor.dtype.itemsize)
    chunks: list[Chunk] = []
    for offsets, data in encoded_chunks(tensor, chunk):
        write(at, data)
        chunks.append((offsets, at, len(data)))
        at += len(data)
    tree, root = chunk_tree(chunks, chunk, tensor.dtype.itemsize, at)
    write(at, tree)
    return root, at + len(tree)


def _attribute_message(attribute: Attribute, texts: encode.TextHeap) -> bytes:
    value = attribute.value
    stored = texts.add(value) if isinstance(value, str) else value
    return encode.attribute(attribute.name, attribute.type, attribute.shape, stored)


def _symbol_table_message(tree: int, names: int) -> bytes:
    """Where a group's B-tree and local heap are."""
    return encode.message(0x11, struct.pack("<QQ", tree, names))


@dataclass(slots=True)
class _DatasetHeaders:
    """Object headers laid end to end; the addresses of the data are set last, when they are known."""

    texts: encode.TextHeap
    data: bytearray = field(default_factory=bytearray)
    starts: list[int] = field(default_factory=list)
    layouts: list[int] = field(default_factory=list)

    def add(self, kind: DatasetKind, lz4: bool) -> None:
        template = _template(kind, lz4)
        start = len(self.data)
        self.starts.append(start)
        self.layouts.append(start + template.layout)
        self.data += template.header
        for at, text in template.texts:
            self.data[start + at : start + at + 16] = self.texts.add(text)

    def place(self, offsets: Iterable[int]) -> None:
        """Set the address of each dataset's data."""
        for at, offset in zip(self.layouts, offsets, strict=True):
            struct.pack_into("<Q", self.data, at, offset)


@dataclass(frozen=True, slots=True)
class _HeaderTemplate:
    """The object header of all datasets of one kind, and where they differ."""

    header: bytes
    layout: int
    """Where the address of the data stands."""
    texts: tuple[tuple[int, str], ...]
    """Where references to texts stand."""


@lru_cache(maxsize=1024)
def _template(kind: DatasetKind, lz4: bool) -> _HeaderTemplate:
    messages = [
        encode.message(0x01, encode.dataspace(kind.shape)),
        encode.message(0x03, encode.datatype(kind.dtype), constant=True),
        *_fill_and_filter(kind, lz4),
    ]
    head, rest = _layout(kind, lz4)
    layout = 16 + sum(map(len, messages)) + 8 + len(head)
    messages.append(encode.message(0x08, head + struct.pack("<Q", encode.UNDEFINED) + rest))
    texts = []
    at = 16 + sum(map(len, messages))
    for a in kind.attributes:
        messages.append(encode.attribute(a.name, a.type, a.shape, bytes(16) if isinstance(a.value, str) else a.value))
        at += len(messages[-1])
        if isinstance(a.value, str):
            texts.append((at - 16, a.value))  # 16 bytes need no padding: they end the message
    return _HeaderTemplate(encode.object_header(b"".join(messages), len(messages)), layout, tuple(texts))


def _fill_and_filter(kind: DatasetKind, lz4: bool) -> list[bytes]:
    """The messages of the fill value and, for chunks, of the filters."""
    if not (lz4 and kind.shape):
        return [encode.message(0x05, encode.FILL_CONTIGUOUS, constant=True)]
    return [
        encode.message(0x05, encode.FILL_CHUNKED, constant=True),
        encode.message(0x0B, encode.LZ4_FILTER, constant=True),
    ]


def _layout(kind: DatasetKind, lz4: bool) -> tuple[bytes, bytes]:
    """What stands before and after the address in the layout message."""
    shape, itemsize = kind.shape, kind.dtype.itemsize
    if not (lz4 and shape):
        return struct.pack("<BB", 3, 1), struct.pack("<Q", n_elements(shape) * itemsize)
    rest = struct.pack(f"<{len(shape) + 1}I", *chunk_shape(shape, itemsize), itemsize)
    return struct.pack("<BBB", 3, 2, len(shape) + 1), rest


def _groups(addresses: Mapping[Path, int], at: int) -> tuple[bytes, int, int]:
    """(bytes, B-tree, local heap) of all groups, laid at *at*; the last two of the root group."""
    members: dict[Path, dict[bytes, int | None]] = {(): {}}
    for path, address in addresses.items():
        for depth in range(len(path) - 1):
            members.setdefault(path[:depth], {})[path[depth]] = None
        members.setdefault(path[:-1], {})[path[-1]] = address
    data = bytearray()
    made: dict[Path, tuple[int, tuple[int, int]]] = {}
    for path in sorted(members, key=len, reverse=True):  # groups before those which they are in
        links: list[encode.Link] = []
        for name, where in sorted(members[path].items()):
            inner = (*path, name)
            links.append((name, *made[inner]) if where is None else (name, where, None))
        structures, tree, names = encode.group(links, at + len(data))
        data += structures
        if path:
            made[path] = at + len(data), (tree, names)
            data += encode.object_header(_symbol_table_message(tree, names), 1)
    return bytes(data), tree, names


def _offsets(tensors: Iterable[Tensor], at: int) -> tuple[list[int], int]:
    """(offset of each tensor's data, size of the file); `UNDEFINED` where there are none."""
    offsets = []
    for tensor in tensors:
        n = nbytes(tensor)
        if n:
            at += -at % (_PAGE if n >= _LARGE else 64)
        offsets.append(at if n else encode.UNDEFINED)
        at += n
    return offsets, at


def _data(at: int, offsets: Iterable[int], tensors: Iterable[Tensor]) -> Iterable[Body]:
    """The tensors that have data, with the gaps before them; the first may start at *at*."""
    for offset, tensor in zip(offsets, tensors, strict=True):
        if offset != encode.UNDEFINED:
            yield bytes(offset - at)
            yield tensor
            at = offset + nbytes(tensor)
