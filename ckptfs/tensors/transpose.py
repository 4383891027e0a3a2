"""The transpose of a matrix, tile by tile."""

from __future__ import annotations

import itertools
from dataclasses import dataclass, field
from functools import partial

import numpy as np

from ckptfs.native import program
from ckptfs.native.program import Program
from ckptfs.tensors.cache import TileCache, shared
from ckptfs.tensors.ranges import program_of, read_blocks, read_transposed
from ckptfs.tensors.tensor import Elements, FromSource, Shape, Tensor

TILE = 2 << 20
"""Bytes that are transposed at once."""
_serials = itertools.count()


@dataclass(frozen=True, slots=True, eq=False)
class Transposed(FromSource):
    """The transpose of a 2-d *source*.

    Its rows are source columns. The source is read in tiles aligned to its preferred blocks. A tile that a request
    covers wholly goes straight into place. A tile at the edge of a request is kept in *cache*: the next request finds
    the rest of it, and a sequential reader decodes no byte of the source twice.
    """

    source: Tensor
    cache: TileCache = field(default_factory=shared, repr=False)
    _tile: tuple[int, int] = field(init=False, repr=False)
    """Rows and columns of a tile."""
    _serial: int = field(default_factory=_serials.__next__, init=False, repr=False)

    def __post_init__(self) -> None:
        # Whole rows where they fit: a tile is then copied in one piece.
        rows, cols = self.source.preferred_block
        tile_rows = cols * max(1, 64 // cols)
        tile_cols = rows * max(1, TILE // (tile_rows * rows * self.dtype.itemsize))
        object.__setattr__(self, "_tile", (min(tile_rows, self.shape[0] or 1), min(tile_cols, self.shape[1] or 1)))

    @property
    def shape(self) -> Shape:
        rows, cols = self.source.shape
        return (cols, rows)

    @property
    def preferred_block(self) -> tuple[int, int]:
        return self.source.preferred_block[1], self.source.preferred_block[0]

    def read_block(self, row: int, col: int, out: Elements) -> None:
        tile_rows, tile_cols = self._tile
        for top in range(row // tile_rows * tile_rows, row + out.shape[0], tile_rows):
            for left in range(col // tile_cols * tile_cols, col + out.shape[1], tile_cols):
                self._read_tile(top, left, row, col, out)

    def read_range(self, start: int, out: Elements) -> None:
        """Where tiles have whole rows, a range of elements is one range of each tile: no row is cut in two."""
        cols = self.shape[1]
        if self._tile[1] < cols:
            read_blocks(self, start, out)
            return
        done = 0
        while done < len(out):
            top = (start + done) // cols // self._tile[0] * self._tile[0]
            bottom = min(top + self._tile[0], self.shape[0])
            offset = start + done - top * cols
            part = out[done : done + (bottom - top) * cols - offset]
            if len(part) == (bottom - top) * cols:
                read_transposed(self.source, 0, top, part.reshape(bottom - top, cols))
            else:
                tile = self._kept_tile(top, 0, bottom, cols, len(part))
                part[...] = tile.reshape(-1)[offset : offset + len(part)]
            done += len(part)

    def program(self) -> Program | None:
        if self._tile[1] < self.shape[1] or self.dtype.itemsize not in (1, 2, 4, 8):
            return None
        rows, cols = self.shape
        return program.transpose(
            program_of(self.source), (rows, cols), self.dtype.itemsize, self._tile[0], self._serial
        )

    def _read_tile(self, top: int, left: int, row: int, col: int, out: Elements) -> None:
        """Fill the part of *out*, which starts at (*row*, *col*), that lies in tile (*top*, *left*)."""
        bottom, right = min(top + self._tile[0], self.shape[0]), min(left + self._tile[1], self.shape[1])
        r0, r1 = max(top, row), min(bottom, row + out.shape[0])
        c0, c1 = max(left, col), min(right, col + out.shape[1])
        target = out[r0 - row : r1 - row, c0 - col : c1 - col]
        if (r1 - r0, c1 - c0) == (bottom - top, right - left):
            read_transposed(self.source, c0, r0, target)
            return
        tile = self._kept_tile(top, left, bottom, right, target.size)
        target[...] = tile[r0 - top : r1 - top, c0 - left : c1 - left]

    def _kept_tile(self, top: int, left: int, bottom: int, right: int, n_used: int) -> Elements:
        """A tile from the cache, of which *n_used* elements are going to be used."""
        share = n_used / ((bottom - top) * (right - left))
        return self.cache.get((self._serial, top, left), partial(self._make, top, left, bottom, right), share)

    def _make(self, top: int, left: int, bottom: int, right: int) -> Elements:
        tile = np.empty((bottom - top, right - left), self.dtype.storage_dtype)
        read_transposed(self.source, left, top, tile)
        return tile
