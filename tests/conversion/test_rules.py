"""The engine on made-up tables: order, groups, made and dropped keys, complaints, conditions."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from ckptfs.conversion.apply import convert_tensors
from ckptfs.conversion.ops import AddScalar, Each, Reshape, Split, Stack, Transpose, permute_for_rope, ungroup_heads
from ckptfs.conversion.rules import (
    Context,
    Side,
    Table,
    copy,
    cs_only,
    hf_only,
    only_when,
    same,
    split,
    stack,
    under,
    with_cs_extra,
    with_hf_extra,
)
from ckptfs.errors import MappingError, MissingKeys, ShapeError, UnmatchedKeys
from ckptfs.tensors.generated import filled
from ckptfs.tensors.ranges import to_numpy
from ckptfs.tensors.tensor import Tensor
from tests.factories import ArrayTensor

SIZES = {"heads": 2, "kv_heads": 1, "rotary": 4, "groups": 2}
TABLE = Table(
    (
        with_cs_extra(same("norm.{p}", "decoder.norm.{p}"), {"ln_f.{p}": copy}),
        same("head.{p}", "lm_head.{p}", hf_also=["old_head.{p}"]),
        *under(
            "h.{i}.",
            "layers.{i}.",
            [
                split(
                    "qkv.{p}",
                    ["q.{p}", "k.{p}", "v.{p}"],
                    Transpose(),
                    Split((1, 1, 1)),
                    Each((permute_for_rope("heads"), None, None)),
                ),
                stack("experts.{e}.{p}", "fused.{p}", Stack(), over="e"),
                with_hf_extra(same("out.{p}", "proj.{p}"), {"mask": lambda c, t: filled("float32", (), 7.0)}),
                *hf_only("inv_freq"),
                *cs_only("slopes"),
            ],
        ),
        *only_when(lambda c: bool(c.cs.get("gated")), same("wi_1.{p}", "ffn.0.{p}")),
        *only_when(lambda c: not c.cs.get("gated"), same("wi.{p}", "ffn.0.{p}")),
    )
)


def context(**cs: Any) -> Context:
    return Context("toy", SIZES, {}, cs)


def convert(
    state: dict[str, np.ndarray[Any, Any]], to: Side, drop: bool = False, **cs: Any
) -> dict[str, np.ndarray[Any, Any]]:
    tensors: dict[str, Tensor] = {k: ArrayTensor(v) for k, v in state.items()}
    return {k: to_numpy(t) for k, t in convert_tensors(TABLE, tensors, to, context(**cs), drop)[0].items()}


def array(*shape: int) -> np.ndarray[Any, Any]:
    return np.arange(np.prod(shape), dtype=np.float32).reshape(shape)


def test_order_is_that_of_the_source_with_made_keys_behind_their_rule() -> None:
    state = {"head.bias": array(2), "h.0.out.weight": array(2), "norm.weight": array(3), "h.0.qkv.weight": array(8, 24)}
    assert list(convert(state, "cs")) == [
        *("lm_head.bias", "layers.0.proj.weight", "decoder.norm.weight", "ln_f.weight"),
        *("layers.0.q.weight", "layers.0.k.weight", "layers.0.v.weight"),
    ]


def test_groups_need_not_come_in_order() -> None:
    packed = array(8, 24)
    cs = convert({"h.0.qkv.weight": packed}, "cs")
    back = convert(dict(sorted(cs.items())), "hf")
    assert list(back) == ["h.0.qkv.weight"]
    assert (back["h.0.qkv.weight"] == packed).all()


def test_packed_rotary_rows() -> None:
    cs = convert({"h.0.qkv.weight": array(1, 24)}, "cs")
    assert cs["layers.0.q.weight"].reshape(-1).tolist() == [0, 2, 1, 3, 4, 6, 5, 7]
    assert cs["layers.0.k.weight"].reshape(-1).tolist() == list(range(8, 16))


def test_stacked_experts_round_trip() -> None:
    experts = {f"h.1.experts.{e}.weight": array(3, 2) + e for e in (2, 0, 1)}
    cs = convert(experts, "cs")
    assert cs["layers.1.fused.weight"].shape == (3, 3, 2)
    assert (cs["layers.1.fused.weight"][:, 2] == array(3, 2) + 2).all()
    back = convert(cs, "hf")
    assert back.keys() == experts.keys()
    assert all((back[k] == experts[k]).all() for k in experts)


def test_a_gap_in_a_stack_is_named() -> None:
    with pytest.raises(MissingKeys, match=r"h\.1\.experts\.1\.weight"):
        convert({"h.1.experts.0.weight": array(2, 2), "h.1.experts.2.weight": array(2, 2)}, "cs")


def test_a_part_of_a_packed_tensor_is_named() -> None:
    with pytest.raises(MissingKeys, match=r"layers\.0\.k\.weight.*belong together with layers\.0\.q\.weight"):
        convert({"layers.0.q.weight": array(8, 8), "layers.0.v.weight": array(8, 8)}, "hf")


def test_copies_made_and_one_sided_keys_are_dropped_on_the_way_back() -> None:
    state = {
        "ln_f.weight": array(9),
        "decoder.norm.weight": array(3),
        "layers.0.slopes": array(2),
        "layers.0.proj.bias": array(1),
    }
    hf = convert(state, "hf")
    assert list(hf) == ["norm.weight", "h.0.out.bias", "h.0.mask"]
    assert hf["norm.weight"].shape == (3,)
    assert hf["h.0.mask"] == 7
    assert list(convert({"h.0.mask": array(1), "h.0.inv_freq": array(1), "h.0.out.bias": array(1)}, "cs")) == [
        "layers.0.proj.bias"
    ]


def test_a_second_copy_is_read_where_the_first_is_missing() -> None:
    first, second = array(3), array(3) + 3
    found = convert({"ln_f.bias": second, "decoder.norm.weight": first}, "hf")
    assert list(found) == ["norm.bias", "norm.weight"]
    np.testing.assert_array_equal(found["norm.bias"], second)
    found = convert({"ln_f.bias": second, "decoder.norm.bias": first}, "hf")
    np.testing.assert_array_equal(found["norm.bias"], first)


def test_made_keys_that_other_rules_write_too() -> None:
    table = Table(
        (
            with_cs_extra(same("a", "A"), {"B": lambda c, t: filled("float32", (), 7.0)}, if_present="keep"),
            with_cs_extra(same("c", "C"), {"D": lambda c, t: filled("float32", (), 8.0)}, if_present="replace"),
            same("b", "B"),
            same("d", "D"),
        )
    )
    source = {key: ArrayTensor(np.float32(n)) for n, key in enumerate("dacb")}
    found, _, made = convert_tensors(table, source, "cs", context())
    assert [(k, float(to_numpy(t))) for k, t in found.items()] == [("D", 8.0), ("A", 1.0), ("C", 2.0), ("B", 3.0)]
    assert made == ("D",)
    alone, _, made = convert_tensors(table, {"a": source["a"]}, "cs", context())
    assert [(k, float(to_numpy(t))) for k, t in alone.items()] == [("A", 1.0), ("B", 7.0)]
    assert made == ("B",)
    back, dropped, _ = convert_tensors(table, alone, "hf", context())
    assert (list(back), dropped) == (["a", "b"], ())


def test_other_names_are_read_and_not_written() -> None:
    cs = convert({"old_head.weight": array(2)}, "cs")
    assert list(cs) == ["lm_head.weight"]
    assert list(convert(cs, "hf")) == ["head.weight"]


def test_two_names_of_one_tensor_are_refused() -> None:
    with pytest.raises(MappingError, match="same tensor"):
        convert({"old_head.weight": array(2), "head.weight": array(2)}, "cs")


def test_conditions_choose_between_rules() -> None:
    assert list(convert({"ffn.0.weight": array(1)}, "hf", gated=True)) == ["wi_1.weight"]
    assert list(convert({"ffn.0.weight": array(1)}, "hf")) == ["wi.weight"]
    with pytest.raises(UnmatchedKeys, match=r"wi_1\.weight"):
        convert({"wi_1.weight": array(1)}, "cs")


def test_all_unmatched_keys_at_once_with_the_nearest_rule() -> None:
    state = {"h.0.ot.weight": array(1), "norm.weight": array(1), "zzz": array(1)}
    with pytest.raises(UnmatchedKeys) as caught:
        convert(state, "cs")
    assert caught.value.keys == ["h.0.ot.weight", "zzz"]
    assert "h.{i}.out.{p}" in str(caught.value)
    assert caught.value.option == "drop_unmatched_keys"
    assert list(convert(state, "cs", drop=True)) == ["decoder.norm.weight", "ln_f.weight"]


def test_shape_errors_name_the_key() -> None:
    with pytest.raises(ShapeError, match=r"h\.0\.qkv\.weight"):
        convert({"h.0.qkv.weight": array(8, 25)}, "cs")


def test_two_rules_for_one_key_are_refused_when_the_table_is_made() -> None:
    with pytest.raises(ValueError, match="two rules claim"):
        Table((same("a.{i}.w", "x.{i}"), same("a.{i}.w", "y.{i}"))).check()
    with pytest.raises(ValueError, match="two rules claim"):
        Table((same("a.{i}", "x.{i}"), same("a.3", "y"))).check()
    Table((same("a.2", "x.2"), same("a.3", "x.3"))).check()


def test_templates_of_a_rule_have_the_same_fields() -> None:
    with pytest.raises(ValueError, match="fields"):
        Table((same("a.{i}.{p}", "b.{i}"),)).check()


def test_ops_undo_themselves() -> None:
    x: list[Tensor] = [ArrayTensor(array(24, 6))]
    ops = (Transpose(), Split((1, 2)), permute_for_rope("heads"), ungroup_heads("groups", (1, 1, 1)), Reshape(0))
    for op in ops:
        start = [ArrayTensor(array(6, 24))] if isinstance(op, Transpose) else x
        there = op.apply(start, SIZES)
        back = op.inverse().apply(there, SIZES)
        assert (to_numpy(back[0]) == to_numpy(start[0])).all(), op
    one: list[Tensor] = [ArrayTensor(array(1, 1, 5))]
    flat = Reshape(2).apply(one, SIZES)
    assert flat[0].shape == (5,)
    assert Reshape(2).inverse().apply(flat, SIZES)[0].shape == (1, 1, 5)
    assert to_numpy(AddScalar(1.0).apply(x, SIZES)[0])[0, 0] == 1


def test_a_first_number_of_its_own_beside_a_rule_for_the_others() -> None:
    table = Table((same("block.0.bias", "first"), *hf_only("block.{i+1}.bias")))
    state = {f"block.{i}.bias": filled("float32", (i + 1,), 0.0) for i in range(3)}
    tensors, dropped, _ = convert_tensors(table, state, "cs", context())
    assert {k: t.shape for k, t in tensors.items()} == {"first": (1,)}
    assert dropped == ("block.1.bias", "block.2.bias")
    with pytest.raises(ValueError, match="two rules claim"):
        Table((same("block.1.bias", "first"), *hf_only("block.{i+1}.bias"))).check()


def test_names_that_depend_on_what_else_is_there() -> None:
    def by_gate(context: Context, fields: Any) -> int:
        return int(f"layers.{fields['i']}.gate" in context.keys)

    table = Table(
        (same("h.{i}.wi", "layers.{i}.up", hf_also=["h.{i}.wi_1"], hf_choice=by_gate), same("g", "layers.1.gate"))
    )
    state = {key: filled("float32", (), 0.0) for key in ("layers.0.up", "layers.1.up", "layers.1.gate")}
    hf, _, _ = convert_tensors(table, state, "hf", context())
    assert list(hf) == ["h.0.wi", "h.1.wi_1", "g"]
    assert list(convert_tensors(table, hf, "cs", context())[0]) == list(state)


def test_one_tensor_that_several_rules_copy() -> None:
    """The last rule writes it; where only it is stored, all read it."""
    table = Table(
        tuple(with_hf_extra(same(f"{x}.embed", f"{x}.words"), {"shared": copy}) for x in ("encoder", "decoder"))
    )
    one, two, three = (filled("float32", (n,), 0.0) for n in (1, 2, 3))
    hf, _, made = convert_tensors(table, {"encoder.words": one, "decoder.words": two}, "hf", context())
    assert hf == {"encoder.embed": one, "shared": two, "decoder.embed": two}
    assert made == ("shared",)
    found, dropped, _ = convert_tensors(table, {"shared": three, "decoder.embed": two}, "cs", context())
    assert (found, dropped) == ({"encoder.words": three, "decoder.words": two}, ())
    found, dropped, _ = convert_tensors(table, {"shared": three}, "cs", context())
    assert (list(found), dropped) == (["encoder.words", "decoder.words"], ())
