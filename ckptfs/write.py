"""Writing a described file to disk: whole under its name, or not at all.

The bytes come from `File.read_into`, as those of a mount do. They go to ``<path>.<8 hex>.tmp`` in the same folder,
which is renamed when everything is on disk and removed after any failure, an interrupt included.
"""

from __future__ import annotations

import errno
import os
import secrets
from collections.abc import Callable
from contextlib import ExitStack, suppress

from ckptfs.errors import UsageError, WriteError
from ckptfs.layouts.extent import File

PIECE = 4 << 20
"""Bytes that are made and written at once."""


def write_file(
    file: File,
    path: str | os.PathLike[str],
    *,
    force: bool = False,
    progress: Callable[[int], object] | None = None,
) -> None:
    """Write *file* under *path*, over what is there only with *force*. *progress* gets the bytes of each piece.

    Raises `UsageError` for a target that exists or cannot be one, `WriteError` when the disk is full or fails, and what
    reading the tensors raises.
    """
    target = os.fspath(path)
    _check_target(target, force)
    temporary = f"{target}.{secrets.token_hex(4)}.tmp"
    with ExitStack() as undo:
        try:
            fd = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
        except OSError as error:
            raise UsageError(f"{target}: cannot be written there: {error.strerror}") from error
        undo.callback(_remove, temporary)
        with ExitStack() as opened:
            opened.callback(os.close, fd)
            _check_room(fd, file.size, target)
            _copy(file, fd, target, progress)
        _check_target(target, force)
        try:
            os.rename(temporary, target)
        except OSError as error:
            raise UsageError(f"{target}: cannot be written there: {error.strerror}") from error
        undo.pop_all()
    _sync_folder(target)


def _check_target(target: str, force: bool) -> None:
    if os.path.isdir(target):
        raise UsageError(f"{target}: is a folder; name a file")
    if os.path.lexists(target) and not force:
        raise UsageError(f"{target}: exists already; take another name, or write over it with force")


def _check_room(fd: int, size: int, target: str) -> None:
    """Refuse before the first byte what cannot fit."""
    status = os.fstatvfs(fd)
    free = status.f_bavail * status.f_frsize
    if size > free:
        raise WriteError(target, errno.ENOSPC, f"{size} bytes are needed, {free} are free")


def _copy(file: File, fd: int, target: str, progress: Callable[[int], object] | None) -> None:
    buffer = memoryview(bytearray(min(PIECE, file.size)))
    offset = 0
    while offset < file.size:
        piece = buffer[: file.read_into(offset, buffer)]
        try:
            _write(fd, piece)
        except OSError as error:
            raise WriteError(target, error.errno or errno.EIO, f"after {offset} of {file.size} bytes") from error
        offset += len(piece)
        if progress is not None:
            progress(len(piece))
    try:
        os.fsync(fd)
    except OSError as error:
        raise WriteError(target, error.errno or errno.EIO, "while the data were put on disk") from error


def _write(fd: int, data: memoryview) -> None:
    while data:
        data = data[os.write(fd, data) :]


def _remove(path: str) -> None:
    with suppress(FileNotFoundError):
        os.unlink(path)


def _sync_folder(target: str) -> None:
    """Make the new name last; file systems that cannot do it for folders say EINVAL."""
    fd = os.open(os.path.dirname(target) or ".", os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        with suppress(OSError):
            os.fsync(fd)
    finally:
        os.close(fd)
