"""Checkpoints cut into several files, and the index that says where each tensor is."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal, TypeAlias

from ckptfs.formats.source import Tensor, nbytes
from ckptfs.layouts.extent import File
from ckptfs.layouts.safetensors import safetensors_file
from ckptfs.layouts.text import json_file

Numbering: TypeAlias = Literal["as needed", "always"]
"""``as needed``: one plain file without an index when everything fits into it, as transformers saves.
``always``: numbers and an index even for one shard, as the Cerebras converter saves."""


def shards(tensors: Mapping[str, Tensor], max_bytes: int) -> list[dict[str, Tensor]]:
    """*tensors* cut into shards of at most *max_bytes* of tensor data, at least one, filled in key order.

    A key that would overflow the limit opens a new shard; a tensor above the limit has a shard of its own.
    """
    found: list[dict[str, Tensor]] = [{}]
    used = 0
    for key, tensor in tensors.items():
        size = nbytes(tensor)
        if found[-1] and used + size > max_bytes:
            found.append({})
            used = 0
        found[-1][key] = tensor
        used += size
    return found


def named_shards(
    tensors: Mapping[str, Tensor],
    max_bytes: int,
    *,
    stem: str = "model",
    suffix: str = ".safetensors",
    numbering: Numbering = "as needed",
) -> dict[str, dict[str, Tensor]]:
    """File name to the tensors in it: ``model.safetensors``, or ``model-00001-of-00003.safetensors`` and so on."""
    parts = shards(tensors, max_bytes)
    if len(parts) == 1 and numbering == "as needed":
        return {f"{stem}{suffix}": parts[0]}
    return {f"{stem}-{i:05d}-of-{len(parts):05d}{suffix}": part for i, part in enumerate(parts, 1)}


def index_file(named: Mapping[str, Mapping[str, Tensor]], *, numbering: Numbering = "as needed") -> File:
    """The ``.index.json`` of these shards, spelled as transformers (sorted) or the Cerebras converter spells it."""
    index = {
        "metadata": {"total_size": sum(nbytes(t) for part in named.values() for t in part.values())},
        "weight_map": {key: name for name, part in named.items() for key in part},
    }
    if numbering == "always":
        return json_file(index, indent=4, newline=False)
    return json_file(index, sort_keys=True)


def hf_files(tensors: Mapping[str, Tensor], max_bytes: int, *, numbering: Numbering = "as needed") -> dict[str, File]:
    """The weight files of a Hugging Face model in safetensors, with ``model.safetensors.index.json`` if numbered."""
    named = named_shards(tensors, max_bytes, numbering=numbering)
    files = {name: safetensors_file(part) for name, part in named.items()}
    if len(named) > 1 or numbering == "always":
        files["model.safetensors.index.json"] = index_file(named, numbering=numbering)
    return files
