"""Damaged data and mistakes cost one read, never the mount."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest

from tests.conftest import Mounter
from tests.mount.trees import BIG

pytestmark = pytest.mark.fuse


def read_error(path: Path, offset: int) -> int:
    fd = os.open(path, os.O_RDONLY | os.O_DIRECT)
    try:
        with pytest.raises(OSError) as caught:
            os.pread(fd, 4096, offset)
    finally:
        os.close(fd)
    assert caught.value.errno is not None
    return caught.value.errno


def test_damage_fails_only_the_reads_that_need_it(mnt: Path, shared_mounter: Mounter) -> None:
    fd = os.open(mnt / "damaged", os.O_RDONLY | os.O_DIRECT)
    assert os.pread(fd, 40960, 0) == bytes(40960)
    os.close(fd)
    for _ in range(12):
        assert read_error(mnt / "damaged", 50_000) == errno.EIO
    lines = [line for line in shared_mounter.log.splitlines() if "damaged" in line]
    assert len(lines) == 2, "the first and the tenth time"
    assert "model.weight" in lines[0]
    assert "4096" in lines[0]
    assert (mnt / "big.bin").read_bytes() == BIG


def test_a_mistake_is_logged_with_its_traceback(mnt: Path, shared_mounter: Mounter) -> None:
    assert read_error(mnt / "broken", 0) == errno.EIO
    assert "ZeroDivisionError: a mistake" in shared_mounter.log
    assert (mnt / "big.bin").read_bytes() == BIG
