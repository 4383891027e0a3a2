"""A mount needs no log and no state folder; two that are made at once on one folder do not lie on each other."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from ckptfs.mount.state_files import state_file
from tests.conftest import TREE_MODULE, Mounter
from tests.paths import FAMILIES

pytestmark = pytest.mark.fuse

LLAMA = FAMILIES / "llama/cs2hf-gqa-fp32"
WITHOUT_STATE = """
import sys
from ckptfs.mount import state_files
state_files._state_folders = lambda: iter(())
from ckptfs.cli.main import main
main(sys.argv[1:])
"""


def n_mounts(path: Path) -> int:
    with open("/proc/self/mountinfo") as table:
        return sum(line.split()[4] == str(path) for line in table)


def test_one_of_two_mounts_at_once_wins(mounter: Mounter) -> None:
    for i in range(8):
        path = mounter.mountpoint(f"mnt{i}")
        both = [mounter.start(*TREE_MODULE, path) for _ in range(2)]
        errors = [process.communicate(timeout=120)[1] for process in both]
        assert sorted(process.returncode for process in both) == [0, 4], errors
        assert n_mounts(path) == 1
        refusal = next(text for text in errors if text)
        assert str(path) in refusal
        assert "another ckptfs mount" in refusal or "already has a ckptfs mount" in refusal


def test_a_mount_that_failed_leaves_no_lock(mounter: Mounter) -> None:
    path = mounter.mountpoint()
    assert mounter.tree(path, "request=-1").returncode != 0
    assert mounter.tree(path).returncode == 0


def test_without_a_state_folder(mounter: Mounter) -> None:
    path = mounter.mountpoint()
    done = mounter.run("-c", WITHOUT_STATE, "mount", LLAMA / "cs.mdl", path)
    assert done.returncode == 0, done.stderr
    assert "Log: none" in done.stdout
    assert "--log-file" in done.stdout
    assert (path / "checkpoint.json").read_text()
    assert mounter.run("-c", WITHOUT_STATE, "umount", path).returncode == 0

    log = mounter.folder / "own.log"
    done = mounter.run("-c", WITHOUT_STATE, "mount", LLAMA / "cs.mdl", path, "--log-file", log)
    assert done.returncode == 0, done.stderr
    assert f"mounted on {path}" in log.read_text()


@pytest.fixture
def full_disk(mounter: Mounter) -> Iterator[Path]:
    """A folder on a file system without a free byte."""
    path = mounter.folder / "full"
    path.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=64k", "none", path], check=True)
    try:
        (path / "ckptfs").mkdir(mode=0o700)
        with open(path / "fill", "wb", buffering=0) as file, pytest.raises(OSError, match=os.strerror(errno.ENOSPC)):
            while True:
                file.write(bytes(4096))
        yield path
    finally:
        subprocess.run(["umount", "-l", path], check=True)


def test_a_full_state_folder(mounter: Mounter, full_disk: Path) -> None:
    path = mounter.mountpoint()
    command = [*TREE_MODULE, path]
    done = subprocess.run(
        [sys.executable, *map(str, command)],
        cwd=Path(__file__).parents[2],
        env={**mounter.env, "XDG_STATE_HOME": str(full_disk)},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    assert os.listdir(path)
    mounter.clean()


@pytest.mark.parametrize("letter", ["語", "a", "\udcff"], ids=["cjk", "ascii", "no text"])
def test_state_files_of_long_names(letter: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    names = [state_file(f"/mnt/{letter * n}", ".log") for n in (1, 85, 300)]
    for name in names:
        assert name is not None
        assert len(os.fsencode(os.path.basename(name))) <= 255
        Path(name).write_text("")
    assert len({*names}) == 3


def test_mount_points_with_alike_names_have_files_of_their_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    assert len({state_file(path, ".pid") for path in ("/mnt/a-b", "/mnt/a/b", "/mnt/a b", "/mnt-a-b")}) == 4


def test_somebody_elses_state_folder_is_not_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    (tmp_path / "ckptfs").mkdir()
    os.chown(tmp_path / "ckptfs", 12345, 12345)
    found = state_file("/mnt/a", ".log")
    assert found is None or not found.startswith(str(tmp_path))


def test_names_that_are_too_long(mnt: Path) -> None:
    for path in (mnt / ("n" * 256), mnt / ("n" * 256) / "below", mnt / ("語" * 86)):
        with pytest.raises(OSError, match=os.strerror(errno.ENAMETOOLONG)):
            os.stat(path)
    with pytest.raises(FileNotFoundError):
        os.stat(mnt / ("n" * 255))
