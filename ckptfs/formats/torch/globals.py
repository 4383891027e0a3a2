"""The globals that a torch pickle may name, and the plain data that ckptfs makes instead.

Nothing here is the real class or function: each row of `GLOBALS` has a small function of ours, or none.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TypeGuard

from ckptfs.formats.files import checked_shape
from ckptfs.tensors.dtypes import BY_STORAGE, DTYPES, DType
from ckptfs.tensors.file_tensor import extent
from ckptfs.tensors.tensor import Shape

MAX_ARGS = 8
"""What ``_rebuild_tensor_v3`` takes; nothing takes more."""


@dataclass(frozen=True, slots=True)
class Storage:
    """A torch storage: *n_elements* of *dtype* under *name* (``data/<name>`` in a zip). Untyped ones are uint8."""

    name: str
    dtype: DType
    n_elements: int
    typed: bool = True


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """A view of a storage; *offset* and *strides* in elements. It has been checked to lie inside the storage."""

    storage: Storage
    dtype: DType
    offset: int
    shape: Shape
    strides: Shape


@dataclass(slots=True)
class Box:
    """A container as the pickle fills it: *type* like `source.Node`'s; *keys* for dicts, one for each value."""

    type: str
    keys: list[object] | None
    values: list[object] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class Opaque:
    """A harmless value that is neither data nor a container, such as a ``torch.device``."""

    class_name: str


@dataclass(frozen=True, slots=True)
class Global:
    """An accepted global. *build* makes plain data of REDUCE's arguments; None for what cannot be called."""

    name: str
    build: Callable[[tuple[object, ...]], object] | None = None
    storage: DType | None = None
    """Element type of a storage class."""
    dtype: DType | None = None
    """The dtype that the global is (``torch.uint16``)."""


def extend(box: Box, keys: list[object], values: list[object]) -> None:
    """Put entries into a dict; ValueError when *box* is not a dict. Later entries do not replace earlier ones."""
    if box.keys is None:
        raise ValueError("keys for a container that has none")
    if len(keys) != len(values):
        raise ValueError("a key without a value")
    box.keys += keys
    box.values += values


def is_size(value: object) -> TypeGuard[int]:
    """Whether *value* is an integer >= 0."""
    return type(value) is int and value >= 0


def _tensor(args: tuple[object, ...], dtype: DType | None = None) -> StoredTensor:
    """``_rebuild_tensor_v2(storage, offset, size, stride, requires_grad, hooks, metadata)``."""
    if len(args) < 4 or not isinstance(args[0], Storage):
        raise ValueError("a tensor is not made of a storage")
    storage, offset, strides = args[0], args[1], args[3]
    if dtype is None:
        dtype = storage.dtype
        if not storage.typed:
            raise ValueError("a tensor of an untyped storage has no dtype")
    shape = checked_shape(args[2], dtype.itemsize)
    if not isinstance(strides, tuple) or len(strides) != len(shape):
        raise ValueError(f"a tensor has {len(shape)} axes, but not as many strides")
    if not is_size(offset) or not all(is_size(stride) for stride in strides):
        raise ValueError("a tensor's offset or strides are not integers from 0 on")
    if len(args) > 6 and isinstance(args[6], Box) and any(flag is not False for flag in args[6].values[:8]):
        raise ValueError("a tensor is a conjugate or negative view; save it after resolve_conj().resolve_neg()")
    n_elements = storage.n_elements * storage.dtype.itemsize // dtype.itemsize
    stop = offset + extent(shape, strides)
    if stop > n_elements:
        raise ValueError(f"a tensor needs {stop} elements of storage {storage.name[:100]!r}, which has {n_elements}")
    return StoredTensor(storage, dtype, offset, shape, strides)


def _tensor_v3(args: tuple[object, ...]) -> StoredTensor:
    """``_rebuild_tensor_v3(storage, offset, size, stride, requires_grad, hooks, dtype, metadata)``."""
    if len(args) < 7 or not isinstance(args[6], Global) or args[6].dtype is None:
        raise ValueError("a tensor's dtype is missing")
    return _tensor((*args[:6], *args[7:8]), args[6].dtype)


def _parameter(args: tuple[object, ...]) -> StoredTensor:
    """``_rebuild_parameter(data, requires_grad, hooks[, state])``."""
    if not args or not isinstance(args[0], StoredTensor):
        raise ValueError("a parameter is not made of a tensor")
    return args[0]


def _typed(args: tuple[object, ...]) -> object:
    """``_rebuild_from_type_v2(function, type, args, state)``: a Parameter with attributes, which are left out."""
    if len(args) < 3 or not isinstance(args[0], Global) or args[0].build is None or not isinstance(args[2], tuple):
        raise ValueError("a tensor with attributes has wrong arguments")
    if args[0].build is _typed or len(args[2]) > MAX_ARGS:
        raise ValueError("a tensor with attributes is made of another one")
    return args[0].build(args[2])


def _dict_of(kind: str) -> Callable[[tuple[object, ...]], Box]:
    """Makes an empty dict, or one of another dict or a list of pairs. A defaultdict's factory is left out."""

    def build(args: tuple[object, ...]) -> Box:
        made = Box(kind, [])
        for arg in args:
            if isinstance(arg, Box) and arg.keys is not None:
                extend(made, arg.keys, arg.values)
            elif isinstance(arg, Box):
                pairs = [_pair(value) for value in arg.values]
                extend(made, [key for key, _ in pairs], [value for _, value in pairs])
            elif not isinstance(arg, Global) and arg is not None:
                raise ValueError("a dict has wrong arguments")
        return made

    return build


def _pair(value: object) -> tuple[object, object]:
    both = value.values if isinstance(value, Box) else value
    if not isinstance(both, (list, tuple)) or len(both) != 2:
        raise ValueError("a dict is not made of a list of pairs")
    return both[0], both[1]


def _list_of(kind: str) -> Callable[[tuple[object, ...]], Box]:
    """Makes a container of at most one list, set or tuple."""

    def build(args: tuple[object, ...]) -> Box:
        arg = args[0] if args else ()
        if isinstance(arg, Box) and arg.keys is None:
            return Box(kind, None, arg.values)
        if not isinstance(arg, tuple):
            raise ValueError(f"a {kind} is not made of a list")
        return Box(kind, None, list(arg))

    return build


def _size(args: tuple[object, ...]) -> object:
    """``torch.Size((…))``."""
    if len(args) != 1 or not isinstance(args[0], tuple):
        raise ValueError("a torch.Size is not made of a tuple")
    return args[0]


def _encode(args: tuple[object, ...]) -> bytes:
    """``_codecs.encode(text, "latin1")``: how protocol 2 writes bytes."""
    if len(args) != 2 or not isinstance(args[0], str) or args[1] != "latin1":
        raise ValueError("bytes are not made of latin-1 text")
    return args[0].encode("latin-1")


def _no_bytes(args: tuple[object, ...]) -> bytes:
    """``bytes()``: how protocol 2 writes b""."""
    if args:
        raise ValueError("bytes() has arguments")
    return b""


def _table() -> dict[tuple[str, str], Global]:
    rows = [
        Global("collections.OrderedDict", _dict_of("OrderedDict")),
        Global("collections.defaultdict", _dict_of("dict")),
        Global("collections.deque", _list_of("deque")),
        Global("torch._utils._rebuild_tensor", _tensor),
        Global("torch._utils._rebuild_tensor_v2", _tensor),
        Global("torch._utils._rebuild_tensor_v3", _tensor_v3),
        Global("torch._utils._rebuild_parameter", _parameter),
        Global("torch._utils._rebuild_parameter_with_state", _parameter),
        Global("torch._tensor._rebuild_from_type_v2", _typed),
        Global("torch.nn.parameter.Parameter"),
        Global("torch.Tensor"),
        Global("torch.Size", _size),
        Global("torch.device", lambda _: Opaque("torch.device")),
        Global("torch.storage.UntypedStorage", storage=DTYPES["uint8"]),
        Global("_codecs.encode", _encode),
    ]
    for module in ("builtins", "__builtin__"):
        rows += [Global(f"{module}.bytes", _no_bytes)]
        rows += [Global(f"{module}.dict", _dict_of("dict")), Global(f"{module}.list", _list_of("list"))]
        rows += [Global(f"{module}.{name}", _list_of("set")) for name in ("set", "frozenset")]
    rows += [Global(f"torch.{name}", storage=dtype) for name, dtype in BY_STORAGE.items()]
    rows += [Global(f"torch.{name}", dtype=dtype) for name, dtype in DTYPES.items()]
    return {(row.name.rpartition(".")[0], row.name.rpartition(".")[2]): row for row in rows}


GLOBALS = _table()
"""(module, name) of everything that a pickle may name."""
