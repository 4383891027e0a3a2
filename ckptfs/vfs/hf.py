"""The folder `hf/`: a checkpoint as `AutoModel.from_pretrained` wants it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ckptfs.conversion.conversion import Conversion
from ckptfs.formats.extents import ExtentFile, json_file
from ckptfs.formats.huggingface import hf_files
from ckptfs.vfs.generation import NAME as GENERATION
from ckptfs.vfs.generation import generation_file
from ckptfs.vfs.tree import Entry, Folder, Leaf

DEFAULT_SHARD_BYTES = 10 * 10**9
"""Tensor bytes of one weight file, as in the Cerebras converter."""


def hf_folder(
    view: Conversion, *, shard_bytes: int = DEFAULT_SHARD_BYTES, extra: Mapping[str, Entry] | None = None
) -> Folder:
    """Configs, weights and index; files of *extra* (the tokenizer's folder) where the model has none of that name."""
    return Folder(lambda: leaves(model_files(view, hf_files(view.tensors, shard_bytes), extra or {})))


def model_files(
    view: Conversion, weights: Mapping[str, ExtentFile], beside: Mapping[str, Entry]
) -> dict[str, ExtentFile]:
    """All files of a Hugging Face folder with these *weights*; *beside* are those of the tokenizer's folder."""
    files = json_files({**view.files, "config.json": view.config})
    generation = generation_file(view.config, beside)
    if generation is not None:
        files[GENERATION] = generation
    files |= weights
    small = {name: entry.file for name, entry in beside.items() if isinstance(entry, Leaf)}
    return files | {name: file for name, file in small.items() if name not in files}


def leaves(files: Mapping[str, ExtentFile]) -> dict[str, Entry]:
    """The entries of a folder with these *files*."""
    return {name: Leaf(file) for name, file in files.items()}


def json_files(files: Mapping[str, Mapping[str, Any]]) -> dict[str, ExtentFile]:
    """Files of JSON as the Cerebras converter spells ``config.json``."""
    return {name: json_file(content, indent=4, newline=False) for name, content in files.items()}
