"""Per-key metadata of format 0.5 turned into items. Nothing is unpickled, imported or called by name."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from ckptfs.errors import SourceError
from ckptfs.formats.cerebras.torchscript import REFUSAL, simple
from ckptfs.formats.files import checked_shape
from ckptfs.formats.hdf5.dataset import ConstantTensor, at_address, make_tensor, stored_as, stored_dtype
from ckptfs.formats.hdf5.index import H5Object, Index
from ckptfs.formats.source import Item
from ckptfs.tensors.cache import TileCache
from ckptfs.tensors.dtypes import DTYPES, DType

Fields = Mapping[str, Any]
_MARKED = ("bfloat16", "float8_e5m2", "float8_e4m3fn")
"""Element types that HDF5 lacks: an attribute marks them."""
Follow = Callable[[str, Fields], Item]
"""Makes the item of a key whose data are in another file."""


@dataclass(slots=True)
class Reading:
    """What the items of one checkpoint are made from, and what is collected on the way."""

    index: Index
    cache: TileCache
    follow: Follow
    items: dict[str, Item] = field(default_factory=dict)
    warnings: list[str] = field(default_factory=list)
    usual: dict[tuple[int, int], Item] = field(default_factory=dict)
    """A sound item of each kind, by the positions of its metadata and its dataset in the index."""


def make_items(reading: Reading, keys: list[str]) -> dict[str, Item]:
    """One item a key, in that order. Damage and refusals stay with their key: kind ``object`` or ``link``.

    Thousands of tensors share metadata and dataset in the index, and differ only in where their data are. The checks
    that the first one passed hold for all of them.
    """
    items, index, usual, unusual = reading.items, reading.index, reading.usual, []
    for key in keys:
        same = index.numbers(key)
        first = None if same is None else usual.get(same)
        if first is not None and first.tensor is not None:
            tensor = at_address(first.tensor, index, key, index.objects[key][1])
            if tensor is not None:
                items[key] = Item(key, first.kind, tensor=tensor)
                continue
        n_warnings = len(reading.warnings)
        item = items[key] = _item(reading, key)
        unusual.append(key)
        if same is not None and item.kind in ("tensor", "array") and len(reading.warnings) == n_warnings:
            usual[same] = item
    for key in unusual:
        if items[key].tied_to is not None:
            items[key] = tied(reading, key)
    for key in unusual:
        if items[key].reason is not None:
            reading.warnings.append(f"{key}: {items[key].reason}")
    return reading.items


def _item(reading: Reading, key: str) -> Item:
    found = reading.index.stored(key)
    if isinstance(found, str):
        return refused(key, found)
    try:
        names, fields = found
        outer = {f["__TYPE__"] for name, f in fields.items() if name not in names}
        if "DeferredGraphTensor" in outer:
            return _graph_item(reading, key, names, fields)
        if len(names) != 1:
            return refused(key, f"is stored as {len(names)} values")
        return value_item(reading, key, names[0], fields[names[0]])
    except (LookupError, TypeError, ValueError, AttributeError, OverflowError) as error:
        return refused(key, f"its metadata are broken ({type(error).__name__}: {error})")
    except SourceError as error:
        return refused(key, str(error).removeprefix(f"{reading.index.file.path}: "))


def _graph_item(reading: Reading, key: str, names: list[str], fields: Mapping[str, Fields]) -> Item:
    """A tensor that is computed from a stored one: shown where the computation is simple."""
    said = next(f for name, f in fields.items() if name not in names)
    argument = value_item(reading, key, names[0], fields[names[0]]).tensor if len(names) == 1 else None
    made = simple(said.get("jit_graph"), argument)
    if made is None or list(made.shape) != said["shape"] or f"torch.{made.dtype.name}" != said["dtype"]:
        return refused(key, REFUSAL, "DeferredGraphTensor")
    return Item(key, "tensor", tensor=made)


def value_item(reading: Reading, key: str, name: str, fields: Fields) -> Item:
    """The item of one stored value: *name* is its HDF5 path, *fields* its metadata."""
    kind = fields["__TYPE__"]
    if kind in ("TorchTensorSerializer", "NumpyArraySerializer"):
        return _array_item(reading, key, name, fields, kind == "TorchTensorSerializer")
    if kind == "ScalarSerializer":
        return scalar_item(key, fields["scalar_value"])
    if kind == "StringSerializer":
        return scalar_item(key, fields["string_value"])
    if kind == "NoneSerializer":
        return Item(key, "none")
    if kind == "LinkedObject":
        return Item(key, "link", tied_to=str(fields["key"]))
    if kind == "ObjectSerializer":
        return _object_item(reading, key, name)
    if kind == "DeferredFullTensor":
        return constant_item(reading, key, fields)
    if kind in ("DeferredNumpyArray", "DeferredObject", "DeferredFileTensor", "DeferredSafeTensor"):
        return reading.follow(key, fields)
    return refused(key, f"was written by an unknown serializer ({kind!r:.80})")


def refused(key: str, reason: str, class_name: str | None = None) -> Item:
    return Item(key, "object", reason=reason, class_name=class_name)


def scalar_item(key: str, value: object) -> Item:
    if isinstance(value, str):
        return Item(key, "string", value=value)
    if isinstance(value, (bool, int, float)):
        return Item(key, "scalar", value=value)
    return refused(key, f"its value is a {type(value).__name__}, not a number or text")


def _object_item(reading: Reading, key: str, name: str) -> Item:
    found = reading.index.get(name)
    pickle = found.attributes.get("__BYTES__") if found else None
    if not isinstance(pickle, dict):
        return refused(key, "its pickle is missing")
    class_name = pickle.get("class")
    reason = f"is a pickle of {pickle.get('nbytes')} bytes, which could run code; it is not loaded"
    return refused(key, reason, class_name if isinstance(class_name, str) else None)


def _array_item(reading: Reading, key: str, name: str, fields: Fields, is_tensor: bool) -> Item:
    found = reading.index.get(name)
    problem = "its dataset is missing" if found is None else found.problem
    if found is None or problem is not None:
        return Item(key, "link" if found and found.elsewhere else "object", reason=problem)
    if found.shape is None:
        return refused(key, "its dataset holds no data")
    dtype = _tensor_dtype(reading, key, found, fields) if is_tensor else array_dtype(found, fields)
    if isinstance(dtype, str):
        return refused(key, dtype)
    said = fields.get("shapes")
    if is_tensor and found.shape and said != [list(found.shape)]:
        reading.warnings.append(
            f"{key}: its metadata give the shape {said!r:.60}; it is shown as stored: {found.shape}"
        )
    tensor = make_tensor(reading.index, name, found, dtype, reading.cache)
    return Item(key, "tensor" if is_tensor else "array", tensor=tensor)


def array_dtype(found: H5Object, fields: Fields) -> DType | str:
    """The dtype of a numpy array (bfloat16 is stored as int16), or a text: why it cannot be shown."""
    for name in _MARKED:
        is_marked = found.attributes.get(f"is_{name}", fields.get(f"is_{name}"))
        if is_marked and stored_as(found, DTYPES[name]):
            return DTYPES[name]
    return stored_dtype(found) or f"its element type ({found.type}) cannot be shown"


def _tensor_dtype(reading: Reading, key: str, found: H5Object, fields: Fields) -> DType | str:
    """The dtype of a torch tensor, or a text: why it cannot be shown.

    The dataset's attribute overrides the JSON, as in the reference, and the stored element type overrides both.
    """
    said = _dtype_name(fields["dtypes"])
    if said not in DTYPES:
        return f"its dtype {said!r:.60} is not known"
    attribute = _dtype_name(found.attributes.get("dtypes") or [said])
    dtype = DTYPES.get(attribute)
    if dtype is None or not stored_as(found, dtype):
        dtype = stored_dtype(found)
    if dtype is None:
        return f"its element type ({found.type}) cannot be shown"
    if dtype.name != said:
        reading.warnings.append(f"{key}: its metadata give the dtype {said}; it is shown as stored: {dtype.name}")
    return dtype


def _dtype_name(names: Any) -> str:
    """``["torch.float32"]`` -> ``float32``."""
    name = names[0] if isinstance(names, list) else names
    return str(name).removeprefix("torch.")


def constant_item(reading: Reading, key: str, fields: Fields) -> Item:
    name = _dtype_name(fields["dtype"])
    if name not in DTYPES:
        return refused(key, f"its dtype {name!r:.60} is not known")
    dtype = DTYPES[name]
    value = fields["fill_value"]
    if value is None:
        value = 0
        reading.warnings.append(f"{key}: was never initialised; it is shown as zeros")
    if not isinstance(value, (bool, int, float)):
        return refused(key, f"its fill value is a {type(value).__name__}")
    element = np.array(value).astype(dtype.numpy) if isinstance(value, float) else np.array(value, dtype.numpy)
    shape = checked_shape(fields["shape"], dtype.itemsize)
    return Item(key, "tensor", tensor=ConstantTensor(dtype, shape, element.tobytes(), reading.index.file))


def tied(reading: Reading, key: str) -> Item:
    """The item of a tied key: that of the first key of its chain."""
    seen = {key}
    target = reading.items[key].tied_to
    while target is not None and target not in seen:
        seen.add(target)
        item = reading.items.get(target)
        if item is None:
            return Item(key, "link", reason=f"is tied to {target!r:.200}, which does not exist", target=target)
        if item.kind != "link" or item.tied_to is None:
            return Item(key, item.kind, item.tensor, item.value, target, item.class_name, item.reason, item.target)
        target = item.tied_to
    return Item(key, "link", reason="is tied to itself in a circle", target=target)
