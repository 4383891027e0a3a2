"""The lazy tensor, as every reader hands it out.

**The block view.** Every tensor is seen as a matrix: rows are the leading axis, columns all other axes
flattened in C order (a 0-d tensor is 1 x 1, a 1-d tensor of n elements is n x 1). `read_block` writes any
rectangle of that matrix into a buffer which the caller owns. Real checkpoints are stored in 2-D tiles, so a
column band is as cheap as a row band: a transposed tensor asks its source for columns and stays streaming.
"""

from __future__ import annotations

import math
from typing import Any, Protocol, TypeAlias, runtime_checkable

import numpy.typing as npt

from ckptfs.tensors.dtypes import DType

Shape: TypeAlias = tuple[int, ...]
Elements: TypeAlias = npt.NDArray[Any]
"""2-D array of a dtype's words (`DType.storage_dtype`), any strides."""


@runtime_checkable
class Tensor(Protocol):
    """A lazy tensor. Immutable, and safe to read from several threads at once."""

    @property
    def dtype(self) -> DType: ...

    @property
    def shape(self) -> Shape: ...

    @property
    def preferred_block(self) -> tuple[int, int]:
        """(rows, columns) that are cheapest to read together; (1, 1) when it does not matter."""
        ...

    def read_block(self, row: int, col: int, out: Elements) -> None:
        """Fill *out*, shape (n_rows, n_cols), with the block whose top left corner is (*row*, *col*).

        *out* has the dtype's word type, any strides and any alignment. Every element of *out* is written, or an
        error is raised: `CorruptChunk` for damaged data, `OSError` for failed reads. The block lies inside
        the matrix (the caller's duty).
        """
        ...


def n_rows(shape: Shape) -> int:
    """Rows of the block view."""
    return shape[0] if shape else 1


def n_cols(shape: Shape) -> int:
    """Columns of the block view (product of all axes but the first)."""
    return math.prod(shape[1:])


def n_elements(shape: Shape) -> int:
    """Elements of a tensor; 1 for a 0-d one."""
    return math.prod(shape)


def nbytes(tensor: Tensor) -> int:
    """Size of the tensor's data in bytes."""
    return n_elements(tensor.shape) * tensor.dtype.itemsize
