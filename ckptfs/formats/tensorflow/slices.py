"""A variable from its slices: cut along an axis, each part along another one, and so on."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ckptfs.tensors.tensor import Shape, Tensor, n_elements
from ckptfs.tensors.views import ConcatColumns, ConcatRows, Reshaped

MAX_PIECES = 100_000


@dataclass(frozen=True, slots=True)
class Piece:
    """The part of a variable at *starts*, one a axis; *tensor* has its shape."""

    starts: Shape
    tensor: Tensor


def assembled(shape: Shape, pieces: Sequence[Piece]) -> Tensor | None:
    """The tensor of *shape* that *pieces* make; None where they overlap, leave gaps, or cannot be cut so."""
    n_axes = len(shape)
    if not pieces or any(len(p.starts) != n_axes or len(p.tensor.shape) != n_axes for p in pieces):
        return None
    if n_elements(shape) == 0 or len(pieces) > MAX_PIECES:
        return None
    return _box((0,) * n_axes, shape, pieces, n_axes + 1)


def _box(start: Shape, shape: Shape, pieces: Sequence[Piece], depth: int) -> Tensor | None:
    """The part of *shape* at *start*, which *pieces* fill. Each level cuts one axis, so there are few."""
    if len(pieces) == 1:
        found = pieces[0]
        return found.tensor if found.starts == start and found.tensor.shape == shape else None
    if not depth:
        return None
    for axis, n in enumerate(shape):
        bands: dict[tuple[int, int], list[Piece]] = {}
        for piece in pieces:
            bands.setdefault((piece.starts[axis], piece.tensor.shape[axis]), []).append(piece)
        ends = sorted(bands)
        if len(bands) < 2 or not _covers(ends, start[axis], n):
            continue
        parts = []
        for first, length in ends:
            inner = (*start[:axis], first, *start[axis + 1 :]), (*shape[:axis], length, *shape[axis + 1 :])
            part = _box(*inner, bands[first, length], depth - 1)
            if part is None:
                return None
            parts.append(part)
        return _concat(parts, axis, shape)
    return None


def _covers(ranges: Sequence[tuple[int, int]], start: int, n: int) -> bool:
    """Whether (start, length) *ranges*, in order, fill [start, start + n) without overlaps."""
    end = start
    for first, length in ranges:
        if first != end:
            return False
        end += length
    return end == start + n


def _concat(parts: Sequence[Tensor], axis: int, shape: Shape) -> Tensor:
    if axis == 0:
        return ConcatRows(tuple(parts))
    rows = n_elements(shape[:axis])
    flat = [Reshaped(part, (rows, n_elements(part.shape[axis:]))) for part in parts]
    return Reshaped(ConcatColumns(tuple(flat), (rows, n_elements(shape[axis:]))), shape)
