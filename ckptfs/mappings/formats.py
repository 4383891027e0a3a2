"""Names of formats on the command line: ``hf``, ``cs-2.9``, ``cs-auto``, ``cs-current``."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TypeAlias

from ckptfs.errors import UsageError

Release: TypeAlias = tuple[int, int]

RELEASES: tuple[Release, ...] = (*((1, n) for n in range(6, 10)), *((2, n) for n in range(11)))
"""Cerebras releases whose checkpoints are known, oldest first."""
CURRENT = RELEASES[-1]


@dataclass(frozen=True, slots=True)
class Format:
    """``hf`` (release None) or a Cerebras release. A release is a pair of numbers: 2.10 comes after 2.9."""

    release: Release | None = None

    @property
    def name(self) -> str:
        return "hf" if self.release is None else "cs-{}.{}".format(*self.release)


HF = Format()


def parse_format(text: str, *, auto: str | None = None) -> Format:
    """The format called *text*. ``cs-auto`` is the release *auto* ("2.9.1") that the checkpoint itself tells."""
    if text == "hf":
        return HF
    if text == "cs-current":
        return Format(CURRENT)
    if text == "cs-auto":
        if auto is None:
            raise UsageError("cs-auto: the checkpoint does not tell its release; name it, such as cs-2.9")
        return Format(parse_release(auto))
    found = re.fullmatch(r"cs-(\d+)\.(\d+)", text)
    if not found or (int(found[1]), int(found[2])) not in RELEASES:
        raise UsageError(
            f"unknown format {text!r}; known: hf, cs-auto, cs-current, cs-1.6 to cs-{CURRENT[0]}.{CURRENT[1]}"
        )
    return Format((int(found[1]), int(found[2])))


def parse_release(version: str) -> Release:
    """("2.10.1+x" and the like) major and minor as numbers; releases that are not known are refused."""
    found = re.match(r"(\d+)\.(\d+)", version)
    if not found or (int(found[1]), int(found[2])) not in RELEASES:
        raise UsageError(f"unknown Cerebras release {version!r}; name the format, such as cs-2.9")
    return int(found[1]), int(found[2])
