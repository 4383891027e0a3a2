"""Law: any block of a lazy tensor, and any byte range, equals the slice of the eagerly computed array."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ckptfs.errors import ShapeError
from ckptfs.tensors.cache import TileCache
from ckptfs.tensors.elementwise import elementwise
from ckptfs.tensors.generated import causal_mask, constant, filled, numbered, seeded_normal, seeded_uniform
from ckptfs.tensors.ranges import read_into, to_bytes, to_numpy
from ckptfs.tensors.tensor import Tensor, n_cols, n_rows
from ckptfs.tensors.transpose import Transposed
from ckptfs.tensors.views import (
    ConcatColumns,
    ConcatRows,
    PermutedAxes,
    PermutedRows,
    Reshaped,
    SlicedColumns,
    SlicedRows,
    closed_block,
    rope_pairs,
)
from tests.factories import ArrayTensor

RNG = np.random.default_rng(7)


def array(*shape: int, dtype: Any = np.float32) -> np.ndarray[Any, Any]:
    return RNG.integers(0, 200, shape).astype(dtype)


A = array(12, 10)
B = array(12, 10, dtype=np.uint16)
C = array(6, 4, 5)
BIG = array(700, 300, dtype=np.int16)
PERM = RNG.permutation(12)
ROPE = np.array([0, 3, 1, 4, 2, 5, 6, 9, 7, 10, 8, 11])

Case = tuple[Callable[[], Tensor], np.ndarray[Any, Any]]
CASES: dict[str, Case] = {
    "row order": (lambda: PermutedRows(ArrayTensor(A), PERM, 12), A[PERM]),
    "row order in blocks": (lambda: PermutedRows(ArrayTensor(A), ROPE, 6), A[ROPE]),
    "row order of a row order": (lambda: PermutedRows(PermutedRows(ArrayTensor(A), PERM, 12), ROPE, 6), A[PERM][ROPE]),
    "identity order": (lambda: PermutedRows(ArrayTensor(A), np.arange(12), 1), A),
    "row slice": (lambda: SlicedRows(ArrayTensor(A), 3, 9), A[3:9]),
    "row join": (
        lambda: ConcatRows((ArrayTensor(A), ArrayTensor(A[:1]), ArrayTensor(A[4:9]))),
        np.vstack([A, A[:1], A[4:9]]),
    ),
    "column slice": (lambda: SlicedColumns(ArrayTensor(C), 5, (6, 5)), C[:, 1]),
    "column join": (
        lambda: ConcatColumns((ArrayTensor(A), ArrayTensor(A[::-1].copy())), (12, 2, 10)),
        np.stack([A, A[::-1]], 1),
    ),
    "reshape": (lambda: Reshaped(ArrayTensor(C), (8, 15)), C.reshape(8, 15)),
    "squeeze": (lambda: Reshaped(ArrayTensor(C), (1, 1, 6, 20)), C.reshape(1, 1, 6, 20)),
    "transpose": (lambda: Transposed(ArrayTensor(B)), B.T),
    "transpose of tiles": (lambda: Transposed(ArrayTensor(BIG, preferred_block=(50, 32)), TileCache(1 << 20)), BIG.T),
    "transpose without a cache": (lambda: Transposed(ArrayTensor(BIG, preferred_block=(64, 64)), TileCache(0)), BIG.T),
    "transpose of a join": (
        lambda: Transposed(ConcatRows((ArrayTensor(A), ArrayTensor(A[2:5])))),
        np.vstack([A, A[2:5]]).T,
    ),
    "inner order": (lambda: PermutedAxes(ArrayTensor(C), (4, 5), (2, 1), (6, 20)), C.transpose(0, 2, 1).reshape(6, 20)),
    "scaled": (lambda: elementwise(ArrayTensor(A), ("multiply", 1.5)), A * np.float32(1.5)),
    "numbered": (lambda: numbered(9), np.arange(9)[None]),
    "mask": (lambda: causal_mask(9), np.tril(np.ones((9, 9), np.uint8))[None, None]),
    "constant": (lambda: constant("int64", [[1, 2], [3, -4]]), np.array([[1, 2], [3, -4]])),
    "scalar": (lambda: filled("float32", (), -1e4), np.float32(-1e4)),
    "0 rows": (lambda: SlicedRows(ArrayTensor(A), 3, 3), A[3:3]),
}


@pytest.mark.parametrize("name", CASES)
def test_whole_tensor(name: str) -> None:
    make, want = CASES[name]
    tensor = make()
    assert tensor.shape == want.shape
    got = to_numpy(tensor)
    assert got.dtype == want.dtype
    assert got.tobytes() == want.tobytes()
    assert to_bytes(tensor) == want.tobytes()


@settings(max_examples=400, deadline=None)
@given(st.data())
def test_any_block_and_any_byte_range(data: st.DataObject) -> None:
    make, want = CASES[data.draw(st.sampled_from(sorted(CASES)))]
    tensor = make()
    raw = np.ascontiguousarray(want).tobytes()
    start = data.draw(st.integers(0, len(raw)))
    stop = data.draw(st.integers(start, len(raw)))
    out = bytearray(stop - start)
    read_into(tensor, start, memoryview(out))
    assert out == raw[start:stop]
    rows, cols = n_rows(want.shape), n_cols(want.shape)
    r0 = data.draw(st.integers(0, rows))
    r1 = data.draw(st.integers(r0, rows))
    c0 = data.draw(st.integers(0, cols))
    c1 = data.draw(st.integers(c0, cols))
    padded = np.zeros((r1 - r0, 2 * (c1 - c0) + 3), tensor.dtype.storage_dtype)
    block = padded[:, 1 : 1 + 2 * (c1 - c0) : 2] if data.draw(st.booleans()) else padded[:, 2 : 2 + c1 - c0]
    if block.size:
        tensor.read_block(r0, c0, block)
    matrix = np.frombuffer(raw, tensor.dtype.storage_dtype).reshape(rows, cols)
    assert (block == matrix[r0:r1, c0:c1]).all()


def test_transposed_tiles_are_decoded_once_by_a_sequential_reader() -> None:
    source = ArrayTensor(BIG, preferred_block=(50, 32))
    tensor = Transposed(source, TileCache(1 << 20))
    size = BIG.nbytes
    for start in range(0, size, 1000):  # every tile is cut by several requests
        read_into(tensor, start, memoryview(bytearray(min(1000, size - start))))
    rows, cols = tensor._tile
    assert source.reads == -(-300 // rows) * -(-700 // cols)


def test_closed_block_is_the_smallest_with_long_runs() -> None:
    assert closed_block(np.arange(12)) == 1
    assert closed_block(ROPE) == 6
    assert closed_block(np.roll(np.arange(32), 16)) == 1
    assert closed_block(rope_pairs(8, 16, 16)) == 16
    assert closed_block(np.array([1, 2, 0])) == 3
    assert closed_block(np.arange(0)) == 1


def test_reshape_keeps_the_number_of_elements() -> None:
    with pytest.raises(ShapeError):
        Reshaped(ArrayTensor(A), (5, 5))


def test_bfloat16_steps_round_to_nearest_even_each_time() -> None:
    values = RNG.standard_normal(5000).astype(ml_dtypes.bfloat16)
    got = to_numpy(elementwise(ArrayTensor(values), ("multiply", 3.0), ("divide", 7.0)))
    want = (
        (values.astype(np.float32) * np.float32(3)).astype(ml_dtypes.bfloat16).astype(np.float32) / np.float32(7)
    ).astype(ml_dtypes.bfloat16)
    assert got.tobytes() == want.tobytes()


def test_arithmetic_equals_torch() -> None:
    torch = pytest.importorskip("torch")
    for name in ("float16", "float32", "float64", "bfloat16"):
        x = torch.randn(4000, generator=torch.Generator().manual_seed(3), dtype=torch.float64).to(getattr(torch, name))
        words = x.view(torch.uint8).numpy().view(f"u{x.element_size()}")
        got = to_bytes(elementwise(ArrayTensor(words, name), ("multiply", 0.3), ("divide", 2.4494897), ("add", 1.0)))
        assert got == ((x * 0.3) / 2.4494897 + 1.0).view(torch.uint8).numpy().tobytes(), name


def test_nan_to_zero_and_integers_stay() -> None:
    x = np.array([np.nan, 1, -np.inf], np.float32)
    assert to_numpy(elementwise(ArrayTensor(x), ("nan_to", 0.0))).tolist() == [0, 1, -np.inf]
    source = ArrayTensor(np.arange(3))
    assert elementwise(source, ("multiply", 2.0)) is source


def test_seeded_normal_is_the_documented_stream() -> None:
    tensor = seeded_normal((3, 40_000), 0.5, seed=11)
    streams = [np.random.Generator(np.random.Philox(key=11, counter=[0, t, 0, 0])) for t in range(2)]
    want = np.concatenate([s.standard_normal(65536, np.float32) * np.float32(0.5) for s in streams])[:120_000]
    assert to_bytes(tensor) == want.tobytes()
    out = bytearray(4 * 3000)
    read_into(tensor, 4 * 64_000, memoryview(out))
    assert bytes(out) == want[64_000:67_000].tobytes()
    assert abs(float(want.std()) - 0.5) < 0.01


def test_seeded_uniform_is_the_documented_stream() -> None:
    tensor = seeded_uniform((2, 40_000), 0.25, seed=5)
    streams = [np.random.Generator(np.random.Philox(key=5, counter=[0, t, 0, 0])) for t in range(2)]
    want = np.concatenate([(2 * s.random(65536, np.float32) - 1) * np.float32(0.25) for s in streams])[:80_000]
    assert to_bytes(tensor) == want.tobytes()
    out = bytearray(4 * 3000)
    read_into(tensor, 4 * 64_000, memoryview(out))
    assert bytes(out) == want[64_000:67_000].tobytes()
    assert -0.25 <= want.min() < -0.24 < 0.24 < want.max() <= 0.25
