"""Format names: releases are pairs of numbers."""

from __future__ import annotations

import pytest

from ckptfs.errors import UsageError
from ckptfs.mappings.formats import HF, parse_format, parse_release


def test_known_names() -> None:
    assert parse_format("hf") == HF
    assert parse_format("cs-2.1").release == (2, 1)
    assert parse_format("cs-2.10").release == (2, 10)
    assert parse_format("cs-2.10").release > parse_format("cs-2.9").release
    assert parse_format("cs-current").name == "cs-2.10"
    assert parse_format("cs-auto", auto="2.10.1+x").name == "cs-2.10"


@pytest.mark.parametrize("text", ["", "cs", "cs-2", "cs-2.11", "cs-9.9", "CS-2.9", "cs-2.9.1", "hf ", "cs-auto"])
def test_unknown_names(text: str) -> None:
    with pytest.raises(UsageError):
        parse_format(text)


def test_unknown_release() -> None:
    with pytest.raises(UsageError, match=r"7\.3"):
        parse_release("7.3.1")
