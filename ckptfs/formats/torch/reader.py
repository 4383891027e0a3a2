"""Checkpoints of ``torch.save``: a zip archive of stored records.

=====================  ==========================================================================
record                 content
=====================  ==========================================================================
<prefix>/data.pkl      the state dict; its tensors name storages
<prefix>/data/<name>   one storage, little-endian elements, nothing else
<prefix>/byteorder     ``little`` (or absent); ``big`` is refused
<prefix>/version       format version, ``3``
=====================  ==========================================================================
"""

from __future__ import annotations

import os
from contextlib import ExitStack

from ckptfs.errors import CorruptHeader, UnknownFormat
from ckptfs.formats.files import open_file
from ckptfs.formats.source import Source
from ckptfs.formats.torch.globals import Storage
from ckptfs.formats.torch.state import state_of
from ckptfs.formats.torch.unpickler import MAX_PICKLE, unpickle
from ckptfs.formats.zip import Archive, data_offset, read_content, read_directory, read_text


def open_torch(path: str | os.PathLike[str]) -> Source:
    """Open a checkpoint in torch's zip format; items in the order of its dicts.

    Raises `Unsafe` when its pickle names anything but tensors and plain data, `CorruptHeader` when the archive
    contradicts itself or the file's size, `UnknownFormat` for other archives and big-endian data.
    """
    file = open_file(path)
    with ExitStack() as undo:
        undo.callback(file.discard)
        archive = read_directory(file)
        prefix = next(iter(archive.records), "").partition("/")[0]
        if f"{prefix}/data.pkl" not in archive.records:
            raise UnknownFormat(file.path, "a zip archive without data.pkl, so no torch checkpoint")
        if read_text(archive, f"{prefix}/byteorder") == "big":
            raise UnknownFormat(file.path, "has big-endian data; save it again on a little-endian machine")
        pickle = unpickle(read_content(archive, f"{prefix}/data.pkl", MAX_PICKLE), file.path)
        items, tree = state_of(pickle.value, file, lambda storage: _locate(archive, prefix, storage))
        version = read_text(archive, f"{prefix}/version")
        undo.pop_all()
    return Source(
        file.path, "torch-zip", version, None, items, tree, mtime_ns=file.mtime_ns, nbytes=file.size, files=[file]
    )


def _locate(archive: Archive, prefix: str, storage: Storage) -> int:
    path = archive.file.path
    record = archive.records.get(f"{prefix}/data/{storage.name}")
    if record is None:
        raise CorruptHeader(path, f"storage {storage.name[:100]!r} is not in the archive")
    want = storage.n_elements * storage.dtype.itemsize
    if record.nbytes != want:
        what = f"has {record.nbytes} bytes, but {storage.n_elements} elements of {storage.dtype.name} take {want}"
        raise CorruptHeader(path, f"{record.name} {what}")
    return data_offset(archive, record)
