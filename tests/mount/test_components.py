"""Vision models and models of several components: saved by transformers 5, converted, mounted, and loaded again."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

import ckptfs
from tests.conftest import Mounter
from tests.mount.component_models import MODELS
from tests.mount.forks import Command
from tests.mount.with_transformers import RoundTrips, round_trips, transformers_major

pytestmark = [
    pytest.mark.fuse,
    pytest.mark.skipif(transformers_major() < 5, reason="the models are those of transformers 5"),
]
LOST = ("pooler.dense.weight", "pooler.dense.bias")
"""Poolers, which Cerebras does not have in these models."""
MADE = ("embeddings.position_ids", "mm_projector.0.weight", "mm_projector.0.bias", "mm_projector.2.weight")
MADE += ("mm_projector.2.bias",)
"""What ckptfs makes, and transformers' own classes have no place for."""


@pytest.fixture(scope="module")
def models(shared_mounter: Mounter, command: Command, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RoundTrips]:
    folder = tmp_path_factory.mktemp("models")
    with round_trips("tests.mount.component_models", folder, shared_mounter, command, lambda _: "cs-2.9") as found:
        yield found


def mounted(models: RoundTrips, family: str) -> Path:
    """The family's components as one checkpoint, mounted."""
    for path in MODELS:
        if path.partition("/")[0] == family:
            models.saved(path)
    return models.mounted(family, family)


def loaded(models: RoundTrips, path: str) -> tuple[Path, Path]:
    """What transformers saved, and what it makes of the mount of that."""
    family, _, component = path.partition("/")
    return models.saved(path), models.loaded(path, mounted(models, family) / "hf" / component)


@pytest.mark.parametrize("path", MODELS)
def test_same_outputs_bit_for_bit(path: str, models: RoundTrips) -> None:
    original, found = (np.load(f"{path}.npy") for path in loaded(models, path))
    assert original.std() > 0.2
    np.testing.assert_array_equal(found, original)


@pytest.mark.parametrize("path", MODELS)
def test_the_loader_misses_nothing(path: str, models: RoundTrips) -> None:
    report = json.loads(Path(f"{loaded(models, path)[1]}.json").read_text())
    unexpected = [key for key in report.pop("unexpected_keys", []) if not key.endswith(MADE)]
    missing = [key for key in report.pop("missing_keys", []) if not key.endswith(LOST)]
    assert (report, unexpected, missing) == ({}, [], [])


@pytest.mark.parametrize("family", ["llava", "mmsimple-llava"])
def test_the_text_model_names_the_mounted_image_model(family: str, models: RoundTrips) -> None:
    for shown in ("hf", "hf-bin"):
        folder = mounted(models, family) / shown
        tower = json.loads((folder / "text_model" / "config.json").read_text())["mm_vision_tower"]
        assert tower == str(folder / "image_model")
        assert {"config.json", "preprocessor_config.json"} < set(os.listdir(tower))


@pytest.mark.parametrize("family", ["dpr", "dragon", "llava"])
def test_the_mount_of_components_mounts_as_cerebras_again(
    family: str, models: RoundTrips, shared_mounter: Mounter
) -> None:
    """Two mounts on top of each other: the first one's hf/ is the second one's source."""
    top = shared_mounter.mountpoint(f"again-{family}")
    done = shared_mounter.ckptfs("mount", mounted(models, family) / "hf", top, "--tgt-fmt", "cs-2.9")
    assert done.returncode == 0, done.stderr
    mdl, config = models.converted(family, family)
    assert (Path(top) / "cs" / "params.yaml").read_text() == config.read_text()
    with ckptfs.open(Path(top) / "cs" / "checkpoint.mdl") as again, ckptfs.open(mdl) as first:
        assert set(again) == set(first)
        tensors = [key for key, value in first.items() if isinstance(value, ckptfs.LazyTensor)]
        assert all(again[key].tobytes() == first[key].tobytes() for key in tensors)
        assert all(again[key] == first[key] for key in first if key not in tensors)
