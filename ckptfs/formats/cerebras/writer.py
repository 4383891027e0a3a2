"""A Cerebras checkpoint (``.mdl``, format 0.5) as a file of extents.

::

    superblock          96 bytes
    text                global heaps: tree spec, metadata of each key, names of dtypes
    dataset headers     one a tensor, with its attributes
    groups              names of the datasets (local heap, symbol nodes, B-tree), nested ones first
    root header         tree spec, versions, one attribute a key, in blocks of 64 KiB
    data                tensors one after the other, in the order of the state

Tensors lie whole and unfiltered (layout class contiguous) where the real writer makes LZ4 chunks. Every size and
offset is so known before any data are read, any byte can be made by itself, and readers may map the data into memory.
For trained weights LZ4 saves nothing. The reference's reader asks libhdf5 for the values and sees no difference.
Chunks as the real writer makes them can only be written from front to back: `h5_lz4`.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import lru_cache

from ckptfs.errors import UsageError
from ckptfs.formats.cerebras.state import MAX_SHOWN, RTFX, Flat, State, flatten, key_metadata, leaf_fields, refusal
from ckptfs.formats.extents import Body, ExtentFile, file_of
from ckptfs.formats.hdf5 import encode as h5
from ckptfs.formats.hdf5.chunk_writer import chunk_shape
from ckptfs.formats.source import Item
from ckptfs.tensors.dtypes import DType
from ckptfs.tensors.tensor import Shape, Tensor, n_elements, nbytes

RELEASE = "2.10.0"
VERSION = 0.5
_PAGE = 4096
_LARGE = 64 << 10
"""Tensors of so many bytes start at a page, smaller ones at a multiple of 64."""
_MAX_KEY = h5.MAX_ATTRIBUTE - 32
"""Bytes of a key, which is part of an attribute's name."""
_TRUE, _FALSE = b"\1", b"\0"


def mdl_file(state: State, *, release: str = RELEASE) -> ExtentFile:
    """The checkpoint of *state*, which `ckptfs.open`, h5py and ``cstorch.load`` read.

    *release* is what the file says wrote it. Tied keys are stored once. Named tuples become tuples. Needs about 2 KB of
    memory a key. Raises `UsageError`, naming the keys, for what the format cannot hold: refused objects, dtypes
    without a number, keys that collide or make no HDF5 path.
    """
    plan = plan_structures(state, release=release)
    places, size = _places(plan.tensors, plan.end)
    return file_of([*plan.structures(places, size), *_data(plan.end, places, plan.tensors)])


@dataclass(frozen=True, slots=True)
class Plan:
    """The structures of one file, complete but for the places of the data and the file's size."""

    tensors: list[Tensor]
    """Those that are stored, in order."""
    end: int
    """Bytes of all structures: the data may start here."""
    _heap: list[bytes]
    _headers: _DatasetHeaders
    _groups: bytes
    _root: bytes
    _addresses: tuple[int, int, int]

    def structures(self, places: Iterable[int], size: int) -> list[bytes]:
        """Their bytes: *places* has each tensor's data or B-tree, *size* is that of the whole file."""
        self._headers.place(places)
        first = h5.superblock(size, *self._addresses)
        return [first, *self._heap, bytes(self._headers.data), self._groups, self._root]


def plan_structures(state: State, *, release: str, lz4: bool = False) -> Plan:
    """What `mdl_file` says; with *lz4*, tensors that have dimensions are chunked and filtered as by the real writer."""
    flat = flatten(state)
    stored = _stored(state, flat)
    texts = h5.TextHeap(h5.SUPERBLOCK_BYTES)
    attributes = list(_root_attributes(state, flat, texts, release))
    headers = _DatasetHeaders(texts)
    for _, tensor, kind in stored:
        headers.add(kind, tensor.dtype, tensor.shape, lz4)
    heap = texts.finish()
    at = h5.SUPERBLOCK_BYTES + sum(map(len, heap))
    paths = {path: at + start for (path, _, _), start in zip(stored, headers.starts, strict=True)}
    groups, tree, names = _groups(paths, at + len(headers.data))
    at += len(headers.data) + len(groups)
    root, address = h5.continued_header(h5.message(0x11, struct.pack("<QQ", tree, names)), attributes, at)
    tensors = [tensor for _, tensor, _ in stored]
    return Plan(tensors, at + len(root), heap, headers, groups, root, (address, tree, names))


def _stored(state: State, flat: Flat) -> list[tuple[tuple[bytes, ...], Tensor, str]]:
    """(HDF5 path, tensor, kind of item) of each dataset, in order; `UsageError` naming all keys that cannot be."""
    problems = []
    found: dict[tuple[bytes, ...], tuple[Tensor, str]] = {}
    inner: set[tuple[bytes, ...]] = set()
    for key, name in flat.keys:
        item = state.items[name]
        why = refusal(item) or _bad_key(key)
        if why is None and item.tensor is not None and _tied(item, key, flat) is None:
            path = _path(key)
            if not path or key.endswith("/"):
                why = "the key of a tensor must not be empty or end in a slash"
            elif path in found or path in inner or _prefixes(path) & found.keys():
                why = "HDF5 has no place for it: another key takes its path, or a part of it"
            else:
                found[path] = item.tensor, item.kind
                inner |= _prefixes(path)
        if why is not None:
            problems.append(f"{key!r:.200}: {why}")
    if problems:
        more = [f"and {len(problems) - MAX_SHOWN} more"] if len(problems) > MAX_SHOWN else []
        raise UsageError(f"cannot be written as a Cerebras checkpoint: {'; '.join(problems[:MAX_SHOWN] + more)}")
    return [(path, tensor, kind) for path, (tensor, kind) in found.items()]


def _bad_key(key: str) -> str | None:
    if "\0" in key:
        return "a key must not contain NUL"
    if any("\ud800" <= char <= "\udfff" for char in key):
        return "a key must be valid Unicode"
    return "the key is longer than HDF5 allows" if len(key.encode()) > _MAX_KEY else None


def _path(key: str) -> tuple[bytes, ...]:
    """The components that HDF5 sees: slashes make groups, empty components and "." mean nothing, ".." is a name."""
    return tuple(part.encode() for part in key.split("/") if part not in ("", "."))


def _prefixes(path: tuple[bytes, ...]) -> set[tuple[bytes, ...]]:
    return {path[:i] for i in range(1, len(path))}


def _tied(item: Item, key: str, flat: Flat) -> str | None:
    """The key in the file whose value *key* shares, None when it stands for itself."""
    if item.tied_to is None:
        return None
    first = flat.first.get(item.tied_to)
    return first if first != key else None


def _root_attributes(state: State, flat: Flat, texts: h5.TextHeap, release: str) -> Iterable[bytes]:
    yield h5.attribute(b"__spec__", h5.TEXT, (), texts.add(flat.spec))
    yield h5.attribute(b"__version__", h5.FLOAT64, (), struct.pack("<d", VERSION))
    yield h5.attribute(b"__cstorch_version__", h5.TEXT, (), texts.add(release))
    for key, name in flat.keys:
        item = state.items[name]
        value = texts.add(key_metadata(key, leaf_fields(item, _tied(item, key, flat))))
        yield h5.attribute(f"{key}.__metadata__".encode(), h5.TEXT, (), value)
    yield h5.attribute(b"__SUCCESS__", h5.BOOL, (), _TRUE)


@dataclass(slots=True)
class _DatasetHeaders:
    """Object headers laid end to end; the addresses of the data are set last, when they are known."""

    texts: h5.TextHeap
    data: bytearray = field(default_factory=bytearray)
    starts: list[int] = field(default_factory=list)
    layouts: list[int] = field(default_factory=list)

    def add(self, kind: str, dtype: DType, shape: Shape, lz4: bool) -> None:
        template = _template(kind, dtype, shape, lz4)
        start = len(self.data)
        self.starts.append(start)
        self.layouts.append(start + template.layout)
        self.data += template.header
        for at, text in template.texts:
            self.data[start + at : start + at + 16] = self.texts.add(text)

    def place(self, places: Iterable[int]) -> None:
        """Set the address of each dataset's data."""
        for at, place in zip(self.layouts, places, strict=True):
            struct.pack_into("<Q", self.data, at, place)


@dataclass(frozen=True, slots=True)
class _Template:
    """The object header of all datasets of one kind, dtype and shape, and where they differ."""

    header: bytes
    layout: int
    """Where the address of the data stands."""
    texts: tuple[tuple[int, str], ...]
    """Where references to texts stand."""


@lru_cache(maxsize=1024)
def _template(kind: str, dtype: DType, shape: Shape, lz4: bool) -> _Template:
    messages = [h5.message(0x01, h5.dataspace(shape)), h5.message(0x03, h5.datatype(dtype), constant=True)]
    if lz4 and shape:
        messages += [h5.message(0x05, h5.FILL_CHUNKED, constant=True), h5.message(0x0B, h5.LZ4_FILTER, constant=True)]
        place = struct.pack("<BBB", 3, 2, len(shape) + 1)
        rest = struct.pack(f"<{len(shape) + 1}I", *chunk_shape(shape, dtype.itemsize), dtype.itemsize)
    else:
        messages.append(h5.message(0x05, h5.FILL_CONTIGUOUS, constant=True))
        place, rest = struct.pack("<BB", 3, 1), struct.pack("<Q", n_elements(shape) * dtype.itemsize)
    layout = 16 + sum(map(len, messages)) + 8 + len(place)
    messages.append(h5.message(0x08, place + struct.pack("<Q", h5.UNDEFINED) + rest))
    texts = []
    at = 16 + sum(map(len, messages))
    for name, element, extents, value in _dataset_attributes(kind, dtype, shape):
        text = value if isinstance(value, str) else None
        messages.append(h5.attribute(name, element, extents, bytes(16) if isinstance(value, str) else value))
        at += len(messages[-1])
        if text is not None:
            texts.append((at - 16, text))  # 16 bytes need no padding: they end the message
    return _Template(h5.object_header(b"".join(messages), len(messages)), layout, tuple(texts))


def _dataset_attributes(
    kind: str, dtype: DType, shape: Shape
) -> Iterable[tuple[bytes, bytes, tuple[int, ...], bytes | str]]:
    """(name, element type, shape, value) of each attribute of a dataset, as the real writer has them."""
    if kind == "array":
        yield b"is_bfloat16", h5.BOOL, (), _TRUE if dtype.name == "bfloat16" else _FALSE
    else:
        extents = struct.pack(f"<{len(shape)}Q", *shape)
        yield b"__TORCH__", h5.BOOL, (), _TRUE
        # numpy makes float64 of an empty list
        yield b"shapes", h5.INT64 if shape else h5.FLOAT64, (1, len(shape)), extents
        yield b"dtypes", h5.TEXT, (1,), f"torch.{dtype.name}"
        yield b"rtfx_dtypes", h5.INT64, (1,), struct.pack("<Q", RTFX[dtype.name])
    yield b"__TYPE__", h5.TEXT, (), "NumpyArraySerializer" if kind == "array" else "TorchTensorSerializer"
    yield b"compressed", h5.BOOL, (), _FALSE
    yield b"__NUMPY__", h5.BOOL, (), _TRUE


def _groups(paths: Mapping[tuple[bytes, ...], int], at: int) -> tuple[bytes, int, int]:
    """(bytes, B-tree, local heap) of all groups, laid at *at*; the last two of the root group."""
    members: dict[tuple[bytes, ...], dict[bytes, int | None]] = {(): {}}
    for path, address in paths.items():
        for depth in range(len(path) - 1):
            members.setdefault(path[:depth], {})[path[depth]] = None
        members.setdefault(path[:-1], {})[path[-1]] = address
    data = bytearray()
    made: dict[tuple[bytes, ...], tuple[int, tuple[int, int]]] = {}
    for path in sorted(members, key=len, reverse=True):  # groups before those which they are in
        links: list[h5.Link] = []
        for name, where in sorted(members[path].items()):
            inner = (*path, name)
            links.append((name, *made[inner]) if where is None else (name, where, None))
        structures, tree, names = h5.group(links, at + len(data))
        data += structures
        if path:
            made[path] = at + len(data), (tree, names)
            data += h5.object_header(h5.message(0x11, struct.pack("<QQ", tree, names)), 1)
    return bytes(data), tree, names


def _places(tensors: Iterable[Tensor], at: int) -> tuple[list[int], int]:
    """(offset of each tensor's data, size of the file); `UNDEFINED` where there are none."""
    places = []
    for tensor in tensors:
        n = nbytes(tensor)
        if n:
            at += -at % (_PAGE if n >= _LARGE else 64)
        places.append(at if n else h5.UNDEFINED)
        at += n
    return places, at


def _data(at: int, places: Iterable[int], tensors: Iterable[Tensor]) -> Iterable[Body]:
    """The tensors that have data, with the gaps before them; the first may start at *at*."""
    for place, tensor in zip(places, tensors, strict=True):
        if place != h5.UNDEFINED:
            yield bytes(place - at)
            yield tensor
            at = place + nbytes(tensor)
