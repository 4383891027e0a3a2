"""GPT-NeoX: Hugging Face GPTNeoXForCausalLM <-> Cerebras GPTJModel set up as GPT-NeoX, releases 2.1 and later.

Hugging Face packs q, k, v head by head; rotary rows (the first rotary_dim of a head) are half-split there.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from ckptfs.conversion.config import Config, ConfigTable, Fields, FieldTransform, SideTable
from ckptfs.conversion.families.decoder import (
    causal_mask_of,
    final_norm,
    numbers,
    rope_parameters,
    rope_scaling,
    usual_heads,
    with_head,
)
from ckptfs.conversion.families.gptj import CS_DEFAULTS, CS_REQUIRE
from ckptfs.conversion.family import Family
from ckptfs.conversion.ops import Each, Split, permute_for_rope, ungroup_heads
from ckptfs.conversion.rules import Context, Rule, Table, same, split, under, with_hf_extra
from ckptfs.tensors.generated import constant, filled
from ckptfs.tensors.tensor import Tensor


def masked_bias(context: Context, bias: Tensor) -> Tensor:
    return filled("float32", (), -1e9)


def inv_freq(context: Context, bias: Tensor) -> Tensor:
    """Rotary frequencies, 1 / base^(2j/r), in float32 as the model computes them."""
    r = context.sizes["rotary"]
    exponents = np.arange(0, r, 2, dtype=np.float32) / np.float32(r)
    powers = np.power(float(context.hf["rotary_emb_base"]), exponents.astype(np.float64)).astype(np.float32)
    return constant("float32", np.float32(1) / powers)


UNPACK = (
    ungroup_heads("heads", (1, 1, 1)),
    Split((1, 1, 1)),
    Each((permute_for_rope("heads"), permute_for_rope("heads"), None)),
)
BUFFERS = {
    "attention.bias": causal_mask_of("max_position_embeddings"),
    "attention.masked_bias": masked_bias,
    "attention.rotary_emb.inv_freq": inv_freq,
}
QKV = [f"self_attn.proj_{x}_dense_layer" for x in "qkv"]
LAYER = [
    same("input_layernorm.{p}", "norm1.{p}"),
    same("post_attention_layernorm.{p}", "norm3.{p}"),
    split("attention.query_key_value.weight", [f"{x}.weight" for x in QKV], *UNPACK),
    with_hf_extra(split("attention.query_key_value.bias", [f"{x}.bias" for x in QKV], *UNPACK), BUFFERS),
    same("attention.dense.{p}", "self_attn.proj_output_dense_layer.{p}"),
    same("mlp.dense_h_to_4h.{p}", "ffn.ffn.0.linear_layer.{p}"),
    same("mlp.dense_4h_to_h.{p}", "ffn.ffn.1.linear_layer.{p}"),
]
EMBEDDING = same("embed_in.weight", "embedding_layer.word_embeddings.weight")


def body(prefix: str, embedding: Rule) -> list[Rule]:
    """Everything but the head, with the Hugging Face *prefix*."""
    layers = under("layers.{i}.", "transformer_decoder.layers.{i}.", LAYER)
    return under(prefix, "", [embedding, *layers, final_norm("final_layer_norm")])


TENSORS = Table((*body("gpt_neox.", EMBEDDING), same("embed_out.{p}", "lm_head.{p}")))
HEADLESS = Table(tuple(body("", with_head(EMBEDDING))))


def no_rotary(fields: Fields) -> Config:
    if "rotary" in fields:
        fields.refuse("rotary", "GPT-NeoX configs have no such field")
    return {}


def base_and_pct(fields: Fields) -> Config:
    """transformers 5 has both in ``rope_parameters``."""
    found = rope_parameters(fields)
    names = {"rope_theta": "rotary_emb_base", "partial_rotary_factor": "rotary_pct", "rope_scaling": "rope_scaling"}
    return {names[name]: value for name, value in found.items() if name in names}


def pct_to_cs(fields: Fields) -> Config:
    return {"rotary_dim": int((fields["hidden_size"] // fields["num_attention_heads"]) * fields["rotary_pct"])}


def pct_to_hf(fields: Fields) -> Config:
    return {"rotary_pct": fields["rotary_dim"] / (fields["hidden_size"] // fields["num_heads"])}


SAME_NAMES = ("vocab_size", "hidden_size", "num_hidden_layers", "max_position_embeddings", "initializer_range")
CS_CONSTANTS = {
    "attention_type": "scaled_dot_product",
    "use_untied_layer_norm": True,
    "use_projection_bias_in_attention": True,
    "use_ffn_bias_in_attention": True,
    "use_ffn_bias": True,
    "use_bias_in_output": False,
    "embedding_dropout_rate": 0.0,
}
CONFIG = ConfigTable(
    renames={
        "tie_word_embeddings": "share_embedding_weights",
        "num_attention_heads": "num_heads",
        "intermediate_size": "filter_size",
        "hidden_act": "nonlinearity",
        "layer_norm_eps": "layer_norm_epsilon",
        "attention_dropout": "attention_dropout_rate",
        "hidden_dropout": "residual_dropout_rate",
        **{name: name for name in SAME_NAMES},
    },
    transforms=(
        FieldTransform(("rotary_pct",), ("rotary_dim",), pct_to_cs, pct_to_hf),
        rope_scaling(("linear", "yarn", "longrope"), llama_like=False),
    ),
    hf=SideTable(
        constants={"rotary_emb_base": 10000, "model_type": "gpt_neox"},
        require={"scale_attn_weights": True, "use_parallel_residual": True, "attention_bias": True},
        defaults={
            "vocab_size": 50432,
            "hidden_size": 6144,
            "num_hidden_layers": 44,
            "num_attention_heads": 64,
            "intermediate_size": 24576,
            "hidden_act": "gelu",
            "rotary_pct": 0.25,
            "rotary_emb_base": 10000,
            "max_position_embeddings": 2048,
            "initializer_range": 0.02,
            "layer_norm_eps": 1e-05,
            "tie_word_embeddings": False,
            "use_parallel_residual": True,
            "rope_scaling": None,
        },
        write={"rotary_pct": 1.0},
        normalize=(no_rotary, base_and_pct),
        aliases={"rope_theta": "rotary_emb_base", "partial_rotary_factor": "rotary_pct"},
        reads=("rope_parameters", "rotary"),
    ),
    cs=SideTable(
        constants=CS_CONSTANTS,
        require={
            **{name: value for name, value in CS_REQUIRE.items() if name not in CS_CONSTANTS},
            "position_embedding_type": "rotary",
        },
        defaults={**CS_DEFAULTS, "pos_scaling_factor": 1.0},
        write={"residual_dropout_rate": 0.0, "attention_dropout_rate": 0.0},
        normalize=(usual_heads,),
        reads=("attention_inner_dim",),
    ),
)


def sizes(model: str, cs: Mapping[str, Any]) -> dict[str, int]:
    """heads and rotary of a Cerebras ``model`` section."""
    return numbers(model, {"heads": cs.get("num_heads"), "rotary": cs.get("rotary_dim")})


GPT_NEOX = Family(
    name="gpt-neox",
    table=TENSORS,
    config=CONFIG,
    sizes=sizes,
    cs_name="gpt-neox",
    hf_type="gpt_neox",
    architecture="GPTNeoXForCausalLM",
    mup="refuse",
    notes="rotary base 10000 only",
)
GPT_NEOX_HEADLESS = GPT_NEOX.derived(
    name="gpt-neox-headless", mup="refuse", table=HEADLESS, architecture="GPTNeoXModel"
)
FAMILIES = (GPT_NEOX, GPT_NEOX_HEADLESS)
