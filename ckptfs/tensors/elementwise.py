"""Arithmetic on every element, rounded as torch on CPU rounds it.

Each step is done in float32 for float16, bfloat16 and float32 tensors (float64 for float64), with the scalar
converted to that type first, and rounded to nearest even in the tensor's own dtype before the next step: this is
what ``tensor * scalar`` and ``tensor / scalar`` do there. Results do not depend on how a tensor is cut into blocks.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from ckptfs.native import library
from ckptfs.native.scratch import borrow
from ckptfs.tensors.dtypes import DType
from ckptfs.tensors.tensor import Elements, FromSource, Shape, Tensor

Step = tuple[Literal["multiply", "divide", "add", "nan_to"], float]

FLOATS = frozenset({"float16", "bfloat16", "float32", "float64"})
_PIECE = 1 << 16  # elements: the float32 intermediates stay in the second-level cache


@dataclass(frozen=True, slots=True, eq=False)
class Elementwise(FromSource):
    """*steps* applied to each element of *source*, which is of a float type; ``nan_to`` replaces NaN."""

    source: Tensor
    steps: tuple[Step, ...]

    @property
    def shape(self) -> Shape:
        return self.source.shape

    def read_block(self, row: int, col: int, out: Elements) -> None:
        rows = max(1, _PIECE // max(1, out.shape[1]))
        for top in range(0, out.shape[0], rows):
            for left in range(0, out.shape[1], _PIECE):
                self._read_piece(row + top, col + left, out[top : top + rows, left : left + _PIECE])

    def _read_piece(self, row: int, col: int, out: Elements) -> None:
        with borrow(out.size * self.dtype.itemsize) as buffer:
            words = buffer.view(self.dtype.storage_dtype).reshape(out.shape)
            self.source.read_block(row, col, words)
            for kind, scalar in self.steps:
                if library.LIBRARY is not None and self.dtype.name == "bfloat16" and kind in library.BFLOAT16_STEPS:
                    library.bfloat16(words, kind, scalar)
                else:
                    values: npt.NDArray[Any] = words.view(self.dtype.numpy)
                    values[...] = _apply(kind, scalar, values, self.dtype)
            out[...] = words


def _apply(kind: str, scalar: float, values: npt.NDArray[Any], dtype: DType) -> npt.NDArray[Any]:
    wide = np.float64 if dtype.name == "float64" else np.float32
    x, s = values.astype(wide, copy=False), wide(scalar)
    with np.errstate(all="ignore"):  # overflow to infinity and NaN in, NaN out are results, not mistakes
        if kind == "multiply":
            x = x * s
        elif kind == "divide":
            x = x / s
        elif kind == "add":
            x = x + s
        else:
            x = np.where(np.isnan(x), s, x)
        return x.astype(dtype.numpy, copy=False)


def elementwise(source: Tensor, *steps: Step) -> Tensor:
    """*source* with *steps* applied; integers and booleans come back as they are, as do steps that change nothing."""
    if source.dtype.name not in FLOATS:
        return source
    real = tuple(s for s in steps if not (s[0] in ("multiply", "divide") and s[1] == 1.0))
    return Elementwise(source, real) if real else source
