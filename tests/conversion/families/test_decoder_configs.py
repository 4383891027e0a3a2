"""Configs of decoders where recorded conversions show nothing: fields that are missing, null or of an older kind."""

from __future__ import annotations

from typing import Any

import pytest

from ckptfs.conversion.resolve import convert_config
from ckptfs.errors import ConfigError, MissingField


def to_cs(model: str, release: str = "cs-2.9", **config: Any) -> dict[str, Any]:
    found: dict[str, Any] = convert_config(config, "hf", release, model=model)[0]
    return found


def to_hf(model: str, release: str = "cs-2.9", **section: Any) -> dict[str, Any]:
    return dict(convert_config({"model": section}, release, "hf", model=model)[0])


OLD_FALCON = {
    "hidden_size": 8,
    "num_heads": 4,
    "num_hidden_layers": 1,
    "filter_size": 32,
    "rotary_dim": 2,
    "position_embedding_type": "rotary",
    "embedding_dropout_rate": 0.0,
    "share_embedding_weights": True,
    "nonlinearity": "gelu",
    "max_position_embeddings": 2048,
    "attention_module": "multiquery_attention",
    "attention_type": "scaled_dot_product",
    "loss_scaling": "num_tokens",
    "name": "falcon",
}
BLOOM = {
    "hidden_size": 32,
    "filter_size": 128,
    "num_heads": 8,
    "num_hidden_layers": 2,
    "vocab_size": 250880,
    "share_embedding_weights": True,
    "layer_norm_epsilon": 1e-05,
    "initializer_range": 0.02,
    "dropout_rate": 0.0,
    "attention_dropout_rate": 0.0,
    "position_embedding_type": "alibi",
    "use_ffn_bias_in_attention": True,
    "use_projection_bias_in_attention": True,
    "use_ffn_bias": True,
    "use_bias_in_output": False,
    "attention_type": "scaled_dot_product",
    "embedding_layer_norm": True,
    "name": "bloom",
}


@pytest.mark.parametrize(
    ("kind", "fields", "groups"),
    [
        ("RefinedWebModel", {"multi_query": True}, {"num_kv_groups": 1}),
        ("RefinedWeb", {"parallel_attn": True, "n_head_kv": 2}, {"num_kv_groups": 2}),
    ],
)
def test_older_falcons(kind: str, fields: dict[str, Any], groups: dict[str, int]) -> None:
    found = to_cs("falcon", model_type=kind, hidden_size=8, n_head=4, n_layer=1, alibi=False, bias=False, **fields)
    untied = kind == "RefinedWeb"
    want = {**OLD_FALCON, "extra_attention_params": groups, "use_untied_layer_norm": untied}
    assert found == {"model": want}


def test_bloom_takes_n_embed_for_its_size() -> None:
    assert to_cs("bloom", n_embed=32, hidden_size=8) == {"model": BLOOM}
    assert to_cs("bloom", n_embed=None, hidden_size=32) == {"model": BLOOM}


def test_what_is_missing_from_btlm_stays_missing() -> None:
    """But for the learning rate's scale, which stands outside of the model."""
    model = {"hidden_size": 8, "filter_size": 32, "share_embedding_weights": True, "pos_scaling_factor": 1.0}
    kernel = {"optimizer": {"adjust_learning_rate": {"decoder_kernel": 1.0}}}
    assert to_cs("btlm", "cs-2.3", n_embd=8) == {"model": {**model, "use_bias_in_output": False}, **kernel}


def test_jais_in_newer_releases() -> None:
    """The converter makes a mess of its name there, and never translates half precision."""
    assert to_cs("jais", "cs-2.9", n_embd=8)["model"]["name"] == "jais"
    assert to_cs("jais", "cs-2.3", n_embd=8, use_bfloat16=True)["model"]["fp16_type"] == "bfloat16"
    back = convert_config({"fp16_type": "float16", "model": {"dropout_rate": 0.0}}, "cs-2.3", "hf", model="jais")[0]
    assert back["use_bfloat16"] is False


@pytest.mark.parametrize(("given", "size"), [({}, 24576), ({"n_inner": None}, 32), ({"n_inner": 7}, 7)])
def test_the_feed_forward_size_of_starcoder(given: dict[str, Any], size: int) -> None:
    assert to_cs("starcoder", n_embd=8, **given)["model"]["filter_size"] == size


def test_mpt_without_biases() -> None:
    attention: dict[str, Any] = {"softmax_scale": 1.0, "alibi": True}
    found = to_cs("mpt", "cs-2.3", no_bias=True, norm_type="low_precision_layernorm", attn_config=attention)["model"]
    assert (found["norm_type"], found["attention_type"]) == ("biasless-layernorm", "dot_product")
    assert (found["use_ffn_bias"], found["position_embedding_type"]) == (False, "alibi")
    back = to_hf("mpt", "cs-2.3", **found)
    assert (back["no_bias"], back["norm_type"], back["expansion_ratio"]) == (True, "layernorm", 4)
    assert (back["attn_config"]["softmax_scale"], back["attn_config"]["alibi"]) == (1.0, True)


@pytest.mark.parametrize("field", ["num_local_experts", "num_experts_per_tok", "router_aux_loss_coef"])
def test_mixtral_says_all_about_its_experts(field: str) -> None:
    experts: dict[str, Any] = {"num_local_experts": 3, "num_experts_per_tok": 2, "router_aux_loss_coef": 0.01}
    want = {"num_experts": 3, "top_k": 2, "load_balancing_loss_coef": 0.01}
    assert to_cs("mixtral", **experts)["model"]["moe"] == want
    with pytest.raises(MissingField, match=field):
        to_cs("mixtral", **{name: value for name, value in experts.items() if name != field})


def test_mixtral_without_experts() -> None:
    with pytest.raises(MissingField, match="num_local_experts"):
        to_cs("mixtral")
    section = to_cs("mistral")["model"]
    with pytest.raises(MissingField, match="moe"):
        to_hf("mixtral", **section)


def test_falcon_with_one_norm_and_groups_goes_one_way_only() -> None:
    sizes: dict[str, Any] = {
        "hidden_size": 64,
        "num_attention_heads": 16,
        "num_kv_heads": 8,
        "new_decoder_architecture": True,
    }
    found = to_cs("falcon", model_type="falcon", num_ln_in_parallel_attn=1, **sizes)["model"]
    assert (found["extra_attention_params"], found["use_untied_layer_norm"]) == ({"num_kv_groups": 8}, False)
    with pytest.raises(ConfigError, match="num_kv_groups must be 1 or 16"):
        to_hf("falcon", **found)


@pytest.mark.parametrize(("multi_query", "groups"), [(True, 1), (False, 16)])
def test_older_decoders_of_falcon(multi_query: bool, groups: int) -> None:
    sizes: dict[str, Any] = {"hidden_size": 64, "num_attention_heads": 16, "multi_query": multi_query}
    found = to_cs("falcon", model_type="falcon", **sizes)["model"]
    assert found["extra_attention_params"] == {"num_kv_groups": groups}
    back = to_hf("falcon", **found)
    assert (back["num_kv_heads"], back["multi_query"], back["new_decoder_architecture"]) == (groups, multi_query, False)
    assert back["num_ln_in_parallel_attn"] is None
