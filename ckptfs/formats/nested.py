"""A nested state dict as plain containers, with lazy tensors as its leaves."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias

from ckptfs.formats.source import Container, Item, Source

Value: TypeAlias = Any
"""dict, OrderedDict, list, tuple, `SetOf`, None, bool, int, float, str or `formats.source.Tensor`."""


@dataclass(frozen=True, slots=True)
class SetOf:
    """The members of a set; lazy tensors cannot be hashed by what they hold."""

    values: tuple[Value, ...]


def nested_state(source: Source) -> Value:
    """The whole state dict of *source*; a flat one is a dict of its keys.

    A deque becomes a list, for ``torch.load`` refuses a deque. A namedtuple becomes a tuple, for nothing names its
    fields. A value that cannot be shown becomes the text of `not_shown`: every key and every position stays.
    """
    if source.tree is None:
        return {key: _leaf(item) for key, item in source.items.items()}
    return _container(source.tree, source.items)


def model_state(source: Source) -> Value:
    """The part of `nested_state` under its key ``model``; all of it where there is no such state."""
    tree = source.tree
    if tree is None or tree.keys is None or "model" not in tree.keys:
        return nested_state(source)
    model = tree.children[tree.keys.index("model")]
    return nested_state(source) if isinstance(model, str) else _container(model, source.items)


def not_shown(reason: str) -> str:
    """The text that replaces a value which is refused."""
    return f"<not shown by ckptfs: {reason}>"


def _container(node: Container, items: Mapping[str, Item]) -> Value:
    values = [_leaf(items[c]) if isinstance(c, str) else _container(c, items) for c in node.children]
    if node.keys is not None:
        kind = OrderedDict if node.type == "OrderedDict" else dict
        return kind(zip(node.keys, values, strict=True))
    if node.type == "set" and all(isinstance(child, str) for child in node.children):
        return SetOf(tuple(values))
    return tuple(values) if node.type in ("tuple", "namedtuple") else values


def _leaf(item: Item) -> Value:
    if item.tensor is not None:
        return item.tensor
    if item.kind in ("object", "link"):
        return not_shown(item.reason or "cannot be read")
    return item.value
