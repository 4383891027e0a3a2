"""A short run of each target with a fixed seed; `scripts/fuzz.py` makes long ones."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.fuzz.runner import run, run_file
from tests.fuzz.targets import TARGETS

pytestmark = pytest.mark.slow

SLOW = {"h5-child": 6, "h5-library": 3}
"""Inputs of the targets that start a process for each."""
DATA = Path(__file__).parent / "data"
REPRODUCERS = sorted(path for path in DATA.glob("*/*") if path.is_file())


@pytest.mark.parametrize("target", TARGETS)
def test_damaged_files_give_our_errors(target: str) -> None:
    n = SLOW.get(target, 200)
    report = run(target, n, seed=1)
    assert report.findings == []
    assert report.n_inputs == n
    assert report.peak < 1 << 30


@pytest.mark.parametrize("path", REPRODUCERS, ids=lambda path: f"{path.parent.name}-{path.stem}")
def test_inputs_that_were_not_handled_once(path: Path) -> None:
    assert "outcome" in run_file(path.parent.name, path)


def test_a_reader_that_fails_is_found(tmp_path: Path) -> None:
    """The runner itself: a target that cannot take the input, one that is not there."""
    path = tmp_path / "no-such-checkpoint"
    path.write_bytes(b"none.mdl\0{}")
    assert run_file("h5-answer", path)["what"].startswith("StopIteration")
    assert "worker ended" in run_file("no-such-target", path)["what"]
