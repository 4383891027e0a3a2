"""What decoder families share: the final norm's second copy, heads of headless models, rope scaling, head sizes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ckptfs.conversion.config import Config, Fields, FieldTransform, choice, one_of
from ckptfs.conversion.rules import AT_END, Context, Generate, Rule, Second, copy, same, with_cs_extra
from ckptfs.errors import MissingField
from ckptfs.tensors.generated import causal_mask, constant, filled, seeded_normal
from ckptfs.tensors.tensor import Tensor

SLOPES = "embedding_layer.position_embed_helper.slopes"
OLD_SLOPES = "relative_pe_helper.slopes"
"""Where ALiBi's slopes were before release 2.1."""
MAX_POSITIONS = 1 << 24
"""More than any model has. The size of a mask for so many positions still fits in a file size."""
HEAD_SEED = 0
"""Seed of the heads generated for headless checkpoints; see docs/semantics.md."""

QKV = [f"self_attn.proj_{part}_dense_layer.{{p}}" for part in "qkv"]
"""The Cerebras keys of q, k and v, which some Hugging Face models pack in one tensor."""

YARN = {
    "beta_fast": 32,
    "beta_slow": 1,
    "attention_factor": None,
    "mscale": None,
    "mscale_all_dim": None,
    "truncate": True,
}
"""The values of yarn's fields in Cerebras, whose config has none of them."""


def final_norm(hf: str) -> Rule:
    """The decoder's last norm. Cerebras keeps a second copy as ``ln_f``; the first one is read."""
    return with_cs_extra(same(f"{hf}.{{p}}", "transformer_decoder.norm.{p}"), {"ln_f.{p}": copy})


def tied(context: Context) -> bool:
    """Whether head and embedding are one tensor."""
    return bool(context.hf.get("tie_word_embeddings", True))


def generated_head(context: Context, embedding: Tensor) -> Tensor:
    """A head for a model without one: the embedding if tied, else N(0, 0.02) in float32."""
    if tied(context):
        return embedding
    return seeded_normal(embedding.shape, 0.02, HEAD_SEED)


def generated_head_bias(context: Context, embedding: Tensor) -> Tensor | None:
    """float32 zeros, where the Cerebras model has a bias in its head."""
    return filled("float32", embedding.shape[:1], 0.0) if context.cs.get("use_bias_in_output") else None


GENERATED_HEAD: Mapping[str, Generate] = {
    "lm_head.weight": Second(generated_head, tied),
    "lm_head.bias": generated_head_bias,
}
"""Old checkpoints have None for the embedding beside its tied head; the embedding is then read from the head."""


def with_head(embedding: Rule, **more: Generate) -> Rule:
    """The rule of a headless model's *embedding*: the Cerebras side also has a head, and *more*, at the end."""
    return with_cs_extra(embedding, {**GENERATED_HEAD, **more}, position=AT_END)


def causal_mask_of(field: str) -> Generate:
    """The causal mask that older models have as a buffer. Its size is that field of ``config.json``."""

    def make(context: Context, tensor: Tensor) -> Tensor:
        size = context.hf.get(field)
        if not isinstance(size, int) or not 0 < size <= MAX_POSITIONS:
            raise MissingField(context.model, field, f"the causal mask has that many rows, at most {MAX_POSITIONS}")
        return causal_mask(size)

    return make


def alibi_slopes(context: Context, tensor: Tensor) -> Tensor | None:
    """ALiBi's slopes, float32 (heads, 1), for models that have them.

    s = 2^(-8/n) and slope j = s * s^j in float64. For head counts n that are no power of two the converter fails;
    as its formula is meant there: the slopes of the next lower power p, then every second one of 2p.
    """
    if context.cs.get("position_embedding_type") != "alibi":
        return None
    n = context.sizes["heads"]
    p = 1 << (n.bit_length() - 1)
    slopes = [*_powers(p), *_powers(2 * p)[::2][: n - p]]
    return constant("float32", [[slope] for slope in slopes])


def _powers(n: int) -> list[float]:
    s = 2.0 ** (-8.0 / n)
    return [s * s**j for j in range(n)]


def nothing(fields: Fields) -> Config:
    """The side of a `FieldTransform` that writes no field."""
    return {}


def no_numbers(model: str, cs: Mapping[str, Any]) -> dict[str, int]:
    """Sizes of families whose ops need no numbers."""
    return {}


def heads(model: str, cs: Mapping[str, Any]) -> dict[str, int]:
    """Sizes of families whose ops only need the number of heads."""
    return numbers(model, {"heads": cs.get("num_heads")})


def numbers(
    model: str, found: Mapping[str, Any], why: str = "the rows of attention projections are ordered by it"
) -> dict[str, int]:
    """*found* as sizes; `MissingField` for a value that is not a positive number."""
    for name, value in found.items():
        if not isinstance(value, int) or value < 1:
            raise MissingField(model, name, why)
    return {name: int(value) for name, value in found.items()}


def gated(name: str = "hidden_act") -> FieldTransform:
    """Activations of gated feed-forward layers have names of their own in Cerebras configs."""
    return choice(name, "nonlinearity", {"silu": "swiglu", "relu": "reglu", "gelu": "geglu"})


def rope_scaling(types: tuple[str, ...], *, llama_like: bool) -> FieldTransform:
    """``rope_scaling`` <-> ``pos_scaling_factor``, ``_type``, ``_extra_args``; no scaling is factor 1.0.

    Llama-like models also read ``rope_type``, write it for llama3, and insist on ``pos_scaling_type``.
    """

    def to_cs(fields: Fields) -> Config:
        scaling = fields["rope_scaling"]
        if scaling is None:
            return {"pos_scaling_factor": 1.0}
        kind = (
            scaling.get("type", scaling.get("rope_type") if llama_like else None) if isinstance(scaling, dict) else None
        )
        if not isinstance(kind, str) or kind.lower() not in types or "factor" not in scaling:
            fields.refuse("rope_scaling", f"it must be null or have a factor and a type of {', '.join(types)}")
        rest = {k: v for k, v in scaling.items() if k not in (_type_name(kind.lower()), "factor")}
        if kind.lower() == "yarn":
            if "original_max_position_embeddings" not in rest:
                fields.refuse("rope_scaling", "yarn needs original_max_position_embeddings")
            if any(k in rest and rest[k] not in (None, usual) for k, usual in YARN.items()):
                fields.refuse("rope_scaling", f"of yarn's own fields, only the usual {YARN} can be converted")
            rest = {k: v for k, v in rest.items() if k == "original_max_position_embeddings"}
        extra = {"pos_scaling_extra_args": rest} if kind.lower() != "linear" else {}
        return {"pos_scaling_factor": scaling["factor"], "pos_scaling_type": kind.lower(), **extra}

    def to_hf(fields: Fields) -> Config:
        factor = fields.get("pos_scaling_factor", 1.0)
        if factor == 1.0:
            return {"rope_scaling": None}
        if llama_like:
            fields.need("pos_scaling_type", "pos_scaling_factor is not 1.0")
        kind = str(fields.get("pos_scaling_type", "linear")).lower()
        if kind not in types:
            fields.refuse("pos_scaling_type", f"only {', '.join(types)} can be converted")
        extra = fields.get("pos_scaling_extra_args") or {}
        return {"rope_scaling": {_type_name(kind): kind, "factor": factor, **extra}}

    return FieldTransform(
        ("rope_scaling",), ("pos_scaling_factor", "pos_scaling_type", "pos_scaling_extra_args"), to_cs, to_hf
    )


def _type_name(kind: str) -> str:
    """What the type is called in ``rope_scaling``. The other of the two names counts as a parameter, as any other."""
    return "rope_type" if kind == "llama3" else "type"


def rope_parameters(fields: Fields) -> Config:
    """The section ``rope_parameters`` of transformers 5 under the older names; ``rope_scaling`` wins, as there.

    Sets rope_scaling (None: no scaling), and rope_theta and partial_rotary_factor where the section has them. The
    type ``default`` is no scaling in the newer section; in the older one it stays, and is refused as by the converter.
    """
    name = "rope_scaling" if fields.get("rope_scaling") else "rope_parameters"
    found = fields.get(name)
    if not isinstance(found, Mapping):
        return {"rope_scaling": fields.get("rope_scaling")}
    if any(isinstance(value, Mapping) for value in found.values()):
        fields.refuse(name, "one set of parameters for all layers is needed")
    beside = {k: v for k, v in found.items() if k in ("rope_theta", "partial_rotary_factor")}
    scaling = {k: v for k, v in found.items() if k not in beside}
    kind = scaling.get("rope_type", scaling.get("type"))
    if name == "rope_parameters":
        scaling.pop("rope_type", None)
        scaling[_type_name(str(kind))] = kind
    none = (kind == "default" and name == "rope_parameters") or all(value is None for value in scaling.values())
    return {"rope_scaling": None if none else scaling, **beside}


ROPE_READS = ("rope_parameters", "partial_rotary_factor")
"""What `rope_parameters` and `whole_rotary` read beside the fields of a table."""


def whole_rotary(fields: Fields) -> Config:
    """Refuse models that rotate only a part of each head, where the Cerebras config has no field for it."""
    if fields.get("partial_rotary_factor") not in (None, 1):
        fields.refuse("partial_rotary_factor", "only 1.0 can be converted")
    return {}


def kv_heads(cs: Mapping[str, Any]) -> Any:
    """Key/value heads by a Cerebras config, unchecked: the groups of multi-query attention, else as many as heads."""
    if cs.get("attention_module", "aiayn_attention") != "multiquery_attention":
        return cs.get("num_heads")
    extra = cs.get("extra_attention_params")
    return extra.get("num_kv_groups") if isinstance(extra, Mapping) else None


GPT_ALIASES = {
    "hidden_size": "n_embd",
    "max_position_embeddings": "n_positions",
    "num_attention_heads": "n_head",
    "num_hidden_layers": "n_layer",
}
"""The ``attribute_map`` of GPT-2 and the models that took over its config."""

OFF = one_of(None, False, 0)
ONE = one_of(None, 1)
CS_FEATURES = {
    "attention_sliding_window_length": None,
    "sliding_window_every_other_decoder_layer": OFF,
    "attention_chunk_size": None,
    "attention_sink_tokens": OFF,
    "attention_vertical_column_spacing": None,
    "attention_vertical_column_width": None,
    "num_memory_tokens_per_chunk": OFF,
    "attn_memory_chunk_size": None,
    "attention_logit_softcapping": None,
    "final_logit_softcapping": None,
    "norm_first_sandwich": OFF,
    "scale_qk_dot_by_layer_idx": OFF,
    "position_embedding_offset": OFF,
    "constant_pos_embedding": None,
    "alibi_trainable_slopes": OFF,
    "moe": None,
    "moe_params": None,
    **dict.fromkeys(("embeddings_scale", "attention_logits_alpha", "output_logits_alpha", "output_logits_scale"), ONE),
    "scale_qk_dot_by_d": OFF,
}
"""Features of the Cerebras decoder that change its results, with the values that mean "not used".

muP's fields count only where no muP is folded, which takes them out of the config before."""


def features_off(*but: str) -> dict[str, Any]:
    """The checks of a model that can have none of `CS_FEATURES` *but* these."""
    return {name: value for name, value in CS_FEATURES.items() if name not in but}


def usual_heads(fields: Fields) -> Config:
    """Refuse heads of another size than hidden size / heads, where the Hugging Face model has no field for it."""
    hidden = fields.get("hidden_size")
    if fields.get("attention_inner_dim") not in (None, hidden):
        fields.refuse("attention_inner_dim", f"it must be hidden_size, {hidden}")
    return {}
