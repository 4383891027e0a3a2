"""``ckptfs cat``"""

from __future__ import annotations

import json
import sys
from typing import TYPE_CHECKING

import click

from ckptfs.cli.advice import advised_reason
from ckptfs.cli.completion import keys
from ckptfs.cli.options import reading_options, source_argument

if TYPE_CHECKING:
    from ckptfs.formats.extents import ExtentFile

_PIECE = 4 << 20
"""Bytes that are read and written at once."""


@click.command("cat")
@source_argument
@click.argument("key", shell_complete=keys)
@click.option("--npy", is_flag=True, help="Write the tensor as a .npy file, with its shape and dtype.")
@reading_options
def command(source: str, key: str, npy: bool, follow_links: bool) -> None:
    """Write one tensor to stdout.

    The tensor KEY of SOURCE as raw little-endian bytes; a plain value as JSON.
    """
    from ckptfs.cli.opening import opened
    from ckptfs.errors import MissingKey, Unsafe, UsageError
    from ckptfs.formats.extents import raw_file
    from ckptfs.formats.npy import npy_file
    from ckptfs.formats.source import nearest_keys

    with opened(source, follow_links=follow_links) as src:
        item = src.items.get(key)
        if item is None:
            raise MissingKey(src.path, key, nearest_keys(key, list(src.items)))
        if item.tensor is not None and sys.stdout.isatty():
            raise UsageError(f"{key} is binary data, not for a terminal; send it elsewhere: > FILE, or | xxd")
        if item.tensor is not None:
            _write(npy_file(item.tensor) if npy else raw_file(item.tensor))
        elif npy:
            raise UsageError(f"{key} is no tensor; leave --npy out")
        elif item.kind in ("object", "link"):
            raise Unsafe(src.path, f"{key} is not shown: {advised_reason(item.reason)}")
        else:
            click.echo(json.dumps(item.value, ensure_ascii=False))


def _write(file: ExtentFile) -> None:
    buffer = memoryview(bytearray(min(_PIECE, file.size)))
    for offset in range(0, file.size, _PIECE):
        n = file.read_into(offset, buffer)
        sys.stdout.buffer.write(buffer[:n])
