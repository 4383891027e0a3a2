"""DPO holds a decoder twice: every recorded decoder, put under the policy's name, gives the recorded result."""

from __future__ import annotations

import gzip
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml

import ckptfs
from ckptfs.conversion.families.dpo import MODELS, POLICY, REFERENCE
from ckptfs.conversion.resolve import convert_config, prepare
from ckptfs.errors import MappingError, MissingField, NoPath, UnmatchedKeys, UnsupportedValue
from ckptfs.formats.source import Container, Item, Source
from tests.factories import ArrayTensor
from tests.paths import FAMILIES
from tests.recorded.cases import Run, run_named, runs
from tests.recorded.compare import config_differences, differences, tensors_of

RECORDED = [r for r in runs("hf", refused=False) if r.model in MODELS and r.model != "mpt"]
TO_HF = [r for r in RECORDED if r.folder.name.startswith("cs2hf")]
TO_CS = [r for r in RECORDED if r.src == "hf" and r.config["model_type"].replace("_", "-") == r.model]
"""Those whose ``model_type`` is the decoder's name: not the ones of santacoder, starcoder and older falcons."""
TIED = "gpt2/cs2hf-tied-fp32/cs-2.9_to_hf_random"


def of_policy(source: Source, prefix: str = POLICY) -> Source:
    """*source* with its model under the policy's name, and something else under the reference's."""
    items = {}
    for key, item in source.items.items():
        name = key.removeprefix("model.")
        if name == key:
            continue
        items[f"model.{prefix}{name}"] = replace(item, key=f"model.{prefix}{name}")
        other = f"model.{REFERENCE}{name}"
        items[other] = Item(other, "tensor", ArrayTensor(np.zeros((2, 2), np.float32)))
    return replace(source, items=items, tree=Container("dict", ("model",), ()), metadata=[])


def with_decoder(config: dict[str, Any], model: str) -> dict[str, Any]:
    """*config* with what tells the decoder in its ``model`` section."""
    section = config["trainer"]["init"]["model"] if "trainer" in config else config["model"]
    section |= {"model_name": model, "name": "dpo", "dpo": {"beta": 0.3}}
    return config


@pytest.mark.parametrize("run", TO_HF, ids=str)
def test_the_policy_is_shown_as_its_decoder(run: Run) -> None:
    config = with_decoder(run.config, run.model)
    with ckptfs.open(run.input) as checkpoint:
        policy = ckptfs.Checkpoint(of_policy(checkpoint.source))
        view = ckptfs.view(policy, model="dpo", config=config, src_fmt="cs-2.3-dpo")
        assert differences(tensors_of(view), run.state) == []
        assert list(view) == list(run.state)
        assert {k for k in view.plan.dropped if k.startswith(REFERENCE)} >= {REFERENCE + "lm_head.weight"}
        assert config_differences(view.config, run.expected["config"]) == []


@pytest.mark.parametrize("run", [r for r in TO_CS if "state_same_as" not in r.expected], ids=str)
def test_the_decoder_becomes_policy_and_reference(run: Run) -> None:
    config = run.expected["config"]
    expected = {key.replace("model.", p, 1): t for p in (POLICY, REFERENCE) for key, t in run.state.items()}
    section = {**config["model"], "name": "dpo", "model_name": run.model}
    section["dpo"] = {"beta": 0.1, "reference_free": False}
    with ckptfs.open(run.input) as checkpoint:
        view = ckptfs.view(checkpoint, "cs-2.5-dpo", model="dpo")
        assert differences(tensors_of(view), expected) == []
        assert list(view) == list(expected)
        assert view.config == {**config, "model": section}


def test_every_decoder_that_has_recorded_cases_is_among_them() -> None:
    assert {c.model for c in TO_HF} == MODELS.keys() - {"mpt"}
    assert {c.model for c in TO_CS} == MODELS.keys() - {"mpt", "starcoder", "santacoder"}


def test_the_reference_model_never_stands_in_for_the_policy() -> None:
    run = run_named(TIED)
    with ckptfs.open(run.input) as checkpoint:
        source = of_policy(checkpoint.source)
        kept = {k: i for k, i in source.items.items() if "policy_model.model.lm_head" not in k}
        config = with_decoder(run.config, "gpt2")
        view = ckptfs.view(ckptfs.Checkpoint(replace(source, items=kept)), model="dpo", config=config)
        assert "lm_head.weight" not in view


@pytest.mark.parametrize("name", ["embedding_layer.position_embeddings.weight", "adapter.weight"])
def test_whatever_the_reference_model_holds_is_left_out(name: str) -> None:
    """Also under names that no decoder has, or had in older releases only; the policy's must all be known."""
    run = run_named(TIED)
    config = with_decoder(run.config, "gpt2")
    with ckptfs.open(run.input) as checkpoint:
        source = of_policy(checkpoint.source)

        def shown(key: str) -> ckptfs.View:
            item = Item(f"model.{key}", "tensor", ArrayTensor(np.zeros((2, 2), np.float32)))
            more = replace(source, items={**source.items, item.key: item})
            return ckptfs.view(ckptfs.Checkpoint(more), model="dpo", config=config)

        assert REFERENCE + name in shown(REFERENCE + name).plan.dropped
        with pytest.raises(MappingError, match=name.replace(".", r"\.")):
            shown(POLICY + name)


def test_a_checkpoint_that_names_dpo_needs_no_format() -> None:
    """Neither does a mount: its metadata tell the family, and the family its formats."""
    run = run_named(TIED)
    config = with_decoder(run.config, "gpt2")
    with ckptfs.open(run.input) as checkpoint:
        told = [{"version": "2.5.0", "model_name": "dpo", "params": config}]
        view, why = prepare(replace(of_policy(checkpoint.source), metadata=told))
    assert why is None and view is not None
    assert (view.model, view.src, view.config["model_type"]) == ("dpo", "cs-2.5-dpo", "gpt2")


@pytest.mark.parametrize("name", ["opt", "palm", "bert", "", 3, ["gpt2"], {"gpt2": 1}])
def test_decoders_that_are_not_known(name: object) -> None:
    with pytest.raises(UnsupportedValue, match=r"model_type.*gpt2"):
        convert_config({"model_type": name}, "hf", "cs-2.9-dpo", model="dpo")
    with pytest.raises(UnsupportedValue, match=r"model_name.*gpt2"):
        convert_config({"model": {"model_name": name}}, "cs-2.9-dpo", "hf", model="dpo")


def test_nothing_tells_the_decoder() -> None:
    with pytest.raises(MissingField, match="model_type"):
        convert_config({"vocab_size": 3}, "hf", "cs-2.9-dpo", model="dpo")
    with pytest.raises(MissingField, match="model_name"):
        convert_config({"model": {"name": "dpo"}}, "cs-2.9-dpo", "hf", model="dpo")


def test_formats_say_dpo_or_do_not() -> None:
    gpt2 = {"model_type": "gpt2", "n_embd": 8}
    with pytest.raises(NoPath, match=r"cs-2\.1-dpo … cs-2\.10-dpo"):
        convert_config(gpt2, "hf", "cs-2.9", model="dpo")
    with pytest.raises(NoPath, match=r"cs-2\.1 … cs-2\.10"):
        convert_config(gpt2, "hf", "cs-2.9-dpo", model="gpt2")
    config, name = convert_config(gpt2, "hf", "cs-current", model="dpo")
    assert (name, config["model"]["model_name"]) == ("cs-2.10-dpo", "gpt2")


def test_mpt_holds_for_the_releases_that_have_it() -> None:
    mpt = {"model_type": "mpt", "n_heads": 2, "d_model": 8, "n_layers": 1}
    config, _ = convert_config(mpt, "hf", "cs-2.3-dpo", model="dpo")
    assert config["model"]["model_name"] == "mpt"
    with pytest.raises(NoPath, match=r"cs-2\.1-dpo … cs-2\.3-dpo"):
        convert_config(mpt, "hf", "cs-2.4-dpo", model="dpo")


# ------------------------------------------------------------------------------- a model <-> the same in DPO training

OTHERS = FAMILIES / "dpo"


def opened(case: str, tmp: Path) -> ckptfs.Checkpoint:
    path = tmp / f"{case}.mdl"
    path.write_bytes(gzip.decompress((OTHERS / case / "cs.mdl.gz").read_bytes()))
    return ckptfs.open(path)


def given(case: str) -> dict[str, Any]:
    found: dict[str, Any] = yaml.safe_load((OTHERS / case / "cs.yaml").read_text())
    return found


def bytes_of(state: ckptfs.Checkpoint, lead: str) -> dict[str, bytes]:
    """The tensors under *lead*, by the rest of their keys."""
    return {k.removeprefix(lead): state[k].tobytes() for k in state if k.startswith(lead)}


def test_a_model_becomes_policy_and_reference(tmp_path: Path) -> None:
    """What the converter means to do, and does not reach: it takes the variant for a part of the release."""
    config = given("no_dpo_to_dpo")
    with opened("no_dpo_to_dpo", tmp_path) as plain:
        view = ckptfs.view(plain, "cs-2.1-dpo", model="dpo", src_fmt="cs-2.1-no-dpo", config=config)
        training = {"beta": 0.1, "reference_free": False}
        expected = {**given("no_dpo_to_dpo"), "model": {**config["model"], "dpo": training}}
        assert view.config == expected
        assert view.state is not None
        with view.state as state:
            kept = bytes_of(plain, "model.")
            assert len(kept) == 3
            assert bytes_of(state, f"model.{POLICY}") == bytes_of(state, f"model.{REFERENCE}") == kept
            assert len([k for k in state if k.startswith("model.")]) == 6
            assert state.metadata[-1] == {"version": "2.1.0", "model_name": "dpo", "params": expected}
            rest = {k for k in plain if not k.startswith("model.")}
            assert rest == {k for k in state if not k.startswith(("model.", "__metadata__"))}


def test_a_policy_becomes_a_model(tmp_path: Path) -> None:
    config = given("dpo_to_no_dpo")
    with opened("dpo_to_no_dpo", tmp_path) as pair:
        view = ckptfs.view(pair, "cs-2.1-no-dpo", model="dpo", src_fmt="cs-2.1-dpo", config=config)
        model = {"hidden_size": 24, "model_name": "llama", "vocab_size": 61}
        assert view.config == {**config, "model": model}
        assert view.state is not None
        with view.state as state:
            assert bytes_of(state, "model.") == bytes_of(pair, f"model.{POLICY}")


@pytest.mark.parametrize("name", ["gpt-neox", "opt"])
def test_the_name_follows_where_configs_have_it(name: str) -> None:
    whole = {"trainer": {"init": {"model": {"name": name, "model_name": name}, "seed": 1}}}
    there, _ = convert_config(whole, "cs-2.4-no-dpo", "cs-2.4-dpo", model="dpo")
    model = {"name": "dpo", "model_name": name, "dpo": {"beta": 0.1, "reference_free": False}}
    assert there == {"trainer": {"init": {"model": model, "seed": 1}}}
    assert convert_config(there, "cs-2.4-dpo", "cs-2.4-no-dpo", model="dpo")[0] == whole
    own = {"model": {"model_name": name, "dpo": {"beta": 0.7}}}
    assert convert_config(own, "cs-2.2-no-dpo", "cs-2.2-dpo", model="dpo")[0] == own


def test_models_that_cannot_be_trained() -> None:
    for bad in ("bert", 3, ["gpt2"]):
        with pytest.raises(UnsupportedValue, match="model_name"):
            convert_config({"model": {"model_name": bad}}, "cs-2.1-no-dpo", "cs-2.1-dpo", model="dpo")
    with pytest.raises(MissingField, match="model_name"):
        convert_config({"model": {}}, "cs-2.1-no-dpo", "cs-2.1-dpo", model="dpo")
    with pytest.raises(MissingField, match="dpo"):
        convert_config({"model": {"model_name": "gpt2"}}, "cs-2.1-dpo", "cs-2.1-no-dpo", model="dpo")


def test_keys_that_are_of_the_other_kind_are_refused(tmp_path: Path) -> None:
    config = {"model": {"model_name": "llama", "dpo": {"beta": 0.1}}}
    with opened("no_dpo_to_dpo", tmp_path) as plain, opened("dpo_to_no_dpo", tmp_path) as pair:
        with pytest.raises(UnmatchedKeys, match=r"lm_head\.weight.*policy_model"):
            ckptfs.view(plain, "cs-2.1-no-dpo", model="dpo", src_fmt="cs-2.1-dpo", config=config)
        with pytest.raises(MappingError, match="DPO model already"):
            ckptfs.view(pair, "cs-2.1-dpo", model="dpo", src_fmt="cs-2.1-no-dpo", config=config)


def test_releases_are_steps_too() -> None:
    config = {"model": {"model_name": "llama", "dpo": {"beta": 0.2}}}
    assert convert_config(config, "cs-2.1-dpo", "cs-2.2-dpo", model="dpo")[0] == config
    assert convert_config(config, "cs-2.1", "cs-2.2", model="dpo") == (config, "cs-2.2")
    with pytest.raises(NoPath):
        convert_config(config, "cs-2.1", "cs-2.1-dpo", model="dpo")
    found, name = convert_config({"model_type": "gpt2", "n_embd": 8}, "hf", "cs-2.5-no-dpo", model="dpo")
    assert (name, found["model"]["name"], "dpo" in found["model"]) == ("cs-2.5-no-dpo", "gpt2", False)
