"""Our `.npy` files against numpy.save, byte for byte."""

from __future__ import annotations

import io
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest

from ckptfs.formats.npy import npy_file
from tests.factories import NUMPY_TYPES, ArrayTensor, array_of, tensor_of
from tests.formats.reading import content

SHAPES = [(), (0,), (7,), (3, 0, 2), (4, 5), (1, 2, 3, 4), (1,) * 32, (10**12, 0)]


@pytest.mark.parametrize("name", [n for n in NUMPY_TYPES if not n.startswith("float8")])
@pytest.mark.parametrize("shape", SHAPES)
def test_same_bytes_as_numpy_save(name: str, shape: tuple[int, ...]) -> None:
    want = io.BytesIO()
    np.save(want, array_of(name, shape))
    assert content(npy_file(tensor_of(name, shape))) == want.getvalue()


@pytest.mark.parametrize("name", ["float8_e4m3fn", "float8_e5m2", "bfloat16"])
def test_types_without_a_numpy_name_load_as_opaque_words(name: str) -> None:
    array = array_of(name, (4, 5))
    loaded = np.load(io.BytesIO(content(npy_file(ArrayTensor(array)))))
    assert loaded.shape == (4, 5)
    assert loaded.view(getattr(ml_dtypes, name)).tobytes() == array.tobytes()


def test_numpy_maps_it(tmp_path: Path) -> None:
    array = array_of("int32", (6, 7))
    (tmp_path / "a.npy").write_bytes(content(npy_file(ArrayTensor(array))))
    mapped = np.load(tmp_path / "a.npy", mmap_mode="r")
    assert isinstance(mapped, np.memmap)
    assert np.array_equal(mapped, array)
    assert mapped.offset % 64 == 0
    del mapped
