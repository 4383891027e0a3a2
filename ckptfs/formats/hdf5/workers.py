"""How child processes of the HDF5 reader are started: `child_command`, and `ahead` for the one that indexes a file."""

from __future__ import annotations

import json
import os
import stat
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

SIGNATURE = b"\x89HDF\r\n\x1a\n"
_ROOT = os.path.abspath(os.path.join(os.path.dirname(__file__), *[os.pardir] * 3))
_START = "import sys; sys.path.append(sys.argv[2]); from MODULE import main; main()"
_begun: dict[tuple[int, ...], subprocess.Popen[bytes]] = {}
"""Indexing processes that nobody has asked for yet, by what tells files apart."""


def child_command(request: Mapping[str, Any], module: str = "ckptfs.formats.hdf5.index_worker") -> list[str]:
    """The command that runs *module*, here `h5_child`; ``sys.argv[1]`` is the request, as JSON.

    The request gets our ``sys_path``: the child starts without site-packages, as looking for them costs a third of
    its start, and takes the path when it needs one.
    """
    sys_path = [os.path.abspath(entry) for entry in sys.path]
    text = json.dumps({**request, "sys_path": sys_path})
    return [sys.executable or "python3", "-I", "-S", "-c", _START.replace("MODULE", module), text, _ROOT]


def start(fd: int, path: str, *, chunks: str | None = None, library: bool = False) -> subprocess.Popen[bytes]:
    """A child that indexes the file *fd*; its answer comes out of ``stdout``. Raises OSError."""
    command = child_command({"fd": fd, "path": path, "chunks": chunks, "library": library})
    return subprocess.Popen(
        command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, pass_fds=(fd,)
    )


@contextmanager
def ahead(path: str) -> Iterator[None]:
    """Begin to index the file at *path*, if it is HDF5, while the caller imports what it needs to open it.

    Whoever indexes that file inside of the ``with`` block gets what was begun. Says nothing about files that cannot
    be read: that is for whoever opens them.
    """
    key = _begin(path)
    try:
        yield
    finally:
        child = _begun.pop(key, None) if key else None
        if child is not None:
            child.kill()
            child.communicate()


def begun(fd: int) -> subprocess.Popen[bytes] | None:
    """The child that `ahead` started for the file *fd*, which is the caller's from now on."""
    return _begun.pop(_identity(os.fstat(fd)), None) if _begun else None


def _begin(path: str) -> tuple[int, ...] | None:
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    except (OSError, ValueError):
        return None
    try:
        status = os.fstat(fd)
        if not stat.S_ISREG(status.st_mode) or os.pread(fd, len(SIGNATURE), 0) != SIGNATURE:
            return None
        _begun[_identity(status)] = start(fd, os.path.abspath(path))
        return _identity(status)
    except OSError:
        return None
    finally:
        os.close(fd)


def _identity(status: os.stat_result) -> tuple[int, ...]:
    """A file that was replaced or written to since is another one."""
    return status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns
