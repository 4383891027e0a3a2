"""The state dict of a Cerebras checkpoint as text: its tree spec, and the metadata of each key.

Both are JSON, spelled as the real writer (2.10) spells them. The flattened key of a leaf joins the dict keys and
positions on its way with dots; two leaves with one key cannot be written.
"""

from __future__ import annotations

import json
from collections import OrderedDict, deque
from collections.abc import Callable, Hashable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

from ckptfs.errors import UsageError
from ckptfs.formats.source import Container, Item
from ckptfs.tensors.dtypes import DType
from ckptfs.tensors.tensor import Shape, Tensor

MAX_DEPTH = 300
"""Levels of containers; our reader goes no deeper, and the reference's JSON decoder gives up at about 1000."""
MAX_SHOWN = 8
_NAMES = "bool int16 int32 int64 uint8 uint16 uint32 uint64 float16 float32 float64 bfloat16"
RTFX = dict(zip(_NAMES.split(), (1, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 15), strict=True))
"""The numbers of the tensor dtypes that the format has. The real writer refuses all others."""
_SPEC_TYPES = {
    "dict": "builtins.dict",
    "OrderedDict": "collections.OrderedDict",
    "list": "builtins.list",
    "tuple": "builtins.tuple",
    "namedtuple": "builtins.tuple",  # the reference cannot load the name of a class that it does not know
    "set": "builtins.set",
    "deque": "collections.deque",
}
_LEAF: dict[str, Any] = {"type": None, "context": None, "children_spec": []}
_NOT_JSON = ("set", "deque")

Leaf = Callable[[str, object], tuple[Item, Hashable]]
"""Makes the item of a leaf, and what is equal for values that are the same object (None: never tied)."""


@dataclass(frozen=True, slots=True)
class State:
    """A nested state dict: its containers, and the item of each leaf (a `Source` has the same two fields)."""

    tree: Container
    items: Mapping[str, Item]


@dataclass(slots=True)
class Flat:
    """A state as it is written: *keys* are (key in the file, key among the items), in order."""

    spec: str = ""
    keys: list[tuple[str, str]] = field(default_factory=list)
    first: dict[str, str] = field(default_factory=dict)
    """Key among the items to the key in the file: they differ where a real writer's key was odd."""


def plain_leaf(key: str, value: object) -> tuple[Item, Hashable]:
    """The item of a lazy tensor, an `Item` or a plain Python value; `UsageError` for anything else."""
    if isinstance(value, Item):
        return value, id(value.tensor) if value.tensor is not None else None
    if value is None:
        return Item(key, "none"), None
    if isinstance(value, str):
        return Item(key, "string", value=str(value)), None
    if isinstance(value, (bool, int, float)):
        return Item(key, "scalar", value=value), None
    if isinstance(value, Tensor):
        return Item(key, "tensor", tensor=value), id(value)
    kind = f"{type(value).__module__}.{type(value).__qualname__}"
    raise UsageError(f"{key}: a {kind} cannot be written; take tensors, arrays, numbers, text or None")


def state_tree(nested: object, leaf: Leaf = plain_leaf) -> State:
    """The state of nested dicts, lists, tuples, sets and deques. Values that are the same object are tied.

    Raises `UsageError` for leaves that *leaf* refuses (all of them are named), for keys that JSON has not, for
    flattened keys that occur twice, and for more than `MAX_DEPTH` levels (a container that holds itself).
    """
    building = _Building(leaf)
    tree = building.node("", nested, 0)
    if isinstance(tree, str):
        raise UsageError("a single value is not a state dict; put it into a dict")
    if building.refused:
        raise UsageError("; ".join(_first(building.refused)))
    return State(tree, building.items)


@dataclass(slots=True)
class _Building:
    leaf: Leaf
    items: dict[str, Item] = field(default_factory=dict)
    seen: dict[Hashable, str] = field(default_factory=dict)
    refused: list[str] = field(default_factory=list)

    def node(self, key: str, value: object, depth: int) -> Container | str:
        if depth > MAX_DEPTH:
            raise UsageError(f"{key:.80}: nested deeper than {MAX_DEPTH} levels")
        kind = _container(value)
        if kind is None:
            self.add(key, value)
            return key
        keys = tuple(value) if isinstance(value, Mapping) else None
        values = value.values() if isinstance(value, Mapping) else value
        parts = components(key, keys, len(value))  # type: ignore[arg-type]
        prefix = f"{key}." if depth else ""
        children = zip(parts, values, strict=True)  # type: ignore[call-overload]
        return Container(kind, keys, tuple(self.node(prefix + part, child, depth + 1) for part, child in children))

    def add(self, key: str, value: object) -> None:
        if key in self.items:
            raise UsageError(f"{key}: two entries have this flattened key; rename one of them")
        try:
            item, same = self.leaf(key, value)
        except UsageError as error:
            self.refused.append(str(error))
            item, same = Item(key, "none"), None
        if same is not None and self.seen.setdefault(same, key) != key:
            item = Item(key, item.kind, item.tensor, item.value, tied_to=self.seen[same])
        self.items[key] = item


def _container(value: object) -> str | None:
    if isinstance(value, Mapping):
        return "OrderedDict" if isinstance(value, OrderedDict) else "dict" if isinstance(value, dict) else None
    if isinstance(value, tuple):
        return "namedtuple" if hasattr(value, "_fields") else "tuple"
    return next((kind.__name__ for kind in (list, set, deque) if isinstance(value, kind)), None)


def components(path: str, keys: tuple[object, ...] | None, n: int) -> list[str]:
    """The part of the flattened key that each child of a container adds; `UsageError` for keys that JSON has not."""
    if keys is None:
        return [str(i) for i in range(n)]
    for key in keys:
        if key is not None and type(key) not in (str, int, float, bool):
            raise UsageError(f"{path or 'the state dict'}: a {type(key).__name__} as a key of a dict cannot be written")
    return [str(key) for key in keys]


def flatten(state: State) -> Flat:
    """The tree spec as text, and the keys. Raises `UsageError` for a key that two leaves would share."""
    flat = Flat()
    example, spec = _spec(flat, "", state.tree, 0)
    jsonable = not any(node.type in _NOT_JSON for node in _nodes(state.tree))
    flat.spec = json.dumps([example if jsonable else None, json.dumps([1, spec])], indent=4)
    if len({key for key, _ in flat.keys}) < len(flat.keys):
        seen: set[str] = set()
        twice = [key for key, _ in flat.keys if key in seen or seen.add(key)]  # type: ignore[func-returns-value]
        raise UsageError(f"{', '.join(_first(twice))}: two entries have this flattened key; rename one of them")
    return flat


def _nodes(tree: Container) -> Iterator[Container]:
    todo = [tree]
    while todo:
        node = todo.pop()
        yield node
        todo.extend(child for child in node.children if isinstance(child, Container))


def _spec(flat: Flat, path: str, node: Container | str, depth: int) -> tuple[object, dict[str, Any]]:
    """(example, node of the tree spec) of one node, its leaves appended to *flat*."""
    if isinstance(node, str):
        flat.keys.append((path, node))
        flat.first.setdefault(node, path)
        return "*", _LEAF
    if depth > MAX_DEPTH:
        raise UsageError(f"{path:.80}: nested deeper than {MAX_DEPTH} levels")
    prefix = f"{path}." if depth else ""
    parts = components(path, node.keys, len(node.children))
    made = [_spec(flat, prefix + part, child, depth + 1) for part, child in zip(parts, node.children, strict=True)]
    examples = [example for example, _ in made]
    context = None if node.keys is None else list(node.keys)
    spec = {"type": _SPEC_TYPES[node.type], "context": json.dumps(context), "children_spec": [s for _, s in made]}
    return examples if node.keys is None else dict(zip(node.keys, examples, strict=True)), spec


def key_metadata(key: str, fields: str) -> str:
    """The attribute ``<key>.__metadata__`` of a leaf that is stored under its own key; *fields* is its JSON."""
    name = json.dumps(key)
    context = json.dumps(json.dumps([key]))
    leaf = '{"type": null, "context": null, "children_spec": []}'
    spec = json.dumps(f'[1, {{"type": "builtins.dict", "context": {context}, "children_spec": [{leaf}]}}]')
    example = f'        {{\n            {name}: "*"\n        }}'
    head = f'{{\n    "__spec__": [\n{example},\n        {spec}\n    ],\n    "__objects__": [\n        {name}\n    ],\n'
    return head + f"    {json.dumps(f'{key}.__metadata__')}: {fields}\n}}"


def leaf_fields(item: Item, tied_to: str | None) -> str:
    """JSON of the fields of one leaf. The item is one that the format holds (`refusal` is None)."""
    if tied_to is not None:
        return _json({"key": tied_to, "__LINKED__": True, "__TYPE__": "LinkedObject", "__NONE__": True})
    if item.tensor is not None:
        return _tensor_json(item.kind, item.tensor.dtype, item.tensor.shape)
    if item.kind == "none":
        return _json({"__TYPE__": "NoneSerializer", "__NONE__": True})
    name = "scalar" if item.kind == "scalar" else "string"
    return _json({f"{name}_value": item.value, "__TYPE__": f"{name.title()}Serializer", "__NONE__": True})


@lru_cache(maxsize=1024)
def _tensor_json(kind: str, dtype: DType, shape: Shape) -> str:
    fields: dict[str, Any]
    if kind == "array":
        fields = {"is_bfloat16": dtype.name == "bfloat16", "__TYPE__": "NumpyArraySerializer"}
    else:
        fields = {"__TORCH__": True, "shapes": [list(shape)], "dtypes": [f"torch.{dtype.name}"]}
        fields |= {"rtfx_dtypes": [RTFX[dtype.name]], "__TYPE__": "TorchTensorSerializer"}
    return _json({**fields, "__NUMPY__": True, "compressed": False})


def _json(fields: Mapping[str, Any]) -> str:
    return json.dumps(fields, indent=4).replace("\n", "\n    ")


def refusal(item: Item) -> str | None:
    """Why the format cannot hold *item*; None when it can."""
    if item.tensor is not None and item.reason is None:
        name = item.tensor.dtype.name
        if item.kind == "tensor" and name not in RTFX:
            return f"the format has no {name} tensors"
        if item.kind == "array" and name.startswith("float8"):
            return f"the format has no {name} arrays"
        return "HDF5 has at most 32 dimensions" if len(item.tensor.shape) > 32 else None
    if item.shape is not None:
        return "the format has no arrays of strings"
    if item.kind in ("scalar", "string", "none"):
        return None
    return item.reason or f"there is no value to write ({item.kind})"


def _first(values: list[str]) -> list[str]:
    more = len(values) - MAX_SHOWN
    return values[:MAX_SHOWN] + ([f"and {more} more"] if more > 0 else [])
