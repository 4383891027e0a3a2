"""GPT-2 with a nested config, where the converter fails or loses something, and what a flat config cannot say."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import yaml

import ckptfs
from ckptfs.conversion.resolve import convert_config
from ckptfs.errors import NoPath, UnsupportedValue
from tests.recorded.cases import run_named

TO = run_named("gpt_backbone/to-backbone-bf16/cs-2.4_to_cs-2.4-backbone")
WINDOWS = run_named("gpt_backbone/from-backbone-swa-configonly/cs-2.4-backbone_to_cs-2.4")


def nested(model: dict[str, Any], **rest: Any) -> dict[str, Any]:
    return convert_config({"model": model, **rest}, "cs-2.4", "cs-2.4-backbone", model="gpt2")[0]


def flat(model: dict[str, Any]) -> dict[str, Any]:
    return dict(convert_config({"model": model}, "cs-2.4-backbone", "cs-2.4", model="gpt2")[0]["model"])


def test_the_checkpoint_back(tmp_path: Path) -> None:
    """The converter crashes here: it takes "2.4-backbone" for a version."""
    with ckptfs.open(TO.input) as checkpoint:
        config = TO.folder / "cs_out.yaml"
        assert yaml.safe_load(config.read_text()) == TO.expected["config"]
        view = ckptfs.view(checkpoint, "cs-2.4", model="gpt2", src_fmt="cs-2.4-backbone", config=config)
        model = {k: v for k, v in TO.config["trainer"]["init"]["model"].items() if k != "unknown_field"}
        assert view.config["trainer"]["init"]["model"] == {
            k: v for k, v in model.items() if k != "embedding_dropout_rate"
        }
        assert view.state is not None
        with view.state as state:
            assert state.metadata[-1]["version"] == "2.4.0"
            model_keys = [k for k in checkpoint if k.startswith("model.")]
            assert [k for k in state if k.startswith("model.")] == model_keys
            assert all(state[k].tobytes() == checkpoint[k].tobytes() for k in model_keys)


def test_windows_of_every_other_layer() -> None:
    """The converter loses what stands in a list of layers; the rest of its result is the recorded one."""
    config = WINDOWS.config
    found = flat(config["model"])
    recorded = WINDOWS.expected["config"]["model"]
    layers = {
        "filter_size": 40,
        "nonlinearity": "gelu",
        "norm_first": True,
        "attention_dropout_rate": 0.2,
        "attention_type": "scaled_dot_product",
        "num_heads": 4,
        "attention_sliding_window_length": 6,
        "sliding_window_every_other_decoder_layer": True,
    }
    assert found == {**recorded, **layers}
    assert nested(found) == config


def test_nested_values_stay_whole() -> None:
    model = {
        "name": "gpt2",
        "num_heads": 4,
        "num_hidden_layers": 3,
        "extra_attention_params": {"num_kv_groups": 2, "filter_size": 9},
        "pos_scaling_extra_args": {"num_heads": 1},
        "moe_params": {"num_experts": 2},
        "initializer": {"name": "normal", "std": 0.1},
    }
    there = nested(model, seed=3)
    attention = there["model"]["transformer_decoder"]["layers"]["self_attn"]
    assert attention == {"num_heads": 4, "extra_attention_params": {"num_kv_groups": 2, "filter_size": 9}}
    assert there["model"]["moe_params"] == {"num_experts": 2}
    assert (there["seed"], there["model"]["name"]) == (3, "gpt_backbone")
    assert flat(there["model"]) == model


def test_nothing_of_the_given_config_is_written_to() -> None:
    config = TO.config
    before = copy.deepcopy(config)
    convert_config(config, "cs-2.4", "cs-2.4-backbone", model="gpt2")
    assert config == before


def test_layers_that_a_flat_config_cannot_describe() -> None:
    model = WINDOWS.config["model"]
    layers: list[Any] = model["transformer_decoder"]["layers"]

    def with_layers(found: list[Any]) -> dict[str, Any]:
        return {**model, "transformer_decoder": {**model["transformer_decoder"], "layers": found}}

    other = {**layers[1], "filter_size": 41}
    for bad in ([layers[0], other], layers[::-1], layers[:1], [*layers, layers[0]], [], [1, 2], [layers[0], None]):
        with pytest.raises(UnsupportedValue, match="layers"):
            flat(with_layers(bad))
    alike = flat(with_layers([layers[1], layers[1]]))
    assert alike["attention_sliding_window_length"] == 6
    assert "sliding_window_every_other_decoder_layer" not in alike


def test_windows_need_the_number_of_layers() -> None:
    for n in (None, 0, "2", 10**12):
        with pytest.raises(UnsupportedValue, match="num_hidden_layers"):
            nested({"name": "gpt2", "num_hidden_layers": n, "sliding_window_every_other_decoder_layer": True})


def test_other_models_and_releases() -> None:
    with pytest.raises(UnsupportedValue, match=r"name.*gpt2"):
        nested({"name": "llama"})
    with pytest.raises(UnsupportedValue, match=r"name.*gpt_backbone"):
        flat({"name": "gpt2"})
    with pytest.raises(NoPath):
        convert_config({"model": {}}, "cs-2.4", "cs-2.4-backbone", model="bloom")
    found, name = convert_config(
        {"model": {"name": "gpt2", "num_heads": 2}}, "cs-2.9", "cs-2.10-backbone", model="gpt2"
    )
    assert (name, found["model"]["name"]) == ("cs-2.10-backbone", "gpt_backbone")


def test_a_hugging_face_model_is_two_steps_away() -> None:
    hf = {"model_type": "gpt2", "n_embd": 8, "n_head": 2, "n_layer": 1, "n_positions": 4, "vocab_size": 5}
    there, _ = convert_config(hf, "hf", "cs-2.4-backbone", model="gpt2")
    assert there["model"]["embedding_layer"]["vocab_size"] == 5
    there["model"]["transformer_decoder"]["dropout_rate"] = 0.1
    back, _ = convert_config(there, "cs-2.4-backbone", "hf", model="gpt2")
    assert {name: back[name] for name in hf} == hf
