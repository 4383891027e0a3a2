"""Models of several components: one flat space of names, and the folders that it stands for."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ckptfs.conversion import registry
from ckptfs.conversion.apply import convert_tensors
from ckptfs.conversion.components import component, component_config, flat, in_one, joined, nest
from ckptfs.conversion.config import ConfigTable, Fields, FieldTransform, SideTable
from ckptfs.conversion.rules import Context, Table, hf_only, only_when, same, with_hf_extra
from ckptfs.errors import ConfigError, MissingField
from ckptfs.formats.huggingface import COMPONENTS
from ckptfs.tensors.tensor import Tensor
from tests.factories import ArrayTensor

NAMES = st.text("abc019", min_size=1, max_size=3)
FIELDS = st.dictionaries(NAMES, st.integers() | st.dictionaries(NAMES, st.integers(), max_size=2), max_size=3)
ONE = Context("toy", {}, {}, {})


@given(FIELDS, FIELDS, FIELDS)
def test_sections_are_laid_flat_and_nested_again(top: Any, image: Any, text: Any) -> None:
    image, text = {"n": 1, **image}, {"n": 1, **text}
    whole = {**top, "text": text, "list": {"mode": 1, "of": [{"encoder": image}]}}
    laid = flat(whole, ("text", "list", "list/of/0/encoder"))
    assert {name: laid[f"text/{name}"] for name in text} == text
    assert {name: laid[f"list/of/0/encoder/{name}"] for name in image} == image
    assert nest(laid) == whole


@pytest.mark.parametrize(
    "config",
    [
        {},
        {"list": {}},
        {"list": {"of": []}},
        {"list": {"of": [3]}},
        {"list": {"of": [{}]}},
        {"list": None},
        {"list": "of"},
    ],
    ids=repr,
)
def test_a_missing_section_is_named(config: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match="list"):
        flat(config, ("list/of/0/encoder",))


def test_rules_see_the_config_of_their_own_component() -> None:
    def of_width(context: Context, tensor: Tensor) -> Tensor | None:
        assert (context.hf["width"], context.cs["size"]) == (context.hf["want"],) * 2
        return tensor

    def wanted(context: Context) -> bool:
        return bool(context.cs["size"] == 7)

    rules = [with_hf_extra(same("a", "x"), {"made": of_width}), *only_when(wanted, same("b", "y"))]
    table = Table((*component("left", "l.", "in/l", rules), *component("right", "r.", "in/r", rules)))
    hf = {"left/width": 7, "left/want": 7, "right/width": 8, "right/want": 8}
    context = Context("toy", {}, hf, {"in/l/size": 7, "in/r/size": 8})
    state = {key: ArrayTensor(np.zeros(1)) for key in ("l.x", "r.x", "l.y")}
    found, _, made = convert_tensors(table, state, "hf", context)
    assert (list(found), made) == (
        ["left/a", "left/made", "right/a", "right/made", "left/b"],
        ("left/made", "right/made"),
    )
    assert table.claim("cs", "r.y", context) is None


def test_configs_are_converted_each_by_its_table() -> None:
    def double(fields: Fields) -> dict[str, Any]:
        return {"twice": 2 * fields.need("once", "it is doubled")}

    def half(fields: Fields) -> dict[str, Any]:
        return {"once": fields["twice"] // 2}

    one = ConfigTable(
        {"width": "size"},
        SideTable(require={"kind": "x"}, defaults={"width": 3}, write={"kind": "x"}),
        SideTable(write={"name": "toy"}),
        (FieldTransform(("once",), ("twice",), double, half),),
    )
    table = joined(component_config("left", "l", one), component_config("right", "in/r", one))
    source = table.source("toy", {"left/kind": "x", "left/once": 2, "right/width": 5}, "hf")
    cs = table.convert("toy", source, "cs")
    assert cs == {"l/size": 3, "l/twice": 4, "l/name": "toy", "in/r/size": 5, "in/r/name": "toy"}
    assert table.convert("toy", cs, "hf") == {
        "left/width": 3,
        "left/once": 2,
        "left/kind": "x",
        "right/width": 5,
        "right/kind": "x",
    }
    with pytest.raises(ConfigError, match="right/kind"):
        table.convert("toy", {"right/kind": "y"}, "cs")


def test_a_missing_field_names_its_component() -> None:
    def ask(fields: Fields) -> dict[str, Any]:
        return {"b": fields.need("a", "b follows from it")}

    table = component_config("left", "l", ConfigTable({}, SideTable(normalize=(ask,)), SideTable()))
    with pytest.raises(MissingField, match="toy left: config field a"):
        table.source("toy", {}, "hf")


def test_an_open_end_claims_what_nobody_else_wants() -> None:
    table = Table((same("a.{i}.w", "x.{i}"), *component("f", "", "f", [same("b", "y")]), *hf_only("a.{*}")))
    keys = ["a.0.w", "a.", "a.0.v", "a.w.w", "f/b"]
    claims = {key: table.claim("hf", key, ONE) for key in keys}
    assert [key for key, found in claims.items() if found and found[0].rule.cs] == ["a.0.w", "f/b"]
    assert [key for key, found in claims.items() if found and not found[0].rule.cs] == ["a.0.v", "a.w.w"]


def test_components_are_folders_that_can_be_opened() -> None:
    known = {family.components for family in registry.FAMILIES.values()} - {()}
    assert known == set(COMPONENTS)


def test_one_model_is_its_own_component() -> None:
    tensor = ArrayTensor(np.zeros(1))
    assert in_one({"": {"a": tensor}}) == {"a": tensor}
    assert in_one({"f": {"a": tensor}}) == {"f/a": tensor}
