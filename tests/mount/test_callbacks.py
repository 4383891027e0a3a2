"""What C answers by itself, and what it leaves to Python: libfuse's callbacks, called as libfuse calls them."""

from __future__ import annotations

import ctypes
import errno
from collections.abc import Iterator
from typing import Any

import pytest

from ckptfs.formats.extents import file_of
from ckptfs.mount import callbacks, fuse
from ckptfs.mount.stats import Stats
from ckptfs.native import library
from ckptfs.vfs.tree import Folder, Leaf, Tree
from tests.factories import tensor_of

pytestmark = pytest.mark.skipif(library.LIBRARY is None, reason="installed without a C compiler")
TEXT = bytes(range(256)) * 300


class Counted(fuse.Adapter):
    """Counts what comes to Python."""

    asked: list[str]

    def read(self, path: bytes, out: Any, size: int, offset: int, fi: Any) -> int:
        self.asked.append("read")
        return super().read(path, out, size, offset, fi)


class Mount:
    """The table of callbacks of a small tree."""

    def __init__(self, stats: Stats | None = None) -> None:
        self.binding = fuse.load_binding()
        self.tensor = tensor_of("float32", (300, 70))
        files = {
            "text": Leaf(file_of([TEXT, TEXT])),
            "python": Leaf(file_of([TEXT, self.tensor])),
            "small": Leaf(file_of([TEXT[:1000]])),
            "wide": Leaf(file_of([b"".join(bytes([i]) for i in range(256))] * 1000)),
        }
        self.adapter = Counted(self.binding, Tree(Folder(lambda: dict(files)), 0), fuse.MountOptions(), None)
        self.adapter.asked = []
        self.table = callbacks.operations(self.binding, self.adapter, stats)

    def open(self, name: str) -> Any:
        info = self.binding.fuse_file_info()
        assert self.table.open(f"/{name}".encode(), ctypes.pointer(info)) == 0
        return info

    def read(self, name: str, offset: int, size: int, info: Any = None) -> bytes | int:
        """The bytes, or a negative errno; what lies behind the reply stays as it is."""
        info = info or self.open(name)
        out = ctypes.create_string_buffer(b"\xaa" * (size + 16), size + 16)
        n: int = self.table.read(
            f"/{name}".encode(), ctypes.cast(out, self.read_type), size, offset, ctypes.pointer(info)
        )
        assert out.raw[max(n, 0) :] == b"\xaa" * (size + 16 - max(n, 0))
        return out.raw[:n] if n >= 0 else n

    def read_buf(self, name: str, offset: int, size: int, info: Any) -> bytes | int:
        """The same from the callback that brings the memory of its reply along, which is freed here."""
        prototype = dict(self.binding.fuse_operations._fields_)["read_buf"]
        made = prototype._argtypes_[1]._type_()  # a pointer to nothing yet
        n: int = self.table.read_buf(f"/{name}".encode(), ctypes.pointer(made), size, offset, ctypes.pointer(info))
        if n < 0:
            assert not made
            return n
        vector = made.contents
        assert (n, vector.count, vector.idx, vector.off) == (0, 1, 0, 0)
        # libfuse's structure has the first buffer inside, not a pointer to it
        only = self.binding.fuse_buf.from_address(ctypes.addressof(vector) + type(vector).buf.offset)
        assert (only.flags, only.fd) == (0, -1)
        assert size < 1 << 16 or only.mem % 4096 == 0
        found = ctypes.string_at(only.mem, only.size)
        free = ctypes.CDLL(None).free
        free.argtypes = [ctypes.c_void_p]
        free(only.mem)
        free(ctypes.addressof(vector))
        return found

    @property
    def read_type(self) -> Any:
        return dict(self.binding.fuse_operations._fields_)["read"]._argtypes_[1]

    def asked(self) -> list[str]:
        """What Python was asked since the last time."""
        found, self.adapter.asked = self.adapter.asked, []
        return found


@pytest.fixture
def mount() -> Iterator[Mount]:
    mount = Mount()
    yield mount
    # later tables must not call into this one
    library.LIBRARY and library.LIBRARY.ckptfs_set_fallback(None, 0, 0)


def test_python_is_asked_for_the_first_read_of_a_part_only(mount: Mount) -> None:
    info = mount.open("text")
    assert mount.read("text", 5, 70_000, info) == TEXT[5:70_005]
    assert mount.asked() == ["read"]
    assert mount.read("text", 5, 70_000, info) == TEXT[5:70_005]
    assert mount.asked() == []
    assert mount.read("text", 70_000, 1 << 20, info) == (TEXT + TEXT)[70_000:]
    assert mount.asked() == ["read"]
    assert mount.read("text", 70_000, 1 << 20, info) == (TEXT + TEXT)[70_000:]
    assert mount.asked() == []


@pytest.mark.parametrize("name", ["text", "small", "python"])
def test_past_the_end_there_is_nothing(mount: Mount, name: str) -> None:
    size = {"text": 2 * len(TEXT), "small": 1000, "python": len(TEXT) + 300 * 70 * 4}[name]
    for offset in (size, size + 1, 1 << 62):
        assert mount.read(name, offset, 4096) == b""
    last = mount.read(name, size - 1, 4096)
    assert isinstance(last, bytes) and len(last) == 1


def test_what_c_cannot_say_is_left_to_python(mount: Mount) -> None:
    info = mount.open("python")
    whole = TEXT + mount.tensor.bytes
    for _ in range(2):
        assert mount.read("python", len(TEXT) - 10, 5000, info) == whole[len(TEXT) - 10 :][:5000]
        assert mount.asked() == ["read"]
    assert mount.read("python", 0, len(TEXT), info) == TEXT
    assert mount.asked() == []


def test_small_files_never_get_to_c(mount: Mount) -> None:
    info = mount.open("small")
    assert info.fh % 2 == 1
    for _ in range(2):
        assert mount.read("small", 10, 2000, info) == TEXT[10:1000]
        assert mount.asked() == ["read"]


def test_errors_come_through(mount: Mount, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*_: Any) -> None:
        raise OSError(errno.EIO, "the disk is gone")

    monkeypatch.setattr(type(mount.tensor), "read_block", fails)
    info = mount.open("python")
    assert mount.read("python", len(TEXT) + 100, 5000, info) == -errno.EIO
    assert mount.read("python", 100, 5000, info) == TEXT[100:5100]


@pytest.mark.skipif(library.LIBRARY is None, reason="installed without a C compiler")
@pytest.mark.parametrize("size", [1, 4096, 100_000, 1 << 20])
def test_replies_bring_their_memory(mount: Mount, size: int) -> None:
    info, whole = mount.open("text"), TEXT + TEXT
    for offset in (0, 70_000, len(whole) - 10, len(whole)):
        assert mount.read_buf("text", offset, size, info) == whole[offset : offset + size]
    assert mount.read("text", 0, size, info) == whole[:size]  # from the table's other callback


@pytest.mark.skipif(library.LIBRARY is None, reason="installed without a C compiler")
def test_errors_bring_no_memory(mount: Mount, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*_: Any) -> None:
        raise OSError(errno.EIO, "the disk is gone")

    monkeypatch.setattr(type(mount.tensor), "read_block", fails)
    assert mount.read_buf("python", len(TEXT) + 100, 70_000, mount.open("python")) == -errno.EIO


def test_two_open_files_are_two(mount: Mount) -> None:
    first, second = mount.open("text"), mount.open("wide")
    for _ in range(2):
        assert mount.read("text", 300, 256, first) == TEXT[300:556]
        assert mount.read("wide", 300, 200_000, second) == (bytes(range(256)) * 1000)[300:200_300]
    assert mount.table.release(b"/text", ctypes.pointer(first)) == 0
    assert mount.read("wide", 300, 256, second) == (bytes(range(256)) * 2)[300 - 256 :][:256]


def test_statistics_are_counted_in_python() -> None:
    stats = Stats()
    mount = Mount(stats)
    info = mount.open("text")
    for _ in range(3):
        assert mount.read("text", 5, 60_000, info) == TEXT[5:60_005]
    found = stats.snapshot()
    assert (found["requests"]["read"], found["replied_bytes"]) == (3, 180_000)
