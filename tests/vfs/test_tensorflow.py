"""The folder `tf/`: ckptfs reads it back, and names what is missing from it."""

from __future__ import annotations

import json
from pathlib import Path
from unittest import mock

import ckptfs
from ckptfs.formats.tensorflow import checksum
from ckptfs.vfs.tensorflow import tf_folder
from ckptfs.vfs.tree import Folder, Leaf
from ckptfs.vfs.views import build
from tests.factories import source_of, tensor_of
from tests.formats.reading import content


def written(folder: Folder, to: Path) -> Path:
    to.mkdir()
    for name, entry in folder.children.items():
        assert isinstance(entry, Leaf)
        (to / name).write_bytes(content(entry.file))
    return to


def test_it_holds_tensors_numbers_and_texts(tmp_path: Path) -> None:
    values = {"a.b": tensor_of("bfloat16", (2, 3)), "c/d": tensor_of("int8", ()), "step": 3, "text": "x"}
    at = written(tf_folder(source_of(values)), tmp_path / "tf")
    assert sorted(path.name for path in at.iterdir()) == [
        "checkpoint",
        "model.ckpt.data-00000-of-00001",
        "model.ckpt.index",
    ]
    with ckptfs.open(at) as found:
        assert list(found) == ["a.b", "c/d", "step", "text"]
        assert found["a.b"].dtype == "bfloat16" and int(found["step"][...]) == 3


def test_what_is_left_out_is_named(tmp_path: Path) -> None:
    at = written(tf_folder(source_of({"a": None, "b": 1, "c": 1 << 64})), tmp_path / "tf")
    assert json.loads((at / "left-out.json").read_text()) == {
        "a": "there is no value to write (none)",
        "c": "the number does not fit into 64 bits",
    }


def test_an_empty_state_dict(tmp_path: Path) -> None:
    with ckptfs.open(written(tf_folder(source_of({})), tmp_path / "tf")) as found:
        assert list(found) == []


def test_without_the_library_there_is_no_folder() -> None:
    with mock.patch.object(checksum, "_library", lambda: None):
        assert "tf" not in build(source_of({})).root.children
