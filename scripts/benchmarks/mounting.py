"""Mounts to measure: ckptfs as a user starts it, and a bare loopback through the same adapter."""

from __future__ import annotations

import contextlib
import ctypes
import glob
import mmap
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from ckptfs.errors import CkptfsError
from ckptfs.formats.extents import ExtentFile
from ckptfs.mount.daemon import mount_in_background, unmount_and_wait
from ckptfs.mount.fuse import MountOptions
from ckptfs.mount.state_files import state_file
from ckptfs.vfs.tree import Folder, Leaf, Tree

SCRIPTS = str(Path(__file__).parents[1])


@dataclass(frozen=True, slots=True)
class Mounted:
    """A live mount: where, the daemon's process, and how long mounting took."""

    path: str
    pid: int
    seconds: float

    def status(self, name: str) -> int:
        """A field of ``/proc/PID/status``, such as VmHWM, in bytes."""
        lines = Path(f"/proc/{self.pid}/status").read_text().splitlines()
        return next(int(line.split()[1]) << 10 for line in lines if line.startswith(f"{name}:"))

    def cpu_seconds(self) -> float:
        """Processor time that the daemon's threads have used so far, user and system.

        In nanoseconds where the kernel counts them (``schedstat``); ``stat`` alone counts in hundredths of a second.
        """
        counted = [Path(path).read_text() for path in glob.glob(f"/proc/{self.pid}/task/*/schedstat")]
        if counted:
            return sum(int(text.split()[0]) for text in counted) / 1e9
        fields = Path(f"/proc/{self.pid}/stat").read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")

    def bytes_read(self) -> int:
        """Bytes that the daemon has read so far, requests of the kernel included."""
        return int(Path(f"/proc/{self.pid}/io").read_text().split()[1])


@contextlib.contextmanager
def ckptfs_mount(source: str, mountpoint: str, *options: str) -> Iterator[Mounted]:
    """``ckptfs mount`` in a process of its own."""
    with _mounted(mountpoint, [sys.executable, "-m", "ckptfs", "mount", source, mountpoint, *options]) as mount:
        yield mount


@contextlib.contextmanager
def loopback_mount(folder: str, mountpoint: str) -> Iterator[Mounted]:
    """The files of *folder* as they are, through the adapter of ckptfs with its default settings."""
    with _mounted(mountpoint, [sys.executable, "-m", "benchmarks.mounting", folder, mountpoint]) as mount:
        yield mount


@contextlib.contextmanager
def far_mount(folder: str, mountpoint: str, milliseconds: float, read_ahead: int) -> Iterator[Mounted]:
    """The files of *folder* as on a network: each request takes that long, many at once, the page cache in front.

    *read_ahead* in bytes, which root may set; 0 leaves the kernel's 128 KiB, which mounts of NFS have, too.
    """
    command = [sys.executable, "-m", "benchmarks.mounting", folder, mountpoint, str(milliseconds), str(read_ahead)]
    with _mounted(mountpoint, command) as mount:
        yield mount


@contextlib.contextmanager
def mounted_case(source: str, operation: str, mountpoint: str, *options: str) -> Iterator[Mounted]:
    """The tensors of *source* behind one operation of `benchmarks.cases`."""
    command = [sys.executable, "-m", "benchmarks.cases", source, operation, mountpoint, *options]
    with _mounted(mountpoint, command) as mount:
        yield mount


@contextlib.contextmanager
def _mounted(mountpoint: str, command: list[str]) -> Iterator[Mounted]:
    os.makedirs(mountpoint, exist_ok=True)
    try:
        start = time.perf_counter()
        done = subprocess.run(command, env=environment(), capture_output=True, text=True)
        seconds = time.perf_counter() - start
        if done.returncode:
            raise RuntimeError(f"{' '.join(command)}: {done.stderr.strip()}")
        yield Mounted(mountpoint, int(Path(state_file(mountpoint, ".pid") or "").read_text().split()[0]), seconds)
    finally:
        _unmount(mountpoint)


def environment() -> dict[str, str]:
    """For processes that import ``ckptfs`` and ``benchmarks`` from this checkout."""
    return {**os.environ, "PYTHONPATH": os.pathsep.join([SCRIPTS, str(Path(SCRIPTS).parent)])}


def _unmount(mountpoint: str) -> None:
    if not os.path.ismount(mountpoint):
        return
    try:
        unmount_and_wait(mountpoint)
    except CkptfsError:
        unmount_and_wait(mountpoint, lazy=True)


def cat(*paths: str) -> float:
    """Seconds until as many ``cat PATH > /dev/null`` at once are done."""
    start = time.perf_counter()
    running = [subprocess.Popen(["cat", path], stdout=subprocess.DEVNULL) for path in paths]
    codes = [p.wait() for p in running]
    if any(codes):
        raise RuntimeError(f"cat {' '.join(paths)} failed")
    return time.perf_counter() - start


def cat_halves(path: str, *flags: str) -> float:
    """Seconds until two processes at once have read one half of the file each; *flags* are those of ``dd``."""
    block = 1 << 20
    half = os.path.getsize(path) // 2 // block
    ends = [["count=" + str(half)], ["skip=" + str(half)]]
    start = time.perf_counter()
    running = [subprocess.Popen([*_dd(path, block, *flags), *end]) for end in ends]
    codes = [p.wait() for p in running]
    if any(codes):
        raise RuntimeError(f"dd of {path} failed")
    return time.perf_counter() - start


def read_direct(path: str) -> float:
    """Seconds until one process has read the file past the page cache."""
    start = time.perf_counter()
    subprocess.run(_dd(path, 1 << 20, DIRECT), check=True)
    return time.perf_counter() - start


DIRECT = "iflag=direct"


def _dd(path: str, block: int, *flags: str) -> list[str]:
    return ["dd", f"if={path}", "of=/dev/null", f"bs={block}", "status=none", *flags]


def warm(path: str) -> None:
    """Bring a file into the page cache."""
    cat(path)


def forget(path: str) -> None:
    """Write a file to the disk and take it out of the page cache.

    What was just written lies in the cache in pieces as it was written. Those of h5py are small ones, and are read a
    quarter slower than the large ones in which the kernel reads a file, or in which a copy is written.
    """
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)  # a page that is not written yet cannot go
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
    finally:
        os.close(fd)


def drop_cached(*paths: str) -> bool:
    """`forget` these files; as root, everything. False where they stayed in the page cache nevertheless.

    Others may keep a page: one that is mapped, one of a file system in memory. What lies below this machine, such as
    the cache of a hypervisor's host, is out of reach.
    """
    for path in paths:
        forget(path)
    with contextlib.suppress(OSError):
        Path("/proc/sys/vm/drop_caches").write_text("3\n")
    return all(resident(path) < 0.05 for path in paths)


def resident(path: str) -> float:
    """Share of a file that is in the page cache."""
    size = os.path.getsize(path)
    if not size:
        return 0.0
    libc = ctypes.CDLL(None, use_errno=True)
    with open(path, "rb") as file, mmap.mmap(file.fileno(), size, prot=mmap.PROT_READ, flags=mmap.MAP_PRIVATE) as view:
        pages = np.zeros(-(-size // mmap.PAGESIZE), np.uint8)
        start = np.frombuffer(view, np.uint8)
        if libc.mincore(ctypes.c_void_p(start.ctypes.data), ctypes.c_size_t(size), ctypes.c_void_p(pages.ctypes.data)):
            raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()), path)
        del start  # or the map cannot be closed
        return float((pages & 1).mean())


@dataclass(frozen=True, slots=True)
class Passthrough:
    """A file of the disk as a file of the tree: one ``preadv`` straight into the kernel's reply."""

    fd: int
    size: int
    seconds: float = 0.0
    """What a request takes at least."""

    def read_into(self, offset: int, out: memoryview) -> int:
        if self.seconds:
            time.sleep(self.seconds)
        return os.preadv(self.fd, [out], offset)


def loopback_tree(folder: str, seconds: float = 0.0) -> Tree:
    """A tree with the regular files of *folder*, of which a request takes *seconds* more."""
    leaves: dict[str, Leaf | Folder] = {}
    for entry in os.scandir(folder):
        file = Passthrough(os.open(entry.path, os.O_RDONLY), entry.stat().st_size, seconds)
        leaves[entry.name] = Leaf(as_file(file))
    return Tree(Folder(lambda: dict(leaves)), os.stat(folder).st_mtime_ns)


def as_file(file: Passthrough) -> ExtentFile:
    """A `Passthrough` where a `ExtentFile` is wanted: the adapter uses its size and read_into alone."""
    return file  # type: ignore[return-value]


def _main(folder: str, mountpoint: str, milliseconds: str = "0", read_ahead: str = "") -> None:
    options = MountOptions(threads=16, read_ahead=int(read_ahead)) if read_ahead else MountOptions()
    mount_in_background(loopback_tree(folder, float(milliseconds) / 1e3), os.path.abspath(mountpoint), options)


if __name__ == "__main__":
    _main(*sys.argv[1:])
