"""Checkpoints of formats 0.1 to 0.4: recorded values, and what single datasets say about themselves."""

from __future__ import annotations

import contextlib
import json
import random
import subprocess
import sys
from pathlib import Path
from typing import Any
from urllib.parse import quote

import h5py
import numpy as np
import pytest

from ckptfs.errors import CkptfsError, CorruptChunk, CorruptHeader, UnknownFormat
from ckptfs.formats.cerebras.reader import open_h5
from ckptfs.formats.source import Container, Item, Source
from ckptfs.tensors.cache import TileCache
from ckptfs.tensors.ranges import to_bytes, to_numpy
from ckptfs.tensors.tensor import nbytes
from tests.formats.cerebras.legacy_specs import leaf, spec_hex, tree
from tests.formats.cerebras.test_fixtures import check
from tests.formats.hdf5.h5_files import DATA

LEGACY = DATA / "legacy"
FILE = "DeferredFileTensor"
FLOAT32 = b"\x80\x04\x8c\x05torch\x8c\x07float32\x93.".hex()


def legacy(name: str) -> Source:
    return open_h5(LEGACY / f"{name}.mdl", TileCache())


def dataset(file: h5py.File, key: str, data: Any = None, /, **attributes: Any) -> None:
    """A dataset under *key* as the old writer names it; a null dataset without *data*."""
    data = h5py.Empty("f4") if data is None else data
    made = file.create_dataset(quote(key, safe=""), data=data)
    for name, value in attributes.items():
        made.attrs["__H5_TYPE__" if name == "type" else name] = value


def checkpoint(path: Path, keys: list[str], version: float | None = 0.4) -> h5py.File:
    """An open file whose tree spec is a flat dict of *keys*."""
    file = h5py.File(path, "w")
    file.attrs["__spec__"] = spec_hex(tree("dict", keys, *[leaf() for _ in keys]))
    if version is not None:
        file.attrs["__version__"] = version
    return file


def items_of(path: Path) -> dict[str, Item]:
    source = open_h5(path, TileCache())
    items = source.items
    for item in items.values():
        if item.tensor is not None:
            to_bytes(item.tensor)
    source.close()
    return items


@pytest.mark.parametrize("path", sorted(LEGACY.glob("*.mdl")), ids=lambda path: path.stem)
def test_recorded_values(path: Path) -> None:
    flat = json.loads(path.with_suffix(".expected.json").read_text())["flat"]
    source = open_h5(path, TileCache())
    assert source.items.keys() == flat.keys()
    if source.tree is not None:
        assert list(source.items) == list(flat)
    for key, want in flat.items():
        check(source.items[key], want)
    source.close()


@pytest.mark.parametrize(
    ("name", "version", "release"),
    [
        ("v01_no_version", "0.1", None),
        ("v02_untyped", "0.2", None),
        ("v03_basic", "0.3", None),
        ("v04_basic", "0.4", "2.2.1"),
        ("v04_no_cstorch_version", "0.4", None),
    ],
)
def test_versions(name: str, version: str, release: str | None) -> None:
    source = legacy(name)
    assert (source.format, source.format_version, source.release) == ("cerebras-h5", version, release)
    source.close()


def test_nested_state() -> None:
    source = legacy("v04_basic")
    root = source.tree
    assert isinstance(root, Container)
    assert (root.type, root.keys) == ("dict", ("model", "optimizer", "global_step", "note", "np", "obj"))
    model, optimizer, step = root.children[:3]
    assert isinstance(model, Container)
    assert isinstance(optimizer, Container)
    assert model.type == "OrderedDict"
    assert model.children[3] == "model.norm/scale"
    assert step == "global_step"
    _, groups = optimizer.children
    assert isinstance(groups, Container)
    assert (groups.type, groups.keys) == ("list", None)
    group = groups.children[0]
    assert isinstance(group, Container)
    assert isinstance(group.children[1], Container)
    assert group.children[1] == Container(
        "tuple", None, ("optimizer.param_groups.0.betas.0", "optimizer.param_groups.0.betas.1")
    )
    source.close()


def test_hard_links_are_tied() -> None:
    source = legacy("v04_tied_hardlink")
    first, second = source.items.values()
    assert second.tied_to == first.key
    assert second.tensor is first.tensor
    assert first.tied_to is None
    source.close()


def test_copies_are_not_tied(tmp_path: Path) -> None:
    with checkpoint(tmp_path / "c.mdl", ["a", "b", "e", "f"]) as file:
        for key in "ab":
            dataset(file, key, np.ones(3, "f4"), type="TorchTensorH5Type", is_bfloat16=False)
        for key in "ef":
            dataset(file, key, np.ones((0, 3), "f4"), type="TorchTensorH5Type", is_bfloat16=False)
    assert all(item.tied_to is None for item in items_of(tmp_path / "c.mdl").values())


def test_interrupted_save(tmp_path: Path) -> None:
    """The spec is written first: what is not there yet is None, and one warning counts it."""
    keys = [f"model.{i}" for i in range(20)]
    with checkpoint(tmp_path / "c.mdl", keys) as file:
        for key in keys[:6]:
            dataset(file, key, np.ones(3, "f4"), type="TorchTensorH5Type")
    source = open_h5(tmp_path / "c.mdl", TileCache())
    assert [item.kind for item in source.items.values()] == ["tensor"] * 6 + ["none"] * 14
    assert source.warnings[0].startswith("14 of 20 keys have no data")
    assert "model.6" in source.warnings[0]
    source.close()


def test_trainer_metadata(tmp_path: Path) -> None:
    inner = tree("dict", ["version", "model_name"], leaf(), leaf())
    root = tree("dict", ["__metadata__", "n"], tree("list", None, inner), leaf())
    with h5py.File(tmp_path / "c.mdl", "w") as file:
        file.attrs["__spec__"] = spec_hex(root)
        file.attrs["__version__"] = 0.4
        dataset(file, "__metadata__.0.version", type="StringH5Type", string_value="2.2.0")
        dataset(file, "__metadata__.0.model_name", type="StringH5Type", string_value="gpt2")
        dataset(file, "n", 3, type="ScalarH5Type")
    source = open_h5(tmp_path / "c.mdl", TileCache())
    assert source.metadata == [{"version": "2.2.0", "model_name": "gpt2"}]
    source.close()


@pytest.mark.parametrize(
    "value",
    [0, -(2**63), 2**63 - 1, True, False, 0.1, float("inf"), 5e-324],
)
def test_scalars_keep_their_type(tmp_path: Path, value: bool | int | float) -> None:
    with checkpoint(tmp_path / "c.mdl", ["typed", "untyped"], 0.3) as file:
        dataset(file, "typed", value, type="ScalarH5Type")
        dataset(file, "untyped", value, is_scalar=True)
    for item in items_of(tmp_path / "c.mdl").values():
        assert item.kind == "scalar"
        assert repr(item.value) == repr(value)


@pytest.mark.parametrize("key", ["a/b", "a%2Fb", "ключ.weight", "with space", "..", "/abs", "a.b:c*d?", "~tilde_-."])
def test_quoted_names(tmp_path: Path, key: str) -> None:
    with checkpoint(tmp_path / "c.mdl", [key]) as file:
        dataset(file, key, np.arange(3.0), type="TorchTensorH5Type")
    item = items_of(tmp_path / "c.mdl")[key]
    assert item.tensor is not None
    assert item.tensor.shape == (3,)


@pytest.mark.parametrize(("version", "kind"), [(0.1, "tensor"), (0.3, "tensor"), (0.4, "array")])
def test_numpy_arrays_exist_since_format_0_4(tmp_path: Path, version: float, kind: str) -> None:
    with checkpoint(tmp_path / "c.mdl", ["a"], version) as file:
        dataset(file, "a", np.arange(3, dtype="i8"), type="NumpyArrayH5Type", is_bfloat16=False)
    assert items_of(tmp_path / "c.mdl")["a"].kind == kind


@pytest.mark.parametrize(
    ("attributes", "kind", "what"),
    [
        ({"type": "SomethingElse"}, "object", "SomethingElse"),
        ({"type": "ObjectH5Type", "object_value": "80044e2e"}, "object", "pickle of 4 bytes"),
        ({"type": "ObjectH5Type"}, "object", "pickle is missing"),
        ({"type": "ApplianceInfoH5Type", "object_value": "80044e2e"}, "object", "pickle"),
        ({"type": "TorchTensorH5Type"}, "object", "holds no data"),
        ({"type": "ScalarH5Type"}, "object", "is not a number"),
        ({"type": "StringH5Type"}, "object", "broken"),
        ({"type": "DeferredGraphTensor", "jit_graph": "graph()"}, "object", "TorchScript"),
        ({"type": FILE, "filepath": "/etc/hostname", "shape": [2], "dtype": FLOAT32}, "link", "outside"),
        ({"type": FILE, "filepath": "gone.bin", "shape": [2], "dtype": FLOAT32}, "link", "no such file"),
        ({"type": FILE, "filepath": "c.mdl", "shape": [2**40], "dtype": FLOAT32}, "link", "too short"),
        ({"type": FILE, "filepath": "c.mdl", "shape": [-1], "dtype": FLOAT32}, "object", "broken"),
        ({"type": FILE, "filepath": "c.mdl", "shape": [2], "dtype": "zz"}, "object", "broken"),
        ({"type": FILE, "filepath": "c.mdl", "shape": [2], "dtype": b"\x80\x04N.".hex()}, "object", "dtype"),
        (
            {"type": FILE, "filepath": "c.mdl", "shape": [2], "dtype": b"\x80\x04cos\nsystem\n.".hex()},
            "object",
            "os.system",
        ),
        ({"type": "DeferredH5Tensor", "filepath": "../c.mdl", "key": "a"}, "link", "outside"),
        ({"type": "DeferredH5Tensor", "filepath": "s3://bucket/c.mdl", "key": "a"}, "link", "outside"),
        ({"type": "DeferredH5Tensor", "filepath": "c.mdl", "key": "gone"}, "link", "dataset is missing"),
        ({"type": "DeferredH5Tensor", "link_to_self": True, "key": "a"}, "link", "circle"),
        ({"type": "DeferredH5Tensor", "link_to_self": True, "key": "gone"}, "link", "does not exist"),
        ({"type": "DeferredH5Tensor"}, "object", "broken"),
        ({"type": "DeferredFullTensor", "shape": [2**60, 2**60], "fill_value": 1.0}, "object", "broken"),
        ({"type": "DeferredFullTensor", "shape": [2], "fill_value": "1"}, "object", "fill value is a str"),
    ],
)
def test_refused_keys(tmp_path: Path, attributes: dict[str, Any], kind: str, what: str) -> None:
    with checkpoint(tmp_path / "c.mdl", ["a", "ok"]) as file:
        dataset(file, "a", **attributes)
        dataset(file, "ok", np.arange(3.0), type="TorchTensorH5Type")
    source = open_h5(tmp_path / "c.mdl", TileCache())
    assert (source.items["a"].kind, source.items["a"].tensor) == (kind, None)
    assert what in str(source.items["a"].reason)
    assert any(warning.startswith("a: ") for warning in source.warnings)
    assert source.items["ok"].tensor is not None
    source.close()


def test_links_to_other_files(tmp_path: Path) -> None:
    with checkpoint(tmp_path / "base.mdl", ["w/x", "link", "old"], 0.3) as file:
        dataset(file, "w/x", np.arange(6, dtype="f4").reshape(2, 3), type="NumpyArrayH5Type")
        dataset(file, "link", type="DeferredH5Tensor", link_to_self=True, key="w%2Fx")
        dataset(file, "old", np.arange(2, dtype="f4"), is_bfloat16=False)
    with checkpoint(tmp_path / "c.mdl", ["a", "b", "c"]) as file:
        for key, target in (("a", "w%2Fx"), ("b", "link"), ("c", "old")):
            dataset(file, key, type="DeferredH5Tensor", filepath="base.mdl", key=target)
    source = open_h5(tmp_path / "c.mdl", TileCache())
    found = source.tensors()
    assert to_numpy(found["a"]).tolist() == [[0, 1, 2], [3, 4, 5]]
    assert to_numpy(found["c"]).tolist() == [0, 1]
    assert source.items["a"].kind == "tensor"  # as the version of the file that holds it says
    assert "another link" in str(source.items["b"].reason)
    source.close()


def test_link_to_a_dataset_outside_of_the_state(tmp_path: Path) -> None:
    with checkpoint(tmp_path / "c.mdl", ["a"]) as file:
        dataset(file, "a", type="DeferredH5Tensor", link_to_self=True, key="orphan")
        dataset(file, "orphan", np.arange(3, dtype="f4"), type="TorchTensorH5Type")
    source = open_h5(tmp_path / "c.mdl", TileCache())
    assert to_numpy(source.tensors()["a"]).tolist() == [0, 1, 2]
    assert list(source.items) == ["a"]
    source.close()


def test_flat_file_needs_typed_datasets(tmp_path: Path) -> None:
    with h5py.File(tmp_path / "c.h5", "w") as file:
        file["x"] = np.arange(3)
    with pytest.raises(UnknownFormat, match="__spec__"):
        open_h5(tmp_path / "c.h5", TileCache())
    source = legacy("tf_flat_no_spec")
    assert source.tree is None
    assert any("flat list" in warning for warning in source.warnings)
    source.close()


def test_index_of_old_checkpoints_is_no_checkpoint() -> None:
    with pytest.raises(UnknownFormat, match="__spec__"):
        open_h5(LEGACY / "ckpt_info", TileCache())


def test_broken_spec_leaves_no_open_file(tmp_path: Path) -> None:
    with checkpoint(tmp_path / "c.mdl", ["a"]) as file:
        file.attrs["__spec__"] = "8004"
    before = len(list(Path("/proc/self/fd").iterdir()))
    with pytest.raises(CorruptHeader):
        open_h5(tmp_path / "c.mdl", TileCache())
    assert len(list(Path("/proc/self/fd").iterdir())) == before


@pytest.mark.slow
@pytest.mark.parametrize("name", ["v04_basic", "v03_deferred", "v01_no_version", "v04_comp_lzf"])
def test_random_damage(name: str, tmp_path: Path) -> None:
    """Whatever the bytes are: items and data, or one of our errors."""
    good = (LEGACY / f"{name}.mdl").read_bytes()
    rng = random.Random(name)
    path = tmp_path / "c.mdl"
    opened = 0
    for _ in range(25):
        data = bytearray(good)
        for _ in range(rng.randrange(1, 20)):
            data[rng.randrange(len(data))] = rng.randrange(256)
        path.write_bytes(data)
        try:
            source = open_h5(path, TileCache())
        except CkptfsError as error:
            assert str(path) in str(error)
            continue
        opened += 1
        for tensor in source.tensors().values():
            if nbytes(tensor) < 1 << 24:
                with contextlib.suppress(CkptfsError):
                    to_bytes(tensor)
        source.close()
    assert opened > 0


def test_hdf5_stays_out_of_the_process() -> None:
    """Neither opening nor reading loads h5py here, also for a filter that needs it."""
    code = (
        "import sys; from ckptfs.tensors.cache import TileCache; from ckptfs.formats.cerebras.reader import open_h5;"
        "from ckptfs.tensors.ranges import to_bytes; source = open_h5(sys.argv[1], TileCache());"
        "print(*(len(to_bytes(t)) for t in source.tensors().values()), 'h5py' in sys.modules)"
    )
    command = [sys.executable, "-W", "error", "-c", code, str(LEGACY / "v04_comp_lzf.mdl")]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["24000", "44", "False"]
    assert done.stderr == ""


@pytest.mark.parametrize(
    "array",
    [
        np.zeros(3, [("a", "<f4"), ("b", "<i2")]),
        np.array([b"abc", b"d"]),
        np.array(["text", "é"], h5py.string_dtype()),
        np.zeros(3, "V5"),
    ],
    ids=["structured", "bytes", "text", "opaque"],
)
def test_element_types_that_cannot_be_shown(tmp_path: Path, array: Any) -> None:
    with checkpoint(tmp_path / "c.mdl", ["a"]) as file:
        dataset(file, "a", array, type="NumpyArrayH5Type")
    item = items_of(tmp_path / "c.mdl")["a"]
    assert item.kind == "object"
    assert "element type" in str(item.reason)


@pytest.mark.parametrize("shape", [(1 << 50, 1 << 9), (1 << 30, 1 << 14), (1 << 62,)])
def test_absurd_shapes(tmp_path: Path, shape: tuple[int, ...]) -> None:
    """A file of a few kilobytes may claim any shape; opening costs nothing, and reading is refused."""
    with checkpoint(tmp_path / "c.mdl", ["a"]) as file:
        made = file.create_dataset("a", shape, "u1", chunks=(16,) * len(shape))
        made.attrs["__H5_TYPE__"] = "TorchTensorH5Type"
    source = open_h5(tmp_path / "c.mdl", TileCache())
    tensor = source.items["a"].tensor
    assert tensor is not None
    with pytest.raises(CorruptChunk, match="do not fit"):
        tensor.read_block(0, 0, np.zeros((1, 1), "u1"))
    source.close()


def test_a_text_of_megabytes(tmp_path: Path) -> None:
    """HDF5 keeps long texts outside of the object header; the tree spec of a large model is one."""
    keys = [f"model.layers.{i}.{'x' * 500}" for i in range(3000)]
    with checkpoint(tmp_path / "c.mdl", keys) as file:
        dataset(file, keys[-1], type="StringH5Type", string_value="y" * 1_000_000)
    assert items_of(tmp_path / "c.mdl")[keys[-1]].value == "y" * 1_000_000
