"""GPT-2: Hugging Face GPT2LMHeadModel / GPT2Model <-> Cerebras GPT2LMHeadModel, releases 2.1 and later.

Hugging Face's Conv1D keeps weights as (in, out) and packs q, k, v in one; Cerebras has linear layers, apart.
"""

from __future__ import annotations

from ckptfs.conversion.config import Config, ConfigTable, Fields, FieldTransform, SideTable
from ckptfs.conversion.families.decoder import (
    GPT_ALIASES,
    causal_mask_of,
    features_off,
    final_norm,
    no_numbers,
    usual_heads,
    with_head,
)
from ckptfs.conversion.family import Family
from ckptfs.conversion.ops import Split, Transpose
from ckptfs.conversion.rules import Context, Rule, Table, same, split, under, with_hf_extra
from ckptfs.tensors.generated import filled
from ckptfs.tensors.tensor import Tensor


def masked_bias(context: Context, bias: Tensor) -> Tensor:
    """The value of masked logits, a buffer too."""
    return filled("float32", (), -1e4)


QKV = [f"self_attn.proj_{part}_dense_layer" for part in "qkv"]
PACKED = (Transpose(), Split((1, 1, 1)))
MASKS = {"attn.bias": causal_mask_of("n_positions"), "attn.masked_bias": masked_bias}
LAYER = [
    same("ln_1.{p}", "norm1.{p}"),
    same("ln_2.{p}", "norm3.{p}"),
    split("attn.c_attn.weight", [f"{name}.weight" for name in QKV], *PACKED),
    with_hf_extra(split("attn.c_attn.bias", [f"{name}.bias" for name in QKV], *PACKED), MASKS),
    same("attn.c_proj.{p}", "self_attn.proj_output_dense_layer.{p}", Transpose()),
    same("mlp.c_fc.{p}", "ffn.ffn.0.linear_layer.{p}", Transpose()),
    same("mlp.c_proj.{p}", "ffn.ffn.1.linear_layer.{p}", Transpose()),
]
EMBEDDING = same("wte.weight", "embedding_layer.word_embeddings.weight")
POSITIONS = same(
    "wpe.weight",
    "embedding_layer.position_embeddings.embed.weight",
    cs_also=["embedding_layer.position_embeddings.weight"],  # releases before 2.1
)


def body(prefix: str, embedding: Rule, layer: list[Rule]) -> list[Rule]:
    """Everything but the head, with the Hugging Face *prefix*."""
    layers = under("h.{i}.", "transformer_decoder.layers.{i}.", layer)
    return under(prefix, "", [embedding, POSITIONS, *layers, final_norm("ln_f")])


TENSORS = Table((*body("transformer.", EMBEDDING, LAYER), same("lm_head.{p}", "lm_head.{p}")))
HEADLESS = Table(tuple(body("", with_head(EMBEDDING), LAYER)))


def inner(fields: Fields) -> Config:
    """The feed-forward size defaults to four times the hidden size."""
    if fields.get("n_inner") is not None:
        return {}
    return {"n_inner": 4 * fields.need("n_embd", "n_inner is not given")}


def dropouts(fields: Fields) -> Config:
    """The two special dropout rates default to the general one."""
    rates = [n for n in ("embedding_dropout_rate", "attention_dropout_rate") if fields.get(n) is None]
    return {n: fields.need("dropout_rate", f"{n} is not given") for n in rates}


def attention_to_cs(fields: Fields) -> Config:
    return {"attention_type": "scaled_dot_product" if fields["scale_attn_weights"] else "dot_product"}


def attention_to_hf(fields: Fields) -> Config:
    if fields["attention_type"] not in ("scaled_dot_product", "dot_product"):
        fields.refuse("attention_type", "only 'scaled_dot_product' and 'dot_product' can be converted")
    return {"scale_attn_weights": fields["attention_type"] == "scaled_dot_product"}


ATTENTION = FieldTransform(("scale_attn_weights",), ("attention_type",), attention_to_cs, attention_to_hf)
SAME_NAMES = ("vocab_size", "rotary_dim", "layer_norm_epsilon", "initializer_range")
SUMMARY = ("summary_type", "summary_use_proj", "summary_activation", "summary_proj_to_labels", "summary_first_dropout")
IGNORED = {
    **dict.fromkeys(SUMMARY, "a setting of the head for multiple choice"),
    "n_ctx": "an older copy of n_positions that the class does not read",
}
CONFIG = ConfigTable(
    renames={
        "embd_pdrop": "embedding_dropout_rate",
        "tie_word_embeddings": "share_embedding_weights",
        "n_embd": "hidden_size",
        "n_head": "num_heads",
        "n_layer": "num_hidden_layers",
        "n_positions": "max_position_embeddings",
        "n_inner": "filter_size",
        "activation_function": "nonlinearity",
        "attn_pdrop": "attention_dropout_rate",
        "resid_pdrop": "dropout_rate",
        **{name: name for name in SAME_NAMES},
    },
    transforms=(ATTENTION,),
    hf=SideTable(
        constants={"model_type": "gpt2"},
        require={"scale_attn_by_inverse_layer_idx": False, "reorder_and_upcast_attn": False},
        defaults={"tie_word_embeddings": True},
        normalize=(inner,),
        aliases=GPT_ALIASES,
        ignored=IGNORED,
    ),
    cs=SideTable(
        constants={"use_bias_in_output": False},
        require={
            "norm_type": "layernorm",
            "position_embedding_type": "learned",
            "use_position_embedding": True,
            "embedding_layer_norm": False,
            "use_projection_bias_in_attention": True,
            "use_ffn_bias_in_attention": True,
            "use_ffn_bias": True,
            "fixed_sparse_attention": None,
            "norm_first": True,
            "use_ff_layer1_dropout": False,
            **features_off(),
        },
        defaults={"share_embedding_weights": True},
        normalize=(dropouts, usual_heads),
        reads=("attention_inner_dim",),
    ),
)


NOTES = "grouped key/value heads have no place in the Hugging Face config"
GPT2 = Family(
    name="gpt2",
    table=TENSORS,
    config=CONFIG,
    sizes=no_numbers,
    cs_name="gpt2",
    hf_type="gpt2",
    architecture="GPT2LMHeadModel",
    mup="fold",
    notes=NOTES,
)
GPT2_HEADLESS = GPT2.derived(name="gpt2-headless", mup="fold", table=HEADLESS, architecture="GPT2Model")
FAMILIES = (GPT2, GPT2_HEADLESS)
