"""``ckptfs cat``"""

from __future__ import annotations

import json
import sys
from typing import TYPE_CHECKING

import click

from ckptfs.cli.advice import advised_reason
from ckptfs.cli.options import reading_options, source_argument

if TYPE_CHECKING:
    from ckptfs.tensors.tensor import Tensor

_PIECE = 4 << 20
"""Bytes that are read and written at once."""


@click.command("cat")
@source_argument
@click.argument("key")
@reading_options
def command(source: str, key: str, follow_links: bool) -> None:
    """Write one tensor to stdout.

    The tensor KEY of SOURCE as raw little-endian bytes; a plain value as JSON.
    """
    from ckptfs.cli.opening import opened
    from ckptfs.errors import MissingKey, Unsafe, UsageError
    from ckptfs.formats.source import nearest_keys

    with opened(source, follow_links=follow_links) as src:
        item = src.items.get(key)
        if item is None:
            raise MissingKey(src.path, key, nearest_keys(key, list(src.items)))
        if item.tensor is not None and sys.stdout.isatty():
            raise UsageError(f"{key} is binary data, not for a terminal; send it elsewhere: > FILE, or | xxd")
        if item.tensor is not None:
            _write_tensor(item.tensor)
        elif item.kind in ("object", "link"):
            raise Unsafe(src.path, f"{key} is not shown: {advised_reason(item.reason)}")
        else:
            click.echo(json.dumps(item.value, ensure_ascii=False))


def _write_tensor(tensor: Tensor) -> None:
    from ckptfs.tensors.ranges import read_into
    from ckptfs.tensors.tensor import nbytes

    size = nbytes(tensor)
    buffer = memoryview(bytearray(min(_PIECE, size)))
    for offset in range(0, size, _PIECE):
        piece = buffer[: min(_PIECE, size - offset)]
        read_into(tensor, offset, piece)
        sys.stdout.buffer.write(piece)
