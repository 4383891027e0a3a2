"""Config fields that change a model are converted or refused, under every name; others are named in a warning."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from ckptfs.conversion import registry
from ckptfs.conversion.folding import mup
from ckptfs.conversion.resolve import convert_config
from ckptfs.errors import ConfigError
from ckptfs.tensors.ranges import to_numpy
from tests.factories import ArrayTensor

GPT = {"hidden_size": "n_embd", "num_hidden_layers": "n_layer", "num_attention_heads": "n_head"}
GPT_SIZES = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "max_position_embeddings": 16}
ALIASES: dict[str, tuple[dict[str, str], dict[str, int]]] = {
    **dict.fromkeys(
        ("gpt2", "gptj", "codegen", "starcoder", "santacoder", "btlm", "jais"),
        ({**GPT, "max_position_embeddings": "n_positions"}, GPT_SIZES),
    ),
    "bloom": (
        {"num_hidden_layers": "n_layer", "num_attention_heads": "n_head"},
        {"num_hidden_layers": 3, "num_attention_heads": 16},
    ),
    "mpt": (
        {"hidden_size": "d_model", "num_hidden_layers": "n_layers", "num_attention_heads": "n_heads"},
        {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4},
    ),
    "t5": (
        {
            "hidden_size": "d_model",
            "num_hidden_layers": "num_layers",
            "num_attention_heads": "num_heads",
            "head_dim": "d_kv",
        },
        {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "head_dim": 6},
    ),
}


def to_cs(model: str, warnings: list[str] | None = None, **config: Any) -> dict[str, Any]:
    release = "cs-2.3" if model == "mpt" else "cs-2.9"
    found: dict[str, Any] = convert_config(config, "hf", release, model=model, warnings=warnings)[0]["model"]
    return found


def to_hf(model: str, section: dict[str, Any], warnings: list[str] | None = None) -> dict[str, Any]:
    release = "cs-2.3" if model == "mpt" else "cs-2.9"
    return convert_config({"model": section}, release, "hf", model=model, warnings=warnings)[0]


@pytest.mark.parametrize("model", ALIASES)
def test_aliases_of_sizes(model: str) -> None:
    names, sizes = ALIASES[model]
    own = {names[alias]: size for alias, size in sizes.items()}
    want = to_cs(model, **own)
    assert to_cs(model, **sizes) == want
    assert to_cs(model, **own, **sizes) == want
    for alias, size in sizes.items():
        with pytest.raises(ConfigError, match=f"config field {alias} is"):
            to_cs(model, **own | {alias: size + 1})


def test_aliases_reach_the_tensors() -> None:
    """The causal mask of GPT-2 is as large as its positions, whatever the config calls them."""
    table = registry.family("gpt2").config
    source = table.source("gpt2", {"hidden_size": 32, "max_position_embeddings": 7}, "hf")
    assert (source["n_embd"], source["n_positions"], source["n_inner"]) == (32, 7, 128)


JAIS = {"n_embd": 8, "n_head": 2, "n_layer": 1}


def test_the_first_jais_models_name_their_scales_otherwise() -> None:
    old = to_cs("jais", **JAIS, width_scale=0.125, embeddings_scale=14.6, scale_qk_dot_by_d=True)
    scales = (old["output_logits_scale"], old["embeddings_scale"], old["scale_qk_dot_by_d"])
    assert scales == (0.125, 14.6, True)
    new = {"mup_width_scale": 0.125, "mup_output_alpha": 1.0, "mup_embeddings_scale": 14.6}
    assert old == to_cs("jais", **JAIS, **new, mup_scale_qk_dot_by_d=True)
    assert to_hf("jais", {**old, "dropout_rate": 0.0})["mup_embeddings_scale"] == 14.6


@pytest.mark.parametrize(
    "more",
    [
        {"mup_output_alpha": 2.0},
        {"mup_width_scale": 0.5},
        {"embeddings_scale": 2.0, "mup_embeddings_scale": 3.0},
        {"scale_qk_dot_by_d": True, "mup_scale_qk_dot_by_d": False},
    ],
)
def test_scales_of_jais_that_contradict_each_other(more: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match="scale"):
        to_cs("jais", **JAIS, width_scale=0.125, **more)


@pytest.mark.parametrize(
    ("model", "field", "value"),
    [
        *(("llama", *pair) for pair in (("quantization_config", {"bits": 4}), ("pruned_heads", {"0": [1]}))),
        *(("gpt2", *pair) for pair in (("add_cross_attention", True), ("is_encoder_decoder", True))),
        ("t5", "tie_encoder_decoder", True),
        ("t5", "dense_act_fn", "silu"),
        ("t5", "is_gated_act", True),
        ("vit", "pooler_output_size", 7),
        ("vit", "pooler_act", "relu"),
        ("mpt", "learned_pos_emb", False),
        ("esm-2", "is_folding_model", True),
    ],
)
def test_fields_that_no_cerebras_config_has(model: str, field: str, value: Any) -> None:
    with pytest.raises(ConfigError, match=f"config field {field} is"):
        to_cs(model, **{field: value})


@pytest.mark.parametrize("model", ["gpt2", "llama", "mistral", "bloom", "gptj", "falcon", "gpt-neox", "starcoder"])
@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("attention_chunk_size", 8),
        ("final_logit_softcapping", 30.0),
        ("norm_first_sandwich", True),
        ("attention_logits_alpha", 2.0),
        ("embeddings_scale", 3.0),
        ("attention_inner_dim", 48),
        ("moe_params", {"num_experts": 4}),
    ],
)
def test_features_of_the_cerebras_decoder_that_the_model_has_not(model: str, field: str, value: Any) -> None:
    sizes = {"hidden_size": 32, "num_attention_heads": 4, "num_hidden_layers": 1}
    names = {alias: ALIASES[model][0].get(alias, alias) for alias in sizes} if model in ALIASES else {}
    config = {names.get(name, name): value for name, value in sizes.items()}
    groups = {"num_key_value_heads": 4} if model == "mistral" else {}
    section = to_cs(model, model_type=registry.family(model).hf_type, **config, **groups)
    usual = {"position_embedding_type": "rotary", "dropout_rate": 0.0} if model == "gpt-neox" else {}
    section = {"dropout_rate": 0.0, **section, **usual}
    to_hf(model, section)
    with pytest.raises(
        ConfigError, match=field if field != "attention_inner_dim" else "attention_inner_dim|rotary_dim"
    ):
        to_hf(model, {**section, field: value})


def test_key_value_groups_that_starcoder_has_not() -> None:
    section = to_cs("starcoder", **JAIS)
    with pytest.raises(ConfigError, match="num_kv_groups must be 1"):
        to_hf("starcoder", {**section, "extra_attention_params": {"num_kv_groups": 2}})


def test_other_fields_are_named() -> None:
    warnings: list[str] = []
    to_cs("llama", warnings, hidden_size=32, num_attention_heads=4, rope_bend=3, use_cache=True, zzz=None)
    assert warnings == ["llama: 2 config fields are not known and left out: rope_bend, zzz"]
    warnings = []
    section = to_cs("llama", hidden_size=32, num_attention_heads=4)
    to_hf("llama", {**section, "mixed_precision": True, "rope_bend": 3}, warnings)
    assert warnings == ["llama: 1 config field is not known and left out: rope_bend"]


def test_mup_divides_by_the_size_of_a_head() -> None:
    """4 heads of 16 rows in a model of 32: the keys are divided by 4, the root of 16, not by that of 8."""
    section = {"hidden_size": 32, "num_heads": 4, "attention_inner_dim": 64, "mup_base_hidden_size": 32}
    key = "transformer_decoder.layers.0.self_attn.proj_k_dense_layer.weight"
    ones = {key: ArrayTensor(np.ones((64, 32), np.float32))}
    found = mup.fold_tensors("llama", mup.DECODER, section, "new", ones)
    assert to_numpy(found[key])[0, 0] == 0.25


def test_what_mistral_and_mixtral_mean_by_a_missing_field() -> None:
    """transformers takes 8 key/value heads for both; a window for Mistral; another base and epsilon for Mixtral."""
    sizes = {"hidden_size": 64, "num_attention_heads": 16}
    mistral = to_cs("mistral", **sizes)
    assert mistral["extra_attention_params"] == {"num_kv_groups": 8}
    assert (mistral["attention_sliding_window_length"], mistral["layer_norm_epsilon"]) == (4096, 1e-6)
    experts = {"num_local_experts": 3, "num_experts_per_tok": 2, "router_aux_loss_coef": 0.01}
    mixtral = to_cs("mixtral", **sizes, **experts)
    assert (mixtral["attention_sliding_window_length"], mixtral["layer_norm_epsilon"]) == (None, 1e-5)
    assert mixtral["rope_theta"] == 1e6
