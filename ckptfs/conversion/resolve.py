"""Flags, metadata and configs resolved to a family, two formats and a config: the start of a conversion."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from ckptfs.conversion import plan, registry
from ckptfs.conversion.config_files import config_beside
from ckptfs.conversion.conversion import Conversion
from ckptfs.conversion.explain import FieldUse
from ckptfs.conversion.family import Family
from ckptfs.conversion.format_names import HF, ModelFormat, parse_format
from ckptfs.conversion.sections import model_section
from ckptfs.errors import (
    CkptfsError,
    ConfigError,
    MappingError,
    NoPath,
    ShapeError,
    UnknownFamily,
    UsageError,
)
from ckptfs.formats.cerebras.dataloader import configured_state
from ckptfs.formats.config_files import read_config_file
from ckptfs.formats.huggingface import config_in
from ckptfs.formats.source import Source

PathLike = str | os.PathLike[str]
UNKNOWN_MODEL = "the checkpoint names a model that is not known here"
NO_MODEL = "nothing in the checkpoint tells its model family"


def prepare(
    source: Source,
    *,
    model: str | None = None,
    config: PathLike | Mapping[str, Any] | None = None,
    src_fmt: str | None = None,
    tgt_fmt: str | None = None,
    drop_unmatched_keys: bool = False,
) -> tuple[Conversion | None, str | None]:
    """The view a mount shows, or None and the reason why there is none.

    A model or config that cannot be converted is a reason; a name or file that does not exist is an error, and so is a
    *tgt_fmt* to which no way leads.
    """
    try:
        wanted = tgt_fmt or ("hf" if is_cerebras(source, src_fmt) else "cs-current")
        return plan_view(source, wanted, model=model, config=config, src_fmt=src_fmt, drop=drop_unmatched_keys), None
    except (UnknownFamily, UsageError) as e:
        if model or src_fmt or tgt_fmt:
            raise
        if isinstance(e, UnknownFamily) and e.name:
            return None, f"{UNKNOWN_MODEL} ({e.name})"
        return None, NO_MODEL
    except (MappingError, ConfigError, ShapeError) as e:
        if tgt_fmt and isinstance(e, NoPath):
            raise
        return None, str(e)


def recorded_family(source: Source) -> str | None:
    """The family that the checkpoint names itself, also where its config cannot be converted; None when it does not."""
    if source.metadata:
        params = source.metadata[-1].get("params")
        known = map(registry.by_cs_name, _names(source.metadata, params if isinstance(params, Mapping) else {}))
        return next((family.name for family in known if family), None)
    candidates = registry.by_hf_config(source.config or {})
    return candidates[0].name if candidates else None


def recorded_config(source: Source) -> Mapping[str, Any] | None:
    """The model config that the checkpoint holds (the trainer's, the last one noted) or that lies beside it."""
    last = source.metadata[-1] if source.metadata else {}
    found = (last.get("params") if is_cerebras(source) else None) or source.config
    return found if isinstance(found, Mapping) else None


def is_cerebras(source: Source, src_fmt: str | None = None) -> bool:
    """Whether *source* is a Cerebras checkpoint (by *src_fmt*, if given)."""
    return src_fmt != "hf" if src_fmt else source.format == "cerebras-h5"


def plan_view(
    source: Source,
    tgt_fmt: str,
    *,
    model: str | None = None,
    config: PathLike | Mapping[str, Any] | None = None,
    src_fmt: str | None = None,
    drop: bool = False,
) -> Conversion:
    """Find formats, family and config, and plan the conversion."""
    last = source.metadata[-1] if source.metadata else {}
    tgt = parse_format(tgt_fmt)
    cerebras = is_cerebras(source, src_fmt)
    # What wrote the file may have been a converter: good enough to a Hugging Face model, not between releases.
    auto = last.get("version") or (source.release if tgt == HF or not cerebras else None)
    src = parse_format(src_fmt or ("cs-auto" if cerebras else "hf"), auto=str(auto) if auto else _fallback(tgt))
    values, found = _config(source, config, last, cerebras)
    inputs = _inputs(config, values) if HF not in (src, tgt) else None
    notes = _about_found(found, values) if found else ()
    problems: list[CkptfsError] = []
    for family in _families(model, values, source.metadata if cerebras else [], cerebras):
        try:
            src, tgt = _in_full(src, src_fmt, family), _in_full(tgt, tgt_fmt, family)
            view = plan.make_view(source, family, values, src, tgt, dataloader=inputs, drop_unmatched=drop)
            return replace(view, warnings=(*notes, *view.warnings))
        except (MappingError, ShapeError) as e:  # a headless or another variant may fit; a config would not change
            problems.append(e)
    raise problems[0]


def convert_config(
    config: Mapping[str, Any],
    src_fmt: str,
    tgt_fmt: str,
    *,
    model: str | None = None,
    warnings: list[str] | None = None,
) -> tuple[dict[str, Any], str]:
    """A whole config in another format, and that format's full name; errors as `view`'s.

    What is lost is added to *warnings*, one line each.
    """
    view = config_view(config, src_fmt, tgt_fmt, model=model, warnings=warnings)
    return {**view.config}, view.tgt


def config_view(
    config: Mapping[str, Any],
    src_fmt: str,
    tgt_fmt: str,
    *,
    model: str | None = None,
    warnings: list[str] | None = None,
) -> Conversion:
    """The conversion of a config alone, without tensors; as `convert_config`."""
    src, tgt = parse_format(src_fmt), parse_format(tgt_fmt)
    family = _families(model, config, [], src != HF)[0]
    src, tgt = _in_full(src, src_fmt, family), _in_full(tgt, tgt_fmt, family)
    made = plan.config_as(family, config, src, tgt, warnings=warnings)
    if tgt != HF:
        return Conversion(family.name, src.name, tgt.name, {}, made)
    files = family.files(made)
    return Conversion(
        *(family.name, src.name, tgt.name, {}, made), components=family.components, files=files, paths=family.paths
    )


def explain_config(
    config: Mapping[str, Any], src_fmt: str, tgt_fmt: str, *, model: str | None = None
) -> tuple[str, ModelFormat, ModelFormat, list[FieldUse]]:
    """What happens to each field of *config*; first the model and the two formats that the table connects."""
    src, tgt = parse_format(src_fmt), parse_format(tgt_fmt)
    family = _families(model, config, [], src != HF)[0]
    src, tgt = _in_full(src, src_fmt, family), _in_full(tgt, tgt_fmt, family)
    uses, near = plan.explain_config_as(family, config, src, tgt)
    return family.name, near if tgt == HF else HF, HF if tgt == HF else near, uses


def _in_full(fmt: ModelFormat, name: str | None, family: Family) -> ModelFormat:
    """*fmt* in the family's variant, unless *name* gives a release: ``cs-2.9`` is not ``cs-2.9-dpo``."""
    if fmt == HF or name not in (None, "cs-auto", "cs-current"):
        return fmt
    return replace(fmt, variant=family.variant)


def _inputs(config: PathLike | Mapping[str, Any] | None, values: Mapping[str, Any]) -> dict[str, Any] | None:
    """The input state that stood apart from the checkpoint; a checkpoint itself cannot point out of its file."""
    if config is None:
        return None
    return configured_state(values, "" if isinstance(config, Mapping) else os.path.dirname(os.fspath(config)))


def _about_found(path: str, config: Mapping[str, Any]) -> tuple[str, ...]:
    """What to tell of a config that was found beside the checkpoint: nobody named it."""
    name = os.path.basename(path)
    notes = (f"the model config is {name}, found beside the checkpoint",)
    section = config.get("cerebras")
    if isinstance(section, Mapping) and section.get("save_iter_state_path"):
        return (*notes, f"{name}: save_iter_state_path is not followed; name the config for that")
    return notes


def _fallback(tgt: ModelFormat) -> str | None:
    """HF <-> CS tensors are the same for all releases of a layout, so an unknown release is taken as the current."""
    return "2.10" if tgt == HF else None


def _config(
    source: Source, config: PathLike | Mapping[str, Any] | None, last: Mapping[str, Any], cerebras: bool
) -> tuple[Mapping[str, Any], str | None]:
    """The config: the one given, the checkpoint's own, or that of a file beside it, whose path comes with it."""
    if isinstance(config, Mapping):
        return config, None
    if config is not None:
        return read_config(config), None
    recorded = (last.get("params") if cerebras else None) or source.config
    if isinstance(recorded, Mapping):
        return recorded, None
    found = config_beside(source.path, read_config) if cerebras else None
    if found is None:
        raise UsageError(f"{source.path}: the checkpoint holds no model config; give it", option="config")
    return found.values, found.path


def read_config(path: PathLike) -> Mapping[str, Any]:
    """A YAML or JSON config file, or the ``config.json`` files in a model's folder, as plain data."""
    return config_in(os.fspath(path)) if os.path.isdir(path) else read_config_file(path)


def _families(
    model: str | None, config: Mapping[str, Any], metadata: Sequence[Mapping[str, Any]], cerebras: bool
) -> list[Family]:
    """The families to try, likeliest first."""
    if model:
        return [registry.family(model)]
    if not cerebras:
        found = registry.by_hf_config(config)
        names = [str(config.get("model_type") or "")]
    else:
        names = _names(metadata, config)
        known = next((name for name in names if registry.by_cs_name(name) is not None), None)
        found = registry.by_cs_config(known, model_section(config)) if known else []
    if not found:
        name = next(filter(None, names), None)
        raise UnknownFamily(name) if name else UsageError("nothing tells the model family; name it", option="model")
    return found


def _names(metadata: Sequence[Mapping[str, Any]], config: Mapping[str, Any]) -> list[str]:
    """What a Cerebras checkpoint calls its model, the surest name first.

    A class of the trainer may stand for several models, so the config's name goes before it.
    """
    recorded = [str(entry.get("model_name") or "") for entry in reversed(metadata)]
    classes = [name for name in recorded if name in registry.TRAINER_CLASSES]
    try:
        named = str(model_section(config).get("name") or "")
    except ConfigError:
        if not recorded:
            raise
        named = ""
    return [name for name in (*(n for n in recorded if n not in classes), named, *classes) if name]
