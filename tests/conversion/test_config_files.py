"""The config of a Cerebras checkpoint that lies beside it, and what a checkpoint calls its model."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import yaml

import ckptfs
from ckptfs.conversion import resolve
from ckptfs.conversion.config_files import config_beside
from ckptfs.errors import ConfigError, UnknownFamily
from ckptfs.tools.write import write_file
from ckptfs.vfs.cerebras import checkpoint_file, params_file
from tests.paths import FAMILIES

GPT2 = FAMILIES / "gpt2/hf2cs-untied-fp32/hf"
CONFIG = {"trainer": {"init": {"model": {"name": "llama", "hidden_size": 8}}}}


def found(checkpoint: Path) -> str | None:
    config = config_beside(str(checkpoint), resolve.read_config)
    return Path(config.path).name if config else None


@pytest.mark.parametrize(
    ("checkpoint", "files", "wanted"),
    [
        ("a.mdl", {"a.yaml": 1, "params.yaml": 2}, "a.yaml"),
        (
            "model_to_cs-2.9.mdl",
            {"config_to_cs-2.9.yaml": 1, "config_to_cs-2.8.yaml": 2, "params.yaml": 3},
            "config_to_cs-2.9.yaml",
        ),
        ("x_to_cs-2.10-dpo.mdl", {"y_to_cs-2.10-dpo.yaml": 1, "y_to_cs-2.10.yaml": 2}, "y_to_cs-2.10-dpo.yaml"),
        ("x_folded.mdl", {"params_folded.yaml": 1, "params.yaml": 2}, "params_folded.yaml"),
        ("checkpoint_7.mdl", {"params.yaml": 1, "train.yaml": 2}, "params.yaml"),
        ("checkpoint_7.mdl", {"config.yml": 1}, "config.yml"),
        ("checkpoint_7.mdl", {"params.yaml": 1, "config.yaml": 1}, "config.yaml"),
        ("checkpoint_7.mdl", {"train.yaml": 1}, None),
        ("a[b.mdl", {"a[b.yaml": 1}, "a[b.yaml"),
    ],
)
def test_the_surest_name_wins(tmp_path: Path, checkpoint: str, files: dict[str, int], wanted: str | None) -> None:
    for name, size in files.items():
        (tmp_path / name).write_text(yaml.safe_dump({"model": {"hidden_size": size}}))
    assert found(tmp_path / checkpoint) == wanted


def test_other_files_do_not_count(tmp_path: Path) -> None:
    (tmp_path / "config.yaml").write_text("loader: {workers: 3}")
    (tmp_path / "params.yaml").mkdir()
    assert found(tmp_path / "a.mdl") is None
    assert found(tmp_path / "nowhere" / "a.mdl") is None


def test_equally_sure_names_are_refused_by_name(tmp_path: Path) -> None:
    (tmp_path / "params_7b.yaml").write_text("model: {hidden_size: 7}")
    (tmp_path / "params_13b.yaml").write_text("model: {hidden_size: 13}")
    with pytest.raises(ConfigError, match=r"params_13b\.yaml, params_7b\.yaml"):
        found(tmp_path / "a.mdl")
    (tmp_path / "a.yaml").write_text("model: {hidden_size: 1}")
    assert found(tmp_path / "a.mdl") == "a.yaml"


def test_a_damaged_one_is_named(tmp_path: Path) -> None:
    (tmp_path / "params.yaml").write_text("model: [")
    with pytest.raises(ConfigError, match=r"params\.yaml"):
        found(tmp_path / "a.mdl")


def model(metadata: list[dict[str, Any]], config: dict[str, Any]) -> str:
    return resolve._families(None, config, metadata, True)[0].name


@pytest.mark.parametrize(
    ("names", "in_config", "wanted"),
    [
        (["LlamaModel"], None, "llama"),
        (["Gpt2Model"], "llama", "llama"),
        (["llama-headless"], "llama", "llama-headless"),
        (["gpt2", ""], None, "gpt2"),
        (["SomethingModel", "GPTNeoXModel"], None, "gpt-neox"),
        ([], "bert/classifier", "bert-sequence-classifier"),
    ],
)
def test_names_of_the_model(names: list[str], in_config: str | None, wanted: str) -> None:
    config = {"model": {"hidden_size": 8} | ({"name": in_config} if in_config else {})}
    assert model([{"model_name": name} for name in names], config) == wanted


@pytest.mark.parametrize("name", ["SomethingModel", "Gpt2Model", "GptjModel"])
def test_a_name_of_no_family_is_named(name: str) -> None:
    """Before 2.4 the trainer's Gpt2Model was llama, starcoder and others too."""
    with pytest.raises(UnknownFamily, match=name):
        model([{"model_name": name}], {"model": {}})


@pytest.fixture
def written(tmp_path: Path) -> Path:
    """A Cerebras checkpoint that was made from a Hugging Face model, without its config."""
    path = tmp_path / "model_to_cs-2.2.mdl"
    with ckptfs.open(GPT2) as source:
        view = resolve.plan_view(source.source, "cs-2.2")
        write_file(checkpoint_file(view), path)
        (tmp_path / "elsewhere").mkdir()
        write_file(params_file(view.config), tmp_path / "elsewhere/config_to_cs-2.2.yaml")
    return path


def test_what_was_written_here_tells_its_family(written: Path) -> None:
    """Configs of releases before 2.4 have no name."""
    with ckptfs.open(written) as checkpoint:
        assert checkpoint.metadata[-1]["model_name"] == "gpt2"
        assert checkpoint.metadata[-1]["version"].startswith("2.2.0+")
        assert checkpoint.metadata[-1]["params"] == yaml.safe_load(
            (written.parent / "elsewhere/config_to_cs-2.2.yaml").read_text()
        )
        view, reason = resolve.prepare(checkpoint.source)
        assert (view and view.model, reason) == ("gpt2", None)
        assert resolve.recorded_family(checkpoint.source) == "gpt2"


def test_so_does_what_was_upgraded_here(written: Path, tmp_path: Path) -> None:
    with ckptfs.open(written) as checkpoint:
        view = resolve.plan_view(checkpoint.source, "cs-2.3", src_fmt="cs-2.2")
        write_file(checkpoint_file(view), tmp_path / "upgraded.mdl")
    with ckptfs.open(tmp_path / "upgraded.mdl") as upgraded:
        assert [entry["model_name"] for entry in upgraded.metadata] == ["gpt2", "gpt2"]
        assert resolve.plan_view(upgraded.source, "hf").model == "gpt2"


def test_a_config_beside_the_checkpoint_is_used_and_named(tmp_path: Path) -> None:
    case = FAMILIES / "llama/cs2hf-gqa-fp32"
    shutil.copy(case / "cs.mdl", tmp_path / "checkpoint_7.mdl")
    shutil.copy(case / "cs.yaml", tmp_path / "params.yaml")
    with ckptfs.open(tmp_path / "checkpoint_7.mdl") as checkpoint:
        view, _ = resolve.prepare(checkpoint.source)
        assert view is not None
        assert view.model == "llama"
        assert "params.yaml" in view.warnings[0]
        assert resolve.plan_view(checkpoint.source, "hf", config=tmp_path / "params.yaml").warnings == ()
        text = (tmp_path / "params.yaml").read_text()
        (tmp_path / "params.yaml").write_text(text + "cerebras: {save_iter_state_path: elsewhere}\n")
        view, _ = resolve.prepare(checkpoint.source)
        assert view is not None
        assert "save_iter_state_path is not followed" in view.warnings[1]
        (tmp_path / "config.yaml").write_text("model: {name: gpt2}")
        view, reason = resolve.prepare(checkpoint.source)
        assert view is None
        assert reason is not None
        assert "config.yaml, params.yaml" in reason
