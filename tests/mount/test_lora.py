"""A checkpoint with LoRA adapters, mounted: ``hf/`` is the model with the adapters in its weights."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

import pytest

from tests.conftest import ROOT, Mounter

pytestmark = pytest.mark.fuse

DATA = ROOT / "tests/data/lora"


def mounted(mounter: Mounter, name: str, checkpoint: Path, params: Path) -> Path:
    mnt = mounter.mountpoint(name)
    done = mounter.ckptfs("mount", checkpoint, mnt, "--model", "gpt2", "--config", params)
    assert done.returncode == 0, done.stderr
    return mnt


def test_folded_weights_are_the_recorded_ones(mounter: Mounter) -> None:
    from safetensors.numpy import load_file

    mnt = mounted(mounter, "mnt", DATA / "embedding_tied.mdl", DATA / "embedding_tied.yaml")
    ((_, state),) = json.loads((DATA / "embedding_tied_folded.expected.json").read_text())["tree"]["items"]
    recorded = {key["key"]: leaf["sha256"] for key, leaf in state["items"]}
    shown = load_file(mnt / "hf/model.safetensors")
    for hf, cs in (("transformer.wte", "embedding_layer.word_embeddings"), ("lm_head", "lm_head")):
        assert hashlib.sha256(shown[f"{hf}.weight"].tobytes()).hexdigest() == recorded[f"model.{cs}.weight"]
    assert json.loads((mnt / "hf/config.json").read_text())["tie_word_embeddings"] is False
    assert "lm_head.weight, which was tied to it" in (mnt / "README.txt").read_text()


def test_the_same_model_as_that_of_the_folded_checkpoint(mounter: Mounter) -> None:
    checkpoint, params = DATA / "groups.mdl", DATA / "groups.yaml"
    done = mounter.ckptfs(*("fold-lora", "-p", params, "--checkpoint_path", checkpoint, "--output-dir", mounter.folder))
    assert done.returncode == 0, done.stderr
    folded = [mounter.folder / name for name in ("groups_folded.mdl", "groups_folded.yaml")]
    one, other = mounted(mounter, "one", checkpoint, params), mounted(mounter, "other", *folded)
    for name in ("hf/model.safetensors", "hf/config.json", "hf-bin/pytorch_model.bin"):
        assert (one / name).read_bytes() == (other / name).read_bytes()
