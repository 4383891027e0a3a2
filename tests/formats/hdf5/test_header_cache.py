"""Headers that are compared give the records of headers that are decoded."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import h5py
import hdf5plugin
import numpy as np
import pytest

from ckptfs.errors import CorruptHeader
from ckptfs.formats.hdf5 import header_cache, index_worker, object_headers, superblock
from ckptfs.formats.hdf5.header_cache import HeaderCache
from ckptfs.formats.hdf5.messages import DAMAGE, Unsupported
from ckptfs.formats.hdf5.summary import object_records
from tests.formats.hdf5.h5_files import DATA

CHECKPOINTS = sorted(path for path in DATA.rglob("*.mdl") if path.stat().st_size < 4 << 20)


def records(path: Path) -> dict[str, Any]:
    fd = os.open(path, os.O_RDONLY)
    try:
        file = superblock.MetadataFile(fd, str(path))
        return dict(object_headers.walk_objects(file, superblock.open_superblock(file), index_worker.ATTRIBUTES))
    finally:
        os.close(fd)


@pytest.fixture
def decoded(monkeypatch: pytest.MonkeyPatch) -> Callable[[Path], dict[str, Any]]:
    """The records of a file when nothing is compared."""

    def read(path: Path) -> dict[str, Any]:
        with monkeypatch.context() as patch:
            patch.setattr(HeaderCache, "record", lambda self, address: None)
            patch.setattr(header_cache, "MAX_TEMPLATES", 0)
            return records(path)

    return read


@pytest.fixture
def counted(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[int]]:
    """Addresses of the headers that are decoded."""
    seen: list[int] = []
    real = object_headers.object_record

    def record(file: Any, address: int, wanted: frozenset[str]) -> dict[str, Any]:
        seen.append(address)
        return real(file, address, wanted)

    monkeypatch.setattr(object_headers, "object_record", record)
    yield seen


def texts(dataset: Any, dtype: str, n: int) -> None:
    """*n* attributes, some of them wanted: more than a few do not fit a header's first block."""
    dataset.attrs["dtypes"] = [dtype]
    dataset.attrs["is_bfloat16"] = dtype == "torch.bfloat16"
    dataset.attrs["string_val"] = f"text of {dataset.name}"
    for i in range(n):
        dataset.attrs[f"other_{i}"] = f"{dataset.name} {i}"


def test_checkpoints_of_the_tests(decoded: Callable[[Path], dict[str, Any]]) -> None:
    assert CHECKPOINTS
    for path in CHECKPOINTS:
        try:
            want = decoded(path)
        except (Unsupported, CorruptHeader, *DAMAGE) as error:
            with pytest.raises(type(error)):
                records(path)
        else:
            assert records(path) == want, path


@pytest.mark.parametrize("n", [0, 3, 12])
def test_datasets_of_many_kinds(
    n: int, tmp_path: Path, decoded: Callable[[Path], dict[str, Any]], counted: list[int]
) -> None:
    path = tmp_path / "many.h5"
    with h5py.File(path, "w") as file:
        for i in range(60):
            dtype = ("torch.float32", "torch.int16", "torch.bfloat16")[i % 3]
            data = np.full((8, 4), i, "<f4" if i % 3 == 0 else "<i2")
            options: dict[str, Any] = {"chunks": (4, 4), **hdf5plugin.LZ4()} if i % 2 else {}
            texts(file.create_dataset(f"group_{i // 20}/key_{i}", data=data, **options), dtype, n)
        texts(file.create_dataset("empty", (0, 4), "<f4", chunks=(4, 4), maxshape=(None, 4)), "torch.float32", n)
        texts(file.create_dataset("hole", (5,), "<f4"), "torch.float32", n)
        for i in range(3):
            texts(file.create_dataset(f"filled_{i}", (5,), "<f4", fillvalue=7), "torch.float32", n)
        texts(file.create_dataset("null", data=h5py.Empty("f4")), "torch.float32", n)
        file["soft"] = h5py.SoftLink("/hole")
        file["hard"] = file["group_0/key_0"]
    want = decoded(path)
    counted.clear()
    found = records(path)
    assert found == want
    assert len(found) == 68
    assert found["filled_0"]["fill"] == found["filled_2"]["fill"] == np.float32(7).tobytes()
    assert found["group_1/key_20"]["attrs"]["string_val"] == "text of /group_1/key_20"
    assert found["group_1/key_20"]["layout"] != found["group_1/key_26"]["layout"]
    assert len(counted) <= 32  # six kinds, each with messages in several orders, for libhdf5 fills gaps


def test_the_index_is_the_same(tmp_path: Path, decoded: Callable[[Path], dict[str, Any]]) -> None:
    """Records that share their attributes are summed up by that."""
    path = tmp_path / "same.h5"
    with h5py.File(path, "w") as file:
        for i in range(40):
            shape, dtype = ((8, 4), (5,))[i // 2 % 2], ("torch.float32", "torch.uint8___")[i % 2]
            made = file.create_dataset(f"key_{i:02}", data=np.full(shape, i, "<f4"), chunks=shape if i > 20 else None)
            made.attrs["dtypes"] = [dtype]
            made.attrs["__BYTES__"] = np.void(b"\x80\x04N.")
            made.attrs["object_value"] = b"\x80\x04N.".hex()
    for each in (path, *CHECKPOINTS):
        try:
            want = object_records(decoded(each))
        except (Unsupported, CorruptHeader, *DAMAGE):
            continue
        found = object_records(records(each))
        assert json.dumps(found) == json.dumps(want), each
    assert len(object_records(records(path))["records"]) == 8


def test_a_header_that_differs_is_decoded(tmp_path: Path, decoded: Callable[[Path], dict[str, Any]]) -> None:
    """One byte of each header after the first one is another, at every place in turn."""
    path = tmp_path / "two.h5"
    with h5py.File(path, "w") as file:
        for i in range(2):
            texts(file.create_dataset(f"key_{i}", data=np.full((8, 4), i, "<f4")), "torch.float32", 0)
        address = h5py.h5o.get_info(file["key_1"].id).addr
    whole = path.read_bytes()
    size = int.from_bytes(whole[address + 8 : address + 12], "little")
    for at in range(address + 16, address + 16 + size):
        path.write_bytes(whole[:at] + bytes([whole[at] ^ 1]) + whole[at + 1 :])
        assert records(path) == decoded(path), at


def test_what_a_caller_does_to_a_record_stays_there(tmp_path: Path) -> None:
    path = tmp_path / "filled.h5"
    with h5py.File(path, "w") as file:
        for i in range(3):
            texts(file.create_dataset(f"key_{i}", (5,), "<f4", fillvalue=7), "torch.float32", 0)
    fd = os.open(path, os.O_RDONLY)
    file = superblock.MetadataFile(fd, str(path))
    for _, record in object_headers.walk_objects(file, superblock.open_superblock(file), index_worker.ATTRIBUTES):
        assert record["fill"] == np.float32(7).tobytes()
        assert record["attrs"]["dtypes"] == ["torch.float32"]
        record["fill"] = record["attrs"]["dtypes"] = record["layout"] = None
    os.close(fd)


def test_kinds_are_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, counted: list[int]) -> None:
    monkeypatch.setattr(header_cache, "MAX_TEMPLATES", 2)
    path = tmp_path / "kinds.h5"
    with h5py.File(path, "w") as file:
        for i in range(20):
            file[f"key_{i:02}"] = np.zeros(i % 4 + 1)
    assert [found["shape"] for found in records(path).values()] == [(i % 4 + 1,) for i in range(20)]
    assert len(counted) == 2 + 10
