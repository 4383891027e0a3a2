"""What each tensor can do: the table in the docstring of `ckptfs.tensors.tensor` says it, and says all of it."""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

import ckptfs
from ckptfs.tensors import tensor as module
from ckptfs.tensors.ranges import program_of, read_elements, read_transposed
from ckptfs.tensors.tensor import Prepared, Programmed, ReadsRanges, ReadsTransposed, Tensor
from tests.factories import ArrayTensor

PROTOCOLS = (ReadsRanges, ReadsTransposed, Programmed, Prepared)
ROOT = Path(ckptfs.__file__).parent


def tensor_classes() -> Iterator[type]:
    """Classes of ckptfs that have a method ``read_block``, but for the protocol."""
    for path in ROOT.rglob("*.py"):
        if "def read_block(" not in path.read_text():
            continue
        name = ".".join(("ckptfs", *path.relative_to(ROOT).with_suffix("").parts))
        for _, member in inspect.getmembers(importlib.import_module(name), inspect.isclass):
            if member.__module__ == name and hasattr(member, "read_block") and member is not Tensor:
                yield member


CLASSES = {member.__name__: member for member in tensor_classes()}


def table() -> dict[str, tuple[bool, ...]]:
    """Class to a flag for each protocol, from the columns of the docstring."""
    lines = (module.__doc__ or "").split("\n")
    rules = [i for i, line in enumerate(lines) if line.startswith("===")]
    edges = [i for i, mark in enumerate(" " + lines[rules[0]]) if (" " + lines[rules[0]])[i : i + 2] == " ="]
    rows = [lines[rules[0] + 1], *lines[rules[1] + 1 : rules[2]]]
    cells = [[row[a:b].strip() for a, b in zip(edges, [*edges[1:], None], strict=True)] for row in rows]
    assert cells[0][1:] == [protocol.__name__ for protocol in PROTOCOLS]
    assert all(cell in ("", "yes") for row in cells[1:] for cell in row[1:])
    return {row[0]: tuple(cell == "yes" for cell in row[1:]) for row in cells[1:]}


def test_the_table_has_every_tensor_class() -> None:
    assert sorted(table()) == sorted(CLASSES) == list(table())


@pytest.mark.parametrize("name", CLASSES)
def test_the_table_says_what_a_class_can_do(name: str) -> None:
    assert table()[name] == tuple(issubclass(CLASSES[name], protocol) for protocol in PROTOCOLS)


@pytest.mark.parametrize("name", CLASSES)
def test_methods_take_and_return_what_the_protocol_says(name: str) -> None:
    """issubclass compares names alone."""
    for protocol in (Tensor, *PROTOCOLS):
        for method, declared in inspect.getmembers(protocol, inspect.isfunction):
            found = getattr(CLASSES[name], method, None)
            if found is None or method.startswith("_"):
                continue
            want = inspect.signature(declared)
            assert list(inspect.signature(found).parameters) == list(want.parameters), method
            assert inspect.signature(found).return_annotation == want.return_annotation, method


def test_a_tensor_without_any_of_it_is_read_by_blocks() -> None:
    array = np.arange(60, dtype=np.int32).reshape(6, 10)
    tensor = ArrayTensor(array)
    assert not isinstance(tensor, PROTOCOLS)
    assert program_of(tensor) is None
    out = np.zeros(33, np.uint32)
    read_elements(tensor, 7, out)
    assert out.tolist() == list(range(7, 40))
    transposed = np.zeros((3, 2), np.uint32)
    read_transposed(tensor, 1, 4, transposed)
    assert (transposed == array[1:3, 4:7].T).all()
