"""BERT with a head for a task: BertForSequenceClassification, …TokenClassification, …QuestionAnswering <-> Cerebras.

Releases 2.1 and later. Extractive summarization has no Hugging Face model: it is known for what happens between
Cerebras releases only.
"""

from __future__ import annotations

from dataclasses import replace

from ckptfs.conversion.config import Config, Fields
from ckptfs.conversion.families.bert import BERT, CONFIG, CS, ENCODER, HF, NAMES, POOLER
from ckptfs.conversion.rules import Table, same, under

BODY = under("bert.", "bert.", [*ENCODER, POOLER])
CLASSIFIER = Table((*BODY, same("classifier.{p}", "classifier.{p}")))
ANSWERS = Table((*BODY, same("qa_outputs.{p}", "classifier.{p}")))


def labels(fields: Fields) -> Config:
    """As many labels as have names, or two."""
    names = fields.get("id2label")
    return {} if "num_labels" in fields else {"num_labels": 2 if names is None else len(names)}


def dropout(fields: Fields) -> Config:
    """The head's dropout defaults to the encoder's."""
    given = fields.get("classifier_dropout")
    return {"classifier_dropout": fields["hidden_dropout_prob"] if given is None else given}


def problem(fields: Fields) -> Config:
    """One label means regression; with more of them, only the user knows whether several can hold at once."""
    if fields.get("problem_type") is not None:
        return {}
    if fields["num_labels"] != 1:
        kinds = "single_label_classification or multi_label_classification"
        fields.refuse("problem_type", f"add it to the config: {kinds}")
    return {"problem_type": "regression"}


SEQUENCE = BERT.derived(
    name="bert-sequence-classifier",
    mup="refuse",
    table=CLASSIFIER,
    config=replace(
        CONFIG,
        renames={
            **NAMES,
            "classifier_dropout": "task_dropout",
            "num_labels": "num_labels",
            "problem_type": "problem_type",
        },
        hf=replace(HF, normalize=(labels, dropout, problem), reads=("id2label",)),
    ),
    cs_name="bert/classifier",
    architecture="BertForSequenceClassification",
    notes="to Cerebras with several labels, config.json must say problem_type",
)
TOKENS = SEQUENCE.derived(
    name="bert-token-classifier",
    mup="refuse",
    config=replace(
        CONFIG,
        renames={**NAMES, "classifier_dropout": "encoder_output_dropout_rate", "num_labels": "num_classes"},
        hf=replace(HF, normalize=(labels, dropout), reads=("id2label",)),
        cs=replace(
            CS,
            write={"loss_weight": 1.0, "include_padding_in_loss": False},
            ignored={**CS.ignored, "include_padding_in_loss": "a setting of training"},
        ),
    ),
    cs_name="bert/token_classifier",
    architecture="BertForTokenClassification",
    notes="",
)
QUESTIONS = SEQUENCE.derived(
    name="bert-qa",
    mup="refuse",
    table=ANSWERS,
    config=replace(
        CONFIG,
        hf=replace(HF, constants={**HF.constants, "num_labels": 2}, normalize=(labels,), reads=("id2label",)),
    ),
    cs_name="bert",
    architecture="BertForQuestionAnswering",
    notes="its Cerebras configs say name: bert, as bert's",
)
SUMMARIZATION = BERT.derived(
    name="bert-summarization",
    mup="fold",
    table=Table(()),
    cs_name="bert/extractive_summarization",
    hf_type="",
    architecture="",
    since=(1, 6),
    hf_side=False,
    notes="no Hugging Face model; between Cerebras releases only",
)
FAMILIES = (QUESTIONS, SEQUENCE, TOKENS, SUMMARIZATION)
