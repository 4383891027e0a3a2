"""The Python interface: lazy tensors index like numpy arrays and read only what they must."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from safetensors.numpy import save_file

import ckptfs
from ckptfs import LazyTensor
from ckptfs.conversion.resolve import prepare
from ckptfs.errors import ConfigError, MissingKey, UnknownFamily, UnmatchedKeys, UsageError
from tests.factories import ArrayTensor
from tests.paths import FAMILIES
from tests.recorded.cases import run_named

ARRAY = np.arange(7 * 3 * 2, dtype=np.float32).reshape(7, 3, 2)
LLAMA = FAMILIES / "llama/cs2hf-gqa-fp32"

index = st.one_of(st.integers(-7, 6), st.slices(7))
inner = st.one_of(st.integers(-3, 2), st.slices(3))


@given(st.one_of(index, st.tuples(index), st.tuples(index, inner), st.just(...), st.just((..., 1))))
def test_indexing_is_numpys(where: object) -> None:
    got = LazyTensor(ArrayTensor(ARRAY))[where]
    want = ARRAY[where]  # type: ignore[call-overload]
    assert got.shape == want.shape
    assert (got == want).all()


def test_a_slice_reads_only_its_rows() -> None:
    tensor = ArrayTensor(np.arange(1000, dtype=np.int32).reshape(100, 10))
    assert LazyTensor(tensor)[3:5].tolist() == [list(range(30, 40)), list(range(40, 50))]
    assert tensor.reads == 1


def test_index_errors() -> None:
    tensor = LazyTensor(ArrayTensor(ARRAY))
    with pytest.raises(IndexError):
        tensor[7]
    with pytest.raises(TypeError):
        len(LazyTensor(ArrayTensor(np.float32(1))))


def test_numpy_takes_a_lazy_tensor() -> None:
    tensor = LazyTensor(ArrayTensor(ARRAY.astype(ml_dtypes.bfloat16)))
    assert (tensor.dtype, tensor.shape, tensor.nbytes, len(tensor)) == ("bfloat16", (7, 3, 2), 84, 7)
    assert np.asarray(tensor).dtype == ml_dtypes.bfloat16
    assert (np.asarray(tensor, np.float32) == ARRAY).all()
    assert tensor.tobytes() == ARRAY.astype(ml_dtypes.bfloat16).tobytes()
    with pytest.raises(ValueError, match="copy"):
        np.array(tensor, copy=False)
    assert "bfloat16" in repr(tensor)


def test_open_a_cerebras_checkpoint() -> None:
    with ckptfs.open(LLAMA / "cs.mdl") as checkpoint:
        assert "global_step" in checkpoint
        assert len(checkpoint) == len(list(checkpoint))
        assert checkpoint["model.lm_head.weight"].shape == (37, 24)
        assert checkpoint["optimizer.param_groups.0.lr"].shape == ()
        with pytest.raises(MissingKey, match=r"model\.lm_head\.weight"):
            checkpoint["model.lm_head.wieght"]


def test_view_opens_paths_and_says_what_it_made_and_dropped() -> None:
    view = ckptfs.view(LLAMA / "cs.mdl", model="llama", config=LLAMA / "cs.yaml")
    assert view.config["architectures"] == ["LlamaForCausalLM"]
    assert view.config["torch_dtype"] == "float32"
    assert set(view.plan.dropped) == {"ln_f.weight"}
    with pytest.raises(MissingKey, match=r"model\.norm\.weight"):
        view["model.norm.wight"]


def test_view_without_what_it_needs(tmp_path: Path) -> None:
    with ckptfs.open(shutil.copy(LLAMA / "cs.mdl", tmp_path / "alone.mdl")) as checkpoint:
        with pytest.raises(UsageError, match="no model config"):
            ckptfs.view(checkpoint)
        with pytest.raises(UnknownFamily, match="did you mean llama"):
            ckptfs.view(checkpoint, model="lama", config=LLAMA / "cs.yaml")
        with pytest.raises(ConfigError, match="no model section"):
            ckptfs.view(checkpoint, model="llama", config={"hidden_size": 3})
        with pytest.raises(ConfigError, match="list of trainers"):
            ckptfs.view(checkpoint, model="llama", config={"trainer": [{}]})


def test_a_model_that_is_not_known_is_named(tmp_path: Path) -> None:
    save_file({"a": ARRAY}, tmp_path / "model.safetensors")
    for config, named in ({"model_type": "sphinx"}, "sphinx"), ({}, "nothing in the checkpoint tells"):
        (tmp_path / "config.json").write_text(json.dumps(config))
        with ckptfs.open(tmp_path) as checkpoint:
            view, reason = prepare(checkpoint.source)
        assert view is None
        assert named in (reason or "")


def test_unreadable_configs(tmp_path: Path) -> None:
    for name, text in {
        "a.yaml": "a: [",
        "b.json": "{",
        "c.yaml": "- 1",
        "d.yaml": "!!python/object:os.system {}",
    }.items():
        (tmp_path / name).write_text(text)
        with pytest.raises(ConfigError, match=name):
            ckptfs.view(LLAMA / "cs.mdl", model="llama", config=tmp_path / name)
    with pytest.raises(UsageError, match="no_such"):
        ckptfs.view(LLAMA / "cs.mdl", model="llama", config=tmp_path / "no_such.yaml")


def test_rope_parameters_of_transformers_5(tmp_path: Path) -> None:
    """transformers 5 writes theta and scaling in one field; transformers 4 in two."""
    config = json.loads((FAMILIES / "llama/hf2cs-llama3-rope-bf16/hf/config.json").read_text())
    scaling, theta = config.pop("rope_scaling"), config.pop("rope_theta")
    config["rope_parameters"] = {**scaling, "rope_theta": theta}
    expected = run_named("llama/hf2cs-llama3-rope-bf16/hf_to_cs-2.9").expected["config"]
    assert (
        ckptfs.view(FAMILIES / "llama/hf2cs-llama3-rope-bf16/hf", "cs-2.9", model="llama", config=config).config
        == expected
    )
    config["rope_parameters"] = {"rope_type": "default", "rope_theta": 5.0}
    found = ckptfs.view(FAMILIES / "llama/hf2cs-llama3-rope-bf16/hf", "cs-2.9", model="llama", config=config).config[
        "model"
    ]
    assert (found["rope_theta"], found["pos_scaling_factor"]) == (5.0, 1.0)
    assert "pos_scaling_type" not in found


def test_all_unmatched_keys_are_named_or_dropped(tmp_path: Path) -> None:
    config = json.loads((FAMILIES / "gpt2/hf2cs-untied-fp32/hf/config.json").read_text())
    save_file(
        {"transformer.wte.weight": ARRAY[:, :, 0].copy(), "odd": ARRAY, "even": ARRAY}, tmp_path / "m.safetensors"
    )
    with pytest.raises(UnmatchedKeys) as caught:
        ckptfs.view(tmp_path / "m.safetensors", "cs-2.9", model="gpt2", config=config)
    assert sorted(caught.value.keys) == ["even", "odd"]
    view = ckptfs.view(tmp_path / "m.safetensors", "cs-2.9", model="gpt2", config=config, drop_unmatched_keys=True)
    assert list(view) == ["embedding_layer.word_embeddings.weight"]
    assert sorted(view.plan.dropped) == ["even", "odd"]


def test_heads_of_headless_models_are_seeded() -> None:
    folder = FAMILIES / "llama/hf2cs-headless-tied-bf16/hf"
    config = {**json.loads((folder / "config.json").read_text()), "tie_word_embeddings": False}
    heads = [ckptfs.view(folder, "cs-2.9", model="llama-headless", config=config)["lm_head.weight"] for _ in range(2)]
    assert (heads[0].dtype, heads[0].shape) == ("float32", (37, 24))
    assert heads[0].tobytes() == heads[1].tobytes()
    stream = np.random.Generator(np.random.Philox(key=0, counter=[0, 0, 0, 0]))
    assert heads[0].tobytes() == (stream.standard_normal(65536, np.float32)[: 37 * 24] * np.float32(0.02)).tobytes()


def test_public_names() -> None:
    assert sorted(ckptfs.__all__) == sorted(set(ckptfs.__all__))
    for name in ckptfs.__all__:
        assert getattr(ckptfs, name) is not None
    with pytest.raises(AttributeError):
        ckptfs.nothing  # noqa: B018
