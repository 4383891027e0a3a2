"""The facts of a checkpoint, counted by hand."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from ckptfs.conversion.conversion import Conversion
from ckptfs.errors import CorruptChunk
from ckptfs.formats.source import Container, Item
from ckptfs.vfs.facts import facts, step
from tests.factories import ArrayTensor, source_of, tensor_of

WEIGHT = tensor_of("bfloat16", (3, 4))
TRAINER = {
    "model.embed": WEIGHT,
    "model.head": Item("model.head", "tensor", tensor=WEIGHT, tied_to="model.embed"),
    "model.bias": np.zeros(5, np.float32),
    "optimizer.exp_avg": np.zeros((3, 4), np.float32),
    "optimizer.lr": 0.1,
    "global_step": 70,
    "hook": Item("hook", "object", class_name="os.system", reason="an object"),
}


def nested(*names: str) -> Container:
    return Container("dict", names, tuple(Container("dict", (), ()) for _ in names))


def test_trainer_checkpoint() -> None:
    source = source_of(
        TRAINER,
        path="/data/checkpoint_70.mdl",
        tree=Container(
            "dict", ("model", "optimizer", "empty", 3, "hook"), (nested(), nested(), nested(), "global_step", "hook")
        ),
        metadata=[{"model_name": "old"}, {"model_name": "gpt2"}],
        warnings=["one object was refused"],
        nbytes=999,
    )
    tensors = {"a": WEIGHT, "b": WEIGHT}
    view = Conversion("gpt2", "cs-2.10", "hf", tensors, {"eos_token_id": 0}, warnings=("a key was dropped",))
    assert facts(source, view) == {
        "source": "checkpoint_70.mdl",
        "format": "cerebras-h5",
        "format_version": "0.5",
        "release": "2.10.0",
        "family": "gpt2",
        "model_name": "gpt2",
        "step": 70,
        "n_tensors": 4,
        "n_parameters": 12 + 5,
        "nbytes": 12 * 2 + 5 * 4 + 12 * 4,
        "source_nbytes": 999,
        "dtypes": {"bfloat16": 2, "float32": 2},
        "states": ["model", "optimizer", "empty", "3", "hook"],
        "views": {"hf": {"n_tensors": 2}},
        "refused": [{"key": "hook", "class": "os.system", "reason": "an object"}],
        "warnings": ["one object was refused", "a key was dropped"],
    }


@pytest.mark.parametrize(
    "fields",
    [
        {"format": "safetensors", "release": None},
        {"format": "torch-zip", "tree": Container("dict", ("model.w", "head.w"), ("model.w", "head.w"))},
    ],
)
def test_flat_state_dict_counts_everything(fields: dict[str, Any]) -> None:
    source = source_of({"model.w": np.zeros((2, 3), np.float32), "head.w": np.zeros(4, np.float32)}, **fields)
    found = facts(source)
    assert found["n_parameters"] == 10
    assert found["states"] == ["model", "head"]
    assert found["step"] is None


def test_no_model_state_counts_everything() -> None:
    tree = Container("dict", ("encoder",), (Container("dict", ("w",), ("encoder.w",)),))
    assert facts(source_of({"encoder.w": np.zeros(7, np.int8)}, tree=tree))["n_parameters"] == 7


class Damaged(ArrayTensor):
    def read_block(self, row: int, col: int, out: npt.NDArray[Any]) -> None:
        raise CorruptChunk("x.mdl", "global_step", 0, "damaged")


@pytest.mark.parametrize(
    ("value", "want"),
    [
        (5, 5),
        (np.array(6, np.int64), 6),
        (np.array([7], np.int32), 7),
        (np.array([1, 2]), None),
        (np.array(1.5), None),
        (True, None),
        (10**5000, None),
        ("9", None),
        (Damaged(np.array(1)), None),
    ],
    ids=lambda value: type(value).__name__,
)
def test_step(value: object, want: int | None) -> None:
    assert step(source_of({"global_step": value})) == want
