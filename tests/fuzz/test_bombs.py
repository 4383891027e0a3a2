"""Small files that ask for much: memory or time. Each is read in a process with limits, and measured."""

from __future__ import annotations

import io
import json
import struct
import zipfile
import zlib
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest

from ckptfs.errors import CorruptChunk, CorruptHeader
from ckptfs.formats.cerebras.spec import parse_spec
from ckptfs.formats.files import open_file, read_json
from ckptfs.tensors.cache import TileCache
from ckptfs.tensors.tensor import Tensor
from tests.effort import MAX_EFFORT
from tests.formats.hdf5.h5_files import LEAF, node, scalar, spec_text, tensors_of, write_checkpoint
from tests.fuzz.corpus import DATA, zipped
from tests.fuzz.runner import run_file

pytestmark = pytest.mark.slow

MIB = 1 << 20


def refused(target: str, path: Path, *, mib: int = 900, outcome: str = "CorruptHeader") -> None:
    """The reader says no, with little work and within *mib*."""
    found = run_file(target, path)
    assert found.get("outcome") == outcome, found
    assert found["peak"] < mib * MIB
    assert found["effort"] < MAX_EFFORT


def with_header(path: Path, header: bytes, length: int | None = None) -> Path:
    n = len(header) if length is None else length
    path.write_bytes(n.to_bytes(8, "little") + header)
    return path


# -- safetensors and JSON -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("length", [1 << 63, (1 << 64) - 1, (1 << 32) + 8, 99_999_999])
def test_a_header_larger_than_the_file(tmp_path: Path, length: int) -> None:
    refused("safetensors", with_header(tmp_path / "f", b'{"a":{}}', length), mib=4)


JSON_BOMBS = {
    "nested": b'{"a":' + b"[" * 1_000_000,
    "nested and closed": b'{"a":' + b"[" * 900_000 + b"]" * 900_000 + b"}",
    "many lists": b'{"a":[' + b"[]," * 10_000_000 + b"1]}",
    "many dicts": b'{"a":[' + b'{"b":1},' * 3_000_000 + b"1]}",
    "many numbers": b'{"a":[' + b"999," * 10_000_000 + b"1]}",
    "a large number": b'{"a":' + b"9" * 5_000_000 + b"}",
    "names twice": b"{" + b",".join(b'"%d":0' % i for i in range(200_000)) + b',"199999":0}',
}


@pytest.mark.parametrize("name", JSON_BOMBS)
def test_headers_that_unfold(tmp_path: Path, name: str) -> None:
    refused("safetensors", with_header(tmp_path / "f", JSON_BOMBS[name]), mib=400)


@pytest.mark.parametrize("name", JSON_BOMBS)
def test_indexes_that_unfold(tmp_path: Path, name: str) -> None:
    path = tmp_path / "f"
    path.write_bytes(JSON_BOMBS[name])
    refused("index-json", path, mib=400)


def test_a_name_that_stands_twice_among_many_is_found_at_once(tmp_path: Path) -> None:
    path = tmp_path / "index.json"
    path.write_bytes(JSON_BOMBS["names twice"])
    with pytest.raises(CorruptHeader, match="'199999' is in it twice"):
        read_json(str(path), 1 << 30, "the index")


# -- torch ----------------------------------------------------------------------------------------------------------

N = 8 * MIB
PICKLE_BOMBS = {
    "dicts": b"}" * N,
    "lists": b"]" * N,
    "sets": b"\x8f" * N,
    "marks": b"(" * N,
    "tuples": b"N\x85" * N,
    "nested tuples": b")" + b"\x85" * N,
    "marked tuples": b"(Nt" * N,
    "memo": b"N" + b"\x94" * N,
    "memo by number": b"N" + b"".join(b"r" + i.to_bytes(4, "little") for i in range(N)),
    "calls": b"ccollections\nOrderedDict\nq\0" + b"h\0)R" * N,
    "a long text": b"\x8d" + (1 << 62).to_bytes(8, "little"),
    "a long integer": b"\x8b\xff\xff\xff\x7f",
}


@pytest.mark.parametrize("name", PICKLE_BOMBS)
def test_pickles_that_unfold(tmp_path: Path, name: str) -> None:
    path = tmp_path / "f"
    path.write_bytes(b"\x80\x02" + PICKLE_BOMBS[name])
    refused("pickle", path, mib=500)


def test_a_compressed_record_is_not_unpacked(tmp_path: Path) -> None:
    """200 KiB that unpack to 200 MiB."""
    path = tmp_path / "f"
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("archive/data.pkl", bytes(200 * MIB))
    refused("zip", path, mib=8)


def test_records_with_sizes_that_lie(tmp_path: Path) -> None:
    sound = zipped({"archive/data.pkl": b"\x80\x02}.", "archive/version": b"3\n"})
    at = sound.index(b"PK\1\2")
    for i, size in enumerate((len(sound), 1 << 31, (1 << 32) - 2)):
        path = tmp_path / str(i)
        path.write_bytes(sound[: at + 20] + struct.pack("<II", size, size) + sound[at + 28 :])
        refused("zip", path, mib=4)


def test_a_directory_with_a_count_that_lies(tmp_path: Path) -> None:
    sound = io.BytesIO(zipped({"archive/data.pkl": b"\x80\x02}."})).getvalue()
    at = sound.index(b"PK\5\6")
    path = tmp_path / "f"
    path.write_bytes(sound[: at + 8] + struct.pack("<HH", 65535, 65535) + sound[at + 12 :])
    refused("zip", path, mib=4)


# -- HDF5 -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["many lists", "many dicts", "many numbers"])
def test_tree_specs_that_unfold(name: str) -> None:
    text = JSON_BOMBS[name].decode()
    for spec in (text, json.dumps([None, text])):
        with pytest.raises(CorruptHeader, match="more than 5000000 values"):
            parse_spec(spec, "f")


def test_contexts_that_are_nested_too_deeply() -> None:
    root = {"type": "builtins.dict", "context": "[" * 100_000, "children_spec": []}
    with pytest.raises(CorruptHeader, match="nested too deeply"):
        parse_spec(spec_text(root), "f")


@pytest.mark.parametrize("keys", [[[1], 2], [{"a": 1}, "b"], "ab", {"a": 1, "b": 2}])
def test_dicts_of_keys_that_are_none(keys: object) -> None:
    context = {"default_factory_module": "builtins", "default_factory_name": "int", "dict_context": keys}
    with pytest.raises(CorruptHeader):
        parse_spec(spec_text(node("collections.defaultdict", context, LEAF, LEAF)), "f")


@pytest.mark.parametrize("field", [{"dtypes": []}, {"dtypes": [[]]}, {"dtype": [], "shape": [2], "fill_value": 1}])
def test_dtypes_without_a_name(tmp_path: Path, field: dict[str, Any]) -> None:
    from ckptfs.formats.cerebras.reader import open_h5

    kind = "DeferredFullTensor" if "shape" in field else "TorchTensorSerializer"
    arrays = {"w": np.zeros(3, "f4")}
    path = write_checkpoint(tmp_path / "f", {"w": {"__TYPE__": kind, **field}, "n": scalar(1)}, arrays=arrays)
    source = open_h5(path, TileCache())
    assert source.items["w"].kind == "object"
    assert source.items["n"].value == 1
    source.close()


def test_names_that_are_no_text(tmp_path: Path) -> None:
    """A dataset of an old checkpoint without a tree spec, whose name is not UTF-8."""
    path = tmp_path / "f"
    with h5py.File(path, "w") as file:
        file.create_dataset(b"w\xff", data=1.0).attrs["__H5_TYPE__"] = "ScalarH5Type"
        file.create_dataset("n", data=2.0).attrs["__H5_TYPE__"] = "ScalarH5Type"
    from ckptfs.formats.cerebras.reader import open_h5

    source = open_h5(path, TileCache())
    assert {key: item.value for key, item in source.items.items()} == {"n": 2.0}
    source.close()


@pytest.mark.parametrize("name", ["lz4_total_huge", "lz4_block_huge", "lz4_total_small", "lz4_zeroed"])
def test_lz4_chunks_with_sizes_that_lie(name: str) -> None:
    found = run_file("h5-index", DATA / "h5" / "damaged" / f"{name}.mdl")
    assert found["outcome"] == "read"
    assert found["peak"] < 16 * MIB


def bomb(path: Path, filters: list[int], payload: bytes, size: int = 256 * MIB) -> Path:
    """A dataset of one chunk of *size* zeros."""
    with h5py.File(path, "w") as file:
        plist = h5py.h5p.create(h5py.h5p.DATASET_CREATE)
        plist.set_chunk((size,))
        for number in filters:
            plist.set_filter(number, h5py.h5z.FLAG_OPTIONAL, (6,) if number == 1 else ())
        space = h5py.h5s.create_simple((size,))
        dataset = h5py.h5d.create(file.id, b"w", h5py.h5t.NATIVE_UINT8, space, plist)
        dataset.write_direct_chunk((0,), payload)
    return path


def zeros(n: int) -> bytes:
    """*n* zeros through zlib."""
    packer = zlib.compressobj(9)
    return b"".join(packer.compress(bytes(min(MIB, n - i))) for i in range(0, n, MIB)) + packer.flush()


def read_one(tensor: Tensor) -> None:
    tensor.read_block(0, 0, np.empty((1, 1), np.uint8))


def test_large_chunks_in_a_small_file(tmp_path: Path) -> None:
    """With the checksum, which takes arrays of its own, below the compression. 256 MiB are the most for a chunk."""
    path = bomb(tmp_path / "f", [3, 1], zeros(64 * MIB + 4), 64 * MIB)
    assert path.stat().st_size < MIB
    found = run_file("h5-tensors", path)
    assert found.get("outcome") == "read", found
    assert found["peak"] < 3.5 * 64 * MIB
    assert found["effort"] < MAX_EFFORT


def test_larger_chunks_are_refused(tmp_path: Path) -> None:
    path = bomb(tmp_path / "f", [1], zlib.compress(b""), 257 * MIB)
    with tensors_of(path) as tensors, pytest.raises(CorruptChunk, match="too large"):
        read_one(tensors["w"])


def test_many_filters_are_refused(tmp_path: Path) -> None:
    path = bomb(tmp_path / "f", [1] * 7, zlib.compress(b"abc"), MIB)
    with tensors_of(path) as tensors, pytest.raises(CorruptChunk, match="7 filters"):
        read_one(tensors["w"])


def test_nodes_of_a_chunk_index_that_lie_in_each_other(tmp_path: Path) -> None:
    """Each node is 8 bytes further on and claims to be as long as the rest of the file: 65,000 nodes of 3 MiB."""
    path = tmp_path / "f"
    with h5py.File(path, "w") as file:
        file.create_dataset("w", data=np.zeros((40, 40), "u1"), chunks=(2, 2))
    data = bytearray(path.read_bytes())
    root = data.index(b"TREE\1")
    start = (len(data) + 7) // 8 * 8
    n = 60_000
    made = data.ljust(start + 8 * n + 40 * 65_535 + 24, b"\0")
    for at in range(start, start + 8 * n, 8):
        made[at : at + 8] = b"TREE\1\0" + struct.pack("<H", 65_535)
    children = [start + 8 * i for i in range(n)]
    level = start + 8 * n
    made += b"TREE\1\1" + struct.pack("<H", n) + bytes(16)
    made[root : root + 24] = b"TREE\1\2" + struct.pack("<H", 1) + bytes(16)
    struct.pack_into("<Q", made, root + 24 + 32, len(made) - 24)
    for child in children:
        made += bytes(32) + struct.pack("<Q", child)
    made[level:level] = b""
    base = made.index(struct.pack("<Q", len(data)))
    struct.pack_into("<Q", made, base, len(made))
    path.write_bytes(made)
    refused("h5-tensors", path, outcome="CorruptChunk")


def test_groups_that_share_their_members(tmp_path: Path) -> None:
    """1,000 groups whose trees are one tree: a million members from 1,000 entries."""
    path = tmp_path / "f"
    with h5py.File(path, "w") as file:
        for i in range(300):
            file.create_group(f"g{i:03}")
            file[f"d{i:03}"] = i
    data = bytearray(path.read_bytes())
    tree, heap = _root_group(data)
    for at in _symbols(data):
        if int.from_bytes(data[at + 16 : at + 20], "little") == 1:  # a cached group: its tree and heap follow
            (own,) = struct.unpack_from("<Q", data, at + 24)
            data[own : own + 24 + 16 * 32] = data[tree : tree + 24 + 16 * 32]
            struct.pack_into("<Q", data, at + 32, heap)
    path.write_bytes(data)
    refused("h5-index", path, mib=100)


def _root_group(data: bytes) -> tuple[int, int]:
    tree, heap = struct.unpack_from("<QQ", data, 80)
    return tree, heap


def _symbols(data: bytes) -> list[int]:
    found, at = [], data.find(b"SNOD")
    while at >= 0:
        n = int.from_bytes(data[at + 6 : at + 8], "little")
        found += [at + 8 + 40 * i for i in range(n)]
        at = data.find(b"SNOD", at + 1)
    return found


def test_metadata_that_are_nested_or_many(tmp_path: Path) -> None:
    path = write_checkpoint(tmp_path / "f", {"n": scalar(1)})
    with h5py.File(path, "a") as file:
        for name, text in {"n": "[" * 50_000, "m": json.dumps([[]] * 2_000_000)}.items():
            file.attrs.create(f"{name}.__metadata__", text)
    refused("h5-child", path, mib=600, outcome="read")


def test_files_are_closed_after_a_refusal(tmp_path: Path) -> None:
    from tests.formats.samples import n_fds

    before = n_fds()
    path = with_header(tmp_path / "f", JSON_BOMBS["nested"])
    for _ in range(20):
        with pytest.raises(CorruptHeader):
            read_json(str(path), 1 << 30, "it")
    file = open_file(path)
    assert n_fds() == before + 1
    file.close()
