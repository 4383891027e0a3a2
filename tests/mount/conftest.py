"""Many mounts in little time."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.conftest import Mounter
from tests.mount.forks import Command, commands


@pytest.fixture(scope="module")
def command(shared_mounter: Mounter) -> Iterator[Command]:
    """Runs command lines, given a folder to run them in."""
    with commands(shared_mounter.env) as call:
        yield call
