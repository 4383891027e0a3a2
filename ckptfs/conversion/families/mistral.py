"""Mistral and Mixtral: Llama with a sliding window; Mixtral also with experts, which Cerebras stores fused."""

from __future__ import annotations

from ckptfs.conversion.config import Config, Fields, FieldTransform, SideTable
from ckptfs.conversion.families.llama import LLAMA
from ckptfs.conversion.families.llama_like import ATTENTION, HF_DEFAULTS, LAYER, NORMS, llama_like, sizes, tables
from ckptfs.conversion.family import Family
from ckptfs.conversion.ops import Stack
from ckptfs.conversion.rules import same, stack

FUSED = "ffn.experts.fused_ffns"
EXPERTS = "block_sparse_moe.experts.{e}"
MIXTURE = [
    same("block_sparse_moe.gate.weight", "ffn.gate.weight"),
    stack(f"{EXPERTS}.w1.weight", f"{FUSED}.0.linear_layer_for_glu.expert_weights", Stack(), over="e"),
    stack(f"{EXPERTS}.w3.weight", f"{FUSED}.0.linear_layer.expert_weights", Stack(), over="e"),
    stack(f"{EXPERTS}.w2.weight", f"{FUSED}.1.linear_layer.expert_weights", Stack(), over="e"),
]
TENSORS, HEADLESS = tables(LAYER)
MIXTRAL_TENSORS, MIXTRAL_HEADLESS_TENSORS = tables([*NORMS, *ATTENTION, *MIXTURE])

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


WINDOW = {"sliding_window": "attention_sliding_window_length"}
ALWAYS: Config = {"extra_attention_params": {}, "attention_sliding_window_length": None}
"""Key/value heads and the window are always written: a Mistral config without them means 8 and 4096."""
DEFAULTS: Config = {
    **HF_DEFAULTS,
    "intermediate_size": 14336,
    "num_key_value_heads": 8,
    "max_position_embeddings": 131072,
    "sliding_window": 4096,
}
"""What transformers takes; the converter takes Llama's, and writes neither key/value heads nor a window."""
CONFIG = llama_like(
    SideTable(constants={"model_type": "mistral"}, write={"architectures": ["MistralForCausalLM"]}),
    defaults=DEFAULTS,
    renames=WINDOW,
    cs=SideTable(defaults=ALWAYS),
)
MIXTRAL_CONFIG = llama_like(
    SideTable(
        constants={"model_type": "mixtral"},
        normalize=(has_experts,),
        aliases={"num_experts": "num_local_experts"},
        ignored=dict.fromkeys(("output_router_logits", "router_jitter_noise"), "a setting of training"),
    ),
    defaults={**DEFAULTS, "sliding_window": None, "rms_norm_eps": 1e-05, "rope_theta": 1000000.0},
    renames=WINDOW,
    transforms=(FieldTransform(tuple(MOE), ("moe",), moe_to_cs, moe_to_hf),),
    cs=SideTable(defaults=ALWAYS, normalize=(has_moe,)),
)

NOTES = "no biases; all rows of a head are rotary"
MISTRAL = LLAMA.derived(
    name="mistral",
    mup="fold",
    table=TENSORS,
    config=CONFIG,
    cs_name="mistral",
    hf_type="mistral",
    architecture="MistralForCausalLM",
    notes=NOTES,
)
MISTRAL_HEADLESS = MISTRAL.derived(name="mistral-headless", mup="config", table=HEADLESS, architecture="MistralModel")
MIXTRAL = Family(
    name="mixtral",
    table=MIXTRAL_TENSORS,
    config=MIXTRAL_CONFIG,
    sizes=sizes,
    cs_name="mixtral",
    hf_type="mixtral",
    architecture="MixtralForCausalLM",
    since=(2, 3),
    mup="config",
    notes=NOTES,
)
MIXTRAL_HEADLESS = MIXTRAL.derived(
    name="mixtral-headless", mup="config", table=MIXTRAL_HEADLESS_TENSORS, architecture="MixtralModel"
)
FAMILIES = (MISTRAL, MISTRAL_HEADLESS, MIXTRAL, MIXTRAL_HEADLESS)
