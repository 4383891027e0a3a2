"""Lazy tensors made from other lazy tensors: a closed set of node types that only move elements.

Each node is a `ckptfs.tensors.tensor.Tensor`: it knows dtype and shape at once and writes any block straight into
the caller's buffer, asking its sources for just the blocks it needs. Nodes compare by identity, so tensors that
share a node are tied. Arithmetic is in `elementwise`, generated data in `made`.
"""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass, field
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from ckptfs.errors import ShapeError
from ckptfs.native import program
from ckptfs.native.program import Program
from ckptfs.native.scratch import borrow
from ckptfs.tensors.dtypes import DType
from ckptfs.tensors.ranges import node_of, read_elements, read_transposed
from ckptfs.tensors.tensor import Elements, Shape, Tensor, n_cols, n_elements, n_rows

Order: TypeAlias = npt.NDArray[np.int64]

SCRATCH = 4 << 20
"""Bytes of intermediate data that one node holds at a time."""


@dataclass(frozen=True, slots=True, eq=False)
class PermutedRows:
    """Row i is row ``order[i]`` of *source*.

    *block* says how far rows travel: each run of *block* output rows (aligned) is filled from a run of as many
    neighbouring source rows, in another order (a head of a rotary projection, a part of a packed one).
    """

    source: Tensor
    order: Order
    block: int
    _starts: Order = field(init=False, repr=False)
    """First source row of each block."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "_starts", self.order.reshape(-1, self.block).min(axis=1))

    @property
    def dtype(self) -> DType:
        return self.source.dtype

    @property
    def shape(self) -> Shape:
        return (len(self.order), *self.source.shape[1:])

    @property
    def preferred_block(self) -> tuple[int, int]:
        return max(self.block, self.source.preferred_block[0]), self.source.preferred_block[1]

    def node(self) -> Program | None:
        cols = n_cols(self.shape) * self.dtype.itemsize
        return (
            program.ordered(node_of(self.source), self.order, self._starts, cols) if cols and len(self.order) else None
        )

    def read_block(self, row: int, col: int, out: Elements) -> None:
        stop = row + out.shape[0]
        most = max(1, SCRATCH // max(1, out.shape[1] * self.dtype.itemsize))
        at = row
        while at < stop:
            end = min(stop, self._run_end(at, most))
            self._read_run(at, end, col, out[at - row : end - row])
            at = end

    def _run_end(self, row: int, most: int) -> int:
        """End of the rows from *row* on whose blocks also neighbour each other in the source, about *most* rows."""
        first = row // self.block
        last = min(len(self._starts), first + max(1, most // self.block))
        steps = np.diff(self._starts[first:last])
        broken = np.flatnonzero(steps != self.block)
        return (first + (int(broken[0]) + 1 if len(broken) else last - first)) * self.block

    def _read_run(self, start: int, stop: int, col: int, out: Elements) -> None:
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
class SlicedRows:
    """Rows [start, stop) of *source*."""

    source: Tensor
    start: int
    stop: int

    @property
    def dtype(self) -> DType:
        return self.source.dtype

    @property
    def shape(self) -> Shape:
        return (self.stop - self.start, *self.source.shape[1:])

    @property
    def preferred_block(self) -> tuple[int, int]:
        return self.source.preferred_block

    def read_block(self, row: int, col: int, out: Elements) -> None:
        self.source.read_block(self.start + row, col, out)

    def read_span(self, start: int, out: Elements) -> None:
        read_elements(self.source, self.start * n_cols(self.source.shape) + start, out)

    def read_transposed(self, row: int, col: int, out: Elements) -> bool:
        read_transposed(self.source, self.start + row, col, out)
        return True

    def node(self) -> Program | None:
        row = n_cols(self.shape) * self.dtype.itemsize
        return program.part(node_of(self.source), self.start * row)


@dataclass(frozen=True, slots=True, eq=False)
class ConcatRows:
    """*sources* one below the other; they agree in dtype and in all axes but the first."""

    sources: tuple[Tensor, ...]
    _starts: tuple[int, ...] = field(init=False, repr=False)

    def __post_init__(self) -> None:
        sizes = (n_rows(s.shape) for s in self.sources)
        object.__setattr__(self, "_starts", tuple(itertools.accumulate(sizes, initial=0)))

    @property
    def dtype(self) -> DType:
        return self.sources[0].dtype

    @property
    def shape(self) -> Shape:
        return (self._starts[-1], *self.sources[0].shape[1:])

    @property
    def preferred_block(self) -> tuple[int, int]:
        return self.sources[0].preferred_block

    def read_block(self, row: int, col: int, out: Elements) -> None:
        stop = row + out.shape[0]
        for source, start, end in zip(self.sources, self._starts, self._starts[1:], strict=False):
            first, last = max(row, start), min(stop, end)
            if first < last:
                source.read_block(first - start, col, out[first - row : last - row])

    def read_span(self, start: int, out: Elements) -> None:
        cols = n_cols(self.shape)
        for source, top, bottom in zip(self.sources, self._starts, self._starts[1:], strict=False):
            first, last = max(start, top * cols), min(start + len(out), bottom * cols)
            if first < last:
                read_elements(source, first - top * cols, out[first - start : last - start])

    def read_transposed(self, row: int, col: int, out: Elements) -> bool:
        stop = row + out.shape[1]
        for source, start, end in zip(self.sources, self._starts, self._starts[1:], strict=False):
            first, last = max(row, start), min(stop, end)
            if first < last:
                read_transposed(source, first - start, col, out[:, first - row : last - row])
        return True

    def node(self) -> Program | None:
        row = n_cols(self.shape) * self.dtype.itemsize
        starts = tuple(start * row for start in self._starts)
        return program.joined([node_of(source) for source in self.sources], starts)


@dataclass(frozen=True, slots=True, eq=False)
class SlicedColumns:
    """Columns [start, stop) of the block view of *source*, seen as *shape* (whose first axis is the source's)."""

    source: Tensor
    start: int
    shape: Shape

    @property
    def dtype(self) -> DType:
        return self.source.dtype

    @property
    def preferred_block(self) -> tuple[int, int]:
        return self.source.preferred_block

    def read_block(self, row: int, col: int, out: Elements) -> None:
        self.source.read_block(row, self.start + col, out)


@dataclass(frozen=True, slots=True, eq=False)
class ConcatColumns:
    """*sources* side by side in the block view, seen as *shape*; they agree in dtype and in the number of rows.

    Matrices (out, in) stacked on a new second axis, (out, n, in), are just this.
    """

    sources: tuple[Tensor, ...]
    shape: Shape
    _starts: tuple[int, ...] = field(init=False, repr=False)

    def __post_init__(self) -> None:
        sizes = (n_cols(s.shape) for s in self.sources)
        object.__setattr__(self, "_starts", tuple(itertools.accumulate(sizes, initial=0)))

    @property
    def dtype(self) -> DType:
        return self.sources[0].dtype

    @property
    def preferred_block(self) -> tuple[int, int]:
        return self.sources[0].preferred_block

    def read_block(self, row: int, col: int, out: Elements) -> None:
        stop = col + out.shape[1]
        for source, start, end in zip(self.sources, self._starts, self._starts[1:], strict=False):
            first, last = max(col, start), min(stop, end)
            if first < last:
                source.read_block(row, first - start, out[:, first - col : last - col])


@dataclass(frozen=True, slots=True, eq=False)
class Reshaped:
    """The same elements in C order under another shape of the same number of elements."""

    source: Tensor
    shape: Shape

    def __post_init__(self) -> None:
        if n_elements(self.shape) != n_elements(self.source.shape):
            raise ShapeError("reshape", self.source.shape, f"it cannot be seen as {self.shape}")

    @property
    def dtype(self) -> DType:
        return self.source.dtype

    @property
    def preferred_block(self) -> tuple[int, int]:
        return (1, 1)

    def read_block(self, row: int, col: int, out: Elements) -> None:
        if n_cols(self.shape) == n_cols(self.source.shape):
            self.source.read_block(row, col, out)
            return
        for i in range(out.shape[0]):  # each row is one run of elements
            read_elements(self.source, (row + i) * n_cols(self.shape) + col, out[i])

    def read_span(self, start: int, out: Elements) -> None:
        read_elements(self.source, start, out)

    def node(self) -> Program | None:
        return node_of(self.source)


@dataclass(frozen=True, slots=True, eq=False)
class PermutedAxes:
    """The axes after the first, permuted: ``source.transpose(0, *axes)`` seen as *shape*.

    *inner* are the source's axes after the first, *axes* their new order (counted from 1), as in
    ``numpy.transpose``. Rows stay rows, so only the row's own elements move (a convolution kernel seen as a matrix).
    """

    source: Tensor
    inner: Shape
    axes: tuple[int, ...]
    shape: Shape

    @property
    def dtype(self) -> DType:
        return self.source.dtype

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
    """The *block* that suits *order* (see `PermutedRows`): the smallest whose blocks neighbour each other in long runs.

    Rows that keep their neighbours need no block (1); a head's interleaved rows need the head; ``len(order)`` always
    holds. A run shorter than 8 rows on average would cost more in calls than a wider block costs in copying.
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
