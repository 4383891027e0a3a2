"""Llama 3.2 Vision and a DPO checkpoint: saved by transformers 5, converted, mounted, and loaded again."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from tests.conftest import Mounter
from tests.mount.forks import Command
from tests.mount.special_models import MODELS
from tests.mount.with_transformers import RoundTrips, round_trips, transformers_major

pytestmark = [
    pytest.mark.fuse,
    pytest.mark.skipif(transformers_major() < 5, reason="the models are those of transformers 5"),
]


@pytest.fixture(scope="module")
def models(shared_mounter: Mounter, command: Command, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RoundTrips]:
    folder = tmp_path_factory.mktemp("models")
    with round_trips("tests.mount.special_models", folder, shared_mounter, command, lambda _: "cs-current") as found:
        yield found


def loaded(models: RoundTrips, family: str) -> tuple[Path, Path]:
    """What transformers saved, and what it makes of the mount of that; nobody says of which format it is."""
    saved = models.saved(family)
    return saved, models.loaded(family, models.mounted(family, family) / "hf")


@pytest.mark.parametrize("family", MODELS)
def test_same_logits_bit_for_bit(family: str, models: RoundTrips) -> None:
    original, found = (np.load(f"{path}.npy") for path in loaded(models, family))
    assert original.std() > 0.5
    np.testing.assert_array_equal(found, original)


@pytest.mark.parametrize("family", MODELS)
def test_the_loader_misses_nothing(family: str, models: RoundTrips) -> None:
    assert json.loads(Path(f"{loaded(models, family)[1]}.json").read_text()) == {}
