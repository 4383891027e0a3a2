"""The `.safetensors` layout, byte for byte what the `safetensors` package writes.

::

    8 bytes   length of the header, little-endian
    header    JSON: optional "__metadata__", then name -> dtype, shape, data_offsets; padded with spaces to 8 bytes
    data      the tensors, in the order of the header, without gaps

The order is that of the reference writer (0.8): dtypes from the widest alignment to the narrowest, then names by
their UTF-8 bytes. So every tensor starts at a multiple of its element size.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from types import MappingProxyType

from ckptfs.errors import UsageError
from ckptfs.formats.source import Tensor, nbytes
from ckptfs.layouts.extent import File, file_of

PT: Mapping[str, str] = MappingProxyType({"format": "pt"})
"""The metadata that transformers writes, and wants to read."""
_ORDER = (
    *("U64", "I64", "F64", "C64", "F32", "U32", "I32", "BF16", "F16", "U16", "I16"),
    *("F8_E4M3", "F8_E5M2", "I8", "U8", "BOOL"),
)
_RANK = {name: rank for rank, name in enumerate(_ORDER)}


def safetensors_file(tensors: Mapping[str, Tensor], metadata: Mapping[str, str] | None = PT) -> File:
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
    """Place of the tensor's dtype in the file; raises for what the format cannot hold."""
    name = tensor.dtype.safetensors
    if name is None:
        raise UsageError(f"{key}: safetensors has no element type for {tensor.dtype.name}; read it from tensors/")
    if key == "__metadata__":
        raise UsageError("safetensors keeps the name __metadata__ for itself; read that tensor from tensors/")
    if any("\ud800" <= char <= "\udfff" for char in key):
        raise UsageError(f"{key!a}: a safetensors name must be valid Unicode; read it from tensors/")
    return _RANK[name]
