"""ViT and CLIP's image encoder: Hugging Face ViTForImageClassification / ViTModel and CLIPVisionModelWithProjection
<-> Cerebras ViTClassificationModel, releases 2.1 and later.

Hugging Face keeps the class token's position first, Cerebras last. The two differ in names, in the norm behind the
embeddings (CLIP) and in what stands at the end: a classifier with bias, or a projection without.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ckptfs.conversion.config import Config, ConfigTable, Fields, FieldTransform, SideTable
from ckptfs.conversion.families.decoder import HEAD_SEED, no_numbers
from ckptfs.conversion.family import Family
from ckptfs.conversion.ops import Reshape, RollRows
from ckptfs.conversion.rules import AT_END, Context, Rule, Table, hf_only, only_when, same, under, with_cs_extra
from ckptfs.errors import MissingField
from ckptfs.tensors.generated import filled, seeded_normal
from ckptfs.tensors.tensor import Tensor

POSITIONS = "embedding_layer.position_embeddings.weight"
CLASS = "embedding_layer.cls_embedding"
HEAD = "classifier.classifier.ffn.0.linear_layer."


def learned(context: Context) -> bool:
    """Whether the positions are a table with a row for the class token, which alone can be reordered."""
    kind, token = context.cs.get("position_embedding_type", "learned"), context.cs.get("prepend_cls_token", True)
    return kind == "learned" and token is True


def encoder(hf: str, names: Mapping[str, str], norm: str) -> list[Rule]:
    """Layers and last norm of the encoder: *names* are a layer's Cerebras names by Hugging Face's."""
    layer = [same(f"{theirs}.{{p}}", f"{ours}.{{p}}") for theirs, ours in names.items()]
    return [
        *under(f"{hf}.{{i}}.", "encoder.transformer_encoder.layers.{i}.", layer),
        same(f"{norm}.{{p}}", "encoder.transformer_encoder.norm.{p}"),
    ]


VIT_LAYER = {
    "attention.attention.query": "self_attn.proj_q_dense_layer",
    "attention.attention.key": "self_attn.proj_k_dense_layer",
    "attention.attention.value": "self_attn.proj_v_dense_layer",
    "attention.output.dense": "self_attn.proj_output_dense_layer",
    "intermediate.dense": "ffn.ffn.0.linear_layer",
    "output.dense": "ffn.ffn.1.linear_layer",
    "layernorm_before": "norm1",
    "layernorm_after": "norm2",
}
CLIP_LAYER = {
    "self_attn.q_proj": "self_attn.proj_q_dense_layer",
    "self_attn.k_proj": "self_attn.proj_k_dense_layer",
    "self_attn.v_proj": "self_attn.proj_v_dense_layer",
    "self_attn.out_proj": "self_attn.proj_output_dense_layer",
    "mlp.fc1": "ffn.ffn.0.linear_layer",
    "mlp.fc2": "ffn.ffn.1.linear_layer",
    "layer_norm1": "norm1",
    "layer_norm2": "norm2",
}
CLASS_TOKEN = same("embeddings.cls_token", CLASS, Reshape(2))
VIT_BODY = [
    *only_when(learned, same("embeddings.position_embeddings", POSITIONS, Reshape(1), RollRows())),
    same("embeddings.patch_embeddings.projection.{p}", "embedding_layer.linear_proj.{p}"),
    *encoder("encoder.layer", VIT_LAYER, "layernorm"),
]
POOLER = same("pooler.dense.{p}", "encoder.pooler.pooler.ffn.0.linear_layer.{p}")
CLIP_BODY = [
    same("embeddings.class_embedding", CLASS),
    *only_when(learned, same("embeddings.position_embedding.weight", POSITIONS, RollRows())),
    same("embeddings.patch_embedding.{p}", "embedding_layer.linear_proj.{p}"),
    same("pre_layrnorm.{p}", "embedding_layer.post_embed_ln.{p}"),
    *encoder("encoder.layers", CLIP_LAYER, "post_layernorm"),
    *hf_only("embeddings.position_ids"),
]


def classes(context: Context) -> int:
    found = context.cs.get("num_classes")
    if not isinstance(found, int) or found < 1:
        raise MissingField(context.model, "num_classes", "the classifier that is made has that many rows")
    return found


def generated_head(context: Context, token: Tensor) -> Tensor:
    """A head for a model without one: N(0, 0.02) in float32."""
    return seeded_normal((classes(context), *token.shape), 0.02, HEAD_SEED)


def generated_head_bias(context: Context, token: Tensor) -> Tensor | None:
    """float32 zeros, where the Cerebras model has a bias in its head."""
    return filled("float32", (classes(context),), 0.0) if context.cs.get("use_bias_in_output") else None


GENERATED_HEAD = {f"{HEAD}weight": generated_head, f"{HEAD}bias": generated_head_bias}
(VIT_TOKEN,) = under("", "vit_model.", [CLASS_TOKEN])
TENSORS = Table((*under("vit.", "vit_model.", [CLASS_TOKEN, *VIT_BODY, POOLER]), same("classifier.{p}", HEAD + "{p}")))
HEADLESS = Table(
    (
        with_cs_extra(VIT_TOKEN, GENERATED_HEAD, position=AT_END),
        *under("", "vit_model.", VIT_BODY),
        *hf_only("pooler.dense.{p}"),
    )
)
CLIP_TENSORS = Table((*under("vision_model.", "vit_model.", CLIP_BODY), same("visual_projection.{p}", HEAD + "{p}")))


def pair(value: Any) -> list[Any]:
    """A side length as [height, width]."""
    return list(value) if isinstance(value, list | tuple) else [value, value]


def square(name: str) -> FieldTransform:
    """A side length in Hugging Face configs, [height, width] in Cerebras configs."""

    def to_hf(fields: Fields) -> Config:
        sides = fields[name]
        if not isinstance(sides, list | tuple) or len(sides) != 2 or sides[0] != sides[1]:
            fields.refuse(name, "only [n, n], a square, can be converted")
        return {name: sides[0]}

    return FieldTransform((name,), (name,), lambda fields: {name: pair(fields[name])}, to_hf)


def stride_to_cs(fields: Fields) -> Config:
    patch = fields.get("patch_size", 16)  # what transformers takes where none is said
    if pair(fields["encoder_stride"]) != pair(patch):
        fields.refuse("encoder_stride", f"it must be the patch size ({patch})")
    return {}


def stride_to_hf(fields: Fields) -> Config:
    return {"encoder_stride": pair(fields["patch_size"])[0]}


def pooler_size(fields: Fields) -> Config:
    """Refuse a pooler of another size than the model's, which Cerebras has no field for."""
    if fields.get("pooler_output_size") not in (None, fields.get("hidden_size", 768)):
        fields.refuse("pooler_output_size", "it must be hidden_size")
    return {}


def renamed(hf: str, cs: str, pairs: Mapping[str, str]) -> FieldTransform:
    """A field whose values are copied, but for *pairs* (Hugging Face's to Cerebras')."""
    back = {b: a for a, b in pairs.items()}
    return FieldTransform(
        (hf,),
        (cs,),
        lambda fields: {cs: pairs.get(fields[hf], fields[hf])},
        lambda fields: {hf: back.get(fields[cs], fields[cs])},
    )


SHARED_NAMES = ("hidden_size", "num_hidden_layers", "num_channels", "initializer_range")
NAMES = {
    "layer_norm_eps": "layer_norm_epsilon",
    "num_attention_heads": "num_heads",
    "intermediate_size": "filter_size",
    **{name: name for name in SHARED_NAMES},
}
TRANSFORMS = (
    renamed("hidden_act", "nonlinearity", {"silu": "swiglu", "gelu_pytorch_tanh": "gelu_new"}),
    square("image_size"),
    square("patch_size"),
)
BIASES = {
    "use_projection_bias_in_attention": True,
    "use_ffn_bias_in_attention": True,
    "use_ffn_bias": True,
}
CONVOLUTION = {"use_conv_patchified_embedding": True}
CS_REQUIRE = {"attention_type": "scaled_dot_product", **BIASES}
CS_WRITE = {
    "prepend_cls_token": True,
    "use_encoder_pooler_layer": False,
    "position_embedding_type": "learned",
    "num_classes": 2,
    "use_bias_in_output": True,
}
CS_IGNORED = {
    "use_encoder_pooler_layer": "the tensors tell",
    **dict.fromkeys(("prepend_cls_token", "position_embedding_type"), "read when positions are converted"),
    "use_bias_in_output": "the tensors tell",
}
NOT_TIED = {"tie_word_embeddings": "there is nothing to tie"}
CONFIG = ConfigTable(
    renames={
        **NAMES,
        "hidden_dropout_prob": "dropout_rate",
        "attention_probs_dropout_prob": "attention_dropout_rate",
        "num_labels": "num_classes",
    },
    transforms=(*TRANSFORMS, FieldTransform(("encoder_stride",), ("patch_size",), stride_to_cs, stride_to_hf)),
    hf=SideTable(
        constants={"model_type": "vit"},
        require={"qkv_bias": True, "pooler_act": "tanh"},
        defaults={"encoder_stride": 16},
        write={"num_labels": 2},
        normalize=(pooler_size,),
        reads=("pooler_output_size",),
        ignored=NOT_TIED,
    ),
    cs=SideTable(
        constants=CONVOLUTION,
        require={**CS_REQUIRE, "use_post_embed_layer_norm": False, "norm_first": True},
        write=CS_WRITE,
        ignored=CS_IGNORED,
    ),
)
CLIP_CONSTANTS = {
    "norm_first": True,
    **CONVOLUTION,
    **CS_REQUIRE,
    "use_post_embed_layer_norm": True,
    "use_embed_proj_bias": False,
    "use_bias_in_output": False,
    "position_embedding_type": "learned",
}
CLIP_CONFIG = ConfigTable(
    renames={**NAMES, "attention_dropout": "attention_dropout_rate", "projection_dim": "num_classes"},
    transforms=TRANSFORMS,
    hf=SideTable(
        constants={"model_type": "clip_vision_model"},
        defaults={
            "attention_dropout": 0.0,
            "hidden_act": "quick_gelu",
            "layer_norm_eps": 1e-05,
            "patch_size": 32,
            "projection_dim": 512,
        },
        write={"projection_dim": 512},
        ignored={**NOT_TIED, "dropout": "a setting of training"},
    ),
    cs=SideTable(
        constants=CLIP_CONSTANTS,
        write={
            **{name: value for name, value in CS_WRITE.items() if name not in CLIP_CONSTANTS},
            "num_classes": 512,
            "dropout_rate": 0.0,
        },
        ignored={**CS_IGNORED, "dropout_rate": "a setting of training: CLIP has no such dropout"},
    ),
)

VIT = Family(
    name="vit",
    table=TENSORS,
    config=CONFIG,
    sizes=no_numbers,
    cs_name="vision_transformer",
    hf_type="vit",
    architecture="ViTForImageClassification",
    mup="refuse",
    cs_prefix=False,
    notes="encoder_stride must be the patch size",
)
VIT_HEADLESS = VIT.derived(
    name="vit-headless",
    mup="refuse",
    table=HEADLESS,
    architecture="ViTModel",
    notes="the pooler is dropped; to Cerebras, a classifier is made",
)
CLIP_VIT = VIT.derived(
    name="clip-vit",
    mup="refuse",
    table=CLIP_TENSORS,
    config=CLIP_CONFIG,
    hf_type="clip_vision_model",
    architecture="CLIPVisionModelWithProjection",
    cs_discriminator={"use_post_embed_layer_norm": True},
    notes="",
)
FAMILIES = (VIT, VIT_HEADLESS, CLIP_VIT)
