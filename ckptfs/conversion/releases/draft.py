"""A whole Cerebras config on its way through one step between releases."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, NoReturn, TypeAlias

from ckptfs.conversion.format_names import Release
from ckptfs.errors import ConfigError, MissingField, UnsupportedValue

Section: TypeAlias = dict[str, Any]
TRAINER = ("trainer", "init")
"""Where a config of the newer layout keeps what the older one has at the top."""


@dataclass(frozen=True, slots=True)
class Draft:
    """A config that the changes of one step write into, each in turn.

    *whole* is a copy of the caller's config at the top only: `at` and `section` copy what they hand out, so nothing
    of the caller's is written to, and sections that YAML anchors share part company here.
    """

    about: About
    whole: Section
    warnings: list[str] = field(default_factory=list)

    @property
    def nested(self) -> bool:
        """Whether the config has the trainer layout."""
        return "trainer" in self.whole

    def model(self) -> Section:
        """The ``model`` section, to be written into; `ConfigError` when there is none."""
        found = self.at(*(TRAINER if self.nested else ()), "model")
        if found is None:
            where = ".".join((*(TRAINER if self.nested else ()), "model"))
            raise ConfigError(f"the config has no {where} section; is it the config of this checkpoint?")
        return found

    def section(self, name: str) -> Section | None:
        """The section at the top of that name, to be written into; None when it is absent or empty."""
        return self.at(name)

    def make(self, name: str) -> Section:
        """As `section`; an absent one is made."""
        if self.whole.get(name) is None:
            self.whole[name] = {}
        return self.at(name) or self.whole[name]

    def at(self, *path: str) -> Section | None:
        """The mapping at *path*, to be written into; None when it is absent or null."""
        where = self.whole
        for n, name in enumerate(path):
            found = where.get(name)
            if found is None:
                return None
            if isinstance(found, list) and name == "trainer":
                raise ConfigError("the config has a list of trainers; give the config of one of them")
            if not isinstance(found, Mapping):
                raise ConfigError(f"{'.'.join(path[: n + 1])} in the config is not a mapping")
            where[name] = where = dict(found)
        return where

    def refuse(self, name: str, value: object, allowed: str) -> NoReturn:
        """Raise `UnsupportedValue` for a field."""
        raise UnsupportedValue(self.about.family, name, value, allowed)

    def lacks(self, name: str, why: str) -> NoReturn:
        """Raise `MissingField`."""
        raise MissingField(self.about.family, name, why)


@dataclass(frozen=True, slots=True)
class About:
    """One step of a model family. *frm* is older than *to* for an upgrade, newer for a downgrade."""

    family: str
    """The model name, such as ``bert-summarization``."""
    cs_name: str
    """``model.name`` in Cerebras configs from release 2.4 on."""
    frm: Release
    to: Release
    variants: tuple[str, str] = ("", "")
    """The variants of the two formats; they differ in steps between layouts of one release."""

    @property
    def up(self) -> bool:
        """Whether the step leads to a newer release."""
        return self.to > self.frm
