"""Tensors whose data come from a formula instead of a file."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from ckptfs.tensors.dtypes import DType, dtype
from ckptfs.tensors.tensor import Elements, Shape, Tensor, n_cols

_PIECE = 1 << 16


@dataclass(frozen=True, slots=True, eq=False)
class Generated:
    """A tensor of *shape* whose elements [start, stop), in C order, are ``fill(start, stop)``.

    *fill* returns a 1-d array of the dtype's numpy type, and gives an element the same value however it is asked.
    """

    dtype: DType
    shape: Shape
    fill: Callable[[int, int], npt.NDArray[Any]]

    @property
    def preferred_block(self) -> tuple[int, int]:
        return (1, 1)

    def read_block(self, row: int, col: int, out: Elements) -> None:
        cols = n_cols(self.shape)
        rows = max(1, _PIECE // cols) if out.shape[1] == cols else 1
        for top in range(0, out.shape[0], rows):
            part = out[top : top + rows]
            start = (row + top) * cols + col
            for left in range(0, part.shape[1], _PIECE):
                n = part.shape[0] * min(_PIECE, part.shape[1] - left)
                values = np.ascontiguousarray(self.fill(start + left, start + left + n), self.dtype.numpy)
                part[:, left : left + _PIECE] = values.view(self.dtype.storage_dtype).reshape(part.shape[0], -1)


def filled(name: str, shape: Shape, value: float) -> Tensor:
    """A tensor of dtype *name* with *value* everywhere."""
    kind = dtype(name)
    return Generated(kind, shape, lambda start, stop: np.full(stop - start, value, kind.numpy))


def constant(name: str, values: npt.ArrayLike) -> Tensor:
    """A small tensor with these *values*."""
    kind = dtype(name)
    array = np.asarray(values).astype(kind.numpy)
    flat = array.reshape(-1)
    return Generated(kind, array.shape, lambda start, stop: flat[start:stop])


def numbered(size: int) -> Tensor:
    """int64 0 … size - 1, shape (1, size): the ``position_ids`` buffer of BERT models."""
    return Generated(dtype("int64"), (1, size), lambda start, stop: np.arange(start, stop))


def causal_mask(size: int) -> Tensor:
    """uint8 ones on and below the diagonal, shape (1, 1, size, size): the ``attn.bias`` buffer of GPT-2 models."""

    def fill(start: int, stop: int) -> npt.NDArray[Any]:
        first, last = start // size, (stop - 1) // size
        rows = np.arange(first, last + 1)[:, None] >= np.arange(size)
        return rows.view(np.uint8).reshape(-1)[start - first * size : stop - first * size]

    return Generated(dtype("uint8"), (1, 1, size, size), fill)


def seeded_normal(shape: Shape, std: float, seed: int) -> Tensor:
    """float32 samples of N(0, std), the same at every read: a head for a checkpoint that has none.

    Element i comes from a Philox stream keyed by *seed*, drawn in tiles of 65,536 elements: tile t is
    ``numpy.random.Generator(Philox(key=seed, counter=[0, t, 0, 0])).standard_normal(65536, float32) * std``.
    """

    def tile(stream: np.random.Generator) -> npt.NDArray[np.float32]:
        samples: npt.NDArray[np.float32] = stream.standard_normal(_PIECE, np.float32)
        samples *= np.float32(std)
        return samples

    return _seeded(shape, seed, tile)


def seeded_uniform(shape: Shape, bound: float, seed: int) -> Tensor:
    """float32 samples between -*bound* and *bound*, the same at every read; streams as those of `seeded_normal`.

    A tile is ``(2 * random(65536, float32) - 1) * bound``.
    """

    def tile(stream: np.random.Generator) -> npt.NDArray[np.float32]:
        samples: npt.NDArray[np.float32] = 2 * stream.random(_PIECE, np.float32) - 1
        samples *= np.float32(bound)
        return samples

    return _seeded(shape, seed, tile)


def _seeded(shape: Shape, seed: int, tile: Callable[[np.random.Generator], npt.NDArray[np.float32]]) -> Tensor:
    """float32 samples that *tile* draws, `_PIECE` at a time, each time from a new stream."""

    def fill(start: int, stop: int) -> npt.NDArray[Any]:
        first = start // _PIECE
        streams = (np.random.Philox(key=seed, counter=[0, t, 0, 0]) for t in range(first, -(-stop // _PIECE)))
        tiles = [tile(np.random.Generator(stream)) for stream in streams]
        return np.concatenate(tiles)[start - first * _PIECE : stop - first * _PIECE]

    return Generated(dtype("float32"), shape, fill)
