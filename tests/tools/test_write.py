"""Files appear whole under their name, or not at all."""

from __future__ import annotations

import errno
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ckptfs.errors import CorruptChunk, UsageError, WriteError
from ckptfs.formats.extents import ExtentFile, file_of
from ckptfs.tensors.tensor import Elements
from ckptfs.tools import write
from ckptfs.tools.write import write_file
from tests.factories import ArrayTensor, array_of

DATA = array_of("float32", (3_000, 1_000))
WHOLE = b"head" + DATA.tobytes()


def example() -> ExtentFile:
    return file_of([b"head", ArrayTensor(DATA)])


class Failing(ArrayTensor):
    """A tensor whose last rows raise *error*."""

    error: BaseException

    def read_block(self, row: int, col: int, out: Elements) -> None:
        if row + len(out) > 2_500:
            raise self.error
        super().read_block(row, col, out)


def test_the_bytes_and_the_progress(tmp_path: Path) -> None:
    seen: list[int] = []
    write_file(example(), tmp_path / "out", progress=seen.append)
    assert (tmp_path / "out").read_bytes() == WHOLE
    assert sum(seen) == len(WHOLE)
    assert max(seen) <= write.PIECE
    assert os.listdir(tmp_path) == ["out"]


def test_an_empty_file(tmp_path: Path) -> None:
    write_file(file_of([]), tmp_path / "out")
    assert (tmp_path / "out").read_bytes() == b""


def test_what_is_there_is_kept_unless_forced(tmp_path: Path) -> None:
    target = tmp_path / "out"
    target.write_bytes(b"old")
    with pytest.raises(UsageError, match="exists already"):
        write_file(example(), target)
    assert target.read_bytes() == b"old"
    write_file(example(), target, force=True)
    assert target.read_bytes() == WHOLE


def test_a_file_that_appears_meanwhile_is_kept(tmp_path: Path) -> None:
    target = tmp_path / "out"
    with pytest.raises(UsageError, match="exists already"):
        write_file(example(), target, progress=lambda _: target.write_bytes(b"other"))
    assert target.read_bytes() == b"other"
    assert os.listdir(tmp_path) == ["out"]


@pytest.mark.parametrize("target", [".", "missing/out"])
def test_targets_that_cannot_be(target: str, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"folder|No such file"):
        write_file(example(), tmp_path / target)
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize("error", [KeyboardInterrupt(), CorruptChunk("x.mdl", "w", 5, "broken")], ids=repr)
@pytest.mark.parametrize("old", [b"old", None])
def test_failures_leave_what_was_there(error: BaseException, old: bytes | None, tmp_path: Path) -> None:
    tensor = Failing(DATA)
    tensor.error = error
    if old is not None:
        (tmp_path / "out").write_bytes(old)
    with pytest.raises(type(error)):
        write_file(file_of([tensor]), tmp_path / "out", force=True)
    assert {p.name: p.read_bytes() for p in tmp_path.iterdir()} == ({"out": old} if old is not None else {})


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 1 MiB."""
    folder = tmp_path / "disk"
    folder.mkdir()
    made = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1m", "none", folder], capture_output=True)
    if made.returncode:
        pytest.skip("needs to mount a small file system")
    yield folder
    subprocess.run(["umount", folder], check=True)


def test_no_room_is_found_before_the_first_byte(small_disk: Path) -> None:
    seen: list[int] = []
    with pytest.raises(WriteError, match=r"No space left on device: 12000004 bytes are needed, \d+ are free") as caught:
        write_file(example(), small_disk / "out", progress=seen.append)
    assert (caught.value.errno, caught.value.exit_code, seen) == (errno.ENOSPC, 4, [])
    assert list(small_disk.iterdir()) == []


def test_a_disk_that_fills_up_meanwhile(small_disk: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def plenty(fd: int) -> Any:
        return os.statvfs_result((4096, 4096, 1 << 30, 1 << 30, 1 << 30, 1, 1, 1, 0, 255))

    monkeypatch.setattr(write.os, "fstatvfs", plenty)
    with pytest.raises(WriteError, match="No space left on device: at byte 0") as caught:
        write_file(example(), small_disk / "out")
    assert caught.value.errno == errno.ENOSPC
    assert list(small_disk.iterdir()) == []


def test_the_mode_is_that_of_new_files(tmp_path: Path) -> None:
    (tmp_path / "plain").write_bytes(b"")
    write_file(file_of([np.arange(9).tobytes()]), tmp_path / "out")
    assert (tmp_path / "out").stat().st_mode == (tmp_path / "plain").stat().st_mode
