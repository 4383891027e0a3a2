"""safetensors files.

==========================  =====================================================================
bytes                       content
==========================  =====================================================================
0-8                         header's length n, unsigned, little-endian
8-(8 + n)                   JSON object, may end in spaces: name -> {dtype, shape, data_offsets}
(8 + n)-end of the file     the tensors' data; ``data_offsets`` [start, stop) count from here
==========================  =====================================================================

The tensors cover the data: none overlaps another, and there are no gaps. ``__metadata__`` (a map of strings, mostly
``{"format": "pt"}``) says nothing about tensors and is ignored.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from contextlib import ExitStack
from types import MappingProxyType
from typing import Any

from ckptfs.errors import CorruptHeader, UsageError
from ckptfs.formats.extents import ExtentFile, file_of
from ckptfs.formats.files import checked_shape, json_object, open_file, read_exactly
from ckptfs.formats.source import Item, Source
from ckptfs.tensors.dtypes import BY_SAFETENSORS, DType
from ckptfs.tensors.file_tensor import FileTensor
from ckptfs.tensors.source_file import SourceFile
from ckptfs.tensors.tensor import Tensor, n_elements, nbytes

MAX_HEADER = 100_000_000
"""The reference implementation's limit (bytes)."""


def is_safetensors(head: bytes, size: int) -> bool:
    """Whether a file of *size* bytes that starts with *head* (9 bytes or more) is a safetensors file."""
    return head[8:9] == b"{" and 2 <= int.from_bytes(head[:8], "little") <= min(MAX_HEADER, size - 8)


def open_safetensors(path: str | os.PathLike[str]) -> Source:
    """Open a safetensors file; items in the order of its header.

    Raises `CorruptHeader` naming the tensor, after checking in this order: length, JSON, names, then per tensor
    its fields, dtype, shape and size, then that the tensors cover the data.
    """
    file = open_file(path)
    with ExitStack() as undo:
        undo.callback(file.discard)
        start, header = _read_header(file)
        header.pop("__metadata__", None)
        ranges: list[tuple[int, int, str]] = []
        items: dict[str, Item] = {}
        for key, entry in header.items():
            dtype, shape, first, last = _entry(file, key, entry)
            ranges.append((first, last, key))
            tensor = FileTensor(dtype, shape, file, start + first, None, key)
            items[key] = Item(key, "tensor", tensor)
        _check_cover(file, ranges, file.size - start)
        undo.pop_all()
    return Source(file.path, "safetensors", None, None, items, mtime_ns=file.mtime_ns, nbytes=file.size, files=[file])


def _read_header(file: SourceFile) -> tuple[int, dict[str, Any]]:
    """Where the data starts, and the header as it stands."""
    n = int.from_bytes(read_exactly(file, 0, 8, "the header's length"), "little")
    if not 2 <= n <= MAX_HEADER:
        raise CorruptHeader(file.path, f"the header's length is {n}; it must be 2 to {MAX_HEADER} bytes")
    return 8 + n, json_object(read_exactly(file, 8, n, "the header"), file.path, "the header")


def _entry(file: SourceFile, key: str, entry: object) -> tuple[DType, tuple[int, ...], int, int]:
    """(dtype, shape, start, stop) of one tensor; offsets count from the start of the data."""
    if not key.isascii() and any("\ud800" <= char <= "\udfff" for char in key):
        raise CorruptHeader(file.path, f"{key!a}: its name is not Unicode text")
    if not isinstance(entry, dict) or set(entry) != {"dtype", "shape", "data_offsets"}:
        raise CorruptHeader(file.path, f"{key}: its entry must have dtype, shape and data_offsets, nothing else")
    dtype = BY_SAFETENSORS.get(entry["dtype"]) if isinstance(entry["dtype"], str) else None
    if dtype is None:
        raise CorruptHeader(file.path, f"{key}: dtype {entry['dtype']!r:.100} is not known")
    try:
        shape = checked_shape(entry["shape"], dtype.itemsize)
    except ValueError as error:
        raise CorruptHeader(file.path, f"{key}: {error}") from error
    offsets = entry["data_offsets"]
    if not isinstance(offsets, list) or [type(n) for n in offsets] != [int, int] or not 0 <= offsets[0] <= offsets[1]:
        raise CorruptHeader(file.path, f"{key}: its data_offsets are not [start, stop]")
    start, stop = offsets
    nbytes = n_elements(shape) * dtype.itemsize
    if stop - start != nbytes:
        what = f"its data_offsets hold {stop - start} bytes, but {entry['dtype']} {list(shape)} needs {nbytes}"
        raise CorruptHeader(file.path, f"{key}: {what}")
    return dtype, shape, start, stop


def _check_cover(file: SourceFile, ranges: list[tuple[int, int, str]], size: int) -> None:
    """The tensors must cover ``[0, size)`` without overlaps or holes."""
    end = 0
    for start, stop, key in sorted(ranges):
        if start != end:
            fault = "overlaps the tensor before it" if start < end else "leaves a hole before it"
            raise CorruptHeader(file.path, f"{key}: its data starts at {start} and {fault} (which ends at {end})")
        if stop > size:
            raise CorruptHeader(file.path, f"{key}: its data ends at {stop}, past the file's end ({size})")
        end = stop
    if end != size:
        raise CorruptHeader(file.path, f"the tensors end at {end}, but the file has {size} bytes of data")


PT: Mapping[str, str] = MappingProxyType({"format": "pt"})
"""The metadata that transformers writes, and wants to read."""
_ORDER = (
    *("U64", "I64", "F64", "C64", "F32", "U32", "I32", "BF16", "F16", "U16", "I16"),
    *("F8_E4M3", "F8_E5M2", "I8", "U8", "BOOL"),
)
_RANK = {name: rank for rank, name in enumerate(_ORDER)}


def safetensors_file(tensors: Mapping[str, Tensor], metadata: Mapping[str, str] | None = PT) -> ExtentFile:
    """What ``safetensors.torch.save_file(tensors, path, metadata)`` writes.

    The reference spells *metadata* in a random order when it has several entries; here the given order is kept.
    Raises `UsageError` for an element type or a key that the format cannot hold.
    """
    names = sorted(tensors, key=lambda key: (_rank(key, tensors[key]), key))
    header: dict[str, object] = {} if metadata is None else {"__metadata__": dict(metadata)}
    offset = 0
    for name in names:
        tensor = tensors[name]
        stop = offset + nbytes(tensor)
        header[name] = {
            "dtype": tensor.dtype.safetensors,
            "shape": list(tensor.shape),
            "data_offsets": [offset, stop],
        }
        offset = stop
    text = json.dumps(header, ensure_ascii=False, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return file_of([len(text).to_bytes(8, "little") + text, *(tensors[name] for name in names)])


def _rank(key: str, tensor: Tensor) -> int:
    """Rank of the tensor's dtype in the order of the file; raises for what the format cannot hold."""
    name = tensor.dtype.safetensors
    if name is None:
        raise UsageError(f"{key}: safetensors has no element type for {tensor.dtype.name}; read it from tensors/")
    if key == "__metadata__":
        raise UsageError("safetensors keeps the name __metadata__ for itself; read that tensor from tensors/")
    if any("\ud800" <= char <= "\udfff" for char in key):
        raise UsageError(f"{key!a}: a safetensors name must be valid Unicode; read it from tensors/")
    return _RANK[name]
