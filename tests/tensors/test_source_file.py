"""Tensors own their file: what is read is that file's, as it was when it was opened, or an error."""

from __future__ import annotations

import gc
import os
import pickle
import threading
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from ckptfs.errors import SourceChanged, SourceClosed
from ckptfs.formats.extents import file_of
from ckptfs.formats.files import open_file
from ckptfs.mount.open_file import Reader
from ckptfs.native import library
from ckptfs.tensors.dtypes import DTYPES
from ckptfs.tensors.file_tensor import FileTensor
from ckptfs.tensors.ranges import to_bytes
from ckptfs.tensors.source_file import SourceFile

N = 4096
OURS, OTHERS = b"o" * N, b"x" * N


@pytest.fixture
def path(tmp_path: Path) -> Path:
    (tmp_path / "ours").write_bytes(OURS)
    (tmp_path / "others").write_bytes(OTHERS)
    return tmp_path / "ours"


def tensor_of(file: SourceFile) -> FileTensor:
    return FileTensor(DTYPES["uint8"], (N,), file, 0, None, "key")


def in_python(file: SourceFile) -> Callable[[], bytes]:
    tensor = tensor_of(file)
    return lambda: to_bytes(tensor)


def in_c(file: SourceFile) -> Callable[[], bytes]:
    if library.LIBRARY is None:
        pytest.skip("installed without a C compiler")
    reader = Reader(file_of([tensor_of(file)]))

    def read() -> bytes:
        out = bytearray(N)
        assert reader.read_into(0, memoryview(out)) == N
        return bytes(out)

    assert read() == OURS  # from now on the program has the descriptor
    return read


reads = pytest.mark.parametrize("reading", [in_python, in_c])


@reads
def test_a_closed_file_is_never_another_one(path: Path, reading: Callable[[SourceFile], Callable[[], bytes]]) -> None:
    file = open_file(path)
    read, number = reading(file), file.fd
    assert read() == OURS
    file.close()
    others = [os.open(path.with_name("others"), os.O_RDONLY) for _ in range(20)]
    try:
        assert number not in others
        with pytest.raises(SourceClosed, match=rf"checkpoint {path} is closed") as caught:
            read()
        assert caught.value.path == str(path)
    finally:
        for other in others:
            os.close(other)


@reads
def test_closing_while_others_read(path: Path, reading: Callable[[SourceFile], Callable[[], bytes]]) -> None:
    """Readers get the file's bytes or the error, while closed numbers are in great demand."""
    for _ in range(10):
        file = open_file(path)
        read, found = reading(file), []

        def run(read: Callable[[], bytes] = read, found: list[bytes] = found) -> None:
            try:
                while True:
                    found.append(read())
            except SourceClosed:
                found.append(OURS)

        threads = [threading.Thread(target=run) for _ in range(3)]
        for thread in threads:
            thread.start()
        file.close()
        others = [os.open(path.with_name("others"), os.O_RDONLY) for _ in range(10)]
        for thread in threads:
            thread.join(30)
            assert not thread.is_alive()
        for other in others:
            os.close(other)
        assert set(found) == {OURS}


def test_the_file_itself_is_given_back_at_once(path: Path) -> None:
    file = open_file(path)
    number = file.fd
    tensor = tensor_of(file)
    file.close()
    file.close()
    assert file.closed
    assert os.readlink(f"/proc/self/fd/{number}") == "/"
    del tensor, file
    gc.collect()
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(number)


def test_a_program_keeps_the_descriptor(path: Path) -> None:
    if library.LIBRARY is None:
        pytest.skip("installed without a C compiler")
    file = open_file(path)
    number, program = file.fd, tensor_of(file).program()
    del file
    gc.collect()
    assert os.readlink(f"/proc/self/fd/{number}") == str(path)
    del program
    gc.collect()
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(number)


def overwrite(path: Path) -> None:
    path.write_bytes(OTHERS)


def overwrite_in_part(path: Path) -> None:
    with path.open("r+b") as out:
        out.write(b"!")


def append(path: Path) -> None:
    with path.open("ab") as out:
        out.write(b"!")


def cut(path: Path) -> None:
    os.truncate(path, 10)


@reads
@pytest.mark.parametrize(
    ("change", "what"),
    [
        (overwrite, "its size is the same"),
        (overwrite_in_part, "its size is the same"),
        (append, "from 4096 to 4097 bytes"),
        (cut, "from 4096 to 10 bytes"),
    ],
)
def test_a_file_that_was_written_to(
    path: Path, change: Callable[[Path], None], what: str, reading: Callable[[SourceFile], Callable[[], bytes]]
) -> None:
    os.utime(path, ns=(0, 0))  # a clock of few ticks a second might give the change the time of the making
    file = open_file(path)
    read = reading(file)
    file.check()
    change(path)
    with pytest.raises(SourceChanged, match=f"ours: was written to after it was opened .{what}.") as caught:
        file.check()
    assert caught.value.path == str(path)
    with pytest.raises(SourceChanged):  # it is given up for good
        read()
    file.close()
    with pytest.raises(SourceChanged):
        file.check()


@pytest.mark.parametrize("gone", ["deleted", "replaced", "moved", "chmod"])
def test_the_name_does_not_matter(path: Path, gone: str) -> None:
    file = open_file(path)
    if gone == "deleted":
        path.unlink()
    elif gone == "replaced":
        path.with_name("others").rename(path)
    elif gone == "moved":
        path.rename(path.with_name("elsewhere"))
    else:
        path.chmod(0o400)
    file.check()
    assert to_bytes(tensor_of(file)) == OURS


def test_without_a_free_descriptor_a_file_is_closed_all_the_same(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> int:
        raise OSError(24, "Too many open files")

    file = open_file(path)
    with monkeypatch.context() as patch:
        patch.setattr(os, "open", refuse)
        file.close()
    with pytest.raises(SourceClosed):
        to_bytes(tensor_of(file))


def test_what_is_called_at_the_close(path: Path) -> None:
    file, calls = open_file(path), []
    file.at_close(lambda: calls.append(file.closed))
    file.close()
    file.close()
    assert calls == [True]


def test_an_open_file_cannot_be_pickled(path: Path) -> None:
    with pytest.raises(TypeError, match="cannot be pickled"):
        pickle.dumps(open_file(path))


def test_reads_of_a_changed_file_cost_no_look(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A look at the file is one system call, at each open and chunk table; a read has none."""
    file = open_file(path)
    looks: list[int] = []
    fstat = os.fstat
    monkeypatch.setattr(os, "fstat", lambda fd: looks.append(fd) or fstat(fd))
    assert np.frombuffer(to_bytes(tensor_of(file)), np.uint8).sum() == N * ord("o")
    assert not looks
    file.check()
    assert len(looks) == 1
