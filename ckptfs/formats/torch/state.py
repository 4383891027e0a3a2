"""An unpickled torch state dict as items: nested containers become dotted keys and a tree of nodes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from ckptfs.errors import CorruptHeader, SourceError
from ckptfs.formats.source import Container, Item
from ckptfs.formats.torch.globals import Box, Global, Opaque, Storage, StoredTensor
from ckptfs.tensors.file_tensor import FileTensor, in_c_order
from ckptfs.tensors.source_file import SourceFile

MAX_DEPTH = 100
MAX_ENTRIES = 1_000_000
"""Containers and leaves together; a pickle can name one container often and so unfold without end."""
MAX_KEY_CHARS = 64 << 20
"""Characters of all flattened keys together."""

Locate = Callable[[Storage], int]
"""Byte position of a storage's first element; raises `CorruptHeader` when the file does not hold the storage."""


def state_of(value: object, file: SourceFile, locate: Locate) -> tuple[dict[str, Item], Container]:
    """Items in the order of the dicts, and the tree, of what `unpickle` made.

    Tensors that are the same view of the same storage become one object. Raises `SourceError` for a value that is
    no container, and where two entries get the same flattened key.
    """
    walk = _Walk(file, locate)
    root = _node(walk, "", value, 0)
    if isinstance(root, str):
        raise SourceError(file.path, "holds a single value, not a state dict")
    return walk.items, root


@dataclass(slots=True)
class _Walk:
    file: SourceFile
    locate: Locate
    items: dict[str, Item] = field(default_factory=dict)
    tensors: dict[StoredTensor, FileTensor] = field(default_factory=dict)
    n_entries: int = 0
    n_key_chars: int = 0


def _node(walk: _Walk, key: str, value: object, depth: int) -> Container | str:
    if isinstance(value, Box) and value.keys is not None:
        _spend(walk, key, depth, len(value.keys))
        names = tuple(value.keys)
        parts = [_part(walk, key, name) for name in names]
        return Container(value.type, names, _children(walk, key, parts, tuple(value.values), depth))
    if isinstance(value, (Box, tuple)):
        kind, values = (value.type, value.values) if isinstance(value, Box) else ("tuple", value)
        _spend(walk, key, depth, len(values))
        parts = [str(i) for i in range(len(values))]
        return Container(kind, None, _children(walk, key, parts, tuple(values), depth))
    if depth == 0:
        return key
    walk.n_key_chars += len(key)
    if key in walk.items:
        raise SourceError(walk.file.path, f"two entries of the state dict have the flattened key {key[:200]!r}")
    walk.items[key] = _item(walk, key, value)
    return key


def _spend(walk: _Walk, key: str, depth: int, n: int) -> None:
    """Account for a container of *n* entries, before anything is made for them."""
    walk.n_entries += 1 + n
    walk.n_key_chars += len(key)
    if depth > MAX_DEPTH or walk.n_entries > MAX_ENTRIES or walk.n_key_chars > MAX_KEY_CHARS:
        limits = f"{MAX_DEPTH} levels, {MAX_ENTRIES} entries or {MAX_KEY_CHARS} characters of keys"
        raise CorruptHeader(walk.file.path, f"{key[:100]}: the state dict has more than {limits}")


def _children(
    walk: _Walk, key: str, parts: list[str], values: tuple[object, ...], depth: int
) -> tuple[Container | str, ...]:
    prefix = f"{key}." if depth else ""
    return tuple(_node(walk, prefix + part, value, depth + 1) for part, value in zip(parts, values, strict=True))


def _part(walk: _Walk, key: str, name: object) -> str:
    """The text of a dict's key."""
    if name is None or isinstance(name, (str, bool, int, float)):
        return str(name)
    raise SourceError(walk.file.path, f"{key[:200]}: a dict's key is a {type(name).__name__}, not a text or number")


def _item(walk: _Walk, key: str, value: object) -> Item:
    if isinstance(value, StoredTensor):
        known = walk.tensors.get(value)
        if known is not None:
            return Item(key, "tensor", known, tied_to=known.key)
        tensor = walk.tensors[value] = _tensor(walk, key, value)
        return Item(key, "tensor", tensor)
    if value is None:
        return Item(key, "none")
    if isinstance(value, str):
        return Item(key, "string", value=value)
    if isinstance(value, (bool, int, float)):
        return Item(key, "scalar", value=value)
    return Item(key, "object", class_name=_class_name(value), reason="is neither a tensor nor a number or text")


def _tensor(walk: _Walk, key: str, view: StoredTensor) -> FileTensor:
    offset = walk.locate(view.storage) + view.offset * view.dtype.itemsize
    strides = None if in_c_order(view.shape, view.strides) else view.strides
    return FileTensor(view.dtype, view.shape, walk.file, offset, strides, key)


def _class_name(value: object) -> str:
    if isinstance(value, Opaque):
        return value.class_name
    if isinstance(value, Global):
        return "torch.dtype" if value.dtype else value.name
    return "torch.storage.UntypedStorage" if isinstance(value, Storage) else type(value).__name__
