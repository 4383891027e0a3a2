"""What programs read from a mount is what the tree holds, however they read it."""

from __future__ import annotations

import hashlib
import mmap
import os
import random
import subprocess
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.mount.trees import BIG, FILES, TEXT

pytestmark = pytest.mark.fuse


def random_ranges(n: int, seed: int) -> list[tuple[int, int]]:
    """(offset, length), some beyond the end."""
    rng = random.Random(seed)
    return [(rng.randrange(len(BIG) + 5000), rng.choice([1, 100, 4096, 70_000, 1 << 20])) for _ in range(n)]


@pytest.mark.parametrize("name", FILES)
def test_content(mnt: Path, name: str) -> None:
    assert (mnt / name).read_bytes() == FILES[name]


@pytest.mark.parametrize("flags", [0, os.O_DIRECT], ids=["cached", "direct"])
def test_any_range_is_the_slice_of_the_whole(mnt: Path, flags: int) -> None:
    fd = os.open(mnt / "big.bin", os.O_RDONLY | flags)
    try:
        for offset, length in random_ranges(150, flags):
            assert os.pread(fd, length, offset) == BIG[offset : offset + length]
    finally:
        os.close(fd)


@pytest.mark.parametrize("flags", [0, os.O_DIRECT], ids=["cached", "direct"])
def test_reading_ends_at_the_end(mnt: Path, flags: int) -> None:
    fd = os.open(mnt / "big.bin", os.O_RDONLY | flags)
    try:
        assert os.pread(fd, 4096, len(BIG)) == b""
        assert os.pread(fd, 4096, len(BIG) + (1 << 30)) == b""
        buffer = mmap.mmap(-1, 4 << 20)  # page-aligned, larger than the file
        assert os.preadv(fd, [buffer], 0) == len(BIG)
        assert buffer[: len(BIG)] == BIG
    finally:
        os.close(fd)


@pytest.mark.parametrize("flags", [mmap.MAP_SHARED, mmap.MAP_PRIVATE], ids=["shared", "private"])
def test_mmap(mnt: Path, flags: int) -> None:
    with open(mnt / "big.bin", "rb") as f, mmap.mmap(f.fileno(), 0, flags=flags, prot=mmap.PROT_READ) as view:
        for offset, length in random_ranges(50, 5):
            assert view[offset : offset + length] == BIG[offset : offset + length]
        assert view[:] == BIG


def check_many_readers(path: Path, n_readers: int) -> None:
    """Read random parts of ``big.bin`` below *path* in as many threads; every read reaches the daemon."""
    fd = os.open(path / "big.bin", os.O_RDONLY | os.O_DIRECT)

    def read(seed: int) -> bool:
        return all(os.pread(fd, n, at) == BIG[at : at + n] for at, n in random_ranges(20, seed))

    try:
        with ThreadPoolExecutor(n_readers) as pool:
            assert all(pool.map(read, range(n_readers)))
    finally:
        os.close(fd)


def test_many_threads(shared_mounter: object, mnt: Path) -> None:
    check_many_readers(mnt, 32)


def test_a_file_keeps_its_position(mnt: Path) -> None:
    with open(mnt / "big.bin", "rb", buffering=0) as f:
        f.seek(-10, os.SEEK_END)
        assert f.read(100) == BIG[-10:]
        assert f.read(100) == b""


def shell(command: str, mnt: Path, **names: object) -> str:
    env = {**os.environ, "MNT": str(mnt), **{k: str(v) for k, v in names.items()}}
    done = subprocess.run(["sh", "-euc", command], env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_cp_keeps_content_and_times(mnt: Path, tmp_path: Path) -> None:
    shell('cp -a "$MNT/big.bin" "$MNT/deep" "$MNT/link" "$TO"', mnt, TO=tmp_path)
    assert (tmp_path / "big.bin").read_bytes() == BIG
    assert (tmp_path / "link").read_bytes() == TEXT
    assert (tmp_path / "big.bin").stat().st_mtime_ns == (mnt / "big.bin").stat().st_mtime_ns
    assert os.getxattr(tmp_path / "big.bin", "user.dtype") == b"uint16"
    shell('chmod -R u+w "$TO"', mnt, TO=tmp_path)


def test_tar_holds_every_file(mnt: Path, tmp_path: Path) -> None:
    shell(
        'tar -cf "$TO/a.tar" -C "$MNT" README.txt empty big.bin deep link && tar -xf "$TO/a.tar" -C "$TO"',
        mnt,
        TO=tmp_path,
    )
    for name, content in FILES.items():
        assert (tmp_path / name).read_bytes() == content
    assert os.readlink(tmp_path / "link") == "deep/er/text"
    shell('chmod -R u+w "$TO"', mnt, TO=tmp_path)


def test_everyday_tools(mnt: Path) -> None:
    assert shell('sha256sum < "$MNT/big.bin"', mnt).split()[0] == hashlib.sha256(BIG).hexdigest()
    assert shell('md5sum < "$MNT/big.bin"', mnt).split()[0] == hashlib.md5(BIG).hexdigest()
    assert shell('find "$MNT/deep" | sort', mnt).splitlines() == sorted(
        [f"{mnt}/deep", f"{mnt}/deep/er", f"{mnt}/deep/er/text", f"{mnt}/deep/π and space"]
    )
    assert shell('find "$MNT" -type f -name "file-*" | wc -l', mnt).strip() == "5000"
    assert shell('find "$MNT" -type l', mnt).strip() == f"{mnt}/link"
    assert shell('grep -c line "$MNT/README.txt"', mnt).strip() == "3"
    assert shell('grep -rl another "$MNT/deep"', mnt).strip() == f"{mnt}/deep/er/text"
    assert shell('cmp "$MNT/big.bin" "$MNT/big.bin"; wc -c < "$MNT/big.bin"', mnt).strip() == str(len(BIG))
    assert shell('tail -c 4 "$MNT/big.bin"', mnt) == "tail"
    assert shell('du --apparent-size -b "$MNT/big.bin"', mnt).split()[0] == str(len(BIG))
    assert int(shell('du -k "$MNT/big.bin"', mnt).split()[0]) == -(-len(BIG) // 1024)
    assert shell('cat "$MNT/link" "$MNT/empty"', mnt) == TEXT.decode()
