"""Every recorded conversion from and to Hugging Face, through the Python interface."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

import ckptfs
from ckptfs.conversion.resolve import convert_config
from ckptfs.errors import CkptfsError, ConfigError
from tests.recorded.cases import KEPT_HERE, Run, run_named, runs
from tests.recorded.compare import config_differences, differences, tensors_of

LOST = {"falcon/hf2cs-180b-mq-bias-bf16": ["bias: True, recorded 'absent'"]}
"""Case to fields that the converter loses on the way back and ckptfs writes; see docs/differences.md."""
TOLD = [r for r in runs("hf") if r.src == "hf" and ("headless" in r.case or r.model in ("gpt2", "llama"))]
EDITED = [r for r in runs("config") if r.edited]


def placeless(config: dict[str, Any]) -> dict[str, Any]:
    """A recorded config with paths as they are until it is known where the result lies."""
    return {k: v.removeprefix("OUT/") if isinstance(v, str) else v for k, v in config.items()}


def view_of(run: Run, tmp: Path) -> tuple[ckptfs.Checkpoint, ckptfs.View]:
    checkpoint = ckptfs.open(run.checkpoint(tmp))
    config = run.config if run.src != "hf" else None
    return checkpoint, ckptfs.view(checkpoint, run.tgt, model=run.model, src_fmt=run.src, config=config)


@pytest.mark.parametrize("run", [r for r in runs("hf", refused=False) if r.tgt == "hf"], ids=str)
def test_cerebras_to_hugging_face(run: Run, tmp_path: Path) -> None:
    checkpoint, view = view_of(run, tmp_path)
    with checkpoint:
        if "state" in run.expected:
            state, configs = run.state, {"": (view.config, run.expected["config"])}
        else:  # several components: a folder each, named in front of the keys
            state = {f"{name}/{key}": t for name, part in run.expected.items() for key, t in part["state"].items()}
            configs = {name: (view.config[name], placeless(part["config"])) for name, part in run.expected.items()}
        assert differences(tensors_of(view), state) == []
        assert list(view) == list(state)
        for name, (found, expected) in configs.items():
            assert config_differences(found, run.corrected(expected)) == LOST.get(run.case, []), name


@pytest.mark.parametrize("run", [r for r in runs("hf", refused=False) if r.tgt != "hf"], ids=str)
def test_hugging_face_to_cerebras(run: Run, tmp_path: Path) -> None:
    checkpoint, view = view_of(run, tmp_path)
    with checkpoint:
        expected = {key.removeprefix("model."): t for key, t in run.state.items()}
        assert differences(tensors_of(view), expected) == []
        assert list(view) == list(expected)
        assert view.config == run.expected["config"]


@pytest.mark.parametrize("run", runs("hf", refused=True), ids=str)
def test_refused_with_the_checkpoint(run: Run, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"config field|muP") as refusal:
        view_of(run, tmp_path)
    assert "\n" not in str(refusal.value)


@pytest.mark.parametrize("run", TOLD, ids=str)
def test_the_family_is_found_in_the_config(run: Run) -> None:
    """Without --model, ``model_type`` and the keys tell the family, with and without a head."""
    with ckptfs.open(run.input) as checkpoint:
        view = ckptfs.view(checkpoint, run.tgt)
        assert view.plan.model == run.model
        assert differences({f"model.{key}": t for key, t in tensors_of(view).items()}, run.state) == []


@pytest.mark.parametrize("run", [r for r in runs("config") if r.case != KEPT_HERE], ids=str)
def test_configs(run: Run) -> None:
    if run.refused and not run.works_here:
        with pytest.raises(CkptfsError) as refusal:
            convert_config(run.config, run.src, run.tgt, model=run.model)
        assert "\n" not in str(refusal.value)
        return
    found, _ = convert_config(run.config, run.src, run.tgt, model=run.model)
    if not run.refused:
        assert config_differences(found, run.corrected(run.expected["config"])) == []


@pytest.mark.parametrize("run", EDITED, ids=str)
def test_edited_configs_of_a_checkpoint(run: Run) -> None:
    """Configs are judged before tensors, so any checkpoint of the family does where the base has none."""
    family = run.folder.parent
    source = run.config_path.parent if run.src == "hf" else min(family.glob("*/cs.mdl"))
    with ckptfs.open(source) as checkpoint:

        def convert() -> ckptfs.View:
            formats = {"src_fmt": run.src, "model": run.model}
            return ckptfs.view(checkpoint, run.tgt, config=run.config, drop_unmatched_keys=True, **formats)

        if run.refused or f"{run}_checkpoint" in map(str, runs("hf", refused=True)):
            with pytest.raises(ConfigError, match=r"config field|muP") as refusal:
                convert()
            assert "\n" not in str(refusal.value)
        else:
            assert config_differences(convert().config, run.expected["config"]) == []


def test_a_config_may_be_a_mapping_a_yaml_or_a_json_file(tmp_path: Path) -> None:
    run = run_named("llama/cs2hf-gqa-fp32/cs-2.9_to_hf_random")
    (tmp_path / "params.json").write_text(json.dumps(run.config))
    with ckptfs.open(run.input) as checkpoint:
        results = [
            ckptfs.view(checkpoint, "hf", model="llama", config=c).config
            for c in (run.config, run.config_path, tmp_path / "params.json")
        ]
    assert results[0] == results[1] == results[2]
