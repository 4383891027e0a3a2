"""The tree spec of a checkpoint: the nested containers, and the flattened key of each leaf.

``__spec__`` is JSON ``[example, treespec]``; treespec is JSON text ``[1, node]``; a node is
``{"type": T, "context": C, "children_spec": [node, …]}`` with C again JSON text, and type null for a leaf. The
flattened key joins dict keys and positions with dots. Only the known container types are accepted; nothing is
imported or called by name.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

from ckptfs.errors import CorruptHeader
from ckptfs.formats.source import Container

MAX_DEPTH = 300
MAX_NODES = 10_000_000
MAX_VALUES = 5_000_000
"""Containers and commas in its text: three bytes can ask for a hundred in memory. 100,000 keys have 800,000."""
MAX_KEY_CHARS = 64 << 20
"""Characters of all flattened keys together: long keys on many levels multiply."""
PROTOCOL = 1
_DICTS = {"builtins.dict": "dict", "collections.OrderedDict": "OrderedDict"}
SEQUENCES = {
    "builtins.list": "list",
    "builtins.tuple": "tuple",
    "builtins.set": "set",
    "collections.deque": "deque",
    "collections.namedtuple": "namedtuple",
}


@dataclass(slots=True)
class Walk:
    """What a walk through a tree spec collects, and its limits."""

    path: str
    max_nodes: int = MAX_NODES
    keys: list[str] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)
    n_nodes: int = 0
    n_chars: int = 0
    nulls: bool = False
    """Whether None stands for a leaf."""


def parse_spec(text: str, path: str) -> tuple[Container, list[str], list[str]]:
    """(tree, flattened keys in order, warnings) of a ``__spec__`` attribute.

    A key that two leaves share is in the list once. Raises `CorruptHeader` for broken JSON, an unknown protocol
    or container type, and for trees deeper than `MAX_DEPTH`.
    """
    try:
        outer = _loads(text, path)
        (protocol, root), nulls = _loads_tree(outer[1], path)
    except RecursionError as error:
        raise CorruptHeader(path, f"its tree spec is nested deeper than {MAX_DEPTH} levels") from error
    except (ValueError, TypeError, LookupError, AttributeError) as error:
        raise CorruptHeader(path, f"its tree spec (attribute __spec__) is broken ({error})") from error
    if protocol != PROTOCOL:
        raise CorruptHeader(path, f"its tree spec has protocol {protocol!r:.40}; only {PROTOCOL} is known")
    walk = Walk(path, nulls=nulls)
    try:
        tree = "" if nulls and root is None else _node(walk, "", root, 0)
    except RecursionError as error:
        raise CorruptHeader(path, "its tree spec has a context that is nested too deeply") from error
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise CorruptHeader(path, f"its tree spec (attribute __spec__) is broken ({error})") from error
    return finish(walk, tree)


def _loads(text: str, path: str, n_more: int = 0) -> Any:
    if sum(text.count(mark) for mark in "{[,") + n_more > MAX_VALUES:
        raise CorruptHeader(path, f"its tree spec has more than {MAX_VALUES} values")
    return json.loads(text)


def _loads_tree(text: str, path: str) -> tuple[Any, bool]:
    """The JSON of a treespec, and whether None stands for a leaf.

    Most of the text is the JSON of leaves, which is replaced by null before parsing. That text is always a leaf: inside
    a string its quotes would be escaped. A tree that has other nulls is parsed as it is.
    """
    n = text.count(_LEAF)
    short = text.replace(_LEAF, "null")
    if short.count("null") != n + short.count('": null') + short.count('"null"'):  # the context of a list is "null"
        return _loads(text, path), False
    return _loads(short, path, 4 * n), True


_LEAF = '{"type": null, "context": null, "children_spec": []}'


def enter(walk: Walk, key: str, depth: int) -> None:
    """Account for one node of the tree; `CorruptHeader` when there are too many or it is too deep."""
    walk.n_nodes += 1
    walk.n_chars += len(key)
    if depth > MAX_DEPTH:
        raise CorruptHeader(walk.path, f"its tree spec is nested deeper than {MAX_DEPTH} levels")
    if walk.n_nodes > walk.max_nodes or walk.n_chars > MAX_KEY_CHARS:
        raise CorruptHeader(walk.path, "its tree spec is unreasonably large")


def finish(walk: Walk, tree: Container | str) -> tuple[Container, list[str], list[str]]:
    """(tree, keys, warnings) of a walk that is done, each key once."""
    if isinstance(tree, str):
        raise CorruptHeader(walk.path, "its tree spec holds a single value, not a state dict")
    keys = list(dict.fromkeys(walk.keys))
    if len(keys) < len(walk.keys):
        twice = sorted(_repeated(walk.keys))
        walk.warnings.append(f"several entries have the same flattened key and share its data: {', '.join(twice[:8])}")
    return tree, keys, walk.warnings


def _repeated(keys: Sequence[str]) -> set[str]:
    seen: set[str] = set()
    return {key for key in keys if key in seen or seen.add(key)}  # type: ignore[func-returns-value]


def _node(walk: Walk, key: str, spec: dict[str, Any], depth: int) -> Container | str:
    kind, children = spec["type"], spec["children_spec"]
    if kind is None:
        return _leaf(walk, key, depth)
    enter(walk, key, depth)
    name, keys, parts = _container(walk, key, kind, spec["context"], len(children))
    prefix = f"{key}." if depth else ""
    made: list[Container | str] = []
    for part, child in zip(parts, children, strict=False):
        if child is None and walk.nulls:
            made.append(_leaf(walk, prefix + part, depth + 1))
        else:
            made.append(_node(walk, prefix + part, child, depth + 1))
    return Container(name, keys, tuple(made))


def _leaf(walk: Walk, key: str, depth: int) -> str:
    enter(walk, key, depth)
    walk.keys.append(key)
    return key


def _container(
    walk: Walk, key: str, kind: str, context: Any, n: int
) -> tuple[str, tuple[object, ...] | None, list[str]]:
    """(type of the node, dict keys or None, path component of each child)."""
    if kind in SEQUENCES:
        return SEQUENCES[kind], None, [str(i) for i in range(n)]
    if isinstance(context, str):
        context = _context(context)
    if kind == "collections.defaultdict":
        return _defaultdict(walk, key, context, n)
    if kind not in _DICTS:
        raise CorruptHeader(walk.path, f"its tree spec names the unknown container type {kind!r:.80}")
    keys = _plain_keys(context)
    if len(keys) != n:
        raise ValueError(f"{len(keys)} keys for {n} entries")
    return _DICTS[kind], keys, [str(k) for k in keys]


@lru_cache(maxsize=256)
def _context(text: str) -> Any:
    """The parsed context of a container, which nobody changes. Thousands of an optimizer's containers share one."""
    return json.loads(text)


def _plain_keys(keys: Any) -> tuple[object, ...]:
    """Keys that a dict can have."""
    if not isinstance(keys, list) or not all(isinstance(k, (str, int, float, bool, type(None))) for k in keys):
        raise ValueError("the keys of a dict are not a list of texts and numbers")
    return tuple(keys)


def _defaultdict(walk: Walk, key: str, context: Any, n: int) -> tuple[str, tuple[object, ...] | None, list[str]]:
    """The writer names the entries of a defaultdict after its factory and its list of keys, and loses the others."""
    keys, module, factory = context["dict_context"], context["default_factory_module"], context["default_factory_name"]
    shown = factory if module == "builtins" else f"{module}.{factory}"
    parts = [f"<class '{shown}'>", str(keys)][: min(n, len(keys))]
    if n > len(parts):
        lost = ", ".join(str(k) for k in keys[2:10])
        walk.warnings.append(f"{key or 'the state dict'}: the writer lost entries of a defaultdict ({lost})")
    return "dict", _plain_keys(keys[: len(parts)]), parts
