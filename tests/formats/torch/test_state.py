"""Flattening is bounded, however a pickle's containers refer to each other."""

from __future__ import annotations

from pathlib import Path

import pytest

from ckptfs.errors import CorruptHeader, SourceError
from ckptfs.formats.files import open_file
from ckptfs.formats.source import Container, Item
from ckptfs.formats.torch import state
from ckptfs.formats.torch.globals import Box, Storage
from ckptfs.formats.torch.state import state_of


def flat(tmp_path: Path, value: object) -> tuple[dict[str, Item], Container]:
    (tmp_path / "x").write_bytes(b"")
    file = open_file(tmp_path / "x")
    file.close()
    return state_of(value, file, _nowhere)


def _nowhere(storage: Storage) -> int:
    raise CorruptHeader("x", storage.name)


def cycle(n: int) -> Box:
    box = Box("list", None, [None] * n)
    box.values[0] = box
    return box


def laughs() -> object:
    value: object = None
    for _ in range(60):
        value = (value, value)
    return value


def nested(n: int) -> Box:
    box = Box("dict", [])
    for _ in range(n):
        box = Box("dict", ["k"], [box])
    return box


@pytest.mark.parametrize(
    "value",
    [cycle(1), cycle(75_000), laughs(), nested(101), Box("list", None, [None] * 100_000)],
    ids=["cycle", "wide cycle", "2**60 leaves", "101 levels", "100,001 entries"],
)
def test_bombs_are_found_before_they_unfold(tmp_path: Path, value: object, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(state, "MAX_ENTRIES", 100_000)
    with pytest.raises(CorruptHeader, match="more than 100 levels"):
        flat(tmp_path, value)


def test_long_keys_over_and_over(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(state, "MAX_KEY_CHARS", 10_000)
    inner = [Box("dict", [str(i)], [None]) for i in range(20)]
    with pytest.raises(CorruptHeader, match="10000 characters"):
        flat(tmp_path, Box("dict", ["k" * 1000], [Box("list", None, inner)]))  # type: ignore[arg-type]


def test_100_levels(tmp_path: Path) -> None:
    items, tree = flat(tmp_path, nested(99))
    assert items == {}
    assert tree.keys == ("k",)


@pytest.mark.parametrize("key", [(1, 2), b"x", Box("list", None)])
def test_keys_that_have_no_text(tmp_path: Path, key: object) -> None:
    with pytest.raises(SourceError, match="not a text or number"):
        flat(tmp_path, Box("dict", [key], [None]))


def test_keys_are_text_in_items_and_themselves_in_the_tree(tmp_path: Path) -> None:
    keys: list[object] = [0, True, None, 1.5, "s", ""]
    items, tree = flat(tmp_path, Box("dict", keys, [1, 2, 3, 4, 5, 6]))
    assert [(key, item.value) for key, item in items.items()] == [
        ("0", 1), ("True", 2), ("None", 3), ("1.5", 4), ("s", 5), ("", 6)
    ]  # fmt: skip
    assert tree == Container("dict", tuple(keys), ("0", "True", "None", "1.5", "s", ""))
