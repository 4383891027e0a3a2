"""The child process that indexes an HDF5 file: request in, JSON out, nothing else.

It runs with its own memory and CPU limits, so that a malformed file can neither crash nor starve the daemon. The
walker comes first and needs only the standard library; libhdf5 is loaded when the walker meets something it
leaves alone. Output: one JSON object, either ``{"error": text}``, an index (see `index`) or ``{"chunks": [...]}``.
"""

from __future__ import annotations

import base64
import contextlib
import gc
import json
import os
import re
import resource
import sys
from collections.abc import Callable, Iterable
from typing import Any

from ckptfs.errors import CorruptHeader
from ckptfs.formats import h5_pages, h5_walk
from ckptfs.formats.h5_messages import DAMAGE, Unsupported

MAX_MEMORY = 8 << 30
MAX_CPU_SECONDS = 300
_MIN_CPU_SECONDS = 4
_BYTES_A_SECOND = 256 << 10
"""Small files get less time, as libhdf5 runs in circles on some damaged ones. 100,000 keys, a file of 200 MB without
its data, take the walker two seconds."""
_NEW = ("dtypes", "is_bfloat16", "__BYTES__")
_OLD = ("__H5_TYPE__", "is_none", "is_string", "is_scalar", "is_constructible", "string_value", "string_val")
_OLD_DEFERRED = ("object_value", "key", "link_to_self", "filepath", "shape", "dtype", "fill_value", "jit_graph")
ATTRIBUTES = frozenset({*_NEW, *_OLD, *_OLD_DEFERRED})
"""Attributes of datasets that are reported: those that the reference ranks above the key's JSON, and all that
formats before 0.5 say about a dataset."""
FILE_ATTRIBUTES = frozenset({"__spec__", "__version__", "__cstorch_version__", "__SUCCESS__"})
SUFFIX = ".__metadata__"
_DROPPED = ("rtfx_dtypes", "compressed", "__NUMPY__", "__TORCH__", "__NONE__", "__BYTES__")
_PICKLE_PREFIX = 4096
_MAX_GRAPH = 4096
_MAX_VALUES = 100_000
"""Containers and commas in the JSON of one key, which describes one value."""


def main() -> None:
    """Serve the one request in ``sys.argv[1]``: JSON with fd, path, sys_path, chunks and library.

    With ``decode`` it is the file of which `h5_child_decode` decodes chunks.
    """
    _limit(resource.RLIMIT_AS, MAX_MEMORY)
    _limit(resource.RLIMIT_CORE, 0)
    request = json.loads(sys.argv[1])
    if "decode" in request:
        sys.path[:] = request["sys_path"]
        from ckptfs.formats import h5_child_decode

        h5_child_decode.serve(request["decode"])
        return
    _limit(
        resource.RLIMIT_CPU, min(MAX_CPU_SECONDS, _MIN_CPU_SECONDS + os.fstat(request["fd"]).st_size // _BYTES_A_SECOND)
    )
    gc.disable()  # nothing here is cyclic, and the process ends soon
    sys.stdout.write(respond(**request))


def _limit(what: int, most: int) -> None:
    """Lower a limit; a stricter one that is already set stays."""
    hard = resource.getrlimit(what)[1]
    most = most if hard == resource.RLIM_INFINITY else min(most, hard)
    resource.setrlimit(what, (most, hard))


def respond(fd: int, path: str, sys_path: list[str], chunks: str | None, library: bool) -> str:
    """As `answer`, as JSON. The objects are read by a process of their own, beside the root's attributes."""
    if chunks is not None or library:
        return _dumps(answer(fd, path, sys_path, chunks, library))
    listed = _beside(lambda: _listed(fd, path, sys_path))
    found = _guarded(lambda: _described(fd, path))
    text = listed()
    if text.startswith(_UNSUPPORTED) or "unsupported" in found:
        return _dumps(answer(fd, path, sys_path, None, True))
    if "error" in found:
        return _dumps(found)
    if text.startswith('{"error"'):
        return text
    if not text.endswith("}"):
        return _dumps({"error": "its metadata cannot be read: the process that reads them died"})
    return f"{_dumps(found)[:-1]},{text[1:]}"


def _beside(work: Callable[[], dict[str, Any]]) -> Callable[[], str]:
    """Begin *work* in another process; the function that is returned waits for what came out, as JSON.

    The path of errors is that of `_guarded`. An empty text: the process died.
    """
    receive, send = os.pipe()
    if os.fork() == 0:
        try:
            os.close(receive)
            with open(send, "w") as out:
                out.write(_dumps(_guarded(work)))
        finally:
            os._exit(0)
    os.close(send)

    def result() -> str:
        with open(receive) as found:
            return found.read()

    return result


def _dumps(value: Any) -> str:
    return json.dumps(value, separators=(",", ":"))  # json.dump is four times slower


_UNSUPPORTED = '{"unsupported"'


def answer(fd: int, path: str, sys_path: list[str], chunks: str | None, library: bool) -> dict[str, Any]:
    """The index, or the chunk table of the object *chunks*; every failure as ``{"error": text}``."""

    def work() -> dict[str, Any]:
        if chunks is None:
            return index(fd, path, sys_path, library=library)
        return {"chunks": _with_library(fd, path, sys_path, lambda h5, file: h5.chunk_table(file, chunks))}

    found = _guarded(work)
    return {"error": f"its metadata cannot be read ({found['unsupported']})"} if "unsupported" in found else found


def _guarded(work: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """What *work* gives; its failures as ``{"error": text}`` or ``{"unsupported": text}``."""
    try:
        return work()
    except Unsupported as error:
        return {"unsupported": str(error)}
    except CorruptHeader as error:
        return {"error": str(error).removeprefix(f"{error.path}: ")}
    except DAMAGE as error:
        return {"error": f"its metadata are damaged ({error})"}
    except (MemoryError, OSError, RecursionError, RuntimeError, KeyError) as error:
        return {"error": f"its metadata cannot be read ({type(error).__name__}: {error})"}


def index(fd: int, path: str, sys_path: list[str], *, library: bool = False) -> dict[str, Any]:
    """``base``: file offset of HDF5's address 0; ``file``: root attributes; ``metadata`` and ``fields``: see
    `Metadata`; ``objects`` and ``records``: see `_shared_record`. With *library* all comes from libhdf5, to compare.
    """
    try:
        if library:
            raise Unsupported("as asked")
        return _described(fd, path) | _listed(fd, path, sys_path)
    except Unsupported:
        base = _opened(fd, path)[0].base
        found: dict[str, Any] = _with_library(fd, path, sys_path, lambda h5, f: _library_index(h5, f, base))
        return found


def _opened(fd: int, path: str) -> tuple[h5_pages.MetadataFile, int]:
    """The file, and the address of its root group."""
    file = h5_pages.MetadataFile(fd, path)
    return file, h5_pages.open_superblock(file)


def _described(fd: int, path: str) -> dict[str, Any]:
    """What the root's attributes say: ``file``, ``metadata`` and ``fields``."""
    file, root = _opened(fd, path)
    return _file_and_keys(h5_walk.root_attributes(file, root))


def _listed(fd: int, path: str, sys_path: list[str]) -> dict[str, Any]:
    """What the file holds: ``base``, ``objects`` and ``records``."""
    file, root = _opened(fd, path)
    objects = dict(h5_walk.walk_objects(file, root, ATTRIBUTES))
    missing = [name for name, record in objects.items() if "library" in record]
    if missing:

        def complete(h5: Any, opened: Any) -> None:
            objects.update((name, h5.record_at(opened, name, ATTRIBUTES)) for name in missing)

        _with_library(fd, path, sys_path, complete)
    return {"base": file.base, **_objects_and_records(objects)}


def _library_index(h5: Any, file: Any, base: int) -> dict[str, Any]:
    found = _objects_and_records(dict(h5.walk_objects(file, ATTRIBUTES)))
    return {"base": base, **_file_and_keys(h5.root_attributes(file)), **found}


def _with_library(fd: int, path: str, sys_path: list[str], use: Any) -> Any:
    """*use(h5_library, file)* with libhdf5 loaded; the child starts without site-packages, to start fast."""
    sys.path[:] = sys_path
    from ckptfs.formats import h5_library

    try:
        file = h5_library.open_file(fd)
    except h5_library.FAILURES as error:
        raise CorruptHeader(path, f"libhdf5 cannot open it ({error})") from error
    with contextlib.closing(file):
        return use(h5_library, file)


def _file_and_keys(attributes: Iterable[tuple[str, Any]]) -> dict[str, Any]:
    file: dict[str, Any] = {}
    metadata = Metadata()
    for name, value in attributes:
        if name in FILE_ATTRIBUTES:
            file[name] = None if isinstance(value, bytes) else value
        elif name.endswith(SUFFIX):
            metadata.add(name[: -len(SUFFIX)], value)
    return {"file": file, "metadata": metadata.keys, "fields": metadata.fields}


def _objects_and_records(objects: dict[str, dict[str, Any]]) -> dict[str, Any]:
    kinds: dict[Any, int] = {}
    records: list[dict[str, Any]] = []
    shared = {name: _shared_record(record, kinds, records) for name, record in objects.items()}
    return {"objects": shared, "records": records}


class Metadata:
    """The JSON of each key, as ``[names that are values, {stored name: fields}]`` or the reason why not (text).

    The usual key is one value under its own name. Its entry is a number: the place of its fields in *fields*, which
    the many tensors of one shape and dtype share. Their JSON differs only in the key, so most of it is not even
    parsed: texts that are equal after the key is cut out have the same fields.
    """

    def __init__(self) -> None:
        self.keys: dict[str, Any] = {}
        self.fields: list[Any] = []
        self._templates: dict[str, int] = {}

    def add(self, key: str, text: Any) -> None:
        """Take in the attribute of *key*."""
        template = _template(key, text)
        known = None if template is None else self._templates.get(template)
        if known is not None:
            self.keys[key] = known
            return
        self.keys[key] = found = _key_metadata(text)
        if isinstance(found, list) and found[0] == [key] and list(found[1]) == [key]:
            fields = found[1][key]
            self.keys[key] = len(self.fields)
            self.fields.append(fields)
            if template is not None and key not in json.dumps(fields):
                self._templates[template] = self.keys[key]


def _template(key: str, text: Any) -> str | None:
    """*text* with NUL for each occurrence of *key*; None where equal templates could differ in meaning.

    The key must be plain text with a letter that JSON has inside of strings only, and must not follow or lie in an
    escape sequence.
    """
    if not isinstance(text, str) or not _PLAIN(key) or not _IN_STRING(key) or "\0" in text:
        return None
    template = text.replace(key, "\0")
    return None if "\\\0" in template or "\\u" in template else template


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


def _shared_record(record: dict[str, Any], kinds: dict[Any, int], records: list[dict[str, Any]]) -> Any:
    """A record fit for JSON; ``[place in records, address]`` for datasets, which differ in little but the address."""
    layout = record.get("layout")
    if not layout or layout[0] == "compact":
        _encode(record)
        return record
    place = 1 if layout[0] == "contiguous" else 2
    address, rest = layout[place], layout[:place] + layout[place + 1 :]
    kind = (
        record["shape"],
        record["type"],
        record["filters"],
        record["fill"],
        rest,
        str(record["attrs"]),
        record.get("link"),
    )
    known = kinds.get(kind)
    if known is None:
        known = kinds[kind] = len(records)
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
    attributes = record.get("attrs", {})
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
    """What a pickle holds, as far as its opcodes say so: a literal's type, or the first global that it names.

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
