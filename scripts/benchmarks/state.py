"""The state dict of a checkpoint and its description as the Cerebras 2.10 writer spells it in root attributes."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

RELEASE = "2.10.0"
FORMAT_VERSION = 0.5
RTFX = {"int64": 5, "float32": 11, "bfloat16": 15}
"""The writer's own numbers for element types; readers ignore them."""
TORCH = "TorchTensorSerializer"


@dataclass(frozen=True, slots=True)
class Stored:
    """A leaf that has a dataset. *dtype* is torch's name."""

    shape: tuple[int, ...]
    dtype: str

    @property
    def nbytes(self) -> int:
        n = {"int64": 8, "float32": 4, "bfloat16": 2}[self.dtype]
        for extent in self.shape:
            n *= extent
        return n


def flatten(tree: Any, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """(flattened key, leaf) in the order of the state dict; dicts and lists are containers."""
    if isinstance(tree, dict | list):
        children = tree.items() if isinstance(tree, dict) else enumerate(tree)
        for name, child in children:
            yield from flatten(child, f"{prefix}.{name}" if prefix else str(name))
    else:
        yield prefix, tree


def spec_text(tree: Any) -> str:
    """``__spec__`` of a whole state dict, or of one key when *tree* is ``{key: leaf}``."""
    return json.dumps(_spec(tree), indent=4)


def metadata_text(key: str, leaf: Any) -> str:
    """``<key>.__metadata__``: how the leaf is stored."""
    fields = {"__spec__": _spec({key: leaf}), "__objects__": [key], f"{key}.__metadata__": _fields(leaf)}
    return json.dumps(fields, indent=4)


def _spec(tree: Any) -> list[Any]:
    return [_example(tree), json.dumps([1, _node(tree)])]


def _example(tree: Any) -> Any:
    if isinstance(tree, dict):
        return {name: _example(child) for name, child in tree.items()}
    return [_example(child) for child in tree] if isinstance(tree, list) else "*"


def _node(tree: Any) -> dict[str, Any]:
    if isinstance(tree, dict):
        return _container("builtins.dict", json.dumps(list(tree)), [_node(child) for child in tree.values()])
    if isinstance(tree, list):
        return _container("builtins.list", "null", [_node(child) for child in tree])
    return _container(None, None, [])


def _container(kind: str | None, context: str | None, children: list[Any]) -> dict[str, Any]:
    return {"type": kind, "context": context, "children_spec": children}


def _fields(leaf: Any) -> Mapping[str, Any]:
    if isinstance(leaf, Stored):
        about = {"shapes": [leaf.shape], "dtypes": [f"torch.{leaf.dtype}"], "rtfx_dtypes": [RTFX[leaf.dtype]]}
        return {"__TORCH__": True, **about, "__TYPE__": TORCH, "__NUMPY__": True, "compressed": False}
    if leaf is None:
        return {"__TYPE__": "NoneSerializer", "__NONE__": True}
    if isinstance(leaf, str):
        return {"string_value": leaf, "__TYPE__": "StringSerializer", "__NONE__": True}
    return {"scalar_value": leaf, "__TYPE__": "ScalarSerializer", "__NONE__": True}
