"""The list of formats, and `open_source`. A format is recognised by content, never by name."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

from ckptfs.errors import UnknownFormat, UsageError
from ckptfs.formats.files import open_file, read_exactly
from ckptfs.formats.hdf5.superblock import SIGNATURE
from ckptfs.formats.huggingface import has_weights, only_checkpoint, open_folder, open_index, with_config
from ckptfs.formats.safetensors import is_safetensors, open_safetensors
from ckptfs.formats.source import Source
from ckptfs.formats.tensorflow.reader import index_at, is_bundle_folder, open_bundle, open_bundle_folder
from ckptfs.formats.tensorflow.table import is_table
from ckptfs.formats.torch.legacy import is_torch_legacy, open_torch_legacy
from ckptfs.formats.torch.reader import open_torch
from ckptfs.formats.zip import is_zip
from ckptfs.tensors.cache import TileCache
from ckptfs.tensors.source_file import SourceFile

HEAD_NBYTES = 512


@dataclass(frozen=True, slots=True)
class Candidate:
    """What a format is recognised by."""

    path: str
    file: SourceFile | None = None
    """Open while formats are compared; None for a folder."""
    head: bytes = b""
    """The first `HEAD_NBYTES` bytes of the file, fewer where it is shorter."""


@dataclass(frozen=True, slots=True)
class ReadOptions:
    """What the user of a source chooses."""

    cache: TileCache
    """Holds what readers decode."""
    follow_links: bool = False
    """Whether a checkpoint may refer to files outside its folder."""


@dataclass(frozen=True, slots=True)
class Format:
    """One row of `FORMATS`."""

    name: str
    about: str
    """With an article, for messages."""
    matches: Callable[[Candidate], bool]
    open: Callable[[str, ReadOptions], Source]
    """Reads headers only; raises a `SourceError`."""
    is_weights: bool = False
    """Whether a file is weights alone: it may be a shard, and the ``config.json`` beside it is its config."""


def _is_hdf5(found: Candidate) -> bool:
    return found.file is not None and has_hdf5_signature(found.file)


def _open_cerebras(path: str, options: ReadOptions) -> Source:
    from ckptfs.formats.cerebras.reader import open_h5  # other formats need no HDF5

    return open_h5(path, options.cache, follow_links=options.follow_links)


def _open_only(path: str, options: ReadOptions) -> Source:
    name = only_checkpoint(path)
    assert name is not None
    source = _open_cerebras(name, options)
    source.warnings.append(f"{os.path.basename(name)} was opened, the only checkpoint in the folder")
    return source


def _is_bundle_folder(found: Candidate) -> bool:
    return found.file is None and not has_weights(found.path) and is_bundle_folder(found.path)


FORMATS: tuple[Format, ...] = (
    Format(
        "folder",
        "a folder with one Cerebras checkpoint",
        lambda found: found.file is None and only_checkpoint(found.path) is not None,
        _open_only,
    ),
    Format(
        "tensorflow-folder",
        "a folder of TensorFlow checkpoints",
        _is_bundle_folder,
        lambda path, options: open_bundle_folder(path, follow_links=options.follow_links),
    ),
    Format(
        "huggingface",
        "a Hugging Face folder",
        lambda found: found.file is None,
        lambda path, options: open_folder(path, partial(open_weights, options=options)),
    ),
    Format(
        "tensorflow",
        "the index of a TensorFlow checkpoint",
        lambda found: found.file is not None and is_table(found.file),
        lambda path, _: open_bundle(path),
    ),
    Format("cerebras-h5", "a Cerebras checkpoint (HDF5)", _is_hdf5, _open_cerebras),
    Format(
        "torch-zip",
        "a torch checkpoint",
        lambda found: is_zip(found.head),
        lambda path, _: open_torch(path),
        is_weights=True,
    ),
    Format(
        "torch-legacy",
        "a torch checkpoint of a release before 1.6",
        lambda found: is_torch_legacy(found.head),
        lambda path, _: open_torch_legacy(path),
        is_weights=True,
    ),
    Format(
        "safetensors",
        "a safetensors file",
        lambda found: found.file is not None and is_safetensors(found.head, found.file.size),
        lambda path, _: open_safetensors(path),
        is_weights=True,
    ),
    Format(
        "index",
        "an index of shards",
        lambda found: found.head.lstrip().startswith(b"{"),
        lambda path, options: open_index(path, partial(open_weights, options=options)),
    ),
)
"""Every format that ckptfs reads. The first row that matches opens the source: put a row before a broader one."""


def open_source(path: str | os.PathLike[str], cache: TileCache, *, follow_links: bool = False) -> Source:
    """Open a checkpoint of any format in `FORMATS`; reads headers only.

    *cache* holds what readers decode; *follow_links* lets a checkpoint refer to files outside its folder. Raises
    `UsageError` when nothing is there, `UnknownFormat` when no row matches, and what the format's reader raises.
    """
    name = os.fspath(path)
    if not name:
        raise UsageError("the checkpoint's name is empty")
    name = index_at(name) or name
    options = ReadOptions(cache, follow_links)
    found = recognise(name, FORMATS)
    source = found.open(name, options)
    return with_config(source, name, name) if found.is_weights else source


def open_weights(path: str, options: ReadOptions) -> Source:
    """Open one file of weights, without a config; errors as `open_source`'s."""
    return recognise(path, [row for row in FORMATS if row.is_weights]).open(path, options)


def recognise(path: str, formats: Sequence[Format]) -> Format:
    """The first of *formats* that the file or folder *path* has; `UnknownFormat` when it has none."""
    if os.path.isdir(path):
        return _first_match(Candidate(path), formats)
    file = open_file(path)
    try:
        head = read_exactly(file, 0, min(HEAD_NBYTES, file.size), "the file's first bytes")
        return _first_match(Candidate(path, file, head), formats)
    finally:
        file.discard()


def has_hdf5_signature(file: SourceFile) -> bool:
    """Whether the signature is at byte 0, 512, 1024, 2048 … (HDF5 allows a user block of such a size)."""
    at = 0
    while at + len(SIGNATURE) <= file.size:
        if read_exactly(file, at, len(SIGNATURE), "the signature") == SIGNATURE:
            return True
        at = at * 2 or 512
    return False


def _first_match(found: Candidate, formats: Sequence[Format]) -> Format:
    for row in formats:
        if row.matches(found):
            return row
    raise UnknownFormat(found.path, _why_unknown(found.path, found.head, formats))


def _why_unknown(path: str, head: bytes, formats: Sequence[Format]) -> str:
    if not head:
        return "the file is empty"
    if head.startswith(b"version https://git-lfs"):
        return "is a Git LFS pointer, not the file itself; run 'git lfs pull' in its repository"
    if head.startswith(b"\x80"):
        return "is a pickle, but not of torch.save; load it and save it with torch.save or safetensors"
    if ".data-0" in os.path.basename(path):
        return "is none of the known formats; of a TensorFlow checkpoint, name the .index file"
    return f"is none of these: {', '.join(row.about for row in formats)}"
