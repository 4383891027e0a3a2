"""Recorded runs laid out so that their own command lines work, and what they wrote."""

from __future__ import annotations

import gzip
import json
import shutil
from pathlib import Path
from typing import Any

import yaml

from tests.recorded.cases import Run
from tests.recorded.compare import config_differences, differences, tensors_in


def laid_out(run: Run, folder: Path) -> list[str]:
    """The run's command line, for *folder* as the current one; its inputs lie there afterwards.

    Ways back are recorded with ``cs.mdl``, while their outputs are named after what the way there had written.
    """
    argv = list(map(str, run.step["argv"]))
    shutil.copytree(run.folder, folder, dirs_exist_ok=True)
    for packed in folder.glob("*.gz"):
        packed.with_suffix("").write_bytes(gzip.decompress(packed.read_bytes()))
    if run.step.get("input") and not run.has_input:
        run.checkpoint(folder)
    elif argv[1].startswith("../"):
        argv[1] = shutil.copy(run.folder / argv[1], folder)
    if run.edited:
        path = folder / f"edited{run.config_path.suffix}"
        path.write_text((json.dumps if path.suffix == ".json" else yaml.safe_dump)(run.config))
        argv[argv.index("--config") + 1 if "--config" in argv else 1] = path.name
    (first, *_) = run.step.get("output_files") or [""]
    if first.endswith("_to_hf"):
        name, argv[1] = argv[1], f"{first.removesuffix('_to_hf')}.mdl"
        (folder / name).rename(folder / argv[1])
    return argv


def models(run: Run) -> dict[str, dict[str, Any]]:
    """What a run to Hugging Face wrote, by component ("" for a single model): ``config``, ``state``, names of files."""
    expected = run.expected
    return {"": expected} if "state" in expected else {name: expected[name] for name in run.step["output_files"]}


def model_differences(run: Run, model: dict[str, Any], folder: Path, *, out: str) -> list[str]:
    """What distinguishes the Hugging Face model in *folder* from the recorded one, but for the names of weight files.

    Configs name paths below *out*.
    """
    config = {
        name: f"{out}/{value[4:]}" if isinstance(value, str) and value.startswith("OUT/") else value
        for name, value in run.corrected(model["config"]).items()
    }
    wrong = config_differences(json.loads((folder / "config.json").read_text()), config)
    if "preprocessor_config" in model:
        small = json.loads((folder / "preprocessor_config.json").read_text())
        wrong += config_differences(small, model["preprocessor_config"])
    return wrong + differences(tensors_in(folder), model["state"])
