"""Any block of any dataset equals the slice of the array that h5py wrote."""

from __future__ import annotations

import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import h5py
import hdf5plugin
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ckptfs.errors import CorruptChunk, SourceChanged
from ckptfs.formats.hdf5 import chunks_uncompressed
from ckptfs.formats.hdf5.chunked import boxes
from ckptfs.native import library
from ckptfs.tensors.cache import TileCache
from ckptfs.tensors.ranges import read_elements, read_into, read_transposed, to_bytes
from ckptfs.tensors.tensor import Tensor, n_cols, n_rows
from tests.formats.hdf5.h5_files import tensors_of

RNG = np.random.default_rng(7)


@pytest.fixture(scope="module", params=["C", "numpy"], autouse=True)
def loops(request: pytest.FixtureRequest) -> Iterator[None]:
    """Everything below holds with and without the C loops."""
    with pytest.MonkeyPatch.context() as patch:
        if request.param == "numpy":
            patch.setattr(library, "LIBRARY", None)
        elif library.LIBRARY is None:
            pytest.skip("installed without a C compiler")
        yield


def noise(shape: tuple[int, ...], dtype: str) -> np.ndarray[Any, Any]:
    size = np.dtype(dtype).itemsize
    return RNG.integers(0, 256, (*shape[:-1], shape[-1] * size), np.uint8).view(dtype)


def smooth(shape: tuple[int, ...], dtype: str) -> np.ndarray[Any, Any]:
    return (np.arange(np.prod(shape)) // 37).reshape(shape).astype(dtype)


def mixed(shape: tuple[int, ...], dtype: str) -> np.ndarray[Any, Any]:
    """Half of it compresses."""
    array = noise(shape, dtype)
    array[: shape[0] // 2] = 1
    return array


LZ4 = hdf5plugin.LZ4()
CASES: dict[str, tuple[np.ndarray[Any, Any], dict[str, Any]]] = {
    "uncompressed": (noise((150, 131), "<u4"), {"chunks": (32, 16), **LZ4}),
    "uncompressed_words": (noise((257, 131), "<i2"), {"chunks": (50, 33), **LZ4}),
    "uncompressed_bytes": (noise((65, 37), "|u1"), {"chunks": (16, 16), **LZ4}),
    "one_chunk": (noise((40, 30), "<i8"), {"chunks": (40, 30), **LZ4}),
    "larger_chunk": (noise((5, 3), "<u4"), {"chunks": (16, 8), "maxshape": (None, None), **LZ4}),
    "line": (noise((3001,), "<u4"), {"chunks": (256,), **LZ4}),
    "encoded": (smooth((300, 100), "<f4"), {"chunks": (64, 48), **LZ4}),
    "mixed": (mixed((100, 100), "<u4"), {"chunks": (32, 32), **LZ4}),
    "blocks": (mixed((128, 64), "<u4"), {"chunks": (64, 32), **hdf5plugin.LZ4(nbytes=1000)}),
    "cube": (noise((17, 33, 29), "<u4"), {"chunks": (5, 9, 8), **LZ4}),
    "cube_encoded": (smooth((9, 14, 11), "<i2"), {"chunks": (4, 5, 11), **LZ4}),
    "hyper": (noise((7, 3, 5, 11), "<u2"), {"chunks": (4, 2, 3, 4), **LZ4}),
    "unfiltered": (noise((50, 60), "<u4"), {"chunks": (16, 16)}),
    "gzip": (smooth((60, 50), "<f8"), {"chunks": (16, 20), "compression": "gzip"}),
    "shuffled": (smooth((60, 50), "<i4"), {"chunks": (16, 20), "compression": "gzip", "shuffle": True}),
    "checked": (noise((61, 50), "|u1"), {"chunks": (15, 17), "fletcher32": True}),
    "everything": (smooth((60, 51), "<i2"), {"chunks": (16, 20), "shuffle": True, "fletcher32": True, **LZ4}),
    "big_endian": (smooth((60, 50), ">i4"), {"chunks": (16, 20), **LZ4}),
    "big_endian_complex": (smooth((20, 10), ">c8"), {"chunks": (8, 6), **LZ4}),
    "complex": (noise((20, 10), "<c16"), {"chunks": (8, 6), **LZ4}),
    "bools": (smooth((40, 30), "<i4") % 2 == 0, {"chunks": (16, 16), **LZ4}),
    "contiguous": (noise((50, 60), "<u4"), {}),
    "contiguous_line": (noise((500,), ">i2"), {}),
    "empty": (np.zeros((3, 0, 5), "<f4"), {"chunks": (1, 8, 3), "maxshape": (3, None, 5)}),
}


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("h5") / "blocks.h5"
    with h5py.File(path, "w") as out:
        for name, (array, options) in CASES.items():
            out.create_dataset(name, data=array, **options)
    return path


@pytest.fixture(scope="module")
def tensors(loops: None, file: Path) -> Iterator[dict[str, Tensor]]:
    """Opened once for laws of single tensors, with a cache that keeps little from one read to the next."""
    with tensors_of(file, TileCache(4000)) as found:
        yield found


def expected(array: np.ndarray[Any, Any], tensor: Tensor) -> np.ndarray[Any, Any]:
    little = array.astype(array.dtype.newbyteorder("<"))
    return np.frombuffer(little.tobytes(), tensor.dtype.storage_dtype).reshape(
        n_rows(tensor.shape), n_cols(tensor.shape)
    )


@pytest.mark.parametrize("name", CASES)
def test_whole_tensors(file: Path, name: str) -> None:
    array = CASES[name][0]
    with tensors_of(file) as tensors:
        assert tensors[name].shape == array.shape
        assert to_bytes(tensors[name]) == array.astype(array.dtype.newbyteorder("<")).tobytes()


@pytest.mark.parametrize("buffer", [64, 1000, 1 << 21])
@pytest.mark.parametrize("name", [name for name in CASES if name != "empty"])
def test_random_blocks(tensors: dict[str, Tensor], name: str, buffer: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Blocks into outputs of every memory order, with buffers smaller than a chunk's row too."""
    monkeypatch.setattr(chunks_uncompressed, "BUFFER", buffer)
    rng = np.random.default_rng(3)
    tensor = tensors[name]
    want = expected(CASES[name][0], tensor)
    for i in range(40):
        r0, r1 = sorted(rng.integers(0, want.shape[0] + 1, 2))
        c0, c1 = sorted(rng.integers(0, want.shape[1] + 1, 2))
        for out in outputs(r1 - r0, c1 - c0, tensor.dtype.storage_dtype, i):
            tensor.read_block(int(r0), int(c0), out)
            assert out.tobytes() == want[r0:r1, c0:c1].tobytes()


@pytest.mark.parametrize("buffer", [64, 1000, 1 << 21])
@pytest.mark.parametrize("name", [name for name in CASES if name != "empty"])
def test_random_ranges(tensors: dict[str, Tensor], name: str, buffer: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ranges of elements that begin and end anywhere, as the extents of a file ask for them."""
    monkeypatch.setattr(chunks_uncompressed, "BUFFER", buffer)
    rng = np.random.default_rng(5)
    want = expected(CASES[name][0], tensors[name]).reshape(-1)
    cols = n_cols(tensors[name].shape)
    ends = [0, 1, cols, cols + 1, 2 * cols, len(want) - cols, len(want)]
    for _ in range(60):
        start, stop = sorted(int(x) for x in rng.choice([*ends, *rng.integers(0, len(want) + 1, 7)], 2))
        out = np.zeros(stop - start + 2, want.dtype)
        read_elements(tensors[name], start, out[1:-1])
        assert out[1:-1].tobytes() == want[start:stop].tobytes()
        assert out[[0, -1]].tobytes() == bytes(2 * want.itemsize)


def outputs(rows: int, cols: int, word: np.dtype[Any], i: int) -> list[np.ndarray[Any, Any]]:
    """A C-ordered, a transposed, a widely strided and an unaligned output."""
    memory = np.zeros(rows * cols * word.itemsize + 1, np.uint8)[1:]
    kinds = [
        np.zeros((rows, cols), word),
        np.zeros((cols, rows), word).T,
        np.zeros((2 * rows, 3 * cols), word)[::2, ::3],
        memory.view(word).reshape(rows, cols),
    ]
    return [kinds[i % 4]]


@given(data=st.data())
@settings(max_examples=60, deadline=None)
def test_boxes_cover_a_range_in_order(data: st.DataObject) -> None:
    dims = data.draw(st.lists(st.integers(1, 5), min_size=1, max_size=4))
    total = int(np.prod(dims))
    start, stop = sorted(data.draw(st.tuples(st.integers(0, total), st.integers(0, total))))
    numbers = np.arange(total).reshape(dims)
    parts = [numbers[tuple(slice(*extent) for extent in box)].ravel() for box in boxes(dims, start, stop)]
    assert np.concatenate([np.zeros(0, int), *parts]).tolist() == list(range(start, stop))


def test_bytes_do_not_depend_on_the_request(file: Path) -> None:
    rng = np.random.default_rng(5)
    with tensors_of(file) as tensors:
        for name in ("uncompressed_words", "mixed", "cube", "big_endian"):
            whole = CASES[name][0].astype(CASES[name][0].dtype.newbyteorder("<")).tobytes()
            for _ in range(50):
                start, stop = sorted(rng.integers(0, len(whole) + 1, 2).tolist())
                out = bytearray(stop - start)
                read_into(tensors[name], start, memoryview(out))
                assert bytes(out) == whole[start:stop]


@pytest.mark.parametrize("shape", [(40, 30), (1, 1), (3000,), (5, 6, 7)])
def test_other_chunk_indexes(tmp_path: Path, shape: tuple[int, ...]) -> None:
    """libhdf5's newer file format has single-chunk, implicit, fixed-array and tree indexes."""
    path = tmp_path / "latest.h5"
    array = noise(shape, "<u4")
    chunk = tuple(max(1, n // 3) for n in shape)
    with h5py.File(path, "w", libver="latest") as out:
        out.create_dataset("fixed", data=array, chunks=chunk, **LZ4)
        out.create_dataset("single", data=array, chunks=shape, **LZ4)
        out.create_dataset("growing", data=array, chunks=chunk, maxshape=(None, *shape[1:]), **LZ4)
        out.create_dataset("tree", data=array, chunks=chunk, maxshape=(None,) * len(shape), **LZ4)
        out.create_dataset("in/a/group", data=array, chunks=chunk)
    with tensors_of(path) as tensors:
        assert sorted(tensors) == ["fixed", "growing", "in/a/group", "single", "tree"]
        for tensor in tensors.values():
            assert to_bytes(tensor) == array.tobytes()


def test_chunks_never_written_hold_the_fill_value(tmp_path: Path) -> None:
    path = tmp_path / "holes.h5"
    with h5py.File(path, "w") as out:
        holes = out.create_dataset("holes", (50, 40), "<f4", chunks=(16, 16), fillvalue=2.5, **LZ4)
        holes[20:30, 5:35] = noise((10, 30), "<f4")
        out.create_dataset("nothing", (10, 10), "<i2", fillvalue=-3)
        out.create_dataset("nothing_chunked", (10, 10), ">i2", chunks=(4, 4), fillvalue=5)
        want = {name: out[name][()] for name in out}
    with tensors_of(path) as tensors:
        for name, array in want.items():
            assert to_bytes(tensors[name]) == array.astype(array.dtype.newbyteorder("<")).tobytes()


def test_skipped_filter(tmp_path: Path) -> None:
    path = tmp_path / "mask.h5"
    array = noise((8, 8), "<u4")
    with h5py.File(path, "w") as out:
        dataset = out.create_dataset("a", (16, 8), "<u4", chunks=(8, 8), **LZ4)
        dataset[8:] = array
        dataset.id.write_direct_chunk((0, 0), array.tobytes(), filter_mask=1)
    with tensors_of(path) as tensors:
        assert to_bytes(tensors["a"]) == array.tobytes() * 2


def test_compact_data(tmp_path: Path) -> None:
    path = tmp_path / "compact.h5"
    array = noise((6, 5), "<i4")
    with h5py.File(path, "w") as out:
        plist = h5py.h5p.create(h5py.h5p.DATASET_CREATE)
        plist.set_layout(h5py.h5d.COMPACT)
        dataset = h5py.h5d.create(out.id, b"c", h5py.h5t.STD_I32LE, h5py.h5s.create_simple(array.shape), dcpl=plist)
        dataset.write(h5py.h5s.ALL, h5py.h5s.ALL, array)
    with tensors_of(path) as tensors:
        assert to_bytes(tensors["c"]) == array.tobytes()


@pytest.mark.parametrize("name", [name for name, (array, _) in CASES.items() if array.ndim == 2])
def test_random_transposed_blocks(file: Path, name: str) -> None:
    """Nothing but the block is written, also where lines of the output lie apart."""
    array, rng = CASES[name][0], np.random.default_rng(1)
    with tensors_of(file) as tensors:
        want = expected(array, tensors[name]).T
        for _ in range(25):
            (c0, c1), (r0, r1) = (np.sort(rng.choice(n + 1, 2, replace=False)) for n in want.shape)
            out = np.zeros((c1 - c0, r1 - r0 + 5), want.dtype)
            read_transposed(tensors[name], int(r0), int(c0), out[:, 2 : 2 + r1 - r0])
            assert (out[:, 2 : 2 + r1 - r0] == want[c0:c1, r0:r1]).all()
            assert not out[:, :2].view(np.uint8).any() and not out[:, 2 + r1 - r0 :].view(np.uint8).any()


def test_uncompressed_chunks_are_read_in_place(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A row piece costs its own bytes, not its chunks'; nothing goes through the cache."""
    cache = TileCache()
    counted: list[int] = []
    preadv = os.preadv
    monkeypatch.setattr(
        os, "preadv", lambda fd, buffers, at: counted.append(len(buffers[0])) or preadv(fd, buffers, at)
    )
    with tensors_of(file, cache) as tensors:
        out = np.zeros((1, 100), "<u4")
        tensors["uncompressed"].read_block(70, 20, out)
    assert out.tobytes() == CASES["uncompressed"][0][70, 20:120].tobytes()
    assert sum(counted) == out.nbytes
    assert cache.misses == 0


def test_encoded_chunks_are_decoded_once(file: Path) -> None:
    """By a reader that goes through the file in small pieces; nothing of it is kept behind him."""
    cache = TileCache()
    with tensors_of(file, cache) as tensors:
        array = CASES["encoded"][0]
        for start in range(0, array.nbytes, 1000):
            read_into(tensors["encoded"], start, memoryview(bytearray(min(1000, array.nbytes - start))))
    assert cache.misses == (5 if library.LIBRARY is not None else 5 * 3)  # rows of chunks, or chunks
    assert cache.nbytes < array.nbytes


def test_threads_share_a_tensor(file: Path) -> None:
    """A cache too small for the tensor, and eight threads."""
    array = CASES["mixed"][0]
    with tensors_of(file, TileCache(10_000)) as tensors, ThreadPoolExecutor(8) as pool:

        def part(row: int) -> bytes:
            out = np.zeros((20, 100), "<u4")
            tensors["mixed"].read_block(row, 0, out)
            return out.tobytes()

        rows = [row % 81 for row in range(0, 2000, 7)]
        assert list(pool.map(part, rows)) == [array[row : row + 20].tobytes() for row in rows]


def test_truncated_after_opening(file: Path, tmp_path: Path) -> None:
    path = tmp_path / "short.h5"
    path.write_bytes(file.read_bytes())
    names = "uncompressed", "encoded", "contiguous", "cube"
    with tensors_of(path) as tensors:
        for name in names:
            to_bytes(tensors[name])
        os.truncate(path, 5000)
        for name in names:
            with pytest.raises(CorruptChunk, match=name):
                to_bytes(tensors[name])


def test_a_file_that_changed_has_no_chunk_table(file: Path, tmp_path: Path) -> None:
    path = tmp_path / "other.h5"
    path.write_bytes(file.read_bytes())
    with tensors_of(path) as tensors:
        path.write_bytes(file.read_bytes())  # the same bytes, later
        with pytest.raises(SourceChanged, match=r"other\.h5: was written to after it was opened"):
            to_bytes(tensors["uncompressed"])
        with pytest.raises(SourceChanged):  # none of its tensors can be read from now on
            to_bytes(tensors["contiguous"])


def test_deleted_file_stays_readable(file: Path, tmp_path: Path) -> None:
    path = tmp_path / "gone.h5"
    path.write_bytes(file.read_bytes())
    with tensors_of(path) as tensors:
        path.unlink()
        for name in ("uncompressed", "encoded", "contiguous"):
            assert to_bytes(tensors[name]) == CASES[name][0].tobytes()


def test_damaged_chunks_concern_their_own_reads(file: Path, tmp_path: Path) -> None:
    """One zeroed chunk: its rows fail, the others do not."""
    path = tmp_path / "zeroed.h5"
    path.write_bytes(file.read_bytes())
    with h5py.File(path, "r") as opened:
        where = opened["uncompressed"].id.get_chunk_info_by_coord((32, 16))
    with open(path, "r+b") as out:
        out.seek(where.byte_offset)
        out.write(bytes(where.size))
    with tensors_of(path) as tensors:
        tensor, array = tensors["uncompressed"], CASES["uncompressed"][0]
        block = np.zeros((32, 131), "<u4")
        tensor.read_block(0, 0, block)
        assert (block == array[:32]).all()
        with pytest.raises(CorruptChunk) as caught:
            tensor.read_block(40, 0, block[:1])
        assert caught.value.offset == where.byte_offset
        tensor.read_block(40, 32, block[:1, :99])
        assert (block[:1, :99] == array[40:41, 32:]).all()
