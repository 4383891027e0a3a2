"""``ckptfs fold-lora``: names, contents and refusals."""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

import ckptfs as package
from tests.cli.conftest import Result
from tests.conftest import ROOT

DATA = ROOT / "tests/data/lora"
Ckptfs = Callable[..., Result]


@pytest.fixture
def groups(tmp_path: Path) -> tuple[Path, Path]:
    """A checkpoint with adapters, and its config in another folder."""
    (tmp_path / "configs").mkdir()
    checkpoint, params = tmp_path / "checkpoint_100.mdl", tmp_path / "configs/params.yaml"
    shutil.copy(DATA / "groups.mdl", checkpoint)
    shutil.copy(DATA / "groups.yaml", params)
    return checkpoint, params


def command(checkpoint: Path, params: Path, *more: object) -> list[object]:
    return ["fold-lora", "--model", "gpt2", "-p", params, "--checkpoint_path", checkpoint, *more]


def test_both_outputs_stand_beside_their_inputs(groups: tuple[Path, Path], ckptfs: Ckptfs) -> None:
    checkpoint, params = groups
    done = ckptfs(*command(checkpoint, params))
    assert (done.code, done.err) == (0, "")
    model, config = checkpoint.with_name("checkpoint_100_folded.mdl"), params.with_name("params_folded.yaml")
    assert done.text.splitlines() == [f"Saved folded checkpoint to: {model}", f"Saved folded config to: {config}"]
    assert config.read_bytes() == (DATA / "groups_folded.yaml").read_bytes()
    ((_, state),) = json.loads((DATA / "groups_folded.expected.json").read_text())["tree"]["items"]
    with package.open(model) as folded:
        assert list(folded) == [f"model.{key['key']}" for key, _ in state["items"]]
        for key, leaf in state["items"]:
            assert hashlib.sha256(folded[f"model.{key['key']}"].tobytes()).hexdigest() == leaf["sha256"]


def test_outputs_are_written_over_only_with_force(groups: tuple[Path, Path], tmp_path: Path, ckptfs: Ckptfs) -> None:
    out = tmp_path / "out"
    assert ckptfs(*command(*groups, "--output-dir", out)).code == 0
    assert sorted(p.name for p in out.iterdir()) == ["checkpoint_100_folded.mdl", "params_folded.yaml"]
    (out / "checkpoint_100_folded.mdl").unlink()
    again = ckptfs(*command(*groups, "--output-dir", out))
    assert (again.code, again.err.count("\n")) == (2, 1)
    assert "--force" in again.err
    assert [p.name for p in out.iterdir()] == ["params_folded.yaml"], "refused before the first byte"
    assert ckptfs(*command(*groups, "--output-dir", out, "--force")).code == 0


def test_a_broken_tie_is_told(tmp_path: Path, ckptfs: Ckptfs) -> None:
    done = ckptfs(*command(DATA / "embedding_tied.mdl", DATA / "embedding_tied.yaml", "--output-dir", tmp_path))
    assert done.code == 0
    assert "lm_head.weight" in done.err
    assert (tmp_path / "embedding_tied_folded.yaml").read_bytes() == (DATA / "embedding_tied_folded.yaml").read_bytes()


def test_a_config_without_lora_params(groups: tuple[Path, Path], ckptfs: Ckptfs) -> None:
    checkpoint, params = groups
    shutil.copy(DATA / "groups_folded.yaml", params)
    done = ckptfs(*command(checkpoint, params))
    assert (done.code, done.err.count("\n")) == (1, 1)
    assert "lora_params" in done.err
    assert sorted(p.name for p in checkpoint.parent.iterdir()) == ["checkpoint_100.mdl", "configs"]
