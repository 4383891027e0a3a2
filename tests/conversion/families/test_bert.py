"""BERT, its task heads, RoBERTa and ESM-2: what no recorded conversion shows."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ckptfs.conversion import registry
from ckptfs.conversion.conversion import Conversion
from ckptfs.conversion.format_names import parse_format
from ckptfs.conversion.hf import between_hf
from ckptfs.conversion.resolve import convert_config
from ckptfs.errors import CkptfsError, ConfigError, MissingField, NoPath, UnsupportedValue
from ckptfs.formats.source import Item, Source
from ckptfs.tensors.ranges import to_numpy
from tests.factories import ArrayTensor

SIZES = {"vocab_size": 7, "hidden_size": 4, "num_hidden_layers": 1, "num_attention_heads": 2}
CS_SIZES = {"vocab_size": 7, "hidden_size": 4, "num_hidden_layers": 1, "num_heads": 2, "pooler_nonlinearity": "tanh"}
CS_ROBERTA = {**CS_SIZES, "disable_nsp": True, "mask_padding_in_positional_embed": True, "pad_token_id": 1}
CS_ESM = {**CS_SIZES, "disable_nsp": True, "use_final_layer_norm": True, "mask_padding_in_positional_embed": True}
FAMILIES = ["bert", "bert-sequence-classifier", "bert-token-classifier", "bert-qa", "roberta", "esm-2"]
WORDS, BIAS = np.ones((7, 4), np.float16), np.arange(7, dtype=np.float16)
CS_WORDS = "bert_encoder.embedding_layer.word_embeddings.weight"
CS_BIAS = "bert_mlm_head.classifier.ffn.0.linear_layer.bias"


def view(model: str, config: dict[str, Any], src: str, tgt: str, **arrays: np.ndarray[Any, Any]) -> Conversion:
    """*arrays* are tensors with ``__`` for the dots of their keys."""
    keys = {name.replace("__", "."): array for name, array in arrays.items()}
    items = {key: Item(key, "tensor", ArrayTensor(array)) for key, array in keys.items()}
    source = Source("x", "toy", None, None, items, None)
    return between_hf(source, registry.family(model), config, parse_format(src), parse_format(tgt))


def to_cs(model: str, arrays: dict[str, np.ndarray[Any, Any]], **config: Any) -> Conversion:
    kind = registry.family(model).hf_type
    return view(model, {"model_type": kind, **SIZES, **config}, "hf", "cs-2.9", **arrays)


def to_hf(model: str, arrays: dict[str, np.ndarray[Any, Any]], src: str = "cs-2.9", **config: Any) -> Conversion:
    return view(model, {"model": config}, src, "hf", **arrays)


def cs_fields(model: str, **config: Any) -> dict[str, Any]:
    kind = registry.family(model).hf_type
    found: dict[str, Any] = convert_config({"model_type": kind, **SIZES, **config}, "hf", "cs-2.3", model=model)[0]
    fields: dict[str, Any] = found["model"]
    return fields


def hf_fields(model: str, **config: Any) -> dict[str, Any]:
    return convert_config({"model": config}, "cs-2.9", "hf", model=model)[0]


# ------------------------------------------------------------------------------------------------------------ tensors


@pytest.mark.parametrize(
    ("model", "first", "second"),
    [
        ("bert", "cls.predictions.decoder.bias", "cls.predictions.bias"),
        ("roberta", "lm_head.decoder.bias", "lm_head.bias"),
    ],
)
def test_the_bias_of_a_head_under_either_name(model: str, first: str, second: str) -> None:
    words = {f"{model}.embeddings.word_embeddings.weight": WORDS}
    for given_keys in ({second: BIAS}, {first: BIAS, second: BIAS + 1}, {second: BIAS + 1, first: BIAS}):
        found = to_cs(model, {**words, **given_keys}).tensors
        assert list(found) == [CS_WORDS, CS_BIAS]
        np.testing.assert_array_equal(to_numpy(found[CS_BIAS]), BIAS)


def test_only_roberta_makes_a_bias() -> None:
    found = to_cs("roberta", {"roberta.embeddings.word_embeddings.weight": WORDS})
    made = to_numpy(found.tensors[CS_BIAS])
    assert (found.generated, made.dtype, made.tolist()) == ((CS_BIAS,), np.float32, [0.0] * 7)
    assert list(to_cs("bert", {"bert.embeddings.word_embeddings.weight": WORDS}).tensors) == [CS_WORDS]


@pytest.mark.parametrize("stored", [True, False])
@pytest.mark.parametrize("config", [{"num_segments": 0}, {}])
def test_roberta_without_segments_gets_one_of_zeros(stored: bool, config: dict[str, Any]) -> None:
    segments = {"bert_encoder.embedding_layer.segment_embeddings.weight": np.ones((2, 4), np.float16)}
    arrays = {**(segments if stored else {}), CS_WORDS: WORDS}
    found = to_hf("roberta", arrays, **CS_ROBERTA, **config)
    key = "roberta.embeddings.token_type_embeddings.weight"
    row = to_numpy(found.tensors[key])
    assert (row.tolist(), row.dtype, found.config["type_vocab_size"]) == ([[0.0] * 4], np.float32, 1)
    assert list(found.tensors)[0 if stored else -1] == key


def test_roberta_keeps_the_segments_that_it_has() -> None:
    arrays = {CS_WORDS: WORDS, "bert_encoder.embedding_layer.segment_embeddings.weight": np.ones((2, 4), np.float16)}
    found = to_hf("roberta", arrays, **CS_ROBERTA, num_segments=2)
    assert found.tensors["roberta.embeddings.token_type_embeddings.weight"].shape == (2, 4)
    assert found.generated == ()


@pytest.mark.parametrize(
    ("model", "config", "positions", "ids"),
    [
        ("bert", {**CS_SIZES, "max_position_embeddings": 5}, 5, 5),
        ("bert", CS_SIZES, 5, 5),
        ("roberta", {**CS_ROBERTA, "max_position_embeddings": 5, "pad_token_id": 3}, 9, 9),
        ("esm-2", {**CS_ESM, "position_embedding_type": "learned", "max_position_embeddings": 5}, 6, 6),
    ],
)
@pytest.mark.parametrize("suffix", ["embed.weight", "weight"])
def test_position_ids(model: str, config: dict[str, Any], positions: int, ids: int, suffix: str) -> None:
    key = f"bert_encoder.embedding_layer.position_embeddings.{suffix}"  # the shorter one is that of releases before 2.1
    found = to_hf(model, {key: np.zeros((positions, 4), np.float16)}, **config)
    prefix = {"esm-2": "esm"}.get(model, model)
    assert list(found.tensors) == [
        f"{prefix}.embeddings.position_embeddings.weight",
        f"{prefix}.embeddings.position_ids",
    ]
    made = to_numpy(found.tensors[f"{prefix}.embeddings.position_ids"])
    assert (made.dtype, made.tolist()) == (np.int64, [list(range(ids))])


@pytest.mark.parametrize("size", ["many", None, -1, 10**12])
def test_position_ids_need_a_number(size: object) -> None:
    key = "bert_encoder.embedding_layer.position_embeddings.embed.weight"
    with pytest.raises(MissingField, match="position_ids"):
        to_hf("bert", {key: np.zeros((5, 4), np.float16)}, **CS_SIZES, max_position_embeddings=size)


@pytest.mark.parametrize("heads", [1, 2, 3])
def test_esm_turns_the_rows_of_each_head(heads: int) -> None:
    """Six rows a head: x0 x1 x2 y0 y1 y2 become x0 y0 x1 y1 x2 y2."""
    query = np.arange(6 * heads, dtype=np.float32)
    arrays = {"esm.encoder.layer.0.attention.self.query.bias": query, "esm.encoder.layer.0.LayerNorm.gamma": query}
    sizes = {"hidden_size": 6 * heads, "num_attention_heads": heads, "max_position_embeddings": 9}
    found = to_cs("esm-2", arrays, position_embedding_type="rotary", **sizes)
    turned, same = (to_numpy(tensor) for tensor in found.tensors.values())
    assert turned.reshape(heads, 6).tolist() == [[6 * h + i for i in (0, 3, 1, 4, 2, 5)] for h in range(heads)]
    assert same.tolist() == query.tolist()
    straight = to_cs("esm-2", arrays, position_embedding_type="absolute", pad_token_id=1, **sizes)
    assert [to_numpy(t).tolist() for t in straight.tensors.values()] == [query.tolist()] * 2


def test_esm_drops_what_cerebras_has_no_place_for() -> None:
    buffers = [
        *("esm.contact_head.regression.bias", "esm.embeddings.position_ids", "esm.rotary_embeddings.inv_freq"),
        *(f"esm.encoder.layer.{i}.attention.self.rotary_embeddings.inv_freq" for i in (0, 11, "*")),
        "esm.embeddings.position_embeddings.weight",
    ]
    arrays = dict.fromkeys(buffers, np.zeros((1, 3), np.float32))
    found = to_cs("esm-2", arrays, position_embedding_type="rotary")
    assert (list(found.tensors), sorted(found.dropped)) == ([], sorted(buffers))


# ------------------------------------------------------------------------------------------------------------ configs


def test_a_pooler_is_as_linear_as_its_encoder() -> None:
    sizes = {k: v for k, v in CS_SIZES.items() if k != "pooler_nonlinearity"}
    assert hf_fields("bert", **sizes, encoder_nonlinearity="tanh")["hidden_act"] == "tanh"
    for config in (sizes, {**sizes, "encoder_nonlinearity": "relu"}):
        with pytest.raises(UnsupportedValue, match="pooler_nonlinearity"):
            hf_fields("bert", **config)
    esm = {k: v for k, v in CS_ESM.items() if k != "pooler_nonlinearity"}  # has no pooler
    assert "hidden_act" not in hf_fields("esm-2", **esm, max_position_embeddings=5)


def test_the_head_is_as_linear_as_the_encoder() -> None:
    assert cs_fields("bert", hidden_act="relu")["mlm_nonlinearity"] == "relu"
    assert cs_fields("roberta", hidden_act="relu")["mlm_nonlinearity"] == "gelu"
    assert hf_fields("bert", **CS_SIZES, encoder_nonlinearity="relu", mlm_nonlinearity=None)["hidden_act"] == "relu"
    with pytest.raises(UnsupportedValue, match="mlm_nonlinearity"):
        hf_fields("bert", **CS_SIZES, encoder_nonlinearity="relu", mlm_nonlinearity="gelu")
    with pytest.raises(UnsupportedValue, match="mlm_nonlinearity"):
        hf_fields("roberta", **CS_ROBERTA, encoder_nonlinearity="relu")


@pytest.mark.parametrize(
    ("config", "labels", "problem"),
    [
        ({"num_labels": 1}, 1, "regression"),
        ({"id2label": {"0": "a"}, "problem_type": None}, 1, "regression"),
        ({"num_labels": 3, "id2label": {"0": "a"}, "problem_type": "multi_label_classification"}, 3, None),
        ({"problem_type": "single_label_classification"}, 2, None),
        ({}, 2, "refused"),
        ({"id2label": {"0": "a", "1": "b", "2": "c"}}, 3, "refused"),
    ],
)
def test_what_a_sequence_classifier_is_for(config: dict[str, Any], labels: int, problem: str | None) -> None:
    model = "bert-sequence-classifier"
    if problem == "refused":
        with pytest.raises(UnsupportedValue, match=r"problem_type.*multi_label_classification"):
            cs_fields(model, **config)
        return
    found = cs_fields(model, **config)
    assert (found["num_labels"], found["problem_type"]) == (labels, problem or config["problem_type"])
    assert hf_fields(model, **found)["num_labels"] == labels


@pytest.mark.parametrize(
    ("model", "field"),
    [("bert-sequence-classifier", "task_dropout"), ("bert-token-classifier", "encoder_output_dropout_rate")],
)
def test_the_dropout_of_a_head(model: str, field: str) -> None:
    base = {"num_labels": 1, "hidden_dropout_prob": 0.25}
    for config, expected in (({}, 0.25), ({"classifier_dropout": None}, 0.25), ({"classifier_dropout": 0.0}, 0.0)):
        found = cs_fields(model, **base, **config)
        assert found[field] == expected
        assert hf_fields(model, **found)["classifier_dropout"] == expected


def test_answers_have_two_ends() -> None:
    assert "num_labels" not in cs_fields("bert-qa", num_labels=2)
    for config in ({"num_labels": 3}, {"id2label": {"0": "a"}}):
        with pytest.raises(UnsupportedValue, match="num_labels"):
            cs_fields("bert-qa", **config)


def test_positions_of_roberta_and_esm_count_from_the_padding() -> None:
    assert cs_fields("roberta")["max_position_embeddings"] == 510
    assert cs_fields("roberta", max_position_embeddings=20, pad_token_id=4)["max_position_embeddings"] == 15
    back = hf_fields("roberta", **{**CS_ROBERTA, "pad_token_id": 4}, max_position_embeddings=15)
    assert (back["max_position_embeddings"], back["pad_token_id"]) == (20, 4)
    esm = {"pad_token_id": 4, "max_position_embeddings": 20}
    assert cs_fields("esm-2", **esm)["max_position_embeddings"] == 15
    assert cs_fields("esm-2", **esm, position_embedding_type="rotary")["max_position_embeddings"] == 20


def test_learned_positions_of_esm_need_a_padding_token() -> None:
    with pytest.raises(MissingField, match="pad_token_id"):
        cs_fields("esm-2")
    assert "pad_token_id" not in cs_fields("esm-2", position_embedding_type="rotary")


def test_the_activation_of_esm_goes_one_way() -> None:
    """The converter copies it to Cerebras, where it has to be gelu on the way back; Hugging Face has no such field."""
    assert cs_fields("esm-2", pad_token_id=1)["encoder_nonlinearity"] == "gelu"
    assert cs_fields("esm-2", pad_token_id=1, hidden_act="relu")["encoder_nonlinearity"] == "relu"
    assert "hidden_act" not in hf_fields("esm-2", **CS_ESM, encoder_nonlinearity="gelu", max_position_embeddings=5)
    with pytest.raises(UnsupportedValue, match="encoder_nonlinearity"):
        hf_fields("esm-2", **CS_ESM, encoder_nonlinearity="relu", max_position_embeddings=5)


def test_esm_rotary_rows() -> None:
    assert cs_fields("esm-2", position_embedding_type="rotary")["rotary_dim"] == 2
    assert "rotary_dim" not in cs_fields("esm-2", pad_token_id=1)
    found = hf_fields("esm-2", **CS_ESM, position_embedding_type="rotary")
    assert (found["model_type"], found["position_embedding_type"]) == ("esm", "rotary")
    with pytest.raises(UnsupportedValue, match="rope_theta"):
        cs_fields("esm-2", position_embedding_type="rotary", rope_theta=500.0)
    assert cs_fields("esm-2", pad_token_id=1, rope_theta=500.0)["position_embedding_type"] == "learned"


@pytest.mark.parametrize("model", FAMILIES)
def test_hugging_face_configs_survive(model: str) -> None:
    """Every field of the shared table, with a value of its own, there and back."""
    config = {
        "initializer_range": 0.5,
        "intermediate_size": 11,
        "hidden_dropout_prob": 0.125,
        "attention_probs_dropout_prob": 0.375,
        "layer_norm_eps": 0.001,
        "max_position_embeddings": 13,
        "tie_word_embeddings": False,
        "position_embedding_type": "absolute",
        **({"pad_token_id": 2} if model in ("roberta", "esm-2") else {}),
        **({"num_labels": 1} if "classifier" in model else {}),
        **({"type_vocab_size": 3} if model == "roberta" else {}),
        **({"token_dropout": True, "mask_token_id": 6, "emb_layer_norm_before": True} if model == "esm-2" else {}),
    }
    back = hf_fields(model, **cs_fields(model, **config))
    assert {name: back[name] for name in (*config, *SIZES)} == {**config, **SIZES}
    assert back["architectures"] == [registry.family(model).architecture]


JUNK = st.one_of(
    st.none(), st.booleans(), st.integers(-3, 3), st.floats(), st.text(max_size=3), st.just([]), st.just({})
)


@settings(max_examples=60, deadline=None)
@given(st.sampled_from(FAMILIES), st.data())
def test_wrong_types_are_one_line(model: str, data: st.DataObject) -> None:
    """Any field with any value is converted or refused, never a traceback of another kind."""
    table = registry.family(model).config
    sides = {
        "hf": {"model_type": registry.family(model).hf_type, **SIZES, **table.hf.defaults},
        "cs": {**CS_SIZES, **table.cs.defaults},
    }
    for side, (src, tgt) in {"hf": ("hf", "cs-2.9"), "cs": ("cs-2.9", "hf")}.items():
        known = {
            *sides[side],
            *table.side(side).require,
            *(n for t in table.transforms for n in t.side(side)),
        }  # type: ignore[arg-type]
        names = data.draw(st.lists(st.sampled_from(sorted(known)), max_size=3, unique=True))
        config = {**sides[side], **{name: data.draw(JUNK) for name in names}}
        try:
            convert_config(config if side == "hf" else {"model": config}, src, tgt, model=model)
        except CkptfsError as error:
            assert isinstance(error, ConfigError)
            assert "\n" not in str(error)


# -------------------------------------------------------------------------------------------------- which family it is


@pytest.mark.parametrize("model", FAMILIES)
def test_architectures_tell_the_family(model: str) -> None:
    family = registry.family(model)
    config = {"model_type": family.hf_type, "architectures": [family.architecture]}
    assert [f.name for f in registry.by_hf_config(config)] == [model]


def test_without_architectures_all_are_tried() -> None:
    for classes in (None, [], ["BertForMaskedLM"], [{}], "BertForQuestionAnswering", 3):
        found = registry.by_hf_config({"model_type": "bert", "architectures": classes})
        assert [f.name for f in found][:4] == ["bert", "bert-qa", *FAMILIES[1:3]]


def test_cerebras_names_tell_the_family() -> None:
    names = {"bert/classifier": FAMILIES[1], "bert/token_classifier": FAMILIES[2], "esm2": "esm-2"}
    for name, model in names.items():
        assert [f.name for f in registry.by_cs_config(name, {})] == [model]
    assert [f.name for f in registry.by_cs_config("bert", CS_SIZES)][:2] == ["bert", "bert-qa"]
    assert registry.by_cs_config("bert", CS_ROBERTA)[0].name == "roberta"
    assert registry.by_cs_config("nobody", {}) == []


def test_summarization_has_no_hugging_face_side() -> None:
    with pytest.raises(NoPath, match="no Hugging Face model"):
        to_hf("bert-summarization", {}, **CS_SIZES)
    with pytest.raises(NoPath, match="no Hugging Face model"):
        view("bert-summarization", {"model_type": "bert", **SIZES}, "hf", "cs-2.9")


@pytest.mark.parametrize("model", FAMILIES)
def test_which_releases_fold_mup(model: str) -> None:
    base = {"roberta": CS_ROBERTA, "esm-2": {**CS_ESM, "rotary_dim": 2}}.get(model, CS_SIZES)
    config = {"model": {**base, "share_embedding_weights": True, "mup_base_hidden_size": 2}}
    for src in ("cs-2.2", "cs-2.3", "cs-2.10"):
        if model == "bert" and src != "cs-2.2":
            found = convert_config(config, src, "hf", model=model)[0]
            assert found["tie_word_embeddings"] is False
        else:
            with pytest.raises(ConfigError, match="muP"):
                convert_config(config, src, "hf", model=model)
