"""Llama 3.2 Vision: Hugging Face MllamaForConditionalGeneration <-> Cerebras' Mllama, releases 2.4 and later.

A Llama text model with layers that attend to an image, an image encoder, and a projection between them. The image is
cut into patches by a convolution in Hugging Face, and by a matrix with the channels last in Cerebras.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from ckptfs.conversion.components import component_config, joined, within
from ckptfs.conversion.config import Config, ConfigTable, Fields, FieldTransform, SideTable, one_of
from ckptfs.conversion.families import llama_like
from ckptfs.conversion.families.decoder import nothing, numbers
from ckptfs.conversion.families.vit import TRANSFORMS as VIT_TRANSFORMS
from ckptfs.conversion.family import Family
from ckptfs.conversion.folding import mup
from ckptfs.conversion.ops import ConvToLinear
from ckptfs.conversion.rules import Rule, Table, same, under

CROSS = {"q_proj": "proj_q", "k_proj": "proj_k", "v_proj": "proj_v", "o_proj": "proj_output"}
CROSS_ATTENTION = [
    *(same(f"cross_attn.{hf}.{{p}}", f"multihead_attn.{cs}_dense_layer.{{p}}") for hf, cs in CROSS.items()),
    same("cross_attn.q_norm.{p}", "multihead_attn.q_norm.{p}"),
    same("cross_attn.k_norm.{p}", "multihead_attn.k_norm.{p}"),
    same("cross_attn_attn_gate", "cross_attn_attn_gate"),
    same("cross_attn_mlp_gate", "cross_attn_mlp_gate"),
]
IMAGE_LAYER = [
    *(same(f"self_attn.{hf}.{{p}}", f"self_attn.{cs}_dense_layer.{{p}}") for hf, cs in CROSS.items()),
    same("input_layernorm.{p}", "norm1.{p}"),
    same("post_attention_layernorm.{p}", "norm2.{p}"),
    same("mlp.fc1.{p}", "ffn.ffn.0.linear_layer.{p}"),
    same("mlp.fc2.{p}", "ffn.ffn.1.linear_layer.{p}"),
]
GATES = [same("gate_attn", "gate_attn_weight"), same("gate_ffn", "gate_ffn_weight")]
POSITIONS = (
    *("gated_positional_embedding.gate", "gated_positional_embedding.embedding"),
    "gated_positional_embedding.tile_embedding.weight",
    *("pre_tile_positional_embedding.gate", "pre_tile_positional_embedding.embedding.weight"),
    *("post_tile_positional_embedding.gate", "post_tile_positional_embedding.embedding.weight"),
)
IMAGE = [
    same("patch_embedding.weight", "patch_embedding.weight", ConvToLinear("num_channels", "patch_size")),
    *(same(name, name) for name in ("class_embedding", *POSITIONS, "layernorm_pre.{p}", "layernorm_post.{p}")),
    *under("transformer.layers.{i}.", "transformer.layers.{i}.", IMAGE_LAYER),
    *under("global_transformer.layers.{i}.", "global_transformer.layers.{i}.", [*IMAGE_LAYER, *GATES]),
]
TEXT = llama_like.body("", llama_like.EMBEDDING, [*llama_like.LAYER, *CROSS_ATTENTION])


def named(new: str, old: str, cs: str, rules: list[Rule]) -> list[Rule]:
    """*rules* under *new*; the names of transformers before 4.52, under *old*, are read, too."""
    olds = [tuple(t.prefixed(old) for t in rule.hf) for rule in rules]
    return [replace(rule, hf_also=rule.hf_also + also) for rule, also in zip(under(new, cs, rules), olds, strict=True)]


TENSORS = Table(
    (
        *named("model.language_model.", "language_model.model.", "text_model.model.", TEXT),
        *named("", "language_model.", "text_model.model.", [same("lm_head.{p}", "lm_head.{p}")]),
        *named("model.multi_modal_projector.", "multi_modal_projector.", "projection.", [same("{p}", "{p}")]),
        *named("model.vision_model.", "vision_model.", "image_model.", IMAGE),
    )
)

SPECIAL_TOKENS = 8
"""Rows of the embedding beyond the vocabulary, for the image."""
TEXT_CONFIG = llama_like.llama_like(
    SideTable(
        require={"model_type": one_of("mllama_text_model", "llama")},
        write={"model_type": "llama"},
        ignored={"dropout": llama_like.NO_DROPOUT},
    ),
    defaults={
        **llama_like.HF_DEFAULTS,
        "vocab_size": 128256,
        "intermediate_size": 14336,
        "num_hidden_layers": 40,
        "num_key_value_heads": 8,
        "rms_norm_eps": 1e-05,
        "rope_theta": 500000.0,
        "max_position_embeddings": 131072,
        "cross_attention_layers": [3, 8, 13, 18, 23, 28, 33, 38],
    },
    renames={"cross_attention_layers": "cross_attention_layers"},
    head_dim=False,
    cs=SideTable(
        constants={"num_extra_input_vocab_tokens": SPECIAL_TOKENS},
        defaults={"num_extra_input_vocab_tokens": SPECIAL_TOKENS},
        write={"name": "llama"},
    ),
)


USUAL_TILES = 4
"""The default of transformers."""


def tiles(fields: Fields) -> Config:
    """``max_num_tiles``, where it is not the default: the largest product of an aspect ratio."""
    most = max(wide * high for wide, high in fields["supported_aspect_ratios"])
    return {} if most == USUAL_TILES else {"max_num_tiles": most}


def enough_tiles(fields: Fields) -> Config:
    """Refuse a number of tiles other than that of the aspect ratios: Cerebras has no field for it."""
    most = max(wide * high for wide, high in fields["supported_aspect_ratios"])
    if fields.get("max_num_tiles", most) != most:
        fields.refuse("max_num_tiles", f"supported_aspect_ratios have at most {most} tiles")
    return {}


COPIED = (
    *("hidden_size", "initializer_range", "intermediate_layers_indices", "num_channels", "num_global_layers"),
    *("num_hidden_layers", "supported_aspect_ratios", "vision_output_dim"),
)
MUP = ("mup_base_hidden_size", "mup_base_filter_size")
"""muP fields of the image model are refused: folding knows only those of the text model."""
IMAGE_CONSTANTS = {
    "use_projection_bias_in_attention": True,
    "use_ffn_bias_in_attention": False,
    "use_ffn_bias": True,
    "use_conv_patchified_embedding": False,
}
IMAGE_CONFIG = ConfigTable(
    renames={
        **dict(zip(COPIED, COPIED, strict=True)),
        "norm_eps": "layer_norm_epsilon",
        "attention_heads": "num_heads",
        "intermediate_size": "filter_size",
    },
    transforms=(
        *VIT_TRANSFORMS,
        FieldTransform((), ("supported_aspect_ratios",), nothing, tiles),
    ),
    hf=SideTable(
        require={"model_type": "mllama_vision_model"},
        aliases={"num_attention_heads": "attention_heads"},
        reads=("max_num_tiles",),
        normalize=(enough_tiles,),
        ignored={"tie_word_embeddings": "there is nothing to tie"},
        defaults={
            "hidden_size": 1280,
            "hidden_act": "gelu",
            "num_hidden_layers": 32,
            "num_global_layers": 8,
            "attention_heads": 16,
            "num_channels": 3,
            "intermediate_size": 5120,
            "vision_output_dim": 7680,
            "image_size": 448,
            "patch_size": 14,
            "norm_eps": 1e-05,
            "initializer_range": 0.02,
            "intermediate_layers_indices": [3, 7, 15, 23, 30],
            "supported_aspect_ratios": [[1, 1], [1, 2], [1, 3], [1, 4], [2, 1], [2, 2], [3, 1], [4, 1]],
        },
    ),
    cs=SideTable(constants=IMAGE_CONSTANTS, require=dict.fromkeys(MUP, None), write={"name": "MllamaVisionModel"}),
)


def padding(fields: Fields) -> Config:
    """The padding token, from the trainer's input section; 0 where there is none."""
    tokens = [fields[name] for name in OUTSIDE if fields.get(name) is not None]
    return {"pad_token_id": tokens[0] if tokens else 0}


def padding_to_hf(fields: Fields) -> Config:
    if not isinstance(fields["pad_token_id"], int):
        fields.refuse("pad_token_id", "the token's number is needed")
    return {"text_config/pad_token_id": fields["pad_token_id"]}


OUTSIDE = {
    "fit/pad_token_id": ("trainer", "fit", "train_dataloader", "pad_token_id"),
    "train_input/pad_token_id": ("train_input", "pad_token_id"),
}
CONFIG = replace(
    joined(
        component_config("vision_config", "image_model", IMAGE_CONFIG),
        component_config("text_config", "text_model", TEXT_CONFIG),
        ConfigTable(
            {},
            SideTable(
                constants={"model_type": "mllama"},
                ignored={
                    **dict.fromkeys(("image_token_index", "image_token_id"), "a token of the tokenizer"),
                    "tie_word_embeddings": "that of text_config counts",
                },
            ),
            SideTable(normalize=(padding,), reads=tuple(OUTSIDE)),
            (FieldTransform((), ("pad_token_id",), nothing, padding_to_hf),),
        ),
    ),
    outside_model=OUTSIDE,
)


def sizes(model: str, cs: Mapping[str, Any]) -> dict[str, int]:
    """llama's numbers of the text model; channels and side length of the image's patches."""
    image = within(cs, "image_model/")
    side = image.get("patch_size")
    patches = {
        "num_channels": image.get("num_channels"),
        "patch_size": side[0] if isinstance(side, list) and side else side,
    }
    why = "the image's patches have that size"
    return {**llama_like.sizes(model, within(cs, "text_model/")), **numbers(f"{model} image_model", patches, why)}


MLLAMA = Family(
    name="mllama",
    table=TENSORS,
    config=CONFIG,
    sizes=sizes,
    cs_name="mllama",
    hf_type="mllama",
    architecture="MllamaForConditionalGeneration",
    since=(2, 4),
    mup="fold",
    mup_rules=mup.under("text_model.model.", mup.DECODER, "text_model/"),
    cs_prefix=False,
    writes_name=False,
    sections=("image_model", "text_model"),
    hf_sections=("vision_config", "text_config"),
    notes="its Cerebras configs do not name it; muP is folded in the text model",
)
FAMILIES = (MLLAMA,)
