"""An open file gives the bytes of its `ExtentFile`, whether C or Python reads them."""

from __future__ import annotations

import os
import shutil
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor, wait
from pathlib import Path

import h5py
import hdf5plugin
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ckptfs.errors import CorruptChunk, SourceChanged, SourceClosed
from ckptfs.formats import files
from ckptfs.formats.extents import Body, ExtentFile, file_of
from ckptfs.mount import open_file
from ckptfs.mount.open_file import Reader
from ckptfs.native import library
from ckptfs.native.program import Program
from ckptfs.tensors.cache import TileCache
from ckptfs.tensors.dtypes import DTYPES
from ckptfs.tensors.file_tensor import FileTensor
from ckptfs.tensors.ranges import to_bytes
from ckptfs.tensors.tensor import Tensor, nbytes
from ckptfs.tensors.transpose import Transposed
from ckptfs.tensors.views import ConcatRows, PermutedRows, Reshaped, SlicedColumns, SlicedRows, closed_block, rope_pairs
from tests.factories import tensor_of
from tests.formats.hdf5 import test_chunked as h5
from tests.formats.hdf5.h5_files import tensors_of

pytestmark = pytest.mark.skipif(library.LIBRARY is None, reason="installed without a C compiler")
EVEN = {
    "even": (h5.noise((160, 132), "<u4"), (32, 12)),
    "even_words": (h5.noise((256, 132), "<i2"), (64, 33)),
    "even_line": (h5.noise((3072,), "<u4"), (256,)),
    "large": (h5.noise((2000, 1100), "<i2"), (250, 55)),
}
"""Whole chunks: those at the edges of others have zeros at their ends, which LZ4 makes smaller."""
IN_C = {*EVEN, "one_chunk", "unfiltered", "contiguous"}
"""Datasets all of whose bytes C reads."""
ROPE = rope_pairs(8, 16, 16)
SHUFFLED = np.random.default_rng(3).permutation(160)


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """All datasets of `test_h5_blocks`, and some more."""
    path = tmp_path_factory.mktemp("reader") / "cases.h5"
    with h5py.File(path, "w") as file:
        for name, (array, options) in h5.CASES.items():
            file.create_dataset(name, data=array, **options)
        for name, (array, chunks) in EVEN.items():
            file.create_dataset(name, data=array, chunks=chunks, **hdf5plugin.LZ4())
        holes = file.create_dataset("holes", (100, 64), "<u4", chunks=(32, 16), **hdf5plugin.LZ4())
        holes[:40, :20] = h5.noise((40, 20), "<u4")
    return path


@pytest.fixture
def stored(written: Path) -> Iterator[dict[str, Tensor]]:
    with tensors_of(written) as found:
        yield found


@pytest.fixture(scope="module")
def opened(written: Path) -> Iterator[dict[str, Tensor]]:
    """Opened once for all examples, with a cache that keeps little from one to the next."""
    with tensors_of(written, TileCache(4000)) as found:
        yield found


def moved(stored: dict[str, Tensor]) -> dict[str, Tensor]:
    """What C can do with them, one in another."""
    a, b = stored["even"], stored["even_words"]
    rows = SlicedRows(a, 11, 139)
    return {
        "slice": rows,
        "join": ConcatRows((rows, a, SlicedRows(a, 0, 0), a)),
        "rotary": PermutedRows(rows, ROPE, closed_block(ROPE)),
        "shuffled": PermutedRows(a, SHUFFLED, 160),
        "shuffled by single rows": PermutedRows(PermutedRows(a, SHUFFLED, 160), np.arange(159, -1, -1), 1),
        "neighbours": PermutedRows(b, np.r_[200:256, 0:200], 1),
        "reshaped": Reshaped(ConcatRows((rows, rows)), (132, 256)),
        "slice of a join": SlicedRows(ConcatRows((a, a)), 100, 222),
        "file": SlicedRows(stored["contiguous"], 7, 31),
    }


def read(file: ExtentFile, start: int, length: int) -> bytes:
    """A range through a `Reader`, whose surroundings stay as they are."""
    out = bytearray(b"\xaa" * (length + 20))
    n = Reader(file).read_into(start, memoryview(out)[10:-10])
    assert out[:10] == out[10 + n :][:10] == b"\xaa" * 10
    return bytes(out[10 : 10 + n])


def read_in_c(file: ExtentFile) -> bool:
    """Whether C reads all of it once the programs are there."""
    opened, out = Reader(file), bytearray(file.size)
    for start in range(0, file.size, open_file.MAX_REQUEST):
        opened.read_into(start, memoryview(out)[start : start + open_file.MAX_REQUEST])
    return opened._concat.read(0, memoryview(out)) == file.size


@pytest.mark.parametrize("name", [*h5.CASES, *EVEN, "holes"])
@settings(deadline=None, max_examples=30)
@given(data=st.data())
def test_datasets(opened: dict[str, Tensor], name: str, data: st.DataObject) -> None:
    tensor = opened[name]
    file = file_of([b"before", tensor, b"behind"])
    whole = b"before" + to_bytes(tensor) + b"behind"
    start = data.draw(st.integers(0, len(whole) + 3))
    length = data.draw(st.integers(0, len(whole)))
    assert read(file, start, length) == whole[start : start + length]


def test_what_c_reads(stored: dict[str, Tensor]) -> None:
    in_c = {name for name, tensor in stored.items() if nbytes(tensor) and read_in_c(file_of([tensor]))}
    assert in_c == IN_C
    assert all(read_in_c(file_of([b"text", tensor, b"", b"text"])) for tensor in moved(stored).values())
    assert read_in_c(file_of([Transposed(stored["even"])]))
    assert not read_in_c(file_of([Transposed(SlicedRows(stored["even"], 11, 139))]))
    assert not read_in_c(file_of([SlicedColumns(stored["even"], 3, (160, 20))]))
    assert not read_in_c(file_of([ConcatRows((stored["encoded"], stored["encoded"]))]))


@settings(deadline=None, max_examples=100)
@given(data=st.data())
def test_moved(opened: dict[str, Tensor], data: st.DataObject) -> None:
    tensors = moved(opened)
    bodies = data.draw(st.lists(st.sampled_from([b"", b"some text", *tensors.values()]), min_size=1, max_size=4))
    whole = b"".join(body if isinstance(body, bytes) else to_bytes(body) for body in bodies)
    file = file_of(bodies)
    for _ in range(3):
        start, length = data.draw(st.integers(0, len(whole))), data.draw(st.integers(0, len(whole)))
        assert read(file, start, length) == whole[start : start + length]


def test_requests_of_the_kernel(stored: dict[str, Tensor]) -> None:
    """A large file piece by piece, in order and not."""
    rows = PermutedRows(stored["large"], np.arange(2000).reshape(2, -1).T.reshape(-1), 2000)
    file = file_of([b"head", stored["large"], rows, Transposed(stored["large"])])
    whole = b"head" + b"".join(to_bytes(body) for body in file.bodies if not isinstance(body, bytes))
    opened, step = Reader(file), 1 << 17
    starts = range(0, file.size, step)
    for order in (starts, reversed(starts)):
        for start in order:
            out = bytearray(step)
            n = opened.read_into(start, memoryview(out))
            assert out[:n] == whole[start : start + step]


def test_more_bodies_than_programs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(open_file, "MAX_PROGRAMS", 3)
    file = file_of([bytes([i]) * 5 for i in range(50)])
    assert read(file, 0, 250) == b"".join(bytes([i]) * 5 for i in range(50))


def test_requests_that_are_shared_among_threads(monkeypatch: pytest.MonkeyPatch, stored: dict[str, Tensor]) -> None:
    monkeypatch.setattr(open_file, "MAX_REQUEST", 100)
    file = file_of([stored["large"]])
    assert read(file, 5, 10**6) == to_bytes(stored["large"])[5 : 5 + 10**6]


def test_tensors_without_programs() -> None:
    tensor = tensor_of("float32", (30, 7))
    assert read(file_of([b"x", tensor]), 0, 1000) == b"x" + to_bytes(tensor)


def test_readers_side_by_side(stored: dict[str, Tensor]) -> None:
    """Many threads begin with the same file at once: programs come while others read."""
    bodies = [body for tensor in moved(stored).values() for body in (b"between", tensor)]
    whole = b"".join(body if isinstance(body, bytes) else to_bytes(body) for body in bodies)
    for _ in range(20):
        opened = Reader(file_of(bodies))

        def check(seed: int, opened: Reader = opened) -> bool:
            rng = np.random.default_rng(seed)
            for start in rng.integers(0, len(whole), 20):
                out = bytearray(5000)
                n = opened.read_into(int(start), memoryview(out))
                if out[:n] != whole[start : start + 5000]:
                    return False
            return True

        with ThreadPoolExecutor(8) as pool:
            assert all(pool.map(check, range(8)))


@pytest.fixture
def programmed(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, str]]:
    """Which bodies got a program, by id, and in what thread; small tensors are prepared, too."""
    found: list[tuple[int, str]] = []
    program_of = open_file._program_of

    def noted(body: Body) -> Program | None:
        found.append((id(body), threading.current_thread().name))
        return program_of(body)

    monkeypatch.setattr(open_file, "_program_of", noted)
    monkeypatch.setattr(open_file, "MIN_PREPARED", 1000)
    return found


def test_the_next_bodies_are_prepared(stored: dict[str, Tensor], programmed: list[tuple[int, str]]) -> None:
    bodies = [b"head", stored["even"], b"x", stored["large"], SlicedRows(stored["even_words"], 3, 200)]
    file = file_of(bodies)
    opened = Reader(file)
    opened.read_into(0, memoryview(bytearray(4)))
    wait(opened._prepared.values(), 60)
    assert [body for body, thread in programmed if "prepare" in thread] == [id(bodies[i]) for i in (1, 3, 4)]
    out = bytearray(file.size)
    for start in range(0, file.size, open_file.MAX_REQUEST):
        opened.read_into(start, memoryview(out)[start : start + open_file.MAX_REQUEST])
    assert out == b"".join(body if isinstance(body, bytes) else to_bytes(body) for body in bodies)
    assert sorted(body for body, _ in programmed) == sorted(map(id, bodies)), "each once"
    assert opened._concat.read(0, memoryview(out)) == file.size


def test_only_near_bodies_are_prepared(
    stored: dict[str, Tensor], programmed: list[tuple[int, str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(open_file, "PREPARED_NBYTES", 0)
    file = file_of([stored["large"], stored["even"], stored["even_words"]])
    opened = Reader(file)
    for n, start in enumerate([0, *file.starts[1:2]], 1):
        opened.read_into(start, memoryview(bytearray(10)))
        wait(opened._prepared.values(), 60)
        prepared = [body for body, thread in programmed if "prepare" in thread]
        assert prepared == [id(body) for body in file.bodies[1 : n + 1]]


def test_nothing_is_prepared_for_a_reader_that_jumps(
    stored: dict[str, Tensor], programmed: list[tuple[int, str]]
) -> None:
    file = file_of([b"head", stored["even"], stored["large"], stored["even_words"]])
    opened = Reader(file)
    for start in (file.starts[2] + 4096, file.starts[1] + 1, file.starts[3] + 100):
        opened.read_into(start, memoryview(bytearray(4096)))
    assert not opened._prepared
    assert len(programmed) == 3


def test_a_reader_waits_for_what_is_being_prepared(
    stored: dict[str, Tensor], programmed: list[tuple[int, str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    started, go_on, program_of = threading.Event(), threading.Event(), open_file._program_of

    def held(body: Body) -> Program | None:
        if "prepare" in threading.current_thread().name:
            started.set()
            assert go_on.wait(60)
        return program_of(body)

    monkeypatch.setattr(open_file, "_program_of", held)
    file = file_of([b"head", stored["even"]])
    opened, out = Reader(file), bytearray(nbytes(stored["even"]))
    opened.read_into(0, memoryview(bytearray(4)))
    assert started.wait(60)
    with ThreadPoolExecutor(1) as pool:
        done = pool.submit(opened.read_into, 4, memoryview(out))
        assert not wait([done], 0.2).done
        go_on.set()
        assert done.result(60) == len(out)
    assert out == to_bytes(stored["even"])
    assert [body for body, _ in programmed].count(id(stored["even"])) == 1


def test_what_cannot_be_prepared_fails_when_it_is_read(written: Path, tmp_path: Path) -> None:
    path = Path(shutil.copy(written, tmp_path))
    with tensors_of(path) as stored:
        opened = Reader(file_of([b"head", stored["large"]]))
        os.truncate(path, 3000)
        assert opened.read_into(0, memoryview(bytearray(4))) == 4
        wait(opened._prepared.values(), 60)
        with pytest.raises(SourceChanged, match="to 3000 bytes"):
            opened.read_into(4, memoryview(bytearray(100)))


def test_a_damaged_part_costs_only_that_part(written: Path, tmp_path: Path) -> None:
    """One chunk's header says that it is encoded, which it is not."""
    path = Path(shutil.copy(written, tmp_path))
    with h5py.File(path) as file:
        rows = file["uncompressed"][...]
        chunk = file["uncompressed"].id.get_chunk_info_by_coord((32, 16))
    with open(path, "r+b") as out:
        out.seek(chunk.byte_offset)
        out.write(b"\xff" * 8)
    with tensors_of(path) as stored:
        opened = Reader(file_of([stored["uncompressed"], stored["uncompressed_words"]]))
        first, row = 32 * rows.shape[1] * 4, rows.shape[1] * 4
        assert opened.read_into(0, memoryview(bytearray(first))) == first
        with pytest.raises(CorruptChunk, match="uncompressed"):
            opened.read_into(first, memoryview(bytearray(row)))
        beside = bytearray(60)
        assert opened.read_into(first, memoryview(beside)) == 60
        assert beside == rows[32, :15].tobytes()
        behind = bytearray(row)
        opened.read_into(64 * row, memoryview(behind))
        assert behind == rows[64].tobytes()


def test_a_file_that_shrinks(written: Path, tmp_path: Path) -> None:
    path = Path(shutil.copy(written, tmp_path))
    with tensors_of(path) as stored:
        opened = [Reader(file_of([stored[name]])) for name in ("large", "contiguous")]
        sizes = [nbytes(stored[name]) for name in ("large", "contiguous")]
        for one, size in zip(opened, sizes, strict=True):
            one.read_into(0, memoryview(bytearray(size)))
        os.truncate(path, 3000)
        for one, size in zip(opened, sizes, strict=True):
            with pytest.raises(CorruptChunk, match="became shorter"):
                one.read_into(0, memoryview(bytearray(size)))


def test_a_closed_file(tmp_path: Path) -> None:
    path = tmp_path / "data"
    path.write_bytes(bytes(range(200)))
    file = files.open_file(path)
    opened = Reader(file_of([FileTensor(DTYPES["uint8"], (100,), file, 20, None, "x")]))
    out = bytearray(100)
    assert opened.read_into(0, memoryview(out)) == 100
    assert out == bytes(range(20, 120))
    file.close()
    with pytest.raises(SourceClosed, match="is closed"):
        opened.read_into(0, memoryview(out))
