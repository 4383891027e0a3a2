"""From a checkpoint and a family to the same checkpoint in another format: `make_view`.

Reads no tensor data. Order is part of the result: a target key stands where the first source key of its rule
stood, keys that a rule makes follow it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from ckptfs.errors import ConfigError, MappingError, MissingKeys, NoPath, ShapeError, UnmatchedKeys
from ckptfs.formats.source import Item, Source, Tensor, n_elements
from ckptfs.mappings.config import bring_in, put_out
from ckptfs.mappings.family import Family
from ckptfs.mappings.formats import CURRENT, HF, Format
from ckptfs.mappings.passes import mup
from ckptfs.mappings.table import Claim, Context, Rule, Side, Table
from ckptfs.tensors.elementwise import FLOATS, elementwise


@dataclass(frozen=True, slots=True)
class View:
    """A checkpoint as another format shows it."""

    model: str
    src: str
    tgt: str
    tensors: Mapping[str, Tensor]
    config: Mapping[str, Any]
    """``config.json`` for hf; the whole config (``{"model": {…}}``) for a Cerebras release."""
    dropped: tuple[str, ...] = ()
    """Source keys that have no place in the target."""
    made: tuple[str, ...] = ()
    """Target keys that no source key stands for."""


@dataclass(slots=True)
class _Group:
    """The source tensors of one application of a rule."""

    rule: Rule
    fields: Mapping[str, int | str]
    members: dict[int, tuple[str, Tensor]] = field(default_factory=dict)


def make_view(
    source: Source,
    family: Family,
    config: Mapping[str, Any],
    src: Format,
    tgt: Format,
    *,
    drop_unmatched: bool = False,
) -> View:
    """*source* as *tgt*. *config* is the whole source config (``config.json``, or the trainer's YAML).

    Raises `NoPath`, `ConfigError`, `UnmatchedKeys`, `MissingKeys` or `ShapeError`.
    """
    if (src == HF) == (tgt == HF):
        raise NoPath(family.name, src.name, tgt.name, family.known())
    release = src.release or tgt.release
    if release is None or not family.covers(release):
        raise NoPath(family.name, src.name, tgt.name, family.known())
    if tgt == HF:
        return _to_hf(source, family, config, src, drop_unmatched)
    return _to_cs(source, family, config, tgt, drop_unmatched)


def _to_hf(source: Source, family: Family, config: Mapping[str, Any], src: Format, drop_unmatched: bool) -> View:
    model = bring_in(model_section(config), config, family.config.outside)
    state = {_strip(k, family): t for k, t in model_state(source).items()}
    how = None if family.mup == "own" else mup.style(family.name, model)
    folded = mup.fold_config(model, how) if how else model
    cs = family.config.source(family.name, folded, "cs")
    hf = family.config.convert(family.name, cs, "hf")
    _half_precision_to_hf(config, hf)
    if how:
        if family.mup != "fold" or (src.release or CURRENT) < family.mup_since:
            raise ConfigError(f"{family.name}: the config has muP fields, which this model cannot fold into weights")
        state = mup.fold_tensors(family.name, model, how, state)
    context = Context(family.name, family.dims(family.name, cs), hf, cs)
    _refuse_gaps(family, source, "cs", context, drop_unmatched)
    tensors, dropped, made = convert_tensors(family.table, state, "hf", context, drop_unmatched)
    if _sideband(config):
        tensors = {k: elementwise(t, ("nan_to", 0.0)) for k, t in tensors.items()}
    hf.setdefault("architectures", [family.architecture])
    hf.setdefault("torch_dtype", _main_dtype(tensors.values()))
    return View(family.name, src.name, "hf", tensors, hf, dropped, made)


def _to_cs(source: Source, family: Family, config: Mapping[str, Any], tgt: Format, drop_unmatched: bool) -> View:
    assert tgt.release is not None
    table = family.hf_config(config)
    hf = table.source(family.name, config, "hf")
    cs = table.convert(family.name, hf, "cs")
    if tgt.release >= (2, 4):
        cs.setdefault("name", family.cs_name)
    elif (2, 1) <= tgt.release <= (2, 3) and "use_bfloat16" in config:
        cs.setdefault("fp16_type", "bfloat16" if config["use_bfloat16"] else "float16")
    full = family.config.source(family.name, cs, "cs")
    context = Context(family.name, family.dims(family.name, full), hf, full)
    _refuse_gaps(family, source, "hf", context, drop_unmatched)
    tensors, dropped, made = convert_tensors(family.table, model_state(source), "cs", context, drop_unmatched)
    return View(family.name, "hf", tgt.name, tensors, put_out(cs, table.outside), dropped, made)


def model_section(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """The ``model`` section of a Cerebras config, of the trainer layout or the older flat one."""
    where: Any = config
    path = ("trainer", "init", "model") if "trainer" in config else ("model",)
    for name in path:
        if isinstance(where, Sequence) and not isinstance(where, str):
            raise ConfigError("the config has a list of trainers; give the config of one of them")
        if not isinstance(where, Mapping) or name not in where:
            raise ConfigError(f"the config has no {'.'.join(path)} section; is it the config of this checkpoint?")
        where = where[name]
    if not isinstance(where, Mapping):
        raise ConfigError(f"{'.'.join(path)} in the config is not a mapping")
    return where


def model_items(source: Source) -> dict[str, Item]:
    """What the ``model`` state holds, by the keys inside it; everything where there are no states."""
    states = source.tree.keys if source.tree is not None else None
    prefix = "model." if states is not None and "model" in states else ""
    return {k[len(prefix) :]: item for k, item in source.items.items() if k.startswith(prefix)}


def model_state(source: Source) -> dict[str, Tensor]:
    """The tensors among `model_items`."""
    return {key: item.tensor for key, item in model_items(source).items() if item.tensor is not None}


def _refuse_gaps(family: Family, source: Source, frm: Side, context: Context, drop_unmatched: bool) -> None:
    """Refuse a model whose tensors cannot all be shown: loaders would fill the gap with random numbers."""
    for key, item in model_items(source).items():
        if item.tensor is None and not drop_unmatched:
            found = family.table.claim(frm, _strip(key, family) if frm == "cs" else key, context)
            if found is None and item.kind == "none":
                continue  # a name without a tensor, as old GPT-J checkpoints have
            if found is None or (found[0].index is not None and found[0].rule.side("hf" if frm == "cs" else "cs")):
                why = item.reason or f"it is a {item.kind} value, not a tensor"
                raise MappingError(
                    f"{family.name}: {key} cannot be shown: {why}. Use --drop-unmatched-keys to leave it out"
                )


def convert_tensors(
    table: Table, state: Mapping[str, Tensor], to: Side, context: Context, drop_unmatched: bool = False
) -> tuple[dict[str, Tensor], tuple[str, ...], tuple[str, ...]]:
    """The tensors of the other side, the source keys that were dropped, and the target keys that were made."""
    frm: Side = "cs" if to == "hf" else "hf"
    groups: dict[object, _Group] = {}
    dropped: list[str] = []
    unmatched: list[str] = []
    for key, tensor in state.items():
        found = table.claim(frm, key, context)
        if found is None:
            unmatched.append(key)
        elif found[0].index is None or not found[0].rule.side(to):
            dropped.append(key)
        else:
            _join(groups, key, tensor, *found)
    if unmatched and not drop_unmatched:
        raise UnmatchedKeys(
            context.model, [(k, table.nearest(frm, k) if i < 8 else "") for i, k in enumerate(unmatched)]
        )
    result: dict[str, Tensor] = {}
    behind: dict[str, Tensor] = {}
    made: list[str] = []
    for group in groups.values():
        tensors = _apply(group, frm, to, context)
        result |= tensors
        for extra in group.rule.makes(to):
            tensor_made = extra.make(context, next(iter(tensors.values())))
            if tensor_made is not None:
                name = extra.template.format(group.fields)
                (behind if extra.last else result)[name] = tensor_made
                made.append(name)
    return result | behind, tuple(dropped + unmatched), tuple(made)


def _join(
    groups: dict[object, _Group], key: str, tensor: Tensor, claim: Claim, fields: Mapping[str, int | str]
) -> None:
    """Put *key* into the group of its rule and fields."""
    over = claim.rule.over
    shared = {name: value for name, value in fields.items() if name != over}
    name = (id(claim.rule), tuple(sorted(shared.items())))
    group = groups.setdefault(name, _Group(claim.rule, shared))
    index = int(fields[over]) if over and over in fields else claim.index or 0
    if index in group.members:
        raise MappingError(f"{key} and {group.members[index][0]} are the same tensor of the model; remove one")
    group.members[index] = (key, tensor)


def _apply(group: _Group, frm: Side, to: Side, context: Context) -> dict[str, Tensor]:
    """The tensors that one group becomes, by key."""
    rule = group.rule
    many = rule.over is not None and rule.over in rule.side(frm)[0].fields
    n = max(group.members) + 1 if many else len(rule.side(frm))
    keys = [key for key, _ in group.members.values()]
    if len(group.members) != n:
        names = (
            rule.side(frm)[0].format({**group.fields, str(rule.over): i})
            if many
            else rule.side(frm)[i].format(group.fields)
            for i in range(min(n, 10_000))
            if i not in group.members
        )
        raise MissingKeys(context.model, list(names), f"they belong together with {keys[0]}")
    tensors = [group.members[i][1] for i in range(n)]
    try:
        for op in rule.steps(to):
            tensors = op.apply(tensors, context.dims)
    except ShapeError as e:
        raise ShapeError(", ".join(keys), e.got, e.want) from e
    if rule.over is not None and not many:
        template = rule.side(to)[0]
        return {template.format({**group.fields, rule.over: i}): t for i, t in enumerate(tensors)}
    return {t.format(group.fields): x for t, x in zip(rule.side(to), tensors, strict=True)}


def _strip(key: str, family: Family) -> str:
    return key.removeprefix("model.") if family.cs_prefix else key


def _half_precision_to_hf(config: Mapping[str, Any], hf: dict[str, Any]) -> None:
    """``fp16_type`` counts only at the very top of a Cerebras config; elsewhere the converter does not see it."""
    if "fp16_type" in config:
        kinds = {"bfloat16": True, "cbfloat16": True, "float16": False}
        if config["fp16_type"] not in kinds:
            raise ConfigError(
                f"config field fp16_type is {config['fp16_type']!r}, but only {', '.join(kinds)} can be converted"
            )
        hf["use_bfloat16"] = kinds[config["fp16_type"]]


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
