"""Llama 3.2 Vision beyond the recorded cases: older names, defaults, muP, padding, and what is refused."""

from __future__ import annotations

import copy
import gzip
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml

import ckptfs
from ckptfs.conversion.ops import ConvToLinear
from ckptfs.conversion.resolve import convert_config
from ckptfs.errors import ConfigError, NoPath, ShapeError, UnsupportedValue
from ckptfs.tensors.ranges import to_numpy
from tests.factories import ArrayTensor
from tests.paths import FAMILIES

CASE = FAMILIES / "mllama" / "mllama"
HF: dict[str, Any] = json.loads((CASE / "hf" / "config.json").read_text())
CS: dict[str, Any] = yaml.safe_load((CASE / "cs.yaml").read_text())


def hf(**sections: dict[str, Any]) -> dict[str, Any]:
    """The recorded ``config.json`` with other fields in its sections."""
    return {**HF, **{name: {**HF[name], **fields} for name, fields in sections.items()}}


def cs(whole: dict[str, Any] | None = None, **sections: dict[str, Any]) -> dict[str, Any]:
    """The recorded Cerebras config, likewise."""
    model = copy.deepcopy(CS["model"])
    for name, fields in sections.items():
        model[name] |= fields
    return {"model": model, **(whole or {})}


def to_cs(config: dict[str, Any]) -> dict[str, Any]:
    return dict(convert_config(config, "hf", "cs-2.9", model="mllama")[0]["model"])


def to_hf(config: dict[str, Any]) -> dict[str, Any]:
    return convert_config(config, "cs-2.9", "hf", model="mllama")[0]


@pytest.fixture
def mdl(tmp_path: Path) -> Path:
    path = tmp_path / "cs.mdl"
    path.write_bytes(gzip.decompress((CASE / "cs_rand.mdl.gz").read_bytes()))
    return path


def test_patches_keep_their_pixels() -> None:
    kernel = np.arange(5 * 3 * 2 * 2, dtype=np.float32).reshape(5, 3, 2, 2)
    op, sizes = ConvToLinear("c", "s"), {"c": 3, "s": 2}
    (matrix,) = op.apply([ArrayTensor(kernel)], sizes)
    np.testing.assert_array_equal(to_numpy(matrix), kernel.transpose(0, 2, 3, 1).reshape(5, 12))
    (back,) = op.inverse().apply([matrix], sizes)
    np.testing.assert_array_equal(to_numpy(back), kernel)
    for wrong in (np.zeros((5, 2, 2, 3)), np.zeros((5, 12)), np.zeros(12), np.zeros(())):
        with pytest.raises(ShapeError, match="2 x 2 with 3 channels"):
            op.apply([ArrayTensor(wrong)], sizes)
    with pytest.raises(ShapeError, match="2 x 2 with 3 channels"):
        op.inverse().apply([ArrayTensor(kernel)], sizes)


def test_names_of_older_transformers_are_read() -> None:
    olds = {
        "model.language_model.": "language_model.model.",
        "lm_head.": "language_model.lm_head.",
        "model.multi_modal_projector.": "multi_modal_projector.",
        "model.vision_model.": "vision_model.",
    }
    with ckptfs.open(CASE / "hf") as checkpoint:
        items = {}
        for key, item in checkpoint.source.items.items():
            new = next(new for new in olds if key.startswith(new))
            name = olds[new] + key.removeprefix(new)
            items[name] = replace(item, key=name)
        older = ckptfs.view(ckptfs.Checkpoint(replace(checkpoint.source, items=items)), "cs-2.9", model="mllama")
        newer = ckptfs.view(checkpoint, "cs-2.9", model="mllama")
        assert list(older) == list(newer)
        assert all(older[key].tobytes() == newer[key].tobytes() for key in newer)


def test_the_text_model_may_use_mup(mdl: Path) -> None:
    fields = {"attention_logits_alpha": 3.0, "output_logits_alpha": 5.0, "embeddings_scale": 7.0}
    config = cs(text_model={**fields, "mup_base_hidden_size": 6, "share_embedding_weights": True})
    with ckptfs.open(mdl) as checkpoint:
        plain = ckptfs.view(checkpoint, model="mllama", config=CASE / "cs.yaml", src_fmt="cs-2.9")
        folded = ckptfs.view(checkpoint, model="mllama", config=config, src_fmt="cs-2.9")
        assert folded.config["text_config"]["tie_word_embeddings"] is False
        factors = {"embed_tokens": 7.0, "lm_head": 5.0 / 4, "self_attn.k_proj": 3.0 / 6**0.5}
        factors["cross_attn.k_proj"] = factors["self_attn.k_proj"]
        assert list(folded) == list(plain)
        for key in plain:
            vision = "vision_model" in key
            factor = next((f for part, f in factors.items() if part in key and not vision), 1.0)
            np.testing.assert_allclose(
                np.asarray(folded[key]), np.asarray(plain[key]) * np.float32(factor), rtol=1e-6, err_msg=key
            )
    with pytest.raises(UnsupportedValue, match="mup_base_hidden_size"):
        to_hf(cs(image_model={"mup_base_hidden_size": 6}))


def test_missing_fields_are_those_of_transformers() -> None:
    """The sizes of the published 11B model, whose files leave out what is usual."""
    found = to_cs({"model_type": "mllama", "vision_config": None})
    text, image = found["text_model"], found["image_model"]
    assert (text["vocab_size"], text["hidden_size"], text["num_hidden_layers"]) == (128256, 4096, 40)
    assert (text["rope_theta"], text["extra_attention_params"]) == (500000.0, {"num_kv_groups": 8})
    assert text["cross_attention_layers"] == [3, 8, 13, 18, 23, 28, 33, 38]
    assert (image["image_size"], image["patch_size"], image["num_global_layers"]) == ([448, 448], [14, 14], 8)
    assert "max_num_tiles" not in to_hf({"model": found})["vision_config"]
    assert "name" not in found


def test_rope_of_transformers_5() -> None:
    text = {k: v for k, v in HF["text_config"].items() if k not in ("rope_scaling", "rope_theta")}
    five = {**text, "rope_parameters": {"rope_theta": 77.0, "rope_type": "default"}}
    found = to_cs({**HF, "text_config": five})["text_model"]
    assert (found["rope_theta"], found["pos_scaling_factor"]) == (77.0, 1.0)
    for scaling in ({"type": "dynamic", "factor": 2.0}, {"rope_type": "default"}, {"type": "default", "factor": 1.0}):
        with pytest.raises(UnsupportedValue, match="rope_scaling"):
            to_cs(hf(text_config={"rope_scaling": scaling}))


@pytest.mark.parametrize(
    ("whole", "token"),
    [
        ({}, 0),
        ({"train_input": {"pad_token_id": 7}}, 7),
        ({"train_input": {"pad_token_id": None}}, 0),
        ({"train_input": 3}, 0),
    ],
)
def test_the_padding_token_of_a_flat_config(whole: dict[str, Any], token: int) -> None:
    assert to_hf(cs(whole))["text_config"]["pad_token_id"] == token


def test_the_padding_token_of_the_trainer() -> None:
    trainer = {"init": CS, "fit": {"train_dataloader": {"pad_token_id": 9}}}
    assert to_hf({"trainer": trainer})["text_config"]["pad_token_id"] == 9
    assert to_hf({"trainer": {"init": CS, "fit": {}}})["text_config"]["pad_token_id"] == 0
    trainer["fit"] = {"train_dataloader": {"pad_token_id": "nine"}}
    with pytest.raises(UnsupportedValue, match="pad_token_id"):
        to_hf({"trainer": trainer})


@pytest.mark.parametrize(
    ("section", "field", "value"),
    [
        ("image_model", "use_conv_patchified_embedding", True),
        ("image_model", "use_ffn_bias_in_attention", True),
        ("image_model", "image_size", [12, 16]),
        ("text_model", "num_extra_input_vocab_tokens", 0),
        ("text_model", "use_ffn_bias", True),
        ("text_model", "norm_type", "layernorm"),
    ],
)
def test_what_hugging_face_cannot_have(section: str, field: str, value: object) -> None:
    with pytest.raises(UnsupportedValue, match=field):
        to_hf(cs(**{section: {field: value}}))


@pytest.mark.parametrize(
    ("section", "field", "value"),
    [
        ("text_config", "model_type", "gpt2"),
        ("vision_config", "model_type", "clip_vision_model"),
        ("text_config", "hidden_act", "tanh"),
        ("text_config", "partial_rotary_factor", 0.5),
    ],
)
def test_what_cerebras_cannot_have(section: str, field: str, value: object) -> None:
    with pytest.raises(UnsupportedValue, match=field):
        to_cs(hf(**{section: {field: value}}))


@pytest.mark.parametrize("section", ["image_model", "text_model"])
@pytest.mark.parametrize("value", [None, 3, "x"])
def test_configs_that_make_no_sense(section: str, value: object) -> None:
    model = copy.deepcopy(CS["model"])
    if value is None:
        del model[section]
    else:
        model[section] = value
    with pytest.raises(ConfigError) as refusal:
        to_hf({"model": model})
    assert "\n" not in str(refusal.value)


@pytest.mark.parametrize(("field", "value"), [("num_channels", None), ("num_channels", 0), ("patch_size", [])])
def test_patches_without_a_size(field: str, value: object, mdl: Path) -> None:
    with ckptfs.open(mdl) as checkpoint, pytest.raises(ConfigError, match=rf"image_model: .*{field}|{field}.*square"):
        ckptfs.view(checkpoint, model="mllama", config=cs(image_model={field: value}), src_fmt="cs-2.9")


@pytest.mark.parametrize("ratios", [3, [], [3], [[1, 2, 3]], [["a", "b"]], None])
def test_aspect_ratios_that_make_no_sense(ratios: object) -> None:
    with pytest.raises(ConfigError):
        to_hf(cs(image_model={"supported_aspect_ratios": ratios}))


def test_releases() -> None:
    assert convert_config(HF, "hf", "cs-current", model="mllama")[1] == "cs-2.10"
    with pytest.raises(NoPath, match=r"cs-2\.4 … cs-2\.10"):
        convert_config(HF, "hf", "cs-2.3", model="mllama")
