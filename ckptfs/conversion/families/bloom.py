"""BLOOM: Hugging Face BloomForCausalLM <-> Cerebras GPT2LMHeadModel with ALiBi, releases 2.1 and later.

q, k, v are packed head by head; ALiBi's slopes are a tensor in Cerebras only.
"""

from __future__ import annotations

from ckptfs.conversion.config import Config, ConfigTable, Fields, FieldTransform, SideTable
from ckptfs.conversion.families.decoder import (
    OLD_SLOPES,
    QKV,
    SLOPES,
    alibi_slopes,
    features_off,
    final_norm,
    heads,
    nothing,
    with_head,
)
from ckptfs.conversion.families.gpt2 import dropouts
from ckptfs.conversion.family import Family
from ckptfs.conversion.ops import Split, ungroup_heads
from ckptfs.conversion.rules import AT_END, Rule, Table, cs_only, same, split, under, with_cs_extra

LAYER = [
    same("input_layernorm.{p}", "norm1.{p}"),
    same("post_attention_layernorm.{p}", "norm3.{p}"),
    split("self_attention.query_key_value.{p}", QKV, ungroup_heads("heads", (1, 1, 1)), Split((1, 1, 1))),
    same("self_attention.dense.{p}", "self_attn.proj_output_dense_layer.{p}"),
    same("mlp.dense_h_to_4h.{p}", "ffn.ffn.0.linear_layer.{p}"),
    same("mlp.dense_4h_to_h.{p}", "ffn.ffn.1.linear_layer.{p}"),
]
EMBEDDING = same("word_embeddings.weight", "embedding_layer.word_embeddings.weight")
MADE = {SLOPES: alibi_slopes}


def body(prefix: str, embedding: Rule) -> list[Rule]:
    """Everything but the head, with the Hugging Face *prefix*."""
    layers = under("h.{i}.", "transformer_decoder.layers.{i}.", LAYER)
    norm = same("word_embeddings_layernorm.{p}", "embedding_ln_f.{p}")
    return [*under(prefix, "", [embedding, norm, *layers, final_norm("ln_f")]), *cs_only(OLD_SLOPES)]


TENSORS = Table(
    (*body("transformer.", with_cs_extra(EMBEDDING, MADE, position=AT_END)), same("lm_head.{p}", "lm_head.{p}"))
)
HEADLESS = Table(tuple(body("", with_head(EMBEDDING, **MADE))))


def sizes_to_cs(fields: Fields) -> Config:
    """Older configs have n_embed; the feed-forward size has no field of its own."""
    hidden = fields["hidden_size"] if fields.get("n_embed") is None else fields["n_embed"]
    return {"hidden_size": hidden, "filter_size": 4 * hidden}


def sizes_to_hf(fields: Fields) -> Config:
    hidden = fields.need("hidden_size", "other sizes follow from it")
    if fields.get("filter_size", 4 * hidden) != 4 * hidden:
        fields.refuse("filter_size", f"it must be four times hidden_size, {4 * hidden}")
    if fields.get("attention_inner_dim") not in (None, hidden):
        fields.refuse("attention_inner_dim", f"it must be hidden_size, {hidden}")
    return {}


CS_CONSTANTS = {
    "position_embedding_type": "alibi",
    "use_ffn_bias_in_attention": True,
    "use_projection_bias_in_attention": True,
    "use_ffn_bias": True,
    "use_bias_in_output": False,
    "attention_type": "scaled_dot_product",
    "embedding_layer_norm": True,
}
POSITIONS = "ALiBi has no table of positions"
OLD = "a field of the training code that the class does not read"
CONFIG = ConfigTable(
    renames={
        "tie_word_embeddings": "share_embedding_weights",
        "n_head": "num_heads",
        "n_layer": "num_hidden_layers",
        "attention_dropout": "attention_dropout_rate",
        "hidden_dropout": "dropout_rate",
        **{n: n for n in ("vocab_size", "hidden_size", "layer_norm_epsilon", "initializer_range")},
    },
    transforms=(FieldTransform(("hidden_size",), (), sizes_to_cs, nothing),),
    hf=SideTable(
        constants={"model_type": "bloom"},
        require={
            "apply_residual_connection_post_layernorm": False,
            "scale_attn_by_inverse_layer_idx": False,
            "reorder_and_upcast_attn": False,
        },
        defaults={
            "tie_word_embeddings": True,
            "vocab_size": 250880,
            "hidden_size": 64,
            "n_layer": 2,
            "n_head": 8,
            "layer_norm_epsilon": 1e-05,
            "initializer_range": 0.02,
            "hidden_dropout": 0.0,
            "apply_residual_connection_post_layernorm": False,
            "attention_dropout": 0.0,
        },
        aliases={"num_hidden_layers": "n_layer", "num_attention_heads": "n_head"},
        reads=("n_embed",),
        ignored={
            "slow_but_exact": "how the result is computed, not what it is",
            **dict.fromkeys(("seq_length", "n_positions", "max_position_embeddings"), POSITIONS),
            **dict.fromkeys(
                ("offset_alibi", "unk_token_id", "masked_softmax_fusion", "attention_softmax_in_fp32"), OLD
            ),
            **dict.fromkeys(("bias_dropout_fusion", "skip_bias_add", "skip_bias_add_qkv", "n_inner"), OLD),
            "hidden_dropout_prob": OLD,
        },
    ),
    cs=SideTable(
        constants=CS_CONSTANTS,
        require={
            "norm_type": "layernorm",
            "use_position_embedding": True,
            "embedding_dropout_rate": 0.0,
            "attention_module": "aiayn_attention",
            "use_rms_norm": False,
            "nonlinearity": "gelu",
            "norm_first": True,
            "fixed_sparse_attention": None,
            "use_ff_layer1_dropout": False,
            **features_off("alibi_trainable_slopes"),
            "alibi_trainable_slopes": False,
        },
        defaults={"share_embedding_weights": True, "embedding_layer_norm": False},
        normalize=(dropouts, sizes_to_hf),
        reads=("filter_size", "attention_inner_dim"),
        ignored={"max_position_embeddings": POSITIONS},
    ),
)

NOTES = "number of positions is not kept; feed-forward size of 4 hidden sizes only"
BLOOM = Family(
    name="bloom",
    table=TENSORS,
    config=CONFIG,
    sizes=heads,
    cs_name="bloom",
    hf_type="bloom",
    architecture="BloomForCausalLM",
    mup="fold",
    notes=NOTES,
)
BLOOM_HEADLESS = BLOOM.derived(name="bloom-headless", mup="config", table=HEADLESS, architecture="BloomModel")
FAMILIES = (BLOOM, BLOOM_HEADLESS)
