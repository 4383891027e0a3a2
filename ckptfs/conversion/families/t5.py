"""T5: Hugging Face T5ForConditionalGeneration <-> Cerebras T5ForConditionalGeneration, releases 2.1 and later.

UL2, Flan-UL2 and the Transformer of translation are the same model. All tensors are copied; only the keys differ:
Hugging Face numbers the sublayers of a block, so that the feed-forward part is number 1 in the encoder and 2 in the
decoder, and keeps the relative bias of all blocks in the first one.
"""

from __future__ import annotations

import math

from ckptfs.conversion.config import Config, ConfigTable, Fields, FieldTransform, SideTable
from ckptfs.conversion.families.decoder import no_numbers, nothing
from ckptfs.conversion.family import Family
from ckptfs.conversion.folding.mup import Fold, Generation, Rules, Steps, number, size, switch
from ckptfs.conversion.keys import Fields as KeyFields
from ckptfs.conversion.rules import Context, Rule, Table, copy, hf_only, same, under, with_cs_extra, with_hf_extra
from ckptfs.tensors.tensor import Tensor

PARTS = {"q": "q", "k": "k", "v": "v", "o": "output"}


def attention(hf: str, cs: str) -> list[Rule]:
    return [same(f"{hf}.{a}.{{p}}", f"{cs}.proj_{b}_dense_layer.{{p}}") for a, b in PARTS.items()]


def gated(context: Context, fields: KeyFields) -> int:
    """Gated layers have two matrices wi_0 and wi_1, others one: wi."""
    return int(str(context.hf.get("feed_forward_proj")).startswith("gated-"))


def no_cross(context: Context, fields: KeyFields) -> int:
    """A decoder's layer without cross attention has one sublayer less."""
    return int(f"decoder.layers.{fields['i']}.multihead_attn.proj_q_dense_layer.weight" not in context.keys)


def gated_no_cross(context: Context, fields: KeyFields) -> int:
    """wi, wi_1 of the usual layer, then those of one without cross attention."""
    return gated(context, fields) + 2 * no_cross(context, fields)


UP, GATE, DOWN = "ffn.ffn.0.linear_layer.{p}", "ffn.ffn.0.linear_layer_for_glu.{p}", "ffn.ffn.1.linear_layer.{p}"
LAYER = [
    *attention("layer.0.SelfAttention", "self_attn"),
    same("layer.0.layer_norm.{p}", "norm1.{p}"),
    same("layer.1.layer_norm.{p}", "norm2.{p}"),
]


def dense(name: str, sublayer: int) -> str:
    """A matrix of the feed-forward part, which is that sublayer of its block."""
    return f"layer.{sublayer}.DenseReluDense.{name}.{{p}}"


ENCODER_LAYER = [
    *LAYER,
    same(dense("wi", 1), UP, hf_also=[dense("wi_1", 1)], hf_choice=gated),
    same(dense("wi_0", 1), GATE),
    same(dense("wo", 1), DOWN),
]
DECODER_LAYER = [
    *LAYER,
    *attention("layer.1.EncDecAttention", "multihead_attn"),
    *hf_only("layer.1.EncDecAttention.relative_attention_bias.{p}"),  # old checkpoints; it was never used
    same("layer.2.layer_norm.{p}", "norm3.{p}"),
    same(
        *(dense("wi", 2), UP),
        hf_also=[dense("wi_1", 2), dense("wi", 1), dense("wi_1", 1)],
        hf_choice=gated_no_cross,
    ),
    same(dense("wi_0", 2), GATE, hf_also=[dense("wi_0", 1)], hf_choice=no_cross),
    same(dense("wo", 2), DOWN, hf_also=[dense("wo", 1)], hf_choice=no_cross),
]


def unscaled_head(context: Context, embedding: Tensor) -> Tensor | None:
    """The head of models that are tied but do not scale its inputs; a tied Cerebras model scales them."""
    return embedding if context.hf.get("scale_decoder_outputs") is False else None


BIAS = "layer.0.SelfAttention.relative_attention_bias.{p}"


def stack(side: str, layer: list[Rule]) -> list[Rule]:
    """The encoder or the decoder."""
    words = same(f"{side}.embed_tokens.weight", f"{side}_embeddings.word_embeddings.weight")
    old_bias = f"relative_position_{side}.relative_attention_bias.{{p}}"  # release 2.0
    return [
        with_hf_extra(words, {"shared.weight": copy}),
        *under(f"{side}.block.{{i}}.", f"{side}.layers.{{i}}.", layer),
        same(
            f"{side}.block.0.{BIAS}",
            f"{side}_embeddings.position_embed_helper.relative_attention_bias.{{p}}",
            cs_also=[old_bias],
        ),
        *hf_only(f"{side}.block.{{i+1}}.{BIAS}"),
        same(f"{side}.final_layer_norm.{{p}}", f"{side}.norm.{{p}}"),
    ]


ENCODER, DECODER = stack("encoder", ENCODER_LAYER), stack("decoder", DECODER_LAYER)
TENSORS = Table(
    (
        *ENCODER,
        with_cs_extra(DECODER[0], {"lm_head.weight": unscaled_head}, if_present="keep"),
        *DECODER[1:],
        same("lm_head.{p}", "lm_head.{p}"),
    )
)

GATED = {"gated-silu": "swiglu", "gated-relu": "reglu", "gated-gelu": "geglu"}
UNGATED = {cs: hf for hf, cs in GATED.items()}
NONLINEARITIES = ("encoder_nonlinearity", "decoder_nonlinearity")


def activation_to_cs(fields: Fields) -> Config:
    found = fields["feed_forward_proj"]
    if not isinstance(found, str) or (found.startswith("gated-") and found not in GATED):
        fields.refuse("feed_forward_proj", f"only {', '.join(GATED)} and activations without a gate can be converted")
    return dict.fromkeys(NONLINEARITIES, GATED.get(found, found))


def activation_to_hf(fields: Fields) -> Config:
    encoder, decoder = (fields.need(n, "encoder and decoder have one activation in T5") for n in NONLINEARITIES)
    if not isinstance(encoder, str) or decoder != encoder:
        fields.refuse("decoder_nonlinearity", f"it must be the encoder's, {encoder!r}")
    return {"feed_forward_proj": UNGATED.get(encoder, encoder)}


def scaling(fields: Fields) -> Config:
    """transformers 5 sets ``tie_word_embeddings`` for all T5 models, and has another field for scaled outputs."""
    scaled = fields.get("scale_decoder_outputs")
    if scaled not in (None, True, False):
        fields.refuse("scale_decoder_outputs", "only true and false can be converted")
    return {} if scaled is None else {"tie_word_embeddings": scaled}


def one_activation(fields: Fields) -> Config:
    """Refuse an activation other than that of ``feed_forward_proj``."""
    kind = str(fields["feed_forward_proj"])
    named = "gelu_new" if kind == "gated-gelu" else kind.rpartition("-")[2]
    for name, usual in (("dense_act_fn", named), ("is_gated_act", kind.startswith("gated-"))):
        if fields.get(name, usual) != usual:
            fields.refuse(name, f"feed_forward_proj {kind!r} means {usual!r}")
    return {}


def one_vocabulary(fields: Fields) -> Config:
    if fields["tgt_vocab_size"] not in (None, fields.get("src_vocab_size")):
        fields.refuse("tgt_vocab_size", "it must be null or src_vocab_size")
    return {}


def one_dropout(fields: Fields) -> Config:
    if fields["relu_dropout_rate"] not in (None, fields.get("dropout_rate")):
        fields.refuse("relu_dropout_rate", "it must be null or dropout_rate")
    return {}


SAME_NAMES = (
    *("d_model", "d_kv", "d_ff", "num_heads"),
    *("relative_attention_num_buckets", "dropout_rate", "layer_norm_epsilon"),
)
CS_REQUIRE = {
    "norm_type": "rmsnorm",
    "position_embedding_type": "relative",
    "use_projection_bias_in_attention": False,
    "use_dropout_outside_residual_path": True,
    "share_encoder_decoder_embedding": True,
    "use_pre_encoder_decoder_dropout": False,
    "use_pre_encoder_decoder_layer_norm": True,
    "use_ffn_bias": False,
    "use_transformer_initialization": False,
}
POSITIONS = "positions are relative: there is no table of them"
CONFIG = ConfigTable(
    renames={
        "vocab_size": "src_vocab_size",
        "num_layers": "encoder_num_hidden_layers",
        "num_decoder_layers": "decoder_num_hidden_layers",
        "tie_word_embeddings": "share_embedding_weights",
        **{name: name for name in SAME_NAMES},
    },
    transforms=(
        FieldTransform(("feed_forward_proj",), NONLINEARITIES, activation_to_cs, activation_to_hf),
        FieldTransform((), ("tgt_vocab_size",), nothing, one_vocabulary),
        FieldTransform((), ("relu_dropout_rate",), nothing, one_dropout),
    ),
    hf=SideTable(
        constants={"model_type": "t5"},
        require={"is_encoder_decoder": True, "relative_attention_max_distance": 128},
        defaults={
            "vocab_size": 32128,
            "d_model": 512,
            "d_kv": 64,
            "d_ff": 2048,
            "num_layers": 6,
            "num_heads": 8,
            "relative_attention_num_buckets": 32,
            "relative_attention_max_distance": 128,
            "dropout_rate": 0.1,
            "layer_norm_epsilon": 1e-6,
            "feed_forward_proj": "relu",
            "tie_word_embeddings": True,
        },
        normalize=(scaling, one_activation),
        aliases={
            "hidden_size": "d_model",
            "num_attention_heads": "num_heads",
            "num_hidden_layers": "num_layers",
            "head_dim": "d_kv",
        },
        reads=("scale_decoder_outputs", "dense_act_fn", "is_gated_act"),
        ignored={"n_positions": POSITIONS, "output_past": "a setting of text generation"},
    ),
    cs=SideTable(
        constants={"norm_type": "rmsnorm"},
        require={name: value for name, value in CS_REQUIRE.items() if name != "norm_type"},
        defaults={
            **CS_REQUIRE,
            "layer_norm_epsilon": 1e-5,
            "relative_attention_num_buckets": 32,
            "share_embedding_weights": True,
        },
        write={"src_max_position_embeddings": 512, "tgt_max_position_embeddings": 512},
        ignored=dict.fromkeys(("src_max_position_embeddings", "tgt_max_position_embeddings"), POSITIONS),
    ),
)


def width(fields: Fields) -> float:
    """How much wider the model is than the one that its parameters were tuned for."""
    base = number(fields, "mup_base_d_model", 0)
    return 1.0 if fields.get("mup_base_d_model") is None else size(fields, "d_model") / base


def narrowing(fields: Fields) -> float:
    """What the projections of attention are scaled by; heads of a fixed size need nothing."""
    return 1.0 if fields.get("mup_base_d_kv") is not None else width(fields) ** -0.5


def queries(fields: Fields) -> Steps:
    return (("multiply", narrowing(fields) / math.sqrt(size(fields, "d_kv"))),)


def keys(side: str, fields: Fields) -> Steps:
    alpha = number(fields, f"{side}_attention_logits_alpha", 1)
    by_d = math.sqrt(size(fields, "d_kv")) if switch(fields, f"scale_{side}_qk_dot_by_d", True) else 1
    return (("multiply", alpha * narrowing(fields) / by_d),)


def encoder_keys(fields: Fields) -> Steps:
    return keys("encoder", fields)


def decoder_keys(fields: Fields) -> Steps:
    return keys("decoder", fields)


def values(fields: Fields) -> Steps:
    return (("multiply", narrowing(fields)),)


def outputs(fields: Fields) -> Steps:
    return (("multiply", 1.0 if fields.get("mup_base_d_kv") is not None else width(fields) ** 0.5),)


def head(fields: Fields) -> Steps:
    if fields.get("mup_base_d_model") is None:
        return ()
    root = width(fields) if switch(fields, "scale_output_logits_by_d", False) else math.sqrt(width(fields))
    return (("multiply", number(fields, "output_logits_alpha", 1) / root),)


def embeddings(fields: Fields) -> Steps:
    return (("multiply", number(fields, "embeddings_alpha", 1) * math.sqrt(size(fields, "d_model"))),)


MUP_FIELDS = (
    *("mup_base_d_model", "mup_base_d_ff", "mup_base_d_kv"),
    *("encoder_attention_logits_alpha", "decoder_attention_logits_alpha", "embeddings_alpha", "output_logits_alpha"),
    *("scale_encoder_qk_dot_by_d", "scale_decoder_qk_dot_by_d", "scale_output_logits_by_d"),
)
MUP = Rules(
    new=Generation(
        MUP_FIELDS,
        (
            Fold(("*.proj_q_dense_layer.*",), queries),
            Fold(("encoder.*.proj_k_dense_layer.*",), encoder_keys),
            Fold(("decoder.*.proj_k_dense_layer.*",), decoder_keys),
            Fold(("*.proj_v_dense_layer.*",), values),
            Fold(("*.proj_output_dense_layer.*",), outputs),
            Fold(("lm_head.weight",), head),
            Fold(("*embeddings.word_embeddings.weight",), embeddings),
        ),
    )
)

NOTES = "relative positions up to a distance of 128, no biases"
T5 = Family(
    name="t5",
    table=TENSORS,
    config=CONFIG,
    sizes=no_numbers,
    cs_name="t5",
    hf_type="t5",
    architecture="T5ForConditionalGeneration",
    mup="fold",
    mup_since=(2, 3),
    mup_rules=MUP,
    notes=NOTES,
)
FAMILIES = (T5,)
