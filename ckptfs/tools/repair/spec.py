"""The tree spec of formats 0.1 to 0.4, written again with ``dict`` for a class that later releases do not have.

`formats.cerebras.legacy_spec` describes the pickle. `formats.torch.unpickler`, which runs nothing, reads it. It is
written opcode by opcode: ``type``, ``context`` and ``children_specs`` of each node stay; the counts that newer torch
releases keep in a node are added.
"""

from __future__ import annotations

import pickle
import struct
from dataclasses import dataclass, field

from ckptfs.errors import CorruptHeader
from ckptfs.formats.cerebras.legacy_spec import parse_legacy_spec
from ckptfs.formats.torch.globals import Box, Global
from ckptfs.formats.torch.unpickler import OBJECT, unpickle

GONE = ("cerebras_pytorch.utils.tensor_scalar_dict", "TensorScalarDict")
_NODES = ("torch.utils._pytree", "TreeSpec"), ("torch.utils._pytree", "LeafSpec")
_BUILT_IN = ("dill._dill", "_load_type")
_NEWOBJ, _BUILD, _MEMOIZE = b")\x81", b"b", b"\x94"


def fixed_spec(text: str, path: str) -> tuple[str, list[str]]:
    """(the new ``__spec__``, flattened keys in order). Raises what `parse_legacy_spec` raises."""
    _, keys, _ = parse_legacy_spec(text, path)  # refuses calls, and what is not a tree
    data = bytes.fromhex(text)
    stream = _Stream(path, max_nbytes=4 * len(data) + 4096)
    stream.out += b"\x80\x04"
    _node(stream, unpickle(data, path, find=_stand_in).value)
    stream.out += b"."
    return stream.out.hex(), keys


def _stand_in(module: str, name: str) -> Global:
    """The value of a global: a class is its name, a node class makes a box, dill's function the class that it names."""
    if (module, name) in _NODES:
        return Global(name, lambda _: Box(OBJECT, []))
    if (module, name) == _BUILT_IN:
        return Global(name, lambda args: Global(f"dill\n{args[0]}"))
    return Global("dill\ndict" if (module, name) == GONE else f"{module}\n{name}")


@dataclass(slots=True)
class _Stream:
    """The pickle so far. Texts, classes and the leaf are written once; later uses take them from the memo."""

    path: str
    max_nbytes: int
    """Bytes that it may have: the parts of a hostile one may be shared again and again."""
    out: bytearray = field(default_factory=bytearray)
    memo: dict[object, int] = field(default_factory=dict)

    def recalled(self, key: object) -> bool:
        """Whether *key* was in the memo, and is now on the stack."""
        place = self.memo.get(key)
        if place is not None:
            self.out += b"h" + bytes([place]) if place < 256 else b"j" + struct.pack("<I", place)
        return place is not None

    def check_size(self) -> None:
        if len(self.out) > self.max_nbytes:
            raise CorruptHeader(self.path, "its tree spec (attribute __spec__) holds the same parts again and again")

    def remember(self, key: object) -> None:
        self.out += _MEMOIZE
        self.memo[key] = len(self.memo)


def _node(stream: _Stream, node: object) -> tuple[int, int]:
    """Write a node and what is below it; (nodes, leaves) written."""
    assert isinstance(node, Box)
    said = dict(zip(node.keys or (), node.values, strict=True))
    if said["type"] is None:
        _leaf(stream)
        return 1, 1
    children = said["children_specs"].values  # type: ignore[attr-defined]
    _open(stream, "TreeSpec")
    for name in ("type", "context"):
        _text(stream, name)
        _value(stream, said[name], 0)
    _text(stream, "children_specs")
    stream.out += b"]("
    counts = [_node(stream, child) for child in children]
    stream.out += b"e"
    n_nodes, n_leaves = 1 + sum(n for n, _ in counts), sum(n for _, n in counts)
    _close(stream, n_nodes, n_leaves, len(children))
    return n_nodes, n_leaves


def _leaf(stream: _Stream) -> None:
    if stream.recalled("leaf"):
        return
    _open(stream, "LeafSpec")
    for name, value in (("type", b"N"), ("context", b"N"), ("children_specs", b"]")):
        _text(stream, name)
        stream.out += value
    _close(stream, 1, 1, 0)
    stream.remember("leaf")


def _open(stream: _Stream, name: str) -> None:
    _global(stream, "torch.utils._pytree", name)
    stream.out += _NEWOBJ + b"}("


def _close(stream: _Stream, n_nodes: int, n_leaves: int, n_children: int) -> None:
    for name, n in (("num_nodes", n_nodes), ("num_leaves", n_leaves), ("num_children", n_children)):
        _text(stream, name)
        stream.out += _number(n)
    stream.out += b"u" + _BUILD
    stream.check_size()


def _value(stream: _Stream, value: object, depth: int) -> None:
    """Write a container's context: a class, a text, a number, None, or a list of those."""
    if isinstance(value, Global):
        _class(stream, value.name)
    elif isinstance(value, str):
        _text(stream, value)
    elif value is None or isinstance(value, (bool, int, float)):
        stream.out += _number(value)
    elif isinstance(value, Box) and value.type == "list" and depth < 2:
        stream.out += b"]("
        for part in value.values:
            _value(stream, part, depth + 1)
            stream.check_size()
        stream.out += b"e"
    else:
        raise CorruptHeader(stream.path, "its tree spec (attribute __spec__) has a context that is not known")


def _class(stream: _Stream, name: str) -> None:
    if stream.recalled(("class", name)):
        return
    module, _, rest = name.partition("\n")
    if module == "dill":
        _global(stream, *_BUILT_IN)
        _text(stream, rest)
        stream.out += b"\x85R"
        stream.remember(("class", name))
    else:
        _global(stream, module, rest)


def _global(stream: _Stream, module: str, name: str) -> None:
    if stream.recalled((module, name)):
        return
    _text(stream, module)
    _text(stream, name)
    stream.out += b"\x93"
    stream.remember((module, name))


def _text(stream: _Stream, text: str) -> None:
    if stream.recalled(text):
        return
    data = text.encode()
    stream.out += b"X" + struct.pack("<I", len(data)) + data
    stream.remember(text)


def _number(value: float | bool | None) -> bytes:
    return pickle.dumps(value, 2)[2:-1]  # without PROTO and STOP
