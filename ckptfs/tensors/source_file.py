"""The file behind tensors: one descriptor with one owner.

Tensors and read programs hold the `SourceFile`, never a bare descriptor. `SourceFile.close` gives the file back at once
but keeps the number: until the last holder is gone, the number stands for something that cannot be read. So a read
after closing fails, in Python as in C, and no file that is opened later can get into a tensor. A read that is under
way when the file is closed ends with the bytes of that file: the kernel holds the file until then, so nobody waits.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import partial
from typing import NoReturn, TypeAlias

from ckptfs.errors import SourceChanged, SourceClosed, SourceError

Identity: TypeAlias = tuple[int, int, int, int]
"""Device, inode, size and time of the last write (ns): a file that differs in one of them is another one."""


class SourceFile:
    """A regular file, open for reading. Any thread may read, check or close it."""

    __slots__ = ("__weakref__", "_at_close", "_fault", "_fd", "identity", "path")

    def __init__(self, path: str, fd: int) -> None:
        """Takes over *fd*; *path* is for messages."""
        self._fd = fd
        self.path = path
        self._fault: Callable[[], SourceError] | None = None
        self._at_close: list[Callable[[], object]] = []
        self.identity = identity(os.fstat(fd))

    @property
    def fd(self) -> int:
        """The descriptor, for one call: it means nothing when this object is gone. Raises what `close` is for."""
        if self._fault is not None:
            raise self._fault()
        return self._fd

    @property
    def size(self) -> int:
        return self.identity[2]

    @property
    def mtime_ns(self) -> int:
        return self.identity[3]

    @property
    def closed(self) -> bool:
        """Whether nothing can be read from it any more."""
        return self._fault is not None

    def read_into(self, out: memoryview | bytearray, offset: int) -> int:
        """One ``preadv``: how many bytes from *offset* on are in *out* now, 0 at the file's end."""
        try:
            return os.preadv(self.fd, [out], offset)
        except OSError:
            self.fail_if_closed()
            raise

    def read(self, n: int, offset: int) -> bytes:
        """One ``pread``: up to *n* bytes from *offset* on."""
        try:
            return os.pread(self.fd, n, offset)
        except OSError:
            self.fail_if_closed()
            raise

    def fail_if_closed(self) -> None:
        """Raise `SourceClosed`, or the `SourceChanged` for which the file was given up."""
        if self._fault is not None:
            raise self._fault()

    def check(self) -> None:
        """Raise `SourceChanged` when the file was written to since it was opened; it is given up then for good.

        One system call. A file that was deleted, or replaced by another one under its name, has not changed.
        """
        found = identity(os.fstat(self.fd))
        if found != self.identity:
            self._give_up(partial(SourceChanged, self.path, _change(self.identity, found)))
            self.fail_if_closed()

    def at_close(self, act: Callable[[], object]) -> None:
        """Have *act* called when the file is closed."""
        self._at_close.append(act)

    def close(self) -> None:
        """Give the file back; later reads raise `SourceClosed`. Closing twice does nothing."""
        self._give_up(partial(SourceClosed, self.path))

    def discard(self) -> None:
        """Close the file and free its number, too: for an owner who shared it with nobody."""
        self._fault = partial(SourceClosed, self.path)
        fd, self._fd = self._fd, -1
        if fd >= 0:
            os.close(fd)

    def _give_up(self, fault: Callable[[], SourceError]) -> None:
        if self._fault is not None:
            return
        self._fault = fault  # before the descriptor changes: whoever fails at that finds the reason
        for act in self._at_close:
            act()
        try:
            nothing = os.open("/", os.O_PATH | os.O_CLOEXEC)  # every read from it fails with EBADF
        except OSError:  # no descriptor is free: the file stays open, and Python refuses to read it
            return
        os.dup2(nothing, self._fd, inheritable=False)
        os.close(nothing)

    def __del__(self, close: Callable[[int], None] = os.close) -> None:
        if self._fd >= 0:
            close(self._fd)

    def __reduce__(self) -> NoReturn:
        raise TypeError("an open file cannot be pickled; pickle the checkpoint, view or lazy tensor that reads it")

    def __repr__(self) -> str:
        return f"<SourceFile {self.path}{' (closed)' if self.closed else ''}>"


def identity(status: os.stat_result) -> Identity:
    """What tells a file from others, and from itself before it was written to."""
    return status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns


def _change(before: Identity, after: Identity) -> str:
    size = f"from {before[2]} to {after[2]} bytes" if before[2] != after[2] else "its size is the same"
    return f"was written to after it was opened ({size}): open or mount it again, and replace files by renaming"
