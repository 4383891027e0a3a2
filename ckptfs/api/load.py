"""`load`: a checkpoint as a nested state dict of torch tensors, each read when it is first touched.

Needs torch.
"""

from __future__ import annotations

import copy
import os
import weakref
from collections import OrderedDict
from collections.abc import Callable, ItemsView, Iterator, Mapping, ValuesView
from dataclasses import dataclass, field
from typing import Any

from ckptfs.api.checkpoint import Checkpoint, View
from ckptfs.api.to_torch import import_torch, to_torch
from ckptfs.conversion.resolve import PathLike
from ckptfs.formats.detect import open_source
from ckptfs.formats.nested import SetOf, Value, nested_state
from ckptfs.formats.source import Source
from ckptfs.tensors.cache import shared
from ckptfs.tensors.tensor import Tensor


def load(source: Checkpoint | View | PathLike, *, follow_links: bool = False, lazy: bool = True) -> Any:
    """The nested state dict of any supported checkpoint, with torch tensors; needs torch.

    *source* is a path, or a checkpoint that is open: it has to stay open while something is read. Of a `View`, it is
    the dict of its keys.

    Its dicts are `LazyDict`: an entry is read when it is first touched, and kept. With *lazy* false everything is
    read at once into plain containers (dict, OrderedDict, list, tuple, set). Tied tensors are one tensor. A value
    that is refused is a text that says so; links out of the checkpoint's folder are followed with *follow_links*.
    Raises `MissingCodec` without torch, and the errors of the readers.
    """
    import_torch("ckptfs.load")
    if isinstance(source, View):
        reading, state = _Reading(source.checkpoint.source), dict(source.plan.tensors)
    elif isinstance(source, Checkpoint):
        reading, state = _Reading(source.source), nested_state(source.source)
    else:
        opened = open_source(os.fspath(source), shared(), follow_links=follow_links)
        reading, state = _Reading(opened), nested_state(opened)
        weakref.finalize(reading, opened.close)
    return _lazily(reading, state) if lazy else _plainly(reading, state)


class LazyDict(dict[Any, Any]):
    """A dict whose tensors are read when they are first touched, and then kept.

    Entries that hold a list or tuple are read together. Copies (``copy``, ``dict(…)``, ``|``, deepcopy) read
    everything and are plain. A pickle is one of an OrderedDict: ``torch.load`` in its weights_only mode takes no
    other subclass of dict.
    """

    kind: type[dict[Any, Any]] = dict
    """What the entry was when it was saved: dict or OrderedDict."""

    @property
    def pending(self) -> tuple[Any, ...]:
        """Keys that have not been read yet."""
        return tuple(key for key, value in super().items() if type(value) is _Pending)

    def __getitem__(self, key: Any) -> Any:
        value = super().__getitem__(key)
        if type(value) is _Pending:
            value = value.read()
            super().__setitem__(key, value)
        return value

    def __iter__(self) -> Iterator[Any]:
        # Its own method, for otherwise dict(…), update and ** reach past __getitem__ to what is stored.
        return super().__iter__()

    def get(self, key: Any, default: Any = None) -> Any:
        return self[key] if key in self else default  # noqa: SIM401 - this is get

    def items(self) -> Any:
        return ItemsView(self)

    def values(self) -> Any:
        return ValuesView(self)

    def setdefault(self, key: Any, default: Any = None) -> Any:
        super().setdefault(key, default)
        return self[key]

    def pop(self, key: Any, *default: Any) -> Any:
        if key in self:
            self[key]
        return super().pop(key, *default)

    def popitem(self) -> tuple[Any, Any]:
        key = next(reversed(self), None)
        return (key, self.pop(key)) if self else super().popitem()

    def copy(self) -> dict[Any, Any]:
        return self.kind(self)

    __copy__ = copy

    def __deepcopy__(self, memo: dict[int, Any]) -> dict[Any, Any]:
        return copy.deepcopy(self.copy(), memo)

    def __or__(self, other: Any) -> Any:
        return self.copy() | other

    def __ror__(self, other: Any) -> Any:
        return other | self.copy()

    def __eq__(self, other: object) -> bool:
        return self.copy() == (other.copy() if isinstance(other, LazyDict) else other)

    def __ne__(self, other: object) -> bool:
        return not self == other

    __hash__ = None

    def __reduce_ex__(self, protocol: Any) -> tuple[Any, ...]:
        return OrderedDict, (), None, None, iter(self.items())

    def __repr__(self) -> str:
        return f"LazyDict({super().__repr__()})"


@dataclass(eq=False)
class _Reading:
    """An open checkpoint, kept open as long as something of it is pending."""

    source: Source
    made: weakref.WeakValueDictionary[int, Any] = field(default_factory=weakref.WeakValueDictionary)
    """id of a lazy tensor to its torch tensor, for tied ones."""


@dataclass(frozen=True, slots=True, eq=False)
class _Pending:
    """An entry that has not been read."""

    read: Callable[[], Any]

    def __repr__(self) -> str:
        return "<not read>"


def _lazily(reading: _Reading, value: Value) -> Any:
    if isinstance(value, Mapping):
        lazy = LazyDict((key, _entry(reading, v)) for key, v in value.items())
        lazy.kind = OrderedDict if isinstance(value, OrderedDict) else dict
        return lazy
    return _sequence(reading, value, _lazily)


def _entry(reading: _Reading, value: Value) -> Any:
    """What a `LazyDict` holds for *value* at first."""
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    if isinstance(value, Mapping):
        return _lazily(reading, value)
    return _Pending(lambda: _lazily(reading, value))


def _plainly(reading: _Reading, value: Value) -> Any:
    if isinstance(value, Mapping):
        kind = OrderedDict if isinstance(value, OrderedDict) else dict
        return kind((key, _plainly(reading, v)) for key, v in value.items())
    return _sequence(reading, value, _plainly)


def _sequence(reading: _Reading, value: Value, convert: Callable[[_Reading, Value], Any]) -> Any:
    """Sequences by *convert*, tensors read, plain values as they are."""
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    if isinstance(value, (list, tuple)):
        return type(value)(convert(reading, v) for v in value)
    if isinstance(value, SetOf):
        return {convert(reading, v) for v in value.values}
    return _tensor(reading, value)


def _tensor(reading: _Reading, tensor: Tensor) -> Any:
    """The torch tensor; the same one again for a tied tensor."""
    found = reading.made.get(id(tensor))
    if found is None:
        reading.source.check()
        found = reading.made[id(tensor)] = to_torch(tensor, reading.source.path)
    return found
