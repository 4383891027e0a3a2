"""The index of an HDF5 file in a form that is short in JSON, made from its attributes and objects."""

from __future__ import annotations

import base64
import json
import re
from collections.abc import Iterable
from typing import Any

FILE_ATTRIBUTES = frozenset({"__spec__", "__version__", "__cstorch_version__", "__SUCCESS__"})
SUFFIX = ".__metadata__"
_DROPPED = ("rtfx_dtypes", "compressed", "__NUMPY__", "__TORCH__", "__NONE__", "__BYTES__")
_PICKLE_PREFIX = 4096
_MAX_GRAPH = 4096
_ADDRESS_IN = {"contiguous": 1, "chunked": 2}
"""Position of the address in a layout."""
_MAX_VALUES = 100_000
"""Containers and commas in the JSON of one key, which describes one value."""


def file_attributes(attributes: Iterable[tuple[str, Any]]) -> dict[str, Any]:
    """``file``: the attributes of the root that describe the file."""
    found = {name: value for name, value in attributes if name in FILE_ATTRIBUTES}
    return {"file": {name: None if isinstance(value, bytes) else value for name, value in found.items()}}


def key_metadata(attributes: Iterable[tuple[str, Any]]) -> dict[str, Any]:
    """``metadata`` and ``fields``: the attributes of the root that describe keys, see `Metadata`."""
    metadata = Metadata()
    for name, value in attributes:
        if name.endswith(SUFFIX):
            metadata.add(name[: -len(SUFFIX)], value)
    return {"metadata": metadata.keys, "fields": metadata.fields}


def object_records(objects: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """``objects`` and ``records``: the datasets, see `_shared_record`."""
    numbers: dict[Any, int] = {}
    records: list[dict[str, Any]] = []
    by_attributes: dict[int, tuple[int, int, Any]] = {}
    shared = {}
    for name, record in objects.items():
        attributes = record.get("attrs")
        same = by_attributes.get(id(attributes))
        if same is not None:  # the same object, not an equal one: then `HeaderCache` found all else equal, too
            shared[name] = [same[0], record["layout"][same[1]]]
            continue
        shared[name] = found = _shared_record(record, numbers, records)
        if type(found) is list:
            by_attributes[id(attributes)] = found[0], _ADDRESS_IN[record["layout"][0]], attributes
    return {"objects": shared, "records": records}


class Metadata:
    """The JSON of each key, as ``[names that are values, {stored name: fields}]`` or the reason why not (text).

    The usual key is one value under its own name. Its entry is a number: the index of its fields in *fields*, which the
    many tensors of one shape and dtype share. Their JSON differs only in the key, so most of it is not parsed: texts
    that are equal after the key is removed have the same fields.
    """

    def __init__(self) -> None:
        self.keys: dict[str, Any] = {}
        self.fields: list[Any] = []
        self._templates: dict[str, int] = {}

    def add(self, key: str, text: Any) -> None:
        """Add the attribute of *key*."""
        template, number = _template(key, text)
        known = None if template is None else self._templates.get(template)
        if known is not None:
            self.keys[key] = known if number is None else self._new(self.fields[known] | {_SCALAR: number})
            return
        self.keys[key] = found = _key_metadata(text)
        if isinstance(found, list) and found[0] == [key] and list(found[1]) == [key]:
            fields = found[1][key]
            self.keys[key] = self._new(fields)
            if template is not None and _is_sound(template, key, fields, number):
                self._templates[template] = self.keys[key]

    def _new(self, fields: dict[str, Any]) -> int:
        self.fields.append(fields)
        return len(self.fields) - 1


def _is_sound(template: str, key: str, fields: dict[str, Any], number: int | None) -> bool:
    """Whether equal templates always mean these *fields*, except for their number."""
    escapes = "\\\0" in template or "\\u" in template  # after a backslash the key could mean something else
    same = number is None or (type(fields.get(_SCALAR)) is int and fields[_SCALAR] == number)
    return same and not escapes and key not in json.dumps(fields)


def _template(key: str, text: Any) -> tuple[str | None, int | None]:
    """*text* with NUL for each occurrence of *key* and byte 1 for its integer value, and that value.

    None where equal templates could have different meanings: the key must be plain text with a letter that JSON has
    inside of strings only.
    """
    if not isinstance(text, str) or "\0" in text or "\1" in text:
        return None, None
    # an identifier is plain text, and faster to recognise
    if not (((key.isascii() and key.replace(".", "").isidentifier()) or _PLAIN(key)) and _IN_STRING(key)):
        return None, None
    template = text.replace(key, "\0")
    found = _NUMBER(template) if _SCALAR in template else None
    if found is None or template.count(_SCALAR) > 1:
        return template, None
    return f"{template[: found.start(1)]}\1{template[found.end(1) :]}", int(found[1])


_SCALAR = "scalar_value"
_NUMBER = re.compile(r'\n {8}"scalar_value": (-?[1-9][0-9]{0,17}|0),\n').search
_PLAIN = re.compile(r"[A-Za-z0-9_.-]+").fullmatch
_IN_STRING = re.compile(r"[b-dgj-kmo-qv-xzA-HJ-MO-Z_]").search  # not in true, false, null, NaN, Infinity, 1e5


def _key_metadata(text: Any) -> Any:
    try:
        if sum(text.count(mark) for mark in "{[,") > _MAX_VALUES:
            return "its metadata are unreasonably large"
        found = json.loads(text)
        names = found["__objects__"]
        fields = {name[: -len(SUFFIX)]: value for name, value in found.items() if name.endswith(SUFFIX)}
        for value in fields.values():
            for dropped in _DROPPED:
                value.pop(dropped, None)
            if len(value.get("jit_graph", "")) > _MAX_GRAPH:
                del value["jit_graph"]
        return [names, fields]
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        return f"its metadata are no usable JSON ({type(error).__name__})"


def _shared_record(record: dict[str, Any], numbers: dict[Any, int], records: list[dict[str, Any]]) -> Any:
    """A record fit for JSON; ``[index into records, address]`` for datasets: most differ in the address alone."""
    layout = record.get("layout")
    if not layout or layout[0] == "compact":
        _encode(record)
        return record
    position = _ADDRESS_IN[layout[0]]
    address, rest = layout[position], layout[:position] + layout[position + 1 :]
    identity = (
        record["shape"],
        record["type"],
        record["filters"],
        record["fill"],
        rest,
        str(record["attrs"]),
        record.get("link"),
    )
    known = numbers.get(identity)
    if known is None:
        known = numbers[identity] = len(records)
        _encode(record)
        records.append(record)
    return [known, address]


def _encode(record: dict[str, Any]) -> None:
    """Make a record fit for JSON, in place."""
    if record.get("fill") is not None:
        record["fill"] = base64.b64encode(record["fill"]).decode()
    layout = record.get("layout")
    if layout and layout[0] == "compact":
        record["layout"] = ("compact", base64.b64encode(layout[1]).decode())
    attributes = {**record.get("attrs", {})}  # other records may share the object
    if attributes:
        record["attrs"] = attributes
    data = attributes.get("__BYTES__")
    if isinstance(data, bytes):
        attributes["__BYTES__"] = {"nbytes": len(data), "class": pickled_class(data[:_PICKLE_PREFIX])}
    for name, value in attributes.items():
        if isinstance(value, bytes):  # opaque data where text or numbers belong
            attributes[name] = None
    text = attributes.get("object_value")  # the same in hexadecimal, before 0.5
    if isinstance(text, str):
        attributes["object_value"] = {"nbytes": len(text) // 2, "class": pickled_class(_from_hex(text))}


def _from_hex(text: str) -> bytes:
    try:
        return bytes.fromhex(text[: 2 * _PICKLE_PREFIX])
    except ValueError:
        return b""


def pickled_class(prefix: bytes) -> str | None:
    """The class of a pickled object, as far as opcodes tell: a literal's type, or the first global that it names.

    The pickle is disassembled, never run; *prefix* may be cut anywhere.
    """
    import pickletools

    literals: list[Any] = []
    try:
        for code, argument, _ in pickletools.genops(prefix):
            if code.name in ("GLOBAL", "INST"):
                return str(argument).replace(" ", ".")
            if code.name == "STACK_GLOBAL" and literals[-2:] != ["dill._dill", "_load_type"]:
                return ".".join(str(part) for part in literals[-2:])
            if literals[-3:-1] == ["dill._dill", "_load_type"]:  # dill's way to name a built-in type
                return f"builtins.{literals[-1]}"
            if code.name == "STOP":
                break
            if code.name.startswith(("EMPTY_", "FROZENSET")):
                return code.name.removeprefix("EMPTY_").lower()
            if argument is not None and code.name not in ("PROTO", "FRAME", "BINPUT", "LONG_BINPUT"):
                literals.append(argument)
    except (ValueError, IndexError, UnicodeDecodeError):
        return _cut_literal(prefix)
    return f"builtins.{type(literals[0]).__name__}" if len(literals) == 1 else None


def _cut_literal(prefix: bytes) -> str | None:
    """The type of a long bytes or str literal whose end is not in *prefix*."""
    start = prefix[2:3]
    return {b"B": "builtins.bytes", b"C": "builtins.bytes", b"X": "builtins.str"}.get(start)
