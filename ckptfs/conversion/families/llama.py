"""Llama: Hugging Face LlamaForCausalLM / LlamaModel <-> Cerebras GPT2LMHeadModel as Llama, releases 2.1 and later.

Rotary rows of q and k are half-split in Hugging Face and interleaved pairs in Cerebras.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from ckptfs.conversion.config import Config, ConfigTable, Fields, FieldTransform, SideTable
from ckptfs.conversion.families.decoder import (
    GENERATED_HEAD,
    final_norm,
    gated,
    kv_heads,
    nothing,
    numbers,
    rope_parameters,
    rope_scaling,
    whole_rotary,
)
from ckptfs.conversion.family import Family
from ckptfs.conversion.ops import permute_for_rope
from ckptfs.conversion.rules import Rule, Table, hf_only, same, under, with_cs_extra
from ckptfs.errors import MissingField

LAYER = [
    same("input_layernorm.{p}", "norm1.{p}"),
    same("post_attention_layernorm.{p}", "norm3.{p}"),
    same("self_attn.q_proj.{p}", "self_attn.proj_q_dense_layer.{p}", permute_for_rope("heads")),
    same("self_attn.k_proj.{p}", "self_attn.proj_k_dense_layer.{p}", permute_for_rope("kv_heads")),
    same("self_attn.v_proj.{p}", "self_attn.proj_v_dense_layer.{p}"),
    same("self_attn.o_proj.{p}", "self_attn.proj_output_dense_layer.{p}"),
    same("self_attn.q_norm.{p}", "self_attn.q_norm.{p}", permute_for_rope(1)),
    same("self_attn.k_norm.{p}", "self_attn.k_norm.{p}", permute_for_rope(1)),
    same("mlp.up_proj.{p}", "ffn.ffn.0.linear_layer.{p}"),
    same("mlp.gate_proj.{p}", "ffn.ffn.0.linear_layer_for_glu.{p}"),
    same("mlp.down_proj.{p}", "ffn.ffn.1.linear_layer.{p}"),
    *hf_only("self_attn.rotary_emb.inv_freq"),
]
EMBEDDING = same("embed_tokens.weight", "embedding_layer.word_embeddings.weight")


def body(prefix: str, embedding: Rule, layer: list[Rule]) -> list[Rule]:
    """Everything but the head, with the Hugging Face *prefix*."""
    layers = under("layers.{i}.", "transformer_decoder.layers.{i}.", layer)
    return under(prefix, "", [embedding, *layers, final_norm("norm")])


TENSORS = Table((*body("model.", EMBEDDING, LAYER), same("lm_head.{p}", "lm_head.{p}")))
HEADLESS = Table(tuple(body("", with_cs_extra(EMBEDDING, GENERATED_HEAD, last=True), LAYER)))


def groups_to_cs(fields: Fields) -> Config:
    heads, groups = fields.need("num_attention_heads", "num_key_value_heads is given"), fields["num_key_value_heads"]
    if groups is None:
        return {}
    if groups == heads:
        return {"attention_module": "aiayn_attention"}
    if not isinstance(groups, int) or groups < 1 or heads % groups:
        fields.refuse("num_key_value_heads", f"it must divide num_attention_heads ({heads})")
    return {"attention_module": "multiquery_attention", "extra_attention_params": {"num_kv_groups": groups}}


def module_to_hf(fields: Fields) -> Config:
    if fields["attention_module"] not in ("aiayn_attention", "multiquery_attention"):
        fields.refuse("attention_module", "only 'aiayn_attention' and 'multiquery_attention' can be converted")
    return {}


def groups_to_hf(fields: Fields) -> Config:
    """Key/value heads are written only where the config speaks of them, as the converter does."""
    groups = (fields["extra_attention_params"] or {}).get("num_kv_groups")
    if fields.get("attention_module") == "multiquery_attention":
        if groups is None:
            raise MissingField(fields.model, "extra_attention_params.num_kv_groups", "multiquery_attention needs it")
        return {"num_key_value_heads": groups}
    if groups is not None:
        fields.refuse("extra_attention_params", "num_kv_groups goes with attention_module multiquery_attention only")
    return {"num_key_value_heads": fields.need("num_heads", "attention_module is aiayn_attention")}


KV_GROUPS = (
    FieldTransform(("num_key_value_heads",), ("extra_attention_params",), groups_to_cs, groups_to_hf),
    FieldTransform((), ("attention_module",), nothing, module_to_hf),
)


def head_size(fields: Fields) -> Config:
    """Hugging Face's head size is hidden size / heads; Cerebras states it as rotary_dim, and must agree."""
    size = fields.need("hidden_size", "the head size follows from it") // fields.need("num_heads", "the head size does")
    if fields.need("rotary_dim", f"it must be the head size, {size}") != size:
        fields.refuse("rotary_dim", f"it must be the head size, {size}")
    return {}


def rotary_to_cs(fields: Fields) -> Config:
    return {"rotary_dim": fields["hidden_size"] // fields["num_attention_heads"]}


SHARED_NAMES = (
    "vocab_size",
    "hidden_size",
    "num_hidden_layers",
    "max_position_embeddings",
    "rope_theta",
    "initializer_range",
)
CS_ADD = {
    "position_embedding_type": "rotary",
    "embedding_dropout_rate": 0.0,
    "embedding_layer_norm": False,
    "attention_type": "scaled_dot_product",
    "use_projection_bias_in_attention": False,
    "use_ffn_bias_in_attention": False,
    "use_ffn_bias": False,
    "attention_dropout_rate": 0.0,
    "dropout_rate": 0.0,
    "use_bias_in_output": False,
    "norm_first": True,
    "use_ff_layer1_dropout": False,
    "norm_type": "rmsnorm",
}
CONFIG = ConfigTable(
    names={
        "tie_word_embeddings": "share_embedding_weights",
        "num_attention_heads": "num_heads",
        "intermediate_size": "filter_size",
        "rms_norm_eps": "layer_norm_epsilon",
        **{name: name for name in SHARED_NAMES},
    },
    transforms=(
        gated(),
        *KV_GROUPS,
        FieldTransform(("num_attention_heads",), (), rotary_to_cs, nothing),
        rope_scaling(("linear", "yarn", "longrope", "llama3"), llama_like=True),
    ),
    hf=SideTable(
        must={"model_type": "llama"},
        fill={
            "vocab_size": 32000,
            "hidden_size": 4096,
            "intermediate_size": 11008,
            "num_hidden_layers": 32,
            "num_attention_heads": 32,
            "hidden_act": "silu",
            "initializer_range": 0.02,
            "rms_norm_eps": 1e-06,
            "tie_word_embeddings": False,
            "max_position_embeddings": 2048,
            "rope_scaling": None,
        },
        add={"model_type": "llama"},
        prepare=(rope_parameters, whole_rotary),
    ),
    cs=SideTable(
        must={**CS_ADD, "use_position_embedding": True, "fixed_sparse_attention": None, "use_rms_norm": True},
        fill={
            "share_embedding_weights": True,
            "max_position_embeddings": 1024,
            "position_embedding_type": "learned",
            "layer_norm_epsilon": 1e-05,
            "use_projection_bias_in_attention": True,
            "use_ffn_bias_in_attention": True,
            "nonlinearity": "gelu",
            "use_ffn_bias": True,
            "use_bias_in_output": False,
            "norm_first": True,
            "norm_type": "layernorm",
            "pos_scaling_factor": 1.0,
        },
        add=CS_ADD,
        prepare=(head_size,),
    ),
)


def dims(model: str, cs: Mapping[str, Any]) -> dict[str, int]:
    """heads, kv_heads and rotary of a Cerebras ``model`` section."""
    return numbers(model, {"heads": cs.get("num_heads"), "kv_heads": kv_heads(cs), "rotary": cs.get("rotary_dim")})


NOTES = "no biases, heads of hidden size / heads"
LLAMA = Family("llama", TENSORS, CONFIG, dims, "llama", "llama", "LlamaForCausalLM", mup="fold", notes=NOTES)
LLAMA_HEADLESS = replace(LLAMA, name="llama-headless", table=HEADLESS, architecture="LlamaModel", mup="config")
