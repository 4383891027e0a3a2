"""From the tensors of one side to those of the other, by a family's table.

Reads no tensor data. Order is part of the result: a target key stands where the first source key of its rule
stood, keys that a rule generates follow it.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from ckptfs.conversion.rules import AT_END, Claim, Context, Rule, Side, Table
from ckptfs.errors import MappingError, MissingKeys, ShapeError, UnmatchedKeys
from ckptfs.tensors.tensor import Tensor

log = logging.getLogger("ckptfs.conversion.keys")
"""What each key becomes, at debug level."""


@dataclass(slots=True)
class _Group:
    """The source tensors of one application of a rule."""

    rule: Rule
    fields: Mapping[str, int | str]
    members: dict[int, tuple[str, Tensor]] = field(default_factory=dict)


def convert_tensors(
    table: Table, state: Mapping[str, Tensor], to: Side, context: Context, drop_unmatched: bool = False
) -> tuple[dict[str, Tensor], tuple[str, ...], tuple[str, ...]]:
    """The tensors of the other side, the source keys that were dropped, and the target keys that were generated."""
    frm: Side = "cs" if to == "hf" else "hf"
    state = table.completed(frm, state, context)
    context = replace(context, keys=state.keys())
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
    behind: dict[str, tuple[int, Tensor]] = {}
    shared: dict[str, tuple[str, Tensor]] = {}
    generated: list[str] = []
    for group in groups.values():
        tensors = _apply(group, frm, to, context)
        if log.isEnabledFor(logging.DEBUG):
            log.debug("%s -> %s", ", ".join(key for key, _ in group.members.values()), ", ".join(tensors) or "nothing")
        result |= tensors
        for extra in group.rule.extras(to):
            made = extra.generate(context, list(tensors.values())[extra.of])
            if made is not None:
                name = extra.template.format(group.fields)
                if extra.if_present:
                    shared[name] = (extra.if_present, made)
                    continue
                if extra.position:
                    behind[name] = (extra.position, made)
                else:
                    result[name] = made
                generated.append(name)
    behind |= {name: (AT_END, t) for name, (how, t) in shared.items() if how == "replace" or name not in result}
    generated += [name for name in behind if name in shared]
    for key in (*dropped, *unmatched):
        log.debug("%s -> nothing", key)
    for key in generated:
        log.debug("generated: %s", key)
    result |= {name: t for name, (_, t) in sorted(behind.items(), key=lambda late: late[1][0])}
    return result, tuple(dropped + unmatched), tuple(dict.fromkeys(generated))


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
            tensors = op.apply(tensors, context.sizes)
    except ShapeError as e:
        raise ShapeError(", ".join(keys), e.got, e.want) from e
    if rule.over is not None and not many:
        template = rule.side(to)[0]
        return {template.format({**group.fields, rule.over: i}): t for i, t in enumerate(tensors)}
    written = rule.written(to, context, group.fields)
    return {t.format(group.fields): x for t, x in zip(written, tensors, strict=True)}
