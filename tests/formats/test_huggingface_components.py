"""Folders of several models that belong together."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

from ckptfs.errors import CkptfsError, CorruptHeader, SourceError, UnknownFormat
from ckptfs.formats.huggingface import COMPONENTS, components_in, config_in
from ckptfs.tensors.ranges import to_bytes
from tests.formats.samples import n_fds, open_folder

ONE, TWO, THREE = (np.full(4, n, np.float32) for n in (1, 2, 3))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A question encoder in one file, a context encoder in two shards."""
    question, context = tmp_path / "q_encoder", tmp_path / "ctx_encoder"
    for part in (question, context):
        part.mkdir()
        (part / "config.json").write_text(json.dumps({"model_type": "dpr", "part": part.name}))
    save_file({"a": ONE}, question / "model.safetensors")
    save_file({"a": TWO}, context / "model-1.safetensors")
    save_file({"b": THREE}, context / "model-2.safetensors")
    index = {"weight_map": {"b": "model-2.safetensors", "a": "model-1.safetensors"}}
    (context / "model.safetensors.index.json").write_text(json.dumps(index))
    return tmp_path


def test_keys_and_configs_are_told_apart_by_their_folder(folder: Path) -> None:
    source = open_folder(folder)
    assert {key: to_bytes(tensor) for key, tensor in source.tensors().items()} == {
        "q_encoder/a": ONE.tobytes(),
        "ctx_encoder/b": THREE.tobytes(),
        "ctx_encoder/a": TWO.tobytes(),
    }
    assert (
        list(source.items)
        == ["q_encoder/a", "ctx_encoder/b", "ctx_encoder/a"]
        == [i.key for i in source.items.values()]
    )
    assert source.config == {name: {"model_type": "dpr", "part": name} for name in ("q_encoder", "ctx_encoder")}
    assert source.config == config_in(str(folder))
    assert source.nbytes == sum(path.stat().st_size for path in folder.glob("*/*.safetensors"))
    source.close()


def test_files_are_closed_when_a_component_is_broken(folder: Path) -> None:
    before = n_fds()
    open_folder(folder).close()
    for broken, content in (("model-2.safetensors", b"x" * 9), ("config.json", b"{")):
        (folder / "ctx_encoder" / broken).write_bytes(content)
        with pytest.raises((CorruptHeader, UnknownFormat, SourceError)):
            open_folder(folder)
        assert n_fds() == before


def test_all_components_must_be_there(folder: Path) -> None:
    (folder / "ctx_encoder" / "config.json").unlink()
    assert components_in(str(folder)) == ()
    with pytest.raises(SourceError, match=r"holds no weights: ctx_encoder/config\.json is missing"):
        open_folder(folder)
    with pytest.raises(SourceError, match=r"no config\.json"):
        config_in(str(folder))


def test_a_component_needs_weights(folder: Path) -> None:
    (folder / "q_encoder" / "model.safetensors").unlink()
    with pytest.raises(SourceError, match="q_encoder"):
        open_folder(folder)


def test_weights_of_its_own_make_a_folder_one_model(folder: Path) -> None:
    save_file({"c": ONE}, folder / "model.safetensors")
    assert list(open_folder(folder).items) == ["c"]


def test_components_have_no_components(tmp_path: Path) -> None:
    """Links that lead around in a circle would be followed for ever."""
    (tmp_path / "config.json").write_text("{}")
    for name in COMPONENTS[0]:
        (tmp_path / name).symlink_to(tmp_path, target_is_directory=True)
    with pytest.raises(CkptfsError):
        open_folder(tmp_path)


def test_the_config_of_one_model(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "vit"}')
    assert config_in(str(tmp_path)) == {"model_type": "vit"}
