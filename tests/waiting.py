"""Waiting for what other processes do, with a guard against those that hang; nothing here is a measure of speed."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from pathlib import Path

MAX_SECONDS = 120
"""Of anything that takes a second on an idle machine."""


def wait_for(what: str, holds: Callable[[], object]) -> None:
    """Wait until *holds* () is true."""
    end = time.monotonic() + MAX_SECONDS
    while not holds():
        assert time.monotonic() < end, f"{what} took too long"
        time.sleep(0.005)


def wait_until_open(pid: int, path: Path) -> None:
    """Wait until a process has opened *path*."""

    def is_open() -> bool:
        try:
            return str(path) in [os.readlink(fd) for fd in Path(f"/proc/{pid}/fd").iterdir()]
        except FileNotFoundError:  # a descriptor was closed meanwhile
            return False

    wait_for(f"opening {path}", is_open)


def exit_code(pid: int) -> int:
    """The exit code of a child of this process; one that hangs is killed."""
    end = time.monotonic() + MAX_SECONDS
    while time.monotonic() < end:
        found, status = os.waitpid(pid, os.WNOHANG)
        if found:
            return os.waitstatus_to_exitcode(status)
        time.sleep(0.002)
    os.kill(pid, signal.SIGKILL)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
