"""Formats are told by content, never by name."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.numpy import save_file

from ckptfs.errors import CkptfsError, SourceError, UnknownFormat, UsageError
from ckptfs.formats.detect import has_hdf5_signature, open_source
from ckptfs.formats.files import open_file
from ckptfs.tensors.cache import TileCache
from ckptfs.tensors.ranges import to_bytes
from tests.formats.samples import n_fds

CACHE = TileCache(1 << 20)


def test_each_format_under_a_name_of_another(tmp_path: Path) -> None:
    tensor = torch.arange(3.0)
    save_file({"x": tensor.numpy()}, tmp_path / "a.bin")
    torch.save({"x": tensor}, tmp_path / "b.safetensors")
    torch.save({"x": tensor}, tmp_path / "c.mdl", _use_new_zipfile_serialization=False)
    (tmp_path / "d.txt").write_text(" \n" + json.dumps({"weight_map": {"x": "a.bin"}}))
    (tmp_path / "folder").mkdir()
    shutil.copy(tmp_path / "a.bin", tmp_path / "folder" / "pytorch_model.bin")
    found = {}
    for name in ("a.bin", "b.safetensors", "c.mdl", "d.txt", "folder"):
        source = open_source(tmp_path / name, CACHE)
        found[name] = source.format
        assert to_bytes(source.tensors()["x"]) == tensor.numpy().tobytes()
        assert source.path == str(tmp_path / name)
        source.close()
    assert found == {
        "a.bin": "safetensors",
        "b.safetensors": "torch-zip",
        "c.mdl": "torch-legacy",
        "d.txt": "safetensors",
        "folder": "safetensors",
    }


def test_the_config_beside_a_single_file(tmp_path: Path) -> None:
    save_file({"x": np.ones(1)}, tmp_path / "model.safetensors")
    source = open_source(tmp_path / "model.safetensors", CACHE)
    assert source.config is None
    source.close()
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    source = open_source(tmp_path / "model.safetensors", CACHE)
    assert source.config == {"model_type": "llama"}
    source.close()


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "is empty"),
        (b"hello", "is none of these: .*, a safetensors file, an index of shards"),
        (b"\0" * 4096, "is none of these"),
        (b"\x80\x04}.", "a pickle, but not of torch.save"),
        (b"version https://git-lfs.github.com/spec/v1\noid sha256:00\n", "Git LFS pointer"),
        (b'{"model_type": "llama"}', "without a weight_map"),
        (b"PK\x05\x06" + bytes(18), "without data.pkl"),
    ],
)
def test_unknown_content(tmp_path: Path, content: bytes, message: str) -> None:
    (tmp_path / "x").write_bytes(content)
    before = n_fds()
    with pytest.raises(UnknownFormat, match=message):
        open_source(tmp_path / "x", CACHE)
    assert n_fds() == before


def test_nothing_there(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="no such file"):
        open_source(tmp_path / "absent.mdl", CACHE)
    with pytest.raises(UsageError, match="empty"):
        open_source("", CACHE)
    with pytest.raises(SourceError, match="no weights"):
        open_source(tmp_path, CACHE)


def test_a_pipe_does_not_hang(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(SourceError, match="regular"):
        open_source(tmp_path / "pipe", CACHE)


@pytest.mark.parametrize("at", [0, 512, 1024, 2048, 1 << 20])
def test_hdf5_behind_a_user_block(tmp_path: Path, at: int) -> None:
    (tmp_path / "x").write_bytes(bytes(at) + b"\x89HDF\r\n\x1a\n")
    file = open_file(tmp_path / "x")
    assert has_hdf5_signature(file)
    file.close()


@pytest.mark.parametrize("at", [1, 256, 513, 1536])
def test_the_signature_elsewhere_means_nothing(tmp_path: Path, at: int) -> None:
    (tmp_path / "x").write_bytes(bytes(at) + b"\x89HDF\r\n\x1a\n")
    with pytest.raises(CkptfsError):
        open_source(tmp_path / "x", CACHE)
