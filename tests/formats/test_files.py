"""Tensors that lie in files: any block equals the same block of the whole, whatever the strides."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ckptfs.errors import CorruptChunk, CorruptHeader, SourceError, UsageError
from ckptfs.formats.files import json_object, open_file, read_exactly
from ckptfs.tensors import file_tensor
from ckptfs.tensors.dtypes import DTYPES
from ckptfs.tensors.file_tensor import FileTensor, extent, in_c_order
from ckptfs.tensors.source_file import SourceFile

N = 4000
DATA = np.random.default_rng(0).integers(0, 1 << 32, N, np.uint32)
OFFSET = 7
"""Not a multiple of any element's size."""


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("raw") / "data"
    made.write_bytes(b"x" * OFFSET + DATA.tobytes())
    return made


def tensor_of(file: SourceFile, shape: tuple[int, ...], strides: tuple[int, ...] | None, at: int = 0) -> FileTensor:
    return FileTensor(DTYPES["float32"], shape, file, OFFSET + 4 * at, strides, "key")


def matrix(shape: tuple[int, ...], strides: tuple[int, ...], at: int) -> npt.NDArray[np.uint32]:
    """The block view, made by numpy."""
    view = np.lib.stride_tricks.as_strided(DATA[at:], shape, [4 * stride for stride in strides])
    return np.ascontiguousarray(view).reshape(shape[0] if shape else 1, -1)


@st.composite
def views(draw: st.DrawFn) -> tuple[tuple[int, ...], tuple[int, ...], int]:
    shape = tuple(draw(st.lists(st.integers(1, 6), max_size=4)))
    strides = tuple(draw(st.sampled_from([0, 1, 2, 3, 6, 20, 60])) for _ in shape)
    if draw(st.booleans()):
        dense = file_tensor.c_strides(shape)
        order = draw(st.permutations(range(len(shape))))
        strides = tuple(dense[i] for i in order)
    return shape, strides, draw(st.integers(0, N - 1 - sum((n - 1) * s for n, s in zip(shape, strides, strict=True))))


@settings(max_examples=300, deadline=None)
@given(view=views(), data=st.data(), piece=st.sampled_from([8, 64, 4 << 20]), gap=st.sampled_from([0, 16, 1 << 14]))
def test_any_block_of_any_view(path: Path, view: Any, data: st.DataObject, piece: int, gap: int) -> None:
    shape, strides, at = view
    whole = matrix(shape, strides, at)
    row = data.draw(st.integers(0, whole.shape[0]))
    col = data.draw(st.integers(0, whole.shape[1]))
    n = data.draw(st.integers(0, whole.shape[0] - row))
    width = data.draw(st.integers(0, whole.shape[1] - col))
    layout = data.draw(st.sampled_from(["C", "F", "wide"]))
    out = np.zeros((n, 3 * width), np.uint32)[:, ::3] if layout == "wide" else np.zeros((n, width), np.uint32, layout)
    file = open_file(path)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(file_tensor, "PIECE", piece)
        patch.setattr(file_tensor, "MAX_GAP", gap)
        tensor_of(file, shape, None if in_c_order(shape, strides) else strides, at).read_block(row, col, out)
    file.close()
    assert np.array_equal(out, whole[row : row + n, col : col + width])


def test_whole_rows_are_one_read_into_the_callers_buffer(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = open_file(path)
    calls: list[tuple[int, int]] = []
    preadv = os.preadv

    def counted(fd: int, buffers: list[memoryview], offset: int) -> int:
        calls.append((offset, buffers[0].nbytes))
        return preadv(fd, buffers, offset)

    monkeypatch.setattr(os, "preadv", counted)
    out = np.zeros((5, 20), np.uint32)
    tensor_of(file, (40, 20), None).read_block(3, 0, out)
    file.close()
    assert calls == [(OFFSET + 4 * 60, 400)]
    assert np.array_equal(out, DATA[60:160].reshape(5, 20))


def test_narrow_columns_of_long_rows_leave_the_rest_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = np.arange(10 * 100_000, dtype=np.uint32).reshape(10, 100_000)
    (tmp_path / "long").write_bytes(rows.tobytes())
    file = open_file(tmp_path / "long")
    n_bytes = 0
    preadv = os.preadv

    def counted(fd: int, buffers: list[memoryview], offset: int) -> int:
        nonlocal n_bytes
        n_bytes += buffers[0].nbytes
        return preadv(fd, buffers, offset)

    monkeypatch.setattr(os, "preadv", counted)
    out = np.zeros((10, 50), np.uint32)
    FileTensor(DTYPES["float32"], (10, 100_000), file, 0, None, "k").read_block(0, 777, out)
    file.close()
    assert np.array_equal(out, rows[:, 777:827])
    assert n_bytes == out.nbytes


@pytest.mark.parametrize(("shape", "strides"), [((30, 20), None), ((20, 30), (1, 20)), ((5, 4, 5), (4, 1, 20))])
def test_a_file_that_shrank_gives_an_error(tmp_path: Path, shape: tuple[int, ...], strides: tuple[int, ...]) -> None:
    short = tmp_path / "short"
    short.write_bytes(b"x" * OFFSET + DATA.tobytes())
    file = open_file(short)
    tensor = tensor_of(file, shape, strides)
    os.truncate(short, OFFSET + 200)
    out = np.zeros((shape[0], int(np.prod(shape[1:]))), np.uint32)
    with pytest.raises(CorruptChunk) as caught:
        tensor.read_block(0, 0, out)
    file.close()
    assert (caught.value.key, caught.value.offset, caught.value.path) == ("key", OFFSET + 200, str(short))


@pytest.mark.parametrize("name", sorted(DTYPES))
def test_every_element_size(tmp_path: Path, name: str) -> None:
    dtype = DTYPES[name]
    data = np.random.default_rng(1).bytes(12 * dtype.itemsize)
    (tmp_path / "x").write_bytes(data)
    file = open_file(tmp_path / "x")
    out = np.zeros((3, 2), dtype.storage_dtype)
    FileTensor(dtype, (3, 4), file, 0, None, "k").read_block(0, 1, out)
    file.close()
    size = dtype.itemsize
    assert out.tobytes() == b"".join(data[(4 * i + 1) * size : (4 * i + 3) * size] for i in range(3))


def test_grain_follows_the_order_in_the_file(path: Path) -> None:
    file = open_file(path)
    make = lambda shape, strides: FileTensor(DTYPES["float32"], shape, file, 0, strides, "k")  # noqa: E731
    assert make((500, 300), None).preferred_block == (1, 300)
    assert make((500, 300), (1, 500)).preferred_block == (500, 1)
    assert make((), None).preferred_block == (1, 1)
    assert make((0, 4), None).preferred_block == (1, 4)


def test_extent_and_order() -> None:
    assert extent((3, 4), (4, 1)) == 12
    assert extent((3, 0), (4, 1)) == 0
    assert extent((), ()) == 1
    assert in_c_order((1, 4), (99, 1))
    assert not in_c_order((4, 3), (1, 4))


def test_only_regular_files_open(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(SourceError, match="not a regular file"):
        open_file(tmp_path / "pipe")
    with pytest.raises(UsageError, match="no such file"):
        open_file(tmp_path / "absent")
    with pytest.raises(SourceError):
        open_file("nul\0name")


def test_reads_past_the_end_allocate_nothing(path: Path) -> None:
    file = open_file(path)
    with pytest.raises(CorruptHeader, match="past the end"):
        read_exactly(file, 0, 1 << 60, "the header")
    with pytest.raises(CorruptHeader, match="past the end"):
        read_exactly(file, -1, 1, "the header")
    file.close()


@pytest.mark.parametrize("text", [b'{"a": 1, "a": 2}', b"[1]", b"{", b"\xff{}", b'{"a":' + b"[" * 100_000])
def test_bad_json(text: bytes) -> None:
    with pytest.raises(CorruptHeader, match="the thing"):
        json_object(text, "p", "the thing")
