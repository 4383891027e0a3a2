"""SantaCoder: Hugging Face GPT2LMHeadCustomModel, a multi-query GPT-2 <-> Cerebras GPT2LMHeadModel, releases 2.1 on."""

from __future__ import annotations

from ckptfs.conversion.config import ConfigTable, SideTable
from ckptfs.conversion.families import gpt2
from ckptfs.conversion.families.decoder import GPT_ALIASES, no_numbers, usual_heads, with_head
from ckptfs.conversion.family import Family
from ckptfs.conversion.ops import Split, Transpose
from ckptfs.conversion.rules import Table, same, split, with_hf_extra

KV = [f"self_attn.proj_{x}_dense_layer" for x in "kv"]
PACKED = (Transpose(), Split((1, 1)))
LAYER = [
    *(rule for rule in gpt2.LAYER if len(rule.cs) == 1),
    same("attn.q_attn.{p}", "self_attn.proj_q_dense_layer.{p}", Transpose()),
    split("attn.kv_attn.weight", [f"{x}.weight" for x in KV], *PACKED),
    with_hf_extra(split("attn.kv_attn.bias", [f"{x}.bias" for x in KV], *PACKED), gpt2.MASKS),
]
TENSORS = Table((*gpt2.body("transformer.", gpt2.EMBEDDING, LAYER), same("lm_head.{p}", "lm_head.{p}")))
HEADLESS = Table(tuple(gpt2.body("", with_head(gpt2.EMBEDDING), LAYER)))

ATTENTION = {"attention_module": "multiquery_attention", "extra_attention_params": {"num_kv_groups": 1}}
BIASES = dict.fromkeys(("use_projection_bias_in_attention", "use_ffn_bias_in_attention", "use_ffn_bias"), True)
CS_CONSTANTS = {"use_bias_in_output": False, "position_embedding_type": "learned", **ATTENTION, **BIASES}
CS_REQUIRE = {
    name: value
    for name, value in gpt2.CONFIG.cs.require.items()
    if name not in CS_CONSTANTS and name != "scale_qk_dot_by_layer_idx"
}
CONFIG = ConfigTable(
    renames={**gpt2.CONFIG.renames, "scale_attn_by_inverse_layer_idx": "scale_qk_dot_by_layer_idx"},
    transforms=gpt2.CONFIG.transforms,
    hf=SideTable(
        constants={"model_type": "gpt2"},
        require={"reorder_and_upcast_attn": False, "attention_head_type": "multiquery"},
        defaults={"tie_word_embeddings": True},
        write={
            "architectures": ["GPT2LMHeadCustomModel"],
            "attention_head_type": "multiquery",
            "scale_attn_by_inverse_layer_idx": False,
            "scale_attn_weight": True,
            "auto_map": {
                "AutoConfig": "configuration_gpt2_mq.GPT2CustomConfig",
                "AutoModelForCausalLM": "modeling_gpt2_mq.GPT2LMHeadCustomModel",
            },
            "reorder_and_upcast_attn": False,
            "summary_activation": None,
            "summary_first_dropout": 0.1,
            "summary_proj_to_labels": True,
            "summary_type": "cls_index",
            "summary_use_proj": True,
            "torch_dtype": "float32",
            "transformers_version": "4.24.0",
            "use_cache": True,
        },
        normalize=(gpt2.inner,),
        aliases=GPT_ALIASES,
        ignored={**gpt2.IGNORED, "scale_attn_weight": "a slip of the converter for scale_attn_weights"},
    ),
    cs=SideTable(
        constants=CS_CONSTANTS,
        require=CS_REQUIRE,
        defaults={"share_embedding_weights": True},
        write={
            "softmax_dtype_fp32": False,
            "scale_by_layer_index": False,
            "loss_scaling": "num_tokens",
        },
        normalize=(gpt2.dropouts, usual_heads),
        reads=("attention_inner_dim",),
        ignored={"scale_by_layer_index": "a copy of scale_qk_dot_by_layer_idx that the model does not read"},
    ),
)

SANTACODER = Family(
    name="santacoder",
    table=TENSORS,
    config=CONFIG,
    sizes=no_numbers,
    cs_name="santacoder",
    hf_type="gpt2",
    architecture="GPT2LMHeadCustomModel",
    mup="fold",
    notes="transformers loads it with the model's own code only",
)
SANTACODER_HEADLESS = SANTACODER.derived(
    name="santacoder-headless", mup="config", table=HEADLESS, architecture="GPT2CustomModel"
)
FAMILIES = (SANTACODER, SANTACODER_HEADLESS)
