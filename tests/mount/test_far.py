"""Sources on a network: what is going to be read is prefetched in parallel, and the bytes are the same."""

from __future__ import annotations

import os
import random
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import h5py
import hdf5plugin
import numpy as np
import pytest

from ckptfs.formats.extents import file_of
from ckptfs.formats.hdf5.chunked import ChunkedTensor
from ckptfs.formats.hdf5.index import read_index
from ckptfs.mount.open_file import Reader
from ckptfs.native import library, prefetch
from ckptfs.native.prefetch import DEFAULT_READ_AHEAD, max_request
from ckptfs.tensors.ranges import to_bytes
from ckptfs.tensors.tensor import Tensor
from ckptfs.tensors.transpose import Transposed
from ckptfs.tensors.views import ConcatRows, PermutedRows, SlicedRows
from tests.conftest import Mounter
from tests.formats.hdf5 import test_chunked as h5
from tests.formats.hdf5.h5_files import tensors_of
from tests.mount import far
from tests.waiting import wait_for

pytestmark = pytest.mark.fuse
in_c = pytest.mark.skipif(library.LIBRARY is None, reason="installed without a C compiler")
READ_AHEAD = 1 << 20
STEP = 256 << 10
MATRIX = h5.noise((12288, 1024), "<i2")
"""24 MiB; grid rows have half a MiB, columns of chunks one and a half."""
CHUNK = (256, 64)
SWAPPED = np.r_[256:512, 0:256, 512:3072]
COMPRESSED = h5.smooth((3000, 1024), "<i2")
N_SMALL = 500

Far = Callable[..., tuple[Path, Path]]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("near")
    with h5py.File(path / "matrices.h5", "w") as file:
        file.create_dataset("stored", data=MATRIX, chunks=CHUNK, **hdf5plugin.LZ4())
        file.create_dataset("compressed", data=COMPRESSED, chunks=CHUNK, **hdf5plugin.LZ4())
        file.create_dataset("contiguous", data=MATRIX)
        file.create_dataset("next", data=MATRIX[:3072], chunks=CHUNK, **hdf5plugin.LZ4())
    with h5py.File(path / "small.h5", "w") as file:
        for i in range(N_SMALL):
            file.create_dataset(f"small {i}", data=h5.noise((64, 128), "<f4"), chunks=(32, 64))
    return path


@pytest.fixture
def away(folder: Path, mounter: Mounter) -> Far:
    """The file of that name far away, not in the page cache, and the log of what was asked for."""

    def mount(name: str, read_ahead: int = READ_AHEAD) -> tuple[Path, Path]:
        log = mounter.folder / "log"
        done = mounter.run("-m", "tests.mount.far", folder, mounter.mountpoint(), log, read_ahead)
        assert done.returncode == 0, done.stderr
        prefetch._read_ahead.cache_clear()  # a mount gets the device number of the last one
        return mounter.mountpoint() / name, log

    return mount


def read(tensor: Tensor, start: int, nbytes: int) -> bytes:
    """Through an open file, as the kernel asks for it."""
    reader, found = Reader(file_of([tensor])), b""
    for at in range(start, start + nbytes, STEP):
        out = bytearray(min(STEP, start + nbytes - at))
        assert reader.read_into(at, memoryview(out)) == len(out)
        found += out
    return found


def find_out(tensor: Tensor) -> None:
    """Let this process find out that the source is far away: a reader that jumps has to wait each time."""
    reader, out = Reader(file_of([tensor])), bytearray(STEP)
    for part in (6, 11, 8):
        assert reader.read_into(part * MATRIX.nbytes // 12, memoryview(out)) == STEP


def asked_between(log: Path, start: int, stop: int) -> int:
    """Bytes of the requests that begin there."""
    return sum(r.nbytes for r in far.requests(log) if start <= r.offset < stop)


def soon(holds: Callable[[], bool]) -> bool:
    """The kernel goes on with a prefetch while readers do."""
    wait_for("the kernel", holds)
    return True


def offset_of(folder: Path, row: int, col: int) -> int:
    """Where the chunk with that element of ``stored`` begins."""
    with h5py.File(folder / "matrices.h5") as file:
        found = file["stored"].id.get_chunk_info_by_coord((row // 256 * 256, col // 64 * 64))
        return int(found.byte_offset)


@in_c
def test_rows_of_chunks_are_asked_for_before_a_sequential_reader_wants_them(folder: Path, away: Far) -> None:
    path, log = away("matrices.h5")
    with tensors_of(path) as found:
        assert read(found["stored"], 0, 4 * STEP) == MATRIX.tobytes()[: 4 * STEP]  # the first two rows of chunks
    places = [offset_of(folder, row, 0) for row in (2 * 256, 10 * 256, 24 * 256, 47 * 256)]
    assert soon(lambda: asked_between(log, places[0], places[1]) > (places[1] - places[0]) // 2)
    assert asked_between(log, places[2], places[3]) < (places[3] - places[2]) // 8  # as far as its window, not all
    assert far.at_once(far.requests(log)) > 3


@in_c
def test_a_source_that_takes_large_requests_is_asked_for_several_of_them_ahead(folder: Path, away: Far) -> None:
    assert library.LIBRARY is not None
    path, log = away("matrices.h5", 4 << 20)
    with tensors_of(path) as found:
        library.LIBRARY.ckptfs_prefetch_done(0)  # counts all waits of this thread: the source is taken for far away
        assert read(found["stored"], 0, 4 * STEP) == MATRIX.tobytes()[: 4 * STEP]
    eleven_mib, twenty_mib = offset_of(folder, 22 * 256, 0), offset_of(folder, 40 * 256, 0)
    assert soon(lambda: asked_between(log, eleven_mib, twenty_mib) > (twenty_mib - eleven_mib) * 3 // 4)


@in_c
def test_rows_that_lie_one_after_the_other_are_asked_for_further_ahead_than_the_kernel_does(
    folder: Path, away: Far
) -> None:
    path, log = away("matrices.h5")
    with h5py.File(folder / "matrices.h5") as file:
        start = file["contiguous"].id.get_offset()
    with tensors_of(path) as found:
        find_out(found["stored"])
        assert read(found["contiguous"], 0, 4 * STEP) == MATRIX.tobytes()[: 4 * STEP]
    far_ahead = start + 4 * STEP + 2 * READ_AHEAD
    assert soon(lambda: asked_between(log, far_ahead, far_ahead + (4 << 20)) > 2 << 20)
    assert asked_between(log, far_ahead + (8 << 20), start + MATRIX.nbytes - (1 << 20)) == 0


@in_c
@pytest.mark.parametrize("name", ["slice", "order", "join", "transpose"])
def test_the_next_tensor_is_asked_for_before_a_sequential_reader_is_there(folder: Path, away: Far, name: str) -> None:
    path, log = away("matrices.h5")
    with h5py.File(folder / "matrices.h5") as file:
        place = (
            file["next"].id.get_chunk_info_by_coord((2816, 0) if name == "transpose" else (256, 0)).byte_offset + 30_000
        )
    with tensors_of(path) as found:
        find_out(found["stored"])
        rows = SlicedRows(found["next"], 256, 3072)
        following, content = {
            "slice": (rows, MATRIX[256:3072]),
            "order": (PermutedRows(found["next"], SWAPPED, 256), MATRIX[SWAPPED]),
            "join": (ConcatRows((SlicedRows(rows, 0, 0), rows, rows)), MATRIX[256:3072]),
            "transpose": (Transposed(found["next"]), MATRIX[:3072].T),
        }[name]
        reader = Reader(file_of([found["stored"], following]))
        assert reader.read_into(0, memoryview(bytearray(STEP))) == STEP
        assert soon(lambda: any(r.offset <= place < r.offset + r.nbytes for r in far.requests(log)))
        out = bytearray(STEP)
        assert reader.read_into(MATRIX.nbytes, memoryview(out)) == STEP
    assert out == content.tobytes()[:STEP]


@in_c
def test_a_reader_that_jumps_gets_no_more_than_it_wants(folder: Path, away: Far) -> None:
    path, log = away("matrices.h5")
    with tensors_of(path) as found:
        stored, line = found["stored"], MATRIX.nbytes // 12
        reader, out = Reader(file_of([stored])), bytearray(STEP)
        for i in (6, 1, 11):  # far apart
            assert reader.read_into(i * line, memoryview(out)) == STEP
            assert out == MATRIX.tobytes()[i * line : i * line + STEP]
    # what the kernel reads around each piece and each head of a chunk, but nothing of what lies ahead
    start, stop = offset_of(folder, 0, 0), offset_of(folder, 12287, 0)
    assert asked_between(log, start, stop) < 3 * (1 << 20)


@in_c
def test_columns_of_chunks_are_asked_for_before_a_transpose_wants_them(folder: Path, away: Far) -> None:
    path, log = away("matrices.h5")
    with tensors_of(path) as found:
        transposed = Transposed(found["stored"])
        first = read(transposed, 0, 64 * 12288 * 2)  # one column of chunks
        assert first == MATRIX.T[:64].tobytes()
    asked = [(r.offset, r.offset + r.nbytes) for r in far.requests(log)]
    behind = [offset_of(folder, row, 64) for row in range(0, 12288, 256)]
    assert sum(any(a <= place + 30_000 < b for a, b in asked) for place in behind) > len(behind) // 2


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("name", ["stored", "compressed", "contiguous"])
def test_any_bytes_are_the_same(away: Far, name: str, transposed: bool) -> None:
    array = COMPRESSED if name == "compressed" else MATRIX
    content = (array.T if transposed else array).tobytes()
    path, _ = away("matrices.h5")
    with tensors_of(path) as found, ThreadPoolExecutor(3) as pool:
        file = file_of([Transposed(found[name]) if transposed else found[name]])
        reader = file if library.LIBRARY is None else Reader(file)

        def is_same(span: tuple[int, int]) -> bool:
            out = bytearray(span[1])
            return reader.read_into(span[0], memoryview(out)) == len(out) and out == content[span[0] : sum(span)]

        draw = random.Random(name)
        in_turn = [(at, STEP) for at in range(0, len(content) - STEP, STEP)][:30]
        anywhere = [(draw.randrange(len(content) - STEP), draw.choice([99, STEP])) for _ in range(30)]
        assert all(pool.map(is_same, in_turn + anywhere))


def test_whole_tensors_are_the_same(away: Far) -> None:
    path, _ = away("matrices.h5")
    with tensors_of(path) as found:
        assert to_bytes(found["compressed"]) == COMPRESSED.tobytes()
        assert to_bytes(found["stored"]) == MATRIX.tobytes()


def test_object_headers_are_asked_for_at_once(folder: Path, away: Far) -> None:
    path, log = away("small.h5")
    assert read_index(str(path)).objects == read_index(str(folder / "small.h5")).objects
    assert far.at_once(far.requests(log)) > 5


def test_the_nodes_of_a_chunk_table_are_asked_for_at_once(folder: Path, away: Far) -> None:
    path, log = away("matrices.h5")
    with tensors_of(path) as found, tensors_of(folder / "matrices.h5") as near:
        opened = len(far.requests(log))
        tensor, same = found["stored"], near["stored"]
        assert isinstance(tensor, ChunkedTensor) and isinstance(same, ChunkedTensor)
        assert tensor.load().offsets.tolist() == same.load().offsets.tolist()
    assert far.at_once(far.requests(log)[opened:]) > 5


def test_prefetch_requests_are_as_large_as_the_kernel_takes_them(away: Far) -> None:
    path, _ = away("matrices.h5")
    with open(path, "rb") as file:  # only root may set the read-ahead of a mount
        assert max_request(file.fileno()) == (READ_AHEAD if os.geteuid() == 0 else DEFAULT_READ_AHEAD)
    read_end, write_end = os.pipe()  # on no device
    try:
        assert max_request(read_end) == DEFAULT_READ_AHEAD
    finally:
        os.close(read_end)
        os.close(write_end)


@pytest.mark.parametrize("place", [-1, 1 << 62, 1 << 63, 1 << 70])
def test_prefetching_nonsense_does_nothing(tmp_path: Path, place: int) -> None:
    (tmp_path / "file").write_bytes(b"x")
    with open(tmp_path / "file", "rb") as file:
        prefetch.prefetch(file.fileno(), [0, place, 0], 4096)
        assert file.read() == b"x"
        closed = file.fileno()
    prefetch.prefetch(closed, [0], 4096)
