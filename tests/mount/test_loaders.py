"""Real loaders on a mount: transformers with its defaults (mmap, parallel loading), numpy, safetensors."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import yaml

from tests.conftest import Mounter
from tests.paths import FAMILIES
from tests.waiting import MAX_SECONDS

pytestmark = pytest.mark.fuse

LOGITS = """
import sys, torch
from transformers import AutoModelForCausalLM
model = AutoModelForCausalLM.from_pretrained(sys.argv[1], dtype=torch.float32).eval()
with torch.no_grad():
    logits = model(torch.arange(2, 10)[None]).logits
sys.stdout.buffer.write(logits.numpy().tobytes())
"""


def logits(folder: Path) -> bytes:
    """Of the model in *folder*, by transformers in a process of its own: a hung mount must not hang the tests."""
    done = subprocess.run([sys.executable, "-c", LOGITS, folder], capture_output=True, timeout=200, check=False)
    assert done.returncode == 0, done.stderr.decode()[-2000:]
    return done.stdout


@pytest.mark.parametrize(("model", "name"), [("gpt2", "gpt2/hf2cs-untied-fp32"), ("llama", "llama/hf2cs-gqa-bf16")])
def test_same_logits_as_the_model_that_transformers_saved(model: str, name: str, mounter: Mounter) -> None:
    """``hf/`` of the case was saved by transformers, ``cs.mdl`` made of it by the public converter."""
    mnt = mounter.mounted(FAMILIES / name / "cs.mdl", "--model", model, "--config", FAMILIES / name / "cs.yaml")
    original = logits(FAMILIES / name / "hf")
    assert len(original) == 4 * 8 * 37
    assert logits(mnt / "hf") == original


def test_numpy_and_safetensors_without_torch(mounter: Mounter) -> None:
    case = FAMILIES / "llama/cs2hf-gqa-fp32"
    mnt = mounter.mountpoint()
    done = mounter.ckptfs("mount", case / "cs.mdl", mnt, "--model", "llama", "--config", case / "cs.yaml")
    assert done.returncode == 0, done.stderr
    code = """
import sys
from safetensors.numpy import load_file
import numpy as np
state = load_file(sys.argv[1] + "/hf/model.safetensors")
embedding = np.load(sys.argv[1] + "/tensors/model/embedding_layer/word_embeddings/weight.npy", mmap_mode="r")
assert (state["model.embed_tokens.weight"] == embedding).all() and embedding.shape == (37, 24)
assert "torch" not in sys.modules
"""
    subprocess.run([sys.executable, "-c", code, mnt], check=True, timeout=MAX_SECONDS)
    step = np.load(mnt / "tensors/global_step.npy", mmap_mode=None)
    assert step.shape == ()
    assert json.loads((mnt / "checkpoint.json").read_text())["step"] == int(step)


def test_a_checkpoint_that_tells_its_own_family(tmp_path: Path, mounter: Mounter) -> None:
    """Trainer checkpoints carry ``__metadata__``: version, model_name and params of the run."""
    torch = pytest.importorskip("torch")
    h5py = pytest.importorskip("h5py")
    del torch
    case = FAMILIES / "llama/cs2hf-l1-bf16"
    target = tmp_path / "checkpoint_7.mdl"
    target.write_bytes((case / "cs.mdl").read_bytes())
    params = yaml.safe_load((case / "cs.yaml").read_text())
    add_metadata(h5py, target, [{"version": "2.9.0", "model_name": "llama", "params": params}])
    mnt = mounter.mountpoint()
    done = mounter.ckptfs("mount", target, mnt)
    assert done.returncode == 0, done.stderr
    assert "hf" in {p.name for p in mnt.iterdir()}, done.stdout
    about = json.loads((mnt / "checkpoint.json").read_text())
    assert about["family"] == about["model_name"] == "llama"
    recorded = json.loads((case / "expected_hf.json").read_text())["random"]
    assert json.loads((mnt / "hf/config.json").read_text())["hidden_size"] == recorded["config"]["hidden_size"]


def add_metadata(h5py: object, path: Path, metadata: list[dict[str, object]]) -> None:
    """Write the leaves of ``__metadata__`` as the Cerebras writer does: scalars and strings as JSON attributes."""

    def node(value: object) -> dict[str, object]:
        if isinstance(value, dict):
            kids = [node(v) for v in value.values()]
            return {"type": "builtins.dict", "context": json.dumps(list(value)), "children_spec": kids}
        if isinstance(value, list):
            return {"type": "builtins.list", "context": "null", "children_spec": [node(v) for v in value]}
        return {"type": None, "context": None, "children_spec": []}

    def leaves(value: object, key: str) -> list[tuple[str, object]]:
        if isinstance(value, dict):
            return [leaf for k, v in value.items() for leaf in leaves(v, f"{key}.{k}")]
        if isinstance(value, list):
            return [leaf for i, v in enumerate(value) for leaf in leaves(v, f"{key}.{i}")]
        return [(key, value)]

    leaf_spec = {"type": None, "context": None, "children_spec": []}
    with h5py.File(path, "r+") as file:  # type: ignore[attr-defined]
        example, spec = json.loads(file.attrs["__spec__"])
        protocol, root = json.loads(spec)
        root["context"] = json.dumps([*json.loads(root["context"]), "__metadata__"])
        root["children_spec"].append(node(metadata))
        file.attrs["__spec__"] = json.dumps([example, json.dumps([protocol, root])])
        for key, value in leaves(metadata, "__metadata__"):
            inner = {"type": "builtins.dict", "context": json.dumps([key]), "children_spec": [leaf_spec]}
            if value is None:
                facts: dict[str, object] = {"__TYPE__": "NoneSerializer"}
            elif isinstance(value, str):
                facts = {"__TYPE__": "StringSerializer", "string_value": value}
            else:
                facts = {"__TYPE__": "ScalarSerializer", "scalar_value": value}
            file.attrs[f"{key}.__metadata__"] = json.dumps(
                {
                    "__spec__": [{key: "*"}, json.dumps([1, inner])],
                    "__objects__": [key],
                    f"{key}.__metadata__": {**facts, "__NONE__": True},
                }
            )
