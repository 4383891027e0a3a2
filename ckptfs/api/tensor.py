"""`LazyTensor`: a tensor that is read when it is touched, for numpy, torch and whoever speaks DLPack."""

from __future__ import annotations

from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from ckptfs.api import html
from ckptfs.api.to_torch import to_torch
from ckptfs.errors import UsageError
from ckptfs.tensors.ranges import to_bytes, to_numpy
from ckptfs.tensors.tensor import Shape, Tensor, n_elements, nbytes

_CPU = 1, 0
"""DLPack's device: type and number."""


class Owner(Protocol):
    """The checkpoint or view that a tensor comes from."""

    def check(self) -> None:
        """Raise `SourceClosed` or `SourceChanged` where it cannot be read any more."""
        ...

    def __getitem__(self, key: str, /) -> Any: ...


class LazyTensor:
    """A tensor that is read when it is touched: ``numpy.asarray(t)`` reads all of it, ``t[a:b]`` those rows.

    It keeps its checkpoint open, unless that is closed: then reading raises `SourceClosed`. A pickle of it opens the
    checkpoint again, by its path, and refuses a file that is another one by then.
    """

    __slots__ = ("_key", "_owner", "_tensor")

    def __init__(self, tensor: Tensor, owner: Owner | None = None, key: str = "") -> None:
        self._tensor = tensor
        self._owner = owner
        self._key = key

    @property
    def shape(self) -> Shape:
        return self._tensor.shape

    @property
    def ndim(self) -> int:
        return len(self._tensor.shape)

    @property
    def size(self) -> int:
        """How many elements it has, as numpy's."""
        return n_elements(self._tensor.shape)

    @property
    def dtype(self) -> str:
        """torch's name without the prefix, such as ``bfloat16``."""
        return self._tensor.dtype.name

    @property
    def nbytes(self) -> int:
        return nbytes(self._tensor)

    @property
    def tensor(self) -> Tensor:
        """What the rooms below read; checked to be readable."""
        if self._owner is not None:
            self._owner.check()
        return self._tensor

    def __len__(self) -> int:
        if not self.shape:
            raise TypeError("len() of a 0-d tensor")
        return self.shape[0]

    def __array__(self, dtype: npt.DTypeLike | None = None, copy: bool | None = None) -> npt.NDArray[Any]:
        if copy is False:
            raise ValueError("a lazy tensor is read from a file: an array of it is always a copy")
        array = self.numpy()
        return array if dtype is None else array.astype(dtype)

    def __getitem__(self, index: Any) -> npt.NDArray[Any]:
        """As numpy's; only the rows that the first index names are read."""
        first, rest = (index[0], index[1:]) if isinstance(index, tuple) and index else (index, ())
        if not self.shape or not isinstance(first, int | slice | np.integer):
            return np.asarray(self.numpy()[index])
        n = self.shape[0]
        if not isinstance(first, slice):
            row = int(first) + (n if first < 0 else 0)
            if not 0 <= row < n:
                raise IndexError(f"row {int(first)} of a tensor with {n} rows")
            return np.asarray(to_numpy(self.tensor, row, row + 1)[0][rest])
        start, stop, step = first.indices(n)
        low, high = (start, stop) if step > 0 else (stop + 1, start + 1)
        rows = to_numpy(self.tensor, low, max(low, high))
        picked = rows[::step] if step > 0 else rows[::-1][::-step]
        inner = (slice(None), *rest)
        return np.asarray(picked[inner])

    def numpy(self) -> npt.NDArray[Any]:
        """All of it; bfloat16 and float8 as ml_dtypes' types."""
        return to_numpy(self.tensor)

    def torch(self) -> Any:
        """All of it as a torch tensor of the same element type. Raises `MissingCodec` without torch."""
        return to_torch(self.tensor, repr(self))

    def tobytes(self) -> bytes:
        """All data, C order, little-endian."""
        return to_bytes(self.tensor)

    def __dlpack_device__(self) -> tuple[int, int]:
        return _CPU

    def __dlpack__(
        self,
        *,
        stream: Any = None,
        max_version: tuple[int, int] | None = None,
        dl_device: tuple[Any, int] | None = None,
        copy: bool | None = None,
    ) -> Any:
        """What was read, as a capsule. Element types that numpy's DLPack lacks (bfloat16, float8) go through torch."""
        if copy is False:
            raise BufferError("a lazy tensor is read from a file: what DLPack gets is always a copy")
        if dl_device is not None and tuple(map(int, dl_device)) != _CPU:
            raise BufferError("a lazy tensor is read into the memory of the CPU")
        read = self.numpy() if self._tensor.dtype.numpy.kind in "biufc" else self.torch()
        export: Any = read.__dlpack__
        return export(stream=stream) if max_version is None else export(stream=stream, max_version=max_version)

    def __copy__(self) -> LazyTensor:
        return self

    def __deepcopy__(self, memo: object) -> LazyTensor:
        return self  # nothing in it ever changes

    def __reduce__(self) -> tuple[Any, ...]:
        if self._owner is None:
            raise UsageError(f"{self!r} cannot be pickled: it comes from no checkpoint")
        return _tensor_of, (self._owner, self._key)

    def __repr__(self) -> str:
        return f"LazyTensor({self.dtype}, shape={self.shape})"

    def _repr_html_(self) -> str:
        return html.tensor(self._key, self._tensor)


def _tensor_of(owner: Owner, key: str) -> LazyTensor:
    """The tensor that was pickled."""
    found = owner[key]
    assert isinstance(found, LazyTensor)
    return found
