"""Every recorded run of the converter, by its own command line: the same files with the same content."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import yaml

import ckptfs
from ckptfs.cli.main import run as command
from tests.recorded.cases import KEPT_HERE, Run, runs
from tests.recorded.command_lines import laid_out, model_differences, models
from tests.recorded.compare import config_differences, lasting, leaves, state_differences

LEFT_OVER = "tmp"
"""A temporary folder of the converter, which stands in one recording."""
CONVERTED = [r for kind in ("hf", "releases") for r in runs(kind, refused=False) if "output_files" in r.step]
REFUSED = [r for kind in ("releases", "config") for r in runs(kind, refused=True) if not r.works_here]
CONFIGS = [r for r in runs("config", refused=False) if r.case != KEPT_HERE]


def called(run: Run, tmp: Path, monkeypatch: pytest.MonkeyPatch) -> int:
    """The exit code of the run's command line, with *tmp* as the current folder."""
    monkeypatch.chdir(tmp)
    return command(laid_out(run, tmp))


@pytest.mark.parametrize("run", [r for r in CONVERTED if r.tgt == "hf"], ids=str)
def test_to_hugging_face(run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert called(run, tmp_path, monkeypatch) == 0
    out = tmp_path / "OUT"
    assert sorted(p.name for p in out.iterdir()) == run.step["output_files"]
    for name, model in models(run).items():
        name = name or run.step["output_files"][0]
        files = {p.name for p in (out / name).iterdir()} - {"generation_config.json"}
        assert sorted(files) == model["files"]
        assert model_differences(run, model, out / name, out="OUT") == []
        index = json.loads(next((out / name).glob("*.index.json")).read_text())
        assert index["metadata"]["total_size"] == model["total_size"]
        assert list(index["weight_map"]) == list(model["state"])


@pytest.mark.parametrize("run", [r for r in CONVERTED if r.tgt != "hf"], ids=str)
def test_to_cerebras(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert called(run, tmp_path, monkeypatch) == 0
    names = sorted(p.name for p in (tmp_path / "OUT").iterdir())
    assert names == [name for name in run.step["output_files"] if not name.startswith(LEFT_OVER)]
    said = [f"{'Checkpoint' if n.endswith('.mdl') else 'Config'} saved to OUT/{n}" for n in names]
    assert sorted(capsys.readouterr().out.splitlines()) == sorted(said)
    mdl, config = sorted((tmp_path / "OUT" / name for name in names), key=lambda p: p.suffix)
    assert yaml.safe_load(config.read_text()) == run.expected["config"]
    with ckptfs.open(mdl) as written:
        found, expected = leaves(written.source), run.state
        if run.src == "hf":  # the converter writes no metadata there
            assert written.metadata[-1]["params"] == run.expected["config"]
            found = {key: what for key, what in found.items() if not key.startswith("__metadata__.")}
        assert state_differences(found, {key: lasting(what) for key, what in expected.items()}) == []
        assert [key for key, what in expected.items() if found[key].get("dtype") != what.get("dtype")] == []
        assert [k for k in found if k.startswith("model.")] == [k for k in expected if k.startswith("model.")]


@pytest.mark.parametrize("run", CONFIGS, ids=str)
def test_configs(run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert called(run, tmp_path, monkeypatch) == 0
    (path,) = (tmp_path / "OUT").iterdir()
    names = run.step.get("output_files") or run.step.get("partial_output")
    assert names in (None, [path.name])
    written = (json.loads if path.suffix == ".json" else yaml.safe_load)(path.read_text())
    assert config_differences(written, run.corrected(run.expected["config"])) == []


@pytest.mark.parametrize("run", REFUSED, ids=str)
def test_refusals(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """In one line, with nothing written."""
    assert called(run, tmp_path, monkeypatch) in (1, 2)
    out, err = capsys.readouterr()
    assert (out, err.count("\n"), err[:8]) == ("", 1, "ckptfs: ")
    assert not (tmp_path / "OUT").exists() or list((tmp_path / "OUT").iterdir()) == []
