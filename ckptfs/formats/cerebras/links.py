"""Keys whose data are in another file: followed inside the checkpoint's own folder, or anywhere when allowed.

One level only: a linked key that is itself a link has no data there. Nothing is fetched over a network.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from ckptfs.errors import CkptfsError
from ckptfs.formats.cerebras import items, legacy
from ckptfs.formats.files import checked_shape, open_file
from ckptfs.formats.hdf5.index import Index, read_index
from ckptfs.formats.safetensors import open_safetensors
from ckptfs.formats.source import OUTSIDE, Item, Source
from ckptfs.tensors.cache import TileCache
from ckptfs.tensors.dtypes import DTYPES
from ckptfs.tensors.file_tensor import FileTensor
from ckptfs.tensors.source_file import SourceFile
from ckptfs.tensors.tensor import n_elements


@dataclass(slots=True)
class Links:
    """The files that one checkpoint refers to, each opened once."""

    path: str
    """The checkpoint; relative links start in its folder."""
    anywhere: bool
    cache: TileCache
    files: list[SourceFile] = field(default_factory=list)
    opened: dict[tuple[str, str], Any] = field(default_factory=dict)

    def follow(self, key: str, fields: Mapping[str, Any]) -> Item:
        """The item of *key* as the other file has it; kind ``link`` with a reason when that cannot be."""
        kind = fields["__TYPE__"]
        target = str(fields["filepath" if kind == "DeferredFileTensor" else "path"])
        inner = fields.get("key")
        shown = target if inner is None else f"{target}:{inner}"
        place = self._place(target)
        if place is None:
            return Item(key, "link", reason=f"its data are in {target!r:.200}, {OUTSIDE}", target=shown)
        try:
            item = _READERS[kind](self, key, place, fields)
        except CkptfsError as error:
            return Item(key, "link", reason=f"its link cannot be followed: {error}", target=shown)
        return replace(item, kind="link", target=shown) if item.reason and item.class_name is None else item

    def _place(self, target: str) -> str | None:
        """The real path of *target*, None when it must not be read."""
        if "://" in target or "\0" in target:
            return None
        folder = os.path.realpath(os.path.dirname(os.path.abspath(self.path)))
        place = os.path.realpath(os.path.join(folder, target))
        inside = place.startswith(os.path.join(folder, ""))
        return place if inside or self.anywhere else None

    def index(self, place: str) -> Index:
        found: Index | None = self.opened.get(("h5", place))
        if found is None:
            found = self.opened["h5", place] = read_index(place)
            self.files.append(found.file)
        return found

    def safetensors(self, place: str) -> Source:
        found: Source | None = self.opened.get(("safetensors", place))
        if found is None:
            found = self.opened["safetensors", place] = open_safetensors(place)
            self.files.extend(found.files)
        return found

    def raw(self, place: str) -> SourceFile:
        found: SourceFile | None = self.opened.get(("raw", place))
        if found is None:
            found = self.opened["raw", place] = open_file(place)
            self.files.append(found)
        return found


def _hdf5_item(links: Links, key: str, place: str, fields: Mapping[str, Any]) -> Item:
    reading = items.Reading(links.index(place), links.cache, _no_further)
    return items.value_item(reading, key, str(fields["key"]), fields["metadata"])


def _legacy_item(links: Links, key: str, place: str, fields: Mapping[str, Any]) -> Item:
    reading = items.Reading(links.index(place), links.cache, _no_further)
    return legacy.item_of_other_file(reading, key, str(fields["key"]))


def _no_further(key: str, fields: Mapping[str, Any]) -> Item:
    return Item(key, "link", reason="its link leads to another link", target=str(fields.get("path")))


def _safetensors_item(links: Links, key: str, place: str, fields: Mapping[str, Any]) -> Item:
    found = links.safetensors(place).items.get(str(fields["key"]))
    if found is None:
        return Item(key, "link", reason=f"{place} has no key {fields['key']!r:.200}")
    return replace(found, key=key)


def _file_item(links: Links, key: str, place: str, fields: Mapping[str, Any]) -> Item:
    dtype = DTYPES[str(fields["dtype"]).removeprefix("torch.")]
    shape = checked_shape(fields["shape"], dtype.itemsize)
    file = links.raw(place)
    if n_elements(shape) * dtype.itemsize > file.size:
        return Item(key, "link", reason=f"{place} is too short ({file.size} bytes) for its shape {shape}")
    return Item(key, "tensor", tensor=FileTensor(dtype, shape, file, 0, None, key))


_READERS = {
    "DeferredNumpyArray": _hdf5_item,
    "DeferredObject": _hdf5_item,
    "DeferredH5Tensor": _legacy_item,
    "DeferredSafeTensor": _safetensors_item,
    "DeferredFileTensor": _file_item,
}
