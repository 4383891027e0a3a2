"""Tree specs of the old formats: stand-ins for torch's node classes, pickled under their names."""

from __future__ import annotations

import pickle
from collections.abc import Sequence
from typing import Any


class Class:
    """A class by name, as a pickle's global."""

    def __init__(self, module: str, name: str) -> None:
        self.module, self.name = module, name


class Call:
    """The call of a global."""

    def __init__(self, module: str, name: str, *args: Any) -> None:
        self.function, self.args = Class(module, name), args


def leaf() -> dict[str, Any]:
    return {"type": None, "context": None, "children_specs": [], "num_leaves": 1}


def tree(kind: object, keys: object, *children: object) -> dict[str, Any]:
    """A node; *kind* is the name of a built-in type, or any value."""
    made = Call("dill._dill", "_load_type", kind) if isinstance(kind, str) else kind
    return {"type": made, "context": keys, "children_specs": list(children)}


def spec_hex(root: dict[str, Any]) -> str:
    return spec_pickle(root).hex()


def spec_pickle(root: object) -> bytes:
    """The pickle of a tree of nodes, written by hand: the real classes need torch."""
    return b"\x80\x04" + _value(root) + b"."


def _text(value: str) -> bytes:
    data = value.encode()
    return b"X" + len(data).to_bytes(4, "little") + data


def _global(value: Class) -> bytes:
    return _text(value.module) + _text(value.name) + b"\x93"


def _value(value: object) -> bytes:
    if isinstance(value, dict):
        name = "LeafSpec" if value.get("type") is None else "TreeSpec"
        state = b"".join(_value(key) + _value(child) for key, child in value.items())
        return _global(Class("torch.utils._pytree", name)) + b")\x81}(" + state + b"ub"
    if isinstance(value, Class):
        return _global(value)
    if isinstance(value, Call):
        args = b"(" + b"".join(map(_value, value.args)) + b"t"
        return _global(value.function) + args + b"R"
    if isinstance(value, str):
        return _text(value)
    if isinstance(value, Sequence):
        return b"](" + b"".join(map(_value, value)) + b"e"
    return pickle.dumps(value, 2)[2:-1]  # a number or None, without PROTO and STOP
