"""Low-rank updates: bits that do not depend on the request, and that are torch's."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ckptfs.errors import ShapeError
from ckptfs.tensors.low_rank import low_rank
from ckptfs.tensors.ranges import read_into, to_bytes, to_numpy
from ckptfs.tensors.tensor import Tensor
from tests.factories import ArrayTensor

Array = npt.NDArray[Any]


def arrays(out: int, rank: int, width: int, kind: Any = np.float32, seed: int = 0) -> tuple[Array, Array, Array]:
    """W (out, width), B (out, rank), A (rank, width)."""
    rng = np.random.default_rng(seed)
    shapes = ((out, width), (out, rank), (rank, width))
    w, b, a = (rng.standard_normal(shape).astype(np.float32).astype(kind) for shape in shapes)
    return w, b, a


def node(w: Array, b: Array, a: Array, scale: float, *, swapped: bool = False) -> Tensor:
    return low_rank("w", ArrayTensor(w), ArrayTensor(b), ArrayTensor(a), scale, swapped=swapped)


def torchs(w: Array, b: Array, a: Array, scale: float, *, swapped: bool = False) -> bytes:
    """What torch makes of the reference's expression."""
    torch = pytest.importorskip("torch")

    def tensor(x: Array) -> Any:
        if x.dtype == ml_dtypes.bfloat16:
            return torch.from_numpy(x.view(np.int16).copy()).view(torch.bfloat16)
        return torch.from_numpy(x.copy())

    product = tensor(b) @ tensor(a)
    folded = tensor(w) + (product.T if swapped else product) * scale
    return bytes(folded.contiguous().view(torch.uint8).numpy().tobytes())


def test_numbers_that_need_no_rounding() -> None:
    w, b, a = (x.round() for x in arrays(9, 3, 14))
    assert (to_numpy(node(w, b, a, 0.5)) == w + 0.5 * (b @ a)).all()
    assert (to_numpy(node(w.T.copy(), b, a, 2.0, swapped=True)) == w.T + 2 * (b @ a).T).all()


@pytest.mark.parametrize("shape", [(24, 3, 16), (64, 8, 64), (300, 16, 260), (500, 64, 2100), (33, 4, 17)])
@pytest.mark.parametrize("swapped", [False, True])
def test_float32_has_torchs_bits(shape: tuple[int, int, int], swapped: bool) -> None:
    torch = pytest.importorskip("torch")
    if torch.backends.cpu.get_cpu_capability() not in ("AVX2", "AVX512"):
        pytest.skip("torch has no fused multiply-add here, and rounds otherwise")
    w, b, a = arrays(*shape)
    w = w.T.copy() if swapped else w
    got = np.frombuffer(to_bytes(node(w, b, a, 0.7, swapped=swapped)), np.float32)
    want = np.frombuffer(torchs(w, b, a, 0.7, swapped=swapped), np.float32)
    assert (got == want).all()


@pytest.mark.parametrize(("out", "width", "fused"), [(4, 12, True), (3, 12, False), (4, 11, False), (16, 8, False)])
def test_narrow_float32_products_are_rounded_before_they_are_added(out: int, width: int, fused: bool) -> None:
    """-1 + (1 + 2^-12)^2, whose square needs one bit more than float32 has."""
    b = np.tile(np.float32([-1, 1 + 2**-12]), (out, 1))
    a = np.tile(np.float32([[1], [1 + 2**-12]]), (1, width))
    w = np.zeros((out, width), np.float32)
    want = 2**-11 + (2**-24 if fused else 0)
    assert (to_numpy(node(w, b, a, 1.0)) == np.float32(want)).all()
    # Which shapes torch fuses depends on the processor: it must give one of the two, everywhere the same.
    theirs = np.frombuffer(torchs(w, b, a, 1.0), np.float32)
    assert set(theirs.tolist()) in ({2**-11}, {2**-11 + 2**-24})


@pytest.mark.parametrize("kind", [ml_dtypes.bfloat16, np.float16])
def test_half_precision_rounds_where_torch_does(kind: Any) -> None:
    """The order of torch's sums is open for these; another order changes a few sums in the last place at most."""
    w, b, a = arrays(300, 16, 260, kind)
    got = np.frombuffer(to_bytes(node(w, b, a, 0.7)), np.uint16).astype(np.int32)
    want = np.frombuffer(torchs(w, b, a, 0.7), np.uint16).astype(np.int32)
    assert (got != want).mean() < 1e-3


def test_half_precision_rounds_the_product_the_scaled_one_and_the_sum() -> None:
    w, b, a = arrays(1, 1, 500, ml_dtypes.bfloat16)
    product = (b.astype(np.float32) * a.astype(np.float32)).astype(ml_dtypes.bfloat16)
    scaled = (product.astype(np.float32) * np.float32(0.7)).astype(ml_dtypes.bfloat16)
    want = (w.astype(np.float32) + scaled.astype(np.float32)).astype(ml_dtypes.bfloat16)
    assert to_bytes(node(w, b, a, 0.7)) == want.tobytes()


def test_float32_adapters_of_a_bfloat16_weight() -> None:
    w, b, a = arrays(5, 1, 40)
    half = w.astype(ml_dtypes.bfloat16)
    want = (half.astype(np.float32) + (b * a) * np.float32(0.3)).astype(ml_dtypes.bfloat16)
    assert to_bytes(node(half, b, a, 0.3)) == want.tobytes()


def test_float64() -> None:
    w, b, a = (x.astype(np.float64) for x in arrays(7, 1, 9))
    assert (to_numpy(node(w, b, a, 1 / 3)) == w + (b * a) * (1 / 3)).all()


BIG = arrays(70, 130, 2500)
WHOLE = {
    swapped: to_bytes(node(BIG[0].T.copy() if swapped else BIG[0], *BIG[1:], 0.3, swapped=swapped))
    for swapped in (False, True)
}


@settings(max_examples=60, deadline=None)
@given(st.data(), st.booleans())
def test_any_byte_range_and_any_block(data: st.DataObject, swapped: bool) -> None:
    w = BIG[0].T.copy() if swapped else BIG[0]
    tensor = node(w, *BIG[1:], 0.3, swapped=swapped)
    start = data.draw(st.integers(0, w.nbytes))
    stop = data.draw(st.integers(start, min(w.nbytes, start + 40_000)))
    out = bytearray(stop - start)
    read_into(tensor, start, memoryview(out))
    assert out == WHOLE[swapped][start:stop]
    row, col = data.draw(st.integers(0, w.shape[0] - 1)), data.draw(st.integers(0, w.shape[1] - 1))
    high, wide = (data.draw(st.integers(1, min(60, n - at))) for n, at in zip(w.shape, (row, col), strict=True))
    block = np.empty((wide, high), np.uint32).T
    tensor.read_block(row, col, block)
    whole = np.frombuffer(WHOLE[swapped], np.uint32).reshape(w.shape)
    assert (block == whole[row : row + high, col : col + wide]).all()


def test_not_a_number_and_infinity_are_results() -> None:
    w, b, a = arrays(3, 2, 4)
    b[0] = np.inf
    w[1, 1] = np.nan
    got = to_numpy(node(w, b, a, 1.0))
    assert not np.isfinite(got[0]).any()
    assert np.isnan(got[1]).tolist() == [False, True, False, False]


@pytest.mark.parametrize("shapes", [((3, 4), (3, 2), (3, 4)), ((4, 3), (3, 2), (2, 4)), ((12,), (3, 2), (2, 4))])
def test_factors_that_do_not_fit(shapes: tuple[tuple[int, ...], ...]) -> None:
    with pytest.raises(ShapeError, match=r"model\.w"):
        w, b, a = (ArrayTensor(np.zeros(shape, np.float32)) for shape in shapes)
        low_rank("model.w", w, b, a, 1.0)


def test_dtypes_that_do_not_fit() -> None:
    w, b, a = arrays(3, 2, 4)
    with pytest.raises(ShapeError, match="float16"):
        node(w, b, a.astype(np.float16), 1.0)
    with pytest.raises(ShapeError, match="int32"):
        node(w.astype(np.int32), b, a, 1.0)
