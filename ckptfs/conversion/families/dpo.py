"""DPO, preference training: a Hugging Face decoder <-> its policy and reference model in one Cerebras checkpoint.

The formats ``cs-2.1-dpo`` and later. The config names the decoder: ``model_type`` in Hugging Face,
``model_name`` in Cerebras. Its Cerebras keys begin with ``policy_model.model.``; after all of these they are repeated
with ``ref_model.model.``. To Hugging Face, the reference model is left out.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from ckptfs.conversion.config import ConfigTable
from ckptfs.conversion.families.bloom import BLOOM
from ckptfs.conversion.families.falcon import FALCON
from ckptfs.conversion.families.gpt2 import GPT2
from ckptfs.conversion.families.gpt_neox import GPT_NEOX
from ckptfs.conversion.families.gptj import GPTJ
from ckptfs.conversion.families.llama import LLAMA
from ckptfs.conversion.families.mistral import MISTRAL
from ckptfs.conversion.families.mpt import MPT
from ckptfs.conversion.families.santacoder import SANTACODER
from ckptfs.conversion.families.starcoder import STARCODER
from ckptfs.conversion.family import Family
from ckptfs.conversion.folding import mup
from ckptfs.conversion.rules import Extra, Generate, Rule, Side, Table, copy, cs_only, under
from ckptfs.errors import MissingField, UnsupportedValue

POLICY = "policy_model.model."
REFERENCE = "ref_model.model."
DECODERS = (BLOOM, FALCON, GPT2, GPTJ, GPT_NEOX, LLAMA, MISTRAL, MPT, SANTACODER, STARCODER)
MODELS = {family.name: family for family in DECODERS}
TRAINING = {"beta": 0.1, "reference_free": False}
"""The section ``dpo`` that the converter writes."""


def twice(rule: Rule) -> Rule:
    """*rule*, with its Cerebras keys under `POLICY`, which writes all of them under `REFERENCE` as well."""
    (policy,) = under("", POLICY, [rule])
    copies = [Extra(key.prefixed(REFERENCE), reference(copy), position=2, of=i) for i, key in enumerate(rule.cs)]
    made = [
        Extra(e.template.prefixed(REFERENCE), reference(e.generate), e.position + 2, e.if_present, e.of)
        for e in rule.cs_extra
    ]
    return replace(policy, cs_extra=(*policy.cs_extra, *copies, *made))


def reference(generate: Generate) -> Generate:
    """*generate* for the reference model, whose tensors are never read in place of the policy's."""
    return lambda context, tensor: generate(context, tensor)


def config_of(decoder: str, table: ConfigTable) -> ConfigTable:
    """*table*, with fields for the decoder's name and its training."""
    constants, write = {**table.cs.constants, "model_name": decoder}, {**table.cs.write, "dpo": TRAINING}
    ignored = {**table.cs.ignored, "dpo": "a setting of training"}
    return replace(table, cs=replace(table.cs, constants=constants, write=write, ignored=ignored))


def dpo(decoder: Family) -> Family:
    """The DPO model of *decoder*. The converter writes the newest config, whichever release is asked for."""
    return decoder.derived(
        name="dpo",
        mup=decoder.mup,
        table=Table((*map(twice, decoder.table.rules), *cs_only(REFERENCE + "{*}"))),
        config=config_of(decoder.name, decoder.config),
        flavours=tuple((applies, config_of(decoder.name, table)) for applies, table in decoder.flavours),
        cs_name="dpo",
        since=max(decoder.since, (2, 1)),
        variant="dpo",
        newest_config=True,
        mup_since=(0, 0),
        mup_rules=mup.under(POLICY, decoder.mup_rules),
        notes=NOTES,
    )


def resolve(config: Mapping[str, Any], side: Side) -> Family:
    """The DPO model of the decoder that ``config.json`` or a ``model`` section names."""
    field = "model_type" if side == "hf" else "model_name"
    name = config.get(field)
    if name is None:
        raise MissingField("dpo", field, f"it tells the decoder: {', '.join(MODELS)}")
    found = "gpt-neox" if (side, name) == ("hf", "gpt_neox") else name
    if not isinstance(found, str) or found not in MODELS:
        raise UnsupportedValue("dpo", field, name, f"only {', '.join(MODELS)} can be converted")
    return dpo(MODELS[found])


NOTES = "decoder by model_type or model_name; the reference model is a copy of the policy, and left out on the way back"
DPO = replace(dpo(GPT2), architecture="as the decoder's", resolve=resolve)
FAMILIES = (DPO,)
