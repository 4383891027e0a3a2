"""Ranges of elements: one reader or several threads, the same bytes."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import h5py
import hdf5plugin
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ckptfs.formats.hdf5.chunk_table import ChunkTable
from ckptfs.formats.hdf5.chunked import ChunkedTensor
from ckptfs.tensors import ranges
from ckptfs.tensors.ranges import read_into, to_numpy
from ckptfs.tensors.transpose import Transposed
from ckptfs.tensors.views import ConcatRows
from tests.factories import ArrayTensor
from tests.formats.hdf5 import test_chunked as h5
from tests.formats.hdf5.h5_files import tensors_of

ARRAY = np.random.default_rng(3).integers(0, 1 << 16, (300, 70), np.uint16)


@pytest.fixture(autouse=True)
def four_threads(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(ranges, "WORKERS", 4)
    monkeypatch.setattr(ranges, "MIN_SHARE", 100)
    ranges._pool.cache_clear()
    yield
    ranges._pool.cache_clear()


class Watched(ArrayTensor):
    """Notes who reads it; fails at a row of choice."""

    def __init__(self, bad_row: int | None = None) -> None:
        super().__init__(ARRAY, preferred_block=(16, 8))
        self.readers: set[int] = set()
        self.bad_row = bad_row

    def read_block(self, row: int, col: int, out: np.ndarray) -> None:  # type: ignore[type-arg]
        self.readers.add(threading.get_ident())
        if self.bad_row is not None and row <= self.bad_row < row + len(out):
            raise OSError("a bad row")
        super().read_block(row, col, out)


@given(st.integers(0, ARRAY.nbytes), st.integers(0, ARRAY.nbytes))
def test_any_range_in_shares(a: int, b: int) -> None:
    start, stop = sorted((a, b))
    twice = ConcatRows((Watched(), ArrayTensor(ARRAY)))
    for tensor, whole in ((twice, np.concatenate([ARRAY, ARRAY])), (Transposed(ArrayTensor(ARRAY)), ARRAY.T)):
        out = bytearray(stop - start)
        read_into(tensor, start, memoryview(out))
        assert bytes(out) == whole.tobytes()[start:stop]


def test_a_large_range_has_several_readers_a_small_one_has_one() -> None:
    tensor = Watched()
    read_into(tensor, 0, memoryview(bytearray(150)))
    assert tensor.readers == {threading.get_ident()}
    read_into(tensor, 0, memoryview(bytearray(ARRAY.nbytes)))
    assert len(tensor.readers) > 1


@pytest.mark.parametrize("row", [0, 290])
def test_a_failure_in_any_share_is_raised(row: int) -> None:
    with pytest.raises(OSError, match="a bad row"):
        read_into(Watched(row), 0, memoryview(bytearray(ARRAY.nbytes)))


@pytest.mark.filterwarnings("ignore:.*multi-threaded.*fork:DeprecationWarning")
def test_a_child_process_has_threads_of_its_own() -> None:
    read_into(Watched(), 0, memoryview(bytearray(ARRAY.nbytes)))
    pid = os.fork()
    if pid == 0:
        out = bytearray(ARRAY.nbytes)
        read_into(Watched(), 0, memoryview(out))
        os._exit(0 if bytes(out) == ARRAY.tobytes() else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0


def test_threads_that_share_a_tensor_read_its_chunk_table_once(tmp_path: Path) -> None:
    array = h5.noise((4096, 2048), "<i2")
    with h5py.File(tmp_path / "a.h5", "w") as file:
        file.create_dataset("a", data=array, chunks=(256, 128), **hdf5plugin.LZ4())
    with tensors_of(tmp_path / "a.h5") as found:
        tensor, loads = found["a"], []
        assert isinstance(tensor, ChunkedTensor)
        load = tensor.load

        def slow() -> ChunkTable:
            loads.append(1)
            time.sleep(0.05)  # whoever comes meanwhile would begin, too
            return load()

        tensor.load = slow
        assert np.array_equal(to_numpy(tensor), array)
    assert len(loads) == 1
