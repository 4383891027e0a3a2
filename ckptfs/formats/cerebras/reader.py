"""Cerebras checkpoints (``.mdl``): an HDF5 file with one dataset a tensor.

==============================  ==================================================================
root attribute                  content
==============================  ==================================================================
``__spec__``                    the nested state dict without its leaves (`spec`, `legacy_spec`)
``__version__``                 format version, a float: 0.5; none for 0.1
``__cstorch_version__``         the release that wrote the file
``__SUCCESS__``                 written last; without it the save was interrupted
``<key>.__metadata__``          how the leaf under that flattened key is stored (`items`)
==============================  ==================================================================

Format 0.5 added the last two; before, each dataset had attributes of its own (`legacy`). A child process reads the
metadata (`hdf5.index`); tensors are then read without libhdf5 (`hdf5.dataset`).
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from contextlib import ExitStack, suppress
from typing import Any

from ckptfs.errors import CorruptHeader, Incomplete, UnknownFormat
from ckptfs.formats.cerebras.items import Reading, make_items
from ckptfs.formats.cerebras.legacy import FIRST_VERSION, flat_keys, make_legacy_items
from ckptfs.formats.cerebras.legacy_spec import parse_legacy_spec
from ckptfs.formats.cerebras.links import Links
from ckptfs.formats.cerebras.spec import parse_spec
from ckptfs.formats.hdf5.index import Index, read_index
from ckptfs.formats.source import Container, Item, Source
from ckptfs.tensors.cache import TileCache

VERSION = 0.5
"""The newest format; `legacy` reads older ones."""
MAX_WARNINGS = 100


def open_h5(path: str | os.PathLike[str], cache: TileCache, *, follow_links: bool = False) -> Source:
    """Open a Cerebras checkpoint of format 0.1 to 0.5. Reads no tensor data.

    Data in other files are read only inside the checkpoint's folder unless *follow_links*. Raises `CorruptHeader`
    for damaged metadata, `Incomplete` for an interrupted save of format 0.5 (older ones only warn), `Unsafe` for a
    tree spec that would run code, `UnknownFormat` for other HDF5 files. Damage to single keys does not raise: their
    items say why they cannot be read.
    """
    spec = _Spec(os.fspath(path))
    index = read_index(path, early=spec.parse_early)
    links = Links(index.file.path, follow_links, cache)
    with ExitStack() as undo:
        undo.callback(_close, index, links)
        version = _version(index)
        reading = Reading(index, cache, links.follow)
        tree, warnings = _read_state(reading, version, spec)
        undo.pop_all()
    warnings += reading.warnings
    if len(warnings) > MAX_WARNINGS:
        warnings[MAX_WARNINGS:] = [f"and {len(warnings) - MAX_WARNINGS} more"]
    release = index.attributes.get("__cstorch_version__")
    return Source(
        path=index.file.path,
        format="cerebras-h5",
        format_version=f"{version:g}",
        release=release if isinstance(release, str) else None,
        items=reading.items,
        tree=tree,
        metadata=_trainer_metadata(tree, reading.items),
        mtime_ns=index.file.mtime_ns,
        nbytes=index.file.size,
        files=[index.file, *links.files],
        warnings=warnings,
    )


def _close(index: Index, links: Links) -> None:
    for file in (index.file, *links.files):
        file.discard()


def _version(index: Index) -> float:
    """The format's number; refuses other files, and checkpoints that were never finished."""
    path, attributes = index.file.path, index.attributes
    version = attributes.get("__version__", FIRST_VERSION)
    if isinstance(version, bool) or not isinstance(version, (int, float)) or not 0 < version < 1e6:
        raise UnknownFormat(path, f"has the format version {version!r:.40}, which does not exist")
    spec = attributes.get("__spec__")
    if "__spec__" not in attributes:
        if "__version__" in attributes or not flat_keys(index):
            raise UnknownFormat(path, "is an HDF5 file, but not a Cerebras checkpoint: it has no attribute __spec__")
    elif not isinstance(spec, str):
        raise CorruptHeader(path, "its tree spec (attribute __spec__) is not text")
    elif "__version__" not in attributes and spec.lstrip().startswith("["):
        raise CorruptHeader(path, "has the tree spec of format 0.5, but no __version__: its attributes are damaged")
    if version >= VERSION and attributes.get("__SUCCESS__") is not True:
        what = "the save was interrupted or is still running. Wait for it, or take an earlier checkpoint"
        raise Incomplete(path, f"was never finished: {what}")
    return float(version)


class _Spec:
    """The tree spec of format 0.5, which is parsed while the rest of the file is indexed."""

    def __init__(self, path: str) -> None:
        self._path = path
        self._text: str | None = None
        self._parsed: Any = None

    def parse_early(self, attributes: Mapping[str, Any]) -> None:
        """Parse the spec if there is one. Its errors are raised later, by `parsed`."""
        text = attributes.get("__spec__")
        if isinstance(text, str) and attributes.get("__version__") == VERSION:
            with suppress(CorruptHeader):
                self._parsed = parse_spec(text, self._path)
                self._text = text

    def parsed(self, text: str, path: str) -> tuple[Container, list[str], list[str]]:
        """As `parse_spec`."""
        found: tuple[Container, list[str], list[str]] = self._parsed if text == self._text else parse_spec(text, path)
        return found


def _read_state(reading: Reading, version: float, spec: _Spec) -> tuple[Container | None, list[str]]:
    """(tree, warnings) of the state dict, whose items are then in *reading*."""
    index = reading.index
    text, path = index.attributes.get("__spec__"), index.file.path
    if text is None:
        make_legacy_items(reading, flat_keys(index), version)
        return None, ["has no tree spec (attribute __spec__): its datasets are shown as a flat list"]
    if version < VERSION:
        tree, keys, warnings = parse_legacy_spec(text, path)
        make_legacy_items(reading, keys, version)
        return tree, warnings
    tree, keys, warnings = spec.parsed(text, path)
    make_items(reading, keys)
    if version > VERSION:
        warnings.insert(0, f"has format {version:g}, newer than {VERSION}: read as {VERSION}")
    return tree, warnings


def _trainer_metadata(tree: Container | None, items: dict[str, Item]) -> list[Any]:
    """The list under the state dict's key ``__metadata__``, as plain Python; [] when there is none."""
    if tree is None or tree.keys is None or "__metadata__" not in tree.keys:
        return []
    found = _plain(tree.children[tree.keys.index("__metadata__")], items)
    return [entry for entry in found if isinstance(entry, dict)] if isinstance(found, list) else []


def _plain(node: Container | str, items: dict[str, Item]) -> Any:
    """Containers and scalars; tensors and objects become None."""
    if isinstance(node, str):
        return items[node].value
    values = [_plain(child, items) for child in node.children]
    return values if node.keys is None else dict(zip(node.keys, values, strict=True))
