"""Every config field of the classes of transformers is converted, checked, or ignored for a stated reason.

Runs with the installed transformers, 4 or 5: their classes differ in a few fields.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping
from typing import Any

import pytest

from ckptfs.conversion import config as config_tables
from ckptfs.conversion import registry
from ckptfs.conversion.config import ConfigTable, Convert, Fields
from ckptfs.conversion.explain import field_use
from ckptfs.conversion.family import Family
from ckptfs.conversion.rules import Side

pytest.importorskip("transformers", reason="the classes are those of transformers", exc_type=ImportError)

OWN_CODE = ("btlm", "jais", "santacoder")
"""Models whose classes come with the checkpoint; `GPT2Config` is the base of all of them."""
CLASSES = {
    "q_encoder/dpr": {"q_encoder": "dpr", "ctx_encoder": "dpr"},
    "q_encoder/bert": {"q_encoder": "bert", "ctx_encoder": "bert"},
    "image_model/clip_vision_model": {"image_model": "clip_vision_model", "text_model": "llama"},
    "mllama": {"": "mllama", "vision_config": "mllama_vision_model", "text_config": "mllama_text_model"},
}
"""The classes of models of several components or sections, by the place of each."""
FAMILIES = [f for f in registry.FAMILIES.values() if not f.alias_of and f.hf_side and f.resolve is None]


def classes_of(family: Family) -> Mapping[str, str]:
    """Model types by the place of their fields."""
    if family.name.removesuffix("-headless") in OWN_CODE:
        return {"": "gpt2"}
    return CLASSES.get(family.hf_type, {"": family.hf_type})


def config_class(model_type: str) -> Any:
    import transformers
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING
    from transformers.models.mllama import configuration_mllama as mllama

    special = {
        "clip_vision_model": transformers.CLIPVisionConfig,
        "mllama_text_model": mllama.MllamaTextConfig,
        "mllama_vision_model": mllama.MllamaVisionConfig,
    }
    return special.get(model_type) or CONFIG_MAPPING[model_type]


def defaults_of(model_type: str) -> dict[str, Any]:
    found: dict[str, Any] = config_class(model_type)().to_dict()
    return {name: value for name, value in found.items() if name not in ("vision_config", "text_config")}


def fields_of(model_type: str) -> Iterator[str]:
    """The names that the class takes and saves, and their aliases."""
    cls = config_class(model_type)
    parameters = inspect.signature(cls.__init__).parameters.values()
    named = [p.name for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY) and p.name != "self"]
    skipped = {"vision_config", "text_config", "kwargs"}
    yield from dict.fromkeys(name for name in (*defaults_of(model_type), *named) if name not in skipped)
    yield from cls.attribute_map


def tables(family: Family) -> list[ConfigTable]:
    return [layout.config for layout in (family, *family.older)]


@pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.name)
def test_every_field_is_accounted_for(family: Family) -> None:
    for place, model_type in classes_of(family).items():
        prefix = f"{place}/" if place else ""
        for table in tables(family):
            unknown = [f for f in fields_of(model_type) if field_use(table, prefix + f, "hf").what == "unknown"]
            assert unknown == []


@pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.name)
def test_aliases_are_those_of_the_class(family: Family) -> None:
    for place, model_type in classes_of(family).items():
        prefix = f"{place}/" if place else ""
        for alias, name in config_class(model_type).attribute_map.items():
            use = field_use(family.config, prefix + alias, "hf")
            assert family.config.hf.aliases.get(prefix + alias) == prefix + name or use.what == "ignored"


OWN_DEFAULTS = {
    "gptj": {"resid_pdrop", "embd_pdrop", "attn_pdrop"},  # dropout counts in training only
    "falcon": {"num_kv_heads", "num_ln_in_parallel_attn"},  # null in the class: follows from other fields
    "starcoder": {
        *("n_inner", "n_embd", "n_head", "n_layer", "vocab_size", "n_positions"),  # the converter's: StarCoder's sizes
        *("resid_pdrop", "embd_pdrop", "attn_pdrop"),
    },
    "mpt": {"attn_config", "no_bias"},  # the converter's: those of MosaicML's own class
    "esm-2": {"vocab_size", "max_position_embeddings"},  # the converter's: BERT's
}


@pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.name)
def test_missing_fields_mean_what_the_class_takes(family: Family) -> None:
    exceptions = OWN_DEFAULTS.get(family.name.removesuffix("-headless"), set())
    for place, model_type in classes_of(family).items():
        prefix = f"{place}/" if place else ""
        ours = {k.removeprefix(prefix): v for k, v in family.config.hf.defaults.items() if k.startswith(prefix)}
        theirs = defaults_of(model_type)
        different = {k for k, v in ours.items() if k in theirs and theirs[k] != v}
        assert different <= exceptions


class Recording(Fields):
    """Fields that know what was read of them."""

    def __init__(self, fields: Fields, read: set[str]) -> None:
        super().__init__(fields.model, fields)
        self.read = read

    def __getitem__(self, field: str) -> Any:
        self.read.add(field)
        return super().__getitem__(field)


SIMPLE = [f for f in FAMILIES if not f.components and not f.hf_sections]


@pytest.mark.parametrize("family", SIMPLE, ids=lambda family: family.name)
@pytest.mark.parametrize("side", ["hf", "cs"])
def test_what_functions_read_is_declared(family: Family, side: Side, monkeypatch: pytest.MonkeyPatch) -> None:
    """`SideTable.reads` and the fields of transforms are all that the functions of a table look at."""
    read: set[str] = set()

    def computed(convert: Convert, fields: Fields, names: tuple[str, ...]) -> Mapping[str, Any]:
        return convert(Recording(fields, read))

    config = {**family.config.hf.defaults, **defaults_of(classes_of(family)[""]), **family.config.hf.constants}
    if side == "cs":
        config = family.config.convert(family.name, family.config.source(family.name, usual(config), "hf"), "cs")
    monkeypatch.setattr(config_tables, "_computed", computed)
    source = family.config.source(family.name, usual(config) if side == "hf" else config, side)
    family.config.convert(family.name, source, "cs" if side == "hf" else "hf")
    assert {name for name in read if field_use(family.config, name, side).what == "unknown"} == set()


def usual(config: Mapping[str, Any]) -> dict[str, Any]:
    """*config* without nulls, with what a class leaves open."""
    return {"problem_type": "regression", "pad_token_id": 1, **{k: v for k, v in config.items() if v is not None}}
