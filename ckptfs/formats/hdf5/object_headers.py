"""The metadata of an HDF5 file, walked with `struct` and `os.pread` alone.

libhdf5 needs 40-70 us for a dataset and scans the whole object header for each attribute that it opens: with one
root attribute per key that is quadratic. This walker reads every byte of metadata once. It supports what h5py writes
by default (superblock 0 to 3, symbol-table groups, object headers 1 and 2, compact attributes, text in global heaps)
and raises `Unsupported` for the rest. Every address is checked against the file's size before it is followed, and no
structure is visited twice. Header checksums (object header 2) are not verified.
"""

from __future__ import annotations

import itertools
import struct
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

from ckptfs.errors import CorruptHeader
from ckptfs.formats.hdf5 import messages
from ckptfs.formats.hdf5.header_cache import HeaderCache
from ckptfs.formats.hdf5.messages import DAMAGE, UNDEFINED, Unsupported
from ckptfs.formats.hdf5.superblock import MetadataFile, text_of

MAX_GROUP_DEPTH = 64
MAX_NAME = 1 << 16
"""Bytes of a name in a group."""
LONG_TEXT = 16 << 10
"""Bytes of a text that is sent as (offset, length): a tree spec of 100,000 keys has 16 MB, too much for a pipe."""

_MESSAGE = struct.Struct("<HHB")
_SYMBOL = struct.Struct("<QQI4xQQ")
_REFERENCE = struct.Struct("<IQI")
_Entry = tuple[str, int, int, int, int]


def header_messages(file: MetadataFile, address: int) -> list[tuple[int, bytes]]:
    """(message type, body) of an object header of version 1 or 2, through all its continuation blocks."""
    head = file.read(address, 16)
    if head[:4] == b"OHDR":
        flags = head[5]
        at = 6 + (16 if flags & 0x20 else 0) + (4 if flags & 0x10 else 0)
        width = 1 << (flags & 3)
        size = int.from_bytes(file.read(address + at, width), "little")
        blocks = [(address + at + width, size)]
        prefix = 6 if flags & 4 else 4
    elif head[0] == 1:
        blocks = [(address + 16, int.from_bytes(head[8:12], "little"))]
        prefix = 8
    else:
        raise CorruptHeader(file.path, f"no object header at byte {address}")
    found: list[tuple[int, bytes]] = []
    seen = set()
    nbytes = 0
    while blocks:
        start, size = blocks.pop()
        nbytes += size
        if start in seen or nbytes > file.size:
            raise CorruptHeader(file.path, f"object header at byte {address} contains a cycle")
        seen.add(start)
        for body in _block_messages(file, file.read(start, size), prefix, found):
            next_start, next_size = struct.unpack_from("<QQ", body)
            # Version 2 wraps a continuation in "OCHK" and a checksum.
            blocks.append((next_start, next_size) if prefix == 8 else (next_start + 4, next_size - 8))
    return found


def _block_messages(file: MetadataFile, block: bytes, prefix: int, found: list[tuple[int, bytes]]) -> list[bytes]:
    """Append the messages of one block to *found*; the bodies of its continuation messages."""
    at, stop, more = 0, len(block), []
    while at + prefix <= stop:
        if prefix == 8:
            kind, size, flags = _MESSAGE.unpack_from(block, at)
        else:
            kind, size, flags = block[at], block[at + 1] | block[at + 2] << 8, block[at + 3]
        at += prefix
        body = block[at : at + size]
        at += size
        if at > stop:
            raise CorruptHeader(file.path, "a message reaches past its object header")
        if kind == 0x10:
            more.append(body)
        elif kind:
            if flags & 2:
                raise Unsupported("shared message")
            found.append((kind, body))
    return more


def group_entries(file: MetadataFile, tree: int, heap: int) -> Iterator[_Entry]:
    """(name, header address, cache type, tree, heap) of a symbol-table group's members, in the order of names."""
    head = file.read(heap, 32)
    if head[:4] != b"HEAP":
        raise CorruptHeader(file.path, f"no local heap at byte {heap}")
    size, _, start = struct.unpack_from("<QQQ", head, 8)
    names = file.read(start, size)
    seen: set[int] = set()
    todo = [tree]
    while todo:
        address = todo.pop()
        if address in seen:
            raise CorruptHeader(file.path, f"the group's tree has a cycle at byte {address}")
        seen.add(address)
        head = file.read(address, 24)
        if head[:4] == b"TREE" and head[4] == 0:
            n = int.from_bytes(head[6:8], "little")
            children = struct.unpack(f"<{2 * n}Q", file.read(address + 24, 16 * n))[1::2]
            file.prefetch(children)
            todo.extend(reversed(children))
        elif head[:4] == b"SNOD":
            n = int.from_bytes(head[6:8], "little")
            for offset, where, cache, a, b in _SYMBOL.iter_unpack(file.read(address + 8, 40 * n)):
                stop = names.find(b"\0", offset, offset + MAX_NAME)
                if stop < 0:
                    raise CorruptHeader(file.path, f"a name in the group at byte {address} does not end")
                yield names[offset:stop].decode(errors="surrogateescape"), where, cache, a, b
        else:
            raise CorruptHeader(file.path, f"no group node at byte {address}")


def _prefetched(file: MetadataFile, entries: Iterator[_Entry]) -> Iterator[_Entry]:
    """The same entries; their headers are prefetched, 32 at a time because file systems limit requests in flight."""
    while some := list(itertools.islice(entries, 32)):
        file.prefetch(entry[1] for entry in some)
        yield from some


def walk_objects(file: MetadataFile, root: int, wanted: frozenset[str]) -> Iterator[tuple[str, dict[str, Any]]]:
    """(path, record) of each object below the root group; ``{"library": why}`` for one that libhdf5 has to read."""
    tables = [body for kind, body in header_messages(file, root) if kind == 0x11]
    if not tables:
        raise Unsupported("new-style root group")
    todo = [("", *struct.unpack_from("<QQ", tables[0]))]
    seen = set()
    n_members = 0
    cache = HeaderCache(file, wanted)
    while todo:
        prefix, tree, heap = todo.pop()
        if tree in seen or prefix.count("/") > MAX_GROUP_DEPTH:
            continue
        seen.add(tree)
        for name, address, kind, a, b in _prefetched(file, group_entries(file, tree, heap)):
            path = prefix + name
            n_members += 1
            if n_members * _SYMBOL.size > file.size:  # each has an entry of its own
                raise CorruptHeader(file.path, "its groups share their members")
            if kind == 1:
                todo.append((path + "/", a, b))
            elif kind == 2:
                yield path, {"link": "soft"}
            else:
                record = _guarded_record(file, address, wanted, cache)
                if "group" in record:
                    todo.append((path + "/", *record["group"]))
                else:
                    yield path, record


def _guarded_record(file: MetadataFile, address: int, wanted: frozenset[str], cache: HeaderCache) -> dict[str, Any]:
    """Its record; damage to one object becomes the error of that object alone."""
    try:
        record = cache.record(address)
        if record is None:
            record = object_record(file, address, wanted)
            cache.learn(address, record)
        return record
    except Unsupported as error:
        return {"library": str(error)}
    except CorruptHeader as error:
        return {"error": str(error).removeprefix(f"{file.path}: ")}
    except DAMAGE as error:
        return {"error": f"its object header at byte {address} is damaged ({error})"}


def object_record(file: MetadataFile, address: int, wanted: frozenset[str]) -> dict[str, Any]:
    """Shape, type, layout, filters, fill value and the *wanted* attributes of a dataset; "group" for a group."""
    record: dict[str, Any] = {"shape": None, "type": "other", "layout": None, "filters": (), "fill": None}
    attributes = record["attrs"] = {}
    for kind, body in header_messages(file, address):
        if kind == 0x0C:
            if _attribute_name(file, body) in wanted:
                name, type_name, shape, at = _attribute(file, body)
                attributes[name] = attribute_value(file, type_name, shape, body[at:])
        elif kind in _DECODERS:
            field, decode = _DECODERS[kind]
            # datasets differ in few shapes, types and filters
            value = file.decoded.get((kind, body), file)
            if value is file:
                value = file.decoded[kind, body] = decode(body)
            record[field] = value or record[field] if field == "fill" else value
        elif kind == 0x08:
            record["layout"] = _absolute(messages.layout(body), file.base)
        elif kind == 0x07:
            record["link"] = "external storage"
        elif kind == 0x11:
            return {"group": struct.unpack_from("<QQ", body)}
        elif kind == 0x15 and _is_dense(body):
            raise Unsupported("dense attributes")
        elif kind in (0x02, 0x06):
            raise Unsupported("new-style group")
    if record["shape"] is None:
        record["layout"] = None
    return record


def _attribute_name(file: MetadataFile, body: bytes) -> Any:
    """The name of an attribute, remembered by its first bytes: datasets have the same few attributes."""
    start = body[:32]
    name = file.decoded.get((0x0C, start))
    if name is None:
        name = messages.attribute_name(body).decode(errors="surrogateescape")
        if 9 + len(name.encode(errors="surrogateescape")) < 32:
            file.decoded[0x0C, start] = name
    return name


def _attribute(file: MetadataFile, body: bytes) -> Any:
    """As `messages.attribute`; remembered for values of 16 bytes, which are references to one text."""
    head = body[:-16]
    found = file.decoded.get((-1, head))
    if found is None:
        found = messages.attribute(body, file.types)
        if found[3] == len(head):
            file.decoded[-1, head] = found
    return found


_DECODERS: dict[int, tuple[str, Callable[[bytes], Any]]] = {
    0x01: ("shape", messages.dataspace),
    0x03: ("type", lambda body: messages.datatype(body)[0]),
    0x04: ("fill", partial(messages.fill_value, 4)),
    0x05: ("fill", partial(messages.fill_value, 5)),
    0x0B: ("filters", messages.filters),
}


def _absolute(layout: messages.Layout, base: int) -> messages.Layout:
    """Contiguous data by file offset; the address of a B-tree stays relative, as those inside of it are."""
    if layout[0] == "contiguous" and layout[1] is not None:
        return "contiguous", layout[1] + base, layout[2]
    return layout


def _is_dense(body: bytes) -> bool:
    """Whether an attribute info message points at a fractal heap."""
    at = 4 if body[1] & 1 else 2
    return int.from_bytes(body[at : at + 8], "little") != UNDEFINED


def root_attributes(
    file: MetadataFile, root: int, suffix: str
) -> tuple[Iterator[tuple[str, Any]], Iterator[tuple[str, Any]]]:
    """(name, value) of each attribute of the root group: those whose names do not end with *suffix*, then the others.

    They are decoded lazily. A long text among the first is ``{"at": offset, "nbytes": n}``.
    """
    bodies: tuple[list[bytes], list[bytes]] = [], []
    end = suffix.encode()
    for kind, body in header_messages(file, root):
        if kind == 0x15 and _is_dense(body):
            raise Unsupported("dense attributes")
        if kind == 0x0C:
            bodies[end in body and messages.attribute_name(body).endswith(end)].append(body)
    return _named_values(file, bodies[0], LONG_TEXT), _named_texts(file, bodies[1])


def _named_values(file: MetadataFile, bodies: Iterable[bytes], long: int = 1 << 32) -> Iterator[tuple[str, Any]]:
    for body in bodies:
        with _damage(file):
            name, type_name, shape, at = messages.attribute(body, file.types)
            if shape == () and type_name == "str" and int.from_bytes(body[at : at + 4], "little") >= long:
                n, address, index = _REFERENCE.unpack_from(body, at)
                start, size = file.heap_object_range(address, index)
                value: Any = {"at": start, "nbytes": min(n, size)}
            else:
                value = attribute_value(file, type_name, shape, body[at:])
        yield name, value


def _named_texts(file: MetadataFile, bodies: Iterable[bytes]) -> Iterator[tuple[str, Any]]:
    """As `_named_values`, faster for single texts: thousands have the same bytes of type and dataspace."""
    usual: set[bytes] = set()
    with _damage(file):
        for body in bodies:
            start = 9 if body[0] == 3 else 8
            stop = start + (body[2] | body[3] << 8)
            behind = body[:2] + body[4:start] + body[stop + (-stop % 8 if body[0] == 1 else 0) : -16]
            if behind in usual:
                name = body[start:stop].split(b"\0", 1)[0].decode(errors="surrogateescape")
                yield name, text_of(file, *_REFERENCE.unpack_from(body, len(body) - 16))
                continue
            name, type_name, shape, at = messages.attribute(body, file.types)
            yield name, attribute_value(file, type_name, shape, body[at:])
            if type_name == "str" and shape == () and at == len(body) - 16:
                usual.add(behind)


@contextmanager
def _damage(file: MetadataFile) -> Iterator[None]:
    try:
        yield
    except DAMAGE as error:
        raise CorruptHeader(file.path, f"an attribute of the root group is damaged ({error})") from error


def attribute_value(file: MetadataFile, type_name: str, shape: tuple[int, ...] | None, raw: bytes) -> Any:
    """Text and numbers as Python values (a list for a 1-d attribute), bytes for opaque data, None for others."""
    if shape is None:
        return None
    if not shape and type_name == "str":
        return text_of(file, *_REFERENCE.unpack_from(raw))
    n = 1
    for extent in shape:
        n *= extent
    if type_name == "str":
        texts = [text_of(file, *_REFERENCE.unpack_from(raw, 16 * i)) for i in range(n)]
        return texts if shape else texts[0]
    if type_name.startswith("|S"):
        size = int(type_name[2:])
        fixed = [raw[i * size : (i + 1) * size].rstrip(b"\0").decode(errors="surrogateescape") for i in range(n)]
        return fixed if shape else fixed[0]
    if type_name.startswith("|V"):
        return raw[: n * int(type_name[2:])]
    code = _CODES.get(type_name.lstrip("<>|"))
    if code is None:
        return None
    values = struct.unpack_from((">" if type_name[0] == ">" else "<") + f"{n}{code}", raw)
    return list(values) if shape else values[0]


_CODES = {"b1": "?", "i1": "b", "u1": "B", "i2": "h", "u2": "H", "i4": "i", "u4": "I", "i8": "q", "u8": "Q"}
_CODES |= {"f2": "e", "f4": "f", "f8": "d"}
