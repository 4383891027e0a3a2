"""Cerebras checkpoints (``.mdl``): an HDF5 file with one dataset a tensor.

==============================  ==================================================================
root attribute                  content
==============================  ==================================================================
``__spec__``                    the nested state dict without its leaves (`h5_spec`)
``__version__``                 format version, a float: 0.5
``__cstorch_version__``         the release that wrote the file
``__SUCCESS__``                 written last; without it the save was interrupted
``<key>.__metadata__``          how the leaf under that flattened key is stored (`h5_items`)
==============================  ==================================================================

The metadata are read by a child process (`h5_index`); tensors are then read without HDF5 (`h5_chunks`).
"""

from __future__ import annotations

import os
from contextlib import ExitStack
from typing import Any

from ckptfs.cache import TileCache
from ckptfs.errors import CorruptHeader, Incomplete, UnknownFormat
from ckptfs.formats.h5_index import Index, read_index
from ckptfs.formats.h5_items import Reading, make_items
from ckptfs.formats.h5_links import Links
from ckptfs.formats.h5_spec import parse_spec
from ckptfs.formats.source import Item, Node, Source

SIGNATURE = b"\x89HDF\r\n\x1a\n"
VERSION = 0.5
MAX_WARNINGS = 100


def is_hdf5(head: bytes) -> bool:
    """Whether a file that starts with *head* is HDF5; a user block of 512, 1024, … bytes may come first."""
    at = 0
    while at < len(head):
        if head.startswith(SIGNATURE, at):
            return True
        at = max(512, 2 * at)
    return False


def open_h5(path: str | os.PathLike[str], cache: TileCache, *, follow_links: bool = False) -> Source:
    """Open a Cerebras checkpoint of format 0.5. Reads no tensor data.

    Data in other files are read only inside the checkpoint's folder unless *follow_links*. Raises `CorruptHeader`
    for damaged metadata, `Incomplete` for an interrupted save, `UnknownFormat` for other HDF5 files and older
    formats. Damage to single keys does not raise: their items say why they cannot be read.
    """
    index = read_index(path)
    links = Links(index.file.path, follow_links, cache)
    with ExitStack() as undo:
        undo.callback(_close, index, links)
        warnings = _check(index)
        tree, keys, notes = parse_spec(index.attributes["__spec__"], index.file.path)
        reading = Reading(index, cache, links.follow)
        items = make_items(reading, keys)
        undo.pop_all()
    warnings += notes + reading.warnings
    if len(warnings) > MAX_WARNINGS:
        warnings[MAX_WARNINGS:] = [f"and {len(warnings) - MAX_WARNINGS} more"]
    release = index.attributes.get("__cstorch_version__")
    return Source(
        path=index.file.path,
        format="cerebras-h5",
        format_version=f"{index.attributes['__version__']:g}",
        release=release if isinstance(release, str) else None,
        items=items,
        tree=tree,
        metadata=_trainer_metadata(tree, items),
        mtime_ns=index.file.mtime_ns,
        nbytes=index.file.size,
        fds=[index.file.fd, *links.fds],
        warnings=warnings,
    )


def _close(index: Index, links: Links) -> None:
    for fd in (index.file.fd, *links.fds):
        os.close(fd)


def _check(index: Index) -> list[str]:
    """Refuse what is no finished checkpoint of format 0.5; warnings for what is newer."""
    path, attributes = index.file.path, index.attributes
    version = attributes.get("__version__")
    if "__spec__" not in attributes:
        raise UnknownFormat(path, "is an HDF5 file, but no Cerebras checkpoint: it has no attribute __spec__")
    if version is None:
        raise UnknownFormat(path, "has no __version__: format 0.1 (release 1.7), which cannot be read yet")
    if isinstance(version, bool) or not isinstance(version, (int, float)) or not version > 0:
        raise UnknownFormat(path, f"has the format version {version!r:.40}, which does not exist")
    if version < VERSION:
        what = "which cannot be read; save it again with release 2.5 or later"
        raise UnknownFormat(path, f"has format {version:g} (before release 2.5), {what}")
    if not isinstance(attributes["__spec__"], str):
        raise CorruptHeader(path, "its tree spec (attribute __spec__) is no text")
    if attributes.get("__SUCCESS__") is not True:
        what = "the save was interrupted or is still running. Wait for it, or take an earlier checkpoint"
        raise Incomplete(path, f"was never finished: {what}")
    return [f"has format {version:g}, newer than {VERSION}: read as {VERSION}"] if version > VERSION else []


def _trainer_metadata(tree: Node, items: dict[str, Item]) -> list[Any]:
    """The list under the state dict's key ``__metadata__``, as plain Python; [] when there is none."""
    if tree.keys is None or "__metadata__" not in tree.keys:
        return []
    found = _plain(tree.children[tree.keys.index("__metadata__")], items)
    return [entry for entry in found if isinstance(entry, dict)] if isinstance(found, list) else []


def _plain(node: Node | str, items: dict[str, Item]) -> Any:
    """Containers and scalars; tensors and objects become None."""
    if isinstance(node, str):
        return items[node].value
    values = [_plain(child, items) for child in node.children]
    return values if node.keys is None else dict(zip(node.keys, values, strict=True))
