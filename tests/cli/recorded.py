"""Recorded runs of the converter, laid out so that their own command lines work, and what they wrote."""

from __future__ import annotations

import gzip
import json
import shutil
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

from tests.recorded.cases import Run, corrected
from tests.recorded.decoder_cases import config_differences, differences


def laid_out(run: Run, folder: Path) -> list[str]:
    """The run's command line, for *folder* as the current one; copies its inputs there.

    Ways back are recorded with ``cs.mdl``, while their outputs are named after what the way there had written.
    """
    argv = list(map(str, run.step["argv"]))
    shutil.copytree(run.folder, folder, dirs_exist_ok=True)
    for packed in folder.glob("*.gz"):
        packed.with_suffix("").write_bytes(gzip.decompress(packed.read_bytes()))
    (first, *_) = run.step.get("output_files") or [""]
    if first.endswith("_to_hf"):
        name, argv[1] = argv[1], f"{first.removesuffix('_to_hf')}.mdl"
        (folder / name).rename(folder / argv[1])
    return argv


def models(run: Run) -> dict[str, dict[str, Any]]:
    """What a run to Hugging Face wrote, by folder: ``files``, ``total_size``, ``config`` and ``state``."""
    names, expected = run.step["output_files"], run.expected
    return {names[0]: expected} if "state" in expected else {name: expected[name] for name in names}


def unlike_model(run: Run, model: dict[str, Any], folder: Path, *, out: str) -> list[str]:
    """What distinguishes the Hugging Face model in *folder* from the recorded one, but for the names of weight files.

    Configs name paths below *out*.
    """
    config = {
        name: f"{out}/{value[4:]}" if isinstance(value, str) and value.startswith("OUT/") else value
        for name, value in corrected(run, model["config"]).items()
    }
    wrong = config_differences(json.loads((folder / "config.json").read_text()), config)
    if "preprocessor_config" in model:
        small = json.loads((folder / "preprocessor_config.json").read_text())
        wrong += config_differences(small, model["preprocessor_config"])
    return wrong + differences(tensors_in(folder), model["state"])


def lasting(what: dict[str, Any]) -> dict[str, Any]:
    """What is recorded of a leaf, but for the content of tensors that the converter makes at random."""
    return {name: value for name, value in what.items() if name != "sha256" or not what.get("random")}


def tensors_in(folder: Path) -> dict[str, tuple[str, tuple[int, ...], bytes]]:
    """What safetensors and torch themselves find in the weight files of *folder*."""
    state = {}
    for path in sorted(folder.iterdir()):
        if path.suffix == ".safetensors":
            state |= load_file(path)
        elif path.suffix == ".bin":
            state |= torch.load(path, weights_only=True)
    return {
        key: (str(t.dtype)[6:], tuple(t.shape), t.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
        for key, t in state.items()
    }
