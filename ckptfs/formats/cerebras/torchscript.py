"""Deferred tensors that are a TorchScript graph: the simple ones, worked out; nothing is run.

A graph is simple when it is a chain of ``aten::mul``, ``div``, ``add`` and ``sub`` of one tensor with constants, which
is what scaling or shifting a loaded tensor leaves behind. It becomes the same steps on a lazy tensor.
"""

from __future__ import annotations

import re

from ckptfs.tensors.elementwise import FLOATS, Step, elementwise
from ckptfs.tensors.tensor import Tensor

REFUSAL = "is a TorchScript graph, which would have to be run"
MAX_TEXT = 4096
"""Characters of a graph that are looked at."""

_HEAD = re.compile(r"graph\((%[\w.]+) : \w+(?:\([^)]*\))?\):")
_CONSTANT = re.compile(r"(%[\w.]+) : (?:int|float|Scalar) = prim::Constant\[value=(-?[\d.]+(?:e[-+]?\d+)?)\]\(\)")
_CALL = re.compile(r"(%[\w.]+) : \w+(?:\([^)]*\))? = aten::(mul|div|add|sub)\(([^)]*)\)")
_RETURN = re.compile(r"return \((%[\w.]+)\)")


def steps_of(text: str) -> tuple[Step, ...] | None:
    """What a simple graph does to its only argument, None for any other graph."""
    lines = [line.split("#")[0].strip() for line in text.strip().splitlines()] if len(text) <= MAX_TEXT else []
    head, end = (_HEAD.fullmatch(lines[0]), _RETURN.fullmatch(lines[-1])) if len(lines) > 1 else (None, None)
    if head is None or end is None:
        return None
    at, constants, steps = head[1], dict[str, float](), list[Step]()
    for line in lines[1:-1]:
        if constant := _CONSTANT.fullmatch(line):
            constants[constant[1]] = float(constant[2])
            continue
        call = _CALL.fullmatch(line)
        names = [name.strip() for name in call[3].split(",")] if call else []
        if call is None or names[0] != at or len(names) < 2 or not set(names[1:]) <= constants.keys():
            return None
        at = call[1]
        steps.append(_step(call[2], [constants[name] for name in names[1:]]))
    return tuple(steps) if end[1] == at else None


def _step(name: str, numbers: list[float]) -> Step:
    """One call; the third argument of add and sub is a factor of the second."""
    if name == "mul":
        return "multiply", numbers[0]
    if name == "div":
        return "divide", numbers[0]
    shift = numbers[0] * (numbers[1] if len(numbers) > 1 else 1)
    return "add", shift if name == "add" else -shift


def simple(text: object, argument: Tensor | None) -> Tensor | None:
    """The tensor that a simple graph makes of *argument*; None when that cannot be said without running it."""
    steps = steps_of(text) if isinstance(text, str) else None
    if steps is None or argument is None or argument.dtype.name not in FLOATS:
        return None
    return elementwise(argument, *steps)
