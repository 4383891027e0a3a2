"""What a config table does to each field: for ``convert-config --explain``, and for warnings about unknown fields."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

from ckptfs.conversion import common_fields
from ckptfs.conversion.config import Config, ConfigTable, allowed
from ckptfs.conversion.rules import Side
from ckptfs.errors import UnsupportedValue

Use: TypeAlias = Literal["renamed", "transformed", "required", "default", "ignored", "unknown"]


@dataclass(frozen=True, slots=True)
class FieldUse:
    """What happens to one config field."""

    field: str
    what: Use
    detail: str = ""
    """The other side's names, the value that is required or assumed, or the reason why the field is ignored."""


def field_use(table: ConfigTable, name: str, frm: Side) -> FieldUse:
    """What *table* does to field *name* of side *frm*."""
    side = table.side(frm)
    own, plain = side.aliases.get(name, name), name.rpartition("/")[2]
    renames = table.renamed(frm)
    to: Side = "cs" if frm == "hf" else "hf"
    transforms = [transform for transform in table.transforms if own in transform.side(frm)]
    targets = dict.fromkeys(target for transform in transforms for target in transform.side(to))
    if own in renames:
        return FieldUse(name, "renamed", ", ".join([renames[own], *targets]))
    if own in side.required:
        return FieldUse(name, "required", _values(side.required[own]))
    if transforms or own in side.reads or plain in common_fields.HF_READ:
        return FieldUse(name, "transformed", ", ".join(targets) or "read with other fields")
    if own in side.ignored:
        return FieldUse(name, "ignored", side.ignored[own])
    if plain in common_fields.required(frm):
        return FieldUse(name, "required", _values(common_fields.required(frm)[plain]))
    if plain in common_fields.ignored(frm):
        return FieldUse(name, "ignored", common_fields.ignored(frm)[plain])
    return FieldUse(name, "unknown")


def explain(table: ConfigTable, config: Config, frm: Side) -> list[FieldUse]:
    """What *table* does to each field of *config*, and which defaults it fills in."""
    given = [field_use(table, name, frm) for name in config]
    aliases = table.side(frm).aliases
    present = {aliases.get(name, name) for name in config}
    missing = {name: value for name, value in table.side(frm).defaults.items() if name not in present}
    return given + [FieldUse(name, "default", _default(table, name, value, frm)) for name, value in missing.items()]


def unknown_fields(model: str, table: ConfigTable, config: Config, frm: Side) -> tuple[str, ...]:
    """A warning that names the fields of *config* that no table mentions; nothing where there are none."""
    names = [name for name in config if field_use(table, name, frm).what == "unknown"]
    if not names:
        return ()
    noun = "field is" if len(names) == 1 else "fields are"
    return (f"{model}: {len(names)} config {noun} not known and left out: {', '.join(names)}",)


def check_common(model: str, table: ConfigTable, config: Config, frm: Side) -> None:
    """`UnsupportedValue` for a field of any family that would change the model, and that *table* does not mention."""
    wanted: Mapping[str, Any] = common_fields.required(frm)
    own = {*table.side(frm).required, *table.renamed(frm), *table.side(frm).reads}
    for name, value in config.items():
        plain = name.rpartition("/")[2]
        if plain in wanted and name not in own and value not in allowed(wanted[plain]):
            raise UnsupportedValue(model, name, value, f"only {_values(wanted[plain])} can be converted")


def _values(wanted: object) -> str:
    return " or ".join(map(repr, allowed(wanted)))


def _default(table: ConfigTable, name: str, value: object, frm: Side) -> str:
    use = field_use(table, name, frm)
    then = {"renamed": f" as {use.detail}", "transformed": f" for {use.detail}"}
    return f"{value!r}{then.get(use.what, '')}"
