"""The kernel's table of mounts: what is mounted where, whether a folder may be mounted on, and unmounting.

Calls on a mount expect that it may be dead.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import fcntl
import os
import re
import shutil
import subprocess
import time
from collections.abc import Iterator
from dataclasses import dataclass

from ckptfs.errors import MountError, MountRefused

FSTYPE = "fuse.ckptfs"
WAIT_S = 10.0
"""How long an unmount and the daemon's end may take."""

_MNT_DETACH, _UMOUNT_NOFOLLOW = 2, 8


@dataclass(frozen=True, slots=True)
class Mount:
    """One line of the mount table."""

    path: str
    fstype: str
    device: int
    """Device number (`os.makedev`), as ``st_dev`` of what is in it."""


def mounts() -> list[Mount]:
    """All mounts of this process's namespace, in the order in which they were made."""
    with open("/proc/self/mountinfo", "rb") as f:
        return [parse_mountinfo(line) for line in f]


def parse_mountinfo(line: bytes) -> Mount:
    """A line of ``/proc/self/mountinfo``: ``id parent major:minor root path options [optional…] - fstype source …``."""
    left, _, right = line.partition(b" - ")
    fields = left.split(b" ")
    major, minor = fields[2].split(b":")
    path = re.sub(rb"\\([0-7]{3})", lambda m: bytes([int(m[1], 8)]), fields[4])
    return Mount(os.fsdecode(path), os.fsdecode(right.split(b" ")[0]), os.makedev(int(major), int(minor)))


def mount_at(path: str) -> Mount | None:
    """The topmost mount whose mount point is *path* (absolute, resolved), or None."""
    return next((m for m in reversed(mounts()) if m.path == path), None)


def resolve(mountpoint: str) -> str:
    """Absolute path of a mount point without links; it works for a dead mount, too."""
    return os.path.realpath(mountpoint)


def check_mountpoint(mountpoint: str, source: str, *, nonempty: bool = False) -> str:
    """The resolved mount point if *source* can be mounted there; else `MountError`, which says what to do."""
    path = resolve(mountpoint)
    there = mount_at(path)
    if there is not None and there.fstype == FSTYPE:
        state = "already has a ckptfs mount" if is_alive(path) else "has a dead ckptfs mount, its daemon is gone"
        raise MountError(f"{mountpoint} {state}; unmount it with: ckptfs umount {mountpoint}")
    try:
        entries = os.listdir(path)
    except FileNotFoundError:
        raise MountError(f"{mountpoint} does not exist; create it with: mkdir -p {mountpoint}") from None
    except NotADirectoryError:
        raise MountError(f"{mountpoint} is not a directory; give an empty one") from None
    except OSError as exc:
        hint = f"; unmount it with: fusermount3 -u {mountpoint}" if exc.errno == errno.ENOTCONN else ""
        raise MountError(f"{mountpoint}: {exc.strerror}{hint}") from exc
    if entries and not nonempty:
        raise MountError(
            f"{mountpoint} is not empty, a mount would hide what is in it; give an empty directory or use -o nonempty"
        )
    if os.path.isdir(source) and os.path.commonpath([os.path.realpath(source), path]) == os.path.realpath(source):
        raise MountError(f"{mountpoint} lies inside the source {source}; give a directory outside of it")
    return path


class Claim:
    """A mount point, locked against other mounts of ckptfs that are being made on it at the same time.

    The lock lies on the folder that will be covered, so that it needs no file and ends with its process. Entering
    raises `MountError` where another process holds it, or made its mount meanwhile. File systems without locks have
    none. Release it when the mount answers: from then on `check_mountpoint` sees the mount.
    """

    def __init__(self, path: str) -> None:
        self._path = path
        self._fd: int | None = None

    def __enter__(self) -> Claim:
        self._fd = os.open(self._path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            self.close()
            raise MountError(f"{self._path}: another ckptfs mount is being made there; give another folder") from None
        except OSError:  # this file system has no locks
            self.close()
        there = mount_at(self._path)
        if there is not None and there.fstype == FSTYPE:
            self.close()
            raise MountError(f"{self._path}: another ckptfs mount was made there meanwhile; give another folder")
        return self

    def release(self) -> None:
        """Let other processes lock it."""
        if self._fd is not None:
            fcntl.flock(self._fd, fcntl.LOCK_UN)
            self.close()

    def close(self) -> None:
        """Drop this process's share; the lock stays while a process that it was forked from or into has one."""
        if self._fd is not None:
            os.close(self._fd)
            self._fd = None

    def __exit__(self, *exc: object) -> None:
        self.release()


def is_alive(path: str) -> bool:
    """Whether a mount answers at all: False when its daemon is gone."""
    try:
        os.statvfs(path)  # always asks the daemon; stat would be answered from the kernel's cache
    except OSError as exc:
        return exc.errno not in (errno.ENOTCONN, errno.ECONNABORTED, errno.EIO)
    return True


def raise_read_ahead(device: int, nbytes: int) -> None:
    """Set the read-ahead window of the mount with this device number; `OSError` for users other than root.

    The kernel starts each mount at 128 KiB, which more than halves the speed of large reads.
    """
    with open(read_ahead_file(device), "w") as f:
        f.write(str(nbytes >> 10))


def read_ahead_file(device: int) -> str:
    """Where the kernel keeps the read-ahead window (KiB) of the mount with this device number."""
    return f"/sys/class/bdi/{os.major(device)}:{os.minor(device)}/read_ahead_kb"


def unmount(mountpoint: str, *, lazy: bool = False) -> None:
    """Unmount a ckptfs mount, alive or dead, and wait until it is gone.

    *lazy* detaches it at once; it ends when its last user is done. Raises `MountRefused` when no ckptfs mount is there
    or when it is in use.
    """
    path = resolve(mountpoint)
    there = mount_at(path)
    if there is None:
        raise MountRefused(f"{mountpoint} is not mounted; 'findmnt -t {FSTYPE}' lists what is")
    if there.fstype != FSTYPE:
        raise MountRefused(f"{mountpoint} is a {there.fstype} mount, not one of ckptfs; use: umount {mountpoint}")
    problem = _umount2(path, lazy) if os.geteuid() == 0 else _fusermount(path, lazy)
    if problem:
        raise MountRefused(f"{mountpoint}: {problem}")
    if not wait_until_gone(there):
        raise MountError(f"{mountpoint} is still there after {WAIT_S:.0f} s; try: ckptfs umount --lazy {mountpoint}")


def detach(mount: Mount) -> str | None:
    """Detach that very mount of ckptfs, unless another one covers it; what went wrong, or None.

    Sends the mount no request: its daemon may hang.
    """
    if mount.fstype != FSTYPE or mount_at(mount.path) != mount:
        return "it is not mounted, or under another mount"
    return _umount2(mount.path, True) if os.geteuid() == 0 else _fusermount(mount.path, True)


def wait_until_gone(mount: Mount) -> bool:
    """Whether that very mount left the table within `WAIT_S`."""
    end = time.monotonic() + WAIT_S
    while mount in mounts():
        if time.monotonic() > end:
            return False
        time.sleep(0.01)
    return True


def users(path: str) -> Iterator[str]:
    """Processes that have something open below *path*, as ``name (pid)``; only those that we may inspect."""
    for pid in filter(str.isdigit, os.listdir("/proc")):
        with contextlib.suppress(OSError):
            names = [f"/proc/{pid}/cwd", *(e.path for e in os.scandir(f"/proc/{pid}/fd"))]
            if any(_below(name, path) for name in names):
                with open(f"/proc/{pid}/comm") as f:
                    yield f"{f.read().strip()} ({pid})"


def _below(link: str, path: str) -> bool:
    with contextlib.suppress(OSError):
        target = os.readlink(link)
        return target == path or target.startswith(path + "/")
    return False


def _umount2(path: str, lazy: bool) -> str | None:
    """Unmount as root; what went wrong, or None."""
    libc = ctypes.CDLL(None, use_errno=True)
    flags = _UMOUNT_NOFOLLOW | (_MNT_DETACH if lazy else 0)
    if libc.umount2(os.fsencode(path), flags) == 0:
        return None
    code = ctypes.get_errno()
    return _busy(path) if code == errno.EBUSY else os.strerror(code)


def _fusermount(path: str, lazy: bool) -> str | None:
    """Unmount as a plain user, through the setuid helper of libfuse; what went wrong, or None."""
    helper = find_fusermount()
    if helper is None:
        return "neither fusermount3 nor fusermount is installed; install the package fuse3"
    command = [helper, "-u", *(["-z"] if lazy else []), "--", path]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode == 0:
        return None
    lines = done.stderr.strip().splitlines() or [f"{helper} failed with code {done.returncode}"]
    if "not found in /etc/mtab" in lines[-1]:
        return "it is the mount of another user, who can unmount it, or root"
    return _busy(path) if "busy" in lines[-1].lower() else lines[-1]


def find_fusermount() -> str | None:
    """The helper that mounts and unmounts for plain users: fusermount3, or fusermount where only that is there."""
    # libfuse has the path of its helper built in; find it where PATH is short, too.
    places = os.pathsep.join([os.environ.get("PATH", ""), "/usr/local/bin", "/usr/bin", "/bin"])
    return shutil.which("fusermount3", path=places) or shutil.which("fusermount", path=places)


def _busy(path: str) -> str:
    if _below("/proc/self/cwd", path):
        return "busy: it is the working directory of this shell; leave the folder first (cd)"
    names = list(users(path))
    by = f", used by {', '.join(names[:5])}" if names else ""
    return f"busy{by}; close what uses it, or run: ckptfs umount --lazy {path}"
