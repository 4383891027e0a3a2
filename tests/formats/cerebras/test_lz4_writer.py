"""Checkpoints with LZ4 chunks: what the real writer makes of the same values."""

from __future__ import annotations

import struct
from pathlib import Path
from typing import Any

import h5py
import hdf5plugin  # noqa: F401 - libhdf5 needs its LZ4 filter
import lz4.block
import numpy as np
import pytest

from ckptfs.formats.cerebras.lz4_writer import write_lz4
from ckptfs.formats.cerebras.reader import open_h5
from ckptfs.formats.cerebras.state import State, state_tree
from ckptfs.formats.hdf5 import chunk_writer, writer
from ckptfs.formats.hdf5.chunk_writer import chunk_shape
from ckptfs.tensors.cache import TileCache
from ckptfs.tensors.ranges import to_bytes
from tests.factories import ArrayTensor, array_of
from tests.paths import DATA

V05 = DATA / "v05"
SAME = ("dtypes", "empty", "keys", "scalars", "shapes", "tied", "toplevel_list", "trainer_like")
REAL_CHUNKS = {  # shape, item size: chunk of a real file, or of h5py
    ((32000, 4096), 2): (500, 128),
    ((8192, 28672), 2): (128, 448),
    ((8192, 8192), 4): (128, 128),
    ((4096,), 2): (4096,),
    ((3, 0, 5), 4): (1, 512, 3),
}


def written(state: State, path: Path) -> Path:
    with path.open("wb") as file:

        def write(offset: int, data: bytes) -> None:
            file.seek(offset)
            file.write(data)

        write_lz4(state, write)
    return path


def storage(file: h5py.File) -> dict[str, Any]:
    """How each dataset is stored, and every chunk's place in the tensor and bytes, padding included.

    The compressed bytes may differ: they depend on the release of the LZ4 library.
    """
    found: dict[str, Any] = {}

    def visit(name: str, entry: h5py.Group | h5py.Dataset) -> None:
        if not isinstance(entry, h5py.Dataset):
            return
        chunks = []
        if entry.chunks:
            entry.id.chunk_iter(lambda info: chunks.append((info.chunk_offset, info.filter_mask)))
            chunks = [(*chunk, decoded(entry.id.read_direct_chunk(chunk[0])[1])) for chunk in sorted(chunks)]
        found[name] = entry.dtype, entry.shape, entry.chunks, entry._filters, chunks, entry[...].tobytes()

    file.visititems(visit)
    return found


def decoded(chunk: bytes) -> bytes:
    size, block, stored = struct.unpack_from(">QII", chunk)
    assert (size, stored) == (block, len(chunk) - 16)
    return chunk[16:] if stored == size else lz4.block.decompress(chunk[16:], uncompressed_size=size)


@pytest.mark.parametrize("name", SAME)
def test_chunks_are_those_of_the_real_writer(name: str, tmp_path: Path) -> None:
    source = open_h5(V05 / f"{name}.mdl", TileCache())
    assert source.tree is not None
    path = written(State(source.tree, source.items), tmp_path / "out.mdl")
    source.close()
    with h5py.File(path) as ours, h5py.File(V05 / f"{name}.mdl") as theirs:
        assert storage(ours) == storage(theirs)
        assert dict(ours.attrs) == dict(theirs.attrs)


@pytest.mark.parametrize(("shape", "itemsize"), REAL_CHUNKS)
def test_chunk_shapes(shape: tuple[int, ...], itemsize: int) -> None:
    assert chunk_shape(shape, itemsize) == REAL_CHUNKS[shape, itemsize]


@pytest.mark.parametrize("band", [0, 1 << 20], ids=["single chunks", "bands"])
@pytest.mark.parametrize("n_levels", [1, 2, 3])
@pytest.mark.parametrize("chunk", [(2, 3), (1, 4, 2), (5, 1, 2, 2), (7,)], ids=str)
def test_trees_and_edges(
    n_levels: int, chunk: tuple[int, ...], band: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Tensors that end inside a chunk, with up to three levels of B-tree nodes."""
    monkeypatch.setattr(writer, "chunk_shape", lambda shape, itemsize: chunk)
    monkeypatch.setattr(chunk_writer, "_MAX_GRID_ROW", band)
    writer._template.cache_clear()
    n_chunks = {1: 5, 2: 70, 3: 4200}[n_levels]
    per_axis = round(n_chunks ** (1 / len(chunk)) + 0.499)
    shape = tuple(c * per_axis - (c > 1) for c in chunk)
    array = array_of("float32", shape)
    path = written(state_tree({"x": ArrayTensor(array)}), tmp_path / "t.mdl")
    writer._template.cache_clear()
    with h5py.File(path) as file:
        assert file["x"].chunks == chunk
        assert file["x"].id.get_num_chunks() == per_axis ** len(chunk) > {1: 0, 2: 64, 3: 4096}[n_levels]
        assert file["x"][...].tobytes() == array.tobytes()
    source = open_h5(path, TileCache())
    assert source.items["x"].tensor is not None
    assert to_bytes(source.items["x"].tensor) == array.tobytes()
    source.close()


def test_values_that_compress_and_values_that_do_not(tmp_path: Path) -> None:
    arrays = {"zeros": np.zeros((700, 300), "<f4"), "noise": array_of("float32", (700, 300))}
    path = written(state_tree({key: ArrayTensor(array) for key, array in arrays.items()}), tmp_path / "v.mdl")
    with h5py.File(path) as file:
        assert file["zeros"].id.get_storage_size() < 840_000 / 50
        assert file["noise"].id.get_storage_size() >= 840_000
        assert all(file[key][...].tobytes() == array.tobytes() for key, array in arrays.items())


def test_libhdf5_can_change_the_data(tmp_path: Path) -> None:
    array = array_of("float32", (700, 300)).copy()
    path = written(state_tree({"x": ArrayTensor(array.copy())}), tmp_path / "w.mdl")
    with h5py.File(path, "a") as file:
        file["x"][100:500, 7] = 0
        file["new"] = np.arange(1000)
    array[100:500, 7] = 0
    with h5py.File(path) as file:
        assert file["x"][...].tobytes() == array.tobytes()
