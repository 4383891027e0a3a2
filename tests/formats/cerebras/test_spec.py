"""Tree specs and per-key metadata beyond what the recorded checkpoints hold."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from ckptfs.errors import CorruptHeader
from ckptfs.formats.cerebras import spec
from ckptfs.formats.cerebras.reader import open_h5
from ckptfs.formats.cerebras.spec import MAX_DEPTH, parse_spec
from ckptfs.formats.source import Container, Item
from ckptfs.tensors.cache import TileCache
from ckptfs.tensors.ranges import to_bytes, to_numpy
from tests.formats.hdf5.h5_files import LEAF, node, scalar, spec_text, write_checkpoint


def test_flattened_keys() -> None:
    root = node(
        "builtins.dict",
        ["b", 7, None, 1.5, True],
        node("builtins.list", None, LEAF, node("builtins.tuple", None, LEAF)),
        LEAF,
        node("collections.OrderedDict", ["x.y"], LEAF),
        node("builtins.dict", []),
        node("collections.namedtuple", "Pair", LEAF),
    )
    tree, keys, warnings = parse_spec(spec_text(root), "f")
    assert keys == ["b.0", "b.1.0", "7", "None.x.y", "True.0"]
    assert tree.keys == ("b", 7, None, 1.5, True)
    assert tree.children[2] == Container("OrderedDict", ("x.y",), ("None.x.y",))
    assert warnings == []


def nested(depth: int) -> str:
    """Written by hand: json.dumps has its own limit."""
    leaf = '{"type": null, "context": null, "children_spec": []}'
    level = '{"type": "builtins.list", "context": "null", "children_spec": ['
    return json.dumps([None, f"[1, {level * depth}{leaf}{']}' * depth}]"])


def by_hand(root: str) -> str:
    return json.dumps([None, f"[1, {root}]"])


def test_keys_that_look_like_parts_of_a_spec() -> None:
    """Whatever a key is called, the tree is the one that JSON says."""
    leaf = json.dumps(LEAF)
    names = ["null", leaf, '": null', '"null"', "a", f"x{leaf}"]
    _, keys, _ = parse_spec(spec_text(node("builtins.dict", names, *[LEAF] * len(names))), "f")
    assert keys == names
    leaf_in_other_words = '{"children_spec": [], "context":null, "type": null}'
    words = f'{{"type": "builtins.list", "context": "null", "children_spec": [{leaf}, {leaf_in_other_words}]}}'
    assert parse_spec(by_hand(words), "f")[1] == ["0", "1"]


def test_leaves_count_as_values(monkeypatch: pytest.MonkeyPatch) -> None:
    tree = json.dumps([1, node("builtins.list", None, *[LEAF] * 10)])
    escaped = "".join(f"u{ord(letter):04x}".rjust(6, "\\") for letter in tree)  # has nothing to count itself
    text = f'[null, "{escaped}"]'
    n = sum(tree.count(mark) for mark in "{[,")
    monkeypatch.setattr(spec, "MAX_VALUES", n)
    assert len(parse_spec(text, "f")[1]) == 10
    monkeypatch.setattr(spec, "MAX_VALUES", n - 1)
    with pytest.raises(CorruptHeader, match="more than"):
        parse_spec(text, "f")


def test_depth_is_bounded() -> None:
    _, keys, _ = parse_spec(nested(MAX_DEPTH), "f")
    assert keys == [".".join("0" * MAX_DEPTH)]
    for depth in (MAX_DEPTH + 1, 1100, 200_000):
        with pytest.raises(CorruptHeader, match="nested deeper than 300 levels"):
            parse_spec(nested(depth), "f")


@pytest.mark.parametrize(
    "text",
    [
        "",
        "{}",
        "[]",
        "[1]",
        '[null, "[2, {}]"]',
        '[null, "[1, {}]"]',
        '[null, "[1, [1, 2]]"]',
        spec_text(LEAF),
        by_hand("null"),
        by_hand('{"type": "builtins.list", "context": "null", "children_spec": [null]}'),
        by_hand('{"type": "builtins.dict", "context": "[\\"a\\"]", "children_spec": [null]}'),
        spec_text({"type": "builtins.dict", "context": "[1, 2]", "children_spec": [LEAF]}),
        spec_text({"type": "builtins.dict", "context": "[[1]]", "children_spec": [LEAF]}),
        spec_text({"type": "builtins.dict", "context": "5", "children_spec": [LEAF]}),
        spec_text({"type": ["os"], "context": "5", "children_spec": []}),
        spec_text({"type": "os.system", "context": "[]", "children_spec": []}),
    ],
)
def test_broken_specs(text: str) -> None:
    with pytest.raises(CorruptHeader, match=r"^f: "):
        parse_spec(text, "f")


def only_item(tmp_path: Path, fields: object, arrays: dict[str, Any] | None = None) -> tuple[Item, list[str]]:
    source = open_h5(write_checkpoint(tmp_path / "one.mdl", {"k": fields}, arrays=arrays), TileCache())
    return source.items["k"], source.warnings


def constant(dtype: str, shape: object, value: object) -> dict[str, Any]:
    return {"shape": shape, "dtype": dtype, "fill_value": value, "__TYPE__": "DeferredFullTensor", "__NONE__": True}


def test_constant_tensors(tmp_path: Path) -> None:
    item, _ = only_item(tmp_path, constant("torch.bfloat16", [3, 2], 0.3))
    assert item.tensor is not None
    assert to_bytes(item.tensor) == np.full(6, 0.3, ml_dtypes.bfloat16).tobytes()
    item, _ = only_item(tmp_path, constant("torch.complex128", [2], 2))
    assert item.tensor is not None
    assert to_numpy(item.tensor).tolist() == [2 + 0j, 2 + 0j]
    item, warnings = only_item(tmp_path, constant("torch.int32", [4], None))
    assert item.tensor is not None
    assert to_bytes(item.tensor) == bytes(16)
    assert warnings == ["k: was never initialised; it is shown as zeros"]


@pytest.mark.parametrize(
    "fields",
    [
        constant("torch.load", [2], 0),
        constant("torch.float32", [1 << 60, 1 << 60], 0),
        constant("torch.float32", [-1], 0),
        constant("torch.float32", 5, 0),
        constant("torch.float32", [2], "x"),
        constant("torch.int8", [2], 1000),
        {"__TYPE__": "ScalarSerializer"},
        {"__TYPE__": "ScalarSerializer", "scalar_value": [1]},
        {"__TYPE__": ["unhashable"]},
        {"__TYPE__": "TorchTensorSerializer"},
        {},
        [],
        None,
        5,
    ],
)
def test_broken_metadata_concern_one_key(fields: object, tmp_path: Path) -> None:
    path = write_checkpoint(tmp_path / "two.mdl", {"k": fields, "other": scalar(7)}, arrays={"k": np.zeros(3)})
    source = open_h5(path, TileCache())
    assert source.items["k"].kind == "object"
    assert source.items["k"].reason
    assert source.items["other"].value == 7
    source.close()


@pytest.mark.parametrize(
    ("said", "stored", "shown"),
    [
        ("torch.bfloat16", "<i2", "bfloat16"),
        ("torch.int16", "<i2", "int16"),
        ("torch.bool", "|b1", "bool"),
        ("torch.float8_e5m2", "|u1", "float8_e5m2"),
        ("torch.float32", "<f8", "float64"),
        ("torch.bfloat16", "<f4", "float32"),
    ],
)
def test_dtype_of_a_tensor(said: str, stored: str, shown: str, tmp_path: Path) -> None:
    """The metadata's where it is stored in that type, else the stored one with a warning."""
    array = np.arange(6).reshape(2, 3).astype(stored)
    fields = {"__TYPE__": "TorchTensorSerializer", "__TORCH__": True, "dtypes": [said], "shapes": [[2, 3]]}
    item, warnings = only_item(tmp_path, fields, {"k": array})
    assert item.tensor is not None
    assert item.tensor.dtype.name == shown
    assert to_bytes(item.tensor) == array.tobytes()
    assert bool(warnings) == (shown != said.removeprefix("torch."))


def test_file_tensors_stay_inside_the_file(tmp_path: Path) -> None:
    (tmp_path / "raw.bin").write_bytes(bytes(range(24)))
    fields = {"filepath": "raw.bin", "shape": [2, 3], "dtype": "torch.int32", "__TYPE__": "DeferredFileTensor"}
    item, _ = only_item(tmp_path, fields)
    assert item.tensor is not None
    assert to_bytes(item.tensor) == bytes(range(24))
    item, _ = only_item(tmp_path, {**fields, "shape": [2, 4]})
    assert (item.kind, item.tensor) == ("link", None)
    item, _ = only_item(tmp_path, {**fields, "filepath": "../raw.bin"})
    assert "outside" in str(item.reason)
    item, _ = only_item(tmp_path, {**fields, "dtype": "torch.load"})
    assert (item.kind, item.tensor) == ("object", None)


def test_trainer_params_are_plain_values(tmp_path: Path) -> None:
    entry = node(
        "builtins.dict",
        ["version", "params"],
        LEAF,
        node("builtins.dict", ["sizes"], node("builtins.list", None, LEAF)),
    )
    root = node("builtins.dict", ["__metadata__", "n"], node("builtins.list", None, entry, entry), LEAF)
    fields = {"n": scalar(1)}
    for i in range(2):
        fields[f"__metadata__.{i}.version"] = {"string_value": f"2.{i}", "__TYPE__": "StringSerializer"}
        fields[f"__metadata__.{i}.params.sizes.0"] = scalar(i)
    source = open_h5(write_checkpoint(tmp_path / "m.mdl", fields, spec_text(root)), TileCache())
    assert source.metadata == [
        {"version": "2.0", "params": {"sizes": [0]}},
        {"version": "2.1", "params": {"sizes": [1]}},
    ]
    source.close()
