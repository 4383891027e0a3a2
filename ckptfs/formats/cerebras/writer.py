"""A Cerebras checkpoint (``.mdl``, format 0.5) as a file of extents: which datasets and attributes it has.

Tensors are stored whole and unfiltered where the real writer makes LZ4 chunks. So any byte can be made by itself, and
readers may map the data into memory. LZ4 saves nothing for trained weights. The reference reads values through libhdf5
and sees no difference. `lz4_writer` makes the chunks.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import lru_cache

from ckptfs.errors import UsageError
from ckptfs.formats.cerebras.state import MAX_SHOWN, RTFX, Flat, State, flatten, key_metadata, leaf_fields, refusal
from ckptfs.formats.extents import ExtentFile
from ckptfs.formats.hdf5 import writer as hdf5
from ckptfs.formats.hdf5.writer import Attribute, Dataset, DatasetKind
from ckptfs.formats.source import Item
from ckptfs.tensors.dtypes import DType
from ckptfs.tensors.tensor import Shape, Tensor

RELEASE = "2.10.0"
VERSION = 0.5
_MAX_KEY = hdf5.MAX_ATTRIBUTE_NAME - 16
"""Bytes of a key, which is part of an attribute's name."""


def mdl_file(state: State, *, release: str = RELEASE) -> ExtentFile:
    """The checkpoint of *state*, which `ckptfs.open`, h5py and ``cstorch.load`` read.

    *release* is what the file says wrote it. Tied keys are stored once. Named tuples become tuples. Needs about 2 KB of
    memory a key. Raises `UsageError`, naming the keys, for what the format cannot hold: refused objects, dtypes
    without a number, keys that collide or make no HDF5 path.
    """
    return hdf5.hdf5_file(plan_mdl(state, release=release))


def plan_mdl(state: State, *, release: str, lz4: bool = False) -> hdf5.Plan:
    """The HDF5 structures of the checkpoint; *lz4* and errors as in `hdf5.plan_file` and `mdl_file`."""
    flat = flatten(state)
    datasets = [
        Dataset(path, tensor, _kind(kind, tensor.dtype, tensor.shape)) for path, tensor, kind in _stored(state, flat)
    ]
    return hdf5.plan_file(datasets, _root_attributes(state, flat, release), lz4=lz4)


def _stored(state: State, flat: Flat) -> list[tuple[tuple[bytes, ...], Tensor, str]]:
    """(HDF5 path, tensor, kind of item) of each dataset, in order; `UsageError` naming all keys that cannot be."""
    problems = []
    found: dict[tuple[bytes, ...], tuple[Tensor, str]] = {}
    inner: set[tuple[bytes, ...]] = set()
    for key, name in flat.keys:
        item = state.items[name]
        why = refusal(item) or _bad_key(key)
        if why is None and item.tensor is not None and _tied(item, key, flat) is None:
            path = _path(key)
            if not path or key.endswith("/"):
                why = "the key of a tensor must not be empty or end in a slash"
            elif path in found or path in inner or _prefixes(path) & found.keys():
                why = "HDF5 cannot hold it: another key has its path, or a part of its path"
            else:
                found[path] = item.tensor, item.kind
                inner |= _prefixes(path)
        if why is not None:
            problems.append(f"{key!r:.200}: {why}")
    if problems:
        more = [f"and {len(problems) - MAX_SHOWN} more"] if len(problems) > MAX_SHOWN else []
        raise UsageError(f"cannot be written as a Cerebras checkpoint: {'; '.join(problems[:MAX_SHOWN] + more)}")
    return [(path, tensor, kind) for path, (tensor, kind) in found.items()]


def _bad_key(key: str) -> str | None:
    if "\0" in key:
        return "a key must not contain NUL"
    if any("\ud800" <= char <= "\udfff" for char in key):
        return "a key must be valid Unicode"
    return "the key is longer than HDF5 allows" if len(key.encode()) > _MAX_KEY else None


def _path(key: str) -> tuple[bytes, ...]:
    """The components that HDF5 sees: slashes make groups, empty components and "." mean nothing, ".." is a name."""
    return tuple(part.encode() for part in key.split("/") if part not in ("", "."))


def _prefixes(path: tuple[bytes, ...]) -> set[tuple[bytes, ...]]:
    return {path[:i] for i in range(1, len(path))}


def _tied(item: Item, key: str, flat: Flat) -> str | None:
    """The key in the file whose value *key* shares, None when it has its own."""
    if item.tied_to is None:
        return None
    first = flat.first.get(item.tied_to)
    return first if first != key else None


def _root_attributes(state: State, flat: Flat, release: str) -> Iterable[Attribute]:
    yield hdf5.text_attribute(b"__spec__", flat.spec)
    yield hdf5.float_attribute(b"__version__", [VERSION])
    yield hdf5.text_attribute(b"__cstorch_version__", release)
    for key, name in flat.keys:
        item = state.items[name]
        text = key_metadata(key, leaf_fields(item, _tied(item, key, flat)))
        yield hdf5.text_attribute(f"{key}.__metadata__".encode(), text)
    yield hdf5.flag_attribute(b"__SUCCESS__", True)


@lru_cache(maxsize=1024)
def _kind(kind: str, dtype: DType, shape: Shape) -> DatasetKind:
    return DatasetKind(dtype, shape, tuple(_dataset_attributes(kind, dtype, shape)))


def _dataset_attributes(kind: str, dtype: DType, shape: Shape) -> Iterable[Attribute]:
    """The attributes of a dataset, as the real writer has them."""
    if kind == "array":
        yield hdf5.flag_attribute(b"is_bfloat16", dtype.name == "bfloat16")
    else:
        yield hdf5.flag_attribute(b"__TORCH__", True)
        # numpy makes float64 of an empty list
        yield (hdf5.int_attribute if shape else hdf5.float_attribute)(b"shapes", shape, (1, len(shape)))
        yield hdf5.text_attribute(b"dtypes", f"torch.{dtype.name}", (1,))
        yield hdf5.int_attribute(b"rtfx_dtypes", [RTFX[dtype.name]], (1,))
    yield hdf5.text_attribute(b"__TYPE__", "NumpyArraySerializer" if kind == "array" else "TorchTensorSerializer")
    yield hdf5.flag_attribute(b"compressed", False)
    yield hdf5.flag_attribute(b"__NUMPY__", True)
