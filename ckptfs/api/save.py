"""`save`: a state dict in memory, or an open checkpoint, as a Cerebras checkpoint on disk.

Nothing is copied ahead: tensors are streamed into the file in pieces, row by row where they do not lie in one piece.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Hashable
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from ckptfs.api.checkpoint import Checkpoint
from ckptfs.api.tensor import LazyTensor
from ckptfs.conversion.resolve import PathLike
from ckptfs.errors import UsageError
from ckptfs.formats.cerebras.lz4_writer import write_lz4
from ckptfs.formats.cerebras.state import State, plain_leaf, state_tree
from ckptfs.formats.cerebras.writer import RELEASE, mdl_file
from ckptfs.formats.source import Container, Item, Source
from ckptfs.tensors.dtypes import DTYPES, DType
from ckptfs.tensors.tensor import Elements, Shape
from ckptfs.tools.write import new_file, write_file


def save(
    state: object,
    path: PathLike,
    *,
    compress: str | None = None,
    force: bool = False,
    release: str = RELEASE,
    progress: Callable[[int], object] | None = None,
) -> None:
    """Write *state* to *path* as a Cerebras checkpoint (format 0.5), which ``cstorch.load`` reads.

    *state* nests dicts, lists, tuples, sets and deques of torch tensors, numpy arrays, lazy tensors, numbers, text and
    None; or it is a `Checkpoint`. The same object in two places, and torch tensors that are the same view of one
    memory, stay tied. Named tuples become tuples, and other dicts than dict and OrderedDict become dicts: the format
    keeps no class. *compress* is None (data as they are, which is faster to read, map and mount) or "lz4" (chunks as
    the real writer makes them; smaller where weights or optimizer states have many zeros). *release* is the Cerebras
    release that the file names, *progress* gets the bytes of each piece.

    Raises `UsageError` before anything is written: for values that the format cannot hold (naming their keys) and for a
    *path* that exists, unless *force*. The file appears under its name when it is complete.
    """
    if compress not in (None, "lz4"):
        raise UsageError(f"compress={compress!r} is not known: take None or 'lz4'")
    nested = _of_source(state.source) if isinstance(state, Checkpoint) else state_tree(state, _leaf)
    check = state.check if isinstance(state, Checkpoint) else None
    save_state(nested, path, compress=compress, force=force, release=release, progress=progress, check=check)


def save_state(
    state: State,
    path: PathLike,
    *,
    compress: str | None = None,
    force: bool = False,
    release: str = RELEASE,
    progress: Callable[[int], object] | None = None,
    check: Callable[[], object] | None = None,
) -> None:
    """As `save`, for a tree whose items are made. *check* is called before the file gets its name."""
    if compress is None:
        write_file(mdl_file(state, release=release), path, force=force, progress=progress, check=check)
        return
    with new_file(path, force=force) as output:
        write_lz4(state, output.write_at, release=release, progress=progress)
        if check is not None:
            check()


def _of_source(source: Source) -> State:
    """The state of an open checkpoint; that of a flat format is one dict."""
    keys = tuple(source.items)
    return State(source.tree or Container("dict", keys, keys), source.items)


def _leaf(key: str, value: object) -> tuple[Item, Hashable]:
    """The item of any value that may be saved, and what its ties go by."""
    if isinstance(value, LazyTensor):
        return plain_leaf(key, value.tensor)
    if isinstance(value, np.ndarray):
        return Item(key, "array", tensor=_array(key, value)), id(value)
    if hasattr(value, "untyped_storage") and hasattr(value, "stride"):
        return Item(key, "tensor", tensor=_torch(key, value)), _memory(value)
    if isinstance(value, np.generic) and not isinstance(value, (bool, int, float, str)):
        raise UsageError(f"{key}: a numpy.{type(value).__name__} cannot be written; take .item() or a 0-d array")
    return plain_leaf(key, value)


@dataclass(frozen=True, slots=True)
class MemoryTensor:
    """A tensor over a numpy array of any strides and byte order; its elements are words of *dtype*."""

    dtype: DType
    array: npt.NDArray[Any]

    @property
    def shape(self) -> Shape:
        return self.array.shape

    @property
    def preferred_block(self) -> tuple[int, int]:
        return 1, 1

    def read_block(self, row: int, col: int, out: Elements) -> None:
        rows = self.array[row : row + len(out)] if self.array.ndim else self.array
        native = np.ascontiguousarray(rows, rows.dtype.newbyteorder("<")).view(self.dtype.storage_dtype)
        out[...] = native.reshape(len(out), -1)[:, col : col + out.shape[1]]


def _array(key: str, array: npt.NDArray[Any]) -> MemoryTensor:
    dtype = DTYPES.get(array.dtype.name)
    if dtype is None:
        raise UsageError(f"{key}: a numpy array of {array.dtype} cannot be written")
    return MemoryTensor(dtype, array)


def _torch(key: str, tensor: Any) -> MemoryTensor:
    """A torch tensor of the CPU without a copy; others are copied to the CPU."""
    dtype = DTYPES.get(str(tensor.dtype).removeprefix("torch."))
    if dtype is None or str(tensor.layout) != "torch.strided" or tensor.is_meta:
        where = "meta device" if tensor.is_meta else f"{str(tensor.layout).removeprefix('torch.')}, {tensor.dtype}"
        raise UsageError(f"{key}: a torch tensor without plain elements cannot be written ({where})")
    plain = tensor.detach().cpu().resolve_conj().resolve_neg()
    if dtype.name == "bfloat16" or dtype.name.startswith("float8"):  # numpy has no such type
        torch = sys.modules["torch"]
        plain = plain.view(torch.int16 if dtype.itemsize == 2 else torch.uint8)
    return MemoryTensor(dtype, plain.numpy())


def _memory(tensor: Any) -> Hashable:
    """Equal for torch tensors that are the same view of the same memory."""
    if tensor.is_meta or str(tensor.layout) != "torch.strided" or not tensor.numel():
        return id(tensor)
    place = tensor.untyped_storage().data_ptr(), tensor.storage_offset()
    bits = tensor.is_conj(), tensor.is_neg()
    return (str(tensor.device), *place, str(tensor.dtype), tuple(tensor.shape), tensor.stride(), *bits)
