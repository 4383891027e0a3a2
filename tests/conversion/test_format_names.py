"""Format names: releases are pairs of numbers."""

from __future__ import annotations

import pytest

from ckptfs.conversion.format_names import HF, ModelFormat, parse_format, parse_release
from ckptfs.errors import UsageError


def test_known_names() -> None:
    assert parse_format("hf") == HF
    assert parse_format("cs-2.1").release == (2, 1)
    assert parse_format("cs-2.10").release == (2, 10)
    assert parse_format("cs-2.10").release > parse_format("cs-2.9").release
    assert parse_format("cs-current").name == "cs-2.10"
    assert parse_format("cs-auto", auto="2.10.1+x").name == "cs-2.10"


def test_variants() -> None:
    assert parse_format("cs-2.1-dpo") == ModelFormat((2, 1), "dpo")
    assert parse_format("cs-2.1-no-dpo") == ModelFormat((2, 1), "no-dpo")
    assert parse_format("cs-2.4-backbone") == ModelFormat((2, 4), "backbone")
    assert parse_format("cs-2.10-dpo") != parse_format("cs-2.10")
    assert parse_format("cs-current-dpo").name == "cs-2.10-dpo"
    assert parse_format("cs-auto-backbone", auto="2.5.0").name == "cs-2.5-backbone"
    with pytest.raises(UsageError, match=r"-backbone exists from cs-2\.4 on"):
        parse_format("cs-2.3-backbone")
    with pytest.raises(UsageError, match=r"-dpo exists from cs-2\.1 on"):
        parse_format("cs-1.9-dpo")


UNKNOWN = ["", "cs", "cs-2", "cs-2.11", "cs-9.9", "CS-2.9", "cs-2.9.1", "cs-2.09", "cs-2.\u0661", "hf ", "cs-auto"]
UNKNOWN_VARIANTS = ["hf-dpo", "cs-2.9-", "cs-2.9-DPO", "cs-2.9-dpo-dpo", "cs-2.9-no", "cs-2.11-dpo", "cs-auto-dpo"]


@pytest.mark.parametrize("text", [*UNKNOWN, *UNKNOWN_VARIANTS])
def test_unknown_names(text: str) -> None:
    with pytest.raises(UsageError):
        parse_format(text)


def test_unknown_release() -> None:
    with pytest.raises(UsageError, match=r"7\.3"):
        parse_release("7.3.1")
