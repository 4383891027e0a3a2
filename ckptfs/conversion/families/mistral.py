"""Mistral and Mixtral: Llama with a sliding window; Mixtral also with experts, which Cerebras stores fused."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from ckptfs.conversion.config import Config, ConfigTable, Fields, FieldTransform
from ckptfs.conversion.families import llama
from ckptfs.conversion.families.decoder import GENERATED_HEAD
from ckptfs.conversion.family import Family
from ckptfs.conversion.ops import Stack
from ckptfs.conversion.rules import Table, same, stack, with_cs_extra

FUSED = "ffn.experts.fused_ffns"
EXPERTS = "block_sparse_moe.experts.{e}"
MIXTRAL_LAYER = [
    *(rule for rule in llama.LAYER if not rule.hf[0].text.startswith("mlp.")),
    same("block_sparse_moe.gate.weight", "ffn.gate.weight"),
    stack(f"{EXPERTS}.w1.weight", f"{FUSED}.0.linear_layer_for_glu.expert_weights", Stack(), over="e"),
    stack(f"{EXPERTS}.w3.weight", f"{FUSED}.0.linear_layer.expert_weights", Stack(), over="e"),
    stack(f"{EXPERTS}.w2.weight", f"{FUSED}.1.linear_layer.expert_weights", Stack(), over="e"),
]
MIXTRAL_TENSORS = Table((*llama.body("model.", llama.EMBEDDING, MIXTRAL_LAYER), same("lm_head.{p}", "lm_head.{p}")))
MIXTRAL_HEADLESS_TENSORS = Table(
    tuple(llama.body("", with_cs_extra(llama.EMBEDDING, GENERATED_HEAD, last=True), MIXTRAL_LAYER))
)

MOE = {
    "num_local_experts": "num_experts",
    "num_experts_per_tok": "top_k",
    "router_aux_loss_coef": "load_balancing_loss_coef",
}


def has_experts(fields: Fields) -> Config:
    """Refuse a config without experts: neither side has defaults for them."""
    moe_to_cs(fields)
    return {}


def has_moe(fields: Fields) -> Config:
    fields.need("moe", "a model with experts needs it")
    return {}


def moe_to_cs(fields: Fields) -> Config:
    return {"moe": {cs: fields.need(hf, "a model with experts needs it") for hf, cs in MOE.items()}}


def moe_to_hf(fields: Fields) -> Config:
    moe = Fields(fields.model, fields["moe"])
    return {hf: moe.need(cs, "it belongs into the section moe") for hf, cs in MOE.items()}


def config_of(model_type: str, *transforms: FieldTransform, **add: Any) -> ConfigTable:
    """Llama's table for another *model_type*, with a sliding window.

    Key/value heads and the window are always written: a Mistral config without them means 8 and 4096.
    """
    base = llama.CONFIG
    return replace(
        base,
        names={**base.names, "sliding_window": "attention_sliding_window_length"},
        transforms=(*base.transforms, *transforms),
        cs=replace(
            base.cs, fill={**base.cs.fill, "extra_attention_params": {}, "attention_sliding_window_length": None}
        ),
        hf=replace(base.hf, must={"model_type": model_type}, add={"model_type": model_type, **add}),
    )


CONFIG = config_of("mistral", architectures=["MistralForCausalLM"])
_MIXTRAL = config_of("mixtral", FieldTransform(tuple(MOE), ("moe",), moe_to_cs, moe_to_hf))
MIXTRAL_CONFIG = replace(
    _MIXTRAL,
    hf=replace(_MIXTRAL.hf, prepare=(*_MIXTRAL.hf.prepare, has_experts)),
    cs=replace(_MIXTRAL.cs, prepare=(*_MIXTRAL.cs.prepare, has_moe)),
)

MISTRAL = replace(
    llama.LLAMA, name="mistral", config=CONFIG, cs_name="mistral", hf_type="mistral", architecture="MistralForCausalLM"
)
MISTRAL_HEADLESS = replace(
    MISTRAL, name="mistral-headless", table=llama.HEADLESS, architecture="MistralModel", mup="config"
)
MIXTRAL = Family(
    "mixtral",
    MIXTRAL_TENSORS,
    MIXTRAL_CONFIG,
    llama.dims,
    "mixtral",
    "mixtral",
    "MixtralForCausalLM",
    (2, 3),
    mup="config",
    notes=llama.NOTES,
)
MIXTRAL_HEADLESS = replace(
    MIXTRAL, name="mixtral-headless", table=MIXTRAL_HEADLESS_TENSORS, architecture="MixtralModel"
)
