"""muP folding by rules: which keys take which steps, and what is refused. Recorded conversions hold the numbers."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from ckptfs.conversion import registry
from ckptfs.conversion.folding import mup
from ckptfs.conversion.format_names import parse_format
from ckptfs.conversion.hf import between_hf, hf_config
from ckptfs.errors import ConfigError
from ckptfs.formats.source import Item, Source
from ckptfs.tensors.ranges import to_numpy
from tests.factories import ArrayTensor

MODEL = {"hidden_size": 24, "num_heads": 6, "mup_base_hidden_size": 6, "embeddings_scale": 3.0}
KEYS = (
    "transformer_decoder.layers.0.self_attn.proj_k_dense_layer.weight",
    "transformer_decoder.layers.0.self_attn.proj_q_dense_layer.weight",
    "lm_head.weight",
    "lm_head.bias",
    "embedding_layer.word_embeddings.weight",
    "embedding_layer.position_embeddings.embed.weight",
    "embedding_ln_f.bias",
    "bert_encoder.embedding_layer.word_embeddings.weight",
)


def folded(rules: mup.Rules, **config: Any) -> list[float]:
    """What a one in each of `KEYS` becomes."""
    model = {**MODEL, **config}
    how = mup.style("x", model)
    assert how is not None
    tensors = mup.fold_tensors("x", rules, model, how, {k: ArrayTensor(np.ones(1, np.float32)) for k in KEYS})
    return [float(to_numpy(tensors[key])[0]) for key in KEYS]


def test_decoders() -> None:
    assert folded(mup.DECODER) == [0.5, 1, 0.25, 1, 3, 3, 1, 1]
    assert folded(mup.DECODER, scale_qk_dot_by_d=False, attention_logits_alpha=5) == [5, 1, 0.25, 1, 3, 3, 1, 1]
    assert folded(mup.DECODER, scale_output_logits_by_d=False, output_logits_alpha=8) == [0.5, 1, 4, 1, 3, 3, 1, 1]
    assert folded(mup.DECODER, embedding_layer_norm=True) == [0.5, 1, 0.25, 1, 1, 1, 3, 1]


def test_only_a_base_for_the_feed_forward_size_leaves_the_head() -> None:
    assert folded(mup.DECODER, mup_base_hidden_size=None, mup_base_filter_size=3) == [0.5, 1, 1, 1, 3, 3, 1, 1]


def test_fields_of_releases_before_2_3() -> None:
    old = {"mup_base_hidden_size": None, "output_logits_scale": 7, "scale_qk_dot_by_d": True}
    assert folded(mup.DECODER, **old) == [0.5, 1, 7, 1, 3, 3, 1, 1]
    assert folded(mup.KEYS_ONLY, **old) == [0.5, 1, 1, 1, 1, 1, 1, 1]


def test_bert_scales_its_keys_only() -> None:
    assert folded(mup.KEYS_ONLY, attention_logits_alpha=4) == [2, 1, 1, 1, 1, 1, 1, 1]


def test_the_fields_vanish_and_a_tie_that_is_stated_is_dissolved() -> None:
    assert mup.fold_config("x", mup.DECODER, {**MODEL, "scale_qk_dot_by_d": None}, "new") == {
        "hidden_size": 24,
        "num_heads": 6,
    }
    assert mup.fold_config("x", mup.DECODER, {"share_embedding_weights": True}, "old") == {
        "share_embedding_weights": False
    }


@pytest.mark.parametrize(
    "config",
    [
        {"embeddings_scale": "1e-3"},
        {"attention_logits_alpha": [1]},
        {"mup_base_hidden_size": 0},
        {"mup_base_hidden_size": "12"},
        {"num_heads": 0},
        {"num_heads": None},
        {"hidden_size": "24"},
        {"mup_base_hidden_size": -6, "scale_output_logits_by_d": False},
    ],
)
def test_wrong_types_and_sizes_are_errors_of_the_config(config: dict[str, Any]) -> None:
    with pytest.raises(ConfigError) as refusal:
        folded(mup.DECODER, **config)
    assert "\n" not in str(refusal.value)


def test_numbers_as_field_names_are_passed_over() -> None:
    assert mup.style("x", {1: 2}) is None  # type: ignore[dict-item]


@pytest.mark.parametrize(("model", "release"), [("gptj", "cs-2.2"), ("gpt-neox", "cs-2.9"), ("codegen", "cs-2.3")])
def test_what_cannot_be_folded_is_refused_with_the_config(model: str, release: str) -> None:
    with pytest.raises(ConfigError, match="muP"):
        hf_config(registry.family(model), {"model": MODEL}, parse_format(release))


CONFIG_ONLY = [f"{name}-headless" for name in ("llama", "mistral", "bloom", "santacoder", "starcoder")]


@pytest.mark.parametrize("model", ["mixtral", *CONFIG_ONLY])
def test_models_whose_config_loses_mup_but_whose_checkpoint_is_refused(model: str) -> None:
    family, src = registry.family(model), parse_format("cs-2.9")
    assert family.mup == "config"
    source = Source("x.mdl", "cerebras-h5", "0.5", None, {k: Item(k, "tensor") for k in KEYS})
    with pytest.raises(ConfigError, match="muP"):
        between_hf(source, family, {"model": MODEL}, src, parse_format("hf"))
