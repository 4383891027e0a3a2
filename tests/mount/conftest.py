"""Many mounts in little time."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.conftest import Mounter
from tests.mount.forks import Command, commands
from tests.paths import FAMILIES


@pytest.fixture(scope="module")
def command(shared_mounter: Mounter) -> Iterator[Command]:
    """Runs command lines, given a folder to run them in."""
    with commands(shared_mounter.env) as call:
        yield call


@pytest.fixture
def source(tmp_path: Path) -> Path:
    """A recorded Llama under a trainer's name, to be changed or damaged."""
    return Path(shutil.copy(FAMILIES / "llama/cs2hf-gqa-fp32/cs.mdl", tmp_path / "checkpoint_42.mdl"))
