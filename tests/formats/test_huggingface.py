"""Hugging Face folders and the index of shards."""

from __future__ import annotations

import json
import os
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.numpy import save_file
from safetensors.torch import save_file as save_torch

from ckptfs.errors import CkptfsError, CorruptHeader, MissingShard, SourceError, UnknownFormat, Unsafe
from ckptfs.tensors.ranges import to_bytes
from tests.formats.samples import n_fds, open_folder, open_index

ONE, TWO, THREE = (np.full(4, n, np.float32) for n in (1, 2, 3))


def write_index(folder: Path, weight_map: Any, name: str = "model.safetensors.index.json") -> Path:
    (folder / name).write_text(json.dumps({"metadata": {"total_size": 1}, "weight_map": weight_map}))
    return folder / name


@pytest.fixture
def sharded(tmp_path: Path) -> Path:
    save_file({"a": ONE, "c": THREE}, tmp_path / "model-00001-of-00002.safetensors")
    save_file({"b": TWO}, tmp_path / "model-00002-of-00002.safetensors")
    write_index(tmp_path, {key: f"model-0000{n}-of-00002.safetensors" for key, n in (("c", 1), ("b", 2), ("a", 1))})
    (tmp_path / "config.json").write_text('{"model_type": "gpt2"}')
    return tmp_path


def test_shards_in_the_order_of_the_index(sharded: Path) -> None:
    source = open_folder(sharded)
    assert {key: to_bytes(tensor) for key, tensor in source.tensors().items()} == {
        "c": THREE.tobytes(), "b": TWO.tobytes(), "a": ONE.tobytes()
    }  # fmt: skip
    assert list(source.items) == ["c", "b", "a"]
    assert source.config == {"model_type": "gpt2"}
    assert (source.path, source.format) == (str(sharded), "safetensors")
    files = [sharded / f"model-0000{n}-of-00002.safetensors" for n in (1, 2)]
    assert source.nbytes == sum(file.stat().st_size for file in files)
    assert source.mtime_ns == max(file.stat().st_mtime_ns for file in files)
    assert len(source.files) == 2
    before, numbers = n_fds(), [file.fd for file in source.files]
    source.close()
    assert [os.readlink(f"/proc/self/fd/{number}") for number in numbers] == ["/", "/"]
    del source
    assert n_fds() == before - 2


def test_the_index_itself(sharded: Path) -> None:
    source = open_index(sharded / "model.safetensors.index.json")
    assert source.path.endswith("index.json")
    assert list(source.items) == ["c", "b", "a"]
    assert source.config == {"model_type": "gpt2"}
    source.close()


def test_an_index_in_the_current_folder(sharded: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(sharded)
    for source in (open_index("model.safetensors.index.json"), open_folder(".")):
        assert len(source.items) == 3
        assert source.config is not None
        source.close()


def test_which_file_is_taken(tmp_path: Path) -> None:
    torch.save({"x": torch.ones(1)}, tmp_path / "pytorch_model.bin")
    assert _format(tmp_path) == "torch-zip"
    save_file({"a": ONE}, tmp_path / "model.safetensors")
    assert _format(tmp_path) == "safetensors"
    write_index(tmp_path, {"x": "pytorch_model.bin"})
    assert _format(tmp_path) == "safetensors"  # the whole file first


def _format(folder: Path) -> str:
    source = open_folder(folder)
    source.close()
    return source.format


def test_a_folder_with_one_file_of_another_name(tmp_path: Path) -> None:
    save_file({"a": ONE}, tmp_path / "adapter.safetensors")
    assert _format(tmp_path) == "safetensors"
    save_file({"a": ONE}, tmp_path / "other.safetensors")
    with pytest.raises(SourceError, match="name the one to open"):
        open_folder(tmp_path)


def test_a_folder_without_weights(tmp_path: Path) -> None:
    with pytest.raises(SourceError, match="no weights"):
        open_folder(tmp_path)


@pytest.mark.parametrize(
    "name", ["../secret.safetensors", "/etc/passwd", "sub/x.safetensors", "..", ".", "", "a\0b", "a\\b", "./x"]
)
def test_shards_stay_in_the_folder(tmp_path: Path, name: str) -> None:
    folder = tmp_path / "model"
    (folder / "sub").mkdir(parents=True)
    for place in (tmp_path / "secret.safetensors", folder / "sub" / "x.safetensors", folder / "x"):
        save_file({"a": ONE}, place)
    write_index(folder, {"a": name})
    with pytest.raises(Unsafe, match="own folder"):
        open_folder(folder)


FAULTS: list[tuple[Any, type[CkptfsError], str]] = [
    ({"a": "absent.safetensors"}, MissingShard, "absent.safetensors"),
    ({"q": "model-00001-of-00002.safetensors"}, CorruptHeader, "q should be in model-00001-of-00002"),
    ({"a": 3}, CorruptHeader, "weight_map"),
    (["a"], CorruptHeader, "weight_map"),
    ({"a": "model-00001-of-00002.safetensors", "b": "config.json"}, SourceError, "none of these"),
]


@pytest.mark.parametrize(("weight_map", "error", "message"), FAULTS)
def test_faults_close_every_file(sharded: Path, weight_map: Any, error: type[CkptfsError], message: str) -> None:
    write_index(sharded, weight_map)
    before = n_fds()
    with pytest.raises(error, match=message):
        open_folder(sharded)
    assert n_fds() == before


def test_a_broken_config_closes_every_file(sharded: Path) -> None:
    (sharded / "config.json").write_text("{")
    before = n_fds()
    with pytest.raises(CorruptHeader, match="model config"):
        open_folder(sharded)
    assert n_fds() == before


def test_an_index_that_is_none(tmp_path: Path) -> None:
    path = tmp_path / "x.index.json"
    path.write_text('{"a": 1}')
    with pytest.raises(UnknownFormat, match="weight_map"):
        open_index(path)
    path.write_text('{"weight_map": {"a": "x", "a": "y"}}')
    with pytest.raises(CorruptHeader, match="twice"):
        open_index(path)


def test_keys_outside_the_index_are_left_out_with_a_warning(sharded: Path) -> None:
    write_index(sharded, {"a": "model-00001-of-00002.safetensors"})
    source = open_folder(sharded)
    assert list(source.items) == ["a"]
    assert source.warnings == ["1 keys of the shards are not in the index and left out"]
    source.close()


def test_ties_follow_the_order_of_the_index(tmp_path: Path) -> None:
    shared = torch.ones(2)
    torch.save({"first": shared, "second": shared}, tmp_path / "s.bin")
    write_index(tmp_path, {"second": "s.bin", "first": "s.bin"}, "pytorch_model.bin.index.json")
    source = open_folder(tmp_path)
    assert [(key, item.tied_to) for key, item in source.items.items()] == [("second", None), ("first", "second")]
    source.close()


def test_shards_may_be_links_to_a_store(tmp_path: Path) -> None:
    """As in the cache of huggingface_hub."""
    (tmp_path / "blobs").mkdir()
    (tmp_path / "snapshot").mkdir()
    save_file({"a": ONE}, tmp_path / "blobs" / "0123")
    os.symlink("../blobs/0123", tmp_path / "snapshot" / "model.safetensors")
    assert _format(tmp_path / "snapshot") == "safetensors"


def test_the_download_cache_of_the_hub(tmp_path: Path) -> None:
    """``snapshots/<revision>/`` holds links to ``blobs/<hash>``, index and config too."""
    blobs, snapshot = tmp_path / "blobs", tmp_path / "snapshots/abc"
    blobs.mkdir()
    snapshot.mkdir(parents=True)
    save_file({"a": ONE}, blobs / "1f")
    save_file({"b": TWO}, blobs / "2f")
    write_index(blobs, {"a": "model-1.safetensors", "b": "model-2.safetensors"}, "3f")
    (blobs / "4f").write_text('{"model_type": "gpt2"}')
    names = ("model-1.safetensors", "model-2.safetensors", "model.safetensors.index.json", "config.json")
    for number, name in enumerate(names, 1):
        (snapshot / name).symlink_to(f"../../blobs/{number}f")
    source = open_folder(snapshot)
    assert {key: to_bytes(tensor) for key, tensor in source.tensors().items()} == {
        "a": ONE.tobytes(),
        "b": TWO.tobytes(),
    }
    assert source.config == {"model_type": "gpt2"}
    source.close()

    (snapshot / "model.safetensors.index.json").unlink()
    (snapshot / "model.safetensors").symlink_to("../../blobs/1f")
    source = open_folder(snapshot)
    assert list(source.items) == ["a"]
    source.close()


@pytest.mark.parametrize(("suffix", "index"), [(".safetensors", "model.safetensors"), (".bin", "pytorch_model.bin")])
def test_a_whole_file_and_an_index(tmp_path: Path, suffix: str, index: str) -> None:
    """transformers takes the whole file."""
    whole, shard = {"a": torch.ones(2)}, {"a": torch.zeros(2), "b": torch.zeros(2)}
    save = save_torch if suffix == ".safetensors" else torch.save
    save(whole, tmp_path / index)
    save(shard, tmp_path / f"shard{suffix}")
    write_index(tmp_path, dict.fromkeys(shard, f"shard{suffix}"), f"{index}.index.json")
    source = open_folder(tmp_path)
    assert {key: to_bytes(tensor) for key, tensor in source.tensors().items()} == {
        "a": np.ones(2, np.float32).tobytes()
    }
    assert source.warnings == [
        f"has both {index} and {index}.index.json: {index} is read, as transformers does, and the shards are left out"
    ]
    source.close()


def test_transformers_takes_the_same(tmp_path: Path) -> None:
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes = {"vocab_size": 8, "hidden_size": 4, "intermediate_size": 4}
    model = LlamaForCausalLM(LlamaConfig(**sizes, num_hidden_layers=1, num_attention_heads=1))
    model.save_pretrained(tmp_path)
    zeros = {key: torch.zeros_like(tensor) for key, tensor in model.state_dict().items()}
    save_torch(zeros, tmp_path / "shard.safetensors")
    write_index(tmp_path, dict.fromkeys(zeros, "shard.safetensors"))
    loaded = LlamaForCausalLM.from_pretrained(tmp_path).state_dict()
    with closing(open_folder(tmp_path)) as source:
        assert source.tensors().keys() == loaded.keys()
        for key, tensor in source.tensors().items():
            assert to_bytes(tensor) == loaded[key].numpy().tobytes(), key


def test_an_index_of_the_whole_file_is_no_choice(tmp_path: Path) -> None:
    save_torch({"a": torch.ones(2), "b": torch.zeros(2)}, tmp_path / "model.safetensors")
    write_index(tmp_path, dict.fromkeys("ba", "model.safetensors"))
    with closing(open_folder(tmp_path)) as source:
        assert not source.warnings
        assert list(source.items) == ["b", "a"]  # the order of the index
