"""Mounts of models of several components."""

from __future__ import annotations

import json
from typing import Any

import numpy as np

from ckptfs.conversion.conversion import Conversion
from ckptfs.formats.extents import text_file
from ckptfs.vfs.components import parts_of
from ckptfs.vfs.tree import Entry, Leaf
from ckptfs.vfs.views import build
from tests.factories import ArrayTensor, source_of
from tests.formats.reading import content

VIEW = Conversion(
    *("toy", "cs-2.9", "hf"),
    tensors={key: ArrayTensor(np.full(3, n, np.float32)) for n, key in enumerate(("image/a", "text/a", "text/b"))},
    config={"image": {"size": 3}, "text": {"vocab_size": 9, "tower": "image"}},
    components=("image", "text"),
    files={"image/more.json": {"x": [1]}},
    paths=("text/tower",),
)


def shown(**options: Any) -> dict[str, Entry]:
    return dict(build(source_of({}), VIEW, **options).walk())


def text_of(entry: Entry) -> str:
    assert isinstance(entry, Leaf)
    return content(entry.file).decode()


def test_one_folder_for_each_component() -> None:
    tree = shown()
    for folder, weights in (("hf", "model.safetensors"), ("hf-bin", "pytorch_model.bin")):
        inside = {path.removeprefix(f"/{folder}/") for path in tree if path.startswith(f"/{folder}/")}
        assert inside == {
            *("image", "image/config.json", "image/more.json", f"image/{weights}"),
            *("text", "text/config.json", f"text/{weights}"),
        }
        assert json.loads(text_of(tree[f"/{folder}/image/more.json"])) == {"x": [1]}


def test_paths_lead_to_where_the_mount_is() -> None:
    for where, tower in (("/mnt/c", "/mnt/c/{}/image"), ("", "image")):
        tree = shown(where=where)
        for folder in ("hf", "hf-bin"):
            assert json.loads(text_of(tree[f"/{folder}/text/config.json"]))["tower"] == tower.format(folder)
    assert VIEW.config["text"]["tower"] == "image"


def test_a_tokenizer_goes_to_what_has_a_vocabulary() -> None:
    tokenizer = {"tokenizer.json": Leaf(text_file("{}")), "config.json": Leaf(text_file("not this one"))}
    tree = build(source_of({}), VIEW, beside=tokenizer)
    found = [path for path, _ in tree.walk() if path.endswith("tokenizer.json")]
    assert found == ["/hf/text/tokenizer.json", "/hf-bin/text/tokenizer.json"]
    inodes = [entry.ino for path in found if (entry := tree.lookup(path)) is not None]
    assert len(set(inodes)) == len(found)
    assert json.loads(text_of(dict(tree.walk())["/hf/text/config.json"]))["vocab_size"] == 9


def test_shards_are_cut_in_each_component() -> None:
    inside = [path for path in shown(shard_bytes=12) if path.startswith("/hf/") and path.endswith(".safetensors")]
    assert sorted(inside) == [
        "/hf/image/model.safetensors",
        "/hf/text/model-00001-of-00002.safetensors",
        "/hf/text/model-00002-of-00002.safetensors",
    ]


def test_the_parts_are_views_of_one_model() -> None:
    parts = parts_of(VIEW)
    assert {name: (list(part.tensors), part.components) for name, part in parts.items()} == {
        "image": (["a"], ()),
        "text": (["a", "b"], ()),
    }
