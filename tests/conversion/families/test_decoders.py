"""GPT-2, GPT-J, CodeGen, GPT-NeoX and Llama where no recorded conversion goes; expected values are written by hand."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from ckptfs.conversion import registry
from ckptfs.conversion.conversion import Conversion
from ckptfs.conversion.format_names import parse_format
from ckptfs.conversion.hf import between_hf
from ckptfs.conversion.resolve import convert_config
from ckptfs.errors import ConfigError, MappingError, ShapeError
from ckptfs.formats.source import Item, Source
from ckptfs.tensors.ranges import to_numpy
from tests.factories import ArrayTensor

Arrays = Mapping[str, npt.NDArray[Any] | None]

GPT2_HF = {"model_type": "gpt2", "n_embd": 4, "n_head": 2, "n_layer": 1, "n_positions": 3, "vocab_size": 5}
GPT2_CS = {"hidden_size": 4, "num_heads": 2, "num_hidden_layers": 1, "max_position_embeddings": 3, "dropout_rate": 0.0}
GPTJ_HF = {"model_type": "gptj", "n_embd": 8, "n_head": 2, "n_layer": 1, "rotary": True, "rotary_dim": 4}
GPTJ_CS = {
    "hidden_size": 8,
    "num_heads": 2,
    "num_hidden_layers": 1,
    "use_ffn_bias": True,
    "use_projection_bias_in_attention": False,
    "use_ffn_bias_in_attention": False,
}
CODEGEN_HF = {"model_type": "codegen", "n_embd": 8, "n_head": 4, "n_layer": 1, "rotary_dim": 2}
NEOX_HF = {"model_type": "gpt_neox", "hidden_size": 8, "num_attention_heads": 2, "num_hidden_layers": 1}
LLAMA_HF = {"model_type": "llama", "hidden_size": 8, "num_attention_heads": 2, "num_hidden_layers": 1}
ATTENTION = "transformer_decoder.layers.0.self_attn.proj_{}_dense_layer.{}"


def numbers(*shape: int, start: int = 0) -> npt.NDArray[np.float32]:
    """Consecutive numbers."""
    return np.arange(start, start + np.prod(shape, dtype=int), dtype=np.float32).reshape(shape)


def view(
    model: str, config: Mapping[str, Any], src: str, tgt: str, arrays: Arrays, *, drop: bool = False
) -> Conversion:
    items = {k: Item(k, "none") if a is None else Item(k, "tensor", ArrayTensor(a)) for k, a in arrays.items()}
    source = Source("x", "safetensors", None, None, items, None)
    whole = config if src == "hf" else {"model": config}
    return between_hf(source, registry.family(model), whole, parse_format(src), parse_format(tgt), drop_unmatched=drop)


def to_cs(model: str, config: Mapping[str, Any], tgt: str = "cs-2.9", **changes: Any) -> dict[str, Any]:
    found: dict[str, Any] = convert_config({**config, **changes}, "hf", tgt, model=model)[0]["model"]
    return found


def to_hf(model: str, config: Mapping[str, Any], **changes: Any) -> dict[str, Any]:
    return convert_config({"model": {**config, **changes}}, "cs-2.9", "hf", model=model)[0]


# ----------------------------------------------------------------------------------------------------------- GPT-2


def test_a_config_without_dropouts_gives_one_without_dropouts() -> None:
    """What the way back would need is not needed on the way there."""
    found = view("gpt2", GPT2_HF, "hf", "cs-2.9", {"transformer.wte.weight": numbers(5, 4)})
    assert list(found.tensors) == ["embedding_layer.word_embeddings.weight"]
    assert not any("dropout" in name for name in found.config["model"])


def test_packed_projections_in_any_order_and_with_fewer_key_rows() -> None:
    """Grouped keys and values are put below the queries as they are; masks come with the biases."""
    rows = {"q": 4, "k": 2, "v": 2}
    weights = {x: numbers(rows[x], 4, start=100 * i) for i, x in enumerate("kqv")}
    biases = {x: numbers(rows[x], start=100 * i) for i, x in enumerate("kqv")}
    arrays = {ATTENTION.format(x, p): part[x] for p, part in (("bias", biases), ("weight", weights)) for x in "kqv"}
    found = view("gpt2", GPT2_CS, "cs-2.9", "hf", arrays).tensors
    layer = "transformer.h.0.attn."
    assert list(found) == [layer + n for n in ("c_attn.bias", "bias", "masked_bias", "c_attn.weight")]
    packed = np.concatenate([weights["q"], weights["k"], weights["v"]]).T
    np.testing.assert_array_equal(to_numpy(found[f"{layer}c_attn.weight"]), packed)
    np.testing.assert_array_equal(
        to_numpy(found[f"{layer}bias"])[0, 0], np.array([[1, 0, 0], [1, 1, 0], [1, 1, 1]], np.uint8)
    )


def test_positions_of_old_releases_and_a_bias_of_the_head() -> None:
    arrays = {
        "embedding_layer.position_embeddings.weight": numbers(3, 4),
        "lm_head.bias": numbers(5),
        "ln_f.weight": numbers(4),
        "transformer_decoder.norm.weight": numbers(4, start=7),
    }
    found = view("gpt2", GPT2_CS, "cs-2.1", "hf", {f"model.{k}": a for k, a in arrays.items()}).tensors
    assert list(found) == ["transformer.wpe.weight", "lm_head.bias", "transformer.ln_f.weight"]
    np.testing.assert_array_equal(to_numpy(found["transformer.ln_f.weight"]), numbers(4, start=7))


@pytest.mark.parametrize("kind", [["float16"], None, 3])
def test_a_precision_that_is_none(kind: object) -> None:
    with pytest.raises(ConfigError, match="fp16_type is"):
        convert_config({"model": GPT2_CS, "fp16_type": kind}, "cs-2.9", "hf", model="gpt2")


@pytest.mark.parametrize("field", ["model_type", "scale_attn_by_inverse_layer_idx", "reorder_and_upcast_attn"])
def test_checked_fields_of_the_other_side_are_refused(field: str) -> None:
    with pytest.raises(ConfigError, match=field):
        to_hf("gpt2", GPT2_CS, **{field: False})
    with pytest.raises(ConfigError, match="norm_type"):
        to_cs("gpt2", GPT2_HF, norm_type="layernorm")


# ------------------------------------------------------------------------------------------------- GPT-J, CodeGen


@pytest.mark.parametrize(
    ("bias", "heads"), [({}, ["lm_head.weight", "lm_head.bias"]), ({"use_bias_in_output": False}, ["lm_head.weight"])]
)
def test_the_made_head_of_gptj_has_a_bias_unless_the_config_says_no(bias: dict[str, bool], heads: list[str]) -> None:
    found = view("gptj-headless", {**GPTJ_HF, **bias}, "hf", "cs-2.2", {"wte.weight": numbers(5, 8).astype("f2")})
    assert list(found.tensors) == ["embedding_layer.word_embeddings.weight", *heads]
    assert {found.tensors[name].dtype.name for name in heads} == {"float32"}


def test_releases_say_precision_and_name_in_their_own_way() -> None:
    for release, halves, name in (("2.0", None, None), ("2.3", "float16", None), ("2.4", None, "gptj")):
        for model, config in (("gptj", GPTJ_HF), ("codegen", CODEGEN_HF)):
            found = to_cs(model, config, f"cs-{release}", use_bfloat16=False)
            assert (found.get("fp16_type"), found.get("name")) == (halves, name)


def test_a_second_norm_of_gptj_holds_nothing() -> None:
    key = "transformer_decoder.layers.0.norm3.weight"
    assert list(view("gptj", GPTJ_CS, "cs-2.9", "hf", {key: None, "lm_head.bias": numbers(5)}).tensors) == [
        "lm_head.bias"
    ]
    with pytest.raises(MappingError, match="norm3"):
        view("gptj", GPTJ_CS, "cs-2.9", "hf", {key: numbers(8)})


def test_codegen_packs_without_biases_in_four_groups() -> None:
    """Rows 0-1 of a group are q, then v, then k; a group has a quarter of the hidden size."""
    packed = numbers(24, 8)
    found = view("codegen", CODEGEN_HF, "hf", "cs-2.0", {"transformer.h.0.attn.qkv_proj.weight": packed}).tensors
    for part, first in (("q", 0), ("v", 2), ("k", 4)):
        rows = [6 * group + first + i for group in range(4) for i in range(2)]
        np.testing.assert_array_equal(to_numpy(found[ATTENTION.format(part, "weight")]), packed[rows])
    with pytest.raises(MappingError, match=r"qkv_proj\.bias"):
        view("codegen", CODEGEN_HF, "hf", "cs-2.9", {"transformer.h.0.attn.qkv_proj.bias": numbers(24)})


# ------------------------------------------------------------------------------------------------ GPT-NeoX, Llama


def test_gpt_neox_without_biases_gets_no_buffers() -> None:
    cs = to_cs("gpt-neox", NEOX_HF, rotary_pct=0.5)
    arrays = {ATTENTION.format(x, "weight"): numbers(8, 8) for x in "qkv"}
    found = view("gpt-neox", cs, "cs-2.9", "hf", arrays)
    assert list(found.tensors) == ["gpt_neox.layers.0.attention.query_key_value.weight"]
    assert found.config["rotary_pct"] == 0.5


def test_heads_larger_than_hidden_size_by_heads_turn_their_first_rows_only() -> None:
    """Two heads of 6 rows, rotary_dim 8 // 2 = 4: rows 0, 2, 1, 3 of a head, then 4 and 5 as they are."""
    found = view("llama", LLAMA_HF, "hf", "cs-2.9", {"model.layers.0.self_attn.q_proj.weight": numbers(12, 8)})
    order = [0, 2, 1, 3, 4, 5, 6, 8, 7, 9, 10, 11]
    np.testing.assert_array_equal(to_numpy(found.tensors[ATTENTION.format("q", "weight")]), numbers(12, 8)[order])
    with pytest.raises(ShapeError):
        view("llama", LLAMA_HF, "hf", "cs-2.9", {"model.layers.0.self_attn.q_proj.weight": numbers(6, 8)})


@pytest.mark.parametrize(
    ("scaling", "extra"),
    [
        ({"rope_type": "linear", "type": "linear", "factor": 2.0, "x": 1}, None),
        (
            {"type": "YaRN", "factor": 2.0, "original_max_position_embeddings": 8, "beta_fast": 32},
            {"original_max_position_embeddings": 8},
        ),
        ({"rope_type": "llama3", "factor": 2.0, "low_freq_factor": 1.0}, {"low_freq_factor": 1.0}),
        ({"type": "longrope", "factor": 2.0, "long_factor": [1.0]}, {"long_factor": [1.0]}),
        (
            {"rope_type": "longrope", "factor": 2.0, "long_factor": [1.0]},
            {"rope_type": "longrope", "long_factor": [1.0]},
        ),
    ],
    ids=lambda s: s.get("type", s.get("rope_type")) if s else "",
)
def test_rope_scaling_of_llama(scaling: dict[str, Any], extra: dict[str, Any] | None) -> None:
    """All but the name of the type and the factor, as it is: the type's other name is a parameter like any other."""
    cs = to_cs("llama", LLAMA_HF, rope_scaling=scaling)
    kind = str(scaling.get("type", scaling.get("rope_type"))).lower()
    assert (cs["pos_scaling_type"], cs["pos_scaling_factor"], cs.get("pos_scaling_extra_args")) == (kind, 2.0, extra)
    name = "rope_type" if kind == "llama3" else "type"
    assert to_hf("llama", cs)["rope_scaling"] == {name: kind, "factor": 2.0, **(extra or {})}


@pytest.mark.parametrize(
    "scaling",
    [{"factor": 2.0}, {"type": "linear"}, {"type": "dynamic", "factor": 2.0}, {"type": "yarn", "factor": 2.0}],
)
def test_rope_scaling_that_says_too_little_is_refused(scaling: dict[str, Any]) -> None:
    for model, config in (("llama", LLAMA_HF), ("gpt-neox", NEOX_HF)):
        with pytest.raises(ConfigError, match="rope_scaling is"):
            to_cs(model, config, rope_scaling=scaling)


def test_only_llama_like_models_know_rope_type() -> None:
    with pytest.raises(ConfigError, match="rope_scaling is"):
        to_cs("gpt-neox", NEOX_HF, rope_scaling={"rope_type": "linear", "factor": 2.0})
    cs = to_cs("gpt-neox", NEOX_HF, rope_scaling={"type": "linear", "factor": 2.0})
    assert to_hf("gpt-neox", {k: v for k, v in cs.items() if k != "pos_scaling_type"})["rope_scaling"] == {
        "type": "linear",
        "factor": 2.0,
    }


def test_key_value_heads_of_llama_come_back_only_where_the_config_has_the_section() -> None:
    cs = to_cs("llama", LLAMA_HF, num_key_value_heads=2)
    assert cs["attention_module"] == "aiayn_attention"
    assert "extra_attention_params" not in cs
    assert "num_key_value_heads" not in to_hf("llama", cs)
    assert to_hf("llama", cs, extra_attention_params={})["num_key_value_heads"] == 2
    assert to_hf("llama", to_cs("llama", LLAMA_HF, num_key_value_heads=1))["num_key_value_heads"] == 1
    assert "attention_module" not in to_cs("llama", LLAMA_HF)


@pytest.mark.parametrize("name", ["llamaV2", "code-llama", "wizardlm"])
def test_other_names_of_llama(name: str) -> None:
    assert to_cs(name, LLAMA_HF) == to_cs("llama", LLAMA_HF)
