"""StarCoder: Hugging Face GPTBigCodeForCausalLM <-> Cerebras GPT2LMHeadModel, releases 2.1 and later.

GPT-2's names with ordinary linear layers. q, k, v are packed in one: one after the other with a single key/value
head, head by head otherwise.
"""

from __future__ import annotations

from ckptfs.conversion.config import Config, ConfigTable, Fields, FieldTransform, SideTable
from ckptfs.conversion.families import gpt2
from ckptfs.conversion.families.decoder import GPT_ALIASES, QKV, final_norm, heads, usual_heads, with_head
from ckptfs.conversion.family import Family
from ckptfs.conversion.ops import Split, ungroup_heads
from ckptfs.conversion.rules import Context, Rule, Table, hf_only, only_when, same, split, under


def multi_query(context: Context) -> bool:
    """Whether all heads share one key/value head."""
    return context.cs.get("attention_module") == "multiquery_attention"


def multi_head(context: Context) -> bool:
    return not multi_query(context)


LAYER = [
    same("ln_1.{p}", "norm1.{p}"),
    same("ln_2.{p}", "norm3.{p}"),
    *only_when(multi_query, split("attn.c_attn.{p}", QKV, Split(("heads", 1, 1)))),
    *only_when(multi_head, split("attn.c_attn.{p}", QKV, ungroup_heads("heads", (1, 1, 1)), Split((1, 1, 1)))),
    same("attn.c_proj.{p}", "self_attn.proj_output_dense_layer.{p}"),
    same("mlp.c_fc.{p}", "ffn.ffn.0.linear_layer.{p}"),
    same("mlp.c_proj.{p}", "ffn.ffn.1.linear_layer.{p}"),
    *hf_only("attn.bias", "attn.masked_bias"),
]


def body(prefix: str, embedding: Rule) -> list[Rule]:
    """Everything but the head, with the Hugging Face *prefix*."""
    layers = under("h.{i}.", "transformer_decoder.layers.{i}.", LAYER)
    return under(prefix, "", [embedding, gpt2.POSITIONS, *layers, final_norm("ln_f")])


TENSORS = Table((*body("transformer.", gpt2.EMBEDDING), same("lm_head.{p}", "lm_head.{p}")))
HEADLESS = Table(tuple(body("", with_head(gpt2.EMBEDDING))))


def query_to_cs(fields: Fields) -> Config:
    if fields["multi_query"]:
        return {"attention_module": "multiquery_attention", "extra_attention_params": {"num_kv_groups": 1}}
    return {"attention_module": "aiayn_attention"}


def query_to_hf(fields: Fields) -> Config:
    return {"multi_query": fields["attention_module"] == "multiquery_attention"}


def one_group(fields: Fields) -> Config:
    """Hugging Face has one key/value head or as many as heads; the converter does not check it."""
    groups = (fields.get("extra_attention_params") or {}).get("num_kv_groups")
    if fields["attention_module"] == "multiquery_attention" and groups not in (None, 1):
        fields.refuse("extra_attention_params", "num_kv_groups must be 1")
    return {}


BIASES = dict.fromkeys(("use_projection_bias_in_attention", "use_ffn_bias_in_attention", "use_ffn_bias"), True)
CS_CONSTANTS = {"position_embedding_type": "learned", **BIASES, "use_bias_in_output": False}
INFERENCE = "a setting of the older class's own inference code"
IGNORED = {
    **gpt2.IGNORED,
    "scale_attention_softmax_in_fp32": "only the precision of attention depends on it",
    "reorder_and_upcast_attn": "only the precision of attention depends on it",
    "num_key_value_heads": "a copy of multi_query that the class does not read",
    **dict.fromkeys(("validate_runner_input", "pre_allocate_kv_cache", "inference_runner"), INFERENCE),
    **dict.fromkeys(("max_sequence_length", "max_batch_size"), INFERENCE),
}
CONFIG = ConfigTable(
    renames={**gpt2.CONFIG.renames, "attention_softmax_in_fp32": "attention_softmax_fp32"},
    transforms=(gpt2.ATTENTION, FieldTransform(("multi_query",), ("attention_module",), query_to_cs, query_to_hf)),
    hf=SideTable(
        constants={"model_type": "gpt_bigcode"},
        defaults={
            "tie_word_embeddings": True,
            "multi_query": True,
            "attn_pdrop": 0.0,
            "scale_attn_weights": True,
            "resid_pdrop": 0.0,
            "embd_pdrop": 0.0,
            "n_inner": 24576,
            "n_embd": 6144,
            "n_head": 48,
            "n_layer": 40,
            "vocab_size": 49152,
            "n_positions": 8192,
        },
        write={
            "architectures": ["GPTBigCodeForCausalLM"],
            "validate_runner_input": True,
            "use_cache": True,
            "transformers_version": "4.28.1",
            "summary_use_proj": True,
            "summary_type": "cls_index",
            "inference_runner": 0,
            "eos_token_id": 0,
            "bos_token_id": 0,
            "max_sequence_length": None,
            "max_batch_size": None,
        },
        normalize=(gpt2.inner,),
        aliases=GPT_ALIASES,
        ignored=IGNORED,
    ),
    cs=SideTable(
        constants=CS_CONSTANTS,
        require={
            **{name: value for name, value in gpt2.CONFIG.cs.require.items() if name not in CS_CONSTANTS},
            "scale_qk_dot_by_layer_idx": False,
        },
        defaults={
            "share_embedding_weights": True,
            "attention_dropout_rate": 0.0,
            "attention_module": "multiquery_attention",
            "attention_type": "scaled_dot_product",
            "scale_qk_dot_by_layer_idx": False,
            "dropout_rate": 0.0,
            "embedding_dropout_rate": 0.0,
            "filter_size": 24576,
            "hidden_size": 6144,
            "max_position_embeddings": 8192,
            "num_heads": 48,
            "num_hidden_layers": 40,
            "vocab_size": 49152,
        },
        write={"nonlinearity": "gelu", "loss_scaling": "num_tokens"},
        normalize=(usual_heads, one_group),
        reads=("extra_attention_params", "attention_inner_dim"),
    ),
)

STARCODER = Family(
    name="starcoder",
    table=TENSORS,
    config=CONFIG,
    sizes=heads,
    cs_name="starcoder",
    hf_type="gpt_bigcode",
    architecture="GPTBigCodeForCausalLM",
    mup="fold",
)
STARCODER_HEADLESS = STARCODER.derived(
    name="starcoder-headless", mup="config", table=HEADLESS, architecture="GPTBigCodeModel"
)
FAMILIES = (STARCODER, STARCODER_HEADLESS)
