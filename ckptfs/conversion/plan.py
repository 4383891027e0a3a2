"""From any format of a model to any other: `make_view` and `config_as`.

A family's tables connect Hugging Face and Cerebras (`hf`); steps connect the Cerebras releases among each other
(`releases`). Where the tables do not hold for a release, the conversion goes through the nearest one that they hold
for. The code for steps between releases is imported only when it is needed: most mounts start without it.
Reads no tensor data.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from ckptfs.conversion import hf
from ckptfs.conversion.conversion import Conversion
from ckptfs.conversion.explain import FieldUse
from ckptfs.conversion.family import Family
from ckptfs.conversion.format_names import CURRENT, HF, ModelFormat
from ckptfs.errors import NoPath, UsageError
from ckptfs.formats.source import Item, Source


def make_view(
    source: Source,
    family: Family,
    config: Mapping[str, Any],
    src: ModelFormat,
    tgt: ModelFormat,
    *,
    dataloader: Mapping[str, Any] | None = None,
    drop_unmatched: bool = False,
) -> Conversion:
    """*source* as *tgt*; *config* is its whole config (``config.json``, or the trainer's YAML).

    Between Cerebras releases the view has a `state`: everything that the checkpoint holds, with *dataloader* (the
    state of the input pipeline, where it stood apart) and a new entry in ``__metadata__``. Raises `NoPath`,
    `ConfigError`, `UnmatchedKeys`, `MissingKeys`, `MappingError` or `ShapeError`.
    """
    if src == HF or tgt == HF:
        return _with_hf(source, family, config, src, tgt, drop_unmatched)
    from ckptfs.conversion.releases import convert

    done = convert.upgraded(source, family, config, src, tgt, dataloader=dataloader, drop_unmatched=drop_unmatched)
    tensors = hf.model_state(done.source)
    return Conversion(family.name, src.name, tgt.name, tensors, done.config, warnings=done.warnings, state=done.source)


def config_as(
    family: Family, config: Mapping[str, Any], src: ModelFormat, tgt: ModelFormat, *, warnings: list[str] | None = None
) -> Mapping[str, Any]:
    """The whole *config* in another format; warnings for the user are added to *warnings*. Errors as `make_view`'s."""
    from ckptfs.conversion.releases import convert

    warnings = [] if warnings is None else warnings
    if HF not in (src, tgt):
        return convert.config_as(family, config, src, tgt, warnings)
    near = _near(family, src, tgt)
    if tgt == HF:
        config = config if near == src else convert.config_as(family, config, src, near, warnings)
        made, unknown = hf.config_between_hf(family, config, near, HF)
        warnings += unknown
        return made
    made, unknown = hf.config_between_hf(family, config, HF, near)
    warnings += unknown
    return made if near == tgt else convert.config_as(family, made, near, tgt, warnings)


def explain_config_as(
    family: Family, config: Mapping[str, Any], src: ModelFormat, tgt: ModelFormat
) -> tuple[list[FieldUse], ModelFormat]:
    """What happens to each field of the whole *config* between hf and the Cerebras format nearest to the other one.

    Returns that format, too. `UsageError` between Cerebras releases, where fields change step by step.
    """
    from ckptfs.conversion.releases import convert

    if HF not in (src, tgt):
        raise UsageError("fields are explained between hf and a Cerebras release; name hf as one of the formats")
    near = _near(family, src, tgt)
    if tgt == HF:
        config = config if near == src else convert.config_as(family, config, src, near, [])
        return hf.explain_between_hf(family, config, near, HF), near
    return hf.explain_between_hf(family, config, HF, near), near


def _with_hf(
    source: Source, family: Family, config: Mapping[str, Any], src: ModelFormat, tgt: ModelFormat, drop_unmatched: bool
) -> Conversion:
    near = _near(family, src, tgt)
    if near in (src, tgt):
        return hf.between_hf(source, family, config, src, tgt, drop_unmatched=drop_unmatched)
    from ckptfs.conversion.releases import convert

    if tgt == HF:
        model = _model_only(source, hf.model_items(source))
        done = convert.upgraded(model, family, config, src, near, note=False, drop_unmatched=drop_unmatched)
        view = hf.between_hf(done.source, family, done.config, near, HF, drop_unmatched=drop_unmatched)
        return replace(view, src=src.name, warnings=(*done.warnings, *view.warnings))
    view = hf.between_hf(source, family, config, HF, near, drop_unmatched=drop_unmatched)
    made = {key: Item(key, "tensor", tensor=tensor) for key, tensor in view.tensors.items()}
    done = convert.upgraded(_model_only(source, made), family, view.config, near, tgt, note=False)
    warnings = (*view.warnings, *done.warnings)
    return replace(view, tgt=tgt.name, tensors=hf.model_state(done.source), config=done.config, warnings=warnings)


def _near(family: Family, src: ModelFormat, tgt: ModelFormat) -> ModelFormat:
    """The Cerebras format nearest to *src* or *tgt* that the tables hold for; `NoPath` where no steps lead to it."""
    wanted = src if tgt == HF else tgt
    near = ModelFormat(min(max(wanted.release or CURRENT, family.since), family.until), family.variant)
    if near == wanted and family.covers(near):
        return near
    from ckptfs.conversion.releases import convert

    if not family.covers(near) or not convert.connected(family, near, wanted):
        raise NoPath(family.name, src.name, tgt.name, f"{family.known()}; {convert.known(family)}")
    return near


def _model_only(source: Source, items: Mapping[str, Item]) -> Source:
    """A Cerebras checkpoint that holds a model with these *items* and nothing else."""
    return replace(source, items=dict(items), tree=None, metadata=[])
