"""What is said of keys without parsing the JSON of each is what their JSON says."""

from __future__ import annotations

import json
import random
from typing import Any

import pytest

from ckptfs.formats.hdf5 import summary
from ckptfs.formats.hdf5.summary import Metadata, file_attributes, key_metadata

TENSOR = {"shapes": [[2, 3]], "dtypes": ["torch.float32"], "__TYPE__": "TorchTensorSerializer"}


def scalar(value: Any) -> dict[str, Any]:
    return {"scalar_value": value, "__TYPE__": "ScalarSerializer"}


def text(key: str, fields: Any, indent: int | None = 4) -> str:
    """As the writer says it."""
    return json.dumps({"__spec__": [{key: "*"}], "__objects__": [key], f"{key}.__metadata__": fields}, indent=indent)


def said(texts: dict[str, str]) -> dict[str, Any]:
    """Key to its fields, or to what stands for another entry than the usual."""
    metadata = Metadata()
    for key, value in texts.items():
        metadata.add(key, value)
    return {k: metadata.fields[found] if isinstance(found, int) else found for k, found in metadata.keys.items()}


def alone(texts: dict[str, str]) -> dict[str, Any]:
    """The same, with each key in the place of the first."""
    return {key: said({key: value})[key] for key, value in texts.items()}


@pytest.mark.parametrize("indent", [4, None])
def test_numbers(indent: int | None) -> None:
    values = [0, 7, -1, 10**17, -(10**17), 10**18, 1 << 80, 1.5, 1e300, 0, True, False, None, "7", "text", -0.0]
    texts = {f"groups.{i}": text(f"groups.{i}", scalar(value), indent) for i, value in enumerate(values)}
    found = said(texts)
    assert [found[key]["scalar_value"] for key in texts] == values
    assert [type(found[key]["scalar_value"]) for key in texts] == [type(value) for value in values]


def test_few_texts_are_parsed(monkeypatch: pytest.MonkeyPatch) -> None:
    real, seen = summary._key_metadata, []
    monkeypatch.setattr(summary, "_key_metadata", lambda text: seen.append(text) or real(text))
    texts = {f"opt.{i}.step": text(f"opt.{i}.step", scalar(i)) for i in range(50)}
    texts |= {f"layer.{i}.weight": text(f"layer.{i}.weight", TENSOR) for i in range(50)}
    found = said(texts)
    assert len(seen) == 2
    assert [found[f"opt.{i}.step"]["scalar_value"] for i in range(50)] == list(range(50))
    assert found["layer.49.weight"] == TENSOR


@pytest.mark.parametrize(
    "value",
    [
        text("x.b", scalar(5)).replace("5", "x.b"),  # no JSON, and equal once the key is cut out
        text("x.b", scalar(5)).replace("5", "\1"),
        text("x.b", scalar(5)).replace("5", "\0"),
        text("x.b", scalar(5)).replace(" 5", " 05"),
        text("x.b", scalar(5)).replace(" 5", " +5"),
        text("x.b", scalar(5)).replace("scalar_value", "scalar\\u005fvalue"),
        text("x.b", {"scalar_value": 5, "__TYPE__": "ScalarSerializer", "more": {"scalar_value": 6}}),
        text("x.b", {"deep": {"scalar_value": 5}, "__TYPE__": "ScalarSerializer"}),
        text("x.b", {"note": "x.b", **scalar(5)}),
        text("x.c", scalar(5)),
        "[]",
        "",
    ],
)
def test_texts_that_only_look_alike(value: str) -> None:
    texts = {"x.a": text("x.a", scalar(3)), "x.b": value, "x.d": text("x.d", scalar(4))}
    assert said(texts) == alone(texts)
    assert said(dict(reversed(texts.items()))) == alone(texts)


@pytest.mark.parametrize("key", ["1", "null", "x\\", 'x"', "ä", "", ".", "scalar_value", "__metadata__", "groups.1 "])
def test_odd_keys(key: str) -> None:
    texts = {"x.a": text("x.a", scalar(3)), key: text(key, scalar(4)), key + "n": text(key + "n", scalar(5))}
    assert said(texts) == alone(texts)
    assert said(dict(reversed(texts.items()))) == alone(texts)


def test_random_changes() -> None:
    chance = random.Random(3)
    keys = ["x.a", "x.b", "x.weight", "e", "n1", "x.scalar_value"]
    for _ in range(3000):
        texts = {}
        for key in chance.sample(keys, 4):
            fields = chance.choice([TENSOR, scalar(chance.randrange(-3, 30)), scalar(chance.random()), {"a": key}])
            value = text(key, fields, chance.choice([4, 4, 4, None]))
            if chance.random() < 0.3:
                at = chance.randrange(len(value))
                value = value[:at] + chance.choice(["\0", "\1", "0", "-", "\\", '"', "x", ""]) + value[at + 1 :]
            texts[key] = value
        assert said(texts) == alone(texts)


def test_attributes_of_the_file() -> None:
    attributes = [("__spec__", "[]"), ("a.__metadata__", text("a", TENSOR)), ("__version__", 0.5), ("other", 1)]
    attributes.append(("__SUCCESS__", b"\1"))
    assert file_attributes(attributes) == {"file": {"__spec__": "[]", "__version__": 0.5, "__SUCCESS__": None}}
    assert key_metadata(attributes) == {"metadata": {"a": 0}, "fields": [TENSOR]}
