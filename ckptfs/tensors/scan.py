"""All elements of a tensor in ranges of bounded size, and counts of NaN and infinity.

NaN and infinity are found in the stored bits, without arithmetic: all bits of the exponent are set.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import numpy.typing as npt

from ckptfs.tensors.dtypes import DType
from ckptfs.tensors.ranges import read_elements
from ckptfs.tensors.tensor import Tensor, n_elements

RANGE = 1 << 20
"""Elements that are evaluated at once."""
_INFINITY = {
    "float16": 0x7C00,
    "bfloat16": 0x7F80,
    "float32": 0x7F80_0000,
    "float64": 0x7FF0_0000_0000_0000,
    "float8_e5m2": 0x7C,
}
"""The bits of infinity; those of NaN are greater."""
_PARTS = {"complex64": ("float32", "<u4"), "complex128": ("float64", "<u8")}


def element_ranges(tensor: Tensor, size: int = RANGE) -> Iterator[tuple[int, npt.NDArray[Any]]]:
    """(index of the first element, elements as words) of ranges of at most *size* elements, in C order."""
    n = n_elements(tensor.shape)
    for start in range(0, n, size):
        words = np.empty(min(size, n - start), tensor.dtype.storage_dtype)
        read_elements(tensor, start, words)
        yield start, words


def count_nan_inf(dtype: DType, words: npt.NDArray[Any]) -> tuple[int, int]:
    """How many of *words* are NaN and how many infinite; for complex numbers, parts of numbers."""
    name, word = _PARTS.get(dtype.name, (dtype.name, dtype.storage_dtype))
    if name == "float8_e4m3fn":  # has no infinity
        return int(np.count_nonzero(words & 0x7F == 0x7F)), 0
    if name not in _INFINITY:
        return 0, 0
    parts = words.view(word)
    infinity = parts.dtype.type(_INFINITY[name])
    sign = parts.dtype.type(1 << (8 * parts.dtype.itemsize - 1))
    size = parts & ~sign
    return int(np.count_nonzero(size > infinity)), int(np.count_nonzero(size == infinity))
