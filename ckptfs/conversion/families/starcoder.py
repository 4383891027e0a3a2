"""StarCoder: Hugging Face GPTBigCodeForCausalLM <-> Cerebras GPT2LMHeadModel, releases 2.1 and later.

GPT-2's names with ordinary linear layers. q, k, v are packed in one: one after the other with a single key/value
head, head by head otherwise.
"""

from __future__ import annotations

from dataclasses import replace

from ckptfs.conversion.config import Config, ConfigTable, Fields, FieldTransform, SideTable
from ckptfs.conversion.families import gpt2
from ckptfs.conversion.families.decoder import GENERATED_HEAD, final_norm, heads
from ckptfs.conversion.family import Family
from ckptfs.conversion.ops import Split, ungroup_heads
from ckptfs.conversion.rules import Context, Rule, Table, hf_only, only_when, same, split, under, with_cs_extra


def multi_query(context: Context) -> bool:
    """Whether all heads share one key/value head."""
    return context.cs.get("attention_module") == "multiquery_attention"


def multi_head(context: Context) -> bool:
    return not multi_query(context)


QKV = [f"self_attn.proj_{x}_dense_layer.{{p}}" for x in "qkv"]
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
HEADLESS = Table(tuple(body("", with_cs_extra(gpt2.EMBEDDING, GENERATED_HEAD, last=True))))


def query_to_cs(fields: Fields) -> Config:
    if fields["multi_query"]:
        return {"attention_module": "multiquery_attention", "extra_attention_params": {"num_kv_groups": 1}}
    return {"attention_module": "aiayn_attention"}


def query_to_hf(fields: Fields) -> Config:
    return {"multi_query": fields["attention_module"] == "multiquery_attention"}


BIASES = dict.fromkeys(("use_projection_bias_in_attention", "use_ffn_bias_in_attention", "use_ffn_bias"), True)
CONFIG = ConfigTable(
    names={**gpt2.CONFIG.names, "attention_softmax_in_fp32": "attention_softmax_fp32"},
    transforms=(gpt2.ATTENTION, FieldTransform(("multi_query",), ("attention_module",), query_to_cs, query_to_hf)),
    hf=SideTable(
        must={"model_type": "gpt_bigcode"},
        fill={
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
        add={
            "model_type": "gpt_bigcode",
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
        prepare=(gpt2.inner,),
    ),
    cs=SideTable(
        must={**gpt2.CONFIG.cs.must, "scale_qk_dot_by_layer_idx": False},
        fill={
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
        add={
            "position_embedding_type": "learned",
            **BIASES,
            "nonlinearity": "gelu",
            "use_bias_in_output": False,
            "loss_scaling": "num_tokens",
        },
    ),
)

STARCODER = Family("starcoder", TENSORS, CONFIG, heads, "starcoder", "gpt_bigcode", "GPTBigCodeForCausalLM", mup="fold")
STARCODER_HEADLESS = replace(
    STARCODER, name="starcoder-headless", table=HEADLESS, architecture="GPTBigCodeModel", mup="config"
)
