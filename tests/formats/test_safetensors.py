"""safetensors: what the reference library writes is read alike; every lie in a header is found."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.numpy import save
from safetensors.torch import save_file

from ckptfs.errors import CkptfsError, CorruptHeader
from ckptfs.formats.safetensors import is_safetensors, open_safetensors
from ckptfs.tensors.ranges import read_into, to_bytes
from tests.formats.samples import TORCH_TYPES, bytes_of, check_refusal, random_tensor


def file_of(header: object, data: bytes = b"") -> bytes:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return len(text).to_bytes(8, "little") + text + data


def test_reads_what_the_reference_writes(tmp_path: Path) -> None:
    shapes = [(), (0,), (3, 0, 2), (5,), (4, 7), (2, 3, 4)]
    state = {
        f"{dtype}.{len(shape)}.{i}": random_tensor(dtype, shape)
        for dtype in TORCH_TYPES
        for i, shape in enumerate(shapes)
    }
    path = tmp_path / "all.safetensors"
    save_file(state, path, {"format": "pt"})
    source = open_safetensors(path)
    assert set(source.items) == set(state)
    for key, tensor in source.tensors().items():
        assert f"torch.{tensor.dtype.name}" == str(state[key].dtype)
        assert tensor.shape == tuple(state[key].shape)
        assert to_bytes(tensor) == bytes_of(state[key]), key
    status = path.stat()
    assert (source.format, source.nbytes, source.mtime_ns) == ("safetensors", status.st_size, status.st_mtime_ns)
    assert len(source.files) == 1
    source.close()


def test_items_are_in_the_order_of_the_header(tmp_path: Path) -> None:
    entry = lambda at: {"dtype": "U8", "shape": [1], "data_offsets": [at, at + 1]}  # noqa: E731
    path = tmp_path / "x"
    path.write_bytes(file_of({"z": entry(1), "__metadata__": {"a": "b"}, "a": entry(0)}, b"\1\2"))
    source = open_safetensors(path)
    assert [(key, to_bytes(tensor)) for key, tensor in source.tensors().items()] == [("z", b"\2"), ("a", b"\1")]
    source.close()


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(shape=st.lists(st.integers(0, 5), max_size=4), data=st.data())
def test_any_byte_range(tmp_path: Path, shape: list[int], data: st.DataObject) -> None:
    array = np.random.default_rng(2).integers(0, 1 << 16, shape, np.uint16)
    path = tmp_path / "x"
    path.write_bytes(save({"pad": np.zeros(3, np.uint8), "x": array}))
    source = open_safetensors(path)
    whole = array.tobytes()
    start = data.draw(st.integers(0, len(whole)))
    stop = data.draw(st.integers(start, len(whole)))
    out = bytearray(stop - start)
    read_into(source.tensors()["x"], start, memoryview(out))
    source.close()
    assert bytes(out) == whole[start:stop]


def entry(**changes: Any) -> dict[str, Any]:
    return {"dtype": "F32", "shape": [2], "data_offsets": [0, 8], **changes}


HEADERS: list[tuple[str, Callable[[], bytes], str]] = [
    ("empty file", lambda: b"", "the header's length"),
    ("7 bytes", lambda: b"\0" * 7, "the header's length"),
    ("length of 2**63", lambda: (1 << 63).to_bytes(8, "little") + b"{}", "length is 9223372036854775808"),
    ("length past the limit", lambda: (100_000_001).to_bytes(8, "little") + b"{}", "length is 100000001"),
    ("length past the end", lambda: (100).to_bytes(8, "little") + b"{}", "past the end"),
    ("length 0", lambda: bytes(16), "length is 0"),
    ("no JSON", lambda: file_of(b"{nope}"), "not valid JSON"),
    ("no UTF-8", lambda: file_of(b'{"\xff": 1}'), "not valid JSON"),
    ("an array", lambda: file_of(b"[1, 2]"), "not a JSON object"),
    ("deep", lambda: file_of(b'{"a":' * 50_000), "not valid JSON"),
    ("twice", lambda: file_of(b'{"a.b": 1, "a.b": 2}'), "'a.b' is in it twice"),
    ("lone surrogate", lambda: file_of(b'{"\\ud800": 1}'), "not Unicode"),
    ("entry", lambda: file_of({"a.b": 3}), "a.b: its entry"),
    ("field missing", lambda: file_of({"a.b": {"dtype": "F32", "shape": [2]}}), "a.b: its entry"),
    ("dtype", lambda: file_of({"a.b": entry(dtype="F33")}, bytes(8)), "a.b: dtype 'F33'"),
    ("dtype no text", lambda: file_of({"a.b": entry(dtype=["F32"])}, bytes(8)), "a.b: dtype"),
    ("negative size", lambda: file_of({"a.b": entry(shape=[-2])}, bytes(8)), "a.b: its shape"),
    ("bool size", lambda: file_of({"a.b": entry(shape=[True, 2])}, bytes(8)), "a.b: its shape"),
    ("float size", lambda: file_of({"a.b": entry(shape=[2.0])}, bytes(8)), "a.b: its shape"),
    ("33 axes", lambda: file_of({"a.b": entry(shape=[1] * 32 + [2])}, bytes(8)), "a.b: its shape"),
    ("overflow", lambda: file_of({"a.b": entry(shape=[1 << 32, 1 << 32])}, bytes(8)), "a.b: its shape"),
    ("overflow hidden by 0", lambda: file_of({"a.b": entry(shape=[0, 1 << 63])}, bytes(8)), "a.b: its shape"),
    ("size", lambda: file_of({"a.b": entry(shape=[3])}, bytes(8)), "a.b: its data_offsets hold 8 bytes"),
    ("backwards", lambda: file_of({"a.b": entry(data_offsets=[8, 0])}, bytes(8)), "a.b: its data_offsets"),
    ("negative", lambda: file_of({"a.b": entry(data_offsets=[-8, 0])}, bytes(8)), "a.b: its data_offsets"),
    ("no pair", lambda: file_of({"a.b": entry(data_offsets=[0, 4, 8])}, bytes(8)), "a.b: its data_offsets"),
    ("hole", lambda: file_of({"a.b": entry(data_offsets=[4, 12])}, bytes(12)), "a.b: .* leaves a hole"),
    ("overlap", lambda: file_of({"a": entry(), "a.b": entry(data_offsets=[4, 12])}, bytes(12)), "a.b: .* overlaps"),
    ("past the end", lambda: file_of({"a.b": entry()}, bytes(7)), "a.b: its data ends at 8"),
    ("bytes left over", lambda: file_of({"a.b": entry()}, bytes(9)), "the tensors end at 8"),
]  # fmt: skip


@pytest.mark.parametrize(("content", "message"), [row[1:] for row in HEADERS], ids=[row[0] for row in HEADERS])
def test_lies_in_the_header(tmp_path: Path, content: Callable[[], bytes], message: str) -> None:
    path = tmp_path / "x.safetensors"
    path.write_bytes(content())
    check_refusal(open_safetensors, path, CorruptHeader, message)


@settings(max_examples=200, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(at=st.integers(0, 10_000), byte=st.integers(0, 255), cut=st.integers(0, 10_000))
def test_damage_never_surprises(tmp_path: Path, at: int, byte: int, cut: int) -> None:
    content = bytearray(save({"a": np.arange(6, dtype=np.float32).reshape(2, 3), "b": np.ones((), np.int64)}))
    content[at % len(content)] = byte
    path = tmp_path / "x"
    path.write_bytes(content[: len(content) - cut % 40])
    try:
        source = open_safetensors(path)
    except CkptfsError:
        return
    for tensor in source.tensors().values():
        assert len(to_bytes(tensor)) <= 32
    source.close()


def test_recognition() -> None:
    good = file_of({"a": entry()}, bytes(8))
    assert is_safetensors(good[:16], len(good))
    assert not is_safetensors(good[:16], 20)
    assert not is_safetensors(b"", 0)
    assert not is_safetensors(b"\x89HDF\r\n\x1a\n{", 1000)
