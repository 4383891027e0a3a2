"""Lazy tensors made from other lazy tensors: a closed set of nodes that only move elements.

Each node knows its dtype and shape at once. It writes any block straight into the caller's buffer and asks its sources
for just the blocks it needs. Nodes compare by identity, so tensors that share a node are tied. Transposes are in
`transpose`, arithmetic in `elementwise`, generated data in `generated`.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from ckptfs.errors import ShapeError
from ckptfs.native import program
from ckptfs.native.program import Program
from ckptfs.native.scratch import borrow
from ckptfs.tensors.dtypes import DType
from ckptfs.tensors.ranges import program_of, read_elements, read_transposed
from ckptfs.tensors.tensor import Elements, FromSource, Shape, Tensor, n_cols, n_elements, n_rows

Order: TypeAlias = npt.NDArray[np.int64]

SCRATCH = 4 << 20
"""Bytes of intermediate data that one node holds at a time."""


@dataclass(frozen=True, slots=True, eq=False)
class PermutedRows(FromSource):
    """Row i is row ``order[i]`` of *source*.

    *block* says how far rows travel: each *block* output rows (aligned) come from as many neighbouring source rows, in
    another order (a head of a rotary projection, a part of a packed one).
    """

    source: Tensor
    order: Order
    block: int
    _block_starts: Order = field(init=False, repr=False)
    """First source row of each block."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "_block_starts", self.order.reshape(-1, self.block).min(axis=1))

    @property
    def shape(self) -> Shape:
        return (len(self.order), *self.source.shape[1:])

    @property
    def preferred_block(self) -> tuple[int, int]:
        return max(self.block, self.source.preferred_block[0]), self.source.preferred_block[1]

    def program(self) -> Program | None:
        row_nbytes = n_cols(self.shape) * self.dtype.itemsize
        if not row_nbytes or not len(self.order):
            return None
        return program.gather_rows(program_of(self.source), self.order, self._block_starts, row_nbytes)

    def read_block(self, row: int, col: int, out: Elements) -> None:
        stop = row + out.shape[0]
        max_rows = max(1, SCRATCH // max(1, out.shape[1] * self.dtype.itemsize))
        start = row
        while start < stop:
            end = min(stop, self._contiguous_end(start, max_rows))
            self._read_blocks(start, end, col, out[start - row : end - row])
            start = end

    def _contiguous_end(self, row: int, max_rows: int) -> int:
        """End of the rows from *row* on whose blocks are neighbours in the source, too; about *max_rows* of them."""
        first = row // self.block
        last = min(len(self._block_starts), first + max(1, max_rows // self.block))
        steps = np.diff(self._block_starts[first:last])
        broken = np.flatnonzero(steps != self.block)
        return (first + (int(broken[0]) + 1 if len(broken) else last - first)) * self.block

    def _read_blocks(self, start: int, stop: int, col: int, out: Elements) -> None:
        """Rows ``[start, stop)``, whose blocks are neighbours in the source."""
        order = self.order[start:stop]
        low, high = int(order.min()), int(order.max()) + 1
        if high - low == stop - start and (order[0] == low and (np.diff(order) == 1).all()):
            self.source.read_block(low, col, out)
            return
        size = (high - low) * out.shape[1] * self.dtype.itemsize
        if size > 2 * SCRATCH:  # blocks of huge rows: row by row, each straight into place
            for i, source_row in enumerate(order):
                self.source.read_block(int(source_row), col, out[i : i + 1])
            return
        with borrow(size) as buffer:
            rows = buffer.view(self.dtype.storage_dtype).reshape(high - low, out.shape[1])
            self.source.read_block(low, col, rows)
            _take_rows(rows, order - low, out)


def _take_rows(rows: Elements, order: Order, out: Elements) -> None:
    """``out[i] = rows[order[i]]``, by strided copies where the order is arithmetic."""
    if len(order) > 2:
        step = order[1] - order[0]
        half = len(order) // 2
        if step > 0 and len(order) % 2 == 0 and _is_range(order[:half], step) and _is_range(order[half:], step):
            out[:half] = rows[order[0] : order[0] + half * step : step]
            out[half:] = rows[order[half] : order[half] + half * step : step]
            return
    if out.flags.c_contiguous:
        np.take(rows, order, axis=0, out=out, mode="clip")  # "clip" takes without a buffer; indexes are in range
    else:
        out[...] = rows[order]


def _is_range(order: Order, step: int) -> bool:
    return bool((np.diff(order) == step).all())


@dataclass(frozen=True, slots=True, eq=False)
class SlicedRows(FromSource):
    """Rows [start, stop) of *source*."""

    source: Tensor
    start: int
    stop: int

    @property
    def shape(self) -> Shape:
        return (self.stop - self.start, *self.source.shape[1:])

    def read_block(self, row: int, col: int, out: Elements) -> None:
        self.source.read_block(self.start + row, col, out)

    def read_range(self, start: int, out: Elements) -> None:
        read_elements(self.source, self.start * n_cols(self.source.shape) + start, out)

    def read_transposed(self, row: int, col: int, out: Elements) -> bool:
        read_transposed(self.source, self.start + row, col, out)
        return True

    def program(self) -> Program | None:
        row_nbytes = n_cols(self.shape) * self.dtype.itemsize
        return program.slice_of(program_of(self.source), self.start * row_nbytes)


class _FromSources:
    """Mixin of tensors with several *sources*, the first of which has their dtype and preferred block."""

    __slots__ = ()
    sources: tuple[Tensor, ...]

    @property
    def dtype(self) -> DType:
        return self.sources[0].dtype

    @property
    def preferred_block(self) -> tuple[int, int]:
        return self.sources[0].preferred_block


@dataclass(frozen=True, slots=True, eq=False)
class ConcatRows(_FromSources):
    """*sources* one below the other; they agree in dtype and in all axes but the first."""

    sources: tuple[Tensor, ...]
    _starts: tuple[int, ...] = field(init=False, repr=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "_starts", _starts_of(n_rows(source.shape) for source in self.sources))

    @property
    def shape(self) -> Shape:
        return (self._starts[-1], *self.sources[0].shape[1:])

    def read_block(self, row: int, col: int, out: Elements) -> None:
        for source, start, part in _parts(self.sources, self._starts, row, out.shape[0]):
            source.read_block(start, col, out[part])

    def read_range(self, start: int, out: Elements) -> None:
        cols = n_cols(self.shape)
        for source, first, part in _parts(self.sources, self._starts, start, len(out), cols):
            read_elements(source, first, out[part])

    def read_transposed(self, row: int, col: int, out: Elements) -> bool:
        for source, start, part in _parts(self.sources, self._starts, row, out.shape[1]):
            read_transposed(source, start, col, out[:, part])
        return True

    def program(self) -> Program | None:
        row_nbytes = n_cols(self.shape) * self.dtype.itemsize
        starts = tuple(start * row_nbytes for start in self._starts)
        return program.concat([program_of(source) for source in self.sources], starts)


@dataclass(frozen=True, slots=True, eq=False)
class SlicedColumns(FromSource):
    """Columns [start, stop) of the block view of *source*, seen as *shape* (whose first axis is the source's)."""

    source: Tensor
    start: int
    shape: Shape

    def read_block(self, row: int, col: int, out: Elements) -> None:
        self.source.read_block(row, self.start + col, out)


@dataclass(frozen=True, slots=True, eq=False)
class ConcatColumns(_FromSources):
    """*sources* side by side in the block view, seen as *shape*; they agree in dtype and in the number of rows.

    Matrices (out, in) stacked on a new second axis, (out, n, in), are just this.
    """

    sources: tuple[Tensor, ...]
    shape: Shape
    _starts: tuple[int, ...] = field(init=False, repr=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "_starts", _starts_of(n_cols(source.shape) for source in self.sources))

    def read_block(self, row: int, col: int, out: Elements) -> None:
        for source, start, part in _parts(self.sources, self._starts, col, out.shape[1]):
            source.read_block(row, start, out[:, part])


def _starts_of(sizes: Iterable[int]) -> tuple[int, ...]:
    """Where each of the sources begins, and the end."""
    return tuple(itertools.accumulate(sizes, initial=0))


def _parts(
    sources: tuple[Tensor, ...], starts: tuple[int, ...], begin: int, n: int, scale: int = 1
) -> Iterator[tuple[Tensor, int, slice]]:
    """(source, position inside it, part of the output) of each source of ``[begin, begin + n)``.

    Positions are those of *starts* times *scale*.
    """
    for source, start, stop in zip(sources, starts, starts[1:], strict=False):
        first, last = max(begin, start * scale), min(begin + n, stop * scale)
        if first < last:
            yield source, first - start * scale, slice(first - begin, last - begin)


@dataclass(frozen=True, slots=True, eq=False)
class Reshaped(FromSource):
    """The same elements in C order under another shape of the same number of elements."""

    source: Tensor
    shape: Shape

    def __post_init__(self) -> None:
        if n_elements(self.shape) != n_elements(self.source.shape):
            raise ShapeError("reshape", self.source.shape, f"it cannot be seen as {self.shape}")

    @property
    def preferred_block(self) -> tuple[int, int]:
        return (1, 1)

    def read_block(self, row: int, col: int, out: Elements) -> None:
        if n_cols(self.shape) == n_cols(self.source.shape):
            self.source.read_block(row, col, out)
            return
        for i in range(out.shape[0]):  # each row is one range of elements
            read_elements(self.source, (row + i) * n_cols(self.shape) + col, out[i])

    def read_range(self, start: int, out: Elements) -> None:
        read_elements(self.source, start, out)

    def program(self) -> Program | None:
        return program_of(self.source)


@dataclass(frozen=True, slots=True, eq=False)
class PermutedAxes(FromSource):
    """The axes after the first, permuted: ``source.transpose(0, *axes)`` seen as *shape*.

    *inner* are the source's axes after the first, *axes* their new order (counted from 1), as in
    ``numpy.transpose``. Rows stay rows, so only the row's own elements move (a convolution kernel seen as a matrix).
    """

    source: Tensor
    inner: Shape
    axes: tuple[int, ...]
    shape: Shape

    @property
    def preferred_block(self) -> tuple[int, int]:
        return self.source.preferred_block[0], n_cols(self.shape)

    def read_block(self, row: int, col: int, out: Elements) -> None:
        cols = math.prod(self.inner)
        step = max(1, SCRATCH // (cols * self.dtype.itemsize))
        for start in range(0, out.shape[0], step):
            part = out[start : start + step]
            with borrow(part.shape[0] * cols * self.dtype.itemsize) as buffer:
                rows = buffer.view(self.dtype.storage_dtype).reshape(part.shape[0], cols)
                self.source.read_block(row + start, 0, rows)
                moved = rows.reshape(-1, *self.inner).transpose(0, *self.axes).reshape(part.shape[0], cols)
                part[...] = moved[:, col : col + out.shape[1]]


def closed_block(order: Order) -> int:
    """The smallest *block* that suits *order* (see `PermutedRows`): neighbouring blocks stay neighbours for long.

    Rows that keep their neighbours need no block (1); a head's interleaved rows need the head; ``len(order)`` always
    suits. Fewer than 8 rows at a time on average would cost more in calls than a larger block costs in copying.
    """
    n = len(order)
    for block in (b for b in range(1, n) if n % b == 0):
        parts = order.reshape(-1, block)
        starts = parts.min(axis=1)
        if (parts.max(axis=1) - starts == block - 1).all() and n >= 8 * (1 + (np.diff(starts) != block).sum()):
            return block
    return max(n, 1)


def rope_pairs(n_heads: int, head_dim: int, rotary_dim: int) -> Order:
    """Half-split rotary rows (Hugging Face) to interleaved pairs (Cerebras), in the first *rotary_dim* rows of a head.

    Pair j of a head is (row j, row j + rotary_dim / 2) of the half-split order; the other rows stay.
    """
    head = np.arange(head_dim)
    head[:rotary_dim] = np.arange(rotary_dim).reshape(2, rotary_dim // 2).T.reshape(-1)
    return (np.arange(n_heads)[:, None] * head_dim + head).reshape(-1)


def inverse(order: Order) -> Order:
    """The order that undoes *order*."""
    back = np.empty_like(order)
    back[order] = np.arange(len(order))
    return back


def heads_to_parts(n_groups: int, parts: tuple[int, ...], head_dim: int) -> Order:
    """Rows packed group by group to rows packed part by part.

    Each group holds ``sum(parts)`` heads of *head_dim* rows: first ``parts[0]`` heads of part 0 (say q), then
    ``parts[1]`` of part 1 (k) … The result has all heads of part 0, then all of part 1, and so on.
    """
    packed = np.arange(n_groups * sum(parts) * head_dim).reshape(n_groups, sum(parts), head_dim)
    cuts = np.cumsum(parts)[:-1]
    return np.concatenate([part.reshape(-1) for part in np.split(packed, cuts, axis=1)])
