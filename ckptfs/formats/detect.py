"""Which format a checkpoint has, told by its content and never by its name."""

from __future__ import annotations

import os

from ckptfs.errors import UnknownFormat, UsageError
from ckptfs.formats.files import SourceFile, open_file, read_exactly
from ckptfs.formats.huggingface import open_folder, open_index, open_weights, with_config
from ckptfs.formats.source import Source
from ckptfs.tensors.cache import TileCache

HDF5_SIGNATURE = b"\x89HDF\r\n\x1a\n"


def open_source(path: str | os.PathLike[str], cache: TileCache, *, follow_links: bool = False) -> Source:
    """Open a checkpoint: HDF5, safetensors, torch, the index of shards, or a Hugging Face folder.

    *cache* holds what readers decode; *follow_links* lets an HDF5 checkpoint refer to files outside its folder.
    Raises `UsageError` when nothing is there and `UnknownFormat` when no reader knows the content.
    """
    name = os.fspath(path)
    if not name:
        raise UsageError("the checkpoint's name is empty")
    if os.path.isdir(name):
        return open_folder(name)
    file = open_file(name)
    try:
        head = read_exactly(file, 0, min(512, file.size), "the file's first bytes")
        hdf5 = has_hdf5_signature(file)
    finally:
        os.close(file.fd)
    if hdf5:
        from ckptfs.formats.cerebras.reader import open_h5

        return open_h5(name, cache, follow_links=follow_links)
    source = open_weights(name)
    if source is not None:
        return with_config(source, name, name)
    if head.lstrip().startswith(b"{"):
        return open_index(name)
    raise UnknownFormat(name, _why_unknown(head))


def has_hdf5_signature(file: SourceFile) -> bool:
    """Whether the signature stands at byte 0, 512, 1024, 2048 … (HDF5 allows a user block of such a size)."""
    at = 0
    while at + len(HDF5_SIGNATURE) <= file.size:
        if read_exactly(file, at, len(HDF5_SIGNATURE), "the signature") == HDF5_SIGNATURE:
            return True
        at = at * 2 or 512
    return False


def _why_unknown(head: bytes) -> str:
    if not head:
        return "the file is empty"
    if head.startswith(b"version https://git-lfs"):
        return "is a Git LFS pointer, not the file itself; run 'git lfs pull' in its repository"
    if head.startswith(b"\x80"):
        return "is a pickle, but not of torch.save; load it and save it with torch.save or safetensors"
    return "is neither HDF5, safetensors, a torch checkpoint nor the index of shards"
