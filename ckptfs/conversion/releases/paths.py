"""The steps of each model: which releases are connected, and what changed in the names of its tensors.

Facts from the public converter of release 2.10. Models that are not listed have had one layout since their first
release.
"""

from __future__ import annotations

from ckptfs.conversion.families import bert
from ckptfs.conversion.family import Family
from ckptfs.conversion.releases import backbone, dpo, t5
from ckptfs.conversion.releases.keys import DropPrefix, Naming, Rename, Tie, TieSeq2Seq, reverse
from ckptfs.conversion.releases.steps import Change, Step, step, unchanged
from ckptfs.conversion.rules import Table, same, under


def steps_of(family: Family) -> tuple[Step, ...]:
    """The steps of that model or, for an alias, of the model it is another name of."""
    for name in (family.name, family.alias_of):
        if name in STEPS:
            return STEPS[name]
    return unchanged(family.since, family.until, variant=family.variant)


# ---------------------------------------------------------------------------------------------------- names of 2.0, 2.1


def positions(embedding: str, helper: str | None = None) -> dict[str, str]:
    """Position tensors of the layer *embedding*, and of the *helper* that stood beside the model before 2.1."""
    names = {
        f"{embedding}.position_embeddings.weight": f"{embedding}.position_embeddings.embed.weight",
        f"{embedding}.position_embeddings": f"{embedding}.position_embeddings.fpe",
    }
    return names | ({f"{helper}.": f"{embedding}.position_embed_helper."} if helper else {})


DECODER_POSITIONS = Rename(positions("embedding_layer", "relative_pe_helper"))
BERT_POSITIONS = Rename(
    {k: v for part in ("bert_encoder", "bert") for k, v in positions(f"{part}.embedding_layer").items()}
)
T5_POSITIONS = Rename(
    {
        k: v
        for side in ("encoder", "decoder")
        for k, v in positions(f"{side}_embeddings", f"relative_position_{side}").items()
    }
)

# -------------------------------------------------------------------------------------- shared tensors of 1.8, 1.9, 2.0

DECODER_TIES = (
    Tie("lm_head.weight", "embedding_layer.word_embeddings.weight", field="share_embedding_weights"),
    Tie("transformer_decoder.norm.weight", "ln_f.weight"),
    Tie("transformer_decoder.norm.bias", "ln_f.bias"),
)
BERT_TIE = Tie(
    "bert_encoder.embedding_layer.word_embeddings.weight",
    f"{bert.DECODER}weight",
    field="share_embedding_weights",
)

# --------------------------------------------------------------------------------------------------------- names of 1.6

FIXED = same("embeddings.position_embeddings", "embedding_layer.position_embeddings.fpe")
CLASSIFIER = Table(
    (*under("bert.", "bert.", [*bert.ENCODER, bert.POOLER, FIXED]), same("classifier.{p}", "classifier.{p}"))
)
PRETRAINING = Table((*bert.TENSORS.rules, *under("bert.", "bert_encoder.", [FIXED])))
"""In 1.6 the tensors of a BERT were named as in Hugging Face's: these tables lead to the names of 2.1."""

# ------------------------------------------------------------------------------------------------------------ the steps


def decoder(*shared: tuple[int, int]) -> tuple[Step, ...]:
    """Steps of a decoder. *shared*: the releases from which shared tensors are filled in on the way to 2.0."""
    before = [step((1, 8), (1, 9))] if (1, 8) in shared else []
    filled = [step(release, (2, 0), *DECODER_TIES) for release in shared]
    return (*before, *filled, step((2, 0), (2, 1), DECODER_POSITIONS), *unchanged((2, 1)))


def skipping(since: tuple[int, int]) -> tuple[Step, ...]:
    """Direct steps to the releases after the next, which do less than the steps between: see `Step.alone`."""
    return tuple(step(since, (since[0], n), alone=True) for n in range(since[1] + 2, 10))


def oldest(*changes: Change) -> tuple[Step, ...]:
    """Steps of a BERT from 1.6 and 1.7 on, up to 1.9."""
    direct = [step(a, b, alone=True) for a, b in (((1, 7), (1, 9)), ((1, 7), (2, 0)))]
    far = [step((1, 6), b, *changes, alone=True, model_only=True) for b in ((1, 9), (2, 0))]
    near = [step((1, 6), b, *changes, model_only=True) for b in ((1, 7), (1, 8))]
    return (*near, *far, step((1, 7), (1, 8)), *direct, step((1, 8), (1, 9)))


BERT_SINCE_2_0 = (step((2, 0), (2, 1), BERT_POSITIONS), *unchanged((2, 1)))
BERT = (
    *oldest(Naming(PRETRAINING), reverse(BERT_POSITIONS)),
    *(step(old, (2, 0), BERT_TIE) for old in ((1, 8), (1, 9))),
    *BERT_SINCE_2_0,
)
BERT_CLASSIFIER = (
    *oldest(Naming(CLASSIFIER), reverse(BERT_POSITIONS)),
    step((1, 9), (2, 0)),
    *BERT_SINCE_2_0,
)
T5 = (
    *(step((1, 6), new, Naming(t5.TENSORS, t5.dims, t5.as_hf), model_only=True) for new in ((1, 7), (1, 8))),
    step((1, 7), (1, 8), DropPrefix()),
    step((1, 8), (1, 9)),
    *(step(old, (2, 0), TieSeq2Seq()) for old in ((1, 8), (1, 9))),
    step((2, 0), (2, 1), T5_POSITIONS),
    *unchanged((2, 1)),
)
SINCE_1_8 = decoder((1, 8), (1, 9))
SINCE_1_9 = decoder((1, 9))
SINCE_2_0 = decoder()
DECODERS = ("gpt2", "gptj", "gpt-neox", "codegen", "bloom", "llama", "btlm", "falcon", "starcoder")
BERT_CLASSIFIERS = ("bert-sequence-classifier", "bert-token-classifier", "bert-summarization", "bert-qa")
STEPS: dict[str, tuple[Step, ...]] = {
    **{f"{name}-headless": SINCE_2_0 for name in DECODERS},
    **dict.fromkeys(("gptj-headless", "codegen-headless"), unchanged((2, 0))),  # a step of their own, as listed there
    **dict.fromkeys(DECODERS, SINCE_2_0),
    "bert": BERT,
    **dict.fromkeys(BERT_CLASSIFIERS, BERT_CLASSIFIER),
    "roberta": BERT_SINCE_2_0,
    "jais": SINCE_2_0,
    **dict.fromkeys(("t5", "transformer", "ul2", "flan-ul2"), T5),
    "gpt2": (*SINCE_1_8, *skipping((2, 2)), *backbone.STEPS),
    "dpo": dpo.STEPS,
    **dict.fromkeys(("gptj", "gpt-neox", "codegen"), SINCE_1_8),
    **dict.fromkeys(("bloom", "llama"), SINCE_1_9),
    "dpr": (*unchanged((2, 2)), *skipping((2, 2))),
}
