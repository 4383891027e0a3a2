"""GPT-J and CodeGen: Hugging Face GPTJForCausalLM, CodeGenForCausalLM <-> Cerebras GPTJModel, releases 2.0 and later.

Both sides keep rotary rows in pairs, so GPT-J is renames only. CodeGen packs q, v, k (in this order) in four groups.
"""

from __future__ import annotations

from typing import Any

from ckptfs.conversion.config import Config, ConfigTable, Fields, FieldTransform, SideTable
from ckptfs.conversion.families import gpt2
from ckptfs.conversion.families.decoder import (
    GPT_ALIASES,
    features_off,
    final_norm,
    no_numbers,
    usual_heads,
    with_head,
)
from ckptfs.conversion.family import Family
from ckptfs.conversion.ops import Reorder, Split, ungroup_heads
from ckptfs.conversion.rules import Rule, Table, hf_only, same, split, under

SHARED = [
    same("ln_1.{p}", "norm1.{p}"),
    same("attn.out_proj.{p}", "self_attn.proj_output_dense_layer.{p}"),
    same("mlp.fc_in.{p}", "ffn.ffn.0.linear_layer.{p}"),
    same("mlp.fc_out.{p}", "ffn.ffn.1.linear_layer.{p}"),
    *hf_only("attn.bias", "attn.masked_bias"),
]
LAYER = [*SHARED, *(same(f"attn.{x}_proj.{{p}}", f"self_attn.proj_{x}_dense_layer.{{p}}") for x in "qkv")]
QKV = [f"self_attn.proj_{x}_dense_layer.weight" for x in "qkv"]
CODEGEN_LAYER = [
    *SHARED,
    split("attn.qkv_proj.weight", QKV, ungroup_heads(4, (1, 1, 1)), Split((1, 1, 1)), Reorder((0, 2, 1))),
    *hf_only("attn.causal_mask"),
]
EMBEDDING = same("wte.weight", "embedding_layer.word_embeddings.weight")


def body(prefix: str, embedding: Rule, layer: list[Rule]) -> list[Rule]:
    """Everything but the head, with the Hugging Face *prefix*."""
    return under(
        prefix, "", [embedding, *under("h.{i}.", "transformer_decoder.layers.{i}.", layer), final_norm("ln_f")]
    )


def tables(layer: list[Rule]) -> tuple[Table, Table]:
    """With and without a head."""
    head = same("lm_head.{p}", "lm_head.{p}")
    headless = body("", with_head(EMBEDDING), layer)
    return Table((*body("transformer.", EMBEDDING, layer), head)), Table(tuple(headless))


def rotary_to_cs(fields: Fields) -> Config:
    if fields["rotary"] is not True:
        fields.refuse("rotary", "only True can be converted")
    return {"position_embedding_type": "rotary"}


def rotary_to_hf(fields: Fields) -> Config:
    if fields["position_embedding_type"] != "rotary":
        fields.refuse("position_embedding_type", "only 'rotary' can be converted")
    return {"rotary": True}


def four_heads(name: str) -> Any:
    """CodeGen's four groups need four heads."""

    def check(fields: Fields) -> Config:
        if fields.need(name, "q, k and v are packed in four groups of heads") < 4:
            fields.refuse(name, "it must be at least 4")
        return {}

    return check


NAMES = {**gpt2.CONFIG.renames, "resid_pdrop": "residual_dropout_rate"}
HF_DEFAULTS = {
    "vocab_size": 50400,
    "n_positions": 2048,
    "n_embd": 4096,
    "n_layer": 28,
    "n_head": 16,
    "rotary_dim": 64,
    "activation_function": "gelu_new",
    "resid_pdrop": 0.1,
    "embd_pdrop": 0.1,
    "attn_pdrop": 0.1,
    "initializer_range": 0.02,
    "layer_norm_epsilon": 1e-05,
    "tie_word_embeddings": False,
}
CS_REQUIRE = {
    "norm_type": "layernorm",
    "use_position_embedding": True,
    "attention_type": "scaled_dot_product",
    "use_projection_bias_in_attention": False,
    "use_ffn_bias_in_attention": False,
    "use_ffn_bias": True,
    "embedding_layer_norm": False,
    "fixed_sparse_attention": None,
    "norm_first": True,
    "use_ff_layer1_dropout": False,
    "use_untied_layer_norm": False,
    **features_off(),
}
CS_DEFAULTS = {
    "max_position_embeddings": 1024,
    "embedding_dropout_rate": 0.1,
    "share_embedding_weights": True,
    "residual_dropout_rate": 0.1,
    "nonlinearity": "gelu",
    "layer_norm_epsilon": 1e-05,
    "use_ffn_bias": False,
    "use_untied_layer_norm": False,
    "attention_dropout_rate": 0.1,
    "use_projection_bias_in_attention": True,
    "use_ffn_bias_in_attention": True,
    "initializer_range": 0.02,
    "use_bias_in_output": False,
    "norm_first": True,
}
CS_WRITE = {
    "use_untied_layer_norm": False,
    "use_ffn_bias_in_attention": False,
    "use_projection_bias_in_attention": False,
    "use_ffn_bias": True,
    "use_bias_in_output": True,
    "attention_type": "scaled_dot_product",
}
CONFIG = ConfigTable(
    renames={**NAMES, "use_bias_in_output": "use_bias_in_output"},
    transforms=(FieldTransform(("rotary",), ("position_embedding_type",), rotary_to_cs, rotary_to_hf),),
    hf=SideTable(
        constants={"model_type": "gptj"},
        require={"scale_attn_weights": True},
        defaults=HF_DEFAULTS,
        normalize=(gpt2.inner,),
        aliases=GPT_ALIASES,
        ignored=gpt2.IGNORED,
    ),
    cs=SideTable(
        require=CS_REQUIRE,
        defaults=CS_DEFAULTS,
        write=CS_WRITE,
        normalize=(usual_heads,),
        reads=("attention_inner_dim",),
    ),
)
CODEGEN_CONFIG = ConfigTable(
    renames=NAMES,
    hf=SideTable(
        constants={"model_type": "codegen"},
        require={"scale_attn_weights": True},
        defaults={**HF_DEFAULTS, "resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0},
        normalize=(gpt2.inner, four_heads("n_head")),
        aliases=GPT_ALIASES,
        ignored=gpt2.IGNORED,
    ),
    cs=SideTable(
        require={**CS_REQUIRE, "position_embedding_type": "rotary", "use_bias_in_output": True},
        defaults=CS_DEFAULTS,
        write=CS_WRITE,
        normalize=(four_heads("num_heads"), usual_heads),
        reads=("attention_inner_dim",),
    ),
)

TENSORS, HEADLESS = tables(LAYER)
GPTJ = Family(
    name="gptj",
    table=TENSORS,
    config=CONFIG,
    sizes=no_numbers,
    cs_name="gptj",
    hf_type="gptj",
    architecture="GPTJForCausalLM",
    since=(2, 0),
    mup="fold",
    mup_since=(2, 3),
)
GPTJ_HEADLESS = GPTJ.derived(name="gptj-headless", mup="fold", table=HEADLESS, architecture="GPTJModel")
CODEGEN_TENSORS, CODEGEN_HEADLESS_TENSORS = tables(CODEGEN_LAYER)
CODEGEN = Family(
    name="codegen",
    table=CODEGEN_TENSORS,
    config=CODEGEN_CONFIG,
    sizes=no_numbers,
    cs_name="gptj",
    hf_type="codegen",
    architecture="CodeGenForCausalLM",
    since=(2, 0),
    mup="refuse",
)
CODEGEN_HEADLESS = CODEGEN.derived(
    name="codegen-headless", mup="refuse", table=CODEGEN_HEADLESS_TENSORS, architecture="CodeGenModel"
)
FAMILIES = (GPTJ, GPTJ_HEADLESS, CODEGEN, CODEGEN_HEADLESS)
