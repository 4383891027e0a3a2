"""Llama 3.2 Vision and a DPO checkpoint: saved by transformers 5, converted, mounted, and loaded again."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path

import numpy as np
import pytest

import ckptfs
from ckptfs.tools.export import outputs, write_outputs
from tests.conftest import Mounter, run_module
from tests.mount.special_models import MODELS
from tests.mount.test_transformers import transformers_major

pytestmark = [
    pytest.mark.fuse,
    pytest.mark.skipif(transformers_major() < 5, reason="the models are those of transformers 5"),
]


run = partial(run_module, "tests.mount.special_models")


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("saved")
    run("save", folder)
    return folder


@pytest.fixture(scope="module")
def loaded(saved: Path, shared_mounter: Mounter, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What transformers makes of mounted Cerebras checkpoints of these models; nobody says of which format they are."""
    folder, shown, output = (tmp_path_factory.mktemp(name) for name in ("converted", "shown", "loaded"))
    for family in MODELS:
        with ckptfs.open(saved / family) as checkpoint:
            view = ckptfs.view(checkpoint, "cs-current", model=family)
            write_outputs(outputs(view.plan, "m", "m", shard_bytes=1 << 30, safetensors=True), str(folder / family))
        (mdl,), (config,) = (folder / family).glob("*.mdl"), (folder / family).glob("*.yaml")
        point = shared_mounter.mountpoint(f"special-{family}")
        done = shared_mounter.ckptfs("mount", mdl, point, "--model", family, "--config", config)
        assert done.returncode == 0, done.stderr
        (shown / family).symlink_to(point)
    run("load", shown, output)
    return output


@pytest.mark.parametrize("family", MODELS)
def test_same_logits_bit_for_bit(family: str, saved: Path, loaded: Path) -> None:
    found, original = np.load(loaded / f"{family}.npy"), np.load(saved / f"{family}.npy")
    assert original.std() > 0.5
    np.testing.assert_array_equal(found, original)


@pytest.mark.parametrize("family", MODELS)
def test_the_loader_misses_nothing(family: str, loaded: Path) -> None:
    assert json.loads((loaded / f"{family}.json").read_text()) == {}
