"""T5 beyond the recorded conversions: numbered sublayers, the shared embedding, refusals, muP's factors."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest

from ckptfs.conversion import registry
from ckptfs.conversion.apply import convert_tensors
from ckptfs.conversion.families.t5 import MUP, TENSORS
from ckptfs.conversion.folding import mup
from ckptfs.conversion.format_names import HF, parse_format
from ckptfs.conversion.hf import cs_config, hf_config
from ckptfs.conversion.rules import Context, Side
from ckptfs.errors import ConfigError
from ckptfs.tensors.ranges import to_numpy
from ckptfs.tensors.tensor import Tensor
from tests.factories import ArrayTensor

T5 = registry.family("t5")
CS = {"d_model": 8, "encoder_nonlinearity": "relu", "decoder_nonlinearity": "relu"}
SELF = "layer.0.SelfAttention"


def convert(to: Side, *keys: str, **hf: Any) -> dict[str, int]:
    """The keys that *keys* become, each with the number of the one it came from."""
    state: dict[str, Tensor] = {key: ArrayTensor(np.array([i])) for i, key in enumerate(keys)}
    found = convert_tensors(TENSORS, state, to, Context("t5", {}, hf, {}))[0]
    return {key: int(to_numpy(tensor)[0]) for key, tensor in found.items()}


def to_hf(**fields: Any) -> dict[str, Any]:
    return hf_config(T5, {"model": {**CS, **fields}}, parse_format("cs-2.9"))[0]


def to_cs(model: str = "t5", **fields: Any) -> dict[str, Any]:
    found: dict[str, Any] = cs_config(registry.family(model), fields, parse_format("cs-2.9"))["model"]
    return found


def test_a_decoder_layer_without_cross_attention_has_one_sublayer_less() -> None:
    cross = "decoder.layers.1.multihead_attn.proj_q_dense_layer.weight"
    ffn = [f"decoder.layers.{i}.ffn.ffn.{n}.linear_layer.weight" for i in (0, 1) for n in (0, 1)]
    found = convert("hf", *ffn, cross, "decoder.layers.1.norm3.weight")
    assert list(found) == [
        *("decoder.block.0.layer.1.DenseReluDense.wi.weight", "decoder.block.0.layer.1.DenseReluDense.wo.weight"),
        *("decoder.block.1.layer.2.DenseReluDense.wi.weight", "decoder.block.1.layer.2.DenseReluDense.wo.weight"),
        *("decoder.block.1.layer.1.EncDecAttention.q.weight", "decoder.block.1.layer.2.layer_norm.weight"),
    ]
    assert list(convert("cs", *found)) == [*ffn, cross, "decoder.layers.1.norm3.weight"]


def test_gated_layers_without_cross_attention() -> None:
    ffn = [f"decoder.layers.3.ffn.ffn.0.linear_layer{glu}.bias" for glu in ("", "_for_glu")]
    found = convert("hf", *ffn, feed_forward_proj="gated-silu")
    assert list(found) == [f"decoder.block.3.layer.1.DenseReluDense.{name}.bias" for name in ("wi_1", "wi_0")]
    assert list(convert("cs", *found, feed_forward_proj="gated-silu")) == ffn


@pytest.mark.parametrize(("side", "layer"), [("encoder", 1), ("decoder", 2)])
def test_gates_are_told_by_the_config(side: str, layer: int) -> None:
    keys = [f"{side}.layers.0.ffn.ffn.0.linear_layer{glu}.weight" for glu in ("", "_for_glu")]
    cross = [f"{side}.layers.0.multihead_attn.proj_q_dense_layer.weight"] if side == "decoder" else []
    ffn = f"{side}.block.0.layer.{layer}.DenseReluDense."
    found = convert("hf", *keys, *cross, feed_forward_proj="gated-gelu")
    assert list(found)[:2] == [f"{ffn}wi_1.weight", f"{ffn}wi_0.weight"]
    assert next(iter(convert("hf", keys[0], *cross, feed_forward_proj="gelu"))) == f"{ffn}wi.weight"
    assert list(convert("cs", *found))[:2] == keys


@pytest.mark.parametrize("side", ["encoder", "decoder"])
def test_the_relative_bias_is_that_of_the_first_block(side: str) -> None:
    keys = [f"{side}.block.{i}.{SELF}.relative_attention_bias.weight" for i in (1, 0, 10)]
    new = f"{side}_embeddings.position_embed_helper.relative_attention_bias.weight"
    assert convert("cs", *keys) == {new: 1}
    old = f"relative_position_{side}.relative_attention_bias.weight"  # release 2.0
    assert list(convert("hf", new)) == list(convert("hf", old)) == [keys[1]]


def test_the_bias_of_cross_attention_is_dropped() -> None:
    keys = [f"decoder.block.{i}.layer.1.EncDecAttention.relative_attention_bias.weight" for i in (0, 1)]
    assert convert("cs", *keys) == {}


def test_the_shared_embedding_is_the_decoders() -> None:
    words = ["encoder_embeddings.word_embeddings.weight", "decoder_embeddings.word_embeddings.weight"]
    names = ["encoder.embed_tokens.weight", "decoder.embed_tokens.weight"]
    assert convert("hf", *words) == {names[0]: 0, "shared.weight": 1, names[1]: 1}
    assert convert("hf", words[0]) == {names[0]: 0, "shared.weight": 0}
    assert convert("cs", "shared.weight", *names) == {words[0]: 1, words[1]: 2}


def test_files_with_the_shared_embedding_only() -> None:
    """What safetensors keeps of three names of one tensor."""
    words = ["encoder_embeddings.word_embeddings.weight", "decoder_embeddings.word_embeddings.weight"]
    assert convert("cs", "shared.weight") == {words[0]: 0, words[1]: 0}
    assert convert("cs", "lm_head.weight", "shared.weight") == {"lm_head.weight": 0, words[0]: 1, words[1]: 1}


def test_a_tie_without_scaling_has_a_head_of_its_own() -> None:
    """Transformers 5 always ties, and scales or not; Cerebras scales what is tied."""
    found = convert("cs", "shared.weight", scale_decoder_outputs=False)
    assert list(found)[2:] == ["lm_head.weight"]
    assert convert("cs", "lm_head.weight", "shared.weight", scale_decoder_outputs=False)["lm_head.weight"] == 0
    assert "lm_head.weight" not in convert("cs", "shared.weight", scale_decoder_outputs=True)
    config = to_cs(tie_word_embeddings=True, scale_decoder_outputs=False)
    assert config["share_embedding_weights"] is False
    assert to_cs(scale_decoder_outputs=True)["share_embedding_weights"] is True


def test_layers_of_the_decoder_are_not_made_up() -> None:
    assert "decoder_num_hidden_layers" not in to_cs(num_layers=3)
    assert "num_decoder_layers" not in to_hf(encoder_num_hidden_layers=3)


def test_names_in_cerebras_configs() -> None:
    assert [to_cs(model)["name"] for model in ("t5", "transformer", "ul2", "flan-ul2")] == [
        *("t5", "transformer", "t5", "t5")
    ]
    found = registry.by_cs_name("transformer")
    assert found is not None
    assert found.name == "transformer"
    assert [f.name for f in registry.by_hf_type("t5")] == ["t5"]


@pytest.mark.parametrize("gate", ["silu", "relu", "gelu"])
def test_gated_activations_go_both_ways(gate: str) -> None:
    cs = to_cs(feed_forward_proj=f"gated-{gate}")
    assert cs["encoder_nonlinearity"] == cs["decoder_nonlinearity"] != gate
    assert to_hf(**cs | {"name": None})["feed_forward_proj"] == f"gated-{gate}"


@pytest.mark.parametrize(
    "fields",
    [
        {"feed_forward_proj": "gated-tanh"},
        {"feed_forward_proj": None},
        {"feed_forward_proj": ["relu"]},
        {"is_encoder_decoder": False},
        {"relative_attention_max_distance": 64},
        {"norm_type": "rmsnorm"},
        {"scale_decoder_outputs": "no"},
    ],
)
def test_refused_hugging_face_configs(fields: dict[str, Any]) -> None:
    with pytest.raises(ConfigError) as refusal:
        to_cs(**fields)
    assert str(refusal.value).count(next(iter(fields))) == 1


@pytest.mark.parametrize(
    "fields",
    [
        {"position_embedding_type": "learned"},
        {"use_projection_bias_in_attention": True},
        {"use_dropout_outside_residual_path": False},
        {"decoder_nonlinearity": "gelu"},
        {"decoder_nonlinearity": None},
        {"tgt_vocab_size": 3},
        {"relu_dropout_rate": 0.25, "dropout_rate": 0.5},
        {"model_type": "t5"},
        {"output_logits_scale": 2.0},
    ],
)
def test_refused_cerebras_configs(fields: dict[str, Any]) -> None:
    with pytest.raises(ConfigError) as refusal:
        to_hf(**fields)
    assert next(iter(fields)) in str(refusal.value)
    assert "\n" not in str(refusal.value)


def test_second_fields_that_say_the_same() -> None:
    found = to_hf(src_vocab_size=9, tgt_vocab_size=9, dropout_rate=0.5, relu_dropout_rate=0.5)
    assert (found["vocab_size"], found["dropout_rate"]) == (9, 0.5)
    assert to_hf(tgt_vocab_size=None, relu_dropout_rate=None)["tie_word_embeddings"] is True


def test_one_activation_without_the_other_is_refused() -> None:
    """The converter reads both; which one a missing one is, the config does not say."""
    with pytest.raises(ConfigError, match="decoder_nonlinearity"):
        hf_config(T5, {"model": {"encoder_nonlinearity": "relu"}}, parse_format("cs-2.9"))


# -------------------------------------------------------------------------------------------------------------- muP

PROJECTION = "{}.layers.0.{}.proj_{}_dense_layer.weight"
SCALED = {
    "q": PROJECTION.format("encoder", "self_attn", "q"),
    "encoder k": PROJECTION.format("encoder", "self_attn", "k"),
    "decoder k": PROJECTION.format("decoder", "multihead_attn", "k"),
    "v": PROJECTION.format("decoder", "self_attn", "v"),
    "o": PROJECTION.format("decoder", "multihead_attn", "output"),
    "head": "lm_head.weight",
    "head bias": "lm_head.bias",
    "words": "decoder_embeddings.word_embeddings.weight",
    "ffn": "decoder.layers.0.ffn.ffn.0.linear_layer.weight",
    "bias": "encoder_embeddings.position_embed_helper.relative_attention_bias.weight",
}
UNCHANGED = {"head bias": 1.0, "ffn": 1.0, "bias": 1.0}


def factors(**fields: Any) -> dict[str, float]:
    """What a one becomes, for a model four times as wide as its base, with heads of 9."""
    model = {"d_model": 16, "d_kv": 9, "mup_base_d_model": 4, **fields}
    ones: dict[str, Tensor] = {key: ArrayTensor(np.ones(1)) for key in SCALED.values()}
    found = mup.fold_tensors("t5", MUP, model, "new", ones)
    return {name: float(to_numpy(found[key])[0]) for name, key in SCALED.items()}


def test_mup_factors() -> None:
    sixth = 1 / 2 / 3
    assert factors() == {
        "q": sixth,
        "encoder k": sixth,
        "decoder k": sixth,
        "v": 0.5,
        "o": 2.0,
        "head": 0.5,
        "words": 4.0,
        **UNCHANGED,
    }


def test_mup_alphas_and_switches() -> None:
    found = factors(
        encoder_attention_logits_alpha=6,
        decoder_attention_logits_alpha=10,
        scale_decoder_qk_dot_by_d=False,
        scale_encoder_qk_dot_by_d=None,
        scale_output_logits_by_d=True,
        output_logits_alpha=3,
        embeddings_alpha=5,
    )
    assert found == {
        "q": 1 / 2 / 3,
        "encoder k": 1.0,
        "decoder k": 5.0,
        "v": 0.5,
        "o": 2.0,
        "head": 0.75,
        "words": 20.0,
        **UNCHANGED,
    }


def test_mup_with_a_base_for_the_heads() -> None:
    found = factors(mup_base_d_kv=3)
    assert (found["q"], found["v"], found["o"], found["head"]) == (1 / 3, 1.0, 1.0, 0.5)


def test_mup_with_a_base_for_the_feed_forward_size_only() -> None:
    found = factors(mup_base_d_model=None, mup_base_d_ff=7, output_logits_alpha=3)
    assert (found["q"], found["v"], found["o"], found["head"], found["words"]) == (1 / 3, 1.0, 1.0, 1.0, 4.0)


def test_mup_leaves_no_field_and_no_tie() -> None:
    fields = dict.fromkeys(MUP.new.fields, 2)
    found = to_hf(**fields, d_kv=4, share_embedding_weights=True)
    assert not {name for name in found if "mup" in name or "alpha" in name or name.startswith("scale_")}
    assert found["tie_word_embeddings"] is False


def test_mup_is_refused_before_release_2_3() -> None:
    config = {"model": {**CS, "mup_base_d_model": 4}}
    assert hf_config(T5, config, parse_format("cs-2.3"))[0]["d_model"] == 8
    with pytest.raises(ConfigError, match="muP"):
        hf_config(T5, config, parse_format("cs-2.2"))


@pytest.mark.parametrize(
    "fields",
    [
        {"mup_base_d_model": 0},
        {"mup_base_d_model": -4},
        {"mup_base_d_model": "4"},
        {"d_kv": 0},
        {"d_kv": None},
        {"d_model": math.nan},
        {"embeddings_alpha": "x"},
    ],
)
def test_mup_of_wrong_types_and_sizes(fields: dict[str, Any]) -> None:
    with pytest.raises(ConfigError):
        factors(**fields)


def test_hf_is_no_release() -> None:
    assert not T5.covers(HF)
