"""LoRA folding against recorded results of the public tool, and which group of the config a module belongs to."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest
import yaml

import ckptfs
from ckptfs.conversion.folding import lora
from ckptfs.conversion.hf import fold_lora
from ckptfs.errors import ConfigError, MissingField, MissingKeys, ShapeError, UnsupportedValue
from ckptfs.tensors.ranges import to_bytes, to_numpy
from ckptfs.tensors.tensor import Tensor
from tests.factories import ArrayTensor
from tests.paths import DATA

DATA = DATA / "lora"
CASES = ("embedding_tied", "fan_in_out", "groups")

ATTENTION = "transformer_decoder.layers.0.self_attn.proj_q_dense_layer"
FFN = "transformer_decoder.layers.0.ffn.ffn.0.linear_layer"
WORDS = "embedding_layer.word_embeddings"


def recorded(name: str) -> dict[str, tuple[str, list[int]]]:
    """Key of the ``model`` state to (hash, shape) of what the public tool wrote."""
    tree = json.loads((DATA / f"{name}_folded.expected.json").read_text())["tree"]
    ((state, model),) = tree["items"]
    assert state["key"] == "model"
    return {key["key"]: (leaf["sha256"], leaf["shape"]) for key, leaf in model["items"]}


def config_of(name: str) -> dict[str, Any]:
    found: dict[str, Any] = yaml.safe_load((DATA / name).read_text())
    return found


@pytest.mark.parametrize("name", CASES)
def test_recorded_results(name: str) -> None:
    with ckptfs.open(DATA / f"{name}.mdl") as checkpoint:
        config, tensors, warnings = fold_lora(checkpoint.source, config_of(f"{name}.yaml"))
        want = recorded(name)
        assert list(tensors) == list(want)
        assert config == config_of(f"{name}_folded.yaml")
        assert len(warnings) == (name == "embedding_tied")
        for key, (digest, shape) in want.items():
            assert list(tensors[key].shape) == shape
            assert hashlib.sha256(to_bytes(tensors[key])).hexdigest() == digest, key


def test_on_the_way_to_hf() -> None:
    """``hf`` shows the folded weights, and a broken tie."""
    view = ckptfs.view(DATA / "embedding_tied.mdl", model="gpt2", config=DATA / "embedding_tied.yaml")
    want = recorded("embedding_tied")
    assert view.config["tie_word_embeddings"] is False
    assert len(view.plan.warnings) == 1
    for hf, cs in (("transformer.wte.weight", f"model.{WORDS}.weight"), ("lm_head.weight", "model.lm_head.weight")):
        assert hashlib.sha256(view[hf].tobytes()).hexdigest() == want[cs][0]
    assert not any("lora" in key for key in view)


def state(*modules: str, rank: int = 2, shape: tuple[int, int] = (4, 6), swapped: bool = False) -> dict[str, Tensor]:
    """Modules with adapters whose product is all *rank*."""
    out, width = shape[::-1] if swapped else shape
    arrays = {
        "weight": np.zeros(shape, np.float32),
        "lora_A": np.arange(rank * width, dtype=np.float32).reshape(rank, width),
        "lora_B": np.ones((out, rank), np.float32),
    }
    return {f"{module}.{part}": ArrayTensor(array) for module in modules for part, array in arrays.items()}


def factor(groups: object, module: str, **kind: Any) -> float:
    """What the product of *module* is multiplied with when *groups* are its ``lora_params``."""
    config = {"lora_params": groups, **kind}
    folded = lora.fold("m", config, state(module))
    assert list(folded.tensors) == [f"{module}.weight"]
    return float(to_numpy(folded.tensors[f"{module}.weight"])[0, 1] / (1 + 7))


def test_alpha_over_r() -> None:
    assert factor({"r": 2, "alpha": 5}, ATTENTION) == 2.5
    assert factor({"r": 2}, ATTENTION) == 0.5
    assert factor([{"r": 2, "alpha": 4, "dropout": 0.1, "merge_weights": True}], FFN) == 2


GROUPS = [
    {"r": 2, "alpha": 2, "target_modules": ["MultiheadAttention", "Linear"]},
    {"r": 2, "alpha": 4, "target_modules": ["FeedForwardNetwork", "Linear"]},
    {"r": 2, "alpha": 6, "target_modules": ["Linear"]},
    {"r": 2, "alpha": 8},
]


@pytest.mark.parametrize(("module", "group"), [(ATTENTION, 0), (FFN, 1), ("lm_head", 2), (WORDS, 3)])
def test_the_first_group_whose_classes_are_all_around_the_module(module: str, group: int) -> None:
    assert factor(GROUPS, module) == group + 1
    assert factor(GROUPS, f"model.{module}") == group + 1


def test_the_rank_excludes_groups() -> None:
    groups = [{"r": 3, "alpha": 3, "target_modules": ["Linear"]}, {"r": 2, "alpha": 2, "target_modules": ["Linear"]}]
    assert factor(groups, FFN) == 1
    with pytest.raises(ConfigError, match=r"ffn.*rank 2, but lora_params has r = 3, 8"):
        factor([{"r": 3}, {"r": 8}], FFN)


def test_a_class_that_a_key_does_not_tell() -> None:
    unknown = {"r": 2, "alpha": 2, "target_modules": ["MyAttention"]}
    assert factor(unknown, ATTENTION) == 1, "the only group there is"
    assert factor([unknown, {"r": 2, "alpha": 2}], ATTENTION) == 1, "either way the same"
    with pytest.raises(ConfigError, match=r"proj_q_dense_layer: several groups"):
        factor([unknown, {"r": 2, "alpha": 4}], ATTENTION)
    many = {"r": 2, "alpha": 2, "target_modules": ["MultiQueryAttention"]}
    assert factor([many, {"r": 2, "alpha": 4}], ATTENTION) == 2
    assert factor([many, {"r": 2, "alpha": 4}], ATTENTION, attention_module="multiquery_attention") == 1


@pytest.mark.parametrize(
    ("module", "group", "transposed"),
    [
        (FFN, {}, False),
        (FFN, {"fan_in_fan_out": True}, True),
        (WORDS, {}, True),
        ("embedding_layer.position_embeddings.embed", {}, True),
        ("lm_head", {}, False),
        ("embedding_layer.proj", {"target_modules": ["Linear"]}, False),
    ],
)
def test_square_weights(module: str, group: Mapping[str, Any], transposed: bool) -> None:
    folded = lora.fold("m", {"lora_params": {"r": 2, "alpha": 2, **group}}, state(module, shape=(4, 4)))
    product = np.tile(4.0 + 2 * np.arange(4), (4, 1))
    assert (to_numpy(folded.tensors[f"{module}.weight"]) == (product.T if transposed else product)).all()


def test_a_square_weight_of_unknown_kind_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"embedding_layer\.proj is square.*target_modules"):
        lora.fold("m", {"lora_params": {"r": 2}}, state("embedding_layer.proj", shape=(4, 4)))


def test_the_shape_tells_an_embedding() -> None:
    folded = lora.fold("m", {"lora_params": {"r": 2, "alpha": 2}}, state("odd.name", shape=(9, 3), swapped=True))
    assert (to_numpy(folded.tensors["odd.name.weight"]) == 9 + 2 * np.arange(9)[:, None]).all()


def test_only_a_folded_input_embedding_breaks_the_tie() -> None:
    tied = {"lora_params": {"r": 2}, "share_embedding_weights": True, "hidden_size": 3}
    assert lora.fold("m", tied, state(FFN)).config == {"share_embedding_weights": True, "hidden_size": 3}
    tensors = state(f"model.{WORDS}", shape=(9, 3), swapped=True)
    folded = lora.fold("m", tied, tensors)
    assert folded.config == {"share_embedding_weights": False, "hidden_size": 3}
    assert folded.tensors["model.lm_head.weight"] is tensors[f"model.{WORDS}.weight"], "the head keeps what it was"
    assert "lm_head" in folded.warnings[0]


def test_rank_0_folds_nothing() -> None:
    plain = {f"{FFN}.weight": state(FFN)[f"{FFN}.weight"]}
    assert lora.fold("m", {"lora_params": {"r": 0}}, plain) == lora.Folded(plain, {})


@pytest.mark.parametrize("part", ["weight", "lora_A", "lora_B"])
def test_half_an_adapter_is_refused(part: str) -> None:
    tensors = state(FFN)
    del tensors[f"{FFN}.{part}"]
    with pytest.raises(MissingKeys, match=rf"{FFN}\.{part}"):
        lora.fold("m", {"lora_params": {"r": 2}}, tensors)


def test_config_and_checkpoint_disagree() -> None:
    with pytest.raises(MissingField, match="lora_params"):
        lora.fold("m", {}, state(FFN))
    with pytest.raises(MissingKeys, match="folded already"):
        lora.fold("m", {"lora_params": {"r": 2}}, {})
    tensors = {**state(FFN), f"{FFN}.lora_A": ArrayTensor(np.zeros(5, np.float32))}
    with pytest.raises(ShapeError, match="lora_A"):
        lora.fold("m", {"lora_params": {"r": 2}}, tensors)


@pytest.mark.parametrize(
    ("params", "field"),
    [
        (None, "lora_params"),
        ([], "lora_params"),
        ({"r": "4"}, r"lora_params\.r"),
        ({"r": True}, r"lora_params\.r"),
        ({"r": 2, "alpha": float("nan")}, "alpha"),
        ({"r": 2, "alpha": 10**400}, "alpha"),
        ({"r": 2, "fan_in_fan_out": 1}, "fan_in_fan_out"),
        ({"r": 2, "target_modules": "Linear"}, "target_modules"),
    ],
)
def test_broken_params(params: object, field: str) -> None:
    with pytest.raises(UnsupportedValue, match=field):
        lora.fold("m", {"lora_params": params}, state(FFN))


def test_params_of_the_trainers_callback() -> None:
    flat = config_of("groups.yaml")
    section = dict(flat["model"])
    callbacks = [{"Lora": {"lora_params": section.pop("lora_params")}}, {"CheckLoss": {}}]
    config = {"trainer": {"init": {"model": section, "callbacks": callbacks, "seed": 1}, "fit": {}}}
    with ckptfs.open(DATA / "groups.mdl") as checkpoint:
        whole, tensors, _ = fold_lora(checkpoint.source, config)
    plain = config_of("groups_folded.yaml")["model"]
    init = {"model": plain, "callbacks": [{"CheckLoss": {}}], "seed": 1}
    assert whole == {"trainer": {"init": init, "fit": {}}}
    assert list(tensors) == list(recorded("groups"))
