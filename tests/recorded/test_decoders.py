"""Every recorded conversion, through the Python interface, in both directions."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml

import ckptfs
from ckptfs.conversion.resolve import convert_config
from ckptfs.errors import ConfigError
from ckptfs.tools.write import write_file
from ckptfs.vfs.cerebras import checkpoint_file
from tests.paths import FAMILIES
from tests.recorded.decoder_cases import Case, cases, config_differences, differences, refusals


def tensors_of(view: ckptfs.View) -> dict[str, tuple[str, tuple[int, ...], bytes]]:
    return {key: (t.dtype, t.shape, t.tobytes()) for key, t in view.items()}


@pytest.mark.parametrize("case", cases("cs2hf"), ids=str)
def test_cerebras_to_hugging_face(case: Case) -> None:
    expected = case.json("expected_hf.json")
    with ckptfs.open(case.mdl) as checkpoint:
        view = ckptfs.view(
            checkpoint, "hf", model=case.model, config=case.folder / "cs.yaml", src_fmt=case.facts["src_fmt"]
        )
        assert differences(tensors_of(view), expected["tensors"]) == []
        assert list(view) == list(expected["tensors"])
        if expected.get("config"):
            assert config_differences(view.config, expected["config"]) == []


@pytest.mark.parametrize("case", cases("hf2cs"), ids=str)
def test_hugging_face_to_cerebras(case: Case) -> None:
    expected = case.json("expected_cs.json")
    with ckptfs.open(case.folder / "hf") as checkpoint:
        view = ckptfs.view(checkpoint, case.facts["tgt_fmt"], model=case.model)
        assert differences(tensors_of(view), expected["tensors"]) == []
        assert view.config == expected["config"]
        for fmt, other in expected["other_formats"].items():
            again = ckptfs.view(checkpoint, fmt, model=case.model)
            assert again.config == other.get("config", expected["config"]), fmt
            assert list(again) == list(view)


LOST = {"falcon/hf2cs-180b-mq-bias-bf16": ["bias: True, recorded 'absent'"]}
"""Case to fields that the converter loses on the way back and ckptfs writes; see docs/differences.md."""


@pytest.mark.parametrize("case", cases("hf2cs"), ids=str)
def test_the_converted_checkpoint_back_again(case: Case, tmp_path: Path) -> None:
    """From the recorded checkpoint where there is one, else from ours, and with the recorded config."""
    expected, release = case.json("expected_hf.json"), case.facts["tgt_fmt"]
    mdl = case.folder / "cs.mdl"
    if not mdl.exists():
        mdl = tmp_path / "cs.mdl"
        with ckptfs.open(case.folder / "hf") as checkpoint:
            write_file(checkpoint_file(ckptfs.view(checkpoint, release, model=case.model).plan), mdl)
    with ckptfs.open(mdl) as checkpoint:
        view = ckptfs.view(checkpoint, "hf", model=case.model, config=case.folder / "cs.yaml", src_fmt=release)
        assert differences(tensors_of(view), expected["tensors"]) == []
        assert list(view) == list(expected["tensors"])
        assert config_differences(view.config, expected["config"]) == LOST.get(str(case), [])


@pytest.mark.parametrize(
    "case", [c for c in cases("hf2cs") if "headless" in c.model or c.model in ("gpt2", "llama")], ids=str
)
def test_the_family_is_found_in_the_config(case: Case) -> None:
    """Without --model, ``model_type`` and the keys tell the family, with and without a head."""
    with ckptfs.open(case.folder / "hf") as checkpoint:
        view = ckptfs.view(checkpoint, case.facts["tgt_fmt"])
        assert view.plan.model == case.model
        assert differences(tensors_of(view), case.json("expected_cs.json")["tensors"]) == []


@pytest.mark.parametrize(("family", "entry"), refusals(), ids=lambda x: x if isinstance(x, str) else x["gist"][:40])
def test_refused_configs(family: str, entry: dict[str, Any]) -> None:
    base = FAMILIES / family / entry["base_config"]
    config = yaml.safe_load(base.read_text()) if base.suffix == ".yaml" else json.loads(base.read_text())
    model = config.get("model", config)
    for field, value in entry["delta"].items():
        if value == "__del__":
            model.pop(field, None)
        else:
            model[field] = value
    # Configs are judged before tensors, so any checkpoint of the family does where the base has none.
    source = base.parent if entry["src_fmt"] == "hf" else next(iter(sorted((FAMILIES / family).glob("*/cs.mdl"))))
    with ckptfs.open(source) as checkpoint:

        def convert() -> ckptfs.View:
            formats = {"src_fmt": entry["src_fmt"], "model": entry["model_arg"]}
            return ckptfs.view(checkpoint, entry["tgt_fmt"], config=config, drop_unmatched_keys=True, **formats)

        refused_later = "checkpoint converter refuses" in entry["gist"]
        if refused_later:
            alone = convert_config(config, entry["src_fmt"], entry["tgt_fmt"], model=entry["model_arg"])[0]
            assert config_differences(alone, entry["output"]) == []
        if entry["refused"] or refused_later:
            with pytest.raises(ConfigError, match=r"config field|muP") as refusal:
                convert()
            assert "\n" not in str(refusal.value)
        else:
            wrong = config_differences(convert().config, entry["output"])
            # Recorded with the one-layer config that the base had at that time.
            assert [w for w in wrong if "num_hidden_layers" not in w and "n_layer" not in w] == []


def test_a_config_may_be_a_mapping_a_yaml_or_a_json_file(tmp_path: Path) -> None:
    case = next(c for c in cases("cs2hf") if str(c) == "llama/cs2hf-gqa-fp32")
    config = yaml.safe_load((case.folder / "cs.yaml").read_text())
    (tmp_path / "params.json").write_text(json.dumps(config))
    with ckptfs.open(case.mdl) as checkpoint:
        results = [
            ckptfs.view(checkpoint, "hf", model="llama", config=c).config
            for c in (config, case.folder / "cs.yaml", tmp_path / "params.json")
        ]
    assert results[0] == results[1] == results[2]
