"""The files that belong to a model beside its weights: tokenizer, chat template, licence."""

from __future__ import annotations

import os

from ckptfs.errors import SourceError, UsageError
from ckptfs.formats.extents import file_of
from ckptfs.formats.files import open_file
from ckptfs.tensors.dtypes import dtype
from ckptfs.tensors.file_tensor import FileTensor
from ckptfs.vfs.tree import Leaf

MAX_BYTES = 64 << 20
"""Size of a file above which it is taken for weights. The largest tokenizers have about 30 MB."""
MAX_FILES = 256
"""More small files than any model has; each costs an open file."""
_NOT = ("config.json", "adapter_config.json")
_WEIGHTS = (
    *(".safetensors", ".bin", ".pt", ".pth", ".ckpt", ".h5", ".mdl", ".msgpack", ".gguf", ".onnx", ".npz"),
    ".index.json",
)


def small_files(folder: str) -> dict[str, Leaf]:
    """The regular files in *folder* of at most `MAX_BYTES`, without weights, indexes, hidden files and the config.

    They stay open as long as the leaves are there, so they outlive their names.
    Symbolic links are followed: download caches consist of them. Raises `UsageError` when *folder* cannot be
    read, has none such, or far too many.
    """
    try:
        names = sorted(name for name in os.listdir(folder) if _is_wanted(name))
    except OSError as error:
        raise UsageError(f"{folder}: the tokenizer's folder cannot be read: {error.strerror}") from error
    paths = {name: os.path.abspath(os.path.join(folder, name)) for name in names}
    small = {name: path for name, path in paths.items() if _is_small(path)}
    if not small:
        raise UsageError(f"{folder}: it has no small files; give the folder that has tokenizer.json")
    if len(small) > MAX_FILES:
        raise UsageError(f"{folder}: {len(small)} files are more than the {MAX_FILES} that go beside a model")
    return {name: _leaf(name, path) for name, path in small.items()}


def _is_wanted(name: str) -> bool:
    return not (name.startswith(".") or name in _NOT or name.lower().endswith(_WEIGHTS))


def _is_small(path: str) -> bool:
    return os.path.isfile(path) and os.path.getsize(path) <= MAX_BYTES


def _leaf(name: str, path: str) -> Leaf:
    file = open_file(path)
    if file.size > MAX_BYTES:
        raise SourceError(path, "grew while it was opened; try again")
    return Leaf(file_of([FileTensor(dtype("uint8"), (file.size,), file, 0, None, name)]), check=file.check)
