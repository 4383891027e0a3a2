"""Configs as transformers 5 writes them: what they say goes into the Cerebras config, or the config is refused."""

from __future__ import annotations

from typing import Any

import pytest

from ckptfs.conversion.resolve import convert_config
from ckptfs.errors import ConfigError, MissingField

SIZES = {"vocab_size": 37, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
THETA = {"rope_type": "default", "rope_theta": 500.0}
CONFIGS: dict[str, dict[str, Any]] = {
    "llama": {**SIZES, "num_key_value_heads": 4, "head_dim": 8, "rope_parameters": THETA},
    "mistral": {**SIZES, "num_key_value_heads": 4, "head_dim": 8, "sliding_window": None, "rope_parameters": THETA},
    "mixtral": {
        **SIZES,
        "num_key_value_heads": 2,
        "rope_parameters": THETA,
        "num_local_experts": 3,
        "num_experts_per_tok": 2,
        "router_aux_loss_coef": 0.001,
    },
    "falcon": {**SIZES, "num_kv_heads": 4, "activation": "gelu", "ffn_hidden_size": 128, "rope_parameters": THETA},
    "gemma2": {
        **SIZES,
        "num_key_value_heads": 2,
        "head_dim": 12,
        "query_pre_attn_scalar": 9,
        "rope_parameters": THETA,
        "layer_types": ["sliding_attention", "full_attention"],
        "use_bidirectional_attention": None,
    },
    "gpt_neox": {
        **SIZES,
        "attention_bias": True,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.5},
    },
    "mpt": {"d_model": 32, "n_heads": 4, "n_layers": 2, "no_bias": True, "layer_norm_epsilon": 1e-5},
}


def release(model_type: str) -> str:
    return "cs-2.3" if model_type == "mpt" else "cs-2.9"


def to_cs(model_type: str, **changes: Any) -> dict[str, Any]:
    config = {"model_type": model_type, **CONFIGS[model_type], **changes}
    found: dict[str, Any] = convert_config(config, "hf", release(model_type))[0]["model"]
    return found


def there_and_back(model_type: str, **changes: Any) -> dict[str, Any]:
    cs = to_cs(model_type, **changes)
    name = "gpt-neox" if model_type == "gpt_neox" else model_type
    return convert_config({"model": cs}, release(model_type), "hf", model=name)[0]


@pytest.mark.parametrize("model_type", ["llama", "mistral", "mixtral", "falcon", "gemma2"])
def test_theta_is_read_from_rope_parameters(model_type: str) -> None:
    assert to_cs(model_type)["rope_theta"] == 500.0
    assert to_cs(model_type, rope_theta=7.0)["rope_theta"] == 500.0  # as transformers 5, which ignores the older field


@pytest.mark.parametrize("model_type", ["llama", "mistral", "mixtral", "falcon"])
def test_scaling_is_read_from_rope_parameters(model_type: str) -> None:
    found = to_cs(model_type, rope_parameters={"rope_type": "linear", "rope_theta": 500.0, "factor": 2.0})
    assert (found["pos_scaling_type"], found["pos_scaling_factor"], found["rope_theta"]) == ("linear", 2.0, 500.0)


def test_scaling_under_the_older_name_goes_first_and_may_hold_theta() -> None:
    scaling = {"rope_type": "linear", "factor": 4.0, "rope_theta": 9.0}
    found = to_cs("llama", rope_scaling=scaling)
    assert (found["pos_scaling_factor"], found["rope_theta"]) == (4.0, 9.0)
    assert "pos_scaling_extra_args" not in found


@pytest.mark.parametrize("model_type", ["llama", "mistral", "falcon", "gpt_neox"])
def test_the_type_default_is_refused_under_the_older_name(model_type: str) -> None:
    with pytest.raises(ConfigError, match="rope_scaling"):
        to_cs(model_type, rope_scaling={"rope_type": "default"})


def test_gemma2_reads_no_scaling_under_either_name() -> None:
    assert to_cs("gemma2", rope_scaling=THETA) == to_cs("gemma2")


def test_rotary_part_of_gpt_neox() -> None:
    assert to_cs("gpt_neox")["rotary_dim"] == 4
    assert there_and_back("gpt_neox")["rotary_pct"] == 0.5


PARTIAL = {"rope_parameters": {**THETA, "partial_rotary_factor": 0.5}}
PER_LAYER = {"rope_parameters": {"full_attention": THETA, "sliding_attention": THETA}}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 8, "beta_fast": 16}


@pytest.mark.parametrize(
    ("model_type", "changes", "field"),
    [
        *((m, PARTIAL, "partial_rotary_factor") for m in ("llama", "mistral", "mixtral", "falcon", "gemma2")),
        *((m, PER_LAYER, "rope_parameters") for m in ("llama", "falcon", "gemma2", "gpt_neox")),
        ("llama", {"rope_parameters": YARN}, "rope_scaling"),
        ("llama", {"rope_parameters": {"rope_type": "dynamic", "factor": 2.0}}, "rope_scaling"),
        ("falcon", {"ffn_hidden_size": 100}, "ffn_hidden_size"),
        ("falcon", {"activation": "relu"}, "activation"),
        ("gemma2", {"layer_types": ["full_attention", "sliding_attention"]}, "layer_types"),
        ("gemma2", {"use_bidirectional_attention": True}, "use_bidirectional_attention"),
        ("gemma2", {"rope_parameters": {"rope_type": "linear", "factor": 2.0}}, "rope_scaling"),
        ("gpt_neox", {"rope_parameters": {"rope_type": "default", "rope_theta": 500.0}}, "rotary_emb_base"),
        ("gpt_neox", {"attention_bias": False}, "attention_bias"),
        ("mpt", {"layer_norm_epsilon": 1e-6}, "layer_norm_epsilon"),
        *(("mpt", {"attn_config": c}, "attn_config") for c in ({"clip_qkv": 6}, {"qk_ln": True}, {"prefix_lm": True})),
    ],
)
def test_what_a_cerebras_config_cannot_say_is_refused(model_type: str, changes: dict[str, Any], field: str) -> None:
    to_cs(model_type)
    with pytest.raises(ConfigError, match=f"config field {field} is"):
        to_cs(model_type, **changes)


@pytest.mark.parametrize(
    ("changes", "section"),
    [
        ({}, {"rotary_dim": 8}),
        ({"head_dim": None}, {"rotary_dim": 8}),
        ({"head_dim": 16}, {"rotary_dim": 16, "attention_inner_dim": 64}),
        ({"head_dim": 4}, {"rotary_dim": 4, "attention_inner_dim": 16}),
        ({"hidden_size": 34, "head_dim": None}, {"rotary_dim": 8, "attention_inner_dim": 32}),
    ],
)
@pytest.mark.parametrize("model_type", ["llama", "mistral", "mixtral"])
def test_head_size(model_type: str, changes: dict[str, Any], section: dict[str, Any]) -> None:
    """Cerebras states the rotary rows of a head, which are all of them, and the size of all heads together."""
    found = to_cs(model_type, **changes)
    names = ("rotary_dim", "attention_inner_dim")
    assert {name: found[name] for name in names if name in found} == section
    size = section["rotary_dim"]
    back = there_and_back(model_type, **changes)
    usual = found["hidden_size"] // found["num_heads"]
    assert back.get("head_dim") == (None if size == usual else size)


@pytest.mark.parametrize(
    ("section", "field"),
    [
        ({"attention_inner_dim": 48}, "rotary_dim"),
        ({"attention_inner_dim": 48, "rotary_dim": 8}, "rotary_dim"),
        ({"attention_inner_dim": 33}, "attention_inner_dim"),
        ({"rotary_dim": 4}, "rotary_dim"),
    ],
)
def test_rotary_rows_are_the_head_size(section: dict[str, Any], field: str) -> None:
    cs = to_cs("llama")
    with pytest.raises(ConfigError, match=f"config field {field} is"):
        convert_config({"model": {**cs, **section}}, "cs-2.9", "hf", model="llama")


@pytest.mark.parametrize("attention", [True, False])
@pytest.mark.parametrize("mlp", [True, False])
def test_biases_of_llama(attention: bool, mlp: bool) -> None:
    found = to_cs("llama", attention_bias=attention, mlp_bias=mlp)
    assert (found["use_projection_bias_in_attention"], found["use_ffn_bias_in_attention"]) == (attention, attention)
    assert found["use_ffn_bias"] is mlp
    back = there_and_back("llama", attention_bias=attention, mlp_bias=mlp)
    assert (back.get("attention_bias", False), back.get("mlp_bias", False)) == (attention, mlp)


def test_biases_that_the_hugging_face_model_cannot_have() -> None:
    cs = to_cs("llama")
    for section in ({"use_ffn_bias_in_attention": True}, {"use_projection_bias_in_attention": True}):
        with pytest.raises(ConfigError, match="config field use_ffn_bias_in_attention is"):
            convert_config({"model": {**cs, **section}}, "cs-2.9", "hf", model="llama")
    without = {name: value for name, value in cs.items() if name != "use_ffn_bias"}
    with pytest.raises(MissingField, match="use_ffn_bias"):
        convert_config({"model": without}, "cs-2.9", "hf", model="llama")


@pytest.mark.parametrize("model_type", ["mistral", "mixtral"])
def test_key_value_heads_and_window_are_always_written(model_type: str) -> None:
    """transformers takes 8 heads and a window of 4096 for a Mistral config without them."""
    found = there_and_back(model_type, num_key_value_heads=4)
    assert (found["num_key_value_heads"], found["sliding_window"]) == (4, None)


def test_falcon_without_a_number_of_norms_has_two_in_the_new_architecture() -> None:
    found = to_cs("falcon", new_decoder_architecture=True, num_ln_in_parallel_attn=None)
    assert found["use_untied_layer_norm"] is True
    assert to_cs("falcon", num_ln_in_parallel_attn=None)["use_untied_layer_norm"] is False


def test_falcon_biases_are_named_as_loaders_need_them() -> None:
    assert there_and_back("falcon", bias=True)["bias"] is True
    assert "bias" not in there_and_back("falcon", bias=False)


@pytest.mark.parametrize("scalar", [9, 144, 224, 256])
def test_gemma2_scalar_comes_back_whole(scalar: int) -> None:
    """transformers 5 refuses a float there."""
    found = there_and_back("gemma2", query_pre_attn_scalar=scalar)["query_pre_attn_scalar"]
    assert (type(found), found) == (int, scalar)


@pytest.mark.parametrize(
    ("model_type", "changes"),
    [
        ("llama", {"num_attention_heads": 0}),
        ("llama", {"hidden_size": "x"}),
        ("falcon", {"hidden_size": None}),
        ("gemma2", {"query_pre_attn_scalar": -1}),
        ("gemma2", {"layer_types": 3}),
        ("gpt_neox", {"rope_parameters": {"partial_rotary_factor": float("inf")}}),
        ("mpt", {"attn_config": 3}),
    ],
)
def test_nonsense_is_refused_in_one_line(model_type: str, changes: dict[str, Any]) -> None:
    with pytest.raises(ConfigError) as refusal:
        to_cs(model_type, **changes)
    assert "\n" not in str(refusal.value)


@pytest.mark.parametrize(
    ("model", "section"),
    [
        ("llama", {"extra_attention_params": 3, "attention_module": "multiquery_attention"}),
        ("gemma2", {"attention_logits_alpha": 0.0, "attention_inner_dim": 48, "rotary_dim": 12}),
        ("gpt-neox", {"num_heads": 0}),
    ],
)
def test_nonsense_in_a_cerebras_config_too(model: str, section: dict[str, Any]) -> None:
    cs = to_cs("gpt_neox" if model == "gpt-neox" else model)
    with pytest.raises(ConfigError):
        convert_config({"model": {**cs, **section}}, "cs-2.9", "hf", model=model)


@pytest.mark.parametrize("positions", [None, "x", 0, 10**12])
def test_a_causal_mask_needs_a_size(positions: object) -> None:
    from ckptfs.conversion.families.decoder import causal_mask_of
    from ckptfs.conversion.rules import Context
    from ckptfs.tensors.generated import filled

    context = Context("gpt2", {}, {"n_positions": positions}, {})
    with pytest.raises(MissingField, match="n_positions"):
        causal_mask_of("n_positions")(context, filled("float32", (), 0.0))
