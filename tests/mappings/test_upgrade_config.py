"""Configs between Cerebras releases: every recorded step, and the laws of all steps."""

from __future__ import annotations

import copy

import pytest

from ckptfs.errors import CkptfsError
from ckptfs.mappings.formats import parse_format
from ckptfs.mappings.upgrades.about import About
from ckptfs.mappings.upgrades.config import upgraded_config
from tests.golden.cases import config_differences
from tests.others.cases import Run, runs

NOT_THE_CONFIG = ("not found in the ModelZoo registry", "in checkpoint", "DataLoader state")
"""Refusals that are not about the config."""


def recorded() -> list[Run]:
    """Recorded steps between releases of the usual layout."""
    found = [r for kind in ("upgrade", "config") for r in runs(kind) if "hf" not in (r.src, r.tgt)]
    return [r for r in found if not ({r.src, r.tgt} & {"cs-auto", "cs-current"} or r.src.endswith("dpo"))]


def about(run: Run) -> About:
    src, tgt = parse_format(run.src).release, parse_format(run.tgt).release
    assert src and tgt
    return About(run.model, run.model, src, tgt)


@pytest.mark.parametrize("run", [r for r in recorded() if not r.refused], ids=str)
def test_recorded_steps(run: Run) -> None:
    before = copy.deepcopy(run.config)
    config = run.config
    assert config_differences(upgraded_config(config, about(run)), run.expected["config"]) == []
    assert config == before


@pytest.mark.parametrize("run", [r for r in recorded() if r.refused], ids=str)
def test_recorded_refusals(run: Run) -> None:
    if any(text in run.step["error"]["message"] for text in NOT_THE_CONFIG):
        upgraded_config(run.config, about(run))
        return
    with pytest.raises(CkptfsError) as refusal:
        upgraded_config(run.config, about(run))
    assert "\n" not in str(refusal.value)
