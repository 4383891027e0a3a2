"""The tree of one mounted checkpoint: what each folder and file is.

Folders are made when they are first looked into, so a mount is ready at once however many keys there are. Each
level groups its keys by their next part, once, and hands every group on to its subfolder: the work for the whole
tree is linear in the length of the keys.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import Any

from ckptfs.errors import UsageError
from ckptfs.formats.extents import json_file, raw_file, text_file
from ckptfs.formats.npy import npy_file
from ckptfs.formats.source import Item, Source
from ckptfs.vfs.components import model_folder
from ckptfs.vfs.facts import facts
from ckptfs.vfs.hf import DEFAULT_SHARD_BYTES, View, hf_folder
from ckptfs.vfs.names import MAX_LEVELS, escape
from ckptfs.vfs.readme import readme
from ckptfs.vfs.torch import hf_bin_folder, torch_folder
from ckptfs.vfs.tree import Entry, Folder, Leaf, Tree


def build_tree(
    source: Source,
    view: View | None = None,
    *,
    no_hf_reason: str | None = None,
    about: Mapping[str, Any] | None = None,
    shard_bytes: int = DEFAULT_SHARD_BYTES,
    hf_extra: Mapping[str, Entry] | None = None,
    extra: Mapping[str, Entry] | None = None,
    where: str = "",
) -> Tree:
    """The tree of one checkpoint.

    *view* gives ``hf/`` and ``hf-bin/`` when its target is ``hf``; other views come as whole entries. *no_hf_reason*
    says in the README why there is none. *about* is `facts` of the source where the caller knows more (the family),
    *hf_extra* adds files to both that they lack, *extra* adds entries at the top. *where* is
    the mount point, for configs that name a path. Reads no tensor data.
    """
    about = facts(source) if about is None else about
    entries: dict[str, Entry] = {
        "checkpoint.json": Leaf(json_file(about)),
        "tensors": tensors_folder(source.items.values()),
        "raw": raw_folder(source.items.values()),
    }
    if view is not None and view.tgt == "hf":
        for name, make in (("hf", hf_folder), ("hf-bin", hf_bin_folder)):
            one = partial(_model, make, shard_bytes)
            entries[name] = model_folder(view, one, where=os.path.join(where, name) if where else "", extra=hf_extra)
    entries["torch"] = torch_folder(source)
    entries |= extra or {}
    page = readme(about, ["README.txt", *entries], no_hf_reason=None if "hf" in entries else no_hf_reason)
    children: dict[str, Entry] = {"README.txt": Leaf(text_file(page)), **entries}
    return Tree(Folder(lambda: children), source.mtime_ns)


def tensors_folder(items: Iterable[Item]) -> Folder:
    """The state dict as folders, in its own order: ``.npy`` for tensors, ``.json`` for everything else."""
    return Folder(lambda: _level([(item.key, item) for item in items], MAX_LEVELS))


def raw_folder(items: Iterable[Item]) -> Folder:
    """One file of bare bytes for each tensor, named by its flattened key."""
    return Folder(lambda: {escape(i.key): Leaf(raw_file(i.tensor), _xattrs(i)) for i in items if i.tensor is not None})


def _model(make: Callable[..., Folder], shard_bytes: int, view: View, extra: Mapping[str, Entry]) -> Folder:
    return make(view, shard_bytes=shard_bytes, extra=extra)


def _level(items: list[tuple[str, Item]], levels: int) -> dict[str, Entry]:
    """Children of one folder; *items* come with what is left of their keys, *levels* may still be opened."""
    children: dict[str, Entry] = {}
    groups: dict[str, list[tuple[str, Item]]] = {}
    for rest, item in items:
        head, dot, tail = rest.partition(".") if levels > 1 else (rest, "", "")
        if not dot:
            children[escape(head, ".json" if item.tensor is None else ".npy")] = _leaf(item)
        elif head in groups:
            groups[head].append((tail, item))
        else:
            groups[head] = [(tail, item)]
            children[escape(head)] = Folder(partial(_level, groups[head], levels - 1))
    return children


def _leaf(item: Item) -> Leaf:
    """The file of one item."""
    if item.tensor is not None:
        return Leaf(npy_file(item.tensor), _xattrs(item))
    if item.kind in ("object", "link"):
        return Leaf(json_file(_refusal(item, item.reason)), _xattrs(item))
    try:
        return Leaf(json_file(item.value), _xattrs(item))
    except UsageError as error:  # a number of many thousand digits
        return Leaf(json_file(_refusal(item, str(error))), _xattrs(item))


def _refusal(item: Item, reason: str | None) -> dict[str, str | None]:
    """What stands in the place of a value that is not shown."""
    why = {"refused": reason, "class": item.class_name}
    return why if item.target is None else {**why, "target": item.target}


def _xattrs(item: Item) -> dict[str, bytes]:
    found = {"user.key": item.key.encode("utf-8", "surrogatepass")}
    if item.tensor is not None:
        found["user.dtype"] = item.tensor.dtype.name.encode()
        found["user.shape"] = json.dumps(list(item.tensor.shape)).encode()
    if item.tied_to is not None:
        found["user.tied_to"] = item.tied_to.encode("utf-8", "surrogatepass")
    return found
