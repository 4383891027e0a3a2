"""The lazy tensor, as every reader hands it out, and what else a tensor may be able to do.

**The block view.** Every tensor is seen as a matrix: rows are the leading axis, columns all other axes
flattened in C order (a 0-d tensor is 1 x 1, a 1-d tensor of n elements is n x 1). `read_block` writes any
rectangle of that matrix into a buffer which the caller owns. Real checkpoints are stored in 2-D chunks, so
columns are as cheap as rows: a transposed tensor asks its source for columns and stays streaming.

Some tensors know a faster way than blocks for some reads. Each way is a protocol of its own:

=================  ===========  ===============  ==========  ========
class              ReadsRanges  ReadsTransposed  Programmed  Prepared
=================  ===========  ===============  ==========  ========
Checked            yes
ChunkedTensor      yes          yes              yes         yes
ConcatColumns
ConcatRows         yes          yes              yes
ConstantTensor
Elementwise
FileTensor                                       yes
Generated
IndexBlock
InlineTensor
LowRank
MemoryTensor
PermutedAxes
PermutedRows                                     yes
Reshaped           yes                           yes
Sealed
SlicedColumns
SlicedRows         yes          yes              yes
Summed             yes
SwappedTensor
Transposed         yes                           yes
=================  ===========  ===============  ==========  ========
"""

from __future__ import annotations

import math
from typing import Any, Protocol, TypeAlias, runtime_checkable

import numpy.typing as npt

from ckptfs.native.program import Program
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

        *out* has the dtype's `storage_dtype`, any strides and any alignment. Every element of *out* is written, or an
        error is raised: `CorruptChunk` for damaged data, `OSError` for failed reads. The block lies inside
        the matrix (the caller's duty).
        """
        ...


@runtime_checkable
class ReadsRanges(Protocol):
    """A tensor that reads ranges of elements faster than block by block."""

    def read_range(self, start: int, out: npt.NDArray[Any]) -> None:
        """Elements ``[start, start + len(out))`` in C order into *out*, a contiguous 1-d array."""
        ...


@runtime_checkable
class ReadsTransposed(Protocol):
    """A tensor that reads the transpose of a block faster than the block."""

    def read_transposed(self, row: int, col: int, out: Elements) -> bool:
        """Fill ``out[c, r]`` with the elements ``(row + r, col + c)`` of the block view.

        False where it has no faster way for this block; *out* may then have been written to.
        """
        ...


@runtime_checkable
class Programmed(Protocol):
    """A tensor whose bytes C can read."""

    def program(self) -> Program | None:
        """The read program of its bytes in C order, None where C cannot read them. May read chunk tables."""
        ...


@runtime_checkable
class Prepared(Protocol):
    """A tensor that reads a table before its first element."""

    def prepare(self) -> None:
        """Read the table, unless that is done: several threads may then begin at once."""
        ...


class FromSource:
    """Mixin of tensors with one *source*, which has their dtype and preferred block."""

    __slots__ = ()
    source: Tensor

    @property
    def dtype(self) -> DType:
        return self.source.dtype

    @property
    def preferred_block(self) -> tuple[int, int]:
        return self.source.preferred_block


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
