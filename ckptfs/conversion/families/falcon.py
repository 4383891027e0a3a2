"""Falcon: Hugging Face FalconForCausalLM <-> Cerebras GPTJModel set up as Falcon, releases 2.1 and later.

Read: the 180B kind of config, and the older RefinedWeb (40B) and RefinedWebModel (7B); written: the 180B kind. q, k, v
are packed by groups: in each group its query heads, then one k, then one v.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from ckptfs.conversion.config import Config, ConfigTable, Convert, Fields, FieldTransform, SideTable
from ckptfs.conversion.families.decoder import (
    OLD_SLOPES,
    QKV,
    ROPE_READS,
    SLOPES,
    features_off,
    final_norm,
    kv_heads,
    nothing,
    numbers,
    rope_parameters,
    rope_scaling,
    usual_heads,
    whole_rotary,
    with_head,
)
from ckptfs.conversion.family import Family
from ckptfs.conversion.ops import Each, Split, permute_for_rope, ungroup_heads
from ckptfs.conversion.rules import Context, Rule, Table, cs_only, only_when, same, split, under


def two_norms(context: Context) -> bool:
    """Whether the layer has a norm for attention and one for the feed-forward part."""
    return context.hf.get("num_ln_in_parallel_attn") == 2


def one_norm(context: Context) -> bool:
    return not two_norms(context)


UNPACK = (
    ungroup_heads("kv_heads", ("q_per_kv", 1, 1)),
    Split(("heads", "kv_heads", "kv_heads")),
    Each((permute_for_rope("heads"), permute_for_rope("kv_heads"), None)),
)
LAYER = [
    split("self_attention.query_key_value.{p}", QKV, *UNPACK),
    same("self_attention.dense.{p}", "self_attn.proj_output_dense_layer.{p}"),
    same("mlp.dense_h_to_4h.{p}", "ffn.ffn.0.linear_layer.{p}"),
    same("mlp.dense_4h_to_h.{p}", "ffn.ffn.1.linear_layer.{p}"),
    *only_when(two_norms, same("ln_attn.{p}", "norm1.{p}", hf_also=["input_layernorm.{p}"])),
    *only_when(one_norm, same("input_layernorm.{p}", "norm1.{p}", hf_also=["ln_attn.{p}"])),
    same("ln_mlp.{p}", "norm3.{p}", hf_also=["post_attention_layernorm.{p}"]),
]
EMBEDDING = same("word_embeddings.weight", "embedding_layer.word_embeddings.weight")


def body(prefix: str, embedding: Rule) -> list[Rule]:
    """Everything but the head, with the Hugging Face *prefix*."""
    layers = under("h.{i}.", "transformer_decoder.layers.{i}.", LAYER)
    return [*under(prefix, "", [embedding, *layers, final_norm("ln_f")]), *cs_only(SLOPES, OLD_SLOPES)]


TENSORS = Table((*body("transformer.", EMBEDDING), same("lm_head.{p}", "lm_head.{p}")))
HEADLESS = Table(tuple(body("", with_head(EMBEDDING))))

BIASES = ("use_projection_bias_in_attention", "use_ffn_bias_in_attention", "use_ffn_bias")


def no_alibi(fields: Fields) -> Config:
    if fields["alibi"]:
        fields.refuse("alibi", "only False can be converted")
    return {"position_embedding_type": "rotary"}


def rotary(fields: Fields) -> Config:
    if fields["position_embedding_type"] != "rotary":
        fields.refuse("position_embedding_type", "only 'rotary' can be converted")
    return {"alibi": False}


def derived_sizes(hidden: str, heads: str) -> Convert:
    """Feed-forward and rotary sizes, which follow from the others."""
    return lambda f: {"filter_size": 4 * f[hidden], "rotary_dim": f[hidden] // f[heads], "hidden_size": f[hidden]}


def two_norms_by_default(fields: Fields) -> Config:
    """In the new architecture, null means two norms."""
    new = fields["new_decoder_architecture"] and fields["num_ln_in_parallel_attn"] is None
    return {"num_ln_in_parallel_attn": 2} if new else {}


def inner_size(fields: Fields) -> Config:
    want = 4 * fields["hidden_size"]
    if fields.get("ffn_hidden_size") not in (None, want):
        fields.refuse("ffn_hidden_size", f"it must be four times hidden_size, {want}")
    return {}


def check_sizes(fields: Fields) -> Config:
    hidden = fields.need("hidden_size", "other sizes follow from it")
    head = hidden // fields.need("num_heads", "the head size follows from it")
    if fields.need("filter_size", "it must be given") != 4 * hidden:
        fields.refuse("filter_size", f"it must be four times hidden_size, {4 * hidden}")
    if fields.need("rotary_dim", f"it must be the head size, {head}") != head:
        fields.refuse("rotary_dim", f"it must be the head size, {head}")
    if fields["embedding_dropout_rate"] != 0:
        fields.refuse("embedding_dropout_rate", "it must be 0")
    return {}


def biases_to_cs(fields: Fields) -> Config:
    return dict.fromkeys(BIASES, fields["bias"])


def biases_to_hf(fields: Fields) -> Config:
    """Copied under their Cerebras names, as the converter does; and as ``bias`` where loaders must know."""
    found = {name: fields[name] for name in BIASES if name in fields}
    for name, value in found.items():
        if value != next(iter(found.values())):
            fields.refuse(name, f"the switches {', '.join(BIASES)} must agree")
    return {**found, "bias": True} if any(found.values()) else found


def groups_to_cs(fields: Fields) -> Config:
    heads = fields["num_attention_heads"]
    old = 1 if fields["multi_query"] else heads
    groups = (fields["num_kv_heads"] or heads) if fields["new_decoder_architecture"] else old
    if not (fields["new_decoder_architecture"] or fields["parallel_attn"]):
        fields.refuse("parallel_attn", "it must be True without new_decoder_architecture")
    two = fields["new_decoder_architecture"] and fields["num_ln_in_parallel_attn"] == 2
    untied = two or not fields["parallel_attn"]
    return {"extra_attention_params": {"num_kv_groups": groups}, "use_untied_layer_norm": untied}


def groups_to_hf(fields: Fields) -> Config:
    heads, groups = fields["num_heads"], (fields["extra_attention_params"] or {}).get("num_kv_groups", 1)
    result: dict[str, Any] = {"num_kv_heads": groups, "parallel_attn": True, "multi_query": groups == 1}
    if fields["use_untied_layer_norm"]:
        return {**result, "new_decoder_architecture": True, "num_ln_in_parallel_attn": 2}
    if groups not in (1, heads):
        fields.refuse("extra_attention_params", f"with one layer norm, num_kv_groups must be 1 or {heads}")
    return {**result, "new_decoder_architecture": False, "num_ln_in_parallel_attn": None}


def older_groups(fields: Fields) -> Config:
    """RefinedWeb has a field n_head_kv; RefinedWebModel has one key/value head."""
    groups = fields.get("n_head_kv")
    return {
        "extra_attention_params": {"num_kv_groups": 1 if groups is None else groups},
        "use_untied_layer_norm": groups is not None,
    }


ROPE = rope_scaling(("linear", "yarn", "longrope"), llama_like=False)
SHARED_NAMES = {
    "tie_word_embeddings": "share_embedding_weights",
    "attention_dropout": "attention_dropout_rate",
    "hidden_dropout": "residual_dropout_rate",
    **{name: name for name in ("vocab_size", "layer_norm_epsilon", "initializer_range")},
}
SAME_NAMES = ("rope_theta", "hidden_size", "num_hidden_layers", "max_position_embeddings")
CS_CONSTANTS = {
    "nonlinearity": "gelu",
    "attention_module": "multiquery_attention",
    "attention_type": "scaled_dot_product",
}
CS_WRITE = {
    "embedding_dropout_rate": 0.0,
    "share_embedding_weights": True,
    "max_position_embeddings": 2048,
    "loss_scaling": "num_tokens",
}
CS = SideTable(
    constants=CS_CONSTANTS,
    require={"use_bias_in_output": False, **features_off()},
    defaults={
        "position_embedding_type": "rotary",
        "rope_theta": 10000.0,
        "embedding_dropout_rate": 0.1,
        "share_embedding_weights": True,
        "nonlinearity": "gelu",
        "max_position_embeddings": 1024,
        "attention_module": "aiayn_attention",
        "attention_type": "scaled_dot_product",
        "use_untied_layer_norm": False,
        "extra_attention_params": {"num_kv_groups": 1},
        "pos_scaling_factor": 1.0,
    },
    write={
        **CS_WRITE,
        "use_untied_layer_norm": True,
        "extra_attention_params": {"num_kv_groups": 1},
        **dict.fromkeys(BIASES, False),
        "use_bias_in_output": False,
    },
    normalize=(check_sizes, usual_heads),
    reads=("filter_size", "rotary_dim", "embedding_dropout_rate", "use_untied_layer_norm", "attention_inner_dim"),
)
ARCHITECTURE = ("new_decoder_architecture", "multi_query", "parallel_attn", "num_ln_in_parallel_attn")
OLD = "a field of the older classes that the class does not read"
CONFIG = ConfigTable(
    renames={**SHARED_NAMES, "num_attention_heads": "num_heads", **{name: name for name in SAME_NAMES}},
    transforms=(
        FieldTransform(("alibi",), ("position_embedding_type",), no_alibi, rotary),
        FieldTransform(("hidden_size",), (), derived_sizes("hidden_size", "num_attention_heads"), nothing),
        FieldTransform(("bias",), BIASES, biases_to_cs, biases_to_hf),
        FieldTransform(("num_kv_heads",), ("extra_attention_params",), groups_to_cs, groups_to_hf),
        ROPE,
    ),
    hf=SideTable(
        constants={"model_type": "falcon"},
        require={"activation": "gelu"},
        defaults={
            "vocab_size": 65024,
            "hidden_size": 4544,
            "num_hidden_layers": 32,
            "num_attention_heads": 71,
            "layer_norm_epsilon": 1e-05,
            "initializer_range": 0.02,
            "use_cache": True,
            "hidden_dropout": 0.0,
            "attention_dropout": 0.0,
            "num_kv_heads": None,
            "alibi": False,
            "new_decoder_architecture": False,
            "multi_query": True,
            "parallel_attn": True,
            "bias": False,
            "max_position_embeddings": 2048,
            "rope_theta": 10000.0,
            "rope_scaling": None,
            "bos_token_id": 11,
            "eos_token_id": 11,
            "num_ln_in_parallel_attn": 2,
        },
        write={"new_decoder_architecture": True, "multi_query": True},
        normalize=(rope_parameters, whole_rotary, two_norms_by_default, inner_size),
        reads=(*ROPE_READS, "ffn_hidden_size", *ARCHITECTURE),
        ignored={
            "apply_residual_connection_post_layernorm": OLD,
            **dict.fromkeys(BIASES, "a copy of bias that the class does not read"),
        },
    ),
    cs=CS,
)


def older(model_type: str, require: Mapping[str, Any]) -> ConfigTable:
    """The table for a RefinedWeb kind of config, which is only read."""
    return ConfigTable(
        renames={**SHARED_NAMES, "n_head": "num_heads", "n_layer": "num_hidden_layers"},
        transforms=(
            FieldTransform(("alibi",), ("position_embedding_type",), no_alibi, rotary),
            FieldTransform(("hidden_size",), (), derived_sizes("hidden_size", "n_head"), nothing),
            FieldTransform(("n_head",), (), older_groups, nothing),
        ),
        hf=SideTable(
            require={
                "model_type": model_type,
                "bias": False,
                "apply_residual_connection_post_layernorm": False,
                **require,
            },
            defaults={"alibi": False, "bias": False},
            reads=("n_head_kv",),
            ignored=dict.fromkeys(("parallel_attn", "multi_query"), "this kind of config always has it"),
        ),
        cs=replace(CS, write=CS_WRITE),
    )


FLAVOURS = (
    (lambda c: c.get("model_type") == "falcon", CONFIG),
    (lambda c: "n_head_kv" not in c, older("RefinedWebModel", {"multi_query": True})),
    (lambda c: True, older("RefinedWeb", {"parallel_attn": True})),
)


def sizes(model: str, cs: Mapping[str, Any]) -> dict[str, int]:
    """Head counts of a Cerebras ``model`` section; rotary rows are all rows of a head."""
    found = numbers(model, {"heads": cs.get("num_heads"), "kv_heads": kv_heads(cs), "rotary": cs.get("rotary_dim")})
    return {**found, "q_per_kv": found["heads"] // found["kv_heads"]}


NOTES = "no ALiBi; one norm with grouped key/value heads: to Cerebras only"
FALCON = Family(
    name="falcon",
    table=TENSORS,
    config=CONFIG,
    sizes=sizes,
    cs_name="falcon",
    hf_type="falcon",
    architecture="FalconForCausalLM",
    mup="refuse",
    flavours=FLAVOURS,
    notes=NOTES,
)
FALCON_HEADLESS = FALCON.derived(name="falcon-headless", mup="refuse", table=HEADLESS, architecture="FalconModel")
FAMILIES = (FALCON, FALCON_HEADLESS)
