"""BERT: Hugging Face BertForPreTraining <-> Cerebras BertPretrainModel, releases 2.1 and later.

Every tensor keeps its elements; the names differ. Other families with a BERT inside use `ENCODER` and `CONFIG`.
The conversion ties nothing: each copy of a tied weight is converted, or missing, on its own.
"""

from __future__ import annotations

from dataclasses import replace

from ckptfs.conversion.config import Config, ConfigTable, Fields, FieldTransform, SideTable, choice
from ckptfs.conversion.families.decoder import MAX_POSITIONS, no_numbers
from ckptfs.conversion.family import Family
from ckptfs.conversion.folding.mup import KEYS_ONLY
from ckptfs.conversion.rules import Context, Rule, Table, copy, same, under, with_hf_extra
from ckptfs.errors import MissingField
from ckptfs.tensors.generated import numbered
from ckptfs.tensors.tensor import Tensor


def position_ids(context: Context, positions: Tensor) -> Tensor:
    """The buffer 0 … n - 1. n is the number of positions in ``config.json``, or else of embeddings."""
    size = context.hf.get("max_position_embeddings", positions.shape[0] if positions.shape else 1)
    if not isinstance(size, int) or not 0 < size <= MAX_POSITIONS:
        why = f"there are that many position_ids, at most {MAX_POSITIONS}"
        raise MissingField(context.model, "max_position_embeddings", why)
    return numbered(size)


def norm(hf: str, cs: str) -> list[Rule]:
    """A layer norm; checkpoints that came from TensorFlow call its tensors gamma and beta."""
    return [
        same(f"{hf}.weight", f"{cs}.weight", hf_also=[f"{hf}.gamma"]),
        same(f"{hf}.bias", f"{cs}.bias", hf_also=[f"{hf}.beta"]),
    ]


WORDS = same("embeddings.word_embeddings.weight", "embedding_layer.word_embeddings.weight")
POSITIONS = with_hf_extra(
    same(
        "embeddings.position_embeddings.weight",
        "embedding_layer.position_embeddings.embed.weight",
        cs_also=["embedding_layer.position_embeddings.weight"],  # releases before 2.1
    ),
    {"embeddings.position_ids": position_ids},
)
SEGMENTS = same("embeddings.token_type_embeddings.weight", "embedding_layer.segment_embeddings.weight")
QUERY_KEY = [
    same("attention.self.query.{p}", "self_attn.proj_q_dense_layer.{p}"),
    same("attention.self.key.{p}", "self_attn.proj_k_dense_layer.{p}"),
]
LINEAR = [
    same("attention.self.value.{p}", "self_attn.proj_v_dense_layer.{p}"),
    same("attention.output.dense.{p}", "self_attn.proj_output_dense_layer.{p}"),
    same("intermediate.dense.{p}", "ffn.ffn.0.linear_layer.{p}"),
    same("output.dense.{p}", "ffn.ffn.1.linear_layer.{p}"),
]
NORMS = [*norm("attention.output.LayerNorm", "norm1"), *norm("output.LayerNorm", "norm2")]
POOLER = same("pooler.dense.{p}", "pooler.pooler.ffn.0.linear_layer.{p}")


def layers(rules: list[Rule]) -> list[Rule]:
    """*rules* of one layer for all of them."""
    return under("encoder.layer.{i}.", "transformer_encoder.layers.{i}.", rules)


EMBEDDING_NORM = norm("embeddings.LayerNorm", "embed_ln_f")
LAYERS = layers([*QUERY_KEY, *LINEAR, *NORMS])
ENCODER = [WORDS, POSITIONS, SEGMENTS, *EMBEDDING_NORM, *LAYERS]
"""All of a BERT but its pooler and heads, without prefixes."""

TRANSFORM = "bert_mlm_head.mlm_transform."
DECODER = "bert_mlm_head.classifier.ffn.0.linear_layer."
TENSORS = Table(
    (
        *under("bert.", "bert_encoder.", [*ENCODER, POOLER]),
        *under(
            "cls.predictions.",
            "",
            [
                same("transform.dense.{p}", TRANSFORM + "ffn.ffn.0.linear_layer.{p}"),
                *norm("transform.LayerNorm", TRANSFORM + "ln"),
                same("decoder.weight", DECODER + "weight"),
                with_hf_extra(same("decoder.bias", DECODER + "bias"), {"bias": copy}),
            ],
        ),
        same("cls.seq_relationship.{p}", "bert_cls_head.classifier.ffn.0.linear_layer.{p}"),
    )
)


def mlm_to_cs(fields: Fields) -> Config:
    return {"mlm_nonlinearity": fields["hidden_act"]}


def mlm_to_hf(fields: Fields) -> Config:
    if fields["mlm_nonlinearity"] not in (None, fields["encoder_nonlinearity"]):
        fields.refuse("mlm_nonlinearity", f"it must be encoder_nonlinearity, {fields['encoder_nonlinearity']!r}")
    return {}


def pooler(fields: Fields) -> Config:
    """Without a nonlinearity of its own, the pooler has the encoder's."""
    return {"pooler_nonlinearity": fields.get("pooler_nonlinearity", fields["encoder_nonlinearity"])}


MLM = FieldTransform(("hidden_act",), ("mlm_nonlinearity",), mlm_to_cs, mlm_to_hf)
POSITION_TYPE = choice("position_embedding_type", "position_embedding_type", {"absolute": "learned"})
SAME_NAMES = ("vocab_size", "hidden_size", "num_hidden_layers", "initializer_range")
NAMES = {
    "num_attention_heads": "num_heads",
    "intermediate_size": "filter_size",
    "hidden_act": "encoder_nonlinearity",
    "hidden_dropout_prob": "dropout_rate",
    "attention_probs_dropout_prob": "attention_dropout_rate",
    "layer_norm_eps": "layer_norm_epsilon",
    "tie_word_embeddings": "share_embedding_weights",
    "max_position_embeddings": "max_position_embeddings",
    **{name: name for name in SAME_NAMES},
}
HF_REQUIRE = {"is_decoder": False, "add_cross_attention": False}
BIASES = (
    "use_projection_bias_in_attention",
    "use_ffn_bias_in_attention",
    "use_ffn_bias",
    "use_ffn_bias_in_mlm",
    "use_output_bias_in_mlm",
)
CS_REQUIRE = {
    "attention_type": "scaled_dot_product",
    **dict.fromkeys(BIASES, True),
}
HF = SideTable(
    constants={"model_type": "bert"},
    require={**HF_REQUIRE, "type_vocab_size": 2},
    defaults={
        "vocab_size": 30522,
        "hidden_size": 768,
        "num_hidden_layers": 12,
        "num_attention_heads": 12,
        "intermediate_size": 3072,
        "hidden_act": "gelu",
        "hidden_dropout_prob": 0.1,
        "attention_probs_dropout_prob": 0.1,
        "max_position_embeddings": 512,
        "layer_norm_eps": 1e-12,
        "tie_word_embeddings": True,
    },
)
CS = SideTable(
    constants={"pooler_nonlinearity": "tanh"},
    require={**CS_REQUIRE, "disable_nsp": False},
    defaults={"share_embedding_weights": True, "encoder_nonlinearity": "gelu"},
    normalize=(pooler,),
    ignored={"freeze_ffn_bias_in_glu": "a setting of training"},
)
CONFIG = ConfigTable(renames=NAMES, transforms=(MLM, POSITION_TYPE), hf=HF, cs=CS)
"""The config that all families with a BERT inside have in common."""
FROZEN = replace(CS, write={**CS.write, "freeze_ffn_bias_in_glu": False})
"""The Cerebras side of the families that write this field."""

BERT = Family(
    name="bert",
    table=TENSORS,
    config=replace(CONFIG, cs=FROZEN),
    sizes=no_numbers,
    cs_name="bert",
    hf_type="bert",
    architecture="BertForPreTraining",
    mup="fold",
    mup_since=(2, 3),
    mup_rules=KEYS_ONLY,
    notes="a head without a weight in the Hugging Face file, because it is tied, has none here either; "
    "of muP, only the scales of attention are kept",
)
FAMILIES = (BERT,)
