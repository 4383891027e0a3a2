"""JSON keeps every value exactly."""

from __future__ import annotations

import json
import math
from types import MappingProxyType
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ckptfs.errors import UsageError
from ckptfs.formats.extents import json_file, raw_file, text_file
from tests.factories import tensor_of
from tests.formats.reading import content

VALUES = st.recursive(
    st.one_of(st.none(), st.booleans(), st.integers(), st.floats(), st.text(st.characters())),
    lambda inner: st.one_of(st.lists(inner), st.dictionaries(st.text(), inner)),
    max_leaves=8,
)


@given(VALUES)
def test_round_trip(value: Any) -> None:
    back = json.loads(content(json_file(value)))
    assert repr(back) == repr(value)  # repr tells 2 from 2.0 and NaN equals NaN


def test_words_for_what_json_lacks() -> None:
    assert content(json_file(math.nan)) == b"NaN\n"
    assert content(json_file(-math.inf)) == b"-Infinity\n"
    assert content(json_file(2**70 + 1)) == b"1180591620717411303425\n"


def test_spelling_of_the_two_kinds_of_config() -> None:
    value = MappingProxyType({"b": (1, 2.5), "a": {"é": None}})
    assert content(json_file(value, indent=None, newline=False)) == b'{"b": [1, 2.5], "a": {"\\u00e9": null}}'
    assert content(json_file(value, indent=4, newline=False)).startswith(b'{\n    "b": [\n        1,\n')
    assert content(json_file(value, sort_keys=True)).startswith(b'{\n  "a": {')


@pytest.mark.parametrize("value", [object(), {1j: 2}, 10**5000, b"x"], ids=["object", "key", "digits", "bytes"])
def test_what_json_cannot_say(value: object) -> None:
    with pytest.raises(UsageError, match="as JSON"):
        json_file(value)


def test_text_and_raw() -> None:
    assert content(text_file("é\n")) == "é\n".encode()
    tensor = tensor_of("bfloat16", (3, 2))
    assert content(raw_file(tensor)) == tensor.bytes
