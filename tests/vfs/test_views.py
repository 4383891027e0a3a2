"""The mounted tree against a plain model of it: a dict from path to bytes."""

from __future__ import annotations

import io
import json
import math
from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.numpy import load

from ckptfs.conversion.conversion import Conversion
from ckptfs.errors import UsageError
from ckptfs.formats.extents import text_file
from ckptfs.formats.source import Item
from ckptfs.tensors.tensor import Tensor
from ckptfs.vfs import views
from ckptfs.vfs.facts import facts
from ckptfs.vfs.names import MAX_LEVELS
from ckptfs.vfs.tree import Folder, Leaf, Tree
from ckptfs.vfs.views import ViewSpec, build, listing
from tests.factories import ArrayTensor, array_of, source_of, tensor_of
from tests.formats.reading import content


def view_of(tensors: Mapping[str, Tensor], config: Mapping[str, Any] | None = None, **fields: Any) -> Conversion:
    """A Hugging Face view of gpt2."""
    return Conversion(
        **{"model": "gpt2", "src": "cs-2.10", "tgt": "hf", "tensors": tensors, "config": config or {}, **fields}
    )


def files_of(tree: Tree, under: str) -> dict[str, bytes]:
    return {
        path.removeprefix(under): content(entry.file)
        for path, entry in tree.walk()
        if isinstance(entry, Leaf) and path.startswith(under)
    }


def leaf_at(tree: Tree, path: str) -> Leaf:
    entry = tree.lookup(path)
    assert isinstance(entry, Leaf), path
    return entry


def npy(array: np.ndarray[Any, Any]) -> bytes:
    out = io.BytesIO()
    np.save(out, array)
    return out.getvalue()


ARRAYS = st.builds(
    array_of,
    st.sampled_from(["float32", "bfloat16", "int64", "bool"]),
    st.lists(st.integers(0, 3), max_size=3).map(tuple),
    st.integers(0, 5),
)
VALUES = st.one_of(ARRAYS, st.none(), st.booleans(), st.integers(), st.floats(), st.text("aé\n"))
KEYS = st.lists(st.text("ab0", min_size=1, max_size=3), min_size=1, max_size=4).map(".".join)


@settings(deadline=None)
@given(st.dictionaries(KEYS, VALUES, max_size=12))
def test_tree_equals_its_model(values: dict[str, Any]) -> None:
    tree = build(source_of(values))
    arrays = {key: value for key, value in values.items() if isinstance(value, np.ndarray)}
    want = {f"{key.replace('.', '/')}.npy": npy(array) for key, array in arrays.items()}
    want |= {
        f"{key.replace('.', '/')}.json": json.dumps(value).encode() + b"\n"
        for key, value in values.items()
        if key not in arrays
    }
    assert files_of(tree, "/tensors/") == want
    assert files_of(tree, "/raw/") == {key: array.tobytes() for key, array in arrays.items()}


@settings(deadline=None)
@given(st.lists(st.text("ab.", max_size=6), unique=True))
def test_every_key_is_there_once_and_in_order(keys: list[str]) -> None:
    tree = build(source_of({key: np.zeros(i, np.int8) for i, key in enumerate(keys)}))
    entries = [entry for path, entry in tree.walk() if path.startswith("/tensors/") and isinstance(entry, Leaf)]
    assert sorted(entry.xattrs["user.key"].decode() for entry in entries) == sorted(keys)
    raw = tree.lookup("/raw")
    assert isinstance(raw, Folder)
    assert [leaf.xattrs["user.key"].decode() for leaf in raw.children.values() if isinstance(leaf, Leaf)] == keys


def test_listing_follows_the_state_dict() -> None:
    keys = ["z.b.w", "a.w", "z.a.w", "z.b.bias", "top"]
    tree = build(source_of({key: np.zeros(1, np.int8) for key in keys}))
    listed = [path for path, _ in tree.walk() if path.startswith("/tensors/")]
    assert [path.removeprefix("/tensors/") for path in listed] == [
        *("z", "z/b", "z/b/w.npy", "z/b/bias.npy", "z/a", "z/a/w.npy", "a", "a/w.npy", "top.npy"),
    ]


def test_a_tensor_and_a_folder_of_one_name() -> None:
    tree = build(source_of({"a": np.int8([1]), "a.npy": np.int8([2]), "a.json": 3, "a.npy.npy": None}))
    assert set(files_of(tree, "/tensors/")) == {"a.npy", "a/npy.npy", "a/json.json", "a/npy/npy.json"}


def test_attributes_hold_dtype_shape_and_the_real_key() -> None:
    tree = build(source_of({"a/b.w": tensor_of("bfloat16", (2, 3)), "n": 1}))
    want = {"user.key": b"a/b.w", "user.dtype": b"bfloat16", "user.shape": b"[2, 3]"}
    assert leaf_at(tree, "/raw/a%2Fb.w").xattrs == want
    assert leaf_at(tree, "/tensors/a%2Fb/w.npy").xattrs == want
    assert leaf_at(tree, "/tensors/n.json").xattrs == {"user.key": b"n"}


def test_what_is_not_shown_says_why() -> None:
    values = {
        "o": Item("o", "object", class_name="os.system", reason="not a plain value"),
        "l": Item("l", "link", reason="outside of the folder", target="../x.mdl"),
        "n": 10**6000,
        "t": Item("t", "tensor", tensor=tensor_of("int8", (2,)), tied_to="s"),
    }
    tree = build(source_of(values))
    files = files_of(tree, "/tensors/")
    assert json.loads(files["o.json"]) == {"refused": "not a plain value", "class": "os.system"}
    assert json.loads(files["l.json"]) == {"refused": "outside of the folder", "class": None, "target": "../x.mdl"}
    assert "digits" in json.loads(files["n.json"])["refused"]
    assert leaf_at(tree, "/raw/t").xattrs["user.tied_to"] == b"s"
    page = content(leaf_at(tree, "/README.txt").file).decode()
    assert "o: not a plain value" in page


def test_nothing_is_read_and_nothing_is_made_until_asked() -> None:
    tensor = ArrayTensor(np.zeros((4, 4), np.float32))

    class Untouched(dict[str, Tensor]):
        def items(self) -> Any:
            raise AssertionError("hf/ was made without being looked at")

    view = view_of(Untouched())
    tree = build(source_of({"model.w": tensor}), view)
    assert leaf_at(tree, "/tensors/model/w.npy").size == 128 + 64
    assert leaf_at(tree, "/checkpoint.json").size > 0
    assert tensor.reads == 0
    with pytest.raises(AssertionError):
        tree.lookup("/hf/config.json")


def test_hf_is_a_model_folder() -> None:
    weight, bias = array_of("float32", (3, 4), 1), array_of("float16", (4,), 2)
    config = {"architectures": ["GPT2LMHeadModel"], "n_layer": 2, "eos_token_id": 7}
    view = view_of({"w": ArrayTensor(weight), "b": ArrayTensor(bias)}, config)
    extra = {"tokenizer.json": Leaf(text_file("{}")), "config.json": Leaf(text_file("not this"))}
    tree = build(source_of({}), view, reason="never said", beside=extra)
    files = files_of(tree, "/hf/")
    assert list(files) == ["config.json", "generation_config.json", "model.safetensors", "tokenizer.json"]
    assert files["config.json"].decode() == json.dumps(config, indent=4)
    assert json.loads(files["generation_config.json"]) == {"_from_model_config": True, "eos_token_id": 7}
    loaded = load(files["model.safetensors"])
    assert loaded["w"].tobytes() == weight.tobytes()
    assert loaded["b"].tobytes() == bias.tobytes()
    assert "never said" not in content(leaf_at(tree, "/README.txt").file).decode()


def test_hf_past_the_shard_size() -> None:
    view = view_of({key: tensor_of("uint8", (6,)) for key in "abc"})
    tree = build(source_of({}), view, shard_bytes=12)
    assert [name for name in files_of(tree, "/hf/") if name.startswith("model")] == [
        "model-00001-of-00002.safetensors",
        "model-00002-of-00002.safetensors",
        "model.safetensors.index.json",
    ]


def test_without_hf_the_page_says_why() -> None:
    tree = build(source_of({}), reason="the checkpoint names no family; use --model")
    assert "There is no hf/: the checkpoint names no family; use --model" in content(
        leaf_at(tree, "/README.txt").file
    ).decode().replace("\n", " ")
    assert tree.lookup("/hf") is None


def test_a_view_that_cannot_be_written_spoils_its_folder_only() -> None:
    view = view_of({"w": tensor_of("complex128", (1,))})
    tree = build(source_of({"w": 1}), view)
    with pytest.raises(UsageError, match="w: safetensors has no element type"):
        tree.lookup("/hf/model.safetensors")
    assert content(leaf_at(tree, "/tensors/w.json").file) == b"1\n"


def test_one_more_row_is_one_more_entry(monkeypatch: pytest.MonkeyPatch) -> None:
    def extra(name: str, applies: bool) -> ViewSpec:
        made = Folder(lambda: {"model.pt": Leaf(text_file("x"))})
        return ViewSpec(name, f"about {name}", lambda _: applies, lambda _: made)

    monkeypatch.setattr(views, "VIEWS", (*views.VIEWS, extra("more", True), extra("never", False)))
    tree = build(source_of({}, mtime_ns=5))
    names = ["README.txt", "checkpoint.json", "tensors", "raw", "torch", "tf", "more"]
    assert list(tree.root.children) == names == [name for name, _ in listing(tree)]
    assert dict(listing(tree))["more"] == "about more"
    assert tree.mtime_ns == 5
    page = content(leaf_at(tree, "/README.txt").file).decode()
    assert all(name in page for name in names) and "about more" in page and "never" not in page
    assert content(leaf_at(tree, "/more/model.pt").file) == b"x"


def test_a_cerebras_target_has_its_own_folder() -> None:
    tree = build(source_of({}), view_of({"w": tensor_of("int8", (2,))}, {"model": {}}, tgt="cs-2.9"))
    assert list(tree.root.children)[-2:] == ["tf", "cs"]
    assert tree.lookup("/hf") is None


def test_checkpoint_json_holds_the_facts() -> None:
    source = source_of({"global_step": 12, "model.w": tensor_of("int8", (2,)), "odd": math.nan})
    assert json.loads(content(leaf_at(build(source), "/checkpoint.json").file)) == facts(source)
    tree = build(source, view_of({}, {"eos_token_id": 0}, warnings=("a field was left out",)))
    about = json.loads(content(leaf_at(tree, "/checkpoint.json").file))
    assert about["family"] == "gpt2" and about["warnings"] == ["a field was left out"]
    page = content(leaf_at(tree, "/README.txt").file).decode()
    assert "gpt2; step 12" in page and "a field was left out" in page


def test_keys_of_thousands_of_levels() -> None:
    keys = [".".join(["x"] * 5000), "." * 5000, ".".join(["x"] * 5000) + ".npy"]
    tree = build(source_of({key: np.zeros(1, np.int8) for key in keys}))
    leaves = [(path, entry) for path, entry in tree.walk() if path.startswith("/tensors/") and isinstance(entry, Leaf)]
    assert {entry.xattrs["user.key"].decode() for _, entry in leaves} == set(keys)
    assert all(path.count("/") == MAX_LEVELS + 1 for path, _ in leaves)
