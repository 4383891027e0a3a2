"""Files as readers see them: opened once, read at offsets; and small JSON files."""

from __future__ import annotations

import json
import math
import os
import stat
from collections.abc import Mapping
from typing import Any

from ckptfs.errors import CorruptHeader, MissingFile, NotReadable, SourceError
from ckptfs.tensors.source_file import SourceFile
from ckptfs.tensors.tensor import Shape

MAX_JSON_VALUES = 3_000_000
"""Containers and commas in one JSON text. Three bytes can ask for a hundred in memory; a header of 100,000 tensors
has a million."""
MAX_NDIM = 32
"""numpy 1's limit; no tensor has more."""
MAX_NBYTES = 1 << 62
"""Views may repeat elements (stride 0), so a tensor can be larger than its file, but not than an off_t."""


def open_file(path: str | os.PathLike[str]) -> SourceFile:
    """Open a regular file; `MissingFile`, `NotReadable`, or `SourceError` when it cannot be opened."""
    name = os.fspath(path)
    try:
        # O_NONBLOCK: a named pipe must not hang us before fstat can tell what it is
        fd = os.open(name, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    except FileNotFoundError as error:
        raise MissingFile(name) from error
    except PermissionError as error:
        raise NotReadable(name, f"cannot be opened: {error.strerror}") from error
    except (OSError, ValueError) as error:  # ValueError: a NUL in the name
        raise SourceError(name, f"cannot be opened: {getattr(error, 'strerror', None) or error}") from error
    if not stat.S_ISREG(os.fstat(fd).st_mode):
        os.close(fd)
        raise SourceError(name, "is not a regular file")
    return SourceFile(name, fd)


def read_exactly(file: SourceFile, offset: int, n: int, what: str) -> bytes:
    """*n* bytes from *offset* on; `CorruptHeader` naming *what* when the file does not have them.

    The size is checked against the file's before anything is allocated.
    """
    if offset < 0 or n < 0 or offset + n > file.size:
        raise CorruptHeader(file.path, f"{what} ({n} bytes at byte {offset}) is past the end ({file.size} bytes)")
    data = bytearray(n)
    done = 0
    while done < n:
        got = file.read_into(memoryview(data)[done:], offset + done)
        if got == 0:
            raise CorruptHeader(file.path, f"the file became shorter while {what} was read; open it again")
        done += got
    return bytes(data)


def json_object(data: bytes, path: str, what: str) -> dict[str, Any]:
    """The JSON object in *data*; `CorruptHeader` when it is something else, or has a name twice."""
    if sum(data.count(mark) for mark in (b"{", b"[", b",")) > MAX_JSON_VALUES:
        raise CorruptHeader(path, f"{what} has more than {MAX_JSON_VALUES} values")
    try:
        value = json.loads(data.decode("utf-8"), object_pairs_hook=_unique)
    except (ValueError, RecursionError) as error:  # ValueError has UnicodeDecodeError and JSONDecodeError below it
        raise CorruptHeader(path, f"{what} is not valid JSON: {error}") from error
    if not isinstance(value, dict):
        raise CorruptHeader(path, f"{what} is not a JSON object")
    return value


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        seen: set[str] = set()
        twice = next(name for name, _ in pairs if name in seen or seen.add(name))  # type: ignore[func-returns-value]
        raise ValueError(f"{twice[:200]!r} is in it twice")
    return found


def checked_shape(shape: object, itemsize: int) -> Shape:
    """*shape* as a tuple of sizes; ValueError for something else, and for a tensor that could not exist."""
    if not isinstance(shape, (list, tuple)) or len(shape) > MAX_NDIM:
        raise ValueError(f"its shape is not a list of at most {MAX_NDIM} sizes")
    if any(type(n) is not int or n < 0 for n in shape):
        raise ValueError("its shape has negative sizes or something else than integers")
    if math.prod(n for n in shape if n) * itemsize > MAX_NBYTES:
        raise ValueError("its shape has more than 2**62 bytes")
    return tuple(shape)


def hf_config_beside(path: str) -> Mapping[str, Any] | None:
    """The Hugging Face ``config.json`` in the folder of *path*; None when there is none."""
    name = os.path.join(os.path.dirname(path), "config.json")
    return read_json(name, 16 << 20, "the model config") if os.path.isfile(name) else None


def read_json(path: str, limit: int, what: str) -> dict[str, Any]:
    """The JSON object in a small file of at most *limit* bytes."""
    file = open_file(path)
    try:
        if file.size > limit:
            raise CorruptHeader(path, f"{what} has {file.size} bytes, more than {limit}")
        return json_object(read_exactly(file, 0, file.size, what), path, what)
    finally:
        file.discard()
