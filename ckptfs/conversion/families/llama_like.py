"""Models that are Llama but for a few fields: its tensors in blocks, and `llama_like` for the config.

Rotary rows of q and k are half-split in Hugging Face and interleaved pairs in Cerebras.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ckptfs.conversion.config import Config, ConfigTable, Convert, Fields, FieldTransform, SideTable
from ckptfs.conversion.families.decoder import (
    ROPE_READS,
    features_off,
    final_norm,
    gated,
    kv_heads,
    nothing,
    numbers,
    rope_parameters,
    rope_scaling,
    usual_heads,
    whole_rotary,
    with_head,
)
from ckptfs.conversion.ops import permute_for_rope
from ckptfs.conversion.rules import Rule, Table, hf_only, same, under
from ckptfs.errors import MissingField

NORMS = [
    same("input_layernorm.{p}", "norm1.{p}"),
    same("post_attention_layernorm.{p}", "norm3.{p}"),
]
ATTENTION = [
    same("self_attn.q_proj.{p}", "self_attn.proj_q_dense_layer.{p}", permute_for_rope("heads")),
    same("self_attn.k_proj.{p}", "self_attn.proj_k_dense_layer.{p}", permute_for_rope("kv_heads")),
    same("self_attn.v_proj.{p}", "self_attn.proj_v_dense_layer.{p}"),
    same("self_attn.o_proj.{p}", "self_attn.proj_output_dense_layer.{p}"),
    same("self_attn.q_norm.{p}", "self_attn.q_norm.{p}", permute_for_rope(1)),
    same("self_attn.k_norm.{p}", "self_attn.k_norm.{p}", permute_for_rope(1)),
    *hf_only("self_attn.rotary_emb.inv_freq"),
]
MLP = [
    same("mlp.up_proj.{p}", "ffn.ffn.0.linear_layer.{p}"),
    same("mlp.gate_proj.{p}", "ffn.ffn.0.linear_layer_for_glu.{p}"),
    same("mlp.down_proj.{p}", "ffn.ffn.1.linear_layer.{p}"),
]
LAYER = [*NORMS, *ATTENTION, *MLP]
EMBEDDING = same("embed_tokens.weight", "embedding_layer.word_embeddings.weight")


def body(prefix: str, embedding: Rule, layer: list[Rule]) -> list[Rule]:
    """Everything but the head, with the Hugging Face *prefix*."""
    layers = under("layers.{i}.", "transformer_decoder.layers.{i}.", layer)
    return under(prefix, "", [embedding, *layers, final_norm("norm")])


def tables(layer: list[Rule]) -> tuple[Table, Table]:
    """A model of these layers, with and without a head."""
    whole = Table((*body("model.", EMBEDDING, layer), same("lm_head.{p}", "lm_head.{p}")))
    return whole, Table(tuple(body("", with_head(EMBEDDING), layer)))


# ------------------------------------------------------------------------------------------------- key/value heads


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
    """Key/value heads are written only where the config mentions them, as the converter does."""
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

# -------------------------------------------------------------------------------------------------------- head size


def size_to_cs(fields: Fields) -> Config:
    """``rotary_dim`` is the head size; ``attention_inner_dim`` is written where it is not hidden_size."""
    hidden, heads = positive(fields, "hidden_size"), positive(fields, "num_attention_heads")
    size = hidden // heads if fields.get("head_dim") is None else positive(fields, "head_dim")
    inner = {} if size * heads == hidden else {"attention_inner_dim": size * heads}
    return {"rotary_dim": size, **inner}


def positive(fields: Fields, name: str) -> int:
    """The value of *name*; refused if it is not a positive number."""
    value = fields[name]
    if not isinstance(value, int) or value < 1:
        fields.refuse(name, "it must be a positive number")
    return value


def usual_size_to_cs(fields: Fields) -> Config:
    return {"rotary_dim": fields["hidden_size"] // fields["num_attention_heads"]}


def head_size(fields: Fields) -> int:
    """The head size of a Cerebras config; refused unless all rows of a head are rotary."""
    heads, inner = fields.need("num_heads", "the head size follows from it"), fields.get("attention_inner_dim")
    inner = fields.need("hidden_size", "the head size follows from it") if inner is None else inner
    if fields.get("attention_inner_dim") is not None and inner % heads:
        fields.refuse("attention_inner_dim", f"it must be a multiple of num_heads, {heads}")
    size: int = inner // heads
    if fields.need("rotary_dim", f"it must be the head size, {size}") != size:
        fields.refuse("rotary_dim", f"it must be the head size, {size}")
    return size


def check_head_size(fields: Fields) -> Config:
    head_size(fields)
    return {}


def size_to_hf(fields: Fields) -> Config:
    """``head_dim`` is written only where it is not hidden_size / heads."""
    size = head_size(fields)
    return {} if size == fields["hidden_size"] // fields["num_heads"] else {"head_dim": size}


HEAD_SIZE = FieldTransform(
    ("num_attention_heads", "head_dim"), ("attention_inner_dim", "rotary_dim"), size_to_cs, size_to_hf
)
USUAL_HEAD_SIZE = FieldTransform(("num_attention_heads",), (), usual_size_to_cs, nothing)
"""For classes of transformers without a field ``head_dim``."""

# ------------------------------------------------------------------------------------------------------------ biases

ATTENTION_BIASES = ("use_projection_bias_in_attention", "use_ffn_bias_in_attention")


def attention_bias_to_cs(fields: Fields) -> Config:
    return dict.fromkeys(ATTENTION_BIASES, fields["attention_bias"])


def attention_bias_to_hf(fields: Fields) -> Config:
    bias = fields["use_projection_bias_in_attention"]
    if bias != fields["use_ffn_bias_in_attention"]:
        fields.refuse("use_ffn_bias_in_attention", f"it must be as use_projection_bias_in_attention, {bias}")
    return {"attention_bias": bias}


ATTENTION_BIAS = FieldTransform(("attention_bias",), ATTENTION_BIASES, attention_bias_to_cs, attention_bias_to_hf)


def only_if(name: str, convert: Convert) -> Convert:
    """*convert*, whose field *name* is left out where it is false: the converter does not write it."""
    return lambda fields: {k: v for k, v in convert(fields).items() if k != name or v}


BIASES = (
    FieldTransform(
        *(("attention_bias",), ATTENTION_BIASES),
        *(attention_bias_to_cs, only_if("attention_bias", attention_bias_to_hf)),
    ),
    FieldTransform(
        *(("mlp_bias",), ("use_ffn_bias",)),
        lambda fields: {"use_ffn_bias": fields["mlp_bias"]},
        only_if("mlp_bias", lambda fields: {"mlp_bias": fields["use_ffn_bias"]}),
    ),
)
NO_BIASES = dict.fromkeys((*ATTENTION_BIASES, "use_ffn_bias"), False)


def says_biases(fields: Fields) -> Config:
    """Refuse a Cerebras config that leaves its biases to the trainer's defaults, which have them."""
    for name in NO_BIASES:
        fields.need(name, "it says whether there are biases")
    return {}


# ------------------------------------------------------------------------------------------------------------ config

COPIED = (
    "vocab_size",
    "hidden_size",
    "num_hidden_layers",
    "max_position_embeddings",
    "rope_theta",
    "initializer_range",
)
RENAMES = {
    "tie_word_embeddings": "share_embedding_weights",
    "num_attention_heads": "num_heads",
    "intermediate_size": "filter_size",
    "rms_norm_eps": "layer_norm_epsilon",
    **{name: name for name in COPIED},
}
CS_CONSTANTS = {
    "position_embedding_type": "rotary",
    "embedding_dropout_rate": 0.0,
    "embedding_layer_norm": False,
    "attention_type": "scaled_dot_product",
    **NO_BIASES,
    "attention_dropout_rate": 0.0,
    "dropout_rate": 0.0,
    "use_bias_in_output": False,
    "norm_first": True,
    "use_ff_layer1_dropout": False,
    "norm_type": "rmsnorm",
}
HF_DEFAULTS = {
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
}
CS_DEFAULTS = {
    "share_embedding_weights": True,
    "max_position_embeddings": 1024,
    "position_embedding_type": "learned",
    "layer_norm_epsilon": 1e-05,
    "nonlinearity": "gelu",
    "use_bias_in_output": False,
    "norm_first": True,
    "norm_type": "layernorm",
    "pos_scaling_factor": 1.0,
}
USUAL_BIASES = dict.fromkeys(NO_BIASES, True)
"""The trainer's defaults."""
NOTHING = SideTable()
NO_DROPOUT = "a setting of training: the Cerebras model has no such dropout"


def llama_like(
    hf: SideTable,
    *,
    defaults: Config,
    renames: Mapping[str, str] | None = None,
    transforms: tuple[FieldTransform, ...] = (),
    head_dim: bool = True,
    biases: bool = False,
    cs: SideTable = NOTHING,
) -> ConfigTable:
    """The config of a model like Llama. *hf* and *cs* have what its own sides demand and supply beside Llama's.

    *defaults* are `HF_DEFAULTS`, changed where the model's class has others. *head_dim* and *biases* (of attention
    and feed-forward layers) say whether the transformers class has fields for them.
    """
    constants = {k: v for k, v in CS_CONSTANTS.items() if not (biases and k in NO_BIASES)}
    known = {*(renames or {}).values(), *(name for t in transforms for name in t.cs), *cs.required}
    off = {"use_position_embedding": True, "fixed_sparse_attention": None, "use_rms_norm": True, **features_off(*known)}
    return ConfigTable(
        renames={**RENAMES, **(renames or {})},
        transforms=(
            gated(),
            *KV_GROUPS,
            HEAD_SIZE if head_dim else USUAL_HEAD_SIZE,
            *(BIASES if biases else ()),
            rope_scaling(("linear", "yarn", "longrope", "llama3"), llama_like=True),
            *transforms,
        ),
        hf=SideTable(
            constants=hf.constants,
            require=hf.require,
            defaults=defaults,
            write=hf.write,
            normalize=(rope_parameters, whole_rotary, *hf.normalize),
            aliases=hf.aliases,
            reads=(*ROPE_READS, *hf.reads),
            ignored={"attention_dropout": NO_DROPOUT, **hf.ignored},
        ),
        cs=SideTable(
            constants={**constants, **cs.constants},
            require={**off, **cs.require},
            defaults={**CS_DEFAULTS, **({} if biases else USUAL_BIASES), **cs.defaults},
            write={**(NO_BIASES if biases else {}), **cs.write},
            normalize=(
                check_head_size,
                *(() if head_dim else (usual_heads,)),
                *((says_biases,) if biases else ()),
                *cs.normalize,
            ),
            reads=() if head_dim else ("attention_inner_dim", "rotary_dim"),
            ignored=cs.ignored,
        ),
    )


def sizes(model: str, cs: Mapping[str, Any]) -> dict[str, int]:
    """heads, kv_heads and rotary of a Cerebras ``model`` section."""
    return numbers(model, {"heads": cs.get("num_heads"), "kv_heads": kv_heads(cs), "rotary": cs.get("rotary_dim")})
