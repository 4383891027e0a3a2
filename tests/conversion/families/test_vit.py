"""ViT and CLIP's image encoder where no recorded conversion goes."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from ckptfs.conversion import registry
from ckptfs.conversion.conversion import Conversion
from ckptfs.conversion.format_names import parse_format
from ckptfs.conversion.hf import between_hf, cs_config, hf_config
from ckptfs.conversion.ops import RollRows
from ckptfs.errors import ConfigError, UnmatchedKeys, UnsupportedValue
from ckptfs.tensors.ranges import to_numpy
from tests.factories import ArrayTensor, source_of

RELEASE = parse_format("cs-2.9")
HF = {"model_type": "vit", "hidden_size": 4, "image_size": 8, "patch_size": 4, "encoder_stride": 4, "num_labels": 3}
CS = {"hidden_size": 4, "image_size": [8, 8], "patch_size": [4, 4], "position_embedding_type": "learned"}
TOKEN = np.array([[[7, 8, 9, 10]]], np.float32)
POSITIONS = "vit_model.embedding_layer.position_embeddings.weight"


def to_cs(model: str, config: dict[str, Any], **arrays: np.ndarray[Any, Any]) -> Conversion:
    """*arrays* are named with ``__`` for dots."""
    source = source_of({k.replace("__", "."): a for k, a in arrays.items()}, format="safetensors")
    return between_hf(source, registry.family(model), config, parse_format("hf"), RELEASE)


def to_hf(model: str, config: dict[str, Any], arrays: dict[str, np.ndarray[Any, Any]]) -> Conversion:
    return between_hf(source_of(arrays), registry.family(model), {"model": config}, RELEASE, parse_format("hf"))


def test_the_class_token_moves_to_the_end_and_back() -> None:
    rows = np.arange(12, dtype=np.float32).reshape(1, 3, 4)
    view = to_cs("vit", HF, vit__embeddings__cls_token=TOKEN, vit__embeddings__position_embeddings=rows)
    found = {key: to_numpy(t) for key, t in view.tensors.items()}
    np.testing.assert_array_equal(found["vit_model.embedding_layer.cls_embedding"], [7, 8, 9, 10])
    np.testing.assert_array_equal(found[POSITIONS], [[4, 5, 6, 7], [8, 9, 10, 11], [0, 1, 2, 3]])
    back = {key: to_numpy(t) for key, t in to_hf("vit", CS, found).tensors.items()}
    np.testing.assert_array_equal(back["vit.embeddings.position_embeddings"], rows)
    np.testing.assert_array_equal(back["vit.embeddings.cls_token"], TOKEN)


@pytest.mark.parametrize("fields", [{"position_embedding_type": "fixed"}, {"prepend_cls_token": False}], ids=str)
def test_positions_without_the_tokens_row_cannot_be_reordered(fields: dict[str, Any]) -> None:
    """The converter looks at the type only when it meets the tensor."""
    assert hf_config(registry.family("vit"), {"model": {**CS, **fields}}, RELEASE)[0]["image_size"] == 8
    with pytest.raises(UnmatchedKeys):
        to_hf("vit", {**CS, **fields}, {POSITIONS: np.zeros((5, 4), np.float32)})


@pytest.mark.parametrize("n", [0, 1, 2, 5])
def test_rows_of_any_number(n: int) -> None:
    rows = ArrayTensor(np.arange(3 * n, dtype=np.float32).reshape(n, 3))
    (moved,) = RollRows().apply([rows], {})
    np.testing.assert_array_equal(to_numpy(moved), np.roll(to_numpy(rows), -1, axis=0))
    (back,) = RollRows().inverse().apply([moved], {})
    np.testing.assert_array_equal(to_numpy(back), to_numpy(rows))


def test_a_headless_model_gets_a_classifier() -> None:
    view = to_cs(
        "vit-headless", {**HF, "num_labels": 3000, "hidden_size": 64}, embeddings__cls_token=np.ones((1, 1, 64))
    )
    head = "classifier.classifier.ffn.0.linear_layer."
    assert list(view.tensors)[-2:] == [f"{head}weight", f"{head}bias"] == list(view.generated)
    weight, bias = to_numpy(view.tensors[f"{head}weight"]), to_numpy(view.tensors[f"{head}bias"])
    assert (weight.shape, weight.dtype, bias.shape, bias.dtype) == ((3000, 64), np.float32, (3000,), np.float32)
    assert abs(weight.std() - 0.02) < 1e-4
    assert not bias.any()


@pytest.mark.parametrize("classes", [0, -1, None, "3", 2.5], ids=repr)
def test_a_classifier_has_some_classes(classes: object) -> None:
    with pytest.raises(ConfigError, match="num_classes"):
        to_cs("vit-headless", {**HF, "num_labels": classes}, embeddings__cls_token=TOKEN)


def test_headless_models_drop_the_head_on_the_way_back() -> None:
    head = {f"classifier.classifier.ffn.0.linear_layer.{p}": np.ones(3, np.float32) for p in ("weight", "bias")}
    token = {"vit_model.embedding_layer.cls_embedding": np.ones(4, np.float32)}
    view = to_hf("vit-headless", CS, {**token, **head})
    assert (list(view.tensors), view.dropped) == (["embeddings.cls_token"], tuple(head))


def test_cerebras_keys_take_no_prefix() -> None:
    with pytest.raises(UnmatchedKeys):
        to_hf("vit", CS, {f"model.{POSITIONS}": np.zeros((5, 4), np.float32)})


@pytest.mark.parametrize(
    ("hf", "cs"),
    [("silu", "swiglu"), ("gelu_pytorch_tanh", "gelu_new"), ("relu", "relu"), ("quick_gelu", "quick_gelu")],
)
def test_activations(hf: str, cs: str) -> None:
    family = registry.family("vit")
    section = cs_config(family, {**HF, "hidden_act": hf}, RELEASE)["model"]
    assert section["nonlinearity"] == cs
    assert hf_config(family, {"model": section}, RELEASE)[0]["hidden_act"] == hf


@pytest.mark.parametrize(
    "fields", [{"qkv_bias": False}, {"encoder_stride": 8}, {"patch_size": 16}, {"model_type": "deit"}], ids=str
)
def test_configs_that_cerebras_cannot_have(fields: dict[str, Any]) -> None:
    with pytest.raises(UnsupportedValue):
        cs_config(registry.family("vit"), {**HF, **fields}, RELEASE)


def test_strides_and_patches_that_are_not_said_are_16() -> None:
    family = registry.family("vit")
    assert cs_config(family, {"model_type": "vit", "patch_size": 16}, RELEASE)["model"]["patch_size"] == [16, 16]
    assert "patch_size" not in cs_config(family, {"model_type": "vit"}, RELEASE)["model"]
    for fields in ({"patch_size": 8}, {"encoder_stride": 8}):
        with pytest.raises(UnsupportedValue, match="encoder_stride"):
            cs_config(family, {"model_type": "vit", **fields}, RELEASE)


@pytest.mark.parametrize("model", ["vit", "vit-headless", "clip-vit"])
@pytest.mark.parametrize("sides", [[8], [8, 8, 8], 8, None, "88", [], {}], ids=repr)
def test_side_lengths_must_be_a_square(model: str, sides: object) -> None:
    for name in ("image_size", "patch_size"):
        with pytest.raises(ConfigError, match=name):
            hf_config(registry.family(model), {"model": {**CS, name: sides}}, RELEASE)


@pytest.mark.parametrize("value", [None, [], {}, "x", 1.5, True], ids=repr)
@pytest.mark.parametrize("field", [*HF, "hidden_act", "qkv_bias"])
def test_wrong_types_are_refused_or_copied(field: str, value: object) -> None:
    try:
        cs_config(registry.family("vit"), {**HF, field: value}, RELEASE)
    except ConfigError as e:
        assert "\n" not in str(e)


def test_which_image_encoder_it_is() -> None:
    clip = registry.by_cs_config("vision_transformer", {"use_post_embed_layer_norm": True})
    plain = registry.by_cs_config("vision_transformer", {"use_encoder_pooler_layer": False})
    assert (clip[0].name, plain[0].name) == ("clip-vit", "vit")
