"""Transposed matrices through an open file: what C makes of chunks is the transpose, in any pieces and any order."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import h5py
import hdf5plugin
import numpy as np
import pytest

from ckptfs.errors import CorruptChunk
from ckptfs.formats.extents import ExtentFile, file_of
from ckptfs.mount.open_file import Reader
from ckptfs.native import library, program
from ckptfs.tensors.cache import TileCache
from ckptfs.tensors.ranges import program_of
from ckptfs.tensors.tensor import Tensor
from ckptfs.tensors.transpose import Transposed
from ckptfs.tensors.views import ConcatRows, SlicedRows
from tests.formats.hdf5 import test_chunked as h5
from tests.formats.hdf5.h5_files import tensors_of
from tests.waiting import exit_code

pytestmark = pytest.mark.skipif(library.LIBRARY is None, reason="installed without a C compiler")
STEP = 300_000
"""Bytes of a request: enough for C to keep a tile for it, and no multiple of anything here."""
TILE = 55 * 4000
LARGE, OTHER = h5.noise((2000, 1100), "<i2"), h5.noise((500, 1100), "<i2")
COMPRESSED = h5.smooth((500, 1100), "<i2")
WIDE, BYTES = h5.noise((300, 700), "<f8"), h5.noise((1500, 900), "|u1")


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("transposed") / "matrices.h5"
    chunks = {"large": (250, 55), "other": (100, 44), "compressed": (100, 44), "wide": (60, 35), "bytes": (300, 90)}
    arrays = {"large": LARGE, "other": OTHER, "compressed": COMPRESSED, "wide": WIDE, "bytes": BYTES}
    with h5py.File(path, "w") as file:
        for name, array in arrays.items():
            file.create_dataset(name, data=array, chunks=chunks[name], **hdf5plugin.LZ4())
    return path


@pytest.fixture
def stored(written: Path) -> Iterator[dict[str, Tensor]]:
    with tensors_of(written) as found:
        yield found


@pytest.fixture
def keep() -> Iterator[Callable[[int], None]]:
    """Says how many bytes of tiles C may keep: none outside of a daemon."""
    assert library.LIBRARY is not None
    yield library.LIBRARY.ckptfs_set_tile_budget
    library.LIBRARY.ckptfs_set_tile_budget(0)


def cases(stored: dict[str, Tensor]) -> dict[str, tuple[Tensor, np.ndarray[Any, Any]]]:
    """Transposes, and what they are."""
    large, other, packed = stored["large"], stored["other"], stored["compressed"]
    return {
        "one": (Transposed(large), LARGE.T),
        "rows of two": (Transposed(ConcatRows((large, other))), np.concatenate([LARGE, OTHER]).T),
        "rows of three": (
            Transposed(ConcatRows((large, ConcatRows((other, large))))),
            np.concatenate([LARGE, OTHER, LARGE]).T,
        ),
        "with compressed ones": (Transposed(ConcatRows((large, packed))), np.concatenate([LARGE, COMPRESSED]).T),
        "some rows": (Transposed(SlicedRows(large, 100, 900)), LARGE[100:900].T),
        "eight bytes": (Transposed(stored["wide"]), WIDE.T),
        "one byte": (Transposed(stored["bytes"]), BYTES.T),
        "slice of it": (SlicedRows(Transposed(large), 33, 1001), LARGE.T[33:1001]),
    }


def pieces(opened: Reader, file: ExtentFile, starts: Any, step: int = STEP) -> Iterator[tuple[int, bytes]]:
    for start in starts:
        out = bytearray(b"\xaa" * (step + 20))
        n = opened.read_into(start, memoryview(out)[10:-10])
        assert n == min(step, file.size - start)
        assert out[:10] == out[10 + n :][:10] == b"\xaa" * 10
        yield start, bytes(out[10 : 10 + n])


@pytest.mark.parametrize("budget", [0, TILE - 1, TILE, 4 * TILE, 32 << 20])
def test_in_pieces(stored: dict[str, Tensor], keep: Callable[[int], None], budget: int) -> None:
    keep(budget)
    chance = np.random.default_rng(budget)
    for name, (tensor, array) in cases(stored).items():
        want, file = b"head" + array.tobytes(), file_of([b"head", tensor])
        opened = Reader(file)
        forth = list(range(0, file.size, STEP))
        for starts in (forth, forth[::-1], chance.integers(0, file.size, 20).tolist()):
            for start, found in pieces(opened, file, starts):
                assert found == want[start : start + STEP], name
        for start, found in pieces(opened, file, chance.integers(0, file.size, 20).tolist(), 5000):
            assert found == want[start : start + 5000], name


def test_what_c_does(stored: dict[str, Tensor], keep: Callable[[int], None]) -> None:
    """Tiles of which all is wanted always; others for large requests, if it may keep them."""
    found = {}
    for name, (tensor, _) in cases(stored).items():
        file = file_of([tensor])
        opened = Reader(file)
        list(pieces(opened, file, [0], file.size))
        list(pieces(opened, file, [0], 100))  # a request of all goes to Python where it is large
        found[name] = opened._concat.read(0, memoryview(bytearray(file.size))) == file.size
    assert found == {name: name not in ("with compressed ones", "some rows", "slice of it") for name in found}
    file = file_of([Transposed(stored["large"])])
    opened, out = Reader(file), memoryview(bytearray(STEP))
    opened.read_into(0, out)
    for budget, want, again in ((0, 0, 0), (TILE - 1, 0, 0), (TILE, STEP, 0), (2 * TILE, STEP, 5000), (0, 0, 0)):
        keep(budget)
        assert opened._concat.read(1000, out) == want
        assert opened._concat.read(1000, out[:5000]) == again  # a page of a tile that is still there, or not
    keep(32 << 20)
    assert opened._concat.read(3 * TILE, out[:5000]) == 0


def test_elements_that_c_does_not_move(stored: dict[str, Tensor]) -> None:
    assert program_of(Transposed(SlicedRows(stored["large"], 0, 7))) is None
    assert program.transpose(program_of(stored["large"]), (1100, 2000), 2, 4 << 20, 0) is None
    assert program.transpose(None, (1100, 2000), 2, 55, 0) is None


def test_tiles_of_different_tensors_are_told_apart(stored: dict[str, Tensor], keep: Callable[[int], None]) -> None:
    """Also of those that come and go, whose memory others get."""
    keep(32 << 20)
    for _ in range(4):
        for name, (tensor, array) in cases(stored).items():
            file = file_of([tensor])
            want = array.tobytes()
            for start, found in pieces(Reader(file), file, [1000, 0, file.size // 2]):
                assert found == want[start : start + STEP], name


@pytest.mark.parametrize("budget", [TILE, 3 * TILE, 32 << 20])
def test_many_threads(stored: dict[str, Tensor], keep: Callable[[int], None], budget: int) -> None:
    keep(budget)
    made = cases(stored)
    files = {name: file_of([tensor]) for name, (tensor, _) in made.items()}
    opened = {name: Reader(file) for name, file in files.items()}
    want = {name: array.tobytes() for name, (_, array) in made.items()}

    def right(seed: int) -> bool:
        chance = np.random.default_rng(seed)
        for _ in range(40):
            name = ["one", "rows of two", "one", "rows of two", "with compressed ones"][chance.integers(5)]
            start = int(chance.integers(files[name].size))
            ((_, found),) = pieces(opened[name], files[name], [start])
            if found != want[name][start : start + STEP]:
                return False
        return True

    with ThreadPoolExecutor(8) as pool:
        assert all(pool.map(right, range(32)))


@pytest.mark.slow
def test_a_child_of_a_process_that_is_reading(stored: dict[str, Tensor], keep: Callable[[int], None]) -> None:
    """Tiles that other threads were making at the fork do not keep it waiting."""
    keep(4 * TILE)
    file, want = file_of([Transposed(stored["large"])]), LARGE.T.tobytes()
    opened = Reader(file)
    stop: list[bool] = []

    def busy(seed: int) -> None:
        chance = np.random.default_rng(seed)
        while not stop:
            list(pieces(opened, file, [int(chance.integers(file.size - STEP))]))

    with ThreadPoolExecutor(3) as pool:
        done = [pool.submit(busy, i) for i in range(3)]
        try:
            for i in range(20):
                pid = os.fork()
                if pid == 0:
                    sound = all(
                        found == want[s : s + STEP] for s, found in pieces(opened, file, range(i, file.size, STEP))
                    )
                    os._exit(0 if sound else 1)
                assert exit_code(pid) == 0
        finally:
            stop.append(True)
    for thread in done:
        thread.result()


def test_damage(written: Path, tmp_path: Path, keep: Callable[[int], None]) -> None:
    """Of one chunk: the tiles that it is in cannot be read, all others can."""
    keep(32 << 20)
    path = tmp_path / "damaged.h5"
    shutil.copy(written, path)
    with h5py.File(path) as opened:
        where = opened["large"].id.get_chunk_info_by_coord((500, 550))
    with path.open("r+b") as out:
        out.seek(where.byte_offset)
        out.write(bytes(16))
    with tensors_of(path) as stored:
        file, want = file_of([Transposed(stored["large"])]), LARGE.T.tobytes()
        reader, failed = Reader(file), []
        for start in range(0, file.size, STEP):
            try:
                assert next(pieces(reader, file, [start]))[1] == want[start : start + STEP]
            except CorruptChunk as error:
                assert error.offset == where.byte_offset
                failed.append(start)
        touched = [s for s in range(0, file.size, STEP) if s < 605 * 4000 and s + STEP > 550 * 4000]
        assert failed == touched


def test_part_of_the_budget() -> None:
    cache = TileCache(1000)
    assert (cache.lend(0.25), cache.budget) == (250, 750)
    assert (cache.lend(0.25), cache.budget) == (250, 750)
    assert (cache.lend(0), cache.budget) == (0, 1000)
