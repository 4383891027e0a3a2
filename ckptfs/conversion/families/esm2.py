"""ESM-2: Hugging Face EsmForMaskedLM <-> Cerebras Esm2PretrainModel, releases 2.1 and later.

A BERT with its norms in front, rotary or learned positions. What the public converter calls ``model_type: bert`` is
``esm`` here, so that loaders find the model.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from ckptfs.conversion.config import Config, ConfigTable, Convert, Fields, FieldTransform, one_of
from ckptfs.conversion.families.bert import (
    BERT,
    CS_REQUIRE,
    DECODER,
    FROZEN,
    HF,
    HF_REQUIRE,
    LINEAR,
    POOLER,
    POSITIONS,
    QUERY_KEY,
    SEGMENTS,
    TRANSFORM,
    WORDS,
    layers,
    norm,
)
from ckptfs.conversion.families.bert import NAMES as BERT_NAMES
from ckptfs.conversion.families.decoder import nothing, numbers
from ckptfs.conversion.families.roberta import positions_to_cs, positions_to_hf
from ckptfs.conversion.ops import permute_for_rope
from ckptfs.conversion.rules import Context, Table, hf_only, only_when, same, under


def rotary(context: Context) -> bool:
    return context.cs.get("position_embedding_type") == "rotary"


def learned(context: Context) -> bool:
    return not rotary(context)


ROTARY_QUERY_KEY = [replace(rule, ops=(permute_for_rope("heads"),)) for rule in QUERY_KEY]
LAYER = [
    *only_when(rotary, *ROTARY_QUERY_KEY),
    *only_when(learned, *QUERY_KEY),
    *LINEAR,
    *norm("attention.LayerNorm", "norm1"),
    *norm("LayerNorm", "norm2"),
]
INV_FREQ = "attention.self.rotary_embeddings.inv_freq"
ENCODER = [
    WORDS,
    *only_when(learned, POSITIONS),
    *only_when(rotary, *hf_only("embeddings.position_embeddings.weight", "embeddings.position_ids")),
    SEGMENTS,
    same("embeddings.layer_norm.{p}", "embed_ln_f.{p}"),
    *layers(LAYER),
    same("encoder.emb_layer_norm_after.{p}", "transformer_encoder.norm.{p}"),
    POOLER,
    *hf_only("contact_head.regression.{p}"),
    *hf_only("encoder.layer.{i}." + INV_FREQ, "rotary_embeddings.inv_freq"),
    *hf_only("encoder.layer.*." + INV_FREQ),  # transformers 5 saves its one buffer under this very name
]
TENSORS = Table(
    (
        *under("esm.", "bert_encoder.", ENCODER),
        same("lm_head.dense.{p}", TRANSFORM + "ffn.ffn.0.linear_layer.{p}"),
        same("lm_head.layer_norm.{p}", TRANSFORM + "ln.{p}"),
        same("lm_head.decoder.weight", DECODER + "weight"),
        same("lm_head.bias", DECODER + "bias"),
    )
)


def type_to_cs(fields: Fields) -> Config:
    """Learned positions count from the padding token, as in RoBERTa; rotary ones cover whole heads."""
    if fields["position_embedding_type"] == "rotary":
        return {
            "position_embedding_type": "rotary",
            "rotary_dim": fields["hidden_size"] // fields["num_attention_heads"],
        }
    if fields["position_embedding_type"] != "absolute":
        fields.refuse("position_embedding_type", "only 'rotary' and 'absolute' can be converted")
    return {"position_embedding_type": "learned", "mask_padding_in_positional_embed": True}


def type_to_hf(fields: Fields) -> Config:
    if fields["position_embedding_type"] == "rotary":
        return {**whole_heads(fields), "position_embedding_type": "rotary"}
    if fields["position_embedding_type"] != "learned":
        fields.refuse("position_embedding_type", "only 'rotary' and 'learned' can be converted")
    if not fields.get("mask_padding_in_positional_embed"):
        fields.refuse("mask_padding_in_positional_embed", "with learned positions, it must be True")
    return {"position_embedding_type": "absolute"}


def whole_heads(fields: Fields) -> Config:
    """Refuses a number of rotary rows that is not the head size, which Hugging Face has no field for."""
    head = fields["hidden_size"] // fields["num_heads"]
    if fields.get("rotary_dim") not in (None, head):
        fields.refuse("rotary_dim", f"it must be the head size, {head}")
    return {}


def activation(fields: Fields) -> Config:
    """Copied to Cerebras only: transformers' ESM always takes gelu, and has no field for another one."""
    return {"encoder_nonlinearity": fields["hidden_act"]}


def unless_rotary(convert: Convert) -> Convert:
    """Rotary models count positions the same way on both sides."""
    name = "max_position_embeddings"
    return lambda f: {name: f[name]} if f["position_embedding_type"] == "rotary" else convert(f)


def dropout(fields: Fields) -> Config:
    """Dropped tokens are those of the mask, so there must be one."""
    if fields["token_dropout"] and fields.get("mask_token_id") is None:
        fields.refuse("token_dropout", "it needs a mask_token_id")
    return {}


def usual_rotary(fields: Fields) -> Config:
    """Refuses another base, which Cerebras has no field for."""
    if fields["position_embedding_type"] == "rotary" and fields.get("rope_theta") not in (None, 10000):
        fields.refuse("rope_theta", "only 10000 can be converted")
    return {}


NAMES = {k: v for k, v in BERT_NAMES.items() if k not in ("hidden_act", "max_position_embeddings")} | {
    "emb_layer_norm_before": "embedding_layer_norm",
    **{name: name for name in ("token_dropout", "mask_token_id", "pad_token_id")},
}
ALWAYS = {"use_final_layer_norm": True, "disable_nsp": True}
TYPE = ("position_embedding_type",)
SIZE = ("max_position_embeddings",)
CONFIG = ConfigTable(
    renames=NAMES,
    transforms=(
        FieldTransform(("hidden_act",), (), activation, nothing),
        FieldTransform(TYPE, TYPE, type_to_cs, type_to_hf),
        FieldTransform(SIZE, SIZE, unless_rotary(positions_to_cs), unless_rotary(positions_to_hf)),
    ),
    hf=replace(
        HF,
        constants={"model_type": "esm"},
        require={**HF_REQUIRE, "is_folding_model": one_of(False, None)},
        defaults={
            **HF.defaults,
            "position_embedding_type": "absolute",
            "token_dropout": False,
            "emb_layer_norm_before": None,
        },
        write={"is_folding_model": False, "esmfold_config": None},
        normalize=(usual_rotary, dropout),
        reads=("rope_theta",),
        ignored={
            "type_vocab_size": "the class has no segments",
            **dict.fromkeys(("esmfold_config", "vocab_list"), "only models that fold proteins read it"),
        },
    ),
    cs=replace(
        FROZEN,
        constants=ALWAYS,
        require={
            **CS_REQUIRE,
            "pooler_nonlinearity": "tanh",
            "encoder_nonlinearity": "gelu",
            "mlm_nonlinearity": one_of("gelu", None),
        },
        defaults={
            **FROZEN.defaults,
            "position_embedding_type": "learned",
            "use_final_layer_norm": False,
            "disable_nsp": False,
            "embedding_layer_norm": True,
            "token_dropout": False,
            "pad_token_id": 0,
        },
        write={"freeze_ffn_bias_in_glu": False},
        normalize=(dropout,),
        reads=("rotary_dim", "mask_padding_in_positional_embed"),
    ),
)


def sizes(model: str, cs: Mapping[str, Any]) -> dict[str, int]:
    """The heads of a model with rotary positions; rotary rows are all rows of a head."""
    if cs.get("position_embedding_type") != "rotary":
        return {}
    found = numbers(model, {"heads": cs.get("num_heads"), "hidden": cs.get("hidden_size")})
    return {**found, "rotary": found["hidden"] // found["heads"]}


ESM2 = BERT.derived(
    name="esm-2",
    mup="refuse",
    table=TENSORS,
    config=CONFIG,
    sizes=sizes,
    cs_name="esm2",
    hf_type="esm",
    architecture="EsmForMaskedLM",
    notes="the contact head is not kept",
)
FAMILIES = (ESM2,)
