"""Files of text, JSON and bare tensor bytes."""

from __future__ import annotations

import json
from collections.abc import Mapping

from ckptfs.errors import UsageError
from ckptfs.formats.source import Tensor
from ckptfs.layouts.extent import File, file_of


def json_file(value: object, *, indent: int | None = 2, newline: bool = True, sort_keys: bool = False) -> File:
    """*value* as JSON in Python's spelling: exact integers, shortest floats, ``NaN`` and ``Infinity`` bare.

    Any mapping is an object, tuples are arrays. Raises `UsageError` for what JSON cannot say.
    """
    try:
        text = json.dumps(value, indent=indent, sort_keys=sort_keys, default=_plain)
    except (TypeError, ValueError, RecursionError) as error:
        raise UsageError(f"cannot write this value as JSON: {error}") from error
    return text_file(text + "\n" if newline else text)


def text_file(text: str) -> File:
    """*text* in UTF-8."""
    return file_of([text.encode("utf-8", "surrogatepass")])


def raw_file(tensor: Tensor) -> File:
    """The tensor's bare bytes: C order, little-endian."""
    return file_of([tensor])


def _plain(value: object) -> object:
    if isinstance(value, Mapping):
        return dict(value)
    raise TypeError(f"a {type(value).__name__} is not a plain value")
