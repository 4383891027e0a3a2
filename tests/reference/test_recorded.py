"""What the real ``cstorch.load`` makes of every recorded conversion to Cerebras, as ckptfs writes it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from ckptfs.cli.main import run as command
from tests.recorded.cases import Run, runs
from tests.recorded.command_lines import laid_out
from tests.recorded.compare import lasting
from tests.recorded.test_releases import flat
from tests.reference.test_cstorch import PYTHON, loaded

pytestmark = [
    pytest.mark.reference,
    pytest.mark.skipif(not PYTHON, reason="CKPTFS_CSTORCH_PYTHON names no Python with cerebras_pytorch"),
]

ALL = [r for kind in ("hf", "releases") for r in runs(kind, refused=False) if r.tgt != "hf"]
FIRST = list({r.folder: r for r in reversed(ALL)}.values())
"""One run of each case, to the newest release that it is recorded for."""


def written(run: Run, folder: Path, compress: list[str]) -> Path:
    """The checkpoint that the run's command line writes below *folder*."""
    folder.mkdir()
    argv = laid_out(run, folder)
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        assert command([*argv, *compress]) == 0
    (mdl,) = (folder / "OUT").glob("*.mdl")
    return mdl


@pytest.fixture(scope="module", params=["chunks as they are", "lz4"])
def found(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    """By run, what the reference loads: hashes of tensors and printed values by path."""
    folder = tmp_path_factory.mktemp("written")
    compress = ["--compress", "lz4"] if request.param == "lz4" else []
    paths = [written(run, folder / str(i), compress) for i, run in enumerate(FIRST)]
    states: dict[str, dict[str, Any]] = {}
    for run, described in zip(FIRST, loaded(*paths), strict=True):
        flat(described, "", states.setdefault(str(run), {}), {})
    return states


@pytest.mark.parametrize("run", FIRST, ids=str)
def test_it_loads_what_was_recorded(run: Run, found: dict[str, dict[str, Any]]) -> None:
    leaves = found[str(run)]
    want = {key: lasting(what) for key, what in run.state.items() if "empty" not in what}
    known = {
        key: what.get("sha256", repr(what.get("value"))) for key, what in want.items() if {"sha256", "value"} & {*what}
    }
    assert {key: leaves.get(key) for key in known} == known
    more = {key for key in set(leaves) - set(want) if key.startswith("__metadata__.0.")}
    assert set(leaves) - more == set(want)
    assert bool(more) == (not isinstance(run, Run) or run.src == "hf")  # the converter writes no metadata there
