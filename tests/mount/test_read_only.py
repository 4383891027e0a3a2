"""Whatever would change a mount answers EROFS."""

from __future__ import annotations

import errno
import os
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.conftest import Mounter

pytestmark = pytest.mark.fuse

CHANGES: dict[str, Callable[[Path], object]] = {
    "create": lambda m: os.open(m / "new", os.O_CREAT | os.O_WRONLY),
    "open for writing": lambda m: os.open(m / "README.txt", os.O_WRONLY),
    "open for both": lambda m: os.open(m / "README.txt", os.O_RDWR),
    "open and cut": lambda m: os.open(m / "README.txt", os.O_RDONLY | os.O_TRUNC),
    "mkdir": lambda m: os.mkdir(m / "deep/new"),
    "mknod": lambda m: os.mkfifo(m / "new"),
    "unlink": lambda m: os.unlink(m / "README.txt"),
    "rmdir": lambda m: os.rmdir(m / "deep"),
    "rename": lambda m: os.rename(m / "README.txt", m / "other"),
    "symlink": lambda m: os.symlink("README.txt", m / "new"),
    "link": lambda m: os.link(m / "README.txt", m / "new"),
    "chmod": lambda m: os.chmod(m / "README.txt", 0o600),
    "chown": lambda m: os.chown(m / "README.txt", 1, 1),
    "truncate": lambda m: os.truncate(m / "README.txt", 3),
    "utime": lambda m: os.utime(m / "README.txt", (1, 1)),
    "setxattr": lambda m: os.setxattr(m / "big.bin", "user.new", b"1"),
    "removexattr": lambda m: os.removexattr(m / "big.bin", "user.dtype"),
}


@pytest.mark.parametrize("change", CHANGES)
def test_changes_are_refused(mnt: Path, change: str) -> None:
    with pytest.raises(OSError) as caught:
        CHANGES[change](mnt)
    assert caught.value.errno == errno.EROFS


@pytest.mark.skipif(os.getuid() != 0, reason="only root may remount")
def test_changes_are_refused_after_a_remount(mounter: Mounter) -> None:
    path = mounter.mountpoint()
    assert mounter.tree(path).returncode == 0
    subprocess.run(["mount", "-i", "-o", "remount,rw", path], check=True)
    for change in CHANGES.values():
        with pytest.raises(OSError) as caught:
            change(path)
        assert caught.value.errno == errno.EROFS
    assert "Traceback" not in mounter.log


def test_access(mnt: Path) -> None:
    assert os.access(mnt / "README.txt", os.R_OK)
    assert not os.access(mnt / "README.txt", os.W_OK)
    assert not os.access(mnt / "README.txt", os.X_OK)
    assert os.access(mnt / "deep", os.R_OK | os.X_OK)
