"""The same records as `object_headers`, read by libhdf5, for files and objects that the walker does not support.

Runs in child processes only: libhdf5 can crash on malformed files. Reads no tensor data and follows no soft,
external or raw-file link.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import h5py
from h5py import h5d, h5o, h5s, h5t

from ckptfs.formats.hdf5.object_headers import MAX_GROUP_DEPTH

FAILURES = (OSError, RuntimeError, KeyError, ValueError, TypeError)
"""What h5py raises for damaged or unknown content."""
_IEEE = {2: (15, 10, 5, 0, 10), 4: (31, 23, 8, 0, 23), 8: (63, 52, 11, 0, 52)}


def open_file(fd: int) -> h5py.File:
    """The file behind *fd*, also when it has been deleted. OSError when libhdf5 refuses it."""
    return h5py.File(f"/proc/self/fd/{fd}", "r", locking=False)


def root_attributes(file: h5py.File) -> Iterator[tuple[str, Any]]:
    """(name, value) of each attribute of the root group."""
    for name in file.attrs:
        yield name, attribute_value(file.attrs[name])


def attribute_value(value: Any) -> Any:
    """The Python value that `object_headers.attribute_value` gives for the same attribute."""
    if isinstance(value, h5py.Empty):
        return None
    if isinstance(value, bytes):
        return value.decode(errors="surrogateescape")
    if isinstance(value, str):
        return value
    if value.dtype.kind == "V" and value.dtype.names is None:
        return value.tobytes()
    if value.dtype.kind in "biuf" and value.dtype.itemsize <= 8:
        return value.tolist()
    if value.dtype.kind in "OS":
        return [attribute_value(v) for v in value.ravel().tolist()]
    return None


def walk_objects(file: h5py.File, wanted: frozenset[str]) -> Iterator[tuple[str, dict[str, Any]]]:
    """(path, record) of each object below the root group, each group once."""
    todo = [("", file.id)]
    seen = set()
    while todo:
        prefix, group = todo.pop()
        address = h5o.get_info(group).addr
        if address in seen or prefix.count("/") > MAX_GROUP_DEPTH:
            continue
        seen.add(address)
        for raw in group:
            path = prefix + raw.decode(errors="surrogateescape")
            link = group.links.get_info(raw).type
            if link != h5py.h5l.TYPE_HARD:
                yield path, {"link": "soft" if link == h5py.h5l.TYPE_SOFT else "external"}
                continue
            child = _guarded_open(group, raw)
            if isinstance(child, h5py.h5g.GroupID):
                todo.append((path + "/", child))
            else:
                yield path, _guarded_record(child, wanted)


def record_at(file: h5py.File, path: str, wanted: frozenset[str]) -> dict[str, Any]:
    """The record of the object at *path*."""
    return _guarded_record(_guarded_open(file.id, path.encode(errors="surrogateescape")), wanted)


def _guarded_open(group: Any, name: bytes) -> Any:
    try:
        return h5o.open(group, name)
    except FAILURES as error:
        return str(error)


def _guarded_record(found: Any, wanted: frozenset[str]) -> dict[str, Any]:
    if not isinstance(found, h5d.DatasetID):
        return {"error": f"no dataset: {found}" if isinstance(found, str) else "neither a dataset nor a group"}
    try:
        return object_record(found, wanted)
    except FAILURES as error:
        return {"error": f"libhdf5 cannot read its header ({error})"}


def object_record(dataset: h5d.DatasetID, wanted: frozenset[str]) -> dict[str, Any]:
    """Shape, type, layout, filters, fill value and the *wanted* attributes of a dataset."""
    plist, space = dataset.get_create_plist(), dataset.get_space()
    null = space.get_simple_extent_type() == h5s.NULL
    record: dict[str, Any] = {
        "shape": None if null else dataset.shape,
        "type": type_name(dataset.get_type()),
        "layout": None if null else _layout(dataset, plist),
        "filters": tuple(plist.get_filter(i)[:3] for i in range(plist.get_nfilters())),
        "fill": _fill_value(plist, dataset),
    }
    attributes = h5py.AttributeManager(h5py.Dataset(dataset))
    record["attrs"] = {name: attribute_value(attributes[name]) for name in attributes if name in wanted}
    if plist.get_external_count():
        record["link"] = "external storage"
    return record


def _layout(dataset: h5d.DatasetID, plist: Any) -> tuple[Any, ...] | None:
    kind = plist.get_layout()
    if kind == h5d.CONTIGUOUS:
        n = dataset.get_storage_size()
        return "contiguous", dataset.get_offset() if n else None, n or _nbytes(dataset)
    if kind == h5d.CHUNKED:
        return "chunked", plist.get_chunk(), None
    if kind == h5d.COMPACT:
        import numpy as np

        data = np.empty(dataset.shape, dataset.dtype)
        dataset.read(h5s.ALL, h5s.ALL, data)
        return "compact", data.tobytes()
    return None


def _nbytes(dataset: h5d.DatasetID) -> int:
    n = dataset.get_type().get_size()
    for extent in dataset.shape or ():
        n *= extent
    return int(n)


def _fill_value(plist: Any, dataset: h5d.DatasetID) -> bytes | None:
    if plist.fill_value_defined() != h5d.FILL_VALUE_USER_DEFINED:
        return None
    import numpy as np

    value = np.zeros((), dataset.dtype)
    plist.get_fill_value(value)
    raw = value.tobytes()
    return raw if raw.strip(b"\0") else None


def type_name(kind: h5t.TypeID) -> str:
    """The name that `messages.datatype` gives for the same type."""
    if isinstance(kind, h5t.TypeFloatID) and _IEEE.get(kind.get_size()) != kind.get_fields():
        return "other"
    if isinstance(kind, h5t.TypeStringID):
        return "str" if kind.is_variable_str() else f"|S{kind.get_size()}"
    if isinstance(kind, h5t.TypeOpaqueID):
        return f"|V{kind.get_size()}"
    try:
        found = kind.dtype
    except FAILURES:
        return "other"
    return found.str if found.kind in "biufc" and found.itemsize == kind.get_size() else "other"


def chunk_table(file: h5py.File, path: str) -> list[tuple[list[int], int, int, int]]:
    """(element offsets, file offset, stored nbytes, filter mask) of each allocated chunk of the dataset at *path*."""
    dataset = h5o.open(file.id, path.encode(errors="surrogateescape"))
    found: list[tuple[list[int], int, int, int]] = []

    def keep(chunk: Any) -> None:
        found.append((list(chunk.chunk_offset), chunk.byte_offset, chunk.size, chunk.filter_mask))

    if dataset.get_space().get_simple_extent_npoints():
        dataset.chunk_iter(keep)
    return found
