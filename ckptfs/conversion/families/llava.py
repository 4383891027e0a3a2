"""LLaVA and MMSimple-LLaVA: CLIP's image encoder and LlavaLlamaForCausalLM <-> Cerebras LlavaModel (releases 2.2 and
later) and MultimodalSimpleModel (2.3 and later).

Hugging Face keeps the projector of image features in the text model and counts its activations, too; Cerebras has it
apart. The two Cerebras models differ in where image encoder and projector stand.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import replace
from itertools import pairwise
from typing import Any

from ckptfs.conversion.components import component, component_config, joined, within
from ckptfs.conversion.config import Config, ConfigTable, Fields, FieldTransform, SideTable
from ckptfs.conversion.families import llama, llama_like
from ckptfs.conversion.families.vit import CLIP_BODY, CLIP_CONFIG
from ckptfs.conversion.family import AddMissing, Family
from ckptfs.conversion.rules import Context, Table, cs_only, hf_only, same, under
from ckptfs.tensors.generated import seeded_uniform
from ckptfs.tensors.tensor import Tensor

IMAGE = [
    *(
        replace(rule, hf_also=bare.hf)
        for rule, bare in zip(under("vision_model.", "", CLIP_BODY), CLIP_BODY, strict=True)
    ),
    *hf_only("text_model.{*}", "logit_scale", "visual_projection.{*}", "text_projection.{*}"),  # a whole CLIPModel
]
TEXT = [*llama.TENSORS.rules, *hf_only("model.vision_tower.{*}")]


def tensors(image: str, projector: str, section: str) -> Table:
    """The table for these Cerebras prefixes of image encoder and projector, and the encoder's config *section*."""
    return Table(
        (
            *component("image_model", image, section, IMAGE),
            *component("text_model", "text_model.", "text_model", TEXT),
            same("text_model/model.mm_projector.{2*i}.{p}", projector + "ffn.{i}.linear_layer.{p}"),
            *cs_only("projector_text_model.{*}"),
        )
    )


def vision_config(fields: Fields) -> Config:
    """The part of a whole CLIPModel's config that is the image encoder's."""
    found = fields.get("vision_config")
    if not isinstance(found, Mapping):
        return {}
    return {**CLIP_CONFIG.hf.defaults, "model_type": "clip_vision_model", **found}


def mlp(inputs: Any, units: Any, n: int) -> dict[str, Any]:
    """The Cerebras block of n linear layers with gelu in between."""
    return {
        "name": "FeedForwardNetwork",
        "input_unit": inputs,
        "layers_units": [units] * n,
        "layers_activation": ["gelu"] * (n - 1) + [None],
        "use_bias": True,
    }


def projector_to_cs(fields: Fields, block: str) -> Config:
    kind = re.fullmatch(r"mlp([1-9]\d?)x_gelu", str(fields["text_model/mm_projector_type"]))
    if kind is None:
        fields.refuse("text_model/mm_projector_type", "only mlp1x_gelu, mlp2x_gelu and so on can be converted")
    return {block: mlp(fields["text_model/mm_hidden_size"], fields["text_model/hidden_size"], int(kind[1]))}


def projector_to_hf(fields: Fields, block: str, image: str) -> Config:
    """Only what Hugging Face has a name for, between the sizes of the two models."""
    inputs, units = fields[f"{image}/hidden_size"], fields["text_model/hidden_size"]
    found, n = fields[block], len(fields[block]["layers_activation"])
    wanted = mlp(inputs, units, n)
    if {name: found.get(name, value) for name, value in wanted.items()} != wanted:
        fields.refuse(block, f"only {wanted} can be converted")
    return {"text_model/mm_projector_type": f"mlp{n}x_gelu", "text_model/mm_hidden_size": inputs}


def projector_fits(fields: Fields) -> Config:
    """The projector must be there, and take what the image encoder gives."""
    fields.need("text_model/mm_projector_type", "it says what leads from the image encoder to the text model")
    sizes = [f"{part}/hidden_size" for part in ("image_model", "text_model")]
    for name in sizes:
        if not isinstance(fields.need(name, "the projector has it, too"), int) or fields[name] < 1:
            fields.refuse(name, "it must be a positive number")
    if fields.need("text_model/mm_hidden_size", "it is the projector's input size") != fields[sizes[0]]:
        fields.refuse("text_model/mm_hidden_size", f"it must be the image encoder's, {fields[sizes[0]]}")
    return {}


def layer_to_cs(value: Any) -> Any:
    """Hugging Face counts the embeddings as layer 0, Cerebras does not; from the end both count alike."""
    return value - 1 if value > 0 else value


def layer_to_hf(value: Any) -> Any:
    return value + 1 if value >= 0 else value


def select_layer(name: str) -> FieldTransform:
    """Which layer's features are used; *name* is the field's place in the Cerebras config."""
    hf = "text_model/mm_vision_select_layer"

    def to_cs(fields: Fields) -> Config:
        if fields[hf] == 0:
            fields.refuse(hf, "the embeddings themselves (0) cannot be selected")
        return {name: layer_to_cs(fields[hf])}

    return FieldTransform((hf,), (name,), to_cs, lambda fields: {hf: layer_to_hf(fields[name])})


def freeze_to_cs(fields: Fields) -> Config:
    tuned_alone = fields["text_model/tune_mm_mlp_adapter"] is True
    return {"freeze": ["^image_model", *(["^text_model"] if tuned_alone else [])]}


def freeze_to_hf(fields: Fields) -> Config:
    """The converter looks for the bare name, which it does not write itself: its own configs come back as false."""
    return {"text_model/tune_mm_mlp_adapter": "text_model" in (fields["freeze"] or [])}


FREEZE = FieldTransform(("text_model/tune_mm_mlp_adapter",), ("freeze",), freeze_to_cs, freeze_to_hf)
IMAGE_CONFIG = replace(
    CLIP_CONFIG,
    hf=replace(
        CLIP_CONFIG.hf,
        write={**CLIP_CONFIG.hf.write, "architectures": ["CLIPVisionModel"]},
        normalize=(vision_config,),
        reads=("vision_config",),
        ignored={
            **CLIP_CONFIG.hf.ignored,
            **dict.fromkeys(("text_config", "vision_config_dict", "text_config_dict"), "the other part of CLIP"),
            "logit_scale_init_value": "a setting of training",
        },
    ),
    cs=replace(CLIP_CONFIG.cs, write={**CLIP_CONFIG.cs.write, "name": "ViTModel"}),
)
TUNING = ("tune_mm_vision_resampler", "freeze_mm_vision_resampler", "freeze_mm_mlp_adapter")
TEXT_IGNORED = {
    "model_type": "any kind of LLaVA is read",
    "mm_vision_tower": "the path of the image encoder",
    **dict.fromkeys((*TUNING, "unfreeze_mm_vision_tower", "mm_vision_tower_lr"), "a setting of training"),
    **dict.fromkeys(("mm_projector_lr", "use_mm_proj", "tokenizer_padding_side"), "a setting of training"),
    **dict.fromkeys(
        ("image_aspect_ratio", "tokenizer_model_max_length", "image_grid_pinpoints"), "a setting of inputs"
    ),
}
TOKENS = {"mm_use_im_start_end": False, "mm_use_im_patch_token": False}
TEXT_CONFIG = replace(
    llama.CONFIG,
    hf=replace(
        llama.CONFIG.hf,
        constants=TOKENS,
        reads=(*llama.CONFIG.hf.reads, "mm_hidden_size"),
        ignored={**llama.CONFIG.hf.ignored, **TEXT_IGNORED},
        write={
            "model_type": "llava",
            "architectures": ["LlavaLlamaForCausalLM"],
            "bos_token_id": 1,
            "eos_token_id": 2,
            "pad_token_id": 0,
            "image_aspect_ratio": "pad",
            "mm_vision_tower": "image_model",
            "use_cache": True,
            "freeze_mm_mlp_adapter": False,
            "freeze_mm_vision_resampler": False,
            "tune_mm_vision_resampler": False,
            "unfreeze_mm_vision_tower": False,
        },
    ),
    cs=replace(llama.CONFIG.cs, write={**llama.CONFIG.cs.write, "name": "LlamaModel"}),
)
TOP = {
    "loss_weight": 1.0,
    "loss_scaling": "num_tokens",
    "label_smoothing": 0.0,
    "z_loss_eps": 0.0,
    "freeze": ["^image_model"],
}


def config(image: str, block: str, mode: str, layer: str, **top: Any) -> ConfigTable:
    """The table for these places of the image encoder, the projector, and what is taken from which layer."""
    projector = FieldTransform(
        ("text_model/mm_projector_type",),
        (block,),
        lambda fields: projector_to_cs(fields, block),
        lambda fields: projector_to_hf(fields, block, image),
    )
    return joined(
        component_config("image_model", image, IMAGE_CONFIG),
        component_config("text_model", "text_model", TEXT_CONFIG),
        ConfigTable(
            renames={"text_model/mm_vision_select_feature": mode},
            transforms=(projector, select_layer(layer), FREEZE),
            hf=SideTable(normalize=(projector_fits,)),
            cs=SideTable(write={**TOP, **top, mode: "patch"}, ignored={"image_start_idx": "a setting of inputs"}),
        ),
    )


def sizes(model: str, cs: Mapping[str, Any]) -> dict[str, int]:
    """Those of the text model."""
    return llama_like.sizes(model, within(cs, "text_model/"))


def preprocessor(config: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """What CLIP's image processor needs to know, for images of the encoder's size."""
    size = config["image_model"].get("image_size")
    values = {
        "crop_size": {"height": size, "width": size},
        "do_center_crop": True,
        "do_normalize": True,
        "do_resize": True,
        "feature_extractor_type": "CLIPFeatureExtractor",
        "image_mean": [0.48145466, 0.4578275, 0.40821073],
        "image_std": [0.26862954, 0.26130258, 0.27577711],
        "resample": 3,
        "size": size,
    }
    return {"image_model/preprocessor_config.json": values} if size is not None else {}


def generated_projector(prefix: str, block: str) -> AddMissing:
    """Makes a projector for a model without one: uniform within ±sqrt(1 / inputs), in float32."""

    def make(context: Context, found: Mapping[str, Tensor]) -> dict[str, Tensor]:
        if any(key.startswith(prefix) for key in found):
            return {}
        sizes = [context.cs[block]["input_unit"], *context.cs[block]["layers_units"]]
        layers = [generated_linear(i, *size) for i, size in enumerate(pairwise(sizes))]
        return {f"{prefix}ffn.{i}.linear_layer.{p}": t for i, layer in enumerate(layers) for p, t in layer.items()}

    return make


def generated_linear(i: int, inputs: int, outputs: int) -> dict[str, Tensor]:
    bound = math.sqrt(1 / inputs)
    return {
        "weight": seeded_uniform((outputs, inputs), bound, 2 * i),
        "bias": seeded_uniform((outputs,), bound, 2 * i + 1),
    }


LLAVA = Family(
    name="llava",
    table=tensors("image_model.", "projector_image_model.", "image_model"),
    config=config(
        "image_model",
        "projector/image_model",
        "image_feature_select_mode",
        "image_feature_select_layer_idx",
        image_start_idx=1,
    ),
    sizes=sizes,
    cs_name="llava",
    hf_type="image_model/clip_vision_model",
    architecture="CLIPVisionModel, LlavaLlamaForCausalLM",
    mup="refuse",
    since=(2, 2),
    components=("image_model", "text_model"),
    sections=("image_model", "text_model", "projector"),
    files=preprocessor,
    paths=("text_model/mm_vision_tower",),
    add_missing=generated_projector("projector_image_model.", "projector/image_model"),
    notes="two folders, image_model and text_model; a projector is made where there is none",
)


def mmsimple(image: str, **fields: Any) -> Family:
    """MMSimple-LLaVA with the image encoder at this place in the config."""
    keys, block = "image_model.projection.", "image_model_list/global_image_projection"
    return LLAVA.derived(
        name="mmsimple-llava",
        mup="refuse",
        table=tensors("image_model.image_model_list.0.0.", keys, image),
        config=config(image, block, "image_model_list/image_feature_select_mode", f"{image}/image_layer_idx"),
        cs_name="multimodal_simple",
        since=(2, 3),
        sections=(image, "image_model_list", "text_model"),
        add_missing=generated_projector(keys, block),
        **fields,
    )


MMSIMPLE = mmsimple(
    "image_model_list/image_models/0/image_encoder",
    older=(mmsimple("image_model_list/image_models/0/image_model/0", until=(2, 3)),),
)
FAMILIES = (LLAVA, MMSIMPLE)
