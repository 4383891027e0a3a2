"""``ckptfs convert`` and ``convert-config`` on models of several components: the files that the converter names."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import pytest
import yaml

import ckptfs
from ckptfs.cli.main import run
from tests.paths import FAMILIES
from tests.recorded.cases import Run, runs


def call(*args: object) -> None:
    assert run([str(arg) for arg in args]) == 0


def recorded(case: str, name: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((FAMILIES / case / "expected_hf.json").read_text())[name]
    return found


@pytest.mark.parametrize("case", ["dpr/dpr", "dragon/dragon", "llava/llava", "mmsimple-llava/mmsimple"])
@pytest.mark.parametrize(("option", "name"), [("--export-pickle", "roundtrip"), ("--export-safetensors", "random")])
def test_one_folder_for_each_component(case: str, option: str, name: str, tmp_path: Path) -> None:
    stem = {"roundtrip": "cs", "random": "cs_rand"}[name]
    mdl, config = tmp_path / f"{stem}.mdl", FAMILIES / case / f"{stem}.yaml"
    mdl.write_bytes(gzip.decompress((FAMILIES / case / f"{stem}.mdl.gz").read_bytes()))
    out, model = tmp_path / "out", case.partition("/")[0]
    fmt = ("--model", model, "--src-fmt", "cs-2.9", "--tgt-fmt", "hf")
    call("convert", mdl, *fmt, "--config", config, "--output-dir", out, option)
    expected = recorded(case, name)
    assert {p.name for p in out.iterdir()} == set(expected)
    for component, part in expected.items():
        more = {"generation_config.json"} if component == "text_model" else set()  # its config names the end of text
        assert {p.name for p in (out / component).iterdir()} == {*part["files"], *more}
        written = json.loads((out / component / "config.json").read_text())
        tower = {"mm_vision_tower": str(out / "image_model")} if "mm_vision_tower" in part["config"] else {}
        assert {k: written[k] for k in part["config"]} == {**part["config"], **tower}
        if "preprocessor_config" in part:
            assert json.loads((out / component / "preprocessor_config.json").read_text()) == part["preprocessor_config"]


MODELS = ("dpr", "dragon", "llava", "mmsimple-llava")


@pytest.mark.parametrize("recording", [r for r in runs("hf") if r.model in MODELS and r.tgt == "cs-2.9"], ids=str)
def test_folders_become_one_checkpoint(recording: Run, tmp_path: Path) -> None:
    source = recording.folder / "hf"
    fmt = ("--model", recording.model, "--src-fmt", "hf", "--tgt-fmt", "cs-2.9")
    call("convert", source, *fmt, "--config", source, "--output-dir", tmp_path)
    assert sorted(p.name for p in tmp_path.iterdir()) == recording.step["output_files"]
    assert yaml.safe_load((tmp_path / "config_to_cs-2.9.yaml").read_text()) == recording.expected["config"]
    with ckptfs.open(tmp_path / "pytorch_model_to_cs-2.9.mdl") as checkpoint:
        assert {key for key in checkpoint if key.startswith("model.")} == set(recording.expected["state"])


def test_configs_alone(tmp_path: Path) -> None:
    hf, back = FAMILIES / "dpr/dpr/hf", tmp_path / "back"
    call("convert-config", hf, "--model", "dpr", "--src-fmt", "hf", "--tgt-fmt", "cs-2.9", "--output-dir", tmp_path)
    call(
        *("convert-config", tmp_path / "config_to_cs-2.9.yaml", "--model", "dpr"),
        *("--src-fmt", "cs-2.9", "--tgt-fmt", "hf", "--output-dir", back),
    )
    assert sorted(str(p.relative_to(back)) for p in back.glob("*/*")) == [
        "ctx_encoder/config.json",
        "q_encoder/config.json",
    ]
    written = json.loads((back / "q_encoder/config.json").read_text())
    assert written["hidden_size"] == json.loads((hf / "q_encoder/config.json").read_text())["hidden_size"]


@pytest.mark.parametrize("case", ["llava/llava", "mmsimple-llava/mmsimple"])
def test_configs_alone_are_those_of_the_whole_model(case: str, tmp_path: Path) -> None:
    out, params = tmp_path / "out", FAMILIES / case / "cs.yaml"
    fmt = ("--model", case.partition("/")[0], "--src-fmt", "cs-2.9", "--tgt-fmt", "hf")
    call("convert-config", params, *fmt, "--output-dir", out)
    expected = recorded(case, "roundtrip")
    names = ["image_model/config.json", "image_model/preprocessor_config.json", "text_model/config.json"]
    assert sorted(str(p.relative_to(out)) for p in out.glob("*/*")) == names
    image, preprocessor, text = (json.loads((out / name).read_text()) for name in names)
    assert preprocessor == expected["image_model"]["preprocessor_config"]
    assert {k: image[k] for k in expected["image_model"]["config"]} == expected["image_model"]["config"]
    assert text == {**expected["text_model"]["config"], "mm_vision_tower": str(out / "image_model")}
