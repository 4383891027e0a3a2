"""Views of whole sources: what cannot be shown is refused, never left out silently."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from ckptfs.conversion import registry
from ckptfs.conversion.conversion import Conversion
from ckptfs.conversion.format_names import parse_format
from ckptfs.conversion.hf import between_hf
from ckptfs.conversion.sections import model_section
from ckptfs.errors import MappingError, NoPath
from ckptfs.formats.source import Container, Item, Source
from ckptfs.tensors.ranges import to_bytes
from tests.factories import ArrayTensor

GPT2 = registry.family("gpt2")
CONFIG: dict[str, Any] = {
    "model": {
        "hidden_size": 4,
        "num_heads": 2,
        "num_hidden_layers": 1,
        "max_position_embeddings": 3,
        "dropout_rate": 0.0,
    }
}
EMBEDDING = Item("model.embedding_layer.word_embeddings.weight", "tensor", ArrayTensor(np.zeros((5, 4), np.float16)))
NESTED = Container("dict", ("model",), ())


def view(
    *items: Item, drop: bool = False, tree: Container | None = NESTED, src: str = "cs-2.5", **config: Any
) -> Conversion:
    source = Source("x.mdl", "cerebras-h5", "0.5", None, {i.key: i for i in items}, tree)
    whole = {**CONFIG, **config}
    return between_hf(source, GPT2, whole, parse_format(src), parse_format("hf"), drop_unmatched=drop)


def test_config_gets_what_loaders_want() -> None:
    found = view(EMBEDDING).config
    assert (found["architectures"], found["torch_dtype"]) == (["GPT2LMHeadModel"], "float16")


def test_other_states_are_not_the_model() -> None:
    step = Item("global_step", "scalar", value=3)
    assert list(view(EMBEDDING, step).tensors) == ["transformer.wte.weight"]


def test_a_leading_model_prefix_is_accepted() -> None:
    prefixed = Item("model." + EMBEDDING.key, "tensor", EMBEDDING.tensor)
    assert list(view(prefixed).tensors) == ["transformer.wte.weight"]
    flat = Item(EMBEDDING.key.removeprefix("model."), "tensor", EMBEDDING.tensor)
    assert list(view(flat, tree=None).tensors) == ["transformer.wte.weight"]


@pytest.mark.parametrize(
    "item",
    [
        Item("model.lm_head.weight", "object", reason="needs dill", class_name="os.system"),
        Item("model.lm_head.weight", "link", reason="its file is gone", target="x"),
        Item("model.lm_head.weight", "none"),
        Item("model.unheard_of", "scalar", value=1),
    ],
    ids=lambda i: i.kind,
)
def test_a_gap_in_the_model_is_refused_by_name(item: Item) -> None:
    with pytest.raises(MappingError, match=item.key.removeprefix("model.")) as refusal:
        view(EMBEDDING, item)
    if item.reason:
        assert item.reason in str(refusal.value)
    assert list(view(EMBEDDING, item, drop=True).tensors) == ["transformer.wte.weight"]


def test_a_gap_that_is_dropped_anyway_does_not_matter() -> None:
    assert list(view(EMBEDDING, Item("model.ln_f.weight", "none")).tensors) == ["transformer.wte.weight"]


def test_formats_that_are_not_connected() -> None:
    with pytest.raises(NoPath, match=r"cs-1\.9 to hf.*cs-2\.1 … cs-2\.10"):
        view(EMBEDDING, src="cs-1.9")
    with pytest.raises(NoPath, match="hf to hf"):
        view(EMBEDDING, src="hf")


def test_half_precision_counts_at_the_top_of_the_config_only() -> None:
    assert view(EMBEDDING, fp16_type="cbfloat16").config["use_bfloat16"] is True
    assert view(EMBEDDING, fp16_type="float16").config["use_bfloat16"] is False
    assert "use_bfloat16" not in view(EMBEDDING, precision={"fp16_type": "cbfloat16"}).config
    with pytest.raises(Exception, match="fp16_type is 'x'"):
        view(EMBEDDING, fp16_type="x")


def test_model_section_of_both_layouts() -> None:
    assert model_section({"model": {"a": 1}}) == {"a": 1}
    assert model_section({"trainer": {"init": {"model": {"a": 2}}}, "model": {"a": 1}}) == {"a": 2}


HEAD = Item("model.lm_head.weight", "tensor", ArrayTensor(np.ones((5, 4), np.float16)))
NO_WORDS = Item(EMBEDDING.key, "none")
HEADLESS = registry.family("gpt2-headless")


def headless(*items: Item, **fields: Any) -> Conversion:
    source = Source("x.mdl", "cerebras-h5", "0.5", None, {i.key: i for i in items}, NESTED)
    config = {"model": {**CONFIG["model"], **fields}}
    return between_hf(source, HEADLESS, config, parse_format("cs-2.5"), parse_format("hf"))


@pytest.mark.parametrize("items", [(NO_WORDS, HEAD), (HEAD,)], ids=["none", "missing"])
def test_an_embedding_that_is_kept_as_the_tied_head(items: tuple[Item, ...]) -> None:
    found = headless(*items).tensors
    assert {key: to_bytes(tensor) for key, tensor in found.items()} == {"wte.weight": to_bytes(HEAD.tensor)}


def test_an_embedding_of_its_own_is_not_the_heads() -> None:
    with pytest.raises(MappingError, match="word_embeddings"):
        headless(NO_WORDS, HEAD, share_embedding_weights=False)
    assert to_bytes(headless(EMBEDDING, HEAD).tensors["wte.weight"]) == to_bytes(EMBEDDING.tensor)
    with pytest.raises(MappingError, match="word_embeddings"):
        view(NO_WORDS, HEAD)  # a model with a head has both
