"""The Python interface: `open` a checkpoint, `view` it as another format, read tensors when they are touched."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from ckptfs.conversion.conversion import Conversion
from ckptfs.conversion.resolve import PathLike, plan_view
from ckptfs.errors import (
    CkptfsError,
    MissingKey,
)
from ckptfs.formats.detect import open_source
from ckptfs.formats.source import Item, Source, nearest_keys
from ckptfs.tensors.cache import shared
from ckptfs.tensors.ranges import to_bytes, to_numpy
from ckptfs.tensors.tensor import Shape, Tensor, nbytes


class LazyTensor:
    """A tensor that is read when it is touched: ``numpy.asarray(t)`` reads all of it, ``t[a:b]`` those rows."""

    __slots__ = ("_tensor",)

    def __init__(self, tensor: Tensor) -> None:
        self._tensor = tensor

    @property
    def shape(self) -> Shape:
        return self._tensor.shape

    @property
    def dtype(self) -> str:
        """torch's name without the prefix, such as ``bfloat16``."""
        return self._tensor.dtype.name

    @property
    def nbytes(self) -> int:
        return nbytes(self._tensor)

    def __len__(self) -> int:
        if not self.shape:
            raise TypeError("len() of a 0-d tensor")
        return self.shape[0]

    def __array__(self, dtype: npt.DTypeLike | None = None, copy: bool | None = None) -> npt.NDArray[Any]:
        if copy is False:
            raise ValueError("a lazy tensor is read from a file: an array of it is always a copy")
        array = to_numpy(self._tensor)
        return array if dtype is None else array.astype(dtype)

    def __getitem__(self, index: Any) -> npt.NDArray[Any]:
        """As numpy's; only the rows that the first index names are read."""
        first, rest = (index[0], index[1:]) if isinstance(index, tuple) and index else (index, ())
        if not self.shape or not isinstance(first, int | slice | np.integer):
            return np.asarray(to_numpy(self._tensor)[index])
        n = self.shape[0]
        if not isinstance(first, slice):
            row = int(first) + (n if first < 0 else 0)
            if not 0 <= row < n:
                raise IndexError(f"row {int(first)} of a tensor with {n} rows")
            return np.asarray(to_numpy(self._tensor, row, row + 1)[0][rest])
        start, stop, step = first.indices(n)
        low, high = (start, stop) if step > 0 else (stop + 1, start + 1)
        rows = to_numpy(self._tensor, low, max(low, high))
        picked = rows[::step] if step > 0 else rows[::-1][::-step]
        inner = (slice(None), *rest)
        return np.asarray(picked[inner])

    def tobytes(self) -> bytes:
        """All data, C order, little-endian."""
        return to_bytes(self._tensor)

    def __repr__(self) -> str:
        return f"LazyTensor({self.dtype}, shape={self.shape})"


class Checkpoint(Mapping[str, Any]):
    """An open checkpoint: flattened key -> `LazyTensor`, or the plain value of a scalar, string or None."""

    def __init__(self, source: Source) -> None:
        self.source = source

    def __getitem__(self, key: str) -> Any:
        item = self.item(key)
        if item.tensor is not None:
            return LazyTensor(item.tensor)
        if item.reason is not None:
            raise CkptfsError(f"{self.source.path}: {key}: {item.reason}")
        return item.value

    def item(self, key: str) -> Item:
        """Everything that is known about *key*."""
        item = self.source.items.get(key)
        if item is None:
            raise MissingKey(self.source.path, key, nearest_keys(key, list(self.source.items)))
        return item

    def __contains__(self, key: object) -> bool:
        return key in self.source.items

    def __iter__(self) -> Iterator[str]:
        return iter(self.source.items)

    def __len__(self) -> int:
        return len(self.source.items)

    @property
    def metadata(self) -> list[Mapping[str, Any]]:
        """The trainer's ``__metadata__``, oldest first."""
        return self.source.metadata

    def close(self) -> None:
        """Close the files; tensors of this checkpoint must not be read any more."""
        self.source.close()

    def __enter__(self) -> Checkpoint:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"<Checkpoint {self.source.path} ({self.source.format}, {len(self)} keys)>"


class View(Mapping[str, LazyTensor]):
    """A checkpoint as another format: target key -> `LazyTensor`; ``config`` is the converted config.

    Keys of a Cerebras target are those inside its ``model`` state.
    """

    def __init__(self, planned: Conversion) -> None:
        self.plan = planned

    @property
    def config(self) -> Mapping[str, Any]:
        return self.plan.config

    @property
    def state(self) -> Checkpoint | None:
        """The whole checkpoint, with optimizer, step and the like, for one Cerebras release as another; else None."""
        return Checkpoint(self.plan.state) if self.plan.state is not None else None

    def __getitem__(self, key: str) -> LazyTensor:
        if key not in self.plan.tensors:
            raise MissingKey(f"{self.plan.model} as {self.plan.tgt}", key, nearest_keys(key, list(self.plan.tensors)))
        return LazyTensor(self.plan.tensors[key])

    def __iter__(self) -> Iterator[str]:
        return iter(self.plan.tensors)

    def __len__(self) -> int:
        return len(self.plan.tensors)


def open(path: PathLike, *, follow_links: bool = False) -> Checkpoint:
    """Open any supported checkpoint; reads headers only. Links out of its folder are followed with *follow_links*."""
    return Checkpoint(open_source(os.fspath(path), shared(), follow_links=follow_links))


def view(
    checkpoint: Checkpoint | PathLike,
    tgt_fmt: str = "hf",
    *,
    model: str | None = None,
    config: PathLike | Mapping[str, Any] | None = None,
    src_fmt: str | None = None,
    drop_unmatched_keys: bool = False,
) -> View:
    """*checkpoint* (open, or a path) as *tgt_fmt* (``hf``, ``cs-2.9``, ``cs-current``).

    *model* and *config* (a mapping, or a YAML or JSON file) default to what the checkpoint says itself. Raises
    `UsageError` when it says nothing, and the errors of `ckptfs.conversion.plan.make_view`.
    """
    opened = checkpoint if isinstance(checkpoint, Checkpoint) else open(checkpoint)
    return View(
        plan_view(opened.source, tgt_fmt, model=model, config=config, src_fmt=src_fmt, drop=drop_unmatched_keys)
    )
