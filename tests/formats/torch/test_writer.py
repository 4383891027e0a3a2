"""Our torch files, with torch, Python's zipfile and unzip as the judges."""

from __future__ import annotations

import io
import os
import pickle
import shutil
import struct
import subprocess
import zipfile
from collections import OrderedDict
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ckptfs.formats.detect import open_source
from ckptfs.formats.extents import ExtentFile
from ckptfs.formats.nested import SetOf
from ckptfs.formats.torch.pickler import strides
from ckptfs.formats.torch.writer import torch_file
from ckptfs.tensors.cache import TileCache
from ckptfs.tensors.dtypes import DTYPES
from ckptfs.tensors.generated import filled
from ckptfs.tensors.ranges import to_bytes
from tests.factories import ArrayTensor, tensor_of
from tests.formats.reading import Counting, content

WAYS = [{"weights_only": w, "mmap": m} for w in (True, False) for m in (True, False)]
SHAPES = [(), (0,), (3,), (2, 3, 5), (4, 0, 2), (1,) * 8]


def load(file: ExtentFile, folder: Path, **how: bool) -> Any:
    """By torch, from a copy on disk."""
    path = folder / "x.pt"
    path.write_bytes(content(file))
    return torch.load(path, **how)


def bits(tensor: torch.Tensor) -> bytes:
    flat = tensor.contiguous().reshape(-1)
    return flat.view(torch.uint8).numpy().tobytes() if flat.numel() else b""


@pytest.mark.parametrize("name", DTYPES)
@pytest.mark.parametrize("how", WAYS, ids=str)
def test_every_dtype_and_shape(name: str, how: dict[str, bool], tmp_path: Path) -> None:
    want = {f"{i}.weight": tensor_of(name, shape, i) for i, shape in enumerate(SHAPES)}
    found = load(torch_file(want), tmp_path, **how)
    assert type(found) is dict and list(found) == list(want)
    for key, tensor in want.items():
        assert str(found[key].dtype) == f"torch.{name}"
        assert tuple(found[key].shape) == tensor.shape
        assert found[key].is_contiguous() and not found[key].requires_grad
        assert bits(found[key]) == tensor.bytes


STATE: dict[Any, Any] = {
    "empty": [{}, OrderedDict(), [], (), SetOf(())],
    "numbers": [0, 255, 256, -1, 2**31 - 1, 2**31, -(2**31), -(2**31) - 1, 2**2000, -(2**63), True, False],
    "floats": (0.1, -0.0, float("inf"), 1e-320),
    "text": ["", "é", "\ud800", "line\n\0"],
    "nothing": None,
    "set": SetOf((1, "a", None)),
    0: "zero",
    -1.5: "float",
    None: OrderedDict([("b", 1), ("a", {"deep": ((1,), [2])})]),
}


@pytest.mark.parametrize("how", WAYS, ids=str)
def test_containers_and_plain_values(how: dict[str, bool], tmp_path: Path) -> None:
    want = {**STATE, "empty": [*STATE["empty"][:4], set()], "set": {1, "a", None}}
    found = load(torch_file(STATE), tmp_path, **how)
    found["set"] = set(found["set"])
    assert repr(found | {"set": 0}) == repr(want | {"set": 0})  # repr tells types, order, True and 1, -0.0
    assert found["set"] == want["set"]


PLAIN = st.recursive(
    st.one_of(st.none(), st.booleans(), st.integers(), st.floats(allow_nan=False), st.text(st.characters())),
    lambda inner: st.one_of(st.lists(inner), st.lists(inner).map(tuple), st.dictionaries(st.text(), inner)),
    max_leaves=20,
)


@settings(deadline=None)
@given(PLAIN)
def test_any_plain_value(value: Any) -> None:
    with zipfile.ZipFile(io.BytesIO(content(torch_file(value)))) as archive:
        assert repr(pickle.loads(archive.read("archive/data.pkl"))) == repr(value)


def test_an_integer_that_torch_would_refuse_is_a_text(tmp_path: Path) -> None:
    found = load(torch_file({"n": 2**2039 - 1, "m": 2**2039}), tmp_path, weights_only=True)
    assert found["n"] == 2**2039 - 1
    assert found["m"] == "<not shown by ckptfs: an integer of 2040 bits, more than torch.load reads>"


@pytest.mark.parametrize("mmap", [True, False])
def test_tied_tensors_share_their_storage(mmap: bool, tmp_path: Path) -> None:
    tied, other = tensor_of("bfloat16", (3, 4), 1), tensor_of("bfloat16", (3, 4), 1)
    found = load(torch_file({"a": tied, "b": other, "c": [tied]}), tmp_path, mmap=mmap)
    assert found["a"].data_ptr() == found["c"][0].data_ptr() != found["b"].data_ptr()
    assert bits(found["b"]) == bits(found["a"]) == tied.bytes
    with zipfile.ZipFile(tmp_path / "x.pt") as archive:
        assert sum("/data/" in name for name in archive.namelist()) == 2


@given(st.lists(st.integers(0, 4), max_size=5).map(tuple))
def test_strides_are_those_of_torch(shape: tuple[int, ...]) -> None:
    assert strides(shape) == torch.empty(shape).stride()


def sample() -> ExtentFile:
    big = ArrayTensor(np.random.default_rng(0).standard_normal((700, 401), np.float32))
    return torch_file({"big": big, "small": tensor_of("int8", (5,)), "empty": tensor_of("int8", (0,)), "again": big})


def test_others_find_no_damage(tmp_path: Path) -> None:
    path = tmp_path / "x.pt"
    path.write_bytes(content(sample()))
    with zipfile.ZipFile(path) as archive:
        assert archive.testzip() is None
        assert archive.namelist()[0] == "archive/data.pkl"
    if shutil.which("unzip"):
        subprocess.run(["unzip", "-tq", path], check=True, capture_output=True)


def test_checkers_do_find_damage(tmp_path: Path) -> None:
    whole = bytearray(content(sample()))
    whole[100_000] ^= 1
    with zipfile.ZipFile(io.BytesIO(whole)) as archive:
        assert archive.testzip() == "archive/data/0"


def test_data_are_aligned_as_torch_aligns_them() -> None:
    whole = content(sample())
    with zipfile.ZipFile(io.BytesIO(whole)) as archive:
        for info in archive.infolist():
            n_name, n_extra = struct.unpack_from("<2H", whole, info.header_offset + 26)
            assert (info.header_offset + 30 + n_name + n_extra) % 64 == 0
            assert struct.unpack_from("<L", whole, info.header_offset + 14)[0] == info.CRC


def test_same_bytes_again() -> None:
    assert content(sample()) == content(sample())


@settings(deadline=None, max_examples=30)
@given(st.lists(st.tuples(st.integers(0, 1_200_000), st.integers(0, 5000)), min_size=1, max_size=10))
def test_any_range_equals_the_slice(ranges: list[tuple[int, int]]) -> None:
    file, whole = sample(), WHOLE
    for offset, length in ranges:
        out = bytearray(length)
        n = file.read_into(offset, memoryview(out))
        assert out[:n] == whole[offset : offset + length]


WHOLE = content(sample())


def test_our_own_reader_reads_it(tmp_path: Path) -> None:
    state = {"model": OrderedDict(w=tensor_of("float8_e5m2", (3, 4)), h=tensor_of("float16", (2,))), "step": 3}
    (tmp_path / "x.pt").write_bytes(content(torch_file(state)))
    source = open_source(str(tmp_path / "x.pt"), TileCache())
    assert list(source.items) == ["model.w", "model.h", "step"]
    assert {key: to_bytes(t) for key, t in source.tensors().items()} == {
        "model.w": state["model"]["w"].bytes,
        "model.h": state["model"]["h"].bytes,
    }
    assert source.items["step"].value == 3
    source.close()


def test_opening_reads_next_to_no_data() -> None:
    """A reader that opens an archive comes by whole pages around all headers, and 4 KiB before the end."""
    arrays = {f"w{i}": np.zeros(1 << 20, np.uint8) for i in range(3)}
    with zipfile.ZipFile(io.BytesIO(content(torch_file({k: ArrayTensor(a) for k, a in arrays.items()})))) as archive:
        offsets = [info.header_offset for info in archive.infolist()]
    tensors = {key: Counting(array) for key, array in arrays.items()}
    file = torch_file(tensors)
    assert [t.elements for t in tensors.values()] == [0, 0, 0]
    out = bytearray(4096)
    for page in sorted({offset // 4096 for offset in [*offsets, file.size - 4096, file.size - 1]}):
        file.read_into(page * 4096, memoryview(out))
    assert all(0 < t.elements < 4096 for t in tensors.values())  # the beginnings of data, behind their headers


def sparse_copy(file: ExtentFile, path: Path) -> None:
    """A copy of *file* without the data of its tensors, which must be zeros."""
    with path.open("wb") as out:
        out.truncate(file.size)
        for body, start in zip(file.bodies, file.starts, strict=False):
            if isinstance(body, bytes):
                os.pwrite(out.fileno(), body, start)


def test_records_of_more_than_4_gib(tmp_path: Path) -> None:
    shape = (5 << 20, 1024)
    file = torch_file({"a": filled("uint8", shape, 0), "b": filled("uint8", shape, 0), "c": filled("int8", (2,), 0)})
    assert file.size > 10 << 30
    path = tmp_path / "x.pt"
    sparse_copy(file, path)
    try:
        found = torch.load(path, mmap=True, weights_only=True)
        assert found["a"].shape == found["b"].shape == shape
        assert int(found["b"][-1, -1]) == 0
        with zipfile.ZipFile(path) as archive:
            info = archive.getinfo("archive/data/1")
            assert info.file_size == info.compress_size == (5 << 30) + 8196
            assert info.header_offset > 5 << 30
            with archive.open(info) as stream:  # its local header is read and believed
                assert stream.read(10) == bytes(10)
        source = open_source(str(path), TileCache())
        assert [t.shape for t in source.tensors().values()] == [shape, shape, (2,)]
        source.close()
    finally:
        path.unlink()


@pytest.mark.slow
def test_more_than_65535_records(tmp_path: Path) -> None:
    tensors = {str(i): tensor_of("int8", (1,)) for i in range(70_000)}
    found = load(torch_file(tensors), tmp_path, mmap=True, weights_only=True)
    assert len(found) == 70_000 and bits(found["69999"]) == tensors["69999"].bytes
