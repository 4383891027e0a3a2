"""The child process that indexes an HDF5 file: request in, JSON out, nothing else.

It runs with its own memory and CPU limits, so that a malformed file can neither crash nor starve the daemon. The
walker comes first and needs only the standard library; libhdf5 is loaded when the walker meets something that it does
not support. Output: lines of JSON (see `respond`) that together are ``{"error": text}``, an index (see `index`) or
``{"chunks": [...]}``.
"""

from __future__ import annotations

import contextlib
import gc
import json
import os
import resource
import sys
from collections.abc import Callable, Iterator
from typing import Any

from ckptfs.errors import CorruptHeader
from ckptfs.formats.hdf5 import object_headers, superblock
from ckptfs.formats.hdf5.messages import DAMAGE, Unsupported
from ckptfs.formats.hdf5.summary import SUFFIX, file_attributes, key_metadata, object_records

MAX_MEMORY = 8 << 30
MAX_CPU_SECONDS = 300
_MIN_CPU_SECONDS = 4
_BYTES_A_SECOND = 256 << 10
"""Small files get less time, because libhdf5 loops on some damaged ones. The walker reads 100,000 keys (a file of 200
MB without its data) in two seconds."""
_NEW = ("dtypes", "is_bfloat16", "__BYTES__")
_OLD = ("__H5_TYPE__", "is_none", "is_string", "is_scalar", "is_constructible", "string_value", "string_val")
_FLAT = ("string_shape", "is_float8_e5m2", "is_float8_e4m3fn")
_OLD_DEFERRED = ("object_value", "key", "link_to_self", "filepath", "shape", "dtype", "fill_value", "jit_graph")
ATTRIBUTES = frozenset({*_NEW, *_OLD, *_OLD_DEFERRED, *_FLAT})
"""Attributes of datasets that are reported: those that the reference prefers to the key's JSON, and all those of
formats before 0.5."""


def main() -> None:
    """Serve the one request in ``sys.argv[1]``: JSON with fd, path, sys_path, chunks and library.

    With ``decode`` it names the file whose chunks `decode_worker` decodes.
    """
    _limit(resource.RLIMIT_AS, MAX_MEMORY)
    _limit(resource.RLIMIT_CORE, 0)
    request = json.loads(sys.argv[1])
    if "decode" in request:
        sys.path[:] = request["sys_path"]
        from ckptfs.formats.hdf5 import decode_worker

        decode_worker.serve(request["decode"])
        return
    _limit(
        resource.RLIMIT_CPU, min(MAX_CPU_SECONDS, _MIN_CPU_SECONDS + os.fstat(request["fd"]).st_size // _BYTES_A_SECOND)
    )
    gc.disable()  # nothing here is cyclic, and the process ends soon
    for line in respond(**request):
        sys.stdout.write(line + "\n")
        sys.stdout.flush()


def _limit(what: int, most: int) -> None:
    """Lower a limit; a stricter one that is already set stays."""
    hard = resource.getrlimit(what)[1]
    most = most if hard == resource.RLIM_INFINITY else min(most, hard)
    resource.setrlimit(what, (most, hard))


def respond(fd: int, path: str, sys_path: list[str], chunks: str | None, library: bool) -> Iterator[str]:
    """The answer as lines of JSON: objects, to be merged. A line with ``error`` revokes those before it.

    Attributes of the whole file come first, so that the reader can parse them meanwhile. Another process reads the
    datasets at the same time.
    """
    if chunks is not None or library:
        yield _dumps(answer(fd, path, sys_path, chunks, library))
        return
    listed = _beside(lambda: _listed(fd, path, sys_path))
    described, failed = _described(fd, path), False
    while not failed and (section := _guarded(lambda: next(described, {}))):
        failed = "error" in section or "unsupported" in section
        if not failed:
            yield _dumps(section)
    text = listed()
    if "unsupported" in section or text.startswith(_UNSUPPORTED):
        yield _dumps(answer(fd, path, sys_path, None, True))
    elif failed:
        yield _dumps(section)
    elif text.endswith("}"):
        yield text
    else:
        yield _dumps({"error": "its metadata cannot be read: the process that reads them died"})


def _beside(work: Callable[[], dict[str, Any]]) -> Callable[[], str]:
    """Start *work* in another process; the returned function waits for its result as JSON.

    Errors are those of `_guarded`. An empty text means that the process died.
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
    """The result of *work*; its failures as ``{"error": text}`` or ``{"unsupported": text}``."""
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
    """``base`` (file offset of HDF5's address 0), and attributes and objects in the form of `summary`.

    With *library* libhdf5 reads all of it, for comparison.
    """
    try:
        if library:
            raise Unsupported("as asked")
        of_file, of_keys = _described(fd, path)
        return of_file | of_keys | _listed(fd, path, sys_path)
    except Unsupported:
        base = _opened(fd, path)[0].base
        found: dict[str, Any] = _with_library(fd, path, sys_path, lambda h5, f: _library_index(h5, f, base))
        return found


def _opened(fd: int, path: str) -> tuple[superblock.MetadataFile, int]:
    """The file, and the address of its root group."""
    file = superblock.MetadataFile(fd, path)
    return file, superblock.open_superblock(file)


def _described(fd: int, path: str) -> Iterator[dict[str, Any]]:
    """The root's attributes: those of the file, then those of the keys."""
    file, root = _opened(fd, path)
    of_file, of_keys = object_headers.root_attributes(file, root, SUFFIX)
    yield file_attributes(of_file)
    yield key_metadata(of_keys)


def _listed(fd: int, path: str, sys_path: list[str]) -> dict[str, Any]:
    """The datasets of the file: ``base``, ``objects`` and ``records``."""
    file, root = _opened(fd, path)
    objects = dict(object_headers.walk_objects(file, root, ATTRIBUTES))
    missing = [name for name, record in objects.items() if "library" in record]
    if missing:

        def complete(h5: Any, opened: Any) -> None:
            objects.update((name, h5.record_at(opened, name, ATTRIBUTES)) for name in missing)

        _with_library(fd, path, sys_path, complete)
    return {"base": file.base, **object_records(objects)}


def _library_index(h5: Any, file: Any, base: int) -> dict[str, Any]:
    attributes = dict(h5.root_attributes(file)).items()
    described = file_attributes(attributes) | key_metadata(attributes)
    return {"base": base, **described, **object_records(dict(h5.walk_objects(file, ATTRIBUTES)))}


def _with_library(fd: int, path: str, sys_path: list[str], use: Any) -> Any:
    """*use(libhdf5, file)* with libhdf5 loaded, for which the child needs the site-packages."""
    sys.path[:] = sys_path
    from ckptfs.formats.hdf5 import libhdf5

    try:
        file = libhdf5.open_file(fd)
    except libhdf5.FAILURES as error:
        raise CorruptHeader(path, f"libhdf5 cannot open it ({error})") from error
    with contextlib.closing(file):
        return use(libhdf5, file)
