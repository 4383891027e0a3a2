"""The one dict of model names."""

from __future__ import annotations

import difflib
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

from ckptfs.errors import UnknownFamily
from ckptfs.mappings.families.gpt2 import GPT2, GPT2_HEADLESS
from ckptfs.mappings.families.gpt_neox import GPT_NEOX, GPT_NEOX_HEADLESS
from ckptfs.mappings.families.gptj import CODEGEN, CODEGEN_HEADLESS, GPTJ, GPTJ_HEADLESS
from ckptfs.mappings.families.llama import LLAMA, LLAMA_HEADLESS
from ckptfs.mappings.families.mistral import MISTRAL, MISTRAL_HEADLESS, MIXTRAL, MIXTRAL_HEADLESS
from ckptfs.mappings.family import Family
from ckptfs.mappings.table import SIDES

_ALIASES = {
    "llama": ("llamaV2", "code-llama", "wizardlm"),
    "llama-headless": ("llamaV2-headless", "code-llama-headless", "wizardlm-headless"),
}

_FAMILIES = (
    *(GPT2, GPT2_HEADLESS, GPTJ, GPTJ_HEADLESS, CODEGEN, CODEGEN_HEADLESS, GPT_NEOX, GPT_NEOX_HEADLESS),
    *(LLAMA, LLAMA_HEADLESS, MISTRAL, MISTRAL_HEADLESS, MIXTRAL, MIXTRAL_HEADLESS),
)
FAMILIES: dict[str, Family] = {family.name: family for family in _FAMILIES}
for _name, _aliases in _ALIASES.items():
    for _alias in _aliases:
        FAMILIES[_alias] = replace(FAMILIES[_name], name=_alias, notes=f"alias of {_name}")


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


def by_hf_type(model_type: str) -> list[Family]:
    """The families for a ``model_type`` of ``config.json``, the ones with a head first."""
    return [f for f in FAMILIES.values() if f.hf_type == model_type and not f.notes.startswith("alias")]


def entries(model: str | None = None) -> list[Entry]:
    """All names with their formats, or those of one model."""
    chosen = [family(model)] if model else list(FAMILIES.values())
    return [
        Entry(f.name, "hf", "cs-{}.{} … cs-{}.{}".format(*f.since, *f.until), f.architecture, f.notes) for f in chosen
    ]


def describe(name: str) -> dict[str, Any]:
    """The family's tables as plain data, for ``ckptfs list MODEL --json``."""
    f = family(name)
    return {
        "model": f.name,
        "architecture": f.architecture,
        "formats": f.known(),
        "mup": f.mup,
        "notes": f.notes,
        "tensors": list(_rules(f)),
        "config": {
            "names": dict(f.config.names),
            "computed": [{"hf": list(lens.hf), "cs": list(lens.cs)} for lens in f.config.lenses],
            **{side: {p: dict(getattr(f.config.side(side), p)) for p in ("must", "fill", "add")} for side in SIDES},
        },
    }


def _rules(f: Family) -> Iterator[dict[str, Any]]:
    for rule in f.table.rules:
        sides: dict[str, Any] = {side: [t.text for t in rule.side(side)] for side in SIDES}
        made = {f"{side}_makes": [e.template.text for e in rule.makes(side)] for side in SIDES if rule.makes(side)}
        also = {f"{side}_also": [t.text for t in rule.also(side)] for side in SIDES if rule.also(side)}
        yield {**sides, **also, **made, "ops": [type(op).__name__ for op in rule.ops]}
