"""The escaping rule: no name breaks a path, distinct keys have distinct paths, and names turn back into keys."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ckptfs.errors import UsageError
from ckptfs.vfs.names import MAX_LEVELS, components, escape, unescape

ANY_TEXT = st.text(st.characters())  # lone surrogates and all
NASTY = st.text(st.sampled_from("./%~a2EFé\x00\n\x7f\x85\ud800😀"), max_size=12)
PARTS = st.one_of(ANY_TEXT, NASTY, st.text("aé%", min_size=200, max_size=400), st.just("x" * 300))


def path_of(key: str, suffix: str = ".npy") -> str:
    *folders, last = components(key)
    return "/".join([*map(escape, folders), escape(last, suffix)])


@given(PARTS, st.sampled_from(["", ".npy", ".json"]))
def test_no_name_breaks_a_path(part: str, suffix: str) -> None:
    name = escape(part, suffix)
    assert 0 < len(name.encode()) <= 255  # strict UTF-8
    assert name not in (".", "..")
    assert "/" not in name
    assert name.endswith(suffix)
    assert all(char.isprintable() or ord(char) > 0x9F for char in name)


@given(PARTS)
def test_round_trip_or_a_clear_refusal(part: str) -> None:
    name = escape(part)
    if "%~" in name:
        with pytest.raises(UsageError, match=r"user\.key"):
            unescape(name)
    else:
        assert unescape(name) == part


@given(st.text(st.characters(), max_size=20))
def test_short_parts_always_turn_back(part: str) -> None:
    assert unescape(escape(part)) == part


@given(NASTY)
def test_unescape_takes_nothing_but_our_names(name: str) -> None:
    try:
        part = unescape(name)
    except UsageError:
        return
    assert escape(part) == name


KEYS = st.one_of(PARTS, NASTY, st.lists(PARTS, max_size=4).map(".".join), st.lists(NASTY).map(".".join))


@settings(deadline=None)
@given(st.sets(KEYS, max_size=20), st.data())
def test_distinct_keys_have_distinct_paths_and_no_file_is_a_folder(keys: set[str], data: st.DataObject) -> None:
    suffixes = data.draw(st.lists(st.sampled_from([".npy", ".json"]), min_size=len(keys), max_size=len(keys)))
    paths = {path_of(key, suffix) for key, suffix in zip(keys, suffixes, strict=True)}
    assert len(paths) == len(keys)
    folders = {path.rsplit("/", i)[0] for path in paths for i in range(1, path.count("/") + 1)}
    assert not folders & paths
    assert len({escape(key) for key in keys}) == len(keys)  # the names in raw/


@pytest.mark.parametrize(
    ("key", "path"),
    [
        ("model.h.0.bias", "model/h/0/bias.npy"),
        ("a", "a.npy"),
        ("a.npy", "a/npy.npy"),
        ("", "%.npy"),
        ("a..b", "a/%/b.npy"),
        (".", "%/%.npy"),
        ("a/b.../c", "a%2Fb/%/%/%2Fc.npy"),
        ("100%", "100%25.npy"),
        ("x\x00\n", "x%00%0A.npy"),
        ("größe.😀", "größe/😀.npy"),
        ("\ud800", "%ED%A0%80.npy"),
    ],
)
def test_examples(key: str, path: str) -> None:
    assert path_of(key) == path


def test_raw_names_keep_dots() -> None:
    assert escape("model.h.0.bias") == "model.h.0.bias"
    assert escape("..") == "%2E%2E"


def test_long_parts_are_cut_at_whole_characters() -> None:
    first, second = escape("é" * 200 + "a", ".npy"), escape("é" * 200 + "b", ".npy")
    assert first != second
    head, mark, tail = first.partition("%~")
    assert head == "é" * len(head)
    assert mark and len(tail) == 16 + len(".npy")
    assert len(first.encode()) in (254, 255)
    assert "%" not in escape("/" * 200).replace("%2F", "").partition("%~")[0]


def test_depth_is_bounded_and_distinct() -> None:
    deep = components(".".join(["x"] * 1000))
    assert len(deep) == MAX_LEVELS
    assert ".".join(deep) == ".".join(["x"] * 1000)


def test_a_real_folder_takes_the_names(tmp_path: Path) -> None:
    parts = ["..", "a/b", "x\x00", "\ud800", "y" * 400, "é" * 200, "%", ""]
    for part in parts:
        (tmp_path / escape(part, ".json")).write_text("1")
    assert len(os.listdir(tmp_path)) == len(parts)
