"""What the real ``cstorch.load`` makes of the files that ckptfs writes.

Needs ``CKPTFS_CSTORCH_PYTHON``: a Python that has ``cerebras_pytorch``, in an environment of its own.
"""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
from collections import OrderedDict
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import ckptfs
from ckptfs.conversion.releases.schedulers import CLASSES
from tests.paths import DATA

PYTHON = os.environ.get("CKPTFS_CSTORCH_PYTHON", "")
SCRIPT = Path(__file__).parent / "cstorch_describe.py"
V05 = DATA / "v05"
REWRITTEN = ("dtypes", "empty", "keys", "scalars", "shapes", "tied", "toplevel_list", "toplevel_tuple", "trainer_like")

pytestmark = [
    pytest.mark.reference,
    pytest.mark.skipif(not PYTHON, reason="CKPTFS_CSTORCH_PYTHON names no Python with cerebras_pytorch"),
]


def run(*args: object) -> str:
    done = subprocess.run([PYTHON, SCRIPT, *args], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout


def loaded(*paths: Path) -> list[Any]:
    """What the reference loads from each file, as its script describes it."""
    found: list[Any] = json.loads(run(*paths).splitlines()[-1])
    return found


def digest(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def described(name: str, values: torch.Tensor) -> list[Any]:
    """The description that a tensor must have, by torch alone."""
    words = values.detach().contiguous().flatten().view(torch.uint8)
    return ["tensor", f"torch.{name}", list(values.shape), digest(words.numpy().tobytes())]


@pytest.mark.parametrize("compress", [None, "lz4"])
def test_it_loads_the_same_from_our_copies(compress: str | None, tmp_path: Path) -> None:
    copies = []
    for name in REWRITTEN:
        with ckptfs.open(V05 / f"{name}.mdl") as source:
            copies.append(tmp_path / f"{name}.mdl")
            ckptfs.save(source, copies[-1], compress=compress)
    for name, ours, theirs in zip(
        REWRITTEN, loaded(*copies), loaded(*(V05 / f"{name}.mdl" for name in REWRITTEN)), strict=True
    ):
        assert ours == theirs, name


def test_it_loads_states_of_every_kind(tmp_path: Path) -> None:
    values = torch.tensor([[0.0, 1.0, 2.5], [3.0, 100.0, 7.0]])
    names = ["uint8", "int16", "int32", "int64", "float16", "bfloat16", "float32", "float64"]
    tensors = {name: values.to(getattr(torch, name)) for name in names} | {"bool": values > 1}
    weight = torch.rand(33, 65)
    arrays = {"i8": np.arange(6, dtype="i1"), "c": np.array([[1 + 2j]], "c8"), "zero": np.array(1.5)}
    state = {
        "tensors": tensors,
        "turned": weight.t(),
        "empty": torch.zeros(3, 0, 2),
        "zero_d": torch.tensor(2.5),
        "ties": [weight, weight],
        "arrays": arrays,
        "plain": OrderedDict(i=2**70, f=0.1, b=True, s="ü/\n", none=None),
        "nested": ({}, [], ({"x": 1},)),
        "a/b": torch.ones(2),
        3: "three",
    }
    ckptfs.save(state, tmp_path / "s.mdl")
    (found,) = loaded(tmp_path / "s.mdl")
    kinds = {name: array.dtype.str for name, array in arrays.items()}
    assert found == [
        "dict",
        [
            ["tensors", ["dict", [[name, described(name, tensor)] for name, tensor in tensors.items()]]],
            ["turned", described("float32", weight.t())],
            ["empty", described("float32", torch.zeros(3, 0, 2))],
            ["zero_d", described("float32", torch.tensor(2.5))],
            ["ties", ["list", [described("float32", weight), ["same", ".ties.0"]]]],
            [
                "arrays",
                ["dict", [[k, ["array", kinds[k], list(a.shape), digest(a.tobytes())]] for k, a in arrays.items()]],
            ],
            [
                "plain",
                [
                    "OrderedDict",
                    [
                        *(["i", ["int", str(2**70)]], ["f", ["float", "0.1"]], ["b", ["bool", "True"]]),
                        *(["s", ["str", r"'ü/\n'"]], ["none", ["NoneType", "None"]]),
                    ],
                ],
            ],
            ["nested", ["tuple", [["dict", []], ["list", []], ["tuple", [["dict", [["x", ["int", "1"]]]]]]]]],
            ["a/b", described("float32", torch.ones(2))],
            [3, ["str", "'three'"]],
        ],
    ]


def test_it_can_save_again_what_it_loaded_from_us(tmp_path: Path) -> None:
    state = {"model": {"w": torch.rand(40, 30), "b": torch.rand(8).bfloat16()}, "step": 5}
    ckptfs.save(state, tmp_path / "ours.mdl")
    run("--resave", tmp_path / "ours.mdl", tmp_path / "theirs.mdl")
    with ckptfs.open(tmp_path / "ours.mdl") as ours, ckptfs.open(tmp_path / "theirs.mdl") as theirs:
        assert ours.source.tree == theirs.source.tree
        assert theirs["step"] == 5
        for key in ("model.w", "model.b"):
            assert (ours[key].dtype, ours[key].tobytes()) == (theirs[key].dtype, theirs[key].tobytes())


def test_it_loads_ten_thousand_keys(tmp_path: Path) -> None:
    state = {"model": {f"layers.{i}.weight": np.full(2, i, "<f4") for i in range(10_000)}}
    ckptfs.save(state, tmp_path / "many.mdl")
    ((_, ((_, (_, found)),)),) = loaded(tmp_path / "many.mdl")
    assert [(key, value[3]) for key, value in found] == [
        (f"layers.{i}.weight", digest(np.full(2, i, "<f4").tobytes())) for i in range(10_000)
    ]


def test_its_schedulers_are_those_that_configs_name() -> None:
    code = """
import inspect, json
from cerebras.pytorch.optim import lr_scheduler as module
classes = [c for c in vars(module).values() if inspect.isclass(c) and issubclass(c, module.LRScheduler)]
print(json.dumps([c.__name__ for c in classes if c is not module.LRScheduler]))
"""
    done = subprocess.run([PYTHON, "-c", code], capture_output=True, text=True, check=True)
    assert sorted(json.loads(done.stdout.splitlines()[-1])) == sorted(CLASSES)
