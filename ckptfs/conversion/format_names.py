"""Names of formats on the command line: ``hf``, ``cs-2.9``, ``cs-2.9-dpo``, ``cs-auto``, ``cs-current``."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TypeAlias

from ckptfs.errors import UsageError

Release: TypeAlias = tuple[int, int]

RELEASES: tuple[Release, ...] = (*((1, n) for n in range(6, 10)), *((2, n) for n in range(11)))
"""Cerebras releases whose checkpoints are known, oldest first."""
CURRENT = RELEASES[-1]


VARIANTS: Mapping[str, Release] = {"dpo": (2, 1), "no-dpo": (2, 1), "backbone": (2, 4)}
"""Other layouts of the same model, and the first release of each: preference training with its reference model, a
model before or after such training, and the config in nested sections."""


@dataclass(frozen=True, slots=True)
class ModelFormat:
    """``hf`` (release None) or a Cerebras release. A release is a pair of numbers: 2.10 comes after 2.9.

    *variant* is one of `VARIANTS`, or empty for the release's usual layout.
    """

    release: Release | None = None
    variant: str = ""

    @property
    def name(self) -> str:
        if self.release is None:
            return "hf"
        return "cs-{}.{}".format(*self.release) + (f"-{self.variant}" if self.variant else "")


HF = ModelFormat()


def parse_format(text: str, *, auto: str | None = None) -> ModelFormat:
    """The format called *text*. ``cs-auto`` is the release *auto* ("2.9.1") that the checkpoint records.

    A variant may follow any of the names of releases: ``cs-2.9-dpo``, ``cs-current-dpo``.
    """
    if text == "hf":
        return HF
    found = re.fullmatch(rf"cs-(auto|current|[0-9.]+)(?:-({'|'.join(VARIANTS)}))?", text)
    release = _release(found[1], auto) if found else None
    if found is None or release is None:
        known = f"hf, cs-auto, cs-current, cs-1.6 to cs-{CURRENT[0]}.{CURRENT[1]}; -{', -'.join(VARIANTS)} may follow"
        raise UsageError(f"unknown format {text!r}; known: {known}")
    variant = found[2] or ""
    if variant and release < VARIANTS[variant]:
        raise UsageError("unknown format {!r}: -{} exists from cs-{}.{} on".format(text, variant, *VARIANTS[variant]))
    return ModelFormat(release, variant)


def _release(text: str, auto: str | None) -> Release | None:
    if text == "current":
        return CURRENT
    if text != "auto":
        return next((r for r in RELEASES if "{}.{}".format(*r) == text), None)
    if auto is None:
        raise UsageError("cs-auto: the checkpoint does not tell its release; name it", option="src_fmt")
    return parse_release(auto)


def parse_release(version: str) -> Release:
    """("2.10.1+x" and the like) major and minor as numbers; releases that are not known are refused."""
    found = re.match(r"(\d+)\.(\d+)", version)
    if not found or (int(found[1]), int(found[2])) not in RELEASES:
        raise UsageError(f"unknown Cerebras release {version!r}; name the format, such as cs-2.9")
    return int(found[1]), int(found[2])
