"""Reading TensorFlow checkpoints. Nothing is executed, and no data are read but those of string variables."""

from __future__ import annotations

import os
import re
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field

from ckptfs.errors import CorruptChunk, CorruptHeader, MissingShard, SourceError, Unsafe
from ckptfs.formats.files import checked_shape, open_file, read_exactly
from ckptfs.formats.source import Item, Source
from ckptfs.formats.tensorflow.bundle import (
    BY_NUMBER,
    OTHERS,
    STRING,
    BundleEntry,
    Header,
    data_name,
    index_name,
    parse_entry,
    parse_header,
    parse_strings,
    slice_key,
    slice_name,
)
from ckptfs.formats.tensorflow.checksum import Checked, Summed, need_crc32c
from ckptfs.formats.tensorflow.slices import Piece, assembled
from ckptfs.formats.tensorflow.table import read_table
from ckptfs.tensors.file_tensor import FileTensor
from ckptfs.tensors.source_file import SourceFile
from ckptfs.tensors.tensor import Shape, Tensor, n_elements

STATE_FILE = "checkpoint"
"""The file of a folder that names its newest checkpoint."""
MAX_STRINGS = 16 << 20
"""Bytes of all string variables of a checkpoint together: they are read when it is opened."""
MAX_STATE_FILE = 1 << 20
_NEWEST = re.compile(rb'^\s*model_checkpoint_path:\s*"((?:[^"\\\n]|\\.)*)"', re.MULTILINE)
_ESCAPE = re.compile(rb"\\([0-7]{1,3}|.)", re.DOTALL)
_LETTERS = {b"n": b"\n", b"t": b"\t", b"r": b"\r"}


@dataclass(slots=True)
class _Bundle:
    """A checkpoint while it is read."""

    index: SourceFile
    prefix: str
    header: Header
    shards: dict[int, SourceFile] = field(default_factory=dict)
    slices: dict[bytes, BundleEntry] = field(default_factory=dict)
    """Entries of slices that no variable has claimed."""
    n_string_bytes: int = 0

    def shard(self, entry: BundleEntry, key: str) -> SourceFile:
        """The data file of *entry*, which is open from now on; `CorruptChunk` where the data are not all in it."""
        if entry.shard >= self.header.n_shards:
            what = f"{key:.200}: is in data file {entry.shard}, but there are {self.header.n_shards}"
            raise CorruptHeader(self.index.path, what)
        if entry.shard not in self.shards:
            path = data_name(self.prefix, entry.shard, self.header.n_shards)
            if not os.path.exists(path):
                name = os.path.basename(path)
                raise MissingShard(
                    self.index.path, path, f"the data file {name} is not there; copy it beside the index"
                )
            self.shards[entry.shard] = open_file(path)
        file = self.shards[entry.shard]
        if (end := entry.offset + entry.nbytes) > file.size:
            raise CorruptChunk(file.path, key, entry.offset, f"its data end at byte {end}, past the file's end")
        return file

    def close(self) -> None:
        for file in self.shards.values():
            file.discard()


def open_bundle(path: str | os.PathLike[str]) -> Source:
    """Open a checkpoint by its index; items in the order of their names.

    Raises `CorruptHeader` for a damaged index, `MissingShard` for a data file that is not there, `MissingCodec`
    for a compressed index or without crc32c. What is wrong with one variable stays with it.
    """
    name = os.fspath(path)
    need_crc32c(name)
    with ExitStack() as undo:
        index = open_file(name)
        undo.callback(index.discard)
        table = dict(read_table(index))
        bundle = _Bundle(index, name.removesuffix(".index"), parse_header(table.pop(b"", b""), index.path))
        undo.callback(bundle.close)
        if bundle.header.big_endian:
            raise SourceError(name, "was written on a big-endian machine, which ckptfs does not read")
        items, warnings = _items(bundle, table)
        undo.pop_all()  # from here on the files are the source's
    files = [index, *bundle.shards.values()]
    return Source(
        path=name,
        format="tensorflow",
        format_version="2",
        release=None,
        items=items,
        mtime_ns=max(file.mtime_ns for file in files),
        nbytes=sum(file.size for file in files),
        files=files,
        warnings=warnings,
    )


def _items(bundle: _Bundle, table: dict[bytes, bytes]) -> tuple[dict[str, Item], list[str]]:
    path = bundle.index.path
    entries: dict[str, BundleEntry] = {}
    for raw, value in table.items():
        if raw.startswith(b"\0"):
            bundle.slices[raw] = parse_entry(value, path, _text(slice_name(raw)))
        else:
            entries[_key(raw, path)] = parse_entry(value, path, _text(raw))
    _check_overlaps(bundle, entries)
    items = {key: _item_or_reason(bundle, key, entry) for key, entry in entries.items()}
    warnings = [f"{key}: {item.reason}" for key, item in items.items() if item.reason is not None]
    orphans = sorted({_text(slice_name(raw)) for raw in bundle.slices})
    if orphans:
        warnings.append(f"{len(bundle.slices)} slices belong to no variable and are left out: {', '.join(orphans[:8])}")
    return items, warnings


def _text(raw: bytes) -> str:
    return raw.decode("utf-8", "backslashreplace")


def _key(raw: bytes, path: str) -> str:
    try:
        return raw.decode()
    except UnicodeDecodeError as error:
        raise CorruptHeader(path, f"{raw!r:.200}: its name is not Unicode text") from error


def _check_overlaps(bundle: _Bundle, entries: dict[str, BundleEntry]) -> None:
    """No two variables share bytes: who writes one must not change another."""
    named = [*entries.items(), *((_text(slice_name(raw)), entry) for raw, entry in bundle.slices.items())]
    ranges = sorted((e.shard, e.offset, e.offset + e.nbytes, key) for key, e in named if e.nbytes)
    last_shard, end, before = -1, 0, ""
    for shard, start, stop, key in ranges:
        if shard == last_shard and start < end:
            raise CorruptHeader(bundle.index.path, f"{key:.200}: its data overlap those of {before:.200}")
        last_shard, end, before = shard, stop, key


def _item_or_reason(bundle: _Bundle, key: str, entry: BundleEntry) -> Item:
    try:
        return _item(bundle, key, entry)
    except CorruptChunk as error:
        return Item(key, "object", reason=str(error).removeprefix(f"{error.path}: {key}: "))


def _item(bundle: _Bundle, key: str, entry: BundleEntry) -> Item:
    if entry.dtype == STRING and not entry.slices:
        return _strings(bundle, key, entry)
    dtype = BY_NUMBER.get(entry.dtype)
    if dtype is None:
        name = "string" if entry.dtype == STRING else OTHERS.get(entry.dtype, f"number {entry.dtype}")
        return Item(key, "object", reason=f"its element type {name} cannot be shown")
    if not entry.slices:
        return Item(key, "tensor", _tensor(bundle, key, entry))
    pieces = []
    for extents in entry.slices:
        found = bundle.slices.pop(slice_key(key.encode(), extents), None)
        if found is None or found.dtype != entry.dtype:
            return Item(key, "object", reason=f"its slice {extents} is missing")
        starts = tuple(start for start, _ in extents)
        pieces.append(Piece(starts, _tensor(bundle, key, found)))
    shape = _checked(bundle, key, entry.shape, dtype.itemsize)
    whole = assembled(shape, pieces)
    return Item(key, "tensor", whole) if whole else Item(key, "object", reason="its slices do not make a whole")


def _checked(bundle: _Bundle, key: str, shape: tuple[int, ...], itemsize: int) -> Shape:
    try:
        return checked_shape(shape, itemsize)
    except ValueError as error:
        raise CorruptHeader(bundle.index.path, f"{key:.200}: {error}") from error


def _tensor(bundle: _Bundle, key: str, entry: BundleEntry) -> Tensor:
    dtype = BY_NUMBER[entry.dtype]
    shape = _checked(bundle, key, entry.shape, dtype.itemsize)
    needed = n_elements(shape) * dtype.itemsize
    if needed != entry.nbytes:
        what = f"{key:.200}: has {entry.nbytes} bytes, but {dtype.name} {list(shape)} needs {needed}"
        raise CorruptHeader(bundle.index.path, what)
    file = bundle.shard(entry, key)
    stored = FileTensor(dtype, shape, file, entry.offset, None, key)
    return Checked(Summed(stored), entry.crc, file.path, key, entry.offset) if needed else stored


def _strings(bundle: _Bundle, key: str, entry: BundleEntry) -> Item:
    """Strings are plain values. Bytes that are no UTF-8 become lone surrogates, as in Python's file names."""
    shape = _checked(bundle, key, entry.shape, 1)
    file = bundle.shard(entry, key)
    bundle.n_string_bytes += entry.nbytes
    if bundle.n_string_bytes > MAX_STRINGS or n_elements(shape) > entry.nbytes:
        what = f"is a string variable of {entry.nbytes} bytes; ckptfs reads {MAX_STRINGS} bytes of them in all"
        return Item(key, "object", reason=what)
    data = read_exactly(file, entry.offset, entry.nbytes, f"the strings of {key:.200}")
    try:
        values = parse_strings(data, shape, entry.crc, file.path, key)
    except CorruptHeader as error:
        return Item(key, "object", reason=str(error).removeprefix(f"{file.path}: {key:.200}: "))
    texts = [value.decode("utf-8", "surrogateescape") for value in values]
    return Item(key, "string", value=shaped(texts, shape), shape=shape or None)


def shaped(values: list[str], shape: Shape) -> object:
    """*values* in C order as lists of lists; the value itself for the shape ()."""
    if not shape:
        return values[0]
    if len(shape) == 1:
        return values
    step = n_elements(shape[1:])
    return [shaped(values[i * step : (i + 1) * step], shape[1:]) for i in range(shape[0])]


# -- the folder ------------------------------------------------------------------------------------------------------


def index_at(path: str) -> str | None:
    """The index that the prefix *path* means ("model.ckpt-100"), None where there is none or *path* is a file."""
    name = index_name(path)
    return name if not os.path.exists(path) and os.path.isfile(name) else None


def is_bundle_folder(path: str) -> bool:
    """Whether the folder *path* names its newest checkpoint, as TensorFlow does."""
    name = os.path.join(path, STATE_FILE)
    with suppress(SourceError, OSError):
        return os.path.isfile(name) and _newest(name) is not None
    return False


def open_bundle_folder(path: str, *, follow_links: bool = False) -> Source:
    """Open the newest checkpoint of a folder; `Unsafe` where that is elsewhere, unless *follow_links*."""
    name = os.path.join(path, STATE_FILE)
    newest = _newest(name)
    if newest is None:
        raise CorruptHeader(name, "names no checkpoint")
    prefix = os.path.join(path, os.fsdecode(newest))
    inside = os.path.realpath(os.path.dirname(prefix)) == os.path.realpath(path)
    if not inside and not follow_links:
        raise Unsafe(name, f"names a checkpoint elsewhere ({prefix:.200}); name it yourself, or follow links")
    if not os.path.isfile(index_name(prefix)):
        raise MissingShard(
            name,
            index_name(prefix),
            f"names {os.path.basename(prefix):.200}, whose index is not there; name another one",
        )
    return open_bundle(index_name(prefix))


def _newest(state_file: str) -> bytes | None:
    file = open_file(state_file)
    try:
        if file.size > MAX_STATE_FILE:
            return None
        found = _NEWEST.search(read_exactly(file, 0, file.size, "the state file"))
    finally:
        file.discard()
    newest = None if found is None else _ESCAPE.sub(lambda m: _unescaped(m[1]), found[1])
    return newest if newest and b"\0" not in newest else None


def _unescaped(letter: bytes) -> bytes:
    if letter.isdigit():
        return bytes([int(letter, 8) & 0xFF])
    return _LETTERS.get(letter, letter)
