"""Files of `torch/` and `hf-bin/` on a real mount: torch, transformers, zipfile and unzip read them."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import numpy as np
import pytest
import torch

import ckptfs
from tests.conftest import Mounter
from tests.mount.test_loaders import logits
from tests.paths import FAMILIES
from tests.torch_states import DATA, bits, check_state, recorded
from tests.waiting import MAX_SECONDS

pytestmark = pytest.mark.fuse

TRAINER = DATA / "v05/trainer_like.mdl"
LOAD = """
import sys, torch
state = torch.load(sys.argv[1], weights_only=True, mmap=sys.argv[2] == "mmap")
torch.save(state, sys.argv[3])
"""


def reload(path: Path, how: str, out: Path) -> object:
    """What torch finds at *path*, by a process of its own: a hung mount must not hang the tests."""
    done = subprocess.run(
        [sys.executable, "-c", LOAD, path, how, out], capture_output=True, timeout=MAX_SECONDS, check=False
    )
    assert done.returncode == 0, done.stderr.decode()[-2000:]
    return torch.load(out, weights_only=True)


@pytest.fixture(scope="module")
def trainer(shared_mounter: Mounter) -> Path:
    """A trainer's checkpoint, mounted."""
    mnt = shared_mounter.mountpoint()
    done = shared_mounter.ckptfs("mount", TRAINER, mnt)
    assert done.returncode == 0, done.stderr
    return mnt


@pytest.mark.parametrize("how", ["mmap", "read"])
def test_torch_loads_a_whole_checkpoint(trainer: Path, how: str, tmp_path: Path) -> None:
    want = recorded(TRAINER)
    check_state(reload(trainer / "torch/checkpoint.pt", how, tmp_path / "a.pt"), want)
    model = next(value for key, value in want["items"] if key["key"] == "model")
    check_state(reload(trainer / "torch/model.pt", how, tmp_path / "b.pt"), model)


def test_copies_pass_every_check(trainer: Path, tmp_path: Path) -> None:
    for name in ("checkpoint.pt", "model.pt"):
        mounted, copied = trainer / "torch" / name, tmp_path / name
        subprocess.run(["cp", mounted, copied], check=True, timeout=MAX_SECONDS)
        assert copied.stat().st_size == mounted.stat().st_size
        for path in (mounted, copied):
            with zipfile.ZipFile(path) as archive:
                assert archive.testzip() is None
            if shutil.which("unzip"):
                subprocess.run(["unzip", "-tq", path], check=True, capture_output=True, timeout=MAX_SECONDS)


@pytest.mark.parametrize(("model", "name"), [("gpt2", "gpt2/cs2hf-tied-fp32"), ("llama", "llama/cs2hf-gqa-fp32")])
def test_transformers_loads_hf_bin(model: str, name: str, mounter: Mounter) -> None:
    mnt = mounter.mounted(FAMILIES / name / "cs.mdl", "--model", model, "--config", FAMILIES / name / "cs.yaml")
    assert logits(mnt / "hf-bin") == logits(mnt / "hf")


def test_hf_bin_in_shards(mounter: Mounter) -> None:
    case = FAMILIES / "llama/cs2hf-gqa-fp32"
    mnt = mounter.mountpoint()
    options = ("--model", "llama", "--config", case / "cs.yaml", "--shard-size", "20KB")
    assert mounter.ckptfs("mount", case / "cs.mdl", mnt, *options).returncode == 0
    index = json.loads((mnt / "hf-bin/pytorch_model.bin.index.json").read_text())
    for key, name in index["weight_map"].items():
        assert key in torch.load(mnt / "hf-bin" / name)
    assert logits(mnt / "hf-bin") == logits(mnt / "hf")


def test_mapping_a_file_reads_no_data_and_a_copy_reads_them_once(mounter: Mounter, tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    state = {f"w{i}": rng.standard_normal((1024, 4096), np.float32) for i in range(6)}
    nbytes = sum(array.nbytes for array in state.values())
    ckptfs.save(state, tmp_path / "x.mdl")
    mnt = mounter.mountpoint()
    assert mounter.ckptfs("mount", tmp_path / "x.mdl", mnt, "--read-ahead", "0").returncode == 0
    path = mnt / "torch/checkpoint.pt"

    def n_read() -> int:
        return int(Path(f"/proc/{mounter.daemon_pid}/io").read_text().split()[1])

    start = n_read()
    found = torch.load(path, mmap=True)
    opened = n_read()
    assert opened - start < 0.1 * nbytes
    assert bits(found["w3"]) == state["w3"].tobytes()
    del found
    fd = os.open(path, os.O_RDONLY)
    os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
    os.close(fd)
    before = n_read()
    subprocess.run(["cp", path, tmp_path / "copy.pt"], check=True, timeout=MAX_SECONDS)
    assert n_read() - before < 1.5 * nbytes
    with zipfile.ZipFile(tmp_path / "copy.pt") as archive:
        assert archive.testzip() is None
