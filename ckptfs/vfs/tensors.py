"""The folders `tensors/` and `raw/`: the state dict itself, one file a leaf.

A folder is made when it is first looked into, so a mount is ready at once with any number of keys. Each level groups
its keys by their next part, once, and passes every group to its subfolder: the work for the whole tree is linear in
the length of the keys.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from functools import partial

from ckptfs.errors import UsageError
from ckptfs.formats.extents import json_file, raw_file
from ckptfs.formats.npy import npy_file
from ckptfs.formats.source import OUTSIDE, Item
from ckptfs.vfs.names import MAX_LEVELS, escape
from ckptfs.vfs.tree import Entry, Folder, Leaf


def tensors_folder(items: Iterable[Item]) -> Folder:
    """The state dict as folders, in its own order: ``.npy`` for tensors, ``.json`` for everything else."""
    return Folder(lambda: _level([(item.key, item) for item in items], MAX_LEVELS))


def raw_folder(items: Iterable[Item]) -> Folder:
    """One file of bare bytes for each tensor, named by its flattened key."""
    return Folder(lambda: {escape(i.key): Leaf(raw_file(i.tensor), _xattrs(i)) for i in items if i.tensor is not None})


def _level(items: list[tuple[str, Item]], levels: int) -> dict[str, Entry]:
    """Children of one folder, from pairs of the rest of a key and its item; *levels* of folders may follow."""
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
    """What a file shows instead of a value that is refused."""
    if reason and reason.endswith(OUTSIDE):
        reason += ". Use --follow-links to allow it"
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
