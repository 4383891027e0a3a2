"""A model and its DPO training: ``cs-2.1-no-dpo`` <-> ``cs-2.1-dpo``, and so in all releases since.

The model's keys stand under ``policy_model.model.``, and a second time under ``ref_model.model.``. On the way back the
reference model is left out. Names inside the optimizer are carried over as they are, as by the public converter.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ckptfs.conversion.families.dpo import MODELS, POLICY, REFERENCE, TRAINING
from ckptfs.conversion.format_names import RELEASES, ModelFormat
from ckptfs.conversion.releases.draft import About, Draft, Section
from ckptfs.conversion.releases.keys import bare
from ckptfs.conversion.releases.steps import Model, Setting, Step, unchanged
from ckptfs.errors import MappingError, MissingField, UnmatchedKeys, UnsupportedValue

NAMES = (*MODELS, "gpt3", "lambda", "opt", "palm")
"""What ``model_name`` may be. Not all have a Hugging Face side; their keys need none here."""


@dataclass(frozen=True, slots=True)
class Pair:
    """A model <-> the same one as policy, and once more as reference."""

    def apply(self, model: Model, setting: Setting) -> Model:
        return _pair(model, setting) if setting.up else _policy(model, setting)


def _pair(model: Model, setting: Setting) -> Model:
    there = next((key for key in model if bare(key).startswith((POLICY, REFERENCE))), None)
    if there:
        raise MappingError(f"{setting.about.family}: {there} is the key of a DPO model already")
    return {lead + bare(key): item for lead in (POLICY, REFERENCE) for key, item in model.items()}


def _policy(model: Model, setting: Setting) -> Model:
    strange = [key for key in model if not bare(key).startswith((POLICY, REFERENCE))]
    if strange and not setting.drop_unmatched:
        raise UnmatchedKeys(setting.about.family, [(key, f"{POLICY}…") for key in strange])
    return {bare(key)[len(POLICY) :]: item for key, item in model.items() if bare(key).startswith(POLICY)}


def changed_config(config: Mapping[str, Any], about: About) -> dict[str, Any]:
    """*config* with the section ``dpo``, or without. ``model.name`` follows where releases have it."""
    draft = Draft(about, dict(config))
    section = draft.model()
    into = about.variants[1] == "dpo"
    if into:
        _known(about, section)
        section.setdefault("dpo", dict(TRAINING))
    elif section.pop("dpo", None) is None:
        raise MissingField(about.family, "dpo", "the config is not that of a DPO model")
    if "name" in section or about.to >= (2, 4):
        section["name"] = "dpo" if into else _name(about, section)
    return draft.whole


def _known(about: About, section: Section) -> str:
    name = section.get("model_name")
    if name is None:
        raise MissingField(about.family, "model_name", f"it tells the model: {', '.join(NAMES)}")
    if not isinstance(name, str) or name not in NAMES:
        raise UnsupportedValue(about.family, "model_name", name, f"only {', '.join(NAMES)} can be trained with DPO")
    return name


def _name(about: About, section: Section) -> str:
    name = _known(about, section)
    return MODELS[name].cs_name if name in MODELS else name


STEPS = (
    *(
        Step(ModelFormat(r, "no-dpo"), ModelFormat(r, "dpo"), (Pair(),), config=changed_config)
        for r in RELEASES
        if r >= (2, 1)
    ),
    *unchanged((2, 1), variant="dpo"),
    *unchanged((2, 1)),  # the converter knows these steps by names without a variant, which lead nowhere else
)
