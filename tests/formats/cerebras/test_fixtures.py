"""Checkpoints that the real writer made, whole and damaged: values by their recorded hashes."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ckptfs.errors import CkptfsError, CorruptChunk, CorruptHeader, Incomplete, UnknownFormat, Unsafe
from ckptfs.formats.cerebras.reader import open_h5
from ckptfs.formats.source import Container, Item, Source
from ckptfs.tensors.cache import TileCache
from ckptfs.tensors.ranges import to_bytes, to_numpy
from tests.formats.hdf5.h5_files import DATA

WRITTEN = sorted((DATA / "v05").glob("*.mdl"))
GOOD = {
    "model.w": "3d9afc16271328046babffc0f48fc475d0db28ab1a13a9d75c0e88d8167cfe42",
    "model.b": "9cb8c5c14336e9f80eb9600d4a0c6b0c97b52006158d73d9cead55ff105157c7",
}


def damaged(name: str) -> Source:
    return open_h5(DATA / "h5" / "damaged" / f"{name}.mdl", TileCache())


def plain(value: Any) -> Any:
    """A recorded value: large ints and floats stand as text."""
    if isinstance(value, dict) and "$int" in value:
        return int(value["$int"])
    if isinstance(value, dict) and "$float" in value:
        return float.fromhex(value["$float"])
    return value


def check(item: Item, want: dict[str, Any]) -> None:
    """One item against the recorded value of its key."""
    if want["kind"] in ("tensor", "ndarray"):
        assert item.kind == {"tensor": "tensor", "ndarray": "array"}[want["kind"]]
        assert item.tensor is not None
        assert list(item.tensor.shape) == want["shape"]
        if want["kind"] == "tensor":
            assert item.tensor.dtype.name == want["dtype"]
        data = to_bytes(item.tensor)
        if want["dtype"] == ">i4":  # recorded as stored, shown as little-endian
            data = to_numpy(item.tensor).astype(">i4").tobytes()
        if "sha256" in want:
            assert hashlib.sha256(data).hexdigest() == want["sha256"]
    elif want["kind"] in ("scalar", "str"):
        assert repr(item.value) == repr(plain(want["value"]))
    else:
        assert item.kind == want["kind"]
        assert item.value is None


@pytest.mark.parametrize("path", WRITTEN, ids=lambda path: path.stem)
def test_values_of_the_real_writer(path: Path) -> None:
    want = json.loads(path.with_suffix(".expected.json").read_text())
    source = open_h5(path, TileCache())
    flat = want.get("flat", {})
    assert (source.format, source.format_version, source.release) == ("cerebras-h5", "0.5", "2.10.0")
    assert list(source.items) == list(flat)
    for key, value in flat.items():
        check(source.items[key], value)
    for key, first in want.get("links", {}).items():
        assert source.items[key].tied_to == first
        assert source.items[key].tensor is source.items[first].tensor
    source.close()


@pytest.mark.parametrize("path", [p for p in WRITTEN if p.stem != "deferred_full_uninit"], ids=lambda path: path.stem)
def test_tree_of_the_real_writer(path: Path) -> None:
    want = json.loads(path.with_suffix(".expected.json").read_text())
    source = open_h5(path, TileCache())
    assert source.tree is not None
    assert outline(source.tree) == recorded_outline(want["tree"])
    source.close()


def outline(node: Container | str) -> Any:
    if isinstance(node, str):
        return "leaf"
    children = [outline(child) for child in node.children]
    return node.type.lower(), None if node.keys is None else list(node.keys), children


def recorded_outline(tree: dict[str, Any]) -> Any:
    if "items" not in tree:
        return "leaf"
    kind = {"defaultdict": "dict"}.get(tree["kind"], tree["kind"])
    if kind not in ("dict", "ordereddict"):
        return kind, None, [recorded_outline(child) for child in tree["items"]]
    return kind, [key["key"] for key, _ in tree["items"]], [recorded_outline(child) for _, child in tree["items"]]


def test_trainer_metadata() -> None:
    source = open_h5(DATA / "v05" / "trainer_like.mdl", TileCache())
    assert source.metadata == [{"version": "2.10.0", "model_name": "gpt2"}]
    source.close()


def test_class_names_without_unpickling() -> None:
    source = open_h5(DATA / "v05" / "objects.mdl", TileCache())
    names = {key: item.class_name for key, item in source.items.items() if item.kind == "object"}
    assert names["bytes"] == names["big"] == "builtins.bytes"
    assert names["complex"] == "builtins.complex"
    assert names["dtype"] == "torch.float16"
    assert names["device"] == "torch.device"
    source.close()


@pytest.mark.parametrize(
    "name",
    ["good", "appended_garbage", "userblock_512", "version_0_6", "shape_mismatch", "dtype_mismatch", "lz4_block_huge"],
)
def test_intact_values(name: str) -> None:
    source = damaged(name)
    for key, sha256 in GOOD.items():
        tensor = source.items[key].tensor
        assert tensor is not None
        assert hashlib.sha256(to_bytes(tensor)).hexdigest() == sha256
    assert (source.items["n"].value, source.items["s"].value) == (5, "text")
    source.close()


@pytest.mark.parametrize(
    ("name", "error", "what"),
    [
        ("trunc_00", CorruptHeader, "superblock"),
        ("trunc_01", CorruptHeader, "truncated: 470 of 47078 bytes"),
        ("trunc_50", CorruptHeader, "truncated: 23539 of 47078 bytes"),
        ("trunc_90", CorruptHeader, "truncated"),
        ("trunc_99", CorruptHeader, "truncated"),
        ("trunc_last_byte", CorruptHeader, "truncated: 47077 of 47078 bytes"),
        ("not_hdf5", CorruptHeader, "superblock"),
        ("no_success", Incomplete, "interrupted"),
        ("success_false", Incomplete, "interrupted"),
        ("no_spec", UnknownFormat, "__spec__"),
        ("no_version", CorruptHeader, "no __version__"),
        ("version_int_0", UnknownFormat, "version 0"),
        ("bad_hex_spec_v04", CorruptHeader, "not hexadecimal text"),
        ("bad_pickle_spec_v04", CorruptHeader, "opcode|pickle"),
        ("evil_spec_v04", Unsafe, "calls io.open"),
        ("bad_json_spec", CorruptHeader, "tree spec"),
        ("unknown_spec_type", CorruptHeader, "os.system"),
        ("spec_protocol_99", CorruptHeader, "99"),
    ],
)
def test_refused_files(name: str, error: type[CkptfsError], what: str) -> None:
    with pytest.raises(error, match=what) as caught:
        damaged(name)
    assert f"{name}.mdl: " in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("name", "key", "kind", "what"),
    [
        ("missing_key_metadata", "model.w", "object", "metadata are missing"),
        ("missing_dataset", "model.w", "object", "dataset is missing"),
        ("dtype_not_a_dtype", "model.w", "object", "dtype"),
        ("unknown_type", "n", "object", "SomethingElse"),
        ("tied_cycle", "n", "link", "circle"),
        ("tied_cycle", "s", "link", "circle"),
        ("tied_missing", "n", "link", "nowhere"),
        ("link_missing_file", "model.w", "link", "no such file"),
        ("link_missing_key", "model.w", "link", "dataset is missing"),
        ("link_traversal", "model.w", "link", "outside of the checkpoint's folder"),
        ("link_absolute", "model.w", "link", "outside of the checkpoint's folder"),
        ("link_s3", "model.w", "link", "outside"),
        ("link_self", "model.w", "link", "dataset is missing"),
        ("link_to_link", "model.w", "link", "dataset is missing"),
        ("h5_external_link", "model.w", "link", "external link"),
        ("h5_external_link_traversal", "model.w", "link", "external link"),
        ("h5_external_storage", "model.w", "link", "external storage"),
        ("h5_external_storage_traversal", "model.w", "link", "external storage"),
        ("evil_object_bytes", "obj", "object", "pickle of 63 bytes"),
    ],
)
def test_refused_keys(name: str, key: str, kind: str, what: str) -> None:
    """Only that key is refused, and a warning says so."""
    source = damaged(name)
    item = source.items[key]
    assert item.kind == kind
    assert item.tensor is None
    assert what in str(item.reason)
    assert any(warning.startswith(f"{key}: ") for warning in source.warnings)
    for other in source.tensors().values():
        to_bytes(other)
    source.close()


@pytest.mark.parametrize("name", ["lz4_total_huge", "lz4_total_small", "lz4_zeroed"])
def test_damaged_chunks(name: str) -> None:
    source = damaged(name)
    with pytest.raises(CorruptChunk, match=r"model\.w: chunk 0"):
        to_bytes(source.tensors()["model.w"])
    assert hashlib.sha256(to_bytes(source.tensors()["model.b"])).hexdigest() == GOOD["model.b"]
    source.close()


@pytest.mark.parametrize("name", ["link_ok", "link_traversal_inside"])
def test_links_inside_the_folder(name: str) -> None:
    source = damaged(name)
    assert hashlib.sha256(to_bytes(source.tensors()["model.w"])).hexdigest() == GOOD["model.w"]
    assert len(source.files) == 2
    source.close()


def test_links_out_of_the_folder_when_allowed(tmp_path: Path) -> None:
    inside = tmp_path / "inside"
    inside.mkdir()
    (inside / "link_ok.mdl").write_bytes((DATA / "h5" / "damaged" / "link_ok.mdl").read_bytes())
    (tmp_path / "good.mdl").write_bytes((DATA / "h5" / "damaged" / "good.mdl").read_bytes())
    (inside / "good.mdl").symlink_to(tmp_path / "good.mdl")
    refused = open_h5(inside / "link_ok.mdl", TileCache())
    assert refused.items["model.w"].kind == "link"
    allowed = open_h5(inside / "link_ok.mdl", TileCache(), follow_links=True)
    assert hashlib.sha256(to_bytes(allowed.tensors()["model.w"])).hexdigest() == GOOD["model.w"]
    refused.close()
    allowed.close()


def test_conflicts_are_reported() -> None:
    for name, what in (("shape_mismatch", "shape"), ("dtype_mismatch", "float64"), ("version_0_6", "0.6")):
        source = damaged(name)
        assert any(what in warning for warning in source.warnings)
        source.close()


def test_writer_bugs() -> None:
    doubled, lost, alias = damaged("dup_dotted"), damaged("defaultdict3"), damaged("slash_alias")
    assert list(doubled.items) == ["a.b"]
    assert any("a.b" in warning for warning in doubled.warnings)
    assert any("defaultdict" in warning for warning in lost.warnings)
    assert len(lost.items) == 2
    assert to_bytes(alias.tensors()["abs"]) == to_bytes(alias.tensors()["/abs"])
    for source in (doubled, lost, alias):
        source.close()


def test_keys_keep_their_names() -> None:
    source = damaged("key_traversal")
    assert list(source.items) == ["../../escape", "ok"]
    assert np.isfinite(to_numpy(source.tensors()["../../escape"])).all()
    source.close()
