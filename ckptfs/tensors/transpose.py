"""The transpose of a matrix, tile by tile."""

from __future__ import annotations

import itertools
from dataclasses import dataclass, field
from functools import partial

import numpy as np

from ckptfs.native import program
from ckptfs.native.program import Program
from ckptfs.tensors.cache import TileCache, shared
from ckptfs.tensors.dtypes import DType
from ckptfs.tensors.ranges import node_of, read_blocks, read_transposed
from ckptfs.tensors.tensor import Elements, Shape, Tensor

TILE = 2 << 20
"""Bytes that are transposed at once."""
_uids = itertools.count()


@dataclass(frozen=True, slots=True, eq=False)
class Transposed:
    """The transpose of a 2-d *source*.

    Its rows are source columns. The source is read in tiles aligned to its own grain: a tile that a request covers
    wholly goes straight into place, one at the edge of a request is kept in *cache*, so that the next request
    finds the rest of it and no byte of the source is decoded twice by a sequential reader.
    """

    source: Tensor
    cache: TileCache = field(default_factory=shared, repr=False)
    _tile: tuple[int, int] = field(init=False, repr=False)
    _uid: int = field(default_factory=_uids.__next__, init=False, repr=False)

    def __post_init__(self) -> None:
        # Whole rows where they fit: a tile is then copied in one piece.
        rows, cols = self.source.preferred_block
        high = cols * max(1, 64 // cols)
        wide = rows * max(1, TILE // (high * rows * self.dtype.itemsize))
        object.__setattr__(self, "_tile", (min(high, self.shape[0] or 1), min(wide, self.shape[1] or 1)))

    @property
    def dtype(self) -> DType:
        return self.source.dtype

    @property
    def shape(self) -> Shape:
        rows, cols = self.source.shape
        return (cols, rows)

    @property
    def preferred_block(self) -> tuple[int, int]:
        return self.source.preferred_block[1], self.source.preferred_block[0]

    def read_block(self, row: int, col: int, out: Elements) -> None:
        high, wide = self._tile
        for top in range(row // high * high, row + out.shape[0], high):
            for left in range(col // wide * wide, col + out.shape[1], wide):
                self._read_tile(top, left, row, col, out)

    def read_span(self, start: int, out: Elements) -> None:
        """Where tiles have whole rows, a run of elements is one run of a tile: no row is cut in two."""
        cols = self.shape[1]
        if self._tile[1] < cols:
            read_blocks(self, start, out)
            return
        done = 0
        while done < len(out):
            top = (start + done) // cols // self._tile[0] * self._tile[0]
            bottom = min(top + self._tile[0], self.shape[0])
            at = start + done - top * cols
            part = out[done : done + (bottom - top) * cols - at]
            if len(part) == (bottom - top) * cols:
                read_transposed(self.source, 0, top, part.reshape(bottom - top, cols))
            else:
                share = len(part) / ((bottom - top) * cols)
                tile = self.cache.get((self._uid, top, 0), partial(self._make, top, 0, bottom, cols), share)
                part[...] = tile.reshape(-1)[at : at + len(part)]
            done += len(part)

    def node(self) -> Program | None:
        """As `nodes` says: where tiles have whole rows."""
        if self._tile[1] < self.shape[1] or self.dtype.itemsize not in (1, 2, 4, 8):
            return None
        return program.turned(
            node_of(self.source), (self.shape[0], self.shape[1]), self.dtype.itemsize, self._tile[0], self._uid
        )

    def _read_tile(self, top: int, left: int, row: int, col: int, out: Elements) -> None:
        """The part of tile (*top*, *left*) that *out*, which starts at (*row*, *col*), wants."""
        bottom, right = min(top + self._tile[0], self.shape[0]), min(left + self._tile[1], self.shape[1])
        r0, r1 = max(top, row), min(bottom, row + out.shape[0])
        c0, c1 = max(left, col), min(right, col + out.shape[1])
        target = out[r0 - row : r1 - row, c0 - col : c1 - col]
        if (r1 - r0, c1 - c0) == (bottom - top, right - left):
            read_transposed(self.source, c0, r0, target)
            return
        share = target.size / ((bottom - top) * (right - left))
        tile = self.cache.get((self._uid, top, left), partial(self._make, top, left, bottom, right), share)
        target[...] = tile[r0 - top : r1 - top, c0 - left : c1 - left]

    def _make(self, top: int, left: int, bottom: int, right: int) -> Elements:
        tile = np.empty((bottom - top, right - left), self.dtype.storage_dtype)
        read_transposed(self.source, left, top, tile)
        return tile
