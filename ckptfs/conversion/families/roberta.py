"""RoBERTa: Hugging Face RobertaForMaskedLM <-> Cerebras BertPretrainModel of one task only, releases 2.1 and later.

Hugging Face counts the rows of the position table, of which the first ones up to the padding token are not used;
Cerebras counts positions.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from ckptfs.conversion.config import Config, ConfigTable, Fields, FieldTransform
from ckptfs.conversion.families.bert import (
    BERT,
    CS,
    CS_REQUIRE,
    DECODER,
    EMBEDDING_NORM,
    HF,
    HF_REQUIRE,
    LAYERS,
    NAMES,
    POSITION_TYPE,
    POSITIONS,
    SEGMENTS,
    TRANSFORM,
    WORDS,
)
from ckptfs.conversion.rules import Context, Table, copy, hf_only, same, under, with_cs_extra, with_hf_extra
from ckptfs.tensors.generated import filled
from ckptfs.tensors.tensor import Tensor


def zero_bias(context: Context, embedding: Tensor) -> Tensor:
    """For a head without a bias: zeros in float32, one for each word."""
    return filled("float32", embedding.shape[:1], 0.0)


def one_segment(context: Context, embedding: Tensor) -> Tensor | None:
    """A model without segments gets one of zeros in float32, whatever its checkpoint holds."""
    return filled("float32", (1, *embedding.shape[1:]), 0.0) if context.cs.get("num_segments") == 0 else None


WORDS_OF_ROBERTA = with_hf_extra(WORDS, {"embeddings.token_type_embeddings.weight": one_segment}, if_present="replace")
EMBEDDING = [
    with_cs_extra(rule, {DECODER + "bias": zero_bias}, if_present="keep")
    for rule in under("roberta.", "bert_encoder.", [WORDS_OF_ROBERTA])
]
BODY = under("roberta.", "bert_encoder.", [POSITIONS, SEGMENTS, *EMBEDDING_NORM, *LAYERS])
TENSORS = Table(
    (
        *EMBEDDING,
        *BODY,
        *hf_only("roberta.pooler.dense.{p}"),
        same("lm_head.dense.{p}", TRANSFORM + "ffn.ffn.0.linear_layer.{p}"),
        same("lm_head.layer_norm.{p}", TRANSFORM + "ln.{p}"),
        same("lm_head.decoder.weight", DECODER + "weight"),
        with_hf_extra(same("lm_head.decoder.bias", DECODER + "bias"), {"lm_head.bias": copy}),
    )
)


def positions_to_cs(fields: Fields) -> Config:
    return {"max_position_embeddings": fields["max_position_embeddings"] - padding(fields) - 1}


def positions_to_hf(fields: Fields) -> Config:
    return {"max_position_embeddings": fields["max_position_embeddings"] + padding(fields) + 1}


def padding(fields: Fields) -> Any:
    return fields.need("pad_token_id", "positions count from it")


def segments_to_hf(fields: Fields) -> Config:
    return {"type_vocab_size": fields["num_segments"] or 1}


def segments(fields: Fields) -> Config:
    """Segments are there for the next-sentence head, if nothing else is said."""
    given = fields.get("num_segments")
    return {"num_segments": (0 if fields["disable_nsp"] else 2) if given is None else given}


def mlm(fields: Fields) -> Config:
    """The head's nonlinearity is the encoder's, if nothing else is said."""
    given = fields.get("mlm_nonlinearity")
    return {"mlm_nonlinearity": fields["encoder_nonlinearity"] if given is None else given}


SIZED_POSITIONS = FieldTransform(
    ("max_position_embeddings",), ("max_position_embeddings",), positions_to_cs, positions_to_hf
)
NAMES_AND_PADDING = {k: v for k, v in NAMES.items() if k != "max_position_embeddings"} | {
    "pad_token_id": "pad_token_id"
}
HEAD = {"disable_nsp": True, "mask_padding_in_positional_embed": True, "mlm_nonlinearity": "gelu"}
CONFIG = ConfigTable(
    renames=NAMES_AND_PADDING,
    transforms=(
        POSITION_TYPE,
        SIZED_POSITIONS,
        FieldTransform(
            ("type_vocab_size",), ("num_segments",), lambda f: {"num_segments": f["type_vocab_size"]}, segments_to_hf
        ),
    ),
    hf=replace(
        HF,
        constants={"model_type": "roberta"},
        require=HF_REQUIRE,
        defaults={
            **HF.defaults,
            "vocab_size": 50265,
            "position_embedding_type": "absolute",
            "type_vocab_size": 2,
            "pad_token_id": 1,
        },
    ),
    cs=replace(
        CS,
        constants={**CS.constants, **HEAD},
        require=CS_REQUIRE,
        defaults={**CS.defaults, "disable_nsp": False, "mask_padding_in_positional_embed": False, "pad_token_id": 0},
        normalize=(*CS.normalize, segments, mlm),
    ),
)

ROBERTA = BERT.derived(
    name="roberta",
    mup="refuse",
    table=TENSORS,
    config=CONFIG,
    hf_type="roberta",
    architecture="RobertaForMaskedLM",
    cs_discriminator={"disable_nsp": True, "mask_padding_in_positional_embed": True},
    notes="no pooler; its Cerebras configs say name: bert, as bert's",
)
FAMILIES = (ROBERTA,)
