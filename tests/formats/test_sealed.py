"""Data sealed with their own CRC-32, with zlib as the judge."""

from __future__ import annotations

import zlib
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ckptfs.errors import CorruptChunk
from ckptfs.formats.sealed import DISTANCE, FAR, Parts, Sealed, combine, sealed_nbytes
from ckptfs.tensors.ranges import to_bytes
from ckptfs.tensors.tensor import Elements
from tests.factories import NUMPY_TYPES, ArrayTensor, tensor_of
from tests.formats.reading import Counting

SOME = st.binary(max_size=300)


@given(SOME, SOME)
def test_combine(first: bytes, second: bytes) -> None:
    assert combine(zlib.crc32(first), zlib.crc32(second), len(second)) == zlib.crc32(first + second)


@pytest.mark.parametrize("n", [1, 255, 65_536, 10_000_019])
def test_combine_with_long_runs(n: int) -> None:
    assert combine(zlib.crc32(b"head"), zlib.crc32(bytes(n)), n) == zlib.crc32(b"head" + bytes(n))


@given(st.binary(min_size=1, max_size=40).flatmap(lambda data: st.tuples(st.just(data), cuts(len(data)))))
def test_parts_in_any_order_give_the_crc_of_the_whole(case: tuple[bytes, list[tuple[int, int]]]) -> None:
    data, ranges = case
    parts = Parts()
    seen: set[int] = set()
    for start, stop in ranges:
        gap = parts.gap(start, stop)
        missing = [i for i in range(start, stop) if i not in seen]
        assert (gap is None) == (not missing)
        while gap is not None:
            assert gap[0] == missing[0] and not seen & set(range(*gap))
            parts.add(*gap, zlib.crc32(data[slice(*gap)]))
            seen |= set(range(*gap))
            missing = [i for i in range(start, stop) if i not in seen]
            gap = parts.gap(start, stop)
    assert parts.whole(len(data)) == (zlib.crc32(data) if len(seen) == len(data) else None)


def cuts(n: int) -> st.SearchStrategy[list[tuple[int, int]]]:
    ends = st.tuples(st.integers(0, n), st.integers(0, n)).map(lambda pair: (min(pair), max(pair)))
    return st.lists(ends, max_size=12)


def test_scattered_parts_are_bounded() -> None:
    parts = Parts()
    for i in range(10_000):
        parts.add(2 * i + 2, 2 * i + 3, zlib.crc32(b"x"))
    assert len(parts._parts) == 256
    while (gap := parts.gap(0, 20_002)) is not None:
        parts.add(*gap, zlib.crc32(b"x" * (gap[1] - gap[0])))
    assert parts.whole(20_002) == zlib.crc32(b"x" * 20_002)


@pytest.mark.parametrize("name", NUMPY_TYPES)
def test_what_it_holds(name: str) -> None:
    tensor = tensor_of(name, (7, 3))
    whole = to_bytes(Sealed(tensor))
    data = tensor.bytes
    assert whole[: len(data)] == data
    assert whole[len(data) :] == zlib.crc32(data).to_bytes(4, "little") + bytes(len(whole) - len(data) - 4)
    assert len(whole) % tensor.dtype.itemsize == 0
    assert len(whole) == sealed_nbytes(tensor) < len(data) + 4 + tensor.dtype.itemsize


def test_the_crc_is_known_without_reading() -> None:
    for shape in ((1,), (3, 5), (FAR // 2 - 1,), (FAR // 2,)):
        tensor = tensor_of("bfloat16", shape)
        sealed = Sealed(tensor)
        crc = sealed.crc
        assert tensor.reads == 0
        assert crc == zlib.crc32(to_bytes(sealed))


@settings(deadline=None)
@given(st.lists(st.tuples(st.integers(0, 70), st.integers(0, 70)), min_size=1, max_size=8))
def test_bytes_do_not_depend_on_how_they_are_asked_for(ranges: list[tuple[int, int]]) -> None:
    tensor = tensor_of("complex128", (3, 1))
    whole = tensor.bytes + zlib.crc32(tensor.bytes).to_bytes(4, "little") + bytes(12)
    sealed = Sealed(tensor)
    for start, stop in ranges:
        start, stop = min(start, len(whole)), min(stop, len(whole))
        out = np.full((max(0, stop - start), 2), 0xAA, np.uint8)
        sealed.read_block(start, 0, out[:, :1])  # strided, as the protocol allows
        assert out[:, 0].tobytes() == whole[start:stop]
        assert (out[:, 1] == 0xAA).all()


def test_a_copy_reads_everything_once() -> None:
    tensor = Counting(np.random.default_rng(0).integers(0, 256, 3 << 20, np.uint8))
    sealed = Sealed(tensor)
    offsets = range(0, sealed.shape[0], 100_000)
    pieces = {}

    def read(start: int) -> None:
        pieces[start] = np.empty((min(100_000, sealed.shape[0] - start), 1), np.uint8)
        sealed.read_block(start, 0, pieces[start])

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(read, reversed(offsets[:-1])))
    read(offsets[-1])
    assert zlib.crc32(b"".join(pieces[i].tobytes() for i in offsets)) == sealed.crc
    assert tensor.elements == 3 << 20


def test_zeros_behind_the_seal_read_nothing_and_the_seal_reads_all() -> None:
    tensor = Counting(np.arange(FAR, dtype=np.int64).astype(np.uint8))
    sealed = Sealed(tensor)
    assert sealed.shape[0] == FAR + 4 + DISTANCE
    out = np.ones((DISTANCE, 1), np.uint8)
    sealed.read_block(FAR + 4, 0, out)
    assert not out.any() and tensor.elements == 0
    sealed.read_block(FAR, 0, out[:4])
    assert out[:4].tobytes() == zlib.crc32(tensor.bytes).to_bytes(4, "little")
    assert tensor.elements == FAR


def test_damage_is_an_error_for_the_data_and_the_seal() -> None:
    class Damaged(ArrayTensor):
        def read_block(self, row: int, col: int, out: Elements) -> None:
            raise CorruptChunk("model.mdl", "w", 0, "damaged")

    sealed = Sealed(Damaged(np.zeros(10, np.int8)))
    for start in (0, 10):
        with pytest.raises(CorruptChunk):
            sealed.read_block(start, 0, np.empty((2, 1), np.uint8))
