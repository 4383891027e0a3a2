"""The folders `torch/` and `hf-bin/`, with torch and transformers as the judges."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from ckptfs.conversion import resolve
from ckptfs.formats.detect import open_source
from ckptfs.formats.extents import text_file
from ckptfs.formats.source import Container, Item, Source
from ckptfs.tensors.cache import TileCache
from ckptfs.tensors.tensor import Tensor
from ckptfs.vfs.hf import hf_folder
from ckptfs.vfs.torch import hf_bin_folder, torch_folder
from ckptfs.vfs.tree import Folder, Leaf
from ckptfs.vfs.views import build
from tests.factories import source_of, tensor_of
from tests.formats.reading import content
from tests.paths import FAMILIES
from tests.torch_states import REFUSED, WRITTEN, bits, check_state, recorded


@dataclass(frozen=True)
class FakeView:
    tensors: Mapping[str, Tensor]
    config: Mapping[str, Any] = field(default_factory=dict)
    tgt: str = "hf"
    model: str = "gpt2"
    files: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    components: tuple[str, ...] = ()
    paths: tuple[str, ...] = ()


def write(folder: Folder, to: Path) -> Path:
    """All files of *folder*, on disk."""
    to.mkdir()
    for name, leaf in folder.children.items():
        assert isinstance(leaf, Leaf)
        (to / name).write_bytes(content(leaf.file))
    return to


def loaded(source: Source, to: Path, name: str) -> Any:
    return torch.load(write(torch_folder(source), to / "torch") / name, weights_only=True)


@pytest.mark.parametrize("path", WRITTEN, ids=lambda path: path.stem)
def test_checkpoints_of_the_real_writer(path: Path, tmp_path: Path) -> None:
    source = open_source(str(path), TileCache())
    want = recorded(path)
    check_state(loaded(source, tmp_path, "checkpoint.pt"), want)
    states = {key["key"]: value for key, value in want["items"]} if want["kind"] == "dict" else {}
    check_state(torch.load(tmp_path / "torch/model.pt", weights_only=True), states.get("model", want))
    source.close()


def test_tied_keys_of_the_real_writer(tmp_path: Path) -> None:
    path = next(path for path in WRITTEN if path.stem == "tied")
    source = open_source(str(path), TileCache())
    ties = {k: i.tied_to for k, i in source.items.items() if i.tied_to and i.tensor is not None}
    found = loaded(source, tmp_path, "checkpoint.pt")
    assert ties
    for key, first in ties.items():
        assert at(found, key).data_ptr() == at(found, str(first)).data_ptr()
    source.close()


def at(state: Any, key: str) -> Any:
    """The value under a flattened key."""
    while key:
        names = [str(name) for name in state] if isinstance(state, dict) else [str(i) for i in range(len(state))]
        name = max((n for n in names if key == n or key.startswith(f"{n}.")), key=len)
        state = state[next(k for k in state if str(k) == name)] if isinstance(state, dict) else state[int(name)]
        key = key[len(name) + 1 :]
    return state


def test_flat_sources_are_flat(tmp_path: Path) -> None:
    source = source_of({"model.w": tensor_of("int8", (2,)), "n": 3})
    found = loaded(source, tmp_path, "checkpoint.pt")
    assert list(found) == ["model.w", "n"] and found["n"] == 3
    assert list(torch.load(tmp_path / "torch/model.pt")) == ["model.w", "n"]


def test_what_is_refused_keeps_its_place(tmp_path: Path) -> None:
    values = {
        "l.0": Item("l.0", "object", reason="would run code"),
        "l.1": Item("l.1", "link", reason="leads outside", target="/x"),
        "l.2": 5,
        "d": Item("d", "object"),
    }
    tree = Container("dict", ("l", "d"), (Container("list", None, ("l.0", "l.1", "l.2")), "d"))
    source = source_of(values, tree=tree)
    found = loaded(source, tmp_path, "checkpoint.pt")
    assert found == {
        "l": [f"{REFUSED}would run code>", f"{REFUSED}leads outside>", 5],
        "d": f"{REFUSED}cannot be read>",
    }
    page = build(source).lookup("/README.txt")
    assert isinstance(page, Leaf)
    text = content(page.file).decode()
    assert "not shown: l.0: would run code" in text and "a text that says why" in text


def test_odd_containers(tmp_path: Path) -> None:
    leaves = {"s.0": tensor_of("int8", (1,)), "s.1": 1, "q.0": 2, "n.0": 3, "u.0.0": 4}
    children = (
        Container("set", None, ("s.0", "s.1")),
        Container("deque", None, ("q.0",)),
        Container("namedtuple", None, ("n.0",)),
        Container("set", None, (Container("list", None, ("u.0.0",)),)),
    )
    found = loaded(source_of(leaves, tree=Container("tuple", None, children)), tmp_path, "checkpoint.pt")
    assert [type(value) for value in found] == [set, list, tuple, list]
    assert len(found[0]) == 2 and found[1:] == ([2], (3,), [[4]])


def test_one_file_or_shards_with_an_index(tmp_path: Path) -> None:
    tensors = {f"w{i}": tensor_of("float32", (2, 3), i) for i in range(3)}
    extra = {"tokenizer.json": Leaf(text_file("{}")), "config.json": Leaf(text_file("not this"))}
    one = write(hf_bin_folder(FakeView(tensors, {"model_type": "gpt2"}), extra=extra), tmp_path / "one")
    assert {p.name for p in one.iterdir()} == {
        *("config.json", "pytorch_model.bin", "tokenizer.json"),
    }
    assert json.loads((one / "config.json").read_text()) == {"model_type": "gpt2"}
    assert list(torch.load(one / "pytorch_model.bin")) == ["w0", "w1", "w2"]
    cut = write(hf_bin_folder(FakeView(tensors), shard_bytes=48), tmp_path / "cut")
    index = json.loads((cut / "pytorch_model.bin.index.json").read_text())
    names = ["pytorch_model-00001-of-00002.bin", "pytorch_model-00002-of-00002.bin"]
    assert index == {
        "metadata": {"total_size": 72},
        "weight_map": {"w0": names[0], "w1": names[0], "w2": names[1]},
    }
    found = {**torch.load(cut / names[0]), **torch.load(cut / names[1])}
    assert {key: bits(value) for key, value in found.items()} == {key: t.bytes for key, t in tensors.items()}


CASES = [("gpt2", "gpt2/cs2hf-bf16"), ("gpt2", "gpt2/cs2hf-tied-fp32"), ("llama", "llama/cs2hf-gqa-fp32")]


@pytest.mark.parametrize(("model", "name"), CASES)
def test_hf_bin_equals_hf(model: str, name: str, tmp_path: Path) -> None:
    case = FAMILIES / name
    source = open_source(str(case / "cs.mdl"), TileCache())
    view, _ = resolve.prepare(source, model=model, config=case / "cs.yaml")
    assert view is not None
    safe = write(hf_folder(view), tmp_path / "hf")
    plain = write(hf_bin_folder(view), tmp_path / "hf-bin")
    want, found = load_file(safe / "model.safetensors"), torch.load(plain / "pytorch_model.bin")
    assert list(found) == list(view.tensors)
    assert {k: (t.dtype, t.shape, bits(t)) for k, t in found.items()} == {
        k: (t.dtype, t.shape, bits(t)) for k, t in want.items()
    }
    assert (plain / "config.json").read_bytes() == (safe / "config.json").read_bytes()
    source.close()
