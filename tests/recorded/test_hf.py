"""Every recorded conversion of these families from and to Hugging Face, through the Python interface."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import ckptfs
from ckptfs.conversion.resolve import convert_config
from ckptfs.errors import CkptfsError
from tests.recorded.cases import Run, corrected, runs
from tests.recorded.decoder_cases import config_differences, differences

NOT_REACHED = "not found in the ModelZoo registry"
"""The converter's refusal of names that it lists; they work here."""


def reached_here(run: Run) -> bool:
    """Whether the converter refused nothing but the model's name, or the release 2.10."""
    unknown = NOT_REACHED in run.step["error"]["message"] or run.folder.name.endswith("not_in_registry")
    return unknown or run.tgt == "cs-2.10"


def tensors_of(view: ckptfs.View) -> dict[str, tuple[str, tuple[int, ...], bytes]]:
    return {key: (t.dtype, t.shape, t.tobytes()) for key, t in view.items()}


def placeless(config: dict[str, Any]) -> dict[str, Any]:
    """A recorded config with paths as they are until it is known where the result lies."""
    return {k: v.removeprefix("OUT/") if isinstance(v, str) else v for k, v in config.items()}


def view_of(run: Run, tmp: Path) -> tuple[ckptfs.Checkpoint, ckptfs.View]:
    checkpoint = ckptfs.open(run.checkpoint(tmp))
    config = run.config if run.src != "hf" else None
    return checkpoint, ckptfs.view(checkpoint, run.tgt, model=run.model, src_fmt=run.src, config=config)


@pytest.mark.parametrize("run", [r for r in runs("hf") if r.tgt == "hf"], ids=str)
def test_cerebras_to_hugging_face(run: Run, tmp_path: Path) -> None:
    checkpoint, view = view_of(run, tmp_path)
    with checkpoint:
        if "state" in run.expected:
            state, configs = run.expected["state"], {"": (view.config, run.expected["config"])}
        else:  # several components: a folder each, named in front of the keys
            state = {f"{name}/{key}": t for name, part in run.expected.items() for key, t in part["state"].items()}
            configs = {name: (view.config[name], placeless(part["config"])) for name, part in run.expected.items()}
        assert differences(tensors_of(view), state) == []
        assert list(view) == list(state)
        for name, (found, expected) in configs.items():
            assert config_differences(found, corrected(run, expected)) == [], name


@pytest.mark.parametrize("run", [r for r in runs("hf") if r.tgt != "hf" and not r.refused], ids=str)
def test_hugging_face_to_cerebras(run: Run, tmp_path: Path) -> None:
    checkpoint, view = view_of(run, tmp_path)
    with checkpoint:
        expected = {key.removeprefix("model."): t for key, t in run.expected["state"].items()}
        assert differences(tensors_of(view), expected) == []
        assert list(view) == list(expected)
        assert view.config == run.expected["config"]


@pytest.mark.parametrize("run", runs("config"), ids=str)
def test_configs(run: Run) -> None:
    if run.refused and not reached_here(run):
        with pytest.raises(CkptfsError) as refusal:
            convert_config(run.config, run.src, run.tgt, model=run.model)
        assert "\n" not in str(refusal.value)
        return
    found, _ = convert_config(run.config, run.src, run.tgt, model=run.model)
    if not run.refused:
        recorded = run.step["output_config"] if "output_config" in run.step else run.expected["config"]
        assert config_differences(found, corrected(run, recorded)) == []
