"""Models whose Hugging Face side is several folders, such as a question encoder and a context encoder.

Configs and tensors have flat names: field f in the ``config.json`` of folder c is ``c/f``, field f in a nested
section of the Cerebras config is ``section/f`` (list entries count by number). So a model of several components is
one `Table` and one `ConfigTable`, put together from those of its parts.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import wraps
from typing import Any, TypeVar

from ckptfs.conversion.config import Config, ConfigTable, Convert, Fields, FieldTransform, SideTable
from ckptfs.conversion.rules import Context, Extra, Generate, Rule, Second, under
from ckptfs.errors import ConfigError, MissingKeys
from ckptfs.tensors.tensor import Tensor

T = TypeVar("T")


def component(folder: str, keys: str, section: str, rules: Iterable[Rule]) -> list[Rule]:
    """*rules* for the folder ``folder/`` and Cerebras keys that begin with *keys*.

    Their functions see the config of that folder, and that *section* of the Cerebras config.
    """

    def seen(ask: Callable[..., T]) -> Callable[..., T]:
        @wraps(ask)
        def inside(context: Context, *rest: Any) -> T:
            hf, cs = within(context.hf, f"{folder}/"), within(context.cs, f"{section}/")
            return ask(replace(context, hf=hf, cs=cs), *rest)

        return inside

    def generated(generate: Generate) -> Generate:
        if isinstance(generate, Second):
            return Second(seen(generate.generate), seen(generate.when))
        return seen(generate)

    def extras(found: tuple[Extra, ...]) -> tuple[Extra, ...]:
        return tuple(replace(extra, generate=generated(extra.generate)) for extra in found)

    narrowed = [
        replace(
            rule,
            when=seen(rule.when) if rule.when else None,
            hf_choice=seen(rule.hf_choice) if rule.hf_choice else None,
            hf_extra=extras(rule.hf_extra),
            cs_extra=extras(rule.cs_extra),
        )
        for rule in rules
    ]
    return under(f"{folder}/", keys, narrowed)


def component_config(folder: str, section: str, table: ConfigTable) -> ConfigTable:
    """*table* for the ``config.json`` in ``folder/`` and that *section* of the Cerebras config."""
    hf, cs = f"{folder}/", f"{section}/"
    return ConfigTable(
        renames={hf + theirs: cs + ours for theirs, ours in table.renames.items()},
        transforms=tuple(
            FieldTransform(_all(hf, t.hf), _all(cs, t.cs), _inside(t.to_cs, hf, cs), _inside(t.to_hf, cs, hf))
            for t in table.transforms
        ),
        hf=_side(table.hf, hf),
        cs=_side(table.cs, cs),
    )


def joined(*tables: ConfigTable) -> ConfigTable:
    """One table that does what all of *tables* do."""
    return ConfigTable(
        renames={k: v for table in tables for k, v in table.renames.items()},
        transforms=tuple(transform for table in tables for transform in table.transforms),
        hf=_one_side([table.hf for table in tables]),
        cs=_one_side([table.cs for table in tables]),
    )


def within(values: Config, prefix: str) -> dict[str, Any]:
    """The fields of *values* whose names begin with *prefix*, without it."""
    return {name[len(prefix) :]: value for name, value in values.items() if str(name).startswith(prefix)}


def parts(values: Config, prefixes: Sequence[str]) -> list[Config]:
    """*values* as a whole, and each of its sections alone."""
    return [values, *(within(values, f"{prefix}/") for prefix in prefixes)]


def flat(values: Any, sections: Sequence[str], at: str = "") -> dict[str, Any]:
    """*values* with the fields of nested *sections* beside its own, as ``section/field``; see `nest`.

    Raises `ConfigError` for a section that is missing or has no fields to name.
    """
    result: dict[str, Any] = {}
    missing = set(sections)
    for name, value in values.items() if isinstance(values, Mapping) else enumerate(values):
        path = f"{at}{name}"
        inner = [section for section in sections if f"{section}/".startswith(f"{path}/")]
        if inner and not isinstance(value, Mapping if path in inner else Mapping | list):
            raise ConfigError(f"{path} in the config is not a section with fields")
        result |= flat(value, [s for s in inner if s != path], f"{path}/") if inner else {path: value}
        missing.difference_update(inner)
    if missing:
        raise ConfigError(f"the config has no {' and no '.join(sorted(missing))}; is it the config of this model?")
    return result


def nest(values: Config) -> Any:
    """*values* with ``section/field`` in nested mappings again; sections that are numbers become a list."""
    own: dict[str, Any] = {}
    groups: dict[str, dict[str, Any]] = {}
    for path, value in values.items():
        head, slash, rest = path.partition("/")
        if slash:
            groups.setdefault(head, {})[rest] = value
        else:
            own[head] = value
    inner = {name: nest(group) for name, group in groups.items()}
    return list(inner.values()) if inner and all(map(str.isdecimal, inner)) else own | inner


def by_component(model: str, tensors: Mapping[str, Tensor], folders: Sequence[str]) -> dict[str, dict[str, Tensor]]:
    """The tensors of each of *folders*, sorted by name; all tensors under an empty name where there are no folders.

    Raises `MissingKeys` for a folder without any.
    """
    if not folders:
        return {"": dict(tensors)}
    found = {folder: within(tensors, f"{folder}/") for folder in sorted(folders)}
    empty = [folder for folder, held in found.items() if not held]
    if empty:
        raise MissingKeys(model, empty, "the checkpoint has no tensor of it; the model needs all of its components")
    return found


def in_one(folders: Mapping[str, Mapping[str, Tensor]]) -> dict[str, Tensor]:
    """The tensors that `by_component` separated, as ``folder/key`` again."""
    return {f"{folder}/{key}" if folder else key: t for folder, held in folders.items() for key, t in held.items()}


def _all(prefix: str, names: Iterable[str]) -> tuple[str, ...]:
    return tuple(prefix + name for name in names)


def _inside(convert: Convert, frm: str, to: str) -> Convert:
    """*convert* for a part of a model: it reads names that begin with *frm* and writes names that begin with *to*."""

    @wraps(convert)
    def run(fields: Fields) -> Config:
        inner = Fields(f"{fields.model} {frm.rstrip('/')}", within(fields, frm))
        return {to + name: value for name, value in convert(inner).items()}

    return run


def _side(side: SideTable, prefix: str) -> SideTable:
    def named(values: Mapping[str, T]) -> dict[str, T]:
        return {prefix + name: value for name, value in values.items()}

    return SideTable(
        constants=named(side.constants),
        require=named(side.require),
        defaults=named(side.defaults),
        write=named(side.write),
        normalize=tuple(_inside(convert, prefix, prefix) for convert in side.normalize),
        aliases={prefix + alias: prefix + name for alias, name in side.aliases.items()},
        reads=_all(prefix, side.reads),
        ignored=named(side.ignored),
    )


def _one_side(sides: list[SideTable]) -> SideTable:
    def together(which: str) -> dict[str, Any]:
        return {name: value for side in sides for name, value in getattr(side, which).items()}

    return SideTable(
        constants=together("constants"),
        require=together("require"),
        defaults=together("defaults"),
        write=together("write"),
        normalize=tuple(convert for side in sides for convert in side.normalize),
        aliases=together("aliases"),
        reads=tuple(name for side in sides for name in side.reads),
        ignored=together("ignored"),
    )
