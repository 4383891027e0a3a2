"""State files of mounts that are gone: what a killed daemon or a restart of the machine leaves behind."""

from __future__ import annotations

import contextlib
import os
import time
from functools import cache
from pathlib import Path

KEEP_S = 7 * 24 * 3600.0
"""How long the log of a mount that is gone is kept, and a file of another machine that shares the folder."""


def remove_stale(folder: str) -> None:
    """Remove what gone mounts left in the state folder *folder*; nothing here is an error."""
    with contextlib.suppress(OSError):
        for entry in list(os.scandir(folder)):
            path = Path(entry.path)
            if path.suffix == ".pid" and not _is_live(path):
                path.unlink(missing_ok=True)
        for entry in list(os.scandir(folder)):
            path = Path(entry.path)
            if path.suffix == ".log" and not path.with_suffix(".pid").exists() and _age(path) > KEEP_S:
                path.unlink(missing_ok=True)


def owner_of(pid_file: Path) -> tuple[int, str] | None:
    """Process number and start of the daemon that wrote a file of this machine since it started; None otherwise."""
    with contextlib.suppress(OSError, ValueError):
        pid, started, *boot = pid_file.read_text().split()
        return (int(pid), started) if boot in ([], [boot_id()]) else None
    return None


def start_time(pid: int) -> str:
    """When a process began, in clock ticks since boot: with its number it names one process for good."""
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19]


@cache
def boot_id() -> str:
    """What tells this start of this machine from all others."""
    return Path("/proc/sys/kernel/random/boot_id").read_text().strip()


def _is_live(pid_file: Path) -> bool:
    """Whether a daemon may still live; another machine's cannot be seen, so the file's age decides."""
    owner = owner_of(pid_file)
    if owner is None:
        return _age(pid_file) < KEEP_S
    try:
        return start_time(owner[0]) == owner[1] and not _is_zombie(owner[0])
    except (OSError, IndexError):
        return False


def _is_zombie(pid: int) -> bool:
    """Whether a process has ended and only waits for its parent; its first thread may end before the others."""
    threads = os.listdir(f"/proc/{pid}/task")
    return threads == [str(pid)] and Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"


def _age(path: Path) -> float:
    return time.time() - path.stat().st_mtime
