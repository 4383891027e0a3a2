"""Pickles of lazy tensors, checkpoints, groups and views: opened again with the same data, or refused."""

from __future__ import annotations

import copy
import os
import pickle
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import yaml
from safetensors.numpy import save_file

import ckptfs
from ckptfs.api.checkpoint import Checkpoint
from ckptfs.errors import SourceChanged, SourceClosed, UsageError
from tests.conftest import ROOT
from tests.factories import source_of
from tests.paths import FAMILIES

LLAMA = FAMILIES / "llama/cs2hf-gqa-fp32"
HEAD = "model.lm_head.weight"


def again(value: Any) -> Any:
    return pickle.loads(pickle.dumps(value))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A checkpoint with its config, in a folder of its own."""
    for name in ("cs.mdl", "cs.yaml"):
        shutil.copy(LLAMA / name, tmp_path)
    return tmp_path


def viewed(folder: Path, **more: Any) -> ckptfs.View:
    return ckptfs.view(folder / "cs.mdl", model="llama", config=folder / "cs.yaml", **more)


def safetensors_in(folder: Path) -> ckptfs.Checkpoint:
    save_file({HEAD: np.arange(12, dtype=np.float32).reshape(3, 4)}, folder / "x.safetensors")
    return ckptfs.open(folder / "x.safetensors")


def torch_in(folder: Path, *, legacy: bool) -> ckptfs.Checkpoint:
    state = {"model": {"lm_head": {"weight": torch.arange(12.0).reshape(3, 4).T}}}
    torch.save(state, folder / "x.pt", _use_new_zipfile_serialization=not legacy)
    return ckptfs.open(folder / "x.pt")


OPENED: dict[str, Callable[[Path], ckptfs.Checkpoint]] = {
    "cerebras": lambda folder: ckptfs.open(folder / "cs.mdl"),
    "safetensors": safetensors_in,
    "torch": lambda folder: torch_in(folder, legacy=False),
    "torch legacy": lambda folder: torch_in(folder, legacy=True),
    "folder": lambda folder: ckptfs.open(FAMILIES / "llama/hf2cs-gqa-bf16/hf"),
}


@pytest.mark.parametrize("opened", OPENED.values(), ids=OPENED)
def test_the_same_data(folder: Path, opened: Callable[[Path], ckptfs.Checkpoint]) -> None:
    with opened(folder) as checkpoint:
        loaded = again(checkpoint)
        assert list(loaded) == list(checkpoint)
        for key in checkpoint:
            if isinstance(checkpoint[key], ckptfs.LazyTensor):
                assert again(checkpoint[key]).tobytes() == checkpoint[key].tobytes() == loaded[key].tobytes()
    key = next(key for key in loaded if isinstance(loaded[key], ckptfs.LazyTensor))
    assert loaded[key].nbytes == len(loaded[key].tobytes())  # has files of its own


@pytest.mark.parametrize("opened", OPENED.values(), ids=OPENED)
def test_a_lazy_tensor_does_not_outlive_its_checkpoint(
    folder: Path, opened: Callable[[Path], ckptfs.Checkpoint]
) -> None:
    with opened(folder) as checkpoint:
        lazy = [value for value in map(checkpoint.__getitem__, checkpoint) if isinstance(value, ckptfs.LazyTensor)]
        read = [tensor for tensor in lazy[::2] if tensor.tobytes()]  # of these, the chunk table is known
    others = [ckptfs.open(FAMILIES / f"llama/{name}/cs.mdl") for name in ("cs2hf-l1-bf16", "cs2hf-gqa-fp32")] * 5
    for touch in (np.asarray, ckptfs.LazyTensor.torch, ckptfs.LazyTensor.tobytes, pickle.dumps, lambda t: t[...]):
        for tensor in [*lazy, *read]:
            with pytest.raises(SourceClosed, match=r"checkpoint .* is closed"):
                touch(tensor)  # type: ignore[operator]
    assert lazy[0].shape is not None
    with pytest.raises(SourceClosed):
        pickle.dumps(checkpoint)
    assert "closed" in repr(checkpoint)
    del others


def test_views_and_groups(folder: Path) -> None:
    view = viewed(folder)
    found = again(view)
    assert (found.config, list(found)) == (view.config, list(view))
    key = "model.layers.0.self_attn.q_proj.weight"
    assert again(view[key]).tobytes() == found[key].tobytes() == view[key].tobytes()
    group = view.checkpoint["model"]
    assert list(again(group)) == list(group)
    view.close()
    for touch in (lambda: view[key].numpy(), lambda: pickle.dumps(view), lambda: group["lm_head.weight"].numpy()):
        with pytest.raises(SourceClosed):
            touch()


def test_options_travel(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(folder)
    config = yaml.safe_load(Path("cs.yaml").read_text())
    by_path = ckptfs.view("cs.mdl", "hf", model="llama", config="cs.yaml", drop_unmatched_keys=True)
    by_value = ckptfs.view(ckptfs.open("cs.mdl", follow_links=True), model="llama", config=config, src_fmt="cs-2.9")
    pickles = [pickle.dumps(by_path), pickle.dumps(by_value)]
    monkeypatch.chdir("/")
    first, second = map(pickle.loads, pickles)
    assert first.config == second.config == by_path.config
    assert second.checkpoint.recipe.follow_links
    assert not first.checkpoint.recipe.follow_links
    assert first.checkpoint.recipe.path == str(folder / "cs.mdl")


def test_pickles_share_what_they_open(folder: Path) -> None:
    before = len(os.listdir("/proc/self/fd"))
    with ckptfs.open(folder / "cs.mdl") as checkpoint:
        pickles = [pickle.dumps(checkpoint[HEAD]) for _ in range(20)]
    loaded = [pickle.loads(data) for data in pickles]
    assert len({id(tensor._owner) for tensor in loaded}) == 1
    loaded[0]._owner.close()
    assert pickle.loads(pickles[0]).tobytes()  # opened anew
    del loaded, checkpoint
    assert len(os.listdir("/proc/self/fd")) == before


def test_a_source_that_is_another_one_is_refused(folder: Path) -> None:
    with ckptfs.open(folder / "cs.mdl") as checkpoint:
        data = pickle.dumps(checkpoint[HEAD])
        shutil.copy(FAMILIES / "llama/cs2hf-l1-bf16/cs.mdl", folder / "new")
        os.rename(folder / "new", folder / "cs.mdl")
        assert checkpoint[HEAD].tobytes()  # the old one is still there for who has it open
    with pytest.raises(SourceChanged, match=r"cs\.mdl: is not the file that was pickled"):
        pickle.loads(data)
    (folder / "cs.mdl").unlink()
    with pytest.raises(FileNotFoundError, match=r"cs\.mdl: no such file"):
        pickle.loads(data)


def test_another_config_is_refused(folder: Path) -> None:
    data = pickle.dumps(viewed(folder))
    config = (folder / "cs.yaml").read_text()
    assert "rope_theta: 10000.0" in config
    (folder / "cs.yaml").write_text(config.replace("rope_theta: 10000.0", "rope_theta: 5.0"))
    with pytest.raises(SourceChanged, match="another config"):
        pickle.loads(data)


def test_a_source_written_to_is_read_no_more(folder: Path) -> None:
    os.utime(folder / "cs.mdl", ns=(0, 0))
    checkpoint = ckptfs.open(folder / "cs.mdl")
    view = ckptfs.view(checkpoint, model="llama", config=folder / "cs.yaml")
    assert checkpoint[HEAD].tobytes()
    shutil.copyfile(FAMILIES / "llama/cs2hf-l1-bf16/cs.mdl", folder / "cs.mdl")
    for tensor in (checkpoint[HEAD], view["lm_head.weight"]):
        for touch in (np.asarray, pickle.dumps):
            with pytest.raises(SourceChanged, match=r"cs\.mdl: was written to after it was opened"):
                touch(tensor)  # type: ignore[operator]
    for write in (
        lambda path: ckptfs.save(checkpoint, path),
        lambda path: ckptfs.save(checkpoint, path, compress="lz4"),
        lambda path: ckptfs.convert(checkpoint, model="llama", config=folder / "cs.yaml", output_dir=path),
        lambda path: ckptfs.load(checkpoint, lazy=False),
    ):
        with pytest.raises(SourceChanged):
            write(folder / "out")
        assert not [path for path in folder.rglob("out*") if path.is_file()]


def test_what_comes_from_no_file_is_refused() -> None:
    checkpoint = Checkpoint(source_of({"a": np.zeros(3)}))
    for value in (checkpoint, checkpoint["a"], ckptfs.LazyTensor(checkpoint.source.items["a"].tensor)):  # type: ignore[arg-type]
        with pytest.raises(UsageError, match="cannot be pickled"):
            pickle.dumps(value)


def test_a_copy_of_a_lazy_tensor_is_itself(folder: Path) -> None:
    with ckptfs.open(folder / "cs.mdl") as checkpoint:
        tensor = checkpoint[HEAD]
        assert copy.copy(tensor) is copy.deepcopy(tensor) is tensor


@pytest.mark.parametrize("method", ["fork", "spawn", "forkserver"])
def test_worker_processes(method: str) -> None:
    command = [sys.executable, "-W", "ignore", "-m", "tests.api.workers", method, str(LLAMA)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout.endswith("OK\n")
