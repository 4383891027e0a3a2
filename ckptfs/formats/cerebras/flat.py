"""HDF5 files without a tree spec: one dataset a variable, as converters from TensorFlow write them.

=====================  ===============================================================================================
part                   content
=====================  ===============================================================================================
name of a dataset      the variable's, percent-quoted with no safe characters: ``gpt2%2Fkernel``
``__H5_TYPE__``        ``NumpyArrayH5Type``, or ``StringH5Type``
``is_bfloat16``        True for bfloat16, which is stored as int16; so ``is_float8_e5m2``, ``is_float8_e4m3fn`` (uint8)
``string_value``       of a StringH5Type, whose dataset is empty: the text, or JSON
``string_shape``       there where ``string_value`` is JSON: lists of texts of that shape, or one text for ()
=====================  ===============================================================================================

No source of the original converter is public: this is ckptfs's own reading of it, after the writer of releases 1.7 to
2.4, which shares its code. `legacy` reads it.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping
from functools import lru_cache
from urllib.parse import quote

from ckptfs.errors import UsageError
from ckptfs.formats.cerebras.state import MAX_SHOWN
from ckptfs.formats.extents import ExtentFile
from ckptfs.formats.hdf5 import writer as hdf5
from ckptfs.formats.hdf5.writer import Attribute, Dataset, DatasetKind, Write
from ckptfs.formats.source import Item
from ckptfs.tensors.dtypes import DTYPES, DType
from ckptfs.tensors.generated import constant
from ckptfs.tensors.tensor import Shape

_FLOAT8 = ("float8_e5m2", "float8_e4m3fn")
_MAX_NAME = 60_000
_MAX_NDIM = 32


def flat_file(items: Mapping[str, Item]) -> ExtentFile:
    """The file of *items*, its data contiguous. Raises `UsageError`, naming the keys, for what it cannot hold."""
    return hdf5.hdf5_file(_plan(items, lz4=False))


def write_flat_lz4(items: Mapping[str, Item], write: Write, *, progress: Callable[[int], object] | None = None) -> None:
    """Write the same with LZ4 chunks. Raises what `flat_file` raises."""
    hdf5.write_lz4_chunks(_plan(items, lz4=True), write, progress=progress)


def _plan(items: Mapping[str, Item], *, lz4: bool) -> hdf5.Plan:
    problems = [f"{key!r:.200}: {why}" for key, item in items.items() if (why := _refusal(key, item)) is not None]
    if problems:
        more = [f"and {len(problems) - MAX_SHOWN} more"] if len(problems) > MAX_SHOWN else []
        raise UsageError(f"cannot be written as HDF5: {'; '.join(problems[:MAX_SHOWN] + more)}")
    return hdf5.plan_file([_dataset(key, item) for key, item in items.items()], [], lz4=lz4)


def _refusal(key: str, item: Item) -> str | None:
    if key in ("", ".", "..") or any("\ud800" <= char <= "\udfff" for char in key):
        return "HDF5 cannot hold the name"
    if len(quote(key, safe="")) > _MAX_NAME:
        return "the name is longer than HDF5 allows"
    if item.tensor is not None:
        return f"HDF5 has at most {_MAX_NDIM} dimensions" if len(item.tensor.shape) > _MAX_NDIM else None
    return None if item.kind == "string" else item.reason or f"there is no value to write ({item.kind})"


def _dataset(key: str, item: Item) -> Dataset:
    path = (quote(key, safe="").encode(),)
    if item.tensor is None:
        kind = DatasetKind(DTYPES["uint8"], (0,), tuple(_string_attributes(item)))
        return Dataset(path, _NOTHING, kind)
    return Dataset(path, item.tensor, _array_kind(item.tensor.dtype, item.tensor.shape))


@lru_cache(maxsize=1024)
def _array_kind(dtype: DType, shape: Shape) -> DatasetKind:
    flags = [hdf5.flag_attribute(b"is_bfloat16", dtype.name == "bfloat16")]
    if dtype.name in _FLOAT8:
        flags.append(hdf5.flag_attribute(f"is_{dtype.name}".encode(), True))
    return DatasetKind(dtype, shape, (hdf5.text_attribute(b"__H5_TYPE__", "NumpyArrayH5Type"), *flags))


def _string_attributes(item: Item) -> Iterable[Attribute]:
    value = item.value
    yield hdf5.text_attribute(b"__H5_TYPE__", "StringH5Type")
    # a text attribute ends at NUL and must be UTF-8
    if isinstance(value, str) and "\0" not in value and not any("\ud800" <= char <= "\udfff" for char in value):
        yield hdf5.text_attribute(b"string_value", value)
        return
    shape = item.shape or ()
    yield hdf5.text_attribute(b"string_value", json.dumps(value))
    yield hdf5.int_attribute(b"string_shape", shape, (len(shape),))


_NOTHING = constant("uint8", [])
