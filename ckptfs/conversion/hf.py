"""Between Hugging Face and the Cerebras formats that a family's tables hold for: `between_hf`, `config_between_hf`.

Reads no tensor data.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from ckptfs.conversion.apply import convert_tensors
from ckptfs.conversion.components import by_component, flat, in_one, nest, parts
from ckptfs.conversion.config import ConfigTable, bring_in, filled, put_out
from ckptfs.conversion.conversion import Conversion
from ckptfs.conversion.explain import FieldUse, check_common, explain, unknown_fields
from ckptfs.conversion.family import Family
from ckptfs.conversion.folding import lora, mup
from ckptfs.conversion.format_names import CURRENT, HF, ModelFormat
from ckptfs.conversion.rules import Context, Side
from ckptfs.conversion.sections import model_section, with_model_section
from ckptfs.errors import ConfigError, MappingError, MissingField, NoPath
from ckptfs.formats.source import Item, Source
from ckptfs.tensors.elementwise import FLOATS, elementwise
from ckptfs.tensors.tensor import Tensor, n_elements


def between_hf(
    source: Source,
    family: Family,
    config: Mapping[str, Any],
    src: ModelFormat,
    tgt: ModelFormat,
    *,
    drop_unmatched: bool = False,
) -> Conversion:
    """*source* as *tgt*. *config* is the whole source config (``config.json``, or the trainer's YAML).

    Raises `NoPath`, `ConfigError`, `UnmatchedKeys`, `MissingKeys` or `ShapeError`.
    """
    family = resolved(family, config, src, tgt)
    if tgt == HF:
        return _to_hf(source, family, config, src, drop_unmatched)
    return _to_cs(source, family, config, tgt, drop_unmatched)


def _to_hf(
    source: Source, family: Family, config: Mapping[str, Any], src: ModelFormat, drop_unmatched: bool
) -> Conversion:
    config, held, warnings = without_lora(family.name, config, model_state(source))
    model, how = _unfolded(family, config, src)
    if how and family.mup == "config":
        raise _no_mup(family)
    hf, cs = hf_config(family, config, src)
    state = {_strip(k, family): t for k, t in held.items()}
    if how:
        state = mup.fold_tensors(family.name, family.mup_rules, model, how, state)
    context = Context(family.name, family.sizes(family.name, cs), _flat_hf(family, hf), cs)
    _refuse_gaps(family, source, "cs", context, drop_unmatched)
    tensors, dropped, generated = convert_tensors(family.table, state, "hf", context, drop_unmatched)
    warnings = (*warnings, *unknown_fields(family.name, *_source_fields(family, config, src), "cs"))
    if _sideband(config):
        tensors = {k: elementwise(t, ("nan_to", 0.0)) for k, t in tensors.items()}
    folders = by_component(family.name, tensors, family.components)
    for folder, held in folders.items():
        (hf[folder] if folder else hf).setdefault("torch_dtype", _main_dtype(held.values()))
    return Conversion(
        *(family.name, src.name, "hf", in_one(folders), hf, dropped, generated, warnings),
        components=family.components,
        files=family.files(hf),
        paths=family.paths,
    )


def _to_cs(
    source: Source, family: Family, config: Mapping[str, Any], tgt: ModelFormat, drop_unmatched: bool
) -> Conversion:
    whole = cs_config(family, config, tgt)
    table, config = _source_fields(family, config, HF)
    hf = table.source(family.name, config, "hf")
    cs = filled(flat(whole["model"], family.sections), family.config.cs.defaults)
    context = Context(family.name, family.sizes(family.name, cs), hf, cs)
    _refuse_gaps(family, source, "hf", context, drop_unmatched)
    tensors, dropped, generated = convert_tensors(family.table, model_state(source), "cs", context, drop_unmatched)
    more = family.add_missing(context, tensors)
    return Conversion(
        *(family.name, "hf", tgt.name, {**tensors, **more}, whole, dropped, (*generated, *more)),
        warnings=unknown_fields(family.name, table, config, "hf"),
        components=family.components,
    )


def config_between_hf(
    family: Family, config: Mapping[str, Any], src: ModelFormat, tgt: ModelFormat
) -> tuple[Mapping[str, Any], tuple[str, ...]]:
    """The whole *config* in the other format, and warnings about unknown fields. Errors as `between_hf`'s."""
    family = resolved(family, config, src, tgt)
    made = hf_config(family, config, src)[0] if tgt == HF else cs_config(family, config, tgt)
    frm: Side = "hf" if src == HF else "cs"
    return made, unknown_fields(family.name, *_source_fields(family, config, src), frm)


def explain_between_hf(family: Family, config: Mapping[str, Any], src: ModelFormat, tgt: ModelFormat) -> list[FieldUse]:
    """What happens to each field of *config* between hf and the Cerebras format that the family's tables hold for."""
    family = resolved(family, config, src, tgt)
    table, fields = _source_fields(family, config, src)
    if src == HF:
        return explain(table, fields, "hf")
    folded = [
        FieldUse(name, "transformed", "muP, folded into the weights")
        for name in _model(family, config)
        if name not in fields
    ]
    return [*explain(table, fields, "cs"), *folded]


def _source_fields(family: Family, config: Mapping[str, Any], src: ModelFormat) -> tuple[ConfigTable, dict[str, Any]]:
    """The table for a whole source config, and the fields that it sees, flat; see `flat`."""
    if src != HF:
        model, how = _unfolded(family, config, src)
        return family.config, mup.fold_config(family.name, family.mup_rules, model, how) if how else model
    fields = _flat_hf(family, config)
    return family.hf_config(fields), fields


def hf_config(family: Family, config: Mapping[str, Any], src: ModelFormat) -> tuple[dict[str, Any], dict[str, Any]]:
    """``config.json`` for a whole Cerebras config of release *src*, and the filled ``model`` section behind it.

    muP fields are removed first, or refused.
    """
    table, model = _source_fields(family, config, src)
    cs = table.source(family.name, model, "cs")
    hf = table.convert(family.name, cs, "hf")
    for prefix in family.prefixes():
        _half_precision_to_hf(config, hf, prefix)
        hf.setdefault(f"{prefix}architectures", [family.architecture])
    return nest(hf), cs


def _unfolded(family: Family, config: Mapping[str, Any], src: ModelFormat) -> tuple[dict[str, Any], mup.Style | None]:
    """The ``model`` section with the fields outside of it, and the style of muP to fold, if any."""
    model = _model(family, config)
    styles = [mup.style(family.name, part) for part in parts(model, family.sections) if family.mup != "own"]
    how = next((style for style in styles if style), None)
    if how and (family.mup == "refuse" or (src.release or CURRENT) < family.mup_since):
        raise _no_mup(family)
    return model, how


def _model(family: Family, config: Mapping[str, Any]) -> dict[str, Any]:
    """The ``model`` section of a whole Cerebras config, flat, with the fields outside of it."""
    return bring_in(flat(model_section(config), family.sections), config, family.config.outside_model)


def _no_mup(family: Family) -> ConfigError:
    return ConfigError(f"{family.name}: the config has muP fields, which this model cannot fold into weights")


def fold_lora(
    source: Source, config: Mapping[str, Any], *, model: str | None = None
) -> tuple[Mapping[str, Any], Mapping[str, Tensor], tuple[str, ...]]:
    """`without_lora` for a checkpoint that must have adapters, and only tensors in its model."""
    section = model_section(config)
    name = model or str(section.get("name") or "model")
    if section.get(lora.FIELD) is None and lora.callback_params(config) is None:
        raise MissingField(
            name, lora.FIELD, "there is nothing to fold; give the config that the adapters were made with"
        )
    for key, item in model_items(source).items():
        if item.tensor is None and item.kind != "none":
            raise MappingError(f"{name}: {key} cannot be written: {item.reason or f'it is a {item.kind} value'}")
    return without_lora(name, config, model_state(source))


def without_lora(
    model: str, config: Mapping[str, Any], state: Mapping[str, Tensor]
) -> tuple[Mapping[str, Any], Mapping[str, Tensor], tuple[str, ...]]:
    """A whole Cerebras config and its ``model`` state with LoRA adapters folded in, and warnings; as `lora.fold`."""
    section = model_section(config)
    params = lora.callback_params(config)
    if params is not None:
        section = {lora.FIELD: params, **section}
    if not lora.has_lora(section, state):
        return config, state, ()
    folded = lora.fold(model, section, state)
    return with_model_section(lora.without_callback(config), folded.config), folded.tensors, folded.warnings


def cs_config(family: Family, config: Mapping[str, Any], tgt: ModelFormat) -> dict[str, Any]:
    """The whole Cerebras config of release *tgt* for a ``config.json``."""
    assert tgt.release is not None
    table, config = _source_fields(family, config, HF)
    check_common(family.name, table, config, "hf")
    cs = table.convert(family.name, table.source(family.name, config, "hf"), "cs")
    halves = [config[f"{prefix}use_bfloat16"] for prefix in family.prefixes() if f"{prefix}use_bfloat16" in config]
    if tgt.release >= (2, 4) or family.newest_config:
        cs |= {"name": family.cs_name} if family.writes_name and "name" not in cs else {}
    elif (2, 1) <= tgt.release <= (2, 3) and halves:
        cs.setdefault("fp16_type", "bfloat16" if any(halves) else "float16")
    return put_out(nest(cs), table.outside_model)


def resolved(family: Family, config: Mapping[str, Any], src: ModelFormat, tgt: ModelFormat) -> Family:
    """*family* resolved by the source config. Raises `NoPath` where it does not connect these formats."""
    if family.resolve is not None:
        check_path(family, src, tgt)
        family = family.of(config if src == HF else model_section(config), "hf" if src == HF else "cs")
    check_path(family, src, tgt)
    return family.at(tgt if src == HF else src)


def check_path(family: Family, src: ModelFormat, tgt: ModelFormat) -> None:
    """`NoPath` unless one of the formats is hf and the family holds for the release of the other."""
    if (src == HF) == (tgt == HF) or not family.covers(tgt if src == HF else src):
        raise NoPath(family.name, src.name, tgt.name, family.known())


def model_items(source: Source) -> dict[str, Item]:
    """The items of the ``model`` state, by the keys inside it; all items where there are no states."""
    states = source.tree.keys if source.tree is not None else None
    prefix = "model." if states is not None and "model" in states else ""
    return {k[len(prefix) :]: item for k, item in source.items.items() if k.startswith(prefix)}


def model_state(source: Source) -> dict[str, Tensor]:
    """The tensors among `model_items`."""
    return {key: item.tensor for key, item in model_items(source).items() if item.tensor is not None}


def _refuse_gaps(family: Family, source: Source, frm: Side, context: Context, drop_unmatched: bool) -> None:
    """Refuse a model whose tensors cannot all be shown: loaders would fill the gap with random numbers."""
    items = {_strip(key, family) if frm == "cs" else key: item for key, item in model_items(source).items()}
    if drop_unmatched or all(item.tensor is not None for item in items.values()):
        return
    held = {key: item.tensor for key, item in items.items() if item.tensor is not None}
    whole = family.table.completed(frm, held, context)
    for key, item in items.items():
        if item.tensor is None:
            found = family.table.claim(frm, key, context)
            if item.kind == "none" and (found is None or key in whole):
                continue  # a name without a tensor, as old GPT-J checkpoints have, or one that has a second copy
            if found is None or (found[0].index is not None and found[0].rule.side("hf" if frm == "cs" else "cs")):
                why = item.reason or f"it is a {item.kind} value, not a tensor"
                raise MappingError(f"{family.name}: {key} cannot be shown: {why}", option="drop_unmatched_keys")


def _flat_hf(family: Family, config: Mapping[str, Any]) -> dict[str, Any]:
    """``config.json``, by component where there are several, with sections beside its own fields; see `flat`."""
    if family.components:
        return flat(config, family.components)
    given = {name: value for name, value in config.items() if value is not None or name not in family.hf_sections}
    return flat({**{name: {} for name in family.hf_sections}, **given}, family.hf_sections)


def _strip(key: str, family: Family) -> str:
    return key.removeprefix("model.") if family.cs_prefix else key


def _half_precision_to_hf(config: Mapping[str, Any], hf: dict[str, Any], prefix: str) -> None:
    """``fp16_type`` counts only at the very top of a Cerebras config; elsewhere the converter does not see it."""
    if "fp16_type" in config:
        kinds = {"bfloat16": True, "cbfloat16": True, "float16": False}
        if not isinstance(config["fp16_type"], str) or config["fp16_type"] not in kinds:
            raise ConfigError(
                f"config field fp16_type is {config['fp16_type']!r}, but only {', '.join(kinds)} can be converted"
            )
        hf[f"{prefix}use_bfloat16"] = kinds[config["fp16_type"]]


def _sideband(config: Mapping[str, Any]) -> bool:
    """Sideband sparsity marks pruned weights with NaN."""
    sparsity = config.get("sparsity")
    return isinstance(sparsity, Mapping) and sparsity.get("type") == "sideband"


def _main_dtype(tensors: Iterable[Tensor]) -> str:
    """The float type that most elements have."""
    counts: dict[str, int] = {}
    for t in tensors:
        if t.dtype.name in FLOATS:
            counts[t.dtype.name] = counts.get(t.dtype.name, 0) + n_elements(t.shape)
    return max(counts, key=lambda name: counts[name]) if counts else "float32"
