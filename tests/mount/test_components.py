"""Vision models and models of several components: saved by transformers 5, converted, mounted, and loaded again."""

from __future__ import annotations

import json
import os
from functools import partial
from pathlib import Path

import numpy as np
import pytest

import ckptfs
from ckptfs.tools.export import outputs, write_outputs
from tests.conftest import Mounter, run_module
from tests.mount.component_models import MODELS
from tests.mount.test_transformers import transformers_major

pytestmark = [
    pytest.mark.fuse,
    pytest.mark.skipif(transformers_major() < 5, reason="the models are those of transformers 5"),
]
FAMILIES = tuple(dict.fromkeys(path.partition("/")[0] for path in MODELS))
LOST = ("pooler.dense.weight", "pooler.dense.bias")
"""Poolers, which Cerebras does not have in these models."""
MADE = ("embeddings.position_ids", "mm_projector.0.weight", "mm_projector.0.bias", "mm_projector.2.weight")
MADE += ("mm_projector.2.bias",)
"""What ckptfs makes, and transformers' own classes have no place for."""


run = partial(run_module, "tests.mount.component_models")


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("saved")
    run("save", folder)
    return folder


@pytest.fixture(scope="module")
def converted(saved: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """All models as Cerebras checkpoints, each in a folder with its config."""
    folder = tmp_path_factory.mktemp("converted")
    for family in FAMILIES:
        with ckptfs.open(saved / family) as checkpoint:
            view = ckptfs.view(checkpoint, "cs-2.9", model=family)
            files = outputs(view.plan, family, None, shard_bytes=1 << 30, safetensors=True)
            write_outputs(files, str(folder / family))
    return folder


@pytest.fixture(scope="module")
def mounts(converted: Path, shared_mounter: Mounter) -> Path:
    for family in FAMILIES:
        (mdl,), (config,) = (converted / family).glob("*.mdl"), (converted / family).glob("*.yaml")
        options = ("--model", family, "--config", config)
        done = shared_mounter.ckptfs("mount", mdl, shared_mounter.mountpoint(f"components-{family}"), *options)
        assert done.returncode == 0, done.stderr
    return Path(shared_mounter.folder)


@pytest.fixture(scope="module")
def loaded(mounts: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    output, shown = tmp_path_factory.mktemp("loaded"), tmp_path_factory.mktemp("shown")
    for family in FAMILIES:
        (shown / family).symlink_to(mounts / f"components-{family}")
    run("load", shown, output)
    return output


@pytest.mark.parametrize("path", MODELS)
def test_same_outputs_bit_for_bit(path: str, saved: Path, loaded: Path) -> None:
    found, original = np.load(loaded / f"{path}.npy"), np.load(saved / f"{path}.npy")
    assert original.std() > 0.2
    np.testing.assert_array_equal(found, original)


@pytest.mark.parametrize("path", MODELS)
def test_the_loader_misses_nothing(path: str, loaded: Path) -> None:
    report = json.loads((loaded / f"{path}.json").read_text())
    unexpected = [key for key in report.pop("unexpected_keys", []) if not key.endswith(MADE)]
    missing = [key for key in report.pop("missing_keys", []) if not key.endswith(LOST)]
    assert (report, unexpected, missing) == ({}, [], [])


@pytest.mark.parametrize("family", ["llava", "mmsimple-llava"])
def test_the_text_model_names_the_mounted_image_model(family: str, mounts: Path) -> None:
    for shown in ("hf", "hf-bin"):
        folder = mounts / f"components-{family}" / shown
        tower = json.loads((folder / "text_model" / "config.json").read_text())["mm_vision_tower"]
        assert tower == str(folder / "image_model")
        assert {"config.json", "preprocessor_config.json"} < set(os.listdir(tower))


@pytest.mark.parametrize("family", ["dpr", "dragon", "llava"])
def test_the_mount_of_components_mounts_as_cerebras_again(
    family: str, mounts: Path, converted: Path, shared_mounter: Mounter
) -> None:
    """Two mounts on top of each other: the first one's hf/ is the second one's source."""
    top = shared_mounter.mountpoint(f"again-{family}")
    done = shared_mounter.ckptfs("mount", mounts / f"components-{family}" / "hf", top, "--tgt-fmt", "cs-2.9")
    assert done.returncode == 0, done.stderr
    (config,) = (converted / family).glob("*.yaml")
    assert (Path(top) / "cs" / "params.yaml").read_text() == config.read_text()
    (mdl,) = (converted / family).glob("*.mdl")
    with ckptfs.open(Path(top) / "cs" / "checkpoint.mdl") as again, ckptfs.open(mdl) as first:
        assert set(again) == set(first)
        assert all(again[key].tobytes() == first[key].tobytes() for key in first)
