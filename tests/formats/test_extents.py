"""Any byte range of a file equals the slice of the whole."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from ckptfs.formats.extents import file_of
from ckptfs.formats.npy import npy_file
from ckptfs.formats.safetensors import safetensors_file
from tests.factories import NUMPY_TYPES, ArrayTensor, tensor_of
from tests.formats.reading import content

TENSORS = st.builds(
    tensor_of, st.sampled_from(list(NUMPY_TYPES)), st.lists(st.integers(0, 5), max_size=3).map(tuple), st.integers(0, 9)
)
RANGES = st.lists(st.tuples(st.integers(0, 400), st.integers(0, 200)), min_size=1, max_size=10)


@settings(deadline=None)
@given(st.lists(st.one_of(st.binary(max_size=20), TENSORS), max_size=6), RANGES)
def test_range_equals_slice(bodies: list[bytes | ArrayTensor], ranges: list[tuple[int, int]]) -> None:
    whole = b"".join(body if isinstance(body, bytes) else body.bytes for body in bodies)
    file = file_of(bodies)
    assert file.size == len(whole)
    assert content(file) == whole
    for offset, length in ranges:
        out = bytearray(b"\xaa" * length)
        n = file.read_into(offset, memoryview(out))
        want = whole[offset : offset + length]
        assert n == len(want)
        assert out == want + b"\xaa" * (length - n)


@settings(deadline=None)
@given(st.dictionaries(st.text("ab.", min_size=1), TENSORS.filter(lambda t: t.dtype.safetensors), max_size=4), RANGES)
def test_range_of_real_layouts(tensors: dict[str, ArrayTensor], ranges: list[tuple[int, int]]) -> None:
    for file in (safetensors_file(tensors), *map(npy_file, tensors.values())):
        whole = content(file)
        for offset, length in ranges:
            out = bytearray(length)
            n = file.read_into(offset, memoryview(out))
            assert out[:n] == whole[offset : offset + length]
