"""Write a file of extents to disk: whole under its name, or not at all.

The bytes come from `ExtentFile.read_into`, as in a mount. They go to ``<path>.<8 hex>.tmp`` in the same
folder, which is renamed when everything is on disk and removed after any failure, an interrupt included.
"""

from __future__ import annotations

import errno
import os
import secrets
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass

from ckptfs.errors import UsageError, WriteError
from ckptfs.formats.extents import ExtentFile

PIECE = 4 << 20
"""Bytes that are made and written at once."""


@dataclass(frozen=True, slots=True)
class Output:
    """A new file that does not have its name yet."""

    fd: int
    target: str

    def write_at(self, offset: int, data: bytes | memoryview) -> None:
        """Put *data* at *offset*; raises `WriteError`."""
        rest, at = memoryview(data), offset
        try:
            while rest:
                n = os.pwrite(self.fd, rest, at)
                rest, at = rest[n:], at + n
        except OSError as error:
            raise WriteError(self.target, error.errno or errno.EIO, f"at byte {offset}") from error


def write_file(
    file: ExtentFile,
    path: str | os.PathLike[str],
    *,
    force: bool = False,
    progress: Callable[[int], object] | None = None,
    check: Callable[[], object] | None = None,
) -> None:
    """Write *file* under *path*, over what is there only with *force*. *progress* gets the bytes of each piece.

    *check* is called when all bytes are written: where it raises, the file never gets its name.

    Raises `UsageError` for a target that exists or cannot be one, `WriteError` when the disk is full or fails, and what
    reading the tensors raises.
    """
    with new_file(path, force=force) as output:
        _check_room(output, file.size)
        _copy(file, output, progress)
        if check is not None:
            check()


@contextmanager
def new_file(path: str | os.PathLike[str], *, force: bool = False) -> Iterator[Output]:
    """A file to fill in a ``with`` block; it gets the name *path* when the block succeeds. Errors as `write_file`'s."""
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
            yield Output(fd, target)
            _sync(fd, target)
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


def _check_room(output: Output, size: int) -> None:
    """Refuse before the first byte what cannot fit."""
    status = os.fstatvfs(output.fd)
    free = status.f_bavail * status.f_frsize
    if size > free:
        raise WriteError(output.target, errno.ENOSPC, f"{size} bytes are needed, {free} are free")


def _copy(file: ExtentFile, output: Output, progress: Callable[[int], object] | None) -> None:
    buffer = memoryview(bytearray(min(PIECE, file.size)))
    offset = 0
    while offset < file.size:
        piece = buffer[: file.read_into(offset, buffer)]
        output.write_at(offset, piece)
        offset += len(piece)
        if progress is not None:
            progress(len(piece))


def _sync(fd: int, target: str) -> None:
    try:
        os.fsync(fd)
    except OSError as error:
        raise WriteError(target, error.errno or errno.EIO, "while the data was put on disk") from error


def _remove(path: str) -> None:
    with suppress(FileNotFoundError):
        os.unlink(path)


def _sync_folder(target: str) -> None:
    """Put the new name on disk; file systems that cannot do that for folders answer EINVAL."""
    fd = os.open(os.path.dirname(target) or ".", os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        with suppress(OSError):
            os.fsync(fd)
    finally:
        os.close(fd)
