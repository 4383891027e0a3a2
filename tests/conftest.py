"""Mounts for tests: made by the real daemon in a process of its own, and always unmounted."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from ckptfs.errors import MountError
from ckptfs.mount.mount_table import unmount
from tests.waiting import MAX_SECONDS

ROOT = Path(__file__).parent.parent

TREE_MODULE = ["-m", "tests.mount.mount_tree"]
CKPTFS = ["-m", "ckptfs"]
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    # A script's background jobs begin so, and hand it on; the commands that tests start are to hear of Ctrl-C.
    signal.signal(signal.SIGINT, signal.default_int_handler)


@dataclass(frozen=True)
class Mounter:
    """Runs commands that mount below *folder*, with their state (logs) in it as well."""

    folder: Path
    may_mount: bool

    def mountpoint(self, name: str = "mnt") -> Path:
        assert self.may_mount, "mark this test fuse: it mounts for real"
        path = self.folder / name
        path.mkdir(exist_ok=True)
        return path

    @property
    def env(self) -> dict[str, str]:
        return {**os.environ, "XDG_STATE_HOME": str(self.folder / "state"), "PYTHONPATH": str(ROOT)}

    @property
    def log(self) -> str:
        """All log files together."""
        return "".join(p.read_text() for p in sorted((self.folder / "state/ckptfs").glob("*.log")))

    @property
    def daemon_pid(self) -> int:
        (path,) = (self.folder / "state/ckptfs").glob("*.pid")
        return int(path.read_text().split()[0])

    def start(self, *args: object) -> subprocess.Popen[str]:
        """A Python command with these arguments, running."""
        return subprocess.Popen(
            [sys.executable, *map(str, args)],
            cwd=ROOT,
            env=self.env,
            text=True,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        )

    def run(self, *args: object) -> subprocess.CompletedProcess[str]:
        """A Python command with these arguments, ended."""
        with self.start(*args) as process:
            out, err = process.communicate(timeout=MAX_SECONDS)
        return subprocess.CompletedProcess(process.args, process.returncode, out, err)

    def tree(self, *args: object) -> subprocess.CompletedProcess[str]:
        """Mounts the tree of `tests.mount.trees`."""
        return self.run(*TREE_MODULE, *args)

    def ckptfs(self, *args: object) -> subprocess.CompletedProcess[str]:
        """A ``ckptfs`` command line."""
        return self.run(*CKPTFS, *args)

    def mounted(self, source: Path, *options: object, name: str = "mnt") -> Path:
        """A new mount of *source*."""
        path = self.mountpoint(name)
        done = self.ckptfs("mount", source, path, *options)
        assert done.returncode == 0, done.stderr
        return path

    def clean(self) -> None:
        """Unmount whatever is left below the folder."""
        with open("/proc/self/mountinfo") as f:
            left = [line.split()[4] for line in f if line.split()[4].startswith(str(self.folder))]
        for path in reversed(left):
            with contextlib.suppress(MountError):
                unmount(path, lazy=True)


def is_marked(request: pytest.FixtureRequest) -> bool:
    """Whether the test or its module says that it mounts: the unit tests run where nothing can be mounted."""
    return request.node.get_closest_marker("fuse") is not None


@pytest.fixture
def mounter(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Mounter]:
    """A `Mounter` of this test."""
    found = Mounter(tmp_path, is_marked(request))
    yield found
    found.clean()


@pytest.fixture(scope="module")
def shared_mounter(tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> Iterator[Mounter]:
    """A `Mounter` of this test module."""
    found = Mounter(tmp_path_factory.mktemp("shared"), is_marked(request))
    yield found
    found.clean()


@pytest.fixture(scope="module")
def mnt(shared_mounter: Mounter) -> Path:
    """The tree of `tests.mount.trees`, mounted once for this test module."""
    path = shared_mounter.mountpoint()
    done = shared_mounter.tree(path)
    assert done.returncode == 0, done.stderr
    return path
