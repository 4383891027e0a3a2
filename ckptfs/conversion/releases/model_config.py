"""What releases changed in the ``model`` section, as rules: for which models, at which release, both directions.

A rule holds for every step that passes its release, whichever way. Source of the facts: the public converter of
release 2.10.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias

from ckptfs.conversion.format_names import Release
from ckptfs.conversion.releases.draft import About, Draft, Section

Change: TypeAlias = Callable[[Draft, Section], None]
"""Writes into the ``model`` section that it is given."""

BERT = ("bert", "bert-qa", "bert-sequence-classifier", "bert-token-classifier", "bert-summarization")
T5 = ("t5", "transformer", "ul2", "flan-ul2")
LLAMA = ("llama", "llamaV2", "code-llama", "wizardlm")
RMS_NORM = ("gpt2", "bloom", *LLAMA)
"""Models with a switch between LayerNorm and RMSNorm before 2.0."""


@dataclass(frozen=True, slots=True)
class Rule:
    """What changes in the ``model`` section with the release *at*. *families* empty: for every model."""

    at: Release
    up: Change
    down: Change
    families: tuple[str, ...] = ()

    def applies(self, about: About) -> bool:
        passed = min(about.frm, about.to) < self.at <= max(about.frm, about.to)
        return passed and (not self.families or about.family in self.families)


def change_model(draft: Draft) -> None:
    """Apply every rule that the step passes; refusals are `UnsupportedValue` and `MissingField`."""
    for rule in RULES:
        if rule.applies(draft.about):
            (rule.up if draft.about.up else rule.down)(draft, draft.model())


def name_model(draft: Draft) -> None:
    """Release 2.4 wants ``model.name``."""
    draft.model().setdefault("name", draft.about.cs_name)


# ---------------------------------------------------------------------------------------------------- kinds of change


def renamed(
    old: str, new: str, pairs: Mapping[Any, Any], *, fill: object = None, also: Mapping[Any, Any] | None = None
) -> tuple[Change, Change]:
    """Field *old* with the values of *pairs* becomes *new*. *fill*: what a missing *old* means.

    *also* are further values that the way back knows.
    """

    def change(frm: str, to: str, table: Mapping[Any, Any], default: object) -> Change:
        def run(draft: Draft, model: Section) -> None:
            value = model.get(frm, default)
            if value is None:
                model.pop(frm, None)
                return
            if not isinstance(value, str | bool) or value not in table:
                draft.refuse(frm, value, f"only {' and '.join(map(repr, table))} can be converted")
            found = {to if name == frm else name: old for name, old in model.items() if name != to}
            model.clear()
            model.update(found)
            model[to] = table[value]

        return run

    back = {b: a for a, b in pairs.items()} | dict(also or {})
    return change(old, new, pairs, fill), change(new, old, back, None)


def negated(name: str) -> Change:
    """A switch whose meaning was turned round."""

    def run(draft: Draft, model: Section) -> None:
        if name in model:
            if not isinstance(model[name], bool):
                draft.refuse(name, model[name], "only True and False can be converted")
            model[name] = not model[name]

    return run


def without(*names: str) -> Change:
    """Fields that are dropped."""

    def run(draft: Draft, model: Section) -> None:
        for name in names:
            model.pop(name, None)

    return run


def _nothing(draft: Draft, model: Section) -> None:
    """The side of a rule that changes nothing."""


# ------------------------------------------------------------------------------------------------------------ oddities


def _nonlinearities(draft: Draft, model: Section) -> None:
    """Before 1.8 the pooler had the encoder's nonlinearity and the masked-word head gelu."""
    if "encoder_nonlinearity" in model:
        model["pooler_nonlinearity"] = model["encoder_nonlinearity"]
    model["mlm_nonlinearity"] = "gelu"


def _fixed_nonlinearities(draft: Draft, model: Section) -> None:
    encoder = model.get("encoder_nonlinearity", "gelu")
    pooler, mlm = model.get("pooler_nonlinearity"), model.get("mlm_nonlinearity")
    if pooler not in (None, encoder):
        draft.refuse("pooler_nonlinearity", pooler, f"before 1.8 it is encoder_nonlinearity's, {encoder!r}")
    if (mlm or encoder) != "gelu":
        draft.refuse("mlm_nonlinearity", mlm or encoder, "before 1.8 only 'gelu' is possible")


def _biasless(draft: Draft, model: Section) -> None:
    """A second switch for the kind of norm, in models whose first one may say rmsnorm."""
    if "use_biasless_norm" not in model:
        return
    switch = model.pop("use_biasless_norm")
    if not isinstance(switch, bool):
        draft.refuse("use_biasless_norm", switch, "only True and False can be converted")
    if switch and model.get("norm_type") == "rmsnorm":
        draft.refuse("use_biasless_norm", switch, "the config asks for rmsnorm as well")
    if switch:
        model["norm_type"] = "biasless-layernorm"


def _no_cbfloat16(draft: Draft, model: Section) -> None:
    """Releases before 2.1 read ``use_bfloat16`` only, and have no cbfloat16."""
    if model.get("fp16_type") == "cbfloat16":
        draft.warnings.append("fp16_type cbfloat16 cannot be expressed before 2.1; use_bfloat16 takes its place")
    _HALF[1](draft, model)


_DPR_FIELDS = {
    "pooler_type": "cls",
    "use_biencoder": True,
    "mutual_information": False,
    "softmax_temperature": 1,
    "compute_eval_metrics": False,
}


def _temperature(draft: Draft, model: Section) -> None:
    """Similarities are divided by √hidden or not at all before 2.3, by any temperature from then on."""
    scale = model.pop("scale_similarity", None)
    if scale is not None:
        model["softmax_temperature"] = _root_of_hidden(draft, model) if scale else 1.0
    for name, value in _DPR_FIELDS.items():
        model.setdefault(name, value)


def _no_temperature(draft: Draft, model: Section) -> None:
    temperature = model.pop("softmax_temperature", 1.0)
    # The converter's own tolerance: a temperature within 1 of √hidden was meant as √hidden.
    model["scale_similarity"] = abs(temperature - _root_of_hidden(draft, model)) < 1.0
    if not model["scale_similarity"] and temperature != 1.0:
        draft.warnings.append(f"softmax_temperature {temperature} cannot be expressed before 2.3; it is left out")


def _root_of_hidden(draft: Draft, model: Section) -> float:
    encoder = model.get("q_encoder")
    if not isinstance(encoder, Mapping) or "hidden_size" not in encoder:
        draft.lacks("q_encoder.hidden_size", "similarities are scaled with its square root")
    return math.sqrt(encoder["hidden_size"])


# --------------------------------------------------------------------------------------------------------------- rules

_GONE = without("use_position_embedding", "alibi_implementation", "weight_initialization_seed")
_RMS = renamed("use_rms_norm", "norm_type", {True: "rmsnorm", False: "layernorm"}, fill=False)
_T5_NORM = renamed("use_t5_layer_norm", "norm_type", {True: "rmsnorm", False: "layernorm"})
_BIASLESS = renamed("use_biasless_norm", "norm_type", {True: "biasless-layernorm", False: "layernorm"})
_HALF = renamed("use_bfloat16", "fp16_type", {True: "bfloat16", False: "float16"}, also={"cbfloat16": True})
_PRE_NORM = negated("use_pre_encoder_decoder_layer_norm")

RULES = (
    Rule((1, 8), _nonlinearities, _fixed_nonlinearities, BERT),
    Rule((1, 8), _PRE_NORM, _PRE_NORM, T5),
    Rule((2, 0), *_T5_NORM, T5),
    Rule((2, 0), *_RMS, RMS_NORM),
    Rule((2, 0), *_BIASLESS, ("gptj", "gpt-neox", "codegen")),
    Rule((2, 0), _biasless, _nothing, (*RMS_NORM, *T5)),
    Rule((2, 1), _HALF[0], _no_cbfloat16),
    Rule((2, 3), _GONE, _GONE, ("gpt2",)),
    Rule((2, 3), _temperature, _no_temperature, ("dpr",)),
)
