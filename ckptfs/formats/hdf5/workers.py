"""Starts the child processes of the HDF5 reader."""

from __future__ import annotations

import json
import os
import stat
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from ckptfs.formats.hdf5.superblock import SIGNATURE

_ROOT = os.path.abspath(os.path.join(os.path.dirname(__file__), *[os.pardir] * 3))
_START = "import sys; sys.path.append(sys.argv[2]); from MODULE import main; main()"
_early_workers: dict[tuple[int, ...], subprocess.Popen[bytes]] = {}
"""Indexing processes that are not claimed yet, by the identity of the file."""


def child_command(request: Mapping[str, Any], module: str = "ckptfs.formats.hdf5.index_worker") -> list[str]:
    """The command that runs *module*; ``sys.argv[1]`` is the request, as JSON.

    The request also carries our ``sys_path``. The child starts without site-packages, because looking for them costs a
    third of its start; it uses the path when it needs one.
    """
    sys_path = [os.path.abspath(entry) for entry in sys.path]
    text = json.dumps({**request, "sys_path": sys_path})
    return [sys.executable or "python3", "-I", "-S", "-c", _START.replace("MODULE", module), text, _ROOT]


def start(fd: int, path: str, *, chunks: str | None = None, library: bool = False) -> subprocess.Popen[bytes]:
    """A child that indexes the file *fd* and writes its answer to ``stdout``. Raises OSError."""
    command = child_command({"fd": fd, "path": path, "chunks": chunks, "library": library})
    return subprocess.Popen(
        command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, pass_fds=(fd,)
    )


@contextmanager
def start_early(path: str) -> Iterator[None]:
    """Start to index the file at *path*, if it is HDF5, while the caller imports what it needs to open it.

    `claim_early_worker` inside of the ``with`` block gets the process. Files that cannot be read raise nothing here,
    but when they are opened.
    """
    key = _start_worker(path)
    try:
        yield
    finally:
        child = _early_workers.pop(key, None) if key else None
        if child is not None:
            child.kill()
            child.communicate()


def claim_early_worker(fd: int) -> subprocess.Popen[bytes] | None:
    """The child that `start_early` started for the file *fd*; the caller owns it from now on."""
    return _early_workers.pop(_identity(os.fstat(fd)), None) if _early_workers else None


def _start_worker(path: str) -> tuple[int, ...] | None:
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    except (OSError, ValueError):
        return None
    try:
        status = os.fstat(fd)
        if not stat.S_ISREG(status.st_mode) or os.pread(fd, len(SIGNATURE), 0) != SIGNATURE:
            return None
        _early_workers[_identity(status)] = start(fd, os.path.abspath(path))
        return _identity(status)
    except OSError:
        return None
    finally:
        os.close(fd)


def _identity(status: os.stat_result) -> tuple[int, ...]:
    """Changes when the file is replaced or written to."""
    return status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns
