"""HDF5 files for tests, written by h5py, and tensors over their datasets."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import h5py

from ckptfs.formats.hdf5.dataset import make_tensor, stored_dtype
from ckptfs.formats.hdf5.index import read_index
from ckptfs.formats.source import Source
from ckptfs.tensors.cache import TileCache
from ckptfs.tensors.tensor import Tensor
from tests.paths import DATA

DATA = DATA
LEAF = {"type": None, "context": None, "children_spec": []}


@contextmanager
def tensors_of(path: Path, cache: TileCache | None = None) -> Iterator[dict[str, Tensor]]:
    """Name to tensor for each numeric dataset of any HDF5 file."""
    index = read_index(path)
    source = Source(str(path), "hdf5", None, None, {}, files=[index.file])
    found = {}
    for name in index.objects:
        entry = index.get(name)
        dtype = stored_dtype(entry) if entry else None
        if entry is not None and dtype is not None and entry.shape is not None:
            found[name] = make_tensor(index, name, entry, dtype, cache or TileCache())
    yield found
    source.close()


def node(kind: str, context: object, *children: object) -> dict[str, Any]:
    """A node of a tree spec."""
    return {"type": kind, "context": json.dumps(context), "children_spec": list(children)}


def spec_text(root: object) -> str:
    """The text of a ``__spec__`` attribute."""
    return json.dumps([None, json.dumps([1, root])])


def write_checkpoint(
    path: Path, fields: Mapping[str, Any], spec: str | None = None, arrays: Mapping[str, Any] | None = None
) -> Path:
    """A checkpoint of format 0.5: *fields* holds each key's metadata, *arrays* the datasets."""
    names: Sequence[str] = list(fields)
    with h5py.File(path, "w") as file:
        file.attrs["__spec__"] = spec or spec_text(node("builtins.dict", names, *[LEAF for _ in names]))
        file.attrs["__version__"] = 0.5
        file.attrs["__cstorch_version__"] = "2.10.0"
        for name, array in (arrays or {}).items():
            file[name] = array
        for key, value in fields.items():
            text = {"__spec__": [], "__objects__": [key], f"{key}.__metadata__": value}
            file.attrs[f"{key}.__metadata__"] = json.dumps(text)
        file.attrs["__SUCCESS__"] = True
    return path


def scalar(value: object) -> dict[str, Any]:
    """Metadata of a Python number."""
    return {"scalar_value": value, "__TYPE__": "ScalarSerializer", "__NONE__": True}
