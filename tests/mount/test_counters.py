"""Counters of a mount, without a mount."""

from __future__ import annotations

import errno
import json
import threading
from typing import Any

import pytest

from ckptfs.formats.extents import file_of
from ckptfs.mount import callbacks, fuse, stats
from ckptfs.mount.stats import FILE_NBYTES, Stats, stats_file, with_stats
from ckptfs.vfs.tree import Folder, Leaf, Tree

HUGE = 10**15


def test_threads_lose_no_counts() -> None:
    found = Stats()
    read = found.counted("read", lambda path, out, size, offset, fi: size)
    fail = found.counted("getattr", lambda path, out, fi: -errno.ENOENT)

    def work() -> None:
        for _ in range(5000):
            read(b"", None, 3000, 0, None)
            fail(b"", None, None)

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    shown = found.snapshot()
    assert shown["requests"] == {"getattr": 20_000, "read": 20_000}
    assert shown["errors"] == {"ENOENT": 20_000}
    assert shown["replied_bytes"] == 60_000_000
    assert shown["read_sizes"] == {"4096": 20_000}


@pytest.mark.parametrize(("size", "bucket"), [(1, "1"), (2, "2"), (4096, "4096"), (4097, "8192"), (1 << 20, "1048576")])
def test_read_sizes_are_rounded_up_to_powers_of_two(size: int, bucket: str) -> None:
    found = Stats()
    found.counted("read", lambda *args: 0)(b"", None, size, 0, None)
    assert found.snapshot()["read_sizes"] == {bucket: 1}


def test_the_file_has_room_for_the_largest_figures() -> None:
    found = Stats()
    counts = found._own()
    kinds = [name for name, _ in fuse.load_binding().fuse_operations._fields_ if hasattr(fuse.Adapter, name)]
    counts.requests.update(dict.fromkeys(kinds, HUGE))
    counts.errors.update(dict.fromkeys([*callbacks._EXPECTED, errno.EIO, errno.EACCES, errno.EPERM], HUGE))
    counts.sizes.update(dict.fromkeys(range(21), HUGE))  # a request is at most 1 MiB
    counts.replied, counts.seconds = HUGE, 1e9 + 1 / 3
    file = stats_file(found)
    out = bytearray(FILE_NBYTES + 1)
    assert file.size == FILE_NBYTES == file.read_into(0, memoryview(out))
    shown = json.loads(out[:FILE_NBYTES])
    assert len(kinds) > 20
    assert shown["requests"] == dict.fromkeys(sorted(kinds), HUGE)
    assert shown["read_sizes"]["1048576"] == HUGE


def test_figures_that_the_system_does_not_tell_are_null(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stats, "bytes_read", lambda: None)
    shown = Stats().snapshot()
    assert shown["source_bytes"] is None
    assert shown["read_amplification"] is None


def test_the_rest_of_the_tree_stays_as_it_is() -> None:
    leaf = Leaf(file_of([b"text"]))
    tree = with_stats(Tree(Folder(lambda: {"a": leaf}), 7), Stats())
    assert tree.mtime_ns == 7
    assert tree.lookup("/a") is leaf
    found: Any = tree.lookup("/.ckptfs/stats.json")
    assert found.size == FILE_NBYTES
    assert list(tree.root.children) == ["a", ".ckptfs"]
