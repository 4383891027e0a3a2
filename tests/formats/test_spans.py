"""Runs of elements: one reader or several threads, the same bytes."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ckptfs.formats import spans
from ckptfs.tensors.expr import RowJoin
from ckptfs.tensors.read import read_into
from ckptfs.tensors.transposed import Transposed
from tests.factories import ArrayTensor

ARRAY = np.random.default_rng(3).integers(0, 1 << 16, (300, 70), np.uint16)


@pytest.fixture(autouse=True)
def four_threads(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(spans, "WORKERS", 4)
    monkeypatch.setattr(spans, "LEAST_SHARE", 100)
    spans._pool.cache_clear()
    yield
    spans._pool.cache_clear()


class Watched(ArrayTensor):
    """Notes who reads it; fails at a row of choice."""

    def __init__(self, bad_row: int | None = None) -> None:
        super().__init__(ARRAY, grain=(16, 8))
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
    twice = RowJoin((Watched(), ArrayTensor(ARRAY)))
    for tensor, whole in ((twice, np.concatenate([ARRAY, ARRAY])), (Transposed(ArrayTensor(ARRAY)), ARRAY.T)):
        out = bytearray(stop - start)
        read_into(tensor, start, memoryview(out))
        assert bytes(out) == whole.tobytes()[start:stop]


def test_a_large_run_has_several_readers_a_small_one_has_one() -> None:
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
