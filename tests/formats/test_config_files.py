"""Configs in YAML and JSON: plain data, or one line that says what is wrong, however the file was made."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from ckptfs.errors import ConfigError, UsageError
from ckptfs.formats.config_files import MAX_BYTES, MAX_VALUES, read_config_file
from tests.paths import FAMILIES

LEVELS = 60
ALIASES = "a0: &a0 [x]\n" + "".join(f"a{i}: &a{i} [*a{i - 1}, *a{i - 1}]\n" for i in range(1, LEVELS))
MERGES = "a0: &a0 {x: 1}\n" + "".join(f"a{i}: &a{i}\n  <<: [*a{i - 1}, *a{i - 1}]\n" for i in range(1, LEVELS))
BOMBS = {
    "aliases": (ALIASES, "aliases expanded"),
    "merges": (MERGES, "aliases expanded"),
    "deep flow": ("a: " + "[" * 50_000, "levels deep"),
    "deep block": ("".join("  " * i + "a:\n" for i in range(500)), "levels deep"),
    "a loop": ("a: &a [*a]", "contains it"),
    "a merge of itself": ("a: &a\n  <<: *a", "contains it"),
    "many values": ("a: [" + "1," * (3 * MAX_VALUES) + "]", "more than"),
    "a long number": ("a: " + "1:" * 200_000 + "1", "characters"),
    "a huge integer": ("a: " + "9" * 50_000, "not valid"),
    "an object": ("a: !!python/object/apply:os.system [ls]", "not valid"),
    "a list": ("- 1\n- 2", "not a mapping"),
    "nothing": ("", "not a mapping"),
    "no text": ("a: \x00", "not valid"),
    "two documents": ("a: 1\n---\nb: 2", "not valid"),
    "too large": ("#" * (MAX_BYTES + 1), "MiB"),
}
JSON_BOMBS = {
    "deep": ('{"a": ' + "[" * 100_000, "not valid JSON"),
    "a name twice": ('{"a": 1, "a": 2}', "twice"),
    "a list": ("[1]", "JSON object"),
    "broken": ("{", "not valid JSON"),
}


def refusal(path: Path) -> str:
    with pytest.raises(ConfigError) as caught:
        read_config_file(path)
    assert str(path) in str(caught.value)
    assert "\n" not in str(caught.value)
    return str(caught.value)


@pytest.mark.parametrize("name", BOMBS)
def test_yaml_bombs(name: str, tmp_path: Path) -> None:
    text, said = BOMBS[name]
    (tmp_path / "params.yaml").write_text(text)
    assert said in refusal(tmp_path / "params.yaml")


@pytest.mark.parametrize("name", JSON_BOMBS)
def test_json_bombs(name: str, tmp_path: Path) -> None:
    text, said = JSON_BOMBS[name]
    (tmp_path / "config.json").write_text(text)
    assert said in refusal(tmp_path / "config.json")


def test_a_file_that_cannot_be_read(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="no such file"):
        read_config_file(tmp_path / "nothing.yaml")
    with pytest.raises(UsageError, match="directory"):
        read_config_file(tmp_path)


@pytest.mark.parametrize("path", sorted(FAMILIES.glob("*/*/cs.yaml")), ids=lambda p: f"{p.parts[-3]}/{p.parts[-2]}")
def test_recorded_configs_are_read_as_yaml_reads_them(path: Path) -> None:
    assert read_config_file(path) == yaml.safe_load(path.read_text())


def test_anchors_and_merges_of_ordinary_size(tmp_path: Path) -> None:
    text = "base: &base {lr: 0.1, steps: [1, 2]}\nmodel:\n  <<: *base\n  lr: 0.2\nagain: *base\n"
    (tmp_path / "params.yaml").write_text(text)
    base: dict[str, Any] = {"lr": 0.1, "steps": [1, 2]}
    assert read_config_file(tmp_path / "params.yaml") == {"base": base, "model": {**base, "lr": 0.2}, "again": base}


def test_json(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"a": [1, None, "x"]}))
    assert read_config_file(tmp_path / "config.json") == {"a": [1, None, "x"]}
