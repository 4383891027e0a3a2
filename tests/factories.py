"""Tiny inputs for tests: tensors over numpy arrays, and sources made of plain values.

Nothing here uses the code under test to compute a value; a tensor's expected bytes are its array's.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import ml_dtypes
import numpy as np
import numpy.typing as npt

from ckptfs.formats.source import Item, Source
from ckptfs.tensors.dtypes import DTYPES, DType

NUMPY_TYPES: dict[str, np.dtype[Any]] = {
    "bool": np.dtype(np.bool_),
    "float8_e4m3fn": np.dtype(ml_dtypes.float8_e4m3fn),
    "float8_e5m2": np.dtype(ml_dtypes.float8_e5m2),
    "bfloat16": np.dtype(ml_dtypes.bfloat16),
    **{
        name: np.dtype(name).newbyteorder("<")
        for name in (
            *("uint8", "int8", "uint16", "int16", "uint32", "int32", "uint64", "int64"),
            *("float16", "float32", "float64", "complex64", "complex128"),
        )
    },
}
"""Name of each element type to its numpy type, written out so that tests need not trust `DType.numpy`."""


class ArrayTensor:
    """A `ckptfs.tensors.tensor.Tensor` over a numpy array.

    *dtype_name* is for arrays of words (uint16 meant as bfloat16); by default it is the array's own type.
    *reads* counts the calls of `read_block`.
    """

    def __init__(
        self, array: npt.ArrayLike, dtype_name: str | None = None, *, preferred_block: tuple[int, int] = (1, 1)
    ) -> None:
        self.array: npt.NDArray[Any] = np.asarray(array)
        name = dtype_name or next(n for n, t in NUMPY_TYPES.items() if t == self.array.dtype)
        self.dtype: DType = DTYPES[name]
        self.shape: tuple[int, ...] = self.array.shape
        self.preferred_block = preferred_block
        self.reads = 0
        assert self.array.dtype.itemsize == self.dtype.itemsize
        rows = self.shape[0] if self.shape else 1
        cols = int(np.prod(self.shape[1:], dtype=np.int64))
        self._words = np.frombuffer(self.bytes, self.dtype.storage_dtype).reshape(rows, cols)

    @property
    def bytes(self) -> bytes:
        """All bytes of the tensor in C order."""
        return self.array.tobytes(order="C")

    def read_block(self, row: int, col: int, out: npt.NDArray[Any]) -> None:
        """As the protocol says; asserts the caller's side of it."""
        assert out.ndim == 2
        assert out.dtype == self.dtype.storage_dtype
        rows, cols = out.shape
        assert row >= 0 and col >= 0
        assert row + rows <= self._words.shape[0] and col + cols <= self._words.shape[1]
        self.reads += 1
        out[...] = self._words[row : row + rows, col : col + cols]


def array_of(dtype_name: str, shape: tuple[int, ...], seed: int = 0) -> npt.NDArray[Any]:
    """An array of random bits (NaNs and all) of that type; booleans are 0 and 1."""
    rng = np.random.default_rng(seed)
    kind = NUMPY_TYPES[dtype_name]
    n = int(np.prod(shape, dtype=np.int64))
    if dtype_name == "bool":
        return rng.integers(0, 2, shape).astype(np.bool_)
    return np.frombuffer(rng.bytes(n * kind.itemsize), kind).reshape(shape)


def tensor_of(dtype_name: str, shape: tuple[int, ...], seed: int = 0) -> ArrayTensor:
    """A tensor of random bits."""
    return ArrayTensor(array_of(dtype_name, shape, seed), dtype_name)


def item_of(key: str, value: object) -> Item:
    """The leaf for a plain value: arrays and tensors become tensors, an `Item` stays as it is."""
    if isinstance(value, Item):
        return value
    if isinstance(value, np.ndarray):
        return Item(key, "tensor", tensor=ArrayTensor(value))
    if value is None:
        return Item(key, "none")
    if isinstance(value, str):
        return Item(key, "string", value=value)
    if isinstance(value, (bool, int, float)):
        return Item(key, "scalar", value=value)
    return Item(key, "tensor", tensor=value)  # type: ignore[arg-type]


def source_of(values: Mapping[str, object], **fields: Any) -> Source:
    """A source in memory. *values* maps flattened keys to arrays, tensors, plain values or whole items."""
    facts: dict[str, Any] = {
        "path": "memory.mdl",
        "format": "cerebras-h5",
        "format_version": "0.5",
        "release": "2.10.0",
    }
    return Source(**{**facts, **fields}, items={key: item_of(key, value) for key, value in values.items()})
