"""One table of element types and their names in each format.

A tensor's bytes travel as unsigned words of the element's size (`DType.storage_dtype`): moving, reordering and
transposing never look inside an element, so a NaN payload or a denormal stays as it is. Only
arithmetic widens, and then through ``numpy`` below.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np


@dataclass(frozen=True, slots=True)
class DType:
    """One element type. Names are torch's without the prefix; all bytes are little-endian."""

    name: str
    itemsize: int
    safetensors: str | None
    """Name in a safetensors header, None where that format has none."""
    storage: str | None
    """Name of torch's storage class in a pickle."""
    npy: str
    """``descr`` of a ``.npy`` header; ml_dtypes' types are opaque (``<V2``), as ``numpy.save`` writes them."""
    hdf5: str
    """numpy type of the HDF5 dataset that the Cerebras writer uses (bfloat16 as int16)."""

    @property
    def storage_dtype(self) -> np.dtype[Any]:
        """The numpy type in which elements are moved: an unsigned word of the element's size."""
        return _WORDS[self.itemsize]

    @property
    def numpy(self) -> np.dtype[Any]:
        """The numpy type with the element's meaning; ml_dtypes' where numpy has none."""
        if self.name in _ML_DTYPES:
            import ml_dtypes

            found: np.dtype[Any] = np.dtype(getattr(ml_dtypes, self.name))
            return found
        return np.dtype(self.npy)


_WORDS: dict[int, np.dtype[Any]] = {
    1: np.dtype("u1"),
    2: np.dtype("<u2"),
    4: np.dtype("<u4"),
    8: np.dtype("<u8"),
    16: np.dtype("V16"),
}
_ML_DTYPES = frozenset({"bfloat16", "float8_e4m3fn", "float8_e5m2"})

DTYPES: dict[str, DType] = {
    row[0]: DType(*row)
    for row in (
        ("bool", 1, "BOOL", "BoolStorage", "|b1", "|b1"),
        ("uint8", 1, "U8", "ByteStorage", "|u1", "|u1"),
        ("int8", 1, "I8", "CharStorage", "|i1", "|i1"),
        ("uint16", 2, "U16", "UInt16Storage", "<u2", "<u2"),
        ("int16", 2, "I16", "ShortStorage", "<i2", "<i2"),
        ("uint32", 4, "U32", "UInt32Storage", "<u4", "<u4"),
        ("int32", 4, "I32", "IntStorage", "<i4", "<i4"),
        ("uint64", 8, "U64", "UInt64Storage", "<u8", "<u8"),
        ("int64", 8, "I64", "LongStorage", "<i8", "<i8"),
        ("float8_e4m3fn", 1, "F8_E4M3", "Float8_e4m3fnStorage", "|V1", "|u1"),
        ("float8_e5m2", 1, "F8_E5M2", "Float8_e5m2Storage", "|V1", "|u1"),
        ("float16", 2, "F16", "HalfStorage", "<f2", "<f2"),
        ("bfloat16", 2, "BF16", "BFloat16Storage", "<V2", "<i2"),
        ("float32", 4, "F32", "FloatStorage", "<f4", "<f4"),
        ("float64", 8, "F64", "DoubleStorage", "<f8", "<f8"),
        ("complex64", 8, "C64", "ComplexFloatStorage", "<c8", "<c8"),
        ("complex128", 16, None, "ComplexDoubleStorage", "<c16", "<c16"),
    )
}

BY_SAFETENSORS = {d.safetensors: d for d in DTYPES.values() if d.safetensors}
BY_STORAGE = {d.storage: d for d in DTYPES.values() if d.storage}
BY_NUMPY = {np.dtype(d.npy): d for d in DTYPES.values() if d.name not in _ML_DTYPES}


def dtype(name: str) -> DType:
    """The dtype of that name, with or without a ``torch.`` prefix; KeyError when it is not in the table."""
    return DTYPES[name.removeprefix("torch.")]
