"""BTLM and Jais: GPT-2 with ALiBi, gated feed-forward and muP of their own, releases 2.1 and later.

Both Hugging Face models know muP, so it is never folded into the weights: it lives in the config.
"""

from __future__ import annotations

from dataclasses import replace

from ckptfs.conversion.config import Config, ConfigTable, Fields, FieldTransform, SideTable
from ckptfs.conversion.families import gpt2
from ckptfs.conversion.families.decoder import GPT_ALIASES, OLD_SLOPES, SLOPES, no_numbers, usual_heads, with_head
from ckptfs.conversion.family import Family
from ckptfs.conversion.ops import Transpose
from ckptfs.conversion.rules import Rule, Table, hf_only, same, under

LAYER = [
    *(replace(rule, hf_extra=()) for rule in gpt2.LAYER),
    same("mlp.c_fc2.{p}", "ffn.ffn.0.linear_layer_for_glu.{p}", Transpose()),
    *hf_only("attn.bias", "attn.masked_bias"),
]


def body(prefix: str, embedding: Rule) -> list[Rule]:
    """GPT-2's, with the slopes as a tensor on both sides."""
    slopes = under(prefix, "", [same("relative_pe.slopes", SLOPES, cs_also=[OLD_SLOPES])])
    return [*gpt2.body(prefix, embedding, LAYER), *slopes]


TENSORS = Table((*body("transformer.", gpt2.EMBEDDING), same("lm_head.{p}", "lm_head.{p}")))
HEADLESS = Table(tuple(body("", with_head(gpt2.EMBEDDING))))


def scale_to_cs(fields: Fields) -> Config:
    width = fields["mup_width_scale"]
    alpha = fields.get("mup_output_alpha")
    return {"decoder_kernel": width, **({} if alpha is None else {"output_logits_scale": alpha * width})}


def scale_to_hf(fields: Fields) -> Config:
    width = fields["decoder_kernel"]
    return {"mup_output_alpha": fields["output_logits_scale"] / width, "mup_width_scale": width}


def alibi_to_cs(fields: Fields) -> Config:
    scaling = fields["alibi_scaling"]
    if scaling is not None and ("train_seq_len" in scaling or "factor" not in scaling):
        fields.refuse("alibi_scaling", "only null or a fixed factor can be converted")
    return {"pos_scaling_factor": 1.0 if scaling is None else scaling["factor"]}


def alibi_to_hf(fields: Fields) -> Config:
    factor = fields["pos_scaling_factor"]
    return {"alibi_scaling": None if factor == 1.0 else {"type": "linear", "factor": factor}}


def auto_map(repository: str, classes: dict[str, str]) -> dict[str, str]:
    """Where transformers finds the model's own code."""
    return {auto: f"{repository}--{name}" for auto, name in classes.items()}


NAMES = {
    **gpt2.CONFIG.renames,
    "scale_attn_by_inverse_layer_idx": "scale_qk_dot_by_layer_idx",
    "mup_scale_qk_dot_by_d": "scale_qk_dot_by_d",
    "mup_embeddings_scale": "embeddings_scale",
    "position_embedding_type": "position_embedding_type",
}
BTLM_FEATURES = (
    *("position_embedding_type", "scale_qk_dot_by_layer_idx", "scale_qk_dot_by_d", "embeddings_scale"),
    "output_logits_scale",
)
"""What Cerebras' GPT-2 may be here, but not in Hugging Face's GPT-2."""
CS_REQUIRE = {name: value for name, value in gpt2.CONFIG.cs.require.items() if name not in BTLM_FEATURES}
MUP_BASE = "the size that muP's scales were tuned at: the scales themselves are converted"
CONFIG = ConfigTable(
    renames=NAMES,
    transforms=(
        gpt2.ATTENTION,
        FieldTransform(("mup_width_scale",), ("output_logits_scale",), scale_to_cs, scale_to_hf),
        FieldTransform(("alibi_scaling",), ("pos_scaling_factor",), alibi_to_cs, alibi_to_hf),
    ),
    hf=SideTable(
        constants={"model_type": "btlm"},
        require={"reorder_and_upcast_attn": False},
        defaults={"tie_word_embeddings": True, "mup_width_scale": 1.0, "alibi_scaling": None},
        write={
            "use_cache": True,
            "auto_map": auto_map(
                "cerebras/btlm-3b-8k-base",
                {
                    "AutoConfig": "configuration_btlm.BTLMConfig",
                    "AutoModel": "modeling_btlm.BTLMModel",
                    "AutoModelForCausalLM": "modeling_btlm.BTLMLMHeadModel",
                },
            ),
        },
        normalize=(gpt2.inner,),
        aliases=GPT_ALIASES,
        reads=("mup_output_alpha",),
        ignored=gpt2.IGNORED,
    ),
    cs=SideTable(
        constants={"use_bias_in_output": False},
        require=CS_REQUIRE,
        defaults={"share_embedding_weights": True, "decoder_kernel": 1.0, "pos_scaling_factor": 1.0},
        normalize=(gpt2.dropouts, usual_heads),
        reads=("decoder_kernel", "attention_inner_dim"),
        ignored={"mup_base_hidden_size": MUP_BASE, "mup_base_filter_size": MUP_BASE},
    ),
    outside_model={"decoder_kernel": ("optimizer", "adjust_learning_rate", "decoder_kernel")},
)
JAIS = "inceptionai/jais-30b-v3"
JAIS_CLASSES = {
    "AutoConfig": "configuration_jais.JAISConfig",
    "AutoModel": "modeling_jais.JAISModel",
    "AutoModelForCausalLM": "modeling_jais.JAISLMHeadModel",
    "AutoModelForQuestionAnswering": "modeling_jais.JAISForQuestionAnswering",
    "AutoModelForSequenceClassification": "modeling_jais.JAISForSequenceClassification",
    "AutoModelForTokenClassification": "modeling_jais.JAISForTokenClassification",
}


def old_output_scale(fields: Fields) -> Config:
    """The first Jais models have ``width_scale``: the whole scale of the output, without an alpha of its own."""
    scale = fields.get("width_scale")
    if scale is None:
        return {}
    if fields.get("mup_output_alpha", 1.0) != 1.0 or fields["mup_width_scale"] not in (1.0, scale):
        fields.refuse("width_scale", "mup_width_scale and mup_output_alpha say something else")
    return {"mup_width_scale": scale, "mup_output_alpha": 1.0}


JAIS_CONFIG = replace(
    CONFIG,
    hf=replace(
        CONFIG.hf,
        constants={"model_type": "jais"},
        normalize=(*CONFIG.hf.normalize, old_output_scale),
        aliases={
            **GPT_ALIASES,
            "embeddings_scale": "mup_embeddings_scale",
            "scale_qk_dot_by_d": "mup_scale_qk_dot_by_d",
        },
        reads=(*CONFIG.hf.reads, "width_scale"),
        write={
            "_name_or_path": JAIS,
            "architectures": ["JAISLMHeadModel"],
            "use_cache": True,
            "auto_map": auto_map(JAIS, JAIS_CLASSES),
        },
    ),
    # The converter keeps only the product of mup_output_alpha and mup_width_scale: the kernel's rate stays 1.
    outside_model={"decoder_kernel": ()},
)

NOTES = "transformers loads it with the model's own code only"
BTLM = Family(
    name="btlm",
    table=TENSORS,
    config=CONFIG,
    sizes=no_numbers,
    cs_name="btlm",
    hf_type="btlm",
    architecture="BTLMLMHeadModel",
    mup="own",
    notes=NOTES,
)
BTLM_HEADLESS = BTLM.derived(name="btlm-headless", mup="own", table=HEADLESS, architecture="BTLMModel")
JAIS_FAMILY = BTLM.derived(
    name="jais",
    mup="own",
    config=JAIS_CONFIG,
    cs_name="jais",
    hf_type="jais",
    architecture="JAISLMHeadModel",
    notes=f"{NOTES}; mup_width_scale is lost on the way to Cerebras",
)
FAMILIES = (BTLM, BTLM_HEADLESS, JAIS_FAMILY)
