"""Checkpoints laid out by ckptfs, read back by h5py, by our own reader, and compared with the real writer's files."""

from __future__ import annotations

from collections import OrderedDict, deque
from pathlib import Path
from time import process_time
from typing import Any, NamedTuple

import h5py
import hdf5plugin  # noqa: F401 - the real writer's files need its filters
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ckptfs.errors import UsageError
from ckptfs.formats.cerebras.reader import open_h5
from ckptfs.formats.cerebras.state import MAX_DEPTH, State, state_tree
from ckptfs.formats.cerebras.writer import mdl_file
from ckptfs.formats.hdf5.index import read_index
from ckptfs.formats.source import Container, Item, Source
from ckptfs.tensors.cache import TileCache
from ckptfs.tensors.ranges import to_bytes
from tests.factories import ArrayTensor, array_of, tensor_of
from tests.formats.reading import content
from tests.paths import DATA

V05 = DATA / "v05"
SAME = ("dtypes", "empty", "keys", "scalars", "shapes", "tied", "toplevel_list", "toplevel_tuple", "trainer_like")
"""Files of the real writer that hold nothing but values, and so have one way to be written."""
HELD = (
    *SAME,
    "containers",
    "deferred_file_link",
    "deferred_full",
    "deferred_graph",
    "deferred_safetensor",
    "ext_link_subdir",
)
REFUSED = ("objects", "ext_base")
TENSORS = ("bool", "uint8", "int16", "uint16", "int32", "uint32", "int64", "uint64", "float16", "bfloat16", "float32")
ARRAYS = (*TENSORS, "float64", "int8", "complex64", "complex128")


def opened(name: str) -> Source:
    return open_h5(V05 / f"{name}.mdl", TileCache())


def written(state: State, path: Path) -> Path:
    path.write_bytes(content(mdl_file(state)))
    return path


def rewritten(name: str, path: Path) -> Path:
    source = opened(name)
    assert source.tree is not None
    written(State(source.tree, source.items), path)
    source.close()
    return path


def described(file: h5py.File) -> dict[str, Any]:
    """Everything that h5py says about a file, but for the storage of its data."""
    found: dict[str, Any] = {"": attributes(file)}

    def visit(name: str, entry: h5py.Group | h5py.Dataset) -> None:
        if isinstance(entry, h5py.Dataset):
            found[name] = entry.dtype, entry.shape, entry.maxshape, entry[...].tobytes(), attributes(entry)
        else:
            found[name] = attributes(entry)

    file.visititems(visit)
    return found


def attributes(entry: Any) -> dict[str, Any]:
    ids = {name: entry.attrs.get_id(name) for name in entry.attrs}
    return {name: (ids[name].dtype, ids[name].shape, repr(entry.attrs[name])) for name in ids}


@pytest.mark.parametrize("name", SAME)
def test_hdf5_sees_what_the_real_writer_wrote(name: str, tmp_path: Path) -> None:
    with h5py.File(rewritten(name, tmp_path / "out.mdl")) as ours, h5py.File(V05 / f"{name}.mdl") as theirs:
        assert described(ours) == described(theirs)


@pytest.mark.parametrize("name", HELD)
def test_our_reader_finds_the_same_values(name: str, tmp_path: Path) -> None:
    source, again = opened(name), open_h5(rewritten(name, tmp_path / "out.mdl"), TileCache())
    assert (again.format, again.format_version, again.release) == ("cerebras-h5", "0.5", "2.10.0")
    assert again.warnings == []
    assert outline(again.tree) == outline(source.tree)
    for old, new in zip(source.items.values(), again.items.values(), strict=True):
        assert (new.kind, repr(new.value)) == (old.kind, repr(old.value))
        assert (new.tied_to is None) == (old.tied_to is None)
        if old.tensor is not None:
            assert new.tensor is not None
            assert (new.tensor.dtype, new.tensor.shape) == (old.tensor.dtype, old.tensor.shape)
            assert to_bytes(new.tensor) == to_bytes(old.tensor)
    source.close()
    again.close()


def outline(node: Container | str | None) -> Any:
    if not isinstance(node, Container):
        return "leaf"
    return node.type, node.keys, [outline(child) for child in node.children]


@pytest.mark.parametrize("name", REFUSED)
def test_what_was_not_read_is_not_written(name: str) -> None:
    source = opened(name)
    assert source.tree is not None
    first = next(item.key for item in source.items.values() if item.kind == "object")
    with pytest.raises(UsageError, match=repr(first)):
        mdl_file(State(source.tree, source.items))
    source.close()


def test_keys_that_the_real_writer_garbled_are_put_right(tmp_path: Path) -> None:
    source = open_h5(rewritten("containers", tmp_path / "out.mdl"), TileCache())
    assert [key for key in source.items if key.startswith("ddict")] == ["ddict.q.0", "ddict.q.1", "ddict.r"]
    source.close()


@pytest.mark.parametrize(("kind", "dtype"), [*(("tensor", d) for d in TENSORS), *(("array", d) for d in ARRAYS)])
@pytest.mark.parametrize("shape", [(), (3,), (0, 2), (5, 2, 3)], ids=str)
def test_every_element_type(kind: Any, dtype: str, shape: tuple[int, ...], tmp_path: Path) -> None:
    array = array_of(dtype, shape)
    path = written(state_tree({"x": Item("x", kind, tensor=ArrayTensor(array, dtype))}), tmp_path / "x.mdl")
    with h5py.File(path) as file:
        stored = file["x"]
        kept = array.view("i2") if dtype == "bfloat16" else array
        assert (stored.dtype, stored.shape, stored.chunks) == (kept.dtype, shape, None)
        assert stored[...].tobytes() == array.tobytes()
    source = open_h5(path, TileCache())
    item = source.items["x"]
    assert item.tensor is not None
    assert (item.kind, item.tensor.dtype.name, item.tensor.shape) == (kind, dtype, shape)
    assert to_bytes(item.tensor) == array.tobytes()
    source.close()


class Pair(NamedTuple):
    a: int
    b: float


def test_containers(tmp_path: Path) -> None:
    state = {
        "o": OrderedDict(z=1, a=2.5),
        "pair": Pair(1, 0.5),
        "mixed": [(), {}, [True, None], ("s", {7: -1})],
        "deque": deque([1, 2]),
        "set": {4},
    }
    source = open_h5(written(state_tree(state), tmp_path / "c.mdl"), TileCache())
    assert source.tree is not None
    tuples = [child.type for child in source.tree.children if isinstance(child, Container)]
    assert tuples == ["OrderedDict", "tuple", "list", "deque", "set"]
    values = {key: item.value for key, item in source.items.items()}
    want = {"o.z": 1, "o.a": 2.5, "pair.0": 1, "pair.1": 0.5, "mixed.2.0": True, "mixed.2.1": None}
    assert values == want | {"mixed.3.0": "s", "mixed.3.1.7": -1, "deque.0": 1, "deque.1": 2, "set.0": 4}
    source.close()


def test_the_same_tensor_is_stored_once(tmp_path: Path) -> None:
    shared = tensor_of("float32", (8, 4))
    state = {"a": {"w": shared}, "b": {"w": shared, "x": tensor_of("float32", (8, 4))}}
    path = written(state_tree(state), tmp_path / "t.mdl")
    with h5py.File(path) as file:
        assert sorted(file) == ["a.w", "b.x"]
    source = open_h5(path, TileCache())
    assert source.items["b.w"].tied_to == "a.w"
    assert source.items["b.w"].tensor is source.items["a.w"].tensor
    source.close()


REFUSALS = {
    "not a state dict": 3,
    "float8_e4m3fn tensors": {"w": tensor_of("float8_e4m3fn", (2,))},
    "int8 tensors": {"w": tensor_of("int8", (2,))},
    "part of it": {"a/b": tensor_of("float32", (2,)), "a": tensor_of("float32", (2,))},
    "has its path": {"/abs": tensor_of("float32", (2,)), "abs": tensor_of("float32", (2,))},
    "end in a slash": {"a/": tensor_of("float32", (2,))},
    "be empty": {"": tensor_of("float32", (2,))},
    "NUL": {"a\0b": 1},
    "valid Unicode": {"a\ud800": 1},
    "a.b: two entries": {"a.b": 1, "a": {"b": 2}},
    "longer than HDF5 allows": {"k" * 70_000: 1},
    "a tuple as a key": {(1, 2): 3},
    "more$": {f"k{i}": object() for i in range(20)},
    "inner.bad: a builtins.object": {"inner": {"bad": object()}},
}


@pytest.mark.parametrize("why", REFUSALS)
def test_refusals_name_the_key(why: str) -> None:
    with pytest.raises(UsageError, match=why) as caught:
        mdl_file(state_tree(REFUSALS[why]))
    assert "\n" not in str(caught.value)


def test_scalars_may_have_keys_that_tensors_may_not(tmp_path: Path) -> None:
    state = {"a": 1, "a/b": tensor_of("float32", (2,)), "c/": "text", "": None}
    source = open_h5(written(state_tree(state), tmp_path / "s.mdl"), TileCache())
    assert [(key, item.kind) for key, item in source.items.items()] == [
        ("a", "scalar"),
        ("a/b", "tensor"),
        ("c/", "string"),
        ("", "none"),
    ]
    source.close()


def test_containers_that_hold_themselves_are_refused() -> None:
    state: dict[str, Any] = {}
    state["self"] = state
    with pytest.raises(UsageError, match=f"deeper than {MAX_DEPTH}"):
        mdl_file(state_tree(state))


def test_depth_up_to_the_limit(tmp_path: Path) -> None:
    state: dict[str, Any] = {"x": 1}
    for _ in range(MAX_DEPTH - 1):
        state = {"d": state}
    source = open_h5(written(state_tree(state), tmp_path / "d.mdl"), TileCache())
    assert list(source.items) == ["d." * (MAX_DEPTH - 1) + "x"]
    source.close()


def test_long_texts(tmp_path: Path) -> None:
    long = "é\n\0" * 100_000
    source = open_h5(written(state_tree({"long": long, "short": "x"}), tmp_path / "l.mdl"), TileCache())
    assert (source.items["long"].value, source.items["short"].value) == (long, "x")
    source.close()


@given(st.lists(st.text("ab/.é", min_size=1, max_size=6), unique=True, max_size=40), st.integers(0, 3))
@settings(max_examples=60, deadline=None)
def test_any_names(tmp_path_factory: pytest.TempPathFactory, names: list[str], salt: int) -> None:
    """Either the names are refused, or libhdf5 finds each under its own key."""
    state = {name: ArrayTensor(np.full((2,), i + salt, "<i4")) for i, name in enumerate(names)}
    path = tmp_path_factory.mktemp("names") / "n.mdl"
    try:
        written(state_tree(state), path)
    except UsageError:
        parts = [tuple(p for p in name.split("/") if p not in ("", ".")) for name in names]
        clash = any(a == b[: len(a)] for a in parts for b in parts if a is not b)
        assert clash or any(name.endswith("/") or not parts[i] for i, name in enumerate(names))
        return
    with h5py.File(path) as file:
        assert [int(file[name][0]) for name in names] == [i + salt for i in range(len(names))]


@pytest.mark.parametrize("n", [1, 8, 9, 256, 257, 8192, 8193])
def test_any_number_of_names(n: int, tmp_path: Path) -> None:
    """The group's tree has one, two or three levels, with nodes that are full and nodes with one entry."""
    state = {f"{i}": ArrayTensor(np.array(i, "<i4")) for i in range(n)}
    path = written(state_tree(state), tmp_path / "n.mdl")
    with h5py.File(path) as file:
        assert list(file) == sorted(state)
        assert all(file[f"{i}"][()] == i for i in range(0, n, 1 + n // 50))
        assert "no such name" not in file
        assert len(file.attrs) == n + 4
        assert file.attrs["__SUCCESS__"]


def test_libhdf5_can_add_to_the_file(tmp_path: Path) -> None:
    path = written(state_tree({f"k{i}": tensor_of("float32", (3,), i) for i in range(100)}), tmp_path / "a.mdl")
    with h5py.File(path, "a") as file:
        for i in range(60):
            file[f"new{i}"] = np.arange(i)
            file.attrs[f"note{i}"] = "text" * i
        del file["k5"]
        del file["k6"].attrs["__TYPE__"]
    with h5py.File(path) as file:
        assert len(file) == 159
        assert file["k99"][...].tobytes() == to_bytes(tensor_of("float32", (3,), 99))
        assert file["k7"].attrs["__TYPE__"] == "TorchTensorSerializer"
        assert file.attrs["note59"] == "text" * 59


def test_data_are_aligned_and_the_size_is_that_of_the_file(tmp_path: Path) -> None:
    shapes = {"small": (3,), "large": (200, 100), "odd": (7, 1), "none": (0, 4), "last": (70_000,)}
    path = written(state_tree({k: tensor_of("float32", s) for k, s in shapes.items()}), tmp_path / "a.mdl")
    with h5py.File(path) as file:
        offsets = {key: file[key].id.get_offset() for key in shapes}
        assert offsets["none"] is None
        assert [offsets[key] % 64 for key in ("small", "odd")] == [0, 0]
        assert [offsets[key] % 4096 for key in ("large", "last")] == [0, 0]
        assert path.stat().st_size == offsets["last"] + 280_000
        assert file["large"][...].tobytes() == path.read_bytes()[offsets["large"] :][: 200 * 100 * 4]


def test_any_byte_range_is_the_slice_of_the_whole() -> None:
    state = {f"k{i}": tensor_of("bfloat16", (i, 37), i) for i in range(40)}
    file = mdl_file(state_tree({"model": state, "step": 7}))
    whole = content(file)
    rng = np.random.default_rng(0)
    for _ in range(300):
        start = int(rng.integers(0, file.size))
        out = bytearray(int(rng.integers(1, 20_000)))
        n = file.read_into(start, memoryview(out))
        assert out[:n] == whole[start : start + len(out)]


def test_no_data_are_read_to_lay_the_file_out() -> None:
    tensor = tensor_of("float32", (100, 100))
    file = mdl_file(state_tree({"w": tensor}))
    file.read_into(0, memoryview(bytearray(100)))
    assert tensor.reads == 0


def test_our_reader_needs_no_libhdf5_for_it(tmp_path: Path) -> None:
    """The walker understands every structure: no object is left to the library, which would be slow."""
    path = written(state_tree({"m": {f"a/k{i}": tensor_of("float32", (2,)) for i in range(20)}}), tmp_path / "w.mdl")
    index = read_index(path)
    assert index.objects
    assert all(isinstance(found, list) for found in index.objects.values())
    Source(str(path), "hdf5", None, None, {}, files=[index.file]).close()


def test_many_keys_take_linear_time() -> None:
    def seconds(n: int) -> float:
        state = state_tree({"model": {f"layers.{i}.weight": tensor_of("float32", (2,)) for i in range(n)}})
        start = process_time()
        mdl_file(state)
        return process_time() - start

    seconds(1000)
    assert seconds(16_000) < 60 * min(seconds(1000) for _ in range(3))  # 16 when linear, 256 when quadratic
