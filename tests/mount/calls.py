"""What docs/semantics.md says of each system call, done to a mount of `test_faults.GOLDEN`."""

from __future__ import annotations

import fcntl
import mmap
import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

from tests.mount.semantics import table
from tests.mount.test_faults import WEIGHTS

_descriptors: list[int] = []


def close_all() -> None:
    """Close what the calls opened: it keeps the mount in use."""
    while _descriptors:
        os.close(_descriptors.pop())


def opened(path: Path, flags: int = 0) -> int:
    """A descriptor that `close_all` closes."""
    _descriptors.append(os.open(path, os.O_RDONLY | flags))
    return _descriptors[-1]


def weights_of(m: Path) -> Path:
    return m / "hf/model.safetensors"


def reading(m: Path) -> None:
    fd = opened(weights_of(m))
    for offset, length in ((0, 10), (1, 4096), (4095, 9000), (len(WEIGHTS) - 3, 100), (len(WEIGHTS), 5), (1 << 40, 5)):
        assert os.pread(fd, length, offset) == WEIGHTS[offset : offset + length]
        buffer = bytearray(length)
        assert bytes(buffer[: os.preadv(fd, [buffer], offset)]) == WEIGHTS[offset : offset + length]
    assert os.read(fd, 1 << 20) == WEIGHTS
    assert os.read(fd, 1) == b""


def mapping(m: Path) -> None:
    for flags in (mmap.MAP_SHARED, mmap.MAP_PRIVATE):
        with mmap.mmap(opened(weights_of(m)), 0, flags, mmap.PROT_READ) as view:
            assert view[:] == WEIGHTS


def mapping_privately(m: Path) -> None:
    with mmap.mmap(opened(weights_of(m)), 0, mmap.MAP_PRIVATE, mmap.PROT_READ | mmap.PROT_WRITE) as view:
        view[0:4] = b"mine"
        assert view[:] == b"mine" + WEIGHTS[4:]
    assert weights_of(m).read_bytes() == WEIGHTS


def reading_directly(m: Path) -> None:
    fd = opened(weights_of(m), os.O_DIRECT)
    assert os.pread(fd, 777, 13) == WEIGHTS[13:790]
    assert os.pread(fd, 1 << 20, 0) == WEIGHTS


def listing(m: Path) -> None:
    for entry in os.scandir(m):
        assert entry.inode() == os.stat(entry.path).st_ino
        assert entry.is_dir() == (entry.name in ("tensors", "raw", "hf", "hf-bin", "torch", "tf"))


def file_system_size(m: Path) -> None:
    found = os.statvfs(m)
    assert found.f_flag & os.ST_RDONLY
    assert found.f_namemax == int(re.findall(r"\d+", table("System calls")["`statfs`"][0])[0])


def locks(m: Path) -> None:
    fd = opened(weights_of(m))
    fcntl.flock(fd, fcntl.LOCK_EX)
    program = "import fcntl, sys; fcntl.flock(open(sys.argv[1]), fcntl.LOCK_SH | fcntl.LOCK_NB)"
    other = subprocess.run([sys.executable, "-c", program, weights_of(m)], capture_output=True, text=True)
    assert "BlockingIOError" in other.stderr
    fcntl.flock(fd, fcntl.LOCK_UN)
    fcntl.lockf(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
    subprocess.run([sys.executable, "-c", program, weights_of(m)], check=True)


def seeking(m: Path) -> None:
    fd = opened(weights_of(m))
    assert (os.lseek(fd, 0, os.SEEK_DATA), os.lseek(fd, 0, os.SEEK_HOLE)) == (0, len(WEIGHTS))


def sending(m: Path) -> None:
    target = os.memfd_create("copy")
    assert os.sendfile(target, opened(weights_of(m)), 0, len(WEIGHTS)) == len(WEIGHTS)
    assert os.pread(target, len(WEIGHTS), 0) == WEIGHTS


def syncing(m: Path) -> None:
    fd = opened(weights_of(m))
    os.fsync(fd)
    os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_WILLNEED)
    os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
    assert os.pread(fd, 8, 0) == WEIGHTS[:8]


WORKS: dict[str, Callable[[Path], None]] = {
    "`open` for reading": reading,
    "`read`, `pread`, `preadv`": reading,
    "`mmap` for reading": mapping,
    "`mmap` private, for writing": mapping_privately,
    "`open` with `O_DIRECT`": reading_directly,
    "`getdents`": listing,
    "`statfs`": file_system_size,
    "`flock`, `fcntl` locks": locks,
    "`lseek` with `SEEK_DATA`, `SEEK_HOLE`": seeking,
    "`sendfile`": sending,
    "`fsync`, `posix_fadvise`": syncing,
}
FAILS: dict[str, Callable[[Path], object]] = {
    "`mmap` shared, for writing": lambda m: mmap.mmap(opened(weights_of(m)), 0, mmap.MAP_SHARED, mmap.PROT_WRITE),
    "`stat` of an absent name": lambda m: os.stat(m / "raw/no.such.key"),
    "`stat` of a name above 255 bytes": lambda m: os.stat(m / ("n" * 256)),
    "`open` of a name below a file": lambda m: opened(m / "README.txt/below"),
    "`read` of a folder": lambda m: os.read(opened(m / "raw"), 10),
    "`readlink` of a file": lambda m: os.readlink(m / "README.txt"),
    "`getxattr` of an absent attribute": lambda m: os.getxattr(m / "README.txt", "user.key"),
    "`ioctl`": lambda m: fcntl.ioctl(opened(weights_of(m)), 0x5401, bytes(60)),
    "`execve`": lambda m: os.execv(weights_of(m), ["x"]),
    "`open` with `O_TMPFILE`": lambda m: os.open(m, os.O_TMPFILE | os.O_RDWR),
}
