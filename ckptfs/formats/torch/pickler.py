"""The pickle of a state dict, in the form that ``torch.save`` writes: protocol 2, tensors as views of storages.

A tensor is ``torch._utils._rebuild_tensor_v2(storage, 0, shape, strides, False, OrderedDict())``; its storage is the
persistent id ``("storage", torch.FloatStorage, "<n>", "cpu", elements)``. Element types that are younger than
torch's storage classes take ``_rebuild_tensor_v3``, an ``UntypedStorage`` (counted in bytes) and the dtype itself.
Everything is of a kind that ``torch.load(weights_only=True)`` accepts, in older releases of torch but for sets and
uint16, uint32 and uint64.
"""

from __future__ import annotations

import struct
from collections import OrderedDict
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from ckptfs.formats.nested import SetOf, Value, not_shown
from ckptfs.tensors.dtypes import DTYPES
from ckptfs.tensors.tensor import Shape, Tensor

WITHOUT_STORAGE = frozenset({"uint16", "uint32", "uint64", "float8_e4m3fn", "float8_e5m2"})
"""Element types without a storage class of their own in torch."""
MAX_INT_BYTES = 255
"""Longest integer that ``weights_only`` reads."""

_MARK, _TUPLE, _REDUCE, _PERSISTENT = b"(", b"t", b"R", b"Q"
_EMPTY_TUPLE, _EMPTY_LIST, _EMPTY_DICT = b")", b"]", b"}"
_APPENDS, _SETITEMS = b"e", b"u"
_FALSE, _TRUE, _NONE = b"\x89", b"\x88", b"N"


@dataclass(slots=True)
class _Stream:
    """The pickle so far. A global is spelled once; later uses take it from the memo."""

    stored_nbytes: Callable[[Tensor], int]
    out: bytearray = field(default_factory=bytearray)
    memo: dict[str, int] = field(default_factory=dict)
    storages: dict[int, tuple[int, Tensor]] = field(default_factory=dict)
    """id of a tensor to its storage's number and itself."""


def pickle_state(state: Value, stored_nbytes: Callable[[Tensor], int]) -> tuple[bytes, list[Tensor]]:
    """The pickle of *state*, and the tensors of its storages 0, 1, 2, …, in the order of first use.

    *stored_nbytes* says how many bytes a tensor's storage has; the tensor is its beginning. The same tensor object
    in two places is one storage.
    """
    stream = _Stream(stored_nbytes)
    stream.out += b"\x80\x02"
    _write(stream, state)
    stream.out += b"."
    return bytes(stream.out), [tensor for _, tensor in stream.storages.values()]


def _write(stream: _Stream, value: Value) -> None:
    if value is None or isinstance(value, (bool, int, float, str)):
        stream.out += _plain(value)
    elif isinstance(value, Mapping):
        _write_dict(stream, value)
    elif isinstance(value, (list, tuple, SetOf)):
        _write_sequence(stream, value)
    else:
        _write_tensor(stream, value)


def _write_dict(stream: _Stream, values: Mapping[Value, Value]) -> None:
    if isinstance(values, OrderedDict):
        _write_empty_ordered_dict(stream)
    else:
        stream.out += _EMPTY_DICT
    stream.out += _MARK
    for key, value in values.items():
        stream.out += _plain(key)
        _write(stream, value)
    stream.out += _SETITEMS


def _write_sequence(stream: _Stream, values: list[Value] | tuple[Value, ...] | SetOf) -> None:
    if isinstance(values, SetOf):
        _write_global(stream, "__builtin__", "set")
        stream.out += _MARK
        _write_sequence(stream, list(values.values))
        stream.out += _TUPLE + _REDUCE
        return
    is_tuple = isinstance(values, tuple)
    stream.out += _MARK if is_tuple else _EMPTY_LIST + _MARK
    for value in values:
        _write(stream, value)
    stream.out += _TUPLE if is_tuple else _APPENDS


def _write_tensor(stream: _Stream, tensor: Tensor) -> None:
    name = tensor.dtype.name
    untyped = name in WITHOUT_STORAGE
    _write_global(stream, "torch._utils", "_rebuild_tensor_v3" if untyped else "_rebuild_tensor_v2")
    stream.out += _MARK
    _write_storage(stream, tensor, untyped)
    stream.out += _plain(0) + _sizes(tensor.shape) + _sizes(strides(tensor.shape)) + _FALSE
    _write_empty_ordered_dict(stream)
    if untyped:
        _write_global(stream, "torch", name)
    stream.out += _TUPLE + _REDUCE


def _write_storage(stream: _Stream, tensor: Tensor, untyped: bool) -> None:
    number, _ = stream.storages.setdefault(id(tensor), (len(stream.storages), tensor))
    stream.out += _MARK + _plain("storage")
    if untyped:
        _write_global(stream, "torch.storage", "UntypedStorage")
    else:
        _write_global(stream, "torch", DTYPES[tensor.dtype.name].storage or "")
    n = stream.stored_nbytes(tensor) // (1 if untyped else tensor.dtype.itemsize)
    stream.out += _plain(str(number)) + _plain("cpu") + _plain(n) + _TUPLE + _PERSISTENT


def _write_empty_ordered_dict(stream: _Stream) -> None:
    _write_global(stream, "collections", "OrderedDict")
    stream.out += _EMPTY_TUPLE + _REDUCE


def _write_global(stream: _Stream, module: str, name: str) -> None:
    full = f"c{module}\n{name}\n"
    known = stream.memo.get(full)
    if known is None:
        known = stream.memo[full] = len(stream.memo)
        stream.out += full.encode() + b"q" + bytes([known])  # BINPUT; there are some twenty globals
    else:
        stream.out += b"h" + bytes([known])


def _plain(value: object) -> bytes:
    """None, a truth value, a number or a text."""
    if value is None:
        return _NONE
    if isinstance(value, bool):
        return _TRUE if value else _FALSE
    if isinstance(value, int):
        return _integer(value)
    if isinstance(value, float):
        return b"G" + struct.pack(">d", value)
    text = str(value).encode("utf-8", "surrogatepass")
    return b"X" + struct.pack("<I", len(text)) + text


def _integer(value: int) -> bytes:
    if 0 <= value < 256:
        return b"K" + bytes([value])
    if -(1 << 31) <= value < 1 << 31:
        return b"J" + struct.pack("<i", value)
    n = value.bit_length() // 8 + 1
    if n > MAX_INT_BYTES:
        return _plain(not_shown(f"an integer of {value.bit_length()} bits, more than torch.load reads"))
    return b"\x8a" + bytes([n]) + value.to_bytes(n, "little", signed=True)


def _sizes(sizes: Shape) -> bytes:
    return _MARK + b"".join(map(_integer, sizes)) + _TUPLE if sizes else _EMPTY_TUPLE


def strides(shape: Shape) -> Shape:
    """Elements from one index to the next on each axis, in C order, as torch counts them (an empty axis as 1)."""
    found: list[int] = []
    step = 1
    for size in reversed(shape):
        found.append(step)
        step *= max(size, 1)
    return tuple(reversed(found))
