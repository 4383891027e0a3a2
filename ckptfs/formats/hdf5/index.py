"""The index of an HDF5 file: a child process reads it, this module checks the answer.

The answer is data from an untrusted file, so every number is checked again where it is used.
"""

from __future__ import annotations

import base64
import json
import os
import threading
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from typing import Any

from ckptfs.errors import CorruptHeader, SourceError
from ckptfs.formats.files import open_file
from ckptfs.formats.hdf5.decoder import Decoder
from ckptfs.formats.hdf5.workers import claim_early_worker, start
from ckptfs.tensors.source_file import SourceFile
from ckptfs.tensors.tensor import Shape

TIMEOUT_SECONDS = 600
MAX_ANSWER = 2 << 30
"""Bytes of JSON that the child may send, however large the file is."""
_MIN_ANSWER = 64 << 20
_MIN_VALUES = 1 << 20
"""Limits for a small file, in bytes of JSON and in commas and containers."""
Early = Callable[[Mapping[str, Any]], None]


@dataclass(frozen=True, slots=True)
class H5Object:
    """One dataset as the file describes it."""

    shape: Shape | None
    """None for a null dataspace: there are no data, only attributes."""
    type: str
    """numpy's name of the stored element type, ``str`` or ``other``."""
    layout: tuple[Any, ...] | None
    """``("contiguous", offset or None, nbytes)``, ``("compact", bytes)`` or ``("chunked", chunk shape, B-tree)``: the
    address of the B-tree, -1 when there are no chunks, None when only libhdf5 knows where they are."""
    filters: tuple[tuple[int, tuple[int, ...]], ...]
    """(filter id, client values) in the order of writing."""
    fill: bytes | None
    """The fill value, None for zero."""
    attributes: Mapping[str, Any]
    problem: str | None = None
    """Why its data cannot be read."""
    elsewhere: bool = False
    """Whether the problem is that they are not in this file."""


@dataclass(frozen=True, slots=True)
class Index:
    """All metadata of one file."""

    file: SourceFile
    base: int
    """Byte of the file from which HDF5 counts addresses."""
    attributes: Mapping[str, Any]
    """Attributes of the root group that describe the file."""
    metadata: Mapping[str, Any]
    """As in `summary.Metadata`: flattened key to an entry of *fields*, a list, or a reason."""
    fields: Sequence[Any]
    objects: Mapping[str, Any]
    """Path to a record, or to ``[index into records, address]``."""
    records: Sequence[H5Object]
    decoder: Decoder
    """For chunks that need libhdf5."""

    def get(self, name: str) -> H5Object | None:
        """The object stored under *name*, None when there is none."""
        raw = self.objects.get(object_path(name))
        if not isinstance(raw, list):
            return None if raw is None else _object(self.file.path, name, raw)
        try:
            number, address = raw
            if not _is_size(number) or not (address is None or _is_size(address)):
                raise ValueError
            shared = self.records[number]
            kind, first, second = shared.layout or ()
        except (ValueError, TypeError, IndexError) as error:
            raise CorruptHeader(self.file.path, f"{name}: the indexing process gave an invalid answer") from error
        layout = (kind, address, second) if kind == "contiguous" else (kind, first, address)
        return H5Object(
            shared.shape,
            shared.type,
            layout,
            shared.filters,
            shared.fill,
            shared.attributes,
            shared.problem,
            shared.elsewhere,
        )

    def numbers(self, key: str) -> tuple[int, int] | None:
        """Indexes of a usual key's metadata in *fields* and of its dataset in *records*; None for other keys."""
        fields, record = self.metadata.get(key), self.objects.get(key)
        if type(fields) is int and type(record) is list and len(record) == 2 and type(record[0]) is int:
            return (fields, record[0]) if "/" not in key else None
        return None

    def stored(self, key: str) -> tuple[list[str], Mapping[str, Any]] | str:
        """(names that are values, {stored name: fields}) of a flattened key, or the reason why there is none."""
        found = self.metadata.get(key, "its metadata are missing")
        if type(found) is int and 0 <= found < len(self.fields):
            return [key], {key: self.fields[found]}
        if isinstance(found, list) and len(found) == 2:
            return found[0], found[1]
        return found if isinstance(found, str) else "the indexing process gave an invalid answer"


def object_path(name: str) -> str:
    """*name* as HDF5 resolves it: no leading, doubled or trailing slash, no "." component; ".." is a name."""
    if "/" not in name and name != ".":
        return name
    return "/".join(part for part in name.split("/") if part not in ("", "."))


def read_index(path: str | os.PathLike[str], *, library: bool = False, early: Early | None = None) -> Index:
    """Open *path* and index it. The caller closes ``file``.

    *early* is called with the root attributes that describe the file as soon as they are known, while the rest is
    read; they are not checked then.

    Raises what `files.open_file` raises and `CorruptHeader`, also when the indexing process dies or takes too long.
    With *library*, libhdf5 reads all metadata, even where the walker could.
    """
    file = open_file(path)
    try:
        answer = _ask(file, None, library, early)
        maps = answer["file"], answer["metadata"], answer["objects"]
        lists = answer["fields"], answer["records"]
        sound = all(isinstance(part, dict) for part in maps) and all(isinstance(part, list) for part in lists)
        if type(answer["base"]) is not int or not 0 <= answer["base"] <= file.size or not sound:
            raise CorruptHeader(file.path, "the indexing process gave an invalid answer")
        records = [_object(file.path, "a dataset", raw) for raw in lists[1]]
        return Index(file, answer["base"], maps[0], maps[1], lists[0], maps[2], records, Decoder(file))
    except KeyError as error:
        file.discard()
        raise CorruptHeader(file.path, "the indexing process gave an invalid answer, or died half way") from error
    except SourceError:
        file.discard()
        raise


def chunk_list(file: SourceFile, name: str) -> list[Any]:
    """(element offsets, file offset, stored nbytes, filter mask) of each chunk, through libhdf5."""
    found = _ask(file, object_path(name), False).get("chunks")
    if not isinstance(found, list):
        raise CorruptHeader(file.path, f"{name}: the indexing process gave an invalid answer")
    return found


def _ask(file: SourceFile, chunks: str | None, library: bool, early: Early | None = None) -> dict[str, Any]:
    """The child's answer; *early* gets ``file`` where that comes before the rest."""
    answer: dict[str, Any] = {}
    n_lines = n_values = 0
    with closing(_lines(file, chunks, library)) as lines:
        for line in lines:
            n_lines += 1
            n_values += sum(line.count(mark) for mark in (b"{", b"[", b","))
            if n_values > _MIN_VALUES + file.size // 4:
                raise CorruptHeader(file.path, "its metadata say more than a file of its size can")
            try:
                section = json.loads(line)
            except (ValueError, RecursionError) as error:
                raise CorruptHeader(file.path, "its metadata cannot be read: the indexing process died") from error
            if not isinstance(section, dict):
                raise CorruptHeader(file.path, "the indexing process gave an invalid answer")
            if isinstance(section.get("file"), dict):
                section["file"] = {name: _text(file, value) for name, value in section["file"].items()}
            answer |= section
            if early is not None and section.keys() == {"file"} and isinstance(section["file"], dict):
                early(section["file"])
    if not n_lines:
        raise CorruptHeader(file.path, "its metadata cannot be read: the indexing process died")
    if "error" in answer:
        raise CorruptHeader(file.path, str(answer["error"]))
    return answer


def _text(file: SourceFile, value: Any) -> Any:
    """An attribute of the file; long texts are sent as (offset, length) and read here."""
    if not isinstance(value, dict):
        return value
    start, n = value.get("at", -1), value.get("nbytes", -1)
    if not (_is_size(start) and _is_size(n) and 0 <= start <= start + n <= file.size):
        raise CorruptHeader(file.path, "the indexing process gave an invalid answer")
    data = file.read(n, start)
    if len(data) < n:
        raise CorruptHeader(file.path, "its metadata cannot be read: the file became shorter")
    return data.decode(errors="surrogateescape")


def _lines(file: SourceFile, chunks: str | None, library: bool) -> Generator[bytearray, None, None]:
    """What the child prints, line by line.

    It is killed when it takes too long, or prints more than a file of that size can need.
    """
    max_nbytes = min(MAX_ANSWER, _MIN_ANSWER + 8 * file.size)
    try:
        child = claim_early_worker(file.fd) if chunks is None and not library else None
        child = child or start(file.fd, file.path, chunks=chunks, library=library)
    except OSError as error:
        raise SourceError(file.path, f"the process that reads its metadata does not start: {error}") from error
    late = threading.Timer(TIMEOUT_SECONDS, child.kill)
    late.start()
    with child:
        try:
            assert child.stdout is not None
            line, left = bytearray(), max_nbytes
            while part := os.read(child.stdout.fileno(), 1 << 20):
                left -= len(part)
                if left < 0:
                    raise CorruptHeader(file.path, f"its metadata take more than {max_nbytes} bytes")
                *ends, part = part.split(b"\n")
                for end in ends:
                    yield line + end
                    line = bytearray()
                line += part
            if line:
                yield line
        finally:
            late.cancel()
            child.kill()  # it has printed all, or too much


def _object(path: str, name: str, raw: Any) -> H5Object:
    try:
        if "error" in raw:
            return H5Object(None, "other", None, (), None, {}, raw["error"])
        link = raw.get("link")
        if "shape" not in raw:
            return H5Object(None, "other", None, (), None, {}, f"an HDF5 {link} link stands in its place", True)
        problem = f"its data lie in {link}, outside of the file" if link else None
        shape = None if raw["shape"] is None else _sizes(raw["shape"])
        filters = tuple((_sizes([number])[0], _sizes(values)) for number, _, values in raw["filters"])
        if not isinstance(raw["type"], str) or not isinstance(raw["attrs"], dict):
            raise TypeError
        fill = None if raw["fill"] is None else base64.b64decode(raw["fill"])
        return H5Object(
            shape, raw["type"], _layout(raw["layout"]), filters, fill, raw["attrs"], problem, link is not None
        )
    except (LookupError, TypeError, ValueError, AttributeError) as error:
        raise CorruptHeader(path, f"{name}: the indexing process gave an invalid answer") from error


def _layout(raw: Any) -> tuple[Any, ...] | None:
    if raw is None:
        return None
    if raw[0] == "compact":
        return "compact", base64.b64decode(raw[1])
    kind, first, second = raw
    if kind == "chunked":
        first = _sizes(first)
    if kind not in ("chunked", "contiguous") or not (second is None or _is_size(second)):
        raise ValueError("no layout")
    return kind, first, second


def _is_size(value: object) -> bool:
    """Whether *value* is a number that can be a size or an address, or -1."""
    return type(value) is int and -1 <= value < 1 << 64


def _sizes(values: Any) -> tuple[int, ...]:
    found = tuple(values)
    if not all(map(_is_size, found)):
        raise ValueError("not sizes")
    return found
