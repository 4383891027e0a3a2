"""Names, attributes and extended attributes of a mount."""

from __future__ import annotations

import errno
import fcntl
import os
import stat
from pathlib import Path

import pytest

from tests.conftest import Mounter
from tests.mount.trees import BIG, FILES, MTIME_NS, N_MANY, SOURCE_NBYTES, XATTRS

pytestmark = pytest.mark.fuse

TOP = ["README.txt", "empty", "big.bin", "deep", "many", "damaged", "broken", "slow", "link"]


def everything(top: Path) -> list[Path]:
    return [top, *(Path(folder) / name for folder, dirs, files in os.walk(top) for name in [*dirs, *files])]


def test_listing_is_in_the_order_of_the_tree(mnt: Path) -> None:
    assert os.listdir(mnt) == TOP
    assert os.listdir(mnt / "many") == [f"file-{i:05}" for i in range(N_MANY)]
    assert os.listdir(mnt / "many") == [f"file-{i:05}" for i in range(N_MANY)]  # now from the kernel's cache


def test_listing_gives_types_and_inode_numbers(mnt: Path) -> None:
    entries = list(os.scandir(mnt))
    assert {e.name for e in entries if e.is_dir(follow_symlinks=False)} == {"deep", "many"}
    assert {e.name for e in entries if e.is_symlink()} == {"link"}
    assert {e.name for e in entries if e.is_file(follow_symlinks=False)} == set(TOP) - {"deep", "many", "link"}
    for entry in [*entries, *os.scandir(mnt / "many")]:
        assert entry.inode() == os.lstat(entry.path).st_ino


def test_files(mnt: Path) -> None:
    for name, content in FILES.items():
        st = os.lstat(mnt / name)
        assert stat.filemode(st.st_mode) == "-r--r--r--"
        assert (st.st_size, st.st_blocks, st.st_nlink) == (len(content), -(-len(content) // 512), 1)
        with open(mnt / name, "rb") as f:
            assert os.fstat(f.fileno()) == st


def test_folders_and_links(mnt: Path) -> None:
    assert stat.filemode(os.lstat(mnt).st_mode) == "dr-xr-xr-x"
    assert stat.filemode(os.lstat(mnt / "deep/er").st_mode) == "dr-xr-xr-x"
    assert stat.filemode(os.lstat(mnt / "link").st_mode) == "lrwxrwxrwx"
    assert os.readlink(mnt / "link") == "deep/er/text"
    assert os.lstat(mnt / "link").st_size == len("deep/er/text")


def test_times_and_owner(mnt: Path) -> None:
    for path in everything(mnt):
        st = os.lstat(path)
        assert (st.st_mtime_ns, st.st_uid, st.st_gid) == (MTIME_NS, os.getuid(), os.getgid())


def test_inode_numbers_differ_and_outlive_the_mount(mounter: Mounter) -> None:
    path = mounter.mountpoint()
    found = []
    for _ in range(2):
        assert mounter.tree(path).returncode == 0
        found.append({str(p): os.lstat(p).st_ino for p in everything(path)})
        assert mounter.ckptfs("umount", path).returncode == 0
    assert found[0] == found[1]
    assert len(set(found[0].values())) == len(found[0]) > N_MANY


def test_absent_names(mnt: Path) -> None:
    for name in ("no", "deep/no", "deep/er/text2", "b" * 255):
        assert not (mnt / name).exists()
    with pytest.raises(NotADirectoryError):
        os.stat(mnt / "README.txt" / "below")
    with pytest.raises(IsADirectoryError):
        (mnt / "deep").read_bytes()
    with pytest.raises(NotADirectoryError):
        os.listdir(mnt / "README.txt")


def test_extended_attributes(mnt: Path) -> None:
    path = mnt / "big.bin"
    assert sorted(os.listxattr(path)) == sorted(XATTRS)
    assert {name: os.getxattr(path, name) for name in XATTRS} == XATTRS
    for other in (mnt, mnt / "deep", mnt / "empty"):
        assert os.listxattr(other) == []
    for entry, name in ((path, "user.other"), (mnt, "user.dtype"), (mnt / "empty", "security.capability")):
        with pytest.raises(OSError) as caught:
            os.getxattr(entry, name)
        assert caught.value.errno == errno.ENODATA


def test_size_of_the_file_system(mnt: Path) -> None:
    found = os.statvfs(mnt)
    assert found.f_blocks * found.f_frsize >= SOURCE_NBYTES > (found.f_blocks - 1) * found.f_frsize
    assert (found.f_bfree, found.f_bavail, found.f_namemax) == (0, 0, 255)
    assert found.f_flag & os.ST_RDONLY


def test_mount_table_names_the_file_system(mnt: Path) -> None:
    with open("/proc/self/mountinfo") as f:
        line = next(line for line in f if line.split()[4] == str(mnt))
    assert " - fuse.ckptfs ckptfs ro," in line


@pytest.mark.skipif(os.getuid() != 0, reason="only root may set read-ahead")
def test_read_ahead_is_raised(mnt: Path, mounter: Mounter) -> None:
    def window(path: Path) -> int:
        device = path.stat().st_dev
        return int(Path(f"/sys/class/bdi/{os.major(device)}:{os.minor(device)}/read_ahead_kb").read_text())

    assert window(mnt) == 4096
    path = mounter.mountpoint()
    assert mounter.tree(path, "read_ahead=262144").returncode == 0
    assert window(path) == 256


def test_owner_and_permissions_can_be_chosen(mounter: Mounter) -> None:
    path = mounter.mountpoint()
    assert mounter.tree(path, "uid=1234", "gid=567", f"umask={0o027}").returncode == 0
    st = os.lstat(path / "big.bin")
    assert (st.st_uid, st.st_gid, stat.S_IMODE(st.st_mode)) == (1234, 567, 0o440)
    assert stat.S_IMODE(os.lstat(path).st_mode) == 0o550


def test_one_thread_and_small_requests_are_enough(mounter: Mounter) -> None:
    path = mounter.mountpoint()
    assert mounter.tree(path, "threads=1", "request=4096").returncode == 0
    assert (path / "big.bin").read_bytes() == BIG


def test_a_tree_that_changes_is_asked_again(mounter: Mounter) -> None:
    path = mounter.mountpoint()
    assert mounter.tree(path, "timeout_s=0").returncode == 0
    assert os.listdir(path) == os.listdir(path) == TOP


def test_locks(mnt: Path) -> None:
    with open(mnt / "big.bin", "rb") as one, open(mnt / "big.bin", "rb") as other:
        fcntl.flock(one, fcntl.LOCK_EX | fcntl.LOCK_NB)
        with pytest.raises(BlockingIOError):
            fcntl.flock(other, fcntl.LOCK_SH | fcntl.LOCK_NB)
        fcntl.lockf(one, fcntl.LOCK_SH | fcntl.LOCK_NB)
        fcntl.lockf(one, fcntl.LOCK_UN)
