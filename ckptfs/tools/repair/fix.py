"""What has to change in a checkpoint (`plan_fix`), and the change, which a child process makes (`child`)."""

from __future__ import annotations

import errno
import json
import os
import subprocess
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import Any
from urllib.parse import quote, unquote

import numpy as np

from ckptfs.errors import CorruptHeader, SourceError, UsageError, WriteError
from ckptfs.formats.files import open_file, read_exactly
from ckptfs.formats.hdf5.dataset import make_tensor, stored_dtype
from ckptfs.formats.hdf5.index import Index, read_index
from ckptfs.formats.hdf5.workers import child_command
from ckptfs.tensors.cache import shared
from ckptfs.tensors.source_file import SourceFile
from ckptfs.tensors.tensor import n_elements
from ckptfs.tools.repair.rules import STEP, aliases, last_epochs
from ckptfs.tools.repair.spec import fixed_spec
from ckptfs.tools.write import Output, new_file

FIRST_JSON_VERSION = 0.5
"""The first format whose spec is not a pickle."""
_PIECE = 8 << 20
Progress = Callable[[int], object]


@dataclass(frozen=True, slots=True)
class Fix:
    """What has to change in one checkpoint; names are those of its datasets (quoted keys)."""

    path: str
    spec: str
    links: dict[str, str]
    """New name to the stored one."""
    values: dict[str, int]
    """``last_epoch`` of each scheduler."""
    has_step: bool
    """Whether there is a ``global_step``, without which *values* is empty."""
    nbytes: int
    """Size of the file."""


def plan_fix(path: str) -> Fix:
    """What has to change in the checkpoint at *path*; reads a few numbers, no other data.

    Raises `UsageError` for a checkpoint of format 0.5 and `MissingKeys` for keys whose data cannot be found.
    """
    index = read_index(path)
    try:
        stored = {unquote(name): name for name in index.objects if "/" not in name}
        spec, keys = fixed_spec(_old_spec(index), path)
        links = aliases(path, keys, stored)
        values = last_epochs(path, stored, lambda key: _number(index, stored[key])) if STEP in stored else {}
        return Fix(
            path,
            spec,
            {quote(new, safe=""): stored[known] for new, known in links.items()},
            {stored[key]: value for key, value in values.items()},
            STEP in stored,
            index.file.size,
        )
    finally:
        index.file.discard()


def _old_spec(index: Index) -> str:
    version, spec = index.attributes.get("__version__"), index.attributes.get("__spec__")
    if isinstance(version, (int, float)) and version >= FIRST_JSON_VERSION:
        raise UsageError(f"{index.file.path}: has format {version:g}, whose tree spec needs no repair")
    if not isinstance(spec, str):
        raise UsageError(f"{index.file.path}: has no tree spec (attribute __spec__) that could be repaired")
    return spec


def _number(index: Index, name: str) -> int:
    """The value of a dataset with one element."""
    found = index.get(name)
    dtype = stored_dtype(found) if found and found.problem is None else None
    if found is None or dtype is None or found.shape is None or n_elements(found.shape) != 1:
        raise CorruptHeader(index.file.path, f"{name}: is not a number")
    word = np.empty((1, 1), dtype.storage_dtype)
    make_tensor(index, name, found, dtype, shared()).read_block(0, 0, word)
    value = word.view(dtype.numpy)[0, 0].item()
    if not isinstance(value, (int, float)) or value != value or abs(value) >= 1 << 63:
        raise CorruptHeader(index.file.path, f"{name}: {value!r} is not a count of steps")
    return int(value)


def write_fixed(fix: Fix, target: str, *, force: bool = False, progress: Progress | None = None) -> None:
    """Write a repaired copy to *target*: whole under its name or not at all. Its data is unfiltered.

    Raises `UsageError` for a *target* that exists, unless *force*; `SourceError` naming the dataset that cannot be
    read; `WriteError` when the disk is full or fails.
    """
    source = open_file(fix.path)
    try:
        with new_file(target, force=force) as output:
            _change(fix, source, output, progress)
    finally:
        source.discard()


def fix_in_place(fix: Fix, *, progress: Progress | None = None) -> None:
    """Repair the checkpoint itself: a repaired copy, with the same filters, takes its name when it is complete.

    Its mode stays, and so does its owner where we may set it. Errors, all of which leave it as it was, are those of
    `write_fixed`.
    """
    target = os.path.realpath(fix.path)  # a link goes on pointing at it
    source = open_file(target)
    try:
        with new_file(target, force=True) as output:
            _copy(source, output, progress)
            status = os.fstat(source.fd)
            with suppress(PermissionError):
                os.fchown(output.fd, status.st_uid, status.st_gid)
            _change(fix, None, output, None)
            os.fchmod(output.fd, status.st_mode & 0o7777)
    finally:
        source.discard()


def _copy(source: SourceFile, output: Output, progress: Progress | None) -> None:
    for offset in range(0, source.size, _PIECE):
        data = read_exactly(source, offset, min(_PIECE, source.size - offset), "its data")
        output.write_at(offset, data)
        if progress is not None:
            progress(len(data))


def _change(fix: Fix, source: SourceFile | None, output: Output, progress: Progress | None) -> None:
    """Let the child fill *output* from *source*, or change it as it is (None)."""
    files = [output.fd] if source is None else [output.fd, source.fd]
    request: dict[str, Any] = {"source": source and source.fd, "target": output.fd}
    request |= {"spec": fix.spec, "links": fix.links, "values": fix.values}
    command = child_command({}, module="ckptfs.tools.repair.child")
    try:
        child = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, pass_fds=files, text=True
        )
    except OSError as error:
        raise SourceError(fix.path, f"the process that repairs it does not start: {error}") from error
    with child:
        try:
            last = _follow(child, json.dumps(request), progress)
        finally:
            child.kill()  # it has said all, or we were interrupted
    if last != "done":
        _fail(fix, output, last)


def _follow(child: subprocess.Popen[str], request: str, progress: Progress | None) -> Any:
    """The last thing that the child says; None when it dies before."""
    assert child.stdin is not None
    assert child.stdout is not None
    with suppress(BrokenPipeError):
        child.stdin.write(request)
        child.stdin.close()
    for line in child.stdout:
        said = json.loads(line)
        if not isinstance(said, int):
            return said
        if progress is not None:
            progress(said)
    return None


def _fail(fix: Fix, output: Output, said: Any) -> None:
    if not isinstance(said, dict):
        raise CorruptHeader(fix.path, "cannot be repaired: libhdf5 crashed on it")
    if said["name"] is not None:
        raise SourceError(fix.path, f"{unquote(said['name'])}: cannot be read ({said['error']})")
    if said["errno"] is None and "errno = " not in said["error"]:
        raise CorruptHeader(fix.path, f"cannot be repaired: {said['error']}")
    number = said["errno"] or int(said["error"].partition("errno = ")[2].partition(",")[0])
    raise WriteError(output.target, number or errno.EIO, "while the repaired copy was written")
