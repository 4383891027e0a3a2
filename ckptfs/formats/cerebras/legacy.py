"""Checkpoints of formats 0.1 to 0.4 (releases 1.7 to 2.4): the attributes of a dataset say what it holds.

The tree spec is in `legacy_spec`. A dataset's name is its flattened key, percent-quoted with no safe characters.

==============================================  ==================================================================
attribute ``__H5_TYPE__`` (release 1.9 on)      the dataset
==============================================  ==================================================================
TorchTensorH5Type                               array; ``is_bfloat16``: bfloat16 as int16
NumpyArrayH5Type                                the same; a torch tensor too before format 0.4
ScalarH5Type                                    0-d; its type says whether int, float or bool
StringH5Type, NoneH5Type                        null; ``string_value``, ``string_shape`` (`flat`)
ObjectH5Type, ApplianceInfoH5Type               null; ``object_value``, a pickle in hexadecimal: refused
DeferredH5Tensor                                null; ``key`` in this file (``link_to_self``) or in ``filepath``
StoredTensorH5Type                              the same when it has a ``key``, otherwise an array
DeferredFileTensor, StoredApplianceTensorH5Type null; ``filepath``, ``shape``, ``dtype`` (a pickle in hexadecimal)
DeferredFullTensor, FullTensorH5Type            0-d, gives the type; ``shape``, ``fill_value``
DeferredGraphTensor                             TorchScript: simple graphs are evaluated, others refused
==============================================  ==================================================================

Without that attribute (1.7, 1.8), in this order: ``filepath``, ``is_constructible``, ``is_none``, ``is_string`` with
``string_val``, ``is_scalar``; otherwise an array.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from urllib.parse import quote, unquote

import numpy as np

from ckptfs.errors import SourceError
from ckptfs.formats.cerebras.items import Reading, array_dtype, constant_item, refused, scalar_item, tied
from ckptfs.formats.cerebras.torchscript import REFUSAL, simple
from ckptfs.formats.files import checked_shape
from ckptfs.formats.hdf5.dataset import make_tensor, stored_dtype
from ckptfs.formats.hdf5.index import H5Object, Index
from ckptfs.formats.source import Item
from ckptfs.formats.torch.globals import Global
from ckptfs.formats.torch.unpickler import unpickle
from ckptfs.tensors.tensor import Shape

FIRST_VERSION = 0.1
"""What a file without ``__version__`` has."""
_ARRAYS_SINCE = 0.4
_MAX_DTYPE_PICKLE = 4096


@dataclass(frozen=True, slots=True)
class _Entry:
    """One dataset on its way to an item."""

    reading: Reading
    version: float
    key: str
    name: str
    """The dataset's, quoted."""
    found: H5Object


def make_legacy_items(reading: Reading, keys: list[str], version: float) -> dict[str, Item]:
    """One item a key, in that order. Damage and refusals stay with their key; a key without a dataset is None."""
    items, missing = reading.items, []
    for key in keys:
        item = _stored_item(reading, key, _quoted(key), version)
        if item is None:
            missing.append(key)
        items[key] = item or Item(key, "none")
    for key in keys:
        if items[key].kind == "link" and items[key].tied_to is not None:
            items[key] = _linked(reading, key, version)
    _tie_hard_links(reading)
    if missing:
        reading.warnings.insert(0, _missing_warning(missing, len(keys)))
    reading.warnings += [f"{item.key}: {item.reason}" for item in items.values() if item.reason is not None]
    return items


def flat_keys(index: Index) -> list[str]:
    """Keys of the typed datasets of a file that has no tree spec, in the order of their names."""
    keys = []
    for name in index.objects:
        found = index.get(name)
        key = unquote(name)
        if found is not None and "__H5_TYPE__" in found.attributes and _quoted(key) == name:
            keys.append(key)
    return keys


def _quoted(key: str) -> str:
    """The name of a key's dataset. Only a damaged file has lone surrogates; they match no dataset."""
    return quote(key, safe="", errors="surrogatepass")


def item_of_other_file(reading: Reading, key: str, name: str) -> Item:
    """The item of *key* as the dataset *name* of another checkpoint has it; one level of links, as in 0.5."""
    version = reading.index.attributes.get("__version__", FIRST_VERSION)
    item = _stored_item(reading, key, name, version if isinstance(version, float) else FIRST_VERSION)
    if item is None:
        return Item(key, "link", reason="its dataset is missing")
    return Item(key, "link", reason="its link leads to another link") if item.tied_to is not None else item


def _missing_warning(missing: list[str], n_keys: int) -> str:
    shown = ", ".join(missing[:8]) + (f" and {len(missing) - 8} more" if len(missing) > 8 else "")
    return f"{len(missing)} of {n_keys} keys have no data and are None; perhaps the save was interrupted: {shown}"


def _stored_item(reading: Reading, key: str, name: str, version: float) -> Item | None:
    try:
        found = reading.index.get(name)
        if found is None:
            return None
        if found.problem is not None:
            return Item(key, "link" if found.elsewhere else "object", reason=found.problem)
        entry = _Entry(reading, version, key, name, found)
        kind = found.attributes.get("__H5_TYPE__")
        if kind is None:
            return _untyped(entry)
        make = _MAKERS.get(str(kind))
        return make(entry) if make else refused(key, f"has an unknown type ({kind!r:.80})")
    except (LookupError, TypeError, ValueError, AttributeError, OverflowError) as error:
        return refused(key, f"its attributes are broken ({type(error).__name__}: {error})")
    except SourceError as error:
        return refused(key, str(error).removeprefix(f"{reading.index.file.path}: "))
    except OSError as error:
        return refused(key, f"cannot be read ({error})")


def _untyped(entry: _Entry) -> Item:
    said = entry.found.attributes
    if "filepath" in said:
        return _file(entry)
    if said.get("is_constructible"):
        return _full(entry)
    if said.get("is_none"):
        return Item(entry.key, "none")
    if said.get("is_string"):
        return scalar_item(entry.key, said["string_val"])
    return _scalar(entry) if said.get("is_scalar") else _tensor(entry)


def _tensor(entry: _Entry) -> Item:
    return _array(entry, is_tensor=True)


def _numpy_array(entry: _Entry) -> Item:
    return _array(entry, is_tensor=entry.version < _ARRAYS_SINCE)


def _array(entry: _Entry, *, is_tensor: bool) -> Item:
    if entry.found.shape is None:
        return refused(entry.key, "its dataset holds no data")
    dtype = array_dtype(entry.found, {})
    if isinstance(dtype, str):
        return refused(entry.key, dtype)
    tensor = make_tensor(entry.reading.index, entry.name, entry.found, dtype, entry.reading.cache)
    return Item(entry.key, "tensor" if is_tensor else "array", tensor=tensor)


def _scalar(entry: _Entry) -> Item:
    dtype = stored_dtype(entry.found)
    if entry.found.shape != () or dtype is None:
        return refused(entry.key, f"is not a number: its dataset has shape {entry.found.shape} and no numeric type")
    word = np.empty((1, 1), dtype.storage_dtype)
    make_tensor(entry.reading.index, entry.name, entry.found, dtype, entry.reading.cache).read_block(0, 0, word)
    return scalar_item(entry.key, word.view(dtype.numpy)[0, 0].item())


def _string(entry: _Entry) -> Item:
    said = entry.found.attributes
    shape = said.get("string_shape")
    if shape is None:
        return scalar_item(entry.key, said["string_value"])
    value, sizes = json.loads(said["string_value"]), checked_shape(list(shape), 1)
    if not _is_texts(value, sizes):
        return refused(entry.key, f"its strings do not have the shape {sizes}")
    return Item(entry.key, "string", value=value, shape=sizes or None)


def _is_texts(value: object, shape: Shape) -> bool:
    """Whether *value* is lists of texts of that *shape*."""
    if not shape:
        return isinstance(value, str)
    return isinstance(value, list) and len(value) == shape[0] and all(_is_texts(v, shape[1:]) for v in value)


def _object(entry: _Entry) -> Item:
    pickle = entry.found.attributes.get("object_value")
    if not isinstance(pickle, dict):
        return refused(entry.key, "its pickle is missing")
    class_name = pickle.get("class")
    reason = f"is a pickle of {pickle.get('nbytes')} bytes, which could run code; it is not loaded"
    return refused(entry.key, reason, class_name if isinstance(class_name, str) else None)


def _full(entry: _Entry) -> Item:
    dtype = array_dtype(entry.found, {})
    if isinstance(dtype, str):
        return refused(entry.key, dtype)
    said = entry.found.attributes
    fields = {"dtype": dtype.name, "shape": said["shape"], "fill_value": said.get("fill_value")}
    return constant_item(entry.reading, entry.key, fields)


def _file(entry: _Entry) -> Item:
    said = entry.found.attributes
    pickle = bytes.fromhex(said["dtype"][:_MAX_DTYPE_PICKLE])
    dtype = unpickle(pickle, entry.reading.index.file.path).value
    if not isinstance(dtype, Global) or dtype.dtype is None:
        return refused(entry.key, "its dtype is not known")
    fields = {"filepath": said["filepath"], "shape": said["shape"], "dtype": dtype.dtype.name}
    return entry.reading.follow(entry.key, {**fields, "__TYPE__": "DeferredFileTensor"})


def _link(entry: _Entry) -> Item:
    said = entry.found.attributes
    if said.get("link_to_self"):
        return Item(entry.key, "link", tied_to=unquote(str(said["key"])))
    fields = {"path": said["filepath"], "key": said["key"], "__TYPE__": "DeferredH5Tensor"}
    return entry.reading.follow(entry.key, fields)


def _stored(entry: _Entry) -> Item:
    return _link(entry) if "key" in entry.found.attributes else _tensor(entry)


def _graph(entry: _Entry) -> Item:
    """The only argument of a simple graph is a dataset of its own, which the spec does not name."""
    said, first = entry.found.attributes, f"__{entry.name}.arg_"
    alone = entry.reading.index.get(f"{first}1") is None
    argument = _stored_item(entry.reading, entry.key, f"{first}0", entry.version) if alone else None
    made = simple(said.get("jit_graph"), argument.tensor if argument else None)
    if made is None or list(made.shape) != said.get("shape"):
        return refused(entry.key, REFUSAL, "DeferredGraphTensor")
    return Item(entry.key, "tensor", tensor=made)


_MAKERS: Mapping[str, Callable[[_Entry], Item]] = {
    "TorchTensorH5Type": _tensor,
    "NumpyArrayH5Type": _numpy_array,
    "ScalarH5Type": _scalar,
    "StringH5Type": _string,
    "NoneH5Type": lambda entry: Item(entry.key, "none"),
    "ObjectH5Type": _object,
    "ApplianceInfoH5Type": _object,
    "DeferredH5Tensor": _link,
    "StoredTensorH5Type": _stored,
    "DeferredFileTensor": _file,
    "StoredApplianceTensorH5Type": _file,
    "DeferredFullTensor": _full,
    "FullTensorH5Type": _full,
    "DeferredGraphTensor": _graph,
}


def _linked(reading: Reading, key: str, version: float) -> Item:
    """The item of a link inside the file; its target may be a dataset that the tree spec does not name."""
    target = reading.items[key].tied_to
    if target is None or target in reading.items:
        return tied(reading, key)
    item = _stored_item(reading, key, _quoted(target), version)
    if item is None or item.tied_to is not None:
        return tied(reading, key)
    return item


def _tie_hard_links(reading: Reading) -> None:
    """Two names of one HDF5 object are one tensor: what the appliance writes for tied weights."""
    first: dict[tuple[int, int], str] = {}
    for key, item in reading.items.items():
        place = reading.index.objects.get(_quoted(key))
        # [position in records, address of the data]; without data there is no address
        if item.tensor is None or item.tied_to is not None or not isinstance(place, list):
            continue
        if type(place[1]) is not int or place[1] < 0:
            continue
        original = first.setdefault((place[0], place[1]), key)
        if original != key:
            reading.items[key] = Item(key, item.kind, reading.items[original].tensor, tied_to=original)
