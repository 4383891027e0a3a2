"""Key templates: full keys with named fields, that match and format.

``layers.{i}.attn.{p}`` has a layer number and a parameter name. Fields: ``{p}`` is ``weight`` or ``bias``; any
other name is a decimal number; ``{2*i}`` is twice the number i, ``{i+1}`` is i plus one. Matching is anchored at both
ends, and a dot is a dot. ``{*}`` at the end of a template is any rest of a key, for keys that are dropped.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import TypeAlias

Fields: TypeAlias = Mapping[str, int | str]

PARAMS = ("weight", "bias")
REST = "{*}"
_FIELD = re.compile(r"\{(?:(\d+)\*)?(\w+)(?:\+(\d+))?\}")
_NUMBER = re.compile(r"(?<![^.])\d+(?![^.])")


@dataclass(frozen=True)
class Template:
    """One side of a rule, such as ``transformer_decoder.layers.{i}.norm1.{p}``."""

    text: str
    fields: frozenset[str] = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "fields", frozenset(m[2] for m in _FIELD.finditer(self.text)))

    @property
    def open(self) -> bool:
        """Whether any rest of a key fits."""
        return self.text.endswith(REST)

    @cached_property
    def _parts(self) -> list[str]:
        """Literal, factor, name, summand, literal, …, literal."""
        return _FIELD.split(self.text)

    @cached_property
    def _regex(self) -> re.Pattern[str]:
        parts = self._parts
        regex = re.escape(parts[0])
        for name, literal in zip(parts[2::4], parts[4::4], strict=True):
            regex += f"(?P<{name}>{'|'.join(PARAMS) if name == 'p' else '[0-9]+'})" + re.escape(literal)
        return re.compile(regex.removesuffix(re.escape(REST)) + ".+" if self.open else regex)

    @cached_property
    def _numbers(self) -> dict[str, tuple[int, int]]:
        """Factor and summand of each field."""
        return {m[2]: (int(m[1] or 1), int(m[3] or 0)) for m in _FIELD.finditer(self.text)}

    def match(self, key: str) -> dict[str, int | str] | None:
        """The fields of *key*, or None when it does not match."""
        found = self._regex.fullmatch(key)
        if found is None:
            return None
        fields: dict[str, int | str] = {}
        for name, text in found.groupdict().items():
            if name == "p":
                fields[name] = text
                continue
            factor, summand = self._numbers[name]
            number, rest = divmod(int(text) - summand, factor)
            if rest or number < 0 or str(int(text)) != text:
                return None
            fields[name] = number
        return fields

    def format(self, fields: Fields) -> str:
        """The key with these *fields*."""

        parts = self._parts
        key = parts[0]
        for factor, name, summand, literal in zip(parts[1::4], parts[2::4], parts[3::4], parts[4::4], strict=True):
            found = fields[name]
            number = int(factor or 1) * int(found) + int(summand or 0) if factor or summand else found
            key += f"{number}{literal}"
        return key

    def prefixed(self, prefix: str) -> Template:
        """This template behind *prefix*."""
        return Template(prefix + self.text)

    def blanks(self) -> list[str]:
        """The forms of this template under `blank`, for lookups by dict."""
        texts = [self.text.replace("{p}", p) for p in PARAMS] if "p" in self.fields else [self.text]
        return [blank(_FIELD.sub("0", text)) for text in texts]


def blank(key: str) -> str:
    """*key* with every component that is a number replaced by ``#``."""
    return _NUMBER.sub("#", key)
