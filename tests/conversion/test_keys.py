"""Templates match what they format, anchored, and nothing else."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ckptfs.conversion.keys import Template, blank

LAYER = Template("h.{i}.attn.{p}")


def test_match_gives_fields() -> None:
    assert LAYER.match("h.12.attn.weight") == {"i": 12, "p": "weight"}
    assert LAYER.format({"i": 12, "p": "bias"}) == "h.12.attn.bias"


@pytest.mark.parametrize(
    "key",
    [
        *("x.h.1.attn.weight", "h.1.attn.weight.x", "h.1.attn.weights", "h1.attn.weight", "h.1xattn.weight"),
        *("h.01.attn.weight", "h.-1.attn.weight", "h..attn.weight", "h.1.attn.gamma", "h.１.attn.weight"),
    ],
)
def test_match_is_anchored_and_exact(key: str) -> None:
    assert LAYER.match(key) is None


def test_scaled_numbers() -> None:
    template = Template("mm.{2*i}.{p}")
    assert template.match("mm.4.bias") == {"i": 2, "p": "bias"}
    assert template.match("mm.3.bias") is None
    assert template.format({"i": 2, "p": "bias"}) == "mm.4.bias"


def test_literal_dots_and_numbers() -> None:
    template = Template("layers.{i}.ffn.ffn.0.linear_layer.{p}")
    assert template.match("layers.3.ffn.ffn.0.linear_layer.weight") == {"i": 3, "p": "weight"}
    assert template.match("layers.3.ffn.ffn.1.linear_layer.weight") is None
    assert template.match("layers.3.ffnxffn.0.linear_layer.weight") is None


@given(st.integers(0, 10**6), st.integers(0, 99), st.sampled_from(["weight", "bias"]))
def test_format_then_match(i: int, e: int, p: str) -> None:
    template = Template("a.{i}.experts.{e}.w1.{p}")
    key = template.format({"i": i, "e": e, "p": p})
    assert template.match(key) == {"i": i, "e": e, "p": p}
    assert blank(key) in template.blanks()


def test_blank_replaces_whole_components_only() -> None:
    assert blank("h.0.ln_1.weight") == "h.#.ln_1.weight"
    assert blank("0.1.2") == "#.#.#"
    assert blank("a1.2b.3") == "a1.2b.#"


def test_numbers_counted_from_one() -> None:
    template = Template("block.{i+1}.bias")
    assert template.match("block.1.bias") == {"i": 0}
    assert template.match("block.0.bias") is None
    assert template.format({"i": 2}) == "block.3.bias"
    both = Template("mm.{2*i+1}.{p}")
    assert (both.match("mm.5.bias"), both.match("mm.4.bias")) == ({"i": 2, "p": "bias"}, None)
    assert both.format({"i": 2, "p": "bias"}) == "mm.5.bias"
