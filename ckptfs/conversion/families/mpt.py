"""MPT: Hugging Face MPTForCausalLM <-> Cerebras GPT2LMHeadModel, releases 2.0 to 2.3 (gone from 2.4 on)."""

from __future__ import annotations

from dataclasses import replace

from ckptfs.conversion.config import Config, ConfigTable, Fields, FieldTransform, SideTable
from ckptfs.conversion.families import gpt2
from ckptfs.conversion.families.decoder import (
    OLD_SLOPES,
    QKV,
    SLOPES,
    alibi_slopes,
    features_off,
    final_norm,
    heads,
    usual_heads,
)
from ckptfs.conversion.family import Family
from ckptfs.conversion.ops import Split
from ckptfs.conversion.rules import AT_END, Rule, Table, copy, cs_only, same, split, under, with_cs_extra

LAYER = [
    same("norm_1.{p}", "norm1.{p}"),
    same("norm_2.{p}", "norm3.{p}"),
    split("attn.Wqkv.{p}", QKV, Split((1, 1, 1))),
    same("attn.out_proj.{p}", "self_attn.proj_output_dense_layer.{p}"),
    same("ffn.up_proj.{p}", "ffn.ffn.0.linear_layer.{p}"),
    same("ffn.down_proj.{p}", "ffn.ffn.1.linear_layer.{p}"),
]
# Embedding and head are always one tensor in MPT; Cerebras has both.
EMBEDDING = with_cs_extra(gpt2.EMBEDDING, {"lm_head.weight": copy})
OLD_POSITIONS = replace(gpt2.POSITIONS, cs=gpt2.POSITIONS.cs_also, cs_also=gpt2.POSITIONS.cs)


def body(prefix: str, positions: Rule, slopes: str, dropped: str) -> Table:
    """The whole model, with the Hugging Face *prefix*; slopes are written under one name and dropped under both."""
    embedding = with_cs_extra(EMBEDDING, {slopes: alibi_slopes}, position=AT_END)
    layers = under("blocks.{i}.", "transformer_decoder.layers.{i}.", LAYER)
    rules = under(prefix, "", [embedding, positions, *layers, final_norm("norm_f")])
    return Table((*rules, *cs_only(dropped)))


def table(prefix: str) -> Table:
    return body(prefix, gpt2.POSITIONS, SLOPES, OLD_SLOPES)


def table_2_0(prefix: str) -> Table:
    return body(prefix, OLD_POSITIONS, OLD_SLOPES, SLOPES)


BIASES = ("use_projection_bias_in_attention", "use_ffn_bias_in_attention", "use_ffn_bias")
SCALES = {None: "scaled_dot_product", 1.0: "dot_product"}


def attention_to_cs(fields: Fields) -> Config:
    """The section attn_config, field by field."""
    found = fields["attn_config"]
    if found["alibi_bias_max"] != 8 or found["softmax_scale"] not in SCALES:
        fields.refuse("attn_config", "alibi_bias_max must be 8 and softmax_scale null or 1.0")
    for name in ("qk_ln", "clip_qkv", "prefix_lm"):
        if found[name]:
            fields.refuse("attn_config", f"{name} has no place in a Cerebras config")
    module = found["attn_type"]
    return {
        "attention_module": "aiayn_attention" if module == "multihead_attention" else module,
        "attention_dropout_rate": found["attn_pdrop"],
        "attention_type": SCALES[found["softmax_scale"]],
        "position_embedding_type": "alibi" if found["alibi"] else "learned",
    }


def attention_to_hf(fields: Fields) -> Config:
    """attn_config from four fields; those that are missing keep the section's defaults."""
    module = fields.get("attention_module", "aiayn_attention")
    position, kind = fields["position_embedding_type"], fields.get("attention_type", "scaled_dot_product")
    if position not in ("alibi", "learned"):
        fields.refuse("position_embedding_type", "only 'alibi' and 'learned' can be converted")
    if kind not in SCALES.values():
        fields.refuse("attention_type", "only 'scaled_dot_product' and 'dot_product' can be converted")
    return {
        "attn_config": {
            **HF_ATTENTION,
            "attn_pdrop": fields.get("attention_dropout_rate", 0.0),
            "attn_type": "multihead_attention" if module == "aiayn_attention" else module,
            "softmax_scale": None if kind == "scaled_dot_product" else 1.0,
            "alibi": position == "alibi",
        }
    }


def norm_to_cs(fields: Fields) -> Config:
    """Biases, the norm's kind and the feed-forward size."""
    norm, biased = str(fields["norm_type"]).removeprefix("low_precision_"), not fields["no_bias"]
    return {
        **dict.fromkeys(BIASES, biased),
        "norm_type": "biasless-layernorm" if norm == "layernorm" and not biased else norm,
        "filter_size": fields["expansion_ratio"] * fields["d_model"],
    }


def norm_to_hf(fields: Fields) -> Config:
    biased, norm = fields[BIASES[0]], fields["norm_type"]
    for name in BIASES:
        if fields[name] != biased or (norm == "biasless-layernorm" and biased):
            fields.refuse(name, f"the switches {', '.join(BIASES)} must agree, and be off with a biasless norm")
    return {"no_bias": not biased, "norm_type": "layernorm" if norm == "biasless-layernorm" else norm}


def filter_to_hf(fields: Fields) -> Config:
    ratio, rest = divmod(fields["filter_size"], fields.need("hidden_size", "filter_size is a multiple of it"))
    if rest:
        fields.refuse("filter_size", "it must be a multiple of hidden_size")
    return {"expansion_ratio": ratio}


HF_ATTENTION = {
    "attn_type": "multihead_attention",
    "attn_pdrop": 0.0,
    "qk_ln": False,
    "clip_qkv": None,
    "softmax_scale": None,
    "prefix_lm": False,
    "attn_uses_sequence_id": False,
    "alibi": False,
    "alibi_bias_max": 8,
    "attn_impl": "torch",
}
CS_CONSTANTS = {
    "embedding_layer_norm": False,
    "use_bias_in_output": False,
    "norm_first": True,
    "use_ff_layer1_dropout": False,
    "nonlinearity": "gelu",
}
CONFIG = ConfigTable(
    renames={
        "emb_pdrop": "embedding_dropout_rate",
        "tie_word_embeddings": "share_embedding_weights",
        "d_model": "hidden_size",
        "n_heads": "num_heads",
        "n_layers": "num_hidden_layers",
        "max_seq_len": "max_position_embeddings",
        "resid_pdrop": "dropout_rate",
        "vocab_size": "vocab_size",
        "initializer_range": "initializer_range",
    },
    transforms=(
        FieldTransform(
            ("attn_config",),
            ("attention_dropout_rate", "attention_module", "attention_type", "position_embedding_type"),
            attention_to_cs,
            attention_to_hf,
        ),
        FieldTransform(("no_bias",), ("norm_type",), norm_to_cs, norm_to_hf),
        FieldTransform((), ("filter_size",), norm_to_cs, filter_to_hf),
    ),
    hf=SideTable(
        constants={"model_type": "mpt"},
        require={
            "embedding_fraction": 1.0,
            "logit_scale": None,
            "layer_norm_epsilon": 1e-05,
            "learned_pos_emb": True,
        },
        defaults={
            "d_model": 2048,
            "n_heads": 16,
            "n_layers": 24,
            "expansion_ratio": 4,
            "max_seq_len": 2048,
            "vocab_size": 50368,
            "resid_pdrop": 0.0,
            "emb_pdrop": 0.0,
            "learned_pos_emb": True,
            "attn_config": {**HF_ATTENTION, "attn_impl": "triton"},
            "logit_scale": None,
            "no_bias": False,
            "embedding_fraction": 1.0,
            "norm_type": "low_precision_layernorm",
            "use_cache": False,
        },
        write={"attn_config": HF_ATTENTION},
        aliases={"num_attention_heads": "n_heads", "hidden_size": "d_model", "num_hidden_layers": "n_layers"},
        reads=("norm_type", "expansion_ratio"),
        ignored={
            "verbose": "a setting of training",
            **dict.fromkeys(("init_config", "init_std"), "a setting of training"),
            "emb_init_std": "a setting of training",
        },
    ),
    cs=SideTable(
        constants=CS_CONSTANTS,
        require={
            "use_position_embedding": True,
            "layer_norm_epsilon": 1e-05,
            "fixed_sparse_attention": None,
            **features_off(),
        },
        defaults={
            "share_embedding_weights": True,
            "norm_type": "layernorm",
            "max_position_embeddings": 1024,
            "position_embedding_type": "learned",
            "layer_norm_epsilon": 1e-05,
            "nonlinearity": "gelu",
            **dict.fromkeys(BIASES, True),
            "use_bias_in_output": False,
            "norm_first": True,
        },
        normalize=(usual_heads,),
        reads=(*BIASES, "attention_inner_dim"),
        write={
            "position_embedding_type": "learned",
            "embedding_dropout_rate": 0.0,
            "attention_type": "scaled_dot_product",
            "attention_dropout_rate": 0.0,
            "dropout_rate": 0.0,
            **dict.fromkeys(BIASES, True),
            "share_embedding_weights": True,
        },
    ),
)

CONFIG_2_0 = replace(CONFIG, cs=replace(CONFIG.cs, write={**CONFIG.cs.write, "use_position_embedding": True}))

NOTES = "the head is always the embedding; transformers loads models without biases only"
PREFIX = "transformer."
NEW = Family(
    name="mpt",
    table=table(PREFIX),
    config=CONFIG,
    sizes=heads,
    cs_name="mpt",
    hf_type="mpt",
    architecture="MPTForCausalLM",
    mup="refuse",
    since=(2, 0),
    until=(2, 3),
    notes=NOTES,
)
OLD = replace(NEW, table=table_2_0(PREFIX), config=CONFIG_2_0, until=(2, 0))
MPT = replace(NEW, older=(OLD,))
OLD_HEADLESS = OLD.derived(name="mpt-headless", mup="refuse", table=table_2_0(""), architecture="MPTModel")
MPT_HEADLESS = NEW.derived(
    name="mpt-headless", mup="refuse", table=table(""), architecture="MPTModel", older=(OLD_HEADLESS,)
)
FAMILIES = (MPT, MPT_HEADLESS)
