"""Laws that hold for every family of the registry, without being told which there are."""

from __future__ import annotations

import ast
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import ckptfs.conversion.families
from ckptfs.conversion import registry
from ckptfs.conversion.apply import convert_tensors
from ckptfs.conversion.config import OneOf
from ckptfs.conversion.family import Family
from ckptfs.conversion.keys import PARAMS
from ckptfs.conversion.ops import ConvToLinear, Reshape, Split, Stack, Transpose
from ckptfs.conversion.rules import SIDES, Context, Rule, Side
from ckptfs.tensors.ranges import read_into, to_bytes, to_numpy
from ckptfs.tensors.tensor import Tensor
from tests.factories import ArrayTensor

SIZES = {"heads": 4, "kv_heads": 2, "q_per_kv": 2, "rotary": 6, "num_channels": 3, "patch_size": 2}
HF = {"n_positions": 9, "max_position_embeddings": 9, "tie_word_embeddings": True, "rotary_emb_base": 10000}
CS = {"num_classes": 5}
FAMILIES = [f for f in registry.FAMILIES.values() if not f.notes.startswith("alias")]
RNG = np.random.default_rng(3)


@pytest.mark.parametrize("family", registry.FAMILIES.values(), ids=lambda family: family.name)
def test_no_two_rules_claim_a_key(family: Family) -> None:
    for layout in (family, *family.older):
        layout.table.check()


def context(family: Family) -> Context:
    return Context(family.name, SIZES, HF, CS)


def applies(rule: Rule, family: Family) -> bool:
    return rule.when is None or rule.when(context(family))


def fields_of(rule: Rule) -> Iterator[dict[str, int | str]]:
    """Two parameters, layer 1 and, for stacked tensors, three experts."""
    for p in PARAMS if any("p" in t.fields for t in (*rule.hf, *rule.cs)) else ("weight",):
        for n in range(3 if rule.over else 1):
            yield {"i": 1, "p": p, **({rule.over: n} if rule.over else {})}


def keys_of(rule: Rule, side: Side) -> Iterator[str]:
    for fields in fields_of(rule):
        for template in rule.side(side):
            yield template.format({**fields, **dict.fromkeys(template.fields - fields.keys(), 1)})


def state_of(family: Family, side: Side) -> dict[str, Tensor]:
    """A tensor under every key that the family's rules have on that side, in shapes that every op takes.

    Whole numbers: adding 1 and taking it away again is exact for them.
    """
    state: dict[str, Tensor] = {}
    for rule in (r for r in family.table.rules if applies(r, family)):
        for fields in fields_of(rule):
            for index, template in enumerate(rule.side(side)):
                shape = shape_of(rule, side, index, template.format(fields))
                state[template.format(fields)] = ArrayTensor(RNG.integers(-99, 99, shape).astype(np.float32))
    return state


def shape_of(rule: Rule, side: Side, index: int, key: str) -> tuple[int, ...]:
    """24 rows a share of a packed tensor, 96 rows otherwise, 24 columns; 6 for the norm of a head; 1 for added axes."""
    added = next((op.hf_ones for op in rule.ops if isinstance(op, Reshape)), 0) if side == "hf" else 0
    return (*(1,) * added, *flat_shape(rule, side, index, key))


def flat_shape(rule: Rule, side: Side, index: int, key: str) -> tuple[int, ...]:
    if ".q_norm" in key or ".k_norm" in key:
        return (6,)
    cut = next((op for op in rule.ops if isinstance(op, Split)), None)
    shares = [SIZES[r] if isinstance(r, str) else r for r in cut.ratio] if cut else [4]
    rows = 24 * (sum(shares) if side == "hf" else shares[index if cut else 0])
    if key.endswith("bias") or "norm" in key or "ln_" in key:
        return (rows,)
    if side == "cs" and any(isinstance(op, Stack) for op in rule.ops):
        return (rows, 3, 24)
    if any(isinstance(op, ConvToLinear) for op in rule.ops):
        return (24, 3, 2, 2) if side == "hf" else (24, 12)
    swapped = side == "hf" and any(isinstance(op, Transpose) for op in rule.ops)
    return (24, rows) if swapped else (rows, 24)


@pytest.mark.parametrize("family", FAMILIES, ids=lambda f: f.name)
def test_every_key_is_claimed_by_exactly_one_rule(family: Family) -> None:
    for side in SIDES:
        for rule in (r for r in family.table.rules if applies(r, family)):
            for key in keys_of(rule, side):
                owners = [
                    r
                    for r in family.table.rules
                    if any(
                        t.match(key) is not None
                        for t in (
                            *r.side(side),
                            *r.also(side),
                            *(e.template for e in r.extras(side) if not e.if_present),
                        )
                    )
                    and applies(r, family)
                ]
                assert len(owners) <= 1, key
                found = family.table.claim(side, key, context(family))
                assert (found[0].rule if found else None) == (owners[0] if owners else None)


@pytest.mark.parametrize("family", FAMILIES, ids=lambda f: f.name)
def test_there_and_back_gives_the_same_tensors(family: Family) -> None:
    for there, back in (("cs", "hf"), ("hf", "cs")):
        start = state_of(family, back)  # type: ignore[arg-type]
        middle, dropped, _ = convert_tensors(family.table, start, there, context(family))  # type: ignore[arg-type]
        end, _, made = convert_tensors(family.table, middle, back, context(family))  # type: ignore[arg-type]
        assert set(end) - set(made) == set(start) - set(dropped)
        for key in set(start) - set(dropped):
            assert to_bytes(end[key]) == to_bytes(start[key]), key


@pytest.mark.parametrize("family", FAMILIES, ids=lambda f: f.name)
def test_shapes_are_predicted_and_ranges_are_slices(family: Family) -> None:
    for to, frm in (("cs", "hf"), ("hf", "cs")):
        for key, tensor in convert_tensors(family.table, state_of(family, frm), to, context(family))[0].items():  # type: ignore[arg-type]
            whole = to_numpy(tensor)
            assert whole.shape == tensor.shape
            raw = whole.tobytes()
            for _ in range(20):
                start, stop = sorted(int(x) for x in RNG.integers(0, len(raw) + 1, 2))
                out = bytearray(stop - start)
                read_into(tensor, start, memoryview(out))
                assert out == raw[start:stop], key


@pytest.mark.parametrize("family", FAMILIES, ids=lambda f: f.name)
def test_config_constants_do_not_contradict_each_other(family: Family) -> None:
    """A field that one side adds must pass that side's own check, and a copied field is not a checked one."""
    for side in SIDES:
        table = family.config.side(side)
        for name in set(table.write) & set(table.require):
            wanted = table.require[name]
            assert table.write[name] in (wanted.values if isinstance(wanted, OneOf) else (wanted,)), name
    names = family.config.renames
    assert len(set(names.values())) == len(names)
    assert not set(names) & set(family.config.hf.require)
    assert not set(names.values()) & set(family.config.cs.require)


def test_tables_can_be_dumped() -> None:
    for name in registry.FAMILIES:
        dumped: Mapping[str, Any] = json.loads(json.dumps(registry.describe(name)))
        assert dumped["model"] == name
        assert dumped["tensors"] or not registry.family(name).hf_side


def test_family_files_are_data() -> None:
    """Constants, imports and functions of at most ten statements; no classes, no loops at the top."""
    allowed = ast.Import | ast.ImportFrom | ast.Assign | ast.AnnAssign | ast.FunctionDef | ast.Expr
    for path in Path(ckptfs.conversion.families.__path__[0]).glob("*.py"):
        for node in ast.parse(path.read_text()).body:
            assert isinstance(node, allowed), f"{path.name}:{node.lineno}"
            if isinstance(node, ast.FunctionDef) and path.name != "decoder.py":
                n = sum(isinstance(part, ast.stmt) for part in ast.walk(node)) - 1
                assert n <= 10, f"{path.name}: {node.name} is long for data"


def test_no_model_gets_its_mup_unseen() -> None:
    """`Family.derived` asks for it; `replace` of a family would hand it on."""
    for path in Path(ckptfs.conversion.families.__path__[0]).glob("*.py"):
        calls = [node for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Call)]
        named = [call for call in calls if any(word.arg == "name" for word in call.keywords)]
        assert not [c.lineno for c in named if isinstance(c.func, ast.Name) and c.func.id == "replace"], path.name
