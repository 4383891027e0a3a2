"""Laws that hold for every family of the registry, without being told which there are."""

from __future__ import annotations

import ast
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import ckptfs.mappings.families
from ckptfs.formats.source import Tensor
from ckptfs.mappings import registry
from ckptfs.mappings.family import Family
from ckptfs.mappings.plan import convert_tensors
from ckptfs.mappings.table import SIDES, Context, Rule, Side
from ckptfs.tensors.read import read_into, to_bytes, to_numpy
from tests.factories import ArrayTensor

DIMS = {"heads": 4, "kv_heads": 2, "rotary": 6, "groups": 2, "experts": 3}
HF = {"n_positions": 9, "max_position_embeddings": 9, "tie_word_embeddings": True}
FAMILIES = [f for f in registry.FAMILIES.values() if not f.notes.startswith("alias")]
RNG = np.random.default_rng(3)


def context(family: Family) -> Context:
    return Context(family.name, DIMS, HF, {})


def keys_of(rule: Rule, side: Side) -> Iterator[str]:
    for template in rule.side(side):
        params = ("weight", "bias") if "p" in template.fields else ("weight",)
        for p in params:
            for n in range(3 if rule.over else 1):
                yield template.format({**dict.fromkeys(template.fields, n if rule.over else 1), "p": p, "i": 1})


def state_of(family: Family, side: Side) -> dict[str, Tensor]:
    """A tensor under every key that the family's rules have on that side; sizes that every packing divides."""
    state: dict[str, Tensor] = {}
    for rule in family.table.rules:
        for key in keys_of(rule, side):
            vector = key.endswith("bias") or "norm" in key or "ln_" in key
            head_norm = key.endswith(("q_norm.weight", "k_norm.weight", "q_norm.bias", "k_norm.bias"))
            shape = (6,) if head_norm else (72,) if vector else (72, 24)
            if side == "hf" and "c_" in key and not vector:
                shape = (24, 72)
            state[key] = ArrayTensor(RNG.standard_normal(shape).astype(np.float32))
    return state


@pytest.mark.parametrize("family", FAMILIES, ids=lambda f: f.name)
def test_every_key_is_claimed_by_exactly_one_rule(family: Family) -> None:
    for side in SIDES:
        for rule in family.table.rules:
            for key in keys_of(rule, side):
                owners = [
                    r
                    for r in family.table.rules
                    if any(t.match(key) is not None for t in (*r.side(side), *(e.template for e in r.makes(side))))
                    and (r.when is None or r.when(context(family)))
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
        clashes = {k: (v, table.must[k]) for k, v in table.add.items() if k in table.must and table.must[k] != v}
        assert not clashes
    names = family.config.names
    assert len(set(names.values())) == len(names)
    assert not set(names) & set(family.config.hf.must)
    assert not set(names.values()) & set(family.config.cs.must)


def test_tables_can_be_dumped() -> None:
    for name in registry.FAMILIES:
        dumped: Mapping[str, Any] = json.loads(json.dumps(registry.describe(name)))
        assert dumped["model"] == name
        assert dumped["tensors"]


def test_family_files_are_data() -> None:
    """Constants, imports and functions of at most ten statements lines; no classes."""
    for path in Path(ckptfs.mappings.families.__path__[0]).glob("*.py"):
        for node in ast.parse(path.read_text()).body:
            assert isinstance(
                node, ast.Import | ast.ImportFrom | ast.Assign | ast.AnnAssign | ast.FunctionDef | ast.Expr
            ), f"{path.name}:{node.lineno}"
            if isinstance(node, ast.FunctionDef) and path.name != "decoder.py":
                assert node.end_lineno is not None
                assert node.end_lineno - node.lineno <= 14, f"{path.name}: {node.name} is long for data"
