"""The one dict of model names."""

from __future__ import annotations

import difflib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

from ckptfs.conversion.config import OneOf
from ckptfs.conversion.families.bert import BERT
from ckptfs.conversion.families.bert_tasks import QUESTIONS, SEQUENCE, SUMMARIZATION, TOKENS
from ckptfs.conversion.families.bloom import BLOOM, BLOOM_HEADLESS
from ckptfs.conversion.families.btlm import BTLM, BTLM_HEADLESS, JAIS_FAMILY
from ckptfs.conversion.families.dpo import DPO
from ckptfs.conversion.families.dpr import DPR_FAMILY, DRAGON_FAMILY
from ckptfs.conversion.families.esm2 import ESM2
from ckptfs.conversion.families.falcon import FALCON, FALCON_HEADLESS
from ckptfs.conversion.families.gemma2 import GEMMA2
from ckptfs.conversion.families.gpt2 import GPT2, GPT2_HEADLESS
from ckptfs.conversion.families.gpt_neox import GPT_NEOX, GPT_NEOX_HEADLESS
from ckptfs.conversion.families.gptj import CODEGEN, CODEGEN_HEADLESS, GPTJ, GPTJ_HEADLESS
from ckptfs.conversion.families.llama import LLAMA, LLAMA_HEADLESS
from ckptfs.conversion.families.llava import LLAVA, MMSIMPLE
from ckptfs.conversion.families.mistral import MISTRAL, MISTRAL_HEADLESS, MIXTRAL, MIXTRAL_HEADLESS
from ckptfs.conversion.families.mllama import MLLAMA
from ckptfs.conversion.families.mpt import MPT, MPT_HEADLESS
from ckptfs.conversion.families.roberta import ROBERTA
from ckptfs.conversion.families.santacoder import SANTACODER, SANTACODER_HEADLESS
from ckptfs.conversion.families.starcoder import STARCODER, STARCODER_HEADLESS
from ckptfs.conversion.families.t5 import T5
from ckptfs.conversion.families.vit import CLIP_VIT, VIT, VIT_HEADLESS
from ckptfs.conversion.family import Family
from ckptfs.conversion.rules import SIDES
from ckptfs.errors import UnknownFamily

_ALIASES = {
    "llama": ("llamaV2", "code-llama", "wizardlm"),
    "llama-headless": ("llamaV2-headless", "code-llama-headless", "wizardlm-headless"),
    "starcoder": ("octocoder", "wizardcoder", "sqlcoder"),
    "starcoder-headless": ("octocoder-headless", "wizardcoder-headless", "sqlcoder-headless"),
    "t5": ("transformer", "ul2", "flan-ul2"),
}
# The converter writes the configs of these aliases under other names than their model's.
_CS_NAMES = {"wizardcoder": "gpt2", "wizardcoder-headless": "gpt2", "transformer": "transformer"}

_FAMILIES = (
    *(GPT2, GPT2_HEADLESS, GPTJ, GPTJ_HEADLESS, CODEGEN, CODEGEN_HEADLESS, GPT_NEOX, GPT_NEOX_HEADLESS),
    *(LLAMA, LLAMA_HEADLESS, MISTRAL, MISTRAL_HEADLESS, MIXTRAL, MIXTRAL_HEADLESS),
    *(FALCON, FALCON_HEADLESS, BLOOM, BLOOM_HEADLESS, BTLM, BTLM_HEADLESS, JAIS_FAMILY),
    *(SANTACODER, SANTACODER_HEADLESS, STARCODER, STARCODER_HEADLESS, GEMMA2, MPT, MPT_HEADLESS),
    *(T5,),
    *(BERT, QUESTIONS, SEQUENCE, TOKENS, SUMMARIZATION, ROBERTA, ESM2),
    *(DPO, MLLAMA),
    *(VIT, VIT_HEADLESS, CLIP_VIT, DPR_FAMILY, DRAGON_FAMILY, LLAVA, MMSIMPLE),
)
FAMILIES: dict[str, Family] = {family.name: family for family in _FAMILIES}
for _name, _aliases in _ALIASES.items():
    for _alias in _aliases:
        _family = replace(FAMILIES[_name], name=_alias, alias_of=_name, notes=f"alias of {_name}")
        FAMILIES[_alias] = replace(_family, cs_name=_CS_NAMES.get(_alias, _family.cs_name))


@dataclass(frozen=True, slots=True)
class Entry:
    """One line of ``ckptfs list``: a model name and two formats that are connected, both ways."""

    model: str
    source: str
    target: str
    architecture: str
    notes: str


def family(name: str) -> Family:
    """The family of that model name; `UnknownFamily` names the nearest ones."""
    found = FAMILIES.get(name)
    if found is None:
        raise UnknownFamily(name, difflib.get_close_matches(name, FAMILIES, n=2))
    return found


def by_cs_name(name: str) -> Family | None:
    """The family of a ``model_name`` or ``model.name`` in a Cerebras checkpoint, or None."""
    if name in FAMILIES:
        return FAMILIES[name]
    return next((f for f in FAMILIES.values() if f.cs_name == name), None)


def by_cs_config(name: str, model: Mapping[str, Any]) -> list[Family]:
    """The families for a name in a Cerebras checkpoint, likeliest first: the one whose marks *model* bears leads."""
    first = by_cs_name(name)
    if first is None:
        return []
    others = [f for f in FAMILIES.values() if f.cs_name == first.cs_name and not f.alias_of]
    found = [first, *(f for f in others if f.config is not first.config)]
    return sorted(
        found, key=lambda f: not f.cs_discriminator or any(model.get(k) != v for k, v in f.cs_discriminator.items())
    )


def by_hf_config(config: Mapping[str, Any]) -> list[Family]:
    """The families for a ``config.json``; of several with one ``model_type``, those that ``architectures`` names."""
    found = by_hf_type(_hf_type(config))
    classes = config.get("architectures")
    named = [f for f in found if isinstance(classes, list) and f.architecture in classes]
    same = [f for f in found if f not in named and any(f.config is n.config for n in named)]
    return [*named, *same] or found


def _hf_type(config: Mapping[str, Any]) -> str:
    """``model_type`` of a ``config.json``; of configs by component the first one's, as ``folder/model_type``."""
    for family in FAMILIES.values():
        first = config.get(family.components[0]) if family.components else None
        if isinstance(first, Mapping):
            return f"{family.components[0]}/{first.get('model_type')}"
    return str(config.get("model_type"))


def by_hf_type(model_type: str) -> list[Family]:
    """The families for a ``model_type`` of ``config.json``, the ones with a head first."""
    return [f for f in FAMILIES.values() if f.hf_type == model_type and not f.alias_of and f.resolve is None]


def entries(model: str | None = None) -> list[Entry]:
    """All names with their formats, or those of one model: with Hugging Face, then between Cerebras releases."""
    chosen = [family(model)] if model else list(FAMILIES.values())
    return [entry for f in chosen for entry in _entries(f)]


def _entries(f: Family) -> Iterator[Entry]:
    from ckptfs.conversion.releases.paths import steps_of
    from ckptfs.conversion.releases.steps import formats_of

    releases = formats_of(steps_of(f))
    if f.hf_side:
        variants = [step for step in steps_of(f) if step.old.variant or not f.variant]
        yield Entry(f.name, "hf", formats_of(variants), f.architecture, f.notes)
    yield Entry(f.name, releases, releases, "", "" if f.hf_side else f.notes)


def describe(name: str) -> dict[str, Any]:
    """The family's tables as plain data, for ``ckptfs list MODEL --json``."""
    from ckptfs.conversion.releases.paths import steps_of
    from ckptfs.conversion.releases.steps import formats_of

    f = family(name)
    return {
        "model": f.name,
        "architecture": f.architecture,
        "formats": f.known(),
        "releases": formats_of(steps_of(f)),
        "mup": f.mup,
        "notes": f.notes,
        "tensors": list(_rules(f)),
        "config": {
            "renames": dict(f.config.renames),
            "transforms": [{"hf": list(transform.hf), "cs": list(transform.cs)} for transform in f.config.transforms],
            **{side: {p: _plain(getattr(f.config.side(side), p)) for p in PARTS} for side in SIDES},
        },
    }


PARTS = ("required", "defaults", "written", "aliases", "ignored")


def _plain(fields: Mapping[str, Any]) -> dict[str, Any]:
    return {k: {"one of": list(v.values)} if isinstance(v, OneOf) else v for k, v in fields.items()}


def _rules(f: Family) -> Iterator[dict[str, Any]]:
    for rule in f.table.rules:
        sides: dict[str, Any] = {side: [t.text for t in rule.side(side)] for side in SIDES}
        made = {f"{side}_makes": [e.template.text for e in rule.makes(side)] for side in SIDES if rule.makes(side)}
        also = {f"{side}_also": [t.text for t in rule.also(side)] for side in SIDES if rule.also(side)}
        yield {**sides, **also, **made, "ops": [type(op).__name__ for op in rule.ops]}
