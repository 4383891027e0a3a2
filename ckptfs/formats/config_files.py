"""Model configs as people write them: YAML and JSON files, read as plain data within bounds.

YAML lets a few hundred bytes stand for millions of values (aliases of aliases, merges of merges), and nesting has no
limit. The text is therefore parsed into events and nodes first, both in time proportional to its length; what these
would expand to is counted before anything is built.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

from ckptfs.errors import ConfigError, CorruptHeader, MissingFile, UsageError
from ckptfs.formats.files import json_object

MAX_BYTES = 16 << 20
MAX_VALUES = 100_000
"""Values of a YAML config with all its aliases expanded; real ones have a few thousand."""
MAX_DEPTH = 100
MAX_SCALAR = 1 << 16
"""Characters of one value: YAML reads ``1:1:1…`` as a number, in quadratic time."""


def read_config_file(path: str | os.PathLike[str]) -> Mapping[str, Any]:
    """The mapping in a YAML or JSON file, told apart by the suffix ``.json``.

    Raises `UsageError` when the file cannot be read, `ConfigError` when it is not valid, not a mapping, or beyond the
    bounds of this module.
    """
    name = os.fspath(path)
    try:
        with open(name, "rb") as file:
            data = file.read(MAX_BYTES + 1)
    except FileNotFoundError as error:
        raise MissingFile(name, "cannot read the config: no such file or folder") from error
    except OSError as error:
        raise UsageError(f"{name}: cannot read the config: {error.strerror}") from error
    if len(data) > MAX_BYTES:
        raise ConfigError(f"{name}: the config has more than {MAX_BYTES >> 20} MiB; give the model's config file")
    if name.endswith(".json"):
        try:
            return json_object(data, name, "the config")
        except CorruptHeader as error:
            raise ConfigError(str(error)) from error
    return _yaml(data, name)


def _yaml(data: bytes, name: str) -> Mapping[str, Any]:
    import yaml

    try:
        text = data.decode("utf-8-sig")
        _check_events(text)
        loader = yaml.SafeLoader(text)
        node = loader.get_single_node()
        _check_expanded(node)
        value = loader.construct_document(node) if node is not None else None
    except (ValueError, RecursionError, yaml.YAMLError) as error:
        first = (str(error).splitlines() or [type(error).__name__])[0]
        raise ConfigError(f"{name}: the config is not valid YAML or JSON: {first}") from error
    if not isinstance(value, Mapping):
        raise ConfigError(f"{name}: the config is not a mapping")
    return value


def _check_events(text: str) -> None:
    """ValueError when *text* is nested too deeply, or has too many values or too long ones."""
    import yaml

    depth = 0
    for n, event in enumerate(yaml.parse(text, Loader=yaml.SafeLoader)):
        depth += isinstance(event, yaml.CollectionStartEvent) - isinstance(event, yaml.CollectionEndEvent)
        if depth > MAX_DEPTH:
            raise ValueError(f"it is nested more than {MAX_DEPTH} levels deep")
        if n > 2 * MAX_VALUES:
            raise ValueError(f"it has more than {MAX_VALUES} values")
        if isinstance(event, yaml.ScalarEvent) and len(event.value) > MAX_SCALAR:
            raise ValueError(f"a value has more than {MAX_SCALAR} characters")


def _check_expanded(root: Any) -> None:
    """ValueError when the node graph, written out as a tree, has too many values or no end."""
    import yaml

    sizes: dict[int, int | None] = {}

    def size(node: Any) -> int:
        known = sizes.get(id(node), 0)
        if known is None:
            raise ValueError("an alias stands for something that contains it")
        if known:
            return known
        sizes[id(node)] = None
        children: list[Any] = []
        if isinstance(node, yaml.SequenceNode):
            children = node.value
        elif isinstance(node, yaml.MappingNode):
            children = [part for pair in node.value for part in pair]
        n = 1 + sum(map(size, children))
        if n > MAX_VALUES:
            raise ValueError(f"it has more than {MAX_VALUES} values, its aliases expanded")
        sizes[id(node)] = n
        return n

    if root is not None:
        size(root)
