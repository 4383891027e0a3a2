"""DPR and Dragon where no recorded conversion goes."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from ckptfs.conversion import registry
from ckptfs.conversion.conversion import Conversion
from ckptfs.conversion.format_names import parse_format
from ckptfs.conversion.hf import between_hf, cs_config, hf_config
from ckptfs.errors import ConfigError, MissingKeys, NoPath
from tests.factories import source_of

RELEASE = parse_format("cs-2.9")
ENCODER: dict[str, Any] = {
    "hidden_size": 4,
    "num_heads": 2,
    "max_position_embeddings": 3,
    "pooler_nonlinearity": "tanh",
}
CS = {"q_encoder": ENCODER, "ctx_encoder": ENCODER}
WORDS, POOLER = "embedding_layer.word_embeddings.weight", "pooler.pooler.ffn.0.linear_layer.weight"
BOTH = ("question_encoder", "ctx_encoder")


def to_hf(model: str, keys: list[str], **fields: Any) -> Conversion:
    source = source_of(dict.fromkeys(keys, np.ones((5, 4), np.float16)))
    return between_hf(source, registry.family(model), {"model": {**CS, **fields}}, RELEASE, parse_format("hf"))


@pytest.mark.parametrize(
    ("model", "prefixes"), [("dpr", ("question_encoder.bert_model.", "ctx_encoder.bert_model.")), ("dragon", ("", ""))]
)
def test_two_folders(model: str, prefixes: tuple[str, str]) -> None:
    view = to_hf(model, [f"{name}.{key}" for name in BOTH for key in (WORDS, POOLER)])
    question, context = (f"{prefix}embeddings.word_embeddings.weight" for prefix in prefixes)
    assert list(view.tensors) == [f"ctx_encoder/{context}", f"q_encoder/{question}"]
    assert view.dropped == tuple(f"{name}.{POOLER}" for name in BOTH)
    assert {name: config["torch_dtype"] for name, config in view.config.items()} == {
        "q_encoder": "float16",
        "ctx_encoder": "float16",
    }


def test_poolers_are_dropped_on_the_way_to_cerebras() -> None:
    keys = [f"{name}/{key}" for name in CS for key in ("embeddings.word_embeddings.weight", "pooler.dense.weight")]
    source = source_of(dict.fromkeys(keys, np.ones((5, 4), np.float32)), format="safetensors")
    config: dict[str, Any] = {"q_encoder": {"model_type": "bert"}, "ctx_encoder": {"model_type": "bert"}}
    view = between_hf(source, registry.family("dragon"), config, parse_format("hf"), RELEASE)
    assert list(view.tensors) == [f"{name}.{WORDS}" for name in BOTH]


def test_a_component_without_tensors_is_refused() -> None:
    with pytest.raises(MissingKeys, match="ctx_encoder"):
        to_hf("dpr", [f"question_encoder.{WORDS}"])


@pytest.mark.parametrize("section", [None, 3, "x", [3]], ids=repr)
def test_a_component_without_config_is_refused(section: object) -> None:
    for whole in ({"q_encoder": ENCODER}, {"q_encoder": ENCODER, "ctx_encoder": section}):
        with pytest.raises(ConfigError, match="ctx_encoder"):
            hf_config(registry.family("dpr"), {"model": whole}, RELEASE)
        with pytest.raises(ConfigError, match="ctx_encoder"):
            cs_config(registry.family("dpr"), whole, RELEASE)


@pytest.mark.parametrize(("pooled", "size"), [(True, 4), (False, 0)])
def test_the_projection_has_the_hidden_size(pooled: bool, size: int) -> None:
    config, _ = hf_config(
        registry.family("dpr"), {"model": {**CS, "ctx_encoder": {**ENCODER, "add_pooling_layer": pooled}}}, RELEASE
    )
    assert config["ctx_encoder"]["projection_dim"] == size
    assert "projection_dim" not in config["q_encoder"]
    assert cs_config(registry.family("dpr"), config, RELEASE)["model"]["ctx_encoder"]["add_pooling_layer"] is pooled


def test_refusals_name_the_encoder() -> None:
    with pytest.raises(ConfigError, match=r"ctx_encoder.*projection_dim"):
        cs_config(registry.family("dpr"), {"q_encoder": {}, "ctx_encoder": {"projection_dim": 5}}, RELEASE)


def test_mup_in_either_encoder_is_refused() -> None:
    with pytest.raises(ConfigError, match="muP"):
        to_hf("dpr", [], ctx_encoder={**ENCODER, "mup_base_hidden_size": 2})


@pytest.mark.parametrize(("field", "value"), [("use_bfloat16", True), ("use_bfloat16", False)])
def test_sixteen_bits_are_one_choice_for_the_whole_model(field: str, value: bool) -> None:
    config = {"q_encoder": {field: value}, "ctx_encoder": {}}
    section = cs_config(registry.family("dpr"), config, parse_format("cs-2.3"))["model"]
    assert section["fp16_type"] == ("bfloat16" if value else "float16")
    assert "fp16_type" not in cs_config(registry.family("dpr"), config, RELEASE)["model"]
    back, _ = hf_config(registry.family("dpr"), {"model": CS, "fp16_type": "bfloat16"}, RELEASE)
    assert [back[name]["use_bfloat16"] for name in CS] == [True, True]


def test_dragon_begins_with_release_2_3() -> None:
    family = registry.family("dragon")
    with pytest.raises(NoPath):
        between_hf(source_of({}), family, {}, parse_format("hf"), parse_format("cs-2.2"))


def test_which_model_two_folders_are() -> None:
    def found(kind: str) -> list[str]:
        return [f.name for f in registry.by_hf_config({"ctx_encoder": {}, "q_encoder": {"model_type": kind}})]

    assert (found("dpr"), found("bert")) == (["dpr"], ["dragon"])
