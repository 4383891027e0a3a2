"""TorchScript graphs of deferred tensors: simple ones are worked out, as torch does; all others are refused."""

from __future__ import annotations

import hashlib
import json

import numpy as np
import pytest

from ckptfs.formats.cerebras.reader import open_h5
from ckptfs.formats.cerebras.torchscript import simple, steps_of
from ckptfs.tensors.cache import TileCache
from ckptfs.tensors.ranges import to_bytes
from tests.factories import ArrayTensor
from tests.formats.hdf5.h5_files import DATA

V05 = DATA / "v05"
HEAD = "graph(%a.1 : Tensor):\n"
TWO = "  %1 : int = prim::Constant[value=2]()\n"
SHIFT = HEAD + TWO + "  %3 : Tensor = aten::add(%a.1, %1, %1)\n  return (%3)\n"


def test_the_recorded_graph() -> None:
    expected = json.loads((V05 / "deferred_graph.expected.json").read_text())["flat"]["w"]
    source = open_h5(V05 / "deferred_graph.mdl", TileCache())
    item = source.items["w"]
    assert item.kind == "tensor"
    assert item.tensor is not None
    assert (item.tensor.dtype.name, list(item.tensor.shape)) == (expected["dtype"], expected["shape"])
    assert hashlib.sha256(to_bytes(item.tensor)).hexdigest() == expected["sha256"]
    source.close()


def test_the_factor_of_add() -> None:
    assert steps_of(SHIFT) == (("add", 4.0),)
    assert steps_of(SHIFT.replace("add", "sub")) == (("add", -4.0),)
    assert steps_of(SHIFT.replace("add(%a.1, %1, %1)", "div(%a.1, %1)")) == (("divide", 2.0),)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "graph()",
        HEAD,
        SHIFT.replace("aten::add", "aten::pow"),
        SHIFT.replace("aten::add", "prim::PythonOp"),
        SHIFT.replace("(%a.1, %1, %1)", "(%1, %a.1, %1)"),
        SHIFT.replace("(%a.1, %1, %1)", "(%a.1, %a.1, %1)"),
        SHIFT.replace("return (%3)", "return (%a.1)"),
        SHIFT.replace("(%a.1 : Tensor)", "(%a.1 : Tensor, %b : Tensor)"),
        SHIFT.replace("prim::Constant[value=2]", "prim::Constant[value=<Function>]"),
        SHIFT + " " * 5000 + "x",
    ],
)
def test_other_graphs_are_left_alone(text: str) -> None:
    assert steps_of(text) is None
    assert simple(text, ArrayTensor(np.zeros(3, np.float32))) is None


def test_only_floats_are_computed() -> None:
    assert simple(SHIFT, ArrayTensor(np.zeros(3, np.int64))) is None
    assert simple(SHIFT, None) is None
    assert simple(SHIFT, ArrayTensor(np.zeros(3, np.float32))) is not None
