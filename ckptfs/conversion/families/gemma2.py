"""Gemma 2: Hugging Face Gemma2ForCausalLM <-> Cerebras Gemma2ForCausalLM, releases 2.3 and later.

Hugging Face's norms multiply by 1 + weight, Cerebras' by the weight: 1 is added on the way there, in the tensor's own
dtype, so bits are lost.
"""

from __future__ import annotations

import math

from ckptfs.conversion.config import Config, ConfigTable, Fields, FieldTransform, SideTable, one_of
from ckptfs.conversion.families.decoder import ROPE_READS, features_off, rope_parameters, whole_rotary
from ckptfs.conversion.families.llama_like import ATTENTION, ATTENTION_BIAS, EMBEDDING, KV_GROUPS, MLP, sizes
from ckptfs.conversion.family import Family
from ckptfs.conversion.ops import AddScalar
from ckptfs.conversion.rules import Table, copy, same, under, with_cs_extra

NORMS = {
    "input_layernorm": "norm1",
    "post_attention_layernorm": "norm1_post",
    "pre_feedforward_layernorm": "norm3",
    "post_feedforward_layernorm": "norm3_post",
}
LAYER = [
    *ATTENTION,
    *MLP,
    *(same(f"{hf}.weight", f"{cs}.weight", AddScalar(1)) for hf, cs in NORMS.items()),
]
NORM = with_cs_extra(same("norm.weight", "transformer_decoder.norm.weight", AddScalar(1)), {"ln_f.weight": copy})
TENSORS = Table(
    (
        *under("model.", "", [EMBEDDING, NORM, *under("layers.{i}.", "transformer_decoder.layers.{i}.", LAYER)]),
        same("lm_head.weight", "lm_head.weight"),
    )
)


def activation_to_cs(fields: Fields) -> Config:
    name = str(fields["hidden_activation"])
    found = {"gelu": "geglu", "silu": "swiglu", "relu": "reglu"}.get(name.partition("_")[0])
    if found is None or ("_" in name and found != "geglu"):
        fields.refuse("hidden_activation", "only gelu (and its kinds), silu and relu can be converted")
    return {"nonlinearity": found}


def activation_to_hf(fields: Fields) -> Config:
    found = {"geglu": "gelu", "swiglu": "silu", "reglu": "relu"}.get(str(fields["nonlinearity"]))
    if found is None:
        fields.refuse("nonlinearity", "only 'geglu', 'swiglu' and 'reglu' can be converted")
    return {"hidden_activation": found}


def head_to_cs(fields: Fields) -> Config:
    size = fields["head_dim"]
    ratio = math.sqrt(size / fields["query_pre_attn_scalar"])
    alpha = {} if size == fields["query_pre_attn_scalar"] else {"attention_logits_alpha": ratio}
    return {"attention_inner_dim": size * fields["num_attention_heads"], "rotary_dim": size, **alpha}


def embedding_to_cs(fields: Fields) -> Config:
    return {"embeddings_scale": math.sqrt(fields["hidden_size"])}


def head_to_hf(fields: Fields) -> Config:
    """head_dim and query_pre_attn_scalar, checked against the other sizes."""
    heads, inner = fields["num_heads"], fields["attention_inner_dim"]
    inner = fields["hidden_size"] if inner is None else inner
    if inner % heads:
        fields.refuse("attention_inner_dim", f"it must divide by num_heads ({heads})")
    if fields["rotary_dim"] != inner // heads:
        fields.refuse("rotary_dim", f"it must be the head size, {inner // heads}")
    scalar = inner // heads / (fields["attention_logits_alpha"] ** 2)
    # transformers 5 takes whole numbers only; the square of a rounded root is often not quite one.
    whole = math.isclose(scalar, round(scalar), rel_tol=1e-12)
    return {"head_dim": inner // heads, "query_pre_attn_scalar": round(scalar) if whole else scalar}


def embedding_to_hf(fields: Fields) -> Config:
    want = math.sqrt(fields["hidden_size"])
    if not math.isclose(fields["embeddings_scale"] or 0, want, rel_tol=2e-7, abs_tol=1e-6):
        fields.refuse("embeddings_scale", f"it must be the square root of hidden_size, {want}")
    return {}


def same_layers(fields: Fields) -> Config:
    """Refuse what Cerebras has no field for: scaled positions, other layers than one with a window, one without."""
    scaling = fields["rope_scaling"]
    if scaling is not None and scaling.get("rope_type", scaling.get("type")) != "default":
        fields.refuse("rope_scaling", "only null can be converted")
    kinds = fields.get("layer_types")
    turns = ["full_attention" if i % 2 else "sliding_attention" for i in range(len(kinds or ()))]
    if kinds is not None and list(kinds) != turns:
        fields.refuse("layer_types", "sliding_attention and full_attention must take turns")
    return {}


def dropout(fields: Fields) -> Config:
    if fields["attention_dropout_rate"] is None:
        return {"attention_dropout_rate": fields["dropout_rate"]}
    return {}


SAME_NAMES = ("vocab_size", "hidden_size", "num_hidden_layers", "max_position_embeddings", "rope_theta")
CS_CONSTANTS = {
    "norm_first": True,
    "norm_first_sandwich": True,
    "sliding_window_every_other_decoder_layer": True,
    "position_embedding_type": "rotary",
    "norm_type": "rmsnorm",
    "use_ffn_bias": False,
    "dropout_rate": 0.0,
}
KNOWN = (
    *("embeddings_scale", "attention_logits_alpha", "attention_sliding_window_length", "attention_logit_softcapping"),
    *("final_logit_softcapping", "norm_first_sandwich", "sliding_window_every_other_decoder_layer"),
    "position_embedding_offset",
)
"""Features of the Cerebras decoder that Gemma 2 has, or checks itself."""
CONFIG = ConfigTable(
    renames={
        "num_attention_heads": "num_heads",
        "rms_norm_eps": "layer_norm_epsilon",
        "attn_logit_softcapping": "attention_logit_softcapping",
        "sliding_window": "attention_sliding_window_length",
        "tie_word_embeddings": "share_embedding_weights",
        "intermediate_size": "filter_size",
        "attention_dropout": "attention_dropout_rate",
        "final_logit_softcapping": "final_logit_softcapping",
        **{name: name for name in SAME_NAMES},
    },
    transforms=(
        FieldTransform(("hidden_activation",), ("nonlinearity",), activation_to_cs, activation_to_hf),
        FieldTransform(("head_dim",), ("attention_inner_dim",), head_to_cs, head_to_hf),
        FieldTransform(("hidden_size",), ("embeddings_scale",), embedding_to_cs, embedding_to_hf),
        ATTENTION_BIAS,
        *KV_GROUPS,
    ),
    hf=SideTable(
        constants={"model_type": "gemma2"},
        require={"use_bidirectional_attention": one_of(None, False)},
        defaults={
            "vocab_size": 256000,
            "hidden_size": 2304,
            "intermediate_size": 9216,
            "num_hidden_layers": 26,
            "num_attention_heads": 8,
            "num_key_value_heads": 4,
            "head_dim": 256,
            "rms_norm_eps": 1e-06,
            "hidden_activation": "gelu_pytorch_tanh",
            "max_position_embeddings": 8192,
            "use_cache": True,
            "initializer_range": 0.02,
            "pad_token_id": 0,
            "eos_token_id": 1,
            "bos_token_id": 2,
            "tie_word_embeddings": True,
            "rope_theta": 10000.0,
            "attention_bias": False,
            "attention_dropout": 0.0,
            "final_logit_softcapping": 30.0,
            "attn_logit_softcapping": 50.0,
            "query_pre_attn_scalar": 256,
            "sliding_window": 4096,
        },
        normalize=(rope_parameters, whole_rotary, same_layers),
        reads=(*ROPE_READS, "rope_scaling", "layer_types", "query_pre_attn_scalar"),
        ignored={"initializer_range": "a setting of training"},
    ),
    cs=SideTable(
        constants=CS_CONSTANTS,
        require={
            "use_bias_in_output": False,
            "embedding_dropout_rate": one_of(None, 0.0),
            "position_embedding_offset": 0,
            "embedding_layer_norm": False,
            "attention_type": "scaled_dot_product",
            "use_ff_layer1_dropout": False,
            **features_off(*KNOWN),
        },
        defaults={
            "embeddings_scale": 1.0,
            "embedding_layer_norm": False,
            "embedding_dropout_rate": None,
            "share_embedding_weights": True,
            "position_embedding_type": "learned",
            "rotary_dim": None,
            "max_position_embeddings": 1024,
            "position_embedding_offset": 0,
            "rope_theta": 10000,
            "hidden_size": 768,
            "num_hidden_layers": 12,
            "dropout_rate": 0.1,
            "norm_type": "layernorm",
            "layer_norm_epsilon": 1e-05,
            "norm_first": True,
            "norm_first_sandwich": False,
            "num_heads": 12,
            "attention_module": "aiayn_attention",
            "extra_attention_params": {},
            "attention_type": "scaled_dot_product",
            "attention_dropout_rate": None,
            "use_projection_bias_in_attention": True,
            "use_ffn_bias_in_attention": True,
            "attention_sliding_window_length": None,
            "sliding_window_every_other_decoder_layer": False,
            "attention_inner_dim": None,
            "attention_logit_softcapping": None,
            "filter_size": 3072,
            "nonlinearity": "gelu",
            "use_ffn_bias": True,
            "use_bias_in_output": False,
            "use_ff_layer1_dropout": False,
            "final_logit_softcapping": None,
            "attention_logits_alpha": 1,
        },
        normalize=(dropout,),
        reads=("rotary_dim", "attention_logits_alpha"),
    ),
)


NOTES = "norms lose bits, as 1 is added; gelu_pytorch_tanh comes back as gelu"
GEMMA2 = Family(
    name="gemma2",
    table=TENSORS,
    config=CONFIG,
    sizes=sizes,
    cs_name="gemma2",
    hf_type="gemma2",
    architecture="Gemma2ForCausalLM",
    since=(2, 3),
    mup="refuse",
    notes=NOTES,
)
FAMILIES = (GEMMA2,)
