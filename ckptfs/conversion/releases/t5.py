"""T5 as release 1.6 named its tensors: blocks as in Hugging Face's T5, embeddings apart from them.

Each block had a copy of the relative attention bias; from 1.7 on there is one for each side.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ckptfs.conversion.families.t5 import BIAS, DECODER_LAYER, ENCODER_LAYER, UNGATED
from ckptfs.conversion.ops import TakeFirst
from ckptfs.conversion.rules import Rule, Table, hf_only, same, stack, under
from ckptfs.errors import MissingField

LAYERS = {"encoder": ENCODER_LAYER, "decoder": DECODER_LAYER}
MAX_LAYERS = 10_000


def side_rules(side: str) -> list[Rule]:
    """The encoder or the decoder."""
    positions = f"{side}.absolute_position_embedding", f"{side}_embeddings.position_embeddings"
    return [
        same(f"{side}_token_embedding.{{p}}", f"{side}_embeddings.word_embeddings.{{p}}"),
        *hf_only(f"{side}.embed_tokens.{{p}}"),
        same(*positions),
        same(f"{positions[0]}.{{p}}", f"{positions[1]}.{{p}}"),
        stack(
            f"{side}.block.{{i}}.{BIAS}",
            f"relative_position_{side}.relative_attention_bias.{{p}}",
            TakeFirst(side),
            over="i",
        ),
        *under(f"{side}.block.{{i}}.", f"{side}.layers.{{i}}.", LAYERS[side]),
        same(f"{side}.final_layer_norm.{{p}}", f"{side}.norm.{{p}}"),
    ]


TENSORS = Table((*(rule for side in LAYERS for rule in side_rules(side)), same("lm_head.{p}", "lm_head.{p}")))


def as_hf(section: Mapping[str, Any]) -> dict[str, Any]:
    """What the rules of a layer ask ``config.json``."""
    nonlinearity = section.get("encoder_nonlinearity")
    return {"feed_forward_proj": UNGATED.get(nonlinearity, "") if isinstance(nonlinearity, str) else ""}


def dims(model: str, section: Mapping[str, Any]) -> dict[str, int]:
    """How many blocks each side has."""
    found: dict[str, int] = {}
    for side in LAYERS:
        field = f"{side}_num_hidden_layers"
        value = section.get(field, found.get("encoder"))
        if not isinstance(value, int) or not 0 < value <= MAX_LAYERS:
            raise MissingField(model, field, "each block gets a copy of the relative attention bias")
        found[side] = value
    return found
