"""Config tables: how a Hugging Face ``config.json`` and the ``model`` section of a Cerebras config become each other.

Most fields are renames or constants; a `FieldTransform` is for the few that read or write several fields. The order
of work is the public converter's: fill the source's defaults, prepare, check and convert field by field in the order
of the source, add the result's defaults. Fields that nobody knows are left out silently, as there.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, NoReturn, TypeAlias

from ckptfs.conversion.rules import Side
from ckptfs.errors import ConfigError, MissingField, UnsupportedValue

Config: TypeAlias = Mapping[str, Any]


class Fields(Mapping[str, Any]):
    """The source config as a transform sees it: a mapping that knows how to complain."""

    def __init__(self, model: str, values: Config) -> None:
        self.model = model
        self._values = dict(values)

    def __getitem__(self, field: str) -> Any:
        return self._values[field]

    def __iter__(self) -> Iterator[str]:
        return iter(self._values)

    def __len__(self) -> int:
        return len(self._values)

    def need(self, field: str, why: str) -> Any:
        """The value of *field*; `MissingField` when it is absent."""
        if field not in self._values:
            raise MissingField(self.model, field, why)
        return self._values[field]

    def refuse(self, field: str, allowed: str) -> NoReturn:
        """Raise `UnsupportedValue` for *field*."""
        raise UnsupportedValue(self.model, field, self._values.get(field), allowed)


Convert: TypeAlias = Callable[[Fields], Config]


@dataclass(frozen=True, slots=True)
class FieldTransform:
    """Fields that are computed together. *to_cs* runs once when one of the *hf* fields is there, and the other way."""

    hf: tuple[str, ...]
    cs: tuple[str, ...]
    to_cs: Convert
    to_hf: Convert

    def side(self, side: Side) -> tuple[str, ...]:
        return self.hf if side == "hf" else self.cs

    def to(self, side: Side) -> Convert:
        return self.to_hf if side == "hf" else self.to_cs


@dataclass(frozen=True, slots=True)
class SideTable:
    """What one side of a `ConfigTable` demands and supplies.

    *must*: fields that may only have this value; they are checked, not written, and must not appear on the other
    side. *fill*: values of fields that are missing when this side is the source (dicts are filled one level deep).
    *add*: fields added when this side is the result and nothing wrote them. *prepare*: run on the source after
    *fill*; each gives fields to set before the conversion, or raises.
    """

    must: Config = field(default_factory=dict)
    fill: Config = field(default_factory=dict)
    add: Config = field(default_factory=dict)
    prepare: tuple[Convert, ...] = ()


@dataclass(frozen=True, slots=True)
class ConfigTable:
    """One family's config. *names* maps Hugging Face to Cerebras names of fields that are copied.

    *outside* are fields that the tables treat as part of the Cerebras ``model`` section, but that stand elsewhere in
    the whole config, at the path given, or nowhere (an empty path).
    """

    names: Mapping[str, str]
    hf: SideTable
    cs: SideTable
    transforms: tuple[FieldTransform, ...] = ()
    outside: Mapping[str, tuple[str, ...]] = field(default_factory=dict)

    def side(self, side: Side) -> SideTable:
        return self.hf if side == "hf" else self.cs

    def source(self, model: str, config: Config, frm: Side) -> dict[str, Any]:
        """*config* as the conversion sees it: defaults filled in, prepared."""
        side = self.side(frm)
        values = filled(config, side.fill)
        for prepare in side.prepare:
            values |= _computed(prepare, Fields(model, values), ())
        return values

    def convert(self, model: str, source: Config, to: Side) -> dict[str, Any]:
        """The other side's config, from a *source* made by `source`."""
        frm: Side = "cs" if to == "hf" else "hf"
        fields = Fields(model, source)
        _check(fields, self.side(frm).must, self.side(to).must)
        rename = dict(self.names) if to == "cs" else {cs: hf for hf, cs in self.names.items()}
        transforms: dict[str, list[FieldTransform]] = {}
        for transform in self.transforms:
            for name in transform.side(frm):
                transforms.setdefault(name, []).append(transform)
        result: dict[str, Any] = {}
        done: set[int] = set()
        for name, value in fields.items():
            if name in rename:
                result[rename[name]] = value
            for transform in transforms.get(name, ()):
                if id(transform) not in done:
                    done.add(id(transform))
                    result |= _computed(transform.to(to), fields, transform.side(frm))
        return result | {k: v for k, v in self.side(to).add.items() if k not in result}


WRONG_TYPES = (TypeError, ValueError, ArithmeticError, LookupError, AttributeError)
"""What arithmetic and look-ups raise on text, null, 0 or nan where a config should have a number or a section."""


def _computed(convert: Convert, fields: Fields, names: tuple[str, ...]) -> Config:
    """What *convert* makes of *fields*; `ConfigError` where their types or sizes make no sense together."""
    try:
        return convert(fields)
    except WRONG_TYPES as e:
        about = ", ".join(names) or convert.__name__
        raise ConfigError(f"{fields.model}: the config makes no sense around {about}: {type(e).__name__}: {e}") from e


def bring_in(model: Config, whole: Config, outside: Mapping[str, tuple[str, ...]]) -> dict[str, Any]:
    """The ``model`` section *model* of *whole* with the fields that stand *outside* of it."""
    values = dict(model)
    for name, path in outside.items():
        where: Any = whole
        for part in path:
            where = where.get(part) if isinstance(where, Mapping) else None
        if path and where is not None:
            values[name] = where
    return values


def put_out(model: Config, outside: Mapping[str, tuple[str, ...]]) -> dict[str, Any]:
    """The whole Cerebras config for a ``model`` section, with the *outside* fields at their places."""
    whole: dict[str, Any] = {"model": {k: v for k, v in model.items() if k not in outside}}
    for name, path in outside.items():
        if path and name in model:
            where = whole
            for part in path[:-1]:
                where = where.setdefault(part, {})
            where[path[-1]] = model[name]
    return whole


@dataclass(frozen=True, slots=True)
class OneOf:
    """Several values that a `SideTable.must` field may have."""

    values: tuple[object, ...]


def one_of(*values: object) -> OneOf:
    """A field that may have any of these values."""
    return OneOf(values)


def _check(fields: Fields, must: Config, other: Config) -> None:
    for name, wanted in must.items():
        allowed = wanted.values if isinstance(wanted, OneOf) else (wanted,)
        if name in fields and fields[name] not in allowed:
            fields.refuse(name, f"only {' or '.join(map(repr, allowed))} can be converted")
    for name in other:
        if name in fields and name not in must:
            fields.refuse(name, "this field must not appear in a config of this side")


def filled(config: Config, defaults: Config) -> dict[str, Any]:
    """*config* with *defaults* for missing fields, also inside dicts one level down."""
    values = dict(config)
    for name, default in defaults.items():
        if name not in values:
            values[name] = default
        elif isinstance(default, Mapping) and isinstance(values[name], Mapping):
            values[name] = {**default, **values[name]}
    return values


def choice(hf: str, cs: str, pairs: Mapping[Any, Any]) -> FieldTransform:
    """A field whose values are renamed, one to one; other values are refused."""
    back = {b: a for a, b in pairs.items()}

    def convert(name: str, target: str, table: Mapping[Any, Any]) -> Convert:
        def to(fields: Fields) -> Config:
            value = fields[name]
            if not isinstance(value, str | int | None) or value not in table:
                fields.refuse(name, f"only {', '.join(map(repr, table))} can be converted")
            return {target: table[value]}

        return to

    return FieldTransform((hf,), (cs,), convert(hf, cs, pairs), convert(cs, hf, back))
