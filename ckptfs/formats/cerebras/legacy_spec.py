"""The tree spec of formats 0.1 to 0.4: hexadecimal text of a pickled torch ``TreeSpec``, read without unpickling.

The pickle (dill, protocol 4) builds one object a node from a dict: ``type`` is the container's class, or None for a
leaf; ``context`` the list of a dict's keys, for a defaultdict ``[factory, keys]``, for a named tuple its class;
``children_specs`` the nodes below. `unpickler` reads it with a table of its own: a class is
only a name, and a call of anything but the two node classes and dill's ``_load_type`` is refused.
"""

from __future__ import annotations

from functools import partial

from ckptfs.errors import CorruptHeader, Unsafe
from ckptfs.formats.cerebras.spec import MAX_NODES, SEQUENCES, Walk, enter, finish
from ckptfs.formats.source import Container
from ckptfs.formats.torch.globals import Box, Global
from ckptfs.formats.torch.unpickler import MAX_PICKLE, OBJECT, unpickle

_NODE_CLASSES = {("torch.utils._pytree", "TreeSpec"), ("torch.utils._pytree", "LeafSpec")}
_DICTS = {
    "builtins.dict": "dict",
    "collections.OrderedDict": "OrderedDict",
    "cerebras_pytorch.utils.tensor_scalar_dict.TensorScalarDict": "dict",  # releases 1.7 to 1.9; later ones lack it
}
_MAX_ATTRIBUTES = 16
"""A node of torch 2.2 has six; nodes may be shared, so each visit must stay cheap."""


def parse_legacy_spec(text: str, path: str) -> tuple[Container, list[str], list[str]]:
    """(tree, flattened keys in order, warnings), as `spec.parse_spec`.

    Raises `Unsafe` naming what the pickle would call, `CorruptHeader` for everything else.
    """
    if len(text) > 2 * MAX_PICKLE:
        raise CorruptHeader(path, "its tree spec is unreasonably large")
    try:
        data = bytes.fromhex(text)
    except ValueError as error:
        raise CorruptHeader(path, f"its tree spec (attribute __spec__) is not hexadecimal text ({error})") from error
    root = unpickle(data, path, find=partial(_stand_in, path)).value
    # One byte of pickle makes at most one node, unless it names the same containers over and over.
    walk = Walk(path, max_nodes=min(MAX_NODES, len(data)))
    try:
        return finish(walk, _node(walk, "", root, 0))
    except (ValueError, TypeError, KeyError) as error:
        raise CorruptHeader(path, f"its tree spec (attribute __spec__) is broken ({error})") from error


def _stand_in(path: str, module: str, name: str) -> Global:
    """The value of a global: for a class, only its name."""
    if (module, name) in _NODE_CLASSES:
        return Global(f"{module}.{name}", lambda _: Box(OBJECT, []))
    if (module, name) == ("dill._dill", "_load_type"):
        return Global("dill._dill._load_type", _built_in)
    return Global(f"{module[:100]}.{name[:100]}", partial(_refuse, path, f"{module[:100]}.{name[:100]}"))


def _built_in(args: tuple[object, ...]) -> Global:
    """``_load_type("dict")``: how dill names a built-in class."""
    if len(args) != 1 or not isinstance(args[0], str):
        raise ValueError("a class without a name")
    return Global(f"builtins.{args[0][:100]}")


def _refuse(path: str, name: str, _: tuple[object, ...]) -> object:
    raise Unsafe(path, f"the pickle of its tree spec calls {name}, which ckptfs never does; do not load this file")


def _node(walk: Walk, key: str, spec: object, depth: int) -> Container | str:
    enter(walk, key, depth)
    if not isinstance(spec, Box) or spec.type != OBJECT or spec.keys is None or len(spec.keys) > _MAX_ATTRIBUTES:
        raise ValueError(f"{key[:200]!r} is not a node")
    said = dict(zip(spec.keys, spec.values, strict=True))
    kind, context, children = said["type"], said["context"], said["children_specs"]
    if kind is None:
        walk.keys.append(key)
        return key
    if not isinstance(kind, Global) or not isinstance(children, Box) or children.keys is not None:
        raise ValueError(f"{key[:200]!r} has no container type")
    name, keys = _container(walk, key, kind.name, context, len(children.values))
    parts = [str(part) for part in (range(len(children.values)) if keys is None else keys)]
    prefix = f"{key}." if depth else ""
    made = [_node(walk, prefix + part, child, depth + 1) for part, child in zip(parts, children.values, strict=True)]
    return Container(name, keys, tuple(made))


def _container(walk: Walk, key: str, kind: str, context: object, n: int) -> tuple[str, tuple[object, ...] | None]:
    """(type of the node, keys of a dict or None). A class that is not known is a dict when it has *n* keys."""
    if kind in SEQUENCES:
        return SEQUENCES[kind], None
    values = context.values if isinstance(context, Box) and context.keys is None else None
    if kind == "collections.defaultdict" and values is not None and len(values) == 2:
        values = values[1].values if isinstance(values[1], Box) else None
    elif kind not in _DICTS and values is not None:
        walk.warnings.append(f"{key or 'the state dict'}: is a {kind}, which is not known; it is shown as a dict")
    if values is None and (kind in _DICTS or kind == "collections.defaultdict"):
        raise ValueError(f"{key[:200]!r} is a dict without keys")
    if values is None:
        raise CorruptHeader(walk.path, f"its tree spec names the unknown container type {kind!r}")
    if len(values) != n or not all(isinstance(k, (str, int, float, bool, type(None))) for k in values):
        raise ValueError(f"{len(values)} keys for {n} entries")
    return _DICTS.get(kind, "dict"), tuple(values)
