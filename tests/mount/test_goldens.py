"""Every recorded conversion of decoders, through a real mount; refused configs leave the rest of it working."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
import yaml
from safetensors import safe_open
from safetensors.torch import load_file

import ckptfs
from tests.conftest import Mounter
from tests.mount.forks import Command
from tests.paths import FAMILIES
from tests.recorded.decoder_cases import Case, cases, config_differences, differences, refusals

pytestmark = pytest.mark.fuse

SHARDED = "gpt2/cs2hf-shards10KB-safetensors-bf16"


def tensors_in(folder: Path) -> dict[str, tuple[str, tuple[int, ...], bytes]]:
    """What safetensors itself finds in the weight files of *folder*."""
    import torch

    found = {}
    for path in sorted(folder.glob("*.safetensors")):
        for key, tensor in load_file(path).items():
            data = tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
            found[key] = (str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape), data)
    return found


@pytest.mark.parametrize("case", cases("cs2hf"), ids=str)
def test_recorded_conversion(case: Case, mounter: Mounter, command: Command) -> None:
    mnt = mounter.mountpoint()
    shards = ["--shard-size", "10KB"] if str(case) == SHARDED else []
    names = ["--model", case.model, "--src-fmt", case.facts["src_fmt"], "--config", case.folder / "cs.yaml"]
    code, _, err = command(case.folder, "mount", case.mdl, mnt, *names, *shards)
    assert code == 0, err
    expected = case.json("expected_hf.json")
    hf = mnt / "hf"
    assert differences(tensors_in(hf), expected["tensors"]) == []
    config = json.loads((hf / "config.json").read_text())
    assert config["architectures"]
    recorded = expected.get("config") or json.loads((FAMILIES / "gpt2/cs2hf-bf16/hf/config.json").read_text())
    assert config_differences(config, recorded) == []
    if shards:
        index = json.loads((hf / "model.safetensors.index.json").read_text())
        assert index["weight_map"] == expected["index"]["weight_map"]
        assert index["metadata"]["total_size"] == expected["index"]["metadata"]["total_size"]
    else:
        assert sorted(os.listdir(hf))[-1] == "model.safetensors"
        with safe_open(hf / "model.safetensors", "np") as file:
            assert file.metadata() == {"format": "pt"}
    for folder, kind, suffix in ((hf, "safetensors", "*.safetensors"), (mnt / "hf-bin", "pickle", "*.bin")):
        size = ["--hf-shard-size", "10KB"] if shards else []
        out = mounter.folder / kind
        to_hf = ["--tgt-fmt", "hf", f"--export-{kind}", "--output-dir", out]
        code, printed, err = command(case.folder, "convert", case.mdl, *names, *size, *to_hf)
        assert code == 0, err
        written = sorted(Path(printed.strip()).glob(suffix))
        assert [p.read_bytes() for p in sorted(folder.glob(suffix))] == [p.read_bytes() for p in written]


@pytest.mark.parametrize("case", cases("hf2cs"), ids=str)
def test_recorded_conversion_to_cerebras(case: Case, mounter: Mounter, command: Command) -> None:
    mnt, expected = mounter.mountpoint(), case.json("expected_cs.json")
    fmt = ("--src-fmt", "hf", "--tgt-fmt", case.facts["tgt_fmt"])
    code, _, err = command(case.folder, "mount", "hf", mnt, "--model", case.model, *fmt)
    assert code == 0, err
    assert (mnt / "cs/params.yaml").read_bytes() == (case.folder / "cs.yaml").read_bytes()
    with ckptfs.open(mnt / "cs/checkpoint.mdl") as shown:
        assert shown.source.tree is not None
        assert list(shown.source.tree.keys or ()) == expected["top_level_keys"]
        state = {key.removeprefix("model."): shown[key] for key in shown}
        found = {key: (t.dtype, t.shape, t.tobytes()) for key, t in state.items()}
    assert differences(found, expected["tensors"]) == []
    assert list(found) == list(expected["tensors"])


@pytest.mark.parametrize(
    ("family", "entry"),
    [(f, e) for f, e in refusals() if e["refused"] and f in ("gpt2", "llama") and e["src_fmt"] != "hf"],
    ids=lambda x: x if isinstance(x, str) else x["gist"][:40],
)
def test_refused_config(family: str, entry: dict[str, Any], mounter: Mounter) -> None:
    base = FAMILIES / family / entry["base_config"]
    config = yaml.safe_load(base.read_text())
    for field, value in entry["delta"].items():
        config["model"] = {k: v for k, v in config["model"].items() if k != field}
        if value != "__del__":
            config["model"][field] = value
    params = mounter.folder / "params.yaml"
    params.write_text(yaml.safe_dump(config))
    mnt = mounter.mountpoint()
    done = mounter.ckptfs("mount", base.parent / "cs.mdl", mnt, "--model", entry["model_arg"], "--config", params)
    assert done.returncode == 0, done.stderr
    said = done.stdout + done.stderr
    assert "Traceback" not in said + mounter.log
    assert "hf" not in os.listdir(mnt)
    reason = (mnt / "README.txt").read_text()
    for field in entry["delta"]:
        assert field in said or "extra_attention_params" in said or "pos_scaling_type" in said
        assert field in reason or "extra_attention_params" in reason or "pos_scaling_type" in reason
    recorded = json.loads((base.parent / "expected_cs.json").read_text())["tensors"]
    raw = {k.removeprefix("model."): (mnt / "raw" / k).read_bytes() for k in os.listdir(mnt / "raw")}
    found = {k: (want["dtype"], tuple(want["shape"]), raw[k]) for k, want in recorded.items()}
    assert differences(found, recorded) == []


def test_the_checkpoint_alone_is_enough_where_it_tells_its_family(mounter: Mounter) -> None:
    """No ``__metadata__`` in the recorded files, so there is no model folder, and the mount says how to get one."""
    mnt = mounter.mountpoint()
    done = mounter.ckptfs("mount", FAMILIES / "llama/cs2hf-gqa-fp32/cs.mdl", mnt)
    assert done.returncode == 0, done.stderr
    assert "--model" in done.stdout
    assert "--config" in done.stdout
    assert sorted(os.listdir(mnt)) == ["README.txt", "checkpoint.json", "raw", "tensors", "torch"]
    assert json.loads((mnt / "checkpoint.json").read_text())["states"] == [
        "model",
        "global_step",
        "optimizer",
        "lr_scheduler",
    ]
