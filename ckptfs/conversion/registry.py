"""The models by name: `FAMILIES`, and what finds one for a checkpoint or a config."""

from __future__ import annotations

import difflib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from importlib import import_module
from typing import Any

from ckptfs.conversion.config import OneOf
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

_MODULES = (
    *("gpt2", "gptj", "gpt_neox", "llama", "mistral", "falcon", "bloom", "btlm", "santacoder", "starcoder", "gemma2"),
    *("mpt", "t5", "bert", "bert_tasks", "roberta", "esm2", "dpo", "mllama", "vit", "dpr", "llava"),
)
"""The modules of `ckptfs.conversion.families` that have models, each in a tuple ``FAMILIES``; in the order of lists."""
FAMILIES: dict[str, Family] = {
    family.name: family
    for module in _MODULES
    for family in import_module(f"ckptfs.conversion.families.{module}").FAMILIES
}
for _name, _aliases in _ALIASES.items():
    for _alias in _aliases:
        _family = replace(FAMILIES[_name], name=_alias, alias_of=_name, notes=f"alias of {_name}")
        FAMILIES[_alias] = replace(_family, cs_name=_CS_NAMES.get(_alias, _family.cs_name))

_OLDER_NAMES = {"bert-q&a": "bert-qa"}
"""Names that the public converter had in older releases."""
_ANY_CASE = {name.lower(): name for name in FAMILIES} | _OLDER_NAMES
TRAINER_CLASSES = {
    "BertForPreTrainingModel": "bert",
    "BertForSequenceClassificationModel": "bert-sequence-classifier",
    "BertForSummarizationModel": "bert-summarization",
    "BertSummarizationModel": "bert-summarization",
    "BertForTokenClassificationModel": "bert-token-classifier",
    "BloomModel": "bloom",
    "BTLMModel": "btlm",
    "DPOModel": "dpo",
    "DPRWrapperModel": "dpr",
    "Esm2ForPreTrainingModel": "esm-2",
    "FalconModel": "falcon",
    "Gemma2Model": "gemma2",
    "GPT3Model": "gpt2",
    "GPTNeoXModel": "gpt-neox",
    "JAISModel": "jais",
    "LlamaModel": "llama",
    "LlavaModel": "llava",
    "MistralModel": "mistral",
    "MixtralModel": "mixtral",
    "MMSimpleModel": "mmsimple-llava",
    "SantaCoderModel": "santacoder",
    "StarCoderModel": "starcoder",
    "T5ForConditionalGenerationModel": "t5",
    "TransformerModel": "transformer",
    "ViTClassificationWrapperModel": "vit",
}
"""The trainer's ``model_name`` is the name of its model class. ``Gpt2Model`` and ``GptjModel`` tell nothing: before 2.4
they trained many models."""


@dataclass(frozen=True, slots=True)
class Entry:
    """One line of ``ckptfs list``: a model name and two formats, connected in both directions."""

    model: str
    source: str
    target: str
    architecture: str
    notes: str


def family(name: str) -> Family:
    """The family of that model name, in upper or lower case; `UnknownFamily` names the nearest ones."""
    found = _ANY_CASE.get(name.lower())
    if found is None:
        raise UnknownFamily(name, difflib.get_close_matches(name.lower(), FAMILIES, n=2))
    return FAMILIES[found]


def by_cs_name(name: str) -> Family | None:
    """The family of a ``model_name`` or ``model.name`` in a Cerebras checkpoint, or None."""
    if name in FAMILIES or name in TRAINER_CLASSES:
        return FAMILIES[TRAINER_CLASSES.get(name, name)]
    return next((f for f in FAMILIES.values() if f.cs_name == name), None)


def by_cs_config(name: str, model: Mapping[str, Any]) -> list[Family]:
    """The families for a name in a Cerebras checkpoint, likeliest first (`cs_discriminator` fits *model*)."""
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
        extra = {f"{side}_extra": [e.template.text for e in rule.extras(side)] for side in SIDES if rule.extras(side)}
        also = {f"{side}_also": [t.text for t in rule.also(side)] for side in SIDES if rule.also(side)}
        yield {**sides, **also, **extra, "ops": [type(op).__name__ for op in rule.ops]}
