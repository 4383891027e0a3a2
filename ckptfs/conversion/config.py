"""Config tables: how a Hugging Face ``config.json`` and the ``model`` section of a Cerebras config become each other.

Most fields are renames or constants; a `FieldTransform` is for the few that read or write several fields. The order
of work is the public converter's: resolve aliases, fill in the source's defaults, normalize, check and convert field
by field in the order of the source, add what the result always has. `explain` names what happens to each field.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, NoReturn, TypeAlias

from ckptfs.conversion.rules import Side
from ckptfs.errors import ConfigError, MissingField, UnsupportedValue

Config: TypeAlias = Mapping[str, Any]


class Fields(Mapping[str, Any]):
    """The source config as a transform sees it: a mapping whose errors name the model and the field."""

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
    """Fields that are computed together. *to_cs* runs once if one of the *hf* fields is present; *to_hf* likewise."""

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
    """What one side of a `ConfigTable` demands and supplies."""

    constants: Config = field(default_factory=dict)
    """Fields that always have this value: *require* and *write* at once."""
    require: Config = field(default_factory=dict)
    """Fields that may only have this value. They are checked, not written, and refused on the other side."""
    defaults: Config = field(default_factory=dict)
    """Values of missing fields when this side is the source. Nested dicts are filled in one level deep."""
    write: Config = field(default_factory=dict)
    """Fields that are added when this side is the result and nothing else wrote them."""
    normalize: tuple[Convert, ...] = ()
    """Functions that run on the source after *defaults*; each returns fields to set, or raises."""
    aliases: Mapping[str, str] = field(default_factory=dict)
    """Other names of fields, by alias. A field and its alias must agree."""
    reads: tuple[str, ...] = ()
    """Further fields that *normalize* and the transforms read."""
    ignored: Mapping[str, str] = field(default_factory=dict)
    """Fields that are left out because they do not change the model's results, each with the reason."""

    @property
    def required(self) -> dict[str, Any]:
        """All fields that are checked."""
        return {**self.constants, **self.require}

    @property
    def written(self) -> dict[str, Any]:
        """All fields that the result has at least."""
        return {**self.constants, **self.write}


@dataclass(frozen=True, slots=True)
class ConfigTable:
    """One family's config. *renames* maps Hugging Face to Cerebras names of fields that are copied.

    *outside_model* are fields that the tables treat as part of the Cerebras ``model`` section, but that stand
    elsewhere in the whole config, at the path given, or nowhere (an empty path).
    """

    renames: Mapping[str, str]
    hf: SideTable
    cs: SideTable
    transforms: tuple[FieldTransform, ...] = ()
    outside_model: Mapping[str, tuple[str, ...]] = field(default_factory=dict)

    def side(self, side: Side) -> SideTable:
        return self.hf if side == "hf" else self.cs

    def renamed(self, frm: Side) -> dict[str, str]:
        """The names of copied fields on side *frm*, with those of the other side."""
        return dict(self.renames) if frm == "hf" else {cs: hf for hf, cs in self.renames.items()}

    def source(self, model: str, config: Config, frm: Side) -> dict[str, Any]:
        """*config* as the conversion sees it: aliases resolved, defaults filled in, normalized."""
        side = self.side(frm)
        values = filled(without_aliases(model, config, side.aliases), side.defaults)
        for normalize in side.normalize:
            values |= _computed(normalize, Fields(model, values), ())
        return values

    def convert(self, model: str, source: Config, to: Side) -> dict[str, Any]:
        """The other side's config, from a *source* made by `source`."""
        frm: Side = "cs" if to == "hf" else "hf"
        fields = Fields(model, source)
        _check(fields, self.side(frm).required, self.side(to).required)
        renames = self.renamed(frm)
        transforms: dict[str, list[FieldTransform]] = {}
        for transform in self.transforms:
            for name in transform.side(frm):
                transforms.setdefault(name, []).append(transform)
        result: dict[str, Any] = {}
        done: set[int] = set()
        for name, value in source.items():
            if name in renames:
                result[renames[name]] = value
            for transform in transforms.get(name, ()):
                if id(transform) not in done:
                    done.add(id(transform))
                    result |= _computed(transform.to(to), fields, transform.side(frm))
        return result | {k: v for k, v in self.side(to).written.items() if k not in result}


WRONG_TYPES = (TypeError, ValueError, ArithmeticError, LookupError, AttributeError)
"""What arithmetic and look-ups raise on text, null, 0 or nan where a config should have a number or a section."""


def _computed(convert: Convert, fields: Fields, names: tuple[str, ...]) -> Config:
    """The result of *convert* on *fields*; `ConfigError` where their types or sizes do not fit each other."""
    try:
        return convert(fields)
    except WRONG_TYPES as e:
        about = ", ".join(names) or convert.__name__
        raise ConfigError(f"{fields.model}: the config makes no sense around {about}: {type(e).__name__}: {e}") from e


def without_aliases(model: str, config: Config, aliases: Mapping[str, str]) -> dict[str, Any]:
    """*config* with each field under its own name; `UnsupportedValue` where an alias contradicts it."""
    values = dict(config)
    for alias, name in aliases.items():
        if alias in config:
            value = values.pop(alias)
            if values.setdefault(name, value) != value and value is not None:
                raise UnsupportedValue(model, alias, value, f"it is another name of {name}, which is {values[name]!r}")
    return values


def bring_in(model: Config, whole: Config, outside_model: Mapping[str, tuple[str, ...]]) -> dict[str, Any]:
    """The ``model`` section *model* of *whole* with the fields of *outside_model*."""
    values = dict(model)
    for name, path in outside_model.items():
        where: Any = whole
        for part in path:
            where = where.get(part) if isinstance(where, Mapping) else None
        if path and where is not None:
            values[name] = where
    return values


def put_out(model: Config, outside_model: Mapping[str, tuple[str, ...]]) -> dict[str, Any]:
    """The whole Cerebras config for a ``model`` section, with the fields of *outside_model* at their places."""
    whole: dict[str, Any] = {"model": {k: v for k, v in model.items() if k not in outside_model}}
    for name, path in outside_model.items():
        if path and name in model:
            where = whole
            for part in path[:-1]:
                where = where.setdefault(part, {})
            where[path[-1]] = model[name]
    return whole


@dataclass(frozen=True, slots=True)
class OneOf:
    """Several values that a `SideTable.require` field may have."""

    values: tuple[object, ...]


def one_of(*values: object) -> OneOf:
    """A field that may have any of these values."""
    return OneOf(values)


def allowed(wanted: object) -> tuple[object, ...]:
    """The values that a required field may have."""
    return wanted.values if isinstance(wanted, OneOf) else (wanted,)


def _check(fields: Fields, require: Config, other: Config) -> None:
    for name, wanted in require.items():
        if name in fields and fields[name] not in allowed(wanted):
            fields.refuse(name, f"only {' or '.join(map(repr, allowed(wanted)))} can be converted")
    for name in other:
        if name in fields and name not in require:
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
