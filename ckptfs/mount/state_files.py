"""The files that a mount keeps outside of itself: its log and its process ID. A mount never depends on them."""

from __future__ import annotations

import contextlib
import hashlib
import logging
import os
import re
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import TextIO

from ckptfs.errors import MountError
from ckptfs.mount.stale_files import boot_id, owner_of, remove_stale, start_time

log = logging.getLogger(__name__)

LOG_LIMIT = 4 << 20
"""A log file larger than this (bytes) is emptied at the next mount."""
MAX_STATE_NAME = 200
"""Bytes of the mount point in the name of a state file; file systems take 255 for a name."""


def state_file(mountpoint: str, suffix: str) -> str | None:
    """Where the log and the process ID of a mount are kept: in the first folder of `_state_folders` that works.

    None where no folder can be written. The name has the end of the mount point's path, and a hash of the whole path.
    """
    path = os.fsencode(mountpoint)
    end = path.decode(errors="replace").strip("/").encode()[-MAX_STATE_NAME:].decode(errors="ignore")
    readable = re.sub(r"[^\w.-]+", "-", end) or "root"
    name = f"{readable}-{hashlib.sha256(path).hexdigest()[:8]}"
    for folder in _state_folders():
        with contextlib.suppress(OSError):
            os.makedirs(folder, mode=0o700, exist_ok=True)
            # A folder of another user in /tmp could be a trap.
            if os.access(folder, os.W_OK) and os.stat(folder).st_uid == os.geteuid():
                return os.path.join(folder, name + suffix)
    return None


def _state_folders() -> Iterator[str]:
    state, home = os.environ.get("XDG_STATE_HOME"), os.environ.get("HOME")
    if state:
        yield os.path.join(state, "ckptfs")
    elif home:
        yield os.path.join(home, ".local", "state", "ckptfs")
    yield "/var/log/ckptfs"
    yield os.path.join(tempfile.gettempdir(), f"ckptfs-{os.geteuid()}")


def daemon_log(mountpoint: str, log_file: str | None) -> tuple[str | None, TextIO]:
    """The daemon's log and its path; one in memory, without a path, where nothing can be written.

    Only a log that was asked for by name is an error when it cannot be written.
    """
    if log_file:
        path = os.path.abspath(log_file)
        return path, open_log(path)
    kept = state_file(mountpoint, ".log")
    if kept is not None:
        with contextlib.suppress(MountError):
            return kept, open_log(kept)
    return None, os.fdopen(os.memfd_create("ckptfs-log"), "w+")


def open_log(path: str) -> TextIO:
    """The log file, open to append; emptied first when it is larger than `LOG_LIMIT`."""
    try:
        too_large = os.path.exists(path) and os.path.getsize(path) > LOG_LIMIT
        return open(path, "w+" if too_large else "a+")
    except OSError as exc:
        raise MountError(f"cannot write the log file {path}: {exc.strerror}; give another", option="log_file") from exc


def reopen_log(path: str) -> None:
    """Continue the log in a new file at *path*: the old file was renamed, by logrotate for example."""
    handler = logging.getLogger().handlers[0]
    assert isinstance(handler, logging.StreamHandler)
    try:
        new = open_log(path)
    except MountError as exc:
        log.warning("the log file was not reopened: %s", exc)
        return
    with new, handler.lock or contextlib.nullcontext():
        handler.flush()
        fd = handler.stream.fileno()
        old = os.fstat(fd)
        for one in {1, 2, fd}:  # the output of a daemon goes to its log, too
            with contextlib.suppress(OSError):
                if os.path.samestat(os.fstat(one), old):
                    os.dup2(new.fileno(), one)
    log.info("the log file was opened again")


@contextlib.contextmanager
def pid_file(mountpoint: str) -> Iterator[None]:
    """While the daemon runs, its process ID is in a file beside its log, where that can be written."""
    path = state_file(mountpoint, ".pid")
    try:
        if path is not None:
            Path(path).write_text(f"{os.getpid()} {start_time(os.getpid())} {boot_id()}\n")
            remove_stale(os.path.dirname(path))
    except OSError as exc:  # a full disk
        log.warning("%s: cannot be written (%s); umount will not wait for the daemon's end", path, exc.strerror)
        forget_pid(mountpoint)
    try:
        yield
    finally:
        forget_pid(mountpoint)


def forget_pid(mountpoint: str) -> None:
    """Remove the file of `pid_file`."""
    path = state_file(mountpoint, ".pid")
    if path is not None:
        with contextlib.suppress(OSError):
            os.unlink(path)


def daemon_pid(mountpoint: str) -> int | None:
    """Process ID of the daemon that serves *mountpoint* for this user; None when there is none."""
    path = state_file(mountpoint, ".pid")
    if path is None:
        return None
    owner = owner_of(Path(path))
    with contextlib.suppress(OSError):
        if owner is not None and start_time(owner[0]) == owner[1]:
            return owner[0]
    return None


def clean_up(mountpoint: str) -> None:
    """Remove what mounts that are gone left in the folder where *mountpoint* has its files."""
    path = state_file(mountpoint, ".pid")
    if path is not None:
        remove_stale(os.path.dirname(path))
