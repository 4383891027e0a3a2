"""``ckptfs diff``: structure and values of two checkpoints, and the exit code."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
import torch

import ckptfs as package
from ckptfs.formats.source import Item
from ckptfs.tensors import scan
from ckptfs.tools.diff import How, chosen, compare
from tests.cli.conftest import Result
from tests.factories import ArrayTensor, source_of
from tests.paths import FAMILIES

Ckptfs = Callable[..., Result]
LLAMA = FAMILIES / "llama/cs2hf-gqa-fp32"
GPT2 = FAMILIES / "gpt2/hf2cs-untied-fp32"


def items(state: dict[str, Any]) -> dict[str, Item]:
    return source_of(state).items


def test_a_checkpoint_is_the_same_in_all_formats(tmp_path: Path, ckptfs: Ckptfs) -> None:
    from safetensors.torch import save_file

    state = {"a.w": torch.rand(300, 70), "a.b": torch.rand(9).bfloat16(), "n": torch.arange(5)}
    package.save(state, tmp_path / "plain.mdl")
    package.save(state, tmp_path / "lz4.mdl", compress="lz4")
    torch.save(state, tmp_path / "model.bin")
    (tmp_path / "folder").mkdir()
    save_file(state, tmp_path / "folder/model.safetensors")
    names = ["plain.mdl", "lz4.mdl", "model.bin", "folder"]
    for name in names:
        done = ckptfs("diff", tmp_path / names[0], tmp_path / name)
        assert (done.code, done.text, done.err) == (0, "3 the same\n", "")


def test_the_converters_comparison(tmp_path: Path, ckptfs: Ckptfs) -> None:
    package.save({"w": np.ones(4, "f4")}, tmp_path / "a.mdl")
    package.save({"w": np.full(4, 1 + 2e-6, "f4")}, tmp_path / "b.mdl")
    pair = (tmp_path / "a.mdl", tmp_path / "b.mdl")
    assert ckptfs("diff", *pair).code == 1
    assert ckptfs("diff", *pair, "--tensor_comparison_op", "equal").code == 1
    assert ckptfs("diff", *pair, "--tensor_comparison_op", "allclose").code == 0
    assert ckptfs("diff", *pair, "--tensor_comparison_op", "allclose", "--rtol", "1e-7").code == 1
    assert ckptfs("diff", *pair, "--tensor_comparison_op", "close").code == 2


def test_every_kind_of_difference(tmp_path: Path, ckptfs: Ckptfs) -> None:
    a = {"same": np.arange(6.0), "gone": np.zeros((2, 3)), "type": np.zeros(2), "shape": np.zeros((2, 3)), "n": 1}
    b = {**a, "type": np.zeros(2, "f4"), "shape": np.zeros((3, 2)), "n": 2, "new": "text", "kind": 1}
    del b["gone"]
    grid = np.zeros((300, 70), "f4")
    package.save({**a, "grid": grid, "kind": np.zeros(())}, tmp_path / "a.mdl")
    other = grid.copy()
    other[[7, 299], [3, 69]] = 0.5, -2
    package.save({**b, "grid": other}, tmp_path / "b.mdl")
    done = ckptfs("diff", tmp_path / "a.mdl", tmp_path / "b.mdl")
    assert (done.code, done.err) == (1, "")
    assert done.text.splitlines() == [
        "only in A: gone (float64 2x3)",
        "only in B: new (string)",
        "different: type: dtype 'float64' and 'float32'",
        "different: shape: shape 2x3 and 3x2",
        "different: n: value 1 and 2",
        "different: grid: 2 of 21000 values, first 0 and 0.5 at [7, 3], by at most 2",
        "different: kind: kind 'tensor' and 'int'",
        "1 the same, 1 only in A, 1 only in B, 5 different",
    ]
    found = json.loads(ckptfs("diff", tmp_path / "a.mdl", tmp_path / "b.mdl", "--json").out)
    assert (found["equal"], found["n_same"], found["only_in_a"], found["only_in_b"]) == (False, 1, ["gone"], ["new"])
    assert found["different"][3] == {
        "key": "grid",
        "what": "value",
        "a": 0.0,
        "b": 0.5,
        "n_different": 2,
        "n_elements": 21000,
        "index": [7, 3],
        "largest": 2.0,
    }
    quiet = ckptfs("diff", tmp_path / "a.mdl", tmp_path / "b.mdl", "--quiet")
    assert (quiet.code, quiet.out, quiet.err) == (1, b"", "")
    structure = ckptfs("diff", tmp_path / "a.mdl", tmp_path / "b.mdl", "--structure", "--keys", "n", "--keys", "gr*")
    assert (structure.code, structure.text) == (0, "2 the same\n")


@pytest.mark.parametrize(
    ("a", "b", "how", "same"),
    [
        (1.0, 1.001, How(rtol=1e-2), True),
        (1.0, 1.1, How(rtol=1e-2), False),
        (0.0, 1e-9, How(atol=1e-8), True),
        (0.0, 1e-9, How(rtol=1e-2), False),
        (0.0, -0.0, How(), True),
        (np.inf, np.inf, How(atol=1), True),
        (np.inf, -np.inf, How(atol=1, rtol=1), False),
        (1.0, np.inf, How(atol=1, rtol=1), False),
        (np.nan, np.nan, How(), False),
        (np.nan, np.nan, How(atol=1), False),
        (np.nan, np.nan, How(equal_nan=True), True),
        (np.nan, np.nan, How(equal_nan=True, rtol=1), True),
        (np.nan, 1.0, How(equal_nan=True, atol=9), False),
        (1.0, np.nan, How(equal_nan=True, atol=9), False),
    ],
)
def test_close_numbers_in_tensors_and_scalars(a: float, b: float, how: How, same: bool) -> None:
    for dtype in ("f2", "f4", "f8", "c8", "c16"):
        if dtype == "f2" and (a, b) == (0.0, 1e-9):  # float16 has no such number
            continue
        one, other = np.array([2, a, 3], dtype), np.array([2, b, 3], dtype)
        assert compare(items({"x": one}), items({"x": other}), how).equal == same, dtype
    assert compare(items({"x": a}), items({"x": b}), how).equal == same


def test_element_types() -> None:
    """NaN are told from numbers by their bits; whole numbers are compared as such."""
    one = {"bfloat16": 0x3F80, "float16": 0x3C00, "float8_e4m3fn": 0x38, "float8_e5m2": 0x3C}
    nan = {"bfloat16": 0x7FC1, "float16": 0xFE00, "float8_e4m3fn": 0xFF, "float8_e5m2": 0x7D}
    for name, word in nan.items():
        kind = "<u2" if word > 0xFF else "u1"
        numbers = {"x": ArrayTensor(np.full((2, 2), one[name], kind), name)}
        assert compare(items(numbers), items(numbers), How()).equal, name
        holes = {"x": ArrayTensor(np.array([[one[name]] * 2, [one[name], word]], kind), name)}
        (found,) = compare(items(holes), items(holes), How()).different
        assert (found.index, found.n_different, found.n_nan) == ((1, 1), 1, 1), name
        assert compare(items(holes), items(holes), How(equal_nan=True)).equal
        (found,) = compare(items(numbers), items(holes), How(equal_nan=True)).different
        assert (found.a, found.n_nan) == (1.0, None)
    large = 2**53
    (found,) = compare(items({"x": np.array([large])}), items({"x": np.array([large + 1])}), How()).different
    assert (found.a, found.b, found.largest) == (large, large + 1, 0.0)
    assert not compare(items({"x": 2**70}), items({"x": 2**70 + 1}), How()).equal
    assert not compare(items({"x": np.array([True])}), items({"x": np.array([False])}), How()).equal


def test_values_across_element_types() -> None:
    a, b = items({"x": np.array([1.5, 2.0]), "n": 2}), items({"x": np.array([1.5, 2.0], "f4"), "n": 2.0})
    assert [d.what for d in compare(a, b, How()).different] == ["dtype", "kind"]
    assert compare(a, b, How(dtypes=False)).equal


def test_differences_in_any_piece(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tensors are read piece by piece; the first difference and the counts are those of the whole."""
    monkeypatch.setattr(scan.element_ranges, "__defaults__", (7,))
    a, b = np.arange(30.0).reshape(5, 6), np.arange(30.0).reshape(5, 6)
    b[1, 4], b[4, 5] = -10, 0
    read: list[int] = []
    (found,) = compare(items({"x": a}), items({"x": b}), How(), progress=read.append).different
    assert (found.index, found.n_different, found.largest) == ((1, 4), 2, 29.0)
    assert sum(read) == a.nbytes


def test_objects_that_are_not_loaded() -> None:
    def refused(name: str | None) -> dict[str, Item]:
        return {"x": Item("x", "object", class_name=name, reason="a pickle")}

    assert compare(refused("a.B"), refused("a.B"), How()).not_compared == ["x"]
    assert [d.what for d in compare(refused("a.B"), items({"x": 1}), How()).different] == ["kind"]
    assert list(compare(refused(None), refused(None), How()).errors) == ["x"]
    assert list(compare(refused("a.B"), {"x": Item("x", "link", reason="gone")}, How()).errors) == ["x"]


def test_keys_prefixes_and_what_is_left_out() -> None:
    state = items({"model.a.w": 1, "model.b.w": 2, "step": 3})
    assert list(chosen(state, prefix="model.")) == ["a.w", "b.w"]
    assert list(chosen(state, prefix="model.", keys=["a*"])) == ["a.w"]
    assert list(chosen(state, keys=["*.w", "step"], ignore=["model.b*"])) == ["model.a.w", "step"]


def test_prefixes_on_the_command_line(tmp_path: Path, ckptfs: Ckptfs) -> None:
    weight = np.ones((3, 2), "f4")
    package.save({"model": {"w": weight}, "step": 1}, tmp_path / "a.mdl")
    torch.save({"net.w": torch.from_numpy(weight)}, tmp_path / "b.bin")
    line = ["diff", tmp_path / "a.mdl", tmp_path / "b.bin"]
    assert ckptfs(*line).code == 1
    assert ckptfs(*line, "--prefix-a", "model.", "--prefix-b", "net.").text == "1 the same\n"
    none = ckptfs(*line, "--keys", "nothing")
    assert (none.code, none.err.count("\n")) == (2, 1)


def test_a_view_is_compared_with_what_the_converter_wrote(ckptfs: Ckptfs) -> None:
    how = ["--tgt-fmt", "hf", "--model", "llama", "--config", LLAMA / "cs.yaml"]
    done = ckptfs("diff", LLAMA / "cs.mdl", LLAMA / "hf", *how)
    assert (done.code, done.err) == (0, "")
    assert ckptfs("diff", LLAMA / "cs.mdl", LLAMA / "hf").code == 1
    lone = ckptfs("diff", LLAMA / "cs.mdl", LLAMA / "hf", "--model", "llama")
    assert (lone.code, "--tgt-fmt" in lone.err) == (2, True)


def test_a_view_as_a_cerebras_checkpoint(tmp_path: Path, ckptfs: Ckptfs) -> None:
    assert ckptfs("convert", GPT2 / "hf", "--tgt-fmt", "cs-2.9", "--output-dir", tmp_path).code == 0
    done = ckptfs("diff", GPT2 / "hf", tmp_path / "hf_to_cs-2.9.mdl", "--tgt-fmt", "cs-2.9")
    assert (done.code, done.err) == (0, "")


def test_damage_is_told_and_the_rest_compared(tmp_path: Path, ckptfs: Ckptfs) -> None:
    good, bad = tmp_path / "good.mdl", tmp_path / "bad.mdl"
    package.save({"w": np.zeros((256, 256), "f4"), "x": np.arange(4)}, good, compress="lz4")
    shutil.copy(good, bad)
    with h5py.File(bad) as file:
        offset = file["w"].id.get_chunk_info(1).byte_offset
    with bad.open("r+b") as raw:
        raw.seek(offset + 8)
        raw.write(b"\0\0\0\0")  # the size of a block
    for line in ([good, bad], [bad, good]):
        done = ckptfs("diff", *line)
        assert done.code == 3
        assert done.text.splitlines()[-1] == "1 the same, 1 not read"
        assert "w: " in done.text
    assert ckptfs("diff", good, bad, "--structure").code == 0
    broken = tmp_path / "text"
    broken.write_text("no checkpoint")
    assert ckptfs("diff", good, broken).code == 3
    assert ckptfs("diff", good, tmp_path / "missing").code == 2
