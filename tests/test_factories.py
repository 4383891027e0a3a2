"""The factories keep the protocol that they stand in for."""

from __future__ import annotations

import numpy as np
import pytest

from ckptfs.tensors.dtypes import DTYPES
from ckptfs.tensors.ranges import to_bytes, to_numpy
from ckptfs.tensors.tensor import Tensor
from tests.factories import NUMPY_TYPES, array_of, tensor_of


def test_every_dtype_has_a_factory() -> None:
    assert NUMPY_TYPES.keys() == DTYPES.keys()


@pytest.mark.parametrize("name", list(NUMPY_TYPES))
@pytest.mark.parametrize("shape", [(), (0,), (5,), (3, 0, 2), (3, 4, 2)])
def test_tensor_gives_back_its_array(name: str, shape: tuple[int, ...]) -> None:
    tensor = tensor_of(name, shape)
    assert isinstance(tensor, Tensor)
    assert to_bytes(tensor) == array_of(name, shape).tobytes()
    assert to_numpy(tensor).dtype == NUMPY_TYPES[name]


def test_blocks_land_in_strided_buffers() -> None:
    tensor = tensor_of("float32", (6, 5))
    out = np.zeros((3, 4), np.uint32).T[::2]
    tensor.read_block(1, 2, out)
    assert np.array_equal(out, tensor.array.view(np.uint32)[1:3, 2:5])
