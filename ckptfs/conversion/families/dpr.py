"""DPR and Dragon: two BERT encoders, for questions and for contexts <-> Cerebras DPRModel, releases 2.2 and later.

On the Hugging Face side each is a model of its own, DPRQuestionEncoder and DPRContextEncoder, or BertModel twice.
Poolers are dropped both ways: Cerebras has none here.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from ckptfs.conversion.components import component, component_config, joined
from ckptfs.conversion.config import Config, ConfigTable, Fields, FieldTransform, SideTable
from ckptfs.conversion.families.bert import CONFIG as BERT
from ckptfs.conversion.families.bert import ENCODER
from ckptfs.conversion.families.decoder import no_numbers
from ckptfs.conversion.family import Family
from ckptfs.conversion.rules import Rule, Table, cs_only, hf_only, under

BODY = [*ENCODER, *hf_only("pooler.dense.{p}"), *cs_only("pooler.pooler.ffn.0.linear_layer.{p}")]
FOLDERS = ("q_encoder", "ctx_encoder")


def encoders(question: str, context: str) -> Table:
    """Both encoders, with these Hugging Face prefixes."""
    rules: list[Rule] = component("q_encoder", "question_encoder.", "q_encoder", under(question, "", BODY))
    return Table((*rules, *component("ctx_encoder", "ctx_encoder.", "ctx_encoder", under(context, "", BODY))))


def projection_to_cs(fields: Fields) -> Config:
    size = fields["projection_dim"]
    if size not in (0, fields["hidden_size"]):
        fields.refuse("projection_dim", f"only 0 and the hidden size, {fields['hidden_size']}, can be converted")
    return {"add_pooling_layer": size != 0}


def projection_to_hf(fields: Fields) -> Config:
    size = fields.need("hidden_size", "the projection has it, too") if fields["add_pooling_layer"] else 0
    return {"projection_dim": size}


PROJECTION = FieldTransform(("projection_dim",), ("add_pooling_layer",), projection_to_cs, projection_to_hf)


def encoder_config(folder: str, model_type: str, cs: dict[str, Any], **hf: Any) -> ConfigTable:
    """One encoder; *cs* and *hf* are what is added to either side."""
    return component_config(
        folder,
        folder,
        replace(
            BERT,
            transforms=(*BERT.transforms, PROJECTION),
            hf=replace(BERT.hf, constants={"model_type": model_type}, write=hf),
            cs=replace(BERT.cs, write={"freeze_ffn_bias_in_glu": False, **cs}),
        ),
    )


def top(**add: Any) -> ConfigTable:
    """Fields of the whole model; Hugging Face's encoders take the first token, as ``pooler_type: cls`` does."""
    ignored = dict.fromkeys(add, "a setting of training")
    return ConfigTable({}, SideTable(), SideTable(write=add, require={"pooler_type": "cls"}, ignored=ignored))


def dpr_config(top: ConfigTable, **cs: Any) -> ConfigTable:
    name = "facebook/dpr-{}-single-nq-base"
    return joined(
        encoder_config(
            *("q_encoder", "dpr", cs),
            _name_or_path=name.format("question_encoder"),
            architectures=["DPRQuestionEncoder"],
        ),
        encoder_config(
            *("ctx_encoder", "dpr", cs),
            _name_or_path=name.format("ctx_encoder"),
            architectures=["DPRContextEncoder"],
        ),
        top,
    )


def dragon_config(**cs: Any) -> ConfigTable:
    return joined(*(encoder_config(folder, "bert", cs, architectures=["BertModel"]) for folder in FOLDERS), TOP)


TOP = top(
    pooler_type="cls",
    use_biencoder=True,
    mutual_information=False,
    softmax_temperature=1,
    compute_eval_metrics=False,
)
NOTES = "two folders, q_encoder and ctx_encoder; poolers are dropped"
DPR = Family(
    name="dpr",
    table=encoders("question_encoder.bert_model.", "ctx_encoder.bert_model."),
    config=dpr_config(TOP, name="bert_model"),
    sizes=no_numbers,
    cs_name="dpr",
    hf_type="q_encoder/dpr",
    architecture="DPRQuestionEncoder, DPRContextEncoder",
    mup="refuse",
    since=(2, 2),
    notes=NOTES,
    components=FOLDERS,
    sections=FOLDERS,
)
DPR_2_3 = replace(DPR, until=(2, 3), config=dpr_config(TOP))
DPR_2_2 = replace(DPR, until=(2, 2), config=dpr_config(top(scale_similarity=False)))
DPR_FAMILY = replace(DPR, older=(DPR_2_2, DPR_2_3))

DRAGON = DPR.derived(
    name="dragon",
    mup="refuse",
    table=encoders("", ""),
    config=dragon_config(name="dpr"),
    hf_type="q_encoder/bert",
    architecture="BertModel, BertModel",
    since=(2, 3),
)
DRAGON_FAMILY = replace(DRAGON, older=(replace(DRAGON, until=(2, 3), config=dragon_config()),))
FAMILIES = (DPR_FAMILY, DRAGON_FAMILY)
