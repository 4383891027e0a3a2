"""GPT-2 with its config in nested sections: ``cs-2.4`` <-> ``cs-2.4-backbone``, and so in all releases since.

The model that Cerebras calls GPTBackbone. The checkpoint's keys are the same.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ckptfs.conversion.format_names import RELEASES, ModelFormat
from ckptfs.conversion.releases.draft import About, Draft, Section
from ckptfs.conversion.releases.steps import Step
from ckptfs.errors import UnsupportedValue

NAMES = ("gpt2", "gpt_backbone")
LAYERS = ("transformer_decoder", "layers")
ATTENTION = (*LAYERS, "self_attn")
WINDOW = "attention_sliding_window_length"
ALTERNATING = "sliding_window_every_other_decoder_layer"

MAX_LAYERS = 10_000
"""More than any model has; the nested config describes each."""

PLACES: Mapping[tuple[str, ...], str] = {
    (): """
        hidden_size use_bias_in_output initializer_range initializer output_layer_initializer ffn_initializer
        ffn_output_layer_initializer lr_adjustment_groups mup_base_hidden_size mup_base_filter_size embeddings_scale
        scale_qk_dot_by_d attention_logits_alpha scale_output_logits_by_d output_logits_alpha mup_verification
        output_logits_scale final_logit_softcapping moe_params dtype boundary_casting loss_scaling loss_weight
        label_smoothing z_loss_eps attention_softmax_fp32
    """,
    ("embedding_layer",): """
        vocab_size max_position_embeddings embd_pdrop position_embedding_type constant_pos_embedding
        position_embedding_offset share_embedding_weights embedding_layer_norm num_relative_attention_buckets rotary_dim
        rope_theta fold_rope_consts alibi_trainable_slopes pos_scaling_factor pos_scaling_type pos_scaling_extra_args
        rel_distance_mode rel_distance_extra_args embedding_initializer
    """,
    ATTENTION: f"""
        num_heads attention_type attention_module {WINDOW} scale_qk_dot_by_layer_idx attention_sink_tokens
        attention_vertical_column_spacing attention_vertical_column_width attention_chunk_size attention_qk_norm_layer
        attention_qk_norm_eps extra_attention_params extra_ffn_params attention_inner_dim
        use_projection_bias_in_attention use_ffn_bias_in_attention attention_dropout_rate attention_kernel
        attention_logit_softcapping fixed_sparse_attention num_memory_tokens_per_chunk attn_memory_chunk_size
    """,
    LAYERS: "filter_size nonlinearity use_ffn_bias norm_first norm_first_sandwich use_ff_layer1_dropout",
    LAYERS[:1]: "num_hidden_layers dropout_rate norm_type layer_norm_epsilon",
}
"""Section of the nested config to its fields. Others are dropped, as by the public converter."""
PLACE = {name: path for path, names in PLACES.items() for name in names.split()}


def changed_config(config: Mapping[str, Any], about: About) -> dict[str, Any]:
    """*config* with its ``model`` section nested, or flat again."""
    draft = Draft(about, dict(config))
    section = draft.model()
    into = about.variants[1] == "backbone"
    old, new = NAMES if into else NAMES[::-1]
    if section.get("name", old) != old:
        raise UnsupportedValue(about.family, "name", section["name"], f"only {old} can be converted")
    found = nested(about, section) if into else flat(about, section)
    section.clear()
    section.update({**found, "name": new})
    return draft.whole


def nested(about: About, section: Section) -> Section:
    """The known fields of a flat *section* in their places."""
    result: Section = {}
    for name in [name for name in section if name in PLACE]:
        where = result
        for part in PLACE[name]:
            where = where.setdefault(part, {})
        where[name] = section[name]
    if section.get(ALTERNATING):
        n = section.get("num_hidden_layers")
        if not isinstance(n, int) or not 0 < n <= MAX_LAYERS:
            why = f"{ALTERNATING} needs their number, at most {MAX_LAYERS}"
            raise UnsupportedValue(about.family, "num_hidden_layers", n, why)
        decoder = result[LAYERS[0]]
        decoder[LAYERS[1]] = [_with_window(decoder.get(LAYERS[1], {}), section.get(WINDOW), i) for i in range(n)]
    return result


def _with_window(layer: Section, window: Any, i: int) -> Section:
    """Layer *i* where every other one has a window: the odd ones."""
    return {**layer, ATTENTION[-1]: {**layer.get(ATTENTION[-1], {}), WINDOW: window if i % 2 else None}}


def flat(about: About, section: Section) -> Section:
    """The known fields of a nested *section*, wherever they stand."""
    result: Section = {}
    for name, value in section.items():
        if name in PLACE:
            result[name] = value
        elif name == LAYERS[1] and isinstance(value, list):
            result |= _one_layer(about, value, section.get("num_hidden_layers", len(value)))
        elif isinstance(value, Mapping):
            result |= flat(about, dict(value))
    return result


def _one_layer(about: About, layers: list[Any], n: Any) -> Section:
    """What *layers*, described one by one, have in common; every other one may have a window."""
    flats = [flat(about, dict(layer)) for layer in layers if isinstance(layer, Mapping)]
    windows = [found.get(WINDOW) for found in flats]
    alike = bool(flats) and all({**found, WINDOW: None} == {**flats[0], WINDOW: None} for found in flats)
    if alike and len(flats) == n == len(layers):
        if windows == windows[:1] * n:
            return flats[0]
        if windows == [windows[1] if i % 2 else None for i in range(n)]:
            return {**flats[0], WINDOW: windows[1], ALTERNATING: True}
    allowed = f"only {n} layers that are alike can be converted, or that differ in the {WINDOW} of every other one"
    raise UnsupportedValue(about.family, LAYERS[1], layers, allowed)


STEPS = tuple(Step(ModelFormat(r), ModelFormat(r, "backbone"), config=changed_config) for r in RELEASES if r >= (2, 4))
