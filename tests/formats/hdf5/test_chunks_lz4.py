"""Chunks decoded many at a time equal chunks decoded one by one; a damaged one costs only the elements in it."""

from __future__ import annotations

import os
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import h5py
import hdf5plugin
import lz4.block
import numpy as np
import pytest

from ckptfs.errors import CorruptChunk
from ckptfs.formats.hdf5 import chunks_lz4, filters
from ckptfs.native import library
from ckptfs.tensors.cache import TileCache
from ckptfs.tensors.ranges import read_elements, to_bytes
from ckptfs.tensors.views import ConcatRows
from tests.formats.hdf5.h5_files import tensors_of

pytestmark = pytest.mark.skipif(library.LIBRARY is None, reason="installed without a C compiler")
ROWS, COLS, CHUNK = 150, 131, (32, 16)
ARRAY = (np.arange(ROWS * COLS, dtype="<u4") // 41).reshape(ROWS, COLS)


@pytest.fixture
def file(tmp_path: Path) -> Path:
    """Two matrices of compressed chunks, one with an uncompressed chunk in each grid row and two that do not exist."""
    with h5py.File(tmp_path / "compressed.h5", "w") as out:
        out.create_dataset("compressed", data=ARRAY, chunks=CHUNK, **hdf5plugin.LZ4())
        mixed = out.create_dataset("mixed", (ROWS, COLS), "<u4", chunks=CHUNK, fillvalue=7, **hdf5plugin.LZ4())
        for row in range(0, ROWS, 32):
            for col in range(0, COLS, 16):
                if (row, col) not in {(32, 16), (64, 128)}:
                    mixed[row : row + 32, col : col + 16] = mixed_array()[row : row + 32, col : col + 16]
    return tmp_path / "compressed.h5"


def mixed_array() -> np.ndarray[Any, Any]:
    array = ARRAY.copy()
    noise = np.random.default_rng(5).integers(0, 1 << 32, ARRAY.shape, np.uint32)
    array[:, 48:64] = noise[:, 48:64]
    array[32:64, 16:32] = array[64:96, 128:] = 7
    return array


@pytest.fixture
def counted(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Grid rows that each call of C decoded."""
    done: list[int] = []
    real = library.decompress

    def decompress(*args: Any) -> int:
        done.append(real(*args))
        return done[-1]

    monkeypatch.setattr(library, "decompress", decompress)
    return done


def read(tensor: Any, step: int) -> bytes:
    """All of a matrix, *step* elements at a time."""
    out = np.zeros(ROWS * COLS, "<u4")
    for start in range(0, out.size, step):
        read_elements(tensor, start, out[start : start + step])
    return out.tobytes()


def test_this_package_of_lz4_shows_its_decoder() -> None:
    """Otherwise the rest passes without what it is about."""
    assert library.lz4() is not None


@pytest.mark.parametrize("step", [1, 57, 131, 300, 4192, 5000, 10**6])
@pytest.mark.parametrize("name", ["compressed", "mixed"])
def test_any_steps(file: Path, name: str, step: int) -> None:
    want = ARRAY if name == "compressed" else mixed_array()
    with tensors_of(file) as tensors:
        assert read(tensors[name], step) == want.tobytes()


def test_one_call_decodes_all(file: Path, counted: list[int]) -> None:
    cache = TileCache()
    with tensors_of(file, cache) as tensors:
        out = np.zeros((ROWS, 48), "<u4")
        tensors["compressed"].read_block(0, 16, out)
    assert (out == ARRAY[:, 16:64]).all()
    assert counted == [5]
    assert cache.misses == 0


def test_a_grid_row_is_decoded_once(file: Path, counted: list[int]) -> None:
    cache = TileCache()
    with tensors_of(file, cache) as tensors:
        assert read(tensors["compressed"], 1000) == ARRAY.tobytes()
    assert counted == [1] * 5
    assert cache.nbytes == 0  # a sequential reader never comes back


@pytest.mark.parametrize("shift", [0, 1, 40, 130, 500])
def test_nothing_is_kept_of_many_tensors(file: Path, counted: list[int], shift: int) -> None:
    """Wherever the requests of a sequential reader cut them: also where one has a part of their first or last row."""
    cache = TileCache()
    with tensors_of(file, cache) as tensors:
        joined = ConcatRows((tensors["compressed"],) * 3)
        out, done = np.zeros(3 * ROWS * COLS, "<u4"), 0
        while done < out.size:
            n = min(1000 if done else 1000 - shift, out.size - done)
            read_elements(joined, done, out[done : done + n])
            done += n
    assert (out.reshape(3, ROWS, COLS) == ARRAY).all()
    assert cache.nbytes == 0
    assert counted == [1] * 15


@pytest.mark.parametrize("name", ["compressed", "mixed"])
@pytest.mark.parametrize("lack", ["lz4", "room", "C"])
def test_without(file: Path, monkeypatch: pytest.MonkeyPatch, lack: str, name: str, counted: list[int]) -> None:
    if lack == "lz4":
        monkeypatch.setattr(library, "lz4", lambda: None)
    elif lack == "room":
        monkeypatch.setattr(chunks_lz4, "MAX_KEPT", 1000)
    else:
        monkeypatch.setattr(library, "LIBRARY", None)
    with tensors_of(file) as tensors:
        want = ARRAY if name == "compressed" else mixed_array()
        assert read(tensors[name], 1000) == want.tobytes()
        assert to_bytes(tensors[name]) == want.tobytes()
    assert lack == "room" or not any(counted)


def test_damage_costs_what_lies_in_it(file: Path, tmp_path: Path) -> None:
    with h5py.File(file) as opened:
        where = opened["compressed"].id.get_chunk_info_by_coord((64, 32))
    data = bytearray(file.read_bytes())
    data[where.byte_offset + 16 : where.byte_offset + where.size] = b"\xff" * (where.size - 16)
    path = tmp_path / "damaged.h5"
    path.write_bytes(data)
    with tensors_of(path) as tensors:
        tensor = tensors["compressed"]
        out = np.zeros((ROWS, COLS), "<u4")
        for rows, cols in ((slice(0, 64), slice(0, COLS)), (slice(96, ROWS), slice(0, COLS))):
            tensor.read_block(rows.start, cols.start, out[rows, cols])
        for cols in (slice(0, 32), slice(48, COLS)):
            tensor.read_block(64, cols.start, out[64:96, cols])
        want = ARRAY.copy()
        want[64:96, 32:48] = 0
        assert (out == want).all()
        for block in ((0, 0, ROWS, COLS), (70, 0, 5, COLS), (70, 40, 1, 1), (64, 32, 32, 16)):
            with pytest.raises(CorruptChunk, match="chunk 20: an LZ4 block is damaged") as caught:
                tensor.read_block(block[0], block[1], np.zeros(block[2:], "<u4"))
            assert caught.value.offset == where.byte_offset


def compressed(data: bytes, block: int) -> bytes:
    out = struct.pack(">QI", len(data), block)
    for i in range(0, len(data), block):
        part = data[i : i + block]
        found = lz4.block.compress(part, store_size=False)
        found = part if len(found) >= len(part) else found
        out += struct.pack(">I", len(found)) + found
    return out


@pytest.fixture
def decoded(tmp_path: Path) -> Callable[[bytes, int], tuple[bytes | None, bytes | None]]:
    """What C and what Python make of a stored chunk, None for damage."""

    def both(stored: bytes, nbytes: int) -> tuple[bytes | None, bytes | None]:
        path = tmp_path / "chunk"
        path.write_bytes(stored)
        out = np.full((3, nbytes + 9), 0xEE, np.uint8)
        fd = os.open(path, os.O_RDONLY)
        about = np.array([0]), np.array([0]), np.array([len(stored)]), np.array([2], np.uint8)
        done = library.decompress(fd, about, 1, (1, nbytes), (1, 1), out[1:2, 5 : 5 + nbytes])
        os.close(fd)
        found = out[1, 5 : 5 + nbytes].tobytes() if done else None
        out[1, 5 : 5 + nbytes] = 0xEE
        assert (out == 0xEE).all()  # nothing beside it is written to
        try:
            raw = np.frombuffer(stored, np.uint8)
            return found, filters.decode(raw, [(filters.LZ4, ())], 0, nbytes).tobytes()
        except ValueError:
            return found, None

    return both


def test_random_damage(decoded: Callable[[bytes, int], tuple[bytes | None, bytes | None]]) -> None:
    rng = np.random.default_rng(11)
    outcomes = [0, 0]
    for _ in range(3000):
        n = int(rng.integers(1, 3000))
        data = bytes(rng.integers(0, int(rng.choice([2, 256])), n, np.uint8))
        stored = bytearray(compressed(data, int(rng.choice([n, n, n + 5, 100, 1000]))))
        kind = rng.integers(4)
        if kind == 1:
            stored[int(rng.integers(len(stored)))] ^= 1 << int(rng.integers(8))
        elif kind == 2:
            del stored[int(rng.integers(len(stored))) :]
        elif kind == 3:
            at = int(rng.choice([8, 9, 10, 11, 12, 13, 14, 15]))
            stored[at : at + 1] = bytes([int(rng.integers(256))])
        c, python = decoded(bytes(stored), n)
        assert c == python
        assert kind or c == data
        outcomes[c is None] += 1
    assert min(outcomes) > 500
