"""A matrix with a low-rank update added: ``W + (B @ A) * scale``, as torch on CPU rounds it.

Each product of ``B @ A`` is added to the sum of those before it with one rounding (fused multiply-add), in the order
of the rank: this is what torch's float32 kernels do up to a rank of about 128, and it makes an element's bits
independent of how much else is asked for. For narrow results (`_FUSED`) torch has kernels that round each product,
too. Float16 and bfloat16 are summed in float32. The sum, its product with the scale and the result are each rounded to
their own dtype, nearest even.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from ckptfs.errors import ShapeError
from ckptfs.native.scratch import borrow
from ckptfs.tensors.dtypes import DType
from ckptfs.tensors.elementwise import FLOATS
from ckptfs.tensors.tensor import Elements, FromSource, Shape, Tensor

_PIECE = 1 << 15
"""Elements made at once: with their products in float64 they stay in a second-level cache."""
_WIDTH = 2048
"""Columns of a piece, at most."""
_FUSED = (4, 12)
"""Rows and columns of a product from which on torch fuses; found by trying sizes (torch 2.13, MKL, ranks to 32)."""
_DEPTH = 64
"""Ranks whose factors are held at once; bounds memory whatever the file calls a rank."""

_Array = npt.NDArray[Any]


@dataclass(frozen=True, slots=True, eq=False)
class LowRank(FromSource):
    """*source* + (*b* @ *a*) * *scale*; with *swapped*, + its transpose.

    *source* (out, in), *b* (out, r), *a* (r, in); swapped: *source* (in, out). *b* and *a* are of one dtype.
    """

    source: Tensor
    b: Tensor
    a: Tensor
    scale: float
    swapped: bool = False

    @property
    def shape(self) -> Shape:
        return self.source.shape

    def read_block(self, row: int, col: int, out: Elements) -> None:
        cols = max(1, min(_WIDTH, out.shape[1]))
        rows = _PIECE // cols
        for top in range(0, out.shape[0], rows):
            for left in range(0, out.shape[1], cols):
                self._read_piece(row + top, col + left, out[top : top + rows, left : left + cols])

    def _read_piece(self, row: int, col: int, out: Elements) -> None:
        kind = self.a.dtype
        with np.errstate(all="ignore"), borrow(out.size * self.dtype.itemsize) as buffer:
            update = _rounded(self._product(row, col, out.shape), kind)
            update = _rounded(update * update.dtype.type(self.scale), kind)
            words = buffer.view(self.dtype.storage_dtype).reshape(out.shape)
            self.source.read_block(row, col, words)
            values: _Array = words.view(self.dtype.numpy)
            total = values.astype(_wide(self.dtype)) + update
            out[...] = total.astype(self.dtype.numpy).view(self.dtype.storage_dtype)

    def _product(self, row: int, col: int, shape: tuple[int, ...]) -> _Array:
        """The block of ``b @ a`` (or its transpose), not yet rounded to the factors' dtype."""
        total = np.zeros(shape, _wide(self.a.dtype))
        # float64 holds a product of two float32 without rounding, and float32 one of two halves.
        exact = np.float64 if self.a.dtype.name == "float32" and self._fused() else total.dtype
        terms = np.empty(shape, exact)
        for left, right in self._factors(row, col, shape):
            left, right = left.astype(exact), right.astype(exact)
            for k in range(left.shape[1]):
                np.multiply(left[:, k, None], right[k], out=terms)
                np.add(terms, total, out=terms)
                total[...] = terms
        return total

    def _fused(self) -> bool:
        return self.b.shape[0] >= _FUSED[0] and self.a.shape[1] >= _FUSED[1]

    def _factors(self, row: int, col: int, shape: tuple[int, ...]) -> Iterator[tuple[_Array, _Array]]:
        """The factors of the block, (n_rows, k) and (k, n_cols), some ranks at a time."""
        rows, cols = shape
        rank = self.a.shape[0]
        for k in range(0, rank, _DEPTH):
            n = min(_DEPTH, rank - k)
            if self.swapped:
                yield _block(self.a, k, row, n, rows).T, _block(self.b, col, k, cols, n).T
            else:
                yield _block(self.b, row, k, rows, n), _block(self.a, k, col, n, cols)


def low_rank(key: str, source: Tensor, b: Tensor, a: Tensor, scale: float, *, swapped: bool = False) -> Tensor:
    """*source*, stored under *key*, with the update added. Raises `ShapeError` where the three do not fit."""
    want = source.shape[::-1] if swapped else source.shape
    if any(len(t.shape) != 2 for t in (source, a, b)) or (b.shape[0], a.shape[1]) != want or b.shape[1] != a.shape[0]:
        raise ShapeError(key, source.shape, f"its low-rank factors are {a.shape} and {b.shape}")
    kinds = {t.dtype.name for t in (source, a, b)}
    if not kinds <= FLOATS or a.dtype is not b.dtype:
        names = ", ".join(t.dtype.name for t in (source, a, b))
        raise ShapeError(key, source.shape, f"it and its low-rank factors must be floats of one kind, not {names}")
    return LowRank(source, b, a, scale, swapped)


def _block(tensor: Tensor, row: int, col: int, rows: int, cols: int) -> _Array:
    out = np.empty((rows, cols), tensor.dtype.storage_dtype)
    tensor.read_block(row, col, out)
    return out.view(tensor.dtype.numpy)


def _wide(dtype: DType) -> npt.DTypeLike:
    """The type in which torch computes."""
    return np.float64 if dtype.name == "float64" else np.float32


def _rounded(values: _Array, dtype: DType) -> _Array:
    """*values* as the nearest numbers that *dtype* has, in the type that they came in."""
    if values.dtype == dtype.numpy:
        return values
    return values.astype(dtype.numpy).astype(values.dtype)
