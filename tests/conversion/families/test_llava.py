"""LLaVA and MMSimple-LLaVA where no recorded conversion goes."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest
import yaml

from ckptfs.conversion import registry
from ckptfs.conversion.conversion import Conversion
from ckptfs.conversion.format_names import parse_format
from ckptfs.conversion.hf import between_hf, cs_config, hf_config
from ckptfs.errors import ConfigError, UnsupportedValue
from ckptfs.tensors.ranges import to_numpy
from tests.factories import source_of
from tests.paths import FAMILIES

RELEASE = parse_format("cs-2.9")
MODELS = ("llava", "mmsimple-llava")
IMAGE = {"model_type": "clip_vision_model", "hidden_size": 8, "image_size": 8, "patch_size": 4}
TEXT = {
    "model_type": "llava",
    "hidden_size": 12,
    "num_attention_heads": 2,
    "mm_hidden_size": 8,
    "mm_projector_type": "mlp2x_gelu",
}
IMAGE_KEY = "image_model/vision_model.embeddings.class_embedding"
TEXT_KEY = "text_model/lm_head.weight"
PROJECTORS = {"llava": "projector_image_model.", "mmsimple-llava": "image_model.projection."}


def section(model: str, image: dict[str, Any] | None = None, **text: Any) -> dict[str, Any]:
    """The Cerebras model section for these configs."""
    config = {"image_model": {**IMAGE, **(image or {})}, "text_model": {**TEXT, **text}}
    found: dict[str, Any] = cs_config(registry.family(model), config, RELEASE)["model"]
    return found


def back(model: str, cs: dict[str, Any]) -> dict[str, Any]:
    return hf_config(registry.family(model), {"model": cs}, RELEASE)[0]


def to_cs(model: str, *keys: str, **text: Any) -> Conversion:
    source = source_of(dict.fromkeys((IMAGE_KEY, *keys, TEXT_KEY), np.ones((2, 2), np.float32)), format="safetensors")
    config = {"image_model": IMAGE, "text_model": {**TEXT, **text}}
    return between_hf(source, registry.family(model), config, parse_format("hf"), RELEASE)


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize(("hf", "cs"), [(-2, -2), (-1, -1), (1, 0), (3, 2)])
def test_layers_are_counted_with_and_without_the_embeddings(model: str, hf: int, cs: int) -> None:
    found = section(model, mm_vision_select_layer=hf)
    where = found if model == "llava" else found["image_model_list"]["image_models"][0]["image_encoder"]
    assert where["image_feature_select_layer_idx" if model == "llava" else "image_layer_idx"] == cs
    assert back(model, found)["text_model"]["mm_vision_select_layer"] == hf


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("n", [1, 2, 3, 12])
def test_projectors_of_any_depth(model: str, n: int) -> None:
    found = section(model, mm_projector_type=f"mlp{n}x_gelu")
    block = (
        found["projector"]["image_model"] if model == "llava" else found["image_model_list"]["global_image_projection"]
    )
    assert (block["input_unit"], block["layers_units"]) == (8, [12] * n)
    assert block["layers_activation"] == ["gelu"] * (n - 1) + [None]
    text = back(model, found)["text_model"]
    assert (text["mm_projector_type"], text["mm_hidden_size"]) == (f"mlp{n}x_gelu", 8)


@pytest.mark.parametrize(
    "kind", ["linear", "mlp0x_gelu", "mlpx_gelu", "mlp2x_gelu ", "mlp2x_relu", None, 2, ["mlp2x_gelu"]]
)
def test_other_projectors_are_refused(kind: object) -> None:
    with pytest.raises(UnsupportedValue, match="mm_projector_type"):
        section("llava", mm_projector_type=kind)


@pytest.mark.parametrize(
    "change",
    [
        {"name": "MLP"},
        {"layers_activation": ["relu", None]},
        {"layers_activation": []},
        {"layers_units": [12, 13]},
        {"input_unit": 9},
        {"use_bias": False},
        {"layers_activation": None},
        {"layers_activation": 3},
    ],
    ids=str,
)
def test_projectors_without_a_hugging_face_name_are_refused(change: dict[str, Any]) -> None:
    found = section("llava")
    found["projector"]["image_model"] |= change
    with pytest.raises(ConfigError, match="projector/image_model"):
        back("llava", found)


def test_what_is_frozen_is_read_as_the_converter_does() -> None:
    """It writes a pattern and looks for the bare name, so a model whose projector alone is tuned comes back as not."""
    found = section("llava", tune_mm_mlp_adapter=True)
    assert found["freeze"] == ["^image_model", "^text_model"]
    for frozen, tuned in (
        *((["text_model"], True), (["^image_model", "^text_model"], False), (["^image_model"], False)),
        *((None, False), ([], False)),
    ):
        assert back("llava", {**found, "freeze": frozen})["text_model"]["tune_mm_mlp_adapter"] is tuned


@pytest.mark.parametrize("model", MODELS)
def test_a_missing_projector_is_made(model: str) -> None:
    view = to_cs(model, mm_projector_type="mlp2x_gelu")
    keys = [f"{PROJECTORS[model]}ffn.{i}.linear_layer.{p}" for i in (0, 1) for p in ("weight", "bias")]
    assert [key for key in view.tensors if key.startswith(PROJECTORS[model])] == keys == list(view.generated)
    arrays = [to_numpy(view.tensors[key]) for key in keys]
    assert [a.shape for a in arrays] == [(12, 8), (12,), (12, 12), (12,)]
    for array, bound in zip(arrays, (8**-0.5, 8**-0.5, 12**-0.5, 12**-0.5), strict=True):
        assert array.dtype == np.float32
        assert 0.5 * bound < np.abs(array).max() <= bound
    assert array_values(arrays) == array_values([to_numpy(to_cs(model).tensors[key]) for key in keys])
    assert len(set(array_values(arrays))) == sum(a.size for a in arrays)  # no two parts share a stream


def array_values(arrays: list[np.ndarray[Any, Any]]) -> list[float]:
    return [float(x) for array in arrays for x in array.reshape(-1)]


@pytest.mark.parametrize("model", MODELS)
def test_a_projector_that_is_there_is_taken(model: str) -> None:
    view = to_cs(model, "text_model/model.mm_projector.0.weight", "text_model/model.mm_projector.4.bias")
    found = [key for key in view.tensors if key.startswith(PROJECTORS[model])]
    assert found == [f"{PROJECTORS[model]}ffn.{n}.linear_layer.{p}" for n, p in ((0, "weight"), (2, "bias"))]
    assert view.generated == ()


def test_what_cerebras_has_no_use_for_is_dropped() -> None:
    keys = [
        "text_model/model.vision_tower.vision_tower.vision_model.embeddings.class_embedding",
        "image_model/text_model.encoder.layers.0.layer_norm1.bias",
        "image_model/logit_scale",
        "image_model/visual_projection.weight",
        "image_model/text_projection.weight",
    ]
    assert to_cs("llava", *keys).dropped == tuple(keys)
    cs = {
        "image_model.embedding_layer.cls_embedding": np.ones(8, np.float32),
        "text_model.lm_head.weight": np.ones((3, 12), np.float32),
        "projector_text_model.ffn.0.linear_layer.weight": np.ones((2, 2), np.float32),
    }
    view = between_hf(source_of(cs), registry.family("llava"), {"model": section("llava")}, RELEASE, parse_format("hf"))
    assert (sorted(view.tensors), view.dropped) == ([IMAGE_KEY, TEXT_KEY], tuple(cs)[2:])


def test_the_last_norm_is_read_from_its_second_copy() -> None:
    """As for llama alone: the converter drops the copy, and loaders would make a norm of ones."""
    norm = np.arange(12, dtype=np.float32)
    cs = {"image_model.embedding_layer.cls_embedding": norm[:8], "text_model.ln_f.weight": norm}
    view = between_hf(source_of(cs), registry.family("llava"), {"model": section("llava")}, RELEASE, parse_format("hf"))
    np.testing.assert_array_equal(to_numpy(view.tensors["text_model/model.norm.weight"]), norm)
    both = {**cs, "text_model.transformer_decoder.norm.weight": -norm}
    view = between_hf(
        source_of(both), registry.family("llava"), {"model": section("llava")}, RELEASE, parse_format("hf")
    )
    np.testing.assert_array_equal(to_numpy(view.tensors["text_model/model.norm.weight"]), -norm)


def test_the_config_of_a_whole_clip_model() -> None:
    whole = {"model_type": "clip", "projection_dim": 99, "vision_config": {**IMAGE, "num_hidden_layers": 5}}
    family = registry.family("llava")
    found = cs_config(family, {"image_model": whole, "text_model": TEXT}, RELEASE)["model"]["image_model"]
    assert (found["num_hidden_layers"], found["hidden_size"], found["num_classes"]) == (5, 8, 512)


@pytest.mark.parametrize("field", ["mm_hidden_size", "mm_projector_type"])
def test_a_plain_llama_is_refused(field: str) -> None:
    text = {name: value for name, value in TEXT.items() if name != field}
    with pytest.raises(ConfigError, match=field):
        cs_config(registry.family("llava"), {"image_model": IMAGE, "text_model": text}, RELEASE)


@pytest.mark.parametrize("value", [None, "x", [], {}, 0, -1, 1.5], ids=repr)
@pytest.mark.parametrize("field", ["hidden_size", "num_attention_heads", "mm_hidden_size", "mm_vision_select_layer"])
def test_configs_that_make_no_sense(field: str, value: object) -> None:
    try:
        section("llava", **{field: value})
        to_cs("llava", **{field: value})
        to_cs("llava", "text_model/model.mm_projector.0.weight", **{field: value})
    except ConfigError as e:
        assert "\n" not in str(e)
    else:
        assert (field, value) == ("mm_vision_select_layer", -1) or (field, value) == ("mm_vision_select_layer", 1.5)


@pytest.mark.parametrize("case", ["llava/llava", "mmsimple-llava/mmsimple"])
def test_the_preprocessor_is_the_recorded_one(case: str) -> None:
    recorded = json.loads((FAMILIES / case / "expected_hf.json").read_text())["roundtrip"]["image_model"]
    family = registry.family(case.partition("/")[0])
    config, _ = hf_config(family, yaml.safe_load((FAMILIES / case / "cs.yaml").read_text()), RELEASE)
    assert family.files(config) == {"image_model/preprocessor_config.json": recorded["preprocessor_config"]}
