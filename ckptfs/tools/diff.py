"""Compare two checkpoints of any formats: which keys they have, and the values under the keys of both.

Tensors are read in pieces, each once; memory does not grow with them. Ties, containers and the order of keys do not
matter: the flattened state dicts are compared.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from fnmatch import fnmatchcase
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from ckptfs.errors import CkptfsError
from ckptfs.formats.source import Item
from ckptfs.tensors.scan import count_nan_inf, element_ranges
from ckptfs.tensors.tensor import Tensor, n_elements, nbytes

Items = Mapping[str, Item]
What = Literal["kind", "dtype", "shape", "value"]


@dataclass(frozen=True, slots=True)
class How:
    """What counts as the same. Values a and b are if |a - b| <= atol + rtol * |b|: by default, if they are equal."""

    rtol: float = 0.0
    atol: float = 0.0
    equal_nan: bool = False
    """Whether NaN is equal to NaN."""
    dtypes: bool = True
    """Whether element types matter; values are compared across them otherwise."""
    values: bool = True
    """Whether to read values at all."""

    @property
    def exact(self) -> bool:
        return not (self.rtol or self.atol)


@dataclass(frozen=True, slots=True)
class Difference:
    """What differs under a key of both; *a* and *b* are the two sides (of values: the first that differ)."""

    key: str
    what: What
    a: Any
    b: Any
    n_different: int | None = None
    n_elements: int | None = None
    index: tuple[int, ...] | None = None
    """Of the first element that differs."""
    largest: float | None = None
    """The largest absolute difference between numbers."""
    n_nan: int | None = None
    """How many of the elements that differ are NaN on both sides."""


@dataclass(slots=True)
class Comparison:
    """What `compare` found; keys are in the order of the sides."""

    same: list[str] = field(default_factory=list)
    only_in_a: list[str] = field(default_factory=list)
    only_in_b: list[str] = field(default_factory=list)
    different: list[Difference] = field(default_factory=list)
    not_compared: list[str] = field(default_factory=list)
    """Keys of objects that are not loaded on either side."""
    errors: dict[str, str] = field(default_factory=dict)
    """Key to the reason why it could not be read."""

    @property
    def equal(self) -> bool:
        return not (self.only_in_a or self.only_in_b or self.different or self.errors)

    def plain(self) -> dict[str, Any]:
        """As JSON has it."""
        found = {name: getattr(self, name) for name in ("only_in_a", "only_in_b", "not_compared", "errors")}
        different = [{k: _json(v) for k, v in asdict(d).items() if v is not None or k in "ab"} for d in self.different]
        return {"equal": self.equal, "n_same": len(self.same), "different": different, **found}


def _json(value: Any) -> Any:
    """NaN and infinity as text: JSON has no numbers for them."""
    return str(value) if isinstance(value, float) and not np.isfinite(value) else value


def chosen(items: Items, *, prefix: str = "", keys: Sequence[str] = (), ignore: Sequence[str] = ()) -> dict[str, Item]:
    """The items whose keys start with *prefix*; what follows it matches one of *keys* (if any) and none of *ignore*."""
    cut = {key.removeprefix(prefix): item for key, item in items.items() if key.startswith(prefix)}
    return {
        key: item
        for key, item in cut.items()
        if (not keys or any(fnmatchcase(key, p) for p in keys)) and not any(fnmatchcase(key, p) for p in ignore)
    }


def data_nbytes(a: Items, b: Items) -> int:
    """Bytes that comparing values reads on the side of *a*."""
    return sum(nbytes(item.tensor) for key, item in a.items() if key in b and item.tensor is not None)


def compare(a: Items, b: Items, how: How, *, progress: Callable[[int], object] | None = None) -> Comparison:
    """All differences. Keys whose data are damaged are among its errors; *progress* gets the bytes of each piece."""
    found = Comparison(only_in_a=[k for k in a if k not in b], only_in_b=[k for k in b if k not in a])
    for key in a:
        if key not in b:
            continue
        if a[key].reason is not None or b[key].reason is not None:
            _compare_refused(found, a[key], b[key], key)
            continue
        try:
            different = list(_differences(key, a[key], b[key], how, progress))
        except (CkptfsError, OSError) as error:
            found.errors[key] = str(error)
            continue
        found.different += different
        if not different:
            found.same.append(key)
    return found


def _compare_refused(found: Comparison, a: Item, b: Item, key: str) -> None:
    """An item without a value. Two objects of one class count as not compared."""
    if a.kind == b.kind == "object" and a.class_name is not None and a.class_name == b.class_name:
        found.not_compared.append(key)
    elif a.kind == b.kind or "link" in (a.kind, b.kind):
        found.errors[key] = "; ".join(f"{side}: {i.reason}" for side, i in (("A", a), ("B", b)) if i.reason)
    else:
        found.different.append(Difference(key, "kind", a.class_name or a.kind, b.class_name or b.kind))


def _differences(
    key: str, a: Item, b: Item, how: How, progress: Callable[[int], object] | None
) -> Iterator[Difference]:
    if a.tensor is None or b.tensor is None:
        yield from _plain_difference(key, a, b, how)
        return
    if how.dtypes and a.tensor.dtype != b.tensor.dtype:
        yield Difference(key, "dtype", a.tensor.dtype.name, b.tensor.dtype.name)
    if a.tensor.shape != b.tensor.shape:
        yield Difference(key, "shape", list(a.tensor.shape), list(b.tensor.shape))
    elif how.values:
        yield from _value_difference(key, a.tensor, b.tensor, how, progress)


def _plain_difference(key: str, a: Item, b: Item, how: How) -> Iterator[Difference]:
    """Of numbers, texts and None; a tensor is never the same as one of these."""
    kinds = _kind(a), _kind(b)
    numbers = all(isinstance(item.value, (int, float)) for item in (a, b))
    if kinds[0] != kinds[1] and not (numbers and not how.dtypes):
        yield Difference(key, "kind", *kinds)
    elif how.values and not (_close(a.value, b.value, how) if numbers else a.value == b.value):
        yield Difference(key, "value", a.value, b.value)


def _kind(item: Item) -> str:
    return "tensor" if item.tensor is not None else type(item.value).__name__ if item.kind == "scalar" else item.kind


def _close(a: Any, b: Any, how: How) -> bool:
    """Two Python numbers, of any size."""
    if a == b:
        return True
    if a != a or b != b:
        return how.equal_nan and a != a and b != b
    if how.exact or abs(a) == np.inf or abs(b) == np.inf:
        return False
    return bool(abs(a - b) <= how.atol + how.rtol * abs(b))


@dataclass(slots=True)
class _Tally:
    """What has been found in one tensor."""

    n: int = 0
    n_nan: int = 0
    first: tuple[int, Any, Any] | None = None
    largest: float | None = None


def _value_difference(
    key: str, a: Tensor, b: Tensor, how: How, progress: Callable[[int], object] | None
) -> Iterator[Difference]:
    tally = _Tally()
    for (start, words), (_, others) in zip(element_ranges(a), element_ranges(b), strict=True):
        _compare_piece(tally, start, (a, words), (b, others), how)
        if progress is not None:
            progress(words.nbytes)
    if tally.first is None:
        return
    place, one, other = tally.first
    index = tuple(int(i) for i in np.unravel_index(place, a.shape)) if a.shape else ()
    yield Difference(key, "value", one, other, tally.n, n_elements(a.shape), index, tally.largest, tally.n_nan or None)


def _compare_piece(
    tally: _Tally, start: int, a: tuple[Tensor, npt.NDArray[Any]], b: tuple[Tensor, npt.NDArray[Any]], how: How
) -> None:
    dtype = a[0].dtype
    if dtype == b[0].dtype and np.array_equal(a[1], b[1]) and (how.equal_nan or not count_nan_inf(dtype, a[1])[0]):
        return
    one, other = (_numbers(tensor, words) for tensor, words in (a, b))
    with np.errstate(all="ignore"):
        different = one != other
        nan = (one != one) & (other != other)
        if how.equal_nan:
            different &= ~nan
        gap = np.abs(one.astype(_WIDE[one.dtype.kind]) - other.astype(_WIDE[other.dtype.kind]))
        if not how.exact:
            different &= ~((gap <= how.atol + how.rtol * np.abs(other)) & np.isfinite(gap))
    places = np.flatnonzero(different)
    if not len(places):
        return
    tally.n += len(places)
    tally.n_nan += int(np.count_nonzero(nan[places]))
    if tally.first is None:
        i = int(places[0])
        tally.first = start + i, _python(one[i]), _python(other[i])
    gaps = gap[places]
    if len(gaps := gaps[~np.isnan(gaps)]):
        tally.largest = max(tally.largest or 0.0, float(gaps.max()))


_WIDE = {"b": "f8", "i": "f8", "u": "f8", "f": "f8", "c": "c16"}


def _numbers(tensor: Tensor, words: npt.NDArray[Any]) -> npt.NDArray[Any]:
    """The values; those of types that numpy lacks are widened."""
    values = words.view(tensor.dtype.numpy)
    return values if values.dtype.kind in _WIDE else values.astype("f4")


def _python(value: Any) -> Any:
    """A number for JSON; complex ones as text."""
    found = value.item()
    return str(found) if isinstance(found, complex) else found
