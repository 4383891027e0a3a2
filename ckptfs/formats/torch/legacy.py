"""Checkpoints of ``torch.save`` before 1.6: five pickles back to back, then the storages.

The pickles are: a magic number, the protocol (1001), a dict about the machine, the state dict, the list of storage
names. Each storage follows in the order of that list: its number of elements (8 bytes, little-endian, signed), then
the elements. Nothing is aligned and nothing has a checksum, but all offsets follow from the pickles.
"""

from __future__ import annotations

import os
from contextlib import ExitStack

from ckptfs.errors import CorruptHeader, UnknownFormat
from ckptfs.formats.files import open_file, read_exactly
from ckptfs.formats.source import Source
from ckptfs.formats.torch.globals import Box, Storage
from ckptfs.formats.torch.state import state_of
from ckptfs.formats.torch.unpickler import MAX_PICKLE, Pickle, unpickle
from ckptfs.tensors.source_file import SourceFile

MAGIC = 0x1950A86A20F9469CFC6C
PROTOCOL = 1001
_HEAD = bytes.fromhex("8a0a6cfc9c46f9206aa85019")


def is_torch_legacy(head: bytes) -> bool:
    """Whether a file that starts with *head* (14 bytes or more) is in torch's format before 1.6."""
    return head[:1] == b"\x80" and head[2:14] == _HEAD


def open_torch_legacy(path: str | os.PathLike[str]) -> Source:
    """Open a checkpoint in torch's format before 1.6. Items and errors are those of `reader.open_torch`."""
    file = open_file(path)
    with ExitStack() as undo:
        undo.callback(file.discard)
        state, names, stop = _pickles(file)
        offsets = _storage_offsets(file, state, names, stop)
        items, tree = state_of(state.value, file, lambda storage: offsets[storage.name])
        undo.pop_all()
    return Source(
        file.path, "torch-legacy", str(PROTOCOL), None, items, tree,
        mtime_ns=file.mtime_ns, nbytes=file.size, files=[file],
    )  # fmt: skip


def _pickles(file: SourceFile) -> tuple[Pickle, list[object], int]:
    """The state dict, the storages' names in the order of the file, and where the storages begin.

    Nothing says how long the pickles are, so larger and larger heads of the file are tried.
    """
    limit = min(file.size, MAX_PICKLE)
    window = min(limit, 1 << 20)
    while True:
        try:
            return _parse(file, read_exactly(file, 0, window, "the pickles"))
        except CorruptHeader:
            if window >= limit:
                raise
        window = min(limit, window * 8)


def _parse(file: SourceFile, data: bytes) -> tuple[Pickle, list[object], int]:
    magic = unpickle(data, file.path)
    protocol = unpickle(data, file.path, magic.stop)
    machine = unpickle(data, file.path, protocol.stop)
    if magic.value != MAGIC or protocol.value != PROTOCOL:
        raise UnknownFormat(file.path, f"has torch's magic number, but not its protocol {PROTOCOL}")
    facts = machine.value
    if not isinstance(facts, Box) or facts.keys is None:
        raise CorruptHeader(file.path, "the facts about the writing machine are not a dict")
    if any(key == "little_endian" and value is not True for key, value in zip(facts.keys, facts.values, strict=True)):
        raise UnknownFormat(file.path, "has big-endian data; save it again on a little-endian machine")
    state = unpickle(data, file.path, machine.stop)
    names = unpickle(data, file.path, state.stop)
    if not isinstance(names.value, Box) or names.value.keys is not None:
        raise CorruptHeader(file.path, "the storages' names are not a list")
    return state, names.value.values, names.stop


def _storage_offsets(file: SourceFile, state: Pickle, names: list[object], start: int) -> dict[str, int]:
    """Position of each storage's first element; the number of elements must be the pickle's."""
    offsets: dict[str, int] = {}
    at = start
    for name in names:
        storage: Storage | None = state.storages.get(name) if isinstance(name, str) else None
        if storage is None or storage.name in offsets:
            raise CorruptHeader(file.path, "the list of storages names one twice or one that no tensor uses")
        n = int.from_bytes(read_exactly(file, at, 8, f"storage {storage.name}"), "little", signed=True)
        if n != storage.n_elements:
            what = f"has {n} elements, but the state dict says {storage.n_elements}"
            raise CorruptHeader(file.path, f"storage {storage.name[:100]!r} at byte {at} {what}")
        offsets[storage.name] = at + 8
        at += 8 + n * storage.dtype.itemsize
        if at > file.size:
            raise CorruptHeader(file.path, f"the file ends inside storage {storage.name[:100]!r}")
    missing = [name for name in state.storages if name not in offsets]
    if missing:
        raise CorruptHeader(file.path, f"storage {missing[0][:100]!r} is not in the file")
    return offsets
