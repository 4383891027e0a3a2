"""Ops: what happens to tensors between a Hugging Face and a Cerebras key, besides the name.

An op takes the tensors of a rule's Hugging Face side (a list; most rules have one) and returns those of its Cerebras
side. `inverse` is the op for the other direction. Ops only move elements, unless their docstring says otherwise.
Numbers such as head counts come from *sizes*, which a family computes once from the Cerebras config.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Protocol, TypeAlias

from ckptfs.errors import ShapeError
from ckptfs.tensors.elementwise import elementwise
from ckptfs.tensors.tensor import Tensor
from ckptfs.tensors.transpose import Transposed
from ckptfs.tensors.views import (
    ConcatColumns,
    ConcatRows,
    Order,
    PermutedAxes,
    PermutedRows,
    Reshaped,
    SlicedColumns,
    SlicedRows,
    closed_block,
    heads_to_parts,
    inverse,
    rope_pairs,
)

Sizes: TypeAlias = Mapping[str, int]


class Op(Protocol):
    """One step of a rule; frozen data."""

    def inverse(self) -> Op: ...

    def apply(self, xs: list[Tensor], sizes: Sizes) -> list[Tensor]: ...


@dataclass(frozen=True, slots=True)
class Transpose:
    """Swap the axes of matrices; vectors stay. GPT-2's Conv1D stores (in, out)."""

    def inverse(self) -> Op:
        return self

    def apply(self, xs: list[Tensor], sizes: Sizes) -> list[Tensor]:
        return [Transposed(x) if len(x.shape) == 2 else x for x in xs]


@dataclass(frozen=True, slots=True)
class Split:
    """Split one tensor by rows in the proportion *ratio* (names of sizes, or numbers); inverse: `Concat`."""

    ratio: tuple[str | int, ...]

    def inverse(self) -> Op:
        return Concat(self.ratio)

    def apply(self, xs: list[Tensor], sizes: Sizes) -> list[Tensor]:
        (x,) = xs
        shares = [sizes[r] if isinstance(r, str) else r for r in self.ratio]
        if not x.shape or x.shape[0] % sum(shares):
            raise ShapeError("packed tensor", x.shape, f"its rows must divide into {sum(shares)} equal shares")
        unit, start, parts = x.shape[0] // sum(shares), 0, []
        for share in shares:
            parts.append(SlicedRows(x, start, start + share * unit))
            start += share * unit
        return list(parts)


@dataclass(frozen=True, slots=True)
class Concat:
    """Concatenate the parts of a `Split` again."""

    ratio: tuple[str | int, ...]

    def inverse(self) -> Op:
        return Split(self.ratio)

    def apply(self, xs: list[Tensor], sizes: Sizes) -> list[Tensor]:
        first = xs[0]
        for x in xs:
            if x.shape[1:] != first.shape[1:] or x.dtype != first.dtype or not x.shape:
                want = f"its columns and dtype must be those of {first.shape} {first.dtype.name}"
                raise ShapeError("part of a packed tensor", x.shape, want)
        return [ConcatRows(tuple(xs))]


@dataclass(frozen=True, slots=True)
class PermuteRows:
    """Reorder the rows of each tensor. *order* gives ``cs = hf[order]`` from sizes and the number of rows."""

    order: Callable[[Sizes, int], Order]
    back: bool = False

    def inverse(self) -> Op:
        return PermuteRows(self.order, not self.back)

    def apply(self, xs: list[Tensor], sizes: Sizes) -> list[Tensor]:
        return [self._reorder(x, sizes) for x in xs]

    def _reorder(self, x: Tensor, sizes: Sizes) -> Tensor:
        rows = x.shape[0] if x.shape else 1
        return PermutedRows(x, *_order_and_block(self.order, tuple(sizes.items()), rows, self.back))


@lru_cache(maxsize=64)
def _order_and_block(
    order: Callable[[Sizes, int], Order], sizes: tuple[tuple[str, int], ...], rows: int, back: bool
) -> tuple[Order, int]:
    """Cached: it is the same for all layers of a model, and took a third of the planning of a large model."""
    found = order(dict(sizes), rows)
    if back:
        found = inverse(found)
    found.flags.writeable = False
    return found, closed_block(found)


@dataclass(frozen=True, slots=True)
class RollRows:
    """The first row of each tensor goes to the end; the others keep their order."""

    back: bool = False

    def inverse(self) -> Op:
        return RollRows(not self.back)

    def apply(self, xs: list[Tensor], sizes: Sizes) -> list[Tensor]:
        return [self._moved(x) for x in xs]

    def _moved(self, x: Tensor) -> Tensor:
        n = x.shape[0] if x.shape else 0
        if n < 2:
            return x
        cut = n - 1 if self.back else 1
        return ConcatRows((SlicedRows(x, cut, n), SlicedRows(x, 0, cut)))


@dataclass(frozen=True, slots=True)
class Each:
    """One op for each tensor of the list; None leaves its tensor alone."""

    ops: tuple[Op | None, ...]

    def inverse(self) -> Op:
        return Each(tuple(op and op.inverse() for op in self.ops))

    def apply(self, xs: list[Tensor], sizes: Sizes) -> list[Tensor]:
        return [op.apply([x], sizes)[0] if op else x for op, x in zip(self.ops, xs, strict=True)]


@dataclass(frozen=True, slots=True)
class Reorder:
    """The tensors of the list in another order: result i is tensor ``order[i]``."""

    order: tuple[int, ...]

    def inverse(self) -> Op:
        return Reorder(tuple(self.order.index(i) for i in range(len(self.order))))

    def apply(self, xs: list[Tensor], sizes: Sizes) -> list[Tensor]:
        return [xs[i] for i in self.order]


@dataclass(frozen=True, slots=True)
class Stack:
    """n tensors (out, in) to one (out, n, in), in the order of the list; inverse: `Unstack`."""

    def inverse(self) -> Op:
        return Unstack()

    def apply(self, xs: list[Tensor], sizes: Sizes) -> list[Tensor]:
        first = xs[0].shape
        for x in xs:
            if x.shape != first or len(first) != 2:
                raise ShapeError("stacked tensor", x.shape, f"all must be matrices of one shape, as {first}")
        return [ConcatColumns(tuple(xs), (first[0], len(xs), first[1]))]


@dataclass(frozen=True, slots=True)
class Unstack:
    """One tensor (out, n, in) to n tensors (out, in)."""

    def inverse(self) -> Op:
        return Stack()

    def apply(self, xs: list[Tensor], sizes: Sizes) -> list[Tensor]:
        (x,) = xs
        if len(x.shape) != 3:
            raise ShapeError("stacked tensor", x.shape, "it must have three axes (out, n, in)")
        rows, n, cols = x.shape
        return [SlicedColumns(x, i * cols, (rows, cols)) for i in range(n)]


@dataclass(frozen=True, slots=True)
class TakeFirst:
    """The first of several copies of one tensor; inverse: `Repeat`. *n* is the name of a size."""

    n: str

    def inverse(self) -> Op:
        return Repeat(self.n)

    def apply(self, xs: list[Tensor], sizes: Sizes) -> list[Tensor]:
        return xs[:1]


@dataclass(frozen=True, slots=True)
class Repeat:
    """The same tensor several times; inverse: `TakeFirst`."""

    n: str

    def inverse(self) -> Op:
        return TakeFirst(self.n)

    def apply(self, xs: list[Tensor], sizes: Sizes) -> list[Tensor]:
        return xs * sizes[self.n]


@dataclass(frozen=True, slots=True)
class Reshape:
    """The same elements, with axes of size 1 added in front (*hf_ones*) on the Hugging Face side only."""

    hf_ones: int
    back: bool = False

    def inverse(self) -> Op:
        return Reshape(self.hf_ones, not self.back)

    def apply(self, xs: list[Tensor], sizes: Sizes) -> list[Tensor]:
        ones = (1,) * self.hf_ones
        if self.back:
            return [Reshaped(x, ones + x.shape) for x in xs]
        for x in xs:
            if x.shape[: self.hf_ones] != ones:
                raise ShapeError("tensor", x.shape, f"its first {self.hf_ones} axes must be 1")
        return [Reshaped(x, x.shape[self.hf_ones :]) for x in xs]


@dataclass(frozen=True, slots=True)
class ConvToLinear:
    """A convolution's kernel (out, channels, side, side) <-> a matrix (out, side * side * channels), channels last.

    *channels* and *side* are names of sizes.
    """

    channels: str
    side: str
    back: bool = False

    def inverse(self) -> Op:
        return ConvToLinear(self.channels, self.side, not self.back)

    def apply(self, xs: list[Tensor], sizes: Sizes) -> list[Tensor]:
        n, side = sizes[self.channels], sizes[self.side]
        kernel, row = (n, side, side), (side * side * n,)
        given, wanted = (row, kernel) if self.back else (kernel, row)
        inner, axes = ((side, side, n), (3, 1, 2)) if self.back else (kernel, (2, 3, 1))
        for x in xs:
            if x.shape[1:] != given:
                raise ShapeError("patch embedding", x.shape, f"patches must be {side} x {side} with {n} channels")
        return [PermutedAxes(x, inner, axes, (x.shape[0], *wanted)) for x in xs]


@dataclass(frozen=True, slots=True)
class AddScalar:
    """Add *number* in the tensor's own dtype. Not exact: rounding loses bits, so back again may differ."""

    number: float

    def inverse(self) -> Op:
        return AddScalar(-self.number)

    def apply(self, xs: list[Tensor], sizes: Sizes) -> list[Tensor]:
        return [elementwise(x, ("add", self.number)) for x in xs]


def permute_for_rope(heads: str | int) -> Op:
    """Half-split rotary rows <-> interleaved pairs, for *heads* heads (the name of a size, or a number)."""

    def order(sizes: Sizes, n_rows: int) -> Order:
        n = sizes[heads] if isinstance(heads, str) else heads
        rotary = sizes["rotary"]
        if n_rows % n or rotary % 2 or n_rows // n < rotary:
            want = f"its rows must be {n} heads of at least {rotary} (an even number of) rotary rows"
            raise ShapeError("rotary projection", (n_rows,), want)
        return rope_pairs(n, n_rows // n, rotary)

    return PermuteRows(order)


def ungroup_heads(groups: str | int, parts: tuple[str | int, ...]) -> Op:
    """Rows packed head by head (or group by group) <-> rows packed part by part; see `heads_to_parts`."""

    def order(sizes: Sizes, n_rows: int) -> Order:
        shares = tuple(sizes[p] if isinstance(p, str) else p for p in parts)
        n = sizes[groups] if isinstance(groups, str) else groups
        if n_rows % (n * sum(shares)):
            raise ShapeError("packed projection", (n_rows,), f"its rows must divide by {n} x {sum(shares)} heads")
        return heads_to_parts(n, shares, n_rows // (n * sum(shares)))

    return PermuteRows(order)
